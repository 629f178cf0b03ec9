"""Records that fail in front of an exchange, before anything of them crosses it, need no ledger."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from branching import DESTS, ROWS, Branch, RowBranch, expected
from hypothesis import given, settings
from hypothesis import strategies as st
from test_failed_in_run import RULES, Asks, FailsLater, FailsTwice, FailsWithTheNext, read_again
from test_failed_in_run import unwritten as without_rules
from test_failed_in_run import written as files_of
from test_stages import Hold, Simulation, roots

from ackcore.spark.base.root_ids import in_order
from ackcore.spark.tasks import settle_stage
from ackcore.spark.tasks.exchange_format import LEDGER, RESULT, TUPLES
from ackcore.spark.tasks.row_files import ROOT_ID
from ackcore.spark.tasks.tracking import Chunk
from ackcore.testing import Source
from ackcore.topology import BatchBolt, TopologyBuilder

VALUES = st.lists(st.integers(0, 10**6), max_size=40)


class Says(BatchBolt):
    """Fails all of its rows, with one text."""

    outputs = ROWS

    def __init__(self, text):
        self.text = text

    def process(self, batch, out):
        out.fail(range(len(batch)), [ValueError(self.text)] * len(batch))


class AsksOnly(Asks):
    """The model's bolt: it emits nothing."""

    def children(self, value):
        return []


class Later(FailsLater):
    outputs = ROWS


class WithTheNext(FailsWithTheNext):
    outputs = ROWS


@st.composite
def wide(draw):
    """A spout and bolts, of which many fail, with at least one exchange between them."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    names = ["spout"]
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from([Branch, Branch, AsksOnly, RowBranch, Hold]))
        bolt = kind(number, draw(st.sampled_from([0, 1, 2, 3, 7])))
        declared = builder.bolt(f"b{number}", bolt)
        for source in draw(st.sets(st.sampled_from(names), min_size=1, max_size=2)):
            how = draw(st.sampled_from(["local_or_shuffle", "local_or_shuffle", "fields", "all"]))
            getattr(declared, how)(source, *(("value",) if how == "fields" else ()))
        names.append(f"b{number}")
    builder.bolt("last", Branch(9, draw(st.sampled_from([0, 2])))).fields(names[-1], "value")
    names.append("last")
    for name in names[1:]:
        builder.sink(name, lambda frame, number: None)
    return builder.build(chunk_rows=draw(st.sampled_from([1, 4, 1000])))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    def simulate(topology, rules=RULES):
        made = Simulation(topology, tmp_path_factory.mktemp("work"))
        assert made.layout.settles
        made.work = dataclasses.replace(made.work, rules=rules)
        return made

    return simulate


def in_front(*bolts, behind=None, name="behind", sends=False, **options):
    """A spout, bolts one after the other, and one behind an exchange."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    before = "spout"
    for number, bolt in enumerate(bolts):
        builder.bolt(f"b{number}", bolt).local_or_shuffle(before)
        before = f"b{number}"
    last = builder.bolt(name, behind or Branch(9, 0)).fields(before, "value")
    if sends:
        last.fields("spout", "value")
    return builder.build(**options)


def through(simulation, values, seed=0):
    return simulation.rest(simulation.first(values), np.random.default_rng(seed))


def kinds_sent(simulation, values):
    return [row["kind"] for task in simulation.first(values) for row in task]


@settings(max_examples=20)
@given(
    topology=wide(), values=VALUES, seed=st.integers(0, 2**32), inline=st.sampled_from([0, 0, 500])
)
def test_written_or_not_each_record_fails_for_its_first_reason(
    simulate, topology, values, seed, inline
):
    """The same records, for the same reasons, and the same rows for the sinks as without."""
    simulation = simulate(topology, dataclasses.replace(RULES, inline_bytes=inline))
    sent = simulation.first(values)
    assert simulation.first(values) == sent
    done = simulation.rest(sent, np.random.default_rng(seed))
    assert done.problems == ()
    failed = without_rules(simulate, topology, values)
    model, rows = expected(topology, simulation.layout, values)
    assert set(failed["root_id"].to_pylist()) == roots(simulation, model, len(values))
    known = {one["root_id"]: one for one in failed.to_pylist()}
    left = done.failed.to_pylist()
    assert left == [known[one["root_id"]] for one in left]
    put = in_order(*done.judged.roots()).tolist()
    assert sorted(put + [one["root_id"] for one in left]) == sorted(known)
    assert files_of(done) == read_again(simulation, done, failed, values)
    all_failed = dataclasses.replace(done, failed=failed)
    assert simulation.rows_of(all_failed) == {name: found for name, found in rows.items() if found}


@pytest.mark.parametrize("sends", [False, True])
def test_what_is_told_of_many_roots_is_in_files(simulate, monkeypatch, sends):
    def outcome(inline_bytes):
        topology = in_front(Says("in front"), behind=Says("behind"), sends=sends, chunk_rows=4)
        simulation = simulate(topology, dataclasses.replace(RULES, inline_bytes=inline_bytes))
        done = through(simulation, range(30))
        assert done.problems == ()
        names = {
            path.name.partition(".")[0] for path in Path(simulation.directory).rglob("*.arrow")
        }
        told = {name for name in names if name.startswith(("found-", "not-acked-"))}
        put = in_order(*done.judged.roots()).tolist()
        return told, (put, sorted(done.failed.to_pylist(), key=lambda one: one["root_id"]))

    few, before = outcome(1 << 20)
    assert not few
    monkeypatch.setattr(settle_stage, "INLINE_BYTES", 0)
    many, after = outcome(0)
    assert {name.rpartition("-")[0] for name in many} == {"not-acked" if sends else "found-spout"}
    assert after == before


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_of_what_fails_in_front_nothing_crosses_the_exchange(simulate, inline_bytes):
    rules = dataclasses.replace(RULES, inline_bytes=inline_bytes)
    simulation = simulate(in_front(Says("away"), chunk_rows=4), rules)
    kinds = kinds_sent(simulation, range(30))
    assert LEDGER not in kinds
    assert TUPLES not in kinds
    # Of each task the rows, if they are inline, and the roots.
    assert kinds.count(RESULT) == (4 if inline_bytes else 0)
    done = through(simulation, range(30))
    assert done.problems == ()
    assert not len(done.failed)
    assert len(in_order(*done.judged.roots())) == 30
    assert bool(done.judged.files) == (not inline_bytes)


@pytest.mark.parametrize(("name", "first"), [("a", "behind"), ("c", "in front")])
def test_what_fails_on_both_sides_has_the_first_reason_of_both(simulate, name, first):
    """A tuple of the record has crossed the exchange: nobody knows what comes of that."""
    back = Says("behind")
    topology = in_front(Says("in front"), behind=back, name=name, sends=True, chunk_rows=4)
    simulation = simulate(topology)
    done = through(simulation, range(30))
    assert done.problems == ()
    assert not done.judged.found
    assert len(done.failed) == 30
    assert {reason.split("\x1f")[-1] for reason in done.failed["reason"].to_pylist()} == {first}


@pytest.mark.parametrize("bolts", [(FailsTwice(), Later()), (Later(),)])
def test_what_may_fail_later_is_settled_with_the_others(simulate, bolts):
    """A tuple is open yet when its chunk is through; the later reason is final: it is the first."""
    simulation = simulate(in_front(*bolts, chunk_rows=4))
    done = through(simulation, range(30))
    assert done.problems == ()
    assert not done.judged.found
    assert {reason[0] for reason in done.failed["reason"].to_pylist()} == {"!"}
    assert len(done.failed) == 30


def test_what_may_be_emitted_later_is_settled_with_the_others(simulate):
    """Half of the records wait in a bolt to be sent across; the others fail at once."""
    builder = TopologyBuilder()
    builder.spout("spout", Source(ROWS))
    builder.bolt("fails", Says("away")).local_or_shuffle("spout")
    builder.bolt("hold", Hold(1, 0)).local_or_shuffle("spout")
    builder.bolt("behind", Branch(9, 0)).fields("hold", "value")
    simulation = simulate(builder.build(chunk_rows=4))
    done = through(simulation, range(30))
    assert done.problems == ()
    assert not done.judged.found
    assert len(done.failed) == 30


def test_what_bolts_hold_of_other_chunks_keeps_nothing_from_being_written(simulate):
    """The last record of each task's first batch is open until the next one has come."""
    values = [int(n % 15 == 4) for n in range(30)]
    simulation = simulate(in_front(WithTheNext(), chunk_rows=5))
    done = through(simulation, values)
    assert done.problems == ()
    # Of the chunk with the open tuple nothing is written: which of its tuples it is, nobody tells.
    assert len(in_order(*done.judged.roots())) == 20
    assert len(done.failed) == 10


def test_a_task_that_fails_others_the_second_time_is_told_apart(simulate):
    """Some tasks saw the files of the first attempt, and others those of the second."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        simulation = simulate(in_front(Branch(1, 2), chunk_rows=4))
        bolt = simulation.work.components["b0"]
        sent = simulation.first(range(40))
        bolt.fails_in = 3
        again = simulation.first(range(40))
        bolt.fails_in = 2
        which = rng.integers(0, 2, DESTS)
        mixed = [
            [row for row in first if not which[row["dest"]]]
            + [row for row in second if which[row["dest"]]]
            for first, second in zip(sent, again, strict=True)
        ]
        try:
            done = simulation.rest(mixed, rng)
        except RuntimeError:
            assert len(set(which)) == 2
            continue
        assert bool(done.problems) == (len(set(which)) == 2)


@pytest.mark.parametrize("inline_bytes", [0, 1 << 20])
def test_files_alone_tell_two_runs_of_a_task_apart(simulate, inline_bytes):
    """The same records fail, for another reason: what is written of them, or inline, differs."""
    rules = dataclasses.replace(RULES, inline_bytes=inline_bytes)
    simulation = simulate(in_front(Says("one"), chunk_rows=4), rules)
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
    rules = dataclasses.replace(RULES, inline_bytes=1 << 20)
    simulation = simulate(in_front(Says("away"), chunk_rows=4), rules)
    sent = simulation.first(range(30))
    done = simulation.rest(sent, np.random.default_rng(0))
    (found,) = done.judged.found.values()
    assert sorted(found[ROOT_ID].to_pylist()) == sorted(roots(simulation, range(30), 30))
    kept = [[row for row in task if row["kind"] != RESULT] for task in sent]
    with pytest.raises(RuntimeError, match="data was lost on the way"):
        simulation.rest(kept, np.random.default_rng(0))


def test_traced_records_are_counted_once(simulate):
    """The driver gets the reasons of these failures although they are written."""
    simulation = simulate(in_front(Says("away"), chunk_rows=4))
    simulation.work = dataclasses.replace(simulation.work, trace_per_million=1_000_000)
    done = through(simulation, range(30))
    assert done.problems == ()
    assert len(done.failed) == len(in_order(*done.judged.roots())) == 30


def test_of_a_chunk_over_which_nothing_is_no_ledger_rows_leave():
    chunk = Chunk(0, 3, lambda: (np.array([7, 8, 9]), np.zeros(3, np.int64)), 0)
    chunk.totals[:] = [0, 5, 0]
    chunk.over = np.array([True, False, False])
    sent, vals = chunk.acks()
    assert (sent.tolist(), vals.tolist()) == ([8, 9], [5, 0])
