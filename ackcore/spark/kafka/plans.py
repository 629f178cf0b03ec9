"""The part of a micro-batch's plan that concerns a spout on Kafka.

It holds each offset that the micro-batch takes, with the task that reads it, and the start of the
next micro-batch. So every repetition, on any machine, reads the same records in the same places.
Positions are stored nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ackcore.kafka.ranges import OffsetRange
from ackcore.spark.tasks.record_ids import RETRIES, Refused, Tried

#: The smallest number of records for a task of its own.
LEAST = 10_000


class Position(NamedTuple):
    """The position in a partition: the next offset, the last known end, the reason of the start.

    ``epoch`` is that of the leader that answered with the end, if known.
    """

    next: int
    end: int
    began: str
    epoch: int | None = None

    def body(self) -> list[Any]:
        """Return the position as an object for JSON."""
        return [*self] if self.epoch is not None else [*self[:3]]


@dataclass(frozen=True, slots=True)
class OffsetPlan:
    """The offsets that a micro-batch takes from one spout.

    Attributes
    ----------
    positions : mapping from str to mapping from int to Position
        The start of the next micro-batch, by topic and partition.
    topic_ids : mapping from str to str
        The ids of the topics, where the broker has them.
    tasks : tuple of tuple of OffsetRange
        The ranges of each task, in the order of reading.
    lost : tuple of OffsetRange
        Offsets that were deleted before they were read. Each range has one dead record, at its
        start.
    refused : tuple of Refused
        The dead records of lost ranges, and of read records that are dead at once.
    tried : tuple of Tried
        Records that failed before, from the metadata of the group with which the checkpoint began.
    """

    positions: Mapping[str, Mapping[int, Position]] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[tuple[OffsetRange, ...], ...] = ()
    lost: tuple[OffsetRange, ...] = ()
    refused: tuple[Refused, ...] = ()
    tried: tuple[Tried, ...] = ()

    def body(self) -> dict[str, Any]:
        """Return the offset plan as an object for JSON."""
        return {
            "topics": {
                topic: {
                    "id": self.topic_ids.get(topic),
                    "partitions": [[partition, *one.body()] for partition, one in found.items()],
                }
                for topic, found in self.positions.items()
            },
            "tasks": [[list(one) for one in some] for some in self.tasks],
            "lost": [list(one) for one in self.lost],
            "refused": [list(one) for one in self.refused],
            "tried": [list(one) for one in self.tried],
        }

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> OffsetPlan:
        """Return the plan in the object that `body` returned."""
        topics = body["topics"]
        return cls(
            {
                topic: {partition: Position(*rest) for partition, *rest in found["partitions"]}
                for topic, found in topics.items()
            },
            {topic: found["id"] for topic, found in topics.items() if found["id"] is not None},
            tuple(tuple(OffsetRange(*one) for one in some) for some in body["tasks"]),
            tuple(OffsetRange(*one) for one in body["lost"]),
            tuple(Refused(*one) for one in body["refused"]),
            tuple(Tried(*one) for one in body["tried"]),
        )

    def carried(self) -> OffsetPlan:
        """Return the plan of a micro-batch that takes nothing."""
        return replace(self, tasks=(), lost=(), refused=(), tried=self.untaken())

    def untaken(self) -> tuple[Tried, ...]:
        """Return the records that failed before and are not taken yet."""
        positions = self.positions
        return tuple(
            one
            for one in self.tried
            if (at := positions.get(one.topic, {}).get(one.partition)) and one.offset >= at.next
        )

    def each(self) -> Iterator[tuple[str, int, Position]]:
        """Yield topic, partition and position, in order."""
        for topic, found in self.positions.items():
            for partition, position in found.items():
                yield topic, partition, position


def records_in(ranges: Iterable[OffsetRange]) -> int:
    """Return the number of offsets in ranges."""
    return sum(one.size for one in ranges)


def by_partition(
    ranges: Iterable[OffsetRange], partitions: Sequence[tuple[str, int]], tasks: int
) -> tuple[tuple[OffsetRange, ...], ...]:
    """Return the ranges of each task: partitions i, i + tasks, ... of the list, no empty tasks."""
    place = {each: i % tasks for i, each in enumerate(partitions)}
    found: list[list[OffsetRange]] = [[] for _ in range(tasks)]
    for one in ranges:
        found[place[one.topic, one.partition]].append(one)
    return tuple(tuple(some) for some in found if some)


def evenly(ranges: Iterable[OffsetRange], tasks: int) -> tuple[tuple[OffsetRange, ...], ...]:
    """Return ranges divided into tasks with about the same number of offsets, in order."""
    ranges = list(ranges)
    total = records_in(ranges)
    tasks = max(1, min(tasks, RETRIES - 1, -(-total // LEAST)))
    size = -(-total // tasks)
    found: list[list[OffsetRange]] = [[]]
    left = size
    for one in ranges:
        start = one.start
        while start < one.stop:
            if not left:
                found.append([])
                left = size
            stop = min(one.stop, start + left)
            found[-1].append(one._replace(start=start, stop=stop))
            left -= stop - start
            start = stop
    return tuple(tuple(some) for some in found if some)
