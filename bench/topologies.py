"""Word counts and their like, written once as functions on Arrow batches, and what runs them.

The functions are those that one would write for a bare ``mapInArrow``; bolts call the very same.
Workers import this module.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ackcore.topology import BasicBolt, BatchBolt, Bolt, TopologyBuilder
from bench.processes import cpu_s

Batches = Iterator[pa.RecordBatch]

#: How often a line has 1, 2, ... words: 3.8 on average; 10 on average.
LENGTHS = {3.8: np.array([4, 12, 26, 30, 18, 7, 3]) / 100, 10: np.full(19, 1 / 19)}
_VOCABULARY = 50_000

WORD = pa.schema([("word", pa.string())])
COUNTS = pa.schema([("word", pa.string()), ("n", pa.int64())])
LINES = pa.schema([("id", pa.int64()), ("line", pa.string())])


# ---- lines -------------------------------------------------------------------------------------


def make_lines(rows: int, seed: int = 11, words: float = 3.8) -> pa.Table:
    """Lines of words whose frequencies fall as those of a language do, so many words each."""
    shares = LENGTHS[words]
    rng = np.random.default_rng(seed)
    letters = rng.integers(ord("a"), ord("z") + 1, (_VOCABULARY, 12), dtype=np.uint8)
    lengths = rng.integers(2, 13, _VOCABULARY)
    vocabulary = [bytes(row[:n]).decode() for row, n in zip(letters, lengths, strict=True)]
    weights = 1 / (np.arange(_VOCABULARY) + 5.0)
    sizes = rng.choice(np.arange(1, len(shares) + 1), rows, p=shares)
    picks = rng.choice(_VOCABULARY, int(sizes.sum()), p=weights / weights.sum())
    every_word = pa.array(vocabulary).take(pa.array(picks))
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    lines = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), every_word), " ")
    return pa.table([pa.array(np.arange(rows)), lines], schema=LINES)


def write_lines(directory: Path, sizes: Sequence[int], words: float = 3.8) -> None:
    """Write Parquet files of so many lines, each later than the last.

    A stream reads them in the order of their times.
    """
    table = make_lines(sum(sizes), words=words)
    start = 0
    for number, size in enumerate(sizes):
        path = directory / f"part-{number:03}.parquet"
        pq.write_table(table.slice(start, size), path)
        os.utime(path, (1_700_000_000 + number,) * 2)
        start += size


def words_in(lines: pa.Table) -> int:
    """Count the words of lines."""
    return int(pc.sum(pc.count_substring(lines["line"], " ")).as_py()) + len(lines)


def write_long_lines(directory: Path, rows: int, letters: int, files: int = 8) -> None:
    """Write Parquet files of lines that do not compress."""
    rng = np.random.default_rng(3)
    n = rows // files
    for number in range(files):
        text = rng.integers(32, 127, n * letters, dtype=np.uint8)
        ends = np.arange(0, n * letters + 1, letters, dtype=np.int32)
        lines = pa.StringArray.from_buffers(n, pa.py_buffer(ends), pa.py_buffer(text))
        table = pa.table([pa.array(np.arange(number * n, (number + 1) * n)), lines], schema=LINES)
        path = directory / f"part-{number:03}.parquet"
        pq.write_table(table, path, compression="none", use_dictionary=False)


# ---- what is done with them --------------------------------------------------------------------


def split(lines: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the words of all lines, and of each the number of its line."""
    words = pc.split_pattern(lines, " ")
    return words.flatten(), pc.list_parent_indices(words)


def count(words: pa.Array) -> list[pa.Array]:
    """Return each word once, and how often it is there."""
    counted = pc.value_counts(words)
    return [counted.field("values"), counted.field("counts")]


# ---- in bolts ----------------------------------------------------------------------------------


class Split(BatchBolt):
    """A tuple for each word of a line."""

    outputs = WORD

    def process(self, batch, out):
        """Split a batch of lines."""
        words, parents = split(batch.column("line"))
        out.emit([words], parents=parents)


class SplitBut(Split):
    """The same, but lines with a number below ``failing`` fail."""

    def __init__(self, failing: int) -> None:
        self.failing = failing

    def process(self, batch, out):
        """Split a batch of lines."""
        super().process(batch, out)
        out.fail(np.flatnonzero(batch.column("id").to_numpy() < self.failing), "not yet")


class SplitOthers(Split):
    """The same, but one line in ``every`` fails; none if that is 0."""

    def __init__(self, every: int) -> None:
        self.every = every

    def process(self, batch, out):
        """Split a batch of lines."""
        super().process(batch, out)
        if self.every:
            out.fail(np.flatnonzero(batch.column("id").to_numpy() % self.every == 0), "not yet")


class Count(BatchBolt):
    """How often each word is there, batch by batch; the counts hang from nothing."""

    outputs = COUNTS

    def process(self, batch, out):
        """Count a batch of words."""
        out.emit(count(batch.column("word")), parents=None)


class PassOn(BatchBolt):
    """Hands on every row as it is."""

    outputs = LINES

    def process(self, batch, out):
        """Hand on a batch."""
        out.emit(batch, parents=np.arange(len(batch)))


class TakeIn(BatchBolt):
    """Acks every row, and emits none."""

    outputs = pa.schema([("id", pa.int64())])

    def process(self, batch, out):
        """Take in a batch."""


class PassNumbers(PassOn):
    """Hands on every number as it is."""

    outputs = pa.schema([("value", pa.int64())])


class Tag(BatchBolt):
    """A row for each word, with the length of its line: what a sink is to have once per word."""

    outputs = pa.schema([("word", pa.string()), ("letters", pa.int32())])

    def process(self, batch, out):
        """Measure a batch of words."""
        out.emit(measure(batch.column("word")), parents=np.arange(len(batch)))


def measure(words: pa.Array) -> list[pa.Array]:
    """Return words, and how long each is."""
    return [words, pc.utf8_length(words)]


class FailBelow(BatchBolt):
    """Hands on the numbers of lines, but fails those below ``failing``."""

    outputs = pa.schema([("id", pa.int64())])

    def __init__(self, failing: int) -> None:
        self.failing = failing

    def process(self, batch, out):
        """Hand on a batch, or fail it."""
        ids = batch.column("id").to_numpy()
        bad = np.flatnonzero(ids < self.failing)
        if len(bad) < len(batch):
            out.emit([batch.column("id")], parents=np.arange(len(batch)))
        out.fail(bad, "the service is away")


class EmitAndAck(Bolt):
    """Emits what it got, anchored, and acks it."""

    outputs = LINES

    def execute(self, tuple):
        """One tuple."""
        self.collector.emit(tuple.values, anchors=tuple)
        self.collector.ack(tuple)


class EmitBasic(BasicBolt):
    """Emits what it got; anchored and acked for it."""

    outputs = LINES

    def execute(self, tuple, collector):
        """One tuple."""
        collector.emit(tuple.values)


# ---- on bare Spark -----------------------------------------------------------------------------


def split_bare(batches: Batches) -> Batches:
    """For mapInArrow: lines to words."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays([split(batch.column("line"))[0]], schema=WORD)


def _total(n: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array([n], pa.int64())})


def count_bare(batches: Batches) -> Batches:
    """For mapInArrow: words, counted batch by batch; one row, as we do not time what it returns."""
    yield _total(sum(int(pc.sum(count(batch.column("word"))[1]).as_py()) for batch in batches))


def split_and_count_bare(batches: Batches) -> Batches:
    """For mapInArrow: both in one task."""
    n = 0
    for batch in batches:
        words, _ = split(batch.column("line"))
        n += int(pc.sum(count(words)[1]).as_py())
    yield _total(n)


def pass_bare(batches: Batches) -> Batches:
    """For mapInArrow: see every batch, and no more."""
    yield _total(sum(len(batch) for batch in batches))


def numbers_bare(batches: Batches) -> Batches:
    """For mapInArrow: hand on every batch."""
    yield from batches


def measure_bare(batches: Batches) -> Batches:
    """For mapInArrow: a row for each word."""
    for batch in batches:
        yield pa.RecordBatch.from_arrays(measure(batch.column("word")), schema=Tag.outputs)


# ---- topologies ----------------------------------------------------------------------------------


def word_count(
    source: Any,
    *,
    by: str = "fields",
    tracked: bool = True,
    split: Any = None,
    ordered_by: str | None = None,
):
    """Lines to words to counts; ``by`` says how words reach the count."""
    builder = TopologyBuilder()
    builder.spout("lines", source, tracked=tracked, ordered_by=ordered_by)
    builder.bolt("split", split or Split()).shuffle("lines")
    count = builder.bolt("count", Count())
    count.fields("split", "word") if by == "fields" else count.local_or_shuffle("split")
    return builder


def passed_on(source: Any, bolt: Any):
    """Lines to one bolt."""
    builder = TopologyBuilder()
    builder.spout("lines", source)
    builder.bolt("bolt", bolt).shuffle("lines")
    return builder


#: Conditions of orders, of which one in a thousand fails each of the first four.
EXPECTED = (
    "amount > 0",
    "currency IN ('EUR', 'USD')",
    "quantity BETWEEN 1 AND 100",
    "day >= DATE '2020-01-01'",
    "id IS NOT NULL",
)


def write_orders(directory: Path, rows: int, files: int = 8) -> int:
    """Write Parquet files of orders; return the number of those that meet `EXPECTED`."""
    rng = np.random.default_rng(5)
    good = np.ones(rows, np.bool_)

    def spoilt(values: Any, bad: Any) -> Any:
        which = rng.random(rows) < 1e-3
        good[which] = False
        return np.where(which, bad, values)

    orders = pa.table(
        {
            "id": np.arange(rows),
            "amount": spoilt(rng.random(rows) + 0.01, -1.0),
            "currency": pa.array(spoilt(rng.choice(["EUR", "USD"], rows), "X")),
            "quantity": spoilt(rng.integers(1, 100, rows, np.int32), np.int32(0)),
            "day": pa.array(spoilt(rng.integers(18_300, 20_000, rows, np.int32), np.int32(1))).cast(
                pa.date32()
            ),
        }
    )
    for number in range(files):
        part = orders.slice(rows * number // files, rows // files)
        pq.write_table(part, directory / f"part-{number}.parquet")
    return int(good.sum())


# ---- when micro-batches end ----------------------------------------------------------------------


class Ends(logging.Handler):
    """Notes when micro-batches end, by their lines of log.

    With ``counts_cpu`` it also notes the CPU time of all processes, which takes some milliseconds.
    """

    def __init__(self, counts_cpu: bool = False) -> None:
        super().__init__(logging.INFO)
        self.counts_cpu = counts_cpu
        self.times: list[float] = []
        self.cpu: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        if record.getMessage().startswith("micro-batch "):
            self.times.append(time.perf_counter())
            if self.counts_cpu:
                self.cpu.append(cpu_s())

    def listen(self) -> Callable[[], None]:
        """Hear what ackcore logs, until what is returned is called."""
        log = logging.getLogger("ackcore")
        before = log.level
        log.addHandler(self)
        log.setLevel(logging.INFO)

        def stop() -> None:
            log.setLevel(before)
            log.removeHandler(self)

        return stop


def periods(times: Iterable[float]) -> list[float]:
    """From the end of one micro-batch to that of the next, without the first ones."""
    return np.diff(np.array(list(times)))[2:].tolist()
