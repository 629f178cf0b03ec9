"""Conversion of columns and numbers, and the errors for wrong ones.

Both backends use these functions for all but the most common arguments, so they accept and refuse
the same ones. A column is never copied: a returned array shares its memory and may be read-only.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ackcore._error_hints import as_float, counted
from ackcore._records import (
    FLAG_FAILED,
    FLAG_TASKS_DIFFER,
    RESET,
    Entries,
    Int32s,
    Int64s,
    LedgerFull,
    UInt8s,
)

MAX_TASK = 2**31 - 1
MIN_BUCKETS, MAX_BUCKETS = 2, 126
#: The largest capacity that can be reserved: the native table has up to 2**32 buckets, with 92
#: entries per 64 buckets (pyx/layout.h).
MAX_CAPACITY = (1 << 26) * 92 - 4096

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
#: The marks of native byte order in a buffer's format; no mark also means native.
_NATIVE_ORDER = "@=" + ("<" if sys.byteorder == "little" else ">")


class _Kind(NamedTuple):
    """The types that the items of a column may have: of numpy, buffers and Arrow."""

    words: str
    dtype: np.dtype[Any]
    formats: str  # struct's letters; the width is checked too, because ctypes uses other letters
    arrow: tuple[str, ...]
    signs: str  # numpy's kinds


# 64-bit ids are bit patterns, so they may be signed or not.
_IDS = _Kind("64-bit integers", np.dtype(np.int64), "qQlLnN", ("int64", "uint64"), "iu")
_TASKS = _Kind("32-bit signed integers", np.dtype(np.int32), "ilq", ("int32",), "i")
_BYTES = _Kind("8-bit unsigned integers", np.dtype(np.uint8), "B", ("uint8",), "u")


def id_column(column: Any, name: str) -> Int64s:
    """Return a column of 64-bit integers, signed or not, as an int64 array on the same memory.

    ``column``: a numpy array, an Arrow array or another buffer. Raises TypeError for other objects
    and other items, and ValueError for nulls, several dimensions, strides, or unaligned memory.
    """
    return _column(column, name, _IDS)


def task_column(column: Any, name: str) -> Int32s:
    """Return a column of 32-bit signed integers as int32. Forms and errors: see `id_column`."""
    return _column(column, name, _TASKS)


def uint8_column(column: Any, name: str) -> UInt8s:
    """Return a column of 8-bit unsigned integers as uint8. Forms and errors: see `id_column`."""
    return _column(column, name, _BYTES)


def _column(column: Any, name: str, kind: _Kind) -> npt.NDArray[Any]:
    if isinstance(column, np.ndarray):
        return _from_numpy(column, name, kind)
    # If pyarrow was not imported, or another thread is importing it, this is not its array.
    arrow = sys.modules.get("pyarrow")
    if isinstance(column, (getattr(arrow, "Array", ()), getattr(arrow, "ChunkedArray", ()))):
        return _from_arrow(column, name, kind)
    return _from_buffer(column, name, kind)


def _from_numpy(column: npt.NDArray[Any], name: str, kind: _Kind) -> npt.NDArray[Any]:
    if isinstance(column, np.ma.MaskedArray):
        raise TypeError(
            f"{name} must not be a masked array; drop the masked rows with .compressed() first"
        )
    dtype = column.dtype
    if dtype.kind not in kind.signs or dtype.itemsize != kind.dtype.itemsize or not dtype.isnative:
        _refuse_items(name, kind, f"items of dtype {dtype.str if dtype.kind in 'iu' else dtype}")
    _check_layout(name, column.ndim, column.flags.c_contiguous)
    return _aligned(np.asarray(column), name, kind)


def _from_arrow(column: Any, name: str, kind: _Kind) -> npt.NDArray[Any]:
    if not hasattr(column, "buffers"):
        raise TypeError(
            f"{name} must be contiguous memory, got a ChunkedArray of {column.num_chunks} "
            "chunks; pass its chunks one by one, or .combine_chunks() first"
        )
    if str(column.type) not in kind.arrow:
        _refuse_items(name, kind, f"an Arrow array of {column.type}")
    if column.null_count:
        raise ValueError(
            f"{name} must not hold nulls, got {column.null_count} of {len(column)} rows; "
            "fill or drop them first"
        )
    if len(column) == 0:
        return np.empty(0, kind.dtype)
    values = column.buffers()[1]
    start = column.offset * kind.dtype.itemsize
    return _aligned(np.frombuffer(values, kind.dtype, len(column), start), name, kind)


def _from_buffer(column: Any, name: str, kind: _Kind) -> npt.NDArray[Any]:
    try:
        view = memoryview(column)
    except TypeError:
        way_out = (
            f"pass {name}.to_numpy()"
            if hasattr(column, "to_numpy")
            else f"numpy.array(..., dtype=numpy.{kind.dtype}) makes one"
        )
        raise TypeError(
            f"{name} must be an array or another buffer of {kind.words}, "
            f"got {type(column).__name__}; {way_out}"
        ) from None
    order, letter = view.format[:-1], view.format[-1:]
    if (
        letter not in kind.formats
        or view.itemsize != kind.dtype.itemsize
        or (order and order not in _NATIVE_ORDER)
    ):
        _refuse_items(name, kind, f"items of format {view.format!r} ({view.itemsize} bytes)")
    _check_layout(name, view.ndim, view.c_contiguous)
    if len(view) == 0:
        return np.empty(0, kind.dtype)
    return _aligned(np.frombuffer(view, kind.dtype), name, kind)


def _refuse_items(name: str, kind: _Kind, got: str) -> NoReturn:
    raise TypeError(
        f"{name} must hold {kind.words}, got {got}; cast the column to {kind.dtype} first"
    )


def _check_layout(name: str, ndim: int, c_contiguous: bool) -> None:
    if ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got {ndim} dimensions")
    if not c_contiguous:
        raise ValueError(
            f"{name} must be C-contiguous, got a strided column; "
            "copy it with numpy.ascontiguousarray()"
        )


def _aligned(column: npt.NDArray[Any], name: str, kind: _Kind) -> npt.NDArray[Any]:
    if not column.flags.aligned:
        raise ValueError(
            f"{name} must start at a multiple of {kind.dtype.itemsize} bytes of memory; "
            "copy it first"
        )
    return column.view(kind.dtype)


def same_length(**columns: Any) -> int:
    """Return the length of the named columns; raise ValueError if they differ in length."""
    (first, rows), *others = ((name, len(column)) for name, column in columns.items())
    for name, length in others:
        if length != rows:
            raise ValueError(
                f"{first} has {counted(rows, 'row')} and {name} has {length}; they must pair up "
                "row by row"
            )
    return rows


def message_columns(method: str, given: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the columns of a call of ``method`` as arrays on the same memory, by name.

    Raises TypeError for another type, and ValueError for different lengths, or a task that the
    method does not take.
    """
    columns: dict[str, npt.NDArray[Any]] = {
        name: task_column(column, name) if name == "tasks" else id_column(column, name)
        for name, column in given.items()
    }
    same_length(**columns)
    if method == "apply":
        check_kinds(columns["tasks"])
    elif method == "init_many":
        check_init_tasks(columns["tasks"])
    return columns


def check_kinds(tasks: Int32s) -> None:
    """Raise ValueError if a task of a mixed batch is below RESET, -3, the lowest number."""
    refuse_rows_where(
        "tasks", tasks, tasks < RESET, "a task >= 0 (INIT), -1 (ACK), -2 (FAIL) or -3 (RESET)"
    )


def check_init_tasks(tasks: Int32s) -> None:
    """Raise ValueError if the ``tasks`` of INITs have a negative number."""
    refuse_rows_where("tasks", tasks, tasks < 0, f"in 0..{MAX_TASK}")


def check_entries(entries: Any, buckets: int, timed: bool) -> Entries:
    """Return entries with their columns as arrays, after a check that a ledger can hold each row.

    ``entries``: the entries to check, with columns of any accepted type. ``buckets``: the ledger's
    number of buckets; all ages must be below. ``timed``: whether the ledger has a clock: the
    entries must then have times, and otherwise none.

    Returns the same rows on the same memory, with all columns as numpy arrays. Raises TypeError if
    the entries or a column have another type, and ValueError if a row is not valid.
    """
    if not isinstance(entries, Entries):
        # A ledger of either backend, without importing one.
        way_out = "; pass its entries()" if hasattr(entries, "from_entries") else ""
        raise TypeError(f"entries must be ackcore.Entries, got {type(entries).__name__}{way_out}")
    if (entries.first_ms is None) != (entries.last_ms is None):
        missing = "first_ms" if entries.first_ms is None else "last_ms"
        raise ValueError(
            f"entries must have both first_ms and last_ms or neither, got no {missing}; give both, "
            "or set both to None"
        )
    if timed and entries.first_ms is None:
        raise ValueError(
            "entries have no times and the ledger has a clock; "
            "give them first_ms and last_ms, or use a ledger without a clock"
        )
    if not timed and entries.first_ms is not None:
        raise ValueError(
            "entries have times and the ledger has no clock; "
            "give the ledger a clock, or set first_ms and last_ms to None"
        )
    checked = Entries(
        id_column(entries.root_ids, "root_ids"),
        id_column(entries.vals, "vals"),
        task_column(entries.tasks, "tasks"),
        uint8_column(entries.inits, "inits"),
        uint8_column(entries.flags, "flags"),
        uint8_column(entries.ages, "ages"),
        id_column(entries.first_ms, "first_ms") if timed else None,
        id_column(entries.last_ms, "last_ms") if timed else None,
    )
    same_length(**checked.columns())
    tasks, inits, flags, ages = checked.tasks, checked.inits, checked.flags, checked.ages
    refuse_rows_where("tasks", tasks, tasks < -1, "a task, or -1 before the init")
    refuse_rows_where("inits", inits, inits > 2, "0, 1, or 2 for more")
    refuse_rows_where(
        "inits", inits, (inits > 0) != (tasks >= 0), "> 0 exactly where tasks are >= 0"
    )
    refuse_rows_where("flags", flags, flags > FLAG_FAILED | FLAG_TASKS_DIFFER, "in 0..3")
    refuse_rows_where(
        "flags",
        flags,
        (flags & FLAG_TASKS_DIFFER != 0) & (inits != 2),
        "without FLAG_TASKS_DIFFER where inits are below 2",
    )
    refuse_rows_where("ages", ages, ages >= buckets, f"below the ledger's {buckets} buckets")
    return checked


def refuse_rows_where(name: str, column: npt.NDArray[Any], wrong: Any, must_be: str) -> None:
    """Raise ValueError for the first row where the mask ``wrong`` is set; return if none is.

    ``must_be``: the text of the error after "``name`` must be".
    """
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"{name} must be {must_be}, got {int(column[row])} in row {row}")


def times_column(times_ms: Any, timed: bool) -> Int64s | None:
    """Return the argument ``times_ms`` of `Ledger.fold` as an int64 array; None if it is None.

    ``timed``: whether the ledger has a clock. Without one, times raise ValueError.
    """
    if times_ms is None:
        return None
    if not timed:
        raise ValueError(
            "times_ms was given and the ledger has no clock, so it keeps no times; "
            "give the ledger a clock, or leave times_ms out"
        )
    return id_column(times_ms, "times_ms")


def as_id(value: Any, name: str) -> int:
    """Return a 64-bit integer, signed or not, as a signed int. A bool is an id like 0 or 1.

    Raises TypeError if it is no integer, and OverflowError if it has more bits.
    """
    number = int(value) if isinstance(value, bool) else as_int(value, name)
    if not _INT64_MIN <= number < 2**64:
        raise OverflowError(f"{name} must fit in 64 bits (-2**63..2**64-1), got {number}")
    return signed(number)


def signed(bits: int) -> int:
    """Return the low 64 bits of an int as a signed int."""
    return ((bits - _INT64_MIN) & (2**64 - 1)) + _INT64_MIN


def as_count(value: Any, name: str, least: int, most: int | None = None) -> int:
    """Return an integer as an int.

    Raises TypeError if it is no integer; ValueError below ``least``, or above a given ``most``.
    """
    count = as_int(value, name)
    if most is not None and not least <= count <= most:
        raise ValueError(f"{name} must be in {least}..{most}, got {count}")
    if count < least:
        raise ValueError(f"{name} must be at least {least}, got {count}")
    return count


def count_or_none(value: Any, name: str, least: int) -> int | None:
    """Return None, or an integer as an int.

    Raises TypeError if it is neither, and ValueError if it is below ``least``.
    """
    return None if value is None else as_count(value, name, least)


def as_ms(value: Any, name: str) -> int:
    """Return a time in milliseconds as an int; raise TypeError, or OverflowError beyond int64."""
    ms = as_int(value, name)
    if not _INT64_MIN <= ms <= _INT64_MAX:
        raise OverflowError(f"{name} must be milliseconds in -2**63..2**63-1, got {ms}")
    return ms


def as_int(value: Any, name: str) -> int:
    """Return an integer of any type with ``__index__`` as an int; raise TypeError for others.

    A bool is refused: an argument such as ``capacity=True`` is a mistake.
    """
    if not isinstance(value, bool):
        try:  # each call of a ledger with a clock comes here: contextlib.suppress would cost 0.5 us
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, got {type(value).__name__}")


def real(value: Any, name: str, unit: str = "") -> float:
    """Return a real number of any type, such as a `decimal.Decimal` or one of numpy's, as a float.

    A number that is too large for a float becomes infinity; NaN passes. ``unit``: the unit of the
    value, for the error. Raises TypeError if it is not a number, or a bool.
    """
    number = as_float(value)
    if number is None:
        of_unit = f" of {unit}" if unit else ""
        raise TypeError(f"{name} must be a number{of_unit}, got {type(value).__name__} {value!r}")
    return number


def positive(value: Any, name: str, most: float = math.inf, unit: str = "") -> float:
    """Return a number above 0, finite and at most ``most``, as a float.

    ``unit``: the unit of the value, for the error. Raises TypeError if it is not a number, and
    ValueError if it is out of range or NaN.
    """
    number = real(value, name, unit)
    if not 0 < number <= most or number == math.inf:
        high = f" and at most {most:g}" if most < math.inf else " and finite"
        raise ValueError(f"{name} must be above 0{high}, got {value}")
    return number


def nanoseconds(value: Any, name: str) -> int:
    """Return seconds as whole nanoseconds, at least 1.

    Raises TypeError if they are no number, and ValueError unless they are above 0 and at most 1e9.
    """
    # 1e9 s are 31 years: floats of that size are exact to the millisecond.
    return max(1, round(positive(value, name, 1e9, "seconds") * 1e9))


def read_clock(clock: Callable[[], int]) -> int:
    """Call a ledger's clock, and return its time in milliseconds.

    Raises TypeError if it returns no integer, and OverflowError if that exceeds int64.
    """
    return as_ms(clock(), "the milliseconds that clock returns")


def timeout_ms(timeout_s: Any) -> int | None:
    """Return seconds as whole milliseconds, rounded up; None for None.

    Raises TypeError if ``timeout_s`` is not a number, and ValueError if it is not in ``0..2**62``
    milliseconds.
    """
    if timeout_s is None:
        return None
    seconds = real(timeout_s, "timeout_s", "seconds")
    if not 0 <= seconds <= 2**62 / 1000:
        raise ValueError(
            f"timeout_s must be at least 0 and at most {2**62 / 1000:g}, got {timeout_s}"
        )
    # Slightly less than the ceiling: 2.007 * 1000 is 2007.0000000000002.
    return max(0, math.ceil(seconds * 1000 - 1e-6))


def deadline(now_ms: Any, timeout_ms: Any, clock: Callable[[], int] | None) -> int | None:
    """Return the time ``timeout_ms`` before now: an entry whose last message is earlier timed out.

    ``now_ms``: the time; the clock's by default. ``timeout_ms``: the time-out, at least 0, or None.
    Returns None without a time-out. A result below the range of 64-bit integers means that no entry
    has timed out. Raises ValueError for a time-out without a clock, also if ``now_ms`` is given.
    """
    now = None if now_ms is None else as_ms(now_ms, "now_ms")
    if timeout_ms is None:
        return None
    timeout = as_count(timeout_ms, "timeout_ms", 0)
    if clock is None:
        raise ValueError(
            "timeout_ms was given and the ledger has no clock, so it keeps no times; "
            "give the ledger a clock, or leave timeout_ms out"
        )
    return (read_clock(clock) if now is None else now) - timeout


class Options(NamedTuple):
    """The checked constructor arguments of a ledger."""

    capacity: int
    buckets: int
    refresh_on_ack: bool
    clock: Callable[[], int] | None
    max_entries: int | None
    seed: int | None


def ledger_options(
    capacity: Any, buckets: Any, refresh_on_ack: Any, clock: Any, max_entries: Any, seed: Any
) -> Options:
    """Check and return a ledger's arguments.

    Raises MemoryError for too large a capacity, else TypeError, ValueError or OverflowError.
    """
    if clock is not None and not callable(clock):
        raise TypeError(
            f"clock must be a callable that returns milliseconds, got {type(clock).__name__}"
        )
    room = as_count(capacity, "capacity", 1)
    if room > MAX_CAPACITY:
        raise MemoryError(
            f"capacity must be at most {MAX_CAPACITY} entries, got {room}; pass a smaller "
            "capacity: a ledger grows on demand"
        )
    return Options(
        room,
        as_count(buckets, "buckets", MIN_BUCKETS, MAX_BUCKETS),
        bool(refresh_on_ack),
        clock,
        None if max_entries is None else as_count(max_entries, "max_entries", 1),
        None if seed is None else as_id(seed, "seed"),
    )


def refuse_full(pending: int, new: int, max_entries: int) -> NoReturn:
    """Raise `LedgerFull` for a call with ``new`` rows of roots that are not ``pending`` yet."""
    raise LedgerFull(
        f"the ledger has {pending} pending roots, and {new} rows of this call are of other roots, "
        f"which may exceed max_entries={max_entries}; nothing was applied; try again when some "
        "roots have completed, or set a higher max_entries"
    )
