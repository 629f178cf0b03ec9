"""A client of Spark Connect as a process of its own; also with PySpark's thin client.

    python connect_client.py sc://host:port directory [place]

Prints one line of JSON.  Checkpoint and sink are in the place, a bucket's URL, or else in the
directory.  As long as the file ``slow`` is in the directory each record takes a while, and
``begun`` is there once the first has begun.  As long as ``idle`` is there what failed is not tried
again, and the server hears nothing meanwhile.  If ``stream`` is there, a stream reads the records
from a planned source.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from ackcore.calls import RateLimit
from ackcore.spark import (
    RateSpout,
    RunCancelled,
    attempt,
    combine,
    dead_letters,
    functions,
    guard,
    replay,
    run_batch,
    settle,
    settle_parquet,
    start,
    table,
    to_parquet,
)
from ackcore.spark.stores.opening import open_store
from ackcore.tables import collect, count, tumbling
from ackcore.topology import BasicBolt, Reject, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RECORDS = 200
EVENTS = {"root_id": [1, 1, 2], "val": [5, 5, 3], "task": [0, -1, 0]}


class Check(BasicBolt):
    """Every tenth record is refused once and for all, every seventh fails the first time."""

    outputs = pa.schema(
        [("id", pa.int64()), ("kind", pa.int64()), ("at", pa.timestamp("s", "UTC"))]
    )
    uses = ("kinds",)

    def __init__(self, directory):
        self.slow, self.begun = f"{directory}/slow", f"{directory}/begun"

    def execute(self, tuple, collector):
        open(self.begun, "w").close()
        if os.path.exists(self.slow):
            time.sleep(0.1)
        if tuple["id"] % 10 == 3:
            raise Reject("no")
        if tuple["id"] % 7 == 5 and tuple.attempt == 0:
            raise TimeoutError("busy")
        kind, at = tuple["id"] % 4, datetime.fromtimestamp(tuple["id"], UTC)
        row = self.tables["kinds"].get(kind)
        assert (row is None) is (tuple.attempt == 0)  # all first attempts are in one micro-batch
        collector.emit((tuple["id"], kind, at))


class Numbers(RateSpout):
    """The records as a planned source."""

    schema = pa.schema([("id", pa.int64())])

    def read(self, spark, plan):
        return super().read(spark, plan).toDF("id")


def run(spark, directory, place):
    """Run a topology whose bolt fails; return what it came to."""
    builder = TopologyBuilder()
    is_stream = Path(directory, "stream").exists()
    planned = Numbers(RECORDS, max_rows_per_batch=RECORDS)
    numbers = planned if is_stream else spark.range(0, RECORDS, 1, 4)
    builder.spout("numbers", numbers, dedup="id", within_s=86_400)
    builder.bolt("check", Check(directory)).fields("numbers", "id")
    builder.sink("check", to_parquet(f"{place}/out"))
    builder.table("kinds", from_="check", key="kind", value={"n": count()})
    ids = {"ids": collect("id", 100)}
    window = tumbling(50, "at")
    builder.table("times", from_="check", key="kind", value=ids, window=window)
    builder.sink("times.closed", to_parquet(f"{place}/closed"))
    idle = Path(directory, "idle")

    def wait(seconds):
        until = time.monotonic() + 120
        while idle.exists() and time.monotonic() < until:
            time.sleep(0.02)

    def clock():
        return time.time_ns() // 1_000_000 - (1_000_000 if idle.exists() else 0)

    more = {"clock": clock} if idle.exists() else {}
    backoff_s = 500.0 if idle.exists() else 0.001
    it = builder.build(backoff_s=backoff_s, max_backoff_s=500.0)
    try:
        if is_stream:
            ends = {"availableNow": True}
            query = start(it, spark, f"{place}/cp", trigger=ends, **more)
            query.await_termination()
            counts = query.counts
        else:
            more |= {"wait": wait} if idle.exists() else {}
            counts = run_batch(it, spark, f"{place}/cp", **more)
    except RunCancelled as error:
        return {"cancelled": str(error), "shut_down": error.shut_down}
    rows = sorted(written(f"{place}/out", "id"))
    in_table = {row.kind: row.n for row in table(f"{place}/cp", "kinds", spark).collect()}
    still_open = [row.ids for row in table(f"{place}/cp", "times", spark).collect()]
    windows = [*written(f"{place}/closed", "ids"), *still_open]
    dead = sorted(row.payload.id for row in dead_letters(f"{place}/cp", spark).collect())
    return {
        "counts": [counts.records, counts.acked, counts.dead, counts.retried, counts.balanced],
        "rows": rows == [n for n in range(RECORDS) if n % 10 != 3],
        "state": in_table == Counter(n % 4 for n in rows)
        and sorted(n for some in windows for n in some) == rows
        and all(len({(n % 4, n // 50) for n in some}) == 1 for some in windows),
        "dead": dead == [n for n in range(RECORDS) if n % 10 == 3],
    }


def written(place, column):
    """Return the values of a column of a Parquet sink."""
    store = open_store(place, "path")
    files = [store.read(each.key) for each in store.list() if each.key.endswith(".parquet")]
    return [n for file in files for n in pq.read_table(pa.BufferReader(file))[column].to_pylist()]


def try_all(spark, directory, place):
    """Call everything else once."""
    columns = [pa.array(EVENTS["root_id"]), pa.array(EVENTS["val"])]
    of_events = pa.table([*columns, pa.array(EVENTS["task"], pa.int32())], names=list(EVENTS))
    pq.write_table(of_events, f"{directory}/events.parquet")
    rows = list(zip(*EVENTS.values(), strict=True))
    events = spark.createDataFrame(rows, "root_id bigint, val bigint, task int")

    def statuses(settled):
        return [row.status for row in settled.orderBy("root_id").collect()]

    limit = RateLimit(calls_per_s=1000)
    tried = attempt(spark.range(3), lambda row: 1 / row["id"], "inverse double", limit=limit)
    guarded = guard(
        spark.range(3), lambda row: row["id"] * 2, "d long", to_parquet(f"{directory}/g"),
        f"{directory}/gcp",
    )  # fmt: skip
    ids = spark.range(3).select(functions.root_id(7, 0, "id"), functions.acker_task("id", 3))
    return {
        "settle": statuses(settle(events)),
        "combine": statuses(settle(combine(events))),
        "settle_parquet": statuses(settle_parquet(spark, f"{directory}/events.parquet")),
        "attempt": [row.error and row.error.type for row in tried.orderBy("id").collect()],
        "guard": [guarded.records, guarded.acked],
        "functions": len(ids.distinct().collect()),
        "replay": replay(f"{place}/cp", spark, where="payload.id = 3").records,
        "is_thin": find_spec("py4j") is None,
    }


def main(url, directory, place=None):
    place = place or directory
    spark = SparkSession.builder.remote(url).getOrCreate()
    answer = run(spark, directory, place)
    if "counts" in answer:
        answer |= try_all(spark, directory, place)
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
