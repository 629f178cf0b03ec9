"""Spark's own Kafka source as a spout, and the group that is told what is done of it."""

from __future__ import annotations

import re
import sys
from functools import reduce
from types import SimpleNamespace

import broker
import mock_broker
import pytest
from connector import connector_spark
from pyspark import cloudpickle
from pyspark.sql import DataFrame
from servers import wait_until
from streams import available_now, until

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import test_kafka_spout as spouts
from test_kafka_spout import Kept, Take

from ackcore.kafka import KafkaGroup
from ackcore.offsets import decode_metadata
from ackcore.spark import dead_letters, run_batch, start
from ackcore.spark.base.versions import SPARK
from ackcore.spark.kafka import group_commits
from ackcore.spark.kafka.frame_groups import FrameGroups, read_offsets
from ackcore.spark.spark_stream import SparkStream
from ackcore.topology import TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spouts)

LONG = {"backoff_s": 3600.0, "max_backoff_s": 3600.0}


@pytest.fixture(scope="module")
def connected(live_spark):
    with connector_spark(live_spark, broker) as session:
        yield session


@pytest.fixture
def kept():
    return Kept()


def lines(spark, kafka, topic, **options):
    reader = spark.readStream.format("kafka").option("subscribe", topic)
    reader = reader.option("kafka.bootstrap.servers", kafka.bootstrap_servers)
    for name, value in {"startingOffsets": "earliest", **options}.items():
        reader = reader.option(name, value)
    return reader.load()


def writer(sink, name):
    def write(frame, number):
        sink.rows[name, number] = sorted(tuple(row) for row in frame.collect())

    return write


def topology(sink, settings=None, /, **sources):
    """Each spout is a frame and its group."""
    builder = TopologyBuilder()
    for name, (frame, group) in sources.items():
        builder.spout(name, frame, commit_group=group)
        builder.bolt(f"take_{name}", Take()).shuffle(name)
        builder.sink(f"take_{name}", writer(sink, name), name=f"sink_{name}")
    settings = {"backoff_s": 0.05, "max_attempts": 3, "parallelism": 2, **(settings or {})}
    return builder.build(**settings)


# ----------------------------------------------------------------------------- without a connector


def test_a_group_is_of_a_stream_that_reads_kafka(spark, checkpoint, kept):
    group = KafkaGroup("g", "nowhere:1")
    rate = spark.readStream.format("rate").load()
    columns = {"topic": "'t'", "partition": "0", "offset": "value"}
    frame = rate.selectExpr(
        "cast(value as string) value", *(f"{v} as {k}" for k, v in columns.items())
    )
    said = r"must read one stream, .*; it reads 1: StreamingRelation"
    with pytest.raises(ValueError, match=said):
        start(topology(kept, lines=(frame, group)), spark, checkpoint)
    bounded = spark.createDataFrame([], "topic string, partition int, offset bigint, value binary")
    said = "spout 'lines' has a commit_group, which only works with str"
    with pytest.raises(ValueError, match=said):
        run_batch(topology(kept, lines=(bounded, group)), spark, checkpoint)
    assert not checkpoint.exists()


def test_a_commit_that_did_not_arrive_asks_for_a_micro_batch(
    spark, mock_kafka, tmp_path, monkeypatch
):
    monkeypatch.setattr(group_commits, "_AGAIN_S", 0.2)
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a", b"b"])
    frame = spark.readStream.format("rate").load()
    group = KafkaGroup("g", mock_kafka.bootstrap_servers)
    spout = SimpleNamespace(name="lines", kind=None, source=frame, group=group)
    waiting = SimpleNamespace(tables=lambda name: [])
    decisions = [SimpleNamespace(number=n, waiting=waiting) for n in range(2)]
    for n in range(2):
        (tmp_path / str(n)).write_text(f'v1\n{{}}\n{{"t":{{"0":{n + 1}}}}}\n-')
    told = FrameGroups(SimpleNamespace(spouts={"lines": spout}), 5, tmp_path)
    stream = SimpleNamespace(_state=SimpleNamespace(pending_replays=list), _groups=told)
    try:
        assert told.done(decisions[0]) == {"lines": 1}
        mock_kafka.fail_requests(mock_broker.OFFSET_COMMIT, *[29] * 100)
        assert told.done(decisions[1]) == {"lines": 1}
        assert wait_until(lambda: SparkStream._is_called(stream), "that it asks")
        mock_kafka.clear_request_errors(mock_broker.OFFSET_COMMIT)
        assert told.done(decisions[1]) == {"lines": 0}
        assert not SparkStream._is_called(stream)
    finally:
        told.close()


SINCE_42 = pytest.mark.skipif(SPARK < (4, 2), reason="a format of Spark 4.2")


@pytest.mark.parametrize(("version", "noted"), [("1", 4), pytest.param("2", 2, marks=SINCE_42)])
def test_spouts_of_one_dataframe_are_one_source(spark, conf, tmp_path, version, noted):
    """Spark has it in its log for each spout in format 1, and once in format 2."""
    conf("spark.sql.streaming.offsetLog.formatVersion", version)
    one, other = (spark.readStream.format("rate").load() for _ in range(2))
    group = KafkaGroup("g", "nowhere:1")
    frames = {
        "a": (one, None),
        "b": (one.where("value >= 0"), KafkaGroup("h", "nowhere:1")),
        "c": (other, group),
        "d": (one, group),
    }
    united = reduce(DataFrame.union, [frame for frame, _ in frames.values()])
    query = united.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "cp"))
    query = query.start()
    try:
        query.processAllAvailable()
        log = (tmp_path / "cp/offsets/0").read_text()
    finally:
        query.stop()
    assert len(re.findall(r"^(?:\d+:)?\d+$", log, re.MULTILINE)) == noted, log
    it = SimpleNamespace(
        spouts={
            name: SimpleNamespace(name=name, kind=None, source=frame, group=group)
            for name, (frame, group) in frames.items()
        }
    )
    told = FrameGroups(it, 5, tmp_path)
    try:
        assert [(each.name, each.number) for each in told._groups] == [("b", 0), ("c", 1), ("d", 0)]
        assert told._sources == [0, 0, 1, 0, 2]  # and the heartbeat
    finally:
        told.close()
    it.spouts["a"].group = group
    with pytest.raises(ValueError, match=r"spouts 'a' and 'd' read the same .* group 'g'"):
        FrameGroups(it, 5, tmp_path)


@pytest.mark.parametrize(
    ("text", "sources", "found"),
    [
        ('v1\n{}\n{"t":{"0":7,"1":2}}\n-', [0, 1], {0: {("t", 0): 7, ("t", 1): 2}}),
        ('v1\n{}\n{"logOffset":3}\n{"t":{"0":7}}\n{"logOffset":0}', [0, 1, 2], {1: {("t", 0): 7}}),
        ('v1\n{}\n5\n{}\n-', [0, 1, 2], {1: {}}),
        ('v1\n{}\n{"t":{"0":7}}\n{"u":{"0":1}}\n{"t":{"0":7}}\n-', [0, 1, 0, 2],
         {0: {("t", 0): 7}, 1: {("u", 0): 1}}),
        ('v2\n{}\n1:{"t":{"0":7}}\n2:{"logOffset":0}', [0, 1, 2], {1: {("t", 0): 7}}),
    ],
)  # fmt: skip
def test_sparks_log_says_up_to_where_a_micro_batch_goes(text, sources, found):
    assert read_offsets(text, sources) == found


def test_a_log_of_another_number_of_streams_says_nothing():
    with pytest.raises(ValueError, match="the log has 2 streams, and the query's plan has 3"):
        read_offsets('v1\n{}\n{"t":{"0":7}}\n-', [0, 1, 2])


# ----------------------------------------------------------------------------- with a connector


def test_a_group_is_told_what_is_done_of_sparks_own_source(
    connected, kafka_broker, checkpoint, kept, running
):
    """The done prefix, and above it the holes; to the end when what waited is done."""
    topic, group = kafka_broker.new_topic(2), kafka_broker.new_group()
    kafka_broker.produce(topic, [b"a", b"bad", b"b", b"c"], 0)
    kafka_broker.produce(topic, [b"d"], 1)
    told = KafkaGroup(group, kafka_broker.bootstrap_servers)
    it = topology(kept, LONG, lines=(lines(connected, kafka_broker, topic), told))
    on = running(it, connected, checkpoint)
    until(lambda: on.progress is not None and on.progress.records, on)
    offset, metadata = kafka_broker.committed(group, topic, 0)
    state = decode_metadata(topic, 0, offset, metadata).state
    assert (offset, state.hole_starts.tolist(), state.end) == (1, [1], 4)
    assert kafka_broker.committed(group, topic, 1)[0] == 1
    assert on.progress.lag == {"lines": 3}
    on.stop()
    assert kept.texts == ["a", "b", "c", "d"]


def test_two_spouts_have_a_group_each_and_the_dead_are_done(
    connected, kafka_broker, checkpoint, kept
):
    topics = [kafka_broker.new_topic() for _ in range(2)]
    groups = [kafka_broker.new_group() for _ in range(2)]
    for topic in topics:
        kafka_broker.produce(topic, [b"a", b"bad", b"flaky", topic.encode()])
    some = {
        f"lines{i}": (
            lines(connected, kafka_broker, topic, maxOffsetsPerTrigger=3),
            KafkaGroup(group, kafka_broker.bootstrap_servers),
        )
        for i, (topic, group) in enumerate(zip(topics, groups, strict=True))
    }
    on = available_now(topology(kept, **some), connected, checkpoint)
    assert kept.texts == sorted(["a", "flaky"] * 2 + topics)
    assert on.progress.lag == {"lines0": 0, "lines1": 0}
    assert [kafka_broker.committed(*each)[0] for each in zip(groups, topics, strict=True)] == [4, 4]
    found = {row.message_id for row in dead_letters(checkpoint, connected).collect()}
    assert found == {f'["{topic}", 0, 1]' for topic in topics}


@pytest.mark.parametrize("step", ["planned", "decided", "marked"])
def test_what_a_driver_marked_before_it_died_is_committed_by_the_next(
    connected, kafka_broker, checkpoint, kept, running, failing_at, step
):
    topic, group = kafka_broker.new_topic(), kafka_broker.new_group()
    kafka_broker.produce(topic, [b"a", b"bad", b"b"])
    told = KafkaGroup(group, kafka_broker.bootstrap_servers)
    it = topology(kept, lines=(lines(connected, kafka_broker, topic), told))

    with failing_at(step):
        running(it, connected, checkpoint).await_termination(300)
    assert kafka_broker.committed(group, topic)[0] == -1001
    on = running(it, connected, checkpoint)
    if step == "marked":
        assert kafka_broker.committed(group, topic)[0] == 1
    on.process_all_available()
    assert kept.offsets == [(0, 0), (0, 2)]
    assert (on.counts.records, on.counts.dead) == (3, 1)
    assert kafka_broker.committed(group, topic)[0] == 3
