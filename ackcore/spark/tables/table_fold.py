"""The fold of a micro-batch's rows into a table, with or without windows, on the driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.errors import CheckpointCorrupt, RowFileDamaged
from ackcore.spark.checkpoint.table_records import SegmentFiles, TableState
from ackcore.spark.sinks.sink_batch import BatchFile, read_all
from ackcore.spark.tables.table_snapshots import opened_segments
from ackcore.tables.folding import by_ranges, fold_rows, merge_states
from ackcore.tables.table_compaction import (
    MERGED_PER_ROW,
    SegmentInfo,
    SegmentMerge,
    after_merge,
    merge_due,
    weight_of,
)
from ackcore.tables.table_segments import TableReader, merged_parts, write_segment
from ackcore.tables.table_shape import HASH, HASH_END, TableShape
from ackcore.tables.watermarks import WindowWatermarks
from ackcore.tables.window_rows import closing_rows, merged_sessions


@dataclass(eq=False, repr=False)
class TableFold:
    """The fold of one micro-batch's rows into one table.

    ``files``: the files of the checkpoint's tables. ``shape``: the table. ``number``: the
    micro-batch. ``now_ms``: the time of its plan in milliseconds since 1970.
    """

    _files: SegmentFiles
    _shape: TableShape
    _number: int
    _now_ms: int

    def __post_init__(self) -> None:
        #: Rows that expire until this time do not exist; merges drop them.
        self._horizon_ms = self._now_ms

    def folded(self, before: TableState, rows: Sequence[BatchFile], nonacked: Int64s) -> TableState:
        """Return the table after the micro-batch; its segments, some merged, are written durably.

        Raises CheckpointCorrupt if a file with rows or a segment is missing or damaged, and the
        error of an aggregate, such as OverflowError.

        ``before``: the table after the last micro-batch that is done. ``rows``: the files with the
        rows. ``nonacked``: the roots whose rows are left out; sorted.
        """
        structure, was = self._shape.structure(), before.structure["aggregates"]
        # A later value may have the name of a removed one, so older segments hide its states.
        gone = was.keys() - structure["aggregates"].keys()
        columns = {column for value in gone for column in was[value]["states"]}
        older = tuple(segment.without(columns) for segment in before.segments)
        try:
            new, states = self._states(older, rows, nonacked)
        except RowFileDamaged as damage:
            raise CheckpointCorrupt(str(damage)) from damage
        changed = tuple(self._put(rows, lo, hi) for lo, hi, (rows,) in by_ranges([states]))
        pace = max(1.0, MERGED_PER_ROW * weight_of(changed))
        segments = (*changed, *self._compacted(older, pace))
        count = before.rows + new
        if self._shape.expires:
            # Rows that expired are not subtracted: merges drop them.
            count = min(count, sum(segment.rows for segment in segments))
        return TableState(structure, self._horizon_ms, count, segments, changed)

    def _states(
        self, before: Sequence[SegmentInfo], rows: Sequence[BatchFile], nonacked: Int64s
    ) -> tuple[int, pa.Table]:
        """Return the number of new keys, and the changed rows as stored after the micro-batch."""
        shape = self._shape
        partial = fold_rows(shape, read_all(rows, nonacked), self._now_ms)
        if not len(partial):
            return 0, partial
        older = TableReader(shape, opened_segments(self._files, shape, before), self._horizon_ms)
        # The rows of the table may be much longer than those of the micro-batch.
        nbytes = sum(one.nbytes for one in older.segments) * len(partial)
        known = nbytes // max(1, sum(one.rows for one in older.segments))
        found = [self._merge(older, part) for _, _, (part,) in by_ranges([partial], known)]
        return sum(new for new, _ in found), pa.concat_tables([states for _, states in found])

    def _merge(self, older: TableReader, partial: pa.Table) -> tuple[int, pa.Table]:
        """Merge the states of the micro-batch with those of the table.

        Returns the number of new keys, and the changed rows.
        """
        shape = self._shape
        found = older.lookup(partial.select(shape.key_names))
        known = found.filter(pc.is_valid(found[HASH]))
        states = merge_states(shape, known, partial)
        return len(states) - len(known), states

    def _compacted(self, segments: tuple[SegmentInfo, ...], pace: float) -> tuple[SegmentInfo, ...]:
        """Make the merges that are due: the first one, and more up to a weight of ``pace`` in all.

        Returns the segments afterwards.
        """
        done = 0.0
        while (merge := merge_due(segments)) and (not done or done + merge.weight <= pace):
            done += merge.weight
            segments = self._merged(segments, merge)
        return segments

    def _merged(
        self, segments: tuple[SegmentInfo, ...], merge: SegmentMerge
    ) -> tuple[SegmentInfo, ...]:
        """Return the segments after a merge; one part of the merged rows is in memory at a time."""
        shape = self._shape
        horizon = self._horizon_ms if merge.into_base else None
        opened = opened_segments(self._files, shape, merge.segments)
        made = [
            self._put(rows, lo, hi)
            for lo, hi, rows in merged_parts(shape, opened, merge.lo, merge.hi, horizon)
            if len(rows)
        ]
        of = dict(zip(merge.segments, opened, strict=True))
        return after_merge(
            segments, merge, made, lambda info, lo, hi: of[info].between(lo, hi).rows
        )

    def _put(self, rows: pa.Table, lo: int, hi: int) -> SegmentInfo:
        data = write_segment(self._shape, rows, lo, hi)
        return self._files.put(self._shape.name, self._number, data, len(rows), lo, hi)


@dataclass(eq=False, repr=False)
class WindowFold(TableFold):
    """The fold of one micro-batch into one table with windows.

    ``files``: the files of the checkpoint's tables. ``shape``: the table. ``number``: the
    micro-batch. ``now_ms``: the time until which windows were closed before the micro-batch. All
    reads of the fold include windows that close now, and merges do not drop them yet. ``after``:
    the watermarks after the micro-batch.
    """

    _after: WindowWatermarks

    def folded(self, before: TableState, rows: Sequence[BatchFile], nonacked: Int64s) -> TableState:
        """Return the table after the micro-batch, as `TableFold.folded`.

        Also writes the rows of the windows that close; ``closed`` of the result has their segments.
        """
        after = super().folded(before, rows, nonacked)
        closed = self._closed(after.segments)
        return after._replace(
            horizon_ms=self._after.closed,
            rows=after.rows - sum(segment.rows for segment in closed),
            closed=closed,
            watermarks=self._after.body(),
        )

    def _merge(self, older: TableReader, partial: pa.Table) -> tuple[int, pa.Table]:
        if not self._shape.sessions:
            return super()._merge(older, partial)
        return merged_sessions(self._shape, older, partial)

    def _closed(self, segments: Sequence[SegmentInfo]) -> tuple[SegmentInfo, ...]:
        """Write the rows whose windows close, and return their new segments, if there are any."""
        before, until = self._now_ms, self._after.closed  # the bounds of closed windows
        window = self._shape.window
        if window is None or not window.closes_between(before, until):
            return ()
        opened = opened_segments(self._files, self._shape, segments)
        reader = TableReader(self._shape, opened, before)
        return tuple(self._put(rows, 0, HASH_END) for rows in closing_rows(reader, until))
