"""Sends rows to tasks of later stages, chosen by grouping, and draws the rows' edge ids.

An edge is drawn for each blob of rows and each cohort in it (`Cohorts`).  If each root is settled
by itself, an edge is drawn for each pair of a row and an input of the task, or a group of inputs,
that the row is anchored to (`tracking`).  The edges of a row that have one root are folded into one
value.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.record_batches import bytes_before, offsets_of, take_rows
from ackcore._backend import split_by_shard
from ackcore._records import Int64s
from ackcore.ids import edge_ids
from ackcore.spark.base.root_ids import distinct
from ackcore.spark.tasks.exchange import Outbox
from ackcore.spark.tasks.exchange_format import CohortRuns, PlacedRuns, RootRuns, untracked
from ackcore.spark.tasks.ledger_rows import LedgerRows
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.tracking import NONE, AnchoredRows, Chunk, Chunks, folded, running_counts
from ackcore.topology.stage_layout import Subscription
from ackcore.topology.tuples import Reason

#: The most bytes of one tuple that is sent to another task.  A shuffle row is one JVM array, which
#: has at most 2 GiB, and Spark builds it in another array of twice its size.
MOST_ROW_BYTES = 1 << 30
#: Three columns without rows.
_NONE: tuple[Int64s, Int64s, Int64s] = (np.empty(0, np.int64),) * 3


@dataclass(eq=False, repr=False)
class ShuffleWriter:
    """A sender of one task's rows to later stages, by the groupings of their subscriptions.

    ``partition``: the task's partition, where its round-robin begins. ``ledger_rows``: the
    collector of acks of closed chunks, and of failures of rows that are too large.
    """

    _spec: TaskSpec
    _partition: int
    _chunks: Chunks
    _outbox: Outbox
    _ledger_rows: LedgerRows
    _turn: Counter[int] = field(default_factory=Counter)

    def send(self, sub: Subscription, rows: AnchoredRows) -> None:
        """Send rows to tasks of the subscription's bolt; fail a row of over `MOST_ROW_BYTES`."""
        batch = rows.batch
        size = bytes_before(batch, len(batch))
        if size > MOST_ROW_BYTES:  # a single row: larger batches were cut before
            text = (
                f"a tuple for {sub.target} has {size} bytes, and no more than {MOST_ROW_BYTES} "
                "cross a shuffle; emit a path or a key in place of large values"
            )
            self._ledger_rows.fail(
                rows.owners, [Reason(sub.source, "TupleTooLarge", text)], sub.source
            )
            return
        if sub.target in self._spec.layout.needs_identity:
            assert rows.identity is not None
            columns = [*batch.columns, rows.identity.message_ids]
            columns += [pa.array(rows.identity.attempts), pa.array(rows.identity.stable_ids)]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._spec.tuple_schema(sub))
        way = f"{sub.source}/{sub.stream}>{sub.target}"
        tasks = self._spec.tasks_behind(sub)
        if sub.grouping.name == "all":
            order = np.arange(len(rows))
            for dest in range(tasks):
                counts = np.zeros(self._spec.dests, np.int64)
                counts[dest] = len(rows)
                self._send_grouped(sub, f"{way}#{dest}", rows, batch, order, counts)
            return
        order, counts = self._group(sub, rows.batch, tasks)
        if tasks < self._spec.dests:
            counts = np.concatenate([counts, np.zeros(self._spec.dests - tasks, np.int64)])
        if counts.max() < len(rows):
            batch = take_rows(batch, order)
        self._send_grouped(sub, way, rows, batch, order, counts)

    def _send_grouped(
        self,
        sub: Subscription,
        way: str,
        rows: AnchoredRows,
        batch: pa.RecordBatch,
        order: Int64s,
        counts: Int64s,
    ) -> None:
        if not _have_roots(rows):
            runs: Sequence[RootRuns | CohortRuns] = [untracked(n) for n in counts.tolist()]
            late = None
        else:
            draw = draw_edges if self._spec.by_root else draw_cohort_edges
            runs, late = draw(self._spec.key, way, rows, order, counts, self._chunks)
        if late is not None:
            self._ledger_rows.ack(*late)
        self._outbox.send_tuples(sub.index, sub.level_to, batch, counts, runs)

    def _group(self, sub: Subscription, batch: pa.RecordBatch, tasks: int) -> tuple[Int64s, Int64s]:
        """Return the row numbers sorted by destination, and each destination's number of rows."""
        n = len(batch)
        grouping = sub.grouping
        if grouping.keys:
            hashes = hash_columns([batch.column(name) for name in grouping.keys], n)
            if grouping.name == "fields":
                return split_by_shard(hashes, tasks)
            # A key's rows alternate between two destinations; the key decides which is first.
            other = edge_ids(0, hashes, "partial_key", 0, 0)
            _, numbers = np.unique(hashes, return_inverse=True)
            counts = np.zeros(int(numbers.max()) + 1, np.int64)
            odd = running_counts(numbers.astype(np.int64), counts) & 1
            return split_by_shard(np.where(odd == 1, other, hashes), tasks)
        if grouping.name == "global":
            dest = 0
        elif sub.spreads:
            # Shuffle: round-robin, and tasks begin with different destinations.
            start = self._turn[sub.index]
            self._turn[sub.index] += n
            dests = (np.arange(n) + start + self._partition) % tasks
            return np.argsort(dests, kind="stable"), np.bincount(dests, minlength=tasks)
        else:
            dest = self._partition % tasks
        counts = np.zeros(tasks, np.int64)
        counts[dest] = n
        return np.arange(n), counts


def _have_roots(rows: AnchoredRows) -> bool:
    """Return False if no row has a group, or if all are in one chunk of untracked rows."""
    if rows.only_chunk is None:
        return bool((rows.owners.ids != NONE).any())
    cohorts = rows.only_chunk.cohorts
    return cohorts is None or len(cohorts.ids) > 0


def draw_edges(
    key: int, way: str, rows: AnchoredRows, order: Int64s, counts: Int64s, chunks: Chunks
) -> tuple[list[RootRuns], tuple[Int64s, Int64s] | None]:
    """Draw an edge for each pair of row and group, and fold the edges by row and root.

    ``key``: the key of the micro-batch. ``way``: the emitter, stream and receiver, a part of the
    edge ids. ``rows``: the rows to send. ``order``, ``counts``: the row numbers by destination and
    their counts, as `ackcore._backend.split_by_shard` returns them. ``chunks``: the chunks of the
    task.

    Returns the roots and edges of the rows for each destination; and the roots and edges that must
    be acked separately, because their chunks are closed, or None. Edges of open chunks are XORed
    into the totals of these chunks.
    """
    of_row, of_group = rows.owners.pairs()
    found = [_NONE]  # row, root, edge
    late: list[tuple[Int64s, Int64s]] = []
    for chunk, places in chunks.split(of_group):
        local = of_group[places] - chunk.first
        roots, vals = chunk.heads()
        ordinals = running_counts(local, chunk.ordinals(way))
        drawn = edge_ids(key, roots[local], way, vals[local], ordinals)
        totals = np.zeros(chunk.groups, np.int64)
        np.bitwise_xor.at(totals, local, drawn)
        if chunk.closed:
            groups = distinct(local)
            of, at = chunk.entries_of(groups)
            late.append((chunk.roots[at], totals[groups][of]))
        else:
            np.bitwise_xor(chunk.totals, totals, out=chunk.totals)
        of, at = chunk.entries_of(local)
        found.append((of_row[places][of], chunk.roots[at], drawn[of]))
    return _runs_by_row(found, order, counts), _joined(late)


def draw_cohort_edges(
    key: int, way: str, rows: AnchoredRows, order: Int64s, counts: Int64s, chunks: Chunks
) -> tuple[list[CohortRuns], tuple[Int64s, Int64s] | None]:
    """Draw an edge for each pair of a destination and a cohort that it gets rows of.

    The arguments are those of `draw_edges`. Returns, for each destination, its cohorts with their
    edges, and the roots of its rows; and the cohorts and edges that must be acked separately,
    because their chunks are closed, or None. Edges of open chunks are XORed into their cohorts'
    acks, and the groups that they send are added to `Chunk.sent_groups`.
    """
    chunk = rows.only_chunk
    if chunk is not None and chunk.offsets is None and not chunk.closed:
        cohorts = chunk.cohorts
        assert cohorts is not None
        groups, lengths, ends = _cut_runs(rows.owners.ids, order, counts)
        groups -= chunk.first
        chunk.sent_groups.append(groups)
        dests = np.repeat(np.arange(len(counts)), np.diff(ends))
        if len(cohorts.ids) == 1:
            blobs = np.flatnonzero(counts), np.zeros(np.count_nonzero(counts), np.int64)
        else:
            blobs = _distinct(dests, cohorts.indexes(chunk.vals[groups]), len(cohorts.ids))
        edges = _cohort_edges(key, way, chunk, *blobs, len(counts))
        found = []
        places = cohorts.places
        bounds = _bounds(blobs[0], len(counts))
        for (a, b), here in zip(itertools.pairwise(ends.tolist()), bounds, strict=True):
            runs: RootRuns | PlacedRuns
            if places is None:
                some = groups[a:b]
                runs = RootRuns(lengths[a:b].astype(np.int32), chunk.roots[some], chunk.vals[some])
            else:
                runs = PlacedRuns(lengths[a:b], groups[a:b], places)
            found.append(CohortRuns(cohorts.ids[blobs[1][here]], edges[here], runs))
        return found, None
    return _draw_any_cohorts(key, way, rows, order, counts, chunks)


def _draw_any_cohorts(
    key: int, way: str, rows: AnchoredRows, order: Int64s, counts: Int64s, chunks: Chunks
) -> tuple[list[CohortRuns], tuple[Int64s, Int64s] | None]:
    """Draw edges as `draw_cohort_edges` does, for rows with several groups or several chunks."""
    of_row, of_group = rows.owners.pairs()
    dest_of = np.empty(len(order), np.int64)
    dest_of[order] = np.repeat(np.arange(len(counts)), counts)
    found = [_NONE]  # row, root, cohort
    drawn = [_NONE]  # destination, cohort, edge
    late: list[tuple[Int64s, Int64s]] = []
    for chunk, places in chunks.split(of_group):
        cohorts = chunk.cohorts
        assert cohorts is not None
        groups = of_group[places] - chunk.first
        if not chunk.closed:
            chunk.sent_groups.append(groups)
        of, at = chunk.entries_of(groups)
        row, of_each = of_row[places][of], chunk.vals[at]
        found.append((row, chunk.roots[at], of_each))
        dests, which = _distinct(dest_of[row], cohorts.indexes(of_each), len(cohorts.ids))
        edges = _cohort_edges(key, way, chunk, dests, which, len(counts))
        drawn.append((dests, cohorts.ids[which], edges))
        if chunk.closed:
            late.append((cohorts.ids[which], edges))
    to, of_blobs, edges = (np.concatenate(column) for column in zip(*drawn, strict=True))
    to, ids, edges = folded(to, of_blobs, edges, np.bitwise_xor)
    parts = _runs_by_row(found, order, counts, np.minimum)
    bounds = _bounds(to, len(counts))
    runs = [
        CohortRuns(ids[here], edges[here], part) for here, part in zip(bounds, parts, strict=True)
    ]
    return runs, _joined(late)


def _joined(late: list[tuple[Int64s, Int64s]]) -> tuple[Int64s, Int64s] | None:
    """Return the ids and edges of all closed chunks as two columns; None if there are none."""
    if not late:
        return None
    return np.concatenate([ids for ids, _ in late]), np.concatenate([vals for _, vals in late])


def _cohort_edges(
    key: int, way: str, chunk: Chunk, dests: Int64s, which: Int64s, all_dests: int
) -> Int64s:
    """Draw an edge for each destination and cohort; XOR it into an open chunk's acks."""
    cohorts = chunk.cohorts
    assert cohorts is not None
    edges = cohorts.draw(key, way, which, dests, all_dests)
    if not chunk.closed:
        cohorts.add(which, edges)
    return edges


def _distinct(dests: Int64s, which: Int64s, n: int) -> tuple[Int64s, Int64s]:
    """Return each pair of a destination and a number below ``n`` once, sorted."""
    pairs = dests * n + which
    if len(pairs) and int(pairs.max()) < 8 * len(pairs):
        pairs = np.flatnonzero(np.bincount(pairs))
    else:  # a table of counts would be larger than the rows
        pairs = distinct(pairs)
    return np.divmod(pairs, n) if len(pairs) else (pairs, pairs)


def _bounds(dests: Int64s, all_dests: int) -> list[slice]:
    """Return, for each of all destinations, its slice of a sorted column of destinations."""
    ends = np.searchsorted(dests, np.arange(all_dests + 1)).tolist()
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def _cut_runs(owners: Int64s, order: Int64s, counts: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Cut rows into runs: longest sequences of rows of one owner for one destination.

    Returns the owner and the length of each run; and, for each destination, the index of its first
    run, with the number of runs at the end.
    """
    ordered, ends = owners[order], offsets_of(counts)
    new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    starts = ends[:-1]
    new[starts[starts < len(ordered)]] = True
    firsts = np.flatnonzero(new)
    lengths = np.diff(firsts, append=len(ordered))
    return ordered[firsts], lengths, np.searchsorted(firsts, ends)


def _runs_by_row(
    found: list[tuple[Int64s, Int64s, Int64s]],
    order: Int64s,
    counts: Int64s,
    fold: np.ufunc = np.bitwise_xor,
) -> list[RootRuns]:
    """Return runs of one row each by destination; fold the vals of a row's equal roots into one.

    ``found``: rows, their roots and their vals, in parts; at least one.
    """
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rows, roots, vals = (np.concatenate(column) for column in zip(*found, strict=True))
    rows, roots, vals = folded(place[rows], roots, vals, fold)
    offsets = offsets_of(np.bincount(rows, minlength=len(order))).astype(np.int32)
    runs, start = [], 0
    for count in counts.tolist():
        bounds = offsets[start : start + count + 1]
        a, b = int(bounds[0]), int(bounds[-1])
        runs.append(RootRuns(np.ones(count, np.int32), roots[a:b], vals[a:b], bounds - bounds[0]))
        start += count
    return runs
