"""The reader of planned offsets, in each task and without the JVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.arrow import rebatched
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange
from ackcore.kafka.reading import RangeReader
from ackcore.kafka.settings import ClientSettings
from ackcore.spark.base.batches import Batches
from ackcore.spark.tasks.pieces import Piece

#: Records of a batch, and bytes if they are long: a task takes some 2 ms for each batch, whatever
#: is in it.
_ROWS = 1 << 14
BATCH_BYTES = 1 << 22
#: For how long nothing may come, in seconds: the driver waits for what is away longer.
SILENT_S = 15.0
#: Records that are read along with those on either side of them: to begin anew takes a reader as
#: long as so many do.
_NEAR = 2_000


class ReadOffsets:
    """Reads what tasks are to read, given their numbers; for ``mapInArrow``.

    The batches of a task are cut by position and by what the records hold, so that a task that runs
    again has the same chunks: a reader's go by when the brokers answer.

    Parameters
    ----------
    client : ClientSettings
        How the brokers are reached.
    tasks : sequence of sequence of OffsetRange
        By task.
    lost : sequence of OffsetRange
        What is not there any more: the last task has a row without key and value for each, at its
        first offset.
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

    def __call__(self, batches: Batches) -> Batches:
        """Return the records of the tasks."""
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
        # Batches that end where they are to are handed on; others are cut and copied.
        return RangeReader(
            self._client,
            batch_rows=_ROWS,
            batch_bytes=2 * BATCH_BYTES,
            timeout_s=self._silent_s,
        )

    def pieces(self, places: Mapping[int, Int64s], rows: Mapping[int, int]) -> list[Piece]:
        """Return what to read for rows at these places of tasks that had so many rows.

        Where each offset was a record, a place says which; else the task is read whole.

        Parameters
        ----------
        places : mapping from int to numpy.ndarray of int64
            By task, sorted.
        rows : mapping from int to int
            By task.
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
        """Yield pieces and their rows, which are taken before the next piece is asked for."""
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
    """Return a row for each range, of its first offset."""
    rows = [{"topic": one.topic, "partition": one.partition, "offset": one.start} for one in lost]
    return pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)
