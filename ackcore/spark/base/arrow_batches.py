"""The batches that Spark passes to a mapInArrow task and receives from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._arrow.record_batches import cast_column

Batches = Iterator[pa.RecordBatch]

#: The function that mapInArrow calls on a worker, once per partition.
MapInArrow = Callable[[Batches], Batches]


def plainly_named(frame: DataFrame) -> DataFrame:
    """Return the frame, with columns ``_0, _1, ...`` if any name is ``*`` or has a dot or backtick.

    mapInArrow looks columns up by name. It reads a dot as the access to a field, and ``*`` as all
    columns.
    """
    names = frame.columns
    if any(name == "*" or "." in name or "`" in name for name in names):
        return frame.toDF(*(f"_{i}" for i in range(len(names))))
    return frame


def as_spark_types(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the names and types of ``target``, whose columns it has in this order.

    Raises ArrowInvalid if a value does not fit, ValueError for another number of columns.
    """
    if batch.schema.types == target.types:
        return pa.RecordBatch.from_arrays(batch.columns, schema=target)
    columns = [
        cast_column(column, field.type) for column, field in zip(batch.columns, target, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)
