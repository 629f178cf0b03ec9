"""The table of the keys of a spout's ACKED records, in which `dedup` finds copies of records.

Each key has the time of its record that the bound counts from: the event time, or the time of the
micro-batch.  It exists until the table's horizon, which never goes back, has reached this time.
The horizon is

* ``within_s`` before the time of the plan or, with event times, before the latest one of an ACKED
  record that is earlier than its plan.  If a micro-batch has no such record, its plan counts;
* and as late as it can be while ``within_keys`` keys are left.  The record of the table has the
  number of keys by their times, in spans, from which this is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s, UInt64s
from ackcore.spark.checkpoint.table_records import TableState
from ackcore.spark.sinks.sink_batch import BatchFile
from ackcore.spark.tables.table_fold import TableFold
from ackcore.spark.tables.table_snapshots import TableSnapshot, opened_segments
from ackcore.spark.tasks.dedup_executor import SeenKeys
from ackcore.tables.table_compaction import SegmentInfo
from ackcore.tables.table_shape import EXPIRES
from ackcore.tables.watermarks import NEVER
from ackcore.topology.parts import Dedup

#: The maximum number of spans of time in a record.
_SPANS = 200

#: A time in milliseconds since 1970, and the number of keys of this time or shortly before.
Span = tuple[int, int]


class SeenSource(NamedTuple):
    """The keys of a spout's ACKED and waiting records, sent to tasks, which call `reader`."""

    snapshot: TableSnapshot  # the table of the keys of ACKED records
    waiting: UInt64s  # the hashes of the keys for which records wait and none is due; ascending
    now_ms: int  # the time of the micro-batch's plan in milliseconds since 1970

    @classmethod
    def of(cls, snapshot: TableSnapshot, dedup: Dedup, waiting: UInt64s, now_ms: int) -> SeenSource:
        """Return the keys kept at ``now_ms``, a plan's time; with event times, all in the table."""
        horizon_ms = snapshot.horizon_ms
        if dedup.event_time is None:
            horizon_ms = max(horizon_ms, now_ms - _within_ms(dedup, now_ms))
        return cls(snapshot._replace(horizon_ms=horizon_ms), waiting, now_ms)

    def reader(self) -> SeenKeys:
        """Open the table of the keys, together with the hashes of the waiting keys.

        Raises CheckpointCorrupt if a segment is missing or damaged.
        """
        shape, segments, horizon_ms, files, _ = self.snapshot
        opened = opened_segments(files, shape, segments)
        return SeenKeys(shape, opened, horizon_ms, self.waiting, self.now_ms)


@dataclass(eq=False, repr=False)
class SeenFold(TableFold):
    """The fold of one micro-batch into the table of a spout's keys.

    ``files``: the files of the checkpoint's tables. ``shape``: the table of the keys. ``number``:
    the micro-batch. ``now_ms``: the time of its plan in milliseconds since 1970. ``dedup``: the
    spout's settings. ``behind``: by spout and part of its source, the times of
    `BatchDecision.behind` for the table.
    """

    _dedup: Dedup
    _behind: Mapping[str, Mapping[str, int]]

    def folded(self, before: TableState, rows: Sequence[BatchFile], nonacked: Int64s) -> TableState:
        """Return the table after the micro-batch (`TableFold.folded`), with new horizon and spans.

        Merges drop expired keys later.
        """
        dedup, now_ms = self._dedup, self._now_ms
        within_ms = _within_ms(dedup, now_ms)
        self._horizon_ms = horizon_ms = before.horizon_ms
        if dedup.event_time is None:
            self._horizon_ms = horizon_ms = max(horizon_ms, now_ms - within_ms)
        after = super().folded(before, rows, nonacked)
        if dedup.event_time is not None and len(self._times):
            earlier = self._times[self._times < now_ms]
            newest = int(earlier.max()) if len(earlier) else now_ms
            behind = [time for parts in self._behind.values() for time in parts.values()]
            horizon_ms = max(horizon_ms, min([newest, *behind]) - within_ms)
        spans: tuple[Span, ...] = ()
        if dedup.within_keys is not None:
            spans = _with_times(before.spans, self._times)
            horizon_ms = max(horizon_ms, _horizon_of(spans, dedup.within_keys))
        spans = tuple(span for span in spans if span[0] > horizon_ms)
        return after._replace(horizon_ms=horizon_ms, spans=spans)

    def _states(
        self, before: Sequence[SegmentInfo], rows: Sequence[BatchFile], nonacked: Int64s
    ) -> tuple[int, pa.Table]:
        new, states = super()._states(before, rows, nonacked)
        self._times: Int64s = states.column(EXPIRES).to_numpy()
        return new, states


def _within_ms(dedup: Dedup, now_ms: int) -> int:
    """Return ``within_s`` in milliseconds; without it, ``now_ms``: all the time since 1970."""
    return now_ms if dedup.within_s is None else round(dedup.within_s * 1000)


def _with_times(spans: Sequence[Span], more: Int64s) -> tuple[Span, ...]:
    """Add keys, given by their times, to ascending spans; join spans if there are over `_SPANS`."""
    known = np.array(spans, np.int64).reshape(-1, 2)
    # Each time once: the keys of equal times leave the bound together.
    times, of = np.unique(np.concatenate([known[:, 0], more]), return_inverse=True)
    counts = np.zeros(len(times), np.int64)
    np.add.at(counts, of[: len(known)], known[:, 1])
    counts += np.bincount(of[len(known) :], minlength=len(times))
    if len(times) > _SPANS:
        # Parts of about equal numbers of keys; the time of a span is the last in it.
        parts = np.minimum(np.cumsum(counts) * (_SPANS // 2) // max(1, counts.sum()), _SPANS)
        last = np.append(np.flatnonzero(np.diff(parts)), len(parts) - 1)
        counts = np.diff(np.append(0, np.cumsum(counts)[last]))
        times = times[last]
    return tuple(zip(times.tolist(), counts.tolist(), strict=True))


def _horizon_of(spans: Sequence[Span], most: int) -> int:
    """Return the time until which keys expire, so that later spans have ``most`` keys or more.

    `NEVER` if the spans after the first have fewer.
    """
    times = [time for time, _ in spans]
    later = np.cumsum([count for _, count in reversed(spans)])[::-1].tolist()
    return max((times[i] for i in range(len(spans) - 1) if later[i + 1] >= most), default=NEVER)
