"""A consumer on librdkafka's mock cluster: in this process, with whatever may go wrong."""

import asyncio
import gc
import logging
import math
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial

import mock_broker
import pytest
from confluent_kafka import KafkaError, Producer
from consumer_counts import Counts, by_hand, consumer_of, consuming, take, workers
from servers import wait_until

from ackcore.calls import Reject
from ackcore.dispatch import Dispatcher, RecordDead
from ackcore.kafka import Consumer, ConsumerError, client_settings
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.consumer import consumer_letters
from ackcore.kafka.consumer.consumer_records import Failure
from ackcore.kafka.kafka_errors import OffsetsOutOfRange

#: The group waits for a member that it does not hear of for no longer than so: nor for the one that
#: a member was before it was fenced.
SHORT = {"session.timeout.ms": 1000}


@pytest.fixture
def counts(mock_kafka, tmp_path):
    return Counts(mock_kafka, tmp_path)


def test_poison_is_dead_and_all_else_is_done_once(counts):
    """F5: of 2,000 records one in a hundred fails five times, and others once, in three threads."""
    counts.produce(2000)
    poison = {b"%d" % i for i in range(0, 2000, 100)}

    def may_fail(record):
        if record.value in poison:
            return ValueError("poison")
        return OSError("once") if record.offset % 7 == 3 and not record.attempt else None

    with consuming(counts) as consumer:
        with workers(consumer, counts, may_fail=may_fail):
            counts.wait_for_the_end()
        tallies = consumer.stats().counts
    counts.check_complete(poison=poison)
    assert (tallies.acked, tallies.dead) == (1980, 20)
    once = sum(o % 7 == 3 and v not in poison for (_, o), v in counts.delivered.items())
    assert tallies.failed == 5 * 20 + once
    assert tallies.retried == 4 * 20 + once


def test_a_pattern_does_not_match_kafkas_own_topics_and_a_name_does(counts):
    """Each commit of a reader of ``__consumer_offsets`` would be a record for it to read."""
    own = ["__consumer_offsets", "__transaction_state", "__share_group_state"]
    for topic in own:
        counts.server.create_topic(topic)
    counts.server.produce(counts.topic, [b"x"])
    for more in ([], own[:1]):
        given = {"topics": ["^.*", *more], "dead_letters": None, "options": SHORT}
        with consuming(counts, **given) as consumer:
            take(consumer, 1)
            found = {each.topic for each in consumer.stats().partitions}
        assert found >= {counts.topic, *more}
        assert found.isdisjoint(own[len(more) :])


def committed_by(consumer):
    consumer.commit()
    (found,) = consumer.stats().partitions
    return found.committed


def test_commit_now_commits_what_is_done_and_nothing_above_it(counts):
    counts.server.produce(counts.topic, [b"%d" % i for i in range(6)], 0)
    with consuming(counts, partitions=[(counts.topic, 0)], commit_interval_s=3600) as consumer:
        records = {record.offset: record for record in take(consumer, 6)}
        consumer.ack_many(records[offset] for offset in (0, 1, 3))
        assert committed_by(consumer) == 2
        consumer.commit(1e-6)  # nothing has changed: it has not to wait
        for timeout_s in (0, 1e10):
            with pytest.raises(ValueError, match="timeout_s must be"):
                consumer.commit(timeout_s)
        consumer.ack(records[2])
        with pytest.raises(TimeoutError, match="call commit\\(\\) again"):
            consumer.commit(1e-6)
        assert committed_by(consumer) == 4
        consumer.ack_many(records[offset] for offset in (4, 5))


def test_a_commit_while_the_consumer_closes_and_after_it_says_that_it_was_refused(counts):
    counts.produce(40)
    consumer = consumer_of(counts, commit_interval_s=3600)
    taken = take(consumer, 40)
    consumer.commit()
    consumer.ack_many(taken[1:])
    error = KafkaError.GROUP_AUTHORIZATION_FAILED
    counts.server.fail_requests(mock_broker.OFFSET_COMMIT, *[error] * 20)
    consumer.stop()  # it waits for the record that is out
    with ThreadPoolExecutor(1) as thread:
        committing = thread.submit(consumer.commit)
        consumer.ack(taken[0])
        for end in consumer.close, committing.result, consumer.commit:
            with pytest.raises(ConsumerError, match=r"last commit of .* was refused: .*Group auth"):
                end()


def test_a_seek_delivers_again_and_the_committed_offset_follows(counts):
    counts.server.produce(counts.topic, [b"%d" % i for i in range(6)], 0)
    at = counts.topic, 0
    with consuming(counts, partitions=[at], commit_interval_s=3600) as consumer:
        first = take(consumer, 4)
        assert consumer.ack_many(first[:3]) == 3
        assert committed_by(consumer) == 3
        consumer.fail(first[3], "it waits, until the seek drops it")
        consumer.seek(*at, 1)
        assert committed_by(consumer) == 1
        again = take(consumer, 5)
        assert [one.offset for one in again] == [1, 2, 3, 4, 5]
        assert {one.attempt for one in again} == {0}
        assert not consumer.ack(first[3])
        assert consumer.ack_many(again[:2]) == 2
        counts.server.produce(counts.topic, [b"%d" % i for i in range(6, 10)], 0)
        consumer.seek(*at, 8)
        last = take(consumer, 2)
        assert [one.offset for one in last] == [8, 9]
        assert committed_by(consumer) == 8
        assert consumer.ack_many([*again, *last]) == 2
        assert committed_by(consumer) == 10
        with pytest.raises(ValueError, match="topic and partition must name a partition that"):
            consumer.seek(counts.topic, 1, 0)
        with pytest.raises(ValueError, match="offset must be"):
            consumer.seek(*at, -1)


def test_a_seek_behind_the_end_and_before_the_start_is_out_of_range(counts):
    counts.server.produce(counts.topic, [b"%d" % i for i in range(4)], 0)
    at = counts.topic, 0
    with consuming(counts, partitions=[at]) as consumer:
        take(consumer, 4)
        consumer.seek(*at, 1000)
        assert [one.offset for one in take(consumer, 4)] == [0, 1, 2, 3]
        consumer.seek(*at, 2)
        consumer.ack_many(take(consumer, 2))
        assert committed_by(consumer) == 4


def test_callbacks_are_told_partitions_and_may_seek_and_ack(counts):
    counts.produce(40)
    held, told = [], []

    def on_assign(consumer, partitions):
        told.append(("assign", sorted(partitions)))
        for at in partitions:
            consumer.seek(*at, 7)
        for wait in (consumer.commit, consumer.close, consumer.poll):
            with pytest.raises(RuntimeError, match=r"must not be called in on_assign or on_revoke"):
                wait()

    def on_revoke(consumer, partitions):
        told.append(("revoke", sorted(partitions)))
        assert consumer.ack_many(held) == 6
        with pytest.raises(ValueError, match=r"stats\(\).partitions lists these"):
            consumer.seek(*partitions[0], 0)

    with consuming(counts, on_assign=on_assign, on_revoke=on_revoke, drain_s=0) as consumer:
        held += [one for one in take(consumer, 12) if one.partition < 2]
        assert {one.offset for one in held} == {7, 8, 9}
    partitions = [(counts.topic, one) for one in range(4)]
    assert told == [("assign", partitions), ("revoke", partitions)]
    assert [offset for offset, _ in counts.committed()] == [10, 10, 7, 7]


@pytest.mark.parametrize("name", ["on_assign", "on_revoke"])
def test_a_callback_that_raises_ends_the_consumer_and_what_is_done_is_committed(counts, name):
    counts.server.produce(counts.topic, [b"%d" % i for i in range(3)], 0)

    def fails(consumer, partitions):
        raise LookupError("no such state")

    consumer = consumer_of(counts, **{name: fails})
    if name == "on_revoke":
        consumer.ack_many(take(consumer, 3))
    with pytest.raises(LookupError, match="no such state"):
        consumer.poll() if name == "on_assign" else consumer.close()
    with pytest.raises(LookupError, match="no such state"):
        consumer.close()
    assert counts.committed()[0][0] == (3 if name == "on_revoke" else 0)
    with pytest.raises(TypeError, match=f"{name} must be callable"):
        consumer_of(counts, **{name: "print"})


@pytest.mark.parametrize("ordered_by", ["key", "partition"])
def test_records_of_a_key_are_done_one_by_one_in_their_order_retries_included(counts, ordered_by):
    for number in range(3):
        values = [{"key": b"%d" % (i % 7), "value": b"%d" % i} for i in range(100)]
        counts.server.produce(counts.topic, values, number)
    done, busy, lock = [], set(), threading.Lock()

    def may_fail(record):
        line = record.partition, record.key if ordered_by == "key" else None
        with lock:
            assert line not in busy, "another record of its key is out"
            busy.add(line)
        if record.offset % 10 == record.attempt == 0:
            busy.remove(line)
            return Reject("never") if record.offset == 50 else OSError("once")
        done.append((*line, record.offset))
        busy.remove(line)
        return None

    with consuming(counts, ordered_by=ordered_by, max_in_flight=20) as consumer:
        with workers(consumer, counts, 4, may_fail):
            wait_until(lambda: consumer.stats().lag == 0 and len(done) == 297, "all are done")
        assert consumer.stats().counts.dead == 3
    lines = {each[:2] for each in done}
    assert len(lines) == (21 if ordered_by == "key" else 3)
    for line in lines:
        offsets = [each[2] for each in done if each[:2] == line]
        assert offsets == sorted(set(offsets)), line


@pytest.mark.filterwarnings("ignore:This process .*multi-threaded:DeprecationWarning")
def test_a_forked_copy_says_at_once_that_it_polls_nothing(counts):
    counts.produce(1)
    with consuming(counts) as consumer:
        (record,) = take(consumer, 1)
        calls = [
            lambda: consumer.poll(1, 0),
            lambda: consumer.ack(record),
            lambda: consumer.fail(record, "no"),
            lambda: consumer.ack_many([record]),
            consumer.commit,
            lambda: consumer.seek(counts.topic, 0, 0),
            consumer.stats,
            consumer.stop,
            consumer.close,
        ]
        child = os.fork()
        if child == 0:
            said = 0
            try:
                for call in calls:
                    try:
                        call()
                    except RuntimeError as error:
                        said += "make a Consumer after the fork" in str(error)
            finally:
                os._exit(said)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == len(calls)
        assert consumer.ack(record)


def test_a_consumer_to_which_nothing_refers_any_more_leaves_its_group(counts, caplog):
    """Made anew in a loop after an error, for instance: it would keep its partitions for ever."""
    counts.produce(8)
    options = {"session.timeout.ms": 3000}  # the mock cluster waits for it
    revoked = []
    consumer = consumer_of(
        counts, on_revoke=lambda consumer, keys: revoked.append(consumer), options=options
    )
    first, *others = take(consumer, 8)
    consumer.ack(first)
    thread = consumer._thread
    del consumer
    gc.collect()
    thread.join(60)
    assert (thread.ended, thread.error, revoked) == (True, None, [])
    assert "was not closed, and nothing refers to it" in caplog.text
    with consuming(counts, options=options) as consumer:
        again = take(consumer, 7)
    assert sorted(each.value for each in again) == sorted(each.value for each in others)


def test_the_producer_of_dead_letters_ends_when_its_consumer_is_closed(counts, monkeypatch):
    """Not when the garbage collector finds it, in any thread or at the end of the process."""
    ended = []

    class Watched(Producer):
        def __del__(self):
            ended.append(threading.current_thread())

    monkeypatch.setattr(consumer_letters, "Producer", Watched)
    gc.disable()
    try:
        consumer = consumer_of(counts)
        consumer.close()
        assert ended == [consumer._thread]
    finally:
        gc.enable()


def test_closing_is_bounded_though_the_client_does_not_end(counts, monkeypatch):
    counts.produce(1)
    consumer = consumer_of(counts)
    (record,) = take(consumer, 1)
    consumer.ack(record)
    goes_on = threading.Event()
    end = consumer._thread._end
    monkeypatch.setattr(consumer._thread, "_end", lambda: (goes_on.wait(60), end()))
    with pytest.raises(TimeoutError, match=r"did not end in 0\.01 s after.* call close\(\) again"):
        consumer.close(drain_s=0, timeout_s=0.01)
    for timeout_s in (0, 1e10):
        with pytest.raises(ValueError, match="timeout_s must be"):
            consumer.close(timeout_s=timeout_s)
    goes_on.set()
    consumer.close()


@pytest.mark.parametrize("kind", ["logger", "client_logger"])
def test_a_retry_of_librdkafkas_as_a_client_starts_is_no_warning(caplog, kind):
    log = getattr(ClientSettings("host:1"), kind)(logging.getLogger("ackcore.kafka"))
    with caplog.at_level(logging.INFO, "ackcore.kafka"):
        for _ in range(2):
            log.log(logging.WARNING, "Failed to acquire idempotence PID: %s: retrying", "it loads")
        log.log(logging.WARNING, "the disk is full")
        log.log(logging.ERROR, "a broker is down: retrying")
    levels = [record.levelname for record in caplog.records]
    assert levels == ["INFO", "INFO", "WARNING", "ERROR"]


@pytest.mark.parametrize("kind", ["logger", "client_logger"])
def test_equal_lines_are_logged_once_a_minute_and_counted(caplog, monkeypatch, kind):
    """Librdkafka logs a failing login three times a second until it succeeds."""
    log = getattr(ClientSettings("host:1"), kind)(logging.getLogger("ackcore.kafka"))
    said = "login of %s failed (after %dms in state AUTH_REQ%s)"
    for second in range(130):
        monkeypatch.setattr(client_settings.time, "monotonic", lambda second=second: second)
        with caplog.at_level(logging.DEBUG, "ackcore.kafka"):
            again = f", {second} identical error(s) suppressed" if second % 3 else ""
            log.log(logging.ERROR, "%s [%s] %s", "FAIL", "rdkafka", said % ("a", second, again))
            if second in (1, 2):
                log.log(logging.ERROR, "%s [%s] %s", "FAIL", "rdkafka", said % ("b", 7, ""))
            log.log(logging.INFO, "offset %d", second % 2)
    lines = [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
    assert lines == [
        "FAIL [rdkafka] login of a failed (after 0ms in state AUTH_REQ)",
        "FAIL [rdkafka] login of b failed (after 7ms in state AUTH_REQ)",
        "FAIL [rdkafka] login of a failed (after 60ms in state AUTH_REQ) "
        "(59 equal lines in the last 60 s)",
        "FAIL [rdkafka] login of a failed (after 120ms in state AUTH_REQ) "
        "(59 equal lines in the last 60 s)",
    ]
    levels = Counter(one.levelname for one in caplog.records)
    assert levels == {"ERROR": 4, "DEBUG": 128, "INFO": 130}


def test_dead_letters_are_the_record_with_the_reason_in_headers(counts):
    counts.produce(3)
    value = {"key": b"k", "value": None, "headers": [("a", b"1"), ("ackcore-deaths", b"4")]}
    value["timestamp"] = 1_000_000_000_000
    counts.server.produce(counts.topic, [value], 0)
    with consuming(counts) as consumer:
        for record in take(consumer, 4):
            if record.key is None:
                consumer.ack(record)
            else:
                assert record.headers == value["headers"]
                consumer.fail(record, Reject("never"))
        wait_until(lambda: consumer.stats().counts.dead, "it is dead")
        assert consumer.stats().counts.failed == 1
    (letter,) = counts.server.consume(counts.dead_topic)
    assert (letter.key(), letter.value()) == (b"k", None)
    assert letter.timestamp()[1] > time.time() * 1000 - 3_600_000
    assert letter.headers() == [
        ("a", b"1"),
        ("ackcore-reason", b"Reject: never"),
        ("ackcore-topic", counts.topic.encode()),
        ("ackcore-partition", b"0"),
        ("ackcore-offset", b"1"),
        ("ackcore-timestamp", b"1000000000000"),
        ("ackcore-attempts", b"1"),
        ("ackcore-deaths", b"5"),
    ]


def test_a_record_that_died_too_often_ends_it_and_is_not_committed_over(counts):
    """Its dead letters come back: the consumer ends, and says what to change."""
    headers = [("ackcore-deaths", b"20")]
    counts.server.produce(counts.topic, [{"value": b"x", "headers": headers}], 0)
    consumer = consumer_of(counts, **by_hand(counts))
    consumer.fail(*take(consumer, 1), Reject("again"))
    words = r"has died 20 times: .*; stop that program, and set dead_letters to a callable that"
    for ends in (partial(consumer.poll, 1, 20.0), consumer.close):
        with pytest.raises(ConsumerError, match=words):
            ends()
    assert counts.server.consume(counts.dead_topic) == []
    assert counts.committed()[0][0] == 0
    kept = []
    keep = {"dead_letters": lambda record, failure: kept.append(record)}
    with consuming(counts, **by_hand(counts), **keep) as consumer:
        consumer.fail(*take(consumer, 1), Reject("again"))
        wait_until(lambda: counts.committed()[0][0] == 1, "the callable has stored it")
    assert [record.value for record in kept] == [b"x"]


def test_what_is_done_is_not_handed_out_again_after_a_restart(counts):
    counts.produce(400)
    with consuming(counts, **by_hand(counts), backoff_s=60.0, max_backoff_s=60.0) as consumer:
        for record in take(consumer, 400):
            if record.offset % 3:
                consumer.ack(record)
            elif record.offset % 2:
                consumer.fail(record, "not yet")
    again = {at for at in counts.delivered if not at[1] % 3}
    with consuming(counts, **by_hand(counts)) as consumer:
        taken = take(consumer, len(again))
        assert {(one.partition, one.offset) for one in taken} == again
        assert all(one.attempt == one.offset % 2 for one in taken)
        assert consumer.poll(1, 0.1) == []
        assert consumer.ack_many(taken) == len(again)
        wait_until(lambda: not counts.lag(), "all is committed")
        assert consumer.stats().counts.skipped == 400 - len(again)


def test_commits_that_are_refused_are_made_again(counts, caplog):
    """F10: whatever the broker says, what was done stays to be committed."""
    counts.produce(400)
    errors = (
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.OFFSET_METADATA_TOO_LARGE,
        KafkaError.REBALANCE_IN_PROGRESS,
    )
    with consuming(counts) as consumer:
        taken = take(consumer, 400)
        for error in errors:
            counts.server.fail_requests(mock_broker.OFFSET_COMMIT, error)
            consumer.ack_many(taken[-50:])
            del taken[-50:]
            wait_until(
                lambda: len(counts.done_by_commits()) >= 400 - len(taken), "they are committed"
            )
        assert consumer.stats().counts.rejected >= 2
        assert any(metadata[4:5] == "b" for _, metadata in counts.committed())
        consumer.ack_many(taken)
        wait_until(lambda: not counts.lag(), "all is committed")
    assert "refused" in caplog.text


def test_committed_offsets_are_requested_again_while_the_group_moves(counts):
    """With KIP-848, a member's epoch may be stale while others join."""
    counts.produce(40)
    moving = KafkaError.STALE_MEMBER_EPOCH, KafkaError.REBALANCE_IN_PROGRESS
    counts.server.fail_requests(mock_broker.OFFSET_FETCH, *moving, KafkaError.ILLEGAL_GENERATION)
    with consuming(counts) as consumer:
        assert consumer.ack_many(take(consumer, 40)) == 40


def test_a_refused_request_for_committed_offsets_is_named_with_the_cause(counts):
    counts.server.fail_requests(mock_broker.OFFSET_FETCH, KafkaError.GROUP_AUTHORIZATION_FAILED)
    words = r"request for the committed offsets of group .* failed: .*Group auth.* cause is removed"
    with pytest.raises(ConsumerError, match=words), consuming(counts) as consumer:
        consumer.poll(timeout_s=30)


def test_a_member_that_is_fenced_joins_again(counts, caplog):
    """F10: what it had is read again, and what it says of it is late."""
    counts.produce(400)
    with consuming(counts, drain_s=0, options=SHORT) as consumer, workers(consumer, counts):
        for code in (KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID):
            counts.wait_for_the_end()
            rejected = consumer.stats().counts.rejected
            counts.server.fail_requests(mock_broker.OFFSET_COMMIT, code)
            counts.produce(400)
            wait_until(lambda n=rejected: consumer.stats().counts.rejected > n, "it is fenced")
        counts.wait_for_the_end()
    counts.check_complete(most_again=800)
    assert "was fenced" in caplog.text


def test_brokers_go_and_come_back(counts):
    """F11: a broker is down, leaders and the coordinator move: nothing is lost, nor done twice."""
    server = counts.server
    counts.produce(2000)
    with consuming(counts) as consumer, workers(consumer, counts):
        wait_until(counts.effects, "it works")
        server.broker_set_down(1)
        for partition in range(4):
            server.partition_set_leader(counts.topic, partition, 2)
        server.coordinator_set("group", counts.group, 3)
        counts.produce(400)
        server.broker_set_up(1)
        server.coordinator_set("group", counts.group, 1)
        counts.wait_for_the_end()
    counts.check_complete()


def test_what_was_deleted_before_it_was_read_is_dead_lettered_or_refused(mock_kafka, tmp_path):
    """F12"""
    counts = Counts(mock_kafka, tmp_path, partitions=1, records=100)
    with consuming(counts, **by_hand(counts)) as consumer:
        consumer.ack_many(take(consumer, 100)[:10])
        wait_until(lambda: counts.committed()[0][0] == 10, "ten are done")
    mock_kafka.delete_records(counts.topic, 50)
    with (
        pytest.raises(
            OffsetsOutOfRange, match=r"from offset 10: it has offsets \[50, 100\).* lost offsets$"
        ),
        consuming(counts, **by_hand(counts), out_of_range="fail") as consumer,
    ):
        consumer.poll(1, 20.0)
    with consuming(counts, **by_hand(counts)) as consumer:
        taken = take(consumer, 50)
        assert taken[0].offset == 50
        wait_until(lambda: counts.committed()[0][0] == 50, "the loss is kept, and committed over")
        tallies = consumer.stats().counts
        assert (tallies.lost, tallies.dead) == (40, 1)
    (letter,) = mock_kafka.consume(counts.dead_topic)
    assert dict(letter.headers())["ackcore-reason"] == (
        b"LostUpstream: offsets 10 to 49 were deleted before they were read"
    )


def test_what_waits_is_retried_though_it_was_deleted(mock_kafka, tmp_path):
    counts = Counts(mock_kafka, tmp_path, partitions=1, records=10)
    with consuming(counts) as consumer:
        taken = take(consumer, 10)
        consumer.fail(taken[0], "once")
        consumer.ack_many(taken[1:])
        mock_kafka.delete_records(counts.topic, 10)
        (again,) = take(consumer, 1)
        assert (again.offset, again.value) == (0, b"0")
        consumer.ack(again)
        wait_until(lambda: counts.committed()[0][0] == 10, "all are done")


def test_records_in_retry_do_not_stop_the_others(counts):
    """F14: 30 of 100 records fail again and again, and the others are done meanwhile."""
    counts.produce(4000)
    waits = threading.Event()

    def may_fail(record):
        return None if record.offset % 10 > 2 or waits.is_set() else OSError("down")

    arguments = {"max_attempts": 1000, "max_in_flight": 300, "backoff_s": 0.05}
    with consuming(counts, **arguments) as consumer, workers(consumer, counts, may_fail=may_fail):
        wait_until(lambda: consumer.stats().counts.acked == 2800, "the others are done")
        assert sum(each.waiting for each in consumer.stats().partitions) > 4 * 200
        waits.set()
        counts.wait_for_the_end()
    counts.check_complete()


def test_what_waits_and_stops_intake_is_told_once_a_minute(counts, caplog):
    """F14: with its cause, however often it stops and goes on."""
    counts.produce(4000)
    told = "wait for a retry"
    arguments = {"max_attempts": 1000, "max_waiting": 100, "options": {"sasl.password": "hunter2"}}
    with (
        consuming(counts, **arguments) as consumer,
        workers(consumer, counts, may_fail=lambda record: OSError("hunter2 is down")),
    ):
        wait_until(lambda: told in caplog.text, "it is told")
        before = consumer.stats().counts.retried
        wait_until(lambda: consumer.stats().counts.retried > before + 2000, "all fail on and on")
    (line,) = [one.getMessage() for one in caplog.records if told in one.getMessage()]
    assert "at max_waiting=100 or max_waiting_bytes=67108864" in line
    assert line.endswith("the last one failed with OSError: [redacted] is down")


def test_what_stopped_intake_in_flight_and_then_waits_is_told(counts, caplog):
    """F14: the usual way, as as many may be in flight as may wait; no partition is paused anew."""
    counts.produce(8000)

    def paused():
        return [each.paused for each in consumer.stats().partitions]

    arguments = {"max_in_flight": 1000, "max_waiting": 1000, "backoff_s": 60.0}
    with consuming(counts, **arguments, max_backoff_s=60.0) as consumer:
        taken = take(consumer, 4000)
        wait_until(lambda: paused() == ["in flight"] * 4, "all are paused")
        told = "wait for a retry"
        assert told not in caplog.text
        for record in taken:
            consumer.fail(record, "the service is down")
        wait_until(lambda: told in caplog.text, "it is told")
        # The first was enough for that: the others follow with the next look.
        wait_until(lambda: paused() == ["waiting"] * 4, "all are paused for it")


def test_while_dead_letters_cannot_be_kept_nothing_is_committed_over_them(counts, caplog):
    """F16: no more are handed out at the limit, and they go on when they can be."""
    counts.produce(2000)
    up, kept = threading.Event(), []

    def keep(record, failure):
        if not up.is_set():
            raise OSError("the dead letters' store is down")
        kept.append((record.partition, record.offset, failure))

    arguments = {"dead_letters": keep, "max_in_flight": 50}
    with (
        consuming(counts, **arguments) as consumer,
        workers(consumer, counts, may_fail=lambda record: Reject("no")),
    ):

        def held():
            found = consumer.stats().partitions
            return [(each.fresh, each.out, each.dying) for each in found] == [(450, 0, 50)] * 4

        wait_until(held, "as many of each as may be out are dying")
        wait_until(lambda: "is not stored" in caplog.text, "the store has refused one")
        assert counts.lag() == 2000
        assert consumer.stats().counts.dead == 0
        up.set()
        wait_until(lambda: not counts.lag(), "all are kept")
    assert len(kept) == 2000
    assert kept[0][2] == Failure("Reject", "no")
    assert caplog.text.count("is not stored") == 1


def test_a_producer_of_dead_letters_that_can_do_no_more_is_made_anew(counts, caplog):
    """Not authorized to be idempotent, it has ended for good; the next one may be."""
    caplog.set_level(logging.DEBUG, "ackcore.kafka")  # of an equal warning in the same minute
    counts.produce(40)
    counts.server.fail_requests(
        mock_broker.INIT_PRODUCER_ID, *[KafkaError.CLUSTER_AUTHORIZATION_FAILED] * 2
    )
    with consuming(counts) as consumer:
        for record in take(consumer, 40):
            consumer.fail(record, Reject("no"))
        wait_until(lambda: not counts.lag(), "all are kept")
    counts.check_complete(poison=set(counts.delivered.values()))
    assert caplog.text.count("the producer of dead letters ended, and is replaced: ") == 2


def test_memory_is_bounded_while_workers_are_slow(mock_kafka, tmp_path):
    """F19: no more is held than may be, however much there is to read, and nothing gets stuck."""
    counts = Counts(mock_kafka, tmp_path, partitions=2, records=20_000)
    most = 0
    with consuming(counts, max_in_flight=1000) as consumer:
        wait_until(
            lambda: [p.paused for p in consumer.stats().partitions] == ["in flight"] * 2, "full"
        )
        left = 20_000
        while left:
            most = max(most, *(p.fresh + p.out for p in consumer.stats().partitions), 0)
            taken = consumer.poll(100, 20.0)
            assert taken
            left -= consumer.ack_many(taken)
        wait_until(lambda: not counts.lag(), "all is committed")
    assert 1000 <= most <= 1000 + 125


def test_without_dead_letters_it_ends_and_says_so(counts):
    counts.produce(40)
    consumer = consumer_of(counts, dead_letters=None, max_attempts=1)
    taken = take(consumer, 40)
    done = [record for record in taken if record.value != b"7"]
    assert consumer.ack_many(done) == 39
    (poison,) = [record for record in taken if record.value == b"7"]
    consumer.fail(poison, ValueError("no"))
    words = "failed 1 time, the last time with ValueError: no; set dead"
    for ends in (partial(consumer.poll, 1, 20.0), consumer.close):
        with pytest.raises(RecordDead, match=words):
            ends()
    assert counts.done_by_commits() == {
        at for at, value in counts.delivered.items() if value != b"7"
    }


def test_closing_waits_for_what_is_out(counts):
    """F18"""
    counts.produce(400)
    consumer = consumer_of(counts, drain_s=30.0)
    taken = take(consumer, 100)
    closing = threading.Thread(target=consumer.close)
    closing.start()
    wait_until(lambda: consumer.stopped, "it is to stop")
    assert consumer.poll(1) == []
    assert consumer.ack_many(taken[:99]) == 99
    assert closing.is_alive()
    assert consumer.ack(taken[99])
    closing.join()
    assert len(counts.done_by_commits()) == 100
    assert not consumer.ack(taken[0])
    consumer.close()


def test_a_drain_ends_at_its_deadline(counts, caplog):
    counts.produce(4)
    consumer = consumer_of(counts)
    take(consumer, 4)
    with pytest.raises(ValueError, match="drain_s must be at most"):
        consumer.close(1000.0)
    started = time.monotonic()
    consumer.close(0.2)
    assert 0.2 <= time.monotonic() - started < 5
    assert "4 records were not done in 0.2 s" in caplog.text


def test_a_dispatcher_reads_from_it(counts):
    counts.produce(500)
    seen = []

    async def one(record):
        await asyncio.sleep(0)
        if record.value == b"77":
            raise Reject("no")
        seen.append(record.value)

    with consuming(counts) as consumer:
        dispatcher = Dispatcher(
            lambda start: consumer,
            {"one": one, "two": one},
            acked=lambda position, record: consumer.ack(record),
            dead_letters=lambda position, record, error: consumer.fail(record, Reject(str(error))),
        )

        async def run():
            running = asyncio.ensure_future(dispatcher.run_async())
            while counts.lag():
                await asyncio.sleep(0.05)
            dispatcher.stop()
            return await running

        found = asyncio.run(run())
        assert (found.acked, found.dead) == (499, 1)
        assert sorted(seen) == sorted(set(counts.delivered.values()) - {b"77"})
        wait_until(lambda: consumer.stats().counts.dead, "it is dead")
    assert sum(counts.dead().values()) == 1


def test_a_topic_that_is_named_twice_is_read_once(counts):
    # librdkafka refuses such a subscription as an invalid argument.
    counts.server.produce(counts.topic, [b"a"])
    with consumer_of(counts, topics=[counts.topic] * 2) as consumer:
        (record,) = consumer.poll(1, 30)
        assert consumer.ack(record)
        assert consumer.poll(1, math.nan) == []  # it does not wait for ever


def test_settings_that_cannot_be_are_refused():
    def make(**arguments):
        return Consumer(**{"bootstrap_servers": "x", "group_id": "g", "topics": "t", **arguments})

    for arguments, error in (
        ({"topics": None}, "topics or partitions must be given"),
        ({"partitions": [("t", 0)]}, "not both"),
        ({"group_id": ""}, "group_id must not be empty"),
        ({"options": {"enable.auto.commit": True}}, "options must not have 'enable.auto.commit'"),
        ({"protocol": "kip"}, "protocol must be one of 'cooperative', 'eager', 'consumer'"),
        ({"start": "end"}, "start must be one of"),
        ({"max_attempts": 0}, "max_attempts must be in 1.."),
        ({"drain_s": 300}, "drain_s must be at most 295"),
        ({"dead_letters": "t"}, "must not be a topic that the consumer reads"),
        ({"dead_letters": ""}, "dead_letters must be the name of a topic, got ''"),
        ({"dead_letters": "d", "options": {"acks": 1}}, "options must not have 'acks': a message"),
        ({"tasks": 2}, "tasks and task must be given together, and with topics"),
        ({"tasks": 2, "task": 2}, "task must be in 0..1, got 2"),
        ({"topics": None, "partitions": [("t", 0)], "tasks": 1, "task": 0}, "and with topics"),
        ({"max_dead": -1}, "max_dead must be a number of records"),
        ({"max_dead_ratio": 1.5}, "max_dead_ratio must be a share of the records"),
        ({"max_dead_window": 0}, "max_dead_window must be at least 1"),
        ({"start": datetime(2026, 1, 1)}, "start must be a time with its zone"),
        ({"commit_interval_s": 0}, "commit_interval_s must be above 0"),
    ):
        with pytest.raises(ValueError, match=error):
            make(**arguments)
    for arguments, error in (
        ({"dead_letters": 5}, "dead_letters must be a topic's name or a callable, got int"),
        ({"dead_letters": asyncio.sleep}, "dead_letters must be a plain function, got"),
        ({"on_assign": asyncio.sleep}, "on_assign must be a plain function, got"),
        ({"dead_letters": lambda one: None}, "a function of .record, failure., got .* of .one."),
        ({"topics": [5]}, "topics must be the name of a topic or a list of names, got 5 as a name"),
        ({"topics": None, "partitions": [("t", 0, 1)]}, "partitions must be pairs of topic and"),
        ({"topics": None, "partitions": [7]}, "partitions must be pairs of topic and number"),
        ({"topics": None, "partitions": [("", 0)]}, "partitions must be pairs of topic and number"),
        ({"bootstrap_servers": ["x"]}, "bootstrap_servers must be a string of host:port"),
        ({"group_id": 5}, "group_id must be a str, got int"),
        ({"force_from_start": True}, "force_from_start must be a str, the name of this deployment"),
        ({"start": {"t": 5}}, "start must map .topic, partition. to an offset"),
    ):
        with pytest.raises(TypeError, match=error):
            make(**arguments)


def test_secrets_are_not_shown(counts, caplog):
    options = {"sasl.password": "hunter2", "no.such.setting": "1"}
    with pytest.raises(ConsumerError, match="No such configuration property"):
        consumer_of(counts, options=options)
    with pytest.raises(ConsumerError) as refused:
        consumer_of(counts, options={"sasl.password": "hunter2", "session.timeout.ms": "hunter2"})
    assert "hunter2" not in str(refused.value)
    with consuming(counts, options={"sasl.password": "hunter2"}) as consumer:
        assert "hunter2" not in repr(consumer.settings) + repr(vars(consumer))
    assert "hunter2" not in caplog.text


def test_the_session_in_the_readme_is_true(mock_kafka, run_readme):
    for topic in ("orders", "orders-dead"):
        mock_kafka.create_topic(topic)
    mock_kafka.produce("orders", [b"{" if n == 7 else b"{}" for n in range(100)])
    run_readme(on_spark=False, on_kafka=True, servers=mock_kafka.bootstrap_servers)
    assert len(mock_kafka.consume("orders-dead")) == 1


def test_a_partition_that_was_paused_is_read_when_it_comes_back(mock_kafka, tmp_path):
    """Fenced while it is full: the client's pause outlasts the assignment."""
    counts = Counts(mock_kafka, tmp_path, partitions=1, records=2000)
    with consuming(counts, max_in_flight=10, drain_s=0, options=SHORT) as consumer:
        wait_until(lambda: [p.paused for p in consumer.stats().partitions] == ["in flight"], "full")
        first = take(consumer, 1)
        mock_kafka.fail_requests(mock_broker.OFFSET_COMMIT, KafkaError.UNKNOWN_MEMBER_ID)
        consumer.ack_many(first)
        wait_until(lambda: consumer.stats().counts.dropped, "it went")
        taken = []
        while len(taken) < 100:
            taken += take(consumer, 1)
            consumer.ack(taken[-1])
        assert taken[0].offset == 0
