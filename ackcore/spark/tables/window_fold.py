"""The fold into a table with windows, and the choice of the fold for each kind of table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.segment_files import SegmentFiles
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.sinks.sink_batch import BatchFile
from ackcore.spark.tables.seen_keys import SeenFold
from ackcore.spark.tables.table_fold import TableFold
from ackcore.spark.tables.table_places import opened_segments
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.tables.table_segments import TableReader
from ackcore.tables.table_shape import HASH_END, TableShape
from ackcore.tables.watermarks import EVER, NEVER, WindowWatermarks
from ackcore.tables.window_rows import closing_rows, merged_sessions
from ackcore.topology.parts import Parts, TableSpec


class WindowFold(TableFold):
    """The fold of one micro-batch into one table with windows.

    The arguments are those of `TableFold`; ``before`` and ``after`` are the watermarks before and
    after the micro-batch.
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


def new_table(shape: TableShape) -> TableState:
    """Return a table before its first micro-batch."""
    if shape.window is None:
        return TableState(shape.structure(), NEVER)  # event times may be before 1970
    return TableState(shape.structure(), NEVER, watermarks=WindowWatermarks().body())


def fold_of(
    state: State,
    topology: Parts,
    table: TableSpec,
    decision: BatchDecision,
    before: TableState,
    folded: Mapping[str, TableState],
) -> TableFold:
    """Return the fold of a micro-batch into a table.

    ``before``: the table after the last micro-batch that is done. ``folded``: the tables after this
    one whose closed windows reach the table.
    """
    shape, window = table.shape, table.shape.window
    of = state.segments, shape, decision.number
    if window is None:
        spout = topology.source_of(table.name)
        dedup = None if spout is None else spout.dedup
        if dedup is None:
            return TableFold(*of, decision.now_ms)
        return SeenFold(*of, decision.now_ms, dedup)
    spouts = topology.spouts_of(table.component)
    waits = decision.waiting.segments()
    oldest = min((part.oldest_ms for name in spouts for part in waits.get(name, ())), default=None)
    # The last micro-batch of a finite run for this table, as far as is known.
    ends = (
        state.kind == "batch"
        and not decision.waiting.rows()
        and not state.pending_replays()
        and all(_has_ended(folded[name]) for name in topology.tables_before(table))
    )
    earlier = WindowWatermarks.of(before.watermarks or WindowWatermarks().body())
    times = decision.times.get(table.name, {})
    later = earlier.after(window, spouts, decision.now_ms, times, oldest, ends)
    return WindowFold(*of, earlier, later)


def _has_ended(table: TableState) -> bool:
    """Return whether all windows of a table are closed, and the last of their rows were read."""
    watermarks = WindowWatermarks.of(table.watermarks or WindowWatermarks().body())
    return watermarks.closed == EVER and not table.closed
