"""Exchange between stages: sends rows, and receives them; raises if some of them are missing.

`exchange_format` defines the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import offsets_of
from ackcore._backend import fingerprint
from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import Batches, MapInArrow
from ackcore.spark.tasks.exchange_format import (
    HEAD,
    LEDGER,
    RECEIPTS,
    ROW_SCHEMA,
    SETTLE,
    TRAILER,
    TRAILER_BLOB,
    TUPLES,
    CohortRuns,
    RootRuns,
    TrailerReceipt,
    TupleBlob,
    level_of,
    partition_of,
)

#: Bytes of blobs that are opened together: about 64 Ki short rows, or a few long ones.
_CHUNK_BYTES = 1 << 20


@dataclass(eq=False, repr=False)
class Outbox:
    """The rows that one task sends to later stages, with their counts and fingerprint.

    ``origin``: the number of the task. ``dests``: the number of destinations of every exchange.
    """

    _origin: int
    _dests: int
    #: The fingerprint of all rows sent and files written so far.
    fingerprint: int = 0
    _rows: list[tuple[Any, ...]] = field(default_factory=list)
    _sent: Counter[tuple[int, int]] = field(default_factory=Counter)
    _seq: int = 0

    def add_to_fingerprint(self, data: Any) -> None:
        """Add output of the task that is not sent, such as a file, to the fingerprint."""
        self.fingerprint = fingerprint(data, self.fingerprint)

    def send(
        self, dest: int, level: int, kind: int, blob: Any, side: bytes = b"", subscription: int = 0
    ) -> None:
        """Add one row of `exchange_format` to the output, which `taken` yields, and count it."""
        head = HEAD.pack(level, kind, subscription, self._origin, self._seq) + side
        self.add_to_fingerprint(dest.to_bytes(4, "little") + head)
        self.add_to_fingerprint(blob)
        self._sent[level, dest] += 1
        self._rows.append((dest, head, blob))
        self._seq += 1

    def send_tuples(
        self,
        subscription: int,
        level: int,
        batch: pa.RecordBatch,
        counts: Int64s,
        runs: Sequence[RootRuns | CohortRuns],
    ) -> None:
        """Send rows sorted by destination, as one blob for each destination with rows.

        ``counts``, ``runs``: for each destination, the number of its rows, and their roots.
        """
        start = 0
        for dest in np.flatnonzero(counts).tolist():
            rows = batch.slice(start, counts[dest])
            start += int(counts[dest])
            self.send(dest, level, TUPLES, rows.serialize(), runs[dest].pack(), subscription)

    def send_ledger_rows(self, packed: pa.RecordBatch) -> None:
        """Send packed ledger rows or reasons (`ackcore.spark.settle.wire`) to their shards."""
        dests = packed.column(0).to_pylist()
        for dest, blob in zip(dests, packed.column(2), strict=True):
            self.send(dest, SETTLE, LEDGER, blob.as_buffer())

    def send_trailers(self, levels: Iterable[int], task_report: bytes, alike: bytes) -> None:
        """End the output with a trailer for each level and destination.

        A trailer has the number of rows sent there, and the fingerprint of the whole output.

        ``levels``: every level that this task's stage may send rows to. ``task_report``: the report
        for the driver; it goes to one task of the settle stage. ``alike``: the part of the report
        that enters the fingerprint: it is the same in all attempts with the same output.
        """
        self.add_to_fingerprint(alike)
        for level in levels:
            head = HEAD.pack(level, TRAILER, 0, self._origin, self._seq)
            for dest in range(self._dests):
                blob = TRAILER_BLOB.pack(self.fingerprint, self._sent[level, dest])
                side = task_report if level == SETTLE and dest == 0 else b""
                self._rows.append((dest, head + side, blob))

    def taken(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows sent since the last call, as batches for Spark's shuffle."""
        # The blobs of a batch together must fit into 32-bit offsets.
        batch: list[tuple[Any, ...]] = []
        size = 0
        for row in self._rows:
            row_size = len(row[1]) + len(row[2])
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
    dests, heads, blobs = zip(*rows, strict=True)
    columns = [pa.array(dests, pa.int32()), _binary(heads), _binary(blobs)]
    return pa.RecordBatch.from_arrays(columns, schema=ROW_SCHEMA)


def _binary(values: tuple[Any, ...]) -> pa.Array:
    """Return buffers and bytes as one binary column, each copied once."""
    offsets = offsets_of([len(value) for value in values]).astype(np.int32)
    data = np.empty(int(offsets[-1]), np.uint8)
    for value, start, end in zip(values, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        data[start:end] = np.frombuffer(value, np.uint8)
    return pa.BinaryArray.from_buffers(
        pa.binary(), len(values), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )


#: The destination of the row that replaces the rest of a task's output.
TOO_LARGE = -1


@dataclass(frozen=True)
class Limited:
    """A stage whose output ends with a row to `TOO_LARGE` in place of the batch past ``nbytes``."""

    stage: MapInArrow
    nbytes: int

    def __call__(self, batches: Batches) -> Batches:
        """Process one partition, for mapInArrow."""
        left = self.nbytes
        for batch in self.stage(batches):
            left -= batch.nbytes
            if left < 0:
                yield _to_batch([(TOO_LARGE, b"", b"")])
                return
            yield batch


class Inbox:
    """The rows that one task of a level has received, with a check that they are complete.

    ``level``: the number of the task's stage. Rows for later stages are passed on.
    """

    def __init__(self, level: int) -> None:
        self._level = level
        self.tuples: list[TupleBlob] = []
        self.ledger: list[pa.Buffer] = []
        #: At the last level: packed receipts of other tasks, all tasks' reports by origin, and
        #: other results of tasks for the driver as (kind, blob).
        self.receipts_of_others: list[bytes] = []
        self.results: list[tuple[int, bytes]] = []
        self.task_reports: dict[int, set[bytes]] = {}
        self._got: Counter[int] = Counter()
        self._trailers: dict[int, set[tuple[int, int]]] = {}

    def read(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Keep the rows for this stage; return those for later stages, None if there are none."""
        if batch.schema.types != ROW_SCHEMA.types:
            batch = batch.cast(ROW_SCHEMA)  # a Spark setting makes offsets 64 bits wide
        heads, blobs = batch.column(1), batch.column(2)
        others = np.zeros(len(batch), np.bool_)
        # Blobs are read in place: filtering the rows of this level would copy every blob.
        for i in range(len(batch)):
            head = heads[i].as_buffer()
            level, kind, subscription, origin, seq = HEAD.unpack_from(head)
            if level != self._level:
                others[i] = True
                continue
            blob = blobs[i].as_buffer()
            if kind == TRAILER:
                self._trailers.setdefault(origin, set()).add(TRAILER_BLOB.unpack(blob))
                if len(head) > HEAD.size:
                    report = head[HEAD.size :].to_pybytes()
                    self.task_reports.setdefault(origin, set()).add(report)
                continue
            self._got[origin] += 1
            if kind == TUPLES:
                side = head[HEAD.size :].to_pybytes()
                self.tuples.append(TupleBlob(origin, seq, subscription, blob, side))
            elif kind == LEDGER:
                self.ledger.append(blob)
            elif kind == RECEIPTS:
                self.receipts_of_others.append(blob.to_pybytes())
            else:
                self.results.append((subscription, blob.to_pybytes()))
        if others.all():
            return batch
        return batch.filter(pa.array(others)) if others.any() else None

    def check(self) -> None:
        """Raise RuntimeError if a task's rows are not as many as its trailer counts.

        A task of which neither rows nor a trailer came is noticed by the driver, from receipts.
        """
        for origin in self._got.keys() | self._trailers.keys():
            trailers = self._trailers.get(origin)
            rows = self._got[origin]
            if trailers is None or rows not in {count for _, count in trailers}:
                counts = sorted({count for _, count in trailers or ()})
                sent = " or ".join(map(str, counts)) or "an unknown number"
                what, hint = "were lost", ""
                if counts and rows > counts[-1]:
                    what, hint = "arrived twice", ", or for a bolt that forks: end its child"
                raise RuntimeError(
                    f"a task of stage {self._level} got {counted(rows, 'row')} from partition "
                    f"{partition_of(origin)} of stage {level_of(origin)}, which sent {sent}: rows "
                    f"{what} in Spark's shuffle. This attempt does not count, and Spark or ackcore "
                    "tries again. If that does not help, look for errors of the shuffle in the "
                    f"logs of the executors{hint}"
                )

    def chunks(self, subscriptions: Sequence[int]) -> Iterator[list[TupleBlob]]:
        """Yield about a megabyte of blobs of one subscription at a time.

        Blobs are in the order of ``subscriptions``, then of their sender and its order of sending.
        The order of arrival has no effect.
        """
        turns = {subscription: turn for turn, subscription in enumerate(subscriptions)}
        some: list[TupleBlob] = []
        size = 0
        for one in sorted(
            self.tuples, key=lambda one: (turns[one.subscription], one.origin, one.seq)
        ):
            if some and (one.subscription != some[0].subscription or size >= _CHUNK_BYTES):
                yield some
                some, size = [], 0
            some.append(one)
            size += len(one.blob) + len(one.side)
        if some:
            yield some

    def receipts(self, receiver: int) -> bytes:
        """Return packed receipts of the trailers that came here, to task ``receiver``."""
        found = [
            (receiver, origin, drawn)
            for origin, trailers in self._trailers.items()
            for drawn, _ in trailers
        ]
        return np.array(sorted(found), np.int64).tobytes()


def read_receipts(blob: bytes) -> list[TrailerReceipt]:
    """Unpack the bytes of `Inbox.receipts`."""
    rows = np.frombuffer(blob, np.int64).reshape(-1, 3).tolist()
    return [TrailerReceipt(*row) for row in rows]
