"""`Ledger.apply` in batches of other sizes, on other ids and orders, at other SIMD levels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest

from bench.contest import Figures, Interleaved, LedgerContestant, hold
from bench.streams import CALL, Stream, tree_stream
from bench.workers import Worker

SIZES = (1_000, 100_000, 1_000_000, 10_000_000)  # trees in flight
BATCHES = {10: None, 100: 0.4, 1_000: 0.75, 10_000: None, 100_000: None}  # against 10,000
ROWS = 200_000  # of a turn with one size of batch

Report = Callable[..., None]


class BatchesOf(LedgerContestant):
    """One size of batch on a ledger that all sizes share, so that ten million roots fit."""

    lead_in = 0

    def __init__(self, stream: Stream, size: int, first: BatchesOf | None) -> None:
        super().__init__(stream, name=f"batches of {size:,}", size=size, capacity=1)
        self.place = list(BATCHES).index(size)
        self.first = first
        if first is not None:
            self.ledger = first.ledger

    def age(self) -> None:
        """Once for all."""
        if self.first is None:
            super().age()

    def rows(self, turn: int, calls: int) -> slice:
        """The rows that follow those of the size before."""
        start = self.stream.aged + (turn * len(BATCHES) + self.place) * ROWS
        return slice(start, start + ROWS)


@pytest.mark.parametrize("in_flight", SIZES)
def bench_batch_sizes(
    in_flight: int, interleaved: Interleaved, report_ratio: Report, quick: bool
) -> None:
    """Batches of 10 to 100,000, against those of 10,000."""
    if quick and in_flight > 100_000:
        pytest.skip("left out by --quick")
    turns = 2 if quick else 9
    stream = tree_stream(in_flight, turns * len(BATCHES) * ROWS)
    contestants: list[BatchesOf] = []
    for size in BATCHES:
        contestants.append(BatchesOf(stream, size, contestants[0] if contestants else None))
    figures = hold(interleaved, contestants, turns, 0)
    usual = contestants[list(BATCHES).index(10_000)].name
    for each in contestants:
        if each.name != usual:
            bound = BATCHES[each.size]
            report_ratio(figures.label(usual, each.name), figures.ratios(usual, each.name), bound)


@pytest.mark.parametrize("in_flight", SIZES[:3])
def bench_orders(
    in_flight: int, interleaved: Interleaved, report_ratio: Report, quick: bool
) -> None:
    """Ids in sequence and 2**32 apart, and whole trees back to back, against random ones.

    Each turn is on new ledgers with another seed of their hash, the same for all: how ids that
    follow a rule spread over the table is a matter of the seed. Look at the lowest ratio, too.
    """
    if quick and in_flight > 100_000:
        pytest.skip("left out by --quick")
    seeds, calls = (2, 20) if quick else (16, 80)
    rows = calls * CALL
    streams = {
        "random ids": tree_stream(in_flight, rows),
        "sequential ids": tree_stream(in_flight, rows, stride=1),
        "ids 2**32 apart": tree_stream(in_flight, rows, stride=2**32),
        "whole trees": tree_stream(in_flight, rows, whole=True),
    }
    contests = []
    for seed in np.random.default_rng(10).integers(0, 2**63, seeds).tolist():
        contestants = [
            LedgerContestant(stream, name=name, seed=seed) for name, stream in streams.items()
        ]
        contests.append(hold(interleaved, contestants, 1, calls))
    seconds = {name: [each.seconds[name][0] for each in contests] for name in streams}
    figures = Figures(in_flight, seconds)
    for name in streams:
        if name != "random ids":
            bound = 0.8 if "ids" in name else None
            ratios = figures.ratios("random ids", name)
            report_ratio(figures.label("random ids", name), ratios, bound)


@pytest.mark.parametrize("in_flight", SIZES[:2])
def bench_strides(
    in_flight: int, interleaved: Interleaved, report_ratio: Report, quick: bool
) -> None:
    """Ids 2**0 to 2**40 apart, each time another distance and seed, against random ones.

    What counts is the lowest ratio: a hash that is good for most seeds is bad for some users.
    """
    seeds, calls, turns = (5 if quick else 205), 10, 3
    random_ids = tree_stream(in_flight, calls * CALL * turns)
    ratios = []
    for k, seed in enumerate(np.random.default_rng(77).integers(0, 2**63, seeds).tolist()):
        strided = tree_stream(in_flight, calls * CALL * turns, stride=2 ** (k % 41))
        contestants = [
            LedgerContestant(random_ids, name="random", seed=seed),
            LedgerContestant(strided, name="strided", seed=seed),
        ]
        seconds = hold(interleaved, contestants, turns, calls).seconds
        ratios.append(min(seconds["random"]) / min(seconds["strided"]))
    report_ratio(f"{in_flight:,} in flight: ids 2**k apart / random ids", ratios, 0.8)


@pytest.mark.parametrize("in_flight", SIZES[:3])
def bench_levels(
    in_flight: int, interleaved: Interleaved, report_ratio: Report, quick: bool
) -> None:
    """The kernel's builds, each in a process of its own, against the baseline's."""
    if quick and in_flight != 100_000:
        pytest.skip("left out by --quick")
    turns, calls = (2, 16) if quick else (7, 128)
    with ExitStack() as stack:
        workers = {}
        for level in ("baseline", "avx2", "avx512"):
            worker = Worker(
                "apply_rows",
                environment={"ACKCORE_CPU": level},
                in_flight=in_flight,
                rows=calls * CALL,
                turns=turns,
            )
            try:
                workers[level] = stack.enter_context(worker)
            except RuntimeError:
                assert level != "baseline"  # this machine does not run the others, then
        seconds = interleaved(
            {level: lambda worker=worker: worker.turn()[2] for level, worker in workers.items()},
            turns,
        )
    for level in list(workers)[1:]:
        rate = calls * CALL / sorted(seconds[level])[turns // 2] / 1e6
        pairs = zip(seconds["baseline"], seconds[level], strict=True)
        label = f"{in_flight:,} in flight: {level} / baseline kernel ({rate:.3g} M records/s)"
        report_ratio(label, [slower / faster for slower, faster in pairs])
