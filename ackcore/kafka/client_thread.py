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
    KafkaException,
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
from ackcore.kafka.consumer_settings import ConsumerSettings
from ackcore.kafka.held_partition import Key, PartitionCommit
from ackcore.kafka.held_records import HeldRecords
from ackcore.offsets import decode_metadata

_log = logging.getLogger(__name__)

#: Most records that are read at once, so that an answer waits for milliseconds only.
_BATCH = 500
#: How long one look lasts: at the broker, and at the answers where a partition is paused.
_LOOK_S, _SHORT_LOOK_S = 0.1, 0.01
#: How long a member (KIP-848) waits to be told its epoch before its last commit is given up.
_STALE_S = 2.0

#: The group took this member for dead, or has given its partitions to others.
_FENCED = frozenset((KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION))
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
        self._committing: dict[Key, PartitionCommit] | None = None
        self._next_commit_ms = 0
        self._paused = 0
        self._assigned_now: set[Key] = set()
        self._unpositioned: set[Key] = set()  # whose position may be of the assignment before
        self._dead_letters = dead_letters_of(settings)
        self._client = make_client(settings, self._on_commit)
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
            self._commit_now(keys)
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
        for message in messages:
            if (error := message.error()) is not None:
                self._read_error(message, error)
                continue
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

    def _take_in(self, key: Key, messages: list[Message]) -> None:
        records, sizes = [], []
        for message in messages:
            records.append(record_of(key, message))
            sizes.append(len(message))
        self._unpositioned.discard(key)
        with self._changed:
            self._held.read(key, records, sizes, now_ms())

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
            self._out_of_range(_key(message), message.offset())
        elif error.fatal() or code in _FINAL:
            raise ConsumerError(f"the consumer cannot go on: {error.str()}")
        elif code != KafkaError._PARTITION_EOF:
            _log.warning("Kafka says: %s", error.str())

    def _out_of_range(self, key: Key, asked: int | None) -> None:
        with self._changed:
            position = self._held.position(key)
        if position is None or position != asked:
            return  # of an assignment that is over
        low, high = self._watermarks(key)
        policy = self.settings.on_out_of_range
        name = f"{key[0]}-{key[1]}"
        if low <= position <= high:
            self._read_from(key, position)
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
            state = decode_metadata(*key, target, None).state
            with self._changed:
                self._held.assign(*key, self._next_generation(), state, committed=False)
        else:
            with self._changed:
                lost = self._held.lose(key, target, now_ms(), self._dead_letters is not None)
            _log.warning("%s: %d offsets are lost, it goes on at %d", what, lost, target)
        self._read_from(key, target)

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
        self._commit_now(keys)
        self._forget(keys)

    def _on_lost(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(found.topic, found.partition) for found in partitions]
        _log.warning("%d partitions went to other members: nothing of them is committed", len(keys))
        self._forget(keys)

    def _forget(self, keys: Iterable[Key]) -> None:
        with self._changed:
            for key in keys:
                self._held.forget(key)
                self.ends.pop(key, None)
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
            except RecordDead as error:
                self.error = self.error or error
                self._stopping = True
                return
            with self._changed:
                if self._held.unanswered(keys):
                    self._changed.wait(_SHORT_LOOK_S)

    # Commits.

    def _commit(self) -> None:
        """Send what has changed, unless the commit before is not answered yet."""
        if self._committing is not None:
            return
        self._pass_markers()
        commits = self._to_commit(None)
        if not commits:
            return
        self._committing = {(one.topic, one.partition): one for one in commits}
        try:
            self._client.commit(offsets=_offsets(commits), asynchronous=True)
        except KafkaException as error:
            self._committing = None
            self._rejected(error.args[0], len(commits))

    def _to_commit(self, keys: Iterable[Key] | None) -> list[PartitionCommit]:
        with self._changed:
            return self._held.commits(keys)

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

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        sent, self._committing = self._committing or {}, None
        self._committed_or_not(error, partitions, sent)

    def _committed_or_not(
        self,
        error: KafkaError | None,
        partitions: list[TopicPartition],
        sent: dict[Key, PartitionCommit],
    ) -> None:
        for found in partitions:
            one = sent.get((found.topic, found.partition))
            if one is None or one.commit.offset != found.offset:
                continue  # of an assignment that is over
            if (refused := error or found.error) is not None:
                self._rejected(refused, 1)
                continue
            with self._changed:
                self._held.committed(one)

    def _rejected(self, error: KafkaError, n: int) -> None:
        """A commit was not taken; what it said is said again with the next."""
        with self._changed:
            self._held.counts.rejected += n
            if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
                self._held.shorten_metadata()
        if error.fatal():
            self.error = self.error or ConsumerError(f"the consumer cannot commit: {error.str()}")
            self._stopping = True
        what = "fenced" if error.code() in _FENCED else "refused"
        _log.warning("a commit of %d partitions was %s: %s", n, what, error.str())

    def _commit_now(self, keys: list[Key]) -> None:
        """Commit before partitions go, and wait for the answer."""
        until = time.monotonic() + _STALE_S
        while commits := self._to_commit(keys):
            sent = {(one.topic, one.partition): one for one in commits}
            try:
                answer = self._client.commit(offsets=_offsets(commits), asynchronous=False)
            except KafkaException as raised:
                error = raised.args[0]
                if error.code() == KafkaError.STALE_MEMBER_EPOCH and time.monotonic() < until:
                    time.sleep(_SHORT_LOOK_S)  # a heartbeat brings the new one
                    continue
                self._rejected(error, len(commits))
                if error.code() != KafkaError.OFFSET_METADATA_TOO_LARGE:
                    return
            else:
                self._committed_or_not(None, answer or [], sent)
                return


def _key(message: Message) -> Key:
    topic, partition = message.topic(), message.partition()
    assert topic is not None
    assert partition is not None
    return topic, partition


def _offsets(commits: list[PartitionCommit]) -> list[TopicPartition]:
    return [
        TopicPartition(one.topic, one.partition, one.commit.offset, metadata=one.commit.metadata)
        for one in commits
    ]
