"""A word count whose bolts fail, a source that grows and a sink that may be down."""

from __future__ import annotations

import itertools
import sys
import time

import pyarrow as pa
from pyspark import cloudpickle

from ackcore.spark import start
from ackcore.topology import BasicBolt, BatchBolt, Reject, TopologyBuilder

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LINE = "line string"


class Split(BasicBolt):
    """Fails ``flaky`` lines at their first attempt, ``bad`` ones always, and rejects ``no``."""

    outputs = pa.schema([("word", pa.string())])

    def execute(self, tuple, collector):
        for word in tuple["line"].split():
            if word == "no":
                raise Reject("no")
            if word == "bad" or (word == "flaky" and tuple.attempt == 0):
                raise ValueError(f"cannot read {word}")
            collector.emit((word,))


class Count(BatchBolt):
    outputs = pa.schema([("word", pa.string()), ("n", pa.int64())])

    def process(self, batch, out):
        words = batch.column(0)
        out.emit({"word": words, "n": [1] * len(words)}, parents=range(len(words)))


class Store:
    """A sink that keeps rows by micro-batch, and may be down."""

    def __init__(self):
        self.rows = {}
        self.down = 0

    def __call__(self, frame, number):
        if self.down:
            self.down -= 1
            raise ConnectionError("the store is down")
        self.rows[number] = sorted(row[0] for row in frame.collect())

    @property
    def words(self):
        return sorted(itertools.chain.from_iterable(self.rows.values()))


def in_line(parts, sink=None, *, spout=None, **settings):
    """Build a topology of a spout, bolts one after the other, and a sink of the last of them.

    ``parts``: the source and the bolts by name; ``spout``: arguments of the spout.
    """
    builder, before = TopologyBuilder(), None
    for name, part in parts.items():
        if before is None:
            builder.spout(name, part, **(spout or {}))
        else:
            builder.bolt(name, part).shuffle(before)
        before = name
    if sink is not None:
        builder.sink(before, sink)
    return builder.build(**settings)


def ignored(frame, number):
    """A sink that keeps nothing."""


def word_count(source, sink, **settings):
    builder = TopologyBuilder()
    builder.spout("lines", source)
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("count", Count()).fields("split", "word")
    builder.sink("count", sink)
    return builder.build(**{"backoff_s": 0.3, "max_attempts": 3, "parallelism": 2, **settings})


#: How often a sink fails that is down for ever.
DOWN = 10**9


def down_for_ever(source):
    """Return a sink that takes nothing, and a topology that goes on trying it."""
    store = Store()
    store.down = DOWN
    return store, word_count(source, store, max_sink_attempts=10**6, max_backoff_s=0.3)


class Folder:
    """A stream of lines, from files that come to a directory."""

    def __init__(self, spark, path):
        path.mkdir()
        self.path = path
        self.spark = spark
        self.files = itertools.count()

    def add(self, *lines):
        n = next(self.files)
        hidden = self.path / f".{n}"
        hidden.write_text("".join(f"{line}\n" for line in lines))
        hidden.rename(self.path / f"{n:03}.txt")

    @property
    def stream(self):
        text = self.spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
        return text.text(str(self.path)).withColumnRenamed("value", "line")


def until(found, on, seconds=300):
    end = time.monotonic() + seconds
    while not found():
        assert on.is_active, on.exception
        assert time.monotonic() < end, on.recent_progress
        time.sleep(0.02)


def available_now(topology, spark, checkpoint, **options):
    """Run a query to the end of what is available now, and return it."""
    on = start(topology, spark, checkpoint, trigger={"availableNow": True}, **options)
    assert on.await_termination(300)
    return on
