"""A cluster's answers about its partitions, and the outcome of commits."""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress

import mock_broker
import numpy as np
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from servers import TIMEOUT_S, wait_until

from ackcore import OffsetTracker
from ackcore.kafka import committer
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import (
    Cluster,
    ClusterFailed,
    Partition,
    TopicPartition,
    UnknownTopics,
    Watermarks,
)
from ackcore.offsets import KAFKA_LIMIT, Commit, decode_metadata, encode_metadata


def cluster_of(kafka, timeout_s=TIMEOUT_S, **options):
    quick = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "log_level": 0}
    return Cluster(
        ClientSettings(kafka.bootstrap_servers, {**quick, **options}), timeout_s=timeout_s
    )


@pytest.fixture
def cluster(kafka):
    return cluster_of(kafka)


# Partitions ---------------------------------------------------------------------------------


def test_partitions_are_listed_in_order(kafka, cluster):
    many, one = kafka.new_topic(partitions=12), kafka.new_topic()
    found = cluster.partitions([one, many, one])
    assert [partition[:2] for partition in found] == sorted(
        [*((many, number) for number in range(12)), (one, 0)]
    )
    assert len({partition.topic_id for partition in found}) == 2
    assert {partition.key for partition in found} >= {(one, 0), TopicPartition(many, 11)}
    assert str(TopicPartition("t", 3)) == "t-3"


def test_a_pattern_names_topics_whole_and_none_of_kafkas_own(kafka, cluster):
    stem = kafka.new_topic()
    kafka.create_topic(f"{stem}-a")
    kafka.create_topic(f"{stem}-b", 2)
    kafka.create_topic(f"__{stem}-c")
    found = cluster.partitions(pattern=f"_*{stem}-[a-c]")
    assert [partition[:2] for partition in found] == [
        (f"{stem}-a", 0),
        (f"{stem}-b", 0),
        (f"{stem}-b", 1),
    ]
    assert cluster.partitions(pattern="nothing is called so") == []


def test_topics_that_are_not_there_are_named(kafka, cluster):
    topic = kafka.new_topic()
    with pytest.raises(UnknownTopics, match=r"'absent' \(.*UNKNOWN_TOPIC_OR_PART\)") as caught:
        cluster.partitions([topic, "absent"])
    assert list(caught.value.topics) == ["absent"]
    assert [one[:2] for one in cluster.partitions([topic, "absent"], missing_ok=True)] == [
        (topic, 0)
    ]
    with pytest.raises(
        UnknownTopics, match=rf"; did you mean '{topic}'\?\). Correct the name, crea"
    ):
        cluster.partitions([f"{topic}x"])


def test_a_topic_made_again_has_another_id(kafka, cluster):
    topic = kafka.new_topic()
    (before,) = cluster.partitions([topic])
    kafka.delete_topic(topic)
    wait_until(lambda: not cluster.partitions([topic], missing_ok=True), "it is gone")
    kafka.create_topic(topic)
    (after,) = cluster.partitions([topic])
    assert before.topic_id
    assert after == before._replace(topic_id=after.topic_id)
    assert after.topic_id != before.topic_id


def test_watermarks_follow_what_is_written_and_deleted(kafka, cluster):
    topic = kafka.new_topic(partitions=2)
    kafka.produce(topic, [b"x"] * 5, partition=1)
    kafka.delete_records(topic, before=2, partition=1)
    answers = cluster.watermarks(cluster.partitions([topic]))
    assert answers.found == {(topic, 0): Watermarks(0, 0), (topic, 1): (2, 5)}
    assert answers.failed == {}
    absent = cluster.watermarks([(topic, 0), ("absent", 0)])
    assert absent.found == {(topic, 0): (0, 0)}
    assert absent.failed[("absent", 0)].code in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC")
    assert cluster.watermarks([]) == ({}, {})


@pytest.mark.broker
def test_an_open_transaction_is_the_end_of_what_can_be_read(kafka_broker):
    topic = kafka_broker.topic_of([b"x"])
    producer = Producer(kafka_broker.conf(transactional_id=topic))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(30)
    for level, high in (("read_committed", 1), ("read_uncommitted", 2)):
        cluster = cluster_of(kafka_broker, **{"isolation.level": level})
        assert cluster.watermarks([(topic, 0)]).found == {(topic, 0): (0, high)}
        # What read uncommitted records before waits; what is above the log's end was truncated.
        for position, end in ((1, high), (2, 2), (3, 2)):
            found = cluster.watermarks([(topic, 0)], {(topic, 0): position}).found
            assert found == {(topic, 0): (0, end)}
    producer.abort_transaction(30)


@pytest.mark.broker
def test_offsets_are_found_by_time(kafka_broker):
    topic = kafka_broker.new_topic()
    cluster = cluster_of(kafka_broker)
    times = [1_000_000, 2_000_000, 3_000_000]
    kafka_broker.produce(topic, [{"value": b"x", "timestamp": time} for time in times])
    for at, offset in [(0, 0), (1_000_001, 1), (3_000_000, 2), (3_000_001, 3)]:
        assert cluster.offsets_for_time([(topic, 0)], at).found == {(topic, 0): offset}


def test_what_comes_while_a_time_is_asked_for_is_not_below_its_offset(mock_kafka, monkeypatch):
    topic = mock_kafka.topic_of([b"x"] * 3)
    cluster = cluster_of(mock_kafka)
    ask = cluster._offsets

    def offsets(keys, spec):
        found = ask(keys, spec)
        mock_kafka.produce(topic, [b"meanwhile"])
        return found

    monkeypatch.setattr(cluster, "_offsets", offsets)
    # The mock has no record of any time.
    assert cluster.offsets_for_time([(topic, 0)], 5).found == {(topic, 0): 3}


def test_a_leader_that_was_away_is_asked_again(mock_kafka):
    """The client has removed it from its list of brokers, and would not look for it."""
    topic = mock_kafka.topic_of([b"x"])
    mock_kafka.partition_set_leader(topic, 0, 2)
    cluster = cluster_of(mock_kafka)
    known = cluster.watermarks([(topic, 0)])
    assert known.found == {(topic, 0): (0, 1)}
    mock_kafka.broker_set_down(2)

    def is_missing():
        with suppress(KafkaException):  # it was asked as it went
            return 2 not in cluster._admin.list_topics(timeout=1).brokers

    wait_until(is_missing, "the client knows that it is away")
    assert cluster.watermarks([(topic, 0)]).failed[topic, 0].code == "_NOENT"
    mock_kafka.broker_set_up(2)
    assert cluster.watermarks([(topic, 0)]) == known


def test_brokers_that_do_not_answer_end_in_a_named_error(mock_kafka):
    topic = mock_kafka.new_topic()
    cluster = cluster_of(mock_kafka, timeout_s=0.5)
    mock_kafka.broker_set_down(-1)
    with pytest.raises(ClusterFailed, match="topics cannot be listed"):
        cluster.partitions(pattern=".*")
    answers = cluster.watermarks([(topic, 0)])
    assert answers.found == {}
    assert answers.failed.keys() == {(topic, 0)}
    failed = cluster.commit("group", {(topic, 0): (1, "")}, patience_s=0.3).failed
    assert failed.keys() == {(topic, 0)}


def test_brokers_that_cannot_be_reached_are_named_with_the_cause_and_no_line_for_each_try(capfd):
    settings = ClientSettings("127.0.0.1:1", {"sasl.password": "hunter2"})
    said = "Connection refused.*; check that bootstrap_servers='127.0.0.1:1' is right"
    with Cluster(settings, timeout_s=0.5) as cluster:
        with pytest.raises(
            ClusterFailed, match=f"the partitions of topic 't' cannot be listed: .*, after .*{said}"
        ):
            cluster.partitions(["t"])
        with pytest.raises(ClusterFailed, match=f"the topics cannot be listed: .*, after .*{said}"):
            cluster.partitions(pattern="t")
        (failure,) = cluster.watermarks([("t", 0)]).failed.values()
        assert re.search(said, failure.text)
    assert capfd.readouterr().err == ""


def test_settings_that_librdkafka_refuses_are_an_error():
    with pytest.raises(ValueError, match="options are refused by librdkafka: No such"):
        Cluster(ClientSettings("h:1", {"x": 1}))


def test_a_consumers_options_are_none_of_an_admins(mock_kafka, capfd):
    options = {"isolation.level": "read_committed", "fetch.min.bytes": 2, "log_level": 6}
    topic = mock_kafka.new_topic()
    assert cluster_of(mock_kafka, **options).partitions([topic])
    assert "CONFWARN" not in capfd.readouterr().err


# Commits ------------------------------------------------------------------------------------


def test_what_is_committed_comes_back_with_its_metadata(kafka, cluster):
    topic, group = kafka.new_topic(partitions=3), kafka.new_group()
    tracker = OffsetTracker(topic, 1, 0, 0)
    offsets = np.arange(5000)
    tracker.emitted(offsets)
    tracker.acked(offsets[offsets % 7 > 0])
    commit = encode_metadata(tracker, 42)
    assert max(commit.metadata) > "\u0800"
    answers = cluster.commit(group, {(topic, 1): commit, (topic, 2): (9, "")})
    assert answers.failed == {}
    assert answers.found == {(topic, 1): tuple(commit), (topic, 2): Commit(9, "")}
    found = cluster.committed(group, [(topic, number) for number in range(3)])
    assert found == answers
    assert kafka.committed(group, topic, 1) == tuple(commit)
    restored = decode_metadata(topic, 1, *found.found[(topic, 1)])
    assert restored.problem is None
    assert restored.state.hole_starts.tolist() == list(range(0, 4999, 7))
    assert cluster.commit(group, {}) == ({}, {})


@pytest.mark.broker
def test_metadata_up_to_its_limit_is_taken_and_no_more(kafka_broker):
    topic, group = kafka_broker.new_topic(partitions=4), kafka_broker.new_group()
    cluster = cluster_of(kafka_broker)
    wide = "".join(map(chr, range(0x0800, 0x0800 + 2**15)))
    fits = [wide[start : start + KAFKA_LIMIT] for start in range(0, len(wide), KAFKA_LIMIT)]
    for metadata in fits:
        assert cluster.commit(group, {(topic, 0): (1, metadata)}).failed == {}
        assert cluster.committed(group, [(topic, 0)]).found[(topic, 0)].metadata == metadata
    # One that is refused keeps none of the others back.
    over = {(topic, 0): (2, ""), (topic, 1): (2, wide[: KAFKA_LIMIT + 1]), (topic, 3): (2, "x")}
    answers = cluster.commit(group, over)
    assert list(answers.failed) == [(topic, 1)]
    assert answers.failed[(topic, 1)].code == "OFFSET_METADATA_TOO_LARGE"
    assert answers.found == {(topic, 0): (2, ""), (topic, 3): (2, "x")}
    assert cluster.committed(group, over).found == answers.found


@pytest.mark.broker
def test_more_metadata_than_a_broker_takes_at_once_is_committed_in_parts(kafka_broker):
    topic, group = kafka_broker.new_topic(partitions=150), kafka_broker.new_group()
    cluster = cluster_of(kafka_broker)
    offsets = {(topic, number): (number, "\u0801" * KAFKA_LIMIT) for number in range(150)}
    assert cluster.commit(group, offsets).failed == {}
    assert cluster.committed(group, offsets).found == offsets


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_no_offset_of_a_group_with_members_is_committed(kafka_broker, protocol):
    topic, group = kafka_broker.new_topic(), kafka_broker.new_group()
    cluster = cluster_of(kafka_broker)
    member = Consumer(kafka_broker.conf(group_id=group, group_protocol=protocol))
    try:
        member.subscribe([topic])
        wait_until(lambda: member.poll(0.05) or member.assignment(), "it is a member")
        failed = cluster.commit(group, {(topic, 0): (1, "")}).failed
        assert failed[(topic, 0)].code == "UNKNOWN_MEMBER_ID"
    finally:
        member.close()
    assert cluster.commit(group, {(topic, 0): (1, "")}).failed == {}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (12, "OFFSET_METADATA_TOO_LARGE"),
        (27, "REBALANCE_IN_PROGRESS"),
        (30, "GROUP_AUTHORIZATION_FAILED"),
    ],
)
def test_a_commit_that_is_refused_is_named_and_the_next_one_made(mock_kafka, code, name):
    topic, group = mock_kafka.new_topic(partitions=2), mock_kafka.new_group()
    cluster = cluster_of(mock_kafka)
    offsets = {(topic, 0): (3, "a"), (topic, 1): (4, "b")}
    mock_kafka.fail_requests(mock_broker.OFFSET_COMMIT, code)
    answers = cluster.commit(group, offsets)
    assert answers.found == {}
    assert {failure.code for failure in answers.failed.values()} == {name}
    assert answers.failed.keys() == offsets.keys()
    assert cluster.committed(group, offsets).found == {}
    assert cluster.commit(group, offsets).found == offsets
    assert cluster.committed(group, offsets).found == offsets


def test_a_coordinator_that_moves_takes_the_commit(mock_kafka):
    topic, group = mock_kafka.new_topic(), mock_kafka.new_group()
    cluster = cluster_of(mock_kafka)
    for broker in (1, 2, 3):
        mock_kafka.coordinator_set("group", group, broker)
        mock_kafka.fail_requests(mock_broker.OFFSET_COMMIT, 16, 15, 14)
        answers = cluster.commit(group, {(topic, 0): (broker, "")})
        assert answers.found == {(topic, 0): (broker, "")}, answers
        # From an admin client's request that answer ends the process: librdkafka 2.16 crashes.
        mock_kafka.fail_requests(mock_broker.OFFSET_FETCH, 16, 14, 15)
        assert cluster.committed(group, [(topic, 0)]) == answers


def given_up():
    return "ackcore-kafka-abandoned" in [thread.name for thread in threading.enumerate()]


def test_no_commit_waits_for_long_where_there_is_no_coordinator(mock_kafka, monkeypatch):
    """A new cluster has none at first: librdkafka keeps a commit for 45 s then, and its client."""
    monkeypatch.setattr(committer, "_RELEASE_MS", 500)
    topic, group = mock_kafka.new_topic(), mock_kafka.new_group()
    cluster = cluster_of(mock_kafka)
    mock_kafka.start_request_tracking()
    mock_kafka.fail_requests(mock_broker.FIND_COORDINATOR, *[15] * 10_000)
    began = time.monotonic()
    answers = cluster.commit(group, {(topic, 0): (3, "")}, patience_s=0.3)
    assert time.monotonic() - began < 20
    assert answers.found == {}
    assert answers.failed.keys() == {(topic, 0)}
    assert mock_broker.OFFSET_COMMIT not in [api for _, api in mock_kafka.requests()]
    # It was not asked for: no client waits for it still.
    assert not given_up()
    mock_kafka.clear_request_errors(mock_broker.FIND_COORDINATOR)
    assert cluster.commit(group, {(topic, 0): (3, "")}).found == {(topic, 0): (3, "")}
    assert time.monotonic() - began < 40
    mock_kafka.broker_set_down(-1)
    assert cluster.commit(group, {(topic, 0): (4, "")}, patience_s=0.3).found == {}
    assert given_up()
    wait_until(lambda: not given_up(), "its client is released", 20)


def test_all_partitions_of_a_group_are_committed_by_as_few_requests_as_can_be(mock_kafka):
    topic, group = mock_kafka.new_topic(partitions=1000), mock_kafka.new_group()
    cluster = cluster_of(mock_kafka)
    mock_kafka.start_request_tracking()
    offsets = {(topic, number): (number, "x" * 20) for number in range(1000)}
    assert cluster.commit(group, offsets) == (offsets, {})
    apis = [api for _, api in mock_kafka.requests()]
    assert apis.count(mock_broker.OFFSET_COMMIT) == 1
    assert cluster.committed(group, offsets) == (offsets, {})
    # A real broker takes a batch of 1 MiB, and refuses a larger one whole.
    mock_kafka.clear_requests()
    large = {(topic, number): (number, "x" * 2000) for number in range(1000)}
    assert cluster.commit(group, large) == (large, {})
    apis = [api for _, api in mock_kafka.requests()]
    assert apis.count(mock_broker.OFFSET_COMMIT) == 5


def test_partitions_are_pairs_or_what_was_listed(kafka, cluster):
    topic = kafka.new_topic()
    listed = cluster.partitions([topic])
    assert isinstance(listed[0], Partition)
    assert cluster.watermarks(listed) == cluster.watermarks([(topic, 0), (topic, 0)])
