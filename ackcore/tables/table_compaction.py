"""Compaction: the choice of the segments of a table that are merged.

The oldest segments are the base: their ranges are disjoint.  All newer ones are deltas.  A
micro-batch adds one delta of all hashes, or several of disjoint ranges if it has many rows.  A
merge is of a range of hashes, so that it takes a bounded time: the merged segments lose the range,
and keep the rest until later merges take it.  The choice depends on the segments alone: a driver
that starts continues where another one ended.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ackcore.tables import folding
from ackcore.tables.table_shape import HASH_END

#: The most deltas over a hash. If there are more, some are merged with each other.
MAX_DELTAS = 8
#: Deltas are merged into the base if their weight exceeds both this part of the base's weight, and
#: the weight of this number of small rows.
DELTA_PART, DELTA_ROWS = 0.125, 50_000
#: The most rows that are merged per new row, but at least one range of rows may be merged.
MERGED_PER_ROW = 5
#: Of ranges that gain about as much by a merge, the first is merged, so that ranges stay connected.
_ABOUT = 0.75


class SegmentInfo(NamedTuple):
    """A segment in the list of a table's segments, which is in the record of a micro-batch."""

    file: str  # the name of the file
    rows: int  # the number of rows in the range
    nbytes: int  # the size of the file in bytes
    #: The range of hashes that count: from ``lo`` to below ``hi``.  The file may have others.
    lo: int
    hi: int
    part: float = 1.0  # the part of the file's rows that are in the range
    #: Columns of the file that are not read: the states of values that were removed later.
    removed: tuple[str, ...] = ()

    @classmethod
    def of(cls, entry: Iterable[Any]) -> SegmentInfo:
        """Rebuild the value from the JSON of a record."""
        return cls(*entry).without(())  # JSON has a list of the removed columns

    def without(self, columns: Iterable[str]) -> SegmentInfo:
        """Return a copy of the segment with ``columns`` added to its ``removed`` columns."""
        return self._replace(removed=tuple(sorted({*self.removed, *columns})))


class SegmentMerge(NamedTuple):
    """A range of hashes in which the rows of some segments are to be merged."""

    segments: tuple[SegmentInfo, ...]  # the segments to read, the newest first
    #: The range of hashes: from ``lo`` to below ``hi``.
    lo: int
    hi: int
    #: Whether nothing older than the result remains.  Only then may expired rows be dropped: pass
    #: ``horizon_ms`` to `merged_parts` if it is True, and None if it is False.
    into_base: bool

    @property
    def weight(self) -> float:
        """The estimated size of the rows to merge: 1 is about 500,000 rows or 128 MiB."""
        return weight_of(self.segments, self.lo, self.hi)


def weight_of(segments: Iterable[SegmentInfo], lo: int = 0, hi: int = HASH_END) -> float:
    """Return the estimated size of segments' rows in a range of hashes.

    1 is the size that a scan or a merge reads at once: about 500,000 rows or 128 MiB.
    """
    rows = nbytes = 0.0
    for each in segments:
        share = max(0, min(hi, each.hi) - max(lo, each.lo)) / (each.hi - each.lo)
        rows += share * each.rows
        nbytes += share * each.nbytes * each.part
    return max(rows / folding.RANGE_ROWS, nbytes / folding.RANGE_BYTES)


def merge_due(segments: Sequence[SegmentInfo]) -> SegmentMerge | None:
    """Return the merge that a table needs next, or None.

    ``segments``: the segments of the table, the newest first.
    """
    deltas, base = _divided(segments)
    return _merge_of_deltas(deltas) or _merge_into_base(deltas, base)


def after_merge(
    segments: Sequence[SegmentInfo],
    merge: SegmentMerge,
    made: Sequence[SegmentInfo],
    rows_between: Callable[[SegmentInfo, int, int], int],
) -> tuple[SegmentInfo, ...]:
    """Return the segments of a table after a merge, the newest first.

    Merged segments keep their rows outside of the merge's range; segments without rows are left
    out. ``segments``: the segments before. ``merge``: the merge. ``made``: the segments that it
    made, of disjoint ranges. ``rows_between``: returns the number of rows of a segment in a range
    of hashes.
    """
    kept: list[SegmentInfo] = []
    end = 0
    for segment in segments:
        if segment not in merge.segments:
            kept.append(segment)
            continue
        before = segment.lo, min(segment.hi, merge.lo)
        behind = max(segment.lo, merge.hi), segment.hi
        for lo, hi in (before, behind):
            rows = rows_between(segment, lo, hi) if lo < hi else 0
            if rows:
                part = segment.part * rows / segment.rows
                kept.append(segment._replace(rows=rows, lo=lo, hi=hi, part=part))
        end = len(kept)
    if merge.into_base:
        end = len(kept)
    return (*kept[:end], *(each for each in made if each.rows), *kept[end:])


def _divided(segments: Sequence[SegmentInfo]) -> tuple[Sequence[SegmentInfo], list[SegmentInfo]]:
    """Divide segments into the deltas, the newest first, and the base, ascending by hash."""
    base: list[SegmentInfo] = []
    for place in range(len(segments) - 1, -1, -1):
        new = segments[place]
        at = bisect.bisect(base, new.lo, key=lambda segment: segment.lo)
        if (at and base[at - 1].hi > new.lo) or (at < len(base) and base[at].lo < new.hi):
            return segments[: place + 1], base
        base.insert(at, new)
    return (), base


def _merge_of_deltas(deltas: Sequence[SegmentInfo]) -> SegmentMerge | None:
    """Return a merge of the newest deltas if more than `MAX_DELTAS` share a hash, else None."""
    if len(deltas) <= MAX_DELTAS:
        return None
    ends = sorted({end for each in deltas for end in (each.lo, each.hi)})
    cells = [
        (lo, [place for place, each in enumerate(deltas) if each.lo <= lo and hi <= each.hi])
        for lo, hi in itertools.pairwise(ends)
    ]
    lo, places = max(cells, key=lambda cell: len(cell[1]))
    if len(places) <= MAX_DELTAS:
        return None
    # Few enough rows that the next older delta has more: each row is merged rarely.
    sizes = [deltas[place].rows / (deltas[place].hi - deltas[place].lo) for place in places]
    merged, count = sizes[0], 1
    while count < len(places) and (count < 2 or sizes[count] < merged):
        merged += sizes[count]
        count += 1
    newest = deltas[: places[count - 1] + 1]
    weight = weight_of(newest)
    if weight <= 1:
        return _of_range(newest, 0, HASH_END, False)
    hi = min(HASH_END, lo + int(HASH_END / weight))
    return _of_range(newest, lo, hi, False)


def _merge_into_base(
    deltas: Sequence[SegmentInfo], base: Sequence[SegmentInfo]
) -> SegmentMerge | None:
    """Return a merge of deltas and base in one range of hashes; None if the deltas are small."""
    most = max(DELTA_ROWS / folding.RANGE_ROWS, DELTA_PART * weight_of(base))
    if weight_of(deltas) <= most:
        return None
    segments = (*deltas, *base)
    ranges: list[tuple[int, int]] = []
    for lo, hi in _cells(base):
        if ranges and weight_of(segments, ranges[-1][0], hi) <= 1:
            ranges[-1] = ranges[-1][0], hi
        else:
            ranges.append((lo, hi))
    gains = [weight_of(deltas, lo, hi) / (weight_of(base, lo, hi) or 1e-9) for lo, hi in ranges]
    best = max(gains)
    lo, hi = next(each for each, gain in zip(ranges, gains, strict=True) if gain >= _ABOUT * best)
    return _of_range(segments, lo, hi, True)


def _cells(base: Sequence[SegmentInfo]) -> Iterable[tuple[int, int]]:
    """Divide the range of all hashes at the ends of segments, and large segments into parts."""
    end = 0
    for segment in base:
        if end < segment.lo:
            yield end, segment.lo
        parts = math.ceil(weight_of([segment])) or 1
        wide = segment.hi - segment.lo
        cuts = [segment.lo + wide * part // parts for part in range(parts + 1)]
        yield from itertools.pairwise(cuts)
        end = segment.hi
    if end < HASH_END:
        yield end, HASH_END


def _of_range(segments: Sequence[SegmentInfo], lo: int, hi: int, into_base: bool) -> SegmentMerge:
    found = tuple(each for each in segments if each.lo < hi and lo < each.hi)
    return SegmentMerge(found, lo, hi, into_base)
