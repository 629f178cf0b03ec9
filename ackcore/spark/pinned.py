"""The new rows of a micro-batch in files, so that a root is the same record in each of its runs.

Who kills a worker is found in several runs, a restarted driver's among them, and by root id: a
record's place in its source.  Not every source has its rows in one order, nor need a bounded one
hold the same rows at the next start.  So a *careful* micro-batch reads its source once more, and
all its runs read what that left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from ackcore.spark.files import make_directory, read_record, remove, write_record
from ackcore.spark.run import Input
from ackcore.spark.workfiles import RowFile, read_rows

_RECORD = "pinned.json"


def pinned(inputs: Sequence[Input], directory: Path) -> list[Input] | None:
    """Return inputs that read what was pinned, or None if that is not what is to be read.

    Parameters
    ----------
    inputs : sequence of Input
        What would be read.
    directory : Path
        As `pin` got it.

    Raises
    ------
    CheckpointCorrupt
        If the record of what was pinned is damaged.
    """
    record = read_record(directory / _RECORD, _RECORD)
    if record is None or [one["reads"] for one in record["inputs"]] != _reads(inputs):
        return None
    return [
        Input(_frame(one.frame, directory, each["files"]), one.spout, kept=True)
        for one, each in zip(inputs, record["inputs"], strict=True)
    ]


def pin(inputs: Sequence[Input], directory: Path) -> list[Input]:
    """Write the rows of inputs to files, and return inputs that read those.

    Parameters
    ----------
    inputs : sequence of Input
        What is read, once.
    directory : Path
        That driver and workers share; what is in it is removed.

    Raises
    ------
    Exception
        What Spark raises if the source cannot be read.
    StateError
        If the directory cannot be written.
    """
    remove(directory)
    make_directory(directory)
    record: list[dict[str, Any]] = []
    for one, reads in zip(inputs, _reads(inputs), strict=True):
        rows = one.map_in_arrow(_Write(str(directory)), "partition int, name string").collect()
        # A record's place, and what it is called by it, goes by its partition.
        record.append({"reads": reads, "files": [name for _, name in sorted(rows)]})
    # Files of attempts that do not count are named nowhere.
    write_record(directory / _RECORD, _RECORD, {"inputs": record})
    found = pinned(inputs, directory)
    assert found is not None
    return found


def _reads(inputs: Sequence[Input]) -> list[list[Any]]:
    """What tells one input from another, as JSON would give it back."""
    return [[one.spout, json.loads(one.frame.schema.json())] for one in inputs]


class _Write:
    """Writes a partition to a file if it has rows, and returns its name; for ``mapInArrow``."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        file = None
        for batch in batches:
            if file is None:
                file = RowFile(
                    self._directory, batch.schema, context.partitionId(), context.taskAttemptId()
                )
            file.write(batch)
        columns = [pa.array([context.partitionId()], pa.int32())]
        columns.append(pa.array([None if file is None else file.finish()[0]], pa.string()))
        yield pa.RecordBatch.from_arrays(columns, ["partition", "name"])


def _frame(frame: DataFrame, directory: Path, names: list[str | None]) -> DataFrame:
    """Return a DataFrame of what is in files, in the partitions of the one that they are of."""
    spark: SparkSession = frame.sparkSession
    schema: StructType = frame.schema
    if not names:
        return spark.createDataFrame([], schema)  # without a partition, as that was
    paths = [None if name is None else str(directory / name) for name in names]

    def read(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in ids:
            for path in (paths[i] for i in batch.column(0).to_pylist()):
                for rows in () if path is None else read_rows(path):
                    yield rows.rename_columns(schema.names)

    return spark.range(0, len(paths), 1, len(paths)).mapInArrow(read, schema)
