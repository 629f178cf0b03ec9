"""The cost of observing a query: metrics, traces, a page that is looked at.

A page or a scrape costs a query less than the spread of any contest on Spark, so it is asked for
far more often than anybody would, and its part is reckoned from how often it was; what a listener
takes of each micro-batch is timed where it is called. What looking itself takes is
bench_looking.py.
"""

from __future__ import annotations

import os
import statistics
import time
import urllib.request
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest

from ackcore import testing
from ackcore.metrics import OpenTelemetryListener, PrometheusListener
from ackcore.spark import start
from ackcore.ui.server import PageServer
from bench import topologies
from bench.processes import cpu_s
from bench.topologies import word_count

LINES = "id bigint, line string"
MICRO_ROWS = 10_000
#: How often the server is asked, and how often a page asks.
ASKED_EVERY_S, PAGE_EVERY_S = 0.05, 3.0


def bench_seeing(spark, lines, rows, whole, contest):
    """Metrics for Prometheus and OpenTelemetry, and a trace of one record in a thousand."""

    def run(seen: bool = False, **settings: Any) -> None:
        listeners = [PrometheusListener(), OpenTelemetryListener()] if seen else []
        frame = spark.read.parquet(str(lines))
        whole(word_count(frame), rows, listeners=listeners, **settings)
        if seen:
            assert b"ackcore_acked_total" in generate_latest(listeners[0].registry)

    contest(
        f"word count, {rows:,} lines",
        {
            "unseen": run,
            "metrics": partial(run, True),
            "traced": partial(run, trace_per_million=1000),
        },
        {("unseen", "metrics"): None, ("unseen", "traced"): None},
        fine=True,
    )


@pytest.fixture
def stream(spark, tmp_path, new_path):
    """``stream(micro_batches, rows, **how)`` starts a word count of so many equal files."""

    def stream(micro_batches: int, rows: int, **how: Any) -> Any:
        topologies.write_lines(tmp_path, [rows])
        source, (first,) = tmp_path / "in", tmp_path.glob("*.parquet")
        source.mkdir()
        for number in range(micro_batches):
            os.link(first, source / f"{number}.parquet")
        reader = spark.readStream.schema(LINES).option("maxFilesPerTrigger", 1)
        return start(word_count(reader.parquet(str(source))).build(), spark, new_path(), **how)

    return stream


def bench_looked_at(stream, ends, quick, report_ratio):
    """A stream whose status is asked for 20 times a second of a server in its driver, or not.

    A page asks every three seconds. By turns, in the order on, off, off, on, of as many micro-
    batches each; of each turn the first is not counted, in which the page's server starts or ends.
    Who asks runs in the same process.
    """
    counted, turns, rows = (2, 4, MICRO_ROWS) if quick else (8, 32, 4 * MICRO_ROWS)
    query = stream(micro_batches := turns * (counted + 1) + 2, rows)

    def ended(number: int, page: Any = None) -> np.ndarray:
        """When micro-batch `number` ended, by the wall and by CPU time, and how often was asked."""
        due, asked = time.monotonic(), 0
        while len(ends.times) <= number:
            assert query.is_active, query.exception
            if page is not None and time.monotonic() >= due:
                due += ASKED_EVERY_S
                asked += 1
                with urllib.request.urlopen(f"{page.url}api/0/status") as answer:
                    assert answer.read()
            time.sleep(0.005)
        return np.array([ends.times[number], cpu_s(), asked])

    taken: dict[bool, list[np.ndarray]] = {True: [], False: []}
    last = 1
    ended(last)
    for turn in range(turns):
        looked_at = turn % 4 in (0, 3)
        with PageServer([query._checkpoint]) if looked_at else nullcontext() as page:
            before = ended(last + 1, page) * [1, 1, 0]
            last += counted + 1
            taken[looked_at].append(ended(last, page) - before)
    query.stop()
    assert query.counts.acked == query.counts.records == rows * micro_batches
    looked, alone = (np.array(taken[some]) / [counted, counted, 1] for some in (True, False))
    pages = looked[:, 2].sum() / (counted * looked[:, 0].sum()) * PAGE_EVERY_S
    for column, kind in enumerate(("wall", "CPU")):
        medians = " / ".join(f"{np.median(each[:, column]):.3f}" for each in (looked, alone))
        ratios = looked[:, column] / alone[:, column]
        title = f"micro-batch of {rows:,} rows: looked at / not, {kind}"
        report_ratio(f"{title}, {pages:.0f} pages ({medians} s)", ratios.tolist())
        one = 1 + (ratios - 1) / pages
        report_ratio(f"{title}, a page's part of that", one.tolist(), 1.02, at_most=True)


class Timed:
    """A listener that notes what it takes of each micro-batch."""

    def __init__(self, listener: Any) -> None:
        self.listener = listener
        self.seconds: list[float] = []

    def on_progress(self, progress: Any, counts: Any) -> None:
        """Note it."""
        began = time.perf_counter()
        self.listener.on_progress(progress, counts)
        self.seconds.append(time.perf_counter() - began)


def bench_listeners(stream, ends, quick, report_ratio):
    """Both metrics listeners on a stream of small micro-batches, and a scrape each 15 s."""
    count = 6 if quick else 60
    listeners = [Timed(PrometheusListener()), Timed(OpenTelemetryListener())]
    query = stream(count, MICRO_ROWS, listeners=listeners, trigger={"availableNow": True})
    assert query.await_termination(600)
    assert query.counts.acked == MICRO_ROWS * count
    registry = listeners[0].listener.registry
    scrapes = []
    for _ in range(count):
        began = time.perf_counter()
        assert b"ackcore_acked_total" in generate_latest(registry)
        scrapes.append(time.perf_counter() - began)
    periods = np.diff(ends.times)
    told = np.sum([each.seconds for each in listeners], axis=0)[1:]
    title = f"micro-batch of {MICRO_ROWS:,} rows ({statistics.median(periods):.3f} s)"
    taken = f"{1e3 * np.median(told):.2f} ms, and {1e3 * np.median(scrapes):.1f} ms each 15 s"
    report_ratio(
        f"{title}: metrics' part ({taken})",
        (1 + told / periods + np.median(scrapes) / 15).tolist(),
        1.02,
        at_most=True,
    )


def bench_testing_run(quick, report_ratio):
    """A test of a topology in this process: from rows to counts, outputs and dead letters."""
    lines = [{"id": number, "line": "to be or not to be"} for number in range(10)]
    seconds = []
    for _ in range(5 if quick else 50):
        began = time.perf_counter()
        topology = word_count(testing.Source(topologies.LINES)).build()
        done = testing.run(topology, {"lines": lines})
        seconds.append(1e3 * (time.perf_counter() - began))
        assert done.counts.acked == len(lines)
    report_ratio("testing.run of ten lines, a word count", seconds[1:], unit="ms")
