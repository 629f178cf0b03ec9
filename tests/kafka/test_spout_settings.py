"""The settings of a spout that reads Kafka, their refusals, and the spout's columns."""

from __future__ import annotations

import pickle
from datetime import datetime

import pyarrow as pa
import pytest

from ackcore.kafka import KafkaSpout
from ackcore.topology import TopologyBuilder


async def decode_async(value):
    return len(value)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"topics": None}, ValueError, "either topics or a pattern, got neither"),
        ({"pattern": "t.*"}, ValueError, "either topics or a pattern, got both"),
        ({"topics": None, "pattern": "("}, ValueError, r"a regular expression, got '\(': missing"),
        ({"topics": None, "pattern": 5}, TypeError, "pattern must be a str"),
        ({"topics": 5}, TypeError, "topics must be the name of a topic or a list"),
        ({"topics": []}, ValueError, "at least one topic"),
        ({"topics": ["t", "t"]}, ValueError, "must not name a topic twice"),
        ({"start": "now"}, ValueError, "start must be one of 'group', 'earliest', 'latest'"),
        ({"start": datetime(2026, 1, 1)}, ValueError, "a time with its zone"),
        ({"start": {"t": 5}}, TypeError, r"start must map \(topic, partition\) to an offset"),
        ({"start": {("t", 0): -1}}, ValueError, "start of t-0 must be at least 0"),
        ({"group_id": 5}, TypeError, "group_id must be the name of a group"),
        ({"max_records": 0}, ValueError, "max_records must be at least 1"),
        ({"target_batch_s": 0}, ValueError, "target_batch_s must be above 0"),
        ({"target_batch_s": 1e10}, ValueError, "target_batch_s must be above 0 and at most"),
        ({"refresh_s": 1e10}, ValueError, "refresh_s must be above 0 and at most"),
        ({"missing_timeout_s": 1e10}, ValueError, "missing_timeout_s must be above 0 and at most"),
        ({"lost": "ignore"}, ValueError, "lost must be one of 'dead-letter', 'refuse'"),
        ({"deserializer": len}, ValueError, "must be given together"),
        (
            {"deserializer": "json", "value_type": pa.int64()},
            TypeError,
            "must be callable, got 'json'; json.loads is one",
        ),
        (
            {"deserializer": decode_async, "value_type": pa.int64()},
            TypeError,
            "must be a plain function, got an async one",
        ),
        ({"deserializer": len, "value_type": int}, TypeError, "must be a pyarrow.DataType"),
        (
            {"deserializer": len, "value_type": pa.schema([])},
            TypeError,
            r"got Schema; write pa\.struct\(schema\)",
        ),
        ({"options": {"group.id": "g"}}, ValueError, "group.id"),
        ({"optons": {}}, TypeError, r"KafkaSpout\(\) has no argument 'optons'; did you mean 'opti"),
    ],
)
def test_what_a_spout_refuses(settings, error, message):
    with pytest.raises(error, match=message):
        KafkaSpout(**{"topics": "t", "bootstrap_servers": "nowhere:1", **settings})


def test_a_spout_is_settings_that_can_be_sent():
    made = KafkaSpout(
        pattern="t.*", bootstrap_servers="b:1", options={"sasl.password": "s3cret"}, max_records=5
    )
    again = pickle.loads(pickle.dumps(made))
    assert vars(again) == vars(made)
    assert repr(made) == "KafkaSpout(pattern='t.*', bootstrap_servers='b:1')"
    assert repr(KafkaSpout("t", bootstrap_servers="b:1")) == (
        "KafkaSpout(['t'], bootstrap_servers='b:1')"
    )
    # Without a group there is nothing that it could go on from.
    assert made.start == "earliest"


def test_a_builder_knows_what_a_spout_emits():
    builder = TopologyBuilder()
    builder.spout(
        "s",
        KafkaSpout(
            "t",
            bootstrap_servers="nowhere:1",
            group_id="g",
            deserializer=len,
            value_type=pa.int64(),
        ),
    )
    builder.sink("s", print)
    one = builder.build().spouts["s"]
    assert one.fields == ("key", "value", "headers", "topic", "partition", "offset", "timestamp")
    assert (one.message_id, one.unique) == (("topic", "partition", "offset"), True)
    assert builder.build().structure["spouts"]["s"]["source"] == "kafka"
    assert one.source.emits.field("value").type == pa.int64()
    assert one.source.schema.field("value").type == pa.binary()


@pytest.mark.parametrize(
    ("topics", "pattern", "topic", "reads"),
    [
        (None, ".*", "orders", True),
        (None, ".*", "__consumer_offsets", False),
        (None, "orders", "orders-dead", False),
        (["__x"], None, "__x", True),
    ],
)
def test_a_pattern_finds_none_of_kafkas_own_topics(topics, pattern, topic, reads):
    spout = KafkaSpout(topics, pattern=pattern, bootstrap_servers="localhost:1")
    assert spout.reads(topic) is reads
