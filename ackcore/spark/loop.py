"""A stream whose micro-batches ackcore makes: a loop in a thread of the driver.

It needs neither Structured Streaming nor a JVM in this process.  All spouts must be planned.
"""

from __future__ import annotations

import time
import uuid

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
from ackcore.spark.engine.insist import RunFailed
from ackcore.spark.pacing import Pacing
from ackcore.spark.restarts import end_of
from ackcore.spark.stream import Stream


class LoopStream(Stream):
    """A topology whose micro-batches a loop of ackcore runs, for planned spouts."""

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        assert self._rows is not None  # all spouts are planned
        self._name = f"ackcore-{uuid.uuid4()}"
        self._tag = JobTag(self._spark, self._name)
        self._alive_s = time.monotonic()
        #: The reason why the session ended, as of the last check.
        self._end: str | None = None
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
        self._start(job_thread(self._spark, self._attend, "ackcore-query"))

    # -- the work apart from new rows, for `Pacing` -----------------------------------------------

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
        """Raise `RunFailed` if the session has ended; keep a session of Spark Connect alive."""
        end, before = end_of(self._spark), self._end
        if end is not None and end == before:
            raise RunFailed(end)
        self._end = end  # one lost answer of the JVM is no end
        now = time.monotonic()
        if now - self._alive_s >= ALIVE_S:
            self._alive_s = now
            keep_alive(self._spark)

    # -- the loop ---------------------------------------------------------------------------------

    def _wait_for_work(self, seconds: float) -> bool:
        """Wait; return True if the stream is to begin no micro-batch any more."""
        with self._changed:
            self._changed.notify_all()  # a look at the sources has ended
        return self._leaving.wait(seconds)

    def _goes_on(self) -> bool:
        """Wait until a micro-batch is needed and run it; return whether to go on."""
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
            error = caught
            if not isinstance(error, Exception):
                error = RuntimeError(f"{type(error).__name__} was raised: {error}")
            if not self._may_begin_again(error):
                raise error from None
        return True

    def _release(self) -> None:
        pass

    def _settle_end(self) -> None:
        pass

    def _read_all_available(self) -> None:
        if self._available_now:
            self.ended.wait()

    def _abandon(self) -> None:
        """Cancel the jobs of this stream until its thread ends."""
        cancel_until(self._tag, self.ended)
