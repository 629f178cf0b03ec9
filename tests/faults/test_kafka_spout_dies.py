"""A broker, workers and executors go under a `KafkaSpout`: each record is written once."""

from __future__ import annotations

import json
import sys
import threading

import fault_job
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from servers import wait_until

from ackcore.kafka import KafkaSpout
from ackcore.spark import start, to_parquet
from ackcore.spark.engine.progress import Counts
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.faults

CLUSTER = "local-cluster[2,1,1024]"


class Take(BasicBolt):
    """Hands values on; one in ten fails at first."""

    outputs = pa.schema([("text", pa.string())])

    def execute(self, tuple, collector):
        text = tuple["value"].decode()
        if text.endswith("7") and tuple.attempt == 0:
            raise TimeoutError("not now")
        collector.emit((text,))


def topology(kafka, topic, sink, **settings):
    builder = TopologyBuilder()
    spout = KafkaSpout(
        topic,
        bootstrap_servers=kafka.bootstrap_servers,
        group_id=f"of-{topic}",
        start="earliest",
        **settings,
    )
    builder.spout("lines", spout)
    builder.bolt("take", Take(), parallelism=2).shuffle("lines")
    builder.sink("take", to_parquet(sink))
    return builder.build(backoff_s=0.05)


def written(spark, sink):
    return sorted(int(row.text) for row in spark.read.parquet(str(sink)).collect())


def test_a_broker_is_killed_and_started_again_under_load(spark, own_kafka_broker, tmp_path, caplog):
    kafka, sink = own_kafka_broker, tmp_path / "sink"
    topic = kafka.new_topic(4)
    done = threading.Event()
    sent = 0

    def produce():
        nonlocal sent
        while not done.is_set():
            # What was not acked is sent again by the client, and is not there twice.
            values = [f"{n}".encode() for n in range(sent, sent + 200)]
            kafka.produce(topic, values, sent // 200 % 4, enable_idempotence=True)
            sent += 200

    producer = threading.Thread(target=produce)
    producer.start()
    it = topology(kafka, topic, sink, max_records=2_000)
    on = start(it, spark, tmp_path / "checkpoint")
    try:
        for kills in range(1, 4):
            before = len(on.recent_progress)
            while len(on.recent_progress) < before + 3:
                assert on.is_active, on.exception
                done.wait(0.1)
            kafka.kill()
            done.wait(kills)  # from a blink to longer than a request waits
            kafka.restart()
    finally:
        done.set()
        producer.join()
    on.process_all_available()
    # A commit that the coordinator did not answer is repeated, though nothing new comes.
    assert wait_until(lambda: on.progress.lag == {"lines": 0}, "the commit", 120)
    on.stop()
    assert on.exception is None
    assert written(spark, sink) == list(range(sent))
    assert (on.counts.records, on.counts.acked, on.counts.dead) == (sent, sent, 0)
    assert "crashed" not in caplog.text
    ends = [kafka.committed(f"of-{topic}", topic, partition)[0] for partition in range(4)]
    assert sum(ends) == sent


@pytest.mark.parametrize("place", ["disk", "bucket"])
def test_executors_workers_and_drivers_are_killed(job, kafka_broker, place):
    """In a cluster of two executors; the next driver goes on with the offsets on record."""
    records = fault_job.lines(90)
    topic, group = kafka_broker.new_topic(3), kafka_broker.new_group()
    for partition in range(3):
        copies = [n for n in records if fault_job.copies_of(n) > 1][partition::3]
        values = [json.dumps(records[n]).encode() for n in (*range(partition, 90, 3), *copies)]
        kafka_broker.produce(topic, values, partition)
    it = job(
        records,
        place=place,
        state=1,
        rules={
            # While its task reads, and behind an exchange.
            "enrich": {"executor_once": [14], "kill_once": [35], "until": {3: 2, 77: 1}},
            "count": {"executor_once": [52]},
        },
        kafka={
            "topics": topic,
            "bootstrap_servers": kafka_broker.bootstrap_servers,
            "group_id": group,
            "start": "earliest",
            "max_records": 45,
        },
    )
    ended = [it.run(master=CLUSTER, failpoints=step) for step in ("ran:0", "decided:1")]
    assert all(one.killed for one in ended), [one.log[-3000:] for one in ended if not one.killed]
    last = it.run(master=CLUSTER)
    assert last.error is None, last.error
    assert len(it.marks("*-executor-once-*")) == 2
    assert len(it.marks("enrich-kill-*")) == 1
    rows = pa.concat_tables(
        pq.read_table(path) for path in it.place.fetched().glob("sink/batch_id=*")
    )
    found = sorted(zip(*(rows[name].to_pylist() for name in ("id", "at", "word")), strict=True))
    said = [row for record in records.values() for row in fault_job.rows_of(record)]
    assert found == [(row["id"], row["at"], row["word"]) for row in said]
    counts = Counts.from_json(last.said["counts"])
    assert (counts.records, counts.acked, counts.dead) == (105, 105, 0)
    assert [kafka_broker.committed(group, topic, p)[0] for p in range(3)] == [35, 35, 35]
    assert it.problems_of_state(it.found()) == []
