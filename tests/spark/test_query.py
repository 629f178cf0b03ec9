"""Topologies on Spark, from start to counts: streams, sources that end, and what is refused."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from types import SimpleNamespace
from unittest import mock

import pyarrow as pa
import pytest
from checkpoints import recorded
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from streams import (
    DOWN,
    LINE,
    Count,
    Folder,
    Split,
    available_now,
    down_for_ever,
    in_line,
    until,
    word_count,
)

from ackcore.spark import query, spark_stream, stream
from ackcore.spark.base import session
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.interrupts import cancel_until
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.engine import action
from ackcore.spark.engine.insist import RunFailed, SinkError, Stopped
from ackcore.spark.query import run_batch, start
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.topology import BatchBolt, Bolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class KillLate(Bolt):
    """Kills the worker when its input ends, if there was ``kill``."""

    outputs = pa.schema([("word", pa.string())])

    def prepare(self, context):
        self.held = []

    def execute(self, tuple):
        self.held.append(tuple)

    def flush(self):
        for held in self.held:
            if held["line"] == "kill":
                os._exit(1)
            self.collector.emit((held["line"],), anchors=held)
            self.collector.ack(held)


class PassOn(BatchBolt):
    outputs = pa.schema([("id", pa.int32()), ("day", pa.date32())])

    def process(self, batch, out):
        out.emit(batch, parents=range(len(batch)))


def test_a_source_that_ends_is_drained(spark, tmp_path, store, caplog):
    lines = spark.createDataFrame([("a b",), ("flaky c",), ("bad",), ("no",)], LINE)
    topology = word_count(lines, store)
    counts = run_batch(topology, spark, tmp_path / "cp")
    assert store.words == ["a", "b", "c", "flaky"]
    assert store.rows[0] == ["a", "b"]
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (4, 2, 2, 0)
    assert counts.balanced
    letters = dead_letters(tmp_path / "cp", spark).orderBy("attempts").collect()
    assert [(row.payload.line, row.attempts, row.error_type) for row in letters] == [
        ("no", 1, "Reject"),
        ("bad", 3, "ValueError"),
    ]
    rows = dict(store.rows)
    assert "nothing was run" not in caplog.text
    assert run_batch(topology, spark, tmp_path / "cp") == counts
    assert store.rows == rows
    assert "has ended, so nothing was run" in caplog.text
    # What was asked for again is run when it is run again.
    replay(tmp_path / "cp", spark, where="error_type = 'Reject'")
    again = run_batch(topology, spark, tmp_path / "cp")
    assert (again.replayed, again.dead, again.balanced) == (1, 3, True)


def test_waiting_is_left_to_who_waits(spark, tmp_path, store):
    """In simulated time a back-off of an hour takes none."""
    now = [1_000_000]
    waits = []

    def wait(seconds):
        waits.append(seconds)
        now[0] += round(1000 * seconds)

    lines = spark.createDataFrame([("flaky",)], LINE)
    topology = word_count(lines, store, backoff_s=3600.0, max_backoff_s=3600.0)
    counts = run_batch(topology, spark, tmp_path / "cp", clock=lambda: now[0], wait=wait)
    assert counts.acked == 1
    assert sum(waits) <= 3600
    assert waits


def test_a_stream_retries_though_no_data_comes(
    spark, tmp_path, store, folder, running, caplog, conf, monkeypatch
):
    """The driver settles all but the first micro-batch, which may be large."""
    settled, results, adaptive = action.settled, session.results, []
    here = mock.Mock(side_effect=settled)
    monkeypatch.setattr(action, "settled", here)

    def noted(frame):
        adaptive.append(frame.sparkSession.conf.get("spark.sql.adaptive.enabled"))
        return results(frame)

    monkeypatch.setattr(session, "results", noted)
    conf("spark.sql.adaptive.enabled", "true")
    caplog.set_level("INFO", "ackcore")
    on = running(word_count(folder.stream, store), spark, tmp_path / "cp")
    assert on.is_active
    assert on.exception is None
    folder.add("a flaky", "b")
    until(lambda: on.counts.acked == 2, on)
    assert store.words == ["a", "b", "flaky"]
    batches = on.progress.batch_id
    assert [each.batch_id for each in on.recent_progress] == list(range(batches + 1))
    assert on.counts.retried == 1
    # Nothing is due any more, so nothing runs.
    time.sleep(1)
    assert on.progress.batch_id == batches
    assert not on.await_termination(0)
    assert "2 acked" in caplog.text or "1 acked" in caplog.text
    # Dead letters that are asked for again come without new data, too.
    folder.add("no")
    until(lambda: on.counts.dead == 1, on)
    replay(tmp_path / "cp", spark=spark)
    until(lambda: on.counts.replayed == 1, on)
    assert here.call_count == on.progress.batch_id
    assert set(adaptive) == {"false"}
    with pytest.raises(CheckpointInUse, match="in use by another query"):
        start(word_count(folder.stream, store), spark, tmp_path / "cp")
    assert "active" in repr(on)
    on.stop()
    assert (on.is_active, on.exception) == (False, None)
    assert on.await_termination()
    on.stop()


@pytest.mark.parametrize("timeout", [1e10, float("inf")])
def test_a_wait_may_be_longer_than_a_lock_can_wait(timeout):
    ended = SimpleNamespace(wait=lambda most_s: threading.Lock().acquire(True, most_s))
    assert stream.Stream.wait(SimpleNamespace(ended=ended, error=None), timeout)


@pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning")
def test_a_forked_copy_neither_waits_for_ever_nor_cancels_the_jobs_of_its_parent():
    copied = query.Query(SimpleNamespace(), "checkpoint")  # no call may reach the stream
    child = os.fork()
    if child == 0:
        said = 0
        try:
            for call in (copied.await_termination, copied.process_all_available, copied.stop):
                try:
                    call()
                except RuntimeError as error:
                    said += f"a fork of process {os.getppid()}, which runs the query" in str(error)
        finally:
            os._exit(said)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3


def test_to_wait_until_nothing_is_left(spark, tmp_path, store, folder, running):
    """Retries and replays included, whatever the trigger; and no longer than it runs."""
    folder.add("a flaky", "bad")
    topology = word_count(folder.stream, store, max_sink_attempts=1)
    on = running(topology, spark, tmp_path / "cp", trigger="100 milliseconds")
    on.process_all_available()
    assert (on.counts.acked, on.counts.dead, on.counts.waiting) == (1, 1, 0)
    replay(tmp_path / "cp", spark)
    folder.add("flaky")
    on.process_all_available()
    assert (on.counts.replayed, on.counts.acked, on.counts.dead, on.counts.waiting) == (1, 2, 2, 0)
    on.process_all_available()
    folder.add("b")
    store.down = 1
    with pytest.raises(SinkError, match="the store is down"):
        on.process_all_available()
    on = running(topology, spark, tmp_path / "cp", trigger={"availableNow": True})
    on.process_all_available()
    assert (on.is_active, on.counts.acked) == (False, 3)
    on.process_all_available()


def test_available_now_ends_when_nothing_waits(spark, tmp_path, store, folder, caplog):
    folder.add("a", "flaky")
    folder.add("b", "bad", "flaky c")
    topology = word_count(folder.stream, store)
    on = available_now(topology, spark, tmp_path / "cp")
    assert store.words == ["a", "b", "c", "flaky", "flaky"]
    assert (on.counts.records, on.counts.acked, on.counts.dead, on.counts.waiting) == (5, 4, 1, 0)
    (said,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "1 record died: 1 in 'split' of ValueError (cannot read bad). ackcore.spark.d" in said
    folder.add("d")
    on = available_now(topology, spark, tmp_path / "cp")
    assert on.counts.acked == 5
    assert on.progress.acked == 1
    on._stream._take(on.progress.batch_id, [])  # Spark may repeat it
    assert len(on.recent_progress) == 1


def test_several_streams(spark, tmp_path, folder):
    """Spouts and columns with a dot in their names, in a run of which a snapshot is kept."""
    other = Folder(spark, tmp_path / "other")
    builder = TopologyBuilder()
    builder.spout("in.a", folder.stream)
    builder.spout("in.b", other.stream.selectExpr("1 AS `a.n`", "line"), message_id="line")
    builder.bolt("split", Split()).shuffle("in.a").shuffle("in.b")
    builder.bolt("count", Count()).fields("split", "word")
    builder.sink("count", to_parquet(tmp_path / "out"))
    folder.add("a", "flaky")
    other.add("b flaky", "bad")
    topology = builder.build(backoff_s=0.001, max_attempts=2, careful_after=0)
    on = available_now(topology, spark, tmp_path / "cp", dead_letters=tmp_path / "dead")
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(row.word for row in rows) == ["a", "b", "flaky", "flaky"]
    assert {name: (a.acked, a.dead) for name, a in on.counts.spouts.items()} == {
        "in.a": (2, 0),
        "in.b": (1, 1),
    }
    (letter,) = dead_letters(tmp_path / "dead", spark).collect()
    assert (letter.spout, letter.message_id, letter.payload["a.n"]) == ("in.b", "bad", 1)


def test_a_source_that_fails_ends_the_query_with_sparks_error(spark, tmp_path, store):
    failing = "cast(raise_error('no') as string) as line"
    stream = spark.readStream.format("rate").load().selectExpr(failing)
    soon = {"backoff_s": 0.001, "max_backoff_s": 0.001}
    topology = word_count(stream, store, max_runs=2, max_restarts=1, **soon)
    on = start(topology, spark, tmp_path / "cp")
    said = r"RuntimeException: (\[USER_RAISED_EXCEPTION\] )?no\b"
    with pytest.raises((RunFailed, StreamingQueryException), match=said):
        on.await_termination(300)
    assert on.exception is not None


def test_a_record_that_kills_its_worker_in_flush_is_found(spark, tmp_path, store):
    lines = [(f"line {n}",) for n in range(20)]
    lines[7] = ("kill",)
    parts = {"lines": spark.createDataFrame(lines, LINE), "kill": KillLate()}
    topology = in_line(parts, store, careful_after=1, parallelism=2, max_runs=3)
    counts = run_batch(topology, spark, tmp_path / "cp")
    assert (counts.acked, counts.dead) == (19, 1)
    assert len(store.words) == 19
    (letter,) = dead_letters(tmp_path / "cp", spark).collect()
    assert (letter.payload.line, letter.error_type) == ("kill", "KilledWorker")


def test_what_cannot_run_is_refused_by_name(spark, tmp_path, store, folder):
    bounded = word_count(spark.createDataFrame([("a",)], LINE), store)
    stream = word_count(folder.stream, store)
    with pytest.raises(ValueError, match=r"spout 'lines' is a bounded DataFrame; use run_batch"):
        start(bounded, spark, tmp_path / "cp")
    with pytest.raises(ValueError, match=r"spout 'lines' is a stream, which never ends; use start"):
        run_batch(stream, spark, tmp_path / "cp")
    for trigger in ({"once": True}, {"availableNow": False}, 5, {"processingTime": 1}):
        with pytest.raises(ValueError, match="trigger must be a processing time such as"):
            start(stream, spark, tmp_path / "cp", trigger=trigger)
    with pytest.raises(ValueError, match=r"; did you mean 'availableNow'\?$"):
        start(stream, spark, tmp_path / "cp", trigger={"availablenow": True})
    with pytest.raises(TypeError, match="topology must be a Topology, got str"):
        run_batch("topology", spark, tmp_path / "cp")
    with pytest.raises(ValueError, match="checkpoint must be a path on a local or shared"):
        run_batch(bounded, spark, "viewfs://cluster/cp")
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    connect.is_stopped = False
    with pytest.raises(TypeError, match="Spark Connect"):
        start(stream, connect, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("line string, nothing struct<>", "'nothing' of struct<>, which Parquet, the"),
        ("line string, wait interval year", "'wait' of interval year, which Spark does"),
    ],
)
def test_columns_of_a_source_that_will_not_do_are_refused(spark, tmp_path, columns, words):
    lines = spark.createDataFrame([], columns)
    with pytest.raises(TypeError, match=words):
        run_batch(in_line({"lines": lines, "split": Split()}), spark, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


def test_columns_that_cannot_be_keys_are_refused(spark, tmp_path):
    frame = spark.createDataFrame([], "line string, tags map<string, int>")
    topology = in_line({"lines": frame, "split": Split()}, spout={"message_id": "tags"})
    with pytest.raises(TypeError, match=r"message_id of spout 'lines' must .* got 'tags' of map"):
        run_batch(topology, spark, tmp_path / "cp")
    builder = TopologyBuilder()
    builder.spout("lines", frame)
    builder.bolt("split", Split()).fields("lines", "tags")
    with pytest.raises(TypeError, match=r"grouping of bolt 'split' must .* got 'tags' of map"):
        run_batch(builder.build(), spark, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


class Unsent(Split):
    def __reduce__(self):
        raise RuntimeError("not me")


def test_a_bolt_that_cannot_travel_is_refused(spark, tmp_path):
    lines = spark.createDataFrame([("a",)], LINE)
    with pytest.raises(TypeError, match=r"bolt 'split' .* pickled \(RuntimeError: not me\)"):
        run_batch(in_line({"lines": lines, "split": Unsent()}), spark, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


def test_a_sink_that_is_another_checkpoints_is_refused_before_anything_runs(spark, tmp_path):
    def topology():
        return word_count(spark.createDataFrame([("a b",)], LINE), to_parquet(tmp_path / "out"))

    assert run_batch(topology(), spark, tmp_path / "cp").acked == 1
    with pytest.raises(CheckpointForeign, match="whose micro-batches have the same numbers"):
        run_batch(topology(), spark, tmp_path / "other")
    assert recorded(tmp_path / "other").numbers(".plan") == []
    # A refused start records no accepted change, and no other place of the dead letters.
    lines = spark.createDataFrame([("a b",)], LINE)
    changed = in_line({"lines": lines}, to_parquet(tmp_path / "out"))
    options = {"accept_changes": True, "dead_letters": tmp_path / "letters"}
    with pytest.raises(CheckpointForeign, match="is the directory of sink 'count' of the same"):
        run_batch(changed, spark, tmp_path / "cp", **options)
    assert run_batch(topology(), spark, tmp_path / "cp").acked == 1
    assert not (tmp_path / "letters").exists()


def test_a_stream_goes_on_wherever_its_checkpoint_lies(spark, tmp_path, store, folder, monkeypatch):
    name = "50% ü#1 a%20b [x]"
    for line in ("a", "b"):
        folder.add(line)
        topology = word_count(folder.stream, store)
        on = available_now(topology, spark, tmp_path / name)
    assert on.counts.acked == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["in", name])
    before = recorded(tmp_path / name).read_meta()

    def refuse(directory):
        raise PermissionError(directory)

    # Spark does not start its query: the change is accepted by the next start.
    monkeypatch.setattr(spark_stream, "forget_beats", refuse)
    changed = in_line({"lines": folder.stream}, store)
    with pytest.raises(PermissionError, match="/spark"):
        start(changed, spark, tmp_path / name, accept_changes=True)
    assert recorded(tmp_path / name).read_meta() == before


def test_a_clock_must_give_whole_milliseconds(spark, tmp_path, store):
    lines = spark.createDataFrame([("bad",)], LINE)
    with pytest.raises(TypeError, match=r"clock must return milliseconds .* as an int, got 1\.5"):
        run_batch(word_count(lines, store), spark, tmp_path / "cp", clock=lambda: 1.5)
    counts = run_batch(word_count(lines, store), spark, tmp_path / "cp", max_dead_ratio=None)
    assert counts.dead == 1


def test_dates_that_python_does_not_know(spark, tmp_path, store):
    dates = "SELECT i AS id, date_add(date'9999-12-31', i) AS day FROM VALUES (1), (2) AS t(i)"
    parts, spout = {"days": spark.sql(dates), "pass": PassOn()}, {"message_id": ("id", "day")}
    topology = in_line(parts, to_parquet(tmp_path / "out"), spout=spout)
    assert run_batch(topology, spark, tmp_path / "cp").acked == 2


def test_wide_offsets_change_nothing(spark, tmp_path, store, conf):
    conf("spark.sql.execution.arrow.useLargeVarTypes", "true")
    lines = spark.createDataFrame([("a flaky",), ("no",)], LINE)
    counts = run_batch(word_count(lines, store), spark, tmp_path / "cp")
    assert (counts.acked, counts.dead, store.words) == (1, 1, ["a", "flaky"])


def test_a_query_that_spark_does_not_start_leaves_no_lock(spark, tmp_path, store, folder):
    topology = word_count(folder.stream, store)
    with pytest.raises(ValueError, match=r"trigger must be a processing .* got 'not a duration'"):
        start(topology, spark, tmp_path / "cp", trigger="not a duration")
    available_now(topology, spark, tmp_path / "cp")


def test_stop_gives_up_what_runs(spark, tmp_path, folder, running, monkeypatch):
    """A sink that fails for ever does not keep a query from being stopped, or Python from ending.

    Without a stop at the exit, threads in native code aborted the process.
    """
    exits = mock.Mock()
    monkeypatch.setattr(stream, "atexit", exits)
    folder.add("a")
    store, topology = down_for_ever(folder.stream)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: store.down < DOWN, on)
    on.spark_query.stop()  # not the way, but no reason to hang or to fail
    assert on.await_termination(300)
    assert on.exception is None
    assert on.counts.batches == 0
    assert exits.unregister.mock_calls == [mock.call(on._stream._stop_at_exit)]
    on = running(topology, spark, tmp_path / "cp")
    down = store.down
    until(lambda: store.down < down, on)
    exits.register.call_args[0][0]()
    assert (on._stream.ended.is_set(), on.exception, on.counts.batches) == (True, None, 0)
    # Spark takes it for the end that it asked for, and has no error to log.
    assert on.spark_query.exception() is None
    store.down = 0
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: on.counts.acked == 1, on)
    assert query.Query is type(on)
    at_exit = exits.register.call_args[0][0]
    with warnings.catch_warnings(action="ignore"):  # of Python 3.12: this process has threads
        child = os.fork()
    if not child:
        at_exit()
        os._exit(on._stream._leaving.is_set())  # the query is not this process's
    assert os.waitpid(child, 0)[1] == 0
    monkeypatch.setattr(spark.sparkContext, "_jsc", None)  # as after spark.stop()
    cancel_until(session.JobTag(spark, "no job"), threading.Event())
    at_exit()
    assert (on._stream.ended.is_set(), on.exception) == (True, None)  # though no sink was called


def test_a_query_whose_end_fails_has_ended(spark, tmp_path, store, folder, running, monkeypatch):
    on = running(word_count(folder.stream, store), spark, tmp_path / "cp")
    deployment = on._stream._deployment
    close = deployment.close

    def closed_with_an_error():
        close()
        raise OSError("the lock cannot be removed")

    monkeypatch.setattr(deployment, "close", closed_with_an_error)
    on.stop()
    with pytest.raises(OSError, match="the lock cannot be removed"):
        on.await_termination(60)


def test_a_stop_that_the_sink_hears_of_before_spark_is_no_error_to_spark(
    spark, tmp_path, folder, running, monkeypatch
):
    """Whoever is told first: until Spark's query is being stopped, an interruption is an error."""
    folder.add("a")
    store, topology = down_for_ever(folder.stream)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: store.down < DOWN, on)
    sparks_stop, ended = StreamingQuery.stop, []

    def stop_late(query):
        with on._stream._changed:
            on._stream._changed.wait_for(lambda: on._stream._at_work is None, 60)
        # True, or an error, if it has ended by itself.
        ended.append(query.awaitTermination(1))
        sparks_stop(query)

    monkeypatch.setattr(StreamingQuery, "stop", stop_late)
    on.stop()
    assert ended == [False]
    assert (on.exception, on.spark_query.exception()) == (None, None)


def test_records_that_wait_are_not_forced_into_other_types(spark, tmp_path, store):
    """A source whose column has another type now: who waits has the former one."""

    class Patience(Exception):
        pass

    def no_time(seconds):
        raise Patience

    def topology(frame):
        return in_line({"numbers": frame, "never": Never()})

    ints = topology(spark.range(3).selectExpr("int(id) AS n"))
    with pytest.raises(Patience):
        run_batch(ints, spark, tmp_path, clock=lambda: 0, wait=no_time)
    with pytest.raises(CheckpointForeign, match=r"3 records .* 'n' was int32 and is bool now"):
        run_batch(topology(spark.range(3).selectExpr("id > 1 AS n")), spark, tmp_path)
    wide = topology(spark.range(3).selectExpr("id AS n"))
    with pytest.raises(Patience):
        run_batch(wide, spark, tmp_path, clock=lambda: 10**15, wait=no_time)
    assert recorded(tmp_path).numbers(".done")[-1] == 1


class Never(BatchBolt):
    def process(self, batch, out):
        out.fail(range(len(batch)), "never")


@pytest.mark.parametrize("is_restart", [True, False])
@pytest.mark.parametrize("first", [None, SinkError("just before"), Stopped("by its end")])
def test_the_loss_of_the_session_has_the_error_before_it_as_cause(monkeypatch, first, is_restart):
    ended = object.__new__(spark_stream.SparkStream)
    about = {"_spark": None, "_end": None, "error": first, "spark_query": None}
    vars(ended).update(about, _leaving=threading.Event())
    monkeypatch.setattr(stream, "end_of", lambda spark: "the session is gone")
    monkeypatch.setattr(stream, "is_connect", lambda spark: False)
    if is_restart:
        assert not ended._may_restart(first)
    else:
        ended._end_with_session()
        assert ended.error is first  # one lost answer
        ended._end_with_session()
    assert isinstance(ended.error, RunFailed)
    assert ended.error.__cause__ is (None if isinstance(first, Stopped) else first)
    lost = ended.error
    for _ in range(2):  # it is seen again until the stream has ended
        ended._end_with_session()
        assert not ended._may_restart(ended.error)
    assert ended.error is lost
