"""Which DataFrames are taken for events, told before any job runs, and what is known of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import ByteType, DataType, IntegerType, LongType, StringType

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

#: Bytes of events that one shard is given, where Spark can tell how many there are: a ledger of
#: some 500 000 roots, which is settled in half a second.
_SHARD_BYTES = 32 << 20
#: Less than this is not worth another task.
_TASK_BYTES = 1 << 20
#: Spark's estimate for what it knows nothing of is 8 EiB, and products of that.
_UNKNOWN_BYTES = 1 << 50

#: Nodes of a plan that leave the rows of a partition in their order, or read them in one.
_FILE_SCAN = re.compile(r"\.v2\.(parquet|orc|csv|json|text|avro)\.")
_ORDERED_NODES = frozenset(
    {
        "ArrowEvalPython",
        "BatchEvalPython",
        "Expand",
        "Filter",
        "Generate",
        "LocalRelation",
        "MapInArrow",
        "MapInPandas",
        "Project",
        "Range",
        "Union",
    }
)


class Columns(NamedTuple):
    """What is in a table of events besides root ids, values and tasks."""

    #: None where only the rows can tell: those that `combine` made.
    timed: bool | None
    reasons: bool
    #: Whether the rows were folded before, by `combine`.
    folded: bool
    #: The columns to read.
    names: list[str]


def refuse_frame(frame: Any, name: str) -> None:
    """Raise if an argument is not a DataFrame of Spark's classic engine."""
    module = type(frame).__module__
    if module.startswith("pyspark.sql.connect"):
        raise TypeError(
            f"{name} is a DataFrame of Spark Connect, which shows no plan and no cluster; "
            "use a classic session (SparkSession.builder.master(...))"
        )
    if not isinstance(frame, DataFrame):
        raise TypeError(
            f"{name} must be a pyspark DataFrame, got {type(frame).__name__}; "
            "spark.createDataFrame() makes one"
        )
    _refuse_stopped(frame.sparkSession, f"{name} is a DataFrame of a session")


def refuse_stream(frame: DataFrame, name: str) -> None:
    """Raise if an argument is a stream."""
    if frame.isStreaming:
        raise ValueError(
            f"{name} is a streaming DataFrame, and settling ends; settle each micro-batch: "
            f"{name}.writeStream.foreachBatch(lambda batch, batch_id: ... settle(batch, ...))"
        )


def refuse_session(spark: Any) -> None:
    """Raise if an argument is not a classic SparkSession."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise TypeError(
            "spark is a session of Spark Connect, which shows no cluster; "
            "use a classic one (SparkSession.builder.master(...))"
        )
    if not isinstance(spark, SparkSession):
        raise TypeError(
            f"spark must be a SparkSession, got {type(spark).__name__}; "
            "SparkSession.builder.getOrCreate() gives one"
        )
    _refuse_stopped(spark, "spark is a session")


def _refuse_stopped(spark: SparkSession, what: str) -> None:
    """Raise if a session was stopped, or its JVM has ended."""
    java: Any = spark.sparkContext._jsc
    try:
        if java is not None and not java.sc().isStopped():
            return
    except (Py4JError, OSError):
        pass  # nobody answers any more
    raise ValueError(
        f"{what} that was stopped; SparkSession.builder.getOrCreate() makes another, and what is "
        "read with it has to be read anew"
    )


def refuse_no_session() -> None:
    """Raise if there is no session, without which there are no Columns."""
    active = SparkContext._active_spark_context
    if active is None or active._jsc is None:
        raise ValueError(
            "there must be a SparkSession where Columns are made, and there is none, or it was "
            "stopped; SparkSession.builder.getOrCreate() makes one"
        )


def check_events(events: Any, name: str = "events") -> Columns:
    """Return what is in a table of events, or of rows that `combine` made; refuse any other."""
    refuse_frame(events, name)
    refuse_stream(events, name)
    found = _types(events, name)
    if "inits" in found and "flags" in found:
        names = _check_types(found, name, _ENTRY, _ENTRY_OPTIONS)
        return Columns(timed=None, reasons=True, folded=True, names=names)
    names = _check_types(found, name, _EVENT, _EVENT_OPTIONS)
    return Columns("ts_ms" in found, "reason" in found, folded=False, names=names)


def check_open_before(open_before: Any) -> list[str]:
    """Return the columns of a table of open rows; refuse any other."""
    refuse_frame(open_before, "open_before")
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
                # A cast would give seconds, and no error.
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
    """Return Spark's estimate of a table's size, or None if it has none."""
    size = int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
    return None if size >= _UNKNOWN_BYTES else size


def default_shards(spark: SparkSession, size: int | None) -> int:
    """Return a sensible number of shards for so many bytes of events.

    A shard for each core, if there is a MiB for each; more where a shard would have more than 32
    MiB; and so many that the cores have the same number.  If the size is unknown, two per core.
    """
    cores = max(1, spark.sparkContext.defaultParallelism)
    if size is None:
        return 2 * cores
    if size < cores * _SHARD_BYTES:
        return max(1, min(cores, math.ceil(size / _TASK_BYTES)))
    return cores * math.ceil(size / (cores * _SHARD_BYTES))


def has_fixed_rows(frame: DataFrame) -> bool:
    """Whether a source computes the same rows if it is read again, as far as Spark can tell.

    Not if it asks for the time or for chance, nor if Python code has a part in it, of which nobody
    knows what it answers: functions, data sources, and RDDs, which are not told apart by what
    computes them.  (That of a list is one, too.)
    """
    known = _FIXED_ROWS.get(frame)
    if known is None:
        known = _FIXED_ROWS[frame] = _computes_alike(frame)
    return known


#: A stream's source is asked about in each micro-batch, and a plan does not change.
_FIXED_ROWS: WeakKeyDictionary[DataFrame, bool] = WeakKeyDictionary()


_HAVE_TABLES = ("StreamingRelationV2", "DataSourceV2Relation")


def _computes_alike(frame: DataFrame) -> bool:
    plan = frame._jdf.queryExecution().analyzed()
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    # The nodes of a subquery are not among those that are looked at below.
    may_differ = (patterns.PYTHON_UDF(), patterns.CURRENT_LIKE(), patterns.PLAN_EXPRESSION())
    if not plan.deterministic() or any(map(plan.containsPattern, may_differ)):
        return False
    for node in _nodes(plan):
        name = node.nodeName()
        if name == "LogicalRDD" and not node.rdd().isCheckpointed():
            return False
        if name in _HAVE_TABLES and ".python." in node.table().getClass().getName():
            return False
    return True


def _nodes(plan: Any) -> Iterator[Any]:
    """Yield a plan and all below it."""
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        yield node
        children = node.children()
        nodes += [children.apply(i) for i in range(children.size())]


def has_fixed_order(frame: DataFrame) -> bool:
    """Whether the rows of each partition come in the same order if it is computed again.

    Said only of plans that read files, ranges and local tables and go row by row; a shuffle hands
    out its rows as they come in, and of what is cached nothing is known.
    """
    for node in _nodes(frame._jdf.queryExecution().optimizedPlan()):
        name = node.nodeName()
        if name == "LogicalRDD":
            if node.rdd().outputDeterministicLevel().toString() != "DETERMINATE":
                return False
        elif name == "LogicalRelation":
            # Others, such as JDBC's, promise no order.
            if node.relation().getClass().getSimpleName() != "HadoopFsRelation":
                return False
        elif name == "DataSourceV2ScanRelation":
            if not _FILE_SCAN.search(node.scan().getClass().getName()):
                return False
        elif name not in _ORDERED_NODES:
            return False
    return True
