"""The waiting records of a checkpoint, readable while its query runs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ackcore.spark.base.clocks import Clock, wall_clock_ms
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, FIRST_MS, MESSAGE_ID, REASON
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.dead_letters.checkpoints import opened_checkpoint
from ackcore.spark.engine.progress import Progress
from ackcore.spark.inspect.status import read_waiting
from ackcore.topology.tuples import Reason

#: The number of recent micro-batches in which traces of earlier attempts are searched.
_LOOKED_AT = 1000


@dataclass(frozen=True, slots=True)
class PendingTree:
    """A record that is neither ACKED nor DEAD, because an attempt at it failed.

    Attributes
    ----------
    spout, message_id : str
        The record.
    attempt : int
        The next attempt, counted from 0.
    due_in_s : float
        Seconds until the next attempt is due; negative if it is due.
    known_s : float
        Seconds since the record was first seen.
    component, error_type, error_message : str
        The component and error of the last attempt.
    running_in : int or None
        The undecided micro-batch that has taken the record.
    traces : tuple of RecordTrace
        The traces of its earlier attempts that were traced, oldest first.
    """

    spout: str
    message_id: str
    attempt: int
    due_in_s: float
    known_s: float
    component: str
    error_type: str
    error_message: str
    running_in: int | None
    traces: tuple[RecordTrace, ...]

    def __str__(self) -> str:
        if self.running_in is not None:
            waits = f"runs in micro-batch {self.running_in}"
        elif self.due_in_s > 0:
            waits = f"is due in {self.due_in_s:.1f} s"
        else:
            waits = "is due in the next micro-batch"
        head = (
            f"{self.message_id} of {self.spout}, known for {self.known_s:.1f} s: attempt "
            f"{self.attempt} {waits}. Failed in {self.component} with {self.error_type}: "
            f"{self.error_message}"
        )
        return "\n".join([head, *(f"  {trace}" for trace in self.traces)])


def read_pending(
    path: str | os.PathLike[str],
    message_id: str,
    *,
    spout: str | None = None,
    clock: Clock = wall_clock_ms,
) -> PendingTree | None:
    """Return why a record waits; None if it is ACKED, DEAD or unknown.

    Raises FileNotFoundError if there is no checkpoint. Raises CheckpointCorrupt, CheckpointNewer or
    StateError if it cannot be read.

    ``spout``: the record's spout; by default the first spout that has this id. ``clock``: returns
    milliseconds since 1970.
    """
    checkpoint = opened_checkpoint(path)
    now_ms = clock()

    def find(name: str, table: pa.Table) -> pa.Table:
        if spout not in (None, name):
            return table.slice(0, 0)
        return table.filter(pc.equal(table[MESSAGE_ID], message_id))

    found, taken = read_waiting(checkpoint, find)
    for name, rows in found.items():
        columns = (MESSAGE_ID, ATTEMPT, DUE_MS, FIRST_MS, REASON)
        for _, attempt, due_ms, first_ms, told in zip(
            *(rows[column].to_pylist() for column in columns), strict=True
        ):
            reason = Reason(**told)
            return PendingTree(
                spout=name,
                message_id=message_id,
                attempt=attempt,
                due_in_s=(due_ms - now_ms) / 1000,
                known_s=(now_ms - first_ms) / 1000,
                component=reason.component,
                error_type=reason.type,
                error_message=reason.message,
                running_in=taken.get(name),
                traces=tuple(
                    trace
                    for line in checkpoint.refreshed().progress(_LOOKED_AT)
                    for trace in Progress.from_json(line).traces
                    if (trace.spout, trace.message_id) == (name, message_id)
                ),
            )
    return None
