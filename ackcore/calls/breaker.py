"""A circuit breaker: an endpoint that fails again and again gets no calls for a while."""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    """The state of a breaker."""

    CLOSED = "closed"  # calls are made
    OPEN = "open"  # no calls are made until its time is over
    HALF_OPEN = "half-open"  # a single trial call is made


class Breaker:
    """The breaker of one endpoint.

    ::

        CLOSED ──n failures in a row──► OPEN ──its time is over, a call is made──► HALF_OPEN
        HALF_OPEN ──that call succeeds──► CLOSED        ──it fails──► OPEN

    While it is open, the results of calls that began before do not count.

    Parameters
    ----------
    failures : int or None
        The number of failures in a row that open it; None for never.
    reset_ns : int
        The time for which it stays open, in nanoseconds.

    Attributes
    ----------
    state : BreakerState
    opened_ns : int or None
        The time at which it first opened since the last success.
    last_error : BaseException or None
        The error that opened it.

    Notes
    -----
    M. Nygard, "Release It!", 2007; the states and their names are pybreaker's.
    """

    __slots__ = ("_failures", "_most", "_reset_ns", "last_error", "opened_ns", "state")

    def __init__(self, failures: int | None, reset_ns: int) -> None:
        self._most = failures
        self._reset_ns = reset_ns
        self._failures = 0
        self.state = BreakerState.CLOSED
        self.opened_ns: int | None = None
        self.last_error: BaseException | None = None

    def probe(self) -> None:
        """Record that a trial call begins, because the open time is over."""
        self.state = BreakerState.HALF_OPEN

    def succeeded(self, probe: bool) -> bool:
        """Record that a call was answered. Return whether that closed the breaker.

        Parameters
        ----------
        probe : bool
            Whether it is the trial call.
        """
        if self.state is BreakerState.CLOSED:
            self._failures = 0
            return False
        if not probe:
            return False
        self._failures = 0
        self.state = BreakerState.CLOSED
        self.opened_ns = self.last_error = None
        return True

    def failed(self, error: BaseException, now_ns: int, probe: bool) -> int | None:
        """Record that a call failed. If that opens the breaker, return the open time in
        nanoseconds.

        Parameters
        ----------
        error : BaseException
            The error of the call.
        now_ns : int
            The time now.
        probe : bool
            Whether it is the trial call.
        """
        if self.state is BreakerState.CLOSED:
            self._failures += 1
            if self._most is None or self._failures < self._most:
                return None
        elif not probe:
            return None
        self.state = BreakerState.OPEN
        self.last_error = error
        if self.opened_ns is None:
            self.opened_ns = now_ns
        return self._reset_ns
