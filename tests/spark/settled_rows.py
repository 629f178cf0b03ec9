"""Settled rows with their documented columns, as `Narrow.widen` makes them in SQL."""

import numpy as np
import pyarrow as pa

from ackcore._arrow import STATUS_NAMES


def widened(batch):
    """Return a batch of `Narrow` with the columns of a result."""
    marks = batch["marks"].to_numpy()
    none = pa.nulls(len(batch), pa.int64())
    timed = "first_ms" in batch.schema.names
    return pa.RecordBatch.from_pydict(
        {
            "root_id": batch["root_id"],
            "status": pa.array([STATUS_NAMES[mark & 15] for mark in marks], pa.string()),
            "task": pa.array((marks >> 12).astype(np.int32)),
            "val": batch["val"],
            "inits": pa.array((marks >> 4 & 15).astype(np.int8)),
            "flags": pa.array((marks >> 8 & 15).astype(np.int8)),
            "first_ms": batch["first_ms"] if timed else none,
            "last_ms": batch["last_ms"] if timed else none,
            "reason": batch["reason"],
        }
    )
