"""Running a topology: `start` for streams, `run_batch` for sources that end.

Spark brings the micro-batches of a stream, with a heartbeat among its sources; the numbers of ours
are Spark's own.  Spark keeps which offsets belong to a number in ``<checkpoint>/spark``, and we
keep in ``<checkpoint>/ackcore`` what became of the records.  A source that ends is micro-batch 0,
and the retries are the ones after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.clocks import Clock, read_clock, wall_clock_ms
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.paths import local_path
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checks import check, check_options, check_trigger, read_trigger
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.heartbeat import (
    Beats,
    Pacemaker,
    find_log,
    forget_beats,
    trim_log,
    with_heartbeat,
)
from ackcore.spark.protocol.act import Stopped
from ackcore.spark.protocol.batch import Engine, RunFailed
from ackcore.spark.protocol.deaths import check_max_dead, close_run, warn_of_micro_batch
from ackcore.spark.protocol.progress import Books, Progress
from ackcore.spark.restarts import end_of, for_spark, is_active, may_pass
from ackcore.spark.run.types import InputFrame, source_schema
from ackcore.spark.sinks.parquet import claim_sink
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")

#: How long Spark may take to note that a micro-batch has ended.
_COMMIT_S, _CHECKSUM_S = 10.0, 0.5
#: How many micro-batches `Query.recent_progress` goes back.
_RECENT = 100


def start(
    topology: Topology,
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    *,
    trigger: str | Mapping[str, Any] | None = None,
    dead_letters: str | os.PathLike[str] | None = None,
    accept_changes: bool = False,
    clock: Clock = wall_clock_ms,
) -> Query:
    """Run a topology whose spouts are streams.

    Parameters
    ----------
    topology : Topology
        What `TopologyBuilder.build` made.  The source of each spout is a streaming DataFrame.
    spark : SparkSession
        A classic session.
    checkpoint : path
        A directory of its own for this query, on a file system that driver and executors share.
        A query that is started again with it goes on where the last one ended, however that was.
    trigger : str or mapping, optional
        As Spark's: ``"1 second"`` or ``{"processingTime": "1 second"}`` for a micro-batch so
        often, ``{"availableNow": True}`` to take what there is and then end, when no record waits
        any more; None for micro-batches without a pause.
    dead_letters : path, optional
        Where the dead go; if not given, where they went at the last start, and at the first one
        ``<checkpoint>/ackcore/dead_letters``.
    accept_changes : bool, default False
        Go on although the topology is not the one that the checkpoint was made by.  Its spouts
        must be the same, in any order.
    clock : callable, optional
        Returns milliseconds since 1970.

    Returns
    -------
    Query
        Which runs.

    Raises
    ------
    TypeError
        If the session or a source is Spark Connect's, a source has other types than a bolt asks
        for, or a type that cannot be kept, or a sink cannot take its stream.
    ValueError
        If the session was stopped, a source is bounded or has columns that differ in case only,
        the topology has no spout, or the trigger is none of Spark's.
    StateError
        If the checkpoint cannot be used: its subclasses say why.
    """
    check_options(dead_letters, accept_changes, clock=clock)
    check(topology, spark, streaming=True)
    available_now, options = read_trigger(trigger)
    check_trigger(topology, options)
    place = local_path(checkpoint, "checkpoint")
    state = State.open(
        place,
        topology,
        sources=_schemas(topology),
        kind="stream",
        offsets=place / "spark" / "offsets",
        accept_changes=accept_changes,
        clock_ms=read_clock(clock),
    )
    try:
        topology = topology.in_order(state.spout_order)
        _claim_sinks(topology, state)
        return Query(topology, spark, state, place, available_now, options, dead_letters, clock)
    except BaseException:
        state.close()
        raise


def run_batch(
    topology: Topology,
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    *,
    max_dead: float | None = 1.0,
    dead_letters: str | os.PathLike[str] | None = None,
    accept_changes: bool = False,
    clock: Clock = wall_clock_ms,
    wait: Callable[[float], object] = time.sleep,
) -> Books:
    """Run a topology whose spouts end, until each of their records is ACKED or DEAD.

    Parameters
    ----------
    topology : Topology
        What `TopologyBuilder.build` made.  The source of each spout is a bounded DataFrame.
    spark : SparkSession
        A classic session.
    checkpoint : path
        A directory of its own, on a file system that driver and executors share.  Run again with
        it after a crash, it goes on; run again after the end, it warns and returns the books, since
        everything it was made for is decided: each run of a nightly job takes a new one.
    max_dead : int, float or None, default 1.0
        How many records may be dead in the end: a number of them (an int, 0 for none), or a share
        of those that were read (a float in (0, 1]).  A run whose every record died fails whatever
        the number; None lets that pass, too.  What a replay got through is not dead any more.
    dead_letters : path, optional
        Where the dead go; if not given, where they went at the last start, and at the first one
        ``<checkpoint>/ackcore/dead_letters``.
    accept_changes : bool, default False
        Go on although the topology is not the one that the checkpoint was made by.
    clock : callable, optional
        Returns milliseconds since 1970.
    wait : callable, optional
        Called with the seconds until the next retry is due.

    Returns
    -------
    Books

    Raises
    ------
    TypeError
        If the session or a source is Spark Connect's, a source has other types than a bolt asks
        for, or a type that cannot be kept, or a sink cannot take its stream.
    ValueError
        If the session was stopped, a source is a stream or has columns that differ in case only,
        the topology has no spout, or `max_dead` is no such number.
    TooManyDead
        If more than `max_dead` died; after the end, so that all is on record, and again if it is
        run again.  In any case one warning tells what records died of.
    StateError
        If the checkpoint cannot be used: its subclasses say why.
    RunFailed
        If Spark cannot run a micro-batch.
    RunCancelled
        If a job was cancelled from outside; run again on the same checkpoint, it goes on.
    SinkError
        If a sink or the dead-letter store fails too often.
    KeyboardInterrupt, SystemExit
        What a handler of a signal raised: the job is cancelled, and run again on the same
        checkpoint, it goes on.
    """
    check_max_dead(max_dead)
    check_options(dead_letters, accept_changes, clock=clock, wait=wait)
    check(topology, spark, streaming=False)
    place = local_path(checkpoint, "checkpoint")
    with State.open(
        place,
        topology,
        sources=_schemas(topology),
        kind="batch",
        accept_changes=accept_changes,
        clock_ms=read_clock(clock),
    ) as state:
        topology = topology.in_order(state.spout_order)
        _claim_sinks(topology, state)
        letters = _open_dead_letters(topology, state, place, dead_letters)
        engine = Engine(topology, spark, state, letters.write, clock=clock)
        ran = state.last_done is None
        if ran:
            engine.process(
                0, [InputFrame(spout.source, spout.name) for spout in topology.spouts.values()]
            )
        while True:
            unfinished = state.last_plan != state.last_done
            due = engine.next_due_ms
            asked = bool(state.pending_replays())
            if due is None and not asked and not unfinished:
                if not ran:
                    _log.warning(
                        "%s is of a run that has ended, so nothing was run; what is new in the "
                        "source takes a checkpoint of its own",
                        place,
                    )
                return close_run(engine.books, letters.reasons(), place, max_dead)
            left = 0 if due is None or asked or unfinished else due - engine.clock()
            if left > 0:
                wait(left / 1000)
                continue
            assert state.last_done is not None
            ran = True
            engine.process(state.last_done + 1, [_nothing(topology, spark)])


def _claim_sinks(topology: Topology, state: State) -> None:
    for sink in topology.sinks.values():
        claim_sink(sink.name, sink.writer, f"{state.deployment_key:016x}")


def _schemas(topology: Topology) -> dict[str, pa.Schema]:
    return {name: source_schema(each.source.schema) for name, each in topology.spouts.items()}


def _open_dead_letters(
    topology: Topology, state: State, checkpoint: Path, path: str | os.PathLike[str] | None
) -> DeadLetters:
    schemas = _schemas(topology)
    sources = {name: schemas[name] for name, spout in topology.spouts.items() if spout.tracked}
    return DeadLetters.open(checkpoint, state.deployment_key, path, sources)


def _nothing(topology: Topology, spark: SparkSession) -> InputFrame:
    """No new rows; made only where there are retries to go with them, since it takes its time."""
    first = next(iter(topology.spouts.values()))
    return InputFrame(spark.createDataFrame([], first.source.schema), first.name)


class Query:
    """A topology that runs on a stream; `start` makes one."""

    def __init__(
        self,
        topology: Topology,
        spark: SparkSession,
        state: State,
        checkpoint: Path,
        available_now: bool,
        trigger: Mapping[str, Any],
        dead_letters: str | os.PathLike[str] | None,
        clock: Clock,
    ) -> None:
        self._state = state
        self._spark = spark
        self._settings = topology.settings
        self._available_now = available_now
        #: Nothing new is begun; and what runs is given up.
        self._leaving, self._stopping = threading.Event(), threading.Event()
        #: The thread that a micro-batch runs in, and what tells that it has ended.
        self._at_work: threading.Thread | None = None
        self._changed = threading.Condition()
        self._restarts = 0
        self._spark_query: StreamingQuery | None = None
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._recent: deque[Progress] = deque(maxlen=_RECENT)
        self._engine = Engine(
            topology,
            spark,
            state,
            _open_dead_letters(topology, state, checkpoint, dead_letters).write,
            clock=clock,
            pause=self._pause,
        )
        self._books = self._engine.books
        self._poll_s = self._settings.heartbeat_ms / 1000
        self._spark_checkpoint = checkpoint / "spark"
        self._beats = Beats.beside(spark)
        self._pacemaker: Pacemaker | None = None
        if not available_now:
            self._pacemaker = Pacemaker(
                self._beats.advance,
                self._engine.clock,
                self._settings.heartbeat_ms,
                lambda: bool(state.pending_replays()),
            )
            self._pacemaker.schedule(self._engine.next_due_ms)
        try:
            frame, self._spout = _united(topology)
            frame = with_heartbeat(spark, frame, self._beats.directory)
            self._writer = (
                frame.writeStream.foreachBatch(self._each)
                # Hadoop takes what follows the scheme as it is: an escape would be another name.
                .option("checkpointLocation", f"file://{self._spark_checkpoint}")
            )
            if trigger:
                self._writer = self._writer.trigger(**trigger)
            self._spark_query = self._begin()
        except BaseException:
            self._beats.close()
            raise
        if self._pacemaker is not None:
            self._pacemaker.start()
        self._thread = threading.Thread(target=self._attend, name="ackcore-query", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        status = "active" if self.is_active else "ended"
        return f"<Query on {self._state.path.parent}, {status}>"

    # --------------------------------------------------------------------------------- in Spark

    def _begin(self) -> StreamingQuery:
        """Start Spark's query, with what there is at the checkpoint."""
        with fenced(self._state.check_owner):
            # Spark's part is another driver's as well, once that has taken over.
            self._state.check_owner()
            forget_beats(self._spark_checkpoint)
        if self._available_now and self._is_owed():
            # Retries, which no new data may come with.
            self._beats.advance()
        return self._writer.start()

    def _each(self, frame: DataFrame, number: int) -> None:
        """What Spark calls with each micro-batch."""
        with self._changed:
            self._at_work = threading.current_thread()
        try:
            if self._leaving.is_set():
                raise Stopped(f"stopped before micro-batch {number}")
            self._state.check_owner()
            # Before its plan is made, which answers all beats.  Spark waits for us meanwhile.
            with contextlib.suppress(OSError):
                log = find_log(self._spark_checkpoint) if self._beats.clear() else None
                if log is not None:
                    trim_log(log)
            again = self._state.is_done(number)
            progress = self._engine.process(number, [InputFrame(frame, self._spout)])
            decision = self._state.decision(number)
            if decision is not None and decision.dead and not again:
                warn_of_micro_batch(number, decision.dead, self._state.path.parent)
            self._recent.append(progress)
            self._books = self._engine.books
            self._restarts = 0
            if self._pacemaker is not None:
                self._pacemaker.schedule(self._engine.next_due_ms)
        except BaseException as error:
            # Spark would show it as text in the midst of a Java stack; and wait for ever for an
            # answer, were the thread that called us to end.
            if not isinstance(error, Exception):
                error = RuntimeError(f"{type(error).__name__} was raised: {error}")
            self._error = error
            raise for_spark(error) from None
        finally:
            with self._changed:
                self._at_work = None
                self._changed.notify_all()

    def _pause(self, seconds: float) -> bool:
        """Wait; True if the query, or Spark's own, was told to stop."""
        if self._stopping.wait(seconds):
            return True
        spark_query = self._spark_query
        return spark_query is not None and not is_active(spark_query)

    def _attend(self) -> None:
        """Wait for Spark's query to end, and start it again if need be; in a thread of its own."""
        try:
            while self._goes_on():
                pass
        except Exception as error:
            if self._error is None and not self._leaving.is_set():
                self._error = error
        finally:
            if isinstance(self._error, Stopped):
                self._error = None
            if self._pacemaker is not None:
                self._pacemaker.stop()
            self._beats.close()
            self._state.close()
            if self._error is not None:
                _log.error("the query ended: %s", self._error)
            with self._changed:
                self._ended.set()
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Wait until Spark's query has ended; whether it is to be started again, if it was not."""
        try:
            if self._spark_query is None:
                self._spark_query = self._begin()
                if self._leaving.is_set():
                    self._spark_query.stop()
            self._spark_query.awaitTermination()
            if self._error is not None:
                raise self._error
        except Exception as error:
            if self._spark_query is not None:
                active = is_active(self._spark_query)
                if active or (active is None and end_of(self._spark) is None):
                    self._ended.wait(self._poll_s)
                    return True  # only our connection was lost
            with self._changed:
                # A connection that breaks ends Spark's query, and not what that has called here.
                self._changed.wait_for(lambda: self._at_work is None or self._leaving.is_set())
            if isinstance(self._error, Stopped) and self._error is not error:
                self._error = None  # it stopped since Spark's query had ended by itself
            if not self._may_begin_again(self._error or error):
                raise
            self._error = None
        else:
            # Spark has ended with what there was.  If records wait it is started again when one is
            # due, and the heartbeat gives it a micro-batch.
            if not self._available_now or not self._is_owed() or self._wait_until_due():
                return False
        self._spark_query = None  # the one that has ended says nothing of the next
        return True

    def _may_begin_again(self, error: Exception) -> bool:
        """Wait, if Spark's query ended for a reason that may pass; False if ours ends too."""
        if self._leaving.is_set():
            return False
        end = end_of(self._spark)
        if end is not None:
            self._error = RunFailed(end)
            return False
        self._restarts += 1
        if not may_pass(error) or self._restarts > self._settings.restart_attempts:
            return False
        # Shifted by what keeps the number small; any cap is below 2**64.
        waits = min(
            self._settings.restart_backoff_ms << min(self._restarts - 1, 63),
            self._settings.max_backoff_ms,
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
        """Whether a record waits, or somebody asked for dead letters to be sent again."""
        return self._engine.next_due_ms is not None or bool(self._state.pending_replays())

    def _wait_until_due(self) -> bool:
        """Wait; True if the query is to stop."""
        while not self._leaving.is_set():
            due = self._engine.next_due_ms
            left = 0 if due is None else due - self._engine.clock()
            if left <= 0 or self._state.pending_replays():
                return False
            # In steps: the clock may be another than this machine's.
            self._leaving.wait(min(left / 1000, self._poll_s))
        return True

    # ------------------------------------------------------------------------------- for others

    @property
    def spark_query(self) -> StreamingQuery | None:
        """Spark's own query, None while it is being started; stop it through `stop`."""
        return self._spark_query

    @property
    def is_active(self) -> bool:
        """Whether it has not ended."""
        return not self._ended.is_set()

    @property
    def exception(self) -> Exception | None:
        """What it ended with: None as long as it runs, or if it was stopped or is through."""
        return self._error if self._ended.is_set() else None

    @property
    def progress(self) -> Progress | None:
        """The last micro-batch that is done; None before the first of this run."""
        return self._recent[-1] if self._recent else None

    @property
    def recent_progress(self) -> list[Progress]:
        """The last micro-batches, the newest one last."""
        return list(self._recent)

    @property
    def books(self) -> Books:
        """Everything since the checkpoint was made, after the last micro-batch that is done."""
        return self._books

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until it ends.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most.

        Returns
        -------
        bool
            Whether it has ended.

        Raises
        ------
        SinkError, RunFailed, RunCancelled, StateError
            If it ended with one of them.
        Exception
            If Spark's query failed by itself: at a source, for instance.
        """
        ended = self._ended.wait(timeout)
        if ended and self._error is not None:
            raise self._error
        return ended

    def stop(self, finish: bool = False) -> None:
        """End it and wait until it has ended; what is not done goes on at the next start.

        From within a sink it is only asked for: the sink is part of what ends.

        Parameters
        ----------
        finish : bool, default False
            Let the micro-batch that runs come to its end first.  Otherwise it is given up, and no
            record's attempt is counted for it; another call does so while one waits for the end.
        """
        self._leaving.set()
        if not finish:
            self._stopping.set()
        with self._changed:
            self._changed.notify_all()
            if self._at_work is threading.current_thread():
                threading.Thread(target=self.stop, args=(finish,), daemon=True).start()
                return
        if finish:
            self._finish()
        spark_query = self._spark_query
        if spark_query is not None and not self._ended.is_set():
            with contextlib.suppress(Py4JError, OSError):  # of a JVM that is gone
                spark_query.stop()
        self._thread.join()

    def _finish(self) -> None:
        """Wait until no micro-batch runs, and until Spark has noted the end of the last one."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._at_work is None or self._stopping.is_set() or self._ended.is_set()
            )
        last = self.progress
        if last is not None:
            commits = self._spark_checkpoint / "commits"
            # An interrupt before Hadoop's checksum, which may not come at all, is a long warning.
            noted = ((str(last.batch_id), _COMMIT_S), (f".{last.batch_id}.crc", _CHECKSUM_S))
            for name, patience in noted:
                until = time.monotonic() + patience
                while not ((commits / name).exists() or self._ended.is_set()):
                    if self._stopping.wait(0.01) or time.monotonic() > until:
                        break
        self._stopping.set()


def _united(topology: Topology) -> tuple[DataFrame, str | None]:
    """Return the sources as one stream: the only one as it is, several side by side as structs."""
    spouts = list(topology.spouts.values())
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
