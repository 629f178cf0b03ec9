"""Jobs of workers.py's children that read a topic: by a bare loop, or on Spark in several ways.

Spark's workers import this module.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from pyspark.sql import DataFrame

from ackcore.examples.quiet_spark import spark_session
from ackcore.kafka import KafkaSpout
from ackcore.spark import QueryListener, run_batch, start, to_parquet
from ackcore.topology import BatchBolt, Topology, TopologyBuilder
from bench.processes import cpu_s

Batches = Iterator[pa.RecordBatch]

#: By partition, where it ends.
Ends = list[int]
#: Messages of a call of a bare loop: of 100, 200, 500, 1,000, 2,500 and 10,000 the quickest.
BARE_MESSAGES = 500
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
        self._servers, self._cores = servers, cores
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


@dataclass
class ReadRanges:
    """For mapInArrow: the values of one range of each partition, dealt out to the tasks."""

    conf: dict[str, Any]
    topic: str
    ranges: list[tuple[int, int]]
    tasks: int

    def __call__(self, ids: Batches) -> Batches:
        """Read the ranges of a task."""
        for task in (task for batch in ids for task in batch.column(0).to_pylist()):
            mine = {n: self.ranges[n] for n in range(task, len(self.ranges), self.tasks)}
            consumer = Consumer(self.conf | {"fetch.wait.max.ms": 2})
            consumer.assign([TopicPartition(self.topic, n, of[0]) for n, of in mine.items()])
            left = sum(stop - start for start, stop in mine.values())
            while left:
                messages = consumer.consume(min(left, BARE_MESSAGES), 10.0)
                left -= len(messages)
                yield pa.record_batch({"value": [one.value() for one in messages]})
            consumer.close()


class Arriving(OnSpark):
    """A session whose turns are streams: the records of a micro-batch arrive when all are done."""

    def __call__(
        self, way: str, topic: str, partitions: int, records: int, batches: int
    ) -> tuple[list[float], list[float], float]:
        """Write the records into Parquet in one of the ways, `tracked` or `bare`.

        Return the seconds of each micro-batch from plan to mark, and from the last record's arrival
        to its end; and their CPU time: the driver's, the JVM's and the workers', for each.
        """
        producer, self._topic = Producer({"bootstrap.servers": self._servers}), topic
        waits: list[float] = []

        def send() -> float:
            for n in range(records):
                producer.produce(topic, b"x" * 200, partition=n % partitions)
            assert producer.flush(60) == 0
            return time.perf_counter()

        with tempfile.TemporaryDirectory() as place, getattr(self, way)(place, partitions) as take:
            cpu = 0.0
            for number in range(batches):
                if number == batches // 4:  # the JVM has compiled the most
                    cpu = cpu_s()
                arrived = send()
                spans = take(records)
                waits.append(time.perf_counter() - arrived)
            cpu = (cpu_s() - cpu) / (batches - batches // 4)
        return spans[len(spans) // 4 :], waits[batches // 4 :], cpu

    @contextmanager
    def tracked(self, place: str, partitions: int) -> Iterator[Callable[[int], list[float]]]:
        """A stream of a `KafkaSpout`."""
        spans: list[float] = []
        ended = Queue[tuple[int, float]]()

        class Noted(QueryListener):
            def on_progress(self, progress: Any, counts: Any) -> None:
                ended.put((progress.records, progress.duration_s))

        builder = TopologyBuilder()
        builder.spout("records", self._spout())
        builder.bolt("passed", PassValues()).local_or_shuffle("records")
        builder.sink("passed", to_parquet(place + "/sink"))
        query = start(builder.build(), self._spark, place + "/checkpoint", listeners=[Noted()])

        def take(records: int) -> list[float]:
            left = records
            while left:
                taken, seconds = ended.get(timeout=60)
                left -= taken
                if taken == records:  # not a part of them, which arrived earlier
                    spans.append(seconds)
            return spans

        yield take
        query.stop()

    @contextmanager
    def bare(self, place: str, partitions: int) -> Iterator[Callable[[int], list[float]]]:
        """The same without ackcore: the driver asks for the ends, and tasks read up to them."""
        servers, topic, tasks = self._servers, self._topic, min(partitions, self._cores)
        conf = {"bootstrap.servers": servers, "group.id": "bare", "enable.auto.commit": False}
        driver = Consumer(conf)
        done, spans = [0] * partitions, list[float]()

        def take(records: int) -> list[float]:
            began = time.perf_counter()
            parts = [TopicPartition(topic, n) for n in range(partitions)]
            ends = [driver.get_watermark_offsets(part, 10)[1] for part in parts]
            assert sum(ends) == sum(done) + records
            read = ReadRanges(conf, topic, list(zip(done, ends, strict=True)), tasks)
            frame = self._spark.range(0, tasks, 1, tasks).mapInArrow(read, "value binary")
            frame.write.parquet(f"{place}/batch_id={len(spans)}")
            done[:] = ends
            spans.append(time.perf_counter() - began)
            return spans

        yield take
        driver.close()
