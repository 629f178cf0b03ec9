"""The longest calls: while a table grows, at a turn of the wheel, while the expired are taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.streams import CALL, ledger_class
from bench.workers import Worker

ENTRIES = 10_000_000
SWEEP_CALLS = 128  # not enough to finish a sweep of so many

Report = Callable[..., None]


@pytest.fixture
def entries(quick: bool) -> int:
    """How many roots are pending."""
    return 200_000 if quick else ENTRIES


@pytest.mark.parametrize(("pages", "bound_ms"), [("huge", 3), ("small", 10)])
def bench_growth(pages: str, bound_ms: float, entries: int, report_ratio: Report) -> None:
    """Growth from nothing: the longest call of 8192, of each of three times.

    Small pages: numpy is told not to ask for huge ones, in a process where it has not yet begun.
    """
    environment = {"NUMPY_MADVISE_HUGEPAGE": "1" if pages == "huge" else "0"}
    with Worker("grow", environment=environment, entries=entries) as worker:
        turns = [worker.turn() for _ in range(3)]
    wall = statistics.median(turn["worst_wall_ms"] for turn in turns)
    usual = statistics.median(turn["median_ms"] for turn in turns)
    where = ", ".join(f"{turn['worst_at'] / 1000:,.0f}k" for turn in turns)
    label = (
        f"growth to {entries:,}, {pages} pages: longest call of 8192 "
        f"(at {where} roots; {wall:.2f} ms by the wall clock; median call {usual:.2f} ms)"
    )
    report_ratio(label, [turn["worst_ms"] for turn in turns], bound_ms, at_most=True, unit="ms")


def milliseconds(call: Callable[..., Any], *arguments: object) -> tuple[float, Any]:
    """CPU time of one call, and what it returned."""
    start = time.thread_time()
    result = call(*arguments)
    return (time.thread_time() - start) * 1e3, result


def bench_expiry(entries: int, report_ratio: Report) -> None:
    """Half of all entries expire: `rotate`, `expired(8192)` until all are out, batches meanwhile.

    A sweep is under way when entries expired and were not taken: batches then clear them away as
    they go. The batch is of acks whose roots are pending, which leaves as many as there were.
    """
    half = entries // 2
    rng = np.random.default_rng(8)
    roots = rng.integers(-(2**63), 2**63, 2 * half)
    ones, tasks = np.ones(half, np.int64), np.zeros(half, np.int32)
    acks = np.full(CALL, -1, np.int32)
    rotations, slices, ratios = [], [], []
    for _ in range(3):
        ledger = ledger_class()(capacity=2 * half, buckets=3)
        ledger.apply(roots[:half], ones, tasks)
        rotations.extend(milliseconds(ledger.rotate)[0] for _ in range(2))
        ledger.apply(roots[half:], ones, tasks)
        young = roots[half:]
        columns = [
            (rng.choice(young, CALL), rng.integers(2**40, 2**41, CALL), acks)
            for _ in range(2 * SWEEP_CALLS)
        ]
        idle = [milliseconds(ledger.apply, *batch)[0] for batch in columns[:SWEEP_CALLS]]
        rotations.append(milliseconds(ledger.rotate)[0])
        taken = 0
        while taken < half // 2:
            spent, expired = milliseconds(ledger.expired, CALL)
            taken += len(expired)
            slices.append(spent)
        rotations.append(milliseconds(ledger.rotate)[0])  # which drops the other quarter
        assert ledger.stats.expired_untaken == half - taken
        busy = [milliseconds(ledger.apply, *batch)[0] for batch in columns[SWEEP_CALLS:]]
        assert len(ledger) == half  # those that were acked, and no others
        ratios.append(statistics.median(busy) / statistics.median(idle))
    label = f"{entries:,} pending"
    report_ratio(f"{label}: rotate()", rotations, 1, at_most=True, unit="ms")
    calls = f"longest of {len(slices)} (median {statistics.median(slices):.2f} ms)"
    name = f"{label}: expired(8192), {calls}"
    report_ratio(name, [max(slices)], 5, at_most=True, unit="ms")
    report_ratio(f"{label}: a batch while a sweep is under way / idle", ratios, 2.5, at_most=True)
