"""Dead letters in a Kafka topic: as they came, with what became of them, beside the store."""

from __future__ import annotations

import json
import logging
import sys

import pyarrow as pa
import pytest
from checkpoints import tracked
from pyspark import cloudpickle
from streams import Store, available_now, in_line

pytest.importorskip("confluent_kafka")

import mock_broker

from ackcore._arrow.shown import text_of
from ackcore.kafka import KafkaSpout
from ackcore.kafka.producing import DeliveryError
from ackcore.spark import (
    DeadLetterTopic,
    SinkError,
    dead_letters,
    deployment,
    replay,
    run_batch,
    start,
)
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.spark.base.schemas import REPLAYED, TRACKING
from ackcore.spark.checks import check_dead_topic
from ackcore.spark.dead_letters.topic import TopicWriter
from ackcore.topology import BasicBolt
from ackcore.topology.tuples import Reason

cloudpickle.register_pickle_by_value(sys.modules[__name__])

QUICK = {"reconnect.backoff.ms": 20, "retry.backoff.ms": 10, "log_level": 0}
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
RECORD = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("headers", HEADERS),
    ]
)


def dead(schema, *rows, attempt=3):
    """Return the letters in the form of a decision."""
    return tracked(
        pa.Table.from_pylist(list(rows), schema),
        message_id=[f"id-{n}" for n in range(len(rows))],
        attempt=attempt,
        first_ms=1,
        last_ms=2,
        reason=Reason("split", "ValueError", "bad")._asdict(),
    )


@pytest.fixture
def topic(mock_kafka):
    return mock_kafka.new_topic()


@pytest.fixture
def letters(mock_kafka, topic):
    return DeadLetterTopic(topic, mock_kafka.bootstrap_servers, options=QUICK)


def record(headers=None, **changes):
    about = {"key": b"k", "value": b"v", "topic": "lines", "partition": 1, "offset": 7}
    return {**about, "headers": headers, **changes}


def sent(mock_kafka, topic):
    return mock_kafka.consume(topic)


def test_a_record_of_kafkas_is_as_it_came_and_says_why_it_died(mock_kafka, topic, letters):
    writer = TopicWriter(letters, "abc", {"lines": RECORD})
    came = [{"key": "trace", "value": b"\x00"}, {"key": "ackcore-reason", "value": b"before"}]
    for _ in range(2):
        writer.write(
            4, {"lines": dead(RECORD, record(came), record(value=None, key=None, offset=8))}
        )
    writer.close()
    one, two, *again = sent(mock_kafka, topic)
    assert (one.key(), one.value()) == (b"k", b"v")
    ours = [
        ("ackcore-reason", b"ValueError: bad"),
        ("ackcore-component", b"split"),
        ("ackcore-spout", b"lines"),
        ("ackcore-message-id", b"id-0"),
        ("ackcore-topic", b"lines"),
        ("ackcore-partition", b"1"),
        ("ackcore-offset", b"7"),
        ("ackcore-attempts", b"3"),
        ("ackcore-deaths", b"1"),
        ("ackcore-batch", b"abc/lines/4"),
        ("ackcore-row", b"0"),
    ]
    assert one.headers() == [("trace", b"\x00"), *ours]
    assert (two.key(), two.value(), dict(two.headers())["ackcore-row"]) == (None, None, b"1")
    assert [each.headers() for each in again] == [one.headers(), two.headers()]


def test_what_comes_back_by_itself_is_no_letter_for_ever(mock_kafka, topic, letters, caplog):
    writer = TopicWriter(letters, "abc", {"lines": RECORD})
    for deaths in (b"19", b"20", b"no number"):
        headers = [{"key": "ackcore-deaths", "value": deaths}]
        with caplog.at_level(logging.WARNING):
            writer.write(0, {"lines": dead(RECORD, record(headers, value=deaths))})
    writer.close()
    found = {
        each.value(): dict(each.headers())["ackcore-deaths"] for each in sent(mock_kafka, topic)
    }
    assert found == {b"19": b"20", b"no number": b"1"}
    (told,) = caplog.messages
    assert "record id-0 of spout 'lines' has died 21 times" in told
    assert "is stored, but not sent" in told


def test_a_record_without_headers_of_its_own_is_counted_by_its_replays(mock_kafka, topic, letters):
    writer = TopicWriter(letters, "abc", {"lines": pa.schema([("value", pa.binary())])})
    place = TRACKING.get_field_index(REPLAYED)
    for replays in (0, 19, 20):
        table = dead(pa.schema([("value", pa.binary())]), {"value": b"%d" % replays})
        often = pa.array([replays], pa.int32())
        writer.write(0, {"lines": table.set_column(place, TRACKING.field(place), often)})
    writer.close()
    found = [
        (one.value(), dict(one.headers())["ackcore-deaths"]) for one in sent(mock_kafka, topic)
    ]
    assert sorted(found) == [(b"0", b"1"), (b"19", b"20")]


@pytest.mark.parametrize(
    ("schema", "row", "value"),
    [
        (
            {"id": pa.int64(), "value": pa.string()},
            {"id": 1, "value": "x"},
            b'{"id":1,"value":"x"}',
        ),
        ({"value": pa.int64()}, {"value": 1}, b'{"value":1}'),
        ({"key": pa.string(), "offset": pa.int64()}, {"key": "k"}, b'{"key":"k","offset":null}'),
        ({"value": pa.string()}, {"value": "a line"}, b"a line"),
    ],
)
def test_another_record_is_json(mock_kafka, topic, letters, schema, row, value):
    schema = pa.schema(schema)
    writer = TopicWriter(letters, "abc", {"lines": schema})
    writer.write(0, {"lines": dead(schema, row)})
    writer.close()
    (one,) = sent(mock_kafka, topic)
    assert (one.key(), one.value()) == (None, value)
    assert "ackcore-offset" not in dict(one.headers())


def test_what_cannot_be_sent_is_refused_before_anything_runs(letters, mock_kafka):
    took = pa.schema([("took", pa.duration("us"))])
    said = r"dead letters of spout 'lines': the column 'took' of dura"
    with pytest.raises(TypeError, match=said):
        TopicWriter(letters, "abc", {"lines": took})
    bad = DeadLetterTopic("t", mock_kafka.bootstrap_servers, options={"colour": "red"})
    with pytest.raises(DeliveryError, match="colour"):
        TopicWriter(bad, "abc", {"lines": RECORD})
    with pytest.raises(ValueError, match="options must not have 'acks'"):
        DeadLetterTopic("t", "localhost:9092", options={"acks": 1})
    with pytest.raises(ValueError, match="topic must be the name of a topic, got ''"):
        DeadLetterTopic("", "localhost:9092")
    said = r"path must be the query's checkpoint, got DeadLetterTopic\('topic"
    with pytest.raises(TypeError, match=said):
        replay(letters)


@pytest.mark.parametrize("what", [{"topics": ["a", "orders-dead"]}, {"pattern": "orders.*"}])
def test_a_topic_that_a_spout_reads_takes_no_letters(spark, checkpoint, what):
    spout = KafkaSpout(**what, bootstrap_servers="localhost:1, localhost:2")
    topology = in_line({"lines": spout, "pick": Pick()}, Store())
    letters = DeadLetterTopic("orders-dead", "localhost:2")
    for runs in (run_batch, start):
        with pytest.raises(ValueError, match=r"spout 'lines', KafkaSpout.*, would read the dead"):
            runs(topology, spark, checkpoint, dead_letters=letters)
    # Of other brokers, or not read.
    for other in (("orders-dead", "localhost:3"), ("dead-orders", "localhost:2")):
        check_dead_topic(topology, DeadLetterTopic(*other))


def test_a_driver_that_was_cut_off_sends_nothing(mock_kafka, topic, letters, monkeypatch):
    from ackcore.spark.base.atomic import fenced  # noqa: PLC0415

    def fence():
        raise CheckpointInUse("was taken over")

    writer = TopicWriter(letters, "abc", {"lines": RECORD})
    with fenced(fence), pytest.raises(CheckpointInUse):
        writer.write(0, {"lines": dead(RECORD, record())})
    assert sent(mock_kafka, topic) == []


# -- in a run -------------------------------------------------------------------------------------


class Pick(BasicBolt):
    outputs = pa.schema([("line", pa.string())])

    def execute(self, tuple, collector):
        assert "no" not in tuple["line"]
        collector.emit((tuple["line"],))


def picking(spark):
    lines = spark.createDataFrame([("a",), ("no",), ("no, too",)], "line string")
    once = {"max_attempts": 1, "max_sink_attempts": 2, "backoff_s": 0.001, "max_backoff_s": 0.001}
    return in_line({"lines": lines, "pick": Pick()}, Store(), **once)


def test_the_producer_is_closed_when_a_run_or_a_stream_has_ended(
    spark, letters, checkpoint, monkeypatch, tmp_path
):
    made = []

    class Noted(TopicWriter):
        def write(self, number, dead):
            super().write(number, dead)
            assert self._open is not None
            made.append(self)

    monkeypatch.setattr(deployment, "TopicWriter", Noted)
    run_batch(picking(spark), spark, checkpoint, dead_letters=letters, max_dead_ratio=None)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "one.txt").write_text("a\nno\n")
    lines = spark.readStream.schema("line string").text(str(tmp_path / "lines"))
    topology = in_line({"lines": lines, "pick": Pick()}, Store(), max_attempts=1)
    available_now(topology, spark, tmp_path / "stream", dead_letters=letters)
    assert len(made) == 2
    assert [writer._open for writer in made] == [None, None]


def test_letters_are_in_topic_and_store_and_are_sent_again_from_there(
    spark, mock_kafka, topic, letters, checkpoint, failing_at
):
    # A delivery that fails fails the store, and so does a crash: both are repeated.
    mock_kafka.fail_requests(mock_broker.PRODUCE, 29, 29)
    of = {"dead_letters": letters, "max_dead_ratio": None}
    said = rf"dead-letter store failed 2 times.*'{topic}' did not take"
    with pytest.raises(SinkError, match=said):
        run_batch(picking(spark), spark, checkpoint, **of)
    with failing_at("acted"):
        run_batch(picking(spark), spark, checkpoint, **of)
    assert run_batch(picking(spark), spark, checkpoint, **of).dead == 2

    def found():
        messages = sent(mock_kafka, topic)
        which = ("ackcore-batch", "ackcore-row")
        return sorted(
            (json.loads(each.value())["line"], *map(dict(each.headers()).get, which))
            for each in messages
        )

    first = found()
    assert len(first) == 4  # twice each, by the crash behind the delivery
    assert len(set(first)) == 2
    assert dead_letters(checkpoint, spark).count() == 2
    assert replay(checkpoint, spark, where="payload.line = 'no'").records == {"lines": 1}
    run_batch(picking(spark), spark, checkpoint, dead_letters=letters, max_dead_ratio=None)
    (again,) = set(found()) - set(first)
    assert again[0] == "no"
    # Left out, they go to the store alone.
    replay(checkpoint, spark, where="payload.line = 'no'", again=True, request="last")
    run_batch(picking(spark), spark, checkpoint, max_dead_ratio=None)
    assert len(found()) == 5
    assert dead_letters(checkpoint, spark).count() > 3


def test_what_python_cannot_show_goes_as_it_came_or_escaped_in_json(mock_kafka, topic, letters):
    """One such letter stopped the query."""
    text = text_of([b"plain", b"caf\xe9"])
    far = pa.array([0, 10**18]).cast(pa.timestamp("us", "UTC"))
    schemas = {
        "raw": pa.schema([("key", pa.string()), ("value", pa.string())]),
        "json": pa.schema([("line", pa.string()), ("at", pa.timestamp("us", "UTC"))]),
    }
    writer = TopicWriter(letters, "abc", schemas)
    for number, columns in enumerate(([text, text], [text, far])):
        spout, schema = list(schemas.items())[number]
        about = dead(schema, {}, {}).select(TRACKING.names)
        table = pa.table([*about.columns, *columns], schema=pa.schema([*about.schema, *schema]))
        writer.write(number, {spout: table})
    writer.close()
    assert [(one.key(), one.value()) for one in sent(mock_kafka, topic)] == [
        (b"plain", b"plain"),
        (b"caf\xe9", b"caf\xe9"),
        (None, b'{"line":"plain","at":"1970-01-01T00:00:00+00:00"}'),
        (None, b'{"line":"caf\\\\xe9","at":"33658-09-27T01:46:40.000000+00:00"}'),
    ]
