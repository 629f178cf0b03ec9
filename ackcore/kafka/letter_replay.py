"""A consumer's dead letters back to the topics that their records came from.

Of each partition of the dead-letter topic a transactional id of its own knows which letter was sent
last: it is committed in one transaction with what was sent, so that a letter is sent once, whoever
dies when, and who runs at the same time is shut out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import closing
from typing import Any, NamedTuple

from ackcore._columns import as_count
from ackcore.kafka.cluster import Cluster
from ackcore.kafka.dead_letters import (
    ATTEMPTS,
    DEATHS,
    MAX_DEATHS,
    OURS,
    PARTITION,
    REASON,
    TOPIC,
    deaths,
)
from ackcore.kafka.producing import Mark, Transactions, check_options, check_topic
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.reading import RangeReader
from ackcore.kafka.records import UNREADABLE_HEADERS, Headers
from ackcore.kafka.settings import ClientSettings

_log = logging.getLogger(__name__)

#: In letters that a topology on Spark has sent; `ackcore.spark.replay_topic` sends those.
_OF_SPARK = "ackcore-batch"


class SentBack(NamedTuple):
    """What `replay_letters` has done, in letters.

    Attributes
    ----------
    sent : int
        Sent to their topics.
    left : int
        Not sent: they stand for no record, or only for a part of one, have died too often, or are
        none of a consumer's.
    """

    sent: int
    left: int


class _Letter(NamedTuple):
    topic: str
    partition: int
    headers: Headers
    deaths: int


def replay_letters(
    topic: str,
    *,
    bootstrap_servers: str,
    max_deaths: int = MAX_DEATHS,
    options: Mapping[str, Any] | None = None,
) -> SentBack:
    """Send the dead letters of a `Consumer` back to the topics that their records came from.

    Value, key and headers are as they came, the partition is the one that it was; how often the
    record has died is in the header ``ackcore-deaths``, from which a `Consumer` counts on.  All
    letters are sent that are in the topic now and were not sent before, each once for readers of
    what is committed (``isolation.level=read_committed``, librdkafka's default), whatever dies
    when.  They stay where they are.  Brokers forget what was sent after
    ``offsets.retention.minutes``, a week by default: have the topic keep its letters no longer.

    What stands for no record is left: ranges that were deleted or passed over ("LostUpstream",
    "TooFarBehind").  So is a record whose headers could not be read, since they are not in its
    letter; what a topology on Spark has sent (`ackcore.spark.replay_topic` sends those); and
    whatever else is in the topic.

    Parameters
    ----------
    topic : str
        What the consumer has as ``dead_letters``.
    bootstrap_servers : str
        ``host:port`` of brokers, with commas between them.
    max_deaths : int, default 20
        A record that has died so often is left: so what sends letters back by itself ends.
    options : mapping, optional
        More of librdkafka's settings.  The user writes to the topics that letters came from, under
        transactional ids that begin with ``ackcore-``, and reads in groups that do.

    Returns
    -------
    SentBack

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type, or an option is set here.
    DeliveryError
        If a letter was not delivered; those before it may have been.
    UnknownTopics, ClusterFailed, OffsetsLost, ReadTimedOut, ReadFailed
        If the topic cannot be read.
    """
    check_topic(topic)
    as_count(max_deaths, "max_deaths", 1)
    settings = ClientSettings(bootstrap_servers, options)
    check_options(settings)
    sent = left = 0
    with Cluster(settings) as cluster, RangeReader(settings) as reader:
        found = cluster.watermarks([one.key for one in cluster.partitions([topic])])
        for key, failure in found.failed.items():
            raise ConnectionError(f"Kafka does not say where {key} ends: {failure.text}")
        for (_, partition), (low, high) in sorted(found.found.items()):
            name = _name(topic, partition)
            with closing(Transactions(settings, name, topic)) as transactions:
                last = transactions.last
                start = low if last is None else max(low, last.number + 1)
                for batch in reader.read(OffsetRange(topic, partition, start, high)):
                    some = _send(transactions, batch.to_pylist(), max_deaths)
                    sent, left = sent + some.sent, left + some.left
    if left:
        settings.logger(_log).warning(
            "%d messages of topic %r are left: no letters of records, or of records that have died "
            "%d times or oftener",
            *(left, topic, max_deaths),
        )
    return SentBack(sent, left)


def _name(topic: str, partition: int) -> str:
    # A name of a topic is as long as that of a group may be.
    return f"ackcore-letters-{hashlib.sha256(topic.encode()).hexdigest()[:32]}-{partition}"


def _send(transactions: Transactions, messages: list[dict[str, Any]], most: int) -> SentBack:
    """Send what is read at once in one transaction."""
    deliveries = transactions.begin()
    sent = 0
    for message in messages:
        letter = _letter([(one["key"], one["value"]) for one in message["headers"] or ()])
        if letter is not None and letter.deaths < most:
            deliveries.send(
                letter.topic, message["value"], message["key"], letter.headers, letter.partition
            )
            sent += 1
    transactions.prepare(Mark(messages[-1]["offset"], ""))
    transactions.commit()
    return SentBack(sent, len(messages) - sent)


def _letter(headers: Headers) -> _Letter | None:
    """Return what a message stands for, by its headers; None if that is no record to be sent."""
    told = dict(headers)
    if _OF_SPARK in told or not {TOPIC, PARTITION, ATTEMPTS, REASON} <= told.keys():
        return None
    partition, attempts = (told[name] or b"" for name in (PARTITION, ATTEMPTS))
    kind, _, _ = (told[REASON] or b"").partition(b": ")
    # No attempt: it is of a range.
    if not (partition.isdigit() and attempts.isdigit() and int(attempts)):
        return None
    if kind == UNREADABLE_HEADERS.encode():
        return None
    came = [each for each in headers if each[0] not in OURS or each[0] == DEATHS]
    topic = (told[TOPIC] or b"").decode(errors="replace")
    return _Letter(topic, int(partition), came, deaths(headers))
