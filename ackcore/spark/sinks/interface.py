"""The interface of sinks, which write the rows of ACKED roots of each micro-batch.

A sink is a function of (DataFrame, batch id), or an object with such a method ``write``.  After a
crash or an error ackcore calls it again with the same batch id and the same rows.  The sink must
then replace its earlier output: `to_parquet` writes one directory per micro-batch for this.
ackcore does not call the sink for a micro-batch in which nothing was emitted to it.  If all
emitted rows belong to records that are not ACKED, the sink gets a DataFrame without rows.

The run of the micro-batch leaves the rows in files in the checkpoint's work directory, so no bolt
runs for a sink.  If a writer has a method ``write_accepted``, ackcore calls that method with the
files, as an `Accepted`, and makes no DataFrame.  `to_parquet` and `to_kafka` read the files
directly, without the JVM.

If a sink cannot take some rows, it returns or raises `SinkRejects` with their places.  Their
records become dead letters, and the query continues.

Before anything runs, ackcore calls the writer's methods ``check(sink, schema, case_sensitive)`` and
``claim(sink, deployment, checkpoint)``, if they exist; both may raise to refuse.  After the query
or `run_batch` has ended, ackcore calls ``release(sink, deployment)``, if it exists.
On Spark Connect, a writer whose attribute ``needs_jvm`` is true is refused.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from ackcore._records import Int64s
from ackcore.spark.base.batches import as_spark_types
from ackcore.spark.base.errors import CheckpointForeign, one_line
from ackcore.spark.base.interrupts import raised_by
from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.row_files import RowFile, acked_rows, read_rows, read_schema

_log = logging.getLogger("ackcore")


_NO_PLACES: Int64s = np.empty(0, np.int64)


class AcceptedFile(NamedTuple):
    """A file with rows for a sink; read it with `read_accepted`.

    Attributes
    ----------
    path : str
        The path of an Arrow IPC stream file that driver and executors can read; a URL in a bucket.
    rows : int or None
        The number of rows in the file, including rows that the sink does not get.  None if it was
        not recorded.
    refused : numpy.ndarray of int64, optional
        The places in the file of rows that the sink has refused; sorted.
    within : tuple of int, optional
        The first place to read and the end (exclusive), if only a part of the file is to be read.
    nbytes : int, optional
        The size of the file in bytes.  None if it was not recorded; the file is then on a file
        system.
    """

    path: str
    rows: int | None
    refused: Int64s = _NO_PLACES
    within: tuple[int, int] | None = None
    nbytes: int | None = None

    def of_rows(self) -> RowFile:
        """Return the path with the recorded numbers of rows and bytes."""
        return RowFile(self.path, self.rows, self.nbytes)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.path.getsize(self.path) if self.nbytes is None else self.nbytes


@dataclass(frozen=True, slots=True)
class Accepted:
    """The rows of one micro-batch for one sink.

    Parameters
    ----------
    spark : SparkSession
        The session of the query.
    sink : str
        The sink's name in its topology.
    deployment : str
        The unique identifier of the checkpoint.
    checkpoint : str
        The checkpoint's location, for errors.
    batch_id : int
        The number of the micro-batch.
    files : tuple of AcceptedFile
        The files with the rows.  They also have rows of `nonacked` roots and rows that the sink has
        refused; `read_accepted` and `read_with_places` leave those out.
    nonacked : numpy.ndarray of int64
        The roots whose rows are left out; sorted.
    age_ms : int or None, default None
        The time in milliseconds since the micro-batch was planned, if an earlier driver may have
        passed its rows to the sink.  None if that is impossible.
    """

    spark: SparkSession
    sink: str
    deployment: str
    checkpoint: str
    batch_id: int
    files: tuple[AcceptedFile, ...]
    nonacked: Int64s
    age_ms: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows in the files, including rows that the sink does not get."""
        return sum(file.rows or 0 for file in self.files)

    def schema(self) -> pa.Schema:
        """Return the stream's schema."""
        file = self.files[0]
        # The last column holds the roots.
        return pa.schema(list(read_schema(file.of_rows()))[:-1])

    def fingerprint(self) -> str:
        """Return 16 hex digits that identify these rows, from file names and left-out rows."""
        files = [
            [
                os.path.basename(file.path),
                file.rows,
                *([_digest(file.refused.tobytes())] if len(file.refused) else []),
                *([] if file.within is None else [file.within]),
            ]
            for file in self.files
        ]
        said = json.dumps(files).encode() + self.nonacked.tobytes()
        return _digest(said)

    def content(self) -> str:
        """Return the `fingerprint` as it is before any row is recorded as refused."""
        plain = tuple(file._replace(refused=_NO_PLACES) for file in self.files)
        return replace(self, files=plain).fingerprint()

    def foreign(self, where: str, last: int, way_out: str) -> CheckpointForeign:
        """Return the error for a target that has this micro-batch with other rows, or a later one.

        Parameters
        ----------
        where : str
            The target: ``table orders``.
        last : int
            The number of the last micro-batch in the target.
        way_out : str
            The instructions to write the micro-batches from this one to ``last`` again.
        """
        return CheckpointForeign(
            f"{where} has micro-batch {last} of sink {self.sink!r}, and {self.batch_id} comes only "
            f"now{' with other rows' * (last == self.batch_id)}: the checkpoint {self.checkpoint} "
            "is older than what was written from it, restored from a backup perhaps. Start with a "
            f"new checkpoint; or {way_out}"
        )

    def verify(self) -> None:
        """Raise `RowFileDamaged` if a file has changed since its run wrote it."""
        for file in self.files:
            read_rows(file.of_rows())

    def frame(self, numbers: str | None = None) -> DataFrame:
        """Return the rows as a DataFrame with one partition per file.

        Parameters
        ----------
        numbers : str, optional
            The name of an additional column with the `row_numbers`.
        """
        schema, files, nonacked = self.schema(), self.files, self.nonacked
        if numbers is not None:
            schema = schema.append(pa.field(numbers, pa.int64()))
        declared = from_arrow_schema(schema)
        target = to_arrow_schema(declared)

        def read(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in ids:
                for i in batch.column(0).to_pylist():
                    for rows, places in read_with_places(files[i], nonacked):
                        columns = list(rows.columns)
                        if numbers is not None:
                            columns.append(pa.array(row_numbers(i, places)))
                        rows = pa.RecordBatch.from_arrays(columns, schema=schema)
                        yield as_spark_types(rows, target)

        return self.spark.range(0, len(files), 1, len(files)).mapInArrow(read, declared)


def _digest(said: bytes) -> str:
    return blake2b(said, digest_size=8, person=b"ackcore.accepted").hexdigest()


#: The number of objects that the driver reads in parallel.
_READ_AT_ONCE = 16
#: The number of low bits of a row's number that hold its place in its file.
_PLACE_BITS = 40
_NO_END = 1 << _PLACE_BITS


def row_numbers(file: int, places: Int64s) -> Int64s:
    """Return row numbers in the order of the rows, made of the file's number and their places."""
    return (np.int64(file) << _PLACE_BITS) | places


def places_of(numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Return the file numbers and the places in the files for some `row_numbers`."""
    return numbers >> _PLACE_BITS, numbers & ((1 << _PLACE_BITS) - 1)


def read_accepted(file: AcceptedFile, nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file for the sink, in the stream's columns.

    Parameters
    ----------
    file : AcceptedFile
        One of `Accepted.files`.
    nonacked : numpy.ndarray of int64
        `Accepted.nonacked`, the roots whose rows are left out; sorted.

    Raises
    ------
    RowFileDamaged
        Before the first row, if the file has changed since its run wrote it.
    """
    for rows, _ in read_with_places(file, nonacked):
        yield rows


def read_all(files: Sequence[AcceptedFile], nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a few files for the sink, in order; raises as `read_accepted` does.

    Files in a bucket are read in parallel, each as a whole into memory.
    """
    if len(files) < 2 or not is_bucket(files[0].path):
        for file in files:
            yield from read_accepted(file, nonacked)
        return
    with ThreadPoolExecutor(min(len(files), _READ_AT_ONCE)) as readers:
        for found in readers.map(lambda file: list(read_accepted(file, nonacked)), files):
            yield from found


def read_with_places(
    file: AcceptedFile, nonacked: Int64s
) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Yield the batches of `read_accepted`, each with the places of its rows in the file.

    `SinkRejects.at` names a row by its file's number in `Accepted.files` and its place there.
    """
    for batch, places in read_with_roots(file, nonacked):
        yield batch.select(batch.schema.names[:-1]), places


def read_with_roots(
    file: AcceptedFile, nonacked: Int64s
) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Yield the batches of `read_with_places` with one more column: each row's root or roots."""
    start, stop = (0, _NO_END) if file.within is None else file.within
    if start >= stop:
        return
    first = 0
    for batch in read_rows(file.of_rows()):
        if first >= stop:
            break
        if first + len(batch) <= start:
            first += len(batch)
            continue
        low, high = max(0, start - first), min(len(batch), stop - first)
        batch, first = batch.slice(low, high - low), first + low
        keep = acked_rows(batch, nonacked)
        at, end = np.searchsorted(file.refused, [first, first + len(batch)])
        here = file.refused[at:end] - first
        if len(here):
            keep = np.ones(len(batch), np.bool_) if keep is None else keep
            keep[here] = False
        places = first + np.arange(len(batch))
        first += len(batch)
        if keep is not None:
            batch, places = batch.filter(pa.array(keep)), places[keep]
        if len(batch):
            yield batch, places


def check_sink(
    name: str, writer: Any, schema: pa.Schema | None, case_sensitive: bool = False
) -> None:
    """Refuse a sink that could not write the rows of a stream, before anything runs.

    Parameters
    ----------
    name : str
        The sink's name, for errors.
    writer : object
        The writer that was passed to `TopologyBuilder.sink`.
    schema : pyarrow.Schema or None
        The stream's schema, or None if it is not known.
    case_sensitive : bool, default False
        Whether the session distinguishes columns whose names differ only in case.

    Raises
    ------
    TypeError
        If it cannot be called with (DataFrame, batch id), or Spark or Parquet has no type for a
        column.
    """
    if hasattr(writer, "write_accepted"):
        if schema is not None and hasattr(writer, "check"):
            writer.check(name, schema, case_sensitive)
        return
    write = getattr(writer, "write", writer)
    must = f"sink {name!r} must be a function of (DataFrame, batch id) or have a method 'write'"
    if not callable(write):
        raise TypeError(f"{must}, got {type(writer).__name__}")
    try:
        signature = inspect.signature(write)
    except (TypeError, ValueError):
        signature = None  # a builtin
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


def claim_sink(name: str, writer: Any, deployment: str, checkpoint: str) -> None:
    """Call the writer's ``claim``, if it has one: it reserves the target before any run."""
    if hasattr(writer, "claim"):
        writer.claim(name, deployment, checkpoint)


def release_sinks(writers: Mapping[str, Any], deployment: str) -> None:
    """Call ``release`` of each writer that has it; a failure is logged."""
    for name, writer in writers.items():
        if hasattr(writer, "release"):
            error = raised_by(partial(writer.release, name, deployment))
            if error is not None:
                _log.warning("sink %r could not be released: %s", name, one_line(error))


def write_sink(writer: Any, accepted: Accepted) -> SinkRejects | None:
    """Pass the rows of a micro-batch to a writer; return the rows that it refuses, if any."""
    if hasattr(writer, "write_accepted"):
        answer = writer.write_accepted(accepted)
    else:
        write: Callable[[DataFrame, int], object] = getattr(writer, "write", writer)
        answer = write(accepted.frame(), accepted.batch_id)
    # Any other result of a sink is ignored.
    return answer if isinstance(answer, SinkRejects) else None
