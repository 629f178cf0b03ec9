"""The word count on Spark: lines are split, words are shuffled by word and counted, and acked.

Two stages and one exchange, as `ackcore.spark` would lay out any topology::

    split   reads lines, packs their words for the counters, and makes INIT and FAIL rows
      |     exchange: a few large rows per batch of lines and counter, never a row per word
    count   counts its words, makes ACK rows, and writes all ledger rows that it got to a file
    settle  `ackcore.spark.settle` folds the files' rows and decides each line once
      |     roots that are not ACKED
    recount counts the words of those lines again, so that they can be taken out

Tracking travels beside the words.  For each line and counter there is one run: root id, XOR of
the edges going there, and how many words.  The ids of single edges are computed, never shipped.
A counter acks a run by leaving its root and XOR in the ledger; it emits nothing, so an ack value is
the edges themselves.  A line's own edge, from the spout to ``split``, is made and acked in one
task and cancels there; unless the line fails, when it stays in the INIT, so that no line without
words passes for a finished one.

What is counted and what is settled come from one action.  A counter returns one row that names
the files it wrote, under the id of its own attempt; files of attempts that Spark gave up are never
read.  Each task of ``split`` ends with a trailer to every counter: how many rows it sent there and
a fingerprint of all that it sent.  A counter that misses rows fails, and the run fails if two
counters saw different runs of one task (`check_trailers`).
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext

from ackcore import ACK, FAIL
from ackcore.examples.word_source import Lines, Piece, Words, batches, read, split
from ackcore.ids import edge_ids, root_ids, spout_key, xor_by_parent

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# A deployment draws its key and keeps it; an example says its own, so that runs can be compared.
KEY = spout_key(0x5EED, "lines", "word_count", 0)

# What crosses the exchange.  Every row but a trailer is a run of ledger rows: roots and vals under
# one task and reason.  Where there are words, those are ACKs to be: of the one who counts them.
SENT = {
    "counter": "int",
    "source": "int",  # the task of `split` that sent it
    "task": "int",  # kind of the ledger rows
    "reason": "string",
    "roots": "binary",  # int64s
    "vals": "binary",  # int64s
    "names": "binary",  # the different words, each on a line
    "words": "binary",  # int32s: every word, by its place in names
    "runs": "binary",  # int32s: how many of the words belong to each root
    "rows": "int",  # trailer: rows sent to this counter
    "fingerprint": "bigint",  # trailer: of all that was sent to any counter
}
_KEPT = {name: SENT[name] for name in ("names", "words", "runs", "roots")}
COUNTED = {
    "names": "binary",
    "counts": "binary",  # int64s
    "ledger": "string",  # files that the task wrote
    "kept": "string",
    "sources": "binary",  # int32s: tasks of `split` whose trailers were seen,
    "fingerprints": "binary",  # int64s: and what they said
}
_HEAD = ["source", "task", "reason", "rows", "fingerprint"]
_EVENTS = {"root_id": "bigint", "val": "bigint", "task": "int", "reason": "string"}
_ARROW = {"int": pa.int32(), "bigint": pa.int64(), "string": pa.string(), "binary": pa.binary()}


def sql_schema(columns: dict[str, str]) -> str:
    """Return columns as Spark's DDL has them."""
    return ", ".join(f"{name} {kind}" for name, kind in columns.items())


def arrow_schema(columns: dict[str, str]) -> pa.Schema:
    """Return columns as Arrow has them."""
    return pa.schema([(name, _ARROW[kind]) for name, kind in columns.items()])


def message_roots(copies: npt.NDArray[np.int32], offsets: Int64s) -> Int64s:
    """Return the root ids of lines at their first attempt."""
    return root_ids(KEY, copies, offsets, 0)


def line_text(line: str) -> str:
    """Return what a pattern sees of a line: all but its end, be that of Unix or of Windows."""
    return line.removesuffix("\n").removesuffix("\r")


def poison_reason(pattern: str) -> str:
    """Return the reason with which ``split`` fails a line."""
    return f"ValueError: split does not take lines that match {pattern!r}"


def _batch(rows: list[dict[str, Any]], columns: dict[str, str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, arrow_schema(columns))


@dataclass(frozen=True)
class Split:
    """The first stage: task i reads the lines of ``shares[i]`` and splits them into words."""

    shares: list[list[Piece]]
    counters: int
    poison: str | None
    tracked: bool

    def __call__(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Serve mapInArrow: each row is the number of a task."""
        for batch in tasks:
            for task in batch.column(0).to_pylist():
                yield from self.run(task)

    def run(self, task: int) -> Iterator[pa.RecordBatch]:
        """Read, split and pack one task's lines, and end with the trailers."""
        seal = hashlib.blake2b(digest_size=8)
        rows = Counter[int]()
        for number, pieces in enumerate(batches(self.shares[task])):
            sent = self.split(task, number, read(pieces))
            rows.update(row["counter"] for row in sent)
            for value in (value for row in sent for value in row.values() if self.tracked):
                part = value if isinstance(value, bytes) else repr(value).encode()
                seal.update(len(part).to_bytes(8, "little"))
                seal.update(part)
            yield _batch(sent, SENT)
        if self.tracked:
            fingerprint = int.from_bytes(seal.digest(), "little", signed=True)
            trailer = {"source": task, "fingerprint": fingerprint}
            yield _batch(
                [{"counter": c, "rows": rows[c], **trailer} for c in range(self.counters)], SENT
            )

    def split(self, task: int, number: int, lines: Lines) -> list[dict[str, Any]]:
        """Return what one batch of lines sends: its words by counter, and its ledger rows."""
        poisoned = self._poisoned(lines)
        words = split(lines, poisoned)
        sent = []
        if self.tracked:
            roots = message_roots(lines.copies, lines.offsets)
            line_edges = edge_ids(KEY, roots, "lines", 0, 0)
            edges = edge_ids(
                KEY, roots[words.lines], "split", line_edges[words.lines], words.ordinals
            )
            vals = xor_by_parent(words.lines, edges, len(lines))
            # Neighbouring tasks and batches take turns with whom they send their own rows to.
            own = {"counter": (task + number) % self.counters, "source": task}
            if poisoned is not None and poisoned.any():
                vals[poisoned] = line_edges[poisoned]
                failed = roots[poisoned]
                reason = poison_reason(str(self.poison))
                fails = {"roots": failed.tobytes(), "vals": bytes(failed.nbytes), "reason": reason}
                sent.append({**own, "task": FAIL, **fails})
            sent.append({**own, "task": task, "roots": roots.tobytes(), "vals": vals.tobytes()})
        for counter, mine, packed in _by_counter(words, self.counters):
            row = {"counter": counter, "source": task, "task": ACK, **packed}
            if self.tracked:
                line = words.lines[mine]
                firsts = np.flatnonzero(np.diff(line, prepend=-1))  # the first row of each run
                row["roots"] = roots[line[firsts]].tobytes()
                row["vals"] = np.bitwise_xor.reduceat(edges[mine], firsts).tobytes()
                row["runs"] = np.diff(firsts, append=len(line)).astype(np.int32).tobytes()
            sent.append(row)
        return sent

    def _poisoned(self, lines: Lines) -> Bools | None:
        if self.poison is None:
            return None
        search = re.compile(self.poison).search
        found = [
            search(line_text(line)) is not None for line in lines.text.decode().split("\n")[:-1]
        ]
        return np.array(found, bool)


def _by_counter(words: Words, counters: int) -> Iterator[tuple[int, Int64s, dict[str, bytes]]]:
    """Each counter that gets any words, the rows of those, and the words packed."""
    if not len(words):
        return
    text = pa.Array.from_buffers(
        pa.binary(), len(words), [None, pa.py_buffer(words.bounds), pa.py_buffer(words.text)]
    ).dictionary_encode()
    names = text.dictionary.to_pylist()
    # Not Python's hash: that is salted in every process.
    codes = np.fromiter(map(zlib.crc32, names), np.uint32, len(names))
    counter_of_name = (codes % counters).astype(np.uint16)
    word_names = text.indices.to_numpy()
    counter_of_word = counter_of_name[word_names]
    place = np.empty(len(names), np.int32)
    for counter in range(counters):
        its_names = np.flatnonzero(counter_of_name == counter)
        if not len(its_names):
            continue
        place[its_names] = np.arange(len(its_names))
        mine = np.flatnonzero(counter_of_word == counter)
        packed = {
            "names": b"\n".join([names[name] for name in its_names.tolist()]),
            "words": place[word_names[mine]].tobytes(),
        }
        yield counter, mine, packed


class _Packed:
    """One row with words, as a counter sees it; nothing is copied."""

    def __init__(self, batch: pa.RecordBatch, row: int, drop: str | None) -> None:
        self._batch, self._row = batch, row
        self._names: bytes = batch.column("names")[row].as_py()
        self._words = self.numbers("words", np.int32)
        self._taken: Bools | None = None  # None means all
        if drop is not None:
            search = re.compile(drop).search
            names = self._names.decode().split("\n")
            self._taken = np.array([search(name) is None for name in names])[self._words]

    def numbers(self, column: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """Return a column of numbers that lies packed in the row."""
        return np.frombuffer(self._batch.column(column)[self._row].as_buffer(), dtype)

    def whole_runs(self) -> Bools | None:
        """Return which runs lost no word; None means that all are whole."""
        if self._taken is None:
            return None
        ends = np.cumsum(self.numbers("runs", np.int32))
        before = np.concatenate(([0], np.cumsum(~self._taken)))[ends]
        whole: Bools = np.diff(before, prepend=0) == 0
        return whole

    def of_roots(self, roots: Int64s) -> None:
        """Leave only the words of some roots."""
        runs = np.isin(self.numbers("roots", np.int64), roots)
        words = np.repeat(runs, self.numbers("runs", np.int32))
        self._taken = words if self._taken is None else words & self._taken

    def counts(self) -> pa.Table:
        """Count the words."""
        words = self._words if self._taken is None else self._words[self._taken]
        names = pa.array(self._names.split(b"\n"), pa.binary())
        return pa.table({"name": names, "count": np.bincount(words, minlength=len(names))})


def _totals(counts: Sequence[pa.Table], **columns: Any) -> pa.RecordBatch:
    """The one row that a counting task returns."""
    schema = pa.schema([("name", pa.binary()), ("count", pa.int64())])
    together = pa.concat_tables([schema.empty_table(), *counts])
    totals = together.group_by("name").aggregate([("count", "sum")])
    totals = totals.filter(pc.greater(totals["count_sum"], 0))
    names = b"\n".join(totals["name"].to_pylist())
    numbers = totals["count_sum"].to_numpy().tobytes()
    return _batch([{"names": names, "counts": numbers, **columns}], COUNTED)


@dataclass(frozen=True)
class Count:
    """The second stage: counts the words that it gets, and leaves what it acks in a file.

    Words in which ``drop`` is found are lost on the way: neither counted nor acked.
    """

    directory: str
    sources: int
    drop: str | None
    tracked: bool

    def __call__(self, received: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Serve mapInArrow: rows of `Split`."""
        if self.tracked:
            yield self._tracked(received)
        else:
            counts = [
                _Packed(batch, row, self.drop).counts()
                for batch in received
                for row in range(len(batch))
            ]
            yield _totals(counts)

    def _tracked(self, received: Iterator[pa.RecordBatch]) -> pa.RecordBatch:
        context = TaskContext.get()
        assert context is not None
        # The partition's number would not do: two attempts at it may be writing at once.
        attempt = os.path.join(self.directory, str(context.taskAttemptId()))
        ledger, kept = f"{attempt}.ledger.parquet", f"{attempt}.words.arrow"
        counts = []
        rows = Counter[int]()
        trailers = {}
        events, words = arrow_schema(_EVENTS), arrow_schema(_KEPT)
        with (
            # Written and read once, next door: not worth compressing.
            pq.ParquetWriter(
                ledger, events, compression="none", use_dictionary=False, write_statistics=False
            ) as ledger_file,
            pa.ipc.new_file(kept, words) as kept_file,
        ):
            for batch in received:
                with_words = batch.column("words").is_valid()
                kept_file.write(batch.filter(with_words).select(words.names))
                for row, head in enumerate(batch.select(_HEAD).to_pylist()):
                    source = head["source"]
                    if head["fingerprint"] is not None:
                        trailers[source] = head
                        continue
                    rows[source] += 1
                    whole = None
                    if with_words[row].as_py():
                        packed = _Packed(batch, row, self.drop)
                        counts.append(packed.counts())
                        whole = packed.whole_runs()
                    ledger_file.write_batch(_events(batch, row, head, whole))
        for source in range(self.sources):
            sent = trailers[source]["rows"] if source in trailers else "an unknown number of"
            if rows[source] != sent:
                raise RuntimeError(
                    f"counter {context.partitionId()} got {rows[source]} of {sent} rows from "
                    f"task {source} of split"
                )
        seen = sorted(trailers)
        fingerprints = [trailers[source]["fingerprint"] for source in seen]
        return _totals(
            counts,
            ledger=ledger,
            kept=kept,
            sources=np.array(seen, np.int32).tobytes(),
            fingerprints=np.array(fingerprints, np.int64).tobytes(),
        )


def _events(
    batch: pa.RecordBatch, row: int, head: dict[str, Any], taken: Bools | None
) -> pa.RecordBatch:
    """One run of ledger rows as columns."""
    roots, vals = (
        np.frombuffer(batch.column(name)[row].as_buffer(), np.int64) for name in ("roots", "vals")
    )
    if taken is not None:
        roots, vals = roots[taken], vals[taken]
    n = len(roots)
    tasks = np.full(n, head["task"], np.int32)
    reasons = pa.repeat(pa.scalar(head["reason"], pa.string()), n)
    return pa.RecordBatch.from_arrays(
        [pa.array(roots), pa.array(vals), pa.array(tasks), reasons], schema=arrow_schema(_EVENTS)
    )


def check_trailers(counted: Sequence[Any], sources: int) -> None:
    """Raise unless all counters saw one and the same run of each task of ``split``.

    Parameters
    ----------
    counted : sequence of Row
        What `Count` returned, from every counter.
    sources : int
        How many tasks ``split`` had.
    """
    said: dict[int, set[int]] = {source: set() for source in range(sources)}
    for row in counted:
        fingerprints = np.frombuffer(row.fingerprints, np.int64).tolist()
        for source, fingerprint in zip(
            np.frombuffer(row.sources, np.int32).tolist(), fingerprints, strict=True
        ):
            said[source].add(fingerprint)
    differing = [source for source, fingerprints in said.items() if len(fingerprints) != 1]
    if differing:
        raise RuntimeError(
            f"counters saw different runs of tasks {differing} of split: the input has changed"
        )


@dataclass(frozen=True)
class Recount:
    """Counts again, from what the counters kept, the words of some roots."""

    files: list[str]
    roots: Int64s
    drop: str | None

    def __call__(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Serve mapInArrow: each row is the number of a file."""
        counts = []
        for batch in tasks:
            for file in batch.column(0).to_pylist():
                with pa.ipc.open_file(self.files[file]) as kept:
                    for number in range(kept.num_record_batches):
                        words = kept.get_batch(number)
                        for row in range(len(words)):
                            packed = _Packed(words, row, self.drop)
                            packed.of_roots(self.roots)
                            counts.append(packed.counts())
        yield _totals(counts)


def words_of(counted: Sequence[Any]) -> Counter[str]:
    """Add up what `Count` or `Recount` returned."""
    words = Counter[str]()
    for row in counted:
        numbers = np.frombuffer(row.counts, np.int64).tolist()
        if numbers:
            words.update(dict(zip(row.names.decode().split("\n"), numbers, strict=True)))
    return words
