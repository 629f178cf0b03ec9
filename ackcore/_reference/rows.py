"""Hashes of rows and the shards of a shuffle, in numpy: the twin of pyx/rows.h and pyx/pack.h.

SplitMix64's finaliser hashes values word by word, and a multiplier folds columns into a row's hash
(pyx/rows.h shows the formula). A fingerprint is a sum of mixed words, each offset by its position.
No bit of a result may ever change, because checkpoints contain fingerprints, and every task and
version must send a value to the same destination. pyx/rows.pxi and pack.pxi document arguments,
results and errors.

The hash of a root is Jon Maiga's xmxmx with the multiplier of Boost.ContainerHash's ``hash_mix``.
Its shard is the upper half of the hash, scaled to the number of shards (Lemire, "Fast random
integer generation in an interval", 2019). It may never change: one job may read shards that another
wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ackcore import _arguments
from ackcore._arguments import MAX_SHARDS
from ackcore._columns import as_count, as_id, id_column, same_length, signed, task_column
from ackcore._records import Int32s, Int64s, UInt8s, UInt64s
from ackcore._reference.id_hashes import ALL_BITS, GOLDEN, mix, mix_many

_U64 = np.uint64

_SPREAD = _U64(0x0E9846AF9B1A615D)
_VALUE = 0x2545F4914F6CDD1D
_NO_VALUE = 0x6A09E667F3BCC909
_NEXT_COLUMN = 0xD1342543DE82EF95
_FINGERPRINT = 0x3C6EF372FE94F82B
#: The number of words of a fingerprint that are mixed at once, which fit in a cache.
_WORDS = 1 << 15


def split_by_shard(root_ids: Any, n: Any) -> tuple[Int64s, Int64s]:
    """Return row numbers sorted by the shard of their root, and the sizes of the n shards.

    Rows of one shard keep their order.
    """
    _, of_row, counts = _shards(root_ids, n)
    return np.argsort(of_row, kind="stable").astype(np.int64, copy=False), counts


def _shards(root_ids: Any, n: Any) -> tuple[UInt64s, Int64s, Int64s]:
    """Return the hash and the shard of each row, and the number of rows of each shard."""
    roots = id_column(root_ids, "root_ids").view(np.uint64)
    shards = as_count(n, "n", 1, MAX_SHARDS)
    mixed = roots ^ (roots >> np.uint64(32))
    mixed *= _SPREAD
    mixed ^= mixed >> np.uint64(32)
    mixed *= _SPREAD
    mixed ^= mixed >> np.uint64(28)
    of_row = (((mixed >> np.uint64(32)) * np.uint64(shards)) >> np.uint64(32)).astype(np.int64)
    return mixed, of_row, np.bincount(of_row, minlength=shards).astype(np.int64, copy=False)


def sort_by_shard(root_ids: Any, n: Any) -> tuple[Int64s, Int64s]:
    """Return row numbers sorted by shard and by a hash of the root, and the sizes of the shards."""
    mixed, _, counts = _shards(root_ids, n)
    return np.argsort(mixed, kind="stable").astype(np.int64, copy=False), counts


def take_shard(
    root_ids: Any, vals: Any, tasks: Any, times_ms: Any, shard: Any, n: Any
) -> tuple[Int64s, Int64s, Int32s, Int64s | None]:
    """Return copies of the columns with the messages of one of ``n`` shards only, in their order.

    If ``times_ms`` is None, so is its result.
    """
    roots, xors = id_column(root_ids, "root_ids"), id_column(vals, "vals")
    kinds = task_column(tasks, "tasks")
    shards = as_count(n, "n", 1, MAX_SHARDS)
    wanted = as_count(shard, "shard", 0, shards - 1)
    times = None if times_ms is None else id_column(times_ms, "times_ms")
    same_length(root_ids=roots, vals=xors, tasks=kinds)
    if times is not None:
        same_length(root_ids=roots, times_ms=times)
    order, counts = split_by_shard(roots, shards)
    start = int(counts[:wanted].sum())
    mine = order[start : start + int(counts[wanted])]
    found = None if times is None else times[mine].view(np.int64)
    return roots[mine].view(np.int64), xors[mine].view(np.int64), kinds[mine], found


def fold_values(hashes: Int64s, value_hashes: npt.NDArray[Any], valid: Any = None) -> None:
    """Mix a hash of a value into the running hash of each row, in place.

    ``value_hashes``: as `hash_fixed` and `hash_binary` make them of ``hashes`` that are zeros.
    ``valid``: 0 for a null; by default no value is null.
    """
    running = hashes.view(_U64)
    value_hashes = value_hashes.view(_U64)
    if valid is not None:
        value_hashes = np.where(valid != 0, value_hashes, _U64(_NO_VALUE))
    running ^= running >> _U64(32)
    running *= _U64(_NEXT_COLUMN)
    running += value_hashes


def hash_fixed(hashes: Any, data: Any, width: int, valid: Any = None) -> None:
    """Mix a column of numbers of ``width`` bytes into a running hash per row, in place.

    A row is null where ``valid`` is 0; by default none is.
    """
    hashes = _arguments.in_place(hashes, "hashes")
    width = as_count(width, "width", 1, 2**63 - 1)
    if width not in _arguments.WIDTHS:
        _arguments.refuse_width(width)
    memory = _arguments.bytes_of(data, "data")
    if len(memory) != len(hashes) * width:
        _arguments.refuse_size(len(memory), len(hashes), width)
    valid = _arguments.valid_column(valid, len(hashes))
    if width <= 8:
        # Copy, because the bytes may start at any address.
        numbers = memory.view(f"i{width}").astype(np.int64).reshape(-1, 1)
    else:
        numbers = memory.view(np.int64).copy().reshape(-1, width // 8)
    x = np.full(len(hashes), _VALUE, _U64)
    for column in numbers.view(_U64).T:
        x = mix_many(x ^ column)
    fold_values(hashes, x, valid)


def hash_binary(hashes: Any, offsets: Any, data: Any, valid: Any = None) -> None:
    """Mix a column of strings or bytes into a running hash per row, in place.

    Row i has the bytes ``data[offsets[i]:offsets[i + 1]]``. It is null if ``valid[i]`` is 0.
    """
    hashes = _arguments.in_place(hashes, "hashes")
    offsets = _arguments.byte_offset_column(offsets, len(hashes))
    memory = _arguments.bytes_of(data, "data")
    valid = _arguments.valid_column(valid, len(hashes))
    _check_offsets(offsets, len(memory))

    starts = offsets[:-1].astype(np.int64)
    lengths = offsets[1:] - starts
    padded = np.append(memory, np.uint8(0))
    x = _U64(_VALUE) + _U64(GOLDEN) * (lengths.view(_U64) + _U64(1))
    rows = np.arange(len(hashes))
    places = np.arange(8)
    done = 0  # bytes hashed of each row
    # Hash word after word, while rows have further words; bytes beyond a row's end are zeros.
    while len(rows):
        here = (starts[rows] + done)[:, None] + places
        within = places < (lengths[rows] - done)[:, None]
        words = (padded[np.minimum(here, len(memory))] * within).view("<u8")[:, 0]
        x[rows] = mix_many(x[rows] ^ words.astype(_U64))
        done += 8
        rows = rows[lengths[rows] > done]
    fold_values(hashes, x, valid)


def _check_offsets(offsets: npt.NDArray[Any], size: int) -> None:
    wrong = (offsets[:-1] < 0) | (offsets[1:] < offsets[:-1]) | (offsets[1:] > size)
    if wrong.any():
        _arguments.refuse_byte_offsets(offsets, int(np.argmax(wrong)), size)


def gather_binary(offsets: Any, data: Any, order: Any) -> tuple[npt.NDArray[Any], UInt8s]:
    """Return the offsets and the bytes of a column whose row i is the given one's ``order[i]``."""
    offsets = _arguments.byte_offset_column(offsets)
    memory = _arguments.bytes_of(data, "data")
    order = id_column(order, "order")
    _check_offsets(offsets, len(memory))
    rows = len(offsets) - 1
    wrong = (order < 0) | (order >= rows)
    if wrong.any():
        place = int(np.argmax(wrong))
        _arguments.refuse_taken(place, int(order[place]), rows)
    starts = offsets[:-1][order].astype(np.int64)
    lengths = offsets[1:][order] - starts
    ends = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    total = int(ends[-1])
    if total > np.iinfo(offsets.dtype).max:
        _arguments.refuse_gathered()
    # Zeros after the bytes, as in the compiled twin.
    gathered = np.zeros((total + 16 + 63) // 64 * 64, np.uint8)
    shifts = starts - ends[:-1]  # from the new to the old index of a row's bytes
    gathered[:total] = memory[np.arange(total) + np.repeat(shifts, lengths)]
    return ends.astype(offsets.dtype), gathered[:total]


def fingerprint(data: Any, seed: int = 0) -> int:
    """Return a 64-bit fingerprint of bytes, with which a later change of them is detected.

    ``seed``: the fingerprint of the bytes before them, if any.
    """
    memory = _arguments.bytes_of(data, "data")
    seed = as_id(seed, "seed")
    size = len(memory)
    key = mix((seed ^ _FINGERPRINT) & ALL_BITS)
    total = 0
    places = np.arange(_WORDS, dtype=_U64) * _U64(GOLDEN)
    for start in range(0, size, 8 * _WORDS):
        block = memory[start : start + 8 * _WORDS]
        if len(block) % 8:
            block = np.concatenate([block, np.zeros(-len(block) % 8, np.uint8)])
        words = block.view("<u8").astype(_U64)
        first_place = _U64((key + start // 8 * GOLDEN) & ALL_BITS)
        total += int(mix_many(words ^ (places[: len(words)] + first_place)).sum(dtype=_U64))
    return signed(mix(mix((total ^ key) & ALL_BITS) + size * GOLDEN & ALL_BITS))
