"""The records that a consumer returns, and its counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Headers = list[tuple[str, bytes | None]]


#: The kind of failure of a record whose headers cannot be read, and so are not in its letter.
UNREADABLE_HEADERS = "UnreadableHeaders"


class KafkaRecord(NamedTuple):
    """A record as it came, and which delivery of it this is."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int | None
    attempt: int = 0  # how often it has failed before
    generation: int = 0  # of the assignment of its partition
    delivery: int = 0  # how often it was handed out in this generation


class Failure(NamedTuple):
    """Why a record failed: the name of an exception's class, and its text."""

    kind: str
    message: str

    @classmethod
    def of(cls, reason: BaseException | str) -> Failure:
        """Convert the argument of ``fail``."""
        if isinstance(reason, BaseException):
            return cls(type(reason).__qualname__, str(reason))
        return cls("Failed", reason)


@dataclass(slots=True)
class ConsumerCounts:
    """The numbers of records that a consumer has handled since it was made."""

    read: int = 0
    skipped: int = 0  # read, and done before a restart or a rebalance
    acked: int = 0
    failed: int = 0  # attempts
    timed_out: int = 0  # attempts
    retried: int = 0  # handed out again
    dead: int = 0  # kept as dead letters
    lost: int = 0  # offsets that the broker had deleted before they were read
    stale: int = 0  # acks and fails of records whose partition was taken away meanwhile
    late: int = 0  # ... of deliveries that had failed, or timed out and were handed out again
    repeated: int = 0  # ... of records that were done
    dropped: int = 0  # records that were let go with their partitions, to be read again
    committed: int = 0  # partitions' offsets that the broker took
    rejected: int = 0  # ... and did not


class PartitionStats(NamedTuple):
    """A partition that a consumer has."""

    topic: str
    partition: int
    generation: int
    position: int  # one above the highest offset that was read
    committed: int | None  # what the broker has; None if it has none yet
    lag: int | None  # up to the end of the partition, as it was last told; None if it was not
    fresh: int  # records: read and not handed out
    out: int  # ... handed out, and not answered
    waiting: int  # ... that wait for their next attempt
    dying: int  # ... that are not kept as dead letters yet
    bytes: int  # of all of them
    oldest_s: float  # how long ago the first that is not done was read
    paused: str  # why nothing more is read now: "in flight", "waiting", "revoked"; or ""
