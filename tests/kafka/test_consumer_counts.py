"""The counts that a consumer's runs are held to are seen red, each check by a forged history."""

import math
from collections import Counter

import numpy as np
import pytest
from consumer_counts import Counts, Effect, Taken

from ackcore import OffsetTracker
from ackcore.offsets import encode_metadata

#: Of two partitions with ten records each, the offset of each one's that is dead.
POISON = 7


class History(Counts):
    """Two assignments of each partition: the first does all below 5, and 6, the next the rest.

    What `Counts` reads from a broker and from a file is in lists, to be forged.
    """

    def __init__(self):
        self.partitions, self.topic, self._highest = 2, "t", [-2000] * 2
        self.delivered = {(p, at): b"%d" % (10 * p + at) for p in range(2) for at in range(10)}
        self.history, self.letters, self.group = [], [(0, POISON), (1, POISON)], {}
        for partition in range(2):
            self.commit(partition, 1, [])
            for offset in (0, 1, 2, 3, 4, 6):
                self.effect(partition, offset, 1)
            self.commit(partition, 1, [0, 1, 2, 4, 6])
            # 3 is done since, and 8 was out: the next assignment does both again.
            for offset in (3, 5, 8, 9):
                self.effect(partition, offset, 2)
            self.effect(partition, 8, 1)
            self.commit(partition, 2, range(10))

    def effect(self, partition, offset, generation):
        self.history.append(Effect(partition, offset, generation, 0))

    def commit(self, partition, generation, done):
        self.group[partition] = said(partition, done)
        offset, metadata = self.group[partition]
        self.history.append(Taken(partition, offset, generation, 0, metadata))

    def lines(self):
        return self.history

    def dead(self):
        return Counter(self.letters)

    def committed(self):
        return [self.group.get(partition, (-1001, None)) for partition in range(2)]

    def check(self, most_again=math.inf):
        """All of it, as a run does."""
        self.check_commits()
        self.wait_for_the_end(0.0)
        poison = {self.delivered[partition, POISON] for partition in range(2)}
        return self.check_complete(most_again, poison)


def said(partition, done):
    """A commit that says so much is done."""
    tracker = OffsetTracker("t", partition, 1, 0)
    tracker.emitted(np.arange(10))
    tracker.acked(np.array(done, np.int64))
    return encode_metadata(tracker, 1)


def test_an_honest_history_balances():
    assert History().check() == 4
    with pytest.raises(AssertionError, match="4 were done again"):
        History().check(most_again=3)


def without(*effect):
    """A record was not processed."""
    return lambda h: h.history.remove(Effect(*effect, 0))


def first_commits_last(history):
    commits = [one for one in history.history if isinstance(one, Taken) and one.partition == 1]
    history.history = [one for one in history.history if one not in commits] + commits[1::-1]


def goes_back(history):
    history.check_commits()
    history.group[1] = said(1, range(5))


def lost(history):
    """Committed over as if it were a gap, which what was delivered is not."""
    history.check()
    history.check_commits = history.wait_for_the_end = lambda *_: None
    history.delivered[0, 10] = b"20"


FORGERIES = {
    "N1: neither done nor dead": (without(0, 9, 2), "committed, and not done"),
    "N1: lost": (lost, "lost"),
    "N2: a prefix is not done": (without(1, 5, 2), "committed, and not done"),
    "N2: what is done above a prefix is not": (
        lambda h: (without(0, 6, 1)(h), h.group.update({0: said(0, [0, 6])})),
        r"committed, and not done: \[\(0, 6\)\]",
    ),
    "N2: it was committed before it was done": (
        lambda h: (without(0, 0, 1)(h), h.effect(0, 0, 1)),
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
    "N7: the lag stays": (lambda h: h.group.pop(1), "the lag is 10"),
    "N8: done and dead": (lambda h: h.effect(0, POISON, 2), "done and dead"),
    "dead, and no poison": (lambda h: h.letters.append((0, 1)), "others are dead than should be"),
    "poison, and not dead": (
        lambda h: (h.letters.pop(), h.effect(1, POISON, 2)),
        "others are dead than should be",
    ),
}


@pytest.mark.parametrize(("forge", "message"), FORGERIES.values(), ids=FORGERIES)
def test_a_forgery_is_found(forge, message):
    history = History()
    forge(history)
    with pytest.raises(AssertionError, match=message):
        history.check()
