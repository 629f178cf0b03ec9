"""A snapshot of rows is read again as they were, and not taken for rows of another source."""

from __future__ import annotations

import random
import sys

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import functions as sql
from pyspark.sql.types import IntegerType, StructField, StructType

from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointInUse, StateError
from ackcore.spark.base.sources import has_fixed_order
from ackcore.spark.base.versions import to_arrow
from ackcore.spark.engine import snapshot as module
from ackcore.spark.engine.setup import InputFrame
from ackcore.spark.engine.snapshot import load_snapshot, snapshot_inputs
from ackcore.spark.stores.run_files import remove_all
from ackcore.spark.tasks.row_files import damage_in

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def in_any_order(batches):
    for batch in batches:
        yield batch.take(pa.array(random.SystemRandom().sample(range(len(batch)), len(batch))))


@pytest.fixture
def restless(spark):
    """Rows of many types that come in another order each time."""
    frame = spark.range(100).select(
        "id",
        sql.timestamp_millis("id").alias("at"),
        sql.struct(sql.col("id").cast("string").alias("text")).alias("some"),
        sql.array("id").alias("list"),
        sql.lit(None).cast("decimal(9,2)").alias("nothing"),
    )
    return frame.repartition(3).mapInArrow(in_any_order, frame.schema)


def rows_of(inputs):
    """Rows by input and partition, in their order."""
    return [(one.spout, to_arrow(placed(one)).to_pylist()) for one in inputs]


def placed(one):
    """The rows as a spout stage gets them, and their partition."""
    fields = [*one.frame.schema.fields, StructField("p", IntegerType())]

    def place(batches):
        partition = pa.array([TaskContext.get().partitionId()], pa.int32())
        for batch in batches:
            columns = [*batch.columns, partition.take(pa.array([0] * len(batch)))]
            yield pa.RecordBatch.from_arrays(columns, [field.name for field in fields])

    return one.map_in_arrow(place, StructType(fields))


def test_rows_are_the_same_each_time(restless, tmp_path):
    inputs = [InputFrame(restless, "lines"), InputFrame(restless.limit(0), "clicks")]
    assert rows_of(inputs) != rows_of(inputs)
    assert load_snapshot(inputs, tmp_path / "kept") is None
    held = snapshot_inputs(inputs, tmp_path / "kept")
    first = rows_of(held)
    assert sorted(row["id"] for row in first[0][1]) == list(range(100))
    assert {row["p"] for row in first[0][1]} == {0, 1, 2}
    assert first[1] == ("clicks", [])
    again = load_snapshot(inputs, tmp_path / "kept")
    assert rows_of(held) == rows_of(again) == first
    assert [to_arrow(one.frame).num_rows for one in again] == [100, 0]
    assert [one.frame.schema for one in again] == [one.frame.schema for one in inputs]
    assert all(has_fixed_order(one.frame) for one in again)


def test_a_record_keeps_its_place(spark, tmp_path):
    """Partitions without rows count: places and stamped ids go by them."""
    some = spark.range(0, 8, numPartitions=4).where("id % 4 < 2 AND id > 1")
    inputs = [InputFrame(some, "lines"), InputFrame(spark.createDataFrame([], "id bigint"), "none")]
    held = snapshot_inputs(inputs, tmp_path / "kept")
    assert rows_of(held) == rows_of(inputs)
    before, after = ([one.frame.rdd.getNumPartitions() for one in some] for some in (inputs, held))
    assert before == after
    assert before[0] == 4


def test_columns_of_any_name(spark, tmp_path):
    inputs = [InputFrame(spark.range(3).selectExpr("id AS `a.b`", "id AS `c d`"), "lines")]
    assert rows_of(snapshot_inputs(inputs, tmp_path / "kept")) == rows_of(inputs)


def test_rows_of_another_source_are_not_taken_for_these(restless, tmp_path):
    snapshot_inputs([InputFrame(restless, "lines")], tmp_path / "kept")
    for other in (InputFrame(restless, "clicks"), InputFrame(restless.drop("at"), "lines")):
        assert load_snapshot([other], tmp_path / "kept") is None
    snapshot_inputs([InputFrame(restless.select("id"), "lines")], tmp_path / "kept")
    assert load_snapshot([InputFrame(restless, "lines")], tmp_path / "kept") is None


def test_what_was_not_finished_does_not_count(restless, tmp_path):
    inputs = [InputFrame(restless, "lines")]
    snapshot_inputs(inputs, tmp_path / "kept")
    remove_all(tmp_path / "kept" / "snapshot.json")
    assert load_snapshot(inputs, tmp_path / "kept") is None
    held = snapshot_inputs(inputs, tmp_path / "kept")
    assert len(list((tmp_path / "kept").glob("*/*.arrow"))) == 6
    record = max((tmp_path / "kept" / "snapshot.json").iterdir())
    record.write_bytes(record.read_bytes().replace(b"lines", b"lined"))
    with pytest.raises(CheckpointCorrupt, match=r"snapshot\.json is damaged"):
        load_snapshot(inputs, tmp_path / "kept")
    assert len(rows_of(held)[0][1]) == 100


def test_rows_that_are_damaged_are_read_from_the_source_again(restless, tmp_path, caplog):
    inputs = [InputFrame(restless, "lines")]
    held = snapshot_inputs(inputs, tmp_path / "kept")
    file = next((tmp_path / "kept").glob("*/*.arrow"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-20] + b"!" + whole[-19:])
    with pytest.raises(PySparkException) as caught:
        rows_of(held)
    assert file.name in str(damage_in(caught.value))
    assert load_snapshot(inputs, tmp_path / "kept") is None
    assert f"{file.name} is damaged" in caplog.text
    again = snapshot_inputs(inputs, tmp_path / "kept")
    assert len(rows_of(again)[0][1]) == 100
    # What the first one's tasks may still write is in none of these files.
    assert len({path.parent for path in (tmp_path / "kept").glob("*/*.arrow")}) == 2


def test_rows_are_not_taken_that_have_another_length(restless, tmp_path, caplog):
    inputs = [InputFrame(restless, "lines")]
    held = rows_of(snapshot_inputs(inputs, tmp_path, 3))
    record = module._record(tmp_path)
    body = record.load()
    assert body["epoch"] == 3
    (one,) = body["inputs"]
    for name, _, size in one["files"]:
        assert (tmp_path / body["directory"] / name).stat().st_size == size
    first, (name, rows, size), last = one["files"]
    wrong = {**one, "files": [first, [name, rows, size + 1], last]}
    record.replace(lambda _: {**body, "inputs": [wrong]})
    assert load_snapshot(inputs, tmp_path) is None
    assert f"it has {size} bytes instead of {size + 1}" in caplog.text
    record.replace(lambda _: body)
    assert rows_of(load_snapshot(inputs, tmp_path)) == held


def test_the_record_of_another_driver_is_not_replaced(restless, tmp_path, monkeypatch):
    inputs, reads = [InputFrame(restless, "lines")], module._reads

    def overtaken(inputs):
        monkeypatch.setattr(module, "_reads", reads)
        snapshot_inputs(inputs, tmp_path, 2)
        return reads(inputs)

    monkeypatch.setattr(module, "_reads", overtaken)
    with pytest.raises(CheckpointInUse, match="was written by another driver"):
        snapshot_inputs(inputs, tmp_path, 1)
    assert module._record(tmp_path).load()["epoch"] == 2


def test_files_that_cannot_be_read_back_are_an_error(restless, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_snapshot", lambda inputs, directory: None)
    with pytest.raises(StateError, match="cannot be read back"):
        snapshot_inputs([InputFrame(restless, "lines")], tmp_path / "kept")
