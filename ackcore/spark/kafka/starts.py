"""The start of a partition that has no position yet, or a position that no longer exists."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple

from ackcore.kafka.origins import Origin
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.spout import KafkaSpout
from ackcore.kafka.starts import first_offset
from ackcore.offsets import decode_metadata
from ackcore.spark.kafka.plans import Position
from ackcore.spark.tasks.record_ids import Refused, Tried
from ackcore.topology.tuples import Reason

#: Why a partition begins of which a topic before had the name.
MADE_ANEW = "topic made anew"


class Found(NamedTuple):
    """The known facts of a partition.

    Attributes
    ----------
    topic, partition : str, int
        Which.
    low, high : int
        Its first offset, and its end.
    position : Position or None
        Where the last plan says that it is.
    is_other, is_same : bool
        Whether its topic is another than the one of that plan, and whether it is that, by its id;
        neither where a broker tells none.
    is_first : bool
        Whether there is no plan yet.
    committed : (int, str) or None
        What the group has committed, if that was asked.
    of_time : int or None
        The first offset of the time at which it is to begin, if it is; the end without any.
    other_from : int or None
        From which offset on its log is another one than when it was planned, if that is known.
    topic_id : str or None
        That of its topic, where a broker tells one.
    """

    topic: str
    partition: int
    low: int
    high: int
    position: Position | None = None
    is_other: bool = False
    is_same: bool = False
    is_first: bool = False
    committed: tuple[int, str | None] | None = None
    of_time: int | None = None
    other_from: int | None = None
    topic_id: str | None = None


class Gone(NamedTuple):
    """A range that is not read, the type of a dead letter's reason, and why."""

    range: OffsetRange
    kind: str
    said: str

    @property
    def message(self) -> str:
        """The text of the reason."""
        topic, partition, start, stop = self.range
        return f"offsets {start} to {stop - 1} of {topic}-{partition}: {self.said}"

    def refused(self, spout: str) -> Refused:
        """Return it as the dead record of a spout."""
        return Refused(*self.range, Reason(spout, self.kind, self.message, True).encode())


class Start(NamedTuple):
    """The start of a partition.

    Attributes
    ----------
    next : int
        The offset.
    why : str
        The decision's name.
    holes : tuple of OffsetRange
        Below it, what is not done.
    gone : tuple of Gone
        What is not read: it was deleted, or is too far behind.
    tried : tuple of Tried
        Of the holes, what failed before.
    """

    next: int
    why: str
    holes: tuple[OffsetRange, ...] = ()
    gone: tuple[Gone, ...] = ()
    tried: tuple[Tried, ...] = ()

    @property
    def lowest(self) -> int:
        """The first offset that is not done."""
        return min([self.next, *(hole.start for hole in self.holes)])


def decide(spout: KafkaSpout, found: Found) -> Start | None:
    """Return where a partition begins, None if it goes on where it is."""
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
        # What was above is not there any more, and what comes under those offsets is new.  What is
        # there of the same topic was taken; of one that cannot be told from it, nothing was.
        return Start(high, "truncated") if found.is_same else Start(low, "out of range")
    return None


def _first(spout: KafkaSpout, found: Found) -> Start:
    """Return where it begins by what is asked for, in range or not."""
    low, high = found.low, found.high
    if not found.is_first:
        return Start(low, "new partition")
    if spout.start == "group" and found.committed is not None:
        offset, metadata = found.committed
        restored = decode_metadata(found.topic, found.partition, offset, metadata)
        was, now = Origin.read(restored.deployment), Origin.of(found.topic_id, None)
        if was.is_other_topic(now):
            return Start(low, MADE_ANEW)
        state = restored.state
        runs = zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True)
        holes = [OffsetRange(found.topic, found.partition, *run) for run in runs]
        if state.end > high:
            # Of the same topic it was truncated, and what is done above the offset may be of other
            # records.  Of one that cannot be told from it nothing may be done.
            is_same = was.topic and was.topic == now.topic
            return Start(offset, "group") if is_same else Start(low, "out of range")
        failed = zip(state.failed.tolist(), state.attempts.tolist(), strict=True)
        tried = tuple(Tried(found.topic, found.partition, *each) for each in failed)
        return Start(state.end, "group", tuple(holes), tried=tried)
    return Start(
        *first_offset(spout.start, (found.topic, found.partition), low, high, found.of_time)
    )


def _within(spout: KafkaSpout, found: Found, start: Start) -> Start:
    """Return a start that is in range, and not too far behind."""
    low, high, most = found.low, found.high, spout.max_offset_behind
    if start.lowest < low:
        start = _lost(found, start)
    elif start.next > high:
        start = Start(low if start.why == "group" else high, "out of range")
    if most is None or not found.is_first or high - start.lowest <= most:
        return start
    end = f"the end of {found.topic}-{found.partition} was {high}, more than {most} beyond"
    return _from(found, start, high - most, "TooFarBehind", f"too far behind, {end}")


def _lost(found: Found, start: Start) -> Start:
    """Return a start without what of it is below the first offset."""
    said = "lost upstream, deleted before they were read"
    return _from(found, start, found.low, "LostUpstream", said)._replace(why="out of range")


def _from(found: Found, start: Start, low: int, kind: str, said: str) -> Start:
    """Return a start without what of it is below an offset, which is not read for a reason."""
    gone = [hole._replace(stop=min(hole.stop, low)) for hole in start.holes if hole.start < low]
    if start.next < low:
        gone.append(OffsetRange(found.topic, found.partition, start.next, low))
    return start._replace(
        next=max(start.next, low),
        holes=tuple(
            hole._replace(start=max(hole.start, low)) for hole in start.holes if hole.stop > low
        ),
        gone=(*start.gone, *(Gone(one, kind, said) for one in gone)),
        tried=tuple(one for one in start.tried if one.offset >= low),
    )


def shares(
    waiting: Mapping[tuple[str, int], int],
    most: int,
    room: int | None = None,
    after: tuple[str, int] | None = None,
) -> dict[tuple[str, int], int]:
    """Return how many offsets of each partition a micro-batch takes.

    As evenly as what there is allows, ``most`` in all, but one of each that has any, and never
    more than there is room for: where there is not for one of each, those in turn have one.

    Parameters
    ----------
    waiting : mapping from (str, int) to int
        How many each partition has.
    most : int
        How many in all.
    room : int, optional
        How many may fail; None: any.
    after : (str, int), optional
        Behind which partition the turn begins: the last one that had its turn.
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
