"""`table`: a table of a checkpoint as a DataFrame."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._error_hints import naming_arguments
from ackcore.spark.base.arrow_batches import as_spark_types
from ackcore.spark.base.session import refuse_session
from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.base.workers import check_workers
from ackcore.spark.inspect.table_reading import read_table, rows_between
from ackcore.tables.folding import RANGE_ROWS
from ackcore.tables.table_shape import HASH_END


@naming_arguments
def table(checkpoint: str | os.PathLike[str], name: str, spark: SparkSession) -> DataFrame:
    """Return a table of a query as it was after the last finished micro-batch.

    The query may be running. It deletes files that it has replaced two micro-batches later, so call
    this right before you read the DataFrame; a later read raises if a file is gone.

    Parameters
    ----------
    checkpoint : path
        The directory or URL that was passed to `start` or `run_batch`.
    name : str
        The name of the table.
    spark : SparkSession
        The session that reads it. Its workers must see the checkpoint.

    Returns
    -------
    pyspark.sql.DataFrame
        One row per key: the columns of the key, then the values. The value of an aggregate of your
        own is its state, since its class is not in the checkpoint.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError
        If the checkpoint has no such table.
    TypeError
        If an argument has another type, or Spark does not have the type of a column.
    StateError
        If the checkpoint cannot be read.
    WorkerPythonError
        If the session's workers cannot run ackcore.
    """
    refuse_session(spark)
    check_workers(spark)
    found = read_table(checkpoint, name, lambda snapshot: snapshot)
    declared = from_arrow_schema(found.shape.row_schema)
    target = to_arrow_schema(declared)
    parts = max(1, -(-sum(segment.rows for segment in found.segments) // RANGE_ROWS))

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in numbers:
            for part in batch.column(0).to_pylist():
                lo, hi = HASH_END * part // parts, HASH_END * (part + 1) // parts
                for rows in rows_between(found, lo, hi):
                    yield as_spark_types(rows, target)

    return spark.range(0, parts, 1, parts).mapInArrow(read, declared)
