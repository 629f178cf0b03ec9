"""Snapshots of the tables of a checkpoint, for readers on the driver and in tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint.segment_files import SegmentFiles
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.tables.table_segments import TableReader, TableSegment
from ackcore.tables.table_shape import TableShape
from ackcore.topology.parts import TableSpec


class TableSnapshot(NamedTuple):
    """A table after a micro-batch.  It can be pickled, and holds no rows.

    Attributes
    ----------
    files : SegmentFiles
        The files of the checkpoint's tables.
    shape : TableShape
        The table.
    state : TableState
        The recorded entry of the table.
    """

    files: SegmentFiles
    shape: TableShape
    state: TableState

    def reader(self) -> TableReader:
        """Open the table: map its segments on a disk, or fetch them from a bucket.

        Raises
        ------
        CheckpointCorrupt
            If a segment is missing or damaged.
        """
        segments = opened_segments(self.files, self.shape, self.state.segments)
        return TableReader(self.shape, segments, self.state.horizon_ms)

    def changed(self) -> TableReader:
        """Open the rows that the micro-batch changed, like `reader`."""
        segments = opened_segments(self.files, self.shape, self.state.changed)
        return TableReader(self.shape, segments, self.state.horizon_ms)


def snapshot_of(
    state: State, tables: Mapping[str, TableSpec], number: int | None
) -> dict[str, TableSnapshot]:
    """Return the tables after a micro-batch, by name.

    Parameters
    ----------
    state : State
        The open checkpoint.
    tables : mapping from str to TableSpec
        The tables of the topology.
    number : int or None
        The last micro-batch that is done, or the one after it; None for empty tables.
    """
    recorded = state.tables.of(number) or {}
    return {
        name: TableSnapshot(
            state.segments,
            table.shape,
            recorded.get(name, TableState(table.shape.structure(), 0)),
        )
        for name, table in tables.items()
    }


def opened_segments(
    files: SegmentFiles, shape: TableShape, segments: Sequence[SegmentInfo]
) -> list[TableSegment]:
    """Open segments of a table, each checked once per process.

    Raises
    ------
    CheckpointCorrupt
        If a segment is missing or damaged.
    """
    found = []
    for segment in segments:
        data = files.read(segment)
        try:
            found.append(TableSegment.open(data, shape))
        except (pa.ArrowInvalid, KeyError, TypeError) as error:
            raise corrupt(files.place(segment.file), f"is damaged: {error}") from error
    return found
