"""Rows without a key for a Kafka topic that is compacted: they are refused, and no others."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("confluent_kafka")

from accepted_rows import accepted, columns_file
from kafka_sinks import kafka_sinks, messages, spark_that_sends

from ackcore.spark import SinkUnavailable
from ackcore.spark.sinks import kafka_messages
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink_batch import files_and_places
from ackcore.spark.tasks.row_files import ROOT

ROWS = pa.schema([("key", pa.string()), ("value", pa.string()), (ROOT, pa.int64())])
#: Some in each request, and values that rows with a key have as well.
KEYLESS = {0: [3, 4, 17], 1: [29]}


@pytest.fixture
def sink():
    with kafka_sinks() as made:
        yield made


@pytest.fixture
def files(tmp_path):
    found = []
    for part, keyless in KEYLESS.items():
        # An empty key is one.
        keys = [None if n in keyless else f"k{n}" if n % 4 else "" for n in range(30)]
        values = [f"{part}.{n // 4}" for n in range(30)]
        found.append(columns_file(tmp_path, ROWS, [keys, values, [None] * 30], partition=part))
    return tuple(found)


def refused(answer):
    of, at = files_and_places(answer.numbers)
    assert all(
        "validate record" in why and "cleanup.policy=compact" in why for why in answer.reasons
    )
    return sorted(zip(of.tolist(), at.tolist(), strict=True))


ALL_KEYLESS = sorted((file, place) for file, places in KEYLESS.items() for place in places)
KEPT = Counter(
    (f"k{n}" if n % 4 else "", f"{part}.{n // 4}")
    for part, keyless in KEYLESS.items()
    for n in range(30)
    if n not in keyless
)


def sent(server, topic):
    return Counter((one.key().decode(), one.value().decode()) for one in messages(server, topic))


def compacted(broker):
    return broker.new_topic(**{"cleanup.policy": "compact"})


@pytest.mark.parametrize("by_tasks", [False, True])
def test_rows_without_a_key_are_refused_and_the_others_there(
    request, kafka_broker, sink, files, monkeypatch, by_tasks
):
    """Those that came in one request with them are sent again, and only those."""
    spark = spark_that_sends(request, monkeypatch) if by_tasks else None
    topic = compacted(kafka_broker)
    out = sink(kafka_broker, topic, key="key", value="value", options={"batch.num.messages": 7})
    assert refused(out.write(accepted(files, spark=spark))) == ALL_KEYLESS
    assert sent(kafka_broker, topic) == KEPT


def test_of_a_transaction_rows_without_a_key_are_refused_at_once(kafka_broker, sink, files):
    """Not only those of the request that ended it."""
    topic = compacted(kafka_broker)
    options = {"batch.num.messages": 2, "max.in.flight": 1}
    out = sink(kafka_broker, topic, key="key", value="value", transactional=True, options=options)
    with pytest.raises(SinkRejects) as raised:
        out.write(accepted(files))
    assert refused(raised.value) == ALL_KEYLESS
    assert not messages(kafka_broker, topic)
    rest = tuple(
        file._replace(refused=np.array(places))
        for file, places in zip(files, KEYLESS.values(), strict=True)
    )
    for _ in range(2):
        assert out.write(accepted(rest)) is None
    assert sent(kafka_broker, topic) == KEPT


@pytest.mark.parametrize("transactional", [False, True])
def test_without_a_column_of_keys_it_is_no_rows_fault(kafka_broker, sink, files, transactional):
    out = sink(kafka_broker, compacted(kafka_broker), value="value", transactional=transactional)
    with pytest.raises(SinkUnavailable, match="give each message a key"):
        out.write(accepted(files))


def test_more_rows_without_a_key_than_are_refused_are_an_error(
    kafka_broker, sink, files, monkeypatch
):
    monkeypatch.setattr(kafka_messages, "MAX_REFUSED", 3)
    for transactional in (False, True):
        topic = compacted(kafka_broker)
        out = sink(kafka_broker, topic, key="key", value="value", transactional=transactional)
        says = f"'{topic}' takes no messages without a key, and more than 3 rows have no key"
        with pytest.raises(SinkUnavailable, match=says):
            out.write(accepted(files))


def test_rows_without_a_key_that_came_with_one_that_is_too_large_are_refused(
    kafka_broker, sink, tmp_path
):
    """Brokers say of such a request that it is too large, and nothing of keys."""
    keys, values = ["k", None, "k", "k"], ["a", "b", "c" * 5000, "d"]
    file = columns_file(tmp_path, ROWS, [keys, values, [None] * 4])
    sizes = {"cleanup.policy": "compact", "max.message.bytes": 1000}
    topic = kafka_broker.new_topic(**sizes)
    out = sink(kafka_broker, topic, key="key", value="value")
    found = out.write(accepted((file,)))
    assert sorted(found.numbers.tolist()) == [1, 2]
    assert sent(kafka_broker, topic) == Counter([("k", "a"), ("k", "d")])
    topic = kafka_broker.new_topic(**sizes)
    out = sink(kafka_broker, topic, key="key", value="value", transactional=True)
    known = []
    for place in (1, 2):
        with pytest.raises(SinkRejects) as raised:
            out.write(accepted((file._replace(refused=np.array(known)),)))
        assert raised.value.numbers.tolist() == [place]
        known.append(place)
    assert out.write(accepted((file._replace(refused=np.array(known)),))) is None
    assert sent(kafka_broker, topic) == Counter([("k", "a"), ("k", "d")])
