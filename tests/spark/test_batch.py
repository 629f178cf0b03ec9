"""The protocol, step by step, with a run that is made up: what must hold wherever it is cut off."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pyarrow as pa
import pytest
from checkpoints import ask, recorded, records
from worlds import Killed, Source, Upper, World, fails, killed

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign
from ackcore.spark.base.schemas import ATTEMPT, MESSAGE_ID, REPLAYED
from ackcore.spark.checkpoint.compatibility import check_tables
from ackcore.spark.engine import act, batch, runs
from ackcore.topology import TopologyBuilder
from ackcore.topology.tuples import Reason

REASON = Reason("upper", "ValueError", "no")
STEPS = ["planned", "ran", "checked", "decided", "in-sink", "in-dead-letters", "acted", "marked"]


def test_all_is_well(world):
    progress, counts = world.process(0, ["a", "b"])
    assert world.rows == ["A", "B"]
    assert (progress.records, progress.acked, progress.failed, progress.dead) == (2, 2, 0, 0)
    assert (counts.records, counts.acked, counts.waiting, counts.dead) == (2, 2, 0, 0)
    assert counts.balanced
    assert str(progress).startswith("micro-batch 0: 2 acked, 0 failed, 0 retried, 0 dead")
    assert set(progress.steps_s) == {"plan", "run", "check", "decide", "act", "mark"}


def test_a_failed_record_waits_and_is_tried_again(world):
    world.behaves = fails("b")
    _, counts = world.process(0, ["a", "b"])
    assert world.rows == ["A"]
    assert (counts.acked, counts.waiting) == (1, 1)
    progress, counts = world.process(1, ["c"])  # it is not due yet
    assert progress.retried == 0
    assert (progress.waiting, progress.oldest_s) == (1, 0)
    world.now_ms += 10_000
    progress, counts = world.process(2)
    assert (progress.retried, progress.acked, progress.waiting) == (1, 1, 0)
    assert progress.latency_s.p50 == 10
    assert world.rows == ["A", "B", "C"]
    assert counts.balanced
    assert (counts.records, counts.acked, counts.retried) == (3, 3, 1)


def test_a_record_that_keeps_failing_is_dead_after_its_last_attempt(world):
    world.behaves = fails("b", times=100)
    world.process(0, ["a", "b"])
    counts = world.drain(1)
    assert world.rows == ["A"]
    assert world.parked == ["b"]
    assert (counts.acked, counts.dead, counts.retried) == (1, 1, 4)
    assert len(world.runs) == 5


def test_a_final_reason_leads_to_the_dead_letters_at_once(world):
    world.behaves = fails("b", final=True)
    progress, counts = world.process(0, ["a", "b"])
    assert (progress.failed, progress.dead, progress.waiting) == (1, 1, 0)
    assert world.parked == ["b"]
    assert counts.balanced


def test_a_record_is_due_when_its_failure_asks_for_it(world):
    """From when its run has ended on: it may have failed long after the plan."""
    later = Reason("upper", "Retry", "busy", after_ms=60_000)

    def behaves(line, attempt):
        world.now_ms += 5_000  # the run takes so long
        return later if line == "b" and attempt == 0 else None

    world.behaves = behaves
    world.process(0, ["a", "b"])
    began = world.now_ms - 10_000
    world.now_ms = began + 69_999  # beyond any back-off, and beyond the plan's time and the wait
    assert world.process(1)[0].retried == 0
    world.now_ms = began + 70_000
    progress, counts = world.process(2)
    assert (progress.retried, progress.acked, counts.waiting) == (1, 1, 0)
    assert world.rows == ["A", "B"]


def unavailable(line, attempt):
    return Reason("upper", "Unavailable", "open", after_ms=20_000, counts=False)


def test_what_is_no_attempt_burns_none(tmp_path):
    world = World(tmp_path, {"max_attempts": 2})
    world.behaves = unavailable
    progress, _ = world.process(0, ["a", "b"])
    assert (progress.failed, progress.uncounted, progress.waiting) == (2, 2, 2)
    for number in range(1, 10):
        world.now_ms += 400_000
        progress, counts = world.process(number)
        assert (progress.failed, progress.uncounted, progress.retried) == (2, 2, 2)
    assert "0 failed, 2 put off (unavailable, or behind a record of their key)" in str(progress)
    assert (counts.waiting, counts.dead, counts.retried) == (2, 0, 18)
    world.behaves = fails("a", times=1)  # its first attempt: there is another
    world.now_ms += 400_000
    progress, _ = world.process(10)
    assert (progress.acked, progress.failed, progress.uncounted) == (1, 1, 0)
    counts = world.drain(11)
    assert (world.rows, counts.acked, counts.dead) == (["A", "B"], 2, 0)
    assert counts.balanced


def test_what_is_unavailable_for_too_long_counts(tmp_path):
    world = World(tmp_path, {"max_attempts": 2, "unavailable_timeout_s": 1_000})
    world.behaves = unavailable
    world.process(0, ["a"])
    for number, counted in enumerate((False, False, True, True), 1):
        world.now_ms += 400_000
        progress, counts = world.process(number)
        assert progress.uncounted == (not counted)
        assert progress.failed == 1
    assert (counts.dead, counts.waiting, world.parked) == (1, 0, ["a"])
    with world.driver()[0] as state:
        dead = state.decision(4).dead["lines"]
    assert dead[ATTEMPT].to_pylist() == [2]
    reason = Reason("upper", "Unavailable", "open")
    assert Reason(**dead["_ackcore_reason"][0].as_py()) == reason


def test_what_waits_uncounted_is_within_the_bound_too(tmp_path):
    """It has the attempt of a replay whose turn has not come, which is not."""
    world = World(tmp_path, {"max_waiting": 2})
    world.behaves = unavailable
    world.process(0, ["a", "b"])
    progress, _ = world.process(1, ["c"])
    assert (progress.waiting, progress.dead, world.parked) == (2, 1, ["c"])


@pytest.mark.parametrize(("b", "counted"), [(unavailable, False), (fails("b"), True)])
def test_who_shares_a_row_with_what_was_no_attempt_has_made_none(tmp_path, b, counted):
    world = World(tmp_path)
    world.behaves = lambda line, attempt: {"a": unavailable, "b": b}.get(line, fails())(line, 0)
    world.shared_rows = [("A", "C"), ("D", "C"), ("D", "B")]
    progress, _ = world.process(0, ["a", "b", "c", "d"])
    assert (progress.failed, progress.uncounted) == (4, 1 if counted else 4)
    with world.driver()[0] as state:
        (waits,) = state.decision(0).waiting.tables("lines")
    attempts = dict(zip(waits["line"].to_pylist(), waits[ATTEMPT].to_pylist(), strict=True))
    assert attempts == {"a": 0, "b": counted, "c": counted, "d": counted}


def test_what_waits_is_bounded(tmp_path):
    world = World(tmp_path, {"max_waiting": 2})
    world.behaves = fails("a", "b", "c", "d")
    progress, _ = world.process(0, ["a", "b", "c", "d", "e"])
    assert (progress.waiting, progress.dead) == (2, 2)
    with world.driver()[0] as state:
        dead = state.decision(0).dead["lines"]
    reason = Reason(**dead["_ackcore_reason"][0].as_py())
    assert (reason.component, reason.type) == ("upper", "WaitingFull")
    said = "2 records wait already (max_waiting); it failed with ValueError: no c"
    assert reason.message == said
    assert dead[ATTEMPT].to_pylist() == [1, 1]
    counts = world.drain(1)
    assert world.rows == ["A", "B", "E"]
    assert world.parked == ["c", "d"]
    assert counts.balanced


def test_the_bound_is_for_all_spouts_together(tmp_path):
    world = World(tmp_path, {"max_waiting": 1}, spouts=("lines", "more"))
    world.behaves = fails("a", "x")
    progress, _ = world.process(0, ["a", ("more", "x")])
    assert (progress.waiting, progress.dead) == (1, 1)


def test_when_a_record_was_first_seen_is_kept(world):
    world.behaves = fails("a", times=2)
    world.process(0, ["a"])
    world.now_ms += 10_000
    assert world.process(1, ["b"])[0].oldest_s == 10
    world.now_ms += 20_000
    assert world.process(2)[0].latency_s.p99 == 30


@pytest.mark.parametrize("again", ["a#1", "a#2"])
def test_records_of_one_message_id_are_told_apart(world, again):
    """A duplicate that waits in a later micro-batch: one of the two is ACKED, the other fails."""
    world.behaves = fails("a#1", "a#2")
    world.process(0, ["a#1"])
    world.now_ms += 1_000
    world.process(1, ["a#2"])
    world.now_ms += 20_000
    world.behaves = fails(again, times=2)
    progress, counts = world.process(2, ["b"])
    seen = {"a#1": 21, "a#2": 20}
    assert (progress.acked, progress.failed) == (2, 1)
    assert progress.oldest_s == seen.pop(again)
    assert [progress.latency_s.p99] == list(seen.values())
    assert counts.balanced
    assert world.drain(3).acked == 3


@pytest.mark.parametrize(("again", "resolved"), [(0, 0), (1, 1)])
def test_a_replayed_record_is_told_from_a_retry_of_its_message_id(world, again, resolved):
    """A replay at attempt 0 and a retry at attempt 1, one of which fails."""
    world.behaves = fails("line 0")
    world.process(0, ["line 0"])
    world.now_ms += 400_000
    table = records(0, 1, attempt=0).set_column(0, MESSAGE_ID, pa.array(["line 0"]))
    table = table.set_column(6, REPLAYED, pa.array([1], pa.int32()))
    ask(world.path, table=table.rename_columns([*table.column_names[:-1], "line"]))
    world.behaves = lambda line, attempt: REASON if attempt == again else None
    progress, counts = world.process(1)
    assert (progress.acked, progress.failed, counts.resolved) == (1, 1, resolved)
    world.behaves = fails()
    counts = world.drain(2)
    assert (counts.acked, counts.resolved, counts.balanced) == (2, 1, True)


def test_who_shares_a_row_with_a_failed_record_fails_with_it(tmp_path):
    world = World(tmp_path)
    world.behaves = fails("a")
    world.shared_rows = [("A", "B"), ("C", "B"), ("D", "E")]
    progress, _ = world.process(0, ["a", "b", "c", "d", "e", "f"])
    assert (progress.acked, progress.failed) == (3, 3)
    assert world.rows == ["D", "D&E", "E", "F"]
    world.shared_rows = [("A", "B"), ("C", "B")]
    world.now_ms += 10_000
    _, counts = world.process(1)
    assert world.rows == ["A", "A&B", "B", "C", "C&B", "D", "D&E", "E", "F"]
    assert counts.balanced


def test_spouts_have_accounts_of_their_own(tmp_path):
    world = World(tmp_path, spouts=("lines", "more"))
    world.behaves = fails("a", "x")
    _, counts = world.process(0, ["a", "b", ("more", "x")])
    assert counts.spouts["lines"].waiting == counts.spouts["more"].waiting == 1
    assert (counts.spouts["lines"].records, counts.spouts["more"].records) == (2, 1)
    assert world.drain(1).balanced
    assert world.rows == ["A", "B", "X"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("world", "number"), [("disk", 0), ("disk", 1), ("bucket", 1)], indirect=["world"]
)
def test_whatever_dies_each_record_has_one_decision(world, monkeypatch, step, number):
    """Killed at a step and started again, all ends as if nothing had been."""
    world.behaves = fails("b", "poison", times=2)
    died = []

    def failpoint(name, n=None):
        if (name, n) == (step, number) and not died:
            died.append(name)
            raise killed(name)

    for module in (batch, runs, act):
        monkeypatch.setattr(module, "failpoint", failpoint)
    world.topology = World(world.path, {"max_attempts": 2}).topology
    for bolt_sink in world.topology.sinks.values():
        object.__setattr__(bolt_sink, "writer", world)
    drivers = 0
    for n, lines in enumerate([["a", "b", "poison"], ["c"], []]):
        while True:
            state, engine = world.driver()
            drivers += 1
            try:
                engine.process(n, [("lines", line) for line in lines])
                counts = engine.counts
                break
            except Killed:
                continue
            finally:
                state.close()
        world.now_ms += 10_000
    died_at_dead_letters = step == "in-dead-letters" and number == 0
    assert drivers == (3 if died_at_dead_letters else 4)
    assert world.rows == ["A", "C"]
    assert world.parked == ["b", "poison"]
    assert counts.balanced
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (4, 2, 2, 0)
    assert (counts.batches, counts.retried) == (3, 2)


def test_a_decision_is_not_made_again(world, dying_at):
    """A record that failed in the decided run may succeed in another: there is no other."""
    world.behaves = fails("b")

    with dying_at("acted"):
        world.process(0, ["a", "b"])
    world.behaves = fails("a")
    progress, counts = world.process(0, ["a", "b"])
    assert len(world.runs) == 1
    assert world.rows == ["A"]
    assert (progress.acked, progress.failed, progress.runs) == (1, 1, 0)
    assert counts.waiting == 1


class Sinkless(World):
    def _sink(self, builder):
        pass

    def run(self, *args):
        return replace(super().run(*args), files=())


@pytest.mark.parametrize("step", [None, "decided", "acted"])
def test_a_decision_without_effects_is_recorded_with_the_mark(tmp_path, dying_at, step):
    """A driver that dies between the two has decided nothing, and the next one runs again."""
    world = Sinkless(tmp_path)
    world.behaves = fails("b")
    state, engine = world.driver()
    with contextlib.nullcontext() if step is None else dying_at(step):
        engine.process(0, [("lines", "a"), ("lines", "b")])
    state.records._file_lock.close()  # not that of the checkpoint, which would write the rest
    found = recorded(tmp_path)
    assert found.numbers(".plan") == [0]
    ended = [0] if step is None else []
    assert found.numbers(".decision") == found.numbers(".done") == ended
    _, counts = world.process(0, ["a", "b"])
    assert len(world.runs) == (1 if step is None else 2)
    assert (counts.records, counts.acked, counts.waiting) == (2, 1, 1)
    assert counts.balanced


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("loud", "micro-batch, then change it$"),
        ("upper", "then change it; or give 'upper' a sink, which may be a function"),
    ],
)
def test_decided_rows_are_not_dropped_with_their_sink(world, dying_at, name, way_out):
    """A bolt of another name, and its sink with it, or a sink of another bolt."""
    with dying_at("decided"):
        world.process(0, ["a", "b"])
    former, builder = world.topology, TopologyBuilder()
    builder.spout("lines", Source())
    builder.bolt(name, Upper()).shuffle("lines")
    builder.bolt("after", Upper()).shuffle(name)
    builder.sink("after", world)
    world.topology = builder.build()
    said = rf"2 rows of 'upper' yet.* no longer has a sink for them.*{way_out}"
    with pytest.raises(CheckpointForeign, match=said):
        world.driver(accept_changes=True)
    # The refused start has not recorded its topology.
    world.topology = former
    world.process(0)
    assert world.rows == ["A", "B"]


def test_a_removed_sink_of_two_is_missed_and_a_renamed_one_is_not(world, dying_at):
    def with_sinks(*names):
        builder = TopologyBuilder()
        builder.spout("lines", Source())
        builder.bolt("upper", Upper()).shuffle("lines")
        for name in names:
            builder.sink("upper", world, name=name)
        return builder.build()

    world.topology = with_sinks("lake", "kafka")
    with dying_at("decided"):
        world.process(0, ["a", "b"])
    world.topology = with_sinks("lake")
    said = r"2 rows of 'upper' yet.* no longer has all its sinks for them.*; or give 'upper' a sink"
    with pytest.raises(CheckpointForeign, match=said):
        world.driver(accept_changes=True)
    world.topology = with_sinks("lake", "other")
    world.process(0, accept_changes=True)
    assert world.rows == ["A", "B"]


@pytest.mark.parametrize(
    ("sinks", "said"),
    [
        (
            {"lake": "after", "kafka": "upper"},
            "sink 'kafka' read 'after' before, and reads 'upper' now",
        ),
        (
            {"lake": "after", "new": "upper"},
            "sink 'lake' read 'upper' before, and reads 'after' now",
        ),
    ],
)
def test_decided_rows_do_not_go_to_the_sink_of_another_stream(world, dying_at, sinks, said):
    def with_sinks(sinks):
        builder = TopologyBuilder()
        builder.spout("lines", Source())
        builder.bolt("upper", Upper()).shuffle("lines")
        builder.bolt("after", Upper()).shuffle("upper")
        for name, component in sinks.items():
            builder.sink(component, world, name=name)
        return builder.build()

    world.topology = with_sinks({"lake": "upper", "kafka": "after"})
    with dying_at("decided"):
        world.process(0, ["a", "b"])
    world.topology = with_sinks(sinks)
    with pytest.raises(CheckpointForeign, match=said):
        world.driver(accept_changes=True)
    world.topology = with_sinks({"lake": "upper", "kafka": "after"})
    world.process(0)
    world.topology = with_sinks(sinks)
    world.process(1, accept_changes=True)


def test_views_of_a_table_need_all_their_sinks_while_a_micro_batch_is_decided():
    view = ["t.changes", "default"]
    table = {"from": ["upper", "default"], "aggregates": {}}
    before, after = (
        {
            "spouts": {},
            "bolts": {"upper": {"streams": {}}},
            "tables": {"t": table},
            "sinks": dict.fromkeys(names, view),
        }
        for names in ("ab", "b")
    )
    with pytest.raises(CheckpointForeign, match=r"a sink of 't\.changes', .* was removed"):
        check_tables("cp", {}, (before, after), 3, False)
    check_tables("cp", {}, (before, before), 3, False)
    moved = {**before, "sinks": {"a": ["upper", "default"], **after["sinks"], "c": view}}
    with pytest.raises(
        CheckpointForeign, match=r"sink 'a' read 't\.changes' before, and reads 'up"
    ):
        check_tables("cp", {}, (before, moved), 3, False)


def test_a_plan_is_kept_with_its_time(world, dying_at):
    world.behaves = fails("b", times=2)
    world.process(0, ["a", "b"])
    world.now_ms += 10_000

    with dying_at("ran"):
        world.process(1, ["c"])
    world.now_ms += 10_000
    world.process(1, ["c"])
    first, second = world.runs[1:]
    assert (first.now_ms, first.key) == (second.now_ms, second.key)
    assert first.retries.keys() == second.retries.keys() == {"lines"}


def test_a_batch_that_is_done_is_not_run_again(world):
    world.process(0, ["a"])
    world.written.clear()
    progress, counts = world.process(0, ["a"])
    assert len(world.runs) == 1
    assert not world.written
    assert (progress.acked, progress.runs, counts.acked) == (1, 0, 1)


def test_a_number_out_of_turn_is_refused(world):
    world.process(0, ["a"])
    with pytest.raises(CheckpointCorrupt, match="continues with micro-batch 1, but"):
        world.process(2, ["a"])


def test_a_clock_that_goes_back_holds_nothing_up(world):
    world.behaves = fails("a")
    state, engine = world.driver()
    with state:
        engine.process(0, [("lines", "a")])
        world.now_ms -= 3_600_000
        assert engine.clock() == 1_000_000
        world.now_ms += 10_000
        engine.process(1, [])
        assert engine.counts.acked == 1
    world.now_ms -= 3_600_000
    progress, counts = world.process(2, ["b"])
    assert counts.balanced
    assert progress.oldest_s == 0
    times = [plan.now_ms for plan in world.runs]
    assert times == sorted(times)


def test_a_clock_that_went_back_while_no_driver_ran_holds_nothing_up(world, dying_at):
    """A plan was on record, which keeps its time: that is when its retries begin to wait."""
    world.behaves = fails("a")

    with dying_at("ran"):
        world.process(0, ["a"])
    world.now_ms -= 3_600_000
    state, engine = world.driver()
    with state:
        engine.process(0, [("lines", "a")])
        assert 0 < engine.next_due_ms - engine.clock() <= 10_000
