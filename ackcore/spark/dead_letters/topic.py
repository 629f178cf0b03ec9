"""A Kafka topic that receives dead letters in addition to the store.

The store has every letter, so `dead_letters` and `replay` do not depend on the topic. The topic is
for other consumers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ackcore._arrow.shown import shown_rows
from ackcore._error_hints import naming_arguments
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.letter_columns import as_letters
from ackcore.spark.base.message_headers import BATCH, PREFIX, ROW
from ackcore.spark.base.schemas import LETTER, TRACKING
from ackcore.spark.checkpoint.dead_records import dead_of
from ackcore.spark.stores.opening import place_of

if TYPE_CHECKING:
    from ackcore.kafka.messages import MessageColumns
    from ackcore.kafka.producing import Deliveries

_log = logging.getLogger("ackcore")

#: Columns of a Kafka record in Spark's source and in ackcore's.
_KAFKA = {"key", "value", "headers", "topic", "partition", "offset", "timestamp", "timestampType"}
#: Columns that go into headers.
_POSITION = ("topic", "partition", "offset", "timestamp")
#: Headers that each letter sets anew.
OURS = frozenset(
    PREFIX + name
    for name in ("reason", "component", "spout", "message-id", *_POSITION, "attempts", "deaths")
) | {BATCH, ROW}


class DeadLetterTopic:
    """A Kafka topic for ``dead_letters=`` of `start`, `run_batch` and `guard`.

    The driver sends each letter as a message after the store has it, and before the micro-batch is
    done. So `dead_letters` and `replay` work as usual. If the source has a column ``value`` of text
    or bytes, and otherwise only columns of a Kafka record, the message has the record's value, key
    and headers. Else its value is the record as a JSON object. After the record's headers a message
    has

    - ``ackcore-reason``: the exception's type and message; ``ackcore-component``: the component
      that failed the record;
    - ``ackcore-spout``, ``ackcore-message-id``; beside a record's own value also
      ``ackcore-topic``, ``ackcore-partition``, ``ackcore-offset`` and
      ``ackcore-timestamp`` (ms since 1970), if the source has such columns;
    - ``ackcore-attempts``: the number of attempts; ``ackcore-deaths``: the number of deaths of the
      record. The count continues when a query reads the topic, and when `replay` sends it. A record
      that has died more than 20 times is only stored and logged, not sent, since its letters are
      read again in a loop;
    - ``ackcore-batch`` (``deployment/spout/number of the micro-batch``) and ``ackcore-row``
      (position in the micro-batch): the letter's id. It is the same if the letter is sent again, as
      after a crash or a failed delivery.

    Parameters
    ----------
    topic : str
        The name of the topic.
    bootstrap_servers : str
        ``host:port``, or several separated by commas.
    store : path, optional
        The place of the store: a path or URL as ``dead_letters`` of `start` takes it. By default
        its place at the last start, or in the checkpoint.
    options : mapping, optional
        More settings of librdkafka. They are not recorded: give the topic at each start.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If the topic is empty, or ``options`` has a setting that ackcore sets.
    ImportError
        If confluent-kafka is not installed: it comes with ``ackcore[kafka]``.
    """

    @naming_arguments
    def __init__(
        self,
        topic: str,
        bootstrap_servers: str,
        *,
        store: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        from ackcore.kafka.client_settings import ClientSettings  # noqa: PLC0415
        from ackcore.kafka.producing import check_options, check_topic  # noqa: PLC0415

        check_topic(topic)
        self.topic = topic
        self.store = None if store is None else place_of(store, "store")
        self.settings = ClientSettings(bootstrap_servers, options)
        check_options(self.settings)

    def __repr__(self) -> str:
        return f"DeadLetterTopic({self.topic!r}, {self.settings.bootstrap_servers!r})"


#: Types of ``dead_letters=``.
Place = str | os.PathLike[str] | DeadLetterTopic | None


class TopicWriter:
    """The producer of a query's dead letters for a `DeadLetterTopic`.

    ``sources``: the columns of each tracked spout. Raises TypeError if a column cannot be written
    as JSON, and DeliveryError if librdkafka rejects the settings.
    """

    def __init__(
        self, to: DeadLetterTopic, deployment: str, sources: Mapping[str, pa.Schema]
    ) -> None:
        self._to = to
        self._deployment = deployment
        self._open: Deliveries | None = None
        for spout, schema in sources.items():
            message_columns(schema).check(f"dead letters of spout {spout!r}", schema)
        self._deliveries()
        self.close()

    def write(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        """Send the dead letters of a micro-batch, and wait until all are delivered.

        A repeated call sends them again. Letters of records that died over 20 times are only
        logged. Raises DeliveryError if a message was not delivered, CheckpointInUse if another
        driver has taken over.
        """
        check_fence()
        try:
            deliveries = self._deliveries()
            for spout in dead:
                first = 0
                for table in dead_of(dead).pieces(spout):
                    self._send(deliveries, spout, number, table, first)
                    first += len(table)
            deliveries.flush()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the producer. The next letters open another one."""
        if self._open is not None:
            self._open.close()
        self._open = None

    def _deliveries(self) -> Deliveries:
        from ackcore.kafka.producing import Deliveries  # noqa: PLC0415

        if self._open is None:
            self._open = Deliveries(self._to.settings)
        return self._open

    def _send(
        self, deliveries: Deliveries, spout: str, number: int, dead: pa.Table, first: int
    ) -> None:
        from ackcore.kafka.consumer.consumer_letters import MAX_DEATHS, death_count  # noqa: PLC0415

        letters = as_letters(dead, number).select(LETTER.names)
        payload = dead.select(dead.column_names[len(TRACKING) :]).combine_chunks()
        columns = message_columns(payload.schema)
        batch = f"{self._deployment}/{spout}/{number}".encode()
        at = [
            name for name in _POSITION if columns.value is not None and name in payload.schema.names
        ]
        places = payload.select(at)
        if "timestamp" in at and pa.types.is_timestamp(places["timestamp"].type):
            ms = places["timestamp"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
            places = places.set_column(at.index("timestamp"), "timestamp", ms)
        shown = shown_rows(places) if at else [{}] * len(places)
        about = zip(shown_rows(letters), shown, strict=True)
        contents = (one for part in payload.to_batches() for one in columns.contents(part))
        for row, ((letter, place), (key, value, came)) in enumerate(
            zip(about, contents, strict=True), first
        ):
            died = max(death_count(came), letter["replays"]) + 1
            if died > MAX_DEATHS:
                _log.warning(
                    "record %s of spout %r has died %d times: its dead letter is stored, but not "
                    "sent, because a query reads the letters of topic %r again",
                    letter["message_id"], spout, died, self._to.topic,
                )  # fmt: skip
                continue
            told = {
                "reason": f"{letter['error_type']}: {letter['error_message']}",
                "component": letter["component"],
                "spout": spout,
                "message-id": letter["message_id"],
                **place,
                "attempts": letter["attempts"],
                "deaths": died,
            }
            ours = {PREFIX + name: _text(of) for name, of in told.items()}
            ours |= {BATCH: batch, ROW: b"%d" % row}
            headers = [*(each for each in came if each[0] not in OURS), *ours.items()]
            deliveries.send(self._to.topic, value, key, headers)


def message_columns(schema: pa.Schema) -> MessageColumns:
    """Return a source's columns for a message's key, value and headers.

    All are None, so that the value is JSON, unless all columns are those of a Kafka record. These
    must include ``value``, and keys and values must be text or bytes.
    """
    from ackcore.kafka.messages import MessageColumns, is_text_or_bytes  # noqa: PLC0415

    names = set(schema.names)
    if not names <= _KAFKA or "value" not in names:
        return MessageColumns()
    if not all(is_text_or_bytes(schema.field(name).type) for name in names & {"key", "value"}):
        return MessageColumns()
    return MessageColumns(*(name if name in names else None for name in MessageColumns._fields))


def _text(value: Any) -> bytes | None:
    return None if value is None else str(value).encode(errors="backslashreplace")
