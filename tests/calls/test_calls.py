"""Outcomes are in the order of the items, and no more is out, or kept, than was allowed."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_loop import SimCalls, called, states

from ackcore.calls import RateLimit, Reject, Retry, call_workers
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.flow import Fixed, RttThreshold


def values(outcomes):
    return [outcome.value for outcome in outcomes]


async def after_a_second(item):
    await asyncio.sleep(1)
    return item


@given(
    waits_ms=st.lists(st.integers(0, 200), max_size=60),
    window=st.integers(1, 8),
    buffered=st.integers(1, 8),
    data=st.data(),
)
def test_outcomes_keep_the_order_of_the_items_within_the_bounds(waits_ms, window, buffered, data):
    """Whichever answer is faster, whoever fails, and whenever the reader takes its time."""
    out = most = pulled = 0

    async def call(item):
        nonlocal out, most
        wait_ms = waits_ms[item]
        out += 1
        most = max(most, out)
        try:
            if wait_ms:
                await asyncio.sleep(wait_ms / 1000)
            if wait_ms % 5 == 1:
                raise ValueError(item)
            if wait_ms % 7 == 1:
                waits_ms[item] = 0
                raise Retry(after_s=0.05)
            return item
        finally:
            out -= 1

    def items():
        nonlocal pulled
        for item in range(len(waits_ms)):
            pulled += 1
            yield item

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_workers, "MOST_KEPT", buffered)
        calls = SimCalls(call, CallSettings(max_concurrency=window))
    with calls:
        for place, outcome in enumerate(calls.run(items())):
            assert pulled <= place + window + buffered
            if outcome.error is None:
                assert outcome.value == place
            else:
                assert outcome.error.args == (place,)
            calls.sim.now_ns += data.draw(st.sampled_from([0, 0, 0, 10**9]))
        assert pulled == len(waits_ms)
    assert most <= window


def test_a_window_of_calls_is_out_at_once():
    outcomes, calls = called(after_a_second, range(500), max_concurrency=50)
    assert values(outcomes) == list(range(500))
    assert calls.now_s == pytest.approx(10, abs=0.1)


def test_a_slow_answer_holds_up_no_other_call():
    """Only its outcome is waited for: 100 others are called meanwhile."""
    called = []

    async def call(item):
        called.append(item)
        await asyncio.sleep(10 if item == 0 else 0.1)

    with SimCalls(call, CallSettings(max_concurrency=2)) as calls:
        outcomes = calls.run(range(101))
        next(outcomes)
        assert len(called) >= 100
        assert calls.now_s == pytest.approx(10.1, abs=0.2)
        outcomes.close()


def test_calls_that_do_not_wait_are_made_in_place_by_one_coroutine():
    tasks = set()

    async def call(item):
        tasks.add(asyncio.current_task())
        return -item

    with Calls(call, CallSettings(max_concurrency=100)) as calls:
        assert values(calls.run(range(3000))) == [-item for item in range(3000)]
    assert len(tasks) == 1


def test_calls_that_do_not_wait_let_others_have_their_turn(monkeypatch):
    """An answer that has arrived is taken in while thousands of them are made."""
    order = []

    async def call(item):
        if item == 0:
            await asyncio.sleep(0)
        order.append(item)

    monkeypatch.setattr(call_workers, "MOST_KEPT", 10**6)
    with Calls(call, CallSettings(max_concurrency=2)) as calls:
        assert len(list(calls.run(range(50_000)))) == 50_000
    assert order.index(0) < 40_000


def test_the_window_may_be_a_law():
    async def call(item):
        await asyncio.sleep(0.01)
        return item

    def limit():
        limits.append(RttThreshold(0.5, initial=3, max_limit=40))
        return limits[-1]

    limits = []
    outcomes, calls = called(call, range(1000), max_concurrency=limit)
    assert values(outcomes) == list(range(1000))
    assert limits[0].limit == 40
    ((state, _),) = states(calls)
    assert (state.acked, state.limit, state.in_flight) == (1000, 40, 0)


def test_by_default_the_window_follows_the_service():
    """It serves 16 at once, each for 100 ms: found by itself, and not overrun by much."""
    serving = asyncio.Semaphore(16)

    async def call(item):
        async with serving:
            await asyncio.sleep(0.1)

    outcomes, calls = called(call, range(4000))
    assert len(outcomes) == 4000
    assert calls.now_s < 4000 / 160 / 0.95
    assert states(calls)[0][0].limit <= 40


def test_plain_functions_are_called_in_threads():
    together = threading.Barrier(4, timeout=30)

    def call(item):
        together.wait()  # breaks unless four are called at once
        return item * item, threading.current_thread().name

    with Calls(call, CallSettings(max_concurrency=4)) as calls:
        outcomes = list(calls.run(range(40)))
    assert [outcome.value[0] for outcome in outcomes] == [item * item for item in range(40)]
    assert {outcome.value[1] for outcome in outcomes} == {"ackcore-call"}


def test_no_more_plain_functions_run_than_there_are_threads():
    """The others are not out either: their time would be up in a line that nobody sees."""
    out, most, lock = 0, 0, threading.Lock()

    def call(item):
        nonlocal out, most
        with lock:
            out += 1
            most = max(most, out)
        with lock:
            out -= 1

    with Calls(call, CallSettings(max_concurrency=lambda: Fixed(64))) as calls:
        outcomes = calls.run(range(200))
        next(outcomes)
        assert calls._workers.in_flight <= 32
        assert len(list(outcomes)) == 199
    assert most <= 32


def test_errors_are_outcomes_and_no_process_ends():
    raised = [None, ValueError("no"), Reject("never"), SystemExit(3), GeneratorExit()]
    raised.append(asyncio.CancelledError())

    async def call(item):
        if raised[item] is not None:
            raise raised[item]
        return item

    outcomes, _ = called(call, range(6), max_concurrency=1)
    assert [outcome.error for outcome in outcomes] == raised
    assert [outcome.attempts for outcome in outcomes] == [1] * 6
    assert outcomes[0].value == 0


def test_an_object_may_be_called_and_is_entered_before_and_left_behind():
    log = []

    class Client:
        async def __aenter__(self):
            self.loop = asyncio.get_running_loop()
            log.append("entered")

        async def __call__(self, item):
            assert asyncio.get_running_loop() is self.loop
            log.append(item)

        async def __aexit__(self, *error):
            log.append("left")

    with SimCalls(Client()) as calls:
        list(calls.run([1]))
        list(calls.run([2]))
    assert log == ["entered", 1, 2, "left"]


def test_items_that_raise_end_the_run_behind_the_outcomes_before():
    def items():
        yield from range(3)
        raise OSError("no more of it")

    with SimCalls(after_a_second) as calls:
        outcomes = calls.run(items())
        assert [next(outcomes).value for _ in range(3)] == [0, 1, 2]
        with pytest.raises(OSError, match="no more of it"):
            next(outcomes)
        with pytest.raises(RuntimeError, match="closed; create another one"):
            next(calls.run([1]))


def test_calls_serve_one_run_after_the_other():
    with SimCalls(after_a_second) as calls:
        for _ in range(3):
            assert values(calls.run(range(7))) == list(range(7))
        assert values(calls.run([])) == []
        assert calls.complete(after_a_second("between")) == "between"
        first = calls.run(range(7))
        next(first)
        with pytest.raises(RuntimeError, match="run of this Calls is not over"):
            next(calls.run([1]))


@pytest.mark.parametrize("end", ["close", "interrupt", "limit"])
def test_a_run_that_ends_half_way_cancels_what_is_out(end):
    started, cancelled = [], []

    class Broken(RttThreshold):
        def on_sample(self, rtt_ns, in_flight, dropped):
            raise ZeroDivisionError

    async def call(item):
        started.append(item)
        try:
            await asyncio.sleep(1 if item == 0 else 100)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        if end == "interrupt":
            raise KeyboardInterrupt

    limit = (lambda: Broken(initial=8)) if end == "limit" else 8
    calls = SimCalls(call, CallSettings(max_concurrency=limit))
    outcomes = calls.run(range(100))
    if end == "close":
        assert next(outcomes).error is None
        outcomes.close()
    else:
        with pytest.raises(KeyboardInterrupt if end == "interrupt" else ZeroDivisionError):
            next(outcomes)
    assert len(started) >= 8
    assert sorted(cancelled) == started[1:]
    assert calls.now_s < 4
    with pytest.raises(RuntimeError, match="closed"):
        next(calls.run([1]))


@pytest.mark.parametrize(
    "settings", [{}, {"endpoints": ["a"]}, {"limit": RateLimit(calls_per_s=9, per=id)}], ids=str
)
def test_a_limit_that_allows_no_call_ends_the_run(settings):
    """Later calls would wait without an end."""

    class Shut(RttThreshold):
        def on_sample(self, rtt_ns, in_flight, dropped):
            self.limit = 0

    async def call(item, endpoint=None):
        await asyncio.sleep(1 + item)
        if item == 1:  # it is no sample
            raise Retry("later", after_s=1)

    calls = SimCalls(call, CallSettings(max_concurrency=lambda: Shut(initial=2), **settings))
    with pytest.raises(ValueError, match=r"Shut\.limit must be a number of at least 1, got 0"):
        list(calls.run(range(9)))


def test_a_coroutine_from_a_thread_is_an_error_and_not_a_value():
    async def never_awaited(item):
        return item

    with Calls(lambda item: never_awaited(item)) as calls:
        (outcome,) = calls.run([1])
    assert isinstance(outcome.error, TypeError)
    assert "async def" in str(outcome.error)


def test_an_interrupt_of_the_items_passes_through():
    def items():
        yield 1
        raise KeyboardInterrupt

    with SimCalls(after_a_second) as calls, pytest.raises(KeyboardInterrupt):
        list(calls.run(items()))
    assert calls.now_s < 1


def test_no_run_within_a_running_loop():
    async def main():
        with Calls(after_a_second) as calls, pytest.raises(RuntimeError, match="loop"):
            next(calls.run([1]))

    asyncio.run(main())
