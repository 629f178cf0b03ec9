"""Reads the rows of a run again, to find records of which the driver knows only the roots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.reasons import Reasons, one_array
from ackcore.spark.base.schemas import ATTEMPT
from ackcore.spark.stores.run_files import read_table_at
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_writer import FailedWriter
from ackcore.spark.tasks.record_ids import RETRIES, SourceRecords, key_hashes, pick
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID, among
from ackcore.spark.tasks.spout_stage import RowSample, Slice, SpoutStage, records_in
from ackcore.spark.tasks.task import PICKED, TASK_REPORT, attempt_at, result_batch, to_stream

#: A record's root, its row number among the due records (null for a new one), its attempt, and the
#: hash of its key (null if it has none).
KEYED = pa.schema(
    [(ROOT_ID, pa.int64()), (PLACE, pa.int64()), (ATTEMPT, pa.int32()), ("key", pa.int64())]
)


class Piece(NamedTuple):
    """Rows of a partition that a task reads again without the other rows.

    ``what``: the parts to read, in the source's own form, for instance offset ranges.  They have
    ``rows`` rows from row ``first`` on, or all rows of the partition if ``rows`` is None.
    """

    partition: int
    first: int
    what: Sequence[Any]
    rows: int | None = None


class PieceReader(Protocol):
    """The interface of sources that read some rows again, in pieces of partitions.

    The driver calls `pieces`. Tasks call `read_pieces` on a pickled copy.
    """

    def pieces(self, places: Mapping[int, Int64s], rows: Mapping[int, int]) -> list[Piece]:
        """Return pieces that contain some rows, without reading them.

        ``places``: by partition, the numbers of these rows. ``rows``: by partition, the number of
        all of its rows.
        """

    def read_pieces(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Batches]]:
        """Read pieces from the source; yield each with its rows, in any order.

        The caller consumes the rows before the next piece.
        """


class DealtPieces(NamedTuple):
    """The pieces of one spout that are read again: a list for each task, and their reader."""

    reader: PieceReader
    lists: Sequence[Sequence[Piece]]


def _records_of(
    stage: SpoutStage, piece: Piece, rows: Iterator[pa.RecordBatch]
) -> Iterator[SourceRecords]:
    assert stage.spout is not None
    source, place = stage.sources[stage.spout], piece.first
    for batch in rows:
        yield SourceRecords(source, source.rows(batch), piece.partition, place)
        place += len(batch)
    if place - piece.first != piece.rows:
        raise RuntimeError(
            f"spout {stage.spout!r}: {', '.join(map(str, piece.what))} has "
            f"{counted(place - piece.first, 'row')}, and had {piece.rows} when the run read it; a "
            "source that is read twice must return the same rows in the same partitions"
        )


class Picks:
    """A consumer of all records that a task reads again; it returns those that ``pick`` selects."""

    def __init__(self, pick: Callable[[SourceRecords], pa.RecordBatch]) -> None:
        self._pick = pick

    def take(self, some: SourceRecords) -> pa.RecordBatch | None:
        """Return the records for the driver, or None; the schema's metadata has the spout."""
        return self._pick(some)

    def finish(self) -> tuple[dict[str, Any], list[pa.Table]]:
        """Return the final results for the driver: a JSON-serializable report, and tables."""
        return {}, []

    def discard(self) -> None:
        """Discard unfinished files; do nothing after `finish`."""


class JudgedPicks(Picks):
    """A consumer of records that are read again, which judges those that failed.

    ``directory``: the directory for files. ``number``: the number of the micro-batch. ``failed``: a
    table, or the path of its file: the sorted roots of the failed records, their reasons and, if
    spouts need them, the columns of `NUMBERS`.
    """

    def __init__(self, rules: Rules, directory: str, number: int, failed: pa.Table | str) -> None:
        table = read_table_at(failed) if isinstance(failed, str) else failed
        self._roots: Int64s = table["root_id"].to_numpy()
        self._failed = table
        self._number = number
        self._writer = FailedWriter(rules, directory, number)

    def take(self, some: SourceRecords) -> None:
        """Decide for each failed record among the given if it waits or is dead; see `finish`."""
        lost = pick(some, {some.source.name: self._roots}, {}, self._number)
        if len(lost):
            at = pa.array(np.searchsorted(self._roots, lost.column(ROOT_ID).to_numpy()))
            number = some.source.number_column
            if number is not None and number in self._failed.column_names:
                numbers = one_array(self._failed[number].take(at))
                lost = lost.append_column(pa.field(number, pa.int64()), numbers)
            self._writer.write(some, lost, Reasons.of_texts(self._failed["reason"].take(at)))

    def finish(self) -> tuple[dict[str, Any], list[pa.Table]]:
        """Finish the files; return the report and tables of the judged, for `FailedRows.of`."""
        return self._writer.finish()

    def discard(self) -> None:
        """Discard the records that are in no finished file."""
        self._writer.discard()


def pick_keyed(
    some: SourceRecords, roots: Mapping[str, Int64s], keys: Mapping[str, Int64s]
) -> pa.RecordBatch:
    """Return the records with given roots, and new records with given keys, as rows of `KEYED`.

    ``roots``, ``keys``: by ordered spout, the sorted roots, and the sorted hashes of keys.
    """
    source, nothing = some.source, np.empty(0, np.int64)
    schema = KEYED.with_metadata({"spout": source.name})
    if source.name not in roots and source.name not in keys:
        return pa.RecordBatch.from_pylist([], schema)
    ids = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    hashes, ordered = key_hashes(some.batch, source.ordered_by)
    wanted = among(ids, roots.get(source.name, nothing))
    if some.partition != RETRIES:
        wanted |= ordered & among(hashes, keys.get(source.name, nothing))
    places = np.flatnonzero(wanted)
    n = len(places)
    due = pa.array(places + some.first, mask=np.full(n, some.partition != RETRIES))
    attempts = np.broadcast_to(np.asarray(some.attempts, np.int32), len(some.batch))[places]
    found = pa.array(hashes[places], mask=~ordered[places])
    columns = [pa.array(ids[places]), due, pa.array(attempts), found]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


@dataclass(frozen=True)
class RereadStage:
    """The mapInArrow function that reads a run's records again, and calls no bolt.

    Its input is the rows of a source; with ``slices`` or ``pieces``, the numbers of slices or of
    lists of pieces.
    """

    stage: SpoutStage  # the stage that reads the rows of sources
    reader: Callable[[], Picks]  # returns the task's consumer of the records
    #: The spouts that are read from files, not from their sources.
    spilled: frozenset[str] = frozenset()
    slices: tuple[Slice, ...] = ()  # parts of files with records that were due or were spilled
    #: The pieces of a source to read; by default all rows of a partition.
    pieces: DealtPieces | None = None

    def __call__(self, batches: Batches) -> Batches:
        """Read the records of one partition again, and yield results, for mapInArrow."""
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
        """Yield the records; append the fingerprints of whole partitions to ``contents``."""
        if self.slices:
            for number in (each for batch in batches for each in batch.column(0).to_pylist()):
                part = self.slices[number]
                yield from records_in(self.stage.sources[part.spout], part)
            return
        for partition, whole, records in self.partitions(batches):
            content = RowSample()
            for some in records:
                name = some.source.name
                content.add(name, some.batch)
                if name not in self.spilled:
                    yield some
            if whole:
                contents.append((partition, content.fingerprints()))

    def partitions(self, batches: Batches) -> Iterator[tuple[int, bool, Iterator[SourceRecords]]]:
        """Yield the number of each partition, whether all of its records are read, and these.

        Raises `RuntimeError` if a piece has another number of rows than in the run.
        """
        if self.pieces is None:
            partition = attempt_at(1).partition
            yield partition, True, self.stage.records(batches, partition)
            return
        for number in (each for batch in batches for each in batch.column(0).to_pylist()):
            for piece, rows in self.pieces.reader.read_pieces(self.pieces.lists[number]):
                if piece.rows is None:
                    records = self.stage.records(rows, piece.partition)
                else:
                    records = _records_of(self.stage, piece, rows)
                yield piece.partition, piece.rows is None, records
