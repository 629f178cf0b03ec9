"""Suspected records: a crashing one is found, and no other rejected."""

from __future__ import annotations

import pyarrow as pa
import pytest
from worlds import Killed, anywhere, root_of

from ackcore.spark.base.reasons import FAILED
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.engine.decide import with_rejection_reasons
from ackcore.spark.engine.suspects import (
    failed_attempts,
    isolation_progress,
    rejections,
    update_suspects,
)
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.stores.run_files import object_at, remove_all
from ackcore.spark.tasks.inflight_markers import ALONE, ROOTS, Marker, TaskAttempt
from ackcore.topology.tuples import Reason

PLAN = Plan(0, 0, None, 0, careful=True)


@anywhere
def test_a_crashing_record_is_found_and_rejected(world):
    """Two crashes, then careful: suspects, alone once, alone twice; and then without it."""

    def behaves(line, attempt):
        if line in ("poison", "venom"):
            raise RuntimeError("worker exited unexpectedly")
        return None

    world.behaves = behaves
    progress, counts = world.process(0, ["a", "poison", "b", "venom"])
    assert world.rows == ["A", "B"]
    assert world.parked == ["poison", "venom"]
    assert (progress.dead, counts.acked) == (2, 2)
    assert counts.balanced
    last = world.runs[-1]
    key = last.key
    assert set(last.rejected) == {root_of(key, "lines", line, 0) for line in ("poison", "venom")}
    assert progress.runs == 9
    assert world.snapshot_epochs == [1]
    with world.driver()[0] as state:
        dead = state.decision(0).dead["lines"]
    reasons = {(one["type"], one["message"]) for one in dead["_ackcore_reason"].to_pylist()}
    assert reasons == {("KilledWorker", "killed its worker")}


@pytest.mark.parametrize("world", ["bucket"], indirect=True)
def test_a_crashing_record_is_found_where_lists_lag(world, s3):
    """The marker of the attempt that Spark names is read by its key."""

    def behaves(line, attempt):
        if line == "poison":
            raise RuntimeError(
                "Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most recent "
                "failure: Lost task 0.0 in stage 3.0 (TID 7) (host executor 1): ExecutorLostFailure"
            )
        return None

    s3.lagging = True
    world.behaves = behaves
    progress, counts = world.process(0, ["a", "poison", "b"])
    assert world.parked == ["poison"]
    assert (progress.dead, counts.acked, counts.balanced) == (1, 2, True)
    assert progress.runs == 6


def there(place):
    """Whether anything is at a place."""
    if not is_bucket(place):
        return place.exists()
    store, key = object_at(place)
    return bool(store.list(key))


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
    with world.driver()[0] as state:
        assert state.plan(0).suspects
        return state.runs.snapshot(0)


@anywhere
def test_markers_of_a_dead_drivers_tasks_count_for_nothing(world, suspicious):
    # The plan on record has the suspects of the crash that was seen; what was in flight when the
    # driver died is not among them.
    _, counts = world.process(0, ["a", "b"])
    assert (counts.acked, counts.dead) == (2, 0)
    assert world.runs[-1].rejected == ()


@anywhere
def test_suspects_are_of_rows_that_are_kept(world, suspicious):
    """Suspects are run among the same rows, or not at all."""
    # The source is other rows now, as a bounded one may be; those of before are run.
    _, counts = world.process(0, ["c"])
    assert (world.rows, counts.acked) == (["A", "B"], 2)
    assert world.runs[-1].suspects
    assert not there(suspicious)


@anywhere
def test_suspects_are_forgotten_with_their_rows(world, suspicious):
    assert there(suspicious)
    remove_all(suspicious)
    _, counts = world.process(0, ["c"])
    assert (world.rows, counts.acked) == (["C"], 1)
    assert world.runs[-1].careful
    assert world.runs[-1].suspects == ()


def of(*crashes):
    """Markers of attempts that died: (partition, attempt, *roots)."""
    found = [
        Marker(
            TaskAttempt(1, partition, attempt),
            ALONE if len(roots) == 1 else ROOTS,
            roots=frozenset(roots),
        )
        for partition, attempt, *roots in crashes
    ]
    return sorted(found, key=lambda marker: marker.attempt)


def test_there_is_no_suspect_without_a_marker():
    assert update_suspects(PLAN, [], None) == PLAN
    assert update_suspects(PLAN, of((0, 3)), 3) == PLAN
    assert set(update_suspects(PLAN, of((0, 3, 1, 2)), None).suspects) == {1, 2}


def test_the_task_that_failed_the_job_counts():
    markers = of((0, 3, 1), (1, 4, 2, 5))
    found = update_suspects(update_suspects(PLAN, markers, 3), markers, 3)
    assert (found.suspects, found.rejected) == ((), (1,))
    assert set(update_suspects(PLAN, markers[1:], 9).suspects) == {2, 5}


def test_attempts_that_others_followed_count_as_well():
    """Only the last ones at other tasks may have been killed for the job that was given up."""
    markers = of((0, 3, 1, 2), (0, 5, 1), (0, 7, 1), (1, 4, 8), (1, 6, 8), (1, 9, 8), (2, 2, 9))
    found = update_suspects(PLAN, markers, 7)
    assert set(found.rejected) == {1, 8}
    assert 9 not in found.suspects


def test_crashing_records_do_not_hide_each_other():
    """A task that runs in bulk dies faster than one that runs its suspects one by one."""
    tasks = {3: {1, 2, 4}, 4: {11, 12, 14}, 5: {21, 22}}
    crashing, plan, stuck = {1, 11, 21}, PLAN, 0
    while stuck < 8 and not crashing <= set(plan.rejected):
        dying = {task: one for task, rows in tasks.items() for one in rows & crashing}
        dying = {task: one for task, one in dying.items() if one not in plan.rejected}
        task = min(dying, key=lambda task: dying[task] in plan.suspects)
        crowd = tasks[task] - set(plan.rejected) - set(plan.suspects)
        flying = {dying[task]} if dying[task] in plan.suspects else crowd
        before = isolation_progress(plan)
        plan = update_suspects(plan, of((task, task, *flying)), task)
        stuck = 0 if isolation_progress(plan) > before else stuck + 1
    assert set(plan.rejected) == crashing
    assert stuck == 0


def test_a_record_that_was_not_alone_on_the_cluster_is_not_rejected_for_good():
    """Two tasks had one record each in flight, and which process died is unknown."""
    markers = of((0, 3, 1), (1, 4, 2))
    found = update_suspects(update_suspects(PLAN, markers, None), markers, None)
    assert set(found.rejected) == set(found.suspects) == {1, 2}
    failed = pa.table([[1, 2, 3], ["s"] * 3, ["-"] * 3], schema=FAILED)
    reasons = with_rejection_reasons(failed, rejections(found))["reason"].to_pylist()
    assert [Reason.decode(text).final for text in reasons[:2]] == [False, False]
    assert reasons[2] == "-"
    again = update_suspects(found, of((2, 5, 7, 8)), None)
    assert set(again.rejected) & set(again.suspects) == {1, 2}


def test_a_record_that_several_tasks_died_of_is_rejected_for_good():
    """Its tuples went to two tasks, and an executor's crash failed the stage, not a task."""
    found = update_suspects(PLAN, of((0, 3, 1, 2), (0, 5, 1), (0, 7, 1), (1, 6, 1)), None)
    assert (found.suspects, found.rejected) == ((), (1,))


def test_the_task_that_failed_is_read_off_the_error():
    said = (
        "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent "
        "failure: Lost task 1.3 in stage 3.0 (TID 17) (host executor 1): ExecutorLostFailure"
    )
    assert failed_attempts(RuntimeError(said), 2) == [(1, 1, 17), (2, 1, 17)]
    assert failed_attempts(RuntimeError("no"), 2) == []
