"""The tables of a checkpoint, read while its query may be running."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from ackcore._error_hints import near_miss
from ackcore.spark.base.errors import StateError
from ackcore.spark.checkpoint.table_records import TableRecords
from ackcore.spark.dead_letters.checkpoints import CheckpointView, opened_checkpoint
from ackcore.spark.inspect.status import steady
from ackcore.spark.tables.table_snapshots import TableSnapshot
from ackcore.tables.folding import finished
from ackcore.tables.table_shape import read_shape

T = TypeVar("T")

#: The text of a NULL in a key, as in PostgreSQL's COPY.
NULL = r"\N"


def read_table(path: str | os.PathLike[str], name: str, use: Callable[[TableSnapshot], T]) -> T:
    """Return the result of ``use`` for a table as it was after the last finished micro-batch.

    Before the first micro-batch the table has no rows. The query may run: if it has deleted files
    meanwhile, ``use`` is called again with the newer table. Raises FileNotFoundError if there is no
    checkpoint. Raises ValueError if the checkpoint has no such table. Raises CheckpointCorrupt,
    CheckpointFormat or StateError if it cannot be read.
    """
    return steady(opened_checkpoint(path), lambda now: use(_read(now, name)))


def _read(checkpoint: CheckpointView, name: str) -> TableSnapshot:
    meta, records = checkpoint.meta(), checkpoint.records()
    shapes = {} if meta is None else meta.get("tables", {})
    if meta is None or name not in shapes:
        raise ValueError(
            f"table must be one of the tables of {checkpoint.url}, got {name!r}; "
            + near_miss(name, list(shapes), "tables")
        )
    shape = read_shape(name, shapes[name], meta["structure"]["tables"][name])
    number = max(records.numbers(".done"), default=None)
    state = (TableRecords(records).of(number) or {}).get(name)
    files = checkpoint.segments()
    if state is None:
        return TableSnapshot(shape, (), 0, files)
    files.check_all(name, state.segments)
    return TableSnapshot(shape, state.segments, state.horizon_ms, files, state.rows)


def rows_of_key(table: TableSnapshot, key: Sequence[str]) -> pa.Table:
    """Return the row of a table that has a key, or no row.

    Raises ValueError if the key has another number of values, or a text is no value of its column.

    ``key``: the values of the key columns as texts; ``\\N`` is NULL.
    """
    shape = table.shape
    if len(key) != len(shape.key):
        raise ValueError(
            f"key must have one value for each of {', '.join(shape.key_names)}, the key columns "
            f"of table {shape.name!r}, in this order, got {len(key)}; repeat --key"
        )
    columns = [_key_column(field, text) for field, text in zip(shape.key, key, strict=True)]
    stored = table.reader().lookup(pa.RecordBatch.from_arrays(columns, schema=pa.schema(shape.key)))
    return finished(shape, stored.filter(stored.column(0).is_valid()))


def _key_column(field: pa.Field, text: str) -> pa.Array:
    """Return a text as an array of one value of a key column; raise ValueError if it is none."""
    if text == NULL:
        return pa.nulls(1, field.type)
    try:
        return pa.array([text]).cast(field.type)
    except pa.ArrowInvalid:
        # All types that Arrow casts from text have a value of zeros.
        zeros = pa.Array.from_buffers(field.type, 1, [None, pa.py_buffer(bytes(32))])
        way_out = f"write it like {zeros.cast(pa.string())[0].as_py()!r}, or {NULL} for NULL"
    except pa.ArrowNotImplementedError:
        way_out = "values of this type have no text; filter the DataFrame of ackcore.spark.table()"
    raise ValueError(
        f"key must be of type {field.type} for {field.name!r}, got {text!r}; {way_out}"
    )


def first_rows(table: TableSnapshot, most: int) -> pa.Table:
    """Return up to ``most`` rows, in the order of the hashes of their keys."""
    found = [table.shape.row_schema.empty_table()]
    left = most
    for stored in table.reader().scan():
        if left <= 0:
            break
        found.append(finished(table.shape, stored.slice(0, left)))
        left -= len(found[-1])
    return pa.concat_tables(found)


def rows_between(table: TableSnapshot, lo: int, hi: int) -> pa.RecordBatchReader:
    """Return a reader of the rows whose hashes of keys are from ``lo`` to below ``hi``.

    Raises StateError, at the call, if a file of the table is missing or damaged.
    """
    try:
        reader = table.reader()
    except StateError as error:
        raise StateError(
            f"table {table.shape.name!r} cannot be read as it was when table() was called: "
            f"{error}. If the file is missing: a running query deletes replaced files two "
            "micro-batches later; call table() again, right before you read the DataFrame"
        ) from error
    batches = (
        batch
        for stored in reader.scan(lo, hi)
        for batch in finished(table.shape, stored).to_batches()
    )
    return pa.RecordBatchReader.from_batches(table.shape.row_schema, batches)
