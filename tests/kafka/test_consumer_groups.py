"""Consumers of one group on a real broker: partitions come and go, whatever the protocol."""

import numpy as np
import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from confluent_kafka import ConsumerGroupState, Producer
from consumer_books import Books, consumer_of, consuming, partitions_of, take, workers
from servers import wait_until

from ackcore import OffsetTracker
from ackcore.kafka import ClientSettings, Cluster, ConsumerError
from ackcore.offsets import KAFKA_LIMIT, decode_metadata, encode_metadata

PROTOCOLS = ["cooperative", "eager", "consumer"]


def group(protocol):
    """KIP-848's session is the broker's."""
    options = {"session.timeout.ms": None, "heartbeat.interval.ms": None}
    return {"protocol": protocol, "options": options if protocol == "consumer" else {}}


def closing(consumer):
    return {each.partition for each in consumer.stats().partitions if each.paused == "revoked"}


@pytest.fixture
def books(kafka_broker, tmp_path):
    return Books(kafka_broker, tmp_path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_partitions_that_are_taken_away_are_drained(books, protocol):
    """Records acked in the drain are not handed out again, and unacked ones are fenced."""
    books.produce(80)
    with consuming(books, drain_s=30.0, commit_interval_s=1000, **group(protocol)) as one:
        mine = take(one, 80)
        with consuming(books, **group(protocol)) as other:
            revoked = wait_until(lambda: closing(one), "some are to go")
            wait_until(lambda: not one.poll(1, 0.01), "nothing more of them is handed out")
            odd = [record for record in mine if record.offset % 2]
            assert one.ack_many(odd) == 40
            assert not partitions_of(other)
            one._thread.drain_s = 0.0
            theirs = wait_until(lambda: partitions_of(other), "they went")
            assert theirs <= revoked
            taken = take(other, 10 * len(theirs))
            assert {record.offset % 2 for record in taken} == {0}
            late = [r for r in mine if r.partition in theirs and not r.offset % 2]
            assert one.ack_many(late) == 0
            assert one.stats().counts.stale == len(late)
            assert other.ack_many(taken) == len(taken)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_join_and_leave_under_load(books, protocol, tmp_path):
    """F8: nothing is lost, and done again is only what was out when its partition went."""
    books.produce(2000)
    poison = {b"%d" % i for i in range(0, 4000, 200)}

    def may_fail(record):
        return ValueError("poison") if record.value in poison else None

    arguments = {"max_in_flight": 100, **group(protocol)}
    with consuming(books, **arguments) as one, workers(one, books, may_fail=may_fail):
        wait_until(lambda: partitions_of(one) and books.effects(), "the first works")
        for _ in range(2):
            with consuming(books, **arguments) as other, workers(other, books, may_fail=may_fail):
                wait_until(lambda: partitions_of(other), "another has some")
                books.produce(1000)
                books.check_commits()
                other.close()
        books.wait_for_the_end()
    books.check_complete(most_again=50, poison=poison)


@pytest.mark.parametrize("protocol", ["cooperative", "eager"])
@pytest.mark.parametrize("when", ["without partitions", "before its first assignment"])
def test_a_member_without_partitions_leaves_its_group(kafka_broker, tmp_path, protocol, when):
    """A member that stayed would be in the group until its session is over, after 45 s."""
    books = Books(kafka_broker, tmp_path, partitions=1)
    arguments = {"protocol": protocol, "options": {"session.timeout.ms": 45_000}}

    def described():
        (found,) = kafka_broker.admin.describe_consumer_groups([books.group]).values()
        return found.result(10)

    def is_stable(n):
        found = described()
        return found.state == ConsumerGroupState.STABLE and len(found.members) == n

    with consuming(books, **arguments) as one:
        wait_until(lambda: partitions_of(one), "it has the partition")
        with consuming(books, **arguments) as other:
            if when == "without partitions":
                wait_until(lambda: is_stable(2), "the other has joined, without a partition")
            else:
                wait_until(lambda: len(described().members) == 2, "the other asks to join")
            other.close()
        wait_until(lambda: len(described().members) == 1, "the other has left", 10)


def test_a_member_whose_place_another_takes_ends_and_says_so(books):
    """F10: with its group.instance.id; it is told whether it commits, or is idle."""
    books.produce(40)
    static = {"options": {"group.instance.id": "one"}, "drain_s": 30.0}
    one = consumer_of(books, **static)
    mine = take(one, 40)
    with consuming(books, **static) as other:
        taken = take(other, 40)
        one.ack_many(mine)
        with pytest.raises(ConsumerError, match="fenced by other consumer"):
            one.poll(1, 20.0)
        with pytest.raises(ConsumerError, match="fenced by other consumer"):
            one.close()
        assert books.lag() == 40
        assert other.ack_many(taken) == 40
        wait_until(lambda: not books.lag(), "the other has committed")


def test_aborted_transactions_are_not_handed_out_and_markers_passed(kafka_broker, tmp_path):
    """F13 on a broker that knows of aborted records: the lag becomes 0."""
    books = Books(kafka_broker, tmp_path, partitions=1)
    producer = Producer(kafka_broker.conf(transactional_id="markers"))
    producer.init_transactions(30)
    for n in range(4):
        producer.begin_transaction()
        for _ in range(5):
            producer.produce(books.topic, b"%d" % n, partition=0)
        producer.flush()
        if n % 2:
            producer.abort_transaction(30)
        else:
            producer.commit_transaction(30)
    with consuming(books, backoff_ms=1, max_backoff_ms=1) as consumer:
        taken = take(consumer, 10)
        assert [record.value for record in taken] == [b"0"] * 5 + [b"2"] * 5
        consumer.fail(taken[3], "once")
        assert consumer.ack_many(taken[:3] + taken[4:]) == 9
        consumer.ack(*take(consumer, 1))
        wait_until(lambda: books.committed()[0][0] == 24, "the last, aborted, is committed over")
        assert consumer.poll(1, 0.1) == []


def test_what_was_compacted_away_is_passed_over(kafka_broker, tmp_path):
    """F13: the lag becomes 0, and what had failed before is retried from memory."""
    books = Books(kafka_broker, tmp_path, partitions=1)
    books.topic = kafka_broker.new_topic(
        cleanup_policy="compact",
        segment_ms=1,
        min_cleanable_dirty_ratio=0.001,
        delete_retention_ms=0,
    )
    keyed = [{"key": b"%d" % (n % 3), "value": b"%d" % n} for n in range(30)]
    arguments = {"partitions": [(books.topic, 0)], "backoff_ms": 1, "max_backoff_ms": 1}
    with consuming(books, **arguments) as consumer:
        taken = []
        for n in range(0, 30, 10):
            kafka_broker.produce(books.topic, keyed[n : n + 10])
            taken += take(consumer, 10)
        # The last segment is never compacted.
        kafka_broker.produce(books.topic, [{"key": b"last", "value": b"30"}])
        wait_until(lambda: len(kafka_broker.consume(books.topic)) <= 4, "it is compacted")
        consumer.fail(taken[0], "once")
        assert consumer.ack_many(taken[1:]) == 29
        again = take(consumer, 2)
        assert {one.value for one in again} == {b"0", b"30"}
        wait_until(lambda: books.committed()[0][1], "something is committed")
    # Neither was acked: at a restart the one is not there any more.
    with consuming(books, **arguments) as consumer:
        (last,) = take(consumer, 1)
        assert last.offset == 30
        consumer.ack(last)
        wait_until(lambda: books.committed()[0][0] == 31, "all is committed over")


def test_metadata_has_as_much_room_as_brokers_say(kafka_broker):
    """F21: 4,095 units of 15 bits; one more is refused, and it is shortened."""
    topic, group = kafka_broker.new_topic(), kafka_broker.new_group()
    kafka_broker.produce(topic, [b"x"])
    tracker = OffsetTracker(topic, 0, 1, 0)
    tracker.emitted(np.arange(200_000))
    tracker.acked(np.flatnonzero(np.random.default_rng(21).random(200_000) < 0.5))
    commit = encode_metadata(tracker, 7)
    assert KAFKA_LIMIT - 10 < len(commit.metadata) <= KAFKA_LIMIT
    with Cluster(ClientSettings(kafka_broker.bootstrap_servers)) as cluster:
        for filled in (commit.metadata, commit.metadata.ljust(KAFKA_LIMIT, "\u8fff")):
            answers = cluster.commit(group, {(topic, 0): (commit.offset, filled)})
            assert not answers.failed
            assert kafka_broker.committed(group, topic) == (commit.offset, filled)
        answers = cluster.commit(group, {(topic, 0): (commit.offset, filled + "\u8fff")})
        (failure,) = answers.failed.values()
        assert failure.code == "OFFSET_METADATA_TOO_LARGE"
    restored = decode_metadata(topic, 0, *commit)
    assert restored.problem is None
    assert restored.state.end > 30_000
