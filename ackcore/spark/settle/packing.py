"""Folding of a partition's rows, if that is cheaper than sending them, and packing into blobs.

**A task may run twice, and must then write the same bytes** (`ackcore.spark.settle.wire`). The
driver draws the seed of the ledgers once per job. Blobs are cut by the position of rows, never by
the batches in which rows arrive. If the order of rows may differ in the second run (they came from
a shuffle), the whole partition is folded. Folded rows are sorted by a fixed hash of their root,
because a table's own order depends on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._backend import Ledger
from ackcore._records import Entries
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.reasons import earliest
from ackcore.spark.settle import wire
from ackcore.spark.settle.wire import Events

#: The number of rows that are processed together: 5 to 7 MiB of memory, which is reused.
CHUNK_ROWS = 1 << 18
#: The number of rows, in two halves, from which the number of distinct roots is estimated.
PROBE_ROWS = 1 << 17
#: The assumed number of rows of a partition, if it is not known.
LIKELY_ROWS = 1 << 22
#: The cost of a row in ns: of sending it to its shard's ledger, mostly in the JVM; and of folding
#: it, so that only its root is sent.
SHIP_NS, FOLD_NS = 130, 12
#: The maximum roots of a table before it is sent (12 or 200 MiB), and the cost of each in ns.
#: The small table stays in caches and in memory that the task already has.  The large one needs new
#: memory, which costs up to 2.6 ns per byte under a hypervisor.
TABLES = ((1 << 18, 10), (1 << 22, 60))
#: The number of chunks that are sent unfolded before folding is tried again.
UNFOLDED_CHUNKS = 63
#: Without a fixed order of rows, a table takes all roots, up to 200 MiB.  Beyond that the cuts
#: depend on the order.  The outcomes are the same; but if the task runs again after the loss of a
#: shuffle file, Spark finds other bytes, and repeats more stages or aborts the job.
HELD_ROOTS = 1 << 22


class Packer:
    """A converter of the rows of one partition into batches of blobs, one blob per shard.

    Rows of one root are folded where that costs less than to send them. The methods are generators:
    they add rows only while their results are iterated. ``seed``: the seed of the ledgers, the same
    for all tasks of a job. ``timed``: whether the rows have times. ``fixed_order``: whether the
    rows come in the same order if the task runs again; only then may they be sent unfolded.
    ``rows``: their number, for the estimate of the cost, if it is known.
    """

    def __init__(
        self, shards: int, *, seed: int, timed: bool, fixed_order: bool, rows: int | None = None
    ) -> None:
        self._shards = shards
        self._seed = seed
        self._timed = timed
        self._fixed_order = fixed_order
        self._rows = rows
        self._buffer: _EventBuffer | None = None
        self._ledger: Ledger | None = None
        self._most_roots = HELD_ROOTS
        self._rows_folded = 0
        self._chunks_to_ship = 0
        self._reasons: list[pa.Table] = []
        self._reason_rows = 0

    def add(self, events: Events) -> Batches:
        """Buffer messages; fold or pack them per `CHUNK_ROWS`, and yield the batches of blobs."""
        if self._buffer is None:
            self._buffer = _EventBuffer(self._timed)
        while len(events.root_ids):
            events = self._buffer.fill(events)
            if self._buffer.is_full:
                yield from self._take_in(self._buffer.take())

    def add_entries(self, entries: Entries) -> Batches:
        """Add folded rows; yield batches of blobs when the ledger has `HELD_ROOTS` roots."""
        ledger = self._ledger
        if ledger is None:
            ledger = self._open_ledger(HELD_ROOTS, len(entries))
        ledger.merge(entries)
        if len(ledger) >= HELD_ROOTS:
            yield from self._ship_ledger()

    def add_reasons(self, reasons: pa.Table | None) -> Batches:
        """Add reasons of failures (`REASON_SCHEMA`), or None; yield blobs if many are held."""
        if reasons is None:
            return
        self._reasons.append(reasons)
        self._reason_rows += len(reasons)
        if self._reason_rows >= CHUNK_ROWS:
            self._reasons = [earliest(self._reasons)]
            self._reason_rows = len(self._reasons[0])
            if self._reason_rows >= CHUNK_ROWS // 2:  # depends on the order, as beyond HELD_ROOTS
                yield from self._ship_reasons()

    def pack(self, events: Iterable[tuple[Events, pa.Table | None]]) -> Batches:
        """Add all messages and their reasons; yield all batches of blobs, and finish."""
        for some, reasons in events:
            yield from self.add(some)
            yield from self.add_reasons(reasons)
        yield from self.finish()

    def finish(self) -> Batches:
        """Yield batches of blobs of all that is left; nothing may be added afterwards."""
        if self._buffer is not None:
            last = self._buffer.take()
            self._rows = len(last.root_ids)
            yield from self._take_in(last)
        if self._ledger is not None:
            # Nothing is folded after this, so the table need not be emptied.
            yield from wire.pack_entries(self._ledger.entries(), self._shards, CHUNK_ROWS)
        yield from self._ship_reasons()

    def _take_in(self, events: Events) -> Batches:
        rows = len(events.root_ids)
        if rows == 0:
            return
        if self._chunks_to_ship:
            self._chunks_to_ship -= 1
            yield wire.pack_events(events, self._shards)
            return
        # Compared with None, because an empty ledger is false.
        ledger = self._choose_table(events) if self._ledger is None else self._ledger
        if ledger is None:
            self._chunks_to_ship = UNFOLDED_CHUNKS
            yield wire.pack_events(events, self._shards)
            return
        fold(ledger, events)
        self._rows_folded += rows
        if len(ledger) >= self._most_roots:
            spared = self._rows_folded - len(ledger)
            not_worth_it = FOLD_NS * self._rows_folded > SHIP_NS * spared
            yield from self._ship_ledger()
            if self._fixed_order and not_worth_it:
                self._ledger = None
                self._chunks_to_ship = UNFOLDED_CHUNKS

    def _choose_table(self, events: Events) -> Ledger | None:
        """Open the ledger of the lowest estimated cost; None if unfolded rows cost less to send.

        Without a fixed order it always opens one, for up to `HELD_ROOTS` roots.
        """
        likely = LIKELY_ROWS if self._rows is None else self._rows
        estimate = CardinalityEstimate.of_sample(events, self._seed, self._timed)
        if not self._fixed_order:
            return self._open_ledger(HELD_ROOTS, estimate.roots_in(likely))
        costs = {0: float(SHIP_NS)}
        for most_roots, root_ns in TABLES:
            rows = max(1.0, min(likely, estimate.rows_with(most_roots)))
            roots = estimate.roots_in(rows)
            costs[most_roots] = FOLD_NS + roots / rows * (root_ns + SHIP_NS)
        best = min(costs, key=lambda size: costs[size])
        return self._open_ledger(best, estimate.roots_in(likely)) if best else None

    def _open_ledger(self, most_roots: int, roots: float) -> Ledger:
        self._most_roots = most_roots
        self._ledger = new_ledger(self._seed, self._timed, min(most_roots, math.ceil(roots)))
        self._rows_folded = 0
        return self._ledger

    def _ship_ledger(self) -> Batches:
        assert self._ledger is not None
        # Two rotations empty two buckets; the table's memory is kept and reused.
        self._ledger.rotate()
        self._ledger.rotate()
        entries = self._ledger.expired()
        self._rows_folded = 0
        yield from wire.pack_entries(entries, self._shards, CHUNK_ROWS)

    def _ship_reasons(self) -> Batches:
        if self._reasons:
            yield wire.pack_reasons(earliest(self._reasons), self._shards)
        self._reasons, self._reason_rows = [], 0


class _EventBuffer:
    """A buffer of messages with a fixed number of rows, independent of the batches they came in."""

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
        """Copy as many messages into the buffer as fit, and return the others."""
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
        """Empty the buffer and return its messages, which are valid until the next `fill`."""
        rows, self._rows = self._rows, 0
        times = None if self._times is None else self._times[:rows]
        return Events(self._roots[:rows], self._vals[:rows], self._tasks[:rows], times)


class CardinalityEstimate(NamedTuple):
    """An estimate of the distinct roots in any number of rows, from a sample of the rows.

    It is by capture and recapture (Lincoln-Petersen): both halves of the sample, of ``half`` rows
    each, draw from ``pool`` roots, or from infinitely many.  The first half has ``first`` distinct
    roots.  A half misses a share ``missed`` of the pool, so n times as many rows as a half have
    about ``pool * (1 - missed ** n)`` distinct roots.
    """

    half: int
    first: int
    pool: float
    missed: float

    @classmethod
    def of_sample(cls, events: Events, seed: int, timed: bool) -> CardinalityEstimate:
        """Return an estimate from the first `PROBE_ROWS` of these rows."""
        half = min(PROBE_ROWS, len(events.root_ids)) // 2
        probe = new_ledger(seed, timed, 2 * half)
        fold(probe, events, 0, half)
        first = len(probe)
        fold(probe, events, half, 2 * half)
        both = len(probe)
        met_again = 2 * first - both
        pool = first * first / met_again if met_again > 0 else math.inf
        return cls(half, first, pool, both / first - 1 if first else 1.0)

    def roots_in(self, rows: float) -> float:
        """Return the estimated number of distinct roots in a number of rows."""
        if math.isinf(self.pool):
            return rows * self.first / max(1, self.half)
        return float(min(rows, self.pool * (1 - self.missed ** (rows / self.half))))

    def rows_with(self, roots: float) -> float:
        """Return the estimated number of rows with that many distinct roots; infinity if none."""
        if math.isinf(self.pool):
            return roots * self.half / max(1, self.first)
        if roots >= self.pool or self.missed <= 0:
            return math.inf
        return self.half * math.log(1 - roots / self.pool) / math.log(self.missed)


def new_ledger(seed: int | None, timed: bool, roots: int = 0) -> Ledger:
    """Return an empty ledger for folding, sized for about ``roots`` roots.

    The clock of a ``timed`` ledger is read only by a `settle` without a time.
    """
    # An eighth more than estimated: folding into a table that grows takes 1.4 times as long.
    clock = wall_clock_ms if timed else None
    return Ledger(max(1024, roots + roots // 8), buckets=2, clock=clock, seed=seed)


def fold(ledger: Ledger, events: Events, start: int = 0, until: int | None = None) -> None:
    """Fold the messages from row ``start`` to ``until`` (exclusive) into a ledger."""
    rows = slice(start, until)
    times = None if events.times_ms is None else events.times_ms[rows]
    ledger.fold(events.root_ids[rows], events.vals[rows], events.tasks[rows], times)
