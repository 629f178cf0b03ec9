"""Columns of a segment: stored in fewer bytes, still readable by row without decompression.

Integers, times and decimals are stored as the distance from the smallest one, in 1, 2, 4 or 8
bytes; floats in 4 bytes where that is exact; text with few distinct values as a dictionary, other
text without the prefix that all values have.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import has_offsets, valid_rows

#: Text is stored as a dictionary if this part of a sample's rows or fewer are distinct.
_SAMPLE_ROWS, _DISTINCT = 1_000, 0.25
#: Longer text is not packed: the size of a segment must tell how much memory its rows need.
_SHORT_BYTES = 256

Note = dict[str, Any]


def packed(column: pa.Array) -> tuple[pa.Array, Note]:
    """Return a column as it is stored, and the note that `unpacked` needs."""
    kind, n = column.type, len(column)
    if column.null_count == n:
        return pa.nulls(n), {}
    if _is_counted(kind):
        numbers = _integers(column)
        return (column, {}) if numbers is None else _packed_integers(numbers, valid_rows(column))
    if kind == pa.float64():
        floats = np.frombuffer(column.buffers()[1], np.float64, n, column.offset * 8)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            narrow = floats.astype(np.float32)
        same = (narrow.astype(np.float64) == floats) | np.isnan(floats)
        if same.all():
            return _with_nulls(narrow, valid_rows(column)), {}
    elif has_offsets(kind):
        sample = column.slice(0, _SAMPLE_ROWS)
        is_short = sample.nbytes <= _SHORT_BYTES * len(sample)
        if n > 1 and is_short and len(sample.unique()) <= len(sample) * _DISTINCT:
            return column.dictionary_encode(), {}
        wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        octets = column.cast(pa.large_binary() if wide else pa.binary())
        # The common prefix of the smallest and the largest text is that of all.
        bounds = list(pc.min_max(octets).as_py().values())
        prefix = os.path.commonprefix(bounds)[:_SHORT_BYTES]  # noqa: RUF071 - no paths
        if prefix:
            return pc.binary_replace_slice(octets, 0, len(prefix), b""), {"prefix": prefix.hex()}
    return column, {}


def unpacked(column: pa.Array, note: Note, kind: pa.DataType) -> pa.Array:
    """Return stored values in their type."""
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    if "base" in note:
        valid = valid_rows(column)
        width = column.type.bit_width // 8
        n = len(column)
        stored = np.frombuffer(column.buffers()[1], f"u{width}", n, column.offset * width)
        numbers = stored.astype(np.uint64)
        numbers += np.uint64(note["base"])
        return _of_integers(numbers.view(np.int64), valid, kind)
    if "prefix" in note:
        prefix, nothing = (
            pa.scalar(each, column.type) for each in (bytes.fromhex(note["prefix"]), b"")
        )
        return pc.binary_join_element_wise(prefix, column, nothing).cast(kind, safe=False)
    if pa.types.is_dictionary(column.type) and len(column) < len(column.dictionary):
        return column.dictionary.take(column.indices).cast(kind)
    return column if column.type == kind else column.cast(kind)


def _is_counted(kind: pa.DataType) -> bool:
    """Return whether values of a type are integers in some unit."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
        or types.is_decimal128(kind)
    )


def _integers(column: pa.Array) -> npt.NDArray[np.int64] | None:
    """Return the bits of a column's numbers as int64; None if they are wider."""
    kind, n = column.type, len(column)
    if pa.types.is_decimal128(kind):
        words = np.frombuffer(column.buffers()[1], np.int64, 2 * n, column.offset * 16)
        low, high = words[::2], words[1::2]
        valid = valid_rows(column)
        fits = high == low >> 63
        if not (fits if valid is None else fits | (valid == 0)).all():
            return None
        return low
    width = kind.bit_width // 8
    sign = "u" if pa.types.is_unsigned_integer(kind) else "i"
    numbers = np.frombuffer(column.buffers()[1], f"{sign}{width}", n, column.offset * width)
    return numbers.astype(np.int64) if width < 8 else numbers.view(np.int64)


def _packed_integers(
    numbers: npt.NDArray[np.int64], valid: npt.NDArray[np.uint8] | None
) -> tuple[pa.Array, Note]:
    present = numbers if valid is None else numbers[valid != 0]
    base, top = int(present.min()), int(present.max())
    width = next(width for width in (1, 2, 4, 8) if top - base < 1 << 8 * width)
    distance = numbers.view(np.uint64) - np.uint64(base % 2**64)
    return _with_nulls(distance.astype(f"u{width}"), valid), {"base": base % 2**64}


def _with_nulls(values: npt.NDArray[Any], valid: npt.NDArray[np.uint8] | None) -> pa.Array:
    return pa.array(values) if valid is None else pa.array(values, mask=valid == 0)


def _of_integers(
    numbers: npt.NDArray[np.int64], valid: npt.NDArray[np.uint8] | None, kind: pa.DataType
) -> pa.Array:
    if pa.types.is_decimal128(kind):
        values: npt.NDArray[Any] = np.stack([numbers, numbers >> 63], axis=1)
    else:
        values = numbers.astype(f"i{kind.bit_width // 8}", copy=False)
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(numbers), [bitmap, data])
