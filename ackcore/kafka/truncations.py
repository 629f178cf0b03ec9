"""Detection of truncated logs, by the epochs of a partition's leaders.

If a leader out of sync is elected, or a broker's disk is lost, the end of the log is lost, and new
records get the offsets of the lost ones. Brokers store the offset at which the epoch of each leader
ended, so they can tell whether an offset still has the record that a leader of an epoch wrote.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, KafkaError, TopicPartition

from ackcore.kafka.client_settings import READER, ClientSettings, Value
from ackcore.kafka.clients import new_client
from ackcore.kafka.kafka_errors import NoToken

#: With "read_committed" the answer would depend on whether a record may be read.
_OWN: dict[str, Value] = {**READER, "isolation.level": "read_uncommitted"}
_DEFAULTS: dict[str, Value] = {
    "fetch.wait.max.ms": 10,
    "queued.min.messages": 1,
    "log.connection.close": False,
}
_POLL_S = 0.1
#: The most partitions that one client asks about: it may hold a fetched batch of each.
_AT_ONCE = 100

Key = tuple[str, int]


def truncations(
    settings: ClientSettings, logs: Mapping[Key, tuple[int, int, int]], timeout_s: float = 30.0
) -> dict[Key, int]:
    """Return the first offset at which each truncated log differs from the one that was read.

    Partitions that were not truncated are left out. If a broker stops, thousands of partitions get
    a new leader. Most of them are not truncated, so one client asks about 100 partitions, and only
    truncated ones have clients of their own.

    ``logs``: the arguments ``low``, ``position`` and ``epoch`` by partition. ``timeout_s``: the
    longest time for each 100 partitions, and for each truncated one. Raises ConnectionError if the
    brokers do not answer in time, or ``oauth_cb`` gives no token.
    """
    asked = [
        TopicPartition(*key, position, leader_epoch=epoch)
        for key, (low, position, epoch) in logs.items()
        if position > low
    ]
    found = {}
    for start in range(0, len(asked), _AT_ONCE):
        some = asked[start : start + _AT_ONCE]
        for key in _truncated(settings, some, time.monotonic() + timeout_s):
            offset = truncated_at(settings, key, *logs[key], timeout_s)
            if offset is not None:
                found[key] = offset
    return found


def truncated_at(
    settings: ClientSettings,
    partition: tuple[str, int],
    low: int,
    position: int,
    epoch: int,
    timeout_s: float = 30.0,
) -> int | None:
    """Return the first offset at which a partition's log differs from the one that was read.

    Its log was truncated there and written anew. Returns None if all below ``position`` is the
    same. Raises ConnectionError if the brokers do not answer in time, or ``oauth_cb`` gives no
    token. Each of its requests takes a new client.

    ``settings``: the connection to the brokers. ``partition``: topic and number. ``low``: the first
    offset of the partition. ``position``: the next offset to read, at most the partition's end.
    ``epoch``: the epoch of the leader that wrote the records below ``position``, or a later one.
    ``timeout_s``: the longest time for all requests, in seconds.
    """
    until = time.monotonic() + timeout_s

    def is_same(offset: int) -> bool:
        where = TopicPartition(*partition, offset, leader_epoch=epoch)
        return not _truncated(settings, [where], until)

    if position <= low or is_same(position):
        return None
    same, other = low, position
    while other - same > 1:
        middle = (same + other) // 2
        same, other = (middle, other) if is_same(middle) else (same, middle)
    return same


def _truncated(
    settings: ClientSettings, asked: Sequence[TopicPartition], until: float
) -> list[Key]:
    """Return the partitions whose log was truncated below an offset that was read from it.

    ``asked``: the partitions, each with the offset, and with the epoch of the leader that wrote the
    records below it, or a later one. ``until``: a time of ``time.monotonic``. Raises
    ConnectionError if a partition has no answer by then, or ``oauth_cb`` gives no token.
    """
    # A new client per call: one that already has an offset of a partition sends no request.
    try:
        consumer = new_client(Consumer, settings.client_config(_OWN, _DEFAULTS))
    except NoToken as error:
        raise ConnectionError(str(error)) from None
    unknown = {(where.topic, where.partition): where for where in asked}
    found = []
    try:
        consumer.assign(list(asked))
        while unknown and time.monotonic() < until:
            message = consumer.poll(_POLL_S)
            if message is None:
                continue
            # An error of the client names no partition.
            key, failure = (message.topic() or "", message.partition() or 0), message.error()
            code = KafkaError._PARTITION_EOF if failure is None else failure.code()
            if key not in unknown:
                continue
            if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION):
                found.append(key)
            elif code != KafkaError._PARTITION_EOF:
                continue
            consumer.pause([TopicPartition(*key)])  # its further records are not needed
            del unknown[key]
    finally:
        consumer.close()
    for where in unknown.values():
        raise ConnectionError(
            f"no broker has answered whether the log of {where.topic}-{where.partition} below "
            f"offset {where.offset} was truncated"
        )
    return found
