"""Two threads with a ledger each, against two processes with one each."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from bench.contest import Interleaved
from bench.workers import Worker

IN_FLIGHT = 100_000
ROWS = 1_000_000  # of a turn of one thread or process
BATCHES = {100: None, 1_000: 0.9, 10_000: 0.9}

Report = Callable[..., None]


def elapsed(spans: list[list[float]]) -> float:
    """From the first start to the last end."""
    return max(end for _, end, _ in spans) - min(start for start, _, _ in spans)


@pytest.mark.parametrize("size", BATCHES)
def bench_threads(size: int, interleaved: Interleaved, report_ratio: Report, quick: bool) -> None:
    """Wall time, in batches of one size: how near threads come to what the machine has to give."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two threads need two processors")
    turns, rows = (2, ROWS // 10) if quick else (9, ROWS)
    common = {"in_flight": IN_FLIGHT, "rows": rows, "turns": turns, "size": size}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(Worker("apply_rows", seed=seed, **common)) for seed in (3, 4)
        ]
        threads = stack.enter_context(Worker("apply_in_threads", threads=2, **common))

        def in_processes() -> float:
            for process in processes:
                process.start()
            return elapsed([process.result() for process in processes])

        def in_threads() -> float:
            return elapsed(threads.turn())

        contestants = {"processes": in_processes, "threads": in_threads}
        seconds = interleaved(contestants, turns)
    rates = {n: 2 * rows / sorted(taken)[turns // 2] / 1e6 for n, taken in seconds.items()}
    label = (
        f"batches of {size:,}: two threads / two processes "
        f"({rates['threads']:.3g} / {rates['processes']:.3g} M records/s)"
    )
    pairs = zip(seconds["processes"], seconds["threads"], strict=True)
    report_ratio(label, [slower / faster for slower, faster in pairs], BATCHES[size])
