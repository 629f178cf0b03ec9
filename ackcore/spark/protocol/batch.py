"""One micro-batch, from plan to mark: the protocol that makes each record's outcome certain.

======  ==========================================================================================
plan    the time, and with it the retries that are due, are recorded
run     one Spark action; what it leaves is of no consequence until it is accepted
check   its parts agree with each other, and the payloads of what failed were found
decide  who waits, who is dead and which rows the sinks get are recorded, in one rename
act     sinks and dead letters; repeated after a crash, under the same number
mark    it is done
======  ==========================================================================================

Whenever the driver dies, the next one goes on behind the last of these that is on record.  A run
that died leaves only the number of deaths in the plan; a decision is never made a second time.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from ackcore._records import Int64s
from ackcore.arrow import rebatched
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.clocks import Clock, SteadyClock, wall_clock_ms
from ackcore.spark.base.errors import StateError, one_line
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.interrupts import RunCancelled, interruptible, raise_if_interrupted
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan, Retries
from ackcore.spark.checkpoint.state import State
from ackcore.spark.protocol.act import DeadLetterWriter, Pause, Stopped, act
from ackcore.spark.protocol.decide import (
    BatchOutcome,
    Disagreement,
    check_payloads,
    decide,
    propagate_failures,
    reject,
)
from ackcore.spark.protocol.progress import Account, Books, Progress, percentiles
from ackcore.spark.protocol.suspects import (
    deaths_logged,
    failed_attempt,
    isolation_progress,
    rejections,
    update_suspects,
)
from ackcore.spark.run.action import run as run_on_spark
from ackcore.spark.run.reread import fetch as fetch_payloads
from ackcore.spark.run.snapshot import load_snapshot, snapshot_inputs
from ackcore.spark.run.types import InputFrame, RunPlan, RunResult
from ackcore.spark.settle.reasons import FAILED
from ackcore.spark.tasks.markers import ALONE, died
from ackcore.spark.tasks.workfiles import RowFile, WorkFile, damage_in
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout
from ackcore.topology.tuples import Raised

_log = logging.getLogger("ackcore")

#: What a run may end in that another run might not.
_MAY_PASS = (Disagreement, Py4JError, PySparkException, RuntimeError, OSError, EOFError)
#: The pause before a micro-batch is run again, and where its doubling ends.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


#: Calls that raised, of one bolt in one micro-batch, of which more are told.
MANY_CALLS = 100

#: How the text begins by which a worker tells that it could not load its task.
_NO_MODULE = "ModuleNotFoundError: "


class RunFailed(RuntimeError):
    """A micro-batch could not be run, again and again; nothing was decided about its records."""


class Runner(Protocol):
    """`ackcore.spark.run.action.run`, or what a test puts in its place."""

    def __call__(  # noqa: D102
        self, topology: Topology, layout: Layout, inputs: Sequence[InputFrame], plan: RunPlan
    ) -> RunResult: ...


class Fetcher(Protocol):
    """`ackcore.spark.run.reread.fetch`, or what a test puts in its place."""

    def __call__(  # noqa: D102
        self,
        topology: Topology,
        layout: Layout,
        inputs: Sequence[InputFrame],
        plan: RunPlan,
        accepted: RunResult,
        failed: pa.Table,
    ) -> Mapping[str, pa.Table]: ...


class Engine:
    """Takes micro-batches through the protocol, one after the other.

    Parameters
    ----------
    topology : Topology
        What runs.
    spark : SparkSession
        Where.
    state : State
        The open checkpoint.
    write_dead_letters : callable
        Given a micro-batch's number and its dead by spout; repeatable.
    clock : callable, optional
        Returns milliseconds since 1970.
    pause : callable, optional
        Waits for so many seconds and tells whether to stop.
    run, fetch : callable, optional
        What runs a micro-batch and what reads failed records again.
    load_snapshot, snapshot_inputs : callable, optional
        What finds the rows that an earlier run has kept, and what keeps them.
    """

    def __init__(
        self,
        topology: Topology,
        spark: SparkSession,
        state: State,
        write_dead_letters: DeadLetterWriter,
        *,
        clock: Clock = wall_clock_ms,
        pause: Pause | None = None,
        run: Runner = run_on_spark,
        fetch: Fetcher = fetch_payloads,
        load_snapshot: Callable[
            [Sequence[InputFrame], Path], list[InputFrame] | None
        ] = load_snapshot,
        snapshot_inputs: Callable[[Sequence[InputFrame], Path], list[InputFrame]] = snapshot_inputs,
    ) -> None:
        self.topology = topology
        self.layout = Layout.of(topology)
        self.state = state
        self._spark = spark
        self._write_dead_letters = write_dead_letters
        self._pause = pause if pause is not None else _sleep
        self._run = run
        self._fetch = fetch
        self._load_snapshot = load_snapshot
        self._snapshot_inputs = snapshot_inputs
        self._spouts = tuple(name for name, spout in topology.spouts.items() if spout.tracked)
        plan = None if state.last_plan is None else state.plan(state.last_plan)
        #: Never behind the last plan, so that what is due comes due.
        self.clock = SteadyClock(clock, 0 if plan is None else plan.now_ms)

    # ------------------------------------------------------------------------ what is on record

    @property
    def books(self) -> Books:
        """The books after the last micro-batch that is done."""
        last = self.state.last_done
        return Books() if last is None else self._books_after(last)

    @property
    def next_due_ms(self) -> int | None:
        """When the first of the records that wait is due."""
        last = self.state.last_done
        decision = None if last is None else self.state.decision(last)
        return None if decision is None else decision.waiting.next_due_ms

    def _books_after(self, number: int) -> Books:
        decision = self.state.decision(number)
        return Books() if decision is None else Books.from_json(decision.totals)

    # ----------------------------------------------------------------------------- the protocol

    def process(self, number: int, inputs: Sequence[InputFrame]) -> Progress:
        """Take one micro-batch as far as it has not been taken yet.

        Parameters
        ----------
        number : int
            Its number: the last one's, or the one after it.
        inputs : sequence of InputFrame
            Its new rows.

        Returns
        -------
        Progress

        Raises
        ------
        RunFailed
            If it could not be run.
        RunCancelled
            If a job of it was cancelled from outside.
        SinkError
            If a sink or the dead-letter store failed too often.
        StateError
            If the checkpoint cannot be read or written.
        Stopped
            If the query was told to stop meanwhile.
        KeyboardInterrupt, SystemExit
            What a handler of a signal raised meanwhile.
        CheckpointInUse
            If another driver has taken over, whatever else that led to.
        """
        try:
            with fenced(self.state.check_owner):
                return self._process(number, inputs)
        except Stopped:
            raise
        except Exception:
            self.state.check_owner()
            raise

    def _process(self, number: int, inputs: Sequence[InputFrame]) -> Progress:
        watch = _Stopwatch()
        done = self.state.is_done(number)
        decision = self.state.decision(number)
        if done and decision is not None:
            return self._progress(decision, None, 0, watch)
        outcome, runs = None, 0
        if decision is None:
            try:
                plan = self._plan(number, watch)
                outcome, runs = self._accepted_run(plan, inputs, watch)
                decision = self.state.write_decision(outcome.decision)
                failpoint("decided", number)
            except (KeyboardInterrupt, SystemExit, Stopped, RunCancelled) as error:
                self._record_interrupt(number, error)
                raise
            watch.lap("decide")
        act(
            self.topology,
            self._spark,
            self.state,
            decision,
            self._write_dead_letters,
            self._pause,
        )
        failpoint("acted", number)
        watch.lap("act")
        self.state.write_done(number)
        failpoint("marked", number)
        self.state.prune(number)
        failpoint("pruned", number)
        watch.lap("mark")
        progress = self._progress(decision, outcome, runs, watch)
        progress.log()
        return progress

    def _plan(self, number: int, watch: _Stopwatch) -> Plan:
        plan = self.state.plan(number)
        # One on record is that of a driver which ended before it decided.  Whatever markers its
        # tasks left, nobody saw them die; but it may itself have died of what it ran.
        if plan is None:
            most = self.topology.settings.max_retries_per_batch
            plan = self._watched(self.state.make_plan(number, self.clock(), most))
        elif plan.interrupted:
            plan = self._bounded(replace(plan, interrupted=False))
        else:
            plan = self._bounded(self._record_death(plan))
        self.state.write_plan(plan)
        failpoint("planned", number)
        watch.lap("plan")
        return plan

    def _bounded(self, plan: Plan) -> Plan:
        """Hold a plan on record to a bound that was lowered, perhaps since it was too much."""
        most = self.topology.settings.max_retries_per_batch
        if plan.max_retries is not None and plan.max_retries <= most:
            return plan
        if sum(map(len, self.state.split_due(plan).due.values())) <= most:
            return plan
        # Root ids go by a record's place among the retries, so they are of other records now.
        return replace(plan, max_retries=most, suspects=(), rejected=(), time_outs={})

    def _record_death(self, plan: Plan) -> Plan:
        return self._watched(replace(plan, deaths=plan.deaths + 1))

    def _record_interrupt(self, number: int, error: BaseException) -> None:
        """Note that the driver was told to end, so that the next one counts no death."""
        if isinstance(error, RunCancelled) and error.shut_down:
            return  # nobody knows what ended the JVM: it may have died of a record
        with suppress(StateError):
            plan = self.state.plan(number)
            if plan is not None and self.state.decision(number) is None:
                self.state.write_plan(replace(plan, interrupted=True))

    def _watched(self, plan: Plan) -> Plan:
        enough = plan.deaths >= self.topology.settings.careful_after
        return replace(plan, careful=enough or bool(plan.suspects or plan.rejected))

    def _accepted_run(
        self, plan: Plan, inputs: Sequence[InputFrame], watch: _Stopwatch
    ) -> tuple[BatchOutcome, int]:
        """Run until a run is accepted."""
        in_vain, handled = 0, sys.exception()
        # Suspects of this driver's runs are of rows that come alike, those on record of a snapshot.
        taken = bool(plan.suspects or plan.rejected)
        for runs in count(1):
            work = self.state.runs.new(plan.number)
            try:
                held = inputs
                if plan.careful:
                    plan, held = self._use_snapshot(plan, inputs, taken)
                    taken = True
                return self._one_run(plan, held, work, watch), runs
            except Exception as error:
                if self._pause(0):
                    raise Stopped(f"stopped while micro-batch {plan.number} ran") from error
                damage = damage_in(error)
                if isinstance(error, StateError) and damage is None:
                    raise
                raise_if_interrupted(
                    error,
                    handled,
                    f"micro-batch {plan.number}",
                    "Nothing is decided about its records, and none of them has lost an attempt: "
                    "start again on the same checkpoint to go on",
                )
                if damage is None and not _may_pass(error):
                    raise self._given_up(plan, runs, error) from error
                known = isolation_progress(plan)
                if isinstance(error, Disagreement) or damage is not None:
                    said = damage or error
                    _log.warning("micro-batch %d is run again: %s", plan.number, said)
                else:
                    plan = self._after_death(plan, work, error)
                    self.state.write_plan(plan)
                # To know more of which records crash is progress: there may be more of them.
                in_vain = 0 if isolation_progress(plan) > known else in_vain + 1
                if in_vain >= self.topology.settings.run_attempts:
                    raise self._given_up(plan, runs, error) from error
                waits = min(_PAUSE_S * 2 ** (in_vain - 1), _LONGEST_PAUSE_S) if in_vain else 0
                if waits and self._pause(waits):
                    raise Stopped(f"stopped while micro-batch {plan.number} ran") from error
        raise AssertionError("unreachable")

    def _use_snapshot(
        self, plan: Plan, inputs: Sequence[InputFrame], taken: bool
    ) -> tuple[Plan, Sequence[InputFrame]]:
        """Have one run after the other read the same rows, so that roots tell who is meant."""
        directory = self.state.runs.snapshot(plan.number)
        held = self._load_snapshot(inputs, directory)
        if held is None:
            if taken and (plan.suspects or plan.rejected):
                # These are of rows that somebody took away.
                plan = replace(plan, suspects=(), rejected=(), time_outs={})
                self.state.write_plan(plan)
            held = interruptible(self._spark, lambda: self._snapshot_inputs(inputs, directory))
        return plan, held

    def _after_death(self, plan: Plan, work: Path, error: Exception) -> Plan:
        _log.warning(
            "micro-batch %d died, death %d: %s", plan.number, plan.deaths + 1, one_line(error)
        )
        markers = died(work)
        if not plan.careful:
            # Only that one was alone tells which record it was; more is worth a snapshot later.
            markers = [
                one if one.kind == ALONE else replace(one, roots=frozenset()) for one in markers
            ]
        plan = update_suspects(plan, markers, failed_attempt(error))
        return self._record_death(plan)

    def _given_up(self, plan: Plan, runs: int, error: BaseException) -> RunFailed:
        said = one_line(error)
        way_out = "when the cause is gone, start again on the same checkpoint"
        if said.startswith(_NO_MODULE):
            way_out = (
                "the workers' Python lacks what the driver's has. Point PYSPARK_PYTHON (or "
                f"spark.pyspark.python) to one that has it, here {sys.executable}, before the "
                f"session is made, or send it along with addPyFile(); then {way_out}"
            )
        return RunFailed(
            f"micro-batch {plan.number} was run {runs} time{'s' * (runs > 1)} and is not accepted, "
            f"the last time because of {type(error).__name__}: {said}. Nothing is decided about "
            f"its records: {way_out}"
        )

    def _one_run(
        self, plan: Plan, inputs: Sequence[InputFrame], work: Path, watch: _Stopwatch
    ) -> BatchOutcome:
        retries = self.state.split_due(plan)
        run_plan = RunPlan(
            number=plan.number,
            now_ms=plan.now_ms,
            key=self.state.key(plan.number),
            work=str(work),
            retries=_write_retries(retries, work),
            careful=plan.careful,
            suspects=plan.suspects,
            rejected=plan.rejected,
        )
        with deaths_logged(work, plan.number):
            ran = interruptible(
                self._spark, lambda: self._run(self.topology, self.layout, inputs, run_plan)
            )
        failpoint("ran", plan.number)
        watch.lap("run")
        if ran.problems:
            raise Disagreement("; ".join(ran.problems))
        for spout, table in retries.due.items():
            if ran.retried.get(spout, 0) != len(table):
                raise Disagreement(
                    f"{len(table)} records of spout {spout} were due, and "
                    f"{ran.retried.get(spout, 0)} of them ran"
                )
        if ran.untracked_failures:
            _log.warning(
                "micro-batch %d: %d tuples failed that nobody tracks; they are gone",
                plan.number,
                ran.untracked_failures,
            )
        _warn_of_raised(plan.number, ran.raised)
        failed = ran.failed.select(FAILED.names).cast(FAILED)
        failed = propagate_failures(
            reject(failed, rejections(plan)), ran.files, run_plan.work, self._spouts
        )
        payloads: Mapping[str, pa.Table] = {}
        if len(failed):
            lost = failed
            payloads = interruptible(
                self._spark,
                lambda: self._fetch(self.topology, self.layout, inputs, run_plan, ran, lost),
            )
        check_payloads(failed, payloads)
        failpoint("checked", plan.number)
        watch.lap("check")
        outcome = decide(
            plan,
            retries,
            ran.records,
            failed,
            payloads,
            ran.files,
            self.topology.settings,
            self._spouts,
        )
        before = Books() if plan.parent is None else self._books_after(plan.parent)
        decision = replace(
            outcome.decision,
            work=work.name,
            counts=_counts(outcome.changes, outcome.failed),
            totals=before.after(outcome.changes).to_json(),
        )
        return replace(outcome, decision=decision)

    # --------------------------------------------------------------------------------- progress

    def _progress(
        self, decision: BatchDecision, outcome: BatchOutcome | None, runs: int, watch: _Stopwatch
    ) -> Progress:
        now = self.clock()
        counts, oldest_ms = decision.counts, decision.waiting.oldest_ms
        acked, failed = counts["acked"], counts["failed"]
        first_ms: Int64s = np.empty(0, np.int64) if outcome is None else outcome.first_ms
        new = (now - decision.now_ms, acked - len(first_ms))
        seconds = watch.seconds()
        return Progress(
            batch_id=decision.number,
            **counts,
            waiting=decision.waiting.rows(),
            oldest_ms=0 if oldest_ms is None else now - oldest_ms,
            latency_ms=percentiles([new], now - first_ms),
            duration_ms=1000 * seconds,
            records_per_s=(acked + failed) / seconds if runs else 0.0,
            runs=runs,
            steps_ms=watch.laps,
        )


def _warn_of_raised(number: int, raised: Mapping[str, Raised]) -> None:
    """Say which bolts cost many calls because they raise; of a few the dead letters tell."""
    for name, some in sorted(raised.items()):
        if some.calls <= MANY_CALLS:
            continue
        _log.warning(
            "micro-batch %d: process() of bolt %s raised in %d calls, for %d row%s%s; a batch that "
            "raises is bisected to the rows that raise by themselves. Catch it, and fail those "
            "rows with out.fail(rows, reasons)",
            number,
            name,
            some.calls,
            some.rows,
            "s" * (some.rows != 1),
            f", mostly {some.types.most_common(1)[0][0]}" if some.rows else "",
        )


def _counts(changes: Mapping[str, Account], failed: int) -> dict[str, int]:
    accounts = changes.values()
    found = {
        name: sum(getattr(account, name) for account in accounts)
        for name in ("records", "acked", "retried", "replayed", "dead")
    }
    return {**found, "failed": failed}


def _write_retries(retries: Retries, work: Path) -> dict[str, WorkFile]:
    """Leave the rows that are due where the first stages of a run read them."""
    files = {}
    for spout, table in retries.due.items():
        directory = str(work / "retries" / spout)
        # Not synced: it is written again whenever the micro-batch is run again.
        file = RowFile(directory, table.schema, 0, 0, synced=False)
        for batch in rebatched(table.to_batches(), len(table)):
            file.write(batch)
        name, rows, _ = file.finish()
        files[spout] = WorkFile(f"{directory}/{name}", rows)
    return files


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, _MAY_PASS) or isinstance(error, AnalysisException | StateError):
        return False
    # A bolt that lacks a module fails its tuples: this is a worker that cannot even begin.
    return not one_line(error).startswith(_NO_MODULE)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class _Stopwatch:
    """Milliseconds by step; a step taken twice counts with both."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + 1000 * (now - self._last)
        self._last = now

    def seconds(self) -> float:
        return max(time.perf_counter() - self._start, 1e-9)


__all__ = ["Clock", "Engine", "Fetcher", "RunFailed", "Runner", "Stopped"]
