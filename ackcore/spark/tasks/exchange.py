"""What crosses a shuffle between two stages: packed blobs, and trailers that say they were all.

A row of the shuffle is ``(dest, level, kind, origin, seq, edge, blob, side)``; never a tuple each:

==========  ======================================================================================
`TUPLES`    blob: an Arrow IPC record batch without its schema; side: `RootRuns`
`LEDGER`    blob: ledger rows or reasons, as `ackcore.spark.settle.wire` packs them
`RECEIPTS`  blob: which trailers a task has received
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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int32s, Int64s
from ackcore._shuffle import fingerprint
from ackcore.arrow import offsets_of
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.settle import wire

TUPLES, LEDGER, RECEIPTS, TRAILER = 1, 2, 3, 4

#: The level of the stage that settles.
SETTLE = 127

ROW_SCHEMA = pa.schema(
    [
        ("dest", pa.int32()),
        ("level", pa.int8()),
        ("kind", pa.int8()),
        ("origin", pa.int64()),
        ("seq", pa.int64()),
        ("edge", pa.int32()),
        ("blob", pa.binary()),
        ("side", pa.binary()),
    ]
)

#: Blobs that are handed out together: some 64 Ki short rows, or a few long ones.
_CHUNK_BYTES = 1 << 20
#: What no blob makes them larger than, unless it is by itself.
_MOST_CHUNK_BYTES = 1 << 28

#: The same as Spark has it.  Not DDL, which the JVM would have to read each time.
ROW_TYPE = from_arrow_schema(ROW_SCHEMA)

_HEAD = struct.Struct("<iBBqq")
_TRAILER = struct.Struct("<qq")  # fingerprint, rows
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
    """Tuples that a task sent along an edge together, as they were received."""

    origin: int
    seq: int
    edge: int
    blob: pa.Buffer
    side: bytes


class TrailerReceipt(NamedTuple):
    """A trailer as one task received it."""

    receiver: int
    origin: int
    fingerprint: int


class Outbox:
    """What one task sends, and the tally of it.

    Parameters
    ----------
    origin : int
        The task.
    dests : int
        Destinations of every exchange.
    """

    def __init__(self, origin: int, dests: int) -> None:
        self._origin = origin
        self._dests = dests
        self._rows: list[tuple[Any, ...]] = []
        self._sent: Counter[tuple[int, int]] = Counter()
        self._seq = 0
        #: Of all that was sent and written so far.
        self.fingerprint = 0

    def seal(self, data: Any) -> None:
        """Take something that was written elsewhere into the fingerprint."""
        self.fingerprint = fingerprint(data, self.fingerprint)

    def send(
        self, dest: int, level: int, kind: int, blob: Any, side: bytes = b"", edge: int = 0
    ) -> None:
        """Send one row."""
        self.seal(_HEAD.pack(dest, level, kind, edge, self._seq))
        self.seal(blob)
        self.seal(side)
        self._sent[level, dest] += 1
        self._rows.append((dest, level, kind, self._origin, self._seq, edge, blob, side))
        self._seq += 1

    def send_tuples(
        self, edge: int, level: int, batch: pa.RecordBatch, counts: Int64s, runs: list[RootRuns]
    ) -> None:
        """Send rows that lie in the order of their destinations, a blob for each that has any."""
        start = 0
        for dest in np.flatnonzero(counts).tolist():
            rows = batch.slice(start, counts[dest])
            start += int(counts[dest])
            self.send(dest, level, TUPLES, rows.serialize(), runs[dest].pack(), edge)

    def send_events(self, events: wire.Events) -> None:
        """Send ledger rows to their shards."""
        if len(events.root_ids):
            self._send_packed(wire.pack_events(events, self._dests))

    def send_reasons(self, reasons: pa.Table) -> None:
        """Send the reasons of failures to the shards of their roots."""
        if len(reasons):
            self._send_packed(wire.pack_reasons(reasons, self._dests))

    def _send_packed(self, packed: pa.RecordBatch) -> None:
        dests = packed.column(0).to_pylist()
        for dest, blob in zip(dests, packed.column(2), strict=True):
            self.send(dest, SETTLE, LEDGER, blob.as_buffer())

    def send_trailers(self, levels: Iterable[int], task_report: bytes) -> None:
        """End the output: a trailer to every destination at each level that may get rows.

        Parameters
        ----------
        levels : iterable of int
            Every level at which this task's stage may have something opened.
        task_report : bytes
            For the driver; it goes to one destination of the last level.
        """
        self.seal(task_report)
        sent = dict(self._sent)
        rows = []
        for level in levels:
            for dest in range(self._dests):
                blob = _TRAILER.pack(self.fingerprint, sent.get((level, dest), 0))
                side = task_report if level == SETTLE and dest == 0 else b""
                rows.append((dest, level, TRAILER, self._origin, self._seq, 0, blob, side))
        self._rows += rows

    def taken(self) -> Iterator[pa.RecordBatch]:
        """Return what was sent since the last call, as batches of the shuffle's rows."""
        # Blobs of a batch are together below what 32-bit offsets can address.
        batch: list[tuple[Any, ...]] = []
        size = 0
        for row in self._rows:
            row_size = len(row[6]) + len(row[7])
            if batch and size + row_size > _BATCH_BYTES:
                yield _to_batch(batch)
                batch, size = [], 0
            batch.append(row)
            size += row_size
        self._rows = []
        if batch:
            yield _to_batch(batch)


_BATCH_BYTES = 1 << 26


def _to_batch(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True))
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns[:6], ROW_SCHEMA, strict=False)
    ]
    arrays += [_binary(column) for column in columns[6:]]
    return pa.RecordBatch.from_arrays(arrays, schema=ROW_SCHEMA)


def _binary(values: tuple[Any, ...]) -> pa.Array:
    """Buffers and bytes as one binary column, each copied once."""
    offsets = offsets_of([len(value) for value in values]).astype(np.int32)
    data = np.empty(int(offsets[-1]), np.uint8)
    for value, start, end in zip(values, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        data[start:end] = np.frombuffer(value, np.uint8)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


class Inbox:
    """What one task of a level has received, and whether that is all.

    Parameters
    ----------
    level : int
        Rows of other levels are passed on.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self.tuples: list[TupleBlob] = []
        self.ledger: list[pa.Buffer] = []
        #: At the last level: packed receipts of other tasks, and all tasks' reports by origin.
        self.receipts_of_others: list[bytes] = []
        self.task_reports: dict[int, set[bytes]] = {}
        self._got: Counter[int] = Counter()
        self._trailers: dict[int, set[tuple[int, int]]] = {}

    def read(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Take in what is for this level; return what is to be passed on, if there is any."""
        if batch.schema.types != ROW_SCHEMA.types:
            batch = batch.cast(ROW_SCHEMA)  # a setting of Spark's makes offsets wide
        levels = batch.column(1).to_numpy()
        mine = np.flatnonzero(levels == self._level).tolist()
        passed = None
        if len(mine) < len(batch):
            passed = batch.filter(pa.array(levels != self._level)) if mine else batch
        # Read where they are: to filter out what is mine would copy every blob.
        kinds, origins, seqs, edges = (batch.column(i).to_pylist() for i in (2, 3, 4, 5))
        blobs, sides = batch.column(6), batch.column(7)
        for i in mine:
            kind, origin, blob = kinds[i], origins[i], blobs[i].as_buffer()
            if kind == TRAILER:
                self._trailers.setdefault(origin, set()).add(_TRAILER.unpack(blob))
                report = sides[i].as_py()
                if report:
                    self.task_reports.setdefault(origin, set()).add(report)
                continue
            self._got[origin] += 1
            if kind == TUPLES:
                row = TupleBlob(origin, seqs[i], edges[i], blob, sides[i].as_py())
                self.tuples.append(row)
            elif kind == LEDGER:
                self.ledger.append(blob)
            else:
                self.receipts_of_others.append(blob.to_pybytes())
        return passed

    def check(self) -> None:
        """Raise `RuntimeError` unless every task's rows came, as its trailer counts them."""
        for origin in self._got.keys() | self._trailers.keys():
            trailers = self._trailers.get(origin)
            rows = self._got[origin]
            if trailers is None or rows not in {count for _, count in trailers}:
                sent = sorted(n for _, n in trailers) if trailers else "an unknown number of"
                raise RuntimeError(
                    f"a task at level {self._level} got {rows} of {sent} rows from partition "
                    f"{partition_of(origin)} of level {level_of(origin)}: data was lost on the way"
                )

    def chunks(self, edges: Sequence[int]) -> Iterator[tuple[list[TupleBlob], RootRuns]]:
        """Return some blobs of one edge at a time, and the runs of their rows.

        They come in the order of ``edges``, and then in that in which they were sent: it does not
        depend on when they came.
        """
        turns = {edge: turn for turn, edge in enumerate(edges)}
        some: list[TupleBlob] = []
        size = 0
        for one in sorted(self.tuples, key=lambda one: (turns[one.edge], one.origin, one.seq)):
            more = len(one.blob) + len(one.side)
            full = size >= _CHUNK_BYTES or size + more > _MOST_CHUNK_BYTES
            if some and (one.edge != some[0].edge or full):
                yield some, joined_runs([blob.side for blob in some])
                some, size = [], 0
            some.append(one)
            size += more
        if some:
            yield some, joined_runs([blob.side for blob in some])

    def receipts(self, receiver: int) -> bytes:
        """Return which trailers this task has received, for the driver to compare."""
        found = [
            (receiver, origin, seal)
            for origin, trailers in self._trailers.items()
            for seal, _ in trailers
        ]
        return np.array(sorted(found), np.int64).tobytes()


def read_receipts(blob: bytes) -> list[TrailerReceipt]:
    """Return what `Inbox.receipts` made bytes of."""
    rows = np.frombuffer(blob, np.int64).reshape(-1, 3).tolist()
    return [TrailerReceipt(*row) for row in rows]
