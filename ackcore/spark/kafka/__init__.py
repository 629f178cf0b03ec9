"""Spouts that read Kafka: the offsets of a micro-batch, their reader, and their commits.

This module imports the others only for a topology that needs them: confluent-kafka is optional.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from ackcore.spark.checkpoint.state import State
from ackcore.topology.builder import Topology

if TYPE_CHECKING:
    from ackcore.spark.kafka.frame_groups import FrameGroups
    from ackcore.spark.kafka.kafka_spouts import KafkaSources


def kafka_sources(
    topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool = False
) -> KafkaSources | None:
    """Return the `KafkaSpout` sources of a topology; None if it has none.

    Connects to their brokers. ``state``: the state of the checkpoint. ``ends``: whether the query
    ends at the offsets at which the partitions end during this call. ``once``: whether its first
    micro-batch takes all records up to these offsets.
    """
    if all(spout.kind != "kafka" for spout in topology.spouts.values()):
        return None
    from ackcore.spark.kafka.kafka_spouts import KafkaSources  # noqa: PLC0415

    return KafkaSources.of(topology, spark, state, ends=ends, once=once)


def frame_groups(topology: Topology, state: State, log: Path) -> FrameGroups | None:
    """Return the groups of a topology's DataFrames (``commit_group``); None if it has none.

    Connects to their brokers.

    ``state``: the state of the checkpoint. ``log``: the directory of Spark's own log of offsets.
    """
    if all(spout.group is None for spout in topology.spouts.values()):
        return None
    from ackcore.spark.kafka.frame_groups import FrameGroups  # noqa: PLC0415

    return FrameGroups(topology, state.deployment_key, log)
