"""A stream on Spark: the calls that Spark makes for each micro-batch, and the thread that waits.

Spark's query calls `Stream._each` in a thread of Py4J's, one micro-batch after the other.  A thread
of ours waits for that query to end, starts it again if it ended for a reason that may pass, or
while records wait, and closes the checkpoint in the end.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from ackcore.dead_limit import DeadLimit, TooManyDead
from ackcore.retry import capped_doubling
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.clocks import Clock
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.versions import Py4JError
from ackcore.spark.checkpoint.state import State
from ackcore.spark.heartbeat import (
    Beats,
    Pacemaker,
    find_log,
    forget_beats,
    trim_log,
    with_heartbeat,
)
from ackcore.spark.kafka import frame_groups, kafka_sources
from ackcore.spark.kafka.watch import Watch
from ackcore.spark.listeners import Listeners
from ackcore.spark.protocol.act import DeadLetterWriter
from ackcore.spark.protocol.batch import Engine
from ackcore.spark.protocol.causes import StreamLimit
from ackcore.spark.protocol.given_up import RunFailed
from ackcore.spark.protocol.insist import Stopped
from ackcore.spark.protocol.progress import Progress
from ackcore.spark.restarts import end_of, for_spark, is_active, may_pass
from ackcore.spark.run.types import InputFrame
from ackcore.spark.sinks.interface import release_sinks
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")

#: How long Spark may take to note that a micro-batch has ended.
_COMMIT_S, _CHECKSUM_S = 10.0, 0.5
#: How long its query may take to be stopped, once we are told to: a call to the JVM.
_STOP_S = 30.0
#: How many micro-batches `Query.recent_progress` goes back.
_RECENT = 100


class Stream:
    """A topology that runs on a stream, from the moment that this is made.

    Parameters
    ----------
    topology : Topology
        What runs; its spouts in the order of the checkpoint.
    spark : SparkSession
        Where.
    state : State
        The open checkpoint; closed when the stream has ended.
    checkpoint : Path
        The directory that Spark's part of it lies in, too.
    available_now : bool
        Whether it ends when the sources have been read and no record waits.
    trigger : mapping
        Keywords for Spark's ``trigger()``; none for its default.
    write_dead_letters : callable
        As `Engine` has it.
    clock : callable
        Returns milliseconds since 1970.
    limit : DeadLimit
        The limit on dead records; see `start`.
    listeners : Listeners
        Told of each micro-batch, and of the end.
    release : callable, optional
        Called when it has ended, to let go of what the dead letters are written by.

    Attributes
    ----------
    spark_query : StreamingQuery or None
        Spark's own, None while it is being started.
    ended : threading.Event
        Set when it has ended.
    error : Exception or None
        What ends it.
    recent : deque of Progress
        The last micro-batches, the newest one last.
    books : Books
        After the last micro-batch that is done.
    """

    def __init__(
        self,
        topology: Topology,
        spark: SparkSession,
        state: State,
        checkpoint: str,
        spark_checkpoint: Path,
        available_now: bool,
        trigger: Mapping[str, Any],
        write_dead_letters: DeadLetterWriter,
        clock: Clock,
        limit: DeadLimit,
        listeners: Listeners,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._release = release
        self._state = state
        self._spark = spark
        self._settings = topology.settings
        self.listeners = listeners
        self._available_now = available_now
        #: Nothing new is begun; and what runs is given up.
        self._leaving, self._stopping = threading.Event(), threading.Event()
        #: The thread that a micro-batch runs in; notified when that or anything here changes.
        self._at_work: threading.Thread | None = None
        self._changed = threading.Condition()
        self._restarts = 0
        #: Calls that wait for the end, and raise what it ends with.
        self._awaited = 0
        self.spark_query: StreamingQuery | None = None
        self.ended = threading.Event()
        self.error: Exception | None = None
        self.recent: deque[Progress] = deque(maxlen=_RECENT)
        self._sinks = tuple(topology.sinks.values())
        self._groups = frame_groups(topology, state, spark_checkpoint / "offsets")
        self._offsets = kafka_sources(topology, spark, state, ends=available_now)
        self._engine = Engine(
            topology,
            spark,
            state,
            write_dead_letters,
            clock=clock,
            pause=self._pause,
            offsets=self._offsets,
            groups=self._groups,
        )
        self.books = self._engine.books
        self._limit = StreamLimit(limit, self.books, self._engine.clock(), checkpoint)
        self._poll_s = self._settings.heartbeat_ms / 1000
        self._spark_checkpoint = spark_checkpoint
        self._beats = Beats.beside(spark)
        self._pacemaker: Pacemaker | None = None
        self._watch: Watch | None = None
        if self._offsets is not None and not available_now:
            self._watch = Watch(self._offsets.has_new, self._beats.advance)
        if not available_now:
            self._pacemaker = Pacemaker(
                self._beats.advance,
                self._engine.clock,
                self._settings.heartbeat_ms,
                self._is_called,
            )
            self._pacemaker.schedule(self._engine.next_due_ms)
        try:
            frame, self._spout = _united(topology)
            self._has_frame = frame is not None
            beaten = with_heartbeat(spark, frame, self._beats.directory)
            self._writer = (
                beaten.writeStream.foreachBatch(self._each)
                # Hadoop takes what follows the scheme as it is: an escape would be another name.
                .option("checkpointLocation", f"file://{self._spark_checkpoint}")
            )
            if trigger:
                self._writer = self._writer.trigger(**trigger)
            listeners.started(topology, self.books)
            try:
                self.spark_query = self._begin()
            except BaseException as error:
                listeners.ended(error, self.books)
                raise
        except BaseException:
            self._beats.close()
            self._close_kafka()
            raise
        for one in (self._pacemaker, self._watch):
            if one is not None:
                one.start()
        self._thread = threading.Thread(target=self._attend, name="ackcore-query", daemon=True)
        self._thread.start()

    def _close_kafka(self) -> None:
        for one in (self._offsets, self._groups):
            if one is not None:
                one.close()

    def _is_called(self) -> bool:
        """Whether a micro-batch is to run for a replay, or for a commit that did not arrive."""
        groups = self._groups
        return bool(self._state.pending_replays()) or (groups is not None and groups.has_commit_due)

    def _begin(self) -> StreamingQuery:
        """Start Spark's query, with what there is at the checkpoint."""
        with fenced(self._state.check_owner):
            # Spark's part is another driver's as well, once that has taken over.
            self._state.check_owner()
            forget_beats(self._spark_checkpoint)
        if self._watch is not None:
            self._watch.look_again()
        if self._available_now and self._is_owed():
            # Retries, which no new data may come with, and records of Kafka's.
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
            # Before its plan is made, which answers all beats.  Spark waits for us meanwhile.
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
            self.books = self._engine.books
            if decision is not None and not again:
                self.listeners.done(progress, self.books, decision)
                self._limit.after(number, decision.all_dead, self.books)
            self._restarts = 0
            if self._pacemaker is not None:
                self._pacemaker.schedule(self._engine.next_due_ms)
            if self._watch is not None:
                self._watch.look_again()
        except BaseException as error:
            # Spark would show it as text in the midst of a Java stack; and wait for ever for an
            # answer, were the thread that called us to end.
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
        """Wait until Spark's query is being stopped: before, it takes an interruption for an error.

        It is just after we are told to stop.
        """
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until and not self.ended.is_set():
            spark_query = self.spark_query  # None while it is being started
            if spark_query is not None and not is_active(spark_query):
                return
            self.ended.wait(0.01)

    def _pause(self, seconds: float) -> bool:
        """Wait; True if the query, or Spark's own, is being stopped."""
        if self._stopping.wait(seconds):
            return True
        spark_query = self.spark_query
        return spark_query is not None and not is_active(spark_query)

    def _attend(self) -> None:
        """Wait for Spark's query to end, and start it again if need be; in a thread of its own."""
        try:
            while self._goes_on():
                pass
        except Exception as error:
            if self.error is None and not self._leaving.is_set():
                self.error = error
        finally:
            with self._changed:
                # The checkpoint is locked for as long as anything here may write to it.
                self._changed.wait_for(lambda: self._at_work is None)
            if isinstance(self.error, Stopped):
                self.error = None
            for one in (self._pacemaker, self._watch):
                if one is not None:
                    one.stop()
            self._close_kafka()
            self._beats.close()
            writers = {sink.name: sink.writer for sink in self._sinks}
            release_sinks(writers, f"{self._state.deployment_key:016x}")
            self._release()
            self._state.close()
            self.listeners.ended(self.error, self.books)
            # One that is raised is not logged as well, if all that it says is of dead letters.
            if self.error and not (self._awaited and isinstance(self.error, TooManyDead)):
                _log.error("the query ended: %s", self.error)
            with self._changed:
                self.ended.set()
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Wait until Spark's query has ended; whether it is to be started again, if it was not."""
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
                    return True  # only our connection was lost
            with self._changed:
                # A connection that breaks ends Spark's query, and not what that has called here.
                self._changed.wait_for(lambda: self._at_work is None or self._leaving.is_set())
            if isinstance(self.error, Stopped) and self.error is not error:
                self.error = None  # it stopped since Spark's query had ended by itself
            if not self._may_begin_again(self.error or error):
                raise
            self.error = None
        else:
            # Spark has ended with what there was.  If records wait it is started again when one is
            # due, and the heartbeat gives it a micro-batch.
            if not self._available_now or self._leaving.is_set():
                return False
            if not self._is_owed():
                self._limit.at_end(self.books)
                return False
            if self._wait_until_due():
                return False
        self.spark_query = None  # that one's end is not the next one's
        return True

    def _may_begin_again(self, error: Exception) -> bool:
        """Wait, if Spark's query ended for a reason that may pass; False if ours ends too."""
        if self._leaving.is_set():
            return False
        end = end_of(self._spark)
        if end is not None:
            self.error = RunFailed(end)
            return False
        self._restarts += 1
        if not may_pass(error) or self._restarts > self._settings.restart_attempts:
            return False
        waits = capped_doubling(
            self._settings.restart_backoff_ms, self._restarts, self._settings.max_backoff_ms
        )
        _log.warning(
            "Spark ended the query, which is started again in %.1f s, time %d of %d: %s",
            waits / 1000,
            self._restarts,
            self._settings.restart_attempts,
            one_line(error),
        )
        return not self._leaving.wait(waits / 1000)

    def _is_owed(self) -> bool:
        """Whether a record waits for a retry, or a replay or records of Kafka's for their turn."""
        waits = self._engine.next_due_ms is not None or bool(self._state.pending_replays())
        return waits or self._is_behind()

    def _is_behind(self) -> bool:
        """Whether it is to take more of Kafka before it ends, and has room for it."""
        offsets = self._offsets
        if offsets is None or not self._available_now:
            return False
        return not offsets.is_through and offsets.has_room

    def _wait_until_due(self) -> bool:
        """Wait; True if the query is to stop."""
        while not self._leaving.is_set():
            if self._is_behind():
                # What does not answer is not asked without a pause.
                took = not self.recent or self.recent[-1].records
                return not took and self._leaving.wait(self._poll_s)
            due = self._engine.next_due_ms
            left = 0 if due is None else due - self._engine.clock()
            if left <= 0 or self._state.pending_replays():
                return False
            # In steps: the clock may be another than this machine's.
            self._leaving.wait(min(left / 1000, self._poll_s))
        return True

    # ---------------------------------------------------------------------------------- the end

    def wait(self, timeout: float | None) -> bool:
        """Wait until it has ended, as `Query.await_termination` says."""
        with self._awaiting():
            ended = self.ended.wait(timeout)
        if ended and self.error is not None:
            raise self.error
        return ended

    def process_all_available(self) -> None:
        """Wait until nothing is left to do, as `Query.process_all_available` says."""
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
        """Return what tells whether all of Kafka's has been taken, None if there is none."""
        offsets = self._offsets
        try:
            return None if offsets is None or offsets.is_closed else offsets.reaching_ends()
        except Exception:
            if offsets is None or not offsets.is_closed:
                raise
            return None  # it has ended meanwhile

    def _read_all_available(self) -> None:
        """Wait until Spark has taken in what its sources have now."""
        while not self.ended.is_set():
            spark_query = self.spark_query
            if spark_query is not None and not self._available_now:
                with contextlib.suppress(PySparkException, Py4JError, OSError):
                    spark_query.processAllAvailable()
                    if is_active(spark_query):
                        return
            self.ended.wait(self._poll_s)  # it ends, or is being started again

    def _is_waiting(self) -> bool:
        """Whether a record, a replay or a micro-batch is under way."""
        state = self._state
        # Planned, it may have taken the replays; done, its commits and the books are yet to come.
        under_way = self._at_work is not None or state.last_plan != state.last_done
        return under_way or bool(self.books.waiting or state.pending_replays())

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
        """End it, as `Query.stop` says."""
        self._leave(finish)
        with self._changed:
            if self._at_work is threading.current_thread():
                threading.Thread(target=self.stop, args=(finish,), daemon=True).start()
                return
        if finish:
            self._finish()
        spark_query = self.spark_query
        if spark_query is not None and not self.ended.is_set():
            with contextlib.suppress(Py4JError, OSError):  # of a JVM that is gone
                spark_query.stop()
        self._thread.join()

    def _leave(self, finish: bool) -> None:
        """Begin nothing new, and give up what runs unless it is to finish."""
        self._leaving.set()
        if not finish:
            self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def _finish(self) -> None:
        """Wait until no micro-batch runs, and until Spark has noted the end of the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._at_work is None or self._stopping.is_set() or self.ended.is_set()
            )
        if self.recent:
            last = self.recent[-1]
            commits = self._spark_checkpoint / "commits"
            # An interrupt before Hadoop's checksum, which may not come at all, is a long warning.
            noted = ((str(last.batch_id), _COMMIT_S), (f".{last.batch_id}.crc", _CHECKSUM_S))
            for name, patience in noted:
                until = time.monotonic() + patience
                while not ((commits / name).exists() or self.ended.is_set()):
                    if self._stopping.wait(0.01) or time.monotonic() > until:
                        break
        self._stopping.set()


class _SparkQuery(StreamingQuery):
    """Spark's query, which ends ours when its user stops it: else records that wait start it again.

    Parameters
    ----------
    query : StreamingQuery
        As Spark started it.
    leave : callable
        Called before it is stopped.
    """

    def __init__(self, query: StreamingQuery, leave: Callable[[], object]) -> None:
        super().__init__(query._jsq)
        self._leave = leave

    def stop(self) -> None:
        """Stop it, and the query that it is a part of."""
        self._leave()
        super().stop()


def _united(topology: Topology) -> tuple[DataFrame | None, str | None]:
    """Return the sources as one stream: the only one as it is, several side by side as structs.

    Those that tasks read by themselves are not among them.
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
