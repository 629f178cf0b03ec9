"""Columns of root ids: sorting, and removal of duplicates."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s


def in_order(*columns: Int64s) -> Int64s:
    """Return the ids of all columns, sorted; this is the only copy, since they may be many."""
    ordered: Int64s = np.concatenate([np.empty(0, np.int64), *columns])
    # A stable sort merges columns that are already sorted, in an eighth of the time.
    ordered.sort(kind="stable")
    return ordered


def once(ordered: Int64s) -> Int64s:
    """Return ids, which must be sorted, without duplicates."""
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
