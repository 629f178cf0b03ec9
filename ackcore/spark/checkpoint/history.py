"""The progress of a checkpoint, derived from the names of its records."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.checkpoint.records import Records

#: Reads the plan of a micro-batch.
ReadPlan = Callable[[int], Plan | None]


class History(NamedTuple):
    """The last planned and the last finished micro-batch, and the requests that plans took."""

    last_plan: int | None
    last_done: int | None
    taken: frozenset[str]  # requests to replay that a plan took


def read_history(records: Records, plan_of: ReadPlan, begun: bool) -> History:
    """Return the progress of a checkpoint.

    Raises CheckpointCorrupt if a file is missing.

    ``records``: the checkpoint's plans, marks and decisions. ``plan_of``: returns the plan of a
    micro-batch. ``begun``: whether the checkpoint ever had a plan.
    """
    plans, dones = records.numbers("batches", ".plan"), records.numbers("batches", ".done")
    last = max([*plans, *dones, *records.numbers("batches", ".decision")], default=None)
    if last is None:
        if begun:
            what = "is missing or empty, though micro-batches were run"
            raise corrupt(records.place(""), what)
        return History(None, None, frozenset())
    plan = plan_of(last)
    if plan is None:
        raise corrupt(
            records.entry(f"batches/{last}.plan"),
            f"is missing, though there are later records of micro-batch {last}",
        )
    if plan.parent is not None and plan.parent not in dones:
        raise corrupt(
            records.entry(f"batches/{plan.parent}.done"),
            f"is missing, though micro-batch {last} was planned after it",
        )
    # Older plans are not read any more, and may be partly removed.
    before = plan_of(last - 1)
    taken = {*plan.replays, *(() if before is None else before.replays)}
    return History(last, last if last in dones else plan.parent, frozenset(taken))
