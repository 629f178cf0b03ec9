"""Converts the exceptions of bolts, and texts, to the reasons of failures: retried, or final."""

from __future__ import annotations

import builtins
import pkgutil
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ackcore._error_hints import listed, nearest
from ackcore.calls import Reject, Retry
from ackcore.calls.outcomes import MAX_AFTER_S, is_marked_final
from ackcore.topology.components import Component
from ackcore.topology.tuples import Reason, Tuple


def exception_classes(given: Any, title: str) -> tuple[type[Exception], ...]:
    """Convert a list of exception classes, or of their names, to a tuple of classes.

    Raises TypeError if it is no iterable, a single class or name, or an iterator, which could be
    read only once. Raises ValueError if a name cannot be found, or an item is not a class derived
    from Exception.

    ``given``: the list. A name is ``"ValueError"`` for a builtin, otherwise
    ``"package.module.Class"``, which is imported. ``title``: the name of the argument in errors.
    """
    if isinstance(given, (str, type, Iterator)) or not isinstance(given, Iterable):
        way_out = "write a list such as ['TimeoutError'], or () for none"
        if isinstance(given, (str, type)):
            way_out = "put it in brackets"
        elif isinstance(given, Iterator):
            way_out = "pass list(...)"
        raise TypeError(
            f"{title} must be a list of exception classes or of their names, "
            f"got {type(given).__name__} {given!r}; {way_out}"
        )
    return tuple(_exception_class(item, title) for item in given)


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
#: Python's message if bytes are indexed by a name.
_BYTES_BY_NAME = "byte indices must be integers or slices, not str"
#: The longest wait that a reason may request (`Reason.after_ms`).
MAX_AFTER_MS = int(MAX_AFTER_S * 1000)


class ReasonMaker:
    """Makes the reasons of the failures of one component.

    ``component``: the name of the component, which is a part of its reasons. ``reject``: the
    exceptions, or their names, that are final besides `Reject`: the record is not retried.
    ``retry_on``: if given, all other exceptions but `Retry` are final, too.

    Raises TypeError or ValueError if ``reject`` or ``retry_on`` has an item of another kind.
    """

    def __init__(
        self,
        component: str,
        reject: Iterable[type[Exception] | str] = (),
        retry_on: Iterable[type[Exception] | str] | None = None,
    ) -> None:
        self.component = component
        self._reject: tuple[type[Exception], ...]
        self._reject = (Reject, *exception_classes(reject, f"reject of {component}"))
        self._retry_on: tuple[type[BaseException], ...] = (BaseException,)
        if retry_on is not None:
            retried = exception_classes(retry_on, f"retry_on of {component}")
            self._retry_on = (Retry, *retried)

    def of(self, reason: BaseException | Reason | str | None) -> Reason:
        """Convert an exception, a text or None to a reason.

        A text and None are never final. A `Reason` is copied, with its fields converted to their
        types, and its wait limited to a year. Raises TypeError for another object.
        """
        if isinstance(reason, BaseException):
            final = isinstance(reason, self._reject) or not isinstance(reason, self._retry_on)
            made = Reason.of(self.component, reason, final or is_marked_final(reason))
            return with_hint(made, _hint(reason))
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


def with_hint(reason: Reason, hint: str | None) -> Reason:
    """Return a reason with a hint, if there is one, appended to its message."""
    if hint is None:
        return reason
    return reason._replace(message=Reason.of("", f"{reason.message}; {hint}").message)


def _hint(error: BaseException) -> str | None:
    """Return the way out of a mistake that Python's own error does not explain, else None."""
    if type(error) is TypeError and error.args == (_BYTES_BY_NAME,):
        return (
            "the value is bytes: decode it first; the value of a KafkaSpout is bytes unless it has "
            "a deserializer, such as deserializer=json.loads"
        )
    if type(error) is ModuleNotFoundError:
        return (
            "this worker's Python lacks the module: install it on all workers, or ship your own "
            "with spark-submit --py-files, or spark.addArtifact(path, pyfile=True)"
        )
    # A subclass may be the user's, whose attributes may raise.
    if type(error) is not AttributeError:
        return None
    if isinstance(error.obj, Tuple) and error.obj.fields:
        fields, name = error.obj.fields, error.name or ""
        field = name if name in fields else nearest(name, fields) or fields[0]
        return f"read a value of a tuple by its field, as in tuple[{field!r}]"
    if isinstance(error.obj, Component) and error.name == "collector":
        return (
            "only a Bolt has self.collector: emit through the argument that the method receives, "
            "the collector of execute or the out of process"
        )
    return None


def missing_column(error: BaseException, columns: Sequence[str], batch: str) -> str | None:
    """Return the hint for an exception that a bolt raised because it read a missing column.

    The hint lists the columns of the batch. Returns None for any other error.

    Arrow's error names only the missing column. Python's KeyError names only a key, which is taken
    for a column if it is similar to one.

    ``error``: the exception that the bolt raised. ``columns``: the columns of the batch; empty if
    the bolt was not called with one. ``batch``: the name of the batch in the hint.
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
