"""Trackers of both backends against sets, step by step."""

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from offset_oracle import STEPS, Machine

#: 1_000_000 takes minutes a backend.
RANDOM_STEPS = int(os.environ.get("ACKCORE_OFFSET_STEPS", "10000"))
STEPS_A_RUN = 250

NUMBERS = st.lists(
    st.sampled_from([0, 0, 0, 1, 2, 3, 7, 19, 40]) | st.integers(0, 700), max_size=12
)
STEP = st.tuples(st.sampled_from(STEPS), NUMBERS, st.sampled_from(["column", "scalars"]))


@pytest.fixture(scope="session")
def OffsetTracker(backend):
    return backend.OffsetTracker


@given(st.sampled_from([0, 1, 63, 64, 1000]), st.lists(STEP, max_size=40))
def test_any_steps(OffsetTracker, base, steps):
    """Short and shrinkable."""
    machine = Machine(OffsetTracker, base)
    for name, numbers, how in steps:
        getattr(machine, name)(numbers, how)
        machine.check()


def test_many_random_steps(OffsetTracker):
    """Long runs, so that words are packed, dropped and added; seeded, and the seed is shown."""
    for run in range(RANDOM_STEPS // STEPS_A_RUN):
        chance = random.Random(run)
        gap = chance.choice([0, 0, 1, 5, 300, 700])  # how far apart records are, at most
        machine = Machine(OffsetTracker, chance.choice([0, 5, 64, 10_000]))
        for at in range(STEPS_A_RUN):
            name = chance.choice(STEPS)
            n = chance.choice([0, 1, 3, 10, 30, 60 if gap < 300 else 5])
            most = gap if name == "read" else chance.choice([40, 700])
            numbers = [chance.randint(0, most) for _ in range(n)]
            try:
                getattr(machine, name)(numbers, chance.choice(["column", "scalars"]))
                machine.check()
            except AssertionError as error:
                raise AssertionError(f"run {run}, step {at}: {name} {numbers}") from error
