"""Where a partition begins, and how much of it is taken."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore import OffsetTracker
from ackcore.kafka import KafkaSpout
from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.ranges import OffsetRange
from ackcore.offsets import encode_metadata
from ackcore.spark.kafka.plans import Position, shares
from ackcore.spark.kafka.spout_starts import PartitionFacts, Start, decide


def spout(**settings):
    return KafkaSpout("t", bootstrap_servers="nowhere:1", group_id="g", **settings)


def first(low=10, high=100, **known):
    return PartitionFacts("t", 0, low, high, is_first=True, **known)


def later(next_, low=10, high=100, **known):
    return PartitionFacts("t", 0, low, high, Position(next_, high, "earliest"), **known)


@pytest.mark.parametrize(
    ("settings", "found", "start"),
    [
        ({"start": "earliest"}, first(), Start(10, "earliest")),
        ({"start": "latest"}, first(), Start(100, "latest")),
        ({"start": {("t", 0): 50}}, first(), Start(50, "explicit")),
        ({"start": {("t", 0): 999}}, first(), Start(100, "out of range")),
        ({"start": {("t", 1): 50}}, first(), Start(10, "earliest")),
        ({"start": datetime(2026, 1, 1, tzinfo=UTC)}, first(of_time=30), Start(30, "timestamp")),
        ({"start": datetime(2026, 1, 1, tzinfo=UTC)}, first(), Start(100, "timestamp")),
        ({}, first(), Start(10, "earliest")),
        ({}, first(committed=(40, None)), Start(40, "group")),
        ({}, first(committed=(40, "of another kind")), Start(40, "group")),
        ({}, first(committed=(400, None)), Start(10, "out of range")),
        ({"start": "latest"}, PartitionFacts("t", 0, 10, 100), Start(10, "new partition")),
        ({}, later(50), None),
        ({}, later(100), None),
        ({}, later(101), Start(10, "out of range")),
        ({}, later(101, is_same=True), Start(100, "truncated")),
        ({}, later(50, is_other=True), Start(10, "topic created again")),
        ({}, later(50, other_from=30), Start(30, "truncated")),
        ({}, later(101, is_same=True, other_from=30), Start(30, "truncated")),
        ({"max_offset_behind": 1}, later(50), None),
        ({"max_offset_behind": 90}, first(), Start(10, "earliest")),
    ],
)
def test_a_partition_begins(settings, found, start):
    assert decide(spout(**settings), found) == start


def ranges(start):
    return [(one.range.start, one.range.stop, one.kind) for one in start.gone]


@pytest.mark.parametrize("found", [later(4), first(committed=(4, None))], ids=["known", "group"])
def test_what_was_deleted_is_lost_upstream(found):
    start = decide(spout(), found)
    assert start[:3] == (10, "out of range", ())
    ((range_, kind, _),) = start.gone
    assert (range_, kind) == (OffsetRange("t", 0, 4, 10), "LostUpstream")
    assert start.gone[0].message.startswith("offsets 4 to 9 of t-0: lost upstream")


def test_what_is_too_far_behind_is_not_read():
    start = decide(spout(max_offset_behind=20), first())
    assert start[:3] == (80, "earliest", ())
    assert ranges(start) == [(10, 80, "TooFarBehind")]


@pytest.mark.parametrize(
    ("low", "committed", "found"),
    [
        (10, 4, [(4, 10, "LostUpstream"), (10, 80, "TooFarBehind")]),
        (10, 400, [(10, 80, "TooFarBehind")]),  # beyond the end: from the first on
        (90, 4, [(4, 90, "LostUpstream")]),
    ],
)
def test_what_is_too_far_behind_is_not_read_where_the_start_was_out_of_range(low, committed, found):
    start = decide(spout(max_offset_behind=20), first(low=low, committed=(committed, None)))
    assert start[:3] == (max(low, 80), "out of range", ())
    assert ranges(start) == found


def test_holes_that_are_too_far_behind_are_not_read():
    tracker = OffsetTracker("t", 0, 0, 20)
    tracker.emitted(np.arange(20, 90))
    tracker.acked(np.setdiff1d(np.arange(20, 90), [20, 21, 79, 80]))
    commit = encode_metadata(tracker, 7)
    start = decide(spout(max_offset_behind=20), first(committed=tuple(commit)))
    assert start[:3] == (90, "group", (OffsetRange("t", 0, 80, 81),))
    assert ranges(start) == [(20, 22, "TooFarBehind"), (79, 80, "TooFarBehind")]


def test_a_group_goes_on_with_its_holes():
    tracker = OffsetTracker("t", 0, 0, 20)
    tracker.emitted(np.arange(20, 30))
    tracker.acked(np.array([20, 21, 24, 25, 28]))
    tracker.failed(np.array([27]))  # by a consumer
    tracker.emitted(np.array([27]))
    commit = encode_metadata(tracker, CommitOrigin.of("one", "a checkpoint").deployment)
    start = decide(spout(), first(committed=tuple(commit)))
    assert (start.next, start.why) == (29, "group")
    assert start.holes == (OffsetRange("t", 0, 22, 24), OffsetRange("t", 0, 26, 28))
    # Of what was deleted meanwhile only what was not done is lost.
    at = first(low=27, committed=tuple(commit))
    assert decide(spout(), at)[:3] == (29, "out of range", (OffsetRange("t", 0, 27, 28),))
    assert ranges(decide(spout(), at)) == [(22, 24, "LostUpstream"), (26, 27, "LostUpstream")]
    at = first(low=40, committed=tuple(commit))
    assert decide(spout(), at)[:3] == (40, "out of range", ())
    assert [one[:2] for one in ranges(decide(spout(), at))] == [(22, 24), (26, 28), (29, 40)]
    # A log that ends below was truncated, or is another one: what above the offset was done of it
    # may be other records now, and where nobody says which topic it is, all may be.
    at = first(high=25, committed=tuple(commit))
    assert decide(spout(), at._replace(topic_id="one")) == Start(22, "group")
    assert decide(spout(), at) == Start(10, "out of range")
    assert decide(spout(), at._replace(topic_id="two")) == Start(10, "topic created again")


@pytest.mark.parametrize(
    ("deployment", "topic_id", "start"),
    [
        (CommitOrigin.of("one", "a checkpoint").deployment, "one", Start(40, "group")),
        (
            CommitOrigin.of("one", "a checkpoint").deployment,
            "two",
            Start(10, "topic created again"),
        ),
        (CommitOrigin.of("one", "a checkpoint").deployment, None, Start(40, "group")),
        (CommitOrigin.of(None, "a checkpoint").deployment, "two", Start(40, "group")),
        (7, "two", Start(40, "group")),  # as checkpoints committed before they named topics
    ],
)
def test_a_group_has_nothing_done_of_a_topic_that_was_made_anew_since(deployment, topic_id, start):
    commit = encode_metadata(OffsetTracker("t", 0, 0, 40), deployment)
    assert decide(spout(), first(committed=tuple(commit), topic_id=topic_id)) == start


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 50)).map(
        lambda found: {("t", p): n for p, n in found.items()}
    ),
    st.integers(0, 200),
)
def test_shares_are_even_and_leave_nobody_out(waiting, most):
    found = shares(waiting, most)
    there = {each: n for each, n in waiting.items() if n}
    assert found.keys() == there.keys()
    assert all(1 <= n <= there[each] for each, n in found.items())
    assert sum(found.values()) <= max(most, len(there))
    assert sum(found.values()) >= min(most, sum(there.values()))
    # Who has less than another has all of his.
    least = min((n for each, n in found.items() if n < there[each]), default=None)
    assert least is None or all(n <= least + 1 for n in found.values())


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 50)).map(
        lambda found: {("t", p): n for p, n in found.items()}
    ),
    st.integers(0, 200),
    st.integers(0, 200),
)
def test_no_more_is_taken_than_may_fail(waiting, most, room):
    """Where not even one of each may, as many have one; else it changes nothing."""
    found = shares(waiting, most, room)
    there = {each: n for each, n in waiting.items() if n}
    assert sum(found.values()) <= room
    assert all(1 <= n <= there[each] for each, n in found.items())
    if room >= len(there):
        assert found == shares(waiting, min(most, room), after=("t", 3))
    else:
        assert sum(found.values()) == room


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=5, max_size=5), st.integers(1, 6)),
        min_size=6,
        max_size=40,
    )
)
def test_no_partition_that_has_records_waits_longer_than_there_are_partitions(steps):
    """However little room there is, if there is some, and whatever comes meanwhile."""
    waiting = {("t", p): 0 for p in range(5)}
    passed_over = dict.fromkeys(waiting, 0)
    after = None
    for coming, room in steps:
        for each, n in zip(waiting, coming, strict=True):
            waiting[each] += n
        found = shares(waiting, 100, room, after)
        after = next(reversed(found), after)
        for each, n in waiting.items():
            passed_over[each] = passed_over[each] + 1 if n and each not in found else 0
            waiting[each] -= found.get(each, 0)
        assert max(passed_over.values()) < len(waiting)
