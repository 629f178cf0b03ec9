"""Calls to the outside, on Spark and in one thread: against bare loops, and fixed windows.

On Spark two tasks call one HTTP server, a process of its own, through the client of
`ackcore.dispatch`, contestants in turn. The server says how many calls were done between the first
that came to it and the last: that leaves out what a job takes to start and to end, which the row
``whole job`` has.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ackcore._files.journal import Journal
from ackcore.calls import RateLimit, used
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.calls import Calls
from ackcore.dispatch import Http
from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch, to_parquet
from ackcore.spark.tasks.attempts import Attempts
from ackcore.topology import TopologyBuilder
from ackcore.topology.bolt_functions import Kind
from ackcore.topology.executors import executor_for
from ackcore.topology.journaled_executor import Answers
from ackcore.topology.tuples import Identity
from bench.call_bolts import NUMBERS, BareLoop, Call, NoWait, Paid, no_wait

TASKS = 2
#: The server that throttles: 400 calls a second, by 8 at once; 32 more may wait.
SERVICE_MS, SLOTS, QUEUE = 20.0, 8, 32


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    """A session with a core for each task."""
    with spark_session(f"local[{TASKS}]") as (session, _):
        yield session


class Service:
    """A server, and what it says of runs."""

    def __init__(
        self,
        service_ms: float,
        slots: int = 0,
        queue: int = 0,
        rates: dict[str, float] | None = None,
    ) -> None:
        server = (service_ms, slots, queue, json.dumps(rates or {}))
        command = [sys.executable, "-m", "bench.call_server", *map(str, server)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}/"

    def stats(self, run: str) -> dict[str, Any]:
        """Return the counts of a run."""
        body = json.dumps({"stats": run}).encode()
        with urllib.request.urlopen(self.url, data=body) as answer:
            return dict(json.loads(answer.read()))

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class Calling:
    """Runs of so many calls by two tasks, each measured by the server."""

    def __init__(self, spark: Any, service: Service, calls: int, folder: Path) -> None:
        self.spark, self.service, self.calls, self.folder = spark, service, calls, folder
        self._numbers = itertools.count()

    def _rows(self) -> Any:
        return self.spark.range(0, self.calls, 1, TASKS).withColumnRenamed("id", "n")

    def topology(self, concurrency: int | None) -> tuple[float, float, dict[str, Any]]:
        """Calls per second by an `AsyncBolt`, the seconds of the job, and what the server saw."""
        run = f"bolt {next(self._numbers)}"
        builder = TopologyBuilder()
        builder.spout("numbers", self._rows())
        builder.bolt("call", Call(self.service.url, run, concurrency)).shuffle("numbers")
        builder.sink("call", to_parquet(self.folder / run / "out"))
        topology = builder.build(max_attempts=60, backoff_s=0.001)
        began = time.perf_counter()
        counts = run_batch(topology, self.spark, self.folder / run / "checkpoint")
        took = time.perf_counter() - began
        assert counts.acked == self.calls
        return self._measured(run, took)

    def bare(self, concurrency: int) -> tuple[float, float, dict[str, Any]]:
        """The same by an event loop in each task."""
        run = f"bare {next(self._numbers)}"
        loop = BareLoop(self.service.url, run, concurrency)
        began = time.perf_counter()
        assert self._rows().mapInArrow(loop, "n bigint").count() == self.calls
        return self._measured(run, time.perf_counter() - began)

    def _measured(self, run: str, took: float) -> tuple[float, float, dict[str, Any]]:
        stats = self.service.stats(run)
        assert stats["done"] == self.calls  # each once
        return self.calls / (stats["ended_s"] - stats["began_s"]), took, stats


@pytest.mark.benchmark(group="calls: on Spark")
def bench_unlimited_server(
    spark: Any, quick: bool, tmp_path: Path, report_ratio: Callable[..., None]
) -> None:
    """100 ms calls, 32 at once in each of two tasks: a bolt against a bare loop, in turn."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "1000000")
    calls, rounds, concurrency = (600, 1, 32) if quick else (9_000, 3, 32)
    service = Service(100.0)
    try:
        calling = Calling(spark, service, calls, tmp_path)
        shares, jobs, rates = [], [], defaultdict(list)
        for _ in range(rounds):
            bare, bare_s, _ = calling.bare(concurrency)
            ours, ours_s, stats = calling.topology(concurrency)
            assert stats["most"] <= TASKS * concurrency
            shares.append(ours / bare)
            jobs.append(bare_s / ours_s)
            rates["bare"].append(bare)
            rates["ours"].append(ours)
            if not quick:
                rates["default"].append(calling.topology(None)[0])
    finally:
        service.close()
    ours, bare = (statistics.median(rates[name]) for name in ("ours", "bare"))
    label = f"100 ms calls, 2 tasks of {concurrency}: AsyncBolt / bare loop"
    report_ratio(f"{label} ({ours:.0f} / {bare:.0f} calls/s)", shares, 0.9)
    report_ratio(f"{label}, whole job of {calls} calls", jobs)
    if rates["default"]:
        report_ratio(
            "100 ms calls, 2 tasks, as many as the default finds", rates["default"], unit="/s"
        )


@pytest.mark.benchmark(group="calls: on Spark")
def bench_throttled_server(
    spark: Any, quick: bool, tmp_path: Path, report_ratio: Callable[..., None]
) -> None:
    """A server that takes 8 calls at once, lets 32 wait and refuses the rest: the default window.

    Against fixed ones, from too small to too large. Each contestant begins anew in each run.
    """
    calls, rounds = (300, 1) if quick else (3_000, 3)
    sweep = (4,) if quick else (1, 2, 4, 8, 16, 32)
    service = Service(SERVICE_MS, SLOTS, QUEUE)
    rates, refused = defaultdict(list), defaultdict(list)
    try:
        calling = Calling(spark, service, calls, tmp_path)
        for _ in range(rounds):
            for concurrency in (None, *sweep):
                rate, _, stats = calling.topology(concurrency)
                rates[concurrency].append(rate)
                refused[concurrency].append(stats["refused"])
    finally:
        service.close()
    best = max(sweep, key=lambda concurrency: statistics.median(rates[concurrency]))
    could = SLOTS / SERVICE_MS * 1000
    pairs = zip(rates[None], rates[best], strict=True)
    shares = [ours / fixed for ours, fixed in pairs]
    label = f"throttled to {could:.0f} calls/s: default / best fixed window, {best} a task"
    report_ratio(label, shares, 0.95)
    for concurrency, found in rates.items():
        name = "default" if concurrency is None else f"fixed {concurrency} a task"
        no = statistics.median(refused[concurrency]) / calls
        label = f"throttled to {could:.0f} calls/s, {name}: of that ({no:.2f} refused a call)"
        report_ratio(label, [rate / could for rate in found])


@pytest.mark.benchmark(group="calls: cheap ones")
def bench_cheap_calls(
    quick: bool, tmp_path: Path, interleaved: Callable[..., Any], report_ratio: Callable[..., None]
) -> None:
    """Coroutines that never wait, from Arrow batches to Arrow batches, in CPU time of a thread."""
    rows = 10_000 if quick else 100_000
    batches = [
        pa.record_batch([np.arange(start, start + 10_000)], schema=NUMBERS)
        for start in range(0, rows, 10_000)
    ]
    ids = pa.array(map(str, range(10_000)))
    identity = Identity(ids, np.zeros(10_000, np.int32), np.arange(10_000))
    task = Attempts(no_wait, Kind.ASYNC, NUMBERS, pa.schema([("m", pa.int64())]), CallSettings())

    def in_bolt(
        answers: Answers | None = None, some: int = rows // 10_000, max_batch: int = 1
    ) -> None:
        bolt = NoWait()
        bolt.max_batch = max_batch
        bolt.journal = answers is not None
        executor = executor_for("pass", bolt, answers=answers)
        done = [executor.process("n", "default", each, identity) for each in batches[:some]]
        done.append(executor.flush())
        executor.cleanup()
        assert sum(len(each.batch) for one in done for each in one.emissions) == 10_000 * some
        assert not any(one.failures for one in done)

    def in_journaled() -> None:
        with TemporaryDirectory(dir=tmp_path) as folder, Journal(folder, bytes(16)) as journal:
            in_bolt(Answers("pass", {"default": NUMBERS}, journal), 1)

    def in_attempt() -> None:
        answered = pa.Table.from_batches(task(iter(batches)))
        assert answered["m"].equals(answered["n"])

    contestants = {
        "AsyncBolt": in_bolt,
        "AsyncBolt, 64 tuples of a call": lambda: in_bolt(max_batch=64),
        "AsyncBolt with a journal": in_journaled,
        "attempt": in_attempt,
    }
    seconds = interleaved(contestants, 3 if quick else 9)
    for name, taken in seconds.items():
        calls = 10_000 if name == "AsyncBolt with a journal" else rows
        each = [calls / second / 1000 for second in taken]
        bound = 20 if name == "AsyncBolt" else None
        report_ratio(f"calls that do not wait, {name}, per core", each, bound, unit="k/s")


@pytest.mark.benchmark(group="calls: limits per key")
def bench_limits_per_key(
    quick: bool, interleaved: Callable[..., Any], report_ratio: Callable[..., None]
) -> None:
    """1,000 keys with a limit each against one limit for all: calls of 10 ms, and that do not wait.

    The first is elapsed time, with 32 calls at once; the second CPU time of the thread.
    """
    keys = 1_000
    one = RateLimit(calls_per_s=1e9)
    each = RateLimit(per=lambda item: item % keys, calls_per_s=1e6, concurrency=8)

    async def waits(item: int) -> None:
        await asyncio.sleep(0.01)
        used(tokens=item)

    async def returns(item: int) -> None:
        used(tokens=item)

    for name, function, calls, clock, bound in (
        ("of 10 ms", waits, 10_000, time.perf_counter, 0.95),
        ("that do not wait, CPU time", returns, 50_000, time.thread_time, None),
    ):
        calls = keys if quick else calls

        def made(limit: RateLimit, function: Any = function, calls: int = calls) -> None:
            with Calls(function, CallSettings(max_concurrency=32, limit=limit)) as run:
                assert not any(outcome.error for outcome in run.run(range(calls)))

        contestants = {
            "one": lambda: made(one),
            "each": lambda: made(each),
            "tokens": lambda: made(RateLimit(tokens_per_min=6e10)),
        }
        seconds = interleaved(contestants, 1 if quick else 7, clock)
        shares = [a / b for a, b in zip(seconds["one"], seconds["each"], strict=True)]
        label = f"calls {name}: limits of {keys} keys / one limit"
        report_ratio(label, shares, None if quick else bound)
        shares = [a / b for a, b in zip(seconds["one"], seconds["tokens"], strict=True)]
        report_ratio(f"calls {name}: a limit of tokens / one of calls", shares)


def by_tenant(item: tuple[str, int]) -> str:
    """Return the key of an item."""
    return item[0]


def called(service: Service, run: str, settings: CallSettings, items: Any) -> Iterator[str]:
    """Call the server for each item; yield the tenant of each call that is done, as it ends."""
    done: list[str] = []

    async def call(item: tuple[str, int]) -> None:
        await client.call({"run": f"{item[0]} {run}"})
        done.append(item[0])

    client = Http(service.url)
    with Calls(call, settings) as calls:
        for outcome in calls.run(items):
            assert outcome.error is None
            yield from done
            done.clear()
        calls.complete(client.close())


@pytest.mark.benchmark(group="calls: limits per key")
def bench_equal_tenants(quick: bool, report_ratio: Callable[..., None]) -> None:
    """Ten tenants, in blocks of 1,000 calls of 20 ms, 16 at once: the parts of the first 4,000."""
    tenants = [f"tenant-{n}" for n in range(10)]
    each, rounds = (100, 1) if quick else (1_000, 5)
    settings = CallSettings(max_concurrency=16, limit=RateLimit(per=by_tenant))
    service = Service(20.0)
    least, most = [], []
    try:
        for number in range(rounds):
            items = ((tenant, n) for tenant in tenants for n in range(each))
            some = itertools.islice(called(service, str(number), settings, items), 4 * each)
            parts = Counter(some)
            least.append(min(parts[tenant] for tenant in tenants) / (4 * each / 10))
            most.append(max(parts.values()) / (4 * each / 10))
    finally:
        service.close()
    report_ratio("10 equal tenants: calls of the slowest / a tenth of all", least, 0.9)
    report_ratio("10 equal tenants: calls of the fastest / a tenth of all", most, 1.1, at_most=True)


@pytest.mark.benchmark(group="calls: limits per key")
def bench_unknown_limits(quick: bool, report_ratio: Callable[..., None]) -> None:
    """A server that refuses calls of each tenant above its rate, for two minutes.

    The client does not know the rates. The figure is that of the tenant with the least work done
    of what its rate allows, from its first call to its last answer.
    """
    rates = {"a": 4, "b": 20, "c": 200}
    seconds, rounds = (3, 1) if quick else (120, 3)
    settings = CallSettings(max_concurrency=64, wait_in_task_s=3600, limit=RateLimit(per=by_tenant))
    service = Service(50.0, rates=rates)
    shares, refused = [], []
    try:
        for number in range(rounds):
            items = [
                (tenant, n)
                for n in range(2 * seconds)
                for tenant, rate in rates.items()
                for _ in range(rate // 2)
            ]
            assert sum(1 for _ in called(service, str(number), settings, items)) == len(items)
            stats = {tenant: service.stats(f"{tenant} {number}") for tenant in rates}
            shares.append(
                min(
                    stats[tenant]["done"]
                    / (rate * (stats[tenant]["ended_s"] - stats[tenant]["began_s"]))
                    for tenant, rate in rates.items()
                )
            )
            refused.append(sum(one["refused"] for one in stats.values()) / len(items))
    finally:
        service.close()
    label = "429s by unknown rates of 4, 20 and 200 calls/s"
    report_ratio(f"{label}: work done of what is allowed", shares, 0.95)
    report_ratio(f"{label}: refused a call", refused)


@pytest.mark.benchmark(group="calls: on Spark")
def bench_overspend(
    spark: Any, quick: bool, tmp_path: Path, report_ratio: Callable[..., None]
) -> None:
    """Calls that the server answered above a budget, of those in flight when it ran out."""
    budget, concurrency, rounds = (40, 4, 1) if quick else (400, 16, 5)
    service = Service(50.0)
    shares = []
    try:
        for number in range(rounds):
            run, folder = f"paid {number}", tmp_path / str(number)
            builder = TopologyBuilder()
            rows = spark.range(0, 3 * budget, 1, TASKS).withColumnRenamed("id", "n")
            builder.spout("numbers", rows)
            bolt = Paid(service.url, run, concurrency, budget)
            builder.bolt("call", bolt, parallelism=TASKS).shuffle("numbers")
            builder.sink("call", to_parquet(folder / "out"))
            # The rows without money do not wait: the run ends.
            topology = builder.build(max_waiting=0)
            counts = run_batch(topology, spark, folder / "checkpoint", max_dead=None)
            paid = service.stats(run)["done"]
            assert counts.spent["call"] == paid >= budget
            shares.append((paid - budget) / (TASKS * concurrency))
    finally:
        service.close()
    report_ratio(
        f"overspend of a budget of {budget} calls / calls in flight", shares, 1, at_most=True
    )


@pytest.mark.benchmark(group="calls: HTTP clients")
def bench_http_clients(
    quick: bool, interleaved: Callable[..., Any], report_ratio: Callable[..., None]
) -> None:
    """POST one small JSON object to a local server, 32 at once: CPU time of the client's thread."""
    aiohttp, httpx = (pytest.importorskip(name) for name in ("aiohttp", "httpx"))
    calls, at_once = (100 if quick else 1_000), 32
    service = Service(0.0)

    async def all_calls(call: Callable[[Any], Any]) -> None:
        numbers = iter(range(calls))

        async def caller() -> None:
            for number in numbers:
                await call({"run": "clients", "n": number})

        await asyncio.gather(*(caller() for _ in range(at_once)))

    async def by_ours() -> None:
        client = Http(service.url)
        await all_calls(client.call)
        await client.close()

    async def by_aiohttp() -> None:
        async with aiohttp.ClientSession() as client:

            async def call(item: Any) -> None:
                async with client.post(service.url, json=item) as response:
                    await response.read()

            await all_calls(call)

    async def by_httpx() -> None:
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        async with httpx.AsyncClient(limits=limits) as client:
            await all_calls(lambda item: client.post(service.url, json=item))

    contestants = {"Http": by_ours, "aiohttp": by_aiohttp, "httpx": by_httpx}
    try:
        seconds = interleaved(
            {name: lambda run=run: asyncio.run(run()) for name, run in contestants.items()},
            1 if quick else 5,
        )
    finally:
        service.close()
    for name in ("aiohttp", "httpx"):
        us = [statistics.median(seconds[each]) / calls * 1e6 for each in ("Http", name)]
        ratios = [a / b for a, b in zip(seconds[name], seconds["Http"], strict=True)]
        report_ratio(f"a POST by {name} / by Http ({us[1]:.0f} / {us[0]:.0f} us)", ratios)
