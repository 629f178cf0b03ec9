"""The status of a query, and the state of a waiting record, read while the query may be running.

Nothing is locked or written. A running query deletes files that are two micro-batches old. If a
file is deleted between the reading of its name and of its contents, everything is read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from ackcore.spark.base.clocks import Clock, wall_clock_ms
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.lock import Holder
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, FIRST_MS, MESSAGE_ID, REASON
from ackcore.spark.base.traces import RecordTrace
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.refusals import Refusals
from ackcore.spark.checkpoint.skips import Skip, skips_in
from ackcore.spark.dead_letters.checkpoints import CheckpointView, checkpoint_at, opened_checkpoint
from ackcore.spark.engine.progress import Counts, Progress
from ackcore.spark.inspect.reason_counts import (
    DeadCounter,
    DeadCounts,
    WaitingCounts,
    count_waiting,
)
from ackcore.spark.stores.opening import place_of

T = TypeVar("T")

#: The number of recent micro-batches in which traces of earlier attempts are searched.
_LOOKED_AT = 1000
#: The maximum number of readings while a running query changes its files.
_TIMES = 100


@dataclass(frozen=True, slots=True)
class Logged:
    """A micro-batch, and the time at which it was done, in ms since 1970."""

    at_ms: int
    progress: Progress

    def to_json(self) -> dict[str, Any]:
        """Return the time and the fields of the progress as an object for JSON."""
        return {"at_ms": self.at_ms, **self.progress.to_json()}


@dataclass(frozen=True, slots=True)
class UnderWay:
    """The micro-batch that is planned and not done.

    ``planned_ms``: the time of its plan, in ms since 1970. ``due``: the number of waiting records
    that were due then. ``decided``: whether its decision is recorded, so that sinks are being
    called. ``crashes``: the number of its runs in which a process died. ``max_retries``: the
    maximum number of retries in it; None for no limit.
    """

    number: int
    planned_ms: int
    due: int
    decided: bool
    crashes: int
    max_retries: int | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """The current activity of a query.

    ``at_ms``: the time of this reading. ``under_way``: the micro-batch that is not done, or None.
    ``waiting``: the number of records that wait for a retry; ``next_due_ms``: the time at which the
    first of them is due, or None. Times are in ms since 1970.
    """

    at_ms: int
    under_way: UnderWay | None
    waiting: int
    next_due_ms: int | None


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The status of a query, read from its checkpoint: its driver, its counts, its micro-batches,
    and its waiting and dead records.
    """

    checkpoint: str  # the path of the checkpoint
    at_ms: int  # the time of this reading
    kind: str  # ``"stream"`` or ``"batch"``
    structure: Mapping[str, Any]  # the topology's `ackcore.topology.Topology.structure`
    created_ms: int  # the time at which the checkpoint was made
    ackcore: str  # the version that made it
    holder: Holder | None  # the driver that holds the checkpoint, or held it last
    #: The number of times that drivers have opened it. The holder's epoch fences earlier drivers.
    epoch: int
    counts: Counts  # the counts after the last finished micro-batch
    last_done: int | None  # the number of that micro-batch
    under_way: UnderWay | None  # the micro-batch that is not done
    waiting: WaitingCounts  # the records that wait for a retry
    dead: DeadCounts  # the dead letters
    requests: int  # the number of replays that no micro-batch has taken yet
    batches: tuple[Logged, ...]  # the last micro-batches, newest last
    skips: tuple[Skip, ...]  # the last planned rows that were left out
    #: After the last micro-batch: the lag in offsets by spout, the rows and bytes of each table.
    lag: Mapping[str, int]
    tables: Mapping[str, Mapping[str, int]]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as an object for JSON."""
        return {
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "holder": None if self.holder is None else self.holder._asdict(),
            "counts": {**self.counts.to_json(), "balanced": self.counts.balanced},
            "under_way": None if self.under_way is None else asdict(self.under_way),
            "waiting": asdict(self.waiting),
            "dead": asdict(self.dead),
            "skips": [asdict(each) for each in self.skips],
            "batches": [each.to_json() for each in self.batches],
        }


def read_status(
    path: str | os.PathLike[str],
    *,
    batches: int = 10,
    clock: Clock = wall_clock_ms,
    dead: DeadCounter | None = None,
) -> CheckpointStatus:
    """Return the status of a query, whether it runs or not.

    Raises FileNotFoundError if there is no checkpoint. Raises CheckpointCorrupt, CheckpointFormat
    or StateError if the checkpoint cannot be read.

    ``batches``: the number of last micro-batches to include. ``clock``: returns ms since 1970.
    ``dead``: the counter of dead letters. Pass the same one again to read only new files.
    """
    checkpoint = opened_checkpoint(path)
    now_ms = clock()
    return CheckpointStatus(
        checkpoint=checkpoint.url,
        at_ms=now_ms,
        dead=(dead or DeadCounter()).count(checkpoint.letters()),
        **steady(checkpoint, lambda now: _read(now, now_ms, batches)),
    )


def read_batches(path: str | os.PathLike[str], most: int) -> tuple[Logged, ...]:
    """Return up to ``most`` of the last finished micro-batches, newest last.

    Raises StateError if the checkpoint cannot be read.

    ``path``: the checkpoint. If it does not exist yet, the result is empty.
    """
    checkpoint = checkpoint_at(place_of(path, "checkpoint"))
    return () if checkpoint is None else _logged(checkpoint, most)


def _logged(checkpoint: CheckpointView, most: int) -> tuple[Logged, ...]:
    return tuple(
        Logged(line["at_ms"], Progress.from_json(line)) for line in checkpoint.progress(most)
    )


def read_activity(path: str | os.PathLike[str], clock: Clock = wall_clock_ms) -> Activity | None:
    """Return the activity of a query; None without a plan or a checkpoint.

    The waiting records are counted without a read of their files.

    Raises CheckpointCorrupt, CheckpointFormat or StateError if the checkpoint cannot be read.

    ``path``: the checkpoint, which may not exist yet. ``clock``: returns milliseconds since 1970.
    """
    checkpoint = checkpoint_at(place_of(path, "checkpoint"))
    if checkpoint is None:
        return None
    return steady(checkpoint, lambda now: _read_activity(now, clock()))


def steady(checkpoint: CheckpointView, read: Callable[[CheckpointView], T]) -> T:
    """Return the result of ``read``, called with a new view of the checkpoint.

    After a StateError of ``read`` it is called again, if the query has changed its records during
    the call. Raises all other errors, and StateError after 100 calls.
    """
    for _ in range(_TIMES):
        now = checkpoint.refreshed()
        before = _names(now)
        try:
            return read(now)
        except StateError:
            if _names(checkpoint.refreshed()) == before:
                raise
    raise StateError(
        f"{checkpoint.url} changed {_TIMES} times while it was being read; try again later"
    )


def _names(checkpoint: CheckpointView) -> list[list[int]]:
    records = checkpoint.records()
    return [records.numbers(ending) for ending in (".plan", ".done", ".decision")]


def _read(checkpoint: CheckpointView, now_ms: int, batches: int) -> dict[str, Any]:
    meta, records = checkpoint.meta(), checkpoint.records()
    assert meta is not None
    last_done, done, under_way = _state(checkpoint)
    bodies = [records.read(f"batches/{number}.plan") for number in records.numbers(".plan")]
    taken = {name for body in bodies if body is not None for name in Plan.of(body).replays}
    requested = [name for name in checkpoint.letters().requested() if name not in taken]
    logged = _logged(checkpoint, max(1, batches))
    return {
        "kind": meta["kind"],
        "structure": meta["structure"],
        "created_ms": meta["created_ms"],
        "ackcore": meta["ackcore"],
        "holder": checkpoint.holder(),
        "epoch": checkpoint.epoch(),
        "counts": Counts() if done is None else Counts.from_json(done.totals),
        "last_done": last_done,
        "under_way": under_way,
        "waiting": WaitingCounts() if done is None else count_waiting(done.waiting, now_ms),
        "requests": len(requested),
        "batches": logged[-batches:] if batches else (),
        "skips": skips_in(records),
        "lag": logged[-1].progress.lag if logged else {},
        "tables": logged[-1].progress.tables if logged else {},
    }


def _read_activity(checkpoint: CheckpointView, now_ms: int) -> Activity | None:
    _, done, under_way = _state(checkpoint)
    if done is None:
        return None if under_way is None else Activity(now_ms, under_way, 0, None)
    return Activity(now_ms, under_way, done.waiting.rows(), done.waiting.next_due_ms)


def _state(
    checkpoint: CheckpointView, *, check: bool = False
) -> tuple[int | None, BatchDecision | None, UnderWay | None]:
    """Return number and decision of the last finished micro-batch, and the unfinished one, if any.

    Each is None if there is none. Raises StateError if a record is missing or damaged.

    ``check``: whether to check the lengths and checksums of the decision's files.
    """
    records, cache = checkpoint.records(), checkpoint.tables(check=check)
    plans, dones, _ = _names(checkpoint)
    last_done, decision = max(dones, default=None), None
    if last_done is not None:
        name = f"batches/{last_done}.decision"
        body = records.read(name)
        if body is None:
            raise StateError(
                f"{records.entry(name)} is missing, though micro-batch {last_done} is done. "
                "Restore the checkpoint from a backup"
            )
        decision = Refusals(records, cache).amended(BatchDecision.of(cache, body))
    number = max(plans, default=last_done)
    body = None if number == last_done else records.read(f"batches/{number}.plan")
    if number is None or body is None:
        return last_done, decision, None
    plan = Plan.of(body)
    decided = records.read(f"batches/{number}.decision") is not None
    under_way = UnderWay(number, plan.now_ms, plan.due, decided, plan.crashes, plan.max_retries)
    return last_done, decision, under_way


# ------------------------------------------------------------------------------- waiting records


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
        The undecided micro-batch that has taken the record; None if none has.
    traces : tuple of RecordTrace
        The traces of its earlier attempts in the last 1000 micro-batches, oldest first.
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
    """Return the state of a record that waits for a retry; None if it is ACKED, DEAD or unknown.

    Raises FileNotFoundError if there is no checkpoint. Raises CheckpointCorrupt, CheckpointFormat
    or StateError if it cannot be read.

    ``spout``: the record's spout; by default the first spout that has this id. ``clock``: returns
    milliseconds since 1970.
    """
    checkpoint = opened_checkpoint(path)
    now_ms = clock()
    found = steady(checkpoint, lambda now: _find_waiting(now, message_id, spout))
    if found is None:
        return None
    name, row, running_in = found
    reason = row[REASON]
    return PendingTree(
        spout=name,
        message_id=message_id,
        attempt=row[ATTEMPT],
        due_in_s=(row[DUE_MS] - now_ms) / 1000,
        known_s=(now_ms - row[FIRST_MS]) / 1000,
        component=reason["component"],
        error_type=reason["type"],
        error_message=reason["message"],
        running_in=running_in,
        traces=tuple(
            trace
            for line in checkpoint.refreshed().progress(_LOOKED_AT)
            for trace in Progress.from_json(line).traces
            if (trace.spout, trace.message_id) == (name, message_id)
        ),
    )


def _find_waiting(
    checkpoint: CheckpointView, message_id: str, spout: str | None
) -> tuple[str, dict[str, Any], int | None] | None:
    """Return the spout and the tracking columns of a waiting record, or None if none is found.

    The third value is the number of the unfinished micro-batch that retries the record, or None.
    """
    _, done, way = _state(checkpoint, check=True)
    if done is None:
        return None
    waiting = done.waiting

    def named(table: pa.Table) -> pa.Table:
        return table.filter(pc.equal(table[MESSAGE_ID], message_id))

    for name in waiting if spout is None else {spout}:
        for table in waiting.tables(name):
            columns = table.select([MESSAGE_ID, ATTEMPT, DUE_MS, FIRST_MS, REASON])
            for row in named(columns).slice(0, 1).to_pylist():
                if way is None or way.decided:
                    return name, row, None
                taken = waiting.taken_ids(way.planned_ms, way.max_retries)
                runs = any(of == name and len(named(ids)) for of, ids in taken)
                return name, row, way.number if runs else None
    return None
