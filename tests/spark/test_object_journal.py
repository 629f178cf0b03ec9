"""A journal in a bucket gives everyone the same answer, whoever dies when."""

from __future__ import annotations

import logging
import threading
from collections import Counter

import pytest
from s3_server import COLLIDED, ERROR_AFTER, LOST, REFUSED

from ackcore.spark.stores import object_journal
from ackcore.spark.stores.interface import StoreUnavailable
from ackcore.spark.stores.object_journal import ObjectJournal
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import open_store

CONTEXT = bytes(range(16))


def key(n):
    return n.to_bytes(16, "big")


@pytest.fixture
def opened(bucket, monkeypatch):
    """``opened()`` opens the journal as another process does; its thread has long to wait."""
    monkeypatch.setattr(object_journal, "_EVERY_S", 3600)
    made = []

    def open_one(context=CONTEXT):
        made.append(ObjectJournal(open_store(bucket, "checkpoint"), "work/7.journal/b/0", context))
        return made[-1]

    yield open_one
    for one in made:
        one.close()


def segments(bucket):
    return [entry.key for entry in open_store(bucket, "checkpoint").list("work/7.journal")]


def test_what_was_synced_is_everyones(opened, bucket):
    one = opened()
    assert one.get(key(1)) is None
    one.append(key(1), b"a")
    one.append(key(2), b"")
    one.append(key(1), b"another answer")
    assert (one.get(key(1)), one.get(key(2))) == (b"a", b"")
    assert opened().get(key(1)) is None
    one.sync()
    one.sync()
    assert len(segments(bucket)) == 1
    other = opened()
    assert (other.get(key(1)), other.get(key(2)), other.get(key(3))) == (b"a", b"", None)
    other.forget([key(1)])
    assert other.get(key(1)) is None


def test_of_two_answers_the_first_that_was_synced_is_used_by_both(opened, bucket):
    one, other = opened(), opened()
    one.append(key(1), b"of one")
    other.append(key(1), b"of the other")
    other.append(key(2), b"two")
    other.sync()
    one.sync()
    assert one.get(key(1)) == other.get(key(1)) == b"of the other"
    one.append(key(3), b"three")
    one.sync()
    assert opened().get(key(1)) == b"of the other"
    assert [opened().get(key(n)) for n in (2, 3)] == [b"two", b"three"]


def test_many_writers_at_once_agree(opened):
    agreed = [None] * 4
    start = threading.Barrier(4)

    def write(writer):
        journal = opened()
        start.wait()
        for n in range(20):
            journal.append(key(n), b"%d of %d" % (n, writer))
            if n % 3 == writer % 3:
                journal.sync()
        journal.sync()
        agreed[writer] = [journal.get(key(n)) for n in range(20)]

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert agreed[0] == agreed[1] == agreed[2] == agreed[3]
    assert [opened().get(key(n)) for n in range(20)] == agreed[0]


@pytest.mark.parametrize("how", [LOST, ERROR_AFTER, REFUSED, COLLIDED])
def test_an_answer_of_the_bucket_that_is_lost_changes_nothing(opened, bucket, s3, how):
    one = opened()
    for n in range(3):
        one.append(key(n), b"x")
        s3.fail(how, "PUT")
        one.sync()
    assert len(segments(bucket)) == 3
    assert [opened().get(key(n)) for n in range(3)] == [b"x"] * 3


def test_what_is_not_synced_is_put_by_and_by_and_when_it_is_closed(opened, bucket, monkeypatch):
    put = threading.Event()
    whole = ObjectStore.put

    def told(*args, **kwargs):
        found = whole(*args, **kwargs)
        put.set()
        return found

    monkeypatch.setattr(ObjectStore, "put", told)
    one = opened()
    one.append(key(1), b"a")
    one.close()
    one.close()
    assert opened().get(key(1)) == b"a"
    put.clear()
    monkeypatch.setattr(object_journal, "_EVERY_S", 0.01)
    other = opened()
    other.append(key(2), b"b")
    assert put.wait(30)
    assert opened().get(key(2)) == b"b"
    monkeypatch.setattr(object_journal, "_SEGMENT_BYTES", 10)
    monkeypatch.setattr(object_journal, "_EVERY_S", 3600)
    third = opened()
    third.append(key(3), bytes(11))
    assert opened().get(key(3)) == bytes(11)


def test_what_others_put_is_looked_for_now_and_then(opened, s3, monkeypatch):
    one, other = opened(), opened()
    one.append(key(1), b"a")
    one.sync()
    before = len(s3.requests)
    assert [other.get(key(1)) for _ in range(100)] == [None] * 100
    assert len(s3.requests) == before
    monkeypatch.setattr(object_journal, "_EVERY_S", 0)
    assert other.get(key(1)) == b"a"


def test_many_segments_are_read_and_few_are_kept(opened, monkeypatch):
    monkeypatch.setattr(object_journal, "_KEPT_BYTES", 300)
    one = opened()
    for n in range(40):
        one.append(key(n), b"%d" % n * 50)
        one.sync()
    other = opened()
    for journal in (one, other):
        assert [journal.get(key(n)) for n in range(40)] == [b"%d" % n * 50 for n in range(40)]
        assert len(journal._kept) < 10


def test_damage_counts_as_calls_that_were_not_made(opened, bucket, caplog):
    one = opened()
    for n in range(3):
        one.append(key(n), b"answer %d" % n)
        one.append(key(n + 10), b"another %d" % n)
        one.sync()
    store = open_store(bucket, "checkpoint")
    first, second, _ = segments(bucket)
    store.put(first, b"")
    data = store.get(second).data
    store.put(second, data.replace(b"answer 1", b"answer 7"))
    with caplog.at_level(logging.WARNING, "ackcore"):
        other = opened()
        found = [other.get(key(n)) for n in (0, 10, 1, 11, 2, 12)]
    assert found == [None, None, None, b"another 1", b"answer 2", b"another 2"]
    told = Counter("is damaged" in record.getMessage() for record in caplog.records)
    assert told == {True: 2}
    other.append(key(0), b"made again")
    other.sync()
    assert opened().get(key(0)) == b"made again"
    assert len(segments(bucket)) == 4


def test_answers_to_other_calls_count_for_nothing(opened, caplog):
    one = opened()
    one.append(key(1), b"a")
    one.sync()
    other = opened(bytes(16))
    assert other.get(key(1)) is None
    assert "belongs to other calls" in caplog.text
    other.append(key(1), b"b")
    other.sync()
    assert (one.get(key(1)), other.get(key(1)), opened().get(key(1))) == (b"a", b"b", b"a")


def test_a_bucket_that_is_away_is_told_by_who_needs_it(opened, s3, monkeypatch):
    monkeypatch.setattr("ackcore.spark.stores.objects._RETRY", {"max_retries": 0})
    one = opened()
    one.append(key(1), b"a")
    s3.fail(REFUSED, lambda request: True, times=30)
    with pytest.raises(StoreUnavailable, match=r"00000001\.answers"):
        one.sync()
    s3._faults.clear()
    one.sync()
    assert opened().get(key(1)) == b"a"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda one: one.append(b"short", b""), "the call, must have 16 bytes, got 5"),
        (lambda one: ObjectJournal(one._store, "x", b"short"), "must have 16 bytes, got 5"),
    ],
)
def test_what_is_of_another_size_is_refused(opened, wrong, told):
    with pytest.raises(ValueError, match=told):
        wrong(opened())
