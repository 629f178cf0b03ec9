"""How many retries and replayed records a micro-batch takes, and settings that change meanwhile."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pyarrow as pa
import pytest
from checkpoints import ask, records
from pyspark import cloudpickle
from worlds import World, fails

from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.query import run_batch
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_what_is_beyond_the_bound_runs_in_the_next_micro_batch(tmp_path):
    world = World(tmp_path, settings={"max_retries_per_batch": 2}, behaves=fails(*"abcde"))
    assert world.process(0, list("abcdef"))[1].waiting == 5
    world.now_ms += 400_000
    for number, (retried, waiting) in enumerate([(2, 3), (2, 1), (1, 0)], start=1):
        progress, counts = world.process(number)
        assert (progress.retried, progress.waiting, progress.failed) == (retried, waiting, 0)
        assert counts.balanced
    assert world.rows == list("ABCDEF")


def test_a_replay_beyond_the_bound_is_counted_once(tmp_path):
    world = World(tmp_path, settings={"max_retries_per_batch": 2}, behaves=fails("line 3"))
    world.process(0, ["a"])
    table = records(0, 5, attempt=0)
    ask(tmp_path, table=table.rename_columns([*table.column_names[:-1], "line"]))
    told = [world.process(number) for number in (1, 2, 3)]
    assert [progress.replayed for progress, _ in told] == [5, 0, 0]
    assert [progress.acked for progress, _ in told] == [2, 1, 1]
    assert [progress.failed for progress, _ in told] == [0, 1, 0]
    assert [progress.waiting for progress, _ in told] == [3, 2, 1]
    assert all(counts.balanced and counts.replayed == 5 for _, counts in told)
    assert all(counts.retried == 0 for _, counts in told)
    counts = world.drain(4)
    assert (counts.acked, counts.retried, counts.balanced) == (6, 1, True)
    assert world.rows == sorted(["A", *(f"LINE {n}" for n in range(5))])


def test_a_replay_that_waits_for_its_turn_takes_nobodys_place(tmp_path):
    """Records that fail meanwhile are given up at their first failure."""
    settings = {"max_retries_per_batch": 1, "max_waiting": 2}
    world = World(tmp_path, settings=settings, behaves=fails("line 0", *"abc"))
    world.process(0, ["x"])
    table = records(0, 5, attempt=0)
    ask(tmp_path, table=table.rename_columns([*table.column_names[:-1], "line"]))
    progress, _ = world.process(1, ["a", "b"])
    assert (progress.replayed, progress.waiting, progress.dead) == (5, 6, 1)
    progress, counts = world.process(2, ["c"])  # of a later driver
    assert (progress.failed, progress.waiting, progress.dead) == (1, 5, 1)
    assert counts.balanced
    counts = world.drain(3)
    assert (counts.acked, counts.dead, counts.balanced) == (7, 2, True)
    assert world.parked == ["c", "line 0"]


def planned(tmp_path, **changes):
    """A driver dies with a plan on record that takes five retries."""
    world = World(tmp_path, behaves=fails(*"abcde"))
    world.process(0, list("abcde"))
    world.now_ms += 400_000
    state, _engine = world.driver()
    with state:
        plan = state.make_plan(1, world.now_ms, 100)
        state.write_plan(replace(plan, **changes))
    return world


@pytest.mark.parametrize("before", [100, None])
def test_a_bound_that_was_lowered_holds_for_a_plan_on_record(tmp_path, before):
    """Perhaps it was too much for the driver; suspects are places among what is taken."""
    old = planned(tmp_path, max_retries=before, careful=True, suspects=(1,), rejected=(2, 1))
    world = World(
        tmp_path, settings={"max_retries_per_batch": 3}, behaves=old.behaves, now_ms=old.now_ms
    )
    progress, counts = world.process(1)
    assert (progress.retried, progress.acked, counts.waiting) == (3, 3, 2)
    assert (world.runs[0].suspects, world.runs[0].rejected) == ((), ())
    assert world.drain(2).acked == 5


def test_a_bound_that_was_raised_leaves_a_plan_as_it_is(tmp_path):
    old = planned(tmp_path, max_retries=2, crashes=2, careful=True, suspects=(1,))
    world = World(tmp_path, behaves=old.behaves, now_ms=old.now_ms)
    with world.driver()[0] as state:
        # Suspects are of rows that were kept, as a careful run does.
        world.snapshot_inputs([], state.runs.snapshot(1), 1)
    progress, _ = world.process(1)
    assert progress.retried == 2
    assert world.runs[0].suspects == (1,)


def test_a_careful_plan_stays_so_whatever_the_settings_say_now(tmp_path):
    """Else a rejected record's root id would be another record's, which would die for it."""
    old = planned(tmp_path, crashes=2, careful=True, suspects=(1,))
    world = World(tmp_path, settings={"careful_after": 50}, behaves=old.behaves, now_ms=old.now_ms)
    world.process(1)
    assert world.runs[0].careful


def test_fewer_may_wait_than_do(tmp_path):
    """Waiting records go on waiting; records that fail without room die; the counts balance."""
    world = World(tmp_path, behaves=fails(*"abcde", times=9))
    world.process(0, list("abcde"))
    world = World(
        tmp_path,
        settings={"max_waiting": 2, "max_retries_per_batch": 1, "max_attempts": 2},
        behaves=fails(*"abcde", "x"),
        now_ms=world.now_ms + 400_000,
    )
    _, counts = world.process(1, ["x", "y"])
    assert (counts.acked, counts.dead, counts.waiting, counts.balanced) == (2, 1, 4, True)
    counts = world.drain(2)
    assert (counts.acked, counts.dead, counts.waiting, counts.balanced) == (6, 1, 0, True)


# -- on Spark -----------------------------------------------------------------------------------


class Flaky(BasicBolt):
    """Fails lines with f at their first attempt, and with d always."""

    outputs = pa.schema([("line", pa.string())])

    def execute(self, tuple, collector):
        if tuple["line"][0] == "d" or (tuple["line"][0] == "f" and tuple.attempt == 0):
            raise ValueError(tuple["line"])
        collector.emit((tuple["line"],))


class Same(BasicBolt):
    outputs = pa.schema([("line", pa.string())])

    def execute(self, tuple, collector):
        collector.emit((tuple["line"],))


def topology_of(frame, sink, **settings):
    builder = TopologyBuilder()
    builder.spout("lines", frame)
    builder.bolt("flaky", Flaky()).shuffle("lines")
    builder.bolt("same", Same()).fields("flaky", "line")
    builder.sink("same", to_parquet(sink))
    return builder.build(**{"backoff_s": 0.001, "max_attempts": 2, **settings})


def lines_in(spark, sink):
    return sorted(row.line for row in spark.read.parquet(str(sink)).select("line").collect())


def test_other_settings_at_the_restart_lose_and_repeat_nothing(spark, tmp_path, dying_at):
    """A driver dies after it ran five retries; the next has other tasks, chunks and bounds."""
    lines = [f"f{n}" for n in range(5)] + ["d1", "d2", "d3", "a"]
    frame = spark.createDataFrame([(line,) for line in lines], "line string")
    first = topology_of(frame, tmp_path / "sink", parallelism=2)
    now = itertools.count(0, 100)  # nobody waits for longer than 1 ms
    with dying_at("ran", times=2):
        run_batch(first, spark, tmp_path / "cp", clock=lambda: next(now))
    second = topology_of(
        frame, tmp_path / "sink", parallelism=3, chunk_rows=1, max_retries_per_batch=3
    )
    counts = run_batch(second, spark, tmp_path / "cp", clock=lambda: next(now))
    assert (counts.acked, counts.dead, counts.retried, counts.balanced) == (6, 3, 8, True)
    assert lines_in(spark, tmp_path / "sink") == sorted([*lines[:5], "a"])
    # Replays are bounded, too.
    replay(tmp_path / "cp", spark)
    counts = run_batch(
        topology_of(frame, tmp_path / "sink", max_retries_per_batch=2), spark, tmp_path / "cp"
    )
    assert (counts.replayed, counts.acked, counts.dead, counts.balanced) == (3, 6, 6, True)
