"""Sending of messages: `Deliveries`, and `Transactions` that store a number with the messages.

The producers are idempotent and wait for all in-sync replicas. After an error, the caller closes
the producer and starts with a new one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from ackcore._error_hints import counted
from ackcore.kafka.client_settings import ClientSettings, Value
from ackcore.kafka.clients import new_client
from ackcore.kafka.kafka_errors import NoToken, error_text

#: Settings that a guaranteed delivery requires.
_OURS = {
    "acks": "a message is delivered when all replicas in sync have it",
    "request.required.acks": "a message is delivered when all replicas in sync have it",
    "enable.idempotence": "each message is stored once, also if librdkafka sends it again",
    "transactional.id": "ackcore makes it from the deployment and the sink",
    "delivery.report.only.error": "ackcore checks every report",
    "on_delivery": "ackcore checks every report",
    "dr_cb": "ackcore checks every report",
    "error_cb": "ackcore adds its messages to errors",
}

#: The headers of a message.
Headers = Iterable[tuple[str, bytes | None]]

#: The largest message, unless the options set it: librdkafka's maximum, so that only the topic's
#: limit counts.  librdkafka's default of 1 MB refuses messages that a topic may accept.
SIZES: dict[str, Any] = {"message.max.bytes": 1_000_000_000}

#: The longest time for a delivery, unless the options set it; in milliseconds.
_TIMEOUT_MS = 60_000
#: Seconds to wait for a broker before anything is sent.
_REACH_S = 10.0
#: The longest transaction, unless the options set it.  Kafka's default of a minute is short for a
#: micro-batch; its maximum of a quarter of an hour would delay readers.
_TRANSACTION_MS = 300_000
#: The longest single wait, in seconds.  Between waits Python handles signals.
_SLICE_S = 0.2
#: The wait before a retry, in seconds.
_PAUSE_S = 0.1
#: The time-out of a call that may ignore it, and the additional wait; in seconds.
_APART_S = 30.0
_OVERDUE_S = 5.0
#: The number of messages between checks for failures.
_EVERY = 1000

_FENCED_REMEDY = (
    "another driver, or call of replay_letters, has taken over; or the transaction took longer "
    "than transaction.timeout.ms: raise this setting in options, or send less in a micro-batch"
)

_REMEDIES = {
    KafkaError._FENCED: _FENCED_REMEDY,
    KafkaError.INVALID_PRODUCER_EPOCH: _FENCED_REMEDY,
    KafkaError.PRODUCER_FENCED: _FENCED_REMEDY,
    KafkaError.MSG_SIZE_TOO_LARGE: (
        "raise max.message.bytes of the topic, and message.max.bytes if options set it, or send "
        "less"
    ),
    KafkaError.INVALID_RECORD: (
        "give each message a key, which a topic with cleanup.policy=compact requires; else see "
        "the log of the broker"
    ),
    KafkaError.UNKNOWN_TOPIC_OR_PART: "create the topic",
    KafkaError._UNKNOWN_TOPIC: "create the topic",
    KafkaError._UNKNOWN_PARTITION: "create the topic, or add this partition to it",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: (
        "let this user write to the topic, and for transactions read it as well"
    ),
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "let this user write under transactional ids and groups that begin with 'ackcore-'"
    ),
    KafkaError.GROUP_AUTHORIZATION_FAILED: (
        "let this user read in groups that begin with 'ackcore-'"
    ),
    KafkaError.INVALID_TRANSACTION_TIMEOUT: (
        "set transaction.timeout.ms in options to no more than the broker's "
        "transaction.max.timeout.ms"
    ),
    KafkaError._MSG_TIMED_OUT: "check that the brokers can be reached and have enough replicas",
    KafkaError._TIMED_OUT: "check that the brokers can be reached",
    KafkaError._TRANSPORT: "check that the brokers can be reached",
}


def check_options(settings: ClientSettings, *, but: Collection[str] = ()) -> None:
    """Raise ValueError if the options of ``settings`` have one that ackcore sets for a producer.

    ``but``: names that are allowed nevertheless.
    """
    for name, why in _OURS.items():
        if name in settings.options and name not in but:
            raise ValueError(f"options must not have {name!r}: {why}")


def check_topic(topic: str, name: str = "topic") -> None:
    """Raise TypeError if the argument ``name`` is no text, and ValueError if it is empty."""
    if not isinstance(topic, str):
        raise TypeError(f"{name} must be a str, got {type(topic).__name__}")
    if not topic:
        raise ValueError(f"{name} must be the name of a topic, got ''")


def remedy(error: KafkaError) -> str:
    """Return what the user can do about an error, after "; ". Return "" if nothing is known."""
    found = _REMEDIES.get(error.code())
    return f"; {found}" if found else ""


#: Temporary errors while a coordinator or a leader moves or starts, which librdkafka reports here.
PASSING = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
}


class Undelivered(NamedTuple):
    """A message that a broker refused, by its own fault or that of another one in its request."""

    #: "size": the message or its request is too large. "no key": the topic requires a key.
    #: "beside": a record of the request is invalid, probably another one.
    why: Literal["size", "no key", "beside"]

    key: bytes | None
    value: bytes | None
    said: str  # the error, with the remedy


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _why(error: KafkaError, key: bytes | None) -> Literal["size", "no key", "beside"] | None:
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return "size"
    if error.code() not in (KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD):
        return None
    # If one record of a request is invalid, librdkafka reports the error for all its records.
    return "no key" if error.code() == KafkaError.INVALID_RECORD and key is None else "beside"


class DeliveryError(RuntimeError):
    """A message or a transaction failed, or the producer cannot work. The text has the reason."""


class Deliveries:
    """A producer that raises if a message is not delivered. One thread at a time may use it.

    ``settings``: the connection to the brokers, with options that `check_options` accepts.
    ``transactional_id``: set if the messages are sent in transactions.

    Raises DeliveryError if librdkafka refuses the settings, or ``oauth_cb`` gives no token.

    Attributes: ``on_undelivered``: a function that `send` and `flush` call with each `Undelivered`
    message; None by default. If it returns True, the message counts as no failure, except in a
    transaction.
    """

    def __init__(self, settings: ClientSettings, *, transactional_id: str | None = None) -> None:
        self._settings = settings
        self._sent = 0
        self._failures: dict[str, int] = {}
        self._first: tuple[str, KafkaError] | None = None
        self._cause = ""
        self.on_undelivered: Callable[[Undelivered], bool] | None = None
        self._ends_of_one = transactional_id is not None
        # Only failures are reported: reports of successes would take as long as sending.  A message
        # that has left librdkafka's queue without a report was delivered.
        own: dict[str, Any] = {
            "acks": "all",
            "enable.idempotence": True,
            "delivery.report.only.error": True,
            "on_delivery": self._on_failure,
            "error_cb": self._on_error,
        }
        defaults = dict(SIZES)
        if "delivery.timeout.ms" not in settings.options:  # another name of the same setting
            defaults["message.timeout.ms"] = _TIMEOUT_MS
        if transactional_id is not None:
            own["transactional.id"] = transactional_id
            defaults = {**SIZES, "transaction.timeout.ms": _TRANSACTION_MS}
        try:
            config = settings.client_config(own, defaults)
            self._producer: Producer | None = new_client(Producer, config)
        except NoToken as error:
            raise DeliveryError(str(error)) from None
        except KafkaException as error:
            raise DeliveryError(
                f"librdkafka refused the producer's settings: {self._error_text(error.args[0])}; "
                "correct options"
            ) from None

    @property
    def producer(self) -> Producer:
        """The producer of confluent-kafka. Raises DeliveryError once it is closed or abandoned."""
        if self._producer is None:
            raise DeliveryError("the producer is closed or was abandoned; make another one")
        return self._producer

    def check_broker(self) -> None:
        """Raise DeliveryError if no broker answers within 10 s."""
        try:
            # A producer's request for one topic would create it, if brokers create topics.
            self.producer.list_topics(timeout=_REACH_S)
        except KafkaException as error:
            told = self._error_text(error.args[0])
            raise DeliveryError(f"no broker answers within {_REACH_S:g} s: {told}") from None

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        """Queue a message, or wait until the queue has room. `flush` waits for its delivery.

        Raises DeliveryError if this message cannot be queued, or an earlier one was not delivered.
        Only each 1,000th call, and a call that waits for room, checks the earlier messages.

        ``value``, ``key``: text is sent as UTF-8. ``partition``: by default librdkafka chooses it,
        by the key if there is one.
        """
        self._sent += 1
        if self._sent % _EVERY == 0:
            self._check_failures(0)
        about: dict[str, Any] = {} if headers is None else {"headers": headers}
        if partition is not None:
            about["partition"] = partition
        while True:
            try:
                self.producer.produce(topic, value, key, **about)
                return
            except BufferError:
                self._check_failures(_SLICE_S)
            except KafkaException as error:
                if error.args[0].code() == KafkaError._STATE:
                    # An earlier message has failed the transaction. Its report has the reason.
                    self._check_failures(_SLICE_S)
                self._fail(error.args[0], topic, _bytes(key), _bytes(value))
                self._check_failures(0)
                return

    def flush(self) -> None:
        """Wait until all messages are delivered; raise DeliveryError once one has failed."""
        while self._serve(self.producer.flush, _SLICE_S):
            self._check_failures(0)
        self._check_failures(0)

    def close(self, *, in_transaction: bool = False) -> None:
        """Drop undelivered messages and close the producer. A second call does nothing.

        ``in_transaction``: whether a transaction may be open. Then the producer is not closed, only
        dropped: its ``close`` would wait without limit for brokers to abort the transaction.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        # SystemError: close() raises it after another producer has fenced this one.
        with contextlib.suppress(KafkaException, RuntimeError, SystemError):
            producer.purge()
            if not in_transaction:
                producer.close()

    def call(
        self, what: str, function: Callable[..., object], *args: object, timeout_s: float = 1.0
    ) -> None:
        """Call a function of the producer, again while its error is temporary.

        The function gets ``*args`` and ``timeout_s``. Raises DeliveryError after a permanent error,
        and if it still fails after 60 s. ``what``: the beginning of the message.
        """
        until = time.monotonic() + _TIMEOUT_MS / 1000
        while True:
            try:
                function(*args, timeout_s)
                return
            except KafkaException as error:
                reason = error.args[0]
                if not reason.retriable() or time.monotonic() > until:
                    raise DeliveryError(f"{what}: {self._error_text(reason)}") from None
            time.sleep(_PAUSE_S)  # some calls fail without having waited

    def call_apart(self, what: str, function: Callable[..., object], *args: object) -> None:
        """Call a function as `call` does, but in a separate thread, and wait for it.

        The function may ignore its time-out. Raises DeliveryError also if the function has not
        returned 5 s after its time-out of 30 s. The producer is then abandoned without closing it,
        which would wait for the function. The next producer with its transactional id fences it.
        """
        raised: list[BaseException] = []
        done = threading.Event()
        timeout_s = _APART_S

        def run() -> None:
            try:
                self.call(what, function, *args, timeout_s=timeout_s)
            except BaseException as error:
                raised.append(error)
            finally:
                done.set()

        until = time.monotonic() + timeout_s + _OVERDUE_S
        try:
            threading.Thread(target=run, name="ackcore-transaction", daemon=True).start()
            while not done.wait(_SLICE_S):
                if time.monotonic() > until:
                    cause = f" after {self._cause}" if self._cause else ""
                    raise DeliveryError(
                        self._settings.redacted(
                            f"{what}: librdkafka has not returned within its time-out of "
                            f"{timeout_s:g} s{cause}; this producer is abandoned, and the next "
                            "attempt uses a new one"
                        )
                    )
        finally:
            if not done.is_set():
                self._producer = None
        if raised:
            raise raised[0]

    def _check_failures(self, wait_s: float) -> None:
        self._serve(self.producer.poll, wait_s)
        if self._first is None:
            return
        topic, error = self._first
        # The messages after the first failure failed with it, or wait behind it.
        failed = self._failures[topic]
        raise DeliveryError(
            f"topic {topic!r} did not take {counted(failed, 'message')}, of {self._sent} to all "
            f"topics: {self._error_text(error)}"
        )

    def _serve(self, function: Callable[[float], int], wait_s: float) -> int:
        try:
            return function(wait_s)
        except KafkaException as error:  # a fatal error
            text = self._error_text(error.args[0])
            raise DeliveryError(f"the producer failed, and can send nothing more: {text}") from None

    def _on_failure(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._fail(error, message.topic() or "", message.key(), message.value())

    def _fail(self, error: KafkaError, topic: str, key: bytes | None, value: bytes | None) -> None:
        why = _why(error, key)
        if self.on_undelivered is not None and why is not None:
            known = self.on_undelivered(Undelivered(why, key, value, self._error_text(error)))
            if known and not self._ends_of_one:
                return
        self._failures[topic] = self._failures.get(topic, 0) + 1
        self._first = self._first or (topic, error)

    def _on_error(self, error: KafkaError) -> None:
        # The error of one broker is more specific than "all brokers are down".
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._cause:
            self._cause = error.str()

    def _error_text(self, error: KafkaError) -> str:
        """Return an error's text, librdkafka's last connection error and the remedy.

        Secrets are removed.
        """
        told = error_text(error)
        if self._cause and self._cause != error.str():
            told += f", after {self._cause}"
        return self._settings.redacted(told + remedy(error))


class Mark(NamedTuple):
    """A number from -1 on, and a note; both are committed with a transaction."""

    number: int  # of the micro-batch that was sent; for replayed letters, the last one's offset
    note: str  # a text of the caller's, returned unchanged


class Transactions:
    """Transactions that commit a `Mark` with their messages.

    The mark is stored as committed offset and metadata of partition 0 of ``topic``, in a consumer
    group without members that has the name of the transactional id. A new object with this id
    fences all earlier ones, ends their open transactions, and reads the last mark: ``last``.

    ``settings``: the connection to the brokers. ``topic``: the topic of the messages.

    Raises DeliveryError if the brokers refuse, or do not answer for a minute.

    Attributes: ``last``: the mark of the last transaction that was committed; None without one.
    """

    def __init__(self, settings: ClientSettings, transactional_id: str, topic: str) -> None:
        self.transactional_id = transactional_id
        self._topic = topic
        self._deliveries = Deliveries(settings, transactional_id=transactional_id)
        self._of = f"topic {topic!r}, transactions of {transactional_id!r}"
        self._open = False
        consumer: Consumer | None = None
        try:
            self._call("could not be initialized", self._producer.init_transactions)
            # After the call above all earlier transactions are committed or aborted, so the offset
            # that this reads does not change any more.
            own: dict[str, Value] = {
                "group.id": transactional_id,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "log_level": 3,  # it would warn about options for the producer
            }
            consumer = new_client(Consumer, settings.client_config(own))
            self._group = consumer.consumer_group_metadata()
            found = self._committed(consumer)
        except KafkaException as error:
            self.close()
            reason = self._deliveries._error_text(error.args[0])
            raise DeliveryError(
                f"{self._of}: the mark of the last transaction could not be read: {reason}"
            ) from None
        except BaseException:
            self.close()
            raise
        finally:
            if consumer is not None:
                consumer.close()
        self.last: Mark | None = None
        if found.offset >= 0:  # 0: a user has reset it so that micro-batch 0 is sent
            self.last = Mark(found.offset - 1, found.metadata or "")

    def _committed(self, consumer: Consumer) -> TopicPartition:
        """Return the committed offset, which is the last mark's number plus 1; below 0 without one.

        Retries while the coordinator moves, and while a transaction of the group is completed, for
        up to a minute. Raises KafkaException after that, or for another error.
        """
        until = time.monotonic() + _TIMEOUT_MS / 1000
        while True:
            try:
                (found,) = consumer.committed([TopicPartition(self._topic, 0)], timeout=5.0)
                if found.error is None:
                    return found
                error = found.error
            except KafkaException as raised:
                error = raised.args[0]
            if error.code() not in PASSING or time.monotonic() > until:
                raise KafkaException(error)
            self._producer.poll(_SLICE_S)

    @property
    def _producer(self) -> Producer:
        return self._deliveries.producer

    def _call(self, what: str, function: Callable[..., object], *args: object) -> None:
        self._deliveries.call(f"{self._of}: {what}", function, *args)

    def has_no_error(self) -> bool:
        """Return whether the producer had no error so far, and so may be used again.

        After an error, librdkafka may wait for ever for a group's coordinator that was away.
        """
        with contextlib.suppress(DeliveryError):
            self._deliveries._check_failures(0)
            return not self._deliveries._cause
        return False

    def begin(self) -> Deliveries:
        """Begin a transaction, or raise DeliveryError. Send its messages by the returned object."""
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            reason = self._deliveries._error_text(error.args[0])
            raise DeliveryError(f"{self._of}: a transaction could not begin: {reason}") from None
        self._open = True
        return self._deliveries

    def prepare(self, mark: Mark) -> None:
        """Wait until all messages are delivered; add a number and a note to the transaction.

        Raises DeliveryError if either fails; call `close` then.
        """
        self._deliveries.flush()
        place = TopicPartition(self._topic, 0, mark.number + 1, metadata=mark.note)
        send = self._producer.send_offsets_to_transaction
        # The call ignores its time-out while the group's coordinator is away.  A short time-out
        # would end the transaction whenever a coordinator moves.
        what = f"{self._of}: the mark {mark.number} could not be added to the transaction"
        self._deliveries.call_apart(what, send, [place], self._group)
        self._marked = mark

    def commit(self) -> None:
        """Commit messages and mark together. After a DeliveryError, both or none are committed.

        Readers may still have to wait for a moment: brokers write the markers after their answer.
        """
        self._call(
            "it is unknown whether the last one was committed", self._producer.commit_transaction
        )
        self._open = False
        self.last = self._marked

    def close(self) -> None:
        """Abort an open transaction, if brokers answer in 2 s, and close. May be called again."""
        in_transaction, self._open = self._open, False
        if in_transaction:
            # Else readers of committed records would wait until the transaction times out.
            with contextlib.suppress(KafkaException, RuntimeError):
                self._producer.abort_transaction(2.0)
                in_transaction = False
        self._deliveries.close(in_transaction=in_transaction)
