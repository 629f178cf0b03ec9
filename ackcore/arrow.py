"""Arrow columns in, Arrow tables out: what a ledger takes and hands out, uncopied.

A ledger reads Arrow arrays by itself; this module adds what batches of them need: columns by
name, nulls refused with their place, entries and decisions as record batches; and what sends rows
through a shuffle: hashes, by which equal ones go to one place, and taking them in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore import _columns
from ackcore._records import Entries, Int64s, Settled, Status, UInt8s
from ackcore._reference.rows import fold_values
from ackcore._shuffle import gather_binary, hash_binary, hash_fixed

#: Status names by number, as settled tables show them.
STATUS_NAMES = tuple(status.name for status in Status)

#: A ledger's columns as tables show them: singular names, and no unsigned numbers, which
#: neither Spark nor the JVM knows.
ENTRY_SCHEMA = pa.schema(
    [
        ("root_id", pa.int64()),
        ("val", pa.int64()),
        ("task", pa.int32()),
        ("inits", pa.int8()),
        ("flags", pa.int8()),
        ("first_ms", pa.int64()),
        ("last_ms", pa.int64()),
    ]
)


def is_text(arrow_type: pa.DataType) -> bool:
    """Whether a column of this type holds text, in whichever of Arrow's layouts."""
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_string_view(arrow_type)
    )


def refuse_nulls(column: pa.Array, name: str) -> None:
    """Raise `ValueError` if a column has nulls, with their number and the first one's row."""
    if column.null_count:
        first = pc.index(pc.is_null(column), True).as_py()
        raise ValueError(
            f"{name} must not hold nulls, got {column.null_count} of {len(column)} rows, the first "
            f"in row {first}; drop these rows or give them a value first"
        )


def integers(column: pa.Array, name: str, arrow_type: pa.DataType) -> npt.NDArray[Any]:
    """Return an Arrow column of integers as a numpy array.

    Parameters
    ----------
    column : pyarrow.Array
        Integers of any width without nulls; those of ``arrow_type`` are not copied.
    name : str
        What messages call the column.
    arrow_type : pyarrow.DataType
        The integers to return.

    Raises
    ------
    TypeError
        If the column does not hold integers.
    ValueError
        If it has nulls, or a number that ``arrow_type`` has no room for.
    """
    if not pa.types.is_integer(column.type):
        raise TypeError(f"{name} must hold integers, got Arrow's {column.type}; cast it first")
    refuse_nulls(column, name)
    if column.type != arrow_type:
        try:
            column = column.cast(arrow_type)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{name} must fit {arrow_type}: {error}") from None
    return column.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]


def status_names(statuses: UInt8s) -> pa.Array:
    """Return the names of a column of statuses as an Arrow string column."""
    indices = pa.array(statuses.view(np.int8))
    return pa.DictionaryArray.from_arrays(indices, list(STATUS_NAMES)).cast(pa.string())


def entries_to_batch(entries: Entries) -> pa.RecordBatch:
    """Return entries as a record batch of `ENTRY_SCHEMA`; ages are left out.

    Times are null where the entries have none.
    """
    return _batch(entries)


def entries_from_batch(batch: pa.RecordBatch, name: str = "entries") -> Entries:
    """Return the rows of a record batch as entries of age 0.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        With the columns of `ENTRY_SCHEMA`, in any order and among others.  Times are either
        all null or none.
    name : str, default "entries"
        What messages call the table.

    Raises
    ------
    TypeError
        If a column is missing or holds no integers.
    ValueError
        If there are nulls, or rows that no ledger holds.
    """
    columns = {field.name: _member(batch, field.name, name) for field in ENTRY_SCHEMA}
    times = [columns.pop("first_ms"), columns.pop("last_ms")]
    timed = any(time.null_count < len(time) for time in times)
    numbers = {
        column: integers(values, f"{name}: {column}", ENTRY_SCHEMA.field(column).type)
        for column, values in columns.items()
    }
    first_ms, last_ms = (
        (
            integers(time, f"{name}: {column}", pa.int64())
            for column, time in zip(("first_ms", "last_ms"), times, strict=True)
        )
        if timed
        else (None, None)
    )
    entries = Entries(
        numbers["root_id"],
        numbers["val"],
        numbers["task"],
        numbers["inits"].view(np.uint8),
        numbers["flags"].view(np.uint8),
        np.zeros(len(batch), np.uint8),
        first_ms,
        last_ms,
    )
    try:
        return _columns.check_entries(entries, _columns.MIN_BUCKETS, timed)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def settled_to_batch(settled: Settled) -> pa.RecordBatch:
    """Return decisions as a record batch: ``root_id, status``, then the rest of `ENTRY_SCHEMA`."""
    batch = _batch(settled)
    return batch.add_column(1, "status", status_names(settled.statuses))


def _batch(table: Entries | Settled) -> pa.RecordBatch:
    n = len(table)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(table.root_ids),
            pa.array(table.vals),
            pa.array(table.tasks),
            pa.array(table.inits.view(np.int8)),
            pa.array(table.flags.view(np.int8)),
            _or_nulls(table.first_ms, n),
            _or_nulls(table.last_ms, n),
        ],
        schema=ENTRY_SCHEMA,
    )


def _or_nulls(column: Int64s | None, n: int) -> pa.Array:
    return pa.nulls(n, pa.int64()) if column is None else pa.array(column)


def _member(batch: pa.RecordBatch, column: str, name: str) -> pa.Array:
    if column not in batch.schema.names:
        raise TypeError(f"{name} must have a column {column}, got {', '.join(batch.schema.names)}")
    return batch.column(column)


def hash_columns(columns: Sequence[pa.Array], n: int) -> Int64s:
    """Return a hash of each row, the same for equal rows in every process and version.

    Floats are taken as numbers: -0.0 equals 0.0, and every NaN every other.  Integers and floats
    hash alike in each of their widths, text and bytes in each of Arrow's layouts, and a
    dictionary as what it stands for.  Nulls equal nulls.

    Parameters
    ----------
    columns : sequence of pyarrow.Array
        Any types but maps and unions, at whatever depth; all of ``n`` rows.
    n : int
        Number of rows; needed where there are no columns, whose rows are all equal.

    Returns
    -------
    numpy.ndarray of int64, shape (n,)
        Rows of which one column differs have other hashes by the odds of 64 bits.

    Raises
    ------
    TypeError
        If a column is no Arrow array, or its type has a map or a union in it.
    ValueError
        If a column has not ``n`` rows.
    """
    hashes = np.zeros(n, np.int64)
    for number, column in enumerate(columns):
        if not isinstance(column, pa.Array):
            raise TypeError(
                f"columns must be Arrow arrays, got {type(column).__name__} in place {number}; "
                "pass the chunks of a ChunkedArray one by one, or .combine_chunks() first"
            )
        if len(column) != n:
            raise ValueError(f"columns must have {n} rows, got {len(column)} in place {number}")
        try:
            _hash_into(hashes, column)
        except _NotHashed as error:
            raise TypeError(
                f"columns cannot be hashed by {error}, got {column.type} in place {number}; "
                "take fields or entries out of it, or turn it to text, and hash those"
            ) from None
    return hashes


def bytes_before(batch: pa.RecordBatch, row: int) -> int:
    """Return how many bytes the rows before one take: by what they hold, not how it lies.

    Of types that keep values outside of their rows (dictionaries, views) each row counts alike.
    """
    return sum(_bytes_before(column, row) for column in batch.columns)


def end_within(batch: pa.RecordBatch, start: int, most_bytes: int) -> int:
    """Return where the longest run of rows from ``start`` on ends that has no more bytes."""
    most = bytes_before(batch, start) + most_bytes
    ends = range(start, len(batch) + 1)
    return ends[max(0, bisect_right(ends, most, key=lambda row: bytes_before(batch, row)) - 1)]


def one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return batches of one schema, at least one of them, as one.

    Raises
    ------
    pyarrow.ArrowInvalid
        If a column then has more than 2 GiB of text or bytes: `rebatched` cuts before that.
    """
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def rebatched(
    batches: Iterable[pa.RecordBatch], rows: int, most_bytes: int = 1 << 28
) -> Iterator[pa.RecordBatch]:
    """Put batches together or take them apart, so that each has so many rows, but for the last.

    Of long rows there are fewer: as many as have ``most_bytes``, and one at least.  So rows are cut
    by position and by what they hold, however they came; and what they came in does not show in
    their bytes, once serialized, as it does in those of a slice.
    """
    waiting: list[pa.RecordBatch] = []
    n = size = 0
    sliced = False
    for batch in batches:
        start = 0
        while start < len(batch):
            stop = min(len(batch), start + rows - n)
            before = bytes_before(batch, start)
            if size + bytes_before(batch, stop) - before > most_bytes:
                stop = max(end_within(batch, start, most_bytes - size), start + (not waiting))
            if stop > start:
                waiting.append(batch.slice(start, stop - start))
                n += stop - start
                size += bytes_before(batch, stop) - before
                sliced |= stop - start < len(batch)
            if stop < len(batch) or n == rows:
                yield _together(waiting, sliced)
                waiting, n, size, sliced = [], 0, 0, False
            start = stop
    if waiting:
        yield _together(waiting, sliced)


def _together(batches: list[pa.RecordBatch], sliced: bool) -> pa.RecordBatch:
    # A slice is copied: serialized, it would have some of its neighbours for padding.
    return pa.concat_batches(batches) if sliced else one_batch(batches)


def _bytes_before(column: pa.Array, row: int) -> int:
    arrow_type, types = column.type, pa.types
    if not row:
        return 0
    if isinstance(column, pa.ExtensionArray):
        return _bytes_before(column.storage, row)
    if _has_offsets(arrow_type):
        offsets, _ = _strings(column)
        return int(offsets[row]) - int(offsets[0]) + _OFFSET_BYTES * row
    if types.is_struct(arrow_type):
        return sum(_bytes_before(column.field(n), row) for n in range(arrow_type.num_fields))
    if types.is_fixed_size_list(arrow_type):
        size = arrow_type.list_size
        return _bytes_before(column.values.slice(column.offset * size), row * size)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_map(arrow_type):
        start, end = column.offsets[0].as_py(), column.offsets[row].as_py()
        parts = (column.keys, column.items) if types.is_map(arrow_type) else (column.values,)
        inside = sum(_bytes_before(part.slice(start), end - start) for part in parts)
        return inside + _OFFSET_BYTES * row
    try:
        return row * max(1, int(arrow_type.bit_width) // 8)
    except ValueError:  # of a type that has no width
        return row * _OTHER_BYTES


_OFFSET_BYTES, _OTHER_BYTES = 4, 16


def take_rows(batch: pa.RecordBatch, order: Int64s) -> pa.RecordBatch:
    """Return rows of a batch in another order, as ``batch.take`` does, but faster with text.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        Of any types that Arrow can take.
    order : numpy.ndarray of int64
        Row numbers.

    Returns
    -------
    pyarrow.RecordBatch
        Its bytes, once serialized, depend on the rows and nothing else: there is no memory in it
        that was not written.  Spark gives a job up whose tasks, run again, write other bytes.

    Raises
    ------
    ValueError
        If there is no row of one of the numbers.
    """
    indices = pa.array(order)
    if not batch.columns:
        return batch.take(indices)  # from no arrays there would be no rows
    try:
        columns = [_take(column, order, indices) for column in batch.columns]
    except pa.ArrowIndexError as error:
        raise ValueError(
            f"order must be row numbers of the {len(batch)} rows of batch: {error}"
        ) from None
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _take(column: pa.Array, order: Int64s, indices: pa.Array) -> pa.Array:
    if not len(column) or not _has_offsets(column.type):
        return column.take(indices)  # an empty array may have no offsets
    offsets, data = gather_binary(*_strings(column), order)
    valid, bits = _valid(column), None
    if valid is not None:
        bits = pa.py_buffer(np.packbits(valid[order], bitorder="little"))
    buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(column.type, len(order), buffers)


class _NotHashed(Exception):
    """Says of which type, somewhere inside a column, there are no hashes."""


def offsets_of(sizes: npt.ArrayLike) -> Int64s:
    """Return where each list starts, and the last one ends, from their sizes."""
    found = np.zeros(len(np.asarray(sizes)) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def _hash_into(hashes: Int64s, column: pa.Array) -> None:
    """Mix a column into the hash of each row."""
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
        # Empty arrays may lack the buffers that are read below; but what is inside is checked.
        for field in range(arrow_type.num_fields):
            _hash_into(hashes, pa.nulls(0, arrow_type.field(field).type))
    elif types.is_dictionary(arrow_type):
        _hash_dictionary(hashes, column)
    elif types.is_struct(arrow_type):
        inner = np.zeros(n, np.int64)
        for field in range(arrow_type.num_fields):
            _hash_into(inner, column.field(field))
        # A null struct is not one of nulls.
        hash_fixed(hashes, inner, 8, _valid(column))
    elif types.is_nested(arrow_type):
        _hash_lists(hashes, column)
    elif _has_offsets(arrow_type):
        hash_binary(hashes, *_strings(column), _valid(column))
    elif types.is_string_view(arrow_type) or types.is_binary_view(arrow_type):
        hash_binary(hashes, *_strings(column.cast(pa.large_binary())), _valid(column))
    elif types.is_fixed_size_binary(arrow_type):
        places = np.arange(column.offset, column.offset + n + 1, dtype=np.int64)
        data = _memory(column.buffers()[1])
        hash_binary(hashes, places * arrow_type.byte_width, data, _valid(column))
    else:
        data, width = _numbers(column)
        hash_fixed(hashes, data, width, _valid(column))


def _numbers(column: pa.Array) -> tuple[npt.NDArray[Any], int]:
    """Return a column's numbers and their width; equal ones have equal bytes."""
    arrow_type, n = column.type, len(column)
    if pa.types.is_boolean(arrow_type):
        return _bits(column.buffers()[1], column.offset, n), 1
    width = arrow_type.bit_width // 8
    data = np.frombuffer(column.buffers()[1], np.uint8, n * width, column.offset * width)
    if pa.types.is_floating(arrow_type):
        with np.errstate(invalid="ignore"):  # a signalling NaN, maybe behind a null
            floats = data.view(f"f{width}").astype(np.float64)
            floats += 0.0  # makes -0.0 into 0.0
        floats[np.isnan(floats)] = np.nan
        return floats, 8
    if pa.types.is_unsigned_integer(arrow_type):
        # Below 2**63 the same as signed ones.
        return data.view(f"u{width}").astype(np.uint64), 8
    return data, width


def _strings(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the offsets and the bytes of a column that has them, and has rows."""
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    _, starts, data = column.buffers()
    offsets = np.frombuffer(starts, dtype, len(column) + 1, column.offset * dtype.itemsize)
    return offsets, _memory(data)


def _hash_dictionary(hashes: Int64s, column: pa.Array) -> None:
    """Hash each entry once, and take."""
    entries = len(column.dictionary)
    if entries > len(column):
        # What was cut out of a longer column may bring a dictionary of any length.
        _hash_into(hashes, column.dictionary_decode())
        return
    of_entry = np.zeros(entries, np.int64)
    _hash_into(of_entry, column.dictionary)
    indices = column.indices.fill_null(0).cast(pa.int64()).to_numpy(zero_copy_only=True)
    # Where all rows are null there may be no entry.
    of_row = of_entry[indices] if entries else np.zeros(len(column), np.int64)
    fold_values(hashes, of_row, _valid(column.indices))


def _hash_lists(hashes: Int64s, column: pa.Array) -> None:
    """Sum up the hashes of a row's items, each mixed with its place, then mix in their number."""
    n = len(column)
    valid = _valid(column)
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
        # Steps of the golden ratio, as 64 bits with a sign.
        placed = of_item[items - first] + (in_row + 1) * -0x61C8864680B583EB
        mixed = np.zeros(total, np.int64)
        hash_fixed(mixed, placed, 8)
        # Sums of 64 bits wrap, and so do their differences.
        np.cumsum(mixed, out=mixed)
        sums[1:] = np.concatenate([[0], mixed])[ends]
    else:
        _hash_into(np.zeros(0, np.int64), column.values.slice(0, 0))
    inner = np.diff(sums)
    hash_fixed(inner, lengths, 8)
    hash_fixed(hashes, inner, 8, valid)


def _has_offsets(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_binary(arrow_type)
        or pa.types.is_large_binary(arrow_type)
    )


def _valid(column: pa.Array) -> UInt8s | None:
    """Return which rows have a value, a byte each, or None if all have."""
    if not column.null_count:
        return None
    return _bits(column.buffers()[0], column.offset, len(column))


def _bits(bitmap: pa.Buffer, start: int, n: int) -> UInt8s:
    first, last = start // 8, (start + n + 7) // 8
    octets = np.frombuffer(bitmap, np.uint8, last - first, first)
    return np.unpackbits(octets, bitorder="little")[start % 8 : start % 8 + n]


def _memory(buffer: pa.Buffer | None) -> npt.NDArray[Any]:
    """Return a buffer's bytes; where all rows are empty there may be none."""
    return np.empty(0, np.uint8) if not buffer else np.frombuffer(buffer, np.uint8)
