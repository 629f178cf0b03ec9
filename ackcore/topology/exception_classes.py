"""The exceptions that send a record to the dead letters: lists of classes, or of their names."""

from __future__ import annotations

import builtins
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from ackcore.calls import Reject, Retry


def exception_classes(given: Any, title: str) -> tuple[type[Exception], ...]:
    """Return a list of exception classes or of their names as classes.

    Parameters
    ----------
    given : iterable of exception class or str
        A name is a builtin's, ``"ValueError"``, or ``"package.module.Class"``.
    title : str
        What an error calls it.

    Raises
    ------
    TypeError
        If it is no such list.
    ValueError
        If it names what cannot be found, or is no class derived from Exception.
    """
    if isinstance(given, (str, type)) or not isinstance(given, Iterable):
        raise TypeError(
            f"{title} must be a list of exception classes or of their names, "
            f"got {type(given).__name__} {given!r}; put it in brackets"
        )
    return tuple(_exception_class(item, title) for item in given)


def contradictions(
    bolt: str, reject: Iterable[type[Exception]], retry_on: Iterable[type[Exception]]
) -> Iterator[str]:
    """Yield which exceptions a bolt asks to retry though they are rejected first.

    Parameters
    ----------
    bolt : str
        Its name.
    reject, retry_on : iterable of exception class
        All that is rejected there, by the topology's settings as well, and what is retried.
    """
    first: tuple[type[Exception], ...] = (Reject, *reject)
    for kind in retry_on:
        for rejected in first:
            if issubclass(kind, rejected):
                what = "" if kind is rejected else f" as {rejected.__name__}"
                yield (
                    f"retry_on of bolt {bolt!r} must not hold what is rejected, got "
                    f"{kind.__name__}, which reject has{what}; take it out of one of the two"
                )
                break


class FinalErrors:
    """Tells the exceptions that are final from those after which a record is tried again.

    Parameters
    ----------
    reject : tuple of exception class
        Final beside `Reject`, their subclasses as well.
    retry_on : tuple of exception class, optional
        If given, all others are final, but for `Retry`.
    """

    def __init__(
        self, reject: tuple[type[Exception], ...], retry_on: tuple[type[Exception], ...] | None
    ) -> None:
        self._reject: tuple[type[Exception], ...] = (Reject, *reject)
        self._retry_on: tuple[type[Exception], ...] | None = None
        if retry_on is not None:
            self._retry_on = (Retry, *retry_on)

    def __contains__(self, error: BaseException) -> bool:
        if isinstance(error, self._reject):
            return True
        return self._retry_on is not None and not isinstance(error, self._retry_on)


def _exception_class(item: Any, title: str) -> type[Exception]:
    found = item
    if isinstance(item, str):
        found = getattr(builtins, item, None)
        if found is None:
            try:
                found = pkgutil.resolve_name(item)
            except (ImportError, AttributeError, ValueError) as error:
                raise ValueError(
                    f"{title} has {item!r}, which cannot be found ({error}); give a "
                    "builtin's name such as 'ValueError', or 'package.module.Class'"
                ) from None
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ValueError(
            f"{title} must hold classes derived from Exception, got {item!r}; "
            "only such a class can be what a bolt raises"
        )
    return found
