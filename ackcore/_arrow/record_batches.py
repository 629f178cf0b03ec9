"""Record batches: concatenated, cut by rows and bytes, and taken in another order.

Also the buffers of an Arrow column, as numpy arrays that share its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._backend import gather_binary
from ackcore._error_hints import counted
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


def is_list(arrow_type: pa.DataType) -> bool:
    """Return whether a type is one of lists of any length or of a fixed length, but not views."""
    return isinstance(arrow_type, pa.ListType | pa.LargeListType | pa.FixedSizeListType)


def has_type(kind: pa.DataType, is_type: Callable[[pa.DataType], bool]) -> bool:
    """Return whether ``is_type`` is true for a type or one inside it.

    A dictionary counts as its values.
    """
    if pa.types.is_dictionary(kind):
        return has_type(kind.value_type, is_type)
    parts = (kind.field(at).type for at in range(kind.num_fields))
    return is_type(kind) or any(has_type(part, is_type) for part in parts)


def with_fields(kind: pa.DataType, change: Callable[[pa.Field], pa.Field]) -> pa.DataType:
    """Return a struct, map or list type with changed fields, and any other type unchanged.

    A map has the fields of its keys, which are never nullable, and of its values.
    """
    if pa.types.is_struct(kind):
        return pa.struct(map(change, kind))
    if pa.types.is_map(kind):
        key = change(kind.key_field).with_nullable(False)
        return pa.map_(key, change(kind.item_field), kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(change(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(change(kind.value_field))
    return pa.list_(change(kind.value_field)) if pa.types.is_list(kind) else kind


def has_offsets(arrow_type: pa.DataType) -> bool:
    """Return whether a column of this type has offsets into bytes: text or bytes, but not views."""
    return bool(
        pa.types.is_string(arrow_type)
        or pa.types.is_large_string(arrow_type)
        or pa.types.is_binary(arrow_type)
        or pa.types.is_large_binary(arrow_type)
    )


def strings(column: pa.Array) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the offsets and the bytes of a nonempty column of text or bytes with offsets.

    Row i is ``data[offsets[i]:offsets[i + 1]]``; in a slice the first offset is not 0.
    """
    wide = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    _, starts, data = column.buffers()
    offsets = np.frombuffer(starts, dtype, len(column) + 1, column.offset * dtype.itemsize)
    return offsets, bytes_in(data)


def offsets_of(sizes: npt.ArrayLike) -> Int64s:
    """Return the offsets of lists with these sizes: the start of each, and the end of the last."""
    found = np.zeros(len(np.asarray(sizes)) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def in_ranges_of(starts: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
    """Return two columns with a row for each number of all ranges: the range's index, the number.

    Range i has the numbers from ``starts[i]`` up to, not including, ``starts[i] + sizes[i]``.
    """
    of = np.repeat(np.arange(len(sizes)), sizes)
    numbers = (starts + sizes - np.cumsum(sizes))[of]
    numbers += np.arange(len(of))
    return of, numbers


def valid_rows(column: pa.Array) -> UInt8s | None:
    """Return one byte per row, 0 for a null and 1 for a value; None if no row is null.

    ``column``: a column of any type but null, which has no bitmap.
    """
    if not column.null_count:
        return None
    return bits(column.buffers()[0], column.offset, len(column))


def bits(bitmap: pa.Buffer, start: int, n: int) -> UInt8s:
    """Return n bits of a bitmap, from number ``start`` on, as one byte per bit: 0 or 1."""
    first, last = start // 8, (start + n + 7) // 8
    octets = np.frombuffer(bitmap, np.uint8, last - first, first)
    return np.unpackbits(octets, bitorder="little")[start % 8 : start % 8 + n]


def bytes_in(buffer: pa.Buffer | None) -> npt.NDArray[Any]:
    """Return a buffer's bytes. For None, which Arrow may have for empty rows, return no bytes."""
    return np.empty(0, np.uint8) if not buffer else np.frombuffer(buffer, np.uint8)


#: The bytes of a row besides its text or items; and those of a type without a known width.
_OFFSET_BYTES, _OTHER_BYTES = 4, 16


def bytes_before(batch: pa.RecordBatch, row: int) -> int:
    """Return the size of the rows before ``row`` in bytes, which depends only on their values.

    It is estimated: without null bits, and with the same size for all rows of a column that stores
    values outside of them (dictionaries, views).
    """
    return int(sum(_bytes_before(column, row) for column in batch.columns))


def end_within(batch: pa.RecordBatch, start: int, most_bytes: int) -> int:
    """Return the end of the longest run of rows from ``start`` that has at most ``most_bytes``.

    It is ``start`` if the first row is larger.
    """
    ends = _row_ends(batch)
    return _end_within(ends, start, most_bytes)


def _row_ends(batch: pa.RecordBatch) -> Int64s:
    """Return `bytes_before` of each row, and of the end of the batch."""
    ends = np.zeros(len(batch) + 1, np.int64)
    rows = np.arange(len(batch) + 1)
    for column in batch.columns:
        ends += _bytes_before(column, rows)
    return ends


def _end_within(ends: Int64s, start: int, most_bytes: int) -> int:
    last = int(np.searchsorted(ends, ends[start] + most_bytes, "right")) - 1
    return max(start, last)


#: Whether Arrow's casts crash the process if null counts of a map's keys are unknown.
_MISCOUNTS_KEYS = int(pa.__version__.split(".")[0]) < 26


def cast_column(column: pa.Array | pa.ChunkedArray, arrow_type: pa.DataType) -> Any:
    """Return the column cast to a type by Arrow. Maps do not crash older versions of Arrow.

    Before 26, a cast leaves the null counts of a map's keys unknown. Another cast, slice or
    concatenation of the result may then end the process. An IPC message has all counts.
    """
    if column.type == arrow_type:
        return column
    if not (_MISCOUNTS_KEYS and has_type(arrow_type, pa.types.is_map)):
        return column.cast(arrow_type)
    if isinstance(column, pa.ChunkedArray):
        chunks = [cast_column(chunk, arrow_type) for chunk in column.chunks]
        return pa.chunked_array(chunks, arrow_type)
    return _recounted(_recounted(column).cast(arrow_type))


def _recounted(column: pa.Array) -> pa.Array:
    """Return a copy whose null counts are all known, without bitmaps where no value is null."""
    batch, copy = pa.record_batch([column], ["0"]), pa.BufferOutputStream()
    with pa.ipc.new_stream(copy, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(copy.getvalue()).read_next_batch().column(0)


def one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return one batch from one or more batches of the same schema; a single one itself.

    Raises pyarrow.ArrowInvalid if a column then has more than 2 GiB of text or bytes: `rebatched`
    cuts before that.
    """
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def rebatched(
    batches: Iterable[pa.RecordBatch], rows: int, most_bytes: int = 1 << 28, *, copied: bool = True
) -> Iterator[pa.RecordBatch]:
    """Combine or cut batches, so that each but the last has ``rows`` rows.

    Batches of long rows have fewer: as many as fit into ``most_bytes``, and at least one. So the
    cuts depend on the rows alone, not on the batches in which they came. No rows give no batch.
    ``copied``: whether slices are copied, because their serialized bytes would contain neighbouring
    rows. Parquet needs no copy.
    """
    waiting: list[pa.RecordBatch] = []
    n = size = 0
    sliced = False
    for batch in batches:
        whole = bytes_before(batch, len(batch))
        if len(batch) and n + len(batch) <= rows and size + whole <= most_bytes:
            waiting.append(batch)
            n, size = n + len(batch), size + whole
            if n == rows:
                yield _together(waiting, sliced)
                waiting, n, size, sliced = [], 0, 0, False
            continue
        start, ends = 0, _row_ends(batch)
        while start < len(batch):
            stop = min(len(batch), start + rows - n)
            if size + ends[stop] - ends[start] > most_bytes:
                stop = max(_end_within(ends, start, most_bytes - size), start + (not waiting))
            if stop > start:
                waiting.append(batch.slice(start, stop - start))
                n += stop - start
                size += int(ends[stop] - ends[start])
                sliced |= copied and stop - start < len(batch)
            if stop < len(batch) or n == rows:
                yield _together(waiting, sliced)
                waiting, n, size, sliced = [], 0, 0, False
            start = stop
    if waiting:
        yield _together(waiting, sliced)


def _together(batches: list[pa.RecordBatch], sliced: bool) -> pa.RecordBatch:
    # A slice is copied: its serialized form would have bytes of adjacent rows as padding.
    return pa.concat_batches(batches) if sliced else one_batch(batches)


def _bytes_before(column: pa.Array, rows: Any) -> Any:
    """Return the number of bytes before a row, or before each of several rows."""
    arrow_type, types = column.type, pa.types
    if not len(column):
        return rows * 0
    if isinstance(column, pa.ExtensionArray):
        return _bytes_before(column.storage, rows)
    if has_offsets(arrow_type):
        offsets, _ = strings(column)
        return (offsets[rows].astype(np.int64) - offsets[0]) + _OFFSET_BYTES * rows
    if types.is_struct(arrow_type):
        fields = range(arrow_type.num_fields)
        return sum((_bytes_before(column.field(n), rows) for n in fields), start=rows * 0)
    if types.is_fixed_size_list(arrow_type):
        size = arrow_type.list_size
        return _bytes_before(column.values.slice(column.offset * size), rows * size)
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_map(arrow_type):
        offsets = column.offsets.to_numpy().astype(np.int64)
        start = int(offsets[0])
        parts = (column.keys, column.items) if types.is_map(arrow_type) else (column.values,)
        inside = sum(_bytes_before(part.slice(start), offsets[rows] - start) for part in parts)
        return inside + _OFFSET_BYTES * rows
    try:
        return rows * max(1, int(arrow_type.bit_width) // 8)
    except ValueError:  # the type has no width
        return rows * _OTHER_BYTES


def take_rows(batch: pa.RecordBatch, order: Int64s) -> pa.RecordBatch:
    """Return rows of a batch in another order, as ``batch.take`` does, but faster with text.

    ``batch``: a batch with any types that Arrow can take. ``order``: row numbers; a row may be
    missing or occur several times.

    The result's serialized bytes depend on the rows alone: it has no uninitialized memory.
    Spark aborts a job if a task that runs again writes other bytes. Raises ValueError if an item of
    ``order`` is not a row number.
    """
    indices = pa.array(order)
    if not batch.columns:
        return batch.take(indices)  # without arrays the number of rows would be lost
    try:
        columns = [_take(column, order, indices) for column in batch.columns]
    except pa.ArrowIndexError as error:
        raise ValueError(
            f"order must be row numbers of the {counted(len(batch), 'row')} of batch: {error}"
        ) from None
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _take(column: pa.Array, order: Int64s, indices: pa.Array) -> pa.Array:
    if not len(column) or not has_offsets(column.type):
        return column.take(indices)  # an empty array may have no offsets
    offsets, data = gather_binary(*strings(column), order)
    valid, bits = valid_rows(column), None
    if valid is not None:
        bits = pa.py_buffer(np.packbits(valid[order], bitorder="little"))
    buffers = [bits, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(column.type, len(order), buffers)
