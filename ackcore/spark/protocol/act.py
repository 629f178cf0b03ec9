"""What follows from a decision: sinks and dead letters, each until it took its rows or gave up."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping

import pyarrow as pa
from pyspark.sql import SparkSession

from ackcore._records import Int64s
from ackcore.retry import capped_doubling
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import (
    CheckpointCorrupt,
    CheckpointForeign,
    CheckpointInUse,
    RowFileDamaged,
    one_line,
)
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.interrupts import cancelling, raise_if_interrupted
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.state import State
from ackcore.spark.sinks.interface import Accepted, AcceptedFile, write_sink
from ackcore.spark.tasks.row_files import damage_in
from ackcore.topology.builder import Topology
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.settings import Settings

_log = logging.getLogger("ackcore")

#: Records the dead of a micro-batch, by its number and by spout; may be called again with them.
DeadLetterWriter = Callable[[int, Mapping[str, pa.Table]], object]
#: Waits for some seconds; True if the query is to stop.
Pause = Callable[[float], bool]


class SinkError(RuntimeError):
    """A sink or the dead-letter store failed again and again; the message names it."""


class Stopped(Exception):
    """The query is being stopped while a micro-batch is under way; it goes on at the restart."""


def act(
    topology: Topology,
    spark: SparkSession,
    state: State,
    decision: BatchDecision,
    write_dead_letters: DeadLetterWriter,
    pause: Pause,
    age_ms: int | None = None,
) -> None:
    """Hand the accepted rows to the sinks, then the dead to the dead-letter store.

    ``age_ms`` is how old a decision is that another driver made, as `Accepted` has it.

    Raises
    ------
    SinkError
        If one of them failed as often as the settings allow; it is named.
    CheckpointCorrupt
        If a file with the rows is not as the run left it.
    CheckpointForeign
        If there are rows of a stream that has no sink any more, or a sink cannot tell whether it
        has taken them.
    CheckpointInUse
        If another driver has taken over.
    Stopped
        If the query is being stopped.
    RunCancelled
        If a job of a sink was cancelled from outside.
    """
    number = decision.number
    _refuse_left_rows(topology, decision)
    work = state.runs.of(decision)
    nonacked: Int64s = decision.nonacked["root_id"].to_numpy()
    for sink in topology.sinks.values():
        files = [
            file
            for file in decision.files
            if (file.component, file.stream) == (sink.component, sink.stream) and file.rows
        ]
        if not files:
            continue
        accepted = Accepted(
            spark=spark,
            sink=sink.name,
            deployment=f"{state.deployment_key:016x}",
            checkpoint=str(state.path.parent),
            batch_id=number,
            files=tuple(AcceptedFile(str(work / file.path), file.rows) for file in files),
            nonacked=nonacked,
            age_ms=age_ms,
        )

        def write(writer: object = sink.writer, accepted: Accepted = accepted) -> None:
            try:
                refused = write_sink(writer, accepted)
            except Exception as error:
                _refuse_damaged(accepted, error)
                raise
            if refused is not None:
                raise refused
            failpoint("in-sink", number)

        _insist(f"sink {sink.name!r}", number, write, spark, topology.settings, pause)
    dead = decision.dead
    if dead:

        def park() -> None:
            write_dead_letters(number, dead)
            failpoint("in-dead-letters", number)

        _insist("the dead-letter store", number, park, spark, topology.settings, pause)


def _refuse_left_rows(topology: Topology, decision: BatchDecision) -> None:
    """Raise `CheckpointForeign` rather than drop rows with the sink that they were accepted for."""
    taken = {(sink.component, sink.stream) for sink in topology.sinks.values()}
    left = Counter[str]()
    for file in decision.files:
        if (file.component, file.stream) not in taken:
            stream = "" if file.stream == DEFAULT_STREAM else f", stream {file.stream!r}"
            left[f"{file.component!r}{stream}"] += file.rows
    for name, rows in (+left).items():
        raise CheckpointForeign(
            f"micro-batch {decision.number} is decided, its {rows} rows of {name} are not written "
            "yet, and the topology has no sink for them any more. Let the former one finish the "
            f"micro-batch (accept_changes=True), then change it; or give {name} a sink, a function "
            "that does nothing if the rows are not wanted"
        )


def _refuse_damaged(accepted: Accepted, error: Exception) -> None:
    """Raise `CheckpointCorrupt` if a sink failed over rows that are not those of the run."""
    damage = damage_in(error)
    if damage is None:
        try:  # a writer may tell nothing of what it met
            accepted.verify()
        except RowFileDamaged as found:
            damage = found
    if damage is not None:
        raise CheckpointCorrupt(str(damage)) from error


def _insist(
    what: str,
    number: int,
    write: Callable[[], None],
    spark: SparkSession | None,
    settings: Settings,
    pause: Pause,
) -> None:
    """Call a writer until it returns, with longer and longer pauses, as often as is allowed."""
    handled = sys.exception()
    for attempt in range(1, settings.sink_attempts + 1):
        check_fence()
        raised: list[BaseException] = []
        try:
            with cancelling(spark) as raised:
                write()
            return
        except (CheckpointCorrupt, CheckpointForeign, CheckpointInUse):
            raise  # it will be no better next time
        except (Exception, SystemExit) as error:
            if raised:  # by a signal's handler: that is no failure of the sink
                raise raised[-1] from (None if error is raised[-1] else error)
            said = f"{type(error).__name__}: {one_line(error)}"
            if pause(0):
                raise Stopped(f"stopped while {what} was failing: {said}") from error
            raise_if_interrupted(
                error,
                handled,
                f"micro-batch {number}, in {what},",
                "What is decided is recorded: start again on the same checkpoint to go on",
            )
            if attempt == settings.sink_attempts:
                raise SinkError(
                    f"{what} failed {attempt} times with micro-batch {number}, the last time with "
                    f"{said}. What is decided is recorded: when the cause is gone, start again on "
                    "the same checkpoint, and it goes on there"
                ) from error
            waits = capped_doubling(settings.sink_backoff_ms, attempt, settings.max_backoff_ms)
            _log.warning(
                "%s failed with micro-batch %d, attempt %d of %d, again in %.1f s: %s",
                what,
                number,
                attempt,
                settings.sink_attempts,
                waits / 1000,
                said,
            )
            if pause(waits / 1000):
                raise Stopped(f"stopped while {what} was failing: {said}") from error
