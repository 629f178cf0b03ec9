"""Reads some rows of a partition again without reading the whole partition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.batches import Batches
from ackcore.spark.tasks.source_records import SourceRecords
from ackcore.spark.tasks.spout_stage import SpoutStage
from ackcore.spark.tasks.task import attempt_at


class Piece(NamedTuple):
    """Rows of a partition that a task reads again by themselves.

    ``what`` is the part that the source has to read.  It holds ``rows`` rows from place ``first``
    on, or all rows of the partition if ``rows`` is None.
    """

    partition: int
    first: int
    what: Any
    rows: int | None = None


class PieceReader(Protocol):
    """A reader of pieces of partitions; each worker has a copy."""

    def pieces(self, places: Mapping[int, Int64s], rows: Mapping[int, int]) -> list[Piece]:
        """Return the pieces with the rows at ``places``, given the size of each partition."""

    def read_pieces(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Batches]]:
        """Yield each piece with its rows. The caller consumes the rows before the next piece."""


class DealtPieces(NamedTuple):
    """The pieces of one spout, a list for each task."""

    reader: PieceReader
    lists: Sequence[Sequence[Piece]]


class RereadRows(NamedTuple):
    """Records that are read again, and whether they are all records of their partition."""

    partition: int
    whole: bool
    records: Iterator[SourceRecords]


def read_again(
    stage: SpoutStage, batches: Batches, dealt: DealtPieces | None
) -> Iterator[RereadRows]:
    """Read a partition again or, with pieces, the lists of pieces whose numbers are in the batches.

    Raises `RuntimeError` if a piece has another number of rows than in the run.
    """
    if dealt is None:
        partition = attempt_at(1).partition
        yield RereadRows(partition, True, stage.records(batches, partition))
        return
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        for piece, rows in dealt.reader.read_pieces(dealt.lists[number]):
            if piece.rows is None:
                records = stage.records(rows, piece.partition)
            else:
                records = _records_of(stage, piece, rows)
            yield RereadRows(piece.partition, piece.rows is None, records)


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
            f"{piece.what} has {place - piece.first} rows, and had {piece.rows} in the run; its "
            "source must be cut and ordered alike when it is read twice"
        )
