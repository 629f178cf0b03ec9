"""A made-up world on disk, and drivers in it that are real processes, to be killed.

No tests; a module of its own, so that a fork server can load it once for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
from worlds import World

from ackcore.spark.base import failpoints
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink_batch import read_with_places

#: Lines of each micro-batch; those that begin with "bad" are refused.
BATCHES = (["a", "bad-b", "c", "d"], ["e", "f", "bad-g", "bad-h"])


class DiskWorld(World):
    """Sink and dead letters are files, which outlive the driver as they do elsewhere.

    ``kind`` is how the sink refuses rows: "return"s or "raise"s who, or is "isolate"d.
    """

    replaces = True

    def __init__(self, path, kind):
        self.kind, self.root = kind, Path(path)
        self.database = self.root / "sink.db"
        with closing(sqlite3.connect(self.database)) as sink, sink:
            sink.execute("CREATE TABLE IF NOT EXISTS lines (line text, batch int)")
            sink.execute("CREATE TABLE IF NOT EXISTS batches (batch int PRIMARY KEY)")
        super().__init__(self.root / "checkpoint", {"max_sink_attempts": 3})

    def _sink(self, builder):
        builder.sink("upper", self, isolate=[ValueError] if self.kind == "isolate" else False)

    def pause(self, seconds):
        return False

    def write(self, accepted):
        lines = [
            line
            for file in accepted.files
            for some, _ in read_with_places(file, accepted.nonacked)
            for line in some["line"].to_pylist()
        ]
        bad = [line for line in lines if line.startswith("BAD")]
        rejects = SinkRejects(pa.table({"line": pa.array(bad, pa.string())}), "no") if bad else None
        number = accepted.batch_id
        with closing(sqlite3.connect(self.database)) as sink:
            if (
                self.kind == "raise"
                and sink.execute("SELECT 1 FROM batches WHERE batch = ?", [number]).fetchone()
            ):
                return None
            if self.kind != "return" and bad:
                raise rejects if self.kind == "raise" else ValueError(f"no {bad}")
            with sink:
                if self.kind != "raise":  # it replaces
                    sink.execute("DELETE FROM lines WHERE batch = ?", [number])
                kept = [(line, number) for line in lines if line not in bad]
                sink.executemany("INSERT INTO lines VALUES (?, ?)", kept)
                sink.execute("INSERT OR IGNORE INTO batches VALUES (?)", [number])
                failpoint("in-transaction", number)
        return rejects

    def write_dead_letters(self, number, dead):
        lines = [line for table in dead.values() for line in table["line"].to_pylist()]
        file = self.root / f"dead-{number}.json"
        file.with_suffix(".tmp").write_text(json.dumps(lines))
        os.replace(file.with_suffix(".tmp"), file)
        failpoint("in-dead-letters", number)

    def kept(self):
        with closing(sqlite3.connect(self.database)) as sink:
            return sorted(line for (line,) in sink.execute("SELECT line FROM lines"))

    def letters(self):
        files = sorted(self.root.glob("dead-*.json"))
        return sorted(line for file in files for line in json.loads(file.read_text()))


def in_processes(drive, patience_s):
    """Return what has `drive` run in a process of its own, and returns what that ended with."""
    context = multiprocessing.get_context("forkserver")
    # What takes long to load; its path has not this directory.
    context.set_forkserver_preload(["ackcore.spark.engine.batch", "ackcore.topology"])

    def driver(*of):
        process = context.Process(target=drive, args=of)
        process.start()
        process.join(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and its JVM, if it has one
        assert process.exitcode is not None
        return process.exitcode

    return driver


def drive(path, kind, points):
    """Be a driver that takes all micro-batches; points are as `failpoints` has them."""
    failpoints._POINTS = failpoints.parse(points)
    world = DiskWorld(path, kind)
    state, _ = world.driver()
    with state:
        first = state.last_done or 0
    for number, lines in enumerate(BATCHES[first:], first):
        world.process(number, lines)
