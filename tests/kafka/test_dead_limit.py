"""How many of a consumer's records may die, and what is left when it was too many."""

from contextlib import closing
from functools import partial

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from consumer_counts import Counts, Effects, by_hand, consumer_of, consuming, take, workers
from servers import wait_until

from ackcore.dispatch import Reject
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
    counts = Counts(mock_kafka, tmp_path, partitions=2)
    counts.produce(2000)
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
    counts = Counts(mock_kafka, tmp_path, partitions=1)
    counts.produce(10)
    mock_kafka.delete_records(counts.topic, 5)
    arguments = {"start": {(counts.topic, 0): 0}, "partitions": [(counts.topic, 0)]}
    with consuming(counts, max_dead=0, **arguments) as consumer:
        consumer.ack_many(take(consumer, 5))
        wait_until(lambda: not counts.lag(), "all is done")
        assert consumer.stats().counts.dead == 1
