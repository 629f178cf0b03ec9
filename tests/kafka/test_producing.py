"""Producing: every delivery is checked, and transactions know which one was the last."""

from __future__ import annotations

import signal
import threading

import mock_broker
import pytest
from confluent_kafka import KafkaError, KafkaException

from ackcore.kafka import producing
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.producing import Deliveries, DeliveryError, Mark, Transactions

TOPIC_AUTHORIZATION_FAILED, NOT_ENOUGH_REPLICAS, CLOSES = 29, 19, -195
NOT_COORDINATOR, CONCURRENT_TRANSACTIONS = 16, 51


def settings(kafka, **options):
    named = {name.replace("_", "."): value for name, value in options.items()}
    quick = {"reconnect.backoff.ms": 20, "retry.backoff.ms": 10, "log_level": 0}
    return ClientSettings(kafka.bootstrap_servers, {**quick, **named})


def values(kafka, topic, **options):
    return [message.value() for message in kafka.consume(topic, **options)]


@pytest.fixture
def closing():
    """Producers that are closed in the end."""
    made = []
    yield lambda one: (made.append(one), one)[1]
    for one in made:
        one.close()


@pytest.fixture
def topic(mock_kafka):
    return mock_kafka.new_topic()


@pytest.fixture
def deliveries(mock_kafka, closing):
    return closing(Deliveries(settings(mock_kafka)))


def test_what_was_sent_is_there_when_flush_returns(mock_kafka, topic, deliveries):
    deliveries.send(topic, "text", "key", [("a", b"1"), ("a", None)])
    deliveries.send(topic, None)
    deliveries.send(topic, b"bytes", b"")
    deliveries.flush()
    one, two, three = mock_kafka.consume(topic)
    assert (one.value(), one.key(), one.headers()) == (b"text", b"key", [("a", b"1"), ("a", None)])
    assert (two.value(), two.key(), two.headers()) == (None, None, None)
    assert (three.value(), three.key()) == (b"bytes", b"")


def test_a_message_is_as_large_as_its_topic_takes(kafka_broker, closing):
    topic = kafka_broker.new_topic(**{"max.message.bytes": 3_000_000})
    deliveries = closing(Deliveries(settings(kafka_broker)))
    deliveries.send(topic, b"x" * 2_000_000)
    deliveries.flush()
    (found,) = kafka_broker.consume(topic)
    assert len(found.value()) == 2_000_000
    deliveries.send(topic, b"x" * 4_000_000)
    with pytest.raises(DeliveryError, match=r"raise max\.message\.bytes of the topic"):
        deliveries.flush()


def test_a_message_without_the_key_that_a_topic_asks_for_is_told_so(kafka_broker, closing):
    deliveries = closing(Deliveries(settings(kafka_broker)))
    topic = kafka_broker.new_topic(cleanup_policy="compact")
    deliveries.send(topic, b"v")
    with pytest.raises(DeliveryError, match=r"\(INVALID_RECORD\); give each message a key, which"):
        deliveries.flush()


def test_what_passes_by_itself_is_no_failure_and_sends_nothing_twice(mock_kafka, topic, deliveries):
    mock_kafka.fail_requests(mock_broker.PRODUCE, NOT_ENOUGH_REPLICAS, CLOSES, NOT_ENOUGH_REPLICAS)
    for n in range(3000):
        deliveries.send(topic, b"%d" % n)
    deliveries.flush()
    assert values(mock_kafka, topic) == [b"%d" % n for n in range(3000)]


def test_a_message_that_is_not_delivered_is_an_error(mock_kafka, topic, deliveries):
    mock_kafka.fail_requests(mock_broker.PRODUCE, TOPIC_AUTHORIZATION_FAILED)
    deliveries.send(topic, b"x")
    refused = (
        rf"topic '{topic}' did not take 1 message, of 1 to all topics: .*authorization failed"
        ".*let this user"
    )
    for _ in range(2):  # it does not get better
        with pytest.raises(DeliveryError, match=refused):
            deliveries.flush()


def test_a_failure_is_met_while_others_are_sent(mock_kafka, topic, deliveries):
    mock_kafka.fail_requests(mock_broker.PRODUCE, TOPIC_AUTHORIZATION_FAILED)

    def send():
        for _ in range(1_000_000):
            deliveries.send(topic, b"x")

    with pytest.raises(DeliveryError, match="did not take"):
        send()


def test_no_broker_is_an_error_that_says_so(mock_kafka, closing, topic):
    mock_kafka.broker_set_down(-1)
    deliveries = closing(Deliveries(settings(mock_kafka, message_timeout_ms=1000)))
    deliveries.send(topic, b"x")
    refused = r"timed out.*after .*(refused|[Dd]isconnected|failed).*can be reached"
    with pytest.raises(DeliveryError, match=refused):
        deliveries.flush()


def test_a_message_that_is_too_large_is_an_error_that_names_the_setting(mock_kafka, closing):
    deliveries = closing(Deliveries(settings(mock_kafka, message_max_bytes=1_000_000)))
    with pytest.raises(DeliveryError, match=r"too large .*message\.max\.bytes if options set"):
        deliveries.send(mock_kafka.new_topic(), b"x" * 2_000_000)


def test_what_librdkafka_says_is_told_without_secrets(mock_kafka, closing):
    deliveries = closing(Deliveries(settings(mock_kafka, sasl_password="hunter2")))
    deliveries._on_error(KafkaError(KafkaError._TRANSPORT, "hunter2 is refused"))
    deliveries._on_error(KafkaError(KafkaError._ALL_BROKERS_DOWN, "3/3 brokers are down"))
    told = deliveries._error_text(KafkaError(KafkaError._TIMED_OUT, "no answer for hunter2"))
    assert told.startswith("no answer for [redacted]")
    assert "[redacted] is refused; check that the brokers" in told


def test_a_setting_that_librdkafka_does_not_have_is_refused(mock_kafka):
    with pytest.raises(
        DeliveryError, match=r"settings: No such configuration property: \"colour\""
    ):
        Deliveries(settings(mock_kafka, colour="red"))


def test_a_full_queue_is_waited_for(mock_kafka, closing, topic):
    deliveries = closing(Deliveries(settings(mock_kafka, queue_buffering_max_messages=10)))
    for n in range(500):
        deliveries.send(topic, b"%d" % n)
    deliveries.flush()
    assert len(values(mock_kafka, topic)) == 500


def test_the_coordinator_may_be_slow_or_elsewhere(mock_kafka, closing, topic):
    mock_kafka.fail_requests(mock_broker.INIT_PRODUCER_ID, NOT_COORDINATOR, CONCURRENT_TRANSACTIONS)
    mock_kafka.fail_requests(mock_broker.OFFSET_FETCH, *[NOT_COORDINATOR] * 5)
    transactions = closing(Transactions(settings(mock_kafka), "id", topic))
    mock_kafka.fail_requests(mock_broker.ADD_PARTITIONS_TO_TXN, CONCURRENT_TRANSACTIONS)
    mock_kafka.fail_requests(mock_broker.TXN_OFFSET_COMMIT, NOT_COORDINATOR)
    mock_kafka.fail_requests(mock_broker.END_TXN, NOT_COORDINATOR)
    commit(transactions, topic, 3, "row")
    assert transactions.last == Mark(3, "note 3")
    assert values(mock_kafka, topic) == [b"row"]


def test_an_open_transaction_is_closed_though_no_broker_is_there(mock_kafka, topic):
    transactions = Transactions(settings(mock_kafka), "id", topic)
    deliveries = transactions.begin()
    deliveries.send(topic, b"x")
    deliveries.flush()
    mock_kafka.broker_set_down(-1)
    closing = threading.Thread(target=transactions.close, daemon=True)
    closing.start()
    closing.join(15)
    assert not closing.is_alive()
    transactions.close()
    with pytest.raises(DeliveryError, match="the producer is closed"):
        transactions.begin()


def test_what_may_be_tried_again_is_tried_at_intervals_and_not_for_ever(monkeypatch, deliveries):
    monkeypatch.setattr(producing, "_TIMEOUT_MS", 250)
    calls = []

    def fails(timeout_s):
        calls.append(timeout_s)
        raise KafkaException(KafkaError(NOT_COORDINATOR, "moved", retriable=True))

    with pytest.raises(DeliveryError, match="the end: moved"):
        deliveries.call("the end", fails)
    assert 2 <= len(calls) <= 5


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_call_that_does_not_return_is_left_to_itself(monkeypatch, interrupted, deliveries):
    monkeypatch.setattr(producing, "_APART_S", 60.0 if interrupted else 0.1)
    monkeypatch.setattr(producing, "_OVERDUE_S", 0.1)
    producer, returns = deliveries.producer, threading.Event()

    def interrupt(number, frame):
        raise Interrupted("sent")

    def hangs(timeout_s):
        if interrupted:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        returns.wait(30)

    before = signal.signal(signal.SIGUSR1, interrupt)
    told = "sent" if interrupted else r"no mark: .*time-out of 0\.1 s.*attempt uses a new one"
    try:
        with pytest.raises((DeliveryError, Interrupted), match=told) as raised:
            deliveries.call_apart("no mark", hangs)
    finally:
        returns.set()
        signal.signal(signal.SIGUSR1, before)
    assert raised.type is (Interrupted if interrupted else DeliveryError)
    deliveries.close()
    producer.poll(0)  # which one that is closed refuses


# -- transactions: only a real broker hides what is open or aborted --------------------------------


def commit(transactions, topic, number, *sent):
    deliveries = transactions.begin()
    for value in sent:
        deliveries.send(topic, value)
    transactions.prepare(Mark(number, f"note {number}"))
    transactions.commit()


def test_the_last_one_is_known_to_who_comes_next(kafka_broker, closing):
    topic, name = kafka_broker.new_topic(partitions=2), kafka_broker.new_group()
    first = closing(Transactions(settings(kafka_broker), name, topic))
    assert first.last is None
    for number in (0, 4):
        commit(first, topic, number, f"row of {number}")
        assert first.last == Mark(number, f"note {number}")
    second = closing(Transactions(settings(kafka_broker), name, topic))
    assert second.last == Mark(4, "note 4")
    other = closing(Transactions(settings(kafka_broker), kafka_broker.new_group(), topic))
    assert other.last is None


@pytest.mark.parametrize("far", ["sent", "prepared"])
def test_what_was_open_is_aborted_by_who_comes_next(kafka_broker, closing, far):
    topic, name = kafka_broker.new_topic(), kafka_broker.new_group()
    zombie = closing(Transactions(settings(kafka_broker), name, topic))
    commit(zombie, topic, 0, "row of 0")
    deliveries = zombie.begin()
    deliveries.send(topic, "never")
    deliveries.flush()
    if far == "prepared":
        zombie.prepare(Mark(1, "never"))
    successor = closing(Transactions(settings(kafka_broker), name, topic))
    assert successor.last == Mark(0, "note 0")
    with pytest.raises(DeliveryError, match=rf"{topic}.*FENCED.*transaction\.timeout\.ms"):
        (zombie.commit if far == "prepared" else lambda: zombie.prepare(Mark(1, "never")))()
    commit(successor, topic, 1, "row of 1")
    assert values(kafka_broker, topic) == [b"row of 0", b"row of 1"]
    everything = values(kafka_broker, topic, isolation_level="read_uncommitted")
    assert everything == [b"row of 0", b"never", b"row of 1"]


def test_a_failure_leaves_nothing_to_readers_and_does_not_hold_them_up(kafka_broker, closing):
    topic, name = kafka_broker.new_topic(**{"max.message.bytes": 1000}), kafka_broker.new_group()
    transactions = closing(Transactions(settings(kafka_broker), name, topic))
    deliveries = transactions.begin()
    deliveries.send(topic, "small")
    deliveries.flush()
    deliveries.send(topic, "x" * 5000)
    with pytest.raises(
        DeliveryError, match=r"did not take 1 message, of 2 to all topics: .*too large"
    ):
        transactions.prepare(Mark(0, ""))
    transactions.close()
    again = closing(Transactions(settings(kafka_broker), name, topic))
    assert again.last is None
    commit(again, topic, 0, "then")
    assert values(kafka_broker, topic) == [b"then"]


def test_a_time_out_that_the_broker_refuses_is_named(kafka_broker):
    with pytest.raises(DeliveryError, match=r"transaction\.max\.timeout\.ms"):
        Transactions(
            settings(kafka_broker, transaction_timeout_ms=1_000_000_000),
            kafka_broker.new_group(),
            kafka_broker.new_topic(),
        )


def test_a_message_that_a_failed_transaction_refuses_waits_for_the_reason():
    """A transaction fails before the report of the message that has failed it is there."""
    deliveries, reports = Deliveries(ClientSettings("127.0.0.1:1", {"log_level": 0})), []

    class Failed:
        def produce(self, topic, value, key):
            raise KafkaException(KafkaError(KafkaError._STATE, "Erroneous state"))

        def poll(self, wait_s):
            if wait_s:
                large = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large")
                deliveries._fail(large, "t", b"key", b"of the first")

        def purge(self):
            pass

        close = purge

    deliveries.on_undelivered = reports.append
    deliveries._producer = Failed()
    with pytest.raises(DeliveryError, match="too large"):
        deliveries.send("t", b"of the second")
    assert [each.value for each in reports] == [b"of the first"]
