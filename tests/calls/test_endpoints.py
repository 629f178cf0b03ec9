"""No endpoint idles while there is an item for it."""

import asyncio

import pytest
from round_robin import RoundRobin
from simulated_loop import called, now_s

from ackcore.calls import Retry, endpoints


@pytest.fixture(autouse=True)
def in_turn(monkeypatch):
    """Make the choice of an endpoint one that a test can foresee."""
    monkeypatch.setattr(endpoints, "Idlest", lambda seed: RoundRobin())


class Service:
    """Endpoints with room for one call each, which does what is planned for it.

    ``plan`` has, by item and endpoint, the seconds that a call takes, or the error that it raises
    at once; a tenth of a second else.
    """

    def __init__(self, endpoints, plan):
        self.endpoints, self.plan = endpoints, plan
        self.made = []  # when, which item, where

    def run(self, items, **settings):
        endpoints = list(self.endpoints)
        return called(self.call, items, max_concurrency=1, endpoints=endpoints, **settings)[0]

    async def call(self, item, endpoint):
        self.made.append((round(now_s(), 2), item, endpoint))
        planned = self.plan.get((item, endpoint), 0.1)
        if isinstance(planned, Exception):
            raise planned
        await asyncio.sleep(planned)
        return item

    def calls_of(self, item):
        return [(at, endpoint) for at, one, endpoint in self.made if one == item]


def test_what_waits_for_another_endpoint_holds_no_new_item_up():
    """0 failed at a, and b is at work for 10 s: a serves all others meanwhile."""
    service = Service("ab", {(0, "a"): Retry(after_s=0.1), (1, "b"): 10})
    outcomes = service.run(range(30), breaker_failures=None)
    assert [outcome.value for outcome in outcomes] == list(range(30))
    assert service.calls_of(0) == [(0, "a"), (10, "b")]
    others = [at for at, item, _ in service.made if item > 1]
    assert len(others) == 28
    assert max(others) < 3


def test_what_waits_for_one_endpoint_holds_up_nothing_that_waits_for_another():
    """0 failed at a, where there is room, before 1 failed at b, where there is none."""
    plan = {(0, "a"): Retry(after_s=0.1), (1, "b"): Retry(after_s=0.2), (3, "b"): 10}
    service = Service("ab", plan)
    outcomes = service.run(range(4), breaker_failures=None)
    assert [outcome.value for outcome in outcomes] == list(range(4))
    assert service.calls_of(0) == [(0, "a"), (10, "b")]
    assert service.calls_of(1) == [(0, "b"), (0.2, "a")]


@pytest.mark.parametrize(
    ("error", "settings", "reopened_s"),
    [
        (Retry(after_s=3600), {}, 0.1),
        (ConnectionError("down"), {"breaker_failures": 1, "breaker_reset_s": 3}, 3),
    ],
)
def test_an_endpoint_is_called_as_soon_as_its_pause_is_over(error, settings, reopened_s):
    """Though no call ends then that would have one look: the others take 10 s."""
    service = Service("ab", {(0, "a"): 10, (1, "b"): error})
    outcomes = service.run(range(20), wait_in_task_s=60, **settings)
    assert [n for n, outcome in enumerate(outcomes) if outcome.error] == [1]
    at, endpoint = service.calls_of(2)[0]
    assert (at, endpoint) == (pytest.approx(reopened_s, abs=0.1), "b")
