"""What the task that reads a plan's offsets hands on: without a Kafka."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore.kafka import ClientSettings
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange
from ackcore.spark.kafka import reading
from ackcore.spark.kafka.reading import ReadOffsets
from ackcore.spark.tasks.spout_stage import sampled

CLIENT = ClientSettings("nowhere:9092")
RANGES = (OffsetRange("t", 0, 0, 30), OffsetRange("t", 1, 5, 12), OffsetRange("u", 0, 0, 3))


class Scripted:
    """A reader that cuts ranges where it is told to, as a real one does by its brokers' timing."""

    cuts: frozenset[int] = frozenset()

    def __init__(self, client, **_):
        self.place = 0

    def read(self, range_):
        rows = []
        for offset in range(range_.start, range_.stop):
            value = b"x" * (offset % 7 * 10)
            headers = [("h", value)] if offset % 3 == 0 else None
            rows.append({"value": value, "headers": headers, "offset": offset})
            rows[-1] |= {"topic": range_.topic, "partition": range_.partition}
            self.place += 1
            if self.place in self.cuts:
                yield pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)
                rows = []
        if rows:
            yield pa.RecordBatch.from_pylist(rows, RECORD_SCHEMA)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def read(cuts, rows, most_bytes):
    numbers = pa.RecordBatch.from_pydict({"id": [0]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "RangeReader", Scripted)
        patch.setattr(Scripted, "cuts", cuts)
        patch.setattr(reading, "_ROWS", rows)
        patch.setattr(reading, "BATCH_BYTES", most_bytes)
        return [*ReadOffsets(CLIENT, [RANGES], [])([numbers])]


@given(
    cuts=st.frozensets(st.integers(1, 40)),
    rows=st.integers(1, 50),
    most_bytes=st.integers(50, 5000),
)
def test_a_task_that_reads_again_has_the_same_batches(cuts, rows, most_bytes):
    """Where a bolt reads them without an exchange, they are its chunks."""
    whole, again = read(frozenset(), rows, most_bytes), read(cuts, rows, most_bytes)
    assert [batch.to_pylist() for batch in again] == [batch.to_pylist() for batch in whole]
    assert [sampled(batch, 0) for batch in again] == [sampled(batch, 0) for batch in whole]
    offsets = [offset for batch in again for offset in batch.column("offset").to_pylist()]
    assert offsets == [*range(30), *range(5, 12), *range(3)]
