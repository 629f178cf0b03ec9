"""Threads wait for room, and none is lost when one gives up."""

import math
import threading
from concurrent.futures import Future
from functools import partial

import pytest
from simulated import MS, SimClock

from ackcore.flow import ByKey, Fixed, FlowController

FIRST = 30  # seconds in which anything that is right has happened


def one_place(**arguments):
    return FlowController(["a"], limit=lambda: Fixed(1), **arguments)


def until(condition):
    event = threading.Event()
    for _ in range(FIRST * 1000):
        if condition():
            return
        event.wait(0.001)
    raise AssertionError("it did not come to that")


def in_thread(work):
    """Start a thread; ``join()`` returns what it returned, or raises what it raised."""
    found = Future()

    def run():
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    # Not of a pool, for whose threads Python's exit would wait.
    threading.Thread(target=run, daemon=True).start()
    return partial(found.result, FIRST)


def test_each_thread_that_waits_gets_room():
    flow = one_place()
    lease = flow.try_acquire()
    joins = [in_thread(lambda n=n: flow.acquire(n)) for n in range(3)]
    until(lambda: flow._waiting == 3)
    assert flow.try_acquire() is None
    leases = [lease]
    for _ in joins:
        flow.ack(leases[-1])
        until(lambda: flow.in_flight == 1)
        leases.append(flow._windows.consumers["a"].sent[-1])
    assert {join().item for join in joins} == {0, 1, 2}
    assert flow.in_flight == 1


def test_a_wait_that_takes_too_long_ends_and_takes_no_room():
    flow = one_place()
    lease = flow.try_acquire()
    with pytest.raises(TimeoutError, match=r"no consumer had room for a tuple within 0.01 s"):
        flow.acquire("late", timeout_s=0.01)
    with pytest.raises(TimeoutError, match=r"no consumer had room for a tuple within nan s"):
        flow.acquire("late", timeout_s=math.nan)
    flow.ack(lease)
    assert flow.in_flight == 0
    assert flow.acquire("x").item == "x"


def test_a_wait_ends_with_a_time_out_of_another():
    flow = one_place(timeout_s=0.02)
    first = flow.try_acquire("lost")
    assert flow.acquire("next").item == "next"
    assert first.fate.value == "requeued"


def test_a_wait_ends_with_a_pause():
    flow = one_place()
    flow.pause("a", 0.02)
    assert flow.acquire("next", timeout_s=FIRST).item == "next"


def test_a_new_consumer_serves_those_that_wait():
    flow = FlowController()
    join = in_thread(lambda: flow.acquire("x"))
    until(lambda: flow._waiting)
    flow.add("late")
    assert join().name == "late"


def test_a_key_that_waits_stops_no_other():
    flow = FlowController("ab", limit=lambda: Fixed(9), chooser=ByKey(), clock=SimClock())
    first = flow.try_acquire(1, key="k")
    second = in_thread(lambda: flow.acquire(2, "k"))
    until(lambda: flow._waiting == 1)
    assert flow.acquire("other", "l").item == "other"
    flow.ack(first)
    assert second().item == 2


@pytest.mark.parametrize(
    ("key", "says"), [(None, "the key must not be None"), ([], "must be hashable, got list")]
)
def test_a_key_that_none_can_go_by_is_refused_before_it_waits(key, says):
    flow = one_place(chooser=ByKey())
    flow.try_acquire(1, "x")
    for ask in (flow.try_acquire, flow.acquire):
        with pytest.raises(TypeError, match=says):
            ask(3, key)


def test_threads_together_never_exceed_a_window_and_lose_nothing():
    flow = FlowController(range(3), limit=lambda: Fixed(2))
    most, lock, out = [0], threading.Lock(), [0]
    ended = []

    def work(worker):
        for n in range(300):
            lease = flow.try_again() if n % 7 == 0 else None
            lease = lease or flow.acquire((worker, n))
            with lock:
                out[0] += 1
                most[0] = max(most[0], out[0])
            with lock:
                out[0] -= 1
            if n % 5 or lease.attempt:
                flow.ack(lease)
                ended.append(lease.item)
            else:
                flow.fail(lease)

    joins = [in_thread(lambda worker=worker: work(worker)) for worker in range(8)]
    for join in joins:
        join()
    while lease := flow.try_again():
        flow.ack(lease)
        ended.append(lease.item)
    assert most[0] <= 6
    assert flow.in_flight == flow.requeued == 0
    assert len(ended) == len(set(ended))


def test_a_simulated_clock_needs_no_wait():
    clock = SimClock()
    flow = one_place(clock=clock)
    lease = flow.acquire()
    clock.now_ns += 5 * MS
    assert flow.ack(lease)
