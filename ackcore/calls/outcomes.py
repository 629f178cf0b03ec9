"""The outcome of a call, and the exceptions that decide whether its record is retried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, NamedTuple, TypeVar

from ackcore._columns import real
from ackcore._error_hints import naming_arguments

Value = TypeVar("Value")
#: Waits are at most a year, so that sums of them in milliseconds fit in 64 bits.
MAX_AFTER_S = 366 * 24 * 3600.0
#: The most exceptions of a chain that `is_marked_final` checks.
_MOST_CHAINED = 100


class Reject(Exception):
    """An error that no retry can cure. Raise it, or fail a tuple with it: the record becomes a dead
    letter.

    Its text becomes the dead letter's message.
    """


class Retry(Exception):
    """A temporary error. Raise it, or fail a tuple with it, to retry the record, and to set when.

    Parameters
    ----------
    reason : str, default ""
        The dead letter's message if no attempt succeeds.
    after_s : float, optional
        The minimum number of seconds until the next attempt, as in HTTP's ``Retry-After``. The
        delay is the greater of it and the back-off. Negative values count as 0, values above 366
        days as 366 days, and NaN as None. None leaves the delay to the back-off. Numbers of numpy
        and `decimal.Decimal` are converted to float.

    Raises
    ------
    TypeError
        If ``after_s`` is not a number, such as a header's text.
    """

    after_s: float | None = None

    @naming_arguments
    def __init__(self, reason: str = "", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        if after_s is None:
            return
        try:
            seconds = real(after_s, "after_s")
        except TypeError:
            raise TypeError(
                f"after_s must be a number of seconds or None, got {type(after_s).__name__} "
                f"{after_s!r}; convert the text of a header with float(...)"
            ) from None
        if seconds == seconds:  # not NaN
            self.after_s = min(max(seconds, 0.0), MAX_AFTER_S)

    @property
    def asked_s(self) -> float | None:
        """`after_s` within its range, even if user code set it; None if that is no number."""
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
    """An outage. Raise it, or fail a tuple with it, if the service did not take the request.

    Examples are an open circuit breaker, or a service that refuses all requests: HTTP's 503, gRPC's
    UNAVAILABLE, a refused connection. The record is retried as after a `Retry`, but the attempt
    does not count, until the record is older than ``unavailable_timeout_s``.

    Parameters
    ----------
    reason, after_s
        As for `Retry`.
    """


class CallOutcome(NamedTuple, Generic[Value]):
    """The outcome of one item.

    ``value``: the result of the call; None if it failed. ``error``: the last error; None if the
    call succeeded. It is a `TimeoutError` if the call took too long, and a `Retry` if the item
    should be called again later. An `Unavailable` may also mean that it was not called, since no
    endpoint answers or no money is left. ``attempts``: the number of calls made for the item; may
    be 0. ``after_s``: the seconds after which the item should be called again, None if unknown.
    Errors other than a `Retry` have it if endpoints were paused before the item's next call.
    """

    value: Value | None
    error: BaseException | None
    attempts: int
    after_s: float | None = None


def as_final(error: BaseException) -> BaseException:
    """Mark an exception as final, whatever its class, and return it.

    Such an error is in the user's code around a call: a wrong argument of `used`, an answer that
    does not fit. The call may have cost money, and another call would raise the same error.
    """
    BaseException.__setattr__(error, "_ackcore_final", True)  # its class may have another one
    return error


@contextmanager
def marked_final() -> Iterator[None]:
    """A context that marks an exception of its body with `as_final`, and raises it again."""
    try:
        yield
    except BaseException as error:
        as_final(error)
        raise


def is_marked_final(error: BaseException) -> bool:
    """Return whether an exception, or one in its chain of causes and contexts, is marked as final.

    So an error stays final if a user's ``except Exception`` turns it into a `Retry`.
    """
    chain, seen = [error], set[int]()
    while chain and len(seen) < _MOST_CHAINED:
        found = chain.pop()
        if "_ackcore_final" in vars(found):
            return True
        seen.add(id(found))
        # Both: ``raise Retry() from other`` in an except clause has another cause.
        linked = (found.__context__, found.__cause__)
        chain += [one for one in linked if one is not None and id(one) not in seen]
    return False
