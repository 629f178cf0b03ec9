"""A topology with one sink: the words of three lines and more, one of which fails."""

from __future__ import annotations

import sys

import pyarrow as pa
from pyspark import cloudpickle

from ackcore.topology import BasicBolt, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Split(BasicBolt):
    """Rejects lines with a ``no``, behind words that it has emitted."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        for word in tuple["line"].split():
            assert word != "no"
            collector.emit((word,))


def word_count(spark, writer, *more):
    lines = [(line,) for line in ("a b", "a", "c no", *more)]
    builder = TopologyBuilder()
    builder.spout("lines", spark.createDataFrame(lines, "line string"))
    builder.bolt("split", Split()).shuffle("lines")
    builder.sink("split", writer)
    return builder.build(max_attempts=1, max_sink_attempts=2, backoff_s=0.001, max_backoff_s=0.001)
