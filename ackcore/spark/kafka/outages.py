"""Outages that delay the reading of planned offsets: brokers, topics, partitions."""

from __future__ import annotations

import re

from ackcore.kafka.cluster import Cluster, ClusterFailed, Failure
from ackcore.kafka.spout import KafkaSpout
from ackcore.spark.engine.setup import Obstacle
from ackcore.spark.kafka.groups import Key
from ackcore.spark.kafka.plans import OffsetPlan

#: The time-out of a check whether Kafka answers, in seconds.
_ASK_S = 5.0
#: The last line of a task's traceback if offsets could not be read yet.
_UNREAD = re.compile(
    r"\backcore\.kafka\.errors\.(?:ReadTimedOut|OffsetsLost"
    r"|ReadFailed(?=: .*\((?:UNKNOWN_TOPIC_OR_PART|UNKNOWN_TOPIC_ID|_UNKNOWN_TOPIC"
    r"|_UNKNOWN_PARTITION)\))): (.+)"
)


def unread_in(error: BaseException | None) -> str | None:
    """Return the offsets that a task could not read yet, if they caused an error of Spark's."""
    while error is not None:
        told = _UNREAD.search(str(error))
        if told is not None:
            return told[1]
        # PySpark stores the cause of a Java error in `_cause`.
        error = getattr(error, "_cause", None) or error.__cause__
    return None


def obstacle(name: str, spout: KafkaSpout, plan: OffsetPlan) -> Obstacle | None:
    """Return the reason why a plan's offsets cannot be read at present; None if Kafka has them all.

    Deleted offsets, and topics that were created again, are no obstacle: waiting would not help.
    """
    stops: dict[Key, int] = {}
    for one in (one for some in plan.tasks for one in some):
        key = (one.topic, one.partition)
        stops[key] = max(one.stop, stops.get(key, 0))
    if not stops:
        return None
    try:
        with Cluster(spout.client, timeout_s=_ASK_S) as cluster:
            topics = cluster.partitions({topic for topic, _ in stops}, missing_ok=True)
            there: set[Key] = {one.key for one in topics}
            ids = {one.topic: one.topic_id for one in topics}
            marks = cluster.watermarks([key for key in stops if key in there])
        failed: dict[Key, Failure] = dict(marks.failed.items())
        ends: dict[Key, int] = {key: one.high for key, one in marks.found.items()}
    except ClusterFailed as error:
        return Obstacle(f"spout {name} waits for Kafka: {error}")
    for key, stop in sorted(stops.items()):
        topic, partition = key
        known, now = plan.topic_ids.get(topic), ids.get(topic)
        if known is not None and now is not None and known != now:
            continue  # the planned offsets are of the former topic, and lost
        if key not in there:
            said = f"spout {name} waits for {topic}-{partition}, which is not there"
            return Obstacle(said, spout.missing_timeout_s)
        failure = failed.get(key)
        if failure is not None:
            text = failure.text
            return Obstacle(f"spout {name} waits for {topic}-{partition}: {text}")
        high = ends[key]
        if high < stop:
            said = f"spout {name} waits for offset {stop - 1} of {topic}-{partition}, which ends"
            return Obstacle(f"{said} at {high}, as after a truncation", spout.missing_timeout_s)
    return None
