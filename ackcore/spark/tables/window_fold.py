"""The fold of a micro-batch's rows into a table with windows, and the rows of those that close."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.checkpoint.table_records import SegmentFiles, TableState
from ackcore.spark.sinks.sink_batch import BatchFile
from ackcore.spark.tables.table_fold import TableFold
from ackcore.spark.tables.table_places import opened_segments
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.tables.table_segments import TableReader
from ackcore.tables.table_shape import HASH_END, TableShape
from ackcore.tables.watermarks import WindowWatermarks
from ackcore.tables.window_rows import closing_rows, merged_sessions


class WindowFold(TableFold):
    """The fold of one micro-batch into one table with windows.

    ``files``, ``shape``, ``number``: see `TableFold`. ``before``, ``after``: the watermarks before
    and after the micro-batch.
    """

    def __init__(
        self,
        files: SegmentFiles,
        shape: TableShape,
        number: int,
        before: WindowWatermarks,
        after: WindowWatermarks,
    ) -> None:
        # Windows that close now are in all reads of the fold, and merges do not drop them yet.
        super().__init__(files, shape, number, before.closed)
        self._before = before
        self._after = after

    def folded(self, before: TableState, rows: Sequence[BatchFile], nonacked: Int64s) -> TableState:
        """Return the table after the micro-batch, with the rows of the windows that close.

        The arguments and errors are those of `TableFold.folded`.
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
        """Write the rows of the windows that close to segments."""
        window, until = self._shape.window, self._after.closed
        if window is None or not window.closes_between(self._before.closed, until):
            return ()
        opened = opened_segments(self._files, self._shape, segments)
        reader = TableReader(self._shape, opened, self._before.closed)
        return tuple(self._put(rows, 0, HASH_END) for rows in closing_rows(reader, until))
