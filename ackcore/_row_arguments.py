"""Conversion of the arguments of hashing and packing, and the errors for wrong ones.

Both backends use these checks and errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ackcore._columns import as_count, id_column, uint8_column
from ackcore._records import Int64s, UInt8s

#: The maximum number of shards; pyx/pack.h has it too.
MAX_SHARDS = 1 << 20
#: The widths of the numbers that are hashed, in bytes.
WIDTHS = (1, 2, 4, 8, 16, 32)
#: The maximum number of rows in a call of `pack_runs`: a run's length is an int32.
MAX_ROWS = 2**31 - 1
#: The number of functions of librdkafka that `RawMessages` calls.
RAW_FUNCTIONS = 5
#: The bits of a first ordinal: the ordinals of all rows of a call then fit in 63 bits.
START_BITS = 62


def bytes_of(data: Any, name: str) -> UInt8s:
    """Return the memory of any object with the buffer protocol as bytes."""
    try:
        view = memoryview(data)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be bytes or another buffer, got {type(data).__name__}"
        ) from None
    if not view.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, got a strided buffer; "
            "numpy.ascontiguousarray() copies it together"
        )
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def in_place(column: Any, name: str) -> Int64s:
    """Return a column of 64-bit integers to be changed in place; raise if it is read-only."""
    checked = id_column(column, name)
    if not checked.flags.writeable:
        raise ValueError(
            f"{name} must be writable, as it is changed in place; pass a copy and use that"
        )
    return checked


def valid_column(valid: Any, rows: int) -> UInt8s | None:
    """Return a column with one byte per row, 0 for rows without a value; None if all have one."""
    if valid is None:
        return None
    if isinstance(valid, np.ndarray) and valid.dtype == np.bool_:
        valid = valid.view(np.uint8)
    checked = uint8_column(valid, "valid")
    if len(checked) != rows:
        raise ValueError(
            f"hashes has {rows} rows and valid has {len(checked)}; they must pair up row by row"
        )
    return checked


def offset_column(offsets: Any, rows: int | None = None) -> npt.NDArray[Any]:
    """Return the int32 or int64 offsets at which each row's bytes begin and end."""
    if not isinstance(offsets, np.ndarray) or offsets.dtype not in (np.int32, np.int64):
        got = offsets.dtype if isinstance(offsets, np.ndarray) else type(offsets).__name__
        raise TypeError(f"offsets must be a numpy array of int32 or int64, got {got}")
    if offsets.ndim != 1 or not (offsets.flags.c_contiguous and offsets.flags.aligned):
        raise ValueError("offsets must be one-dimensional, C-contiguous and aligned; copy it first")
    if rows is None and not len(offsets):
        raise ValueError("offsets must have one item more than there are rows, got none")
    if rows is not None and len(offsets) != rows + 1:
        raise ValueError(
            f"offsets must have one item more than the {rows} rows of hashes, got {len(offsets)}"
        )
    return offsets


def refuse_width(width: int) -> NoReturn:
    """Raise for a width that is not in `WIDTHS`."""
    raise ValueError(f"width must be one of {', '.join(map(str, WIDTHS))} bytes, got {width}")


def refuse_size(size: int, rows: int, width: int) -> NoReturn:
    """Raise for data that is not ``rows`` numbers of ``width`` bytes."""
    raise ValueError(
        f"data must have {rows * width} bytes for {rows} rows of width {width}, got {size}"
    )


def refuse_offsets(offsets: npt.NDArray[Any], row: int, size: int) -> NoReturn:
    """Raise for a row whose bytes are not a part of the data."""
    raise ValueError(
        f"offsets must rise within the {size} bytes of data, "
        f"got {int(offsets[row])}..{int(offsets[row + 1])} in row {row}"
    )


def refuse_owner(row: int, owner: int, groups: int) -> NoReturn:
    """Raise for a row whose owner is not the number of a group."""
    among = f"0..{groups - 1}" if groups else "no groups at all (roots is empty)"
    raise ValueError(f"owners must be groups in {among}, got {owner} in row {row}")


def refuse_order(place: int | None = None, row: int = 0, rows: int = 0) -> NoReturn:
    """Raise for an order that does not contain each row once."""
    got = "one of them twice" if place is None else f"{row} at {place}"
    raise ValueError(f"order must have each of the {rows} row numbers once, got {got}")


def refuse_taken(place: int, row: int, rows: int) -> NoReturn:
    """Raise for an order with a number that is not the number of a row."""
    among = f"0..{rows - 1}" if rows else "no rows at all (offsets has one item)"
    raise ValueError(f"order must be row numbers in {among}, got {row} at {place}")


def refuse_gathered() -> NoReturn:
    """Raise for more bytes than 32-bit or 64-bit offsets can count."""
    raise ValueError(
        "offsets must have room for the bytes of all rows in order; cast them to int64"
    )


def refuse_rows(rows: int) -> NoReturn:
    """Raise for more rows than a run can count."""
    raise ValueError(f"owners must have at most {MAX_ROWS} rows, got {rows}; cut the batch")


def check_counts(counts: Int64s, rows: int) -> None:
    """Raise if a row count of a destination is negative, or they do not add up to ``rows``."""
    if len(counts) and int(counts.min()) < 0:
        row = int(np.argmax(counts < 0))
        raise ValueError(f"counts must not be negative, got {int(counts[row])} in row {row}")
    # Sum as Python integers: a sum that overflows might be right by chance.
    total = sum(counts.tolist())
    if total != rows:
        raise ValueError(f"counts must add up to the {rows} rows of owners, got {total}")


def addresses(functions: Sequence[int], queue: int) -> list[int]:
    """Check the addresses for `RawMessages` and return them; the queue's address is the last."""
    if len(functions) != RAW_FUNCTIONS:
        raise ValueError(
            f"functions must be {RAW_FUNCTIONS} addresses, of RawMessages' functions in their "
            f"order, got {len(functions)}"
        )
    found = [as_count(each, "functions", 1, 2**64 - 1) for each in functions]
    return [*found, as_count(queue, "queue", 1, 2**64 - 1)]
