"""Conversion of a bolt's exceptions and messages into reasons of failures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from ackcore.calls import Retry, Unavailable
from ackcore.calls.errors import MAX_AFTER_S
from ackcore.topology._words import listed, nearest
from ackcore.topology.exception_classes import FinalErrors, exception_classes
from ackcore.topology.tuples import Reason

#: How Arrow says that a batch, or a table, has no such column.
_NO_COLUMN = re.compile(
    r"""(?:Field|Column) (["']?)(?P<name>.*)\1 (?:does not exist in schema|not found)"""
)
#: No wait is longer.
MAX_AFTER_MS = int(MAX_AFTER_S * 1000)


class Reasons:
    """Makes the reasons of one component.

    Parameters
    ----------
    component : str
        Name of the component, which its reasons carry.
    reject : iterable of exception class or str
        What goes to the dead letters at once, beside `Reject`; subclasses are meant too.
    retry_on : iterable of exception class or str, optional
        If given, all other exceptions go there too, but for `Retry`.

    Raises
    ------
    TypeError, ValueError
        As `exception_classes`.
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
        """Return the reason that an exception, a text, or nothing at all stands for.

        Raises
        ------
        TypeError
            If it is something else.
        """
        if isinstance(reason, BaseException):
            return self._of_error(reason)
        if isinstance(reason, Reason):
            # As its fields may be anything, they are made into what can be written down.
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
        # Up, since it is due no earlier than was asked for.
        return made._replace(
            after_ms=math.ceil(after_s * 1000), counts=not isinstance(error, Unavailable)
        )


def missing_column(error: BaseException, columns: Sequence[str], batch: str) -> str | None:
    """Return what to add to the message about a column that a bolt asked for and its batch has not.

    Arrow names the column alone, and a row that was made a dict only its key, which is told from a
    key of the bolt's own by its likeness to a column.

    Parameters
    ----------
    error : BaseException
        What the bolt raised.
    columns : sequence of str
        Those of the batch; none if the bolt was not called with one.
    batch : str
        How to call the batch.

    Returns
    -------
    str or None
        The columns, and which one may be meant; None if it raised something else.
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
