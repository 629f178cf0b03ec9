"""Arrow IPC files named by their fingerprint: rows for the sinks, due retries, spilled input.

A file is an Arrow IPC stream.  It is written under a random name.  When it is finished, a rename
or, in a bucket, a put gives it a name made of its partition and the fingerprint of its content.  So
a task that runs again leaves the same file for the same output, and another for other output.  The
driver writes due retries, and tasks write the others.

A file for a sink has the emitted columns and one more, which serves to remove the rows of records
that are not ACKED: ``_ackcore_root``, null for an untracked row.  Rows with several roots are in a
file of their own, with ``_ackcore_roots``.

A reader checks the fingerprint in the name and the recorded number of rows before it returns the
first row.  This extra pass over the bytes costs a few percent of reading Parquet.  Without it, a
row that changed on the disk would not be detected.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore._backend import fingerprint
from ackcore._error_hints import counted, text_of_error
from ackcore._records import Bools, Int64s
from ackcore.spark.base.errors import RowFileDamaged
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.stores.run_files import made_in, publish, read_file
from ackcore.spark.tasks.tracking import NONE, AnchoredRows, Chunks, folded

#: Columns with the root of a sink's row, the root of a record read again, and a sink row's roots.
ROOT = "_ackcore_root"
ROOT_ID = "_ackcore_root_id"
ROOTS = "_ackcore_roots"
#: The column with the row number of a failed record among the due ones, null for a new record.
PLACE = "_ackcore_place"
#: The column with whether the reason of a judged failure counts, regardless of its age.
COUNTS = "_ackcore_counts"

Number = TypeVar("Number", np.int64, np.uint64)

#: The number of roots looked up at a time: their places take as much memory as the roots.
_LOOKED_UP = 1 << 20
#: The number of files that a task puts into a bucket in parallel.
_PUT_AT_ONCE = 8
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an IPC stream
_NAME = re.compile(r"[0-9]+-([0-9a-f]{16})-(one|many)\.arrow")
_DAMAGED = re.compile(rf"\b{RowFileDamaged.__name__}: (.+)")


class RowFile(NamedTuple):
    """The path or URL of a file, and its recorded numbers of rows and bytes; None: unrecorded."""

    path: str
    rows: int
    nbytes: int | None = None


class RowFileWriter:
    """A file that is being written. Its IPC messages are made here, so that they can be hashed.

    ``directory``: the directory or URL for the finished file. ``synced``: whether it must survive
    if the machine stops.

    Attributes: ``nbytes``: the number of bytes written so far.
    """

    def __init__(
        self, directory: str, schema: pa.Schema, partition: int, *, synced: bool = True
    ) -> None:
        self._directory = directory
        self._partition = partition
        self._synced = synced
        self._kind = "many" if ROOTS in schema.names else "one"
        # Random: other attempts at the task, or tasks of a dead driver, may write at the same time.
        self._path = os.path.join(made_in(directory), f".{secrets.token_hex(8)}")
        self._file: BinaryIO = open(self._path, "wb")  # noqa: SIM115
        self._rows = self.nbytes = 0
        self._fingerprint = 0
        self._write(schema.serialize())

    def _write(self, data: pa.Buffer | bytes) -> None:
        self._fingerprint = fingerprint(data, self._fingerprint)
        self.nbytes += memoryview(data).nbytes
        self._file.write(data)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows. ``batch`` must have the file's schema, which is not checked."""
        self._rows += len(batch)
        self._write(batch.serialize())

    def close(self) -> None:
        """Close the file. An unfinished file for a bucket is deleted; a local one stays."""
        self._file.close()
        if os.path.dirname(self._path) != self._directory:
            # No sweep deletes local files that were meant for a bucket.
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)

    def finish(self) -> tuple[str, int, int]:
        """Close, name and publish the file; return its name, number of rows and fingerprint."""
        with self._file:
            self._write(_END)
            self._file.flush()
            if self._synced:
                os.fsync(self._file.fileno())
        name = f"{self._partition}-{self._fingerprint & 0xFFFFFFFFFFFFFFFF:016x}-{self._kind}.arrow"
        publish(self._path, self._directory, name, synced=self._synced)
        return name, self._rows, self._fingerprint


class SinkRowWriter:
    """A writer of one task's sink files: up to two for a stream, one with rows of several roots."""

    def __init__(
        self, work: str, schemas: Mapping[tuple[str, str], pa.Schema], partition: int
    ) -> None:
        self._work = work
        self._schemas = schemas
        self._partition = partition
        self._files: dict[tuple[str, str], dict[str, RowFileWriter]] = {}

    def write(self, component: str, stream: str, rows: AnchoredRows, chunks: Chunks) -> None:
        """Append rows to their stream's file, or to its file for several roots if any has them."""
        column = _roots(rows, chunks)
        name = ROOTS if pa.types.is_list(column.type) else ROOT
        schema = self._schemas[component, stream].append(pa.field(name, column.type))
        files = self._files.setdefault((component, stream), {})
        if name not in files:
            directory = os.path.join(self._work, _place(component, stream))
            files[name] = RowFileWriter(directory, schema, self._partition)
        files[name].write(pa.RecordBatch.from_arrays([*rows.batch.columns, column], schema=schema))

    def close(self) -> None:
        """Close unfinished files."""
        for files in self._files.values():
            for file in files.values():
                file.close()

    def finish(self) -> Iterator[tuple[SinkFile, int]]:
        """Finish the files; yield each, by its path in the run's directory, and its fingerprint."""
        written = [
            (place, file)
            for place, files in self._files.items()
            for _, file in sorted(files.items())
        ]
        ends = finished([file for _, file in written], self._work)
        for ((component, stream), file), (name, rows, of_file) in zip(written, ends, strict=True):
            path = os.path.join(_place(component, stream), name)
            yield SinkFile(component, stream, path, rows, file.nbytes), of_file


def finished(files: Sequence[RowFileWriter], work: str) -> list[tuple[str, int, int]]:
    """Finish files, in parallel in a bucket; return the results of `RowFileWriter.finish`."""
    if len(files) < 2 or not is_bucket(work):
        return [file.finish() for file in files]
    with ThreadPoolExecutor(min(len(files), _PUT_AT_ONCE)) as beside:
        return list(beside.map(RowFileWriter.finish, files))


def _place(component: str, stream: str) -> str:
    return os.path.join("rows", component, stream)


def _roots(rows: AnchoredRows, chunks: Chunks) -> pa.Array:
    """Return the root of each row, or a list of roots for each if any row has several."""
    only_chunk = rows.only_chunk
    if only_chunk is not None and only_chunk.offsets is None and rows.owners.offsets is None:
        return pa.array(only_chunk.roots[rows.owners.ids - only_chunk.first])
    row, root = chunks.roots_of(rows.owners)
    n = len(rows)
    if not len(row):
        return pa.nulls(n, pa.int64())
    row, root, _ = folded(row, root, root, np.minimum)
    counts = np.bincount(row, minlength=n)
    if counts.max(initial=0) <= 1:
        one = np.full(n, NONE, np.int64)
        one[row] = root
        return pa.array(one, mask=counts == 0)
    offsets = pa.array(offsets_of(counts).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(root))


def read_rows(file: RowFile) -> list[pa.RecordBatch]:
    """Return a file's batches, memory-mapped where possible, with the roots as a column.

    Raises RowFileDamaged if the file is missing, was changed, or has another number of rows than
    recorded. Raises StateError if the operating system cannot read the file.
    """
    return _read(file)[1]


def read_whole(file: RowFile) -> pa.Table:
    """Return a file as a table, without a copy; RowFileDamaged if it is missing or has changed."""
    schema, batches = _read(file)
    return pa.Table.from_batches(batches, schema)


def read_schema(file: RowFile) -> pa.Schema:
    """Return a file's schema, with the roots; RowFileDamaged if it is missing or has changed."""
    return _read(file)[0]


def has_several_roots(path: str) -> bool:
    """Return whether rows of a file may have several roots each: by its name, True if unknown."""
    named = _NAME.fullmatch(os.path.basename(path))
    return named is None or named[2] == "many"


def partition_in(path: str) -> int:
    """Return the partition that wrote a file, from the file's name."""
    return int(os.path.basename(path).partition("-")[0])


def damage_in(error: BaseException | None) -> RowFileDamaged | None:
    """Return the error about a damaged file that caused a driver's or worker's error, or None."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RowFileDamaged):
            return error
        # A worker's error is text within tracebacks of Python and Java.
        told = _DAMAGED.search(text_of_error(error))
        if told is not None:
            return RowFileDamaged(told[1])
        error = error.__cause__ or error.__context__
    return None


def _read(file: RowFile) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    path, rows, nbytes = file
    data = read_file(path)
    if data is None:
        raise _damaged(path, "is missing, though the checkpoint refers to it")
    named = _NAME.fullmatch(os.path.basename(path))
    if named is None:
        raise _damaged(path, "has no fingerprint in its name, as row files have")
    if nbytes is not None and data.size != nbytes:
        raise _damaged(path, f"is damaged: it has {data.size} bytes instead of {nbytes}")
    if f"{_fingerprint_of(data) & 0xFFFFFFFFFFFFFFFF:016x}" != named[1]:
        raise _damaged(
            path, f"is damaged: its {data.size} bytes do not match the fingerprint in its name"
        )
    with pa.ipc.open_stream(data) as reader:
        schema, batches = reader.schema, list(reader)
    found = sum(map(len, batches))
    if found != rows:
        raise _damaged(path, f"has {counted(found, 'row')} instead of {rows}")
    return schema, batches


def _fingerprint_of(data: pa.Buffer) -> int:
    """Return the fingerprint of a file, computed message by message like in `RowFileWriter`."""
    so_far = at = 0
    messages = pa.BufferReader(data)
    try:
        while True:
            pa.ipc.read_message(messages)
            end = messages.tell()
            so_far = fingerprint(data.slice(at, end - at), so_far)
            at = end
    except (MemoryError, pa.ArrowCancelled):
        raise
    except (EOFError, OSError, pa.ArrowException):
        # The end of the stream, or bytes that are no message.
        return fingerprint(data.slice(at), so_far)


def _damaged(path: str, what: str) -> RowFileDamaged:
    return RowFileDamaged(
        f"{path} {what}. If its micro-batch is decided, this file is the only copy of its rows, "
        "and some sink or table does not have them yet: restore the file from a backup, "
        "and start again"
    )


def acked_rows(batch: pa.RecordBatch, failed: Int64s) -> Bools | None:
    """Return a mask of the rows of a sink's file without a failed root; None if no row has one.

    ``failed``: the roots that are not ACKED, sorted.
    """
    roots = batch.column(len(batch.schema) - 1)
    if not len(failed):
        return None
    if pa.types.is_list(roots.type):
        values = roots.values.to_numpy()
        found = among(values, failed)
        before = offsets_of(found)
        offsets = roots.offsets.to_numpy()
        bad = before[offsets[1:]] > before[offsets[:-1]]
    else:
        bad = among(roots.fill_null(0).to_numpy(zero_copy_only=False), failed)
        if roots.null_count:
            bad &= roots.is_valid().to_numpy(zero_copy_only=False)
    return ~bad if bad.any() else None


def among(numbers: npt.NDArray[Number], known: npt.NDArray[Number]) -> Bools:
    """Return whether each number is among the known ones, which must be sorted."""
    found = np.zeros(len(numbers), np.bool_)
    for start in range(0, len(numbers) if len(known) else 0, _LOOKED_UP):
        some = numbers[start : start + _LOOKED_UP]
        places = np.searchsorted(known, some)
        places[places == len(known)] = 0
        found[start : start + _LOOKED_UP] = known[places] == some
    return found
