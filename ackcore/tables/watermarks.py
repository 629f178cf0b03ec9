"""The watermarks of a table with windows: the times that the rows of its spouts have reached.

All times are in milliseconds since 1970.  A bound is a time of rows minus the table's lateness.
Windows that end at the bound `WindowWatermarks.closed`, or before, are closed.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ackcore.tables.time_windows import Window

#: Bounds before and after all times.
NEVER, EVER = -(2**62), 2**62
#: Stands for the largest time of a part of a source that has rows, if none of them has been read.
UNSURE = NEVER + 1
#: The maximum number of former bounds that are kept.
MAX_MARKS = 64


@dataclass(frozen=True)
class WindowWatermarks:
    """The watermarks of a table after a micro-batch."""

    #: By spout, its watermark: the largest time of a row of an ACKED record, or the smaller one of
    #: a part of the source that is behind.
    times: Mapping[str, int] = field(default_factory=dict)
    #: By spout, the time of the last plan with a row of an ACKED record.
    seen_ms: Mapping[str, int] = field(default_factory=dict)
    begun_ms: int | None = None  # the time of the first plan
    reached: int = NEVER  # the bound that the rows of all spouts have reached.  It never goes back
    #: The bound until which windows are closed: that of ``reached``, unless a record waits that was
    #: first read before.  It never goes back.
    closed: int = NEVER
    #: For the micro-batches that first read waiting records: the time of the plan, and the bound
    #: that was reached before.
    marks: tuple[tuple[int, int], ...] = ()
    #: By spout, the largest time of a row of an ACKED record.
    newest: Mapping[str, int] = field(default_factory=dict)
    #: By spout and part of its source that is behind, that is, has rows for later micro-batches:
    #: the largest time of a row of an ACKED record from it, `UNSURE` or `NEVER`; and the time of
    #: the last plan with such a row, or of the first plan that left the part behind.
    behind: Mapping[str, Mapping[str, tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any] | None) -> WindowWatermarks:
        """Rebuild the value from the result of `body`; from None, before the first micro-batch."""
        if body is None:
            return cls()
        return cls(**{**body, "marks": tuple((at, bound) for at, bound in body["marks"])})

    def body(self) -> dict[str, Any]:
        """Return the value as an object for JSON."""
        return asdict(self)

    def bound(self, first_ms: int) -> int:
        """Return the bound that decides whether a waiting record is late.

        It is the bound that was reached before the record was first read, so that a retry does not
        make a record late.

        ``first_ms``: the time of the plan that first read the record.
        """
        at = bisect(self.marks, (first_ms, EVER))
        return max(self.closed, self.marks[at - 1][1] if at else NEVER)

    def after(
        self,
        window: Window,
        spouts: Collection[str],
        now_ms: int,
        times: Mapping[str, int],
        oldest_ms: int | None,
        ends: bool,
        behind: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    ) -> WindowWatermarks:
        """Return the watermarks after one more micro-batch.

        ``window``: the windows of the table. ``spouts``: the spouts that feed the table.
        ``now_ms``: the time of the plan. ``times``: by spout, the largest time of a row of an ACKED
        record in the micro-batch. ``oldest_ms``: the time of the plan that first read the oldest
        waiting record; None if none waits. ``ends``: whether this is the last micro-batch, so that
        all windows close. ``behind``: by spout and part of its source that has rows for later
        micro-batches, the largest time of a row of an ACKED record from it in this micro-batch;
        `NEVER` if there is none; `UNSURE` if none of the part's rows has been read.
        """
        begun = now_ms if self.begun_ms is None else self.begun_ms
        if ends:
            return WindowWatermarks(self.times, self.seen_ms, begun, EVER, EVER)
        marks = self.marks
        if not marks or (marks[-1][0] < now_ms and marks[-1][1] != self.reached):
            marks = (*marks, (now_ms, self.reached))
        newest = {**self.newest}
        for spout, time in times.items():
            # A wrong time in the future must not close the windows of all other records.
            newest[spout] = max(min(time, now_ms), newest.get(spout, NEVER))

        def counts(seen_ms: int) -> bool:
            return window.idle_ms is None or now_ms - seen_ms < window.idle_ms

        held = self._held(now_ms, behind)
        largest = {}
        for spout, time in newest.items():
            bounds = [part for part, at in held.get(spout, {}).values() if counts(at)]
            largest[spout] = max(self.times.get(spout, NEVER), min([time, *bounds]))
        seen = {**self.seen_ms, **dict.fromkeys(times, now_ms)}
        counted = [largest.get(one, NEVER) for one in spouts if counts(seen.get(one, begun))]
        reached = max(self.reached, min(counted, default=NEVER) - window.late_ms)
        if oldest_ms is None:
            return WindowWatermarks(largest, seen, begun, reached, reached, (), newest, held)
        first = max(0, bisect(marks, (oldest_ms, EVER)) - 1)
        marks = marks[first:]
        while len(marks) > MAX_MARKS:
            # A record without a mark of its own has that before, which is not later.
            marks = (*marks[:1], *marks[2::2])
        found = WindowWatermarks(largest, seen, begun, reached, self.closed, marks, newest, held)
        closed = max(self.closed, min(reached, found.bound(oldest_ms)))
        return replace(found, closed=closed)

    def _held(
        self, now_ms: int, behind: Mapping[str, Mapping[str, int]]
    ) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the attribute ``behind`` after the micro-batch planned at ``now_ms``."""
        found: dict[str, dict[str, tuple[int, int]]] = {}
        for spout, parts in behind.items():
            known, found[spout] = self.behind.get(spout, {}), {}
            for part, time in parts.items():
                before, seen_ms = known.get(part, (NEVER, now_ms))
                found[spout][part] = max(before, time), now_ms if time > NEVER else seen_ms
        return found
