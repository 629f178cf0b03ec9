"""Failures that are larger than what Spark lets tasks return to the driver."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from ackcore.spark import RunFailed, run_batch
from ackcore.spark.base.session import ResultsTooLarge
from ackcore.spark.checkpoint.state import State
from ackcore.spark.engine import action
from ackcore.spark.engine.check import Unsettled
from ackcore.topology import BatchBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SOURCES = {"lines": pa.schema([("id", pa.int64()), ("text", pa.string())])}
LIMIT = "spark.driver.maxResultSize"


class Refuse(BatchBolt):
    outputs = pa.schema([("text", pa.string())])

    def __init__(self, reason):
        self.reason = reason

    def process(self, batch, out):
        reasons = [self.reason.format(i) for i in range(len(batch))]
        out.fail(np.arange(len(batch)), reasons)


@contextmanager
def at_most(spark, size):
    """Spark looks at the setting whenever tasks are about to start."""
    conf = spark.sparkContext._jsc.sc().conf()
    conf.set(LIMIT, size)
    try:
        yield
    finally:
        conf.remove(LIMIT)


def failing(spark, reason, text, by=()):
    frame = spark.range(2000, numPartitions=2).selectExpr("id", f"{text} AS text")
    builder = TopologyBuilder()
    builder.spout("lines", frame)
    bolt = builder.bolt("refuse", Refuse(reason))
    bolt.fields("lines", *by) if by else bolt.shuffle("lines")
    return builder.build(max_attempts=1, parallelism=2)


def test_reasons_that_are_larger_than_the_driver_takes(spark, checkpoint):
    """The error names the setting; no run is repeated, and no crash is counted."""
    topology = failing(spark, "{:0500}", "'a'")
    with (
        at_most(spark, "300k"),
        pytest.raises(RunFailed, match=r"run 1 time .*Total size .*; raise spark\.driver\.maxRes"),
    ):
        run_batch(topology, spark, checkpoint)
    with State.open(checkpoint, topology, sources=SOURCES, kind="batch") as state:
        plan = state.plan(0)
    assert (plan.crashes, plan.interrupted, plan.suspects) == (0, True, ())
    assert run_batch(topology, spark, checkpoint, max_dead_ratio=None).dead == 2000
    with State.open(checkpoint, topology, sources=SOURCES, kind="batch") as state:
        assert state.plan(0).crashes == 0


def test_payloads_that_are_larger_than_the_driver_takes_do_not_go_through_it(spark, checkpoint):
    topology = failing(spark, "no", "lpad(id, 500, '-')")
    with at_most(spark, "300k"):
        assert run_batch(topology, spark, checkpoint, max_dead_ratio=None).dead == 2000
    with State.open(checkpoint, topology, sources=SOURCES, kind="batch") as state:
        assert state.plan(0).crashes == 0
        dead = state.decision(0).dead["lines"]
        assert sorted(dead["id"].to_pylist()) == list(range(2000))


def test_rows_that_are_larger_than_the_driver_settles_are_settled_on_spark(
    spark, execute, monkeypatch
):
    """Another run helps only if the driver was to settle."""
    by_id = failing(spark, "{:0500}", "'a'", ["id"])
    with monkeypatch.context() as patch:
        patch.setattr(action, "_FEW_BYTES", 1_000_000)  # of two tasks
        with pytest.raises(Unsettled, match="their acks need too much memory"):
            execute(by_id, is_small=True)
        patch.setattr(action, "_FEW_BYTES", 1 << 27)
        patch.setattr(action, "settled", mock.Mock(side_effect=pa.lib.ArrowMemoryError("full")))
        with pytest.raises(Unsettled, match="the driver cannot settle the records: full"):
            execute(by_id, is_small=True)
    with at_most(spark, "300k"):
        with pytest.raises(Unsettled, match=r"the driver cannot settle the records: Total size"):
            execute(by_id, is_small=True)
        with pytest.raises(ResultsTooLarge):
            execute(failing(spark, "{:0500}", "'a'"), is_small=True)
        assert len(execute(by_id, by_root=True).failed) == 2000
