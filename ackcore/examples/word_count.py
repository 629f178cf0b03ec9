"""Count words on Spark while calls fail, lose nothing, and compare with plain Python.

    files ─► split ─► enrich ═ by word ═► count ─► sink

The input is Python's own library. ``enrich`` stands for a call to a service: 1 % of calls raise,
and the line is tried again; lines with the word ``XXX`` are refused, and become dead letters. In
the end each line is acked or dead, and the sink has exactly the words of the acked lines.

    python -m ackcore.examples.word_count --lines 100000
    python -m ackcore.examples.word_count --kills 5        # by kill -9, and started again

The exit code is 0 if all adds up, 1 if not or if the job failed, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import keyword
import logging
import re
import shlex
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, cycle, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from ackcore._error_hints import counted
from ackcore.examples.killed_runs import RUNNING, run_killed
from ackcore.examples.quiet_spark import check_java, spark_session
from ackcore.spark import dead_letters, start, to_parquet
from ackcore.spark.base.errors import one_line
from ackcore.topology import (
    BasicBolt,
    BasicCollector,
    BatchBolt,
    BatchOutput,
    Reject,
    Topology,
    TopologyBuilder,
    Tuple,
)

MICRO_BATCHES = 8


class Split(BatchBolt):
    """A bolt that splits lines into words."""

    outputs = pa.schema([("line", pa.int64()), ("word", pa.string())])

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Split all lines of a batch at once."""
        found = pc.split_pattern_regex(batch.column("text"), r"[^0-9A-Za-z_]+")
        words, parents = found.flatten(), pc.list_parent_indices(found)
        real = pc.not_equal(words, "")  # a line may begin or end with a separator
        words, parents = words.filter(real), parents.filter(real)
        out.emit([batch.column("line").take(parents), words], parents=parents)


class Enrich(BasicBolt):
    """A bolt that simulates a service for the kind of a word; one call in a hundred fails."""

    outputs = pa.schema([*Split.outputs, ("kind", pa.string())])

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Emit one word with its kind; reject ``XXX``, and raise for one call in a hundred."""
        line, word = tuple.values
        if word == "XXX":
            raise Reject(f"unknown word {word}")
        if hash((tuple.stable_id, tuple.attempt)) % 100 == 0:
            raise TimeoutError("the service did not answer")
        collector.emit((line, word, kind_of(word)))


def kind_of(word: str) -> str:
    """Return the service's answer for a word."""
    if keyword.iskeyword(word):
        return "keyword"
    return "number" if word[0].isdigit() else "name"


class Count(BatchBolt):
    """A bolt that counts the equal words of a line; all of them reach the same task."""

    outputs = pa.schema([*Enrich.outputs, ("times", pa.int64())])

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Count a batch; an output row has all the words that it counts as parents."""
        rows = pa.Table.from_batches([batch]).append_column("row", pa.array(range(len(batch))))
        # In one thread: a task that runs again must answer in the same order.
        groups = rows.group_by(["line", "word", "kind"], use_threads=False)
        counts = groups.aggregate([("row", "count"), ("row", "list")])
        columns = [counts[name] for name in ("line", "word", "kind", "row_count")]
        out.emit(columns, parents=counts["row_list"])


def library_lines(number: int) -> list[str]:
    """Return lines of the standard library's Python sources, repeated if needed."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise RuntimeError(f"{sysconfig.get_path('stdlib')} has no sources of Python's library")
    texts = (path.read_text("utf-8", "replace").split("\n") for path in cycle(paths))
    return list(islice(chain.from_iterable(texts), number))


def stage(texts: Sequence[str], directory: Path) -> None:
    """Write numbered lines to Parquet files in ``input``; the stream reads one file at a time."""
    unfinished = directory / "unfinished"
    unfinished.mkdir(parents=True, exist_ok=True)
    size = -(-len(texts) // MICRO_BATCHES)
    for first in range(0, len(texts), size):
        some = texts[first : first + size]
        table = pa.table({"line": range(first, first + len(some)), "text": some})
        pq.write_table(table, unfinished / f"lines-{first:09}.parquet")
    unfinished.rename(directory / "input")


def topology(spark: SparkSession, directory: Path) -> Topology:
    """Return the topology that reads the lines and writes the counts."""
    lines = spark.readStream.schema("line bigint, text string").option("maxFilesPerTrigger", 1)
    builder = TopologyBuilder()
    frame = lines.parquet(str(directory / "input"))
    builder.spout("lines", frame, message_id="line", unique=True)
    builder.bolt("split", Split()).shuffle("lines")
    builder.bolt("enrich", Enrich()).shuffle("split")
    builder.bolt("count", Count()).fields("enrich", "word")
    builder.sink("count", to_parquet(directory / "counts"))
    return builder.build(backoff_s=0.2)


def differences(
    texts: Sequence[str], acked: int, dead: Sequence[int], words: Counter[str]
) -> list[str]:
    """Return a sentence for each difference from plain Python's count; none if all adds up.

    ``acked``: the number of acked lines. ``dead``: the numbers of dead lines. ``words``: the words
    in the sink.
    """
    found = []
    if acked + len(dead) != len(texts):
        found.append(f"{acked:,} acked and {len(dead):,} dead are not {len(texts):,} lines")
    left_out = frozenset(dead)
    if len(left_out) < len(dead):
        found.append(f"{len(dead) - len(left_out):,} lines are dead more than once")
    alive = (text for line, text in enumerate(texts) if line not in left_out)
    expected = Counter(word for text in alive for word in re.findall(r"[0-9A-Za-z_]+", text))
    for word in sorted(words.keys() | expected.keys()):
        if words[word] != expected[word]:
            found.append(
                f"{word!r} is in the sink {counted(words[word], 'time')}, not {expected[word]:,}"
            )
    return found


def run(spark: SparkSession, directory: Path, texts: Sequence[str]) -> list[str]:
    """Run the topology until each line is acked or dead, print the result; return `differences`."""
    began, shown = time.perf_counter(), -1
    checkpoint = directory / "checkpoint"
    query = start(topology(spark, directory), spark, checkpoint, trigger={"availableNow": True})
    ended = False
    while not ended:
        ended = query.await_termination(0.1)
        for progress in query.recent_progress:
            if progress.batch_id > shown:
                print(progress, flush=True)
                shown = progress.batch_id
    seconds = time.perf_counter() - began
    dead = (
        dead_letters(checkpoint, spark).select("payload", "error_type", "error_message").collect()
    )
    written = ds.dataset(directory / "counts", format="parquet").to_table(columns=["word", "times"])
    words = Counter[str]()
    for word, times in zip(*(column.to_pylist() for column in written), strict=True):
        words[word] += times
    counts = query.counts
    print("top words of acked lines")
    for word, times in words.most_common(10):
        print(f" {word:12}{kind_of(word):>8}{times:>8,}")
    print("lines")
    numbers = {"acked": counts.acked, "dead": counts.dead, "all": counts.records}
    for name, many in (numbers | {"executed again": counts.retried}).items():
        print(f" {name:14}{many:>14,}")
    print("dead because of")
    for why, many in Counter(f"{row.error_type}: {row.error_message}" for row in dead).items():
        print(f" {why:44}{many:>8,}")
    print(f"{seconds:.1f} s, {len(texts) / seconds:,.0f} lines/s")
    wrong = differences(texts, counts.acked, [row.payload.line for row in dead], words)
    if not wrong:
        print(
            f"the counts balance: {counts.acked:,} acked + {counts.dead:,} dead = "
            f"{counts.records:,} lines, and the sink has every word of the acked ones, as often as "
            "plain Python counts it"
        )
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lines", type=int, default=100_000, help="lines to read")
    parser.add_argument("--kills", type=int, default=0, help="times to kill -9 the driver")
    parser.add_argument("--directory", type=Path, help="keep input, checkpoint and counts here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.lines < 1:
        parser.error(f"--lines must be at least 1, got {given.lines}")
    with tempfile.TemporaryDirectory(prefix="ackcore-", ignore_cleanup_errors=True) as scratch:
        directory = given.directory or Path(scratch)
        texts = library_lines(given.lines)
        if not (directory / "input").exists():
            stage(texts, directory)
        if given.kills:
            command = [sys.executable, "-m", "ackcore.examples.word_count", "--child"]
            command += ["--lines", str(given.lines), "--directory", str(directory)]
            temporary = directory / "tmp"
            temporary.mkdir(exist_ok=True)
            status = run_killed(command, temporary, given.kills)
        else:
            try:
                check_java()
                print("starting Spark", flush=True)
                with spark_session("local[2]") as (spark, _):
                    print(RUNNING, flush=True)
                    wrong = run(spark, directory, texts)
            except Exception as error:
                wrong = [f"the word count failed: {one_line(error)}"]
            print(*wrong, sep="\n", end="\n" * bool(wrong))
            status = int(bool(wrong))
    if given.directory is None and not status:
        print(
            "next: read docs/quickstart.md; to look at the checkpoint, run this again with "
            '--directory DIR (in a clone of ackcore: make demo ARGS="--directory DIR")'
        )
    elif given.directory is not None and not given.child:
        place = shlex.quote(str(directory / "checkpoint"))
        print(
            f"the checkpoint is kept: ackcore status {place}; ackcore dead list {place}; "
            f"ackcore ui {place}"
        )
    return status


if __name__ == "__main__":
    # After SIGTERM the run cleans up as after an interrupt.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Each dead letter is a warning; the reasons are printed at the end.
    logging.getLogger("ackcore").setLevel(logging.ERROR)
    sys.exit(main())
