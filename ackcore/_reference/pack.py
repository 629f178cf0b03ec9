"""The assignment of rows to the shards of a shuffle, in numpy: the twin of pyx/pack.h.

The hash is Jon Maiga's xmxmx with the multiplier of Boost.ContainerHash's ``hash_mix``. A shard is
the upper half of the hash, scaled to the number of shards (Lemire, "Fast random integer generation
in an interval", 2019). The assignment may never change, because one job may read the shards that
another wrote. pyx/pack.pxi documents arguments, results and errors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ackcore._columns import as_count, id_column, same_length, task_column
from ackcore._records import Int32s, Int64s
from ackcore._reference.mix import UInt64s
from ackcore._row_arguments import MAX_SHARDS

_SPREAD = np.uint64(0x0E9846AF9B1A615D)


def split_by_shard(root_ids: Any, n: Any) -> tuple[Int64s, Int64s]:
    """Sort row numbers by the shard of their root."""
    _, of_row, counts = _shards(root_ids, n)
    return np.argsort(of_row, kind="stable").astype(np.int64, copy=False), counts


def _shards(root_ids: Any, n: Any) -> tuple[UInt64s, Int64s, Int64s]:
    """Return the hash and the shard of each row, and the number of rows of each shard."""
    roots = id_column(root_ids, "root_ids").view(np.uint64)
    shards = as_count(n, "n", 1, MAX_SHARDS)
    mixed = roots ^ (roots >> np.uint64(32))
    mixed *= _SPREAD
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SPREAD
    mixed ^= mixed >> np.uint64(28)
    of_row = (((mixed >> np.uint64(32)) * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)
    return mixed, of_row, np.bincount(of_row, minlength=shards).astype(np.int64, copy=False)


def sort_by_shard(root_ids: Any, n: Any) -> tuple[Int64s, Int64s]:
    """Sort row numbers by the shard of their root, and by a hash of the root within a shard."""
    mixed, _, counts = _shards(root_ids, n)
    return np.argsort(mixed, kind="stable").astype(np.int64, copy=False), counts


def take_shard(
    root_ids: Any, vals: Any, tasks: Any, times_ms: Any, shard: Any, n: Any
) -> tuple[Int64s, Int64s, Int32s, Int64s | None]:
    """Copy the messages of one shard's roots, in their order."""
    roots, xors = id_column(root_ids, "root_ids"), id_column(vals, "vals")
    kinds = task_column(tasks, "tasks")
    shards = as_count(n, "n", 1, MAX_SHARDS)
    wanted = as_count(shard, "shard", 0, shards - 1)
    times = None if times_ms is None else id_column(times_ms, "times_ms")
    same_length(root_ids=roots, vals=xors, tasks=kinds)
    if times is not None:
        same_length(root_ids=roots, times_ms=times)
    order, counts = split_by_shard(roots, shards)
    start = int(counts[:wanted].sum())
    mine = order[start : start + int(counts[wanted])]
    found = None if times is None else times[mine].view(np.int64)
    return roots[mine].view(np.int64), xors[mine].view(np.int64), kinds[mine], found
