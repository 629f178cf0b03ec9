"""Messages out: every report of a delivery looked at, and transactions that carry a number.

Producers here are idempotent and wait for all replicas that are in sync.  None outlives an error:
who meets one closes it, and begins anew with another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Literal, NamedTuple

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from ackcore.kafka.errors import error_text
from ackcore.kafka.settings import ClientSettings

#: Settings without which a delivery would be none.
_OURS = {
    "acks": "a message is delivered when all replicas in sync have it",
    "request.required.acks": "a message is delivered when all replicas in sync have it",
    "enable.idempotence": "what librdkafka sends again is there once",
    "transactional.id": "it is made from the deployment and the sink",
    "delivery.report.only.error": "every report is looked at here",
    "on_delivery": "every report is looked at here",
    "dr_cb": "every report is looked at here",
    "error_cb": "what it hears goes into errors",
}

#: What a message carries beside key and value.
Headers = Iterable[tuple[str, bytes | None]]

#: How large a message may be, unless the options say otherwise: the most that librdkafka allows,
#: whose default of 1 MB refuses what a topic would take.  The topic's own limit is what counts.
SIZES: dict[str, Any] = {"message.max.bytes": 1_000_000_000}

#: How long a message may be on its way, unless the options say otherwise; in milliseconds.
_TIMEOUT_MS = 60_000
#: For so long brokers are waited for where nothing is sent yet.
_REACH_S = 10.0
#: How long a transaction may be open, unless the options say otherwise: Kafka's default of a
#: minute is short for a micro-batch, and its bound of a quarter of an hour would hold up readers.
_TRANSACTION_MS = 300_000
#: How long one look lasts: between them Python sees to its signals.
_SLICE_S = 0.2
#: How long what may be tried again at once is left alone.
_PAUSE_S = 0.1
#: The time-out of a call that may ignore it, and how long after that it is waited for.
_APART_S = 30.0
_OVERDUE_S = 5.0
#: After so many messages reports of failures are looked for.
_EVERY = 1000

_SHUT_OUT = (
    "another driver has taken over, or the transaction took longer than transaction.timeout.ms: "
    "raise that in options, or have a micro-batch take fewer records"
)

_WAYS_OUT = {
    KafkaError._FENCED: _SHUT_OUT,
    KafkaError.INVALID_PRODUCER_EPOCH: _SHUT_OUT,
    KafkaError.PRODUCER_FENCED: _SHUT_OUT,
    KafkaError.MSG_SIZE_TOO_LARGE: (
        "raise max.message.bytes of the topic, and message.max.bytes in options if it is there; or "
        "send less"
    ),
    KafkaError.INVALID_RECORD: (
        "give each message a key, which a topic with cleanup.policy=compact asks for; else see "
        "what the broker's log says of it"
    ),
    KafkaError.UNKNOWN_TOPIC_OR_PART: "make the topic",
    KafkaError._UNKNOWN_TOPIC: "make the topic",
    KafkaError._UNKNOWN_PARTITION: "make the topic, or give it that many partitions",
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
    KafkaError._MSG_TIMED_OUT: "see that the brokers can be reached and have enough replicas",
    KafkaError._TIMED_OUT: "see that the brokers can be reached",
}


def check_options(settings: ClientSettings, *, but: Collection[str] = ()) -> None:
    """Raise ValueError for an option that a producer here has its own value for, but for some."""
    for name, why in _OURS.items():
        if name in settings.options and name not in but:
            raise ValueError(f"options must not have {name!r}: {why}")


def check_topic(topic: str) -> None:
    """Refuse what is not the name of a topic."""
    if not isinstance(topic, str):
        raise TypeError(f"topic must be a str, got {type(topic).__name__}")
    if not topic:
        raise ValueError("topic must be the name of a topic, got ''")


def way_out(error: KafkaError) -> str:
    """Return what to do about an error, as the end of a sentence; "" if that is not known."""
    found = _WAYS_OUT.get(error.code())
    return f"; {found}" if found else ""


#: Errors of a coordinator or a leader that moves or has just begun; librdkafka hands them out here.
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
    """A message that its topic does not take, or that came in one request with such.

    Attributes
    ----------
    why : {"size", "no key", "beside"}
        Of "size", it or its request is too large.  "beside": another of the request is invalid.
    key, value : bytes or None
    said : str
        The error, with the way out.
    """

    why: Literal["size", "no key", "beside"]
    key: bytes | None
    value: bytes | None
    said: str


def _bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _why(error: KafkaError, key: bytes | None) -> Literal["size", "no key", "beside"] | None:
    if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
        return "size"
    if error.code() not in (KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD):
        return None
    # Of a request in which one record is invalid, librdkafka says so of all.
    return "no key" if error.code() == KafkaError.INVALID_RECORD and key is None else "beside"


class DeliveryError(RuntimeError):
    """Kafka did not take what was sent; the message names the topic and the reason."""


class Deliveries:
    """Messages on their way to topics; for one thread at a time.

    Parameters
    ----------
    settings : ClientSettings
        How the brokers are reached.
    transactional_id : str, optional
        What tells this producer from all others, if its messages go in transactions.

    Raises
    ------
    ValueError
        If an option is one that is set here.
    DeliveryError
        If librdkafka refuses the settings.

    Attributes
    ----------
    on_undelivered : callable or None
        Given a message that is larger than its topic takes or has no key in a topic that asks for
        one, or that is in one request with such, returns whether it deals with that: it is no
        failure then, but of a transaction, which it ends.  None by default.
    """

    def __init__(self, settings: ClientSettings, *, transactional_id: str | None = None) -> None:
        check_options(settings)
        self._settings = settings
        self._sent = 0
        self._failures: dict[str, int] = {}
        self._first: tuple[str, KafkaError] | None = None
        self._cause = ""
        self.on_undelivered: Callable[[Undelivered], bool] | None = None
        self._ends_of_one = transactional_id is not None
        # Of what was delivered nothing is reported one by one, which would take as long as sending:
        # what has left librdkafka's queue and was not reported was delivered.
        own: dict[str, Any] = {
            "acks": "all",
            "enable.idempotence": True,
            "delivery.report.only.error": True,
            "on_delivery": self._on_failure,
            "error_cb": self._on_error,
        }
        defaults = dict(SIZES)
        if "delivery.timeout.ms" not in settings.options:  # the same by another name
            defaults["message.timeout.ms"] = _TIMEOUT_MS
        if transactional_id is not None:
            own["transactional.id"] = transactional_id
            defaults = {**SIZES, "transaction.timeout.ms": _TRANSACTION_MS}
        try:
            self._producer: Producer | None = Producer(settings.client(own, defaults))
        except KafkaException as error:
            raise DeliveryError(
                f"the settings of the producer are refused: {self._told(error.args[0])}"
            ) from None

    @property
    def producer(self) -> Producer:
        """The producer. Raises DeliveryError once it is closed or given up."""
        if self._producer is None:
            raise DeliveryError("the producer is closed")
        return self._producer

    def reach(self, topic: str) -> None:
        """Ask brokers for a topic, whether or not it is there.

        Raises
        ------
        DeliveryError
            If none answers.
        """
        try:
            self.producer.list_topics(topic, timeout=_REACH_S)
        except KafkaException as error:
            told = self._told(error.args[0])
            raise DeliveryError(f"no broker answers within {_REACH_S:g} s: {told}") from None

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
    ) -> None:
        """Hand over a message; it is delivered once `flush` has returned.

        Parameters
        ----------
        topic : str
            Where it goes.
        value, key : bytes, str or None
            Text goes as UTF-8.
        headers : iterable of (str, bytes or None), optional
            In this order.
        partition : int, optional
            By the key if not given.

        Raises
        ------
        DeliveryError
            If one sent before was not delivered, or this one cannot be.
        """
        self._sent += 1
        if self._sent % _EVERY == 0:
            self._look(0)
        about: dict[str, Any] = {} if headers is None else {"headers": headers}
        if partition is not None:
            about["partition"] = partition
        while True:
            try:
                self.producer.produce(topic, value, key, **about)
                return
            except BufferError:
                self._look(_SLICE_S)
            except KafkaException as error:
                self._fail(error.args[0], topic, _bytes(key), _bytes(value))
                self._look(0)
                return

    def flush(self) -> None:
        """Wait until all that was sent is delivered.

        Raises
        ------
        DeliveryError
            If one was not.
        """
        while self._serve(self.producer.flush, _SLICE_S):
            self._look(0)
        self._look(0)

    def close(self, *, in_transaction: bool = False) -> None:
        """Give up what is not delivered; once more does no harm.

        Parameters
        ----------
        in_transaction : bool, default False
            Whether a transaction may be open: ``Producer.close`` would abort it, and wait for
            brokers that are away for as long as they are.
        """
        producer, self._producer = self._producer, None
        if producer is None:
            return
        # SystemError: what close() makes of a producer that was shut out by another one.
        with contextlib.suppress(KafkaException, RuntimeError, SystemError):
            producer.purge()
            if not in_transaction:
                producer.close()

    def call(
        self, what: str, function: Callable[..., object], *args: object, timeout_s: float = 1.0
    ) -> None:
        """Call a function of the producer's with a time-out as its last argument, until it is done.

        Raises
        ------
        DeliveryError
            If it fails for good, or goes on failing; ``what`` says what it was to do.
        """
        until = time.monotonic() + _TIMEOUT_MS / 1000
        while True:
            try:
                function(*args, timeout_s)
                return
            except KafkaException as error:
                reason = error.args[0]
                if not reason.retriable() or time.monotonic() > until:
                    raise DeliveryError(f"{what}: {self._told(reason)}") from None
            time.sleep(_PAUSE_S)  # some say so without having waited

    def call_apart(self, what: str, function: Callable[..., object], *args: object) -> None:
        """Make a `call` in a thread of its own, for a function that may never return.

        A producer that is left in it is given up, and never closed, which would wait for it; the
        next one with its transactional id shuts it out.

        Raises
        ------
        DeliveryError
            Also if the function has not returned long after its time-out.
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
                            f"{timeout_s:g} s{cause}; this producer is given up, and the next "
                            "attempt begins with another"
                        )
                    )
        finally:
            if not done.is_set():
                self._producer = None
        if raised:
            raise raised[0]

    def _look(self, wait_s: float) -> None:
        self._serve(self.producer.poll, wait_s)
        if self._first is None:
            return
        topic, error = self._first
        # What follows the first failure was given up with it, or waits behind it.
        failed = self._failures[topic]
        raise DeliveryError(
            f"topic {topic!r} did not take {failed} of {self._sent} messages that were sent: "
            f"{self._told(error)}"
        )

    def _serve(self, function: Callable[[float], int], wait_s: float) -> int:
        try:
            return function(wait_s)
        except KafkaException as error:  # that of a producer that can do no more
            raise DeliveryError(f"the producer has ended: {self._told(error.args[0])}") from None

    def _on_failure(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._fail(error, message.topic() or "", message.key(), message.value())

    def _fail(self, error: KafkaError, topic: str, key: bytes | None, value: bytes | None) -> None:
        why = _why(error, key)
        if self.on_undelivered is not None and why is not None:
            known = self.on_undelivered(Undelivered(why, key, value, self._told(error)))
            if known and not self._ends_of_one:
                return
        self._failures[topic] = self._failures.get(topic, 0) + 1
        self._first = self._first or (topic, error)

    def _on_error(self, error: KafkaError) -> None:
        # That all are down says less than why one is.
        if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._cause:
            self._cause = error.str()

    def _told(self, error: KafkaError) -> str:
        """Return what an error says, what librdkafka met before, and the way out."""
        told = error_text(error)
        if self._cause and self._cause != error.str():
            told += f", after {self._cause}"
        return self._settings.redacted(told + way_out(error))


class Mark(NamedTuple):
    """The last transaction under a transactional id that was committed.

    Attributes
    ----------
    number : int
        Which one.
    note : str
        What was noted with it.
    """

    number: int
    note: str


class Transactions:
    """Transactions with a number each, of which the last one committed is known to who comes next.

    The number and a note are committed with the messages, as offset and metadata of partition 0 of
    ``topic`` in a consumer group that is named as the transactional id and has no members.  Whoever
    begins with the same id ends what others of that id have begun, and knows what they committed.

    Parameters
    ----------
    settings : ClientSettings
        How the brokers are reached.
    transactional_id : str
        The one at work under this id shuts out all that were before.
    topic : str
        Where the messages go.

    Raises
    ------
    DeliveryError
        If it cannot begin.
    """

    def __init__(self, settings: ClientSettings, transactional_id: str, topic: str) -> None:
        self.transactional_id = transactional_id
        self._topic = topic
        self._deliveries = Deliveries(settings, transactional_id=transactional_id)
        self._of = f"topic {topic!r}, transactions of {transactional_id!r}"
        self._open = False
        consumer: Consumer | None = None
        try:
            self._call("could not begin", self._producer.init_transactions)
            # Behind the call above all that was begun before is committed or aborted, so that what
            # this reads does not change any more.
            consumer = Consumer(
                settings.client(
                    {
                        "group.id": transactional_id,
                        "enable.auto.commit": False,
                        "isolation.level": "read_committed",
                        "log_level": 3,  # it would warn of options that are for the producer
                    }
                )
            )
            self._group = consumer.consumer_group_metadata()
            found = self._committed(consumer)
        except KafkaException as error:
            self.close()
            reason = self._deliveries._told(error.args[0])
            raise DeliveryError(f"{self._of}: the last one is not known: {reason}") from None
        except BaseException:
            self.close()
            raise
        finally:
            if consumer is not None:
                consumer.close()
        #: What was committed last; None if nothing is known of it.
        self.last: Mark | None = None
        if found.offset >= 0:  # 0: as somebody has it who wants micro-batch 0 to be sent
            self.last = Mark(found.offset - 1, found.metadata or "")

    def _committed(self, consumer: Consumer) -> TopicPartition:
        """Return what the group has committed, as soon as its coordinator tells."""
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

    def is_sound(self) -> bool:
        """Whether no error was met so far.

        If one was, librdkafka may wait for ever for a group's coordinator that has been away.
        """
        with contextlib.suppress(DeliveryError):
            self._deliveries._look(0)
            return not self._deliveries._cause
        return False

    def begin(self) -> Deliveries:
        """Begin one, and return what its messages are sent by."""
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            reason = self._deliveries._told(error.args[0])
            raise DeliveryError(f"{self._of}: could not begin: {reason}") from None
        self._open = True
        return self._deliveries

    def prepare(self, mark: Mark) -> None:
        """Deliver what was sent, and put a mark beside it."""
        self._deliveries.flush()
        place = TopicPartition(self._topic, 0, mark.number + 1, metadata=mark.note)
        send = self._producer.send_offsets_to_transaction
        # Where the group's coordinator is away it ignores its time-out, and one that is short
        # makes of a coordinator that moves the transaction's end.
        what = f"{self._of}: no mark of {mark.number}"
        self._deliveries.call_apart(what, send, [place], self._group)
        self._marked = mark

    def commit(self) -> None:
        """Make messages and mark visible, all or, if this raises, perhaps."""
        self._call("the end of one is not known", self._producer.commit_transaction)
        self._open = False
        self.last = self._marked

    def close(self) -> None:
        """Abort what is open, as far as can be; once more does no harm."""
        in_transaction, self._open = self._open, False
        if in_transaction:
            # Else readers of what is committed would wait until the transaction times out.
            with contextlib.suppress(KafkaException, RuntimeError):
                self._producer.abort_transaction(2.0)
                in_transaction = False
        self._deliveries.close(in_transaction=in_transaction)
