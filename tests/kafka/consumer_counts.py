"""Rules for a consumer's runs: nothing lost, nothing committed that was not done, and done
again only what no commit that arrived had said.

N1 to N8 are those of C.2 in our notes on offsets; test_consumer_counts.py shows each of them red.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from servers import TIMEOUT_S, KafkaServer

from ackcore.kafka import Consumer
from ackcore.offsets import decode_metadata


class Counts:
    """The records produced to one topic and group, and all their effects.

    Effects are appended to a file, each by one write: none is lost with its process.
    """

    def __init__(
        self, server: KafkaServer, directory: Path, partitions: int = 4, records: int = 0
    ) -> None:
        self.server = server
        self.partitions = partitions
        self.topic = server.new_topic(partitions)
        self.dead_topic = server.new_topic(1)
        self.group = server.new_group()
        self.file = directory / "effects"
        self.file.touch()
        self.delivered: dict[tuple[int, int], bytes] = {}
        self._highest = [-(1 << 20)] * partitions
        if records:
            self.produce(records)

    def produce(self, n: int, name=b"%d") -> None:
        """Append n records, dealt out to the partitions."""
        first = len(self.delivered)
        for partition in range(self.partitions):
            values = [name % i for i in range(first, first + n) if i % self.partitions == partition]
            offsets = self.server.produce(self.topic, values, partition)
            self.delivered.update(
                ((partition, offset), value) for offset, value in zip(offsets, values, strict=True)
            )

    def lines(self) -> list[Effect | Taken]:
        """The processed records, and the commits that brokers have accepted, in order."""
        found: list[Effect | Taken] = []
        for line in self.file.read_bytes().split(b"\n")[:-1]:
            kind, *numbers = line.split(b" ")
            if kind == b"effect":
                found.append(Effect(*map(int, numbers)))
            else:
                *numbers, metadata = numbers
                found.append(Taken(*map(int, numbers), bytes.fromhex(metadata.decode()).decode()))
        return found

    def effects(self) -> Counter[tuple[int, int]]:
        """How often each record was processed."""
        return Counter(line[:2] for line in self.lines() if isinstance(line, Effect))

    def dead(self) -> Counter[tuple[int, int]]:
        """How often each record is in the dead-letter topic."""
        letters = [dict(one.headers()) for one in self.server.consume(self.dead_topic)]
        return Counter(
            (int(one["ackcore-partition"]), int(one["ackcore-offset"])) for one in letters
        )

    def committed(self) -> list[tuple[int, str | None]]:
        """The group's commits by partition."""
        some = range(self.partitions)
        return [self.server.committed(self.group, self.topic, one) for one in some]

    def said(self, partition: int, offset: int, metadata: str | None, first: int = 0) -> set[int]:
        """Return a partition's offsets, from one on, that a commit calls done."""
        state = decode_metadata(self.topic, partition, offset, metadata).state
        said = set(range(first, state.end))
        for start, end in zip(state.hole_starts, state.hole_ends, strict=True):
            said -= set(range(start, end))
        return {offset for offset in said if (partition, offset) in self.delivered}

    def done_by_commits(self) -> set[tuple[int, int]]:
        """Return the offsets that commits call done. No partition's go back (N4)."""
        done = set()
        for partition, (offset, metadata) in enumerate(self.committed()):
            assert offset >= self._highest[partition], f"committed {offset} after a higher one"
            self._highest[partition] = offset
            if offset >= 0:
                done |= {(partition, one) for one in self.said(partition, offset, metadata)}
        return done

    def check_commits(self) -> None:
        """N2, N4: an effect, or a dead letter, was there before the commit that says so."""
        said = self.done_by_commits()
        missing = said - self.effects().keys()
        missing = missing and missing - self.dead().keys()
        assert not missing, f"committed, and not done: {sorted(missing)[:20]}"

    def members(self) -> list[str]:
        """The ids of the group's members, as a real broker knows them."""
        (found,) = self.server.admin.describe_consumer_groups([self.group]).values()
        return [member.member_id for member in found.result(TIMEOUT_S).members]

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

    def check_complete(self, most_again: float = 0, poison=frozenset()) -> int:
        """N1 to N4, N8: each has an effect, or if it is poison a dead letter, and few have more.

        Returns how many were done again: an infinite ``most_again`` leaves it to N3 which may be.
        """
        effects, dead = self.effects(), self.dead()
        assert self.delivered.keys() <= effects.keys() | dead.keys(), "lost"
        assert {self.delivered[at] for at in dead} == set(poison), "others are dead than should be"
        assert not effects.keys() & dead.keys(), "done and dead"
        self.check_repeats()
        again = sum(effects.values()) + sum(dead.values()) - len(self.delivered)
        assert again <= most_again, f"{again} were done again"
        return again

    def check_repeats(self, most_out: int = 3) -> None:
        """N2 to N4: of each commit that a broker has taken, and each record that was done again.

        A record is done again by another assignment than the one before, and by none that began
        with a commit that says it is done.  One that is over may end what it had out, which is
        ``most_out``, when the record is committed by the next; all else was done since the last
        commit that arrived, or was out.
        """
        dead = self.dead().keys()
        done: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
        committed: dict[tuple[int, int], int] = {}  # by which generation
        floors: Counter[int] = Counter()
        ends: Counter[tuple[int, int, int]] = Counter()
        late: Counter[tuple[int, int]] = Counter()
        for line in self.lines():
            by = line.generation, line.process
            if isinstance(line, Effect):
                at = line.partition, line.offset
                assert by not in done[at], f"{at} twice in one assignment"
                done[at].add(by)
                if at in committed:
                    assert line.generation < committed[at], f"{at} again, and was committed"
                    late[by] += 1
                    assert late[by] <= most_out, f"{late[by]} that are committed, of {by}"
                continue
            assert line.offset >= ends[line.partition, *by], f"{line} after a higher one"
            ends[line.partition, *by] = line.offset
            for offset in self.said(*line[:2], line.metadata, floors[line.partition]):
                at = line.partition, offset
                assert at in done or at in dead, f"{at} was committed before it was done"
                committed.setdefault(at, line.generation)
            floors[line.partition] = max(floors[line.partition], line.offset)


class Effect(NamedTuple):
    """A record that was processed, in which generation of its partition, and which process."""

    partition: int
    offset: int
    generation: int
    process: int


class Taken(NamedTuple):
    """A commit that a broker has taken."""

    partition: int
    offset: int
    generation: int
    process: int
    metadata: str


class Effects:
    """Appends effects, and commits that were taken, from any thread."""

    def __init__(self, path: Path | str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND)

    def __call__(self, record) -> None:
        self._write(b"effect", record.partition, record.offset, record.generation, b"")

    def note_commits(self, consumer) -> None:
        """Write, from now on, each commit of a consumer that a broker has taken."""
        held = consumer._held
        take_in = held.commit_confirmed

        def committed(done) -> None:
            offset, metadata = done.commit
            said = b" " + metadata.encode().hex().encode()
            self._write(b"commit", done.partition, offset, done.generation, said)
            take_in(done)

        held.commit_confirmed = committed

    def _write(self, kind: bytes, partition: int, offset: int, generation: int, more: bytes):
        numbers = partition, offset, generation, os.getpid()
        os.write(self._file, b"%s %d %d %d %d%s\n" % (kind, *numbers, more))

    def close(self) -> None:
        os.close(self._file)


# A session outlasts what a busy machine may take: no member of these dies, they all leave.
QUICK = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 100, "fetch.wait.max.ms": 20}


def by_hand(counts):
    """All partitions, for whoever begins again: a mock's group would wait for who was before."""
    return {"partitions": [(counts.topic, one) for one in range(counts.partitions)]}


@contextmanager
def consuming(counts, **arguments):
    with closing(Effects(counts.file)) as noted:
        consumer = consumer_of(counts, **arguments)
        noted.note_commits(consumer)
        try:
            yield consumer
        finally:
            consumer.close(0.0)


def consumer_of(counts, **arguments):
    arguments = {
        "dead_letters": counts.dead_topic,
        "backoff_s": 0.02,
        "max_backoff_s": 0.05,
        "commit_interval_s": 0.05,
        **arguments,
    }
    options = {**QUICK, **arguments.pop("options", {})}
    topics = None if "partitions" in arguments else arguments.pop("topics", counts.topic)
    return Consumer(
        topics,
        bootstrap_servers=counts.server.bootstrap_servers,
        group_id=counts.group,
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
def workers(consumer, counts, n=3, may_fail=lambda record: None):
    effects = Effects(counts.file)
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


def is_committed(consumer):
    """Whether brokers have taken all that there is to commit, and the consumer knows it."""
    with consumer._changed:
        return not consumer._held.commits()
