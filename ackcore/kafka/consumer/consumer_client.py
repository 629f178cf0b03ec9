"""The confluent-kafka client of a consumer: its requests for offsets, its records, its commits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from ackcore._error_hints import counted
from ackcore.kafka.client_settings import Log, Value
from ackcore.kafka.clients import new_client
from ackcore.kafka.committer import commit_requests
from ackcore.kafka.consumer.consumer_records import (
    UNREADABLE_HEADERS,
    Failure,
    Headers,
    KafkaRecord,
)
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.held_partition import Key, PartitionCommit
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.kafka.kafka_errors import ConsumerError, NoToken, error_text, is_fatal
from ackcore.kafka.producing import PASSING

_log = logging.getLogger(__name__)

#: Kafka's own topics. Patterns of Java's consumer do not match them either. A consumer that reads
#: the first one would write a record into it with each commit.
_OF_KAFKA = ("__consumer_offsets", "__transaction_state", "__share_group_state")
#: Seconds that brokers may take to answer a request of a consumer.
REQUEST_S = 30.0
_PAUSE_S = 0.1
#: Seconds of retries for a last commit that the group refuses during a rebalance.
_LAST_S = 2.0
_LOOK_S = 0.01
#: The value for a missing timestamp. Kafka 0.11 and later store a timestamp for each record.
_NO_TIMESTAMP = -1
#: Temporary: the client's own thread fetches the new generation, epoch or coordinator.
_MOVING = PASSING | {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    # The client calls a partition unknown while the list of brokers lacks its leader.
    KafkaError._UNKNOWN_PARTITION,
}
#: Errors of a topic that a wait does not remove.
_REFUSED = frozenset((KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION))
#: The group has removed this member, or has assigned its partitions to others.
_FENCED = frozenset((KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION))
#: Added to these errors if the consumer assigns its partitions itself.
_MEMBERS = (
    "; the group has members that subscribe to topics, and until they leave it only they may "
    "commit: use partitions= and tasks= with a group_id of their own"
)

_Refused = list[tuple[KafkaError, PartitionCommit]]


def make_client(settings: ConsumerSettings, on_commit: Callable[..., None]) -> Consumer:
    """Make the client of a consumer.

    Raises ConsumerError if librdkafka refuses the settings, or ``oauth_cb`` gives no token. When
    the client is polled, it calls ``on_commit`` with the result of each asynchronous commit.
    """
    own: dict[str, Value] = {
        "logger": settings.client.client_logger(_log),
        "group.id": settings.group_id,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
    }
    if settings.protocol == "consumer":
        own["group.protocol"] = "consumer"
    elif settings.protocol == "cooperative":
        own["partition.assignment.strategy"] = "cooperative-sticky"
    own["on_commit"] = on_commit
    # With librdkafka's default of 1 s, a user that is faster than its read-ahead stalls.
    # Without check.crcs, data that a disk or a network has damaged would be read.
    defaults: dict[str, Value] = {"fetch.queue.backoff.ms": 10, "check.crcs": True}
    # A pause drops what librdkafka has read ahead, and waits for the fetches under way.
    defaults["queued.min.messages"] = min(settings.limits.held, 100_000)
    # Finds new partitions, and new topics that match a pattern.
    defaults["topic.metadata.refresh.interval.ms"] = round(settings.refresh_s * 1000)
    if any(name.startswith("^") for name in settings.topics):
        # The list also hides topics that are subscribed to by name, so it leaves these out.
        hidden = [f"^{name}$" for name in _OF_KAFKA if name not in settings.topics]
        defaults["topic.blacklist"] = ",".join(hidden)
    config = settings.client.client_config(own, defaults)
    try:
        return new_client(Consumer, config)
    except KafkaException as error:
        raise settings_refused(settings, error) from None


def settings_refused(settings: ConsumerSettings, error: KafkaException) -> ConsumerError:
    """Return a ConsumerError for a client's refused settings, or for a missing token."""
    said = settings.client.redacted(error.args[0].str())
    if isinstance(error, NoToken):
        return ConsumerError(said)
    return ConsumerError(f"librdkafka refused the settings of the client: {said}; correct options=")


def wait_until_known(
    client: Consumer, partitions: Iterable[Key], stopped: Callable[[], bool]
) -> bool:
    """Wait until the brokers list all of these partitions, and return True.

    Returns False as soon as ``stopped()`` is true. Without this call, the client would find new
    partitions only after minutes. Raises ConsumerError if partitions are missing after 30 s,
    brokers do not answer, or they refuse a topic.
    """
    until = time.monotonic() + REQUEST_S
    wanted = set(partitions)
    while wanted:
        for topic in {topic for topic, _ in wanted}:
            try:
                found = client.list_topics(topic, REQUEST_S).topics[topic]
            except KafkaException as error:
                raise ConsumerError(
                    f"the partitions of topic {topic!r} could not be listed: "
                    f"{error.args[0].str()}; start the consumer again once brokers answer"
                ) from None
            if found.error is not None and found.error.code() in _REFUSED:
                raise ConsumerError(
                    f"topic {topic!r} cannot be read: {error_text(found.error)}; correct its name, "
                    "or let this user describe and read it"
                )
            wanted -= {(topic, number) for number in found.partitions}
        if stopped():
            return False
        if wanted and time.monotonic() > until:
            raise ConsumerError(
                f"the brokers do not list the partitions {sorted(wanted)} after {REQUEST_S:g} s; "
                "create them or correct partitions=, and start the consumer again"
            )
        if wanted:
            time.sleep(_PAUSE_S)
    return True


def ask_brokers(ask: Callable[[], list[TopicPartition]], what: str) -> list[TopicPartition]:
    """Return the partitions that ``ask`` returns, once none of them has an error.

    Calls ``ask`` again while a leader, coordinator or group is moving. Raises ConsumerError at once
    for another error, of the request or of a partition, and if this takes longer than 30 s.
    ``what`` names the request in the message.
    """
    until = time.monotonic() + REQUEST_S
    while True:
        try:
            answered = ask()
            error = next((one.error for one in answered if one.error is not None), None)
            if error is None:
                return answered
        except KafkaException as raised:
            error = raised.args[0]
        if error.code() not in _MOVING or time.monotonic() > until:
            raise ConsumerError(
                f"the request for {what} failed: {error.str()}; start the consumer again once the "
                "cause is removed"
            )
        time.sleep(_PAUSE_S)


def offsets_at(client: Consumer, keys: Iterable[Key], at: int, what: str) -> dict[Key, int]:
    """Return the offset of each partition at OFFSET_BEGINNING, OFFSET_END or a time.

    ``at``: one of these, or milliseconds since 1970. The offset at a time is that of the first
    record with this time or a later one. It is -1 if there is no such record. ``what``, and the
    errors: see `ask_brokers`.
    """
    asked = [TopicPartition(*key, at) for key in keys]
    answered = ask_brokers(lambda: client.offsets_for_times(asked, REQUEST_S), what)
    return {(one.topic, one.partition): one.offset for one in answered}


def watermarks(client: Consumer, keys: Sequence[Key]) -> dict[Key, tuple[int, int]]:
    """Return the first offset and the end of each partition.

    The end is the last stable offset, or with ``isolation.level=read_uncommitted`` the offset of
    the next record to be written. Sends two requests to each broker, for any number of partitions.
    An answer may wait half a second for a fetch under way, so a request for each of hundreds of
    partitions would take longer than the group waits for a poll. Raises the errors of
    `ask_brokers`.
    """
    if not keys:
        return {}
    (topic, number), more = keys[0], f" and {counted(len(keys) - 1, 'other')}"
    what = f"the first and last offset of {topic}-{number}{more if len(keys) > 1 else ''}"
    low = offsets_at(client, keys, OFFSET_BEGINNING, what)
    high = offsets_at(client, keys, OFFSET_END, what)
    return {key: (low[key], high[key]) for key in keys}


def record_of(key: Key, message: Message) -> tuple[KafkaRecord, Failure | None]:
    """Return the record of a message, and None.

    If its headers cannot be read, returns the record without them, and the failure with which it
    becomes a dead letter.
    """
    kind, ms = message.timestamp()
    timestamp_ms = ms if kind and ms != _NO_TIMESTAMP else None
    offset = message.offset()
    assert offset is not None
    headers: Headers = []
    failure = None
    try:
        headers = message.headers() or []  # type: ignore[assignment]
    except (SystemError, UnicodeDecodeError):  # confluent-kafka turns the second into the first
        failure = Failure(UNREADABLE_HEADERS, "the name of a header is not UTF-8")
    record = KafkaRecord(*key, offset, message.key(), message.value(), headers, timestamp_ms)
    return record, failure


class Commits:
    """Commits the done records of a consumer, in the client's thread.

    ``changed``: the lock of ``held``. ``fatal``: called with an error after which no commit can
    succeed. ``log``: receives a warning about refused commits. ``by_hand``: whether the consumer
    assigns its partitions itself.
    """

    def __init__(
        self,
        group_id: str,
        held: HeldRecords,
        changed: threading.Condition,
        fatal: Callable[[ConsumerError], object],
        log: Log = _log,
        by_hand: bool = False,
    ) -> None:
        self._log = log
        self._by_hand = by_hand
        self._group_id = group_id
        self._held = held
        self._changed = changed
        self._fatal = fatal
        self._sent: dict[Key, PartitionCommit] = {}
        self._unanswered = 0  # requests
        #: The error of the last refused commit; "" if none was refused.
        self.last_refusal = ""

    @property
    def under_way(self) -> bool:
        """Whether a request of `send` is still unanswered."""
        return self._unanswered > 0

    def send(self, client: Consumer) -> None:
        """Commit all partitions with changes since their last accepted commit, without waiting.

        Call it only when nothing is `under_way`. The client calls `answered` with each result.
        """
        self._sent = {}
        for some in self._requests(None):
            self._sent.update(_by_key(some))
            self._unanswered += 1
            try:
                client.commit(offsets=_offsets(some), asynchronous=True)
            except KafkaException as error:
                self._unanswered -= 1
                self._handle_refused([(error.args[0], one) for one in some])

    def answered(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Take the answer to a request of `send`: record accepted commits, and log refused ones."""
        self._unanswered = max(0, self._unanswered - 1)
        self._apply_answer(error, partitions, self._sent)

    def send_last(self, client: Consumer, keys: list[Key]) -> None:
        """Commit partitions that are taken away, and wait for the broker.

        From now on the user's answers for their records change nothing. A temporary error is
        retried for 2 s; refused commits are logged.
        """
        until = time.monotonic() + _LAST_S
        with self._changed:
            self._held.seal(keys)
        for key in keys:
            self._sent.pop(key, None)  # an answer to an earlier request may come after the last one
        again = True
        while again:
            again = False
            for some in self._requests(keys):
                try:
                    answer = client.commit(offsets=_offsets(some), asynchronous=False)
                except KafkaException as raised:
                    error = raised.args[0]
                    if error.code() in _MOVING and time.monotonic() < until:
                        time.sleep(_LOOK_S)
                        again = True
                        break
                    again |= self._handle_refused([(error, one) for one in some])
                else:
                    again |= self._apply_answer(None, answer or [], _by_key(some))

    def _requests(self, keys: Iterable[Key] | None) -> Iterator[list[PartitionCommit]]:
        with self._changed:
            commits = _by_key(self._held.commits(keys))
        metadata = {key: one.commit.metadata for key, one in commits.items()}
        for some in commit_requests(self._group_id, metadata):
            yield [commits[key] for key in some]

    def _apply_answer(
        self,
        error: KafkaError | None,
        partitions: list[TopicPartition],
        sent: Mapping[Key, PartitionCommit],
    ) -> bool:
        """Record which commits of an answer were accepted, and log the refused ones.

        ``sent``: the commits that were sent. Returns whether to send refused ones again at once.
        """
        refused: _Refused = []
        for found in partitions:
            one = sent.get((found.topic, found.partition))
            if one is None or one.commit.offset != found.offset:
                continue  # from a former assignment
            if (why := error or found.error) is not None:
                refused.append((why, one))
                continue
            with self._changed:
                self._held.commit_confirmed(one)
        return bool(refused) and self._handle_refused(refused)

    def _handle_refused(self, refused: _Refused) -> bool:
        """Log and count refused commits, and call ``fatal`` if no commit can succeed any more.

        Later commits of the partitions include them. Returns whether to send them again at once,
        because their metadata were too long and are shorter now.
        """
        error = refused[0][0]
        code = KafkaError.OFFSET_METADATA_TOO_LARGE
        too_large = [one.commit.metadata for why, one in refused if why.code() == code]
        with self._changed:
            self._held.counts.rejected += len(refused)
            # librdkafka may report the error for all; the longest was certainly refused.
            longest = max(too_large, key=len, default="")
            shorter = self._held.metadata_too_large(longest)
        if is_fatal(error):
            self._fatal(
                ConsumerError(
                    f"the consumer cannot commit: {error.str()}; start it again once the cause is "
                    "removed: records done since its last commit are delivered again"
                )
            )
        self.last_refusal = error.str()
        what, why = "refused", "; later commits include it, until the consumer ends"
        if error.code() in _FENCED and self._by_hand:
            self.last_refusal += _MEMBERS
        elif error.code() in _FENCED:
            what, why = "fenced", "; the group has removed this member or assigns partitions anew"
        self._log.warning(
            "a commit of %s to group %s was %s: %s%s",
            *(counted(len(refused), "partition"), self._group_id, what, self.last_refusal, why),
        )
        return shorter


def _by_key(commits: Iterable[PartitionCommit]) -> dict[Key, PartitionCommit]:
    return {(one.topic, one.partition): one for one in commits}


def _offsets(commits: Iterable[PartitionCommit]) -> list[TopicPartition]:
    return [
        TopicPartition(one.topic, one.partition, one.commit.offset, metadata=one.commit.metadata)
        for one in commits
    ]
