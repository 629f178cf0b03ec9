"""The exceptions that make a record a dead letter: lists of classes, or of their names."""

from __future__ import annotations

import builtins
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from ackcore.calls import Reject, Retry


def exception_classes(given: Any, title: str) -> tuple[type[Exception], ...]:
    """Convert a list of exception classes, or of their names, to classes.

    Parameters
    ----------
    given : iterable of exception class or str
        A name is a builtin's, ``"ValueError"``, or ``"package.module.Class"``.
    title : str
        The name of the argument in errors.

    Raises
    ------
    TypeError
        If it is not such a list.
    ValueError
        If a name cannot be found, or an item is not a class derived from Exception.
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
    """Yield an error for each exception in a bolt's `retry_on` that is rejected first.

    Parameters
    ----------
    bolt : str
        The bolt's name.
    reject, retry_on : iterable of exception class
        The exceptions rejected by the bolt or by the topology's settings, and those retried.
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
    """The final exceptions, after which a record is not retried; test one with ``in``.

    Parameters
    ----------
    reject : tuple of exception class
        The final exceptions besides `Reject`; their subclasses are final too.
    retry_on : tuple of exception class, optional
        If given, all other exceptions are final, except `Retry`.
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
