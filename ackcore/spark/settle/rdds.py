"""Settling of each partition of an RDD on its own: ``rdd.mapPartitions(settle_partitions)``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa

from ackcore import _columns
from ackcore._backend import Ledger
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.reasons import earliest
from ackcore.spark.settle.packing import fold, new_ledger
from ackcore.spark.settle.worker_functions import EVENT_TYPES, read_events, results

#: The number of rows that are processed together.
TUPLE_ROWS = 1 << 16


def settle_partitions(
    rows: Iterable[Any], *, now_ms: int | None = None, timeout_s: float | None = None
) -> Iterator[tuple[Any, ...]]:
    """Settle each partition of an RDD by itself: ``rdd.mapPartitions(settle_partitions)``.

    All messages of a root must be in one partition; ``rdd.partitionBy`` the root id ensures this.

    Parameters
    ----------
    rows : iterable of tuple
        ``(root_id, val, task)``, ``(root_id, val, task, ts_ms)`` or ``(root_id, val, task, ts_ms,
        reason)``, all of one length. ``ts_ms`` must be None in all or in none; ``reason`` may be
        None.
    now_ms, timeout_s : optional
        The arguments of `settle`. They require times.

    Yields
    ------
    tuple
        ``(root_id, status, task, val, inits, flags, first_ms, last_ms, reason)``, for each root.

    Raises
    ------
    TypeError, ValueError
        If a row is not such a tuple.
    """
    if not isinstance(rows, Iterable):
        raise TypeError(
            f"rows must be an iterable of tuples, got {type(rows).__name__}; "
            "call it as rdd.mapPartitions(settle_partitions)"
        )
    overdue_ms = _columns.timeout_ms(timeout_s)
    ledger: Ledger | None = None
    timed = False
    texts = []
    read = 0
    for batch in _tuple_batches(rows):
        if ledger is None:
            timed = _has_times(batch)
            # Its bytes are never compared, so the seed may be random.
            ledger = new_ledger(None, timed)
        if not timed and _has_times(batch):
            raise ValueError(
                f"ts_ms must be None in all rows or in none; it is None in the first {read} rows, "
                "and not in a later one"
            )
        with_reasons = "reason" in batch.schema.names
        some = read_events(iter([batch]), timed, with_reasons, "rows", first_row=read)
        for events, found in some:
            fold(ledger, events)
            if found is not None:
                texts.append(found)
        read += len(batch)
    if ledger is not None:
        for batch in results(ledger, timed, earliest(texts), now_ms, overdue_ms):
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def _tuple_batches(rows: Iterable[Any]) -> Batches:
    remaining = iter(rows)
    while chunk := list(islice(remaining, TUPLE_ROWS)):
        yield _tuple_batch(chunk)


def _tuple_batch(rows: list[Any]) -> pa.RecordBatch:
    try:
        widths = {len(row) for row in rows}
    except TypeError as error:
        raise TypeError(
            f"rows must be tuples (root_id, val, task[, ts_ms[, reason]]): {error}"
        ) from None
    if len(widths) != 1 or not 3 <= min(widths) <= 5:
        raise ValueError(
            "rows must be tuples (root_id, val, task[, ts_ms[, reason]]) of one length, "
            f"got lengths {sorted(widths)}"
        )
    columns = {}
    for (name, kind), values in zip(EVENT_TYPES.items(), zip(*rows, strict=True), strict=False):
        try:
            columns[name] = pa.array(values, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise TypeError(f"rows: {name} must be {kind}: {error}") from None
    return pa.RecordBatch.from_pydict(columns)


def _has_times(batch: pa.RecordBatch) -> bool:
    if "ts_ms" not in batch.schema.names:
        return False
    times = batch.column("ts_ms")
    return bool(times.null_count < len(times))
