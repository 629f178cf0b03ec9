"""The records that a consumer holds, and the status of each. No I/O; time is an argument.

A record that was read is *fresh*. It is *out* while the user processes it. Then it is done, or
*waiting* for its next attempt, or *dying*, that is, dead with a dead letter that is not stored yet.
A record is committed only when it is done: acked, or stored as a dead letter.

Each assignment of a partition has a number, its generation. An answer (ack or fail) counts if it is
the first one to the last delivery of a record in the present generation. Other answers change
nothing but the counts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from ackcore._error_hints import counted
from ackcore._records import OffsetState
from ackcore.dead_limit import DeadLimit
from ackcore.kafka.commit_metadata import MetadataForm
from ackcore.kafka.consumer.consumer_records import (
    ConsumerCounts,
    Failure,
    KafkaRecord,
    PartitionStats,
)
from ackcore.kafka.consumer.held_partition import (
    DYING,
    FRESH,
    OUT,
    WAITING,
    WAITING_CAUSE,
    DeliveryTimes,
    DyingRecord,
    Held,
    HeldPartition,
    Key,
    Limits,
    PartitionCommit,
    named_runs,
)
from ackcore.offsets import decode_metadata
from ackcore.retry import Policy

LOST_UPSTREAM = Failure("LostUpstream", "were deleted before they were read")
TOO_FAR_BEHIND = Failure("TooFarBehind", "were passed over, too far behind the end")
#: The number of characters of a reason that are logged.
_MOST_SAID = 200
_TIMED_OUT = Failure("TimeoutError", "neither acked nor failed in time")


class HeldRecords:
    """The records of all partitions that are assigned to a consumer.

    ``policy``: the attempts of a record, and the delays between them. ``limits``: the limits on
    records and bytes. ``timeout_ms``: the time without an answer after which a delivery has failed.
    ``unavailable_timeout_ms``: the age of a record at which `Unavailable` begins to count as an
    attempt. ``dead_limit``: counts the records that were acked or died. ``ordered_by``:
    "key" or "partition": records of one are delivered one at a time, in order; None for no order.
    ``wake``: called when a record may be taken, or an answer has come.

    All times are milliseconds of one monotonic clock.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        limits: Limits | None = None,
        timeout_ms: int | None = None,
        unavailable_timeout_ms: int = 7 * 24 * 3_600_000,
        dead_limit: DeadLimit | None = None,
        ordered_by: str | None = None,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        self._policy = policy
        self._limits = limits or Limits()
        self._timeout_ms = timeout_ms
        self._unavailable_timeout_ms = unavailable_timeout_ms
        self._wake = wake
        self._partitions: dict[Key, HeldPartition] = {}
        # Partitions that may have a record to deliver, by status.  They alternate, one record each.
        self._turns: dict[int, deque[HeldPartition]] = {FRESH: deque(), WAITING: deque()}
        self._fresh_is_next = False
        # A heap, ordered by due time.
        self._waiting: list[tuple[int, int, HeldPartition, int]] = []
        self._taken_at = DeliveryTimes()
        self._dying: list[DyingRecord] = []
        self._sequence = 0
        self._metadata = MetadataForm()
        self._last_failure = ""
        self._ordered_by = ordered_by
        #: The highest generation of any partition.
        self.generation = 0
        self.dead_limit = dead_limit or DeadLimit()
        self.counts = ConsumerCounts()

    # Partitions.

    def assign(
        self,
        topic: str,
        partition: int,
        generation: int,
        state: OffsetState,
        *,
        committed: bool = True,
        deployment: int = 0,
    ) -> None:
        """Add a partition, in place of an earlier assignment of it.

        ``generation``: the number of this assignment, above that of all earlier ones. ``state``:
        the offset to begin at, and the done offsets above it. ``committed``: whether the broker has
        this state. If not, it is committed even if no record is done. ``deployment``: the origin
        that commits hold, see `CommitOrigin`.
        """
        self.forget([(topic, partition)])
        self.generation = max(self.generation, generation)
        found = HeldPartition(topic, partition, generation, state, committed, deployment)
        self._partitions[found.key] = found

    def seek(self, key: Key, offset: int) -> bool:
        """Continue at another offset. All offsets below it count as done, and none from it on.

        Returns False if the partition is not held, or is being taken away. Until the client's
        thread has called `take_seeks`, records that it reads of the partition are ignored.
        """
        found = self._partitions.get(key)
        if found is None or found.closing:
            return False
        state = decode_metadata(*key, offset, None).state
        deployment = found.deployment
        self.assign(*key, self.generation + 1, state, committed=False, deployment=deployment)
        self._partitions[key].sought = True
        return True

    def take_seeks(self) -> dict[Key, int]:
        """Return the new offsets of the partitions that `seek` has moved since the last call."""
        found = {key: each for key, each in self._partitions.items() if each.sought}
        for each in found.values():
            each.sought = False
        return {key: each.tracker.position for key, each in found.items()}

    def _reading(self, key: Key) -> HeldPartition | None:
        """Return a partition; None if records that the client reads of it must be ignored."""
        found = self._partitions.get(key)
        return None if found is None or found.closing or found.sought else found

    def set_deployment(self, key: Key, deployment: int) -> None:
        """Set the origin in a partition's commits (`CommitOrigin`), and mark it for a commit."""
        if (found := self._partitions.get(key)) is not None:
            found.deployment = deployment
            found.changes += 1

    def expect_other_log(self, key: Key, offset: int, deployment: int) -> None:
        """Record that from an offset on, a partition now has other records than those read.

        From now on, offsets done at or above it are not committed: the new records there would not
        be read if this process died first.
        """
        if (found := self._reading(key)) is not None:
            found.other_from, found.committed = offset, None
            self.set_deployment(key, deployment)

    def close(self, keys: Iterable[Key]) -> None:
        """Stop delivering records of partitions. Answers to delivered records still count.

        Records that were read and not delivered are dropped. Waiting retries are not delivered.
        """
        for key in keys:
            if (found := self._partitions.get(key)) is None or found.closing:
                continue
            found.closing, found.cause = True, "revoked"
            for offset in [o for o, held in found.held.items() if held.status == FRESH]:
                found.count(found.held.pop(offset), -1)
                self.counts.dropped += 1
            found.queues[FRESH].clear()
            found.lines.clear()

    def seal(self, keys: Iterable[Key]) -> None:
        """Accept no more answers for partitions, because their last commit is being made."""
        for found in filter(None, map(self._partitions.get, keys)):
            found.sealed = True

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove partitions. Later answers for their records count as stale."""
        gone = [found for key in keys if (found := self._partitions.pop(key, None)) is not None]
        for found in gone:
            found.gone = True
            self.counts.dropped += len(found.held)
            found.held.clear()
        if gone:  # once for all of them: thousands may be taken away at a time
            for status, turns in self._turns.items():
                self._turns[status] = deque(each for each in turns if not each.gone)
            self._waiting = [each for each in self._waiting if not each[2].gone]
            heapq.heapify(self._waiting)

    def unanswered(self, keys: Iterable[Key]) -> int:
        """Return the number of records without an answer, or dead and not stored yet."""
        found = [self._partitions[key] for key in keys if key in self._partitions]
        return sum(each.numbers[OUT] + each.numbers[DYING] for each in found)

    @property
    def assigned(self) -> list[Key]:
        """The partitions that are assigned, those that are being taken away included."""
        return list(self._partitions)

    def position(self, key: Key) -> int | None:
        """Return the next offset to read of a partition; None if it is not assigned."""
        return None if (found := self._partitions.get(key)) is None else found.tracker.position

    def is_idle(self, key: Key) -> bool:
        """Return whether all records read of a partition are done; False if it is not assigned.

        Also False while the partition is taken away, or moved by `seek`.
        """
        found = self._reading(key)
        return found is not None and not found.tracker.pending

    # Records in.

    def read(
        self,
        key: Key,
        records: Sequence[KafkaRecord],
        sizes: Sequence[int],
        now_ms: int,
        unreadable: Mapping[int, Failure] = MappingProxyType({}),
    ) -> int:
        """Add records that were read of one partition, in order of offset.

        Returns the number of added records: those that were done before, or are held already, are
        not. If the partition is taken away, or was moved by `seek`, or if too many records are
        dead, all are dropped. ``sizes``: the bytes of each record. ``unreadable``: failures by
        offset; these records are dead at once, as are those that already had all their attempts.
        """
        found = self._reading(key)
        if found is None:
            self.counts.dropped += len(records)
            return 0
        tracker, n = found.tracker, 0
        for record, size in zip(records, sizes, strict=True):
            if self.dead_limit.excess is not None:
                # The consumer ends.  The next start reads the remaining records.
                self.counts.dropped += 1
                continue
            offset = record.offset
            if offset in found.held:  # read again after the client had to go back
                continue
            if not tracker.emitted(offset):  # done before a restart
                self.counts.skipped += 1
                continue
            n += 1
            failures = tracker.attempt(offset)
            record = record._replace(attempt=failures, generation=found.generation)
            held = found.hold(record, size, now_ms)
            found.queue(offset, self._order_of(record))
            if failures >= self._policy.max_attempts:
                # When the last generation ended, its dead letter was not confirmed as stored.
                failure = Failure(
                    "Failed", f"{counted(failures, 'time')} before it was assigned anew"
                )
                self._die(found, held, failure, failures)
            elif offset in unreadable:
                self.dead_limit.ended(0, 1)
                self._die(found, held, unreadable[offset], failures + 1)
        found.changes += 1
        self.counts.read += n
        if n:
            self._status_changed(found)
        return n

    def skip_lost(
        self, key: Key, stop: int, now_ms: int, keep: bool, why: Failure = LOST_UPSTREAM
    ) -> int:
        """Skip the offsets of a partition below ``stop``, whose records cannot be read.

        ``keep``: whether to make a dead letter that names them, which must be stored before they
        are committed. ``why``: the failure in the dead letter; the offsets are put before its text.
        Returns the number of skipped offsets that were not done.
        """
        found = self._reading(key)
        if found is None or stop <= found.tracker.position:
            return 0
        runs = found.not_done(stop)
        lost = sum(end - start for start, end in runs)
        if lost and keep:
            first, _ = runs[0]
            found.tracker.emitted(first)
            record = KafkaRecord(*key, first, None, None, [], None, 0, found.generation)
            held = found.hold(record, 0, now_ms)
            found.lost[first] = runs
            text = f"offsets {named_runs(runs)} {why.message}"
            self._die(found, held, Failure(why.kind, text), 0)
        self.advance(key, stop)
        self.counts.lost += lost
        return lost

    def advance(self, key: Key, position: int) -> None:
        """Move the next offset to read up to ``position``; the offsets in between have no record.

        They count as done. A lower position changes nothing.
        """
        found = self._reading(key)
        if found is not None and position > found.tracker.position:
            found.tracker.advance(position)
            found.changes += 1

    def _order_of(self, record: KafkaRecord) -> object:
        if self._ordered_by == "key":
            return record.key
        return self._ordered_by  # one queue per partition, or no order

    # Records out.

    def take(self, n: int, now_ms: int) -> list[KafkaRecord]:
        """Return up to n records to be processed; each then waits for its answer. Does not wait.

        Due retries and new records alternate, so that records that fail again and again do not
        block new ones. The partitions alternate, too. No partition has more records out than its
        limit. Returns [] once too many records are dead.
        """
        taken: list[KafkaRecord] = []
        if self.dead_limit.excess is not None:
            return taken  # the consumer ends, and stores its dead letters
        while len(taken) < n:
            self._queue_due(now_ms)
            first, second = (FRESH, WAITING) if self._fresh_is_next else (WAITING, FRESH)
            record = self._take(first, now_ms) or self._take(second, now_ms)
            if record is None:
                break
            taken.append(record)
        return taken

    def _queue_due(self, now_ms: int) -> None:
        while self._waiting and self._waiting[0][0] <= now_ms:
            due_ms, _, found, offset = heapq.heappop(self._waiting)
            held = found.held.get(offset)
            if held is None or held.status != WAITING or held.due_ms != due_ms or found.closing:
                continue
            found.queues[WAITING].append(offset)
            self._give_turns(found)

    def _take(self, status: int, now_ms: int) -> KafkaRecord | None:
        turns = self._turns[status]
        while turns:
            found = turns.popleft()
            held = found.next(status, self._limits)
            if held is None:
                found.in_turn.discard(status)
                continue
            turns.append(found)
            self._fresh_is_next = status == WAITING
            if status == WAITING:
                if not held.in_tracker:
                    found.tracker.emitted(held.record.offset)
                    held.in_tracker = True
                self.counts.retried += 1
            held.delivery += 1
            held.timed_out = False
            found.set_status(held, OUT)
            held.record = held.record._replace(delivery=held.delivery)
            if self._timeout_ms is not None:
                self._taken_at.add(now_ms, found, held)
            return held.record
        return None

    def _give_turns(self, found: HeldPartition) -> None:
        for status, turns in self._turns.items():
            if status not in found.in_turn and found.has_next(status, self._limits):
                found.in_turn.add(status)
                turns.append(found)

    def _status_changed(self, found: HeldPartition) -> None:
        """Let a partition take part in deliveries after a change of a record; call ``wake``."""
        self._give_turns(found)
        self._wake()

    def due_in_ms(self, now_ms: int) -> int | None:
        """Return the milliseconds until `take` may have a record; None if no time is known.

        Also None once too many records are dead.
        """
        if self.dead_limit.excess is not None:
            return None
        if any(
            found.has_next(status, self._limits)
            for status, turns in self._turns.items()
            for found in turns
        ):
            return 0
        return max(0, self._waiting[0][0] - now_ms) if self._waiting else None

    # Answers.

    def ack(self, record: KafkaRecord) -> bool:
        """Record the user's ack. Return False if the answer changes nothing but the counts."""
        found, held = self._answered(record)
        if found is None or held is None:
            return False
        self.counts.acked += 1
        self.dead_limit.ended(1, 0)
        self._done(found, record.offset)
        return True

    def fail(
        self,
        record: KafkaRecord,
        failure: Failure,
        now_ms: int,
        *,
        final: bool = False,
        counts: bool = True,
        after_ms: int = 0,
    ) -> bool:
        """Record that the user failed a record. Return False if that changes nothing but counts.

        ``final``: whether the record is dead at once. ``counts``: whether the failure counts as an
        attempt; it always does once the record is ``unavailable_timeout_ms`` old. ``after_ms``: the
        shortest wait before the next attempt.
        """
        found, held = self._answered(record)
        if found is None or held is None:
            return False
        if held.status == WAITING:  # it timed out, which already counted as a failure
            self.counts.late += 1
            return False
        self.counts.failed += 1
        self._failed(found, held, failure, now_ms, final=final, counts=counts, after_ms=after_ms)
        return True

    def expire(self, now_ms: int) -> None:
        """Fail the deliveries that have timed out.

        An ack of such a record still counts until it is delivered again, or is dead.
        """
        if self._timeout_ms is None:
            return
        for found, held in self._taken_at.up_to(now_ms - self._timeout_ms):
            self.counts.timed_out += 1
            self._failed(found, held, _TIMED_OUT, now_ms)
            held.timed_out = True
        self._taken_at.trim(sum(each.numbers[OUT] for each in self._partitions.values()))

    def _answered(self, record: KafkaRecord) -> tuple[HeldPartition | None, Held | None]:
        """Return the partition and the record that an answer changes.

        The record is None if the answer has no effect, and so is the partition if it was taken away
        or moved. Such answers are counted. Raises TypeError for anything but a `KafkaRecord`.
        """
        if not isinstance(record, KafkaRecord):
            raise TypeError(
                f"record must be a KafkaRecord that this consumer delivered, got "
                f"{type(record).__name__} {record!r}"
            )
        found = self._partitions.get((record.topic, record.partition))
        if found is None or found.sealed or found.generation != record.generation:
            self.counts.stale += 1
            return None, None
        held = found.held.get(record.offset)
        if held is None:
            self.counts.repeated += 1
            return found, None
        may_be = held.status == OUT or (held.status == WAITING and held.timed_out)
        if held.delivery != record.delivery or not may_be:
            self.counts.late += 1
            return found, None
        return found, held

    def _failed(
        self,
        found: HeldPartition,
        held: Held,
        failure: Failure,
        now_ms: int,
        *,
        final: bool = False,
        counts: bool = True,
        after_ms: int = 0,
    ) -> None:
        record = held.record
        counts = counts or now_ms - held.read_ms >= self._unavailable_timeout_ms
        if counts:
            found.tracker.failed(record.offset)
            held.in_tracker = False
        found.changes += 1
        waiting = self._policy.decide(
            f"{record.topic}-{record.partition}-{record.offset}",
            *(record.attempt, now_ms, final),
            counts=counts,
            not_before_ms=now_ms + after_ms,
            first_ms=held.read_ms,
        )
        if waiting is None:
            self.dead_limit.ended(0, 1)
            self._die(found, held, failure, record.attempt + 1)
            return
        self._last_failure = f"{failure.kind}: {failure.message[:_MOST_SAID]}"
        held.record = record._replace(attempt=waiting.attempt)
        held.due_ms = waiting.due_ms
        found.set_status(held, WAITING)
        self._sequence += 1
        heapq.heappush(self._waiting, (waiting.due_ms, self._sequence, found, record.offset))
        self._status_changed(found)

    def _die(self, found: HeldPartition, held: Held, failure: Failure, failures: int) -> None:
        found.set_status(held, DYING)
        self._dying.append(DyingRecord(held.record, failure, failures))
        self._status_changed(found)

    def _done(self, found: HeldPartition, offset: int) -> None:
        found.tracker.acked(offset)
        held = found.held.pop(offset)
        found.count(held, -1)
        found.release_key(offset, self._order_of(held.record))
        found.changes += 1
        found.last_done = found.changes
        self._status_changed(found)

    # Dead letters.

    def take_dying(self) -> list[DyingRecord]:
        """Return the dead records since the last call, whose dead letters are to be stored."""
        letters, self._dying = self._dying, []
        return [letter for letter in letters if self.is_dying(letter)]

    def is_dying(self, letter: DyingRecord) -> bool:
        """Return whether a dead letter is still to be stored.

        False if it is stored, or its partition was taken away or moved.
        """
        record = letter.record
        found = self._partitions.get((record.topic, record.partition))
        return (
            found is not None
            and found.generation == record.generation
            and record.offset in found.held
        )

    def letter_stored(self, letter: DyingRecord) -> bool:
        """Record that a dead letter is stored, so that its record is done.

        Returns False, without effect, unless `is_dying` is true for it.
        """
        if not self.is_dying(letter):
            return False
        topic, partition, offset, *_ = letter.record
        self.counts.dead += 1
        self._done(self._partitions[topic, partition], offset)
        return True

    # Commits.

    def commits(self, keys: Iterable[Key] | None = None) -> list[PartitionCommit]:
        """Return the commits of partitions that changed since the broker accepted their last one.

        ``keys``: the partitions; by default all.
        """
        some = self._partitions if keys is None else keys
        found = [self._partitions[key] for key in some if key in self._partitions]
        changed = [each for each in found if each.changes != each.committed_changes]
        return [each.commit(self._metadata) for each in changed]

    def repeat_commits(self) -> None:
        """Mark all partitions for a commit, also those without a change."""
        for each in self._partitions.values():
            each.changes += 1

    def uncommitted(self) -> dict[Key, tuple[int, int]]:
        """Return the partitions with changes that the broker has not accepted, for `are_committed`.

        Each has the number of its assignment, and that of its last change.
        """
        return {
            key: (each.generation, each.changes)
            for key, each in self._partitions.items()
            if each.changes != each.committed_changes
        }

    def has_uncommitted(self) -> bool:
        """Return whether records are done that the broker has no commit of."""
        return any(each.last_done > each.committed_changes for each in self._partitions.values())

    def are_committed(self, changes: Mapping[Key, tuple[int, int]]) -> bool:
        """Return whether all changes returned by `uncommitted` are committed by now.

        Partitions that were taken away, or moved by `seek`, since are ignored.
        """
        return not any(
            (found := self._partitions.get(key)) is not None
            and found.generation == generation
            and found.committed_changes < number
            for key, (generation, number) in changes.items()
        )

    def commit_confirmed(self, done: PartitionCommit) -> None:
        """Record that the broker accepted a commit, unless it is of an earlier assignment."""
        self._metadata.accepted(done.commit.metadata)
        found = self._partitions.get((done.topic, done.partition))
        if found is not None and found.generation == done.generation:
            found.committed_changes = max(found.committed_changes, done.changes)
            found.committed = max(found.committed or 0, done.commit.offset)
            self.counts.committed += 1
            self._wake()

    def metadata_too_large(self, metadata: str) -> bool:
        """Make later metadata shorter, or ASCII only, after the broker refused ``metadata``.

        Returns False for "", which cannot be shorter; else True.
        """
        return self._metadata.too_large(metadata)

    # How much may be read.

    def room(self) -> int:
        """Return the number of records to request in the next read; 0 if all partitions are paused.

        It is at least an eighth of the limit, so that one nearly full partition does not make all
        reads small. A partition may exceed its limit by that.
        """
        limit = self._limits.held
        free = [limit - each.in_flight for each in self._partitions.values() if not each.cause]
        return max(min(free), limit // 8, 1) if free else 0

    def pauses(self) -> tuple[list[Key], list[Key]]:
        """Return the partitions to pause and to resume: the changes since the last call."""
        waiting, waiting_bytes = self._waiting_now()
        pause: list[Key] = []
        resume: list[Key] = []
        for key, each in self._partitions.items():
            cause = each.cause_of_pause(self._limits, waiting, waiting_bytes)
            if bool(cause) != bool(each.cause):
                (pause if cause else resume).append(key)
            each.cause = cause
        return pause, resume

    def stopped_by_waiting(self) -> str:
        """Return a warning if waiting records pause reading, with the last failure; else ""."""
        stopped = sum(each.cause == WAITING_CAUSE for each in self._partitions.values())
        if not stopped:
            return ""
        limits, (waiting, waiting_bytes) = self._limits, self._waiting_now()
        return (
            f"{stopped} of {len(self._partitions)} partitions are not read, because "
            f"{counted(waiting, 'record waits', 'records wait')} for a retry, with {waiting_bytes} "
            f"bytes; reading stops at max_waiting={limits.waiting} or "
            f"max_waiting_bytes={limits.waiting_bytes}, and resumes below half of both; the last "
            f"one failed with {self._last_failure}"
        )

    def _waiting_now(self) -> tuple[int, int]:
        every = self._partitions.values()
        return sum(each.numbers[WAITING] for each in every), sum(
            each.sizes[WAITING] for each in every
        )

    @property
    def paused(self) -> int:
        """The number of paused partitions."""
        return sum(bool(each.cause) for each in self._partitions.values())

    def partition_stats(self, now_ms: int, ends: Mapping[Key, int]) -> list[PartitionStats]:
        """Return the statistics of each partition. ``ends``: the known ends of partitions."""
        return [each.stats(now_ms, ends.get(key)) for key, each in self._partitions.items()]
