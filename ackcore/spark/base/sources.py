"""The sources of spouts: their schemas, their streams, and whether they repeat their rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark.sql import DataFrame

from ackcore._arrow.arrow_tables import nullable_within
from ackcore.spark.base.schemas import DEDUP_KEY, ORDER
from ackcore.spark.base.session import is_connect
from ackcore.spark.base.versions import MAP_IN_ARROW_NODE, to_arrow_schema
from ackcore.topology.parts import Spout


def source_schema(spout: Spout) -> pa.Schema:
    """Return the columns of a spout's source, in the types that waiting and dead records keep."""
    schema = spout.source.schema
    return _kept(spout, schema) if isinstance(schema, pa.Schema) else to_arrow_schema(schema)


def emitted_schema(spout: Spout) -> pa.Schema:
    """Return the schema of the tuples that a spout emits; a deserializer may make other columns."""
    if spout.kind is None:
        return source_schema(spout)
    return _kept(spout, spout.source.emits)


def _kept(spout: Spout, schema: pa.Schema) -> pa.Schema:
    """Return a source's schema with all columns and nested fields nullable; Kafka's is unchanged.

    A source may return nulls in a column that it declares as NOT NULL, and a dead letter with such
    a null could never be written.
    """
    if spout.kind == "kafka":
        return schema
    return pa.schema(
        [one.with_type(nullable_within(one.type)).with_nullable(True) for one in schema]
    )


def kept_schemas(schemas: Mapping[str, pa.Schema], topology: Any) -> dict[str, pa.Schema]:
    """Return the source's columns of waiting records by spout, with that of `number_of`, if any.

    ``schemas``: the sources' schemas by spout. ``topology``: the topology with the spouts.
    """
    numbers = {name: number_of(topology.spouts[name]) for name in schemas}
    return {
        name: schema
        if numbers[name] is None
        else schema.append(pa.field(numbers[name], pa.int64()))
        for name, schema in schemas.items()
    }


def number_of(spout: Spout) -> str | None:
    """Return the extra column of waiting records: `DEDUP_KEY`, `ORDER`, or None for most spouts."""
    if spout.dedup is not None:
        return DEDUP_KEY
    return ORDER if spout.ordered_by else None


def streams_in(frame: DataFrame) -> list[Any]:
    """Return the Java leaves of a classic DataFrame's plan that are streams, in their order."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    nodes = (leaves.apply(i) for i in range(leaves.size()))
    return [node for node in nodes if node.isStreaming()]


def reads_kafka(node: Any) -> bool:
    """Return whether a stream of `streams_in` is Spark's own Kafka source."""
    if node.nodeName() != "StreamingRelationV2":
        return False
    return ".kafka010." in str(node.table().getClass().getName())


#: A part of the class names of file scans by data sources of version 2.
_FILE_SCAN = re.compile(r"\.v2\.(parquet|orc|csv|json|text|avro)\.")
#: Nodes of a plan that keep the order of a partition's rows, or read them in a fixed order.
_ORDERED_NODES = frozenset(
    {
        "ArrowEvalPython",
        "BatchEvalPython",
        "Expand",
        "Filter",
        "Generate",
        "LocalRelation",
        MAP_IN_ARROW_NODE,
        "MapInPandas",
        "Project",
        "Range",
        "Union",
    }
)


def has_fixed_rows(frame: DataFrame) -> bool:
    """Return whether a source returns the same rows when it is read again.

    True only if Spark's plan shows it.  False if the source depends on the time or on random
    numbers, or has a subquery. False if Python code may take part, whose determinism is unknown:
    functions, data sources, and RDDs without a checkpoint, including those of lists.  False on
    Spark Connect, which has no plan here.
    """
    known = _FIXED_ROWS.get(frame)
    if known is None:
        known = _FIXED_ROWS[frame] = _computes_alike(frame)
    return known


#: A cache: a stream's source is checked in each micro-batch, and its plan does not change.
_FIXED_ROWS: WeakKeyDictionary[DataFrame, bool] = WeakKeyDictionary()


_HAVE_TABLES = ("StreamingRelationV2", "DataSourceV2Relation")


def _computes_alike(frame: DataFrame) -> bool:
    if is_connect(frame):
        return False
    plan = frame._jdf.queryExecution().analyzed()
    jvm = frame.sparkSession._jvm
    assert jvm is not None
    patterns = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    # The loop below does not visit the nodes of subqueries.
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
    nodes = [plan]
    while nodes:
        node = nodes.pop()
        yield node
        children = node.children()
        nodes += [children.apply(i) for i in range(children.size())]


def has_fixed_order(frame: DataFrame) -> bool:
    """Return whether each partition has the same order of rows when it is computed again.

    True only for plans that work row by row on files, ranges, local tables, and RDDs that Spark
    calls DETERMINATE (those of ``foreachBatch`` frames are).  A shuffle returns rows in the
    order of their arrival, and the order of cached data is unknown.  False on Spark Connect, which
    has no plan here.
    """
    if is_connect(frame):
        return False
    execution = frame._jdf.queryExecution()
    plan = execution.withCachedData()  # not optimized
    # There is nothing to optimize in a bare RDD, such as the frame of a ``foreachBatch``.
    if plan.nodeName() != "LogicalRDD":
        plan = execution.optimizedPlan()
    for node in _nodes(plan):
        name = node.nodeName()
        if name == "LogicalRDD":
            if node.rdd().outputDeterministicLevel().toString() != "DETERMINATE":
                return False
        elif name == "LogicalRelation":
            # Other relations, such as JDBC's, guarantee no order.
            if node.relation().getClass().getSimpleName() != "HadoopFsRelation":
                return False
        elif name == "DataSourceV2ScanRelation":
            if not _FILE_SCAN.search(node.scan().getClass().getName()):
                return False
        elif name not in _ORDERED_NODES:
            return False
    return True
