"""Count the words of a million lines on Spark, track every line, and check the books.

Each line of the input is a spout message; ``split`` fans it out into words; the words are shuffled
and counted; a line is acked once all its words have been counted.  What Spark then says of the
lines and of the words is compared with a count by plain Python, which reads the files itself.
`word_source` says how lines are read, `word_stages` how they are tracked.

    python -m ackcore.examples.word_count --lines 1000000 --poison 'raise NotImplemented'

The exit code is 0 if the books balance, 1 if not or if the job failed, 2 for bad arguments.
"""

from __future__ import annotations

import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Annotated, Any, TypeVar

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

from ackcore import Status
from ackcore.examples import word_source, word_stages
from ackcore.examples.quiet_spark import check_java, one_line, spark_session, watched
from ackcore.examples.word_source import InputError, Int64s, Piece
from ackcore.examples.word_stages import Count, Recount, Split
from ackcore.spark import settle_parquet

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise ImportError("the word count needs more: pip install 'ackcore[cli,spark]'") from error

Result = TypeVar("Result")

_DEFAULT_LINES = 1_000_000


@dataclass
class Books:
    """What became of the lines, and the words of the acked ones.

    ``failed`` and ``open`` are the sorted root ids of those lines; ``other`` counts lines by any
    other status, of which there should be none.
    """

    acked: int
    failed: Int64s
    open: Int64s
    words: Counter[str]
    reasons: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        """All lines."""
        return self.acked + len(self.failed) + len(self.open) + self.other.total()


@dataclass(frozen=True)
class Job:
    """What is counted, and what goes wrong on purpose."""

    paths: list[str]
    lines: int | None = None
    poison: str | None = None
    drop: str | None = None

    @cached_property
    def pieces(self) -> list[Piece]:
        """The files, cut."""
        return word_source.plan(self.paths, self.lines)


# The job on Spark.


def count(spark: SparkSession, job: Job, files: str, *, tracked: bool = True) -> list[Any]:
    """Run the two stages in one action and return what the counters say, checked.

    Parameters
    ----------
    spark : SparkSession
        Where to run.
    job : Job
        What to count.
    files : str
        A directory for what the counters of a tracked run write.
    tracked : bool, default True
        Whether lines are tracked.
    """
    counters = spark.sparkContext.defaultParallelism
    waves = -(-sum(piece.size for piece in job.pieces) // (word_source.PIECE_BYTES * counters))
    sources = waves * counters
    shares = word_source.share(job.pieces, sources)
    split = Split(shares, counters, job.poison, tracked)
    counting = Count(files, sources, job.drop, tracked)
    counted = (
        spark.range(0, sources, 1, sources)
        .mapInArrow(split, word_stages.sql_schema(word_stages.SENT))
        .repartitionById(counters, "counter")
        .mapInArrow(counting, word_stages.sql_schema(word_stages.COUNTED))
        .collect()
    )
    if tracked:
        word_stages.check_trailers(counted, sources)
    return counted


def track(spark: SparkSession, job: Job, files: str) -> Books:
    """Run the tracked word count, settle what it left behind, and return the books.

    The parameters are those of `count`.
    """
    counted = count(spark, job, files)
    not_acked = sf.when(sf.col("status") != Status.ACKED.name, sf.col("root_id"))
    settled = (
        settle_parquet(spark, [row.ledger for row in counted])
        .groupBy("status", "reason")
        .agg(sf.count("*").alias("lines"), sf.collect_list(not_acked).alias("roots"))
        .collect()
    )
    lines = Counter[Status]()
    reasons = Counter[str]()
    roots: dict[Status, list[int]] = {status: [] for status in Status}
    for row in settled:
        status = Status[row.status]
        lines[status] += row.lines
        roots[status] += row.roots
        if status is Status.FAILED:
            reasons[row.reason] += row.lines
    words = word_stages.words_of(counted)
    unfinished = np.array([root for some in roots.values() for root in some], np.int64)
    if len(unfinished):
        recount = Recount([row.kept for row in counted], unfinished, job.drop)
        words -= word_stages.words_of(
            spark.range(0, len(counted), 1, len(counted))
            .mapInArrow(recount, word_stages.sql_schema(word_stages.COUNTED))
            .collect()
        )
    acked = lines.pop(Status.ACKED, 0)
    failed, still_open = (
        np.sort(np.array(roots[status], np.int64)) for status in (Status.FAILED, Status.OPEN)
    )
    other = Counter(
        {
            status.name: many
            for status, many in lines.items()
            if status not in (Status.FAILED, Status.OPEN)
        }
    )
    return Books(acked, failed, still_open, words, reasons, other)


# The same by plain Python.

_WORD = re.compile(r"[0-9A-Za-z_\x80-\U0010ffff]+")


def _texts(paths: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    for file, path in enumerate(paths):
        with open(path, encoding="utf-8", errors="replace", newline="\n") as source:
            for number, line in enumerate(source):
                yield file, number, line


def plain_count(job: Job) -> Books:
    """Return the books as they should be, from the files alone and without Spark."""
    poisons = re.compile(job.poison).search if job.poison is not None else lambda _: None
    drops = cache(re.compile(job.drop).search if job.drop is not None else lambda _: None)
    there = sum(1 for _ in _texts(job.paths))
    copies, rest = divmod(there if job.lines is None else job.lines, there)
    # Words of the lines that only whole copies have, and of those that the last, cut one has too.
    once, again = Counter[str](), Counter[str]()
    acked = 0
    failed: list[tuple[int, int]] = []  # copy and offset
    still_open: list[tuple[int, int]] = []
    for place, (file, number, line) in enumerate(_texts(job.paths)):
        times = copies + (place < rest)
        if not times:
            break
        words = _WORD.findall(line)
        if poisons(word_stages.line_text(line)):
            ended = failed
        elif any(map(drops, words)):
            ended = still_open
        else:
            acked += times
            (again if place < rest else once).update(words)
            continue
        offset = file << word_source.LINE_BITS | number
        ended.extend((copy, offset) for copy in range(times))
    total = Counter({word: many * (copies + 1) for word, many in again.items()})
    total.update({word: many * copies for word, many in once.items()})
    reasons = Counter[str]()
    if failed:
        reasons[word_stages.poison_reason(str(job.poison))] = len(failed)
    return Books(acked, _roots(failed), _roots(still_open), +total, reasons)


def _roots(ids: list[tuple[int, int]]) -> Int64s:
    copies, offsets = np.array(ids, np.int64).reshape(-1, 2).T
    roots = word_stages.message_roots(copies.astype(np.int32), np.ascontiguousarray(offsets))
    return np.sort(roots)


def differences(books: Books, expected: Books) -> list[str]:
    """Return in words how books differ from what they should be; nothing if they balance."""
    found = []
    for name in ("lines", "acked"):
        here, there = getattr(books, name), getattr(expected, name)
        if here != there:
            found.append(f"{name}: Spark has {here:,}, plain reading {there:,}")
    for name in ("failed", "open"):
        here, there = getattr(books, name), getattr(expected, name)
        if not np.array_equal(here, there):
            wrong = len(np.setxor1d(here, there))
            found.append(
                f"{name}: Spark has {len(here):,}, plain reading {len(there):,}; "
                f"{wrong:,} lines are in one of them only"
            )
    found += [f"{many:,} lines ended as {status}" for status, many in books.other.items()]
    for reason in books.reasons.keys() | expected.reasons.keys():
        here, there = books.reasons[reason], expected.reasons[reason]
        if here != there:
            found.append(f"failed for {reason!r}: Spark has {here:,}, plain reading {there:,}")
    if books.words != expected.words:
        either = books.words.keys() | expected.words.keys()
        wrong_words = sorted(word for word in either if books.words[word] != expected.words[word])
        examples = ", ".join(
            f"{word!r} {books.words[word]:,} for {expected.words[word]:,}"
            for word in wrong_words[:5]
        )
        found.append(f"words of acked lines: {len(wrong_words):,} counts differ: {examples}")
    return found


# What a person types, and sees.

# The first jobs of a JVM are slow, whatever they are.
_WARM_UP_LINES = 100_000


@dataclass
class Report:
    """What some rounds of a job found out."""

    books: Books
    differences: list[str]
    tracked_s: list[float]
    untracked_s: list[float]


def compare(
    spark: SparkSession, job: Job, directory: str, bar: Progress, rounds: int, untracked: bool
) -> Report:
    """Run a job ``rounds`` times, tracked and untracked in turns, and check every run's books.

    Parameters
    ----------
    spark : SparkSession
        Where to run.
    job : Job
        What to count.
    directory : str
        Where to put the files of a run while it lasts.
    bar : Progress
        Where to show how far it is.
    rounds : int
        How many runs of each kind.
    untracked : bool
        Whether to run it untracked too.
    """

    def timed(title: str, work: Callable[[str], Result]) -> tuple[Result, float]:
        line = bar.add_task(title, total=None)

        def clocked() -> tuple[Result, float]:
            with tempfile.TemporaryDirectory(dir=directory) as files:
                start = time.perf_counter()
                return work(files), time.perf_counter() - start

        def advance(done: int, of: int) -> None:
            bar.update(line, completed=done, total=of or None)

        result = watched(spark, title, advance, clocked)
        of = bar.tasks[line].total or 1
        advance(int(of), int(of))
        return result

    reading = bar.add_task("plain reading", total=None)
    expected = plain_count(job)
    bar.update(reading, total=1, completed=1)
    report = Report(expected, [], [], [])
    if expected.lines > _WARM_UP_LINES:
        timed("warming up", lambda files: track(spark, replace(job, lines=_WARM_UP_LINES), files))
    for number in range(1, rounds + 1):
        report.books, seconds = timed(f"tracked {number}", lambda files: track(spark, job, files))
        report.tracked_s.append(seconds)
        report.differences += differences(report.books, expected)
        if untracked:
            counted, seconds = timed(
                f"untracked {number}", lambda files: count(spark, job, files, tracked=False)
            )
            report.untracked_s.append(seconds)
            # Untracked, nobody can tell whose words were lost: then there is nothing to compare.
            if job.drop is None and word_stages.words_of(counted) != expected.words:
                report.differences.append("untracked: the words differ from those of plain reading")
    return report


def _table(title: str, *columns: str) -> Table:
    # Titles wrap at their table's width.
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, min_width=len(title) + 2
    )
    for column in columns:
        table.add_column(column, justify="left" if column in ("word", "reason", "") else "right")
    return table


def show(console: Console, report: Report, top: int) -> None:
    """Print what was found out."""
    books = report.books
    words = _table("top words of acked lines", "word", "times")
    for word, times in sorted(books.words.items(), key=lambda item: (-item[1], item[0]))[:top]:
        words.add_row(Text(word), f"{times:,}")
    lines = _table("lines", "", "lines")
    for name, many in [
        ("acked", books.acked),
        ("failed", len(books.failed)),
        ("open", len(books.open)),
        *books.other.items(),
        ("all", books.lines),
    ]:
        lines.add_row(name, f"{many:,}")
    console.print(words, lines)
    if books.reasons:
        reasons = _table("failed because of", "reason", "lines")
        for reason, many in books.reasons.most_common():
            reasons.add_row(Text(reason), f"{many:,}")
        console.print(reasons)
    speed = _table("speed", "", "records/s", "seconds", "of each run")
    for name, seconds in [("tracked", report.tracked_s), ("untracked", report.untracked_s)]:
        if seconds:
            median = statistics.median(seconds)
            each = ", ".join(f"{one:.2f}" for one in seconds)
            speed.add_row(name, f"{books.lines / median:,.0f}", f"{median:.2f}", each)
    console.print(speed)
    if report.untracked_s:
        share = statistics.median(report.untracked_s) / statistics.median(report.tracked_s)
        console.print(f"tracked runs at {share:.2f} of the untracked speed")


def _pattern(text: str | None) -> str | None:
    if text is not None:
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
            help="Lines to read, the files again and again if need be. Default: 1000000, "
            "or each line of --input once.",
        ),
    ] = None,
    poison: Annotated[
        str | None,
        typer.Option(metavar="REGEX", callback=_pattern, help="Lines that match it fail."),
    ] = None,
    drop: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            callback=_pattern,
            help="Words that match it get lost on their way, so that their lines stay open.",
        ),
    ] = None,
    master: Annotated[str, typer.Option(callback=_master, help="Where Spark runs.")] = "local[2]",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each kind; speed is the median.")] = 3,
    untracked: Annotated[
        bool, typer.Option(help="Run the same job without tracking too, to compare.")
    ] = True,
    top: Annotated[int, typer.Option(min=0, help="How many words to print.")] = 10,
) -> None:
    """Count words on Spark, track every line, and check the books. Exits with 0 if they balance."""
    named = [*(input_paths or []), *(paths or [])]
    job = Job(named, lines, poison, drop)
    try:
        if not named:
            everything = word_source.standard_library()
            job = replace(job, paths=everything, lines=lines or _DEFAULT_LINES)
        _ = job.pieces
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console()
    try:
        check_java()
        console.print("starting Spark")
        columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
        with (
            spark_session(master) as (spark, directory),
            Progress(*columns, TimeElapsedColumn(), console=console) as bar,
        ):
            report = compare(spark, job, directory, bar, rounds, untracked)
    except Exception as error:
        console.print(Text(f"the word count failed: {one_line(error)}"), soft_wrap=True)
        raise typer.Exit(1) from error
    show(console, report, top)
    if report.differences:
        console.print(Text("the books do not balance:"))
        for difference in report.differences:
            console.print(Text(f"  {difference}"), soft_wrap=True)
        raise typer.Exit(1)
    console.print(
        f"the books balance: acked + failed + open = {report.books.lines:,} lines, and every word "
        "of the acked ones, as plain Python counts them",
        soft_wrap=True,
    )


if __name__ == "__main__":
    # A terminated run cleans up as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    app()
