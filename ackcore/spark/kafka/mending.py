"""Handling of offsets that are deleted between the plan that names them and its decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.spout import KafkaSpout
from ackcore.spark.kafka.plans import OffsetPlan, Position
from ackcore.spark.kafka.starts import Found, Start, decide


def lost_since(
    spout: KafkaSpout,
    plan: OffsetPlan,
    lows: Mapping[tuple[str, int], int],
    topic_ids: Mapping[str, str | None],
) -> list[Start]:
    """Return new starts for the ranges of a plan whose beginning was deleted, with the lost part.

    Parameters
    ----------
    spout : KafkaSpout
        The spout of the plan.
    plan : OffsetPlan
        A stored plan without a decision.
    lows : mapping from (str, int) to int
        The first offset of each partition that answered.
    topic_ids : mapping from str to str or None
        The present ids of the topics. If a topic was created again, all its planned offsets are
        lost.
    """
    gone: list[OffsetRange] = []
    for one in sorted(one for some in plan.tasks for one in some):
        known, now = plan.topic_ids.get(one.topic), topic_ids.get(one.topic)
        is_other = known is not None and now is not None and known != now
        low = lows.get((one.topic, one.partition), 0)
        stop = one.stop if is_other else min(low, one.stop)
        if stop <= one.start:
            continue
        before = gone[-1] if gone else None
        # A deleted range may span several tasks; it is joined, and has one dead letter.
        if before is not None and before[:2] == one[:2] and before.stop == one.start:
            gone[-1] = before._replace(stop=stop)
        else:
            gone.append(one._replace(stop=stop))
    found = []
    for one in gone:
        began = Position(one.start, one.stop, "")
        start = decide(spout, Found(one.topic, one.partition, one.stop, one.stop, began))
        assert start is not None
        found.append(start)
    return found


def without(plan: OffsetPlan, name: str, lost: list[Start]) -> OffsetPlan:
    """Return a spout's plan with the deleted offsets as lost, and in no task."""
    gone = tuple(one.range for start in lost for one in start.gone)
    refused = [one.refused(name) for start in lost for one in start.gone]
    tasks = [tuple(one for each in some if (one := _rest(each, gone)).size) for some in plan.tasks]
    return replace(
        plan,
        tasks=tuple(some for some in tasks if some),
        lost=(*plan.lost, *gone),
        refused=(*plan.refused, *refused),
    )


def _rest(one: OffsetRange, gone: tuple[OffsetRange, ...]) -> OffsetRange:
    """Return the rest of a range without its deleted beginning, which may be all of it."""
    for other in gone:
        if one[:2] == other[:2] and other.start <= one.start < other.stop:
            return one._replace(start=min(one.stop, other.stop))
    return one
