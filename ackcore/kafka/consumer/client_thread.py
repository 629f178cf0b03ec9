"""The only thread that uses a consumer's client: it reads, commits, and handles rebalances.

librdkafka's client is not safe across threads: a commit, or a request for the assignment, from
another thread hung during `consume`. Other threads use `HeldRecords`, under one lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack

from confluent_kafka import OFFSET_END, Consumer, TopicPartition

from ackcore._error_hints import counted
from ackcore.dead_limit import TooManyDead
from ackcore.dispatch.dispatcher import RecordDead
from ackcore.kafka.cluster import Partition
from ackcore.kafka.consumer.consumer_client import Commits, make_client, wait_until_known
from ackcore.kafka.consumer.consumer_letters import dead_letters_of
from ackcore.kafka.consumer.consumer_settings import OTHER_TOPIC, ConsumerSettings
from ackcore.kafka.consumer.consumer_starts import decide_starts
from ackcore.kafka.consumer.held_partition import DyingRecord, Key
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.kafka.consumer.partition_reading import SHORT_LOOK_S, PartitionReading, now_ms
from ackcore.kafka.consumer.topic_watch import TopicWatch, ids_of
from ackcore.kafka.kafka_errors import ConsumerError, redacted_error

_log = logging.getLogger(__name__)

#: The longest wait for the client to leave its group before it is closed, in seconds.
_LEAVE_S = 5.0
#: The time between commits of all partitions. Brokers forget an offset that a consumer without a
#: group's assignment has not committed for a week (`offsets.retention.minutes`), though it runs.
_REPEAT_MS = 3_600_000


class ClientThread(threading.Thread):
    """A thread that reads records into ``held`` and commits those that are done.

    ``changed``: the lock of ``held``, notified when a record may be taken, or was answered.
    ``consumer``: returns the consumer for the callbacks in ``settings``, or None once it was
    garbage-collected; see `abandon`. Raises ConsumerError if librdkafka refuses the settings, or
    ``oauth_cb`` gives no token.

    Attributes: ``error``: the first error, which ends the thread; None without one. ``ended``:
    whether it has ended.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        held: HeldRecords,
        changed: threading.Condition,
        consumer: Callable[[], object],
    ) -> None:
        super().__init__(name=f"ackcore-kafka-{settings.group_id}", daemon=True)
        self.settings = settings
        self._consumer = consumer
        self._log = settings.client.logger(_log)
        self.error: BaseException | None = None
        self.ended = False
        #: The refusal of the final commit, if records done before it stay uncommitted; else None.
        self.last_refusal: str | None = None
        self.drain_s = settings.drain_s
        self._held = held
        self._changed = changed
        self._stopping = self._closing = self._abandoned = False
        self._incremental = settings.protocol != "eager"
        self._commits = Commits(
            settings.group_id, held, changed, self._fatal, self._log, settings.is_manual
        )
        self._next_commit_ms = self._next_repeat_ms = 0
        self._asked = False  # whether a commit was requested before its time
        self._dead_letters = dead_letters_of(settings)
        with ExitStack() as opened:  # closes them if a later line raises
            if self._dead_letters is not None:
                opened.callback(self._dead_letters.close)
            self._client = make_client(settings, self._commits.answered)
            opened.callback(self._client.close)
            self._topics = TopicWatch(settings, now_ms())
            opened.pop_all()
        #: The ids that topics had when they were last read.
        self._seen: dict[str, str] = {}
        self._reading = PartitionReading(self._client, settings, held, changed, self._topics.ids)

    # From other threads.

    def stop(self) -> None:
        """Make the thread drain the records in flight, commit, and end. Does not wait for it."""
        self._stopping = True

    def abandon(self) -> None:
        """Stop without a drain: the consumer was garbage-collected, so no answers come."""
        self._abandoned = not self._stopping
        self.drain_s = 0.0
        self.stop()

    def commit_soon(self) -> None:
        """Make the thread commit once its commits under way are answered. Does not wait for it."""
        self._asked = True

    @property
    def refusal(self) -> str:
        """The error of the last refused commit; "" if none was refused."""
        return self.settings.client.redacted(self._commits.last_refusal)

    @property
    def ends(self) -> Mapping[Key, int]:
        """The last known end of partitions, the last offset plus 1; it lacks unknown ones."""
        return self._reading.ends

    # The thread.

    def run(self) -> None:
        """Read and commit until `stop` or an error; then drain, commit, and leave the group.

        After an error, the drain does not wait. Raises nothing: the first error is in ``error``.
        """
        try:
            self._subscribe()
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._set_error(error)
            self.drain_s = 0.0
        try:
            self._end()
        except BaseException as error:
            self._set_error(error)
        finally:
            with self._changed:
                self._held.forget(self._held.assigned)
                self.ended = True
                self._changed.notify_all()

    def _subscribe(self) -> None:
        if not self.settings.is_manual:
            self._client.subscribe(
                list(self.settings.topics),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
        elif self.settings.tasks is None:
            self._assign_manually(self.settings.partitions)
        else:
            found = self._topics.subscribed()
            tasks = self.settings.tasks
            if tasks > len(found):
                self._log.warning(
                    "%d tasks share %s: some tasks have none",
                    tasks,
                    counted(len(found), "partition"),
                )
            self._assign_manually(self._task_partitions(found))

    def _end(self) -> None:
        keys = self._held.assigned
        if self._abandoned:
            self._log.warning(
                "a Consumer of group %r was not closed, and nothing refers to it any more, so it "
                "leaves the group now; call close(), or use it in a with block",
                self.settings.group_id,
            )
        try:
            self._drain(keys)
            self._commits.send_last(self._client, keys)
            with self._changed:
                if self._held.has_uncommitted():
                    self.last_refusal = self.refusal
                self._held.forget(keys)
        finally:
            self._closing = True
            try:
                self._leave()
            finally:
                try:
                    self._client.close()
                finally:
                    self._topics.close()
                    if self._dead_letters is not None:
                        self._dead_letters.close()

    def _leave(self) -> None:
        """Leave the group before the client closes.

        A client that closes does not always answer a rebalance that began before. confluent-kafka
        then waits for ever and holds the GIL, which stops the whole process. Nor does a cooperative
        member without partitions leave: the next rebalance would wait until its session times out.
        A member with a ``group.instance.id`` stays: it keeps its place until its session times out.
        Waits up to 5 s. With ``partitions`` or ``tasks`` the client is no member.
        """
        if self.settings.is_manual or "group.instance.id" in self.settings.client.options:
            return
        self._client.unsubscribe()
        until = time.monotonic() + _LEAVE_S
        while time.monotonic() < until:
            if self._client.poll(SHORT_LOOK_S) is None and not self._is_member():
                return

    def _is_member(self) -> bool:
        """Return whether the client has partitions, or has not sent its leave request yet."""
        if self._client.assignment():
            return True
        # With KIP-848 a client keeps its id.
        return self.settings.protocol != "consumer" and self._client.memberid() is not None

    def _turn(self) -> None:
        self._handle_topic_changes()
        self._reading.apply_positions()
        self._reading.pause_and_resume()
        self._handle_failures()
        now = now_ms()
        is_due = self._asked or now >= self._next_commit_ms
        if is_due and not self._commits.under_way:
            self._asked = False
            self._next_commit_ms = now + round(self.settings.commit_interval_s * 1000)
            if now >= self._next_repeat_ms:
                self._next_repeat_ms = now + _REPEAT_MS
                with self._changed:
                    self._held.repeat_commits()
            self._reading.skip_markers()
            self._commits.send(self._client)
        busy = self._dead_letters is not None and self._dead_letters.under_way > 0
        self._reading.read(busy=busy)

    def _handle_failures(self) -> None:
        """Fail the records that timed out, and begin to store the dead letters of dead ones.

        Records whose dead letters are stored by now are done. Raises TooManyDead if too many
        records are dead, RecordDead if one is and ``dead_letters`` is None, and ConsumerError if a
        record has died more than 20 times.
        """
        now = now_ms()
        with self._changed:
            self._held.expire(now)
            letters = self._held.take_dying()
            excess = self._held.dead_limit.excess
        if excess is not None:
            self._store_last_letters(letters)
            reasons = "the dead letters have the reasons"
            if self._dead_letters is None:
                reasons = "set dead_letters to a topic or a callable, which gets the reasons"
            raise TooManyDead(
                f"{excess.message}. Dead records without a stored dead letter were not committed, "
                f"and are read again at the next start. Remove the cause: {reasons}",
                limit=excess.limit,
            )
        if self._dead_letters is None:
            if letters:
                record, failure, failures = letters[0]
                raise RecordDead(
                    f"{record.topic}-{record.partition}@{record.offset} failed "
                    f"{counted(failures, 'time')}, the last time with {failure.kind}: "
                    f"{failure.message}; set dead_letters to a topic or a callable that stores "
                    "such records"
                )
            return
        self._dead_letters.put(letters, now)
        kept = self._dead_letters.poll(now, self._held.is_dying)
        if kept:
            with self._changed:
                for letter in kept:
                    self._held.letter_stored(letter)

    def _store_last_letters(self, letters: list[DyingRecord]) -> None:
        """Store the last dead letters before the consumer ends with `TooManyDead`.

        Otherwise each new start would read the same records and end again. Waits up to ``drain_s``;
        if that is 0, or without ``dead_letters``, does nothing.
        """
        if self._dead_letters is None or not self.drain_s:
            return  # without a wait, the letter would be stored and its record read again
        until = time.monotonic() + self.drain_s
        self._dead_letters.put(letters, now_ms())
        while True:
            kept = self._dead_letters.poll(now_ms(), self._held.is_dying)
            with self._changed:
                for letter in kept:
                    self._held.letter_stored(letter)
                if not self._dead_letters.under_way or time.monotonic() >= until:
                    return
                self._changed.wait(SHORT_LOOK_S)

    # Assignments.

    def _begin(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Add partitions, call ``on_assign``, and return them with the offsets to read from.

        Raises ConsumerError if one is of the dead-letter topic, or brokers do not answer. Raises
        the OffsetsOutOfRange of `decide_starts`, and an exception of ``on_assign``.
        """
        dead = self.settings.dead_letters
        if any(each.topic == dead for each in partitions):
            raise ConsumerError(
                f"dead_letters must not be a topic that the consumer reads, and {dead!r} matches "
                f"one of {', '.join(map(repr, self.settings.topics))}. {OTHER_TOPIC}"
            )
        ids = self._topics.ids({each.topic for each in partitions})
        is_new = self._topics.is_new
        begun = decide_starts(self._client, self.settings, partitions, ids, self._seen, is_new)
        self._seen.update({topic: found for topic, found in ids.items() if found is not None})
        self._reading.begin(begun)
        self._next_commit_ms = 0  # commit new start positions at once
        keys = [each.key for each in begun]
        consumer = self._consumer()
        if self.settings.on_assign is not None and keys and consumer is not None:
            self.settings.on_assign(consumer, list(keys))
        return self._reading.positions(keys)

    def _handle_topic_changes(self) -> None:
        """Detect topics that were created again and, with ``tasks``, assign new partitions."""
        if self._reading.had_error:
            self._topics.hurry(now_ms())
            self._reading.had_error = False
        with self._changed:
            topics = {topic for topic, _ in self._held.assigned}
        found = self._topics.poll(topics, now_ms())
        if found is None:
            return
        if self.settings.tasks is not None:
            self._assign_manually(self._task_partitions(found))
        ids = ids_of(found)
        self._reading.update_topic_ids(ids)
        self._seen.update({topic: one for topic, one in ids.items() if one is not None})

    def _task_partitions(self, partitions: list[Partition]) -> list[Key]:
        """Return every ``tasks``-th partition of the sorted list, from number ``task`` on."""
        mine = sorted(partitions)[self.settings.task :: self.settings.tasks]
        return [(one.topic, one.partition) for one in mine]

    def _assign_manually(self, wanted: Iterable[Key]) -> None:
        """Read exactly these partitions: begin new ones; drain, commit and drop all others."""
        wanted = dict.fromkeys(wanted)  # in their order
        with self._changed:
            held = dict.fromkeys(self._held.assigned)
        gone = [key for key in held if key not in wanted]
        new = [TopicPartition(*key) for key in wanted if key not in held]
        if held and not gone and not new:
            return
        if gone:
            self._release(gone)
        if new:
            keys = [(each.topic, each.partition) for each in new]
            if not wait_until_known(self._client, keys, lambda: self._stopping):
                return
            self._begin(new)
        self._client.assign(self._reading.positions(wanted))
        if new:  # a pause outlasts the assignment in which it was made
            self._client.resume(new)

    def _on_assign(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        # If this ends without offsets, confluent-kafka assigns the partitions, and librdkafka asks
        # for the committed offsets: version 2.16 ends the process if that fails (issue 4789).
        begun = [TopicPartition(each.topic, each.partition, OFFSET_END) for each in partitions]
        try:
            if not self._closing:  # a closing client reads nothing more
                begun = self._begin(partitions)
        finally:
            if self._incremental:
                client.incremental_assign(begun)
            else:
                client.assign(begun)
        client.resume(begun)  # as above

    def _on_revoke(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self._release([(found.topic, found.partition) for found in partitions])

    def _release(self, keys: list[Key]) -> None:
        self._drain(keys)
        self._commits.send_last(self._client, keys)
        self._reading.forget(keys)

    def _on_lost(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        keys = [(found.topic, found.partition) for found in partitions]
        self._log.warning(
            "%s to other members: records done since the last commit are not "
            "committed, and are delivered again",
            counted(len(keys), "partition now belongs", "partitions now belong"),
        )
        with self._changed:
            self._held.close(keys)
            self._held.seal(keys)
        self._call_on_revoke(keys)
        self._reading.forget(keys)

    def _call_on_revoke(self, keys: list[Key]) -> None:
        with self._changed:
            held = set(self._held.assigned)
        keys = [key for key in keys if key in held]  # a closing client revokes them again
        consumer = self._consumer()
        if self.settings.on_revoke is None or not keys or consumer is None:
            return
        try:
            self.settings.on_revoke(consumer, keys)
        except BaseException as error:  # done records are committed nevertheless
            self._set_error(error)
            self._stopping = True

    def _drain(self, keys: list[Key]) -> None:
        """Stop delivering records of partitions, call ``on_revoke``, and wait for open answers.

        Waits up to ``drain_s``, and meanwhile stores dead letters. An error in that, or of
        ``on_revoke``, is not raised: it ends the consumer.
        """
        with self._changed:
            self._held.close(keys)
        self._call_on_revoke(keys)
        started = time.monotonic()
        while True:
            with self._changed:
                left = self._held.unanswered(keys)
            if not left:
                return
            if time.monotonic() - started >= self.drain_s:  # `close` may have shortened it
                self._log.warning(
                    "%s not done in %g s: the next owner of their partitions reads them again",
                    counted(left, "record was", "records were"),
                    self.drain_s,
                )
                return
            try:
                self._handle_failures()
            except Exception as error:  # done records are committed nevertheless
                self._set_error(error)
                self._stopping = True
                return
            with self._changed:
                if self._held.unanswered(keys):
                    self._changed.wait(SHORT_LOOK_S)

    # Errors.

    def _set_error(self, error: BaseException) -> None:
        """Store the error that ends the consumer, without secrets. Later errors are ignored."""
        self.error = self.error or redacted_error(error, self.settings.client)

    def _fatal(self, error: ConsumerError) -> None:
        self._set_error(error)
        self.drain_s = 0.0  # later answers cannot be committed
        self._stopping = True
