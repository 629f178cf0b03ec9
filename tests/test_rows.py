"""Rows are hashed, cut into runs and fingerprinted alike by both backends, and so for ever."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import _reference, _row_parts, _shuffle, edge_id, edge_ids, xor_by_parent

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
VALUE = 0x2545F4914F6CDD1D
NO_VALUE = 0x6A09E667F3BCC909
ANY_BITS = st.integers(-(2**63), 2**64 - 1)


@pytest.fixture(params=["native", "reference"])
def rows(request):
    return request.getfixturevalue("native") if request.param == "native" else _reference


# The definitions once more, in plain integers: what the twins must equal.


def mix(x):
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def signed(x):
    return (x & MASK) - ((x & 1 << 63) << 1)


def words_of(data):
    return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]


def fold(h, value_hash):
    return ((h ^ h >> 32) * 0xD1342543DE82EF95 + value_hash) & MASK


def hash_of_number(data):
    if len(data) <= 8:
        return mix(int.from_bytes(data, "little", signed=True) & MASK ^ VALUE)
    x = VALUE
    for word in words_of(data):
        x = mix(x ^ word)
    return x


def hash_of_bytes(data):
    x = (VALUE + GOLDEN * (len(data) + 1)) & MASK
    for word in words_of(data) or [0]:
        x = mix(x ^ word)
    return x


def fingerprint_of(data, seed):
    key = mix((seed ^ 0x3C6EF372FE94F82B) & MASK)
    words = enumerate(words_of(data))
    total = sum(mix(word ^ (key + place * GOLDEN) & MASK) for place, word in words) & MASK
    return signed(mix((mix(total ^ key) + len(data) * GOLDEN) & MASK))


def int64s(items):
    return np.array([signed(item & MASK) for item in items], np.int64)


def hashes_of(items, n=None):
    return np.full(n, items, np.int64) if n is not None else int64s(items)


def lay_out(strings, dtype, before=b"", after=b""):
    ends = np.cumsum([len(before), *map(len, strings)])
    return ends.astype(dtype), before + b"".join(strings) + after


# ---- hashes


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16, 32])
def test_numbers_are_hashed_as_defined(rows, width):
    rng = np.random.default_rng(width)
    items = [b"\0" * width, b"\xff" * width, b"\x80" * width, *(rng.bytes(width) for _ in range(9))]
    start = int64s(rng.integers(0, 2**63, len(items)).tolist())
    start[0] = 0
    wanted = [fold(int(h) & MASK, hash_of_number(x)) for h, x in zip(start, items, strict=True)]
    hashes = start.copy()
    assert rows.hash_fixed(hashes, b"".join(items), width) is None
    assert hashes.tolist() == int64s(wanted).tolist()
    valid = rng.random(len(items)) < 0.5
    for kind in (valid, valid.view(np.uint8), valid * np.uint8(255)):
        hashes = start.view(np.uint64).copy()
        rows.hash_fixed(hashes, b"".join(items), width, kind)
        expected = [
            w if ok else fold(int(h) & MASK, NO_VALUE)
            for h, w, ok in zip(start, wanted, valid, strict=True)
        ]
        assert hashes.tolist() == expected


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strings_are_hashed_as_defined(rows, dtype):
    rng = np.random.default_rng(5)
    # Every length around the words' edges, at every distance from the end of the buffer.
    strings = [rng.bytes(n) for n in [*range(26), 100, *range(18, -1, -1)]]
    wanted = int64s([hash_of_bytes(s) for s in strings]).tolist()
    for before, after in ((b"", b""), (b"xyz", b"12345678"), (b"", b"1")):
        offsets, data = lay_out(strings, dtype, before, after)
        hashes = np.zeros(len(strings), np.int64)
        assert rows.hash_binary(hashes, offsets, data) is None
        assert hashes.tolist() == wanted
    valid = rng.random(len(strings)) < 0.5
    start = rng.integers(-(2**63), 2**63 - 1, len(strings))
    hashes = start.copy()
    rows.hash_binary(hashes, offsets, data, valid)
    assert hashes.tolist() == [
        signed(fold(int(h) & MASK, (w & MASK) if ok else NO_VALUE))
        for h, w, ok in zip(start, wanted, valid, strict=True)
    ]


@pytest.mark.parametrize("strings", [[b""], [b"a"], [b"abcdefg"], [b"abcdefgh"], [b"x" * 17]])
def test_strings_that_fill_the_buffer_are_not_read_beyond(rows, strings):
    """The bytes behind are another object's; `make sanitize` sees a read of them."""
    offsets, data = lay_out(strings, np.int32)
    hashes = np.zeros(1, np.int64)
    rows.hash_binary(hashes, offsets, np.frombuffer(data, np.uint8).copy())
    assert hashes.tolist() == [signed(hash_of_bytes(strings[0]))]


def test_hashes_never_change(rows):
    """Vectors, worked out once: shuffles and checkpoints rely on them."""
    hashes = np.zeros(4, np.int64)
    rows.hash_fixed(hashes, np.array([0, 1, -1, 42]), 8)
    assert hashes.tolist() == NUMBERS
    rows.hash_fixed(hashes, np.array([0, 1, -1, 42], np.int8), 1, np.array([1, 0, 1, 0], np.bool_))
    assert hashes.tolist() == NUMBERS_TWICE
    rows.hash_binary(hashes, *lay_out([b"", b"a", b"acknowledge", "é".encode()], np.int32))
    assert hashes.tolist() == AND_STRINGS


def test_a_number_hashes_alike_in_each_width(rows):
    numbers = np.array([-128, -1, 0, 5, 127])
    found = set()
    for width in (1, 2, 4, 8):
        hashes = np.zeros(5, np.int64)
        rows.hash_fixed(hashes, numbers.astype(f"i{width}"), width)
        found.add(tuple(hashes.tolist()))
    assert len(found) == 1


def test_numbers_may_start_anywhere(rows):
    for width in (2, 4, 8, 16, 32):
        data = np.arange(5 * width + 1, dtype=np.uint8)
        hashes, aligned = np.zeros(5, np.int64), np.zeros(5, np.int64)
        rows.hash_fixed(hashes, data[1:], width)
        rows.hash_fixed(aligned, data[1:].copy(), width)
        assert hashes.tolist() == aligned.tolist()


def test_the_order_of_columns_and_where_they_end_matter(rows):
    def of(*columns):
        hashes = np.zeros(1, np.int64)
        for column in columns:
            rows.hash_binary(hashes, *lay_out([column], np.int64))
        return int(hashes[0])

    seen = [of(b"ab", b"c"), of(b"a", b"bc"), of(b"c", b"ab"), of(b"abc"), of(b"abc", b"")]
    seen += [of(b"abc\0"), of(b"", b"abc"), of(b"", b""), of(b""), of(b"\0")]
    assert len(set(seen)) == len(seen)


def test_hashes_spread(rows):
    """Neighbours differ in half of the bits, and no two of many keys meet."""
    n = 50_000
    hashes = np.zeros(n, np.int64)
    rows.hash_fixed(hashes, np.arange(n), 8)
    assert len(set(hashes.tolist())) == n
    bits = np.unpackbits((hashes[1:] ^ hashes[:-1]).view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.005
    pairs = np.zeros(n, np.int64)
    for _ in range(2):  # both columns the same: they must not cancel
        rows.hash_fixed(pairs, np.arange(n), 8)
    assert len(set(pairs.tolist())) == n
    assert abs(np.unpackbits(pairs.view(np.uint8)).mean() - 0.5) < 0.005


@given(st.data())
def test_backends_hash_alike(native, data):
    n = data.draw(st.integers(0, 20))
    start = int64s(data.draw(st.lists(ANY_BITS, min_size=n, max_size=n)))
    nulls = st.none() | st.lists(st.booleans(), min_size=n, max_size=n).map(
        lambda items: np.array(items, np.bool_)
    )
    ours, twins = start.copy(), start.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        valid = data.draw(nulls)
        if data.draw(st.booleans()):
            width = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
            memory = data.draw(st.binary(min_size=n * width, max_size=n * width))
            native.hash_fixed(ours, memory, width, valid)
            _reference.hash_fixed(twins, memory, width, valid)
        else:
            strings = data.draw(st.lists(st.binary(max_size=30), min_size=n, max_size=n))
            dtype = data.draw(st.sampled_from([np.int32, np.int64]))
            offsets, memory = lay_out(strings, dtype, after=data.draw(st.binary(max_size=9)))
            native.hash_binary(ours, offsets, memory, valid)
            _reference.hash_binary(twins, offsets, memory, valid)
        assert ours.tolist() == twins.tolist()


def test_what_hashes_refuse(rows):
    hashes = np.zeros(3, np.int64)
    fixed = np.arange(3)
    with pytest.raises(TypeError, match="hashes must be an array"):
        rows.hash_fixed([0, 0, 0], fixed, 8)
    frozen = np.zeros(3, np.int64)
    frozen.setflags(write=False)
    with pytest.raises(ValueError, match="hashes must be writable"):
        rows.hash_fixed(frozen, fixed, 8)
    for width in (3, 64):
        with pytest.raises(ValueError, match=f"width must be one of 1, .*, 32 bytes, got {width}"):
            rows.hash_fixed(hashes, fixed, width)
    with pytest.raises(ValueError, match="width must be in 1"):
        rows.hash_fixed(hashes, fixed, 0)
    with pytest.raises(TypeError, match="width must be an integer"):
        rows.hash_fixed(hashes, fixed, 8.0)
    with pytest.raises(ValueError, match="must have 12 bytes for 3 rows of width 4, got 24"):
        rows.hash_fixed(hashes, fixed, 4)
    with pytest.raises(TypeError, match="data must be bytes or another buffer, got list"):
        rows.hash_fixed(hashes, [1, 2, 3], 8)
    with pytest.raises(TypeError, match="data must be bytes or another buffer, got ndarray"):
        rows.hash_fixed(hashes, fixed.view("M8[s]"), 8)
    with pytest.raises(ValueError, match="data must be C-contiguous"):
        rows.hash_fixed(hashes, np.arange(6)[::2], 8)
    with pytest.raises(ValueError, match="hashes has 3 rows and valid has 2"):
        rows.hash_fixed(hashes, fixed, 8, np.ones(2, np.bool_))
    with pytest.raises(TypeError, match="valid must hold 8-bit"):
        rows.hash_binary(hashes, np.zeros(4, np.int32), b"", np.ones(3))
    with pytest.raises(TypeError, match="offsets must be a numpy array of int32 or int64, got ui"):
        rows.hash_binary(hashes, np.zeros(4, np.uint32), b"")
    with pytest.raises(TypeError, match="offsets must be a numpy array of int32 or int64, got lis"):
        rows.hash_binary(hashes, [0, 0, 0, 0], b"")
    with pytest.raises(ValueError, match="offsets must be one-dimensional"):
        rows.hash_binary(hashes, np.zeros(8, np.int32)[::2], b"")
    with pytest.raises(ValueError, match="one item more than the 3 rows of hashes, got 3"):
        rows.hash_binary(hashes, np.zeros(3, np.int32), b"")
    for dtype in (np.int32, np.int64):
        for offsets, row in (
            ([0, 1, 5, 3], r"1..5 in row 1"),
            ([-1, 0, 1, 2], "-1..0 in row 0"),
            ([0, 1, 2, 5], r"2..5 in row 2"),
            ([2, 1, 1, 1], r"2..1 in row 0"),
            ([9, 9, 9, 9], r"9..9 in row 0"),
        ):
            with pytest.raises(ValueError, match=f"within the 4 bytes of data, got {row}"):
                rows.hash_binary(hashes, np.array(offsets, dtype), b"abcd")
    assert hashes.tolist() == [0, 0, 0]


# ---- runs


def packed_by_hand(key, component, owners, roots, parents, order, counts, ordinals):
    """What pack_runs gives, row by row, from `ackcore.ids`."""
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
    for rows in (native, _reference):
        ordinals = starts.copy()
        found = rows.pack_runs(key, component, owners, roots, parents, order, counts, ordinals)
        assert [column.tolist() for column in found] == wanted
        assert [column.dtype for column in found] == [np.int64] * 3 + [np.int32, np.int64]
        assert ordinals.tolist() == ends
        # Without ordinals, one parent for all, and without an order.
        zeros = [0] * len(roots)
        wanted_plain, _ = packed_by_hand(
            key, component, *lists[:2], zeros, range(len(owners)), [len(owners)], zeros
        )
        found = rows.pack_runs(key, component, owners, roots, 0)
        assert [column.tolist() for column in found] == wanted_plain
        counted = rows.pack_runs(key, component, owners, roots, 0, None, counts)
        wanted_counted, _ = packed_by_hand(
            key, component, *lists[:2], zeros, range(len(owners)), counts.tolist(), zeros
        )
        assert [column.tolist() for column in counted] == wanted_counted


def test_runs_of_a_large_batch(rows):
    """The same as by the bulk functions of `ackcore.ids`; long columns give memory back."""
    rng = np.random.default_rng(7)
    m, g = 200_000, 50_000
    owners = np.sort(rng.integers(0, g, m))
    roots, parents = rng.integers(-(2**63), 2**63 - 1, (2, g))
    of_group = np.bincount(owners, minlength=g)
    ordinals = np.arange(m) - np.repeat(np.cumsum(of_group) - of_group, of_group)
    edges = edge_ids(9, roots[owners], "split", parents[owners], ordinals)
    order, counts = rows.split_by_shard(rng.integers(-(2**63), 2**63 - 1, m), 3)
    totals, groups, vals, lengths, run_counts = rows.pack_runs(
        9, "split", owners, roots, parents, order, counts
    )
    assert totals.tolist() == xor_by_parent(owners, edges, g).tolist()
    assert xor_by_parent(groups, vals, g).tolist() == totals.tolist()
    assert np.repeat(groups, lengths).tolist() == owners[order].tolist()
    assert run_counts.sum() == len(groups) == len(vals) == len(lengths)
    assert np.add.reduceat(lengths, np.cumsum(run_counts) - run_counts).tolist() == counts.tolist()
    totals, groups, vals, lengths, run_counts = rows.pack_runs(
        9, "split", np.zeros(m, np.int64), roots[:1], 0
    )
    assert (groups.tolist(), vals.tolist(), lengths.tolist()) == ([0], totals.tolist(), [m])


def test_edges_of_runs_never_change(rows):
    owners, roots, parents = int64s([0, 1, 0, 0, 1]), int64s([5, -6]), int64s([7, 8])
    order, counts = int64s([0, 2, 4, 1, 3]), int64s([3, 0, 2])
    found = rows.pack_runs(11, "count", owners, roots, parents, order, counts)
    assert [column.tolist() for column in found] == RUNS


def test_no_rows_and_no_groups(rows):
    none = np.empty(0, np.int64)
    for order, counts in ((None, None), (none, int64s([0, 0])), (none, none)):
        found = rows.pack_runs(1, "b", none, none, none, order, counts)
        runs = [0] * (1 if counts is None else len(counts))
        assert [column.tolist() for column in found] == [[], [], [], [], runs]
    totals, *_ = rows.pack_runs(1, "b", none, int64s([1, 2]), 3)
    assert totals.tolist() == [0, 0]


def test_what_runs_refuse(rows):
    owners, roots, parents = int64s([0, 1, 1]), int64s([5, 6]), int64s([7, 8])
    order, counts, ordinals = int64s([0, 1, 2]), int64s([2, 1]), int64s([3, 4])

    def pack(**changes):
        arguments = {"key": 1, "component": "b", "owners": owners, "roots": roots}
        arguments |= {"parent_edges": parents, "order": order, "counts": counts}
        return rows.pack_runs(**arguments | {"ordinals": ordinals} | changes)

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


def test_a_run_s_length_fits(rows, monkeypatch):
    """More rows than an int32 counts cannot be made here; that they are looked for can be seen."""
    huge = np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (2**31,), (0,))
    with pytest.raises(ValueError, match="owners must be C-contiguous"):
        rows.pack_runs(1, "b", huge, np.zeros(1, np.int64), 0)
    with pytest.raises(ValueError, match="at most 2147483647 rows, got 2147483648; cut the batch"):
        _row_parts.refuse_rows(2**31)


# ---- gathers


@given(st.data())
def test_gathered_strings_are_those_named(native, data):
    strings = data.draw(st.lists(st.binary(max_size=24), min_size=1, max_size=12))
    order = data.draw(st.lists(st.integers(0, len(strings) - 1), max_size=30))
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    offsets, memory = lay_out(strings, dtype, data.draw(st.binary(max_size=3)), b"after" * 3)
    for rows in (native, _reference):
        ends, gathered = rows.gather_binary(offsets, memory, int64s(order))
        assert ends.dtype == dtype
        assert gathered.dtype == np.uint8
        assert gathered.tobytes() == b"".join(strings[row] for row in order)
        assert ends.tolist() == [0, *np.cumsum([len(strings[row]) for row in order], dtype=int)]


@pytest.mark.parametrize("length", [0, 1, 7, 16, 17, 63])
def test_what_is_behind_gathered_bytes_is_zero(rows, length):
    """Whoever writes a column out fills it up to 8 or 64 bytes with what is behind it."""
    offsets, memory = lay_out([b"x" * length, b"y" * 40], np.int32)
    junk = [np.full(128, 0xAB, np.uint8) for _ in range(50)]  # what malloc gives next
    del junk
    _, gathered = rows.gather_binary(offsets, memory, int64s([0]))
    whole = gathered.base
    assert len(whole) % 64 == 0
    assert whole[:length].tobytes() == b"x" * length
    assert not whole[length:].any()


def test_what_gathers_refuse(rows):
    offsets, order = np.array([0, 1, 3], np.int32), int64s([1, 0])
    assert rows.gather_binary(offsets[:1], b"", order[:0])[0].tolist() == [0]
    for arguments, error, words in (
        (([0, 1, 3], b"abc", order), TypeError, "offsets must be a numpy array"),
        ((offsets[:0], b"abc", order), ValueError, "offsets must have one item more"),
        ((offsets, b"ab", order), ValueError, "within the 2 bytes of data, got 1..3 in row 1"),
        ((offsets.astype(np.int64), b"ab", order), ValueError, "got 1..3 in row 1"),
        ((offsets, b"abc", [1, 0]), TypeError, "order must be an array"),
        ((offsets, b"abc", int64s([0, 2])), ValueError, "row numbers in 0..1, got 2 at 1"),
        ((offsets, b"abc", int64s([-1, 0])), ValueError, "row numbers in 0..1, got -1 at 0"),
        ((offsets[:1], b"", order), ValueError, "in no rows at all .* got 1 at 0"),
    ):
        with pytest.raises(error, match=words):
            rows.gather_binary(*arguments)
    long = np.array([0, 2**20], np.int32)
    with pytest.raises(ValueError, match="room for the bytes of all rows in order; cast them to i"):
        rows.gather_binary(long, bytes(2**20), np.zeros(2**11, np.int64))


# ---- fingerprints


@given(st.binary(max_size=100), ANY_BITS)
def test_fingerprints_are_as_defined(native, data, seed):
    wanted = fingerprint_of(data, seed)
    assert native.fingerprint(data, seed) == _reference.fingerprint(data, seed) == wanted


def test_fingerprints_never_change(rows):
    found = [rows.fingerprint(data) for data in (b"", b"\0", b"ackcore", bytes(range(256)))]
    assert [*found, rows.fingerprint(b"ackcore", -1)] == FINGERPRINTS


def test_fingerprints_of_long_data(rows):
    """Also over the twin's blocks, and from addresses that are no multiple of 8."""
    data = np.random.default_rng(1).bytes(2**18 + 2**18 + 13)
    wanted = fingerprint_of(data, 5)
    assert rows.fingerprint(data, 5) == wanted
    assert rows.fingerprint(memoryview(b"x" + data)[1:], 5) == wanted


def test_fingerprints_notice_accidents(rows):
    data = bytearray(np.random.default_rng(2).bytes(4096))
    seen = {rows.fingerprint(data), rows.fingerprint(data, 1), rows.fingerprint(data[:-1])}
    seen |= {rows.fingerprint(data + bytes(n)) for n in range(1, 17)}
    seen |= {rows.fingerprint(data[512:] + data[:512]), rows.fingerprint(data + data)}
    seen |= {rows.fingerprint(bytes(n)) for n in range(40)}
    changes = 4096
    for place in range(changes):
        data[place] ^= 1 << place % 8
        seen.add(rows.fingerprint(data))
        data[place] ^= 1 << place % 8
    assert len(seen) == 3 + 16 + 2 + 40 + changes


def test_fingerprints_of_any_buffer(rows):
    pa = pytest.importorskip("pyarrow")
    numbers = np.arange(12, dtype=np.int32)
    wanted = rows.fingerprint(numbers.tobytes())
    for data in (numbers, numbers.reshape(3, 4), memoryview(numbers), pa.py_buffer(numbers)):
        assert rows.fingerprint(data) == wanted
    assert rows.fingerprint(np.empty(0)) == rows.fingerprint(pa.py_buffer(b"")) == FINGERPRINTS[0]


def test_what_fingerprints_refuse(rows):
    with pytest.raises(TypeError, match="data must be bytes or another buffer, got str"):
        rows.fingerprint("text")
    with pytest.raises(ValueError, match="data must be C-contiguous"):
        rows.fingerprint(np.arange(9)[::3])
    with pytest.raises(TypeError, match="seed must be an integer"):
        rows.fingerprint(b"", 0.5)
    with pytest.raises(OverflowError, match="seed must fit in 64 bits"):
        rows.fingerprint(b"", 2**64)


def test_threads_do_not_disturb_each_other(native):
    """The loops run without the GIL."""
    data, found = np.arange(200_000), []

    def work():
        hashes = np.zeros(len(data), np.int64)
        native.hash_fixed(hashes, data, 8)
        found.append((native.fingerprint(data), native.fingerprint(hashes)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


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


def test_the_backend_that_runs_is_behind_the_door():
    for name in _shuffle.__all__:
        assert callable(getattr(_shuffle, name))


# Worked out by the definitions above.
NUMBERS = [-7696910208926366575, 4817364491166516681, -4637038782566295195, -5241351740220216041]
NUMBERS_TWICE = [
    3326094378375228529,
    -2513180396249974621,
    -8316426518617262933,
    2607203880522472624,
]
AND_STRINGS = [855882832545710127, -6780260368182832577, 1298259394691958792, 802993479406444366]
RUNS = [
    [8821865594579280957, -7797347688277033466],
    [0, 1, 1, 0],
    [8721958276971971030, 7127493452000199256, -1070818639672918946, 245181004410660331],
    [2, 1, 1, 1],
    [2, 0, 2],
]
FINGERPRINTS = [
    5608870745677987462,
    3047026642955291612,
    8761221559836216189,
    653027024418767747,
    -1274325050204851155,
]
