"""Reads ranges of offsets into Arrow batches: by position, without a group, each to its very end.

A range ends where a record at or above its ``stop`` is seen, or where the reader's position has
come there with nothing left to see: offsets that compaction took away and markers of transactions
are passed over.  What was deleted is an error, `OffsetsLost`; so is what librdkafka cannot read and
would skip, `ReadFailed`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from ackcore._columns import as_count
from ackcore._records import RawMessage
from ackcore.flow.numbers import positive
from ackcore.kafka.errors import (
    LogTruncated,
    OffsetsLost,
    ReadFailed,
    ReadTimedOut,
    error_text,
    exception_text,
)
from ackcore.kafka.ranges import OffsetRange
from ackcore.kafka.raw_consumer import event_error, raw_consumer
from ackcore.kafka.record_columns import RecordColumns
from ackcore.kafka.settings import ClientSettings

if TYPE_CHECKING:
    from ackcore._reference import RawMessages

#: Bytes of a batch.
BATCH_BYTES = 1 << 20
#: More would not fit in one Arrow array, which has 2 GiB at most.
_MOST_BATCH_BYTES = 1 << 30

#: A call that waits for messages waits until it has all that it has asked for, or for so long.
#: Where offsets are missing at the end of a range it asks for more than there are.
_POLL_S = 0.02
#: Messages are objects that the garbage collector looks for cycles among, whenever there are 700
#: more than when it last did: of a thousand at a time each costs twice as much.
_MOST_MESSAGES = 500
#: After so long a silence a broker is asked for its cause.
_ASK_AFTER_S = 1.0
#: What waiting does not change; of all else a client says, much is over when it is said.  What it
#: cannot read (`_BAD_MSG`; `_NOT_IMPLEMENTED` is an unknown magic byte) it says once and skips.
_REFUSALS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNKNOWN_TOPIC_ID,
    KafkaError._UNKNOWN_TOPIC,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError._BAD_MSG,
    KafkaError._BAD_COMPRESSION,
    KafkaError._NOT_IMPLEMENTED,
}

_OWN: dict[str, Any] = {
    # confluent-kafka asks for a group; without subscribing nor committing it is never heard of.
    "group.id": "ackcore",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
_DEFAULTS: dict[str, Any] = {
    # What waits to be read stays in the processor's caches, in memory that was used before: of the
    # default, 100,000 records, the client's thread takes new pages for each.
    "queued.min.messages": 10_000,
    # The default of a second stalls a reader at a tenth of its speed, whenever its queue was full;
    # and 10,000 records may be read in less than 10 ms.
    "fetch.queue.backoff.ms": 2,
    # What is read was there when the range was made: nothing is waited for but the last position.
    "fetch.wait.max.ms": 10,
    "log.connection.close": False,
    # What a disk or a network has changed would be read as it is.
    "check.crcs": True,
}


class RangeReader:
    """A consumer that reads ranges, one after another. Close it, or use it in ``with``.

    One thread reads at a time; any thread may close it.

    Parameters
    ----------
    settings : ClientSettings
        The connection to the brokers.
    batch_bytes : int, default 1 MiB
        The approximate bytes of keys, values and headers in a batch, at most 1 GiB. A single record
        may have more.
    batch_rows : int, optional
        The number of records after which a batch ends, counted through all ranges.
    timeout_s : float, default 60
        The seconds without any record after which a read fails.

    Raises
    ------
    ValueError
        If librdkafka refuses the settings.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        batch_bytes: int = BATCH_BYTES,
        batch_rows: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self._settings = settings
        self._batch_bytes = as_count(batch_bytes, "batch_bytes", 1, _MOST_BATCH_BYTES)
        self._batch_rows = (
            sys.maxsize if batch_rows is None else as_count(batch_rows, "batch_rows", 1)
        )
        self._rows_left = self._batch_rows  # until a batch ends
        self._timeout_s = positive(timeout_s, "timeout_s", unit="seconds")
        self._heard = ""
        self._reading: OffsetRange | None = None
        #: Of the two below; a signal's handler may close a reader that is in use beneath it.
        self._lock = threading.RLock()
        self._is_in_use = self._is_closed = False
        theirs = settings.options.get("error_cb")

        def hear(error: KafkaError) -> None:
            self._heard = error_text(error)
            if callable(theirs):
                theirs(error)

        try:
            conf = settings.client(_OWN, _DEFAULTS)
            self._consumer = raw_consumer(conf, hear) or Consumer({**conf, "error_cb": hear})
        except KafkaException as error:
            text = settings.redacted(exception_text(error))
            raise ValueError(f"options are refused by librdkafka: {text}") from None

    def read(self, range_: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range in order, in `RECORD_SCHEMA`.

        Raises
        ------
        ValueError
            If the range begins below 0; at once.
        RuntimeError
            If another range is not read to its end and its iterator not closed, or the reader is
            closed.
        OffsetsLost
            If offsets of the range were deleted. The records before them were yielded.
        LogTruncated
            If the partition's log was truncated and written again.
        ReadTimedOut
            If nothing came for ``timeout_s``.
        ReadFailed
            If the brokers refuse, or send unreadable data. The records before it were yielded.
        """
        if range_.start < 0:
            # To librdkafka -1 is the end and -2 the beginning.
            raise ValueError(
                f"range_.start must be an offset, 0 or above, got {range_.start}; "
                "Cluster.watermarks says where a partition begins and ends"
            )
        return self._read(range_)

    def _read(self, range_: OffsetRange) -> Iterator[pa.RecordBatch]:
        if range_.size == 0:
            return
        if self._reading is not None:
            raise RuntimeError(
                f"{range_} cannot be read while {self._reading} is: read that to its end or close "
                "its iterator, or use a reader for each"
            )
        self._reading = range_
        batches = self._assigned(range_)
        try:
            while True:
                with self._in_use():
                    self._check_open()
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
                del batch  # its memory may be the next one's
        finally:
            with self._in_use():
                batches.close()
            self._reading = None

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the consumer from being closed by others: its messages lie in its memory."""
        with self._lock:
            self._is_in_use = True
        try:
            yield
        finally:
            with self._lock:
                self._is_in_use = False
                if self._is_closed:
                    self._consumer.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the reader is closed; make another one")

    def _assigned(self, range_: OffsetRange) -> Generator[pa.RecordBatch]:
        self._heard = ""
        self._consumer.assign([TopicPartition(range_.topic, range_.partition, range_.start)])
        try:
            yield from self._batches(range_)
        finally:
            if not self._is_closed:
                self._consumer.unassign()

    def _batches(self, range_: OffsetRange) -> Iterator[pa.RecordBatch]:
        rest, size = range_, 200.0  # bytes of a record, as far as is known
        columns = RecordColumns(range_.topic, range_.partition)
        messages: list[Message] | RawMessages = []
        place = 0  # among them; what is before it was taken in
        last, asked = time.monotonic(), False
        while rest.size:
            self._check_open()
            if place >= len(messages):  # those of a consumer that was closed are gone
                room = (self._batch_bytes - columns.bytes) / size
                n = min(rest.size, self._rows_left, max(1, min(int(room), _MOST_MESSAGES)))
                messages = []  # the next ones lie where these did
                messages, place = self._consumer.consume(n, _POLL_S), 0
            before, had, failure, is_full = rest, columns.bytes, None, False
            # In order: records behind an event say nothing of what the event stands for.
            first, place = place, columns.add(messages, place, rest.stop)
            if place > first:
                self._rows_left -= place - first
                size = max(1.0, 0.5 * size + 0.5 * (columns.bytes - had) / (place - first))
                rest = rest._replace(start=_offset(messages[place - 1]) + 1)
            if place < len(messages) and rest.size:
                if messages[place].error() is not None:
                    rest, failure = self._take(messages[place], rest)
                    place += 1
                elif _offset(messages[place]) >= rest.stop:
                    rest = rest._replace(start=rest.stop)
                else:
                    is_full = True
            silent_s = time.monotonic() - last
            if rest != before:
                last, asked = time.monotonic(), False
            elif silent_s > self._timeout_s:
                text = self._settings.redacted(self._heard or "no broker has said why")
                failure = ReadTimedOut(rest, self._timeout_s, text)
            elif silent_s > _ASK_AFTER_S and not asked:
                asked, failure = True, self._refused(rest)
            # Small ones are put together, but do not wait for what is slow to come.
            over = failure is not None or not messages or not rest.size or not self._rows_left
            if columns.rows and (over or is_full or columns.bytes >= self._batch_bytes / 2):
                self._rows_left = self._rows_left or self._batch_rows
                batch = columns.taken()
                yield batch
                del batch  # its memory may be the next one's
                last = time.monotonic()  # whoever has the batch takes his time
            if failure is not None:
                raise failure

    def _take(
        self, event: Message | RawMessage, rest: OffsetRange
    ) -> tuple[OffsetRange, Exception | None]:
        """Take in what is no record."""
        error = event_error(event)
        if error.code() == KafkaError._PARTITION_EOF:
            position = event.offset() or 0
            self._heard = f"the partition ends at offset {position}"
            return rest._replace(start=max(rest.start, min(position, rest.stop))), None
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION):
            return rest, self._lost(rest, error)
        if error.fatal() or error.code() in _REFUSALS:
            return rest, ReadFailed(rest, error.name(), self._settings.redacted(error_text(error)))
        # The client goes on by itself; if that does not help, time is up one day.
        self._heard = error_text(error)
        return rest, None

    def _refused(self, rest: OffsetRange) -> Exception | None:
        """Ask why nothing comes: what is said of a topic reaches no consumer of its partitions."""
        try:
            topics = self._consumer.list_topics(rest.topic, timeout=_ASK_AFTER_S).topics
        except KafkaException as failed:
            self._heard = self._heard or exception_text(failed)
            return None
        error: KafkaError | None = topics[rest.topic].error if rest.topic in topics else None
        if error is None or error.code() not in _REFUSALS:
            return None
        return ReadFailed(rest, error.name(), self._settings.redacted(error_text(error)))

    def _lost(self, rest: OffsetRange, why: KafkaError) -> Exception:
        """Tell apart why the brokers do not have the next offset."""
        partition = TopicPartition(rest.topic, rest.partition)
        try:
            # None if time is up, whatever its stub says.
            found: Any = self._consumer.get_watermark_offsets(partition, timeout=self._timeout_s)
        except KafkaException as error:
            text = self._settings.redacted(exception_text(error))
            return ReadTimedOut(rest, self._timeout_s, text)
        if found is None:
            return ReadTimedOut(rest, self._timeout_s, "no broker says where the partition begins")
        low, high = found
        if low <= rest.start <= high:
            return LogTruncated(rest, low, high, self._settings.redacted(error_text(why)))
        return OffsetsLost(rest, low, high)

    def close(self) -> None:
        """Close the connections. A read in another thread fails, and closes them then."""
        with self._lock:
            self._is_closed = True
            if not self._is_in_use:
                self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_range(
    settings: ClientSettings,
    range_: OffsetRange,
    batch_bytes: int = BATCH_BYTES,
    *,
    timeout_s: float = 60.0,
) -> Iterator[pa.RecordBatch]:
    """Yield the records of one range, with a consumer of its own; see `RangeReader.read`."""
    with RangeReader(settings, batch_bytes=batch_bytes, timeout_s=timeout_s) as reader:
        yield from reader.read(range_)


def _offset(record: Message | RawMessage) -> int:
    return record.offset() or 0
