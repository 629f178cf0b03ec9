"""Arrow IPC files named by their fingerprint: rows for the sinks, due retries, spilled input.

A file is an Arrow IPC stream.  It is written under a random name, and when it is finished it gets
that of its partition and the fingerprint of its content, by a rename or, in a bucket, by a put: a
task that runs again and answers alike leaves the same file, one that answers otherwise another.
The driver writes the retries that are due, and tasks write the others.

A file for a sink has the emitted columns and one more, by which rows of records that are not ACKED
are taken out again: ``_ackcore_root``, null for an untracked row; or, in a file of its own,
``_ackcore_roots`` for rows that hang from several.

Whoever reads a file holds it to the fingerprint in its name, and to the rows that are on record,
before the first row is handed out: to run over it once more, in memory that is read anyway, is some
percent of what Parquet costs, and a row that was changed on the disk would be believed for ever.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._records import Int64s
from ackcore._shuffle import fingerprint
from ackcore.arrow import offsets_of
from ackcore.spark.base.errors import RowFileDamaged, StateError
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.stores.files import made_in, publish, read_file
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.tracking import NONE, AnchoredRows, Chunks

#: Columns with the root of a row for sinks, and of a record that is read again.
ROOT = "_ackcore_root"
ROOT_ID = "_ackcore_root_id"
ROOTS = "_ackcore_roots"
#: Of a record that is read again: its place among those due, null for a new one.
PLACE = "_ackcore_place"
#: Of one that was written: whether its failure was an attempt, but for its age.
COUNTS = "_ackcore_counts"

#: Of roots that are looked for so many at a time: their places take as much room as they do.
_LOOKED_UP = 1 << 20
#: A task puts so many files into a bucket beside each other.
_PUT_AT_ONCE = 8
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an IPC stream
_NAME = re.compile(r"[0-9]+-([0-9a-f]{16})-(one|many)\.arrow")
_DAMAGED = re.compile(rf"\b{RowFileDamaged.__name__}: (.+)")


class RowFile(NamedTuple):
    """A file by its path or URL, and what is on record for it: rows and bytes, None if not."""

    path: str
    rows: int | None
    nbytes: int | None = None


class RowFileWriter:
    """One file that is being written; its messages are made here, to be hashed as they leave.

    One that is not ``synced`` may be gone when the machine stops.

    Attributes
    ----------
    nbytes : int
        What was written so far.
    """

    def __init__(
        self,
        directory: str,
        schema: pa.Schema,
        partition: int,
        attempt: int,
        *,
        synced: bool = True,
    ) -> None:
        self._directory = directory
        self._partition = partition
        self._synced = synced
        self._kind = "many" if ROOTS in schema.names else "one"
        # Attempts are counted by each SparkContext, and this may be a task of a dead driver's.
        name = f".{attempt}-{secrets.token_hex(8)}-{self._kind}"
        self._path = os.path.join(made_in(directory), name)
        self._file: BinaryIO = open(self._path, "wb")  # noqa: SIM115
        self._rows = self.nbytes = 0
        self._fingerprint = 0
        self._write(schema.serialize())

    def _write(self, data: pa.Buffer | bytes) -> None:
        self._fingerprint = fingerprint(data, self._fingerprint)
        self.nbytes += memoryview(data).nbytes
        self._file.write(data)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        self._rows += len(batch)
        self._write(batch.serialize())

    def close(self) -> None:
        """Let go of a file that is not to be finished; one that is finished stays."""
        self._file.close()
        if os.path.dirname(self._path) != self._directory:
            # Nobody sweeps what was to go from here to a bucket.
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)

    def finish(self) -> tuple[str, int, int]:
        """Close the file and give it its name; return that, its rows and its fingerprint."""
        with self._file:
            self._write(_END)
            self._file.flush()
            if self._synced:
                os.fsync(self._file.fileno())
        name = f"{self._partition}-{self._fingerprint & 0xFFFFFFFFFFFFFFFF:016x}-{self._kind}.arrow"
        publish(self._path, self._directory, name, synced=self._synced)
        return name, self._rows, self._fingerprint


class SinkRowWriter:
    """The files that one task writes: at most one of each kind for each stream with a sink."""

    def __init__(
        self,
        work: str,
        schemas: Mapping[tuple[str, str], pa.Schema],
        partition: int,
        attempt: int,
    ) -> None:
        self._work = work
        self._schemas = schemas
        self._about = (partition, attempt)
        self._files: dict[tuple[str, str], dict[str, RowFileWriter]] = {}

    def write(self, component: str, stream: str, rows: AnchoredRows, chunks: Chunks) -> None:
        """Append rows of a stream to the file of their kind."""
        column = _roots(rows, chunks)
        name = ROOTS if pa.types.is_list(column.type) else ROOT
        schema = self._schemas[component, stream].append(pa.field(name, column.type))
        files = self._files.setdefault((component, stream), {})
        if name not in files:
            directory = os.path.join(self._work, _place(component, stream))
            files[name] = RowFileWriter(directory, schema, *self._about)
        files[name].write(pa.RecordBatch.from_arrays([*rows.batch.columns, column], schema=schema))

    def close(self) -> None:
        """Let go of files that are not finished."""
        for files in self._files.values():
            for file in files.values():
                file.close()

    def finish(self) -> Iterator[tuple[SinkFile, int]]:
        """Close the files; yields each, by its path in the run's directory, and its fingerprint."""
        places = []
        writers = []
        for (component, stream), files in self._files.items():
            for _, file in sorted(files.items()):
                places.append((component, stream))
                writers.append(file)
        for (component, stream), file, (name, rows, of_file) in zip(
            places, writers, finished(writers, self._work), strict=True
        ):
            path = os.path.join(_place(component, stream), name)
            yield SinkFile(component, stream, path, rows, file.nbytes), of_file


def finished(files: Sequence[RowFileWriter], work: str) -> list[tuple[str, int, int]]:
    """Finish files; to a bucket they are put beside each other."""
    if len(files) < 2 or not is_bucket(work):
        return [file.finish() for file in files]
    with ThreadPoolExecutor(min(len(files), _PUT_AT_ONCE)) as beside:
        return list(beside.map(RowFileWriter.finish, files))


def _place(component: str, stream: str) -> str:
    return os.path.join("rows", component, stream)


def _roots(rows: AnchoredRows, chunks: Chunks) -> pa.Array:
    """The root of each row, or the roots of each if any has several."""
    only_chunk = rows.only_chunk
    if only_chunk is not None and only_chunk.offsets is None and rows.owners.offsets is None:
        return pa.array(only_chunk.roots[rows.owners.ids - only_chunk.first])
    row, root = chunks.roots_of(rows.owners)
    n = len(rows)
    if not len(row):
        return pa.nulls(n, pa.int64())
    by = np.lexsort((root, row))
    row, root = row[by], root[by]
    new = np.ones(len(row), np.bool_)
    new[1:] = (row[1:] != row[:-1]) | (root[1:] != root[:-1])
    row, root = row[new], root[new]
    counts = np.bincount(row, minlength=n)
    if counts.max(initial=0) <= 1:
        one = np.full(n, NONE, np.int64)
        one[row] = root
        return pa.array(one, mask=counts == 0)
    offsets = pa.array(offsets_of(counts).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(root))


def read_rows(file: RowFile) -> list[pa.RecordBatch]:
    """Read a file's batches, their roots among the columns, in place.

    Raises
    ------
    RowFileDamaged
        If it is missing, not as it was written, or has other rows than are on record.
    StateError
        If the system does not let it be read.
    """
    return _read(file)[1]


def read_whole(file: RowFile) -> pa.Table:
    """Read a file as a table, in place; raises as `read_rows` does."""
    schema, batches = _read(file)
    return pa.Table.from_batches(batches, schema)


def read_schema(file: RowFile) -> pa.Schema:
    """Read the columns of a file, the one of the roots among them; raises as `read_rows` does."""
    return _read(file)[0]


def has_several_roots(path: str) -> bool:
    """Whether the rows of a file may hang from several roots each, by its name."""
    named = _NAME.fullmatch(os.path.basename(path))
    return named is None or named[2] == "many"


def partition_in(path: str) -> int:
    """Return the partition that wrote a file; its name tells."""
    return int(os.path.basename(path).partition("-")[0])


def damage_in(error: BaseException | None) -> RowFileDamaged | None:
    """Return the damaged file that an error is about, found here or in a worker."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RowFileDamaged):
            return error
        # What a worker raised is text, in the midst of tracebacks of Python's and Java's.
        told = _DAMAGED.search(str(error))
        if told is not None:
            return RowFileDamaged(told[1])
        error = error.__cause__ or error.__context__
    return None


def _read(file: RowFile) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    path, rows, nbytes = file
    try:
        data = read_file(path)
    except FileNotFoundError:
        raise _damaged(path, "is missing, though a record names it") from None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error}") from error
    named = _NAME.fullmatch(os.path.basename(path))
    if named is None:
        raise _damaged(path, "does not carry a fingerprint in its name, as row files do")
    if nbytes is not None and data.size != nbytes:
        raise _damaged(path, f"is damaged: it has {data.size} bytes, and {nbytes} are on record")
    if f"{_fingerprint_of(data) & 0xFFFFFFFFFFFFFFFF:016x}" != named[1]:
        raise _damaged(
            path, f"is damaged: its {data.size} bytes do not have the fingerprint in its name"
        )
    with pa.ipc.open_stream(data) as reader:
        schema, batches = reader.schema, list(reader)
    found = sum(map(len, batches))
    if rows is not None and found != rows:
        raise _damaged(path, f"has {found} rows, and {rows} are on record")
    return schema, batches


def _fingerprint_of(data: pa.Buffer) -> int:
    """Return the fingerprint of a file, message by message, as `RowFileWriter` draws it."""
    so_far = at = 0
    messages = pa.BufferReader(data)
    try:
        while True:
            pa.ipc.read_message(messages)
            end = messages.tell()
            so_far = fingerprint(data.slice(at, end - at), so_far)
            at = end
    except (EOFError, OSError, pa.ArrowException):
        # The end, or what cannot be a message; whatever is left is no message of ours.
        return fingerprint(data.slice(at), so_far)


def _damaged(path: str, what: str) -> RowFileDamaged:
    return RowFileDamaged(
        f"{path} {what}. If its micro-batch is decided, no other place has these rows, and nothing "
        "of them was written: restore the file from a backup and start again, and it goes on there"
    )


def acked_rows(batch: pa.RecordBatch, failed: Int64s) -> npt.NDArray[np.bool_] | None:
    """Return which rows have roots that are all ACKED; None if all rows do."""
    roots = batch.column(len(batch.schema) - 1)
    if not len(failed):
        return None
    if pa.types.is_list(roots.type):
        values = roots.values.to_numpy()
        found = among(values, failed)
        before = np.concatenate(([0], np.cumsum(found)))
        offsets = roots.offsets.to_numpy()
        bad = before[offsets[1:]] > before[offsets[:-1]]
    else:
        bad = among(roots.fill_null(0).to_numpy(zero_copy_only=False), failed)
        if roots.null_count:
            bad &= roots.is_valid().to_numpy(zero_copy_only=False)
    return ~bad if bad.any() else None


def among(roots: Int64s, failed: Int64s) -> npt.NDArray[np.bool_]:
    """Return which roots are among those that failed, which are sorted."""
    found = np.zeros(len(roots), np.bool_)
    for start in range(0, len(roots) if len(failed) else 0, _LOOKED_UP):
        some = roots[start : start + _LOOKED_UP]
        places = np.searchsorted(failed, some)
        places[places == len(failed)] = 0
        found[start : start + _LOOKED_UP] = failed[places] == some
    return found
