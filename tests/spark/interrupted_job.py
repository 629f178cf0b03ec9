"""A batch that is interrupted by real signals, in a process of its own; says how it went as JSON.

    python interrupted_job.py directory

Each line of the source takes its time, as long as the file ``slow`` is there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pyarrow as pa

from ackcore.spark import RunCancelled, run_batch, to_parquet
from ackcore.topology import BasicBolt, TopologyBuilder

LINES = 40


class Slow(BasicBolt):
    outputs = pa.schema([("line", pa.int64())])

    def __init__(self, directory):
        self.directory = directory

    def execute(self, tuple, collector):
        Path(self.directory, "begun").touch()
        until = time.monotonic() + 60
        while Path(self.directory, "slow").exists() and time.monotonic() < until:
            time.sleep(0.02)
        collector.emit((tuple["id"],))


def once_begun(directory, then):
    """Do something in another thread when a bolt is at work; return when that was, in a list."""
    Path(directory, "begun").unlink(missing_ok=True)
    when = []

    def run():
        while not Path(directory, "begun").exists():
            time.sleep(0.02)
        when.append(time.monotonic())
        then()

    threading.Thread(target=run, daemon=True).start()
    return when


def main(directory):
    from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

    with spark_session("local[2]", {}) as (spark, _):
        builder = TopologyBuilder()
        builder.spout("lines", spark.range(LINES))
        builder.bolt("slow", Slow(directory)).shuffle("lines")
        builder.sink("slow", to_parquet(f"{directory}/sink"))
        topology = builder.build()
        plan = Path(directory, "checkpoint", "ackcore", "batches", "0.plan")

        def press():
            os.killpg(0, signal.SIGINT)  # as a terminal does: to the whole group

        def cancel():
            spark.sparkContext.cancelAllJobs()

        def cancel_group():
            spark.sparkContext.cancelJobGroup("mine")

        Path(directory, "slow").touch()
        said = []
        pyspark_handler = signal.getsignal(signal.SIGINT)
        ways = [
            (pyspark_handler, press),
            (signal.default_int_handler, press),  # what Jupyter has while a cell runs
            (pyspark_handler, cancel),
            (pyspark_handler, cancel_group),
        ]
        spark.sparkContext.setJobGroup("mine", "")
        for handler, then in ways:
            signal.signal(signal.SIGINT, handler)
            when = once_begun(directory, then)
            try:
                run_batch(topology, spark, f"{directory}/checkpoint")
            except (KeyboardInterrupt, RunCancelled) as error:
                took = time.monotonic() - when[0]
                body = json.loads(plan.read_text().splitlines()[0])
                said.append([type(error).__name__, str(error), took, body])
        Path(directory, "slow").unlink()
        books = run_batch(topology, spark, f"{directory}/checkpoint")
        rows = sorted(row.line for row in spark.read.parquet(f"{directory}/sink").collect())
        result = {"said": said, "books": books.to_json(), "rows": rows}
        Path(directory, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
