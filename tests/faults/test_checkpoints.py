"""Checkpoints with waiting records that are foreign or read-only."""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle

cloudpickle.register_pickle_by_value(fault_job)

RULES = {"enrich": {"until": {3: 2, 14: 3}, "reject": [17]}}


def dead(key):
    return key == 17


def alive(key):
    return key != 17


@pytest.fixture
def interrupted(spark, job, failing_at):
    """``interrupted()``: a job that ended before its second micro-batch, with records waiting."""

    def interrupted(**config):
        it = job(fault_job.lines(40), mode="batch", rules=RULES, **config)
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
    it.check(dead=dead, alive=alive)


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
    it.check(dead=dead, alive=alive)
