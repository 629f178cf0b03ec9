"""`KafkaSpout` on Spark: what is read, read again, restarted and committed, to the offset."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from unittest import mock

import mock_broker
import pyarrow as pa
import pytest
from checkpoints import recorded
from pyspark import cloudpickle
from streams import Folder, available_now, in_line, until

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from confluent_kafka import Producer

from ackcore.kafka import KafkaSpout
from ackcore.offsets import decode_metadata
from ackcore.spark import RunFailed, dead_letters, replay, run_batch
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.engine import action, batch, decide, kept_jobs, reread, runs
from ackcore.spark.kafka import offset_reading
from ackcore.spark.kafka import plans as kafka_plans
from ackcore.spark.kafka.offset_reading import ReadOffsets
from ackcore.spark.kafka.spout_offsets import OffsetsRefused
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Take(BasicBolt):
    """Fails ``flaky`` at the first attempt, ``bad`` at each."""

    outputs = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("text", pa.string())])

    def execute(self, tuple, collector):
        text = tuple["value"]
        if isinstance(text, bytes):
            text = text.decode()
        if text == "bad" or (text == "flaky" and tuple.attempt == 0):
            raise ValueError(f"cannot take {text}")
        collector.emit((tuple["partition"], tuple["offset"], text))


class Kept:
    """A sink that keeps rows by micro-batch."""

    def __init__(self):
        self.rows = {}

    def __call__(self, frame, number):
        self.rows[number] = sorted(tuple(row) for row in frame.collect())

    @property
    def texts(self):
        return sorted(text for rows in self.rows.values() for *_, text in rows)

    @property
    def offsets(self):
        return sorted(row[:2] for rows in self.rows.values() for row in rows)


@pytest.fixture
def kept():
    return Kept()


def source(kafka, topics, **settings):
    return KafkaSpout(
        topics,
        bootstrap_servers=kafka.bootstrap_servers,
        **{"group_id": "g", "start": "earliest", **settings},
    )


def topology(spout, sink, other=None, far=False, **settings):
    builder = TopologyBuilder()
    builder.spout("lines", spout)
    if far:
        builder.bolt("take", Take()).fields("lines", "offset")
    else:
        builder.bolt("take", Take()).shuffle("lines")
    if other is not None:
        builder.spout("files", other)
        builder.bolt("files_too", Lines()).shuffle("files")
        builder.sink("files_too", sink, name="of_files")
    builder.sink("take", sink)
    return builder.build(**{"backoff_s": 0.05, "max_attempts": 3, "parallelism": 2, **settings})


class Lines(BasicBolt):
    outputs = Take.outputs

    def execute(self, tuple, collector):
        collector.emit((-1, -1, tuple["line"]))


def plans(checkpoint):
    """By micro-batch, the tasks of its plan."""
    found = recorded(checkpoint)
    return {
        number: found.read(f"batches/{number}.plan")["offsets"]["lines"]["tasks"]
        for number in found.numbers(".plan")
    }


# -------------------------------------------------------------------------------------- run_batch


def test_a_batch_takes_what_there_is_and_no_more(spark, mock_kafka, checkpoint, kept):
    """Each record ends once, those that cannot be read as dead letters with what they are."""
    mock_kafka.create_topic("t", 2)
    mock_kafka.produce("t", [b"a", b"flaky", b"", b"bad"], 0)
    mock_kafka.produce("t", [b"b", b"\xff"], 1)

    def decode(value):
        return value.decode()

    spout = source(mock_kafka, "t", deserializer=decode, value_type=pa.string())
    counts = run_batch(topology(spout, kept), spark, checkpoint)
    assert kept.texts == ["", "a", "b", "flaky"]
    assert (counts.records, counts.acked, counts.dead) == (6, 4, 2)
    dead = {row.message_id: row for row in dead_letters(checkpoint).collect()}
    found = {message: bytes(row.payload.value) for message, row in dead.items()}
    assert found == {'["t", 0, 3]': b"bad", '["t", 1, 1]': b"\xff"}
    assert dead['["t", 1, 1]'].error_type == "UnicodeDecodeError"
    assert [mock_kafka.committed("g", "t", p)[0] for p in (0, 1)] == [4, 2]
    mock_kafka.produce("t", [b"late"], 0)
    assert run_batch(topology(spout, kept), spark, checkpoint) == counts


def kill_or_hang(value):
    if value == b"kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while value == b"hang":
        time.sleep(0.1)
    return value.decode()


def test_a_deserializer_that_kills_its_worker_or_hangs_costs_that_record(
    spark, mock_kafka, checkpoint, kept, monkeypatch
):
    """It is isolated in the tries of its task, as one that a bolt crashes of."""
    monkeypatch.setattr(kafka_plans, "LEAST", 1)  # so that two tasks share the records
    mock_kafka.create_topic("t", 2)
    mock_kafka.produce("t", [b"a", b"kill", b"b"], 0)
    mock_kafka.produce("t", [b"c", b"hang"], 1)
    spout = source(mock_kafka, "t", deserializer=kill_or_hang, value_type=pa.string())
    it = topology(spout, kept, max_runs=1, bolt_call_timeout_s=1)
    counts = run_batch(it, spark, checkpoint)
    assert kept.texts == ["a", "b", "c"]
    assert (counts.records, counts.dead) == (5, 2)
    letters = dead_letters(checkpoint).collect()
    dead = {bytes(one.payload.value): one.error_message for one in letters}
    assert dead.pop(b"kill") == "killed its worker"
    assert re.fullmatch("timed out in lines: File .*kill_or_hang", dead.pop(b"hang"))


def test_null_values_and_headers_are_as_they_came(spark, mock_kafka, checkpoint):
    mock_kafka.create_topic("t")
    headers = [("h", b"1"), ("h", None)]
    mock_kafka.produce("t", [{"value": None, "key": b"k", "headers": headers}])
    rows = []
    it = in_line({"lines": source(mock_kafka, "t")}, lambda frame, _: rows.extend(frame.collect()))
    run_batch(it, spark, checkpoint)
    ((key, value, found, topic, partition, offset, timestamp),) = rows
    assert (bytes(key), value, topic, partition, offset) == (b"k", None, "t", 0, 0)
    assert [(one.key, one.value and bytes(one.value)) for one in found] == headers
    assert timestamp is not None


#: A batch dies at every second step, and a stream at the others; in `make faults`, both at each.
STEPS = ["planned", "ran", "checked", "decided", "acted", "marked"]


def steps(first):
    marks = [[pytest.mark.faults] * (at % 2 != first) for at in range(len(STEPS))]
    named = zip(STEPS, marks, strict=True)
    return pytest.mark.parametrize("step", [pytest.param(step, marks=some) for step, some in named])


@steps(0)
def test_a_batch_that_died_goes_on_with_the_ranges_on_record(
    spark, mock_kafka, checkpoint, kept, failing_at, step
):
    """Records produced since are not among them."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"bad", b"b"])
    it = topology(source(mock_kafka, "t"), kept, max_runs=1)
    with failing_at(step):
        run_batch(it, spark, checkpoint)
    before = plans(checkpoint)[0]
    mock_kafka.produce("t", [b"late"])
    counts = run_batch(it, spark, checkpoint)
    assert before == [[["t", 0, 0, 3]]]
    assert kept.texts == ["a", "b"]
    assert (counts.records, counts.acked, counts.dead) == (3, 2, 1)
    assert mock_kafka.committed("g", "t")[0] == 3


def test_dead_letters_of_kafka_are_sent_again_and_commit_nothing(
    spark, mock_kafka, checkpoint, kept
):
    """They are done: their offsets are behind the group's, where those must not be again."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"bad", b"a"])
    it = topology(source(mock_kafka, "t"), kept, max_attempts=1)
    run_batch(it, spark, checkpoint)
    replay(checkpoint)
    counts = run_batch(it, spark, checkpoint)
    assert (counts.replayed, counts.dead) == (1, 2)
    assert mock_kafka.committed("g", "t")[0] == 2


@pytest.mark.parametrize("step", [pytest.param("planned", marks=pytest.mark.faults), "ran"])
def test_planned_offsets_that_are_deleted_before_their_decision_are_lost(
    spark, mock_kafka, checkpoint, kept, failing_at, step
):
    """Once, as one dead letter; the rest of the micro-batch is read."""
    mock_kafka.create_topic("t", 2)
    mock_kafka.produce("t", [b"a", b"bad", b"b", b"bad", b"c"], 0)
    mock_kafka.produce("t", [b"d"], 1)
    it = topology(source(mock_kafka, "t"), kept, max_runs=1, max_attempts=1)
    with failing_at(step):
        run_batch(it, spark, checkpoint)
    mock_kafka.delete_records("t", 3, 0)
    mock_kafka.delete_records("t", 1, 1)
    refusing = topology(source(mock_kafka, "t", lost="refuse"), kept)
    with pytest.raises(OffsetsRefused, match=r"t-0 would begin at offset 3, offsets 0 to 2 of t-0"):
        run_batch(refusing, spark, checkpoint)
    counts = run_batch(it, spark, checkpoint)
    assert kept.texts == ["c"]
    assert (counts.records, counts.acked, counts.dead) == (4, 1, 3)
    assert counts.balanced
    dead = {one.message_id: one for one in dead_letters(checkpoint).collect()}
    assert dead.keys() == {'["t", 0, 0]', '["t", 0, 3]', '["t", 1, 0]'}
    lost = dead['["t", 0, 0]']
    assert lost.error_type == "LostUpstream"
    assert lost.error_message.startswith("offsets 0 to 2 of t-0: lost upstream")
    assert dead['["t", 0, 3]'].error_type == "ValueError"
    assert [mock_kafka.committed("g", "t", p)[0] for p in (0, 1)] == [5, 1]
    # What was lost has no record to be sent again: without key and value it would be a tombstone.
    assert replay(checkpoint).records == {"lines": 1}


@pytest.mark.parametrize("far", [False, True])
def test_offsets_that_are_deleted_while_their_micro_batch_runs_are_lost(
    spark, mock_kafka, checkpoint, kept, monkeypatch, far
):
    """Before what failed is read again; the task that reads it writes it, if it fails there."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"bad", b"b"])

    def failpoint(name, n=None):
        if name == "ran":
            mock_kafka.delete_records("t", 2)

    monkeypatch.setattr(runs, "failpoint", failpoint)
    monkeypatch.setattr(reread, "_kept", lambda *_: None)  # as of a task with many rows
    it = topology(source(mock_kafka, "t"), kept, far=far, max_attempts=1)
    counts = run_batch(it, spark, checkpoint)
    (letter,) = dead_letters(checkpoint).collect()
    found = (letter.error_type, letter.message_id)
    if far:
        assert kept.texts == ["b"]
        assert (counts.records, counts.acked, counts.dead) == (2, 1, 1)
        assert found == ("LostUpstream", '["t", 0, 0]')
    else:
        assert kept.texts == ["a", "b"]
        assert (counts.records, counts.acked, counts.dead) == (3, 2, 1)
        assert found == ("ValueError", '["t", 0, 1]')


def test_a_snapshot_outlasts_the_offsets_that_it_has(
    spark, mock_kafka, checkpoint, kept, failing_at
):
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"bad", b"b"])
    it = topology(source(mock_kafka, "t"), kept, careful_after=0, max_runs=1)
    with failing_at("ran"):
        run_batch(it, spark, checkpoint)
    mock_kafka.delete_records("t", 3)
    counts = run_batch(it, spark, checkpoint)
    assert kept.texts == ["a", "b"]
    assert (counts.acked, counts.dead) == (2, 1)


@pytest.mark.parametrize(
    ("step", "inline_bytes", "careful_after"),
    [("planned", 1 << 17, 9), ("ran", 1 << 17, 9), ("ran", 0, 9), ("planned", 1 << 17, 0)],
)
def test_records_of_a_topic_made_anew_are_not_taken_for_those_that_were_planned(
    spark, mock_kafka, checkpoint, kept, running, monkeypatch, step, inline_bytes, careful_after
):
    """Neither when they are read nor when what failed is read again, by its offset alone."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"bad", b"b"])
    done = []

    def failpoint(name, n=None):
        if name == step and not done:
            mock_kafka.delete_topic("t")
            mock_kafka.create_topic("t")
            mock_kafka.produce("t", [b"new", b"newer", b"newest", b"flaky", b"last"])
            done.append(n)

    for module in (batch, runs):
        monkeypatch.setattr(module, "failpoint", failpoint)
    monkeypatch.setattr(decide, "INLINE_BYTES", inline_bytes)
    it = topology(source(mock_kafka, "t", refresh_s=0.1), kept, careful_after=careful_after)
    on = running(it, spark, checkpoint)
    until(lambda: done and on.counts.acked >= 5, on)
    assert kept.texts == ["flaky", "last", "new", "newer", "newest"]
    assert (on.counts.records, on.counts.dead) == (6, 1)
    (letter,) = dead_letters(checkpoint).collect()
    assert (letter.error_type, letter.payload.value) == ("LostUpstream", None)
    assert "offsets 0 to 2 of t-0" in letter.error_message
    assert mock_kafka.committed("g", "t")[0] == 5


def test_a_secret_is_in_no_checkpoint_log_plan_or_error(
    spark, mock_kafka, checkpoint, kept, caplog, plans_made
):
    """Though what the spout reads is refused."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a"])
    mock_kafka.fail_requests(mock_broker.FETCH, *[29] * 100)  # TOPIC_AUTHORIZATION_FAILED
    it = topology(source(mock_kafka, "t", options={"sasl.password": "hunter2"}), kept, max_runs=1)
    with caplog.at_level(logging.DEBUG), pytest.raises(RunFailed, match="authoriz") as raised:
        run_batch(it, spark, checkpoint)
    assert any("MapInArrow" in plan for plan in plans_made)
    said = [str(raised.value), repr(raised.value.__cause__), caplog.text, *plans_made]
    assert not [text for text in said if "hunter2" in text]
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert plans(checkpoint)
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


# ------------------------------------------------------------------------------------------ start


def test_a_stream_takes_what_comes(spark, mock_kafka, checkpoint, kept, running):
    mock_kafka.create_topic("t", 2)
    on = running(topology(source(mock_kafka, "t"), kept), spark, checkpoint)
    sent = []
    for n in range(3):
        values = [f"{n}".encode(), b"flaky"]
        mock_kafka.produce("t", values, n % 2)
        sent += [value.decode() for value in values]
        on.process_all_available()
        assert kept.texts == sorted(sent)
    assert on.progress.lag == {"lines": 0}
    assert [mock_kafka.committed("g", "t", p)[0] for p in (0, 1)] == [4, 2]
    assert on.counts.balanced


def test_micro_batches_share_a_job(spark, mock_kafka, checkpoint, kept, running, monkeypatch):
    """The first DataFrame for a number of tasks has the rows, the files and the time of each."""
    made, jobs = [], []
    stage, kept_job = kept_jobs.KeptStage, kept_jobs.kept_job
    monkeypatch.setattr(kept_jobs, "KeptStage", lambda *of: made.append(stage(*of)) or made[-1])
    monkeypatch.setattr(action, "kept_job", lambda *of: jobs.append(kept_job(*of)) or jobs[-1])
    mock_kafka.create_topic("t")
    on = running(topology(source(mock_kafka, "t"), kept), spark, checkpoint)
    for n in range(3):
        mock_kafka.produce("t", [f"{n}".encode(), b"bad"])
        on.process_all_available()
    assert kept.texts == ["0", "1", "2"]
    assert (on.counts.acked, on.counts.dead) == (3, 3)
    # A micro-batch may begin between a record and the next.
    assert 1 <= len(made) == len({len(one.read._tasks) for one in made}) <= 2
    assert all(jobs)
    for name, value in (("_LONGEST", 100), ("pins_threads", lambda: False)):
        with monkeypatch.context() as patch:
            patch.setattr(kept_jobs, name, value)
            jobs.clear()
            mock_kafka.produce("t", [name.encode()])
            on.process_all_available()
        assert jobs
        assert not any(jobs)
    assert kept.texts == ["0", "1", "2", "_LONGEST", "pins_threads"]


def test_the_error_of_a_kept_job_is_its_own_if_spark_was_stopped():
    frame = mock.Mock()
    frame.sparkSession.sparkContext.setLocalProperty.side_effect = [None, AttributeError("_jsc")]
    with pytest.raises(ValueError, match="its own"), kept_jobs.KeptJob(frame, "").sent():
        raise ValueError("its own")


def test_a_group_is_told_of_holes(spark, mock_kafka, checkpoint, kept, running):
    """Waiting records hold the offset back, and records done above it are in the metadata."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"bad", b"b", b"bad", b"c"])
    it = topology(source(mock_kafka, "t"), kept, backoff_s=3600.0, max_backoff_s=3600.0)
    on = running(it, spark, checkpoint)
    until(lambda: on.progress is not None and on.progress.acked, on)
    offset, metadata = mock_kafka.committed("g", "t")
    assert offset == 1
    state = decode_metadata("t", 0, offset, metadata).state
    assert state.hole_starts.tolist() == [1, 3]
    assert state.hole_ends.tolist() == [2, 4]
    assert state.end == 5
    assert on.progress.lag == {"lines": 4}


@pytest.mark.parametrize(("far", "inline_bytes"), [(False, 0), (True, 0), (True, 1 << 17)])
def test_only_what_failed_is_read_again(
    spark, mock_kafka, checkpoint, kept, monkeypatch, inline_bytes, far
):
    """By the driver and by tasks, from two partitions of which each task has some.

    Where it fails in the stage that reads it, that writes it, and nothing is read again.
    """
    asked, pieces = [], ReadOffsets.pieces

    def noted(self, places, rows):
        asked.append(pieces(self, places, rows))
        return asked[-1]

    monkeypatch.setattr(decide, "INLINE_BYTES", inline_bytes)
    monkeypatch.setattr(offset_reading, "_NEAR", 3)
    monkeypatch.setattr(ReadOffsets, "pieces", noted)
    monkeypatch.setattr(reread, "_kept", lambda *_: None)
    mock_kafka.create_topic("t", 2)
    for partition in (0, 1):
        values = [b"%d" % i for i in range(300)]
        for place, value in ((0, b"bad"), (7, b"flaky"), (9, b"bad"), (299, b"bad")):
            values[place] = value
        mock_kafka.produce("t", values, partition)
    it = topology(source(mock_kafka, "t"), kept, far=far, max_attempts=2)
    counts = run_batch(it, spark, checkpoint)
    assert (counts.records, counts.acked, counts.dead) == (600, 594, 6)
    assert kept.texts.count("flaky") == 2
    letters = [
        (row.message_id, bytes(row.payload.value)) for row in dead_letters(checkpoint).collect()
    ]
    assert sorted(letters) == [
        (f'["t", {partition}, {offset}]', b"bad") for partition in (0, 1) for offset in (0, 299, 9)
    ]
    # At the second attempt they are in a file of ours.
    assert [piece.rows for some in asked[:1] for piece in some] == [1, 3, 1, 1, 3, 1] * far
    assert not any(asked[1:])


@steps(1)
def test_a_stream_that_died_repeats_the_ranges_on_record(
    spark, mock_kafka, checkpoint, kept, running, failing_at, step
):
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"flaky", b"b"])
    it = topology(source(mock_kafka, "t"), kept, max_runs=1)
    with failing_at(step):
        running(it, spark, checkpoint).await_termination(300)
    before = plans(checkpoint)[0]
    assert before == [[["t", 0, 0, 3]]]
    mock_kafka.produce("t", [b"late"])
    on = running(it, spark, checkpoint)
    on.process_all_available()
    assert plans(checkpoint).get(0, before) == before
    assert kept.offsets == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert on.counts.records == 4
    assert mock_kafka.committed("g", "t")[0] == 4


def test_a_stream_that_died_before_its_plan_makes_one(
    spark, mock_kafka, checkpoint, kept, running, monkeypatch
):
    """Nothing is on record of the micro-batch, Spark's own part included: it is planned now."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a"])
    it = topology(source(mock_kafka, "t"), kept)

    def dies(*_):
        raise FailpointReached("before the plan")

    with monkeypatch.context() as patch:
        patch.setattr(batch.Engine, "_plan", dies)
        with pytest.raises(FailpointReached):
            running(it, spark, checkpoint).await_termination(300)
    assert not plans(checkpoint)
    assert not (checkpoint / "spark").exists()
    mock_kafka.produce("t", [b"b"])
    running(it, spark, checkpoint).process_all_available()
    assert kept.offsets == [(0, 0), (0, 1)]


def test_available_now_ends_with_what_there_was(spark, mock_kafka, checkpoint, kept):
    """In several micro-batches, the retries included; and whatever a former version left there."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"flaky", b"b", b"c"])
    it = topology(source(mock_kafka, "t", max_records=3), kept)
    on = available_now(it, spark, checkpoint)
    assert kept.texts == ["a", "b", "c", "flaky"]
    assert [progress.records for progress in on.recent_progress][:2] == [3, 1]
    # Spark's query ran such topologies once, and had a log of its own.
    (checkpoint / "spark/offsets").mkdir(parents=True)
    (checkpoint / "spark/offsets/0").write_text("v1\n{}\n-")
    mock_kafka.produce("t", [b"d"])
    on = available_now(it, spark, checkpoint)
    assert (on.counts.records, kept.texts) == (5, ["a", "b", "c", "d", "flaky"])


def test_aborted_records_and_markers_are_passed_over_where_a_range_ends(
    spark, kafka_broker, checkpoint, kept
):
    """A range may have nothing else, and what failed is told by its place among what is there."""
    topic, group = kafka_broker.new_topic(), kafka_broker.new_group()
    producer = Producer(kafka_broker.conf(transactional_id=group))
    producer.init_transactions(30)
    for n, values in enumerate([["a", "bad", "b"], ["no"] * 5, ["flaky", "c"], ["no", "bad"]]):
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value)
        producer.flush()
        (producer.abort_transaction if n % 2 else producer.commit_transaction)(30)
    kafka_broker.consume(topic)  # waits for the markers
    spout = source(kafka_broker, topic, group_id=group, max_records=3)
    on = available_now(topology(spout, kept), spark, checkpoint)
    assert kept.texts == ["a", "b", "c", "flaky"]
    assert (on.counts.records, on.counts.dead) == (5, 1)
    assert [row.message_id for row in dead_letters(checkpoint).collect()] == [f'["{topic}", 0, 1]']
    assert kafka_broker.committed(group, topic)[0] == 16
    assert on.progress.lag == {"lines": 0}


def test_kafka_beside_files(spark, mock_kafka, checkpoint, kept, running, tmp_path):
    mock_kafka.create_topic("t")
    folder = Folder(spark, tmp_path / "in")
    on = running(topology(source(mock_kafka, "t"), kept, folder.stream), spark, checkpoint)
    mock_kafka.produce("t", [b"a"])
    on.process_all_available()
    folder.add("from a file")
    on.process_all_available()
    mock_kafka.produce("t", [b"flaky"])
    folder.add("another")
    on.process_all_available()
    texts = [text for rows in kept.rows.values() for *_, text in rows]
    assert on.counts.balanced
    assert on.counts.acked == 4, texts


def test_new_partitions_are_read_from_their_beginning(
    spark, kafka_broker, checkpoint, kept, running
):
    """New topics that match the pattern are read too, without a restart."""
    topic = kafka_broker.new_topic()
    other = f"{topic}-more"
    spout = KafkaSpout(
        pattern=f"{topic}.*",
        bootstrap_servers=kafka_broker.bootstrap_servers,
        refresh_s=0.1,
        start="latest",
    )
    kafka_broker.produce(topic, [b"before"])
    on = running(topology(spout, kept), spark, checkpoint)
    until(lambda: on.progress is not None, on)
    kafka_broker.produce(topic, [b"a"])
    on.process_all_available()
    kafka_broker.create_topic(other, 2)
    kafka_broker.produce(other, [b"b"], 1)
    until(lambda: len(kept.texts) == 2, on)
    assert kept.texts == ["a", "b"]


def test_a_dataframe_does_not_become_a_kafka_spout(spark, mock_kafka, checkpoint, kept, tmp_path):
    mock_kafka.create_topic("t")
    run_batch(topology(source(mock_kafka, "t"), kept), spark, checkpoint)
    columns = "key binary, value binary, topic string, partition int, offset bigint"
    frame = spark.createDataFrame([], columns)
    with pytest.raises(CheckpointForeign, match="read Kafka, and reads a DataFrame now"):
        run_batch(topology(frame, kept), spark, checkpoint, accept_changes=True)
