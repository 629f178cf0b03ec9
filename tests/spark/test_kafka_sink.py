"""A Kafka topic as a sink: rows of ACKED records, at least once or in a transaction for each."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from contextvars import Context

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka")

import mock_broker
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from servers import raise_errors

from ackcore.kafka import producing
from ackcore.kafka.producing import Deliveries, DeliveryError, Transactions
from ackcore.spark import SinkError, SinkUnavailable, run_batch, start, to_kafka
from ackcore.spark.base import failpoints
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.sinks import kafka
from ackcore.spark.sinks.interface import Accepted, AcceptedFile, check_sink
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.tasks.row_files import ROOT, RowFileWriter
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

QUICK = {"reconnect.backoff.ms": 20, "retry.backoff.ms": 10, "log_level": 0}
HEADERS = pa.map_(pa.string(), pa.binary())
HEADED = pa.schema([("n", pa.int64()), ("headers", HEADERS), (ROOT, pa.int64())])
WORDS = pa.schema([("word", pa.string()), ("n", pa.int64())])
DAY_MS = 86_400_000


def row_file(directory, rows, partition=0):
    schema = WORDS.append(pa.field(ROOT, pa.int64()))
    file = RowFileWriter(str(directory), schema, partition, 0)
    for at in range(0, len(rows), 2):  # in batches of two
        columns = [list(column) for column in zip(*rows[at : at + 2], strict=True)]
        file.write(pa.record_batch(columns, schema=schema))
    name, n, _ = file.finish()
    return AcceptedFile(str(directory / name), n)


@pytest.fixture
def files(tmp_path):
    return (
        row_file(tmp_path, [("a", 1, 10), ("b", 2, 11), ("c", 3, None)]),
        row_file(tmp_path, [("d", 4, 10), ("e", 5, 12)], 1),
    )


def accepted(files, batch_id=0, spark=None, nonacked=(11,), **changes):
    about = {"sink": "count", "deployment": "abc", "checkpoint": "/cp", "age_ms": None}
    rows = {"files": files, "nonacked": np.array(nonacked, np.int64)}
    return Accepted(spark=spark, batch_id=batch_id, **{**about, **rows, **changes})


@pytest.fixture
def sink():
    """``sink(kafka, topic, ...)``; closed in the end."""
    made = []

    def sink(server, topic, **arguments):
        options = {**QUICK, **arguments.pop("options", {})}
        made.append(to_kafka(topic, server.bootstrap_servers, options=options, **arguments))
        return made[-1]

    yield sink
    for one in made:
        one.close()


def messages(server, topic, partitions=1):
    found = [server.consume(topic, partition=n) for n in range(partitions)]
    return [message for some in found for message in some]


def words(server, topic):
    return Counter(json.loads(message.value())["word"] for message in messages(server, topic))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"topic": ""}, ValueError, "topic must be the name of a topic"),
        ({"topic": 3}, TypeError, "topic must be a str, got int"),
        ({"key": 3}, TypeError, "key must be the name of a column, got int"),
        ({"transactional": "yes"}, TypeError, "transactional must be True or False, got 'yes'"),
        ({"options": {"acks": "1"}}, ValueError, "options must not have .acks.: a message is"),
    ],
)
def test_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        to_kafka(**{"topic": "t", "bootstrap_servers": "localhost:9092", **arguments})


def test_columns_are_refused_before_anything_runs():
    with pytest.raises(TypeError, match=r"sink 'count': the column 'n', the key, must be of text"):
        check_sink("count", to_kafka("t", "localhost:9092", key="n"), WORDS)
    with pytest.raises(ValueError, match="message_id must be one of the columns word, n, got 'id'"):
        check_sink("count", to_kafka("t", "localhost:9092", message_id="id"), WORDS)
    check_sink("count", to_kafka("t", "localhost:9092", key="word", message_id="n"), WORDS)


@pytest.mark.parametrize("transactional", [False, True])
def test_a_setting_that_is_none_is_refused_at_the_start(transactional):
    options = {"sasl.password": "hunter2", "colour": "red"}
    sink = to_kafka("t", "localhost:9092", transactional=transactional, options=options)
    with pytest.raises(DeliveryError, match='No such configuration property: "colour"'):
        sink.claim("count", "abc", "/cp")
    assert "hunter2" not in repr(sink) + repr(vars(sink))


def test_a_callback_that_cannot_travel_to_tasks_is_refused_at_the_start(mock_kafka):
    lock = threading.Lock()
    options = {"stats_cb": lambda text: lock.locked()}
    with pytest.raises(TypeError, match=r"sink 'count' is sent to the workers.*options.*lock"):
        to_kafka("t", "localhost:9092", options=options).claim("count", "abc", "/cp")
    to_kafka("t", mock_kafka.bootstrap_servers, transactional=True, options=options).claim(
        "count", "abc", "/cp"
    )


@pytest.mark.parametrize("transactional", [False, True])
def test_brokers_that_are_away_are_named_at_the_start(transactional, monkeypatch):
    monkeypatch.setattr(producing, "_REACH_S", 0.2)
    sink = to_kafka("t", "localhost:1", transactional=transactional, options=QUICK)
    says = r"sink 'count', topic 't' at localhost:1: no broker answers .*See that the brokers run"
    with pytest.raises(SinkUnavailable, match=says):
        sink.claim("count", "abc", "/cp")


# -- at least once --------------------------------------------------------------------------------


def test_rows_of_acked_roots_go_with_headers_that_tell_them_apart(mock_kafka, sink, files):
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word", message_id="n")
    for _ in range(2):
        out.write_accepted(accepted(files, 7))
    found = [
        (message.key(), json.loads(message.value())["n"], message.headers())
        for message in messages(mock_kafka, topic)
    ]
    row = [(b"a", 1, b"0.0"), (b"c", 3, b"0.1"), (b"d", 4, b"1.0"), (b"e", 5, b"1.1")]
    about = ("ackcore-batch", b"abc/count/7")
    assert found == 2 * [
        (key, n, [about, ("ackcore-row", place), ("ackcore-message-id", b"%d" % n)])
        for key, n, place in row
    ]


def test_many_rows_are_sent_by_tasks(spark, mock_kafka, sink, files, monkeypatch):
    monkeypatch.setattr(kafka, "_DRIVER_ROWS", 1)
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word")
    out.write_accepted(accepted(files, spark=spark))
    assert words(mock_kafka, topic) == Counter("acde")
    assert not out._live  # the driver has sent nothing
    mock_kafka.fail_requests(mock_broker.PRODUCE, 29)
    with pytest.raises(SinkUnavailable, match=rf"topic '{topic}' did not take .*authorization"):
        out.write_accepted(accepted(files, spark=spark))


LARGE = "x" * 5000


def refused(answer):
    """Rows that a sink refuses, by file and place, and why."""
    of, at = answer.places
    why = [answer.reasons[number] for number in answer.reason_of]
    return dict(zip(zip(of.tolist(), at.tolist(), strict=True), why, strict=True))


def test_a_message_that_is_too_large_for_the_client_is_refused(mock_kafka, sink, tmp_path):
    """By its place in the file: rows that do not count lie before it."""
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word", options={"message.max.bytes": 1500})
    some = [("a", 1, 10), ("b", 2, 11), (LARGE, 3, None), ("d", 4, 10)]
    files = (row_file(tmp_path, some), row_file(tmp_path, [(LARGE, 5, 11), (LARGE, 6, 10)], 1))
    found = refused(out.write_accepted(accepted(files)))
    assert list(found) == [(0, 2), (1, 1)]
    assert all("too large" in why and "raise max.message.bytes" in why for why in found.values())
    assert words(mock_kafka, topic) == Counter("ad")
    assert not out._live  # whoever comes next begins with a producer that met no error


def test_messages_of_a_request_that_is_too_large_are_sent_one_by_one(mock_kafka, sink, files):
    """A broker measures a request: that it was too large says nothing of the messages in it."""
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word", message_id="n")
    mock_kafka.fail_requests(mock_broker.PRODUCE, 10)
    assert out.write_accepted(accepted(files, 7)) is None
    about = {
        (message.key(), *dict(message.headers()).values())
        for message in messages(mock_kafka, topic)
    }
    batch = b"abc/count/7"
    assert about == {
        (b"a", batch, b"0.0", b"1"),
        (b"c", batch, b"0.1", b"3"),
        (b"d", batch, b"1.0", b"4"),
        (b"e", batch, b"1.1", b"5"),
    }
    assert len(messages(mock_kafka, topic)) == 4


def test_too_many_messages_to_send_one_by_one_are_an_error(mock_kafka, sink, files, monkeypatch):
    monkeypatch.setattr(kafka, "MAX_REFUSED", 1)
    topic = mock_kafka.new_topic()
    mock_kafka.fail_requests(mock_broker.PRODUCE, *[10] * 4)
    says = (
        rf"topic '{topic}' did not take \d messages, too many .* too large.* by batch\.size in opt"
    )
    with pytest.raises(SinkUnavailable, match=says):
        sink(mock_kafka, topic).write_accepted(accepted(files))


@pytest.mark.parametrize("by_tasks", [False, True])
def test_messages_that_are_larger_than_their_topic_takes_are_refused(
    request, kafka_broker, sink, tmp_path, monkeypatch, by_tasks
):
    """Each with others in one request, which are there, as is what came behind them."""
    spark = None
    if by_tasks:
        monkeypatch.setattr(kafka, "_DRIVER_ROWS", 1)
        spark = request.getfixturevalue("spark")
    topic = kafka_broker.new_topic(**{"max.message.bytes": 1000})
    some = [(LARGE if n in (7, 150) else f"w{n}", n, None) for n in range(300)]
    files = (row_file(tmp_path, some), row_file(tmp_path, [("a", 1, 10), (LARGE, 2, 10)], 1))
    out = sink(kafka_broker, topic, key="word")
    found = refused(out.write_accepted(accepted(files, spark=spark)))
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
            out.write_accepted(accepted(tuple(known)))
        found = refused(raised.value)
        assert list(found) == [(file, place) for place in places]
        assert all("too large" in why for why in found.values())
        known[file] = known[file]._replace(refused=np.array(places))
    assert words(kafka_broker, topic) == Counter()
    for _ in range(2):
        assert out.write_accepted(accepted(tuple(known))) is None
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
        rows = RowFileWriter(str(tmp_path), schema, part, 0)
        values = [value.format(part=part, n=n) for n in range(30)]
        rows.write(pa.record_batch([values, about, [None] * 30], schema=schema))
        name, n, _ = rows.finish()
        files.append(AcceptedFile(str(tmp_path / name), n))
    about = {"value": "n", by: by, "options": {"message.max.bytes": 1500}}
    out = sink(mock_kafka, mock_kafka.new_topic(), transactional=True, **about)
    with pytest.raises(SinkRejects) as raised:
        out.write_accepted(accepted(tuple(files)))
    found = refused(raised.value)
    assert (list(found), alone) == ([(0, 29), (1, 5)], sent)
    known = [
        file._replace(refused=np.array([at])) for file, (_, at) in zip(files, found, strict=True)
    ]
    topic = mock_kafka.new_topic()  # this Kafka shows what was sent in a transaction that ended
    sink(mock_kafka, topic, transactional=True, **about).write_accepted(accepted(tuple(known)))
    assert len(messages(mock_kafka, topic)) == 58


def test_of_a_transaction_a_row_is_refused_though_a_larger_one_alike_is_compressed(
    kafka_broker, sink, tmp_path
):
    topic = kafka_broker.new_topic(**{"max.message.bytes": 1000})
    schema = pa.schema([("value", pa.string()), ("headers", HEADERS), (ROOT, pa.int64())])
    texts = [b"x" * 3000, random.Random(5).randbytes(1500)]
    rows = RowFileWriter(str(tmp_path), schema, 0, 0)
    about = [[("trace", text)] for text in texts]
    rows.write(pa.record_batch([["alike"] * 2, about, [None] * 2], schema=schema))
    name, n, _ = rows.finish()
    file = AcceptedFile(str(tmp_path / name), n)
    options = {"compression.type": "gzip"}
    about = {"value": "value", "headers": "headers", "options": options}
    out = sink(kafka_broker, topic, transactional=True, **about)
    with pytest.raises(SinkRejects) as raised:
        out.write_accepted(accepted((file,)))
    assert list(refused(raised.value)) == [(0, 1)]
    out.write_accepted(accepted((file._replace(refused=np.array([1])),)))
    assert [dict(each.headers())["trace"] for each in messages(kafka_broker, topic)] == texts[:1]


def test_messages_that_are_too_large_only_together_are_none_of_their_rows_fault(
    kafka_broker, sink, tmp_path
):
    topic = kafka_broker.new_topic(**{"max.message.bytes": 1000})
    files = (row_file(tmp_path, [(f"w{n}", n, None) for n in range(30)]),)
    out = sink(kafka_broker, topic, transactional=True)
    says = r"did not take \d+ messages, of which none is too large by itself: .* batch\.size in opt"
    with pytest.raises(SinkUnavailable, match=says):
        out.write_accepted(accepted(files))
    out = sink(kafka_broker, topic, transactional=True, options={"batch.size": 900})
    out.write_accepted(accepted(files))
    assert words(kafka_broker, topic) == Counter(f"w{n}" for n in range(30))


def test_a_delivery_that_fails_is_repeated_and_then_a_sink_error(
    spark, mock_kafka, sink, checkpoint
):
    topic = mock_kafka.new_topic()
    topology = word_count(spark, sink(mock_kafka, topic))
    mock_kafka.fail_requests(mock_broker.PRODUCE, *[29] * 50)
    told = rf"sink 'split' failed 2 times with micro-batch 0.*'{topic}' did not take.*authorization"
    with pytest.raises(SinkError, match=told):
        run_batch(topology, spark, checkpoint)
    mock_kafka.clear_request_errors(mock_broker.PRODUCE)
    run_batch(topology, spark, checkpoint)
    assert words(mock_kafka, topic) == Counter({"a": 2, "b": 1})


def test_a_secret_is_in_no_checkpoint_log_plan_or_error(
    spark, mock_kafka, sink, checkpoint, monkeypatch, caplog, plans_made
):
    monkeypatch.setattr(kafka, "_DRIVER_ROWS", 0)  # by tasks, of which there is a plan
    out = sink(mock_kafka, mock_kafka.new_topic(), options={"sasl.password": "hunter2"})
    mock_kafka.fail_requests(mock_broker.PRODUCE, *[29] * 50)
    with caplog.at_level(logging.DEBUG), pytest.raises(SinkError) as raised:
        run_batch(word_count(spark, out), spark, checkpoint)
    assert any("MapInArrow" in plan for plan in plans_made)
    said = [str(raised.value), repr(raised.value.__cause__), caplog.text, *plans_made]
    assert not [text for text in said if "hunter2" in text]
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


# -- one transaction for each micro-batch ----------------------------------------------------------


class Split(BasicBolt):
    """Rejects lines with a ``no``, behind words that it has emitted."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        for word in tuple["line"].split():
            assert word != "no"
            collector.emit((word,))


def word_count(spark, sink):
    builder = TopologyBuilder()
    builder.spout("lines", spark.createDataFrame([("a b",), ("a",), ("c no",)], "line string"))
    builder.bolt("split", Split()).shuffle("lines")
    builder.sink("split", sink)
    return builder.build(max_attempts=1, sink_attempts=2, sink_backoff_ms=1)


class Refuses:
    """A sink that raises, and tells what it was asked for."""

    def __init__(self, error):
        self.error, self.calls = error, []

    def write(self, frame, number):
        self.calls.append(("write", number))
        raise self.error

    def release(self, *of):
        self.calls.append(("release", of))
        raise OSError("gone")


STEPS = ["decided", "in-transaction", "in-sink", "in-dead-letters", "acted", "marked"]


def test_each_row_is_there_once_wherever_the_driver_fails(
    spark, kafka_broker, sink, checkpoint, monkeypatch
):
    """As if it was killed: the next one connects anew and knows nothing but what is on record."""
    topic = kafka_broker.new_topic(partitions=2)
    for step in STEPS:
        monkeypatch.setattr(failpoints, "_POINTS", failpoints.parse(f"{step}=raise"))
        out = sink(kafka_broker, topic, key="word", transactional=True)
        with pytest.raises((FailpointReached, SinkError), match=f"failpoint {step}"):
            run_batch(word_count(spark, out), spark, checkpoint)
        assert not out._live  # what it had is closed
    monkeypatch.setattr(failpoints, "_POINTS", {})
    out = sink(kafka_broker, topic, key="word", transactional=True)
    run_batch(word_count(spark, out), spark, checkpoint, max_dead=None)
    found = [message.value() for message in messages(kafka_broker, topic, 2)]
    assert Counter(found) == Counter([b'{"word":"a"}', b'{"word":"a"}', b'{"word":"b"}'])


JOB = """
import sys
sys.path[:0] = [{tests!r}]
import numpy as np
from ackcore.spark.sinks.interface import Accepted, AcceptedFile
from ackcore.spark.sinks.kafka import to_kafka
from ackcore.spark.base.failpoints import failpoint
sink = to_kafka({topic!r}, {servers!r}, key="word", transactional=True, options={{"log_level": 0}})
for number in range(3):
    rows = tuple(AcceptedFile(*file) for file in {files!r})
    sink.write_accepted(Accepted(None, "count", "abc", "/cp", number, rows, np.array([11])))
    failpoint("in-sink", number)
"""


def test_each_row_is_there_once_whenever_the_driver_is_killed(kafka_broker, files, tmp_path):
    topic = kafka_broker.new_topic()
    job = JOB.format(
        tests=str(tmp_path),
        topic=topic,
        servers=kafka_broker.bootstrap_servers,
        files=[file[:2] for file in files],
    )

    def run(failpoints):
        environment = {**os.environ, "ACKCORE_FAILPOINTS": failpoints}
        command = [sys.executable, "-c", job]
        return subprocess.run(command, env=environment, timeout=120).returncode

    assert run("in-transaction:0") == -signal.SIGKILL
    assert words(kafka_broker, topic) == Counter()
    assert run("in-sink:0") == -signal.SIGKILL
    assert words(kafka_broker, topic) == Counter("acde")
    assert run("in-transaction:1") == -signal.SIGKILL  # 0 is passed over
    assert words(kafka_broker, topic) == Counter("acde")
    assert run("") == 0
    assert words(kafka_broker, topic) == Counter(3 * "acde")


CUTS = [(name, when) for name in ("__init__", "begin", "prepare", "commit") for when in (0, 1)]


@pytest.mark.parametrize(("cut", "after"), CUTS)
def test_cut_off_in_a_transaction_it_writes_nothing_twice(
    kafka_broker, sink, files, monkeypatch, cut, after
):
    """The host of the first driver stands still, another takes over, and then the first goes on."""
    topic = kafka_broker.new_topic()
    first, second = (sink(kafka_broker, topic, transactional=True) for _ in range(2))
    taken = []

    def fence():
        if taken:
            raise CheckpointInUse("was taken over")

    def take_over():
        if not taken:
            taken.append(True)
            Context().run(second.write_accepted, accepted(files, 0, age_ms=1000))

    original = getattr(Transactions, cut)

    def cut_off(self, *args):
        if not after:
            take_over()
        found = original(self, *args)
        if after:
            take_over()
        return found

    monkeypatch.setattr(Transactions, cut, cut_off)
    try:
        with fenced(fence):
            first.write_accepted(accepted(files, 0))
    except SinkUnavailable:
        with fenced(fence), pytest.raises(CheckpointInUse):
            first.write_accepted(accepted(files, 0))
    except CheckpointInUse:
        pass
    else:
        assert (cut, after) == ("commit", 1)
    assert taken
    with suppress(SinkUnavailable):  # the first one may have shut it out, and stopped at the fence
        second.write_accepted(accepted(files, 1))
    second.write_accepted(accepted(files, 1))
    assert words(kafka_broker, topic) == Counter(2 * "acde")


@pytest.mark.faults
def test_a_broker_that_is_killed_in_a_transaction_takes_its_rows_once(
    own_kafka_broker, sink, files, monkeypatch
):
    topic = own_kafka_broker.new_topic()
    out = sink(own_kafka_broker, topic, transactional=True)
    original = Transactions.prepare

    def prepare(self, mark):
        original(self, mark)
        if mark.number == 1:
            own_kafka_broker.kill()
            own_kafka_broker.restart()

    monkeypatch.setattr(Transactions, "prepare", prepare)
    for number in range(3):
        out.write_accepted(accepted(files, number))
    assert words(own_kafka_broker, topic) == Counter(3 * "acde")


def test_an_older_checkpoint_is_told_what_was_sent_from_it(kafka_broker, sink, files):
    topic = kafka_broker.new_topic()
    out = sink(kafka_broker, topic, transactional=True)
    out.write_accepted(accepted(files, 4))
    told = rf"'{topic}' has micro-batch 4 of .*new checkpoint.* from \d to 4 sent again"
    for number, nonacked in ((3, [11]), (4, [10, 11])):
        with pytest.raises(CheckpointForeign, match=told):
            out.write_accepted(accepted(files, number, nonacked=nonacked))
    out.write_accepted(accepted(files, 4, age_ms=2 * DAY_MS))  # the same rows are none too many
    assert words(kafka_broker, topic) == Counter("acde")


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize(("there", "left"), [(True, ""), (False, "acde")])
def test_what_brokers_have_forgotten_is_asked_of_somebody(
    kafka_broker, sink, files, there, left, number
):
    """Group offsets are kept for a time only: then nobody knows whether rows were sent."""
    topic = kafka_broker.new_topic()
    out = sink(kafka_broker, topic, transactional=True)
    told = number + there
    with pytest.raises(CheckpointForeign, match=rf"decided 48 hours ago.* {told} "):
        out.write_accepted(accepted(files, number, age_ms=2 * DAY_MS))
    place = TopicPartition(topic, 0, told)
    asked = ConsumerGroupTopicPartitions("ackcore-abc-count", [place])
    raise_errors(kafka_broker.admin.alter_consumer_group_offsets([asked]))
    out.write_accepted(accepted(files, number, age_ms=2 * DAY_MS))
    assert words(kafka_broker, topic) == Counter(left)


def test_a_young_micro_batch_of_which_nothing_is_known_was_not_sent(kafka_broker, sink, files):
    topic = kafka_broker.new_topic()
    sink(kafka_broker, topic, transactional=True).write_accepted(
        accepted(files, 0, age_ms=DAY_MS - 1)
    )
    assert words(kafka_broker, topic) == Counter("acde")


def test_what_is_connected_does_not_travel(mock_kafka, sink, files):
    out = sink(mock_kafka, mock_kafka.new_topic())
    out.write_accepted(accepted(files))
    assert out._live
    copy = pickle.loads(cloudpickle.dumps(out))
    assert not copy._live
    copy.write_accepted(accepted(files))
    copy.close()


def test_two_queries_with_one_sink_have_a_producer_each(mock_kafka, sink, files, monkeypatch):
    """One sends its rows and ends, while those of the other are on their way."""
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic)
    original = Deliveries.flush

    def flush(self):
        monkeypatch.setattr(Deliveries, "flush", original)
        other = accepted(files, 3, deployment="def")
        out.claim("count", "def", "/other")
        out.write_accepted(other)
        out.release("count", "def")
        self.flush()

    monkeypatch.setattr(Deliveries, "flush", flush)
    out.write_accepted(accepted(files, 4))
    assert list(out._live._open) == [("abc", "count")]
    assert words(mock_kafka, topic) == Counter(2 * "acde")


def test_headers_of_rows_that_a_sink_has_written_are_its_own(mock_kafka, sink, tmp_path):
    names = ("ackcore-batch", "ackcore-row", "ackcore-message-id", "mine")
    came = [[(name, b"old") for name in names]]
    rows = RowFileWriter(str(tmp_path), HEADED, 0, 0)
    rows.write(pa.record_batch([[1], came, [10]], schema=HEADED))
    name, n, _ = rows.finish()
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, headers="headers")
    out.write_accepted(accepted((AcceptedFile(str(tmp_path / name), n),), 7))
    (message,) = messages(mock_kafka, topic)
    ours = [("ackcore-batch", b"abc/count/7"), ("ackcore-row", b"0.0")]
    assert message.headers() == [("ackcore-message-id", b"old"), ("mine", b"old"), *ours]


@pytest.mark.parametrize("error", [CheckpointForeign, CheckpointInUse])
def test_what_will_be_no_better_is_not_tried_again_and_the_sink_is_let_go(
    spark, checkpoint, error, caplog
):
    writer = Refuses(error("not yours"))
    with pytest.raises(error, match="not yours"):
        run_batch(word_count(spark, writer), spark, checkpoint)
    assert [what for what, _ in writer.calls] == ["write", "release"]
    assert writer.calls[1][1][0] == "split"
    assert "sink 'split' could not be released: gone" in caplog.text


def test_a_query_that_has_ended_lets_its_sinks_go(spark, mock_kafka, sink, checkpoint, tmp_path):
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "one.txt").write_text("a b\na\n", encoding="utf-8")
    builder = TopologyBuilder()
    builder.spout("lines", spark.readStream.text(str(tmp_path / "lines")).toDF("line"))
    builder.bolt("split", Split()).shuffle("lines")
    builder.sink("split", out)
    query = start(builder.build(), spark, checkpoint, trigger={"availableNow": True})
    query.await_termination()
    assert words(mock_kafka, topic) == Counter({"a": 2, "b": 1})
    assert not out._live
