"""The rows of an exchange between two stages, and the trailers that prove that all rows arrived.

A row is ``(dest, level, kind, origin, seq, subscription, blob, side)``, never a tuple:

==========  ======================================================================================
`TUPLES`    blob: an Arrow IPC record batch without its schema; side: `RootRuns`
`LEDGER`    blob: ledger rows or reasons, as `ackcore.spark.settle.wire` packs them
`RECEIPTS`  blob: receipts of the trailers that a task got
`RESULT`    blob: a task's result for the driver; its kind is in ``subscription``
`TRAILER`   blob: the number of rows for this destination and level, and a fingerprint of all output
==========  ======================================================================================

``level`` is the level that opens the row; the stages before it pass the row on unchanged.  All
exchanges have the same number of destinations, so ``dest`` is valid in each of them; for ledger
rows it is the shard.  ``origin`` is the task that sent the row, ``seq`` the row's place in that
task's output.

The bytes must depend on the sent data alone, since Spark fails a job if a task that runs again
writes different bytes.  So rows are cut by position and opened in the order of (origin, seq).  The
fingerprint in a trailer covers all rows of its task, for all destinations, and its files.  The
driver accepts a run only if all receivers of a task's trailers got the same fingerprint.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._arrow import offsets_of
from ackcore._records import Int32s, Int64s
from ackcore.spark.base.versions import from_arrow_schema

TUPLES, LEDGER, RECEIPTS, TRAILER, RESULT = 1, 2, 3, 4, 5

#: The level of the settle stage.
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

#: The Spark type of `ROW_SCHEMA`.  Not DDL, which the JVM would have to parse each time.
ROW_TYPE = from_arrow_schema(ROW_SCHEMA)

HEAD = struct.Struct("<iBBqq")
TRAILER_BLOB = struct.Struct("<qq")  # fingerprint, rows
_SIDE = struct.Struct("<BBxxIQ")  # version, has offsets, runs, entries
_VERSION = 1


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
    """The tracking of one blob of rows: run i covers the next ``rows[i]`` rows.

    ``offsets`` is None if each run has exactly one root.  Otherwise run i has the roots
    ``offsets[i]:offsets[i + 1]``, none for untracked rows.
    """

    rows: Int32s
    roots: Int64s
    vals: Int64s
    offsets: Int32s | None = None

    def pack(self) -> bytes:
        """Return the runs as bytes; equal runs give equal bytes."""
        head = _SIDE.pack(_VERSION, self.offsets is not None, len(self.rows), len(self.roots))
        parts = [head, self.roots.tobytes(), self.vals.tobytes(), self.rows.tobytes()]
        if self.offsets is not None:
            parts.append(self.offsets.tobytes())
        return b"".join(parts)

    @classmethod
    def unpack(cls, side: bytes) -> RootRuns:
        """Return the runs from the bytes of `pack`; raise `ValueError` for another version."""
        version, wide, runs, entries = _SIDE.unpack_from(side)
        if version != _VERSION:
            raise ValueError(
                f"received tracking data of version {version}, and this ackcore reads version "
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
    """Return the runs of a number of untracked rows."""
    nothing = np.empty(0, np.int64)
    return RootRuns(np.array([rows], np.int32), nothing, nothing, np.zeros(2, np.int32))


def joined_runs(sides: Sequence[bytes]) -> RootRuns:
    """Return the runs of concatenated blobs from the packed runs (sides) of each."""
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
    """A received blob of tuples that one task sent for one subscription."""

    origin: int
    seq: int
    subscription: int
    blob: pa.Buffer
    side: bytes


class TrailerReceipt(NamedTuple):
    """The receipt of one task's trailer by another task."""

    receiver: int
    origin: int
    fingerprint: int
