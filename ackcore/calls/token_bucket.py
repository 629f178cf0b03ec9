"""A token bucket: so many calls a second, and few at once."""

from __future__ import annotations

_BURST_S = 0.1


class TokenBucket:
    """Lets calls begin at a rate.

    It holds what a tenth of a second brings, and one call at least, and is empty at first: from
    then on no more than ``rate_per_s * t`` calls begin within t seconds of it, so that many short
    tasks in a row do not exceed the rate either.

    Parameters
    ----------
    rate_per_s : float
        Tokens a second, above 0.
    now_ns : int
        The time now, in nanoseconds.

    Notes
    -----
    Kept as the time at which the bucket would be empty again (the generic cell rate algorithm,
    ITU-T I.371), so that nothing has to be filled up.
    """

    __slots__ = ("_due_ns", "_interval_ns", "_slack_ns")

    def __init__(self, rate_per_s: float, now_ns: int) -> None:
        self._interval_ns = 1e9 / rate_per_s
        self._slack_ns = max(0.0, _BURST_S * 1e9 - self._interval_ns)
        self._due_ns = now_ns + self._interval_ns + self._slack_ns

    def ready_ns(self) -> int:
        """When the next token is there, if that is in the future."""
        # Rounded up: a nanosecond before it there is none.
        return int(self._due_ns - self._slack_ns) + 1

    def take(self, now_ns: int) -> None:
        """Take a token, which is there."""
        self._due_ns = max(self._due_ns, float(now_ns)) + self._interval_ns
