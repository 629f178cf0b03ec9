"""Particulars of Spark Connect: refusals, tasks, interrupts, and sessions that end."""

from __future__ import annotations

import datetime
import importlib
import os
import signal
import sys
import threading
import time

import pyarrow as pa
import pytest
from streams import in_line

from ackcore.spark.base.versions import SPARK

if SPARK < (4, 0):  # whose pyspark.testing loads the pandas API
    pytest.skip("Spark Connect is supported from 4.0 on", allow_module_level=True)

from checkpoints import recorded
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql.types import LongType, StructField, StructType
from pyspark.testing.objects import ExamplePoint, ExamplePointUDT
from sessions import on_both_sessions

from ackcore.spark import (
    RunCancelled,
    RunFailed,
    dead_letters,
    guard,
    replay,
    run_batch,
    settle,
    start,
    to_jdbc,
    to_parquet,
)
from ackcore.spark.base import session, workers
from ackcore.spark.base.interrupts import raise_if_interrupted
from ackcore.spark.base.session import session_lost, task_slots
from ackcore.spark.base.sources import has_fixed_order, has_fixed_rows
from ackcore.spark.base.workers import WorkerPythonError
from ackcore.spark.settle.dataframes import estimated_bytes
from ackcore.topology import BasicBolt, Reject, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LINES = "id bigint, tags array<struct<name: string, at: timestamp>>, more map<string, binary>"
NOON = datetime.datetime(2026, 3, 1, 12)


class Names(BasicBolt):
    """A row for each tag; "poison" is refused, "flaky" fails the first time."""

    outputs = pa.schema([("id", pa.int64()), ("name", pa.string())])
    refused = "poison"

    def execute(self, tuple, collector):
        for tag in tuple["tags"]:
            if tag["name"] == self.refused:
                raise Reject("not for us")
            if tag["name"] == "flaky" and tuple.attempt == 0:
                raise TimeoutError("busy")
            collector.emit((tuple["id"], tag["name"]))


class Held(BasicBolt):
    """Waits as long as a file is there."""

    outputs = pa.schema([("id", pa.int64())])

    def __init__(self, directory):
        self.slow, self.begun = f"{directory}/slow", f"{directory}/begun"

    def execute(self, tuple, collector):
        open(self.begun, "w").close()
        until = time.monotonic() + 60
        while os.path.exists(self.slow) and time.monotonic() < until:
            time.sleep(0.02)
        collector.emit((tuple["id"],))


def topology(frame, bolt, *sinks):
    builder = TopologyBuilder()
    builder.spout("lines", frame)
    builder.bolt("bolt", bolt).shuffle("lines")
    for number, sink in enumerate(sinks):
        builder.sink("bolt", sink, name=f"sink-{number}")
    return builder.build(backoff_s=0.001)


def test_what_needs_the_jvm_of_a_classic_session_is_refused_by_name(connect, tmp_path):
    stream = connect.readStream.format("rate").load()
    for refused in (
        lambda: start(topology(stream, Names()), connect, tmp_path / "cp"),
        lambda: guard(stream, lambda row: 1, "n int", print, tmp_path / "cp"),
    ):
        with pytest.raises(TypeError, match=r"start\(\) needs a classic .* or run_batch\(\) with"):
            refused()
    it = topology(connect.range(1), Names(), to_jdbc("jdbc:derby:memory:x", "t"))
    with pytest.raises(TypeError, match=r"'sink-0', to_jdbc\(.* needs the JVM .* to_postgres\(\)"):
        run_batch(it, connect, tmp_path / "cp")
    assert not (tmp_path / "cp").exists()


def test_sessions_that_were_stopped_and_old_ones_are_refused(connect, other_connect, monkeypatch):
    frame = other_connect.range(1)
    other_connect.stop()
    with pytest.raises(ValueError, match="events is a DataFrame of a session that was stopped"):
        settle(frame)
    monkeypatch.setattr(session, "SPARK", (3, 5))
    with pytest.raises(TypeError, match=r"events is a DataFrame of Spark Connect, .* from Spark 4"):
        settle(connect.range(1))


@pytest.mark.parametrize("spark", ["connect"], indirect=True)
def test_a_batch_with_all_that_may_become_of_a_record(spark, conf, tmp_path):
    """Nested columns, more rows than go inline, a retry, a dead letter that is sent again."""
    conf("spark.sql.session.localRelationCacheThreshold", "1000")
    conf("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    names = {7: "poison", 8: "flaky"}
    rows = [
        (n, [(names.get(n, "a"), NOON), (f"b{n}", None)], {"x": b"\0" * 9, "y": None})
        for n in range(100)
    ]
    source, written = spark.createDataFrame(rows, LINES), []

    def write(frame, number):
        written.extend(frame.collect())

    bolt = Names()
    it = topology(source, bolt, to_parquet(tmp_path / "out"), write)
    counts = run_batch(it, spark, tmp_path / "cp")
    assert (counts.records, counts.acked, counts.dead, counts.retried) == (100, 99, 1, 1)
    (letter,) = dead_letters(tmp_path / "cp", spark).collect()
    assert (letter.error_type, letter.payload.id, letter.payload.tags[0].at) == ("Reject", 7, NOON)
    assert letter.payload.more == {"x": bytearray(9), "y": None}
    bolt.refused = None
    assert replay(tmp_path / "cp", spark, where="payload.id = 7").records == {"lines": 1}
    counts = run_batch(it, spark, tmp_path / "cp")
    assert (counts.balanced, counts.acked, counts.resolved) == (True, 100, 1)
    wanted = sorted((n, name) for n in range(100) for name in (names.get(n, "a"), f"b{n}"))
    found = spark.read.parquet(str(tmp_path / "out")).select("id", "name").collect()
    assert sorted(map(tuple, found)) == sorted(map(tuple, written)) == wanted


class Points(BasicBolt):
    """A point's coordinates, apart; those of the first are refused."""

    outputs = pa.schema([("id", pa.int64()), ("x", pa.float64()), ("y", pa.float64())])

    def execute(self, tuple, collector):
        if tuple["id"] == 0:
            raise Reject("not for us")
        collector.emit((tuple["id"], *tuple["point"]))


@on_both_sessions
def test_a_column_of_a_users_type_is_what_it_is_stored_as(spark, tmp_path):
    """To bolts, to dead letters, to those that are sent again, and to sinks without a bolt."""
    point = StructType([StructField("id", LongType()), StructField("point", ExamplePointUDT())])
    rows = [(n, ExamplePoint(n + 0.5, n + 0.25)) for n in range(3)]
    frame, written = spark.createDataFrame(rows, point), []
    builder = TopologyBuilder()
    builder.spout("points", frame)
    builder.bolt("apart", Points()).shuffle("points")
    builder.sink("apart", to_parquet(tmp_path / "out"))
    builder.sink("points", lambda rows, number: written.extend(rows.collect()))
    it = builder.build()
    counts = run_batch(it, spark, tmp_path / "cp")
    assert (counts.acked, counts.dead) == (2, 1)
    found = spark.read.parquet(str(tmp_path / "out")).select("id", "x", "y").collect()
    assert sorted(map(tuple, found)) == [(1, 1.5, 1.25), (2, 2.5, 2.25)]
    assert sorted((row.id, row.point) for row in written) == [(1, [1.5, 1.25]), (2, [2.5, 2.25])]
    (letter,) = dead_letters(tmp_path / "cp", spark).collect()
    assert letter.payload.point == [0.5, 0.25]
    assert replay(tmp_path / "cp", spark).records == {"points": 1}
    assert run_batch(it, spark, tmp_path / "cp").replayed == 1


def test_a_source_without_rows_and_one_without_partitions(connect, tmp_path):
    for number, frame in enumerate((connect.createDataFrame([], LINES), connect.range(0, 0, 1, 3))):
        bolt = Names()
        it = topology(frame, bolt, to_parquet(tmp_path / f"out-{number}"))
        counts = run_batch(it, connect, tmp_path / f"cp-{number}")
        assert (counts.records, counts.balanced) == (0, True)


def test_a_source_is_written_down_as_no_plan_shows_its_order(connect):
    frame = connect.range(3)
    assert not has_fixed_order(frame)
    assert not has_fixed_rows(frame)
    assert estimated_bytes(frame) is None


def test_the_number_of_tasks_is_asked_once(connect, monkeypatch):
    assert task_slots(connect) == 2
    monkeypatch.delattr(type(connect), "range")
    assert task_slots(connect) == 2


# -- jobs that are cancelled, and sessions that end -----------------------------------------------


def once_begun(directory, then):
    """Do something in another thread once a task is at work."""

    def run():
        until = time.monotonic() + 60
        while not (directory / "begun").exists() and time.monotonic() < until:
            time.sleep(0.02)
        then()

    threading.Thread(target=run, daemon=True).start()


@pytest.fixture
def slow(tmp_path):
    (tmp_path / "slow").touch()
    return tmp_path / "slow"


def ended(topology, spark, directory, slow):
    """Run to the end, and see that nothing counted as a crash of what was cut off before."""
    slow.unlink()
    counts = run_batch(topology, spark, directory / "cp")
    assert (counts.acked, counts.dead, counts.retried, counts.balanced) == (3, 0, 0, True)
    return recorded(directory / "cp").read("batches/0.plan")


def test_an_interrupt_cancels_the_job_and_costs_nothing(connect, tmp_path, slow):
    it = topology(connect.range(3), Held(tmp_path))
    once_begun(tmp_path, lambda: os.kill(os.getpid(), signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_batch(it, connect, tmp_path / "cp")
    finally:
        signal.signal(signal.SIGINT, handler)
    # Its tasks were told to end: they do not wait for the file.
    assert connect.interruptAll() == []
    assert ended(it, connect, tmp_path, slow)["crashes"] == 0


def test_a_job_that_is_interrupted_from_outside_ends_the_run(connect, tmp_path, slow):
    it = topology(connect.range(3), Held(tmp_path))
    once_begun(tmp_path, connect.interruptAll)
    with pytest.raises(RunCancelled, match=r"micro-batch 0 .*from outside.*OPERATION_CANCELED"):
        run_batch(it, connect, tmp_path / "cp")
    assert ended(it, connect, tmp_path, slow)["crashes"] == 0


def test_a_session_that_its_server_ended_ends_the_run(connect, other_connect, tmp_path, slow):
    """End the session, as an hour without a request or an administrator does."""
    other = other_connect
    once_begun(tmp_path, other.client.release_session)
    with pytest.raises(RunCancelled, match="the session of Spark Connect has ended") as caught:
        run_batch(topology(other.range(3), Held(tmp_path)), other, tmp_path / "cp")
    assert caught.value.shut_down
    # Nobody knows what the server died of: that counts, as a JVM's end does.
    plan = ended(topology(connect.range(3), Held(tmp_path)), connect, tmp_path, slow)
    assert plan["crashes"] > 0


def test_a_cancelled_job_of_a_session_that_has_ended_names_the_session(connect, other_connect):
    from pyspark.errors.exceptions import connect as raised  # noqa: PLC0415 - needs grpc

    cancelled = raised.SparkConnectGrpcException("[OPERATION_CANCELED] canceled. SQLSTATE: HY008")
    other_connect.range(1).collect()
    with pytest.raises(RunCancelled, match="from outside"):
        raise_if_interrupted(cancelled, None, other_connect, "it", "go on")
    other_connect.client.release_session()
    with pytest.raises(RunCancelled, match="the session of Spark Connect has ended") as caught:
        raise_if_interrupted(cancelled, None, other_connect, "it", "go on")
    assert caught.value.shut_down


def test_a_session_is_kept_alive_while_a_retry_is_waited_for(connect, tmp_path, monkeypatch):
    now, heard, waits = [0], [], []
    monkeypatch.setattr("ackcore.spark.query.keep_alive", lambda spark: heard.append(now[0]))

    def wait(seconds):
        waits.append(seconds)
        now[0] += round(seconds * 1000)

    rows = connect.createDataFrame([(1, [("flaky", NOON)], None)], LINES)
    it = in_line({"lines": rows, "bolt": Names()}, backoff_s=4000.0, max_backoff_s=4000.0)
    counts = run_batch(it, connect, tmp_path / "cp", clock=lambda: now[0], wait=wait)
    assert (counts.acked, counts.retried) == (1, 1)
    assert len(heard) == len(waits) > 1
    assert sum(waits) > session.ALIVE_S
    assert max(waits) <= session.ALIVE_S


def test_by_what_a_lost_session_is_told(other_connect):
    from pyspark.errors.exceptions import connect as raised  # noqa: PLC0415 - needs grpc

    gone = (
        "<_MultiThreadedRendezvous of RPC that terminated with:\n\tstatus = "
        'StatusCode.UNAVAILABLE\n\tdetails = "Connection refused"\n>'
    )
    assert session_lost(raised.SparkConnectGrpcException(gone))
    assert session_lost(ValueError("Cannot invoke RPC on closed channel!"))
    for none in (
        raised.PythonException(f"Traceback ...\nRuntimeError: {gone}"),
        raised.PythonException("SESSION_CLOSED INVALID_HANDLE.SESSION_CLOSED"),
        PySparkException("StatusCode.UNAVAILABLE"),
        ValueError("StatusCode.UNAVAILABLE"),
        RuntimeError(gone),
    ):
        assert not session_lost(none)
    other_connect.client.close()
    with pytest.raises((PySparkException, ValueError)) as caught:
        other_connect.range(1).collect()
    assert session_lost(caught.value)


# -- the server's workers -------------------------------------------------------------------------


def test_a_server_with_another_python_is_refused(connect, monkeypatch):
    monkeypatch.setattr(workers, "_FIT", {})

    class Sys:
        version_info = (3, 9, 1)

    for name in ("udf", "expressions", "plan", "session", "dataframe"):
        module = importlib.import_module(f"pyspark.sql.connect.{name}")
        if hasattr(module, "sys"):
            monkeypatch.setattr(module, "sys", Sys)
    words = r"the server's: .*has different version.* Start the server of Spark Connect with PYSP"
    with pytest.raises(WorkerPythonError, match=words):
        workers.check_workers(connect)


def test_a_server_without_ackcore_is_refused(connect, monkeypatch):
    monkeypatch.setattr(workers, "_FIT", {})
    lacks = workers.WorkerReport("/there/python", "3.11.2", None, "ModuleNotFoundError: ackcore")
    monkeypatch.setattr(workers, "ask", lambda spark: {lacks})
    with pytest.raises(WorkerPythonError, match=r"/there/python .* cannot import ackcore.* Start"):
        settle(connect.createDataFrame([], "root_id bigint, val bigint, task int"))


def test_a_module_that_the_server_lacks_is_told_with_the_way_out(connect, tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "import pyarrow as pa\nfrom ackcore.topology import BasicBolt\n"
        "class Here(BasicBolt):\n    outputs = pa.schema([('id', pa.int64())])\n"
        "    def execute(self, tuple, collector):\n        pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from only_here import Here  # noqa: PLC0415

    with pytest.raises(RunFailed, match=r"ModuleNotFoundError.*spark\.addArtifact\(path, pyfile="):
        run_batch(topology(connect.range(3), Here()), connect, tmp_path / "cp")
    connect.addArtifact(str(tmp_path / "only_here.py"), pyfile=True)
    assert run_batch(topology(connect.range(3), Here()), connect, tmp_path / "cp").acked == 3
