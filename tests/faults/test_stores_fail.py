"""Sinks and the dead-letter store fail: for a while, for ever, and in the midst of a write."""

from __future__ import annotations

import fault_job
import pytest
from pyspark import cloudpickle

import ackcore.spark.sinks.sink_batch

cloudpickle.register_pickle_by_value(fault_job)

RULES = {"enrich": {"until": {3: 1, 14: 2}, "reject": [17]}}


def dead(key):
    return key == 17


def alive(key):
    return key != 17


@pytest.mark.parametrize("partial", [False, True], ids=["before it writes", "after some rows"])
def test_a_sink_fails_for_a_while(spark, job, partial):
    it = job(fault_job.lines(40), mode="batch", rules=RULES, sink={"times": 2, "partial": partial})
    assert it.run_here(spark) is None
    assert {"sink-0-0", "sink-0-1", "sink-1-0"} <= set(it.marks("sink-*"))
    it.check(dead=dead, alive=alive)


def test_the_counts_tell_of_a_sink_that_does_not_replace(spark, job):
    it = job(
        fault_job.lines(40),
        mode="batch",
        rules=RULES,
        sink={"times": 1, "partial": True, "mode": "append"},
    )
    assert it.run_here(spark) is None
    with pytest.raises(AssertionError, match="rows too many in the sink"):
        it.check()


def test_the_counts_tell_of_rows_that_are_not_acked(spark, job, monkeypatch):
    """A sink that is given all that was emitted, failed records' rows too."""
    monkeypatch.setattr(
        ackcore.spark.sinks.sink_batch,
        "acked_rows",
        lambda batch, failed: None,
    )
    it = job(fault_job.lines(40), mode="batch", rules=RULES)
    assert it.run_here(spark) is None
    with pytest.raises(AssertionError, match="rows too many in the sink"):
        it.check()


def test_a_sink_fails_for_ever(spark, job):
    """The query ends with its name; started again, it goes on from what was decided."""
    it = job(
        fault_job.lines(40),
        files=1,
        rules={"enrich": {**RULES["enrich"], "once": list(range(0, 40, 5))}},
        otherwise=True,
        settings={"max_sink_attempts": 3},
    )
    for _ in range(2):
        said = fault_job.run_job(spark, {**it.config, "sink": {"times": 1000}})
        assert said["error"].startswith("SinkError: sink 'count' failed 3 times with micro-batch 0")
        found = it.check(finished=False)
        assert found.written == {}
    said = fault_job.run_job(spark, {**it.config, "sink": {}})
    assert said["error"] is None
    # The first micro-batch was decided: no bolt has seen it again.
    assert [one["runs"] for one in said["progress"]][:2] == [0, 1]
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


def test_the_dead_letters_break_down(spark, job, tmp_path):
    """The store was there when the query began."""
    store = tmp_path / "letters"
    it = job(
        fault_job.lines(40),
        mode="batch",
        rules={"enrich": {**RULES["enrich"], "raise": [23]}},
        dead_letters=str(store),
        settings={"max_sink_attempts": 2, "max_attempts": 3},
        sink={},
    )
    away = tmp_path / "away"
    breaks = fault_job.Sink.__call__

    def write(self, frame, batch_id):
        breaks(self, frame, batch_id)
        if batch_id == 0:
            store.rename(away)
            store.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fault_job.Sink, "__call__", write)
        error = it.run_here(spark)
    assert error.startswith("SinkError: the dead-letter store failed 2 times with micro-batch 0")
    store.unlink()
    away.rename(store)
    it.check(finished=False)
    assert it.run_here(spark) is None
    it.check(dead=lambda key: key in (17, 23))
