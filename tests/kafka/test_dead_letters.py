"""Dead letters of a consumer in a topic: what becomes of them there, and how they get there."""

from __future__ import annotations

import asyncio
import re
import threading
from contextlib import nullcontext
from functools import partial

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import ConfigResource, OffsetSpec
from consumer_counts import QUICK, Counts, consuming, take
from separately import run_python
from servers import raise_errors, wait_until

from ackcore.calls import Reject
from ackcore.kafka import Consumer, ConsumerError
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.consumer.consumer_letters import CallableLetterStore
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import DyingRecord

#: Of a record that is older than any broker keeps by itself.
LONG_AGO_MS = 1_000_000_000_000


def first_offset(server, topic):
    """Where what a topic holds begins."""
    asked = {TopicPartition(topic, 0): OffsetSpec.earliest()}
    (found,) = raise_errors(server.admin.list_offsets(asked)).values()
    return found.offset


def test_letters_of_old_records_are_kept_as_long_as_their_topic_says(kafka_broker, tmp_path):
    """By their records' times they were deleted at once, behind the commit over these."""
    server, a_day = kafka_broker, {"retention_ms": 24 * 3600 * 1000}
    counts = Counts(server, tmp_path, partitions=1)
    counts.dead_topic = server.new_topic(1, **a_day)
    old = {"value": b"old", "timestamp": LONG_AGO_MS}
    server.produce(counts.topic, [old] * 3)
    with consuming(counts) as consumer:
        for record in take(consumer, 3):
            assert record.timestamp_ms == LONG_AGO_MS
            consumer.fail(record, Reject("no"))
        wait_until(lambda: counts.committed()[0][0] == 3, "all are dead, and committed over")
    # The second of three looks that have deleted a record each is over, and began behind the first.
    looked = server.new_topic(1, **a_day)
    for n in range(1, 4):
        server.produce(looked, [old])
        wait_until(lambda n=n: first_offset(server, looked) == n, "what is old is deleted")
    assert first_offset(server, counts.dead_topic) == 0
    letters = server.consume(counts.dead_topic)
    assert [dict(one.headers())["ackcore-timestamp"] for one in letters] == [b"1000000000000"] * 3


def test_a_letter_is_as_large_as_its_topic_takes_and_what_is_larger_says_what_to_raise(
    kafka_broker, tmp_path, caplog
):
    """librdkafka's producer refuses 1 MB by itself, and its partition stood still for good."""
    counts = Counts(kafka_broker, tmp_path, partitions=1)
    large = {"max_message_bytes": 5_000_000}
    counts.topic = kafka_broker.new_topic(1, **large)
    value = b"x" * 2_000_000
    kafka_broker.produce(counts.topic, [value], message_max_bytes=5_000_000)
    counts.delivered[0, 0] = value
    with consuming(counts) as consumer:
        for record in take(consumer, 1):
            consumer.fail(record, Reject("no"))
        wait_until(lambda: "is not stored" in caplog.text, "the topic does not take it")
        assert "MSG_SIZE_TOO_LARGE); raise max.message.bytes of the topic" in caplog.text
        assert counts.committed()[0][0] < 1
        kafka_broker.configure(ConfigResource.Type.TOPIC, counts.dead_topic, **large)
        wait_until(lambda: not counts.lag(), "it is kept")
    (letter,) = kafka_broker.consume(counts.dead_topic)
    assert letter.value() == value


@pytest.mark.parametrize("found", ["orders", "^orders", "^.*-dead$", "^[a-z]+-d(?:ead|own)"])
@pytest.mark.parametrize("protocol", ["cooperative", "consumer"])
def test_a_topic_for_dead_letters_that_is_read_by_its_name_or_a_pattern_is_refused(found, protocol):
    dead = "orders" if found == "orders" else "orders-dead"
    # A broker has all of a name match.
    refused = found != "^orders" or protocol == "cooperative"
    with (
        pytest.raises(ValueError, match=rf"{re.escape(found)}.*its own dead letters. Name another")
        if (refused)
        else nullcontext()
    ):
        ConsumerSettings(
            ClientSettings("x"), "g", ("other", found), (), protocol=protocol, dead_letters=dead
        )


def test_patterns_that_a_topic_for_dead_letters_does_not_fit_are_taken():
    topics = ("^orders$", "^orders-[0-9]+$", "^orders-(", "^orders-[[:alpha:]]+$", "^orders.dead$")
    ConsumerSettings(ClientSettings("x"), "g", topics, (), dead_letters="orders-dead.1")


def test_a_topic_for_dead_letters_that_is_assigned_ends_the_consumer(mock_kafka):
    """It came later, and fits a pattern that is POSIX's and not Python's."""
    mock_kafka.create_topic("orders-eu")
    mock_kafka.produce("orders-eu", [b"first"])
    consumer = Consumer(
        "^orders-[[:alpha:]]+$",
        bootstrap_servers=mock_kafka.bootstrap_servers,
        group_id="g",
        dead_letters="orders-dead",
        refresh_s=0.2,
        options={**QUICK, "session.timeout.ms": 2000},
    )
    assert [one.value for one in take(consumer, 1)] == [b"first"]
    mock_kafka.create_topic("orders-dead")
    mock_kafka.produce("orders-dead", [b"a letter"])
    for ends in (partial(consumer.poll, 1, 20.0), partial(consumer.close, 0.0)):
        with pytest.raises(
            ConsumerError, match=r"'orders-dead' matches one of '\^orders-\[\[:alpha"
        ):
            ends()


HANGS = """
import threading
from ackcore.kafka.consumer.consumer_letters import CallableLetterStore
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.held_partition import DyingRecord

began = threading.Event()

def hang(record, failure):
    began.set()
    threading.Event().wait()

store = CallableLetterStore(hang)
record = KafkaRecord("t", 0, 0, None, b"x", [], None)
store.store(DyingRecord(record, Failure("Reject", "no"), 1), print)
began.wait()
store.close()
"""


def test_a_function_for_dead_letters_that_hangs_does_not_keep_the_process_alive():
    run_python(HANGS, timeout_s=30)


def test_a_letter_whose_function_has_not_run_is_not_stored():
    reported = []
    store = CallableLetterStore(lambda record, failure: asyncio.sleep(0))
    letter = DyingRecord(KafkaRecord("t", 0, 5, None, b"x", [], None), Failure("Reject", "no"), 1)
    store.store(letter, lambda letter, error: reported.append(error))
    store._calls.put(None)
    store._thread.join(60)
    store.poll()
    assert "TypeError: dead_letters returned a coroutine, which has not run" in reported[0]


def test_calls_that_are_queued_when_a_store_is_closed_are_not_made():
    began, may_end, called, reported = threading.Event(), threading.Event(), [], []

    def keep(record, failure):
        began.set()
        may_end.wait(60)
        called.append(record.offset)

    store = CallableLetterStore(keep)
    for offset in range(2):
        record = KafkaRecord("t", 0, offset, None, b"x", [], None)
        letter = DyingRecord(record, Failure("Reject", "no"), 1)
        store.store(letter, lambda letter, error: reported.append((letter.record.offset, error)))
    assert began.wait(60)
    store.close()
    may_end.set()
    store._thread.join(60)
    assert called == [0]
    store.poll()
    assert reported == [(0, None)]
