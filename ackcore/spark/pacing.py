"""The times at which a loop begins its micro-batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ackcore.spark.base.clocks import Clock
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.kafka.watch import pause_s
from ackcore.spark.planned.planned_source import SourceError

_log = logging.getLogger("ackcore")

#: The pause after a look at the sources, as a multiple of its CPU time.
_SHARE = 60.0


class Work(Protocol):
    """The work that a loop has apart from new rows."""

    def is_unfinished(self) -> bool:
        """Return whether a recorded micro-batch is not done."""

    def next_due_ms(self) -> int | None:
        """Return the time at which the first waiting record is due; None if none waits."""

    def is_called(self) -> bool:
        """Return whether a replay waits for a micro-batch."""

    def check(self) -> None:
        """Raise the error that ends the query if its session has ended."""


class Pacing:
    """The wait for the next micro-batch.

    ``work``: the work apart from new rows. ``rows``: the sources. ``clock``: returns the time in
    milliseconds, by the clock of the due times. ``pause``: waits for a number of seconds; returns
    True if the query is to stop. ``ends``: whether the query ends when no rows and no retries are
    left. ``interval_s``: the interval of the trigger in seconds; 0 for micro-batches without a
    pause. ``poll_s``: the longest time between two readings of `clock` while a record waits, and
    the pause after a micro-batch that took nothing although rows are left. ``seconds``, ``cpu``:
    return the time, and the CPU time of this thread, in seconds.
    """

    #: The interval in which requests of other processes are checked, in seconds.
    CALLED_S = 1.0

    def __init__(
        self,
        work: Work,
        rows: PlannedRows,
        clock: Clock,
        pause: Callable[[float], bool],
        *,
        ends: bool,
        interval_s: float,
        poll_s: float,
        seconds: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._work = work
        self._rows = rows
        self._clock = clock
        self._pause = pause
        self._ends = ends
        self._interval_s = interval_s
        self._poll_s = poll_s
        self._seconds = seconds
        self._cpu = cpu
        #: The times of the next trigger, of the next check of requests, and of the next look.
        self._trigger_s = self._call_s = self._look_s = -1.0
        self._failures = 0
        #: Whether the last look found rows; None if a look is due.
        self._found: bool | None = None

    def next(self) -> bool:
        """Wait until a micro-batch is needed; return False if the query is to end."""
        while True:
            left = self._trigger_s - self._seconds()
            if left <= 0:
                needed = self._is_needed()
                if needed or self._interval_s:
                    self._trigger_s = self._next_trigger()
                if needed:
                    return True
                if self._is_over():
                    return False
                left = self._left_s()
            else:
                self._check()
            if self._pause(min(left, self.CALLED_S)):
                return False

    def ran(self, records: int) -> None:
        """Take note of a micro-batch that took ``records`` new records: look again at once.

        A query that ends pauses if there were none: a source may not answer.
        """
        self._found = None
        self._look_s = self._seconds() + (self._poll_s if self._ends and not records else 0.0)

    def _next_trigger(self) -> float:
        if not self._interval_s:
            return -1.0
        # Like Spark: at multiples of the interval.
        return (self._seconds() // self._interval_s + 1) * self._interval_s

    def _is_needed(self) -> bool:
        due = self._work.next_due_ms()
        if self._work.is_unfinished() or (due is not None and due <= self._clock()):
            return True
        if self._check() and self._is_called():
            return True
        now = self._seconds()
        if now >= self._look_s or self._interval_s:
            self._look(now)
        return bool(self._found)

    def _check(self) -> bool:
        """Check the session and return True, if the last check is long ago."""
        now = self._seconds()
        if now < self._call_s:
            return False
        self._call_s = now + self.CALLED_S
        self._work.check()
        return True

    def _is_called(self) -> bool:
        try:
            return self._work.is_called()
        except (OSError, RuntimeError):
            # The next micro-batch takes the requests, and raises the error if it lasts.
            return False

    def _look(self, now: float) -> None:
        """Look for new rows."""
        cpu = self._cpu()
        try:
            self._found = self._rows.is_behind if self._ends else self._rows.has_new()
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
        after = self._seconds()
        pause = max(pause_s(after - now, self._failures), _SHARE * (self._cpu() - cpu))
        self._look_s = after + pause

    def _is_over(self) -> bool:
        """Return whether nothing is left for a query that ends."""
        return (
            self._ends
            and self._found is False
            and self._work.next_due_ms() is None
            and not self._work.is_called()
        )

    def _left_s(self) -> float:
        """Return the seconds until something may be needed."""
        now = self._seconds()
        if self._interval_s:
            return max(self._trigger_s - now, 0.001)
        pauses = [self._call_s - now, self._look_s - now]
        due = self._work.next_due_ms()
        if due is not None:
            # In steps, because the clock may differ from this machine's.
            pauses.append(min((due - self._clock()) / 1000, self._poll_s))
        return max(min(pauses), 0.001)
