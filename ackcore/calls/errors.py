"""The exceptions by which a call decides whether its record is retried."""

from __future__ import annotations

#: No wait is longer than a year, so that no sum of them leaves 64 bits of milliseconds.
MAX_AFTER_S = 366 * 24 * 3600.0


class Reject(Exception):
    """Raise it, or fail a tuple with it, where trying again is no use: to the dead letters at once.

    Its text becomes the dead letter's message.
    """


class Retry(Exception):
    """Raise it, or fail a tuple with it, where the same call may go well later, and say when.

    Parameters
    ----------
    reason : str, default ""
        Becomes the dead letter's message, if it never goes well.
    after_s : float, optional
        Seconds from now until the record is due, as HTTP's ``Retry-After`` asks for; None leaves
        that to the back-off.  Less than 0 is taken as 0, more than 366 days as that, and what is
        not a number (NaN) as None.

    Raises
    ------
    TypeError
        If ``after_s`` is no number, as a header's text.
    """

    after_s: float | None = None

    def __init__(self, reason: str = "", *, after_s: float | None = None) -> None:
        super().__init__(reason)
        if after_s is not None and (
            isinstance(after_s, bool) or not isinstance(after_s, (int, float))
        ):
            raise TypeError(
                f"after_s must be a number of seconds or None, got {type(after_s).__name__} "
                f"{after_s!r}; float(...) makes one of a header's text"
            )
        if after_s is not None and after_s == after_s:  # which NaN is not
            self.after_s = float(min(max(after_s, 0.0), MAX_AFTER_S))

    @property
    def asked_s(self) -> float | None:
        """``after_s`` as it may be, whatever a class of the user's has set it to."""
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
    """Raise it, or fail a tuple with it, where nothing was taken: it is no attempt at the record.

    What an open circuit breaker gives, or a service that refuses all that come to it: HTTP's 503,
    gRPC's UNAVAILABLE, a connection that is refused.  The record waits as after a `Retry`, and its
    attempts stay as they are, until it has waited for so long that failures count again (the
    setting ``unavailable_timeout_s``).

    Parameters
    ----------
    reason, after_s
        As for `Retry`.
    """
