"""Flow control: what it costs, and what it gets out of real HTTP servers whose speeds change."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ackcore.dispatch import Dispatcher, Http
from ackcore.flow import Fixed, FlowController, RttThreshold
from bench.flow_laws import AIMD, Gradient2, Vegas
from bench.flow_world import world_of
from tests.round_robin import RoundRobin

CONSUMERS = 12
TARGET_MS = 50.0
#: Where the series of the last run are put, for `bench.plot_flow`.
SERIES = Path("build/bench/flow.json")


class Blind(RoundRobin):
    """Consumers by turn or by hash, whether or not they have room: as before flow control."""

    def __init__(self, hashed: bool) -> None:
        super().__init__()
        self._hashed = hashed

    def choose(self, key: Any, avoid: Any) -> Any:
        """See `Chooser.choose`."""
        if not self._hashed:
            return self._pick()
        return self._consumers[(key * 2654435761 >> 7) % len(self._consumers)]


#: Laws and choices, as arguments of a Dispatcher; the blind ones share a cap for all.
WINDOWS: dict[str, Callable[[], dict[str, Any]]] = {
    "default": dict,
    "RttThreshold, round robin": lambda: {
        "limit": partial(RttThreshold, 0.1),
        "chooser": RoundRobin(),
    },
    "Vegas": lambda: {"limit": Vegas},
    "Gradient2": lambda: {"limit": Gradient2},
    "AIMD": lambda: {"limit": AIMD},
    "fixed window of 16, round robin": lambda: {
        "limit": partial(Fixed, 16),
        "chooser": RoundRobin(),
    },
    "blind round robin": lambda: {"limit": partial(Fixed, 10**6), "chooser": Blind(hashed=False)},
    "blind hash": lambda: {"limit": partial(Fixed, 10**6), "chooser": Blind(hashed=True)},
}


class Servers:
    """A server a consumer, each a process of its own."""

    def __init__(self, seed: int, seconds: float) -> None:
        self._arguments = (str(seed), str(seconds))
        self._processes = [self._start(n, 0) for n in range(CONSUMERS)]
        self.ports = [self._port(process) for process in self._processes]

    def _start(self, index: int, port: int, listen_at_ns: int = 0) -> subprocess.Popen[str]:
        arguments = [*self._arguments, *map(str, (index, port, listen_at_ns))]
        command = [sys.executable, "-m", "bench.flow_server", *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _port(self, process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        return int(process.stdout.readline())

    def kill(self, index: int) -> None:
        """Kill one by kill -9."""
        process = self._processes[index]
        process.kill()
        process.communicate()

    def restart(self, index: int, listen_at_ns: int) -> None:
        """Start it again, on its port, where it listens from then on."""
        self._processes[index] = self._start(index, self.ports[index], listen_at_ns)

    def close(self) -> None:
        """End all."""
        for index in range(CONSUMERS):
            self.kill(index)


@dataclass
class Trial:
    """The result of a policy; times in seconds from the start of the run."""

    #: When, the latency, the work, by which consumer.
    done: list[tuple[float, float, float, int]] = field(default_factory=list)
    windows: list[tuple[float, list[int], list[int]]] = field(default_factory=list)
    records: set[int] = field(default_factory=set)
    twice: int = 0
    counts: Any = None  # one a producer; None if it did not end in time

    def efficiency(self, world: Any) -> float:
        """Work done in the time that is counted, of what could be done in it."""
        begin, end = world.begin_ns / 1e9, world.end_ns / 1e9
        return sum(work for at, _, work, _ in self.done if begin <= at < end) / world.capacity

    def latency_ms(self, world: Any, percent: float) -> float:
        """A percentile, in milliseconds."""
        ordered = sorted(took for at, took, *_ in self.done if at >= world.begin_ns / 1e9)
        return 1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def series(self) -> dict[str, Any]:
        """Return the data of the plot."""
        return {"done": self.done, "windows": self.windows}


class Measured(Http):
    """An endpoint that notes when each record was done."""

    def __init__(self, index: int, port: int, trial: Trial, zero_ns: int) -> None:
        super().__init__(f"http://127.0.0.1:{port}/", encode=self._body)
        self._index, self._trial, self._zero_ns = index, trial, zero_ns

    def _body(self, item: tuple[int, float]) -> bytes:
        return json.dumps({"zero_ns": self._zero_ns, "work": item[1]}).encode()

    async def call(self, item: tuple[int, float]) -> None:
        """See `Target.call`."""
        began = time.monotonic_ns()
        await super().call(item)
        now = time.monotonic_ns()
        if item[0] in self._trial.records:
            self._trial.twice += 1
            return
        self._trial.records.add(item[0])
        at_s, took_s = (now - self._zero_ns) / 1e9, (now - began) / 1e9
        self._trial.done.append((at_s, took_s, item[1], self._index))


async def attempt(
    servers: Servers, world: Any, make: Callable[[], dict[str, Any]], producers: int = 1
) -> Trial:
    """One policy, from zero to the end of the world; the producers know nothing of each other."""
    trial = Trial()
    zero_ns = time.monotonic_ns()

    def records(producer: int, start: int) -> Iterator[tuple[int, float]]:
        works = world.works(producer)
        number = start
        while time.monotonic_ns() - zero_ns < world.end_ns:
            yield number * producers + producer, next(works)
            number += 1

    dispatchers = [
        Dispatcher(
            partial(records, producer),
            {n: Measured(n, port, trial, zero_ns) for n, port in enumerate(servers.ports)},
            key=lambda record: record[0],
            max_pending=768,
            max_attempts=1000,
            timeout_s=5.0,
            **make(),
        )
        for producer in range(producers)
    ]

    async def watch() -> None:
        while True:
            states = [state for each in dispatchers for state in each.counts().consumers]
            now_s = (time.monotonic_ns() - zero_ns) / 1e9
            trial.windows.append((now_s, [s.limit for s in states], [s.in_flight for s in states]))
            await asyncio.sleep(0.1)

    async def kill() -> None:
        fastest = CONSUMERS - 1
        await asyncio.sleep(world.dead[0] / 1e9)
        servers.kill(fastest)
        servers.restart(fastest, zero_ns + int(world.dead[1]))

    others = [asyncio.ensure_future(watch()), asyncio.ensure_future(kill())]
    try:
        async with asyncio.timeout(world.end_ns / 1e9 + 10):
            trial.counts = await asyncio.gather(*(each.run_async() for each in dispatchers))
    except TimeoutError:
        pass  # what is queued at a slow server by a blind choice takes minutes
    finally:
        for other in others:
            other.cancel()
    return trial


@pytest.mark.benchmark(group="flow: saturated HTTP servers")
def bench_flow_servers(quick: bool, report_ratio: Callable[..., None]) -> None:
    """12 unequal servers that slow down, stall, throttle; the fastest dead for a quarter."""
    seconds, seeds = (4.0, (1,)) if quick else (20.0, (1, 2))
    shown = ["default", "blind hash"] if quick else list(WINDOWS)
    policies = {name: (WINDOWS[name], 1) for name in shown}
    policies["default, 4 producers"] = (dict, 4)
    found: dict[str, list[Trial]] = {name: [] for name in policies}
    for seed in seeds:
        servers = Servers(seed, seconds)
        try:
            for name, (make, producers) in policies.items():
                trial = asyncio.run(attempt(servers, world_of(seed, seconds), make, producers))
                found[name].append(trial)
        finally:
            servers.close()
    worlds = [world_of(seed, seconds) for seed in seeds]
    for name, trials in found.items():
        shares = [trial.efficiency(world) for trial, world in zip(trials, worlds, strict=True)]
        pairs = list(zip(trials, worlds, strict=True))
        p50, p99 = (max(t.latency_ms(w, percent) for t, w in pairs) for percent in (50, 99))
        label = f"HTTP, saturated, {name}: work done / capacity (p50 {p50:.0f}, p99 {p99:.0f} ms)"
        report_ratio(label, shares, 0.95 if "default" in name else None)
        if "default" in name:
            for trial in trials:  # nothing lost: each record that was read came to its end, once
                ended = [(counts.read, counts.acked) for counts in trial.counts]
                assert all(read == acked for read, acked in ended)
                assert sum(read for read, _ in ended) == len(trial.records)
    SERIES.parent.mkdir(parents=True, exist_ok=True)
    last = {name: trials[-1].series() for name, trials in found.items()}
    speeds = world_of(seeds[-1], seconds)
    SERIES.write_text(
        json.dumps(
            {
                "series": last,
                "seconds": seconds,
                "capacity": [speeds.capacity_per_s(n / 2) for n in range(int(seconds * 2))],
            }
        )
    )


@pytest.mark.benchmark(group="flow: cost")
@pytest.mark.parametrize("consumers", [12, 100])
def bench_acquire_ack(
    consumers: int, quick: bool, interleaved: Callable[..., Any], report_ratio: Callable[..., None]
) -> None:
    """``try_acquire`` and ``ack`` with 20 tuples out, in CPU time of the thread."""
    calls = 2_000 if quick else 50_000
    makers = {
        "default": lambda: FlowController(range(consumers)),
        "RttThreshold, round robin": lambda: FlowController(
            range(consumers), limit=RttThreshold, chooser=RoundRobin()
        ),
    }
    flows = {name: make() for name, make in makers.items()}
    out = {name: deque(flow.try_acquire() for _ in range(20)) for name, flow in flows.items()}

    def work(name: str) -> None:
        acquire, ack, leases = flows[name].try_acquire, flows[name].ack, out[name]
        for _ in range(calls):
            leases.append(acquire())
            ack(leases.popleft())

    seconds = interleaved({name: partial(work, name) for name in flows}, 3 if quick else 15)
    for name, taken in seconds.items():
        assert flows[name].in_flight == 20
        bound = 2.0 if consumers == 12 and name == "default" else None
        each = [1e6 * second / calls for second in taken]
        report_ratio(
            f"acquire + ack, {consumers} consumers, {name}", each, bound, at_most=True, unit="us"
        )
