"""Rows are dealt out to shards alike by both backends, evenly, and the same way for ever."""

from __future__ import annotations

import numpy as np
import pytest

from ackcore import _reference
from ackcore.ids import acker_task

RNG = np.random.default_rng(3)
PATTERNS = {
    "random": RNG.integers(-(2**63), 2**63 - 1, 20_000),
    "sequential": np.arange(20_000),
    "high bits": np.arange(20_000) << 44,
    "low and high": np.arange(20_000) * (2**32 + 1),
    "empty": np.empty(0, np.int64),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("n", [1, 2, 7, 200])
def test_every_row_goes_to_one_shard(backend, name, n):
    roots = PATTERNS[name]
    order, counts = backend.split_by_shard(roots, n)
    assert order.dtype == counts.dtype == np.int64
    assert len(counts) == n
    assert sorted(order.tolist()) == list(range(len(roots)))
    shard = np.repeat(np.arange(n), counts)
    of_root = dict(zip(roots[order].tolist(), shard.tolist(), strict=True))
    again, _ = backend.split_by_shard(roots[::-1].copy(), n)
    assert [of_root[root] for root in roots[::-1][again].tolist()] == shard.tolist()
    for start, count in zip(np.cumsum(counts) - counts, counts, strict=True):
        assert (np.diff(order[start : start + count]) > 0).all()
    if len(roots):
        # Each shard's share, within six standard deviations.
        assert abs(counts - len(roots) / n).max() < 6 * (len(roots) / n) ** 0.5 + 1


@pytest.mark.parametrize("name", ["split_by_shard", "sort_by_shard"])
def test_backends_agree(native, name):
    for roots in (*PATTERNS.values(), RNG.integers(0, 9, 5000)):
        for n in (1, 3, 1000, 2**20):
            ours, twins = (getattr(each, name)(roots, n) for each in (native, _reference))
            for one, other in zip(ours, twins, strict=True):
                assert one.tolist() == other.tolist()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("n", [1, 7, 200])
def test_rows_are_sorted_by_shard_whatever_order_they_came_in(backend, name, n):
    """A table's order is that of its processor: none of it may be left."""
    roots = PATTERNS[name]
    order, counts = backend.sort_by_shard(roots, n)
    assert order.dtype == counts.dtype == np.int64
    split, of_shard = _reference.split_by_shard(roots, n)
    assert counts.tolist() == of_shard.tolist()
    for start, count in zip(np.cumsum(counts) - counts, counts, strict=True):
        there = slice(start, start + count)
        assert sorted(order[there].tolist()) == split[there].tolist()
    mixed = RNG.permutation(roots)
    assert mixed[backend.sort_by_shard(mixed, n)[0]].tolist() == roots[order].tolist()
    assert backend.sort_by_shard(roots, 1)[0].tolist() == order.tolist()


@pytest.mark.parametrize("rows", [1, 2, 64, 65, 66, 1000])
def test_rows_of_one_root_stay_in_order(backend, rows):
    """However many there are: a heap sorts them where insertion would take its time squared."""
    roots = np.full(rows, 42)
    assert backend.sort_by_shard(roots, 3)[0].tolist() == list(range(rows))
    roots = np.concatenate([roots, [7], roots])
    order, _ = backend.sort_by_shard(roots, 1)
    places = order[roots[order] == 42].tolist()
    assert places == sorted(places)


def test_shards_never_change(backend):
    """Computed with plain Python integers: the next version finds a root where this one put it."""
    mask = 2**64 - 1

    def shard(root, n):
        x = root & mask
        x ^= x >> 32
        x = x * 0x0E9846AF9B1A615D & mask
        x ^= x >> 32
        x = x * 0x0E9846AF9B1A615D & mask
        x ^= x >> 28
        return ((x >> 32) * n) >> 32

    for root in (0, 1, -1, 42, 2**63 - 1, -(2**63), 0x0123456789ABCDEF):
        for n in (1, 2, 10, 997):
            _, counts = backend.split_by_shard(np.array([root]), n)
            assert counts.argmax() == shard(root, n)
    assert backend.split_by_shard(np.arange(10), 4)[0].tolist() == [0, 1, 4, 7, 8, 2, 5, 3, 6, 9]


def test_shards_are_independent_of_acker_tasks(backend):
    roots = PATTERNS["random"]
    roots = roots[acker_task(roots, 4) == 1]
    _, counts = backend.split_by_shard(roots, 4)
    assert abs(counts - len(roots) / 4).max() < 6 * (len(roots) / 4) ** 0.5


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("n", [1, 2, 7, 20_000])
@pytest.mark.parametrize("timed", [False, True])
def test_a_shard_is_taken_out_of_the_columns(backend, name, n, timed):
    roots = PATTERNS[name]
    vals, tasks = roots * 3 + 1, (roots % 5 - 1).astype(np.int32)
    times = roots ^ 7 if timed else None
    order, counts = _reference.split_by_shard(roots, n)
    for shard in {0, n // 2, n - 1}:
        start = counts[:shard].sum()
        mine = order[start : start + counts[shard]]
        taken = backend.take_shard(roots, vals.view(np.uint64), tasks, times, shard, n)
        wanted = (roots, vals, tasks, times)
        for column, whole in zip(taken, wanted, strict=True):
            if whole is None:
                assert column is None
                continue
            assert column.dtype == whole.dtype
            assert column.flags.c_contiguous
            np.testing.assert_array_equal(column, whole[mine])


def test_no_other_shard_is_taken(backend):
    roots, tasks = np.arange(5), np.zeros(5, np.int32)
    for shard in (-1, 3):
        with pytest.raises(ValueError, match=rf"shard must be in 0\.\.2, got {shard}"):
            backend.take_shard(roots, roots, tasks, None, shard, 3)
    with pytest.raises(ValueError, match=r"n must be in 1\.\.1048576, got 0"):
        backend.take_shard(roots, roots, tasks, None, 0, 0)
    for columns, words in [
        ((roots, roots[:4], tasks, None), "root_ids has 5 rows and vals has 4"),
        ((roots, roots, tasks[:4], None), "root_ids has 5 rows and tasks has 4"),
        ((roots, roots, tasks, roots[:4]), "root_ids has 5 rows and times_ms has 4"),
    ]:
        with pytest.raises(ValueError, match=words):
            backend.take_shard(*columns, 0, 3)
    with pytest.raises(TypeError, match="tasks"):
        backend.take_shard(roots, roots, roots, None, 0, 3)
    with pytest.raises(TypeError, match="times_ms"):
        backend.take_shard(roots, roots, tasks, [1] * 5, 0, 3)


@pytest.mark.parametrize("name", ["split_by_shard", "sort_by_shard"])
def test_what_is_refused(backend, name):
    split_by_shard = getattr(backend, name)
    roots = np.arange(5)
    with pytest.raises(TypeError, match="root_ids"):
        split_by_shard([1, 2], 3)
    with pytest.raises(ValueError, match="root_ids"):
        split_by_shard(roots[::2], 3)
    for n in (0, -1, 2**20 + 1):
        with pytest.raises(ValueError, match=f"n must be in 1..1048576, got {n}"):
            split_by_shard(roots, n)
    with pytest.raises(TypeError, match="n must be an integer"):
        split_by_shard(roots, 1.5)
