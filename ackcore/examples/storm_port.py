"""A port of a Storm topology: the reliable word count of storm-starter, with bolts a row at a time.

    sentences ─► split ─► exclaim ═ by word ═► count ─► sink

In Java it has a spout that keeps pending tuples and emits failed ones again, and three bolts that
anchor, ack and fail.  Here the bolts are the same line by line, and the spout is a DataFrame: the
engine keeps pending and failed records, and retries them.

docs/storm.md has a table from Storm's names to those of ackcore.

    python -m ackcore.examples.storm_port
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark import run_batch, to_parquet
from ackcore.topology import Bolt, Context, Topology, TopologyBuilder, Tuple

#: The sentences of storm-starter's RandomSentenceSpout.
SENTENCES = (
    "the cow jumped over the moon",
    "an apple a day keeps the doctor away",
    "four score and seven years ago",
    "snow white and the seven dwarfs",
    "i am at two with nature",
)

_WORD = pa.schema([("word", pa.string())])


class SplitSentence(Bolt):
    """A bolt that emits each word, anchored to its sentence, and acks the sentence."""

    outputs = _WORD

    def execute(self, tuple: Tuple) -> None:
        """Split one sentence."""
        for word in tuple["sentence"].split():
            self.collector.emit((word,), anchors=tuple)
        self.collector.ack(tuple)


class Exclaim(Bolt):
    """A bolt that adds an exclamation mark; the first attempt at some words fails.

    ``fails``: words that fail at their sentence's first attempt.
    """

    outputs = _WORD

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.fails = frozenset(fails)

    def execute(self, tuple: Tuple) -> None:
        """Add an exclamation mark to one word and ack it, or fail it."""
        word = tuple["word"]
        if word in self.fails and tuple.attempt == 0:
            self.collector.fail(tuple, f"the first attempt at {word!r} fails")
            return
        self.collector.emit((word + "!",), anchors=tuple)
        self.collector.ack(tuple)


class WordCount(Bolt):
    """A bolt that counts the words of its task: in Storm for ever, here until the micro-batch ends.

    It emits the count so far with each word, as in storm-starter.  Only the sink's rows are kept:
    their number is the count of a word over all micro-batches.
    """

    outputs = pa.schema([("word", pa.string()), ("so_far", pa.int64())])

    def prepare(self, context: Context) -> None:
        """Start with empty counts."""
        self.counts = Counter[str]()

    def execute(self, tuple: Tuple) -> None:
        """Count one word, emit it with the count so far, and ack it."""
        word = tuple["word"]
        self.counts[word] += 1
        self.collector.emit((word, self.counts[word]), anchors=tuple)
        self.collector.ack(tuple)


def build(
    spark: SparkSession, sentences: Sequence[str], fails: Sequence[str], path: str
) -> Topology:
    """Return the topology, for sentences, words that fail once, and a directory for its sink."""
    frame = spark.createDataFrame(list(enumerate(sentences)), "id bigint, sentence string")
    builder = TopologyBuilder()
    builder.spout("sentences", frame, message_id="id")
    builder.bolt("split", SplitSentence()).shuffle("sentences")
    builder.bolt("exclaim", Exclaim(fails)).shuffle("split")
    builder.bolt("count", WordCount()).fields("exclaim", "word")
    builder.sink("count", to_parquet(path))
    return builder.build(backoff_s=0.1)


def main() -> None:
    """Run the example on two cores, and print the result."""
    with spark_session("local[2]") as (spark, directory):
        path = Path(directory, "words")
        topology = build(spark, SENTENCES * 200, ["moon", "seven"], str(path))
        print(topology.explain())
        counts = run_batch(topology, spark, Path(directory, "checkpoint"))
        words = Counter[str]()
        for file in path.glob("batch_id=*/*.parquet"):
            words.update(pq.ParquetFile(file).read(["word"])["word"].to_pylist())
    print(f"{counts.records} sentences: {counts.acked} acked, {counts.dead} dead")
    print(f"{counts.retried} executed a second time, and each word in the sink once:")
    for word, times in words.most_common(5):
        print(f"  {word:10}{times:6}")


if __name__ == "__main__":
    main()
