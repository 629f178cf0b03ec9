"""The buffers of an Arrow column, as numpy arrays that share its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._records import Int64s, UInt8s


def is_text(arrow_type: pa.DataType) -> bool:
    """Return whether a column of this type has text, in any of Arrow's layouts."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_string_view(arrow_type)
    )


def has_offsets(arrow_type: pa.DataType) -> bool:
    """Return whether a column of this type has offsets into bytes: text or bytes, but not views."""
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_binary(arrow_type)
        or pa.types.is_large_binary(arrow_type)
    )


def strings(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the offsets and the bytes of a column with offsets and at least one row."""
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    _, starts, data = column.buffers()
    offsets = np.frombuffer(starts, dtype, len(column) + 1, column.offset * dtype.itemsize)
    return offsets, bytes_in(data)


def offsets_of(sizes: npt.ArrayLike) -> Int64s:
    """Return the start of each list and the end of the last one, from the lists' sizes."""
    found = np.zeros(len(np.asarray(sizes)) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def valid_rows(column: pa.Array) -> UInt8s | None:
    """Return which rows have a value, as one byte per row, or None if all have."""
    if not column.null_count:
        return None
    return bits(column.buffers()[0], column.offset, len(column))


def bits(bitmap: pa.Buffer, start: int, n: int) -> UInt8s:
    """Return n bits of a bitmap, as one byte per bit."""
    first, last = start // 8, (start + n + 7) // 8
    octets = np.frombuffer(bitmap, np.uint8, last - first, first)
    return np.unpackbits(octets, bitorder="little")[start % 8 : start % 8 + n]


def bytes_in(buffer: pa.Buffer | None) -> npt.NDArray[Any]:
    """Return a buffer's bytes; Arrow may have no buffer if all rows are empty."""
    return np.empty(0, np.uint8) if not buffer else np.frombuffer(buffer, np.uint8)
