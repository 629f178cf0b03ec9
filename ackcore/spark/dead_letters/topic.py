"""Dead letters in a Kafka topic, beside the store.

The store has every letter, so that `dead_letters` and `replay` know them all whoever has read the
topic; what goes to the topic is for those who are to be told.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ackcore.arrow.shown import shown_rows
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.letters import LETTER, as_letters
from ackcore.spark.base.message_headers import BATCH, PREFIX, ROW
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.dead import dead_of
from ackcore.spark.stores.opening import place_of

if TYPE_CHECKING:
    from ackcore.kafka.messages import MessageColumns
    from ackcore.kafka.producing import Deliveries

_log = logging.getLogger("ackcore")

#: Columns of a record of Kafka's, as Spark's source and ackcore's have them.
_KAFKA = {"key", "value", "headers", "topic", "partition", "offset", "timestamp", "timestampType"}
#: Those that go into headers.
_POSITION = ("topic", "partition", "offset", "timestamp")
#: What a letter is given anew each time.
OURS = frozenset(
    PREFIX + name
    for name in ("reason", "component", "spout", "message-id", *_POSITION, "attempts", "deaths")
) | {BATCH, ROW}


class DeadLetterTopic:
    """A Kafka topic for ``dead_letters=`` of `start`, `run_batch` and `guard`.

    Each letter is a message there, once its micro-batch is done, and is kept in the store as well,
    from which `dead_letters` and `replay` work as ever.
    If the source has a column ``value`` of text or bytes, and no others but such as a record of
    Kafka's has, then value, key and headers are as they came; else the value is the record as a
    JSON object.  Behind the headers that came with it a message has

    - ``ackcore-reason``: the exception's type and message; ``ackcore-component``: where it died;
    - ``ackcore-spout``, ``ackcore-message-id``, and if the source has such columns
      ``ackcore-topic``, ``ackcore-partition``, ``ackcore-offset`` and
      ``ackcore-timestamp`` (ms since 1970);
    - ``ackcore-attempts``: how often it was executed; ``ackcore-deaths``: how often it has died,
      counted by this very header where letters are read again, and where `replay` sent them.  A
      record that has died 20 times is no message any more, since its letters come back by
      themselves: it is in the store only, and the log says so;
    - ``ackcore-batch`` (``deployment/spout/number of the micro-batch``) and ``ackcore-row``: which
      letter it is.  Both are the same when it is sent again, as after a crash or a delivery that
      failed.

    Parameters
    ----------
    topic : str
        Where they go.
    bootstrap_servers : str
        ``host:port``, or several with commas between them.
    store : path, optional
        Where they are kept beside it: as ``dead_letters`` if that is a path.
    options : mapping, optional
        More of librdkafka's settings.  They are not remembered: give the topic at each start.

    Raises
    ------
    TypeError
        If an argument is of another type.
    ValueError
        If the topic is empty, or an option is one that is set here.
    ImportError
        If confluent-kafka is not installed: it comes with ``ackcore[kafka]``.
    """

    def __init__(
        self,
        topic: str,
        bootstrap_servers: str,
        *,
        store: str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        from ackcore.kafka.producing import check_options, check_topic  # noqa: PLC0415
        from ackcore.kafka.settings import ClientSettings  # noqa: PLC0415

        check_topic(topic)
        self.topic = topic
        self.store = None if store is None else place_of(store, "store")
        self.settings = ClientSettings(bootstrap_servers, options)
        check_options(self.settings)

    def __repr__(self) -> str:
        return f"DeadLetterTopic({self.topic!r}, {self.settings.bootstrap_servers!r})"


#: What ``dead_letters=`` may be.
Place = str | os.PathLike[str] | DeadLetterTopic | None


class TopicWriter:
    """The producer of a query's dead letters.

    Parameters
    ----------
    to : DeadLetterTopic
        Where.
    deployment : str
        What tells the checkpoint from all others.
    sources : mapping from str to pyarrow.Schema
        The columns of each tracked spout.

    Raises
    ------
    TypeError
        If JSON has nothing for a column.
    DeliveryError
        If librdkafka does not take the settings.
    """

    def __init__(
        self, to: DeadLetterTopic, deployment: str, sources: Mapping[str, pa.Schema]
    ) -> None:
        self._to = to
        self._deployment = deployment
        self._open: Deliveries | None = None
        for spout, schema in sources.items():
            message_columns(schema).check(f"dead letters of spout {spout!r}", schema)
        self._deliveries().close()
        self._open = None

    def write(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        """Send the dead of a micro-batch, as the store is given them; once more sends them again.

        Raises
        ------
        DeliveryError
            If one was not delivered.
        CheckpointInUse
            If another driver has taken over.
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
        """Give up what is connected; the next letters connect again."""
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
        from ackcore.kafka.dead_letters import MAX_DEATHS, deaths  # noqa: PLC0415

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
        about = zip(shown_rows(letters), _places(places), strict=True)
        contents = (one for part in payload.to_batches() for one in columns.contents(part))
        for row, ((letter, place), (key, value, came)) in enumerate(
            zip(about, contents, strict=True), first
        ):
            died = max(deaths(came), letter["replays"]) + 1
            if died > MAX_DEATHS:
                _log.warning(
                    "record %s of spout %r has died %d times and does not go to topic %r any more: "
                    "its letters come back; it is in the store",
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


def _places(places: pa.Table) -> list[dict[str, Any]]:
    return shown_rows(places) if places.num_columns else [{}] * len(places)


def message_columns(schema: pa.Schema) -> MessageColumns:
    """Return which columns are key, value and headers: a record's own, or the row as JSON."""
    from ackcore.kafka.messages import MessageColumns, is_text_or_bytes  # noqa: PLC0415

    names = set(schema.names)
    if not names <= _KAFKA or "value" not in names:
        return MessageColumns()
    if not all(is_text_or_bytes(schema.field(name).type) for name in names & {"key", "value"}):
        return MessageColumns()
    return MessageColumns(*(name if name in names else None for name in MessageColumns._fields))


def _text(value: Any) -> bytes | None:
    return None if value is None else str(value).encode(errors="backslashreplace")
