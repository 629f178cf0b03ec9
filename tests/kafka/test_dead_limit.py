"""How many of a consumer's records may die, and what is left when it was too many."""

from functools import partial

import pytest

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

from consumer_books import Books, Effects, by_hand, consumer_of, consuming, take, workers
from servers import wait_until

from ackcore.dispatch import Reject
from ackcore.kafka import ConsumerError, TooManyDead
from ackcore.kafka.dead_limit import DeadLimit


def excess(limit, ends):
    """After how many records it is too much, and what it says; "x" is a dead one."""
    for n, end in enumerate(ends, 1):
        limit.ended(dead=end == "x")
        if limit.excess is not None:
            return n, limit.excess
    return None


@pytest.mark.parametrize(
    ("arguments", "ends", "found"),
    [
        ({}, "x" * 5000, None),
        ({"in_a_row": 2}, "xx.xx.xx", None),
        ({"in_a_row": 2}, "xx.xxx", (6, "3 records died one after another, and max_dead_in_a_row")),
        ({"in_a_row": 0}, "..x", (3, "1 records")),
        ({"share": 0.5, "window": 4}, "xxx", None),
        ({"share": 0.5, "window": 4}, "xx..xx..xx", None),
        (
            {"share": 0.5, "window": 4},
            "xx..x.xx",
            (8, "3 of the last 4 records died, and max_dead"),
        ),
        *(
            ({"share": n / 100, "window": 100}, "." * (100 - n) + "x" * n + ".", None)
            for n in (29, 57, 58)
        ),
        ({"share": 0.29, "window": 100}, "." * 70 + "x" * 30, (100, "30 of the last 100")),
        ({"share": 1.0, "window": 3}, "xx.xx.xx", None),
        ({"share": 1.0, "window": 3}, ".xxx", (4, "3 of the last 3 records died")),
        ({"share": 0.001, "window": 1000}, "x" + "." * 999 + "x" + "." * 999, None),
        ({"share": 0.001, "window": 1000}, "x" + "." * 998 + "x", (1000, "2 of the last 1000")),
    ],
)
def test_so_many_are_too_many(arguments, ends, found):
    answer = excess(DeadLimit(**arguments), ends)
    if found is None:
        assert answer is None
    else:
        assert (answer[0], answer[1][: len(found[1])]) == found


def work_off(consumer, books, may_fail):
    effects = Effects(books.file)
    try:
        while taken := consumer.poll(1, 5.0):
            error = may_fail(taken[0])
            if error is None:
                effects(taken[0])
                consumer.ack(taken[0])
            else:
                consumer.fail(taken[0], error)
    finally:
        effects.close()


@pytest.mark.parametrize(
    "limit", [{"max_dead_in_a_row": 20}, {"max_dead": 0.2, "max_dead_window": 100}], ids=str
)
def test_too_many_dead_end_a_consumer_and_nothing_is_lost(mock_kafka, tmp_path, limit):
    """The service goes mad in between: what died of it is kept, or there at the next start."""
    books = Books(mock_kafka, tmp_path, partitions=2)
    books.produce(2000)
    mad = {at for at in books.delivered if at[1] >= 500}

    def may_fail(record):
        return Reject("mad") if (record.partition, record.offset) in mad else None

    consumer = consumer_of(books, drain_s=0, **by_hand(books), **limit)
    for worker in (partial(work_off, consumer, books, may_fail), consumer.close):
        with pytest.raises(TooManyDead, match=r"records died.* and max_dead.*at the next start"):
            worker()
    assert issubclass(TooManyDead, ConsumerError)
    books.check_commits()
    assert len(books.done_by_commits()) <= 1000 + len(books.dead())
    # The service is well again: all others are done, and few more are dead than it had seen.
    with consuming(books, **by_hand(books), **limit) as consumer, workers(consumer, books):
        books.wait_for_the_end()
    effects, dead = books.effects(), books.dead()
    assert books.delivered.keys() == effects.keys() | dead.keys()
    assert not effects.keys() & dead.keys()
    assert len(dead) <= 500


def test_a_range_that_was_lost_is_no_record_that_died(mock_kafka, tmp_path):
    books = Books(mock_kafka, tmp_path, partitions=1)
    books.produce(10)
    mock_kafka.delete_records(books.topic, 5)
    arguments = {"start": {(books.topic, 0): 0}, "partitions": [(books.topic, 0)]}
    with consuming(books, max_dead_in_a_row=0, **arguments) as consumer:
        consumer.ack_many(take(consumer, 5))
        wait_until(lambda: not books.lag(), "all is done")
        assert consumer.stats().counts.dead == 1
