"""`ReadOffsets`, which reads planned offsets in Spark's tasks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import rebatched
from ackcore._records import Int64s
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.range_reader import RangeReader
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.tasks.reread_stage import Piece

#: The largest number of records and of bytes in a batch.  A task takes about 2 ms per batch,
#: whatever its size.
_ROWS = 1 << 14
BATCH_BYTES = 1 << 22
#: Seconds without a record after which a task fails.  The driver waits for longer outages.
SILENT_S = 15.0
#: The largest gap between needed records that is read along, in records: a seek takes a reader as
#: long as this number of records.
_NEAR = 2_000


class ReadOffsets:
    """A function for ``mapInArrow``: it takes task numbers and returns the records of these tasks.

    A repeated task has the same batches: they are cut by the contents of the records. The batches
    of a `RangeReader` also depend on the timing of the brokers.

    ``client``: the connection to the brokers. ``tasks``: the ranges of each task. ``lost``: deleted
    ranges. If there are any, one more task returns a row for each, with its first offset and
    without key and value.
    """

    def __init__(
        self,
        client: ClientSettings,
        tasks: Sequence[Sequence[OffsetRange]],
        lost: Sequence[OffsetRange],
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._lost = lost
        self._silent_s = SILENT_S

    @property
    def fixed(self) -> ClientSettings:
        """The part of this reader that is the same for all micro-batches: the connection."""
        return self._client

    def to_json(self) -> list[Any]:
        """Return the tasks' ranges and the lost ones, without the connection, for JSON."""
        return [self._tasks, self._lost]

    def planned(self, body: list[Any]) -> ReadOffsets:
        """Return a reader with this connection that reads other ranges, given as by `to_json`."""
        tasks, lost = body
        found = copy.copy(self)
        found._tasks = [[OffsetRange(*one) for one in some] for some in tasks]
        found._lost = [OffsetRange(*one) for one in lost]
        return found

    def __call__(self, batches: Batches) -> Batches:
        """Yield the records of the tasks whose numbers are in the batches.

        Raises ReadTimedOut after 15 s without a record, and OffsetsLost for deleted offsets.
        """
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._of(number)

    def _of(self, number: int) -> Iterator[pa.RecordBatch]:
        if number == len(self._tasks):
            yield lost_rows(self._lost)
            return
        with self._reader() as reader:
            yield from _batches(reader, self._tasks[number])

    def _reader(self) -> RangeReader:
        # Batches that end at these limits are passed on; others are cut and copied.
        return RangeReader(
            self._client, batch_rows=_ROWS, batch_bytes=2 * BATCH_BYTES, timeout_s=self._silent_s
        )

    def pieces(self, places: Mapping[int, Int64s], rows: Mapping[int, int]) -> list[Piece]:
        """Return the pieces to read in order to get some rows of tasks again, by task and offset.

        A row's offset follows from its position if each offset of its task has a record. Else the
        task is read whole. A piece may also have rows between those asked for.

        ``places``: the sorted positions of the rows within each task. ``rows``: the number of all
        rows of each task.
        """
        found = []
        for task, at in sorted(places.items()):
            ranges = self._tasks[task] if task < len(self._tasks) else ()
            if not ranges or sum(one.size for one in ranges) != rows[task]:
                found.append(Piece(task, 0, ranges))
                continue
            first = 0
            for one in ranges:
                offsets = one.start + at[(at >= first) & (at < first + one.size)] - first
                runs = np.split(offsets, np.flatnonzero(np.diff(offsets) > _NEAR) + 1)
                for run in runs if len(offsets) else ():
                    some = one._replace(start=int(run[0]), stop=int(run[-1]) + 1)
                    found.append(Piece(task, first + some.start - one.start, (some,), some.size))
                first += one.size
        return found

    def read_pieces(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Batches]]:
        """Yield each piece with its rows, first those of lost ranges.

        Take the rows of a piece before the next piece. A reader is open until the last one.
        """
        for piece in pieces:
            if not piece.what:
                yield piece, iter([lost_rows(self._lost)])
        some = [piece for piece in pieces if piece.what]
        if not some:
            return
        with self._reader() as reader:
            for piece in some:
                yield piece, _batches(reader, piece.what)


def _batches(reader: RangeReader, ranges: Sequence[OffsetRange]) -> Iterator[pa.RecordBatch]:
    read = (batch for one in ranges for batch in reader.read(one))
    yield from rebatched(read, _ROWS, BATCH_BYTES)


def lost_rows(lost: Sequence[OffsetRange]) -> pa.RecordBatch:
    """Return a batch with a row for each range: its first offset, without key and value."""
    rows = [{"topic": one.topic, "partition": one.partition, "offset": one.start} for one in lost]
    return pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)
