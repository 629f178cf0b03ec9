"""`OffsetRange`, and the Arrow columns of the records that are read from one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from ackcore._backend import kafka_implementation
from ackcore._records import BinaryColumn, UInt8s

if TYPE_CHECKING:
    from ackcore._kafka_native import RawMessages, RecordBuffers
else:
    RecordBuffers = kafka_implementation().RecordBuffers

#: The columns of a record.  ``timestamp`` is null if the record has none, which Kafka may store as
#: -1.  ``headers`` may be null if a record has none, and so may a header's value.
RECORD_SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field(
            "headers",
            pa.list_(
                pa.struct([pa.field("key", pa.string(), False), pa.field("value", pa.binary())])
            ),
        ),
        pa.field("topic", pa.string(), False),
        pa.field("partition", pa.int32(), False),
        pa.field("offset", pa.int64(), False),
        pa.field("timestamp", pa.timestamp("ms", "UTC")),
    ]
)
_HEADERS = RECORD_SCHEMA.field("headers").type
_TIMESTAMP = RECORD_SCHEMA.field("timestamp").type
#: Bytes of the offset that a column stores per value.
_OFFSET_BYTES = 4


class OffsetRange(NamedTuple):
    """The offsets of a partition from ``start`` to ``stop`` - 1."""

    topic: str
    partition: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of offsets, 0 if ``stop`` is below ``start``. There may be fewer records."""
        return max(0, self.stop - self.start)

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} [{self.start}, {self.stop})"


class RecordColumns:
    """Collects the records of one partition as Arrow columns, until they become a batch.

    It copies the contents of messages, so that librdkafka can reuse their memory while it is in
    the processor's caches.
    """

    def __init__(self, topic: str, partition: int) -> None:
        self._topic = pa.scalar(topic, pa.string())
        self._partition = pa.scalar(partition, pa.int32())
        self._buffers = RecordBuffers()
        #: The columns of topic and partition, with as many rows as the last batch.
        self._constants = self._constant(0)

    @property
    def rows(self) -> int:
        """The number of collected records."""
        return self._buffers.rows

    @property
    def bytes(self) -> int:
        """The size of the collected keys, values and headers, with their offsets in the columns."""
        return self._buffers.bytes + 2 * _OFFSET_BYTES * self._buffers.rows

    def add(self, messages: list[Message] | RawMessages, first: int, stop: int) -> int:
        """Add the records of messages, from index ``first`` on.

        Returns the index of the first message that was not added: one that is no record, a record
        whose offset is ``stop`` or above, or one by which the keys or values would exceed 2 GiB.
        """
        return self._buffers.add(messages, first, stop)

    def take_batch(self) -> pa.RecordBatch | None:
        """Return the collected records as one batch, and begin anew; None if there are none."""
        found = self._buffers.taken()
        if found is None:
            return None
        n = len(found.offsets)
        if len(self._constants[0]) != n:
            self._constants = self._constant(n)
        columns = [
            _binary(found.keys),
            _binary(found.values),
            _headers(found.headers, n),
            *self._constants,
            pa.array(found.offsets),
            _timestamps(found.times_ms, found.timed),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=RECORD_SCHEMA)

    def _constant(self, n: int) -> tuple[pa.Array, pa.Array]:
        return pa.repeat(self._topic, n), pa.repeat(self._partition, n)


def _binary(column: BinaryColumn) -> pa.Array:
    n = len(column.offsets) - 1
    if column.valid is not None and not column.valid.any():
        return pa.nulls(n, pa.binary())
    buffers = [_bitmap(column.valid), pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(pa.binary(), n, buffers)


def _bitmap(valid: UInt8s | None) -> pa.Buffer | None:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _timestamps(times_ms: Any, timed: UInt8s | None) -> pa.Array:
    buffers = [_bitmap(timed), pa.py_buffer(times_ms)]
    return pa.Array.from_buffers(_TIMESTAMP, len(times_ms), buffers)


def _headers(headers: Sequence[Any] | None, n: int) -> pa.Array:
    if headers is None:
        return pa.nulls(n, _HEADERS)
    pairs = list(chain.from_iterable(filter(None, headers)))
    keys, values = [list(column) for column in zip(*pairs, strict=True)]
    lengths = np.fromiter((len(each) if each else 0 for each in headers), np.int32, n)
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    inner = pa.StructArray.from_arrays(
        [pa.array(keys, pa.string()), pa.array(values, pa.binary())],
        fields=list(_HEADERS.value_type),
    )
    nulls = pa.array(lengths == 0)
    return pa.ListArray.from_arrays(pa.array(offsets), inner, type=_HEADERS, mask=nulls)
