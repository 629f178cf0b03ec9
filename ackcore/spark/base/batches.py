"""The batches that Spark passes to a mapInArrow task, and those it gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

Batches = Iterator[pa.RecordBatch]

#: What mapInArrow calls on a worker, once a partition.
MapInArrow = Callable[[Batches], Batches]


def plainly_named(frame: DataFrame) -> DataFrame:
    """Return a frame whose columns mapInArrow finds, in their order.

    PySpark looks columns up by name, and takes a dot for one of a field.
    """
    names = frame.columns
    if any("." in name or "`" in name for name in names):
        return frame.toDF(*(f"_{i}" for i in range(len(names))))
    return frame


def as_spark_types(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Cast a batch to the types that Spark has for its columns."""
    if batch.schema.types == target.types:
        return pa.RecordBatch.from_arrays(batch.columns, schema=target)
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, target, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)
