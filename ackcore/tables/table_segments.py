"""Segments of a table: stored rows as Arrow files, and look-ups and scans over several of them.

A segment has the rows of a range of hashes, ascending by hash.  It does not store the hashes: an
index finds the rows that may have one, and the keys of these rows are compared.  The file has one
row, in which each stored column is a list, because the index is shorter than the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._arrow.record_batches import in_ranges_of, offsets_of
from ackcore._records import Int64s, UInt64s
from ackcore.tables.folding import live_rows, newest_rows, ranges_of
from ackcore.tables.key_groups import group_rows, rows_equal
from ackcore.tables.segment_columns import Bytes, Note, packed, unpacked
from ackcore.tables.table_shape import (
    BITS,
    BLOCK,
    DISTANCES,
    EXPIRES,
    HASH,
    HASH_END,
    PLACE,
    TableShape,
    one_chunk,
)

_NOTES = b"ackcore.segment"
#: The place of a stored row is the number of its segment, and its row in these bits.
_ROW_BITS = 40
#: The note of a column that a segment lacks.
_ABSENT: Note = {"nulls": "all", "at": (0, 0)}


class HashIndex(NamedTuple):
    """The index of a segment: finds rows by hash with two to three bytes per row.

    Hashes are uniform.  Equal parts of their range, the buckets, have 1 to 2 rows on average.  The
    index has the first row of each bucket, as its distance from the row that is expected there.
    For each row it has the 8 bits of the hash that follow those of the bucket.
    """

    rows: int  # the number of hashes
    #: The range of the hashes: from ``lo`` to below ``hi``.
    lo: int
    hi: int
    base: int  # the smallest distance of a first row from the expected one
    #: The distance of each bucket's first row, then that of the number of rows, minus ``base``.
    distances: npt.NDArray[Any]
    bits: npt.NDArray[np.uint8]  # 8 bits of each hash

    @classmethod
    def of(cls, hashes: UInt64s, lo: int, hi: int) -> HashIndex:
        """Return the index of rows, given their ascending hashes: from ``lo`` to below ``hi``."""
        index = cls(len(hashes), lo, hi, 0, np.empty(0, np.uint8), np.empty(0, np.uint8))
        places = hashes - np.uint64(lo)
        counts = np.bincount((places >> index._shift).view(np.int64), minlength=index._buckets)
        firsts = offsets_of(counts)
        distances = firsts - index._expected(np.arange(len(firsts)))
        base, top = int(distances.min()), int(distances.max())
        width = next(width for width in (1, 2, 4, 8) if top - base < 1 << 8 * width)
        bits = index._bits(places)
        return index._replace(
            base=base, distances=(distances - base).astype(f"u{width}"), bits=bits
        )

    @property
    def _shift(self) -> np.uint64:
        """The number of low bits of a hash, less ``lo``, that do not decide its bucket."""
        wide = (self.hi - self.lo - 1).bit_length()
        return np.uint64(wide - min(wide, max(1, self.rows.bit_length() - 1)))

    @property
    def _buckets(self) -> int:
        return ((self.hi - self.lo - 1) >> int(self._shift)) + 1

    def _bits(self, places: UInt64s) -> npt.NDArray[np.uint8]:
        return (places >> np.uint64(max(0, int(self._shift) - 8))).astype(np.uint8)

    def _expected(self, buckets: Int64s) -> Int64s:
        """Return the first row of each bucket if all buckets had equally many rows."""
        found: Int64s = (buckets * (self.rows / self._buckets)).astype(np.int64)
        return found

    def _firsts(self, buckets: Int64s) -> Int64s:
        found = self.distances[buckets].astype(np.int64)
        found += self._expected(buckets)
        found += self.base
        return found

    def candidates(self, hashes: UInt64s) -> tuple[Int64s, Int64s]:
        """Return the numbers of the rows that may have one of ``hashes``; some have another hash.

        ``hashes``: hashes in the range of the index. Returns pairs in two arrays: the index of the
        hash in ``hashes``, ascending, and the row.
        """
        places = hashes - np.uint64(self.lo)
        buckets = (places >> self._shift).view(np.int64)
        firsts = self._firsts(buckets)
        numbers, rows = in_ranges_of(firsts, self._firsts(buckets + 1) - firsts)
        found = np.flatnonzero(self.bits[rows] == self._bits(places)[numbers])
        return numbers[found], rows[found]

    def rows_around(self, bound: int) -> tuple[int, int]:
        """Return the start and the end of the rows whose hashes must be compared with ``bound``.

        All rows before the start have hashes below ``bound``. No row from the end on has one.
        """
        if bound <= self.lo:
            return 0, 0
        if bound >= self.hi:
            return self.rows, self.rows
        bucket, rest = divmod(bound - self.lo, 1 << int(self._shift))
        first, end = self._firsts(np.array([bucket, bucket + 1])).tolist()
        return first, end if rest else first


def write_segment(shape: TableShape, stored: pa.Table, lo: int = 0, hi: int = HASH_END) -> bytes:
    """Return the content of a segment's file.

    ``stored``: rows with ``shape.stored_schema``, ascending by hash, one per key. ``lo``, ``hi``:
    the range of hashes that the segment covers: from ``lo`` to below ``hi``.
    """
    n = stored.num_rows
    index = HashIndex.of(one_chunk(stored.column(HASH)).to_numpy(), lo, hi)
    columns = {DISTANCES: pa.array(index.distances), BITS: pa.array(index.bits)}
    notes: dict[str, Note] = {}
    blocks: list[Bytes] = []
    width = 0
    for name in stored.schema.names[1:]:
        column, notes[name] = packed(one_chunk(stored.column(name)))
        if isinstance(column, np.ndarray):
            blocks.append(column)
            notes[name]["at"] = [width, width + column.shape[1]]
            width += column.shape[1]
        else:
            columns[name] = column
    if width:
        block = np.concatenate(blocks, axis=1)
        data = pa.py_buffer(block)
        columns[BLOCK] = pa.Array.from_buffers(pa.binary(width), n, [None, data])
    about = {"rows": n, "lo": lo, "hi": hi, "base": index.base, "columns": notes}
    lists = [pa.LargeListArray.from_arrays([0, len(each)], each) for each in columns.values()]
    schema = pa.schema(
        [pa.field(name, each.type) for name, each in zip(columns, lists, strict=True)],
        metadata={_NOTES: json.dumps(about).encode()},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(lists, schema=schema))
    written: bytes = sink.getvalue().to_pybytes()
    return written


@dataclass(frozen=True)
class TableSegment:
    """An open segment, or the part of one in a range of hashes."""

    shape: TableShape  # the table; a state that the segment does not have is null
    #: The range of hashes: from ``lo`` to below ``hi``.
    lo: int
    hi: int
    #: The range of rows in the file: from ``start`` to below ``stop``.
    start: int
    stop: int
    index: HashIndex  # finds rows by hash, by their numbers in the file
    _block: Bytes
    _columns: dict[str, pa.Array]
    _notes: dict[str, Note]

    @classmethod
    def open(
        cls,
        buffer: pa.Buffer | bytes,
        shape: TableShape,
        lo: int = 0,
        hi: int = HASH_END,
        removed: Sequence[str] = (),
    ) -> TableSegment:
        """Return the segment in a buffer, such as a memory-mapped file; nothing is copied.

        Rows whose hashes are below ``lo``, or ``hi`` or more, are left out. The values of the
        ``removed`` columns are null. Raises pyarrow's and other errors for a damaged file.
        """
        reader = pa.ipc.open_file(pa.BufferReader(buffer))
        about = json.loads(reader.schema.metadata[_NOTES])
        batch = reader.get_batch(0)
        columns = {
            name: column.values
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        }
        n = about["rows"]
        block = np.empty((n, 0), np.uint8)
        if BLOCK in columns:
            stored = columns.pop(BLOCK)
            width = stored.type.byte_width
            block = np.frombuffer(stored.buffers()[1], np.uint8, n * width).reshape(n, width)
        index = HashIndex(
            n,
            about["lo"],
            about["hi"],
            about["base"],
            columns.pop(DISTANCES).to_numpy(),
            columns.pop(BITS).to_numpy(),
        )
        notes = {name: note for name, note in about["columns"].items() if name not in removed}
        whole = cls(shape, index.lo, index.hi, 0, n, index, block, columns, notes)
        return whole.between(lo, hi)

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """The size of the rows in bytes, as they are stored, with one byte each for the index."""
        nbytes: int = self.rows * (1 + self._block.shape[1])
        for column in self._columns.values():
            nbytes += column.slice(self.start, self.rows).nbytes
        return nbytes

    def between(self, lo: int, hi: int) -> TableSegment:
        """Return the part of the segment with hashes from ``lo`` to below ``hi``, not copied."""
        lo, hi = max(lo, self.lo), min(hi, self.hi)
        if lo >= hi:
            return replace(self, hi=self.lo, stop=self.start)
        if (lo, hi) == (self.lo, self.hi):
            return self
        start, stop = self.places(lo, hi)
        return replace(self, lo=lo, hi=hi, start=self.start + start, stop=self.start + stop)

    def places(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the first row with a hash of ``lo`` or more, and the first with ``hi`` or more.

        Rows are numbered from 0 in this segment. If none has such a hash, it is the number of rows.
        """
        start, stop = (min(max(self._place(each), self.start), self.stop) for each in (lo, hi))
        return start - self.start, stop - self.start

    def rows_of(self, hashes: UInt64s, names: Sequence[str]) -> tuple[Int64s, pa.Table]:
        """Return all rows with one of ``hashes``: their numbers from 0, and a table of columns.

        ``hashes``: ascending, without duplicates. ``names``: the columns to read: those of the key,
        and then any others. The table also has the hash.
        """
        last = np.uint64(self.hi - 1)
        hashes = hashes[(hashes >= np.uint64(self.lo)) & (hashes <= last)]
        numbers, rows = self.index.candidates(hashes)
        found = rows_in(self.shape, [(self, rows)], names=names)
        right = one_chunk(found.column(HASH)).to_numpy() == hashes[numbers]
        return rows[right] - self.start, found.filter(pa.array(right))

    def expires(self) -> Int64s:
        """Return the time at which each row expires, in milliseconds since 1970."""
        column = self.stored(slice(self.start, self.stop), [EXPIRES])[EXPIRES]
        return one_chunk(unpacked([column], pa.int64())).to_numpy()  # type: ignore[no-any-return]

    def take(self, rows: Int64s) -> pa.Table:
        """Return rows by their numbers from 0, in this order, with ``shape.stored_schema``."""
        return rows_in(self.shape, [(self, rows + self.start)])

    def table(self) -> pa.Table:
        """Return all rows, ascending by hash, with ``shape.stored_schema``."""
        return rows_in(self.shape, [(self, slice(self.start, self.stop))])

    def stored(
        self, rows: Int64s | slice, names: Sequence[str]
    ) -> dict[str, tuple[pa.Array | Bytes, Note]]:
        """Return columns of some rows as they are stored, by name, with the notes for `unpacked`.

        ``rows``: the rows, numbered as in the file.
        """
        block = self._block[rows]
        found: dict[str, tuple[pa.Array | Bytes, Note]] = {}
        for name in names:
            note = self._notes.get(name, _ABSENT)
            if "at" in note:
                start, stop = note["at"]
                found[name] = block[:, start:stop], note
            elif isinstance(rows, slice):
                found[name] = self._columns[name][rows], note
            else:
                found[name] = self._columns[name].take(pa.array(rows)), note
        return found

    def _place(self, bound: int) -> int:
        """Return the first row whose hash is ``bound`` or more, numbered as in the file."""
        start, stop = self.index.rows_around(bound)
        if start == stop:
            return start
        rows = rows_in(self.shape, [(self, slice(start, stop))])
        hashes: UInt64s = one_chunk(rows.column(HASH)).to_numpy()
        return start + int(np.searchsorted(hashes, np.uint64(bound)))


def rows_in(
    shape: TableShape,
    parts: Sequence[tuple[TableSegment, Int64s | slice]],
    hashes: UInt64s | None = None,
    names: Sequence[str] | None = None,
) -> pa.Table:
    """Return rows of several segments as one table, in the order of ``parts``.

    ``parts``: segments, each with the rows to read, numbered as in the file. ``hashes``: the hashes
    of these rows' keys; by default they are computed. ``names``: the columns to read besides the
    hash: those of the key, and then any others; by default all of ``shape.stored_schema``.
    """
    names = shape.stored_schema.names[1:] if names is None else names
    stored = [segment.stored(rows, names) for segment, rows in parts]
    schema = pa.schema([shape.stored_schema.field(name) for name in (HASH, *names)])
    columns = [unpacked([each[name] for each in stored], schema.field(name).type) for name in names]
    if hashes is None:
        hashes = shape.hashes([one_chunk(key) for key in columns[: len(shape.key)]])
    return pa.Table.from_arrays([pa.array(hashes), *columns], schema=schema)


@dataclass(eq=False, repr=False)
class TableReader:
    """The rows of a table in all its segments.

    ``segments``: the newest first; a row replaces that of the same key in older segments.
    ``horizon_ms``: rows that expire until this time, in milliseconds since 1970, do not exist.
    """

    shape: TableShape
    segments: Sequence[TableSegment]
    horizon_ms: int

    def lookup(self, keys: pa.RecordBatch | pa.Table) -> pa.Table:
        """Return the stored row of each key.

        ``keys``: the columns of the key; other columns are ignored. The result has the columns of
        ``shape.stored_schema``, and row *i* is that of key *i*. If the table has no row for a key,
        or one that has expired, all columns of the row are null, also the hash. Null keys are
        equal. Raises ValueError if a column of the key is missing, TypeError if one cannot be cast
        to its type in the table.
        """
        arrays = self.shape.key_arrays(keys)
        n = len(arrays[0])
        hashes = self.shape.hashes(arrays)
        if self.shape.sessions:
            return self._sessions(arrays, hashes)
        order = np.argsort(hashes)
        hashes = hashes[order]
        segments = [segment for segment in self.segments if segment.rows]
        starts = np.searchsorted(hashes, np.array([each.lo for each in segments], np.uint64))
        lasts = np.array([each.hi - 1 for each in segments], np.uint64)
        stops = np.searchsorted(hashes, lasts, "right")
        numbers: list[Int64s] = []
        parts: list[tuple[TableSegment, Int64s]] = []
        for segment, start, stop in zip(segments, starts.tolist(), stops.tolist(), strict=True):
            found, rows = segment.index.candidates(hashes[start:stop])
            if len(found):
                numbers.append(found + start)
                parts.append((segment, rows))
        if not parts:
            return self.shape.stored_schema.empty_table().take(pa.nulls(n, pa.int64()))
        sought = np.concatenate(numbers)
        stored = rows_in(self.shape, parts, hashes[sought])
        sought = order[sought]
        mine = [one_chunk(stored.column(field.name)) for field in self.shape.key]
        right = np.flatnonzero(rows_equal(arrays, sought, mine, None))
        # The row of each key, or -1; the newest is the first one, and assigned last.
        places = np.full(n, -1, np.int64)
        places[sought[right][::-1]] = right[::-1]
        if self.shape.expires:
            expires = one_chunk(stored.column(EXPIRES)).to_numpy()
            places[expires[places] <= self.horizon_ms] = -1
        return stored.take(pa.array(places, mask=places < 0))

    def rows_of(self, hashes: UInt64s, names: Sequence[str]) -> pa.Table:
        """Return the newest row of each key whose hash is one of ``hashes``, unless it expired.

        ``hashes``: ascending, without duplicates. ``names``: the columns to read: those of the key,
        then any others; among them the time at which rows expire, if the table has it. The result
        has the hash, these columns, and the place of each row, by which `whole` reads the other
        columns.
        """
        found = []
        for number, segment in enumerate(self.segments):
            places, rows = segment.rows_of(hashes, names)
            found.append(rows.append_column(PLACE, pa.array(places + (number << _ROW_BITS))))
        return live_rows(self.shape, newest_rows(self.shape, found), self.horizon_ms)

    def whole(self, rows: pa.Table) -> pa.Table:
        """Return rows of a result of `rows_of`, in their order, with all columns as stored."""
        places = one_chunk(rows.column(PLACE)).to_numpy()
        order = np.argsort(places)
        numbers, places = np.divmod(places[order], 1 << _ROW_BITS)
        starts = np.searchsorted(numbers, np.arange(len(self.segments) + 1))
        parts = [
            (segment, places[starts[number] : starts[number + 1]] + segment.start)
            for number, segment in enumerate(self.segments)
        ]
        hashes = one_chunk(rows.column(HASH)).to_numpy()[order]
        return rows_in(self.shape, parts, hashes).take(pa.array(np.argsort(order)))

    def _sessions(self, keys: Sequence[pa.Array], hashes: UInt64s) -> pa.Table:
        """Return the stored row of each key of a table with sessions, or a row of nulls.

        ``keys``, ``hashes``: the columns of the sought keys, and their hashes. All sessions with
        one of these hashes are read.
        """
        names = self.shape.stored_schema.names
        stored = self.rows_of(np.unique(hashes), names[1:]).select(names)
        both = [
            pa.concat_arrays([one_chunk(stored.column(field.name)), key])
            for field, key in zip(self.shape.key, keys, strict=True)
        ]
        known = one_chunk(stored.column(HASH)).to_numpy()
        places = group_rows(np.concatenate([known, hashes]), both).first_rows()[len(stored) :]
        return stored.take(pa.array(places, mask=places >= len(stored)))

    def scan(self, lo: int = 0, hi: int = HASH_END) -> Iterator[pa.Table]:
        """Yield the newest, unexpired rows of a range of hashes, ascending by hash.

        Each table has some 500,000 rows or 128 MiB at most, and none is empty.
        """
        for _, _, rows in merged_parts(self.shape, self.segments, lo, hi, self.horizon_ms):
            if rows.num_rows:
                yield rows


def merged_parts(
    shape: TableShape, segments: Sequence[TableSegment], lo: int, hi: int, horizon_ms: int | None
) -> Iterator[tuple[int, int, pa.Table]]:
    """Yield the newest rows of a range of hashes, in parts of bounded size.

    ``shape``: the table. ``segments``: the newest first. ``lo``, ``hi``: the range of hashes: from
    ``lo`` to below ``hi``. ``horizon_ms``: rows that expire until this time are left out. None
    keeps them, since they hide older rows of their keys. Yields for each part the start and the end
    of its range of hashes, and its rows, ascending by hash.
    """
    parts = [segment.between(lo, hi) for segment in segments]
    rows, nbytes = sum(part.rows for part in parts), sum(part.nbytes for part in parts)
    for start, stop in ranges_of(lo, hi, rows, nbytes):
        tables = [part.between(start, stop).table() for part in parts]
        yield start, stop, live_rows(shape, newest_rows(shape, tables), horizon_ms)
