"""One run of a micro-batch on Spark: what it says of every record, held to a plain model."""

from __future__ import annotations

import collections
import datetime
import decimal
import sys

import numpy as np
import pyarrow as pa
import pytest
from one_run import LINES, TEXTS, WORDS, Pass, Split, by_word, lines
from pyspark import cloudpickle
from pyspark.sql import functions as F
from sessions import on_both_sessions
from streams import ignored, in_line

from ackcore.retry import Policy
from ackcore.spark.base.schemas import ATTEMPT, MESSAGE_ID
from ackcore.spark.engine.setup import InputFrame
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.topology import BasicBolt, BatchBolt, Bolt, TopologyBuilder

# What the workers get of this module goes along with the job: they cannot import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Rowwise(Bolt):
    """Hands on every word twice; fails "no", forgets "lost", acks "late" in flush."""

    outputs = WORDS

    def prepare(self, context):
        self.late = []

    def execute(self, tuple):
        word = tuple["word"]
        if word == "no":
            self.collector.fail(tuple, "no is no")
            return
        for _ in range(2):
            self.collector.emit(tuple.values, anchors=tuple)
        if word == "late":
            self.late.append(tuple)
        elif word != "lost":
            self.collector.ack(tuple)

    def flush(self):
        for tuple in self.late:
            self.collector.emit((tuple["id"], "later"), anchors=tuple)
            self.collector.ack(tuple)


def expected_words(texts, without=("bad", "poison")):
    words = collections.Counter()
    for i, text in enumerate(texts):
        if not set(without) & set((text or "").split()):
            words.update((i, word) for word in (text or "").split())
    return words


@pytest.mark.parametrize(
    ("spark", "message_id"),
    [("classic", None), ("classic", "id"), ("connect", ("id", "text"))],
    indirect=["spark"],
)
def test_words_by_word(spark, execute, message_id):
    """Failed lines are named with reason and payload; a sink gets the words of the others."""
    shuffled = message_id == "id"
    result = execute(by_word(spark, TEXTS, shuffled, message_id=message_id))
    assert result.run.spilled or not shuffled
    assert result.run.records == {"lines": len(TEXTS)}
    assert result.rows["pass", "default"] == expected_words(TEXTS)
    rows = [row for _, row in result.failed.values()]
    bad = [i for i, text in enumerate(TEXTS) if {"bad", "poison"} & set((text or "").split())]
    assert sorted(row["id"] for row in rows) == bad
    for reason, row in result.failed.values():
        message = row[MESSAGE_ID]
        assert row["text"] == TEXTS[row["id"]]
        assert row[ATTEMPT] == 0
        component, kind = (
            ("split", "ValueError") if "bad" in row["text"] else ("pass", "RuntimeError")
        )
        assert (reason.component, reason.type) == (component, kind)
        if message_id == "id":
            assert message == str(row["id"])
        elif message_id is None:
            assert message.startswith("3-")


@pytest.mark.parametrize(
    ("spark", "grouping"),
    [
        ("classic", "fields"),
        ("connect", "fields"),
        ("classic", "shuffle"),
        ("connect", "global_"),
        ("classic", "partial_key"),
        ("classic", "local"),
    ],
    indirect=["spark"],
)
def test_row_bolts_on_either_side_of_an_exchange(spark, execute, grouping):
    """Failing, forgetting and acking late look the same wherever a bolt runs."""
    builder = TopologyBuilder()
    builder.spout("lines", lines(spark, TEXTS))
    builder.bolt("split", Split()).shuffle("lines")
    bolt = builder.bolt("rows", Rowwise(), parallelism=2 if grouping == "shuffle" else None)
    if grouping in ("fields", "partial_key"):
        getattr(bolt, grouping)("split", "word")
    elif grouping == "local":
        bolt.local_or_shuffle("split")
    else:
        getattr(bolt, grouping)("split")
    builder.bolt("pass", Pass()).fields("rows", "word")
    builder.sink("pass", lambda frame, number: None)
    result = execute(builder.build(parallelism=3, chunk_rows=4))
    expected = collections.Counter()
    for word, n in expected_words(TEXTS, ("bad", "poison", "no", "lost")).items():
        expected[word] = 2 * n
        if word[1] == "late":
            expected[word[0], "later"] = n
    assert result.rows["pass", "default"] == expected
    reasons = collections.Counter((r.component, r.type) for r, _ in result.failed.values())
    assert reasons == {
        ("split", "ValueError"): 7,
        ("pass", "RuntimeError"): 7,
        ("rows", "Failed"): 7,
        ("rows", "NotAcked"): 7,
    }


@on_both_sessions
def test_records_that_are_due_run_beside_new_ones(spark, execute, due):
    retries = due([(f"old-{i}", i % 9, 100 + i, "bad" if i % 3 else "r s") for i in range(20)])
    result = execute(by_word(spark, ["a b", "bad"]), retries={"lines": retries})
    assert result.run.records == {"lines": 2}
    assert result.run.retried == {"lines": 20}
    failed = {row[MESSAGE_ID]: row for _, row in result.failed.values()}
    old = [message for message in failed if message.startswith("old")]
    assert sorted(old) == sorted(f"old-{i}" for i in range(20) if i % 3)
    assert all(failed[message][ATTEMPT] == int(message[4:]) % 9 for message in old)
    assert all(failed[message]["id"] == 100 + int(message[4:]) for message in old)
    words = result.rows["pass", "default"]
    assert words == {(0, "a"): 1, (0, "b"): 1} | {
        (100 + i, word): 1 for i in range(0, 20, 3) for word in "rs"
    }


def identified(frame, columns="id"):
    """Lines that have ids, and their words."""
    return in_line({"lines": frame, "split": Split()}, ignored, spout={"message_id": columns})


def test_a_repeated_message_id_is_a_named_failure(spark, execute):
    frame = spark.createDataFrame([(1, "a"), (2, "b"), (1, "c"), (3, "d")], LINES)
    result = execute(identified(frame.repartition(4)))
    reasons = sorted((row["text"], *reason[1:4:2]) for reason, row in result.failed.values())
    # They would meet again at each attempt.
    assert reasons == [("a", "RepeatedMessageId", True), ("c", "RepeatedMessageId", True)]
    assert result.rows["split", "default"] == {(2, "b"): 1, (3, "d"): 1}


def test_what_its_task_has_written_is_no_repetition_besides(spark, execute):
    """It has failed for a reason of its own; the other of its id has not."""
    rows = [(1, "bad"), (2, "bad"), (1, "c"), (3, "d")]
    builder = TopologyBuilder()
    builder.spout("lines", spark.createDataFrame(rows, LINES), message_id="id")
    builder.bolt("split", Split()).shuffle("lines")
    builder.sink("split", lambda frame, number: None)
    rules = Rules(0, 0, Policy(3, 1000, 60_000), 1e12)
    result = execute(builder.build(), rules=rules)
    (found,) = result.failed.values()
    assert (found[0].type, found[1]["text"]) == ("RepeatedMessageId", "c")
    assert sum(map(len, result.run.judged.roots())) == 2


@pytest.mark.parametrize("columns", [("id",), ("id", "text")])
def test_a_record_without_a_message_id_is_a_named_failure(spark, execute, columns):
    rows = [(1, "a"), (None, None), (2, "b"), (None, "c"), (None, None)]
    result = execute(identified(spark.createDataFrame(rows, LINES), columns))
    reasons = [(row["text"] or "", *reason[1:4:2]) for reason, row in result.failed.values()]
    bad = ["", "", "c"] if len(columns) == 1 else ["", ""]
    assert sorted(reasons) == [(text, "NullMessageId", True) for text in bad]
    assert "its message id, id" in next(iter(result.failed.values()))[0].message
    good = {(1, "a"): 1, (2, "b"): 1} | ({(None, "c"): 1} if len(columns) == 2 else {})
    assert result.rows["split", "default"] == good


def test_a_new_record_of_the_id_of_one_that_is_due_is_no_repetition(spark, execute, due):
    """It was the engine that brought them together, and each is tracked by itself."""
    retries = due([("7", 1, 7, "old")])
    frame = spark.createDataFrame([(7, "new")], LINES)
    result = execute(identified(frame), retries={"lines": retries})
    assert result.failed == {}
    assert result.rows["split", "default"] == {(7, "old"): 1, (7, "new"): 1}


KEYS = {
    "string": ("string", ["a", None, "", "ä"]),
    "bigint": ("bigint", [0, -1, 2**62, None]),
    "double": ("double", [0.5, float("nan"), None, -1.0]),
    "decimal": ("decimal(30,4)", [decimal.Decimal("1.5"), None, decimal.Decimal(-3)]),
    "date": ("date", [datetime.date(2020, 1, 1), None]),
    "timestamp": ("timestamp", [datetime.datetime(2020, 1, 1), None]),
    "binary": ("binary", [b"", b"\xff\x00", None]),
    "boolean": ("boolean", [True, False, None]),
    "struct": ("struct<x int, y string>", [(1, "a"), (1, None), None]),
    "array": ("array<int>", [[1, 2], [], None]),
}


class Where(BatchBolt):
    """Says in which task each value of a column came."""

    outputs = pa.schema([("task", pa.int32()), ("key", pa.string())])

    def __init__(self, column):
        self.column = column

    def prepare(self, context):
        self.task = context.task

    def process(self, batch, out):
        keys = [repr(key) for key in batch.column(self.column).to_pylist()]
        tasks = np.full(len(batch), self.task, np.int32)
        out.emit([tasks, keys], parents=np.arange(len(batch)))


def test_every_key_comes_to_one_task(spark, execute):
    rows = [tuple(values[n % len(values)] for _, values in KEYS.values()) for n in range(60)]
    schema = ", ".join(f"`{kind}` {ddl}" for kind, (ddl, _) in KEYS.items())
    builder = TopologyBuilder()
    builder.spout("keys", spark.createDataFrame(rows, schema).repartition(4))
    for kind in KEYS:
        builder.bolt(kind, Where(kind)).fields("keys", kind)
        builder.sink(kind, lambda frame, number: None)
    result = execute(builder.build(parallelism=5))
    assert result.failed == {}
    for kind, (_, values) in KEYS.items():
        found = result.rows[kind, "default"]
        assert sorted(found.values()) == [60 // len(values)] * len(values)
        assert len({key for _, key in found}) == len(values)


def test_spouts_of_one_frame_in_struct_columns(spark, execute):
    """A streaming query passes such batches: rows of both spouts, each in a nullable struct."""
    one, two = lines(spark, ["a b", "bad"]), spark.createDataFrame([(5,), (6,)], "n int")
    builder = TopologyBuilder()
    builder.spout("one", one)
    builder.spout("two", two)
    builder.bolt("split", Split()).fields("one", "text")
    builder.bolt("count", Count()).all("two")
    builder.sink("split", lambda frame, number: None)
    builder.sink("count", lambda frame, number: None)
    topology = builder.build(parallelism=2)
    struct_one, struct_two = F.struct(*one.columns), F.struct(*two.columns)
    wide = one.select(struct_one.alias("one")).unionByName(
        two.select(struct_two.alias("two")), allowMissingColumns=True
    )
    result = execute(topology, [InputFrame(wide.coalesce(1), None)])
    assert result.rows["split", "default"] == {(0, "a"): 1, (0, "b"): 1}
    assert result.rows["count", "default"] == {(5,): 2, (6,): 2}
    assert result.run.records == {"one": 2, "two": 2}


class Count(BatchBolt):
    outputs = pa.schema([("n", pa.int32())])

    def process(self, batch, out):
        out.emit(batch, parents=np.arange(len(batch)))


class Aside(Bolt):
    """Emits a row that hangs from nothing, and one that hangs from its input."""

    outputs = WORDS

    def execute(self, tuple):
        self.collector.emit((-1, "aside"))
        self.collector.emit(tuple.values, anchors=tuple)
        self.collector.ack(tuple)


class StableIds(BasicBolt):
    outputs = pa.schema([("id", pa.int64()), ("stable", pa.int64())])

    def execute(self, tuple, collector):
        collector.emit((tuple["id"], tuple.stable_id))


def test_rows_that_hang_from_nothing_change_no_stable_id(spark, execute, due):
    def stable(frame, **plan):
        parts = {"lines": frame, "split": Split(), "aside": Aside(), "stable": StableIds()}
        topology = in_line(parts, ignored, spout={"message_id": "id", "unique": True})
        rows = execute(topology, **plan).rows["stable", "default"]
        return {row for row in rows if row[0] >= 0}

    together = stable(lines(spark, ["a", "b", "c"], 1))
    alone = stable(spark.createDataFrame([], LINES), retries={"lines": due([("1", 1, 1, "b")])})
    assert len(together) == 3
    assert alone <= together
    assert len(alone) == 1


def test_a_stable_id_is_the_same_at_every_attempt(spark, execute, due):
    class Stable(BasicBolt):
        outputs = pa.schema([("message", pa.string()), ("attempt", pa.int64()), ("id", pa.int64())])

        def execute(self, tuple, collector):
            collector.emit((tuple.message_id, tuple.attempt, tuple.stable_id))

    def once(frame, **plan):
        builder = TopologyBuilder()
        builder.spout("lines", frame, message_id="id")
        builder.bolt("split", Split()).shuffle("lines")
        builder.bolt("stable", Stable()).fields("split", "word")
        builder.sink("stable", lambda frame, number: None)
        return execute(builder.build(parallelism=3), **plan).rows["stable", "default"]

    first = once(lines(spark, ["a b a", "c"]))
    assert len(first) == 4
    retries = due([("0", 4, 0, "a b a"), ("1", 4, 1, "c")])
    empty = spark.createDataFrame([], LINES)
    again = once(empty, retries={"lines": retries}, number=9, key=1234)
    assert {(m, i) for m, _, i in first} == {(m, i) for m, _, i in again}
    assert {a for _, a, _ in again} == {4}


@on_both_sessions
def test_single_partitions_are_tasks_of_their_own(spark, execute, due):
    """Spark's union would have the first partitions of all its sides in one task."""
    ranged = spark.range(4, numPartitions=1).selectExpr("id", "if(id = 2, 'bad', 'a b') AS text")
    builder = TopologyBuilder()
    builder.spout("lines", ranged)
    builder.spout("more", spark.range(3, numPartitions=1).selectExpr("id", "'m' AS text"))
    builder.bolt("split", Split()).fields("lines", "id").fields("more", "id")
    builder.sink("split", lambda frame, number: None)
    topology = builder.build(parallelism=2)
    of_unions = spark.conf.get("spark.sql.unionOutputPartitioning", None)  # None before Spark 4.1
    result = execute(topology, retries={"lines": due([("x", 1, 7, "late"), ("y", 1, 8, "bad")])})
    assert result.rows["split", "default"] == collections.Counter(
        [(i, word) for i in (0, 1, 3) for word in "ab"]
        + [(i, "m") for i in range(3)]
        + [(7, "late")]
    )
    assert sorted(row["id"] for _, row in result.failed.values()) == [2, 8]
    assert of_unions in (None, "true")
    assert spark.conf.get("spark.sql.unionOutputPartitioning", None) == of_unions
