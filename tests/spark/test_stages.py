"""The stages of a run without Spark: any topology, any order of arrival, anything lost or repeated.

Stages are functions from batches to batches.  Here they are called one after the other, and the
exchange between them is a few lines that may deliver in any order, lose a row, or mix two runs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import subprocess
import sys
import types
import weakref
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from branching import DESTS, ROWS, Branch, RowBranch, expected, topologies, with_head
from hypothesis import given, settings
from hypothesis import strategies as st

from ackcore.ids import spout_key
from ackcore.spark.engine.action import read_results
from ackcore.spark.sinks.sink_batch import BatchFile, read_sink_file
from ackcore.spark.tasks import bolts, exchange, shuffle_writer, spout_stage
from ackcore.spark.tasks.bolt_stage import BoltStage
from ackcore.spark.tasks.exchange_format import ROW_SCHEMA, TRAILER
from ackcore.spark.tasks.record_ids import SpoutSpec
from ackcore.spark.tasks.settle_stage import SettleStage
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.spout_stage import RowSample, SpoutStage
from ackcore.spark.tasks.task import RESULT_SCHEMA, called_as
from ackcore.testing import Source
from ackcore.topology import BatchBolt, TopologyBuilder
from ackcore.topology.expectations import expect
from ackcore.topology.stage_layout import Layout
from ackcore.topology.tuples import Reason


def chunks_of(values, partitions=2, batch_rows=5):
    """Batches of records by partition."""
    cuts = [len(values) * i // partitions for i in range(partitions + 1)]
    for partition, (first, end) in enumerate(itertools.pairwise(cuts)):
        rows = [{"record": i, "value": values[i]} for i in range(first, end)]
        parts = [rows[start : start + batch_rows] for start in range(0, len(rows), batch_rows)]
        yield partition, [pa.RecordBatch.from_pylist(part, ROWS) for part in parts]


class Simulation:
    """Calls the stages of a topology as Spark would."""

    def __init__(self, topology, directory):
        self.topology = topology
        self.layout = Layout.of(topology)
        self.directory = str(directory)
        self._attempts = 0
        schemas = {("spout", "default"): ROWS}
        for bolt in topology.bolts.values():
            schemas |= {(bolt.name, name): schema for name, schema in bolt.schemas.items()}
        self.work = TaskSpec(
            layout=self.layout,
            components={bolt.name: bolt.component for bolt in topology.bolts.values()},
            schemas=schemas,
            key=99,
            number=0,
            now_ms=0,
            dests=DESTS,
            chunk_rows=topology.settings.chunk_rows,
            work=self.directory,
            journal=f"{self.directory}.journal",
            reject=(),
        )
        key = spout_key(99, "spout", "", 0)
        self.source = SpoutSpec("spout", 0, ROWS, (), True, False, False, key)

    def task(self, stage, partition, batches):
        self._attempts += 1
        with called_as(partition, self._attempts):
            rows = [row for batch in stage(iter(batches)) for row in batch.to_pylist()]
        return [with_head(row) if "head" in row else row for row in rows]

    def first(self, values, partitions=2, batch_rows=5):
        """Return the rows that each task of the spout stage sends."""
        stage = SpoutStage(self.work, {"spout": self.source}, "spout")
        cut = chunks_of(values, partitions, batch_rows)
        return [self.task(stage, partition, batches) for partition, batches in cut]

    def rest(self, sent, rng, spoil=lambda level, dest, rows: rows):
        """Take what the spout stage sent through all others; return the driver's view."""
        if not self.layout.settles:
            return self.read([row for task in sent for row in task])
        self.sent = []
        for level in (*range(2, self.layout.depth + 1), None):
            rows = [row for task in sent for row in task]
            stage = SettleStage(self.work) if level is None else BoltStage(self.work, level)
            sent = []
            for dest in range(DESTS):
                here = [row for row in rows if row["dest"] == dest]
                rng.shuffle(here)
                here = spoil(level, dest, here)
                cut = int(rng.integers(0, len(here) + 1))
                parts = [part for part in (here[:cut], here[cut:]) if part]
                batches = [pa.RecordBatch.from_pylist(part, ROW_SCHEMA) for part in parts]
                sent.append(self.task(stage, dest, batches))
            if level is not None:
                self.sent.append([sorted(map(repr, task)) for task in sent])
        return self.read([row for task in sent for row in task])

    def read(self, rows):
        setup = types.SimpleNamespace(
            sources={"spout": self.source},
            spec=self.work,
            plan=types.SimpleNamespace(work=self.directory),
        )
        table = pa.Table.from_pylist(rows, schema=RESULT_SCHEMA)
        return read_results(setup, self.layout, table)

    def check(self, done, values):
        """Compare with the model."""
        failed, rows = expected(self.topology, self.layout, values)
        assert done.problems == ()
        # The roots of records are those of their places.
        assert set(done.failed["root_id"].to_pylist()) == roots(self, failed, len(values))
        sunk = {sink.component for sink in self.topology.sinks.values()} & rows.keys()
        assert self.rows_of(done) == {name: rows[name] for name in sunk if rows[name]}

    def rows_of(self, done):
        bad = np.sort(done.failed["root_id"].to_numpy())
        rows = collections.defaultdict(collections.Counter)
        for file in done.files:
            accepted = BatchFile(f"{self.directory}/{file.path}", file.rows)
            for batch in read_sink_file(accepted, bad):
                columns = [column.to_pylist() for column in batch.columns]
                rows[file.component].update(zip(*columns, strict=True))
        return {component: found for component, found in rows.items() if found}


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    return lambda topology: Simulation(topology, tmp_path_factory.mktemp("work"))


def roots(simulation, records, n, partitions=2):
    """The root ids of records, by their places in the partitions."""
    cuts = [n * i // partitions for i in range(partitions + 1)]
    found = set()
    for record in records:
        partition = max(i for i in range(partitions) if cuts[i] <= record)
        place = record - cuts[partition]
        found.update(simulation.source.roots(partition, place, 1).tolist())
    return found


VALUES = st.lists(st.integers(0, 10**6), max_size=40)
SEEDS = st.integers(0, 2**32)


@given(topology=topologies(), values=VALUES, seed=SEEDS)
def test_any_topology_fails_and_keeps_what_the_model_does(simulate, topology, values, seed):
    simulation = simulate(topology)
    done = simulation.rest(simulation.first(values), np.random.default_rng(seed))
    assert done.records["spout"] == len(values)
    simulation.check(done, values)


@given(topology=topologies(), values=VALUES, seed=SEEDS, most=st.sampled_from([1, 40, 100]))
def test_long_rows_are_cut_by_their_bytes(simulate, topology, values, seed, most):
    """Chunks that come in, what a bolt emits at a time, and what a later stage puts together."""
    with (
        mock.patch.object(spout_stage, "CHUNK_BYTES", most),
        mock.patch.object(bolts, "CHUNK_BYTES", most),
        mock.patch.object(exchange, "_CHUNK_BYTES", most),
    ):
        simulation = simulate(topology)
        done = simulation.rest(simulation.first(values), np.random.default_rng(seed))
    simulation.check(done, values)


def test_a_tuple_too_large_for_a_shuffle_fails_with_its_size(simulate, monkeypatch):
    """One array of the JVM's has at most 2 GiB."""
    monkeypatch.setattr(shuffle_writer, "MOST_ROW_BYTES", 15)
    simulation = simulate(words())
    done = simulation.rest(simulation.first([1]), np.random.default_rng(1))
    assert done.problems == ()
    (text,) = done.failed["reason"].to_pylist()
    reason = Reason.decode(text)
    assert (reason.component, reason.type) == ("spout", "TupleTooLarge")
    assert "has 16 bytes, and no more than 15 cross a shuffle" in reason.message


def test_no_condition_is_called_without_tuples(tmp_path):
    """No tuple is left of a chunk that cannot be decoded, and a function may need one."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS), expect=expect(least))
    builder.bolt("split", Branch(1, 0)).local_or_shuffle("spout")
    builder.sink("split", lambda frame, number: None)
    topology = builder.build()
    simulation = Simulation(topology, tmp_path)
    simulation.work = dataclasses.replace(simulation.work, checks=topology.checks)
    simulation.source = dataclasses.replace(simulation.source, decode=undecodable)
    done = simulation.rest(simulation.first(range(7)), np.random.default_rng(0))
    assert done.problems == ()
    assert len(done.failed) == 7
    assert {Reason.decode(one).type for one in done.failed["reason"].to_pylist()} == {"ValueError"}


def least(batch):
    """Compare with the least value; raises for a batch without tuples."""
    return batch["value"].to_numpy() >= batch["value"].to_numpy().min()


def undecodable(batch):
    return batch, dict.fromkeys(range(len(batch)), Reason.of("spout", ValueError("no JSON")))


class Count(BatchBolt):
    """Counts, and has all its input open until it is flushed."""

    outputs = pa.schema([("n", pa.int64())])

    def prepare(self, context):
        self.n = 0

    def process(self, batch, out):
        self.n += len(batch)

    def flush(self, out):
        out.emit([[self.n]], parents=None)


@pytest.mark.parametrize("decodes", [False, True])
def test_what_rows_hold_is_let_go_when_a_bolt_has_had_them(simulate, decodes):
    """A bolt that flushes has every row of its task open: not also what is in them."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("count", Count()).local_or_shuffle("spout")
    builder.bolt("next", Count()).local_or_shuffle("count")
    simulation = simulate(builder.build())
    if decodes:
        source = dataclasses.replace(simulation.source, decode=lambda batch: (batch, {}))
        simulation.source = source
    memory, alive = [], []

    def batches():
        for _ in range(10):
            values = np.arange(simulation.work.chunk_rows)
            memory.append(weakref.ref(values))
            yield pa.record_batch([pa.array(values)] * 2, schema=ROWS)
            del values
            alive.append(sum(ref() is not None for ref in memory))

    stage = SpoutStage(simulation.work, {"spout": simulation.source}, "spout")
    with called_as(0, 1):
        rows = [row for batch in stage(batches()) for row in batch.to_pylist()]
    done = simulation.read(rows)
    assert done.records["spout"] == 10 * simulation.work.chunk_rows
    assert done.figures["emitted"]["count"] == {"default": 1}
    assert max(alive) <= 2  # the last one, and what a generator has in hand


@given(topology=topologies(), values=VALUES, batch_rows=st.integers(1, 9))
def test_what_a_task_sends_does_not_depend_on_how_its_rows_were_batched(
    simulate, topology, values, batch_rows
):
    simulation = simulate(topology)
    if simulation.layout.settles:
        cut_otherwise = simulation.first(values, batch_rows=batch_rows)
        assert cut_otherwise == simulation.first(values)


@given(topology=topologies(), values=VALUES, seed=SEEDS)
def test_what_tasks_send_does_not_depend_on_the_order_of_arrival(simulate, topology, values, seed):
    """Spark gives a job up if a task that runs again sends other bytes."""
    simulation = simulate(topology)
    sent = simulation.first(values)
    assert simulation.first(values) == sent
    if not simulation.layout.settles:
        return
    simulation.rest(sent, np.random.default_rng(seed))
    once = simulation.sent
    simulation.rest(sent, np.random.default_rng(seed + 1))
    assert simulation.sent == once


def words():
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("one", Branch(1, 9)).shuffle("spout")
    builder.bolt("two", Branch(2, 9)).fields("one", "value")
    builder.bolt("three", Branch(3, 0)).fields("two", "value").fields("spout", "value")
    builder.sink("three", lambda frame, number: None)
    return builder.build(chunk_rows=4)


@given(seed=SEEDS)
def test_a_row_that_is_lost_is_noticed(simulate, seed):
    """By the task that misses it, or by the driver, which compares their reports."""
    rng = np.random.default_rng(seed)
    simulation = simulate(words())
    sent = simulation.first(list(range(40)))
    lost = []

    def lose(level, dest, rows):
        if not lost and rows and rng.random() < 0.3:
            lost.append(rows.pop(int(rng.integers(len(rows)))))
        return rows

    try:
        noticed = bool(simulation.rest(sent, rng, lose).problems)
    except RuntimeError as error:
        noticed = "rows were lost in Spark's shuffle" in str(error)
    assert noticed == bool(lost)


@pytest.mark.parametrize("differs", ["fails_in", "shift"])
@settings(max_examples=15)
@given(seed=SEEDS)
def test_two_runs_of_one_task_are_told_apart(simulate, differs, seed):
    """Some consumers see what it sent the first time, others the second.

    It may have failed other rows, or have emitted others, as many and to the same destinations.
    """
    rng = np.random.default_rng(seed)
    simulation = simulate(words())
    sent = simulation.first(list(range(40)))
    bolt = simulation.work.components["one"]
    was = getattr(bolt, differs)
    setattr(bolt, differs, 8)
    again = simulation.first(list(range(40)))
    assert sent != again
    which = rng.integers(0, 2, DESTS)
    mixed = [
        [row for row in first if not which[row["dest"]]]
        + [row for row in second if which[row["dest"]]]
        for first, second in zip(sent, again, strict=True)
    ]
    setattr(bolt, differs, was)
    try:
        done = simulation.rest(mixed, rng)
    except RuntimeError:
        assert len(set(which)) == 2
        return
    assert bool(done.problems) == (len(set(which)) == 2)


def test_a_consumer_that_hears_nothing_at_all_is_noticed(simulate):
    """All of a task's rows and its trailer are gone for one destination."""
    simulation = simulate(words())
    sent = simulation.first(list(range(40)))
    kept = [[row for row in sent[0] if row["dest"] != 1], sent[1]]
    assert any(row["kind"] == TRAILER for row in sent[0] if row["dest"] == 1)
    done = simulation.rest(kept, np.random.default_rng(1))
    assert any("lacks the end of what some tasks sent" in problem for problem in done.problems)


def test_a_partition_of_the_spout_stage_that_did_not_end_is_named(simulate):
    simulation = simulate(words())
    _, second = simulation.first(list(range(40)))
    done = simulation.rest([second], np.random.default_rng(1))
    said = "1 partition of the spout stage did not end; the first is partition 0"
    assert said in done.problems


class Hold(RowBranch):
    """Emits and acks everything in flush."""

    def execute(self, tuple):
        self.open.append((tuple, self.children(tuple["value"])))


@pytest.mark.parametrize("behind", [False, True])
def test_what_is_emitted_long_after_its_input_came(simulate, behind):
    """Its chunk has left its ledger rows by then."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    hold = builder.bolt("hold", Hold(1, 9))
    if behind:
        hold.fields("spout", "value")
    else:
        hold.shuffle("spout")
    builder.bolt("two", Branch(2, 9)).fields("hold", "value")
    builder.sink("two", lambda frame, number: None)
    simulation = simulate(builder.build(chunk_rows=1))
    values = range(60)
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    simulation.check(done, values)


class Raises(Branch):
    """Raises for what it would have failed."""

    def process(self, batch, out):
        if any(self.fails(value) for value in batch["value"].to_pylist()):
            raise ValueError("no such value")
        super().process(batch, out)


@pytest.mark.parametrize("behind", [False, True])
def test_what_bolts_raised_is_counted_and_does_not_depend_on_the_order(simulate, behind):
    """A task that runs again must send the same bytes, and these have the counts."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("calm", Raises(1, 0)).shuffle("spout")
    raising = builder.bolt("raising", Raises(2, 3))
    if behind:
        raising.fields("spout", "value")
    else:
        raising.local_or_shuffle("spout")
    builder.bolt("last", Branch(3, 0)).fields("raising", "value")
    topology = builder.build(chunk_rows=8)
    simulation = simulate(topology)
    values = list(range(60))
    sent = simulation.first(values)
    assert sent == simulation.first(values, batch_rows=7)
    done = simulation.rest(sent, np.random.default_rng(1))
    once = simulation.sent
    again = simulation.rest(sent, np.random.default_rng(2))
    assert simulation.sent == once
    assert again.raised == done.raised
    assert done.problems == ()
    assert done.raised.keys() == {"raising"}
    rows = sum(topology.bolts["raising"].component.fails(value) for value in values)
    assert done.raised["raising"] > rows > 0


def test_what_components_emit_is_counted_by_stream(simulate):
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("near", Branch(1, 0)).local_or_shuffle("spout")
    builder.bolt("far", Branch(2, 0)).fields("near", "value")
    builder.sink("far", lambda frame, number: None)
    simulation = simulate(builder.build(chunk_rows=8))
    done = simulation.rest(simulation.first(list(range(60))), np.random.default_rng(1))
    assert done.figures["emitted"].keys() == {"spout", "near", "far"}
    assert done.figures["emitted"]["spout"] == {"default": 60}
    assert done.figures["emitted"]["far"] == {"default": len(simulation.rows_of(done)["far"])}


def test_where_nothing_is_sent_what_bolts_raised_is_counted_too(simulate):
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("raising", Raises(2, 1)).local_or_shuffle("spout")
    simulation = simulate(builder.build())
    assert not simulation.layout.settles
    done = simulation.rest(simulation.first([1, 2, 3], 1), np.random.default_rng(1))
    assert done.raised["raising"] == 5


LONG = "x" * 10_000
MAPS = pa.map_(pa.string(), pa.int64())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([LONG + "1"]), pa.array([LONG + "2"])),
        (pa.array([LONG.encode() + b"1"]), pa.array([LONG.encode() + b"2"])),
        (pa.array([[{"a": LONG + "1"}]]), pa.array([[{"a": LONG + "2"}]])),
        (pa.array([[*range(500), 1, *range(500)]]), pa.array([[*range(500), 2, *range(500)]])),
        (pa.array([[("a", 1)]], MAPS), pa.array([[("a", 2)]], MAPS)),
        (pa.array([None], pa.int64()), pa.array([0], pa.int64())),
        (pa.array([1], pa.timestamp("us")), pa.array([2], pa.timestamp("us"))),
        (pa.array([b"\xff"]).view(pa.string()), pa.array([b"\xfe"]).view(pa.string())),
    ],
)
def test_a_source_is_told_from_another_by_whole_values(one, other):
    first, second = (pa.record_batch({"v": column}) for column in (one, other))
    for n in (1, 3):
        rows = [first] * n
        assert fingerprint(*rows) == fingerprint(*rows)
        assert fingerprint(*rows) != fingerprint(*rows, first)
        for at in range(n):
            assert fingerprint(*rows) != fingerprint(*rows[:at], second, *rows[at + 1 :])


@given(st.lists(st.integers(0, 70_000), max_size=8), st.integers(1, 70_000), st.data())
def test_a_fingerprint_of_rows_does_not_depend_on_their_batches(cuts, n, data):
    """A driver with another ``chunk_rows`` reads the records of a decided micro-batch again."""
    batch = pa.record_batch({"v": np.arange(n)})
    ends = sorted({0, n, *(cut for cut in cuts if cut < n)})
    parts = [batch.slice(at, end - at) for at, end in itertools.pairwise(ends)]
    assert fingerprint(*parts) == fingerprint(batch)
    place = data.draw(st.sampled_from([one for one in (0, 2, 512, 1 << 14, n - 1) if one < n]))
    values = np.arange(n)
    values[place] = -1
    assert fingerprint(pa.record_batch({"v": values})) != fingerprint(batch)


def fingerprint(*batches):
    sample = RowSample()
    for batch in batches:
        sample.add("spout", batch)
    return sample.fingerprints()


FROZEN = """
import gc
from pyspark import TaskContext
from ackcore.spark.tasks.task import attempt_at, called_as
with called_as(0, 0):
    attempt_at(1)
print(gc.get_freeze_count())
TaskContext._setTaskContext(TaskContext())
attempt_at(1)
print(gc.get_freeze_count() // 10_000)
gc.unfreeze()
attempt_at(1)
print(gc.get_freeze_count())
"""


def test_the_modules_of_a_worker_are_no_work_for_its_garbage_collector():
    """Run in another process: the daemon of tests freezes objects, too, before it forks workers."""
    said = subprocess.run([sys.executable, "-c", FROZEN], capture_output=True, check=True)
    before, in_worker, again = map(int, said.stdout.split())
    assert before == 0
    assert in_worker >= 1
    assert again == 0
