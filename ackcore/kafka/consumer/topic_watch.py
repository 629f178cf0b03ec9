"""Look-ups of a consumer's topics, their ids and their partitions, in background threads.

The client of the consumer does not provide topic ids, nor new partitions without a group.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from contextlib import suppress

from ackcore.kafka.cluster import Cluster, ClusterFailed, Partition, UnknownTopics
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.kafka_errors import ConsumerError

_log = logging.getLogger(__name__)

#: The shortest time between look-ups, in milliseconds.
_SOON_MS = 500


class TopicWatch:
    """Looks up topics and their partitions: by `poll` every ``refresh_s``, and on request.

    It has a connection of its own. All times are of one monotonic clock, in milliseconds. Raises
    ConsumerError if ``oauth_cb`` gives no token.
    """

    def __init__(self, settings: ConsumerSettings, now_ms: int) -> None:
        self._every_ms = round(settings.refresh_s * 1000)
        self._last_ms, self._next_ms = now_ms, now_ms + self._every_ms
        self._log = settings.client.logger(_log)
        try:
            self._cluster = Cluster(settings.client)
        except ClusterFailed as error:
            raise ConsumerError(str(error)) from None
        self._one_at_a_time = threading.Lock()
        self._asked: Future[list[Partition]] | None = None
        #: The number of partitions and the id of each topic at its first look-up; its present id.
        self._first: dict[str, tuple[int, str | None]] = {}
        self._now: dict[str, str | None] = {}
        self._complained = False
        names = [name for name in settings.topics if not name.startswith("^")]
        patterns = [name for name in settings.topics if name.startswith("^")]
        self._names = names
        self._all = settings.tasks is not None
        # librdkafka searches for a pattern anywhere in a name.
        self._pattern = "|".join(f".*(?:{each}).*" for each in patterns)

    def subscribed(self) -> list[Partition]:
        """Look up all partitions of the subscribed topics, ordered by topic and number, and wait.

        Raises ConsumerError if no broker answers, or a named topic does not exist.
        """
        return self._answer(lambda: self._subscribed(missing_ok=False))

    def ids(self, topics: Iterable[str]) -> dict[str, str | None]:
        """Look up the ids of topics, None if unknown, and wait; missing topics are left out.

        Raises ConsumerError if no broker answers.
        """
        return ids_of(self._answer(lambda: self._of(topics)))

    def is_new(self, key: tuple[str, int]) -> bool:
        """Return whether a partition is new since the first look-up of its topic.

        It was added, or its topic was created again. False for a topic without a look-up.
        """
        topic, partition = key
        now = self._now.get(topic)
        partitions, first = self._first.get(topic, (partition + 1, now))
        return partition >= partitions or (now != first and None not in (now, first))

    def _answer(self, question: Callable[[], list[Partition]]) -> list[Partition]:
        try:
            return self._ask(question).result()
        except (ClusterFailed, UnknownTopics) as error:
            raise ConsumerError(
                f"the partitions to begin could not be listed: {error}; start the consumer again "
                "once this is solved"
            ) from None

    def _ask(self, question: Callable[[], list[Partition]]) -> Future[list[Partition]]:
        future: Future[list[Partition]] = Future()

        def run() -> None:
            with self._one_at_a_time:
                try:
                    found = question()
                    ids = ids_of(found)
                    for topic, partitions in Counter(one.topic for one in found).items():
                        self._first.setdefault(topic, (partitions, ids[topic]))
                    self._now.update(ids)
                    future.set_result(found)
                except BaseException as error:
                    future.set_exception(error)

        # A pool's thread would block the end of the process for as long as brokers are away.
        threading.Thread(target=run, name="ackcore-kafka-topics", daemon=True).start()
        return future

    def _subscribed(self, *, missing_ok: bool) -> list[Partition]:
        ask = self._cluster.partitions
        found = ask(self._names, missing_ok=missing_ok) if self._names else []
        if self._pattern:
            found += ask(pattern=self._pattern)
        return sorted(set(found))

    def _of(self, topics: Iterable[str]) -> list[Partition]:
        return self._cluster.partitions(topics, missing_ok=True)

    def hurry(self, now_ms: int) -> None:
        """Make the next look-up due, at the earliest 0.5 s after the last one."""
        self._next_ms = min(self._next_ms, max(now_ms, self._last_ms + _SOON_MS))

    def poll(self, topics: Collection[str], now_ms: int) -> list[Partition] | None:
        """Return the partitions of a look-up that has ended since the last call; None without one.

        Starts the next look-up if one is due, and does not wait for it. It is of ``topics``, or
        with ``tasks`` of all subscribed topics. A failed look-up is logged, and repeated when due.
        """
        found = None
        if self._asked is not None and self._asked.done():
            try:
                found = self._asked.result()
                self._complained = False
            except Exception as error:
                if not self._complained:
                    self._log.warning(
                        "the partitions could not be listed, and are requested again: %s", error
                    )
                self._complained = True
            self._asked = None
            self._last_ms, self._next_ms = now_ms, now_ms + self._every_ms
        if self._asked is None and now_ms >= self._next_ms:
            if self._all:
                self._asked = self._ask(lambda: self._subscribed(missing_ok=True))
            elif topics:
                self._asked = self._ask(lambda: self._of(topics))
        return found

    def close(self) -> None:
        """Close the connection to the cluster; a second call does nothing."""
        with suppress(AttributeError):  # closed before
            self._cluster.close()


def ids_of(partitions: Iterable[Partition]) -> dict[str, str | None]:
    """Return the topic ids in a list of partitions, by topic."""
    return {one.topic: one.topic_id for one in partitions}
