"""Sources whose rows a plan names: plans, restarts, reports, and the rules that end a query."""

from __future__ import annotations

import gc
import gzip
import json
import re
import shlex
import sys
import threading
import time
from asyncio import CancelledError

import pyarrow as pa
import pytest
from checkpoints import recorded
from py4j.java_gateway import JavaObject
from pyspark import cloudpickle
from pyspark.errors import AnalysisException
from sessions import on_both_sessions
from streams import Folder, Store, available_now, in_line, until
from typer.testing import CliRunner

from ackcore.cli.reporting import app_of
from ackcore.spark import (
    FileSpout,
    PlannedSource,
    QueryListener,
    RateSpout,
    RunFailed,
    SourceError,
    TooManyDead,
    dead_letters,
    replay,
    run_batch,
    skip_planned,
    start,
)
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.checkpoint.skips import skip_command
from ackcore.spark.engine import batch, runs
from ackcore.spark.engine.insist import given_up
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.inspect.status import read_status
from ackcore.spark.planned import JoinedRows, source_rows
from ackcore.spark.planned.planned_source import DividedSource
from ackcore.spark.stores.objects import ObjectStore
from ackcore.topology import BasicBolt, Reject, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Table(PlannedSource):
    """A table with a growing key: some texts, at most ``most`` a micro-batch."""

    schema = pa.schema([("id", pa.int64()), ("line", pa.string())])

    def __init__(self, *texts, most=2):
        self.texts = list(texts)
        self.most = most
        self.asked, self.reads, self.told = [], [], []

    def plan(self, previous):
        self.asked.append(previous)
        first = 0 if previous is None else previous["to"]
        last = min(len(self.texts), first + self.most)
        return {"from": first, "to": last} if first < last else None

    def read(self, spark, plan):
        self.reads.append(plan)
        rows = [(n, self.texts[n]) for n in range(plan["from"], plan["to"])]
        return spark.createDataFrame(rows, "id bigint, line string")

    def done(self, plan):
        self.told.append(plan["to"])


class Words(BasicBolt):
    """Fails ``flaky`` at the first attempt, rejects ``bad``."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        if tuple["line"] == "bad":
            raise Reject("a bad line")
        if tuple["line"] == "flaky" and tuple.attempt == 0:
            raise ValueError("not yet")
        collector.emit((tuple["line"],))


def topology(sink, /, settings=None, **sources):
    builder = TopologyBuilder()
    for name, source in sources.items():
        builder.spout(name, source)
        builder.bolt(f"words-{name}", Words()).shuffle(name)
        builder.sink(f"words-{name}", sink, name=f"sink-{name}")
    return builder.build(**{"backoff_s": 0.001, "parallelism": 2, **(settings or {})})


def plans(checkpoint, spout="lines"):
    """By micro-batch, the plans of which it reads rows."""
    found = recorded(checkpoint)
    return {
        number: found.read(f"batches/{number}.plan")["offsets"][spout]["rows"]
        for number in found.numbers(".plan")
    }


def test_a_stream_takes_what_comes_and_a_restart_goes_on(spark, checkpoint, store, running):
    source = Table("a", "flaky", "b")
    on = running(topology(store, lines=source), spark, checkpoint)
    assert on.spark_query is None
    on.process_all_available()
    assert store.words == ["a", "b", "flaky"]
    source.texts += ["bad", "c"]
    on.process_all_available()
    assert (on.counts.acked, on.counts.dead) == (4, 1)
    on.stop()
    assert (on.exception, source.told) == (None, [2, 3, 5])
    again = Table(*source.texts, "d")
    on = running(topology(store, lines=again), spark, checkpoint)
    on.process_all_available()
    assert again.asked[0] == {"from": 3, "to": 5}
    # The last report is repeated: the driver may have died before it.
    assert again.told == [5, 6]
    assert store.words == ["a", "b", "c", "d", "flaky"]
    assert not (checkpoint / "spark").exists()


def test_available_now_ends_with_its_retries_dead_letters_and_replays(spark, checkpoint, store):
    class Noted(QueryListener):
        progress, ends = [], []

        def on_progress(self, progress, counts):
            self.progress.append((progress.batch_id, progress.records))

        def on_end(self, error, counts):
            self.ends.append((error, counts.acked))

    source = Table("a", "flaky", "bad", "b", "c")
    on = available_now(topology(store, lines=source), spark, checkpoint, listeners=[Noted()])
    assert (on.counts.acked, on.counts.dead, on.counts.retried) == (4, 1, 1)
    assert [records for _, records in Noted.progress][:3] == [2, 2, 1]
    assert Noted.ends == [(None, 4)]
    (letter,) = dead_letters(checkpoint, spark).collect()
    assert (letter.error_type, letter.payload.line) == ("Reject", "bad")
    assert replay(checkpoint, spark).records == {"lines": 1}
    on = available_now(topology(store, lines=source), spark, checkpoint)
    assert (on.counts.replayed, on.counts.waiting, on.counts.balanced) == (1, 0, True)


def test_a_batch_takes_all_plans_at_once_and_no_more(spark, checkpoint, store):
    source = Table("a", "b", "flaky", "c", "bad")
    counts = run_batch(topology(store, lines=source), spark, checkpoint)
    assert (counts.records, counts.acked, counts.dead) == (5, 4, 1)
    assert source.told == [2, 4, 5]
    source.texts.append("late")
    assert run_batch(topology(store, lines=source), spark, checkpoint).records == 5


def test_a_batch_of_a_source_without_end_is_an_error(spark, checkpoint, store, monkeypatch):
    monkeypatch.setattr(source_rows, "_MOST_PLANS", 100)

    class Endless(Table):
        def plan(self, previous):
            return (previous or 0) + 1

    with pytest.raises(SourceError, match=r"'lines': its source returned 100 plans and no None"):
        run_batch(topology(store, lines=Endless()), spark, checkpoint)


@pytest.mark.parametrize(
    "step", ["planned", pytest.param("decided", marks=pytest.mark.faults), "marked"]
)
def test_a_driver_that_died_is_continued_from_its_plan(
    spark, checkpoint, store, running, failing_at, step
):
    source = Table("a", "flaky", "b", most=3)
    it = topology(store, {"max_runs": 1}, lines=source)
    with failing_at(step):
        running(it, spark, checkpoint).await_termination(300)
    assert plans(checkpoint)[0] == [{"from": 0, "to": 3}]
    source.texts.append("late")
    source.asked.clear()
    on = running(it, spark, checkpoint)
    on.process_all_available()
    assert None not in source.asked, "it was asked again for rows that were planned"
    assert store.words == ["a", "b", "flaky", "late"]
    assert on.counts.records == 4


def test_a_source_that_plans_the_same_rows_twice_ends_the_query(spark, checkpoint, store, running):
    class Stuck(Table):
        def plan(self, previous):
            return {"from": 0, "to": 1}

    on = running(topology(store, lines=Stuck("a")), spark, checkpoint)
    said = r"^spout 'lines', micro-batch 1: plan\(\) returned a plan that this checkpoint has"
    with pytest.raises(SourceError, match=said):
        on.await_termination(300)
    assert store.words == ["a"]
    assert set(plans(checkpoint)) == {0}


@pytest.mark.parametrize(
    "answers",
    [
        lambda previous: {"from": 0},
        lambda previous: {"from": 0, "tasks": 2},
        lambda previous: previous or {"from": 0},
    ],
)
def test_a_plan_is_compared_without_the_number_of_slots(monkeypatch, answers):
    """The number of slots changes if the query is started on another cluster."""

    class Stuck(DividedSource):
        schema = pa.schema([("line", pa.string())])
        read = None

        def plan(self, previous):
            return answers(previous)

    spout = source_rows._Spout("lines", Stuck(), source_rows._Taken(), None, "/cp")
    monkeypatch.setattr(source_rows, "task_slots", lambda spark: 2)
    taken = spout.take(source_rows._Taken(), 0)
    assert taken.last == {"from": 0, "tasks": 2}
    monkeypatch.setattr(source_rows, "task_slots", lambda spark: 3)
    with pytest.raises(SourceError, match=r"micro-batch 1: .* has already, "):
        spout.take(taken, 1)


def test_a_source_may_divide_its_plan_in_place(monkeypatch):
    class InPlace(DividedSource):
        schema = pa.schema([("line", pa.string())])
        read = None

        def plan(self, previous):
            return {"from": 0, "o": {}}

        def divided(self, plan, tasks):
            plan["o"].setdefault("tasks", tasks)
            return plan

    spout = source_rows._Spout("lines", InPlace(), source_rows._Taken(), None, "/cp")
    monkeypatch.setattr(source_rows, "task_slots", lambda spark: 3)
    assert spout.take(source_rows._Taken(), 0).last == {"from": 0, "o": {"tasks": 3}}


def test_a_source_that_forgets_its_position_at_a_restart_ends_the_query(
    spark, checkpoint, store, running
):
    class Forgetful(Table):
        at = 0

        def plan(self, previous):
            found = super().plan({"to": self.at})
            self.at = self.at if found is None else found["to"]
            return found

    texts = ["a", "b", "c", "d", "e", "f"]
    available_now(topology(store, lines=Forgetful(*texts)), spark, checkpoint)
    before = plans(checkpoint)
    on = running(topology(store, lines=Forgetful(*texts)), spark, checkpoint)
    with pytest.raises(SourceError, match=r"micro-batch 3: .* has already, .*\"from\": 0"):
        on.await_termination(300)
    assert (plans(checkpoint), store.words) == (before, texts)


class Odd(Table):
    """A source with a mistake."""

    def __init__(self, mistake):
        super().__init__("a")
        self.mistake = mistake

    def plan(self, previous):
        if self.mistake == "raises in plan":
            raise KeyError("cursor")
        if self.mistake == "asks for no column":
            raise AnalysisException("no such column")
        if self.mistake == "exits in plan":
            raise SystemExit("no cursor")
        return {1, 2} if self.mistake == "no JSON" else super().plan(previous)

    def read(self, spark, plan):
        if self.mistake == "raises in read":
            raise KeyError("table")
        if self.mistake == "is cancelled in read":
            raise CancelledError("no answer")
        if self.mistake == "no frame":
            return [("a",)]
        return spark.createDataFrame([("a", 1)], "line string, id bigint")


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("raises in plan", r"plan\(\) of its source raised KeyError: 'cursor'. Remove the cause"),
        ("asks for no column", r"plan\(\) of its source raised AnalysisException: no such"),
        ("no JSON", r"plan\(\) must return a JSON value or None, got set"),
        ("raises in read", r"read\(\) of its source raised KeyError: 'table'. Remove the cause"),
        ("exits in plan", r"plan\(\) of its source raised SystemExit: no cursor"),
        ("is cancelled in read", r"read\(\) of its source raised CancelledError: no answer"),
        ("no frame", r"read\(\) must return a DataFrame of the session .*, got builtins.list"),
        ("columns", r"the source's schema, id bigint, line string; got line string, id bigint"),
    ],
)
def test_a_mistake_in_a_source_ends_the_query(spark, checkpoint, store, running, mistake, words):
    on = running(topology(store, lines=Odd(mistake)), spark, checkpoint)
    with pytest.raises(SourceError, match=f"^spout 'lines', micro-batch 0: .*{words}"):
        on.await_termination(300)
    assert not store.rows


class Away(Table):
    """A table that cannot be reached while ``down``."""

    down = True

    def plan(self, previous):
        if self.down:
            raise ConnectionError("the table is away")
        return super().plan(previous)


def test_a_source_that_is_away_holds_back_no_other_spout_and_no_retry(
    spark, checkpoint, store, running, caplog
):
    source = Away("later")
    it = topology(store, {"max_restarts": 0}, away=source, lines=Table("a", "flaky", "b", "c"))
    on = running(it, spark, checkpoint)
    until(lambda: on.counts.acked == 4, on)
    assert "spout away: its source did not answer, and micro-batch 0 takes none" in caplog.text
    source.down = False
    until(lambda: on.counts.acked == 5, on)


def test_a_source_and_a_listener_may_stop_the_query(spark, checkpoint, store):
    class Ends(Table):
        def plan(self, previous):
            if previous is not None:
                on.stop(finish=True)
                on.stop()
            return super().plan(previous)

    ends = []

    class Listening(QueryListener):
        def on_end(self, error, counts):
            on.stop()
            ends.append(error)

    it = topology(store, lines=Ends("a", most=1))
    on = start(it, spark, checkpoint, listeners=[Listening()])
    assert on.await_termination(300)
    assert (on.exception, ends, store.words) == (None, [None], ["a"])


def test_a_source_stops_the_query_although_spark_makes_its_micro_batches(
    spark, checkpoint, store, tmp_path
):
    """The heartbeat calls plan() in its own thread."""
    folder = Folder(spark, tmp_path / "in")
    polled = threading.Event()

    class Ends(Table):
        def plan(self, previous):
            if threading.current_thread().name == "ackcore-heartbeat" and queries:
                queries[0].stop()
                polled.set()
            return super().plan(previous)

    queries = []
    queries.append(start(topology(store, lines=Ends(), files=folder.stream), spark, checkpoint))
    assert polled.wait(300)
    assert queries[0].await_termination(300)
    assert queries[0].exception is None


def test_a_part_of_the_query_that_waits_for_the_query_is_told_that_it_would_wait_for_ever(
    spark, checkpoint, running
):
    said = []

    def waits():
        for wait in (on.await_termination, on.process_all_available):
            with pytest.raises(RuntimeError, match="would wait for itself; call it in another"):
                wait()
            said.append(wait.__name__)
        assert not on.await_termination(0)

    class Listening(QueryListener):
        def on_end(self, error, counts):
            waits()

    def sink(frame, number):
        ready.wait(60)
        waits()

    ready = threading.Event()
    it = topology(sink, lines=Table("a"))
    on = running(it, spark, checkpoint, listeners=[Listening()])
    ready.set()
    on.process_all_available()
    on.stop()
    assert said == ["await_termination", "process_all_available"] * 2


@pytest.mark.parametrize("is_planned", [True, False])
def test_a_query_ends_although_a_listener_of_its_end_is_interrupted(
    spark, checkpoint, store, tmp_path, is_planned
):
    class Interrupted(QueryListener):
        def on_end(self, error, counts):
            raise KeyboardInterrupt

    source = Table("a") if is_planned else Folder(spark, tmp_path / "in").stream
    on = start(topology(store, lines=source), spark, checkpoint, listeners=[Interrupted()])
    on.stop()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt was raised"):
        on.await_termination(60)
    assert not on.is_active


def test_a_read_that_fails_for_a_while_is_a_restart(spark, checkpoint, store, running, caplog):
    class Unread(Table):
        failures = 2

        def read(self, spark, plan):
            self.failures -= 1
            if self.failures >= 0:
                raise ConnectionError("the table is away")
            return super().read(spark, plan)

    it = topology(store, {"backoff_s": 0.001, "max_backoff_s": 0.001}, lines=Unread("a"))
    on = running(it, spark, checkpoint)
    on.process_all_available()
    assert (store.words, on.counts.acked) == (["a"], 1)
    assert "the micro-batch failed; ackcore restarts it in 0.0 s, restart 2 of" in caplog.text
    # No run has begun, so none has crashed.
    plan = recorded(checkpoint).read("batches/0.plan")
    assert (plan["crashes"], plan["careful"]) == (0, False)


def test_a_report_that_fails_ends_nothing(spark, checkpoint, store, running, caplog):
    class Deaf(Table):
        def done(self, plan):
            raise OSError("cannot note it")

    class Lazy(Table):
        async def done(self, plan):
            raise AssertionError("nobody awaits this")

    class Exits(Table):
        def done(self, plan):
            raise SystemExit("cannot note it either")

    sources = {"lines": Deaf("a", "b", "c"), "others": Lazy("d"), "more": Exits("e")}
    on = running(topology(store, **sources), spark, checkpoint)
    on.process_all_available()
    assert on.counts.acked == 5
    assert "SystemExit: cannot note it either" in caplog.text
    assert "spout lines: done() of its source raised for the plan" in caplog.text
    assert "OSError: cannot note it" in caplog.text
    assert "done returned a coroutine, which has not run" in caplog.text


def test_planned_spouts_beside_each_other_and_beside_a_stream_of_spark(
    spark, checkpoint, tmp_path, running
):
    """Spark's query runs them where a source is a DataFrame."""
    first, second, sinks = Table("a"), Table("b", "flaky"), {}
    it = topology(lambda frame, n: sinks.setdefault(n, []), one=first, two=second)
    on = available_now(it, spark, checkpoint)
    assert (on.counts.acked, on.spark_query) == (3, None)
    folder = Folder(spark, tmp_path / "in")
    folder.add("from a file")
    store = Store()
    mixed = topology(store, lines=Table("a", "b", "c"), files=folder.stream)
    on = running(mixed, spark, tmp_path / "mixed")
    until(lambda: on.counts.acked == 4, on)
    assert on.spark_query is not None


def test_a_source_that_is_away_hides_none_that_has_rows():
    class Gone(PlannedRows):
        @property
        def is_behind(self):
            raise ConnectionError("the table is away")

    class Behind(PlannedRows):
        is_through = False

    assert JoinedRows([Gone(), Behind()]).is_behind
    with pytest.raises(ConnectionError, match="the table is away"):
        JoinedRows([Gone(), PlannedRows()]).is_behind  # noqa: B018 - it raises


@pytest.mark.parametrize("call", [1, 3])
def test_a_source_that_is_away_for_a_while_does_not_end_available_now(
    spark, checkpoint, store, tmp_path, call
):
    """Spark's query runs the spouts: a look at the source between its queries fails."""

    class Once(Table):
        def plan(self, previous):
            found = super().plan(previous)
            if len(self.asked) == call:
                raise ConnectionError("the table is away")
            return found

    folder = Folder(spark, tmp_path / "in")
    folder.add("from a file")
    it = topology(store, {"max_restarts": 0}, lines=Once("a", "b", "c"), files=folder.stream)
    assert available_now(it, spark, checkpoint).counts.acked == 4


def test_available_now_ends_although_files_keep_coming(spark, checkpoint, store, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "0").write_text("1\n")

    class Busy(QueryListener):
        def on_batch_start(self, number):
            (folder / f"new-{number}").write_text("2\n")

    it = values_of(FileSpout(folder, "text"), store)
    on = available_now(it, spark, checkpoint, listeners=[Busy()])
    assert (store.words, on.counts.batches) == (["1"], 1)
    available_now(it, spark, checkpoint)
    assert store.words == ["1", "2"]
    changed = topology(store, values=FileSpout(folder, "text"))
    for accepts in (True, False):  # an accepted change is recorded without a micro-batch
        available_now(changed, spark, checkpoint, accept_changes=accepts)


def test_a_source_of_another_kind_does_not_continue(spark, checkpoint, store, tmp_path):
    available_now(topology(store, lines=Table("a")), spark, checkpoint)
    folder = Folder(spark, tmp_path / "in")
    frame = folder.stream.selectExpr("1L AS id", "line")
    with pytest.raises(CheckpointForeign, match="read a PlannedSource, and reads a DataFrame now"):
        start(topology(store, lines=frame), spark, checkpoint, accept_changes=True)


def test_nulls_in_a_column_that_is_declared_without_nulls_are_kept(spark, checkpoint, store):
    class Loose(Table):
        schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("line", pa.string())])

        def read(self, spark, plan):
            return spark.createDataFrame([(None, "bad"), (None, "flaky")], "id bigint, line string")

    on = available_now(topology(store, lines=Loose("bad", "flaky")), spark, checkpoint)
    assert (on.counts.acked, on.counts.dead) == (1, 1)
    (letter,) = dead_letters(checkpoint, spark).collect()
    assert (letter.payload.id, letter.payload.line) == (None, "bad")


def test_a_schema_is_needed():
    class Bare(PlannedSource):
        def plan(self, previous):
            return None

        def read(self, spark, plan):
            raise AssertionError

    with pytest.raises(TypeError, match=r"schema of .*Bare.* must be a pyarrow.Schema with at"):
        TopologyBuilder().spout("lines", Bare())


class Held(BasicBolt):
    """Says that it has come, and takes a minute."""

    outputs = pa.schema([("word", pa.string())])

    def __init__(self, came):
        self.came = came

    def execute(self, tuple, collector):
        self.came.touch()
        time.sleep(60)


def test_stop_in_the_middle_of_a_micro_batch_ends_its_tasks_and_counts_nothing(
    spark, checkpoint, tmp_path, running
):
    topology = in_line({"lines": Table("a"), "held": Held(tmp_path / "came")}, print)
    on = running(topology, spark, checkpoint)
    until((tmp_path / "came").exists, on)
    began = time.monotonic()
    on.stop()
    assert time.monotonic() - began < 30
    assert (on.is_active, on.exception, on.counts.batches) == (False, None, 0)
    plan = recorded(checkpoint).read("batches/0.plan")
    assert (plan["interrupted"], plan["crashes"]) == (True, 0)
    tracker = spark.sparkContext.statusTracker()
    deadline = time.monotonic() + 30
    while tracker.getActiveStageIds() and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    assert not tracker.getActiveStageIds()


def test_a_plan_comes_back_from_the_checkpoint_as_it_was_given_to_read(
    spark, checkpoint, store, running
):
    class Tuples(Table):
        def plan(self, previous):
            return ("from", 0) if previous is None else None

        def read(self, spark, plan):
            self.reads.append(plan)
            return super().read(spark, {"from": 0, "to": 1})

        def done(self, plan):
            self.told.append(plan)

    source = Tuples("a")
    running(topology(store, lines=source), spark, checkpoint).process_all_available()
    assert source.reads[0] == source.told[0] == json.loads(json.dumps(("from", 0)))


class Values(BasicBolt):
    """Fails each tenth at the first attempt, rejects 13."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        (value,) = tuple.values
        if value == 13:
            raise Reject("thirteen")
        if int(value) % 10 == 0 and tuple.attempt == 0:
            raise ValueError("not yet")
        collector.emit((str(value),))


def values_of(source, sink):
    return in_line({"values": source, "values-too": Values()}, sink, backoff_s=0.001)


@on_both_sessions
def test_lines_that_cannot_be_read_are_dead_letters(spark, checkpoint, tmp_path):
    """Also if their ids, keys of duplicates and keys of an order are columns that they lack."""
    schema, found = pa.schema([("line", pa.string()), ("n", pa.int64())]), {}
    lines = ['{"n": 1, "line": "a"}', "null", "{no json", '{"n": 2, "line": "bad"}']
    lines += ['{"n": 1, "line": "a"}', '{"n": "x"}']
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_text("\n".join(lines))
    keys = {
        "once": {"dedup": "n", "within_keys": 9},
        "named": {"message_id": ["n", "line"]},
        "ordered": {"ordered_by": "n"},
    }
    builder = TopologyBuilder()
    for name, of in keys.items():
        builder.spout(name, FileSpout(tmp_path / "in", "json", schema), **of)
        builder.bolt(f"words-{name}", Words()).shuffle(name)
        rows = found.setdefault(name, [])
        builder.sink(f"words-{name}", lambda frame, _, rows=rows: rows.extend(frame.collect()))
    builder.sink("ordered", lambda frame, _: found.setdefault("whole", frame.columns))
    it = builder.build(max_attempts=1)
    assert available_now(it, spark, checkpoint).counts.balanced
    assert found.pop("whole") == ["line", "n"]
    assert {name: [row.word for row in rows] for name, rows in found.items()} == {
        "once": ["a"],
        "named": [],
        "ordered": ["a", "a"],
    }
    for name, others in (("once", []), ("named", ["RepeatedMessageId"] * 2), ("ordered", [])):
        letters = dead_letters(checkpoint, spark, name).collect()
        kinds = ["CorruptRecord"] * 3 + ["Reject", *others]
        assert sorted(one.error_type for one in letters) == sorted(kinds)
        corrupt = {
            one.payload._corrupt_record: one.error_message
            for one in letters
            if one.error_type == "CorruptRecord"
        }
        assert list(corrupt) == ["null", "{no json", '{"n": "x"}']
        assert corrupt["{no json"].startswith("line 3 of a.json cannot be read: JSON parse error")
    for options, corrupt in (((), True), (("--error", "Reject"), False)):
        words = ["dead", "replay", str(checkpoint), "--spout", "once", "--dry-run", *options]
        said = CliRunner().invoke(app_of(["dead_command"]), words).output
        assert ("3 of those that match cannot be read (CorruptRecord)" in said) == corrupt, said
    assert replay(checkpoint, spark, spout="once").records == {"once": 4}
    with pytest.raises(TooManyDead, match="dies again; put it, corrected, into a new file"):
        available_now(it, spark, checkpoint, max_dead=1)
    assert read_status(checkpoint).counts.spouts["once"].dead == 8


def skipped_as_told(error):
    """Run the command that an error names, as a shell would."""
    command = re.search(r" run: (ackcore skip .*)$", str(error)).group(1)
    done = CliRunner().invoke(app_of(["checkpoint_commands"]), shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    return done.output


@on_both_sessions
def test_a_planned_file_that_cannot_be_read_can_be_left_out(spark, checkpoint, store, tmp_path):
    """A run finds that it is damaged, and the next start that somebody has corrected it."""
    folder, damaged = tmp_path / "in", "no 'a\udcff.gz"  # a byte that is not UTF-8
    folder.mkdir()
    for n, name in enumerate(["a.gz", damaged, "b.gz"]):
        (folder / name).write_bytes(gzip.compress(b"%d\n" % n, mtime=0))
    it = values_of(FileSpout(folder, "text"), store)
    whole = (folder / damaged).read_bytes()
    (folder / damaged).write_bytes(whole[:-9])
    for _ in range(3):
        said = r"run 1 time and .*no 'a\\udcff.gz cannot be read as text"
        with pytest.raises(RunFailed, match=said):
            available_now(it, spark, checkpoint)
    assert recorded(checkpoint).read("batches/0.plan")["crashes"] == 0
    (folder / damaged).write_bytes(whole)
    with pytest.raises(SourceError, match=r"the file no 'a\\udcff.gz grew from") as changed:
        available_now(it, spark, checkpoint)
    done = skipped_as_told(changed.value)
    assert r"left out of micro-batch 0, spout values: no 'a\udcff.gz" in done
    with pytest.raises(ValueError, match=r"of spout 'values', or it was left out before"):
        skip_planned(checkpoint, "values", [damaged])
    (folder / damaged).rename(folder / "corrected.gz")
    on = available_now(it, spark, checkpoint)
    assert store.words == ["0", "1", "2"]
    assert (on.counts.records, on.counts.acked, on.counts.balanced) == (3, 3, True)
    (skip,) = read_status(checkpoint).skips
    assert (skip.batch_id, skip.spout, skip.files, skip.plans) == (
        0,
        "values",
        (r"no 'a\udcff.gz",),
        1,
    )
    with pytest.raises(ValueError, match="no micro-batch that is planned and not decided"):
        skip_planned(checkpoint, "values")


@pytest.mark.parametrize("cause", ["ModuleNotFoundError: No module", "x.StoreUnavailable: 403"])
def test_rows_are_left_out_only_for_errors_about_them(cause):
    """And a file only if the error is about it: its name may be a word of the message."""
    error = RuntimeError(cause)
    assert not str(given_up(Plan(0, 0, None, 0, ()), 1, error, "run: ackcore skip")).endswith(
        "skip"
    )
    files = [{"files": [[1, name, 9, ""] for name in ("a", "in", "a.gz", "d=1/a", "in/a")]}]
    for said, name in {
        "read() of its source raised a ValueError in time": None,
        "the file /data/in/a cannot be read": "a",
        "the file a.gz grew": "a.gz",
        "the file /data/in/d=1/a cannot be read": "d=1/a",
        "the file /data/in/in/a cannot be read": "in/a",
    }.items():
        command = shlex.split(skip_command("/c", "s", "files", "/data/in", files, said))
        assert command[4:] == ([] if name is None else ["--file", name])


class Broken(Table):
    """A table that lost its first rows."""

    def read(self, spark, plan):
        frame = super().read(spark, plan)
        return frame.selectExpr("id", "missing AS line") if plan["from"] == 0 else frame


def test_a_plan_that_cannot_be_read_can_be_left_out(spark, checkpoint, store):
    it = topology(store, lines=Broken("a", "b", "c"), numbers=Table("d"))
    with pytest.raises(SourceError, match=r"'lines', micro-batch 0: read\(\) .* Analysis") as lost:
        available_now(it, spark, checkpoint)
    said = r"has no planned file 'x' of spout 'lines'.*; it has no fil"
    with pytest.raises(ValueError, match=said):
        skip_planned(checkpoint, "lines", ["x"])
    with pytest.raises(ValueError, match="files must name at least one file; omit it to leave"):
        skip_planned(checkpoint, "lines", [])
    with pytest.raises(ValueError, match=r"no planned rows of spout 'other'.*; .* lines, numbers"):
        skip_planned(checkpoint, "other")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        skip_planned(f"{checkpoint}-no", "lines")
    assert skip_planned(checkpoint, "lines", dry_run=True).plans == 1
    assert "left out of micro-batch 0, spout lines: all rows" in skipped_as_told(lost.value)
    said = r"of spout 'lines', or they were left out before; .* numbers"
    with pytest.raises(ValueError, match=said):
        skip_planned(checkpoint, "lines")
    available_now(it, spark, checkpoint)
    assert store.words == ["c", "d"]


class JavaObjects(QueryListener):
    """Counts the JVM's objects that Python has not given up."""

    def __init__(self):
        self.counts = []

    def on_progress(self, progress, counts):
        self.counts.append(sum(isinstance(one, JavaObject) for one in gc.get_objects()))


def test_numbers_are_read_again_without_a_copy(spark, checkpoint, store):
    """And the JVM's objects of a micro-batch are freed without a full collection by Python."""
    source, left = RateSpout(50, max_rows_per_batch=20), JavaObjects()
    gc.disable()
    try:
        on = available_now(values_of(source, store), spark, checkpoint, listeners=[left])
    finally:
        gc.enable()
    assert left.counts[-1] < left.counts[1] + 20, left.counts
    assert (on.counts.records, on.counts.acked, on.counts.dead) == (50, 49, 1)
    assert store.words == sorted(str(n) for n in range(50) if n != 13)
    assert [one.records for one in on.recent_progress][:3] == [20, 20, 10]
    assert not [one for one in checkpoint.glob("ackcore/work/**/source/**") if one.is_file()]


@pytest.mark.parametrize(
    ("step", "content", "words"),
    [
        ("planned", "1\n2\n", "grew from 2 to 4 bytes"),
        ("planned", None, "disappeared"),
        ("ran", "1\n2\n", "grew from 2 to 4 bytes"),
    ],
)
def test_a_file_that_changes_before_its_decision_ends_the_query(
    spark, checkpoint, store, tmp_path, running, monkeypatch, step, content, words
):
    """Before its rows are read, and while they are."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a").write_text("1\n")

    def failpoint(name, n=None):
        if name == step:
            (folder / "a").unlink(missing_ok=True)
            if content is not None:
                (folder / "a").write_text(content)

    for module in (batch, runs):
        monkeypatch.setattr(module, "failpoint", failpoint)
    on = running(values_of(FileSpout(folder, "text"), store), spark, checkpoint)
    with pytest.raises(SourceError, match=f"the file a {words} after it was planned"):
        on.await_termination(300)
    assert not store.rows
    assert recorded(checkpoint).read("batches/0.decision") is None


def test_files_of_a_bucket_are_read(spark, tasks_reach, bucket, s3, checkpoint, store):
    """With a list for each plan, and one more for each micro-batch."""
    files = ObjectStore(f"{bucket}/in")
    for n in range(3):
        files.put(f"day={n}/part.txt", b"".join(b"%d\n" % (10 * n + m) for m in range(10)))
    source = FileSpout(f"{bucket}/in", "text", max_files_per_batch=2)
    on = available_now(values_of(source, store), spark, checkpoint)
    assert (on.counts.records, on.counts.acked) == (30, 30)
    assert sum(one.is_list for one in s3.requests) == 3 + 2
    plan = plans(checkpoint, "values")[1][0]
    source.check(plan)
    (name,) = [name for _, name, *_ in plan["files"]]
    files.put(name, b"other\n")
    with pytest.raises(SourceError, match=f"the file {name} was replaced"):
        source.check(plan)
    files.delete([name])
    with pytest.raises(SourceError, match=f"the file {name} disappeared"):
        source.check(plan)


def test_kafka_and_other_planned_sources_run_in_one_loop(
    spark, mock_kafka, checkpoint, store, running
):
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    import test_kafka_spout as kafka  # noqa: PLC0415

    cloudpickle.register_pickle_by_value(kafka)
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"x"])
    source, texts = Table("a", "flaky"), []
    topology = kafka.topology(
        kafka.source(mock_kafka, "t"),
        lambda frame, number: texts.extend(row[-1] for row in frame.collect()),
        source,
    )
    on = running(topology, spark, checkpoint)
    on.process_all_available()
    mock_kafka.produce("t", [b"flaky"])
    source.texts.append("b")
    on.process_all_available()
    assert (on.counts.acked, on.spark_query) == (5, None)
    assert sorted(texts) == ["a", "b", "flaky", "flaky", "x"]
    assert mock_kafka.committed("g", "t")[0] == 2
    assert source.told == [2, 3]
