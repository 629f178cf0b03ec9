"""Rows whose messages are larger than their Kafka topic takes: which are refused, which not."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("confluent_kafka")

import mock_broker
from accepted_rows import accepted, columns_file, refused, row_file
from kafka_sinks import kafka_sinks, messages, spark_that_sends, words

from ackcore.kafka.producing import Deliveries
from ackcore.spark import SinkUnavailable
from ackcore.spark.sinks import kafka_messages
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.tasks.row_files import ROOT

HEADERS = pa.map_(pa.string(), pa.binary())


@pytest.fixture
def sink():
    with kafka_sinks() as made:
        yield made


LARGE = "x" * 5000


def test_a_message_that_is_too_large_for_the_client_is_refused(mock_kafka, sink, tmp_path):
    """By its place in the file: rows that do not count lie before it."""
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word", options={"message.max.bytes": 1500})
    some = [("a", 1, 10), ("b", 2, 11), (LARGE, 3, None), ("d", 4, 10)]
    files = (row_file(tmp_path, some), row_file(tmp_path, [(LARGE, 5, 11), (LARGE, 6, 10)], 1))
    found = refused(out.write(accepted(files)))
    assert list(found) == [(0, 2), (1, 1)]
    assert all("too large" in why and "raise max.message.bytes" in why for why in found.values())
    assert words(mock_kafka, topic) == Counter("ad")
    assert not out._live._open  # whoever comes next begins with a producer that met no error


def test_messages_of_a_request_that_is_too_large_are_sent_one_by_one(mock_kafka, sink, files):
    """A broker measures a request: that it was too large says nothing of the messages in it."""
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word", message_id="n")
    mock_kafka.fail_requests(mock_broker.PRODUCE, 10)
    assert out.write(accepted(files, 7)) is None
    about = {
        (message.key(), *dict(message.headers()).values())
        for message in messages(mock_kafka, topic)
    }
    batch = b"abc/count/7"
    assert about == {
        (b"a", batch, b"0.0", b"1"),
        (b"c", batch, b"0.1", b"3"),
        (b"d", batch, b"1.0", b"4"),
        (b"a", batch, b"1.1", b"5"),
    }
    assert len(messages(mock_kafka, topic)) == 4


def test_too_many_messages_to_send_one_by_one_are_an_error(mock_kafka, sink, files, monkeypatch):
    monkeypatch.setattr(kafka_messages, "MAX_REFUSED", 1)
    topic = mock_kafka.new_topic()
    mock_kafka.fail_requests(mock_broker.PRODUCE, *[10] * 4)
    says = rf"topic '{topic}' did not take \d messages, too many .* too large.* with batch\.size in"
    with pytest.raises(SinkUnavailable, match=says):
        sink(mock_kafka, topic).write(accepted(files))


@pytest.mark.parametrize("by_tasks", [False, True])
def test_messages_that_are_larger_than_their_topic_takes_are_refused(
    request, kafka_broker, sink, tmp_path, monkeypatch, by_tasks
):
    """Each with others in one request, which are there, as is what came behind them."""
    spark = spark_that_sends(request, monkeypatch) if by_tasks else None
    topic = kafka_broker.new_topic(**{"max.message.bytes": 1000})
    some = [(LARGE if n in (7, 150) else f"w{n}", n, None) for n in range(300)]
    files = (row_file(tmp_path, some), row_file(tmp_path, [("a", 1, 10), (LARGE, 2, 10)], 1))
    out = sink(kafka_broker, topic, key="word")
    found = refused(out.write(accepted(files, spark=spark)))
    assert list(found) == [(0, 7), (0, 150), (1, 1)]
    assert all("too large" in why for why in found.values())
    assert words(kafka_broker, topic) == Counter(
        ["a", *(one[0] for one in some if one[0] != LARGE)]
    )


def test_of_a_transaction_rows_that_are_too_large_are_refused_and_the_others_there_once(
    kafka_broker, sink, tmp_path
):
    """Those as large as the first at once, though each ends a transaction of which nobody sees."""
    topic = kafka_broker.new_topic(**{"max.message.bytes": 2000})
    some = [(LARGE + "x" * n if n in (5, 29) else f"w{n}", n, None) for n in range(30)]
    known = [row_file(tmp_path, some), row_file(tmp_path, [("b", 1, 11), (LARGE, 2, 10)], 1)]
    out = sink(kafka_broker, topic, transactional=True, options={"batch.num.messages": 4})
    for file, places in ((0, [5, 29]), (1, [1])):
        with pytest.raises(SinkRejects) as raised:
            out.write(accepted(tuple(known)))
        found = refused(raised.value)
        assert list(found) == [(file, place) for place in places]
        assert all("too large" in why for why in found.values())
        known[file] = known[file]._replace(refused=np.array(places))
    assert words(kafka_broker, topic) == Counter()
    for _ in range(2):
        assert out.write(accepted(tuple(known))) is None
    assert words(kafka_broker, topic) == Counter(f"w{n}" for n in range(30) if n not in (5, 29))


@pytest.mark.parametrize(
    ("by", "value", "sent"),
    [
        ("headers", "{part}.{n:02}", []),
        ("message_id", "{part}.{n:02}", []),
        ("headers", "alike", [1]),  # that one is taken, and none alike that is no larger is sent
    ],
)
def test_of_a_transaction_only_rows_with_headers_as_large_are_sent_one_by_one(
    mock_kafka, sink, tmp_path, monkeypatch, by, value, sent
):
    """One as large is found at once, though the header that tells its row is a digit shorter."""
    alone = []  # and refused by no client: that comes before
    flush = Deliveries.flush
    monkeypatch.setattr(Deliveries, "flush", lambda self: (alone.append(1), flush(self)))
    kind = HEADERS if by == "headers" else pa.string()
    schema = pa.schema([("n", pa.string()), (by, kind), (ROOT, pa.int64())])
    files = []
    for part, large in enumerate((29, 5)):
        texts = [LARGE if n == large else "w" for n in range(30)]
        about = [[("trace", text.encode())] for text in texts] if by == "headers" else texts
        values = [value.format(part=part, n=n) for n in range(30)]
        columns = [values, about, [None] * 30]
        files.append(columns_file(tmp_path, schema, columns, partition=part))
    about = {"value": "n", by: by, "options": {"message.max.bytes": 1500}}
    out = sink(mock_kafka, mock_kafka.new_topic(), transactional=True, **about)
    with pytest.raises(SinkRejects) as raised:
        out.write(accepted(tuple(files)))
    found = refused(raised.value)
    assert (list(found), alone) == ([(0, 29), (1, 5)], sent)
    known = [
        file._replace(refused=np.array([at])) for file, (_, at) in zip(files, found, strict=True)
    ]
    topic = mock_kafka.new_topic()  # this Kafka shows what was sent in a transaction that ended
    sink(mock_kafka, topic, transactional=True, **about).write(accepted(tuple(known)))
    assert len(messages(mock_kafka, topic)) == 58


def test_of_a_transaction_a_row_is_refused_though_a_larger_one_alike_is_compressed(
    kafka_broker, sink, tmp_path
):
    topic = kafka_broker.new_topic(**{"max.message.bytes": 1000})
    schema = pa.schema([("value", pa.string()), ("headers", HEADERS), (ROOT, pa.int64())])
    texts = [b"x" * 3000, random.Random(5).randbytes(1500)]
    about = [[("trace", text)] for text in texts]
    file = columns_file(tmp_path, schema, [["alike"] * 2, about, [None] * 2])
    options = {"compression.type": "gzip"}
    about = {"value": "value", "headers": "headers", "options": options}
    out = sink(kafka_broker, topic, transactional=True, **about)
    with pytest.raises(SinkRejects) as raised:
        out.write(accepted((file,)))
    assert list(refused(raised.value)) == [(0, 1)]
    out.write(accepted((file._replace(refused=np.array([1])),)))
    assert [dict(each.headers())["trace"] for each in messages(kafka_broker, topic)] == texts[:1]


def test_messages_that_are_too_large_only_together_are_none_of_their_rows_fault(
    kafka_broker, sink, tmp_path
):
    topic = kafka_broker.new_topic(**{"max.message.bytes": 1000})
    files = (row_file(tmp_path, [(f"w{n}", n, None) for n in range(30)]),)
    out = sink(kafka_broker, topic, transactional=True)
    says = r"did not take \d+ messages, though none of them is too large alone: .* batch\.size in"
    with pytest.raises(SinkUnavailable, match=says):
        out.write(accepted(files))
    out = sink(kafka_broker, topic, transactional=True, options={"batch.size": 900})
    out.write(accepted(files))
    assert words(kafka_broker, topic) == Counter(f"w{n}" for n in range(30))
