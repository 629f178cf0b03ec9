"""A made-up world with its checkpoint, sink and dead letters in a place, and drivers in it.

No tests; a module of its own, so that a fork server can load it once for all of them.  No Spark is
started: what of the protocol is real are its drivers' processes, and all that they write.
"""

from __future__ import annotations

import os
from contextvars import Context

import pyarrow as pa
from worlds import World

from ackcore.spark.base import failpoints
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink import Sink
from ackcore.spark.sinks.sink_batch import read_sink_file
from ackcore.tables import count
from ackcore.topology.tuples import Reason

#: Of each micro-batch; what begins with "bad" is rejected by the bolt, with "no" by the sink.
BATCHES = (["a", "b", "c", "bad-1", "no-1"], ["d", "e", "f", "bad-2", "no-2"])
KEPT = ["A", "B", "C", "D", "E", "F"]
DEAD = ["bad-1", "bad-2", "no-1", "no-2"]
#: What fails the first time, by the driver that runs it: no two decide alike.
FLAKY = {"first": ("a", "d"), "second": ("b", "e"), "third": ("c", "f")}


class Picky(Sink):
    """Parquet that does not take all."""

    replaces = True

    def __init__(self, writer):
        self.writer = writer

    def write(self, accepted):
        lines = [
            line
            for file in accepted.files
            for rows in read_sink_file(file, accepted.nonacked)
            for line in rows["line"].to_pylist()
        ]
        if bad := [line for line in lines if line.startswith("NO")]:
            raise SinkRejects(pa.table({"line": bad}), "not taken")
        self.writer.write(accepted)


class PlacedWorld(World):
    """A world in a place, as `places` has them, whose bolt fails for some lines of a role."""

    def __init__(self, place, role):
        self.place, self.role = place, role
        super().__init__(place.checkpoint, {"max_sink_attempts": 1}, behaves=self.fails)

    def _sink(self, builder):
        self.parquet = to_parquet(self.place.sink)
        builder.sink("upper", Picky(self.parquet))
        # A row that is folded twice has 2 in ``n``.
        builder.table("seen", from_="upper", key="line", value={"n": count()})
        self.changes = to_parquet(f"{self.place.sink}-changes")
        builder.sink("seen.changes", self.changes)

    def fails(self, line, attempt):
        if line.startswith("bad"):
            return Reason("upper", "Reject", "no", True)
        flaky = line in FLAKY[self.role] and attempt == 0
        return Reason("upper", "ValueError", "flaky", False) if flaky else None

    def driver(self):
        state, engine = super().driver()
        letters = DeadLetters.checked(state.url, state.deployment_key, None, None, state.records)()
        engine._write_dead_letters = letters.write
        for name, sink in (("upper", self.parquet), ("seen.changes", self.changes)):
            sink.claim(name, f"{state.deployment_key:016x}", str(self.path))
        return state, engine

    def run_to_end(self):
        """Be one driver, from wherever the last one was to the end; return the counts."""
        state, engine = self.driver()
        with state:
            number = 0 if state.last_done is None else state.last_done + 1
            while number < len(BATCHES) or engine.counts.waiting:
                lines = BATCHES[number] if number < len(BATCHES) else ()
                self.now_ms += 400_000
                engine.process(number, [("lines", line) for line in lines])
                number += 1
            return engine.counts


def drive(place, role, points, said):
    """Be a driver in a process of its own; leave in a file what it ended with."""
    os.environ.update(place.environment)
    failpoints._POINTS = failpoints.parse(points)
    try:
        PlacedWorld(place, role).run_to_end()
        ended = "the end"
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    said.write_text(ended)


def run_here(place, role):
    """Be another driver in this process: nothing of what fences a test's own is around it."""
    return Context().run(PlacedWorld(place, role).run_to_end)
