"""The rows of one micro-batch for one sink, and ways to read them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import as_spark_types
from ackcore.spark.base.paths import Place
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.base.versions import from_arrow_schema, to_arrow_schema
from ackcore.spark.sinks.rejects import Reasons, SinkRejects
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.row_files import RowFile, acked_rows, read_rows, read_schema

_NO_PLACES: Int64s = np.empty(0, np.int64)


class BatchFile(NamedTuple):
    """A file with rows for a sink, and those to leave out; `read_sink_file` reads it."""

    #: The path of an Arrow IPC stream file that driver and executors can read; a URL in a bucket.
    path: str
    #: The number of rows in the file, including rows that the sink does not get.
    rows: int
    #: The places of rows that the sink has refused, sorted. A place is the row's index in the file.
    refused: Int64s = _NO_PLACES
    #: The first place to read and the end (exclusive); None for the whole file.
    within: tuple[int, int] | None = None
    #: The size of the file in bytes.  None if it was not recorded; the file is then on a file
    #: system.
    nbytes: int | None = None

    def row_file(self) -> RowFile:
        """Return path, number of rows and size, which `read_rows` compares with the file."""
        return RowFile(self.path, self.rows, self.nbytes)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.path.getsize(self.path) if self.nbytes is None else self.nbytes


def files_of(
    files: Iterable[SinkFile], work: Place, component: str, stream: str
) -> tuple[BatchFile, ...]:
    """Return those of a run's files with rows that a component emitted to a stream, in their order.

    Files without rows are left out. The others also have rows of records that are not ACKED, which
    `read_sink_file` leaves out. ``work``: the directory to which the files' paths are relative.
    """
    return tuple(
        BatchFile(os.path.join(work, file.path), file.rows, nbytes=file.nbytes)
        for file in files
        if (file.component, file.stream) == (component, stream) and file.rows
    )


@dataclass(frozen=True, slots=True)
class SinkBatch:
    """The rows of one micro-batch for one sink: the argument of `Sink.write`.

    The rows are in files in the checkpoint's work directory; `record_batches` reads them on the
    driver, `frame` in tasks. Every read yields the same rows in the same order, also after a crash.

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
    files : tuple of BatchFile
        The files with the rows, at least one.  They also have rows of `nonacked` roots and rows
        that the sink has refused; `read_sink_file` and `read_with_places` leave those out.
    nonacked : numpy.ndarray of int64
        The root ids of the records that are not ACKED, sorted. Their rows are left out.
    age_ms : int or None, default None
        The time in milliseconds since the micro-batch was planned, if an earlier driver may have
        passed its rows to the sink.  None if that is impossible.
    """

    spark: SparkSession
    sink: str
    deployment: str
    checkpoint: str
    batch_id: int
    files: tuple[BatchFile, ...]
    nonacked: Int64s
    age_ms: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows in the files, including rows that the sink does not get."""
        return sum(file.rows for file in self.files)

    def schema(self) -> pa.Schema:
        """Return the stream's schema, which is read from the first file."""
        file = self.files[0]
        # The last column holds the roots.
        return pa.schema(list(read_schema(file.row_file()))[:-1])

    def record_batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows for the sink on the driver, in the stream's columns.

        Rows of `nonacked` roots and rows that the sink has refused are left out. Raises
        RowFileDamaged, before the first row of a file, if it has changed since it was written.
        """
        for file in self.files:
            yield from read_sink_file(file, self.nonacked)

    def numbered(self) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
        """Yield the batches of `record_batches`, each with the numbers of its rows.

        The numbers are unique and increase, with gaps. A row has the same number in all calls for a
        micro-batch. `refuse` takes these numbers.
        """
        for i, file in enumerate(self.files):
            for rows, places in read_with_places(file, self.nonacked):
                yield rows, row_numbers(i, places)

    def all_numbers(self) -> Int64s:
        """Read all files; return the numbers of all rows of `numbered`, ascending."""
        return np.concatenate([_NO_PLACES, *(numbers for _, numbers in self.numbered())])

    def refuse(self, numbers: npt.ArrayLike, reasons: Reasons) -> SinkRejects:
        """Return a `SinkRejects` of some rows. The numbers are not checked here.

        Parameters
        ----------
        numbers : array_like of int
            The numbers of the refused rows, as `numbered` yields them.
        reasons : str, exception, sequence of them, or column of texts
            One reason for all rows, or one for each.
        """
        return SinkRejects.of_numbers(np.asarray(numbers, np.int64), reasons)

    def fingerprint(self) -> str:
        """Return 16 hex digits that identify these rows, without reading them.

        They are a hash of the files' names and row counts, `nonacked`, the refused rows and the
        ranges ``within``. They change when rows are recorded as refused; those of `content` do not.
        """
        files = [
            [os.path.basename(file.path), file.rows, _digest(file.refused.tobytes()), file.within]
            for file in self.files
        ]
        return _digest(json.dumps(files).encode() + self.nonacked.tobytes())

    def content(self) -> str:
        """Return 16 hex digits that identify these rows and those that the sink has refused.

        They are equal in all calls of `Sink.write` for a micro-batch, so a sink records them. With
        ``isolate``, a call for a part of the rows has others.
        """
        plain = tuple(file._replace(refused=_NO_PLACES) for file in self.files)
        return replace(self, files=plain).fingerprint()

    def verify(self) -> None:
        """Read all files; raise `RowFileDamaged` if one has changed since it was written."""
        for file in self.files:
            read_rows(file.row_file())

    def frame(self, numbers: str | None = None) -> DataFrame:
        """Return the rows of `record_batches` as a lazy DataFrame with one partition per file.

        Parameters
        ----------
        numbers : str, optional
            The name of an additional last column, with the numbers of `numbered`.
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


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8, person=b"ackcore.accepted").hexdigest()


#: The number of objects that the driver reads in parallel.
_READ_AT_ONCE = 16
#: The number of low bits of a row's number that hold its place in its file.
_PLACE_BITS = 40
_NO_END = 1 << _PLACE_BITS


def row_numbers(file: int, places: Int64s) -> Int64s:
    """Return numbers for rows of file ``file`` of `SinkBatch.files`, from their indexes in it."""
    return (np.int64(file) << _PLACE_BITS) | places


def files_and_places(numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Return the file indexes and the places from which `row_numbers` made the numbers."""
    return numbers >> _PLACE_BITS, numbers & (_NO_END - 1)


def read_sink_file(file: BatchFile, nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file for the sink, in the stream's columns, in batches that have rows.

    Raises RowFileDamaged before the first row, if the file has changed since it was written.

    ``file``: one of `SinkBatch.files`; its refused rows and those not ``within`` are left out.
    ``nonacked``: sorted root ids, whose rows are left out.
    """
    for rows, _ in read_with_places(file, nonacked):
        yield rows


def read_all(files: Sequence[BatchFile], nonacked: Int64s) -> Iterator[pa.RecordBatch]:
    """Yield the rows that `read_sink_file` yields for each of a few files, in their order.

    Raises RowFileDamaged if a file has changed since it was written. Files in a bucket are read in
    parallel by up to 16 threads, each as a whole into memory.
    """
    if len(files) < 2 or not is_bucket(files[0].path):
        for file in files:
            yield from read_sink_file(file, nonacked)
        return
    with ThreadPoolExecutor(min(len(files), _READ_AT_ONCE)) as readers:
        for found in readers.map(lambda file: list(read_sink_file(file, nonacked)), files):
            yield from found


def read_with_places(file: BatchFile, nonacked: Int64s) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Yield the batches of `read_sink_file`, each with the places of its rows in the file.

    A place is the index of a row among all rows of the file.
    """
    for batch, places in read_with_roots(file, nonacked):
        yield batch.select(batch.schema.names[:-1]), places


def read_with_roots(file: BatchFile, nonacked: Int64s) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Yield the batches of `read_with_places` with their places and one more column, the last.

    It has each row's root id, or its list of root ids.
    """
    start, stop = (0, _NO_END) if file.within is None else file.within
    if start >= stop:
        return
    first = 0
    for batch in read_rows(file.row_file()):
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
