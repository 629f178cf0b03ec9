"""A sink that writes Parquet files, with one directory for each micro-batch."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from ackcore._error_hints import naming_arguments
from ackcore._files import sync_directory
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.paths import local_path
from ackcore.spark.base.session import task_slots
from ackcore.spark.sinks.columns import refusing_unfit_times
from ackcore.spark.sinks.parquet_directory import ParquetDirectory, is_small, write_parquet
from ackcore.spark.sinks.parquet_objects import ParquetObjects
from ackcore.spark.sinks.sink_batch import SinkBatch, read_all, read_sink_file
from ackcore.spark.stores.opening import is_bucket

#: Directory of the stages, within that of the sink. Readers of Parquet ignore such a name. The
#: sink's own directory is not listed for each micro-batch, since it has one entry for each.
_STAGES = "_stages"
#: Directory of an unfinished micro-batch.
_STAGE = re.compile(r"([0-9]+)\.[0-9a-f]+\.tmp")
#: File of a complete micro-batch: the number of its files, and the unique id of its rows.
_PART = re.compile(r"part-[0-9]+-of-([0-9]+)-([0-9a-f]+)\.parquet")


@naming_arguments
def to_parquet(
    path: str | os.PathLike[str], *, compression: str = "snappy"
) -> ParquetSink | ParquetObjects:
    """Return a sink that writes Parquet files, with one directory for each micro-batch.

    The directory ``batch_id=7/`` has the rows of micro-batch 7, so ``spark.read.parquet(path)``
    shows a column ``batch_id``. On a file system the sink renames a complete directory into place,
    and keeps it when the same rows are written again.

    A bucket has no renames, and HDFS is written like a bucket. Each file appears whole, but until
    the last one is there, a reader sees only some files of a micro-batch. The same rows always get
    the same file names. If other rows replace them, files without rows stay under the old names.

    Parameters
    ----------
    path : path or URL
        The directory, on a file system that driver and executors share, or a place in a bucket:
        ``s3://``, ``abfss://``, ``gs://`` (never tested), or in HDFS: ``hdfs://``. Buckets need
        ``ackcore[stores]``, HDFS needs ``ackcore[hdfs]``, and both need credentials in the
        environment of driver and workers. Each sink needs a path of its own, in which neither the
        checkpoint nor the dead letters lie.
    compression : {"snappy", "zstd", "lz4", "gzip", "brotli", "none"}, default "snappy"
        The codec of the files.

    Raises
    ------
    TypeError
        If `path` is not a path.
    ValueError
        If `path` is empty or a URL of another kind, or ``compression`` is not one of these codecs.
    """
    if isinstance(path, str) and is_bucket(path):
        return ParquetObjects(path, compression=compression)
    return ParquetSink(path, compression=compression)


class ParquetSink(ParquetDirectory):
    """The sink that `to_parquet` returns for a directory of a file system."""

    def __init__(self, path: str | os.PathLike[str], *, compression: str = "snappy") -> None:
        super().__init__(local_path(path, "path"), compression)
        self._stages = os.path.join(self.path, _STAGES)

    @refusing_unfit_times
    def write(self, batch: SinkBatch) -> None:
        """Write the rows to a new directory and rename it ``batch_id=N``, in place of other rows.

        If that directory has the same rows, it is kept. Without rows there is no directory. Raises
        SinkRejects for rows whose times do not fit Spark's types. Raises CheckpointForeign if the
        sink's directory has another owner, and CheckpointInUse if another driver has taken over.
        """
        self.claim(batch.sink, batch.deployment, batch.checkpoint)
        batch_id, content = batch.batch_id, batch.fingerprint()
        stage = self._stage(batch_id)
        names = [] if self._holds(batch_id, content) else self._write_parts(batch, stage)
        self._publish(batch_id, stage, names, content)

    def _write_parts(self, batch: SinkBatch, stage: str) -> list[str]:
        """Write rows to files in a stage; return the names of successful tasks' files with rows."""
        files, nonacked, compression = batch.files, batch.nonacked, self.compression
        size = sum(file.size() for file in files)
        if is_small(batch.rows, size):
            has_rows = _write_part(stage, "part", compression, read_all(files, nonacked))
            return ["part"] if has_rows else []
        tasks = min(len(files), task_slots(batch.spark))

        def write(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = (files[i] for batch in ids for i in batch.column(0).to_pylist())
            rows = (batch for file in mine for batch in read_sink_file(file, nonacked))
            context = TaskContext.get()
            assert context is not None
            # The name contains the attempt: two copies of a task may run at once.
            name = f"part-{context.partitionId():05}-{context.taskAttemptId()}"
            if _write_part(stage, name, compression, rows):
                yield pa.RecordBatch.from_pydict({"name": [name]})

        jobs = batch.spark.range(0, len(files), 1, tasks).mapInArrow(write, "name string")
        return [row[0] for row in jobs.collect()]

    def _stage(self, batch_id: int) -> str:
        """Make a new stage, a directory for unfinished files that readers ignore; return its path.

        Stages of this and earlier micro-batches are removed. Each call makes a new one, since tasks
        of an earlier driver may still write to theirs.
        """
        os.makedirs(self._stages, exist_ok=True)
        left = [
            os.path.join(self._stages, name)
            for name in os.listdir(self._stages)
            if (match := _STAGE.fullmatch(name)) and int(match[1]) <= batch_id
        ]
        # The stages were listed before this check, so none is of a driver that takes over later.
        check_fence()
        for one in left:
            # Rename first: a superseded driver that still runs finds all of its stage or none of
            # it, and so publishes nothing once its successor has begun.
            swept = self._stage_name(batch_id)
            os.rename(one, swept)
            shutil.rmtree(swept, ignore_errors=True)
        stage = self._stage_name(batch_id)
        os.makedirs(os.path.join(stage, "whole"))
        os.makedirs(os.path.join(stage, "parts"))
        return stage

    def _stage_name(self, batch_id: int) -> str:
        return os.path.join(self._stages, f"{batch_id}.{secrets.token_hex(8)}.tmp")

    def _holds(self, batch_id: int, content: str) -> bool:
        """Return whether a micro-batch's directory is complete and has these rows.

        ``content``: their `SinkBatch.fingerprint`, which is part of the files' names.
        """
        try:
            names = os.listdir(self._final(batch_id))
        except FileNotFoundError:
            return False
        # Count all files: some mounted file systems do not rename directories atomically.
        found = [part for part in map(_PART.fullmatch, names) if part and part[2] == content]
        return bool(found) and len(found) == int(found[0][1])

    def _final(self, batch_id: int) -> str:
        return os.path.join(self.path, f"batch_id={batch_id}")

    def _publish(self, batch_id: int, stage: str, names: list[str], content: str) -> None:
        """Move the valid files of tasks into place, unless the same rows are there.

        ``stage``: the directory that `_stage` made. It is removed, with the files of other task
        attempts in it. ``names``: the names of the valid files. ``content``: as in `_holds`.
        """
        whole, final = os.path.join(stage, "whole"), self._final(batch_id)
        of = f"of-{len(names):05}-{content}.parquet"
        for i, name in enumerate(sorted(names)):
            os.rename(os.path.join(stage, "parts", name), f"{whole}/part-{i:05}-{of}")
        failpoint("in-sink", batch_id)
        if names:
            sync_directory(Path(whole))
        try:
            check_fence()
        except CheckpointInUse:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        if not self._holds(batch_id, content):
            # If another driver takes over from here on, it removes this stage before it writes.
            # Then both renames fail.
            with contextlib.suppress(FileNotFoundError):
                os.rename(final, os.path.join(stage, "replaced"))
            if names:
                os.rename(whole, final)
        sync_directory(Path(self.path))
        shutil.rmtree(stage, ignore_errors=True)
        with contextlib.suppress(OSError):  # another stage may be there
            os.rmdir(self._stages)


def _write_part(stage: str, name: str, compression: str, batches: Iterable[pa.RecordBatch]) -> bool:
    """Write batches to the file ``parts/name`` of a stage; without any, return False."""
    with open(os.path.join(stage, "parts", name), "wb") as file:
        return write_parquet(file, compression, batches)
