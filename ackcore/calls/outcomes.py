"""The outcome of a call, and the exceptions that decide whether its record is retried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ackcore.calls.usage import UsageCounts

Value = TypeVar("Value")
#: Waits are at most a year, so that sums of them in milliseconds fit in 64 bits.
MAX_AFTER_S = 366 * 24 * 3600.0


class Reject(Exception):
    """An error that no retry can cure. Raise it, or fail a tuple with it: the record becomes a dead
    letter.

    Its text becomes the dead letter's message.
    """


class Retry(Exception):
    """A temporary error. Raise it, or fail a tuple with it, to retry the record at a given time.

    Parameters
    ----------
    reason : str, default ""
        The dead letter's message if no attempt succeeds.
    after_s : float, optional
        The minimum number of seconds until the next attempt, as in HTTP's ``Retry-After``. The
        delay is the greater of it and the back-off. Negative values count as 0, values above 366
        days as 366 days, and NaN as None. None leaves the delay to the back-off.

    Raises
    ------
    TypeError
        If ``after_s`` is not a number, such as a header's text.
    """

    after_s: float | None = None

    def __init__(self, reason: str = "", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        if after_s is not None and (
            isinstance(after_s, bool) or not isinstance(after_s, (int, float))
        ):
            raise TypeError(
                f"after_s must be a number of seconds or None, got {type(after_s).__name__} "
                f"{after_s!r}; convert the text of a header with float(...)"
            )
        if after_s is not None and after_s == after_s:  # not NaN
            self.after_s = float(min(max(after_s, 0.0), MAX_AFTER_S))

    @property
    def asked_s(self) -> float | None:
        """``after_s``, limited to the allowed range even if a subclass has set the attribute.

        None if it is not a number.
        """
        try:
            return Retry(after_s=self.after_s).after_s
        except TypeError:
            return None

    def __str__(self) -> str:
        said = super().__str__()
        after_s = self.asked_s
        if after_s is None:
            return said
        due = f"again after {after_s:g} s"
        return f"{said} ({due})" if said else due


class Unavailable(Retry):
    """An outage. Raise it, or fail a tuple with it, if the service took nothing: no attempt counts.

    Examples are an open circuit breaker, or a service that refuses all requests: HTTP's 503, gRPC's
    UNAVAILABLE, a refused connection. The record waits as after a `Retry` with its number of
    attempts unchanged, until it is so old that failures count again (``unavailable_timeout_s``).

    Parameters
    ----------
    reason, after_s
        As for `Retry`.
    """


class CallOutcome(NamedTuple, Generic[Value]):
    """The outcome of one item."""

    value: Value | None  # the result of the call; None if it failed
    #: The last error; None if the call succeeded. `TimeoutError` if it took too long; `Retry` if
    #: the item should be called again later; `Unavailable` also if it was not called, since no
    #: endpoint answers.
    error: BaseException | None
    attempts: int  # the number of calls made for it; 0 if no endpoint answered at that time
    #: With `Retry`, the seconds after which the item should be called again, if known.
    after_s: float | None = None


@dataclass
class CallCounts:
    """The counts since the calls of a task began."""

    made: int = 0  # calls begun
    failed: int = 0  # calls that raised or timed out
    timed_out: int = 0  # calls that timed out
    waited: int = 0  # waits of items in the task before another call
    #: Items that ended without a result, because their wait for another call would be too long.
    given_back: int = 0
    trips: int = 0  # Times that a breaker opened
    #: The reports of `used`, if the limit has ``tokens_per_min`` or ``cost_per_run``.
    used: UsageCounts = field(default_factory=UsageCounts)
