"""The rows of closed windows as records: the planned rows of the spouts ``<table>.closed``.

The plan of a micro-batch names the segments with the rows of the windows that the micro-batch
before has closed.  The segments are kept until the micro-batch that reads them is done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from ackcore._arrow.record_batches import rebatched
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.checkpoint.decisions import BatchDecision, Plan
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine.setup import InputFrame, PlannedRows, Snapshot
from ackcore.spark.tables.table_snapshots import TableSnapshot, stored_rows
from ackcore.spark.tasks.spec import CHUNK_BYTES
from ackcore.tables.folding import finished
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.topology.parts import Parts

#: The least rows that are worth another task, and the most rows of a batch.
_ROWS = 10_000


def closed_of(
    state: State, topology: Parts, number: int | None
) -> dict[str, tuple[SegmentInfo, ...]]:
    """Return, by spout that emits them, the segments with the windows that a micro-batch closed.

    ``number`` is the micro-batch.  If it is None, or closed no window, the result is empty.
    """
    spouts = topology.closed
    tables = (state.tables.of(number) or {}) if spouts else {}
    return {
        spout: tables[table.name].closed
        for spout, table in spouts.items()
        if table.name in tables and tables[table.name].closed
    }


class ClosedRows(PlannedRows):
    """The spouts of a topology whose records are the rows of closed windows.

    ``spark``: the session of the query; None without Spark.
    """

    def __init__(self, topology: Parts, spark: SparkSession | None, state: State) -> None:
        self._topology = topology
        self._spark = spark
        self._state = state
        self._empty: dict[str, DataFrame] = {}
        self._is_read = not closed_of(state, topology, state.last_done)

    def plan(self, number: int, parent: Plan | None) -> Mapping[str, Any]:
        """Return, by spout, the windows that the micro-batch before closed (`Plan.offsets`).

        Each value has their ``segments``, and the number of ``tasks`` that read them.
        """
        slots = 1 if self._spark is None else task_slots(self._spark)
        closed = closed_of(self._state, self._topology, None if parent is None else parent.number)
        return {
            spout: {
                "segments": segments,
                "tasks": min(slots, -(-sum(one.rows for one in segments) // _ROWS)),
            }
            for spout, segments in closed.items()
        }

    def inputs(self, plan: Plan) -> list[InputFrame]:
        """Return frames of the rows in the segments that a plan names, one per named spout."""
        found = []
        for spout, table in self._topology.closed.items():
            body = plan.offsets.get(spout)
            if body is None:
                continue
            segments = tuple(SegmentInfo.of(one) for one in body["segments"])
            tasks, spark = body["tasks"], self._spark
            closed = TableSnapshot(table.shape, segments, 0, self._state.segments)
            read = partial(read_closed, closed, tasks)
            ids: Any = None if spark is None else spark.range(0, tasks, 1, tasks)
            found.append(InputFrame(self._columns(spout), spout, Snapshot(ids, read), tasks=tasks))
        return found

    def joined(self, plan: Plan) -> Plan:
        """Return the plan with the rows of spouts that joined the topology after it was made.

        A changed plan has no suspects. Without such spouts, return the same object.
        """
        offsets = {**self.plan(plan.number, self._state.plan(plan.parent)), **plan.offsets}
        if offsets.keys() == plan.offsets.keys():
            return plan
        return replace(plan, offsets=offsets).without_suspects()

    def _columns(self, spout: str) -> Any:
        """Return an empty frame that carries the columns and the session; None without Spark."""
        if self._spark is None:
            return None
        if spout not in self._empty:
            schema = self._topology.spouts[spout].source.schema
            self._empty[spout] = self._spark.createDataFrame([], from_arrow_schema(schema))
        return self._empty[spout]

    def done(self, plan: Plan, decision: BatchDecision) -> Mapping[str, int]:
        """Note for `has_new` whether a spout must emit windows that the micro-batch closed.

        Returns {}, because these spouts have no lag.
        """
        self._is_read = not closed_of(self._state, self._topology, plan.number)
        return {}

    @property
    def is_through(self) -> bool:
        """Whether the last micro-batch closed no window that a bolt or a table reads."""
        return self._is_read


def read_closed(closed: TableSnapshot, tasks: int, batches: Batches) -> Batches:
    """Yield the rows of windows for each task whose number is in ``batches``, for mapInArrow.

    ``closed``: the rows, as the segments of a table. ``tasks``: the number of tasks that share
    them.
    """
    shape, segments, _, files, _ = closed
    total = sum(segment.rows for segment in segments)
    for batch in batches:
        for task in batch.column(0).to_pylist():
            start, stop = (total * at // tasks for at in (task, task + 1))
            for stored in stored_rows(files, shape, segments, start, stop):
                rows: pa.Table = finished(shape, stored).combine_chunks()
                yield from rebatched(rows.to_batches(), _ROWS, CHUNK_BYTES)
