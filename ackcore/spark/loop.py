"""A stream whose micro-batches ackcore makes: a loop in a thread of the driver.

It needs neither Structured Streaming nor a JVM in this process.  All spouts must be planned.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Protocol

from ackcore.retry import capped_doubling
from ackcore.spark.base.clocks import Clock
from ackcore.spark.base.interrupts import cancel_until
from ackcore.spark.base.session import (
    ALIVE_S,
    JobTag,
    activate,
    job_thread,
    keep_alive,
    use_own_group,
)
from ackcore.spark.deployment import Deployment
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.planned.planned_source import SourceError
from ackcore.spark.stream import Stream, as_error

_log = logging.getLogger("ackcore")

#: The pause after a look at the sources that found nothing: at least, as a multiple of the duration
#: and of the CPU time of the look, and at most.
POLL_S, SHARE, CPU_SHARE, LONGEST_S = 0.1, 20.0, 60.0, 5.0


class LoopStream(Stream):
    """A stream without Spark's query, of planned spouts only; the constructor starts its thread."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        assert self._rows is not None  # all spouts are planned
        self._name = f"ackcore-{uuid.uuid4()}"
        self._tag = JobTag(self._spark, self._name)
        self._alive_s = time.monotonic()
        self._pacing = Pacing(
            self,
            self._rows,
            self._engine.clock,
            self._wait_for_work,
            ends=self._available_now,
            interval_s=deployment.interval_s,
            poll_s=self._poll_s,
        )
        self._is_set_up = False
        self.listeners.started(deployment.topology, self.counts)
        self._start(job_thread(self._spark, self._run_to_end, "ackcore-query"))

    # -- for `Pacing`: micro-batches that are needed without new rows -----------------------------

    def is_unfinished(self) -> bool:
        """Return whether a recorded micro-batch is not done."""
        return self._state.last_plan != self._state.last_done

    def next_due_ms(self) -> int | None:
        """Return the time at which the first waiting record is due; None if none waits."""
        return self._engine.next_due_ms

    def is_called(self) -> bool:
        """Return whether a replay waits for a micro-batch."""
        return bool(self._state.pending_replays())

    def check(self) -> None:
        """Raise `RunFailed` if this and the last call saw an ended session; else keep it alive."""
        self._check_session()
        now = time.monotonic()
        if now - self._alive_s >= ALIVE_S:
            self._alive_s = now
            keep_alive(self._spark)

    # -- the loop ---------------------------------------------------------------------------------

    def _wait_for_work(self, seconds: float) -> bool:
        """Wait for ``seconds`` at most; return True if no further micro-batch may begin."""
        with self._changed:
            self._changed.notify_all()  # a look at the sources has ended
        return self._leaving.wait(seconds)

    def _step(self) -> bool:
        """Wait for the need of a micro-batch, and run it; return False at the end.

        Raises an error after which a restart is useless, or has been tried too often.
        """
        if not self._is_set_up:
            self._is_set_up = True
            use_own_group(self._spark, self._name, f"ackcore: {self._state.url}")
            self._tag.add()
            activate(self._spark)
        try:
            if self._leaving.is_set() or not self._pacing.next():
                if not self._leaving.is_set():
                    self._limit.at_end(self.counts)
                return False
            done = self._state.last_done
            with self._working():
                if self._leaving.is_set():
                    return False
                self._take(0 if done is None else done + 1, [])
            self._pacing.ran(self.recent[-1].records)
        except BaseException as caught:
            error = as_error(caught)
            if not self._may_restart(error):
                raise error from None
        return True

    def _read_all_available(self) -> None:
        if self._available_now:
            self.ended.wait()

    def _cancel_jobs(self) -> None:
        """Cancel the jobs of this stream every 0.2 s until it has ended, for 4 s at most."""
        cancel_until(self._tag, self.ended)


class Work(Protocol):
    """The reasons for a micro-batch apart from new rows, which `Pacing` reads.

    `LoopStream` and `Pacemaker` have these methods.
    """

    def is_unfinished(self) -> bool:
        """Return whether a recorded micro-batch must be continued."""

    def next_due_ms(self) -> int | None:
        """Return the time at which the first waiting record is due; None if none waits."""

    def is_called(self) -> bool:
        """Return whether a replay, for example, waits for a micro-batch."""

    def check(self) -> None:
        """Raise the error that ends the query if its session has ended."""


@dataclass(eq=False, repr=False)
class Pacing:
    """The times at which a stream needs a micro-batch.

    ``work``: the reasons for a micro-batch apart from new rows. ``rows``: the planned spouts, or
    None. ``clock``: returns the time in milliseconds, by the clock of the due times. ``pause``:
    waits for a number of seconds; returns True if the query is to stop. ``ends``: whether the query
    ends when no rows and no retries are left. ``interval_s``: the interval of the trigger in
    seconds; 0 for micro-batches without a pause. ``poll_s``: the longest time between two readings
    of `clock` while a record waits, and the pause after a micro-batch that took nothing although
    rows are left. ``seconds``, ``cpu``: return the time, and the CPU time of this thread, in
    seconds.
    """

    #: The interval in which requests of other processes are checked, in seconds.
    CALLED_S: ClassVar = 1.0

    work: Work
    rows: PlannedRows | None
    clock: Clock
    pause: Callable[[float], bool]
    _: KW_ONLY
    ends: bool
    interval_s: float
    poll_s: float
    seconds: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.thread_time
    #: The times of the next trigger (-1 without an interval), of the next check of requests, and
    #: of the next look at the sources.
    _trigger_s: float = -1.0
    _call_s: float = -1.0
    _look_s: float = -1.0
    _failures: int = 0
    #: Whether the last look found rows; None if a look is due.
    _found: bool | None = None

    def next(self) -> bool:
        """Wait until a micro-batch is needed; return False if the query is to end.

        Raises SourceError if a source fails for good, and the error of `Work.check`.
        """
        while True:
            left = self._trigger_s - self.seconds()
            if left <= 0:
                needed = self._is_needed()
                if self.interval_s:
                    # Like Spark: at multiples of the interval.
                    self._trigger_s = (self.seconds() // self.interval_s + 1) * self.interval_s
                if needed:
                    return True
                if self._is_over():
                    return False
                left = self._left_s()
            else:
                self._check()
            if self.pause(min(left, self.CALLED_S)):
                return False

    def ran(self, records: int) -> None:
        """Plan the next look at the sources after a micro-batch with ``records`` new records.

        It is at once, except in a query that ends: that pauses for ``poll_s`` if there were no
        records, because a source may not answer.
        """
        self._found = None
        self._look_s = self.seconds() + (self.poll_s if self.ends and not records else 0.0)

    def _is_needed(self) -> bool:
        due = self.work.next_due_ms()
        if self.work.is_unfinished() or (due is not None and due <= self.clock()):
            return True
        if self._check() and self._is_called():
            return True
        now = self.seconds()
        if now >= self._look_s or self.interval_s:
            self._look(now)
        return bool(self._found)

    def _check(self) -> bool:
        """Check the session, at most once a second; return whether this call has done it."""
        now = self.seconds()
        if now < self._call_s:
            return False
        self._call_s = now + self.CALLED_S
        self.work.check()
        return True

    def _is_called(self) -> bool:
        try:
            return self.work.is_called()
        except (OSError, RuntimeError):
            # The next micro-batch takes the requests, and raises the error if it lasts.
            return False

    def _look(self, now: float) -> None:
        """Store whether the sources have new rows, and the time of the next look.

        If a source does not answer, logs a warning the first time; raises SourceError if it fails
        for good. ``now``: the present time, by ``seconds``.
        """
        if self.rows is None:
            self._found, self._look_s = False, math.inf
            return
        cpu = self.cpu()
        try:
            self._found = self.rows.is_behind if self.ends else self.rows.has_new()
            self._failures = 0
        except SourceError:
            raise
        except Exception as error:
            self._found = None
            if not self._failures:
                _log.warning(
                    "a source did not answer whether it has new rows, and is polled again: %s",
                    error,
                )
            self._failures += 1
        after = self.seconds()
        pause = max(pause_s(after - now, self._failures), CPU_SHARE * (self.cpu() - cpu))
        self._look_s = after + pause

    def _is_over(self) -> bool:
        """Return whether the query ends by itself, and no row, retry or replay is left for it."""
        return (
            self.ends
            and self._found is False
            and self.work.next_due_ms() is None
            and not self.work.is_called()
        )

    def _left_s(self) -> float:
        """Return the seconds until the next trigger, at least 0.001.

        Without an interval, return those until the next check, look or retry.
        """
        now = self.seconds()
        if self.interval_s:
            return max(self._trigger_s - now, 0.001)
        pauses = [self._call_s - now, self._look_s - now]
        due = self.work.next_due_ms()
        if due is not None:
            # In steps, because the clock may differ from this machine's.
            pauses.append(min((due - self.clock()) / 1000, self.poll_s))
        return max(min(pauses), 0.001)


def pause_s(took_s: float, failures: int) -> float:
    """Return the seconds until the next poll, from 0.1 to 5; more after a long or failed poll.

    ``took_s``: the duration of the last poll, which found nothing. ``failures``: the number of
    failed polls in a row.
    """
    if failures:
        return capped_doubling(round(POLL_S * 1000), failures, round(LONGEST_S * 1000)) / 1000
    return min(LONGEST_S, max(POLL_S, SHARE * took_s))
