"""The outcomes of traced records, for listeners. No decision depends on them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ackcore.spark.base.traces import RecordTrace
from ackcore.topology.tuples import Reason

#: The most traces kept for one micro-batch; those of failures first.
_MOST = 200
ACKED = "ACKED"


def with_outcomes(
    traces: Sequence[tuple[int, RecordTrace]], failed: pa.Table
) -> tuple[RecordTrace, ...]:
    """Return traces with the outcomes of their records, failures first, 200 at most.

    Parameters
    ----------
    traces : sequence of (int, RecordTrace)
        Pairs of a root and its trace.
    failed : pyarrow.Table
        ``root_id, spout, reason`` of all records that are not ACKED.
    """
    if not traces:
        return ()
    # Keep only the traced ones of the failures, which may be a million.
    roots = pa.array([root for root, _ in traces], pa.int64())
    failed = failed.filter(pc.is_in(failed["root_id"], value_set=roots))
    reasons = dict(zip(failed["root_id"].to_pylist(), failed["reason"].to_pylist(), strict=True))
    acked, others = [], []
    for root, trace in traces:
        if root in reasons:
            reason = Reason.decode(reasons[root])
            outcome = f"failed in {reason.component} with {reason.type}: {reason.message}"
            others.append(trace._replace(outcome=outcome))
        else:
            acked.append(trace._replace(outcome=ACKED))
    return (*others, *acked)[:_MOST]
