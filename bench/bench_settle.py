"""Settling a Parquet table of ack events on Spark, against Spark SQL and a bare crossing.

Trees of five messages (an INIT and four ACKs); ACKCORE_BENCH_ROWS says how many rows, 20 million
by default. *Scattered*: the messages lie anywhere in the table. *Local*: those of a tree lie
together, as what one task wrote does. Contestants, in turn, each a whole Spark job, wall time:

- sql: ``groupBy("root_id").agg(bit_xor("val"), max("task"))``, every row taken (a noop sink);
- crossing: a ``mapInArrow`` that counts the rows, so what it costs that Python sees them;
- settle: `ackcore.spark.settle` of the same DataFrame, every outcome taken;
- settle_parquet: the same from the files.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as sql

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import settle, settle_parquet
from bench.topology_jobs import MESSAGES, take_all, write_events


@pytest.fixture(scope="module")
def rows(quick: bool) -> int:
    """How many rows the tables have."""
    return int(os.environ.get("ACKCORE_BENCH_ROWS", 200_000 if quick else 20_000_000))


@pytest.fixture(scope="module")
def spark():
    """Two cores, room for the tables' shuffles, and Spark's own settings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_SUBMIT_ARGS", "--driver-memory 4g pyspark-shell")
        with spark_session("local[2]") as (session, _):
            # As Spark comes, so that its aggregation is what a user would see.
            session.conf.set("spark.sql.adaptive.enabled", "true")
            session.conf.set("spark.sql.shuffle.partitions", "200")
            yield session


@pytest.fixture(scope="module", params=["scattered", "local"])
def table(request, rows, tmp_path_factory) -> tuple[str, Path]:
    """A directory of Parquet files, and how the trees lie in them."""
    directory = tmp_path_factory.mktemp(request.param)
    write_events(directory, rows, scattered=request.param == "scattered")
    return request.param, directory


def count_rows(batches):
    """The crossing: let Python see every batch, and do nothing with it."""
    yield pa.RecordBatch.from_pydict({"n": [sum(len(batch) for batch in batches)]})


def bench_settle(spark, table, rows, quick, report_ratio, interleaved):
    """Whole jobs, start to end, in turn; each ratio is of one round."""
    layout, directory = table
    frame = spark.read.parquet(str(directory))
    by_root = frame.groupBy("root_id").agg(sql.bit_xor("val"), sql.max("task"))
    contestants = {
        "sql": lambda: take_all(by_root),
        "crossing": lambda: frame.mapInArrow(count_rows, "n bigint").collect(),
        "settle": lambda: take_all(settle(frame)),
        "settle_parquet": lambda: take_all(settle_parquet(spark, directory)),
    }
    for settled in (settle(frame), settle_parquet(spark, directory)):
        counts = dict(settled.groupBy("status").count().collect())
        assert counts == {"ACKED": rows // MESSAGES}
    for work in contestants.values():  # the JVM compiles what is used
        work()
    seconds = interleaved(contestants, 1 if quick else 5, time.perf_counter)

    def compare(slow: str, fast: str, bound: float | None) -> None:
        taken = " / ".join(f"{statistics.median(seconds[name]):.2f}" for name in (slow, fast))
        ratios = [a / b for a, b in zip(seconds[slow], seconds[fast], strict=True)]
        report_ratio(f"{layout}, {rows:,} rows: {slow} / {fast} ({taken} s)", ratios, bound)

    scattered = layout == "scattered"
    compare("sql", "settle", 2 if scattered else 1)
    compare("sql", "crossing", None)
    compare("crossing", "settle", 0.85 if scattered else 0.9)
    compare("sql", "settle_parquet", 8 if scattered else 4)
