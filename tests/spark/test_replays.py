"""Requests to run dead letters again, as the checkpoint sees them."""

from __future__ import annotations

import logging
import re
import shutil
from dataclasses import replace
from unittest.mock import ANY

import pyarrow as pa
import pytest
from checkpoints import (
    OPEN,
    TOPOLOGY,
    Topology,
    ask,
    died,
    end_one,
    ids,
    records,
    request_path,
    run_one,
    withdraw,
)
from streams import Split, in_line
from worlds import World, fails

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign
from ackcore.spark.base.schemas import ORDER, REPLAYED, TRACKING
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.checkpoint.schema_changes import ColumnsChanged
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, list_letters
from ackcore.spark.dead_letters.notes import notes_of
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine.progress import Account
from ackcore.spark.query import run_batch


def test_a_request_is_taken_by_one_plan_and_then_gone(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 3)})
        names = ask(checkpoint, "r1"), ask(checkpoint, "r2", "clicks", records(9, 2, attempt=0))
        assert state.pending_replays() == names
        plan = state.make_plan(1, 1000)
        assert (plan.replays, plan.due) == (names, 1)
        state.write_plan(plan)
        assert state.pending_replays() == ()
    with OPEN(checkpoint) as state:
        assert state.pending_replays() == ()
        due, rest, _ = state.split_due(state.plan(1))
        assert {name: ids(table) for name, table in due.items()} == {
            "lines": ["id-0", "id-77"],
            "clicks": ["id-9", "id-10"],
        }
        end_one(state, 1, rest)
        state.write_plan(state.make_plan(2, 0))
    with OPEN(checkpoint) as state:  # it died before it pruned
        assert state.pending_replays() == ()
        assert state.plan(2).replays == ()
        end_one(state, 2, prune=True)
        assert store_of(checkpoint).requested() == []
        assert not list((checkpoint / "ackcore/dead_letters").glob(".requests/*/*"))


@pytest.mark.parametrize("harm", ["damaged", "missing"])
def test_a_request_past_reading_is_withdrawn_and_its_letters_are_sent_anew(checkpoint, harm):
    """It costs no checkpoint: the letters are in their store."""
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        letters = DeadLetters.checked(checkpoint, state.deployment_key)()
        letters.write(0, {"lines": died(0, 2)})
        assert replay(checkpoint, request="r1").records == {"lines": 2}
        state.write_plan(state.make_plan(1, 0))
    (name,) = store_of(checkpoint).requested()
    path = request_path(checkpoint, name)
    path.write_bytes(path.read_bytes()[:-1])
    if harm == "missing":
        path.unlink()
    with pytest.raises(CheckpointCorrupt, match=re.escape(f"{name} is {harm}")) as caught:
        OPEN(checkpoint)
    mark = withdraw(checkpoint, name)
    assert f"make an empty file {mark} and start again" in str(caught.value)
    assert "Restore" not in str(caught.value)
    with OPEN(checkpoint) as state:
        assert state.plan(1).replays == ()
    # Nothing was sent, and so it reads.
    with OPEN(checkpoint) as state:
        assert state.pending_replays() == ()
    assert [note.rows for note in notes_of(store_of(checkpoint))] == [{}]
    assert replay(checkpoint, request="r1").records == {}
    assert replay(checkpoint, request="r2").records == {"lines": 2}
    notes = notes_of(store_of(checkpoint))
    assert [note.rows for note in notes] == [{}, {"lines": {"0": [[0, 2]]}}]
    with OPEN(checkpoint) as state:
        assert [name.split(".")[0] for name in state.pending_replays()] == ["r2"]


def test_letters_without_their_checkpoint_tell_what_was_sent(checkpoint, tmp_path):
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        letters = DeadLetters.checked(checkpoint, state.deployment_key, tmp_path / "letters")()
        letters.write(0, {"lines": died(0, 2)})
    replay(checkpoint, request="r1")
    shutil.rmtree(checkpoint)
    notes = notes_of(store_of(tmp_path / "letters"))
    assert [note.rows for note in notes] == [{"lines": {"0": [[0, 2]]}}]


def test_a_request_that_was_taken_is_withdrawn_too_late(checkpoint):
    with OPEN(checkpoint) as state:
        name = ask(checkpoint)
        run_one(state, 0)
        mark = withdraw(checkpoint, name)
        state.prune(0)
        assert not mark.exists()
        assert store_of(checkpoint).requested() == []


def numbers(kind, values=("7",), name="value"):
    """A request whose letters have one column of a type."""
    table = records(5, len(values)).select(TRACKING.names)
    return table.append_column(name, pa.array(values).cast(kind))


def lines(*fields):
    return {"lines": pa.schema(fields), "clicks": pa.schema([("value", pa.string())])}


def test_a_request_is_cast_to_the_columns_of_now(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0, {"lines": records(0, 1, due_ms=0)})
        ask(checkpoint, table=numbers(pa.large_string()))
        assert ids(state.split_due(state.make_plan(1, 0)).due["lines"]) == ["id-0", "id-5"]
    now = lines(("more", pa.int8()), ("value", pa.string()))
    with OPEN(checkpoint, sources=now) as state:
        due = state.split_due(state.make_plan(1, 0)).due["lines"]
    assert due.select(["more", "value"]).to_pylist()[1] == {"more": None, "value": "7"}


MISFITS = [
    (lines(("value", pa.int32())), "'value' was string and is int32 now .*'x'"),
    (lines(("text", pa.string())), "'value', string, is not there any more"),
    (
        lines(("value", pa.string()), pa.field("more", pa.int8(), nullable=False)),
        "'more' is new, int8, and not nullable",
    ),
]


@pytest.mark.parametrize(("now", "told"), MISFITS)
@pytest.mark.parametrize("planned", [False, True], ids=["pending", "planned"])
def test_a_request_that_does_not_fit_is_told_at_the_start_and_can_be_withdrawn(
    checkpoint, now, told, planned
):
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        name = ask(checkpoint, table=numbers(pa.string(), ["x"]))
        other = ask(checkpoint, "r2", "clicks", records(9, 1))
        if planned:
            plan = state.make_plan(1, 0)
            assert plan.replays == (name, other)
            state.write_plan(replace(plan, crashes=4, careful=True, rejected=(17,)))
    with pytest.raises(ColumnsChanged, match=told) as caught:
        OPEN(checkpoint, sources=now)
    mark = withdraw(checkpoint, name)
    assert f"{name} requests" in str(caught.value)
    assert f"make an empty file {mark} and start again" in str(caught.value)
    with OPEN(checkpoint, sources=now) as state:
        plan = state.plan(1) if planned else state.make_plan(1, 0)
        assert plan == Plan(1, plan.now_ms, 0, 0, (other,))
        assert ids(state.split_due(plan).due["clicks"]) == ["id-9"]
        assert "lines" not in state.split_due(plan).due
        assert state.pending_replays() == (() if planned else (other,))


def test_what_a_request_brings_has_an_order_once_it_is_planned(checkpoint):
    """Letters left for later micro-batches keep their number, and are not behind new ones."""
    sources = {**TOPOLOGY.schemas}
    sources["lines"] = sources["lines"].append(pa.field(ORDER, pa.int64()))
    with OPEN(checkpoint, sources=sources) as state:
        run_one(state, 0)
        ask(checkpoint, table=records(5, 3, attempt=0))
        ask(checkpoint, "r2", table=records(9, 1, attempt=0))
        plan = state.make_plan(1, 0, max_retries=2)
        state.write_plan(plan)
        due, rest, _ = state.split_due(plan)
        first = 1 << 32
        assert due["lines"][ORDER].to_pylist() == [first, first + 1]
        assert rest["lines"][ORDER].to_pylist() == [first + 2, first + 3]


def test_a_request_that_does_not_fit_does_not_get_into_a_plan(checkpoint):
    """It came while the query ran, from a caller who knew the former columns."""
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        ask(checkpoint, table=numbers(pa.string(), name="text"))
        with pytest.raises(ColumnsChanged, match="'text', string, is not there any more"):
            state.make_plan(1, 0)
        assert state.plan(1) is None


def test_a_request_for_a_spout_that_is_no_more_is_refused(checkpoint):
    OPEN(checkpoint).close()
    ask(checkpoint)
    with pytest.raises(
        CheckpointForeign,
        match=r"dead letters \(request r1\) of spout .* has no tracked spout 'lines'",
    ):
        OPEN(checkpoint, topology=Topology(clicks=("value",)), accept_changes=True)


@pytest.mark.parametrize("dedup", [False, True])
def test_letters_of_a_spout_that_is_not_tracked_any_more_are_not_sent(spark, checkpoint, dedup):
    """The next start would refuse the request. A spout with dedup is tracked as before."""

    def run(lines, **how):
        parts = {"lines": spark.createDataFrame(lines, "id long, line string"), "split": Split()}
        topology = in_line(parts, spout=how, backoff_s=0.001, max_attempts=1, parallelism=1)
        return run_batch(topology, spark, checkpoint, accept_changes=True, max_dead_ratio=None)

    lines = [(0, "bad"), (1, "a")]
    how = {"message_id": "id", **({"dedup": "id", "within_keys": 9} if dedup else {})}
    assert run(lines, **how).dead == 1
    assert replay(checkpoint, dry_run=True).records == {"lines": 1}
    if not dedup:
        run(lines, message_id="id", tracked=False)
        with pytest.raises(CheckpointForeign, match="has no such tracked spout now"):
            replay(checkpoint)
        assert store_of(checkpoint).requested() == []
        run(lines, message_id="id", tracked=False)  # as before
        run(lines, **how)
    assert replay(checkpoint).records == {"lines": 1}
    assert run(lines, **how).dead == 2


def test_the_counts_tell_what_was_resolved(tmp_path):
    world = World(tmp_path)

    def park(number):
        with world.driver()[0] as state:
            store = DeadLetters.checked(tmp_path, state.deployment_key)()
            store.write(number, state.decision(number).dead)

    with world.driver()[0] as state:
        DeadLetters.checked(tmp_path, state.deployment_key)()  # as a query that starts does
    world.behaves = fails("b", "c", final=True)
    world.process(0, ["a", "b", "c"])
    park(0)
    assert replay(tmp_path).records == {"lines": 2}
    # One of the two fails once more and is ACKED then, the other one dies again.
    behaviours = {"b": fails("b"), "c": fails("c", final=True)}
    world.behaves = lambda line, attempt: behaviours[line](line, attempt)
    _, counts = world.process(1)
    assert counts.spouts["lines"] == Account(3, 2, 1, dead=3, waiting=1, retried=0, resolved=0)
    park(1)
    world.now_ms += 10_000
    _, counts = world.process(2)
    assert counts.spouts["lines"] == Account(3, 2, 2, dead=3, waiting=0, retried=1, resolved=1)
    assert replay(tmp_path).records == {"lines": 1}
    world.behaves = fails()
    _, counts = world.process(3)
    assert (counts.resolved, counts.replayed, counts.dead, counts.acked) == (2, 3, 3, 3)
    assert counts.balanced
    assert world.rows == ["A", "B", "C"]


def test_what_dies_again_and_again_is_refused_in_the_end(tmp_path, caplog):
    """Its count outlasts the driver, retries, and a merge of what waits with what came before."""
    world = World(tmp_path, {"max_attempts": 2})
    number = iter(range(100))

    def round_of(*lines):
        for _ in range(3):
            n = next(number)
            _, counts = world.process(n, lines)
            lines = ()
            with world.driver()[0] as state:
                dead = state.decision(n).dead
                DeadLetters.checked(tmp_path, state.deployment_key)().write(n, dead)
            world.now_ms += 100_000
            assert counts.balanced
        return counts

    world.behaves = fails("b", times=100)
    counts = round_of("a", "b")
    for sent in (1, 2, 3):
        assert replay(tmp_path, max_replays=3) == (ANY, {"lines": 1}, {})
        counts = round_of()
        assert (counts.replayed, counts.dead, counts.resolved) == (sent, sent + 1, 0)
    with caplog.at_level(logging.WARNING):
        assert replay(tmp_path, max_replays=3, dry_run=True) == (ANY, {}, {"lines": 1})
    assert "1 dead letter is left out in" in caplog.text
    assert "after 3 or more replays. To send them" in caplog.text
    assert replay(tmp_path, max_replays=3) == (ANY, {}, {"lines": 1})
    found = [each.replays for each in list_letters(store_of(tmp_path), LetterFilter())]
    assert found == [3, 2, 1, 0]
    # Those sent were not sent in vain, and it is not for ever.
    world.behaves = fails()
    assert replay(tmp_path, max_replays=None).records == {"lines": 1}
    counts = round_of()
    assert (counts.acked, counts.dead, counts.replayed, counts.resolved) == (2, 4, 4, 1)


def test_a_letter_that_is_sent_again_and_again_counts_each_time(checkpoint):
    with OPEN(checkpoint) as state:
        run_one(state, 0)
        DeadLetters.checked(checkpoint, state.deployment_key)().write(0, {"lines": died(0, 2)})
    only = LetterFilter((LetterId("lines", 0, 1),))
    for _ in range(2):
        assert replay(checkpoint, where=only, again=True, max_replays=2).records == {"lines": 1}
    assert replay(checkpoint, again=True, max_replays=2)[1:] == ({"lines": 1}, {"lines": 1})
    with OPEN(checkpoint) as state:
        due = state.split_due(state.make_plan(1, 0)).due["lines"]
    found = zip(ids(due), due[REPLAYED].to_pylist(), strict=True)
    assert sorted(found) == [("id-0", 1), ("id-1", 1), ("id-1", 2)]


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, "3"])
def test_how_often_is_a_number(checkpoint, wrong):
    OPEN(checkpoint).close()
    with pytest.raises(ValueError, match="max_replays must be a whole number of at least 1"):
        replay(checkpoint, max_replays=wrong)
