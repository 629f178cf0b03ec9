"""Folding, merging and settling in bulk, and what a pending root costs in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from ackcore._records import ACKED
from bench.streams import ledger_class
from bench.workers import Worker

Report = Callable[..., None]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@pytest.fixture
def roots(quick: bool) -> np.ndarray:
    """The roots of many entries."""
    return np.random.default_rng(9).integers(-(2**63), 2**63, 100_000 if quick else 1_000_000)


@pytest.fixture
def per_root(benchmark: BenchmarkFixture, quick: bool, roots: np.ndarray) -> Callable[..., Any]:
    """Time a call that goes through all roots, each time on what ``setup`` makes."""

    def run(call: Callable[..., Any], setup: Callable[[], Arguments]) -> Any:
        result = benchmark.pedantic(call, setup=setup, rounds=3 if quick else 9, warmup_rounds=1)
        if benchmark.stats:  # there are none under --benchmark-disable
            benchmark.extra_info["roots_per_s"] = round(len(roots) / benchmark.stats.stats.median)
        return result

    return run


def folded(roots: np.ndarray) -> Any:
    """A ledger sized up front that has one init of each root, all complete."""
    ledger = ledger_class()(capacity=len(roots))
    ledger.fold(roots, np.zeros(len(roots), np.int64), np.zeros(len(roots), np.int32))
    return ledger


@pytest.mark.benchmark(group="bulk, a million roots")
def bench_fold(per_root: Callable[..., Any], roots: np.ndarray) -> None:
    """`fold` of one message of each root into an empty ledger sized for them."""
    vals, tasks = np.zeros(len(roots), np.int64), np.zeros(len(roots), np.int32)
    ledgers = []

    def fresh() -> Arguments:
        ledgers[:] = [ledger_class()(capacity=len(roots))]
        return (ledgers[0],), {}

    per_root(lambda ledger: ledger.fold(roots, vals, tasks), fresh)
    assert len(ledgers[0]) == len(roots)


@pytest.mark.benchmark(group="bulk, a million roots")
@pytest.mark.parametrize("into", ["empty", "same"])
def bench_merge(per_root: Callable[..., Any], roots: np.ndarray, into: str) -> None:
    """`merge` of saved entries into an empty ledger, and into one that has the same roots."""
    entries = folded(roots).entries()
    ledgers = []

    def fresh() -> Arguments:
        empty = ledger_class()(capacity=len(roots))
        ledgers[:] = [empty if into == "empty" else folded(roots)]
        return (ledgers[0],), {}

    per_root(lambda ledger: ledger.merge(entries), fresh)
    assert len(ledgers[0]) == len(roots)


@pytest.mark.benchmark(group="bulk, a million roots")
def bench_settle_ledger(per_root: Callable[..., Any], roots: np.ndarray) -> None:
    """`Ledger.settle` when all is decided."""
    settled = per_root(lambda ledger: ledger.settle(), lambda: ((folded(roots),), {}))
    assert len(settled.root_ids) == len(roots)
    assert (settled.statuses == ACKED).all()


@pytest.mark.benchmark(group="bulk, a million roots")
def bench_entries(per_root: Callable[..., Any], roots: np.ndarray) -> None:
    """`entries`: all that is pending as columns."""
    ledger = folded(roots)
    entries = per_root(lambda: ledger.entries(), lambda: ((), {}))
    assert len(entries) == len(roots)


def bench_memory(roots: np.ndarray, quick: bool, report_ratio: Report) -> None:
    """Bytes of memory for a pending root, without a clock. Not timed.

    *Sized up front*: capacity is the number of pending roots. *After growth*, *while it moves*: a
    ledger grows from nothing to ten million roots, and its process's memory is read after each
    call: with one table, and with two.
    """
    n = len(roots)
    report_ratio("bytes a root, sized up front", [folded(roots).nbytes / n], 48, True, "B")
    with Worker("grow_memory", entries=1_200_000 if quick else 10_000_000) as worker:
        worst = worker.turn()
    for name, key in (("after growth", "one_table"), ("while it moves", "two_tables")):
        report_ratio(f"bytes a root {name}, at worst", [worst[key]], 96, True, "B")
