"""Segments of a table: stored rows as Arrow files, and look-ups and scans over several of them.

A segment has the rows of a range of hashes, ascending by hash.  Instead of the hash of 64 bits it
stores the 32 bits that are needed within the range; keys are compared where these are equal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.tables.folding import live_rows, newest_rows
from ackcore.tables.key_groups import UInt64s, rows_equal
from ackcore.tables.segment_columns import Note, packed, unpacked
from ackcore.tables.table_shape import EXPIRES, HASH, HASH_END, TableShape, one_chunk

#: The rows and bytes of all segments that a scan or a merge reads at once, about.
RANGE_ROWS, RANGE_BYTES = 500_000, 128 << 20
_NOTES = b"ackcore.segment"


def write_segment(shape: TableShape, stored: pa.Table, lo: int = 0, hi: int = HASH_END) -> bytes:
    """Return the bytes of a segment.

    Parameters
    ----------
    shape : TableShape
        The table.
    stored : pyarrow.Table
        Rows with ``shape.stored_schema``, ascending by hash, one per key.
    lo, hi : int, default all hashes
        The range of hashes that the segment covers: from ``lo`` to below ``hi``.
    """
    hashes: UInt64s = one_chunk(stored.column(HASH)).to_numpy()
    shift = max(0, (hi - lo - 1).bit_length() - 32)
    columns = [pa.array(_short(hashes, lo, shift))]
    notes: dict[str, Note] = {}
    names = stored.schema.names[1:]
    for name in names:
        column, notes[name] = packed(one_chunk(stored.column(name)))
        columns.append(column)
    about = {"lo": lo, "hi": hi, "shift": shift, "columns": notes}
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in zip((HASH, *names), columns, strict=True)],
        metadata={_NOTES: json.dumps(about).encode()},
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    written: bytes = sink.getvalue().to_pybytes()
    return written


def _short(hashes: UInt64s, lo: int, shift: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Return the bits of hashes that a segment stores."""
    return ((hashes - np.uint64(lo)) >> np.uint64(shift)).astype(np.uint32)


@dataclass(frozen=True)
class TableSegment:
    """An open segment.

    Attributes
    ----------
    shape : TableShape
        The table; a state that the segment does not have is null.
    batch : pyarrow.RecordBatch
        The stored columns, which share the memory of the buffer.
    lo, hi : int
        The range of hashes that the segment covers: from ``lo`` to below ``hi``.
    """

    shape: TableShape
    batch: pa.RecordBatch
    lo: int
    hi: int
    _shift: int
    _notes: dict[str, Note]

    @classmethod
    def open(cls, buffer: pa.Buffer | bytes, shape: TableShape) -> TableSegment:
        """Return the segment in a buffer, such as a memory-mapped file; nothing is copied."""
        reader = pa.ipc.open_file(pa.BufferReader(buffer))
        about = json.loads(reader.schema.metadata[_NOTES])
        batch = reader.get_batch(0)
        return cls(shape, batch, about["lo"], about["hi"], about["shift"], about["columns"])

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.batch.num_rows)

    def lookup(self, hashes: UInt64s, keys: Sequence[pa.Array]) -> tuple[Int64s, pa.Table]:
        """Return the keys that the segment has, and their rows.

        Parameters
        ----------
        hashes : numpy.ndarray of uint64
            The hashes of the keys, ascending and in the segment's range.
        keys : sequence of pyarrow.Array
            The columns of the keys, in plain types.

        Returns
        -------
        tuple
            The numbers of the keys that are found, and a row with ``shape.stored_schema`` for each.
        """
        stored = self._short_hashes
        wanted = _short(hashes, self.lo, self._shift)
        places = np.searchsorted(stored, wanted)
        left = np.arange(len(hashes))
        numbers = [left[:0]]
        tables: list[pa.Table] = []
        while True:
            left = left[places[left] < len(stored)]
            left = left[stored[places[left]] == wanted[left]]
            if tables and not len(left):
                break
            rows = self._table(self.batch.take(pa.array(places[left])), hashes[left])
            mine = [one_chunk(rows.column(field.name)) for field in self.shape.key]
            equal = rows_equal(keys, left, mine, None)
            numbers.append(left[equal])
            tables.append(rows if equal.all() else rows.filter(pa.array(equal)))
            left = left[~equal]
            places[left] += 1
        return np.concatenate(numbers), pa.concat_tables(tables)

    def rows_of(self, hashes: UInt64s) -> pa.Table:
        """Return all rows with some hashes, which ascend; with ``shape.stored_schema``."""
        last = np.uint64(self.hi - 1)
        hashes = hashes[(hashes >= np.uint64(self.lo)) & (hashes <= last)]
        stored, wanted = self._short_hashes, np.unique(_short(hashes, self.lo, self._shift))
        first, end = (np.searchsorted(stored, wanted, side) for side in ("left", "right"))
        counts = end - first
        offsets = np.repeat(first - np.cumsum(counts) + counts, counts)
        rows = self.take(offsets + np.arange(len(offsets)))
        return rows.filter(pa.array(np.isin(one_chunk(rows.column(HASH)).to_numpy(), hashes)))

    def expires(self) -> Int64s:
        """Return the time at which each row ends to exist, in milliseconds."""
        place = self.batch.schema.get_field_index(EXPIRES)
        column = unpacked(self.batch.column(place), self._notes[EXPIRES], pa.int64())
        return column.to_numpy()  # type: ignore[no-any-return]

    def take(self, rows: Int64s) -> pa.Table:
        """Return rows by their numbers, with ``shape.stored_schema``."""
        return self._table(self.batch.take(pa.array(rows)))

    def rows_between(self, lo: int, hi: int) -> pa.Table:
        """Return the rows of a range of hashes, ascending by hash."""
        start, stop = self.places(lo, hi)
        table = self._table(self.batch.slice(start, stop - start))
        # The stored bits do not decide at the ends of the range.
        hashes: UInt64s = one_chunk(table.column(HASH)).to_numpy()
        first = int(np.searchsorted(hashes, np.uint64(lo)))
        end = len(hashes) if hi >= HASH_END else int(np.searchsorted(hashes, np.uint64(hi)))
        return table.slice(first, end - first)

    def places(self, lo: int, hi: int) -> tuple[int, int]:
        """Return the first row, and the row after the last, that may be in a range of hashes."""
        stored = self._short_hashes
        if lo >= self.hi or hi <= self.lo:
            return 0, 0
        start = 0
        if lo > self.lo:
            start = int(np.searchsorted(stored, np.uint32((lo - self.lo) >> self._shift)))
        stop = len(stored)
        if hi < self.hi:
            last = np.uint32((hi - 1 - self.lo) >> self._shift)
            stop = int(np.searchsorted(stored, last, "right"))
        return start, stop

    @property
    def _short_hashes(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return self.batch.column(0).to_numpy()  # type: ignore[no-any-return]

    def _table(self, batch: pa.RecordBatch, hashes: UInt64s | None = None) -> pa.Table:
        """Return stored columns in their types, with the hash of the key."""
        n, columns = batch.num_rows, []
        for field in list(self.shape.stored_schema)[1:]:
            place = self.batch.schema.get_field_index(field.name)
            if place < 0:
                columns.append(pa.nulls(n, field.type))
            else:
                columns.append(unpacked(batch.column(place), self._notes[field.name], field.type))
        if hashes is None:
            hashes = self.shape.hashes(columns[: len(self.shape.key)])
        return pa.Table.from_arrays([pa.array(hashes), *columns], schema=self.shape.stored_schema)


class TableReader:
    """The rows of a table in all its segments.

    Parameters
    ----------
    shape : TableShape
        The table.
    segments : sequence of TableSegment
        The newest first; a row replaces that of the same key in older segments.
    horizon_ms : int
        The time in milliseconds since 1970 at which rows with a ttl may have expired.
    """

    def __init__(
        self, shape: TableShape, segments: Sequence[TableSegment], horizon_ms: int
    ) -> None:
        self.shape = shape
        self.segments = tuple(segments)
        self.horizon_ms = horizon_ms

    def lookup(self, keys: pa.RecordBatch | pa.Table) -> pa.Table:
        """Return the stored row of each key.

        Parameters
        ----------
        keys : pyarrow.RecordBatch or pyarrow.Table
            The columns of the key; other columns are ignored.

        Returns
        -------
        pyarrow.Table
            ``shape.stored_schema``, row *i* for key *i*.  Without a row in the table, all its
            columns are null, also the hash.
        """
        arrays = self.shape.key_arrays(keys)
        n = len(arrays[0])
        hashes = self.shape.hashes(arrays)
        order = np.argsort(hashes)
        hashes = hashes[order]
        arrays = [column.take(pa.array(order)) for column in arrays]
        # The row of each key among the rows that are found, or -1.
        places = np.full(n, -1, np.int64)
        found = [self.shape.stored_schema.empty_table()]
        total = 0
        missing = np.ones(n, np.bool_)
        for segment in self.segments:
            start = int(np.searchsorted(hashes, np.uint64(segment.lo)))
            stop = n
            if segment.hi < HASH_END:
                stop = int(np.searchsorted(hashes, np.uint64(segment.hi)))
            wanted = np.flatnonzero(missing[start:stop]) + start
            if not len(wanted) or not segment.rows:
                continue
            if len(wanted) == stop - start:
                sought = [column.slice(start, stop - start) for column in arrays]
            else:
                sought = [column.take(pa.array(wanted)) for column in arrays]
            hit, rows = segment.lookup(hashes[wanted], sought)
            hit = wanted[hit]
            places[order[hit]] = total + np.arange(len(hit))
            missing[hit] = False
            found.append(rows)
            total += len(hit)
        stored = pa.concat_tables(found)
        if self.shape.expires and total:
            expires = one_chunk(stored.column(EXPIRES)).to_numpy()
            places[expires[places] <= self.horizon_ms] = -1
        return stored.take(pa.array(places, mask=places < 0))

    def scan(self, lo: int = 0, hi: int = HASH_END) -> Iterator[pa.Table]:
        """Yield the rows of a range of hashes, ascending by hash, in tables of bounded size."""
        yield from merged_rows(self.shape, self.segments, lo, hi, self.horizon_ms)


def merged_rows(
    shape: TableShape,
    segments: Sequence[TableSegment],
    lo: int,
    hi: int,
    horizon_ms: int | None,
) -> Iterator[pa.Table]:
    """Yield the newest rows of a range of hashes, ascending by hash, in tables of bounded size.

    Parameters
    ----------
    shape : TableShape
        The table.
    segments : sequence of TableSegment
        The newest first.
    lo, hi : int
        The range of hashes: from ``lo`` to below ``hi``.
    horizon_ms : int or None
        The time at which rows with a ttl may have expired.  None keeps expired rows, which hide
        older rows of their keys.
    """
    places = [segment.places(lo, hi) for segment in segments]
    rows = sum(stop - start for start, stop in places)
    nbytes = sum(
        segment.batch.slice(start, stop - start).nbytes
        for segment, (start, stop) in zip(segments, places, strict=True)
    )
    for start, stop in ranges_of(lo, hi, rows, nbytes):
        tables = [segment.rows_between(start, stop) for segment in segments]
        live = live_rows(shape, newest_rows(shape, tables), horizon_ms)
        if live.num_rows:
            yield live


def ranges_of(lo: int, hi: int, rows: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Divide a range of hashes into ranges that can be held in memory.

    Hashes are uniform: equal parts of a range have about the same number of rows.
    """
    parts = max(1, -(-rows // RANGE_ROWS), -(-nbytes // RANGE_BYTES))
    return itertools.pairwise(lo + (hi - lo) * part // parts for part in range(parts + 1))
