"""Snapshots of the tables of a checkpoint, for readers on the driver and in tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore.spark.base.errors import corrupt
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import SegmentFiles, TableState
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.tables.table_segments import TableReader, TableSegment
from ackcore.tables.table_shape import TableShape
from ackcore.topology.parts import Parts

#: The number of rows that are read at a time.
_ROWS = 1 << 17


class TableSnapshot(NamedTuple):
    """A table after a micro-batch. It can be pickled: it names the files with the rows."""

    shape: TableShape  # the table
    segments: tuple[SegmentInfo, ...]  # the segments with the rows, the newest first
    horizon_ms: int  # the time in milliseconds since 1970 until which rows with a ttl have expired
    files: SegmentFiles  # the files of the checkpoint's tables
    rows: int = 0  # the recorded number of rows, for readers outside the query; else 0

    def reader(self) -> TableReader:
        """Open the table: map its segments on a disk, or fetch them from a bucket.

        Raises CheckpointCorrupt if a segment is missing or damaged.
        """
        segments = opened_segments(self.files, self.shape, self.segments)
        return TableReader(self.shape, segments, self.horizon_ms)


def snapshot_of(state: State, topology: Parts, number: int | None) -> dict[str, TableSnapshot]:
    """Return the tables after a micro-batch, by name.

    ``topology``: the topology with the tables. ``number``: a micro-batch whose tables are recorded:
    the last one that is done, or the next; None before the first. Others give empty tables.
    """
    recorded = state.tables.of(number) or {}
    found = {}
    for name, spec in topology.tables.items():
        table = recorded.get(name, TableState({}, 0))
        found[name] = TableSnapshot(spec.shape, table.segments, table.horizon_ms, state.segments)
    return found


def stored_rows(
    files: SegmentFiles,
    shape: TableShape,
    segments: Sequence[SegmentInfo],
    start: int = 0,
    stop: int | None = None,
) -> Iterator[pa.Table]:
    """Yield the stored rows of whole segments, one after the other, in tables of bounded size.

    One segment is open at a time. Raises CheckpointCorrupt if one is missing or damaged.

    ``start``, ``stop``: the range of rows, which are numbered through all segments; by default all
    rows.
    """
    first = 0
    for info in segments:
        lo = max(start - first, 0)
        hi = info.rows if stop is None else min(stop - first, info.rows)
        if lo < hi:
            (segment,) = opened_segments(files, shape, [info])
            for place in range(lo, hi, _ROWS):
                yield segment.take(np.arange(place, min(place + _ROWS, hi)))
        first += info.rows


def opened_segments(
    files: SegmentFiles, shape: TableShape, segments: Sequence[SegmentInfo]
) -> list[TableSegment]:
    """Open segments of a table, in their order, and check those not checked in this process.

    Raises CheckpointCorrupt if a segment is missing or damaged.
    """
    found = []
    for segment in segments:
        data = files.read(segment)
        try:
            found.append(TableSegment.open(data, shape, segment.lo, segment.hi, segment.removed))
        except (pa.ArrowInvalid, KeyError, TypeError) as error:
            raise corrupt(files.place(segment.file), f"is damaged: {error}") from error
    return found
