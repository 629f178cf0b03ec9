"""Emitted rows get their edges and are cut into runs alike by both backends, and so for ever."""

import subprocess
import sys

import numpy as np
import pytest
from definitions import ANY_BITS, int64s
from hypothesis import given
from hypothesis import strategies as st

from ackcore import _arguments, _reference
from ackcore.ids import edge_id, edge_ids, xor_by_parent


def packed_by_hand(key, component, owners, roots, parents, order, counts, ordinals):
    """Return the rows of pack_runs, one by one, by `ackcore.ids`."""
    upto = dict(enumerate(ordinals))
    edges = []
    for owner in owners:
        edges.append(edge_id(key, roots[owner], component, parents[owner], upto[owner]))
        upto[owner] += 1
    totals = [0] * len(roots)
    for owner, edge in zip(owners, edges, strict=True):
        totals[owner] ^= edge
    runs, run_counts, place = [], [], 0
    for count in counts:
        before, last = len(runs), None
        for row in order[place : place + count]:
            if owners[row] != last:
                last = owners[row]
                runs.append([last, 0, 0])
            runs[-1][1] ^= edges[row]
            runs[-1][2] += 1
        run_counts.append(len(runs) - before)
        place += count
    columns = [list(column) for column in zip(*runs, strict=True)] if runs else [[], [], []]
    return [totals, *columns, run_counts], list(upto.values())


@st.composite
def emissions(draw):
    groups = draw(st.integers(1, 5))
    bits = st.lists(ANY_BITS, min_size=groups, max_size=groups).map(int64s)
    owners = draw(st.lists(st.integers(0, groups - 1), max_size=40))
    if draw(st.booleans()):
        owners.sort()
    to = np.array([draw(st.integers(0, 3)) for _ in owners], np.int64)
    order, counts = np.argsort(to, kind="stable"), np.bincount(to, minlength=4)
    starts = draw(st.lists(st.integers(0, 2**62 - 1), min_size=groups, max_size=groups))
    key, component = draw(ANY_BITS), draw(st.sampled_from(["split", 0, -1, 7]))
    return key, component, int64s(owners), draw(bits), draw(bits), order, counts, int64s(starts)


@given(emissions())
def test_runs_are_those_made_by_hand(native, given):
    key, component, owners, roots, parents, order, counts, starts = given
    lists = [column.tolist() for column in given[2:]]
    wanted, ends = packed_by_hand(key, component, *lists)
    for backend in (native, _reference):
        ordinals = starts.copy()
        found = backend.pack_runs(key, component, owners, roots, parents, order, counts, ordinals)
        assert [column.tolist() for column in found] == wanted
        assert [column.dtype for column in found] == [np.int64] * 3 + [np.int32, np.int64]
        assert ordinals.tolist() == ends
        # Without ordinals, one parent for all, and without an order.
        zeros = [0] * len(roots)
        wanted_plain, _ = packed_by_hand(
            key, component, *lists[:2], zeros, range(len(owners)), [len(owners)], zeros
        )
        found = backend.pack_runs(key, component, owners, roots, 0)
        assert [column.tolist() for column in found] == wanted_plain
        counted = backend.pack_runs(key, component, owners, roots, 0, None, counts)
        wanted_counted, _ = packed_by_hand(
            key, component, *lists[:2], zeros, range(len(owners)), counts.tolist(), zeros
        )
        assert [column.tolist() for column in counted] == wanted_counted


def test_runs_of_a_large_batch(backend):
    """The same as by the bulk functions of `ackcore.ids`; long columns give memory back."""
    rng = np.random.default_rng(7)
    m, g = 200_000, 50_000
    owners = np.sort(rng.integers(0, g, m))
    roots, parents = rng.integers(-(2**63), 2**63 - 1, (2, g))
    of_group = np.bincount(owners, minlength=g)
    ordinals = np.arange(m) - np.repeat(np.cumsum(of_group) - of_group, of_group)
    edges = edge_ids(9, roots[owners], "split", parents[owners], ordinals)
    order, counts = backend.split_by_shard(rng.integers(-(2**63), 2**63 - 1, m), 3)
    totals, groups, vals, lengths, run_counts = backend.pack_runs(
        9, "split", owners, roots, parents, order, counts
    )
    assert totals.tolist() == xor_by_parent(owners, edges, g).tolist()
    assert xor_by_parent(groups, vals, g).tolist() == totals.tolist()
    assert np.repeat(groups, lengths).tolist() == owners[order].tolist()
    assert run_counts.sum() == len(groups) == len(vals) == len(lengths)
    assert np.add.reduceat(lengths, np.cumsum(run_counts) - run_counts).tolist() == counts.tolist()
    totals, groups, vals, lengths, run_counts = backend.pack_runs(
        9, "split", np.zeros(m, np.int64), roots[:1], 0
    )
    assert (groups.tolist(), vals.tolist(), lengths.tolist()) == ([0], totals.tolist(), [m])


def test_edges_of_runs_never_change(backend):
    owners, roots, parents = int64s([0, 1, 0, 0, 1]), int64s([5, -6]), int64s([7, 8])
    order, counts = int64s([0, 2, 4, 1, 3]), int64s([3, 0, 2])
    found = backend.pack_runs(11, "count", owners, roots, parents, order, counts)
    assert [column.tolist() for column in found] == RUNS


def test_no_rows_and_no_groups(backend):
    none = np.empty(0, np.int64)
    for order, counts in ((None, None), (none, int64s([0, 0])), (none, none)):
        found = backend.pack_runs(1, "b", none, none, none, order, counts)
        runs = [0] * (1 if counts is None else len(counts))
        assert [column.tolist() for column in found] == [[], [], [], [], runs]
    totals, *_ = backend.pack_runs(1, "b", none, int64s([1, 2]), 3)
    assert totals.tolist() == [0, 0]


def test_what_runs_refuse(backend):
    owners, roots, parents = int64s([0, 1, 1]), int64s([5, 6]), int64s([7, 8])
    order, counts, ordinals = int64s([0, 1, 2]), int64s([2, 1]), int64s([3, 4])

    def pack(**changes):
        arguments = {"key": 1, "component": "b", "owners": owners, "roots": roots}
        arguments |= {"parent_edges": parents, "order": order, "counts": counts}
        return backend.pack_runs(**arguments | {"ordinals": ordinals} | changes)

    frozen = ordinals.copy()
    frozen.setflags(write=False)
    for changes, error, words in (
        ({"owners": int64s([0, 2, 1])}, ValueError, r"owners must be groups in 0..1, got 2 in row"),
        ({"owners": int64s([0, 1, -1])}, ValueError, r"in 0..1, got -1 in row 2"),
        (
            {"roots": roots[:0], "parent_edges": 0, "ordinals": None},
            ValueError,
            "no groups at all .roots is empty., got 0 in row 0",
        ),
        ({"owners": [0, 1, 1]}, TypeError, "owners must be an array"),
        ({"roots": roots[:1]}, ValueError, "roots has 1 rows and parent_edges has 2"),
        ({"parent_edges": 2**64}, OverflowError, "parent_edges must fit in 64 bits"),
        ({"component": None}, TypeError, "component must be"),
        ({"key": 1.0}, TypeError, "key must be an integer"),
        ({"order": order[:2]}, ValueError, "owners has 3 rows and order has 2"),
        ({"order": int64s([0, 3, 1])}, ValueError, "each of the 3 row numbers once, got 3 at 1"),
        ({"order": int64s([0, 1, -1])}, ValueError, "row numbers once, got -1 at 2"),
        ({"order": int64s([0, 1, 1])}, ValueError, "row numbers once, got one of them twice"),
        ({"counts": int64s([2, 2])}, ValueError, "must add up to the 3 rows of owners, got 4"),
        ({"counts": int64s([4, -1])}, ValueError, "must not be negative, got -1 in row 1"),
        ({"counts": int64s([2**63 - 1] * 2 + [5])}, ValueError, "must add up to the 3 rows"),
        ({"ordinals": ordinals[:1]}, ValueError, "roots has 2 rows and ordinals has 1"),
        ({"ordinals": int64s([0, -1])}, ValueError, "ordinals must be in 0.*, got -1 in row 1"),
        (
            {"ordinals": int64s([2**62, 0])},
            ValueError,
            "ordinals must be in 0..4611686018427387903",
        ),
        ({"ordinals": frozen}, ValueError, "ordinals must be writable"),
    ):
        with pytest.raises(error, match=words):
            pack(**changes)
        assert ordinals.tolist() == [3, 4]
    pack()
    assert ordinals.tolist() == [4, 6]


def test_a_run_s_length_fits(backend, monkeypatch):
    """More rows than an int32 counts cannot be made here; that they are looked for can be seen."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (2**31,), (0,))
    with pytest.raises(ValueError, match="owners must be C-contiguous"):
        backend.pack_runs(1, "b", huge, np.zeros(1, np.int64), 0)
    with pytest.raises(ValueError, match="at most 2147483647 rows, got 2147483648; cut the batch"):
        _arguments.refuse_rows(2**31)


OWNERS_THAT_CHANGE = """
import threading
import numpy as np
from ackcore import _native as native

owners, roots, over = np.zeros(100_000, np.int64), np.array([5]), threading.Event()

def writing():
    while not over.is_set():
        owners[0] = -1
        owners[0] = 0

writer = threading.Thread(target=writing)
writer.start()
try:
    for _ in range(500):
        try:
            _, groups, _, lengths, counts = native.pack_runs(1, "b", owners, roots, 0)
        except ValueError as error:
            assert "got -1 in row 0" in str(error), error
        else:
            assert counts.tolist() == [len(groups)], counts
            assert lengths.sum() == len(owners), lengths
finally:
    over.set()
    writer.join()
"""


def test_owners_that_another_thread_changes_write_nowhere_else(native):
    """No owner is believed to be a group because it was one; apart, as it may crash."""
    command = [sys.executable, "-c", OWNERS_THAT_CHANGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RUNS = [
    [8821865594579280957, -7797347688277033466],
    [0, 1, 1, 0],
    [8721958276971971030, 7127493452000199256, -1070818639672918946, 245181004410660331],
    [2, 1, 1, 1],
    [2, 0, 2],
]
