"""Drivers that write to a topic in transactions are killed: each row is there, and once."""

from __future__ import annotations

import json
from collections import Counter

import fault_job
import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

pytestmark = pytest.mark.faults

#: Where a driver dies, and which micro-batches are in the topic by then: what was sent and not
#: committed; committed and not marked; and the same of the next, behind one that is to be passed
#: over.
DEATHS = [("in-transaction:0", 0), ("acted:0", 1), ("in-transaction:1", 1), ("in-sink:1", 2)]


def found(kafka, topic):
    """Rows as those see them who read what is committed, each with its micro-batch."""
    messages = [
        message
        for partition in range(2)
        for message in kafka.consume(topic, partition, isolation_level="read_committed")
    ]
    rows = [json.loads(message.value()) for message in messages]
    keys = Counter((row["id"], row["at"], row["word"]) for row in rows)
    batches = {dict(message.headers())["ackcore-batch"].decode() for message in messages}
    return keys, {int(batch.rpartition("/")[2]) for batch in batches}


def test_drivers_are_killed_between_send_commit_and_mark(job, kafka_broker):
    records = fault_job.lines(60)
    topic = kafka_broker.new_topic(2)
    to_kafka = {
        "topic": topic,
        "bootstrap_servers": kafka_broker.bootstrap_servers,
        "key": "word",
        "transactional": True,
    }
    it = job(records, files=3, rules={"enrich": {"until": {3: 2, 41: 1}}}, to_kafka=to_kafka)
    expected = Counter(
        (row["id"], row["at"], row["word"])
        for record in records.values()
        for row in fault_job.rows_of(record)
    )
    for step, batches in DEATHS:
        ended = it.run(failpoints=step)
        assert ended.killed, ended.log[-3000:]
        rows, of = found(kafka_broker, topic)
        assert of == set(range(batches))
        assert rows <= expected
        assert bool(rows) == bool(batches)
    last = it.run()
    assert last.error is None, last.error
    rows, of = found(kafka_broker, topic)
    assert rows == expected
    assert len(of) >= 3
