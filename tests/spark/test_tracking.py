"""Groups, owners and edges inside a task."""

from __future__ import annotations

import collections

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore.ids import edge_id
from ackcore.spark.tasks.exchange_format import ReceivedRuns, RootRuns, untracked
from ackcore.spark.tasks.shuffle_writer import draw_edges
from ackcore.spark.tasks.tracking import NONE, AnchoredRows, Chunks, Owners, running_counts

KEY, WAY = 7, "split/default>count"
ROOTS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6, unique=True)


def batch(n):
    return pa.record_batch({"n": list(range(n))})


def a_chunk(chunks, roots):
    vals = np.arange(100, 100 + len(roots))
    return chunks.add(len(roots), lambda: (np.array(roots, np.int64), vals), 0)


def folded(runs):
    """XOR and rows by destination and root; a row with several roots counts for each."""
    found = collections.defaultdict(lambda: [0, 0])
    for dest, part in enumerate(runs):
        offsets = np.arange(len(part.rows) + 1) if part.offsets is None else part.offsets
        for i, rows in enumerate(part.rows.tolist()):
            for at in range(offsets[i], offsets[i + 1]):
                entry = found[dest, int(part.roots[at])]
                entry[0] ^= int(part.vals[at])
                entry[1] += rows
    return dict(found)


@st.composite
def sendings(draw):
    roots = draw(ROOTS)
    owners = draw(st.lists(st.integers(0, len(roots) - 1), max_size=30))
    dests = draw(st.lists(st.integers(0, 3), min_size=len(owners), max_size=len(owners)))
    return roots, np.array(owners, np.int64), np.array(dests, np.int64)


@given(sendings())
def test_the_edges_that_are_sent_are_in_the_totals_of_their_groups(sending):
    roots, owners, dests = sending
    order, counts = np.argsort(dests, kind="stable"), np.bincount(dests, minlength=4)
    chunks = Chunks()
    chunk = a_chunk(chunks, roots)
    rows = AnchoredRows(batch(len(owners)), Owners(owners), None, chunk)
    runs, late = draw_edges(KEY, WAY, rows, order, counts, chunks)
    assert late is None
    assert chunk.ordinals(WAY).tolist() == np.bincount(owners, minlength=len(roots)).tolist()
    totals, (edges, counted, sent) = [0] * len(roots), (collections.Counter() for _ in range(3))
    for owner, dest in zip(owners.tolist(), dests.tolist(), strict=True):
        ordinal = sent[owner]
        edge = edge_id(KEY, roots[owner], WAY, 100 + owner, ordinal)
        sent[owner] += 1
        totals[owner] ^= edge
        edges[dest, roots[owner]] ^= edge
        counted[dest, roots[owner]] += 1
    assert folded(runs) == {each: [edges[each], counted[each]] for each in counted}
    assert chunk.totals.tolist() == totals


@given(sendings())
def test_what_is_sent_late_is_acked_by_itself(sending):
    """The ledger rows of its chunk have left without it."""
    roots, owners, dests = sending
    order, counts = np.argsort(dests, kind="stable"), np.bincount(dests, minlength=4)
    chunks = Chunks()
    chunk = a_chunk(chunks, roots)
    chunk.closed = True
    rows = AnchoredRows(batch(len(owners)), Owners(owners), None, chunk)
    runs, late = draw_edges(KEY, WAY, rows, order, counts, chunks)
    assert not chunk.totals.any()
    owed = collections.Counter()
    for (_, root), (val, _) in folded(runs).items():
        owed[root] ^= val
    acked = {} if late is None else dict(zip(*map(np.ndarray.tolist, late), strict=True))
    assert acked == {root: owed[root] for root in {roots[i] for i in owners.tolist()}}


def test_a_group_never_draws_an_edge_twice():
    """Not by two emissions either, of which one is late."""
    chunks = Chunks()
    chunk = a_chunk(chunks, [5])
    one, seen = np.zeros(1, np.int64), set()
    for turn in range(4):
        chunk.closed = turn > 2
        rows = AnchoredRows(batch(1), Owners(one), None, chunk)
        runs, _ = draw_edges(KEY, WAY, rows, one, np.ones(1, np.int64), chunks)
        seen.update(runs[0].vals.tolist())
    other, _ = draw_edges(KEY, "another way", rows, one, np.ones(1, np.int64), chunks)
    seen.update(other[0].vals.tolist())
    assert len(seen) == 5


def test_a_row_hangs_from_several_groups_of_several_chunks():
    """Each anchor has an edge; those that lead to one root are one val."""
    chunks = Chunks()
    first, second = a_chunk(chunks, [5, 6]), a_chunk(chunks, [6])
    owners = Owners(np.array([0, 2, 1, 1]), np.array([0, 2, 2, 4]))  # 5 and 6; none; 6 twice
    rows = AnchoredRows(batch(3), owners)
    order, counts = np.array([2, 0, 1]), np.array([1, 2])
    (left, right), late = draw_edges(KEY, WAY, rows, order, counts, chunks)
    assert late is None
    assert (left.roots.tolist(), left.offsets.tolist()) == ([6], [0, 1])
    assert (right.roots.tolist(), right.offsets.tolist()) == ([5, 6], [0, 2, 2])
    assert first.totals.tolist() == [right.vals[0], left.vals[0]]
    assert second.totals.tolist() == [right.vals[1]]
    assert 0 not in first.totals


def test_groups_with_several_roots_ack_each_of_them():
    chunks = Chunks()
    runs = RootRuns(
        np.array([1, 1], np.int32),
        np.array([5, 6]),
        np.array([1, 2]),
        np.array([0, 2, 2], np.int32),
    )
    chunk = chunks.add(2, lambda: (runs.roots, runs.vals), 0, runs.offsets)
    rows = AnchoredRows(batch(2), Owners(np.array([0, 1])), None, chunk)
    (sent,), _ = draw_edges(KEY, WAY, rows, np.arange(2), np.array([2]), chunks)
    assert sent.roots.tolist() == [5, 6]
    edge = sent.vals[0]
    assert sent.vals.tolist() == [edge, edge]
    roots, vals = chunk.acks()
    assert (roots.tolist(), vals.tolist()) == ([5, 6], [1 ^ edge, 2 ^ edge])


@pytest.mark.parametrize("wide", [False, True])
def test_runs_are_packed_and_laid_together(wide):
    offsets = np.array([0, 2, 2], np.int32) if wide else None
    runs = RootRuns(
        np.array([3, 1], np.int32), np.array([-1, 2**63 - 1]), np.array([0, 5]), offsets
    )
    none = untracked(4)
    together = ReceivedRuns([part.pack() for part in (runs, none, runs)]).runs
    assert together.rows.tolist() == [3, 1, 4, 3, 1]
    assert together.roots.tolist() == [-1, 2**63 - 1] * 2
    assert together.offsets.tolist() == ([0, 2, 2, 2, 4, 4] if wide else [0, 1, 2, 2, 3, 4])
    assert ReceivedRuns([runs.pack()]).runs.pack() == runs.pack()


@given(st.lists(st.integers(0, 4), max_size=20), st.lists(st.integers(0, 4), max_size=20))
def test_running_counts_go_on_counting(first, second):
    counts = np.zeros(5, np.int64)
    seen = collections.Counter()
    for groups in (first, second):
        expected = []
        for group in groups:
            expected.append(seen[group])
            seen[group] += 1
        assert running_counts(np.array(groups, np.int64), counts).tolist() == expected
    assert counts.tolist() == [seen[group] for group in range(5)]


def test_owners_are_taken_through_anchors():
    """AnchoredRows hang from what their anchors hang from."""
    one = Owners(np.array([7, NONE, 9]))
    assert one.take(np.array([2, 0]), None).ids.tolist() == [9, 7]
    many = one.take(np.array([0, 1, 2]), np.array([0, 2, 2, 3]))
    assert many.pairs()[0].tolist() == [0, 2]
    assert many.pairs()[1].tolist() == [7, 9]
    again = many.take(np.array([2, 0]), None)
    assert (again.ids.tolist(), again.offsets.tolist()) == ([9, 7, NONE], [0, 1, 3])
    joined = many.take(np.array([0, 2, 1]), np.array([0, 2, 3]))
    assert (joined.ids.tolist(), joined.offsets.tolist()) == ([7, NONE, 9], [0, 3, 3])


def test_chunks_that_have_acked_are_forgotten():
    chunks = Chunks()
    first, second = a_chunk(chunks, [1]), a_chunk(chunks, [2])
    first.closed = True
    chunks.forget_closed()
    assert [chunk for chunk, _ in chunks.split(np.array([0, 1]))] == [second]
