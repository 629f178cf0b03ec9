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
from pyspark.sql import DataFrame

from ackcore.spark import RunCancelled, run_batch, to_parquet
from ackcore.spark.base.versions import to_arrow
from ackcore.spark.dead_letters.checkpoints import checkpoint_at
from ackcore.topology import BasicBolt, TopologyBuilder

LINES = 40


class Slow(BasicBolt):
    outputs = pa.schema([("line", pa.int64())])

    def __init__(self, directory, number):
        self.directory, self.begun = directory, f"begun-{number}"

    def wait(self):
        # Tasks of one that was interrupted before may come to this line late.
        Path(self.directory, self.begun).touch()
        until = time.monotonic() + 60
        while Path(self.directory, "slow").exists() and time.monotonic() < until:
            time.sleep(0.02)

    def execute(self, tuple, collector):
        self.wait()
        collector.emit((tuple["id"],))


def once_begun(slow, then):
    """Do something in another thread when it is at work; return when that was, in a list."""
    when = []

    def run():
        while not Path(slow.directory, slow.begun).exists():
            time.sleep(0.02)
        when.append(time.monotonic())
        then()

    threading.Thread(target=run, daemon=True).start()
    return when


class PassOn(BasicBolt):
    outputs = pa.schema([("line", pa.int64())])

    def execute(self, tuple, collector):
        collector.emit((tuple["id"],))


def sinks_that_are_interrupted(directory, spark, ways):
    """Ctrl-C while a sink waits for a job of its own: how long they took, and the end of it."""

    def topology(slow, act):
        def hold(batches):
            slow.wait()
            yield from batches

        builder = TopologyBuilder()
        builder.spout("lines", spark.range(1))
        builder.bolt("pass", PassOn()).shuffle("lines")
        builder.sink("pass", lambda frame, n: act(frame.mapInArrow(hold, "line long")))
        return builder.build()

    took = []
    # The one waits for its job as it is interrupted, and the other leaves it behind.
    acts = [to_arrow, DataFrame.collect, to_arrow]
    tracker = spark.sparkContext.statusTracker()
    for number, ((handler, press), act) in enumerate(zip(ways, acts, strict=True), 10):
        signal.signal(signal.SIGINT, handler)
        slow = Slow(directory, number)
        when = once_begun(slow, press)
        try:
            run_batch(topology(slow, act), spark, f"{directory}/other")
        except (KeyboardInterrupt, SystemExit):
            while tracker.getActiveJobsIds() and time.monotonic() < when[0] + 10:
                time.sleep(0.02)
            took.append(time.monotonic() - when[0])
        assert signal.getsignal(signal.SIGINT) is handler
    Path(directory, "slow").rename(Path(directory, "fast"))
    counts = run_batch(topology(slow, act), spark, f"{directory}/other")
    Path(directory, "fast").rename(Path(directory, "slow"))
    return took, counts.acked


def main(directory):
    from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

    # A job that is cancelled frees its slots at once, and not after 2 s.
    conf = {"spark.python.task.killTimeout": "100ms"}
    with spark_session("local[2]", conf) as (spark, _):

        def topology(slow):
            builder = TopologyBuilder()
            builder.spout("lines", spark.range(LINES))
            builder.bolt("slow", slow).shuffle("lines")
            builder.sink("slow", to_parquet(f"{directory}/sink"))
            return builder.build()

        def plan():
            return checkpoint_at(f"{directory}/checkpoint").records().read("batches/0.plan")

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
        for number, (handler, then) in enumerate(ways):
            signal.signal(signal.SIGINT, handler)
            slow = Slow(directory, number)
            when = once_begun(slow, then)
            try:
                run_batch(topology(slow), spark, f"{directory}/checkpoint")
            except (KeyboardInterrupt, RunCancelled) as error:
                took = time.monotonic() - when[0]
                body = plan()
                said.append([type(error).__name__, str(error), took, body])
        leave = (lambda number, frame: sys.exit("enough"), press)
        in_sinks = sinks_that_are_interrupted(directory, spark, [*ways[:2], leave])
        Path(directory, "slow").unlink()
        counts = run_batch(topology(slow), spark, f"{directory}/checkpoint")
        rows = sorted(row.line for row in spark.read.parquet(f"{directory}/sink").collect())
        result = {"said": said, "counts": counts.to_json(), "rows": rows, "in_sinks": in_sinks}
        Path(directory, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
