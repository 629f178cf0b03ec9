"""An offset tracker made of sets, and steps to drive it beside a real one.

Nothing is clever in it: offsets are small here, so that each can be in a set.
"""

import copy
import pickle

import numpy as np

from ackcore.offsets import decode_metadata, encode_metadata

TOPIC, PARTITION, DEPLOYMENT = "lines", 3, 0x5EED


class Oracle:
    """Sets of emitted, done and absent offsets."""

    def __init__(self, base):
        self.base = self.position = base
        self._committable = base
        self.top_done = base  # one above the highest that is done
        self.done = set()  # or not there; at or above the base
        self.open = set()  # emitted, not done
        self.ahead = set()  # holes of an earlier generation, not emitted in this one
        self.waiting = set()
        self.attempts = {}
        self.stale = self.below_base = self.not_emitted = self.repeated = 0

    @property
    def committable(self):
        while self._committable in self.done:  # nothing becomes undone
            self._committable += 1
        return self._committable

    @property
    def holes(self):
        return sorted(offset for offset in self.open | self.ahead if offset < self.top_done)

    def emitted(self, offsets):
        changed = 0
        for offset in offsets:
            if offset < self.base:
                self.below_base += 1
            elif offset in self.waiting:
                self.waiting.remove(offset)
                changed += 1
            elif offset < self.position:
                self.repeated += 1
            else:
                self.advance(offset)
                self.position = offset + 1
                self.ahead.discard(offset)
                if offset in self.done:
                    self.repeated += 1
                else:
                    self.open.add(offset)
                    changed += 1
        return changed

    def advance(self, position):
        if position > self.position:
            passed = range(self.position, position)
            self.done.update(passed)
            self.ahead.difference_update(passed)
            self.attempts = {
                offset: attempts
                for offset, attempts in self.attempts.items()
                if offset not in passed
            }
            self.position = position
            self.top_done = max(self.top_done, position)

    def known(self, offsets):
        """Those that may have been emitted."""
        self.below_base += sum(offset < self.base for offset in offsets)
        self.not_emitted += sum(offset >= self.position for offset in offsets)
        return [offset for offset in offsets if self.base <= offset < self.position]

    def acked(self, offsets):
        changed = 0
        for offset in self.known(offsets):
            changed += offset not in self.done
            self.repeated += offset in self.done
            self.done.add(offset)
            self.top_done = max(self.top_done, offset + 1)
            self.open.discard(offset)
            self.waiting.discard(offset)
            self.attempts.pop(offset, None)
        return changed

    def failed(self, offsets):
        changed = 0
        for offset in self.known(offsets):
            if offset in self.done or offset in self.waiting:
                self.repeated += 1
                continue
            self.waiting.add(offset)
            self.attempts[offset] = self.attempts.get(offset, 0) + 1
            changed += 1
        return changed

    def is_done(self, offset):
        return offset < self.base or offset in self.done

    def restarted(self, state, is_whole):
        """Return the state of the next generation, from a state that may have been cut short."""
        old, new = self, Oracle(state.committable)
        holes = {
            offset
            for start, end in zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True)
            for offset in range(start, end)
        }
        new.done = set(range(state.committable, state.end)) - holes
        new.top_done = state.end
        new.ahead = holes
        assert state.committable <= old.committable
        assert new.done <= old.done
        assert state.end == max(old.committable, old.top_done) or not is_whole
        new.attempts = dict(zip(state.failed.tolist(), state.attempts.tolist(), strict=True))
        assert new.attempts.items() <= old.attempts.items()
        assert len(new.attempts) == len(old.attempts) or not is_whole
        return new

    def copy(self):
        other = copy.copy(self)
        for name in ("done", "open", "ahead", "waiting", "attempts"):
            setattr(other, name, getattr(self, name).copy())
        return other


class Machine:
    """A tracker and its oracle, driven step by step and compared after each."""

    def __init__(self, OffsetTracker, base):
        self.OffsetTracker = OffsetTracker
        self.generation = 1
        self.tracker = OffsetTracker(TOPIC, PARTITION, 1, base)
        self.oracle = Oracle(base)
        self.commits = []  # that arrived: what was committed, and what the oracle knew then

    # Steps: each takes what random numbers it needs as one list of small ints.

    def messages(self, name, offsets, how):
        """One message about offsets, as a column or one by one."""
        message = getattr(self.tracker, name)
        ascending = how == "column" and name == "emitted"  # gaps are between them all
        expected = getattr(self.oracle, name)(sorted(offsets) if ascending else offsets)
        if how == "column":
            assert message(np.array(offsets, np.int64)) == expected
        else:
            assert (
                sum(message(offset, generation=self.generation) for offset in offsets) == expected
            )

    def read(self, steps, how):
        """Records in sequence, with gaps in between."""
        offsets, offset = [], self.tracker.position
        for step in steps:
            offset += step
            offsets.append(offset)
            offset += 1
        self.messages("emitted", offsets, how)

    def emit(self, steps, how):
        """Any offsets: below the base, again, above a gap."""
        self.messages(
            "emitted", [max(0, self.oracle.committable + step - 20) for step in steps], how
        )

    def ack(self, steps, how):
        self.messages("acked", self.chosen(steps), how)

    def ack_all(self, steps, how):
        """All that is open but a few."""
        few = set(self.chosen(steps)[:2])
        self.messages("acked", sorted(self.oracle.open - few, reverse=True), how)

    def fail(self, steps, how):
        self.messages("failed", self.chosen(steps), how)

    def retry(self, steps, how):
        self.messages("emitted", sorted(self.oracle.waiting)[: len(steps)], how)

    def chosen(self, steps):
        """Mostly offsets that are open, some that are not."""
        open_ones = sorted(self.oracle.open)
        return [
            open_ones[step * 7 % len(open_ones)]
            if open_ones and step % 5
            else max(0, self.oracle.committable + step - 15)
            for step in steps
        ]

    def advance(self, steps, how):
        position = self.tracker.position + sum(steps) % 90 - 9
        self.tracker.advance(max(0, position))
        self.oracle.advance(max(0, position))

    def stale(self, steps, how):
        """Late messages of another generation."""
        other = self.generation + (1 if how == "column" else -1)
        for name in ("emitted", "acked", "failed"):
            assert getattr(self.tracker, name)(np.array(steps, np.int64), other) == 0
        self.tracker.advance(10**6, generation=other)
        self.oracle.stale += 3 * len(steps) + 1

    def commit(self, steps, how):
        """It arrives, or is rejected, in which case the one before stands."""
        limit = 64 + sum(steps) % 200 if how == "column" else 4095
        commit = encode_metadata(self.tracker, DEPLOYMENT, limit=limit, wide=len(steps) % 2 == 0)
        assert commit.offset == self.oracle.committable
        assert len(commit.metadata) <= limit
        if sum(steps) % 3:
            self.commits.append((commit, self.oracle.copy(), limit == 4095))

    def restart(self, steps, how):
        """A new generation goes on from what was committed last."""
        if not self.commits:
            return
        commit, oracle, is_whole = self.commits.pop()
        found = decode_metadata(TOPIC, PARTITION, commit.offset, commit.metadata)
        assert found.problem is None
        assert found.deployment == DEPLOYMENT
        self.generation += 1
        self.oracle = oracle.restarted(found.state, is_whole)
        self.tracker = self.OffsetTracker.from_state(TOPIC, PARTITION, self.generation, found.state)

    def hand_over(self, steps, how):
        """The same with the state itself, perhaps cut short."""
        limit = len(steps) if how == "column" else None
        state = self.tracker.state(limit)
        self.oracle = self.oracle.restarted(state, limit is None)
        self.generation += 1
        self.tracker = self.OffsetTracker.from_state(TOPIC, PARTITION, self.generation, state)
        self.commits.clear()

    def reload(self, steps, how):
        self.tracker = pickle.loads(pickle.dumps(self.tracker))

    def check(self):
        """All that can be seen is the oracle's."""
        tracker, oracle = self.tracker, self.oracle
        assert tracker.committable == oracle.committable
        assert tracker.position == oracle.position
        assert tracker.pending == len(oracle.open)
        assert tracker.waiting == len(oracle.waiting)
        assert tracker.oldest == min(oracle.open, default=None)
        assert tracker.holes().tolist() == oracle.holes
        assert tracker.holes(3).tolist() == oracle.holes[:3]
        assert tracker.stats == (
            oracle.stale,
            oracle.below_base,
            oracle.not_emitted,
            oracle.repeated,
        )
        start = max(0, oracle.base - 2)
        top = max(oracle.position, oracle.top_done)
        some = np.arange(start, top + 3, 1 + (top - start) // 60)
        assert tracker.is_done(some).tolist() == [
            oracle.is_done(offset) for offset in some.tolist()
        ]
        for offset in list(oracle.attempts)[:3]:
            assert tracker.attempt(offset) == oracle.attempts[offset]
        state = tracker.state()
        assert (state.committable, state.end) == (
            oracle.committable,
            max(oracle.committable, oracle.top_done),
        )
        assert dict(zip(state.failed.tolist(), state.attempts.tolist(), strict=True)) == (
            oracle.attempts
        )


#: Names of steps, those that keep records flowing more often.
STEPS = [
    *["read", "ack"] * 6,
    *["emit", "ack_all", "fail", "retry"] * 2,
    *["advance", "stale", "commit", "restart", "hand_over", "reload"],
]
