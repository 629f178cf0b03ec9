"""Who is blamed for a dead worker: that a killer is found, and nobody else condemned."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest
from worlds import Killed, root_of

from ackcore.spark import batch
from ackcore.spark.blame import blame, certainty, failed_attempt
from ackcore.spark.state import Plan
from ackcore.topology.tuples import Reason

PLAN = Plan(0, 0, None, 0, careful=True)


def test_a_record_that_kills_its_worker_is_found_and_buried(world):
    """Two deaths, then careful: suspects, alone once, alone twice; and then without it."""

    def behaves(line, attempt):
        if line in ("poison", "venom"):
            raise RuntimeError("worker exited unexpectedly")
        return None

    world.behaves = behaves
    progress, books = world.process(0, ["a", "poison", "b", "venom"])
    assert world.rows == ["A", "B"]
    assert world.parked == ["poison", "venom"]
    assert (progress.dead, books.acked) == (2, 2)
    assert books.balanced
    last = world.runs[-1]
    key = last.key
    assert set(last.condemned) == {root_of(key, "lines", line, 0) for line in ("poison", "venom")}
    assert progress.runs == 9
    state, _ = world.driver()
    with state:
        dead = state.decision(0).dead["lines"]
    reasons = {Reason.decode(text.as_py())[1:3] for text in dead["_ackcore_reason"]}
    assert reasons == {("KilledWorker", "killed its worker")}


@pytest.fixture
def suspicious(world):
    """A world whose driver has died with suspects on record, and where the rows are kept."""
    died = []

    def behaves(line, attempt):
        if len(died) < 4:
            died.append(line)
            raise (Killed if len(died) == 4 else RuntimeError)("gone")
        return None

    world.behaves = behaves
    with pytest.raises(Killed):
        world.process(0, ["a", "b"])
    state, _ = world.driver()
    with state:
        assert state.plan(0).suspects
        return state.pinned(0)


def test_marks_that_a_dead_driver_found_are_not_held_against_anybody(world, suspicious):
    # The plan on record knows suspects of the death that was seen; what the last worker had in
    # hand when the driver died is nobody's fault.
    _, books = world.process(0, ["a", "b"])
    assert (books.acked, books.dead) == (2, 0)
    assert world.runs[-1].condemned == ()


def test_suspects_are_of_rows_that_are_kept(world, suspicious):
    """Who has come under suspicion is asked for among the same rows, or not at all."""
    # The source is other rows now, as a bounded one may be; those of before are run.
    _, books = world.process(0, ["c"])
    assert (world.rows, books.acked) == (["A", "B"], 2)
    assert world.runs[-1].suspects
    assert not suspicious.exists()


def test_suspects_are_forgotten_with_their_rows(world, suspicious):
    shutil.rmtree(suspicious)
    _, books = world.process(0, ["c"])
    assert (world.rows, books.acked) == (["C"], 1)
    assert world.runs[-1].careful
    assert world.runs[-1].suspects == ()


def test_blame_needs_a_mark():
    assert blame(PLAN, {}, None) == PLAN
    assert blame(PLAN, {3: frozenset({1, 2})}, None).suspects == (1, 2)


def test_blame_looks_at_the_task_that_failed_the_job():
    marks = {3: frozenset({1}), 4: frozenset({2, 5})}
    found = blame(blame(PLAN, marks, 3), marks, 3)
    assert (found.suspects, found.condemned) == ((), (1,))
    assert blame(PLAN, marks, 9).suspects == (2, 5)


def test_killers_do_not_hide_each_other():
    """A task that runs in bulk dies faster than one that runs its suspects one by one."""
    tasks = {3: {1, 2, 4}, 4: {11, 12, 14}, 5: {21, 22}}
    killers, plan, stuck = {1, 11, 21}, PLAN, 0
    while stuck < 8 and not killers <= set(plan.condemned):
        dying = {task: killer for task, rows in tasks.items() for killer in rows & killers}
        dying = {task: one for task, one in dying.items() if one not in plan.condemned}
        task = min(dying, key=lambda task: dying[task] in plan.suspects)
        crowd = tasks[task] - set(plan.condemned) - set(plan.suspects)
        mark = {dying[task]} if dying[task] in plan.suspects else crowd
        before = certainty(plan)
        plan = blame(plan, {task: frozenset(mark)}, task)
        stuck = 0 if certainty(plan) > before else stuck + 1
    assert set(plan.condemned) == killers
    assert stuck == 0


def test_who_was_not_alone_on_the_cluster_is_held_back_and_not_buried():
    """Two tasks had one record each in hand, and nothing tells whose worker died."""
    marks = {3: frozenset({1}), 4: frozenset({2})}
    found = blame(blame(PLAN, marks, None), marks, None)
    assert set(found.condemned) == set(found.suspects) == {1, 2}
    failed = pa.table([[1, 2, 3], ["s"] * 3, ["-"] * 3], schema=batch.FAILED)
    reasons = batch.condemn(failed, found)["reason"].to_pylist()
    assert [Reason.decode(text).final for text in reasons[:2]] == [False, False]
    assert reasons[2] == "-"
    again = blame(found, {5: frozenset({7, 8})}, None)
    assert set(again.condemned) & set(again.suspects) == {1, 2}


def test_the_task_that_failed_is_read_off_the_error():
    said = (
        "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent "
        "failure: Lost task 1.3 in stage 3.0 (TID 17) (host executor 1): ExecutorLostFailure"
    )
    assert failed_attempt(RuntimeError(said)) == 17
    assert failed_attempt(RuntimeError("no")) is None
