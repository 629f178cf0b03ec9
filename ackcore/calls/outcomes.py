"""The outcome of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Outcome(NamedTuple, Generic[Value]):
    """The outcome of one item.

    Attributes
    ----------
    value : object
        What the call returned; None if it failed.
    error : BaseException or None
        What it failed of at last; None if it went well.  `TimeoutError` if it took too long,
        `Retry` if it is to be called again later; `Unavailable` as well if it was not called, since
        no endpoint answers.
    attempts : int
        Calls that were made for it; 0 if no endpoint answered at that time.
    after_s : float or None
        With `Retry`, seconds after which the item should be called again, if that is known.
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
        Of these, those that raised or timed out.
    timed_out : int
        Of these, those that timed out.
    waited : int
        How often an item waited in the task, to be called again.
    given_back : int
        Items that would have had to wait for too long.
    trips : int
        How often a breaker opened.
    """

    made: int = 0
    failed: int = 0
    timed_out: int = 0
    waited: int = 0
    given_back: int = 0
    trips: int = 0
