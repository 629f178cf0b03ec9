"""SplitMix64, and the ids made with it, in plain Python: the twin of pyx/mix.h and pyx/ids.h.

A root id is a keyed bijection of (partition, offset, attempt), and an edge id a keyed hash of its
position (SEMANTICS 5). The acker of a root is computed as in Storm's fields grouping, with Java's
``Long.hashCode`` and ``Math.floorMod``. No bit of an id may ever change, because checkpoints
contain ids.

SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014),
with the finaliser of Vigna's splitmix64.c: Stafford's Mix13.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from ackcore import _arguments
from ackcore._columns import as_count, as_id, id_column, same_length, signed, task_column
from ackcore._records import Int32s, Int64s, UInt64s

ALL_BITS = 2**64 - 1
#: Multiples of the golden ratio visit all 64-bit words, and near ones are far apart.
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Return a mixed 64-bit word: a bijection in which every input bit affects every output bit."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & ALL_BITS
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & ALL_BITS
    return x ^ x >> 31


def mix_many(words: UInt64s) -> UInt64s:
    """Return each word of a column mixed by `mix`."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def subkey(key: int, index: int) -> int:
    """Return output number ``index``, from 0, of SplitMix64 started at ``key``.

    Root ids use indexes 0 to 2, edges 3 to 5, sources 6 and 7, so no two purposes share an output.
    """
    return mix(key + (index + 1) * GOLDEN & ALL_BITS)


def _root(key: int, partition: int, offset: int, attempt: int) -> int:
    x = partition << 48 | offset << 6 | attempt
    x = mix(x ^ subkey(key, 0))
    x = mix(x + subkey(key, 1) & ALL_BITS)
    return signed(x ^ subkey(key, 2))


def _edge(key: int, root: int, component: int, parent_edge: int, ordinal: int) -> int:
    x = mix((root ^ subkey(key, 3)) & ALL_BITS)
    x = mix((x + parent_edge ^ subkey(component ^ key, 4)) & ALL_BITS)
    x = mix(x + ordinal * GOLDEN & ALL_BITS)
    return signed(x or subkey(key, 5) | 1)


def _task(root: int, n: int) -> int:
    # Java's Long.hashCode, plus 31 in 32 bits, and floorMod, which is Python's %.
    code = (root ^ (root & ALL_BITS) >> 32) + 31 & 0xFFFFFFFF
    return ((code ^ 1 << 31) - (1 << 31)) % n


Part = int | npt.NDArray[Any]


def _same_length(**given: Part) -> None:
    same_length(**{name: part for name, part in given.items() if not isinstance(part, int)})


def _part(value: Any, name: str, bits: int, as_column: Callable[[Any, str], Any]) -> Part:
    """Return one checked integer for all rows, or a column whose items are not checked yet."""
    if _arguments.is_one_for_all(value):
        return as_count(value, name, 0, 2**bits - 1)
    column: npt.NDArray[Any] = as_column(value, name)
    return column


def _rows(part: Part, name: str, bits: int) -> Iterable[int]:
    if isinstance(part, int):
        return itertools.repeat(part)
    if ((part < 0) | (part >= 2**bits)).any():
        _arguments.refuse_part(part, name, bits)
    items: list[int] = part.tolist()
    return items


def root_id(key: int, partition: int, offset: int, attempt: int) -> int:
    """Return the root id of one attempt at one record; see `ackcore.ids.root_id`."""
    return _root(
        as_id(key, "key"),
        as_count(partition, "partition", 0, 2**_arguments.PARTITION_BITS - 1),
        as_count(offset, "offset", 0, 2**_arguments.OFFSET_BITS - 1),
        as_count(attempt, "attempt", 0, 2**_arguments.ATTEMPT_BITS - 1),
    )


def root_ids(key: int, partitions: Any, offsets: Any, attempts: Any) -> Int64s:
    """Return the root ids of a column of records; see `ackcore.ids.root_ids`."""
    key = as_id(key, "key")
    partitions = _part(partitions, "partitions", _arguments.PARTITION_BITS, task_column)
    offsets = id_column(offsets, "offsets")
    attempts = _part(attempts, "attempts", _arguments.ATTEMPT_BITS, task_column)
    _same_length(partitions=partitions, offsets=offsets, attempts=attempts)
    partition_rows = _rows(partitions, "partitions", _arguments.PARTITION_BITS)
    offset_rows = _rows(offsets, "offsets", _arguments.OFFSET_BITS)
    attempt_rows = _rows(attempts, "attempts", _arguments.ATTEMPT_BITS)
    rows = zip(partition_rows, offset_rows, attempt_rows, strict=False)
    return np.array([_root(key, *row) for row in rows], np.int64)


def edge_id(key: int, root_id: int, component: str | int, parent_edge: int, ordinal: int) -> int:
    """Return the id of one delivery; see `ackcore.ids.edge_id`."""
    return _edge(
        as_id(key, "key"),
        as_id(root_id, "root_id"),
        _arguments.component_key(component),
        as_id(parent_edge, "parent_edge"),
        as_count(ordinal, "ordinal", 0, 2**_arguments.ORDINAL_BITS - 1),
    )


def edge_ids(
    key: int, root_ids: Any, component: str | int, parent_edges: Any, ordinals: Any
) -> Int64s:
    """Return the ids of a column of deliveries; see `ackcore.ids.edge_ids`."""
    key = as_id(key, "key")
    roots = id_column(root_ids, "root_ids")
    component = _arguments.component_key(component)
    parents: Part
    if _arguments.is_one_for_all(parent_edges):
        parents = as_id(parent_edges, "parent_edges")
    else:
        parents = id_column(parent_edges, "parent_edges")
    ordinals = _part(ordinals, "ordinals", _arguments.ORDINAL_BITS, id_column)
    _same_length(root_ids=roots, parent_edges=parents, ordinals=ordinals)
    parent_rows = itertools.repeat(parents) if isinstance(parents, int) else parents.tolist()
    ordinal_rows = _rows(ordinals, "ordinals", _arguments.ORDINAL_BITS)
    rows = zip(roots.tolist(), parent_rows, ordinal_rows, strict=False)
    edges = [_edge(key, root, component, parent, ordinal) for root, parent, ordinal in rows]
    return np.array(edges, np.int64)


def xor_by_parent(parents: Any, edges: Any, n: int) -> Int64s:
    """Return the XOR of each parent's edges; see `ackcore.ids.xor_by_parent`."""
    parents = id_column(parents, "parents")
    edges = id_column(edges, "edges")
    n = as_count(n, "n", 0, 2**63 - 1)
    same_length(parents=parents, edges=edges)
    xors = np.zeros(n, np.int64)
    for row, (parent, edge) in enumerate(zip(parents.tolist(), edges.tolist(), strict=True)):
        if not 0 <= parent < n:
            _arguments.refuse_parent(row, parent, n)
        xors[parent] ^= edge
    return xors


@overload
def acker_task(root_ids: int, n: int) -> int: ...
@overload
def acker_task(root_ids: Any, n: int) -> Int32s: ...
def acker_task(root_ids: Any, n: int) -> int | Int32s:
    """Return the acker task of a root, or of each; see `ackcore.ids.acker_task`."""
    if _arguments.is_one_for_all(root_ids):
        root = as_id(root_ids, "root_ids")
        return _task(root, as_count(n, "n", 1, 2**31 - 1))
    roots = id_column(root_ids, "root_ids")
    n = as_count(n, "n", 1, 2**31 - 1)
    return np.array([_task(root, n) for root in roots.tolist()], np.int32)


class IdSource:
    """A source of ids for one process, each returned once; see `ackcore.ids.IdSource`."""

    __slots__ = ("_given", "_key", "_lock")

    def __init__(self, key: int, given: int = 0) -> None:
        self._key = as_id(key, "key")
        self._given = as_count(given, "given", 0, ALL_BITS)
        self._lock = threading.Lock()

    @property
    def key(self) -> int:
        """The key as a signed int."""
        return self._key

    @property
    def given(self) -> int:
        """The number of ids that were skipped or returned so far. A copy continues after them."""
        return self._given

    def _take(self, n: int) -> int:
        with self._lock:
            before = self._given
            if n > ALL_BITS - before:
                raise OverflowError(
                    f"this source has given {before} ids and has no {n} left; use another key"
                )
            self._given = before + n
        return before

    def _id(self, count: int) -> int:
        before, between = subkey(self._key, 6), subkey(self._key, 7)
        x = mix(mix(count ^ before) + between & ALL_BITS)
        # Count 0, which is never used, maps to id 0; the map is a bijection, so no other does.
        return signed(x ^ mix(mix(before) + between & ALL_BITS))

    def next(self) -> int:
        """Return the next id: an int in -2**63..2**63-1, never 0.

        Raises OverflowError after 2**64 - 1 ids.
        """
        return self._id(self._take(1) + 1)

    def next_many(self, n: int) -> Int64s:
        """Return the next ``n`` ids as an array of int64, the same as ``n`` calls of `next`."""
        n = as_count(n, "n", 0, 2**63 - 1)
        ids = np.empty(n, np.int64)
        before = self._take(n)
        for row in range(n):
            ids[row] = self._id(before + 1 + row)
        return ids

    def __reduce__(self) -> tuple[type[IdSource], tuple[int, int]]:
        return IdSource, (self._key, self._given)

    def __repr__(self) -> str:
        # Without the key, from which every later id can be computed.
        return f"IdSource(given={self._given})"
