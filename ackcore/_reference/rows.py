"""What a stage does with the rows it emits, in numpy: the twin of pyx/rows.pxd.

Values are hashed by SplitMix64's finaliser, word by word, and columns folded into a row's hash by
a multiplier (pyx/rows.pxd draws the scheme).  A fingerprint is a sum of mixed words, each offset by
its place.  Fixed for ever, bit by bit: checkpoints hold fingerprints, and one value goes to one
place in every task and version.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ackcore import _id_parts
from ackcore import _row_parts as parts
from ackcore._columns import as_count, as_id, id_column, same_length, signed
from ackcore._records import Int32s, Int64s, UInt8s
from ackcore._reference.mix import ALL_BITS, GOLDEN, mix, mix_many, subkey

_U64 = np.uint64

_VALUE = 0x2545F4914F6CDD1D
_NO_VALUE = 0x6A09E667F3BCC909
_NEXT_COLUMN = 0xD1342543DE82EF95
_FINGERPRINT = 0x3C6EF372FE94F82B
#: Words of a fingerprint in hand at once: what fits a cache.
_WORDS = 1 << 15


def fold_values(hashes: Int64s, value_hashes: npt.NDArray[Any], valid: Any = None) -> None:
    """Mix values, each already hashed on its own, into a running hash per row, in place.

    What `hash_fixed` and `hash_binary` put on zeros are such hashes.
    """
    running = hashes.view(_U64)
    value_hashes = value_hashes.view(_U64)
    if valid is not None:
        value_hashes = np.where(valid != 0, value_hashes, _U64(_NO_VALUE))
    running ^= running >> _U64(32)
    running *= _U64(_NEXT_COLUMN)
    running += value_hashes


def hash_fixed(hashes: Any, data: Any, width: int, valid: Any = None) -> None:
    """Mix a column of numbers into a running hash per row, in place.

    Equal columns give equal hashes, here and in every version and process.  Numbers of 1, 2
    and 4 bytes are taken with their sign, so a value hashes alike in any of these widths and 8.

    Parameters
    ----------
    hashes : column of int64 or uint64, shape (n,), writable
        Zeros before the first column.
    data : buffer of n * width bytes
        The numbers, in the machine's byte order; they may start at any address.
    width : int
        Bytes of a number: 1, 2, 4, 8, 16 or 32.
    valid : column of bool or uint8, shape (n,), optional
        0 where the row is null: it then hashes to a constant, whatever ``data`` holds there.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If ``hashes`` is read-only or a column is not one-dimensional and C-contiguous, if the
        lengths differ, or if there is no such width.
    """
    hashes = parts.in_place(hashes, "hashes")
    width = as_count(width, "width", 1, 2**63 - 1)
    if width not in parts.WIDTHS:
        parts.refuse_width(width)
    memory = parts.bytes_of(data, "data")
    if len(memory) != len(hashes) * width:
        parts.refuse_size(len(memory), len(hashes), width)
    valid = parts.valid_column(valid, len(hashes))
    if width <= 8:
        # A copy each, as the bytes may start at any address.
        numbers = memory.view(f"i{width}").astype(np.int64).reshape(-1, 1)
    else:
        numbers = memory.view(np.int64).copy().reshape(-1, width // 8)
    x = np.full(len(hashes), _VALUE, _U64)
    for column in numbers.view(_U64).T:
        x = mix_many(x ^ column)
    fold_values(hashes, x, valid)


def hash_binary(hashes: Any, offsets: Any, data: Any, valid: Any = None) -> None:
    """Mix a column of strings, or of bytes, into a running hash per row, in place.

    Parameters
    ----------
    hashes : column of int64 or uint64, shape (n,), writable
        Zeros before the first column.
    offsets : numpy.ndarray of int32 or int64, shape (n + 1,)
        Row i is ``data[offsets[i]:offsets[i + 1]]``; the hash does not depend on the type.  Must
        not be written to during the call.
    data : buffer
        The bytes of all rows, and maybe others.
    valid : column of bool or uint8, shape (n,), optional
        0 where the row is null: it then hashes to the constant of `hash_fixed`.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If ``hashes`` is read-only or a column is not one-dimensional and C-contiguous, if the
        lengths differ, or if the offsets fall or leave the data: the message names the row.
    """
    hashes = parts.in_place(hashes, "hashes")
    offsets = parts.offset_column(offsets, len(hashes))
    memory = parts.bytes_of(data, "data")
    valid = parts.valid_column(valid, len(hashes))
    _check_offsets(offsets, len(memory))

    starts = offsets[:-1].astype(np.int64)
    lengths = offsets[1:] - starts
    padded = np.concatenate([memory, np.zeros(8, np.uint8)])
    x = _U64(_VALUE) + _U64(GOLDEN) * (lengths.view(_U64) + _U64(1))
    rows = np.arange(len(hashes))
    places = np.arange(8)
    done = 0
    # Word after word, of the rows that have so many.
    while len(rows):
        here = (starts[rows] + done)[:, None] + places
        left = (lengths[rows] - done)[:, None]
        taken = np.where(places < left, padded[np.where(places < left, here, 0)], np.uint8(0))
        words = taken.astype(np.uint8, copy=False).view("<u8")[:, 0].astype(_U64)
        x[rows] = mix_many(x[rows] ^ words)
        done += 8
        rows = rows[lengths[rows] > done]
    fold_values(hashes, x, valid)


def pack_runs(
    key: int,
    component: str | int,
    owners: Any,
    roots: Any,
    parent_edges: Any,
    order: Any = None,
    counts: Any = None,
    ordinals: Any = None,
) -> tuple[Int64s, Int64s, Int64s, Int32s, Int64s]:
    """Give emitted rows their edges, and cut what goes to each destination into runs.

    The edge of row i is ``edge_id(key, roots[g], component, parent_edges[g], ordinal)`` for its
    group ``g = owners[i]``, where the ordinal counts the rows of the group from 0 on, or from
    where ``ordinals`` has it.  A run is a longest stretch of rows of one group that
    follow each other on the way to one destination.

    Parameters
    ----------
    key : int
        The spout's, of `ackcore.ids.spout_key`: 64 bits in either sign.
    component : str or int
        Who emits, as `ackcore.ids.edge_id` takes it.
    owners : column of int64 or uint64, shape (m,)
        The group that each row hangs from, 0..g-1; at most 2**31-1 rows.
    roots : column of int64 or uint64, shape (g,)
        The root of each group.
    parent_edges : column of int64 or uint64, shape (g,), or int
        The edge, or the XOR of edges, on which each group came; one integer stands for all.
    order : column of int64, shape (m,), optional
        Row numbers, destination by destination, as `split_by_shard` gives them.  None: the rows
        are in that order.
    counts : column of int64, shape (d,), optional
        Rows per destination.  None: there is one.
    ordinals : column of int64, shape (g,), writable, optional
        How many rows each group has emitted before, 0..2**62-1; is raised by those of this call.

    Returns
    -------
    totals : numpy.ndarray of int64, shape (g,)
        The XOR of all edges of each group.
    run_groups, run_vals : numpy.ndarray of int64, shape (k,)
        Each run's group and the XOR of its edges.
    run_rows : numpy.ndarray of int32, shape (k,)
        How many rows each run has.
    run_counts : numpy.ndarray of int64, shape (d,)
        Runs per destination.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If a column is not one-dimensional and C-contiguous, if lengths differ, if ``counts`` do
        not add up to m, if ``order`` does not have each row once, or if an owner or an ordinal
        is out of range: the message names its row.  ``ordinals`` are then as before.
    OverflowError
        If an integer has more than 64 bits.
    """
    key = as_id(key, "key")
    component = _id_parts.component_key(component)
    owners = id_column(owners, "owners")
    roots = id_column(roots, "roots")
    rows, groups = len(owners), len(roots)
    if rows > parts.MAX_ROWS:
        parts.refuse_rows(rows)
    if _id_parts.is_one_for_all(parent_edges):
        parent_edges = np.full(groups, as_id(parent_edges, "parent_edges"), np.int64)
    else:
        parent_edges = id_column(parent_edges, "parent_edges")
        same_length(roots=roots, parent_edges=parent_edges)
    if order is not None:
        order = id_column(order, "order")
        same_length(owners=owners, order=order)
    counts = np.array([rows] if counts is None else id_column(counts, "counts"), np.int64)
    parts.check_counts(counts, rows)
    if ordinals is not None:
        ordinals = parts.in_place(ordinals, "ordinals")
        same_length(roots=roots, ordinals=ordinals)
        if ((ordinals < 0) | (ordinals >= 2**parts.START_BITS)).any():
            _id_parts.refuse_part(ordinals, "ordinals", parts.START_BITS)
    wrong = (owners < 0) | (owners >= groups)
    if wrong.any():
        row = int(np.argmax(wrong))
        parts.refuse_owner(row, int(owners[row]), groups)
    if order is None:
        order = np.arange(rows)
    wrong = (order < 0) | (order >= rows)
    if wrong.any():
        place = int(np.argmax(wrong))
        parts.refuse_order(place, int(order[place]), rows)
    if (np.bincount(order, minlength=rows) != 1).any():
        parts.refuse_order(rows=rows)

    # A row's place among those of its group: its place among all, sorted by group, less the
    # place where its group begins there.
    of_group = np.bincount(owners, minlength=groups).astype(np.int64, copy=False)
    by_group = np.argsort(owners, kind="stable")
    begins = np.cumsum(of_group) - of_group
    place_in_group = np.empty(rows, np.int64)
    place_in_group[by_group] = np.arange(rows) - begins[owners[by_group]]
    if ordinals is not None:
        place_in_group += ordinals[owners]
        ordinals += of_group
    edges = _edges(key, component, roots, parent_edges, owners, place_in_group)
    totals = np.zeros(groups, np.int64)
    np.bitwise_xor.at(totals, owners, edges)

    destination = np.repeat(np.arange(len(counts)), counts)
    sent, sent_edges = owners[order], edges[order]
    first = np.ones(rows, np.bool_)
    first[1:] = (sent[1:] != sent[:-1]) | (destination[1:] != destination[:-1])
    starts = np.flatnonzero(first)
    # reduceat takes no empty columns.
    run_vals = np.bitwise_xor.reduceat(sent_edges, starts) if rows else edges
    run_rows = np.diff(starts, append=rows).astype(np.int32)
    run_counts = np.bincount(destination[starts], minlength=len(counts))
    return totals, sent[starts], run_vals, run_rows, run_counts.astype(np.int64, copy=False)


def _check_offsets(offsets: npt.NDArray[Any], size: int) -> None:
    wrong = (offsets[:-1] < 0) | (offsets[1:] < offsets[:-1]) | (offsets[1:] > size)
    if wrong.any():
        parts.refuse_offsets(offsets, int(np.argmax(wrong)), size)


def _edges(
    key: int, component: int, roots: Int64s, parents: Int64s, owners: Int64s, ordinals: Int64s
) -> Int64s:
    """The edges that `ids.edge_ids` gives, of whole columns."""
    component_key = subkey((component ^ key) & ALL_BITS, 4)
    x = mix_many(roots.view(_U64) ^ _U64(subkey(key, 3)))
    x = mix_many((x + parents.view(_U64)) ^ _U64(component_key))
    x = mix_many(x[owners] + ordinals.view(_U64) * _U64(GOLDEN))
    x[x == 0] = subkey(key, 5) | 1
    return x.view(np.int64)


def gather_binary(offsets: Any, data: Any, order: Any) -> tuple[npt.NDArray[Any], UInt8s]:
    """Put the strings, or bytes, of a column in another order.

    Several times as fast as Arrow's ``take`` where they are short.

    Parameters
    ----------
    offsets : numpy.ndarray of int32 or int64, shape (n + 1,)
        Row i is ``data[offsets[i]:offsets[i + 1]]``.
    data : buffer
        The bytes of all rows, and maybe others.
    order : column of int64, shape (m,)
        Row numbers, as `split_by_shard` gives them; a row may come up any number of times.
        Neither this nor ``offsets`` must be written to during the call.

    Returns
    -------
    offsets : numpy.ndarray of the type given, shape (m + 1,)
        From 0 on.
    data : numpy.ndarray of uint8
        The bytes of these rows and no others.  The memory behind them, up to a multiple of 64
        bytes, holds zeros: written out padded, it is the same bytes each time.

    Raises
    ------
    TypeError
        If an argument is not of its type.
    ValueError
        If a column is not one-dimensional and C-contiguous, if the offsets fall or leave the
        data, if there is no row of a number in ``order``, or if the bytes are too many for the
        offsets' type: the message names the row.
    """
    offsets = parts.offset_column(offsets)
    memory = parts.bytes_of(data, "data")
    order = id_column(order, "order")
    _check_offsets(offsets, len(memory))
    rows = len(offsets) - 1
    wrong = (order < 0) | (order >= rows)
    if wrong.any():
        place = int(np.argmax(wrong))
        parts.refuse_taken(place, int(order[place]), rows)
    starts = offsets[:-1][order].astype(np.int64)
    lengths = offsets[1:][order] - starts
    ends = np.zeros(len(order) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    total = int(ends[-1])
    if total > np.iinfo(offsets.dtype).max:
        parts.refuse_gathered()
    gathered = np.zeros((total + 16 + 63) // 64 * 64, np.uint8)
    gathered[:total] = memory[np.arange(total) + np.repeat(starts - ends[:-1], lengths)]
    return ends.astype(offsets.dtype), gathered[:total]


def fingerprint(data: Any, seed: int = 0) -> int:
    """Return 64 bits that tell whether bytes are still the same.

    They change with any byte, with the order and with the length; two unlike pieces of data
    agree by the odds of 64 bits.  That holds against accidents - a block lost, swapped, cut off
    or written twice - and not against someone who wants two pieces to agree.

    Parameters
    ----------
    data : buffer
        Bytes, or any other object with the buffer protocol, C-contiguous.  Numbers count as
        the bytes they are in memory.
    seed : int, default 0
        64 bits in either sign; another seed gives an unrelated result.

    Returns
    -------
    int
        In -2**63..2**63-1, the same on every machine and in every version.

    Raises
    ------
    TypeError
        If ``data`` is no buffer, or ``seed`` no integer.
    ValueError
        If the buffer is not C-contiguous.
    OverflowError
        If ``seed`` has more than 64 bits.
    """
    memory = parts.bytes_of(data, "data")
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
        first = _U64((key + start // 8 * GOLDEN) & ALL_BITS)
        total += int(mix_many(words ^ (places[: len(words)] + first)).sum(dtype=_U64))
    return signed(mix(mix((total ^ key) & ALL_BITS) + size * GOLDEN & ALL_BITS))
