"""Brokers, topics and offsets that are away while a micro-batch is read: it waits, and says so."""

from __future__ import annotations

import logging
import sys
import threading
from types import SimpleNamespace

import pytest
from checkpoints import recorded
from pyspark import cloudpickle
from streams import until

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import test_kafka_spout as spouts
from test_kafka_spout import Kept, source, topology

from ackcore.kafka import KafkaSpout
from ackcore.kafka.cluster import Cluster, PartitionAnswers, Watermarks
from ackcore.kafka.ranges import OffsetRange
from ackcore.spark import RunFailed, run_batch
from ackcore.spark.engine import batch
from ackcore.spark.engine.insist import Outage, RowsMissing
from ackcore.spark.engine.setup import Obstacle
from ackcore.spark.kafka import kafka_spouts, offset_reading
from ackcore.spark.kafka.kafka_spouts import obstacle, unread_in
from ackcore.spark.kafka.plans import OffsetPlan

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spouts)


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def once_planned(monkeypatch):
    """``once_planned(function)`` calls it when a plan is on record; nobody waits for long."""
    monkeypatch.setattr(offset_reading, "SILENT_S", 0.5)
    monkeypatch.setattr(kafka_spouts, "_ASK_S", 1.0)

    def once_planned(function):
        def failpoint(name, n=None):
            if name == "planned":
                function()

        monkeypatch.setattr(batch, "failpoint", failpoint)

    return once_planned


class Said(logging.Handler):
    """Calls a function when something is logged that begins so."""

    def __init__(self, text, function):
        super().__init__()
        self._text, self._function = text, function

    def emit(self, record):
        if self._text in record.getMessage():
            self._function()


@pytest.fixture
def when_said():
    handlers = []

    def when_said(text, function):
        handlers.append(Said(text, function))
        logging.getLogger("ackcore").addHandler(handlers[-1])

    yield when_said
    for handler in handlers:
        logging.getLogger("ackcore").removeHandler(handler)


def crashes(checkpoint):
    """The number of crashes in each plan on record."""
    found = recorded(checkpoint)
    return [found.read(f"batches/{n}.plan")["crashes"] for n in found.numbers(".plan")]


def down(kafka):
    for broker in (1, 2, 3):
        kafka.broker_set_down(broker)


def up(kafka):
    for broker in (1, 2, 3):
        kafka.broker_set_up(broker)


def test_an_outage_while_tasks_read_is_no_crash(
    spark, mock_kafka, checkpoint, kept, once_planned, when_said, caplog
):
    """Though nothing may be run twice in vain, and one crash would be one too many."""
    mock_kafka.create_topic("t", 2)
    mock_kafka.produce("t", [b"a", b"bad"], 0)
    mock_kafka.produce("t", [b"b"], 1)
    it = topology(source(mock_kafka, "t"), kept, max_runs=1, careful_after=1)
    once_planned(lambda: down(mock_kafka))
    when_said("micro-batch 0 cannot be read", lambda: up(mock_kafka))
    counts = run_batch(it, spark, checkpoint)
    assert kept.texts == ["a", "b"]
    assert (counts.records, counts.dead) == (3, 1)
    assert not any(crashes(checkpoint))
    assert "crashed" not in caplog.text
    assert "spout lines waits for Kafka" in caplog.text


def test_a_stop_ends_the_waiting(
    spark, mock_kafka, checkpoint, kept, running, once_planned, when_said
):
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a"])
    it = topology(source(mock_kafka, "t"), kept)
    waits = threading.Event()
    once_planned(lambda: down(mock_kafka))
    when_said("micro-batch 0 cannot be read", waits.set)
    on = running(it, spark, checkpoint)
    until(waits.is_set, on)
    on.stop()
    assert on.exception is None
    assert not any(crashes(checkpoint))
    up(mock_kafka)
    once_planned(lambda: None)
    on = running(it, spark, checkpoint)
    on.process_all_available()
    assert kept.texts == ["a"]


def test_a_topic_that_is_gone_is_waited_for_and_not_for_ever(
    spark, mock_kafka, checkpoint, kept, once_planned, caplog
):
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a"])
    it = topology(source(mock_kafka, "t", missing_timeout_s=2), kept)
    once_planned(lambda: mock_kafka.delete_topic("t"))
    with pytest.raises(
        RunFailed,
        match="spout lines waits for t-0, which does not exist; this has lasted for more than 2 s",
    ):
        run_batch(it, spark, checkpoint)
    assert "which does not exist; the query ends if this lasts 2 s" in caplog.text
    assert not any(crashes(checkpoint))


def plan(*ranges):
    return OffsetPlan(tasks=(tuple(OffsetRange(*one) for one in ranges),))


def test_what_keeps_offsets_from_being_read(mock_kafka, monkeypatch):
    mock_kafka.create_topic("t", 2)
    mock_kafka.produce("t", [b"a", b"b"], 0)
    spout = KafkaSpout("t", bootstrap_servers=mock_kafka.bootstrap_servers, missing_timeout_s=7)
    assert obstacle("s", spout, plan()) is None
    assert obstacle("s", spout, plan(("t", 0, 0, 1), ("t", 0, 1, 2))) is None
    short = obstacle("s", spout, plan(("t", 0, 0, 2), ("t", 1, 0, 1)))
    said = "spout s waits for offset 0 of t-1, which ends at 0, as after a truncation"
    assert short == Obstacle(said, 7)
    gone = obstacle("s", spout, plan(("t", 2, 0, 2)))
    assert gone == Obstacle("spout s waits for t-2, which does not exist", 7)
    with monkeypatch.context() as patch:
        ends = (PartitionAnswers({("t", 0): Watermarks(0, end)}, {}) for end in (1, 2))
        patch.setattr(Cluster, "watermarks", lambda *_: next(ends))
        said = "spout s waits for offset 1 of t-0, which ends at 1 for readers of committed records"
        assert obstacle("s", spout, plan(("t", 0, 0, 2))) == Obstacle(said)
    down(mock_kafka)
    away = obstacle("s", spout, plan(("t", 0, 0, 2)))
    assert away.text.startswith("spout s waits for Kafka: ")
    assert away.timeout_s is None


@pytest.mark.parametrize(
    ("text", "unread"),
    [
        (
            "ackcore.kafka.kafka_errors.ReadTimedOut: no record of t-0 has come",
            "no record of t-0 has come",
        ),
        ("ackcore.kafka.kafka_errors.OffsetsLost: [0, 2) of t-0 cannot", "[0, 2) of t-0 cannot"),
        (
            "ackcore.kafka.kafka_errors.ReadFailed: a (UNKNOWN_TOPIC_OR_PART)",
            "a (UNKNOWN_TOPIC_OR_PART)",
        ),
        ("ackcore.kafka.kafka_errors.ReadFailed: a (TOPIC_AUTHORIZATION_FAILED)", None),
        ("ackcore.kafka.kafka_errors.NoToken: oauth_cb gave no token", "oauth_cb gave no token"),
        ("builtins.ValueError: no", None),
    ],
)
def test_what_a_task_could_not_read_is_told_from_the_rest(text, unread):
    error = RuntimeError(f"Job aborted\nTraceback:\n  File\n{text}\n\tat java")
    assert unread_in(error) == unread
    hollow = RuntimeError("Exception thrown in awaitResult")
    hollow._cause = error
    assert unread_in(hollow) == unread


def waited(obstacles, caplog):
    """Return the log while these outages last, each for some seconds, and the end."""
    now = SimpleNamespace(s=0.0)
    left = list(obstacles)

    def ask(plan):
        return left[0][0]

    def pause(seconds):
        assert 0 < seconds <= 5
        now.s += seconds
        left[0] = (left[0][0], left[0][1] - seconds)
        if left[0][1] <= 0:
            left.pop(0)
        return not left

    outage = Outage(ask, pause, lambda: now.s)
    with caplog.at_level(logging.WARNING, "ackcore"):
        ended = outage.wait(SimpleNamespace(number=3), "nothing comes")
    return ended, now.s, [record.getMessage() for record in caplog.records]


def test_it_is_said_once_a_minute(caplog):
    ended, seconds, said = waited([(Obstacle("it waits"), 300), (None, 1)], caplog)
    assert (ended, len(said)) == (False, 6)
    assert 300 <= seconds < 310
    assert said[0] == "the rows of micro-batch 3 cannot be read yet, so it waits: it waits"


def test_what_is_missing_is_waited_for_so_long_and_that_is_counted_anew(caplog):
    gone = Obstacle("t-0 is gone", 60)
    assert not waited([(gone, 50), (Obstacle("away"), 600), (gone, 50), (None, 1)], caplog)[0]
    with pytest.raises(RowsMissing, match="t-0 is gone; this has lasted for more than 60 s"):
        waited([(gone, 100)], caplog)


def test_it_ends_with_the_query(caplog):
    assert waited([(Obstacle("it waits"), 3)], caplog)[0]
