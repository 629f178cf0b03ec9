"""Checked batches of events from any source, as columns for the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

from ackcore import _columns
from ackcore._arrow import integers
from ackcore._records import RESET, Int64s
from ackcore.spark.base.batches import Batches
from ackcore.spark.base.reasons import NO_TIME, reasons_of
from ackcore.spark.settle.wire import Events


def read_events(
    batches: Batches, timed: bool, reasons: bool, source: str = "events", first_row: int = 0
) -> Iterator[tuple[Events, pa.Table | None]]:
    """Yield each batch's events and the reasons among them.

    Parameters
    ----------
    batches : iterator of pyarrow.RecordBatch
        Batches with ``root_id``, ``val``, ``task``, in any order.
    timed, reasons : bool
        Whether there are columns ``ts_ms`` and ``reason``.
    source : str, default "events"
        The table's name in messages.
    first_row : int, default 0
        The row number of the first batch, for messages.

    Raises
    ------
    ValueError
        If a column has nulls, or a task stands for no message; the error names the row.
    """
    row = first_row
    for batch in batches:
        try:
            events = _events(batch, timed)
        except ValueError as error:
            raise ValueError(
                f"{source}: {error} (counted from row {row} of partition {_partition()})"
            ) from None
        found = None
        if reasons:
            times: Int64s | int = NO_TIME if events.times_ms is None else events.times_ms
            found = reasons_of(events.root_ids, times, column_of(batch, "reason"))
        yield events, found
        row += len(batch)


def _events(batch: pa.RecordBatch, timed: bool) -> Events:
    tasks = integers(column_of(batch, "task"), "task", pa.int32())
    if len(tasks) and tasks.min() < RESET:
        _columns.check_kinds(tasks)
    return Events(
        integers(column_of(batch, "root_id"), "root_id", pa.int64()),
        integers(column_of(batch, "val"), "val", pa.int64()),
        tasks,
        integers(column_of(batch, "ts_ms"), "ts_ms", pa.int64()) if timed else None,
    )


def column_of(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return a column by its name."""
    return batch.column(batch.schema.names.index(name))


def _partition() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()
