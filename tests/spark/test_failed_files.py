"""Many failures: tasks judge them and write them to files, and all is as if they were few."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import OPEN, decision, ids, records
from hypothesis import given
from hypothesis import strategies as st
from pyspark import TaskContext, cloudpickle

from ackcore.spark import dead_letters, replay, run_batch
from ackcore.spark.base import checksummed
from ackcore.spark.base.checksummed import read_table, write_batches
from ackcore.spark.base.errors import CheckpointCorrupt
from ackcore.spark.checkpoint.dead import Dead, WrittenDead
from ackcore.spark.checkpoint.segments import WrittenSegment
from ackcore.spark.checkpoint.state import State
from ackcore.spark.protocol import act, batch, payloads, runs
from ackcore.spark.run import action
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.topology import BasicBolt, Reject, Retry, TopologyBuilder, Unavailable

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUMBERS = pa.schema([("n", pa.int64()), ("text", pa.string())])


class Picky(BasicBolt):
    """By their numbers records succeed, are refused, or fail: once, for ever, or uncounted."""

    outputs = pa.schema([("n", pa.int64())])

    def execute(self, tuple, collector):
        n, attempt = tuple["n"], tuple.attempt
        kind = n % 7
        if kind == 1:
            raise Reject(f"no {n}")
        if kind == 2 and not attempt:
            raise ValueError("not at first")
        if kind == 3:
            raise ValueError(f"never {n}")
        if kind == 4 and not attempt:
            raise Retry("later", after_s=50.0)
        if kind == 5 and not attempt and n % 2 and not Path(tuple["text"]).exists():
            raise Unavailable("away")
        collector.emit((n,))


def topology(spark, away, **settings):
    """A source that is read again by position, and one whose rows are spilled."""
    builder = TopologyBuilder()
    fixed = spark.range(0, 120, numPartitions=3).selectExpr("id AS n", f"'{away}' AS text")
    builder.spout("fixed", fixed)
    builder.spout("spilled", fixed.where("current_timestamp() > timestamp '2000-01-01'"))
    builder.bolt("picky", Picky()).shuffle("fixed").shuffle("spilled")
    return builder.build(max_attempts=3, backoff_ms=1000, max_backoff_ms=60_000, **settings)


def run_through(spark, tmp_path, few, monkeypatch, in_run=False, **settings):
    """Run all to its end by a clock of its own; return what can be told of it."""
    monkeypatch.setattr(runs, "FEW_FAILURES", few)
    if not in_run:
        monkeypatch.setattr(runs.Runs, "_rules_in_run", lambda self, plan: None)
    now = [1_700_000_000_000]
    checkpoint, away = tmp_path / f"{few}-{in_run}", tmp_path / f"away-{few}-{in_run}"

    def wait(seconds):
        now[0] += 30_000
        if now[0] > 1_700_000_300_000:
            away.touch()

    def go():
        made = topology(spark, away, **settings)
        return run_batch(made, spark, checkpoint, max_dead=None, clock=lambda: now[0], wait=wait)

    told = [go()]
    letters = dead_letters(checkpoint, spark)
    told.append(
        sorted(
            (
                row.spout,
                row.message_id,
                row.error_type,
                row.error_message,
                row.payload.n,
                row.attempts,
            )
            for row in letters.collect()
        )
    )
    assert replay(checkpoint, spark).records
    told.append(go())
    often = dead_letters(checkpoint, spark).groupBy("error_message", "replays").count()
    told.append(sorted(map(tuple, often.collect())))
    assert {row[1] for row in told[-1]} == {0, 1}
    with State.open(
        checkpoint, topology(spark, away), sources=dict.fromkeys(("fixed", "spilled"), NUMBERS),
        kind="batch",
    ) as state:  # fmt: skip
        assert state.waiting(state.last_done).rows() == 0
    return told


def test_what_tasks_write_is_what_the_driver_would(spark, tmp_path, monkeypatch):
    """When it is read again, and in the run."""
    ways = [(10_000, False), (0, False), (0, True)]
    told = []
    for few, in_run in ways:
        with monkeypatch.context() as patch:
            told.append(run_through(spark, tmp_path, few, patch, in_run))
    assert told[0] == told[1]
    assert told[0] == told[2]
    books, letters = told[0][:2]
    assert books.balanced
    assert (books.records, books.dead) == (240, len(letters))
    assert Counter(letter[2] for letter in letters) == {"Reject": 34, "ValueError": 34}


def test_there_is_room_for_so_many_as_without_files(spark, tmp_path, monkeypatch):
    """Which ones are given up may differ: what waits in a file is sorted."""
    few, many = (run_through(spark, tmp_path, n, monkeypatch, max_waiting=20) for n in (10_000, 0))
    full = [Counter(kind for _, _, kind, *_ in told[1])["WaitingFull"] for told in (few, many)]
    assert full == [100, 100]
    assert many[0].balanced
    message = next(told[3] for told in many[1] if told[2] == "WaitingFull")
    assert message.startswith("20 records wait already (max_waiting); it failed with ")


# -- what fails while its task has it ---------------------------------------------------------


class Failing(BasicBolt):
    """Fails every record at first, and some of them for ever."""

    outputs = pa.schema([("n", pa.int64())])

    def execute(self, tuple, collector):
        if not tuple.attempt or tuple["n"] % 3 == 0:
            raise ValueError(f"{tuple['n']} at attempt {tuple.attempt}")
        collector.emit((tuple["n"],))


class KilledBehindItsFiles(SpoutStage):
    """The worker of the second task dies when its files are written, and nobody knows of them."""

    def __call__(self, batches):
        context = TaskContext.get()
        for result in super().__call__(batches):
            if context.partitionId() == 1 and context.attemptNumber() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            yield result


class Died(BaseException):
    pass


@pytest.fixture
def failing(spark, tmp_path, monkeypatch):
    """``failing(name)`` runs a batch all of which fails; returns its books, letters and rows."""
    monkeypatch.setattr(runs, "FEW_FAILURES", 0)
    now = [1_700_000_000_000]
    rows = {}

    def failing(name):
        builder = TopologyBuilder()
        builder.spout("n", spark.range(0, 60, numPartitions=2).selectExpr("id AS n"))
        builder.bolt("failing", Failing()).shuffle("n")
        builder.sink("failing", lambda frame, n: rows.__setitem__(n, frame.collect()))
        books = run_batch(
            builder.build(max_attempts=2), spark, tmp_path / name, max_dead=None,
            clock=lambda: now[0], wait=lambda seconds: now.__setitem__(0, now[0] + 100_000),
        )  # fmt: skip
        letters = dead_letters(tmp_path / name, spark).select("message_id", "payload.n", "attempts")
        found = sorted(row.n for some in rows.values() for row in some)
        return books, sorted(map(tuple, letters.collect())), found

    return failing


def check_failing(found):
    books, letters, rows = found
    assert (books.records, books.acked, books.dead, books.waiting) == (60, 40, 20, 0)
    assert rows == [n for n in range(60) if n % 3]
    assert [(n, attempts) for _, n, attempts in sorted(letters, key=lambda one: one[1])] == [
        (n, 2) for n in range(0, 60, 3)
    ]


def test_an_attempt_that_dies_behind_its_files_leaves_nothing_that_counts(failing, monkeypatch):
    written = []

    def payloads_of(failed, in_run, *more):
        written.append(in_run)
        return payloads.payloads_of(failed, in_run, *more)

    monkeypatch.setattr(runs, "payloads_of", payloads_of)
    monkeypatch.setattr(action, "SpoutStage", KilledBehindItsFiles)
    check_failing(failing("killed"))
    assert [len(one.root_ids()) for one in written] == [60, 20]


STEPS = ["ran", "checked", "decided", "in-dead-letters", "acted", "marked"]


@pytest.mark.parametrize("step", STEPS)
def test_a_driver_that_dies_over_what_tasks_wrote_in_the_run_goes_on(failing, monkeypatch, step):
    def die(name, number=None):
        if name == step:
            raise Died

    with monkeypatch.context() as patch:
        for module in (act, batch, runs):
            patch.setattr(module, "failpoint", die)
        with pytest.raises(Died):
            failing("died")
    check_failing(failing("died"))


# -- files that tasks wrote, in a checkpoint --------------------------------------------------


def wrote(directory, name, table):
    return directory / write_batches(directory, name, table.schema, table.to_batches(), large=True)


def decide_with_files(state, number=0):
    """A decision of files: five wait, of which there was room for three, and four are dead."""
    state.write_plan(state.make_plan(number, 0))
    work = state.runs.new(number)
    path = wrote(work, "waiting-lines", records(0, 5))
    waiting = state._waiting_after(state.last_done).plus("lines", WrittenSegment(path, 3, 1000, 0))
    dead = Dead(
        {
            "lines": [
                WrittenDead(path, 2, 3, 100),
                WrittenDead(wrote(work, "dead-lines", records(5, 4, due_ms=0, step=0)), 4),
            ]
        }
    )
    return state.write_decision(decision(number, waiting, dead, work=work.name))


def test_files_of_tasks_are_the_checkpoints(checkpoint, no_syncing):
    with OPEN(checkpoint) as state:
        told = decide_with_files(state)
    with OPEN(checkpoint) as state:
        for found in (told, state.decision(0)):
            assert ids(found.waiting["lines"]) == ["id-0", "id-1", "id-2"]
            assert ids(found.dead["lines"]) == [f"id-{n}" for n in (3, 4, 5, 6, 7, 8)]
            assert sum(map(len, found.dead.pieces("lines"))) == 6
            reasons = found.dead["lines"]["_ackcore_reason"].to_pylist()
            full = "!\x1fsplit\x1fWaitingFull\x1f100 records wait already (max_waiting); it failed "
            assert reasons[:2] == [full + "with ValueError: no"] * 2
            assert reasons[2] == "-\x1fsplit\x1fValueError\x1fno"
        state.write_done(0)
        # The one file stays as long as something in it waits.
        for number in (1, 2, 3):
            plan = state.make_plan(number, 1001)
            state.write_plan(plan)
            due, rest, _ = state.split_due(plan)
            assert ids(due["lines"]) == (["id-0", "id-1"] if number == 1 else []) if due else True
            state.write_decision(decision(number, rest))
            state.write_done(number)
            state.prune(number)
        assert ids(state.waiting(3)["lines"]) == ["id-2"]


def test_what_tasks_and_the_driver_wrote_of_a_required_column_is_one_table(checkpoint, no_syncing):
    """As Kafka's topic and offset are: the driver's files say of no column that it is required."""
    required = records(0, 4)
    fields = [field.with_nullable(False) for field in required.schema]
    required = pa.table(required.columns, schema=pa.schema(fields))
    with OPEN(checkpoint) as state:
        for number, rows in enumerate((required.slice(0, 2), required.slice(2))):
            state.write_plan(state.make_plan(number, 0))
            work = state.runs.new(number)
            waiting = state._waiting_after(state.last_done)
            if number == 0:
                path = wrote(work, "waiting-lines", rows)
                waiting = waiting.plus("lines", WrittenSegment(path, 2, 1000, 0))
            else:
                waiting = waiting.plus("lines", rows)
            state.write_decision(decision(number, waiting, work=work.name))
            state.write_done(number)
        one, other = state.waiting(1).tables("lines")
        assert one.schema == other.schema
        assert ids(state.waiting(1)["lines"]) == [f"id-{n}" for n in range(4)]


def test_a_damaged_file_of_tasks_is_told(checkpoint, no_syncing):
    with OPEN(checkpoint) as state:
        decide_with_files(state)
    (path,) = (checkpoint / "ackcore/state/0").glob("dead-lines.*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"dead-lines\.[0-9a-f]{16}\.arrow is damaged"):
        OPEN(checkpoint)


def test_a_run_that_was_fenced_off_leaves_no_decision(checkpoint, no_syncing):
    """Its files are gone from where they were: another driver has taken over."""
    with OPEN(checkpoint) as state:
        state.write_plan(state.make_plan(0, 0))
        work = state.runs.new(0)
        path = wrote(work, "waiting-lines", records(0, 5))
        work.rename(f"{work}.fenced")
        waiting = state._waiting_after(None).plus("lines", WrittenSegment(path, 5, 1000, 0))
        with pytest.raises(Exception, match="waiting-lines"):
            state.write_decision(decision(0, waiting, work=work.name))
        assert state.decision(0) is None


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    st.integers(1, 400).map(lambda n: n * 7),
)
def test_a_fingerprint_does_not_depend_on_what_a_file_was_written_in(sizes, piece):
    data = np.random.default_rng(sum(sizes)).bytes(sum(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksummed, "_PIECE", piece)
        whole, parts = checksummed._Fingerprint(), checksummed._Fingerprint()
        whole.update(memoryview(data))
        start = 0
        for size in sizes:
            parts.update(memoryview(data)[start : start + size])
            start += size
        assert whole.hex() == parts.hex()


def test_a_large_table_is_read_as_it_was_written(tmp_path, no_syncing):
    table = records(0, 10_000)
    name = write_batches(tmp_path, "t", table.schema, table.to_batches(1000), large=True)
    assert read_table(tmp_path / name).equals(table)
