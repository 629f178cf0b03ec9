"""The jobs of workers.py's children. Each function sets up and returns a turn that times itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ackcore import Acker
from bench.contest import LedgerContestant
from bench.streams import CALL, Stream, ledger_class, tree_stream

SMALL = 200_000  # rows of a turn of calls that are short


class Span(NamedTuple):
    """When a turn ran, by a clock that all processes share, and the CPU time that it took."""

    start: float
    end: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Span:
    """Do it."""
    start, cpu = time.perf_counter(), time.thread_time()
    work()
    cpu_s = time.thread_time() - cpu
    return Span(start, time.perf_counter(), cpu_s)


class Turns:
    """An aged ledger that applies the next rows of its stream, turn by turn, and checks them."""

    def __init__(self, stream: Stream, rows: int, size: int, ledger: Any = None) -> None:
        self.contestant = LedgerContestant(stream, size=size)
        if ledger is not None:
            self.contestant.ledger = ledger
        self.contestant.age()
        self.length, self.at = rows, stream.aged

    def __call__(self) -> Span:
        """The next rows."""
        rows = slice(self.at, self.at + self.length)
        self.at = rows.stop
        prepared = self.contestant.prepare(rows)
        results = []
        span = timed(lambda: results.append(self.contestant.run(prepared)))
        self.contestant.check(rows, results[0])
        return span


def apply_rows(
    in_flight: int, rows: int, turns: int, size: int = CALL, seed: int = 3, *, whole: bool = False
) -> Turns:
    """`Ledger.apply` on churning trees, or on ``whole`` ones back to back."""
    return Turns(tree_stream(in_flight, rows * turns, seed=seed, whole=whole), rows, size)


def apply_by_acker(in_flight: int, rows: int, turns: int) -> Turns:
    """`Acker.apply` on churning trees, with a callback for the outcomes of each spout task."""
    acker = Acker(on_outcomes=lambda task, outcomes: None)
    return Turns(tree_stream(in_flight, rows * turns), rows, CALL, acker)


class Threads:
    """The same in threads of this process, each with its own ledger and stream, at once."""

    def __init__(self, jobs: list[Turns]) -> None:
        self.jobs = jobs

    def __call__(self) -> list[Span]:
        """The next rows of each."""
        barrier = threading.Barrier(len(self.jobs))
        spans: list[Span] = []

        def run(job: Turns, rows: slice) -> None:
            prepared = job.contestant.prepare(rows)
            results = []
            barrier.wait()
            spans.append(timed(lambda: results.append(job.contestant.run(prepared))))
            barrier.wait()  # checking one must not take the GIL from the other
            job.contestant.check(rows, results[0])

        threads = []
        for job in self.jobs:
            rows = slice(job.at, job.at + job.length)
            job.at = rows.stop
            threads.append(threading.Thread(target=run, args=(job, rows)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(spans) == len(self.jobs), "a thread failed; its traceback is above"
        return spans


def apply_in_threads(in_flight: int, rows: int, turns: int, size: int, threads: int) -> Threads:
    """`apply_rows` in that many threads."""
    seeds = range(3, 3 + threads)
    return Threads([apply_rows(in_flight, rows, turns, size, seed) for seed in seeds])


def grow(entries: int) -> Callable[[], dict[str, float]]:
    """Fill a ledger that was sized for nothing, in calls of 8192: the longest one, in ms."""
    rng = np.random.default_rng(5)
    roots = rng.integers(-(2**63), 2**63, entries)
    vals, tasks = np.ones(CALL, np.int64), np.zeros(CALL, np.int32)
    edges = [*range(0, entries, CALL), entries]
    calls = [roots[start:end] for start, end in pairwise(edges)]

    ledger_class()().apply(roots[:CALL], vals, tasks)  # what is done once in a process

    def turn() -> dict[str, float]:
        ledger = ledger_class()()
        spans = []
        for call in calls:
            n = len(call)
            start, cpu = time.perf_counter(), time.thread_time()
            ledger.apply(call, vals[:n], tasks[:n])
            spans.append((time.thread_time() - cpu, time.perf_counter() - start))
        assert len(ledger) == entries
        by_cpu, by_wall = (sorted(times) for times in zip(*spans, strict=True))
        return {
            "worst_ms": by_cpu[-1] * 1e3,
            "worst_wall_ms": by_wall[-1] * 1e3,
            "median_ms": by_cpu[len(by_cpu) // 2] * 1e3,
            "worst_at": CALL * spans.index(max(spans)),
        }

    return turn


def grow_memory(entries: int) -> Callable[[], dict[str, float]]:
    """Memory of this process, in bytes per root, while a ledger grows from nothing.

    After each growth, no root is added until all entries have moved, which is the worst case.
    Tables of fewer than a million roots are not counted.
    """
    roots = np.random.default_rng(9).integers(-(2**63), 2**63, entries)
    tasks = np.zeros(CALL, np.int32)
    acks = roots[:CALL], np.full(CALL, 1 << 40), np.full(CALL, -1, np.int32)
    ledger_class()().apply(*acks)  # what is done once in a process

    def resident() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return int(status["RssAnon"].split()[0]) << 10

    def turn() -> dict[str, float]:
        ledger = ledger_class()()
        before = resident()
        worst = {"one_table": 0.0, "two_tables": 0.0}
        for at in range(0, entries, CALL):
            columns = roots[at : at + CALL], roots[at : at + CALL]
            ledger.apply(*columns, tasks[: len(columns[0])])
            count = len(ledger)
            while len(ledger.tables) == 2:
                if count >= 1_000_000:
                    a_root = (resident() - before) / count
                    worst["two_tables"] = max(worst["two_tables"], a_root)
                ledger.apply(*acks)
            if count >= 1_000_000:
                worst["one_table"] = max(worst["one_table"], (resident() - before) / count)
        assert len(ledger) == entries
        return worst

    return turn


# ---- what compare.py compares ------------------------------------------------------------------


def ack_one_by_one(roots: int) -> Callable[[], Span]:
    """`ack` of roots that stay open."""
    rng = np.random.default_rng(4)
    ids = rng.integers(-(2**63), 2**63, roots)
    keys = ids.tolist()
    picks = [keys[pick] for pick in rng.integers(0, roots, SMALL).tolist()]
    ledger = ledger_class()()
    ledger.init_many(ids, np.full(roots, 1 << 62), np.zeros(roots, np.int32))

    def work() -> None:
        ack = ledger.ack
        for root in picks:
            ack(root, 1)

    return lambda: timed(work)


def merge_and_settle(roots: int) -> Callable[[], Span]:
    """`merge` of plain entries, all acked, into an empty ledger, and `settle`."""
    rng = np.random.default_rng(6)
    ids = rng.integers(-(2**63), 2**63, roots)
    source = ledger_class()(capacity=roots)
    source.fold(ids, np.zeros(roots, np.int64), np.zeros(roots, np.int32))
    entries = source.entries()
    del source

    def work() -> None:
        ledger = ledger_class()(capacity=roots)
        ledger.merge(entries)
        assert len(ledger.settle().root_ids) == roots

    return lambda: timed(work)
