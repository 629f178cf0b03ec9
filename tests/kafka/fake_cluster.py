"""A cluster in memory, with logs that change, and a client of it that does nothing by itself."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, Message

from ackcore.kafka.cluster import Partition

UNKNOWN = -1001
#: Records that one fetch brings.
_FETCHED = 3


@dataclass
class Log:
    """A partition's records: those of an offset below ``start`` were deleted."""

    start: int = 0
    epoch: int = 0  # of its leader
    records: list[tuple[int, int]] = field(default_factory=list)  # (record's number, epoch)
    version: int = 0  # another one for each log that is another one

    @property
    def end(self) -> int:
        return len(self.records)

    def there(self) -> range:
        """The offsets of the records that it has."""
        return range(self.start, self.end)

    def is_same(self, offset: int, epoch: int) -> bool:
        """Whether what is below an offset is what the leader of an epoch had (KIP-320)."""
        return offset <= sum(each <= epoch for _, each in self.records)

    def truncated_at(self, low: int, position: int, epoch: int) -> int | None:
        """See `ackcore.kafka.truncations.truncated_at`."""
        same = max(low, sum(each <= epoch for _, each in self.records))
        return same if same < position else None


@dataclass
class At:
    """A partition of a topic, with an offset, or an error."""

    topic: str
    partition: int
    offset: int = UNKNOWN
    metadata: str = ""
    error: KafkaError | None = None
    leader_epoch: int = -1


class FakeCluster:
    """Topics, and what a group has committed."""

    def __init__(self, *, has_ids: bool = True, metadata_limit: int = 4096):
        self.has_ids = has_ids
        self.metadata_limit = metadata_limit
        self.ids = {}
        self.logs = {}
        self.hidden = 0  # for so many questions nobody knows a topic's id
        self.committed = {}  # by partition
        self.numbers = itertools.count()
        self._versions = itertools.count()

    def create(self, topic: str, partitions: int) -> None:
        """Make a topic, or make it anew, empty."""
        self.ids[topic] = f"id-{next(self._versions)}"
        for key in [key for key in self.logs if key[0] == topic]:
            del self.logs[key]
        for partition in range(partitions):
            self.logs[topic, partition] = Log(version=next(self._versions))

    def add_partition(self, topic: str) -> tuple[str, int]:
        key = topic, sum(each == topic for each, _ in self.logs)
        self.logs[key] = Log(version=next(self._versions))
        return key

    def produce(self, key, n: int) -> None:
        log = self.logs[key]
        log.records += [(next(self.numbers), log.epoch) for _ in range(n)]

    def truncate(self, key, offset: int) -> None:
        """Another leader has less than the one before."""
        log = self.logs[key]
        del log.records[offset:]
        log.epoch += 1
        log.version = next(self._versions)

    def partitions(self, topics=None, *, pattern=None, missing_ok=False):
        """See `Cluster.partitions`."""
        if self.hidden:
            self.hidden -= 1
            return []
        return [
            Partition(*key, self.ids[key[0]] if self.has_ids else None)
            for key in sorted(self.logs)
            if key[0] in topics
        ]

    def close(self):
        pass


@dataclass
class _Fetch:
    begun: tuple[int, int]  # offset and epoch, as `next`
    next: tuple[int, int]
    read: tuple[int, int] | None = None  # up to where the application has read
    queue: deque = field(default_factory=deque)
    refused: bool = False
    before: tuple[int, int] | None = None  # what is said once instead, of the assignment before


class FakeClient:
    """A consumer's client: what it does, it does when it is asked for a record.

    ``events`` happen then, one after the other; ``take_commit``, given the client, offsets and
    whether it is asynchronous, says what becomes of commits.
    """

    def __init__(self, cluster: FakeCluster, on_commit, take_commit):
        self._cluster = cluster
        self._on_commit = on_commit
        self._take_commit = take_commit
        self.events = deque()
        self.paused = set()
        self.fetches = {}
        self.sought = []
        self.ends = {}
        self._before = {}

    # As of confluent-kafka.

    def unsubscribe(self):
        """Leave the group; the world's next rebalance gives its partitions to others."""

    def subscribe(self, topics, on_assign, on_revoke, on_lost):
        self.on_assign, self.on_revoke, self.on_lost = on_assign, on_revoke, on_lost

    def poll(self, timeout):
        while self.events:
            self.events.popleft()()
        ready = [each for each in sorted(self.fetches.items()) if each[0] not in self.paused]
        for each in ready:
            self._fetch(*each)
        for _, fetch in ready:
            if fetch.queue:
                return self._next(fetch)
        return None

    def consume(self, n, timeout):
        messages = []
        for key, fetch in sorted(self.fetches.items()):
            while fetch.queue and key not in self.paused and len(messages) < n:
                messages.append(self._next(fetch))
        return messages

    def assign(self, partitions):
        self.incremental_unassign([At(*key) for key in self.fetches])
        self.incremental_assign(partitions)

    def incremental_assign(self, partitions):
        for at in partitions:
            begun = at.offset, -1 if at.leader_epoch is None else at.leader_epoch
            key = at.topic, at.partition
            self.fetches[key] = _Fetch(begun, begun, before=self._before.pop(key, None))

    def incremental_unassign(self, partitions):
        for at in partitions:
            key = at.topic, at.partition
            self._before[key] = self.fetches.pop(key).read

    def pause(self, partitions):
        """Drop the records that were read ahead."""
        for at in partitions:
            self.paused.add((at.topic, at.partition))
            fetch = self.fetches.get((at.topic, at.partition))
            if fetch is not None and fetch.queue:
                fetch.next = fetch.read or fetch.begun
                fetch.queue.clear()
                fetch.refused = False

    def resume(self, partitions):
        self.paused -= {(at.topic, at.partition) for at in partitions}

    def seek(self, at):
        fetch = self.fetches[at.topic, at.partition]
        assert not fetch.queue, "it was paused"
        self.sought.append((at.topic, at.partition, at.offset))
        fetch.next = at.offset, -1 if at.leader_epoch is None else at.leader_epoch
        fetch.refused = False

    def position(self, partitions):
        found = []
        for at in partitions:
            fetch = self.fetches.get((at.topic, at.partition))
            offset, epoch = (fetch and (fetch.read or fetch.before)) or (UNKNOWN, -1)
            if fetch is not None:
                fetch.before = None
            found.append(At(at.topic, at.partition, offset, leader_epoch=epoch))
        return found

    def committed(self, partitions, timeout):
        return [
            self._cluster.committed.get((at.topic, at.partition)) or At(at.topic, at.partition)
            for at in partitions
        ]

    def get_watermark_offsets(self, at, cached):
        return self.ends.get((at.topic, at.partition), (UNKNOWN, UNKNOWN))

    def offsets_for_times(self, asked, timeout):
        found = []
        for at in asked:
            log = self._cluster.logs[at.topic, at.partition]
            offset = {OFFSET_BEGINNING: log.start, OFFSET_END: log.end}[at.offset]
            found.append(At(at.topic, at.partition, offset))
        return found

    def list_topics(self, topic, timeout):
        raise AssertionError("partitions that are new are known")

    def commit(self, offsets, asynchronous):
        return self._take_commit(self, offsets, asynchronous)

    def answer(self, error, offsets):
        self.events.append(lambda: self._on_commit(error, offsets))

    def close(self):
        pass

    def fetched(self, key) -> int:
        """Up to where it has read, for the application or ahead."""
        return self.fetches[key].next[0] if key in self.fetches else 0

    # Fetching.

    def _fetch(self, key, fetch: _Fetch) -> None:
        log = self._cluster.logs[key]
        if fetch.queue or fetch.refused:
            return
        self.ends[key] = log.start, log.end
        offset, epoch = fetch.next
        is_same = not 0 <= epoch <= log.epoch or log.is_same(offset, epoch)
        if not log.start <= offset <= log.end or not is_same:
            fetch.refused = True
            error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
            fetch.queue.append(Message(*key, offset, error=error))
            return
        for at in range(offset, min(offset + _FETCHED, log.end)):
            number, epoch = log.records[at]
            content = {"key": (b"a", b"b", None)[number % 3], "value": b"%d" % number}
            about = {"timestamp": (0, UNKNOWN), "leader_epoch": epoch}
            fetch.queue.append(Message(*key, at, **content, **about))
            fetch.next = at + 1, epoch

    @staticmethod
    def _next(fetch: _Fetch) -> Message:
        message = fetch.queue.popleft()
        if message.error() is None:
            fetch.read = message.offset() + 1, message.leader_epoch()
        return message
