"""Dead letters of a consumer: stored in a topic, or by a callable, before their offsets are
committed.

A dead letter that cannot be stored is tried again without end, at growing intervals. Meanwhile the
consumer's in-flight limit pauses reading.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from confluent_kafka import KafkaError, KafkaException, Producer

from ackcore.kafka.client_settings import Log, Value
from ackcore.kafka.consumer.consumer_client import settings_refused
from ackcore.kafka.consumer.consumer_records import Failure, Headers, KafkaRecord
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import DyingRecord
from ackcore.kafka.kafka_errors import ConsumerError, error_text, is_fatal
from ackcore.kafka.producing import SIZES, way_out
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
_REASON_BYTES = 8 << 10
#: The number of digits of 2**31.
_DIGITS = 10
#: The shortest time between warnings that letters are not stored.
_SAID_MS = 60_000
_FIRST_WAIT_MS, _LONGEST_WAIT_MS = 100, 10_000

#: Settings for consumers only: a producer would warn about them.
_OF_CONSUMERS = (
    *("group.", "session.", "heartbeat.", "max.poll.", "max.partition.fetch.", "fetch."),
    *("queued.", "auto.", "enable.auto.", "enable.partition.", "partition.assignment."),
    *("isolation.", "check.crcs", "coordinator.", "consume.", "offset."),
)

Report = Callable[[DyingRecord, str | None], None]


def number_in(value: bytes | None) -> int | None:
    """Return the number in a header, from 0 to 2**31 - 1; None if it holds no such number."""
    if value is None or not value.isdigit() or len(value) > _DIGITS:
        return None
    number = int(value)
    return number if number < 2**31 else None


def deaths(headers: Headers) -> int:
    """Return the number of deaths in a record's headers; 0 if the header is no number."""
    for name, value in reversed(headers):
        if name == DEATHS and (number := number_in(value)) is not None:
            return number
    return 0


def is_of_topology(headers: Headers) -> bool:
    """Return whether a dead letter was written by a topology on Spark, and not by a `Consumer`.

    The writer of a dead letter puts its own headers behind those of the record.
    """
    names = [name for name, _ in reversed(headers)]
    if OF_TOPOLOGY not in names or REASON not in names:
        return False
    return names.index(OF_TOPOLOGY) < names.index(REASON)


def headers_of(letter: DyingRecord) -> Headers:
    """Return a dead letter's headers: the record's, and those with reason, origin and attempts.

    The record's timestamp is one of them. The letter's own timestamp must be the time of the death:
    retention goes by timestamps, so a broker would delete the letter of an old record at once.
    Raises ConsumerError if the record has died more than 20 times.
    """
    record, failure = letter.record, letter.failure
    died = deaths(record.headers) + 1
    if died > MAX_DEATHS:
        raise ConsumerError(
            f"{record.topic}-{record.partition}@{record.offset} has died {MAX_DEATHS} times: a "
            "program sends its dead letters back to a topic that this consumer reads; stop that "
            "program, and set dead_letters to another topic or to a callable"
        )
    numbers = {
        PARTITION: record.partition,
        OFFSET: record.offset,
        TIMESTAMP: record.timestamp_ms,
        ATTEMPTS: letter.failures,
        DEATHS: died,
    }
    ours: Headers = [
        (REASON, _cut(f"{failure.kind}: {failure.message}")),
        (TOPIC, record.topic.encode()),
        *((name, b"%d" % number) for name, number in numbers.items() if number is not None),
    ]
    return [*(each for each in record.headers if each[0] not in OURS), *ours]


def _cut(reason: str) -> bytes:
    """Return a reason as a header, cut so that a broker does not refuse the letter's size."""
    cut = reason[:_REASON_BYTES].encode(errors="backslashreplace")[:_REASON_BYTES]
    return cut.decode(errors="ignore").encode()


class Keeper(Protocol):
    """The interface of a store of dead letters."""

    def keep(self, letter: DyingRecord, report: Report) -> None:
        """Begin to store a dead letter. Calls ``report(letter, None)`` when it is stored, or
        ``report(letter, error)`` with the reason why not.
        """

    def turn(self) -> None:
        """Call the reports that are ready."""

    def close(self) -> None:
        """Release all resources."""


class TopicKeeper:
    """A topic that stores dead letters.

    After a fatal error, which an idempotent producer may meet, a producer sends nothing more. It is
    then replaced, and the undelivered letters are sent again.

    ``config``: the configuration of an idempotent producer. ``log``: receives a warning when the
    producer is replaced.
    """

    def __init__(self, topic: str, config: dict[str, Any], log: Log = _log) -> None:
        self._log = log
        self._topic = topic
        self._config = config
        self._producer = Producer(config)
        self._fatal: KafkaError | None = None

    def keep(self, letter: DyingRecord, report: Report) -> None:
        """See `Keeper.keep`. A letter is stored when all in-sync replicas have it."""

        def delivered(error: KafkaError | None, _: object = None) -> None:
            if error is not None:
                self._note(error)
            said = None if error is None else error_text(error) + way_out(error)
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

    def turn(self) -> None:
        """See `Keeper.turn`."""
        try:
            self._producer.poll(0)
        except KafkaException as error:
            self._note(error.args[0])
        # All letters under way must first be reported as undelivered, to be tried again.
        if self._fatal is not None and not self._end():
            self._log.warning(
                "the producer of dead letters ended, and is replaced: %s", self._fatal.str()
            )
            self._producer, self._fatal = Producer(self._config), None

    def _end(self) -> int:
        """Purge the letters under way; return the number of those without a report yet."""
        with suppress(KafkaException, RuntimeError):
            self._producer.purge()
            return self._producer.flush(1.0)
        return len(self._producer)

    def close(self) -> None:
        """See `Keeper.close`. Undelivered letters are dropped: their offsets were not committed."""
        self._end()


class CallableKeeper:
    """A function that stores dead letters in a thread of its own: ``function(record, failure)``.

    A letter is stored when the function returns.
    """

    def __init__(self, function: Callable[[KafkaRecord, Failure], object]) -> None:
        self._function = function
        self._thread = ThreadPoolExecutor(1, "ackcore-dead-letters")
        self._done: deque[tuple[DyingRecord, Report, Future[object]]] = deque()

    def keep(self, letter: DyingRecord, report: Report) -> None:
        """See `Keeper.keep`."""
        future = self._thread.submit(self._function, letter.record, letter.failure)
        future.add_done_callback(lambda done: self._done.append((letter, report, done)))

    def turn(self) -> None:
        """See `Keeper.turn`."""
        while self._done:
            letter, report, done = self._done.popleft()
            if done.cancelled():
                report(letter, "it was cancelled")
                continue
            error = done.exception()
            report(letter, None if error is None else ": ".join(Failure.of(error)))

    def close(self) -> None:
        """See `Keeper.close`. Does not wait for a call that is under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _identity(letter: DyingRecord) -> tuple[str, int, int, int]:
    record = letter.record
    return record.topic, record.partition, record.offset, record.generation


class LettersUnderWay:
    """Dead letters under way, each until it is stored.

    ``log``: receives, at most once a minute, a letter that is not stored, with the reason.
    """

    def __init__(self, keeper: Keeper, log: Log = _log) -> None:
        self._log = log
        self._keeper = keeper
        self._kept: list[DyingRecord] = []
        self._failures: dict[tuple[str, int, int, int], int] = {}
        self._waiting: list[tuple[int, int, DyingRecord]] = []
        self._sequence = 0
        self._now_ms = 0
        self._in_a_row = 0
        self._said_ms = 0
        self._closed = False
        self.under_way = 0

    def put(self, letters: list[DyingRecord], now_ms: int) -> None:
        """Begin to store dead letters."""
        self._now_ms = now_ms
        for letter in letters:
            self.under_way += 1
            self._keeper.keep(letter, self._report)

    def turn(self, now_ms: int, wanted: Callable[[DyingRecord], bool]) -> list[DyingRecord]:
        """Retry the letters that are due and still wanted; return the letters stored since the last
        call.
        """
        self._now_ms = now_ms
        self._keeper.turn()
        while self._waiting and self._waiting[0][0] <= now_ms:
            letter = heapq.heappop(self._waiting)[2]
            if wanted(letter):
                self._keeper.keep(letter, self._report)
            else:
                self.under_way -= 1
                self._failures.pop(_identity(letter), None)
        kept, self._kept = self._kept, []
        return kept

    def _report(self, letter: DyingRecord, error: str | None) -> None:
        identity = _identity(letter)
        if error is None:
            self.under_way -= 1
            self._in_a_row = 0
            self._failures.pop(identity, None)
            self._kept.append(letter)
            return
        if self._closed:
            return
        self._in_a_row += 1
        failures = self._failures[identity] = self._failures.get(identity, 0) + 1
        if self._in_a_row == 1 or self._now_ms - self._said_ms >= _SAID_MS:
            self._said_ms = self._now_ms
            record = letter.record
            self._log.warning(
                "the dead letter of %s-%d@%d is not stored: %s. It is tried again, and its offset "
                "is not committed before it is stored",
                *(record.topic, record.partition, record.offset, error),
            )
        due_ms = self._now_ms + capped_doubling(_FIRST_WAIT_MS, failures, _LONGEST_WAIT_MS)
        self._sequence += 1
        heapq.heappush(self._waiting, (due_ms, self._sequence, letter))

    def close(self) -> None:
        """Drop all letters that are not stored. Their records are not done."""
        self._closed = True
        self._keeper.close()


def dead_letters_of(settings: ConsumerSettings) -> LettersUnderWay | None:
    """Return the store of dead letters that the settings name; None without one."""
    given, log = settings.dead_letters, settings.client.logger(_log)
    if given is None:
        return None
    if not isinstance(given, str):
        return LettersUnderWay(CallableKeeper(given), log)
    own: dict[str, Value] = {"logger": log, "enable.idempotence": True, "acks": "all"}
    config = settings.client.client(own, SIZES)
    config = {name: of for name, of in config.items() if not name.startswith(_OF_CONSUMERS)}
    try:
        return LettersUnderWay(TopicKeeper(given, config, log), log)
    except KafkaException as error:
        raise settings_refused(settings, error) from None
