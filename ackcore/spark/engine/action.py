"""One run of a micro-batch: a single Spark action, and the outcome of every record.

    new rows  ──┐
                ├─► stage 1 ═► stage 2 ═► … ═► settle ─► records not ACKED, counts, trailers, files
    due retries ┘   mapInArrow    ═ packed blobs ═

Nothing is decided here, and a run has no side effects outside: it writes files in its directory,
and returns.  It is accepted only if it is internally consistent (`RunResult.problems`); otherwise
it is run again.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from ackcore._records import Int64s
from ackcore.calls.usage import UsageCounts, largest_sums
from ackcore.spark.base.arrow_batches import MapInArrow
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.paths import Place
from ackcore.spark.base.reasons import FAILED, TEXTS
from ackcore.spark.base.root_ids import in_order
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.base.session import ResultsTooLarge, collected
from ackcore.spark.base.traces import RecordTrace, Step
from ackcore.spark.base.versions import repartition_by_id
from ackcore.spark.engine.check import Unsettled, count_problems, file_problems, trailer_problems
from ackcore.spark.engine.kept_jobs import kept_job
from ackcore.spark.engine.reread import find_keys, judge, with_repeated_ids
from ackcore.spark.engine.setup import InputFrame, RunResult, RunSetup, setup_on_spark
from ackcore.spark.engine.snapshot import load_snapshot, snapshot_inputs
from ackcore.spark.stores.run_files import read_run_table
from ackcore.spark.tasks.bolt_stage import BoltStage
from ackcore.spark.tasks.exchange import TOO_LARGE, Limited, read_receipts
from ackcore.spark.tasks.exchange_format import ROW_SCHEMA, ROW_TYPE, TrailerReceipt
from ackcore.spark.tasks.failed_rows import FailedRows, Rules
from ackcore.spark.tasks.record_ids import CLAIM
from ackcore.spark.tasks.row_files import RowFile
from ackcore.spark.tasks.settle_stage import SettleStage
from ackcore.spark.tasks.spec import RunPlan, TaskSpec
from ackcore.spark.tasks.spout_stage import RetryStage, SpoutStage
from ackcore.spark.tasks.task import (
    COUNTED,
    DISPUTED,
    NAMED,
    NOT_ACKED,
    NOT_ACKED_FILE,
    PICKED,
    RESULT_TYPE,
    TASK_REPORT,
    TRAILER_RECEIPTS,
    UNSETTLED,
    called_as,
    from_stream,
    results_in,
)
from ackcore.topology.builder import Topology
from ackcore.topology.stage_layout import Layout
from ackcore.topology.tuples import Reason

#: The driver runs the settle stage if the last exchange has at most this number of receiving tasks.
_FEW_DESTS = 32
#: The most bytes of rows that the driver settles.  Spark puts a task's rows into one Arrow batch.
_FEW_BYTES = 1 << 27

P = ParamSpec("P")
R = TypeVar("R")
#: A job about an accepted run, given the run's setup, its result, and more.
OfRun = Callable[Concatenate[RunSetup, RunResult, P], R]


def run(
    topology: Topology, layout: Layout, inputs: Sequence[InputFrame], plan: RunPlan
) -> RunResult:
    """Run a micro-batch in one Spark action; return its result, in which tasks may disagree.

    Raises Spark's exception if the job fails: a worker was killed or an executor lost too often.
    Raises ResultsTooLarge if so many records failed that Spark does not return them to the driver.
    Raises Unsettled if the rows that the driver was to settle are too large for it, or for Spark's
    limit of results. The next run then settles them on Spark.
    """
    setup = setup_on_spark(topology, layout, inputs, plan)
    spec, slices = setup.spec, setup.slices()
    kept = None if layout.settles or slices else kept_job(setup, inputs)
    if kept is not None:
        with kept.sent():
            return read_results(setup, layout, collected(kept.frame))
    columns = ROW_TYPE if layout.settles else RESULT_TYPE
    here = plan.is_small and layout.settles and spec.dests <= _FEW_DESTS

    def placed(stage: MapInArrow, level: int) -> MapInArrow:
        is_last = here and level == layout.depth
        return Limited(stage, _FEW_BYTES // spec.dests) if is_last else stage

    frames = [
        one.map_in_arrow(placed(SpoutStage(spec, setup.sources, one.spout), 1), columns)
        for one in inputs
    ]
    if slices:
        numbers = inputs[0].frame.sparkSession.range(len(slices), numPartitions=len(slices))
        stage = RetryStage(spec, setup.sources, None, slices)
        frames.append(numbers.mapInArrow(placed(stage, 1), columns))
    frame = reduce(DataFrame.union, frames)
    # There is nothing to adapt in an RDD and in exchanges with a fixed number of tasks.
    adaptive = not inputs[0].own_session
    if layout.settles:
        for level in range(2, layout.depth + 1):
            stages = repartition_by_id(frame, spec.dests, "dest")
            frame = stages.mapInArrow(placed(BoltStage(spec, level), level), ROW_TYPE)
        if here:
            try:
                rows = settled(spec, collected(frame, adaptive=adaptive))
            except (ResultsTooLarge, MemoryError) as error:
                said = f"the driver cannot settle the records: {one_line(error)}"
                raise Unsettled(said) from error
            return read_results(setup, layout, rows)
        shards = repartition_by_id(frame, spec.dests, "dest")
        frame = shards.mapInArrow(SettleStage(spec), RESULT_TYPE)
    return read_results(setup, layout, collected(frame, adaptive=adaptive))


def settled(spec: TaskSpec, rows: pa.Table) -> pa.Table:
    """Run the settle stage in the driver, without Spark; return the results of all its tasks.

    ``rows``: the rows of the last exchange, of the schema `ROW_SCHEMA`.  With few records a stage
    of Spark costs more time than it saves. Raises Unsettled if a task had too many rows for the
    driver, RuntimeError if rows were lost or came twice.
    """
    if not len(rows):
        rows = ROW_SCHEMA.empty_table()
    dests = rows["dest"].to_numpy()
    if TOO_LARGE in dests:
        raise Unsettled("the driver cannot settle the records: their acks need too much memory")
    found: list[pa.RecordBatch] = []
    for dest in range(spec.dests):
        with called_as(dest, 0):
            found += SettleStage(spec)(iter(rows.filter(pa.array(dests == dest)).to_batches()))
    return pa.Table.from_batches(found)


def read_results(setup: RunSetup, layout: Layout, rows: pa.Table) -> RunResult:
    """Return the result of a run from the blobs that its tasks returned, in any order.

    Contradictions between tasks are its ``problems``. If there are none, records that share a
    message id are found by a second read, and are among its failures.
    """
    reports: list[dict[str, Any]] = []
    receipts: list[TrailerReceipt] = []
    not_acked = _NotAcked(list(setup.sources))
    judged: dict[int, list[pa.Table]] = {PICKED: [], NAMED: []}
    disputed = [np.empty(0, np.int64)]
    acked = Counter[int]()
    unsettled = 0
    results = results_in(rows)
    del rows
    for kind, blob in results:
        if kind == TASK_REPORT:
            reports.append(json.loads(blob.to_pybytes()))
        elif kind == TRAILER_RECEIPTS:
            receipts += read_receipts(blob.to_pybytes())
        elif kind == NOT_ACKED:
            not_acked.add(from_stream(blob))
        elif kind == NOT_ACKED_FILE:
            name = blob.to_pybytes().decode()
            not_acked.add(read_run_table(os.path.join(setup.plan.work, "failed", name)))
        elif kind in judged:
            judged[kind].append(from_stream(blob))
        elif kind == DISPUTED:
            disputed.append(np.frombuffer(blob, np.int64))
        elif kind == UNSETTLED:
            unsettled += int(blob.to_pybytes())
        elif kind == COUNTED:
            counts = json.loads(blob.to_pybytes())
            acked.update({int(number): count for number, count in counts.items()})
    # Free the memory of the blobs.
    pa.default_memory_pool().release_unused()
    failed, claims = not_acked.failed(), not_acked.claims()
    found, named = (
        FailedRows.of(setup.plan.work, [one[name] for one in reports if name in one], judged[kind])
        for name, kind in (("failed", PICKED), ("named", NAMED))
    )
    # A disputed record was judged in its task by one of its reasons, perhaps not by the first.
    if not named.have(np.concatenate(disputed)).any():
        found = found.plus(named)
    result = replace(_summed(setup, reports, failed), unsettled=unsettled, judged=found)
    problems = trailer_problems(setup.spec, layout, reports, receipts)
    problems += file_problems(result.files, setup.plan.work)
    if not_acked.stray:
        problems.append(f"tasks acked or failed {not_acked.stray} records that no spout has sent")
    if layout.settles:
        sent = Counter(result.records) + Counter(result.retried)
        bad = _counted(failed, result.judged)
        problems += count_problems(setup.sources.values(), sent, acked, bad)
    if problems:
        return replace(result, problems=tuple(problems))
    return replace(result, failed=with_repeated_ids(setup, result, claims)) if claims else result


def _counted(failed: pa.Table, judged: FailedRows) -> Counter[str]:
    """Count each spout's records that are not ACKED: those in ``failed`` or ``judged``, or both."""
    counted = Counter({name: len(rows) for name, rows in judged.found.items()})
    for one in judged.without(failed)["spout"].value_counts():
        counted[one["values"].as_py()] += one["counts"].as_py()
    return counted


def _summed(setup: RunSetup, reports: list[dict[str, Any]], failed: pa.Table) -> RunResult:
    """Return the result of a run: the sums of the tasks' reports, and the ``failed`` records."""
    files: list[SinkFile] = []
    spilled: dict[str, list[RowFile]] = {
        name: [] for name, source in setup.sources.items() if source.spills
    }
    kept: dict[str, list[RowFile]] = defaultdict(list)
    used: dict[str, UsageCounts] = defaultdict(UsageCounts)
    for report in reports:
        for name, some in report["used"].items():
            used[name].add(UsageCounts.from_json(some))
        files += [SinkFile(*one) for one in report["files"]]
        for spout, *file in report.get("spilled", ()):
            spilled[spout].append(RowFile(*file))
        for spout, *file in report["kept"]:
            kept[spout].append(RowFile(*file))
    figures = _added(report["figures"] for report in reports)
    spent = figures.get("spent", {}).items()
    figures |= {
        "spent": {bolt: largest_sums(keys) for bolt, keys in spent},
        "tokens": {bolt: largest_sums(some.tokens) for bolt, some in used.items() if some.tokens},
    }
    return RunResult(
        records=Counter(_added(report.get("read", {}) for report in reports)),
        retried=Counter(_added(report.get("retried", {}) for report in reports)),
        failed=failed,
        files=tuple(sorted(files)),
        untracked_failures=sum(report["untracked_failures"] for report in reports),
        spilled={name: tuple(sorted(paths)) for name, paths in spilled.items()},
        kept={name: tuple(paths) for name, paths in kept.items()},
        content={one["partition"]: one["content"] for one in reports if "read" in one},
        read={one["partition"]: one["read"] for one in reports if "read" in one},
        raised=_added(report["raised"] for report in reports),
        figures=figures,
        unexpected=min(filter(None, (report["unexpected"] for report in reports)), default=None),
        used=used,
        traces=_traces([report["trace"] for report in reports if "trace" in report]),
    )


def _added(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up mappings of numbers, or of such mappings, key by key."""
    found: dict[str, Any] = {}
    for some in counts:
        for key, value in some.items():
            if isinstance(value, Mapping):
                found[key] = _added([found.get(key, {}), value])
            else:
                found[key] = found.get(key, 0) + value
    return found


def _traces(found: list[dict[str, Any]]) -> tuple[tuple[int, RecordTrace], ...]:
    """Return pairs of a root and its trace: the steps of all tasks, by start time; no outcome."""
    steps: dict[int, list[Step]] = defaultdict(list)
    for one in found:
        for root, *step in one["steps"]:
            steps[root].append(Step(*step))
    for some in steps.values():
        some.sort(key=lambda step: step.started_ms)
    return tuple(
        (root, RecordTrace(spout, message_id, attempt, "", tuple(steps[root])))
        for one in found
        for root, spout, message_id, attempt in one["records"]
    )


class _NotAcked:
    """The roots that tasks report as not ACKED, and the hashes of repeated message ids.

    ``spouts`` has the names of the spouts, at the numbers that the column ``task`` holds.
    ``stray`` counts the roots that no spout sent.
    """

    def __init__(self, spouts: list[str]) -> None:
        self._spouts = spouts
        self._failed: list[pa.Table] = []
        self._claims: dict[str, list[Int64s]] = defaultdict(list)
        self.stray = 0

    def add(self, found: pa.Table) -> None:
        """Add the rows of one task's result, a table in `NOT_ACKED_SCHEMA`."""
        spouts = self._spouts
        if not len(found):
            return
        least, most = pc.min_max(found["task"]).values()
        rows = found
        if least.as_py() < 0 or most.as_py() >= CLAIM:
            root_ids, tasks = found["root_id"].to_numpy(), found["task"].to_numpy()
            claiming, tracked = tasks >= CLAIM, (tasks >= 0) & (tasks < CLAIM)
            for task in np.unique(tasks[claiming]).tolist():
                self._claims[spouts[task - CLAIM]].append(root_ids[tasks == task])
            self.stray += int((tasks < 0).sum())
            rows = found.filter(pa.array(tracked))
        names = pa.array(spouts, pa.string())
        owners = pa.chunked_array(
            [pa.DictionaryArray.from_arrays(chunk, names) for chunk in rows["task"].chunks], TEXTS
        )
        columns = [rows["root_id"], owners, _with_reasons(rows, spouts)]
        self._failed.append(pa.table(columns, schema=FAILED))

    def failed(self) -> pa.Table:
        """Return the records that were added, as a table of the schema `FAILED`.

        Records that their tasks have judged (`RunResult.judged`) may be missing.
        """
        if not self._failed:
            return FAILED.empty_table()
        # Tables with the same texts are not copied, for example when a service is down.
        return pa.concat_tables(self._failed).unify_dictionaries()

    def claims(self) -> dict[str, Int64s]:
        """Return, by spout, the sorted hashes of repeated message ids of the micro-batch."""
        return {spout: in_order(*claims) for spout, claims in self._claims.items()}


def _with_reasons(rows: pa.Table, spouts: list[str]) -> pa.ChunkedArray:
    """Return the column of reasons why records are not ACKED.

    A record without a reason gets one that names its spout and the status of its tree.
    """
    reasons = rows["reason"].unify_dictionaries()
    if not reasons.null_count:
        return reasons
    statuses = rows["status"].unify_dictionaries().combine_chunks()
    texts = [
        Reason(spout, "NotAcked", f"not acked; its tree is {status}").encode()
        for status in statuses.dictionary.to_pylist()
        for spout in spouts
    ]
    which = statuses.indices.to_numpy().astype(np.int64) * len(spouts) + rows["task"].to_numpy()
    said = pa.array(texts, pa.string()).take(pa.array(which))
    return pc.coalesce(reasons.cast(pa.string()), pa.chunked_array([said])).dictionary_encode()


@dataclass(frozen=True)
class Jobs:
    """The Spark jobs of a micro-batch; their arguments are documented where each is defined.

    ``run`` runs the micro-batch, ``snapshot_inputs`` saves its new rows, and ``load_snapshot``
    finds rows that were saved before.  The other jobs concern an accepted run: ``setup`` makes its
    setup again; ``judge`` reads failed records again and judges them; ``find_keys`` finds records
    by their roots or keys.
    """

    run: Callable[[Topology, Layout, Sequence[InputFrame], RunPlan], RunResult] = run
    snapshot_inputs: Callable[[Sequence[InputFrame], Place, int], list[InputFrame]] = (
        snapshot_inputs
    )
    load_snapshot: Callable[[Sequence[InputFrame], Place], list[InputFrame] | None] = load_snapshot
    setup: Callable[
        [Topology, Layout, Sequence[InputFrame], RunPlan, Collection[str]], RunSetup
    ] = setup_on_spark
    judge: OfRun[[pa.Table, Rules], FailedRows] = judge
    find_keys: OfRun[[Mapping[str, Int64s], Mapping[str, Int64s]], Mapping[str, pa.Table]] = (
        find_keys
    )
