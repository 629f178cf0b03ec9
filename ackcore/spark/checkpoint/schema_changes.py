"""Records that were kept under a former schema of their source, in its present one.

A source's columns may change while records of it wait for a retry or lie in the dead letters.
Such records run beside new ones, in the same bolts, so they must have the columns that the source
has now.  Where that changes no value it is done; elsewhere it is refused, by column, before
anything is recorded that would need them.

======================================================  =======================================
the column has the same type                            as it is
it has another type, and a cast and back gives the same  cast
the source has gained it, and it may be null            null
the source has gained it, and it may not be null        refused
the source has it no longer                             refused
======================================================  =======================================

Whether a cast is safe is tried on the rows: ``int64`` to ``int32`` is, for small numbers.
"""

from __future__ import annotations

import operator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as kinds

from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import TRACKING


class ColumnsChanged(CheckpointForeign):
    """Records were kept with columns that do not fit those that their source has now."""


def fit_columns(table: pa.Table, schema: pa.Schema, what: str, way_out: str) -> pa.Table:
    """Return kept records in the columns that their source has now.

    Parameters
    ----------
    table : pyarrow.Table
        The `TRACKING` columns, then the source's as they were.
    schema : pyarrow.Schema
        The source's columns as they are.  What it says of nulls holds for columns that the
        source has gained only: Spark promises of no value that it is not null.
    what : str
        Begins the error's message: which records, and where they are.
    way_out : str
        Ends it: one or more sentences without the last full stop.

    Returns
    -------
    pyarrow.Table
        The `TRACKING` columns, then those of ``schema``, in its order and of its types; the
        very ``table`` if it has them already.

    Raises
    ------
    ColumnsChanged
        If a column does not fit; all that do not are named, with what they were and are.
    """
    was = pa.schema([table.schema.field(n) for n in range(len(TRACKING), table.num_columns)])
    if was.names == schema.names and was.types == schema.types:
        return table
    columns, fields, troubles = [], [], []
    for field in schema:
        if field.name not in was.names:
            if not field.nullable:
                troubles.append(f"{field.name!r} is new, {field.type}, and may not be null")
            column = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        else:
            column = table[field.name]
            try:
                column = cast_exactly(column, field.type)
            except pa.ArrowInvalid as error:
                told = f"{field.name!r} was {column.type} and is {field.type} now ({error})"
                troubles.append(told)
        columns.append(column)
        fields.append(pa.field(field.name, field.type))
    for name in was.names:
        if name not in schema.names:
            troubles.append(f"{name!r}, {was.field(name).type}, is not there any more")
    if troubles:
        raise ColumnsChanged(
            f"{what} do not fit the columns that the source has now: {'; '.join(troubles)}. "
            f"{way_out}."
        )
    kept = table.select(TRACKING.names)
    return pa.table(
        [*kept.columns, *columns],
        schema=pa.schema([*kept.schema, *fields], metadata=table.schema.metadata),
    )


def cast_exactly(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column in another type, every value the same.

    Raises
    ------
    pyarrow.ArrowInvalid
        If a value would change, or mean something else.
    """
    if column.type == kind:
        return column
    if kinds.is_null(column.type):
        return pa.chunked_array([pa.nulls(len(column), kind)])
    if not _means_the_same(column.type, kind):
        raise pa.ArrowInvalid("a value would mean something else")
    chunks = []
    for chunk in column.chunks:
        try:
            cast = chunk.cast(kind)
            back = cast.cast(chunk.type)
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError) as error:
            raise pa.ArrowInvalid(str(error)) from error
        if not _alike(chunk, back):
            raise pa.ArrowInvalid("a value would not be the same when it is read back")
        chunks.append(cast)
    return pa.chunked_array(chunks, kind)


def _means_the_same(was: pa.DataType, now: pa.DataType) -> bool:
    """Whether equal numbers beneath two types say the same: 1 is no time, nor noon an instant."""
    if kinds.is_temporal(was) or kinds.is_temporal(now):
        return _time(was) == _time(now)
    if kinds.is_struct(was) and kinds.is_struct(now):
        names = {field.name for field in was} & {field.name for field in now}
        return all(_means_the_same(was.field(n).type, now.field(n).type) for n in names)
    # What is nested on one side only is left to Arrow, which has no such cast.
    fields = range(min(was.num_fields, now.num_fields))
    return all(_means_the_same(was.field(n).type, now.field(n).type) for n in fields)


def _time(kind: pa.DataType) -> tuple[bool, ...]:
    tests = (kinds.is_date, kinds.is_time, kinds.is_duration, kinds.is_interval, kinds.is_timestamp)
    zoned = kinds.is_timestamp(kind) and kind.tz is not None
    return (zoned, *(test(kind) for test in tests))


def _alike(a: pa.Array, b: pa.Array) -> bool:
    """Whether two arrays of one type hold the same values: NaN is NaN, and -0.0 is not 0.0."""
    if not a.is_valid().equals(b.is_valid()):
        return False
    kind = a.type
    if kinds.is_struct(kind):
        return all(_alike(x, y) for x, y in zip(a.flatten(), b.flatten(), strict=True))
    if kinds.is_map(kind):
        pairs = pa.list_(pa.struct([kind.key_field, kind.item_field]))
        return _alike(a.cast(pairs), b.cast(pairs))
    if kinds.is_list(kind) or kinds.is_large_list(kind):
        lengths = (pc.fill_null(pc.list_value_length(each), 0) for each in (a, b))
        return bool(operator.eq(*lengths)) and _alike(a.flatten(), b.flatten())
    if kinds.is_floating(kind):
        x, y = (pc.fill_null(each, 0).to_numpy(zero_copy_only=False) for each in (a, b))
        same = (x == y) & (np.signbit(x) == np.signbit(y))
        return bool((same | (np.isnan(x) & np.isnan(y))).all())
    return bool(a.equals(b))
