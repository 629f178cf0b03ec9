"""A topology with one sink, and a sink's driver that is cut off.

The topology: the words of three lines and more, one of which fails.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from contextvars import Context

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from ackcore.spark import SinkUnavailable
from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointInUse
from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Split(BasicBolt):
    """Rejects lines with a ``no``, behind words that it has emitted."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        for word in tuple["line"].split():
            assert word != "no"
            collector.emit((word,))


def word_count(spark, sink, *more):
    lines = [(line,) for line in ("a b", "a", "c no", *more)]
    builder = TopologyBuilder()
    builder.spout("lines", spark.createDataFrame(lines, "line string"))
    builder.bolt("split", Split()).shuffle("lines")
    builder.sink("split", sink)
    return builder.build(max_attempts=1, max_sink_attempts=2, sink_backoff_s=0.001)


@contextmanager
def cut_off_in_its_transaction(monkeypatch, module, write, take_over):
    """A driver stands still as it writes, within its transaction, until another has taken over.

    That one ends its connection.  Within, it writes once more, as it does when it is woken.
    """
    reached = []

    def fence():
        if reached:
            raise CheckpointInUse("was taken over")

    def stand_still(*point):
        if not reached:
            reached.append(point)
            Context().run(take_over)

    monkeypatch.setattr(module, "failpoint", stand_still)
    with fenced(fence):
        with pytest.raises(SinkUnavailable, match="terminating connection"):
            write()
        assert reached == [("in-transaction", 0)]
        yield
        with pytest.raises(CheckpointInUse):
            write()
