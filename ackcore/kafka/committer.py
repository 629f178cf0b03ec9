"""Commits of a group's offsets by a consumer that is no member of the group.

The broker refuses them while the group has members. The admin client is not used, neither here nor
to read committed offsets: in librdkafka 2.16 its requests to a group's coordinator crash the
process in two cases. One is a broken connection, as when the broker is killed
(`rd_kafka_admin_coord_request` frees memory that its caller uses). The other is a broker that
answers that it is no longer the coordinator (`rd_kafka_handle_OffsetFetch`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.clients import new_client

_Key = TypeVar("_Key", bound=tuple[str, int])

#: Settings of every client that sends requests to a cluster.
DEFAULTS: dict[str, Any] = {
    "reconnect.backoff.max.ms": 1000,
    "log.connection.close": False,
    # Errors are in the answers.  librdkafka would print a line for each attempt to connect.
    "log_level": 0,
}
#: Short, because a poll continues to wait after it has handled an answer.
_POLL_S = 0.005
#: Milliseconds that a released client waits for overdue answers. In librdkafka 2.16 its main thread
#: needs a core meanwhile, and the default is 45 s.
_RELEASE_MS = 3_000
#: A broker writes a request as one batch of records into its offsets topic.  By default that takes
#: at most 1 MiB; a larger batch fails with an unknown error.
_REQUEST_BYTES = 512 << 10
_RECORD_BYTES = 100  # besides the names and the metadata
#: The error of a whole request, and its partitions with their errors.
CommitAnswer = tuple[KafkaError | None, list[ClientPartition]]


def commit_requests(group: str, metadata: Mapping[_Key, str]) -> Iterator[list[_Key]]:
    """Yield the partitions of each request, so that no request is too large for a broker.

    ``metadata``: by partition, the metadata to commit.
    """
    keys: list[_Key] = []
    size = 0
    for key, text in metadata.items():
        bytes_ = _RECORD_BYTES + len((group + key[0] + text).encode())
        if keys and size + bytes_ > _REQUEST_BYTES:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += bytes_
    if keys:
        yield keys


class Committer:
    """A client that commits offsets of a group without members.

    Raises NoToken if ``oauth_cb`` gives no token within 10 s.

    Attributes: ``overdue``: the number of requests whose answers did not come in time. If there are
    any, use another `Committer`, since a late answer would count for a later request.
    """

    def __init__(self, settings: ClientSettings, group: str) -> None:
        answers: list[CommitAnswer] = []
        own: dict[str, Any] = {
            "group.id": group,
            "enable.auto.commit": False,
            # The client joins no group, so that this only limits its release.
            "group.protocol": "classic",
            "session.timeout.ms": _RELEASE_MS,
            # Not a method: the reference cycle would keep the consumer alive.
            "on_commit": lambda error, partitions: answers.append((error, partitions)),
        }
        self.overdue = 0
        self._has_coordinator = False
        self._answers = answers
        self._consumer = new_client(Consumer, settings.client_config(own, DEFAULTS))

    def abandon(self) -> None:
        """Close the client for good, in a background thread: closing waits for overdue answers."""
        box = [self._consumer]
        del self._consumer
        name = "ackcore-kafka-abandoned"
        threading.Thread(target=box.clear, name=name, daemon=True).start()

    def _find_coordinator(self, one: ClientPartition, timeout_s: float) -> KafkaError | None:
        """Look up the group's coordinator. Return the error, or None once it is known.

        Without a coordinator, as while the broker creates the offsets topic, librdkafka 2.16 would
        keep a commit, and the close of the client, waiting for the session's time-out.
        """
        if self._has_coordinator:
            return None
        asked = [ClientPartition(one.topic, one.partition)]
        try:
            (answer,) = self._consumer.committed(asked, timeout_s)
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            return error
        self._has_coordinator = answer.error is None
        return answer.error

    def commit(self, requests: list[list[ClientPartition]], timeout_s: float) -> list[CommitAnswer]:
        """Send requests, and return their answers in order.

        ``requests``: the partitions of each, with offsets and metadata. A request without an answer
        within ``timeout_s`` has the error ``_TIMED_OUT`` and no partitions. If the group's
        coordinator cannot be found, nothing is sent, and all requests have the look-up's error.
        """
        until = time.monotonic() + timeout_s
        error = self._find_coordinator(requests[0][0], timeout_s) if requests else None
        if error is not None:
            return [(error, [])] * len(requests)
        found: dict[tuple[str, int], CommitAnswer] = {}
        for request in requests:
            try:
                self._consumer.commit(offsets=request, asynchronous=True)
                self.overdue += 1
            except KafkaException as raised:
                found[request[0].topic, request[0].partition] = raised.args[0], []
        while self.overdue and time.monotonic() < until:
            self._consumer.poll(_POLL_S)
            while self._answers:
                error, answered = self._answers.pop()
                self.overdue -= 1
                found.update({(one.topic, one.partition): (error, answered) for one in answered})
        none: CommitAnswer = KafkaError(KafkaError._TIMED_OUT), []
        return [found.get((request[0].topic, request[0].partition), none) for request in requests]
