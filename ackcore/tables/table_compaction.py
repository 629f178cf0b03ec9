"""Compaction: which segments of a table are merged, and the rows of the merged ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from ackcore.tables.table_segments import RANGE_ROWS, TableSegment, merged_rows
from ackcore.tables.table_shape import HASH_END, TableShape

#: The number of deltas from which some are merged.
MAX_DELTAS = 8
#: Deltas are merged into the base when they have this part of its rows, and at least so many rows.
DELTA_PART, DELTA_ROWS = 0.25, 50_000


class SegmentInfo(NamedTuple):
    """A segment in the record of a micro-batch.

    Attributes
    ----------
    file : str
        The name of the file.
    rows : int
        The number of rows.
    nbytes : int
        The size of the file in bytes.
    lo, hi : int
        The range of hashes that the segment covers: from ``lo`` to below ``hi``.
    """

    file: str
    rows: int
    nbytes: int
    lo: int
    hi: int


class SegmentMerge(NamedTuple):
    """A merge of segments into one segment.

    Attributes
    ----------
    segments : tuple of SegmentInfo
        The segments to read, the newest first.
    lo, hi : int
        The range of hashes of the new segment: from ``lo`` to below ``hi``.
    into_base : bool
        Whether nothing older than the new segment remains.  Only then may expired rows be dropped:
        pass ``horizon_ms`` to `merged` if it is True, and None if it is False.
    """

    segments: tuple[SegmentInfo, ...]
    lo: int
    hi: int
    into_base: bool


def merges_due(segments: Sequence[SegmentInfo]) -> list[SegmentMerge]:
    """Return the merges that a table needs now, maybe none.

    All of them are of one kind: either one merge of the newest deltas, or one merge for each range
    of a new base.  A record that has the new segments drops every segment that is named in any of
    them.  Merges are independent of each other: tasks may run them in parallel.

    Parameters
    ----------
    segments : sequence of SegmentInfo
        The segments of the table, the newest first.
    """
    first = len(segments)
    # The base: the oldest segments, as long as their ranges are disjoint.
    while first and all(
        segments[first - 1].hi <= other.lo or other.hi <= segments[first - 1].lo
        for other in segments[first:]
    ):
        first -= 1
    deltas, base = segments[:first], segments[first:]
    rows = sum(each.rows for each in deltas)
    base_rows = sum(each.rows for each in base)
    if rows > max(DELTA_ROWS, DELTA_PART * base_rows):
        return _base_merges(segments, rows + base_rows)
    if len(deltas) <= MAX_DELTAS:
        return []
    # Few enough rows that the next older delta has more: each row is merged rarely.
    merged, count = deltas[0].rows, 1
    while count < len(deltas) and (count < 2 or deltas[count].rows < merged):
        merged += deltas[count].rows
        count += 1
    return [SegmentMerge(tuple(deltas[:count]), 0, HASH_END, False)]


def _base_merges(segments: Sequence[SegmentInfo], rows: int) -> list[SegmentMerge]:
    """Return the merges of all segments into a base of ranges of about equal size."""
    parts = -(-rows // RANGE_ROWS)
    cuts = [HASH_END * part // parts for part in range(parts + 1)]
    return [
        SegmentMerge(
            tuple(each for each in segments if each.lo < hi and lo < each.hi), lo, hi, True
        )
        for lo, hi in itertools.pairwise(cuts)
    ]


def merged(
    shape: TableShape,
    segments: Sequence[TableSegment],
    lo: int,
    hi: int,
    horizon_ms: int | None,
) -> Iterator[pa.Table]:
    """Yield the rows of a merge, ascending by hash, in tables of bounded size.

    Their concatenation is the content of the new segment.

    Parameters
    ----------
    shape : TableShape
        The table.
    segments : sequence of TableSegment
        The segments of the merge, the newest first.
    lo, hi : int
        The range of the merge.
    horizon_ms : int or None
        The time at which expired rows are dropped; None for a merge that is not into the base.
    """
    yield from merged_rows(shape, segments, lo, hi, horizon_ms)
