"""The entry points that run a topology: `start` for streams, `run_batch` for sources that end.

A loop of ackcore makes the micro-batches of planned spouts.  If a spout is a streaming DataFrame,
Spark makes them, with a heartbeat among its sources; ackcore then uses Spark's numbers.  Spark
keeps the offsets of each number in ``<checkpoint>/spark``, and ackcore keeps plans and outcomes in
``<checkpoint>/ackcore``.  A source that ends is micro-batch 0; the later ones are its retries.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ackcore._error_hints import naming_arguments
from ackcore.spark.base.clocks import Clock, wall_clock_ms
from ackcore.spark.base.interrupts import raise_if_interrupted
from ackcore.spark.base.session import ALIVE_S, is_connect, keep_alive
from ackcore.spark.base.versions import Py4JError
from ackcore.spark.checks import check_callable
from ackcore.spark.dead_letters.topic import Place
from ackcore.spark.deployment import Deployment
from ackcore.spark.engine.batch import Engine
from ackcore.spark.engine.causes import check_run
from ackcore.spark.engine.progress import Counts, Progress
from ackcore.spark.engine.setup import InputFrame
from ackcore.spark.inspect.status import PendingTree, read_pending
from ackcore.spark.listeners import Listeners
from ackcore.spark.loop import LoopStream
from ackcore.spark.spark_stream import SparkStream
from ackcore.spark.stream import Stream
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")


@naming_arguments
def start(
    topology: Topology,
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    *,
    trigger: str | Mapping[str, Any] | None = None,
    max_dead: int | None = None,
    max_dead_ratio: float | None = 1.0,
    dead_letters: Place = None,
    spark_checkpoint: str | os.PathLike[str] | None = None,
    accept_changes: bool = False,
    listeners: Sequence[Any] = (),
    clock: Clock = wall_clock_ms,
) -> Query:
    """Run a topology on sources that grow.

    Parameters
    ----------
    topology : Topology
        A topology from `TopologyBuilder.build`.  The source of each spout is a `KafkaSpout`, a
        `PlannedSource` or a streaming DataFrame.
    spark : SparkSession
        A classic session, or one of Spark Connect if no source is a DataFrame.
    checkpoint : path
        A directory for this query alone, on a file system that driver and executors share, or the
        URL of a place in a bucket (``s3://bucket/place``) or in HDFS (``hdfs://host:8020/place``).
        If you start the query again with the same checkpoint, it continues, also after a crash.
    trigger : str or mapping, optional
        A trigger in Spark's form: ``"1 second"`` or ``{"processingTime": "1 second"}`` for the
        interval of micro-batches, ``{"availableNow": True}`` to read the present data and end when
        no record waits any more; None for micro-batches as soon as there is something new.
    max_dead : int, optional
        The maximum number of dead records among those that ended (ACKED or DEAD) since this start;
        one more ends the query with `TooManyDead`.  It is checked after each micro-batch, and
        each start counts from zero.  ``Settings.max_dead_window`` limits the check to the last
        records.
    max_dead_ratio : float or None, default 1.0
        The maximum share of dead records among the same records, from 0 to 1; if all of them are
        dead, the query always ends.  None for no limit.  It is checked from ten dead records on,
        and with ``availableNow`` also at the end, for any number.  A record that was seen before
        this start does not count as dead.
    dead_letters : path or DeadLetterTopic, optional
        The directory of the dead letters, or the URL of a place in a bucket or in HDFS; only a URL
        if the checkpoint is at a URL.  By default the place of the last start, and at the first
        start ``<checkpoint>/ackcore/dead_letters``.  With a topic, dead letters are sent to it as
        well.
    spark_checkpoint : path, optional
        For a source that is a DataFrame, the directory of Spark's own part, which only the driver
        reads and writes, and which the next driver must find again; ``<checkpoint>/spark`` by
        default.  Required for such a source if the checkpoint is in a bucket, else not used.
    accept_changes : bool, default False
        Whether to continue although the topology differs from the one that made the checkpoint.
        Its spouts must be the same, in any order.  A refused start records no change.
    listeners : sequence of QueryListener, optional
        The listeners, which are called for each micro-batch, for dead letters, and at the end.
    clock : callable, optional
        Returns milliseconds since 1970; by default the machine's time.

    Returns
    -------
    Query
        The running query.

    Raises
    ------
    TypeError
        If a source is a DataFrame of Spark Connect, a column of it has a type that cannot be kept
        or grouped by, a bolt cannot be pickled, or a sink cannot take its stream.
    ValueError
        If the session was stopped, the topology has no spout, or a source is bounded or has columns
        that differ in case only. If the trigger is not one of Spark's, or a limit on the dead is
        out of range. If the checkpoint is in a bucket, and `dead_letters` is not or a required
        `spark_checkpoint` is missing.
    StateError
        If the checkpoint cannot be used; its subclasses distinguish the causes.
    WorkerPythonError, SinkUnavailable
        If the workers' Python cannot run ackcore, or the target of a sink cannot be used.
    """
    deployment = Deployment(
        topology,
        spark,
        checkpoint,
        streaming=True,
        max_dead=max_dead,
        max_dead_ratio=max_dead_ratio,
        dead_letters=dead_letters,
        accept_changes=accept_changes,
        listeners=listeners,
        clock=clock,
        trigger=trigger,
        spark_checkpoint=spark_checkpoint,
    )
    try:
        stream = SparkStream(deployment) if deployment.by_spark else LoopStream(deployment)
    except BaseException:
        deployment.close()
        raise
    return Query(stream, deployment.checkpoint)


@naming_arguments
def run_batch(
    topology: Topology,
    spark: SparkSession,
    checkpoint: str | os.PathLike[str],
    *,
    max_dead: int | None = None,
    max_dead_ratio: float | None = 1.0,
    dead_letters: Place = None,
    accept_changes: bool = False,
    listeners: Sequence[Any] = (),
    clock: Clock = wall_clock_ms,
    wait: Callable[[float], object] = time.sleep,
) -> Counts:
    """Run a topology whose spouts end, until each of their records is ACKED or DEAD.

    Parameters
    ----------
    topology : Topology
        A topology from `TopologyBuilder.build`.  The source of each spout is a bounded DataFrame,
        or a `KafkaSpout` or `PlannedSource`, of which the rows are read that exist at the start.
    spark : SparkSession
        A classic session or one of Spark Connect.
    checkpoint : path
        A directory for this run alone, on a file system that driver and executors share, or the URL
        of a place in a bucket (``s3://bucket/place``) or in HDFS (``hdfs://host:8020/place``).
        After a crash, a call with the same checkpoint continues.  After the end a call only sends
        replayed dead letters through; if there are none, it warns and returns the counts. So each
        run of a nightly job needs a new checkpoint.
    max_dead : int, optional
        The maximum number of records that are dead at the end.  A record that succeeded in a replay
        is no longer dead.
    max_dead_ratio : float or None, default 1.0
        The maximum share of the records read that are dead at the end, from 0 to 1.  With any
        share, also 1.0, the run fails if all records are dead; None for no limit on the share.
    dead_letters, accept_changes, listeners, clock
        The place of the dead letters, whether the topology may differ from the one that made the
        checkpoint, the listeners, and the time in milliseconds since 1970; see `start`.
    wait : callable, optional
        Called with the seconds until the next retry is due; by default `time.sleep`.

    Returns
    -------
    Counts
        The counts since the first call with this checkpoint.

    Raises
    ------
    TypeError
        If a column of a source has a type that cannot be kept or grouped by, a bolt cannot be
        pickled, or a sink cannot take its stream or needs a classic session.
    ValueError
        If the session was stopped, the topology has no spout, or a source is a stream or has
        columns that differ in case only. If a limit on the dead is out of range. If the checkpoint
        is in a bucket, and `dead_letters` is not.
    TooManyDead
        If too many records are dead.  It is raised after the end, when all is recorded, and again
        by each further call.  It lists the errors of the dead records; within the limit, a warning
        lists them.
    StateError
        If the checkpoint cannot be used; its subclasses distinguish the causes.
    RunFailed
        If Spark cannot run a micro-batch.
    RunCancelled
        If a job was cancelled from outside.  A call with the same checkpoint continues.
    SinkError
        If a sink or the dead-letter store fails too often.
    SourceError
        If a planned source fails for good, or breaks a rule of `PlannedSource`.
    WorkerPythonError, SinkUnavailable
        If the workers' Python cannot run ackcore, or the target of a sink cannot be used.
    KeyboardInterrupt, SystemExit
        If a signal handler raised it.  Any other exception of a handler is raised, too.  The job
        is cancelled; a call with the same checkpoint continues.
    """
    check_callable("wait", wait)
    handled = sys.exception()
    deployment = Deployment(
        topology,
        spark,
        checkpoint,
        streaming=False,
        max_dead=max_dead,
        max_dead_ratio=max_dead_ratio,
        dead_letters=dead_letters,
        accept_changes=accept_changes,
        listeners=listeners,
        clock=clock,
    )
    with closing(deployment):
        engine, topology = deployment.engine(), deployment.topology
        deployment.state.record_topology()
        new = [
            InputFrame(spout.source, spout.name)
            for spout in topology.spouts.values()
            if spout.kind is None
        ]
        patient = partial(_wait, spark, wait)
        with deployment.listeners.of_run(engine):
            try:
                ran = run_to_end(
                    engine, new, lambda: _nothing(topology, spark), patient, deployment.listeners
                )
            except Py4JError as error:  # the call of Spark that Ctrl-C interrupted may fail so
                way_out = "Call run_batch with the same checkpoint to continue"
                raise_if_interrupted(error, handled, spark, "the run", way_out)
                raise
            if not ran:
                _log.warning(
                    "the run with checkpoint %s has ended, so nothing was run; new data of the "
                    "source needs a new checkpoint",
                    deployment.checkpoint,
                )
            reasons = deployment.letters.reasons()
            check_run(engine.counts, reasons, deployment.checkpoint, deployment.limit)
        return engine.counts


def run_to_end(
    engine: Engine,
    new: Sequence[InputFrame],
    nothing: Callable[[], Sequence[InputFrame]],
    wait: Callable[[float], object],
    listeners: Listeners,
) -> bool:
    """Run micro-batch 0 and those of its retries and replays, until each record is ACKED or DEAD.

    Continues after the last micro-batch on record. Returns whether any was run.

    ``new``: the rows of micro-batch 0. ``nothing``: returns the inputs of each later one, which
    have no rows. ``wait``: called with the seconds until the next retry is due.
    """
    state = engine.state

    def process(number: int, inputs: Sequence[InputFrame]) -> None:
        progress = engine.process(number, inputs)
        listeners.done(progress, engine.counts, state.decision(number))

    ran = state.last_done is None
    if ran:
        process(0, new)
    while True:
        unfinished = state.last_plan != state.last_done
        due = engine.next_due_ms
        asked = bool(state.pending_replays()) or engine.has_closed_rows
        if due is None and not asked and not unfinished:
            return ran
        left = 0 if due is None or asked or unfinished else due - engine.clock()
        if left > 0:
            wait(left / 1000)
            continue
        assert state.last_done is not None
        ran = True
        process(state.last_done + 1, nothing())


def _wait(spark: SparkSession, wait: Callable[[float], object], seconds: float) -> None:
    """Call ``wait``, and keep the session alive.

    On Spark Connect it waits for 300 s at most, because the server ends idle sessions.
    """
    wait(min(seconds, ALIVE_S) if is_connect(spark) else seconds)
    keep_alive(spark)


def _nothing(topology: Topology, spark: SparkSession) -> list[InputFrame]:
    """Return the inputs of a micro-batch without new rows; none if planned spouts have inputs."""
    first, closed = next(iter(topology.spouts.values())), topology.closed
    if any(
        spout.kind is not None and spout.name not in closed for spout in topology.spouts.values()
    ):
        return []  # such spouts have an input in each micro-batch
    return [InputFrame(spark.createDataFrame([], first.source.schema), first.name)]


class Query:
    """A topology that runs on a stream, as returned by `start`."""

    def __init__(self, stream: Stream, checkpoint: str) -> None:
        self._stream = stream
        self._checkpoint = checkpoint
        self._pid = os.getpid()

    def __repr__(self) -> str:
        status = "active" if self.is_active else "ended"
        return f"<Query on {self._checkpoint}, {status}>"

    def _own(self, call: str) -> Stream:
        """Return the stream; raise RuntimeError in a forked process, which does not run it."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{call} was called in process {os.getpid()}, a fork of process {self._pid}, "
                "which runs the query; call it there, or start the query after the fork"
            )
        return self._stream

    @property
    def spark_query(self) -> StreamingQuery | None:
        """Spark's own query; None while it is being started. Stopping it stops this query.

        None if all spouts are planned (`PlannedSource`, `KafkaSpout`): Spark then has no query.
        """
        return self._stream.spark_query

    @property
    def is_active(self) -> bool:
        """Whether the query is running."""
        return not self._stream.ended.is_set()

    @property
    def exception(self) -> Exception | None:
        """The exception that ended the query. None while it runs, after a stop and a normal end."""
        return self._stream.error if self._stream.ended.is_set() else None

    @property
    def progress(self) -> Progress | None:
        """The report of the last finished micro-batch; None before the first one of this run."""
        return self._stream.recent[-1] if self._stream.recent else None

    @property
    def recent_progress(self) -> list[Progress]:
        """The last finished micro-batches of this run, 100 at most, the newest last."""
        return list(self._stream.recent)

    @property
    def counts(self) -> Counts:
        """The counts since the checkpoint was made, as of the last finished micro-batch."""
        return self._stream.counts

    def pending_tree(self, message_id: str, *, spout: str | None = None) -> PendingTree | None:
        """Return the reason why a record is waiting.

        Parameters
        ----------
        message_id : str
            The record's message id, as in ``tuple.message_id``.
        spout : str, optional
            The record's spout; by default the first spout that has this id.

        Returns
        -------
        PendingTree or None
            The time of the next attempt, the bolt and error of the last one and, if it was traced
            (``trace_per_million``), the bolts it passed; ``print`` shows it. None if no attempt
            has failed, or if the record is ACKED, DEAD or unknown.

        Raises
        ------
        StateError
            If the checkpoint cannot be read.
        """
        return read_pending(self._checkpoint, message_id, spout=spout)

    def await_termination(self, timeout: float | None = None) -> bool:
        """Wait until the query has ended.

        Parameters
        ----------
        timeout : float, optional
            The maximum number of seconds to wait; None waits without a limit.

        Returns
        -------
        bool
            Whether it has ended.

        Raises
        ------
        SinkError, RunFailed, RunCancelled, StateError, SourceError, TooManyDead
            If it ended with this error.
        RuntimeError
            If a sink, a source or a listener calls it without a timeout: it would wait for itself.
            If this, `process_all_available` or `stop` is called in a forked process.
        Exception
            Any other error that ended it, for instance of Spark's query at a source.
        """
        return self._own("await_termination()").wait(timeout)

    def process_all_available(self) -> None:
        """Wait until each record that the sources have now is ACKED or DEAD.

        Like Spark's ``processAllAvailable``, but also waits for retries and replays. For tests and
        notebooks: with a source that never pauses it may never return. It also returns when the
        query is stopped.

        Raises the error that ended the query. Raises RuntimeError if a sink, a source or a listener
        calls it, or a forked process.
        """
        self._own("process_all_available()").process_all_available()

    def stop(self, finish: bool = False) -> None:
        """Stop the query and wait for its end. The next start continues unfinished work.

        The error of a query that has failed is not raised here. If a sink, a source or a listener
        calls it, it returns at once: they are part of the query.

        Parameters
        ----------
        finish : bool, default False
            Whether to finish the running micro-batch first. Otherwise it is abandoned, and does not
            count as an attempt of its records. A second call abandons it while the first one waits.
        """
        self._own("stop()").stop(finish)
