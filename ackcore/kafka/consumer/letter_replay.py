"""Replay of a consumer's dead letters into the topics that their records came from.

Each partition of the dead-letter topic has a transactional id. The offset of the last letter sent
is committed in the same transaction as the records. So each letter is sent once, whichever process
dies at any time, and a call that runs at the same time is fenced. The commit also holds the id of
the dead-letter topic, to detect that it was deleted and created again.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import cache
from typing import Any, NamedTuple

from ackcore._arrow.shown import shown_rows
from ackcore._columns import as_count
from ackcore._error_hints import counted, naming_arguments
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import Cluster, ClusterFailed, TopicPartition
from ackcore.kafka.consumer.consumer_letters import (
    ATTEMPTS,
    DEATHS,
    MAX_DEATHS,
    OURS,
    PARTITION,
    REASON,
    TOPIC,
    death_count,
    header_number,
    is_of_topology,
)
from ackcore.kafka.consumer.consumer_records import UNREADABLE_HEADERS, Headers
from ackcore.kafka.producing import DeliveryError, Mark, Transactions, check_options, check_topic
from ackcore.kafka.range_reader import RangeReader
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.start_positions import check_zone, time_ms

_log = logging.getLogger(__name__)

#: The topic names that brokers accept.
_NAME_OF_TOPIC = re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,249}")

#: The time for which brokers, by their defaults, keep the offset of the last letter sent: a week,
#: minus an hour for clocks that differ.
_REMEMBERED_MS = (7 * 24 - 1) * 3_600_000


class SentBack(NamedTuple):
    """The counts of messages that `replay_letters` read.

    ``sent``: letters sent to the topics of their records. ``left``: messages that this and later
    calls do not send; `replay_letters` names them.
    """

    sent: int
    left: int


class _Letter(NamedTuple):
    topic: str
    partition: int
    headers: Headers
    deaths: int


@naming_arguments
def replay_letters(
    topic: str,
    *,
    bootstrap_servers: str,
    max_deaths: int = MAX_DEATHS,
    since: datetime | None = None,
    options: Mapping[str, Any] | None = None,
) -> SentBack:
    """Send the dead letters of a `Consumer` back to the topics that their records came from.

    Value, key, headers and partition are those of the original record. The header
    ``ackcore-deaths`` holds the number of times that the record has died, and a `Consumer`
    continues to count from it. A call sends all letters that are in the topic now and were not sent
    before. Readers of committed records (``isolation.level=read_committed``, librdkafka's default)
    receive each once, even if a process dies. The letters stay in their topic.

    These messages are not sent: letters of offset ranges that were deleted or skipped
    ("LostUpstream", "TooFarBehind"), which have no record; letters of records with unreadable
    headers, which lack them; records that have died ``max_deaths`` times; letters of a topology on
    Spark, for which there is `ackcore.spark.replay`; and messages that are no letters.

    Brokers store the offset of the last letter sent, and delete it after a time without a call
    (``offsets.retention.minutes``, a week by default). Without it, letters older than a week may
    have been sent before, and ``since`` is required.

    Parameters
    ----------
    topic : str
        The topic that the consumer has as ``dead_letters``.
    bootstrap_servers : str
        ``host:port`` of brokers, separated by commas.
    max_deaths : int, default 20
        A record that has died this number of times is not sent, nor by a later call with a larger
        number. This ends automatic loops.
    since : datetime, optional
        A time with its zone; earlier letters are not sent. To send all, give ``datetime(1970, 1, 1,
        tzinfo=timezone.utc)``. It is required if brokers may have deleted the offset of the last
        letter sent; if the topic was created again; and if a partition ends before the letter that
        was sent last. Give it, too, if ``offsets.retention.minutes`` is less than a week, or
        brokers older than Kafka 2.8 had the topic created again: this is not detected.
    options : mapping, optional
        Further librdkafka settings. The user must be allowed to write to the topics that letters
        came from, with transactional ids that begin with ``ackcore-``, and to read in groups that
        begin with it.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, an option is set here, or ``since`` is required. The
        letters sent from other partitions are committed then.
    DeliveryError
        If a letter was not delivered; letters before it may have been. If its topic or partition is
        missing, the message names it, and the letters before it in its partition were sent.
    UnknownTopics, ClusterFailed, NoToken, OffsetsLost, ReadTimedOut, ReadFailed
        If the topic cannot be read.
    """
    check_topic(topic)
    as_count(max_deaths, "max_deaths", 1)
    settings = ClientSettings(bootstrap_servers, options)
    check_options(settings)
    from_ms = None if since is None else _ms_of(since)
    sent = left = 0
    with Cluster(settings) as cluster, RangeReader(settings) as reader:
        # Read the id first: if the topic is created again from now on, the next call detects it.
        topic_id = next((one.topic_id for one in cluster.partitions([topic])), None)

        @cache
        def partitions_of(name: str) -> int:
            return len(cluster.partitions([name], missing_ok=True))

        for key, bounds in cluster.bounds_of(topic).items():
            with closing(Transactions(settings, _name(*key), topic)) as transactions:
                last = transactions.last
                note = topic_id or ("" if last is None else last.note)
                start, high, done = _start(cluster, key, bounds, last, note, from_ms)
                for batch in reader.read(OffsetRange(*key, start, high)):
                    messages = shown_rows(batch)  # a producer may set any timestamp
                    letters = [_to_send(one, max_deaths) for one in messages]
                    missing = (one and _missing(one, partitions_of(one.topic)) for one in letters)
                    at, why = next(((n, why) for n, why in enumerate(missing) if why), (None, ""))
                    if at != 0:
                        _send(transactions, messages[:at], letters[:at], note)
                        n = sum(one is not None for one in letters[:at])
                        sent, left = sent + n, left + len(letters[:at]) - n
                    if at is not None:
                        raise _not_sent(topic, messages[at], why)
                if transactions.last == last and last is not None:
                    # Nothing new: commit the mark again, or brokers would delete it.
                    transactions.begin()
                    transactions.prepare(Mark(done, note))
                    transactions.commit()
    if left:
        settings.logger(_log).warning(
            "topic %r: %s not sent, now or by a later call. Causes: no dead letter of a Consumer; "
            "no record, or no readable headers of it; a record that has died %d times or more",
            *(topic, counted(left, "message is", "messages are"), max_deaths),
        )
    return SentBack(sent, left)


def _start(
    cluster: Cluster,
    key: TopicPartition,
    bounds: tuple[int, int],
    last: Mark | None,
    note: str,
    from_ms: int | None,
) -> tuple[int, int, int]:
    """Return three offsets of a partition: its first letter to send, its end, and one for the mark.

    The third is committed as the mark if there is nothing to send. Raises ValueError if it is
    unknown which letters were sent, and ``from_ms`` is None.

    ``bounds``: the partition's first offset and its end. ``last``: the mark of the last letter
    sent, whose note is the topic's id. ``note``: the present id. ``from_ms``: ``since``.
    """
    low, high = bounds
    done, of = (-1, "") if last is None else last
    is_other_topic = of not in ("", note)
    if done >= high and not is_other_topic:
        # Another call may have sent since.  It is fenced from now on.
        low, high = cluster.bounds_of(key.topic)[key]
    is_other_log = is_other_topic or done >= high
    if is_other_log and from_ms is None and low < high:
        why = (
            f"{key.topic} was created again since its letter {key.partition}/{done} was sent"
            if is_other_topic
            else f"{key} ends at {high}, before letter {done}, the last one sent, because it was "
            "truncated or its topic created again"
        )
        raise _since_missing(f"{why}, so it is unknown which of its letters were sent")
    start = low if is_other_log else max(low, done + 1)
    if from_ms is not None:
        start = max(start, min(high, _since(cluster, key, from_ms)))
    elif last is None and low < high:
        _refuse_forgotten(cluster, key, low)
    return start, high, high - 1 if is_other_log else done


def _ms_of(since: datetime) -> int | None:
    if not isinstance(since, datetime):
        raise TypeError(f"since must be a datetime with its zone, got {type(since).__name__}")
    check_zone(since, "since")
    return time_ms(since)


def _since(cluster: Cluster, key: TopicPartition, ms: int) -> int:
    """Return the offset of a partition's first letter of that time or later; else its end.

    Raises ClusterFailed if the offset cannot be looked up.
    """
    answers = cluster.offsets_for_time([key], ms)
    for failure in answers.failed.values():
        raise ClusterFailed(
            f"the first letter of {key} from a time on could not be looked up: {failure.text}; try "
            "again once the partition has a reachable leader"
        )
    (offset,) = answers.found.values()
    return offset


def _refuse_forgotten(cluster: Cluster, key: TopicPartition, low: int) -> None:
    """Raise ValueError if a partition has letters of more than a week ago.

    Brokers may have deleted the offset of the last one sent.
    """
    ms = time.time_ns() // 1_000_000 - _REMEMBERED_MS
    if low < _since(cluster, key, ms):
        raise _since_missing(
            f"{key} has letters older than a week, and the brokers have no offset of the last "
            "letter sent, because they delete it after offsets.retention.minutes, a week by default"
        )


def _since_missing(why: str) -> ValueError:
    return ValueError(
        f"since must be given: {why}. Letters of that time or later are sent; "
        "datetime(1970, 1, 1, tzinfo=timezone.utc) sends all"
    )


def _name(topic: str, partition: int) -> str:
    # Hashed, because the name of a topic may be as long as a group's name at most.
    return f"ackcore-letters-{hashlib.sha256(topic.encode()).hexdigest()[:32]}-{partition}"


def _to_send(message: Mapping[str, Any], most: int) -> _Letter | None:
    """Return the dead letter in a message; None without one, and after ``most`` deaths or more."""
    letter = _letter([(one["key"], one["value"]) for one in message["headers"] or ()])
    return letter if letter is not None and letter.deaths < most else None


def _missing(letter: _Letter, partitions: int) -> str | None:
    """Return a text if a letter's topic or partition does not exist, with the remedy; else None.

    ``partitions``: the number of partitions that the topic has now.
    """
    if letter.partition < partitions:
        return None
    if not partitions:
        return (
            f"topic {letter.topic} does not exist; create it with "
            f"{counted(letter.partition + 1, 'partition')}"
        )
    has = counted(partitions, "partition")
    return f"topic {letter.topic} has {has}; add partition {letter.partition}"


def _not_sent(topic: str, message: Mapping[str, Any], why: str) -> DeliveryError:
    at = message["timestamp"]
    return DeliveryError(
        f"letter {topic}-{message['partition']} at offset {message['offset']} was not sent, and "
        f"those before it in its partition were: {why}. To leave this letter out, set since to a "
        f"time after its own{'' if at is None else f', {at.isoformat()}'}: earlier letters are left"
    )


def _send(
    transactions: Transactions,
    messages: Sequence[Mapping[str, Any]],
    letters: Sequence[_Letter | None],
    note: str,
) -> None:
    """Send the letters of consecutive messages in one transaction; its mark has the last offset."""
    deliveries = transactions.begin()
    for message, letter in zip(messages, letters, strict=True):
        if letter is not None:
            deliveries.send(
                letter.topic, message["value"], message["key"], letter.headers, letter.partition
            )
    transactions.prepare(Mark(messages[-1]["offset"], note))
    transactions.commit()


def _letter(headers: Headers) -> _Letter | None:
    """Return the letter that a message's headers describe; None if it has no record to send."""
    told = dict(headers)
    if not {TOPIC, PARTITION, ATTEMPTS, REASON} <= told.keys():
        return None
    if is_of_topology(headers):  # `ackcore.spark.replay` sends these back
        return None
    partition, attempts = (header_number(told[name]) for name in (PARTITION, ATTEMPTS))
    kind, _, _ = (told[REASON] or b"").partition(b": ")
    # Without attempts the letter represents a range.
    if partition is None or not attempts or kind == UNREADABLE_HEADERS.encode():
        return None
    topic = (told[TOPIC] or b"").decode(errors="replace")
    if _NAME_OF_TOPIC.fullmatch(topic) is None:
        return None
    # The header with the number of deaths is kept.
    came = [each for each in headers if each[0] not in OURS or each[0] == DEATHS]
    return _Letter(topic, partition, came, death_count(headers))
