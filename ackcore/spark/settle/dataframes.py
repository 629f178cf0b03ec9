"""Settling tables of ack events on Spark: which tuple trees finished, failed, or are still open.

Spark only transports the data.  Each task folds its partition natively, if that reduces its rows,
and packs the result into a few blobs per shard.  Only blobs are shuffled.  The ledger of a shard
merges them and settles each root once.

The result is a lazy DataFrame, and **each action computes it again**, with the same outcomes.
Persist or write it if you read it twice.  Do the same with open rows that you pass to a later call;
otherwise that call computes this one again.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from ackcore import _columns
from ackcore._arguments import MAX_SHARDS
from ackcore._error_hints import naming_arguments
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.session import is_connect, refuse_frame, refuse_mixed, task_slots
from ackcore.spark.base.sources import has_fixed_order
from ackcore.spark.base.versions import repartition_by_id
from ackcore.spark.base.workers import check_workers
from ackcore.spark.settle.wire import BLOB_DDL
from ackcore.spark.settle.worker_functions import (
    COMBINED_DDL,
    ResultForm,
    combine_events,
    entries_packer,
    events_packer,
    settle_blobs,
)

_EVENT = {"root_id": "bigint", "val": "bigint", "task": "int"}
_EVENT_OPTIONS = {"ts_ms": "bigint", "reason": "string"}
_ENTRY = dict(column.split() for column in COMBINED_DDL.split(", "))
_ENTRY_OPTIONS = {"status": "string", "reason_ms": _ENTRY.pop("reason_ms")}

#: The maximum bytes of events per shard, if Spark has an estimate: a ledger of some 500 000 roots,
#: which is settled in half a second.
_SHARD_BYTES = 32 << 20
#: The minimum bytes that are worth another task.
_TASK_BYTES = 1 << 20
#: Larger estimates are not real: without statistics Spark returns 8 EiB, or products of that.
_UNKNOWN_BYTES = 1 << 50


@naming_arguments
def combine(events: DataFrame) -> DataFrame:
    """Fold each partition's events into one row per root, without a shuffle and without statuses.

    Parameters
    ----------
    events : pyspark.sql.DataFrame
        The events of `settle`, with the same columns.

    Returns
    -------
    pyspark.sql.DataFrame
        ``root_id, val, task, inits, flags, first_ms, last_ms, reason, reason_ms``. `settle` accepts
        it in place of events, or as ``open_before``. A root with events in several partitions has
        several rows.

    Raises
    ------
    TypeError, ValueError
        If `settle` would refuse the events, or if they come from `combine`.
    """
    columns = _check_events(events)
    if columns.folded:
        raise ValueError("events are the result of combine(); pass them to settle() directly")
    check_workers(events.sparkSession)
    fold = combine_events(
        seed=secrets.randbits(64), timed=bool(columns.timed), reasons=columns.reasons
    )
    return events.select(columns.names).mapInArrow(fold, COMBINED_DDL)


@naming_arguments
def settle(
    events: DataFrame,
    *,
    shards: int | None = None,
    open_before: DataFrame | None = None,
    now_ms: int | None = None,
    timeout_s: float | None = None,
) -> DataFrame:
    """Settle the roots in a table of ack events.

    Parameters
    ----------
    events : pyspark.sql.DataFrame
        The columns ``root_id bigint, val bigint, task int``, in any order, and optionally ``ts_ms
        bigint`` (the time of the event) and ``reason string`` (pass null except for FAILs: a reason
        of another message may be kept, too). A task >= 0 is an INIT by that spout task with its
        init val, -1 an ACK with its ack val, -2 a FAIL and -3 a RESET; the vals of the last two are
        ignored. Or the result of `combine`.
    shards : int, optional
        The number of ledgers among which roots are divided, each settled by one task. By default
        one for each core, more if one had over 32 MiB of events, fewer if one had less than 1 MiB;
        two for each core if Spark does not know the size.
    open_before : pyspark.sql.DataFrame, optional
        An earlier result, or one of `combine`. Rows of another status than ``OPEN`` are ignored.
    now_ms : int, optional
        The time in milliseconds from which the time-out is measured; by default that of the call.
    timeout_s : float, optional
        The age of an open root's last message, in seconds, beyond which the root is decided as
        EXPIRED, or as ORPHAN if it never had an INIT.

    Returns
    -------
    pyspark.sql.DataFrame
        ``root_id bigint, status string, task int, val bigint, inits tinyint, flags tinyint,
        first_ms bigint, last_ms bigint, reason string``: one row per root, in any order. The status
        is ACKED, FAILED, EXPIRED, ORPHAN, ANOMALY (several INITs) or OPEN. The earliest of several
        reasons by (time, text) is kept; one from ``open_before`` stays.

    Raises
    ------
    TypeError
        If ``events`` is not a DataFrame, or a column has another type; or if one of ``events``
        and ``open_before`` is of Spark Connect, and the other is not.
    ValueError
        If ``events`` is streaming (settle each micro-batch in ``foreachBatch``), a column is
        missing or unknown, or ``timeout_s`` was given without times. Nulls, and tasks below -3,
        raise when the job runs, with their place.
    WorkerPythonError
        If the workers' Python cannot run ackcore.

    Examples
    --------
    >>> outcomes = settle(events, open_before=previous, timeout_s=60).persist()
    >>> outcomes.where("status = 'FAILED'").show()
    >>> previous = outcomes.where("status = 'OPEN'")
    """
    columns = _check_events(events)
    rows = events.select(columns.names)
    settling = Settling(
        events.sparkSession,
        timed=columns.timed,
        reasons=columns.reasons,
        shards=shards,
        open_before=open_before,
        now_ms=now_ms,
        timeout_s=timeout_s,
        size=lambda: estimated_bytes(rows),
    )
    if columns.folded:
        pack = entries_packer(settling.shards, seed=settling.seed, name="events")
    else:
        pack = events_packer(
            settling.shards,
            seed=settling.seed,
            timed=bool(columns.timed),
            reasons=columns.reasons,
            fixed_order=has_fixed_order(rows),
        )
    return settling.settle(rows.mapInArrow(pack, BLOB_DDL))


class Settling:
    """The checked arguments of `settle` or `settle_parquet`, and the steps that both share.

    ``timed``: whether the events have times; None if that depends on the rows. ``reasons``: whether
    the events may have reasons. ``size``: returns the bytes of the events, or None if they are
    unknown; called if ``shards`` is None.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        timed: bool | None,
        reasons: bool,
        shards: int | None,
        open_before: DataFrame | None,
        now_ms: int | None,
        timeout_s: float | None,
        size: Callable[[], int | None],
    ) -> None:
        self._timed = timed
        self._open_before = open_before
        self._open_names: list[str] = []
        if open_before is not None:
            refuse_frame(open_before, "open_before")
            refuse_mixed(open_before, "open_before", spark, "events")
            _refuse_stream(open_before, "open_before")
            found = _types(open_before, "open_before")
            self._open_names = _check_types(found, "open_before", _ENTRY, _ENTRY_OPTIONS)
        self.timeout_ms = _columns.timeout_ms(timeout_s)
        if self.timeout_ms is not None and timed is False:
            raise ValueError(
                "timeout_s was given, but events has no times; add a column ts_ms bigint "
                "(milliseconds), or omit timeout_s"
            )
        # Fixed here, so that each action on the result makes the same decisions.
        self.now_ms = _columns.as_ms(wall_clock_ms() if now_ms is None else now_ms, "now_ms")
        self.seed = secrets.randbits(64)
        # Earlier open rows may have reasons even if the events have none.
        self.form = ResultForm(timed is not False, reasons or open_before is not None)
        if shards is None:
            self.shards = default_shards(spark, size())
        else:
            self.shards = _columns.as_count(shards, "shards", 1, MAX_SHARDS)
        check_workers(spark)

    def settle(self, blobs: DataFrame) -> DataFrame:
        """Settle blobs of events together with the earlier open rows; return the lazy result."""
        if self._open_before is not None:
            pack = entries_packer(
                self.shards, seed=self.seed, timed=self._timed, name="open_before"
            )
            rows = self._open_before.select(self._open_names)
            blobs = blobs.union(rows.mapInArrow(pack, BLOB_DDL))
        settle_shard = settle_blobs(
            seed=self.seed, now_ms=self.now_ms, timeout_ms=self.timeout_ms, form=self.form
        )
        # Partition n has shard n; if Spark coalesces small partitions, they stay whole.
        shards = repartition_by_id(blobs, self.shards, "dest")
        return self.form.documented(shards.mapInArrow(settle_shard, self.form.ddl))


class _Columns(NamedTuple):
    """The columns of a table of events.

    ``timed``, ``reasons``: whether they have times and reasons; ``timed`` is None if that depends
    on the rows. ``folded``: whether `combine` has folded the rows. ``names``: the columns to read.
    """

    timed: bool | None
    reasons: bool
    folded: bool
    names: list[str]


def _refuse_stream(frame: DataFrame, name: str) -> None:
    if frame.isStreaming:
        raise ValueError(
            f"{name} must not be a streaming DataFrame; settle each micro-batch: "
            f"{name}.writeStream.foreachBatch(lambda batch, batch_id: ... settle(batch, ...))"
        )


def _check_events(events: Any) -> _Columns:
    """Return the columns of a table of events, or of rows from `combine`.

    Raises TypeError or ValueError for a stream, and for other columns or types.
    """
    refuse_frame(events, "events")
    _refuse_stream(events, "events")
    found = _types(events, "events")
    if "inits" in found and "flags" in found:
        names = _check_types(found, "events", _ENTRY, _ENTRY_OPTIONS)
        return _Columns(timed=None, reasons=True, folded=True, names=names)
    names = _check_types(found, "events", _EVENT, _EVENT_OPTIONS)
    return _Columns("ts_ms" in found, "reason" in found, folded=False, names=names)


def _types(frame: DataFrame, name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for field in frame.schema.fields:
        if field.name in found:
            raise ValueError(f"{name} has two columns {field.name}; drop or rename one")
        found[field.name] = field.dataType.simpleString()
    return found


def _check_types(
    found: dict[str, str], name: str, required: Mapping[str, str], optional: Mapping[str, str]
) -> list[str]:
    known: dict[str, str] = {**required, **optional}
    for column, expected in known.items():
        if column not in found:
            if column in required:
                raise ValueError(
                    f"{name} has no column {column}, of type {expected}; its columns are "
                    f"{', '.join(found) or 'none'}"
                )
        elif found[column] != expected:
            cast = f'cast it first: .withColumn("{column}", col("{column}").cast("{{}}"))'
            if column == "ts_ms" and found[column].startswith("timestamp"):
                # A cast would return seconds without an error.
                cast = 'make it milliseconds first: .withColumn("ts_ms", unix_millis("ts_ms"))'
            raise TypeError(
                f"{name}: column {column} must be of type {expected}, got {found[column]}; "
                f"{cast.format(expected)}"
            )
    unknown = [column for column in found if column not in known]
    if unknown:
        raise ValueError(
            f"{name} must have no columns but {', '.join(known)}, got {', '.join(unknown)}; "
            f"drop them first: .drop({', '.join(map(repr, unknown))})"
        )
    return [column for column in known if column in found]


def estimated_bytes(frame: DataFrame) -> int | None:
    """Return Spark's estimate of a table's size in bytes, or None without an estimate."""
    if is_connect(frame):
        return None
    size = int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
    return None if size >= _UNKNOWN_BYTES else size


def default_shards(spark: SparkSession, size: int | None) -> int:
    """Return the default number of shards for events of ``size`` bytes.

    It is one shard per core if each gets at least 1 MiB, and fewer for less data.  If shards would
    exceed 32 MiB, it is a multiple of the cores, so that each core gets the same number of shards.
    If the size is unknown, it is two per core.
    """
    cores = task_slots(spark)
    if size is None:
        return 2 * cores
    if size < cores * _SHARD_BYTES:
        return max(1, min(cores, math.ceil(size / _TASK_BYTES)))
    return cores * math.ceil(size / (cores * _SHARD_BYTES))
