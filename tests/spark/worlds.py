"""Sources, bolts, sinks and a Spark that are made up, for the protocol to be tried on."""

from __future__ import annotations

import json
import math
import os
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from ackcore.spark.base.reasons import FAILED, Reasons
from ackcore.spark.base.schemas import ATTEMPT, MESSAGE_ID, SinkFile
from ackcore.spark.checkpoint.state import State
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine import act, batch, runs, table_changes
from ackcore.spark.engine.action import Jobs
from ackcore.spark.engine.batch import Engine
from ackcore.spark.engine.setup import RunResult
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink import Sink
from ackcore.spark.sinks.sink_batch import read_sink_file
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.stores.run_files import making_in, read_file
from ackcore.spark.tasks import inflight_markers
from ackcore.spark.tasks.failed_rows import FailedRows
from ackcore.spark.tasks.failed_writer import FailedWriter
from ackcore.spark.tasks.record_ids import SourceRecords
from ackcore.spark.tasks.row_files import PLACE, ROOT, ROOT_ID, ROOTS, RowFileWriter, read_whole
from ackcore.tables.folding import finished
from ackcore.topology import BasicBolt, TopologyBuilder
from ackcore.topology.tuples import Reason

LINES = pa.schema([("line", pa.string())])


#: The fixture `world`, once with its checkpoint on disk and once in a bucket.
anywhere = pytest.mark.parametrize("world", ["disk", "bucket"], indirect=True)


class Killed(BaseException):
    """The driver is no more: nothing of its code may catch this."""


class KilledInCall(Killed, KeyboardInterrupt):
    """The same within a call of a sink or of the dead-letter store, whose errors are its own."""


def killed(step):
    """Return what a driver dies of at a failpoint."""
    return KilledInCall if step in ("in-sink", "in-transaction", "in-dead-letters") else Killed


@contextmanager
def dying_at(step, number):
    """Kill the driver at a step of a micro-batch, if it comes there."""

    def failpoint(name, n=None):
        if (name, n) == (step, number):
            raise killed(name)

    with pytest.MonkeyPatch.context() as patch:
        for module in (act, batch, runs, table_changes):
            patch.setattr(module, "failpoint", failpoint)
        with suppress(Killed):
            yield


class Upper(BasicBolt):
    outputs = pa.schema([("line", pa.string())])

    def execute(self, tuple, collector):
        """Never called: the runs are made up."""


class Source:
    """A stand-in for the part of a DataFrame that a builder reads."""

    columns = ("line",)
    schema = SimpleNamespace(names=["line"])


def root_of(key, spout, line, attempt):
    return zlib.crc32(f"{key}/{spout}/{line}/{attempt}".encode())


@dataclass
class World(Sink):
    """Sources, bolts and sinks: everything outside of the driver, that outlives it."""

    path: Path | str
    settings: dict = field(default_factory=dict)
    spouts: tuple = ("lines",)
    now_ms: int = 1_000_000
    #: What a line does: a function of (line, attempt) that returns None or a Reason, or raises.
    behaves: object = lambda line, attempt: None
    shared_rows: list = field(default_factory=list)
    problems: list = field(default_factory=list)
    runs: list = field(default_factory=list)
    snapshot_epochs: list = field(default_factory=list)
    written: dict = field(default_factory=dict)
    sink_fails: int = 0
    dead: dict = field(default_factory=dict)
    dead_letters_fail: int = 0
    paused: list = field(default_factory=list)
    stopping: bool = False
    lost: int = 0
    raised: dict = field(default_factory=dict)
    spark: object = None  # of sinks that ask for one

    def __post_init__(self):
        builder = TopologyBuilder()
        for spout in self.spouts:
            builder.spout(spout, Source())
        bolt = builder.bolt("upper", Upper())
        for spout in self.spouts:
            bolt.shuffle(spout)
        self._sink(builder)
        self.topology = builder.build(backoff_s=10.0, **self.settings)

    # what the sinks and the store of the dead do

    def _sink(self, builder):
        builder.sink("upper", self)

    def write(self, accepted):
        if self.sink_fails:
            self.sink_fails -= 1
            self.written[accepted.batch_id] = ["half of it"]
            raise ConnectionError("the sink is down")
        rows = [
            row
            for file in accepted.files
            for some in read_sink_file(file, accepted.nonacked)
            for row in some["line"].to_pylist()
        ]
        self.written[accepted.batch_id] = rows

    def write_dead_letters(self, number, dead):
        if self.dead_letters_fail:
            self.dead_letters_fail -= 1
            raise OSError("the store is down")
        self.dead[number] = [line for table in dead.values() for line in table["line"].to_pylist()]
        act.failpoint("in-dead-letters", number)

    # what Spark does

    def _records(self, inputs, plan):
        """(root, spout, place among those due or None, line, attempt) of each."""
        for spout, line in inputs:
            yield root_of(plan.key, spout, line, 0), spout, None, line, 0
        for spout, file in plan.retries.items():
            table = read_whole(file)
            lines, attempts = table["line"].to_pylist(), table[ATTEMPT].to_pylist()
            for place, (line, attempt) in enumerate(zip(lines, attempts, strict=True)):
                yield root_of(plan.key, spout, line, attempt), spout, place, line, attempt

    def load_snapshot(self, inputs, directory):
        rows = read_file(os.path.join(directory, "rows.json"))
        return None if rows is None else [tuple(one) for one in json.loads(bytes(rows))]

    def snapshot_inputs(self, inputs, directory, epoch):
        self.snapshot_epochs.append(epoch)
        with making_in(directory) as place:
            (place / "rows.json").write_text(json.dumps(list(inputs)))
        return self.load_snapshot(inputs, directory)

    def run(self, topology, layout, inputs, plan):
        self.runs.append(plan)
        # And nothing of another run.
        if not is_bucket(plan.work):
            assert {path.name for path in Path(plan.work).iterdir()} <= {"retries"}
        records, retried, failed, rows = {}, {}, [], []
        for root, spout, place, line, attempt in self._records(inputs, plan):
            counted = records if place is None else retried
            counted[spout] = counted.get(spout, 0) + 1
            if root in plan.rejected:
                failed.append((root, spout, Reason("x", "Killed", "rejected").encode()))
                continue
            reason = self._mark_and_run(plan, root, line, attempt)
            if reason is not None:
                failed.append((root, spout, reason.encode()))
            rows.append((line.upper(), root))
        files = [self._file(plan.work, rows, pa.field(ROOT, pa.int64()))]
        roots = dict(rows)
        shared = [("&".join(some), [roots[line] for line in some]) for some in self.shared_rows]
        files.append(self._file(plan.work, shared, pa.field(ROOTS, pa.list_(pa.int64()))))
        columns = [list(column) for column in zip(*failed, strict=True)] or [[], [], []]
        table = pa.table(columns, schema=FAILED)
        problems = (self.problems.pop(0),) if self.problems else ()
        return RunResult(
            records, retried, table, tuple(files), problems, self.lost, {}, {}, self.raised
        )

    def _mark_and_run(self, plan, root, line, attempt):
        if not plan.careful:
            return self.behaves(line, attempt)
        marker = inflight_markers.marker_of(plan.work, inflight_markers.TaskAttempt(1, 0, 7))
        if root in plan.suspects:
            marker.set(inflight_markers.ALONE, roots=np.array([root]))
        else:
            marker.set(inflight_markers.ROOTS, roots=np.array([root, root + 1]))
        try:
            reason = self.behaves(line, attempt)
        except BaseException:
            if not is_bucket(plan.work):
                marker._file.close()  # and with it goes the lock: its process is dead
            raise
        marker.remove()
        return reason

    def _file(self, work, rows, roots):
        schema = LINES.append(roots)
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], []]
        file = RowFileWriter(work, schema, 0)
        file.write(pa.record_batch(columns, schema=schema))
        return SinkFile("upper", "default", *file.finish()[:2], file.nbytes)

    def setup(self, topology, layout, inputs, plan, spilled):
        return SimpleNamespace(inputs=inputs, plan=plan)

    def judge(self, setup, accepted, failed, rules):
        writer = FailedWriter(replace(rules, inline_bytes=math.inf), "", 0)
        said = dict(zip(failed["root_id"].to_pylist(), failed["reason"].to_pylist(), strict=True))
        for spout, lost in self.fetch(setup, accepted, failed).items():
            reasons = Reasons.of_texts(pa.array([said[root] for root in lost[ROOT_ID].to_pylist()]))
            new = lost[PLACE].is_null().to_numpy()
            due = None if new.all() else read_whole(setup.plan.retries[spout])
            for rows, stored in ((new, None), (~new, due)):
                some = SourceRecords(SimpleNamespace(name=spout), None, 0, 0, due=stored)
                for failed_rows in lost.filter(pa.array(rows)).combine_chunks().to_batches():
                    writer.write(some, failed_rows, reasons.taken(np.flatnonzero(rows)))
        report, tables = writer.finish()
        return FailedRows.of("", [report], tables)

    def fetch(self, setup, accepted, failed):
        inputs, plan = setup.inputs, setup.plan
        wanted = dict(zip(failed["root_id"].to_pylist(), failed["spout"].to_pylist(), strict=True))
        found = {}
        for root, spout, place, line, attempt in self._records(inputs, plan):
            if root in wanted:
                assert wanted[root] in (spout, None)
                message_id = line.partition("#")[0]
                found.setdefault(spout, []).append((root, place, message_id, attempt, line))
        schema = pa.schema(
            [
                ("_ackcore_root_id", pa.int64()),
                ("_ackcore_place", pa.int64()),
                (MESSAGE_ID, pa.string()),
                (ATTEMPT, pa.int32()),
                *LINES,
            ]
        )
        return {
            spout: pa.table([list(column) for column in zip(*rows, strict=True)], schema=schema)
            for spout, rows in found.items()
        }

    # the driver

    def pause(self, seconds):
        if seconds:
            self.paused.append(seconds)
        return self.stopping

    def driver(self, **changes):
        of = {"kind": "batch", "clock_ms": self.now_ms, **changes}
        sources = dict.fromkeys(self.spouts, LINES)
        state = State.open(self.path, self.topology, sources=sources, **of)
        engine = Engine(
            self.topology,
            self.spark,
            state,
            self.write_dead_letters,
            clock=lambda: self.now_ms,
            pause=self.pause,
            jobs=Jobs(self.run, self.snapshot_inputs, self.load_snapshot, self.setup, self.judge),
        )
        return state, engine

    def process(self, number, lines=(), **changes):
        """Start a driver for one micro-batch, and end it."""
        state, engine = self.driver(**changes)
        inputs = [line if isinstance(line, tuple) else ("lines", line) for line in lines]
        with state:
            progress = engine.process(number, inputs)
            return progress, engine.counts

    def drain(self, number):
        """Run micro-batches without new rows until nothing waits."""
        for n in range(number, number + 100):
            self.now_ms += 400_000
            _, counts = self.process(n)
            if not counts.waiting:
                return counts
        raise AssertionError("records wait for ever")

    @property
    def rows(self):
        return sorted(row for rows in self.written.values() for row in rows)

    @property
    def parked(self):
        return sorted(line for lines in self.dead.values() for line in lines)


#: The steps of a micro-batch with tables at which a driver can be killed.
STEPS = [
    *("planned", "ran", "checked", "decided", "in-sink", "refused", "refusals-closed", "folded"),
    *("tables-recorded", "changes-recorded", "in-dead-letters", "acted", "marked", "pruned"),
]


def rows_of(table):
    """Return the rows of a stored table."""
    return [row for one in table.reader().scan() for row in finished(table.shape, one).to_pylist()]


def waiting_rows(state, number):
    """Return the records that wait after a micro-batch."""
    waits = state.waiting(number)
    return [row for spout in waits for table in waits.tables(spout) for row in table.to_pylist()]


def _by_last_character(line, attempt):
    does = line[-1]
    if does == "f" or (does in "12" and attempt < int(does)):
        return Reason("upper", "ValueError", "no", does == "f" and "x" in line)
    return None


class Replaying(World):
    """A world with stored dead letters. The lines of those that are sent again succeed.

    The last character of a line decides: 1 and 2 fail so often, f always, and the sink refuses R.
    """

    def __post_init__(self):
        self.fixed, self.behaves = set(), _by_last_character
        super().__post_init__()

    def driver(self, **changes):
        state, engine = super().driver(**changes)
        self.state = state
        return state, engine

    def write_dead_letters(self, number, dead):
        state = self.state
        letters = DeadLetters.checked(state.url, state.deployment_key, records=state.records)()
        letters.write(number, dead)
        super().write_dead_letters(number, dead)

    def write(self, accepted):
        super().write(accepted)
        bad = [row for row in self.written[accepted.batch_id] if self.refuses(row)]
        if not bad:
            return None
        act.failpoint("in-sink", accepted.batch_id)
        return SinkRejects(pa.table({"line": bad}), "refused")

    def _mark_and_run(self, plan, root, line, attempt):
        return None if line in self.fixed else super()._mark_and_run(plan, root, line, attempt)

    def refuses(self, row):
        """Return whether the sink refuses a row, unless its line is fixed."""
        return row.endswith("R") and row not in {line.upper() for line in self.fixed}

    def replay(self):
        """Send all dead letters that were not sent."""
        if self.dead:
            assert sum(replay(self.path).records.values()) == len(self.parked)
            self.fixed.update(self.parked)
            self.dead.clear()


class Writing(World):
    """A world whose sink is a real one."""

    def __init__(self, path, writer, *of):
        self.writer = writer
        super().__init__(path, *of)

    def _sink(self, builder):
        builder.sink("upper", self.writer)

    def driver(self):
        state, engine = super().driver()
        deployment = f"{state.deployment_key:016x}"
        for how in ("check", "claim"):
            of = (LINES,) if how == "check" else (deployment, str(self.path))
            getattr(self.writer, how, lambda *of: None)("upper", *of)
        return state, engine


def fails(*lines, times=1, final=False):
    """Lines that fail so many times."""

    def behaves(line, attempt):
        if line in lines and attempt < times:
            return Reason("upper", "ValueError", f"no {line}", final)
        return None

    return behaves
