"""A stream whose micro-batches Spark makes: the callback for each one, and the restarts.

Spark's query calls `SparkStream._each` in a Py4J thread, one micro-batch after the other.  Another
thread waits for the end of Spark's query.  It restarts the query after a temporary error or while
records wait.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import reduce

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.session import LOST
from ackcore.spark.base.versions import INTERRUPTED, Py4JError
from ackcore.spark.deployment import Deployment
from ackcore.spark.engine.insist import RunFailed, Stopped
from ackcore.spark.engine.setup import InputFrame
from ackcore.spark.heartbeat import (
    Beats,
    Pacemaker,
    find_log,
    forget_beats,
    trim_log,
    with_heartbeat,
)
from ackcore.spark.stream import Stream, as_error, end_of
from ackcore.topology.builder import Topology

#: The time in seconds that Spark may take to record the end of a micro-batch.
_COMMIT_S, _CHECKSUM_S = 10.0, 0.5
#: The time in seconds between a call of `Stream.stop` and the stop of Spark's query in the JVM.
_STOP_S = 30.0


class SparkStream(Stream):
    """A stream in a query of Structured Streaming, with a DataFrame; the constructor starts it."""

    interrupted = "Spark ended the query"

    def __init__(self, deployment: Deployment) -> None:
        super().__init__(deployment)
        spark = self._spark
        self._groups = deployment.groups
        self._spark_checkpoint = deployment.spark_checkpoint
        self._beats = Beats.beside(spark)
        self._pacemakers: list[Pacemaker] = []
        if not self._available_now:
            beats = self._beats.advance, self._engine.clock, self._poll_s
            self._pacemakers.append(Pacemaker(*beats, self._is_called, self._end_with_session))
            # A look at a source may take a client's whole timeout: retries must not wait for it.
            if self._rows is not None:
                self._pacemakers.append(Pacemaker(*beats, rows=self._rows))
        try:
            frame, self._spout = _united(deployment.topology)
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
                for one in self._pacemakers:
                    one.start()
                self._start(
                    threading.Thread(target=self._run_to_end, name="ackcore-query", daemon=True)
                )
            except BaseException as error:
                self._abandon()  # waits for the micro-batch, which may have begun
                self.listeners.ended(error, self.counts)
                raise
        except BaseException:
            self._release()
            raise

    def _is_called(self) -> bool:
        """Return whether a replay, or a commit that failed, needs a micro-batch."""
        groups = self._groups
        return bool(self._state.pending_replays()) or (groups is not None and groups.has_commit_due)

    def _end_with_session(self) -> None:
        """End the stream if its session was stopped: Spark's query sees it only with new data."""
        try:
            self._check_session()
        except RunFailed as error:
            self._lose_session(error, self.error)
            self._abandon()

    def _begin(self) -> StreamingQuery:
        """Start Spark's query after `forget_beats`; with availableNow, waiting work adds a beat."""
        with fenced(self._state.check_owner):
            # After a takeover, Spark's part belongs to the other driver, too.
            self._state.check_owner()
            forget_beats(self._spark_checkpoint)
        for one in self._pacemakers:
            one.schedule(self._engine.next_due_ms)
        if self._available_now and self._has_work():
            # Retries and planned rows need a micro-batch even if no source has new data.
            self._beats.advance()
        return _SparkQuery(self._writer.start(), lambda: self._leave(finish=False))

    def _each(self, frame: DataFrame, number: int) -> None:
        """Run micro-batch ``number`` with the new rows in ``frame``; Spark calls this.

        If the micro-batch fails, stores its error, and raises the short one of `for_spark`.
        """
        ended: Exception | None = None
        with self._working():
            try:
                self._run(frame, number)
            except BaseException as error:
                # Kept here: Spark would only show its text within a Java stack trace.  If this
                # thread ended, Spark would wait for ever for its answer.
                ended = as_error(error)
                # A stop by `stop` is no error, and may come after the end. The end of the session
                # stops the micro-batch, too, and stays the query's error.
                is_stop = isinstance(ended, Stopped)
                if not (is_stop and (self.error is not None or self._leaving.is_set())):
                    self.error = ended
        if ended is not None:
            if isinstance(ended, Stopped):
                self._wait_for_sparks_stop()
            raise for_spark(ended) from None

    def _run(self, frame: DataFrame, number: int) -> None:
        if self._leaving.is_set():
            raise Stopped(f"the query was stopped before micro-batch {number}")
        # Before the plan is made, which answers all beats.  Spark waits for this call.
        if self._beats.clear():
            self._state.check_owner()
            with contextlib.suppress(OSError):
                log = find_log(self._spark_checkpoint)
                if log is not None:
                    trim_log(log)
        self._take(number, [InputFrame(frame, self._spout, own_session=True)])
        for one in self._pacemakers:
            one.schedule(self._engine.next_due_ms)

    def _wait_for_sparks_stop(self) -> None:
        """Wait, 30 s at most, until Spark's query is being stopped, just after the call of `stop`.

        If an interruption is raised earlier, Spark treats it as an error.
        """
        until = time.monotonic() + _STOP_S
        while time.monotonic() < until and not self.ended.is_set():
            spark_query = self.spark_query  # None during its start
            if spark_query is not None and not is_active(spark_query):
                return
            self.ended.wait(0.01)

    def _is_own_thread(self) -> bool:
        # A source's plan() may be called by a pacemaker, for whose end `_release` waits.
        return super()._is_own_thread() or any(one.is_current for one in self._pacemakers)

    def _pause(self, seconds: float) -> bool:
        """Wait for ``seconds`` at most; return True if this query or Spark's is being stopped."""
        if super()._pause(seconds):
            return True
        spark_query = self.spark_query
        return spark_query is not None and not is_active(spark_query)

    def _release(self) -> None:
        for one in self._pacemakers:
            one.stop()
        self._beats.close()

    def _step(self) -> bool:
        """Start Spark's query unless it runs, and wait for its end; return whether to start again.

        Raises an error after which a restart is useless, or has been tried too often.
        """
        try:
            if self.spark_query is None:
                self.spark_query = self._begin()
                if self._leaving.is_set():
                    self.spark_query.stop()
            # After `_end_with_session` Spark's query may wait for its next trigger before it ends.
            while not self.spark_query.awaitTermination(1):
                if isinstance(self.error, RunFailed):
                    break
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
            if not self._may_restart(self.error or error):
                raise
            self.error = None
        else:
            # Spark has read all data and ended.  If records wait, its query is started again when
            # one is due, and the heartbeat causes a micro-batch.
            if not self._available_now or self._leaving.is_set():
                return False
            if not self._has_work():
                self._limit.at_end(self.counts)
                return False
            if self._wait_until_due():
                return False
        self.spark_query = None  # the next loop starts a new one
        return True

    def _has_work(self) -> bool:
        """Return whether a retry, a replay or planned rows must still be processed."""
        waits = self._engine.next_due_ms is not None or bool(self._state.pending_replays())
        return waits or self._is_behind()

    def _is_behind(self) -> bool:
        """Return whether planned rows must still be read, and a micro-batch may take them now.

        Also return True if a source does not answer: it may have rows.
        """
        try:
            return self._available_now and self._rows is not None and self._rows.is_behind
        except (OSError, EOFError, PySparkException, Py4JError):
            return True  # the micro-batch asks it again, and logs its error

    def _wait_until_due(self) -> bool:
        """Wait until a retry is due or planned rows exist; return True if the query is to stop."""
        while not self._leaving.is_set():
            if self._is_behind():
                # Pause if the last micro-batch had no records: a source may not answer.
                took = not self.recent or self.recent[-1].records
                return not took and self._leaving.wait(self._poll_s)
            due = self._engine.next_due_ms
            left = 0 if due is None else due - self._engine.clock()
            if left <= 0 or self._state.pending_replays():
                return False
            # In steps, because the clock may differ from this machine's.
            self._leaving.wait(min(left / 1000, self._poll_s))
        return True

    def _read_all_available(self) -> None:
        """Wait until Spark has read the data that its sources have now, or the stream ends."""
        while not self.ended.is_set():
            spark_query = self.spark_query
            if spark_query is not None and not self._available_now:
                with contextlib.suppress(PySparkException, Py4JError, OSError):
                    spark_query.processAllAvailable()
                    if is_active(spark_query):
                        return
            self.ended.wait(self._poll_s)  # the query ends or restarts

    def _cancel_jobs(self) -> None:
        spark_query = self.spark_query
        if spark_query is not None:
            with contextlib.suppress(*LOST):  # Spark is gone
                self._spark.sparkContext.cancelJobGroup(str(spark_query.runId))

    def _abandon(self) -> None:
        spark_query = self.spark_query
        if spark_query is not None:
            with contextlib.suppress(Py4JError, OSError):  # the JVM is gone
                spark_query.stop()

    def _settle_end(self) -> None:
        """Wait until Spark has recorded the end of the last micro-batch, for 10 s at most."""
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


class _SparkQuery(StreamingQuery):
    """Spark's query, whose `stop` also stops the `Stream`, which would otherwise restart it."""

    def __init__(self, query: StreamingQuery, leave: Callable[[], object]) -> None:
        super().__init__(query._jsq)
        self._leave = leave

    def stop(self) -> None:
        """Stop Spark's query and the stream that it belongs to."""
        self._leave()
        super().stop()


def _united(topology: Topology) -> tuple[DataFrame, str | None]:
    """Return the DataFrames of the spouts as one stream, and the name of its spout.

    One DataFrame is unchanged. Of several, each becomes a nullable struct column, and the name is
    None.
    """
    spouts = [spout for spout in topology.spouts.values() if spout.kind is None]
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


def is_active(spark_query: StreamingQuery) -> bool | None:
    """Return whether Spark's query runs; None if the JVM cannot be reached."""
    try:
        return bool(spark_query.isActive)
    except (Py4JError, OSError):
        return None


class _ReportedByQuery(RuntimeError):
    """The error that a callback raises to Spark and Py4J; the query reports its cause."""


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], _ReportedByQuery))


# Py4J logs each exception of a callback with its traceback.
for _name in ("py4j.clientserver", "py4j.java_gateway"):
    logging.getLogger(_name).addFilter(_is_news)


def for_spark(error: Exception) -> Exception:
    """Return the error that a callback raises to Spark; `Query.exception` has the error itself.

    Its text is one short line.  Spark logs the text several times, and searches it for an
    interruption with a pattern that overflows the stack on a long text.  For a stopped query the
    text contains an interruption, so that Spark ends its query without an error.
    """
    if isinstance(error, Stopped):
        return _ReportedByQuery(f"{INTERRUPTED} ({one_line(error)})")
    return _ReportedByQuery(f"{type(error).__name__}: {one_line(error)}")
