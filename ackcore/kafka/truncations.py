"""Detection of truncated logs, by the epochs of a partition's leaders.

If a leader out of sync is elected, or a broker's disk is lost, the end of the log is lost, and new
records get the offsets of the lost ones. Brokers store the offset at which the epoch of each leader
ended, so they can tell whether an offset still has the record that a leader of an epoch wrote.
"""

from __future__ import annotations

import time

from confluent_kafka import Consumer, KafkaError, TopicPartition

from ackcore.kafka.client_settings import ClientSettings, Value
from ackcore.kafka.clients import new_client
from ackcore.kafka.kafka_errors import NoToken

_OWN: dict[str, Value] = {
    "group.id": "ackcore",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    # With "read_committed" the answer would depend on whether a record may be read.
    "isolation.level": "read_uncommitted",
}
_DEFAULTS: dict[str, Value] = {
    "fetch.wait.max.ms": 10,
    "queued.min.messages": 1,
    "log.connection.close": False,
}
_POLL_S = 0.1


def truncated_at(
    settings: ClientSettings,
    partition: tuple[str, int],
    low: int,
    position: int,
    epoch: int,
    timeout_s: float = 30.0,
) -> int | None:
    """Return the offset at which a partition's log was truncated and written anew.

    Asks by one new client after the other. Returns None if the log below ``position`` is the one
    that was read. Raises ConnectionError if the brokers do not answer in time, or no token comes.

    ``settings``: the connection to the brokers. ``partition``: topic and number. ``low``: the first
    offset of the partition. ``position``: the next offset to read, at most the partition's end.
    ``epoch``: the epoch of the leader that wrote the records below ``position``, or a later one.
    ``timeout_s``: the longest time for all requests, in seconds.
    """
    until = time.monotonic() + timeout_s

    def is_same(offset: int) -> bool:
        where = TopicPartition(*partition, offset, leader_epoch=epoch)
        # A new client per request: one that already has an offset of the partition sends none.
        try:
            consumer = new_client(Consumer, settings.client_config(_OWN, _DEFAULTS))
        except NoToken as error:
            raise ConnectionError(str(error)) from None
        try:
            return _is_same(consumer, where, until)
        finally:
            consumer.close()

    if position <= low or is_same(position):
        return None
    same, other = low, position
    while other - same > 1:
        middle = (same + other) // 2
        same, other = (middle, other) if is_same(middle) else (same, middle)
    return same


def _is_same(consumer: Consumer, where: TopicPartition, until: float) -> bool:
    """Return whether the log below an offset is the one that the leader of an epoch had.

    ``where``: the partition, the offset and the epoch. ``until``: the time, by ``time.monotonic``,
    at which this raises ConnectionError.
    """
    consumer.assign([where])
    while time.monotonic() < until:
        message = consumer.poll(_POLL_S)
        error = None if message is None else message.error()
        if message is not None and (error is None or error.code() == KafkaError._PARTITION_EOF):
            return True
        if error is not None and error.code() in (
            KafkaError._AUTO_OFFSET_RESET,
            KafkaError._LOG_TRUNCATION,
        ):
            return False
    raise ConnectionError(
        f"no broker has answered whether the log of {where.topic}-{where.partition} below offset "
        f"{where.offset} was truncated"
    )
