"""Storage of a consumer's dead letters, in a topic or by a user's function.

The offset of a dead record is committed only after its dead letter is stored. A dead letter that
cannot be stored is tried again without end, at growing intervals. Meanwhile the consumer's limit
on records in flight pauses reading.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from ackcore.calls.threads import refuse_unrun
from ackcore.kafka.client_settings import Log, Value, without_consumers
from ackcore.kafka.clients import new_client
from ackcore.kafka.consumer.consumer_client import settings_refused
from ackcore.kafka.consumer.consumer_records import Failure, Headers, KafkaRecord
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import DyingRecord
from ackcore.kafka.kafka_errors import ConsumerError, NoToken, error_text, is_fatal
from ackcore.kafka.producing import SIZES, remedy
from ackcore.retry import capped_doubling

_log = logging.getLogger(__name__)

#: Headers of a dead letter, behind those of its record.
REASON, TOPIC, PARTITION = "ackcore-reason", "ackcore-topic", "ackcore-partition"
OFFSET, ATTEMPTS, DEATHS = "ackcore-offset", "ackcore-attempts", "ackcore-deaths"
TIMESTAMP = "ackcore-timestamp"
#: Headers that are set anew for each dead letter.
OURS = frozenset((REASON, TOPIC, PARTITION, OFFSET, TIMESTAMP, ATTEMPTS, DEATHS))
#: A header of records that a sink of a topology on Spark has sent; in its letters after `REASON`.
OF_TOPOLOGY = "ackcore-batch"
#: A record with more deaths is in a loop: a program sends dead letters back.
MAX_DEATHS = 20
#: The maximum size of the header with the reason, as UTF-8.
_REASON_BYTES = 8 << 10
#: The number of digits of 2**31.
_DIGITS = 10
#: The shortest time between warnings that letters are not stored.
_SAID_MS = 60_000
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 100, 10_000

#: Called with a dead letter and None once it is stored, or with the error why it is not.
Report = Callable[[DyingRecord, str | None], None]


def header_number(value: bytes | None) -> int | None:
    """Parse a header's value as a number from 0 to 2**31 - 1; return None for any other value."""
    if value is None or not value.isdigit() or len(value) > _DIGITS:
        return None
    number = int(value)
    return number if number < 2**31 else None


def death_count(headers: Headers) -> int:
    """Return the number of times a record has died, by its header ``ackcore-deaths``, or 0."""
    for name, value in reversed(headers):
        if name == DEATHS and (number := header_number(value)) is not None:
            return number
    return 0


def is_of_topology(headers: Headers) -> bool:
    """Return whether a dead letter is from a topology on Spark, and not from a `Consumer`.

    Both append their headers to those of the record. A topology appends ``ackcore-batch`` after
    ``ackcore-reason``, and a consumer does not.
    """
    names = [name for name, _ in reversed(headers)]
    if OF_TOPOLOGY not in names or REASON not in names:
        return False
    return names.index(OF_TOPOLOGY) < names.index(REASON)


def headers_of(letter: DyingRecord) -> Headers:
    """Return the headers of a dead letter.

    They are the record's headers without those of an earlier death, then reason (at most 8 KiB),
    topic, partition, offset, timestamp if it has one, attempts (0 for a range of lost offsets) and
    number of deaths. The message's own timestamp is the time of the death, because a broker would
    delete the letter of an old record at once.
    Raises ConsumerError if the record has died more than 20 times.
    """
    record, failure = letter.record, letter.failure
    died = death_count(record.headers) + 1
    if died > MAX_DEATHS:
        raise ConsumerError(
            f"{record.topic}-{record.partition}@{record.offset} has died {MAX_DEATHS} times: a "
            "program sends its dead letters back to a topic that this consumer reads; stop that "
            "program, and set dead_letters to a callable that stores this record"
        )
    numbers = {
        PARTITION: record.partition,
        OFFSET: record.offset,
        TIMESTAMP: record.timestamp_ms,
        ATTEMPTS: letter.failures,
        DEATHS: died,
    }
    reason = f"{failure.kind}: {failure.message}"[:_REASON_BYTES]
    cut = reason.encode(errors="backslashreplace")[:_REASON_BYTES].decode(errors="ignore")
    ours: Headers = [
        (REASON, cut.encode()),
        (TOPIC, record.topic.encode()),
        *((name, b"%d" % number) for name, number in numbers.items() if number is not None),
    ]
    return [*(each for each in record.headers if each[0] not in OURS), *ours]


class TopicLetterStore:
    """Stores dead letters in a topic, by an idempotent producer.

    After a fatal error, a producer sends nothing more. It is then replaced, and the undelivered
    letters are reported as not stored.

    ``config``: the configuration of an idempotent producer. ``log``: receives a warning when the
    producer is replaced.
    """

    def __init__(self, topic: str, config: dict[str, Any], log: Log = _log) -> None:
        self._log = log
        self._topic = topic
        self._config = config
        self._producer = new_client(Producer, config)
        self._fatal: KafkaError | None = None

    def store(self, letter: DyingRecord, report: Report) -> None:
        """Send a dead letter. It is stored when all in-sync replicas have it.

        `poll` then calls ``report``; `store` calls it if the letter cannot be sent. Raises
        ConsumerError if the record has died more than 20 times.
        """

        def delivered(error: KafkaError | None, _: object = None) -> None:
            if error is not None:
                self._note(error)
            said = None if error is None else error_text(error) + remedy(error)
            report(letter, said and f"topic {self._topic!r}: {said}")

        record = letter.record
        try:
            self._producer.produce(
                self._topic,
                record.value,
                record.key,
                headers=list[tuple[str, str | bytes | None]](headers_of(letter)),
                on_delivery=delivered,
            )
        except KafkaException as error:
            delivered(error.args[0])
        except BufferError as error:
            report(letter, str(error))

    def _note(self, error: KafkaError) -> None:
        if is_fatal(error):
            self._fatal = error

    def poll(self) -> None:
        """Report the dead letters whose delivery has succeeded or failed since the last call.

        Replaces the producer after a fatal error. Does not wait otherwise.
        """
        try:
            self._producer.poll(0)
        except KafkaException as error:
            self._note(error.args[0])
        # All letters under way must first be reported as undelivered, to be tried again.
        if self._fatal is not None and not self._end():
            self._log.warning(
                "the producer of dead letters ended, and is replaced: %s", self._fatal.str()
            )
            with suppress(NoToken):  # a later poll tries again
                self._producer, self._fatal = new_client(Producer, self._config), None

    def _end(self) -> int:
        """Cancel the undelivered letters. Return the number of those not reported within 1 s."""
        with suppress(KafkaException, RuntimeError):
            self._producer.purge()
            return self._producer.flush(1.0)
        return len(self._producer)

    def close(self) -> None:
        """Cancel the undelivered dead letters, and end the producer.

        The offsets of their records were not committed.
        """
        self._end()
        # The garbage collector would clear it, with its state for calls, while it still runs.
        del self._producer


class CallableLetterStore:
    """Stores dead letters by a user's ``function(record, failure)``, in a thread of its own.

    A letter is stored when the function returns. If it raises, or returns a coroutine or a
    generator, the letter is not stored.
    """

    def __init__(self, function: Callable[[KafkaRecord, Failure], object]) -> None:
        self._function = function
        self._thread: Thread | None = None
        self._calls: SimpleQueue[tuple[DyingRecord, Report] | None] = SimpleQueue()
        self._done: deque[tuple[DyingRecord, Report, BaseException | None]] = deque()
        self._closed = False

    def store(self, letter: DyingRecord, report: Report) -> None:
        """Queue a call of the function with a dead letter; `poll` calls ``report`` when it ends."""
        if self._thread is None:
            # Not an executor's: the interpreter's end would wait for a function that hangs.
            self._thread = Thread(target=self._work, name="ackcore-dead-letters", daemon=True)
            self._thread.start()
        self._calls.put((letter, report))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None and not self._closed:
            error: BaseException | None = None
            try:
                refuse_unrun(self._function(call[0].record, call[0].failure), "dead_letters")
            except BaseException as raised:
                error = raised
            self._done.append((*call, error))

    def poll(self) -> None:
        """Report the dead letters whose calls have ended since the last call."""
        while self._done:
            letter, report, error = self._done.popleft()
            report(letter, None if error is None else ": ".join(Failure.of(error)))

    def close(self) -> None:
        """Cancel the queued calls. Neither this nor the process's end waits for one that runs."""
        self._closed = True
        self._calls.put(None)


class PendingLetters:
    """The dead letters that are not stored yet, each tried again; ``under_way``: their number.

    ``log``: receives a warning about a letter that could not be stored, at most once a minute.
    """

    def __init__(self, store: TopicLetterStore | CallableLetterStore, log: Log = _log) -> None:
        self._log = log
        self._store = store
        self._kept: list[DyingRecord] = []
        # A heap by due time, with the number of failures to store each letter.
        self._waiting: list[tuple[int, int, int, DyingRecord]] = []
        self._sequence = 0
        self._now_ms = 0
        self._in_a_row = 0
        self._said_ms = 0
        self._closed = False
        self.under_way = 0

    def put(self, letters: list[DyingRecord], now_ms: int) -> None:
        """Add dead letters, and begin to store them.

        With a topic, raises ConsumerError if a record has died more than 20 times.
        """
        self._now_ms = now_ms
        for letter in letters:
            self.under_way += 1
            self._store.store(letter, partial(self._report, 0))

    def poll(self, now_ms: int, wanted: Callable[[DyingRecord], bool]) -> list[DyingRecord]:
        """Return the dead letters stored since the last call, and try others again. Does not wait.

        A letter is tried again when its wait is over and ``wanted(letter)`` is true. If that is
        false, because its partition was taken away, the letter is dropped.
        """
        self._now_ms = now_ms
        self._store.poll()
        while self._waiting and self._waiting[0][0] <= now_ms:
            _, _, failures, letter = heapq.heappop(self._waiting)
            if wanted(letter):
                self._store.store(letter, partial(self._report, failures))
            else:
                self.under_way -= 1
        kept, self._kept = self._kept, []
        return kept

    def _report(self, failures: int, letter: DyingRecord, error: str | None) -> None:
        if error is None:
            self.under_way -= 1
            self._in_a_row = 0
            self._kept.append(letter)
            return
        if self._closed:
            return
        self._in_a_row += 1
        if self._in_a_row == 1 or self._now_ms - self._said_ms >= _SAID_MS:
            self._said_ms = self._now_ms
            record = letter.record
            self._log.warning(
                "the dead letter of %s-%d@%d is not stored: %s. It is tried again, and its offset "
                "is not committed before it is stored",
                *(record.topic, record.partition, record.offset, error),
            )
        failures += 1
        due_ms = self._now_ms + capped_doubling(_FIRST_WAIT_MS, failures, _LONGEST_WAIT_MS)
        self._sequence += 1
        heapq.heappush(self._waiting, (due_ms, self._sequence, failures, letter))

    def close(self) -> None:
        """Drop all letters that are not stored yet, and close the store."""
        self._closed = True
        self._store.close()


def dead_letters_of(settings: ConsumerSettings) -> PendingLetters | None:
    """Return an empty `PendingLetters` for the settings; None without ``dead_letters``.

    For a topic, raises ConsumerError if librdkafka refuses the producer's settings, or ``oauth_cb``
    gives no token.
    """
    given, log = settings.dead_letters, settings.client.logger(_log)
    if given is None:
        return None
    if not isinstance(given, str):
        return PendingLetters(CallableLetterStore(given), log)
    own: dict[str, Value] = {"logger": settings.client.client_logger(_log)}
    own |= {"enable.idempotence": True, "acks": "all"}
    config = settings.client.client_config(own, SIZES)
    try:
        return PendingLetters(TopicLetterStore(given, without_consumers(config), log), log)
    except KafkaException as error:
        raise settings_refused(settings, error) from None
