"""A sink that sends each micro-batch to a Kafka topic, at least once or in one transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from ackcore._error_hints import naming_arguments
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.message_headers import BATCH
from ackcore.spark.base.session import task_slots
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.base.workers import refuse_unpicklable
from ackcore.spark.sinks.kafka_messages import (
    Messages,
    Refused,
    Suspects,
    content_hash,
    content_size,
    producing,
)
from ackcore.spark.sinks.rejects import SinkRejects
from ackcore.spark.sinks.sink import ANY_CONTENT, Connections, TransactionalSink, Written
from ackcore.spark.sinks.sink_batch import SinkBatch
from ackcore.spark.sinks.unavailable import unavailable

if TYPE_CHECKING:
    from ackcore.kafka.client_settings import ClientSettings
    from ackcore.kafka.messages import Content, MessageColumns
    from ackcore.kafka.producing import DeliveryError, Transactions

#: The driver itself sends up to this many rows and bytes: starting a Spark job takes longer.
_DRIVER_ROWS = 1 << 15
_DRIVER_BYTES = 8 << 20

#: The minimum time that brokers must keep a group's committed offsets
#: (``offsets.retention.minutes``, by default a week).
_REMEMBERED_MS = 86_400_000

#: The result of a sending task: the refused rows (`Refused`), or its error in a row with a null.
_ANSWER = pa.schema([("number", pa.int64()), ("said", pa.string())])

_WAY_OUT = (
    "Check that the brokers run and can be reached from the driver and the workers, that options "
    "have their security settings, and that this client may write to the topic"
)


@naming_arguments
def to_kafka(
    topic: str,
    bootstrap_servers: str,
    *,
    key: str | None = None,
    value: str | None = None,
    headers: str | None = None,
    message_id: str | None = None,
    transactional: bool = False,
    options: Mapping[str, Any] | None = None,
) -> KafkaSink:
    """Return a sink that sends each row of ACKED records to a topic, as a message.

    Every message has the headers ``ackcore-batch`` (``deployment/sink/number of the micro-batch``)
    and ``ackcore-row``, the position of the row in it. Together they identify a message, and they
    are the same when it is sent again.

    Parameters
    ----------
    topic : str
        The name of the topic.
    bootstrap_servers : str
        ``host:port``, or several separated by commas.
    key : str, optional
        The column of keys, text (sent as UTF-8) or bytes; by default messages have no key.
    value : str, optional
        The column of values: text or bytes, or a struct, which is sent as JSON. By default the
        whole row without the column of headers, as a JSON object. A null is sent as a message
        without a value.
    headers : str, optional
        A column of additional headers: a list of ``struct<key: string, value: binary>``, or a map.
    message_id : str, optional
        A column of text, bytes or whole numbers for the header ``ackcore-message-id``: the source's
        id of the record, if the bolts pass it on.
    transactional : bool, default False
        Whether each micro-batch is sent in one transaction that also commits its number. Readers
        with ``isolation.level=read_committed`` (the default of librdkafka, not of Java) then see
        each row once, even after crashes. One process, the driver, sends all messages. Without
        transactions tasks send them, or the driver if they are few. A message may then appear twice
        if a delivery failed, a task ran twice, or the driver died before the micro-batch was done.
    options : mapping, optional
        Further librdkafka settings, for security, compression and so on. The tasks that send get
        their values, pickled. No plan, log, error or checkpoint contains them.

    Raises
    ------
    TypeError, ValueError
        If an argument has another type, or an option is one that the sink sets itself.
    ImportError
        If confluent-kafka is not installed: it comes with ``ackcore[kafka]``.

    Notes
    -----
    A row is refused, and its record becomes a dead letter, in four cases: its message is larger
    than the topic accepts; its ``key`` is null and the topic is compacted; its text is not UTF-8;
    the name of one of its headers contains a NUL.

    The transactional id contains the name of the sink. If you rename a sink while a micro-batch is
    decided but not marked as written, that micro-batch is sent again under the new name.
    """
    from ackcore.kafka.client_settings import ClientSettings  # noqa: PLC0415
    from ackcore.kafka.messages import MessageColumns  # noqa: PLC0415

    kafka = producing()
    kafka.check_topic(topic)
    columns = {"key": key, "value": value, "headers": headers, "message_id": message_id}
    for argument, column in columns.items():
        if not isinstance(column, str | None):
            raise TypeError(f"{argument} must be the name of a column, got {type(column).__name__}")
    if not isinstance(transactional, bool):
        raise TypeError(f"transactional must be True or False, got {transactional!r}")
    settings = ClientSettings(bootstrap_servers, options)
    kafka.check_options(settings)
    of = MessageColumns(key, value, headers)
    return KafkaSink(topic, settings, of, message_id, transactional)


class KafkaTransaction(NamedTuple):
    """The producer, the messages of a micro-batch, and a record of those that were refused."""

    live: Transactions
    messages: Messages
    suspects: Suspects


class KafkaSink(TransactionalSink[KafkaTransaction]):
    """The sink that `to_kafka` returns, with checked arguments."""

    def __init__(
        self,
        topic: str,
        settings: ClientSettings,
        columns: MessageColumns,
        message_id: str | None,
        transactional: bool,
    ) -> None:
        self.topic = topic
        self.transactional = transactional
        self._settings = settings
        self._columns = columns
        self._message_id = message_id
        # `Deliveries` or `Transactions`, which are kept after a micro-batch without failures.
        self._live: Connections[Any] = Connections()

    def __repr__(self) -> str:
        return f"to_kafka({self.topic!r}, {self._settings.bootstrap_servers!r})"

    def check(self, sink: str, schema: pa.Schema, case_sensitive: bool = False) -> None:
        """Raise ValueError or TypeError if a column is missing, or cannot be converted to bytes."""
        from ackcore.kafka.messages import is_text_or_bytes  # noqa: PLC0415

        what = f"sink {sink!r}"
        self._columns.check(what, schema)
        found = self._message_id
        if found is None:
            return
        if found not in schema.names:
            raise ValueError(
                f"{what}: message_id must be one of the columns {', '.join(schema.names)}, "
                f"got {found!r}"
            )
        kind = schema.field(found).type
        if not (is_text_or_bytes(kind) or pa.types.is_integer(kind)):
            raise TypeError(
                f"{what}: the column {found!r}, the message id, must be of text, bytes or whole "
                f"numbers, got {kind}; have the bolt emit it as a string"
            )

    def claim(self, sink: str, deployment: str, checkpoint: str) -> None:
        """Close a kept producer; check settings and broker with a new one, which is closed, too.

        Raises DeliveryError if librdkafka refuses a setting, which the message names, or
        ``oauth_cb`` gives no token. Raises SinkUnavailable if no broker answers within 10 s.
        Without transactions, raises TypeError if a callback in the settings cannot be pickled for
        workers.
        """
        self.release(sink, deployment)
        if not self.transactional:
            refuse_unpicklable(f"sink {sink!r}", self._settings, "a module that workers import")
        deliveries = producing().Deliveries(
            self._settings, transactional_id=_id(sink, deployment) if self.transactional else None
        )
        with contextlib.closing(deliveries), self._as_unavailable(sink):
            deliveries.check_broker()

    def write(self, batch: SinkBatch) -> SinkRejects | None:
        """Send the rows of a micro-batch, and wait for their delivery.

        Returns the rows whose messages are larger than the topic accepts, lack a required key, or
        have text that cannot be sent unchanged, or None; a transactional sink raises them. Raises
        SinkUnavailable if a message was not delivered, CheckpointInUse if another driver has taken
        over. A transactional sink raises CheckpointForeign if the topic has other rows of this
        micro-batch, or it is unknown whether it has any.
        """
        if self.transactional:
            return super().write(batch)
        with self._sending(batch):
            refused = self._send(batch)
        if not refused:
            return None
        self.release(batch.sink, batch.deployment)
        return _rejects(batch, refused)

    @contextlib.contextmanager
    def _as_unavailable(self, sink: str) -> Iterator[None]:
        """Raise delivery errors as `SinkUnavailable`."""
        try:
            yield
        except producing().DeliveryError as error:
            where = f"topic {self.topic!r} at {self._settings.bootstrap_servers}"
            raise unavailable(sink, where, str(error), _WAY_OUT) from error

    @contextlib.contextmanager
    def _sending(self, batch: SinkBatch) -> Iterator[None]:
        """Raise delivery errors as `SinkUnavailable`; after any error close the sink's producer."""
        try:
            with self._as_unavailable(batch.sink):
                yield
        except BaseException:
            self.release(batch.sink, batch.deployment)
            raise

    def release(self, sink: str, deployment: str) -> None:
        """Close the sink's producer. The next micro-batch makes another one."""
        self._live.release(sink, deployment)

    def _connected(self, batch: SinkBatch, connect: Callable[[], Any]) -> Any:
        """Return the open producer of the batch's sink, or without one the new ``connect()``."""
        sink, deployment = batch.sink, batch.deployment
        live = self._live.get(sink, deployment)
        return self._live.put(sink, deployment, connect()) if live is None else live

    # ---------------------------------------------------------------------------- at least once

    def _send(self, batch: SinkBatch) -> list[Refused]:
        """Send the rows from tasks, or few rows from the driver; return the refused ones.

        Raises DeliveryError if a message was not delivered for another reason.
        """
        messages = self._messages(batch)
        size = sum(file.size() for file in batch.files)
        if batch.rows <= _DRIVER_ROWS and size <= _DRIVER_BYTES:
            live = self._connected(batch, lambda: producing().Deliveries(self._settings))
            check_fence()
            return messages.deliver(live, self._settings)
        settings, files = self._settings, messages.files
        tasks = min(len(files), task_slots(batch.spark))

        def send(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            kafka = producing()
            found: list[tuple[int | None, str]] = []
            with contextlib.closing(kafka.Deliveries(settings)) as deliveries:
                mine = [files[i] for each in ids for i in each.column(0).to_pylist()]
                try:
                    found += replace(messages, files=mine).deliver(deliveries, settings)
                except kafka.DeliveryError as error:
                    # If it were raised, Spark would repeat the task and its delivered messages.
                    found.append((None, str(error)))
            rows = [dict(zip(_ANSWER.names, one, strict=True)) for one in found]
            yield pa.RecordBatch.from_pylist(rows, _ANSWER)

        frame = batch.spark.range(0, len(files), 1, tasks)
        refused = []
        for number, said in frame.mapInArrow(send, from_arrow_schema(_ANSWER)).collect():
            if number is None:
                raise producing().DeliveryError(said)
            refused.append((number, said))
        return refused

    # -------------------------------------------------------------------- one transaction for each

    @contextlib.contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[KafkaTransaction]:
        """Connect, and end the open transactions of earlier drivers; `write_rows` begins a new one.

        After an error the producer is closed, which aborts the transaction. Raises SinkUnavailable
        if the brokers do not answer, or a message was not delivered.
        """
        with self._sending(batch):
            messages = self._messages(batch)
            yield KafkaTransaction(self._transactions(batch), messages, messages.suspects())

    def read_number(self, transaction: KafkaTransaction, batch: SinkBatch) -> Written | None:
        """Return number and content of the sink group's committed offset, or None without one.

        The content is `ANY_CONTENT` if the offset has no metadata, because a user has set it. The
        offset was read after this producer had fenced the producer of an earlier driver.
        """
        last = transaction.live.last
        # A user who sets an offset gives no metadata.
        return None if last is None else Written(last.number, last.note or ANY_CONTENT)

    def write_rows(self, transaction: KafkaTransaction, batch: SinkBatch) -> None:
        """Begin the transaction and send the rows.

        Raises SinkRejects if messages are larger than the topic accepts, lack a required key, or
        have text that cannot be sent unchanged. The transaction is then aborted. Raises
        DeliveryError if a message is not delivered for another reason. Raises CheckpointForeign if
        it is unknown whether the micro-batch was sent before.
        """
        live, messages = transaction.live, transaction.messages
        if live.last is None:
            _refuse_forgotten(batch, live.transactional_id, self.topic)
        with self._blaming_rows(transaction, batch):
            messages.send(transaction.suspects.of(live.begin()), messages.rows())
            if messages.unfit:
                raise _rejects(batch, [*messages.unfit.items()])

    def record(self, transaction: KafkaTransaction, batch: SinkBatch, written: Written) -> None:
        """Wait for all deliveries; add number and content to the transaction, as an offset.

        Raises SinkRejects if the topic refuses messages, DeliveryError if one is not delivered for
        another reason.
        """
        with self._blaming_rows(transaction, batch):
            transaction.live.prepare(producing().Mark(written.number, written.content))

    def commit(self, transaction: KafkaTransaction) -> None:
        """Commit the transaction. Raise DeliveryError if it is unknown whether that succeeded."""
        transaction.live.commit()

    def advice(self, batch: SinkBatch, last: int) -> str:
        """Return the end of the error that the group has a later micro-batch than the checkpoint.

        It names the offset to commit to have the micro-batches up to ``last`` sent again, or
        counted as sent.
        """
        number, group = batch.batch_id, _id(batch.sink, batch.deployment)
        return (
            f"or have micro-batches from {number} to {last} sent again, in addition to their "
            f"messages that are in the topic. {_way_out(number, group, self.topic)}"
        )

    @contextlib.contextmanager
    def _blaming_rows(self, transaction: KafkaTransaction, batch: SinkBatch) -> Iterator[None]:
        """Raise a delivery error as `SinkRejects` with the rows that caused it, if rows did."""
        try:
            yield
        except producing().DeliveryError:
            suspects = transaction.suspects
            suspects.check(self.topic)
            if suspects.keyless:
                self.release(batch.sink, batch.deployment)
                raise _rejects(batch, transaction.messages.without_key(suspects)) from None
            if suspects.count:
                raise self._too_large(batch, transaction.messages, suspects) from None
            raise

    def _too_large(
        self, batch: SinkBatch, messages: Messages, suspects: Suspects
    ) -> SinkRejects | DeliveryError:
        """Find the rows that are too large by sending each in a transaction that is aborted.

        Rows of other requests that are as large as a refused one are sent, too. Otherwise the next
        large message would fail another request, and all rows would be sent again. Returns the
        refusal, or an error if the topic accepts each row alone.
        """
        refused = messages.suspects()
        taken: dict[int, int] = {}

        def is_suspect(content: Content) -> bool:
            return suspects.includes(*content[:2])

        def is_larger(content: Content) -> bool:
            least = taken.get(content_hash(*content[:2]), -1)
            return is_suspect(content) and content_size(content) > least

        found = list(self._alone(batch, messages, is_larger, refused, taken))
        if not found:  # compressed, a smaller message may be the larger one
            found = list(self._alone(batch, messages, is_suspect, refused, taken))
        if found:
            least = min(size for _, size in found)

            def is_as_large(content: Content) -> bool:
                return content_size(content) >= least and not is_suspect(content)

            found += self._alone(batch, messages, is_as_large, refused, taken)
        self.release(batch.sink, batch.deployment)
        if not found:
            return suspects.error(self.topic, "though none of them is too large alone")
        return _rejects(batch, [row for row, _ in found])

    def _alone(
        self,
        batch: SinkBatch,
        messages: Messages,
        chosen: Callable[[Content], bool],
        refused: Suspects,
        taken: dict[int, int],
    ) -> Iterator[tuple[Refused, int]]:
        """Send the chosen rows one by one; yield refused rows with the sizes of their messages.

        The transactions are never committed. Raises SinkRejects if the topic refuses messages
        without a key, DeliveryError for other failures. ``refused``: records the refused messages.
        ``taken``: receives the size of the largest accepted message, by hash of key and value.
        """
        known = sum(len(file.refused) for file in batch.files)
        live = None
        for row in messages.chosen(chosen):
            number, content = row
            if live is None:
                self.release(batch.sink, batch.deployment)
                live = self._transactions(batch)
                check_fence()
                deliveries, before = refused.of(live.begin()), refused.count
            try:
                messages.send(deliveries, [row])
                deliveries.flush()
            except producing().DeliveryError:
                if refused.keyless:
                    self.release(batch.sink, batch.deployment)
                    raise _rejects(batch, messages.without_key(refused)) from None
                if refused.count == before:
                    raise
                refused.check(self.topic, known)
                yield (number, refused.said), content_size(content)
                live = None
            else:
                alike = content_hash(*content[:2])
                taken[alike] = max(taken.get(alike, -1), content_size(content))

    def _transactions(self, batch: SinkBatch) -> Transactions:
        """Return the sink's open transactional producer, or a new one if it is closed or failed."""
        wanted = _id(batch.sink, batch.deployment)
        begin = partial(producing().Transactions, self._settings, wanted, self.topic)
        live: Transactions = self._connected(batch, begin)
        if not live.has_no_error():
            self.release(batch.sink, batch.deployment)
            live = self._connected(batch, begin)
        return live

    def _messages(self, batch: SinkBatch) -> Messages:
        header = f"{batch.deployment}/{batch.sink}/{batch.batch_id}".encode()
        files = list(enumerate(batch.files))
        return Messages(self.topic, self._columns, self._message_id, header, files, batch.nonacked)


def _rejects(batch: SinkBatch, refused: Sequence[Refused]) -> SinkRejects:
    numbers, reasons = zip(*refused, strict=True)
    return batch.refuse(numbers, reasons)


def _id(sink: str, deployment: str) -> str:
    """Return the transactional id of a sink, which is also the name of its consumer group."""
    return f"ackcore-{deployment}-{sink}"


def _refuse_forgotten(batch: SinkBatch, group: str, topic: str) -> None:
    """Raise CheckpointForeign if an earlier driver may have sent the rows, a day ago or earlier.

    Brokers may have deleted the offset that would show whether they were sent.
    """
    if batch.age_ms is None or batch.age_ms < _REMEMBERED_MS:
        return
    raise CheckpointForeign(
        f"micro-batch {batch.batch_id} of sink {batch.sink!r} was planned "
        f"{batch.age_ms // 3_600_000} hours ago, and it is unknown whether its rows are in topic "
        f"{topic!r}, so they are not sent: group {group!r} has no committed offset, and brokers "
        "delete offsets after offsets.retention.minutes. "
        f"{_way_out(batch.batch_id, group, topic)}"
    )


def _way_out(number: int, group: str, topic: str) -> str:
    return (
        f"Look in the topic for messages with this micro-batch in the header {BATCH!r}. Then "
        f"commit an offset for partition 0 of {topic!r} in group {group!r}, without metadata (by "
        f"AdminClient.alter_consumer_group_offsets): {number + 1} if they are there, {number} to "
        "have them sent; and start again"
    )
