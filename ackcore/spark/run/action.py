"""One run of a micro-batch: a single Spark action, and what it says of every record.

    new rows  ──┐
                ├─► stage 1 ═► stage 2 ═► … ═► settle ─► what is not ACKED, counts, trailers, files
    due retries ┘   mapInArrow    ═ packed blobs ═

Nothing is decided here and nothing outside hears of it: a run leaves files in its directory, and
returns.  It is accepted only if it is internally consistent (`RunResult.problems`); otherwise it
is run again.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from ackcore._records import Int64s
from ackcore.ids import spout_key
from ackcore.spark.base.schemas import MESSAGE_ID, SinkFile
from ackcore.spark.base.session import has_fixed_order, has_fixed_rows
from ackcore.spark.base.unions import collected
from ackcore.spark.settle.reasons import FAILED
from ackcore.spark.settle.shards import MapInArrow
from ackcore.spark.tasks.exchange import (
    ROW_TYPE,
    SETTLE,
    level_of,
    origin_of,
    partition_of,
    read_sightings,
)
from ackcore.spark.tasks.source import CLAIM, Source
from ackcore.spark.tasks.stages import (
    ABOUT,
    COUNTED,
    RESULT_TYPE,
    SETTLED,
    SIGHTED,
    UNSETTLED,
    FirstStage,
    LastStage,
    NextStage,
    PickStage,
    Records,
    RetryStage,
    Slice,
    due_records,
    from_stream,
    pick,
    read_due,
)
from ackcore.spark.tasks.task import Work
from ackcore.spark.tasks.workfiles import ROOT_ID, WorkFile, read_rows
from ackcore.topology.builder import Topology
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.layout import Layout
from ackcore.topology.parts import Spout
from ackcore.topology.tuples import Raised, Reason


@dataclass(frozen=True)
class InputFrame:
    """Rows for the first stage.

    ``spout`` is whose rows they are; None where each spout has a nullable struct column, in the
    order of the topology, and each partition has rows of one of them.  ``kept`` rows are in files
    of ours, so that they are there again whatever the source does.
    """

    frame: DataFrame
    spout: str | None
    kept: bool = False

    def map_in_arrow(self, function: MapInArrow, schema: StructType | str) -> DataFrame:
        """``frame.mapInArrow``, where columns have any names.

        PySpark looks them up by name, and takes a dot for one of a field.
        """
        frame, names = self.frame, self.frame.columns
        if any("." in name or "`" in name for name in names):
            frame = frame.toDF(*(f"_{i}" for i in range(len(names))))
        return frame.mapInArrow(function, schema)


@dataclass(frozen=True)
class RunPlan:
    """What is run.

    Attributes
    ----------
    number : int
        The micro-batch.
    now_ms : int
        Its time.
    key : int
        64 bits, a function of the deployment's key and the number: of all ids of the run.
    work : str
        A directory that driver and workers share, empty.
    retries : mapping from str to WorkFile
        By spout, the records that are due: what `state` keeps of those that wait, and the
        source's columns.
    careful : bool
        Whether in-flight markers name roots, for the driver to go by.
    suspects, rejected : tuple of int
        Roots that are run alone, and once more for each time that an attempt died of one alone;
        roots that are not run at all, but fail.
    """

    number: int
    now_ms: int
    key: int
    work: str
    retries: Mapping[str, WorkFile] = field(default_factory=dict)
    careful: bool = False
    suspects: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes
    ----------
    records, retried : mapping from str to int
        By spout: new records, and records that were due.
    failed : pyarrow.Table
        ``root_id, spout, reason`` of every record that is not ACKED.
    files : tuple of SinkFile
        What was emitted to streams with a sink.
    problems : tuple of str
        Why the run must not be accepted; empty if it may be.
    untracked_failures : int
        Tuples that failed and that nobody tracks.
    spilled : mapping from str to tuple of WorkFile
        By spout of which rows cannot be read again by position: the files that have them,
        relative to the run's directory.
    content : mapping from int to mapping from str to int
        By partition of the first stage and spout: `stages.sampled` of what was read.
    raised : mapping from str to Raised
        By bolt, what it raised.
    """

    records: Mapping[str, int]
    retried: Mapping[str, int]
    failed: pa.Table
    files: tuple[SinkFile, ...]
    problems: tuple[str, ...]
    untracked_failures: int
    spilled: Mapping[str, tuple[WorkFile, ...]]
    content: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    raised: Mapping[str, Raised] = field(default_factory=dict)


def source_schema(frame_schema: StructType) -> pa.Schema:
    """Return the columns of a source as Arrow has them."""
    return to_arrow_schema(frame_schema, timezone="UTC")


class _Parts:
    """What `run` and `fetch` have in common: the sources, and the work."""

    def __init__(
        self,
        topology: Topology,
        layout: Layout,
        inputs: Sequence[InputFrame],
        plan: RunPlan,
        spilled: Collection[str] | None = None,
    ) -> None:
        self.plan = plan
        self.inputs = inputs
        self.spark: SparkSession = inputs[0].frame.sparkSession
        settings = topology.settings
        self.sources: dict[str, Source] = {}
        schemas: dict[tuple[str, str], pa.Schema] = {}
        for number, spout in enumerate(topology.spouts.values()):
            frames = [one for one in inputs if one.spout in (spout.name, None)]
            schema = _schema_of(frames, spout.name)
            if schema is None:
                schema = source_schema(spout.source.schema)
            self.sources[spout.name] = Source(
                name=spout.name,
                number=number,
                schema=schema,
                message_id=tuple(spout.message_id),
                tracked=spout.tracked,
                claims=spout.tracked and bool(spout.message_id) and not spout.unique,
                spilled=(
                    spout.tracked and not all(_reads_alike(one, spout) for one in frames)
                    if spilled is None
                    else spout.name in spilled
                ),
                key=spout_key(plan.key, spout.name, "", plan.number),
            )
            schemas[spout.name, DEFAULT_STREAM] = schema
        for bolt in topology.bolts.values():
            for stream, schema in bolt.schemas.items():
                schemas[bolt.name, stream] = schema
        tasks = settings.parallelism or self.spark.sparkContext.defaultParallelism
        asked = [bolt.parallelism for bolt in topology.bolts.values() if bolt.parallelism]
        self.work = Work(
            layout=layout,
            components={bolt.name: bolt.component for bolt in topology.bolts.values()},
            schemas=schemas,
            key=plan.key,
            number=plan.number,
            dests=max(tasks, *asked) if asked else tasks,
            chunk_rows=settings.chunk_rows,
            directory=plan.work,
            reject=tuple(settings.reject),
            careful=plan.careful,
            suspects={root: n - 1 for root, n in Counter(plan.suspects).items()},
            rejected=frozenset(plan.rejected),
            # Where rows may come in another order, a root of one attempt is not that of the next.
            isolates=not any(source.spilled for source in self.sources.values())
            and self.spark.conf.get("spark.speculation", "false") != "true",
            timeout_s=settings.message_timeout_s,
        )

    def slices(self) -> tuple[Slice, ...]:
        """Cut what is due into as many pieces as there are tasks, or fewer."""
        found = []
        for spout, file in sorted(self.plan.retries.items()):
            rows = len(read_due(file))
            pieces = max(1, min(self.work.dests, -(-rows // self.work.chunk_rows)))
            size = -(-rows // pieces)
            found += [
                Slice(spout, file, first, min(size, rows - first))
                for first in range(0, rows, max(1, size))
            ]
        return tuple(found)


def _reads_alike(one: InputFrame, spout: Spout) -> bool:
    """Whether rows are the same, in the same order, each time that they are read."""
    return one.kept or (has_fixed_order(one.frame) and has_fixed_rows(spout.source))


def _schema_of(frames: Iterable[InputFrame], spout: str) -> pa.Schema | None:
    for one in frames:
        if one.spout is None:
            struct = one.frame.schema[spout].dataType
            assert isinstance(struct, StructType)
            return source_schema(struct)
        return source_schema(one.frame.schema)
    return None


def run(
    topology: Topology, layout: Layout, inputs: Sequence[InputFrame], plan: RunPlan
) -> RunResult:
    """Run a micro-batch: one Spark action.

    Raises
    ------
    Exception
        What Spark raises if the job fails: a worker was killed, an executor lost, too often.
    """
    parts = _Parts(topology, layout, inputs, plan)
    work = parts.work
    columns = ROW_TYPE if layout.settles else RESULT_TYPE
    frames = [
        one.map_in_arrow(FirstStage(work, parts.sources, one.spout), columns) for one in inputs
    ]
    slices = parts.slices()
    if slices:
        numbers = parts.spark.range(len(slices), numPartitions=len(slices))
        stage = RetryStage(work, parts.sources, None, slices)
        frames.append(numbers.mapInArrow(stage, columns))
    frame = reduce(DataFrame.union, frames)
    if layout.settles:
        for level in range(2, layout.depth + 1):
            stages = frame.repartitionById(work.dests, "dest")
            frame = stages.mapInArrow(NextStage(work, level), ROW_TYPE)
        frame = frame.repartitionById(work.dests, "dest").mapInArrow(LastStage(work), RESULT_TYPE)
    return _read(parts, layout, collected(frame))


def _read(parts: _Parts, layout: Layout, rows: pa.Table) -> RunResult:
    """Make sense of what the tasks have returned."""
    abouts: list[dict[str, Any]] = []
    sightings = []
    unsettled = [SETTLED.empty_table()]
    acked = Counter[int]()
    blobs = rows["blob"].to_pylist()
    for kind, blob in zip(rows["kind"].to_pylist(), blobs, strict=True):
        if kind == ABOUT:
            abouts.append(json.loads(blob))
        elif kind == SIGHTED:
            sightings += read_sightings(blob)
        elif kind == UNSETTLED:
            unsettled.append(from_stream(blob))
        elif kind == COUNTED:
            acked.update({int(number): count for number, count in json.loads(blob).items()})
    records, retried = Counter[str](), Counter[str]()
    files: list[SinkFile] = []
    spilled: dict[str, list[WorkFile]] = {
        name: [] for name, source in parts.sources.items() if source.spilled
    }
    untracked = 0
    raised: dict[str, Raised] = defaultdict(Raised)
    for about in abouts:
        records.update(about.get("read", {}))
        retried.update(about.get("retried", {}))
        untracked += about["untracked_failures"]
        for name, some in about["raised"].items():
            raised[name] += Raised.from_json(some)
        files += [SinkFile(*one) for one in about["files"]]
        for spout, path, rows_in_it in about.get("spilled", ()):
            spilled[spout].append(WorkFile(path, rows_in_it))
    problems = _problems(parts, layout, abouts, sightings)
    problems += [
        f"the file {one.path} that a task says it wrote is not there"
        for one in files
        if not os.path.exists(os.path.join(parts.plan.work, one.path))
    ]
    found = pa.concat_tables(unsettled)
    names = list(parts.sources)
    failed, claims, stray = _failed(found, names)
    if stray:
        problems.append(f"{stray} roots were acked or failed that no spout of this run sent")
    if layout.settles:
        tracked = {name: s.number for name, s in parts.sources.items() if s.tracked}
        bad = Counter(failed["spout"].to_pylist())
        for name, number in tracked.items():
            sent, came = records[name] + retried[name], acked[number] + bad[name]
            if sent != came:
                problems.append(f"spout {name} sent {sent} records, and {came} were settled")
    run = RunResult(
        records,
        retried,
        failed,
        tuple(sorted(files)),
        tuple(problems),
        untracked,
        {name: tuple(sorted(paths)) for name, paths in spilled.items()},
        {one["partition"]: one["content"] for one in abouts if "read" in one},
        dict(raised),
    )
    if claims and not problems:
        run = replace(run, failed=_with_repeated(parts, run, claims))
    return run


def _failed(found: pa.Table, spouts: list[str]) -> tuple[pa.Table, dict[str, Int64s], int]:
    """Part what was not ACKED: records by spout, repeated claims, and roots of nobody."""
    roots, spout_names, reasons = [], [], []
    claims: dict[str, list[int]] = defaultdict(list)
    stray = 0
    columns = [found[name].to_pylist() for name in SETTLED.names]
    for root, task, status, text in zip(*columns, strict=True):
        if task < 0:
            stray += 1
        elif task >= CLAIM:
            claims[spouts[task - CLAIM]].append(root)
        else:
            roots.append(root)
            spout_names.append(spouts[task])
            if text is None:
                text = Reason(spouts[task], "NotAcked", f"not acked; its tree is {status}").encode()
            reasons.append(text)
    failed = pa.table([roots, spout_names, reasons], schema=FAILED)
    repeated = {name: np.array(sorted(ids), np.int64) for name, ids in claims.items()}
    return failed, repeated, stray


def _problems(
    parts: _Parts, layout: Layout, abouts: list[dict[str, Any]], sightings: list[Any]
) -> list[str]:
    """Say in what the tasks' accounts of each other do not agree."""
    problems = []
    said: dict[tuple[int, int], int] = Counter((one["level"], one["partition"]) for one in abouts)
    problems += [
        f"partition {partition} of level {level} ended {times} times"
        for (level, partition), times in said.items()
        if times > 1
    ]
    firsts = sorted(partition for level, partition in said if level == 1)
    if firsts != list(range(len(firsts))):
        problems.append(f"of the first stage only the partitions {firsts} ended")
    if not layout.settles:
        return problems
    seals: dict[int, set[int]] = defaultdict(set)
    seen_by: dict[int, set[int]] = defaultdict(set)
    for one in sightings:
        seals[one.origin].add(one.fingerprint)
        seen_by[one.seer].add(one.origin)
    problems += [
        f"partition {partition_of(origin)} of level {level_of(origin)} ran more than once and "
        "answered differently"
        for origin, found in seals.items()
        if len(found) > 1
    ]
    dests = range(parts.work.dests)
    tasks = {1: {origin_of(1, partition) for partition in firsts}}
    for level in range(2, layout.depth + 1):
        tasks[level] = {origin_of(level, partition) for partition in dests}
    for level in (*range(2, layout.depth + 1), SETTLE):
        senders = {origin for at in tasks if level in parts.work.sends(at) for origin in tasks[at]}
        problems += [
            f"partition {partition} of level {level} has not heard from all who send to it"
            for partition in dests
            if seen_by[origin_of(level, partition)] != senders
        ]
    return problems


def _with_repeated(parts: _Parts, run: RunResult, claims: Mapping[str, Int64s]) -> pa.Table:
    """Add the records whose message id another record of the micro-batch has."""
    suspects = _fetch(parts, run, {}, claims)
    failed = {root: i for i, root in enumerate(run.failed["root_id"].to_pylist())}
    rows = []
    for spout, table in suspects.items():
        by_id = defaultdict(list)
        columns = (table[name].to_pylist() for name in (ROOT_ID, MESSAGE_ID))
        for root, message in zip(*columns, strict=True):
            by_id[message].append(root)
        for message, found in by_id.items():
            if len(found) == 1:
                continue  # two hashes have met
            text = (
                f"message id {message} is that of {len(found)} records of one micro-batch; drop "
                "duplicates, or let positions be the ids: spout(...) without message_id"
            )
            # They would wait equally long, and meet again.
            reason = Reason(spout, "RepeatedMessageId", text, final=True).encode()
            rows += [(root, spout, reason) for root in found if root not in failed]
    if not rows:
        return run.failed
    added = pa.table([list(column) for column in zip(*rows, strict=True)], schema=FAILED)
    return pa.concat_tables([run.failed, added])


def fetch(
    topology: Topology,
    layout: Layout,
    inputs: Sequence[InputFrame],
    plan: RunPlan,
    accepted: RunResult,
    failed: pa.Table,
) -> dict[str, pa.Table]:
    """Get the rows of some records of a run again.

    Parameters
    ----------
    topology, layout, inputs, plan
        As given to `run`.
    accepted : RunResult
        What that returned.
    failed : pyarrow.Table
        ``root_id, spout`` of the records; the spout is null where it is not known.

    Returns
    -------
    dict from str to pyarrow.Table
        By spout: ``_ackcore_root_id``, ``_ackcore_message_id``, ``_ackcore_attempt`` (the one
        that was run), and the source's columns.

    Raises
    ------
    RuntimeError
        If a record is not there any more.
    """
    # Asking Spark again would take time, and might have another answer.
    parts = _Parts(topology, layout, inputs, plan, accepted.spilled)
    spouts = np.array(failed["spout"].to_pylist(), object)
    ids = failed["root_id"].to_numpy()
    unknown = failed["spout"].is_null().to_numpy()
    roots: dict[str, Int64s] = {}
    for name, source in parts.sources.items():
        may_be = np.sort(ids[(spouts == name) | unknown])
        if len(may_be) and source.tracked:
            roots[name] = may_be
    found = _fetch(parts, accepted, roots, {})
    lost = np.setdiff1d(ids, _roots_in(found.values()))
    if len(lost):
        raise RuntimeError(
            f"{len(ids)} records failed, and {len(lost)} of them were not found when their source "
            "was read again; a source must give the same rows when it is read twice within a "
            "micro-batch"
        )
    return found


def _roots_in(tables: Iterable[pa.Table]) -> Int64s:
    found = [table[ROOT_ID].to_numpy() for table in tables]
    return np.concatenate([np.empty(0, np.int64), *found])


def _fetch(
    parts: _Parts, accepted: RunResult, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s]
) -> dict[str, pa.Table]:
    tables: dict[str, list[pa.Table]] = defaultdict(list)
    wanted = {*roots, *claims}
    plan, number = parts.plan, parts.plan.number
    for name, file in plan.retries.items():
        source = parts.sources[name]
        due = read_due(file)
        if name not in wanted or not len(due):
            continue
        # These make no claims.
        picked = [pick(some, roots, {}, number) for some in due_records(source, due)]
        tables[name].append(pa.Table.from_batches(picked))
    for name in sorted(wanted):
        for path, rows_in_it in accepted.spilled.get(name, ()):
            place = os.path.join(plan.work, path)
            partition = int(os.path.basename(path).split("-")[0])
            first = 0
            for batch in read_rows(WorkFile(place, rows_in_it)):
                some = Records(parts.sources[name], batch, partition, first)
                tables[name].append(pa.Table.from_batches([pick(some, roots, claims, number)]))
                first += len(batch)
    sought = np.unique(np.concatenate([np.empty(0, np.int64), *roots.values()]))
    there = len(np.intersect1d(sought, _roots_in(chain(*tables.values()))))
    if (claims or there < len(sought)) and not all(parts.sources[name].spilled for name in wanted):
        again = [
            one.map_in_arrow(
                PickStage(FirstStage(parts.work, parts.sources, one.spout), roots, claims),
                RESULT_TYPE,
            )
            for one in parts.inputs
        ]
        rows = collected(reduce(DataFrame.union, again))
        content = {}
        for kind, blob in zip(rows["kind"].to_pylist(), rows["blob"].to_pylist(), strict=True):
            if kind == ABOUT:
                about = json.loads(blob)
                content[about["partition"]] = about["content"]
                continue
            table = from_stream(blob)
            name = table.schema.metadata[b"spout"].decode()
            if not parts.sources[name].spilled:
                tables[name].append(table)
        _check_content(parts, accepted.content, content)
    return {
        name: found
        for name, some in tables.items()
        if len(found := pa.concat_tables(some, promote_options="none"))
    }


def _check_content(
    parts: _Parts,
    before: Mapping[int, Mapping[str, int]],
    now: Mapping[int, Mapping[str, int]],
) -> None:
    """Raise `RuntimeError` if partitions do not hold the rows that they held in the run.

    A place in a partition would then be another record's.
    """
    for partition in before.keys() | now.keys():
        for name, source in parts.sources.items():
            if source.spilled:
                continue
            if before.get(partition, {}).get(name) != now.get(partition, {}).get(name):
                raise RuntimeError(
                    f"partition {partition} of spout {name} holds other rows than it did in the "
                    "run; its source must be cut and ordered alike when it is read twice"
                )
