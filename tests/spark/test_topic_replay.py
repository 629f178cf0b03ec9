"""Letters of a dead-letter topic are sent through their topology again, once each."""

from __future__ import annotations

import logging
import sys
from random import Random

import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")

import test_kafka_spout as spouts
from test_kafka_spout import Kept, source, topology

from ackcore.kafka import RangeReader
from ackcore.kafka.dead_letters import headers_of
from ackcore.kafka.held_partition import DeadLetter
from ackcore.kafka.records import Failure, KafkaRecord
from ackcore.spark import DeadLetterTopic, replay, replay_topic, run_batch
from ackcore.spark.checkpoint import replays
from ackcore.spark.dead_letters import topic_replay
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.notes import NamedRows, Note
from ackcore.spark.dead_letters.topic_replay import _letter

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(spouts)


SMALL_READS = {"batch_bytes": 1 << 20, "batch_rows": 7, "timeout_s": 60.0}


class Ran:
    """A topology over a topic, whose dead go to another."""

    def __init__(self, spark, kafka, checkpoint, values):
        self.kafka, self.kept, self.checkpoint = kafka, Kept(), checkpoint
        kafka.create_topic("t")
        kafka.create_topic("dead")
        kafka.produce("t", values)
        self.dead = DeadLetterTopic("dead", kafka.bootstrap_servers)
        self._it = topology(source(kafka, "t"), self.kept, max_attempts=1)
        self._spark = spark
        self.books = self.run()

    def run(self):
        return run_batch(
            self._it, self._spark, self.checkpoint, dead_letters=self.dead, max_dead=None
        )

    def replay(self, **arguments):
        return replay_topic(self.checkpoint, self.dead, **arguments).records

    def headers(self):
        return [dict(message.headers() or ()) for message in self.kafka.consume("dead")]


@pytest.fixture
def ran(spark, mock_kafka, checkpoint):
    return lambda *values: Ran(spark, mock_kafka, checkpoint, values)


def test_a_letter_is_sent_once_from_wherever_it_is_read(ran, caplog):
    """And dies again as the same record, which has died twice then; too often ends the round."""
    it = ran({"value": b"bad", "key": b"k", "headers": [("h", b"1")]}, b"a", b"flaky")
    assert (it.books.acked, it.books.dead) == (1, 2)
    again = it.kafka.consume("dead")[0]
    headers = {name: value for name, value in again.headers() if name != "ackcore-row"}
    it.kafka.produce("dead", [{"value": b"bad", "headers": again.headers()}, b"no letter"])
    it.kafka.produce("dead", [{"value": b"x", "headers": list(headers.items())}])
    assert it.replay() == {"lines": 2}
    assert it.replay() == {}
    assert replay(it.checkpoint).records == {}
    books = it.run()
    assert (books.replayed, books.resolved, books.dead, books.balanced) == (2, 0, 4, True)
    *_, one, two = it.headers()
    assert (one["ackcore-deaths"], one["h"], one["ackcore-message-id"]) == (
        b"2",
        b"1",
        b'["t", 0, 0]',
    )
    assert (two["ackcore-deaths"], two["ackcore-offset"]) == (b"2", b"2")
    assert one["ackcore-timestamp"] == headers["ackcore-timestamp"]
    with caplog.at_level(logging.WARNING):
        assert it.replay(max_deaths=2) == {}
    assert "2 letters in DeadLetterTopic('dead'" in caplog.text
    assert replay(it.checkpoint).records == {"lines": 2}
    assert it.replay() == {}


@pytest.mark.parametrize("noted", [False, True])
def test_one_that_dies_in_between_sends_all_or_nothing(ran, monkeypatch, noted):
    it = ran(b"bad", b"a")
    whole = Letters.add_note

    def dies(*arguments):
        if noted:
            whole(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Letters, "add_note", dies)
        with pytest.raises(KeyboardInterrupt):
            it.replay(request="mine")
    assert it.run().replayed == noted
    assert it.replay(request="mine") == {"lines": 1}
    assert it.run().replayed == 1
    assert it.replay() == ({"lines": 1})  # it has died again
    assert it.replay() == {}


def test_letters_are_sent_part_by_part_in_one_request(ran, monkeypatch):
    """However many there are, no more of them is in memory than is read at once."""
    it = ran(*[b"bad"] * 40, b"a")
    parts = []

    def write(directory, request, spout, tables):
        def counted():
            for table in tables:
                parts.append(len(table))
                yield table

        return whole(directory, request, spout, counted())

    whole = replays.write
    monkeypatch.setattr(replays, "write", write)
    monkeypatch.setattr(RangeReader.__init__, "__kwdefaults__", SMALL_READS)
    assert it.replay() == {"lines": 40}
    assert sum(parts) == 40
    assert max(parts) <= 7
    monkeypatch.undo()
    assert it.run().replayed == 40


def test_letters_that_go_while_they_are_read_are_not_noted_as_sent(ran, monkeypatch):
    """Delete offsets as a compacted topic does: none below the first is lost."""
    it = ran(b"bad", b"bad", b"a")
    read, seen = RangeReader.read, []

    def compacted(self, range_):
        seen.append(range_)
        for batch in read(self, range_):
            yield batch.slice(len(seen) > 1)  # the first row is gone

    with monkeypatch.context() as patch:
        patch.setattr(RangeReader, "read", compacted)
        with pytest.raises(RuntimeError, match=r"1 letters went from .* nothing was sent"):
            it.replay(request="mine")
    assert it.run().replayed == 0
    assert it.replay(request="mine") == {"lines": 2}


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_notes_name_are_found(seed):
    random = Random(seed)
    notes, named = [], set()
    for n in range(20):
        start, batch = random.randrange(100), random.randrange(3)
        end = start + random.randrange(1, 12)
        notes.append(Note(str(n), n, {"a": {str(batch): [[start, end]]}}, random.random() < 0.5))
        named |= {("a", batch, row) for row in range(start, end)}
    found = NamedRows(notes)
    places = {(spout, batch, row) for spout in "ab" for batch in range(4) for row in range(-1, 120)}
    assert {place for place in places if place in found} == named


def test_a_record_keeps_all_headers_but_those_of_its_letter(ran):
    came = [("a", b"1"), ("ackcore-trace", b"2"), ("a", None), ("ackcore-emitted-by", b"x")]
    it = ran({"value": b"bad", "headers": came})
    assert it.replay() == {"lines": 1}
    it.run()
    first, second = (message.headers() for message in it.kafka.consume("dead"))
    assert first[: len(came)] == second[: len(came)] == came
    assert len(first) == len(second)


def test_what_is_no_letter_of_this_checkpoint_is_left(ran):
    it = ran(b"bad")
    (headers,) = it.headers()
    schema = spouts.KafkaSpout.schema

    def letter(came=None, **changes):
        told = headers | {f"ackcore-{name}": value for name, value in changes.items()}
        all_of_it = told.items() if came is None else came
        message = {
            "key": None,
            "value": b"bad",
            "headers": [{"key": name, "value": value} for name, value in all_of_it],
        }
        owner = headers["ackcore-batch"].split(b"/")[0].decode()
        return _letter(message, 5, owner, {"lines": schema})

    assert letter()[:4] == ("lines", 0, 0, 1)
    assert letter().record["value"] == b"bad"
    others = {"batch": b"0123/lines/0"}, {"row": b"x"}, {"batch": b""}, {"batch": b"0123/other/0"}
    assert [letter(**changes) for changes in others] == [None] * 4
    assert letter(component=b"lines", reason=b"LostUpstream: gone") is None
    # A consumer has read this letter, and died of it: its letter of that has its own headers last.
    record = KafkaRecord("dead", 0, 0, None, b"bad", list(headers.items()), 5)
    theirs = headers_of(DeadLetter(record, Failure("ValueError", "no"), 1))
    assert letter(came=theirs) is None
    # What a sink has sent, and what has no reason beside, is no letter.
    assert letter(came=[each for each in headers.items() if each[0] != "ackcore-reason"]) is None
    with pytest.raises(TypeError, match="topic must be a DeadLetterTopic, got str 'dead'"):
        replay_topic(it.checkpoint, "dead")
    with pytest.raises(ValueError, match="request must be 1 to 64"):
        it.replay(request="a/b")


def test_a_value_of_text_is_sent_as_its_bytes_are():
    schema = pa.schema([("key", pa.string()), ("value", pa.string()), ("offset", pa.int64())])
    headers = {
        "ackcore-reason": b"ValueError: bad",
        "ackcore-spout": b"lines",
        "ackcore-offset": b"7",
        "ackcore-batch": b"abc/lines/4",
        "ackcore-row": b"0",
    }
    message = {
        "key": None,
        "value": b"caf\xe9",
        "headers": [{"key": name, "value": value} for name, value in headers.items()],
    }
    letter = _letter(message, 1, "abc", {"lines": schema})
    table = topic_replay._table([letter], schema)
    assert table["value"].cast(pa.binary()).to_pylist() == [b"caf\xe9"]
    assert (table["key"].to_pylist(), table["offset"].to_pylist()) == ([None], [7])
