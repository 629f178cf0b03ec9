"""The streams that a DataFrame reads, by its plan."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame


def streams_in(frame: DataFrame) -> list[Any]:
    """Return the streams that a DataFrame reads, as leaves of its plan, in order."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    nodes = (leaves.apply(i) for i in range(leaves.size()))
    return [node for node in nodes if node.isStreaming()]


def reads_kafka(node: Any) -> bool:
    """Whether one of `streams_in` is Spark's own Kafka source."""
    if node.nodeName() != "StreamingRelationV2":
        return False
    return ".kafka010." in str(node.table().getClass().getName())
