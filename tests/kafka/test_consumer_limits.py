"""How many records of a consumer may die; and consumers with a slow network, or slow workers."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from consumer_counts import (
    Counts,
    Effects,
    by_hand,
    consumer_of,
    consuming,
    is_committed,
    take,
    workers,
)
from servers import wait_until

from ackcore.calls import Reject
from ackcore.kafka import TooManyDead


def fail_one_by_one(consumer, records):
    """Each after the letter of the one before is kept; the last one's is not."""
    for n, record in enumerate(records, 1):
        consumer.fail(record, Reject("mad"))
        wait_until(lambda n=n: consumer.stats().counts.dead == n or consumer.stopped, "it is kept")
        if consumer.stopped:
            return


def fail_at_once(consumer, records):
    """All of them before the first letter is sent."""
    with consumer._changed:
        for record in records:
            consumer.fail(record, Reject("mad"))


@pytest.mark.parametrize(
    ("fail", "kept"), [(fail_one_by_one, 20), (fail_at_once, 0)], ids=["one by one", "at once"]
)
@pytest.mark.parametrize(
    "limit", [{"max_dead": 20}, {"max_dead_ratio": 0.2, "max_dead_window": 100}], ids=str
)
def test_too_many_dead_end_a_consumer_and_nothing_is_lost(mock_kafka, tmp_path, limit, fail, kept):
    """The service goes mad in between: what died of it is kept, or there at the next start.

    What is on its way to the dead letters then may be both, without a time for that.
    """
    counts = Counts(mock_kafka, tmp_path, partitions=2, records=2000)
    consumer = consumer_of(counts, drain_s=0, **by_hand(counts), **limit)
    taken = take(consumer, 2000)
    with closing(Effects(counts.file)) as effects:
        for record in taken:
            if record.offset < 500:
                effects(record)
                consumer.ack(record)
    fail(consumer, [record for record in taken if record.offset >= 500][:30])
    for ends in (partial(consumer.poll, 1, 20.0), consumer.close):
        with pytest.raises(
            TooManyDead, match=r"records that .* died, and max_dead.*at the next start"
        ):
            ends()
    counts.check_commits()
    assert len(counts.done_by_commits()) == 1000 + kept
    # The service is well again: all others are done, and no more are dead.
    with consuming(counts, **by_hand(counts), **limit) as consumer, workers(consumer, counts):
        counts.wait_for_the_end()
    effects, dead = counts.effects(), counts.dead()
    assert counts.delivered.keys() == effects.keys() | dead.keys()
    assert not effects.keys() & dead.keys()
    assert len(dead) == kept


def test_a_range_that_was_lost_is_no_record_that_died(mock_kafka, tmp_path):
    counts = Counts(mock_kafka, tmp_path, partitions=1, records=10)
    mock_kafka.delete_records(counts.topic, 5)
    arguments = {"start": {(counts.topic, 0): 0}, "partitions": [(counts.topic, 0)]}
    with consuming(counts, max_dead=0, **arguments) as consumer:
        consumer.ack_many(take(consumer, 5))
        wait_until(lambda: not counts.lag(), "all is done")
        assert consumer.stats().counts.dead == 1


def test_a_slow_network_loses_nothing_and_does_nothing_twice(mock_kafka, tmp_path):
    """F11: each answer of all brokers takes longer than the time between two commits."""
    counts = Counts(mock_kafka, tmp_path, records=1000)
    with consuming(counts) as consumer, workers(consumer, counts):
        wait_until(counts.effects, "it works")
        for broker in (1, 2, 3):
            mock_kafka.broker_set_rtt(broker, 100)
        counts.produce(1000)
        wait_until(lambda: consumer.stats().counts.acked == 2000, "all of it is done")
        wait_until(lambda: is_committed(consumer), "commits arrive")
        for broker in (1, 2, 3):
            mock_kafka.broker_set_rtt(broker, 0)
        counts.wait_for_the_end()
        assert consumer.stats().counts.rejected == 0
    counts.check_complete()


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it is asked of Linux")
def test_memory_is_flat_however_much_goes_through_slow_workers(mock_kafka, tmp_path):
    """F19, N9: in a process in use, it grows by less than an eighth of what is read then."""
    counts = Counts(mock_kafka, tmp_path, partitions=2)
    round_, used = [b"x" * 1000] * 1000, []
    with consuming(counts, max_in_flight=500) as consumer:
        for number in range(50):
            for partition in range(2):
                mock_kafka.produce(counts.topic, round_, partition)
            wait_until(
                lambda: {p.paused for p in consumer.stats().partitions} == {"in flight"}, "full"
            )
            for _ in range(20):
                assert consumer.ack_many(take(consumer, 100)) == 100
            pages = Path("/proc/self/statm").read_text().split()[1]
            # Until then allocators of the client's threads and the mock cluster's log fill.
            if number >= 20:
                used.append(int(pages) * os.sysconf("SC_PAGE_SIZE"))
        wait_until(lambda: [at for at, _ in counts.committed()] == [50_000] * 2, "it is committed")
    assert used[-1] - used[4] < 25 * 2 * 1_000_000 / 8, [n >> 20 for n in used]
