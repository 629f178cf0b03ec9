"""Bolts that call a service: it throttles, stalls and dies, and the counts balance all the same."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from ackcore.calls import RateLimit
from ackcore.dispatch import Http
from ackcore.spark import run_batch, to_parquet
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.topology import AsyncBolt, BasicBolt, Reject, TopologyBuilder
from ackcore.topology.stage_layout import Layout

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Fetch(AsyncBolt):
    """Asks a service for each id."""

    outputs = pa.schema([("id", pa.int64()), ("answer", pa.string())])
    max_concurrency = 20
    timeout_s = 0.5

    def __init__(self, urls, **settings):
        self.endpoints = urls
        for name, value in settings.items():
            setattr(self, name, value)

    async def prepare(self, context):
        self.clients = {
            url: Http(url, decode=lambda response: response.body.decode()) for url in self.endpoints
        }

    async def execute(self, tuple, collector):
        answer = await self.clients[collector.endpoint].call(tuple["id"])
        collector.emit((tuple["id"], answer))

    async def cleanup(self):
        for client in self.clients.values():
            await client.close()


@contextmanager
def server(dies_after=0):
    """A server's URL, until the end."""
    command = [sys.executable, str(Path(__file__).with_name("call_server.py")), str(dies_after)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/"
        process.stdin.close()


def ask(url):
    """How many requests were served at once at most, and how many came."""

    async def main():
        client = Http(url, decode=lambda response: response.body)
        try:
            return tuple(map(int, (await client.call("most")).split()))
        finally:
            await client.close()

    return asyncio.run(main())


def ids(spark, bolt, rows, folder, **settings):
    """A topology of one bolt."""
    builder = TopologyBuilder()
    builder.spout("ids", spark.range(0, rows, 1, numPartitions=2))
    builder.bolt("fetch", bolt).local_or_shuffle("ids")
    builder.sink("fetch", to_parquet(str(folder / "answers")))
    return builder.build(backoff_s=0.1, **settings)


def answers(spark, folder):
    return sorted(tuple(row)[:2] for row in spark.read.parquet(str(folder / "answers")).collect())


def test_a_service_throttles_stalls_and_dies_and_each_record_is_answered_once(spark, tmp_path):
    """Time-outs cost an attempt, refusals wait in the task, the dead endpoint's go to the other."""
    with server() as lives, server(dies_after=60) as dies:
        topology = ids(spark, Fetch([lives, dies]), 400, tmp_path)
        counts = run_batch(topology, spark, str(tmp_path / "checkpoint"))
        most, _ = ask(lives)
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (400, 400, 0, 0)
    assert answers(spark, tmp_path) == [(n, str(n)) for n in range(400)]
    assert most <= 2 * 20  # two tasks, and a window of 20 each


class Down(AsyncBolt):
    """Fails with the first two of each task, and opens the breaker for a moment with each."""

    outputs = pa.schema([("id", pa.int64())])
    max_concurrency = 1
    breaker_failures, breaker_reset_s, wait_in_task_s = 1, 0.05, 60

    async def prepare(self, context):
        self.left = 2

    async def execute(self, tuple, collector):
        if self.left:
            self.left -= 1
            raise ConnectionError("down")
        collector.emit((tuple["id"],))


@pytest.mark.parametrize("grouping", ["local_or_shuffle", "shuffle"])
def test_the_breakers_of_all_tasks_are_counted_in_progress(spark, tmp_path, grouping, caplog):
    builder = TopologyBuilder()
    builder.spout("ids", spark.range(0, 40, 1, numPartitions=2))
    getattr(builder.bolt("down", Down(), parallelism=2), grouping)("ids")
    topology = builder.build(max_attempts=1)
    with caplog.at_level("INFO", "ackcore"):
        counts = run_batch(topology, spark, str(tmp_path / "checkpoint"))
    assert (counts.acked, counts.dead) == (36, 4)
    assert "36 acked, 4 failed, 0 retried, 4 dead" in caplog.text
    assert ", 4 breaker trips" in caplog.text


class Greet(BasicBolt):
    """Answers in threads of its own."""

    outputs = Fetch.outputs
    threads = 4

    def execute(self, tuple, collector):
        if tuple["id"] % 10 == 3 and tuple.attempt == 0:
            raise TimeoutError("not yet")
        collector.emit((tuple["id"], f"hello {tuple['id']}"))


def test_threads_of_a_basic_bolt_are_as_exact(spark, tmp_path):
    counts = run_batch(ids(spark, Greet(), 500, tmp_path), spark, str(tmp_path / "checkpoint"))
    assert (counts.records, counts.acked, counts.dead) == (500, 500, 0)
    assert answers(spark, tmp_path) == [(n, f"hello {n}") for n in range(500)]


class OneByOne(AsyncBolt):
    """Fails if two calls for one tenant of a task run at once."""

    outputs = pa.schema([("id", pa.int64())])
    limit = RateLimit(per="tenant", calls_per_s=10_000, concurrency=1)

    async def prepare(self, context):
        self.out = set()

    async def execute(self, tuple, collector):
        if tuple["tenant"] in self.out:
            raise Reject(f"{tuple['tenant']} has another call")
        self.out.add(tuple["tenant"])
        await asyncio.sleep(0.001)
        self.out.remove(tuple["tenant"])
        collector.emit((tuple["id"],))


def test_tuples_of_a_key_are_limited_on_spark(spark, tmp_path):
    frame = spark.range(600).selectExpr("id", "id % 7 as tenant")
    builder = TopologyBuilder()
    builder.spout("ids", frame)
    builder.bolt("call", OneByOne(), parallelism=2).fields("ids", "tenant")
    builder.sink("call", to_parquet(tmp_path / "out"))
    counts = run_batch(builder.build(), spark, str(tmp_path / "checkpoint"))
    assert (counts.records, counts.acked, counts.dead) == (600, 600, 0)
    assert spark.read.parquet(str(tmp_path / "out")).distinct().count() == 600


@pytest.mark.parametrize(
    ("grouping", "parallelism", "per", "tasks"),
    [
        ("local_or_shuffle", None, None, 4),
        ("shuffle", 2, None, 2),
        ("shuffle", 8, None, 4),
        ("shuffle", 2, "id", 2),
        ("fields", None, None, 4),
        ("fields", 3, None, 3),
        ("fields", 3, "id", 1),
        ("global_", None, None, 1),
    ],
)
def test_a_rate_is_divided_by_the_tasks_that_have_rows_at_once(
    grouping, parallelism, per, tasks, spark
):
    bolt = Fetch(None)
    bolt.limit = RateLimit(per=per, calls_per_s=9)
    builder = TopologyBuilder()
    builder.spout("ids", spark.range(1))
    declared = builder.bolt("fetch", bolt, parallelism=parallelism)
    getattr(declared, grouping)("ids", *(["id"] if grouping == "fields" else []))
    layout = Layout.of(builder.build())
    spec = TaskSpec(
        layout=layout,
        components={"fetch": bolt},
        schemas={},
        key=0,
        number=0,
        now_ms=0,
        dests=8,
        chunk_rows=1,
        work="",
        journal="",
        reject=(),
        slots=4,
    )
    assert spec.tasks_at_once("fetch") == tasks
    # The number of tasks that read the source, where it is known.
    for readers, at_once in ((1, 1), (3, 3), (9, 4)):
        known = replace(spec, readers=readers).tasks_at_once("fetch")
        assert known == (at_once if grouping == "local_or_shuffle" else tasks)
