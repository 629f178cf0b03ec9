"""Where a consumer begins: as it was committed, as it is asked to, and at which topic."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from types import SimpleNamespace

import mock_broker
import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaError, Producer, TopicPartition
from consumer_counts import Counts, by_hand, consuming, partitions_of, take
from servers import wait_until

from ackcore.kafka import Consumer, ConsumerError
from ackcore.kafka.cluster import PartitionAnswers, PartitionFailure
from ackcore.kafka.commit_metadata import CommitOrigin
from ackcore.kafka.consumer import consumer_client, consumer_starts
from ackcore.kafka.kafka_errors import OffsetsOutOfRange
from ackcore.kafka.start_positions import time_ms
from ackcore.offsets import decode_metadata


def counts_of(kafka, tmp_path, partitions=1, records=0):
    return Counts(kafka, tmp_path, partitions, records)


def first_of(counts, **arguments):
    """The first offset that a consumer hands out of partition 0, which it leaves as it is."""
    with consuming(counts, **by_hand(counts), **arguments) as consumer:
        return take(consumer, 1)[0].offset


def begun(caplog):
    """The decisions that were logged."""
    lines = [record.getMessage() for record in caplog.records]
    return [line.partition(" begins at ")[2] for line in lines if " begins at " in line]


MINUTE_MS = 60_000


@pytest.mark.parametrize(
    ("start", "decision"),
    [
        ("earliest", "0, earliest"),
        ({("{}", 0): 7}, "7, explicit"),
        ({("other", 0): 7}, "0, earliest"),
        (datetime(2026, 1, 1, 0, 3, tzinfo=UTC), "3, timestamp"),
        (datetime(2027, 1, 1, tzinfo=UTC), "10, timestamp"),
    ],
)
def test_a_partition_of_which_nothing_is_committed_begins_as_start_says(
    kafka_broker, tmp_path, caplog, start, decision
):
    caplog.set_level(logging.INFO)
    counts = Counts(kafka_broker, tmp_path, partitions=1)
    counts.topic = kafka_broker.new_topic(1, retention_ms=-1)  # they are old
    new_year = round(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)
    kafka_broker.produce(
        counts.topic, [{"value": b"x", "timestamp": new_year + n * MINUTE_MS} for n in range(10)]
    )
    if isinstance(start, dict):
        start = {(topic.format(counts.topic), n): offset for (topic, n), offset in start.items()}
    with consuming(counts, start=start):
        wait_until(lambda: counts.committed()[0][0] >= 0, "its start is committed")
    assert begun(caplog) == [decision]
    assert counts.committed()[0][0] == int(decision.partition(",")[0])
    with consuming(counts, start="latest"):
        wait_until(lambda: begun(caplog)[1:], "it has begun again")
    assert begun(caplog)[1:] == [f"{decision.partition(',')[0]}, group"]


def test_a_time_before_all_records_is_none_of_kafkas_own():
    assert time_ms(datetime(1969, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)) == 0
    assert time_ms(datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)) == 1000


def test_what_others_committed_is_committed_with_the_topics_id_at_once(mock_kafka, tmp_path):
    """Else a topic that was made anew before the next record is done would not be noticed."""
    counts = counts_of(mock_kafka, tmp_path, records=10)
    client = Client(mock_kafka.conf(group_id=counts.group))
    client.commit(offsets=[TopicPartition(counts.topic, 0, 10)], asynchronous=False)
    client.close()
    with consuming(counts, **by_hand(counts)):
        wait_until(lambda: counts.committed()[0][1], "the id is committed")
    offset, metadata = counts.committed()[0]
    assert offset == 10
    assert CommitOrigin.read(decode_metadata(counts.topic, 0, offset, metadata).deployment).topic


@pytest.mark.broker
def test_what_was_read_of_an_open_transaction_is_no_truncated_log(kafka_broker, tmp_path, caplog):
    """The isolation level was read_uncommitted before: records above the stable ones are done."""
    caplog.set_level(logging.INFO)
    counts = counts_of(kafka_broker, tmp_path, records=2)
    producer = Producer(kafka_broker.conf(transactional_id=counts.topic))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(counts.topic, b"open")
    producer.flush(30)
    uncommitted = {"isolation.level": "read_uncommitted"}
    with consuming(counts, **by_hand(counts), options=uncommitted) as consumer:
        consumer.ack_many([one for one in take(consumer, 3) if one.offset != 1])
        wait_until(
            lambda: (
                (commit := counts.committed()[0])[0] >= 0  # -1001 before the first commit
                and decode_metadata(counts.topic, 0, *commit).state.end == 3
            ),
            "two are done",
        )
    with consuming(counts, **by_hand(counts), out_of_range="fail") as consumer:
        assert take(consumer, 1)[0].offset == 1
    producer.commit_transaction(30)
    assert begun(caplog) == ["0, earliest", "1, group"]


def test_a_deployment_begins_anew_once(mock_kafka, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    counts = counts_of(mock_kafka, tmp_path, records=10)
    with consuming(counts, **by_hand(counts)) as consumer:
        consumer.ack_many(take(consumer, 5))
        wait_until(lambda: counts.committed()[0][0] == 5, "five are done")
    for name, first in (("one", 0), ("one", 2), (None, 4), ("one", 6), ("two", 0)):
        with consuming(counts, **by_hand(counts), force_from_start=name) as consumer:
            taken = take(consumer, 10 - first)
            assert taken[0].offset == first, name
            consumer.ack_many(taken[:2])
            done = first + 2
            wait_until(lambda n=done: counts.committed()[0][0] == n, "two more are done")
    decisions = ["0, earliest", "0, forced, earliest", "2, group", "4, group", "6, group"]
    assert begun(caplog) == [*decisions, "0, forced, earliest"]


@pytest.mark.parametrize("start", ["earliest", datetime(2026, 1, 1, tzinfo=UTC)])
@pytest.mark.parametrize(
    "error", [KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART]
)
def test_a_partition_whose_leader_moves_begins_when_it_has_one(
    mock_kafka, tmp_path, caplog, start, error
):
    """Brokers answer so for a moment after a topic was made, and while one of them restarts."""
    caplog.set_level(logging.INFO)
    counts = counts_of(mock_kafka, tmp_path)
    mock_kafka.fail_requests(mock_broker.LIST_OFFSETS, *[error] * 4)
    with consuming(counts, **by_hand(counts), start=start):
        wait_until(lambda: begun(caplog), "it begins")


@pytest.mark.parametrize("start", ["earliest", datetime(2026, 1, 1, tzinfo=UTC)])
def test_a_partition_whose_leader_is_away_begins_when_it_is_back(
    mock_kafka, tmp_path, monkeypatch, caplog, start
):
    """The client calls the partition unknown: its list of brokers lacks the leader."""
    caplog.set_level(logging.INFO)
    counts = counts_of(mock_kafka, tmp_path)
    mock_kafka.partition_set_leader(counts.topic, 0, 2)
    mock_kafka.coordinator_set("group", counts.group, 1)
    mock_kafka.broker_set_down(2)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        mock_kafka.broker_set_up(2)
        time.sleep(seconds)

    clock = SimpleNamespace(sleep=pause, monotonic=time.monotonic)
    monkeypatch.setattr(consumer_client, "time", clock)
    with consuming(counts, **by_hand(counts), start=start):
        wait_until(lambda: begun(caplog), "it begins")
    assert pauses


def test_a_start_that_is_not_there_is_out_of_range(mock_kafka, tmp_path):
    counts = counts_of(mock_kafka, tmp_path, records=10)
    mock_kafka.delete_records(counts.topic, 4)
    with consuming(counts, **by_hand(counts), start={(counts.topic, 0): 2}) as consumer:
        assert take(consumer, 1)[0].offset == 4
        wait_until(counts.dead, "the loss is kept")
    counts.group = mock_kafka.new_group()
    with pytest.raises(
        OffsetsOutOfRange, match=r"from offset 99: it has offsets \[4, 10\).* or 'latest'$"
    ):
        first_of(counts, start={(counts.topic, 0): 99}, out_of_range="fail")


def test_a_log_whose_end_cannot_be_read_says_why(monkeypatch):
    failed = {("orders", 0): PartitionFailure("LEADER_NOT_AVAILABLE", "no leader")}
    cluster = SimpleNamespace(watermarks=lambda *_: PartitionAnswers({}, failed), close=bool)
    monkeypatch.setattr(consumer_starts, "Cluster", lambda client: cluster)
    settings = SimpleNamespace(client=None)
    with pytest.raises(ConsumerError, match="the end of orders-0 could not be read: no leader;"):
        consumer_starts._shorter_log(settings, ("orders", 0), (0, 5), 9)


def test_what_is_too_far_behind_is_passed_over_as_the_error_says(mock_kafka, tmp_path):
    counts = counts_of(mock_kafka, tmp_path, records=100)
    with pytest.raises(OffsetsOutOfRange, match=r"'latest': then it is read from offset 80,"):
        first_of(counts, max_offset_behind=20, out_of_range="fail")
    for ways in ({}, {"dead_letters": None}):
        counts.group = mock_kafka.new_group()
        assert first_of(counts, max_offset_behind=20, out_of_range="earliest", **ways) == 80


def test_what_is_too_far_behind_is_passed_over_with_a_dead_letter(mock_kafka, tmp_path, caplog):
    counts = counts_of(mock_kafka, tmp_path, records=100)
    with consuming(counts, **by_hand(counts)) as consumer:
        taken = take(consumer, 100)
        consumer.ack_many([*taken[:10], *taken[12:20], taken[85]])
        wait_until(lambda: counts.committed()[0][0] == 10, "ten are done, and some more")
    with consuming(counts, **by_hand(counts), max_offset_behind=90) as consumer:
        assert take(consumer, 1)[0].offset == 10
    with pytest.raises(OffsetsOutOfRange, match="more than max_offset_behind=20 before its end"):
        first_of(counts, max_offset_behind=20, dead_letters=None)
    with consuming(counts, **by_hand(counts), max_offset_behind=20) as consumer:
        taken = take(consumer, 19)
        assert [one.offset for one in taken] == [*range(80, 85), *range(86, 100)]
        consumer.ack_many(taken)
        wait_until(lambda: not counts.lag(), "all is done")
        assert (consumer.stats().counts.lost, consumer.stats().counts.dead) == (62, 1)
    (letter,) = mock_kafka.consume(counts.dead_topic)
    headers = dict(letter.headers())
    assert headers["ackcore-reason"] == (
        b"TooFarBehind: offsets 10 to 11, 20 to 79 were passed over, too far behind the end"
    )
    assert headers["ackcore-offset"] == b"10"
    assert "too far before its end 100" in caplog.text


def test_a_topic_that_is_made_anew_while_it_is_read_is_read_from_its_beginning(
    kafka, tmp_path, caplog
):
    """Though it has become longer than the one before, so that no offset is out of range.

    What is done of the one before is not committed to it: were this process to end while a record
    of that is out, another one would begin where nobody has read.
    """
    counts = counts_of(kafka, tmp_path, records=5)
    with consuming(counts, refresh_s=0.2) as consumer:
        (*taken, out) = take(consumer, 5)
        consumer.ack_many(taken)
        wait_until(lambda: counts.committed()[0][0] == 4, "four are done")
        kafka.make_anew(counts.topic)
        kafka.produce(counts.topic, [b"new %d" % n for n in range(20)])
        # The consumer may see the deletion itself, lose the partition, and begin again.
        wait_until(lambda: "created again" in caplog.text, "it is noticed")
        wait_until(lambda: counts.committed()[0][0] == 0, "nothing is done of the new topic")
        consumer.ack(out)
        values = set()

        def is_through():
            for record in consumer.poll(100, 0.1):
                values.add(record.value)
                consumer.ack(record)
            return counts.committed()[0][0] == 20

        wait_until(is_through, "all is committed")
        assert values == {b"new %d" % n for n in range(20)}


def test_a_topic_that_was_made_anew_between_runs_is_noticed_by_its_id(mock_kafka, tmp_path, caplog):
    """A commit of the one before may have crossed its deletion."""
    counts = counts_of(mock_kafka, tmp_path, records=10)
    with consuming(counts, **by_hand(counts)) as consumer:
        consumer.ack_many(take(consumer, 10)[:5])
        wait_until(lambda: counts.committed()[0][0] == 5, "five are done")
    offset, metadata = counts.committed()[0]
    assert CommitOrigin.read(decode_metadata(counts.topic, 0, offset, metadata).deployment).topic
    mock_kafka.make_anew(counts.topic)
    mock_kafka.produce(counts.topic, [b"new"] * 10)
    counts.group = mock_kafka.new_group()  # the mock takes no such commit of one that had members
    client = Client(mock_kafka.conf(group_id=counts.group))
    crossed = TopicPartition(counts.topic, 0, offset, metadata=metadata)
    client.commit(offsets=[crossed], asynchronous=False)
    client.close()
    with pytest.raises(
        OffsetsOutOfRange,
        match=r"created again, and each start ends .* to read .* set out_of_range='earliest'",
    ):
        first_of(counts, out_of_range="fail")
    with consuming(counts, **by_hand(counts)) as consumer:
        taken = take(consumer, 10)
        assert taken[0].offset == 0
        consumer.ack_many(taken)
        wait_until(lambda: counts.committed()[0][0] == 10, "all are done")
    assert "topic created again" in caplog.text
    with consuming(counts, **by_hand(counts)) as consumer:
        assert consumer.poll(1, 0.5) == []


def test_tasks_read_each_so_manieth_partition(mock_kafka, tmp_path, caplog):
    counts = counts_of(mock_kafka, tmp_path, partitions=5, records=50)
    with consuming(counts, tasks=2, task=0) as one, consuming(counts, tasks=2, task=1) as other:
        for consumer, partitions in ((one, {0, 2, 4}), (other, {1, 3})):
            taken = take(consumer, 10 * len(partitions))
            assert {each.partition for each in taken} == partitions == partitions_of(consumer)
            consumer.ack_many(taken)
        wait_until(lambda: not counts.lag(), "all is done")
    assert "some tasks have none" not in caplog.text
    with consuming(counts, tasks=7, task=6) as idle:
        assert idle.poll(1, 0.2) == []
        assert idle.stats().partitions == []
    assert "7 tasks share 5 partitions: some tasks have none" in caplog.text


def test_a_task_whose_topic_is_not_there_says_so(mock_kafka):
    arguments = {"bootstrap_servers": mock_kafka.bootstrap_servers, "group_id": "g"}
    consumer = Consumer("no-such-topic", tasks=1, task=0, **arguments)
    with pytest.raises(ConsumerError, match="no-such-topic"):
        consumer.poll(1, 20.0)


def test_tasks_read_new_partitions_and_those_of_a_pattern(kafka_broker, tmp_path):
    counts = counts_of(kafka_broker, tmp_path, partitions=1, records=5)
    pattern = {"topics": f"^{counts.topic[:-1]}[{counts.topic[-1]}]$", "refresh_s": 0.2}
    with consuming(counts, tasks=1, task=0, **pattern) as consumer:
        out = take(consumer, 5)
        kafka_broker.add_partitions(counts.topic, 3)
        wait_until(lambda: partitions_of(consumer) == {0, 1, 2}, "they are read")
        kafka_broker.produce(counts.topic, [b"new"], 2)
        (new,) = take(consumer, 1)
        assert (new.partition, new.value) == (2, b"new")
        assert consumer.ack_many([*out, new]) == 6
        wait_until(lambda: counts.committed()[0][0] == 5, "what was held before goes on")


@pytest.mark.parametrize("by", ["group", "tasks"])
@pytest.mark.parametrize("start", ["latest", datetime(2100, 1, 1, tzinfo=UTC)])
def test_what_comes_to_a_new_partition_before_it_is_noticed_is_read(
    kafka_broker, tmp_path, caplog, by, start
):
    """Though its topic was begun at its end: that is of the partitions that there were then."""
    caplog.set_level(logging.INFO)
    counts = counts_of(kafka_broker, tmp_path, partitions=2, records=4)
    how = {"tasks": 1, "task": 0} if by == "tasks" else {}
    options = {"topic.metadata.refresh.interval.ms": 200}
    with consuming(counts, start=start, refresh_s=0.2, options=options, **how) as consumer:
        wait_until(lambda: partitions_of(consumer) == {0, 1}, "it begins")
        wait_until(lambda: not counts.lag(), "it has committed where")
        kafka_broker.add_partitions(counts.topic, 3)
        kafka_broker.produce(counts.topic, [b"first", b"second"], 2)
        assert [one.value for one in take(consumer, 2)] == [b"first", b"second"]
    assert "0, new partition" in begun(caplog)


def test_a_task_lets_go_of_what_becomes_anothers(kafka_broker, tmp_path):
    """A new partition of two topics moves those behind it."""
    counts = counts_of(kafka_broker, tmp_path, partitions=1)
    second = kafka_broker.new_topic(1)
    first, last = sorted([counts.topic, second])
    for topic in (first, last):
        kafka_broker.produce(topic, [b"x"] * 4)
    arguments = {"topics": [first, last], "tasks": 2, "refresh_s": 0.2, "drain_s": 30.0}
    with consuming(counts, task=1, **arguments) as consumer:
        taken = take(consumer, 4)
        assert {one.topic for one in taken} == {last}
        kafka_broker.add_partitions(first, 2)
        wait_until(lambda: {p.paused for p in consumer.stats().partitions} == {"revoked"}, "it is")
        consumer.ack_many(taken)
        wait_until(
            lambda: {(p.topic, p.partition) for p in consumer.stats().partitions} == {(first, 1)},
            "it has the new one in its place",
        )
        assert kafka_broker.committed(counts.group, last)[0] == 4


def test_what_a_commit_is_of_is_told_from_what_others_commit():
    origin = CommitOrigin.of("an id", "release 1")
    assert 0 < origin.deployment < 2**63
    assert CommitOrigin.read(origin.deployment) == origin
    assert (
        CommitOrigin.read(None)
        == CommitOrigin.read(5)
        == CommitOrigin.read(-5)
        == CommitOrigin.of(None, None)
    )
    other = CommitOrigin.of("another", "release 1")
    assert origin.is_other_topic(other)
    assert not origin.is_other_topic(CommitOrigin.of(None, "release 1"))
    assert not CommitOrigin.of(None, None).is_other_topic(origin)
    assert CommitOrigin.of("an id", "").name
