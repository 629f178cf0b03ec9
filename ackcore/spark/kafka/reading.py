"""What reads the offsets of a plan: in each task, without the JVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from ackcore.arrow import rebatched
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange
from ackcore.kafka.reading import RangeReader
from ackcore.kafka.settings import ClientSettings
from ackcore.spark.base.batches import Batches

#: Records of a batch, and bytes if they are long: a task takes some 2 ms for each batch, whatever
#: is in it.
_ROWS = 1 << 14
BATCH_BYTES = 1 << 22
#: For how long nothing may come, in seconds: the driver waits for what is away longer.
SILENT_S = 15.0


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
        # Batches that end where they are to are handed on; others are cut and copied.
        with RangeReader(
            self._client,
            batch_rows=_ROWS,
            batch_bytes=2 * BATCH_BYTES,
            timeout_s=self._silent_s,
        ) as reader:
            read = (batch for one in self._tasks[number] for batch in reader.read(one))
            yield from rebatched(read, _ROWS, BATCH_BYTES)


def lost_rows(lost: Sequence[OffsetRange]) -> pa.RecordBatch:
    """Return a row for each range, of its first offset."""
    rows = [{"topic": one.topic, "partition": one.partition, "offset": one.start} for one in lost]
    return pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)
