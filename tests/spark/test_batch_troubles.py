"""Runs that fail or are not believed, sinks that are down, damaged files: what they cost."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from worlds import World, fails

from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.engine import insist, progress
from ackcore.spark.engine.insist import RunFailed, SinkError
from ackcore.spark.engine.setup import PlannedRows


def test_a_run_that_is_not_of_one_piece_is_run_again(world):
    world.behaves = fails("b")
    world.problems = ["trailers differ", "a file is missing"]
    progress, counts = world.process(0, ["a", "b"])
    assert progress.runs == 3
    assert (counts.acked, counts.waiting) == (1, 1)
    assert not world.runs[-1].careful  # nobody has died
    assert world.paused == [0.1, 0.2]


def test_a_run_whose_session_has_ended_is_one_crash(world):
    """Each further run would crash at once, and the next start would count them all."""
    world.spark = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))

    def run(*args):
        raise ConnectionRefusedError("the JVM is gone")

    world.run = run
    with ThreadPoolExecutor(1) as beside:  # in the main thread the job would get a tag
        error = beside.submit(world.process, 0, ["a"]).exception()
    assert isinstance(error, RunFailed)
    assert "run 1 time and" in str(error)
    with world.driver()[0] as state:
        assert state.plan(0).crashes == 1


def test_a_query_that_looks_stopped_as_its_jvm_has_ended_counts_a_crash(world):
    """A record may have ended the JVM; the next start counts the crash."""

    def gone(*args):
        raise ConnectionRefusedError("the JVM is gone")

    world.spark = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=SimpleNamespace(sc=gone)))
    world.run, world.stopping = gone, True
    with ThreadPoolExecutor(1) as beside:
        error = beside.submit(world.process, 0, ["a"]).exception()
    assert isinstance(error, insist.Stopped)
    with world.driver()[0] as state:
        assert not state.plan(0).interrupted


def test_a_call_of_a_sink_that_does_not_return_is_logged(monkeypatch):
    texts, told = [], threading.Event()

    def warning(text, *args):
        texts.append(text % args)
        told.set()

    monkeypatch.setattr(insist, "_SLOW_S", 0.01)
    monkeypatch.setattr(insist._log, "warning", warning)
    calls = insist.SinkCalls(None, 7, lambda seconds: False, None)
    assert calls.once("sink 'words'", lambda: told.wait(60))
    assert "micro-batch 7 waits for sink 'words', which has not returned for 0 s" in texts[0]


def test_rows_that_are_not_there_a_second_time_have_the_batch_run_again(world):
    world.behaves = fails("b")
    fetch, calls = world.fetch, []

    def forgetful(*args):
        calls.append(args)
        return fetch(*args) if len(calls) > 1 else {}

    world.fetch = forgetful
    progress, _ = world.process(0, ["a", "b"])
    assert (progress.runs, progress.waiting) == (2, 1)


def test_rows_that_are_lost_on_their_way_from_tasks_have_the_batch_run_again(world):
    """Their roots have come, so nothing else would tell."""
    world.behaves = fails("b")
    judge, calls = world.judge, []

    def lossy(*args):
        calls.append(args)
        return judge(*args) if len(calls) > 1 else replace(judge(*args), waits={})

    world.judge = lossy
    progress, _ = world.process(0, ["a", "b"])
    assert (progress.runs, progress.waiting) == (2, 1)


def test_retries_that_did_not_run_have_the_batch_run_again(world):
    world.behaves = fails("b")
    world.process(0, ["a", "b"])
    world.now_ms += 10_000
    run, calls = world.run, []

    def lossy(topology, layout, inputs, plan):
        calls.append(plan)
        lost = {} if len(calls) == 1 else plan.retries
        return run(topology, layout, inputs, SimpleNamespace(**{**plan.__dict__, "retries": lost}))

    world.run = lossy
    assert world.process(1)[0].runs == 2


def test_more_failures_than_records_are_not_believed(world):
    world.behaves = fails("a")
    run, calls = world.run, []

    def miscounting(*args):
        calls.append(args)
        ran = run(*args)
        return ran if len(calls) > 1 else SimpleNamespace(**{**ran.__dict__, "records": {}})

    world.run = miscounting
    assert world.process(0, ["a"])[0].runs == 2


def test_a_run_that_always_fails_ends_in_a_named_error_and_loses_nothing(tmp_path):
    world = World(tmp_path, {"max_runs": 3})

    def behaves(line, attempt):
        raise RuntimeError("noise\nConnectionError: the network is down\n")

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"micro-batch 0 was run 3 times.*the network is down") as e:
        world.process(0, ["a"])
    assert isinstance(e.value.__cause__, RuntimeError)
    assert len(world.runs) == 3
    world.behaves = fails()
    _, counts = world.process(0, ["a"])
    assert world.runs[-1].careful  # it has died often enough
    assert (world.rows, counts.acked) == (["A"], 1)


def test_a_mistake_in_the_driver_is_not_tried_again(world):
    def behaves(line, attempt):
        raise TypeError("not like this")

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"run 1 time and.*TypeError: not like this"):
        world.process(0, ["a"])


def test_a_value_that_spark_refuses_twice_is_not_tried_again(world):
    """The value met first differs from run to run."""
    cast = (
        "org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value '{}' cannot "
        'be cast to "INT". SQLSTATE: 22018\n at java'
    )
    division = (
        "org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero. "
        "SQLSTATE: 22012"
    )
    errors = [division, cast.format("x0"), cast.format("x1")]

    def behaves(line, attempt):
        raise RuntimeError(errors[len(world.runs) - 1])

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"run 3 times and .*'x1'.*try_cast") as caught:
        world.process(0, ["a"])
    assert "DataFrame of a spout" in str(caught.value)


def test_workers_that_lack_a_module_are_not_tried_again(world, monkeypatch):
    monkeypatch.setattr(PlannedRows, "way_out", lambda *_: "run: ackcore skip")

    def behaves(line, attempt):
        raise RuntimeError("Job aborted\nModuleNotFoundError: No module named 'ackcore'\n at java")

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"run 1 time and .*PYSPARK_PYTHON") as caught:
        world.process(0, ["a"])
    assert sys.executable in str(caught.value)
    assert "skip" not in str(caught.value)


def test_a_sink_that_is_down_for_a_while(world):
    world.sink_fails = 2
    _, counts = world.process(0, ["a"])
    assert world.rows == ["A"]
    assert (len(world.runs), counts.acked) == (1, 1)
    assert world.paused == [1.0, 2.0]


class MuteError(Exception):
    """An error that cannot even be told."""

    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize(
    "kind", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit, StopIteration, MuteError]
)
def test_whatever_a_sink_raises_its_rows_come_once(world, kind):
    good, world.behaves = world.write, fails("b")

    def write(accepted):
        world.written[accepted.batch_id] = ["half of it"]
        world.write = good
        raise kind

    world.write = write
    if kind is KeyboardInterrupt:
        with pytest.raises(kind):
            world.process(0, ["a", "b"])
    _, counts = world.process(0, ["a", "b"])
    assert world.rows == ["A"]
    assert (len(world.runs), counts.acked, counts.waiting) == (1, 1, 1)
    assert counts.balanced


def test_fewer_attempts_at_the_restart_than_have_been_made(tmp_path):
    """A record waiting for its fourth attempt gets it, and no further one."""
    world = World(tmp_path, {"max_attempts": 5}, behaves=fails("b", "c", times=3))
    world.process(0, ["a", "b", "c"])
    for number in (1, 2):
        world.now_ms += 400_000
        world.process(number)
    fewer = World(tmp_path, {"max_attempts": 2}, behaves=fails("c", times=9), now_ms=world.now_ms)
    fewer.written = world.written
    counts = fewer.drain(3)
    assert len(fewer.runs) == 1
    assert (fewer.rows, fewer.parked, counts.balanced) == (["A", "B"], ["c"], True)


def test_a_sink_that_is_down_for_ever_and_then_is_not(world):
    world.behaves = fails("b")
    world.sink_fails = 5
    with pytest.raises(SinkError, match=r"sink 'upper' failed 5 times with micro-batch 0") as error:
        world.process(0, ["a", "b"])
    assert "ConnectionError: the sink is down" in str(error.value)
    assert isinstance(error.value.__cause__, ConnectionError)
    assert world.paused == [1.0, 2.0, 4.0, 8.0]
    _, counts = world.process(0, ["a", "b"])
    assert world.rows == ["A"]
    assert (len(world.runs), counts.acked, counts.waiting) == (1, 1, 1)


def test_a_dead_letter_store_that_is_down(world):
    world.behaves = fails("a", final=True)
    world.dead_letters_fail = 6
    with pytest.raises(SinkError, match="the dead-letter store failed 5 times"):
        world.process(0, ["a"])
    _, counts = world.process(0, ["a"])
    assert world.parked == ["a"]
    assert (len(world.runs), counts.dead) == (1, 1)


@pytest.mark.parametrize("where", ["run", "sink"])
def test_who_is_told_to_stop_gives_up_what_it_does(world, where):
    world.stopping = True

    def behaves(line, attempt):
        raise RuntimeError("cancelled")

    if where == "run":
        world.behaves = behaves
    else:
        world.sink_fails = 1
    with pytest.raises(insist.Stopped):
        world.process(0, ["a"])
    world.stopping = False
    world.behaves = fails()
    assert world.process(0, ["a"])[1].acked == 1


def test_stopped_between_two_runs(world):
    world.problems = ["trailers differ"]
    world.pause = lambda seconds: seconds > 0
    with pytest.raises(insist.Stopped):
        world.process(0, ["a"])


def test_what_fails_untracked_is_told(world, caplog):
    world.lost = 3
    world.process(0, ["a"])
    assert "3 tuples failed that belong to no record of a tracked spout" in caplog.text


def test_a_bolt_that_raises_often_is_told_once_with_the_way_out(world, caplog):
    world.raised = {"parse": 39_999, "few": progress.MANY_CALLS}
    world.problems = ["trailers differ"]  # nothing is said of a run that is not accepted
    world.process(0, ["a"])
    assert len(world.runs) == 2
    (said,) = [one.getMessage() for one in caplog.records if "raised" in one.getMessage()]
    assert said == (
        "micro-batch 0: process() of bolt parse raised in 39999 calls; a batch that raises is "
        "bisected to the failing rows. To avoid this, catch the error, and fail these rows with "
        "out.fail(rows, reasons)"
    )


def test_a_stream_without_rows_calls_no_sink(world):
    world.process(0, [])
    assert world.written == {}


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, lambda path: path.unlink()], ids=["flipped", "gone"])
def test_rows_that_are_damaged_after_the_decision_are_not_written(world, dying_at, damage):
    world.behaves = fails("b")
    with dying_at("decided"):
        world.process(0, ["a", "b", "c"])
    (file,) = (world.path / "ackcore/work").glob("0.*/*-one.arrow")
    whole = file.read_bytes()
    damage(file)
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt, match=f"{file.name} is .*restore the file"):
            world.process(0, ["a", "b", "c"])
    assert (world.written, world.paused) == ({}, [])
    file.write_bytes(whole)
    _, counts = world.process(0, ["a", "b", "c"])
    assert world.rows == ["A", "C"]
    assert (len(world.runs), counts.acked, counts.waiting) == (1, 2, 1)


def test_a_sink_that_tells_nothing_of_the_damage_it_met(world, monkeypatch):
    """Its error is another one; the files are looked at again before it is believed."""

    def silent(accepted):
        flip(Path(accepted.files[0].path))
        raise ConnectionError("the sink is down")

    monkeypatch.setattr(world, "write", silent)
    with pytest.raises(CheckpointCorrupt, match=r"\.arrow is damaged"):
        world.process(0, ["a"])
    assert world.paused == []


@pytest.mark.parametrize("which", ["*-many.arrow", "retries/lines/*.arrow"])
def test_what_is_damaged_before_the_decision_costs_a_run(world, which, caplog):
    world.behaves = fails("a", "b")
    world.shared_rows = [("A", "B")]
    world.process(0, ["a", "b", "c"])
    world.now_ms += 10_000
    world.behaves = fails("a", times=2)
    fetch, damaged = world.fetch, []

    def damaging(setup, *more):
        if not damaged and "retries" in which:
            damaged.extend(Path(setup.plan.work).glob(which))
            flip(damaged[0])
        return fetch(setup, *more)

    run = world.run

    def run_and_damage(topology, layout, inputs, plan):
        ran = run(topology, layout, inputs, plan)
        if not damaged and "many" in which:
            damaged.extend(Path(plan.work).glob(which))
            flip(damaged[0])
        return ran

    world.fetch, world.run = damaging, run_and_damage
    progress, _ = world.process(1)
    assert len(damaged) == 1
    assert (progress.runs, progress.waiting) == (2, 2)
    assert "micro-batch 1 is run again: " in caplog.text
    with world.driver()[0] as state:
        assert state.plan(1).crashes == 0
    assert world.drain(2).balanced
