"""The protocol, step by step, with a run that is made up: what must hold wherever it is cut off."""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from ackcore.spark import act, batch
from ackcore.spark.batch import Engine, RunFailed
from ackcore.spark.blame import blame, certainty, failed_attempt
from ackcore.spark.files import CheckpointCorrupt
from ackcore.spark.run import Run
from ackcore.spark.sinks import SinkError, read_accepted
from ackcore.spark.state import ATTEMPT, MESSAGE_ID, Plan, SinkFile, State
from ackcore.spark.workfiles import ROOT, ROOTS
from ackcore.topology import BasicBolt, TopologyBuilder
from ackcore.topology.tuples import Reason

STEPS = ["planned", "ran", "checked", "decided", "in-sink", "in-dead-letters", "acted", "marked"]
LINES = pa.schema([("line", pa.string())])


class Killed(BaseException):
    """The driver is no more: nothing of its code may catch this."""


class Upper(BasicBolt):
    outputs = pa.schema([("line", pa.string())])

    def execute(self, tuple, collector):
        """Never called: the runs are made up."""


class Source:
    """As much of a DataFrame as a builder looks at."""

    columns = ("line",)
    schema = SimpleNamespace(names=["line"])


def root_of(key, spout, line, attempt):
    return zlib.crc32(f"{key}/{spout}/{line}/{attempt}".encode())


@dataclass
class World:
    """Sources, bolts and sinks: everything outside of the driver, that outlives it."""

    path: Path
    settings: dict = field(default_factory=dict)
    spouts: tuple = ("lines",)
    now_ms: int = 1_000_000
    #: What a line does: a function of (line, attempt) that returns None or a Reason, or raises.
    behaves: object = lambda line, attempt: None
    entangled: list = field(default_factory=list)
    problems: list = field(default_factory=list)
    runs: list = field(default_factory=list)
    written: dict = field(default_factory=dict)
    sink_fails: int = 0
    dead: dict = field(default_factory=dict)
    dead_letters_fail: int = 0
    paused: list = field(default_factory=list)
    stopping: bool = False
    lost: int = 0

    def __post_init__(self):
        builder = TopologyBuilder()
        for spout in self.spouts:
            builder.spout(spout, Source())
        bolt = builder.bolt("upper", Upper())
        for spout in self.spouts:
            bolt.shuffle(spout)
        builder.sink("upper", self)
        self.topology = builder.build(backoff_ms=10_000, **self.settings)

    # what the sinks and the store of the dead do

    def write(self, frame, batch_id):
        raise AssertionError("the files are handed over")

    def write_accepted(self, accepted):
        if self.sink_fails:
            self.sink_fails -= 1
            self.written[accepted.batch_id] = ["half of it"]
            raise ConnectionError("the sink is down")
        rows = [
            row
            for path in accepted.paths
            for some in read_accepted(path, accepted.nonacked)
            for row in some["line"].to_pylist()
        ]
        self.written[accepted.batch_id] = rows

    def write_dead_letters(self, number, dead):
        if self.dead_letters_fail:
            self.dead_letters_fail -= 1
            raise OSError("the store is down")
        self.dead[number] = [line for table in dead.values() for line in table["line"].to_pylist()]
        act.reach("in-dead-letters", number)

    # what Spark does

    def _records(self, inputs, plan):
        for spout, line in inputs:
            yield root_of(plan.key, spout, line, 0), spout, line, 0
        for spout, path in plan.retries.items():
            with pa.ipc.open_file(path) as reader:
                table = reader.read_all()
            lines, attempts = table["line"].to_pylist(), table[ATTEMPT].to_pylist()
            for line, attempt in zip(lines, attempts, strict=True):
                yield root_of(plan.key, spout, line, attempt), spout, line, attempt

    def pinned(self, inputs, directory):
        rows = directory / "rows.json"
        return [tuple(one) for one in json.loads(rows.read_text())] if rows.exists() else None

    def pin(self, inputs, directory):
        directory.mkdir()
        (directory / "rows.json").write_text(json.dumps(list(inputs)))
        return self.pinned(inputs, directory)

    def run(self, topology, layout, inputs, plan):
        self.runs.append(plan)
        left = {path.name for path in Path(plan.work).iterdir()}
        assert all(name.startswith("retries-") for name in left)  # and nothing of another run
        records, retried, failed, rows = {}, {}, [], []
        for root, spout, line, attempt in self._records(inputs, plan):
            counted = retried if attempt or (spout, line) not in inputs else records
            counted[spout] = counted.get(spout, 0) + 1
            if root in plan.condemned:
                failed.append((root, spout, Reason("x", "Killed", "condemned").encode()))
                continue
            reason = self._mark_and_run(plan, root, line, attempt)
            if reason is not None:
                failed.append((root, spout, reason.encode()))
            rows.append((line.upper(), root))
        work = Path(plan.work)
        files = [self._file(work / "one.arrow", rows, pa.field(ROOT, pa.int64()))]
        roots = dict(rows)
        shared = [("&".join(some), [roots[line] for line in some]) for some in self.entangled]
        files.append(self._file(work / "many.arrow", shared, pa.field(ROOTS, pa.list_(pa.int64()))))
        columns = [list(column) for column in zip(*failed, strict=True)] or [[], [], []]
        table = pa.table(columns, schema=pa.schema(batch.FAILED))
        problems = (self.problems.pop(0),) if self.problems else ()
        return Run(records, retried, table, tuple(files), problems, self.lost, {})

    def _mark_and_run(self, plan, root, line, attempt):
        if not plan.careful:
            return self.behaves(line, attempt)
        marks = Path(plan.work, "marks")
        marks.mkdir(exist_ok=True)
        in_hand = [root] if root in plan.suspects else [root, root + 1]
        (marks / "7.mark").write_bytes(np.array(in_hand, np.int64).tobytes())
        reason = self.behaves(line, attempt)
        (marks / "7.mark").unlink()
        return reason

    def _file(self, path, rows, roots):
        schema = LINES.append(roots)
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], []]
        with pa.ipc.new_stream(path, schema) as writer:
            writer.write_table(pa.table(columns, schema=schema))
        return SinkFile("upper", "default", path.name, len(rows))

    def fetch(self, topology, layout, inputs, plan, accepted, failed):
        wanted = dict(zip(failed["root_id"].to_pylist(), failed["spout"].to_pylist(), strict=True))
        found = {}
        for root, spout, line, attempt in self._records(inputs, plan):
            if root in wanted:
                assert wanted[root] in (spout, None)
                found.setdefault(spout, []).append((root, line, attempt, line))
        schema = pa.schema(
            [
                ("_ackcore_root_id", pa.int64()),
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

    def driver(self):
        state = State.open(self.path, self.topology, kind="batch", clock_ms=self.now_ms)
        engine = Engine(
            self.topology,
            None,
            state,
            self.write_dead_letters,
            clock=lambda: self.now_ms,
            pause=self.pause,
            run=self.run,
            fetch=self.fetch,
            pinned=self.pinned,
            pin=self.pin,
        )
        return state, engine

    def process(self, number, lines=()):
        """Start a driver for one micro-batch, and end it."""
        state, engine = self.driver()
        inputs = [line if isinstance(line, tuple) else ("lines", line) for line in lines]
        with state:
            progress = engine.process(number, inputs)
            return progress, engine.books

    def drain(self, number):
        """Run micro-batches without new rows until nothing waits."""
        for n in range(number, number + 100):
            self.now_ms += 400_000
            _, books = self.process(n)
            if not books.waiting:
                return books
        raise AssertionError("records wait for ever")

    @property
    def rows(self):
        return sorted(row for rows in self.written.values() for row in rows)

    @property
    def parked(self):
        return sorted(line for lines in self.dead.values() for line in lines)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.fixture
def dying_at(monkeypatch):
    """``with dying_at(step):`` the driver dies there."""

    @contextmanager
    def dying_at(step):
        def reach(name, n=None):
            if name == step:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(batch, "reach", reach)
            with pytest.raises(Killed):
                yield

    return dying_at


def fails(*lines, times=1, final=False):
    """Lines that fail so many times."""

    def behaves(line, attempt):
        if line in lines and attempt < times:
            return Reason("upper", "ValueError", f"no {line}", final)
        return None

    return behaves


def test_all_is_well(world):
    progress, books = world.process(0, ["a", "b"])
    assert world.rows == ["A", "B"]
    assert (progress.records, progress.acked, progress.failed, progress.dead) == (2, 2, 0, 0)
    assert (books.records, books.acked, books.waiting, books.dead) == (2, 2, 0, 0)
    assert books.balanced
    assert str(progress).startswith("micro-batch 0: 2 acked, 0 failed, 0 retried, 0 dead")
    assert set(progress.steps_ms) == {"plan", "run", "check", "decide", "act", "mark"}


def test_a_failed_record_waits_and_is_tried_again(world):
    world.behaves = fails("b")
    _, books = world.process(0, ["a", "b"])
    assert world.rows == ["A"]
    assert (books.acked, books.waiting) == (1, 1)
    progress, books = world.process(1, ["c"])  # it is not due yet
    assert progress.retried == 0
    assert (progress.waiting, progress.oldest_ms) == (1, 0)
    world.now_ms += 10_000
    progress, books = world.process(2)
    assert (progress.retried, progress.acked, progress.waiting) == (1, 1, 0)
    assert progress.latency_ms.p50 == 10_000
    assert world.rows == ["A", "B", "C"]
    assert books.balanced
    assert (books.records, books.acked, books.retried) == (3, 3, 1)


def test_a_record_that_keeps_failing_is_dead_after_its_last_attempt(world):
    world.behaves = fails("b", times=100)
    world.process(0, ["a", "b"])
    books = world.drain(1)
    assert world.rows == ["A"]
    assert world.parked == ["b"]
    assert (books.acked, books.dead, books.retried) == (1, 1, 4)
    assert len(world.runs) == 5


def test_a_final_reason_leads_to_the_dead_letters_at_once(world):
    world.behaves = fails("b", final=True)
    progress, books = world.process(0, ["a", "b"])
    assert (progress.failed, progress.dead, progress.waiting) == (1, 1, 0)
    assert world.parked == ["b"]
    assert books.balanced


def test_what_waits_is_bounded(tmp_path):
    world = World(tmp_path, {"max_waiting": 2})
    world.behaves = fails("a", "b", "c", "d")
    progress, _ = world.process(0, ["a", "b", "c", "d", "e"])
    assert (progress.waiting, progress.dead) == (2, 2)
    state, _ = world.driver()
    with state:
        dead = state.decision(0).dead["lines"]
    reason = Reason.decode(dead["_ackcore_reason"][0].as_py())
    assert (reason.component, reason.type) == ("upper", "WaitingFull")
    assert reason.message == (
        "2 records wait already (max_waiting); it failed with ValueError: no c"
    )
    assert dead[ATTEMPT].to_pylist() == [1, 1]
    books = world.drain(1)
    assert world.rows == ["A", "B", "E"]
    assert world.parked == ["c", "d"]
    assert books.balanced


def test_the_bound_is_for_all_spouts_together(tmp_path):
    world = World(tmp_path, {"max_waiting": 1}, spouts=("lines", "more"))
    world.behaves = fails("a", "x")
    progress, _ = world.process(0, ["a", ("more", "x")])
    assert (progress.waiting, progress.dead) == (1, 1)


def test_when_a_record_was_first_seen_is_kept(world):
    world.behaves = fails("a", times=2)
    world.process(0, ["a"])
    world.now_ms += 10_000
    assert world.process(1, ["b"])[0].oldest_ms == 10_000
    world.now_ms += 20_000
    assert world.process(2)[0].latency_ms.p99 == 30_000


def test_nothing_waits_where_nothing_may(tmp_path):
    world = World(tmp_path, {"max_waiting": 0})
    world.behaves = fails("a")
    assert world.process(0, ["a", "b"])[0].dead == 1


def test_who_shares_a_row_with_a_failed_record_fails_with_it(tmp_path):
    world = World(tmp_path)
    world.behaves = fails("a")
    world.entangled = [("A", "B"), ("C", "B"), ("D", "E")]
    progress, _ = world.process(0, ["a", "b", "c", "d", "e", "f"])
    assert (progress.acked, progress.failed) == (3, 3)
    assert world.rows == ["D", "D&E", "E", "F"]
    world.entangled = [("A", "B"), ("C", "B")]
    world.now_ms += 10_000
    _, books = world.process(1)
    assert world.rows == ["A", "A&B", "B", "C", "C&B", "D", "D&E", "E", "F"]
    assert books.balanced


def test_spouts_have_accounts_of_their_own(tmp_path):
    world = World(tmp_path, spouts=("lines", "more"))
    world.behaves = fails("a", "x")
    _, books = world.process(0, ["a", "b", ("more", "x")])
    assert books.spouts["lines"].waiting == books.spouts["more"].waiting == 1
    assert (books.spouts["lines"].records, books.spouts["more"].records) == (2, 1)
    assert world.drain(1).balanced
    assert world.rows == ["A", "B", "X"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [0, 1])
def test_whatever_dies_each_record_has_one_decision(world, monkeypatch, step, number):
    """Killed at a step and started again, all ends as if nothing had been."""
    world.behaves = fails("b", "poison", times=2)
    killed = []

    def reach(name, n=None):
        if (name, n) == (step, number) and not killed:
            killed.append(name)
            raise Killed

    monkeypatch.setattr(batch, "reach", reach)
    monkeypatch.setattr(act, "reach", reach)
    world.topology = World(world.path, {"max_attempts": 2}).topology
    for bolt_sink in world.topology.sinks.values():
        object.__setattr__(bolt_sink, "writer", world)
    drivers = 0
    for n, lines in enumerate([["a", "b", "poison"], ["c"], []]):
        while True:
            state, engine = world.driver()
            drivers += 1
            try:
                engine.process(n, [("lines", line) for line in lines])
                books = engine.books
                break
            except Killed:
                continue
            finally:
                state.close()
        world.now_ms += 10_000
    died_at_dead_letters = step == "in-dead-letters" and number == 0
    assert drivers == (3 if died_at_dead_letters else 4)
    assert world.rows == ["A", "C"]
    assert world.parked == ["b", "poison"]
    assert books.balanced
    assert (books.records, books.acked, books.dead, books.waiting) == (4, 2, 2, 0)
    assert (books.batches, books.retried) == (3, 2)


def test_a_decision_is_not_made_again(world, dying_at):
    """What failed in the run that was decided may succeed in another: there is no other."""
    world.behaves = fails("b")

    with dying_at("acted"):
        world.process(0, ["a", "b"])
    world.behaves = fails("a")
    progress, books = world.process(0, ["a", "b"])
    assert len(world.runs) == 1
    assert world.rows == ["A"]
    assert (progress.acked, progress.failed, progress.runs) == (1, 1, 0)
    assert books.waiting == 1


def test_a_plan_is_kept_with_its_time(world, dying_at):
    world.behaves = fails("b", times=2)
    world.process(0, ["a", "b"])
    world.now_ms += 10_000

    with dying_at("ran"):
        world.process(1, ["c"])
    world.now_ms += 10_000
    world.process(1, ["c"])
    first, second = world.runs[1:]
    assert (first.now_ms, first.key) == (second.now_ms, second.key)
    assert first.retries.keys() == second.retries.keys() == {"lines"}


def test_a_batch_that_is_done_is_not_run_again(world):
    world.process(0, ["a"])
    world.written.clear()
    progress, books = world.process(0, ["a"])
    assert len(world.runs) == 1
    assert not world.written
    assert (progress.acked, progress.runs, books.acked) == (1, 0, 1)


def test_a_number_out_of_turn_is_refused(world):
    world.process(0, ["a"])
    with pytest.raises(CheckpointCorrupt, match="expects micro-batch 1 next"):
        world.process(2, ["a"])


def test_a_clock_that_goes_back_holds_nothing_up(world):
    world.behaves = fails("a")
    state, engine = world.driver()
    with state:
        engine.process(0, [("lines", "a")])
        world.now_ms -= 3_600_000
        assert engine.clock() == 1_000_000
        world.now_ms += 10_000
        engine.process(1, [])
        assert engine.books.acked == 1
    world.now_ms -= 3_600_000
    progress, books = world.process(2, ["b"])
    assert books.balanced
    assert progress.oldest_ms == 0
    times = [plan.now_ms for plan in world.runs]
    assert times == sorted(times)


def test_a_clock_that_went_back_while_no_driver_ran_holds_nothing_up(world, dying_at):
    """A plan was on record, which keeps its time: that is when its retries begin to wait."""
    world.behaves = fails("a")

    with dying_at("ran"):
        world.process(0, ["a"])
    world.now_ms -= 3_600_000
    state, engine = world.driver()
    with state:
        engine.process(0, [("lines", "a")])
        assert 0 < engine.next_due_ms - engine.clock() <= 10_000


def test_a_run_that_is_not_of_one_piece_is_run_again(world):
    world.behaves = fails("b")
    world.problems = ["trailers differ", "a file is missing"]
    progress, books = world.process(0, ["a", "b"])
    assert progress.runs == 3
    assert (books.acked, books.waiting) == (1, 1)
    assert not world.runs[-1].careful  # nobody has died
    assert world.paused == [0.1, 0.2]


def test_rows_that_are_not_there_a_second_time_have_the_batch_run_again(world):
    world.behaves = fails("b")
    fetch, calls = world.fetch, []

    def forgetful(*args):
        calls.append(args)
        return fetch(*args) if len(calls) > 1 else {}

    world.fetch = forgetful
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
    world = World(tmp_path, {"run_attempts": 3})

    def behaves(line, attempt):
        raise RuntimeError("noise\nConnectionError: the network is down\n")

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"micro-batch 0 was run 3 times.*the network is down") as e:
        world.process(0, ["a"])
    assert isinstance(e.value.__cause__, RuntimeError)
    assert len(world.runs) == 3
    world.behaves = fails()
    _, books = world.process(0, ["a"])
    assert world.runs[-1].careful  # it has died often enough
    assert (world.rows, books.acked) == (["A"], 1)


def test_a_mistake_in_the_driver_is_not_tried_again(world):
    def behaves(line, attempt):
        raise TypeError("not like this")

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"run 1 time and.*TypeError: not like this"):
        world.process(0, ["a"])


def test_workers_that_lack_a_module_are_not_tried_again(world):
    def behaves(line, attempt):
        raise RuntimeError("Job aborted\nModuleNotFoundError: No module named 'ackcore'\n at java")

    world.behaves = behaves
    with pytest.raises(RunFailed, match=r"run 1 time and .*PYSPARK_PYTHON") as caught:
        world.process(0, ["a"])
    assert sys.executable in str(caught.value)


def test_a_record_that_kills_its_worker_is_found_and_buried(world):
    """Two deaths, then careful: suspects, alone once, alone twice; and then without it."""

    def behaves(line, attempt):
        if line in ("poison", "venom"):
            raise RuntimeError("worker exited unexpectedly")
        return None

    world.behaves = behaves
    progress, books = world.process(0, ["a", "poison", "b", "venom"])
    assert world.rows == ["A", "B"]
    assert world.parked == ["poison", "venom"]
    assert (progress.dead, books.acked) == (2, 2)
    assert books.balanced
    last = world.runs[-1]
    key = last.key
    assert set(last.condemned) == {root_of(key, "lines", line, 0) for line in ("poison", "venom")}
    assert progress.runs == 9
    state, _ = world.driver()
    with state:
        dead = state.decision(0).dead["lines"]
    reasons = {Reason.decode(text.as_py())[1:3] for text in dead["_ackcore_reason"]}
    assert reasons == {("KilledWorker", "killed its worker")}


def test_marks_that_a_dead_driver_found_are_not_held_against_anybody(world):
    died = []

    def behaves(line, attempt):
        if len(died) < 4:
            died.append(line)
            raise (Killed if len(died) == 4 else RuntimeError)("gone")
        return None

    world.behaves = behaves
    with pytest.raises(Killed):
        world.process(0, ["a", "b"])
    # The plan on record knows suspects of the death that was seen; what the last worker had in
    # hand when the driver died is nobody's fault.
    _, books = world.process(0, ["a", "b"])
    assert (books.acked, books.dead) == (2, 0)
    assert world.runs[-1].condemned == ()


@pytest.fixture
def suspicious(world):
    """A world whose driver has died with suspects on record, and where the rows are kept."""
    died = []

    def behaves(line, attempt):
        if len(died) < 4:
            died.append(line)
            raise (Killed if len(died) == 4 else RuntimeError)("gone")
        return None

    world.behaves = behaves
    with pytest.raises(Killed):
        world.process(0, ["a", "b"])
    state, _ = world.driver()
    with state:
        assert state.plan(0).suspects
        return state.pinned(0)


def test_suspects_are_of_rows_that_are_kept(world, suspicious):
    """Who has come under suspicion is asked for among the same rows, or not at all."""
    # The source is other rows now, as a bounded one may be; those of before are run.
    _, books = world.process(0, ["c"])
    assert (world.rows, books.acked) == (["A", "B"], 2)
    assert world.runs[-1].suspects
    assert not suspicious.exists()


def test_suspects_are_forgotten_with_their_rows(world, suspicious):
    shutil.rmtree(suspicious)
    _, books = world.process(0, ["c"])
    assert (world.rows, books.acked) == (["C"], 1)
    assert world.runs[-1].careful
    assert world.runs[-1].suspects == ()


def test_a_sink_that_is_down_for_a_while(world):
    world.sink_fails = 2
    _, books = world.process(0, ["a"])
    assert world.rows == ["A"]
    assert (len(world.runs), books.acked) == (1, 1)
    assert world.paused == [1.0, 2.0]


def test_a_sink_that_is_down_for_ever_and_then_is_not(world):
    world.behaves = fails("b")
    world.sink_fails = 5
    with pytest.raises(SinkError, match=r"sink 'upper' failed 5 times with micro-batch 0") as error:
        world.process(0, ["a", "b"])
    assert "ConnectionError: the sink is down" in str(error.value)
    assert isinstance(error.value.__cause__, ConnectionError)
    assert world.paused == [1.0, 2.0, 4.0, 8.0]
    _, books = world.process(0, ["a", "b"])
    assert world.rows == ["A"]
    assert (len(world.runs), books.acked, books.waiting) == (1, 1, 1)


def test_a_dead_letter_store_that_is_down(world):
    world.behaves = fails("a", final=True)
    world.dead_letters_fail = 6
    with pytest.raises(SinkError, match="the dead-letter store failed 5 times"):
        world.process(0, ["a"])
    _, books = world.process(0, ["a"])
    assert world.parked == ["a"]
    assert (len(world.runs), books.dead) == (1, 1)


@pytest.mark.parametrize("where", ["run", "sink"])
def test_who_is_told_to_stop_gives_up_what_it_does(world, where):
    world.stopping = True

    def behaves(line, attempt):
        raise RuntimeError("cancelled")

    if where == "run":
        world.behaves = behaves
    else:
        world.sink_fails = 1
    with pytest.raises(batch.Stopped):
        world.process(0, ["a"])
    world.stopping = False
    world.behaves = fails()
    assert world.process(0, ["a"])[1].acked == 1


def test_stopped_between_two_runs(world):
    world.problems = ["trailers differ"]
    world.pause = lambda seconds: seconds > 0
    with pytest.raises(batch.Stopped):
        world.process(0, ["a"])


def test_what_fails_untracked_is_told(world, caplog):
    world.lost = 3
    world.process(0, ["a"])
    assert "3 tuples failed that nobody tracks" in caplog.text


def test_a_stream_without_rows_calls_no_sink(world):
    world.process(0, [])
    assert world.written == {}


PLAN = Plan(0, 0, None, 0, careful=True)


def test_blame_needs_a_mark():
    assert blame(PLAN, {}, None) == PLAN
    assert blame(PLAN, {3: frozenset({1, 2})}, None).suspects == (1, 2)


def test_blame_looks_at_the_task_that_failed_the_job():
    marks = {3: frozenset({1}), 4: frozenset({2, 5})}
    found = blame(blame(PLAN, marks, 3), marks, 3)
    assert (found.suspects, found.condemned) == ((), (1,))
    assert blame(PLAN, marks, 9).suspects == (2, 5)


def test_killers_do_not_hide_each_other():
    """A task that runs in bulk dies faster than one that runs its suspects one by one."""
    tasks = {3: {1, 2, 4}, 4: {11, 12, 14}, 5: {21, 22}}
    killers, plan, stuck = {1, 11, 21}, PLAN, 0
    while stuck < 8 and not killers <= set(plan.condemned):
        dying = {task: killer for task, rows in tasks.items() for killer in rows & killers}
        dying = {task: one for task, one in dying.items() if one not in plan.condemned}
        task = min(dying, key=lambda task: dying[task] in plan.suspects)
        crowd = tasks[task] - set(plan.condemned) - set(plan.suspects)
        mark = {dying[task]} if dying[task] in plan.suspects else crowd
        before = certainty(plan)
        plan = blame(plan, {task: frozenset(mark)}, task)
        stuck = 0 if certainty(plan) > before else stuck + 1
    assert set(plan.condemned) == killers
    assert stuck == 0


def test_who_was_not_alone_on_the_cluster_is_held_back_and_not_buried():
    """Two tasks had one record each in hand, and nothing tells whose worker died."""
    marks = {3: frozenset({1}), 4: frozenset({2})}
    found = blame(blame(PLAN, marks, None), marks, None)
    assert set(found.condemned) == set(found.suspects) == {1, 2}
    failed = pa.table([[1, 2, 3], ["s"] * 3, ["-"] * 3], schema=batch.FAILED)
    reasons = batch.condemn(failed, found)["reason"].to_pylist()
    assert [Reason.decode(text).final for text in reasons[:2]] == [False, False]
    assert reasons[2] == "-"
    again = blame(found, {5: frozenset({7, 8})}, None)
    assert set(again.condemned) & set(again.suspects) == {1, 2}


def test_the_task_that_failed_is_read_off_the_error():
    said = (
        "Job aborted due to stage failure: Task 1 in stage 3.0 failed 4 times, most recent "
        "failure: Lost task 1.3 in stage 3.0 (TID 17) (host executor 1): ExecutorLostFailure"
    )
    assert failed_attempt(RuntimeError(said)) == 17
    assert failed_attempt(RuntimeError("no")) is None
