"""Folding a partition's rows where that pays, and cutting the result into blobs.

**A task may run twice, and must then write the same bytes** (`ackcore.spark.wire`).  The seed of
its ledgers is drawn once per job, by the driver.  Blobs are cut by the position of rows, never by
the batches they came in.  Where a partition's rows may come in another order the second time (they
were fetched from a shuffle), the whole partition is folded and its roots are sorted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._backend import Ledger
from ackcore._records import Entries
from ackcore.spark import wire
from ackcore.spark.reasons import earliest
from ackcore.spark.wire import Events

Batches = Iterator[pa.RecordBatch]

#: Rows that are packed together: 20-28 MiB, and blobs of some 100 KiB even for 200 shards.
CHUNK_ROWS = 1 << 20
#: Folding costs about 15 ns a row and spares 70 ns for each row that need not be shipped, so it
#: pays if a quarter goes.  A table of this many roots is as large as caches still help with:
FOLDED_ROOTS = 1 << 20
#: and of the rows that fill it a quarter meet their root again if there are twice as many roots.
#: How many there are is told from the first rows, as by the birthdays in a crowd.
MOST_ROOTS = 2 * FOLDED_ROOTS
PROBE_ROWS = 1 << 17
WORTHWHILE = 0.25
#: Chunks that are shipped as they are before folding is tried again.
UNFOLDED_CHUNKS = 15
#: Roots that are held to be sorted where rows have no fixed order: some 400 MiB.  A partition with
#: more is cut by what came: the outcomes are the same, but if its task has to run again because a
#: shuffle file was lost, Spark finds other bytes and runs more anew, or gives the job up.
HELD_ROOTS = 1 << 22


class Packer:
    """Turn the rows of one partition into blobs by shard.

    Parameters
    ----------
    shards : int
        How many there are.
    seed : int
        Of the ledgers: one per job.
    timed : bool
        Whether the rows have times.
    fixed_order : bool
        Whether the rows come in the same order if the task runs again.
    """

    def __init__(self, shards: int, *, seed: int, timed: bool, fixed_order: bool) -> None:
        self._shards = shards
        self._seed = seed
        self._timed = timed
        self._fixed_order = fixed_order
        self._chunk: _Chunk | None = None
        self._ledger: Ledger | None = None
        self._rows_folded = 0
        self._chunks_to_ship = 0
        self._reasons: list[pa.Table] = []
        self._reason_rows = 0

    def add(self, events: Events) -> Batches:
        """Take messages in; yields what is ready to be shipped."""
        if self._chunk is None:
            self._chunk = _Chunk(self._timed)
        while len(events.root_ids):
            events = self._chunk.fill(events)
            if self._chunk.is_full:
                yield from self._take_in(self._chunk.take())

    def add_entries(self, entries: Entries) -> Batches:
        """Take folded rows in; yields what is ready to be shipped."""
        ledger = self._open_ledger()
        ledger.merge(entries)
        self._rows_folded += len(entries)
        if len(ledger) >= HELD_ROOTS:
            yield from self._ship_ledger()

    def add_reasons(self, reasons: pa.Table | None) -> Batches:
        """Take reasons in; yields what is ready to be shipped."""
        if reasons is None:
            return
        self._reasons.append(reasons)
        self._reason_rows += len(reasons)
        if self._reason_rows >= CHUNK_ROWS:
            self._reasons = [earliest(self._reasons)]
            self._reason_rows = len(self._reasons[0])
            if self._reason_rows >= CHUNK_ROWS // 2:
                yield from self._ship_reasons()

    def finish(self) -> Batches:
        """Yield the rest."""
        if self._chunk is not None:
            yield from self._take_in(self._chunk.take())
        yield from self._ship_ledger()
        yield from self._ship_reasons()

    def _take_in(self, events: Events) -> Batches:
        rows = len(events.root_ids)
        if rows == 0:
            return
        if self._chunks_to_ship:
            self._chunks_to_ship -= 1
            yield wire.pack_events(events, self._shards)
            return
        probe = 0
        if self._ledger is None and self._fixed_order:
            probe = min(PROBE_ROWS, rows)
            ledger = self._open_ledger()
            fold(ledger, events, 0, probe)
            if not _is_worthwhile(probe, len(ledger)):
                self._ledger = None
                self._chunks_to_ship = UNFOLDED_CHUNKS
                yield wire.pack_events(events, self._shards)
                return
        ledger = self._open_ledger()
        fold(ledger, events, probe, rows)
        self._rows_folded += rows
        if len(ledger) >= (FOLDED_ROOTS if self._fixed_order else HELD_ROOTS):
            if self._fixed_order and len(ledger) > (1 - WORTHWHILE) * self._rows_folded:
                self._chunks_to_ship = UNFOLDED_CHUNKS
            yield from self._ship_ledger()

    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = new_ledger(self._seed, self._timed)
            self._rows_folded = 0
        return self._ledger

    def _ship_ledger(self) -> Batches:
        if self._ledger is None:
            return
        entries = self._ledger.entries()
        self._ledger = None
        order = None if self._fixed_order else np.argsort(entries.root_ids)
        for start in range(0, len(entries), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            yield wire.pack_entries(
                _some(entries, rows if order is None else order[rows]), self._shards
            )

    def _ship_reasons(self) -> Batches:
        if self._reasons:
            yield wire.pack_reasons(earliest(self._reasons), self._shards)
        self._reasons, self._reason_rows = [], 0


class _Chunk:
    """Messages copied together: cut by their number, whatever batches they came in."""

    def __init__(self, timed: bool) -> None:
        self._roots = np.empty(CHUNK_ROWS, np.int64)
        self._vals = np.empty(CHUNK_ROWS, np.int64)
        self._tasks = np.empty(CHUNK_ROWS, np.int32)
        self._times = np.empty(CHUNK_ROWS, np.int64) if timed else None
        self._rows = 0

    @property
    def is_full(self) -> bool:
        return self._rows == CHUNK_ROWS

    def fill(self, events: Events) -> Events:
        """Copy as many messages as there is room for, and return the others."""
        start = self._rows
        until = min(CHUNK_ROWS, start + len(events.root_ids))
        taken = until - start
        self._roots[start:until] = events.root_ids[:taken]
        self._vals[start:until] = events.vals[:taken]
        self._tasks[start:until] = events.tasks[:taken]
        rest = None
        if self._times is not None and events.times_ms is not None:
            self._times[start:until] = events.times_ms[:taken]
            rest = events.times_ms[taken:]
        self._rows = until
        return Events(events.root_ids[taken:], events.vals[taken:], events.tasks[taken:], rest)

    def take(self) -> Events:
        """Return what is there, valid until the next `fill`."""
        rows, self._rows = self._rows, 0
        times = None if self._times is None else self._times[:rows]
        return Events(self._roots[:rows], self._vals[:rows], self._tasks[:rows], times)


def _is_worthwhile(rows: int, roots: int) -> bool:
    """Whether folding is expected to take away enough, going by the first rows.

    Of r rows drawn from N roots about r * r / (2 N) meet a root again.
    """
    return (rows - roots) * 2 * MOST_ROOTS >= rows * rows


def new_ledger(seed: int | None, timed: bool) -> Ledger:
    """Return a ledger to fold into; one that keeps times has a clock, which nobody asks."""
    return Ledger(clock=_no_clock if timed else None, seed=seed)


def _no_clock() -> int:
    return 0


def fold(ledger: Ledger, events: Events, start: int = 0, until: int | None = None) -> None:
    """Fold a range of messages in."""
    rows = slice(start, until)
    times = None if events.times_ms is None else events.times_ms[rows]
    ledger.fold(events.root_ids[rows], events.vals[rows], events.tasks[rows], times)


def _some(entries: Entries, rows: Any) -> Entries:
    return Entries(**{name: column[rows] for name, column in entries.columns().items()})
