"""The files of a store of dead letters: how they are verified, opened and read."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ackcore._records import Int64s
from ackcore.spark.base.checksummed import checksum_of
from ackcore.spark.base.errors import StateError, corrupt
from ackcore.spark.base.letter_columns import as_written, write_letters
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.shared_record import INDEX
from ackcore.spark.stores.interface import Store

#: A column that is null only in emptied rows.
ATTEMPTS = "attempts"
#: The name of a file of letters: of a micro-batch, from a position on, or of several micro-batches.
_NAME = re.compile(r"(?:batch-(\d+)(?:\.(\d+))?|batches-(\d+)-(\d+)\.\d+)\.e\d+\.\w+\.parquet")
#: The end of the name of an empty file by which a user gives up a file of letters.
GIVEN_UP = ".given-up"

Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]
#: Size of the cache in bytes. A file is opened once for each column that is read, and a driver
#: merges files that it has put.
_KEPT_BYTES = 1 << 25


class Objects:
    """A reader of a store's objects, which verifies each one and caches the last ones.

    ``find``: returns the file that has replaced a missing one, or None.
    """

    def __init__(self, store: Store, find: Callable[[ObjectFile], ObjectFile | None]) -> None:
        self.store = store
        self.find = find
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, pa.Buffer] = OrderedDict()

    def read(self, key: str, size: int, digest: str) -> pa.Buffer:
        """Return the bytes of an object, of ``size`` bytes with the checksum ``digest``.

        Raises FileNotFoundError if it is missing, pyarrow.ArrowInvalid if size or checksum differ.
        """
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = self.store.read(key)
        if data is None:
            raise FileNotFoundError(key)
        if data.size != size or checksum_of(data, len(digest)) != digest:
            raise pa.ArrowInvalid(
                f"the length or checksum of its {data.size} bytes differs from that in {INDEX}"
            )
        self.keep(key, data)
        return data

    def keep(self, key: str, data: pa.Buffer) -> None:
        """Put an object's verified bytes into the cache, and drop others while it has over 32 MiB.

        The least recently read ones are dropped first.
        """
        with self._lock:
            self._kept[key] = data
            while len(self._kept) > 1 and sum(it.size for it in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """A file of letters in a store, with its recorded length and checksum.

    ``end``: the position of the next file's first letter, if its micro-batch has a next file.
    """

    objects: Objects = field(compare=False, repr=False)
    key: str
    size: int
    digest: str
    end: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    def __fspath__(self) -> str:
        """Return the path or URL of the file, for messages."""
        return f"{self.objects.store.url}/{self.key}"

    def open(self) -> pa.NativeFile:
        """Open the file, or the same letters in the same rows in the file that replaced it.

        Raises FileNotFoundError if it is missing without replacement, pyarrow.ArrowInvalid if it is
        damaged, CheckpointCorrupt if the replacement is missing or damaged.
        """
        try:
            data = self.objects.read(self.key, self.size, self.digest)
        except FileNotFoundError:
            now = self.objects.find(self)
            if now in (None, self):
                raise
            data = _cut(now, self)
            self.objects.keep(self.key, data)
        return pa.BufferReader(data)


def _cut(now: ObjectFile, old: ObjectFile) -> pa.Buffer:
    """Return a file with the letters of ``old``, in the same rows, made from the file ``now``."""
    first, last = batches_of(old)
    batch_ids = batch_rows(now).batch_ids
    low, high = np.searchsorted(batch_ids, [first, last + 1]).tolist()
    wanted = np.zeros(len(batch_ids), np.bool_)
    low -= position_of(now)
    wanted[low + position_of(old) : high if old.end is None else min(low + old.end, high)] = True
    sink = pa.BufferOutputStream()
    write_letters(sink, read_schema(now), read_parts(now, wanted))
    return sink.getvalue()


#: Writes a file of letters.
Fill = Callable[[BinaryIO], object]


class LetterFile(NamedTuple):
    """A file of letters, with its first and last micro-batch, and how often it was merged.

    The letters of a micro-batch may be in several files (`position_of`).
    """

    path: ObjectFile
    first: int  # the first micro-batch
    last: int  # the last micro-batch
    level: int  # the number of times that its letters were merged into a larger file


class NewFile(NamedTuple):
    """A file of letters to write, by the driver or as a link to a file of a task.

    ``source``: the file of the task, if there is one. Its name contains its checksum.
    """

    position: int  # of its first letter among the micro-batch's letters
    fill: Fill  # writes the file
    source: Place | None = None
    nbytes: int = 0  # the length of ``source``


class FileGroup(NamedTuple):
    """The files of a spout whose letters have the same columns."""

    spout: str
    files: list[LetterFile]


class NotesChanged(StateError):
    """Another process added a note, or opened the store, after this one had read the notes."""


def read_parts(
    path: ObjectFile,
    wanted: Bools | None = None,
    columns: list[str] | None = None,
    *,
    encoded: Sequence[str] = (),
) -> Iterator[pa.Table]:
    """Yield the letters of a file, one table for each row group with wanted rows.

    Raises CheckpointCorrupt if the file is damaged or missing.

    ``wanted``: a mask of the rows to read; all by default. ``columns``: the columns to read, in the
    order of the file; all by default. ``encoded``: text columns to return dictionary-encoded.
    """
    with reading_letters(path, buffer_size=1 << 20, read_dictionary=list(encoded)) as file:
        start = 0
        for n in range(file.num_row_groups):
            rows = file.metadata.row_group(n).num_rows
            here = None if wanted is None else wanted[start : start + rows]
            start += rows
            if here is None:
                yield as_written(file, file.read_row_group(n, columns))
            elif here.any():
                letters = file.read_row_group(n, columns).filter(pa.array(here))
                yield as_written(file, letters)


@contextlib.contextmanager
def reading_letters(path: ObjectFile, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a file of letters as a ParquetFile for a ``with`` block.

    Raises CheckpointCorrupt if the file is damaged or missing, also for an Arrow or OS error in the
    block, but not for a lack of memory or a cancellation.

    ``options``: more arguments of ParquetFile.
    """
    try:
        with pq.ParquetFile(path.open(), page_checksum_verification=True, **options) as file:
            yield file
    except (MemoryError, pa.ArrowCancelled):
        raise
    except (pa.ArrowException, OSError) as error:
        way_out = (
            "Put the file back from a backup; or make an empty file beside it with the name "
            f"{path.name}{GIVEN_UP} and start again: only the letters of the damaged file are "
            "lost then"
        )
        missing = isinstance(error, FileNotFoundError)
        what = f"is missing, though {INDEX} names it" if missing else f"is damaged: {error}"
        raise corrupt(path, what, way_out) from error


def emptied(letters: pa.Table, gone: Bools) -> pa.Table:
    """Return letters, with null or empty values where ``gone`` is true, except in ``batch_id``.

    The rows stay, because a letter's id contains its position in the micro-batch.
    """
    schema = letters.schema.remove_metadata()
    empty = {field.name: _empty_of(field.type) for field in schema if field.name == "payload"}
    whole = pa.concat_tables(
        [letters.replace_schema_metadata(), pa.Table.from_pylist([empty], schema)]
    )
    rows = np.where(gone, len(letters), np.arange(len(letters)))
    at = schema.get_field_index("batch_id")
    return whole.take(pa.array(rows)).set_column(at, schema.field(at), letters["batch_id"])


def _empty_of(kind: pa.DataType) -> Any:
    """Return an empty value of a type, for columns that may not be null."""
    if pa.types.is_struct(kind):
        return {field.name: None if field.nullable else _empty_of(field.type) for field in kind}
    if pa.types.is_nested(kind):
        return []
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return ""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return b""
    if pa.types.is_boolean(kind):
        return False
    return Decimal(0) if pa.types.is_decimal(kind) else 0


def emptied_rows(file: pq.ParquetFile) -> Bools | None:
    """Return a mask of the rows that drops have emptied; None if, by the footer, there are none."""
    at = file.schema_arrow.get_field_index(ATTEMPTS)
    groups = (file.metadata.row_group(n) for n in range(file.num_row_groups))
    if not any(group.column(at).statistics.null_count for group in groups):
        return None
    found: Bools = file.read([ATTEMPTS])[ATTEMPTS].is_null().to_numpy()
    return found


def read_letters(path: ObjectFile, columns: list[str] | None = None) -> pa.Table:
    """Return the letters of a file; of ``columns``, if given, only these columns.

    Raises CheckpointCorrupt if the file is damaged or missing.
    """
    with reading_letters(path) as file:
        return as_written(file, file.read(columns))


def read_schema(path: ObjectFile) -> pa.Schema:
    """Return the Arrow schema of a file of letters.

    Raises CheckpointCorrupt if the file is damaged or missing.
    """
    with reading_letters(path) as file:
        return as_written(file, file.schema_arrow.empty_table()).schema


class BatchRows(NamedTuple):
    """The micro-batch of each row of a file, and the row of each micro-batch's first letter.

    The row of the first letter is negative if the file has only later letters of the micro-batch.
    """

    batch_ids: Int64s
    starts: Mapping[int, int]

    def __len__(self) -> int:
        return len(self.batch_ids)

    def position(self, row: int) -> int:
        """Return the position of a row's letter in its micro-batch."""
        return row - self.starts[int(self.batch_ids[row])]

    def row(self, number: int, position: int) -> int | None:
        """Return the row of the letter at a position of micro-batch ``number``; None if absent."""
        row = self.starts.get(number, len(self)) + position
        return row if 0 <= row < len(self) and self.batch_ids[row] == number else None


def batch_rows(path: ObjectFile, batch_ids: Int64s | None = None) -> BatchRows:
    """Return the micro-batch of each letter of a file, and the rows at which micro-batches start.

    Raises CheckpointCorrupt if the file is damaged or missing.

    ``batch_ids``: the file's column ``batch_id``, to avoid reading it again.
    """
    if batch_ids is None:
        batch_ids = read_letters(path, ["batch_id"])["batch_id"].to_numpy()
    numbers, starts = np.unique(batch_ids, return_index=True)
    starts -= position_of(path)
    return BatchRows(batch_ids, dict(zip(numbers.tolist(), starts.tolist(), strict=True)))


def position_of(path: ObjectFile) -> int:
    """Return the position in its micro-batch of a file's first letter, from its name; else 0."""
    named = _NAME.fullmatch(path.name)
    return int((named and named[2]) or 0)


def batches_of(path: ObjectFile) -> tuple[int, int]:
    """Return the first and last micro-batch of a file, from its name; -1, -1 for other files."""
    named = _NAME.fullmatch(path.name)
    return (int(named[1] or named[3]), int(named[1] or named[4])) if named else (-1, -1)
