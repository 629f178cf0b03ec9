"""The rows of an exchange between two stages, and the trailers that prove that all rows arrived.

A row is ``(dest, head, blob)``, and a blob has many tuples.  ``head`` packs level, kind,
subscription, origin and seq, followed by the side data: each column of an exchange takes calls of
the JVM, on which a small micro-batch spends most of its time.  The kinds of rows:

==========  ======================================================================================
`TUPLES`    blob: an Arrow IPC record batch without its schema; side: `CohortRuns` or `RootRuns`
`LEDGER`    blob: ledger rows or reasons, as `ackcore.spark.settle.wire` packs them
`RECEIPTS`  blob: receipts of the trailers that a task got
`RESULT`    blob: a task's result for the driver; its kind is in ``subscription``
`TRAILER`   blob: the number of rows for this destination and level, and a fingerprint of all output
==========  ======================================================================================

``level`` is the level that opens the row; the stages before it pass the row on unchanged.  All
exchanges have the same number of destinations, so ``dest`` is valid in each of them; for ledger
rows it is the shard.  ``origin`` is the task that sent the row, ``seq`` the row's number in that
task's output.

The bytes must depend on the sent data alone, since Spark fails a job if a task that runs again
writes different bytes.  So rows are cut by position and opened in the order of (origin, seq).  The
fingerprint in a trailer covers all rows of its task, for all destinations, and its files.  The
driver accepts a run only if all receivers of a task's trailers got the same fingerprint.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore._records import Int32s, Int64s
from ackcore.ids import root_ids
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.settle.wire import narrowed

TUPLES, LEDGER, RECEIPTS, TRAILER, RESULT = 1, 2, 3, 4, 5

#: The level of the settle stage.
SETTLE = 127

ROW_SCHEMA = pa.schema([("dest", pa.int32()), ("head", pa.binary()), ("blob", pa.binary())])

#: The Spark type of `ROW_SCHEMA`.  Not DDL, which the JVM would have to parse each time.
ROW_TYPE = from_arrow_schema(ROW_SCHEMA)

HEAD = struct.Struct("<BBiqq")  # level, kind, subscription, origin, seq
TRAILER_BLOB = struct.Struct("<qq")  # fingerprint, rows
#: The first byte of packed `RootRuns`, and of packed `CohortRuns`.
_BY_ROOT, _BY_COHORT = 1, 2
_SIDE = struct.Struct("<BBxxIQ")  # `_BY_ROOT`, has offsets, runs, entries
_COHORT_SIDE = struct.Struct("<BBxxI")  # `_BY_COHORT`, are the runs `PlacedRuns`, cohorts
#: The bytes of a run's length and of the step to its place, runs, and the numbers of `Places`.
_PLACES = struct.Struct("<BBxxIQqqq")


def origin_of(level: int, partition: int) -> int:
    """Return the number of a task, made of its stage's level and its partition."""
    return level << 32 | partition


def level_of(origin: int) -> int:
    """Return the level of a task's stage from the task's number."""
    return origin >> 32


def partition_of(origin: int) -> int:
    """Return the partition of a task from its number."""
    return origin & 0xFFFFFFFF


class RootRuns(NamedTuple):
    """The roots of the rows in one blob, which is a batch of tuples sent to one task.

    A run is adjacent rows with the same roots: run i covers the next ``rows[i]`` rows. ``vals``:
    for each root, the XOR of the edges of the run's rows, or the root's cohort. ``offsets`` is None
    if each run has exactly one root. Otherwise run i has the roots ``offsets[i]:offsets[i + 1]``,
    none for untracked rows.
    """

    rows: Int32s
    roots: Int64s
    vals: Int64s
    offsets: Int32s | None = None

    def pack(self) -> bytes:
        """Return the runs as bytes; equal runs give equal bytes."""
        head = _SIDE.pack(_BY_ROOT, self.offsets is not None, len(self.rows), len(self.roots))
        parts = [head, self.roots.tobytes(), self.vals.tobytes(), self.rows.tobytes()]
        if self.offsets is not None:
            parts.append(self.offsets.tobytes())
        return b"".join(parts)

    @classmethod
    def unpack(cls, side: bytes | memoryview) -> RootRuns:
        """Return the runs from the bytes of `pack`."""
        _, wide, runs, entries = _SIDE.unpack_from(side)
        place = _SIDE.size
        roots = np.frombuffer(side, np.int64, entries, place)
        vals = np.frombuffer(side, np.int64, entries, place + 8 * entries)
        place += 16 * entries
        rows = np.frombuffer(side, np.int32, runs, place)
        offsets = np.frombuffer(side, np.int32, runs + 1, place + 4 * runs) if wide else None
        return cls(rows, roots, vals, offsets)


def untracked(rows: int) -> RootRuns:
    """Return one run of ``rows`` untracked rows, which has no roots."""
    nothing = np.empty(0, np.int64)
    return RootRuns(np.array([rows], np.int32), nothing, nothing, np.zeros(2, np.int32))


class Places(NamedTuple):
    """The arguments of `ackcore.ids.root_ids` for the records of a spout's chunk.

    Record i of the chunk is row ``first + i`` of the partition.  ``key`` is unsigned.
    """

    key: int
    partition: int
    first: int
    attempts: int

    def roots(self, places: Int64s) -> Int64s:
        """Return the roots of records, given by their numbers in the chunk."""
        return root_ids(self.key, self.partition, places + self.first, self.attempts)


class PlacedRuns(NamedTuple):
    """The roots of the rows in one blob, computed from the places of their records in a chunk.

    Run i covers the next ``rows[i]`` rows, which are of record ``at[i]`` of the chunk.
    """

    rows: Int64s
    at: Int64s
    places: Places

    def pack(self) -> bytes:
        """Return the runs as bytes; equal runs give equal bytes."""
        rows, steps = narrowed(self.rows), narrowed(np.diff(self.at, prepend=0))
        head = _PLACES.pack(rows.itemsize, steps.itemsize, len(rows), *self.places)
        return b"".join([head, rows.tobytes(), steps.tobytes()])

    @classmethod
    def unpack(cls, data: memoryview) -> Self:
        """Return the runs from the bytes of `pack`."""
        of_rows, of_steps, runs, *origin = _PLACES.unpack_from(data)
        place = _PLACES.size
        rows = np.frombuffer(data, f"<i{of_rows}", runs, place)
        steps = np.frombuffer(data, f"<i{of_steps}", runs, place + of_rows * runs)
        return cls(rows, np.cumsum(steps, dtype=np.int64), Places(*origin))


class CohortRuns(NamedTuple):
    """The roots of the rows in one blob, and their cohorts: sets of roots settled together.

    ``cohorts`` are the cohorts with rows in the blob, each once, and ``edges`` the edge of each. In
    ``runs``, if they are `RootRuns`, the vals are the cohorts of the roots.
    """

    cohorts: Int64s
    edges: Int64s
    runs: RootRuns | PlacedRuns

    def pack(self) -> bytes:
        """Return the cohorts and runs as bytes; equal ones give equal bytes."""
        placed = isinstance(self.runs, PlacedRuns)
        head = _COHORT_SIDE.pack(_BY_COHORT, placed, len(self.cohorts))
        return b"".join([head, self.cohorts.tobytes(), self.edges.tobytes(), self.runs.pack()])


class ReceivedRuns:
    """The roots of the rows of several blobs, and their cohorts, if any.

    ``sides``: the side data of the blobs, at least one: packed `RootRuns` or `CohortRuns`.

    Attributes: ``cohorts``, ``edges``: the cohorts with rows in the blobs, ascending, and the XOR
    of the edges of each. ``groups``: the number of runs. ``offsets``: those of ``runs``.
    """

    def __init__(self, sides: Sequence[bytes]) -> None:
        self._bodies: list[tuple[bool, memoryview, Int64s]] = []
        tables = [np.empty((2, 0), np.int64)]
        for side in sides:
            if side[0] != _BY_COHORT:
                self._bodies.append((False, memoryview(side), np.empty(0, np.int64)))
                continue
            _, placed, n = _COHORT_SIDE.unpack_from(side)
            table = np.frombuffer(side, np.int64, 2 * n, _COHORT_SIDE.size).reshape(2, n)
            tables.append(table)
            body = memoryview(side)[_COHORT_SIDE.size + table.nbytes :]
            self._bodies.append((bool(placed), body, table[0]))
        self.cohorts, self.edges = xor_by(*np.concatenate(tables, axis=1))
        self.offsets: Int32s | None = None
        if all(placed for placed, _, _ in self._bodies):
            self.groups = sum(_PLACES.unpack_from(body)[2] for _, body, _ in self._bodies)
        else:
            self.groups, self.offsets = len(self.runs.rows), self.runs.offsets

    @cached_property
    def runs(self) -> RootRuns:
        """The runs of all rows; their vals are the cohorts of the roots if there are cohorts."""
        parts = []
        for placed, body, cohorts in self._bodies:
            if placed:
                sizes, at, places = PlacedRuns.unpack(body)
                roots, of = places.roots(at), np.repeat(cohorts, len(at))
                parts.append(RootRuns(sizes.astype(np.int32), roots, of))
            else:
                parts.append(RootRuns.unpack(body))
        if len(parts) == 1:
            return parts[0]
        rows = np.concatenate([part.rows for part in parts])
        roots = np.concatenate([part.roots for part in parts])
        vals = np.concatenate([part.vals for part in parts])
        if all(part.offsets is None for part in parts):
            return RootRuns(rows, roots, vals)
        counts = [
            np.ones(len(part.rows), np.int32) if part.offsets is None else np.diff(part.offsets)
            for part in parts
        ]
        return RootRuns(rows, roots, vals, offsets_of(np.concatenate(counts)).astype(np.int32))


def xor_by(ids: Int64s, vals: Int64s) -> tuple[Int64s, Int64s]:
    """Return each id once, ascending, and the XOR of its vals."""
    found, of = np.unique(ids, return_inverse=True)
    totals = np.zeros(len(found), np.int64)
    np.bitwise_xor.at(totals, of, vals)
    return found, totals


class TupleBlob(NamedTuple):
    """A received blob of tuples of one task for one subscription; ``side``: their packed roots."""

    origin: int
    seq: int
    subscription: int
    blob: pa.Buffer
    side: bytes


class TrailerReceipt(NamedTuple):
    """The fingerprint in the trailer, the last row, that task ``receiver`` got from ``origin``."""

    receiver: int
    origin: int
    fingerprint: int
