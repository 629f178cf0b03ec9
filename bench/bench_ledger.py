"""`Ledger.apply` in calls of 8192: against LIMIT, the twin, and every peer that is here."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench import peers
from bench.contest import Contestant, Figures, Interleaved, LedgerContestant, Twin, hold
from bench.streams import CALL, Stream, native_level, tree_stream

SIZES = (1_000, 100_000, 1_000_000, 10_000_000)  # trees in flight
ALONE = 20  # calls that pytest-benchmark times

#: What a ratio has to be, by trees in flight.
LIMIT_BOUNDS = {
    "avx512": dict(zip(SIZES, (0.25, 0.40, 0.60, 0.60), strict=True)),
    "avx2": dict(zip(SIZES, (0.10, 0.15, 0.22, 0.22), strict=True)),
}
TWIN_BOUNDS = {1_000: 60, 100_000: 150, 1_000_000: 250}
MAP_BOUNDS = {1_000: 1.5, 100_000: 3, 1_000_000: 3, 10_000_000: 3}
NUMBA_BOUNDS = {1_000: 4, 100_000: 7, 1_000_000: 20}
DUCKDB_BOUNDS = dict.fromkeys(SIZES, 4)
STORM_BOUNDS = {100_000: 30}

Available = Callable[..., list[Contestant]]
Report = Callable[..., None]
Hold = Callable[..., Figures]


@pytest.fixture(scope="module")
def calls(quick: bool) -> tuple[int, int]:
    """Turns of a contest, and calls of a turn: a million records, after the lead-in."""
    return (3, 20) if quick else (5, 160)


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size}-in-flight")
def stream(request: pytest.FixtureRequest, quick: bool, calls: tuple[int, int]) -> Stream:
    """The rows for all contestants of one size."""
    if quick and request.param != 100_000:
        pytest.skip("left out by --quick")
    return tree_stream(request.param, (calls[0] * calls[1] + ALONE) * CALL)


@pytest.fixture
def contest(
    request: pytest.FixtureRequest, interleaved: Interleaved, stream: Stream, calls: tuple[int, int]
) -> Hold:
    """Hold a contest of our ledger and others; then pytest-benchmark times ours alone.

    All rates go into ``extra_info``, where plot.py finds them.
    """

    def run(others: Sequence[Contestant], clock: Callable[[], float] = time.thread_time) -> Figures:
        if not others:
            pytest.skip("none of these peers is here; the summary says why")
        ours = LedgerContestant(stream)
        figures = hold(interleaved, [ours, *others], *calls, clock)
        # Not before a peer could be missing: pytest-benchmark minds not being used.
        benchmark: BenchmarkFixture = request.getfixturevalue("benchmark")
        benchmark.extra_info["in_flight"] = stream.in_flight
        benchmark.extra_info["records_per_s"] = {
            name: round(figures.rate(name) * 1e6) for name in figures.seconds
        }
        rest = iter(stream.batches(slice(len(stream) - ALONE * CALL, len(stream))))
        taken = []

        def next_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
            taken.append(next(rest))
            return taken[-1].columns, {}

        outcomes = benchmark.pedantic(ours.ledger.apply, setup=next_call, rounds=ALONE)
        taken[-1].check(outcomes)
        gc.collect()
        return figures

    return run


pytestmark = pytest.mark.benchmark(group="apply by 8192, alone, after the contest of that name")


def bench_limit(contest: Hold, stream: Stream, report_ratio: Report) -> None:
    """Against the speed of memory: grown from nothing, and sized up front."""
    sized = LedgerContestant(stream, name="ackcore, sized up front", capacity=stream.most)
    figures = contest([peers.Limit(stream), sized])
    bounds = LIMIT_BOUNDS.get(native_level(), {})
    bound = bounds.get(stream.in_flight)
    report_ratio(figures.label("LIMIT"), figures.ratios("LIMIT"), bound)
    report_ratio(figures.label("LIMIT", sized.name), figures.ratios("LIMIT", sized.name))


def bench_twin(contest: Hold, stream: Stream, report_ratio: Report) -> None:
    """Against the plain-Python ledger."""
    if stream.in_flight not in TWIN_BOUNDS:
        pytest.skip("a twin of so many trees takes minutes")
    figures = contest([Twin(stream)])
    bound = TWIN_BOUNDS[stream.in_flight]
    report_ratio(figures.label("twin"), figures.ratios("twin"), bound)


def bench_maps(contest: Hold, stream: Stream, available: Available, report_ratio: Report) -> None:
    """Against hash maps: the best of C++ as they are sized and with room, and numba's Dict."""
    maps = available(*(partial(peers.CxxMap, stream, kind) for kind in peers.CxxMap.NAMES))
    roomy = available(*(partial(peers.CxxMap, stream, kind, 2) for kind in ("boost", "absl")))
    numba = available(partial(peers.NumbaDict, stream))
    sized = LedgerContestant(stream, name="ackcore, sized up front", capacity=stream.most)
    figures = contest([*maps, *roomy, *numba, sized] if maps else numba)
    for each in (*maps, *roomy, *numba):
        bound = NUMBA_BOUNDS.get(stream.in_flight) if each in numba else None
        ratios = figures.ratios(each.name)
        report_ratio(figures.label(each.name), ratios, bound)
    if maps:
        # The bound is one against maps that reserve what is pending.
        best = max(maps, key=lambda each: figures.rate(each.name)).name
        label = f"{stream.in_flight:,} in flight: {{}} / the best C++ map here, {best}"
        report_ratio(label.format("ackcore"), figures.ratios(best), MAP_BOUNDS[stream.in_flight])
        report_ratio(label.format(sized.name), figures.ratios(best, sized.name))
    if roomy:
        best = max(roomy, key=lambda each: figures.rate(each.name)).name
        label = f"{stream.in_flight:,} in flight: ackcore / the best with room, {best}"
        report_ratio(label, figures.ratios(best))


def bench_groups(contest: Hold, stream: Stream, available: Available, report_ratio: Report) -> None:
    """Against a group-by, by the clock of the process: it may have threads of its own."""
    figures = contest(available(partial(peers.DuckDb, stream)), time.process_time)
    bound = DUCKDB_BOUNDS[stream.in_flight]
    report_ratio(figures.label(peers.DuckDb.name), figures.ratios(peers.DuckDb.name), bound)


def bench_storm(contest: Hold, stream: Stream, report_ratio: Report) -> None:
    """Against Storm's own acker, on the CPU time of the JVM's thread."""
    if stream.in_flight > 1_000_000:
        pytest.skip("ten million AckObjects are more than an acker's heap would be given")
    fresh, reused = peers.Storm(stream, "fresh"), peers.Storm(stream, "reused")
    figures = contest([fresh, reused])
    bound = STORM_BOUNDS.get(stream.in_flight)
    report_ratio(figures.label(fresh.name), figures.ratios(fresh.name), bound)
    report_ratio(figures.label(reused.name), figures.ratios(reused.name))
