"""What Spark hands a task of mapInArrow, and gets back from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

Batches = Iterator[pa.RecordBatch]

#: What mapInArrow calls on a worker, once a partition.
MapInArrow = Callable[[Batches], Batches]


def as_spark_types(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Cast a batch to the types that Spark has for its columns."""
    if batch.schema.types == target.types:
        return pa.RecordBatch.from_arrays(batch.columns, schema=target)
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, target, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)
