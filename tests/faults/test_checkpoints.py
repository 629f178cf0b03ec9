"""Checkpoints damaged, foreign, locked or read-only; clocks and sources that stand still."""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle

import ackcore.spark.engine.batch
from ackcore.spark.heartbeat import Pacemaker
from ackcore.spark.query import start

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


def damaged(path):
    """Ways in which a file may be found: each a function that does it."""
    whole = path.read_bytes()
    middle = len(whole) // 2
    changed = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    return whole, {
        "truncated": lambda: path.write_bytes(whole[:-7]),
        "emptied": lambda: path.write_bytes(b""),
        "changed": lambda: path.write_bytes(changed),
        "gone": path.unlink,
    }


def test_a_damaged_checkpoint_is_refused(spark, interrupted):
    """Whatever is missing or not as it was written: nothing begins anew in silence."""
    it = interrupted()
    checkpoint = it.directory / "checkpoint" / "ackcore"
    for file in ["head.json/*.version", "state/0.*waiting-*.arrow"]:
        path = max(checkpoint.glob(file))
        whole, ways = damaged(path)
        for way, damage in ways.items():
            if (file, way) == ("head.json/*.version", "gone"):
                continue  # as if the driver had died before that step
            damage()
            error = it.run_here(spark)
            assert error is not None, (file, way)
            assert error.startswith("CheckpointCorrupt: "), (file, way, error)
            assert str(path.parent) in error
            assert "Restore the whole checkpoint directory" in error
            path.write_bytes(whole)
    head = checkpoint / "head.json"
    head.rename(checkpoint / "away")
    assert it.run_here(spark).startswith("CheckpointCorrupt: ")
    (checkpoint / "away").rename(head)
    # What is put back is as good as new: nothing was touched.
    assert it.run_here(spark) is None
    it.check(dead=dead, alive=alive)


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


def quiet(spark, job, **more):
    """A stream that has all its data at once, and one record that fails."""
    it = job(
        fault_job.lines(20),
        files=1,
        message_id="id",
        rules={"enrich": {"until": {13: 2}}},
        trigger=None,
        until_decided=20,
        **more,
    )
    return it, it.run_here(spark)


def test_a_quiet_source_with_one_failed_record(spark, job):
    it, error = quiet(spark, job)
    assert error is None
    assert it.check(alive=lambda key: True).totals["retried"] == 2


def test_without_a_heartbeat_it_waits_for_ever(spark, job, monkeypatch):
    monkeypatch.setattr(Pacemaker, "schedule", lambda self, due_ms: None)
    _, error = quiet(spark, job, patience_s=8)
    assert "it has come to rest" in error


def test_a_clock_that_goes_back(spark, job):
    """By an hour, when the first micro-batch is done: the hour is not waited for."""
    it = job(fault_job.lines(40), mode="batch", rules=RULES, clock_back_ms=3_600_000)
    assert it.run_here(spark) is None
    it.check(dead=dead, alive=alive)


def test_a_clock_that_goes_back_is_waited_for_unless_it_is_steadied(spark, job, monkeypatch):
    monkeypatch.setattr(ackcore.spark.engine.batch, "SteadyClock", lambda clock, at_least: clock)
    it = job(fault_job.lines(40), mode="batch", rules=RULES, clock_back_ms=3_600_000)
    assert "told to wait for" in it.run_here(spark)


def test_a_second_query_on_a_checkpoint_is_refused(spark, job):
    it = job(fault_job.lines(40), message_id="id", rules=RULES)
    config = {**it.config, "trigger": None}
    topology = fault_job.topology_of(spark, config)
    query = start(topology, spark, it.directory / "checkpoint")
    try:
        # In this process, and in another one.
        assert it.run_here(spark).startswith("CheckpointInUse: ")
        assert query.is_active
    finally:
        query.stop()
    assert it.run_here(spark) is None
    it.check(dead=dead, alive=alive)
