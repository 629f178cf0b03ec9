"""The choice of the fold for a table: with windows, with the keys for `dedup`, or any other."""

from __future__ import annotations

from collections.abc import Mapping

from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.tables.seen_keys import SeenFold
from ackcore.spark.tables.table_fold import TableFold, WindowFold
from ackcore.tables.watermarks import EVER, WindowWatermarks
from ackcore.topology.parts import Parts, TableSpec


def fold_of(
    state: State,
    topology: Parts,
    table: TableSpec,
    decision: BatchDecision,
    before: TableState,
    folded: Mapping[str, TableState],
) -> TableFold:
    """Return the fold of the micro-batch of ``decision`` into a table.

    ``before``: the table after the last micro-batch that is done. ``folded``: after this
    micro-batch, the tables whose closed windows this table reads.
    """
    shape, window = table.shape, table.shape.window
    of = state.segments, shape, decision.number
    behind = decision.behind.get(table.name, {})
    if window is None:
        spout = topology.source_of(table.name)
        dedup = None if spout is None else spout.dedup
        if dedup is None:
            return TableFold(*of, decision.now_ms)
        return SeenFold(*of, decision.now_ms, dedup, behind)
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
    earlier = WindowWatermarks.of(before.watermarks)
    times = decision.times.get(table.name, {})
    later = earlier.after(window, spouts, decision.now_ms, times, oldest, ends, behind)
    return WindowFold(*of, earlier.closed, later)


def _has_ended(table: TableState) -> bool:
    """Return whether all windows of a table closed before, so that no closed rows follow."""
    return WindowWatermarks.of(table.watermarks).closed == EVER and not table.closed
