"""Run and check: a planned micro-batch is run until a run of it is accepted.

After a crash, the plan gets one more crash and the records that may have caused it.  A run with
results that do not agree, or with damaged files, changes nothing.  After ``careful_after`` crashes
the runs are *careful*: they read a snapshot of the new rows, so that root ids name the same records
in each of them.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pyarrow as pa
from pyspark.sql import SparkSession

from ackcore._arrow.record_batches import rebatched
from ackcore._records import Int64s, UInt64s
from ackcore.ids import spout_key
from ackcore.retry import capped_doubling
from ackcore.spark.base.clocks import Clock
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, StateError, one_line
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.base.interrupts import interruptible, raise_if_interrupted
from ackcore.spark.base.paths import Place
from ackcore.spark.base.reasons import FAILED
from ackcore.spark.base.root_ids import distinct, ids_in
from ackcore.spark.base.session import ResultsTooLarge, is_stopped
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan, Retries
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.action import Jobs, OfRun, P, R
from ackcore.spark.engine.check import (
    Disagreement,
    Unsettled,
    check_agreement,
    check_found,
    check_same_rows,
)
from ackcore.spark.engine.copies import first_copies, held_copies, with_dedup_keys
from ackcore.spark.engine.decide import (
    BatchOutcome,
    decide,
    failed_roots,
    propagate_failures,
    rules_of,
    with_rejection_reasons,
)
from ackcore.spark.engine.insist import (
    ExpectationFailed,
    Outage,
    Pause,
    RowsMissing,
    RunFailed,
    given_up,
    is_unreadable,
    stopped,
    worth_another_run,
    wrong_value,
)
from ackcore.spark.engine.key_order import Ordering, held_back
from ackcore.spark.engine.late_records import ReadRecords, WindowedRows
from ackcore.spark.engine.progress import (
    Counts,
    Stopwatch,
    UsageWarnings,
    warn_of_failures,
    with_outcomes,
)
from ackcore.spark.engine.setup import InputFrame, PlannedRows, RunResult
from ackcore.spark.engine.suspects import (
    count_crash,
    crashes_logged,
    failed_attempts,
    isolation_progress,
    rejections,
    update_suspects,
)
from ackcore.spark.stores.run_files import remove_all
from ackcore.spark.tables.seen_keys import SeenSource
from ackcore.spark.tables.table_snapshots import snapshot_of
from ackcore.spark.tasks.failed_rows import FailedRows, Rules
from ackcore.spark.tasks.inflight_markers import ALONE, crashed
from ackcore.spark.tasks.row_files import RowFile, RowFileWriter, damage_in
from ackcore.spark.tasks.spec import CHUNK_BYTES, RunPlan
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout
from ackcore.topology.table_views import TableSource

_log = logging.getLogger("ackcore")

#: The first pause before a micro-batch is run again, and the longest; it doubles in between.
_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 5_000


#: The most records of a small micro-batch: its due ones, and the new ones of the last micro-batch.
_SMALL = 20_000

#: The error of a task that could not open a table, within Spark's text.
_CORRUPT = re.compile(rf"\b{CheckpointCorrupt.__name__}: (.+)")


@dataclass(eq=False, repr=False)
class Runs:
    """The steps run, check and decide of micro-batches; `Engine` documents the arguments."""

    _topology: Topology
    _spark: SparkSession | None
    _state: State
    _pause: Pause
    _jobs: Jobs
    _clock: Clock
    _offsets: PlannedRows

    def __post_init__(self) -> None:
        topology = self._topology
        self._layout = Layout.of(topology)
        self._usage = UsageWarnings(topology)
        #: By ordered spout, the columns of its key.
        self.ordered_by = {
            name: spout.ordered_by for name, spout in topology.spouts.items() if spout.ordered_by
        }
        #: The spouts with ``dedup``.
        self._deduped = [spout for spout in topology.spouts.values() if spout.dedup is not None]
        #: The keys that hold back due records, by spout: they determine the places of retries.
        self.held_by = self.ordered_by | {
            spout.name: ("dedup", *spout.dedup.columns)
            for spout in self._deduped
            if spout.dedup is not None
        }
        #: The tracked spouts.
        self.spouts = tuple(name for name, spout in topology.spouts.items() if spout.tracked)

    def accepted(
        self,
        plan: Plan,
        inputs: Sequence[InputFrame],
        watch: Stopwatch,
        is_new: bool,
        raised: Sequence[BaseException],
    ) -> tuple[BatchOutcome, int]:
        """Run a micro-batch until a run is accepted; return its outcome and the number of runs.

        Pauses between runs.  Each crash is logged, and added to the recorded plan.  ``inputs`` are
        the new rows, except those that the plan names; ``watch`` receives the times of run and
        check; ``is_new`` is False for a plan that an earlier driver recorded; ``raised`` has the
        exceptions of signal handlers, see `cancelling`.

        Raises `RunFailed` after ``max_runs`` runs without progress, or if another run cannot
        succeed.  Runs in which planned rows could not be read are not among the ``max_runs``; they
        end with `RunFailed` after the source's time-out.  Raises `RunCancelled` if its Spark job
        was cancelled from outside, and `StateError` if the checkpoint fails.  Raises `Stopped` if
        the query is stopped, and the last exception of ``raised``, if it has any.
        """
        in_vain, handled = 0, sys.exception()
        wrong: str | None = None  # Spark's name of the last run's error about a value
        # This driver's suspects refer to rows read alike, recorded suspects to a snapshot.
        on_record = bool(plan.suspects or plan.rejected)
        outage: Outage | None = None
        by_root = False
        runs = 0
        while True:
            runs += 1
            try:
                if runs > 1 or not is_new:
                    mended = self._mended(plan, inputs)
                    if mended is not plan:
                        # The remaining rows may run without a crash.
                        plan, in_vain, on_record = mended, 0, False
                new = [*inputs, *self._offsets.inputs(plan)]
            except Exception:
                with suppress(StateError):  # no run has begun, so none has crashed
                    self._state.record_interrupt(plan.number)
                raise
            work = self._state.runs.new(plan.number)
            try:
                rows: Sequence[InputFrame] = new
                if plan.careful:
                    plan, rows = self._use_snapshot(plan, new, on_record)
                    on_record = True
                outcome = self._run_once(plan, rows, work, watch, by_root)
                if not plan.careful:
                    check_same_rows(plan, self._offsets)
                return outcome, runs
            except Exception as error:
                if raised:  # the run did not fail
                    raise raised[-1] from (None if error is raised[-1] else error)
                unread = self._offsets.unread(error)
                if unread is not None:
                    outage = outage or Outage(self._offsets.obstacle, self._pause)
                    self._outlast(outage, unread, plan, runs, error)
                    continue
                damage = self._may_run_again(plan, runs, error, handled)
                before, wrong = wrong, wrong_value(error)
                if wrong is not None and wrong == before:
                    raise self._given_up(plan, runs, error) from error
                known = isolation_progress(plan)
                if isinstance(error, Unsettled) and not by_root:
                    by_root = True
                    _log.warning("micro-batch %d is run again: %s", plan.number, error)
                    continue  # the next run settles otherwise, so this one was not in vain
                if isinstance(error, Disagreement) or damage is not None:
                    said = damage or error
                    _log.warning("micro-batch %d is run again: %s", plan.number, said)
                else:
                    plan = self._after_crash(plan, work, error)
                    self._state.write_plan(plan)
                # Progress in finding crashing records resets the count: there may be more of them.
                in_vain = 0 if isolation_progress(plan) > known else in_vain + 1
                # Without its JVM every run crashes, before it reads a record.
                ended = self._spark is not None and is_stopped(self._spark)
                if ended or in_vain >= self._topology.settings.max_runs:
                    raise self._given_up(plan, runs, error) from error
                if in_vain:
                    waits = capped_doubling(_PAUSE_MS, in_vain, _LONGEST_PAUSE_MS)
                    if self._pause(waits / 1000):
                        raise stopped(plan) from error

    def _outlast(
        self, outage: Outage, unread: str, plan: Plan, runs: int, error: Exception
    ) -> None:
        """Wait until the planned rows can be read; ``unread`` is the text of the failure to read.

        Raises RunFailed if they are missing for too long, and Stopped if the query is stopped.
        """
        try:
            stops = self._pause(0) or outage.wait(plan, unread)
        except RowsMissing as missing:
            raise given_up(plan, runs, missing) from error
        if stops:
            raise stopped(plan) from error

    def _may_run_again(
        self, plan: Plan, runs: int, error: Exception, handled: BaseException | None
    ) -> Exception | None:
        """Raise if another run cannot succeed; else return the error of a damaged file, or None.

        The file is one that the run wrote. If no record can have caused the raised error, the plan
        is recorded as interrupted, so that the next start counts no crash.
        """
        if self._pause(0):
            raise stopped(plan) from error
        damage = damage_in(error)
        lost = None if damage is not None else _CORRUPT.search(str(error))
        if lost is not None:
            raise CheckpointCorrupt(lost[1]) from error
        if isinstance(error, StateError) and damage is None:
            raise error
        raise_if_interrupted(
            error,
            handled,
            self._spark,
            f"micro-batch {plan.number}",
            "Its records are not decided, and it does not count as an attempt: start again on "
            "the same checkpoint to continue",
        )
        if is_unreadable(error):
            self._offsets.replaced(plan)  # raises its own error for a file that has changed
        if isinstance(error, ResultsTooLarge | ExpectationFailed) or is_unreadable(error):
            # No record crashed a worker: the next start must not count a crash.
            self._state.write_plan(replace(plan, interrupted=True))
        if isinstance(error, ExpectationFailed):
            raise error
        if damage is None and not worth_another_run(error):
            raise self._given_up(plan, runs, error) from error
        return damage

    def _given_up(self, plan: Plan, runs: int, error: Exception) -> RunFailed:
        return given_up(plan, runs, error, self._offsets.way_out(plan, one_line(error)))

    def _mended(self, plan: Plan, inputs: Sequence[InputFrame]) -> Plan:
        """Return the plan without lost rows; the same object if none are, or a snapshot has them.

        Records a changed plan, and deletes the former snapshot; see `PlannedRows.mended`.
        """
        directory = self._state.runs.snapshot(plan.number)
        rows = [*inputs, *self._offsets.inputs(plan)]
        if plan.careful and self._jobs.load_snapshot(rows, directory) is not None:
            return plan
        mended = self._offsets.mended(plan)
        if mended is not plan:
            remove_all(directory)  # it holds other rows than the new plan
            self._state.write_plan(mended)
        return mended

    def _use_snapshot(
        self, plan: Plan, inputs: Sequence[InputFrame], on_record: bool
    ) -> tuple[Plan, Sequence[InputFrame]]:
        """Load or write a snapshot, which all further runs read: root ids keep their records.

        Returns the plan, and inputs that read the snapshot. ``on_record``: whether suspects of the
        plan refer to a snapshot. They are dropped if it is gone. Raises Disagreement, and deletes
        the new snapshot, if the rows may not be the planned ones.
        """
        directory = self._state.runs.snapshot(plan.number)
        rows = self._jobs.load_snapshot(inputs, directory)
        if rows is None:
            if on_record and (plan.suspects or plan.rejected):
                # The snapshot that the suspects refer to is gone.
                plan = plan.without_suspects()
                self._state.write_plan(plan)
            epoch = self._state.records.epoch
            rows = interruptible(
                self._spark, lambda: self._jobs.snapshot_inputs(inputs, directory, epoch)
            )
            try:
                check_same_rows(plan, self._offsets)
            except Disagreement:
                remove_all(directory)
                raise
        return plan, rows

    def _after_crash(self, plan: Plan, work: Place, error: Exception) -> Plan:
        _log.warning(
            "micro-batch %d crashed, crash %d: %s", plan.number, plan.crashes + 1, one_line(error)
        )
        named = failed_attempts(error, self._layout.depth)
        markers = crashed(work, named=named)
        if not plan.careful:
            # Only a record alone in flight is certain; careful runs are needed for others.
            markers = [
                one if one.kind == ALONE else replace(one, roots=frozenset()) for one in markers
            ]
        plan = update_suspects(plan, markers, named[0].id if named else None)
        return count_crash(plan, self._topology.settings.careful_after)

    def _run_once(
        self, plan: Plan, inputs: Sequence[InputFrame], work: Place, watch: Stopwatch, by_root: bool
    ) -> BatchOutcome:
        """Run, check, and decide from the results of the run; return the outcome.

        ``by_root``: whether each root is settled by itself, not with its cohort. Raises
        Disagreement if results contradict each other, and ExpectationFailed if a tuple did not
        meet an expectation with ``on_fail="fail"``.
        """
        retries, run_plan = self._run_plan(plan, work, by_root)
        with crashes_logged(work, plan.number):
            ran = interruptible(
                self._spark, lambda: self._jobs.run(self._topology, self._layout, inputs, run_plan)
            )
        ended_ms = self._clock()
        failpoint("ran", plan.number)
        watch.lap("run")
        check_agreement(ran, retries)
        if ran.unexpected is not None:
            raise ExpectationFailed(
                f"micro-batch {plan.number}: {ran.unexpected}. Nothing of it is written. Correct "
                "the source or the expectation, then start again on the same checkpoint"
            )
        warn_of_failures(plan.number, ran)
        self._usage.warn(plan.number, ran)
        failed = ran.failed.select(FAILED.names).cast(FAILED)
        failed = with_rejection_reasons(failed, rejections(plan))

        def propagate(failed: pa.Table) -> pa.Table:
            return propagate_failures(failed, ran.files, run_plan.work, self.spouts, ran.judged)

        failed = propagate(failed)
        windowed = self._windowed(plan, retries, run_plan, ran)
        if windowed is not None:
            late = windowed.with_late(failed, distinct(*failed_roots(failed, ran.judged)))
            failed = propagate(late) if len(late) > len(failed) else failed
        rules = rules_of(plan, self._topology.settings, ended_ms)
        if self.ordered_by and len(failed):
            ordering = Ordering(
                self.ordered_by,
                {name: spout_key(run_plan.key, name, "", plan.number) for name in self.ordered_by},
                plan.number,
                plan.now_ms,
                retries.due,
                self._topology.settings,
            )
            failed = ordering.all_behind(
                failed,
                lambda *asked: self._of_run(self._jobs.find_keys, inputs, run_plan, ran, *asked),
                propagate,
            )
        if self._deduped and len(failed):
            failed = with_dedup_keys(failed, ran.files, run_plan.work, self._deduped)
        left, rows = ran.judged.without(failed), ran.judged
        if len(left):
            rows = rows.plus(self._of_run(self._jobs.judge, inputs, run_plan, ran, left, rules))
        check_found(failed_roots(failed, ran.judged), rows, ran.judged is rows and not len(failed))
        failpoint("checked", plan.number)
        watch.lap("check")
        outcome = decide(
            plan,
            retries,
            ran.records,
            failed,
            rows,
            ran.files,
            self._topology.settings,
            self.spouts,
        )
        reread = {**ran.to_reread(), "columns": self._state.columns}
        decision = replace(outcome.decision, work=os.path.basename(work), reread=reread)
        if windowed is not None:
            nonacked = distinct(*failed_roots(failed, ran.judged))
            times, behind = windowed.times(nonacked)
            decision = replace(decision, times=times, behind=behind)
        return replace(
            outcome,
            decision=decision,
            figures=ran.figures,
            traces=with_outcomes(ran.traces, failed),
        )

    def _windowed(
        self, plan: Plan, retries: Retries, run_plan: RunPlan, ran: RunResult
    ) -> WindowedRows | None:
        """Return the run's rows for tables with event times, or None if no table has such times."""
        windows = (table.shape.window for table in self._topology.tables.values())
        event_times = (spout.dedup.event_time for spout in self._deduped if spout.dedup)
        if all(one is None for one in (*windows, *event_times)):
            return None
        tables = self._state.tables.of(plan.parent) or {}
        keys = {name: spout_key(run_plan.key, name, "", plan.number) for name in self.spouts}
        work = run_plan.work
        copies = first_copies(retries.due, ran.files, work, self._deduped)
        backlogs = self._offsets.backlogs(plan)
        tracked = {name: one for name, one in backlogs.items() if name in keys}
        records = ReadRecords(keys, ran.read, retries.due, copies, tracked)
        return WindowedRows(self._topology, tables, records, ran.files, work, plan.now_ms)

    def _run_plan(self, plan: Plan, work: Place, by_root: bool = False) -> tuple[Retries, RunPlan]:
        """Divide the retries, and write the due ones to files; return the retries and a run's plan.

        Due records that ``ordered_by`` or ``dedup`` holds back are among the waiting ones.
        """
        retries = self._state.split_due(plan)
        blocked: Mapping[str, Int64s] = {}
        if self.ordered_by:
            retries, blocked = held_back(retries, self.ordered_by, self._state.fitted)
        names = [spout.name for spout in self._deduped]
        retries, copies = held_copies(retries, names, self._state.fitted)
        before = self._state.decision(plan.parent)
        due = sum(map(len, retries.due.values()))
        has_few = before is not None and before.counts["records"] + due <= _SMALL
        return retries, RunPlan(
            number=plan.number,
            now_ms=plan.now_ms,
            key=self._state.key(plan.number),
            work=os.fspath(work),
            journal=str(self._state.runs.journal(plan.number)),
            retries=_write_retries(retries, work),
            careful=plan.careful,
            suspects=plan.suspects,
            rejected=plan.rejected,
            blocked=blocked,
            rules=self._rules_in_run(plan),
            by_root=by_root,
            is_small=has_few and not (by_root or plan.crashes),
            tables=self._used_tables(plan, copies),
            spent={} if before is None else Counts.from_json(before.totals).spent,
        )

    def _used_tables(self, plan: Plan, copies: Mapping[str, UInt64s]) -> Mapping[str, TableSource]:
        """Return, by name, the tables that bolts use, in their state after the last micro-batch.

        ``copies``: by spout with ``dedup``, the hashes of keys whose new records must wait; its
        bolt reads them from its table.
        """
        used = {name for bolt in self._topology.bolts.values() for name in bolt.component.uses}
        if not used:
            return {}
        found = snapshot_of(self._state, self._topology, plan.parent)
        tables: dict[str, TableSource] = {name: found[name] for name in used}
        for spout in self._deduped:
            assert spout.dedup is not None
            tables[spout.emitter] = SeenSource.of(
                found[spout.emitter], spout.dedup, copies[spout.name], plan.now_ms
            )
        return tables

    def _rules_in_run(self, plan: Plan) -> Rules | None:
        """Return the rules by which tasks judge failures; None to judge them after the run."""
        if self.held_by or plan.careful or plan.rejected:
            return None
        return rules_of(plan, self._topology.settings, plan.now_ms)

    def read_again(
        self, plan: Plan, decision: BatchDecision, inputs: Sequence[InputFrame], failed: pa.Table
    ) -> FailedRows:
        """Read records of a decided micro-batch again; return them, judged as failed records.

        ``failed`` has their roots and reasons (schema `FAILED`). The result is in memory, not in
        files. Raises CheckpointForeign if the columns of a source have changed. Also raises it if
        ``ordered_by`` or ``dedup`` has changed: the due records had other places in the run.
        Raises Disagreement or RuntimeError if the records cannot be found any more.
        """
        if plan.ordered_by != self.held_by:
            raise CheckpointForeign(
                f"micro-batch {plan.number} was decided with ordered_by or dedup of "
                f"{_told(plan.ordered_by)}, and the topology now has {_told(self.held_by)}: with "
                "another order of the retries, the records of the rows that sinks refused cannot "
                "be found. Run the former topology until it has finished the micro-batch, then "
                "change it"
            )
        now = self._state.columns
        for spout, was in decision.reread.get("columns", {}).items():
            # The order counts, too: rows in files are read by position.
            if spout in now and [*was.items()] != [*now[spout].items()]:
                told = (", ".join(map(" ".join, each.items())) for each in (was, now[spout]))
                raise CheckpointForeign(
                    f"the source of spout {spout!r} had the columns {', and has '.join(told)} now. "
                    f"Micro-batch {plan.number} was decided before, and the records of its refused "
                    "rows cannot be read in other columns. Run the former topology until it has "
                    "finished the micro-batch, then change it"
                )
        new = [*inputs, *self._offsets.inputs(plan)]
        kept = None
        if plan.careful:
            kept = self._jobs.load_snapshot(new, self._state.runs.snapshot(plan.number))
        rows = new if kept is None else kept
        _, run_plan = self._run_plan(plan, self._state.runs.of(decision))
        ran = RunResult.of_decided(decision.files, decision.reread)
        rules = replace(rules_of(plan, self._topology.settings, 0), inline_bytes=math.inf)
        found = self._of_run(self._jobs.judge, rows, run_plan, ran, failed, rules)
        check_found(ids_in(failed["root_id"]), found)
        if kept is None:
            check_same_rows(plan, self._offsets)
        return found

    def _of_run(
        self,
        job: OfRun[P, R],
        inputs: Sequence[InputFrame],
        run_plan: RunPlan,
        ran: RunResult,
        *of: P.args,
        **by_name: P.kwargs,
    ) -> R:
        """Call a job with the setup and the result of an accepted run, and more arguments."""

        def start() -> R:
            setup = self._jobs.setup(self._topology, self._layout, inputs, run_plan, ran.spilled)
            return job(setup, ran, *of, **by_name)

        return interruptible(self._spark, start)


def _write_retries(retries: Retries, work: Place) -> dict[str, RowFile]:
    """Write the due rows to a file per spout, for the spout stages of a run; return the files."""
    files = {}
    for spout, table in retries.due.items():
        directory = os.path.join(work, "retries", spout)
        # Not synced: each run of the micro-batch writes it again.
        file = RowFileWriter(directory, table.schema, 0, synced=False)
        for batch in rebatched(table.to_batches(), len(table), CHUNK_BYTES):
            file.write(batch)
        name, rows, _ = file.finish()
        files[spout] = RowFile(os.path.join(directory, name), rows, file.nbytes)
    return files


def _told(ordered_by: Mapping[str, Sequence[str]]) -> str:
    told = (f"{name!r} by {', '.join(columns)}" for name, columns in ordered_by.items())
    return "; ".join(told) or "no spout"
