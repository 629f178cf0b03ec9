"""The act step: write rows to the sinks and dead letters to the store, with retries."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
from pyspark.sql import SparkSession

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, RowFileDamaged
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.refusals import Refusal
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.insist import Calls, Failed, Pause
from ackcore.spark.engine.refusals import blames_a_row, isolate, refused_rows, without_refused
from ackcore.spark.sinks.rejects import InvalidRejects, SinkRejects
from ackcore.spark.sinks.sink import as_sink
from ackcore.spark.sinks.sink_batch import BatchFile, SinkBatch
from ackcore.spark.tasks.row_files import damage_in
from ackcore.topology.builder import Topology
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import SinkSpec
from ackcore.topology.settings import Settings

#: Writes the dead records of a micro-batch, given its number and the records by spout; repeatable.
DeadLetterWriter = Callable[[int, Mapping[str, pa.Table]], object]


def ask_sinks(
    topology: Topology,
    spark: SparkSession | None,
    state: State,
    decision: BatchDecision,
    pause: Pause,
    age_ms: int | None = None,
) -> None:
    """Write the accepted rows to the sinks, and record which rows they refuse.

    ``age_ms`` is the age of a decision that another driver made; see `SinkBatch`.

    Raises
    ------
    SinkError
        If a sink failed as often as the settings allow; the message names it.
    CheckpointCorrupt
        If a file with the rows differs from what the run wrote.
    InvalidRejects
        If a sink's refusal is invalid: it names no rows, or rows that the sink was not given.
    TooManyRefused
        If a sink refuses more rows than its `max_refused`.
    CheckpointForeign
        If the stream of some rows has no sink any more, or it is unknown whether a sink has taken
        the rows.
    CheckpointInUse
        If another driver has taken over.
    Stopped
        If the query is being stopped.
    RunCancelled
        If a Spark job of a sink was cancelled from outside.
    """
    number, nonacked = decision.number, decision.nonacked
    assert isinstance(nonacked, pa.Table)  # as on record
    _refuse_left_rows(topology, decision)
    work = state.runs.of(decision)
    known = state.refusals.of(number)
    for sink in topology.sinks.values():
        files = [
            file
            for file in decision.files
            if (file.component, file.stream) == (sink.component, sink.stream) and file.rows
        ]
        if not files:
            continue
        accepted = SinkBatch(
            spark=spark,  # type: ignore[arg-type] # None if no sink needs one
            sink=sink.name,
            deployment=f"{state.deployment_key:016x}",
            checkpoint=state.url,
            batch_id=number,
            files=tuple(
                BatchFile(os.path.join(work, file.path), file.rows, nbytes=file.nbytes)
                for file in files
            ),
            nonacked=nonacked["root_id"].to_numpy(),
            age_ms=age_ms,
        )
        asked = _Asked(sink, accepted, Calls(spark, number, pause), topology.settings)
        said = [one for one in known if one.sink == sink.name]
        while not any(one.written for one in said):
            refusal = asked.without(said)
            if refusal is None:
                break
            state.refusals.add(number, len(known), refusal)
            failpoint("refused", number)
            said.append(refusal)
            known.append(refusal)


def park_dead(
    spark: SparkSession | None,
    decision: BatchDecision,
    write_dead_letters: DeadLetterWriter,
    pause: Pause,
    settings: Settings,
) -> None:
    """Write a micro-batch's dead records to the dead-letter store; raises like `ask_sinks`."""
    number, dead = decision.number, decision.all_dead
    if not dead:
        return

    def park() -> None:
        write_dead_letters(number, dead)
        failpoint("in-dead-letters", number)

    Calls(spark, number, pause).insist("the dead-letter store", park, settings)


class _Asked:
    """One sink and the micro-batch that it is given, until it takes the rows or refuses some."""

    def __init__(
        self, sink: SinkSpec, accepted: SinkBatch, calls: Calls, settings: Settings
    ) -> None:
        self._sink = sink
        self._accepted = accepted
        self._calls = calls
        self._settings = settings
        self._what = f"sink {sink.name!r}"
        self._writer = as_sink(sink.writer)

    def without(self, said: Sequence[Refusal]) -> Refusal | None:
        """Write the rows that the sink has not refused; return its new refusal, or None."""
        accepted = without_refused(self._accepted, said)

        def bisect(error: BaseException) -> Refusal | None:
            if not blames_a_row(self._sink, error):
                return None
            found = isolate(self._sink, accepted, error, self._probe)
            return None if found is None else self._refusal(found, accepted, written=False)

        return self._calls.insist(
            self._what,
            lambda: self._write(accepted),
            self._settings,
            bisect if self._sink.isolate else None,
            _way_out(self._sink),
            fenced=self._writer.checks_fence,
        )

    def _write(self, accepted: SinkBatch) -> Refusal | None:
        try:
            rejects = self._writer.write(accepted)
        except SinkRejects as raised:
            refusal = self._refusal(raised, accepted, written=False)
            if not len(refusal.rows):
                raise InvalidRejects("it raised them, and they name no rows") from raised
            return refusal
        except Exception as error:
            _refuse_damaged(accepted, error)
            raise
        failpoint("in-sink", accepted.batch_id)
        return self._refusal(rejects, accepted, written=True) if rejects else None

    def _refusal(self, rejects: SinkRejects, accepted: SinkBatch, written: bool) -> Refusal:
        return Refusal(self._sink.name, written, refused_rows(rejects, accepted))

    def _probe(self, part: SinkBatch) -> BaseException | None:
        try:
            self._calls.once(
                self._what,
                lambda: self._writer.write(part),
                fenced=self._writer.checks_fence,
            )
        except Failed as failed:
            return failed.error
        return None


def _way_out(sink: SinkSpec) -> str:
    """Return the hint for a sink that fails because of rows: how it can name them."""
    if sink.isolate:
        return (
            ". Bisected, as isolate asks for, the batch has no row that fails by itself while "
            "others are written"
        )
    if not as_sink(sink.writer).replaces:
        return ""  # parts of a batch cannot be rewritten
    return (
        ". Where rows are at fault, have it return or raise SinkRejects, which names them, or "
        "declare it with isolate=True, by which the batch is bisected to them: their records go to "
        "the dead letters then, and the query goes on"
    )


def _refuse_left_rows(topology: Topology, decision: BatchDecision) -> None:
    """Raise `CheckpointForeign` if accepted rows belong to a stream whose sink was removed."""
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


def _refuse_damaged(accepted: SinkBatch, error: Exception) -> None:
    """Raise `CheckpointCorrupt` if a failed sink's files differ from what the run wrote."""
    damage = damage_in(error)
    if damage is None:
        try:  # the writer's error may not show the damage
            accepted.verify()
        except RowFileDamaged as found:
            damage = found
    if damage is not None:
        raise CheckpointCorrupt(str(damage)) from error
