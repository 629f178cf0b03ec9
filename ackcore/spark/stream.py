"""The execution of a stream: the callback for each micro-batch, and the thread that waits.

Spark's query calls `Stream._each` in a Py4J thread, one micro-batch after the other.  Another
thread waits for the end of Spark's query.  It restarts the query after a temporary error or while
records wait, and finally closes the checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from ackcore.dead_limit import TooManyDead
from ackcore.retry import capped_doubling, whole_ms
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.versions import Py4JError
from ackcore.spark.deployment import Deployment
from ackcore.spark.engine.causes import StreamLimit
from ackcore.spark.engine.insist import RunFailed, Stopped
from ackcore.spark.engine.progress import Progress
from ackcore.spark.engine.setup import InputFrame
from ackcore.spark.heartbeat import (
    Beats,
    Pacemaker,
    find_log,
    forget_beats,
    trim_log,
    with_heartbeat,
)
from ackcore.spark.kafka.watch import Watch
from ackcore.spark.restarts import end_of, for_spark, is_active, may_pass
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")

#: The time in seconds that Spark may take to record the end of a micro-batch.
_COMMIT_S, _CHECKSUM_S = 10.0, 0.5
#: The time in seconds between a call of `Stream.stop` and the stop of Spark's query in the JVM.
_STOP_S = 30.0
#: The number of micro-batches in `Query.recent_progress`.
_RECENT = 100


class Stream:
    """A topology that runs on a stream; the constructor starts it.

    Parameters
    ----------
    deployment : Deployment
        The topology and its open checkpoint; closed when the stream has ended.

    Attributes
    ----------
    spark_query : StreamingQuery or None
        Spark's own query; None while it is being started.
    ended : threading.Event
        Set when the stream has ended.
    error : Exception or None
        The error that ends the stream.
    recent : deque of Progress
        The last micro-batches, the newest one last.
    counts : Counts
        The counts after the last finished micro-batch.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._state = deployment.state
        self._spark = spark = deployment.spark
        self._settings = deployment.topology.settings
        self._available_now = deployment.available_now
        self._offsets, self._groups = deployment.offsets, deployment.groups
        self.listeners = deployment.listeners
        #: Set to begin no new micro-batch; set to abandon the running one.
        self._leaving, self._stopping = threading.Event(), threading.Event()
        #: The thread that runs a micro-batch.  `_changed` is notified of changes of this object.
        self._at_work: threading.Thread | None = None
        self._changed = threading.Condition()
        self._restarts = 0
        #: The number of calls that wait for the end and raise its error.
        self._awaited = 0
        self.spark_query: StreamingQuery | None = None
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.recent: deque[Progress] = deque(maxlen=_RECENT)
        self._engine = deployment.engine(self._pause)
        self.counts = self._engine.counts
        self._limit = StreamLimit(
            deployment.limit, self.counts, self._engine.clock(), deployment.checkpoint
        )
        self._poll_s = self._settings.heartbeat_s
        self._spark_checkpoint = deployment.spark_checkpoint
        self._beats = Beats.beside(spark)
        self._pacemaker: Pacemaker | None = None
        self._watch: Watch | None = None
        if not self._available_now:
            if self._offsets is not None:
                self._watch = Watch(self._offsets.has_new, self._beats.advance)
            self._pacemaker = Pacemaker(
                self._beats.advance,
                self._engine.clock,
                self._settings.heartbeat_s,
                self._is_called,
            )
            self._pacemaker.schedule(self._engine.next_due_ms)
        try:
            frame, self._spout = _united(deployment.topology)
            self._has_frame = frame is not None
            beaten = with_heartbeat(spark, frame, self._beats.directory)
            self._writer = (
                beaten.writeStream.foreachBatch(self._each)
                # Hadoop unescapes nothing after the scheme: an escaped path would be another one.
                .option("checkpointLocation", f"file://{self._spark_checkpoint}")
            )
            if deployment.trigger:
                self._writer = self._writer.trigger(**deployment.trigger)
            self.listeners.started(deployment.topology, self.counts)
            try:
                self.spark_query = self._begin()
            except BaseException as error:
                self.listeners.ended(error, self.counts)
                raise
        except BaseException:
            self._beats.close()
            raise
        for one in (self._pacemaker, self._watch):
            if one is not None:
                one.start()
        self._thread = threading.Thread(target=self._attend, name="ackcore-query", daemon=True)
        self._thread.start()

    def _is_called(self) -> bool:
        """Return whether a replay, or a commit that failed, needs a micro-batch."""
        groups = self._groups
        return bool(self._state.pending_replays()) or (groups is not None and groups.has_commit_due)

    def _begin(self) -> StreamingQuery:
        """Start Spark's query from the checkpoint."""
        with fenced(self._state.check_owner):
            # After a takeover, Spark's part belongs to the other driver, too.
            self._state.check_owner()
            forget_beats(self._spark_checkpoint)
        if self._watch is not None:
            self._watch.look_again()
        if self._available_now and self._is_owed():
            # Retries and Kafka records need a micro-batch even if no source has new data.
            self._beats.advance()
        return _SparkQuery(self._writer.start(), lambda: self._leave(finish=False))

    def _each(self, frame: DataFrame, number: int) -> None:
        """Run one micro-batch. Spark calls this."""
        ended: Exception | None = None
        with self._changed:
            self._at_work = threading.current_thread()
        try:
            if self._leaving.is_set():
                raise Stopped(f"stopped before micro-batch {number}")
            # Before the plan is made, which answers all beats.  Spark waits for this call.
            if self._beats.clear():
                self._state.check_owner()
                with contextlib.suppress(OSError):
                    log = find_log(self._spark_checkpoint)
                    if log is not None:
                        trim_log(log)
            again = self._state.is_done(number)
            if not again:
                self.listeners.began(number)
            inputs = [InputFrame(frame, self._spout)] if self._has_frame else []
            progress = self._engine.process(number, inputs)
            decision = self._state.decision(number)
            self.recent.append(progress)
            self.counts = self._engine.counts
            if decision is not None and not again:
                self.listeners.done(progress, self.counts, decision)
                self._limit.after(number, decision.all_dead, self.counts)
            self._restarts = 0
            if self._pacemaker is not None:
                self._pacemaker.schedule(self._engine.next_due_ms)
            if self._watch is not None:
                self._watch.look_again()
        except BaseException as error:
            # Kept here: Spark would only show its text within a Java stack trace.  If this thread
            # ended, Spark would wait for ever for its answer.
            if not isinstance(error, Exception):
                error = RuntimeError(f"{type(error).__name__} was raised: {error}")
            self.error = ended = error
        finally:
            with self._changed:
                self._at_work = None
                self._changed.notify_all()
        if ended is not None:
            if isinstance(ended, Stopped):
                self._wait_for_sparks_stop()
            raise for_spark(ended) from None

    def _wait_for_sparks_stop(self) -> None:
        """Wait until Spark's query is being stopped, which happens just after the call of `stop`.

        If an interruption is raised earlier, Spark treats it as an error.
        """
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until and not self.ended.is_set():
            spark_query = self.spark_query  # None during its start
            if spark_query is not None and not is_active(spark_query):
                return
            self.ended.wait(0.01)

    def _pause(self, seconds: float) -> bool:
        """Wait; return True if this query or Spark's is being stopped."""
        if self._stopping.wait(seconds):
            return True
        spark_query = self.spark_query
        return spark_query is not None and not is_active(spark_query)

    def _attend(self) -> None:
        """Wait for the end of Spark's query and restart it if needed; runs in its own thread."""
        try:
            while self._goes_on():
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
            for one in (self._pacemaker, self._watch):
                if one is not None:
                    one.stop()
            self._beats.close()
            self._deployment.close()
            self.listeners.ended(self.error, self.counts)
            # `TooManyDead` is not logged if a waiting call raises it.
            if self.error and not (self._awaited and isinstance(self.error, TooManyDead)):
                _log.error("the query ended: %s", self.error)
            with self._changed:
                self.ended.set()
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Start Spark's query unless it runs, and wait for its end; return whether to restart."""
        try:
            if self.spark_query is None:
                self.spark_query = self._begin()
                if self._leaving.is_set():
                    self.spark_query.stop()
            self.spark_query.awaitTermination()
            if self.error is not None:
                raise self.error
        except Exception as error:
            if self.spark_query is not None:
                active = is_active(self.spark_query)
                if active or (active is None and end_of(self._spark) is None):
                    self.ended.wait(self._poll_s)
                    return True  # only the connection to the JVM was lost
            with self._changed:
                # A broken connection ends Spark's query, but not the micro-batch that runs here.
                self._changed.wait_for(lambda: self._at_work is None or self._leaving.is_set())
            if isinstance(self.error, Stopped) and self.error is not error:
                self.error = None  # the micro-batch stopped because Spark's query had ended
            if not self._may_begin_again(self.error or error):
                raise
            self.error = None
        else:
            # Spark has read all data and ended.  If records wait, its query is started again when
            # one is due, and the heartbeat causes a micro-batch.
            if not self._available_now or self._leaving.is_set():
                return False
            if not self._is_owed():
                self._limit.at_end(self.counts)
                return False
            if self._wait_until_due():
                return False
        self.spark_query = None  # the next loop starts a new one
        return True

    def _may_begin_again(self, error: Exception) -> bool:
        """Wait for the restart after a temporary error; return False if the stream must end too."""
        if self._leaving.is_set():
            return False
        end = end_of(self._spark)
        if end is not None:
            self.error = RunFailed(end)
            return False
        self._restarts += 1
        if not may_pass(error) or self._restarts > self._settings.max_restarts:
            return False
        waits = capped_doubling(
            whole_ms(self._settings.restart_backoff_s),
            self._restarts,
            whole_ms(self._settings.max_backoff_s),
        )
        _log.warning(
            "Spark ended the query; ackcore restarts it in %.1f s, restart %d of %d: %s",
            waits / 1000,
            self._restarts,
            self._settings.max_restarts,
            one_line(error),
        )
        return not self._leaving.wait(waits / 1000)

    def _is_owed(self) -> bool:
        """Return whether a retry, a replay or Kafka records must still be processed."""
        waits = self._engine.next_due_ms is not None or bool(self._state.pending_replays())
        return waits or self._is_behind()

    def _is_behind(self) -> bool:
        """Return whether Kafka records must still be read and the waiting store has room."""
        offsets = self._offsets
        if offsets is None or not self._available_now:
            return False
        return not offsets.is_through and offsets.has_room

    def _wait_until_due(self) -> bool:
        """Wait for the next retry or Kafka records; return True if the query is to stop."""
        while not self._leaving.is_set():
            if self._is_behind():
                # Pause if the last micro-batch had no records: the broker may not answer.
                took = not self.recent or self.recent[-1].records
                return not took and self._leaving.wait(self._poll_s)
            due = self._engine.next_due_ms
            left = 0 if due is None else due - self._engine.clock()
            if left <= 0 or self._state.pending_replays():
                return False
            # In steps, because the clock may differ from this machine's.
            self._leaving.wait(min(left / 1000, self._poll_s))
        return True

    # ---------------------------------------------------------------------------------- the end

    def wait(self, timeout: float | None) -> bool:
        """Wait for the end; see `Query.await_termination`."""
        with self._awaiting():
            ended = self.ended.wait(timeout)
        if ended and self.error is not None:
            raise self.error
        return ended

    def process_all_available(self) -> None:
        """Wait until nothing is left to do; see `Query.process_all_available`."""
        with self._awaiting():
            reached = self._reaching_ends()
            self._read_all_available()
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self.ended.is_set()
                        or ((reached is None or reached()) and not self._is_waiting())
                    )
                )
        if self.ended.is_set() and self.error is not None:
            raise self.error

    def _reaching_ends(self) -> Callable[[], bool] | None:
        """Return a check whether the present Kafka records are read; None without Kafka."""
        offsets = self._offsets
        try:
            return None if offsets is None or offsets.is_closed else offsets.reaching_ends()
        except Exception:
            if offsets is None or not offsets.is_closed:
                raise
            return None  # the query has ended meanwhile

    def _read_all_available(self) -> None:
        """Wait until Spark has read the data that its sources have now."""
        while not self.ended.is_set():
            spark_query = self.spark_query
            if spark_query is not None and not self._available_now:
                with contextlib.suppress(PySparkException, Py4JError, OSError):
                    spark_query.processAllAvailable()
                    if is_active(spark_query):
                        return
            self.ended.wait(self._poll_s)  # the query ends or restarts

    def _is_waiting(self) -> bool:
        """Return whether a micro-batch runs, or a record or a replay waits."""
        state = self._state
        # A planned micro-batch may have taken the replays; the commits and the counts of a done one
        # may be missing.
        under_way = self._at_work is not None or state.last_plan != state.last_done
        return under_way or bool(self.counts.waiting or state.pending_replays())

    @contextlib.contextmanager
    def _awaiting(self) -> Iterator[None]:
        with self._changed:
            self._awaited += 1
        try:
            yield
        finally:
            with self._changed:
                self._awaited -= 1

    def stop(self, finish: bool) -> None:
        """End the stream; see `Query.stop`."""
        self._leave(finish)
        with self._changed:
            if self._at_work is threading.current_thread():
                threading.Thread(target=self.stop, args=(finish,), daemon=True).start()
                return
        if finish:
            self._finish()
        spark_query = self.spark_query
        if spark_query is not None and not self.ended.is_set():
            with contextlib.suppress(Py4JError, OSError):  # the JVM is gone
                spark_query.stop()
        self._thread.join()

    def _leave(self, finish: bool) -> None:
        """Begin no new micro-batch, and abandon the running one unless it is to finish."""
        self._leaving.set()
        if not finish:
            self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def _finish(self) -> None:
        """Wait until no micro-batch runs, and until Spark has recorded the end of the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._at_work is None or self._stopping.is_set() or self.ended.is_set()
            )
        if self.recent:
            last = self.recent[-1]
            commits = self._spark_checkpoint / "commits"
            # If Spark is interrupted before it writes the checksum file, it logs a long warning.
            # Some file systems have no checksum file.
            noted = ((str(last.batch_id), _COMMIT_S), (f".{last.batch_id}.crc", _CHECKSUM_S))
            for name, patience in noted:
                until = time.monotonic() + patience
                while not ((commits / name).exists() or self.ended.is_set()):
                    if self._stopping.wait(0.01) or time.monotonic() > until:
                        break
        self._stopping.set()


class _SparkQuery(StreamingQuery):
    """Spark's query, whose `stop` also stops the `Stream`, which would otherwise restart it."""

    def __init__(self, query: StreamingQuery, leave: Callable[[], object]) -> None:
        super().__init__(query._jsq)
        self._leave = leave

    def stop(self) -> None:
        """Stop Spark's query and the stream that it belongs to."""
        self._leave()
        super().stop()


def _united(topology: Topology) -> tuple[DataFrame | None, str | None]:
    """Return the sources as one stream: one source unchanged, several as a struct column each.

    Sources that tasks read themselves are left out.
    """
    spouts = [spout for spout in topology.spouts.values() if spout.kind is None]
    if not spouts:
        return None, None
    if len(spouts) == 1:
        return spouts[0].source, spouts[0].name
    frames = []
    for spout in spouts:
        columns: Sequence[Column] = [
            sql.struct("*").alias(other.name)
            if other is spout
            else sql.lit(None).cast(other.source.schema).alias(other.name)
            for other in spouts
        ]
        frames.append(spout.source.select(*columns))
    return reduce(DataFrame.union, frames), None
