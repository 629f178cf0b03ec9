"""The strings of a column are put in another order alike by both backends."""

import numpy as np
import pytest
from definitions import int64s, lay_out
from hypothesis import given
from hypothesis import strategies as st

from ackcore import _reference


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
            backend.gather_binary(*arguments)
    long = np.array([0, 2**20], np.int32)
    with pytest.raises(ValueError, match="room for the bytes of all rows in order; cast them to i"):
        backend.gather_binary(long, bytes(2**20), np.zeros(2**11, np.int64))
