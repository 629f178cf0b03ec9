"""A partition in one generation of its assignment, and its records that are not done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ackcore._backend import OffsetTracker
from ackcore._records import OffsetState
from ackcore.kafka.metadata_form import MetadataForm
from ackcore.kafka.records import Failure, KafkaRecord, PartitionStats
from ackcore.offsets import Commit

Key = tuple[str, int]
#: The first offset, and one above the last.
Run = tuple[int, int]

#: What becomes of a record, in this order; back from WAITING to OUT.
FRESH, OUT, WAITING, DYING = range(4)

#: Why partitions are paused while too many records wait for another attempt.
WAITING_CAUSE = "waiting"

#: Runs of offsets that a dead letter names.
_MOST_NAMED = 20


class Limits(NamedTuple):
    """The limits on records and bytes that a consumer holds at a time."""

    in_flight: int = 10_000  # records of a partition: out and dying
    in_flight_bytes: int = 16 << 20
    waiting: int = 10_000  # records of all partitions that wait
    waiting_bytes: int = 64 << 20
    # Of a partition, fresh ones with the others: a client that is paused more often is slow.
    ahead: int = 1000

    @property
    def held(self) -> int:
        """Records of a partition at which reading stops: fresh, out and dying."""
        return max(self.in_flight, self.ahead)


class DeadLetter(NamedTuple):
    """A record that failed for the last time, and is not done before it is kept."""

    record: KafkaRecord
    failure: Failure
    failures: int


class PartitionCommit(NamedTuple):
    """The commit of a partition, and the version of the state that it was made from."""

    topic: str
    partition: int
    generation: int
    commit: Commit
    changes: int


class Held:
    """A record that is not done."""

    __slots__ = (
        "delivery",
        "due_ms",
        "in_tracker",
        "read_ms",
        "record",
        "size",
        "status",
        "timed_out",
    )

    def __init__(self, record: KafkaRecord, size: int, now_ms: int) -> None:
        self.record = record
        self.size = size
        self.read_ms = now_ms
        self.status = FRESH
        self.delivery = 0
        self.due_ms = 0
        self.in_tracker = True  # whether the tracker takes it for one that is out
        self.timed_out = False  # it waits, and its last delivery may yet be acked

    def is_out(self, delivery: int) -> bool:
        """Whether it is out, in that delivery of it."""
        return self.status == OUT and self.delivery == delivery


class HeldPartition:
    """A partition in one generation of its assignment."""

    def __init__(
        self,
        topic: str,
        partition: int,
        generation: int,
        state: OffsetState,
        committed: bool,
        deployment: int = 0,
    ) -> None:
        self.key = (topic, partition)
        self.generation = generation
        self.deployment = deployment
        self.tracker = OffsetTracker.from_state(topic, partition, generation, state)
        self.held: dict[int, Held] = {}  # in the order of the offsets, as they are read in it
        # Of dead letters that are not kept yet: what each stands for, by its first offset.
        self.lost: dict[int, list[Run]] = {}
        self.sizes = [0] * 4  # bytes, by status
        self.numbers = [0] * 4
        # Offsets to hand out, in their order: of new records, and of those that are due again.
        self.queues: dict[int, deque[int]] = {FRESH: deque(), WAITING: deque()}
        # By key, where records are ordered: the one that goes first, and those behind it.
        self.lines: dict[object, deque[int]] = {}
        self.in_turn: set[int] = set()  # the statuses for which it has a turn
        self.closing = self.sealed = False
        self.gone = False
        self.sought = False  # the client reads it elsewhere yet
        self.other_from: int | None = None  # from where its log is another one than was read
        self.cause = ""  # why it is paused
        # Where none was committed, a start at the end would be another one after a crash.
        self.changes = int(not committed)
        self.committed_changes = 0
        self.committed: int | None = state.committable if committed else None

    def hold(self, record: KafkaRecord, size: int, now_ms: int) -> Held:
        """Take in a record that is not done."""
        held = self.held[record.offset] = Held(record, size, now_ms)
        self.count(held, 1)
        return held

    def queue(self, offset: int, key: object) -> None:
        """A new record is next, or behind the records of its key; None is no key."""
        line = self.lines.setdefault(key, deque()) if key is not None else deque()
        line.append(offset)
        if line[0] == offset:
            self.queues[FRESH].append(offset)

    def leave(self, offset: int, key: object) -> None:
        """A record is done, and the next of its key may be handed out."""
        line = self.lines.get(key)
        if line is None or line[0] != offset:
            return
        while line and line[0] not in self.held:  # what died as it was read is done at any time
            line.popleft()
        if line:
            self.queues[FRESH].appendleft(line[0])
        else:
            del self.lines[key]

    def move(self, held: Held, status: int) -> None:
        """A record comes into another status."""
        self.count(held, -1)
        held.status = status
        self.count(held, 1)

    def count(self, held: Held, by: int) -> None:
        """A record comes (1) or goes (-1)."""
        self.numbers[held.status] += by
        self.sizes[held.status] += by * held.size

    def has_next(self, status: int, limits: Limits) -> bool:
        """Whether it may hand out a record of that status."""
        if self.closing or not self.queues[status]:
            return False
        # Those that are dying stop no retries: nothing new has to be held for these.
        busy = self.numbers[OUT] + (self.numbers[DYING] if status == FRESH else 0)
        return busy < limits.in_flight

    def next(self, status: int, limits: Limits) -> Held | None:
        """Remove the next record of that status from its queue and return it; None without one."""
        while self.has_next(status, limits):
            held = self.held.get(self.queues[status].popleft())
            if held is not None and held.status == status:
                return held
        return None

    def not_done(self, stop: int) -> list[Run]:
        """Return the runs between the position and ``stop`` that were neither read nor done
        before a restart."""
        state = self.tracker.state()
        # Above the last that is done nothing is.
        starts = np.append(state.hole_starts, state.end).clip(self.tracker.position, stop)
        ends = np.append(state.hole_ends, stop).clip(self.tracker.position, stop)
        runs = zip(starts.tolist(), ends.tolist(), strict=True)
        return [(start, end) for start, end in runs if start < end]

    def commit(self, form: MetadataForm) -> PartitionCommit:
        """Return the commit of this partition."""
        self.lost = {first: runs for first, runs in self.lost.items() if first in self.held}
        state = self.tracker.state()
        if self.lost:
            state = _with(state, self.lost.values())
        if self.other_from is not None:
            state = _below(state, self.other_from)
        commit = form.encode(*self.key, self.generation, state, self.deployment)
        return PartitionCommit(*self.key, self.generation, commit, self.changes)

    @property
    def in_flight(self) -> int:
        """Records that are neither done nor waiting."""
        return self.numbers[FRESH] + self.numbers[OUT] + self.numbers[DYING]

    @property
    def in_flight_bytes(self) -> int:
        """Their bytes."""
        return self.sizes[FRESH] + self.sizes[OUT] + self.sizes[DYING]

    def cause_of_pause(self, limits: Limits, waiting: int, waiting_bytes: int) -> str:
        """Why nothing more of it is to be read now, with so much waiting in all; or ""."""
        if self.closing:
            return "revoked"
        # Half of it free again: each pause drops what the client has read ahead.
        part = 2 if self.cause else 1
        if (
            self.in_flight * part >= limits.held
            or self.in_flight_bytes * part >= limits.in_flight_bytes
        ):
            return "in flight"
        if waiting * part >= limits.waiting or waiting_bytes * part >= limits.waiting_bytes:
            return WAITING_CAUSE
        return ""

    def stats(self, now_ms: int) -> PartitionStats:
        """The partition as it is; its lag is not known here."""
        first = next(iter(self.held.values()), None)
        return PartitionStats(
            *self.key,
            generation=self.generation,
            position=self.tracker.position,
            committed=self.committed,
            lag=None,
            fresh=self.numbers[FRESH],
            out=self.numbers[OUT],
            waiting=self.numbers[WAITING],
            dying=self.numbers[DYING],
            bytes=sum(self.sizes),
            oldest_s=0.0 if first is None else (now_ms - first.read_ms) / 1000,
            paused=self.cause,
        )


class TakenAt:
    """Deliveries that may time out, in the order in which they were taken."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, HeldPartition, Held, int]] = deque()

    def add(self, now_ms: int, found: HeldPartition, held: Held) -> None:
        """A record has just been taken."""
        self._taken.append((now_ms, found, held, held.delivery))

    def up_to(self, taken_ms: int) -> Iterator[tuple[HeldPartition, Held]]:
        """Remove those that were taken by then, and yield what is still out of them."""
        while self._taken and (self._taken[0][0] <= taken_ms or not self._is_out(self._taken[0])):
            each = self._taken.popleft()
            if self._is_out(each):
                yield each[1], each[2]

    @staticmethod
    def _is_out(each: tuple[int, HeldPartition, Held, int]) -> bool:
        _, found, held, delivery = each
        return found.held.get(held.record.offset) is held and held.is_out(delivery)

    def trim(self, n_out: int) -> None:
        """Forget what is answered behind one that is not, once it is more than what is out."""
        if len(self._taken) > 2 * n_out + 64:
            self._taken = deque(each for each in self._taken if self._is_out(each))

    def __len__(self) -> int:
        return len(self._taken)


def named_runs(runs: Sequence[Run]) -> str:
    """Runs of offsets as a text has them, the first of many."""
    some = [f"{start} to {end - 1}" if end - start > 1 else str(start) for start, end in runs]
    if len(some) <= _MOST_NAMED:
        return ", ".join(some)
    offsets = sum(end - start for start, end in runs)
    return f"{', '.join(some[:_MOST_NAMED])} and more up to {some[-1]}, {offsets} in all,"


def _with(state: OffsetState, lost: Iterable[list[Run]]) -> OffsetState:
    """Return a state in which ranges that are lost are not done: the tracker has but the first
    offset of each for that, and the next start may read them after all."""
    holes = zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True)
    runs: list[Run] = []
    for start, end in sorted(chain(holes, *lost)):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((start, end))
    # Above the last that is done nothing is, and that is no hole.
    end = state.end
    while runs and runs[-1][1] >= end:
        end = min(end, runs.pop()[0])
    starts, ends = np.array(runs, np.int64).reshape(-1, 2).T
    return state._replace(end=end, hole_starts=starts.copy(), hole_ends=ends.copy())


def _below(state: OffsetState, offset: int) -> OffsetState:
    """Return the part of a state below an offset from which the log is another one."""
    failed = state.failed < offset
    return _with(state, [[(offset, max(offset + 1, state.end))]])._replace(
        committable=min(state.committable, offset),
        failed=state.failed[failed],
        attempts=state.attempts[failed],
    )
