"""A consumer's handling of answers that no broker gives on demand: a scripted client."""

import logging
import re
import threading
import traceback
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, Message, TopicPartition
from consumer_counts import take
from servers import wait_until

from ackcore.calls import Reject
from ackcore.kafka import Consumer, ConsumerError, TooManyDead
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import ClusterFailed
from ackcore.kafka.consumer import client_thread, consumer_client, partition_reading, topic_watch
from ackcore.kafka.consumer.consumer_settings import ConsumerSettings
from ackcore.kafka.consumer.consumer_starts import decide_starts
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.offsets import decode_metadata, encode_state


@pytest.fixture(autouse=True)
def _topics(monkeypatch):
    """Nothing is known of topics, as with an old broker."""
    silent = SimpleNamespace(
        ids=lambda topics: {},
        poll=lambda topics, now_ms: None,
        hurry=lambda now_ms: None,
        is_new=lambda key: False,
        close=lambda: None,
    )
    monkeypatch.setattr(client_thread, "TopicWatch", lambda settings, now_ms: silent)


def message(offset, value=b"x", error=None, epoch=-1, kind=Message):
    made = {"value": value, "error": error, "leader_epoch": epoch, "timestamp": (0, -1)}
    return kind("t", 0, offset, **made)


class Unreadable(Message):
    def headers(self):
        raise SystemError("<method 'headers'> returned a result with an exception set")


@pytest.mark.parametrize("timestamp", [(0, -1), (1, -1), (1, 5)])
def test_a_record_without_a_timestamp_has_none(timestamp):
    record, _ = consumer_client.record_of(("t", 0), Message("t", 0, 0, timestamp=timestamp))
    assert record.timestamp_ms == (5 if timestamp == (1, 5) else None)


class Client:
    """One partition. Once it is assigned, the next polls return what is in ``script``, or do it."""

    def __init__(self, *script):
        self.script = [lambda: assigned(self), *script]
        self.committed_offset, self.metadata = 0, ""
        self.app_position, self.app_epoch = -1001, -1
        self.behind = []  # what comes together with the next message
        self.ends = 0, 10
        self.resumed = 0
        self.assigned = []
        self.asked = []  # about how many partitions at a time
        self.left = False  # the group

    def subscribe(self, topics, on_assign, on_revoke, on_lost):
        self.on_assign, self.on_revoke, self.on_lost = on_assign, on_revoke, on_lost

    def poll(self, timeout):
        found = self.script.pop(0) if self.script else None
        return found() if callable(found) else found

    def consume(self, n, timeout):
        behind, self.behind = self.behind, []
        return behind

    def committed(self, partitions, timeout):
        return [TopicPartition("t", 0, self.committed_offset, metadata=self.metadata)]

    def get_watermark_offsets(self, partition, cached):
        return self.ends

    def offsets_for_times(self, asked, timeout):
        self.asked.append(len(asked))
        low, high = self.ends
        return [
            TopicPartition(each.topic, each.partition, low if each.offset == -2 else high)
            for each in asked
        ]

    def position(self, partitions):
        position = TopicPartition("t", 0, self.app_position, leader_epoch=self.app_epoch)
        return [position for _ in partitions]

    def commit(self, offsets, asynchronous):
        self.committed_offset, self.metadata = offsets[0].offset, offsets[0].metadata
        if asynchronous:
            self.script.insert(0, lambda: self.on_commit(None, offsets))
        return offsets

    def assign(self, partitions):
        self.assigned = [(found.partition, found.offset) for found in partitions]

    def incremental_assign(self, partitions):
        self.assign(partitions)

    def incremental_unassign(self, partitions):
        pass

    def pause(self, partitions):
        pass

    def resume(self, partitions):
        self.resumed += 1

    def unsubscribe(self):
        self.left = True

    def assignment(self):
        return []

    def memberid(self):
        return None

    def close(self):
        pass


def consumer_of(monkeypatch, client, **arguments):
    def make_client(settings, on_commit):
        client.on_commit = on_commit
        return client

    monkeypatch.setattr(client_thread, "make_client", make_client)
    arguments = {"commit_interval_s": 1e-9, "dead_letters": lambda *_: None, **arguments}
    return Consumer("t", bootstrap_servers="x", group_id="g", **arguments)


def thread_of(monkeypatch, client, **arguments):
    """Return the thread of a consumer, not started."""
    monkeypatch.setattr(client_thread, "make_client", lambda *_: client)
    arguments = {"topics": (), "partitions": (), "group_id": "g", **arguments}
    settings = ConsumerSettings(ClientSettings("x"), **arguments)
    held = HeldRecords(settings.policy, limits=settings.limits)
    return client_thread.ClientThread(settings, held, threading.Condition(), object)


@contextmanager
def consuming(monkeypatch, client, **arguments):
    consumer = consumer_of(monkeypatch, client, **arguments)
    try:
        yield consumer
    finally:
        consumer.close(0)


def out_of_range(offset):
    return message(offset, error=KafkaError(KafkaError._AUTO_OFFSET_RESET))


def assigned(client):
    client.on_assign(client, [TopicPartition("t", 0)])


def test_the_producer_of_dead_letters_is_closed_if_no_client_can_be_made(monkeypatch):
    closed = []
    letters = SimpleNamespace(close=lambda: closed.append("letters"))
    monkeypatch.setattr(client_thread, "dead_letters_of", lambda settings: letters)

    def refuse(settings, on_commit=None):
        raise ClusterFailed("no token") if on_commit is None else ConsumerError("refused")

    monkeypatch.setattr(topic_watch, "Cluster", refuse)
    monkeypatch.setattr(client_thread, "TopicWatch", topic_watch.TopicWatch)
    monkeypatch.setattr(client_thread, "make_client", lambda *_: Client())
    with pytest.raises(ConsumerError, match="no token"):
        Consumer("t", bootstrap_servers="x", group_id="g", dead_letters="dead")
    monkeypatch.setattr(client_thread, "make_client", refuse)
    with pytest.raises(ConsumerError, match="refused"):
        Consumer("t", bootstrap_servers="x", group_id="g", dead_letters="dead")
    assert closed == ["letters", "letters"]


@pytest.mark.parametrize("protocol", ["eager", "cooperative"])
def test_a_message_that_came_with_its_assignment_is_read_again_and_not_passed(
    monkeypatch, protocol
):
    """The client counts it as read: what it says of its position is not believed."""
    client = Client()

    def assigned_within():
        assigned(client)
        client.app_position = 1
        return message(0, b"perhaps of the assignment before")

    def again():
        client.app_position = 2
        return message(0)

    idle = [lambda: None] * 3
    client.script = [assigned_within, *idle, again]
    with consuming(monkeypatch, client, protocol=protocol) as consumer:
        (record,) = consumer.poll(1, 20.0)
        assert (record.offset, record.value) == (0, b"x")
        assert client.assigned == [(0, 0)]
        consumer.ack(record)
    assert client.committed_offset in (1, 2)


@pytest.mark.parametrize("is_due", ["by the interval", "by an assignment"])
def test_a_commit_that_is_requested_while_one_is_under_way_follows_it_at_once(monkeypatch, is_due):
    thread = thread_of(monkeypatch, Client(), topics=("t",), commit_interval_s=20.0)
    sent = []
    thread._commits = SimpleNamespace(under_way=False, send=sent.append)
    thread._reading = SimpleNamespace(
        apply_positions=lambda: None,
        pause_and_resume=lambda: None,
        skip_markers=lambda: None,
        read=lambda busy: None,
        had_error=False,
    )
    clock = SimpleNamespace(now_ms=1)
    monkeypatch.setattr(client_thread, "now_ms", lambda: clock.now_ms)
    thread._turn()
    assert len(sent) == 1
    thread._commits.under_way = True
    if is_due == "by the interval":
        clock.now_ms += 20_000
    else:
        thread._next_commit_ms = 0  # as `_begin` sets it
    thread.commit_soon()
    thread._turn()
    assert len(sent) == 1
    thread._commits.under_way = False
    thread._turn()
    assert len(sent) == 2
    thread._turn()
    assert len(sent) == 2


@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "in a group"])
def test_an_offset_that_brokers_would_forget_is_committed_again(monkeypatch, by_hand):
    """They keep one without a group's assignment for a week: no record may come for as long."""
    monkeypatch.setattr(client_thread, "wait_until_known", lambda *_: True)
    client, clock = Client(), SimpleNamespace(now_ms=1)
    monkeypatch.setattr(client_thread, "now_ms", lambda: clock.now_ms)
    at = {"partitions": (("t", 0),)} if by_hand else {"topics": ("t",)}
    thread = thread_of(monkeypatch, client, commit_interval_s=20.0, **at)
    client.on_commit, client.committed_offset = thread._commits.answered, 7
    client.script, sent = [], []
    monkeypatch.setattr(client, "commit", partial(_committing, client, client.commit, sent))
    thread._subscribe()
    thread._turn()
    if not by_hand:
        assigned(client)
    for _ in range(3):
        for _ in range(3):
            thread._turn()
            clock.now_ms += 20_000
        # The group's members keep what they are assigned.
        assert len(sent) == by_hand
        by_hand += 1
        clock.now_ms += 3_600_000
    assert {offset for (offset,) in sent} == {7}
    assert decode_metadata("t", 0, 7, client.metadata).state.committable == 7


def _committing(client, commit, sent, offsets, asynchronous):
    sent.append([one.offset for one in offsets])
    return commit(offsets, asynchronous)


@pytest.mark.parametrize(
    ("key", "value", "headers", "size"),
    [
        (b"key", None, [], 3),
        (None, b"value", None, 5),
        (b"key", b"", [("a", b"12"), ("name", None)], 10),
    ],
)
def test_bytes_are_those_of_key_value_and_headers(monkeypatch, key, value, headers, size):
    """A record without a value may have megabytes of headers."""
    client = Client(Message("t", 0, 0, key=key, value=value, headers=headers, timestamp=(0, -1)))
    with consuming(monkeypatch, client) as consumer:
        take(consumer, 1)
        (stats,) = consumer.stats().partitions
    assert stats.bytes == size


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        (KafkaError.INCONSISTENT_GROUP_PROTOCOL, "give all the same protocol="),
        (KafkaError.INVALID_SESSION_TIMEOUT, "options\\['session.timeout.ms'\\] within"),
        (KafkaError.GROUP_MAX_SIZE_REACHED, "allows no more members"),
    ],
)
def test_a_group_that_takes_no_member_as_it_is_names_what_to_change(
    monkeypatch, caplog, code, way_out
):
    """librdkafka tries again without end: an operator reads why."""
    client = Client(message(-1, error=KafkaError(code, "JoinGroup failed")), message(0))
    with consuming(monkeypatch, client) as consumer:
        take(consumer, 1)
    assert re.search(f"JoinGroup failed; .*{way_out}", caplog.text)


def test_a_position_that_was_none_and_is_one_passes_markers(monkeypatch):
    client, asked = Client(), []

    def position(partitions):
        asked.append(1)
        return [TopicPartition("t", 0, -1001 if len(asked) < 3 else 4)]

    client.position = position
    with consuming(monkeypatch, client) as consumer:
        wait_until(
            lambda: consumer.poll(1, 0.01) == [] and client.committed_offset == 4, "it is committed"
        )


def test_what_comes_while_a_time_is_asked_for_is_read(monkeypatch):
    client = Client()
    client.committed_offset = -1001

    ends_of = client.offsets_for_times

    def offsets_for_times(asked, timeout):
        if asked[0].offset < 0:
            return ends_of(asked, timeout)
        client.ends = 0, 11
        return [TopicPartition("t", 0, -1)]

    client.offsets_for_times = offsets_for_times
    with consuming(monkeypatch, client, start=datetime(2026, 1, 1, tzinfo=UTC)):
        wait_until(lambda: client.assigned, "it is assigned")
    assert client.assigned == [(0, 10)]


@pytest.mark.parametrize(
    ("asked", "before"),
    [(1, []), (3, [1, 2]), (7, [])],
    ids=["as it was", "behind records", "behind markers"],
)
def test_a_partition_is_read_on_after_it_was_out_of_range(monkeypatch, caplog, asked, before):
    """Whatever was asked for, and whatever came with the error; the client reads no more of it."""
    client = Client()
    read = [0, *before]

    def refused():
        first, *client.behind = [*map(message, before), out_of_range(asked)]
        return first

    client.script += [message(0), refused]
    with consuming(monkeypatch, client) as consumer:
        wait_until(lambda: client.assigned == [(0, len(read))], "it is read from where it was")
        assert [one.offset for one in consumer.poll(5, 20.0)] == read
        client.script.append(message(len(read)))
        assert [one.offset for one in consumer.poll(1, 20.0)] == [len(read)]
    assert "as out of range: the read is " in caplog.text


def test_partitions_that_are_out_of_range_together_are_moved_by_one_assignment(monkeypatch):
    """With the eager protocol it names all partitions, and the client begins to read them anew."""
    client, assigned = Client(), []
    client.assign, client.ends = assigned.append, (5, 10)
    of = {"partitions": (("t", 0),), "out_of_range": "earliest"}
    thread = thread_of(monkeypatch, client, **of)
    for partition in range(20):
        state = decode_metadata("t", partition, 0, None).state
        thread._held.assign("t", partition, 1, state)
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
    first, *client.behind = [Message("t", partition, 0, error=error) for partition in range(15)]
    client.script = [first]
    thread._reading.read(busy=False)
    assert client.asked == [15, 15]  # for the first offsets, and for the ends
    ((*moved,),) = assigned
    assert {(one.partition, one.offset) for one in moved} == {
        *((partition, 5) for partition in range(15)),
        *((partition, 0) for partition in range(15, 20)),
    }
    thread._reading._read_again = {("t", partition): 0 for partition in range(20)}
    thread._reading.apply_positions()
    assert [len(each) for each in assigned] == [20, 20]


def test_leaders_are_asked_for_the_logs_of_all_partitions_at_once(monkeypatch, caplog):
    """Each question takes a client. A partition without an epoch, or out of range, is left out."""
    client, asked = Client(), []
    client.assign = asked.append  # not expected before the pause
    thread = thread_of(monkeypatch, client, partitions=(("t", 0),), out_of_range="latest")
    for partition in range(20):
        state = decode_metadata("t", partition, 12 if partition == 3 else 7, None).state
        thread._held.assign("t", partition, 1, state)
    thread._reading._epochs = {("t", partition): 4 for partition in range(1, 20)}
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
    first, *client.behind = [Message("t", partition, 0, error=error) for partition in range(15)]
    client.script, client.ends = [first], (2, 10)

    def truncations(settings, logs, timeout_s):
        asked.append(logs)
        return {("t", 5): 6}

    monkeypatch.setattr(partition_reading, "truncations", truncations)
    planned = {}
    monkeypatch.setattr(
        thread._reading, "_plan_other_log", lambda key, at, epoch=None: planned.update({key: at})
    )
    monkeypatch.setattr(thread._reading, "update_topic_ids", lambda ids: None)
    monkeypatch.setattr(thread._reading, "_topic_ids", lambda topics: {})
    with caplog.at_level("WARNING"):
        thread._reading.read(busy=False)
    assert asked == [{("t", n): (2, 7, 4) for n in range(1, 15) if n != 3}]
    assert planned == {("t", 3): 10, ("t", 5): 6}
    again = {("t", n) for n in range(15) if n not in (3, 5)}
    assert set(thread._reading._read_again) == again
    assert "t-5 was read up to offset 7, and then its log was truncated at offset 6" in caplog.text


@pytest.mark.parametrize("case", ["new", "records done above", "too far behind", "as they were"])
def test_all_partitions_of_an_assignment_are_asked_about_at_once(case):
    """A broker answers each question only after the fetch under way: 0.5 s, hundreds of times."""
    client, keys = Client(), [("t", partition) for partition in range(20)]
    client.committed_offset = -1001 if case == "new" else 3
    client.committed = lambda asked, _: [
        TopicPartition(*key, client.committed_offset, metadata=metadata_of(key)) for key in keys
    ]

    def metadata_of(key):
        starts = np.array([3], np.int64)
        state = decode_metadata(*key, 3, None).state._replace(
            end=6, hole_starts=starts, hole_ends=starts + 1
        )
        return encode_state(*key, 1, state, 0).metadata if case == "records done above" else ""

    settings = ConsumerSettings(
        *(ClientSettings("x"), "g", ("t",), ()),
        max_offset_behind=5 if case == "too far behind" else None,
        out_of_range="latest",
    )
    asked = [TopicPartition(*key) for key in keys]
    begun = decide_starts(client, settings, asked, {}, {}, lambda key: False)
    assert {each.restored.state.committable for each in begun} == {0 if case == "new" else 3}
    assert {each.restored.state.end for each in begun} <= {0, 3, 6}
    assert {each.skip_to for each in begun} == {5 if case == "too far behind" else None}
    assert client.asked == ([] if case == "as they were" else [20, 20])


@pytest.mark.parametrize("policy", ["earliest", "fail"])
def test_a_log_that_was_truncated_and_filled_up_again_is_read_from_there(
    monkeypatch, caplog, policy
):
    """Records of the log before are done first; a leader that does not say is asked again."""
    client = Client(*(message(n, epoch=4) for n in range(3)), out_of_range(3))
    asked, answers = [], [ConnectionError("nobody says"), 1]

    def truncations(settings, logs, timeout_s):
        asked.append(logs)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(logs, answer)

    monkeypatch.setattr(partition_reading, "truncations", truncations)
    says = "t-0 was read up to offset 3, and then its log was truncated at offset 1"
    ends = pytest.raises(ConsumerError, match=says) if policy == "fail" else nullcontext()
    with ends, consuming(monkeypatch, client, out_of_range=policy) as consumer:
        first = take(consumer, 3)
        wait_until(lambda: client.assigned == [(0, 3)], "it is read on where nobody says")
        client.script.append(out_of_range(3))
        if policy == "fail":
            wait_until(lambda: consumer.poll(9, 0.1), "the error")
        consumer.ack_many(first[:2])
        wait_until(lambda: len(asked) == 2, "leaders are asked again")
        assert asked == [{("t", 0): (0, 3, 4)}] * 2
        wait_until(lambda: client.committed_offset == 1, "no more than that is committed as done")
        consumer.ack(first[2])
        wait_until(lambda: client.assigned == [(0, 1)], "it is read from where it is another one")
        client.script.append(message(1, epoch=5))
        assert [one.offset for one in consumer.poll(1, 20.0)] == [1]
    if policy != "fail":
        assert f"{says} and written anew; it is read again from that offset" in caplog.text


def test_leaders_are_asked_for_the_log_of_the_last_marker_that_was_passed(monkeypatch):
    """The log ends before the marker, by the epoch of the record before, of another leader."""
    client, asked = Client(), []

    def truncations(settings, logs, timeout_s):
        asked.append(logs)
        return {}

    monkeypatch.setattr(partition_reading, "truncations", truncations)

    def passed():
        client.app_position, client.app_epoch = 3, 5

    client.script += [message(0, epoch=4), passed]
    with consuming(monkeypatch, client, out_of_range="fail") as consumer:
        consumer.ack(*take(consumer, 1))
        wait_until(lambda: client.committed_offset == 3, "the marker is passed")
        client.script.append(out_of_range(3))
        wait_until(lambda: asked, "leaders are asked")
    assert asked == [{("t", 0): (0, 3, 5)}]


def test_what_came_with_the_error_is_not_lost_with_what_was_deleted(monkeypatch):
    client = Client()

    def refused():
        client.ends = 5, 10
        client.behind = [out_of_range(2)]
        return message(1)

    client.script += [message(0), refused]
    with consuming(monkeypatch, client) as consumer:
        wait_until(lambda: client.assigned == [(0, 5)], "it is read from where there is something")
        assert [one.offset for one in take(consumer, 2)] == [0, 1]
        assert consumer.stats().counts.lost == 3


def test_a_partition_that_is_another_log_is_read_when_what_it_had_is_done(monkeypatch):
    client = Client(*map(message, range(3)))

    def refused():
        client.ends = 0, 1
        return out_of_range(3)

    client.script.append(refused)
    with consuming(monkeypatch, client, max_in_flight=3, out_of_range="latest") as consumer:
        wait_until(lambda: not client.script, "it is known that it is another log")
        taken = take(consumer, 3)
        resumed = client.resumed
        assert consumer.ack_many(taken) == 3
        wait_until(lambda: client.assigned == [(0, 1)], "the other log is read from its end")
        wait_until(lambda: client.resumed > resumed, "it may have been paused")
        client.script.append(message(1, b"new"))
        (record,) = consumer.poll(1, 20.0)
        assert (record.offset, record.value) == (1, b"new")


def test_a_record_whose_headers_cannot_be_read_is_dead_and_the_next_one_handed_out(monkeypatch):
    client, letters = Client(message(0, kind=Unreadable), message(1)), []
    kept = {"dead_letters": lambda record, failure: letters.append((record.offset, failure))}
    with consuming(monkeypatch, client, **kept) as consumer:
        assert [one.offset for one in take(consumer, 1)] == [1]
        wait_until(lambda: consumer.stats().counts.dead == 1, "it is kept")
    assert letters == [(0, ("UnreadableHeaders", "the name of a header is not UTF-8"))]


def test_of_what_cannot_be_taken_apart_no_more_dies_than_ends_a_consumer_and_that_is_kept(
    monkeypatch,
):
    """Else it would meet the same at each start, and never get on."""
    offset, letters = 0, []
    for start in range(3):
        client = Client()
        client.committed_offset, client.ends = offset, (0, 9)
        messages = [message(n, kind=Unreadable) for n in range(offset, 9)]

        def read(client=client, messages=messages):
            client.behind = messages[1:]
            return messages[0]

        client.script.append(read)
        kept = {"dead_letters": lambda record, failure: letters.append(record.offset)}
        with (
            pytest.raises(
                TooManyDead, match="3 of 3 records that ended last died, and max_dead is 2"
            ),
            consuming(monkeypatch, client, max_dead=2, **kept) as consumer,
        ):
            consumer.poll(1, 20.0)
        offset = client.committed_offset
        assert offset == 3 * (start + 1)
    assert letters == list(range(9))


def test_a_keeper_that_keeps_nothing_does_not_hold_up_the_end(monkeypatch):
    client = Client(message(0))

    def refuse(record, failure):
        raise OSError("the disk is full")

    arguments = {"max_dead": 0, "dead_letters": refuse, "drain_s": 0.01}
    consumer = consumer_of(monkeypatch, client, **arguments)
    consumer.fail(*take(consumer, 1), Reject("no"))
    with pytest.raises(TooManyDead):
        consumer.poll(1, 20.0)
    assert client.committed_offset == 0


def test_too_many_dead_without_dead_letters_name_the_setting_for_them(monkeypatch):
    arguments = {"max_dead": 0, "dead_letters": None}
    consumer = consumer_of(monkeypatch, Client(message(0)), **arguments)
    consumer.fail(*take(consumer, 1), Reject("no"))
    with pytest.raises(TooManyDead, match="Remove the cause: set dead_letters to a topic"):
        consumer.poll(1, 20.0)


class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")


def test_an_error_without_a_text_is_a_reason_to_try_again_as_any_other(monkeypatch, caplog):
    client, kept = Client(message(0)), []

    def keep(record, failure):
        if not kept:
            kept.append("no")
            raise Mute
        kept.append(failure)

    consumer = consumer_of(monkeypatch, client, dead_letters=keep, max_attempts=1)
    consumer.fail(*take(consumer, 1), Mute())
    wait_until(lambda: client.committed_offset == 1, "the letter is kept")
    consumer.close()
    assert kept[1].kind == "Mute"
    assert "is not stored: Mute: the exception has no text: __str__ raised KeyError" in caplog.text


def test_a_callback_whose_error_has_no_text_ends_the_consumer(monkeypatch):
    def on_assign(consumer, partitions):
        raise Mute

    consumer = consumer_of(monkeypatch, Client(), on_assign=on_assign)
    with pytest.raises(Mute):
        consumer.poll(1, 20.0)


@pytest.mark.parametrize("why", ["it closes", "a callback fails"])
def test_a_client_asks_for_no_committed_offset_by_itself(monkeypatch, why):
    """It would, of partitions that were assigned without one; librdkafka crashes if that fails."""
    client = Client()
    thread = thread_of(monkeypatch, client, topics=("t",), partitions=None)
    if why == "it closes":
        thread._closing = True
        thread._on_assign(client, [TopicPartition("t", 0)])
    else:
        monkeypatch.setattr(thread, "_begin", lambda _: throw(ConsumerError("no answer")))
        with pytest.raises(ConsumerError, match="no answer"):
            thread._on_assign(client, [TopicPartition("t", 0)])
    assert client.assigned == [(0, OFFSET_END)]


@pytest.mark.parametrize(("options", "leaves"), [({}, True), ({"group.instance.id": "a"}, False)])
def test_a_static_member_keeps_its_place_when_it_closes(monkeypatch, options, leaves):
    client = Client()
    with consuming(monkeypatch, client, options=options) as consumer:
        consumer.poll(1, 0.1)
    assert client.left == leaves


SECRET = "hunter2"
SASL = {"options": {"sasl.password": SECRET}}


def told_of_secret(code=KafkaError._AUTHENTICATION):
    return KafkaError(code, f"no password {SECRET} here")


@pytest.mark.parametrize(
    ("happens", "kind"),
    [
        (message(0, error=told_of_secret()), ConsumerError),
        (message(0, error=told_of_secret(KafkaError._BAD_MSG)), ConsumerError),
        (lambda: throw(KafkaException(told_of_secret())), KafkaException),
        (lambda: throw(chained(ConsumerError("no"), ValueError(SECRET))), ConsumerError),
        (lambda: throw(UnicodeDecodeError("utf-8", b"", 0, 1, SECRET)), RuntimeError),
    ],
)
def test_no_secret_is_in_what_a_consumer_ends_with(monkeypatch, caplog, happens, kind):
    client = Client(happens)
    with pytest.raises(kind) as caught, consuming(monkeypatch, client, **SASL) as consumer:
        consumer.poll(1, 20.0)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in shown
    if kind is KafkaException:
        assert caught.value.args[0].code() == KafkaError._AUTHENTICATION
        assert caught.value.args[0].str() == "no password [redacted] here"


def throw(error):
    raise error


def chained(error, cause):
    error.__cause__ = cause
    return error


def test_no_secret_is_in_what_a_consumer_logs(monkeypatch, caplog):
    """The client reports a refused commit and letters that were not kept."""
    error = told_of_secret(KafkaError._TRANSPORT)
    client, refused = Client(message(0, error=error), message(0), message(1)), []

    def commit(offsets, asynchronous):
        refused.append(1)
        raise KafkaException(told_of_secret(KafkaError.REBALANCE_IN_PROGRESS))

    def refuse(record, failure):
        raise OSError(f"no {SECRET}")

    client.commit = commit
    consumer = consumer_of(monkeypatch, client, dead_letters=refuse, drain_s=0, **SASL)
    record, done = take(consumer, 2)
    consumer.fail(record, Reject("no"))
    consumer.ack(done)
    wait_until(lambda: "is not stored" in caplog.text and refused, "all is told")
    with pytest.raises(ConsumerError, match=r"was refused: no password \[redacted\] here; the rec"):
        consumer.close()
    for said in ("continues: no password [redacted] here", "was refused: no", "OSError: no [red"):
        assert said in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("own", [{}, {"logger": logging.getLogger("of the user")}])
def test_what_librdkafka_logs_by_itself_has_no_secret(caplog, own):
    settings = ConsumerSettings(ClientSettings("x", {**SASL["options"], **own}), "g", ("t",), ())
    config = {}

    def made(given):
        config.update(given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_client, "Consumer", made)
        consumer_client.make_client(settings, print)
    # As confluent-kafka calls it.
    config["logger"].log(logging.WARNING, "%s [%s] %s", "FAIL", "rdkafka", f"[{SECRET}]")
    (line,) = caplog.records
    assert line.getMessage() == "FAIL [rdkafka] [[redacted]]"
    assert line.name == ("of the user" if own else consumer_client.__name__)
    assert config["sasl.password"] == SECRET


def take_all(consumer, read):
    while True:
        for record in consumer.poll(10, 20.0):
            read.append(record.offset)
            consumer.ack(record)


def test_what_cannot_be_read_is_no_gap(monkeypatch):
    """The client says so once and goes on: what is behind would have the hole committed."""
    client = Client()

    def read():
        damaged = message(-1001, error=KafkaError(KafkaError._BAD_MSG))
        client.behind = [damaged, message(5), message(6)]
        return message(0)

    client.script += [None, read]
    consumer = consumer_of(monkeypatch, client)
    read = []
    with pytest.raises(
        ConsumerError, match=r"t-0 has damaged records at offset 1 or above: .*to skip them, commit"
    ):
        take_all(consumer, read)
    assert set(read) <= {0}
    with suppress(ConsumerError):
        consumer.close()
    assert client.committed_offset <= 1


def listing(error=None, numbers=()):
    """Return a client whose brokers always list a topic in this way."""
    found = SimpleNamespace(error=error, partitions=dict.fromkeys(numbers))
    return SimpleNamespace(
        list_topics=lambda topic, timeout: SimpleNamespace(topics={topic: found})
    )


@pytest.mark.parametrize(
    "code", [KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION]
)
def test_a_topic_that_brokers_refuse_is_not_waited_for(monkeypatch, code):
    monkeypatch.setattr(consumer_client, "time", SimpleNamespace(monotonic=lambda: 0.0))
    error = KafkaError(code)
    with pytest.raises(ConsumerError, match=rf"topic 't' cannot be read: .*{error.name()}"):
        consumer_client.wait_until_known(listing(error), [("t", 0)], lambda: False)


def test_a_partition_that_brokers_do_not_list_is_waited_for_until_time_is_up_or_a_stop(monkeypatch):
    waits = []
    clock = SimpleNamespace(monotonic=lambda: sum(waits), sleep=waits.append)
    monkeypatch.setattr(consumer_client, "time", clock)
    client = listing(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), [0])
    with pytest.raises(ConsumerError, match=r"do not list .*\('t', 7\).* after 30 s; create them"):
        consumer_client.wait_until_known(client, [("t", 0), ("t", 7)], lambda: False)
    assert 30 < sum(waits) < 31
    waits.clear()
    assert consumer_client.wait_until_known(client, [("t", 0)], lambda: False)
    assert not consumer_client.wait_until_known(client, [("t", 7)], lambda: len(waits) == 3)
    assert len(waits) == 3


def test_a_consumer_that_is_stopped_while_it_waits_for_a_partition_begins_none(monkeypatch):
    client, asked = Client(), []
    thread = thread_of(monkeypatch, client, partitions=(("t", 7),))

    def list_topics(topic, timeout):
        asked.append(topic)
        thread.stop()
        return listing().list_topics(topic, timeout)

    client.list_topics = list_topics
    client.assign = pytest.fail
    thread._subscribe()
    assert asked == ["t"]
