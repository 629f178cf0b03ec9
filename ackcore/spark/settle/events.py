"""Checks of DataFrames of events before any job runs: columns, types and size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ByteType, DataType, IntegerType, LongType, StringType

from ackcore.spark.base.session import is_connect, refuse_frame, refuse_mixed, task_slots

_LONG, _INT, _BYTE, _STRING = LongType(), IntegerType(), ByteType(), StringType()

_EVENT = {"root_id": _LONG, "val": _LONG, "task": _INT}
_EVENT_OPTIONS = {"ts_ms": _LONG, "reason": _STRING}
_ENTRY = {
    "root_id": _LONG,
    "val": _LONG,
    "task": _INT,
    "inits": _BYTE,
    "flags": _BYTE,
    "first_ms": _LONG,
    "last_ms": _LONG,
    "reason": _STRING,
}
_ENTRY_OPTIONS = {"status": _STRING, "reason_ms": _LONG}

#: The maximum bytes of events per shard, if Spark has an estimate: a ledger of some 500 000 roots,
#: which is settled in half a second.
_SHARD_BYTES = 32 << 20
#: The minimum bytes that are worth another task.
_TASK_BYTES = 1 << 20
#: Larger estimates are not real: without statistics Spark returns 8 EiB, or products of that.
_UNKNOWN_BYTES = 1 << 50


class Columns(NamedTuple):
    """The optional columns of a table of events, and all columns to read."""

    #: None if it depends on the rows, as for those from `combine`.
    timed: bool | None
    reasons: bool
    #: Whether `combine` has folded the rows.
    folded: bool
    #: The columns to read.
    names: list[str]


def refuse_stream(frame: DataFrame, name: str) -> None:
    """Raise if an argument is a stream."""
    if frame.isStreaming:
        raise ValueError(
            f"{name} is a streaming DataFrame, and settling ends; settle each micro-batch: "
            f"{name}.writeStream.foreachBatch(lambda batch, batch_id: ... settle(batch, ...))"
        )


def check_events(events: Any, name: str = "events") -> Columns:
    """Return the columns of a table of events, or of rows from `combine`; refuse other tables."""
    refuse_frame(events, name)
    refuse_stream(events, name)
    found = _types(events, name)
    if "inits" in found and "flags" in found:
        names = _check_types(found, name, _ENTRY, _ENTRY_OPTIONS)
        return Columns(timed=None, reasons=True, folded=True, names=names)
    names = _check_types(found, name, _EVENT, _EVENT_OPTIONS)
    return Columns("ts_ms" in found, "reason" in found, folded=False, names=names)


def check_open_before(open_before: Any, spark: SparkSession) -> list[str]:
    """Return the columns of a table of open rows; refuse any other, and one of another session."""
    refuse_frame(open_before, "open_before")
    refuse_mixed(open_before, "open_before", spark, "what it goes on with")
    refuse_stream(open_before, "open_before")
    found = _types(open_before, "open_before")
    return _check_types(found, "open_before", _ENTRY, _ENTRY_OPTIONS)


def _types(frame: DataFrame, name: str) -> dict[str, DataType]:
    found: dict[str, DataType] = {}
    for field in frame.schema.fields:
        if field.name in found:
            raise ValueError(f"{name} has two columns {field.name}; drop or rename one")
        found[field.name] = field.dataType
    return found


def _check_types(
    found: dict[str, DataType],
    name: str,
    required: Mapping[str, DataType],
    optional: Mapping[str, DataType],
) -> list[str]:
    known: dict[str, DataType] = {**required, **optional}
    for column, expected in known.items():
        if column not in found:
            if column in required:
                raise ValueError(
                    f"{name} must have a column {column} {expected.simpleString()}, "
                    f"got {', '.join(found) or 'no columns'}"
                )
        elif found[column] != expected:
            cast = f'cast it first: .withColumn("{column}", col("{column}").cast("{{}}"))'
            if column == "ts_ms" and found[column].typeName().startswith("timestamp"):
                # A cast would return seconds without an error.
                cast = 'make it milliseconds first: .withColumn("ts_ms", unix_millis("ts_ms"))'
            raise TypeError(
                f"{name}: {column} must be {expected.simpleString()}, got "
                f"{found[column].simpleString()}; {cast.format(expected.simpleString())}"
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
    exceed 32 MiB, it is a multiple of the cores, so that all cores have the same number.  If the
    size is unknown, it is two per core.
    """
    cores = task_slots(spark)
    if size is None:
        return 2 * cores
    if size < cores * _SHARD_BYTES:
        return max(1, min(cores, math.ceil(size / _TASK_BYTES)))
    return cores * math.ceil(size / (cores * _SHARD_BYTES))
