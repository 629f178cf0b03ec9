"""Planned spouts: sources whose rows a plan names, and the classes that ackcore brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pyspark.sql import SparkSession

from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.closed_rows import ClosedRows
from ackcore.spark.engine.setup import Backlog, InputFrame, Obstacle, PlannedRows
from ackcore.spark.planned.planned_source import any_of
from ackcore.spark.planned.source_rows import SourceRows
from ackcore.topology.builder import Topology
from ackcore.topology.table_views import ClosedWindows

T = TypeVar("T")


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
        self._parts = parts

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """Return the rows of a micro-batch of all kinds, by spout."""
        found: dict[str, Any] = {}
        for part in self._parts:
            found |= part.plan(number, parent)
        return found

    def most_retries(self) -> int | None:
        """Return the least limit on the retries in a micro-batch; None if no kind has one."""
        bounds = [part.most_retries() for part in self._parts]
        return min((bound for bound in bounds if bound is not None), default=None)

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return the rows of all kinds that a recorded plan names."""
        return [one for part in self._parts for one in part.inputs(plan)]

    def mended(self, plan: Plan) -> Plan:
        """Return the plan without lost rows, and with those of added spouts; or the same object."""
        for part in self._parts:
            plan = part.mended(plan)
        return plan

    def replaced(self, plan: Plan) -> str | None:
        """Return the first description of replaced rows, or None."""
        return _first(part.replaced(plan) for part in self._parts)

    def unread(self, error: Exception) -> str | None:
        """Return a text about the unread rows if a run failed only because of them, else None."""
        return _first(part.unread(error) for part in self._parts)

    def way_out(self, plan: Plan, said: str) -> str:
        """Return the first advice on how to continue without rows that cannot be read, or ""."""
        return next(filter(None, (part.way_out(plan, said) for part in self._parts)), "")

    def obstacle(self, plan: Plan) -> Obstacle | None:
        """Return the first reason why rows cannot be read now, or None."""
        return _first(part.obstacle(plan) for part in self._parts)

    def backlogs(self, plan: Plan) -> Mapping[str, Backlog]:
        """Return, by spout, the parts of its source with rows that a plan leaves for later."""
        return {name: one for part in self._parts for name, one in part.backlogs(plan).items()}

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """Report finished rows to all sources; return the lag of each Kafka spout, in offsets."""
        lag: dict[str, int] = {}
        for part in self._parts:
            lag |= part.done(plan, decision)
        return lag

    def has_new(self) -> bool:
        """Return whether any source needs a micro-batch.

        Raises a SourceError at once. Raises another exception only if no other source needs one.
        """
        return any_of([part.has_new for part in self._parts])

    @property
    def is_through(self) -> bool:
        """Whether a query that ends by itself has taken all rows of all kinds."""
        return all(part.is_through for part in self._parts)

    @property
    def is_behind(self) -> bool:
        """Whether a query that ends by itself must take more rows, and may take some now."""
        return any_of([partial(getattr, part, "is_behind") for part in self._parts])

    def reaching_ends(self) -> Callable[[], bool]:
        """Return a function that returns whether all rows are taken that existed at this call."""
        found = [part.reaching_ends() for part in self._parts]
        return lambda: all(reached() for reached in found)

    def close(self) -> None:
        """Close the connections of all kinds."""
        super().close()
        for part in self._parts:
            part.close()


def _first(found: Iterable[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)
