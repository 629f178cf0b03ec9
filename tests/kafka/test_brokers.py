"""The two Kafkas that tests ask for do what tests take from them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("confluent_kafka")

import mock_broker
from confluent_kafka import KafkaException, TopicPartition
from servers import raise_errors, wait_until


@pytest.fixture(params=["mock", pytest.param("real", marks=pytest.mark.broker)])
def kafka(request):
    """Either, by one interface."""
    return request.getfixturevalue({"mock": "mock_kafka", "real": "kafka_broker"}[request.param])


def test_what_is_produced_is_consumed(kafka):
    topic = kafka.new_topic(partitions=2)
    headed = {"value": b"c", "key": b"k", "headers": [("h", b"1")]}
    assert kafka.produce(topic, [b"a", None, headed], partition=1) == [0, 1, 2]
    a, none, c = kafka.consume(topic, partition=1)
    assert (a.value(), none.value(), c.value()) == (b"a", None, b"c")
    assert (c.key(), c.headers(), c.offset()) == (b"k", [("h", b"1")], 2)
    assert kafka.consume(topic, partition=0) == []


def test_topics_and_groups_are_nobody_elses(kafka):
    assert kafka.new_topic() != kafka.new_topic()
    assert kafka.committed(kafka.new_group(), kafka.new_topic()) == (-1001, None)


def test_records_and_topics_can_be_deleted(kafka):
    topic = kafka.new_topic()
    kafka.produce(topic, [b"0", b"1", b"2"])
    kafka.delete_records(topic, before=2)
    assert [message.offset() for message in kafka.consume(topic)] == [2]
    kafka.delete_topic(topic)
    wait_until(lambda: topic not in kafka.admin.list_topics(timeout=10).topics, "it is gone")


def test_a_mock_answers_as_it_is_told(mock_kafka):
    topic = mock_kafka.new_topic()
    mock_kafka.fail_requests(mock_broker.LIST_OFFSETS, 29)  # TOPIC_AUTHORIZATION_FAILED
    mock_kafka.start_request_tracking()
    asked = {TopicPartition(topic, 0): 0}

    def end_offset():
        from confluent_kafka.admin import OffsetSpec  # noqa: PLC0415

        spec = dict.fromkeys(asked, OffsetSpec.latest())
        return raise_errors(mock_kafka.admin.list_offsets(spec))

    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        end_offset()
    (found,) = end_offset().values()
    assert found.offset == 0
    apis = [api for _, api in mock_kafka.requests()]
    assert apis.count(mock_broker.LIST_OFFSETS) == 2
    with pytest.raises(AssertionError, match="librdkafka says"):
        mock_kafka.broker_set_down(99)


def test_a_mock_ends_with_who_started_it(mock_kafka):
    code = "import mock_broker, os; mock_broker.MockKafka(); os._exit(9)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(mock_broker.PATH.parent)},
        stderr=subprocess.PIPE,
        timeout=30,
    )
    # Both have this pipe: it was at its end, so neither is there any more.
    assert ended.returncode == 9, ended.stderr
