"""`Consumer`: a member of a consumer group whose records are acked or failed one by one."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Self

from ackcore._columns import as_count, positive
from ackcore._error_hints import naming_arguments
from ackcore.calls import Reject, Retry, Unavailable
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.consumer.client_thread import ClientThread
from ackcore.kafka.consumer.consumer_records import (
    ConsumerCounts,
    Failure,
    KafkaRecord,
    PartitionStats,
)
from ackcore.kafka.consumer.consumer_settings import (
    ConsumerSettings,
    KeepDead,
    OrderedBy,
    OutOfRange,
    Protocol,
    Rebalanced,
    as_partitions,
    as_topics,
)
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.kafka.consumer.partition_reading import now_ms
from ackcore.kafka.kafka_errors import ConsumerError
from ackcore.kafka.start_positions import Start

#: The longest waits for a record, in seconds: of a thread, and in a thread for an event loop.
_LONGEST_WAIT_S, _SHORT_WAIT_S = 60.0, 0.2
#: Seconds that closing may take after the drain: less than the 30 of a pod that is ended.
_CLOSE_S = 25.0


class ConsumerStats(NamedTuple):
    """A snapshot of a consumer's counts and partitions.

    ``oldest_s``: seconds since the first record that is not done was read, the longest time of any
    partition; 0 without one. ``lag``: offsets between the committed ones and the ends of the
    partitions, summed over those where both are known; 0 if they are for none.
    """

    partitions: list[PartitionStats]
    counts: ConsumerCounts
    oldest_s: float
    lag: int


#: The arguments of a `Consumer` that are settings of the same name and value.
_SETTINGS = ConsumerSettings.__dataclass_fields__.keys() - {"topics", "partitions"}


class Consumer:
    """A member of a consumer group that commits exactly the records that are done.

    `poll` delivers records. You ack or fail each, in any order and from any thread. A failed record
    is delivered again after a back-off, in turn with new records. After ``max_attempts`` failures
    it becomes a dead letter. A record is done once it is acked or stored as a dead letter. The
    committed offset is that of the first record that is not done. The commit's metadata name the
    done records above it, so that a restart or a rebalance does not deliver them again.

    A thread of the consumer reads, commits every ``commit_interval_s``, and handles rebalances. If
    a partition is taken away, it waits up to ``drain_s`` for answers to the delivered records, and
    commits. Later answers change nothing: the next owner of the partition processes those records
    again.

    Parameters
    ----------
    topics : str or sequence of str, optional
        The topics to subscribe to. A name that begins with ``^`` is a regular expression, which
        does not match Kafka's own topics, such as ``__consumer_offsets``. It may match any part of
        a topic's name; with ``protocol="consumer"`` it must match the whole name.
    bootstrap_servers : str
        The brokers, as ``host:port,host:port``.
    group_id : str
        The consumer group whose offsets are committed. While it has members that subscribe to
        topics, brokers refuse commits of a consumer with ``partitions`` or ``tasks``.
    partitions : sequence of (str, int), optional
        Pairs of topic and partition to read, instead of ``topics``. The group assigns nothing.
    tasks, task : int, optional
        Consumer ``task`` of ``tasks``, from 0 on, reads the partitions task, task + tasks, ... of
        the ordered list of partitions of ``topics``. The group assigns nothing. Run each task
        once. If the list grows, a partition may move to another task: records of it that are in
        flight are then processed twice.
    protocol : {"cooperative", "eager", "consumer"}, default "cooperative"
        How the group assigns partitions: incrementally, all anew each time, or by the broker
        (KIP-848).
    start : {"earliest", "latest"}, datetime or mapping, default "earliest"
        Where a partition without a committed offset begins: at its first record, at its end, at
        the first record from a time on (with its zone), or at offsets by (topic, partition), where
        missing ones mean the earliest. A partition that is added to a topic while this member
        reads the topic begins at its first record. A member that has not read the topic before
        applies ``start`` to it, so with "latest" it skips what the partition got until then.
    force_from_start : str, optional
        The name of a deployment. A partition that was committed under another name, or none,
        begins as ``start`` says, once per name. Give all members of the group the same name. With
        the argument removed, they continue at the committed offsets.
    max_offset_behind : int, optional
        When a partition is assigned, records further than this behind its end are skipped. A dead
        letter "TooFarBehind" names their offsets; without ``dead_letters`` a warning is logged. If
        ``out_of_range`` is "fail", the consumer ends instead.
    out_of_range : {"earliest", "latest", "fail"}, optional
        What to do if the next records were deleted: continue at the first record or at the end,
        with a dead letter that names the lost offsets (without ``dead_letters``, a warning); or end
        with `OffsetsOutOfRange`. The default is "earliest" with ``dead_letters``, else "fail". A
        topic that was deleted and created again is read from its beginning. A truncated log is read
        from the first offset with another record, if it is known. With "fail", both also end the
        consumer.
    dead_letters : str or callable, optional
        A topic for dead records, which must not match ``topics``; or a function ``keep(record,
        failure)``, which runs in a thread of its own and must store the record before it returns.
        A record that cannot be stored is tried again without end. By default, the first dead record
        ends the consumer with `ackcore.dispatch.RecordDead`.
    max_dead : int, optional
        The largest number of dead records among the last ``max_dead_window`` that were acked or
        died. With one more, the consumer ends with `TooManyDead`.
    max_dead_ratio : float, optional
        The largest share of dead records among the same records, from 0 to 1, judged from ten dead
        records on. Even with 1, not all of them may die.
    max_dead_window : int or None, default 1000
        The number of last ended records for both limits; None for all since the start.
    max_attempts : int, default 5
        The number of failures after which a record is dead.
    backoff_s, max_backoff_s : float, default 1.0, 300.0
        The longest wait before a retry, after the first failure and after any. In between it
        doubles with each failure. The actual wait is random, from 1 ms up to that.
    timeout_s : float, optional
        A record that is not answered for this long has failed. An ack still counts until the
        record is delivered again, or is dead.
    unavailable_timeout_s : float, default 604800
        Seconds since a record was first read, after which `Unavailable` counts as an attempt.
    commit_interval_s : float, default 1.0
        Seconds between commits.
    drain_s : float, default 10.0
        Seconds for answers when partitions are taken away, and when the consumer is closed.
    on_assign, on_revoke : callable, optional
        Called with this consumer and a list of (topic, partition). ``on_assign`` is called before
        new partitions are read, so it may `seek`. ``on_revoke`` is called when partitions are taken
        away, and at `close`. Records acked in it or within ``drain_s`` after it are committed,
        except those of partitions that the group declared lost. Both run in the thread that reads:
        they must not wait for records, and not call `poll`, `commit` or `close`. An exception in
        one ends the consumer.
    ordered_by : {"key", "partition"}, optional
        Deliver the records of one key (or of one partition) one at a time, in the order of their
        offsets. The next one comes when the one before is acked or stored as a dead letter.
        Other keys, and records without a key, are not held up.
    refresh_s : float, default 60.0
        Seconds between checks for new partitions, and for topics that were created again.
    max_in_flight : int, default 10_000
        The largest number of records of one partition that are delivered and not answered, or
        whose dead letters are not stored yet. At that number nothing new of it is delivered.
        The consumer reads ahead up to 1,000 records, or this number if it is larger. Then it pauses
        the partition until half of that is free.
    max_in_flight_bytes : int, default 16 MiB
        The largest number of bytes of one partition that are read, and neither done nor waiting
        for a retry. At that number the partition is paused in the same way.
    max_waiting, max_waiting_bytes : int, default 10_000, 64 MiB
        The largest number of records and bytes, over all partitions, that wait for a retry. At that
        number reading stops. Records read before are still delivered.
    options : mapping, optional
        Further settings of librdkafka; see `ClientSettings`.

    Notes
    -----
    If a broker does not answer a request for committed offsets, or for the bounds of a partition,
    within 30 s, the consumer ends with `ConsumerError`. Start it again. The headers make a dead
    letter larger than its record: if records come near the topic's limit, give the dead-letter
    topic a larger ``max.message.bytes``.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is out of range.
    ConsumerError
        If librdkafka refuses the settings, or ``oauth_cb`` gives no token.
    """

    @naming_arguments
    def __init__(
        self,
        topics: str | Sequence[str] | None = None,
        *,
        bootstrap_servers: str,
        group_id: str,
        partitions: Sequence[tuple[str, int]] | None = None,
        tasks: int | None = None,
        task: int | None = None,
        protocol: Protocol = "cooperative",
        start: Start = "earliest",
        force_from_start: str | None = None,
        max_offset_behind: int | None = None,
        out_of_range: OutOfRange | None = None,
        dead_letters: KeepDead | None = None,
        max_dead: int | None = None,
        max_dead_ratio: float | None = None,
        max_dead_window: int | None = 1000,
        max_attempts: int = 5,
        backoff_s: float = 1.0,
        max_backoff_s: float = 300.0,
        timeout_s: float | None = None,
        unavailable_timeout_s: float = 7 * 24 * 3600.0,
        commit_interval_s: float = 1.0,
        drain_s: float = 10.0,
        on_assign: Rebalanced | None = None,
        on_revoke: Rebalanced | None = None,
        ordered_by: OrderedBy | None = None,
        refresh_s: float = 60.0,
        max_in_flight: int = 10_000,
        max_in_flight_bytes: int = 16 << 20,
        max_waiting: int = 10_000,
        max_waiting_bytes: int = 64 << 20,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _SETTINGS}
        self.settings = settings = ConsumerSettings(
            ClientSettings(bootstrap_servers, options),
            topics=as_topics(topics),
            partitions=as_partitions(partitions),
            **given,
        )
        # Re-entrant: a signal handler may call `stop` while its thread holds this lock.
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._held = HeldRecords(
            settings.policy,
            limits=settings.limits,
            timeout_ms=None if timeout_s is None else max(1, round(timeout_s * 1000)),
            unavailable_timeout_ms=round(unavailable_timeout_s * 1000),
            dead_limit=settings.dead_limit(),
            ordered_by=ordered_by,
            wake=self._changed.notify_all,
        )
        self._stopped = False
        self._thread = ClientThread(settings, self._held, self._changed, weakref.ref(self))
        self._thread.start()
        # Otherwise the thread would keep the partitions, whose records nobody could get or answer.
        weakref.finalize(self, self._thread.abandon).atexit = False

    # Records.

    def poll(self, n: int = 1, timeout_s: float | None = None) -> list[KafkaRecord]:
        """Return up to n records to be processed: due retries and new records, alternating.

        Waits for the first record only, for up to ``timeout_s`` seconds; by default without a
        limit. The list is empty if none came in time, or the consumer was stopped.

        Raises the error that ended the consumer: a ConsumerError, TooManyDead, RecordDead,
        KafkaException, or the error of a callback. Raises RuntimeError if a callback or a forked
        process calls it.
        """
        n = as_count(n, "n", 1)
        self._refuse_callbacks("poll")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._own():
            while True:
                if self._thread.error is not None:
                    raise self._thread.error
                if self._stopped or self._thread.ended:
                    return []
                if taken := self._held.take(n, now_ms()):
                    return taken
                left_s = _LONGEST_WAIT_S if deadline is None else deadline - time.monotonic()
                if not left_s > 0:  # also for NaN
                    return []
                self._wait_for_record(min(left_s, _LONGEST_WAIT_S))

    def _wait_for_record(self, most_s: float) -> None:
        """Wait until there may be a record or the end, at most ``most_s``."""
        with self._own():
            due_ms = self._held.due_in_ms(now_ms())
            if due_ms != 0 and not self.stopped:
                self._changed.wait(most_s if due_ms is None else min(most_s, due_ms / 1000))

    def __iter__(self) -> Iterator[KafkaRecord]:
        """Iterate over records until the consumer is stopped; raise the error that ended it."""
        while taken := self.poll():
            yield taken[0]

    async def __aiter__(self) -> AsyncIterator[KafkaRecord]:
        """Iterate like `__iter__`, in an event loop; also for an `ackcore.dispatch.Dispatcher`."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "ackcore-kafka-poll") as thread:
            while True:
                if taken := self.poll(timeout_s=0.0):
                    yield taken[0]
                elif self.stopped:
                    return
                else:
                    # The thread takes no record, so none is lost if this is cancelled.
                    await loop.run_in_executor(thread, self._wait_for_record, _SHORT_WAIT_S)

    def ack(self, record: KafkaRecord) -> bool:
        """Ack a record. Return False if it was answered before, or the answer came too late.

        Raises TypeError for anything but a `KafkaRecord`, as `fail` does.
        """
        with self._own():
            return self._held.ack(record)

    def ack_many(self, records: Iterable[KafkaRecord]) -> int:
        """Ack records one after another. Return for how many of them `ack` returned True.

        If it raises TypeError for one, those before it are acked.
        """
        with self._own():
            return sum(map(self._held.ack, records))

    def fail(self, record: KafkaRecord, reason: BaseException | str) -> bool:
        """Fail a record. Return False if it was answered before, or the answer came too late.

        ``reason``: the cause, an exception or a text. `Reject` sends the record to the dead letters
        at once. `Unavailable` counts no attempt until the record is ``unavailable_timeout_s`` old.
        `Unavailable` and `Retry` may set the shortest wait (``after_s``). Raises TypeError if it is
        neither an exception nor a text; the record can then still be answered.
        """
        asked_s = reason.asked_s if isinstance(reason, Retry) else None
        with self._own():
            return self._held.fail(
                record,
                Failure.of(reason),
                now_ms(),
                final=isinstance(reason, Reject),
                counts=not isinstance(reason, Unavailable),
                after_ms=round((asked_s or 0.0) * 1000),
            )

    # The consumer.

    def _own(self) -> threading.Condition:
        """Return the lock of this consumer, not locked. Raise RuntimeError in a forked process."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this Consumer was made in process {self._pid}, and is used in process "
                f"{os.getpid()}, which was forked and has no thread that reads; make a Consumer "
                "after the fork"
            )
        return self._changed

    def _refuse_callbacks(self, name: str) -> None:
        if threading.current_thread() is self._thread:  # as callbacks do
            raise RuntimeError(
                f"{name}() must not be called in on_assign or on_revoke: it would wait for the "
                "thread that runs them. Records acked in on_revoke are committed after it returns. "
                "To end the consumer there, call stop()"
            )

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Continue at another offset of a partition. Callbacks and any thread may call it.

        All records below the offset count as done, and their offsets are committed. All records
        from the offset on are delivered as new records, even if they were done. Answers to records
        that were delivered before change nothing, and waiting retries and dead letters that are not
        stored yet are dropped. If the offset does not exist, ``out_of_range`` applies.

        ``offset``: the offset of the next record to deliver. Raises ValueError if the partition is
        not assigned, or is being taken away.
        """
        offset = as_count(offset, "offset", 0, 2**62)
        with self._own():
            if not self._held.seek((topic, partition), offset):
                raise ValueError(
                    "topic and partition must name a partition that is assigned to this consumer, "
                    f"got {topic!r} and {partition!r}; stats().partitions lists these, and "
                    "on_assign receives new ones"
                )

    def commit(self, timeout_s: float = 30.0) -> None:
        """Commit now, and wait until the broker has all records that were done before this call.

        Records that are not done stay uncommitted, and are delivered again after a restart. A
        commit that the broker refuses is sent again after ``commit_interval_s``. The call does not
        wait for a partition that is taken away meanwhile: its last commit belongs to the rebalance.
        For a partition that the group declared lost there is no last commit: its next owner reads
        again all records that were done since the commit before.
        ``timeout_s``: the longest wait, in seconds.

        Raises
        ------
        ConsumerError, TooManyDead, RecordDead, KafkaException
            The error that ended the consumer, or that of a callback. `ConsumerError` also if the
            consumer is closed and its last commit was refused.
        TimeoutError
            If the broker has not confirmed the commit in time. The consumer continues to commit.
        """
        timeout_s = positive(timeout_s, "timeout_s", 1e9, "seconds")
        self._refuse_callbacks("commit")
        deadline = time.monotonic() + timeout_s
        with self._own():
            wanted = self._held.uncommitted()
            self._thread.commit_soon()
            while True:
                self._raise_end()
                if self._held.are_committed(wanted):
                    return
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    refusal = self._thread.refusal
                    said = f" (their last refusal: {refusal})" if refusal else ""
                    raise TimeoutError(
                        f"the offsets of group {self.settings.group_id!r} were not committed in "
                        f"{timeout_s:g} s: the brokers have not confirmed them{said}; the consumer "
                        "tries again, so call commit() again or give it a longer timeout_s"
                    )
                self._changed.wait(left_s)

    @property
    def stopped(self) -> bool:
        """Whether the consumer was stopped or has ended, so that `poll` returns no more records."""
        return self._stopped or self._thread.ended

    def stop(self) -> None:
        """Begin to end as `close` does, without waiting: `poll` returns nothing more.

        Any thread, callback or signal handler may call it, also again.
        """
        with self._own():
            self._stopped = True
            self._thread.stop()
            self._changed.notify_all()

    def close(self, drain_s: float | None = None, timeout_s: float = _CLOSE_S) -> None:
        """Stop, wait until the records in flight are answered, commit, and leave the group.

        ``drain_s``: seconds to wait for answers, instead of the consumer's ``drain_s``.
        ``timeout_s``: the longest wait after the drain, in seconds, for brokers that do not answer.
        Kubernetes gives a terminated pod 30 s by default. A second call waits for the same end.

        Raises
        ------
        ConsumerError, TooManyDead, RecordDead, KafkaException
            The error that ended the consumer, or that of a callback, also if `poll` has raised it
            before. `ConsumerError` also if the broker refused the last commit of records that are
            done: they are then delivered again after a restart.
        TimeoutError
            If the client does not end in time. It continues in the background.
        """
        timeout_s = positive(timeout_s, "timeout_s", 1e9, "seconds")
        self._refuse_callbacks("close")
        if drain_s is not None:
            self.settings.check_drain(drain_s)
            self._thread.drain_s = drain_s
        self.stop()
        self._thread.join(self._thread.drain_s + timeout_s)
        if not self._thread.ended:
            raise TimeoutError(
                f"the consumer did not end in {timeout_s:g} s after its drain: its brokers may not "
                "answer; call close() again to wait longer: if this process ends first, records "
                "done since its last commit are delivered again"
            )
        self._raise_end()

    def _raise_end(self) -> None:
        """Raise the error that ended the consumer, or a ConsumerError for a refused last commit.

        Without either, do nothing.
        """
        if self._thread.error is not None:
            raise self._thread.error
        refusal = self._thread.last_refusal
        if refusal is not None:
            raise ConsumerError(
                f"the last commit of group {self.settings.group_id!r} was refused: "
                f"{refusal}; the records that were done since the commit before "
                "it are delivered again to the next member that reads their partitions"
            )

    def stats(self) -> ConsumerStats:
        """Return a snapshot of the consumer's counts and partitions."""
        with self._own():
            partitions = self._held.partition_stats(now_ms(), self._thread.ends)
            return ConsumerStats(
                partitions,
                replace(self._held.counts),
                max((each.oldest_s for each in partitions), default=0.0),
                sum(each.lag or 0 for each in partitions),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self.close()
            return
        with suppress(Exception):  # the first error is the one to raise
            self.close(0.0)  # after a failure no more answers come
