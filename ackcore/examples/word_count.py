"""Count words on Spark while things go wrong, lose nothing, and check the books.

    files ─► split ─► enrich ═ by word ═► count ─► sink

``enrich`` stands for a call to a service: 1 % of calls raise, and the line is tried again; a few
words are poison, and their lines go to the dead letters.  The lines come in several micro-batches.
In the end each line is acked or dead, and the words in the sink are exactly those of the acked
lines, as plain Python counts them.

    python -m ackcore.examples.word_count --lines 100000
    python -m ackcore.examples.word_count --kills 5        # by kill -9, and started again

The exit code is 0 if the books balance, 1 if not or if the job failed, 2 for bad arguments.
"""

from __future__ import annotations

import keyword
import logging
import random
import re
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from ackcore.examples import word_source
from ackcore.examples.killed_runs import Kill, run_killed
from ackcore.examples.quiet_spark import check_java, spark_session
from ackcore.examples.word_source import InputError
from ackcore.spark.base.errors import one_line
from ackcore.spark.dead_letters.letters import read_letters
from ackcore.spark.dead_letters.store_of_checkpoint import store_of
from ackcore.spark.protocol.progress import Progress
from ackcore.spark.query import start
from ackcore.topology import (
    BasicBolt,
    BatchBolt,
    Reject,
    Topology,
    TopologyBuilder,
    Tuple,
)
from ackcore.topology.components import BasicCollector, BatchOutput

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("the word count needs more: pip install 'ackcore[cli,spark]'") from error


# The topology.

_NO_WORD = r"[^0-9A-Za-z_]+"
_KEYWORDS = frozenset(keyword.kwlist)


class Split(BatchBolt):
    """A line becomes its words."""

    outputs = pa.schema([("line", pa.int64()), ("word", pa.string())])

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Split all lines of a batch at once."""
        found = pc.split_pattern_regex(batch.column("text"), _NO_WORD)
        words, parents = found.flatten(), pc.list_parent_indices(found)
        real = pc.not_equal(words, "")  # a line may begin or end with what is no word
        words, parents = words.filter(real), parents.filter(real)
        out.emit([batch.column("line").take(parents), words], parents=parents)


class Enrich(BasicBolt):
    """Asks a service what kind of word a word is; the service has its bad moments.

    Parameters
    ----------
    rate : float
        The share of calls that raise.
    poison : str
        A pattern; words in which it is found raise `Reject`.
    seed : int
        What the bad moments are drawn from.
    """

    outputs = pa.schema([("line", pa.int64()), ("word", pa.string()), ("kind", pa.string())])

    def __init__(self, rate: float, poison: str, seed: int = 0) -> None:
        self.per_million = round(rate * 1_000_000)
        self.poison = re.compile(poison).search
        self.seed = seed

    def execute(self, tuple: Tuple, collector: BasicCollector) -> None:
        """Ask about one word."""
        line, word = tuple.values
        if self.poison(word):
            raise Reject(f"nobody knows what {word} is")
        # Of the word and of the attempt: the next one has better luck.
        if hash((self.seed, tuple.stable_id, tuple.attempt)) % 1_000_000 < self.per_million:
            raise TimeoutError("the service did not answer")
        collector.emit((line, word, kind_of(word)))


def kind_of(word: str) -> str:
    """Return what the service answers for a word."""
    if word in _KEYWORDS:
        return "keyword"
    return "number" if word[0].isdigit() else "name"


class Count(BatchBolt):
    """Adds up the equal words of a line, which all come to one task.

    To add up those of different lines would be wrong here: the sum would hang from all of them,
    and be acked when the last of them is.  The sink can do it: it gets acked lines only.
    """

    outputs = pa.schema([*Enrich.outputs, ("times", pa.int64())])

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Add up a batch; a row hangs from each of the words that it counts."""
        rows = pa.Table.from_batches([batch]).append_column("row", pa.array(range(len(batch))))
        # In one thread: a task that runs again must answer in the same order.
        groups = rows.group_by(["line", "word", "kind"], use_threads=False)
        counts = groups.aggregate([("row", "count"), ("row", "list")])
        columns = [*(counts[name] for name in ("line", "word", "kind", "row_count"))]
        out.emit(columns, parents=counts["row_list"])


@dataclass(frozen=True)
class WriteCounts:
    """The sink: the words of each micro-batch with how often they came, as Parquet.

    It may be called again with the same micro-batch, and then replaces what it wrote.
    """

    path: str

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        """Write the rows of the acked lines of a micro-batch."""
        counts = frame.groupBy("word", "kind").agg(sql.sum("times").alias("times"))
        counts.coalesce(1).write.mode("overwrite").parquet(f"{self.path}/batch_id={batch_id}")


@dataclass(frozen=True)
class Job:
    """The input of the word count, and the failures that it injects.

    Parameters
    ----------
    paths : sequence of str
        The files.
    directory : Path
        Where the staged input, the checkpoint and the counts are; a job goes on from them.
    lines : int, optional
        How many lines to read; each once if not given.
    batches : int
        How many micro-batches the input comes in.
    rate, poison, seed
        As for `Enrich`.
    """

    paths: Sequence[str]
    directory: Path
    lines: int | None = None
    batches: int = 8
    rate: float = 0.01
    poison: str = "XXX"
    seed: int = 0

    @property
    def staged(self) -> Path:
        """The directory that the stream reads."""
        return self.directory / "input"

    @property
    def checkpoint(self) -> Path:
        """The directory of the checkpoint, which must not be lost."""
        return self.directory / "checkpoint"

    @property
    def counts(self) -> Path:
        """The directory that the sink writes."""
        return self.directory / "counts"

    def stage(self) -> None:
        """Write the input for the stream, unless it is there already."""
        if not self.staged.exists():
            word_source.stage(self.paths, self.staged, self.lines, self.batches)

    def topology(self, spark: SparkSession) -> Topology:
        """Return what is to be run."""
        lines = spark.readStream.schema(word_source.DDL).option("maxFilesPerTrigger", 1)
        builder = TopologyBuilder()
        builder.spout("lines", lines.parquet(str(self.staged)), message_id="line", unique=True)
        builder.bolt("split", Split()).shuffle("lines")
        builder.bolt("enrich", Enrich(self.rate, self.poison, self.seed)).shuffle("split")
        builder.bolt("count", Count()).fields("enrich", "word")
        builder.sink("count", WriteCounts(str(self.counts)))
        return builder.build(backoff_ms=200)


def run(spark: SparkSession, job: Job, show: Callable[[Progress], object]) -> Books:
    """Run the topology until each line is acked or dead, and return the books.

    Parameters
    ----------
    spark : SparkSession
        Where to run.
    job : Job
        What to count.
    show : callable
        Given the progress of each micro-batch when that is done.
    """
    query = start(job.topology(spark), spark, job.checkpoint, trigger={"availableNow": True})
    shown = -1
    try:
        while True:
            ended = query.await_termination(0.1)
            for progress in query.recent_progress:
                if progress.batch_id > shown:
                    show(progress)
                    shown = progress.batch_id
            if ended:
                break
    finally:
        query.stop()
    account = query.books
    return read_books(job, account.records, account.acked, account.retried)


# The books, and what they should be.


@dataclass(frozen=True)
class Books:
    """The counts of lines by outcome, and the words of the acked ones.

    ``lines``, ``acked`` and ``retried`` are what the query says; the rest is read from its dead
    letters and from what the sink wrote.
    """

    lines: int
    acked: int
    retried: int
    dead: Sequence[int]
    reasons: Counter[str]
    words: Counter[str]


def read_books(job: Job, lines: int, acked: int, retried: int) -> Books:
    """Read dead letters and counts, by pyarrow and not by Spark."""
    dead: list[int] = []
    reasons, words = Counter[str](), Counter[str]()
    for file in store_of(job.checkpoint).files("lines"):
        for letter in read_letters(file.path).to_pylist():
            dead.append(letter["payload"]["line"])
            reasons[f"{letter['error_type']}: {letter['error_message']}"] += 1
    for path in job.counts.glob("batch_id=*/*.parquet"):
        table = pq.ParquetFile(path).read(["word", "times"])
        for word, times in zip(table["word"].to_pylist(), table["times"].to_pylist(), strict=True):
            words[word] += times
    return Books(lines, acked, retried, dead, reasons, words)


_WORD = re.compile(r"[0-9A-Za-z_]+")


def plain_count(job: Job, dead: Sequence[int]) -> tuple[int, Counter[str]]:
    """Return how many lines there are, and the words of those that are not dead: plain Python."""
    left_out = frozenset(dead)
    lines = 0
    words = Counter[str]()
    for line in word_source.read_lines(job.paths, job.lines):
        if lines not in left_out:
            words.update(_WORD.findall(line))
        lines += 1
    return lines, words


def differences(job: Job, books: Books) -> list[str]:
    """Return in words how the books differ from what they should be; nothing if they balance."""
    lines, words = plain_count(job, books.dead)
    found = []
    if books.lines != lines:
        found.append(f"lines: Spark has {books.lines:,}, plain reading {lines:,}")
    if books.acked + len(books.dead) != lines:
        found.append(f"{books.acked:,} acked and {len(books.dead):,} dead are not {lines:,} lines")
    twice = [line for line, times in Counter(books.dead).items() if times > 1]
    if twice:
        found.append(f"{len(twice):,} lines are dead more than once, line {twice[0]} for one")
    if books.words != words:
        either = books.words.keys() | words.keys()
        wrong = sorted(word for word in either if books.words[word] != words[word])
        examples = ", ".join(
            f"{word!r} {books.words[word]:,} for {words[word]:,}" for word in wrong[:5]
        )
        found.append(f"words of acked lines: {len(wrong):,} counts differ: {examples}")
    return found


# The command line.

_DEFAULT_LINES = 100_000
#: A child says so when its stream runs.
_RUNNING = "running"
#: So begins what is said of a checkpoint that stays.
_KEPT = "the checkpoint is kept:"


def _table(title: str, *columns: str) -> Table:
    # Titles wrap at their table's width.
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, min_width=len(title) + 2
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("word", "why", "") else "right")
    return table


def show_books(console: Console, books: Books, seconds: float, top: int) -> None:
    """Print what was found out."""
    words = _table("top words of acked lines", "word", "kind", "times")
    for word, times in sorted(books.words.items(), key=lambda item: (-item[1], item[0]))[:top]:
        words.add_row(Text(word), kind_of(word), f"{times:,}")
    lines = _table("lines", "", "lines")
    for name, many in [("acked", books.acked), ("dead", len(books.dead)), ("all", books.lines)]:
        lines.add_row(name, f"{many:,}")
    lines.add_row("executed again", f"{books.retried:,}")
    console.print(words, lines)
    if books.reasons:
        reasons = _table("dead because of", "why", "lines")
        for reason, many in books.reasons.most_common(10):
            reasons.add_row(Text(reason), f"{many:,}")
        console.print(reasons)
    console.print(f"{seconds:.1f} s, {books.lines / seconds:,.0f} lines/s")


def _show_kept(console: Console, directory: Path | None, job: Job) -> None:
    """Say what looks at the checkpoint, if that is kept."""
    if directory is not None:
        place = shlex.quote(str(job.checkpoint))
        said = f"{_KEPT} ackcore status {place}; ackcore dead list {place}; ackcore ui {place}"
        console.print(Text(said), soft_wrap=True)


def _crash(job: Job, console: Console, kills: int, options: Sequence[str]) -> int:
    """Run the job in children, kill the first ones at random points, and let the last one end."""
    draw = random.Random(job.seed)
    scratch = job.directory / "tmp"
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "ackcore.examples.word_count", *options]
    command += ["--directory", str(job.directory)]

    def show(said: str) -> None:
        if not said.startswith(_KEPT):  # a child's directory may be one that goes
            console.print(Text(said), soft_wrap=True)

    status, done = run_killed(
        command,
        scratch,
        # So many lines after it has begun to run, and then some of a second.
        [Kill(draw.randrange(1, 4), draw.uniform(0, 1)) for _ in range(kills)],
        show,
        lambda said: said.startswith((_RUNNING, "micro-batch")),
    )
    console.print(f"killed {done} times" + (f" of {kills}: it was done then" * (done < kills)))
    if not done and not status:
        console.print("books of a run that nobody killed prove nothing: give it more --lines")
        return 1
    return status


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is not a regular expression: {error}") from error
    return text


def _master(url: str) -> str:
    if not re.match(r"(local(-cluster)?(\[.*\])?|yarn)$|(spark|k8s)://", url):
        raise typer.BadParameter(f"{url!r} is no master of Spark; local[2] is one")
    return url


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH...]", help="More files for --input.")
    ] = None,
    input_paths: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="PATH...", help="Files to read; else Python's own."),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Lines to read, the files again and again if need be. Default: {_DEFAULT_LINES}, "
            "or each line of --input once.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Micro-batches that they come in.")] = 8,
    rate: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the calls of enrich that raise.")
    ] = 0.01,
    poison: Annotated[
        str,
        typer.Option(
            metavar="REGEX",
            callback=_pattern,
            help="Words that match it are rejected, and their lines dead.",
        ),
    ] = "XXX",
    seed: Annotated[int, typer.Option(help="What calls raise, and when to kill.")] = 0,
    kills: Annotated[
        int, typer.Option(min=0, help="How often to kill -9 the driver, and start it again.")
    ] = 0,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where input, checkpoint and counts are kept, to go on with them."),
    ] = None,
    master: Annotated[str, typer.Option(callback=_master, help="Where Spark runs.")] = "local[2]",
    top: Annotated[int, typer.Option(min=0, help="How many words to print.")] = 10,
) -> None:
    """Count words on Spark while calls fail, and check the books. Exits with 0 if they balance."""
    named = [*(input_paths or []), *(paths or [])]
    console = Console()
    with tempfile.TemporaryDirectory(prefix="ackcore-", ignore_cleanup_errors=True) as scratch:
        try:
            wanted = lines if named else lines or _DEFAULT_LINES
            job = Job(
                named or word_source.standard_library(),
                directory or Path(scratch),
                wanted,
                batches,
                rate,
                poison,
                seed,
            )
            job.stage()
        except InputError as error:
            raise typer.BadParameter(str(error)) from error
        if kills:
            options = [*chain.from_iterable(("--input", path) for path in named)]
            options += [] if lines is None else ["--lines", str(lines)]
            options += ["--rate", str(rate), "--poison", poison, "--seed", str(seed)]
            options += ["--master", master, "--top", str(top)]
            code = _crash(job, console, kills, options)
            _show_kept(console, directory, job)
            raise typer.Exit(code)
        try:
            check_java()
            console.print("starting Spark")
            with spark_session(master) as (spark, _):
                console.print(_RUNNING)
                began = time.perf_counter()
                books = run(
                    spark, job, lambda progress: console.print(str(progress), soft_wrap=True)
                )
                seconds = time.perf_counter() - began
        except Exception as error:
            console.print(Text(f"the word count failed: {one_line(error)}"), soft_wrap=True)
            raise typer.Exit(1) from error
        show_books(console, books, seconds, top)
        wrong = differences(job, books)
    _show_kept(console, directory, job)
    if wrong:
        console.print(Text("the books do not balance:"))
        for difference in wrong:
            console.print(Text(f"  {difference}"), soft_wrap=True)
        raise typer.Exit(1)
    console.print(
        f"the books balance: {books.acked:,} acked + {len(books.dead):,} dead = {books.lines:,} "
        "lines, and the sink has every word of the acked ones, as often as plain Python counts it",
        soft_wrap=True,
    )


if __name__ == "__main__":
    # A terminated run cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # What died, and of what, is shown in the end, from a checkpoint that is then removed.
    logging.getLogger("ackcore").setLevel(logging.ERROR)
    app()
