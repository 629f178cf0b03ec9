"""Settling by cohort and by root: equal outcomes for bolts that do all that the collector allows.

Three spouts and due records share a run.  Bolts hold tuples across chunks, anchor rows to tuples of
several spouts, emit unanchored, after a failure and in flush, fail late, and never ack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from unittest import mock

import numpy as np
import pyarrow as pa
from branching import ROWS, scramble
from checkpoints import tracked
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_stages import SEEDS, Simulation

from ackcore import FAIL
from ackcore.ids import spout_key
from ackcore.retry import Policy
from ackcore.spark.engine.action import read_results
from ackcore.spark.settle.wire import CohortEvents
from ackcore.spark.tasks import bolts, exchange, settle_stage, spout_stage
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.record_ids import RETRIES, SpoutSpec, roots_of
from ackcore.spark.tasks.settle_stage import settle_cohorts
from ackcore.spark.tasks.spout_stage import SpoutStage, due_records
from ackcore.spark.tasks.task import RESULT_SCHEMA
from ackcore.testing import Source
from ackcore.topology import BatchBolt, Bolt, TopologyBuilder

SPOUTS = ("spout", "more", "loose")
RULES = Rules(1_000_000, 1_000_000, Policy(2, 1000, 60_000), 1e12)
STREAMS = {"default": ROWS, "side": ROWS}


class Wild(Bolt):
    """Does with each tuple what its value and the bolt's number decide."""

    outputs = STREAMS

    def __init__(self, number):
        self.number = number

    def prepare(self, context):
        self.held = []

    def execute(self, tuple):
        record, out = tuple["record"], self.collector

        def draw(*more):
            return scramble(self.number, tuple["value"], *more)

        for j in range(draw(1) % 3):
            anchors = [tuple, *(self.held[-2:] if draw(2, j) % 2 else [])]
            if draw(3, j) % 5 == 0:
                anchors.append(tuple)  # twice
            stream = "side" if draw(4, j) % 3 == 0 else "default"
            out.emit((record, draw(5, j)), anchors=anchors if draw(6, j) % 4 else [], stream=stream)
        match draw(7) % 8:
            case 0 | 1 | 2:
                out.ack(tuple)
            case 3:
                out.fail(tuple, f"no {tuple['value']}")
            case 4 | 5:
                self.held.append(tuple)
            case 6 if self.held:
                out.emit((record, draw(8)), anchors=self.held[:3])
                out.ack(self.held.pop(draw(9) % len(self.held)))
                out.ack(tuple)
            case 7 if draw(10) % 6 == 0:
                pass  # never acked
            case _:
                out.ack(tuple)

    def flush(self):
        for i, tuple in enumerate(self.held):
            some = self.held[i : i + 1 + scramble(self.number, i) % 3]
            self.collector.emit((tuple["record"], scramble(tuple["value"], i)), anchors=some)
        for tuple in self.held:
            if scramble(self.number, tuple["value"], 11) % 6:
                self.collector.ack(tuple)
            else:
                self.collector.fail(tuple, f"late {tuple['value']}")
        self.held = []


class Fan(BatchBolt):
    """Emits several copies of a row, joins of neighbours, and rows without a parent."""

    outputs = STREAMS

    def __init__(self, number):
        self.number = number
        self.n = 0

    def process(self, batch, out):
        records, values = (column.to_pylist() for column in batch.columns)
        found = [
            (i, j)
            for i, value in enumerate(values)
            for j in range(scramble(self.number, value) % 4)
        ]
        columns = [
            [records[i] for i, _ in found],
            [scramble(values[i], self.number, j) for i, j in found],
        ]
        out.emit(columns, parents=np.array([i for i, _ in found], np.int64))
        if values[0] % 3 == 0:
            out.emit([records[:1], [7]], parents=None, stream="side")
        bad = [i for i, value in enumerate(values) if scramble(value, self.number, 3) % 9 == 0]
        out.fail(bad, [ValueError(f"value {values[i]}") for i in bad])


@st.composite
def shapes(draw):
    builder = TopologyBuilder()
    for name in SPOUTS:
        builder.spout(name, Source(ROWS))
    names, has_side = list(SPOUTS), set()
    for number in range(draw(st.integers(1, 4))):
        name = f"b{number}"
        bolt = draw(st.sampled_from([Wild, Wild, Fan]))(number)
        declared = builder.bolt(name, bolt, parallelism=draw(st.sampled_from([None, 1, 2])))
        some = draw(st.sets(st.sampled_from(names), min_size=1, max_size=3))
        if number == 0:
            some |= set(SPOUTS)
        for source in sorted(some):
            grouping = st.sampled_from(
                ["shuffle", "fields", "partial_key", "local_or_shuffle", "global_", "all"]
            )
            for stream in ["default", "side"] if source in has_side else ["default"]:
                how = draw(grouping)
                fields = ("value",) if how in ("fields", "partial_key") else ()
                getattr(declared, how)(source, *fields, stream=stream)
        names.append(name)
        has_side.add(name)
    for name in names[len(SPOUTS) :]:
        builder.sink(name, lambda frame, number: None)
    return builder.build(chunk_rows=draw(st.sampled_from([1, 3, 7, 1000])))


class DueStage(SpoutStage):
    """A retry stage whose records are given."""

    def records(self, batches, partition):
        source = self.sources[self.spout]
        for batch in batches:
            yield from due_records(source, pa.Table.from_batches([batch]))

    def __call__(self, batches):
        with spout_stage.Task(self.spec, spout_stage.attempt_at(1)) as task:
            yield from self._run(task, self.records(batches, RETRIES), retried=True)


class World(Simulation):
    """A simulation with three spouts and due records."""

    def __init__(self, topology, directory, **spec):
        super().__init__(topology, directory)
        schemas = self.work.schemas | {(name, "default"): ROWS for name in SPOUTS}
        self.work = dataclasses.replace(self.work, schemas=schemas, **spec)
        self.sources = {
            name: SpoutSpec(
                name,
                number,
                ROWS,
                ("record",),
                name != "loose",
                name == "more",
                False,
                spout_key(99, name, "", 0),
            )
            for number, name in enumerate(SPOUTS)
        }

    def first(self, values, retries=()):
        sent = []
        for partition, name in enumerate([*SPOUTS, "spout"]):
            of = {name: self.sources[name]}
            some = [
                pa.RecordBatch.from_pylist(
                    [{"record": 1000 * partition + i, "value": v} for i, v in enumerate(part)], ROWS
                )
                for part in np.array_split(np.array(values[partition], np.int64), 3)
                if len(part)
            ]
            sent.append(self.task(SpoutStage(self.work, of, name), partition, some))
        if retries:
            n = len(retries)
            due = tracked(
                pa.table([[9000 + i for i in range(n)], retries], schema=ROWS),
                message_id=[f"old-{i}" for i in range(n)],
                attempt=[1 + value % 70 for value in retries],
            )
            stage = DueStage(self.work, {"spout": self.sources["spout"]}, "spout")
            sent.append(self.task(stage, len(sent), due.to_batches()))
        return sent

    def read(self, rows):
        setup = types.SimpleNamespace(
            sources=self.sources, spec=self.work, plan=types.SimpleNamespace(work=self.directory)
        )
        table = pa.Table.from_pylist(rows, schema=RESULT_SCHEMA)
        with mock.patch("ackcore.spark.engine.action.with_repeated_ids", lambda s, r, c: r.failed):
            return read_results(setup, self.layout, table)


def outcome(world, done):
    """Return the results that both ways of settling must have in common."""
    judged = sorted(np.concatenate([[], *done.judged.roots()]).astype(int).tolist())
    failed = sorted(zip(*map(pa.ChunkedArray.to_pylist, done.failed.columns), strict=True))
    traces = sorted(
        (root, *one[:3], sorted(step[:3] for step in one.steps)) for root, one in done.traces
    )
    return {
        "problems": done.problems,
        "judged": judged,
        "failed": failed,
        "rows": world.rows_of(done),
        "emitted": done.figures["emitted"],
        "untracked": done.untracked_failures,
        "raised": done.raised,
        "records": (done.records, done.retried, done.read, done.content),
        "traces": traces,
    }


NUMBERS = st.lists(st.integers(0, 10**6), max_size=14)


@settings(max_examples=12)
@given(
    topology=shapes(),
    values=st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    retries=NUMBERS,
    seed=SEEDS,
    rules=st.sampled_from([None, RULES, RULES]),
    most=st.sampled_from([None, 1, 60]),
    suspects=st.sampled_from([0, 0, 0, 1, 3]),
    traces=st.booleans(),
)
def test_both_ways_agree(
    tmp_path_factory, topology, values, retries, seed, rules, most, suspects, traces
):
    found = []
    key = spout_key(99, "spout", "", 0)
    # Suspects run alone, with a flush before and after; every second one is rejected.
    alone = {int(root): 1 + i % 2 for i, root in enumerate(roots_of(key, 0, np.arange(suspects)))}
    with contextlib.ExitStack() as patches:
        if most:
            patches.enter_context(mock.patch.object(spout_stage, "CHUNK_BYTES", most))
            patches.enter_context(mock.patch.object(bolts, "CHUNK_BYTES", most))
            patches.enter_context(mock.patch.object(exchange, "_CHUNK_BYTES", most))
        for by_root in (False, True):
            world = World(
                topology,
                tmp_path_factory.mktemp("work"),
                by_root=by_root,
                rules=None if alone else rules,
                suspects=alone,
                careful=bool(alone),
                trace_per_million=400_000 * traces,
            )
            done = world.rest(world.first(values, retries), np.random.default_rng(seed))
            assert done.unsettled == 0
            found.append(outcome(world, done))
    assert found[0]["problems"] == ()
    for name, value in found[1].items():
        assert found[0][name] == value, name


@settings(max_examples=15)
@given(
    topology=shapes(),
    values=st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS),
    retries=NUMBERS,
    seed=SEEDS,
    fault=st.sampled_from(["lost", "twice", "row", "names"]),
)
def test_faults_between_tasks_leave_a_cohort_open(
    tmp_path_factory, topology, values, retries, seed, fault
):
    rng = np.random.default_rng(seed)
    world = World(topology, tmp_path_factory.mktemp("work"))
    if not world.layout.settles:
        return
    sent = world.first(values, retries)
    done = []
    check = exchange.Inbox.check

    def spoil(inbox):
        check(inbox)
        tracked = [
            i
            for i, one in enumerate(inbox.tuples)
            if one.side[0] == 2 and one.side[4:8] != b"\0" * 4
        ]
        if done or not tracked or rng.random() < 0.5:
            return
        place = tracked[int(rng.integers(len(tracked)))]
        done.append(inbox.tuples[place])
        if fault == "lost":
            del inbox.tuples[place]
        else:
            inbox.tuples.append(inbox.tuples[place])

    def fewer(parts):
        if not parts or done:
            return settle_cohorts(parts)
        rows = CohortEvents(*map(np.concatenate, zip(*parts, strict=True)))
        lose = np.zeros(len(rows.tasks), np.bool_)
        if fault == "row":
            lose[int(rng.integers(len(lose)))] = True
        elif (rows.tasks == FAIL).any():
            names = rows.roots[rows.tasks == FAIL]
            root = names[int(rng.integers(len(names)))]
            lose = (rows.roots == root) & (rows.tasks == FAIL)
        if lose.any():
            done.append(lose)
        return settle_cohorts([CohortEvents(*(column[~lose] for column in rows))])

    with contextlib.ExitStack() as patches:
        if fault in ("lost", "twice"):
            patches.enter_context(mock.patch.object(exchange.Inbox, "check", spoil))
        else:
            patches.enter_context(mock.patch.object(settle_stage, "settle_cohorts", fewer))
        result = world.rest(sent, rng)
    event(f"{fault} {bool(done)}")
    assert bool(result.unsettled or result.problems) == bool(done)
