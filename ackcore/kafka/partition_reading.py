"""The reading side of a consumer's thread: client calls, errors, positions and pauses."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from ackcore.kafka.begin import MADE_ANEW, Begun
from ackcore.kafka.client import ConsumerError, OffsetsOutOfRange, record_of, watermarks
from ackcore.kafka.consumer_settings import ConsumerSettings
from ackcore.kafka.errors import is_fatal
from ackcore.kafka.held_partition import Key
from ackcore.kafka.held_records import TOO_FAR_BEHIND, HeldRecords
from ackcore.kafka.origins import Origin
from ackcore.kafka.truncations import truncated_at
from ackcore.offsets import decode_metadata
from ackcore.retry import capped_doubling

_log = logging.getLogger(__name__)

#: Most records that are read at once, so that an answer waits for milliseconds only.
_BATCH = 500
#: How long one look lasts: at the broker, and at the answers where a partition is paused.
_LOOK_S, SHORT_LOOK_S = 0.1, 0.01
#: How long a partition is left alone that is in range, and was refused as out of it.
_FIRST_RESET_MS, _LONGEST_RESET_MS = 20, 5_000

#: How often it is said that waiting records stop intake.
_SAY_MS = 60_000

#: To librdkafka an offset is of no leader's epoch.
_NO_EPOCH = -1
#: How long leaders may take to say whether a log is what it was.
_ASK_S = 10.0

#: What the client cannot read: it says so once, and goes on behind it.
_UNREADABLE = frozenset(
    {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION, KafkaError._NOT_IMPLEMENTED}
)
#: Nothing gets better by itself.
_FINAL = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._AUTHENTICATION,
    )
)


def now_ms() -> int:
    """A clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


class PartitionReading:
    """Reads partitions into `HeldRecords`; all of it is called by the client's thread.

    Parameters
    ----------
    client : Consumer
    settings : ConsumerSettings
    held : HeldRecords
        Touched under ``changed`` only.
    changed : threading.Condition
    topic_ids : callable
        Given topics, asks for their ids, and waits for the answer.
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
        #: One above the last offset of a partition, as it was last told.
        self.ends: dict[Key, int] = {}
        #: Whether there was an error that may be of a topic which is gone.
        self.had_error = False
        self._incremental = settings.protocol != "eager" and not settings.by_hand
        self._paused = 0
        self._say_ms = 0
        self._begun: dict[Key, Begun] = {}
        self._assigned_now: set[Key] = set()
        self._unpositioned: set[Key] = set()  # whose position may be of the assignment before
        # Partitions that were refused as out of range: how often in a row, when they are read
        # again, and those whose log is another one, and from where it is read.
        self._resets: dict[Key, int] = {}
        self._read_again: dict[Key, int] = {}
        self._other_logs: dict[Key, int] = {}
        #: Of the leader that wrote the last record that was read.
        self._epochs: dict[Key, int] = {}

    # Partitions.

    def begin(self, begun: Iterable[Begun]) -> None:
        """Take in partitions where they begin; they are to be assigned at their positions."""
        with self._changed:
            generation = self._next_generation()
            for each in begun:
                self._begun[each.key] = each
                self._assigned_now.add(each.key)
                # Who committed may have a clock that is ahead.
                number = max(generation, (each.restored.generation or 0) + 1)
                self._held.assign(
                    *each.key,
                    number,
                    each.restored.state,
                    committed=each.committed,
                    deployment=each.origin.deployment,
                )
                if each.origin != Origin.read(each.restored.deployment):
                    self._held.is_of(each.key, each.origin.deployment)
                if each.near is not None:
                    keep = self._settings.dead_letters is not None
                    self._held.lose(each.key, each.near, now_ms(), keep, TOO_FAR_BEHIND)

    def positions(self, keys: Iterable[Key]) -> list[TopicPartition]:
        """Return partitions that are held, to be assigned where they are read next."""
        with self._changed:
            found = [(key, self._held.position(key)) for key in keys]
        self._unpositioned.update(key for key, _ in found)
        return [self._at(key, offset) for key, offset in found if offset is not None]

    def _at(self, key: Key, offset: int) -> TopicPartition:
        """Return the position to seek, with the epoch that makes brokers refuse another log."""
        return TopicPartition(*key, offset, leader_epoch=self._epochs.get(key, _NO_EPOCH))

    def forget(self, keys: Iterable[Key]) -> None:
        """Let partitions go."""
        with self._changed:
            for key in keys:
                self._held.forget(key)
                self._begun.pop(key, None)
                self.ends.pop(key, None)
                self._forget_place(key)
            self._changed.notify_all()

    def _forget_place(self, key: Key) -> None:
        for known in (self._resets, self._read_again, self._other_logs, self._epochs):
            known.pop(key, None)

    def _next_generation(self) -> int:
        # Of the clock: what is late may come from the process before this one.
        return max(self._held.generation + 1, time.time_ns() // 1_000_000)

    def learn_ids(self, ids: Mapping[str, str | None]) -> None:
        """Take in the ids that topics have now: where one is another, it was made anew.

        Raises
        ------
        OffsetsOutOfRange
            If that is not to be.
        """
        for key, begun in list(self._begun.items()):
            now = ids.get(key[0])
            if now is None or now == begun.topic_id:
                continue
            known = begun.origin._replace(topic=Origin.of(now, None).topic)
            self._begun[key] = begun._replace(topic_id=now, origin=known)
            if begun.topic_id is None and not begun.origin.is_other_topic(known):
                with self._changed:
                    self._held.is_of(key, known.deployment)
                continue
            what = f"{key[0]}-{key[1]}: the {MADE_ANEW}"
            if self._settings.on_out_of_range == "fail":
                raise OffsetsOutOfRange(
                    f"{what}; out_of_range='earliest' or 'latest' reads it from its beginning"
                )
            self._log.warning("%s, and it is read from 0", what)
            # What comes under offsets of before is left, to be read when those are done with.
            self._is_another_log(key, 0)
            self._client.pause([TopicPartition(*key)])

    def _is_another_log(self, key: Key, offset: int, epoch: int | None = None) -> None:
        """Have a partition read from an offset once all that was read of it is done.

        With an epoch, of whose leader all below is, it is refused if it is another log by then.
        """
        self._other_logs[key] = offset
        if epoch is None:
            self._epochs.pop(key, None)
        with self._changed:
            self._held.is_another_log(key, offset, self._begun[key].origin.deployment)

    # Reading.

    def pause_and_resume(self) -> None:
        """Have the client read of what there is room for."""
        with self._changed:
            pause, resume = self._held.pauses()
            self._paused = self._held.paused
            # Records in flight may have paused it, which have failed since and wait.
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
        """Have partitions that were resumed fetched now: librdkafka does it up to 1 s later.

        Its broker's thread sleeps, and of all calls on a partition only a seek wakes it.
        """
        with self._changed:
            found = {key: self._held.position(key) for key in keys}
        for key, offset in found.items():
            if offset is not None and key not in self._other_logs and key not in self._read_again:
                with suppress(KafkaException):  # one that is just being assigned, or in error
                    self._client.seek(self._at(key, offset))

    def read(self, *, busy: bool) -> None:
        """Read what there is, or wait for it; not for long if there is something else to do."""
        with self._changed:
            room = self._held.room()
        self._assigned_now.clear()
        wait_s = SHORT_LOOK_S if busy or self._paused else _LOOK_S
        # `consume` waits for all that it is asked for, or its time: one first, then the rest.
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
                # Behind a hole that is none, what comes would make it one that is done.
                read[_key(message)].append(message)
        for key, some in read.items():
            if key in self._assigned_now:
                # They may be of the assignment before, and are further on: gaps count as done.
                with self._changed:
                    position = self._held.position(key)
                if position is not None:
                    self._read_from({key: position})
            elif key not in self._other_logs:
                self._take_in(key, some)
        # Behind the records that came before them: a partition is read on from the last of those.
        for message, error in errors:
            self._read_error(message, error)

    def _take_in(self, key: Key, messages: list[Message]) -> None:
        records, sizes, unreadable = [], [], {}
        for message in messages:
            record, failure = record_of(key, message)
            if failure is not None:
                unreadable[record.offset] = failure
            records.append(record)
            sizes.append(len(message))
        self._unpositioned.discard(key)
        self._resets.pop(key, None)
        epoch = messages[-1].leader_epoch()
        if epoch is not None:
            self._epochs[key] = epoch
        with self._changed:
            self._held.read(key, records, sizes, now_ms(), unreadable)

    def _read_from(self, offsets: Mapping[Key, int]) -> None:
        """Read partitions from offsets: assigned anew, as one in error cannot be sought in."""
        self._unpositioned.update(offsets)
        begun = [self._at(key, offset) for key, offset in offsets.items()]
        if self._incremental:
            self._client.incremental_unassign(begun)
            self._client.incremental_assign(begun)
        else:
            with self._changed:
                others = [each for each in self._held.assigned if each not in offsets]
            self._client.assign([*begun, *self.positions(others)])

    def _read_error(self, message: Message, error: KafkaError) -> None:
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            return
        self.had_error = True
        if code == KafkaError._AUTO_OFFSET_RESET:
            self._out_of_range(_key(message))
        elif code in _UNREADABLE:
            key = _key(message)
            with self._changed:
                position = self._held.position(key)
            raise ConsumerError(
                f"{key[0]}-{key[1]} cannot be read from offset {position} on: {error.str()}; "
                "commit an offset behind what is damaged to go on there"
            )
        elif is_fatal(error) or code in _FINAL:
            raise ConsumerError(f"the consumer cannot go on: {error.str()}")
        else:
            self._log.warning("Kafka says: %s", error.str())

    def _out_of_range(self, key: Key) -> None:
        """Go on: the client reads nothing more of a partition after this error."""
        with self._changed:
            position = self._held.position(key)
        if position is None or key in self._other_logs:
            return  # of an assignment that is over, or will be
        low, self.ends[key] = watermarks(self._client, TopicPartition(*key))
        high = self.ends[key]
        policy = self._settings.on_out_of_range
        name = f"{key[0]}-{key[1]}"
        if low <= position <= high and not self._is_truncated(key, low, position):
            if position == low:  # whatever was below is gone: all that is there is read
                self._epochs.pop(key, None)
            self._resets[key] = times = self._resets.get(key, 0) + 1
            wait_ms = capped_doubling(_FIRST_RESET_MS, times, _LONGEST_RESET_MS)
            self._log.warning(
                "%s was refused as out of range, and has %d to %d: it is read again from %d in "
                "%d ms",
                *(name, low, high, position, wait_ms),
            )
            self._read_again[key] = now_ms() + wait_ms
            return
        if key in self._other_logs:
            return
        if position > high:
            self.learn_ids(self._topic_ids([key[0]]))
            if key in self._other_logs:
                return
        what = f"{name} is to be read from {position}, and there is {low} to {high}"
        if policy == "fail":
            if position > high:
                self._end_before_another_log(key, low, high)
            raise OffsetsOutOfRange(
                f"{what}; out_of_range='earliest' or 'latest' goes on there, and says in a dead "
                "letter what was lost"
            )
        target = low if policy == "earliest" else high
        if position > high:
            # Not the log that was read: it was made anew, or lost its end.
            self._log.warning("%s: it is another log, and read from %d", what, target)
            self._is_another_log(key, target)
            return
        with self._changed:
            keep = self._settings.dead_letters is not None
            lost = self._held.lose(key, target, now_ms(), keep)
        self._log.warning("%s: %d offsets are lost, it goes on at %d", what, lost, target)
        self._epochs.pop(key, None)
        self._read_from({key: target})

    def _is_truncated(self, key: Key, low: int, position: int) -> bool:
        """Whether the log of a partition is another one below a position; it is read anew then.

        Raises
        ------
        OffsetsOutOfRange
            If that is not to be.
        """
        epoch, name = self._epochs.get(key), f"{key[0]}-{key[1]}"
        if epoch is None:
            return False
        try:
            other = truncated_at(self._settings.client, key, low, position, epoch, _ASK_S)
        except ConnectionError as error:
            self._log.warning("%s", error)
            return False  # it is refused again
        if other is None:
            return False
        what = f"{name} was read up to {position}, and its log was truncated at {other}"
        self._is_another_log(key, other, epoch)
        if self._settings.on_out_of_range == "fail":
            raise OffsetsOutOfRange(
                f"{what}: the next start begins there at the latest, and out_of_range='earliest' "
                "or 'latest' goes on without one"
            )
        self._log.warning("%s: it is read from there", what)
        return True

    def _end_before_another_log(self, key: Key, low: int, high: int) -> None:
        """Commit what is done of a log that has become shorter below where it is another one.

        It may have become longer again when the next start looks.
        """
        epoch = self._epochs.get(key)
        if epoch is None or self._begun[key].topic_id is None:
            return  # where that is nobody knows, or whether it is a topic that was made anew
        with suppress(ConnectionError):
            other = truncated_at(self._settings.client, key, low, high, epoch, _ASK_S)
            self._is_another_log(key, high if other is None else other)

    def go_on(self) -> None:
        """Read on where a partition was sought in, was refused a while ago, or is another log."""
        with self._changed:
            sought = self._held.sought()
            for key in sought:
                self._held.is_of(key, self._begun[key].origin.deployment)
                self._forget_place(key)
        if sought:
            self._read_from(sought)
            self._client.resume([TopicPartition(*key) for key in sought])
        now = now_ms()
        for key in [key for key, due_ms in self._read_again.items() if due_ms <= now]:
            del self._read_again[key]
            with self._changed:
                position = self._held.position(key)
            if position is not None and key not in self._other_logs:
                self._read_from({key: position})
        for key, target in list(self._other_logs.items()):
            with self._changed:
                if not self._held.is_idle(key):
                    continue  # the log before has those no more, so they are done first
                state = decode_metadata(*key, target, None).state
                self._held.assign(
                    *key,
                    self._next_generation(),
                    state,
                    committed=False,
                    deployment=self._begun[key].origin.deployment,
                )
            del self._other_logs[key]
            self._read_from({key: target})
            self._client.resume([TopicPartition(*key)])

    def pass_markers(self) -> None:
        """Move past transaction markers in partitions where all records are done."""
        with self._changed:
            keys = self._held.assigned
            idle = [key for key in keys if self._held.is_idle(key) and key not in self._other_logs]
        if idle:
            for found in self._client.position([TopicPartition(*key) for key in idle]):
                key = (found.topic, found.partition)
                if found.offset < 0:  # none yet: what comes is of this assignment
                    self._unpositioned.discard(key)
                elif found.error is None and key not in self._unpositioned:
                    if found.leader_epoch is not None:  # of a marker, perhaps
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
