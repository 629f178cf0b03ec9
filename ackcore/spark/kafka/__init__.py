"""Spouts that read Kafka: which offsets a micro-batch takes, what reads them, what is committed.

Of this package other parts import nothing but `kafka_sources` and `frame_groups`, as not everyone
has confluent-kafka.
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
    from ackcore.spark.kafka.sources import KafkaSources


def kafka_sources(
    topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool = False
) -> KafkaSources | None:
    """Return those spouts of a topology that read Kafka, None if there are none.

    Parameters
    ----------
    topology, spark, state
        What runs, where, and on which checkpoint.
    ends : bool
        Whether nothing is taken beyond what there is now.
    once : bool, default False
        Whether the first micro-batch takes all of that.
    """
    if all(spout.kind != "kafka" for spout in topology.spouts.values()):
        return None
    from ackcore.spark.kafka.sources import KafkaSources  # noqa: PLC0415

    with fenced(state.check_owner):
        return KafkaSources.of(topology, spark, state, ends=ends, once=once)


def frame_groups(topology: Topology, state: State, log: Path) -> FrameGroups | None:
    """Return the groups that are told of DataFrames, None if there are none.

    What is done is committed.

    Parameters
    ----------
    topology, state
        What runs, on which checkpoint.
    log : Path
        Spark's own log of offsets.
    """
    if all(spout.group is None for spout in topology.spouts.values()):
        return None
    from ackcore.spark.kafka.frame_groups import FrameGroups  # noqa: PLC0415

    groups = FrameGroups(topology, state.deployment_key, log)
    with fenced(state.check_owner):
        groups.recall(state)
    return groups
