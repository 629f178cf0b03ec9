"""Sinks and the dead-letter store fail; checkpoints are foreign or read-only."""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(fault_job)

RULES = {"enrich": {"until": {3: 1, 14: 2}, "reject": [17]}}


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
    it.check(dead={17})


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
    it.check(dead={17})


#: Some records still wait when the second micro-batch begins.
LONGER = {"enrich": {"until": {3: 2, 14: 3}, "reject": [17]}}


@pytest.fixture
def interrupted(spark, job, failing_at):
    """``interrupted()``: a job that ended before its second micro-batch, with records waiting."""

    def interrupted(**config):
        it = job(fault_job.lines(40), mode="batch", rules=LONGER, **config)
        failing_at("planned:1")
        assert "failpoint" in it.run_here(spark)
        failing_at()
        assert it.check(finished=False).waiting
        return it

    return interrupted


def test_the_checkpoint_of_another_topology_is_refused(spark, interrupted):
    it = interrupted()
    error = it.run_here(spark, message_id="id")
    assert error.startswith("CheckpointForeign: ")
    assert "lines" in error
    assert it.run_here(spark, mode="stream").startswith("CheckpointForeign: ")
    # A bolt may be written anew: its class is not its place in the topology.
    assert it.run_here(spark, enrich="batch") is None
    it.check(dead={17})


@pytest.mark.faults
def test_a_checkpoint_that_cannot_be_written_is_an_error(interrupted):
    it = interrupted()
    checkpoint = it.directory / "checkpoint"
    everything = [checkpoint, *checkpoint.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    error = it.run(obey=True).error
    assert error.startswith("CheckpointReadOnly: ")
    for path in everything:
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert it.run(obey=True).error is None
    it.check(dead={17})
