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

import pyarrow as pa

from ackcore.arrow import cast
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import ORDER, TRACKING


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
                column = cast(column, field.type)
            except ValueError as error:
                told = f"{field.name!r} was {column.type} and is {field.type} now ({error})"
                troubles.append(told)
        columns.append(column)
        fields.append(pa.field(field.name, field.type))
    for name in was.names:
        if name not in schema.names and name != ORDER:  # which is of no use without ordered_by
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
