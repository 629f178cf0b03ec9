"""A disk that is full at any write of a micro-batch: a named error, and nothing is lost by it."""

from __future__ import annotations

import errno
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkpoints import Killer, ask, records
from worlds import World

from ackcore.spark.base.errors import StateError
from ackcore.spark.base.schemas import MESSAGE_ID
from ackcore.spark.checkpoint import waiting
from ackcore.spark.dead_letters import compaction
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.letter_files import read_letters
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine.insist import SinkError
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.topology.tuples import Reason

LINES = [["a", "b", "poison"], ["c", "d", "venom"], ["e", "f", "bile"]]


class FullDisk(Killer):
    """Has no room for the n-th write, and if it ``lasts`` for none after it."""

    EVENTS = frozenset({"os.rename", "os.link", "os.mkdir"})

    def __init__(self):
        self.lasts = False
        super().__init__()

    def step(self):
        self.count += 1
        if self.left and (self.count == self.left or (self.lasts and self.count > self.left)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fsync(self, handle):
        """The write fails only now."""
        if self.active:
            self.note()
            self.step()


class Story:
    """Retries, dead letters, one of them sent again, and what puts small files together."""

    def __init__(self, path):
        path.mkdir()
        self.path, self.sink = path / "checkpoint", path / "sink"
        self.world = World(self.path, behaves=self.behaves)
        (sink,) = self.world.topology.sinks.values()
        object.__setattr__(sink, "writer", to_parquet(self.sink))
        table = records(0, 1, attempt=0).set_column(0, MESSAGE_ID, pa.array(["sent again"]))
        self.again = table.rename_columns([*table.column_names[:-1], "line"])

    def behaves(self, line, attempt):
        if line in ("poison", "venom", "bile"):
            return Reason("upper", "Reject", "no", True)
        flaky = line in ("a", "c", "e") and attempt == 0
        return Reason("upper", "ValueError", "flaky", False) if flaky else None

    def run(self):
        """To the end, from where it stands."""
        state, engine = self.world.driver()
        with state:
            letters = DeadLetters.checked(self.path, state.deployment_key)()
            engine._write_dead_letters = letters.write
            number = 0 if state.last_done is None else state.last_done + 1
            while number < len(LINES) or engine.counts.waiting:
                self.world.now_ms += 20_000
                lines = LINES[number] if number < len(LINES) else []
                engine.process(number, [("lines", line) for line in lines])
                number += 1
            return engine.counts

    def letters(self):
        return store_of(self.path).files("lines")

    def check(self, counts):
        assert (counts.records, counts.replayed, counts.acked, counts.dead) == (9, 1, 7, 3)
        assert counts.balanced
        parts = sorted(self.sink.glob("batch_id=*/*.parquet"))
        rows = [row for part in parts for row in pq.ParquetFile(part).read()["line"].to_pylist()]
        assert sorted(rows) == ["A", "B", "C", "D", "E", "F", "LINE 0"]
        letters = [read_letters(file.path) for file in self.letters()]
        dead = [row for table in letters for row in table["payload"].to_pylist()]
        assert sorted(row["line"] for row in dead) == ["bile", "poison", "venom"]


def story_of(path):
    story = Story(path)
    with story.world.driver()[0]:
        ask(story.path, table=story.again)
    return story


@pytest.fixture(scope="module")
def disk():
    return FullDisk()


@pytest.mark.parametrize("every_nth", [3, pytest.param(1, marks=pytest.mark.faults)])
def test_wherever_it_is_full_no_record_is_lost_or_blamed(tmp_path, monkeypatch, disk, every_nth):
    """At every n-th place in the code that writes, for a moment or until there is room."""
    monkeypatch.setattr(os, "fsync", disk.fsync)
    monkeypatch.setattr(compaction, "_FEWEST", 2)
    monkeypatch.setattr(waiting, "_FAN", 2)
    undisturbed = story_of(tmp_path / "undisturbed")
    disk.arm(None)
    counts = undisturbed.run()
    disk.disarm()
    undisturbed.check(counts)
    assert len(undisturbed.letters()) == 2  # of three
    seen, told = set(), []
    places = sorted(first for first, _ in disk.places.values())
    for n, left in enumerate(places[::every_nth]):
        disk.lasts = bool(n % 2)
        story = story_of(tmp_path / str(left))
        disk.arm(left)
        for _ in range(2):  # started again before there is room
            try:
                story.run()
                break
            except (StateError, SinkError) as error:
                seen.add(type(error).__name__)
                told.append("No space left on device" in str(error))
                if isinstance(error, SinkError):
                    of_sink = f"sink 'upper' at {story.sink} failed "
                    told.append(str(error).startswith((of_sink, "the dead-letter store failed ")))
        disk.disarm()
        story.check(story.run())
    assert len(disk.places) > 40
    assert all(told)
    assert seen == {"StateError", "SinkError"}
