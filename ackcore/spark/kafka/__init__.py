"""Spouts that read Kafka: the offsets of a micro-batch, their reader, and their commits.

Other parts import only `kafka_sources` and `frame_groups` of this package, because confluent-kafka
is optional.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from ackcore.spark.base.atomic import fenced
from ackcore.spark.checkpoint.state import State
from ackcore.topology.builder import Topology

if TYPE_CHECKING:
    from ackcore.spark.kafka.frame_groups import FrameGroups
    from ackcore.spark.kafka.kafka_spouts import KafkaSources


def kafka_sources(
    topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool = False
) -> KafkaSources | None:
    """Return the spouts of a topology that read Kafka; None if there are none.

    ``topology``, ``spark``, ``state``: the topology, the Spark session and the state of the
    checkpoint. ``ends``: whether the query ends at the present ends of the partitions. ``once``:
    whether the first micro-batch takes all records up to there.
    """
    if all(spout.kind != "kafka" for spout in topology.spouts.values()):
        return None
    from ackcore.spark.kafka.kafka_spouts import KafkaSources  # noqa: PLC0415

    with fenced(state.check_owner):
        return KafkaSources.of(topology, spark, state, ends=ends, once=once)


def frame_groups(topology: Topology, state: State, log: Path) -> FrameGroups | None:
    """Return the consumer groups whose offsets ackcore commits for DataFrame sources; None without
    any.

    Commits the offsets that were done before.

    ``topology``, ``state``: the topology and the state of the checkpoint. ``log``: Spark's own log
    of offsets.
    """
    if all(spout.group is None for spout in topology.spouts.values()):
        return None
    from ackcore.spark.kafka.frame_groups import FrameGroups  # noqa: PLC0415

    groups = FrameGroups(topology, state.deployment_key, log)
    with fenced(state.check_owner):
        groups.recall(state)
    return groups
