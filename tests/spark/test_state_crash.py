"""Killed at any file operation, the checkpoint opens in the old or the new state."""

from __future__ import annotations

import os
import shutil

import pytest
from checkpoints import OPEN, Killed, Killer, ask, decision, died, ids, records, roots

from ackcore.spark.base.checksummed import write_batches
from ackcore.spark.base.schemas import FailedFile
from ackcore.spark.checkpoint.dead_records import Dead
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.store import DeadLetters


def wrote(directory, name, table):
    return directory / write_batches(directory, name, table.schema, table.to_batches(), large=True)


@pytest.fixture(scope="module")
def killer():
    return Killer()


def steps(state, until):
    """The protocol from wherever it stands: each step is a name after which it is complete.

    In micro-batch n two new records fail, due ones are tried again and one of them dies; the
    clicks wait for ever.
    """
    number = 0 if state.last_plan is None else state.last_plan
    while number < until:
        if state.is_done(number):
            state.prune(number)
            yield f"pruned {number}"
            number += 1
            continue
        plan = state.plan(number)
        if plan is None:
            plan = state.make_plan(number, 1000 + 10 * number)
            state.write_plan(plan)
        yield f"planned {number}"
        before = state.decision(number - 1).totals if number else {"dead": 0, "tried": 0}
        if state.decision(number) is None:
            due, waiting, _ = state.split_due(plan)
            tried = due["lines"] if "lines" in due else records(0, 0)
            work = state.runs.new(number)
            # One failed alone, and tasks wrote the other, and one of two dead.
            waiting = waiting.plus("lines", records(10 * number, 1))
            path = wrote(work, "waiting-lines", records(10 * number + 1, 1))
            due_ms = 1000 + 10 * number + 1
            waiting = waiting.plus(
                "lines", FailedFile("lines", False, path, 1, None, due_ms, due_ms - 1000)
            )
            if "clicks" not in waiting:
                waiting = waiting.plus("clicks", records(0, 3, due_ms=10**9))
            dead = Dead(
                {
                    "lines": [
                        FailedFile(
                            "lines",
                            False,
                            wrote(work, "dead-lines", tried[:1]),
                            len(tried[:1]),
                            None,
                        )
                    ]
                }
            )
            totals = {"dead": before["dead"] + len(tried[:1])}
            totals["tried"] = before["tried"] + len(tried)
            state.write_decision(
                decision(
                    number, waiting, dead, nonacked=roots(number), totals=totals, work=work.name
                )
            )
        yield f"decided {number}"
        state.write_done(number)
        yield f"done {number}"


def snapshot(state):
    """All that counts of a state."""
    last = state.last_plan
    if last is None:
        return None
    if state.decision(last) is None and last:
        told = last - 1, state.decision(last - 1)
    else:
        told = last, state.decision(last)
    plan = state.plan(last)
    return (
        (last, state.last_done, plan, told[0]),
        told[1]
        and (
            {name: ids(table) for name, table in told[1].waiting.items()},
            {name: ids(table) for name, table in told[1].dead.items()},
            told[1].nonacked.to_pydict(),
            told[1].totals,
        ),
        state.pending_replays(),
    )


UNTIL = 4


def ask_again(checkpoint):
    """A dead letter is asked for again before the first micro-batch."""
    if not store_of(checkpoint).owner():
        ask(checkpoint)


@pytest.mark.parametrize("every_nth", [3, pytest.param(1, marks=pytest.mark.faults)])
def test_killed_at_any_instant_it_opens_in_the_old_or_the_new_state(
    tmp_path, killer, monkeypatch, every_nth
):
    """And goes on to the same end."""
    monkeypatch.setattr(os, "fsync", killer.fsync)
    undisturbed = tmp_path / "undisturbed"
    # The state before, and after each step.
    after = [None]
    with OPEN(undisturbed) as state:
        ask_again(undisturbed)
        after = [snapshot(state)]
        for _ in steps(state, UNTIL):
            after.append(snapshot(state))
    killer.arm(None)
    with OPEN(tmp_path / "counted") as state:
        killer.active = False
        ask_again(tmp_path / "counted")
        killer.active = True
        for _ in steps(state, UNTIL):
            pass
    killer.disarm()
    total = killer.count
    assert total > 150
    for left in range(0, total, every_nth):
        checkpoint = tmp_path / str(left)
        reached, state = 0, None
        killer.arm(left)
        try:
            state = OPEN(checkpoint)
            killer.active = False
            ask_again(checkpoint)
            killer.active = True
            for _ in steps(state, UNTIL):
                reached += 1
        except Killed:
            pass
        finally:
            killer.disarm()
        if state is None:
            with OPEN(checkpoint):
                ask_again(checkpoint)
        else:
            state.records._file_lock.close()  # as the system does for a dead process
        with OPEN(checkpoint) as state:
            assert snapshot(state) in after[reached : reached + 2], f"killed at {left}"
            for _ in steps(state, UNTIL):
                pass
            assert snapshot(state) == after[-1], f"killed at {left}"
            assert not store_of(checkpoint).requested()
        kept = {path.name.split(".")[0] for path in (checkpoint / "ackcore/state").iterdir()}
        assert kept == {"0", "2", "3"}
        shutil.rmtree(checkpoint)


@pytest.mark.parametrize("decided", [False, True])
def test_killed_while_former_runs_are_removed(tmp_path, killer, monkeypatch, decided):
    monkeypatch.setattr(os, "fsync", killer.fsync)
    made = tmp_path / "made"
    with OPEN(made) as state:
        state.write_plan(state.make_plan(0, 0))
        runs = [state.runs.new(0)]
        state.runs._made = None
        runs.append(state.runs.new(0))
        for run in runs:
            (run / "rows").write_text("x")
        if decided:
            state.write_decision(decision(0, work=runs[0].name))
    for left in range(100):
        checkpoint = shutil.copytree(made, tmp_path / str(left))
        killer.arm(left)
        try:
            OPEN(checkpoint).close()
            finished = True
        except Killed:
            finished = False
        killer.disarm()
        with OPEN(checkpoint) as state:
            found = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*/rows")]
            assert found == [f"ackcore/work/{runs[0].name}/rows"] * decided
            assert (state.decision(0) is not None) == decided
        if finished:
            break
    assert finished
    assert left > 3


def test_what_gets_a_name_is_on_the_disk_and_then_its_name_is(checkpoint, monkeypatch):
    """A machine that stops forgets what was not synced: no name may lead to that."""
    fsync, replace, link = os.fsync, os.replace, os.link
    synced, unsure = set(), []

    def syncs(handle):
        fsync(handle)
        found = os.fstat(handle)
        synced.add(found.st_ino)
        unsure[:] = [inode for inode in unsure if inode != found.st_ino]

    def replaces(old, new):
        assert os.stat(old).st_ino in synced, f"{old} is not on the disk"
        replace(old, new)
        unsure.append(os.stat(os.path.dirname(new)).st_ino)

    def links(old, new):
        assert os.stat(old).st_ino in synced, f"{old} is not on the disk"
        link(old, new)
        unsure.append(os.stat(os.path.dirname(new)).st_ino)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", replaces)
    monkeypatch.setattr(os, "link", links)
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key, None, None, state.records)()
        for number, _ in enumerate(steps(state, 3)):
            assert unsure == []
            letters.write(number, {"lines": died(0, 2)})
            assert unsure == []
        assert state.last_done == 2


def test_how_often_a_micro_batch_waits_for_the_disk(checkpoint, monkeypatch):
    """Twice for each file with its name: plan, decision, letters, their index and mark.

    Once for its tables' names, each table, and the directory of its run.
    """
    waits = []
    monkeypatch.setattr(os, "fsync", waits.append)
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key, None, None, state.records)()
        for number in range(4):
            waits.clear()
            state.write_plan(state.make_plan(number, 0))
            work, dead = state.runs.new(number), {"lines": died(2 * number, 2)}
            waiting = {"lines": records(100 + number, 3)}
            state.write_decision(decision(number, waiting, dead, work=work.name))
            letters.write(number, dead)
            state.write_done(number)
            state.prune(number)
        assert len(waits) == 5 * 2 + 1 + 2 + 1
