"""Whatever dies, a call whose answer was written down is not made again: counted at the service."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import fault_job
import pytest
from pyspark import cloudpickle

import ackcore.spark.engine.action

cloudpickle.register_pickle_by_value(fault_job)

CLUSTER = "local-cluster[2,1,1024]"
PLACE = pytest.mark.parametrize("place", ["disk", "bucket"])
LINES = fault_job.lines(60)
#: Every word of every line is a call.
CALLS = {f"{key}-{row['at']}-0" for key in LINES for row in fault_job.rows_of(LINES[key])}


@pytest.fixture
def service(tmp_path):
    """``service(*kill)`` starts the server; what it returns counts its calls."""
    processes = []

    def service(*kill):
        directory = tmp_path / "service"
        directory.mkdir()
        (directory / "kill").write_text("\n".join(kill))
        script = Path(__file__).with_name("call_server.py")
        processes.append(subprocess.Popen([sys.executable, str(script), str(directory)]))
        until = time.monotonic() + 60
        while not (directory / "port").exists():
            assert time.monotonic() < until, "the server does not start"
            time.sleep(0.01)
        return Service(directory)

    yield service
    for process in processes:
        process.kill()
        process.wait()


class Service:
    def __init__(self, directory):
        self.calls = directory / "calls"
        self.port = int((directory / "port").read_text())

    def counted(self, what):
        lines = [line.split() for line in self.calls.read_text().splitlines()]
        return Counter(key for kind, key in lines if kind == what)


def twice(*keys):
    return {key: 2 if key in keys else 1 for key in CALLS}


def test_workers_are_killed_between_calls_and_in_one(spark, job, service):
    """A call that was out is made again; those that had come back, before it, are not."""
    killed = ("5-1-0", "33-0-0")
    calls = service(*killed)
    rules = {"enrich": {"kill_once": [9, 45]}, "count": {"kill_once": [7]}}
    it = job(LINES, mode="batch", rules=rules, server=calls.port)
    assert it.run_here(spark) is None
    assert it.marks("*kill*") == ["count-kill-7", "enrich-kill-45", "enrich-kill-9"]
    assert calls.counted("begun") == twice(*killed)
    assert calls.counted("answered") == twice()
    it.check(dead=())


def test_a_service_that_answers_otherwise_has_no_run_repeated(spark, job, service, monkeypatch):
    """Shuffle files are lost after others have read them, and the tasks that run again agree.

    Without a journal this is ``test_shuffle_files_are_lost[otherwise]``: two runs.
    """
    calls = service()
    it = job(LINES, files=1, server=calls.port)
    marks = str(it.directory / "marks")
    losing = fault_job.losing(marks, fault_job.LAST, fault_job.remove_shuffle_files)
    monkeypatch.setattr(ackcore.spark.engine.action, "SettleStage", losing)
    said = fault_job.run_job(spark, it.config)
    assert said["error"] is None
    assert it.marks("lost-*")
    assert [one["runs"] for one in said["progress"]] == [1]
    assert calls.counted("begun") == twice()
    it.check(dead=())


@PLACE
def test_a_run_that_is_repeated_calls_nobody(spark, job, service, failing_at, place):
    """The driver fails when all has run, and after its decision; the next one finds the answers."""
    calls = service()
    settings = {"max_runs": 1}
    it = job(LINES, mode="batch", server=calls.port, settings=settings, place=place)
    for step in ("ran", "checked", "decided"):
        failing_at(step)
        assert "failpoint" in it.run_here(spark), step
    failing_at()
    assert it.run_here(spark) is None
    assert calls.counted("begun") == twice()
    it.check(dead=())
    left = (it.place.fetched() / "checkpoint/ackcore/work").glob("*")
    assert list(left) == []  # the journal went with the micro-batch's work


def test_workers_are_killed_with_many_calls_out(spark, job, service):
    """Outstanding calls are made again by the one worker that dies among them, and no others."""
    killed = ("5-1-0", "33-0-0")
    calls = service(*killed)
    rules = {"count": {"kill_once": [7]}}
    it = job(LINES, mode="batch", rules=rules, enrich="async", server=calls.port)
    assert it.run_here(spark) is None
    assert it.marks("*kill*") == ["count-kill-7"]
    begun, answered = calls.counted("begun"), calls.counted("answered")
    assert begun.keys() == answered.keys() == CALLS
    assert all(begun[key] >= 2 for key in killed)
    most = fault_job.EnrichAsync.max_concurrency
    assert sum(begun.values()) - len(CALLS) <= most * len(killed)
    assert sum(answered.values()) - len(CALLS) <= (most - 1) * len(killed)
    it.check(dead=())


@pytest.mark.faults
@pytest.mark.parametrize("enrich", ["row", "async"])
@PLACE
def test_drivers_are_killed(job, service, enrich, place):
    calls = service()
    it = job(LINES, message_id="id", server=calls.port, files=4, enrich=enrich, place=place)
    for step in ("ran", "checked:1", "ran:2", "decided:2"):
        assert it.run(failpoints=step).killed
        it.check(finished=False)
    assert it.run().error is None
    assert calls.counted("begun") == twice()
    it.check(dead=())


@pytest.mark.faults
def test_executors_are_killed(job, service):
    """Each has one core, so that no call of another task is out as one dies."""
    calls = service("21-3-0")
    rules = {"enrich": {"executor_once": [13, 43]}, "count": {"executor": 1}}
    it = job(LINES, message_id="id", server=calls.port, rules=rules)
    assert it.run(master=CLUSTER).error is None
    assert len(it.marks("*executor*")) == 3
    assert calls.counted("begun") == twice("21-3-0")
    assert calls.counted("answered") == twice()
    it.check(dead=())
