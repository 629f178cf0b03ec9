"""Sinks: what takes the rows of ACKED roots out of a micro-batch, each row once.

A sink is a function of (DataFrame, batch id), or an object whose method ``write`` is one.  It may
be called again with the same batch id and the same rows, after a crash or when it raised, and must
then replace what it wrote before: `to_parquet` does so with a directory for each micro-batch.  It
is not called for a micro-batch in which nothing was emitted to it; if all of that hangs from
records that are not ACKED, it is given no rows.

The rows are in files that the run of the micro-batch left in the checkpoint's work directory, so
no bolt runs for a sink.  A writer that has a method ``write_accepted`` is handed those files, as
`Accepted`, and no DataFrame: `to_parquet` and `to_kafka` read them where they lie, past the JVM.

A sink that cannot take some of the rows returns or raises `SinkRejects`, which names them: their
records go to the dead letters, and the query goes on.

Before anything runs its method ``check(sink, schema, case_sensitive)`` is called if it has one, and
of any writer ``claim(sink, deployment, checkpoint)``; both may refuse by raising.  When the query
or `run_batch` has ended, its method ``release(sink, deployment)`` is called if it has one.
One whose attribute ``needs_jvm`` is true is refused on Spark Connect.
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
    """A file with rows for a sink, to be read by `read_accepted`.

    Attributes
    ----------
    path : str
        An Arrow IPC stream file, that driver and executors can read; a URL if it is in a bucket.
    rows : int or None
        In the file, those included that do not count; None if it was not recorded.
    refused : numpy.ndarray of int64, optional
        Rows that the sink has refused, by their places in the file; sorted.
    within : tuple of int, optional
        The first place that counts, and the one behind the last, if not all do: of a part of a
        batch.
    nbytes : int, optional
        In the file; None if it was not recorded, of a file on a file system then.
    """

    path: str
    rows: int | None
    refused: Int64s = _NO_PLACES
    within: tuple[int, int] | None = None
    nbytes: int | None = None

    def of_rows(self) -> RowFile:
        """Return it with what is on record of it."""
        return RowFile(self.path, self.rows, self.nbytes)

    def size(self) -> int:
        """Return how many bytes it has."""
        return os.path.getsize(self.path) if self.nbytes is None else self.nbytes


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
    checkpoint : str
        Where it is, for errors.
    batch_id : int
        The micro-batch.
    files : tuple of AcceptedFile
        Where the rows are, among others: those that hang from `nonacked` roots, and such as the
        sink has refused.  To be read by `read_accepted` or `read_with_places`.
    nonacked : numpy.ndarray of int64
        Roots whose rows do not count; sorted.
    age_ms : int or None, default None
        How long ago the micro-batch was planned, if its rows may have been handed over before the
        driver was started; None if they cannot have been.
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
        """Rows in the files."""
        return sum(file.rows or 0 for file in self.files)

    def schema(self) -> pa.Schema:
        """Return the stream's schema."""
        file = self.files[0]
        # The last column holds the roots.
        return pa.schema(list(read_schema(file.of_rows()))[:-1])

    def fingerprint(self) -> str:
        """Return 16 hex digits that tell these rows from others, as the files' names do."""
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
        """Return `fingerprint` of the rows, whether or not some of them are known as refused."""
        plain = tuple(file._replace(refused=_NO_PLACES) for file in self.files)
        return replace(self, files=plain).fingerprint()

    def foreign(self, where: str, last: int, way_out: str) -> CheckpointForeign:
        """The error for a number that a sink's target has already, with other rows or a later one.

        Parameters
        ----------
        where : str
            The target: ``table orders``.
        last : int
            The number that it has, this micro-batch's or a later one.
        way_out : str
            How the micro-batches from this one to ``last`` are written again.
        """
        return CheckpointForeign(
            f"{where} has micro-batch {last} of sink {self.sink!r}, and {self.batch_id} comes only "
            f"now{' with other rows' * (last == self.batch_id)}: the checkpoint {self.checkpoint} "
            "is older than what was written from it, restored from a backup perhaps. Start with a "
            f"new checkpoint; or {way_out}"
        )

    def verify(self) -> None:
        """Raise `RowFileDamaged` if a file is not as its run left it."""
        for file in self.files:
            read_rows(file.of_rows())

    def frame(self, numbers: str | None = None) -> DataFrame:
        """Return the rows as a DataFrame, a partition for each file.

        Parameters
        ----------
        numbers : str, optional
            One more column, of `row_numbers`.
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


#: Objects that the driver reads beside each other.
_READ_AT_ONCE = 16
#: Bits of a row's number that are its place in its file.
_PLACE_BITS = 40
_NO_END = 1 << _PLACE_BITS


def row_numbers(file: int, places: Int64s) -> Int64s:
    """Return numbers that rise in the order of rows: of a file's number and of places in it."""
    return (np.int64(file) << _PLACE_BITS) | places


def places_of(numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Return the files' numbers and the places of rows, given by their `row_numbers`."""
    return numbers >> _PLACE_BITS, numbers & ((1 << _PLACE_BITS) - 1)


def read_accepted(file: AcceptedFile, nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file that count, in the stream's columns.

    Parameters
    ----------
    file : AcceptedFile
        One of `Accepted.files`.
    nonacked : numpy.ndarray of int64
        `Accepted.nonacked`: roots whose rows do not count; sorted.

    Raises
    ------
    RowFileDamaged
        Before the first row, if the file is not as its run left it.
    """
    for rows, _ in read_with_places(file, nonacked):
        yield rows


def read_all(files: Sequence[AcceptedFile], nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows of few files that count, in order; raises as `read_accepted` does.

    Those in a bucket are read beside each other, and are in memory as a whole.
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
    """Yield what `read_accepted` does, and with each batch the places of its rows in the file.

    `SinkRejects.at` names a row by its file's number in `Accepted.files` and its place there.
    """
    for batch, places in read_with_roots(file, nonacked):
        yield batch.select(batch.schema.names[:-1]), places


def read_with_roots(
    file: AcceptedFile, nonacked: Int64s
) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Yield what `read_with_places` does, with one more column: the root, or roots, of each row."""
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
        The sink's, for errors.
    writer : object
        As `TopologyBuilder.sink` took it.
    schema : pyarrow.Schema or None
        The stream's, or None if it is not known.
    case_sensitive : bool, default False
        Whether the session tells columns apart that differ in case only.

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
        signature = None  # of a builtin
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
    """Have a writer that keeps to itself, as a directory of files does, say so before all runs."""
    if hasattr(writer, "claim"):
        writer.claim(name, deployment, checkpoint)


def release_sinks(writers: Mapping[str, Any], deployment: str) -> None:
    """Have writers let go of what they keep open between micro-batches; a failure is logged."""
    for name, writer in writers.items():
        if hasattr(writer, "release"):
            error = raised_by(partial(writer.release, name, deployment))
            if error is not None:
                _log.warning("sink %r could not be released: %s", name, one_line(error))


def write_sink(writer: Any, accepted: Accepted) -> SinkRejects | None:
    """Give a writer the rows of a micro-batch; return what it refuses, raise whatever it raises."""
    if hasattr(writer, "write_accepted"):
        answer = writer.write_accepted(accepted)
    else:
        write: Callable[[DataFrame, int], object] = getattr(writer, "write", writer)
        answer = write(accepted.frame(), accepted.batch_id)
    # Whatever else a function returns is of its own business, and was so before.
    return answer if isinstance(answer, SinkRejects) else None
