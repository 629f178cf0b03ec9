"""One producer and several consumers: each record is tracked to its end, however often it fails.

*Guarantee.* A record is done when a consumer has acked it, or ``dead_letters`` has stored it. The
committed position, which the checkpoint stores, moves only past done records. So after any crash
each record is processed at least once. Only three kinds are processed again: those done beyond the
committed position, those in flight, and those whose consumer answered too late.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ackcore._backend import OffsetTracker
from ackcore._columns import as_count, count_or_none, nanoseconds, positive
from ackcore._error_hints import counted, naming_arguments
from ackcore.calls import Reject, Retry, Unavailable
from ackcore.calls.calls import in_event_loop
from ackcore.calls.endpoints import Breaker, BreakerState
from ackcore.calls.threads import NOT_RUN, refuse_lazy, refuse_unrun
from ackcore.dispatch.checkpoint import Checkpoint
from ackcore.dispatch.dispatch_consumers import InUse, NotAwaitable, Target, as_target, awaitable
from ackcore.dispatch.dispatch_records import Reader, Record, Source
from ackcore.flow import Batch, FlowController, Limit
from ackcore.flow.choosers import Chooser
from ackcore.flow.consumers import ConsumerState, Fate, Lease
from ackcore.flow.windows import Windows
from ackcore.retry import backoff_ms as backoff_of
from ackcore.retry import capped_doubling, whole_ms

DeadLetters = Callable[[int, Any, BaseException], Any]

_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 1_000
#: Refusals in a row from which a warning is logged, and the seconds between warnings.
_MANY_REFUSALS, _WARN_EVERY_S = 10, 60.0
#: The number of records read ahead, so that a record whose key waits does not block all others.
_LOOK_AHEAD = 64
#: Seconds between checks of time-outs and pauses.
_LOOK_S = 0.02
#: Seconds between commits, and the most records read beyond the first that is not done.
_COMMIT_S, _MAX_AHEAD = 1.0, 1_000_000
_MAX_BACKOFF_S = 366 * 24 * 3600
#: Pause of a consumer during its trial call.  The end of that call ends the pause.
_ON_TRIAL_S = 1e9

_log = logging.getLogger(__name__)


class RecordDead(Exception):
    """A record failed for the last time, and there are no ``dead_letters`` to store it."""


class DispatchCounts(NamedTuple):
    """The counts of a run's records; at its end, ``read == acked + dead``.

    ``start``: the position at which the run began. ``committed``: the position before which all
    records are done. ``attempts``: records sent, retries included. ``failed``, ``timed_out``:
    attempts that did. ``unavailable``: attempts that a consumer refused, or did not begin in time,
    and that do not count. ``consumers``: their states, in the order of their declaration.
    """

    start: int
    committed: int
    read: int
    acked: int
    dead: int
    attempts: int
    failed: int
    timed_out: int
    unavailable: int
    consumers: list[ConsumerState]


class FailedInBatch(Exception):
    """The error of a record that the answer to its batch, a bitmap, marks as failed."""


class Dispatcher:
    """Sends each record of a source to the idlest of several consumers, until all are done.

    Parameters
    ----------
    source : sequence, or callable
        The records. A callable takes a position and returns an iterable, or an asynchronous one,
        of the records from there on. It must return the same records each time, so that a restart
        resumes. A blocking iterable stops the whole dispatcher while it waits for a record. An
        asynchronous one does not; a batch is sent early if its next record takes over 20 ms.
    consumers : mapping
        By name: a function (run in a thread), a coroutine function, or a `Target`, for example
        `Process` or `Http`.
    limit, chooser, max_pending, clock
        The limit of each consumer, the choice among them, the largest number of calls in flight,
        and the clock: see `FlowController`.
    timeout_s : float, default 30.0
        The longest call, in seconds. A record that waits longer for a thread or a process goes to
        another consumer, and no attempt is counted.
    key : callable, optional
        ``key(record)`` returns the key by which a chooser such as `ByKey` selects the consumer. Not
        with ``batch``. A record for which it raises, or returns None or an unhashable key, is dead
        at once.
    batch : int, default 1
        Records per call. Above 1, consumers receive lists, and may return a bitmap of the failed
        records.
    max_attempts : int, default 5
        The number of failures after which a record is dead; `Unavailable` does not count.
    backoff_s, max_backoff_s : float, default 1.0, 300.0
        The longest wait of a record after its first failure, and after any failure. It doubles
        with each failure; the actual wait is random, up to it (`ackcore.retry`). `Retry` may set a
        longer wait.
    breaker_failures : int, optional, default 10
        Failures in a row, of any records, after which a consumer gets no more records; None for no
        limit. A `Reject` and a batch that failed in part do not count.
    breaker_reset_s : float, default 1.0
        Seconds until such a consumer gets a single call as a trial. A failed trial is no attempt,
        unless no consumer works. Nor is a call that fails while its consumer waits for the trial.
    acked : callable, optional
        ``acked(position, record)`` is called once for each record that a consumer has done, for a
        source that commits its own offsets, such as `ackcore.kafka.Consumer`.
    dead_letters : callable, optional
        ``dead_letters(position, record, error)``, or a coroutine function, is called with a record
        that failed for the last time. It must store the record before it returns, because the
        committed position then moves past it. By default the run ends with `RecordDead`.
    checkpoint : path-like, optional
        The file of the committed position, written each second and at the end; see `Checkpoint`. By
        default each run begins at 0.
    unavailable_timeout_s : float, default 604_800 (a week)
        Seconds after a record's first `Unavailable` from which further ones count as attempts.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type or is out of range, or if there are no consumers.
    """

    @naming_arguments
    def __init__(
        self,
        source: Source,
        consumers: Mapping[Hashable, Any],
        *,
        limit: Callable[[], Limit] | None = None,
        chooser: Chooser | None = None,
        max_pending: int | None = None,
        timeout_s: float = 30.0,
        clock: Callable[[], int] = time.monotonic_ns,
        key: Callable[[Any], Hashable] | None = None,
        batch: int = 1,
        max_attempts: int = 5,
        backoff_s: float = 1.0,
        max_backoff_s: float = 300.0,
        breaker_failures: int | None = 10,
        breaker_reset_s: float = 1.0,
        acked: Callable[[int, Any], Any] | None = None,
        dead_letters: DeadLetters | None = None,
        checkpoint: Any = None,
        unavailable_timeout_s: float = 7 * 24 * 3600.0,
    ) -> None:
        if not callable(source) and not isinstance(source, Sequence):
            raise TypeError(
                "source must be a sequence, or a callable that returns the records from a position "
                f"on, got {type(source).__name__}; for an iterable: "
                "lambda start: itertools.islice(iterable, start, None)"
            )
        if not isinstance(consumers, Mapping):
            raise TypeError(
                "consumers must be a mapping from name to consumer, such as "
                f"{{'one': function}}, got {type(consumers).__name__}"
            )
        if not consumers:
            raise ValueError("consumers must have at least one consumer, got none")
        self._source = source
        self._targets: dict[Hashable, Target] = {
            name: as_target(given, name) for name, given in consumers.items()
        }
        # By identity: consumers of several names may share one, which is started and closed once.
        self._distinct = {id(target): target for target in self._targets.values()}
        self._batch = as_count(batch, "batch", 1)
        if key is not None and self._batch > 1:
            raise ValueError(
                "key cannot be combined with batch > 1: the records of a batch have different "
                "keys; leave one of the two out"
            )
        if getattr(chooser, "keyed", False) and key is None:
            raise ValueError(
                "the chooser selects the consumer by the record's key: pass key=, a function that "
                "returns the key of a record"
            )
        refuse_lazy(key, "key")
        self._key = key
        self._max_attempts = as_count(max_attempts, "max_attempts", 1)
        self._backoff_ms = whole_ms(positive(backoff_s, "backoff_s", _MAX_BACKOFF_S, "seconds"))
        longest_s = positive(max_backoff_s, "max_backoff_s", _MAX_BACKOFF_S, "seconds")
        if longest_s < backoff_s:
            raise ValueError(
                f"max_backoff_s must be at least backoff_s, got {longest_s:g} and {backoff_s:g}; "
                "increase the first or decrease the second"
            )
        self._max_backoff_ms = whole_ms(longest_s)
        failures = count_or_none(breaker_failures, "breaker_failures", 1)
        reset_ns = nanoseconds(breaker_reset_s, "breaker_reset_s")
        self._breakers = {name: Breaker(failures, reset_ns) for name in self._targets}
        self._trials: set[Lease] = set()
        refuse_lazy(acked, "acked")
        self._acked = acked
        self._dead_letters = dead_letters
        self._checkpoint_path = checkpoint
        self._unavailable_timeout_s = positive(
            unavailable_timeout_s, "unavailable_timeout_s", 1e9, "seconds"
        )
        self._clock, self._timeout_s = clock, timeout_s
        self._flow = FlowController(
            self._targets,
            limit=limit,
            chooser=chooser,
            max_pending=max_pending,
            timeout_s=timeout_s,
            clock=clock,
        )
        self._start = 0
        self._positions = OffsetTracker("source", 0, 0, 0)
        self._unsent: deque[tuple[Batch, Hashable]] = deque()  # read, not sent, with their keys
        self._tasks: dict[Lease, asyncio.Task[None]] = {}
        self._storing: set[asyncio.Future[Any]] = set()  # running coroutines of `dead_letters`
        self._failures: dict[int, int] = {}  # by position of records that are not done
        self._refusals: dict[Hashable, int] = {}  # by consumer, in a row
        self._warn_ns: dict[Hashable, int] = {}  # by consumer: no warning of refusals before
        self._asked_ns = dict.fromkeys(self._targets, 0)  # the end of each requested pause
        self._refused_ns: dict[int, int] = {}  # by position, the time of its first refusal
        self._counts = dict.fromkeys(
            ("read", "acked", "dead", "attempts", "failed", "timed_out", "unavailable"), 0
        )
        self._error: BaseException | None = None
        self._running = False
        self._stopping = False
        self._more = asyncio.Event()

    def run(self) -> DispatchCounts:
        """Send all records in a new event loop, and return the counts when each is done.

        Raises RuntimeError in a running event loop: await `run_async` there. Raises the errors of
        `run_async`: RecordDead, TypeError, CheckpointError, RuntimeError and those of your code.
        """
        if in_event_loop():
            raise RuntimeError(
                "run() was called in a running event loop, such as a notebook's; write "
                "`await dispatcher.run_async()` there"
            )
        return asyncio.run(self.run_async())

    async def run_async(self) -> DispatchCounts:
        """Send all records, and return the counts when each is done.

        Raises RecordDead if a record failed for the last time, and there are no ``dead_letters``,
        TypeError if a method of a `Target` returned no awaitable, or an exception of the source, of
        `Target.start`, of ``acked`` or of ``dead_letters``. Calls in flight are then cancelled, and
        the position up to which all records are done is committed even so. Raises CheckpointError
        if the checkpoint is damaged, or open elsewhere. Raises RuntimeError if this dispatcher has
        run before.
        """
        if self._running:
            raise RuntimeError(
                "this dispatcher has run before; create another, which resumes at the checkpoint"
            )
        self._running = True
        checkpoint = None if self._checkpoint_path is None else Checkpoint(self._checkpoint_path)
        try:
            self._start = 0 if checkpoint is None else checkpoint.committed
            self._positions = OffsetTracker("source", 0, 0, self._start)
            await asyncio.gather(*map(self._begin, [*self._distinct.values()]))
            await self._run(checkpoint)
        finally:
            try:
                await self._close()
            finally:
                if checkpoint is not None:
                    with checkpoint:
                        checkpoint.commit(self._positions.committable)
        if self._error is not None:
            raise self._error
        return self.counts()

    def stop(self) -> None:
        """Read no more records; the run ends when those that were read are done.

        Call it in the thread of the event loop.
        """
        self._stopping = True
        self._more.set()

    def counts(self) -> DispatchCounts:
        """Return the counts of the records so far."""
        return DispatchCounts(
            self._start, self._positions.committable, **self._counts, consumers=self._flow.state()
        )

    # Sending.

    async def _begin(self, target: Target) -> None:
        try:
            await awaitable(target.start(), f"{type(target).__name__}.start")
        except InUse:
            del self._distinct[id(target)]  # the other dispatcher closes it
            raise

    async def _close(self) -> None:
        tasks = [*self._tasks.values(), *self._storing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*map(_closed, self._distinct.values()), return_exceptions=True)

    async def _run(self, checkpoint: Checkpoint | None) -> None:
        reader = Reader(self._source, self._start, self._more.set)
        next_commit = time.monotonic() + _COMMIT_S
        next_look = 0.0
        try:
            while self._error is None:
                self._more.clear()
                self._send(reader)
                busy = self._unsent or self._tasks or self._storing or self._flow.requeued
                if not busy and (reader.ended or self._stopping):
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._more.wait()
                now = time.monotonic()
                if now >= next_look:
                    next_look = now + _LOOK_S
                    self._expire()
                if checkpoint is not None and now >= next_commit:
                    next_commit = now + _COMMIT_S
                    await asyncio.to_thread(checkpoint.commit, self._positions.committable)
        finally:
            await reader.close()

    def _send(self, reader: Reader) -> None:
        """Send records while consumers have room: retries first, unless no breaker is closed."""
        if not self._any_works():
            # A record that has not failed shows whether the consumers or the records are broken.
            self._send_new(reader)
        while self._flow.requeued and (lease := self._flow.try_again()):
            self._launch(lease)
        self._send_new(reader)

    def _send_new(self, reader: Reader) -> None:
        while self._error is None:
            self._read(reader)
            if not self._send_unsent():
                return

    def _read(self, reader: Reader) -> None:
        """Read until one batch waits to be sent, or with ``key`` `_LOOK_AHEAD` records.

        Stops earlier at the end of the source, after `stop`, and `_MAX_AHEAD` records beyond the
        first that is not done. A record whose key cannot be used is stored as dead.
        """
        wanted = 1 if self._key is None else _LOOK_AHEAD
        while len(self._unsent) < wanted and not reader.ended and not self._stopping:
            if reader.position - self._positions.committable >= _MAX_AHEAD:
                return
            records = reader.read(self._batch)
            if not records:
                return
            self._counts["read"] += len(records)
            for record in records:
                self._positions.emitted(record.position)
            batch, key = Batch(records), None
            if self._key is not None:
                try:
                    key = self._key(batch[0].value)
                    Windows.check_key(key)
                except KeyboardInterrupt:
                    raise
                except BaseException as error:  # without a key no consumer can get it
                    self._failures[batch[0].position] = 1
                    self._store_dead(batch[0], error)
                    continue
            self._unsent.append((batch, key))

    def _send_unsent(self) -> bool:
        """Send each waiting record for which a consumer has room. Return whether any was sent."""
        sent = False
        passed: deque[tuple[Batch, Hashable]] = deque()
        refused: set[Hashable] = set()
        while self._unsent:
            batch, key = self._unsent.popleft()
            # A record must not overtake a refused one of its key: room may have come since.
            lease = None if key in refused else self._flow.try_acquire(batch, key)
            if lease is not None:
                self._launch(lease)
                sent = True
                continue
            passed.append((batch, key))
            if self._key is None:
                break
            refused.add(key)
        passed.extend(self._unsent)
        self._unsent = passed
        return sent

    def _launch(self, lease: Lease) -> None:
        self._counts["attempts"] += len(lease.item)
        breaker = self._breakers[lease.name]
        if breaker.state is BreakerState.OPEN:
            breaker.probe()
            self._trials.add(lease)
            self._flow.pause(lease.name, _ON_TRIAL_S, keys_wait=False)
        self._tasks[lease] = asyncio.ensure_future(self._call(lease))

    # Answers.

    async def _call(self, lease: Lease) -> None:
        batch: Batch = lease.item
        failed = np.ones(len(batch), np.bool_)
        error: BaseException | None = None
        try:
            values = [record.value for record in batch]
            target = self._targets[lease.name]
            call = target.call_in_turn(
                values if self._batch > 1 else values[0], partial(self._flow.begin, lease)
            )
            bitmap = await awaitable(call, f"{type(target).__name__}.call_in_turn")
            if isinstance(bitmap, NOT_RUN):
                way_out = "write its function without 'yield'"
                if inspect.iscoroutine(bitmap):
                    way_out = "declare its function with 'async def', so that it is awaited"
                raise TypeError(
                    f"consumer {lease.name!r} returned a {type(bitmap).__name__}, which has not "
                    f"run; {way_out}"
                )
            if self._batch == 1 or bitmap is None:
                failed[:] = False
            else:
                failed = batch.failed(bitmap)
                error = FailedInBatch(f"consumer {lease.name!r} failed this record of a batch")
        except KeyboardInterrupt:
            raise
        except NotAwaitable as raised:
            self._error = self._error or raised
            self._more.set()
            return
        except BaseException as raised:  # also SystemExit and a panic of an extension
            task = asyncio.current_task()
            if isinstance(raised, asyncio.CancelledError) and task and task.cancelling():
                raise  # it timed out, or the dispatcher ends
            error = raised
        self._tasks.pop(lease, None)
        try:
            # A tuple that timed out is sent again whole. Until then, a late answer counts if no
            # record failed.
            if lease.fate is Fate.OUT or not failed.any():
                if lease.fate in (Fate.OUT, Fate.REQUEUED):
                    for place in np.flatnonzero(~failed).tolist():
                        self._done(batch[place], "acked")
                if error is None or not failed.any():  # a bitmap may name none
                    self._refusals.pop(lease.name, None)
                    self._flow.ack(lease)
                    self._succeeded(lease)
                else:
                    self._failed(lease, failed, error)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:  # from `acked` or `dead_letters`
            self._error = self._error or raised
        self._more.set()

    def _expire(self) -> None:
        # No await in this loop: an answer in between could still ack the lease.
        for lease in self._flow.expire():
            task = self._tasks.pop(lease, None)
            if task is not None:
                task.cancel()
            if lease.began_ns is not None:
                self._targets[lease.name].timed_out()
            error = TimeoutError(
                f"consumer {lease.name!r} did not answer in timeout_s={self._timeout_s}; raise "
                "timeout_s if its calls may take longer"
            )
            self._failed(lease, np.ones(len(lease.item), np.bool_), error)

    def _failed(self, lease: Lease, failed: Any, error: BaseException) -> None:
        """Count and retry the records of a lease in the mask ``failed``, or store them as dead.

        With `Unavailable` the consumer is paused, and no attempt counts until one of the records
        was first refused ``unavailable_timeout_s`` ago.
        """
        timed_out = lease.fate is Fate.REQUEUED
        batch: Batch = lease.item.only(failed)
        n = len(batch)
        if timed_out and lease.began_ns is None and lease not in self._trials:
            self._counts["unavailable"] += n  # it was queued behind slow calls
            return
        if not isinstance(error, Unavailable):
            self._count_failure(lease, batch, failed, error, timed_out)
            return
        now_ns = self._clock()
        since_ns = min(self._refused_ns.setdefault(each.position, now_ns) for each in batch)
        if now_ns - since_ns < self._unavailable_timeout_s * 1e9:
            self._counts["unavailable"] += n
            self._flow.fail(lease)
            self._succeeded(lease)
        else:
            self._count_failure(lease, batch, failed, error, timed_out)
        self._pause(lease.name, error)

    def _count_failure(
        self, lease: Lease, batch: Batch, failed: Any, error: BaseException, timed_out: bool
    ) -> None:
        """Retry the failed records of a batch, or store them as dead; count an attempt of each.

        A `Reject` and a failure of some records always count. Any other counts if the consumer's
        breaker is closed, or for a trial while no breaker is. Before their last attempt the records
        are separated, to be tried alone.
        """
        n = len(batch)
        self._counts["timed_out" if timed_out else "failed"] += n
        rejected = isinstance(error, Reject)
        counts = True
        if rejected or not failed.all():
            self._succeeded(lease)
        else:
            counts = self._counts_failure(lease, error)
        # All records of a batch have the same number of failures: only failed ones are kept in it.
        failures = self._failures.get(batch[0].position, 0) + counts
        for record in batch:
            self._failures[record.position] = failures
        last = counts and (rejected or failures >= self._max_attempts)
        # A single record may have made the whole batch fail.
        splits = n > 1 and not isinstance(error, FailedInBatch)
        splits = splits and counts and (last or failures + 1 == self._max_attempts)
        if not timed_out:
            self._flow.fail(lease, None if failed.all() else failed, dropped=not rejected)
        if last and not splits:
            self._flow.drop(lease)
            for record in batch:
                self._store_dead(record, error)
            return
        asked_s = (error.asked_s if isinstance(error, Retry) else None) or 0.0
        base_ms, cap_ms = self._backoff_ms, self._max_backoff_ms
        for each in self._flow.split(lease, batch.singles()) if splits else [lease]:
            if not rejected:
                position = str(each.item[0].position)
                wait_ms = backoff_of(position, max(failures, 1), base_ms=base_ms, cap_ms=cap_ms)
                self._flow.delay(each, max(wait_ms / 1000, asked_s))

    # Consumers that fail again and again.

    def _any_works(self) -> bool:
        """Return whether the breaker of any consumer is closed."""
        return any(each.state is BreakerState.CLOSED for each in self._breakers.values())

    def _succeeded(self, lease: Lease) -> None:
        """Record that a lease's consumer answered; its breaker closes after a trial call."""
        trial = lease in self._trials
        self._trials.discard(lease)
        if self._breakers[lease.name].succeeded(trial):
            self._end_trial(lease.name)
            _log.info("consumer %r of a Dispatcher gets records again after a trial", lease.name)

    def _counts_failure(self, lease: Lease, error: BaseException) -> bool:
        """Report a failure to the consumer's breaker. Return whether it counts as an attempt.

        If that opens the breaker, the consumer is paused; unless it was a trial, this is logged.
        """
        breaker = self._breakers[lease.name]
        trial = lease in self._trials
        self._trials.discard(lease)
        counts = breaker.state is BreakerState.CLOSED or (trial and not self._any_works())
        open_ns = breaker.failed(error, self._clock(), trial)
        if open_ns is None:
            return counts
        if trial:
            self._end_trial(lease.name)
        else:
            _log.warning(
                "consumer %r of a Dispatcher failed repeatedly, the last time with %s: %s; it gets "
                "one record every %g s until it accepts one. Raise Reject for a record that no "
                "consumer can process: it does not count as a failure of the consumer",
                *(lease.name, type(error).__name__, error, open_ns / 1e9),
            )
        self._flow.pause(lease.name, open_ns / 1e9, keys_wait=False)
        return counts

    def _pause(self, name: Hashable, error: Unavailable) -> None:
        """Pause a consumer that refused a record, for a back-off or the longer time it requested.

        Logs a warning, once a minute, if the consumer refuses repeatedly or for long.
        """
        refusals = self._refusals[name] = self._refusals.get(name, 0) + 1
        backoff_s = capped_doubling(_FIRST_PAUSE_MS, refusals, _LONGEST_PAUSE_MS) / 1000
        pause_s = max(backoff_s, error.asked_s or 0.0)
        now_ns = self._clock()
        self._asked_ns[name] = max(self._asked_ns[name], now_ns + int(pause_s * 1e9))
        many = refusals >= _MANY_REFUSALS or pause_s >= _WARN_EVERY_S
        if many and now_ns >= self._warn_ns.get(name, now_ns):
            self._warn_ns[name] = now_ns + int(_WARN_EVERY_S * 1e9)
            _log.warning(
                "consumer %r of a Dispatcher has refused %d calls in a row, the last one with %s; "
                "its records wait or go to other consumers, and no attempt is counted",
                *(name, refusals, error),
            )
        keys_wait = self._breakers[name].state is BreakerState.CLOSED
        self._flow.pause(name, pause_s, keys_wait=keys_wait)

    def _end_trial(self, name: Hashable) -> None:
        """End the pause of a consumer's trial, unless the consumer requested a longer one."""
        self._flow.resume(name)
        if (left_ns := self._asked_ns[name] - self._clock()) > 0:
            self._flow.pause(name, left_ns / 1e9)

    def _store_dead(self, record: Record, error: BaseException) -> None:
        if self._dead_letters is None:
            raise RecordDead(
                f"record {record.position} failed "
                f"{counted(self._failures[record.position], 'time')}, the "
                f"last time with {type(error).__name__}: {error}; pass dead_letters=, a function "
                "that stores such records"
            ) from error
        storing = self._dead_letters(record.position, record.value, error)
        if inspect.isawaitable(storing):
            task = asyncio.ensure_future(storing)
            self._storing.add(task)
            task.add_done_callback(partial(self._stored, record))
        else:
            refuse_unrun(storing, "dead_letters")  # a generator
            self._done(record, "dead")

    def _stored(self, record: Record, task: asyncio.Future[Any]) -> None:
        self._storing.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            self._done(record, "dead")
        else:
            self._error = self._error or error
        self._more.set()

    def _done(self, record: Record, how: str) -> None:
        if self._positions.acked(record.position):
            self._counts[how] += 1
            self._failures.pop(record.position, None)
            self._refused_ns.pop(record.position, None)
            if how == "acked" and self._acked is not None:
                refuse_unrun(self._acked(record.position, record.value), "acked")


async def _closed(target: Target) -> None:
    await target.close()
