"""The rows of an exchange between two stages, and the trailers that say they were all.

A row is ``(dest, level, kind, origin, seq, subscription, blob, side)``, never a tuple:

==========  ======================================================================================
`TUPLES`    blob: an Arrow IPC record batch without its schema; side: `RootRuns`
`LEDGER`    blob: ledger rows or reasons, as `ackcore.spark.settle.wire` packs them
`RECEIPTS`  blob: which trailers a task has received
`RESULT`    blob: what a task has for the driver, of the kind that ``subscription`` says
`TRAILER`   blob: what a task has sent to this destination at this level, and a fingerprint of all
==========  ======================================================================================

``level`` is where a row is opened; the stages before it pass it on as it is.  All exchanges have
the same number of destinations, so ``dest`` holds for each of them; ledger rows have their shard
there.  ``origin`` is the task that sent the row, ``seq`` its place in that task's work.

Bytes depend on what is sent and nothing else, since Spark gives a job up if a task that runs again
writes others: rows are cut by position, opened in the order of (origin, seq), and the fingerprint
in a trailer is of everything its task emitted, to whichever destination, and of its files.  A run
is accepted only if all tasks that got something from a task got one and the same fingerprint.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int32s, Int64s
from ackcore.arrow import offsets_of
from ackcore.spark.base.versions import from_arrow_schema

TUPLES, LEDGER, RECEIPTS, TRAILER, RESULT = 1, 2, 3, 4, 5

#: The level of the stage that settles.
SETTLE = 127

ROW_SCHEMA = pa.schema(
    [
        ("dest", pa.int32()),
        ("level", pa.int8()),
        ("kind", pa.int8()),
        ("origin", pa.int64()),
        ("seq", pa.int64()),
        ("subscription", pa.int32()),
        ("blob", pa.binary()),
        ("side", pa.binary()),
    ]
)

#: The same as Spark has it.  Not DDL, which the JVM would have to read each time.
ROW_TYPE = from_arrow_schema(ROW_SCHEMA)

HEAD = struct.Struct("<iBBqq")
TRAILER_BLOB = struct.Struct("<qq")  # fingerprint, rows
_SIDE = struct.Struct("<BBxxIQ")  # version, has offsets, runs, entries
_VERSION = 1


def origin_of(level: int, partition: int) -> int:
    """Return the number of a task: its stage's level and its partition."""
    return level << 32 | partition


def level_of(origin: int) -> int:
    """Return the level of a task's stage."""
    return origin >> 32


def partition_of(origin: int) -> int:
    """Return the partition of a task."""
    return origin & 0xFFFFFFFF


class RootRuns(NamedTuple):
    """The tracking of one blob of rows: run i covers the next ``rows[i]`` rows.

    ``offsets`` is None where each run has exactly one root; else run i has the roots
    ``offsets[i]:offsets[i + 1]``, none for untracked rows.
    """

    rows: Int32s
    roots: Int64s
    vals: Int64s
    offsets: Int32s | None = None

    def pack(self) -> bytes:
        """Return the runs as bytes that depend on nothing else."""
        head = _SIDE.pack(_VERSION, self.offsets is not None, len(self.rows), len(self.roots))
        parts = [head, self.roots.tobytes(), self.vals.tobytes(), self.rows.tobytes()]
        if self.offsets is not None:
            parts.append(self.offsets.tobytes())
        return b"".join(parts)

    @classmethod
    def unpack(cls, side: bytes) -> RootRuns:
        """Return what `pack` made bytes of."""
        version, wide, runs, entries = _SIDE.unpack_from(side)
        if version != _VERSION:
            raise ValueError(
                f"tracking of version {version} was met, and this ackcore reads version "
                f"{_VERSION}; driver and workers must run the same one"
            )
        place = _SIDE.size
        roots = np.frombuffer(side, np.int64, entries, place)
        vals = np.frombuffer(side, np.int64, entries, place + 8 * entries)
        place += 16 * entries
        rows = np.frombuffer(side, np.int32, runs, place)
        offsets = np.frombuffer(side, np.int32, runs + 1, place + 4 * runs) if wide else None
        return cls(rows, roots, vals, offsets)


def untracked(rows: int) -> RootRuns:
    """Return the runs of untracked rows."""
    nothing = np.empty(0, np.int64)
    return RootRuns(np.array([rows], np.int32), nothing, nothing, np.zeros(2, np.int32))


def joined_runs(sides: Sequence[bytes]) -> RootRuns:
    """Return the runs of blobs laid one after the other, of which these are the sides."""
    parts = [RootRuns.unpack(side) for side in sides]
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows for part in parts])
    roots = np.concatenate([part.roots for part in parts])
    vals = np.concatenate([part.vals for part in parts])
    if all(part.offsets is None for part in parts):
        return RootRuns(rows, roots, vals)
    sizes = np.concatenate(
        [
            np.ones(len(part.rows), np.int32) if part.offsets is None else np.diff(part.offsets)
            for part in parts
        ]
    )
    return RootRuns(rows, roots, vals, offsets_of(sizes).astype(np.int32))


class TupleBlob(NamedTuple):
    """Tuples that a task sent for one subscription together, as they were received."""

    origin: int
    seq: int
    subscription: int
    blob: pa.Buffer
    side: bytes


class TrailerReceipt(NamedTuple):
    """A trailer as one task received it."""

    receiver: int
    origin: int
    fingerprint: int
