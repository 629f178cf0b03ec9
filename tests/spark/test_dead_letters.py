"""Dead letters keep all that died, and are sent again once."""

from __future__ import annotations

import datetime
import decimal
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import BAD, OPEN, SLOW, Topology, died, ids, run_one
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, CheckpointReadOnly
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.schema_changes import ColumnsChanged
from ackcore.spark.dead_letters.reading import dead_letters
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.stores.run_files import remove_all


@pytest.fixture
def store(checkpoint):
    """A checkpoint whose first micro-batches left letters: lines 0-4 and 10-12, clicks 20-21."""
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key)()
        for number, dead in enumerate(
            [
                {"lines": died(0, 5, (BAD, SLOW))},
                {},
                {"lines": died(10, 3), "clicks": died(20, 2, (SLOW,))},
            ]
        ):
            run_one(state, number, dead=dead)
            letters.write(number, state.decision(number).dead)
    return letters


def pending(checkpoint, spouts=("lines", "clicks"), **how):
    """The ids that the next micro-batch would get by requests, by spout."""
    with OPEN(checkpoint, **how) as state:
        plan = state.make_plan(state.last_done + 1, 0)
        due = state.split_due(plan).due
        return {name: sorted(ids(due[name])) for name in spouts if name in due}


ODD = "else where [1] {a,b}* %20"
LINES = [f"id-{n}" for n in (0, 1, 10, 11, 12, 2, 3, 4)]
CLICKS = ["id-20", "id-21"]


# -- reading ----------------------------------------------------------------------------------


def test_letters_tell_who_died_of_what_and_when(spark, store, checkpoint):
    frame = dead_letters(checkpoint, spark)
    assert frame.columns == [
        "spout",
        "message_id",
        "attempts",
        "error_type",
        "error_message",
        "component",
        "first_ms",
        "last_ms",
        "batch_id",
        "replays",
        "replayed",
        "replay_request",
        "payload",
    ]
    assert frame.count() == 10
    told = frame.where("message_id = 'id-1'").withColumn("s", F.unix_millis("last_ms")).first()
    assert (told.spout, told.attempts, told.batch_id) == ("lines", 5, 0)
    assert (told.component, told.error_type, told.error_message) == SLOW[:3]
    assert told.payload.value == "line 1"
    assert told.s == 2
    assert frame.where("component = 'split'").first().error_message == BAD.message
    by_spout = {row.spout: row["count"] for row in frame.groupBy("spout").count().collect()}
    assert by_spout == {"lines": 8, "clicks": 2}
    only = dead_letters(checkpoint, spout="clicks")  # the active session
    assert sorted(row.message_id for row in only.collect()) == CLICKS


def test_a_store_elsewhere_is_found_by_its_checkpoint(spark, checkpoint, tmp_path):
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(
            checkpoint, state.deployment_key, tmp_path / ODD, records=state.records
        )()
        run_one(state, 0)
        letters.write(0, {"lines": died(0, 2)})
    assert letters.place.url == str(tmp_path / ODD)
    assert dead_letters(checkpoint, spark).count() == 2
    assert dead_letters(checkpoint, spark, spout="clicks").count() == 0  # of whom nobody died
    assert replay(tmp_path / ODD, spout="clicks").records == {}
    assert replay(tmp_path / ODD).records == {"lines": 2}
    assert pending(checkpoint) == {"lines": ["id-0", "id-1"]}


def test_a_path_that_is_neither_is_told(spark, tmp_path):
    for ask in (lambda: dead_letters(tmp_path, spark), lambda: replay(tmp_path)):
        with pytest.raises(FileNotFoundError, match=r"has no ackcore/head.json|does not exist"):
            ask()


def test_without_a_session_one_must_be_given(store, checkpoint, monkeypatch):
    monkeypatch.setattr(SparkSession, "getActiveSession", staticmethod(lambda: None))
    monkeypatch.setattr(SparkSession, "_instantiatedSession", None)
    with pytest.raises(ValueError, match="spark must be given"):
        dead_letters(checkpoint)
    with pytest.raises(TypeError, match="spark must be a SparkSession"):
        dead_letters(checkpoint, 5)


NOON = datetime.datetime(2020, 1, 1, 12, tzinfo=datetime.UTC)
TYPED = pa.table(
    {
        "a b.c": pa.array(["ä", None]),
        "bytes": pa.array([b"\0\xff", None]),
        "small": pa.array([-1, None], pa.int8()),
        "flag": pa.array([True, None]),
        "money": pa.array([decimal.Decimal("1.20"), None], pa.decimal128(20, 2)),
        "day": pa.array([datetime.date(2020, 2, 29), None]),
        "at": pa.array([NOON, None], pa.timestamp("us", "UTC")),
        "wall": pa.array([NOON.replace(tzinfo=None), None], pa.timestamp("us")),
        "real": pa.array([float("nan"), None], pa.float32()),
        "list": pa.array([[1, None], None], pa.list_(pa.int64())),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())),
        "pair": pa.array([{"x": 1, "y": ["z", None]}, None]),
        "span": pa.array([datetime.timedelta(seconds=1), None], pa.duration("us")),
    }
)


def test_a_payload_keeps_its_types_there_and_back(spark, checkpoint):
    names = tuple(TYPED.column_names)
    topology = Topology(typed=names)
    table = pa.table(
        [*died(0, 2).select(TRACKING.names).columns, *TYPED.columns],
        schema=pa.schema([*TRACKING, *TYPED.schema]),
    )
    with OPEN(checkpoint, topology=topology) as state:
        run_one(state, 0, dead={"typed": table})
        DeadLetters.checked(checkpoint, state.deployment_key)().write(0, state.decision(0).dead)
    payload = dead_letters(checkpoint, spark).schema["payload"].dataType
    assert {field.name: field.dataType.simpleString() for field in payload} == {
        "a b.c": "string",
        "bytes": "binary",
        "small": "tinyint",
        "flag": "boolean",
        "money": "decimal(20,2)",
        "day": "date",
        "at": "timestamp",
        "wall": "timestamp_ntz",
        "real": "float",
        "list": "array<bigint>",
        "map": "map<string,int>",
        "pair": "struct<x:bigint,y:array<string>>",
        "span": "interval day to second",
    }
    assert replay(checkpoint).records == {"typed": 2}
    with OPEN(checkpoint, topology=topology, sources={"typed": TYPED.schema}) as state:
        due = state.split_due(state.make_plan(1, 0)).due["typed"]
    back = due.select(names)
    assert back.schema.equals(TYPED.schema)
    assert str(back.to_pylist()) == str(TYPED.to_pylist())


# -- writing ----------------------------------------------------------------------------------


def test_a_store_whose_index_was_removed_is_nobodys_to_write_to(store, tmp_path):
    with OPEN(tmp_path / "other") as state:
        remove_all(Path(store.place.url) / "index.json")
        said = r"index\.json is missing, though the directory"
        with pytest.raises(CheckpointCorrupt, match=said):
            DeadLetters.checked(tmp_path / "other", state.deployment_key, Path(store.place.url))()


def test_a_store_that_is_a_uri_is_refused(checkpoint):
    OPEN(checkpoint).close()
    with pytest.raises(ValueError, match="dead_letters must be a path on a local or shared"):
        DeadLetters.checked(checkpoint, 1, "viewfs://host/dead")()


def test_a_store_that_is_down_is_told_and_leaves_nothing_half(store, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(CheckpointReadOnly, match=r"lines/batch-7\..*\.parquet cannot be written"):
        store.write(7, {"lines": died(0, 1)})
    monkeypatch.undo()
    assert not list(Path(store.place.url).glob("**/batch-7.*"))
    assert not list(Path(store.place.url).glob("**/*.tmp"))


# -- sending again ----------------------------------------------------------------------------


def test_a_sent_letter_is_a_new_record_with_its_old_history(store, checkpoint):
    replay(checkpoint, spout="clicks")
    with OPEN(checkpoint) as state:
        plan = state.make_plan(3, 5000)
        assert plan.due == 0
        due = state.split_due(plan).due["clicks"]
    assert due.schema.names == [*TRACKING.names, "value"]
    first = due.to_pylist()[0]
    assert first == {
        "_ackcore_message_id": "id-20",
        "_ackcore_attempt": 0,
        "_ackcore_due_ms": 0,
        "_ackcore_first_ms": 20,
        "_ackcore_last_ms": 21,
        "_ackcore_reason": SLOW._replace(final=False)._asdict(),
        "_ackcore_replayed": 1,
        "value": "line 20",
    }


def test_some_are_sent_by_a_condition_and_the_others_later(spark, store, checkpoint):
    slow = replay(checkpoint, where="error_type = 'TimeoutError'", spark=spark)
    assert slow.records == {"lines": 2, "clicks": 2}
    assert pending(checkpoint) == {"lines": ["id-1", "id-3"], "clicks": CLICKS}
    one = replay(checkpoint, where=(F.col("payload.value") == "line 11") & (F.col("spout") != "x"))
    assert one.records == {"lines": 1}
    late = replay(checkpoint, where="batch_id = 2")
    assert late.records == {"lines": 2}
    assert replay(checkpoint, where="batch_id = 99").records == {}
    for wrong in ("nosuch = 1", lambda row: True):
        with pytest.raises(ValueError, match=r"where must be a condition, .* over spout, me"):
            replay(checkpoint, where=wrong)
    for ask in (dead_letters, replay):
        with pytest.raises(ValueError, match="spout must be one of clicks, lines, got 'nosuch'"):
            ask(checkpoint, spark, spout="nosuch")
    assert replay(checkpoint).records == {"lines": 3}
    assert pending(checkpoint) == {"lines": LINES, "clicks": CLICKS}


def test_a_topology_of_other_columns_is_not_sent_old_letters(spark, store, checkpoint):
    changed = Topology(lines=("text",))
    OPEN(checkpoint, topology=changed, accept_changes=True).close()
    with pytest.raises(CheckpointForeign, match="are value, and the source has text now"):
        replay(checkpoint, spout="lines")
    with pytest.raises(CheckpointForeign, match="the topology has no such tracked spout now"):
        replay(checkpoint, spout="clicks")
    assert dead_letters(checkpoint, spark).count() == 10


def test_letters_of_before_and_after_a_change_are_sent_one_kind_at_a_time(store, checkpoint, spark):
    dead = died(30, 1).select(TRACKING.names).append_column("text", pa.array(["a"]))
    store.write(3, {"lines": dead})
    told = "columns of 1 dead letter of spout 'lines' .* are text, and the source has value now"
    with pytest.raises(ColumnsChanged, match=told) as caught:
        replay(checkpoint)
    assert "Choose other letters (where=, spout=)" in str(caught.value)
    assert replay(checkpoint, spout="lines", where="batch_id < 3").records == {"lines": 8}


def test_a_store_whose_checkpoint_is_gone_or_another_is_told(checkpoint, tmp_path):
    with OPEN(checkpoint) as state:
        letters = DeadLetters.checked(checkpoint, state.deployment_key, tmp_path / "dead")()
        letters.write(0, {"lines": died(0, 1)})
    shutil.rmtree(checkpoint)
    with pytest.raises(FileNotFoundError, match="which was deleted"):
        replay(tmp_path / "dead")
    OPEN(checkpoint).close()
    said = r"belong to deployment .* now belongs to deployment"
    with pytest.raises(CheckpointForeign, match=said):
        replay(tmp_path / "dead")


def test_a_checkpoint_that_was_moved_with_its_store_is_found(store, checkpoint, tmp_path):
    checkpoint.rename(tmp_path / "moved")
    assert replay(tmp_path / "moved/ackcore/dead_letters").records == {"lines": 8, "clicks": 2}
    assert pending(tmp_path / "moved") == {"lines": LINES, "clicks": CLICKS}
