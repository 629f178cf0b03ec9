"""Detection of sources that give the same rows in the same order when read again, by their plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import DataFrame

from ackcore.spark.base.session import is_connect
from ackcore.spark.base.versions import MAP_IN_ARROW_NODE

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
        MAP_IN_ARROW_NODE,
        "MapInPandas",
        "Project",
        "Range",
        "Union",
    }
)


def has_fixed_rows(frame: DataFrame) -> bool:
    """Whether a source computes the same rows if it is read again, as far as Spark can tell.

    Not if it depends on the time or on chance, nor if Python code takes part, whose determinism is
    not known: functions, data sources, and RDDs, whatever computes them.  (That of a list is one,
    too.)  Nor on Spark Connect, which shows no plan.
    """
    known = _FIXED_ROWS.get(frame)
    if known is None:
        known = _FIXED_ROWS[frame] = _computes_alike(frame)
    return known


#: A stream's source is looked at in each micro-batch, and a plan does not change.
_FIXED_ROWS: WeakKeyDictionary[DataFrame, bool] = WeakKeyDictionary()


_HAVE_TABLES = ("StreamingRelationV2", "DataSourceV2Relation")


def _computes_alike(frame: DataFrame) -> bool:
    if is_connect(frame):
        return False
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
    its rows as they come in, and of what is cached nothing is known.  Nor of any plan on Spark
    Connect, which shows none.
    """
    if is_connect(frame):
        return False
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
