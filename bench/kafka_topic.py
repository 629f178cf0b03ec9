"""A real broker for the benches, as the tests start it, and topics that are filled once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka import Producer

from bench.compiled import Unavailable
from bench.kafka_jobs import POISON

ROOT = Path(__file__).parent.parent
PATHS = [str(ROOT / "tests" / "kafka"), str(ROOT / "tests" / "spark")]


def _of_tests(name: str) -> Any:
    """Return a module of the tests, which are no package."""
    sys.path[:0] = PATHS
    try:
        return importlib.import_module(name)
    finally:
        for path in PATHS:
            sys.path.remove(path)


@contextmanager
def running_broker(directory: Path) -> Iterator[Any]:
    """Start a broker of our own, and end it."""
    broker = _of_tests("broker")
    try:
        own = broker.Broker(directory)
    except broker.Unavailable as error:
        raise Unavailable(str(error)) from None
    try:
        yield own.start()
    finally:
        own.kill()


def connector_jars(spark: str) -> list[str]:
    """Return Spark's own Kafka connector for a version of it, and what that needs beside Spark."""
    broker, connector = _of_tests("broker"), _of_tests("connector")
    version = connector.CONNECTORS[spark]
    directory = ROOT / "build" / f"connector-{version}"
    option = f"-Dconnector={version}"
    try:
        found = broker.downloaded(connector.POM, directory, "Spark's connector", option)
    except broker.Unavailable as error:
        raise Unavailable(str(error)) from None
    return [str(jar) for jar in found.glob("*.jar") if jar.name.startswith(connector.NEEDED)]


def fill(
    broker: Any, topic: str, partitions: int, records: int, size: int, poison: float = 0.0
) -> list[int]:
    """Make a topic of so many records, dealt out in turn; return how many each partition has.

    In between are records that begin with `POISON`, which are that share of all and not counted.
    """
    broker.create_topic(topic, partitions)
    producer = Producer(
        broker.conf(
            linger_ms=50,
            batch_size=1 << 20,
            queue_buffering_max_messages=1_000_000,
            queue_buffering_max_kbytes=1 << 20,
        )
    )
    rest, bad = b"x" * (size - 16), POISON.ljust(size, b"x")
    per_record, owed = poison / (1 - poison), 0.0

    def produce(value: bytes, partition: int) -> None:
        while True:
            try:
                return producer.produce(topic, value, partition=partition)
            except BufferError:
                producer.poll(0.1)

    for n in range(records):
        produce(b"%016d%s" % (n, rest), n % partitions)
        owed += per_record
        if owed >= 1:
            produce(bad, n % partitions)
            owed -= 1
    assert producer.flush(60) == 0
    return [len(range(partition, records, partitions)) for partition in range(partitions)]
