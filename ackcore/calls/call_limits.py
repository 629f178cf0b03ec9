"""The limits of calls: a circuit breaker for an endpoint that fails, and a rate per second."""

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

    ``failures``: the number of failures in a row that open it; None for never. ``reset_ns``: the
    time for which it stays open, in nanoseconds.

    Attributes: ``opened_ns``: the time at which it first opened since the last success.
    ``last_error``: the error that opened it.

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

        ``probe``: whether it is the trial call.
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
        """Record that a call failed. Return how many nanoseconds the breaker stays open if that
        opens it, otherwise None.

        ``error``: the error of the call. ``probe``: whether it is the trial call.
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


class TokenBucket:
    """A limit on the rate at which calls begin, or at which they use tokens of a service.

    The bucket is empty at first. So within its first t seconds at most ``rate_per_s * t`` calls
    begin, and many short tasks in a row do not exceed the rate either.

    ``rate_per_s``: tokens per second, above 0. ``now_ns``: the time now, in nanoseconds.
    ``burst_s``: the bucket holds the tokens of this many seconds, but at least one token.

    The state is the time at which the bucket would be empty again (the generic cell rate algorithm,
    ITU-T I.371), so that no refill is needed.
    """

    __slots__ = ("_due_ns", "_interval_ns", "_slack_ns")

    def __init__(self, rate_per_s: float, now_ns: int, burst_s: float = 0.1) -> None:
        self._interval_ns = 1e9 / rate_per_s
        self._slack_ns = max(0.0, burst_s * 1e9 - self._interval_ns)
        self._due_ns = now_ns + self._interval_ns + self._slack_ns

    def ready_ns(self) -> int:
        """Return the time of the next token, which may be in the past."""
        # Rounded up: a nanosecond earlier there is no token.
        return int(self._due_ns - self._slack_ns) + 1

    def take(self, now_ns: int, tokens: float = 1) -> None:
        """Take tokens, after a check of `ready_ns`. With fewer there, the next ones come later."""
        self._due_ns = max(self._due_ns, float(now_ns)) + tokens * self._interval_ns

    def correct(self, tokens: float) -> None:
        """Take more tokens for a call that has ended; a negative number puts tokens back."""
        self._due_ns += tokens * self._interval_ns
