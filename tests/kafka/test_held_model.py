"""A group's life without I/O: readers come, crash and go, and commits are held to what was done."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore import OffsetTracker
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.held_partition import Limits, _with_holes
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.offsets import decode_metadata
from ackcore.retry import Policy

NO = Failure("ValueError", "no")


def name_of(offset):
    """A record's key: of two, or none."""
    return (b"a", b"b", None)[offset % 3]


def records(*offsets, key):
    return [
        KafkaRecord(*key, offset, name_of(offset), b"%d" % offset, [], None) for offset in offsets
    ]


class Life:
    """One member after the other reads two partitions, with an oracle of sets."""

    MAX = 3
    MOST_OUT = 3

    def __init__(self, ordered_by=None):
        self.ordered_by = ordered_by
        self.now = 0
        self.generation = 0
        self.log = {("t", 0): [], ("t", 1): []}
        self.ends = dict.fromkeys(self.log, 0)
        self.done = {key: set() for key in self.log}
        self.failures = {}
        self.broker = dict.fromkeys(self.log, (0, None))
        self.floor = dict.fromkeys(self.log, 0)  # committed in this generation
        self.history = []  # every delivery ever
        self.sent = []
        self.letters = []
        self.make()

    def make(self):
        limits = Limits(in_flight=self.MOST_OUT, waiting=4, ahead=6)
        self.held = HeldRecords(
            *(Policy(self.MAX, 1000, 8000),),
            **{"limits": limits, "timeout_ms": 5000, "ordered_by": self.ordered_by},
        )
        self.position, self.out, self.timed_out = {}, {}, {}
        for key in self.log:
            self.assign(key)

    def assign(self, key):
        self.generation = max(self.generation, self.held.generation) + 1
        state = decode_metadata(*key, *self.broker[key]).state
        self.held.assign(*key, self.generation, state)
        self.begin(key, state.committable)

    def begin(self, key, offset):
        self.position[key] = self.floor[key] = offset
        for some in (self.out, self.timed_out):
            for at in [at for at in some if at[0] == key]:
                del some[at]
        self.letters = [one for one in self.letters if self.held.is_dying(one)]

    # Steps: (name, a, b).

    def produce(self, a, b):
        key = ("t", a % 2)
        for n in range(b % 5):
            self.ends[key] += 1 + (a % 3 == 2) * n  # gaps
            self.log[key].append(self.ends[key] - 1)

    def read(self, a, b):
        key = ("t", a % 2)
        there = [offset for offset in self.log[key] if offset >= self.position[key]][: b + 1]
        if there:
            self.held.read(key, records(*there, key=key), [1] * len(there), self.now)
            self.position[key] = there[-1] + 1
        else:
            self.held.advance(key, self.ends[key])

    def take(self, a, b):
        n = 1 + a % 4
        taken = self.held.take(n, self.now)
        if len(taken) < n:
            assert self.held.due_in_ms(self.now) != 0, "whoever polls looks without a rest"
            for one in self.held.partition_stats(self.now):
                key = one.topic, one.partition
                ready = one.fresh and (not self.ordered_by or self.is_first_free(key))
                assert not ready or one.out + one.dying >= self.MOST_OUT, "it is held up"
        for record in taken:
            at = (record.topic, record.partition), record.offset
            assert at not in self.out, "it is out already"
            assert record.attempt < self.MAX
            assert not self.before(*at), "one before it is not done"
            self.out[at] = record
            self.timed_out.pop(at, None)
            self.history.append(record)

    def before(self, key, offset):
        """The records that a record is behind: those of its key that are held."""
        return [
            each
            for each in self.held._partitions[key].held
            if each < offset
            and (
                self.ordered_by == "partition"
                or (self.ordered_by == "key" and name_of(each) == name_of(offset) is not None)
            )
        ]

    def is_first_free(self, key):
        """Whether a new record is behind no other."""
        found = self.held._partitions[key].held
        return any(held.status == 0 and not self.before(key, each) for each, held in found.items())

    def pick(self, a):
        return self.history[a % len(self.history)] if self.history else None

    def ack(self, a, b):
        record = self.pick(len(self.history) - 1 - a)
        if record is None:
            return
        at = (record.topic, record.partition), record.offset
        counted = self.held.ack(record)
        assert counted == (self.out.get(at) is record or self.timed_out.get(at) is record)
        if counted:
            self.timed_out.pop(at, None)
            self.done[at[0]].add(record.offset)
            self.out.pop(at, None)

    def fail(self, a, b):
        record = self.pick(len(self.history) - 1 - a)
        if record is None:
            return
        at = (record.topic, record.partition), record.offset
        counted = self.held.fail(record, NO, self.now, final=b == 7, counts=b != 3)
        assert counted == (self.out.get(at) is record)
        if counted:
            del self.out[at]
        self.letters += self.held.take_dying()

    def pass_time(self, a, b):
        self.now += a * 500
        self.held.expire(self.now)
        self.letters += self.held.take_dying()
        dying = {
            (one.record.topic, one.record.partition, one.record.offset) for one in self.letters
        }
        for at, record in list(self.out.items()):
            if not self.is_out(at, record):
                del self.out[at]
                if (*at[0], at[1]) not in dying:
                    self.timed_out[at] = record

    def is_out(self, at, record):
        held = self.held._partitions[at[0]].held.get(at[1])
        return held is not None and held.status == 1 and held.delivery == record.delivery

    def keep(self, a, b):
        self.letters += self.held.take_dying()
        if self.letters:
            letter = self.letters.pop(a % len(self.letters))
            record = letter.record
            if self.held.letter_stored(letter):
                self.done[record.topic, record.partition].add(record.offset)

    def commit(self, a, b):
        for one in self.held.commits():
            self.hold_to(one)
            self.sent.append(one)

    def hold_to(self, one):
        """N2: what a commit says is done, is."""
        key = one.topic, one.partition
        state = decode_metadata(*key, *one.commit)
        assert state.problem is None
        tracker_done = self.says_done(key, one.commit)
        for offset in self.log[key]:
            if tracker_done(offset):
                assert offset in self.done[key], f"{key} {offset} is not done"

    @staticmethod
    def says_done(key, commit):
        state = decode_metadata(*key, *commit).state
        holes = set()
        for start, end in zip(state.hole_starts, state.hole_ends, strict=True):
            holes |= set(range(start, end))
        return lambda offset: offset < state.end and offset not in holes

    def answer_commit(self, a, b):
        """The broker takes it, and says so; or does not; or takes it, and its answer is lost."""
        if not self.sent:
            return
        one = self.sent.pop(0)
        key = one.topic, one.partition
        current = self.held._partitions.get(key)
        if b % 3 == 0 or current is None or current.generation != one.generation:
            return  # refused
        assert one.commit.offset >= self.floor[key]  # N4
        self.floor[key] = one.commit.offset
        self.broker[key] = one.commit
        if b % 3 == 1:
            self.held.commit_confirmed(one)

    def revoke(self, a, b):
        key = ("t", a % 2)
        self.held.close([key])
        for at, record in list(self.out.items()):
            if at[0] == key and b % 2:
                assert self.held.ack(record)
                self.done[key].add(record.offset)
                del self.out[at]
        self.held.seal([key])
        for at, record in self.out.items():
            assert not (at[0] == key and self.held.ack(record))
        for one in self.held.commits([key]):
            self.hold_to(one)
            if b % 3:
                self.broker[key] = one.commit
        self.sent = [one for one in self.sent if (one.topic, one.partition) != key]
        self.held.forget(key)
        self.assign(key)

    def seek(self, a, b):
        """All below the offset is done, and all from there on is read again."""
        key = ("t", a % 2)
        offset = min(b, self.ends[key])
        assert self.held.seek(key, offset)
        self.read(a, b)  # what the client has read already
        assert self.held.skip_lost(key, self.ends[key] + 9, self.now, keep=True) == 0
        self.held.advance(key, self.ends[key] + 9)
        assert self.held.position(key) == offset
        assert self.held.take_seeks() == {key: offset}
        assert self.held.take_seeks() == {}
        self.begin(key, offset)
        self.done[key] |= {each for each in self.log[key] if each < offset}
        self.sent = [one for one in self.sent if (one.topic, one.partition) != key]
        (one,) = self.held.commits([key])
        assert one.commit.offset == offset
        assert not decode_metadata(*key, *one.commit).state.hole_starts.size

    def crash(self, a, b):
        self.sent = []
        self.letters = []
        self.make()

    def check(self):
        stats = {(one.topic, one.partition): one for one in self.held.partition_stats(self.now)}
        for key, one in stats.items():
            out = sum(at[0] == key for at in self.out)
            assert one.out == out <= self.MOST_OUT
            tracker = self.held._partitions[key].tracker
            assert tracker.position >= self.position[key]
            assert one.fresh + one.out + one.waiting + one.dying == len(
                self.held._partitions[key].held
            ), "numbers do not add up"
            for offset in self.log[key]:
                if offset < tracker.position and tracker.is_done(offset):
                    assert offset in self.done[key]

    def finish(self):
        """All goes well from now on: all is done, once, and the lag is nothing."""
        for _ in range(200):
            self.now += 10_000
            for key in self.log:
                self.read(key[1], 10_000)
            for record in [*self.out.values(), *self.held.take(1000, self.now)]:
                assert self.held.ack(record)
                self.done[record.topic, record.partition].add(record.offset)
            self.out = {}
            self.letters += self.held.take_dying()
            while self.letters:
                self.keep(0, 0)
            if all(self.held.is_idle(key) for key in self.log):
                break
        for key in self.log:
            self.held.advance(key, self.ends[key])
        for one in self.held.commits():
            self.hold_to(one)
            self.held.commit_confirmed(one)
            self.broker[one.topic, one.partition] = one.commit
        for key, (offset, _) in self.broker.items():
            assert offset == self.ends[key]
            assert set(self.log[key]) == self.done[key]


STEPS = (
    ["produce", "read", "take", "ack"] * 4
    + ["fail", "pass_time", "keep", "commit", "answer_commit"] * 2
    + ["revoke", "crash", "seek"]
)


@given(
    st.sampled_from([None, "key", "partition"]),
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.integers(0, 11)),
        min_size=80,
        max_size=160,
    ),
)
def test_nothing_is_committed_that_is_not_done_whatever_happens(ordered_by, steps):
    life = Life(ordered_by)
    for name, a, b in steps:
        getattr(life, name)(a, b)
        life.check()
    life.finish()


RUNS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=4)


@given(begin=st.integers(0, 5), done=st.sets(st.integers(0, 24)), lost=RUNS)
def test_what_is_lost_is_not_done_and_nothing_else_changes(begin, done, lost):
    """Whatever is lost: amid what is done, over its end, or above records that are in flight."""
    runs = [(max(begin, start), max(begin, start) + length) for start, length in lost]
    tracker = OffsetTracker("t", 0, 1, begin)
    tracker.emitted(np.arange(begin, 25))
    # The first of each is in flight: it is the letter's.
    done -= {start for start, _ in runs} | set(range(begin))
    tracker.acked(np.array(sorted(done), np.int64))
    state = tracker.state()
    before, after = _done(state, 40), _done(_with_holes(state, [runs]), 40)
    assert after == before - {offset for run in runs for offset in range(*run)}


def _done(state, stop):
    holes = zip(state.hole_starts.tolist(), state.hole_ends.tolist(), strict=True)
    not_done = {offset for run in [*holes, (state.end, stop)] for offset in range(*run)}
    return set(range(stop)) - not_done
