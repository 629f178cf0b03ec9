"""The decision about failed records, from columns to columns, wherever they are read again.

A record waits for its next attempt, or is dead.  What is told of it depends on the record, on why
it failed and on `Rules`, and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int32s, Int64s
from ackcore.retry import Policy
from ackcore.spark.base.reason_columns import ReasonTexts
from ackcore.spark.base.schemas import (
    ATTEMPT,
    MESSAGE_ID,
    TRACKING,
)
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID

#: What a record that was read again has beside the source's columns.
READ_AGAIN = pa.schema(
    [
        (ROOT_ID, pa.int64()),
        (PLACE, pa.int64()),
        (MESSAGE_ID, pa.string()),
        (ATTEMPT, pa.int32()),
    ]
)


@dataclass(frozen=True)
class Rules:
    """By what it is decided.

    Parameters
    ----------
    now_ms : int
        The time of the plan.
    ended_ms : int
        When the run had ended, if that is later: waits that reasons ask for begin with the
        failure, and that was no later.
    policy : Policy
        Attempts and back-off.
    timeout_ms : int
        From this age on all failures are attempts: what never can be done would never be told.
    """

    now_ms: int
    ended_ms: int
    policy: Policy
    timeout_ms: float


class Judged(NamedTuple):
    """Failed records in `TRACKING` and the source's columns, and how many were no attempt."""

    waits: pa.Table
    dies: pa.Table
    uncounted: int


def judge(
    rules: Rules, lost: pa.Table, reasons: ReasonTexts, first_ms: Int64s, replayed: Int32s
) -> Judged:
    """Decide which failed records wait, until when, and which are dead.

    Parameters
    ----------
    rules : Rules
    lost : pyarrow.Table
        The records: `READ_AGAIN`, and the source's columns.
    reasons : ReasonTexts
        Why each failed.
    first_ms : numpy.ndarray of int64
        When each was first seen.
    replayed : numpy.ndarray of int32
        How often each was sent again as a dead letter.
    """
    # Not for ever: what never can be done would never be told.
    late = rules.now_ms - first_ms >= rules.timeout_ms
    counts = reasons.counts() | (late & ~reasons.behind())
    after_ms = reasons.after_ms()
    ended_ms = max(rules.ended_ms, rules.now_ms)
    attempts: Int64s = lost[ATTEMPT].to_numpy().astype(np.int64)
    decided = rules.policy.decide_many(
        lost[MESSAGE_ID].to_pylist(),
        attempts,
        rules.now_ms,
        reasons.final(),
        counts=counts,
        not_before_ms=np.where(after_ms > 0, ended_ms + after_ms, 0),
        first_ms=first_ms,
    )
    rows = tracked(
        lost,
        pa.array(decided.attempts),
        # What is behind another waits for that one, and has no back-off of its own.
        np.where(reasons.behind(), rules.now_ms, decided.due_ms),
        first_ms,
        rules.now_ms,
        reasons.kept(counts),
        replayed,
    )
    uncounted = int((~counts & ~decided.dead).sum())
    if not decided.dead.any():
        return Judged(rows, rows.slice(0, 0), uncounted)
    if decided.dead.all():
        return Judged(rows.slice(0, 0), rows, uncounted)
    return Judged(
        rows.filter(pa.array(~decided.dead)), rows.filter(pa.array(decided.dead)), uncounted
    )


def tracked(
    lost: pa.Table,
    attempts: pa.Array,
    due_ms: Int64s,
    first_ms: Int64s,
    last_ms: int,
    texts: pa.Array,
    replayed: Int32s,
) -> pa.Table:
    """Return records that were read again in `TRACKING` and the source's columns."""
    tracking = [
        lost[MESSAGE_ID],
        attempts,
        pa.array(due_ms),
        pa.array(first_ms),
        pa.array(np.full(len(lost), last_ms)),
        texts,
        pa.array(replayed.astype(np.int32)),
    ]
    source = [field for field in lost.schema if field.name not in READ_AGAIN.names]
    return pa.table(
        [*tracking, *(lost[field.name] for field in source)],
        schema=pa.schema([*TRACKING, *source]),
    )
