"""`SinkRejects`: the rows that a sink refuses, and the reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._arrow.shown import shown_values
from ackcore._error_hints import counted
from ackcore._records import Int32s, Int64s
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.versions import to_arrow

#: One reason for all rows, or one for each: a text, or the exception for which it was refused.
Reasons: TypeAlias = (
    str | BaseException | Sequence[str | BaseException] | pa.Array | pa.ChunkedArray
)


E = TypeVar("E", bound=BaseException)


class InvalidRejects(TypeError, ValueError):
    """A `SinkRejects` is invalid: it has wrong arguments, or names rows that the sink did not get.

    Also raised if a sink raises one without rows, or returns neither a `SinkRejects` nor None.
    This is a programming error in the sink. It ends the query without a retry.
    """


#: The maximum number of refused rows that are found by search in a micro-batch. To find one takes
#: some statements in a transaction, or some calls of the sink.
MAX_REFUSED = 10_000

#: SQLSTATEs of constraints that depend on other rows: foreign keys, unique indexes, exclusion
#: constraints. MySQL, Oracle and others have one for all constraints; 23506 is H2's for a missing
#: parent row.
OF_OTHERS = ("23000", "23503", "23505", "23506", "23P01")


class TooManyRefused(RuntimeError):
    """A sink refuses too many rows of a micro-batch.

    The limit is 10,000 rows that a database refuses or that are found by ``isolate``. A sink of
    ``"<table>.changes"`` or ``"<table>.closed"`` may refuse none. Nothing of the micro-batch is
    written, or the next attempt replaces it. The error ends the query without a retry.
    """


def too_many_refused(where: str, batch_id: int, first: BaseException, left: str) -> TooManyRefused:
    """Return the error for more than `MAX_REFUSED` refused rows.

    ``where``: the sink, and its table if it has one. ``first``: the error of the first refused row.
    ``left``: a sentence without a full stop that says whether rows of the micro-batch are written.
    """
    return TooManyRefused(
        f"{where} refuses more than {MAX_REFUSED:,} rows of micro-batch {batch_id}, the first with "
        f"{type(first).__name__}: {one_line(first)}. {left}. If the sink or its table is the "
        "cause, change it. If the rows are the cause, declare a sink of your own that raises "
        "SinkRejects with these rows and calls this one with the others. Then start again on the "
        "same checkpoint: the sink gets the same rows"
    )


def check_refused(
    where: str,
    batch_id: int,
    without_values: Callable[[E], BaseException],
    refused: dict[int, E],
    waiting: int,
) -> None:
    """Raise `TooManyRefused` if a database has refused more than `MAX_REFUSED` rows.

    ``where``: the sink and its table. ``without_values``: returns an error without values of rows.
    ``refused``: the errors by row number. ``waiting``: the number of these rows that will be tried
    again after all others. They do not count, unless they are more than ten times `MAX_REFUSED`.
    """
    if len(refused) - waiting > MAX_REFUSED or waiting > 10 * MAX_REFUSED:
        first = without_values(next(iter(refused.values())))
        raise too_many_refused(where, batch_id, first, "Nothing of the micro-batch is written")


class SinkRejects(Exception):
    """Rows of a micro-batch that a sink refuses, with reasons; the sink returns or raises it.

    *Return* it if all other rows are written.  If the sink is called again with the same batch id,
    for instance after a crash, it must write and refuse again, or refuse the same rows again.

    *Raise* it if nothing is written, or what is written will be replaced.  ackcore records the
    refused rows and calls the sink again with the same batch id, without these rows.  This is for
    sinks that write a batch in one transaction and skip a batch id that they have written.

    The records of these rows become dead letters with the sink as their component.

    Parameters
    ----------
    rows : pyarrow.Table, pyarrow.RecordBatch or DataFrame
        Values of some of the stream's columns, such as a key.  Each row of the micro-batch that has
        the values of one of these rows is refused.  Values that no row has end the query.
    reasons : str, exception, sequence of them, or column of texts
        One reason for all rows, or one for each of `rows`.

    Raises
    ------
    InvalidRejects
        If `rows` or a reason is of another type, or the number of reasons differs from that of the
        rows.  It is a `TypeError` and a `ValueError`; it ends the query without a retry.
    """

    #: The values that name the rows; None if `numbers` names them.
    values: pa.Table | None
    #: The numbers of the rows, from `SinkBatch.numbered`; None if `values` names the rows.
    numbers: Int64s | None
    #: The distinct reasons, and for each row the index of its reason.
    reasons: list[str | BaseException]
    reason_of: Int32s

    def __init__(
        self,
        rows: pa.Table | pa.RecordBatch | DataFrame,
        reasons: Reasons,
        *,
        _numbers: Int64s | None = None,
    ) -> None:
        self.numbers = _numbers
        self.values = _table(rows) if _numbers is None else None
        self.reasons, self.reason_of = _reasons(reasons, len(self))
        said = f"{counted(len(self), 'row is', 'rows are')} refused"
        for first in self.reasons[:1]:
            why = first if isinstance(first, str) else f"{type(first).__name__}: {one_line(first)}"
            said += f": {why}"
        super().__init__(said)

    @classmethod
    def of_numbers(cls, numbers: Int64s, reasons: Reasons) -> SinkRejects:
        """Return a `SinkRejects` that names rows by their numbers from `SinkBatch.numbered`."""
        return cls(pa.table({}), reasons, _numbers=numbers)

    def __len__(self) -> int:
        """Return the length of `values` or `numbers`. A row of `values` may refuse several rows."""
        named = self.numbers if self.values is None else self.values
        assert named is not None
        return len(named)

    def __bool__(self) -> bool:
        return True


def _table(rows: Any) -> pa.Table:
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pa.Table):
        return rows
    if hasattr(rows, "sparkSession"):
        return to_arrow(rows)
    raise InvalidRejects(
        "rows of SinkRejects must be a pyarrow.Table, a RecordBatch or a DataFrame with some of "
        f"the stream's columns, got {type(rows).__name__}; pyarrow.table({{'id': [...]}}) makes one"
    )


def _reasons(reasons: Reasons, n: int) -> tuple[list[str | BaseException], Int32s]:
    """Return the distinct reasons, and for each of ``n`` rows the index of its reason.

    Raises InvalidRejects if a reason has a wrong type, or a sequence or column does not have
    ``n`` reasons.
    """
    if isinstance(reasons, str | BaseException):
        return [reasons], np.zeros(n, np.int32)
    if isinstance(reasons, pa.Array | pa.ChunkedArray):
        found, of = _of_column(reasons)
    elif isinstance(reasons, Sequence):
        found, of = _of_sequence(reasons)
    else:
        raise _no_reason(type(reasons).__name__)
    if len(of) != n:
        raise InvalidRejects(
            f"SinkRejects has {counted(len(of), 'reason')} for {counted(n, 'row')}; give one for "
            "each, or one for all that is in no list or column"
        )
    return found, of


def _of_column(reasons: pa.Array | pa.ChunkedArray) -> tuple[list[str | BaseException], Int32s]:
    is_text = pa.types.is_string(reasons.type) or pa.types.is_large_string(reasons.type)
    if not is_text or reasons.null_count:
        nulls = f" with {reasons.null_count} nulls" if is_text else ""
        raise _no_reason(f"a column of {reasons.type}{nulls}")
    encoded = reasons.dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.combine_chunks()
    return shown_values(encoded.dictionary), encoded.indices.to_numpy().astype(np.int32)


def _of_sequence(
    reasons: Sequence[str | BaseException],
) -> tuple[list[str | BaseException], Int32s]:
    numbers: dict[object, int] = {}
    found: list[str | BaseException] = []
    of = np.empty(len(reasons), np.int32)
    for i, one in enumerate(reasons):
        if not isinstance(one, str | BaseException):
            raise _no_reason(type(one).__name__)
        # Exceptions are distinguished by identity: users' code makes their texts later.
        of[i] = numbers.setdefault(one if isinstance(one, str) else id(one), len(found))
        if of[i] == len(found):
            found.append(one)
    return found, of


def _no_reason(got: str) -> InvalidRejects:
    return InvalidRejects(f"each reason of SinkRejects must be a str or an exception, got {got}")
