"""Planned spouts: sources whose rows a plan names, and the classes that ackcore brings."""

from __future__ import annotations

from pyspark.sql import SparkSession

from ackcore.spark.base.atomic import fenced
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.closed_rows import ClosedRows
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.kafka import kafka_sources
from ackcore.spark.planned.joined_rows import JoinedRows
from ackcore.spark.planned.source_rows import SourceRows
from ackcore.topology.builder import Topology
from ackcore.topology.table_views import ClosedWindows


def planned_rows(
    topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool
) -> PlannedRows | None:
    """Return the planned spouts of a topology; None if all its spouts are DataFrames.

    Reports the last done micro-batch to the sources again, because the driver may have died before
    it reported it.

    ``state``: the open checkpoint. ``ends``: whether the query ends when it has taken the rows that
    exist at its start. ``once``: whether the first micro-batch takes all of these rows.
    """
    found: list[PlannedRows] = []
    kafka = kafka_sources(topology, spark, state, ends=ends, once=once)
    if kafka is not None:
        found.append(kafka)
    others = {
        name: spout.source
        for name, spout in topology.spouts.items()
        if spout.kind not in (None, "kafka", ClosedWindows.source_kind)
    }
    if others:
        try:
            with fenced(state.check_owner):
                found.append(SourceRows(others, spark, state, ends=ends, once=once))
        except BaseException:
            if kafka is not None:
                kafka.close()
            raise
    if topology.closed:
        # The last ones: partitions of other inputs keep their numbers.
        found.append(ClosedRows(topology, spark, state))
    return JoinedRows(found) if len(found) > 1 else next(iter(found), None)
