"""One assigned partition of a consumer, and its records that are not done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ackcore._backend import OffsetTracker
from ackcore._records import OffsetState
from ackcore.kafka.commit_metadata import MetadataForm
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord, PartitionStats
from ackcore.offsets import Commit

Key = tuple[str, int]
#: The first offset, and the last one plus 1.
Run = tuple[int, int]

#: The statuses of a record, in this order; WAITING is followed by OUT again.
FRESH, OUT, WAITING, DYING = range(4)

#: The cause of a pause while too many records wait for another attempt.
WAITING_CAUSE = "waiting"

#: The largest number of runs of offsets that a dead letter names.
_MOST_NAMED = 20


class Limits(NamedTuple):
    """The limits on the numbers and bytes of the records that a consumer holds at a time."""

    #: Records of one partition that are delivered and not answered, or dead and not stored.
    in_flight: int = 10_000
    in_flight_bytes: int = 16 << 20
    waiting: int = 10_000  # waiting records of all partitions
    waiting_bytes: int = 64 << 20
    # Records of one partition, fresh ones included.  A client with more frequent pauses is slow.
    ahead: int = 1000

    @property
    def held(self) -> int:
        """The number of records of a partition, without waiting ones, at which reading pauses."""
        return max(self.in_flight, self.ahead)


class DyingRecord(NamedTuple):
    """A dead record whose dead letter is not stored yet."""

    record: KafkaRecord
    failure: Failure  # the last one
    failures: int  # the number of failed attempts; 0 for a range of lost offsets


class PartitionCommit(NamedTuple):
    """A commit of a partition. ``changes``: the number of the last change that it includes."""

    topic: str
    partition: int
    generation: int
    commit: Commit
    changes: int


class Held:
    """A record that a consumer has read and that is not done, with its status."""

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
        self.in_tracker = True  # whether the tracker counts it as emitted
        self.timed_out = False  # whether it waits and its last delivery may still be acked


class HeldPartition:
    """A partition that is assigned to a consumer, with its offsets, records and queues.

    ``generation``: the number of this assignment. ``state``: the offset to begin at, and the done
    offsets above it. ``committed``: whether the broker has this state. ``deployment``: the origin
    that commits hold, see `CommitOrigin`.
    """

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
        self.held: dict[int, Held] = {}  # in order of offset
        # The lost ranges of dead letters that are not stored yet, by their first offset.
        self.lost: dict[int, list[Run]] = {}
        self.sizes = [0] * 4  # bytes, by status
        self.numbers = [0] * 4
        # Offsets to deliver, in order: of new records, and of due retries.
        self.queues: dict[int, deque[int]] = {FRESH: deque(), WAITING: deque()}
        # With ordered_by, by key: the offset that is delivered first, and those behind it.
        self.lines: dict[object, deque[int]] = {}
        self.in_turn: set[int] = set()  # statuses for which it is queued in HeldRecords._turns
        self.closing = self.sealed = False
        self.gone = False
        self.sought = False  # whether the client still reads it at the offset before a seek
        self.other_from: int | None = None  # the offset from which its log is another one
        self.cause = ""  # of its pause
        # An uncommitted start counts as a change: after a crash, "latest" would be another offset.
        self.changes = int(not committed)
        self.committed_changes = self.last_done = 0  # as numbers of changes
        self.committed: int | None = state.committable if committed else None

    def hold(self, record: KafkaRecord, size: int, now_ms: int) -> Held:
        """Add a record that was read, and return it as a `Held` that was not delivered yet."""
        held = self.held[record.offset] = Held(record, size, now_ms)
        self.count(held, 1)
        return held

    def queue(self, offset: int, key: object) -> None:
        """Queue a new record for delivery: without a key at once, else after those of its key."""
        line = self.lines.setdefault(key, deque()) if key is not None else deque()
        line.append(offset)
        if line[0] == offset:
            self.queues[FRESH].append(offset)

    def release_key(self, offset: int, key: object) -> None:
        """Queue the next record of a key for delivery, after the one at ``offset`` is done."""
        line = self.lines.get(key)
        if line is None or line[0] != offset:
            return
        while line and line[0] not in self.held:  # records that died when read: in any order
            line.popleft()
        if line:
            self.queues[FRESH].appendleft(line[0])
        else:
            del self.lines[key]

    def set_status(self, held: Held, status: int) -> None:
        """Change the status of a record, and the counts by status."""
        self.count(held, -1)
        held.status = status
        self.count(held, 1)

    def count(self, held: Held, by: int) -> None:
        """Add a record to the counts by status (1), or remove it (-1)."""
        self.numbers[held.status] += by
        self.sizes[held.status] += by * held.size

    def has_next(self, status: int, limits: Limits) -> bool:
        """Return whether a new (FRESH) or due (WAITING) record may be delivered now."""
        if self.closing or not self.queues[status]:
            return False
        # Dying records do not stop retries, which are held already.
        busy = self.numbers[OUT] + (self.numbers[DYING] if status == FRESH else 0)
        return busy < limits.in_flight

    def next(self, status: int, limits: Limits) -> Held | None:
        """Remove and return the next record of a status; None if none may be delivered."""
        while self.has_next(status, limits):
            held = self.held.get(self.queues[status].popleft())
            if held is not None and held.status == status:
                return held
        return None

    def not_done(self, stop: int) -> list[Run]:
        """Return the offsets from the next one to read to ``stop`` - 1 that are not done."""
        state = self.tracker.state()
        # No record above the last done one is done.
        starts = np.append(state.hole_starts, state.end).clip(self.tracker.position, stop)
        ends = np.append(state.hole_ends, stop).clip(self.tracker.position, stop)
        runs = zip(starts.tolist(), ends.tolist(), strict=True)
        return [(start, end) for start, end in runs if start < end]

    def commit(self, form: MetadataForm) -> PartitionCommit:
        """Return the commit of the present state, with metadata by ``form``.

        Lost offsets whose dead letter is not stored yet, and those of another log, are not done.
        """
        self.lost = {first: runs for first, runs in self.lost.items() if first in self.held}
        state = self.tracker.state()
        if self.lost:
            state = _with_holes(state, self.lost.values())
        if self.other_from is not None:
            state = _below(state, self.other_from)
        commit = form.encode(*self.key, self.generation, state, self.deployment)
        return PartitionCommit(*self.key, self.generation, commit, self.changes)

    @property
    def in_flight(self) -> int:
        """The number of records that are neither done nor waiting."""
        return self.numbers[FRESH] + self.numbers[OUT] + self.numbers[DYING]

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of the records that are neither done nor waiting."""
        return self.sizes[FRESH] + self.sizes[OUT] + self.sizes[DYING]

    def cause_of_pause(self, limits: Limits, waiting: int, waiting_bytes: int) -> str:
        """Return why reading of the partition must pause: "revoked", "in flight", "waiting"; or "".

        Of several causes, returns the first in this order. While the partition is paused, half of
        each limit applies. ``waiting``, ``waiting_bytes``: the waiting records of all partitions,
        and their bytes.
        """
        if self.closing:
            return "revoked"
        # Resume at half of the limit: each pause drops the records that the client has read ahead.
        part = 2 if self.cause else 1
        if (
            self.in_flight * part >= limits.held
            or self.in_flight_bytes * part >= limits.in_flight_bytes
        ):
            return "in flight"
        if waiting * part >= limits.waiting or waiting_bytes * part >= limits.waiting_bytes:
            return WAITING_CAUSE
        return ""

    def stats(self, now_ms: int, end: int | None) -> PartitionStats:
        """Return the statistics of the partition. ``end``: its end, if known."""
        first = next(iter(self.held.values()), None)
        lag = None if end is None or self.committed is None else max(0, end - self.committed)
        return PartitionStats(
            *self.key,
            generation=self.generation,
            position=self.tracker.position,
            committed=self.committed,
            lag=lag,
            fresh=self.numbers[FRESH],
            out=self.numbers[OUT],
            waiting=self.numbers[WAITING],
            dying=self.numbers[DYING],
            bytes=sum(self.sizes),
            oldest_s=0.0 if first is None else (now_ms - first.read_ms) / 1000,
            paused=self.cause,
        )


class DeliveryTimes:
    """The unanswered deliveries in the order of their times, to find those that time out."""

    def __init__(self) -> None:
        self._taken: deque[tuple[int, HeldPartition, Held, int]] = deque()

    def add(self, now_ms: int, found: HeldPartition, held: Held) -> None:
        """Add a delivery that was made now."""
        self._taken.append((now_ms, found, held, held.delivery))

    def up_to(self, taken_ms: int) -> Iterator[tuple[HeldPartition, Held]]:
        """Remove the deliveries made up to a time, and yield those without an answer."""
        while self._taken and (self._taken[0][0] <= taken_ms or not self._is_out(self._taken[0])):
            each = self._taken.popleft()
            if self._is_out(each):
                yield each[1], each[2]

    @staticmethod
    def _is_out(each: tuple[int, HeldPartition, Held, int]) -> bool:
        _, found, held, delivery = each
        is_this = held.status == OUT and held.delivery == delivery
        return is_this and found.held.get(held.record.offset) is held

    def trim(self, n_out: int) -> None:
        """Remove the answered deliveries if there are many more entries than ``n_out``."""
        if len(self._taken) > 2 * n_out + 64:
            self._taken = deque(each for each in self._taken if self._is_out(each))

    def __len__(self) -> int:
        return len(self._taken)


def named_runs(runs: Sequence[Run]) -> str:
    """Format runs of offsets for a dead letter; of more than 20, the first 20 and the last."""
    some = [f"{start} to {end - 1}" if end - start > 1 else str(start) for start, end in runs]
    if len(some) <= _MOST_NAMED:
        return ", ".join(some)
    offsets = sum(end - start for start, end in runs)
    return f"{', '.join(some[:_MOST_NAMED])} and more up to {some[-1]}, {offsets} in all,"


def _with_holes(state: OffsetState, lost: Iterable[list[Run]]) -> OffsetState:
    """Return a state in which the offsets of the runs in ``lost`` are not done.

    The tracker counts lost offsets as done, except the first one of each dead letter that is not
    stored yet.
    """
    holes = zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True)
    runs: list[Run] = []
    for start, end in sorted(chain(holes, *lost)):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(end, runs[-1][1])
        else:
            runs.append((start, end))
    # Nothing above the last done offset is done; that is no hole.
    end = state.end
    while runs and runs[-1][1] >= end:
        end = min(end, runs.pop()[0])
    starts, ends = np.array(runs, np.int64).reshape(-1, 2).T
    return state._replace(end=end, hole_starts=starts.copy(), hole_ends=ends.copy())


def _below(state: OffsetState, offset: int) -> OffsetState:
    """Return a state without the done and failed offsets from ``offset`` on.

    It commits no offset above that one either.
    """
    failed = state.failed < offset
    return _with_holes(state, [[(offset, max(offset + 1, state.end))]])._replace(
        committable=min(state.committable, offset),
        failed=state.failed[failed],
        attempts=state.attempts[failed],
    )
