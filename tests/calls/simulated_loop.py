"""Calls whose time passes at once: the event loop's waits set the clock instead."""

import asyncio
import selectors

from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.flow.consumers import state_of

S, MS = 1_000_000_000, 1_000_000


class SimSelector(selectors.DefaultSelector):
    """Waits by setting a clock."""

    now_ns = 0

    def clock(self):
        return self.now_ns

    def select(self, timeout=None):
        found = super().select(0)
        if not found:
            assert timeout is not None, "the loop would wait for ever"
            # Up, so that what is due by a float of seconds is due by whole nanoseconds.
            self.now_ns += int(timeout * S) + (timeout > 0)
        return found


class SimCalls(Calls):
    """Calls in simulated time, in ``sim.now_ns``."""

    def __init__(self, function, settings=None, **how):
        self.sim = SimSelector()
        super().__init__(function, settings, clock=self.sim.clock, selector=self.sim, **how)

    @property
    def now_s(self):
        return self.sim.now_ns / S


def called(function, items, **settings):
    """Call a function with each item in simulated time. Return the outcomes, and the `Calls`."""
    with SimCalls(function, CallSettings(**settings)) as calls:
        return list(calls.run(items)), calls


def now_s():
    """Return the simulated time, within a call."""
    return asyncio.get_running_loop().time()


def states(calls):
    """Return the state of each endpoint and of its breaker."""
    endpoints = calls._workers.queues.only.endpoints
    found = endpoints._consumers
    return [(state_of(each), endpoints._breakers[each.name].state) for each in found]
