"""Sinks and the dead-letter store fail: at the start, for a while, during a write."""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(fault_job)

RULES = {"enrich": {"until": {3: 1, 14: 2}, "reject": [17]}}


def dead(key):
    return key == 17


def alive(key):
    return key != 17


@pytest.mark.parametrize(
    "partial",
    [
        pytest.param(False, id="before it writes", marks=pytest.mark.faults),
        pytest.param(True, id="after some rows"),
    ],
)
def test_a_sink_fails_for_a_while(spark, job, partial):
    it = job(fault_job.lines(40), mode="batch", rules=RULES, sink={"times": 2, "partial": partial})
    assert it.run_here(spark) is None
    assert {"sink-0-0", "sink-0-1", "sink-1-0"} <= set(it.marks("sink-*"))
    it.check(dead=dead, alive=alive)


def test_the_dead_letters_cannot_be_written(spark, job, tmp_path):
    store = tmp_path / "down" / "letters"
    store.parent.touch()  # a file, where a directory must be
    it = job(
        fault_job.lines(40),
        mode="batch",
        rules=RULES,
        dead_letters=str(store),
        settings={"max_sink_attempts": 2},
    )
    error = it.run_here(spark)
    assert f"{store.parent} must be a directory" in error
    store.parent.unlink()
    if it.found().decided:
        it.check(finished=False)
    assert it.run_here(spark) is None
    it.check(dead=dead, alive=alive)
