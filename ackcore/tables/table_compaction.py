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
        Whether the new segment has all rows of its range.  Only then may expired rows be dropped:
        pass ``horizon_ms`` to `merged` if it is True, and None if it is False.
    """

    segments: tuple[SegmentInfo, ...]
    lo: int
    hi: int
    into_base: bool


def merges_due(segments: Sequence[SegmentInfo]) -> list[SegmentMerge]:
    """Return the merges that a table needs now, maybe none; `after_merges` takes their results.

    Deltas are merged into the base range by range, the oldest ranges first, over several
    micro-batches: one range, or more if the newest segment has many rows, so that deltas stay a
    bounded part of the base.  Merges are independent of each other: tasks may run them in parallel.

    Parameters
    ----------
    segments : sequence of SegmentInfo
        The segments of the table, the newest first.
    """
    deltas = [each for each in segments if _is_full(each)]
    # The oldest segment is the base if no segment has a part of the range.
    base = [each for each in segments if not _is_full(each)] or deltas[-1:]
    if base == deltas[-1:]:
        deltas = deltas[:-1]
    rows = sum(each.rows for each in deltas)
    due = []
    if rows > max(DELTA_ROWS, DELTA_PART * sum(each.rows for each in base)):
        due += _base_merges(segments, base, rows)
    if len(deltas) > MAX_DELTAS and sum(each.hi - each.lo for each in due) < HASH_END:
        # Few enough rows that the next older delta has more: each row is merged rarely.
        merged, count = deltas[0].rows, 1
        while count < len(deltas) and (count < 2 or deltas[count].rows < merged):
            merged += deltas[count].rows
            count += 1
        due.append(SegmentMerge(tuple(deltas[:count]), 0, HASH_END, False))
    return due


def _is_full(segment: SegmentInfo) -> bool:
    return (segment.lo, segment.hi) == (0, HASH_END)


def _base_merges(
    segments: Sequence[SegmentInfo], base: Sequence[SegmentInfo], delta_rows: int
) -> list[SegmentMerge]:
    """Return the merges of the oldest ranges of the base, each into ranges of bounded size."""
    # The base is rewritten once while deltas grow by `DELTA_PART` of it.
    wanted = segments[0].rows / DELTA_PART if _is_full(segments[0]) else 0
    ordered = sorted(base, key=lambda each: each.lo)
    due: list[SegmentMerge] = []
    taken: set[str] = set()
    for oldest in reversed(base):
        if oldest.file in taken:
            continue
        lo, hi, rows = oldest.lo, oldest.hi, oldest.rows
        for after in ordered[ordered.index(oldest) + 1 :]:
            # Small ranges are joined, such as those of rows that have expired.
            if rows + after.rows > RANGE_ROWS // 2 or after.file in taken:
                break
            hi, rows = after.hi, rows + after.rows
            taken.add(after.file)
        taken.add(oldest.file)
        rows += delta_rows * (hi - lo) // HASH_END
        parts = max(1, -(-rows // RANGE_ROWS))
        cuts = [lo + (hi - lo) * part // parts for part in range(parts + 1)]
        due += [
            SegmentMerge(
                tuple(each for each in segments if each.lo < end and start < each.hi),
                start,
                end,
                True,
            )
            for start, end in itertools.pairwise(cuts)
        ]
        wanted -= rows
        if wanted <= 0:
            break
    return due


def after_merges(
    segments: Sequence[SegmentInfo], merges: Sequence[SegmentMerge], made: Sequence[SegmentInfo]
) -> tuple[SegmentInfo, ...]:
    """Return the segments of a table after merges, the newest first.

    Segments are dropped if newer ones have all rows of their range: those of the base.  Until then
    a delta stays below the ranges that have its rows already, where it changes nothing.

    Parameters
    ----------
    segments : sequence of SegmentInfo
        The segments before, the newest first.
    merges : sequence of SegmentMerge
        The merges.
    made : sequence of SegmentInfo
        The segment of each merge.
    """
    results = list(zip(merges, made, strict=True))
    base = [one for merge, one in results if merge.into_base]
    deltas = [one for merge, one in results if not merge.into_base]
    gone = {each.file for merge in merges if not merge.into_base for each in merge.segments}
    left: list[SegmentInfo] = []
    complete: list[SegmentInfo] = []
    for each in (*base, *deltas, *(one for one in segments if one.file not in gone)):
        if _has_all(complete, each):
            continue
        left.append(each)
        if each in base or not _is_full(each):
            complete.append(each)
    return tuple(left) if any(each.rows for each in left) else ()


def _has_all(complete: Sequence[SegmentInfo], segment: SegmentInfo) -> bool:
    """Return whether ranges together cover that of a segment."""
    at = segment.lo
    for each in sorted(complete, key=lambda one: one.lo):
        if each.lo <= at < each.hi:
            at = each.hi
    return at >= segment.hi


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
