"""A consumer's dead letters go back to where their records came from, once each."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pytest
from consumer_counts import Counts, consuming, take
from servers import wait_until

from ackcore.calls import Reject
from ackcore.kafka import replay_letters
from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.cluster import Cluster, ClusterFailed, PartitionAnswers, PartitionFailure
from ackcore.kafka.consumer.consumer_letters import headers_of
from ackcore.kafka.consumer.consumer_records import Failure, KafkaRecord
from ackcore.kafka.consumer.held_partition import DyingRecord
from ackcore.kafka.consumer.letter_replay import _letter, _name
from ackcore.kafka.producing import DeliveryError, Mark, Transactions


@pytest.fixture
def counts(kafka_broker, tmp_path):
    return Counts(kafka_broker, tmp_path, partitions=2)


def die(counts, n):
    """All that comes is rejected, and is a letter then."""
    before = len(counts.server.consume(counts.dead_topic))
    with consuming(counts) as consumer:
        taken = take(consumer, n)
        for record in taken:
            consumer.fail(record, Reject("no"))
        wait_until(lambda: consumer.stats().counts.dead == n, "they are dead")
    assert len(counts.server.consume(counts.dead_topic)) == before + n
    return taken


def send(counts, **arguments):
    return replay_letters(
        counts.dead_topic, bootstrap_servers=counts.server.bootstrap_servers, **arguments
    )


def test_letters_go_back_once_as_they_came_and_die_as_the_same_record(counts, caplog):
    came = {"value": b"v", "key": b"k", "headers": [("h", b"1"), ("n", None)]}
    any_time = {"message.timestamp.after.max.ms": 2**63 - 1}  # an hour from now by default
    counts.dead_topic = counts.server.new_topic(1, **any_time)
    counts.server.produce(counts.topic, [came, b"plain"], 1)
    die(counts, 2)
    beyond_year_9999 = 1_700_000_000_000_000
    counts.server.produce(
        counts.dead_topic, [{"value": b"no letter", "timestamp": beyond_year_9999}]
    )
    assert send(counts) == (2, 1)
    assert f"topic '{counts.dead_topic}': 1 message is not sent, now" in caplog.text
    assert send(counts) == (0, 0)
    headed, plain = die(counts, 2)
    assert {headed.partition, plain.partition} == {1}
    assert (headed.value, headed.key) == (b"v", b"k")
    assert headed.headers == [*came["headers"], ("ackcore-deaths", b"1")]
    assert plain.headers == [("ackcore-deaths", b"1")]
    *_, one, _ = counts.server.consume(counts.dead_topic)
    assert dict(one.headers())["ackcore-deaths"] == b"2"
    assert send(counts, max_deaths=2) == (0, 2)
    assert ": 2 messages are not sent, now" in caplog.text
    assert send(counts) == (0, 0)


def letter_of(topic, days=0.0, partition=1):
    """A letter that is so many days old."""
    headers = {"topic": topic, "partition": str(partition), "attempts": "1", "reason": "x: y"}
    headed = [(f"ackcore-{name}", value.encode()) for name, value in headers.items()]
    at_ms = round((time.time() - days * 86_400) * 1000)
    return {"value": b"%g" % days, "headers": headed, "timestamp": at_ms}


def forget_what_was_sent(counts):
    """Delete letters, as brokers do in time."""
    groups = [_name(counts.dead_topic, 0)]
    for done in counts.server.admin.delete_consumer_groups(groups).values():
        done.result()


def test_letters_that_may_have_been_sent_before_are_sent_if_that_is_said(counts):
    """Brokers forget what was sent after a week; what is younger can be none of it."""
    # Whose letters the broker does not delete meanwhile.
    counts.dead_topic = counts.server.new_topic(1, retention_ms=-1)
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic, days=8)])
    with pytest.raises(ValueError, match=f"since must be given: {counts.dead_topic}-0 has letters"):
        send(counts)
    assert send(counts, since=datetime(1970, 1, 1, tzinfo=UTC)) == (1, 0)
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic, days=n) for n in (7.5, 6, 0)])
    assert send(counts) == (3, 0)
    forget_what_was_sent(counts)
    with pytest.raises(ValueError, match="because they delete it after"):
        send(counts)
    assert send(counts, since=datetime.now(UTC) - timedelta(days=1)) == (1, 0)
    assert send(counts) == (0, 0)
    values = [one.value() for one in counts.server.consume(counts.topic, 1)]
    assert [one for one in values if one] == [b"8", b"7.5", b"6", b"0", b"0"]


def test_letters_of_this_week_are_sent_without_a_word(counts):
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic, days=6.9)])
    assert send(counts) == (1, 0)


def sent_to(counts, number, note=""):
    """Pretend that an earlier call had sent the letters of partition 0 up to an offset."""
    settings = ClientSettings(counts.server.bootstrap_servers)
    with closing(Transactions(settings, _name(counts.dead_topic, 0), counts.dead_topic)) as before:
        before.begin()
        before.prepare(Mark(number, note))
        before.commit()


def test_letters_of_a_log_that_ends_before_what_was_sent_are_sent_if_that_is_said(counts):
    """A topic that was made anew, or truncated: which of its letters were sent is not known."""
    since = {"since": datetime(1970, 1, 1, tzinfo=UTC)}
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)] * 2)
    sent_to(counts, 2)
    with pytest.raises(ValueError, match=f"given: {counts.dead_topic}-0 ends at 2, before letter"):
        send(counts)
    assert send(counts, since=datetime.now(UTC) + timedelta(hours=1)) == (0, 0)
    assert send(counts) == (0, 0)  # the mark is one of this log again
    sent_to(counts, 99)
    assert send(counts, **since) == (2, 0)
    assert send(counts) == (0, 0)


def test_letters_of_a_topic_that_was_made_anew_are_sent_if_that_is_said(counts):
    """Though it has grown past what was sent last, so that offsets do not tell."""
    since = {"since": datetime(1970, 1, 1, tzinfo=UTC)}
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)] * 3)
    sent_to(counts, 1, "the id of another topic")
    with pytest.raises(ValueError, match=f"given: {counts.dead_topic} was created again .* 0/1 "):
        send(counts)
    assert send(counts, **since) == (3, 0)
    assert send(counts) == (0, 0)
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)])
    assert send(counts) == (1, 0)


def test_what_was_sent_before_ids_were_noted_is_of_the_topic_that_is_there(counts):
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)] * 3)
    sent_to(counts, 1)
    assert send(counts) == (1, 0)
    settings = ClientSettings(counts.server.bootstrap_servers)
    with Cluster(settings) as cluster:
        (topic_id,) = {one.topic_id for one in cluster.partitions([counts.dead_topic])}
    with closing(Transactions(settings, _name(counts.dead_topic, 0), counts.dead_topic)) as now:
        assert now.last == Mark(2, topic_id)


def test_brokers_that_tell_no_id_are_taken_at_their_offsets(counts, monkeypatch):
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)] * 3)
    sent_to(counts, 1, "an id")
    partitions = Cluster.partitions

    def without_ids(self, *of, **more):
        return [one._replace(topic_id=None) for one in partitions(self, *of, **more)]

    monkeypatch.setattr(Cluster, "partitions", without_ids)
    assert send(counts) == (1, 0)


def test_a_log_that_is_empty_and_ends_before_what_was_sent_begins_anew(counts):
    sent_to(counts, 99)
    assert send(counts) == (0, 0)
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)])
    assert send(counts) == (1, 0)


def test_letters_that_another_call_sends_meanwhile_are_no_other_log(counts, monkeypatch):
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)])
    bounds_of = Cluster.bounds_of

    def late(self, topic):
        monkeypatch.setattr(Cluster, "bounds_of", bounds_of)
        bounds = bounds_of(self, topic)
        counts.server.produce(counts.dead_topic, [letter_of(counts.topic)])
        assert send(counts) == (2, 0)
        return bounds

    monkeypatch.setattr(Cluster, "bounds_of", late)
    assert send(counts) == (0, 0)


def test_a_call_that_sends_nothing_says_again_what_was_sent(counts, monkeypatch):
    """Or a topic that is sent back each day, and has had no letter for a week, was never sent."""
    assert send(counts) == (0, 0)
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)])
    assert send(counts) == (1, 0)
    marks, prepare = [], Transactions.prepare

    def noted(self, mark):
        marks.append(mark.number)
        prepare(self, mark)

    monkeypatch.setattr(Transactions, "prepare", noted)
    assert [send(counts) for _ in range(2)] == [(0, 0)] * 2
    assert marks == [0, 0]


def test_a_partition_that_does_not_answer_ends_it(counts, monkeypatch):
    def watermarks(self, keys):
        return PartitionAnswers({}, dict.fromkeys(keys, PartitionFailure("X", "no leader")))

    monkeypatch.setattr(Cluster, "watermarks", watermarks)
    with (
        Cluster(ClientSettings(counts.server.bootstrap_servers)) as cluster,
        pytest.raises(
            ClusterFailed, match=f"offsets of {counts.topic}-0 .* no leader; try again once"
        ),
    ):
        cluster.bounds_of(counts.topic)


@pytest.mark.parametrize("dies_at", ["prepare", "commit"])
def test_one_that_dies_in_between_sends_nothing_twice(counts, monkeypatch, dies_at):
    counts.server.produce(counts.topic, [b"a", b"b"], 1)
    die(counts, 2)

    def dies(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transactions, dies_at, dies)
        with pytest.raises(KeyboardInterrupt):
            send(counts)
    assert len(counts.server.consume(counts.topic, 1)) == 2
    assert send(counts) == (2, 0)
    values = [one.value() for one in counts.server.consume(counts.topic, 1)]
    assert values == [b"a", b"b", b"a", b"b"]


def test_a_message_with_a_partition_that_no_topic_has_does_not_hold_up_letters(counts):
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic, partition=2**31)])
    counts.server.produce(counts.dead_topic, [letter_of(counts.topic)])
    assert send(counts) == (1, 1)


@pytest.mark.parametrize("gone", ["partition", "topic"])
def test_a_letter_whose_topic_or_partition_is_gone_is_named_and_since_leaves_it(counts, gone):
    """Those before it are sent once, and it holds up none behind it once it is left."""
    hour = 1 / 24
    bad = letter_of("no-such-topic", days=2 * hour)
    why = "topic no-such-topic does not exist; create it with 2 partitions"
    if gone == "partition":
        bad = letter_of(counts.topic, days=2 * hour, partition=7)
        why = f"topic {counts.topic} has . partitions; add partition 7"
    good = [letter_of(counts.topic, days=n * hour) for n in (5, 4, 3, 1.5, 1)]
    counts.server.produce(counts.dead_topic, [*good[:3], bad, *good[3:]])
    name = f"letter {counts.dead_topic}-0 at offset 3 was not sent, and those before it"
    for _ in range(2):
        with pytest.raises(DeliveryError, match=f"{name} .*: {why}. .* set since to a time .*, 20"):
            send(counts)
        assert len(counts.server.consume(counts.topic, 1)) == 3
    assert send(counts, since=datetime.now(UTC) - timedelta(hours=1.75)) == (2, 0)
    assert send(counts) == (0, 0)
    values = [one.value() for one in counts.server.consume(counts.topic, 1)]
    assert values == [one["value"] for one in good]


def test_a_record_of_a_topologys_sink_or_letter_is_sent_back_if_its_letter_is_a_consumers():
    """It has headers that a letter of a topology has as well, but before the consumer's own."""
    of_sink = [("ackcore-batch", b"deployment/sink/7"), ("ackcore-row", b"0.3")]
    of_letter = [
        *((f"ackcore-{name}", b"1") for name in ("reason", "component", "partition", "deaths")),
        *of_sink,
    ]
    kept = {"ackcore-component", "ackcore-batch", "ackcore-row"}
    for came in (of_sink, of_letter):
        record = KafkaRecord("orders", 1, 5, b"k", b"v", came, 1000)
        headers = headers_of(DyingRecord(record, Failure("ValueError", "no"), 1))
        topic, partition, sent, died = _letter(headers)
        assert (topic, partition) == ("orders", 1)
        assert sent[:-1] == [each for each in came if each[0] in kept]
        assert sent[-1] == ("ackcore-deaths", b"%d" % died)
        # A topology's letter of that very record.
        assert _letter([*(each for each in headers if each not in of_sink), *of_sink]) is None


def test_what_stands_for_no_record_is_left():
    def letter(**changes):
        told = {"topic": b"t", "partition": b"1", "attempts": b"2", "reason": b"ValueError: no"}
        named = {f"ackcore-{name}": value for name, value in (told | changes).items()}
        return _letter([("h", b"1"), *named.items()])

    assert letter() == ("t", 1, [("h", b"1")], 0)
    assert letter(deaths=b"3") == ("t", 1, [("h", b"1"), ("ackcore-deaths", b"3")], 3)
    assert letter(partition=b"2147483647")[1] == 2**31 - 1
    assert letter(deaths=b"9" * 5000)[3] == 0
    assert letter(topic=b"a" * 249)[0] == "a" * 249
    assert letter(topic=b"..a_-9")[0] == "..a_-9"
    for left in (
        {"attempts": b"0", "reason": b"LostUpstream: offsets 1 to 9 were deleted"},
        {"reason": b"UnreadableHeaders: the name of a header is not UTF-8"},
        {"batch": b"deployment/lines/0", "row": b"3"},
        {"partition": b"x"},
        {"partition": None},
        {"partition": b"2147483648"},
        {"partition": b"9" * 5000},
        {"attempts": b"9" * 5000},
        {"topic": None},
        *({"topic": name} for name in (b"", b".", b"..", b"a b", b"a\0", b"\xff", b"a" * 250)),
    ):
        assert letter(**left) is None, left
    assert _letter([]) is None
    for arguments, error in (
        ({"topic": ""}, "topic must be the name of a topic"),
        ({"max_deaths": 0}, "max_deaths must be at least 1"),
        ({"options": {"acks": 1}}, "options must not have 'acks'"),
        ({"since": datetime(2026, 1, 1)}, "since must be a time with its zone"),
    ):
        with pytest.raises(ValueError, match=error):
            replay_letters(**{"topic": "t", "bootstrap_servers": "x", **arguments})
