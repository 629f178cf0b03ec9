"""Kafka messages for the rows of a micro-batch, and the search for rows that a topic refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.spark.base.message_headers import BATCH, MESSAGE_ID, ROW
from ackcore.spark.sinks.rejects import MAX_REFUSED
from ackcore.spark.sinks.sink_batch import BatchFile, read_with_places, row_numbers

if TYPE_CHECKING:
    from ackcore.kafka.client_settings import ClientSettings
    from ackcore.kafka.messages import Content, MessageColumns
    from ackcore.kafka.producing import Deliveries, DeliveryError, Undelivered


def producing() -> ModuleType:
    """Import and return ``ackcore.kafka.producing``, which needs confluent-kafka."""
    from ackcore.kafka import producing  # noqa: PLC0415

    return producing


#: A row whose message the topic refuses: its number (`row_numbers`) and the reason.
Refused = tuple[int, str]
#: A row to send: its number, and its message.
Row: TypeAlias = "tuple[int, Content]"


@dataclass
class Messages:
    """The rows of files as Kafka messages; pickled to tasks.

    ``columns``: the columns of key, value and headers. ``message_id``: the column for the header
    ``ackcore-message-id``, or None. ``batch``: the value of the header ``ackcore-batch``.
    ``files``: the files, with their indexes in `SinkBatch.files`. ``nonacked``: the sorted root
    ids whose rows are left out. ``unfit``: by row number, the reasons of rows that `rows` left out
    because their text cannot be sent unchanged.
    """

    topic: str
    columns: MessageColumns
    message_id: str | None
    batch: bytes
    files: Sequence[tuple[int, BatchFile]]
    nonacked: Int64s
    unfit: dict[int, str] = field(default_factory=dict)

    def deliver(self, deliveries: Deliveries, settings: ClientSettings) -> list[Refused]:
        """Send the rows without a transaction; return the rows that the topic refuses.

        A broker checks the size of a whole request. So each message of a request that was too large
        is sent again alone, by a second producer with ``settings``. Messages that shared a request
        with an invalid one are sent again by ``deliveries``. Raises DeliveryError if a message was
        not delivered for another reason, or if too many are too large or have no key.
        """
        suspects = self.suspects()
        beside: set[int] = set()
        suspects.beside = beside
        self.send(suspects.of(deliveries), self.rows())
        deliveries.flush()
        suspects.beside = None
        suspects.check(self.topic)
        if beside:
            again = self.chosen(
                lambda one: (
                    content_hash(*one[:2]) in beside
                    and (not suspects.keyless or one[0] is not None)
                )
            )
            self.send(deliveries, again)
            deliveries.flush()
        refused: list[Refused] = []
        if suspects.count:
            found, before = self.suspects(), 0
            with closing(found.of(producing().Deliveries(settings))) as alone:
                for row in self.chosen(lambda content: suspects.includes(*content[:2])):
                    self.send(alone, [row])
                    alone.flush()
                    if found.count > before:
                        refused.append((row[0], found.said))
                        before = found.count
            suspects.keyless = suspects.keyless or found.keyless
        return [*self.unfit.items(), *refused, *self.without_key(suspects)]

    def suspects(self) -> Suspects:
        """Return an empty record of undelivered messages."""
        return Suspects(self.columns.key is not None)

    def without_key(self, suspects: Suspects) -> list[Refused]:
        """Return all rows without a key if the topic has refused one for that reason; else none.

        Raises DeliveryError if there are more than `MAX_REFUSED`.
        """
        refused: list[Refused] = []
        keyless = self.chosen(lambda one: one[0] is None)
        for number, _ in keyless if suspects.keyless else ():
            refused.append((number, suspects.keyless))
            if len(refused) > MAX_REFUSED:
                raise producing().DeliveryError(
                    f"topic {self.topic!r} takes no messages without a key, and more than "
                    f"{MAX_REFUSED} rows have no key: {suspects.keyless}; have the bolt emit a "
                    "key, or write to a topic that is not compacted"
                )
        return refused

    def send(self, deliveries: Deliveries, rows: Iterable[Row]) -> None:
        """Queue the messages of rows at a producer; its ``flush`` waits for their delivery."""
        for _, (key, value, headers) in rows:
            deliveries.send(self.topic, value, key, headers)

    def chosen(self, chosen: Callable[[Content], bool]) -> Iterator[Row]:
        """Read the files again, and yield the rows whose message satisfies a predicate."""
        return (row for row in self.rows() if chosen(row[1]))

    def rows(self) -> Iterator[Row]:
        """Read the files, and yield the rows that can be sent; add the others to `unfit`.

        The headers of a message include the sink's own. The value of ``ackcore-row`` is the index
        of the file, a point, and the row's index among those that `read_sink_file` yields.
        """
        batch = (BATCH, self.batch)
        ours = {BATCH, ROW} if self.message_id is None else {BATCH, ROW, MESSAGE_ID}
        of_rows = self.columns.headers is not None
        for index, file in self.files:
            at = 0
            for rows, places in read_with_places(file, self.nonacked):
                numbers = row_numbers(index, places).tolist()
                unfit = self.columns.unfit(rows, self.message_id)
                self.unfit |= {numbers[i]: why for i, why in unfit.items()}
                ids = None if self.message_id is None else rows.column(self.message_id)
                for i, (key, value, headers) in enumerate(self.columns.contents(rows)):
                    if i in unfit:
                        continue
                    if of_rows:  # a row read from another sink's messages has such headers
                        headers = [each for each in headers if each[0] not in ours]
                    headers += (batch, (ROW, b"%d.%d" % (index, at + i)))
                    if ids is not None:
                        headers.append((MESSAGE_ID, _id_bytes(ids[i].as_py())))
                    yield numbers[i], (key, value, headers)
                at += len(rows)


class Suspects:
    """The undelivered messages that may be too large, lack a key, or shared a request with one.

    Delivery reports have no headers, so a message is known by the hash of its key and value. If
    several rows have the same key and value, one of them may be sent twice. ``keyed``: whether the
    sink has a column of keys, so that the row is at fault if its message has none.
    """

    def __init__(self, keyed: bool) -> None:
        self.count = 0  # messages that may be too large
        #: The broker's error for the last of them, and for the last message without a key.
        self.said = self.keyless = ""
        #: Hashes of messages that shared a request with a refused one. None: they are errors.
        self.beside: set[int] | None = None
        self._keyed = keyed
        self._large: set[int] = set()

    def of(self, deliveries: Deliveries) -> Deliveries:
        """Record the delivery failures of a producer from now on; return the same producer."""
        deliveries.on_undelivered = self._add
        return deliveries

    def _add(self, one: Undelivered) -> bool:
        """Record a failure and return True, or return False if it must be raised as an error."""
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
        """Raise DeliveryError if there are too many messages to send each alone.

        ``known``: the number of rows that are refused already.
        """
        if self.count + known > MAX_REFUSED:
            raise self.error(topic, f"too many to send each again alone (at most {MAX_REFUSED})")

    def error(self, topic: str, why: str) -> DeliveryError:
        """Return the error for the messages that may be too large; ``why``: a part of its text."""
        error: DeliveryError = producing().DeliveryError(
            f"topic {topic!r} did not take {counted(self.count, 'message')}, {why}: {self.said}; "
            "or make requests smaller with batch.size in options"
        )
        return error

    def includes(self, key: bytes | str | None, value: bytes | str | None) -> bool:
        """Return whether a message with this key and value was not delivered for its size.

        The whole request may have been too large, and not the message.
        """
        return content_hash(key, value) in self._large


def content_size(content: Content) -> int:
    """Return the size of a message in bytes, without its header ``ackcore-row``."""
    key, value, headers = content
    others = [part for header in headers if header[0] != ROW for part in header]
    return sum(map(len, map(_encoded, (key, value, *others))))


def content_hash(*content: bytes | str | None) -> int:
    """Return a hash of a message's key and value, valid in this process; null equals empty."""
    return hash(tuple(map(_encoded, content)))


def _encoded(part: bytes | str | None) -> bytes:
    return part.encode() if isinstance(part, str) else part or b""


def _id_bytes(value: Any) -> bytes | None:
    return value if isinstance(value, bytes | None) else str(value).encode()
