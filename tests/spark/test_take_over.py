"""A driver that was cut off, and wakes when another one has taken over, writes nothing that counts.

It is made to stand still within one process: where it stands, the other driver runs to the end.
"""

from __future__ import annotations

import os
from contextlib import suppress
from contextvars import Context
from pathlib import Path

import accepted_rows
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accepted_rows import row_file
from checkpoints import OPEN, Killed, Killer
from worlds import anywhere, fails

from ackcore.spark.base import atomic
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointInUse, StateError
from ackcore.spark.checkpoint.records import Records
from ackcore.spark.checkpoint.state import State
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.letter_files import read_letters
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine import runs
from ackcore.spark.sinks import parquet as sinks
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.topology.tuples import Reason

LINES = [["a", "b", "c", "poison"], ["d", "e", "venom"], []]


class Story:
    """Two drivers on one checkpoint, of which the second takes over from the first.

    Each has other lines fail at first, so that what one of them decided is not what the other does.
    """

    def __init__(self, world):
        self.world = world
        self.sink = world.path.parent / "sink"
        for sink in world.topology.sinks.values():
            object.__setattr__(sink, "writer", to_parquet(self.sink))
        world.behaves = self.behaves
        self.flaky = "a", "d"
        self.second = self.after = None

    def behaves(self, line, attempt):
        if line in ("poison", "venom"):
            return Reason("upper", "Reject", "no", True)
        return Reason("upper", "ValueError", "flaky", False) if line in self.flaky else None

    def driver(self):
        state, engine = self.world.driver()
        engine._write_dead_letters = DeadLetters.checked(
            self.world.path, state.deployment_key
        )().write
        return state, engine

    def first(self):
        """The driver that will be cut off; returns what it ends with."""
        state, engine = self.driver()
        try:
            self.process(engine, 0)
            yield
            for number in (1, 2):
                self.process(engine, number)
        finally:
            state.close()

    def process(self, engine, number):
        self.world.now_ms += 20_000
        engine.process(number, [("lines", line) for line in LINES[number]])

    def take_over(self):
        """The first one's lease has run out: another driver runs to the end."""
        (self.world.path / "ackcore/lock").unlink()
        self.flaky = "e", "c"
        # In a context of its own, as another process has: not within what fences the first one.
        state, engine = self.second = Context().run(self.driver)
        for number in range(state.last_done + 1, 3):
            self.process(engine, number)
        self.flaky = ()
        while engine.counts.waiting:
            self.world.now_ms += 400_000
            engine.process(state.last_done + 1, [])
        self.after = self.snapshot()

    def snapshot(self):
        return {
            path: path.read_bytes()
            for top in (self.world.path, self.sink)
            for path in top.rglob("*")
            if path.is_file()
        }

    def check(self):
        """Every record is where it must be, once."""
        self.second[0].close()
        parts = sorted(self.sink.glob("batch_id=*/*.parquet"))
        rows = [row for part in parts for row in pq.ParquetFile(part).read()["line"].to_pylist()]
        assert sorted(rows) == ["A", "B", "C", "D", "E"]
        letters = [read_letters(file.path) for file in store_of(self.world.path).files("lines")]
        dead = [row for table in letters for row in table["payload"]]
        assert sorted(row["line"].as_py() for row in dead) == ["poison", "venom"]
        state, engine = self.driver()  # whatever is there now, it opens
        with state:
            counts = engine.counts
        assert (counts.records, counts.acked, counts.dead, counts.waiting) == (7, 5, 2, 0)
        assert counts.balanced


@pytest.fixture
def story(world):
    world.path = world.path / "checkpoint"
    return Story(world)


@anywhere
def test_who_was_taken_over_from_does_not_run_again(world, monkeypatch):
    """The files of its run are gone, as if they were damaged; it executes no bolt over that."""
    runs_of_second = []

    def failpoint(name, number=None):
        if name == "ran" and not runs_of_second:
            runs_of_second.append(number)
            if isinstance(world.path, Path):
                (world.path / "ackcore/lock").unlink()
            Context().run(world.process, 0, ["a", "b"])

    world.behaves = fails("b")
    state, engine = world.driver()
    monkeypatch.setattr(runs, "failpoint", failpoint)
    lines = [("lines", "a"), ("lines", "b")]
    with state, pytest.raises(CheckpointInUse, match="was taken over from this driver"):
        engine.process(0, lines)
    assert [plan.number for plan in world.runs] == [0, 0]


class Pauser(Killer):
    """Has something happen at the n-th operation that changes a file, before it.

    The operation is done then; ``dies`` tells whether the next one is the death of it.
    """

    def __init__(self):
        self.then, self.dies = None, False
        super().__init__()

    def step(self):
        self.count += 1
        if self.count == self.left:
            self.disarm()
            self.then()
            self.active = self.dies
        elif self.left is not None and self.count > self.left:
            raise Killed


@pytest.fixture(scope="module")
def pauser():
    return Pauser()


@pytest.mark.parametrize("every_nth", [3, pytest.param(1, marks=pytest.mark.faults)])
def test_cut_off_between_any_two_writes_it_changes_no_outcome(
    tmp_path, pauser, monkeypatch, every_nth
):
    """Between the last look and the write, too: it may leave a file, but none that counts.

    At the first and at the last write of every n-th place in the code.
    """
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no machine stops here
    from worlds import World  # noqa: PLC0415

    def new(name):
        (tmp_path / name).mkdir()
        return Story(World(tmp_path / name / "checkpoint"))

    undisturbed = new("undisturbed")
    first = undisturbed.first()
    next(first)
    pauser.arm(None)
    assert next(first, None) is None
    pauser.disarm()
    operations = pauser.count
    assert operations > 60
    ended = {CheckpointInUse: 0, None: 0}
    tried = sorted({left for some in pauser.places.values() for left in some})[::every_nth]
    for left in tried:
        story = new(str(left))
        first = story.first()
        next(first)
        pauser.then = story.take_over
        pauser.arm(left)
        kind = None
        try:
            next(first, None)
        except Exception as error:
            kind = type(error)
        finally:
            pauser.disarm()
        assert kind in ended, (left, kind)
        ended[kind] += 1
        story.check()
    assert ended[None] < len(tried) // 5  # only at the end of what it has to do


def accepted(directory, number, *words):
    schema = pa.schema([("word", pa.string())])
    rows = [(word, n) for n, word in enumerate(words)]
    return accepted_rows.accepted([row_file(directory, rows, number, schema)], number, ())


@pytest.mark.parametrize("dies", [False, True], ids=["goes on", "dies after one write"])
def test_cut_off_in_a_sink_it_takes_nothing_away(tmp_path, pauser, monkeypatch, dies):
    """Though tasks of its own write to its stage still, which thus cannot be removed."""
    monkeypatch.setattr(sinks.shutil, "rmtree", lambda path, **more: None)
    monkeypatch.setattr(pauser, "dies", dies)
    rows = [accepted(tmp_path, 0, "a", "b"), accepted(tmp_path, 1, "c")]
    taken = []

    def fence():
        if taken:
            raise CheckpointInUse("was taken over")

    def take_over():
        taken.append(True)
        for each in rows:
            Context().run(sink.write, each)

    def write(name, left):
        sink = to_parquet(tmp_path / name)
        sink.claim("count", "abc", "/cp")
        taken.clear()
        pauser.arm(left)
        with fenced(fence), suppress(Killed, CheckpointInUse, OSError):
            sink.write(rows[0])
        pauser.disarm()

    pauser.then = take_over
    write("undisturbed", None)
    operations = pauser.count
    assert operations >= 7
    for left in range(1, operations + 1):
        sink = to_parquet(tmp_path / str(left))
        write(str(left), left)
        assert taken
        for number, words in enumerate([["a", "b"], ["c"]]):
            (part,) = (tmp_path / str(left) / f"batch_id={number}").iterdir()
            assert pq.ParquetFile(part).read()["word"].to_pylist() == words, left


def test_a_checkpoint_is_made_once(checkpoint, monkeypatch):
    """A second key would make all that is recorded foreign."""
    write_meta, keys = Records.write_meta, []

    def late(records, meta, **more):
        if not keys:
            keys.append(meta["deployment_key"])
            (checkpoint / "ackcore/lock").unlink()
            with OPEN(checkpoint) as second:
                keys.append(f"{second.deployment_key:016x}")
        write_meta(records, meta, **more)

    monkeypatch.setattr(Records, "write_meta", late)
    with pytest.raises(CheckpointInUse, match="was taken over"):
        OPEN(checkpoint)
    with OPEN(checkpoint) as state:
        assert f"{state.deployment_key:016x}" == keys[1] != keys[0]


def test_an_overtaken_driver_removes_no_run_of_its_successor(checkpoint, monkeypatch):
    """It is cut off before it removes the runs of former drivers; another takes over meanwhile."""
    with OPEN(checkpoint) as state:
        state.write_plan(state.make_plan(0, 0))
    removes, made = State._remove_former_runs, []

    def late(first):
        monkeypatch.undo()
        (checkpoint / "ackcore/lock").unlink()
        with Context().run(OPEN, checkpoint) as second:
            made.append(second.runs.new(0))
            removes(first)

    monkeypatch.setattr(State, "_remove_former_runs", late)
    with pytest.raises(CheckpointInUse, match="was taken over"):
        OPEN(checkpoint)
    assert made[0].is_dir()


@pytest.mark.parametrize("once", [True, False])
def test_files_where_there_are_no_links(tmp_path, monkeypatch, once):
    def link(old, new):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(atomic.os, "link", link)
    path = tmp_path / "file"
    atomic.write_file(path, lambda file: file.write(b"1"), once=once)
    if once:
        with pytest.raises(FileExistsError):
            atomic.write_file(path, lambda file: file.write(b"2"), once=True)
    else:
        atomic.write_file(path, lambda file: file.write(b"2"))
    assert path.read_bytes() == (b"1" if once else b"2")
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    def link(old, new):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "link", link)
    with pytest.raises(StateError, match="No space left"):
        atomic.write_file(tmp_path / "file", lambda file: file.write(b"1"), once=True)
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_gone_or_cannot_be_read(checkpoint):
    lock = checkpoint / "ackcore/lock"
    with OPEN(checkpoint) as state:
        state.check_owner()
        held = lock.read_text()
        lock.unlink()
        with pytest.raises(CheckpointInUse, match="was removed, so another driver can take"):
            state.check_owner()
        lock.mkdir()
        with pytest.raises(StateError, match="lock cannot be read"):
            state.check_owner()
        lock.rmdir()
        lock.write_text(held)  # as in a backup of the whole checkpoint, restored under its driver
        with pytest.raises(CheckpointInUse, match=r"was replaced while this driver ran, .* a copy"):
            state.check_owner()


def test_what_others_left_in_the_making_is_swept(tmp_path):
    stages = tmp_path / "out" / "_stages"
    names = ["0.0a1b.tmp", "2.0a1b.tmp", "3.0a1b.tmp", "x.tmp"]
    for name in names:
        (stages / name / "parts").mkdir(parents=True)
    stage = to_parquet(tmp_path / "out")._stage(2)
    left = sorted(path.name for path in stages.iterdir())
    assert left == sorted([names[2], names[3], stage.rpartition("/")[2]])
