"""A Kafka topic as a sink: rows of ACKED records, at least once or in a transaction for each."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import suppress
from contextvars import Context

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from streams import available_now, in_line

pytest.importorskip("confluent_kafka")

import mock_broker
from accepted_rows import WORDS, accepted, columns_file, latin_file, row_file
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka_sinks import QUICK, kafka_sinks, messages, words
from one_sink import Split, word_count
from servers import raise_errors

from ackcore.kafka import producing
from ackcore.kafka.producing import Deliveries, DeliveryError, Transactions
from ackcore.spark import SinkError, SinkUnavailable, run_batch, to_kafka
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.failpoints import FailpointReached
from ackcore.spark.sinks import kafka
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink import Sink, check_sink
from ackcore.spark.tasks.row_files import ROOT

cloudpickle.register_pickle_by_value(sys.modules[__name__])

HEADERS = pa.map_(pa.string(), pa.binary())
HEADED = pa.schema([("n", pa.int64()), ("headers", HEADERS), (ROOT, pa.int64())])
DAY_MS = 86_400_000


@pytest.fixture
def files(tmp_path):
    return (
        row_file(tmp_path, [("a", 1, 10), ("b", 2, 11), ("c", 3, None)]),
        row_file(tmp_path, [("d", 4, 10), ("e", 5, 12)], 1),
    )


@pytest.fixture
def sink():
    with kafka_sinks() as made:
        yield made


def test_a_claim_creates_no_topic(mock_kafka, sink):
    sink(mock_kafka, "not-yet").claim("count", "abc", "/cp")
    topics = AdminClient({"bootstrap.servers": mock_kafka.bootstrap_servers}).list_topics()
    assert "not-yet" not in topics.topics


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
    says = r"sink 'count', topic 't' at localhost:1: no broker answers .*Check that the brokers run"
    with pytest.raises(SinkUnavailable, match=says):
        sink.claim("count", "abc", "/cp")


# -- at least once --------------------------------------------------------------------------------


def test_rows_of_acked_roots_go_with_headers_that_tell_them_apart(mock_kafka, sink, files):
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, key="word", message_id="n")
    for _ in range(2):
        out.write(accepted(files, 7))
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
    out.write(accepted(files, spark=spark))
    assert words(mock_kafka, topic) == Counter("acde")
    assert not out._live._open  # the driver has sent nothing
    mock_kafka.fail_requests(mock_broker.PRODUCE, 29)
    with pytest.raises(SinkUnavailable, match=rf"topic '{topic}' did not take .*authorization"):
        out.write(accepted(files, spark=spark))


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


class Refuses(Sink):
    """A sink that raises, and tells what it was asked for."""

    def __init__(self, error):
        self.error, self.calls = error, []

    def write(self, batch):
        self.calls.append(("write", batch.batch_id))
        raise self.error

    def release(self, *of):
        self.calls.append(("release", of))
        raise OSError("gone")


#: The steps at a sink; test_batch.py has those of the engine.
STEPS = ["in-transaction", "in-sink", "acted"]


def test_each_row_is_there_once_wherever_the_driver_fails(
    spark, kafka_broker, sink, checkpoint, failing_at
):
    """Act as if killed: the next one connects anew and knows only the records on disk."""
    topic = kafka_broker.new_topic(partitions=2)
    for step in STEPS:
        failing_at(step)
        out = sink(kafka_broker, topic, key="word", transactional=True)
        with pytest.raises((FailpointReached, SinkError), match=f"failpoint {step}"):
            run_batch(word_count(spark, out), spark, checkpoint)
        assert not out._live._open  # what it had is closed
    failing_at()
    out = sink(kafka_broker, topic, key="word", transactional=True)
    run_batch(word_count(spark, out), spark, checkpoint, max_dead_ratio=None)
    found = [message.value() for message in messages(kafka_broker, topic, 2)]
    assert Counter(found) == Counter([b'{"word":"a"}', b'{"word":"a"}', b'{"word":"b"}'])


JOB = """
import sys
sys.path[:0] = [{tests!r}]
import numpy as np
from ackcore.spark.sinks.sink_batch import BatchFile, SinkBatch
from ackcore.spark.sinks.kafka import to_kafka
from ackcore.spark.base.failpoints import failpoint
sink = to_kafka({topic!r}, {servers!r}, key="word", transactional=True, options={{"log_level": 0}})
for number in range(3):
    rows = tuple(BatchFile(*file) for file in {files!r})
    sink.write(SinkBatch(None, "count", "abc", "/cp", number, rows, np.array([11])))
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
    assert words(kafka_broker, topic, is_open=True) == Counter()
    assert run("in-sink:0") == -signal.SIGKILL
    assert words(kafka_broker, topic) == Counter("acde")
    assert run("in-transaction:1") == -signal.SIGKILL  # 0 is passed over
    assert words(kafka_broker, topic, is_open=True) == Counter("acde")
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
            Context().run(second.write, accepted(files, 0, age_ms=1000))

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
            first.write(accepted(files, 0))
    except SinkUnavailable:
        with fenced(fence), pytest.raises(CheckpointInUse):
            first.write(accepted(files, 0))
    except CheckpointInUse:
        pass
    else:
        assert (cut, after) == ("commit", 1)
    assert taken
    with suppress(SinkUnavailable):  # the first one may have shut it out, and stopped at the fence
        second.write(accepted(files, 1))
    second.write(accepted(files, 1))
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
        out.write(accepted(files, number))
    assert words(own_kafka_broker, topic) == Counter(3 * "acde")


def test_an_older_checkpoint_is_told_what_was_sent_from_it(kafka_broker, sink, files):
    topic = kafka_broker.new_topic()
    out = sink(kafka_broker, topic, transactional=True)
    out.write(accepted(files, 4))
    told = rf"'{topic}'.* has micro-batch 4 of .*new checkpoint.* from \d to 4 sent again"
    for number, nonacked in ((3, [11]), (4, [10, 11])):
        with pytest.raises(CheckpointForeign, match=told):
            out.write(accepted(files, number, nonacked=nonacked))
    out.write(accepted(files, 4, age_ms=2 * DAY_MS))  # the same rows are none too many
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
    with pytest.raises(CheckpointForeign, match=rf"planned 48 hours ago.* {told} "):
        out.write(accepted(files, number, age_ms=2 * DAY_MS))
    place = TopicPartition(topic, 0, told)
    asked = ConsumerGroupTopicPartitions("ackcore-abc-count", [place])
    raise_errors(kafka_broker.admin.alter_consumer_group_offsets([asked]))
    out.write(accepted(files, number, age_ms=2 * DAY_MS))
    assert words(kafka_broker, topic) == Counter(left)


def test_a_young_micro_batch_of_which_nothing_is_known_was_not_sent(kafka_broker, sink, files):
    topic = kafka_broker.new_topic()
    sink(kafka_broker, topic, transactional=True).write(accepted(files, 0, age_ms=DAY_MS - 1))
    assert words(kafka_broker, topic) == Counter("acde")


def test_what_is_connected_does_not_travel(mock_kafka, sink, files):
    out = sink(mock_kafka, mock_kafka.new_topic())
    out.write(accepted(files))
    assert out._live._open
    copy = pickle.loads(cloudpickle.dumps(out))
    assert not copy._live._open
    copy.write(accepted(files))
    copy.release("count", "abc")


def test_two_queries_with_one_sink_have_a_producer_each(mock_kafka, sink, files, monkeypatch):
    """One sends its rows and ends, while those of the other are on their way."""
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic)
    original = Deliveries.flush

    def flush(self):
        monkeypatch.setattr(Deliveries, "flush", original)
        other = accepted(files, 3, deployment="def")
        out.claim("count", "def", "/other")
        out.write(other)
        out.release("count", "def")
        self.flush()

    monkeypatch.setattr(Deliveries, "flush", flush)
    out.write(accepted(files, 4))
    assert list(out._live._open) == [("abc", "count")]
    assert words(mock_kafka, topic) == Counter(2 * "acde")


def test_headers_of_rows_that_a_sink_has_written_are_its_own(mock_kafka, sink, tmp_path):
    names = ("ackcore-batch", "ackcore-row", "ackcore-message-id", "mine")
    came = [[(name, b"old") for name in names]]
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, headers="headers")
    out.write(accepted([columns_file(tmp_path, HEADED, [[1], came, [10]])], 7))
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
    lines = spark.readStream.text(str(tmp_path / "lines")).toDF("line")
    available_now(in_line({"lines": lines, "split": Split()}, out), spark, checkpoint)
    assert words(mock_kafka, topic) == Counter({"a": 2, "b": 1})
    assert not out._live._open


# -- text that is not UTF-8 -----------------------------------------------------------------------


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize(
    "arguments", [{}, {"key": "word", "value": "word"}, {"message_id": "word"}]
)
def test_a_row_whose_text_is_not_utf8_is_refused_by_itself(
    mock_kafka, sink, tmp_path, arguments, transactional
):
    topic = mock_kafka.new_topic()
    out = sink(mock_kafka, topic, transactional=transactional, **arguments)
    file = latin_file(tmp_path)
    if transactional:
        with pytest.raises(SinkRejects) as raised:
            out.write(accepted([file]))
        refused = raised.value
        out.write(accepted([file._replace(refused=refused.numbers)]))
    else:
        refused = out.write(accepted([file]))
    assert refused.numbers.tolist() == [2]
    assert refused.reasons == ["the text of column 'word' is not UTF-8"]
    rows = {dict(one.headers())["ackcore-row"]: one.value() for one in messages(mock_kafka, topic)}
    assert rows.keys() == {b"0.0", b"0.1" if transactional else b"0.2"}
