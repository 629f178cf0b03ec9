"""The outcome of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class CallOutcome(NamedTuple, Generic[Value]):
    """The outcome of one item.

    Attributes
    ----------
    value : object
        The result of the call; None if it failed.
    error : BaseException or None
        The last error; None if the call succeeded. `TimeoutError` if it took too long; `Retry` if
        the item should be called again later; `Unavailable` also if it was not called, since no
        endpoint answers.
    attempts : int
        The number of calls made for it; 0 if no endpoint answered at that time.
    after_s : float or None
        With `Retry`, the seconds after which the item should be called again, if known.
    """

    value: Value | None
    error: BaseException | None
    attempts: int
    after_s: float | None = None


@dataclass
class CallCounts:
    """The counts since the calls of a task began.

    Attributes
    ----------
    made : int
        Calls begun.
    failed : int
        Those of them that raised or timed out.
    timed_out : int
        Those of them that timed out.
    waited : int
        Waits of items in the task before another call.
    given_back : int
        Items that would have waited for too long.
    trips : int
        Openings of breakers.
    """

    made: int = 0
    failed: int = 0
    timed_out: int = 0
    waited: int = 0
    given_back: int = 0
    trips: int = 0
