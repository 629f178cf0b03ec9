"""Files that tasks leave for the sinks: rows, and the roots that they hang from.

A file is an Arrow IPC stream of the emitted columns and one more, by which rows of records that
are not ACKED are taken out again: ``_ackcore_root``, null where nobody tracks the row; or, in a
file of its own, ``_ackcore_roots`` for rows that hang from several.  It is written under the
number of Spark's attempt, which no two have in common, and renamed when the task is done to its
partition and the fingerprint of its content: a task that runs again and answers alike leaves the
same file, one that answers otherwise another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._records import Int64s
from ackcore._rows import fingerprint
from ackcore.arrow import offsets_of
from ackcore.spark.files import sync_directory
from ackcore.spark.tracking import NONE, Chunks, Rows

#: By which rows for sinks, and records that are read again, tell their root.
ROOT = "_ackcore_root"
ROOT_ID = "_ackcore_root_id"
ROOTS = "_ackcore_roots"

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of an IPC stream


class RowFile:
    """One file that is being written; its messages are made here, to be hashed as they leave."""

    def __init__(self, directory: str, schema: pa.Schema, partition: int, attempt: int) -> None:
        os.makedirs(directory, exist_ok=True)
        self._directory = directory
        self._partition = partition
        self._kind = "many" if ROOTS in schema.names else "one"
        self._path = os.path.join(directory, f".{attempt}-{self._kind}")
        self._file: BinaryIO = open(self._path, "wb")  # noqa: SIM115
        self._rows = 0
        self._seal = 0
        self._write(schema.serialize())

    def _write(self, data: pa.Buffer | bytes) -> None:
        self._seal = fingerprint(data, self._seal)
        self._file.write(data)

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows."""
        self._rows += len(batch)
        self._write(batch.serialize())

    def finish(self) -> tuple[str, int, int]:
        """Close the file and give it its name; return that, its rows and its fingerprint."""
        self._write(_END)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        name = f"{self._partition}-{self._seal & 0xFFFFFFFFFFFFFFFF:016x}-{self._kind}.arrow"
        os.replace(self._path, os.path.join(self._directory, name))
        # A decision that names the file must not outlast the name.
        sync_directory(Path(self._directory))
        return name, self._rows, self._seal


class RowFiles:
    """The files that one task writes of one stream: at most one of each kind."""

    def __init__(self, directory: str, schema: pa.Schema, partition: int, attempt: int) -> None:
        self._about = (directory, partition, attempt)
        self._schema = schema
        self._files: dict[str, RowFile] = {}

    def write(self, rows: Rows, chunks: Chunks) -> None:
        """Append rows to the file of their kind."""
        column = _roots(rows, chunks)
        name = ROOTS if pa.types.is_list(column.type) else ROOT
        schema = self._schema.append(pa.field(name, column.type))
        file = self._files.get(name)
        if file is None:
            directory, partition, attempt = self._about
            file = self._files[name] = RowFile(directory, schema, partition, attempt)
        file.write(pa.RecordBatch.from_arrays([*rows.batch.columns, column], schema=schema))

    def finish(self) -> Iterator[tuple[str, int, int]]:
        """Close the files; yields the name, the rows and the fingerprint of each."""
        for _, file in sorted(self._files.items()):
            yield file.finish()


def _roots(rows: Rows, chunks: Chunks) -> pa.Array:
    """The root of each row, or the roots of each if any has several."""
    home = rows.home
    if home is not None and home.offsets is None and rows.owners.offsets is None:
        return pa.array(home.roots[rows.owners.ids - home.first])
    of_row, of_group = rows.owners.pairs()
    found: list[tuple[Int64s, Int64s]] = []
    for chunk, places in chunks.split(of_group):
        of, at = chunk.entries_of(of_group[places] - chunk.first)
        found.append((of_row[places][of], chunk.roots[at]))
    n = len(rows)
    if not found:
        return pa.nulls(n, pa.int64())
    row = np.concatenate([one for one, _ in found])
    root = np.concatenate([one for _, one in found])
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


def read_rows(path: str) -> Iterator[pa.RecordBatch]:
    """Read a file's batches, their roots among the columns, in place."""
    with pa.memory_map(path) as source, pa.ipc.open_stream(source) as reader:
        yield from reader


def keep_acked(batch: pa.RecordBatch, failed: Int64s) -> pa.RecordBatch:
    """Return the rows all of whose roots are ACKED, without the column of roots.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        As `read_rows` gives them.
    failed : numpy.ndarray of int64, shape (m,)
        The roots that are not ACKED, sorted.
    """
    roots = batch.column(len(batch.schema) - 1)
    rows = batch.select(batch.schema.names[:-1])
    if not len(failed):
        return rows
    if pa.types.is_list(roots.type):
        values = roots.values.to_numpy()
        found = _among(values, failed)
        before = np.concatenate(([0], np.cumsum(found)))
        offsets = roots.offsets.to_numpy()
        bad = before[offsets[1:]] > before[offsets[:-1]]
    else:
        bad = _among(roots.fill_null(0).to_numpy(zero_copy_only=False), failed)
        if roots.null_count:
            bad &= roots.is_valid().to_numpy(zero_copy_only=False)
    return rows.filter(pa.array(~bad)) if bad.any() else rows


def _among(roots: Int64s, failed: Int64s) -> npt.NDArray[np.bool_]:
    places = np.searchsorted(failed, roots)
    places[places == len(failed)] = 0
    found: npt.NDArray[np.bool_] = failed[places] == roots
    return found
