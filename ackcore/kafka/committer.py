"""Commits of a group's offsets by a consumer without partitions, of no member and no generation.

One request is for all partitions of its group; the broker refuses it while the group has members.
Not by the admin client: in librdkafka 2.16 what that asks of a group's coordinator ends the process
when the connection breaks meanwhile, as when the broker is killed (`rd_kafka_admin_coord_request`
frees what its caller uses), or when a coordinator answers that it is one no more
(`rd_kafka_handle_OffsetFetch`).  So what was committed is asked for by such a consumer, too.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as ClientPartition

from ackcore.kafka.settings import ClientSettings

#: Of each client that asks something of a cluster.
DEFAULTS: dict[str, Any] = {
    "reconnect.backoff.max.ms": 1000,
    "log.connection.close": False,
    # What goes wrong is in the answers: librdkafka has a line on stderr for each try to connect.
    "log_level": 0,
}
#: A poll goes on when it has served an answer.
_POLL_S = 0.005
#: What is wrong with a whole request, and its partitions, each with what is wrong with it.
CommitAnswer = tuple[KafkaError | None, list[ClientPartition]]


class Committer:
    """A consumer without partitions that commits offsets of its group.

    Attributes
    ----------
    owes : int
        Answers that did not come in time: they must not be taken for those of a later request.
    """

    def __init__(self, settings: ClientSettings, group: str) -> None:
        answers: list[CommitAnswer] = []
        own: dict[str, Any] = {
            "group.id": group,
            "enable.auto.commit": False,
            # No method: the consumer would be kept by what it keeps.
            "on_commit": lambda error, partitions: answers.append((error, partitions)),
        }
        self.owes = 0
        self._has_coordinator = False
        self._answers = answers
        self._consumer = Consumer(settings.client(own, DEFAULTS))

    def give_up(self) -> None:
        """Let go of the client, which waits for what it owes: up to its session's 45 s.

        A thread waits for it that ends with the process, and nobody waits for that.
        """
        box = [self._consumer]
        del self._consumer
        name = "ackcore-kafka-given-up"
        threading.Thread(target=box.clear, name=name, daemon=True).start()

    def _find_coordinator(self, one: ClientPartition, timeout_s: float) -> KafkaError | None:
        """Return why there is none yet, if so.

        librdkafka 2.16 keeps a commit without one for its session's 45 s, and a client that is let
        go meanwhile as long: a cluster's first, whose topic of offsets is being made meanwhile.
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
        """Send requests, all before the first answer is waited for, and return their answers."""
        until = time.monotonic() + timeout_s
        error = self._find_coordinator(requests[0][0], timeout_s) if requests else None
        if error is not None:
            return [(error, [])] * len(requests)
        found: dict[tuple[str, int], CommitAnswer] = {}
        for request in requests:
            try:
                self._consumer.commit(offsets=request, asynchronous=True)
                self.owes += 1
            except KafkaException as raised:
                found[request[0].topic, request[0].partition] = raised.args[0], []
        while self.owes and time.monotonic() < until:
            self._consumer.poll(_POLL_S)
            while self._answers:
                error, answered = self._answers.pop()
                self.owes -= 1
                found.update({(one.topic, one.partition): (error, answered) for one in answered})
        none: CommitAnswer = KafkaError(KafkaError._TIMED_OUT), []
        return [found.get((request[0].topic, request[0].partition), none) for request in requests]
