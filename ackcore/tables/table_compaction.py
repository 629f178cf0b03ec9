"""Compaction: the choice of the segments of a table that are merged."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from ackcore.tables.table_segments import ranges_of
from ackcore.tables.table_shape import HASH_END

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
        pass ``horizon_ms`` to `merged_rows` if it is True, and None if it is False.
    """

    segments: tuple[SegmentInfo, ...]
    lo: int
    hi: int
    into_base: bool


def merges_due(segments: Sequence[SegmentInfo]) -> list[SegmentMerge]:
    """Return the merges that a table needs now, maybe none.

    All of them are of one kind: of the newest deltas, or of all segments into a new base.  Each
    makes the segment of one range.  A record that has the new segments drops every segment that
    is named in any of them.  Merges are independent of each other: tasks may run them in parallel.

    Parameters
    ----------
    segments : sequence of SegmentInfo
        The segments of the table, the newest first.
    """
    base, *deltas = _runs(segments) or [[]]
    deltas.reverse()
    sizes = [sum(each.rows for each in delta) for delta in deltas]
    if sum(sizes) > max(DELTA_ROWS, DELTA_PART * sum(each.rows for each in base)):
        return _by_range(segments, True)
    if len(deltas) <= MAX_DELTAS:
        return []
    # Few enough rows that the next older delta has more: each row is merged rarely.
    merged, count = sizes[0], 1
    while count < len(deltas) and (count < 2 or sizes[count] < merged):
        merged += sizes[count]
        count += 1
    return _by_range(segments[: sum(map(len, deltas[:count]))], False)


def _runs(segments: Sequence[SegmentInfo]) -> list[list[SegmentInfo]]:
    """Return segments in runs of disjoint ranges, the oldest first: the base, then the deltas."""
    runs: list[list[SegmentInfo]] = []
    ranges: list[tuple[int, int]] = []
    for segment in reversed(segments):
        place = bisect.bisect(ranges, (segment.lo, segment.hi))
        before, after = ranges[max(0, place - 1) : place], ranges[place : place + 1]
        if not runs or any(segment.lo < hi and lo < segment.hi for lo, hi in before + after):
            runs.append([])
            ranges, place = [], 0
        runs[-1].append(segment)
        ranges.insert(place, (segment.lo, segment.hi))
    return runs


def _by_range(segments: Sequence[SegmentInfo], into_base: bool) -> list[SegmentMerge]:
    """Return the merges of segments into ranges of about equal size."""
    rows, nbytes = sum(each.rows for each in segments), sum(each.nbytes for each in segments)
    return [
        SegmentMerge(
            tuple(each for each in segments if each.lo < hi and lo < each.hi), lo, hi, into_base
        )
        for lo, hi in ranges_of(0, HASH_END, rows, nbytes)
    ]
