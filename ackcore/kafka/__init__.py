"""Kafka, through confluent-kafka: ``ackcore[kafka]``.

`KafkaSpout` is a source for a topology on Spark. `KafkaGroup` is a consumer group whose offsets
ackcore commits for a stream of Spark's own Kafka source. `Consumer` is a member of a group that
commits exactly the records that are done, and `replay_letters` sends its dead letters back.
"""

try:
    import confluent_kafka as _confluent_kafka  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "confluent_kafka":
        raise
    raise ModuleNotFoundError(
        "ackcore.kafka needs confluent_kafka, which is not installed; run: "
        "pip install 'ackcore[kafka]'",
        name="confluent_kafka",
    ) from None

from ackcore.calls import Reject, Retry, Unavailable
from ackcore.dead_limit import TooManyDead
from ackcore.kafka.cluster import (
    ClusterFailed,
    UnknownTopics,
)
from ackcore.kafka.consumer.consumer import Consumer, ConsumerStats
from ackcore.kafka.consumer.consumer_records import (
    ConsumerCounts,
    Failure,
    KafkaRecord,
    PartitionStats,
)
from ackcore.kafka.consumer.letter_replay import SentBack, replay_letters
from ackcore.kafka.kafka_errors import (
    ConsumerError,
    OffsetsLost,
    OffsetsOutOfRange,
    ReadFailed,
    ReadTimedOut,
)
from ackcore.kafka.producing import DeliveryError
from ackcore.kafka.spout import KafkaGroup, KafkaSpout

__all__ = [
    "ClusterFailed",
    "Consumer",
    "ConsumerCounts",
    "ConsumerError",
    "ConsumerStats",
    "DeliveryError",
    "Failure",
    "KafkaGroup",
    "KafkaRecord",
    "KafkaSpout",
    "OffsetsLost",
    "OffsetsOutOfRange",
    "PartitionStats",
    "ReadFailed",
    "ReadTimedOut",
    "Reject",
    "Retry",
    "SentBack",
    "TooManyDead",
    "Unavailable",
    "UnknownTopics",
    "replay_letters",
]
