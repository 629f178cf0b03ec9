"""The cost of a micro-batch of the loop after thousands of others, against that of the first ones.

ACKCORE_BENCH_BATCHES says how many micro-batches, 1,000 by default.
"""

from __future__ import annotations

import gc
import os
import statistics
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ackcore.spark import QueryListener, RateSpout, start, to_parquet
from ackcore.tables import count, session, tumbling
from ackcore.topology import BatchBolt, Reject, TopologyBuilder
from bench.processes import cpu_s, processes_below

ROWS, KEYS = 1000, 5000
#: Spark's history of jobs: full before the first measurement, at 100 micro-batches.
HISTORY = ("spark.ui.retainedJobs", "spark.ui.retainedStages", "spark.sql.ui.retainedExecutions")


@pytest.fixture(scope="module")
def spark():
    """Two cores, and a history of 50 jobs."""
    quiet_spark = pytest.importorskip("ackcore.examples.quiet_spark")
    with quiet_spark.spark_session("local[2]", dict.fromkeys(HISTORY, "50")) as (session, _):
        yield session


class Flaky(BatchBolt):
    """Hands numbers on; one in 250 fails at its first attempt, and one in 5,000 is rejected."""

    outputs = RateSpout.schema
    needs_identity = True

    def process(self, batch: Any, out: Any) -> None:
        """Fail some rows, and hand on the others."""
        good = []
        for row, value in enumerate(batch["value"].to_pylist()):
            if value % 5000 == 1:
                out.fail([row], [Reject(f"{value} is refused")])
            elif value % 250 == 0 and out.identity.attempts[row] == 0:
                out.fail([row], [ConnectionError(f"{value} fails once")])
            else:
                good.append(row)
        out.emit(self.answers(batch.take(good)), parents=good)

    def answers(self, batch: Any) -> Any:
        """Return the rows to emit."""
        return batch


class Stateful(Flaky):
    """The same, with the columns of tables; it looks up one of them."""

    outputs = pa.schema([*RateSpout.schema, ("key", pa.int64()), ("at", pa.timestamp("s"))])
    uses = ("totals",)

    def answers(self, batch: Any) -> Any:
        """Return the rows with a key of 5,000, and a time; 100 rows are a second."""
        values = batch["value"].to_numpy()
        seconds = pa.array(values // 100).cast(pa.timestamp("s"))
        columns = [batch["value"], pa.array(values % KEYS), seconds]
        rows = pa.record_batch(columns, schema=self.outputs)
        self.tables["totals"].lookup(rows)
        return rows


def anonymous_mb(pid: int) -> float:
    """The memory of a process without pages of files, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    anonymous = next(line for line in lines if line.startswith("RssAnon"))
    return int(anonymous.split()[1]) * 1024 / 1e6


def memory_mb(spark: Any) -> dict[str, float]:
    """The memory that the driver's Python, its JVM and its workers cannot give back, in MB."""
    gc.collect()  # frees JVM objects too, by Py4J
    spark._jvm.System.gc()
    runtime = spark._jvm.Runtime.getRuntime()
    workers = [
        pid
        for pid in processes_below(os.getpid())
        if b"daemon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return {
        "driver's Python": anonymous_mb(os.getpid()),
        "JVM's heap": (runtime.totalMemory() - runtime.freeMemory()) / 1e6,
        "largest worker": max(map(anonymous_mb, workers)),
    }


@pytest.mark.parametrize("bolt", [Flaky, Stateful])
def bench_flat(spark, tmp_path, quick, report_ratio, bolt):
    """Wall time, CPU time and memory of the last tenth of the micro-batches against the second.

    The JVM compiles and fills its caches during the first tenth.
    """
    batches = 50 if quick else int(os.environ.get("ACKCORE_BENCH_BATCHES", 1000))
    tenth = batches // 10
    found: list[dict[str, float]] = []

    class Noted(QueryListener):
        def __init__(self) -> None:
            self.took: list[float] = []
            self.cpu = cpu_s()

        def on_progress(self, progress: Any, counts: Any) -> None:
            self.took.append(progress.duration_s)
            if len(self.took) == tenth:
                by_wall, by_cpu = statistics.median(self.took), (cpu_s() - self.cpu) / tenth
                found.append({"wall time": by_wall, "CPU time": by_cpu} | memory_mb(spark))
                print(len(found), found[-1])
                self.took, self.cpu = [], cpu_s()

    builder = TopologyBuilder()
    source = RateSpout(ROWS * batches, max_rows_per_batch=ROWS)
    dedup: dict[str, Any] = {} if bolt is Flaky else {"dedup": "value", "within_keys": 20 * ROWS}
    builder.spout("numbers", source, **dedup)
    builder.bolt("flaky", bolt()).shuffle("numbers")
    builder.sink("flaky", to_parquet(tmp_path / "sink"))
    if bolt is Stateful:
        of: dict[str, Any] = {"from_": "flaky", "key": "key", "value": {"n": count()}}
        builder.table("totals", **of)
        builder.table("hours", **of, window=tumbling(60, "at"))
        builder.table("visits", **of, window=session(20, "at"))
        builder.sink("hours.closed", to_parquet(tmp_path / "hours"))
        builder.sink("visits.closed", to_parquet(tmp_path / "visits"))
    query = start(
        builder.build(backoff_s=0.2, max_backoff_s=1),
        spark,
        tmp_path / "checkpoint",
        trigger={"availableNow": True},
        listeners=[Noted()],
    )
    query.await_termination()
    counts = query.counts
    assert (counts.acked, counts.dead) == (ROWS * batches - batches // 5, batches // 5)
    for name, before in found[1].items():
        after = statistics.median(each[name] for each in found[-3:])
        title = (
            f"{bolt.__name__}, micro-batches up to {batches:,} / up to {2 * tenth:,}: "
            f"{name} ({before:.3g} before)"
        )
        report_ratio(title, [after / before], 1.1, at_most=True)
