"""Columns of root ids: each of them once."""

from __future__ import annotations

import numpy as np

from ackcore._records import Int64s


def distinct(ids: Int64s) -> Int64s:
    """Return each id once, sorted, as `numpy.unique` does.

    That hashes them since NumPy 2.3: of a million different ids it takes 0.85 s, and to sort them
    a tenth of that.
    """
    ordered = np.sort(ids)
    new = np.ones(len(ordered), np.bool_)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered if new.all() else ordered[new]
