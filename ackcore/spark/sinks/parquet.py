"""Sinks: what takes the rows of ACKED roots out of a micro-batch, each row once.

A sink is a function of (DataFrame, batch id), or an object whose method ``write`` is one.  It may
be called again with the same batch id and the same rows, after a crash or when it raised, and must
then replace what it wrote before: `to_parquet` does so with a directory for each micro-batch.  It
is not called for a micro-batch in which nothing was emitted to it; if all of that hangs from
records that are not ACKED, it is given no rows.

The rows are in files that the run of the micro-batch left in the checkpoint's work directory, so
no bolt runs for a sink.  A writer that has a method ``write_accepted`` is handed those files, as
`Accepted`, and no DataFrame: `to_parquet` reads them where they lie, past the JVM.  One that has a
method ``claim(sink, deployment)`` is asked before anything runs, and may refuse by raising.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from ackcore._records import Int64s
from ackcore.spark.base.atomic import check_fence, make_directory, sync_directory, write_file
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.paths import local_path
from ackcore.spark.base.schemas import unfit_for_parquet
from ackcore.spark.tasks.workfiles import WorkFile, keep_acked, read_rows, read_schema

#: Up to so many rows and bytes the driver writes by itself: a Spark job takes longer to start.
_DRIVER_ROWS = 1 << 17
_DRIVER_BYTES = 32 << 20

#: Rows of a Parquet file's row group.
_GROUP_ROWS = 1 << 18
_GROUP_BYTES = 64 << 20

_CODECS = ("snappy", "zstd", "lz4", "gzip", "brotli", "none")

_OWNER = "_ackcore.json"
#: Where a micro-batch is written before it is whole; the token is a later addition.
_STAGE = re.compile(r"_batch_id=([0-9]+)(?:\.[0-9a-f]+)?\.tmp")


class SinkError(RuntimeError):
    """A sink or the dead-letter store failed again and again; the message names it."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The rows of one micro-batch for one sink.

    Parameters
    ----------
    spark : SparkSession
        Where the query runs.
    sink : str
        The sink's name in its topology.
    deployment : str
        What tells this checkpoint from all others.
    batch_id : int
        The micro-batch.
    files : tuple of WorkFile
        Arrow IPC stream files, that driver and executors can read, and the rows in each; those
        that hang from `nonacked` roots included.  To be read by `read_accepted`.
    nonacked : numpy.ndarray of int64
        Roots whose rows do not count; sorted.
    """

    spark: SparkSession
    sink: str
    deployment: str
    batch_id: int
    files: tuple[WorkFile, ...]
    nonacked: Int64s

    @property
    def rows(self) -> int:
        """Rows in the files."""
        return sum(file.rows or 0 for file in self.files)

    def schema(self) -> pa.Schema:
        """Return the stream's schema."""
        return pa.schema(list(read_schema(self.files[0]))[:-1])  # the last one holds the roots

    def verify(self) -> None:
        """Raise `WorkFileDamaged` if a file is not as its run left it."""
        for file in self.files:
            read_rows(file)

    def frame(self) -> DataFrame:
        """Return the rows as a DataFrame, a partition for each file."""
        schema, files, nonacked = self.schema(), self.files, self.nonacked
        declared = from_arrow_schema(schema)
        target = to_arrow_schema(declared, timezone="UTC")

        def read(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in ids:
                for i in batch.column(0).to_pylist():
                    for rows in read_accepted(files[i], nonacked):
                        yield _cast(rows, target)

        return self.spark.range(0, len(files), 1, len(files)).mapInArrow(read, declared)


def read_accepted(file: WorkFile, nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a work file without those of some roots, in the stream's columns.

    Parameters
    ----------
    file : WorkFile
        One of `Accepted.files`.
    nonacked : numpy.ndarray of int64
        Sorted.

    Raises
    ------
    WorkFileDamaged
        Before the first row, if the file is not as its run left it.
    """
    for batch in read_rows(file):
        rows = keep_acked(batch, nonacked)
        if len(rows):
            yield rows


def _cast(batch: pa.RecordBatch, target: pa.Schema) -> pa.RecordBatch:
    """Give a batch the types by which Spark knows its columns."""
    if batch.schema.types == target.types:
        return pa.RecordBatch.from_arrays(batch.columns, schema=target)
    columns = [
        column if column.type == field.type else column.cast(field.type)
        for column, field in zip(batch.columns, target, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def check_sink(
    name: str, writer: Any, schema: pa.Schema | None, case_sensitive: bool = False
) -> None:
    """Refuse a sink that could not write the rows of a stream, before anything runs.

    Parameters
    ----------
    name : str
        The sink's, for errors.
    writer : object
        As `TopologyBuilder.sink` took it.
    schema : pyarrow.Schema or None
        The stream's, or None if it is not known.

    Raises
    ------
    TypeError
        If it cannot be called with (DataFrame, batch id), or Spark or Parquet has no type for a
        column.
    """
    if hasattr(writer, "write_accepted"):
        if schema is not None and isinstance(writer, ParquetSink):
            writer.check(name, schema, case_sensitive)
        return
    write = getattr(writer, "write", writer)
    must = f"sink {name!r} must be a function of (DataFrame, batch id) or have a method 'write'"
    if not callable(write):
        raise TypeError(f"{must}, got {type(writer).__name__}")
    try:
        signature = inspect.signature(write)
    except (TypeError, ValueError):
        signature = None  # a builtin tells nothing
    if signature is not None:
        try:
            signature.bind(None, 0)
        except TypeError as error:
            raise TypeError(f"{must}, got one of {signature} ({error})") from None
    for field in schema or ():
        try:
            from_arrow_schema(pa.schema([field]))
        except PySparkException:
            raise TypeError(
                f"sink {name!r} is given a DataFrame, and Spark has no type for {field.type}, that "
                f"of column {field.name!r}; have the bolt emit another type, or use to_parquet()"
            ) from None


def claim_sink(name: str, writer: Any, deployment: str) -> None:
    """Have a writer that keeps to itself, as a directory of files does, say so before all runs."""
    if hasattr(writer, "claim"):
        writer.claim(name, deployment)


def write_sink(writer: Any, accepted: Accepted) -> None:
    """Give a writer the rows of a micro-batch; raises whatever it raises."""
    if hasattr(writer, "write_accepted"):
        writer.write_accepted(accepted)
        return
    write: Callable[[DataFrame, int], object] = getattr(writer, "write", writer)
    write(accepted.frame(), accepted.batch_id)


def to_parquet(path: str | os.PathLike[str], *, compression: str = "snappy") -> ParquetSink:
    """Return a sink that writes a directory of Parquet files, with one below for each micro-batch.

    Parameters
    ----------
    path : path
        On a file system that driver and executors share.  ``batch_id=7/`` below it has the rows of
        micro-batch 7, so ``spark.read.parquet(path)`` shows a column ``batch_id``.  It is renamed
        into place when it is whole, and replaced when the micro-batch is written again.
    compression : {"snappy", "zstd", "lz4", "gzip", "brotli", "none"}, default "snappy"
        The codec of the files.

    Returns
    -------
    ParquetSink

    Raises
    ------
    TypeError
        If `path` is no path.
    ValueError
        If it is empty, or a URI of another scheme than ``file``, or the codec is none of these.
    """
    return ParquetSink(path, compression=compression)


class ParquetSink:
    """What `to_parquet` returns."""

    def __init__(self, path: str | os.PathLike[str], *, compression: str = "snappy") -> None:
        place = local_path(path, "path")
        if compression not in _CODECS:
            raise ValueError(
                f"compression must be one of {', '.join(_CODECS)}, got {compression!r}"
            )
        self.path = str(place)
        self.compression = compression

    def __repr__(self) -> str:
        return f"to_parquet({self.path!r})"

    def check(self, name: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise TypeError if Parquet cannot hold a column, or Spark could not read it back."""
        seen: dict[str, str] = {}
        for field in schema:
            other = seen.setdefault(field.name.lower(), field.name)
            if other != field.name and not case_sensitive:
                raise TypeError(
                    f"sink {name!r} writes Parquet for Spark, to which the columns {other!r} and "
                    f"{field.name!r} are one; have the bolt rename one of them, or set "
                    "spark.sql.caseSensitive to true"
                )
            if field.name.lower() == "batch_id":
                raise TypeError(
                    f"sink {name!r} writes directories batch_id=..., which Spark would read in "
                    f"place of the column {field.name!r}; have the bolt rename it"
                )
            if pa.types.is_timestamp(field.type) and field.type.unit == "ns":
                raise TypeError(
                    f"sink {name!r} writes Parquet for Spark, which reads no nanoseconds, and "
                    f"column {field.name!r} is {field.type}; have the bolt emit timestamp('us')"
                )
        for field, why in unfit_for_parquet(schema):
            raise TypeError(
                f"sink {name!r} writes Parquet, which cannot hold column {field.name!r} of "
                f"{field.type} ({why}); have the bolt emit another type"
            )

    def write(self, frame: DataFrame, batch_id: int) -> None:
        """Write the rows of any DataFrame as those of a micro-batch."""
        schema = to_arrow_schema(frame.schema, timezone="UTC")
        stage, compression = self._stage(batch_id), self.compression

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _write_in_task(stage, compression, (_cast(each, schema) for each in batches))

        self._finish(batch_id, stage, frame.mapInArrow(write, "name string").collect())

    def write_accepted(self, accepted: Accepted) -> None:
        """Write the rows of a micro-batch, straight from the files that its run left."""
        self.claim(accepted.sink, accepted.deployment)
        files, nonacked, compression = accepted.files, accepted.nonacked, self.compression
        stage = self._stage(accepted.batch_id)
        size = sum(os.path.getsize(file.path) for file in files)
        if accepted.rows <= _DRIVER_ROWS and size <= _DRIVER_BYTES:
            all_rows = (batch for file in files for batch in read_accepted(file, nonacked))
            name = _write_part(stage, "part", compression, all_rows)
            self._finish(accepted.batch_id, stage, [] if name is None else [(name,)])
            return
        tasks = min(len(files), accepted.spark.sparkContext.defaultParallelism)

        def write(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            mine = (files[i] for batch in ids for i in batch.column(0).to_pylist())
            rows = (batch for file in mine for batch in read_accepted(file, nonacked))
            yield from _write_in_task(stage, compression, rows)

        jobs = accepted.spark.range(0, len(files), 1, tasks).mapInArrow(write, "name string")
        self._finish(accepted.batch_id, stage, jobs.collect())

    def claim(self, sink: str, deployment: str) -> None:
        """Take the directory for one sink of one checkpoint; once more does no harm.

        Raises
        ------
        CheckpointForeign
            If another query's micro-batches, which have the same numbers, are in it.
        StateError
            If it cannot be written.
        """
        owner: Any = {"deployment": deployment, "sink": sink}
        note = Path(self.path, _OWNER)
        try:
            found = json.loads(note.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            make_directory(note.parent)  # names what is in its place
            found = None
            if not any(name.startswith("batch_id=") for name in os.listdir(self.path)):
                try:
                    write_file(note, lambda file: file.write(json.dumps(owner).encode()), once=True)
                    found = owner
                except FileExistsError:  # another one came at the same time
                    found = json.loads(note.read_bytes())
        except ValueError:
            found = None
        if found != owner:
            raise CheckpointForeign(
                f"{self.path} has micro-batches that are not of this checkpoint and sink; give "
                "the sink a directory of its own, or remove this one with its checkpoint"
            )

    def _stage(self, batch_id: int) -> str:
        """Make an empty directory for files in the making; readers do not look into it.

        It is nobody else's: tasks of a driver that is gone may go on writing into theirs.
        """
        os.makedirs(self.path, exist_ok=True)
        left = [
            os.path.join(self.path, name)
            for name in os.listdir(self.path)
            if (match := _STAGE.fullmatch(name)) and int(match[1]) <= batch_id
        ]
        # What was not there before the look is none of another driver's that has taken over.
        check_fence()
        for one in left:
            shutil.rmtree(one, ignore_errors=True)
        stage = os.path.join(self.path, f"_batch_id={batch_id}.{secrets.token_hex(8)}.tmp")
        os.makedirs(os.path.join(stage, "whole"))
        os.makedirs(os.path.join(stage, "parts"))
        return stage

    def _finish(self, batch_id: int, stage: str, names: Iterable[Any]) -> None:
        """Move the files of tasks that counted into place."""
        # Files of other attempts, or of a task that goes on though given up, stay behind.
        whole = os.path.join(stage, "whole")
        written = sorted(row[0] for row in names)
        for i, name in enumerate(written):
            os.rename(os.path.join(stage, "parts", name), f"{whole}/part-{i:05}.parquet")
        failpoint("in-sink", batch_id)
        final = os.path.join(self.path, f"batch_id={batch_id}")
        if written:
            sync_directory(Path(whole))
        try:
            check_fence()
        except CheckpointInUse:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        # A driver that is cut off from here on has the decision that its successor acts upon: what
        # it puts in place late, if that is possible still, are the same rows.
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, os.path.join(stage, "replaced"))
        if written:
            os.rename(whole, final)
        sync_directory(Path(self.path))
        shutil.rmtree(stage, ignore_errors=True)


def _write_in_task(
    stage: str, compression: str, rows: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Write a task's rows, and yield the name of its file if there are any."""
    context = TaskContext.get()
    assert context is not None
    # The attempt's own name: two copies of a task may run at once.
    part = f"part-{context.partitionId():05}-{context.taskAttemptId()}"
    name = _write_part(stage, part, compression, rows)
    if name is not None:
        yield pa.RecordBatch.from_pydict({"name": [name]})


def _write_part(
    stage: str, name: str, compression: str, batches: Iterable[pa.RecordBatch]
) -> str | None:
    """Write rows to one Parquet file and to the disk; return its name, None if there are none."""
    writer = None
    file = None
    try:
        for table in _gathered(batches):
            if writer is None:
                file = open(os.path.join(stage, "parts", name), "wb")  # noqa: SIM115
                # Spark reads no nanoseconds; what would be lost by that is an error.
                writer = pq.ParquetWriter(
                    file, table.schema, compression=compression, coerce_timestamps="us"
                )
            writer.write_table(table, row_group_size=_GROUP_ROWS)
        if writer is None or file is None:
            return None
        writer.close()
        file.flush()
        # The micro-batch will be marked as done, on the disk.
        os.fsync(file.fileno())
        return name
    finally:
        if file is not None:
            file.close()


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Put batches together to row groups."""
    found: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        found.append(batch)
        rows += len(batch)
        size += batch.nbytes
        if rows >= _GROUP_ROWS or size >= _GROUP_BYTES:
            yield pa.Table.from_batches(found)
            found, rows, size = [], 0, 0
    if found:
        yield pa.Table.from_batches(found)
