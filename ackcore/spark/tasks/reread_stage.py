"""Reading the rows of a run again, for those that somebody looks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.batches import Batches
from ackcore.spark.base.reasons import Reasons
from ackcore.spark.stores.files import read_table_at
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_writer import FailedWriter
from ackcore.spark.tasks.pieces import DealtPieces, read_again
from ackcore.spark.tasks.record_ids import RETRIES
from ackcore.spark.tasks.results import PICKED, TASK_REPORT, result_batch, to_stream
from ackcore.spark.tasks.retry_stage import Slice, records_in
from ackcore.spark.tasks.row_files import ROOT_ID
from ackcore.spark.tasks.source_records import SourceRecords, pick
from ackcore.spark.tasks.spout_stage import SpoutStage, sampled

#: A record, and the hash of its key.
KEYED = pa.schema([("root_id", pa.int64()), ("key", pa.int64())])


class Reader(Protocol):
    """Looks at all records that a task reads again."""

    def take(self, some: SourceRecords) -> pa.RecordBatch | None:
        """Look at records; return what goes to the driver at once, with its spout's name."""

    def finish(self) -> tuple[dict[str, Any], list[pa.Table]]:
        """Return what goes to the driver at the end: a report, which JSON can hold, and tables."""

    def discard(self) -> None:
        """Let go of what is unfinished; after `finish` that is nothing."""


@dataclass(frozen=True)
class Picks:
    """Returns the records that a function picks."""

    pick: Callable[[SourceRecords], pa.RecordBatch]

    def take(self, some: SourceRecords) -> pa.RecordBatch | None:
        """Look at records; return those that are picked."""
        return self.pick(some)

    def finish(self) -> tuple[dict[str, Any], list[pa.Table]]:
        """Return nothing more."""
        return {}, []

    def discard(self) -> None:
        """Let go of nothing."""


class JudgedPicks:
    """Judges the records that failed.

    Parameters
    ----------
    rules : Rules
        The settings and times that decide whether a record waits.
    directory : str
        The directory for files.
    number : int
        The micro-batch.
    failed : pyarrow.Table or str
        Roots, sorted, and reasons; or a file of them.
    """

    def __init__(self, rules: Rules, directory: str, number: int, failed: pa.Table | str) -> None:
        table = read_table_at(failed) if isinstance(failed, str) else failed
        self._roots: Int64s = table["root_id"].to_numpy()
        self._reasons = table["reason"]
        self._number = number
        self._writer = FailedWriter(rules, directory, number)

    def take(self, some: SourceRecords) -> None:
        """Judge those of the records that failed."""
        lost = pick(some, {some.source.name: self._roots}, {}, self._number)
        if len(lost):
            at = np.searchsorted(self._roots, lost.column(ROOT_ID).to_numpy())
            self._writer.write(some, lost, Reasons.of_texts(self._reasons.take(pa.array(at))))

    def finish(self) -> tuple[dict[str, Any], list[pa.Table]]:
        """Return what became of them, as `FailedRows.of` takes it."""
        return self._writer.finish()

    def discard(self) -> None:
        """Give up what is not in a file yet."""
        self._writer.discard()


def pick_keys(some: SourceRecords, keys: Mapping[str, Int64s]) -> pa.RecordBatch:
    """Return the new records that have keys of some hashes, in `KEYED`.

    Parameters
    ----------
    some : SourceRecords
    keys : mapping from str to numpy.ndarray of int64
        The hashes by spout, sorted.
    """
    source = some.source
    schema = KEYED.with_metadata({"spout": source.name})
    if some.partition == RETRIES or source.name not in keys:
        return pa.RecordBatch.from_pylist([], schema)
    hashes, ordered = source.key_hashes(some.batch)
    wanted = ordered & np.isin(hashes, keys[source.name])
    roots = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    columns = [pa.array(roots[wanted]), pa.array(hashes[wanted])]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class RereadStage:
    """Reads what a run has read again, and gives it to a `Reader`.

    It maps rows of a source or, with ``slices`` or ``pieces``, their numbers.

    Parameters
    ----------
    stage : SpoutStage
        Reads the rows of sources.
    reader : callable
        Returns the task's `Reader`.
    spilled : frozenset of str
        Spouts that are read from files, and not from their sources.
    slices : tuple of Slice
        Parts of files: records that were due, or were spilled.
    pieces : DealtPieces, optional
        The pieces of a source that are read; by default all rows of a partition.
    """

    stage: SpoutStage
    reader: Callable[[], Reader]
    spilled: frozenset[str] = frozenset()
    slices: tuple[Slice, ...] = ()
    pieces: DealtPieces | None = None

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        reader = self.reader()
        contents: list[tuple[int, dict[str, int]]] = []
        try:
            for some in self._records(batches, contents):
                rows = reader.take(some)
                if rows is not None and len(rows):
                    yield result_batch([(PICKED, to_stream(rows))])
            report, tables = reader.finish()
        finally:
            reader.discard()
        blobs = [(PICKED, to_stream(table)) for table in tables]
        told = json.dumps(report | {"contents": contents}).encode()
        yield result_batch([*blobs, (TASK_REPORT, told)])

    def _records(
        self, batches: Batches, contents: list[tuple[int, dict[str, int]]]
    ) -> Iterator[SourceRecords]:
        """Yield the records; add the content of each partition that is read as a whole."""
        if self.slices:
            for number in (each for batch in batches for each in batch.column(0).to_pylist()):
                part = self.slices[number]
                yield from records_in(self.stage.sources[part.spout], part)
            return
        for partition, whole, records in read_again(self.stage, batches, self.pieces):
            content: dict[str, int] = {}
            for some in records:
                name = some.source.name
                content[name] = sampled(some.batch, content.get(name, 0))
                if name not in self.spilled:
                    yield some
            if whole:
                contents.append((partition, content))
