"""Threads and coroutines wait for room in turn, and none is lost when one gives up."""

import asyncio
import threading

import pytest
from round_robin import RoundRobin
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
    found = []

    def run():
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(FIRST)
        assert found
        value, error = found[0]
        if error:
            raise error
        return value

    return join


def test_threads_get_room_in_turn():
    flow = one_place()
    lease = flow.try_acquire()
    joins = []
    for n in range(3):
        joins.append(in_thread(lambda n=n: flow.acquire(n)))
        until(lambda n=n: len(flow._waiting) == n + 1)
    assert flow.try_acquire() is None  # not past those that wait
    for n, join in enumerate(joins):
        flow.ack(lease)
        lease = join()
        assert lease.item == n
    assert flow.in_flight == 1


def test_a_wait_that_takes_too_long_ends_and_takes_no_room():
    flow = one_place()
    lease = flow.try_acquire()
    with pytest.raises(TimeoutError, match=r"no consumer had room for a tuple within 0.01 s"):
        flow.acquire("late", timeout_s=0.01)
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
    joins = []
    for item, key in ((2, "k"), (3, "k")):
        joins.append(in_thread(lambda item=item, key=key: flow.acquire(item, key)))
        until(lambda: len(flow._waiting) == len(joins))
    other = in_thread(lambda: flow.acquire("other", "l"))
    until(lambda: len(flow._waiting) == 3)
    flow.add("c")  # room: for one more key at least
    assert other().item == "other"
    flow.ack(first)
    second = joins[0]()
    assert second.item == 2
    flow.ack(second)
    assert joins[1]().item == 3


def test_a_key_that_none_can_go_by_is_refused_before_it_waits():
    """Another thread's ack would raise it else, and lose those that wait."""
    flow = one_place(chooser=ByKey())
    lease = flow.try_acquire(1, "x")

    async def main():
        waits = asyncio.ensure_future(flow.acquire_async(2, "y"))
        await asyncio.sleep(0)
        for key, says in ((None, "key must be given, got"), ([], "must be hashable, got list")):
            with pytest.raises(TypeError, match=says):
                flow.try_acquire(3, key)
            with pytest.raises(TypeError, match=says):
                flow.acquire(3, key, timeout_s=5)
            with pytest.raises(TypeError, match=says):
                await asyncio.wait_for(flow.acquire_async(3, key), 5)
        assert flow.ack(lease)
        return await asyncio.wait_for(waits, 5)

    assert asyncio.run(main()).item == 2


def test_coroutines_wait_and_are_served_from_other_threads():
    flow = FlowController("ab", limit=lambda: Fixed(1), chooser=RoundRobin())
    done = []

    async def call(n):
        lease = await flow.acquire_async(n)
        assert flow.in_flight <= 2
        await asyncio.to_thread(flow.ack, lease)
        done.append(n)

    async def main():
        async with asyncio.timeout(FIRST):
            await asyncio.gather(*map(call, range(50)))

    asyncio.run(main())
    assert sorted(done) == list(range(50))
    assert flow.in_flight == 0


def test_a_cancelled_coroutine_gives_its_room_back():
    flow = one_place()

    async def main():
        lease = await flow.acquire_async()
        waiting = [asyncio.ensure_future(flow.acquire_async(n)) for n in range(3)]
        while len(flow._waiting) < 3:
            await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        flow.ack(lease)  # to the second, which is cancelled before it hears of it
        waiting[1].cancel()
        async with asyncio.timeout(FIRST):
            third = await waiting[2]
        assert third.item == 2
        assert flow.in_flight == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await flow.acquire_async()
        assert not flow._waiting
        flow.ack(third)

    asyncio.run(main())
    assert flow.in_flight == 0


def test_a_coroutine_that_waits_sees_time_outs():
    flow = one_place(timeout_s=0.02)

    async def main():
        await flow.acquire_async("lost")
        async with asyncio.timeout(FIRST):
            return await flow.acquire_async("next")

    assert asyncio.run(main()).item == "next"


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
