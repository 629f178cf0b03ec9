"""Reading of offset ranges into Arrow batches, without a consumer group.

Offsets without a record are passed: those of compacted records and of transaction markers. Deleted
offsets raise `OffsetsLost`. Damaged data, which librdkafka would skip, raise `ReadFailed`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from ackcore._records import RawMessage
from ackcore.kafka.client_settings import READER, ClientSettings
from ackcore.kafka.clients import new_client
from ackcore.kafka.kafka_errors import NoToken, OffsetsLost, ReadFailed, ReadTimedOut, error_text
from ackcore.kafka.ranges import OffsetRange, RecordColumns
from ackcore.kafka.raw_consumer import event_error, raw_consumer

if TYPE_CHECKING:
    from ackcore._kafka_native import RawMessages

#: The default size of a batch, in bytes.
BATCH_BYTES = 1 << 20

#: A call for n messages waits until it has all n, or for this time, in seconds.
#: If offsets are missing at the end of a range, n is larger than the number of messages.
_POLL_S = 0.02
#: The garbage collector searches messages for cycles whenever there are 700 new ones.  With a
#: thousand at a time each message costs twice as much.
_MOST_MESSAGES = 500
#: Seconds without a message after which the reader requests the cause from a broker.
_ASK_AFTER_S = 1.0
#: Permanent errors.  Most other errors of a client are over when it reports them.  It reports
#: unreadable data (`_BAD_MSG`; `_NOT_IMPLEMENTED` is an unknown magic byte) once and skips them.
_PERMANENT = {
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

_DEFAULTS: dict[str, Any] = {
    # So few queued records stay in the processor's caches, in reused memory.  With the default of
    # 100,000 records, the client's thread allocates new pages for each.
    "queued.min.messages": 10_000,
    # The default of 1 s after a full queue slows a reader to a tenth of its speed: 10,000 records
    # may be read in less than 10 ms.
    "fetch.queue.backoff.ms": 2,
    # The records exist when the range is made.  At the end of a partition the client fetches once
    # more before it begins the next range, and the broker answers after this time.
    "fetch.wait.max.ms": 2,
    "log.connection.close": False,
    # Without it, data that a disk or a network has damaged would be read.
    "check.crcs": True,
}


class RangeReader:
    """A consumer that reads ranges, one after another. Close it, or use it in ``with``.

    Only one thread may use it.

    Raises ValueError if librdkafka refuses the settings, and NoToken if ``oauth_cb`` gives no token
    within 10 s.

    ``settings``: the connection to the brokers. ``batch_bytes``: the approximate bytes of keys,
    values and headers in a batch, at most 1 GiB; a single record may have more. ``batch_rows``: a
    batch also ends at each multiple of this number of records, counted over all ranges read.
    ``timeout_s``: the seconds without any record after which a read fails.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        batch_bytes: int = BATCH_BYTES,
        batch_rows: int = sys.maxsize,
        timeout_s: float = 60.0,
    ) -> None:
        self._settings = settings
        self._batch_bytes = batch_bytes
        self._batch_rows = batch_rows
        self._rows_left = self._batch_rows  # rows until a batch ends
        self._timeout_s = timeout_s
        self._heard = ""
        self._reading: OffsetRange | None = None
        self._is_closed = False
        theirs = settings.options.get("error_cb")

        def hear(error: KafkaError) -> None:
            self._heard = error_text(error)
            if callable(theirs):
                theirs(error)

        try:
            conf = settings.client_config(READER, _DEFAULTS)
            raw = raw_consumer(conf, hear)
            self._consumer = raw or new_client(Consumer, {**conf, "error_cb": hear})
        except NoToken:
            raise
        except KafkaException as error:
            text = settings.redacted(error_text(error.args[0]))
            raise ValueError(f"options are refused by librdkafka: {text}; correct them") from None

    def read(self, range_: OffsetRange) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range, which begins at 0 or above, in order as `RECORD_SCHEMA`.

        The first ``next`` raises RuntimeError if another range is being read, or the reader is
        closed. After all records before the error, ``next`` raises OffsetsLost if offsets were
        deleted, ReadTimedOut if no record came for ``timeout_s``, and ReadFailed if the brokers
        refuse the request or send damaged data, or the partition was truncated and written anew.
        """
        if range_.size == 0:
            return
        if self._reading is not None:
            raise RuntimeError(
                f"{range_} cannot be read while {self._reading} is being read; read that range to "
                "its end, close its iterator, or use two readers"
            )
        self._reading, self._heard = range_, ""
        try:
            self._consumer.assign([TopicPartition(range_.topic, range_.partition, range_.start)])
            try:
                last = yield from self._batches(range_)
            finally:
                if not self._is_closed:
                    self._consumer.unassign()
            if last is not None:  # nothing is fetched while the user has it
                yield last
        finally:
            self._reading = None

    def _batches(
        self, range_: OffsetRange
    ) -> Generator[pa.RecordBatch, None, pa.RecordBatch | None]:
        """Yield all batches of a range but the last, and return the last, or None without one."""
        rest, size = range_, 200.0  # estimated bytes of a record
        columns = RecordColumns(range_.topic, range_.partition)
        messages: list[Message] | RawMessages = []
        place = 0  # index of the first message that was not handled
        last, asked = time.monotonic(), False
        while rest.size:
            if place >= len(messages):
                room = (self._batch_bytes - columns.bytes) / size
                n = min(rest.size, self._rows_left, max(1, min(int(room), _MOST_MESSAGES)))
                messages = []  # the next ones reuse the memory of these
                messages, place = self._consumer.consume(n, _POLL_S), 0
            before, had, failure, is_full = rest, columns.bytes, None, False
            # In order: records after an event must not hide it.
            first, place = place, columns.add(messages, place, rest.stop)
            if place > first:
                self._rows_left -= place - first
                size = max(1.0, 0.5 * size + 0.5 * (columns.bytes - had) / (place - first))
                rest = rest._replace(start=_offset(messages[place - 1]) + 1)
            if place < len(messages) and rest.size:
                if messages[place].error() is not None:
                    rest, failure = self._handle_event(messages[place], rest)
                    place += 1
                elif _offset(messages[place]) >= rest.stop:
                    rest = rest._replace(start=rest.stop)
                else:
                    is_full = True
            silent_s = time.monotonic() - last
            if rest != before:
                last, asked = time.monotonic(), False
            elif failure is None and silent_s > self._timeout_s:
                text = self._settings.redacted(self._heard or "no broker has sent a reason")
                failure = ReadTimedOut(rest, self._timeout_s, text)
            elif failure is None and silent_s > _ASK_AFTER_S and not asked:
                asked, failure = True, self._topic_error(rest)
            # Small batches are combined, but not while records come slowly.
            over = failure is not None or not messages or not rest.size or not self._rows_left
            if columns.rows and (over or is_full or columns.bytes >= self._batch_bytes / 2):
                self._rows_left = self._rows_left or self._batch_rows
                batch = columns.take_batch()
                if failure is None and not rest.size:
                    return batch
                yield batch
                del batch  # its memory may be the next one's
                last = time.monotonic()  # the user's time with the batch does not count
            if failure is not None:
                raise failure
        return None

    def _handle_event(
        self, event: Message | RawMessage, rest: OffsetRange
    ) -> tuple[OffsetRange, Exception | None]:
        """Handle a message that is no record: the end of the partition, or an error.

        Returns the part of the range still to read, and the exception to raise, or None to go on.
        """
        error = event_error(event)
        if error.code() == KafkaError._PARTITION_EOF:
            position = event.offset() or 0
            self._heard = f"the partition ends at offset {position}"
            return rest._replace(start=max(rest.start, min(position, rest.stop))), None
        if error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError._LOG_TRUNCATION):
            return rest, self._out_of_range(rest, error)
        if error.fatal() or error.code() in _PERMANENT:
            return rest, ReadFailed(rest, error.name(), self._settings.redacted(error_text(error)))
        # The client retries by itself; if that does not help, ReadTimedOut follows.
        self._heard = error_text(error)
        return rest, None

    def _topic_error(self, rest: OffsetRange) -> Exception | None:
        """Ask the brokers whether the topic is missing or forbidden; return the error, or None.

        Also None if they do not answer. They do not report this to a consumer that reads.
        """
        try:
            topics = self._consumer.list_topics(rest.topic, timeout=_ASK_AFTER_S).topics
        except KafkaException as failed:
            self._heard = self._heard or error_text(failed.args[0])
            return None
        error: KafkaError | None = topics[rest.topic].error if rest.topic in topics else None
        if error is None or error.code() not in _PERMANENT:
            return None
        return ReadFailed(rest, error.name(), self._settings.redacted(error_text(error)))

    def _out_of_range(self, rest: OffsetRange, why: KafkaError) -> Exception:
        """Return the exception for an offset that the brokers refused as out of range.

        It is OffsetsLost, or ReadFailed if the partition has the offset, or its bounds are refused.
        Asks for the bounds again after temporary errors, for up to ``timeout_s``; then it is
        ReadTimedOut.
        """
        partition = TopicPartition(rest.topic, rest.partition)
        until = time.monotonic() + self._timeout_s
        left_s = self._timeout_s
        while True:
            try:
                low, high = self._consumer.get_watermark_offsets(partition, timeout=left_s)
                break
            except KafkaException as failed:
                error = failed.args[0]
            text = self._settings.redacted(error_text(error))
            if error.code() in _PERMANENT or error.fatal():
                return ReadFailed(rest, error.name(), text)
            time.sleep(max(0.0, min(_ASK_AFTER_S, until - time.monotonic())))
            left_s = until - time.monotonic()
            if left_s <= 0:
                return ReadTimedOut(rest, self._timeout_s, text)
        if low <= rest.start <= high:
            cause = (
                f"offset {rest.start} was refused, and the partition has offsets [{low}, {high}); "
                "its log was truncated and written anew, so other records may have these offsets "
                f"now: {self._settings.redacted(error_text(why))}"
            )
            return ReadFailed(rest, why.name(), cause)
        return OffsetsLost(rest, low, high)

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _offset(record: Message | RawMessage) -> int:
    return record.offset() or 0
