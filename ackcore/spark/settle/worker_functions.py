"""Packing and settling on workers: functions of a partition, for ``mapInArrow`` and RDDs.

`ackcore.spark.settle` combines them like this::

    seed = secrets.randbits(64)                                  # once per job, on the driver
    blobs = events.mapInArrow(events_packer(8, seed=seed), BLOB_DDL)
    shards = blobs.repartitionById(8, "dest")                    # blobs, not rows, are shuffled
    settled = shards.mapInArrow(settle_blobs(seed=seed), SETTLED_DDL)

You may union any number of packed tables before the shuffle, if they have equally many shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import DataFrame

from ackcore import _columns
from ackcore._arrow.arrow_tables import (
    STATUS_NAMES,
    entries_from_batch,
    entries_to_batch,
    integers,
    settled_to_batch,
)
from ackcore._arrow.lossless import array_of
from ackcore._backend import Ledger, sort_by_shard
from ackcore._error_hints import naming_arguments
from ackcore._records import OPEN, RESET, Entries, Int64s, Settled
from ackcore.spark.base.arrow_batches import Batches, MapInArrow
from ackcore.spark.base.reasons import (
    NO_TIME,
    SHOWN_BEFORE,
    earliest,
    look_up,
    one_array,
    reasons_of,
)
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.settle import wire
from ackcore.spark.settle.packing import Packer, fold, new_ledger
from ackcore.spark.settle.wire import Events

#: The columns of the results of `settle` and of `combine`.
SETTLED_DDL = (
    "root_id bigint, status string, task int, val bigint, inits tinyint, flags tinyint, "
    "first_ms bigint, last_ms bigint, reason string"
)
COMBINED_DDL = (
    "root_id bigint, val bigint, task int, inits tinyint, flags tinyint, "
    "first_ms bigint, last_ms bigint, reason string, reason_ms bigint"
)
#: The columns of events; the first three are required.
EVENT_TYPES = {
    "root_id": pa.int64(),
    "val": pa.int64(),
    "task": pa.int32(),
    "ts_ms": pa.int64(),
    "reason": pa.string(),
}
_SETTLED_NAMES = [column.split()[0] for column in SETTLED_DDL.split(", ")]

#: The number of rows in one batch of results.
RESULT_ROWS = 1 << 17
#: The number of an RDD's rows that are processed together.
_TUPLE_ROWS = 1 << 16


# For columns declared not null the JVM checks no rows.
_ALWAYS, _TIMES = ("root_id", "marks", "val"), ("first_ms", "last_ms")

# The bits of marks: task | flags | inits | status.  The task is the highest, as it may be -1.
_INITS, _FLAGS, _TASK = 4, 8, 12

#: Statuses by decreasing frequency, the order in which the SQL expression compares them.
_STATUSES = ("ACKED", "OPEN", "FAILED", "EXPIRED", "ORPHAN", "ANOMALY")


class ResultForm(NamedTuple):
    """The columns in which settled rows are sent from Python to the JVM.

    They are fewer than those of `SETTLED_DDL`: ``marks`` has four of them, as bits. ``times`` and
    ``reasons``: whether their columns are sent.
    """

    times: bool
    reasons: bool

    @property
    def ddl(self) -> str:
        """These columns, as the schema that ``mapInArrow`` takes."""
        types = {pa.int64(): "bigint", pa.string(): "string"}
        return ", ".join(
            f"{field.name} {types[field.type]}{'' if field.nullable else ' not null'}"
            for field in self._schema
        )

    @property
    def _schema(self) -> pa.Schema:
        fields = [pa.field(name, pa.int64(), nullable=False) for name in _ALWAYS]
        if self.times:
            fields += [pa.field(name, pa.int64()) for name in _TIMES]
        if self.reasons:
            fields.append(pa.field("reason", pa.string()))
        return pa.schema(fields)

    def batch(self, settled: Settled, texts: pa.Array) -> pa.RecordBatch:
        """Return settled rows and their reasons as a batch of these columns."""
        n = len(settled)
        marks = settled.tasks.astype(np.int64)
        marks <<= _TASK - _FLAGS
        marks |= settled.flags
        marks <<= _FLAGS - _INITS
        marks |= settled.inits
        marks <<= _INITS
        marks |= settled.statuses
        arrays = [pa.array(column) for column in (settled.root_ids, marks, settled.vals)]
        if self.times:
            for times in (settled.first_ms, settled.last_ms):
                arrays.append(pa.nulls(n, pa.int64()) if times is None else pa.array(times))
        if self.reasons:
            arrays.append(texts)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def documented(self, rows: DataFrame) -> DataFrame:
        """Return a DataFrame with the columns of `SETTLED_DDL` for rows with these columns."""
        statuses = " ".join(f"when {STATUS_NAMES.index(name)} then '{name}'" for name in _STATUSES)
        columns = {
            "root_id": "root_id",
            "status": f"case marks & 15 {statuses} end",
            "task": f"cast(shiftright(marks, {_TASK}) as int)",
            "val": "val",
            "inits": f"cast(shiftright(marks, {_INITS}) & 15 as tinyint)",
            "flags": f"cast(shiftright(marks, {_FLAGS}) & 15 as tinyint)",
            "first_ms": "first_ms" if self.times else "cast(null as bigint)",
            "last_ms": "last_ms" if self.times else "cast(null as bigint)",
            "reason": "reason" if self.reasons else "cast(null as string)",
        }
        # The null makes each column nullable, so that the schema is always the same.  Spark's
        # optimizer removes it.  As text, because Column objects would take some 500 JVM calls.
        return rows.selectExpr(
            *(f"if(false, null, {value}) as {name}" for name, value in columns.items())
        )


def read_events(
    batches: Batches,
    timed: bool,
    reasons: bool,
    source: str = "events",
    *,
    first_row: int = 0,
    part: str | None = None,
) -> Iterator[tuple[Events, pa.Table | None]]:
    """Yield each batch's events, and a table of the reasons among them or None if there are none.

    Raises ValueError if a column has nulls, or a task is below -3; the error names the row.

    ``batches``: batches with ``root_id``, ``val``, ``task``, in any order. ``timed``, ``reasons``:
    whether there are columns ``ts_ms`` and ``reason``. ``source``: the table's name in errors.
    ``first_row``: the number of the first row within ``part``, for errors. ``part``: by default the
    Spark partition.
    """
    row = first_row
    for batch in batches:
        try:
            events = _events(batch, timed)
        except ValueError as error:
            context = TaskContext.get()
            where = part or f"partition {0 if context is None else context.partitionId()}"
            where = f"row 0 is row {row} of {where}" if row else f"of {where}"
            raise ValueError(f"{source}: {error} ({where})") from None
        found = None
        if reasons:
            times: Int64s | int = NO_TIME if events.times_ms is None else events.times_ms
            found = reasons_of(events.root_ids, times, batch.column("reason"))
        yield events, found
        row += len(batch)


def _events(batch: pa.RecordBatch, timed: bool) -> Events:
    names = ("root_id", "val", "task", *(["ts_ms"] if timed else ()))
    events = Events(*(integers(batch.column(name), name, EVENT_TYPES[name]) for name in names))
    if len(events.tasks) and events.tasks.min() < RESET:
        _columns.check_kinds(events.tasks)
    return events


def events_packer(
    shards: int, *, seed: int, timed: bool = False, reasons: bool = False, fixed_order: bool = False
) -> MapInArrow:
    """Return a function that folds events and packs them as blobs by shard.

    The function maps batches with ``root_id bigint, val bigint, task int``, in any order of
    columns, to batches of `BLOB_DDL`.

    ``shards``: the number of shards. ``seed``: 64 random bits, drawn once per job and not per task.
    ``timed``, ``reasons``: whether the events have columns ``ts_ms`` and ``reason``.
    ``fixed_order``: whether a partition's rows come in the same order if its task runs again, as
    they do from files but not from a shuffle.
    """

    def pack(batches: Batches) -> Batches:
        packer = Packer(shards, seed=seed, timed=timed, fixed_order=fixed_order)
        yield from packer.pack(read_events(batches, timed, reasons))

    return pack


def entries_packer(
    shards: int, *, seed: int, timed: bool | None = None, name: str = "entries"
) -> MapInArrow:
    """Return a function that packs folded rows as blobs by shard.

    The function maps batches with the columns of `SETTLED_DDL` or `COMBINED_DDL` to batches of
    `BLOB_DDL`. Rows with a ``status`` other than ``OPEN`` are left out: they are decided.

    ``shards``: the number of shards. ``seed``: the 64 random bits of the job. ``timed``: whether
    the events that are settled together with these rows have times; None if the first rows decide
    that. Rows that differ raise ValueError. ``name``: the table's name in errors.
    """

    def pack(batches: Batches) -> Batches:
        packer = None
        have_times = timed
        for batch in batches:
            still_open = batch
            if "status" in batch.schema.names:
                still_open = batch.filter(pc.equal(batch.column("status"), OPEN.name))
            if len(still_open) == 0:
                continue
            entries = entries_from_batch(still_open, name)
            if have_times is None:
                have_times = entries.first_ms is not None
            if (entries.first_ms is not None) != have_times:
                _refuse_unlike_times(name if have_times else "events")
            if packer is None:
                # These rows came through a shuffle, so their order may change.
                packer = Packer(shards, seed=seed, timed=have_times, fixed_order=False)
            yield from packer.add_entries(entries)
            yield from packer.add_reasons(_entry_reasons(still_open, entries.root_ids))
        if packer is not None:
            yield from packer.finish()

    return pack


def settle_blobs(
    *,
    seed: int,
    now_ms: int | None = None,
    timeout_ms: int | None = None,
    form: ResultForm | None = None,
) -> MapInArrow:
    """Return a function that settles the blobs of one shard, or of several whole shards.

    The function maps batches of `BLOB_DDL` to batches with one row for each root, also for open
    ones.

    ``seed``: the seed that was passed to `events_packer`. ``now_ms``: the time from which a
    time-out is measured, by default the time when the blobs have been read. ``timeout_ms``: the
    time-out; None for none. ``form``: the columns of the result; by default those of `SETTLED_DDL`.
    """

    def settle(batches: Batches) -> Batches:
        ledger: Ledger | None = None
        timed = False
        reasons = []
        for batch in batches:
            parts = list(wire.unpack(batch))
            for rows in parts:
                if isinstance(rows, pa.Table):
                    reasons.append(rows)
                    continue
                times = rows.times_ms if isinstance(rows, Events) else rows.first_ms
                if ledger is None:
                    timed = times is not None
                    # The first batch has most of the rows.
                    ledger = new_ledger(seed, timed, _roots_in(parts))
                if (times is not None) != timed:
                    _refuse_unlike_times("one of the tables")
                if isinstance(rows, Events):
                    fold(ledger, rows)
                else:
                    ledger.merge(rows)
        if ledger is not None:
            yield from results(ledger, timed, earliest(reasons), now_ms, timeout_ms, form)

    return settle


#: The factor of a multiplicative hash, and the mask of six of its high bits.
_ODD, _ONE_IN_64 = np.int64(0x1E3779B97F4A7C15), np.int64(63 << 57)


def _roots_in(parts: Sequence[Events | Entries | pa.Table]) -> int:
    """Estimate the number of distinct roots, from one root in 64, chosen by a hash."""
    columns = [rows.root_ids for rows in parts if not isinstance(rows, pa.Table)]
    roots: Int64s = np.concatenate([ids[(ids * _ODD) & _ONE_IN_64 == 0] for ids in columns])
    return 64 * len(distinct(roots))


def _refuse_unlike_times(untimed: str) -> NoReturn:
    raise ValueError(
        "tables that are settled together must all have times, or none: "
        f"{untimed} has none; add ts_ms to all events, or to none"
    )


def combine_events(*, seed: int, timed: bool = False, reasons: bool = False) -> MapInArrow:
    """Return a function that folds a partition's events into batches of `COMBINED_DDL`.

    ``seed``: 64 random bits, drawn once per job. ``timed``, ``reasons``: whether the events have
    columns ``ts_ms`` and ``reason``.
    """

    def combine(batches: Batches) -> Batches:
        ledger = new_ledger(seed, timed)
        texts = []
        for events, found in read_events(batches, timed, reasons):
            fold(ledger, events)
            if found is not None:
                texts.append(found)
        kept = earliest(texts)
        entries = ledger.entries()
        del ledger
        # In an order that is the same on every processor, because a shuffle may follow.
        entries = entries.take(sort_by_shard(entries.root_ids, 1)[0])
        batch = entries_to_batch(entries)
        for start in range(0, len(batch), RESULT_ROWS):
            roots = entries.root_ids[start : start + RESULT_ROWS]
            text, ms = look_up(kept, roots)
            rows = batch.slice(start, RESULT_ROWS)
            yield rows.append_column("reason", text).append_column("reason_ms", ms)

    return combine


def _entry_reasons(batch: pa.RecordBatch, root_ids: Int64s) -> pa.Table | None:
    texts = batch.column("reason")
    if "reason_ms" not in batch.schema.names:
        return reasons_of(root_ids, SHOWN_BEFORE, texts)
    times = pc.fill_null(batch.column("reason_ms"), SHOWN_BEFORE)
    return reasons_of(root_ids, times.to_numpy(), texts)


def results(
    ledger: Ledger,
    timed: bool,
    reasons: pa.Table,
    now_ms: int | None,
    timeout_ms: int | None,
    form: ResultForm | None = None,
) -> Batches:
    """Settle the roots of a ledger. Yield batches with a row for each root, also open ones.

    ``timed``: whether the ledger has times. ``reasons``: a table of `REASON_SCHEMA`. ``now_ms``,
    ``timeout_ms``: the time from which the time-out is measured, and the time-out or None.
    ``form``: the columns of the result; None for those of `SETTLED_DDL`. Raises ValueError if there
    is a time-out and no times.

    The rows come in the order of the ledger's table, which depends on the processor.  Spark's
    checksum of a later shuffle ignores the order (``spark.sql.shuffle.orderIndependentChecksum``),
    since a row is one root here, not a blob.
    """
    if timeout_ms is not None and not timed:
        raise ValueError(
            "timeout_s was given, but the events have no times; add ts_ms, or omit timeout_s"
        )
    decided = ledger.settle(now_ms, timeout_ms)
    still_open = ledger.entries()
    names = np.full(len(still_open), OPEN, np.uint8)
    columns = still_open.columns()
    del columns["ages"]
    for settled in (decided, Settled(statuses=names, **columns)):
        for start in range(0, len(settled), RESULT_ROWS):
            rows = settled.take(slice(start, start + RESULT_ROWS))
            texts, _ = look_up(reasons, rows.root_ids)
            if form is not None:
                yield form.batch(rows, texts)
                continue
            batch = settled_to_batch(rows).append_column("reason", texts)
            yield batch.select(_SETTLED_NAMES)


@naming_arguments
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
        The arguments of `settle`; ``now_ms`` is by default the time when the partition has been
        read. A time-out requires times.

    Yields
    ------
    tuple
        ``(root_id, status, task, val, inits, flags, first_ms, last_ms, reason)``, for each root.

    Raises
    ------
    TypeError, ValueError
        If a row is not such a tuple, or ``timeout_s`` was given and rows have no times.
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
    remaining = iter(rows)
    while chunk := list(islice(remaining, _TUPLE_ROWS)):
        batch = _tuple_batch(chunk)
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
            columns[name] = one_array(array_of(values, kind))
        except ValueError as error:
            raise TypeError(f"rows: {name} must be {kind}: {error}") from None
    return pa.RecordBatch.from_pydict(columns)


def _has_times(batch: pa.RecordBatch) -> bool:
    if "ts_ms" not in batch.schema.names:
        return False
    times = batch.column("ts_ms")
    return bool(times.null_count < len(times))
