"""The checks of arguments that are ids, offsets and rows: limits, conversions, and errors.

Both backends call these functions, so that they accept and refuse the same arguments.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ackcore._columns import (
    as_count,
    as_id,
    as_int,
    id_column,
    refuse_rows_where,
    same_length,
    task_column,
    uint8_column,
)
from ackcore._error_hints import counted
from ackcore._records import Int64s, OffsetState, UInt8s

PARTITION_BITS = 16
OFFSET_BITS = 42
ATTEMPT_BITS = 6
#: Ordinals are the non-negative numbers of a signed 64-bit column.
ORDINAL_BITS = 63


def is_one_for_all(value: object) -> bool:
    """Return whether a column argument is a single integer for all rows."""
    # Arrays have __index__ too, for arrays with one item.
    return hasattr(value, "__index__") and not isinstance(value, np.ndarray)


def refuse_part(column: Any, name: str, bits: int) -> NoReturn:
    """Raise ValueError for the first row of the column ``name`` not in ``0..2**bits - 1``."""
    row = int(np.argmax((column < 0) | (column >= 2**bits)))
    raise ValueError(f"{name} must be in 0..{2**bits - 1}, got {int(column[row])} in row {row}")


def refuse_parent(row: int, parent: int, n: int) -> NoReturn:
    """Raise ValueError for row ``row`` of ``parents``: ``parent`` is not in ``0..n - 1``."""
    among = f"0..{n - 1}" if n else "no rows at all (n is 0)"
    raise ValueError(f"parents must be row numbers in {among}, got {parent} in row {row}")


def component_key(component: Any) -> int:
    """Return the signed 64-bit int that represents a component in edge ids.

    ``component``: a component's name, which is hashed, or a 64-bit int, signed or not, whose bits
    are used unchanged. The result, an int in -2**63..2**63-1, can be passed in place of the name.
    Raises TypeError for other types, OverflowError for an int of more than 64 bits, and ValueError
    for a name that is not valid Unicode.
    """
    if isinstance(component, str):
        return hash_name(component)
    return as_id(component, "component")


@functools.lru_cache(maxsize=1024)
def hash_name(name: str) -> int:
    """Return the hash of a component's name, a signed 64-bit int."""
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=b"ackcore.comp").digest()
    return int.from_bytes(digest, "little", signed=True)


#: The position after the last offset must fit in 64 bits too.
MAX_OFFSET = 2**63 - 2
MAX_GENERATION = 2**63 - 1
MAX_PARTITION = 2**31 - 1

_WHY_NEGATIVE = "; negative values are no offsets, but codes of Kafka, such as -1001 for none"


class Key(NamedTuple):
    """The checked topic, partition, generation and first offset of an `OffsetTracker`."""

    topic: str
    partition: int
    generation: int
    base: int


def tracker_key(topic: Any, partition: Any, generation: Any, base: Any) -> Key:
    """Return the checked constructor arguments of an `OffsetTracker`.

    Raises TypeError if one has another type, and ValueError if ``topic`` is empty or a number is
    out of range.
    """
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a string, got {type(topic).__name__}")
    if not topic:
        raise ValueError("topic must not be empty")
    return Key(
        topic,
        as_count(partition, "partition", 0, MAX_PARTITION),
        as_generation(generation),
        as_offset(base, "base"),
    )


def as_generation(generation: Any) -> int:
    """Return the number of a partition's assignment as an int.

    Raises TypeError if it is no integer, and ValueError if it is not in ``0..2**63 - 1``.
    """
    return as_count(generation, "generation", 0, MAX_GENERATION)


def as_offset(value: Any, name: str) -> int:
    """Return an offset as an int; raise TypeError, or ValueError outside of ``0..2**63 - 2``."""
    offset = as_int(value, name)
    if not 0 <= offset <= MAX_OFFSET:
        why = _WHY_NEGATIVE if offset < 0 else ""
        raise ValueError(f"{name} must be in 0..{MAX_OFFSET}, got {offset}{why}")
    return offset


def as_position(value: Any, name: str) -> int:
    """Return the next record's offset as an int.

    Raises TypeError if it is no integer, and ValueError if it is not in ``0..2**63 - 1``.
    """
    return as_count(value, name, 0, MAX_OFFSET + 1)


def offset_column(offsets: Any) -> Int64s:
    """Return a column of 64-bit integers, signed or not, as int64 on the same memory.

    Raises TypeError for another type, and ValueError for another layout, for nulls, and for an
    offset that is not in ``0..2**63 - 2``.
    """
    column = id_column(offsets, "offsets")
    if len(column) and (column.min() < 0 or column.max() > MAX_OFFSET):
        refuse_offsets(offsets, column)
    return column


def refuse_offsets(offsets: Any, column: Int64s) -> NoReturn:
    """Raise ValueError for the first row that is not an offset.

    ``offsets`` is the column as the caller gave it, ``column`` the array made from it.
    """
    column = column.view(np.int64)
    row = int(np.argmax((column < 0) | (column > MAX_OFFSET)))
    offset = int(column[row])
    if getattr(offsets, "dtype", None) == np.uint64:
        offset %= 2**64
    why = _WHY_NEGATIVE if offset < 0 else ""
    raise ValueError(f"offsets must be in 0..{MAX_OFFSET}, got {offset} in row {row}{why}")


def check_state(state: Any) -> OffsetState:
    """Return a new `OffsetState` with arrays on the same memory.

    Raises TypeError for another type, and ValueError if its parts contradict one another.
    """
    if not isinstance(state, OffsetState):
        way_out = "; pass its state()" if hasattr(state, "from_state") else ""
        raise TypeError(f"state must be an OffsetState, got {type(state).__name__}{way_out}")
    checked = OffsetState(
        as_offset(state.committable, "committable"),
        as_position(state.end, "end"),
        id_column(state.hole_starts, "hole_starts"),
        id_column(state.hole_ends, "hole_ends"),
        id_column(state.failed, "failed"),
        task_column(state.attempts, "attempts"),
    )
    starts, ends, failed, attempts = checked[2:]
    same_length(hole_starts=starts, hole_ends=ends)
    same_length(failed=failed, attempts=attempts)
    # Runs of holes and of done offsets alternate, from the first hole to the last done offset.
    bounds = np.empty(2 * len(starts) + 1, np.int64)
    bounds[:-1:2], bounds[1::2], bounds[-1] = starts, ends, checked.end
    if bounds[0] != checked.committable:
        raise ValueError(
            f"committable must be {bounds[0]}, the first of hole_starts (or end, if there are no "
            f"holes), got {checked.committable}"
        )
    _refuse_descent("hole_starts[0], hole_ends[0], hole_starts[1], ..., end", bounds)
    _refuse_descent("failed", failed)
    refuse_rows_where("attempts", attempts, attempts < 1, "at least 1")
    # The run that each failed offset would be in; -1 if it is before the first run.
    run = np.searchsorted(starts, failed, "right") - 1
    is_done = (run < 0) | (failed >= ends[run]) if len(ends) else np.ones(len(failed), np.bool_)
    refuse_rows_where("failed", failed, is_done & (failed < checked.end), "offsets not done")
    refuse_rows_where("failed", failed, failed > MAX_OFFSET, f"in 0..{MAX_OFFSET}")
    return checked


def _refuse_descent(name: str, column: Int64s) -> None:
    down = column[1:] <= column[:-1]
    if down.any():
        row = int(np.argmax(down)) + 1
        raise ValueError(f"{name} must ascend, got {int(column[row])} after {int(column[row - 1])}")


#: The maximum number of shards; pyx/pack.h has it too.
MAX_SHARDS = 1 << 20
#: The widths of the numbers that are hashed, in bytes.
WIDTHS = (1, 2, 4, 8, 16, 32)
#: The number of functions of librdkafka that `RawMessages` calls.
RAW_FUNCTIONS = 5


def bytes_of(data: Any, name: str) -> UInt8s:
    """Return a buffer's memory as a uint8 array, not copied.

    Raises TypeError for another object, and ValueError if the buffer is not C-contiguous.
    """
    try:
        view = memoryview(data)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be bytes or another buffer, got {type(data).__name__}"
        ) from None
    if not view.c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, got a strided buffer; "
            "copy it with numpy.ascontiguousarray()"
        )
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view, np.uint8)


def in_place(column: Any, name: str) -> Int64s:
    """Return a column of 64-bit integers, which is changed in place, as int64 on its memory.

    Raises TypeError for another type, and ValueError for another layout, nulls, or read-only
    memory.
    """
    checked = id_column(column, name)
    if not checked.flags.writeable:
        raise ValueError(f"{name} must be writable, because it is changed in place; pass a copy")
    return checked


def valid_column(valid: Any, rows: int) -> UInt8s | None:
    """Return a column of booleans or bytes, 0 for a row without a value, as a uint8 array.

    None, which means that all rows have a value, is returned unchanged. Raises TypeError for
    another type, and ValueError for another layout or if there are not ``rows`` rows.
    """
    if valid is None:
        return None
    if isinstance(valid, np.ndarray) and valid.dtype == np.bool_:
        valid = valid.view(np.uint8)
    checked = uint8_column(valid, "valid")
    if len(checked) != rows:
        raise ValueError(
            f"hashes has {counted(rows, 'row')} and valid has {len(checked)}; they must pair up "
            "row by row"
        )
    return checked


def byte_offset_column(offsets: Any, rows: int | None = None) -> npt.NDArray[Any]:
    """Return the offsets of an Arrow column; row i is ``data[offsets[i]:offsets[i + 1]]``.

    Raises TypeError or ValueError unless they are a contiguous, aligned numpy array of int32 or
    int64 with ``rows + 1`` items; without ``rows``, with at least one. The values are not checked.
    """
    if not isinstance(offsets, np.ndarray) or offsets.dtype not in (np.int32, np.int64):
        got = offsets.dtype if isinstance(offsets, np.ndarray) else type(offsets).__name__
        raise TypeError(
            f"offsets of an Arrow column must be a numpy array of int32 or int64, got {got}"
        )
    if offsets.ndim != 1 or not (offsets.flags.c_contiguous and offsets.flags.aligned):
        raise ValueError(
            "offsets must be one-dimensional, C-contiguous and aligned; pass such a copy"
        )
    if rows is None and not len(offsets):
        raise ValueError("offsets must have one item more than there are rows, got 0 items")
    if rows is not None and len(offsets) != rows + 1:
        raise ValueError(
            f"offsets must have {rows + 1} items, the bounds of the bytes of {rows} rows, got "
            f"{len(offsets)}"
        )
    return offsets


def refuse_width(width: int) -> NoReturn:
    """Raise ValueError for a width in bytes that is not in `WIDTHS`."""
    raise ValueError(f"width must be one of {', '.join(map(str, WIDTHS))} bytes, got {width}")


def refuse_size(size: int, rows: int, width: int) -> NoReturn:
    """Raise ValueError for data of ``size`` bytes that is not ``rows`` numbers of ``width``."""
    raise ValueError(
        f"data must have {rows * width} bytes for {rows} rows of width {width}, got {size}"
    )


def refuse_byte_offsets(offsets: npt.NDArray[Any], row: int, size: int) -> NoReturn:
    """Raise ValueError for row ``row``: its offsets descend or are not in the ``size`` bytes."""
    raise ValueError(
        f"offsets must rise within the {size} bytes of data, "
        f"got {int(offsets[row])}..{int(offsets[row + 1])} in row {row}"
    )


def refuse_taken(place: int, row: int, rows: int) -> NoReturn:
    """Raise ValueError for ``row``, at index ``place`` of an order: it is not below ``rows``."""
    among = f"0..{rows - 1}" if rows else "no rows at all (offsets has one item)"
    raise ValueError(f"order must be row numbers in {among}, got {row} at index {place}")


def refuse_gathered() -> NoReturn:
    """Raise ValueError for a result with more bytes than int32 offsets can count."""
    raise ValueError(
        "the rows of order have more than 2**31 - 1 bytes, the most that offsets of int32 can "
        "count; cast offsets to int64"
    )


def addresses(functions: Sequence[int], queue: int) -> list[int]:
    """Return the addresses of librdkafka's functions for `RawMessages`, then the queue's, as ints.

    Raises ValueError or TypeError if there are not `RAW_FUNCTIONS` functions, or an address is no
    integer in ``1..2**64 - 1``.
    """
    if len(functions) != RAW_FUNCTIONS:
        raise ValueError(
            f"functions must be the {RAW_FUNCTIONS} addresses that RawMessages lists, in that "
            f"order, got {len(functions)}"
        )
    found = [as_count(each, "functions", 1, 2**64 - 1) for each in functions]
    return [*found, as_count(queue, "queue", 1, 2**64 - 1)]
