"""Conversion of waiting and dead records to the present schema of their source.

A source's columns may change while its records wait for a retry or are dead letters.  Such records
run together with new ones, in the same bolts, so they must have the present columns of the source.
A conversion that changes no value is done.  Any other is refused, with the names of the columns,
before a record that would need it is written.

====================================================  =======================================
the column has the same type                          unchanged
another type, and a cast both ways is lossless        cast
the source has gained it, and it is nullable          null
the source has gained it, and it is not nullable      refused
the source has lost it                                refused
====================================================  =======================================

The cast is tried on the rows themselves: ``int64`` to ``int32`` is safe for small numbers.
"""

from __future__ import annotations

import pyarrow as pa

from ackcore._arrow.lossless import cast
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import NUMBERS, TRACKING


class ColumnsChanged(CheckpointForeign):
    """The columns of waiting or dead records do not fit the present columns of their source."""


def fit_columns(table: pa.Table, schema: pa.Schema, what: str, way_out: str) -> pa.Table:
    """Return waiting or dead records, converted to the present columns of their source.

    Raises ColumnsChanged if a column does not fit. The message names each such column, with its old
    and new types.

    ``table``: the `TRACKING` columns, then the source's columns as they were. ``schema``: the
    source's present columns.  ``nullable`` matters only for columns that the source has gained:
    Spark promises for no value that it is not null. ``what``: the beginning of the error's message:
    the records and their place. ``way_out``: the end of the message: one or more sentences without
    the last full stop.

    The result has the `TRACKING` columns, then those of ``schema``, in its order and of its types.
    It is ``table`` itself if the columns did not change.
    """
    was = pa.schema([*table.schema][len(TRACKING) :])
    if was.names == schema.names and was.types == schema.types:
        return table
    columns, troubles = [], []
    for field in schema:
        if field.name not in was.names:
            if not field.nullable:
                troubles.append(f"{field.name!r} is new, {field.type}, and not nullable")
            column = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        else:
            column = table[field.name]
            try:
                column = cast(column, field.type)
            except ValueError as error:
                told = f"{field.name!r} was {column.type} and is {field.type} now ({error})"
                troubles.append(told)
        columns.append(column)
    for name in was.names:
        # Numbers have no use without ordered_by or dedup.
        if name not in schema.names and name not in NUMBERS:
            troubles.append(f"{name!r}, {was.field(name).type}, is not there any more")
    if troubles:
        raise ColumnsChanged(
            f"the columns that the source has now do not fit {what}: {'; '.join(troubles)}. "
            f"{way_out}."
        )
    kept = table.select(TRACKING.names)
    fields = [*kept.schema, *(pa.field(field.name, field.type) for field in schema)]
    return pa.table(
        [*kept.columns, *columns], schema=pa.schema(fields, metadata=table.schema.metadata)
    )
