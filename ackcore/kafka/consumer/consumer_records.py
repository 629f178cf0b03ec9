"""The records that a consumer returns, and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ackcore._error_hints import text_of_error

Headers = list[tuple[str, bytes | None]]


#: The failure kind of a record with unreadable headers, which are not in its dead letter.
UNREADABLE_HEADERS = "UnreadableHeaders"


class KafkaRecord(NamedTuple):
    """A record of Kafka that a `Consumer` delivers; pass it to ``ack`` or ``fail``.

    ``timestamp_ms``: milliseconds since 1970; None without a timestamp. ``attempt``: the number of
    its earlier failures that counted as attempts.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None
    attempt: int = 0
    generation: int = 0  # of the assignment of its partition
    delivery: int = 0  # the number of its deliveries in this generation


class Failure(NamedTuple):
    """The reason why a record failed: the name of an exception's class, and its text."""

    kind: str
    message: str

    @classmethod
    def of(cls, reason: BaseException | str) -> Failure:
        """Make the failure for the ``reason`` of `Consumer.fail`; a text has the kind "Failed".

        Raises TypeError if it is another object, such as a class.
        """
        if isinstance(reason, BaseException):
            return cls(type(reason).__qualname__, text_of_error(reason))
        if not isinstance(reason, str):
            raise TypeError(
                f"reason must be an exception or a text, got {reason!r}; create the exception from "
                "a class, or write str(...)"
            )
        return cls("Failed", reason)


@dataclass(slots=True)
class ConsumerCounts:
    """Counts of the records, answers and commits of a consumer since it was created."""

    read: int = 0
    skipped: int = 0  # records that were done before a restart or a rebalance
    acked: int = 0
    failed: int = 0  # calls of `fail` that took effect, with `Unavailable` too
    timed_out: int = 0  # attempts without an answer in time
    retried: int = 0  # delivered again
    dead: int = 0  # stored as dead letters
    lost: int = 0  # offsets deleted before they were read, or skipped as too far behind
    stale: int = 0  # acks and fails of records whose partition was taken away meanwhile
    late: int = 0  # acks and fails of deliveries that had failed or been repeated before
    repeated: int = 0  # acks and fails of records that were done already
    dropped: int = 0  # records removed with their partitions, to be read again
    committed: int = 0  # commits of a partition that the broker accepted
    rejected: int = 0  # commits of a partition that the broker refused


class PartitionStats(NamedTuple):
    """A snapshot of an assigned partition: offsets, and counts of records that are not done."""

    topic: str
    partition: int
    generation: int
    position: int  # the next offset to read
    committed: int | None  # the broker's committed offset; None if it has none yet
    lag: int | None  # offsets from the committed one to the last known end; None if unknown
    fresh: int  # records read and not delivered
    out: int  # records delivered and not answered
    waiting: int  # records that wait for their next attempt
    dying: int  # dead records whose dead letters are not stored yet
    bytes: int  # bytes of all these records
    oldest_s: float  # seconds since the first record that is not done was read
    paused: str  # the reason of a pause: "in flight", "waiting", "revoked"; or ""
