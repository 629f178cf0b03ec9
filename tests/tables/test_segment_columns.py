"""Columns of a segment: every value comes back, at the borders of widths and behind prefixes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ackcore.tables.segment_columns import packed, unpacked

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
INTEGERS += [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
#: Distances whose width is one more or less than that of their neighbours.
DISTANCES = [0, 1, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]


@st.composite
def columns(draw):
    """Draw a column, which begins inside its buffers."""
    kind = draw(st.sampled_from(INTEGERS + TEXTS))
    if kind in TEXTS:
        prefix = draw(st.sampled_from(["", "ß", "shop-"]))
        values = st.text("aß€", max_size=4).map(lambda text: prefix + text)
        if kind in TEXTS[2:]:
            values = values.map(str.encode)
    else:
        bits = kind.bit_width - pa.types.is_signed_integer(kind)
        lowest, highest = (0 if bits == kind.bit_width else -(2**bits)), 2**bits - 1
        base = draw(st.integers(lowest, highest))
        values = st.sampled_from(DISTANCES).map(lambda far: min(base + far, highest))
        values |= st.sampled_from(DISTANCES).map(lambda far: max(base - far, lowest))
    items = draw(st.lists(st.none() | values, max_size=12))
    return pa.array([*items[:1], None, *items], kind).slice(len(items[:1]) + 1)


@settings(deadline=None)
@given(column=columns())
def test_stored_values_come_back(column):
    stored, note = packed(column)
    back = unpacked(stored, note, column.type)
    back.validate(full=True)
    assert back.type == column.type
    assert back.to_pylist() == column.to_pylist()
    rows = pa.array(np.arange(len(column))[::-2])
    taken = unpacked(stored.take(rows), note, column.type)
    assert taken.to_pylist() == column.take(rows).to_pylist()
    assert unpacked(stored.slice(1), note, column.type).to_pylist() == column.slice(1).to_pylist()


def test_numbers_and_text_are_stored_in_few_bytes():
    for width, far in ((1, 255), (2, 256), (4, 2**32 - 1), (8, 2**32)):
        column = pa.array([-(2**40), far - 2**40], pa.int64())
        assert packed(column)[0].type.bit_width == 8 * width
    text = pa.array([f"shop-{n:07d}" for n in range(1_000)])
    assert text.nbytes - packed(text)[0].nbytes == len("shop-0000") * 1_000
