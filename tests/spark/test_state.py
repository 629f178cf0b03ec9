"""The checkpoint keeps what it is given, and names whatever is wrong with it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pytest
from checkpoints import OPEN, Topology, decision, end_one, ids, records, roots, run_one

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, CheckpointInUse
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.checkpoint.refusals import REFUSED, Refusal

# -- what is written is read ------------------------------------------------------------------


def test_a_micro_batch_goes_from_plan_to_mark(place):
    with OPEN(place) as state:
        assert (state.last_plan, state.last_done) == (None, None)
        assert state.plan(0) is None
        plan = state.make_plan(0, 5000)
        assert (plan.now_ms, plan.parent, plan.due, plan.replays) == (5000, None, 0, ())
        assert state.last_plan is None  # not yet written
        state.write_plan(plan)
        assert state.plan(0) == plan
        again = replace(plan, crashes=2, careful=True, suspects=(-(2**63), 2**63 - 1))
        state.write_plan(again)
        assert state.plan(0) == again
        assert state.decision(0) is None
        given = decision(
            0,
            {"lines": records(0, 3), "clicks": records(0, 0)},
            {"clicks": records(7, 1)},
            nonacked=roots(-5, 2**63 - 1),
            files=(SinkFile("count", "default", "count/a.arrow", 9),),
            counts={"acked": 9},
            totals={"lines": {"records": 12}},
        )
        told = state.write_decision(given)
        assert not state.is_done(0)
        state.refusals.add(0, 0, Refusal("out", True, pa.Table.from_pylist([], schema=REFUSED)))
        state.close_refusals(told, {"lines": records(9, 1)}, {"acked": 8}, {})
        state.write_done(0)
        state.write_done(0)
        assert state.is_done(0)
        key = state.deployment_key
    with OPEN(place) as state:
        assert (state.last_plan, state.last_done) == (0, 0)
        read = state.decision(0)
        for found in (told, read):
            assert dict(found.waiting) == {"lines": records(0, 3)}
            assert dict(found.dead) == {"clicks": records(7, 1)}
            assert found.nonacked["root_id"].to_pylist() == [-5, 2**63 - 1]
            assert found.files == given.files
            waiting = found.waiting
            assert (waiting.rows(), waiting.next_due_ms, waiting.oldest_ms) == (3, 1000, 0)
            assert found.now_ms == 5000
        assert (told.counts, told.totals) == (given.counts, given.totals)
        assert (read.counts, ids(read.refused["lines"])) == ({"acked": 8}, ["id-9"])
        assert [each.sink for each in state.refusals.of(0)] == ["out"]
        assert (state.deployment_key, state.url) == (key, str(place))
        assert state.waiting(0)["lines"].equals(records(0, 3))
        assert repr(state.waiting(0)) == "Waiting(lines: 3 rows)"


def test_due_rows_are_parted_from_the_others(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 10), "clicks": records(0, 2, due_ms=9000)})
        plan = state.make_plan(1, 1003)
        assert plan.due == 4  # 1000 to 1003
        due, rest, _ = state.split_due(plan)
        assert {name: ids(table) for name, table in due.items()} == {
            "lines": ["id-0", "id-1", "id-2", "id-3"]
        }
        assert ids(rest["lines"]) == [f"id-{n}" for n in range(4, 10)]
        assert rest.parts["clicks"] == state.waiting(0).parts["clicks"]
        everybody = state.split_due(state.make_plan(1, 10_000))
        assert everybody.rest.rows() == 0
        assert {name: len(table) for name, table in everybody.due.items()} == {
            "lines": 10,
            "clicks": 2,
        }


def test_a_clock_that_goes_back_does_not_take_the_plans_along(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 1)}, now_ms=1_000_000)
        assert state.make_plan(1, 5).now_ms == 1_000_000
        assert state.make_plan(1, 5).due == 1
        assert state.make_plan(1, 1_000_001).now_ms == 1_000_001


def tables(checkpoint):
    """The tables that are there: of which micro-batch, and what they hold."""
    names = (path.name.split(".") for path in (checkpoint / "ackcore").glob("state/*"))
    return sorted(f"{name[0]}.{name[2]}" for name in names)


def test_an_unchanged_table_is_not_written_again_and_outlives_its_micro_batch(checkpoint):
    lines = records(0, 100, due_ms=10**9)
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": lines})
        file = next((checkpoint / "ackcore/state").glob("0.*.waiting-lines.*.arrow"))
        before = file.stat()
    for number in range(1, 6):
        with OPEN(checkpoint) as state:
            plan = state.make_plan(number, number)
            state.write_plan(plan)
            rest = state.split_due(plan).rest.plus("clicks", records(number, 1, due_ms=0))
            end_one(state, number, rest, prune=True)
    assert file.stat().st_ino == before.st_ino
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert tables(checkpoint) == ["0.waiting-lines", "4.waiting-clicks", "5.waiting-clicks"]
    with OPEN(checkpoint) as state:
        assert state.waiting(5)["lines"].equals(lines)
        # Once nobody names it, it goes.
        for number in (6, 7):
            run_one(state, number, prune=True)
    assert tables(checkpoint) == []


def test_pruning_passes_over_what_is_no_runs(checkpoint):
    """A network file system's own names, say, of what is open still as it is removed."""
    with OPEN(checkpoint) as state:
        stray = state.runs.new(0).with_name(".nfs0000000001a2")
        stray.touch()
        run_one(state, 0, prune=True)
        assert list((checkpoint / "ackcore/work").iterdir()) == [stray]


def test_pruning_keeps_two_micro_batches_and_no_work_of_done_ones(checkpoint):
    with OPEN(checkpoint) as state:
        for number in range(5):
            (state.runs.new(number) / "part").write_text("x")
            run_one(state, number, prune=True)
        work = state.runs.new(5)
        with pytest.raises(
            ValueError,
            match="no files can be removed after micro-batch 3: the last finished one is 4",
        ):
            state.prune(3)
        for kind in ("plan", "decision", "done"):
            assert state.records.numbers(f".{kind}") == [3, 4]
        assert [path.name for path in (checkpoint / "ackcore/work").iterdir()] == [work.name]
        assert state.decision(3) is not None
        assert state.is_done(4)


def test_each_run_has_a_directory_of_its_own(checkpoint):
    """Whatever earlier ones had: tasks of theirs that live on find nothing of it by its path."""
    with OPEN(checkpoint) as state:
        first = state.runs.new(3)
        (first / "sub").mkdir()
        second = state.runs.new(3)
        assert {first.exists(), second.exists()} == {False, True}
    with OPEN(checkpoint) as state:
        third = state.runs.new(3)
        assert list(third.iterdir()) == []
        assert all(work.name.startswith("3.") for work in (first, second, third))
    assert len({first, second, third}) == 3


def test_runs_of_former_drivers_are_removed_at_the_next_start(checkpoint):
    """Else a driver that dies again and again in one micro-batch fills the disk."""
    works = checkpoint / "ackcore/work"
    for _ in range(5):
        with OPEN(checkpoint) as state:
            assert [path.name for path in works.glob("*")] == ["0.snapshot"] * (_ > 0)
            if state.plan(0) is None:
                state.write_plan(state.make_plan(0, 0))
            (state.runs.new(0) / "part").write_text("x")
            state.runs.snapshot(0).mkdir(exist_ok=True)


def test_the_run_that_was_decided_upon_stays(checkpoint):
    with OPEN(checkpoint) as state:
        state.write_plan(state.make_plan(0, 0))
        state.runs.new(0)
        state.runs._made = None  # it could not be removed
        accepted = state.runs.new(0)
        (accepted / "part").write_text("x")
        state.write_decision(decision(0, work=accepted.name))
        assert len(list(accepted.parent.iterdir())) == 2
    with OPEN(checkpoint) as state:
        assert list(accepted.parent.iterdir()) == [accepted]
        assert (state.runs.of(state.decision(0)) / "part").read_text() == "x"
        state.write_done(0)
        state.prune(0)
    assert list(accepted.parent.iterdir()) == []


def test_where_a_decision_has_its_files(checkpoint):
    (checkpoint / "ackcore/work/0.abc").mkdir(parents=True)
    with OPEN(checkpoint) as state:
        run_one(state, 0, work="0.abc")
        assert state.runs.of(state.decision(0)) == checkpoint / "ackcore/work/0.abc"


def test_keys_differ_by_micro_batch_and_deployment(checkpoint, tmp_path):
    with OPEN(checkpoint) as state, OPEN(tmp_path / "other") as other:
        keys = [one.key(number) for one in (state, other) for number in range(50)]
        assert len(set(keys)) == 100
        assert all(0 <= key < 2**63 for key in (*keys, state.deployment_key))
        before = state.deployment_key, state.key(3)
    with OPEN(checkpoint) as state:
        assert (state.deployment_key, state.key(3)) == before


def test_a_hundred_thousand_that_wait_are_written_and_parted_in_no_time(checkpoint):
    lines = records(0, 100_000, due_ms=0)
    with OPEN(checkpoint) as state:
        start = time.process_time()
        run_one(state, 0, {"lines": lines})
        written = time.process_time()
        plan = state.make_plan(1, 999)
        due, rest, _ = state.split_due(plan)
        parted = time.process_time()
    assert (len(due["lines"]), len(rest["lines"])) == (1000, 99_000)
    assert len(list((checkpoint / "ackcore/state").glob("0.*.waiting-*"))) == 1
    # Of a processor, whatever else there is to do: ten times what it takes on a slow machine; a row
    # at a time takes a hundred times as long.
    assert written - start < 1.0
    assert parted - written < 0.5


def test_waiting_rows_are_read_by_memory_map(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 200_000)})
    with OPEN(checkpoint) as state:
        before = pa.total_allocated_bytes()
        table = state.waiting(0)["lines"]
        assert len(table) == 200_000
        assert pa.total_allocated_bytes() - before < 1_000_000 < table.nbytes


# -- misuse -----------------------------------------------------------------------------------


def test_the_order_of_the_protocol_is_insisted_on(checkpoint):
    with OPEN(checkpoint) as state:
        with pytest.raises(ValueError, match="micro-batch 0 cannot be marked as done"):
            state.write_done(0)
        said = "decision of micro-batch 0 cannot be written: there is no plan"
        with pytest.raises(ValueError, match=said):
            state.write_decision(decision(0))
        run_one(state, 0)
        said = "plan of micro-batch 0 cannot change: the micro-batch has a decision"
        with pytest.raises(ValueError, match=said):
            state.write_plan(replace(state.plan(0), crashes=1))
        said = "micro-batch 0 cannot be written: there is one already"
        with pytest.raises(ValueError, match=said):
            state.write_decision(decision(0))
        with pytest.raises(ValueError, match="micro-batch 0 cannot be planned: it is done already"):
            state.make_plan(0, 1)
        with pytest.raises(CheckpointCorrupt, match=r"batches/3.decision is missing"):
            state.waiting(3)


@pytest.mark.parametrize("number", [0, 1, 4, 9])
def test_a_micro_batch_out_of_turn_is_refused(checkpoint, number):
    """Spark's offsets were removed, or are of another age: neither skip records nor repeat them."""
    with OPEN(checkpoint) as state:
        for each in range(3):
            run_one(state, each)
        for ask in (state.is_done, partial(state.make_plan, clock_ms=0)):
            said = f"with micro-batch 3, but Spark runs {number}"
            with pytest.raises(CheckpointCorrupt, match=said):
                ask(number)


@pytest.mark.parametrize("uri", ["viewfs://host/a", "dbfs:/a", "wasb://b/c"])
def test_a_store_that_cannot_rename_is_refused(uri):
    with pytest.raises(ValueError, match="checkpoint must be a path on a local or shared file sys"):
        OPEN(uri)


def test_paths_of_every_writing_lead_to_the_same_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("c", tmp_path / "c", f"file:{tmp_path}/c", f"file://{tmp_path}/c"):
        with OPEN(path) as state:
            assert state.url == str(tmp_path / "c")
    for wrong, words in (("", "must be a path"), ("file://host/c", "no host, got a file: URI")):
        with pytest.raises(ValueError, match=words):
            OPEN(wrong)


# -- one at a time ----------------------------------------------------------------------------


def test_a_second_query_is_refused_and_told_of_the_first(checkpoint):
    state = OPEN(checkpoint)
    with pytest.raises(CheckpointInUse, match=f"pid {os.getpid()} on ") as caught:
        OPEN(checkpoint)
    assert "Stop that query" in str(caught.value)
    state.close()
    state.close()
    OPEN(checkpoint).close()


HOLD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from checkpoints import OPEN
state = OPEN(sys.argv[1])
print("open", flush=True)
time.sleep(600)
"""


def test_a_killed_query_lets_go(checkpoint):
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", HOLD, str(checkpoint), here]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "open\n"
            with pytest.raises(CheckpointInUse, match=f"pid {holder.pid} on "):
                OPEN(checkpoint)
        finally:
            holder.send_signal(signal.SIGKILL)
    OPEN(checkpoint).close()


def test_a_checkpoint_on_which_nothing_ran_becomes_anothers(checkpoint):
    with OPEN(checkpoint) as state:
        key = state.deployment_key
    other = Topology(other=("value",), clicks=("value",))
    with OPEN(checkpoint, topology=other, kind="stream") as state:
        assert state.deployment_key == key  # sinks know it by now
        assert state.spout_order == ("other", "clicks")  # clicks may be closed windows
        state.write_plan(state.make_plan(0, 0))
    with pytest.raises(CheckpointForeign, match="belongs to another topology"):
        OPEN(checkpoint, kind="stream")


def test_a_checkpoint_with_a_plan_stays_its_topologys(checkpoint, monkeypatch):
    """The plan has no rows of another topology's spouts, and run_batch plans only once."""
    with OPEN(checkpoint) as state:
        monkeypatch.setattr(state.records, "write_meta", lambda meta: None)  # the driver died
        state.write_plan(state.make_plan(0, 0))
    with pytest.raises(CheckpointForeign, match="spout 'other' is new"):
        OPEN(checkpoint, topology=Topology(other=("value",)), accept_changes=True)
    OPEN(checkpoint).close()


def test_a_checkpoint_for_which_spark_has_read_stays_its_topologys(checkpoint):
    """Offsets of one source must not become another's, though the driver died before its plan."""
    OPEN(checkpoint, kind="stream").close()
    offsets(checkpoint, 0)
    with pytest.raises(CheckpointForeign, match="belongs to another topology"):
        OPEN(checkpoint, topology=Topology(other=("value",)), kind="stream")
    OPEN(checkpoint, kind="stream").close()


def test_a_refused_opening_holds_no_lock(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0)
    with pytest.raises(CheckpointForeign, match="belongs to another topology"):
        OPEN(checkpoint, topology=Topology(other=()))
    OPEN(checkpoint).close()


def test_what_a_dead_driver_left_of_a_decision_goes(checkpoint, monkeypatch):
    """It may have decided otherwise: bolts did not answer alike."""
    with OPEN(checkpoint) as state:
        state.write_plan(state.make_plan(0, 0))
        with monkeypatch.context() as patch:
            patch.setattr(state.records, "write", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                state.write_decision(decision(0, {"lines": records(0, 3)}))
    with OPEN(checkpoint) as state:
        assert state.decision(0) is None
        state.write_decision(decision(0, {"clicks": records(0, 1)}))
        # Nobody names it, and it goes when its micro-batch does.
        assert list(state.waiting(0)) == ["clicks"]
        state.write_done(0)
        for number in (1, 2):
            waits = state.waiting(number - 1)
            run_one(state, number, waits, prune=True)
    assert tables(checkpoint) == ["0.waiting-clicks"]


# -- whose it is ------------------------------------------------------------------------------


def test_another_topology_is_told_what_differs(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0)
    other = Topology(("count", "enrich"), lines=("value", "more"))
    with pytest.raises(CheckpointForeign) as caught:
        OPEN(checkpoint, topology=other)
    said = str(caught.value)
    assert "bolt 'enrich' is new" in said
    assert "spout 'clicks' is gone" in said
    assert "spout 'lines' differs in its fields: ['value'] before, ['value', 'more'] now" in said
    assert "accept_changes=True" in said
    OPEN(checkpoint, topology=other, accept_changes=True).close()
    OPEN(checkpoint, topology=other).close()
    with pytest.raises(CheckpointForeign, match="belongs to another topology"):
        OPEN(checkpoint)


def untracked(**spouts):
    topology = Topology(**spouts)
    topology.spouts["lines"].tracked = False
    return topology


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (Topology(clicks=("value",)), "2 records of spout 'lines', .* no tracked spout 'lines'"),
        (untracked(lines=("value",)), "2 records of spout 'lines', .* no tracked spout 'lines'"),
        (Topology(lines=("text",)), "'lines' that wait for a retry: 'value', string, is not"),
    ],
)
def test_changes_that_leave_waiting_records_behind_are_refused(checkpoint, changed, words):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 2)})
    with pytest.raises(CheckpointForeign, match=words):
        OPEN(checkpoint, topology=changed, accept_changes=True)
    OPEN(checkpoint).close()  # and it was not taken over


def test_a_stream_and_a_batch_do_not_share_a_checkpoint(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0)
    with pytest.raises(CheckpointForeign, match=r"made by run_batch\(\), and start\(\) cannot"):
        OPEN(checkpoint, kind="stream")


def offsets(checkpoint, *numbers):
    log = checkpoint / "offsets"
    shutil.rmtree(log, ignore_errors=True)
    log.mkdir(parents=True)
    for number in numbers:
        (log / str(number)).write_text("v1")
        (log / f".{number}.crc").write_text("")


@pytest.mark.parametrize(
    ("ours", "sparks", "good"),
    [
        (0, [], True),
        (0, [0], True),  # it died before we planned
        (0, [0, 1], False),
        (3, [1, 2], True),
        (3, [2, 3], True),
        (3, [3, 4], False),
        (3, [0, 1], False),
        (3, [], False),
    ],
)
def test_both_logs_must_tell_the_same_history(checkpoint, ours, sparks, good):
    with OPEN(checkpoint, kind="stream") as state:
        for number in range(ours):
            run_one(state, number)
    offsets(checkpoint, *sparks)
    if good:
        OPEN(checkpoint, kind="stream").close()
        return
    with pytest.raises(CheckpointCorrupt, match="is older than the other") as caught:
        OPEN(checkpoint, kind="stream")
    assert str(checkpoint / "offsets") in str(caught.value)


def test_a_checkpoint_of_spark_alone_is_not_taken_for_a_new_one(checkpoint):
    offsets(checkpoint, 0, 1)
    with pytest.raises(CheckpointCorrupt, match=r"meta.json is missing, though .*offsets shows"):
        OPEN(checkpoint, kind="stream")
