"""Requests to a cluster: its partitions, their first and last offsets, a group's offsets.

A request covers many partitions, and each has its own answer or failure.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar, cast

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as ClientPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from ackcore._error_hints import nearest
from ackcore.kafka.client_settings import ClientSettings, without_consumers
from ackcore.kafka.clients import new_client
from ackcore.kafka.committer import DEFAULTS, CommitAnswer, Committer, commit_requests
from ackcore.kafka.kafka_errors import NoToken, error_text
from ackcore.offsets import Commit
from ackcore.retry import capped_doubling

Answer = TypeVar("Answer")
_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Seconds of retries while a group's coordinator moves, or while its first one is elected.
_MOVES_S = 5.0
_EARLIEST, _LATEST = OffsetSpec.earliest(), OffsetSpec.latest()  # type: ignore[no-untyped-call]


class TopicPartition(NamedTuple):
    """Topic and number of a partition, as a pair."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Partition(NamedTuple):
    """A partition that exists, and its topic's id, which is None in brokers before Kafka 2.8."""

    topic: str
    partition: int
    topic_id: str | None

    @property
    def key(self) -> TopicPartition:
        """The topic and the number, without the topic's id."""
        return TopicPartition(self.topic, self.partition)


class _Bounds(NamedTuple):
    low: int
    high: int


class Watermarks(_Bounds):
    """The first offset of a partition, ``low``, and its end, ``high``.

    The end is the last stable offset, or that of the next record; see `Cluster.watermarks`.
    ``epoch``: the epoch of the leader that answered, None if unknown. ``==`` does not compare it.
    """

    epoch: int | None = None


class PartitionFailure(NamedTuple):
    """The reason why a request failed for one partition: librdkafka's name of it, and a text."""

    code: str  # such as ``UNKNOWN_MEMBER_ID``
    text: str


class PartitionAnswers(NamedTuple, Generic[Answer]):
    """The results of a request by partition: answers in ``found``, failures in ``failed``.

    A partition without a value, such as one without a committed offset, is in neither.
    """

    found: dict[TopicPartition, Answer]
    failed: dict[TopicPartition, PartitionFailure]


class UnknownTopics(RuntimeError):
    """Named topics do not exist, or this user may not read their metadata.

    Attributes: ``topics``: a dict of the cause by topic. ``existing``: the topics of the cluster,
    from which the message suggests a similar name; empty if they could not be listed.
    """

    def __init__(self, topics: dict[str, str], existing: Sequence[str] = ()) -> None:
        super().__init__(topics, existing)
        self.topics = topics
        self.existing = existing

    def __str__(self) -> str:
        named = []
        for topic, cause in sorted(self.topics.items()):
            near = nearest(topic, self.existing)
            hint = "" if near is None else f"; did you mean {near!r}?"
            named.append(f"{topic!r} ({cause}{hint})")
        return (
            f"topics cannot be read: {', '.join(named)}. Correct the name, create the topic, or "
            "let this user describe and read it"
        )


class ClusterFailed(RuntimeError):
    """A request failed or timed out, so that its result is unknown; or there is no token for it."""


def _one_at_a_time(method: _Method) -> _Method:
    """Decorate a method of `Cluster`: it runs while no other thread runs such a method."""

    @wraps(method)
    def locked(self: Cluster, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, locked)


class Cluster:
    """A client that makes requests to a cluster, one at a time. Any thread may call its methods.

    ``settings``: the connection to the brokers. ``timeout_s``: the time-out of each request, in
    seconds.

    Raises ValueError if librdkafka refuses the settings. Raises ClusterFailed if ``oauth_cb`` gives
    no token within 10 s.
    """

    def __init__(self, settings: ClientSettings, *, timeout_s: float = 30.0) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._timeout_s = timeout_s
        #: The client's last connection error.
        self._causes: deque[str] = deque(maxlen=1)
        made = settings.client_config({}, {**DEFAULTS, "error_cb": _error_callback(self._causes)})
        level = str(made.get("isolation.level", "read_committed"))
        self._isolation = (
            IsolationLevel.READ_UNCOMMITTED
            if level == "read_uncommitted"
            else IsolationLevel.READ_COMMITTED
        )
        #: By group. A committer with overdue answers is given up, so that no answer comes late.
        self._committers: dict[str, Committer] = {}
        try:
            self._admin = new_client(AdminClient, without_consumers(made))
        except NoToken as error:
            raise ClusterFailed(str(error)) from None
        except KafkaException as error:
            text = settings.redacted(error_text(error.args[0]))
            raise ValueError(f"options are refused by librdkafka: {text}; correct them") from None

    @_one_at_a_time
    def partitions(
        self,
        topics: Iterable[str] | None = None,
        *,
        pattern: str | None = None,
        missing_ok: bool = False,
    ) -> list[Partition]:
        """Return all partitions of topics, ordered by topic and number.

        Raises UnknownTopics if named topics do not exist, unless ``missing_ok``. Raises
        ClusterFailed if no broker answers in time, or the answer for a topic is another error.

        ``topics``: the names of topics; [] has no partitions. ``pattern``: a regular expression,
        instead of names: all topics whose whole name matches, except Kafka's own (``__...``).
        ``missing_ok``: whether missing topics are left out instead of raising, as they are with a
        pattern. A topic that this user may not describe counts as missing.
        """
        names = sorted(set(topics)) if topics is not None else self._matching(pattern or "")
        if not names:
            return []
        asked = self._admin.describe_topics(TopicCollection(names), request_timeout=self._timeout_s)
        found, missing = [], {}
        for topic, (described, failure) in self._results(asked).items():
            if failure is None:
                topic_id = None if described.topic_id is None else str(described.topic_id)
                numbers = sorted(partition.id for partition in described.partitions)
                found += [Partition(topic, number, topic_id) for number in numbers]
            elif failure.code in _NOT_THERE:
                missing[topic] = failure.text
            else:
                raise ClusterFailed(
                    f"the partitions of topic {topic!r} cannot be listed: {failure.text}"
                )
        if missing and not missing_ok and pattern is None:
            existing: list[str] = []
            with suppress(ClusterFailed):
                existing = self._matching(".*")
            raise UnknownTopics(missing, existing)
        return sorted(found)

    def _matching(self, pattern: str) -> list[str]:
        try:
            topics = self._admin.list_topics(timeout=self._timeout_s).topics
        except KafkaException as error:
            failure = self._failure(error.args[0])
            text = self._with_cause(failure, self._cause()).text
            raise ClusterFailed(f"the topics cannot be listed: {text}") from None
        fits = re.compile(pattern).fullmatch
        return sorted(name for name in topics if fits(name) and not name.startswith("__"))

    @_one_at_a_time
    def watermarks(
        self, partitions: Iterable[tuple[str, int]], positions: Mapping[Any, int] | None = None
    ) -> PartitionAnswers[Watermarks]:
        """Return the first offset and the end of each partition.

        With ``isolation.level=read_committed``, the default, the end is the last stable offset, or
        the position, at most the end of the log, if a reader of uncommitted records has read
        further. Errors of brokers do not raise: they are failures in the result. ``positions``: the
        next offset to read of partitions, where known.
        """
        keys = _keys(partitions)
        lows = self._offsets(keys, _EARLIEST)
        highs = self._offsets(keys, _LATEST)
        at = positions or {}
        beyond = [key for key, (high, _) in highs.found.items() if at.get(key, 0) > high]
        ends = self._offsets(beyond, _LATEST, IsolationLevel.READ_UNCOMMITTED)
        known = (lows.found.keys() & highs.found.keys()) - ends.failed.keys()
        found = {}
        for key in (key for key in keys if key in known):
            high, epoch = highs.found[key]
            if key in ends.found:
                high = max(high, min(at[key], ends.found[key][0]))
            found[key] = Watermarks(lows.found[key][0], high)
            found[key].epoch = epoch
        return PartitionAnswers(found, {**lows.failed, **highs.failed, **ends.failed})

    def bounds_of(self, topic: str) -> dict[TopicPartition, Watermarks]:
        """Return the first offset and the end of each partition of a topic, in order.

        The end is the last stable offset, or with ``isolation.level=read_uncommitted`` the offset
        of the next record to be written.

        Raises UnknownTopics if the topic does not exist. Raises ClusterFailed if no broker answers
        in time, or the offsets of a partition are unknown.
        """
        keys = [one.key for one in self.partitions([topic])]
        answers = self.watermarks(keys)
        for key, failure in answers.failed.items():
            raise ClusterFailed(
                f"the first and last offsets of {key} could not be read: {failure.text}; try again "
                "once each partition has a reachable leader"
            )
        return {key: answers.found[key] for key in keys}

    @_one_at_a_time
    def offsets_for_time(
        self, partitions: Iterable[tuple[str, int]], timestamp_ms: int
    ) -> PartitionAnswers[int]:
        """Return the offset of the first record of each partition with that time or a later one.

        If a partition has no such record, the answer is its end. ``timestamp_ms``: milliseconds
        since 1970. Errors of brokers do not raise: they are failures in the result.
        """
        keys = _keys(partitions)
        # The ends first: a record that is written between the two requests may have that time.
        ends = self._offsets(keys, _LATEST)
        answers = self._offsets(keys, OffsetSpec.for_timestamp(timestamp_ms))
        some = {key: offset for key, (offset, _) in answers.found.items() if offset >= 0}
        none = answers.found.keys() - some.keys()
        found = {key: end for key, (end, _) in ends.found.items() if key in none}
        failed = {key: why for key, why in ends.failed.items() if key in none}
        return PartitionAnswers({**some, **found}, {**answers.failed, **failed})

    def _offsets(
        self,
        keys: Sequence[TopicPartition],
        spec: OffsetSpec,
        isolation: IsolationLevel | None = None,
    ) -> PartitionAnswers[tuple[int, int | None]]:
        """Return pairs of an offset and the epoch of the leader that answered, None if unknown.

        ``spec``: which offset of each partition: the earliest, the latest, or the first of a time.
        With the last, the offset is -1 if no record has that time or a later one. ``isolation``:
        the isolation level; by default the one of the settings.
        """
        if not keys:
            return PartitionAnswers({}, {})

        def ask() -> dict[Any, tuple[Any, PartitionFailure | None]]:
            asked = self._admin.list_offsets(
                {ClientPartition(*key): spec for key in keys},
                isolation_level=self._isolation if isolation is None else isolation,
                request_timeout=self._timeout_s,
            )
            return self._results(asked)

        results = ask()
        if any(failure and failure.code == "_NOENT" for _, failure in results.values()):
            # The client's list of brokers lacks all the leaders.  It would not look for them.
            with suppress(ClusterFailed):
                self._matching(".*")
            results = ask()
        found, failed = {}, {}
        for partition, (answer, failure) in results.items():
            key = TopicPartition(partition.topic, partition.partition)
            if failure is None:
                found[key] = int(answer.offset), answer.leader_epoch
            else:
                failed[key] = failure
        return PartitionAnswers(found, failed)

    @_one_at_a_time
    def committed(
        self, group: str, partitions: Iterable[tuple[str, int]]
    ) -> PartitionAnswers[Commit]:
        """Return the offsets and metadata that a group has committed, by partition.

        Partitions without a commit are left out. Asks for up to 5 s while the group's coordinator
        moves. Errors of brokers, and a missing token, do not raise: they are failures in the
        result.
        """
        keys = _keys(partitions)
        if not keys:
            return PartitionAnswers({}, {})
        own: dict[str, Any] = {"group.id": group, "enable.auto.commit": False}
        config = self._settings.client_config(own, DEFAULTS)
        try:
            consumer = new_client(Consumer, config)
        except NoToken as error:
            return PartitionAnswers({}, dict.fromkeys(keys, self._failure(error.args[0])))
        try:
            return self._retry_moves(lambda: self._committed(consumer, keys))
        finally:
            consumer.close()

    def _committed(
        self, consumer: Consumer, keys: Sequence[TopicPartition]
    ) -> PartitionAnswers[Commit]:
        try:
            answered = consumer.committed([ClientPartition(*key) for key in keys], self._timeout_s)
        except KafkaException as error:
            return PartitionAnswers({}, dict.fromkeys(keys, self._failure(error.args[0])))
        return self._by_partition(answered, lambda one: Commit(one.offset, one.metadata or ""))

    @_one_at_a_time
    def commit(
        self,
        group: str,
        offsets: Mapping[tuple[str, int], tuple[int, str]],
        *,
        patience_s: float = _MOVES_S,
    ) -> PartitionAnswers[Commit]:
        """Commit offsets of a group that has no members. Return the accepted ones and the failures.

        ``offsets``: the next offset to read and the metadata of each partition. ``patience_s``:
        seconds of retries while the group's coordinator moves or does not answer. The call takes
        at most 3 s more.

        Errors of brokers and the network do not raise: they are failures in the result.
        """
        wanted = {TopicPartition(*key): Commit(*value) for key, value in offsets.items()}
        found: dict[TopicPartition, Commit] = {}

        def commit() -> PartitionAnswers[Commit]:
            failed: dict[TopicPartition, PartitionFailure] = {}
            metadata = {key: one.metadata for key, one in wanted.items() if key not in found}
            requests = list(commit_requests(group, metadata))
            for keys, (error, answered) in zip(
                requests, self._commit(group, requests, wanted, patience_s), strict=True
            ):
                if error is None:
                    answers = self._by_partition(
                        answered, lambda one: wanted[TopicPartition(one.topic, one.partition)]
                    )
                    found.update(answers.found)
                    failed.update(answers.failed)
                    continue
                # librdkafka reports the error for all, though some may be committed.
                several = len(keys) > 1 and error.code() in _OF_ONE
                there = self.committed(group, keys).found if several else {}
                found.update({key: wanted[key] for key in keys if there.get(key) == wanted[key]})
                failure = self._failure(error)
                failed.update({key: failure for key in keys if key not in found})
            return PartitionAnswers(found, failed)

        return self._retry_moves(commit, patience_s)

    def _commit(
        self,
        group: str,
        requests: Sequence[Sequence[TopicPartition]],
        wanted: Mapping[TopicPartition, Commit],
        patience_s: float,
    ) -> list[CommitAnswer]:
        committer = self._committers.get(group)
        if committer is None:
            try:
                committer = self._committers[group] = Committer(self._settings, group)
            except NoToken as error:
                return [(error.args[0], [])] * len(requests)
        answers = committer.commit(
            [[ClientPartition(*key, *wanted[key]) for key in keys] for keys in requests],
            min(self._timeout_s, _COMMIT_S, patience_s),
        )
        if committer.overdue:
            self._committers.pop(group).abandon()
        return answers

    def _retry_moves(
        self, ask: Callable[[], PartitionAnswers[Commit]], patience_s: float = _MOVES_S
    ) -> PartitionAnswers[Commit]:
        """Return the result of ``ask``, repeated while the coordinator moves or does not answer.

        ``patience_s``: seconds after which it is not called again.
        """
        began, asked = time.monotonic(), 0
        while True:
            answers = ask()
            asked += 1
            codes = {failure.code for failure in answers.failed.values()}
            if not codes & _MOVING or time.monotonic() - began > patience_s:
                return answers
            time.sleep(capped_doubling(20, asked, 500) / 1000)

    def _by_partition(
        self, answered: Iterable[ClientPartition], take: Callable[[ClientPartition], Commit]
    ) -> PartitionAnswers[Commit]:
        found, failed = {}, {}
        for one in answered:
            key = TopicPartition(one.topic, one.partition)
            if one.error is not None:
                failed[key] = self._failure(one.error)
            elif one.offset >= 0:
                found[key] = take(one)
        return PartitionAnswers(found, failed)

    def _results(
        self, futures: Mapping[Any, Future[Any]]
    ) -> dict[Any, tuple[Any, PartitionFailure | None]]:
        """Wait for futures. Return by key an answer and None, or None and the failure."""
        results: dict[Any, tuple[Any, PartitionFailure | None]] = {}
        for key, future in futures.items():
            try:
                # The client's own time-out is shorter.
                results[key] = future.result(self._timeout_s + 5.0), None
            except KafkaException as error:
                results[key] = None, self._failure(error.args[0])
            except TimeoutError:
                text = f"no answer within {self._timeout_s:g} s"
                results[key] = None, PartitionFailure("_TIMED_OUT", text)
        cause = self._cause()
        return {
            key: (answer, failure and self._with_cause(failure, cause))
            for key, (answer, failure) in results.items()
        }

    def _cause(self) -> str:
        """Return and forget the admin client's last connection error; "" without one."""
        while self._admin.poll(0):
            pass
        return self._causes.pop() if self._causes else ""

    def _with_cause(self, failure: PartitionFailure, cause: str) -> PartitionFailure:
        """Return a failure; if no broker has answered, with ``cause`` and a remedy in its text."""
        if failure.code not in _UNREACHED:
            return failure
        text = f"{failure.text}, after {cause}" if cause else failure.text
        way_out = (
            f"check that bootstrap_servers={self._settings.bootstrap_servers!r} is right, and that "
            "brokers can be reached from here"
        )
        return failure._replace(text=self._settings.redacted(f"{text}; {way_out}"))

    def _failure(self, error: KafkaError) -> PartitionFailure:
        return PartitionFailure(error.name(), self._settings.redacted(error_text(error)))

    def close(self) -> None:
        """Close the connections. No method may be called afterwards."""
        self._committers.clear()
        del self._admin

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _error_callback(causes: deque[str]) -> Callable[[KafkaError], None]:
    """Return a callback for the client's errors that appends them to ``causes``.

    It ignores "all brokers are down", which names no cause. It is no method of `Cluster`: the
    client would keep the object alive.
    """

    def note(error: KafkaError) -> None:
        # The error of one broker is more specific than "all brokers are down".
        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            causes.append(error.str())

    return note


#: The topic does not exist, or the user is not authorized to read its metadata.
_NOT_THERE = {"UNKNOWN_TOPIC_OR_PART", "TOPIC_AUTHORIZATION_FAILED", "TOPIC_EXCEPTION"}
#: No broker has answered.
_UNREACHED = {"_TIMED_OUT", "_TIMED_OUT_QUEUE", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE"}
#: A group's coordinator moves, or its first one is being elected.
_MOVING = {
    "NOT_COORDINATOR",
    "COORDINATOR_NOT_AVAILABLE",
    "COORDINATOR_LOAD_IN_PROGRESS",
    "UNSTABLE_OFFSET_COMMIT",
    "_TIMED_OUT",
    "_WAIT_COORD",
}
#: Seconds.  A cluster's first commit may stay unanswered while the offsets topic is created.
_COMMIT_S = 3.0
#: Errors of one partition, and not of its group.
_OF_ONE = {
    KafkaError.OFFSET_METADATA_TOO_LARGE,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
}


def _keys(partitions: Iterable[tuple[str, int]]) -> list[TopicPartition]:
    return list(dict.fromkeys(TopicPartition(*partition[:2]) for partition in partitions))
