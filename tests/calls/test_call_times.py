"""Time-outs, waits and rates, to the millisecond of a simulated clock."""

import asyncio
import itertools
import math
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_loop import MS, SimCalls, called, now_s, states

from ackcore.calls import RateLimit, Reject, Retry
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls


def test_a_call_that_takes_too_long_is_cancelled_to_the_millisecond():
    ended = {}

    async def call(item):
        try:
            await asyncio.sleep(item)
            return item
        finally:
            ended[item] = now_s()

    outcomes, _ = called(call, [1, 1.9, 2.1, 50, 0.5], max_concurrency=10, timeout_s=2)
    assert [outcome.value for outcome in outcomes] == [1, 1.9, None, None, 0.5]
    assert type(outcomes[2].error) is TimeoutError
    assert str(outcomes[2].error) == "no answer within 2 s"
    assert ended[2.1] == pytest.approx(2, abs=0.001)
    assert ended[50] == pytest.approx(2, abs=0.001)


def test_a_time_out_strikes_no_other_call():
    """Whatever the function makes of its cancellation, its successors have all of their time."""

    async def call(item):
        task = asyncio.current_task()
        assert not task.cancelling()
        if item % 3 == 0:
            await asyncio.sleep(0.9)
            return item
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            if item % 3 == 1:
                return "late"  # as a careless cleanup does
            raise OSError("broke off") from None

    outcomes, _ = called(call, range(9), max_concurrency=1, timeout_s=1)
    assert [outcome.value for outcome in outcomes[::3]] == [0, 3, 6]
    assert [type(outcome.error) for outcome in outcomes[1::3]] == [TimeoutError] * 3
    assert [str(outcome.error) for outcome in outcomes[2::3]] == ["broke off"] * 3


def test_the_time_in_which_nobody_looks_does_not_count():
    """A reader that takes a minute, and items that are waited for, let no call time out."""

    async def call(item):
        async with asyncio.timeout(1):
            await asyncio.sleep(0.9)
        return item

    def items():
        for item in range(30):
            calls.sim.now_ns += 20_000 * MS
            yield item

    with SimCalls(call, CallSettings(max_concurrency=3, timeout_s=1)) as calls:
        for outcome in calls.run(items()):
            assert outcome.error is None
            calls.sim.now_ns += 60_000 * MS
        assert states(calls)[0][0].rtt_s == pytest.approx(0.9, abs=0.001)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_thread_that_hangs_is_not_waited_for(at_once):
    """Nor does what is called in its place wait in line behind it, and time out uncalled."""
    forever = threading.Event()

    def call(item):
        if item == 0:
            forever.wait()
        return item

    with Calls(call, CallSettings(max_concurrency=at_once, timeout_s=1)) as calls:
        outcomes = list(calls.run(range(50)))
    forever.set()
    assert isinstance(outcomes[0].error, TimeoutError)
    assert [outcome.value for outcome in outcomes[1:]] == list(range(1, 50))


def test_a_short_wait_is_waited_in_the_task_and_gives_its_place_up():
    """With a window of one, the others are called while the first one waits."""
    made = []

    async def call(item):
        made.append((item, now_s()))
        await asyncio.sleep(0.1)
        if item == 0 and len(made) == 1:
            raise Retry("429", after_s=1)
        return item

    outcomes, _ = called(call, range(5), max_concurrency=1)
    assert [outcome.value for outcome in outcomes] == list(range(5))
    assert [outcome.attempts for outcome in outcomes] == [2, 1, 1, 1, 1]
    assert [item for item, _ in made] == [0, 1, 2, 3, 4, 0]
    assert made[-1][1] == pytest.approx(1.1, abs=0.001)


@pytest.mark.parametrize(
    ("asked_s", "attempts", "took_s"),
    [
        (5.5, 1, 0),
        (2, 3, 4),  # a third wait would end beyond 5
        (None, None, 5),
    ],
)
def test_a_long_wait_is_given_back_with_the_time_that_was_asked_for(asked_s, attempts, took_s):
    async def call(item):
        raise Retry("quota", after_s=asked_s)

    (outcome,), calls = called(call, [1], wait_in_task_s=5)
    assert isinstance(outcome.error, Retry)
    assert calls.now_s <= took_s + 0.01
    if asked_s is not None:
        assert (outcome.attempts, outcome.after_s) == (attempts, asked_s)


@pytest.mark.parametrize("asked_s", [0, -3, 0.001, None, math.nan])
@pytest.mark.parametrize("breaker_failures", [10, None])
def test_a_service_that_asks_for_no_time_is_called_by_the_backoff(asked_s, breaker_failures):
    """The back-offs of 0.1 to 5 s have full jitter: 5 s of them are some ten calls."""

    async def call(item):
        raise Retry("429", after_s=asked_s)

    outcomes, _ = called(call, range(5), wait_in_task_s=5, breaker_failures=breaker_failures)
    assert all(isinstance(outcome.error, Retry) for outcome in outcomes)
    assert sum(outcome.attempts for outcome in outcomes) < 5 * 30


@pytest.mark.parametrize("wait_in_task_s", [0, 10**12])
def test_how_long_is_waited_may_be_not_at_all_or_for_ever(wait_in_task_s):
    made = itertools.count(1)

    async def call(item):
        if next(made) < 4:
            raise Retry(after_s=3600)

    (outcome,), _ = called(call, [1], wait_in_task_s=wait_in_task_s)
    assert outcome.attempts == (1 if wait_in_task_s == 0 else 4)


def test_errors_that_may_pass_are_tried_again_with_back_off():
    failed = Counter()
    times = []

    async def call(item):
        times.append(now_s())
        failed[item] += 1
        if item == "passes" and failed[item] < 3:
            raise ConnectionResetError
        if item in errors:
            raise errors[item]
        return item

    errors = {
        "stays": ConnectionRefusedError("down"),
        "other": ValueError("wrong"),
        "reject": BrokenPipeError(),
        "Reject": Reject("never"),
    }
    settings = {"retry_on": (Exception,), "reject": (ValueError, BrokenPipeError)}
    outcomes, _ = called(
        call, ["passes", *errors], max_attempts=3, breaker_failures=None, **settings
    )
    assert outcomes[0].value == "passes"
    assert [outcome.error for outcome in outcomes[1:]] == [*errors.values()]
    assert [outcome.attempts for outcome in outcomes] == [3, 3, 1, 1, 1]
    assert 0.01 <= max(times) <= 0.3


def test_a_time_out_may_be_tried_again():
    waits = iter((10, 0))

    async def call(item):
        await asyncio.sleep(next(waits))
        return item

    (outcome,), _ = called(call, "x", timeout_s=1, retry_on=(TimeoutError,), max_attempts=2)
    assert outcome[:3] == ("x", None, 2)


@given(rate=st.floats(0.5, 5000), n=st.integers(0, 300))
def test_calls_begin_at_a_rate_and_never_faster(rate, n):
    """Within t of the beginning no more than rate * t, so that short tasks in a row keep to it."""
    begun = []

    async def call(item):
        begun.append(now_s())

    called(call, range(n), max_concurrency=50, limit=RateLimit(calls_per_s=rate))
    assert len(begun) == n
    for place, at in enumerate(begun):
        assert place + 1 <= rate * at + 1e-3
    if n:
        assert begun[-1] <= n / rate * 1.05 + 0.01


def test_a_rate_holds_for_the_calls_that_are_made_again():
    made = itertools.count(1)

    async def call(item):
        if next(made) <= 10:
            raise Retry(after_s=0)

    settings = {"limit": RateLimit(calls_per_s=2), "breaker_failures": None, "wait_in_task_s": 60}
    _, calls = called(call, range(10), max_concurrency=10, **settings)
    assert calls.now_s == pytest.approx(10, abs=0.01)


def test_a_bucket_keeps_no_more_than_a_tenth_of_a_second():
    begun = []

    async def call(item):
        begun.append(now_s())
        await asyncio.sleep(0.01)

    settings = CallSettings(max_concurrency=1000, limit=RateLimit(calls_per_s=100))
    with SimCalls(call, settings) as calls:
        list(calls.run(range(100)))
        calls.sim.now_ns += 3600_000 * MS
        since = calls.now_s
        list(calls.run(range(100)))
    assert sum(1 for at in begun if since <= at < since + 0.001) == 10
