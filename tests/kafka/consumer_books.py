"""What a consumer's runs are held to: nothing lost, nothing committed that was not done."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from servers import TIMEOUT_S, KafkaServer

from ackcore.kafka import Consumer
from ackcore.offsets import decode_metadata


class Books:
    """Of one topic and group: what was produced, and every effect of it.

    Effects are appended to a file, each by one write: none is lost with its process.
    """

    def __init__(self, server: KafkaServer, directory: Path, partitions: int = 4) -> None:
        self.server = server
        self.partitions = partitions
        self.topic = server.new_topic(partitions)
        self.dead_topic = server.new_topic(1)
        self.group = server.new_group()
        self.file = directory / "effects"
        self.file.touch()
        self.delivered: dict[tuple[int, int], bytes] = {}

    def produce(self, n: int, name=b"%d") -> None:
        """Append n records, dealt out to the partitions."""
        first = len(self.delivered)
        for partition in range(self.partitions):
            values = [name % i for i in range(first, first + n) if i % self.partitions == partition]
            offsets = self.server.produce(self.topic, values, partition)
            self.delivered.update(
                ((partition, offset), value) for offset, value in zip(offsets, values, strict=True)
            )

    def effects(self) -> Counter[tuple[int, int]]:
        """How often each record was processed."""
        lines = self.file.read_bytes().split(b"\n")[:-1]
        return Counter((int(p), int(o)) for p, o in (line.split()[:2] for line in lines))

    def dead(self) -> Counter[tuple[int, int]]:
        """How often each record is in the dead-letter topic."""
        letters = [dict(one.headers()) for one in self.server.consume(self.dead_topic)]
        return Counter(
            (int(one["ackcore-partition"]), int(one["ackcore-offset"])) for one in letters
        )

    def committed(self) -> list[tuple[int, str | None]]:
        """What the group has committed of each partition."""
        some = range(self.partitions)
        return [self.server.committed(self.group, self.topic, one) for one in some]

    def done_by_commits(self) -> set[tuple[int, int]]:
        """What the commits say is done."""
        done = set()
        for partition, (offset, metadata) in enumerate(self.committed()):
            if offset < 0:
                continue
            state = decode_metadata(self.topic, partition, offset, metadata).state
            holes = set()
            for start, end in zip(state.hole_starts, state.hole_ends, strict=True):
                holes |= set(range(start, end))
            done |= {
                at
                for at in self.delivered
                if at[0] == partition and at[1] < state.end and at[1] not in holes
            }
        return done

    def check_commits(self) -> None:
        """N2: an effect, or a dead letter, was there before the commit that says so."""
        said = self.done_by_commits()
        missing = said - self.effects().keys()
        missing = missing and missing - self.dead().keys()
        assert not missing, f"committed, and not done: {sorted(missing)[:20]}"

    def lag(self) -> int:
        """Records behind what is committed."""
        ends = Counter(partition for partition, _ in self.delivered)
        return sum(
            ends[partition] - max(0, offset)
            for partition, (offset, _) in enumerate(self.committed())
        )

    def wait_for_the_end(self, timeout_s: float = TIMEOUT_S) -> None:
        """N7: the lag becomes 0; what is committed meanwhile is held to the effects (N2)."""
        deadline = time.monotonic() + timeout_s
        while self.lag():
            self.check_commits()
            assert time.monotonic() < deadline, f"the lag is {self.lag()}: {self.committed()}"
            time.sleep(0.05)
        self.check_commits()

    def check_complete(self, most_again: int = 0, poison=frozenset()) -> None:
        """N1, N3, N8: each has an effect or a dead letter, few have more than one of them."""
        effects, dead = self.effects(), self.dead()
        assert self.delivered.keys() <= effects.keys() | dead.keys(), "lost"
        assert {self.delivered[at] for at in dead} == set(poison)
        again = sum(effects.values()) + sum(dead.values()) - len(self.delivered)
        assert again <= most_again, f"{again} were done again"


class Effects:
    """Appends effects, from any thread."""

    def __init__(self, path: Path | str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, record) -> None:
        os.write(self._file, b"%d %d\n" % (record.partition, record.offset))

    def close(self) -> None:
        os.close(self._file)


# A session outlasts what a busy machine may take: no member of these dies, they all leave.
QUICK = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 100, "fetch.wait.max.ms": 20}


def by_hand(books):
    """All partitions, for whoever begins again: a mock's group would wait for who was before."""
    return {"partitions": [(books.topic, one) for one in range(books.partitions)]}


@contextmanager
def consuming(books, **arguments):
    consumer = consumer_of(books, **arguments)
    try:
        yield consumer
    finally:
        consumer.close(0.0)


def consumer_of(books, **arguments):
    arguments = {
        "dead_letters": books.dead_topic,
        "backoff_ms": 20,
        "max_backoff_ms": 50,
        "commit_interval_s": 0.05,
        **arguments,
    }
    options = {**QUICK, **arguments.pop("options", {})}
    topics = None if "partitions" in arguments else arguments.pop("topics", books.topic)
    return Consumer(
        topics,
        bootstrap_servers=books.server.bootstrap_servers,
        group_id=books.group,
        options={n: of for n, of in options.items() if of is not None},
        **arguments,
    )


def work(consumer, effects, may_fail=lambda record: None):
    """Process records until the consumer is stopped."""
    for record in consumer:
        error = may_fail(record)
        if error is None:
            effects(record)
            consumer.ack(record)
        else:
            consumer.fail(record, error)


@contextmanager
def workers(consumer, books, n=3, may_fail=lambda record: None):
    effects = Effects(books.file)
    threads = [threading.Thread(target=work, args=(consumer, effects, may_fail)) for _ in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        consumer.stop()
        for thread in threads:
            thread.join()
        effects.close()


def take(consumer, n):
    """Exactly n records, in the order in which they come."""
    taken = []
    while len(taken) < n:
        some = consumer.poll(n - len(taken), 20.0)
        assert some, f"only {len(taken)} of {n} records came"
        taken += some
    return taken


def partitions_of(consumer):
    return {each.partition for each in consumer.stats().partitions}
