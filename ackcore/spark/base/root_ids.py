"""Columns of root ids: sorting, removal of duplicates, and processing by ranges of values.

If millions of records of a micro-batch fail, the driver has large columns of roots, mapped from
files that tasks wrote.  Sorting them all at once would take memory for all; by ranges it takes
little.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from ackcore._records import Bools, Int64s

#: The number of ids that are sorted at a time.
_AT_ONCE = 1 << 18
#: The number of sampled ids per range from which the ends of ranges are chosen.
_SAMPLES = 64
#: The number of ids that are compared at a time.
_PIECE = 1 << 18


def in_order(*columns: Int64s) -> Int64s:
    """Return the ids of all columns, sorted, with duplicates, in one new array."""
    ordered: Int64s = np.concatenate([np.empty(0, np.int64), *columns])
    # A stable sort merges columns that are already sorted, in an eighth of the time.
    ordered.sort(kind="stable")
    return ordered


def once(ordered: Int64s) -> Int64s:
    """Return ids, which must be sorted, without duplicates; the same array if it has none."""
    repeated = ordered[1:] == ordered[:-1]
    if not repeated.any():
        return ordered
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ~repeated
    return ordered[new]


def distinct(*columns: Int64s) -> Int64s:
    """Return the distinct ids of columns, sorted; ten times faster than NumPy 2.3's `unique`."""
    return once(in_order(*columns))


def ids_in(column: pa.ChunkedArray) -> list[Int64s]:
    """Return the ids of each chunk of a column, without a copy."""
    return [chunk.to_numpy() for chunk in column.chunks]


def starts_of_ranges(columns: Sequence[Int64s]) -> Int64s:
    """Divide ids by value into ranges of about 2**18 ids, and return where they begin.

    These are the first values of all ranges but the first. All ids with the same value are in one
    range, even if they are many.
    """
    n = sum(map(len, columns))
    parts = -(-n // _AT_ONCE)
    step = max(1, n // (parts * _SAMPLES)) if parts else 1
    some = in_order(*(column[::step] for column in columns))
    return distinct(some[np.arange(1, parts) * len(some) // max(1, parts)])


def in_ranges(*groups: Iterable[Int64s]) -> Iterator[list[Int64s]]:
    """Divide values into ranges; for each, yield a list of one sorted array of ids per group.

    Each group is some columns. Those that are already sorted, as tasks write them, are not copied.
    Yields at least once: a list of empty arrays if there are no ids.
    """
    sorted_groups = [[c if is_sorted(c) else np.sort(c) for c in group] for group in groups]
    starts = starts_of_ranges([*chain(*sorted_groups)])
    cuts = [[cuts_of(column, starts) for column in group] for group in sorted_groups]
    for n in range(len(starts) + 1):
        yield [
            in_order(*(c[at[n] : at[n + 1]] for c, at in zip(group, of_group, strict=True)))
            for group, of_group in zip(sorted_groups, cuts, strict=True)
        ]


def is_sorted(column: Int64s) -> bool:
    """Return whether the ids of a column are sorted."""
    pieces = (column[at : at + _PIECE + 1] for at in range(0, len(column), _PIECE))
    return all((piece[1:] >= piece[:-1]).all() for piece in pieces)


def cuts_of(column: Int64s, starts: Int64s) -> Int64s:
    """Return the index where each range begins in a sorted column, and the column's length.

    ``starts``: the result of `starts_of_ranges`.
    """
    return np.concatenate([[0], np.searchsorted(column, starts), [len(column)]])


def found_in(ordered: Int64s, columns: Iterable[Int64s]) -> Bools:
    """Return a mask of sorted, distinct ids: which of them are in one of the columns."""
    found = np.zeros(len(ordered), np.bool_)
    for column in columns if len(ordered) else ():
        for start in range(0, len(column), _PIECE):
            piece = column[start : start + _PIECE]
            places = np.searchsorted(ordered, piece)
            places[places == len(ordered)] = 0
            found[places[ordered[places] == piece]] = True
    return found


class RootColumns:
    """The root ids of a decision, which may be too many to sort at once.

    ``columns``: the ids, possibly with duplicates.
    """

    def __init__(self, columns: Sequence[Int64s]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        """Return the number of ids, including duplicates."""
        return sum(map(len, self._columns))

    @property
    def are_many(self) -> bool:
        """Whether there are more than 2**18 ids, so that they are not sorted at once."""
        return len(self) > _AT_ONCE

    def ordered(self) -> Iterator[Int64s]:
        """Yield the sorted, distinct ids, one range of values at a time."""
        for (ids,) in in_ranges(self._columns):
            yield once(ids)
