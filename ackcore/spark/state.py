"""The checkpoint of a topology: what is planned, decided and done, and who waits for a retry.

`<checkpoint>/ackcore/`, written by one driver at a time.  (Interface; being filled in.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

MESSAGE_ID = "_ackcore_message_id"
ATTEMPT = "_ackcore_attempt"
DUE_MS = "_ackcore_due_ms"
FIRST_MS = "_ackcore_first_ms"
LAST_MS = "_ackcore_last_ms"
REASON = "_ackcore_reason"

#: What a waiting or dead table has in front of the source's own columns.
TRACKING = pa.schema(
    [
        pa.field(MESSAGE_ID, pa.string(), nullable=False),
        # Of the next execution, counted from 0; in a table of the dead: executions it had.
        pa.field(ATTEMPT, pa.int32(), nullable=False),
        # 0 in a table of the dead.
        pa.field(DUE_MS, pa.int64(), nullable=False),
        pa.field(FIRST_MS, pa.int64(), nullable=False),
        pa.field(LAST_MS, pa.int64(), nullable=False),
        pa.field(REASON, pa.string(), nullable=False),  # Reason.encode()
    ]
)
#: The one column of ``Decision.nonacked``.
ROOT_IDS = pa.schema([pa.field("root_id", pa.int64(), nullable=False)])


class StateError(RuntimeError):
    """The checkpoint cannot be used or written; the message says which file, and the way out."""


class CheckpointInUse(StateError):
    """Another query holds the checkpoint."""


class CheckpointCorrupt(StateError):
    """A file of the checkpoint is damaged or missing."""


class CheckpointForeign(StateError):
    """The checkpoint belongs to another topology, or to the other way of running it."""


class CheckpointNewer(StateError):
    """A newer ackcore wrote the checkpoint."""


class CheckpointReadOnly(StateError):
    """The checkpoint cannot be written."""


class _Topology(Protocol):
    @property
    def fingerprint(self) -> str: ...
    @property
    def spouts(self) -> Mapping[str, Any]: ...
    @property
    def bolts(self) -> Mapping[str, Any]: ...
    @property
    def sinks(self) -> Mapping[str, Any]: ...


class SinkFile(NamedTuple):
    """A file that an accepted run left for a sink, under ``State.work(n)``."""

    component: str
    stream: str
    path: str  # relative to the work directory
    rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a micro-batch will do, recorded before it runs: `State.make_plan` makes one.

    To rewrite it after a death: ``dataclasses.replace(plan, deaths=plan.deaths + 1, ...)``.
    """

    number: int
    now_ms: int
    parent: int | None  # number - 1; None: the first micro-batch
    due: int  # waiting rows of the parent that are due at now_ms, without replays
    replays: tuple[str, ...] = ()  # names of requests it takes
    deaths: int = 0
    careful: bool = False
    suspects: tuple[int, ...] = ()  # root ids to be run alone
    condemned: tuple[int, ...] = ()  # root ids that killed their worker


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of a micro-batch, recorded before anything outside hears of it."""

    number: int
    #: Rows that wait, by spout: `TRACKING` columns, then the source's.  All that wait, not only
    #: the new ones.  Pass a table on as `State.split_due` gave it (the same object) and its file
    #: is kept instead of written again.  Spouts without rows may be left out.
    waiting: Mapping[str, pa.Table]
    #: Rows that became dead in this micro-batch, by spout, in the same columns.
    dead: Mapping[str, pa.Table]
    #: Root ids of this micro-batch that are not ACKED: column ``root_id`` (int64).
    nonacked: pa.Table
    #: Files whose rows (less those of non-ACKED roots) the sinks get.
    files: tuple[SinkFile, ...] = ()
    #: Books of the micro-batch and since the beginning; anything that JSON can hold.
    counts: Mapping[str, Any] = field(default_factory=dict)
    totals: Mapping[str, Any] = field(default_factory=dict)
    #: Filled in by the state (what is given is ignored): rows waiting, when the first is due,
    #: the oldest one's first_ms, and the time of the plan.
    waiting_rows: int = 0
    next_due_ms: int | None = None
    oldest_ms: int | None = None
    now_ms: int = 0


class Due(NamedTuple):
    """The waiting rows of a plan's parent, parted; and the rows that were asked for again."""

    due: dict[str, pa.Table]  # by spout, rows of taken replays included; no empty tables
    rest: dict[str, pa.Table]  # the very object of the parent where nothing was due


class State:
    """An open checkpoint; one per checkpoint on earth, which the lock sees to."""

    path: Path  # <checkpoint>/ackcore
    deployment_key: int  # 0 .. 2**63 - 1, drawn once when the checkpoint was made

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        topology: _Topology,
        *,
        kind: Literal["stream", "batch"] = "stream",
        offsets: str | os.PathLike[str] | None = None,
        accept_changes: bool = False,
        clock_ms: Callable[[], int] | None = None,
    ) -> State:
        """Make the checkpoint, or check it, and lock it.  ``path`` is ``<checkpoint>``.

        ``kind``: "batch" for run_batch.  ``offsets``: where Spark keeps its own offset log if not
        in ``<checkpoint>/offsets``: both logs must tell the same history (streams only).
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the lock.  Twice is fine."""
        raise NotImplementedError

    def __enter__(self) -> State:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def key(self, number: int) -> int:
        """The 63-bit key of a micro-batch: a pure function of deployment key and number."""
        raise NotImplementedError

    @property
    def last_done(self) -> int | None:
        """The newest micro-batch that is done."""
        raise NotImplementedError

    @property
    def last_plan(self) -> int | None:
        """The newest that is planned: last_done, or one more."""
        raise NotImplementedError

    def is_done(self, number: int) -> bool:
        """Whether it has its mark.  Neither last_done nor the next one: CheckpointCorrupt."""
        raise NotImplementedError

    def plan(self, number: int) -> Plan | None:
        """The plan on record."""
        raise NotImplementedError

    def make_plan(self, number: int, clock_ms: int) -> Plan:
        """A new plan, not yet written: time never behind its parent's, due rows, requests."""
        raise NotImplementedError

    def write_plan(self, plan: Plan) -> None:
        """Record it, or record it anew as long as nothing is decided."""
        raise NotImplementedError

    def split_due(self, plan: Plan) -> Due:
        """Part the parent's waiting rows by what is due, and add the requests the plan took."""
        raise NotImplementedError

    def decision(self, number: int) -> Decision | None:
        """The decision on record; its tables are read when asked for, by memory map."""
        raise NotImplementedError

    def write_decision(self, decision: Decision) -> Decision:
        """Record it; the answer is as `decision` reads it, with what the state fills in."""
        raise NotImplementedError

    def write_done(self, number: int) -> None:
        """Mark it, after all has been acted upon."""
        raise NotImplementedError

    def waiting(self, number: int) -> Mapping[str, pa.Table]:
        """Rows that waited after micro-batch ``number``, by spout."""
        raise NotImplementedError

    def work(self, number: int) -> Path:
        """Where executors write; exists."""
        raise NotImplementedError

    def reset_work(self, number: int) -> Path:
        """The same, emptied."""
        raise NotImplementedError

    def prune(self, number: int) -> None:
        """Drop what is older than ``number - 1``, the work of the done and taken requests."""
        raise NotImplementedError

    def pending_replays(self) -> tuple[str, ...]:
        """Names of requests that no plan has taken yet; cheap enough for every heartbeat."""
        raise NotImplementedError
