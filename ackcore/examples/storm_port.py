"""A Storm topology, ported: the reliable word count of storm-starter, with bolts a row at a time.

    sentences ─► split ─► exclaim ═ by word ═► count ─► sink

In Java it has a spout that keeps pending tuples and emits failed ones again, and three bolts that
anchor, ack and fail.  Here the bolts are the same line by line, and the spout is a DataFrame: the
engine keeps pending and failed records, and retries them.

==============================================  ==================================================
Storm                                           ackcore
==============================================  ==================================================
``TopologyBuilder``                             `ackcore.topology.TopologyBuilder`
``builder.setSpout("s", spout, n)``             ``builder.spout("s", frame, message_id="id")``; its
                                                tasks are the DataFrame's partitions
``IRichSpout.nextTuple``                        none: the DataFrame's rows are the tuples
``SpoutOutputCollector.emit(values, id)``       ``message_id="id"`` names the column
``emit(values)`` without an id                  ``builder.spout(..., tracked=False)``
``spout.ack(id)``, the pending map              none: an ACKED record is not seen again
``spout.fail(id)``, emit it again               none: a failed record is executed again, after a
                                                back-off and at most ``max_attempts`` times, then
                                                it is a dead letter
``FailedException``; a queue for the dead       `Reject`, ``dead_letters(checkpoint)``, ``replay``
``topology.message.timeout.secs``               none: a micro-batch ends; what is not acked then
                                                fails with "not acked by" and the bolt's name
``topology.max.spout.pending``                  Spark's own, per source: ``maxFilesPerTrigger``,
                                                ``maxOffsetsPerTrigger``
``builder.setBolt("b", bolt, n)``               ``builder.bolt("b", bolt, parallelism=n)``
``shuffleGrouping``, ``fieldsGrouping``,        ``.shuffle(c)``, ``.fields(c, "word")``,
``allGrouping``, ``globalGrouping``,            ``.all(c)``, ``.global_(c)``,
``localOrShuffleGrouping``,                     ``.local_or_shuffle(c)``,
``partialKeyGrouping``                          ``.partial_key(c, "word")``
``shuffleGrouping("c", "errors")``              ``.shuffle("c", stream="errors")``
``declareOutputFields(new Fields("word"))``     ``outputs = pa.schema([("word", pa.string())])``
``declareStream("errors", fields)``             ``outputs = {"default": ..., "errors": ...}``
``IRichBolt``, ``BaseRichBolt``                 `Bolt`; also `BatchBolt`, an Arrow batch at a time
``IBasicBolt``, ``BaseBasicBolt``               `BasicBolt`
``prepare(conf, context, collector)``           ``prepare(context)``; ``self.collector`` is there
``execute(tuple)``, ``cleanup()``               the same; and ``flush()``, after the last tuple
``collector.emit(tuple, new Values(a))``        ``collector.emit((a,), anchors=tuple)``
``collector.emit("errors", tuple, values)``     ``collector.emit(values, tuple, "errors")``
``collector.emit(new Values(a))``, unanchored   ``collector.emit((a,))``
``collector.emit(anchors, values)``             ``collector.emit(values, anchors=[a, b])``
``collector.ack(t)``, ``collector.fail(t)``     the same; ``fail(t, reason)`` tells why
``collector.resetTimeout(t)``                   none
``tuple.getStringByField("word")``              ``tuple["word"]``
``tuple.getValue(0)``, ``getValues()``          ``tuple[0]``, ``tuple.values``
``getSourceComponent``, ``getSourceStreamId``   ``tuple.component``, ``tuple.stream``
``tuple.getMessageId()``                        ``tuple.message_id``; and ``tuple.attempt``
an exception in ``execute`` kills the worker    it fails the tuple, and the worker goes on
a ``Map`` of counts in the bolt                 a sink: bolts keep nothing between micro-batches
``StormSubmitter.submitTopology``               `ackcore.spark.start`, `ackcore.spark.run_batch`
Trident's ``IBackingMap`` and transaction ids   a sink gets each micro-batch's rows with its number
==============================================  ==================================================

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
from ackcore.spark import Counts, run_batch, to_parquet
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

    Parameters
    ----------
    fails : sequence of str
        Words that fail at their sentence's first attempt.
    """

    outputs = _WORD

    def __init__(self, fails: Sequence[str] = ()) -> None:
        self.fails = frozenset(fails)

    def execute(self, tuple: Tuple) -> None:
        """Add an exclamation mark to one word."""
        word = tuple["word"]
        if word in self.fails and tuple.attempt == 0:
            self.collector.fail(tuple, f"nobody heard {word!r}")
            return
        self.collector.emit((word + "!",), anchors=tuple)
        self.collector.ack(tuple)


class WordCount(Bolt):
    """A bolt that counts the words of its task: in Storm for ever, here until the micro-batch ends.

    It emits the count so far with each word, as in storm-starter.  Only the sink's rows are kept;
    sum them for a count over all micro-batches.
    """

    outputs = pa.schema([("word", pa.string()), ("so_far", pa.int64())])

    def prepare(self, context: Context) -> None:
        """Start with empty counts."""
        self.counts = Counter[str]()

    def execute(self, tuple: Tuple) -> None:
        """Count one word."""
        word = tuple["word"]
        self.counts[word] += 1
        self.collector.emit((word, self.counts[word]), anchors=tuple)
        self.collector.ack(tuple)


def build(
    spark: SparkSession, sentences: Sequence[str], fails: Sequence[str], path: str
) -> Topology:
    """Return the topology.

    Parameters
    ----------
    spark : SparkSession
        The session to run it in.
    sentences : sequence of str
        The sentences that the spout emits, numbered from 0.
    fails : sequence of str
        As for `Exclaim`.
    path : str
        The directory of the sink.
    """
    frame = spark.createDataFrame(list(enumerate(sentences)), "id bigint, sentence string")
    builder = TopologyBuilder()
    builder.spout("sentences", frame, message_id="id")
    builder.bolt("split", SplitSentence()).shuffle("sentences")
    builder.bolt("exclaim", Exclaim(fails)).shuffle("split")
    builder.bolt("count", WordCount()).fields("exclaim", "word")
    builder.sink("count", to_parquet(path))
    return builder.build(backoff_s=0.1)


def run(
    spark: SparkSession, directory: Path, sentences: Sequence[str], fails: Sequence[str] = ()
) -> tuple[Counts, Counter[str]]:
    """Run the topology to its end; return the counts, and the count of each word in the sink.

    Parameters
    ----------
    spark : SparkSession
        The session.
    directory : Path
        The directory of the checkpoint and the rows.
    sentences, fails
        As for `build`.
    """
    path = directory / "words"
    topology = build(spark, sentences, fails, str(path))
    counts = run_batch(topology, spark, directory / "checkpoint")
    words = Counter[str]()
    for file in path.glob("batch_id=*/*.parquet"):
        words.update(pq.ParquetFile(file).read(["word"])["word"].to_pylist())
    return counts, words


def main() -> None:
    """Run the example on two cores, and print the result."""
    sentences = SENTENCES * 200
    with spark_session("local[2]") as (spark, directory):
        print(build(spark, sentences, ["moon"], f"{directory}/words").explain())
        counts, words = run(spark, Path(directory), sentences, ["moon", "seven"])
    print(f"{counts.records} sentences: {counts.acked} acked, {counts.dead} dead")
    print(f"{counts.retried} executed a second time, and each word in the sink once:")
    for word, times in words.most_common(5):
        print(f"  {word:10}{times:6}")


if __name__ == "__main__":
    main()
