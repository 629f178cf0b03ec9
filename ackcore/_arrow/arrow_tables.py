"""Conversion of Arrow columns to a ledger's columns, and of entries and decisions to batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore import _columns
from ackcore._arrow.record_batches import with_fields
from ackcore._records import Entries, Settled, Status, UInt8s

#: The names of statuses in settled tables, by number.
STATUS_NAMES = tuple(status.name for status in Status)

#: A ledger's columns in tables: singular names, and no unsigned numbers, which Spark and the JVM
#: lack.
ENTRY_SCHEMA = pa.schema(
    [
        ("root_id", pa.int64()),
        ("val", pa.int64()),
        ("task", pa.int32()),
        ("inits", pa.int8()),
        ("flags", pa.int8()),
        ("first_ms", pa.int64()),
        ("last_ms", pa.int64()),
    ]
)
#: The names of the columns of `ENTRY_SCHEMA` in `Entries` and `Settled`.
_COLUMNS = ("root_ids", "vals", "tasks", "inits", "flags", "first_ms", "last_ms")


def refuse_nulls(column: pa.Array, name: str) -> None:
    """Raise `ValueError` if a column has nulls; the text has their number and the first row."""
    if column.null_count:
        first = pc.index(pc.is_null(column), True).as_py()
        raise ValueError(
            f"{name} must not hold nulls, got {column.null_count} of {len(column)} rows, the "
            f"first in row {first}; drop these rows or set a value first"
        )


def integers(column: pa.Array, name: str, arrow_type: pa.DataType) -> npt.NDArray[Any]:
    """Return an Arrow column of integers as a read-only numpy array.

    ``column``: integers of any width without nulls; those of ``arrow_type`` are not copied.
    ``name``: the column's name in messages. ``arrow_type``: the integer type to return.

    Raises TypeError if the column does not have integers. Raises ValueError if it has nulls, or a
    number outside of the range of ``arrow_type``.
    """
    if not pa.types.is_integer(column.type):
        raise TypeError(f"{name} must hold integers, got Arrow's {column.type}; cast it first")
    refuse_nulls(column, name)
    if column.type != arrow_type:
        try:
            column = column.cast(arrow_type)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{name} must fit {arrow_type}: {error}") from None
    return column.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]


def status_names(statuses: UInt8s) -> pa.Array:
    """Return the names of a column of statuses as an Arrow string column."""
    indices = pa.array(statuses.view(np.int8))
    return pa.DictionaryArray.from_arrays(indices, list(STATUS_NAMES)).cast(pa.string())


def entries_to_batch(entries: Entries | Settled) -> pa.RecordBatch:
    """Return entries as a record batch of `ENTRY_SCHEMA`, without ages or statuses.

    The times of entries without times are null.
    """
    arrays = []
    for column in (getattr(entries, name) for name in _COLUMNS):
        if column is None:
            arrays.append(pa.nulls(len(entries), pa.int64()))
        else:
            arrays.append(pa.array(column.view(np.int8) if column.dtype == np.uint8 else column))
    return pa.RecordBatch.from_arrays(arrays, schema=ENTRY_SCHEMA)


def entries_from_batch(batch: pa.RecordBatch, name: str = "entries") -> Entries:
    """Return the rows of a record batch as entries of age 0.

    ``batch``: a batch with the columns of `ENTRY_SCHEMA`, in any order; others are ignored.  Either
    all times are null, or none. ``name``: the table's name in messages.

    Raises TypeError if a column is missing or does not have integers. Raises ValueError for other
    nulls, and for rows that are not valid in a ledger.
    """
    columns = {field: _member(batch, field.name, name) for field in ENTRY_SCHEMA}
    times = {field: column for field, column in columns.items() if field.name.endswith("_ms")}
    timed = any(column.null_count < len(column) for column in times.values())
    found: dict[str, Any] = {}
    for plural, (field, column) in zip(_COLUMNS, columns.items(), strict=True):
        if timed or field not in times:
            numbers = integers(column, f"{name}: {field.name}", field.type)
            found[plural] = numbers.view(np.uint8) if field.type == pa.int8() else numbers
    entries = Entries(ages=np.zeros(len(batch), np.uint8), **found)
    try:
        return _columns.check_entries(entries, _columns.MIN_BUCKETS, timed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def settled_to_batch(settled: Settled) -> pa.RecordBatch:
    """Return decisions as a record batch: ``root_id, status``, then the rest of `ENTRY_SCHEMA`."""
    batch = entries_to_batch(settled)
    return batch.add_column(1, "status", status_names(settled.statuses))


def _member(batch: pa.RecordBatch, column: str, name: str) -> pa.Array:
    if column not in batch.schema.names:
        have = ", ".join(batch.schema.names) or "none"
        raise TypeError(
            f"{name} has no column {column}, which it must have; its columns are {have}"
        )
    return batch.column(column)


def nullable_within(kind: pa.DataType) -> pa.DataType:
    """Return a type in which everything nested may be null, except the keys of maps."""
    return with_fields(kind, _nullable)


def _nullable(field: pa.Field) -> pa.Field:
    return field.with_type(nullable_within(field.type)).with_nullable(True)
