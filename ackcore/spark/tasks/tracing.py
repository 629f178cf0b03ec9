"""Traces of a task: for a sampled share of the roots, the bolts that got their tuples, with times.

The sample depends on the root ids alone, so that all tasks trace the same roots.  Traces are in the
task's report but not in its fingerprint: times differ when a task runs again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._records import Bools, Int64s
from ackcore.spark.tasks.tracking import AnchoredRows, Chunks

#: The most entries of a task's trace, so that no setting fills the driver's memory.
_MOST = 10_000
#: An odd multiplier without a pattern, since roots may come from ids with a pattern.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Tracer:
    """A collector of the traces of one task: at most `_MOST` records and `_MOST` steps.

    ``per_million``: the roots in a million that are traced, chosen by hashes of their ids.
    """

    def __init__(self, per_million: int, partition: int, chunks: Chunks) -> None:
        self._below = np.uint64((per_million << 32) // 1_000_000)
        self._partition = partition
        self._chunks = chunks
        self._records: list[tuple[int, str, str, int]] = []
        self._steps: list[tuple[int, str, int, int, float, float, int]] = []

    def sampled(self, roots: Int64s) -> Bools:
        """Return, for each root, whether it is traced: the same answer in every task."""
        spread = roots.view(np.uint64) * _SPREAD
        found: Bools = (spread >> np.uint64(32)) < self._below
        return found

    def record(self, roots: Int64s, spout: str, message_ids: pa.Array, attempts: Any) -> None:
        """Add a spout's records that `sampled` chose; ``attempts`` is one for all, or a column."""
        attempts = np.broadcast_to(attempts, roots.shape).tolist()
        names = [spout] * len(roots)
        found = zip(roots.tolist(), names, message_ids.to_pylist(), attempts, strict=True)
        self._records += list(found)[: max(0, _MOST - len(self._records))]

    def step(
        self, component: str, rows: AnchoredRows, started_ns: int, took_ns: int, call_rows: int
    ) -> None:
        """Add a bolt's call to the trace of each sampled root; ``call_rows`` is 0 for a flush."""
        if len(self._steps) >= _MOST:
            return
        roots = self._chunks.roots_of(rows.owners)[1]
        found, counts = np.unique(roots[self.sampled(roots)], return_counts=True)
        for root, n in zip(found.tolist(), counts.tolist(), strict=True):
            times = started_ns / 1e6, took_ns / 1e9
            self._steps.append((root, component, self._partition, n, *times, call_rows))

    def to_json(self) -> dict[str, Any]:
        """Return the added records and steps as lists of tuples, under "records" and "steps".

        A record is (root, spout, message id, attempt). A step is (root, bolt, partition, rows of
        the root, start in ms since 1970, duration in s, rows of the call).
        """
        return {"records": self._records, "steps": self._steps[:_MOST]}
