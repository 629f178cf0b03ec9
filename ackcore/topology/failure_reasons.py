"""Conversion of a bolt's exceptions and messages into reasons of failures.

`exception_classes` reads the lists of exceptions that make a record a dead letter.
"""

from __future__ import annotations

import builtins
import math
import pkgutil
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ackcore._error_hints import listed, nearest
from ackcore.calls import Reject, Retry, Unavailable
from ackcore.calls.outcomes import MAX_AFTER_S, is_marked_final
from ackcore.topology.tuples import Reason


def exception_classes(given: Any, title: str) -> tuple[type[Exception], ...]:
    """Convert a list of exception classes, or of their names, to classes.

    Raises TypeError if it is not such a list. Raises ValueError if a name cannot be found, or an
    item is not a class derived from Exception.

    ``given``: a name is a builtin's, ``"ValueError"``, or ``"package.module.Class"``. ``title``:
    the name of the argument in errors.
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
    """Yield an error for each exception in a bolt's `retry_on` that is rejected anyway.

    ``reject``, ``retry_on``: the exceptions rejected by the bolt or by the topology's settings, and
    those retried.
    """
    first: tuple[type[Exception], ...] = (Reject, *reject)
    for kind in retry_on:
        for rejected in first:
            if issubclass(kind, rejected):
                what = "" if kind is rejected else f" as {rejected.__name__}"
                yield (
                    f"retry_on of bolt {bolt!r} must not contain rejected exceptions, got "
                    f"{kind.__name__}, which reject contains{what}; remove it from one of "
                    "them"
                )
                break


class FinalErrors:
    """The final exceptions, after which a record is not retried; test one with ``in``.

    Those that `as_final` has marked are final, too.

    ``reject``: the final exceptions besides `Reject`; their subclasses are final too. ``retry_on``:
    if given, all other exceptions are final, except `Retry`.
    """

    def __init__(
        self, reject: tuple[type[Exception], ...], retry_on: tuple[type[Exception], ...] | None
    ) -> None:
        self._reject: tuple[type[Exception], ...] = (Reject, *reject)
        self._retry_on: tuple[type[Exception], ...] | None = None
        if retry_on is not None:
            self._retry_on = (Retry, *retry_on)

    def __contains__(self, error: BaseException) -> bool:
        if isinstance(error, self._reject) or is_marked_final(error):
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
            f"{title} must hold classes derived from Exception, got {item!r}; remove it"
        )
    return found


#: Arrow's message for a column that a batch or a table does not have.
_NO_COLUMN = re.compile(
    r"""(?:Field|Column) (["']?)(?P<name>.*)\1 (?:does not exist in schema|not found)"""
)
#: The longest wait.
MAX_AFTER_MS = int(MAX_AFTER_S * 1000)


class ReasonMaker:
    """The conversion of exceptions and texts to the reasons of one component.

    ``component``: the name of the component, which its reasons carry. ``reject``: the exceptions
    that make a record a dead letter at once, besides `Reject`; their subclasses too. ``retry_on``:
    if given, all other exceptions make it a dead letter too, except `Retry`.

    Raises TypeError or ValueError if `exception_classes` refuses a list.
    """

    def __init__(
        self,
        component: str,
        reject: Iterable[type[Exception] | str] = (),
        retry_on: Iterable[type[Exception] | str] | None = None,
    ) -> None:
        self.component = component
        self._final = FinalErrors(
            exception_classes(reject, f"reject of {component}"),
            None if retry_on is None else exception_classes(retry_on, f"retry_on of {component}"),
        )

    def of(self, reason: BaseException | Reason | str | None) -> Reason:
        """Convert an exception, a text or None to a reason.

        Raises TypeError if it is another object.
        """
        if isinstance(reason, BaseException):
            return self._of_error(reason)
        if isinstance(reason, Reason):
            # A user may put anything into its fields: convert them to values that can be stored.
            text = Reason.of(str(reason.component), str(reason.message), bool(reason.final))
            return text._replace(
                type=Reason.of("", str(reason.type)).message,
                after_ms=min(max(int(reason.after_ms), 0), MAX_AFTER_MS),
                counts=bool(reason.counts),
            )
        if reason is None:
            return Reason.of(self.component, f"failed by {self.component}")
        if isinstance(reason, str):
            return Reason.of(self.component, reason)
        raise TypeError(
            f"reason must be an exception, a text or a Reason, got {type(reason).__name__}"
        )

    def not_acked(self) -> Reason:
        """Return the reason of an input that was neither acked nor failed."""
        return Reason(self.component, "NotAcked", f"not acked by {self.component}")

    def _of_error(self, error: BaseException) -> Reason:
        made = Reason.of(self.component, error, error in self._final)
        if made.final or not isinstance(error, Retry):
            return made
        after_s = error.asked_s or 0.0
        # Round up, so that the retry is not due earlier than requested.
        return made._replace(
            after_ms=math.ceil(after_s * 1000), counts=not isinstance(error, Unavailable)
        )


def missing_column(error: BaseException, columns: Sequence[str], batch: str) -> str | None:
    """Return a hint for the error of a bolt that read a column its batch does not have.

    Arrow's message has only the column's name. A row that became a dict raises only the key, which
    is taken for a column if it is similar to one.

    ``error``: the exception that the bolt raised. ``columns``: the columns of the batch; empty if
    the bolt was not called with one. ``batch``: the name of the batch in the hint.

    The hint names the columns, and suggests one. Returns None for any other error.
    """
    said = error.args[0] if isinstance(error, KeyError) and len(error.args) == 1 else None
    if not isinstance(said, str) or not columns:
        return None
    found = _NO_COLUMN.fullmatch(said)
    name = said if found is None else found["name"]
    near = nearest(name, columns)
    if name in columns or (found is None and near is None):
        return None
    hint = f"; did you mean {near!r}?" if near is not None else ""
    return f"{batch} has the columns {listed(columns)}{hint}"
