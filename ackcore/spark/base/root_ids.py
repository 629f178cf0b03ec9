"""Columns of root ids: put in order, each of them once, and a range of values at a time.

Of a micro-batch in which millions fail the driver has columns of roots, mapped from files that
tasks wrote where these are large.  To have them all sorted takes memory for all of them, so whoever
can goes by ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._records import Int64s

#: So many ids are put in order at a time.
_AT_ONCE = 1 << 18
#: Of a range so many ids are looked at to say where it ends.
_SAMPLES = 64
#: So many are compared at a time.
_PIECE = 1 << 18

Bools = npt.NDArray[np.bool_]


def in_order(*columns: Int64s) -> Int64s:
    """Return the ids of columns, sorted: there may be many, so it is the one copy of them."""
    ordered: Int64s = np.concatenate([np.empty(0, np.int64), *columns])
    # Columns that are sorted each are merged, in an eighth of the time.
    ordered.sort(kind="stable")
    return ordered


def once(ordered: Int64s) -> Int64s:
    """Return sorted ids, each of them once."""
    repeated = ordered[1:] == ordered[:-1]
    if not repeated.any():
        return ordered
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ~repeated
    return ordered[new]


def distinct(*columns: Int64s) -> Int64s:
    """Return the distinct ids of columns, sorted.

    `numpy.unique` hashes the ids since NumPy 2.3, which takes 0.85 s for a million different ones.
    Sorting takes a tenth of that.
    """
    return once(in_order(*columns))


def ids_in(column: pa.ChunkedArray) -> list[Int64s]:
    """Return the ids of each chunk of a column, without a copy."""
    return [chunk.to_numpy() for chunk in column.chunks]


def starts_of_ranges(columns: Sequence[Int64s]) -> Int64s:
    """Return where ranges of values begin, but for the first, that have some `_AT_ONCE` ids each.

    All ids of a value are in one range, however many these are.
    """
    n = sum(map(len, columns))
    parts = -(-n // _AT_ONCE)
    step = max(1, n // (parts * _SAMPLES)) if parts else 1
    some = in_order(*(column[::step] for column in columns))
    return distinct(some[np.arange(1, parts) * len(some) // max(1, parts)])


def in_ranges(*groups: Iterable[Int64s]) -> Iterator[list[Int64s]]:
    """Yield the ids of groups of columns, a range of values at a time: of each group, sorted.

    Columns that are sorted, as tasks write them, are not copied.
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
    """Whether the ids of a column are in order."""
    pieces = (column[at : at + _PIECE + 1] for at in range(0, len(column), _PIECE))
    return all((piece[1:] >= piece[:-1]).all() for piece in pieces)


def cuts_of(column: Int64s, starts: Int64s) -> Int64s:
    """Return the places in a sorted column at which ranges begin and end."""
    return np.concatenate([[0], np.searchsorted(column, starts), [len(column)]])


def found_in(ordered: Int64s, columns: Iterable[Int64s]) -> Bools:
    """Return which of the ids, which are sorted and there once, are in columns."""
    found = np.zeros(len(ordered), np.bool_)
    for column in columns if len(ordered) else ():
        for start in range(0, len(column), _PIECE):
            piece = column[start : start + _PIECE]
            places = np.searchsorted(ordered, piece)
            places[places == len(ordered)] = 0
            found[places[ordered[places] == piece]] = True
    return found


class RootColumns:
    """Root ids of a decision that are too many to be put in order at once.

    Parameters
    ----------
    columns : sequence of numpy.ndarray of int64
        An id may be there more than once.
    """

    def __init__(self, columns: Sequence[Int64s]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        """The number of ids, repeated ones included."""
        return sum(map(len, self._columns))

    @property
    def are_many(self) -> bool:
        """Whether they are more than are put in order at a time."""
        return len(self) > _AT_ONCE

    def ordered(self) -> Iterator[Int64s]:
        """Yield the ids, sorted and each of them once, a range of values at a time."""
        for (ids,) in in_ranges(self._columns):
            yield once(ids)
