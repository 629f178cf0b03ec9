"""Workers, executors and shuffle files go, and bolts raise: no record is lost, none comes twice."""

from __future__ import annotations

import re

import fault_job
import pytest
from pyspark import cloudpickle

import ackcore.spark.engine.action
from ackcore.spark import dead_letters
from ackcore.spark.engine import decide

cloudpickle.register_pickle_by_value(fault_job)

ALIKE = pytest.mark.parametrize("otherwise", [False, True], ids=["alike", "otherwise"])
PLACE = pytest.mark.parametrize("place", ["disk", "bucket"])
ROW_OR_BATCH = pytest.mark.parametrize("enrich", ["row", "batch"])


@ROW_OR_BATCH
def test_one_percent_raises_and_some_are_poison(spark, job, enrich):
    poison = {n for n in range(5, 1000, 57) if n % 8 and n % 10}
    it = job(
        fault_job.lines(1000),
        mode="batch",
        message_id="id",
        enrich=enrich,
        rules={"enrich": {"rate": 0.01, "reject": sorted(poison)}, "count": {"rate": 0.002}},
        settings={"max_attempts": 12},
    )
    assert it.run_here(spark) is None
    found = it.check(poison)
    assert found.totals["retried"] >= 8
    assert {letter.error_type for letter in found.dead} == {"Reject"}


@ALIKE
def test_a_task_is_tried_again(spark, job, otherwise):
    """A worker of each stage is killed once."""
    it = job(
        fault_job.lines(60),
        mode="batch",
        rules={"enrich": {"kill_once": [5, 45]}, "count": {"kill_once": [7]}},
        otherwise=otherwise,
    )
    assert it.run_here(spark) is None
    assert it.marks("*kill*") == ["count-kill-7", "enrich-kill-45", "enrich-kill-5"]
    it.check(dead=())


#: Spark compares what a map task writes with what it wrote before, and then runs all of its
#: consumers again: by checksums that do not mind the order of rows.
CHECKSUM = "spark.sql.shuffle.orderIndependentChecksum"
UNCHECKED = {
    f"{CHECKSUM}.{name}": "false"
    for name in ("enabled", "enableFullRetryOnMismatch", "enableQueryLevelRollbackOnMismatch")
}


@pytest.fixture
def unchecked(spark):
    """Spark as it was before 4.1, which is content with whatever it gets."""
    before = {key: spark.conf.get(key) for key in UNCHECKED}
    for key, value in UNCHECKED.items():
        spark.conf.set(key, value)
    yield
    for key, value in before.items():
        spark.conf.set(key, value)


@pytest.fixture
def lost(spark, job, monkeypatch):
    """``lost(otherwise)`` runs a job of which shuffle files are lost; returns it and its runs.

    They go when the settle stage is under way.  A result that one of its tasks has returned is not
    taken back by Spark, so what the others return must be of the same run of the stages before.
    """

    def lost(otherwise, inline_bytes=decide.INLINE_BYTES):
        monkeypatch.setattr(decide, "INLINE_BYTES", inline_bytes)
        # What failed in one run succeeds in the next: so much for answering otherwise.
        rules = {"until": {3: 1}, "once": list(range(1, 80, 2)) if otherwise else []}
        it = job(fault_job.lines(80), files=1, rules={"enrich": rules}, otherwise=otherwise)
        marks = str(it.directory / "marks")
        losing = fault_job.losing(marks, fault_job.LAST, fault_job.remove_shuffle_files)
        monkeypatch.setattr(ackcore.spark.engine.action, "SettleStage", losing)
        said = fault_job.run_job(spark, it.config)
        assert said["error"] is None
        assert it.marks("lost-*")
        return it, said["progress"][0]["runs"]

    return lost


@pytest.mark.parametrize(
    ("otherwise", "checks", "inline"),
    [
        pytest.param(False, True, decide.INLINE_BYTES, id="alike"),
        pytest.param(True, True, 0, id="otherwise, in files"),
        pytest.param(True, False, decide.INLINE_BYTES, id="otherwise, and Spark does not mind"),
        *(
            pytest.param(*each, marks=pytest.mark.faults, id=f"more {n}")
            for n, each in enumerate(
                [(False, True, 0), (True, True, decide.INLINE_BYTES), (True, False, 0)]
            )
        ),
    ],
)
def test_shuffle_files_are_lost(request, lost, otherwise, checks, inline):
    """Stages run again: if they answer alike, that will do; else the micro-batch is run again."""
    if not checks:
        request.getfixturevalue("unchecked")
    it, ran = lost(otherwise, inline)
    it.check(dead=())
    assert ran == (2 if otherwise else 1)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("enrich", "where", "how"),
    [("row", "enrich", "kill"), ("batch", "enrich", "exit"), ("row", "count", "kill")],
)
@PLACE
def test_a_record_that_kills_its_worker(job, place, enrich, where, how):
    killers = [13, 46]
    it = job(
        fault_job.lines(60),
        mode="batch",
        place=place,
        message_id="id",
        enrich=enrich,
        rules={where: {how: killers, "until": {5: 1}}},
    )
    ended = it.run(master="local[2]")
    assert ended.error is None, ended.error
    found = it.check(killers)
    assert {letter.error_type for letter in found.dead} == {"KilledWorker"}


@pytest.mark.parametrize("shuffled", [False, True], ids=["in order", "in any order"])
def test_a_record_that_kills_its_worker_once_in_a_batch(spark, job, shuffled):
    it = job(
        fault_job.lines(20),
        mode="batch",
        message_id="id",
        rules={"enrich": {"exit": [13]}},
        settings={"careful_after": 0},
        shuffled=shuffled,
    )
    assert it.run_here(spark) is None
    it.check(dead={13})


def letter_of(spark, it, kind):
    """The only dead letter of a kind."""
    letters = dead_letters(it.directory / "checkpoint", spark)
    (letter,) = letters.where(letters.error_type == kind).collect()
    return letter


@pytest.mark.parametrize(("where", "tasks"), [("enrich", 1), ("count", 2)])
def test_a_record_that_crashes_is_isolated_by_the_tasks_that_spark_tries_again(
    spark, job, where, tasks, caplog
):
    """Without a snapshot or another run: three crashes, each of them in the log."""
    it = job(
        fault_job.lines(60),
        mode="batch",
        message_id="id",
        rules={where: {"kill": [13], "raise": [5]}},
    )
    assert it.run_here(spark) is None
    it.check(dead={5, 13})
    assert len(it.marks(f"{where}-killed-13-*")) == 3 * tasks
    assert letter_of(spark, it, "KilledWorker").error_message == "killed its worker"
    assert caplog.text.count("crashed, with one record in flight") == 2 * tasks
    assert "crashed, crash" not in caplog.text


@pytest.mark.parametrize(("how", "enrich"), [("hang", "batch"), ("hang_with_gil", "row")])
def test_a_record_that_hangs_is_parked(spark, job, how, enrich):
    """It costs three time-outs, and the dead letter says where it was."""
    it = job(
        fault_job.lines(40),
        mode="batch",
        message_id="id",
        enrich=enrich,
        rules={"enrich": {how: [13], "until": {5: 1}}},
        settings={"bolt_call_timeout_s": 1},
    )
    assert it.run_here(spark) is None
    it.check(dead={13})
    assert len(it.marks("enrich-hung-13-*")) == 3
    letter = letter_of(spark, it, "TimedOut")
    assert letter.component == "enrich"
    assert re.fullmatch("timed out in enrich: File .*fault_job.py.* in meet", letter.error_message)


def test_waiting_for_rows_is_not_timed(spark, job):
    """Nor is what a worker does that has been used before, with or without a time-out."""
    settings = {"bolt_call_timeout_s": 1}
    it = job(fault_job.lines(40), mode="batch", slow_source=1.5, settings=settings)
    assert it.run_here(spark) is None
    it.check(dead=())
    assert it.run_here(spark, settings={}) is None


CLUSTER = "local-cluster[2,1,1024]"


@pytest.mark.faults
@ALIKE
@pytest.mark.parametrize("lose", ["files", "executors"])
@PLACE
def test_what_was_shuffled_is_lost_in_a_cluster(job, place, lose, otherwise):
    """Delete the files of all executors, or their executor, when one task has seen them."""
    it = job(
        fault_job.lines(80),
        place=place,
        files=1,
        rules={"enrich": {"until": {3: 1}, "note": True}},
        otherwise=otherwise,
        lose=lose,
    )
    ended = it.run(master=CLUSTER, conf=UNCHECKED)
    assert ended.error is None, ended.error
    assert it.marks("lost-*")
    it.check(dead=())
    assert ended.said["progress"][0]["runs"] == (2 if otherwise else 1)


@pytest.mark.faults
@ALIKE
@pytest.mark.parametrize("where", ["enrich", "count"])
@PLACE
def test_an_executor_is_killed(job, place, where, otherwise):
    """Its JVM dies, and with it the shuffle files that it serves."""
    it = job(
        fault_job.lines(80),
        place=place,
        files=2,
        rules={
            where: {"executor": fault_job.LAST if where == "count" else 0},
            "enrich": {"until": {3: 1}},
        }
        | ({where: {"executor": 0, "until": {3: 1}}} if where == "enrich" else {}),
        otherwise=otherwise,
    )
    ended = it.run(master=CLUSTER, conf=UNCHECKED)
    assert ended.error is None, ended.error
    assert it.marks("*-executor-*")
    it.check(dead=())


SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "10ms",
}


@pytest.mark.faults
@ALIKE
@PLACE
def test_speculation(two_hosts, job, place, otherwise):
    """The first task of each stage has a copy on another machine, and one of both counts."""
    it = job(
        fault_job.lines(80),
        place=place,
        files=3,
        state=3,
        mode="batch",
        rules={"enrich": {"slow": True}, "count": {"slow": True}},
        otherwise=otherwise,
    )
    ended = it.run(master=two_hosts, conf={**SPECULATION, **UNCHECKED})
    assert ended.error is None, ended.error
    copies = [mark.rpartition("-")[0] for mark in it.marks("*-copy-*")]  # and its stage
    assert copies == ["count-copy", "enrich-copy"]
    it.check(dead=())


def killed(it):
    """How often a job's record killed an executor."""
    return len(it.marks("*-executor-killed-*"))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("where", "rules", "runs", "crashes"),
    [
        ("enrich", {"kill_executor": [13]}, 1, 3),
        ("enrich", {"kill_executor": [13, 21]}, 2, 6),
        ("enrich", {"kill_executor": [13], "kill": [22]}, 2, 4),
        # Two tasks get its words; with an executor goes what they are to read, and the stage fails.
        ("count", {"kill_executor": [13]}, 3, 10),
    ],
    ids=["one", "two of a task", "and one that kills its worker", "behind an exchange"],
)
def test_a_record_that_kills_its_executor(job, where, rules, runs, crashes):
    """Spark tries its task again, which isolates it: a run or two, and three executors each."""
    bad = {key for keys in rules.values() for key in keys}
    it = job(fault_job.lines(40), mode="batch", message_id="id", rules={where: rules})
    ended = it.run(master=CLUSTER)
    assert ended.error is None, ended.error
    found = it.check(bad)
    assert {letter.error_type for letter in found.dead} == {"KilledWorker"}
    assert ended.log.count("no run was accepted") == 0
    assert ended.log.count("crashed, crash") < runs
    assert killed(it) <= crashes
    assert ended.log.count("one record in flight") >= 2


@pytest.mark.faults
@PLACE
def test_no_record_is_rejected_for_executors_that_are_killed_from_outside(job, place):
    """Three of them, one after the other, each with another record in flight."""
    rules = {"executor_once": [5, 14, 23]}
    it = job(
        fault_job.lines(40),
        mode="batch",
        place=place,
        message_id="id",
        rules={"enrich": rules},
        settings={"careful_after": 0},
    )
    ended = it.run(master=CLUSTER)
    assert ended.error is None, ended.error
    it.check(dead=())
    assert len(it.marks("*executor-once*")) == 3
