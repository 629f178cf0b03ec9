"""The ends of a stream: its source, Spark, or a stop; and its restarts."""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, StreamingQueryException
from streams import DOWN, Split, Store, down_for_ever, in_line, until, word_count

from ackcore.spark import stream
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.lock import Lock
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.insist import RunFailed, SinkError, Stopped
from ackcore.spark.loop import Pacing
from ackcore.spark.query import start
from ackcore.spark.spark_stream import SparkStream
from ackcore.spark.stream import end_of, may_pass

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def unsteady(spark):
    """Lines, one a micro-batch, of a store that cannot be reached while a file is there."""
    python_sources = pytest.importorskip("pyspark.sql.datasource", reason="Spark 4.0 brings it")

    class Reader(python_sources.SimpleDataSourceStreamReader):
        def __init__(self, down):
            self.down = down

        def initialOffset(self):
            return {"at": 0}

        def read(self, start):
            if self.down.exists():
                raise ConnectionError("the store of lines is down")
            return self.readBetweenOffsets(start, {"at": 1}), {"at": 1}

        def readBetweenOffsets(self, start, end):
            return iter([("a",)] * (end["at"] - start["at"]))

    class Unsteady(python_sources.DataSource):
        @classmethod
        def name(cls):
            return "unsteady"

        def schema(self):
            return "line string"

        def simpleStreamReader(self, schema):
            return Reader(Path(self.options["down"]))

    spark.dataSource.register(Unsteady)


def test_a_source_that_was_down_is_asked_again(spark, unsteady, tmp_path, store, running, caplog):
    down = tmp_path / "down"
    down.touch()
    source = spark.readStream.format("unsteady").option("down", str(down)).load()
    topology = word_count(source, store, max_restarts=2, backoff_s=0.001, max_backoff_s=0.001)
    on = running(topology, spark, tmp_path / "cp")
    with pytest.raises(StreamingQueryException, match="the store of lines is down"):
        on.await_termination(300)
    told = [line for line in caplog.messages if "ackcore restarts it" in line]
    assert [line[: line.index(":")] for line in told] == [
        "Spark ended the query; ackcore restarts it in 0.0 s, restart 1 of 2",
        "Spark ended the query; ackcore restarts it in 0.0 s, restart 2 of 2",
    ]
    assert "the store of lines is down" in told[0]
    caplog.clear()
    topology = word_count(source, store, max_restarts=100, backoff_s=0.001, max_backoff_s=0.001)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: "ackcore restarts it" in caplog.text, on)
    down.unlink()
    until(lambda: on.counts.acked == 1, on)
    until(lambda: on._stream._restarts == 0, on)
    on.stop()
    assert (on.exception, store.words) == (None, ["a"])


class Held(Split):
    """Says that it has come, and is at its tuple until it is let go."""

    def __init__(self, directory):
        self.came, self.let_go = directory / "came", directory / "let go"

    def execute(self, tuple, collector):
        self.came.touch()
        while not self.let_go.exists():
            time.sleep(0.01)
        super().execute(tuple, collector)


def test_stop_lets_the_micro_batch_end_if_asked(spark, tmp_path, store, folder, running):
    """Its jobs, too, which Spark cancels when its query is stopped."""
    folder.add("a")
    folder.add("b")
    held = Held(tmp_path)
    topology = in_line({"lines": folder.stream, "held": held}, store)
    on = running(topology, spark, tmp_path / "cp")
    until(held.came.exists, on)
    stopping = threading.Thread(target=on.stop, args=(True,))
    stopping.start()
    until(on._stream._leaving.is_set, on)
    assert not on.await_termination(0.5)
    held.let_go.touch()
    stopping.join(300)
    assert (on.is_active, on.exception) == (False, None)
    assert on.counts.batches == 1
    assert store.words == ["a"]
    assert (tmp_path / "cp/spark/commits/0").exists()
    assert (tmp_path / "cp/spark/commits/.0.crc").exists()
    on.stop(finish=True)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: on.counts.acked == 2, on)
    on.stop(finish=True)  # where nothing runs
    assert store.words == ["a", "b"]


def test_who_waits_for_the_end_of_a_micro_batch_may_give_it_up(
    spark, tmp_path, folder, running, caplog
):
    """A sink that is down for ever never ends; and no word of Py4J's about the stop."""
    caplog.set_level("WARNING")
    folder.add("a")
    store, topology = down_for_ever(folder.stream)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: store.down < DOWN, on)
    waits = [threading.Thread(target=on.stop, kwargs={"finish": True}) for _ in range(2)]
    for thread in waits:
        thread.start()
    until(on._stream._leaving.is_set, on)
    down = store.down
    until(lambda: store.down < down, on)
    on.stop()
    for thread in waits:
        thread.join(300)
    assert (on.is_active, on.exception, on.counts.batches) == (False, None, 0)
    assert not [record for record in caplog.records if record.name.startswith("py4j")]


class CutOff(Store):
    """Breaks the connection by which Spark has called it, and goes on when it is let go; once."""

    def __init__(self):
        super().__init__()
        self.came, self.let_go = threading.Event(), threading.Event()

    def __call__(self, frame, number):
        if not self.came.is_set():
            client = frame.sparkSession.sparkContext._gateway._gateway_client
            client.get_thread_connection().socket.shutdown(socket.SHUT_RDWR)
            self.came.set()
            assert self.let_go.wait(60)
            return
        super().__call__(frame, number)


def test_what_a_lost_query_of_sparks_has_called_ends_before_another_begins(
    spark, tmp_path, folder, running, caplog, monkeypatch
):
    """Else two threads would take one micro-batch through the protocol."""
    began = []

    def begin(stream):
        began.append(stream._at_work)
        return begin_query(stream)

    begin_query = SparkStream._begin
    store = CutOff()
    folder.add("a")
    folder.add("b")
    topology = word_count(folder.stream, store, backoff_s=0.001, max_backoff_s=0.001)
    on = running(topology, spark, tmp_path / "cp")
    monkeypatch.setattr(SparkStream, "_begin", begin)
    assert store.came.wait(60)
    first = on.spark_query
    until(lambda: not first.isActive, on)
    assert not on._stream.ended.wait(1)
    assert began == []
    store.let_go.set()
    until(lambda: on.counts.acked == 2, on)
    on.stop()
    assert (began, on.exception) == ([None], None)
    assert "ackcore restarts it" in caplog.text


def test_a_start_that_is_interrupted_leaves_no_query_of_sparks(
    spark, tmp_path, folder, running, monkeypatch
):
    """At its last step, when Spark's query runs: else this would run on without its checkpoint."""

    def interrupt(state):
        raise KeyboardInterrupt

    topology = word_count(folder.stream, Store())
    with monkeypatch.context() as patch:
        patch.setattr(State, "record_topology", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start(topology, spark, tmp_path / "cp")
    assert not spark.streams.active
    folder.add("a")
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: on.counts.acked == 1, on)


def test_the_lock_is_held_until_a_lost_call_has_returned(spark, tmp_path, folder, running):
    """Else a sink would be at its rows still when the next driver gives it the same."""
    store = CutOff()
    folder.add("a")
    on = running(word_count(folder.stream, store), spark, tmp_path / "cp")
    assert store.came.wait(60)
    first = on.spark_query
    until(lambda: not first.isActive, on)
    stopping = threading.Thread(target=on.stop)
    stopping.start()
    assert not on.await_termination(1)
    with pytest.raises(CheckpointInUse, match="in use by another query"):
        Lock(tmp_path / "cp/ackcore/lock")
    store.let_go.set()
    stopping.join(60)
    assert (on.is_active, on.exception) == (False, None)
    Lock(tmp_path / "cp/ackcore/lock").close()


def test_who_stops_sparks_query_stops_ours(spark, tmp_path, store, folder, running):
    """Though a record waits, and all that is available now has been read."""
    folder.add("a bad")
    topology = word_count(folder.stream, store, backoff_s=3600.0, max_backoff_s=3600.0)
    on = running(topology, spark, tmp_path / "cp", trigger={"availableNow": True})
    until(lambda: on.counts.waiting == 1, on)
    on.spark_query.stop()
    assert on.await_termination(60)
    assert (on.exception, on.counts.waiting) == (None, 1)


def test_who_was_taken_over_leaves_sparks_part_alone(spark, unsteady, tmp_path, running):
    """A host that was cut off and comes back: its Spark lost its source meanwhile."""
    down = tmp_path / "down"
    source = spark.readStream.format("unsteady").option("down", str(down)).load()
    topology = word_count(source, Store(), max_restarts=10**6, backoff_s=0.001, max_backoff_s=0.001)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: on.counts.acked >= 1, on)
    (tmp_path / "cp/ackcore/lock").write_text("pid 7 on another host\n1\n")
    down.touch()
    with pytest.raises(CheckpointInUse, match="was taken over from this driver"):
        on.await_termination(120)


def test_a_sink_may_stop_its_query(spark, tmp_path, folder):
    queries = []
    folder.add("a")
    folder.add("b")
    ready = threading.Event()
    topology = word_count(folder.stream, lambda f, n: ready.wait(60) and queries[0].stop(True))
    queries.append(start(topology, spark, tmp_path / "cp"))
    ready.set()
    assert queries[0].await_termination(300)
    assert (queries[0].exception, queries[0].counts.batches) == (None, 1)


def test_what_is_told_of_errors_is_not_told_by_py4j(spark, tmp_path, store, folder, caplog):
    store.down = 1
    folder.add("a")
    on = start(word_count(folder.stream, store, max_sink_attempts=1), spark, tmp_path / "cp")
    with pytest.raises(SinkError, match="the store is down"):
        on.await_termination(300)
    assert [record.name for record in caplog.records] == ["ackcore"]
    assert logging.getLogger("py4j.clientserver").isEnabledFor(logging.ERROR)


def test_a_stream_without_new_data_ends_with_its_session(
    spark, tmp_path, store, folder, running, monkeypatch
):
    """Spark's query would look for files for ever, and the checkpoint stay locked."""
    monkeypatch.setattr(Pacing, "CALLED_S", 0.01)
    folder.add("a")
    on = running(word_count(folder.stream, store), spark, tmp_path / "cp")
    until(lambda: on.counts.acked == 1, on)
    answers = [None, "the JVM is silent", None]  # one lost answer is no end
    passed = threading.Event()

    def looked(session):
        if answers:
            return answers.pop(0)
        return "the SparkSession was stopped" if passed.is_set() else None

    monkeypatch.setattr(stream, "end_of", looked)
    until(lambda: not answers, on)
    passed.set()
    with pytest.raises(RunFailed, match="the SparkSession was stopped"):
        on.await_termination(60)
    assert not on.spark_query.isActive
    Lock(tmp_path / "cp/ackcore/lock").close()


def test_a_stream_ends_with_its_session_while_a_sink_is_retried(
    spark, tmp_path, folder, running, monkeypatch
):
    """The end of the session also stops the micro-batch, which must not hide it."""
    monkeypatch.setattr(Pacing, "CALLED_S", 0.01)
    folder.add("a")
    store, topology = down_for_ever(folder.stream)
    on = running(topology, spark, tmp_path / "cp")
    until(lambda: store.down < DOWN, on)
    monkeypatch.setattr(stream, "end_of", lambda session: "the SparkSession was stopped")
    with pytest.raises(RunFailed, match="the SparkSession was stopped"):
        on.await_termination(60)
    assert isinstance(on.exception, RunFailed)


def test_the_end_of_a_session_is_seen_before_sparks_query_returns():
    """With a long trigger, Spark's query would return only at the next one."""

    def await_termination(timeout=None):
        assert timeout is not None
        assert one.error is None, "it waits for ever"
        one.error = RunFailed("the SparkSession was stopped")
        return False

    one = SimpleNamespace(
        error=None,
        spark_query=SimpleNamespace(awaitTermination=await_termination, isActive=False),
        _changed=threading.Condition(),
        _at_work=None,
        _may_restart=lambda error: False,
    )
    with pytest.raises(RunFailed, match="the SparkSession was stopped"):
        SparkStream._step(one)


def java(*names):
    """A stand-in for the part of a Java error and its causes that is read."""
    cause = None
    for name in reversed(names):
        cause = SimpleNamespace(
            getClass=lambda name=name: SimpleNamespace(getName=lambda: name),
            getCause=lambda cause=cause: cause,
        )
    return cause


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (Py4JNetworkError("Answer from Java side is empty"), True),
        (ConnectionResetError("by peer"), True),
        (AnalysisException("no such column"), False),
        (SinkError("down"), False),
        (Stopped("by its user"), False),
        (KeyError("a bug of ours"), False),
        (("org.apache.spark.SparkException", "java.net.SocketTimeoutException"), True),
        (("org.apache.spark.SparkException", "java.lang.IllegalStateException"), False),
        (("org.apache.spark.sql.catalyst.ExtendedAnalysisException",), False),
        (("java.lang.AssertionError",), False),
    ],
)
def test_what_may_pass(error, passes):
    if isinstance(error, tuple):
        names, error = error, StreamingQueryException("it failed")
        error._origin = java(*names)
    assert may_pass(error) is passes


def test_the_end_of_a_session(spark):
    assert end_of(spark) is None

    def session(status, context):
        gateway = SimpleNamespace(proc=SimpleNamespace(poll=lambda: status))
        return SimpleNamespace(sparkContext=SimpleNamespace(_gateway=gateway, _jsc=context))

    died = end_of(session(137, None))  # PySpark starts no second JVM in a process
    assert "exit status 137; start again on the same checkpoint, in a new process" in died
    assert "SparkSession was stopped" in end_of(session(None, None))

    class Lost:
        def sc(self):
            raise ConnectionRefusedError

    assert "cannot be reached any more" in end_of(session(None, Lost()))
