"""The growth of the driver's Python, by the number of small records that fail.

Each figure is that of a process of its own. ACKCORE_BENCH_FAILING says how many records fail,
1,000,000,5,000,000 and 10,000,000 by default; with ACKCORE_BENCH_BASE, a commit, the same is
measured of that one as well.
"""

from __future__ import annotations

import os

import pytest

from bench.compare import built
from bench.workers import ROOT, Worker

PATHS = ("waits", "dies", "no room", "settled", "behind an exchange")


@pytest.mark.parametrize("path", PATHS)
def bench_all_fail_at_once(path, quick, report_ratio):
    """All records of a micro-batch fail: RSS, and RssAnon, which leaves out what is mapped."""
    pytest.importorskip("pyspark")
    asked = os.environ.get("ACKCORE_BENCH_FAILING", "1000000,5000000,10000000")
    sizes = [100_000] if quick else [int(size) for size in asked.split(",")]
    base = os.environ.get("ACKCORE_BENCH_BASE")
    homes = {"": ROOT} if base is None else {f" at {base}": built(base), "": ROOT}
    for rows in sizes:
        for at, home in homes.items():
            environment = {"PYSPARK_SUBMIT_ARGS": "--driver-memory 4g pyspark-shell"}
            job = "driver_memory_job.FailingBatches"
            with Worker(job, environment=environment, home=home) as worker:
                found = worker.turn(path, rows)
            taken = f"{rows:,} records, {path}{at} ({found['seconds']:.1f} s)"
            for name in ("RSS", "RssAnon"):
                report_ratio(f"{taken}: {name}", [found[name]], 300, at_most=True, unit="MB")
