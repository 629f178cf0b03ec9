"""Jobs of workers.py's children that read a topic: by a bare loop, or on Spark in several ways.

Spark's workers import this module.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from pyspark.sql import DataFrame

from ackcore.examples.quiet_spark import spark_session
from ackcore.kafka import KafkaSpout
from ackcore.spark import run_batch, start, to_parquet
from ackcore.topology import BatchBolt, Topology, TopologyBuilder
from bench.processes import cpu_s

Batches = Iterator[pa.RecordBatch]

#: By partition, where it ends.
Ends = list[int]
#: How the records begin that a bolt refuses.
POISON = b"poison"


# ---- a bare loop -------------------------------------------------------------------------------


def consume(servers: str, topic: str, ends: dict[str, int], batch: int) -> Callable[[], float]:
    """Count the records of partitions by a consumer and nothing else."""

    def turn() -> float:
        began = time.perf_counter()
        consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "bare",
                "enable.auto.commit": False,
                "fetch.queue.backoff.ms": 10,
            }
        )
        consumer.assign([TopicPartition(topic, int(partition), 0) for partition in ends])
        left = sum(ends.values())
        while left:
            messages = consumer.consume(batch, 1.0)
            assert not any(map(Message.error, messages))
            left -= len(messages)
        taken = time.perf_counter() - began
        consumer.close()
        return taken

    return turn


# ---- a producer that keeps a pace --------------------------------------------------------------


def produce(servers: str, size: int) -> Callable[[str, int, float, int, int], int]:
    """Send records to the partitions of a topic, so many a second, for some seconds."""

    def turn(topic: str, partitions: int, seconds: float, per_s: int, poison_per_s: int) -> int:
        producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
        good, bad = b"good".ljust(size, b"x"), POISON.ljust(size, b"x")
        began, sent, spoilt = time.perf_counter(), 0, 0
        while sent < per_s * seconds:
            passed = min(seconds, time.perf_counter() - began)
            for _ in range(int(per_s * passed) - sent):
                producer.produce(topic, good, partition=sent % partitions)
                sent += 1
            for _ in range(int(poison_per_s * passed) - spoilt):
                producer.produce(topic, bad, partition=spoilt % partitions)
                spoilt += 1
            producer.poll(0.005)
        assert producer.flush(60) == 0
        return sent

    return turn


# ---- on Spark ----------------------------------------------------------------------------------


class CountRecords(BatchBolt):
    """How many records there are; the count hangs from nothing."""

    outputs = pa.schema([("n", pa.int64())])

    def prepare(self, context):
        """Begin a task."""
        self.n = 0

    def process(self, batch, out):
        """Count a batch."""
        self.n += len(batch)

    def flush(self, out):
        """Tell."""
        out.emit([[self.n]], parents=None)


def count_records(batches: Batches) -> Batches:
    """For mapInArrow: the same."""
    yield pa.record_batch({"n": pa.array([sum(len(batch) for batch in batches)], pa.int64())})


class FailPoison(CountRecords):
    """Fails the records that begin with `POISON`, at each attempt, and counts the others."""

    def process(self, batch, out):
        """Count a batch."""
        poison = pc.starts_with(batch.column("value"), POISON).to_numpy(zero_copy_only=False)
        failing = np.flatnonzero(poison)
        self.n += len(batch) - len(failing)
        out.fail(failing, "it is poison")


class PassValues(BatchBolt):
    """Hands on the values."""

    outputs = pa.schema([("value", pa.binary())])

    def process(self, batch, out):
        """Hand on a batch."""
        out.emit(batch.select(["value"]), parents=np.arange(len(batch)))


def counting(spout: KafkaSpout, bolt: BatchBolt, **settings: Any) -> Topology:
    """Return a topology that counts records in the tasks that read them."""
    builder = TopologyBuilder()
    builder.spout("records", spout)
    builder.bolt("count", bolt).local_or_shuffle("records")
    return builder.build(**settings)


class OnSpark:
    """A session, and what may be asked of it: most turns count all the records of a topic."""

    def __init__(self, servers: str, cores: int, conf: dict[str, str]) -> None:
        self._servers = servers
        self._topic, self._ends = "", Ends()
        self._session = spark_session(f"local[{cores}]", conf)
        self._spark, _ = self._session.__enter__()

    def close(self) -> None:
        """Stop the session."""
        self._session.__exit__(None, None, None)

    def __call__(self, work: str, topic: str, ends: Ends) -> float:
        """Count the records of a topic in one of the ways, and return the seconds that it took."""
        self._topic, self._ends = topic, ends
        began = time.perf_counter()
        found = getattr(self, work)()
        taken = time.perf_counter() - began
        assert found == sum(ends), (work, found)
        return taken

    def spout(self) -> int:
        """`KafkaSpout` and a `BatchBolt`."""
        with tempfile.TemporaryDirectory() as place:
            topology = counting(self._spout(), CountRecords())
            counts = run_batch(topology, self._spark, place + "/checkpoint")
        assert counts.balanced
        return counts.acked

    def _spout(self) -> KafkaSpout:
        return KafkaSpout(
            self._topic, bootstrap_servers=self._servers, group_id="bench", start="earliest"
        )

    def stream(self) -> int:
        """A stream that counts, and refuses what is poison, until all else is ACKED."""
        with tempfile.TemporaryDirectory() as place:
            topology = counting(self._spout(), FailPoison(), max_attempts=60)
            query = start(topology, self._spark, place + "/checkpoint")
            while query.counts.acked < sum(self._ends):
                assert query.is_active, query.exception
                time.sleep(0.005)
            query.stop(finish=True)
        assert query.counts.dead == 0
        return query.counts.acked

    def data_source(self) -> int:
        """A data source in Python that yields the same Arrow batches, and a function of them."""
        return self._count(self._from_data_source())

    def data_source_alone(self) -> int:
        """The same batches, counted by Spark: nothing goes back to Python."""
        return self._from_data_source().count()

    def _from_data_source(self) -> DataFrame:
        from bench.kafka_data_source import KafkaRecords  # noqa: PLC0415 - Spark 3.5 has none

        self._spark.dataSource.register(KafkaRecords)
        reader = self._spark.read.format("kafka-records")
        for partition, end in enumerate(self._ends):
            reader = reader.option(f"end{partition}", end)
        return reader.options(servers=self._servers, topic=self._topic).load()

    def connector(self) -> int:
        """Spark's own connector, all that a `KafkaSpout` emits, and a function of it."""
        names = ["key", "value", "headers", "topic", "partition", "offset", "timestamp"]
        return self._count(self._from_connector().select(*names))

    def connector_values(self) -> int:
        """The same of values alone."""
        return self._count(self._from_connector().select("value"))

    def _from_connector(self) -> DataFrame:
        reader = self._spark.read.format("kafka").option("kafka.bootstrap.servers", self._servers)
        options = {"subscribe": self._topic, "includeHeaders": "true"}
        return reader.options(startingOffsets="earliest", **options).load()

    def _count(self, frame: DataFrame) -> int:
        return sum(row.n for row in frame.mapInArrow(count_records, "n bigint").collect())


class Arriving(OnSpark):
    """A session whose turns are streams: the records of a micro-batch arrive when all are done."""

    def __call__(
        self, topic: str, partitions: int, records: int, batches: int
    ) -> tuple[list[float], float]:
        """Return the seconds of the micro-batches, and their CPU time: the driver's, the JVM's
        and the workers', for each.
        """
        producer, self._topic = Producer({"bootstrap.servers": self._servers}), topic
        builder = TopologyBuilder()
        builder.spout("records", self._spout())
        builder.bolt("passed", PassValues()).local_or_shuffle("records")
        with tempfile.TemporaryDirectory() as place:
            builder.sink("passed", to_parquet(place + "/sink"))
            query = start(builder.build(), self._spark, place + "/checkpoint")
            cpu = 0.0
            for number in range(batches):
                if number == batches // 4:  # the JVM has compiled the most
                    cpu = cpu_s()
                for n in range(records):
                    producer.produce(topic, b"x" * 200, partition=n % partitions)
                assert producer.flush(60) == 0
                while query.counts.acked < records * (number + 1):
                    assert query.is_active, query.exception
                    time.sleep(0.005)
            cpu = (cpu_s() - cpu) / (batches - batches // 4)
            query.stop()
            seconds = [one.duration_s for one in query.recent_progress if one.records == records]
        return seconds[len(seconds) // 4 :], cpu
