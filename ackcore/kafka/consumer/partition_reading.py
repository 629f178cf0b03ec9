"""The reading of a consumer's partitions: calls of its client, errors, positions and pauses."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from ackcore._error_hints import counted
from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.consumer.consumer_client import record_of, watermarks
from ackcore.kafka.consumer.consumer_records import KafkaRecord
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.consumer_starts import WAY_OUT, AssignedStart
from ackcore.kafka.consumer.held_partition import Key
from ackcore.kafka.consumer.held_records import TOO_FAR_BEHIND, HeldRecords
from ackcore.kafka.kafka_errors import ConsumerError, OffsetsOutOfRange, is_fatal
from ackcore.kafka.truncations import truncations
from ackcore.retry import capped_doubling

_log = logging.getLogger(__name__)

#: The largest number of records read at once, so that an answer waits for milliseconds only.
_BATCH = 500
#: The longest wait for a record, in seconds: normally, and while dead letters or pauses need work.
_LOOK_S, SHORT_LOOK_S = 0.1, 0.01
#: The wait, in milliseconds, after a broker refused a position that is in range.
_FIRST_RESET_MS, _LONGEST_RESET_MS = 20, 5_000

#: The time between warnings that waiting records stop reading.
_SAY_MS = 60_000

#: librdkafka's value for an offset without a leader epoch.
_NO_EPOCH = -1
#: Seconds for leaders to answer whether a log was truncated.
_ASK_S = 10.0

#: Errors of unreadable data.  The client reports each once and skips the data.
_UNREADABLE = frozenset(
    {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED}
)
#: Errors that are permanent.
_FINAL = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
    )
)

#: The remedies for errors with which brokers refuse a member of a group, by code.
_WAYS_OUT = {
    KafkaError.INCONSISTENT_GROUP_PROTOCOL: (
        "; the other members assign partitions in another way: give all the same protocol="
    ),
    KafkaError.INVALID_SESSION_TIMEOUT: (
        "; set options['session.timeout.ms'] within the brokers' group.min.session.timeout.ms and "
        "group.max.session.timeout.ms"
    ),
    KafkaError.GROUP_MAX_SIZE_REACHED: (
        "; the brokers' group.max.size allows no more members: end others, or raise it"
    ),
}


def now_ms() -> int:
    """Return the time of a monotonic clock, in milliseconds."""
    return time.monotonic_ns() // 1_000_000


class PartitionReading:
    """Reads partitions into ``held``. Only the client's thread uses it.

    ``changed``: the lock of ``held``. ``topic_ids``: returns the present ids of topics; it waits
    for the brokers.
    """

    def __init__(
        self,
        client: Consumer,
        settings: ConsumerSettings,
        held: HeldRecords,
        changed: threading.Condition,
        topic_ids: Callable[[Iterable[str]], Mapping[str, str | None]],
    ) -> None:
        self._client = client
        self._settings = settings
        self._log = settings.client.logger(_log)
        self._held = held
        self._changed = changed
        self._topic_ids = topic_ids
        #: The last known end of each partition: its last offset plus 1.
        self.ends: dict[Key, int] = {}
        #: Whether an error occurred that may come from a deleted topic.
        self.had_error = False
        self._incremental = settings.protocol != "eager" and not settings.is_manual
        self._paused = 0
        self._say_ms = 0
        self._begun: dict[Key, AssignedStart] = {}
        self._assigned_now: set[Key] = set()
        # Partitions whose position in the client may be from the assignment before.
        self._unpositioned: set[Key] = set()
        # Partitions after an offset out of range: the number of refusals in a row, the time of the
        # next read, and the start in the new log, if it is another one.
        self._resets: dict[Key, int] = {}
        self._read_again: dict[Key, int] = {}
        self._other_logs: dict[Key, int] = {}
        # The new offsets of partitions, which `read` moves together at its end.
        self._moved: dict[Key, int] = {}
        #: The epochs of the leaders that wrote the last records read.
        self._epochs: dict[Key, int] = {}

    # Partitions.

    def begin(self, begun: Iterable[AssignedStart]) -> None:
        """Add partitions to ``held``, and skip the offsets that are too far behind.

        The caller then assigns them to the client at `positions`.
        """
        with self._changed:
            # From the clock: a late commit may come from the process before this one.
            generation = max(self._held.generation + 1, time.time_ns() // 1_000_000)
            for each in begun:
                self._begun[each.key] = each
                self._assigned_now.add(each.key)
                # The process that committed may have a clock that is ahead.
                number = max(generation, (each.restored.generation or 0) + 1)
                self._held.assign(
                    *each.key,
                    number,
                    each.restored.state,
                    committed=each.committed,
                    deployment=each.origin.deployment,
                )
                if each.origin != CommitOrigin.read(each.restored.deployment):
                    self._held.set_deployment(each.key, each.origin.deployment)
                if each.skip_to is not None:
                    keep = self._settings.dead_letters is not None
                    self._held.skip_lost(each.key, each.skip_to, now_ms(), keep, TOO_FAR_BEHIND)

    def positions(self, keys: Iterable[Key]) -> list[TopicPartition]:
        """Return partitions, each with its next offset to read, to assign them to the client.

        Leaves out those that are not held.
        """
        with self._changed:
            found = [(key, self._held.position(key)) for key in keys]
        self._unpositioned.update(key for key, _ in found)
        return [self._at(key, offset) for key, offset in found if offset is not None]

    def _at(self, key: Key, offset: int) -> TopicPartition:
        """Return a partition with an offset for the client, and the epoch of the last record read.

        By the epoch, brokers refuse the offset if the log was truncated below it.
        """
        return TopicPartition(*key, offset, leader_epoch=self._epochs.get(key, _NO_EPOCH))

    def forget(self, keys: Sequence[Key]) -> None:
        """Remove partitions that were taken away, also from ``held``."""
        with self._changed:
            self._held.forget(keys)
            for key in keys:
                self._begun.pop(key, None)
                self.ends.pop(key, None)
                self._forget_place(key)
            self._changed.notify_all()

    def _forget_place(self, key: Key) -> None:
        for known in (self._resets, self._read_again, self._other_logs, self._epochs):
            known.pop(key, None)

    def update_topic_ids(self, ids: Mapping[str, str | None]) -> None:
        """Compare the present ids of topics with the known ones, to detect re-created topics.

        Such a topic is read from its beginning, once the records read before are done. Raises
        OffsetsOutOfRange instead if ``out_of_range`` is "fail". An id that is None or missing
        changes nothing.
        """
        for key, begun in list(self._begun.items()):
            now = ids.get(key[0])
            if now is None or now == begun.topic_id:
                continue
            known = begun.origin._replace(topic=CommitOrigin.of(now, None).topic)
            self._begun[key] = begun._replace(topic_id=now, origin=known)
            if begun.topic_id is None and not begun.origin.is_other_topic(known):
                with self._changed:
                    self._held.set_deployment(key, known.deployment)
                continue
            recreated = f"the topic of {key[0]}-{key[1]} was deleted and created again"
            if self._settings.on_out_of_range == "fail":
                raise OffsetsOutOfRange(f"{recreated}; {WAY_OUT}")
            self._log.warning("%s, and is read from its beginning", recreated)
            # Records that come now are ignored, and read again when the former ones are done.
            self._plan_other_log(key, 0)
            self._client.pause([TopicPartition(*key)])

    def _plan_other_log(self, key: Key, offset: int, epoch: int | None = None) -> None:
        """Plan to read a partition from an offset once all records read of it are done.

        Until then, records that the client reads of it are ignored. ``epoch``: the epoch of the
        leader that wrote all records below the offset, if there is one. By it, brokers refuse the
        offset if the log has changed again.
        """
        self._other_logs[key] = offset
        if epoch is None:
            self._epochs.pop(key, None)
        with self._changed:
            self._held.expect_other_log(key, offset, self._begun[key].origin.deployment)

    # Reading.

    def pause_and_resume(self) -> None:
        """Pause the partitions that have reached a limit, and resume those that may be read.

        Warns, at most once a minute, if records that wait for a retry stop reading.
        """
        with self._changed:
            pause, resume = self._held.pauses()
            self._paused = self._held.paused
            # A pause for records in flight may continue because these have failed and wait.
            is_time = self._paused and now_ms() >= self._say_ms
            stopped = self._held.stopped_by_waiting() if is_time else ""
        if stopped:
            self._say_ms = now_ms() + _SAY_MS
            self._log.warning("%s", stopped)
        if pause:
            self._client.pause([TopicPartition(*key) for key in pause])
        if resume:
            self._client.resume([TopicPartition(*key) for key in resume])
            self._fetch_now(resume)

    def _fetch_now(self, keys: Iterable[Key]) -> None:
        """Seek resumed partitions to their positions, so that librdkafka fetches them at once.

        Its broker thread may sleep for 1 s, and only a seek wakes it.
        """
        with self._changed:
            found = {key: self._held.position(key) for key in keys}
        for key, offset in found.items():
            if offset is not None and key not in self._other_logs and key not in self._read_again:
                with suppress(KafkaException):  # the partition is being assigned, or in error
                    self._client.seek(self._at(key, offset))

    def read(self, *, busy: bool) -> None:
        """Read up to 500 available records into ``held``; wait up to 0.1 s for the first.

        ``busy``: whether dead letters are being stored. Then, and while a partition is paused, it
        waits only 0.01 s. Raises ConsumerError after an error that ends the consumer, and
        OffsetsOutOfRange if offsets are missing and ``out_of_range`` is "fail".
        """
        with self._changed:
            room = self._held.room()
        self._assigned_now.clear()
        wait_s = SHORT_LOOK_S if busy or self._paused else _LOOK_S
        # `consume` would wait for all n messages or its time-out: poll one, then take the rest.
        first = self._client.poll(wait_s)
        if first is None:
            return
        n = min(room, _BATCH) - 1
        messages = [first, *(self._client.consume(n, 0) if n > 0 else ())]
        read: defaultdict[Key, list[Message]] = defaultdict(list)
        errors = []
        damaged: set[Key] = set()
        for message in messages:
            if (error := message.error()) is not None:
                errors.append((message, error))
                if error.code() in _UNREADABLE:
                    damaged.add(_key(message))
            elif not damaged or _key(message) not in damaged:
                # Records after damaged data would make the skipped offsets count as done.
                read[_key(message)].append(message)
        for key, some in read.items():
            if key in self._assigned_now:
                # They may be from the assignment before, with a gap that would count as done.
                with self._changed:
                    position = self._held.position(key)
                if position is not None:
                    self._moved[key] = position
            elif key not in self._other_logs:
                self._take_in(key, some)
        # After the records: reading continues at the last record before the error.
        lost = dict.fromkeys(_key(message) for message, error in errors if _is_out_of_range(error))
        marks = self._marks_of(lost) if lost else {}
        truncated = self._truncations(marks) if marks else {}
        for message, error in errors:
            self._read_error(message, error, marks, truncated)
        moved, self._moved = self._moved, {}
        self._read_from(moved)

    def _take_in(self, key: Key, messages: list[Message]) -> None:
        records, sizes, unreadable = [], [], {}
        for message in messages:
            record, failure = record_of(key, message)
            if failure is not None:
                unreadable[record.offset] = failure
            records.append(record)
            sizes.append(_size(record))
        self._unpositioned.discard(key)
        self._resets.pop(key, None)
        epoch = messages[-1].leader_epoch()
        if epoch is not None:
            self._epochs[key] = epoch
        with self._changed:
            self._held.read(key, records, sizes, now_ms(), unreadable)

    def _read_from(self, offsets: Mapping[Key, int]) -> None:
        """Move the partitions of ``offsets`` to these offsets, by a new assignment.

        After an error, a seek would fail. Without incremental assignments all partitions are
        assigned again, so pass all that are to be moved.
        """
        if not offsets:
            return
        self._unpositioned.update(offsets)
        begun = [self._at(key, offset) for key, offset in offsets.items()]
        if self._incremental:
            self._client.incremental_unassign(begun)
            self._client.incremental_assign(begun)
        else:
            with self._changed:
                others = [each for each in self._held.assigned if each not in offsets]
            self._client.assign([*begun, *self.positions(others)])

    def _marks_of(self, keys: Iterable[Key]) -> dict[Key, tuple[int, int]]:
        """Return the first offsets and the ends of partitions, with two requests to each broker.

        Leaves out those that are not assigned, or whose log is another one.
        """
        with self._changed:
            held = set(self._held.assigned)
        # The others are from an assignment that is over, or will be.
        keys = [key for key in keys if key in held and key not in self._other_logs]
        return watermarks(self._client, keys)

    def _truncations(self, marks: Mapping[Key, tuple[int, int]]) -> Mapping[Key, int]:
        """Return the first offset at which each truncated log differs from the one that was read.

        Other partitions are left out, and all of them if the brokers do not answer. ``marks``: from
        `_marks_of`.
        """
        with self._changed:
            positions = {key: self._held.position(key) for key in marks}
        asked = {
            key: (low, position, self._epochs[key])
            for key, (low, high) in marks.items()
            if (position := positions[key]) is not None
            and low <= position <= high
            and key in self._epochs
        }
        try:
            return truncations(self._settings.client, asked, _ASK_S)
        except ConnectionError as error:
            self._log.warning("%s", error)
            return {}  # the brokers will refuse the positions again

    def _read_error(
        self,
        message: Message,
        error: KafkaError,
        marks: Mapping[Key, tuple[int, int]],
        truncated: Mapping[Key, int],
    ) -> None:
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            return
        self.had_error = True
        if _is_out_of_range(error):
            key = _key(message)
            self._out_of_range(key, marks, truncated.get(key))
        elif code in _UNREADABLE:
            key = _key(message)
            with self._changed:
                position = self._held.position(key)
            raise ConsumerError(
                f"{key[0]}-{key[1]} has damaged records at offset {position} or above: "
                f"{error.str()}; to skip them, commit an offset after them for group "
                f"{self._settings.group_id!r} by Kafka's tools, and start the consumer again"
            )
        elif is_fatal(error) or code in _FINAL:
            raise ConsumerError(
                f"the client of the consumer has failed: {error.str()}; remove the cause, and "
                "start the consumer again"
            )
        else:
            way_out = _WAYS_OUT.get(code, "")
            self._log.warning(
                "the client reported an error, and continues: %s%s", error.str(), way_out
            )

    def _out_of_range(
        self, key: Key, marks: Mapping[Key, tuple[int, int]], truncated: int | None
    ) -> None:
        """Handle the client's error that the next offset of a partition is out of range.

        The client has stopped reading the partition. Plans to read it at the same offset if it has
        that, else where ``out_of_range`` says, and raises OffsetsOutOfRange if that is "fail".
        ``marks``: from `_marks_of`. ``truncated``: its offset from `_truncations`, or None.
        """
        with self._changed:
            position = self._held.position(key)
        if position is None or key not in marks or key in self._other_logs:
            return
        low, high = marks[key]
        self.ends[key] = high
        policy = self._settings.on_out_of_range
        name = f"{key[0]}-{key[1]}"
        if truncated is not None:
            self._read_truncated(key, position, truncated)
            return
        if low <= position <= high:
            if position == low:  # no record below is left to compare epochs with
                self._epochs.pop(key, None)
            self._resets[key] = times = self._resets.get(key, 0) + 1
            wait_ms = capped_doubling(_FIRST_RESET_MS, times, _LONGEST_RESET_MS)
            self._log.warning(
                "%s has offsets [%d, %d), but a broker refused %d as out of range: the read is "
                "repeated in %d ms",
                *(name, low, high, position, wait_ms),
            )
            self._read_again[key] = now_ms() + wait_ms
            return
        if position > high:
            self.update_topic_ids(self._topic_ids([key[0]]))
            if key in self._other_logs:
                return
        outside = f"{name} cannot be read from offset {position}: it has offsets [{low}, {high})"
        if policy == "fail":
            if position > high:
                self._commit_common_log(key, low, high)
            named = ": with dead_letters, a dead letter names the lost offsets"
            raise OffsetsOutOfRange(
                f"{outside}; to continue at its first offset or its end, set "
                f"out_of_range='earliest' or 'latest'{'' if position > high else named}"
            )
        target = low if policy == "earliest" else high
        if position > high:
            # It is another log: the topic was created again, or the log lost its end.
            self._log.warning(
                "%s: it was truncated or its topic created again, and is read from %d",
                outside,
                target,
            )
            self._plan_other_log(key, target)
            return
        with self._changed:
            keep = self._settings.dead_letters is not None
            lost = self._held.skip_lost(key, target, now_ms(), keep)
        self._log.warning(
            "%s: %s lost, and reading continues at %d",
            outside,
            counted(lost, "offset is", "offsets are"),
            target,
        )
        self._epochs.pop(key, None)
        self._moved[key] = target

    def _read_truncated(self, key: Key, position: int, other: int) -> None:
        """Plan to read a partition again from the first offset that differs from what was read.

        Its log was truncated there, below the position, and written anew. Raises
        OffsetsOutOfRange if ``out_of_range`` is "fail".
        """
        truncated = (
            f"{key[0]}-{key[1]} was read up to offset {position}, and then its log was truncated "
            f"at offset {other} and written anew"
        )
        self._plan_other_log(key, other, self._epochs[key])
        if self._settings.on_out_of_range == "fail":
            raise OffsetsOutOfRange(
                f"{truncated}; start the consumer again: it reads from offset {other}, or from the "
                "committed offset if that is lower. To continue without a restart, set "
                "out_of_range='earliest' or 'latest'"
            )
        self._log.warning("%s; it is read again from that offset", truncated)

    def _commit_common_log(self, key: Key, low: int, high: int) -> None:
        """Keep done offsets above a truncation from being committed, before the consumer ends.

        At the next start, the log may be so long again that the truncation cannot be detected.
        """
        epoch = self._epochs.get(key)
        if epoch is None or self._begun[key].topic_id is None:
            return  # the offset of the truncation is unknown
        with suppress(ConnectionError):
            found = truncations(self._settings.client, {key: (low, high, epoch)}, _ASK_S)
            self._plan_other_log(key, found.get(key, high))

    def apply_positions(self) -> None:
        """Make the client continue at new positions.

        They come from `Consumer.seek`; from offsets that brokers refused, which are read again
        after a pause; and from truncated or re-created partitions, once all records that were read
        before are done.
        """
        with self._changed:
            # The records of the former log must be done first.
            others = {key: at for key, at in self._other_logs.items() if self._held.is_idle(key)}
            for key, at in others.items():
                self._held.seek(key, at)
                del self._other_logs[key]
            sought = self._held.take_seeks()
            for key in sought:
                self._held.set_deployment(key, self._begun[key].origin.deployment)
                if key not in others:
                    self._forget_place(key)
        if sought:
            self._read_from(sought)
            self._client.resume([TopicPartition(*key) for key in sought])
        now, again = now_ms(), {}
        for key in [key for key, due_ms in self._read_again.items() if due_ms <= now]:
            del self._read_again[key]
            with self._changed:
                position = self._held.position(key)
            if position is not None and key not in self._other_logs:
                again[key] = position
        self._read_from(again)

    def skip_markers(self) -> None:
        """Count transaction markers after the last record of a partition as done; update `ends`.

        The markers count only when all records read of the partition are done.
        """
        with self._changed:
            keys = self._held.assigned
            idle = [key for key in keys if self._held.is_idle(key) and key not in self._other_logs]
        if idle:
            for found in self._client.position([TopicPartition(*key) for key in idle]):
                key = (found.topic, found.partition)
                if found.offset < 0:  # no position yet: the next one is from this assignment
                    self._unpositioned.discard(key)
                elif found.error is None and key not in self._unpositioned:
                    if found.leader_epoch is not None:  # perhaps a marker's epoch
                        self._epochs[key] = found.leader_epoch
                    with self._changed:
                        self._held.advance(key, found.offset)
        for key in keys:
            _, high = self._client.get_watermark_offsets(TopicPartition(*key), cached=True)
            if high >= 0:
                self.ends[key] = high


def _key(message: Message) -> Key:
    topic, partition = message.topic(), message.partition()
    assert topic is not None
    assert partition is not None
    return topic, partition


def _is_out_of_range(error: KafkaError) -> bool:
    return error.code() == KafkaError._AUTO_OFFSET_RESET


def _size(record: KafkaRecord) -> int:
    """Return the bytes of a record; ``len`` of its message would be those of its value."""
    size = len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += len(name) + len(value or b"")
    return size
