"""Records that fail while their task has them are written as if they were read again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from branching import ROWS, Branch, RowBranch
from hypothesis import given
from hypothesis import strategies as st
from test_stages import Hold, Simulation

from ackcore.retry import Policy
from ackcore.spark.base.checksummed import read_table
from ackcore.spark.base.errors import RowFileDamaged
from ackcore.spark.base.letters import as_letters, as_tracked
from ackcore.spark.base.reasons import Reasons
from ackcore.spark.base.root_ids import in_order
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, REPLAYED, TRACKING
from ackcore.spark.engine.decide import propagate_failures
from ackcore.spark.tasks import failed_writer
from ackcore.spark.tasks.failed_rows import Rules, judge
from ackcore.spark.tasks.record_ids import RETRIES
from ackcore.spark.tasks.retry_stage import RetryStage, Slice
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID, RowFile, RowFileWriter
from ackcore.spark.tasks.source_records import pick
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.testing import Source
from ackcore.topology import Bolt, Reason, Reject, Retry, TopologyBuilder, Unavailable

RULES = Rules(1_000_000, 1_000_000, Policy(2, 1000, 60_000), 1e12, inline_bytes=0)


class Asks(Branch):
    """Fails by turns for good, with a wait that it asks for, and as any."""

    def process(self, batch, out):
        for i, value in enumerate(batch.column("value").to_pylist()):
            if self.fails(value):
                kinds = [Reject("no"), Retry("later", after_s=5.0), ValueError(f"value {value}")]
                out.fail([i], kinds[value % 3])


class FailsTwice(Bolt):
    """Fails each tuple; what it emitted before, its reader fails in flush."""

    outputs = ROWS

    def execute(self, tuple):
        self.collector.emit((tuple["record"], tuple["value"]), anchors=tuple)
        self.collector.fail(tuple, "first")


class FailsTheFirst(Bolt):
    """Emits a row for each two tuples, hung from both, and fails the first of them."""

    outputs = ROWS

    def __init__(self, error):
        self.error = error

    def prepare(self, context):
        self.open = []

    def execute(self, tuple):
        self.open.append(tuple)
        if len(self.open) == 2:
            self.collector.emit((tuple["record"], tuple["value"]), anchors=self.open)
            self.collector.fail(self.open[0], self.error)
            self.collector.ack(tuple)
            self.open.clear()


class FailsLater(Bolt):
    """Fails all in flush."""

    def prepare(self, context):
        self.open = []

    def execute(self, tuple):
        self.open.append(tuple)

    def flush(self):
        for tuple in self.open:
            self.collector.fail(tuple, Reject("at last"))


class FailsWithTheNext(Bolt):
    """Fails each tuple, but those with a 1 only when the next one comes."""

    def prepare(self, context):
        self.open = []

    def execute(self, tuple):
        self.open.append(tuple)
        if tuple["value"] != 1:
            for one in self.open:
                self.collector.fail(one, Reject("no"))
            self.open.clear()


@st.composite
def narrow(draw):
    """A spout and bolts without an exchange, many of which fail."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    names = ["spout"]
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([Branch, Asks, RowBranch, Hold]))
        declared = builder.bolt(f"b{number}", kind(number, draw(st.sampled_from([0, 2, 3, 7]))))
        for source in draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)):
            declared.local_or_shuffle(source)
        names.append(f"b{number}")
    return builder.build(chunk_rows=draw(st.sampled_from([1, 4, 1000])))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    def simulate(topology, rules=RULES):
        made = Simulation(topology, tmp_path_factory.mktemp("work"))
        assert not made.layout.settles
        made.work = dataclasses.replace(made.work, rules=rules)
        return made

    return simulate


def once(bolts, **settings):
    """A spout, and bolts one after the other."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    before = "spout"
    for name, bolt in bolts.items():
        builder.bolt(name, bolt).local_or_shuffle(before)
        before = name
    return builder.build(**settings)


def chunks_of(values, partitions=2, batch_rows=5):
    """Batches by partition, as `Simulation.first` cuts them."""
    cuts = [len(values) * i // partitions for i in range(partitions + 1)]
    for partition in range(partitions):
        some = range(cuts[partition], cuts[partition + 1])
        yield (
            partition,
            [
                pa.RecordBatch.from_pylist(
                    [{"record": i, "value": values[i]} for i in some[start : start + batch_rows]],
                    ROWS,
                )
                for start in range(0, len(some), batch_rows)
            ],
        )


def written(done):
    """Return the rows that were judged and of the files that count: waiting and dead."""
    found = ([], [])
    for dead, tables in enumerate([done.judged.waits, done.judged.dies]):
        for table in tables.values():
            found[dead].extend((as_letters(table, 0) if dead else table).to_pylist())
    for file in done.judged.files:
        path = Path(file.path)
        table = pq.read_table(path) if file.dead else read_table(path)
        assert (len(table), path.stat().st_size) == (file.rows, file.nbytes)
        if not file.dead:
            assert table[FIRST_MS].to_pylist()[0] == file.oldest_ms
            due = table[DUE_MS].to_pylist()
            assert due == sorted(due)
            assert due[0] == file.next_due_ms
        found[file.dead].extend(table.to_pylist())
    return [sorted(map(repr, some)) for some in found]


def unwritten(simulate, topology, values):
    """Return the result of the same run when its tasks write nothing."""
    simulation = simulate(topology, rules=None)
    plain = simulation.rest(simulation.first(values), np.random.default_rng(0))
    assert not plain.judged.found
    return plain.failed.take(pa.array(np.argsort(plain.failed["root_id"].to_numpy())))


def read_again(simulation, done, failed, values):
    """Return the result of reading the judged records again, given the reasons."""
    roots = np.sort(in_order(*done.judged.roots()))
    stage = SpoutStage(simulation.work, {"spout": simulation.source}, "spout")
    found = ([], [])
    uncounted = 0
    for partition, batches in chunks_of(values):
        for some in stage.records(iter(batches), partition):
            lost = pa.Table.from_batches([pick(some, {"spout": roots}, {}, 0)])
            at = np.searchsorted(failed["root_id"].to_numpy(), lost[ROOT_ID].to_numpy())
            said = Reasons.of_texts(failed["reason"].take(pa.array(at)))
            n = len(lost)
            told = judge(RULES, lost, said, np.full(n, RULES.now_ms), np.zeros(n, np.int32))
            uncounted += told.uncounted
            for rows, table in zip(found, (told.waits, as_letters(told.dies, 0)), strict=True):
                rows.extend(table.to_pylist())
    assert uncounted == done.judged.uncounted
    return [sorted(map(repr, some)) for some in found]


@given(
    topology=narrow(),
    values=st.lists(st.integers(0, 10**6), max_size=40),
    file_bytes=st.sampled_from([1, 500, 1 << 26]),
    group_bytes=st.sampled_from([1, 300, 1 << 23]),
    sorted_bytes=st.sampled_from([1, 300, 1 << 22]),
    inline_bytes=st.sampled_from([0, 0, 500, 1 << 20]),
)
def test_what_is_written_is_what_reading_again_would_have_led_to(
    simulate, topology, values, file_bytes, group_bytes, sorted_bytes, inline_bytes
):
    simulation = simulate(topology, dataclasses.replace(RULES, inline_bytes=inline_bytes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failed_writer, "_FILE_BYTES", file_bytes)
        patch.setattr(failed_writer, "_LETTERS_BYTES", file_bytes)
        patch.setattr(failed_writer, "GROUP_BYTES", group_bytes)
        patch.setattr(failed_writer, "_SORTED_BYTES", sorted_bytes)
        done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    failed = unwritten(simulate, topology, values)
    rows = {one["root_id"]: one for one in failed.to_pylist()}
    left = done.failed.to_pylist()
    roots = in_order(*done.judged.roots()).tolist()
    assert left == [rows[one["root_id"]] for one in left]
    assert sorted(roots + [one["root_id"] for one in left]) == sorted(rows)
    assert written(done) == read_again(simulation, done, failed, values)


def test_all_that_fails_at_once_is_written(simulate):
    values = [n * 3 for n in range(30)]  # which are rejected
    simulation = simulate(once({"asks": Asks(1, 1)}, chunk_rows=4))
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    failed = unwritten(simulate, once({"asks": Asks(1, 1)}, chunk_rows=4), values)
    assert sorted(in_order(*done.judged.roots())) == failed["root_id"].to_pylist()
    assert not len(done.failed)
    assert [len(rows) for rows in written(done)] == [0, 30]
    assert done.problems == ()


def test_a_file_of_roots_that_is_damaged_has_the_run_repeated(simulate):
    simulation = simulate(once({"asks": Asks(1, 1)}))
    sent = simulation.first([n * 3 for n in range(30)])
    path = next(Path(simulation.directory).rglob("found-spout-1.*"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RowFileDamaged, match="found-spout-1"):
        simulation.rest(sent, np.random.default_rng(0))
    path.unlink()
    with pytest.raises(RowFileDamaged, match="is missing"):
        simulation.rest(sent, np.random.default_rng(0))


@pytest.mark.parametrize("sorted_bytes", [1, 300, 1 << 22])
def test_what_waits_is_sorted_by_when_it_is_due(simulate, monkeypatch, sorted_bytes):
    monkeypatch.setattr(failed_writer, "_SORTED_BYTES", sorted_bytes)
    values = [n * 3 + 2 for n in range(30)]
    simulation = simulate(once({"asks": Asks(1, 1)}))
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    failed = unwritten(simulate, once({"asks": Asks(1, 1)}), values)
    assert written(done) == read_again(simulation, done, failed, values)
    assert [len(rows) for rows in written(done)] == [30, 0]


def test_what_is_put_together_is_never_too_much_for_a_column(simulate, monkeypatch):
    """Short of what makes a file there may be a batch of 2 GiB more."""
    monkeypatch.setattr(failed_writer, "_TOGETHER_BYTES", 1)
    values = [n * 3 + 2 for n in range(30)]
    simulation = simulate(once({"asks": Asks(1, 1)}, chunk_rows=4))
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    failed = unwritten(simulate, once({"asks": Asks(1, 1)}, chunk_rows=4), values)
    assert written(done) == read_again(simulation, done, failed, values)
    assert [file.rows for file in done.judged.files] == [5] * 6


def test_a_wait_that_is_asked_for_begins_when_the_run_has_ended(simulate):
    """So nobody can tell in the run when it is over."""
    simulation = simulate(once({"asks": Asks(1, 1)}, chunk_rows=4))
    done = simulation.rest(simulation.first(list(range(30))), np.random.default_rng(0))
    assert [len(rows) for rows in written(done)] == [10, 10]
    assert len(done.failed) == 10


def test_an_outage_is_written_without_a_search(simulate, monkeypatch):
    """All of a batch failed once each, as it came: nothing is sorted, looked up or filtered."""

    def never(*_):
        raise AssertionError("there is nothing to look for")

    values = [n * 3 for n in range(30)]
    failed = unwritten(simulate, once({"asks": Asks(1, 1)}, chunk_rows=4), values)
    simulation = simulate(once({"asks": Asks(1, 1)}, chunk_rows=4))
    monkeypatch.setattr(failed_writer, "first_reasons", never)
    monkeypatch.setattr(failed_writer, "among", never)
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    assert written(done) == read_again(simulation, done, failed, values)
    assert not len(done.failed)


def test_what_fails_again_when_it_was_written_is_read_again(simulate):
    """The second reason may go before the first one: here it is final."""
    simulation = simulate(once({"twice": FailsTwice(), "later": FailsLater()}, chunk_rows=4))
    done = simulation.rest(simulation.first(list(range(30))), np.random.default_rng(0))
    assert len(done.failed) == 30
    assert {reason[0] for reason in done.failed["reason"].to_pylist()} == {"!"}
    assert not done.judged.found


def test_what_fails_when_its_chunk_is_gone_is_read_again(simulate):
    simulation = simulate(once({"later": FailsLater()}, chunk_rows=4))
    done = simulation.rest(simulation.first(list(range(30))), np.random.default_rng(0))
    assert len(done.failed) == 30
    assert not done.judged.found


def test_what_fails_beside_what_is_written_is_read_again(simulate):
    """The last record of each task's first batch fails with those of the second."""
    values = [int(n % 15 == 4) for n in range(30)]
    simulation = simulate(once({"late": FailsWithTheNext()}))
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    failed = unwritten(simulate, once({"late": FailsWithTheNext()}), values)
    assert len(done.failed) == 2
    assert len(in_order(*done.judged.roots())) == 28
    roots = sorted([*done.failed["root_id"].to_pylist(), *in_order(*done.judged.roots())])
    assert roots == failed["root_id"].to_pylist()


@pytest.mark.parametrize(
    ("error", "counts"), [(ValueError("no"), True), (Unavailable("away"), False)]
)
def test_who_shares_a_row_with_what_was_written_has_made_an_attempt_if_that_had(
    simulate, error, counts
):
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("pairs", FailsTheFirst(error)).local_or_shuffle("spout")
    builder.sink("pairs", lambda frame, number: None)
    simulation = simulate(builder.build())
    done = simulation.rest(simulation.first([0] * 8), np.random.default_rng(0))
    assert not len(done.failed)
    written = set(in_order(*done.judged.roots()).tolist())
    found = propagate_failures(
        done.failed, done.files, simulation.directory, ["spout"], done.judged
    )
    assert len(found) == len(written) == 4
    assert written.isdisjoint(found["root_id"].to_pylist())
    assert Reasons.of_texts(found["reason"]).counts().tolist() == [counts] * 4


def test_of_few_a_task_writes_none(simulate):
    """They go to the driver, up to the byte; one byte more goes to files."""
    values = [0] * 30
    failed = unwritten(simulate, once({"asks": Asks(1, 1)}), values)

    def judged(inline_bytes):
        topology = once({"asks": Asks(1, 1)})
        simulation = simulate(topology, dataclasses.replace(RULES, inline_bytes=inline_bytes))
        done = simulation.rest(simulation.first(values), np.random.default_rng(0))
        assert written(done) == read_again(simulation, done, failed, values)
        assert not len(done.failed)
        made = list(Path(simulation.directory).glob("failed/*"))
        return len(done.judged.files), len(made), sum(map(len, done.judged.dies.values()))

    sizes = [judged(n) for n in range(0, 2000, 20)]
    assert sizes[0] == (2, 4, 0)  # the roots, too
    assert sizes[-1] == (0, 0, 30)
    assert {size[0] for size in sizes} <= {0, 1, 2}


def test_a_task_that_runs_again_leaves_the_same_files(simulate):
    simulation = simulate(once({"asks": Asks(1, 1)}, chunk_rows=4))
    one, two = (
        simulation.rest(simulation.first([0, 2, 3] * 9), np.random.default_rng(0)).judged
        for _ in range(2)
    )
    assert one.files == two.files
    names = {path.name for path in Path(simulation.directory, "failed").iterdir()}
    assert {name for name in names if not name.startswith("found-")} == {
        Path(file.path).name for file in one.files
    }
    assert len(names) == len(one.files) + 2


def test_what_was_due_keeps_what_is_known_of_it(simulate, tmp_path):
    """When it was first seen, how often it was sent again, and its place among those due."""
    simulation = simulate(once({"asks": Asks(1, 1)}, chunk_rows=4))
    n = 20
    tracking = [
        [f"id-{i}" for i in range(n)], [i % 2 for i in range(n)], [0] * n,
        [500 + i for i in range(n)], [600] * n, [Reason("b", "E", "x")._asdict()] * n,
        [i % 3 for i in range(n)],
    ]  # fmt: skip
    values = [2] * n
    table = pa.table([*tracking, list(range(n)), values], schema=pa.schema([*TRACKING, *ROWS]))
    file = RowFileWriter(str(tmp_path), table.schema, 0, 0)
    for batch in table.to_batches(6):
        file.write(batch)
    name, rows, _ = file.finish()
    slices = (
        Slice("spout", RowFile(f"{tmp_path}/{name}", rows), 0, 8),
        Slice("spout", RowFile(f"{tmp_path}/{name}", rows), 8, 12),
    )
    stage = RetryStage(simulation.work, {"spout": simulation.source}, None, slices)
    sent = [simulation.task(stage, n, [pa.record_batch({"id": [n]})]) for n in range(len(slices))]
    done = simulation.rest(sent, np.random.default_rng(0))
    (found,) = done.judged.found.values()
    places = dict(zip(found[ROOT_ID].to_pylist(), found[PLACE].to_pylist(), strict=True))
    assert places == {
        int(simulation.source.roots(RETRIES, i, 1, np.array([i % 2]))[0]): i for i in range(n)
    }
    assert done.judged.replayed == {"spout": sum(i % 3 > 0 for i in range(n))}
    rows = []
    for one in done.judged.files:
        path = Path(one.path)
        if one.dead:
            letters = pq.read_table(path)
            part = as_tracked(letters, letters["attempts"], letters["replays"])
        else:
            part = read_table(path)
        assert one.dead == bool(part["_ackcore_attempt"].to_pylist()[0] == 2)
        rows += part.select(["record", FIRST_MS, REPLAYED]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [(i, 500 + i, i % 3) for i in range(n)]
