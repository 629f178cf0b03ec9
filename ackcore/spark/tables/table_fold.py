"""The fold of a micro-batch's rows into a table, in the driver's process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.spark.base.errors import CheckpointCorrupt, RowFileDamaged
from ackcore.spark.checkpoint.segment_files import SegmentFiles
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.sinks.sink_batch import BatchFile, read_all
from ackcore.spark.tables.table_places import opened_segments
from ackcore.tables.folding import fold_rows, merge_states
from ackcore.tables.table_compaction import SegmentInfo, SegmentMerge, merges_due
from ackcore.tables.table_segments import TableReader, merged_rows, write_segment
from ackcore.tables.table_shape import HASH, HASH_END, TableShape


class TableFold:
    """The fold of one micro-batch into one table.

    Parameters
    ----------
    files : SegmentFiles
        The files of the checkpoint's tables.
    shape : TableShape
        The table.
    number : int
        The micro-batch.
    now_ms : int
        The time of its plan in milliseconds since 1970.
    """

    def __init__(
        self,
        files: SegmentFiles,
        shape: TableShape,
        number: int,
        now_ms: int,
    ) -> None:
        self._files = files
        self._shape = shape
        self._number = number
        self._now_ms = now_ms
        #: The time at which rows with a ttl may have expired.
        self._horizon_ms = now_ms

    def folded(self, before: TableState, rows: Sequence[BatchFile], nonacked: Int64s) -> TableState:
        """Return the table after the micro-batch; its segments are written durably.

        Parameters
        ----------
        before : TableState
            The table after the last micro-batch that is done.
        rows : sequence of BatchFile
            The files with the rows.
        nonacked : numpy.ndarray of int64
            The roots whose rows are left out; sorted.

        Raises
        ------
        CheckpointCorrupt
            If a file with rows or a segment is missing or damaged.
        """
        try:
            new, states = self._states(before.segments, rows, nonacked)
        except RowFileDamaged as damage:
            raise CheckpointCorrupt(str(damage)) from damage
        changed = (self._put([states], 0, HASH_END),) if len(states) else ()
        segments = (*changed, *self._compacted(before.segments))
        structure = self._shape.structure()
        gone = before.structure["aggregates"].keys() - structure["aggregates"].keys()
        count = before.rows + new
        if self._shape.expires:
            # Rows that expired are not subtracted: merges drop them.
            count = min(count, sum(segment.rows for segment in segments))
        return TableState(
            structure,
            self._horizon_ms,
            count,
            segments,
            changed,
            tuple(sorted({*before.removed, *gone})),
        )

    def _states(
        self, before: Sequence[SegmentInfo], rows: Sequence[BatchFile], nonacked: Int64s
    ) -> tuple[int, pa.Table]:
        """Return the number of new rows, and all rows that the micro-batch changed."""
        shape = self._shape
        partial = fold_rows(shape, read_all(rows, nonacked), self._now_ms)
        if not len(partial):
            return 0, partial
        older = TableReader(shape, opened_segments(self._files, shape, before), self._horizon_ms)
        return self._merge(older, partial)

    def _merge(self, older: TableReader, partial: pa.Table) -> tuple[int, pa.Table]:
        """Return the number of new rows, and all rows that the micro-batch changed."""
        shape = self._shape
        found = older.lookup(partial.select(shape.key_names))
        known = found.filter(pc.is_valid(found[HASH]))
        states = merge_states(shape, known, partial)
        return len(states) - len(known), states

    def _compacted(self, segments: tuple[SegmentInfo, ...]) -> tuple[SegmentInfo, ...]:
        """Return the segments, merged as far as is due; without those that have no rows."""
        due = merges_due(segments)
        if not due:
            return segments
        gone = {segment.file for merge in due for segment in merge.segments}
        found = tuple(self._merged(merge) for merge in due)
        left = tuple(segment for segment in segments if segment.file not in gone)
        return (*(segment for segment in found if segment.rows), *left)

    def _merged(self, merge: SegmentMerge) -> SegmentInfo:
        shape = self._shape
        segments = opened_segments(self._files, shape, merge.segments)
        horizon = self._horizon_ms if merge.into_base else None
        return self._put(
            merged_rows(shape, segments, merge.lo, merge.hi, horizon), merge.lo, merge.hi
        )

    def _put(self, tables: Iterable[pa.Table], lo: int, hi: int) -> SegmentInfo:
        shape = self._shape
        rows = pa.concat_tables([shape.stored_schema.empty_table(), *tables])
        data = write_segment(shape, rows, lo, hi)
        return self._files.put(shape.name, self._number, data, len(rows), lo, hi)
