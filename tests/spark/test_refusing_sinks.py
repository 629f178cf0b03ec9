"""Sinks that refuse rows, on Spark: records are read again from wherever they came."""

from __future__ import annotations

import sys

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as sql
from streams import available_now

from ackcore.spark import SinkRejects, dead_letters, run_batch, to_parquet
from ackcore.topology import BatchBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Double(BatchBolt):
    """Emits two rows for each, ``n`` and ``-n``."""

    outputs = pa.schema([("n", pa.int64()), ("of", pa.int64())])

    def process(self, batch, out):
        for sign in (1, -1):
            out.emit([pc.multiply(batch["n"], sign), batch["n"]], parents=list(range(len(batch))))


def topology(source, writer, isolate=False, **more):
    builder = TopologyBuilder()
    builder.spout("numbers", source)
    builder.bolt("double", Double(), parallelism=2).shuffle("numbers")
    builder.sink("double", writer, isolate=isolate)
    for name, other in more.items():
        builder.sink("double", other, name=name)
    return builder.build(backoff_s=0.001, max_backoff_s=0.001)


def parked(spark, checkpoint):
    rows = dead_letters(checkpoint, spark).select("payload.n", "component", "error_message")
    return sorted(tuple(row) for row in rows.collect())


class Kept:
    """A sink that is a dict: by batch id, what it has taken."""

    def __init__(self, refuse=None):
        self.rows, self.refuse, self.calls = {}, refuse, 0

    def __call__(self, frame, number):
        self.calls += 1
        refused = None if self.refuse is None else frame.where(self.refuse)
        kept = frame if self.refuse is None else frame.where(~self.refuse)
        self.rows[number] = sorted(row.n for row in kept.collect())
        if refused is not None:
            return SinkRejects(refused.select("n"), "out of range")
        return None


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        pytest.param(kind, step, marks=[pytest.mark.faults] * (at % 2 != way))
        for at, step in enumerate([None, "in-sink", "refused", "refusals-closed"])
        for way, kind in enumerate(["read again", "spilled"])
    ],
)
def test_refused_records_are_dead_with_their_payload(spark, tmp_path, dying_at, kind, step):
    source = spark.range(40, numPartitions=3).withColumnRenamed("id", "n")
    if kind == "spilled":
        # A shuffle gives its rows in another order each time.
        source = source.repartition(4)
    sink, other = Kept(sql.col("n") < -36), to_parquet(tmp_path / "other")
    running = topology(source, sink, other=other)
    if step is not None:
        with dying_at(step):
            run_batch(running, spark, tmp_path / "checkpoint")
    counts = run_batch(running, spark, tmp_path / "checkpoint")
    assert sink.calls == (2 if step == "in-sink" else 1)
    assert (counts.records, counts.acked, counts.dead, counts.waiting) == (40, 37, 3, 0)
    assert parked(spark, tmp_path / "checkpoint") == [
        (n, "double", "out of range") for n in (37, 38, 39)
    ]
    # Only the refused rows are missing, and only here.
    assert sink.rows[0] == sorted([*range(-36, 40), 0])
    assert spark.read.parquet(str(tmp_path / "other")).count() == 80


def test_a_stream_goes_on_and_max_dead_counts_what_is_refused(spark, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.csv").write_text("".join(f"{n}\n" for n in range(20)))
    source = spark.readStream.schema("n bigint").csv(str(tmp_path / "in"))

    def write(frame, number):
        if frame.where("n = 7").count():
            raise ValueError("seven")

    query = available_now(topology(source, write, isolate=True), spark, tmp_path / "checkpoint")
    assert (query.counts.acked, query.counts.dead, query.progress.dead) == (19, 1, 1)
    ((n, component, message),) = parked(spark, tmp_path / "checkpoint")
    assert (n, component, message) == (7, "double", "seven")
