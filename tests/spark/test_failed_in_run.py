"""Failed records are judged where they are: in the run, or when they are read again.

Records that fail before anything of them crosses an exchange need no ledger: their tasks judge
them while they hold them, and the outcome is as if they were read again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from branching import ROWS, Branch, RowBranch, expected
from checkpoints import tracked
from hypothesis import given
from hypothesis import strategies as st
from test_stages import Hold, Simulation, chunks_of, roots

from ackcore.retry import Policy
from ackcore.spark.base.errors import RowFileDamaged
from ackcore.spark.base.letter_columns import as_letters, as_tracked
from ackcore.spark.base.reasons import FAILED, Reasons
from ackcore.spark.base.root_ids import in_order
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, REPLAYED
from ackcore.spark.engine import reread
from ackcore.spark.engine.decide import propagate_failures
from ackcore.spark.stores.run_files import read_table_at
from ackcore.spark.tasks import failed_writer, settle_stage
from ackcore.spark.tasks.exchange_format import LEDGER, RESULT, TUPLES
from ackcore.spark.tasks.failed_rows import Rules, judge
from ackcore.spark.tasks.record_ids import RETRIES, pick
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID, RowFile, RowFileWriter, partition_in
from ackcore.spark.tasks.spout_stage import RetryStage, Slice, SpoutStage
from ackcore.testing import Source
from ackcore.topology import BatchBolt, Bolt, Reject, Retry, TopologyBuilder, Unavailable

RULES = Rules(1_000_000, 1_000_000, Policy(2, 1000, 60_000), 1e12, inline_bytes=0)


class Asks(Branch):
    """Fails by turns for good, with a wait that it asks for, and as any."""

    def children(self, value):
        return []

    def process(self, batch, out):
        for i, value in enumerate(batch.column("value").to_pylist()):
            if self.fails(value):
                kinds = [Reject("no"), Retry("later", after_s=5.0), ValueError(f"value {value}")]
                out.fail([i], kinds[value % 3])


class FailsEven(BatchBolt):
    """Fails the records of some tuples."""

    outputs = ROWS

    def process(self, batch, out):
        bad = [i for i, value in enumerate(batch.column("value").to_pylist()) if value % 2 == 0]
        out.fail(bad, [ValueError("even")] * len(bad))


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

    outputs = ROWS

    def prepare(self, context):
        self.open = []

    def execute(self, tuple):
        self.open.append(tuple)

    def flush(self):
        for tuple in self.open:
            self.collector.fail(tuple, Reject("at last"))
        self.open.clear()


class FailsWithTheNext(FailsLater):
    """Fails each tuple, but those with a 1 only when the next one comes."""

    def execute(self, tuple):
        super().execute(tuple)
        if tuple["value"] != 1:
            self.flush()


class Says(BatchBolt):
    """Fails all of its rows, with one text."""

    outputs = ROWS

    def __init__(self, text):
        self.text = text

    def process(self, batch, out):
        out.fail(range(len(batch)), [ValueError(self.text)] * len(batch))


@st.composite
def topologies(draw):
    """A spout and bolts, many of which fail: without an exchange, or with at least one."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    names, crosses = ["spout"], draw(st.booleans())
    ways = ["local_or_shuffle", "local_or_shuffle", *(["fields", "all"] if crosses else [])]
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([Branch, Branch, Asks, RowBranch, Hold]))
        bolt = kind(number, draw(st.sampled_from([0, 1, 2, 3, 7])))
        declared = builder.bolt(f"b{number}", bolt)
        for source in draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)):
            how = draw(st.sampled_from(ways))
            getattr(declared, how)(source, *(("value",) if how == "fields" else ()))
        names.append(f"b{number}")
    if crosses:
        last = Branch(9, draw(st.sampled_from([0, 2])))
        builder.bolt("last", last).fields(names[-1], "value")
        names.append("last")
    for name in names[1:]:
        builder.sink(name, lambda frame, number: None)
    return builder.build(chunk_rows=draw(st.sampled_from([1, 4, 1000])))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    def simulate(topology, rules=RULES, inline_bytes=0):
        made = Simulation(topology, tmp_path_factory.mktemp("work"))
        rules = rules and dataclasses.replace(rules, inline_bytes=inline_bytes)
        made.work = dataclasses.replace(made.work, rules=rules)
        return made

    return simulate


#: Failed records are in files, or in the report of their task.
in_files_and_inline = pytest.mark.parametrize("inline_bytes", [0, 1 << 20])


def begun(*bolts):
    """Return a builder with a spout and bolts one after the other, and the last one's name."""
    builder, before = TopologyBuilder(), "spout"
    builder.spout("spout", Source(ROWS))
    for number, bolt in enumerate(bolts):
        builder.bolt(f"b{number}", bolt).local_or_shuffle(before)
        before = f"b{number}"
    return builder, before


def once(*bolts, **settings):
    return begun(*bolts)[0].build(**settings)


def written(done):
    """Return the rows that were judged and of the files that count: waiting and dead."""
    found = ([], [])
    for dead, tables in enumerate([done.judged.waits, done.judged.dies]):
        for table in tables.values():
            found[dead].extend((as_letters(table, 0) if dead else table).to_pylist())
    for file in done.judged.files:
        path = Path(file.path)
        table = pq.read_table(path) if file.dead else read_table_at(path)
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
    plain = through(simulation, values)
    assert not plain.judged.found
    return plain.failed.sort_by("root_id")


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
            told = judge(RULES, some, lost, said)
            uncounted += told.uncounted
            for rows, table in zip(found, (told.waits, as_letters(told.dies, 0)), strict=True):
                rows.extend(table.to_pylist())
    assert uncounted == done.judged.uncounted
    return [sorted(map(repr, some)) for some in found]


def in_front(*bolts, behind=None, name="behind", sends=False, **options):
    """A spout, bolts one after the other, and one behind an exchange."""
    builder, before = begun(*bolts)
    last = builder.bolt(name, behind or Branch(9, 0)).fields(before, "value")
    if sends:
        last.fields("spout", "value")
    return builder.build(**options)


def through(simulation, values):
    done = simulation.rest(simulation.first(values), np.random.default_rng(0))
    assert done.problems == ()
    return done


def setup_of(simulation):
    """Return the parts of a run's setup by which its failed records are judged."""
    plan = SimpleNamespace(work=simulation.directory, number=0, retries={})
    return SimpleNamespace(plan=plan, sources={"spout": simulation.source}, inputs=())


SIZES = {
    "_FILE_BYTES": [1, 500, 1 << 26],
    "_LETTERS_BYTES": [1, 500, 1 << 26],
    "GROUP_BYTES": [1, 300, 1 << 23],
    "_SORTED_BYTES": [1, 300, 1 << 22],
}


@given(
    topology=topologies(),
    values=st.lists(st.integers(0, 10**6), max_size=40),
    seed=st.integers(0, 2**32),
    sizes=st.fixed_dictionaries({name: st.sampled_from(some) for name, some in SIZES.items()}),
    inline_bytes=st.sampled_from([0, 0, 500, 1 << 20]),
)
def test_judged_in_the_run_or_not_each_record_has_the_same_outcome(
    simulate, topology, values, seed, sizes, inline_bytes
):
    """The same records, for the same first reasons, and the same rows for the sinks."""
    simulation = simulate(topology, inline_bytes=inline_bytes)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in sizes.items():
            patch.setattr(failed_writer, name, size)
        sent = simulation.first(values)
        assert simulation.first(values) == sent
    done = simulation.rest(sent, np.random.default_rng(seed))
    assert done.problems == ()
    failed = unwritten(simulate, topology, values)
    model, rows = expected(topology, simulation.layout, values)
    assert set(failed["root_id"].to_pylist()) == roots(simulation, model, len(values))
    known = {one["root_id"]: one for one in failed.to_pylist()}
    left = done.failed.to_pylist()
    assert left == [known[one["root_id"]] for one in left]
    judged = in_order(*done.judged.roots()).tolist()
    assert len(judged) == len(set(judged))
    assert {*judged, *(one["root_id"] for one in left)} == known.keys()
    assert written(done) == read_again(simulation, done, failed, values)
    all_failed = dataclasses.replace(done, failed=failed)
    assert simulation.rows_of(all_failed) == {name: found for name, found in rows.items() if found}


def test_a_file_of_roots_that_is_damaged_has_the_run_repeated(simulate):
    simulation = simulate(once(Asks(1, 1)))
    sent = simulation.first([n * 3 for n in range(30)])
    path = next(Path(simulation.directory).rglob("found-spout-1.*"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RowFileDamaged, match="found-spout-1"):
        simulation.rest(sent, np.random.default_rng(0))
    path.unlink()
    with pytest.raises(RowFileDamaged, match="is missing"):
        simulation.rest(sent, np.random.default_rng(0))


def test_a_wait_that_is_asked_for_begins_when_the_run_has_ended(simulate):
    """So nobody can tell in the run when it is over."""
    done = through(simulate(once(Asks(1, 1), chunk_rows=4)), range(30))
    assert [len(rows) for rows in written(done)] == [10, 10]
    assert len(done.failed) == 10


def test_an_outage_is_written_without_a_search(simulate, monkeypatch):
    """All of a batch failed once each, as it came: nothing is sorted, looked up or filtered."""

    def never(*_):
        raise AssertionError("there is nothing to look for")

    values = [n * 3 for n in range(30)]
    failed = unwritten(simulate, once(Asks(1, 1), chunk_rows=4), values)
    simulation = simulate(once(Asks(1, 1), chunk_rows=4))
    monkeypatch.setattr(failed_writer, "first_reasons", never)
    monkeypatch.setattr(failed_writer, "among", never)
    done = through(simulation, values)
    assert written(done) == read_again(simulation, done, failed, values)
    assert not len(done.failed)


@pytest.mark.parametrize(
    "made", [once, lambda *bolts, **rest: in_front(*bolts, **rest)], ids=["alone", "in_front"]
)
@pytest.mark.parametrize("bolts", [(FailsTwice(), FailsLater()), (FailsLater(),)])
def test_what_may_fail_later_is_judged_by_the_driver(simulate, made, bolts):
    """A tuple is open yet when its chunk is through; the later reason is final: it is the first."""
    done = through(simulate(made(*bolts, chunk_rows=4)), range(30))
    assert not done.judged.found
    assert {reason[0] for reason in done.failed["reason"].to_pylist()} == {"!"}
    assert len(done.failed) == 30


def test_what_fails_beside_what_is_written_is_read_again(simulate):
    """The last record of each task's first batch fails with those of the second."""
    values = [int(n % 15 == 4) for n in range(30)]
    done = through(simulate(once(FailsWithTheNext(), chunk_rows=5)), values)
    failed = unwritten(simulate, once(FailsWithTheNext(), chunk_rows=5), values)
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
    builder, pairs = begun(FailsTheFirst(error))
    builder.sink(pairs, lambda frame, number: None)
    simulation = simulate(builder.build())
    done = through(simulation, [0] * 8)
    assert not len(done.failed)
    written = set(in_order(*done.judged.roots()).tolist())
    found = propagate_failures(
        done.failed, done.files, simulation.directory, ["spout"], done.judged
    )
    assert len(found) == len(written) == 4
    assert written.isdisjoint(found["root_id"].to_pylist())
    assert Reasons.of_texts(found["reason"]).counts().tolist() == [counts] * 4


def test_a_task_that_runs_again_leaves_the_same_files(simulate):
    simulation = simulate(once(Asks(1, 1), chunk_rows=4))
    one, two = (through(simulation, [0, 2, 3] * 9).judged for _ in range(2))
    assert one.files == two.files
    names = {path.name for path in Path(simulation.directory, "failed").iterdir()}
    assert {name for name in names if not name.startswith("found-")} == {
        Path(file.path).name for file in one.files
    }
    assert len(names) == len(one.files) + 2


def test_what_was_due_keeps_what_is_known_of_it(simulate, tmp_path):
    """When it was first seen, how often it was sent again, and its place among those due."""
    simulation = simulate(once(Asks(1, 1), chunk_rows=4))
    n = 20
    table = tracked(
        pa.table([list(range(n)), [2] * n], schema=ROWS),
        message_id=[f"id-{i}" for i in range(n)],
        attempt=[i % 2 for i in range(n)],
        first_ms=[500 + i for i in range(n)],
        last_ms=600,
        replayed=[i % 3 for i in range(n)],
    )
    file = RowFileWriter(str(tmp_path), table.schema, 0)
    for batch in table.to_batches(6):
        file.write(batch)
    name, rows, _ = file.finish()
    due = RowFile(f"{tmp_path}/{name}", rows)
    slices = (Slice("spout", due, 0, 8), Slice("spout", due, 8, 12))
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
            part = read_table_at(path)
        assert one.dead == bool(part["_ackcore_attempt"].to_pylist()[0] == 2)
        rows += part.select(["record", FIRST_MS, REPLAYED]).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [(i, 500 + i, i % 3) for i in range(n)]


def test_few_failed_records_are_in_no_file(simulate):
    """They go to the driver with the task's report."""
    values = [0] * 30
    failed = unwritten(simulate, once(Asks(1, 1)), values)
    for inline_bytes, sizes in ((0, (2, 4, 0)), (1 << 11, (0, 0, 30))):
        simulation = simulate(once(Asks(1, 1)), inline_bytes=inline_bytes)
        done = through(simulation, values)
        assert written(done) == read_again(simulation, done, failed, values)
        assert not len(done.failed)
        made = list(Path(simulation.directory).glob("failed/*"))  # the roots, too
        inline = sum(map(len, done.judged.dies.values()))
        assert (len(done.judged.files), len(made), inline) == sizes


# -- in front of an exchange ----------------------------------------------------------------------


@pytest.mark.parametrize("sends", [False, True])
def test_what_is_told_of_many_roots_is_in_files(simulate, monkeypatch, sends):
    def outcome(inline_bytes):
        topology = in_front(Says("in front"), behind=Says("behind"), sends=sends, chunk_rows=4)
        simulation = simulate(topology, inline_bytes=inline_bytes)
        done = through(simulation, range(30))
        paths = Path(simulation.directory).rglob("*.arrow")
        names = {path.name.partition(".")[0] for path in paths}
        told = {name for name in names if name.startswith(("found-", "not-acked-"))}
        put = in_order(*done.judged.roots()).tolist()
        return told, (put, done.failed.sort_by("root_id").to_pylist())

    few, before = outcome(1 << 20)
    assert not few
    monkeypatch.setattr(settle_stage, "INLINE_BYTES", 0)
    many, after = outcome(0)
    kinds = {"found-spout", "not-acked"} if sends else {"found-spout"}
    assert {name.rpartition("-")[0].removesuffix("-0").removesuffix("-1") for name in many} == kinds
    assert after == before


@in_files_and_inline
def test_of_what_fails_in_front_nothing_crosses_the_exchange(simulate, inline_bytes):
    simulation = simulate(in_front(Says("away"), chunk_rows=4), inline_bytes=inline_bytes)
    kinds = [row["kind"] for task in simulation.first(range(30)) for row in task]
    assert LEDGER not in kinds
    assert TUPLES not in kinds
    # Of each task the rows, if they are inline, and the roots.
    assert kinds.count(RESULT) == (4 if inline_bytes else 0)
    done = through(simulation, range(30))
    assert not len(done.failed)
    assert len(in_order(*done.judged.roots())) == 30
    assert bool(done.judged.files) == (not inline_bytes)


@in_files_and_inline
def test_what_fails_behind_is_judged_by_the_driver_from_the_rows_that_tasks_kept(
    simulate, inline_bytes
):
    """No Spark job reads the source again, and only files of partitions with failures are read."""
    values = [1] * 8 + list(range(22))
    simulation = simulate(in_front(Branch(1, 0), behind=FailsEven(), chunk_rows=4))
    done = through(simulation, values)
    assert not done.judged.found
    failed = done.failed.sort_by("root_id")
    assert 0 < len(failed) < 30
    setup = setup_of(simulation)
    rules = dataclasses.replace(RULES, inline_bytes=inline_bytes)
    judged = reread.judge(setup, done, failed, rules)
    assert bool(judged.files) == (not inline_bytes)
    found = dataclasses.replace(done, judged=judged)
    assert written(found) == read_again(simulation, found, failed, values)
    ((_, kept),) = done.kept.items()
    assert [partition_in(file.path) for file in kept] == [0, 1]
    some = simulation.source.roots(1, 14, 1)
    assert reread._kept(setup, done, ["spout"], [some]) == {"spout": [kept[1]]}
    lost = dataclasses.replace(done, kept={"spout": kept[:1]})
    assert reread._kept(setup, lost, ["spout"], [some]) is None
    assert reread._kept(setup, lost, ["spout"], None) is None


def test_refused_rows_of_untracked_spouts_alone_are_no_failure(simulate):
    """There are files of other records: those that are due, or rows of a DataFrame."""
    simulation = simulate(in_front(Branch(1, 0), behind=FailsEven(), chunk_rows=4))
    done = through(simulation, [1] * 8)
    spilled = dataclasses.replace(done, spilled=done.kept)
    assert spilled.spilled
    assert not reread.judge(setup_of(simulation), spilled, FAILED.empty_table(), RULES).found


@in_files_and_inline
def test_what_fails_after_it_was_sent_is_judged_by_its_task(simulate, inline_bytes):
    """The settle stage settles it as well, and finds no other reason."""
    topology = in_front(Says("away"), sends=True, chunk_rows=4)
    simulation = simulate(topology, inline_bytes=inline_bytes)
    done = through(simulation, range(30))
    failed = unwritten(simulate, topology, range(30))
    assert in_order(*done.judged.roots()).tolist() == failed["root_id"].to_pylist()
    assert not len(done.judged.without(done.failed))
    assert written(done) == read_again(simulation, done, failed, range(30))
    assert bool(done.judged.files) == (not inline_bytes)


@pytest.mark.parametrize(("name", "first"), [("a", "behind"), ("c", "in front")])
def test_what_fails_on_both_sides_has_the_first_reason_of_both(simulate, name, first):
    """Judgements of tasks in front do not count, since they may be for the other reason."""
    back = Says("behind")
    topology = in_front(Says("in front"), behind=back, name=name, sends=True, chunk_rows=4)
    done = through(simulate(topology), range(30))
    assert not done.judged.found
    assert len(done.failed) == 30
    assert {reason.split("\x1f")[-1] for reason in done.failed["reason"].to_pylist()} == {first}


def test_what_may_be_emitted_later_is_settled_and_judged(simulate):
    """All records wait in a bolt to be sent across, and have failed in another one."""
    builder, _ = begun(Says("away"))
    builder.bolt("hold", Hold(1, 0)).local_or_shuffle("spout")
    builder.bolt("behind", Branch(9, 0)).fields("hold", "value")
    done = through(simulate(builder.build(chunk_rows=4)), range(30))
    judged = in_order(*done.judged.roots()).tolist()
    assert judged == sorted(done.failed["root_id"].to_pylist())
    assert len(judged) == 30


def test_what_bolts_hold_of_other_chunks_keeps_nothing_from_being_written(simulate):
    """The last record of each task's first batch is open until the next one has come."""
    values = [int(n % 15 == 4) for n in range(30)]
    done = through(simulate(in_front(FailsWithTheNext(), chunk_rows=5)), values)
    # All records of the chunk with the open tuple are settled: which is open is not known.
    assert len(in_order(*done.judged.roots())) == 28
    assert len(done.failed) == 10


@in_files_and_inline
def test_files_alone_tell_two_runs_of_a_task_apart(simulate, inline_bytes):
    """The same records fail, for another reason: what is written of them, or inline, differs."""
    simulation = simulate(in_front(Says("one"), chunk_rows=4), inline_bytes=inline_bytes)
    sent = simulation.first(range(40))
    simulation.work.components["b0"].text = "two"
    again = simulation.first(range(40))
    mixed = [
        [row for row in first if row["dest"] != 2] + [row for row in second if row["dest"] == 2]
        for first, second in zip(sent, again, strict=True)
    ]
    done = simulation.rest(mixed, np.random.default_rng(0))
    assert any("with different results" in problem for problem in done.problems)


def test_a_record_that_is_lost_on_the_way_to_the_driver_is_noticed(simulate):
    """Settled are as many as were sent, those included that their tasks have written."""
    simulation = simulate(in_front(Says("away"), chunk_rows=4), inline_bytes=1 << 20)
    sent = simulation.first(range(30))
    done = simulation.rest(sent, np.random.default_rng(0))
    (found,) = done.judged.found.values()
    assert sorted(found[ROOT_ID].to_pylist()) == sorted(roots(simulation, range(30), 30))
    kept = [[row for row in task if row["kind"] != RESULT] for task in sent]
    with pytest.raises(RuntimeError, match="rows were lost in Spark's shuffle"):
        simulation.rest(kept, np.random.default_rng(0))


def test_traced_records_are_counted_once(simulate):
    """The driver gets the reasons of these failures although they are written."""
    simulation = simulate(in_front(Says("away"), chunk_rows=4))
    simulation.work = dataclasses.replace(simulation.work, trace_per_million=1_000_000)
    done = through(simulation, range(30))
    assert len(done.failed) == len(in_order(*done.judged.roots())) == 30
