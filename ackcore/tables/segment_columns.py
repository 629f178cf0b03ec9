"""Columns of a segment: stored in fewer bytes, still readable by row without decompression.

Columns of fixed width are stored as bytes beside each other, row by row, so that a look-up reads
one place in memory per row.  Integers, times and decimals are the distance from the smallest one,
in as few bytes as it needs; floats are integers too if all of them are decimal fractions of few
digits.  Text with few distinct values is a dictionary.  Other text lacks the prefix that all values
have, and its end is a dictionary if it has few distinct values, such as the domain of an e-mail
address.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import has_offsets, valid_rows
from ackcore.tables.key_groups import numbers_of

#: Text is stored as a dictionary if this part of a sample's rows or fewer are distinct.
_SAMPLE_ROWS, _DISTINCT = 1_000, 0.25
#: Longer text is not packed: the size of a segment must tell how much memory its rows need.
_SHORT_BYTES = 256
#: The characters before which text is divided.
_MARKS = "@/:.#|-_ "
#: The numbers by which floats are multiplied; larger products are not exact.
_SCALES, _EXACT = (1, 100, 10_000), 2.0**52

#: The encoding of a column, as JSON values that `unpacked` needs.
Note = dict[str, Any]
Bytes = npt.NDArray[np.uint8]


def packed(column: pa.Array) -> tuple[pa.Array | Bytes, Note]:
    """Return the column to store for a column of a table, and the note on its encoding.

    The stored column is an array, or the bytes of each row with the shape (rows, width).
    """
    kind, n = column.type, len(column)
    if column.null_count == n:
        return np.empty((n, 0), np.uint8), {"nulls": "all"}
    types = pa.types
    if (  # Arrow stores these types as integers
        types.is_integer(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
        or types.is_decimal128(kind)
    ):
        numbers = _integers(column)
        found = None if numbers is None else _packed_integers(numbers, valid_rows(column))
        return (column, {}) if found is None else found
    if kind == pa.float64():
        return _packed_floats(column)
    if has_offsets(kind):
        return _packed_text(column)
    return column, {}


def unpacked(parts: Sequence[tuple[pa.Array | Bytes, Note]], kind: pa.DataType) -> pa.Array:
    """Return the values of a column, of type ``kind``, in the order of ``parts``.

    ``parts``: for each segment, rows of the stored column that `packed` returned, and its note.
    The result is an array, or a chunked one if it has more than 2 GiB of text.
    """
    if all("base" in note for _, note in parts):
        return _unpacked_integers(parts, kind)
    if len(parts) == 1:
        return _unpacked(*parts[0], kind)
    arrays = [unpacked([part], kind) for part in parts]
    try:
        return pa.concat_arrays(arrays)
    except pa.ArrowInvalid:  # more than 2 GiB of text
        return pa.chunked_array(arrays)


def _unpacked_integers(parts: Sequence[tuple[Any, Note]], kind: pa.DataType) -> pa.Array:
    counts = [len(stored) for stored, _ in parts]
    wide = np.zeros((sum(counts), 8), np.uint8)
    end = 0
    for stored, _ in parts:
        start, end = end, end + len(stored)
        wide[start:end, : stored.shape[1]] = stored
    numbers = wide.reshape(-1).view(np.uint64)

    def noted(name: str, dtype: npt.DTypeLike) -> Any:
        values = [note.get(name) for _, note in parts]
        if len(parts) == 1:
            return values[0]
        return np.repeat(np.array(values, dtype), counts)

    valid = None
    if any(note["nulls"] for _, note in parts):
        valid = ((numbers != 0) | ~np.asarray(noted("nulls", np.bool_))).view(np.uint8)
    numbers += noted("base", np.uint64)
    if "scale" in parts[0][1]:
        return pa.array(numbers.view(np.int64) / noted("scale", np.int64))
    return _of_integers(numbers.view(np.int64), valid, kind)


def _unpacked(stored: pa.Array | Bytes, note: Note, kind: pa.DataType) -> pa.Array:
    n = len(stored)
    if note.get("nulls") == "all":
        return pa.nulls(n, kind)
    if "float" in note:
        floats = np.ascontiguousarray(stored).reshape(-1).view(f"f{note['float']}")
        return pa.array(floats.astype(np.float64))
    if "prefix" in note:
        wide_kind = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        octets = pa.large_binary() if wide_kind else pa.binary()
        if isinstance(stored, np.ndarray):
            data = pa.py_buffer(np.ascontiguousarray(stored))
            stored = pa.Array.from_buffers(pa.binary(stored.shape[1]), n, [None, data])
        parts = [stored]
        if pa.types.is_struct(stored.type):
            parts = stored.flatten()
        parts = [_decoded(part).cast(octets) for part in parts]
        prefix, nothing = (pa.scalar(each, octets) for each in (bytes.fromhex(note["prefix"]), b""))
        if note["prefix"] or len(parts) > 1:
            parts = [pc.binary_join_element_wise(prefix, *parts, nothing)]
        return parts[0].cast(kind, safe=False)
    stored = _decoded(stored)
    return stored if stored.type == kind else stored.cast(kind)


def _decoded(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return column.dictionary.take(column.indices)
    return column


def _integers(column: pa.Array) -> npt.NDArray[np.int64] | None:
    """Return a column's integers, times or decimals as int64; None if a decimal needs more bits.

    An unsigned integer of 64 bits becomes the signed one with the same bits. A null becomes any
    number.
    """
    kind = column.type
    if pa.types.is_decimal128(kind):
        words = numbers_of(column).view(np.int64)
        low, high = words[::2], words[1::2]
        valid = valid_rows(column)
        fits = high == low >> 63
        if not (fits if valid is None else fits | (valid == 0)).all():
            return None
        return low
    numbers = numbers_of(column)
    return numbers.view(np.int64) if kind.bit_width == 64 else numbers.astype(np.int64)


def _packed_integers(
    numbers: npt.NDArray[np.int64], valid: npt.NDArray[np.uint8] | None
) -> tuple[Bytes, Note] | None:
    """Encode numbers as their distances from the smallest one, in as few bytes as they need.

    ``valid``: 0 for each null; None without nulls. If there are nulls, the smallest number has
    distance 1, and a null has 0. Returns the bytes of each row with their note; None if a distance
    needs more than 64 bits.
    """
    present = numbers if valid is None else numbers[valid != 0]
    base, top = int(present.min()), int(present.max())
    if valid is not None:
        base -= 1
    if top - base >= 1 << 64:
        return None
    distances = numbers.view(np.uint64) - np.uint64(base % 2**64)
    if valid is not None:
        distances[valid == 0] = 0
    width = ((top - base).bit_length() + 7) // 8
    stored = distances.view(np.uint8).reshape(-1, 8)[:, :width]
    return stored, {"base": base % 2**64, "nulls": valid is not None}


def _packed_floats(column: pa.Array) -> tuple[pa.Array | Bytes, Note]:
    floats = numbers_of(column)
    if column.null_count:
        return column, {}
    with np.errstate(all="ignore"):
        for scale in _SCALES:
            for some in (floats[:_SAMPLE_ROWS], floats):
                scaled = np.rint(some * scale)
                # By their bits: -0.0 is not 0.0.
                same = (scaled.astype(np.int64) / scale).view(np.int64) == some.view(np.int64)
                if not (same & (np.abs(scaled) < _EXACT)).all():
                    break
            else:
                found = _packed_integers(scaled.astype(np.int64), None)
                assert found is not None
                return found[0], {**found[1], "scale": scale}
        narrow = floats.astype(np.float32)
        same = (narrow.astype(np.float64) == floats) | np.isnan(floats)
    if same.all():
        return narrow.view(np.uint8).reshape(-1, 4), {"float": 4}
    return floats.view(np.uint8).reshape(-1, 8), {"float": 8}


def _packed_text(column: pa.Array) -> tuple[pa.Array | Bytes, Note]:
    kind, n = column.type, len(column)
    sample = column.slice(0, _SAMPLE_ROWS)
    is_short = sample.nbytes <= _SHORT_BYTES * len(sample)
    if n > 1 and is_short and _few_distinct(sample):
        return _dictionary(column), {}
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    octets = column.cast(pa.large_binary() if wide else pa.binary())
    # The common prefix of the smallest and the largest text is that of all.
    bounds = list(pc.min_max(octets).as_py().values())
    prefix = os.path.commonprefix(bounds)[:_SHORT_BYTES]  # noqa: RUF071 - no paths
    note = {"prefix": prefix.hex()}
    if prefix:
        octets = pc.binary_replace_slice(octets, 0, len(prefix), b"")
    if not is_short or column.null_count or n < 2:
        return octets, note
    parts = _divided(octets)
    if parts is not None:
        return pa.StructArray.from_arrays(parts, ["head", "tail"]), note
    size = pc.max(pc.binary_length(octets)).as_py()
    if size == 0 or size != pc.min(pc.binary_length(octets)).as_py():
        return octets, note
    fixed = octets.cast(pa.binary(size))
    stored = np.frombuffer(fixed.buffers()[1], np.uint8, n * size, fixed.offset * size)
    return stored.reshape(n, size), note


def _few_distinct(sample: pa.Array) -> bool:
    return len(sample.unique()) <= len(sample) * _DISTINCT


def _dictionary(column: pa.Array) -> pa.Array:
    """Encode a column as a dictionary whose indices have as few bytes as possible."""
    found = column.dictionary_encode()
    size = len(found.dictionary)
    kind = pa.uint8() if size < 1 << 8 else pa.uint16() if size < 1 << 16 else pa.int32()
    return pa.DictionaryArray.from_arrays(found.indices.cast(kind), found.dictionary)


def _divided(column: pa.Array) -> list[pa.Array] | None:
    """Divide each text before the last place of a character of ``_MARKS``, such as "@".

    The character must be in all texts, and leave few different tails. Of several, the one with the
    longest tails is used. Returns the heads, and the tails with the character as a dictionary; None
    without such a character.
    """
    sample = column.slice(0, _SAMPLE_ROWS)
    found: list[tuple[float, str]] = []
    for mark in _MARKS:
        parts = _cut(sample, mark)
        if parts is not None and _few_distinct(parts[1]):
            found.append((pc.mean(pc.binary_length(parts[1])).as_py(), mark))
    best = max(found, default=(0, ""))[1]
    parts = _cut(column, best) if best else None
    if parts is None:
        return None
    tails = _dictionary(parts[1])
    mark_of, nothing = (pa.scalar(each, column.type) for each in (best.encode(), b""))
    texts = pc.binary_join_element_wise(mark_of, tails.dictionary, nothing)
    return [parts[0], pa.DictionaryArray.from_arrays(tails.indices, texts)]


def _cut(column: pa.Array, mark: str) -> tuple[pa.Array, pa.Array] | None:
    """Split each text at its last ``mark``, which is dropped; None if a text does not have it."""
    lists = pc.split_pattern(column, mark, max_splits=1, reverse=True)
    if pc.min(pc.list_value_length(lists)).as_py() != 2:
        return None
    texts = lists.flatten()
    return texts[::2], texts[1::2]


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
