"""A log that was truncated is told from one that has but another leader, also filled up again."""

from __future__ import annotations

import struct

import pytest
from consumer_counts import take
from servers import wait_until

from ackcore.kafka import Consumer
from ackcore.kafka import truncations as truncation_module
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import Cluster
from ackcore.kafka.truncations import truncated_at, truncations


@pytest.fixture
def kafka(mock_kafka):
    """Offsets 0 to 4 are of the leader of epoch 0, 5 to 9 of that of epoch 1."""
    mock_kafka.create_topic("t")
    mock_kafka.produce("t", [b"a"] * 5)
    mock_kafka.partition_set_leader("t", 0, 2)
    mock_kafka.produce("t", [b"b"] * 5)
    return mock_kafka


def asked(kafka, low, position, epoch, **arguments):
    settings = ClientSettings(kafka.bootstrap_servers, {"log_level": 0})
    return truncated_at(settings, ("t", 0), low, position, epoch, **arguments)


@pytest.mark.parametrize(
    ("low", "position", "epoch", "found"),
    [
        (0, 5, 0, None),  # another leader, which had it all
        (0, 3, 0, None),
        (0, 10, 1, None),
        (0, 10, 0, 5),
        (0, 6, 0, 5),
        (5, 10, 0, 5),
        (8, 10, 0, 8),
        (8, 8, 0, None),  # nothing of it is there any more
    ],
)
def test_where_a_log_is_another_one_is_found(kafka, low, position, epoch, found):
    assert asked(kafka, low, position, epoch) == found


def test_many_partitions_with_a_new_leader_take_one_client(kafka, monkeypatch):
    """Only those whose log is another one have a client each; a broker has thousands of them."""
    made = []
    make = truncation_module.new_client
    monkeypatch.setattr(truncation_module, "new_client", lambda *of: made.append(of) or make(*of))
    kafka.create_topic("many", 20)
    for partition in range(20):
        kafka.produce("many", [b"a"] * 5, partition)
        kafka.partition_set_leader("many", partition, 2 + partition % 2)
        kafka.produce("many", [b"b"] * 5, partition)
    settings = ClientSettings(kafka.bootstrap_servers, {"log_level": 0})
    same = {("many", partition): (0, 5 if partition % 3 else 2, 0) for partition in range(20)}
    assert truncations(settings, same) == {}
    assert len(made) == 1
    other = {("many", 7): (0, 10, 0), ("many", 8): (8, 10, 0), ("many", 9): (8, 8, 0)}
    assert truncations(settings, same | other) == {("many", 7): 5, ("many", 8): 8}
    assert truncations(settings, {("many", 9): (8, 8, 0)}) == {}


def test_brokers_that_do_not_answer_say_nothing(kafka):
    kafka.broker_set_down(-1)
    with pytest.raises(
        ConnectionError,
        match=r"no broker has answered whether the log of t-0 below offset 10 was truncated",
    ):
        asked(kafka, 0, 10, 0, timeout_s=0.5)


def cut(log, offset):
    """Take the batches from an offset on from a partition's log, as a disk that lost them."""
    held, place = log.read_bytes(), 0
    while place < len(held):
        first, size = struct.unpack_from(">qi", held, place)
        if first >= offset:
            break
        place += 12 + size
    assert 0 < place < len(held)
    log.write_bytes(held[:place])


@pytest.mark.broker
def test_a_broker_whose_disk_lost_the_end_of_a_log_is_found_out(own_kafka_broker):
    """By who asks; a consumer hears of it by itself, and reads on where it is another one."""
    kafka = own_kafka_broker
    asked, read = topics = [kafka.new_topic() for _ in range(2)]
    settings = ClientSettings(kafka.bootstrap_servers)

    def marks():
        with Cluster(settings) as cluster:
            return cluster.watermarks([(asked, 0)]).found.get((asked, 0))

    for topic in topics:
        for n in range(10):
            kafka.produce(topic, [b"%d" % n])
    before = marks()
    assert (*before, before.epoch) == (0, 10, 0)
    with Consumer(
        read,
        bootstrap_servers=kafka.bootstrap_servers,
        group_id=read,
        start="earliest",
        out_of_range="earliest",
    ) as consumer:
        for record in take(consumer, 10):
            consumer.ack(record)
        kafka.kill()
        try:
            for topic in topics:
                (log,) = kafka._directory.glob(f"**/{topic}-0/*.log")
                cut(log, 4)
        finally:
            kafka.restart()
        for topic in (read, asked):
            kafka.produce(topic, [b"other %d" % n for n in range(20)])
        found = take(consumer, 20)
        if found[0].offset == 0:
            # It looked before any was produced: a partition that is shorter is read from its start.
            again, found = found[:4], [*found[4:], *take(consumer, 4)]
            assert [record.value for record in again] == [b"%d" % n for n in range(4)]
            for record in again:
                consumer.ack(record)
        assert [record.value for record in found] == [b"other %d" % n for n in range(20)]
        assert found[0].offset == 4
        for record in found:
            consumer.ack(record)
    assert kafka.committed(read, read)[0] == 24
    after = wait_until(marks, "the partition")
    assert (*after,) == (0, 24)
    assert after.epoch > before.epoch
    assert truncated_at(settings, (asked, 0), 0, 10, before.epoch) == 4
    assert truncated_at(settings, (asked, 0), 0, 4, before.epoch) is None
    assert truncated_at(settings, (asked, 0), 0, 24, after.epoch) is None
