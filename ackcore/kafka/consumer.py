"""A member of a consumer group whose records are acked or failed one by one, in any order."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from ackcore._columns import as_count
from ackcore.calls import Reject, Retry, Unavailable
from ackcore.flow.numbers import positive
from ackcore.kafka.client import ConsumerError
from ackcore.kafka.client_thread import ClientThread
from ackcore.kafka.consumer_settings import (
    ConsumerSettings,
    KeepDead,
    OrderedBy,
    OutOfRange,
    Protocol,
    Rebalanced,
    as_partitions,
    as_topics,
)
from ackcore.kafka.held_records import HeldRecords
from ackcore.kafka.partition_reading import now_ms
from ackcore.kafka.records import ConsumerCounts, Failure, KafkaRecord, PartitionStats
from ackcore.kafka.settings import ClientSettings
from ackcore.kafka.starts import Start

#: Records that are taken at once for an event loop.
_BATCH = 64
_LONGEST_WAIT_S = 60.0
#: Seconds that closing may take after the drain: less than the 30 of a pod that is ended.
_CLOSE_S = 25.0


class ConsumerStats(NamedTuple):
    """A consumer as it is."""

    partitions: list[PartitionStats]
    counts: ConsumerCounts
    oldest_s: float  # how long ago the first record that is not done was read
    lag: int  # offsets between what is committed and the ends, as far as they are known


class Consumer:
    """Reads topics as a member of a group, and commits exactly what is done.

    Records are handed out, each to be acked or failed, in any order and by any thread.  What fails
    is handed out again after a back-off, ahead of what is new, and after ``max_attempts`` failures
    it is kept as a dead letter.  Committed is over what is acked or kept, and over nothing else;
    what is done above that goes along in the commit's metadata, so that it is not handed out again
    after a restart or a rebalance.

    A thread of its own reads, commits every ``commit_interval_s``, and answers rebalances.  A
    partition that is taken away gives nothing more; what is out of it has ``drain_s`` to be
    answered, then it is committed and let go.  An answer that comes later is counted, and changes
    nothing: whoever has the partition next does that record again.

    Parameters
    ----------
    topics : str or sequence of str, optional
        What the group assigns partitions of; one that begins with ``^`` is a regular expression.
    bootstrap_servers : str
        As librdkafka's ``bootstrap.servers``.
    group_id : str
        Whose offsets are committed.
    partitions : sequence of (str, int), optional
        Topics and partitions to read, in place of ``topics``: nothing is assigned by the group.
    tasks, task : int, optional
        Consumer ``task`` of ``tasks``, from 0 on, reads the partitions task, task + tasks, ... of
        the ordered list of those of ``topics``, and the group assigns nothing.  Each must run
        once; where a partition goes from one to another, as the list became longer, what was out
        is done twice.
    protocol : {"cooperative", "eager", "consumer"}, default "cooperative"
        How the group assigns: incrementally, all anew each time, or by the broker (KIP-848).
    start : {"earliest", "latest"}, datetime or mapping, default "earliest"
        Where to begin a partition of which nothing is committed: at the first record that there
        is, at the end, at the first record of a time (with its zone), or at offsets by (topic,
        partition), those without one at the earliest.  A partition that comes to a topic while
        this member reads that begins at its first record; to one that has not read the topic
        before, it is as any other, so that "latest" passes over what it got until then.
    force_from_start : str, optional
        The name of a deployment.  A partition that was committed under another name, or none,
        begins as ``start`` says all the same, once for each name.  Give all members of the group
        the same one; taken away, they go on.
    max_offset_behind : int, optional
        What is further behind the end of its partition, when that is assigned, is passed over,
        with a dead letter "TooFarBehind" that says which offsets; or, where ``out_of_range`` is
        "fail", ends the consumer.
    out_of_range : {"earliest", "latest", "fail"}, optional
        What to do where the records to be read next were deleted: go on at the first that there is,
        or at the end, with a dead letter that says what is lost (a warning, if there are none), or
        end with `OffsetsOutOfRange`.  By default ``"earliest"`` with ``dead_letters``, and
        ``"fail"`` without.
        A topic that was deleted and made again (its id is another) is read from its beginning,
        or, with "fail", ends the consumer, too.
    dead_letters : str or callable, optional
        A topic, which none of ``topics`` is or fits, or ``keep(record, failure)``, called in a
        thread of its own, which must have kept the record when it returns.  What cannot be kept is
        tried again until it is.  By default the consumer ends with `ackcore.dispatch.RecordDead`.
    max_dead : float, optional
        Of the last ``max_dead_window`` records that were acked or died, at most this share may be
        dead, and not all: else it ends with `TooManyDead`.
    max_dead_window : int, default 1000
        Of how many; before there are so many, nothing is too much.
    max_dead_in_a_row : int, optional
        So many records may die one after another; one more, and it ends with `TooManyDead`.
    max_attempts : int, default 5
        Times that a record may fail.
    backoff_ms, max_backoff_ms : int, default 1000, 300000
        The longest wait after the first failure, and after any; between them it doubles.  How long
        the wait is, from 1 ms up, is drawn for each record and attempt.
    timeout_s : float, optional
        What is out for longer has failed; an ack that comes before it is handed out again counts.
    unavailable_timeout_s : float, default 604800
        Once a record is known for so long, `Unavailable` counts as an attempt.
    commit_interval_s : float, default 1.0
        Seconds between commits.
    drain_s : float, default 10.0
        Seconds for answers when partitions are taken away, and when it is closed.
    on_assign, on_revoke : callable, optional
        Called with this consumer and a list of (topic, partition): when partitions have come and
        nothing of them is read yet, so that it may `seek`; and when they are taken away, at a
        `close` too, before the ``drain_s`` in which what is out may be acked and is committed.
        Partitions that the group took away as lost are told to ``on_revoke``, and not committed.
        The callbacks run in the thread that reads: they must not wait for records, and not call
        `poll`, `commit` or `close`.  An exception in one ends the consumer.
    ordered_by : {"key", "partition"}, optional
        Of records with the same key (of a partition), one is handed out at a time, in the order of
        their offsets: the next when the one before is acked or kept as a dead letter, its retries
        included.  Other keys go on, and so do records without a key.
    refresh_s : float, default 60.0
        How often it is asked for new partitions, and for topics that were made again.
    max_in_flight : int, default 10_000
        Records of one partition that are handed out and not answered, or have dead letters that are
        not kept yet; from there on it hands out nothing new.  It reads ahead up to 1,000 records,
        or this many if that is more, and is then paused until half of that is free again.
    max_in_flight_bytes : int, default 16 MiB
        Bytes of one partition that are read and neither done nor waiting; from there on it is
        paused, as above.
    max_waiting, max_waiting_bytes : int, default 10_000, 64 MiB
        Records of all partitions that wait for another attempt; from there on nothing is read. What
        was read ahead by then is still handed out.
    options : mapping, optional
        As of `ClientSettings`.

    A broker that does not say in 30 s what is committed, or where a partition begins, ends it with
    `ConsumerError`: start it again.  A dead letter is larger than its record by its headers: one
    of a record near the topic's limit needs a topic with a larger ``max.message.bytes``.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If one is out of range.
    """

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
        max_dead: float | None = None,
        max_dead_window: int = 1000,
        max_dead_in_a_row: int | None = None,
        max_attempts: int = 5,
        backoff_ms: int = 1000,
        max_backoff_ms: int = 300_000,
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
        self.settings = settings = ConsumerSettings(
            ClientSettings(bootstrap_servers, options),
            group_id,
            as_topics(topics),
            as_partitions(partitions),
            tasks=tasks,
            task=task,
            protocol=protocol,
            start=start,
            force_from_start=force_from_start,
            max_offset_behind=max_offset_behind,
            out_of_range=out_of_range,
            dead_letters=dead_letters,
            max_dead=max_dead,
            max_dead_window=max_dead_window,
            max_dead_in_a_row=max_dead_in_a_row,
            max_attempts=max_attempts,
            backoff_ms=backoff_ms,
            max_backoff_ms=max_backoff_ms,
            timeout_s=timeout_s,
            unavailable_timeout_s=unavailable_timeout_s,
            commit_interval_s=commit_interval_s,
            drain_s=drain_s,
            on_assign=on_assign,
            on_revoke=on_revoke,
            ordered_by=ordered_by,
            refresh_s=refresh_s,
            max_in_flight=max_in_flight,
            max_in_flight_bytes=max_in_flight_bytes,
            max_waiting=max_waiting,
            max_waiting_bytes=max_waiting_bytes,
        )
        # Re-entrant: a signal's handler may call `stop` while its thread is in here.
        self._changed = threading.Condition()
        self._pid = os.getpid()
        self._held = HeldRecords(
            settings.policy,
            limits=settings.limits,
            timeout_ms=None if timeout_s is None else max(1, round(timeout_s * 1000)),
            unavailable_timeout_ms=round(unavailable_timeout_s * 1000),
            dead_limit=settings.dead_limit,
            ordered_by=ordered_by,
            wake=self._changed.notify_all,
        )
        self._stopped = False
        self._thread = ClientThread(settings, self._held, self._changed, self)
        self._thread.start()

    # Records.

    def poll(self, n: int = 1, timeout_s: float | None = None) -> list[KafkaRecord]:
        """Return records to be processed, up to n, first what is due again.

        While there are new records, every other one is new.

        Parameters
        ----------
        n : int, default 1
        timeout_s : float, optional
            How long to wait for the first; for ever by default.

        Returns
        -------
        list of KafkaRecord
            Empty if none came in time, or the consumer was stopped.

        Raises
        ------
        ConsumerError, RecordDead, KafkaException
            What the consumer has ended with.
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
                now = now_ms()
                if taken := self._held.take(n, now):
                    return taken
                due_ms = self._held.due_in_ms(now)
                wait_s = _LONGEST_WAIT_S if due_ms is None else due_ms / 1000
                if deadline is not None:
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        return []
                    wait_s = min(wait_s, left_s)
                self._changed.wait(wait_s)

    def __iter__(self) -> Iterator[KafkaRecord]:
        """Records, until the consumer is stopped."""
        while taken := self.poll():
            yield taken[0]

    async def __aiter__(self) -> AsyncIterator[KafkaRecord]:
        """Iterate in an event loop; also as a source of `ackcore.dispatch.Dispatcher`."""
        taken: list[KafkaRecord] = []
        with ThreadPoolExecutor(1, "ackcore-kafka-poll") as thread:
            try:
                while True:
                    taken = self.poll(_BATCH, 0.0) or await self._poll_in(thread)
                    if not taken and self.stopped:
                        return
                    taken.reverse()
                    while taken:
                        yield taken.pop()
            finally:
                self._give_back(reversed(taken))

    async def _poll_in(self, thread: ThreadPoolExecutor) -> list[KafkaRecord]:
        future = thread.submit(self.poll, _BATCH, 0.2)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:

            def give_back(done: Future[list[KafkaRecord]]) -> None:
                if not done.cancelled() and done.exception() is None:
                    self._give_back(done.result())

            future.add_done_callback(give_back)
            raise

    def _give_back(self, records: Iterable[KafkaRecord]) -> None:
        with self._own():
            self._held.give_back(records)

    def ack(self, record: KafkaRecord) -> bool:
        """Say that a record is done; whether that counted, and was not late or said before."""
        with self._own():
            return self._held.ack(record)

    def ack_many(self, records: Iterable[KafkaRecord]) -> int:
        """`ack` for several; how many counted."""
        with self._own():
            return sum(map(self._held.ack, records))

    def fail(self, record: KafkaRecord, reason: BaseException | str) -> bool:
        """Say that a record failed, and why; whether that counted.

        Parameters
        ----------
        record : KafkaRecord
        reason : exception or str
            Of exceptions, `ackcore.dispatch.Reject` sends it to the dead letters at once,
            `Unavailable` does not count as an attempt, and both it and
            `ackcore.topology.Retry` may say how long it waits at least.
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
        """Return the lock, or raise RuntimeError in a process that was forked from its own."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this Consumer belongs to process {self._pid}, and this is process {os.getpid()}: "
                "a forked copy has no thread that polls; make a Consumer after the fork"
            )
        return self._changed

    def _refuse_callbacks(self, name: str) -> None:
        if self._thread.is_current:
            raise RuntimeError(
                f"{name}() must not be called in on_assign or on_revoke: it waits for the thread "
                "that calls these. What is acked in on_revoke is committed after it; stop() ends "
                "the consumer"
            )

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on at another offset of a partition; for callbacks and any thread.

        All below the offset counts as done, and is committed over; all from there on is handed out
        again, as if it were new, done or not.  `poll` returns nothing else of the partition from
        now on.  An answer to a record that is out changes nothing, and what waits for another
        attempt or for its dead letter is dropped.  Where there is no such offset, ``out_of_range``
        applies.

        Parameters
        ----------
        topic, partition
            One that is assigned.
        offset : int
            Of the next record to hand out.

        Raises
        ------
        ValueError
            If the partition is not assigned, or is being taken away.
        """
        offset = as_count(offset, "offset", 0, 2**62)
        with self._own():
            if not self._held.seek((topic, partition), offset):
                raise ValueError(
                    "topic and partition must be of a partition that this consumer has, got "
                    f"{topic!r} and {partition!r}: stats().partitions names them, and on_assign is "
                    "called when they come"
                )

    def commit(self, timeout_s: float = 30.0) -> None:
        """Commit now, and wait until the broker has what was done before this call.

        Records that are not done stay uncommitted, and are handed out again after a restart.
        A commit that the broker refuses is sent again after ``commit_interval_s``.  A partition
        that is taken away meanwhile is not waited for: its last commit belongs to the rebalance.

        Parameters
        ----------
        timeout_s : float, default 30.0
            The longest wait, in seconds.

        Raises
        ------
        ConsumerError, RecordDead, KafkaException
            The error that the consumer has ended with, or that its last commit was refused.
        TimeoutError
            If the broker has not confirmed the commit in time.  The consumer goes on to commit.
        """
        timeout_s = positive(timeout_s, "timeout_s", unit="seconds")
        self._refuse_callbacks("commit")
        deadline = time.monotonic() + timeout_s
        with self._own():
            wanted = self._held.uncommitted()
            self._thread.commit_soon()
            while True:
                if self._thread.error is not None:
                    raise self._thread.error
                if self._thread.last_refused:
                    raise ConsumerError("the consumer is closed, and its last commit was refused")
                if self._held.are_committed(wanted):
                    return
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(
                        f"the offsets of group {self.settings.group_id!r} were not committed in "
                        f"{timeout_s:g} s: the brokers have not confirmed them; the consumer "
                        "tries again, so call commit() again or give it a longer timeout_s"
                    )
                self._changed.wait(left_s)

    @property
    def stopped(self) -> bool:
        """Whether no more records come."""
        return self._stopped or self._thread.ended

    def stop(self) -> None:
        """Read nothing more, and end in the background; for any thread, and signal handlers."""
        with self._own():
            self._stopped = True
            self._thread.stop()
            self._changed.notify_all()

    def close(self, drain_s: float | None = None, timeout_s: float = _CLOSE_S) -> None:
        """Stop, wait until what is out is answered, commit, and leave the group.

        Parameters
        ----------
        drain_s : float, optional
            Seconds to wait for answers, if not those of the settings.
        timeout_s : float, default 25.0
            The longest wait after the drain, in seconds, for brokers that do not answer. A pod that
            is ended has 30 s by default.

        Raises
        ------
        ConsumerError, RecordDead, KafkaException
            What the consumer has ended with, also if `poll` has raised it.
        TimeoutError
            If the client does not end in time. It goes on in the background.
        """
        timeout_s = positive(timeout_s, "timeout_s", unit="seconds")
        self._refuse_callbacks("close")
        if drain_s is not None:
            self.settings.check_drain(drain_s)
            self._thread.drain_s = drain_s
        self.stop()
        self._thread.join(self._thread.drain_s + timeout_s)
        if not self._thread.ended:
            raise TimeoutError(
                f"the consumer did not end in {timeout_s:g} s after its drain: its brokers may not "
                "answer; what was done since its last commit is done again"
            )
        if self._thread.error is not None:
            raise self._thread.error

    def stats(self) -> ConsumerStats:
        """Return the consumer as it is."""
        with self._own():
            ends = self._thread.ends
            partitions = [
                each._replace(lag=max(0, ends[key] - each.committed))
                if (key := (each.topic, each.partition)) in ends and each.committed is not None
                else each
                for each in self._held.partition_stats(now_ms())
            ]
            return ConsumerStats(
                partitions,
                replace(self._held.counts),
                max((each.oldest_s for each in partitions), default=0.0),
                sum(each.lag or 0 for each in partitions),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(Exception):  # the error that is raised is the first
            self.close(0.0)  # what failed will not be answered
