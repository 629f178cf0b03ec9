"""The confluent-kafka client of a consumer, and its requests for offsets and records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from ackcore.kafka.client_settings import Value
from ackcore.kafka.consumer.consumer_letters import CallableKeeper, LettersUnderWay, TopicKeeper
from ackcore.kafka.consumer.consumer_records import (
    UNREADABLE_HEADERS,
    Failure,
    Headers,
    KafkaRecord,
)
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import Key
from ackcore.kafka.producing import PASSING, SIZES

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: Seconds that brokers may take to answer a question of a consumer.
REQUEST_S = 30.0
_PAUSE_S = 0.1
#: Settings for consumers only: a producer would warn about them.
_OF_CONSUMERS = (
    *("group.", "session.", "heartbeat.", "max.poll.", "max.partition.fetch.", "fetch."),
    *("queued.", "auto.", "enable.auto.", "enable.partition.", "partition.assignment."),
    *("isolation.", "check.crcs", "coordinator.", "consume.", "offset."),
)


class ConsumerError(RuntimeError):
    """The error that ended a consumer."""


class OffsetsOutOfRange(ConsumerError):
    """The next offset to read was deleted, or does not exist yet."""


def make_client(settings: ConsumerSettings, on_commit: Callable[..., None]) -> Consumer:
    """Return a client; it calls ``on_commit`` with the result of each asynchronous commit.

    Raises
    ------
    ConsumerError
        If librdkafka refuses the settings.
    """
    own: dict[str, Value] = {
        "logger": settings.client.logger(_log),
        "group.id": settings.group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
    }
    if settings.protocol == "consumer":
        own["group.protocol"] = "consumer"
    elif settings.protocol == "cooperative":
        own["partition.assignment.strategy"] = "cooperative-sticky"
    own["on_commit"] = on_commit
    # With librdkafka's default of 1 s, a user that is faster than its read-ahead stalls.
    # Without check.crcs, data that a disk or a network has damaged would be read.
    defaults: dict[str, Value] = {"fetch.queue.backoff.ms": 10, "check.crcs": True}
    # A pause drops what librdkafka has read ahead, and waits for the fetches under way.
    defaults["queued.min.messages"] = min(settings.limits.held, 100_000)
    # Finds new partitions, and new topics that match a pattern.
    defaults["topic.metadata.refresh.interval.ms"] = round(settings.refresh_s * 1000)
    config = settings.client.client(own, defaults)
    try:
        return Consumer(config)
    except KafkaException as error:
        raise _refused(settings, error) from None


def _refused(settings: ConsumerSettings, error: KafkaException) -> ConsumerError:
    said = settings.client.redacted(error.args[0].str())
    return ConsumerError(f"librdkafka refused the settings of the client: {said}; correct options=")


def dead_letters_of(settings: ConsumerSettings) -> LettersUnderWay | None:
    """Return the store of dead letters that the settings name; None without one."""
    given, log = settings.dead_letters, settings.client.logger(_log)
    if given is None:
        return None
    if not isinstance(given, str):
        return LettersUnderWay(CallableKeeper(given), log)
    own: dict[str, Value] = {"logger": log, "enable.idempotence": True, "acks": "all"}
    config = settings.client.client(own, SIZES)
    config = {name: of for name, of in config.items() if not name.startswith(_OF_CONSUMERS)}
    try:
        return LettersUnderWay(TopicKeeper(given, config, log), log)
    except KafkaException as error:
        raise _refused(settings, error) from None


def wait_until_known(client: Consumer, partitions: Iterable[Key]) -> None:
    """Make a client fetch the metadata of partitions, which may be new.

    Without this call, librdkafka would refresh its metadata only after minutes.

    Raises
    ------
    ConsumerError
        If the brokers still do not list the partitions after 30 s.
    """
    until = time.monotonic() + REQUEST_S
    wanted = set(partitions)
    while wanted:
        for topic in {topic for topic, _ in wanted}:
            try:
                found = client.list_topics(topic, REQUEST_S).topics[topic].partitions
            except KafkaException as error:
                raise ConsumerError(
                    f"the partitions of {topic} are not to be had: {error.args[0].str()}"
                ) from None
            wanted -= {(topic, number) for number in found}
        if wanted and time.monotonic() > until:
            raise ConsumerError(f"nobody knows the partitions {sorted(wanted)}; are they there?")
        if wanted:
            time.sleep(_PAUSE_S)


def answer_of(ask: Callable[[], _T], what: str) -> _T:
    """Send a request, again while a leader or a coordinator moves, and return the brokers' answer.

    Raises
    ------
    ConsumerError
        If the brokers do not answer within 30 s. The message names the request by ``what``.
    """
    until = time.monotonic() + REQUEST_S
    while True:
        try:
            return ask()
        except KafkaException as raised:
            error = raised.args[0]
        if error.code() not in PASSING or time.monotonic() > until:
            raise ConsumerError(
                f"the brokers do not say {what}: {error.str()}; start the consumer again once "
                "they do"
            )
        time.sleep(_PAUSE_S)


def without_errors(partitions: list[TopicPartition]) -> list[TopicPartition]:
    """Return an answer, or raise KafkaException with the first error in it."""
    for found in partitions:
        if found.error is not None:
            raise KafkaException(found.error)
    return partitions


def watermarks(client: Consumer, partition: TopicPartition) -> tuple[int, int]:
    """Return the first offset of a partition, and the last one plus 1.

    Raises
    ------
    ConsumerError
        If the broker does not answer.
    """
    low, high = answer_of(
        lambda: client.get_watermark_offsets(partition, REQUEST_S),
        f"where {partition.topic}-{partition.partition} begins and ends",
    )
    return low, high


def record_of(key: Key, message: Message) -> tuple[KafkaRecord, Failure | None]:
    """Return a message as a record, and the failure if its headers cannot be read."""
    kind, timestamp_ms = message.timestamp()
    offset = message.offset()
    assert offset is not None
    headers: Headers = []
    failure = None
    try:
        headers = message.headers() or []  # type: ignore[assignment]
    except (SystemError, UnicodeDecodeError):  # confluent-kafka turns the second into the first
        failure = Failure(UNREADABLE_HEADERS, "the name of a header is not UTF-8")
    record = KafkaRecord(
        *key, offset, message.key(), message.value(), headers, timestamp_ms if kind else None
    )
    return record, failure
