"""Dead letters as a DataFrame, whatever their sources' columns were, are and will be."""

from __future__ import annotations

import json
import os

import pyarrow as pa
import pytest
from checkpoints import OPEN, died, run_one
from pyspark.sql import types as T

from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.base.versions import JOB_ERRORS
from ackcore.spark.dead_letters.checkpoints import store_of
from ackcore.spark.dead_letters.letter_store import kinds_of
from ackcore.spark.dead_letters.reading import dead_letters, matching_rows
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters

VALUE = pa.schema([("value", pa.string())])
CLICK = pa.schema([("n", pa.int32()), ("at", pa.timestamp("us", "UTC")), ("a b.c", pa.float64())])
SOURCES = {"lines": VALUE, "clicks": CLICK}


def opened(checkpoint, sources, path=None):
    with OPEN(checkpoint) as state:
        if state.last_done is None:
            run_one(state, 0)
        return DeadLetters.checked(checkpoint, state.deployment_key, path, sources)()


def of(first, **columns):
    """Dead records of these columns."""
    n = len(next(iter(columns.values())))
    table = died(first, n).select(TRACKING.names)
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def values(frame, *columns):
    found = frame.orderBy("batch_id", "message_id").select(*(f"payload.{name}" for name in columns))
    return [tuple(row) for row in found.collect()]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_there_are_columns_before_anybody_died(spark, checkpoint, tmp_path, elsewhere):
    opened(checkpoint, SOURCES, tmp_path / "dead" if elsewhere else None)
    way_in = tmp_path / "dead" if elsewhere else checkpoint
    frame = dead_letters(way_in, spark)
    assert frame.select("payload.value", "payload.n", "payload.`a b.c`").collect() == []
    kinds = {field.name: field.dataType for field in frame.schema["payload"].dataType}
    assert kinds == {
        "value": T.StringType(),
        "n": T.IntegerType(),
        "at": T.TimestampType(),
        "a b.c": T.DoubleType(),
    }
    only = dead_letters(way_in, spark, spout="lines")
    assert only.schema["payload"].dataType.names == ["value"]
    texts = dead_letters(way_in, spark, payload="json")
    assert texts.schema["payload"].dataType == T.StringType()
    assert texts.columns == frame.columns
    for ask in (dead_letters, replay):
        with pytest.raises(ValueError, match="spout must be one of clicks, lines, got 'nobody'"):
            ask(way_in, spark, spout="nobody")
    with pytest.raises(ValueError, match="payload must be 'columns' or 'json', got 'text'"):
        dead_letters(way_in, spark, payload="text")


def test_the_columns_stay_the_same_when_somebody_dies(spark, checkpoint):
    letters = opened(checkpoint, SOURCES)
    before = dead_letters(checkpoint, spark).schema
    letters.write(0, {"lines": died(0, 2)})
    after = dead_letters(checkpoint, spark)
    assert set(after.schema["payload"].dataType) == set(before["payload"].dataType)
    assert after.columns == before.names
    assert values(after, "value", "n") == [("line 0", None), ("line 1", None)]


def test_columns_that_a_letter_lacks_are_null(spark, checkpoint):
    letters = opened(checkpoint, SOURCES)
    inner = pa.struct([("x", pa.int16()), ("y", pa.list_(pa.int32()))])
    nested = [{"x": 1, "y": [2, None]}, None]
    letters.write(0, {"lines": of(0, n=pa.array([1, None], pa.int32()), s=pa.array(nested, inner))})
    letters.write(
        1, {"lines": of(5, late=pa.array(["new"]), s=pa.array([{"x": 3, "y": [4]}], inner))}
    )
    frame = dead_letters(checkpoint, spark, spout="lines")
    assert values(frame, "n", "late") == [(1, None), (None, None), (None, "new")]
    found = [row[0] and row[0].asDict() for row in values(frame, "s")]
    assert found == [*nested, {"x": 3, "y": [4]}]


def test_a_type_differs_not_by_what_may_be_null_in_it(spark, checkpoint):
    """The headers of a KafkaSpout have a key that is never null; those of a DataFrame may be."""
    kinds = [
        pa.list_(pa.struct([pa.field("key", pa.string(), nullable), ("value", pa.binary())]))
        for nullable in (False, True)
    ]
    both = {
        spout: pa.schema([("headers", kind)])
        for spout, kind in zip(("lines", "clicks"), kinds, strict=True)
    }
    letters = opened(checkpoint, both)
    headers = [[{"key": "a", "value": b"1"}]]
    for first, (spout, schema) in enumerate(both.items()):
        column = pa.array(headers, schema.field("headers").type)
        letters.write(first, {spout: of(first, headers=column)})
    found = values(dead_letters(checkpoint, spark), "headers")
    assert [[tuple(each) for each in row[0]] for row in found] == [[("a", b"1")]] * 2


def test_letters_with_two_types_of_a_column_are_read_as_texts(spark, checkpoint):
    letters = opened(checkpoint, SOURCES)
    letters.write(0, {"lines": died(0, 2)})
    letters = opened(checkpoint, {"lines": pa.schema([("value", pa.int32())])})
    assert values(dead_letters(checkpoint, spark), "value") == [("line 0",), ("line 1",)]
    letters.write(
        1, {"lines": of(7, value=pa.array([7], pa.int32()), more=pa.array([None], pa.int8()))}
    )
    with pytest.raises(ValueError, match=r"'value' is int in letters .* and string in") as caught:
        dead_letters(checkpoint, spark)
    assert str(caught.value).endswith(". Read the payload as text with payload='json'")
    texts = dead_letters(checkpoint, spark, payload="json").orderBy("batch_id", "message_id")
    assert [json.loads(row.payload) for row in texts.collect()] == [
        {"value": "line 0"},
        {"value": "line 1"},
        {"value": 7, "more": None},
    ]


def test_a_condition_is_asked_of_letters_with_the_columns_that_they_have(spark, checkpoint, conf):
    # Off by default before Spark 4.0: text that is no number is null then, and matches nothing.
    conf("spark.sql.ansi.enabled", "true")
    letters = opened(checkpoint, SOURCES)
    letters.write(0, {"lines": died(0, 2)})
    now = pa.schema([("value", pa.int32()), ("more", pa.string())])
    letters = opened(checkpoint, {"lines": now})
    letters.write(
        1, {"lines": of(7, value=pa.array([7, 8], pa.int32()), more=pa.array(["a", "b"]))}
    )
    with pytest.raises(CheckpointForeign, match="'value' was string and is int32 now"):
        replay(checkpoint, spark)
    # Of the letters that have it, and of nobody else: no one else's text is taken for a number.
    assert replay(checkpoint, spark, where="payload.more = 'a'").records == {"lines": 1}
    with pytest.raises(ValueError, match=r"where must be a condition, .* over spout, me"):
        replay(checkpoint, spark, where="payload.nobody = 1")
    with pytest.raises(ValueError, match=r"in 1 file, the first batch-0\..*parquet: "):
        replay(checkpoint, spark, where="payload.value > 3")
    late = replay(checkpoint, spark, where="batch_id = 1 and payload.value > 3")
    assert late.records == {"lines": 1}


def test_a_wrong_condition_is_refused_before_there_are_letters(spark, checkpoint):
    opened(checkpoint, SOURCES)
    assert replay(checkpoint, spark, where="payload.value = 'a' and batch_id > 3").records == {}
    for wrong in ("nosuch = 1", "payload.nobody = 1", "error_type =", "batch_id", lambda row: True):
        with pytest.raises(ValueError, match=r"where must be a condition, .* over spout, me.*got "):
            replay(checkpoint, spark, where=wrong)


def test_a_condition_may_name_a_column_of_a_source_without_letters(spark, checkpoint):
    opened(checkpoint, SOURCES).write(0, {"lines": of(0, value=["a", "b"])})
    for spout in (None, "lines"):
        with pytest.raises(ValueError, match="where must be a condition"):
            replay(checkpoint, spark, where="payload.nobody = 1", spout=spout)
    assert replay(checkpoint, spark, where="spout = 'clicks' and payload.n > 3").records == {}


def test_a_condition_is_not_ambiguous_because_another_source_has_the_name_in_capitals(
    spark, checkpoint
):
    """Unless the session distinguishes them: then the condition may name either."""
    upper = pa.schema([("VALUE", pa.string())])
    other = pa.schema([("text", pa.string())])
    letters = opened(checkpoint, {"lines": VALUE, "clicks": upper, "other": other})
    assert replay(checkpoint, spark, where="payload.value = 'a'").records == {}
    letters.write(0, {"lines": of(0, value=["a", "b"]), "other": of(2, text=["c"])})
    assert replay(checkpoint, spark, where="payload.value = 'a'").records == {"lines": 1}
    session = spark.newSession()
    session.conf.set("spark.sql.caseSensitive", "true")
    assert replay(checkpoint, session, where="payload.VALUE = 'a'").records == {}


def test_a_job_that_fails_for_another_reason_is_not_a_wrong_condition(spark, checkpoint):
    opened(checkpoint, SOURCES).write(0, {"lines": died(0, 2)})
    store = store_of(checkpoint)
    kinds = kinds_of(store, None)
    os.unlink(kinds[0].files[0].path)
    with pytest.raises(JOB_ERRORS, match=r"CheckpointCorrupt: .*/batch-0\..* is missing"):
        matching_rows(spark, store, None, (), "batch_id = 0")
    with pytest.raises(ValueError, match="where must be a condition"):
        matching_rows(spark, store, None, (), "batch_id =")


def test_letters_tell_how_often_they_were_sent_and_by_whom(spark, checkpoint):
    letters = opened(checkpoint, SOURCES)
    for n in range(20):
        letters.write(n, {"lines": died(2 * n, 2)})
    first = replay(checkpoint, spark, request="one", where="batch_id in (3, 17)")
    assert first.records == {"lines": 4}
    second = replay(checkpoint, spark, request="two", where="message_id = 'id-7'", again=True)
    assert second.records == {"lines": 1}
    frame = dead_letters(checkpoint, spark)
    assert frame.count() == 40
    rows = frame.where("replayed > 0").select("message_id", "replayed", "replay_request").collect()
    assert {name: (times, request) for name, times, request in rows} == {
        "id-6": (1, "one"),
        "id-7": (2, "two"),
        "id-34": (1, "one"),
        "id-35": (1, "one"),
    }
    assert frame.where("replay_request is null and replayed = 0").count() == 36
    assert replay(checkpoint, spark, where="replayed = 0 and batch_id < 4").records["lines"] == 6
    assert dead_letters(checkpoint, spark).where("replayed > 0").count() == 10


@pytest.mark.parametrize("spout", ["_lines", "a=b", "l{i,n}e*s [1]"])
def test_letters_of_a_spout_of_any_name_are_read(spark, checkpoint, spout):
    letters = opened(checkpoint, {spout: VALUE})
    letters.write(0, {spout: died(0, 2)})
    letters.write(10, {spout: died(2, 2)})
    assert {row.spout for row in dead_letters(checkpoint, spark).collect()} == {spout}
    assert dead_letters(checkpoint, spark).count() == 4
