"""A reader of ranges calls librdkafka itself, with the settings that it can take."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from servers import wait_until

from ackcore import backend
from ackcore.kafka import raw_consumer
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.range_reader import RangeReader
from ackcore.kafka.ranges import OffsetRange

native = pytest.mark.skipif(backend != "native", reason="the backend in Python reads by objects")
PLAIN = {"bootstrap.servers": "127.0.0.1:1", "group.id": "ackcore", "log_level": 0}


def made(heard=lambda error: None, **options):
    return raw_consumer.raw_consumer({**PLAIN, **options}, heard)


@native
def test_plain_settings_need_no_object_for_a_message(mock_kafka):
    topic = mock_kafka.topic_of([b"one"])
    with RangeReader(ClientSettings(mock_kafka.bootstrap_servers, {"log_level": 0})) as reader:
        assert isinstance(reader._consumer, raw_consumer.RawConsumer)
        (batch,) = reader.read(OffsetRange(topic, 0, 0, 1))
    assert batch.column("value").to_pylist() == [b"one"]


def test_callbacks_are_called_though_ranges_are_read(mock_kafka):
    topic, told = mock_kafka.new_topic(), []
    mock_kafka.produce(topic, [b"one"])
    options = {"stats_cb": told.append, "statistics.interval.ms": 1, "log_level": 0}

    def statistics():
        with RangeReader(ClientSettings(mock_kafka.bootstrap_servers, options)) as reader:
            [*reader.read(OffsetRange(topic, 0, 0, 1))]
        return told

    assert wait_until(statistics, "statistics")


@pytest.mark.parametrize(
    "options", [{"sasl.mechanism": "OAUTHBEARER"}, {"sasl.mechanisms": "oauthbearer"}]
)
def test_tokens_are_fetched_by_the_client_that_has_ways_to(options):
    assert made(**options) is None


@native
def test_where_librdkafka_cannot_be_called_objects_are_read(monkeypatch):
    monkeypatch.setattr(raw_consumer.cimpl, "__file__", "/nowhere.so")
    raw_consumer._library.cache_clear()
    try:
        assert made() is None
    finally:
        monkeypatch.undo()
        raw_consumer._library.cache_clear()


@native
def test_settings_are_taken_or_refused_by_name():
    options = {"check.crcs": True, "queued.min.messages": 7, "fetch.wait.max.ms": "3"}
    made(**options).close()
    with pytest.raises(KafkaException, match='Expected bool value for "check') as caught:
        made(**{"check.crcs": 2.5})
    assert caught.value.args[0].code() == KafkaError._INVALID_ARG
    # Refused only when all are known.
    with pytest.raises(KafkaException, match=r"ssl\.ca\.location"):
        made(**{"security.protocol": "ssl", "ssl.ca.location": "/nowhere"})


def test_an_iterator_that_outlasts_its_reader_ends_in_an_error(mock_kafka):
    topic = mock_kafka.topic_of([b"%d" % n for n in range(500)])
    settings = ClientSettings(mock_kafka.bootstrap_servers, {"log_level": 0})
    with RangeReader(settings, batch_bytes=50) as reader:
        some, others = reader.read(OffsetRange(topic, 0, 0, 500)), []
        others.append(next(some))
    with pytest.raises(RuntimeError, match="closed"):
        others.extend(some)
    assert others[0].column("offset")[0].as_py() == 0
    with RangeReader(settings, batch_bytes=50) as reader:
        left = reader.read(OffsetRange(topic, 0, 0, 500))
        next(left)
    left.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(reader.read(OffsetRange(topic, 0, 0, 500)))


@native
def test_what_the_client_says_is_heard_and_it_can_be_left_at_any_time():
    heard = []
    consumer = made(heard.append)
    consumer.assign([TopicPartition("t", 0, 0)])

    def all_down():
        assert len(consumer.consume(10, 0.05)) == 0
        return [error for error in heard if error.code() == KafkaError._ALL_BROKERS_DOWN]

    assert wait_until(all_down, "the error")
    assert {error.code() for error in heard} <= {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
    }
    assert "1/1 brokers are down" in all_down()[0].str()
    consumer.unassign()
    consumer.close()
    consumer.close()
    left = made()
    left.assign([TopicPartition("t", 0, 0)])
    del left
    gc.collect()


FORKS = """
import os, signal
from confluent_kafka import TopicPartition
from ackcore.kafka.raw_consumer import raw_consumer

plain = {"bootstrap.servers": "127.0.0.1:1", "group.id": "ackcore", "log_level": 0}
consumer = raw_consumer(plain, print)
consumer.assign([TopicPartition("t", 0, 0)])
child = os.fork()
if not child:
    signal.alarm(20)
    try:
        consumer.consume(1, 0.01)
    except RuntimeError as error:
        assert "forked" in str(error)
        consumer.unassign()
        consumer.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
consumer.consume(1, 0.01)
consumer.close()
"""


@native
def test_a_process_that_is_forked_lets_nothing_go_of_the_one_before():
    """None of librdkafka's threads are there: to destroy its client aborts, or waits for ever."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS], check=False, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()


@native
def test_plugins_are_loaded_before_settings_that_they_know():
    options = {"plugins.own": "1", "plugin.library.paths": "/nowhere"}
    with pytest.raises(KafkaException, match="/nowhere"):
        made(**options)
