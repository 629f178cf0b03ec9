"""The thread that a consumer's client belongs to: it reads, commits, and answers rebalances.

librdkafka's client is for one thread: a commit or a look at the assignment from another one, while
this is in `consume`, was seen to hang.  All others meet it in `HeldRecords`, under one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable

from confluent_kafka import (
    Consumer,
    KafkaError,
    Message,
    TopicPartition,
)

from ackcore.dispatch.dispatcher import RecordDead
from ackcore.kafka.client import (
    ConsumerError,
    OffsetsOutOfRange,
    begin,
    dead_letters_of,
    make_client,
    record_of,
    watermarks,
)
from ackcore.kafka.commits import Commits
from ackcore.kafka.consumer_settings import ConsumerSettings
from ackcore.kafka.held_partition import Key
from ackcore.kafka.held_records import HeldRecords
from ackcore.offsets import decode_metadata
from ackcore.retry import capped_doubling

_log = logging.getLogger(__name__)

#: Most records that are read at once, so that an answer waits for milliseconds only.
_BATCH = 500
#: How long one look lasts: at the broker, and at the answers where a partition is paused.
_LOOK_S, _SHORT_LOOK_S = 0.1, 0.01
#: How long a partition is left alone that is in range, and was refused as out of it.
_FIRST_RESET_MS, _LONGEST_RESET_MS = 20, 5_000

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


class ClientThread:
    """Reads into `HeldRecords`, and commits what is done of them.

    Parameters
    ----------
    settings : ConsumerSettings
    held : HeldRecords
        Touched under ``changed`` only.
    changed : threading.Condition
        Told whenever something may be taken, or was answered.
    """

    def __init__(
        self, settings: ConsumerSettings, held: HeldRecords, changed: threading.Condition
    ) -> None:
        self.settings = settings
        self.error: BaseException | None = None
        self.ended = False
        self.drain_s = settings.drain_s
        self.ends: dict[Key, int] = {}  # one above the last offset, as it was last told
        self._held = held
        self._changed = changed
        self._stopping = self._closing = False
        self._incremental = settings.protocol != "eager"
        self._generation = 0
        self._commits = Commits(settings.group_id, held, changed, self._fatal)
        self._next_commit_ms = 0
        self._paused = 0
        self._assigned_now: set[Key] = set()
        self._unpositioned: set[Key] = set()  # whose position may be of the assignment before
        # Partitions that were refused as out of range: how often in a row, when they are read
        # again, and those whose log is another one, and from where it is read.
        self._resets: dict[Key, int] = {}
        self._read_again: dict[Key, int] = {}
        self._other_logs: dict[Key, int] = {}
        self._dead_letters = dead_letters_of(settings)
        self._client = make_client(settings, self._commits.answered)
        name = f"ackcore-kafka-{settings.group_id}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # From other threads.

    def stop(self) -> None:
        """Read nothing more, have what is out answered, commit, and end; does not wait for it."""
        self._stopping = True

    def join(self, timeout_s: float) -> None:
        """Wait for it to have ended."""
        self._thread.join(timeout_s)

    # The thread.

    def _run(self) -> None:
        try:
            self._subscribe()
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self.error = error
            self.drain_s = 0.0
        try:
            self._end()
        except BaseException as error:
            self.error = self.error or error
        finally:
            with self._changed:
                for key in self._held.assigned:
                    self._held.forget(key)
                self.ended = True
                self._changed.notify_all()

    def _subscribe(self) -> None:
        if self.settings.topics:
            self._client.subscribe(
                list(self.settings.topics),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
        else:
            some = [TopicPartition(*key) for key in self.settings.partitions]
            self._client.assign(self._begin(some))

    def _end(self) -> None:
        try:
            keys = self._held.assigned
            self._drain(keys)
            self._commits.send_last(self._client, keys)
            with self._changed:
                for key in keys:
                    self._held.forget(key)
        finally:
            self._closing = True
            try:
                self._client.close()
            finally:
                if self._dead_letters is not None:
                    self._dead_letters.close()

    def _turn(self) -> None:
        self._go_on()
        self._pause_and_resume()
        self._see_to_records()
        if now_ms() >= self._next_commit_ms:
            self._next_commit_ms = now_ms() + round(self.settings.commit_interval_s * 1000)
            self._commit()
        self._read()

    def _see_to_records(self) -> None:
        """What timed out, and what is dead."""
        now = now_ms()
        with self._changed:
            self._held.expire(now)
            letters = self._held.dying()
        if self._dead_letters is None:
            if letters:
                record, failure, failures = letters[0]
                raise RecordDead(
                    f"{record.topic}-{record.partition}@{record.offset} failed {failures} times, "
                    f"at last of {failure.kind}: {failure.message}; give dead_letters= a topic or "
                    "a callable that keeps such records"
                )
            return
        self._dead_letters.put(letters, now)
        kept = self._dead_letters.turn(now, self._held.is_dying)
        if kept:
            with self._changed:
                for letter in kept:
                    self._held.dead(letter)

    # Reading.

    def _pause_and_resume(self) -> None:
        with self._changed:
            pause, resume = self._held.pauses()
            self._paused = self._held.paused
        if pause:
            self._client.pause([TopicPartition(*key) for key in pause])
        if resume:
            self._client.resume([TopicPartition(*key) for key in resume])

    def _read(self) -> None:
        with self._changed:
            room = self._held.room()
            keys = self._held.assigned
            busy = self._dead_letters is not None and self._dead_letters.under_way > 0
            if keys and not room:
                # Nothing can come: what makes room is an answer.
                self._changed.wait(_SHORT_LOOK_S)
        self._assigned_now.clear()
        wait_s = _SHORT_LOOK_S if busy or self._paused else _LOOK_S
        if keys and not room:
            wait_s = 0.0
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
                    self._read_from(key, position)
            else:
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
        with self._changed:
            self._held.read(key, records, sizes, now_ms(), unreadable)

    def _read_from(self, key: Key, offset: int) -> None:
        """Read a partition from an offset: assigned anew, as one in error cannot be sought in."""
        self._unpositioned.add(key)
        begun = TopicPartition(*key, offset)
        if self._incremental and self.settings.topics:
            self._client.incremental_unassign([begun])
            self._client.incremental_assign([begun])
        else:
            with self._changed:
                positions = [(each, self._held.position(each)) for each in self._held.assigned]
            self._unpositioned.update(each for each, _ in positions)
            self._client.assign(
                [
                    TopicPartition(*each, offset if each == key or at is None else at)
                    for each, at in positions
                ]
            )

    def _read_error(self, message: Message, error: KafkaError) -> None:
        code = error.code()
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
        elif error.fatal() or code in _FINAL:
            raise ConsumerError(f"the consumer cannot go on: {error.str()}")
        elif code != KafkaError._PARTITION_EOF:
            _log.warning("Kafka says: %s", error.str())

    def _out_of_range(self, key: Key) -> None:
        """Go on: the client reads nothing more of a partition after this error."""
        with self._changed:
            position = self._held.position(key)
        if position is None:
            return  # of an assignment that is over
        low, high = self._watermarks(key)
        policy = self.settings.on_out_of_range
        name = f"{key[0]}-{key[1]}"
        if low <= position <= high:
            self._resets[key] = times = self._resets.get(key, 0) + 1
            wait_ms = capped_doubling(_FIRST_RESET_MS, times, _LONGEST_RESET_MS)
            _log.warning(
                "%s was refused as out of range, and has %d to %d: it is read again from %d in "
                "%d ms",
                *(name, low, high, position, wait_ms),
            )
            self._read_again[key] = now_ms() + wait_ms
            return
        what = f"{name} is to be read from {position}, and there is {low} to {high}"
        if policy == "fail":
            raise OffsetsOutOfRange(
                f"{what}; out_of_range='earliest' or 'latest' goes on there, and says in a dead "
                "letter what was lost"
            )
        target = low if policy == "earliest" else high
        if position > high:
            # Not the log that was read: it was made anew, or lost its end.
            _log.warning("%s: it is another log, and read from %d", what, target)
            self._other_logs[key] = target
            return
        with self._changed:
            lost = self._held.lose(key, target, now_ms(), self._dead_letters is not None)
        _log.warning("%s: %d offsets are lost, it goes on at %d", what, lost, target)
        self._read_from(key, target)

    def _go_on(self) -> None:
        """Read on where a partition was refused a while ago, or is another log."""
        now = now_ms()
        for key in [key for key, due_ms in self._read_again.items() if due_ms <= now]:
            del self._read_again[key]
            with self._changed:
                position = self._held.position(key)
            if position is not None:
                self._read_from(key, position)
        for key, target in list(self._other_logs.items()):
            with self._changed:
                if not self._held.is_idle(key):
                    continue  # the log before has those no more, so they are done first
                state = decode_metadata(*key, target, None).state
                self._held.assign(*key, self._next_generation(), state, committed=False)
            del self._other_logs[key]
            self._read_from(key, target)
            self._client.resume([TopicPartition(*key)])

    def _watermarks(self, key: Key) -> tuple[int, int]:
        low, self.ends[key] = watermarks(self._client, TopicPartition(*key))
        return low, self.ends[key]

    # Assignments.

    def _next_generation(self) -> int:
        # Of the clock: what is late may come from the process before this one.
        self._generation = max(self._generation + 1, time.time_ns() // 1_000_000)
        return self._generation

    def _begin(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Take in partitions where they were committed; they with the offsets to read from."""
        generation = self._next_generation()
        begun = begin(self._client, self.settings, partitions)
        with self._changed:
            for each in begun:
                self._assigned_now.add(each.key)
                self._unpositioned.add(each.key)
                self._held.assign(
                    *each.key,
                    max(generation, (each.restored.generation or 0) + 1),
                    each.restored.state,
                    committed=each.committed,
                )
        self._next_commit_ms = 0  # where they begin, if it is not committed
        return [TopicPartition(*each.key, each.restored.state.committable) for each in begun]

    def _on_assign(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        if self._closing:
            return  # nothing is asked of a client that ends, nor read by it
        begun = self._begin(partitions)
        if self._incremental:
            client.incremental_assign(begun)
        else:
            client.assign(begun)
        client.resume(begun)  # a pause outlasts the assignment that it was made in

    def _on_revoke(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(found.topic, found.partition) for found in partitions]
        self._drain(keys)
        self._commits.send_last(self._client, keys)
        self._forget(keys)

    def _on_lost(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(found.topic, found.partition) for found in partitions]
        _log.warning("%d partitions went to other members: nothing of them is committed", len(keys))
        self._forget(keys)

    def _forget(self, keys: Iterable[Key]) -> None:
        with self._changed:
            for key in keys:
                self._held.forget(key)
                for known in (self.ends, self._resets, self._read_again, self._other_logs):
                    known.pop(key, None)
            self._changed.notify_all()

    def _drain(self, keys: list[Key]) -> None:
        """Give nothing more of partitions to anyone, and wait for what is out, but not for long."""
        started = time.monotonic()
        with self._changed:
            self._held.close(keys)
        while True:
            with self._changed:
                left = self._held.unanswered(keys)
            if not left:
                return
            if time.monotonic() - started >= self.drain_s:  # which `close` may have made shorter
                _log.warning(
                    "%d records were not answered in %g s: they are read again by "
                    "whoever has their partitions next",
                    left,
                    self.drain_s,
                )
                return
            try:
                self._see_to_records()
            except Exception as error:  # what is done is committed all the same
                self.error = self.error or error
                self._stopping = True
                return
            with self._changed:
                if self._held.unanswered(keys):
                    self._changed.wait(_SHORT_LOOK_S)

    # Commits.

    def _commit(self) -> None:
        """Send what has changed, unless the commits before are not answered yet."""
        if not self._commits.under_way:
            self._pass_markers()
            self._commits.send(self._client)

    def _fatal(self, error: ConsumerError) -> None:
        self.error = self.error or error
        self._stopping = True

    def _pass_markers(self) -> None:
        """Where all is done, what the client has passed is, too: transactions' markers."""
        with self._changed:
            keys = self._held.assigned
            idle = [key for key in keys if self._held.is_idle(key)]
        if idle:
            for found in self._client.position([TopicPartition(*key) for key in idle]):
                key = (found.topic, found.partition)
                if found.offset < 0:  # none yet: what comes is of this assignment
                    self._unpositioned.discard(key)
                elif found.error is None and key not in self._unpositioned:
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
