"""Commits of a consumer: requests with the done offsets, and the broker's answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from ackcore.kafka.client_settings import Log
from ackcore.kafka.committer import commit_requests
from ackcore.kafka.consumer.consumer_client import ConsumerError
from ackcore.kafka.consumer.held_partition import Key, PartitionCommit
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.kafka.kafka_errors import is_fatal
from ackcore.kafka.producing import PASSING

_log = logging.getLogger(__name__)

#: Seconds of retries for a last commit that the group refuses during a rebalance.
_LAST_S = 2.0
_LOOK_S = 0.01
#: Temporary: the client's own thread fetches the new generation, epoch or coordinator.
_MOVING = PASSING | {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
}
#: The group has removed this member, or has assigned its partitions to others.
_FENCED = frozenset((KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION))

_Refused = list[tuple[KafkaError, PartitionCommit]]


class Commits:
    """The commits of a consumer, sent in the client's thread.

    Parameters
    ----------
    group_id : str
    held : HeldRecords
        Used under ``changed`` only.
    changed : threading.Condition
    fatal : callable
        Called with an error after which no commit can succeed.
    log : Log, optional
        Receives refused commits.
    """

    def __init__(
        self,
        group_id: str,
        held: HeldRecords,
        changed: threading.Condition,
        fatal: Callable[[ConsumerError], object],
        log: Log = _log,
    ) -> None:
        self._log = log
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
        """Whether requests are still unanswered."""
        return self._unanswered > 0

    def send(self, client: Consumer) -> None:
        """Send the changed offsets. The client calls `answered` with the result of each request."""
        self._sent = {}
        for some in self._requests(None):
            self._sent.update(_by_key(some))
            self._unanswered += 1
            try:
                client.commit(offsets=_offsets(some), asynchronous=True)
            except KafkaException as error:
                self._unanswered -= 1
                self._refused([(error.args[0], one) for one in some])

    def answered(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """Apply the answer to a request."""
        self._unanswered = max(0, self._unanswered - 1)
        self._take_in(error, partitions, self._sent)

    def send_last(self, client: Consumer, keys: list[Key]) -> None:
        """Commit partitions that are taken away, and wait. Later answers for their records count as
        stale.
        """
        until = time.monotonic() + _LAST_S
        with self._changed:
            self._held.seal(keys)
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
                    again |= self._refused([(error, one) for one in some])
                else:
                    again |= self._take_in(None, answer or [], _by_key(some))

    def _requests(self, keys: Iterable[Key] | None) -> Iterator[list[PartitionCommit]]:
        with self._changed:
            commits = _by_key(self._held.commits(keys))
        metadata = {key: one.commit.metadata for key, one in commits.items()}
        for some in commit_requests(self._group_id, metadata):
            yield [commits[key] for key in some]

    def _take_in(
        self,
        error: KafkaError | None,
        partitions: list[TopicPartition],
        sent: Mapping[Key, PartitionCommit],
    ) -> bool:
        """Apply an answer. Return whether refused commits may succeed with the metadata form chosen
        now.
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
                self._held.committed(one)
        return bool(refused) and self._refused(refused)

    def _refused(self, refused: _Refused) -> bool:
        """Log refused commits; the next commits repeat their offsets. Return whether the form
        changed.
        """
        error = refused[0][0]
        code = KafkaError.OFFSET_METADATA_TOO_LARGE
        too_large = [one.commit.metadata for why, one in refused if why.code() == code]
        with self._changed:
            self._held.counts.rejected += len(refused)
            # librdkafka may report the error for all; the longest was certainly refused.
            longest = max(too_large, key=len, default="")
            shorter = self._held.shorten_metadata(longest)
        if is_fatal(error):
            self._fatal(ConsumerError(f"the consumer cannot commit: {error.str()}"))
        self.last_refusal = error.str()
        what = "fenced" if error.code() in _FENCED else "refused"
        self._log.warning("a commit of %d partitions was %s: %s", len(refused), what, error.str())
        return shorter


def _by_key(commits: Iterable[PartitionCommit]) -> dict[Key, PartitionCommit]:
    return {(one.topic, one.partition): one for one in commits}


def _offsets(commits: Iterable[PartitionCommit]) -> list[TopicPartition]:
    return [
        TopicPartition(one.topic, one.partition, one.commit.offset, metadata=one.commit.metadata)
        for one in commits
    ]
