"""A driver that is cut off while its tasks go on.

    python zombie_job.py directory role

Records 0 to 4999 go through one bolt into Parquet.  The tasks of the driver ``a`` hang in it until
those of the driver ``b`` have a file open, and again until all of b is over; they fail most
records, so that what they write is not what b's do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pyarrow as pa

RECORDS, FILES = 5000, 2
ID = pa.schema([("id", pa.int64())])

from pyspark import TaskContext  # noqa: E402

from ackcore.spark.query import run_batch  # noqa: E402
from ackcore.spark.sinks.parquet import to_parquet  # noqa: E402
from ackcore.topology import BatchBolt, TopologyBuilder  # noqa: E402


def wait_for(mark):
    """Until a mark is there; a minute or two, for a machine with much to do."""
    until = time.monotonic() + 200
    while not mark.exists():
        assert time.monotonic() < until, f"nobody left {mark}"
        time.sleep(0.02)


class Hang(BatchBolt):
    """Hands on what it gets, when it may."""

    outputs = ID

    def __init__(self, marks, role):
        self.marks, self.role = marks, role

    def prepare(self, context):
        self.calls = 0

    def process(self, batch, out):
        self.calls += 1
        here = f"{TaskContext.get().partitionId()}"
        Path(self.marks, f"{self.role}-{here}-{self.calls}").write_text(str(os.getpid()))
        rows = range(len(batch))
        if self.role == "a":
            wait_for(
                Path(self.marks, f"b-{here}-2") if self.calls == 1 else Path(self.marks, "end")
            )
            out.fail(rows[1:], [ConnectionError("the host is cut off")] * (len(batch) - 1))
            rows = rows[:1]
        elif self.calls == 2:
            wait_for(Path(self.marks, f"a-{here}-2"))
        out.emit(batch.slice(0, len(rows)), parents=rows)


def main(directory, role):
    """Run it, and leave what is to be said beside it."""
    from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

    here = Path(directory)
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "500"}
    said = {"error": None, "counts": {}}
    with spark_session("local[2]", conf) as (spark, _):
        builder = TopologyBuilder()
        builder.spout("ids", spark.read.schema("id bigint").parquet(str(here / "in")))
        builder.bolt("hang", Hang(str(here / "marks"), role)).shuffle("ids")
        builder.sink("hang", to_parquet(here / "sink"))
        topology = builder.build(backoff_s=0.05, max_backoff_s=0.2, chunk_rows=500)
        try:
            said["counts"] = run_batch(topology, spark, here / "checkpoint").to_json()
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
    Path(here, f"{role}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
