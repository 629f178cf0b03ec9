"""Hashes of rows: the same for equal rows in every process and version.

Each column is converted to numbers or bytes that are equal for equal values; the backend mixes them
into the running hash of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import bits, bytes_in, has_offsets, strings, valid_rows
from ackcore._backend import hash_binary, hash_fixed
from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore._reference.rows import fold_values


def hash_columns(columns: Sequence[pa.Array], n: int) -> Int64s:
    """Return a hash of each row, the same for equal rows in every process and version.

    Floats are compared as numbers: -0.0 equals 0.0, and all NaNs are equal.  The width of integers
    and floats, the layout of text and bytes, and dictionary encoding do not change the hash.  Nulls
    are equal.

    ``columns``: columns of ``n`` rows, of any types without maps and unions at any depth. ``n``:
    the number of rows; needed if there are no columns, when all rows are equal.

    Different rows have the same hash with the probability of 64 random bits. Raises TypeError if a
    column is not an Arrow array, or its type contains a map or a union. Raises ValueError if a
    column does not have ``n`` rows.
    """
    hashes = np.zeros(n, np.int64)
    for number, column in enumerate(columns):
        if not isinstance(column, pa.Array):
            raise TypeError(
                f"columns must be Arrow arrays, got {type(column).__name__} at position "
                f"{number}; pass the chunks of a ChunkedArray one by one, or "
                ".combine_chunks() first"
            )
        if len(column) != n:
            raise ValueError(
                f"columns must have {counted(n, 'row')}, got {len(column)} at position {number}"
            )
        try:
            _hash_into(hashes, column)
        except _NotHashed as error:
            raise TypeError(
                f"columns must not contain {error}, which has no hash, got {column.type} at "
                f"position {number}; hash its fields or entries, or convert it to text"
            ) from None
    return hashes


class _NotHashed(Exception):
    """The error for a type without hashes inside a column's type; its text is that type."""


def _hash_into(hashes: Int64s, column: pa.Array) -> None:
    arrow_type, n = column.type, len(column)
    types = pa.types
    if isinstance(column, pa.ExtensionArray):
        _hash_into(hashes, column.storage)
    elif types.is_run_end_encoded(arrow_type):
        _hash_into(hashes, pc.run_end_decode(column))
    elif types.is_map(arrow_type) or types.is_union(arrow_type):
        raise _NotHashed(str(arrow_type))
    elif types.is_null(arrow_type):
        hash_fixed(hashes, np.zeros(n, np.uint8), 1, np.zeros(n, np.uint8))
    elif n == 0:
        # Empty arrays may lack the buffers that are read below; only nested types are checked.
        for field in range(arrow_type.num_fields):
            _hash_into(hashes, pa.nulls(0, arrow_type.field(field).type))
    elif types.is_dictionary(arrow_type):
        _hash_dictionary(hashes, column)
    elif types.is_struct(arrow_type):
        inner = np.zeros(n, np.int64)
        for field in range(arrow_type.num_fields):
            _hash_into(inner, column.field(field))
        # A null struct differs from a struct of nulls.
        hash_fixed(hashes, inner, 8, valid_rows(column))
    elif types.is_nested(arrow_type):
        _hash_lists(hashes, column)
    elif has_offsets(arrow_type):
        hash_binary(hashes, *strings(column), valid_rows(column))
    elif types.is_string_view(arrow_type) or types.is_binary_view(arrow_type):
        hash_binary(hashes, *strings(column.cast(pa.large_binary())), valid_rows(column))
    elif types.is_fixed_size_binary(arrow_type):
        places = np.arange(column.offset, column.offset + n + 1, dtype=np.int64)
        data = bytes_in(column.buffers()[1])
        hash_binary(hashes, places * arrow_type.byte_width, data, valid_rows(column))
    else:
        data, width = _numbers(column)
        hash_fixed(hashes, data, width, valid_rows(column))


def _numbers(column: pa.Array) -> tuple[npt.NDArray[Any], int]:
    """Return a column's numbers and their width in bytes; equal numbers have equal bytes."""
    arrow_type, n = column.type, len(column)
    if pa.types.is_boolean(arrow_type):
        return bits(column.buffers()[1], column.offset, n), 1
    width = arrow_type.bit_width // 8
    data = np.frombuffer(column.buffers()[1], np.uint8, n * width, column.offset * width)
    if pa.types.is_floating(arrow_type):
        with np.errstate(invalid="ignore"):  # a signalling NaN, maybe under a null
            floats = data.view(f"f{width}").astype(np.float64)
            floats += 0.0  # changes -0.0 to 0.0
        floats[np.isnan(floats)] = np.nan
        return floats, 8
    if pa.types.is_unsigned_integer(arrow_type):
        # Below 2**63 their bytes equal those of signed ones.
        return data.view(f"u{width}").astype(np.uint64), 8
    return data, width


def _hash_dictionary(hashes: Int64s, column: pa.Array) -> None:
    """Mix a dictionary column into the hashes of its rows.

    Each entry is hashed once. If there are more entries than rows, the rows are hashed instead.
    """
    entries = len(column.dictionary)
    if entries > len(column):
        # A slice of a longer column may have a dictionary of any length.
        _hash_into(hashes, column.dictionary_decode())
        return
    of_entry = np.zeros(entries, np.int64)
    _hash_into(of_entry, column.dictionary)
    indices = column.indices.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=True)
    # If all rows are null, there may be no entry.
    of_row = of_entry[indices] if entries else np.zeros(len(column), np.int64)
    fold_values(hashes, of_row, valid_rows(column.indices))


def _hash_lists(hashes: Int64s, column: pa.Array) -> None:
    """Mix lists into the hashes: the sums of hashes of items and their places, and the lengths."""
    n = len(column)
    valid = valid_rows(column)
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(n, column.type.list_size, np.int64)
        starts = (np.arange(n) + column.offset) * column.type.list_size
    else:
        offsets = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64)
        if hasattr(column, "sizes"):  # a list view
            starts, lengths = offsets[:n], column.sizes.to_numpy().astype(np.int64)
        else:
            starts, lengths = offsets[:-1], np.diff(offsets)
    if valid is not None:
        lengths = np.where(valid != 0, lengths, 0)
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    in_row = np.arange(total) - np.repeat(ends - lengths, lengths)
    items = np.repeat(starts, lengths) + in_row
    sums = np.zeros(n + 1, np.int64)
    if total:
        first, last = int(items.min()), int(items.max())
        of_item = np.zeros(last + 1 - first, np.int64)
        _hash_into(of_item, column.values.slice(first, last + 1 - first))
        # Steps of the golden ratio, as signed 64 bits.
        placed = of_item[items - first] + (in_row + 1) * -0x61C8864680B583EB
        mixed = np.zeros(total, np.int64)
        hash_fixed(mixed, placed, 8)
        # Sums of 64 bits may overflow; their differences are still right.
        np.cumsum(mixed, out=mixed)
        sums[1:] = np.concatenate([[0], mixed])[ends]
    else:
        _hash_into(np.zeros(0, np.int64), column.values.slice(0, 0))
    inner = np.diff(sums)
    hash_fixed(inner, lengths, 8)
    hash_fixed(hashes, inner, 8, valid)
