"""Detection of truncated logs, by the epochs of a partition's leaders.

A leader that was not in sync may be elected, or a broker's disk be lost: the end of the log is gone
then, and what is written from there on has offsets that others had.  Only brokers can tell, who
know at which offset the epoch of each leader ended.
"""

from __future__ import annotations

import time

from confluent_kafka import Consumer, KafkaError, TopicPartition

from ackcore.kafka.settings import ClientSettings, Value

_OWN: dict[str, Value] = {
    "group.id": "ackcore",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    # Without it one is asked whether there is a record that may be read.
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
    """Return from which offset on a log is another one than when a leader of an epoch had it.

    Parameters
    ----------
    settings : ClientSettings
        How the brokers are reached.
    partition : (str, int)
        Topic and partition.
    low : int
        Its first offset.
    position : int
        Up to where it was read, within the partition now.
    epoch : int
        Of the leader that had it then, or of a later one.
    timeout_s : float
        For how long the brokers are asked.

    Returns
    -------
    int or None
        At least ``low``; None if all below ``position`` is what it was.

    Raises
    ------
    ConnectionError
        If the brokers do not say in time.
    """
    until = time.monotonic() + timeout_s

    def is_same(offset: int) -> bool:
        where = TopicPartition(*partition, offset, leader_epoch=epoch)
        # One for each question: a client that knows an offset of the partition asks no leader.
        consumer = Consumer(settings.client(_OWN, _DEFAULTS))
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
    """Whether the brokers have what is below an offset as the leader of its epoch had it."""
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
        f"nobody says in time whether {where.topic}-{where.partition} is as it was below offset "
        f"{where.offset}"
    )
