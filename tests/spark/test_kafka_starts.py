"""Where a partition begins, and how much of it is taken."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from datetime import UTC, datetime
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from ackcore import OffsetTracker
from ackcore.kafka import KafkaSpout, OffsetRange
from ackcore.kafka.cluster import (
    Answers,
    ClusterFailed,
    Failure,
    Partition,
    UnknownTopics,
    Watermarks,
)
from ackcore.kafka.origins import Origin
from ackcore.offsets import encode_metadata
from ackcore.spark.kafka import offsets
from ackcore.spark.kafka.offsets import OffsetsRefused, SpoutOffsets
from ackcore.spark.kafka.plans import OffsetPlan, Position
from ackcore.spark.kafka.sources import KafkaSources
from ackcore.spark.kafka.starts import Found, Start, decide, shares
from ackcore.spark.stream import Stream
from ackcore.spark.tasks.record_ids import Tried


def spout(**settings):
    return KafkaSpout("t", bootstrap_servers="nowhere:1", group_id="g", **settings)


def first(low=10, high=100, **known):
    return Found("t", 0, low, high, is_first=True, **known)


def later(next_, low=10, high=100, **known):
    return Found("t", 0, low, high, Position(next_, high, "earliest"), **known)


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
        ({"start": "latest"}, Found("t", 0, 10, 100), Start(10, "new partition")),
        ({}, later(50), None),
        ({}, later(100), None),
        ({}, later(101), Start(10, "out of range")),
        ({}, later(101, is_same=True), Start(100, "truncated")),
        ({}, later(50, is_other=True), Start(10, "topic made anew")),
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
    tracker.failed(np.array([20]))
    tracker.emitted(np.array([20]))
    tracker.acked(np.setdiff1d(np.arange(20, 90), [20, 21, 79, 80]))
    commit = encode_metadata(tracker, 7)
    start = decide(spout(max_offset_behind=20), first(committed=tuple(commit)))
    assert start[:3] == (90, "group", (OffsetRange("t", 0, 80, 81),))
    assert ranges(start) == [(20, 22, "TooFarBehind"), (79, 80, "TooFarBehind")]
    assert start.tried == ()


def test_a_group_goes_on_with_its_holes():
    tracker = OffsetTracker("t", 0, 0, 20)
    tracker.emitted(np.arange(20, 30))
    tracker.acked(np.array([20, 21, 24, 25, 28]))
    for offset in (27, 29, 29):
        tracker.failed(np.array([offset]))
        tracker.emitted(np.array([offset]))
    commit = encode_metadata(tracker, Origin.of("one", "a checkpoint").deployment)
    start = decide(spout(), first(committed=tuple(commit)))
    assert (start.next, start.why) == (29, "group")
    assert start.holes == (OffsetRange("t", 0, 22, 24), OffsetRange("t", 0, 26, 28))
    assert start.tried == (Tried("t", 0, 27, 1), Tried("t", 0, 29, 2))
    # Of what was deleted meanwhile only what was not done is lost.
    at = first(low=27, committed=tuple(commit))
    assert decide(spout(), at)[:3] == (
        29,
        "out of range",
        (OffsetRange("t", 0, 27, 28),),
    )
    assert ranges(decide(spout(), at)) == [
        (22, 24, "LostUpstream"),
        (26, 27, "LostUpstream"),
    ]
    at = first(low=40, committed=tuple(commit))
    assert decide(spout(), at)[:3] == (40, "out of range", ())
    assert [one[:2] for one in ranges(decide(spout(), at))] == [(22, 24), (26, 28), (29, 40)]
    # A log that ends below was truncated, or is another one: what above the offset was done of it
    # may be other records now, and where nobody says which topic it is, all may be.
    at = first(high=25, committed=tuple(commit))
    assert decide(spout(), at._replace(topic_id="one")) == Start(22, "group")
    assert decide(spout(), at) == Start(10, "out of range")
    assert decide(spout(), at._replace(topic_id="two")) == Start(10, "topic made anew")


@pytest.mark.parametrize(
    ("deployment", "topic_id", "start"),
    [
        (Origin.of("one", "a checkpoint").deployment, "one", Start(40, "group")),
        (Origin.of("one", "a checkpoint").deployment, "two", Start(10, "topic made anew")),
        (Origin.of("one", "a checkpoint").deployment, None, Start(40, "group")),
        (Origin.of(None, "a checkpoint").deployment, "two", Start(40, "group")),
        (7, "two", Start(40, "group")),  # as checkpoints committed before they named topics
    ],
)
def test_a_group_has_nothing_done_of_a_topic_that_was_made_anew_since(deployment, topic_id, start):
    commit = encode_metadata(OffsetTracker("t", 0, 0, 40), deployment)
    assert decide(spout(), first(committed=tuple(commit), topic_id=topic_id)) == start


def test_what_failed_before_goes_on_with_its_attempts_when_it_is_taken():
    tried = Tried("t", 0, 3, 2), Tried("t", 0, 9, 1), Tried("t", 1, 3, 5)
    plan = OffsetPlan({"t": {0: Position(5, 20, "group")}}, tried=tried)
    assert plan.untaken() == plan.carried().tried == tried[1:2]
    assert OffsetPlan.of(json.loads(json.dumps(plan.body()))) == plan


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
    """Where not even one of each may, those furthest behind are taken; else it changes nothing."""
    found = shares(waiting, most, room)
    there = {each: n for each, n in waiting.items() if n}
    assert sum(found.values()) <= room
    assert all(1 <= n <= there[each] for each, n in found.items())
    if room >= len(there):
        assert found == shares(waiting, min(most, room))
    else:
        assert sum(found.values()) == room
        left = [n for each, n in there.items() if each not in found]
        assert all(there[each] >= max(left) for each in found)


class Cluster:
    """A Kafka that is made up: partitions of topic t by their first offset and their end."""

    def __init__(self, *marks):
        self.marks = {("t", p): mark for p, mark in enumerate(marks)}
        self.epochs = {}
        self.told = {}
        self.down = False
        self.mute = set()
        self.topic_id = "one"

    def partitions(self, topics, pattern=None, missing_ok=False):
        self.refuse()
        if not self.marks and not missing_ok:
            raise UnknownTopics({"t": "deleted"})
        return [Partition(*each, self.topic_id) for each in self.marks]

    def watermarks(self, partitions):
        self.refuse()
        found = {each: Watermarks(*self.marks[each]) for each in partitions}
        for each, epoch in self.epochs.items():
            found[each].epoch = epoch
        return self.split(found)

    def committed(self, group, partitions):
        return self.split({each: self.told[each] for each in partitions if each in self.told})

    def offsets_for_time(self, partitions, ms):
        return self.split(dict.fromkeys(partitions, 3))

    def commit(self, group, commits):
        answers = self.split(commits)
        self.told.update(answers.found)
        return answers

    def split(self, found):
        """Part what is asked of partitions that answer from that of those that are mute."""
        failure = Failure("NOT_LEADER_FOR_PARTITION", "no leader", True)
        good = {each: one for each, one in found.items() if each[1] not in self.mute}
        return Answers(good, dict.fromkeys(found.keys() - good.keys(), failure))

    def refuse(self):
        if self.down:
            raise ClusterFailed("no broker")


@pytest.fixture
def of(monkeypatch):
    """``of(cluster, **settings)`` makes a spout's offsets."""

    def of(cluster, **settings):
        monkeypatch.setattr(offsets, "Cluster", lambda client: cluster)
        return SpoutOffsets("s", spout(**settings), 7)

    return of


def taken(plan):
    return [tuple(one[1:]) for some in plan.tasks for one in some]


def test_a_plan_goes_on_where_the_one_before_ended(of):
    cluster = Cluster((0, 5), (0, 1))
    it = of(cluster, max_records=4)
    first = it.plan(None, 2, bounded=True)
    assert taken(first) == [(0, 0, 3), (1, 0, 1)]
    it.commit(first, [])
    assert it.has_new()
    cluster.marks["t", 0] = (0, 6)
    second = it.plan(OffsetPlan.of(first.body()), 2, bounded=True)
    assert taken(second) == [(0, 3, 6)]
    assert it.has_new()  # until it is done
    it.commit(second, [])
    assert not it.has_new()
    cluster.marks["t", 2] = (0, 1)  # a new partition
    it._refresh_at = 0
    assert it.has_new()
    assert taken(it.plan(second, 2, bounded=True)) == [(2, 0, 1)]


def test_a_log_that_was_truncated_and_filled_up_again_is_read_from_there(of, monkeypatch, caplog):
    """Brokers are asked when the leader is another one, and not before."""
    cluster, asked = Cluster((0, 10), (0, 10)), []

    def truncated_at(client, partition, low, position, epoch):
        asked.append((partition, low, position, epoch))
        return 4 if len(asked) == 1 else None

    monkeypatch.setattr(offsets, "truncated_at", truncated_at)
    it = of(cluster)
    cluster.epochs = {("t", 0): 3}
    first = it.plan(None, 2, bounded=True)
    it.commit(first, [])
    assert OffsetPlan.of(json.loads(json.dumps(first.body()))) == first
    assert not it.has_new()
    cluster.epochs = {("t", 0): 5, ("t", 1): 1}  # of the second none was known
    assert it.has_new()
    second = it.plan(OffsetPlan.of(first.body()), 2, bounded=True)
    assert asked == [(("t", 0), 0, 10, 3)]
    assert taken(second) == [(0, 4, 10)]
    assert "t-0 begins at offset 4, truncated" in caplog.text
    it.commit(second, [])
    assert not it.has_new()
    assert taken(it.plan(second, 2, bounded=True)) == []
    # One that ends below where it was read is asked for what it has.
    cluster.epochs["t", 0], cluster.marks["t", 0] = 6, (0, 8)
    it.plan(second, 2, bounded=True)
    assert asked[1:] == [(("t", 0), 0, 8, 5)]


def test_a_leader_that_does_not_say_whether_it_has_what_was_read_is_asked_again(of, monkeypatch):
    def silent(*_):
        raise ConnectionError("nobody says in time")

    monkeypatch.setattr(offsets, "truncated_at", silent)
    cluster = Cluster((0, 10))
    it = of(cluster)
    cluster.epochs = {("t", 0): 3}
    first = it.plan(None, 1, bounded=True)
    cluster.epochs, cluster.marks["t", 0] = {("t", 0): 4}, (0, 20)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == []
    monkeypatch.setattr(offsets, "truncated_at", lambda *_: None)
    assert taken(it.plan(second, 1, bounded=True)) == [(0, 10, 20)]


def test_what_comes_after_it_began_is_not_taken_where_it_ends(of):
    cluster = Cluster((0, 2))
    it = of(cluster)
    it.end_here()
    cluster.marks["t", 0] = (0, 9)
    assert not it.is_through
    plan = it.plan(None, 2, bounded=True)
    assert taken(plan) == [(0, 0, 2)]
    assert not it.is_through
    it.commit(plan, [])
    assert it.is_through


def test_without_kafka_the_plan_is_to_take_nothing(of, caplog):
    cluster = Cluster((0, 5))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    cluster.marks["t", 0] = (0, 9)
    cluster.down = True
    second = it.plan(first, 1, bounded=True)
    assert (second.tasks, second.positions) == ((), first.positions)
    assert "this micro-batch has none: no broker" in caplog.text
    cluster.down = False
    assert taken(it.plan(second, 1, bounded=True)) == [(0, 5, 9)]


def test_a_partition_without_a_leader_holds_nothing_up(of):
    cluster = Cluster((0, 5), (0, 5))
    it = of(cluster)
    cluster.mute = {1}
    with pytest.raises(ConnectionError, match="where partitions begin and end: of t-1, no leader"):
        it.plan(None, 1, bounded=True)  # where it begins would be another decision later
    with pytest.raises(ConnectionError, match="no leader"):
        it.end_here()
    cluster.mute = set()
    first = it.plan(None, 1, bounded=True)
    cluster.marks = dict.fromkeys(cluster.marks, (0, 9))
    cluster.mute = {1}
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == [(0, 5, 9)]
    cluster.mute = {0, 1}
    assert it.plan(second, 1, bounded=True).positions == second.positions
    cluster.mute = set()
    assert taken(it.plan(second, 1, bounded=True)) == [(1, 5, 9)]


@pytest.mark.parametrize("change", ["no answer", "another leader"])
def test_partitions_are_looked_for_at_once_where_something_has_changed(of, change):
    """And not only when `refresh_s` has passed."""
    cluster = Cluster((0, 5), (0, 5))
    cluster.epochs = {("t", 0): 3}
    it = of(cluster, refresh_s=3600)
    it.commit(it.plan(None, 1, bounded=True), [])
    cluster.marks["t", 2] = (0, 5)
    assert not it.has_new()
    if change == "no answer":
        cluster.mute = {1}
    else:
        cluster.epochs = {("t", 0): 4}
    it.has_new()
    cluster.mute = set()
    it.has_new()
    assert it.partitions == [("t", 0), ("t", 1), ("t", 2)]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "group"), ({"start": datetime(2026, 1, 1, tzinfo=UTC)}, "timestamp")],
)
def test_where_it_begins_is_asked_of_all(of, settings, why):
    cluster = Cluster((0, 5), (0, 5))
    it = of(cluster, **settings)
    cluster.told = dict.fromkeys(cluster.marks, (3, ""))
    cluster.mute = {1}
    with pytest.raises(ConnectionError, match="of t-1, no leader"):
        it._starts(None, cluster.marks)
    cluster.mute = set()
    assert set(it._starts(None, cluster.marks).values()) == {Start(3, why)}


def test_lost_offsets_are_one_record_that_dies(of, caplog):
    cluster = Cluster((0, 5))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    cluster.marks["t", 0] = (8, 9)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == [(0, 8, 9)]
    assert second.lost == (OffsetRange("t", 0, 5, 8),)
    ((topic, partition, start, stop, reason),) = second.refused
    assert (topic, partition, start, stop) == ("t", 0, 5, 8)
    assert "LostUpstream" in reason
    assert caplog.records[-1].levelno == logging.WARNING
    with pytest.raises(OffsetsRefused, match="would begin at offset 8, offsets 5 to 7 of t-0"):
        of(cluster, lost="refuse").plan(first, 1, bounded=True)


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(of):
    cluster = Cluster((0, 5))
    first = of(cluster).plan(None, 1, bounded=True)
    cluster.topic_id = "two"
    second = of(cluster).plan(first, 1, bounded=True)
    assert taken(second) == [(0, 0, 5)]
    assert second.positions["t"][0].began == "topic made anew"
    assert second.topic_ids == {"t": "two"}


def test_a_group_is_not_told_of_a_topic_what_is_done_of_the_one_before(of, caplog):
    """Not by a driver that begins, nor after a micro-batch; another checkpoint reads all of it."""
    cluster = Cluster((0, 5))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    it.commit(first, [])
    told = dict(cluster.told)
    cluster.told.clear()  # as brokers do, with the topic
    cluster.topic_id, cluster.marks["t", 0] = "two", (0, 9)
    for again in (it, of(cluster, lost="refuse")):
        again._refresh_at = 0
        again._refresh()
        assert again.commit(first, []) == 0
        assert not cluster.told
    with pytest.raises(OffsetsRefused, match="checkpoint of its own"):
        of(cluster, lost="refuse").plan(first, 1, bounded=True)
    cluster.told = told  # it had crossed the deletion
    other = of(cluster, lost="refuse")
    plan = other.plan(None, 1, bounded=True)
    assert taken(plan) == [(0, 0, 9)]
    assert "t-0 begins at offset 0, topic made anew" in caplog.text
    other.commit(plan, [])
    assert cluster.told["t", 0][0] == 9
    assert taken(of(cluster).plan(None, 1, bounded=True)) == []


def test_a_topic_made_anew_is_read_whole_when_its_partitions_answer_late(of):
    cluster = Cluster((0, 100), (0, 100))
    first = of(cluster).plan(None, 1, bounded=True)
    cluster.topic_id = "two"
    cluster.mute = {1}
    it = of(cluster)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == [(0, 0, 100)]
    cluster.mute = set()
    cluster.marks["t", 1] = (0, 150)
    third = it.plan(OffsetPlan.of(second.body()), 1, bounded=True)
    assert taken(third) == [(1, 0, 150)]
    assert third.positions["t"][1].began == "new partition"


def test_a_topic_made_anew_of_which_nothing_answers_is_known_to_be_later(of):
    cluster = Cluster((0, 100))
    first = of(cluster).plan(None, 1, bounded=True)
    cluster.topic_id = "two"
    cluster.mute = {0}
    cluster.marks["u", 1] = (0, 1)  # of another topic, that answers
    it = of(cluster)
    second = it.plan(first, 1, bounded=True)
    assert second.topic_ids["t"] == "one"
    cluster.mute = set()
    third = it.plan(second, 1, bounded=True)
    assert taken(third) == [(0, 0, 100)]
    assert third.positions["t"][0].began == "topic made anew"


@pytest.mark.parametrize("max_waiting", [0, 10])
def test_a_replay_that_waits_for_its_turn_shrinks_nothing(of, max_waiting):
    """Nor does a limit of none, while none waits."""
    one = of(Cluster((0, 5)), max_records=3)
    plan = SimpleNamespace(offsets={"s": one.plan(None, 1, bounded=True).body()})
    spark = SimpleNamespace(createDataFrame=lambda *_: None)
    sources = KafkaSources({"s": one}, spark, False, max_waiting)
    waiting = SimpleNamespace(rows=lambda: 100, untried=100, tables=lambda _: [])
    decision = SimpleNamespace(waiting=waiting, counts={"retried": 0})
    assert sources.done(plan, decision) == {"s": 2}
    assert one.intake.most == 3


def test_a_cluster_that_is_away_silences_no_other(of, caplog):
    clusters = [Cluster((0, 5)), Cluster((0, 5))]
    one, other = map(of, clusters)
    spark = SimpleNamespace(createDataFrame=lambda *_: None)
    sources = KafkaSources({"one": one, "other": other}, spark, False, 9)
    clusters[0].down = True
    for _ in range(2):
        assert sources.has_new()
    assert caplog.text.count("spout one: Kafka cannot be asked for new records: no broker") == 1
    other.commit(other.plan(None, 1, bounded=True), [])
    assert not sources.has_new()
    clusters[1].down = True
    with pytest.raises(ClusterFailed, match="no broker"):
        sources.has_new()
    for each in clusters:
        each.down = False
    assert sources.has_new()


@pytest.mark.parametrize(("topic_id", "taken_then"), [("one", []), ("two", [(0, 0, 98)])])
def test_a_partition_that_ends_below_what_was_read_has_a_micro_batch(of, topic_id, taken_then):
    """Not only when it is as long again, and what came first would be passed over."""
    cluster = Cluster((0, 100))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    it.commit(first, [])
    assert not it.has_new()
    cluster.marks["t", 0] = (0, 98)
    cluster.topic_id = topic_id
    it._refresh_at = 0
    assert it.has_new()
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == taken_then
    it.commit(second, [])
    assert not it.has_new()
    cluster.marks["t", 0] = (0, 130)
    assert it.has_new()
    assert taken(it.plan(second, 1, bounded=True)) == [(0, 98, 130)]


def test_a_topic_made_anew_of_the_same_length_has_a_micro_batch(of):
    cluster = Cluster((0, 5))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    it.commit(first, [])
    cluster.topic_id = "two"
    it._refresh_at = 0
    ends = it.ends()
    assert it.has_new()
    assert not it.reaching(ends)()
    second = it.plan(first, 1, bounded=True)
    it.commit(second, [])
    assert it.reaching(ends)()
    assert not it.has_new()


def test_a_truncated_partition_goes_on_at_its_end(of):
    cluster = Cluster((0, 100))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    cluster.marks["t", 0] = (0, 98)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == []
    assert second.positions["t"][0] == Position(98, 98, "truncated")
    with pytest.raises(OffsetsRefused, match="would begin at offset 98, truncated"):
        of(cluster, lost="refuse").plan(first, 1, bounded=True)
    # One that was made anew since its id was asked for is not taken for it.
    cluster.topic_id = "two"
    assert it.plan(first, 1, bounded=True).positions["t"][0] == Position(98, 98, "topic made anew")


@pytest.mark.parametrize("named", [{"topics": "t"}, {"topics": None, "pattern": "t"}])
def test_a_topic_that_goes_is_warned_of_once_whenever_it_goes(mock_kafka, named, caplog):
    """Deleted, or closed to the user; nothing is read of it any more, and nobody would know."""
    mock_kafka.create_topic("t")
    settings = KafkaSpout(bootstrap_servers=mock_kafka.bootstrap_servers, **named)
    with closing(SpoutOffsets("s", settings, 7)) as it:

        def warned():
            for _ in range(2):
                it._refresh_at = 0.0
                it._refresh()
            found = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
            caplog.clear()
            return found

        assert warned() == []
        mock_kafka.topic_set_error("t", 29)  # TOPIC_AUTHORIZATION_FAILED
        (said,) = warned()
        assert said.startswith("spout s reads nothing new of a topic that is gone or closed to it")
        assert "'t' (Broker: Topic authorization failed " in said
        assert it.partitions == []
        mock_kafka.topic_set_error("t", 0)
        assert warned() == []
        assert it.partitions == [("t", 0)]
        mock_kafka.delete_topic("t")
        (said,) = warned()
        assert "'t' (Broker: Unknown topic or partition " in said


def test_a_topic_that_was_deleted_ends_nothing(of):
    cluster = Cluster((0, 5))
    it = of(cluster)
    plan = first = it.plan(None, 1, bounded=True)
    cluster.marks = {}
    for _ in range(3):
        it._refresh_at = 0
        plan = it.plan(plan, 1, bounded=True)
    assert (plan.tasks, plan.positions) == ((), first.positions)
    with pytest.raises(UnknownTopics):
        of(cluster)


@pytest.mark.parametrize("high", [2, 6])
def test_what_was_truncated_is_not_waited_for(of, high):
    cluster = Cluster((0, 10))
    it = of(cluster, max_records=4)
    it.end_here()
    first = it.plan(None, 1, bounded=True)
    cluster.marks["t", 0] = (0, high)
    second = it.plan(first, 1, bounded=True)
    it.commit(second, [])
    assert it.is_through


@pytest.mark.parametrize(("records", "pauses"), [(0, [0.5]), (3, [])])
def test_a_stream_that_is_behind_pauses_after_it_took_nothing(records, pauses):
    found = []
    leaving = SimpleNamespace(is_set=lambda: False, wait=found.append)
    stream = SimpleNamespace(
        _leaving=leaving,
        _engine=SimpleNamespace(next_due_ms=None, clock=int),
        _state=SimpleNamespace(pending_replays=list),
        _is_behind=lambda: True,
        _poll_s=0.5,
        recent=[SimpleNamespace(records=records)],
    )
    assert not Stream._wait_until_due(stream)
    assert found == pauses


def test_the_first_plan_without_kafka_may_be_tried_again(of):
    cluster = Cluster((0, 5))
    it = of(cluster)
    cluster.down = True
    with pytest.raises(ConnectionError, match="no broker"):
        it.plan(None, 1, bounded=True)


def test_a_commit_that_fails_is_repeated_with_the_next(of, caplog):
    cluster = Cluster((0, 5))
    it = of(cluster)
    first = it.plan(None, 1, bounded=True)
    cluster.mute = {0}
    for _ in range(2):
        assert it.commit(first, []) == 5
    assert caplog.text.count("of 1 partitions cannot be committed to group g") == 1
    cluster.mute = set()
    assert it.commit(first, []) == 0
    assert cluster.told["t", 0][0] == 5


def test_a_group_is_told_again_what_its_brokers_may_have_forgotten(of, monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(offsets.time, "monotonic", lambda: now.s)
    cluster = Cluster((0, 5))
    it = of(cluster)
    plan = it.plan(None, 1, bounded=True)
    for s, known in ((0, 1), (3599, 0), (3601, 1)):
        now.s = s
        it.commit(plan, [])
        assert len(cluster.told) == known
        cluster.told.clear()


def test_the_lag_of_what_no_group_was_told_is_from_where_it_began(of):
    cluster = Cluster((10, 1_000))
    it = of(cluster, start="latest")
    plan = None
    for high in (1_000, 1_005):
        cluster.marks["t", 0] = (10, high)
        cluster.mute = set()
        plan = it.plan(plan, 1, bounded=True)
        cluster.mute = {0}
        assert it.commit(plan, []) == high - 1_000


def test_the_end_of_a_query_is_what_is_raised_when_its_cluster_is_closed():
    def reaching_ends():
        closing.is_closed = closing.is_closed or closes
        raise AttributeError("_admin")

    closing = SimpleNamespace(is_closed=False, reaching_ends=reaching_ends)
    stream = SimpleNamespace(_offsets=closing)
    closes = False
    with pytest.raises(AttributeError):
        Stream._reaching_ends(stream)
    closes = True
    assert Stream._reaching_ends(stream) is None
    closing.reaching_ends = None
    assert Stream._reaching_ends(stream) is None


def test_more_tasks_than_partitions_are_told_of(of, caplog):
    of(Cluster((0, 5), (0, 5)), tasks=3)
    assert "spout s has 3 tasks and 2 partitions" in caplog.text
