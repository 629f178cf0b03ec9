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
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ackcore._files.journal import Journal
from ackcore.calls.call_settings import CallSettings
from ackcore.dispatch import Http
from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch, to_parquet
from ackcore.spark.tasks.attempts import Attempts
from ackcore.topology import TopologyBuilder
from ackcore.topology.bolt_functions import Kind
from ackcore.topology.executors import executor_for
from ackcore.topology.journaled_executor import Answers
from ackcore.topology.tuples import Identity
from bench.call_bolts import NUMBERS, BareLoop, Call, NoWait, no_wait

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

    def __init__(self, service_ms: float, slots: int = 0, queue: int = 0) -> None:
        command = [sys.executable, "-m", "bench.call_server", *map(str, (service_ms, slots, queue))]
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
    quick: bool,
    tmp_path: Path,
    interleaved: Callable[..., Any],
    report_ratio: Callable[..., None],
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

    def in_bolt(answers: Answers | None = None, some: int = rows // 10_000) -> None:
        bolt = NoWait()
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
        "AsyncBolt with a journal": in_journaled,
        "attempt": in_attempt,
    }
    seconds = interleaved(contestants, 3 if quick else 9)
    for name, taken in seconds.items():
        calls = 10_000 if name == "AsyncBolt with a journal" else rows
        each = [calls / second / 1000 for second in taken]
        bound = 20 if name == "AsyncBolt" else None
        report_ratio(f"calls that do not wait, {name}, per core", each, bound, unit="k/s")


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
