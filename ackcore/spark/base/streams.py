"""The streams that a DataFrame reads, found in its plan."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame


def streams_in(frame: DataFrame) -> list[Any]:
    """Return the leaves of a DataFrame's plan that are streams, in order."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    nodes = (leaves.apply(i) for i in range(leaves.size()))
    return [node for node in nodes if node.isStreaming()]


def reads_kafka(node: Any) -> bool:
    """Return whether a stream of `streams_in` is Spark's own Kafka source."""
    if node.nodeName() != "StreamingRelationV2":
        return False
    return ".kafka010." in str(node.table().getClass().getName())
