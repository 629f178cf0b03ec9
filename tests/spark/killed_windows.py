"""A driver of a stream with windows on real Spark, a process of its own, to be killed; no tests."""

from __future__ import annotations

import os
import sys

import pyarrow as pa
from pyspark import cloudpickle

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import FileSpout, dead_letters, start, to_parquet
from ackcore.spark.base import failpoints
from ackcore.tables import collect, count, session, tumbling
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: The shop, the second and the number of each order, by micro-batch: one file each.
BATCHES = (
    [("a", 1, 0), ("b", 2, 1), ("a", 14, 2)],
    [("a", 12, 3), ("b", 3, 4), ("a", 27, 5)],
    [("b", 24, 6), ("a", 35, 7), ("b", 36, 8)],
    # The first is late.  The last fails once, and its window has not closed when it is retried.
    [("a", 8, 9), ("b", 58, 10), ("a", 34, 11)],
)
WINDOWS = {"tens": tumbling(10, "ts"), "visits": session(4, "ts", late_s=6)}


class Order(BasicBolt):
    """Passes orders on; every third one fails at its first attempt."""

    outputs = pa.schema(
        [("shop", pa.string()), ("ts", pa.timestamp("us", tz="UTC")), ("n", pa.int64())]
    )

    def execute(self, tuple, collector):
        if tuple["n"] % 3 == 2 and tuple.attempt == 0:
            raise TimeoutError("the service is out")
        collector.emit((tuple["shop"], tuple["ts"], tuple["n"]))


class Enrich(BasicBolt):
    """Passes closed windows on; one in four fails at its first attempt."""

    outputs = pa.schema(
        [("shop", pa.string()), ("orders", pa.list_(pa.int64())), ("window", pa.string())]
    )

    def execute(self, tuple, collector):
        if sum(tuple["orders"]) % 4 == 3 and tuple.attempt == 0:
            raise TimeoutError("the service is out")
        collector.emit((tuple["shop"], tuple["orders"], tuple.message_id))


def drive(path, points):
    """Be a driver to kill; points are as `failpoints` has them."""
    os.setsid()  # the JVM is killed along
    failpoints._POINTS = failpoints.parse(points)
    with spark_session("local[2]") as (spark, _):
        take_files(path, spark)


def take_files(path, spark):
    """Take all files until no record waits; return the dead orders."""
    schema = "shop string, ts timestamp, n long"
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    builder = TopologyBuilder()
    builder.spout("orders", reader.parquet(str(path / "orders")))
    builder.bolt("order", Order()).shuffle("orders")
    for name, window in WINDOWS.items():
        value = {"orders": collect("n", 99)}
        builder.table(name, from_="order", key="shop", value=value, window=window)
        builder.sink(f"{name}.closed", to_parquet(path / name))
    builder.sink("order", to_parquet(path / "rows"))
    builder.bolt("enrich", Enrich(), parallelism=2).shuffle("tens.closed")
    builder.sink("enrich", to_parquet(path / "enriched"))
    builder.table("shops", from_="tens.closed", key="shop", value={"tens": count()})
    # A table that reads a spout; some of its records fail in a bolt that reads it, too.
    files = FileSpout(path / "orders", "parquet", Order.outputs, max_files_per_batch=1)
    builder.spout("files", files)
    builder.bolt("again", Order()).shuffle("files")
    builder.table("direct", from_="files", key="shop", value={"orders": collect("n", 99)})
    topology = builder.build(backoff_s=0.01)
    query = start(topology, spark, path / "checkpoint", trigger={"availableNow": True})
    query.await_termination()
    letters = dead_letters(path / "checkpoint", spark, spout="orders").collect()
    return [[row.payload.n, row.error_type, row.component] for row in letters]
