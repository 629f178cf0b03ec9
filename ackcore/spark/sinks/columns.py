"""What tables ask of a stream's columns: keys, names, types."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException

from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema

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
