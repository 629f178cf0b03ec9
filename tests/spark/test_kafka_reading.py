"""The rows that a task reads of a plan's offsets: without a Kafka."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.ranges import RECORD_SCHEMA, OffsetRange
from ackcore.spark.kafka import offset_reading
from ackcore.spark.kafka.offset_reading import ReadOffsets
from ackcore.spark.tasks.reread_stage import Piece

CLIENT = ClientSettings("nowhere:9092")
FOUND = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 50), st.integers(1, 40)),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one[0],
)
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
        patch.setattr(offset_reading, "RangeReader", Scripted)
        patch.setattr(Scripted, "cuts", cuts)
        patch.setattr(offset_reading, "_ROWS", rows)
        patch.setattr(offset_reading, "BATCH_BYTES", most_bytes)
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
    offsets = [offset for batch in again for offset in batch.column("offset").to_pylist()]
    assert offsets == [*range(30), *range(5, 12), *range(3)]


@given(FOUND, st.data())
def test_what_failed_is_read_again_and_little_else(found, data):
    """Each place once, as the record that it was; where offsets are missing the task is whole."""
    ranges = tuple(OffsetRange("t", partition, start, start + n) for partition, start, n in found)
    was = [(one.partition, at) for one in ranges for at in range(one.start, one.stop)]
    failed = sorted(data.draw(st.sets(st.integers(0, len(was) - 1), min_size=1)))
    again = ReadOffsets(CLIENT, [(), ranges], [])
    rows = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offset_reading, "RangeReader", Scripted)
        patch.setattr(offset_reading, "_NEAR", 3)
        pieces = again.pieces({1: np.array(failed)}, {0: 0, 1: len(was)})
        for piece, batches in again.read_pieces(pieces):
            assert piece.partition == 1
            read = [tuple(row) for batch in batches for row in zip(*_where(batch), strict=True)]
            assert len(read) == piece.rows
            assert not rows.keys() & range(piece.first, piece.first + len(read))
            rows |= dict(enumerate(read, piece.first))
    assert rows == {place: was[place] for place in rows}
    assert set(failed) <= rows.keys()
    assert len(rows) <= 3 * len(failed)
    assert again.pieces({1: np.array(failed)}, {1: len(was) - 1}) == [Piece(1, 0, ranges)]


def _where(batch):
    return (batch.column(name).to_pylist() for name in ("partition", "offset"))


def test_what_was_lost_is_read_again_whole():
    read = ReadOffsets(CLIENT, [], [OffsetRange("t", 0, 3, 9)])
    ((piece, batches),) = read.read_pieces(read.pieces({0: np.array([0])}, {0: 1}))
    (rows,) = batches
    assert rows["offset"].to_pylist() == [3]
    assert piece.rows is None
