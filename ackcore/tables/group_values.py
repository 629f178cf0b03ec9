"""Sums and extremes of groups of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import has_offsets
from ackcore._records import Bools, Int64s
from ackcore.tables.key_groups import KeyGroups, numbers_of, valid_of


def with_nulls(column: pa.Array, kept: Bools | None) -> pa.Array:
    """Return one value per group: those of ``column``, in order, for groups that are ``kept``.

    The other groups get null. If ``kept`` is None, ``column`` has a value for each group.
    """
    return column if kept is None else column.take(pa.array(np.cumsum(kept) - 1, mask=~kept))


def sums_of(column: pa.Array, groups: KeyGroups, name: str) -> pa.Array:
    """Return the sum of each group's values in the column's type, null if all are null.

    ``column``: of int64, floats, durations or decimal128. Raises OverflowError if the type cannot
    hold a sum; ``name`` is the column's name in its text.
    """
    kind = column.type
    if not len(groups):
        return pa.array([], kind)
    rows, starts, kept = groups.only(None if not column.null_count else valid_of(column))
    if not len(starts):
        return pa.nulls(len(groups), kind)
    if pa.types.is_floating(kind):
        values = column.to_numpy(zero_copy_only=False)[rows]
        with np.errstate(invalid="ignore", over="ignore"):
            return with_nulls(pa.array(np.add.reduceat(values, starts), kind), kept)
    words = kind.bit_width // 64
    numbers = np.frombuffer(
        column.buffers()[1], np.int64, len(column) * words, column.offset * 8 * words
    ).reshape(-1, words)
    if words == 1:
        values = numbers[rows, 0]
        largest = max(-int(values.min()), int(values.max()))
        longest = int(np.diff(np.append(starts, len(rows))).max())
        if largest * longest < 2**63:
            sums = pa.array(np.add.reduceat(values, starts)).cast(kind)
            return with_nulls(sums, kept)
    exact = _exact_sums(numbers[rows], starts)
    limit = 2**63 if words == 1 else 10**kind.precision
    lowest = -limit if words == 1 else 1 - limit
    wrong = [total for total in exact if not lowest <= total < limit]
    if wrong:
        raise OverflowError(
            f"the sum of column {name!r} must fit {kind}, got {wrong[0]}; remove this aggregate "
            "from its table, start with accept_changes=True, and then add one of decimals or floats"
        )
    if words == 1:
        return with_nulls(pa.array(exact, pa.int64()).cast(kind), kept)
    raw = b"".join(total.to_bytes(16, "little", signed=True) for total in exact)
    column = pa.Array.from_buffers(kind, len(exact), [None, pa.py_buffer(raw)])
    return with_nulls(column, kept)


def _exact_sums(numbers: Any, starts: Int64s) -> list[int]:
    """Return the exact sums of groups of integers.

    ``numbers``: the 64-bit words of each integer in a row, the lowest first. ``starts``: the first
    row of each group.
    """
    totals = [0] * len(starts)
    words = numbers.shape[1]
    for word in range(words):
        for half in range(2):
            part = numbers[:, word] >> 32 if half else numbers[:, word] & 0xFFFFFFFF
            if half and word < words - 1:
                part = part & 0xFFFFFFFF
            shift = 64 * word + 32 * half
            for group, total in enumerate(np.add.reduceat(part, starts).tolist()):
                totals[group] += total << shift
    return totals


def has_order(kind: pa.DataType) -> bool:
    """Return whether values of a type can be compared: numbers, times, booleans, text or bytes."""
    types = pa.types
    is_text = has_offsets(kind) or types.is_fixed_size_binary(kind)
    is_number = types.is_primitive(kind) or types.is_decimal(kind)
    return bool(is_text or (is_number and not types.is_interval(kind)))


def _ordinals(column: pa.Array) -> Int64s:
    """Return an integer for each value; within this column they compare as the values do.

    NaN is the largest, and -0.0 equals 0.0. The integers of nulls are arbitrary.
    """
    kind, types = column.type, pa.types
    if types.is_floating(kind):
        floats = numbers_of(column).astype(np.float64) + 0.0
        floats[np.isnan(floats)] = np.nan
        order: Int64s = floats.view(np.int64)
        order ^= (order >> 63) & 0x7FFFFFFFFFFFFFFF
        return order
    narrow_decimal = types.is_decimal(kind) and kind.bit_width <= 64
    if narrow_decimal or (
        (types.is_integer(kind) or types.is_temporal(kind)) and kind != pa.uint64()
    ):
        return numbers_of(column).astype(np.int64)
    ranks = pc.rank(column, sort_keys="ascending", tiebreaker="dense")
    ordinals: Int64s = ranks.to_numpy(zero_copy_only=False).astype(np.int64)
    return ordinals


def extreme_rows(by: pa.Array, groups: KeyGroups, largest: bool, last: bool) -> pa.Array:
    """Return for each group the number of its row with the smallest value, or the largest one.

    ``by``: the column of the values. ``largest``: whether the largest value is searched. ``last``:
    whether the last of several such rows is returned, not the first. The result is an int64 column,
    with null for a group whose values are all null.
    """
    if not len(groups):
        return pa.array([], pa.int64())
    rows, starts, kept = groups.only(valid_of(by) if by.null_count else None)
    if not len(starts):
        return pa.nulls(len(groups), pa.int64())
    ordinals = _ordinals(by)[rows]
    if largest:
        np.invert(ordinals, out=ordinals)
    best = np.minimum.reduceat(ordinals, starts)
    of = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(rows))))
    places = np.flatnonzero(ordinals == best[of])
    # The first or the last of the best places of each group.
    differs = np.diff(of[places]) > 0
    found = places[np.append(differs, True) if last else np.append(True, differs)]
    return with_nulls(pa.array(rows[found]), kept)
