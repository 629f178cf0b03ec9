"""Drivers that are killed, by SIGKILL, at each step of a sink that refuses rows."""

from __future__ import annotations

import signal

import pytest
from killed_sinks import BATCHES, DiskWorld, drive, in_processes

from ackcore.spark.checkpoint.state import State

KEPT = sorted(line.upper() for lines in BATCHES for line in lines if not line.startswith("bad"))
DEAD = sorted(line for lines in BATCHES for line in lines if line.startswith("bad"))
STEPS = [
    "planned",
    "ran",
    "decided",
    "refused",
    "in-transaction",
    "in-sink",
    "refusals-closed",
    "in-dead-letters",
    "acted",
    "marked",
]


@pytest.fixture(scope="module")
def driver():
    """``driver(path, kind, points)`` runs one, and returns what it ended with."""
    return in_processes(drive, 60)


#: About what is refused.  The others are in `make faults`, six of them in test_refused_rows.py.
QUICK = ["refused", "in-transaction", "refusals-closed"]


@pytest.mark.parametrize(
    "steps", [QUICK, pytest.param(STEPS, marks=pytest.mark.faults)], ids=["quick", "each"]
)
@pytest.mark.parametrize("kind", ["return", "raise", "isolate"])
def test_killed_at_every_step_each_row_is_written_or_dead_once(tmp_path, driver, kind, steps):
    """One driver after the other dies a step further on, in both micro-batches."""
    reached = []
    for number in range(len(BATCHES)):
        # What is returned is on record behind the write, what is raised before it.
        late = {"refused": "refusals-closed"} if kind == "return" else {}
        for step in sorted(steps, key=lambda step: STEPS.index(late.get(step, step))):
            ended = driver(tmp_path, kind, f"{step}:{number}")
            assert ended in (0, -signal.SIGKILL)
            reached += [step] if ended else []
            world = DiskWorld(tmp_path, kind)
            # Whatever is there by now is of what was decided, once.
            assert all(world.kept().count(line) == 1 for line in world.kept())
            assert set(world.kept()) <= set(KEPT)
            assert world.letters() == DEAD[: len(world.letters())]
    assert driver(tmp_path, kind, "") == 0
    world = DiskWorld(tmp_path, kind)
    assert (world.kept(), world.letters()) == (KEPT, DEAD)
    state, engine = world.driver()
    with state:
        assert isinstance(state, State)
        counts = engine.counts
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (8, 5, 3, 0)
    assert counts.balanced
    # Each was reached in each micro-batch, but what only a sink that is asked meets.
    assert set(reached) == set(steps)
