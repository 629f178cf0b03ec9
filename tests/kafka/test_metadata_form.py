"""The search for the longest metadata that a broker takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import OffsetTracker
from ackcore.kafka.commit_metadata import MetadataForm
from ackcore.offsets import KAFKA_LIMIT, decode_metadata

OFFSETS = 20_000
UNITS = {"characters": len, "bytes": lambda text: len(text.encode())}


class Group:
    """A partition with more done than fits, committed to a broker with a limit."""

    def __init__(self, limit, unit, seed=0):
        self.limit, self.size = limit, UNITS[unit]
        self.done = np.flatnonzero(np.random.default_rng(seed).random(OFFSETS) < 0.5)
        self.tracker = OffsetTracker("t", 0, 1, 0)
        self.tracker.emitted(np.arange(OFFSETS))
        self.tracker.acked(self.done)
        self.form, self.refusals = MetadataForm(), 0

    def commit(self):
        """Commit once, and return the metadata that the broker has then, or None."""
        commit = self.form.encode("t", 0, 1, self.tracker.state(), 7)
        if self.size(commit.metadata) > self.limit:
            self.refusals += 1
            assert self.form.refused(commit.metadata)
            return None
        self.form.taken(commit.metadata)
        return commit.metadata

    def again(self, metadata):
        """Return what would be done again after a restart; what is not done, is in any case."""
        state = decode_metadata("t", 0, self.tracker.committable, metadata).state
        open_ = np.zeros(OFFSETS, np.bool_)
        open_[state.end :] = True
        for start, end in zip(state.hole_starts, state.hole_ends, strict=True):
            open_[start:end] = True
        assert open_[np.setdiff1d(np.arange(OFFSETS), self.done)].all(), "it is not done"
        return self.done[open_[self.done]].tolist()

    def settle(self):
        """Commit until nothing is refused any more; return what the broker has then."""
        taken = [self.commit(), None, self.commit()]
        while taken[-1] is None or not taken[-1] == taken[-2] == taken[-3]:
            taken.append(self.commit())
            assert len(taken) < 30
        return taken[-1]


@given(st.integers(100, KAFKA_LIMIT + 1), st.sampled_from(sorted(UNITS)), st.integers(0, 9))
def test_what_a_broker_takes_is_used_to_nearly_its_limit(limit, unit, seed):
    group = Group(limit, unit, seed)
    metadata = group.settle()
    assert group.refusals <= 14
    again = group.again(metadata)
    assert group.size(metadata) > 0.85 * min(limit, KAFKA_LIMIT) - 3 or not again
    # Bytes are used best without wide characters, and characters with them.
    assert metadata.isascii() == (unit == "bytes")


def test_a_small_limit_costs_little_of_what_is_done():
    group, best = Group(300, "characters"), Group(300, "characters")
    best.form._refused, best.form._taken = 301, 300
    assert len(group.again(group.settle())) < 1.02 * len(best.again(best.commit()))


@pytest.mark.parametrize("unit", UNITS)
def test_a_limit_that_gets_smaller_is_found_again(unit):
    group = Group(2000, unit)
    group.settle()
    group.limit = 300
    assert group.size(group.settle()) > 250
