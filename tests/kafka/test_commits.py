"""Commits of a consumer, the metadata that a broker takes, and dead letters under way."""

import threading

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException
from hypothesis import given
from hypothesis import strategies as st

from ackcore import OffsetTracker
from ackcore.kafka.commit_metadata import MetadataForm
from ackcore.kafka.consumer import consumer_letters
from ackcore.kafka.consumer.consumer_client import Commits
from ackcore.kafka.consumer.consumer_letters import PendingLetters, TopicLetterStore, headers_of
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.held_partition import DyingRecord
from ackcore.kafka.consumer.held_records import HeldRecords
from ackcore.kafka.kafka_errors import ConsumerError
from ackcore.offsets import KAFKA_LIMIT, decode_metadata
from ackcore.retry import Policy

RECORD = KafkaRecord("t", 0, 7, None, b"", [], None)
NO = Failure("ValueError", "no")


def test_a_reason_is_no_longer_than_a_header_may_be_and_what_is_not_kept_is_said_again(caplog):
    letter = DyingRecord(RECORD, Failure("E", "é" * 2_000_000), 1)
    reason = dict(headers_of(letter))["ackcore-reason"]
    assert 8190 <= len(reason) <= 8192
    assert reason.decode().startswith("E: é")

    class Refuses:
        def store(self, letter, report):
            report(letter, "it is too large")

        def poll(self):
            pass

    letters = PendingLetters(Refuses())
    letters.put([letter], 0)
    for now_ms in range(1000, 130_000, 1000):
        assert letters.poll(now_ms, lambda letter: True) == []
    assert caplog.text.count("t-0@7 is not stored: it is too large") == 3


def held_partitions(n, records=10, done=lambda offset: offset == 0):
    held = HeldRecords(Policy(3, 1, 1))
    for key in [("t" * 200, partition) for partition in range(n)]:
        held.assign(*key, 1, decode_metadata(*key, 0, None).state)
        some = [
            RECORD._replace(partition=key[1], topic=key[0], offset=offset)
            for offset in range(records)
        ]
        held.read(key, some, [1] * records, 0)
    for record in held.take(records * n, 0):
        if done(record.offset):
            held.ack(record)
    return held


def size_of(offsets):
    return sum(len((each.topic + each.metadata).encode()) for each in offsets)


def test_what_comes_back_again_and_again_is_not_kept_for_ever():
    """A loop of dead letters ends with its cause; what is no number of deaths counts for none."""

    def died(times):
        return DyingRecord(RECORD._replace(headers=[("ackcore-deaths", times)]), NO, 1)

    assert dict(headers_of(died(b"19")))["ackcore-deaths"] == b"20"
    for foreign in (b"-20", b"many", None):
        assert dict(headers_of(died(foreign)))["ackcore-deaths"] == b"1"
    with pytest.raises(ConsumerError, match="t-0@7 has died 20 times: a program sends its "):
        headers_of(died(b"20"))


class Ended:
    """A producer that has met a fatal error, and reports what it had in portions."""

    fatal = KafkaError(KafkaError._FATAL)

    def __init__(self, config):
        self.reports = []

    def produce(self, *_, on_delivery, **about):
        self.reports.append(on_delivery)

    def poll(self, timeout):
        if self.reports:
            self.reports.pop(0)(self.fatal)

    def purge(self):
        pass

    def flush(self, timeout):
        self.poll(timeout)
        return len(self.reports)

    def __len__(self):
        return len(self.reports)


def test_no_letter_is_forgotten_when_their_producer_is_made_anew(monkeypatch):
    """A commit that is not reported within a look is not tried again before it is."""
    made = []
    monkeypatch.setattr(
        consumer_letters, "Producer", lambda config: made.append(1) or Ended(config)
    )
    letters = PendingLetters(TopicLetterStore("dead", {}))
    letters.put([DyingRecord(RECORD._replace(offset=n), NO, 1) for n in range(5)], 0)
    while len(made) < 2:
        assert letters.poll(0, lambda letter: True) == []
    assert len(letters._waiting) == letters.under_way == 5


def test_a_dead_letter_topic_that_is_missing_is_named(monkeypatch):
    """The warning of a letter that waits says which topic is to be made."""
    missing = type("Missing", (Ended,), {"fatal": KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)})
    monkeypatch.setattr(consumer_letters, "Producer", missing)
    store, said = TopicLetterStore("orders-dead", {}), []
    store.store(DyingRecord(RECORD, NO, 1), lambda letter, error: said.append(error))
    store.poll()
    assert said[0].startswith("topic 'orders-dead': ")
    assert said[0].endswith("create the topic")


class Committer:
    """Commits up to so many bytes in all, and of metadata that is not larger than so."""

    def __init__(self, most=1 << 20, most_metadata=4096):
        self.most, self.most_metadata = most, most_metadata
        self.requests = []
        self.done = {}
        self.meanwhile = lambda: None

    def commit(self, offsets, asynchronous):
        self.meanwhile()
        self.requests.append((offsets, asynchronous))
        if asynchronous:
            return None
        error = self.answer(offsets)[0]
        if error is not None:
            raise KafkaException(error)
        return offsets

    def answer(self, offsets):
        error = None
        if size_of(offsets) > self.most:
            error = KafkaError(KafkaError.UNKNOWN)
        elif any(len(each.metadata.encode()) > self.most_metadata for each in offsets):
            error = KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE)
        else:
            self.done.update((each.partition, each.offset) for each in offsets)
        return error, offsets


def commits_of(held):
    return Commits("g", held, threading.Condition(), lambda error: None)


@pytest.mark.parametrize("last", [False, True], ids=["in between", "last"])
def test_no_commit_request_is_larger_than_a_broker_takes(monkeypatch, last):
    monkeypatch.setattr("ackcore.kafka.committer._REQUEST_BYTES", 2000)
    held, client = held_partitions(20), Committer(most=2000)
    commits = commits_of(held)
    if last:
        commits.send_last(client, held.assigned)
    else:
        commits.send(client)
        assert commits.under_way
        for offsets, _ in client.requests:
            commits.answered(*client.answer(offsets))
        assert not commits.under_way
    assert client.done == dict.fromkeys(range(20), 1)
    assert 2 < len(client.requests) < 20
    assert held.commits() == []


@pytest.mark.parametrize("last", [False, True], ids=["in between", "last"])
def test_metadata_that_is_refused_is_shortened_once_for_all_partitions(last, caplog):
    held = held_partitions(9, 4000, lambda offset: offset * 7919 % 11 in (1, 4, 5))
    sizes = [len(one.commit.metadata.encode()) for one in held.commits()]
    client = Committer(most_metadata=min(sizes) - 1)
    commits = commits_of(held)
    if last:
        commits.send_last(client, held.assigned)
    else:
        while len(client.done) < 9:
            commits.send(client)
            commits.answered(*client.answer(client.requests[-1][0]))
    assert all(len(each.metadata) > 500 for each in client.requests[-1][0])
    assert caplog.text.count("was refused") == len(client.requests) - 1 == 1


@pytest.mark.parametrize("last", [False, True], ids=["in between", "last"])
@pytest.mark.parametrize("code", [KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID])
def test_an_error_that_a_client_ends_with_is_told(code, last):
    """Neither says of itself that it is fatal, as confluent-kafka hands it over."""
    held, told = held_partitions(2), []
    commits = Commits("g", held, threading.Condition(), told.append)
    client = Committer()
    client.answer = lambda offsets: (KafkaError(code), offsets)
    if last:
        commits.send_last(client, held.assigned)
    else:
        commits.send(client)
        commits.answered(*client.answer(client.requests[-1][0]))
    (error,) = told
    assert str(error).startswith(f"the consumer cannot commit: {KafkaError(code).str()}; start it")
    assert len(held.commits()) == 2
    assert held.counts.rejected == 2


@pytest.mark.parametrize(
    "code",
    [
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.NOT_COORDINATOR,
    ],
)
def test_the_last_commit_is_sent_again_while_its_group_rebalances(code):
    held, client = held_partitions(2), Committer()
    answer, refusals = client.answer, [KafkaError(code)] * 3
    client.answer = lambda offsets: (refusals.pop(), offsets) if refusals else answer(offsets)
    commits_of(held).send_last(client, held.assigned)
    assert client.done == {0: 1, 1: 1}
    assert held.commits() == []
    assert held.counts.rejected == 0


def test_a_last_commit_that_stays_refused_is_given_up(monkeypatch):
    now = iter(range(99))
    monkeypatch.setattr("ackcore.kafka.consumer.consumer_client.time.monotonic", lambda: next(now))
    held, client = held_partitions(2), Committer()
    client.answer = lambda offsets: (KafkaError(KafkaError.ILLEGAL_GENERATION), offsets)
    commits_of(held).send_last(client, held.assigned)
    assert len(client.requests) == 2
    assert held.counts.rejected == 2


def test_no_answer_counts_once_the_last_commit_is_sent():
    held, client = held_partitions(1), Committer()
    record = KafkaRecord("t" * 200, 0, 1, None, b"", [], None, generation=1, delivery=1)
    said = []
    client.meanwhile = lambda: said.append(held.ack(record))
    commits_of(held).send_last(client, held.assigned)
    assert said == [False]
    assert held.counts.stale == 1
    assert client.done == {0: 1}


def test_an_answer_to_an_earlier_request_does_not_count_after_the_last_commit():
    held, client = held_partitions(1), Committer()
    commits = commits_of(held)
    commits.send(client)
    early = client.requests[-1][0]
    commits.send_last(client, held.assigned)
    commits.answered(*client.answer(early))
    assert held.counts.committed == 1
    assert not commits.under_way


OFFSETS = 20_000
UNITS = {"characters": len, "bytes": lambda text: len(text.encode())}


class Group:
    """A partition with more done than fits, committed to a broker with a limit."""

    def __init__(self, limit, unit, seed=0):
        self.limit, self.size = limit, UNITS[unit]
        self.done = np.flatnonzero(np.random.default_rng(seed).random(OFFSETS) < 0.5)
        self.tracker = OffsetTracker("t", 0, 1, 0)
        self.tracker.emitted(np.arange(OFFSETS))
        self.tracker.acked(self.done)
        self.form, self.refusals = MetadataForm(), 0

    def commit(self):
        """Commit once, and return the metadata that the broker has then, or None."""
        commit = self.form.encode("t", 0, 1, self.tracker.state(), 7)
        if self.size(commit.metadata) > self.limit:
            self.refusals += 1
            assert self.form.too_large(commit.metadata)
            return None
        self.form.accepted(commit.metadata)
        return commit.metadata

    def again(self, metadata):
        """Return what would be done again after a restart; what is not done, is in any case."""
        state = decode_metadata("t", 0, self.tracker.committable, metadata).state
        open_ = np.zeros(OFFSETS, np.bool_)
        open_[state.end :] = True
        for start, end in zip(state.hole_starts, state.hole_ends, strict=True):
            open_[start:end] = True
        assert open_[np.setdiff1d(np.arange(OFFSETS), self.done)].all(), "it is not done"
        return self.done[open_[self.done]].tolist()

    def settle(self):
        """Commit until nothing is refused any more; return what the broker has then."""
        taken = [self.commit(), None, self.commit()]
        while taken[-1] is None or not taken[-1] == taken[-2] == taken[-3]:
            taken.append(self.commit())
            assert len(taken) < 30
        return taken[-1]


@given(st.integers(100, KAFKA_LIMIT + 1), st.sampled_from(sorted(UNITS)), st.integers(0, 9))
def test_what_a_broker_takes_is_used_to_nearly_its_limit(limit, unit, seed):
    group = Group(limit, unit, seed)
    metadata = group.settle()
    assert group.refusals <= 14
    again = group.again(metadata)
    assert group.size(metadata) > 0.85 * min(limit, KAFKA_LIMIT) - 3 or not again
    # Bytes are used best without wide characters, and characters with them.
    assert metadata.isascii() == (unit == "bytes")


def test_a_small_limit_costs_little_of_what_is_done():
    group, best = Group(300, "characters"), Group(300, "characters")
    best.form._refused, best.form._taken = 301, 300
    assert len(group.again(group.settle())) < 1.02 * len(best.again(best.commit()))


@pytest.mark.parametrize("unit", UNITS)
def test_a_limit_that_gets_smaller_is_found_again(unit):
    group = Group(2000, unit)
    group.settle()
    group.limit = 300
    assert group.size(group.settle()) > 250
