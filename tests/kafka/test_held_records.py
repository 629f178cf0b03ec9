"""What a consumer holds: each answer's effect, and a model of a whole group's life without I/O."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore.kafka.held_partition import Limits
from ackcore.kafka.held_records import HeldRecords
from ackcore.kafka.records import Failure, KafkaRecord
from ackcore.offsets import decode_metadata
from ackcore.retry import Policy

NO = Failure("ValueError", "no")
KEY = ("t", 0)


def records(*offsets, key=KEY):
    return [KafkaRecord(*key, offset, None, b"%d" % offset, [], None) for offset in offsets]


def holder(offset=0, metadata=None, key=KEY, generation=1, committed=True, **arguments):
    limits = arguments.pop("limits", None)
    policy = Policy(arguments.pop("max_attempts", 3), 1000, 60_000)
    held = HeldRecords(policy, limits=limits, **arguments)
    state = decode_metadata(*key, offset, metadata).state
    held.assign(*key, generation, state, committed=committed)
    return held


def read(held, *offsets, key=KEY, now=0, size=1):
    return held.read(key, records(*offsets, key=key), [size] * len(offsets), now)


def offsets(taken):
    return [record.offset for record in taken]


def committed(held):
    return [(one.commit.offset) for one in held.commits()]


# Storm's lists: OffsetManagerTest, KafkaSpoutEmitTest, KafkaSpoutSingleTopicTest.


def test_commits_the_prefix_of_what_is_done_in_any_order():
    held = holder()
    read(held, 0, 1, 2, 3)
    taken = held.take(10, 0)
    assert offsets(taken) == [0, 1, 2, 3]
    assert committed(held) == [0]
    for offset, prefix in ((1, 0), (3, 0), (0, 2), (2, 4)):
        assert held.ack(taken[offset])
        assert committed(held) == [prefix]


def test_offsets_that_are_not_there_are_passed_over():
    held = holder(5)
    read(held, 8, 11)  # 5 to 7, 9 and 10 were compacted away, or are markers
    first, second = held.take(2, 0)
    held.ack(second)
    assert committed(held) == [8]
    held.ack(first)
    assert committed(held) == [12]
    held.advance(KEY, 14)
    assert committed(held) == [14]


def test_what_failed_is_handed_out_first_when_it_is_due():
    held = holder()
    read(held, 0, 1, 2)
    (first,) = held.take(1, 0)
    assert held.fail(first, NO, 0)
    assert 0 <= held.due_in_ms(0) <= 1000
    assert offsets(held.take(1, 0)) == [1]
    again = held.take(5, 1000)
    assert [(one.offset, one.attempt, one.delivery) for one in again] == [(0, 1, 2), (2, 0, 1)]
    assert held.counts.retried == 1


def test_the_last_failure_is_a_dead_letter_which_is_committed_over_when_kept():
    held = holder()
    read(held, 0)
    now = 0
    for attempt in range(3):
        (record,) = held.take(1, now)
        assert record.attempt == attempt
        held.fail(record, NO, now)
        now += 60_000
    (letter,) = held.dying()
    assert (letter.record.offset, letter.failures, letter.failure) == (0, 3, NO)
    assert held.dying() == []
    assert committed(held) == [0]
    assert held.unanswered([KEY]) == 1
    assert held.dead(letter)
    assert committed(held) == [1]
    assert not held.dead(letter)
    assert held.counts.dead == 1


def test_a_final_failure_dies_at_once():
    held = holder()
    read(held, 0)
    held.fail(held.take(1, 0)[0], NO, 0, final=True)
    assert held.dying()[0].failures == 1


def test_a_failure_that_is_no_attempt_does_not_count_until_the_record_is_old():
    held = holder(unavailable_timeout_ms=500_000, max_attempts=2)
    read(held, 0)
    now = 0
    for _ in range(4):
        (record,) = held.take(1, now)
        assert record.attempt == 0
        held.fail(record, NO, now, counts=False, after_ms=70_000)
        assert held.take(1, now + 69_999) == []
        now += 120_000
    for attempt in range(2):
        now += 120_000
        (record,) = held.take(1, now)
        assert record.attempt == attempt
        held.fail(record, NO, now, counts=False)
    assert len(held.dying()) == 1


def test_answers_count_once():
    held = holder()
    read(held, 0, 1)
    first, second = held.take(2, 0)
    assert held.ack(first)
    assert not held.ack(first)  # a double ack
    assert not held.fail(first, NO, 0)
    assert held.fail(second, NO, 0)
    assert not held.fail(second, NO, 0)
    assert not held.ack(second)
    (again,) = held.take(1, 1000)
    assert not held.ack(second)  # of the delivery before
    assert held.ack(again)
    assert (held.counts.repeated, held.counts.late) == (2, 3)
    assert committed(held) == [2]


def test_what_timed_out_may_be_acked_until_it_is_handed_out_again():
    held = holder(timeout_ms=100)
    read(held, 0, 1)
    first, second = held.take(2, 0)
    assert held.expire(99) == 0
    assert held.expire(100) == 2
    assert held.ack(first)
    assert not held.fail(second, NO, 100)  # it has, already
    (again,) = held.take(5, 2000)
    assert (again.offset, again.attempt) == (1, 1)
    assert not held.ack(second)
    assert held.ack(again)
    assert committed(held) == [2]
    assert (held.counts.timed_out, held.counts.late) == (2, 2)


def test_an_answer_of_another_generation_changes_nothing():
    held = holder()
    read(held, 0, 1)
    zombie, _ = held.take(2, 0)
    held.forget(KEY)
    assert not held.ack(zombie)
    held.assign(*KEY, 2, decode_metadata(*KEY, 0, None).state)
    read(held, 0)
    assert not held.ack(zombie)
    assert not held.fail(zombie, NO, 0)
    assert held.counts.stale == 3
    assert committed(held) == [0]
    assert held.ack(held.take(1, 0)[0])


def test_a_dead_letter_of_another_generation_is_not_wanted():
    held = holder(max_attempts=1)
    read(held, 0)
    held.fail(held.take(1, 0)[0], NO, 0)
    (letter,) = held.dying()
    assert held.is_dying(letter)
    held.forget(KEY)
    held.assign(*KEY, 2, decode_metadata(*KEY, 0, None).state)
    read(held, 0)
    assert not held.is_dying(letter)
    assert not held.dead(letter)
    assert committed(held) == [0]


def test_what_was_done_above_the_prefix_is_not_handed_out_after_a_restart():
    held = holder()
    read(held, 0, 1, 2, 3)
    taken = held.take(4, 0)
    held.ack(taken[1])
    held.ack(taken[3])
    held.fail(taken[2], NO, 0)
    (one,) = held.commits()
    again = holder(*one.commit, generation=2)
    assert read(again, 0, 1, 2, 3, 4) == 3
    assert [(each.offset, each.attempt) for each in again.take(9, 0)] == [(0, 0), (2, 1), (4, 0)]
    assert again.counts.skipped == 2


def test_what_had_died_when_its_dead_letter_was_lost_dies_again():
    held = holder(max_attempts=1)
    read(held, 0)
    held.fail(held.take(1, 0)[0], NO, 0)
    (one,) = held.commits()
    again = holder(*one.commit, generation=2, max_attempts=1)
    read(again, 0)
    assert again.take(1, 0) == []
    (letter,) = again.dying()
    assert letter.failures == 1
    assert again.dead(letter)


def test_a_start_is_committed_though_nothing_is_done():
    held = holder(7, committed=False)
    (one,) = held.commits()
    assert one.commit.offset == 7
    held.committed(one)
    assert held.commits() == []


def test_a_commit_that_crosses_an_ack_leaves_it_to_be_committed():
    held = holder()
    read(held, 0, 1)
    first, second = held.take(2, 0)
    held.ack(first)
    (sent,) = held.commits()
    held.ack(second)
    held.committed(sent)
    assert committed(held) == [2]


def test_a_commit_that_was_rejected_is_made_again():
    held = holder()
    read(held, 0)
    held.ack(held.take(1, 0)[0])
    assert committed(held) == [1]
    assert committed(held) == [1]
    (one,) = held.commits()
    held.committed(one)
    assert held.commits() == []


def test_metadata_that_is_too_large_gets_shorter():
    held = holder()
    read(held, *range(0, 4000))
    for record in held.take(4000, 0)[1::7]:
        held.ack(record)
    sizes = []
    for _ in range(9):
        (one,) = held.commits()
        state = decode_metadata(*KEY, *one.commit).state
        assert one.commit.offset == state.committable == 0
        sizes.append(len(one.commit.metadata.encode()))
        held.shorten_metadata(one.form)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


def test_a_partition_is_paused_by_what_is_in_flight_until_half_is_free():
    held = holder(limits=Limits(in_flight=4))
    assert held.pauses() == ([], [])
    read(held, 0, 1, 2, 3)
    assert held.pauses() == ([KEY], [])
    assert held.room() == 0
    taken = held.take(4, 0)
    held.ack(taken[0])
    assert held.pauses() == ([], [])
    held.ack(taken[2])
    held.ack(taken[3])
    assert held.pauses() == ([], [KEY])
    assert held.room() == 3


def test_a_partition_is_paused_by_bytes():
    held = holder(limits=Limits(in_flight_bytes=100))
    read(held, 0, size=100)
    assert held.pauses() == ([KEY], [])
    held.ack(held.take(1, 0)[0])
    assert held.pauses() == ([], [KEY])


def test_what_waits_for_a_retry_does_not_stop_intake_until_too_much_does():
    other = ("t", 1)
    held = holder(limits=Limits(in_flight=2, waiting=4))
    held.assign(*other, 1, decode_metadata(*other, 0, None).state)
    for first in (0, 2):
        read(held, first, first + 1)
        for record in held.take(2, 0):
            held.fail(record, NO, 0)
        paused, _ = held.pauses()
        assert paused == ([] if first == 0 else [KEY, other])
    assert {one.paused for one in held.partition_stats(0)} == {"waiting"}
    for record in held.take(3, 1000):
        held.ack(record)
    assert held.pauses() == ([], [KEY, other])


def test_one_partition_is_paused_and_the_others_go_on():
    other = ("t", 1)
    held = holder(limits=Limits(in_flight=2))
    held.assign(*other, 1, decode_metadata(*other, 0, None).state)
    read(held, 0, 1)
    assert held.pauses() == ([KEY], [])
    read(held, 0, key=other)
    assert held.pauses() == ([], [])
    assert held.room() == 1
    wide = holder(limits=Limits(in_flight=80))
    read(wide, *range(79))
    assert wide.room() == 10


def test_a_partition_that_is_taken_away_gives_nothing_more():
    held = holder()
    read(held, 0, 1, 2)
    out, failed = held.take(2, 0)
    held.fail(failed, NO, 0)
    held.close([KEY])
    assert held.take(5, 1000) == []
    assert held.unanswered([KEY]) == 1
    assert held.ack(out)
    assert held.unanswered([KEY]) == 0
    assert committed(held) == [1]
    assert read(held, 3) == 0


def test_what_nobody_looked_at_is_taken_next():
    held = holder()
    read(held, 0, 1, 2)
    taken = held.take(2, 0)
    held.give_back(taken)
    assert offsets(held.take(3, 0)) == [0, 1, 2]
    assert not held.ack(taken[0])


def test_what_was_deleted_upstream_is_a_dead_letter_of_its_own():
    held = holder()
    read(held, 0)
    assert held.lose(KEY, 10, 0, keep=True) == 9
    (letter,) = held.dying()
    assert letter.failure == Failure(
        "LostUpstream", "offsets 1 to 9 were deleted before they were read"
    )
    held.ack(held.take(1, 0)[0])
    assert committed(held) == [1]
    held.dead(letter)
    assert committed(held) == [10]
    assert held.lose(KEY, 12, 0, keep=False) == 2
    assert committed(held) == [12]
    assert held.counts.lost == 11


def test_the_age_of_the_oldest():
    held = holder()
    read(held, 0, now=1000)
    read(held, 1, now=3000)
    first, _ = held.take(2, 3000)
    assert held.partition_stats(4000)[0].oldest_s == 3.0
    held.ack(first)
    assert held.partition_stats(4000)[0].oldest_s == 1.0


def test_what_is_read_again_while_it_is_held_is_there_once():
    held = holder(limits=Limits(waiting=2))
    for offset in (0, 1):
        read(held, offset)
        (record,) = held.take(1, 0)
        assert read(held, offset) == 0  # it is out
        held.fail(record, NO, 0)
        assert read(held, offset) == 0  # it waits
    assert held.pauses() == ([KEY], [])
    assert held.take(2, 0) == []
    again = held.take(3, 1000)
    assert sorted(offsets(again)) == [0, 1]
    for record in again:
        assert held.ack(record)
    assert held.pauses() == ([], [KEY])
    (stats,) = held.partition_stats(0)
    assert (stats.fresh, stats.out, stats.waiting, stats.bytes) == (0, 0, 0, 0)
    assert committed(held) == [2]


def test_of_an_older_delivery_nothing_is_taken_back():
    held = holder(timeout_ms=100)
    read(held, 0)
    old = held.take(1, 0)
    held.expire(100)
    (new,) = held.take(1, 5000)
    held.give_back(old)
    assert held.take(1, 5000) == []
    assert held.ack(new)


def test_what_was_taken_and_answered_is_not_kept_until_it_would_have_timed_out():
    held = holder(timeout_ms=300_000)
    read(held, 0)
    slow = held.take(1, 0)
    for offset in range(1, 1000):
        read(held, offset)
        held.ack(held.take(1, offset)[0])
        held.expire(offset)
        assert len(held._taken_at) < 200
    held.ack(slow[0])
    held.expire(1000)
    assert len(held._taken_at) == 0
    read(held, 1000, now=1000)
    assert len(held.take(1, 1000)) == 1
    held.forget(KEY)
    held.expire(1000)
    assert len(held._taken_at) == 0


def test_an_answer_after_the_last_commit_is_late():
    held = holder()
    read(held, 0, 1)
    first, second = held.take(2, 0)
    assert held.ack(first)
    held.seal([KEY])
    assert not held.ack(second)
    assert not held.fail(second, NO, 0)
    assert held.counts.stale == 2
    assert committed(held) == [1]


def test_metadata_is_shortened_once_for_all_that_was_refused_in_one_form():
    held = holder()
    for partition in range(1, 9):
        held.assign("t", partition, 1, decode_metadata("t", partition, 0, None).state)
    for partition in range(9):
        read(held, *range(0, 4000), key=("t", partition))
        for record in held.take(4000, 0)[1::7]:
            held.ack(record)
    for one in held.commits():
        assert held.shorten_metadata(one.form)
    shorter = held.commits()
    assert all(len(one.commit.metadata) > 500 for one in shorter)
    assert held.shorten_metadata(shorter[0].form)
    while held.shorten_metadata(held.commits()[0].form):
        pass
    assert {one.commit.metadata for one in held.commits()} == {""}


# A group's life: readers come, crash and go; what is committed is held to what was done.


class Life:
    """One member after the other reads two partitions, with an oracle of sets."""

    MAX = 3

    def __init__(self):
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
        limits = Limits(in_flight=6, waiting=4)
        self.held = HeldRecords(Policy(self.MAX, 1000, 8000), limits=limits, timeout_ms=5000)
        self.position, self.out, self.timed_out = {}, {}, {}
        for key in self.log:
            self.assign(key)

    def assign(self, key):
        self.generation += 1
        state = decode_metadata(*key, *self.broker[key]).state
        self.held.assign(*key, self.generation, state)
        self.position[key] = state.committable
        self.floor[key] = state.committable
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
        for record in self.held.take(1 + a % 4, self.now):
            at = (record.topic, record.partition), record.offset
            assert at not in self.out, "it is out already"
            assert record.attempt < self.MAX
            self.out[at] = record
            self.timed_out.pop(at, None)
            self.history.append(record)

    def pick(self, a):
        return self.history[a % len(self.history)] if self.history else None

    def ack(self, a, b):
        record = self.pick(len(self.history) - 1 - a)
        if record is None:
            return
        at = (record.topic, record.partition), record.offset
        counted = self.held.ack(record)
        assert counted == (self.out.get(at) is record or self.timed_out.get(at) is record)
        self.timed_out.pop(at, None)
        if counted:
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
        self.letters += self.held.dying()

    def pass_time(self, a, b):
        self.now += a * 500
        self.held.expire(self.now)
        self.letters += self.held.dying()
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
        self.letters += self.held.dying()
        if self.letters:
            letter = self.letters.pop(a % len(self.letters))
            record = letter.record
            if self.held.dead(letter):
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
            self.held.committed(one)

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

    def crash(self, a, b):
        self.sent = []
        self.letters = []
        self.make()

    def check(self):
        stats = {(one.topic, one.partition): one for one in self.held.partition_stats(self.now)}
        for key, one in stats.items():
            out = sum(at[0] == key for at in self.out)
            assert one.out == out
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
            self.letters += self.held.dying()
            while self.letters:
                self.keep(0, 0)
            if all(self.held.is_idle(key) for key in self.log):
                break
        for key in self.log:
            self.held.advance(key, self.ends[key])
        for one in self.held.commits():
            self.hold_to(one)
            self.held.committed(one)
            self.broker[one.topic, one.partition] = one.commit
        for key, (offset, _) in self.broker.items():
            assert offset == self.ends[key]
            assert set(self.log[key]) == self.done[key]


STEPS = (
    ["produce", "read", "take", "ack"] * 4
    + ["fail", "pass_time", "keep", "commit", "answer_commit"] * 2
    + ["revoke", "crash"]
)


@given(
    st.lists(
        st.tuples(st.sampled_from(STEPS), st.integers(0, 11), st.integers(0, 11)),
        min_size=80,
        max_size=160,
    )
)
def test_nothing_is_committed_that_is_not_done_whatever_happens(steps):
    life = Life()
    for name, a, b in steps:
        getattr(life, name)(a, b)
        life.check()
    life.finish()
