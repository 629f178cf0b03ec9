"""Planned spouts: sources whose rows a plan names, and the classes that ackcore brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from pyspark.sql import SparkSession

from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.closed_rows import ClosedRows
from ackcore.spark.engine.setup import PlannedRows
from ackcore.spark.planned.planned_source import any_of
from ackcore.spark.planned.source_rows import SourceRows
from ackcore.topology.builder import Topology
from ackcore.topology.table_views import ClosedWindows


def planned_rows(
    topology: Topology, spark: SparkSession, state: State, *, ends: bool, once: bool
) -> PlannedRows | None:
    """Return the planned spouts of a topology; None if all its spouts are DataFrames.

    Connects to Kafka; the caller closes the result.

    ``state``: the open checkpoint. ``ends``: whether the query ends when it has taken the rows that
    exist at its start. ``once``: whether the first micro-batch takes all of these rows.
    """
    found: list[PlannedRows] = []
    if any(spout.kind == "kafka" for spout in topology.spouts.values()):
        from ackcore.spark.kafka.kafka_spouts import KafkaSources  # noqa: PLC0415 - an extra

        found.append(KafkaSources.of(topology, spark, state, ends=ends, once=once))
    others = {
        name: spout.source
        for name, spout in topology.spouts.items()
        if spout.kind not in (None, "kafka", ClosedWindows.source_kind)
    }
    if others:
        try:
            found.append(SourceRows(others, spark, state, ends=ends, once=once))
        except BaseException:
            for one in found:
                one.close()
            raise
    if topology.closed:
        # The last ones: partitions of other inputs keep their numbers.
        found.append(ClosedRows(topology, spark, state))
    return JoinedRows(found) if len(found) > 1 else next(iter(found), None)


class JoinedRows(PlannedRows):
    """The planned spouts of several kinds as one `PlannedRows`: ``parts`` has one for each kind."""

    def __init__(self, parts: Sequence[PlannedRows]) -> None:
        self.parts = parts

    def has_new(self) -> bool:
        """Return whether any source needs a micro-batch.

        Raises a SourceError at once. Raises another exception only if no other source needs one.
        """
        return any_of([part.has_new for part in self.parts])

    @property
    def is_behind(self) -> bool:
        """Whether a query that ends by itself must take more rows, and may take some now."""
        return any_of([partial(getattr, part, "is_behind") for part in self.parts])

    def reaching_ends(self) -> Callable[[], bool]:
        """Return a function that returns whether all rows are taken that existed at this call."""
        found = [part.reaching_ends() for part in self.parts]
        return lambda: all(reached() for reached in found)
