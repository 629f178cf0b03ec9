"""Consumer groups whose offsets ackcore commits for streams of Spark's own Kafka source.

Spark writes the offsets of each micro-batch to its log before it calls ackcore, so they are known
again after a crash. Below the offsets of the last done micro-batch, all records are done except the
waiting ones.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ackcore.kafka.cluster import Cluster, Watermarks
from ackcore.spark.base.sources import streams_in
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.kafka.group_commits import (
    GroupCommitter,
    GroupUse,
    Key,
    refuse_shared_groups,
    states,
)
from ackcore.spark.kafka.plans import OffsetPlan, Position
from ackcore.topology.builder import Topology
from ackcore.topology.parts import Spout

_log = logging.getLogger("ackcore")


class FrameGroups:
    """The groups of all DataFrame spouts of a topology that have a ``commit_group``.

    ``topology``: the topology, with its spouts in the order of the checkpoint. ``deployment``: the
    key of the checkpoint. ``log``: the directory of Spark's own log of offsets. Raises ValueError
    if two spouts that read one source have one group.
    """

    def __init__(self, topology: Topology, deployment: int, log: Path) -> None:
        self._log = log
        self._groups: list[_FrameGroup] = []
        #: The number of the source of each stream, in Spark's order; the heartbeat has the last.
        #: Spouts that read one DataFrame share one source.
        streams: list[Any] = []
        self._sources: list[int] = []
        for spout in topology.spouts.values():
            for stream in streams_in(spout.source) if spout.kind is None else ():
                if stream not in streams:
                    streams.append(stream)
                self._sources.append(streams.index(stream))
                if spout.group is not None:
                    self._groups.append(_FrameGroup(spout, self._sources[-1], deployment))
        self._sources.append(len(streams))
        refuse_shared_groups(one.use for one in self._groups)
        self._complained = False

    def done(self, decision: BatchDecision) -> Mapping[str, int]:
        """Commit the offsets that are done after a micro-batch. Return each spout's lag in offsets.

        Spouts without a group are left out. If Spark's log cannot be read, commits nothing, returns
        {}, and logs a warning the first time.
        """
        try:
            text = (self._log / str(decision.number)).read_text("utf-8")
            offsets = read_offsets(text, self._sources)
            return {
                one.name: one.done(offsets[one.number], decision.waiting.tables(one.name))
                for one in self._groups
            }
        except (OSError, KeyError, ValueError, TypeError) as error:
            # The done offsets are in the checkpoint, and the next commit covers all of them.
            if not self._complained:
                _log.warning(
                    "the offsets of micro-batch %d could not be read from Spark's log, so none "
                    "were committed to the consumer groups; the next micro-batch or start whose "
                    "log can be read commits them: %r",
                    *(decision.number, error),
                )
            self._complained = True
            return {}

    @property
    def has_commit_due(self) -> bool:
        """Whether a micro-batch is due to repeat a failed commit."""
        return any(one.group.is_due for one in self._groups)

    def close(self) -> None:
        """Close the connections."""
        for one in self._groups:
            one.cluster.close()


class _FrameGroup:
    """The group of one spout, and the number of the spout's source in Spark's log."""

    def __init__(self, spout: Spout, number: int, deployment: int) -> None:
        self.name = spout.name
        self.number = number
        self.cluster = Cluster(spout.group.client)
        self.group = GroupCommitter(spout.name, spout.group.group_id, deployment)
        self.use = GroupUse(spout.name, spout.group.group_id, [number])

    def done(self, offsets: Mapping[Key, int], waiting: Iterable[pa.Table]) -> int:
        """Commit the done offsets. Return the lag in offsets, summed over all partitions.

        The lag is counted from the committed offset to the partition's end now, or to the one in
        ``offsets`` if its leader does not answer.

        ``offsets``: the end of the micro-batch in each partition. ``waiting``: the spout's records
        that wait for a retry.
        """
        ends = {key: Position(offset, offset, "") for key, offset in offsets.items()}
        after = states(OffsetPlan(ends), waiting)
        # Spark's log has no topic ids, so a topic that was created again is not detected.
        told = self.group.commit(self.cluster, after, {})
        marks: Mapping[Any, Watermarks] = self.cluster.watermarks(after).found
        return sum(
            max(0, (marks[each].high if each in marks else offsets[each]) - told[each])
            for each in after
        )


def read_offsets(text: str, sources: Sequence[int]) -> dict[int, dict[Key, int]]:
    """Return the end of a micro-batch in each partition, by the number of the Kafka source.

    ``text``: the entry of the micro-batch in Spark's log; lines of other sources are left out.
    ``sources``: the source number of each stream in the query's plan, in order. Raises ValueError
    if the entry is in Spark's format 1, and has another number of streams.
    """
    version, _, *lines = text.split("\n")
    if version == "v1":
        # One line for each stream in the plan; streams of one source have equal lines.
        if len(lines) != len(sources):
            raise ValueError(
                f"the log has {len(lines)} streams, and the query's plan has {len(sources)}, so "
                "its offsets cannot be assigned to spouts; read the topics with KafkaSpout"
            )
        noted = dict(zip(sources, lines, strict=True))
    else:
        # Format 2 has the source's number before each offset, and no line for a source without one.
        named = (line.partition(":") for line in lines)
        noted = {int(number): offset for number, _, offset in named if number.isdigit()}
    return {
        number: {
            (topic, int(partition)): offset
            for topic, partitions in found.items()
            for partition, offset in partitions.items()
        }
        for number, line in noted.items()
        if (found := _of_kafka(line)) is not None
    }


def _of_kafka(line: str) -> dict[str, dict[str, int]] | None:
    """Return the offsets of a line by topic and partition; None if it is of another source."""
    try:
        found = json.loads(line)
    except ValueError:  # a source without an offset yet
        return None
    is_kafkas = isinstance(found, dict) and all(
        isinstance(each, dict)
        and all(isinstance(offset, int) and name.isdigit() for name, offset in each.items())
        for each in found.values()
    )
    return found if is_kafkas else None
