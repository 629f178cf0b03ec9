"""Errors of a user's code around a call that was made: a wrong argument, an answer that does not
fit.

The call may have cost money, and another call would raise the same error. So such an error is
final, as `Reject` is, whatever its class. `as_final` marks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: The most exceptions of a chain that are checked.
_MOST = 100


def as_final(error: BaseException) -> BaseException:
    """Mark an exception as final, and return it."""
    BaseException.__setattr__(error, "_ackcore_final", True)  # its class may have another one
    return error


@contextmanager
def marked_final() -> Iterator[None]:
    """Mark an exception that the body raises as final."""
    try:
        yield
    except BaseException as error:
        as_final(error)
        raise


def is_marked_final(error: BaseException) -> bool:
    """Return whether an exception is marked as final, or was raised while a marked one was handled.

    So an error stays final if a user's ``except Exception`` turns it into a `Retry`.
    """
    found: BaseException | None = error
    for _ in range(_MOST):
        if found is None:
            return False
        if "_ackcore_final" in vars(found):
            return True
        found = found.__cause__ or found.__context__
    return False
