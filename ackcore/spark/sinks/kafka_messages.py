"""Kafka messages for the rows of a micro-batch, and the search for rows that the topic refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.message_headers import BATCH, MESSAGE_ID, ROW
from ackcore.spark.sinks.rejects import MAX_REFUSED
from ackcore.spark.sinks.sink_batch import BatchFile, read_with_places

if TYPE_CHECKING:
    from ackcore.kafka.client_settings import ClientSettings
    from ackcore.kafka.messages import Content, MessageColumns
    from ackcore.kafka.producing import Deliveries, DeliveryError, Undelivered


def producing() -> ModuleType:
    """Import and return ``ackcore.kafka.producing``, which needs confluent-kafka."""
    from ackcore.kafka import producing  # noqa: PLC0415

    return producing


#: A row whose message the topic does not take: its file's number, its place there, the reason.
Refused = tuple[int, int, str]


class Messages:
    """The rows of a micro-batch as Kafka messages; pickled to tasks."""

    def __init__(
        self,
        topic: str,
        columns: MessageColumns,
        message_id: str | None,
        batch: bytes,
        nonacked: Int64s,
    ) -> None:
        self._topic = topic
        self._columns = columns
        self._message_id = message_id
        self._batch = batch
        self._nonacked = nonacked
        #: Rows that `send` has left out because their text is not UTF-8.
        self.unfit: list[Refused] = []

    def deliver(
        self,
        deliveries: Deliveries,
        files: Sequence[tuple[int, BatchFile]],
        settings: ClientSettings,
    ) -> list[Refused]:
        """Send the rows of numbered files, and return those that the topic does not take.

        A broker checks the size of a whole request.  So each message of a request that was too
        large is sent again alone.  For messages without a key the broker reports the single
        messages.
        """
        suspects, of = self.suspects(), dict(files)
        self.unfit = []
        beside: set[int] = set()
        suspects.beside = beside
        self.send(suspects.of(deliveries), files)
        deliveries.flush()
        suspects.beside = None
        suspects.check(self._topic)
        if beside:
            for number, _, row, at, content in self.again(of, lambda one: _is_in(beside, one)):
                if not suspects.keyless or content[0] is not None:
                    self.send_rows(deliveries, number, row, at)
            deliveries.flush()
        refused: list[Refused] = []
        if suspects.count:
            found, before = self.suspects(), 0
            alone = found.of(producing().Deliveries(settings))
            try:
                chosen = self.again(of, lambda content: suspects.have(*content[:2]))
                for number, place, row, at, _ in chosen:
                    self.send_rows(alone, number, row, at)
                    alone.flush()
                    if found.count > before:
                        refused.append((number, place, found.said))
                        before = found.count
            finally:
                alone.close()
            suspects.keyless = suspects.keyless or found.keyless
        return self.unfit + refused + self.without_key(of, suspects)

    def suspects(self) -> Suspects:
        """Return an empty record of undelivered messages."""
        return Suspects(self._columns.key is not None)

    def without_key(self, files: Mapping[int, BatchFile], suspects: Suspects) -> list[Refused]:
        """Return all rows without a key if the topic has refused one of them for that; else none.

        Raises DeliveryError if more rows have no key than may be refused.
        """
        refused: list[Refused] = []
        for number, place, *_ in (
            self.again(files, lambda one: one[0] is None) if suspects.keyless else ()
        ):
            refused.append((number, place, suspects.keyless))
            if len(refused) > MAX_REFUSED:
                error: DeliveryError = producing().DeliveryError(
                    f"topic {self._topic!r} takes no messages without a key, and more than "
                    f"{MAX_REFUSED} rows have no key: {suspects.keyless}"
                )
                raise error
        return refused

    def send(self, deliveries: Deliveries, files: Iterable[tuple[int, BatchFile]]) -> None:
        """Send the rows of numbered files; a flush of `deliveries` waits for their delivery.

        Rows with text that is not UTF-8 are not sent, and added to `unfit`.
        """
        for number, file in files:
            at = 0
            for rows, places in read_with_places(file, self._nonacked):
                for row, why in self._columns.unfit(rows, self._message_id).items():
                    self.unfit.append((number, int(places[row]), why))
                self.send_rows(deliveries, number, rows, at)
                at += len(rows)

    def send_rows(self, deliveries: Deliveries, number: int, rows: pa.RecordBatch, at: int) -> None:
        """Send rows of a numbered file; ``at`` is the number of the first row."""
        for _, (key, value, headers) in self._contents(number, rows, at):
            deliveries.send(self._topic, value, key, headers)

    def _contents(
        self, number: int, rows: pa.RecordBatch, at: int
    ) -> Iterator[tuple[int, Content]]:
        """Yield number, key, value and headers of each row whose text is valid.

        The headers include the sink's own.
        """
        unfit = self._columns.unfit(rows, self._message_id)
        batch = (BATCH, self._batch)
        ours = {BATCH, ROW} if self._message_id is None else {BATCH, ROW, MESSAGE_ID}
        of_rows = self._columns.headers is not None
        ids = None if self._message_id is None else rows.column(self._message_id)
        for i, (key, value, headers) in enumerate(self._columns.contents(rows)):
            if i in unfit:
                continue
            if of_rows:  # a row read from another sink's messages has such headers
                headers = [each for each in headers if each[0] not in ours]
            headers += (batch, (ROW, b"%d.%d" % (number, at + i)))
            if ids is not None:
                headers.append((MESSAGE_ID, _id_bytes(ids[i].as_py())))
            yield i, (key, value, headers)

    def again(
        self, files: Mapping[int, BatchFile], chosen: Callable[[Content], bool]
    ) -> Iterator[tuple[int, int, pa.RecordBatch, int, Content]]:
        """Yield the rows whose message is chosen: file, place, row, message number and content."""
        for number, file in files.items():
            at = 0
            for rows, places in read_with_places(file, self._nonacked):
                for i, content in self._contents(number, rows, at):
                    if chosen(content):
                        yield number, int(places[i]), rows.slice(i, 1), at + i, content
                at += len(rows)


class Suspects:
    """Messages that are too large, lack a key, or were in one request with such a message.

    Delivery reports have no headers, so messages are identified by key and value.  If several rows
    have the same key and value, one of them may be sent twice.
    """

    def __init__(self, keyed: bool) -> None:
        self.count = 0  # messages that may be too large
        #: The broker's error for the last of them, and for the last message without a key.
        self.said = self.keyless = ""
        #: Hashes of messages that were in one request with an invalid one; None: these are errors.
        self.beside: set[int] | None = None
        self._keyed = keyed  # the sink has a column of keys: a missing key is the row's fault
        self._large: set[int] = set()

    def of(self, deliveries: Deliveries) -> Deliveries:
        """Register this object for the delivery failures of a producer, and return the producer."""
        deliveries.on_undelivered = self._add
        return deliveries

    def _add(self, one: Undelivered) -> bool:
        at = content_hash(one.key, one.value)
        if one.why == "beside":
            if self.beside is not None:
                self.beside.add(at)
            return self.beside is not None
        if one.why == "no key":
            if self._keyed:
                self.keyless = one.said
            return self._keyed
        self.count += 1
        self.said = one.said
        self._large.add(at)
        return True

    def check(self, topic: str, known: int = 0) -> None:
        """Raise DeliveryError if there are too many messages to send each by itself."""
        if self.count + known > MAX_REFUSED:
            raise self._error(topic, f"too many to send each again alone (at most {MAX_REFUSED})")

    def none_is(self, topic: str) -> DeliveryError:
        """Return the error for messages that are too large only together."""
        return self._error(topic, "though none of them is too large alone")

    def _error(self, topic: str, why: str) -> DeliveryError:
        error: DeliveryError = producing().DeliveryError(
            f"topic {topic!r} did not take {self.count} messages, {why}: {self.said}; or make "
            "requests smaller with batch.size in options"
        )
        return error

    def have(self, key: bytes | str | None, value: bytes | str | None) -> bool:
        """Return whether a message may be too large."""
        return content_hash(key, value) in self._large


def _is_in(hashes: set[int], content: Content) -> bool:
    return content_hash(*content[:2]) in hashes


def content_size(content: Content) -> int:
    """Return the size of a message in bytes, without the header of its row number."""
    key, value, headers = content
    others = [part for header in headers if header[0] != ROW for part in header]
    return sum(map(len, map(_bytes, (key, value, *others))))


def content_hash(*content: bytes | str | None) -> int:
    """Return the hash of a message's key and value."""
    return hash(tuple(map(_bytes, content)))


def _bytes(part: bytes | str | None) -> bytes:
    return part.encode() if isinstance(part, str) else part or b""


def _id_bytes(value: Any) -> bytes | None:
    return value if isinstance(value, bytes | None) else str(value).encode()
