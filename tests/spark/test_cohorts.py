"""Settling by cohort: the outcomes are those of settling each root by itself."""

from __future__ import annotations

import collections
import dataclasses
import tracemalloc
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from branching import ROWS, Branch
from hypothesis import given
from hypothesis import strategies as st
from one_run import LINES, TEXTS, Pass, Split, by_word, lines
from test_stages import Simulation, words
from worlds import World, fails

from ackcore import ACK, FAIL, testing
from ackcore.retry import Policy
from ackcore.spark.engine.insist import RunFailed
from ackcore.spark.settle.wire import CohortEvents
from ackcore.spark.tasks import bolt_stage, settle_stage
from ackcore.spark.tasks.exchange_format import (
    LEDGER,
    TUPLES,
    CohortRuns,
    PlacedRuns,
    Places,
    ReceivedRuns,
    RootRuns,
    untracked,
)
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.settle_stage import settle_cohorts
from ackcore.spark.tasks.shuffle_writer import draw_cohort_edges
from ackcore.spark.tasks.tracking import AnchoredRows, Chunks, Cohorts, Owners
from ackcore.testing import Source
from ackcore.topology import TopologyBuilder

KEY, WAY = 7, "split/default>count"
RULES = Rules(1_000_000, 1_000_000, Policy(2, 1000, 60_000), 1e12)


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    def simulate(topology, **spec):
        simulation = Simulation(topology, tmp_path_factory.mktemp("work"))
        simulation.work = dataclasses.replace(simulation.work, **spec)
        return simulation

    return simulate


def reasons_in(done):
    """Return each failed root and its reason; judged ones without a reason."""
    found = dict.fromkeys(np.concatenate([[], *done.judged.roots()]).astype(int).tolist())
    return found | dict(zip(*map(pa.ChunkedArray.to_pylist, done.failed.columns[::2]), strict=True))


def both_ways(simulate, topology, values, seed, **spec):
    """Run a topology by cohort and by root; return both simulations and results."""
    for by_root in (False, True):
        simulation = simulate(topology, by_root=by_root, **spec)
        sent = simulation.first(values)
        yield simulation, simulation.rest(sent, np.random.default_rng(seed))


# ---- the same outcome --------------------------------------------------------------------------


def test_records_that_their_task_judges_are_not_in_the_ledger(simulate):
    """Half of all records fail in front of the exchange, a third of these before they emit."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("one", Branch(1, 2)).shuffle("spout")
    builder.bolt("two", Branch(2, 3)).fields("one", "value")
    topology = builder.build(chunk_rows=7)
    by_cohort, by_root = both_ways(simulate, topology, list(range(90)), 1, rules=RULES)
    assert by_cohort[1].problems == by_root[1].problems == ()
    assert by_cohort[1].unsettled == 0
    assert reasons_in(by_cohort[1]) == reasons_in(by_root[1])
    judged = sum(map(len, by_cohort[1].judged.roots()))
    assert 0 < judged < len(reasons_in(by_cohort[1]))


def test_ledger_rows_are_a_few_for_each_chunk_and_none_for_each_root(simulate):
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("one", Branch(1, 0)).shuffle("spout")
    builder.bolt("two", Branch(2, 0)).fields("one", "value")
    sizes = []
    for rows in (100, 1000):
        for by_root in (False, True):
            simulation = simulate(builder.build(chunk_rows=500), by_root=by_root)
            sent = simulation.first(list(range(2 * rows)))
            ledger = [row for task in sent for row in task if row["kind"] == LEDGER]
            sides = [row for task in sent for row in task if row["kind"] == TUPLES]
            sizes.append(
                (sum(len(r["blob"]) for r in ledger), sum(len(r["side"]) for r in sides) / rows)
            )
    (few, _), _, (more, side), (_, side_by_root) = sizes
    assert few <= 2 * 48  # of two tasks, a row each
    assert more <= 4 * 48
    assert side < side_by_root / 5


@pytest.mark.parametrize("by_root", [False, True])
def test_untracked_rows_are_sent_on_without_roots(simulate, by_root):
    simulation = simulate(words(), by_root=by_root)
    simulation.source = dataclasses.replace(simulation.source, tracked=False)
    sent = simulation.first(list(range(40)))
    received = []

    def spoil(level, dest, rows):
        received.extend(row for row in rows if row["kind"] == TUPLES and row["level"] == level)
        return rows

    done = simulation.rest(sent, np.random.default_rng(1), spoil)
    assert done.problems == ()
    assert done.unsettled == 0
    assert done.untracked_failures == 11
    assert {row["level"] for row in received} == {2, 3}
    runs = [RootRuns.unpack(row["side"]) for row in received]
    assert not any(len(one.roots) for one in runs)
    if not by_root:
        assert {len(one.rows) for one in runs} == {1}


# ---- faults ------------------------------------------------------------------------------------


class Twice(Branch):
    """Emits all rows, and then all rows again."""

    def process(self, batch, out):
        columns = [pa.concat_arrays([column] * 2) for column in batch.columns]
        out.emit(columns, parents=np.tile(np.arange(len(batch)), 2))


def test_a_root_that_a_task_fails_twice_is_named_with_two_edges(simulate):
    """So the cohort is open if both rows that name the root are lost."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("one", Twice(1, 0)).shuffle("spout")
    builder.bolt("two", Branch(2, 1)).global_("one")
    simulation = simulate(builder.build())
    sent = simulation.first(list(range(6)))
    whole = simulation.rest(sent, np.random.default_rng(1))
    assert (len(whole.failed), whole.problems, whole.unsettled) == (6, (), 0)

    def without_names(parts):
        some = [CohortEvents(*(column[part.tasks != FAIL] for column in part)) for part in parts]
        return settle_cohorts(some)

    with mock.patch.object(settle_stage, "settle_cohorts", without_names):
        assert simulation.rest(sent, np.random.default_rng(1)).unsettled == 2


def test_a_cohort_is_settled_if_it_was_sent_once_and_its_xor_is_zero():
    def rows(*found):
        columns = zip(*found, strict=True)
        types = (np.int64, np.int64, np.int64, np.int32)
        return CohortEvents(*(np.array(c, t) for c, t in zip(columns, types, strict=True)))

    whole = rows((5, 3, 10, 0), (5, 3 ^ 8, 0, ACK), (5, 8, 77, FAIL), (6, 0, 4, 1))
    done = settle_cohorts([whole])
    assert (done.acked, done.roots.tolist(), done.tasks.tolist()) == ({0: 9, 1: 4}, [77], [0])
    assert done.unsettled == 0
    # A root that two tasks name counts once.
    twice = settle_cohorts([whole, rows((5, 9, 77, FAIL), (5, 9, 0, ACK))])
    assert (twice.acked, twice.roots.tolist()) == ({0: 9, 1: 4}, [77])
    for wrong in ([(5, 1, 0, ACK)], [(5, 0, 10, 0)], [(5, 9, 78, FAIL)]):
        done = settle_cohorts([whole, rows(*wrong)])
        assert (done.acked, done.roots.tolist(), done.unsettled) == ({1: 4}, [], 1)
    assert settle_cohorts([rows((9, 0, 0, ACK))]).unsettled == 1
    assert settle_cohorts([]).acked == {}


# ---- edges and their tracking ------------------------------------------------------------------


@st.composite
def sendings(draw):
    """Roots with their cohorts, or one cohort by places; rows, owners and destinations."""
    n = draw(st.integers(1, 6))
    placed = draw(st.booleans())
    cohort_of = [5] * n if placed else draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    owners = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=30))
    dests = draw(st.lists(st.integers(0, 3), min_size=len(owners), max_size=len(owners)))
    return placed, np.array(cohort_of), np.array(owners), np.array(dests)


def chunk_of(chunks, placed, cohort_of):
    places = Places(9, 2, 100, 0)
    ids = np.unique(cohort_of)
    roots = places.roots(np.arange(len(cohort_of)))
    cohorts = Cohorts(ids, ids * 100, places if placed else None)
    return chunks.add(len(roots), lambda: (roots, cohort_of), ACK, None, cohorts)


def opened(sides):
    """The edge of each cohort, and the rows of each root with its cohort."""
    found = ReceivedRuns([side.pack() for side in sides])
    runs = found.runs
    ends = np.arange(len(runs.rows) + 1) if runs.offsets is None else runs.offsets
    rows = collections.Counter()
    for i, n in enumerate(runs.rows.tolist()):
        for at in range(ends[i], ends[i + 1]):
            rows[int(runs.roots[at]), int(runs.vals[at])] += n
    return dict(zip(found.cohorts.tolist(), found.edges.tolist(), strict=True)), rows


@given(sendings(), st.booleans())
def test_both_ways_of_drawing_edges_agree(sending, closed):
    placed, cohort_of, owners, dests = sending
    order, counts = np.argsort(dests, kind="stable"), np.bincount(dests, minlength=4)
    results = []
    for at_home in (True, False):
        chunks = Chunks()
        chunk = chunk_of(chunks, placed, cohort_of)
        chunk.closed = closed
        batch = pa.record_batch({"n": list(range(len(owners)))})
        rows = AnchoredRows(batch, Owners(owners), None, chunk if at_home else None)
        sides, late = draw_cohort_edges(KEY, WAY, rows, order, counts, chunks)
        assert (late is not None) == closed
        sent = chunk.cohorts.totals ^ chunk.cohorts.vals
        if late is not None:
            assert not sent.any()
            np.bitwise_xor.at(sent, chunk.cohorts.indexes(late[0]), late[1])
        owed = np.zeros(len(sent), np.int64)
        seen = [opened([side]) for side, n in zip(sides, counts, strict=True) if n]
        for edges, here in seen:
            assert set(edges) == {cohort for _, cohort in here}
            owed[chunk.cohorts.indexes(np.array(list(edges)))] ^= np.array(list(edges.values()))
        assert owed.tolist() == sent.tolist()
        edges = [edge for found, _ in seen for edge in found.values()]
        assert len(set(edges)) == len(edges)
        if not closed:
            assert chunk.has_sent().tolist() == [i in owners for i in range(len(cohort_of))]
        results.append(seen)
        again, _ = draw_cohort_edges(KEY, WAY, rows, order, counts, chunks)
        more = [e for s, n in zip(again, counts, strict=True) if n for e in s.edges.tolist()]
        assert not set(more) & set(edges)
    assert results[0] == results[1]


def test_edges_of_a_few_rows_take_memory_for_these_rows_alone():
    """Not for each pair of one of 1,000 tasks and one of 30,000 cohorts."""
    dests, ids = 1000, np.arange(30_000)
    chunks = Chunks()
    cohorts = Cohorts(ids, ids)
    chunk = chunks.add(len(ids), lambda: (ids, ids), ACK, None, cohorts)
    rows = AnchoredRows(pa.record_batch({"n": range(100)}), Owners(ids[::300]), None, chunk)
    order, counts = np.arange(100), np.bincount(np.arange(100) * 9 + 100, minlength=dests)
    tracemalloc.start()
    try:
        sides, _ = draw_cohort_edges(KEY, WAY, rows, order, counts, chunks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(len(side.edges) for side in sides) == 100
    assert peak < 10_000_000


@given(
    st.lists(st.tuples(st.integers(1, 70_000), st.integers(0, 70_000)), max_size=20),
    st.integers(-(2**63), 2**63 - 1),
)
def test_runs_by_place_are_packed_and_opened(runs, cohort):
    rows, at = np.array(runs, np.int64).reshape(-1, 2).T
    places = Places(2**64 - 1, 3, 10**9, 2)
    placed = CohortRuns(np.array([cohort]), np.array([-1]), PlacedRuns(rows, at, places))
    roots = places.roots(at)
    plain = RootRuns(rows.astype(np.int32), roots, np.full(len(at), cohort))
    by_root = CohortRuns(np.array([cohort]), np.array([-5]), plain)
    none = untracked(3)
    for sides in ([placed], [placed, by_root], [by_root, placed, none]):
        found = ReceivedRuns([side.pack() for side in sides])
        assert (
            found.groups
            == len(found.runs.rows)
            == len(runs) * 2 ** (len(sides) > 1) + (none in sides)
        )
        assert found.cohorts.tolist() == [cohort]
        assert found.edges.tolist() == [np.bitwise_xor.reduce([s.edges[0] for s in sides[:2]])]
        assert found.runs.roots.tolist() == roots.tolist() * min(2, len(sides))
        assert (found.offsets is not None) == (none in sides)


# ---- with the driver, and on Spark --------------------------------------------------------------


def test_a_run_with_a_cohort_that_is_not_settled_is_followed_by_one_by_root(world, caplog):
    world.behaves = fails("b")
    run, modes = world.run, []

    def unsettled(topology, layout, inputs, plan):
        modes.append(plan.by_root)
        return dataclasses.replace(
            run(topology, layout, inputs, plan), unsettled=0 if plan.by_root else 2
        )

    world.run = unsettled
    progress, counts = world.process(0, ["a", "b"])
    assert modes == [False, True]
    assert (progress.runs, counts.acked, counts.waiting) == (2, 1, 1)
    assert "2 groups of records were not acked as a whole" in caplog.text
    world.process(1, ["c"])
    assert modes[2:] == [False, True]  # each micro-batch begins by cohort

    def crashing(topology, layout, inputs, plan):
        modes.append((plan.is_small, plan.by_root))
        if plan.is_small:
            raise RuntimeError("a process ran out of memory")
        return run(topology, layout, inputs, plan)

    world.run = crashing
    assert world.process(2, ["d"])[0].runs == 2
    assert modes[4:] == [(True, False), (False, False)]  # a crash leaves settling to Spark


def test_a_cohort_that_is_not_settled_costs_no_run_and_hides_no_other_problem(tmp_path, caplog):
    """With one run for a micro-batch each restart would settle by cohort again."""
    world = World(tmp_path, {"max_runs": 1})
    run = world.run

    def unsettled(topology, layout, inputs, plan):
        found = (
            {} if plan.by_root else {"unsettled": 2, "problems": ("partition 0 lacks trailers",)}
        )
        return dataclasses.replace(run(topology, layout, inputs, plan), **found)

    world.run = unsettled
    progress, counts = world.process(0, ["a"])
    assert (progress.runs, counts.acked) == (2, 1)
    assert "partition 0 lacks trailers" in caplog.text
    world.run = lambda *of: dataclasses.replace(run(*of), unsettled=2)
    with pytest.raises(RunFailed, match="was run 2 times"):
        world.process(1, ["b"])


def test_records_whose_rows_a_stage_always_loses_die_and_all_others_are_acked(caplog):
    """Each micro-batch with lost rows is run twice, by cohort and by root, as one attempt."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("one", Branch(1, 0)).shuffle("spout")
    builder.bolt("two", Branch(2, 0)).fields("spout", "value")
    values = list(range(12))
    topology = builder.build(chunk_rows=4, max_attempts=2, max_runs=1)
    take_in, modes = bolt_stage.BoltStage._take_in, set()

    def lossy(stage, task, sub, blobs):
        schema = stage.spec.tuple_schema(sub)
        batches = [pa.ipc.read_record_batch(one.blob, schema) for one in blobs]
        if any(7 in batch["value"].to_pylist() for batch in batches):
            modes.add((stage.spec.number, stage.spec.by_root))
        else:
            take_in(stage, task, sub, blobs)

    rows = pa.table({"record": values, "value": values}, ROWS)
    with mock.patch.object(bolt_stage.BoltStage, "_take_in", lossy):
        ran = testing.run(topology, {"spout": rows})
    account = ran.counts.spouts["spout"]
    assert (account.acked, account.dead, account.waiting) == (11, 1, 0)
    (dead,) = ran.dead
    assert "OPEN" in str(dead)
    assert max(ran.attempts["spout"]) == 2
    assert all((number, not by_root) in modes for number, by_root in modes)
    assert [progress.runs for progress in ran.progress if progress.runs > 1] == [2] * (
        len(modes) // 2
    )


def several(spark):
    """Two spouts, copies for all tasks, and rows that skip a level."""
    builder = TopologyBuilder()
    builder.spout("lines", lines(spark, TEXTS))
    builder.spout(
        "more", spark.createDataFrame([(1, "m n"), (2, "bad m"), (1, "x")], LINES), message_id="id"
    )
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("other", Split()).all("more")
    builder.bolt("again", Pass()).fields("split", "word")
    builder.bolt("both", Pass()).fields("again", "word").fields("other", "id")
    builder.sink("both", lambda frame, number: None)
    return builder.build(parallelism=2, chunk_rows=4)


@pytest.mark.parametrize(
    "make", [lambda spark: by_word(spark, TEXTS), several], ids=["by_word", "several"]
)
def test_both_ways_agree_on_spark(spark, execute, due, make):
    retries = due([(f"old-{i}", i % 9, 100 + i, "bad" if i % 3 else "r s") for i in range(20)])
    found = [execute(make(spark), retries={"lines": retries}, by_root=way) for way in (False, True)]
    by_cohort, by_root = found
    assert by_cohort.run.unsettled == 0
    assert by_cohort.failed == by_root.failed
    assert len(by_root.failed) > 20
    assert by_cohort.rows == by_root.rows
