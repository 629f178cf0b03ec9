"""The new rows of a micro-batch in files, so that a root is the same record in each of its runs.

A record that crashes its worker is found over several runs, including those of a restarted driver,
by its root id: its place in the source.  Not every source keeps its rows in one order, and a
bounded source may have other rows at the next start.  So a *careful* micro-batch first writes a
snapshot of its input, and all its runs read the snapshot.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointInUse, RowFileDamaged, StateError
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.shared_record import Body, SharedRecord
from ackcore.spark.engine.setup import InputFrame, Snapshot
from ackcore.spark.stores.opening import open_store
from ackcore.spark.tasks.row_files import RowFile, RowFileWriter, read_rows

_log = logging.getLogger("ackcore")

_RECORD = "snapshot.json"


def load_snapshot(inputs: Sequence[InputFrame], directory: Place) -> list[InputFrame] | None:
    """Return inputs that read the snapshot, or None if there is no intact snapshot of these inputs.

    Logs a warning if a file of rows is damaged. Raises CheckpointCorrupt if the record is damaged.

    ``inputs``: the inputs that the snapshot replaces. ``directory``: the directory that was given
    to `snapshot_inputs`.
    """
    record = _record(directory).load()
    if not record or [one["reads"] for one in record["inputs"]] != _reads(inputs):
        return None
    place = os.path.join(directory, record["directory"])
    found = [  # by input and partition; None for a partition without rows
        [
            None if name is None else RowFile(os.path.join(place, name), rows, nbytes)
            for name, rows, nbytes in one["files"]
        ]
        for one in record["inputs"]
    ]
    try:
        for file in (file for files in found for file in files if file is not None):
            read_rows(file)
    except RowFileDamaged as error:
        _log.warning("the snapshot of the source is damaged, so ackcore makes a new one: %s", error)
        return None
    return [_from_files(one, files) for one, files in zip(inputs, found, strict=True)]


def snapshot_inputs(
    inputs: Sequence[InputFrame], directory: Place, epoch: int = 0
) -> list[InputFrame]:
    """Write the rows of inputs to files, and return inputs that read the files.

    Raises Spark's exception if the source cannot be read. Raises StateError if the directory cannot
    be written, and CheckpointInUse if another driver has written it or has taken over.

    ``inputs``: the inputs, which are read once. ``directory``: a directory that driver and workers
    share; its old content is replaced. ``epoch``: the driver's epoch, for the record.
    """
    # Tasks of an earlier snapshot may still run and write here, so the path is new.
    token, kept = secrets.token_hex(8), _record(directory)
    before = kept.load()
    place = os.path.join(directory, token)
    record: list[dict[str, Any]] = []
    for one, reads in zip(inputs, _reads(inputs), strict=True):
        columns = "partition int, name string, rows bigint, bytes bigint"
        write = one.map_in_arrow(partial(_write, place), columns)
        # Sorted by partition, on which a record's place and its root id depend.
        found = sorted(write.collect())
        record.append({"reads": reads, "files": [file for _, *file in found]})

    def change(now: Body) -> Body:
        check_fence()
        if now != before:
            raise CheckpointInUse(
                f"{kept.place} was written by another driver after this one had read it. Let the "
                "other driver run, or stop it and start this query again"
            )
        # The record does not name the files of discarded attempts.
        return {"epoch": epoch, "directory": token, "inputs": record}

    kept.replace(change)
    held = load_snapshot(inputs, directory)
    if held is None:
        raise StateError(
            f"{directory}: the snapshot of new rows that was just written cannot be read back. "
            "Check the file system, and start again"
        )
    return held


def _record(directory: Place) -> SharedRecord:
    return SharedRecord(open_store(directory, "checkpoint"), _RECORD)


def _reads(inputs: Sequence[InputFrame]) -> list[list[Any]]:
    """Return each input's spout and schema, in the form in which a snapshot's record has them."""
    return [[one.spout, json.loads(one.frame.schema.json())] for one in inputs]


def _write(directory: str, batches: Batches) -> Batches:
    """Write a partition to a file if it has rows, in a task of mapInArrow.

    Yields the partition, the file's name (null without rows), and its rows and bytes.
    """
    context = TaskContext.get()
    assert context is not None
    partition = context.partitionId()
    file = None
    for batch in batches:
        if file is None:
            file = RowFileWriter(directory, batch.schema, partition)
        file.write(batch)
    name, rows = (None, 0) if file is None else file.finish()[:2]
    columns = [pa.array([partition], pa.int32()), pa.array([name], pa.string())]
    columns += [pa.array([n], pa.int64()) for n in (rows, 0 if file is None else file.nbytes)]
    yield pa.RecordBatch.from_arrays(columns, ["partition", "name", "rows", "bytes"])


def _read(files: list[RowFile | None], names: list[str], batches: Batches) -> Batches:
    """Yield the rows of the partitions whose numbers are in ``batches``, for mapInArrow."""
    for batch in batches:
        for file in (files[i] for i in batch.column(0).to_pylist()):
            for rows in () if file is None else read_rows(file):
                yield rows.rename_columns(names)


def _from_files(one: InputFrame, files: list[RowFile | None]) -> InputFrame:
    """Return the input with its rows read from files, in the same partitions."""
    spark: SparkSession = one.frame.sparkSession
    schema: StructType = one.frame.schema
    read = partial(_read, files, schema.names)
    ids = spark.range(0, len(files), 1, len(files) or 1)
    if not files:
        ids = spark.createDataFrame([], ids.schema)  # without a partition, like the input
    return InputFrame(
        ids.mapInArrow(read, schema), one.spout, Snapshot(ids, read), one.refused, tasks=len(files)
    )
