"""Messages of a partition as Arrow columns, gathered until they are worth a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Message

from ackcore.kafka.ranges import RECORD_SCHEMA

_HEADERS = RECORD_SCHEMA.field("headers").type
_TIMESTAMP = RECORD_SCHEMA.field("timestamp").type

_time_of = itemgetter(1)
_kind_of = itemgetter(0)


class RecordColumns:
    """The columns of records that were read of one partition and not handed out yet.

    Of messages nothing is kept but what they hold, in Arrow's memory: what becomes of theirs is
    that the next ones lie in it, while it is in the processor's caches.

    Parameters
    ----------
    topic : str
    partition : int
    """

    def __init__(self, topic: str, partition: int) -> None:
        self._topic = pa.scalar(topic, pa.string())
        self._partition = pa.scalar(partition, pa.int32())
        self._columns: list[list[pa.Array]] = [[] for _ in range(5)]
        self.rows = 0
        #: Of keys and values.
        self.bytes = 0

    def add(self, messages: Sequence[Message]) -> None:
        """Append messages, none of which is an event."""
        keys = _binary(list(map(Message.key, messages)))
        values = _binary(list(map(Message.value, messages)))
        headers = _headers(messages)
        found = (keys, values, headers, _offsets(messages), _timestamps(messages))
        for column, part in zip(self._columns, found, strict=True):
            column.append(part)
        self.rows += len(messages)
        self.bytes += keys.nbytes + values.nbytes

    def taken(self) -> list[pa.RecordBatch]:
        """Return them as one batch, or more where an array of one would not hold them."""
        if not self.rows:
            return []
        keys, values, headers, offsets, timestamps = map(pa.chunked_array, self._columns)
        topics = pa.repeat(self._topic, self.rows)
        partitions = pa.repeat(self._partition, self.rows)
        columns = [keys, values, headers, topics, partitions, offsets, timestamps]
        self._columns = [[] for _ in range(5)]
        self.rows = self.bytes = 0
        return joined(pa.Table.from_arrays(columns, schema=RECORD_SCHEMA))


def joined(table: pa.Table) -> list[pa.RecordBatch]:
    """Return the rows of a table in as few batches as hold them."""
    found: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    return found


def _binary(values: list[Any]) -> pa.Array:
    if values.count(None) == len(values):
        return pa.nulls(len(values), pa.binary())
    return pa.array(values, pa.binary())


def _offsets(messages: Sequence[Message]) -> pa.Array:
    n = len(messages)
    first, last = messages[0].offset(), messages[-1].offset()
    if first is not None and last == first + n - 1:  # they rise: none is missing between them
        return pa.array(np.arange(first, first + n))
    return pa.array(np.fromiter(map(Message.offset, messages), np.int64, n))


def _timestamps(messages: Sequence[Message]) -> pa.Array:
    n = len(messages)
    times = np.fromiter(map(_time_of, map(Message.timestamp, messages)), np.int64, n)
    if times.min() > 0:
        return pa.array(times).view(_TIMESTAMP)
    kinds = np.fromiter(map(_kind_of, map(Message.timestamp, messages)), np.int64, n)
    return pa.array(times, mask=kinds == TIMESTAMP_NOT_AVAILABLE).view(_TIMESTAMP)


def _headers(messages: Sequence[Message]) -> pa.Array:
    n = len(messages)
    if not any(map(Message.headers, messages)):
        return pa.nulls(n, _HEADERS)
    headers = list(map(Message.headers, messages))
    pairs = list(chain.from_iterable(filter(None, headers)))
    keys, values = [list(column) for column in zip(*pairs, strict=True)]
    lengths = np.fromiter((len(each) if each else 0 for each in headers), np.int32, n)
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    inner = pa.StructArray.from_arrays(
        [pa.array(keys, pa.string()), _binary(values)], fields=list(_HEADERS.value_type)
    )
    nulls = pa.array(lengths == 0)
    return pa.ListArray.from_arrays(pa.array(offsets), inner, type=_HEADERS, mask=nulls)
