"""Records of a real broker on Spark, counted, against a bare loop and other ways into Spark.

ACKCORE_BENCH_RECORDS says how many records of 200 bytes there are, 4 million by default, in two
partitions for each of two cores. The broker runs on the same cores. Contestants take turns, each a
whole job that connects, reads all and leaves; wall time decides. The CPU time beside it is that of
all processes but the broker's, its second figure in a row.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from ackcore.kafka import Consumer, KafkaSpout
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import Cluster
from ackcore.offsets import KAFKA_LIMIT
from ackcore.spark.base.schemas import ATTEMPT, REPLAYED
from ackcore.spark.kafka.plans import OffsetPlan, Position
from ackcore.spark.kafka.spout_offsets import SpoutOffsets
from bench.compiled import Unavailable
from bench.kafka_jobs import BARE_MESSAGES
from bench.kafka_topic import connector_jars, fill, running_broker
from bench.processes import cpu_s
from bench.workers import Worker

CORES = 2
RECORD_BYTES = 200
#: Healthy records a second, at a pace; and the share of all records that always fail.
PER_S, POISONED = 10_000, 0.3
#: Of a group that commits.
PARTITIONS = 1_000
#: Spark's connector at its version, and a PySpark that it is for.
SPARK_41 = Path(__file__).parent.parent / ".venv-spark-4.1" / "bin" / "python"


@pytest.fixture(scope="module")
def rounds(quick: bool) -> int:
    """How often each contestant has its turn."""
    return 1 if quick else 5


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[Any]:
    """One for all."""
    with running_broker(tmp_path_factory.mktemp("kafka") / "broker") as broker:
        yield broker


class Filled(NamedTuple):
    """A topic with records in it."""

    topic: str
    ends: list[int]


@pytest.fixture(scope="module")
def filled(broker, quick) -> Filled:
    """The records."""
    records = int(os.environ.get("ACKCORE_BENCH_RECORDS", 200_000 if quick else 4_000_000))
    return Filled("records", fill(broker, "records", 2 * CORES, records, RECORD_BYTES))


@pytest.fixture(scope="module")
def bare(broker, filled) -> Iterator[Callable[[], float]]:
    """A bare loop in a process for each core, each with its share of the partitions."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker(
                    "kafka_jobs.consume",
                    servers=broker.bootstrap_servers,
                    topic=filled.topic,
                    ends={n: filled.ends[n] for n in range(core, len(filled.ends), CORES)},
                    batch=BARE_MESSAGES,
                )
            )
            for core in range(CORES)
        ]

        def bare() -> float:
            for worker in workers:
                worker.start()
            return max(worker.result() for worker in workers)

        yield bare


def spark_worker(
    broker: Any, conf: dict[str, str], job: str = "OnSpark", **arguments: Any
) -> Worker:
    """Return a process with a Spark of its own."""
    where = broker.bootstrap_servers
    return Worker(f"kafka_jobs.{job}", servers=where, cores=CORES, conf=conf, **arguments)


@pytest.fixture(scope="module")
def on_spark(broker) -> Iterator[Worker]:
    """Its turns do what `OnSpark` has of a name with a topic, and return its seconds."""
    with spark_worker(broker, {"spark.driver.memory": "4g"}) as worker:
        yield worker


@pytest.fixture(scope="module")
def on_spark_41(broker) -> Iterator[Worker]:
    """The same on a Spark that its own Kafka connector is published for."""
    if not SPARK_41.exists():
        raise Unavailable("Spark's connector: no PySpark 4.1, which .ci/test-spark 4.1 installs")
    conf = {"spark.driver.memory": "4g", "spark.jars": ",".join(connector_jars("4.1"))}
    with spark_worker(broker, conf, python=str(SPARK_41)) as worker:
        yield worker


@pytest.fixture
def contest(broker, filled, interleaved, rounds, report_ratio):
    """``contest(title, contestants, bounds)`` lets them run in turn, after a round to warm up."""

    def contest(
        title: str,
        contestants: dict[str, Callable[[], object]],
        bounds: dict[tuple[str, str], float | None],
        most_rounds: int = 5,
    ) -> None:
        records = f"{sum(filled.ends):,} records"
        for work in contestants.values():  # the JVM compiles what is used
            work()
        cpu: dict[str, list[float]] = defaultdict(list)
        without = {broker.pid}
        seconds = interleaved(
            contestants,
            min(rounds, most_rounds),
            time.perf_counter,
            before=lambda name: cpu[name].append(-cpu_s(without)),
            after=lambda name: cpu[name].append(cpu[name].pop() + cpu_s(without)),
        )
        for (slow, fast), bound in bounds.items():
            for kind, times, asked in (("wall", seconds, bound), ("CPU", cpu, None)):
                taken = " / ".join(f"{statistics.median(times[each]):.2f}" for each in (slow, fast))
                ratios = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
                row = f"{title}, {records}: {slow} / {fast} ({taken} s {kind})"
                report_ratio(row, ratios, asked)

    return contest


def bench_bare(broker, filled, bare, on_spark, contest, interleaved, rounds, report_ratio):
    """`KafkaSpout` and a `BatchBolt` that counts, against bare loops that only count."""
    contest(
        "count",
        {"bare": bare, "KafkaSpout": partial(on_spark.turn, "spout", *filled)},
        {("bare", "KafkaSpout"): 0.8},
    )
    few = fill(broker, "few", 2 * CORES, 2 * CORES, RECORD_BYTES)
    seconds = [on_spark.turn("spout", "few", few) for _ in range(rounds)]
    report_ratio(f"the same of {sum(few)} records: what is not reading", seconds, unit="s")


def bench_data_source(filled, on_spark, contest):
    """Against a data source in Python, which reads by the very same reader."""
    ways = {
        "data source": "data_source",
        "data source, counted by Spark": "data_source_alone",
        "KafkaSpout": "spout",
    }
    contest(
        "count",
        {name: partial(on_spark.turn, way, *filled) for name, way in ways.items()},
        {("data source", "KafkaSpout"): 2, ("data source, counted by Spark", "KafkaSpout"): None},
        most_rounds=3,
    )


def bench_connector(filled, on_spark_41, contest):
    """Against Spark's own connector, both on the Spark that it is for."""
    ways = {
        "connector": "connector",
        "connector, values alone": "connector_values",
        "KafkaSpout": "spout",
    }
    contest(
        "count on Spark 4.1",
        {name: partial(on_spark_41.turn, way, *filled) for name, way in ways.items()},
        {("connector", "KafkaSpout"): 1.5, ("connector, values alone", "KafkaSpout"): None},
        most_rounds=3,
    )


# ---- some of them fail -------------------------------------------------------------------------


def bench_poison_at_a_pace(broker, on_spark, quick, rounds, report_ratio):
    """Healthy records that come at a pace, and as many ACKED a second when 30 % more fail.

    Those fail at each attempt, and are tried again with the default back-off.
    """
    seconds = 4 if quick else 20
    numbers = itertools.count()

    def healthy_per_s(poison_per_s: int) -> float:
        topic = f"paced-{next(numbers)}"
        broker.create_topic(topic, 2 * CORES)
        on_spark.start("stream", topic, [PER_S * seconds])
        producer.start(topic, 2 * CORES, seconds, PER_S, poison_per_s)
        taken = on_spark.result()
        assert producer.result() == PER_S * seconds
        return PER_S * seconds / taken

    poison = round(PER_S * POISONED / (1 - POISONED))
    where = broker.bootstrap_servers
    with Worker("kafka_jobs.produce", servers=where, size=RECORD_BYTES) as producer:
        healthy_per_s(poison)
        pairs = [(healthy_per_s(poison), healthy_per_s(0)) for _ in range(min(rounds, 2))]
    taken = " / ".join(f"{statistics.median(side):,.0f}" for side in zip(*pairs, strict=True))
    report_ratio(
        f"{PER_S:,} healthy records a second: ACKED with 30 % poison / without ({taken} a second)",
        [a / b for a, b in pairs],
        0.9,
    )


def bench_poison_saturated(broker, on_spark, quick, rounds, report_ratio):
    """The same of records that are all there from the start."""
    records = 50_000 if quick else 300_000
    for name, share in (("clean", 0.0), ("poisoned", POISONED)):
        fill(broker, name, 2 * CORES, records, RECORD_BYTES, share)
    on_spark.turn("stream", "poisoned", [records])
    pairs = []
    for _ in range(min(rounds, 2)):
        pairs.append([on_spark.turn("stream", name, [records]) for name in ("clean", "poisoned")])
    taken = " / ".join(f"{statistics.median(side):.2f}" for side in zip(*pairs, strict=True))
    report_ratio(
        f"{records:,} healthy records that are there: clean / with 30 % poison ({taken} s wall)",
        [a / b for a, b in pairs],
    )


# ---- a consumer without Spark ------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 12])
def bench_micro_batch(broker, quick, rounds, report_ratio, partitions):
    """A micro-batch of 1,000 records that arrive, into Parquet: by ackcore, and by a plain job."""
    batches = 8 if quick else 40
    found: dict[str, list[tuple[float, ...]]] = {"tracked": [], "bare": []}
    with spark_worker(broker, {}, job="Arriving") as worker:
        for number in range(rounds + 1):
            for way, of_way in found.items():
                topic = f"{way}-{partitions}-{number}"
                broker.create_topic(topic, partitions)
                spans, waits, cpu = worker.turn(way, topic, partitions, 1000, batches)
                if number:  # the JVM compiles in the first one
                    of_way.append((statistics.median(spans), statistics.median(waits), cpu))
    title = f"micro-batch of 1,000 records of {partitions} partitions into Parquet"
    (span, wait, cpu_of), (bare, _, bare_cpu) = (zip(*one, strict=True) for one in found.values())
    report_ratio(title, span, 0.12, at_most=True, unit="s")
    report_ratio(f"{title}, from the last record's arrival", wait, unit="s")
    report_ratio(f"{title}, CPU", cpu_of, unit="s")
    report_ratio(f"{title}, without ackcore", bare, unit="s")
    report_ratio(f"{title}, without ackcore, CPU", bare_cpu, unit="s")
    beyond = [more - less for more, less in zip(span, bare, strict=True)]
    report_ratio(f"{title}, beyond the same without ackcore", beyond, unit="s")


def bench_windows(broker, quick, rounds, report_ratio):
    """Records a second of a `Consumer`, by its window, each record taking 0.1 ms in its thread."""
    records = 4_000 if quick else 40_000
    (end,) = fill(broker, "windows", 1, records, RECORD_BYTES)
    for window, bound in ((1, 2_000), (10, 5_000), (100, 10_000)):
        found = [windowed(broker, f"windows-{window}-{i}", window, end) for i in range(rounds)]
        title = f"Consumer, max_in_flight={window}: records a second"
        report_ratio(title, found, bound, unit="1/s")


def windowed(broker: Any, group: str, window: int, end: int) -> float:
    """Read a topic of one partition in up to ten threads; return records a second."""
    threads = min(window, 10)
    servers = broker.bootstrap_servers
    with Consumer(
        "windows", bootstrap_servers=servers, group_id=group, max_in_flight=window
    ) as one:

        def work() -> None:
            while one.stats().counts.acked < end:
                for record in one.poll(window // threads, 0.1):
                    time.sleep(1e-4)
                    one.ack(record)

        one.ack(*one.poll(1, 60.0))  # it has joined its group
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            for future in [pool.submit(work) for _ in range(threads)]:
                future.result()
        return (end - 1) / (time.perf_counter() - began)


# ---- commits -----------------------------------------------------------------------------------


def bench_commit(broker, rounds, report_ratio):
    """The time of a micro-batch's commit in a group of 1,000 partitions that have all moved on.

    In turn with none that waits for a retry, with 30 in each partition, which are holes in its
    metadata, and the requests alone, with as much metadata as a broker takes of each.
    """
    topic, each = "many", 1_000
    broker.create_topic(topic, PARTITIONS)
    servers, rng = broker.bootstrap_servers, np.random.default_rng(7)
    spout = KafkaSpout(topic, bootstrap_servers=servers, group_id="many", refresh_s=3600)
    rounds = max(rounds, 3) * 3
    found: dict[str, list[float]] = defaultdict(list)
    offsets = SpoutOffsets("records", spout, 1)
    with closing(offsets), Cluster(ClientSettings(servers)) as cluster:
        # The first commit of a new cluster has it make the topic of offsets.
        assert not cluster.commit("many", {(topic, 0): (0, "")}, patience_s=120).failed
        for number in range(1, rounds + 1):
            at = number * each * 3
            for holes in (0, 30):
                at += each
                places = np.concatenate(
                    [np.sort(rng.choice(each, holes, replace=False)) for _ in range(PARTITIONS)]
                )
                waiting = pa.table(
                    {
                        "topic": pa.repeat(topic, len(places)),
                        "partition": np.repeat(np.arange(PARTITIONS, dtype=np.int32), holes),
                        "offset": places + at - each,
                        ATTEMPT: np.ones(len(places), np.int32),
                        REPLAYED: np.zeros(len(places), np.int32),
                    }
                )
                at_end = Position(at, at, "earliest")
                plan = OffsetPlan({(topic, n): at_end for n in range(PARTITIONS)})
                began = time.perf_counter()
                lag = offsets.commit(plan, [waiting])
                found[f"{holes} waiting in each"].append(time.perf_counter() - began)
                # One that did not arrive, or was put off as the one before was slow, is not timed.
                assert lag == sum(each - one for one in places[::holes]) if holes else not lag
            commits = {(topic, n): (at + each, "x" * KAFKA_LIMIT) for n in range(PARTITIONS)}
            began = time.perf_counter()
            answers = cluster.commit("many", commits)
            found["full metadata, the requests alone"].append(time.perf_counter() - began)
            assert not answers.failed
            assert len(answers.found) == PARTITIONS
    for name, seconds in found.items():
        title = f"commit of {PARTITIONS:,} partitions, {name}"
        bound = None if "30" in name else 0.2
        report_ratio(title, seconds, bound, at_most=True, unit="s")
