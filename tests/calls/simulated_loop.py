"""Calls whose time passes at once: the event loop's waits set the clock instead."""

import selectors

from ackcore.calls.calls import Calls

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

    def __init__(self, function, settings=None):
        self.sim = SimSelector()
        super().__init__(function, settings, clock=self.sim.clock, selector=self.sim)

    @property
    def now_s(self):
        return self.sim.now_ns / S
