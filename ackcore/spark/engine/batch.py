"""One micro-batch, from plan to mark: the protocol that makes each record's outcome certain.

======  ==========================================================================================
plan    record the time, which also determines the due retries, and the rows of planned sources
run     run one Spark action; its results have no effect until the run is accepted
check   verify that the results agree, and that the payloads of all failed records were found
decide  record, by one rename, which records wait, which are dead and which rows the sinks get
act     write to sinks and dead letters; repeated after a crash, under the same number.  The rows
        that a sink refuses are recorded after its call, and the deaths of their records after
        all calls.  Then the rows of ACKED records are folded into the tables, these are
        recorded, and sinks get the changed rows
mark    record that the micro-batch is done; if it has no effects, together with the decision
======  ==========================================================================================

When the driver dies, the next driver continues after the last recorded step.  A run that crashed
adds to the plan: the number of crashes, suspects, rejected records and time-outs.  A decision is
never made a second time.  Run and check are in `ackcore.spark.engine.runs`.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.clocks import Clock, SteadyClock, wall_clock_ms
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.interrupts import RunCancelled, cancelling
from ackcore.spark.base.schemas import FIRST_MS
from ackcore.spark.base.session import is_jvm_lost
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.act import (
    DeadLetterWriter,
    fold_tables,
    park_dead,
    refused_roots,
    unanchored,
    write_to_sinks,
)
from ackcore.spark.engine.action import Jobs
from ackcore.spark.engine.closed_rows import closed_of
from ackcore.spark.engine.decide import BatchOutcome
from ackcore.spark.engine.insist import Pause, SinkCalls, Stopped
from ackcore.spark.engine.progress import Account, Counts, Progress, Stopwatch, percentiles
from ackcore.spark.engine.runs import Runs
from ackcore.spark.engine.setup import InputFrame, PlannedRows
from ackcore.spark.engine.suspects import careful_if_needed, count_crash
from ackcore.spark.engine.table_changes import write_changes
from ackcore.topology.builder import Topology

_log = logging.getLogger("ackcore")


#: A function that commits the finished offsets of a micro-batch that is marked as done; it may be
#: called again for the same one. It returns each spout's lag, a number of offsets.
CommitGroups = Callable[[BatchDecision], Mapping[str, int]]


class Engine:
    """The engine that takes micro-batches through the protocol, one after the other.

    ``topology``: the topology to run. ``spark``: the session for jobs and sinks; None if neither
    needs one. ``state``: the open checkpoint. ``write_dead_letters``: writes a micro-batch's dead
    records; may be called again with the same ones. ``clock``: returns milliseconds
    since 1970. ``pause``: waits for seconds; returns whether the query is to stop. ``jobs``: the
    Spark jobs. ``offsets``: the planned spouts, such as those that read Kafka. ``commit_groups``:
    commits to the consumer groups of the other spouts; None if they have none.
    """

    def __init__(
        self,
        topology: Topology,
        spark: SparkSession | None,
        state: State,
        write_dead_letters: DeadLetterWriter,
        *,
        clock: Clock = wall_clock_ms,
        pause: Pause | None = None,
        jobs: Jobs | None = None,
        offsets: PlannedRows | None = None,
        commit_groups: CommitGroups | None = None,
    ) -> None:
        self.topology = topology
        self._offsets = PlannedRows() if offsets is None else offsets
        self._commit_groups = commit_groups
        self.state = state
        self._spark = spark
        self._write_dead_letters = write_dead_letters
        self._pause = threading.Event().wait if pause is None else pause
        plan = state.plan(state.last_plan)
        #: Never earlier than the last plan, so that waiting records become due.
        self.clock = SteadyClock(clock, 0 if plan is None else plan.now_ms)
        self._runs = Runs(
            topology,
            spark,
            state,
            self._pause,
            jobs if jobs is not None else Jobs(),
            self.clock,
            self._offsets,
        )

    # --------------------------------------------------------------------------- recorded state

    @property
    def counts(self) -> Counts:
        """The counts after the last micro-batch that is done; zeros if none is."""
        return self._counts_after(self.state.last_done)

    @property
    def next_due_ms(self) -> int | None:
        """The due time of the first waiting record, in ms since 1970; None if none waits."""
        decision = self.state.decision(self.state.last_done)
        return None if decision is None else decision.waiting.next_due_ms

    @property
    def has_closed_rows(self) -> bool:
        """Whether bolts or tables must get rows of windows that the last micro-batch closed."""
        return bool(closed_of(self.state, self.topology, self.state.last_done))

    def _counts_after(self, number: int | None) -> Counts:
        decision = self.state.decision(number)
        return Counts() if decision is None else Counts.from_json(decision.totals)

    # ----------------------------------------------------------------------------- the protocol

    def process(self, number: int, inputs: Sequence[InputFrame]) -> Progress:
        """Take one micro-batch through the steps that are not recorded yet; return its report.

        If the micro-batch is done, only its commits to sources and groups are repeated.

        Raises RunFailed if no run of the micro-batch was accepted. Raises RunCancelled if a Spark
        job of the micro-batch was cancelled from outside. Raises SinkError if a sink, a table or
        the dead-letter store failed too often. Raises InvalidRejects or TooManyRefused if a sink
        refuses wrong or too many rows, SourceError if a planned source fails, and StateError if the
        checkpoint does. Raises Stopped if the query is stopped during the micro-batch. Raises the
        exception that a signal handler raised during the micro-batch. Raises
        CheckpointInUse if another driver has taken over; this replaces any error that the take-over
        caused.

        ``number``: the number of the last planned micro-batch, or the next number. ``inputs``: the
        new rows of spouts that are not planned.
        """
        try:
            with fenced(self.state.check_owner):
                self.state.record_topology()
                progress = self._process(number, inputs)
            # The JVM keeps the plans of a micro-batch until Python frees its objects for them.
            # Py4J makes cycles of these, and the next full collection may be far away.  Collecting
            # moves objects in use to the next generation.  The inputs are in use: with generation 1
            # they would move to the oldest one, and wait for a full collection.
            gc.collect(0 if inputs else 1)
            return progress
        except Stopped:
            raise
        except Exception:
            self.state.check_owner()
            raise

    def _process(self, number: int, inputs: Sequence[InputFrame]) -> Progress:
        watch = Stopwatch()
        done = self.state.is_done(number)
        decision = self.state.decision(number)
        if done and decision is not None:
            return self._progress(decision, None, 0, watch, self._done(decision))
        outcome, runs = None, 0
        raised: list[BaseException] = []
        age_ms = None if decision is None else max(0, self.clock() - decision.now_ms)
        if decision is None:
            try:
                is_new = self.state.plan(number) is None
                plan = self._plan(number)
                watch.lap("plan")
                with cancelling(None) as raised:
                    outcome, runs = self._runs.accepted(plan, inputs, watch, is_new, raised)
                decision = self._record_decision(plan, outcome)
                # Use the recorded form, so that data in files is read only where it is needed.
                outcome = replace(outcome, decision=decision)
            except BaseException as error:
                is_interrupt = isinstance(error, Stopped | RunCancelled) or error in raised
                if is_interrupt or not isinstance(error, Exception):
                    self._record_interrupt(number, error)
                raise
            watch.lap("decide")
        decision = self._act(decision, age_ms, inputs)
        watch.lap("act")
        self.state.write_done(number)
        failpoint("marked", number)
        self.state.prune(number)
        failpoint("pruned", number)
        lag = self._done(decision)
        watch.lap("mark")
        progress = self._progress(decision, outcome, runs, watch, lag)
        progress.log()
        self.state.records.append_progress({"at_ms": self.clock(), **progress.to_json()})
        return progress

    def _plan(self, number: int) -> Plan:
        plan, settings = self.state.plan(number), self.topology.settings
        # A recorded plan is from a driver that ended before its decision.  The markers of its tasks
        # prove nothing, since the tasks were cut off, too; but a record may have killed the
        # driver.
        if plan is None:
            # Planned spouts may need room for new records.
            most, bound = settings.max_retries_per_batch, self._offsets.most_retries()
            most = most if bound is None else min(most, bound)
            plan = self.state.make_plan(number, self.clock(), most)
            offsets = self._offsets.plan(number, self.state.plan(plan.parent))
            plan = replace(plan, offsets=offsets, ordered_by=self._runs.held_by)
            plan = careful_if_needed(plan, settings.careful_after)
        else:
            if plan.interrupted:
                plan = replace(plan, interrupted=False)
            else:
                plan = count_crash(plan, settings.careful_after)
            # Not in `Runs`: a snapshot of the former spouts lacks the rows of added spouts.
            plan = self._offsets.joined(self._bounded(plan))
        if plan.ordered_by != self._runs.held_by:
            # Root ids now belong to other records, as in `_bounded`.
            plan = replace(plan, ordered_by=self._runs.held_by).without_suspects()
        self.state.write_plan(plan)
        failpoint("planned", number)
        return plan

    def _bounded(self, plan: Plan) -> Plan:
        """Return a recorded plan, or one with fewer retries if it has over `max_retries_per_batch`.

        That one has no suspects, since root ids change with the number of retries.
        """
        most = self.topology.settings.max_retries_per_batch
        if plan.max_retries is not None and plan.max_retries <= most:
            return plan
        if sum(map(len, self.state.split_due(plan).due.values())) <= most:
            return plan
        # Root ids depend on a record's place among the retries, so they belong to others now.
        return replace(plan, max_retries=most).without_suspects()

    def _record_decision(self, plan: Plan, outcome: BatchOutcome) -> BatchDecision:
        before = self._counts_after(plan.parent)
        decision = replace(
            outcome.decision,
            counts=_counts(outcome),
            totals=before.after(outcome.changes, outcome.figures.get("spent", {})).to_json(),
        )
        # Without effects outside, nothing happens between decision and mark: one write has both.
        has_tables = self.topology.tables or self.state.tables.of(plan.parent)
        has_effects = decision.files or decision.all_dead or has_tables
        decision = self.state.write_decision(decision, with_mark=not has_effects)
        failpoint("decided", plan.number)
        return decision

    def _act(
        self, decision: BatchDecision, age_ms: int | None, inputs: Sequence[InputFrame]
    ) -> BatchDecision:
        """Call sinks, fold tables, write dead letters; return the decision with refused records."""
        calls = SinkCalls(self._spark, decision.number, self._pause, self.topology.settings)
        # Recorded tables have the rows that the sinks took: none may be refused any more.
        if not decision.sinks_done and self.state.tables.of(decision.number) is None:
            write_to_sinks(self.topology, calls, self.state, decision, age_ms)
            decision = self._with_refused(decision, inputs, calls)
        fold_tables(self.topology, calls, self.state, decision)
        write_changes(self.topology, calls, self.state, decision, age_ms)
        park_dead(decision, self._write_dead_letters, calls)
        failpoint("acted", decision.number)
        return decision

    def _with_refused(
        self, decision: BatchDecision, inputs: Sequence[InputFrame], calls: SinkCalls
    ) -> BatchDecision:
        """Read the records of refused rows again, and record them as dead; return the decision.

        Without refused rows it is the same. Logs the number of refused rows that have no record.
        """
        number = decision.number
        refusals, plan = self.state.refusals.of(number), self.state.plan(number)
        if not refusals or plan is None:
            return decision
        loose = unanchored(refusals)
        if loose:
            _log.warning(
                "micro-batch %d: sinks refused %s to no record of a tracked spout. Such rows are "
                "lost: anchor what bolts emit, and track the spout, so that they are dead letters",
                number,
                counted(loose, "row that belongs", "rows that belong"),
            )
        spouts = self._runs.spouts
        failed = refused_roots(refusals, spouts)
        rows = calls.insist(
            "reading the records again that sinks refused",
            lambda: self._runs.read_again(plan, decision, inputs, failed),
        )
        dead = rows.dies
        changes = {
            spout: Account(
                acked=-len(table), dead=len(table), resolved=-rows.replayed.get(spout, 0)
            )
            for spout, table in dead.items()
        }
        counts = dict(decision.counts)
        for name, sign in (("acked", -1), ("failed", 1), ("dead", 1)):
            counts[name] += sign * sum(map(len, dead.values()))
        totals = Counts.from_json(decision.totals).corrected(changes).to_json()
        decision = self.state.close_refusals(decision, dead, counts, totals)
        failpoint("refusals-closed", number)
        return decision

    def _done(self, decision: BatchDecision) -> Mapping[str, int]:
        """Report a finished micro-batch to sources and consumer groups; return lags by spout."""
        lag: dict[str, int] = {}
        plan = self.state.plan(decision.number)
        if plan is not None:
            lag |= self._offsets.done(plan, decision)
        if self._commit_groups is not None:
            lag |= self._commit_groups(decision)
        return lag

    def _record_interrupt(self, number: int, error: BaseException) -> None:
        """Record that a micro-batch was interrupted, so that the next driver counts no crash.

        If the JVM has ended, nothing is recorded: a record may have crashed it. Ignores StateError.
        """
        # A record may have killed the JVM. Without it, Spark's query looks like a stopped one.
        if isinstance(error, RunCancelled) and error.shut_down:
            return
        if isinstance(error, Stopped) and self._spark is not None and is_jvm_lost(self._spark):
            return
        with suppress(StateError):
            self.state.record_interrupt(number)

    # --------------------------------------------------------------------------------- progress

    def _progress(
        self,
        decision: BatchDecision,
        outcome: BatchOutcome | None,
        runs: int,
        watch: Stopwatch,
        lag: Mapping[str, int],
    ) -> Progress:
        now = self.clock()
        counts, oldest_ms = decision.counts, decision.waiting.oldest_ms
        acked, failed = counts["acked"], counts["failed"]
        first_ms: Int64s = np.empty(0, np.int64) if outcome is None else outcome.first_ms
        for table in decision.refused.values() if outcome is not None else ():
            first_ms = _without(first_ms, table[FIRST_MS].to_numpy())
        new = ((now - decision.now_ms) / 1000, acked - len(first_ms))
        seconds = watch.seconds()
        return Progress(
            batch_id=decision.number,
            **counts,
            waiting=decision.waiting.rows(),
            oldest_s=0.0 if oldest_ms is None else (now - oldest_ms) / 1000,
            latency_s=percentiles([new], (now - first_ms) / 1000),
            duration_s=seconds,
            records_per_s=(acked + failed) / seconds if runs else 0.0,
            runs=runs,
            steps_s=watch.laps,
            lag=lag,
            tables={
                name: {"rows": table.rows, "bytes": table.nbytes}
                for name, table in (self.state.tables.of(decision.number) or {}).items()
            },
            traces=() if outcome is None else outcome.traces,
        )


def _counts(outcome: BatchOutcome) -> dict[str, Any]:
    """Return the counts of `BatchDecision.counts`, by name; they are also fields of `Progress`."""
    found = {
        name: sum(getattr(account, name) for account in outcome.changes.values())
        for name in ("records", "acked", "retried", "replayed", "dead")
    }
    return {**found, **outcome.figures, "failed": outcome.failed, "uncounted": outcome.uncounted}


def _without(values: Int64s, gone: Int64s) -> Int64s:
    """Return ``values`` sorted, less one occurrence for each element of ``gone`` that they have."""
    found, counts = np.unique(values, return_counts=True)
    there, less = np.unique(gone[np.isin(gone, found)], return_counts=True)
    counts[np.searchsorted(found, there)] -= less
    return np.repeat(found, np.maximum(counts, 0))
