"""Columns of a segment: every value comes back, at the borders of widths and behind prefixes."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ackcore.tables.segment_columns import packed, unpacked

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
INTEGERS += [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
#: Distances whose width is one more or less than that of their neighbours.
DISTANCES = [0, *(2**bits - less for bits in range(8, 65, 8) for less in (2, 1, 0))]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
FLOATS = [0.0, -0.0, 0.01, 12.34, 5.0, 1.5, -3.0, 1e300, math.nan, math.inf, 2.0**53, 1 / 3]


@st.composite
def columns(draw, kinds=st.sampled_from([*INTEGERS, *TEXTS, pa.float64()])):  # noqa: B008
    """Draw a column, which begins inside its buffers."""
    kind = draw(kinds)
    if kind == pa.float64():
        values = st.sampled_from(FLOATS[: draw(st.sampled_from([1, 2, 5, 7, 12]))])
    elif kind in TEXTS:
        prefix = draw(st.sampled_from(["", "ß", "shop-"]))
        alphabet = draw(st.sampled_from(["aß€", "a@.", "ab"]))
        sizes = draw(st.sampled_from([(0, 4), (3, 3)]))
        heads = st.text(alphabet, min_size=sizes[0], max_size=sizes[1])
        tail = draw(st.sampled_from(["", "@a.b", ".", "/"]))
        values = heads.map(lambda text: prefix + text + tail)
        if kind in TEXTS[2:]:
            values = values.map(str.encode)
    else:
        bits = kind.bit_width - pa.types.is_signed_integer(kind)
        lowest, highest = (0 if bits == kind.bit_width else -(2**bits)), 2**bits - 1
        base = draw(st.integers(lowest, highest))
        values = st.sampled_from(DISTANCES).map(lambda far: min(base + far, highest))
        values |= st.sampled_from(DISTANCES).map(lambda far: max(base - far, lowest))
    nulls = draw(st.booleans())
    items = draw(st.lists(values | st.none() if nulls else values, max_size=12))
    return pa.array([*items[:1], None, *items], kind).slice(len(items[:1]) + 1)


def shown(column):
    """Return values that differ if a bit of a float differs, except in NaN."""
    return list(map(repr, column.to_pylist()))


@settings(deadline=None)
@given(column=columns())
def test_stored_values_come_back(column):
    stored, note = packed(column)
    back = unpacked([(stored, note)], column.type)
    back.validate(full=True)
    assert back.type == column.type
    assert shown(back) == shown(column)
    rows = np.arange(len(column))[::-2]
    is_array = isinstance(stored, pa.Array)
    taken = stored.take(pa.array(rows)) if is_array else stored[rows]
    assert shown(unpacked([(taken, note)], column.type)) == shown(column.take(pa.array(rows)))
    assert shown(unpacked([(stored[1:], note)], column.type)) == shown(column[1:])


@settings(deadline=None)
@given(data=st.data(), kind=st.sampled_from([pa.int16(), pa.int64(), pa.string(), pa.float64()]))
def test_parts_that_are_stored_differently_become_one_column(data, kind):
    parts = data.draw(st.lists(columns(st.just(kind)), min_size=1, max_size=4))
    back = unpacked([packed(part) for part in parts], kind)
    assert shown(back) == [text for part in parts for text in shown(part)]


def test_numbers_and_text_are_stored_in_few_bytes():
    for width in range(1, 9):
        for far in (2 ** (8 * width - 8), 2 ** (8 * width) - 1):
            assert packed(pa.array([-(2**63), far - 2**63]))[0].shape == (2, width)
    assert packed(pa.array([7, 7]))[0].shape == (2, 0)
    cents = pa.array([n / 100 for n in range(60_000)])
    assert packed(cents)[0].shape == (60_000, 2)
    text = pa.array([f"shop-{n:07d}" for n in range(1_000)])
    assert packed(text)[0].shape == (1_000, 3)
    mails = pa.array([f"{n}@example{n % 90}.com" for n in range(9_000)])
    assert packed(mails)[0].nbytes < 10 * len(mails)
