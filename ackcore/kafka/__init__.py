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

from ackcore.dead_limit import TooManyDead
from ackcore.kafka.consumer.consumer import Consumer
from ackcore.kafka.consumer.consumer_records import KafkaRecord
from ackcore.kafka.consumer.letter_replay import replay_letters
from ackcore.kafka.kafka_errors import ConsumerError
from ackcore.kafka.spout import KafkaGroup, KafkaSpout

__all__ = [
    "Consumer",
    "ConsumerError",
    "KafkaGroup",
    "KafkaRecord",
    "KafkaSpout",
    "TooManyDead",
    "replay_letters",
]
