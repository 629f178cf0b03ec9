"""The offsets that micro-batches take and their group's commits, on a fake Kafka."""

from __future__ import annotations

import json
import logging
from contextlib import closing
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from test_kafka_starts import spout

from ackcore.kafka import KafkaSpout
from ackcore.kafka.cluster import (
    ClusterFailed,
    Partition,
    PartitionAnswers,
    PartitionFailure,
    UnknownTopics,
    Watermarks,
)
from ackcore.kafka.ranges import OffsetRange
from ackcore.offsets import Commit
from ackcore.spark.kafka import spout_offsets
from ackcore.spark.kafka.kafka_spouts import KafkaSources
from ackcore.spark.kafka.plans import OffsetPlan, Position
from ackcore.spark.kafka.spout_offsets import OffsetsRefused, SpoutOffsets
from ackcore.spark.kafka.spout_starts import Start
from ackcore.spark.spark_stream import SparkStream


class Cluster:
    """A Kafka that is made up: partitions of topic t by their first offset and their end."""

    def __init__(self, *marks):
        self.marks = {("t", p): mark for p, mark in enumerate(marks)}
        self.epochs = {}
        self.open = {}  # the ends of logs with an open transaction
        self.told = {}
        self.down = False
        self.mute = set()
        self.failure = PartitionFailure("NOT_LEADER_FOR_PARTITION", "no leader")
        self.topic_id = "one"

    def partitions(self, topics, pattern=None, missing_ok=False):
        self.refuse()
        if not self.marks and not missing_ok:
            raise UnknownTopics({"t": "deleted"})
        return [Partition(*each, self.topic_id) for each in self.marks]

    def watermarks(self, partitions, positions=()):
        self.refuse()
        at = dict(positions)
        found = {each: Watermarks(*self.marks[each]) for each in partitions}
        for each, end in self.open.items():
            low, high = self.marks[each]
            found[each] = Watermarks(low, max(high, min(end, at.get(each, 0))))
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
        good = {each: one for each, one in found.items() if each[1] not in self.mute}
        return PartitionAnswers(good, dict.fromkeys(found.keys() - good.keys(), self.failure))

    def refuse(self):
        if self.down:
            raise ClusterFailed("no broker")


@pytest.fixture
def of(monkeypatch):
    """``of(cluster, **settings)`` makes a spout's offsets."""

    def of(cluster, **settings):
        monkeypatch.setattr(spout_offsets, "Cluster", lambda client: cluster)
        return SpoutOffsets("s", spout(**settings), 7)

    return of


@pytest.fixture
def begun(of):
    """``begun(*marks, **settings)`` makes a cluster, offsets of a spout, and their first plan."""

    def begun(*marks, **settings):
        cluster = Cluster(*marks)
        it = of(cluster, **settings)
        return cluster, it, it.plan(None, 1, bounded=True)

    return begun


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


@pytest.mark.parametrize("from_group", [True, False])
def test_a_position_within_an_open_transaction_waits_for_its_end(of, from_group):
    """Uncommitted records were read before: by this query, or by consumers of the group."""
    cluster = Cluster((0, 5))
    it, plan = of(cluster, lost="refuse"), None
    if from_group:
        cluster.told["t", 0] = Commit(5, "")
    else:
        plan = it.plan(None, 2, bounded=True)
        it.commit(plan, [])
    cluster.marks["t", 0], cluster.open = (0, 3), {("t", 0): 6}
    plan = it.plan(plan, 2, bounded=True)
    assert taken(plan) == []
    it.commit(plan, [])
    assert not it.has_new()
    cluster.marks["t", 0], cluster.open = (0, 7), {}
    assert it.has_new()
    assert taken(it.plan(plan, 2, bounded=True)) == [(0, 5, 7)]


def test_where_there_is_room_for_one_each_partition_is_taken_in_turn(of):
    """And not the one that is furthest behind, for ever, if it stays so."""
    cluster = Cluster((0, 90), (0, 2), (0, 0), (0, 5))
    it, plan, found = of(cluster), None, []
    for room in (1, 1, 1, 1, 2, 0, 1, 1, 3):
        plan = it.plan(plan, 1, bounded=True, room=room)
        found.append([partition for partition, *_ in taken(plan)])
    assert found == [[0], [1], [3], [0], [1, 3], [], [0], [3], [0, 3]]
    assert taken(plan) == [(0, 3, 5), (3, 3, 4)]


def test_a_log_that_was_truncated_and_filled_up_again_is_read_from_there(of, monkeypatch, caplog):
    """Brokers are asked when the leader is another one, and not before."""
    cluster, asked = Cluster((0, 10), (0, 10)), []

    def truncations(client, logs):
        asked.extend((partition, *about) for partition, about in logs.items())
        return {("t", 0): 4} if logs and len(asked) == 1 else {}

    monkeypatch.setattr(spout_offsets, "truncations", truncations)
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
    def silent(_, logs):
        if logs:
            raise ConnectionError("nobody says in time")
        return {}

    monkeypatch.setattr(spout_offsets, "truncations", silent)
    cluster = Cluster((0, 10))
    it = of(cluster)
    cluster.epochs = {("t", 0): 3}
    first = it.plan(None, 1, bounded=True)
    cluster.epochs, cluster.marks["t", 0] = {("t", 0): 4}, (0, 20)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == []
    monkeypatch.setattr(spout_offsets, "truncations", lambda *_: {})
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


def test_without_kafka_the_plan_is_to_take_nothing(begun, caplog):
    cluster, it, first = begun((0, 5))
    cluster.marks["t", 0] = (0, 9)
    cluster.down = True
    second = it.plan(first, 1, bounded=True)
    assert (second.tasks, second.positions) == ((), first.positions)
    assert (
        "this micro-batch takes no new records, because Kafka did not answer: no broker"
        in caplog.text
    )
    cluster.down = False
    assert taken(it.plan(second, 1, bounded=True)) == [(0, 5, 9)]


def test_a_partition_without_a_leader_holds_nothing_up(of):
    cluster = Cluster((0, 5), (0, 5))
    it = of(cluster)
    cluster.mute = {1}
    with pytest.raises(ConnectionError, match="the first and last offset of t-1 failed: no leader"):
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
    ("settings", "why"), [({}, "group"), ({"start": datetime(2026, 1, 1, tzinfo=UTC)}, "timestamp")]
)
def test_where_it_begins_is_asked_of_all(of, settings, why):
    cluster = Cluster((0, 5), (0, 5))
    it = of(cluster, **settings)
    cluster.told = dict.fromkeys(cluster.marks, (3, ""))
    cluster.mute = {1}
    with pytest.raises(ConnectionError, match="of t-1 failed: no leader"):
        it._starts(None, cluster.marks)
    cluster.mute = set()
    assert set(it._starts(None, cluster.marks).values()) == {Start(3, why)}


def test_lost_offsets_are_one_record_that_dies(of, begun, caplog):
    cluster, it, first = begun((0, 5))
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


def test_a_topic_that_was_made_anew_is_read_from_its_beginning(of, begun):
    cluster, _, first = begun((0, 5))
    cluster.topic_id = "two"
    second = of(cluster).plan(first, 1, bounded=True)
    assert taken(second) == [(0, 0, 5)]
    assert second.positions["t", 0].began == "topic created again"
    assert second.topic_ids == {"t": "two"}


@pytest.mark.parametrize(
    ("low", "way_out", "settings"),
    [
        (4, "give the topology a new checkpoint, and the spout another start", {"start": "latest"}),
        (0, "raise max_offset_behind", {"max_offset_behind": 9}),
    ],
)
def test_each_way_out_of_refused_offsets_is_one(of, low, way_out, settings):
    cluster = Cluster((low, 9))
    cluster.told["t", 0] = Commit(1, "")
    refused = {"start": "group", "lost": "refuse", "max_offset_behind": 5}
    with pytest.raises(OffsetsRefused, match=way_out):
        of(cluster, **refused).plan(None, 1, bounded=True)
    of(cluster, **refused | settings).plan(None, 1, bounded=True)
    of(cluster, **refused | {"lost": "dead-letter"}).plan(None, 1, bounded=True)


def test_a_group_is_not_told_of_a_topic_what_is_done_of_the_one_before(of, begun, caplog):
    """Not by a driver that begins, nor after a micro-batch; another checkpoint reads all of it."""
    cluster, it, first = begun((0, 5))
    it.commit(first, [])
    told = dict(cluster.told)
    cluster.told.clear()  # as brokers do, with the topic
    cluster.topic_id, cluster.marks["t", 0] = "two", (0, 9)
    for again in (it, of(cluster, lost="refuse")):
        again._refresh_at = 0
        again._refresh()
        assert again.commit(first, []) == 0
        assert not cluster.told
    with pytest.raises(OffsetsRefused, match="give the topology a new checkpoint"):
        of(cluster, lost="refuse").plan(first, 1, bounded=True)
    cluster.told = told  # it had crossed the deletion
    other = of(cluster, lost="refuse")
    plan = other.plan(None, 1, bounded=True)
    assert taken(plan) == [(0, 0, 9)]
    assert "t-0 begins at offset 0, topic created again" in caplog.text
    other.commit(plan, [])
    assert cluster.told["t", 0][0] == 9
    assert taken(of(cluster).plan(None, 1, bounded=True)) == []


def test_a_topic_made_anew_is_read_whole_when_its_partitions_answer_late(of, begun):
    cluster, _, first = begun((0, 100), (0, 100))
    cluster.topic_id = "two"
    cluster.mute = {1}
    it = of(cluster)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == [(0, 0, 100)]
    cluster.mute = set()
    cluster.marks["t", 1] = (0, 150)
    third = it.plan(OffsetPlan.of(second.body()), 1, bounded=True)
    assert taken(third) == [(1, 0, 150)]
    assert third.positions["t", 1].began == "new partition"


def test_a_topic_made_anew_of_which_nothing_answers_is_known_to_be_later(of, begun):
    cluster, _, first = begun((0, 100))
    cluster.topic_id = "two"
    cluster.mute = {0}
    cluster.marks["u", 1] = (0, 1)  # of another topic, that answers
    it = of(cluster)
    second = it.plan(first, 1, bounded=True)
    assert second.topic_ids["t"] == "one"
    cluster.mute = set()
    third = it.plan(second, 1, bounded=True)
    assert taken(third) == [(0, 0, 100)]
    assert third.positions["t", 0].began == "topic created again"


@pytest.mark.parametrize("max_waiting", [0, 10])
def test_a_replay_that_waits_for_its_turn_shrinks_nothing(of, max_waiting):
    """Nor does a limit of none, while none waits."""
    one = of(Cluster((0, 5)), max_records=3)
    plan = SimpleNamespace(offsets={"s": one.plan(None, 1, bounded=True).body()})
    spark = SimpleNamespace(createDataFrame=lambda *_: None, range=lambda *_: None)
    sources = KafkaSources({"s": one}, spark, False, max_waiting)
    assert [each.tasks for each in sources.inputs(plan)] == [1]  # they divide limits of calls
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
    assert (
        caplog.text.count("spout one: Kafka did not answer whether it has new records: no broker")
        == 1
    )
    other.commit(other.plan(None, 1, bounded=True), [])
    assert not sources.has_new()
    clusters[1].down = True
    with pytest.raises(ClusterFailed, match="no broker"):
        sources.has_new()
    for each in clusters:
        each.down = False
    assert sources.has_new()


@pytest.mark.parametrize(("topic_id", "taken_then"), [("one", []), ("two", [(0, 0, 98)])])
def test_a_partition_that_ends_below_what_was_read_has_a_micro_batch(begun, topic_id, taken_then):
    """Not only when it is as long again, and what came first would be passed over."""
    cluster, it, first = begun((0, 100))
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


def test_a_topic_made_anew_of_the_same_length_has_a_micro_batch(begun):
    cluster, it, first = begun((0, 5))
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


def test_a_truncated_partition_goes_on_at_its_end(of, begun):
    cluster, it, first = begun((0, 100))
    cluster.marks["t", 0] = (0, 98)
    second = it.plan(first, 1, bounded=True)
    assert taken(second) == []
    assert second.positions["t", 0] == Position(98, 98, "truncated")
    with pytest.raises(OffsetsRefused, match="would begin at offset 98, truncated"):
        of(cluster, lost="refuse").plan(first, 1, bounded=True)
    # One that was made anew since its id was asked for is not taken for it.
    cluster.topic_id = "two"
    assert it.plan(first, 1, bounded=True).positions["t", 0] == Position(
        98, 98, "topic created again"
    )


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
        assert said.startswith("spout s cannot read a topic that was deleted")
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
    assert not SparkStream._wait_until_due(stream)
    assert found == pauses


def test_the_first_plan_without_kafka_may_be_tried_again(of):
    cluster = Cluster((0, 5))
    it = of(cluster)
    cluster.down = True
    with pytest.raises(ConnectionError, match="no broker"):
        it.plan(None, 1, bounded=True)


def test_a_commit_that_fails_is_repeated_with_the_next(begun, caplog):
    cluster, it, first = begun((0, 5))
    cluster.mute, cluster.failure = {0}, PartitionFailure("UNKNOWN_MEMBER_ID", "unknown member")
    for _ in range(2):
        assert it.commit(first, []) == 5
    assert caplog.text.count("of 1 partition could not be committed to group g: unknown mem") == 1
    assert "or at the query's next start if none follows" in caplog.text
    assert "Stop that consumer, or give the spout a group_id of its own" in caplog.text
    cluster.mute = set()
    assert it.commit(first, []) == 0
    assert cluster.told["t", 0][0] == 5


def test_a_group_is_told_again_what_its_brokers_may_have_forgotten(begun, monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(spout_offsets.time, "monotonic", lambda: now.s)
    cluster, it, plan = begun((0, 5))
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
    stream = SimpleNamespace(_rows=closing)
    closes = False
    with pytest.raises(AttributeError, match="_admin"):
        SparkStream._reaching_ends(stream)
    closes = True
    assert SparkStream._reaching_ends(stream) is None
    closing.reaching_ends = None
    assert SparkStream._reaching_ends(stream) is None
