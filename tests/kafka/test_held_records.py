"""Holding, handing out and committing, case by case; `test_consumer_model.py` has a model."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import OffsetTracker
from ackcore.dead_limit import DeadLimit
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.held_partition import Limits, _with_holes
from ackcore.kafka.consumer.held_records import HeldRecords
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


def restarted(held, generation=2, **arguments):
    """Return a holder that begins where another one has committed."""
    (one,) = held.commits()
    return holder(*one.commit, generation=generation, **arguments)


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


@pytest.mark.parametrize("answer", ["ack", "fail"])
def test_an_answer_to_something_else_is_refused(answer):
    held = holder()
    read(held, 0)
    held.take(1, 0)
    rest = () if answer == "ack" else (NO, 0)
    with pytest.raises(TypeError, match=r"record must be a KafkaRecord .* got int 5"):
        getattr(held, answer)(5, *rest)


@pytest.mark.parametrize("reason", [None, ValueError, b"no", 5, {"a": 1}])
def test_a_reason_that_is_neither_an_error_nor_a_text_is_refused(reason):
    with pytest.raises(TypeError, match="reason must be an exception or a text, got"):
        Failure.of(reason)


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


def test_every_other_record_is_a_new_one_however_many_are_due():
    """Those that fail again and again keep no new one out, whether taken together or one by one."""
    held = holder(max_attempts=1000)
    read(held, *range(4))
    for record in held.take(4, 0):
        held.fail(record, NO, 0)
    read(held, *range(4, 10))
    taken = held.take(3, 60_000)
    assert [offset >= 4 for offset in offsets(taken)] == [False, True, False]
    one_by_one = [offset for _ in range(4) for offset in offsets(held.take(1, 60_000))]
    assert [offset >= 4 for offset in one_by_one] == [True, False, True, False]
    assert offsets(held.take(9, 60_000)) == [7, 8, 9]


def test_the_last_failure_is_a_dead_letter_which_is_committed_over_when_kept():
    held = holder()
    read(held, 0)
    now = 0
    for attempt in range(3):
        (record,) = held.take(1, now)
        assert record.attempt == attempt
        held.fail(record, NO, now)
        now += 60_000
    (letter,) = held.take_dying()
    assert (letter.record.offset, letter.failures, letter.failure) == (0, 3, NO)
    assert held.take_dying() == []
    assert committed(held) == [0]
    assert held.unanswered([KEY]) == 1
    assert held.letter_stored(letter)
    assert committed(held) == [1]
    assert not held.letter_stored(letter)
    assert held.counts.dead == 1


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
    assert len(held.take_dying()) == 1


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


def test_an_answer_of_another_generation_changes_nothing():
    held = holder()
    read(held, 0, 1)
    zombie, _ = held.take(2, 0)
    held.forget([KEY])
    assert not held.ack(zombie)
    held.assign(*KEY, 2, decode_metadata(*KEY, 0, None).state)
    read(held, 0)
    assert not held.ack(zombie)
    assert not held.fail(zombie, NO, 0)
    assert held.counts.stale == 3
    assert committed(held) == [0]
    assert held.ack(held.take(1, 0)[0])


def test_partitions_that_are_taken_away_together_leave_the_queues_in_one_pass(monkeypatch):
    held = holder()
    keys = [("t", partition) for partition in range(1, 50)]
    for key in keys:
        held.assign(*key, 1, decode_metadata(*key, 0, None).state)
    for key in (KEY, *keys):
        read(held, 0, 1, key=key)
    for record in held.take(60, 0):
        held.fail(record, NO, 0)
    passes, heapify = [], heapq.heapify
    monkeypatch.setattr(heapq, "heapify", lambda heap: passes.append(len(heap)) or heapify(heap))
    held.forget(keys)
    assert passes == [2]
    assert held.assigned == [KEY]
    assert held.counts.dropped == 98
    assert sorted(offsets(held.take(9, 1000))) == [0, 1]


def test_what_had_died_when_its_dead_letter_was_lost_dies_again():
    held = holder(max_attempts=1)
    read(held, 0)
    held.fail(held.take(1, 0)[0], NO, 0)
    again = restarted(held, max_attempts=1)
    read(again, 0)
    assert again.take(1, 0) == []
    (letter,) = again.take_dying()
    assert letter.failures == 1
    assert again.letter_stored(letter)


def test_a_start_is_committed_though_nothing_is_done():
    held = holder(7, committed=False)
    (one,) = held.commits()
    assert one.commit.offset == 7
    held.commit_confirmed(one)
    assert held.commits() == []


def test_a_commit_that_crosses_an_ack_leaves_it_to_be_committed():
    held = holder()
    read(held, 0, 1)
    first, second = held.take(2, 0)
    held.ack(first)
    (sent,) = held.commits()
    held.ack(second)
    held.commit_confirmed(sent)
    assert committed(held) == [2]


def test_a_partition_is_paused_by_what_is_in_flight_until_half_is_free():
    held = holder(limits=Limits(in_flight=4, ahead=4))
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


def test_what_is_read_ahead_is_handed_out_without_a_pause_as_room_is_made():
    """A client that is resumed takes about a second until it delivers again."""
    held = holder(limits=Limits(in_flight=1))
    read(held, *range(999))
    assert held.pauses() == ([], [])
    assert held.room() == 125
    for offset in range(999):
        (record,) = held.take(9, 0)
        assert record.offset == offset
        assert held.due_in_ms(0) is None  # or whoever polls would look without a rest
        held.ack(record)
        assert held.pauses() == ([], [])
    read(held, *range(1000, 2000))
    assert held.pauses() == ([KEY], [])


def test_a_consumer_that_ends_of_its_dead_has_nothing_due():
    held = holder(dead_limit=DeadLimit(max_dead=1))
    read(held, *range(3))
    for record in held.take(2, 0):
        assert held.due_in_ms(0) == 0
        held.fail(record, NO, 0, final=True)
    assert held.take(1, 0) == []
    assert held.due_in_ms(0) is None


def test_a_partition_is_paused_by_bytes():
    held = holder(limits=Limits(in_flight_bytes=100))
    read(held, 0, size=100)
    assert held.pauses() == ([KEY], [])
    held.ack(held.take(1, 0)[0])
    assert held.pauses() == ([], [KEY])


def test_what_waits_for_a_retry_does_not_stop_intake_until_too_much_does():
    other = ("t", 1)
    held = holder(limits=Limits(in_flight=2, waiting=4, ahead=2))
    held.assign(*other, 1, decode_metadata(*other, 0, None).state)
    for first in (0, 2):
        read(held, first, first + 1)
        for record in held.take(2, 0):
            held.fail(record, NO, 0)
        paused, _ = held.pauses()
        assert paused == ([] if first == 0 else [KEY, other])
    assert {one.paused for one in held.partition_stats(0, {})} == {"waiting"}
    for _ in range(3):
        assert all(map(held.ack, held.take(1, 1000)))
    assert held.pauses() == ([], [KEY, other])


def test_one_partition_is_paused_and_the_others_go_on():
    other = ("t", 1)
    held = holder(limits=Limits(in_flight=2, ahead=2))
    held.assign(*other, 1, decode_metadata(*other, 0, None).state)
    read(held, 0, 1)
    assert held.pauses() == ([KEY], [])
    read(held, 0, key=other)
    assert held.pauses() == ([], [])
    assert held.room() == 1
    wide = holder(limits=Limits(in_flight=80, ahead=80))
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


def test_what_stops_intake_is_said_if_it_is_what_waits():
    held = holder(limits=Limits(in_flight=3, waiting=2, ahead=3))
    read(held, 0, 1, 2)
    assert held.pauses() == ([KEY], [])
    assert held.stopped_by_waiting() == ""  # they are in flight
    for record in held.take(2, 0):
        held.fail(record, Failure("ValueError", "no" * 1000), 0)
    assert held.pauses() == ([], [])
    assert held.stopped_by_waiting() == (
        "1 of 1 partitions are not read, because 2 records wait for a retry, with 2 bytes; reading "
        "stops at max_waiting=2 or max_waiting_bytes=67108864, and resumes below half of both; "
        "the last one failed with ValueError: " + "no" * 100
    )


def test_what_was_deleted_upstream_is_a_dead_letter_of_its_own():
    held = holder()
    read(held, 0)
    assert held.skip_lost(KEY, 10, 0, keep=True) == 9
    (letter,) = held.take_dying()
    assert letter.failure == Failure(
        "LostUpstream", "offsets 1 to 9 were deleted before they were read"
    )
    held.ack(held.take(1, 0)[0])
    assert committed(held) == [1]
    held.letter_stored(letter)
    assert committed(held) == [10]
    assert held.skip_lost(KEY, 12, 0, keep=False) == 2
    assert committed(held) == [12]
    assert held.counts.lost == 11


def test_a_range_that_is_passed_over_is_not_done_before_its_letter_is_kept():
    """The next start may be one that reads it: without max_offset_behind, or from another end."""
    held = holder()
    read(held, 0, 1, 2)
    first, failing, third = held.take(3, 0)
    held.ack(first)
    held.ack(third)
    held.fail(failing, NO, 0)
    assert held.skip_lost(KEY, 10, 0, keep=True) == 7
    (letter,) = held.take_dying()
    read(held, 10, 11)
    for record in held.take(2, 0):
        held.ack(record)
    again = restarted(held)
    assert read(again, *range(1, 12)) == 8
    taken = again.take(20, 0)
    assert offsets(taken) == [1, *range(3, 10)]
    assert taken[0].attempt == 1
    held.letter_stored(letter)
    assert read(restarted(held), *range(1, 12)) == 1


def holes_of(*undone, n):
    """A commit by which n records were read, and some of them are not done."""
    held = holder()
    read(held, *range(n))
    for record in held.take(n, 0):
        if record.offset not in undone:
            held.ack(record)
    (sent,) = held.commits()
    return sent.commit


def test_of_what_was_deleted_only_what_was_not_done_is_lost():
    """A poison head with thousands done behind it, and all of that deleted."""
    held = holder(*holes_of(0, 2000, 2001, n=5000), generation=2)
    assert held.skip_lost(KEY, 5010, 0, keep=True) == 13
    (letter,) = held.take_dying()
    assert letter.record.offset == 0
    assert letter.failure.message == (
        "offsets 0, 2000 to 2001, 5000 to 5009 were deleted before they were read"
    )
    # Nor does a restart before the letter is kept make more of it.
    again = restarted(held, 3)
    assert again.skip_lost(KEY, 5010, 0, keep=True) == 13
    assert again.take_dying()[0].failure == letter.failure
    held.letter_stored(letter)
    assert committed(held) == [5010]
    assert held.counts.lost == 13


def test_one_that_is_lost_above_records_in_flight_makes_none_of_them_done():
    held = holder()
    read(held, 0, 1, 2, 3, 4, 5)
    taken = held.take(6, 0)
    held.ack(taken[1])
    assert held.skip_lost(KEY, 7, 0, keep=True) == 1
    again = restarted(held)
    read(again, *range(9))
    assert offsets(again.take(9, 0)) == [0, 2, 3, 4, 5, 6, 7, 8]
    held.fail(taken[2], NO, 0)
    assert committed(held) == [0]


def test_a_letter_names_some_of_many_ranges_and_counts_all():
    held = holder(*holes_of(*range(0, 100, 2), n=100), generation=2)
    assert held.skip_lost(KEY, 99, 0, keep=True) == 50
    (letter,) = held.take_dying()
    named = ", ".join(str(offset) for offset in range(0, 40, 2))
    assert letter.failure.message.startswith(f"offsets {named} and more up to 98, 50 in all, were")
    assert held.skip_lost(KEY, 99, 0, keep=True) == 0


def test_retries_are_handed_out_while_nothing_more_is_read():
    """Storm: retries are emitted though as many as may be are not committed."""
    held = holder(limits=Limits(in_flight=4, waiting=2, ahead=4))
    read(held, 0, 1, 2, 3)
    taken = held.take(4, 0)
    for record in taken[:2]:
        held.fail(record, NO, 0)
    assert held.pauses() == ([KEY], [])
    assert sorted(offsets(held.take(9, 1000))) == [0, 1]
    # What is acked and not committed, behind one that is out, takes none of the room.
    wide = holder(limits=Limits(in_flight=4, ahead=4))
    read(wide, 0, 1, 2, 3)
    for record in wide.take(4, 0)[1:]:
        wide.ack(record)
    assert wide.pauses() == ([], [])
    read(wide, 4, 5)
    assert offsets(wide.take(9, 0)) == [4, 5]
    assert committed(wide) == [0]


def test_a_poison_record_at_the_head_keeps_nothing_of_what_is_done_behind_it():
    """F15: 50,000 records are behind it; after a restart it alone runs again."""
    n, step = 50_000, 5_000
    held = holder(max_attempts=1000)
    for first in range(0, n, step):
        read(held, *range(first, first + step), now=first)
        for record in held.take(step + 1, first):
            if record.offset:
                held.ack(record)
            else:
                held.fail(record, NO, first)
    found = held._partitions[KEY]
    assert len(found.held) == 1
    assert found.tracker.nbytes < 1 << 18
    (one,) = held.commits()
    assert one.commit.offset == 0
    assert len(one.commit.metadata) < 100
    again = holder(*one.commit, generation=2)
    assert [read(again, *range(n0, n0 + step)) for n0 in (0, n - step)] == [1, 0]


def test_the_age_of_the_oldest():
    held = holder()
    read(held, 0, now=1000)
    read(held, 1, now=3000)
    first, _ = held.take(2, 3000)
    assert held.partition_stats(4000, {})[0].oldest_s == 3.0
    held.ack(first)
    assert held.partition_stats(4000, {})[0].oldest_s == 1.0


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
    (stats,) = held.partition_stats(0, {})
    assert (stats.fresh, stats.out, stats.waiting, stats.bytes) == (0, 0, 0, 0)
    assert committed(held) == [2]


def test_an_ack_after_the_time_out_counts_until_the_next_delivery_and_a_fail_does_not():
    held = holder(timeout_ms=100)
    read(held, 0, 1)
    first, second = held.take(2, 0)
    held.expire(100)
    assert held.counts.timed_out == 2
    assert not held.fail(second, NO, 100, final=True)  # the time-out was a failure already
    assert held.ack(first)
    (again,) = held.take(2, 5000)
    assert not held.ack(second)
    assert held.ack(again)


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
    held.forget([KEY])
    held.expire(1000)
    assert len(held._taken_at) == 0


def test_a_record_behind_one_of_its_key_that_fails_waits_and_other_keys_go_on():
    held = holder(ordered_by="key", max_attempts=2)
    named = zip(records(0, 1, 2, 3, 4), [b"a", b"a", b"b", None, None], strict=True)
    held.read(KEY, [record._replace(key=key) for record, key in named], [1] * 5, 0)
    first, *others = held.take(9, 0)
    assert offsets([first, *others]) == [0, 2, 3, 4]
    held.fail(first, NO, 0)
    assert held.take(9, 0) == []
    (first,) = held.take(9, 1000)
    assert (first.offset, first.attempt) == (0, 1)
    held.fail(first, NO, 1000)
    assert held.take(9, 99_999) == []  # its letter is not kept yet
    assert held.letter_stored(*held.take_dying())
    assert offsets(held.take(9, 99_999)) == [1]


def test_a_letter_of_a_record_before_a_seek_is_not_asked_for():
    """Without dead letters it would end the consumer."""
    held = holder()
    read(held, 0)
    held.fail(*held.take(1, 0), NO, 0, final=True)
    held.seek(KEY, 0)
    assert held.take_dying() == []
    assert not held.seek(("t", 1), 0)
    held.close([KEY])
    assert not held.seek(KEY, 0)


def test_metadata_that_is_refused_down_to_nothing_is_committed_without_any():
    held = holder()
    read(held, *range(4000))
    for record in held.take(4000, 0)[1::7]:
        held.ack(record)
    sizes = []
    assert not held.metadata_too_large("")
    while held.metadata_too_large((one := held.commits()[0]).commit.metadata):
        assert decode_metadata(*KEY, *one.commit).state.committable == one.commit.offset == 0
        sizes.append(len(one.commit.metadata))
    assert one.commit == (0, "")
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    held.commit_confirmed(one)
    assert held.commits() == []


def test_a_record_that_dies_as_it_is_read_holds_up_those_of_its_key():
    held = holder(ordered_by="key")
    some = [record._replace(key=b"a") for record in records(0, 1, 2, 3, 4)]
    held.read(KEY, some, [1] * 5, 0, {0: NO, 2: NO})
    letters = held.take_dying()
    assert held.take(9, 0) == []
    assert held.letter_stored(letters[1])
    assert held.take(9, 0) == []
    assert held.letter_stored(letters[0])
    for offset in (1, 3, 4):
        (record,) = held.take(9, 0)
        assert record.offset == offset
        held.ack(record)
    assert committed(held) == [5]


def test_a_partition_that_was_sought_in_is_not_idle():
    """An idle one would be read where its log is another one, in place of the offset sought."""
    held = holder()
    assert held.is_idle(KEY)
    held.seek(KEY, 3)
    assert not held.is_idle(KEY)


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
