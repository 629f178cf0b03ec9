"""The counts that a consumer's runs are held to are seen red, each check by a forged history."""

import math

import numpy as np
import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from consumer_counts import Counts, Effects

from ackcore import OffsetTracker
from ackcore.kafka import KafkaRecord
from ackcore.kafka.consumer.held_partition import PartitionCommit
from ackcore.offsets import encode_metadata

#: Of two partitions with ten records each, the offset of each one's that is dead.
POISON = 7
NONE = (-1001, None)


class Letter:
    def __init__(self, partition, offset):
        self._headers = [
            ("ackcore-partition", b"%d" % partition),
            ("ackcore-offset", b"%d" % offset),
        ]

    def headers(self):
        return self._headers


class Server:
    """Return a broker's commits, which may be anything."""

    def __init__(self):
        self.letters = []
        self.group = {}

    def new_topic(self, partitions):
        return "t"

    def new_group(self):
        return "g"

    def produce(self, topic, values, partition):
        return list(range(len(values)))

    def consume(self, topic):
        return self.letters

    def committed(self, group, topic, partition):
        return self.group.get(partition, NONE)


class History:
    """Two assignments of each partition: the first does all below 5, and 6, the next the rest."""

    def __init__(self, directory):
        self.server = Server()
        self.counts = Counts(self.server, directory, partitions=2)
        self.counts.produce(20)
        self.effects = Effects(self.counts.file)
        self.effects.note_commits(self)
        for partition in range(2):
            self.begin(partition)

    def begin(self, partition):
        self.commit(partition, 1, [])
        for offset in (0, 1, 2, 3, 4, 6):
            self.effect(partition, offset, 1)
        self.commit(partition, 1, [0, 1, 2, 4, 6])
        # 3 is done since, and 8 was out: the next assignment does both again.
        for offset in (3, 5, 8, 9):
            self.effect(partition, offset, 2)
        self.effect(partition, 8, 1)
        self.server.letters.append(Letter(partition, POISON))
        self.commit(partition, 2, range(10))

    @property
    def _held(self):
        return self

    def committed(self, done):
        self.server.group[done.partition] = done.commit

    def effect(self, partition, offset, generation):
        self.effects(KafkaRecord("t", partition, offset, None, b"", [], None, 0, generation))

    def commit(self, partition, generation, done):
        self.committed(PartitionCommit("t", partition, generation, said(partition, done), 0))

    def check(self, most_again=math.inf):
        """All of it, as a run does."""
        self.counts.check_commits()
        self.counts.wait_for_the_end(0.0)
        poison = {self.counts.delivered[partition, POISON] for partition in range(2)}
        return self.counts.check_complete(most_again, poison)


def said(partition, done):
    """A commit that says so much is done."""
    tracker = OffsetTracker("t", partition, 1, 0)
    tracker.emitted(np.arange(10))
    tracker.acked(np.array(done, np.int64))
    return encode_metadata(tracker, 1)


@pytest.fixture
def history(tmp_path):
    found = History(tmp_path)
    yield found
    found.effects.close()


def test_an_honest_history_balances(history):
    assert history.check() == 4
    with pytest.raises(AssertionError, match="4 were done again"):
        history.check(most_again=3)


def without(kind, *numbers):
    """A line is not there."""

    def forge(history):
        line = kind + b" %d %d %d " % numbers
        kept = [each for each in lines_of(history) if not each.startswith(line)]
        history.counts.file.write_bytes(b"".join(kept))

    return forge


def lines_of(history):
    return history.counts.file.read_bytes().splitlines(keepends=True)


def first_commits_last(history):
    lines = lines_of(history)
    commits = [line for line in lines if line.startswith(b"commit 1 ")]
    others = [line for line in lines if line not in commits]
    history.counts.file.write_bytes(b"".join(others + commits[1::-1]))


def goes_back(history):
    history.counts.check_commits()
    history.server.group[1] = said(1, range(5))


def lost(history):
    """Committed over as if it were a gap, which what was delivered is not."""
    history.check()
    history.counts.check_commits = history.counts.wait_for_the_end = lambda *_: None
    history.counts.delivered[0, 10] = b"20"


FORGERIES = {
    "N1: neither done nor dead": (without(b"effect", 0, 9, 2), "committed, and not done"),
    "N1: lost": (lost, "lost"),
    "N2: a prefix is not done": (without(b"effect", 1, 5, 2), "committed, and not done"),
    "N2: what is done above a prefix is not": (
        lambda h: (
            without(b"effect", 0, 6, 1)(h),
            h.server.group.update({0: said(0, [0, 6])}),
        ),
        r"committed, and not done: \[\(0, 6\)\]",
    ),
    "N2: it was committed before it was done": (
        lambda h: (without(b"effect", 0, 0, 1)(h), h.effect(0, 0, 1)),
        r"\(0, 0\) was committed before it was done",
    ),
    "N3: again by one that began with the commit": (
        lambda h: h.effect(0, 4, 2),
        r"\(0, 4\) again, and was committed",
    ),
    "N3: again what was done above the prefix": (
        lambda h: h.effect(1, 6, 2),
        r"\(1, 6\) again, and was committed",
    ),
    "N3: twice in one assignment": (
        lambda h: h.effect(0, 5, 2),
        r"\(0, 5\) twice in one assignment",
    ),
    "N3: more of what is committed than an assignment that is over had out": (
        lambda h: [h.effect(0, offset, 0) for offset in (0, 1, 2, 4)],
        r"4 that are committed, of \(0, ",
    ),
    "N4: an assignment's commits go back": (first_commits_last, "after a higher one"),
    "N4: the group's commit goes back": (goes_back, "committed 5 after a higher one"),
    "N7: the lag stays": (lambda h: h.server.group.pop(1), "the lag is 10"),
    "N8: done and dead": (lambda h: h.effect(0, POISON, 2), "done and dead"),
    "dead, and no poison": (
        lambda h: h.server.letters.append(Letter(0, 1)),
        "others are dead than should be",
    ),
    "poison, and not dead": (
        lambda h: (h.server.letters.pop(), h.effect(1, POISON, 2)),
        "others are dead than should be",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_found(history, forge, message):
    forge(history)
    with pytest.raises(AssertionError, match=message):
        history.check()
