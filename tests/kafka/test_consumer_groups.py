"""Consumers of one group on a real broker: partitions come and go, whatever the protocol."""

import logging
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import ConsumerGroupState, KafkaError
from consumer_counts import (
    Counts,
    consumer_of,
    consuming,
    is_committed,
    partitions_of,
    take,
    workers,
)
from servers import TIMEOUT_S, wait_until

from ackcore.kafka import ConsumerError
from ackcore.kafka.consumer import consumer_client
from ackcore.kafka.consumer.client_thread import ClientThread

PROTOCOLS = ["cooperative", "eager", "consumer"]


def group(protocol):
    """KIP-848's session is the broker's."""
    options = {"session.timeout.ms": None, "heartbeat.interval.ms": None}
    return {"protocol": protocol, "options": options if protocol == "consumer" else {}}


def closing(consumer):
    return {each.partition for each in consumer.stats().partitions if each.paused == "revoked"}


@pytest.fixture
def counts(kafka_broker, tmp_path):
    return Counts(kafka_broker, tmp_path)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_partitions_that_are_taken_away_are_drained(counts, protocol):
    """Records acked in the drain are not handed out again, and unacked ones are fenced."""
    counts.produce(80)
    with consuming(counts, drain_s=30.0, commit_interval_s=1000, **group(protocol)) as one:
        mine = take(one, 80)
        with consuming(counts, **group(protocol)) as other:
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
            if protocol != "eager":  # what it keeps goes on as it was
                kept = [r for r in mine if r.partition not in theirs and not r.offset % 2]
                assert one.ack_many(kept) == len(kept) > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_callbacks_are_told_of_each_partition_as_it_comes_and_goes_and_seek_in_it(counts, protocol):
    counts.produce(40)
    told = {number: [] for number in range(4)}

    def on_assign(consumer, partitions):
        for topic, number in partitions:
            told[number].append("assign")
            consumer.seek(topic, number, 8)

    def on_revoke(consumer, partitions):
        for _, number in partitions:
            told[number].append("revoke")

    callbacks = {"on_assign": on_assign, "on_revoke": on_revoke}
    with consuming(counts, drain_s=0, **callbacks, **group(protocol)) as one:
        assert {record.offset for record in take(one, 8)} == {8, 9}
        with consuming(counts, **group(protocol)) as other:
            wait_until(lambda: len(partitions_of(other)) == 2, "the other has two")
            wait_until(lambda: len(partitions_of(one)) == 2, "it has the rest")
            # What was acked by nobody is committed over: the seek said so.
            assert {record.offset for record in take(other, 4)} == {8, 9}
    for events in told.values():
        assert events == ["assign", "revoke"] * (len(events) // 2), told
    assert sum(map(len, told.values())) >= 8


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_join_and_leave_under_load(counts, protocol):
    """F8: nothing is lost, and done again is only what was out when its partition went."""
    counts.produce(2000)
    poison = {b"%d" % i for i in range(0, 4000, 200)}

    def may_fail(record):
        return ValueError("poison") if record.value in poison else None

    arguments = {"max_in_flight": 100, **group(protocol)}
    with consuming(counts, **arguments) as one, workers(one, counts, may_fail=may_fail):
        wait_until(lambda: partitions_of(one) and counts.effects(), "the first works")
        for _ in range(2):
            with consuming(counts, **arguments) as other, workers(other, counts, may_fail=may_fail):
                wait_until(lambda: partitions_of(other), "another has some")
                counts.produce(1000)
                counts.check_commits()
                other.close()
        counts.wait_for_the_end()
    counts.check_complete(most_again=50, poison=poison)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_members_that_leave_in_a_rebalance_hold_up_nobody(counts, protocol):
    """Two at once, while partitions are on their way to them; no session ends meanwhile."""
    arguments = group(protocol)
    if protocol != "consumer":
        arguments["options"] = {"session.timeout.ms": 45_000, "heartbeat.interval.ms": 1000}
    with (
        consuming(counts, **arguments) as one,
        consuming(counts, **arguments) as two,
        workers(one, counts),
        workers(two, counts),
        ThreadPoolExecutor(2) as pool,
    ):
        wait_until(lambda: partitions_of(one) and partitions_of(two), "both have some")
        with consuming(counts, **arguments) as three, consuming(counts, **arguments) as four:
            wait_until(
                lambda: (
                    len(counts.members()) == 4
                    and len(partitions_of(one) | partitions_of(two)) < counts.partitions
                ),
                "partitions are on their way to them",
            )
            counts.produce(400)
            for closed in [pool.submit(each.close) for each in (three, four)]:
                closed.result(10)
        counts.wait_for_the_end(15)
    counts.check_complete(most_again=6)


@pytest.mark.parametrize("protocol", ["cooperative", "eager"])
@pytest.mark.parametrize("when", ["without partitions", "as it asks to join"])
def test_a_member_without_partitions_leaves_its_group(kafka_broker, tmp_path, protocol, when):
    """A member that stayed would be in the group until its session is over, after 45 s."""
    counts = Counts(kafka_broker, tmp_path, partitions=1)
    arguments = {"protocol": protocol, "options": {"session.timeout.ms": 45_000}}

    def described():
        (found,) = kafka_broker.admin.describe_consumer_groups([counts.group]).values()
        return found.result(10)

    def is_stable(n):
        found = described()
        return found.state == ConsumerGroupState.STABLE and len(found.members) == n

    with consuming(counts, **arguments) as one:
        wait_until(lambda: partitions_of(one), "it has the partition")
        with consuming(counts, **arguments) as other:
            if when == "without partitions":
                wait_until(lambda: is_stable(2), "the other has joined, without a partition")
            else:
                wait_until(lambda: len(described().members) == 2, "the other asks to join")
            other.close()
        wait_until(lambda: len(described().members) == 1, "the other has left", 10)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_callback_runs_while_the_client_closes(counts, monkeypatch, protocol):
    """A call that one makes may then never be answered, and would hold the GIL for ever."""
    closing, late = threading.Event(), []
    close, revoke = Client.close, ClientThread._on_revoke

    class Watched(Client):
        def close(self):
            closing.set()
            close(self)

    def revoked(self, client, partitions):
        late.append(closing.is_set())
        revoke(self, client, partitions)

    monkeypatch.setattr(consumer_client, "Consumer", Watched)
    monkeypatch.setattr(ClientThread, "_on_revoke", revoked)
    with consuming(counts, **group(protocol)) as one:
        wait_until(lambda: partitions_of(one), "it has partitions")
    assert late == [False]
    assert closing.is_set()


def text(value):
    return struct.pack(">h", len(value)) + value.encode()


def ask(counts, kind, version, *fields):
    """Send a request of Kafka's protocol to the broker; return its answer, behind the header."""
    request = b"".join([struct.pack(">hhi", kind, version, 1), text("test"), *fields])
    host, port = counts.server.bootstrap_servers.split(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        return connection.recv(size, socket.MSG_WAITALL)[4:]


def join(counts, assignor, member=""):
    """Join the group in the name of a member, or of a new one; return generation and member.

    The answer comes when all members have joined.
    """
    subscription = struct.pack(">hi", 0, 1) + text(counts.topic) + struct.pack(">i", -1)
    answer = ask(
        *(counts, 11, 5, text(counts.group), struct.pack(">ii", 10_000, 10_000), text(member)),
        *(struct.pack(">h", -1), text("consumer"), struct.pack(">i", 1), text(assignor)),
        *(struct.pack(">i", len(subscription)), subscription),
    )
    _, error, generation = struct.unpack_from(">ihi", answer)
    at = 10
    for _ in range(3):  # the assignor, the leader, the member
        (size,) = struct.unpack_from(">h", answer, at)
        member, at = answer[at + 2 : at + 2 + size].decode(), at + 2 + size
    if error == KafkaError.MEMBER_ID_REQUIRED:
        return join(counts, assignor, member)
    assert not error
    return generation, member


def assign_nothing(counts, generation, leader):
    """Tell the broker, as the leader of a generation, that no member has a partition."""
    nobody = struct.pack(">hi", -1, 0)
    ask(counts, 14, 3, text(counts.group), struct.pack(">i", generation), text(leader), nobody)


def test_a_member_that_closes_before_its_first_assignment_leaves_its_group(
    kafka_broker, tmp_path, caplog
):
    """It has joined, and waits for what the leader assigns: another member, which is slow."""
    caplog.set_level(logging.DEBUG)
    counts = Counts(kafka_broker, tmp_path, partitions=1)
    _, leader = join(counts, "cooperative-sticky")
    options = {"session.timeout.ms": 45_000, "debug": "cgrp"}
    with consuming(counts, options=options) as other, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: len(counts.members()) == 2, "the other asks to join")
        generation, _ = join(counts, "cooperative-sticky", leader)
        wait_until(lambda: "-> wait-sync" in caplog.text, "the other has joined")
        (mine,) = set(counts.members()) - {leader}
        closed = pool.submit(other.close)
        wait_until(lambda: other._thread._closing, "it closes")
        assign_nothing(counts, generation, leader)
        closed.result(TIMEOUT_S)
        wait_until(lambda: mine not in counts.members(), "it has left", 5)


@pytest.mark.parametrize(
    ("protocol", "assignor"), [("cooperative", "cooperative-sticky"), ("eager", "range")]
)
def test_what_a_generation_that_is_over_may_not_commit_the_next_does(
    counts, caplog, protocol, assignor
):
    """F10: by a real broker; it is refused before a heartbeat says so."""
    counts.produce(80)
    options = {"heartbeat.interval.ms": 5000}
    with consuming(counts, protocol=protocol, options=options) as one:
        mine = take(one, 80)
        wait_until(lambda: is_committed(one), "where they begin")
        (member,) = counts.members()
        assert join(counts, assignor, member) == (2, member)
        assert one.ack_many(mine) == 80
        wait_until(lambda: one.stats().counts.rejected, "its commit is refused", 4)
        assert "was fenced: Broker: Specified group generation id is not valid" in caplog.text
        wait_until(
            lambda: not (one.ack_many(one.poll(80, 0.05)) or counts.lag()), "it is committed"
        )


def test_a_member_whose_place_another_takes_ends_and_says_so(counts):
    """F10: with its group.instance.id; it is told whether it commits, or is idle."""
    counts.produce(40)
    static = {"options": {"group.instance.id": "one"}, "drain_s": 30.0}
    one = consumer_of(counts, **static)
    mine = take(one, 40)
    with consuming(counts, **static) as other:
        taken = take(other, 40)
        one.ack_many(mine)
        with pytest.raises(ConsumerError, match="fenced by other consumer"):
            one.poll(1, 20.0)
        with pytest.raises(ConsumerError, match="fenced by other consumer"):
            one.close()
        assert counts.lag() == 40
        assert other.ack_many(taken) == 40
        wait_until(lambda: not counts.lag(), "the other has committed")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_consumer_by_hand_in_a_group_of_subscribers_is_told_why_it_cannot_commit(
    counts, caplog, protocol
):
    """It reads what they read, and nothing of it is committed until they leave."""
    counts.produce(40)
    with consuming(counts, partitions=[(counts.topic, 0)]) as one:
        with consuming(counts, **group(protocol)) as member:
            take(member, 40)
            one.ack_many(take(one, 40 // counts.partitions))
            wait_until(lambda: one.stats().counts.rejected, "its commit is refused")
            with pytest.raises(TimeoutError, match=r"last refusal: .* group_id of their own"):
                one.commit(0.01)
        assert "group_id of their own; later commits include it" in caplog.text
        one.commit()


def test_aborted_transactions_are_not_handed_out_and_markers_passed(kafka_broker, tmp_path):
    """F13 on a broker that knows of aborted records: the lag becomes 0."""
    counts = Counts(kafka_broker, tmp_path, partitions=1)
    values = [[b"%d" % n] * 5 for n in range(4)]
    kafka_broker.produce_in_transactions(counts.topic, values, aborted={1, 3})
    with consuming(counts, backoff_s=0.001, max_backoff_s=0.001) as consumer:
        taken = take(consumer, 10)
        assert [record.value for record in taken] == [b"0"] * 5 + [b"2"] * 5
        consumer.fail(taken[3], "once")
        assert consumer.ack_many(taken[:3] + taken[4:]) == 9
        consumer.ack(*take(consumer, 1))
        wait_until(lambda: counts.committed()[0][0] == 24, "the last, aborted, is committed over")
        assert consumer.poll(1, 0.1) == []


def test_what_was_compacted_away_is_passed_over(kafka_broker, tmp_path):
    """F13: the lag becomes 0, and what had failed before is retried from memory."""
    counts = Counts(kafka_broker, tmp_path, partitions=1)
    counts.topic = kafka_broker.compacted_topic()
    keyed = [{"key": b"%d" % (n % 3), "value": b"%d" % n} for n in range(30)]
    arguments = {"partitions": [(counts.topic, 0)], "backoff_s": 0.001, "max_backoff_s": 0.001}
    with consuming(counts, **arguments) as consumer:
        taken = []
        for n in range(0, 30, 10):
            kafka_broker.produce(counts.topic, keyed[n : n + 10])
            taken += take(consumer, 10)
        # The last segment is never compacted.
        kafka_broker.produce(counts.topic, [{"key": b"last", "value": b"30"}])
        wait_until(lambda: len(kafka_broker.consume(counts.topic)) <= 4, "it is compacted")
        consumer.fail(taken[0], "once")
        assert consumer.ack_many(taken[1:]) == 29
        again = take(consumer, 2)
        assert {one.value for one in again} == {b"0", b"30"}
        wait_until(lambda: counts.committed()[0][1], "something is committed")
    # Neither was acked: at a restart the one is not there any more.
    with consuming(counts, **arguments) as consumer:
        (last,) = take(consumer, 1)
        assert last.offset == 30
        consumer.ack(last)
        wait_until(lambda: counts.committed()[0][0] == 31, "all is committed over")
