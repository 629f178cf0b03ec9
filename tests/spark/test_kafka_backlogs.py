"""Event times while partitions of a topic have more records than a micro-batch takes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle
from streams import available_now, until

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from confluent_kafka import Producer

from ackcore.kafka import KafkaSpout
from ackcore.spark.engine.late_records import ReadRecords
from ackcore.spark.engine.setup import Backlog
from ackcore.spark.kafka.spout_offsets import SpoutOffsets
from ackcore.spark.tasks.record_ids import RETRIES, roots_of
from ackcore.tables import count, tumbling
from ackcore.tables.watermarks import NEVER, UNSURE
from ackcore.topology import BasicBolt, TopologyBuilder, Unavailable

cloudpickle.register_pickle_by_value(sys.modules[__name__])

BEGAN_MS, MINUTE_MS = 1_767_225_600_000, 60_000


class Times(BasicBolt):
    outputs = pa.schema([("all", pa.string()), ("at", pa.timestamp("ms", tz="UTC"))])

    def __init__(self, away=None):
        self.away = away

    def execute(self, tuple, collector):
        if self.away is not None and tuple["offset"] > 1 and Path(self.away).exists():
            raise Unavailable("the service is away")
        collector.emit(("all", tuple["timestamp"]))


def test_a_partition_that_is_behind_makes_no_record_late_and_lets_no_copy_pass(
    spark, mock_kafka, tmp_path
):
    mock_kafka.create_topic("t", 2)
    producer = Producer({"bootstrap.servers": mock_kafka.bootstrap_servers})
    # The first micro-batch takes the first nine minutes of partition 0, and all of partition 1.
    minutes = [*range(9), 8, *range(9, 25)]
    for partition, some in ((0, minutes), (1, [300])):
        for minute in some:
            at = BEGAN_MS + minute * MINUTE_MS
            producer.produce("t", b"%d" % minute, partition=partition, timestamp=at)
        producer.flush()
    builder = TopologyBuilder()
    spout = KafkaSpout(
        "t", bootstrap_servers=mock_kafka.bootstrap_servers, start="earliest", max_records=10
    )
    builder.spout("lines", spout, dedup="value", within_s=90, event_time="timestamp")
    builder.bolt("times", Times()).shuffle("lines")
    window = tumbling(60, "at")
    builder.table("minutes", from_="times", key="all", value={"n": count()}, window=window)
    closed = []
    builder.sink("minutes.closed", lambda frame, number: closed.extend(frame.collect()))
    on = available_now(builder.build(), spark, tmp_path / "cp")
    assert on.counts.dead == 0
    assert sum(progress.duplicates for progress in on.recent_progress) == 1
    began = [row.window_start.timestamp() * 1000 for row in closed]
    assert sorted(began) == [BEGAN_MS + minute * MINUTE_MS for minute in range(25)]
    assert {row.n for row in closed} == {1}


def test_a_partition_whose_records_wait_for_room_is_not_idle(spark, mock_kafka, tmp_path, running):
    mock_kafka.create_topic("t", 2)
    producer = Producer({"bootstrap.servers": mock_kafka.bootstrap_servers})
    for partition, minute in (*((0, minute) for minute in range(9)), (1, 300)):
        at = BEGAN_MS + minute * MINUTE_MS
        producer.produce("t", b"", partition=partition, timestamp=at)
        producer.flush()
    away, now = tmp_path / "away", [BEGAN_MS + 10**9]
    away.touch()
    builder = TopologyBuilder()
    servers = mock_kafka.bootstrap_servers
    builder.spout("lines", KafkaSpout("t", bootstrap_servers=servers, start="earliest"))
    builder.bolt("times", Times(str(away))).shuffle("lines")
    window = tumbling(60, "at", idle_s=60)
    builder.table("minutes", from_="times", key="all", value={"n": count()}, window=window)
    topology = builder.build(max_waiting=3, backoff_s=3600, max_backoff_s=3600)
    trigger = {"availableNow": True}
    on = running(topology, spark, tmp_path / "cp", trigger=trigger, clock=lambda: now[0])
    until(lambda: on.counts.waiting == 3, on)
    away.unlink()
    now[0] += 2 * 3_600_000
    assert on.await_termination(300)
    assert (on.counts.acked, on.counts.dead) == (10, 0)


def test_only_partitions_that_the_query_reads_further_are_behind(mock_kafka):
    for topic in ("a", "b"):
        mock_kafka.create_topic(topic, 2)
        mock_kafka.produce(topic, [b"%d" % n for n in range(9)], 0)
        mock_kafka.produce(topic, [b"1"], 1)

    def offsets(*topics):
        servers = mock_kafka.bootstrap_servers
        spout = KafkaSpout(topics, bootstrap_servers=servers, start="earliest", max_records=8)
        return SpoutOffsets("lines", spout, 7)

    one = offsets("a", "b")
    first = one.plan(None, 1, bounded=True)
    assert one.behind(first) == {("a", 0): False, ("b", 0): False}
    # A query with the same checkpoint that reads one of the topics, and ends at its present end.
    other = offsets("a")
    other.end_here()
    mock_kafka.produce("a", [b"2"], 1)
    assert other.behind(first) == {("a", 0): False}
    second = other.plan(first, 1, bounded=False)
    assert other.behind(second) == {}
    # Nobody knows whether a partition without a leader has more.
    mock_kafka.partition_set_leader("a", 1, -1)
    assert other.behind(other.plan(second, 1, bounded=False)) == {("a", 1): True}
    for each in (one, other):
        each.close()


@given(st.data())
def test_the_newest_record_of_each_part_is_never_taken_for_a_newer_one(data):
    """Compare with the true parts: a range has fewer rows than offsets, and a task many ranges."""
    draw = data.draw
    parts = draw(st.integers(1, 3))
    of_range = st.tuples(st.integers(-1, parts - 1), st.integers(1, 4), st.integers(0, 4))
    of_tasks = draw(st.lists(st.lists(of_range, min_size=1, max_size=4), min_size=1, max_size=3))
    full = draw(st.booleans())
    partitions = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3, unique=True).map(sorted))
    read, roots, times, newest = {}, [], [], [NEVER] * parts
    for partition, ranges in zip(partitions, of_tasks, strict=False):
        at = 0
        for part, size, there in ranges:
            for _ in range(size if full else min(size, there)):
                time = draw(st.integers(0, 50))
                roots += roots_of(7, partition, np.array([at])).tolist()
                times.append(time)
                if part >= 0:
                    newest[part] = max(newest[part], time)
                at += 1
        read[partition] = {"other": 5, **({"lines": at} if at else {})}
    for root in roots_of(7, RETRIES, np.arange(3)).tolist():
        roots.append(root)
        times.append(99)
    tasks = [[(part, size) for part, size, _ in ranges] for ranges in of_tasks]
    backlog = Backlog([*map(str, range(parts))], [False] * parts, tasks)
    records = ReadRecords({"lines": 7}, read, {}, None, {"lines": backlog})
    found = records.newest_of_parts("lines", np.array(roots), np.array(times)).tolist()
    for one, true in zip(found, newest, strict=True):
        assert NEVER < one <= true if true > NEVER else one <= UNSURE
    if full:
        assert found == newest
