"""Groups rows by key, hashes keys and compares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.record_batches import (
    cast_column,
    in_ranges_of,
    offsets_of,
    valid_rows,
    with_fields,
)
from ackcore._records import Bools, Int64s, UInt64s


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which a table stores values of a type.

    It is the type of the plain values for dictionaries, run-end encodings, extensions and views,
    also within nested types. Raises pyarrow.ArrowNotImplementedError if the type contains a union
    or a list view.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return plain_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    # In pyarrow 26, a cast of a list view returns an array without its last offset.
    if types.is_union(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        raise pa.ArrowNotImplementedError("unions and list views are not supported")
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    return with_fields(kind, lambda field: field.with_type(plain_type(field.type)))


def plain(column: pa.Array) -> pa.Array:
    """Return a column in the type that `plain_type` returns for its type."""
    if isinstance(column, pa.ExtensionArray):
        return plain(column.storage)
    if pa.types.is_dictionary(column.type):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(column.type):
        return plain(pc.run_end_decode(column))
    return cast_column(column, plain_type(column.type))


def hashes_of(keys: Sequence[pa.Array], n: int) -> UInt64s:
    """Return the hash of each of the ``n`` rows' keys, given the columns of the keys."""
    return hash_columns(keys, n).view(np.uint64)


@dataclass(frozen=True)
class KeyGroups:
    """The numbers of the rows of each key; the keys are in the order of their hashes."""

    #: The row numbers: all rows of the first key, then of the second.  Keys ascend by their hash;
    #: the rows of a key are in their original order.
    order: Int64s
    #: The position in ``order`` of the first row of each key; at the end, the number of rows.
    starts: Int64s

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def firsts(self) -> Int64s:
        """The number of each key's first row."""
        return self.order[self.starts[:-1]]

    @property
    def sizes(self) -> Int64s:
        """The number of rows of each key."""
        return np.diff(self.starts)

    @property
    def numbers(self) -> Int64s:
        """The number of the key of each row, in the order of ``order``; the first key has 0."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def first_rows(self) -> Int64s:
        """Return, for each row, the number of the first row with the same key."""
        firsts = np.empty(len(self.order), np.int64)
        firsts[self.order] = np.repeat(self.firsts, self.sizes)
        return firsts

    def only(self, wanted: Bools | None) -> tuple[Int64s, Int64s, Bools | None]:
        """Leave out the rows that are not wanted, and then the keys without rows.

        ``wanted``: whether each row is wanted; None if all are. Returns ``order`` and ``starts`` of
        the remaining rows and keys, without the number of rows at the end of ``starts``; and
        whether each key remains, or None if all do.
        """
        if wanted is None or wanted.all():
            return self.order, self.starts[:-1], None
        chosen = wanted[self.order]
        starts = offsets_of(chosen)[self.starts]
        kept = starts[1:] > starts[:-1]
        return self.order[chosen], starts[:-1][kept], kept


def group_rows(hashes: UInt64s, keys: Sequence[pa.Array]) -> KeyGroups:
    """Group rows by key, given their hashes and key columns; null keys are equal.

    Different keys with the same hash are different groups.
    """
    n = len(hashes)
    order = _ascending(hashes)
    ordered = hashes[order]
    is_start = np.ones(n, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_start[1:])
    starts = np.flatnonzero(is_start)
    if len(starts) < n and _separate(order, starts, is_start, keys):
        starts = np.flatnonzero(is_start)
    return KeyGroups(order, np.append(starts, n))


#: Up to this many ascending runs are merged; more are sorted.
_FEW_RUNS = 16


def _ascending(hashes: UInt64s) -> Int64s:
    """Return the row numbers in ascending order of hashes; equal hashes keep their order."""
    n = len(hashes)
    if n > _FEW_RUNS and np.count_nonzero(hashes[1:] < hashes[:-1]) > _FEW_RUNS:
        # Sort numbers of high bits of the hash and the row: several times as fast as argsort.
        bits = np.uint64((n - 1).bit_length())
        numbers = (hashes >> bits << bits) | np.arange(n, dtype=np.uint64)
        numbers.sort()
        order = (numbers & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
        ordered = hashes[order]
        if not (ordered[1:] < ordered[:-1]).any():
            return order
    return np.argsort(hashes, kind="stable")


def _separate(order: Int64s, starts: Int64s, is_start: Bools, keys: Sequence[pa.Array]) -> bool:
    """Separate different keys of equal hash; return whether there are any.

    ``order``: the rows by hash; changed in place, so that rows of a key follow each other.
    ``starts``: the indexes in ``order`` at which a hash begins. ``is_start``: whether a hash begins
    at each index; changed in place to whether a key does.
    """
    n = len(order)
    hash_of = np.repeat(starts, np.diff(np.append(starts, n)))
    # Rows, by their index in ``order``, that have another key than the first row of their hash.
    other = np.flatnonzero(hash_of != np.arange(n))
    other = other[~rows_equal(keys, order[other], keys, order[hash_of[other]])]
    if not len(other):
        return False
    # The number of the key within its hash: rows that equal the first one have 0.
    rank = np.zeros(n, np.int64)
    number = 0
    while len(other):
        number += 1
        first_of = np.unique(hash_of[other], return_index=True)
        leader = other[first_of[1]][np.searchsorted(first_of[0], hash_of[other])]
        same = rows_equal(keys, order[other], keys, order[leader])
        rank[other[same]] = number
        other = other[~same]
    again = np.lexsort((rank, hash_of))
    order[:] = order[again]
    ranks = rank[again]
    is_start[1:] |= ranks[1:] != ranks[:-1]
    return True


def rows_equal(
    left: Sequence[pa.Array],
    left_rows: Int64s,
    right: Sequence[pa.Array],
    right_rows: Int64s | None,
) -> Bools:
    """Return for each pair of a left and a right row whether their keys are equal.

    ``left``, ``right``: the columns of the keys, of equal plain types. ``left_rows``,
    ``right_rows``: the row numbers of each pair; None for all rows of ``right``.

    The comparison is that of `values_equal`.
    """
    equal = np.ones(len(left_rows), np.bool_)
    for one, other in zip(left, right, strict=True):
        if right_rows is not None:
            other = other.take(pa.array(right_rows))
        equal &= values_equal(one.take(pa.array(left_rows)), other)
    return equal


def values_equal(left: pa.Array, right: pa.Array) -> Bools:
    """Return whether the values of two columns of the same plain type are equal, row by row.

    Nulls are equal, -0.0 equals 0.0, and all NaNs are equal, as in `hash_columns`.
    """
    kind, n = left.type, len(left)
    if pa.types.is_null(kind) or n == 0:
        return np.ones(n, np.bool_)
    if pa.types.is_struct(kind):
        equal = np.ones(n, np.bool_)
        for field in range(kind.num_fields):
            equal &= values_equal(left.field(field), right.field(field))
    elif pa.types.is_nested(kind):
        equal = _lists_equal(left, right)
    elif pa.types.is_floating(kind):
        one, other = numbers_of(left), numbers_of(right)
        equal = (one == other) | (np.isnan(one) & np.isnan(other))
    elif pa.types.is_interval(kind):
        equal = np.asarray(numbers_of(left) == numbers_of(right))
    else:
        same = pc.equal(left, right).fill_null(True)
        equal = same.to_numpy(zero_copy_only=False)
    if valid_rows(left) is None and valid_rows(right) is None:
        return equal
    one_valid, other_valid = valid_of(left), valid_of(right)
    compared: Bools = np.where(one_valid & other_valid, equal, one_valid == other_valid)
    return compared


def valid_of(column: pa.Array) -> Bools:
    """Return for each value whether it is not null."""
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.bool_)
    valid = valid_rows(column)
    return np.ones(len(column), np.bool_) if valid is None else valid != 0


def numbers_of(column: pa.Array) -> npt.NDArray[Any]:
    """Return a column of fixed-width values as numpy values, not copied; arbitrary for nulls.

    Floats stay floats. Values of up to 64 bits are integers, and longer ones raw bytes.
    """
    width = column.type.bit_width // 8
    sign = "V" if width > 8 else "u" if pa.types.is_unsigned_integer(column.type) else "i"
    dtype = f"{'f' if pa.types.is_floating(column.type) else sign}{width}"
    return np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * width)


def _lists_equal(left: pa.Array, right: pa.Array) -> Bools:
    """Return whether lists have equal lengths and items, row by row; arbitrary for nulls."""
    (one_starts, one_sizes), (other_starts, other_sizes) = _list_places(left), _list_places(right)
    equal = one_sizes == other_sizes
    sizes = np.where(equal, one_sizes, 0)
    of, one = in_ranges_of(one_starts, sizes)
    _, other = in_ranges_of(other_starts, sizes)
    items = values_equal(left.values.take(pa.array(one)), right.values.take(pa.array(other)))
    wrong = np.bincount(of[~items], minlength=len(sizes))
    same: Bools = equal & (wrong == 0)
    return same


def _list_places(column: pa.Array) -> tuple[Int64s, Int64s]:
    """Return the index of each list's first item in ``column.values``, and its length.

    The length of a null is 0.
    """
    n = len(column)
    if pa.types.is_fixed_size_list(column.type):
        starts = (np.arange(n) + column.offset) * column.type.list_size
        sizes = np.full(n, column.type.list_size, np.int64)
    else:
        offsets = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
        starts, sizes = offsets[:-1], np.diff(offsets)
    valid = valid_rows(column)
    return starts, sizes if valid is None else np.where(valid != 0, sizes, 0)
