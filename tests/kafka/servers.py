"""The calls that tests make of any kind of Kafka."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from functools import cached_property

from confluent_kafka import (
    Consumer,
    IsolationLevel,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    OffsetSpec,
)

#: Longer than anything here takes, on a machine that does other things too.
TIMEOUT_S = 30.0

_numbers = itertools.count()


def raise_errors(futures):
    """Wait for what an `AdminClient` has been asked for, and return what it has answered."""
    return {key: future.result(TIMEOUT_S) for key, future in futures.items()}


def wait_until(holds, what: str, timeout_s: float = TIMEOUT_S):
    """Return the first true answer of ``holds()``, which another process brings about."""
    deadline = time.monotonic() + timeout_s
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)
    return answer


class KafkaServer(ABC):
    """A Kafka that listens at ``bootstrap_servers``."""

    bootstrap_servers: str

    @abstractmethod
    def create_topic(self, topic: str, partitions: int = 1, **config: object) -> None:
        """Make a topic."""

    @abstractmethod
    def delete_topic(self, topic: str) -> None:
        """Delete one."""

    @abstractmethod
    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        """Delete all records of a partition below an offset."""

    def conf(self, **options: object) -> dict:
        """Settings for a client of confluent-kafka: ``linger_ms=5`` is ``linger.ms``."""
        named = {name.replace("_", "."): value for name, value in options.items()}
        return {"bootstrap.servers": self.bootstrap_servers, **named}

    @cached_property
    def admin(self) -> AdminClient:
        """A client that administers, and connects again at once."""
        quick = self.conf(reconnect_backoff_ms=20, reconnect_backoff_max_ms=100)
        return AdminClient({**quick, "log_level": 0})

    def new_topic(self, partitions: int = 1, **config: object) -> str:
        """Make a topic that no other test has, and return its name."""
        topic = f"topic-{next(_numbers)}"
        self.create_topic(topic, partitions, **config)
        return topic

    def add_partitions(self, topic: str, count: int) -> None:
        """Give a topic more partitions, ``count`` in all, and wait until they are listed."""
        raise_errors(self.admin.create_partitions([NewPartitions(topic, count)]))
        # A busy broker answers before it lists them; a producer would fail until then.

        def are_listed() -> bool:
            found = self.admin.list_topics(topic, TIMEOUT_S).topics[topic]
            return len(found.partitions) == count

        wait_until(are_listed, f"{topic} has {count} partitions")

    def topic_of(self, values) -> str:
        """Make a topic of one partition, with these values."""
        topic = self.new_topic()
        self.produce(topic, values)
        return topic

    def compacted_topic(self) -> str:
        """Make a topic of a real broker that is compacted as soon as that can be."""
        soon = {"segment_ms": 1, "min_cleanable_dirty_ratio": 0.001, "delete_retention_ms": 0}
        return self.new_topic(cleanup_policy="compact", **soon)

    def make_anew(self, topic: str) -> None:
        """Delete a topic, and make one of its name as soon as that can be."""

        def is_made() -> bool:
            try:
                self.create_topic(topic)
            except Exception as error:
                if "TOPIC_ALREADY_EXISTS" in str(error):
                    return False
                raise
            return True

        self.delete_topic(topic)
        wait_until(is_made, f"{topic} can be made again")

    def configure(self, kind: ConfigResource.Type, name: str, **config: object) -> None:
        """Change settings of a topic or a group: ``retention_ms=5`` is ``retention.ms``."""
        entries = [
            ConfigEntry(
                each.replace("_", "."), str(to), incremental_operation=AlterConfigOpType.SET
            )
            for each, to in config.items()
        ]
        resource = ConfigResource(kind, name, incremental_configs=entries)
        raise_errors(self.admin.incremental_alter_configs([resource]))

    def new_group(self) -> str:
        """Return the name of a group that no other test has."""
        return f"group-{next(_numbers)}"

    def produce(self, topic: str, values, partition: int = 0, **options: object) -> list[int]:
        """Append values to a partition, each bytes, None or a dict for `Producer.produce`.

        Returns
        -------
        list of int
            The offset of each.
        """
        offsets: list[int] = []
        errors = []

        def delivered(error, message: Message) -> None:
            if error is not None:
                errors.append(error)
            else:
                offsets.append(message.offset())

        producer = Producer(self.conf(**{"linger_ms": 2, **options}))
        for value in values:
            arguments = value if isinstance(value, dict) else {"value": value}
            while True:
                try:
                    producer.produce(topic, partition=partition, on_delivery=delivered, **arguments)
                    break
                except BufferError:
                    producer.poll(1)
        assert producer.flush(TIMEOUT_S) == 0
        assert not errors, errors
        return offsets

    def produce_in_transactions(self, topic: str, transactions, aborted=frozenset()) -> None:
        """Append the values of each transaction to partition 0; those of some are aborted."""
        producer = Producer(self.conf(transactional_id=topic))
        producer.init_transactions(TIMEOUT_S)
        for number, values in enumerate(transactions):
            producer.begin_transaction()
            for value in values:
                producer.produce(topic, value, partition=0)
            producer.flush(TIMEOUT_S)  # what is aborted before it was sent is not in the log at all
            end = producer.abort_transaction if number in aborted else producer.commit_transaction
            end(TIMEOUT_S)

    def log_end(self, topic: str, partition: int = 0) -> int:
        """Return the end of a partition, behind records of transactions that are not completed."""
        # A leader that was away when the client listed the brokers would not be looked for again.
        self.admin.list_topics(timeout=TIMEOUT_S)
        wanted = {TopicPartition(topic, partition): OffsetSpec.latest()}
        level = IsolationLevel.READ_UNCOMMITTED
        asked = self.admin.list_offsets(wanted, isolation_level=level, request_timeout=TIMEOUT_S)
        (end,) = raise_errors(asked).values()
        return end.offset

    def consume(
        self, topic: str, partition: int = 0, *, is_open: bool = False, **options: object
    ) -> list[Message]:
        """Return the messages of a partition.

        Brokers write the markers of a transaction after they have answered its commit. The call
        waits for them, unless a transaction stays open (``is_open``).
        """
        consumer = Consumer(
            self.conf(
                group_id="none",
                enable_partition_eof=True,
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                fetch_wait_max_ms=10,  # that the end is reached is said so late
                **options,
            )
        )
        try:
            consumer.assign([TopicPartition(topic, partition, 0)])
            messages = []
            while True:
                message = consumer.poll(TIMEOUT_S)
                assert message is not None, f"nothing came, or no marker, in {TIMEOUT_S:.0f} s"
                if message.error() is None:
                    messages.append(message)
                elif message.error().name() == "_PARTITION_EOF":
                    if is_open or message.offset() >= self.log_end(topic, partition):
                        return messages
                else:
                    raise AssertionError(message.error())
        finally:
            consumer.close()

    def committed(self, group: str, topic: str, partition: int = 0) -> tuple[int, str | None]:
        """Return the offset that a group has committed, -1001 for none, and its metadata."""
        # Not by the admin client, in which an answer from no coordinator ends the process.
        consumer = Consumer(self.conf(group_id=group, enable_auto_commit=False))
        until = time.monotonic() + TIMEOUT_S
        try:
            while True:
                try:
                    (found,) = consumer.committed([TopicPartition(topic, partition)], TIMEOUT_S)
                    break
                except KafkaException as error:  # it begins with the first group, and is not ready
                    if "NOT_COORDINATOR" not in str(error) or time.monotonic() > until:
                        raise
                    time.sleep(0.02)
        finally:
            consumer.close()
        assert found.error is None, found.error
        return found.offset, found.metadata
