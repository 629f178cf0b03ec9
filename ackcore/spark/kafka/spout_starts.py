"""The offset at which a Kafka spout begins a new partition, or one whose position is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.spout import KafkaSpout
from ackcore.kafka.start_positions import MADE_ANEW, NEW_PARTITION, first_offset
from ackcore.offsets import decode_metadata
from ackcore.spark.kafka.plans import OffsetPlan, Position
from ackcore.spark.tasks.record_ids import RefusedOffsets
from ackcore.topology.tuples import Reason


class PartitionFacts(NamedTuple):
    """The facts by which `decide` chooses the start of a partition.

    They are its bounds, its last position, the offsets of the group or of the start time, and
    whether its log and its topic are still the same.
    """

    #: The name of the partition.
    topic: str
    partition: int
    #: Its first offset, and its end.
    low: int
    high: int
    position: Position | None = None  # its position in the last plan
    #: Whether the topic's id differs from the one in that plan, and whether it equals it. Both are
    #: False if an id is unknown.
    is_other: bool = False
    is_same: bool = False
    is_first: bool = False  # whether there is no plan yet
    #: The group's committed offset and metadata, if they were requested.
    committed: tuple[int, str | None] | None = None
    #: The first offset of the requested start time; the end if no record has it. None without a
    #: time.
    of_time: int | None = None
    #: The offset from which on the log differs from the planned one, if known.
    other_from: int | None = None
    topic_id: str | None = None  # the id of the topic, if the broker has one


class SkippedRange(NamedTuple):
    """A range of offsets that is not read and becomes one dead letter."""

    range: OffsetRange
    kind: str  # the type in the dead letter's reason
    said: str  # the text in it, after the offsets

    @property
    def message(self) -> str:
        """The message of the dead letter: the offsets, and the text."""
        topic, partition, start, stop = self.range
        return f"offsets {start} to {stop - 1} of {topic}-{partition}: {self.said}"

    def refused(self, spout: str) -> RefusedOffsets:
        """Return the dead record of this range for `OffsetPlan.refused`: offsets and reason."""
        return RefusedOffsets(*self.range, Reason(spout, self.kind, self.message, True).encode())


class Start(NamedTuple):
    """The offset at which a partition begins; the ranges below it to read, and those to skip."""

    next: int  # the first offset to read, except the holes
    why: str  # the reason, such as "earliest"
    holes: tuple[OffsetRange, ...] = ()  # the ranges below ``next`` that are read, too
    #: The ranges that are not read, because they were deleted or are too far behind.
    gone: tuple[SkippedRange, ...] = ()

    @property
    def lowest(self) -> int:
        """The first offset that is not done."""
        return min([self.next, *(hole.start for hole in self.holes)])


#: Type and text of the reason for offsets that were deleted; the type for `max_offset_behind`.
_LOST = "LostUpstream", "lost upstream, deleted before they were read"
TOO_FAR_BEHIND = "TooFarBehind"


def decide(spout: KafkaSpout, found: PartitionFacts) -> Start | None:
    """Return where a partition begins; None if it continues at its position in the last plan.

    It begins anew if it has no position, or the position is no longer in the same log.
    """
    position, low, high = found.position, found.low, found.high
    if position is None:
        return _within(spout, found, _first(spout, found))
    if found.is_other:
        return Start(low, MADE_ANEW)
    if position.next < low:
        return _lost(found, Start(position.next, position.began))
    if found.other_from is not None:
        return Start(found.other_from, "truncated")
    if position.next > high:
        # The records above the end are lost, and new records will get their offsets.  If the topic
        # is the same, all records below the end were taken; if that is unknown, none may have been.
        return Start(high, "truncated") if found.is_same else Start(low, "out of range")
    return None


def _first(spout: KafkaSpout, found: PartitionFacts) -> Start:
    """Return the start by the setting ``start``. It may be out of the partition's range."""
    low, high = found.low, found.high
    if not found.is_first:
        return Start(low, NEW_PARTITION)
    if spout.start == "group" and found.committed is not None:
        offset, metadata = found.committed
        restored = decode_metadata(found.topic, found.partition, offset, metadata)
        was, now = CommitOrigin.read(restored.deployment), CommitOrigin.of(found.topic_id, None)
        if was.is_other_topic(now):
            return Start(low, MADE_ANEW)
        state = restored.state
        runs = zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True)
        holes = [OffsetRange(found.topic, found.partition, *run) for run in runs]
        if state.end > high:
            # If the topic is the same, it was truncated, and done offsets above the committed one
            # may belong to other records.  If that is unknown, perhaps none of its records is done.
            is_same = was.topic and was.topic == now.topic
            return Start(offset, "group") if is_same else Start(low, "out of range")
        return Start(state.end, "group", tuple(holes))
    return Start(
        *first_offset(spout.start, (found.topic, found.partition), low, high, found.of_time)
    )


def _within(spout: KafkaSpout, found: PartitionFacts, start: Start) -> Start:
    """Return a start in the partition's range, and not too far behind its end."""
    low, high, most = found.low, found.high, spout.max_offset_behind
    if start.lowest < low:
        start = _lost(found, start)
    elif start.next > high:
        start = Start(low if start.why == "group" else high, "out of range")
    if most is None or not found.is_first or high - start.lowest <= most:
        return start
    end = f"{found.topic}-{found.partition} ended at {high} and max_offset_behind is {most}"
    return _cut_below(found, start, high - most, TOO_FAR_BEHIND, f"too far behind, since {end}")


def _lost(found: PartitionFacts, start: Start) -> Start:
    """Return a start in which offsets below the partition's first one are lost."""
    return _cut_below(found, start, found.low, *_LOST)._replace(why="out of range")


def _cut_below(found: PartitionFacts, start: Start, low: int, kind: str, said: str) -> Start:
    """Return a start in which ranges below ``low`` that would be read are skipped.

    Each becomes a dead letter with the reason ``kind`` and ``said``.
    """
    gone = [hole._replace(stop=min(hole.stop, low)) for hole in start.holes if hole.start < low]
    if start.next < low:
        gone.append(OffsetRange(found.topic, found.partition, start.next, low))
    return start._replace(
        next=max(start.next, low),
        holes=tuple(
            hole._replace(start=max(hole.start, low)) for hole in start.holes if hole.stop > low
        ),
        gone=(*start.gone, *(SkippedRange(one, kind, said) for one in gone)),
    )


def without_deleted(
    plan: OffsetPlan,
    name: str,
    lows: Mapping[tuple[str, int], int],
    topic_ids: Mapping[str, str | None],
) -> tuple[OffsetPlan, list[SkippedRange]]:
    """Return a plan without the ranges that were deleted after it was stored, and these ranges.

    The plan's ``lost`` has these ranges, joined across tasks, with a dead record for each.

    ``plan``: a stored plan without a decision. ``name``: the name of the spout. ``lows``: the first
    offset of each partition that answered. ``topic_ids``: the present ids of the topics. If a topic
    was created again, all its planned offsets are lost.
    """
    recreated = plan.recreated(topic_ids)

    def rest(one: OffsetRange) -> OffsetRange:
        """Return the part of a range that was not deleted. It may be empty."""
        low = one.stop if one.topic in recreated else lows.get(one[:2], 0)
        return one._replace(start=min(max(one.start, low), one.stop))

    gone: list[OffsetRange] = []
    for one in sorted(one for some in plan.tasks for one in some):
        stop = rest(one).start
        if stop == one.start:
            continue
        before = gone[-1] if gone else None
        # A deleted range may span several tasks; it is joined, and has one dead letter.
        if before is not None and before[:2] == one[:2] and before.stop == one.start:
            gone[-1] = before._replace(stop=stop)
        else:
            gone.append(one._replace(stop=stop))
    lost = [SkippedRange(one, *_LOST) for one in gone]
    tasks = (tuple(left for one in some if (left := rest(one)).size) for some in plan.tasks)
    after = replace(
        plan,
        tasks=tuple(filter(None, tasks)),
        lost=(*plan.lost, *gone),
        refused=(*plan.refused, *(one.refused(name) for one in lost)),
    )
    return after, lost
