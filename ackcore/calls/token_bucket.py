"""A token bucket: a rate of calls per second, with a small burst."""

from __future__ import annotations

_BURST_S = 0.1


class TokenBucket:
    """A limit on the rate at which calls begin.

    The bucket holds the tokens of a tenth of a second, at least one, and is empty at first. So
    within its first t seconds at most ``rate_per_s * t`` calls begin, and many short tasks in a row
    do not exceed the rate either.

    Parameters
    ----------
    rate_per_s : float
        Tokens per second, above 0.
    now_ns : int
        The time now, in nanoseconds.

    Notes
    -----
    The state is the time at which the bucket would be empty again (the generic cell rate algorithm,
    ITU-T I.371), so that no refill is needed.
    """

    __slots__ = ("_due_ns", "_interval_ns", "_slack_ns")

    def __init__(self, rate_per_s: float, now_ns: int) -> None:
        self._interval_ns = 1e9 / rate_per_s
        self._slack_ns = max(0.0, _BURST_S * 1e9 - self._interval_ns)
        self._due_ns = now_ns + self._interval_ns + self._slack_ns

    def ready_ns(self) -> int:
        """Return the time of the next token, which may be in the past."""
        # Rounded up: a nanosecond earlier there is no token.
        return int(self._due_ns - self._slack_ns) + 1

    def take(self, now_ns: int) -> None:
        """Take a token. The caller has checked `ready_ns`."""
        self._due_ns = max(self._due_ns, float(now_ns)) + self._interval_ns
