"""Spouts that read Kafka: which offsets a micro-batch takes, what reads them, what is committed.

Of this package other parts import nothing but `kafka_sources`, as not everyone has confluent-kafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

from ackcore.spark.checkpoint.state import State
from ackcore.topology.builder import Topology

if TYPE_CHECKING:
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

    return KafkaSources.of(topology, spark, state, ends=ends, once=once)
