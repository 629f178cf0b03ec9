"""Interrupts and cancelled jobs: they end the run, blame nobody and cost no record an attempt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import Killer
from py4j.protocol import Py4JError
from streams import Split, in_line
from worlds import World, fails

from ackcore.spark import RunCancelled, query, run_batch, to_parquet
from ackcore.spark.base.atomic import check_fence, fenced
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.interrupts import interruptible, raise_if_interrupted
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.engine import insist
from ackcore.spark.stores.local import LocalStore

CANCELLED = (
    "An error occurred while calling o5.get.\n: org.apache.spark.SparkException: "
    "[SPARK_JOB_CANCELLED] Job 5 cancelled part of cancelled job group x"
)


def plan_of(world):
    with world.driver()[0] as state:
        return state.plan(0)


def masked(*_):
    """Fail as PySpark does after Ctrl-C: the interrupt is what was being handled."""
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        raise Py4JError(CANCELLED)  # noqa: B904 - that is the point


def cancelled(line, attempt):
    raise Py4JError(CANCELLED)


def test_an_interrupt_that_an_error_hides_ends_the_run(world):
    world.behaves = masked
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            world.process(0, ["a", "b"])
    assert len(world.runs) == 4
    assert (plan_of(world).crashes, plan_of(world).careful) == (0, False)
    world.behaves = fails()
    progress, counts = world.process(0, ["a", "b"])
    assert not world.runs[-1].careful
    assert (world.rows, counts.acked, counts.dead, progress.runs) == (["A", "B"], 2, 0, 1)


class TimeIsUp(BaseException):
    """Airflow and pytest-timeout raise a BaseException in their handlers."""


@pytest.mark.parametrize("kind", [TimeoutError, RuntimeError, ValueError, TimeIsUp])
@pytest.mark.parametrize("hidden", [False, True])
def test_what_a_signal_handler_raises_ends_the_run(world, kind, hidden):
    """Raised by a run itself, some of these errors would be retried."""

    def rings(number, frame):
        raise kind("time is up")

    def behaves(line, attempt):
        try:
            signal.raise_signal(signal.SIGALRM)
        except Exception as error:
            raise Py4JError(CANCELLED) if hidden else error  # noqa: B904 - as PySpark does

    before = signal.signal(signal.SIGALRM, rings)
    world.behaves = behaves
    try:
        for _ in range(4):
            with pytest.raises(kind, match="time is up"):
                world.process(0, ["a"])
        assert signal.getsignal(signal.SIGALRM) is rings
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(world.runs) == 4
    world.behaves = fails()
    assert world.process(0, ["a"])[1].acked == 1
    assert (plan_of(world).crashes, plan_of(world).careful) == (0, False)


def test_between_micro_batches_a_hidden_interrupt_is_raised(spark, tmp_path, monkeypatch):
    parts = {"lines": spark.createDataFrame([("flaky",)], "line string"), "split": Split()}
    topology = in_line(parts, to_parquet(tmp_path / "out"), backoff_s=0.001)
    monkeypatch.setattr(query, "_nothing", masked)
    with pytest.raises(KeyboardInterrupt):
        run_batch(topology, spark, tmp_path / "checkpoint")
    monkeypatch.undo()
    assert run_batch(topology, spark, tmp_path / "checkpoint").acked == 1


def test_a_cancelled_job_ends_the_run_with_a_named_error(world):
    world.behaves = cancelled
    said = r"micro-batch 0 .*from outside.*Job 5 cancelled"
    with pytest.raises(RunCancelled, match=said) as error:
        world.process(0, ["a"])
    assert "same checkpoint" in str(error.value)
    assert (len(world.runs), plan_of(world).crashes) == (1, 0)
    world.behaves = fails()
    assert world.process(0, ["a"])[1].acked == 1
    assert world.runs[-1].suspects == ()


def test_a_context_that_was_stopped_ends_the_run_and_may_have_died(world):
    """Nobody knows whether the JVM was told to end or died of a record: the restart counts it."""

    def behaves(line, attempt):
        raise Py4JError("Job 5 cancelled because SparkContext was shut down")

    world.behaves = behaves
    with pytest.raises(RunCancelled, match="the SparkContext was stopped"):
        world.process(0, ["a"])
    world.behaves = fails()
    world.process(0, ["a"])
    assert (len(world.runs), plan_of(world).crashes) == (2, 1)


def test_a_stage_that_failed_is_no_cancelled_job(world):
    def behaves(line, attempt):
        if len(world.runs) == 1:
            raise Py4JError("Job aborted due to stage failure: ...\n Job 3 cancelled as well")

    world.behaves = behaves
    assert world.process(0, ["a"])[0].runs == 2
    assert plan_of(world).crashes == 1


class Presser(Killer):
    """Presses Ctrl-C, or has the process told to exit, before the n-th operation on a file."""

    def step(self):
        self.count += 1
        if self.count == self.left:
            self.disarm()
            raise (KeyboardInterrupt, SystemExit)[self.left % 2]


def test_an_interrupt_at_any_write_costs_nothing(tmp_path):
    presser, operations = Presser(), 1
    left = 0
    while left < operations:
        world = World(tmp_path / str(left), behaves=fails("b", "poison", final=True))
        presser.arm(left or None)
        try:
            counts = world.process(0, ["a", "b", "poison"])[1]
        except (KeyboardInterrupt, SystemExit):
            presser.disarm()
            counts = world.process(0, ["a", "b", "poison"])[1]
        presser.disarm()
        assert plan_of(world).crashes == 0, left
        assert (world.rows, world.parked, counts.balanced) == (["A"], ["b", "poison"], True)
        assert (counts.acked, counts.dead, counts.retried) == (1, 2, 0)
        operations = operations if left else presser.count
        left += 1
    assert operations > 20


def test_an_interrupt_amid_careful_runs_leaves_them_as_they_are(world):
    died = []

    def behaves(line, attempt):
        died.append(line)
        if len(died) <= 3:
            raise RuntimeError("gone")
        masked(line, attempt)

    world.behaves = behaves
    with pytest.raises(KeyboardInterrupt):
        world.process(0, ["a", "b"])
    before = plan_of(world)
    with pytest.raises(KeyboardInterrupt):
        world.process(0, ["a", "b"])
    assert (before.crashes, before.rejected) == (3, ())
    assert plan_of(world) == before
    assert before.suspects


def test_a_stop_counts_no_death(world):
    world.behaves = cancelled
    world.stopping = True
    for _ in range(3):
        with pytest.raises(insist.Stopped):
            world.process(0, ["a"])
    world.stopping = False
    world.behaves = fails()
    world.process(0, ["a"])
    assert plan_of(world).crashes == 0


@pytest.mark.parametrize("behaves", [masked, cancelled])
def test_an_interrupt_of_a_sink_is_no_failure_of_it(world, behaves):
    world.sink_fails = 1

    def write(accepted):
        behaves(None, 0)

    world.write, good = write, world.write
    with pytest.raises((KeyboardInterrupt, RunCancelled)):
        world.process(0, ["a"])
    world.write, world.sink_fails = good, 0
    _, counts = world.process(0, ["a"])
    assert (world.paused, world.rows, counts.acked) == ([], ["A"], 1)


def test_an_interrupt_that_was_there_before_is_none_of_ours(world):
    """Started again by who caught an interrupt: every error then has that for its context."""
    world.sink_fails = 1
    died = []

    def behaves(line, attempt):
        if not died:
            died.append(line)
            raise RuntimeError("gone")

    world.behaves = behaves
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        progress, counts = world.process(0, ["a"])
    assert (progress.runs, counts.acked, world.rows) == (2, 1, ["A"])


def test_what_is_no_error_of_sparks_was_not_cancelled():
    raise_if_interrupted(ValueError("Job 5 cancelled"), None, None, "it", "go on")
    known = RunCancelled("it was")
    with pytest.raises(RunCancelled) as error:
        raise_if_interrupted(known, None, None, "it", "go on")
    assert error.value is known


def test_what_a_job_raises_is_raised(spark):
    def job():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        interruptible(spark, job)
    assert interruptible(spark, lambda: 5) == 5
    assert interruptible(None, lambda: 6) == 6


def test_what_a_job_writes_is_fenced_as_its_caller_is(spark):
    def gone():
        raise CheckpointInUse("taken over")

    with fenced(gone), pytest.raises(CheckpointInUse, match="taken over"):
        interruptible(spark, check_fence)
    interruptible(spark, check_fence)


def test_real_signals_and_cancelled_jobs(tmp_path):
    """Ctrl-C, as in a terminal and as in Jupyter; all jobs cancelled, and a group of them."""
    with open(tmp_path / "log.txt", "wb") as log:
        code = subprocess.run(
            [sys.executable, str(Path(__file__).parent / "interrupted_job.py"), str(tmp_path)],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            timeout=900,
            start_new_session=True,
            check=False,
        ).returncode
    assert code == 0, (tmp_path / "log.txt").read_text(errors="replace")[-3000:]
    found = json.loads((tmp_path / "result.json").read_text())
    kinds = [kind for kind, *_ in found["said"]]
    assert kinds == ["KeyboardInterrupt"] * 2 + ["RunCancelled"] * 2
    for _, _, took, plan in found["said"]:
        assert took < 5
        assert (plan["crashes"], plan["suspects"], plan["rejected"]) == (0, [], [])
    took, acked = found["in_sinks"]
    assert (len(took), acked) == (3, 1)
    assert max(took) < 5
    assert found["rows"] == list(range(40))
    assert found["counts"]["spouts"]["lines"]["acked"] == 40


def test_an_interrupt_at_any_line_of_a_put_leaves_the_records_that_are_stored(tmp_path):
    """Or a recorded plan would be unknown to `record_interrupt`, and count as a crash."""
    lines, left = 0, None

    def trace(frame, event, arg):
        nonlocal lines
        if Path(frame.f_code.co_filename).name not in ("records.py", "local.py", "atomic.py"):
            return None
        lines += event == "line"
        if event == "line" and lines == left:
            raise KeyboardInterrupt
        return trace

    def interrupted(directory):
        nonlocal lines
        lines, before = 0, sys.gettrace()
        records = Records(LocalStore(directory))
        records.write_meta({"deployment_key": "1"})
        with fenced(records.check_owner):
            sys.settrace(trace)
            try:
                records.write("batches/0.plan", {"number": 0})
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
        stored = Records(LocalStore(directory))
        stored.read_meta()
        assert records.read("batches/0.plan") == stored.read("batches/0.plan"), left

    interrupted(tmp_path / "all")
    assert lines > 100
    for number in range(1, lines + 1):
        left = number
        interrupted(tmp_path / str(number))


@pytest.mark.parametrize("call", [1, 2])
def test_an_interrupt_after_a_fence_is_set_or_removed_leaves_no_fence(call):
    """Or all later starts in the process would be refused, because it was taken over."""
    calls = 0

    def interrupt(frame, event, arg):
        nonlocal calls
        if event == "c_return" and frame.f_code.co_name == "fenced" and arg.__name__ != "get":
            calls += 1
            if calls == call:
                raise KeyboardInterrupt

    def refuse():
        raise CheckpointInUse

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), fenced(refuse):
            assert call == 2
    finally:
        sys.setprofile(before)
    check_fence()
