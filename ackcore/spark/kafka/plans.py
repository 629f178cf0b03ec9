"""The offsets that a micro-batch takes from a Kafka spout, and the choice of their number.

The plan names the task that reads each offset. So every repetition, on any machine, reads the same
records at the same positions in the same tasks.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.spout import KafkaSpout
from ackcore.spark.tasks.record_ids import RETRIES, RefusedOffsets

#: The smallest number of records for a task of its own.
LEAST = 10_000
#: The number of offsets of the first micro-batch, while the rate is unknown.
_FIRST = 100_000


class Position(NamedTuple):
    """The position of a spout in a partition, after a micro-batch.

    ``next``: the first offset for the next micro-batch. ``end``: the end of the partition when the
    micro-batch was planned, and ``epoch`` the leader's epoch then, if known. ``began``: the reason
    for the offset at which the spout began the partition, such as "earliest".
    """

    next: int
    end: int
    began: str
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class OffsetPlan:
    """The offsets that a micro-batch takes from one spout, and the positions after it."""

    #: By topic and partition.
    positions: Mapping[tuple[str, int], Position] = field(default_factory=dict)
    #: The ids of the topics, where the broker has them.
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    #: The ranges of each task, in the order of reading.
    tasks: tuple[tuple[OffsetRange, ...], ...] = ()
    #: Offsets that were deleted before they were read. Each range has one dead record, at its
    #: start.
    lost: tuple[OffsetRange, ...] = ()
    #: The dead records of lost ranges, and of read records that are dead at once.
    refused: tuple[RefusedOffsets, ...] = ()

    def body(self) -> dict[str, Any]:
        """Return the plan as an object for JSON."""
        topics: dict[str, Any] = {}
        for (topic, partition), one in self.positions.items():
            of = topics.setdefault(topic, {"id": self.topic_ids.get(topic), "partitions": []})
            of["partitions"].append([partition, *one])
        return {
            "topics": topics,
            "tasks": [[list(one) for one in some] for some in self.tasks],
            "lost": [list(one) for one in self.lost],
            "refused": [list(one) for one in self.refused],
        }

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> OffsetPlan:
        """Make the plan again from what `body` returned."""
        topics = body["topics"]
        return cls(
            {
                (topic, partition): Position(*rest)
                for topic, found in topics.items()
                for partition, *rest in found["partitions"]
            },
            {topic: found["id"] for topic, found in topics.items() if found["id"] is not None},
            tuple(tuple(OffsetRange(*one) for one in some) for some in body["tasks"]),
            tuple(OffsetRange(*one) for one in body["lost"]),
            tuple(RefusedOffsets(*one) for one in body["refused"]),
        )

    def taking_nothing(self) -> OffsetPlan:
        """Return a plan with the same positions that takes no offsets."""
        return replace(self, tasks=(), lost=(), refused=())

    def recreated(self, topic_ids: Mapping[str, str | None]) -> set[str]:
        """Return the topics whose id in ``topic_ids`` differs from the plan's; None is unknown."""
        known = self.topic_ids.items()
        return {topic for topic, was in known if topic_ids.get(topic) not in (None, was)}


def evenly(ranges: Iterable[OffsetRange], tasks: int) -> tuple[tuple[OffsetRange, ...], ...]:
    """Divide ranges, in order, into parts of about the same number of offsets.

    There are at most ``tasks`` parts, and at most one for each 10,000 offsets begun; none for no
    offsets.
    """
    ranges = list(ranges)
    total = sum(one.size for one in ranges)
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


def shares(
    waiting: Mapping[tuple[str, int], int],
    most: int,
    room: int | None = None,
    after: tuple[str, int] | None = None,
) -> dict[tuple[str, int], int]:
    """Return the number of offsets that a micro-batch takes from each partition with a share.

    The shares are as even as possible. Each partition with offsets has at least one, even if that
    is more than ``most`` in all. If ``room`` is less than the number of these partitions, some have
    none, and they take turns.

    ``waiting``: the number of available offsets by partition. ``most``: the target of their sum.
    ``room``: the limit of their sum; None: no limit. ``after``: the last partition that had a turn.
    """
    found: dict[tuple[str, int], int] = {}
    if room is not None:
        there = sorted(each for each, n in waiting.items() if n)
        if room < len(there):
            first = 0 if after is None else bisect_right(there, after)
            return dict.fromkeys((there[first:] + there[:first])[:room], 1)
        most = min(most, room)
    left, partitions = most, sum(1 for n in waiting.values() if n)
    for each, n in sorted(waiting.items(), key=lambda one: one[1]):
        if n:
            found[each] = min(n, max(1, left // partitions))
            left, partitions = max(0, left - found[each]), partitions - 1
    return found


class Intake:
    """The number of offsets of a micro-batch, chosen by ``max_records`` or ``target_batch_s``.

    The capacity for the target duration is estimated from all records of earlier micro-batches, new
    ones and retries. New records have at least half of it, and retries at most half, so that
    retries cannot displace all new records.

    ``spout``: the spout with these settings.
    """

    def __init__(self, spout: KafkaSpout) -> None:
        self._target_s = spout.target_batch_s
        self._fixed = spout.max_records
        self._most = float(_FIRST if spout.max_records is None else spout.max_records)
        self._room = 1.0
        #: The number of records and the seconds of an earlier micro-batch.
        self._before: tuple[int, float] | None = None
        self._overhead_s = 0.0
        self._taken = self._retried = 0
        self._began = 0.0

    @property
    def most(self) -> int:
        """The number of offsets to take: the argument ``most`` of `shares`."""
        if self._fixed is not None:
            return int(self._most * self._room)
        # The number of retries is about that of the last micro-batch.
        return int(max(self._most - self._retried, self._most / 2) * self._room)

    @property
    def most_retries(self) -> int | None:
        """The limit on retries in a micro-batch with new records; None with ``max_records``."""
        return None if self._fixed is not None else max(1, int(self._most / 2))

    def planned(self, records: int) -> None:
        """Record that a micro-batch with this number of new records begins now."""
        self._taken, self._began = records, time.monotonic()

    def done(self, waiting: float, retried: int = 0) -> None:
        """Adapt the limits after a micro-batch, by ``waiting`` and by its duration.

        With ``max_records`` the duration does not count.

        ``waiting``: the number of waiting records, as a share of ``max_waiting``. ``retried``: the
        number of retries in the micro-batch.
        """
        # Above half of max_waiting, the limit is reduced, down to the minimum.
        self._room = min(1.0, max(0.0, 2 * (1 - waiting)))
        self._retried = retried
        if self._fixed is not None or not self._taken:
            return
        took_s = max(time.monotonic() - self._began, 1e-3)
        taken = self._taken + retried
        over_s = self._overhead(taken, took_s)
        # If most of the time is fixed overhead, smaller micro-batches would only be slower.
        target_s = max(self._target_s, 2 * over_s)
        allowed = taken * (target_s - over_s) / max(took_s - over_s, 1e-3)
        # A slow micro-batch lowers the limit at once.  A fast one doubles it at most, and only if
        # it was at least half as large as allowed.
        if took_s > target_s:
            self._most = max(1.0, allowed)
        elif taken >= self._most * self._room / 2:
            self._most = min(allowed, 2 * self._most)
        self._taken = 0

    def _overhead(self, taken: int, took_s: float) -> float:
        """Estimate the seconds of a micro-batch without records, from this one and an earlier one.

        ``taken``, ``took_s``: the records of this one and its duration.
        """
        before, before_s = self._before or (taken, took_s)
        if abs(taken - before) < max(taken, before) / 4:  # sizes too similar for an estimate
            self._overhead_s = min(self._overhead_s, took_s)
            if taken >= before:
                self._before = taken, took_s
            return self._overhead_s
        each_s = max(0.0, (took_s - before_s) / (taken - before))
        self._overhead_s = max(0.0, min(took_s, before_s) - each_s * min(taken, before))
        self._before = taken, took_s
        return self._overhead_s
