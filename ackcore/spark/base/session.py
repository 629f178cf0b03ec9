"""What can be asked of a session, and of a DataFrame's plan, before any job runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

#: In the names of classes: scans of files, by data sources of version 2.
_FILE_SCAN = re.compile(r"\.v2\.(parquet|orc|csv|json|text|avro)\.")
#: Nodes of a plan that leave the rows of a partition in their order, or read them in one.
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
        pass  # its JVM has ended
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


def has_fixed_rows(frame: DataFrame) -> bool:
    """Whether a source computes the same rows if it is read again, as far as Spark can tell.

    Not if it depends on the time or on chance, nor if Python code takes part, whose determinism is
    not known: functions, data sources, and RDDs, whatever computes them.  (That of a list is one,
    too.)
    """
    known = _FIXED_ROWS.get(frame)
    if known is None:
        known = _FIXED_ROWS[frame] = _computes_alike(frame)
    return known


#: A stream's source is looked at in each micro-batch, and a plan does not change.
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

    True only of plans that read files, ranges, local tables and RDDs that Spark calls DETERMINATE,
    as the frames that ``foreachBatch`` is given are made of, and go row by row; a shuffle hands out
    its rows as they come in, and of what is cached nothing is known.
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
