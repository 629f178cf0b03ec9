"""An endpoint that fails again and again is left alone, and the others take its calls."""

import asyncio

import pytest
from simulated_loop import S, SimCalls, SimSelector, called, now_s, states

from ackcore.calls import Reject, Retry, Unavailable, call_workers
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.calls.endpoints import BreakerState
from ackcore.flow import DelayTarget

CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


class Service:
    """Down within some seconds of simulated time, and answers after a tenth otherwise."""

    def __init__(self, down, error=ConnectionRefusedError):
        self.down, self.error = down, error
        self.made, self.out, self.most_out = [], 0, {}

    def __call__(self, settings):
        self.calls = SimCalls(self.call, settings)
        return self.calls

    async def call(self, item, endpoint=None):
        began = now_s()
        self.made.append((began, endpoint))
        self.out += 1
        state = self.states()[endpoint]
        self.most_out[state] = max(self.most_out.get(state, 0), self.out)
        try:
            await asyncio.sleep(0.1)
        finally:
            self.out -= 1
        if self.is_down(began, endpoint):
            raise self.error("down")
        return item

    def is_down(self, at, endpoint):
        spans = self.down if endpoint is None else self.down.get(endpoint, [])
        return any(start <= at < stop for start, stop in spans)

    def states(self):
        return {state.name: breaker for state, breaker in states(self.calls)}


def test_a_short_outage_is_waited_out_and_costs_few_calls():
    """Down for 4 s: ten failures open it, one call on trial 5 s later closes it again."""
    service = Service([(1, 5)])
    with service(CallSettings(max_concurrency=4)) as calls:
        outcomes = list(calls.run(range(400)))
        assert sum(1 for outcome in outcomes if outcome.error) <= 13
        assert service.states() == {None: CLOSED}
    assert sum(1 for at, _ in service.made if service.is_down(at, None)) <= 13
    assert sum(1 for at, _ in service.made if 1.4 < at < 6.2) == 0
    assert service.most_out[HALF_OPEN] == 1
    assert calls.counts.trips == 1
    assert len(outcomes) == 400


def test_what_would_wait_too_long_is_given_back_and_was_no_attempt():
    """Down for good: the first ones failed; the call on trial, too; the rest is not called."""
    service = Service([(0, 10**6)])
    with service(CallSettings(max_concurrency=4, wait_in_task_s=6)) as calls:
        outcomes = list(calls.run(range(3000)))
        assert service.states() == {None: OPEN}
        assert calls.now_s < 6
    failed = [outcome for outcome in outcomes if outcome.attempts]
    waiting = [outcome for outcome in outcomes if not outcome.attempts]
    assert len(failed) == len(service.made) <= 14
    assert all(isinstance(outcome.error, ConnectionRefusedError) for outcome in failed)
    assert all(type(outcome.error) is Unavailable for outcome in waiting)
    assert all(outcome.after_s == pytest.approx(5, abs=0.01) for outcome in waiting)
    assert str(waiting[0].error).startswith(
        "not called: all endpoints are paused; the last error was ConnectionRefusedError: down"
    )
    assert len(waiting) > 2900


def test_it_closes_in_a_later_run_when_its_time_is_over():
    service = Service([(0, 3)])
    with service(CallSettings(max_concurrency=4, wait_in_task_s=0)) as calls:
        first = list(calls.run(range(100)))
        assert all(outcome.error for outcome in first)
        calls.sim.now_ns += 6 * S
        assert [outcome.value for outcome in calls.run(range(100))] == list(range(100))


@pytest.mark.parametrize(
    ("error", "opens"),
    [
        (ConnectionResetError, True),
        (TimeoutError, True),
        (LookupError, True),
        (ValueError, False),
        (FileNotFoundError, False),
        (Reject, False),
        (KeyError, False),
    ],
)
def test_what_counts_is_what_says_something_of_the_endpoint(error, opens):
    """A record's own fault never does, or it would make all others wait for ever."""
    settings = CallSettings(retry_on=(LookupError,), reject=(KeyError,), wait_in_task_s=0)
    service = Service([(0, 10**6)], error)
    with service(settings) as calls:
        outcomes = list(calls.run(range(100)))
        assert service.states() == {None: OPEN if opens else CLOSED}
    assert len(outcomes) == 100
    assert (len(service.made) == 100) is not opens


def test_now_and_then_a_failure_opens_nothing():
    service = Service([(at / 10, at / 10 + 0.05) for at in range(0, 1000, 2)])
    with service(CallSettings(max_concurrency=1)) as calls:
        outcomes = list(calls.run(range(300)))
    assert sum(1 for outcome in outcomes if outcome.error) > 50
    assert calls.counts.trips == 0


def test_an_endpoint_that_is_down_is_left_to_the_others():
    """Its calls go elsewhere: tried again at another endpoint, all go well."""
    service = Service({"b": [(1, 9)]})
    settings = CallSettings(
        endpoints=["a", "b", "c"], max_concurrency=2, retry_on=(ConnectionError,), max_attempts=2
    )
    with service(settings) as calls:
        outcomes = list(calls.run(range(1000)))
        assert service.states() == {"a": CLOSED, "b": CLOSED, "c": CLOSED}
        by_name = {state.name: state for state, _ in states(calls)}
    assert [outcome.value for outcome in outcomes] == list(range(1000))
    assert 10 <= by_name["b"].failed <= 14
    tried_again = [outcome for outcome in outcomes if outcome.attempts == 2]
    assert len(tried_again) == by_name["b"].failed
    assert not [at for at, name in service.made if name == "b" and 1.8 < at < 6]
    assert [at for at, name in service.made if name == "b" and at > 11.5]


def test_an_endpoint_that_goes_on_refusing_is_called_less_and_less():
    """Items that were not called have no attempt; and no breaker opens, for the service lives."""

    class Busy(Retry):
        def __init__(self, reason):
            super().__init__(reason, after_s=3600)

    service = Service([(0, 3600)], Busy)
    with service(CallSettings(max_concurrency=10, wait_in_task_s=60)) as calls:
        outcomes = list(calls.run(range(500)))
        assert service.states() == {None: CLOSED}
    assert len(service.made) < 100
    refused = [outcome for outcome in outcomes if outcome.attempts]
    waiting = [outcome for outcome in outcomes if not outcome.attempts]
    assert len(refused) == len(service.made)
    assert {outcome.after_s for outcome in refused} == {3600}
    assert {type(outcome.error) for outcome in waiting} == {Unavailable}
    assert str(waiting[0].error).startswith(
        "not called: all endpoints are paused; the last error was Busy: down"
    )
    assert len(waiting) > 400


@pytest.mark.parametrize("window", [12, DelayTarget])
def test_a_service_that_refuses_what_is_too_much_is_used_in_full(window):
    """200 a second and no more, the rest refused at once, with a Retry-After in whole seconds."""
    tokens, since = 20.0, 0.0

    async def call(item):
        nonlocal tokens, since
        tokens, since = min(20.0, tokens + (now_s() - since) * 200), now_s()
        if tokens < 1:
            await asyncio.sleep(0.001)
            raise Retry("429", after_s=1)
        tokens -= 1
        await asyncio.sleep(0.05)

    outcomes, calls = called(call, range(3000), max_concurrency=window, wait_in_task_s=60)
    assert not any(outcome.error for outcome in outcomes)
    assert 3000 / calls.now_s > 0.93 * 200


@pytest.mark.parametrize("wait_s", [0, 0.001, 0.1])
def test_a_record_that_is_refused_by_itself_holds_nothing_up(wait_s):
    """The pause is short, and what was out meanwhile went well: nothing else is given back."""

    async def call(item):
        await asyncio.sleep(wait_s * (item % 3))
        if item % 10 == 7:
            raise Retry("not this one", after_s=3600)
        return item

    outcomes, _ = called(call, range(1000), max_concurrency=8)
    assert [n for n, outcome in enumerate(outcomes) if outcome.error] == list(range(7, 1000, 10))


@pytest.mark.parametrize("took_s", [0.001, 0.15, 3])
@pytest.mark.parametrize("window", [1, 4])
def test_with_no_waits_in_the_task_a_refusal_costs_the_record_that_was_refused(took_s, window):
    """The others wait out its pause like a window that is full, be the service quick or slow."""

    async def call(item):
        await asyncio.sleep(took_s)
        if item % 20 == 10:
            raise Retry("busy", after_s=30)

    outcomes, _ = called(call, range(100), max_concurrency=window, wait_in_task_s=0)
    assert [n for n, outcome in enumerate(outcomes) if outcome.error] == list(range(10, 100, 20))
    assert [outcome.attempts for outcome in outcomes] == [1] * 100


def test_an_item_that_opens_the_breaker_by_itself_has_had_its_attempt(monkeypatch):
    """An `Unavailable` would be no attempt: called again and again, and dead only in a week."""

    async def reset(item):
        raise ConnectionResetError("reset")

    monkeypatch.setattr(call_workers, "_BACKOFF_NS", 10**6)
    settings = {"retry_on": (ConnectionError,), "max_attempts": 100, "wait_in_task_s": 4}
    ((_, error, attempts, after_s),), _ = called(reset, ["poison"], **settings)
    assert (type(error), error.args, attempts) == (ConnectionResetError, ("reset",), 10)
    assert 4 < after_s <= 5


class GoingOn(SimSelector):
    """Waits by setting a clock, which also goes on whenever it is read."""

    def clock(self):
        self.now_ns += 1_000
        return self.now_ns


def test_an_outage_as_long_as_may_be_waited_is_waited_out():
    """By a clock that goes on between a failure and the pause that begins with it."""
    called, sim = [], GoingOn()

    async def call(item):
        called.append(item)
        raise ConnectionError("down")

    settings = CallSettings(
        max_concurrency=1, breaker_failures=3, breaker_reset_s=0.05, wait_in_task_s=0.05
    )
    with Calls(call, settings, clock=sim.clock, selector=sim) as calls:
        outcomes = list(calls.run(range(6)))
    assert called == [0, 1, 2, 3]  # the last is the probe
    not_called = [isinstance(outcome.error, Unavailable) for outcome in outcomes]
    assert not_called == [False] * 4 + [True] * 2


def test_without_a_breaker_one_item_that_is_refused_stops_no_others():
    """Return one that behaves as threads do, which a bolt's calls cannot tell apart."""

    async def call(item):
        await asyncio.sleep(0.1)
        if 20 <= item < 60:
            raise Retry("busy", after_s=60)
        return item

    settings = {"max_concurrency": 4, "breaker_failures": None, "wait_in_task_s": 0}
    outcomes, _ = called(call, range(200), **settings)
    assert [n for n, outcome in enumerate(outcomes) if outcome.error] == [*range(20, 60)]
