"""A port of Storm's rolling top words: words are counted in windows that overlap.

    sentences ─► split ─► table of words by window ─► sink of closed windows

In storm-starter a bolt counts in slots that its clock moves, so that a replayed sentence counts
again, and in another window.  Here the time is a column, and each word of an ACKED sentence counts
once, in the windows of its time.  Some sentences fail at their first attempt.  Some are damaged:
they are dead letters, and no word of them counts.

    python -m ackcore.examples.storm_windows
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ackcore.examples.quiet_spark import spark_session
from ackcore.examples.storm_port import SENTENCES
from ackcore.spark import run_batch, to_parquet
from ackcore.tables import count, sliding
from ackcore.topology import BasicBolt, BasicCollector, Reject, Topology, TopologyBuilder, Tuple

#: The windows in seconds, as in storm-starter: the last nine seconds, every three.
SIZE_S, STEP_S = 9, 3
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


class SplitTimed(BasicBolt):
    """A bolt that emits each word with the time of its sentence."""

    outputs = pa.schema([("word", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Split one sentence; reject an empty one, and fail some at their first attempt."""
        if not tuple["sentence"]:
            raise Reject("an empty sentence")
        if "moon" in tuple["sentence"] and tuple.attempt == 0:
            raise TimeoutError("a simulated time-out, at the first attempt only")
        for word in tuple["sentence"].split():
            collector.emit((word, tuple["at"]))


def build(spark: SparkSession, sentences: Sequence[tuple[str, datetime]], path: str) -> Topology:
    """Return the topology, for sentences with their times and a directory for its sink."""
    rows = [(number, *each) for number, each in enumerate(sentences)]
    frame = spark.createDataFrame(rows, "id bigint, sentence string, at timestamp")
    builder = TopologyBuilder()
    builder.spout("sentences", frame, message_id="id")
    builder.bolt("split", SplitTimed()).shuffle("sentences")
    builder.table(
        "words",
        from_="split",
        key="word",
        value={"times": count()},
        window=sliding(SIZE_S, STEP_S, "at"),
    )
    builder.sink("words.closed", to_parquet(path))
    return builder.build(backoff_s=0.1)


def top_words(path: Path, most: int) -> Mapping[datetime, list[tuple[str, int]]]:
    """Return the ``most`` most frequent words by the end of their window, from the sink's files."""
    found: defaultdict[datetime, Counter[str]] = defaultdict(Counter)
    for file in path.glob("batch_id=*/*.parquet"):
        for row in pq.ParquetFile(file).read().to_pylist():
            found[row["window_end"]][row["word"]] += row["times"]
    return {
        end: sorted(words.items(), key=lambda one: (-one[1], one[0]))[:most]
        for end, words in sorted(found.items())
    }


def main() -> None:
    """Run the example on two cores, and print the top words."""
    texts = [*SENTENCES, ""] * 50
    sentences = [(text, BEGIN + timedelta(seconds=n / 10)) for n, text in enumerate(texts)]
    with spark_session("local[2]") as (spark, directory):
        path = Path(directory, "words")
        topology = build(spark, sentences, str(path))
        print(topology.explain())
        counts = run_batch(topology, spark, Path(directory, "checkpoint"))
        windows = top_words(path, 3)
    print(f"{counts.records} sentences: {counts.acked} acked, {counts.dead} dead")
    print(f"{counts.retried} executed a second time, and each word counted once in each window:")
    for end, words in windows.items():
        shown = ", ".join(f"{word} {times}" for word, times in words)
        print(f"  {SIZE_S} s until {end:%H:%M:%S}: {shown}")


if __name__ == "__main__":
    main()
