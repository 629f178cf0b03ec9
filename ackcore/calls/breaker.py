"""A circuit breaker: an endpoint that fails again and again is left alone for a while."""

from __future__ import annotations

import enum


class BreakerState(enum.Enum):
    """Where a breaker stands."""

    CLOSED = "closed"  # calls are made
    OPEN = "open"  # none is, until its time is over
    HALF_OPEN = "half-open"  # a single one is, on trial


class Breaker:
    """The breaker of one endpoint.

    ::

        CLOSED ──n failures in a row──► OPEN ──its time is over, a call is made──► HALF_OPEN
        HALF_OPEN ──that call goes well──► CLOSED        ──it fails──► OPEN

    What calls that were made before it opened bring is not counted while it is open.

    Parameters
    ----------
    failures : int or None
        How many in a row open it; None for never.
    reset_ns : int
        For how long it stays open, in nanoseconds.

    Attributes
    ----------
    state : BreakerState
    opened_ns : int or None
        When it opened first since a call went well.
    last_error : BaseException or None
        What made it open.

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
        """A call is made though it is open: its time is over."""
        self.state = BreakerState.HALF_OPEN

    def succeeded(self, probe: bool) -> bool:
        """A call was answered; return whether that closed it.

        Parameters
        ----------
        probe : bool
            Whether it is the one on trial.
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
        """A call failed; return for how many nanoseconds it is open now, if that opened it.

        Parameters
        ----------
        error : BaseException
            What it failed of.
        now_ns : int
            The time now.
        probe : bool
            Whether it is the one on trial.
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
