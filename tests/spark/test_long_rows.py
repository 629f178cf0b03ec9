"""Rows of ten megabytes go through all of it: exchange, files, retries, dead letters, replay."""

from __future__ import annotations

import sys

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import functions as sql

from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.query import run_batch
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.topology import BasicBolt, BatchBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TEXT = pa.schema([("id", pa.int64()), ("text", pa.string())])
MEGABYTES = 10


class Flaky(BasicBolt):
    """Fails every second record at its first attempt, and number 3 always, until it is mended."""

    outputs = TEXT

    def __init__(self, mended):
        self.mended = mended

    def execute(self, tuple, collector):
        if (tuple["id"] == 3 and not self.mended) or (tuple["id"] % 2 and tuple.attempt == 0):
            raise ValueError("not yet")
        collector.emit(tuple.values)


class Twice(BatchBolt):
    """Emits all that it gets twice, at once."""

    outputs = TEXT

    def process(self, batch, out):
        rows = [*range(len(batch)), *range(len(batch))]
        out.emit(batch.take(pa.array(rows)), parents=rows)


def test_rows_of_ten_megabytes(spark, tmp_path):
    records = 4
    text = sql.repeat(sql.lit("0123456789"), (MEGABYTES << 20) // 10)

    def topology(mended):
        builder = TopologyBuilder()
        builder.spout("lines", spark.range(0, records, 1, 2).select("id", text.alias("text")))
        builder.bolt("flaky", Flaky(mended)).shuffle("lines")
        builder.bolt("twice", Twice()).fields("flaky", "text")
        builder.sink("twice", to_parquet(tmp_path / "out"))
        return builder.build(max_attempts=2, backoff_s=0.001)

    def written():
        found = spark.read.parquet(str(tmp_path / "out"))
        ends = found.select("id", sql.length("text"), sql.right("text", sql.lit(3)))
        return sorted(map(tuple, ends.collect()))

    size = (MEGABYTES << 20) // 10 * 10
    every = [(n, size, "789") for n in range(records) for _ in range(2)]
    counts = run_batch(topology(False), spark, tmp_path / "checkpoint")
    assert (counts.acked, counts.dead) == (records - 1, 1)
    assert written() == [row for row in every if row[0] != 3]
    letters = dead_letters(tmp_path / "checkpoint", spark)
    (letter,) = letters.select("payload.id", sql.length("payload.text")).collect()
    assert tuple(letter) == (3, size)
    replay(tmp_path / "checkpoint", spark)
    run_batch(topology(True), spark, tmp_path / "checkpoint")
    assert written() == every
