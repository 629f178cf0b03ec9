"""Columns are hashed alike by both backends, as defined, and so for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_scripts import int64s
from separately import run_threads

from ackcore import _reference

#: 64 bits in either sign.
ANY_BITS = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1]) | st.integers(
    -(2**63), 2**64 - 1
)


def lay_out(strings, dtype, before=b"", after=b""):
    ends = np.cumsum([len(before), *map(len, strings)])
    return ends.astype(dtype), before + b"".join(strings) + after


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_strings_have_the_same_hash_wherever_they_lie(native, dtype):
    rng = np.random.default_rng(5)
    # Every length around the words' edges, at every distance from the end of the buffer.
    strings = [rng.bytes(n) for n in [*range(26), 100, *range(18, -1, -1)]]
    wanted = np.zeros(len(strings), np.int64)
    _reference.hash_binary(wanted, *lay_out(strings, np.int64))
    for before, after in ((b"", b""), (b"xyz", b"12345678"), (b"", b"1")):
        hashes = np.zeros(len(strings), np.int64)
        native.hash_binary(hashes, *lay_out(strings, dtype, before, after))
        assert hashes.tolist() == wanted.tolist()


@pytest.mark.parametrize("strings", [[b""], [b"a"], [b"abcdefg"], [b"abcdefgh"], [b"x" * 17]])
def test_strings_that_fill_the_buffer_are_not_read_beyond(backend, strings):
    """The bytes behind are another object's; `make sanitize` sees a read of them."""
    offsets, data = lay_out(strings, np.int32)
    hashes, padded = np.zeros(1, np.int64), np.zeros(1, np.int64)
    backend.hash_binary(hashes, offsets, np.frombuffer(data, np.uint8).copy())
    backend.hash_binary(padded, offsets, data + b"behind")
    assert hashes.tolist() == padded.tolist()


def test_hashes_never_change(backend):
    """Vectors, worked out once: shuffles and checkpoints rely on them."""
    hashes = np.zeros(4, np.int64)
    backend.hash_fixed(hashes, np.array([0, 1, -1, 42]), 8)
    assert hashes.tolist() == NUMBERS
    backend.hash_fixed(
        hashes, np.array([0, 1, -1, 42], np.int8), 1, np.array([1, 0, 1, 0], np.bool_)
    )
    assert hashes.tolist() == NUMBERS_TWICE
    backend.hash_binary(hashes, *lay_out([b"", b"a", b"acknowledge", "é".encode()], np.int32))
    assert hashes.tolist() == AND_STRINGS
    for width, wanted in OF_WIDTHS.items():
        hashes = np.zeros(2, np.int64)
        backend.hash_fixed(hashes, bytes(range(100, 100 + 2 * width)), width)
        assert hashes.tolist() == wanted


def test_numbers_may_start_anywhere(backend):
    for width in (2, 4, 8, 16, 32):
        data = np.arange(5 * width + 1, dtype=np.uint8)
        hashes, aligned = np.zeros(5, np.int64), np.zeros(5, np.int64)
        backend.hash_fixed(hashes, data[1:], width)
        backend.hash_fixed(aligned, data[1:].copy(), width)
        assert hashes.tolist() == aligned.tolist()


def test_the_order_of_columns_and_where_they_end_matter(backend):
    def of(*columns):
        hashes = np.zeros(1, np.int64)
        for column in columns:
            backend.hash_binary(hashes, *lay_out([column], np.int64))
        return int(hashes[0])

    seen = [of(b"ab", b"c"), of(b"a", b"bc"), of(b"c", b"ab"), of(b"abc"), of(b"abc", b"")]
    seen += [of(b"abc\0"), of(b"", b"abc"), of(b"", b""), of(b""), of(b"\0")]
    assert len(set(seen)) == len(seen)


def test_hashes_spread(backend):
    """Neighbours differ in half of the bits, and no two of many keys meet."""
    n = 50_000
    hashes = np.zeros(n, np.int64)
    backend.hash_fixed(hashes, np.arange(n), 8)
    assert len(set(hashes.tolist())) == n
    bits = np.unpackbits((hashes[1:] ^ hashes[:-1]).view(np.uint8)).mean()
    assert abs(bits - 0.5) < 0.005
    pairs = np.zeros(n, np.int64)
    for _ in range(2):  # both columns the same: they must not cancel
        backend.hash_fixed(pairs, np.arange(n), 8)
    assert len(set(pairs.tolist())) == n
    assert abs(np.unpackbits(pairs.view(np.uint8)).mean() - 0.5) < 0.005


@given(st.data())
def test_backends_hash_alike(native, data):
    n = data.draw(st.integers(0, 20))
    start = int64s(data.draw(st.lists(ANY_BITS, min_size=n, max_size=n)))
    flags = st.lists(st.booleans(), min_size=n, max_size=n)
    nulls = st.none() | st.builds(
        lambda items, kind: np.array(items, np.bool_) * kind(255),
        flags,
        st.sampled_from([np.bool_, np.uint8]),
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


def test_what_hashes_refuse(backend):
    hashes, fixed = np.zeros(3, np.int64), np.arange(3)
    frozen = hashes.copy()
    frozen.setflags(write=False)
    for arguments, error, words in (
        (([0, 0, 0], fixed, 8), TypeError, "hashes must be an array"),
        ((frozen, fixed, 8), ValueError, "hashes must be writable"),
        ((hashes, fixed, 3), ValueError, "width must be one of 1, .*, 32 bytes, got 3"),
        ((hashes, fixed, 64), ValueError, "width must be one of 1, .*, 32 bytes, got 64"),
        ((hashes, fixed, 0), ValueError, "width must be in 1"),
        ((hashes, fixed, 8.0), TypeError, "width must be an integer"),
        ((hashes, fixed, 4), ValueError, "must have 12 bytes for 3 rows of width 4, got 24"),
        ((hashes, [1, 2, 3], 8), TypeError, "data must be bytes or another buffer, got list"),
        (
            (hashes, fixed.view("M8[s]"), 8),
            TypeError,
            "data must be bytes or another buffer, got ndarray",
        ),
        ((hashes, np.arange(6)[::2], 8), ValueError, "data must be C-contiguous"),
        ((hashes, fixed, 8, np.ones(2, np.bool_)), ValueError, "hashes has 3 rows and valid has 2"),
    ):
        with pytest.raises(error, match=words):
            backend.hash_fixed(*arguments)
    of_arrow = "offsets of an Arrow column must be a numpy array of int32 or int64, got "
    within = "within the 4 bytes of data, got "
    for offsets, error, words in (
        (np.zeros(4, np.uint32), TypeError, f"{of_arrow}ui"),
        ([0, 0, 0, 0], TypeError, f"{of_arrow}lis"),
        (np.zeros(8, np.int32)[::2], ValueError, "offsets must be one-dimensional"),
        (
            np.zeros(3, np.int32),
            ValueError,
            "must have 4 items, the bounds of the bytes of 3 rows, got 3",
        ),
        *(
            (np.array(offsets, dtype), ValueError, f"{within}{row}")
            for dtype in (np.int32, np.int64)
            for offsets, row in (
                ([0, 1, 5, 3], "1..5 in row 1"),
                ([-1, 0, 1, 2], "-1..0 in row 0"),
                ([0, 1, 2, 5], "2..5 in row 2"),
                ([2, 1, 1, 1], "2..1 in row 0"),
                ([9, 9, 9, 9], "9..9 in row 0"),
            )
        ),
    ):
        with pytest.raises(error, match=words):
            backend.hash_binary(hashes, offsets, b"abcd")
    with pytest.raises(TypeError, match="valid must hold 8-bit"):
        backend.hash_binary(hashes, np.zeros(4, np.int32), b"", np.ones(3))
    assert hashes.tolist() == [0, 0, 0]


# Worked out once from the formula in pyx/rows.h, with plain integers.
NUMBERS = [-7696910208926366575, 4817364491166516681, -4637038782566295195, -5241351740220216041]
NUMBERS_TWICE = [
    3326094378375228529,
    -2513180396249974621,
    -8316426518617262933,
    2607203880522472624,
]
AND_STRINGS = [855882832545710127, -6780260368182832577, 1298259394691958792, 802993479406444366]
#: Of the two rows in the bytes from 100 on.
OF_WIDTHS = {
    1: [7791099013974371032, 1080045055976568178],
    2: [5105046761934331697, 3516367112633035970],
    4: [4966666164940808993, -4498322970008322805],
    8: [6721276980366689657, 2072570315332289259],
    16: [-5516391179316020399, 2858049903381535975],
    32: [-6987777373669185969, 7641862670641682272],
}


# --- Fingerprints are the same from both backends, as defined, and so for ever.


@given(st.binary(max_size=100), ANY_BITS)
def test_fingerprints_are_alike(native, data, seed):
    assert native.fingerprint(data, seed) == _reference.fingerprint(data, seed)


def test_fingerprints_never_change(backend):
    found = [backend.fingerprint(data) for data in (b"", b"\0", b"ackcore", bytes(range(256)))]
    assert [*found, backend.fingerprint(b"ackcore", -1)] == FINGERPRINTS


def test_fingerprints_of_long_data(backend):
    """Also over the twin's blocks, and from addresses that are no multiple of 8."""
    data = bytes(range(256)) * 2048 + b"the last one"
    assert backend.fingerprint(data, 5) == LONG
    assert backend.fingerprint(memoryview(b"x" + data)[1:], 5) == LONG


def test_fingerprints_notice_accidents(backend):
    data = bytearray(np.random.default_rng(2).bytes(4096))
    seen = {backend.fingerprint(data), backend.fingerprint(data, 1), backend.fingerprint(data[:-1])}
    seen |= {backend.fingerprint(data + bytes(n)) for n in range(1, 17)}
    seen |= {backend.fingerprint(data[512:] + data[:512]), backend.fingerprint(data + data)}
    seen |= {backend.fingerprint(bytes(n)) for n in range(40)}
    changes = 4096
    for place in range(changes):
        data[place] ^= 1 << place % 8
        seen.add(backend.fingerprint(data))
        data[place] ^= 1 << place % 8
    assert len(seen) == 3 + 16 + 2 + 40 + changes


def test_fingerprints_of_any_buffer(backend):
    pa = pytest.importorskip("pyarrow")
    numbers = np.arange(12, dtype=np.int32)
    wanted = backend.fingerprint(numbers.tobytes())
    for data in (numbers, numbers.reshape(3, 4), memoryview(numbers), pa.py_buffer(numbers)):
        assert backend.fingerprint(data) == wanted
    assert (
        backend.fingerprint(np.empty(0))
        == backend.fingerprint(pa.py_buffer(b""))
        == FINGERPRINTS[0]
    )


def test_what_fingerprints_refuse(backend):
    with pytest.raises(TypeError, match="data must be bytes or another buffer, got str"):
        backend.fingerprint("text")
    with pytest.raises(ValueError, match="data must be C-contiguous"):
        backend.fingerprint(np.arange(9)[::3])
    with pytest.raises(TypeError, match="seed must be an integer"):
        backend.fingerprint(b"", 0.5)
    with pytest.raises(OverflowError, match="seed must fit in 64 bits"):
        backend.fingerprint(b"", 2**64)


def test_threads_do_not_disturb_each_other(native):
    """The loops run without the GIL."""
    data, found = np.arange(200_000), []

    def work():
        hashes = np.zeros(len(data), np.int64)
        native.hash_fixed(hashes, data, 8)
        found.append((native.fingerprint(data), native.fingerprint(hashes)))

    run_threads(*[work] * 4)
    assert len(found) == 4
    assert len(set(found)) == 1


FINGERPRINTS = [
    5608870745677987462,
    3047026642955291612,
    8761221559836216189,
    653027024418767747,
    -1274325050204851155,
]
LONG = 6252972926632205194


# --- The strings of a column are put in another order alike by both backends.


@given(st.data())
def test_gathered_strings_are_those_named(native, data):
    strings = data.draw(st.lists(st.binary(max_size=24), min_size=1, max_size=12))
    order = data.draw(st.lists(st.integers(0, len(strings) - 1), max_size=30))
    dtype = data.draw(st.sampled_from([np.int32, np.int64]))
    offsets, memory = lay_out(strings, dtype, data.draw(st.binary(max_size=3)), b"after" * 3)
    for backend in (native, _reference):
        ends, gathered = backend.gather_binary(offsets, memory, int64s(order))
        assert ends.dtype == dtype
        assert gathered.dtype == np.uint8
        assert gathered.tobytes() == b"".join(strings[row] for row in order)
        assert ends.tolist() == [0, *np.cumsum([len(strings[row]) for row in order], dtype=int)]


@pytest.mark.parametrize("length", [0, 1, 7, 16, 17, 63])
def test_what_is_behind_gathered_bytes_is_zero(backend, length):
    """Whoever writes a column out fills it up to 8 or 64 bytes with what is behind it."""
    offsets, memory = lay_out([b"x" * length, b"y" * 40], np.int32)
    junk = [np.full(128, 0xAB, np.uint8) for _ in range(50)]  # what malloc gives next
    del junk
    _, gathered = backend.gather_binary(offsets, memory, int64s([0]))
    whole = gathered.base
    assert len(whole) % 64 == 0
    assert whole[:length].tobytes() == b"x" * length
    assert not whole[length:].any()


def test_what_gathers_refuse(backend):
    offsets, order = np.array([0, 1, 3], np.int32), int64s([1, 0])
    assert backend.gather_binary(offsets[:1], b"", order[:0])[0].tolist() == [0]
    for arguments, error, words in (
        (([0, 1, 3], b"abc", order), TypeError, "offsets of an Arrow column must be a numpy array"),
        ((offsets[:0], b"abc", order), ValueError, "offsets must have one item more"),
        ((offsets, b"ab", order), ValueError, "within the 2 bytes of data, got 1..3 in row 1"),
        ((offsets.astype(np.int64), b"ab", order), ValueError, "got 1..3 in row 1"),
        ((offsets, b"abc", [1, 0]), TypeError, "order must be an array"),
        ((offsets, b"abc", int64s([0, 2])), ValueError, "row numbers in 0..1, got 2 at index 1"),
        ((offsets, b"abc", int64s([-1, 0])), ValueError, "row numbers in 0..1, got -1 at index 0"),
        ((offsets[:1], b"", order), ValueError, "in no rows at all .* got 1 at index 0"),
    ):
        with pytest.raises(error, match=words):
            backend.gather_binary(*arguments)
    long = np.array([0, 2**20], np.int32)
    with pytest.raises(ValueError, match="offsets of int32 can count; cast offsets to int64"):
        backend.gather_binary(long, bytes(2**20), np.zeros(2**11, np.int64))
