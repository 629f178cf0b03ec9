"""A stream: the common part of `LoopStream` and `SparkStream`, and the errors that end it.

A thread runs until the end: it restarts the work after a temporary error, and finally closes the
checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from ackcore.retry import capped_doubling, whole_ms
from ackcore.spark.base.errors import StateError, one_line
from ackcore.spark.base.interrupts import RunCancelled
from ackcore.spark.base.session import is_connect, is_jvm_lost, is_stopped
from ackcore.spark.base.versions import Py4JError, Py4JJavaError
from ackcore.spark.deployment import Deployment
from ackcore.spark.engine.causes import StreamLimit
from ackcore.spark.engine.insist import RunFailed, Stopped
from ackcore.spark.engine.progress import Progress
from ackcore.spark.engine.setup import InputFrame

_log = logging.getLogger("ackcore")

#: The number of micro-batches in `Query.recent_progress`.
_RECENT = 100
#: The pause before the first restart; it doubles with each further one.
_RESTART_MS = 1_000
#: The seconds that the end of Python waits for the end of a stream.
_EXIT_S = 10.0
#: Python errors that may be temporary: a source or a worker that could not be reached, a lost
#: connection.  ackcore's own errors come after their retries.
_FROM_OUTSIDE = (Py4JError, PySparkException, OSError, EOFError)
#: Ends of the names of Java classes for lasting errors: invalid queries and settings, offsets that
#: do not fit, and a stopped Spark.
_LASTING = (
    "AnalysisException",
    "AssertionError",
    "IllegalArgumentException",
    "IllegalStateException",
    "UnsupportedOperationException",
    "ConcurrentModificationException",
    "ConcurrentStreamLogUpdate",
    "LinkageError",
    "NoClassDefFoundError",
    "NoSuchMethodError",
    "MatchError",
)
_DEEPEST = 50
_WAY_OUT = "start again on the same checkpoint"


class Stream(ABC):
    """A topology that runs on a stream; the constructor of a subclass starts it.

    ``deployment``: the topology and its open checkpoint; closed when the stream has ended.

    Attributes: ``spark_query``: Spark's own query; None while it is being started, and if Spark has
    none. ``ended``: set when the stream has ended. ``error``: the error that ends the stream.
    ``recent``: the reports of the last 100 micro-batches, the newest one last. ``counts``: the
    counts after the last finished micro-batch.
    """

    #: The seconds between two readings of the clock while a record waits.
    _poll_s = 0.2
    #: The beginning of the warning of a restart.
    interrupted = "the micro-batch failed"

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._state = deployment.state
        self._spark = deployment.spark
        self._settings = deployment.topology.settings
        self._available_now = deployment.available_now
        self._rows = deployment.rows
        self.listeners = deployment.listeners
        #: Set to begin no new micro-batch; set to abandon the running one.
        self._leaving, self._stopping = threading.Event(), threading.Event()
        #: The thread that runs a micro-batch.  `_changed` is notified of changes of this object.
        self._at_work: threading.Thread | None = None
        self._changed = threading.Condition()
        self._restarts = 0
        #: The reason why the session ended, as of the last check.
        self._end: str | None = None
        self.spark_query: StreamingQuery | None = None
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.recent: deque[Progress] = deque(maxlen=_RECENT)
        self._engine = deployment.engine(self._pause)
        self.counts = self._engine.counts
        self._limit = StreamLimit(
            deployment.limit, self.counts, self._engine.clock(), deployment.checkpoint
        )

    def _start(self, thread: threading.Thread) -> None:
        """Record the topology, and start the thread that calls `_run_to_end`.

        To be called when nothing can refuse the start any more.
        """
        with contextlib.suppress(StateError):  # the first micro-batch repeats it
            self._state.record_topology()
        self._thread = thread
        atexit.register(self._stop_at_exit)
        thread.start()

    @abstractmethod
    def _step(self) -> bool:
        """Do a part of the work; return whether more is left.

        A part is a micro-batch of `LoopStream`, or a query of Spark until it ends (`SparkStream`).
        """

    @abstractmethod
    def _cancel_jobs(self) -> None:
        """Cancel the jobs of the running micro-batch. Waits a few seconds at most."""

    def _abandon(self) -> None:
        """Stop the running micro-batch: by default, cancel its jobs."""
        self._cancel_jobs()

    def _release(self) -> None:  # noqa: B027 - optional
        """Stop the threads and delete the files that the subclass made; `_close` calls it first."""

    @abstractmethod
    def _read_all_available(self) -> None:
        """Wait until Spark has read its sources up to now, or an availableNow stream has ended."""

    def _settle_end(self) -> None:  # noqa: B027 - optional
        """Wait, some seconds at most, until Spark has recorded the end of its last micro-batch."""

    def _take(self, number: int, inputs: Sequence[InputFrame]) -> None:
        """Run one micro-batch, report it to the listeners, and raise TooManyDead beyond the limit.

        A micro-batch that Spark repeats after its end is neither reported nor counted again.
        ``inputs``: the new rows of spouts that are not planned.
        """
        again = self._state.is_done(number)
        if not again:
            self.listeners.began(number)
        progress = self._engine.process(number, inputs)
        decision = self._state.decision(number)
        if not self.recent or self.recent[-1].batch_id < number:  # Spark may repeat one
            self.recent.append(progress)
        self.counts = self._engine.counts
        if decision is not None and not again:
            self.listeners.done(progress, self.counts, decision)
            self._limit.after(number, decision.all_dead, self.counts)
        self._restarts = 0

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Mark this thread as the one that runs a micro-batch, during the ``with`` block."""
        with self._changed:
            self._at_work = threading.current_thread()
        try:
            yield
        finally:
            with self._changed:
                self._at_work = None
                self._changed.notify_all()

    def _pause(self, seconds: float) -> bool:
        """Wait for ``seconds`` at most; return True if the stream is being stopped."""
        return self._stopping.wait(seconds)

    def _check_session(self) -> None:
        """Raise `RunFailed` if this and the last call saw an ended session."""
        end, before = end_of(self._spark), self._end
        if end is not None and end == before:
            raise RunFailed(end)
        self._end = end  # one lost answer of the JVM is no end

    def _lose_session(self, lost: RunFailed, before: BaseException | None) -> None:
        """Make the loss of the session the stream's error; its cause is the error before it.

        ``lost``: the loss, which is seen about once a second until the stream has ended. ``before``
        stays the error if it is the same loss.
        """
        if isinstance(before, RunFailed) and str(before) == str(lost):
            lost = before
        elif not isinstance(before, Stopped):
            lost.__cause__ = before
        self.error = lost

    def _run_to_end(self) -> None:
        """Run the stream, in its own thread; then close it, call ``on_end``, and set ``ended``."""
        try:
            while self._step():
                pass
        except Exception as error:
            if self.error is None and not self._leaving.is_set():
                self.error = error
        finally:
            with self._changed:
                # The checkpoint stays locked while a micro-batch may write to it.
                self._changed.wait_for(lambda: self._at_work is None)
            if isinstance(self.error, Stopped):
                self.error = None
            # After an error, too: otherwise all that wait for the end would wait for ever.
            for step in (self._close, lambda: self.listeners.ended(self.error, self.counts)):
                try:
                    step()
                except BaseException as error:  # also KeyboardInterrupt of a listener
                    self.error = self.error or as_error(error)
            if self.error:
                _log.error("the query ended: %s", self.error)
            atexit.unregister(self._stop_at_exit)
            with self._changed:
                self.ended.set()
                self._changed.notify_all()

    def _close(self) -> None:
        """Close what the stream has opened, then the deployment."""
        with contextlib.closing(self._deployment):
            self._release()

    def _may_restart(self, error: Exception) -> bool:
        """Wait after a temporary error, and return True; return False if the stream must end.

        It ends after a lasting error, after ``max_restarts`` restarts, with its session, or if it
        is being stopped.
        """
        if self._leaving.is_set():
            return False
        if is_connect(self._spark) and isinstance(error, RunCancelled):
            return False  # it says more than the client, which has closed the lost session
        end = end_of(self._spark)
        if end is not None:
            self._lose_session(RunFailed(end), error)
            return False
        self._restarts += 1
        if not may_pass(error) or self._restarts > self._settings.max_restarts:
            return False
        longest_ms = whole_ms(self._settings.max_backoff_s)
        waits = capped_doubling(_RESTART_MS, self._restarts, longest_ms)
        _log.warning(
            "%s; ackcore restarts it in %.1f s, restart %d of %d: %s",
            self.interrupted,
            waits / 1000,
            self._restarts,
            self._settings.max_restarts,
            one_line(error),
        )
        return not self._leaving.wait(waits / 1000)

    # ---------------------------------------------------------------------------------- the end

    def wait(self, timeout: float | None) -> bool:
        """Wait ``timeout`` seconds at most; return whether the stream ended, or raise its error.

        None waits without a limit, and raises RuntimeError in a thread of the stream.
        """
        if timeout is None:
            self._refuse_own_thread("await_termination()")
        ended = self.ended.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        if ended and self.error is not None:
            raise self.error
        return ended

    def process_all_available(self) -> None:
        """Wait until all present records are ACKED or DEAD, or the query ends; raise its error."""
        self._refuse_own_thread("process_all_available()")
        reached = self._reaching_ends()
        self._read_all_available()

        def is_through() -> bool:
            return self.ended.is_set() or (
                (reached is None or reached()) and not self._is_waiting()
            )

        with self._changed:
            # In steps: a look of the heartbeat at a source changes nothing of this object.
            while not self._changed.wait_for(is_through, self._poll_s):
                pass
        if self.ended.is_set() and self.error is not None:
            raise self.error

    def _is_own_thread(self) -> bool:
        """Return whether the end of the stream waits for the thread that calls this."""
        return threading.current_thread() in (self._at_work, self._thread)

    def _refuse_own_thread(self, call: str) -> None:
        """Raise RuntimeError if a thread of this stream makes the call, which would never end."""
        if self._is_own_thread():
            raise RuntimeError(
                f"{call} was called by a sink, a source or a listener of the query, which would "
                "wait for itself; call it in another thread. To end the query, call stop() here"
            )

    def _reaching_ends(self) -> Callable[[], bool] | None:
        """Return a function that returns whether the planned rows that exist now are taken.

        Returns None without planned spouts.
        """
        rows = self._rows
        try:
            return None if rows is None or rows.is_closed else rows.reaching_ends()
        except Exception:
            if rows is None or not rows.is_closed:
                raise
            return None  # the query has ended meanwhile

    def _is_waiting(self) -> bool:
        """Return whether a micro-batch runs, or a record or a replay waits."""
        state = self._state
        # A planned micro-batch may have taken the replays; the commits and the counts of a done one
        # may be missing.
        under_way = self._at_work is not None or state.last_plan != state.last_done
        return under_way or bool(self.counts.waiting or state.pending_replays())

    def stop(self, finish: bool) -> None:
        """Stop the stream, with ``finish`` after its micro-batch, and wait for its end.

        In a thread of the stream it returns at once.
        """
        self._leave(finish)
        with self._changed:
            if self._is_own_thread():
                threading.Thread(target=self.stop, args=(finish,), daemon=True).start()
                return
        if finish:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._at_work is None or self._stopping.is_set() or self.ended.is_set()
                )
            self._settle_end()
            self._stopping.set()
        if not self.ended.is_set():
            self._abandon()
        self._thread.join()

    def _stop_at_exit(self) -> None:
        """Stop the stream at the end of Python, for example after Ctrl-C.

        Otherwise a thread that returns from native code later aborts the process, and the next
        start counts a crash. A call of a sink may delay the exit by 10 s at most, after the
        cancellation of its jobs.
        """
        if not self._thread.is_alive():
            return  # in a forked child: the query is the parent's
        self._leave(finish=False)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no thread here
            self._cancel_jobs()
            with self._changed:
                if not self._changed.wait_for(lambda: self._at_work is None, _EXIT_S):
                    return
            # Not before: Spark's stop waits without a limit for the call of a sink.
            self._abandon()
        self._thread.join(_EXIT_S)

    def _leave(self, finish: bool) -> None:
        """Begin no new micro-batch; unless ``finish``, also make the running one stop."""
        self._leaving.set()
        if not finish:
            self._stopping.set()
        with self._changed:
            self._changed.notify_all()


# ------------------------------------------------------------------------------ errors that end it


def as_error(error: BaseException) -> Exception:
    """Return an exception as a query's error: a SystemExit, for example, as a RuntimeError."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__} was raised: {error}")


def may_pass(error: BaseException) -> bool:
    """Return whether the error may be temporary, so that a restart of the query could succeed."""
    if not isinstance(error, _FROM_OUTSIDE) or isinstance(error, AnalysisException):
        return False
    return not any(name.endswith(_LASTING) for name in _java_classes(error))


def _java_classes(error: BaseException) -> Iterator[str]:
    """Yield the names of the classes of a Java error and its causes."""
    java: Any = getattr(error, "_origin", None)
    if isinstance(error, Py4JJavaError):
        java = error.java_exception
    for _ in range(_DEEPEST):
        if java is None:
            return
        yield str(java.getClass().getName())
        java = java.getCause()


def end_of(spark: Any) -> str | None:
    """Return the reason why a session ended, or None if it runs or is not known to have ended."""
    gateway = None if is_connect(spark) else spark.sparkContext._gateway
    process = getattr(gateway, "proc", None)
    status = None if process is None else process.poll()
    if status is not None:
        return f"Spark's JVM ended with exit status {status}; {_WAY_OUT}, in a new process"
    if is_jvm_lost(spark):
        return f"Spark's JVM cannot be reached any more; {_WAY_OUT}, in a new process"
    return (
        f"the SparkSession was stopped; {_WAY_OUT}, with another session"
        if is_stopped(spark)
        else None
    )
