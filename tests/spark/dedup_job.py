"""A stream of files with many copies; no tests.

Each execution of a record leaves a line ``micro-batch id`` in ``<path>/ran``.
"""

from __future__ import annotations

import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import start, to_parquet
from ackcore.spark.base import failpoints
from ackcore.topology import BasicBolt, Reject, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FILES, ROWS, IDS = 3, 60, 90


def does(number):
    """Return what happens to the records of an id; one of its copies may be ACKED otherwise."""
    return "dies" if number % 30 == 7 else "fails" if number % 10 == 3 else ""


class Fetch(BasicBolt):
    outputs = pa.schema([("id", pa.int64())])

    def __init__(self, path):
        self.path = str(path)

    def prepare(self, context):
        self.number = context.batch_id

    def execute(self, tuple, collector):
        with open(f"{self.path}/ran", "a") as file:
            file.write(f"{self.number} {tuple['id']} {tuple['n']}\n")
        if does(tuple["id"]) == "dies":
            raise Reject("no")
        if does(tuple["id"]) == "fails" and tuple.attempt == 0:
            raise TimeoutError("later")
        collector.emit((tuple["id"],))


def write_files(path):
    """Write the files of the source; copies are in one partition, in others, and in other files."""
    (path / "in").mkdir()
    for file in range(FILES):
        ns = [file * ROWS + n for n in range(ROWS)]
        table = pa.table({"n": ns, "id": [n * 7 % IDS if n % 3 else n // 2 % IDS for n in ns]})
        pq.write_table(table, path / "in" / f"{file}.parquet", row_group_size=7)


#: Three partitions, and several for each file.
CONF = {"spark.sql.shuffle.partitions": "3", "spark.sql.files.maxPartitionBytes": "600"}


def drive(path, points):
    """Be a driver to kill; points are as `failpoints` has them."""
    os.setsid()  # the JVM is killed along
    failpoints._POINTS = failpoints.parse(points)
    with spark_session("local[2]", CONF) as (spark, _):
        take_files(path, spark)


def take_files(path, spark):
    """Take all files until no record waits; return the counts."""
    source = spark.readStream.schema("n long, id long").option("maxFilesPerTrigger", 1)
    builder = TopologyBuilder()
    frame = source.parquet(f"{path}/in")
    builder.spout("events", frame, dedup="id", within_s=86_400, message_id="id")
    builder.bolt("fetch", Fetch(path)).shuffle("events")
    builder.sink("fetch", to_parquet(path / "out"))
    topology = builder.build(backoff_s=0.1, max_attempts=3)
    query = start(topology, spark, path / "checkpoint", trigger={"availableNow": True})
    query.await_termination()
    return query.counts
