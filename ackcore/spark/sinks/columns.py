"""What tables ask of a stream's columns: keys, names, types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException

from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.sinks.interface import Accepted, read_with_places
from ackcore.spark.sinks.rejects import SinkRejects

_ROW = "_ackcore_row"


def named_keys(keys: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of key columns, none if rows are appended.

    Raises
    ------
    TypeError
        If they are no names.
    ValueError
        If they are given and name nothing.
    """
    named = [keys] if isinstance(keys, str) else list(keys or ())
    if not all(isinstance(key, str) for key in named):
        raise TypeError(f"keys must be names of columns, got {keys!r}")
    if keys is not None and not named:
        raise ValueError("keys must name a column at least; leave it out to append all rows")
    return tuple(named)


def check_keys(what: str, keys: Sequence[str], schema: pa.Schema) -> None:
    """Raise ValueError if a key is no column, TypeError if it has no simple values."""
    for key in keys:
        if key not in schema.names:
            raise ValueError(
                f"{what}: keys must be among the columns {', '.join(schema.names)}, got {key!r}"
            )
        if pa.types.is_nested(schema.field(key).type):
            raise TypeError(
                f"{what}: the key {key!r} must not be of {schema.field(key).type}; have the bolt "
                "emit a text or a number"
            )


def with_columns(what: str, table: str, wanted: Sequence[str], has: Sequence[str]) -> None:
    """Raise ValueError if a table lacks one of the stream's columns."""
    for name in wanted:
        if name not in has:
            raise ValueError(
                f"{what}: {table} has no column {name!r}, it has {', '.join(has)}; add it "
                f'(ALTER TABLE ... ADD COLUMN "{name}" ...), or have the bolt emit no such column'
            )


def spark_schema(what: str, schema: pa.Schema) -> pa.Schema:
    """Return the columns in the types that Spark would read them back in, or raise TypeError."""
    try:
        return to_arrow_schema(from_arrow_schema(schema))
    except PySparkException as error:
        raise TypeError(f"{what}: Spark has no type for a column: {error}") from error


def last_of_each_key(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """Return the last row of each key, in the order of the rows; a key that is null equals none."""
    numbered = rows.select(list(keys)).append_column(_ROW, pa.array(np.arange(len(rows))))
    last = numbered.group_by(list(keys)).aggregate([(_ROW, "max")])[f"{_ROW}_max"]
    keep = np.zeros(len(rows), np.bool_)
    keep[last.to_numpy()] = True
    for key in keys:
        keep |= rows[key].is_null().to_numpy()
    return rows.filter(pa.array(keep))


def refuse_misfits(accepted: Accepted, columns: pa.Schema) -> None:
    """Raise `SinkRejects` for rows that have values which a table's columns do not take.

    These are nulls where there must be none, and values that would be changed by being cast.  The
    rows are read for it only where a column may have such.

    Parameters
    ----------
    accepted : Accepted
        The rows.
    columns : pyarrow.Schema
        The table's columns; those that the stream does not have do not matter.
    """
    stream = accepted.schema()
    fields = [
        field
        for field in columns
        if field.name in stream.names
        and not (field.nullable and field.type == stream.field(field.name).type)
    ]
    files: list[npt.NDArray[np.int64]] = []
    places: list[npt.NDArray[np.int64]] = []
    reasons: list[pa.Array] = []
    for i, file in enumerate(accepted.files if fields else ()):
        for rows, there in read_with_places(file, accepted.nonacked):
            why = _misfits(rows, fields)
            bad = np.flatnonzero(why.is_valid().to_numpy(False))
            files.append(np.full(len(bad), i, np.int64))
            places.append(there[bad])
            reasons.append(why.drop_null())
    if sum(map(len, reasons)):
        raise SinkRejects.at(
            np.concatenate(files), np.concatenate(places), pa.chunked_array(reasons, pa.string())
        )


def _misfits(rows: pa.RecordBatch, fields: Sequence[pa.Field]) -> pa.StringArray:
    """Return of each row what is wrong with it; null if nothing is."""
    why = pa.nulls(len(rows), pa.string())
    for field in fields:
        column, wrong = rows.column(field.name), np.zeros(len(rows), np.bool_)
        if not field.nullable and column.null_count:
            said = f"column {field.name!r} takes no null"
            why = pc.coalesce(why, pc.if_else(column.is_null(), said, pa.scalar(None, pa.string())))
        for at in _unfit(column, field.type, 0, len(rows)):
            wrong[at] = True
        if wrong.any():
            said = f"the value of column {field.name!r} does not fit into {field.type}"
            why = pc.coalesce(why, pc.if_else(pa.array(wrong), said, pa.scalar(None, pa.string())))
        inside = _nulls_inside(column, field.type)
        if inside.any():
            said = f"the value of column {field.name!r} has a null where {field.type} takes none"
            why = pc.coalesce(why, pc.if_else(pa.array(inside), said, pa.scalar(None, pa.string())))
    return why


def _nulls_inside(column: pa.Array, kind: pa.DataType) -> npt.NDArray[np.bool_]:
    """Return which values have nulls in lists and maps that take none, which a cast passes over."""
    is_, have = pa.types, column.type
    found = np.zeros(len(column), np.bool_)
    if is_.is_struct(have) and is_.is_struct(kind):
        for field in kind:
            if have.get_field_index(field.name) >= 0:
                found |= _nulls_inside(column.field(field.name), field.type)
    elif is_.is_map(have) and is_.is_map(kind):
        found = _any_of_each(column, column.items, kind.item_field)
    elif all(is_.is_list(each) or is_.is_large_list(each) for each in (have, kind)):
        found = _any_of_each(column, column.values, kind.value_field)
    else:
        return found
    valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(False)
    return found & valid


def _any_of_each(column: pa.Array, values: pa.Array, field: pa.Field) -> npt.NDArray[np.bool_]:
    bad = _nulls_inside(values, field.type)
    if not field.nullable:
        bad |= values.is_null().to_numpy(False)
    before = np.concatenate(([0], np.cumsum(bad)))[column.offsets.to_numpy()]
    found: npt.NDArray[np.bool_] = before[1:] > before[:-1]
    return found


def _unfit(column: pa.Array, kind: pa.DataType, start: int, stop: int) -> Iterator[int]:
    """Yield the places, from one to another, of values that cannot be cast as they are."""
    parts = [(start, stop)]
    while parts:
        start, stop = parts.pop()
        try:
            column.slice(start, stop - start).cast(kind)
        except pa.ArrowNotImplementedError:
            return  # no row is at fault
        except pa.ArrowInvalid:
            if stop - start == 1:
                yield start
            else:
                middle = (start + stop) // 2
                parts += [(middle, stop), (start, middle)]
