"""Tables that hold no events are refused by name, before any job where possible."""

from __future__ import annotations

import sys

import pandas as pd
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as sql
from pyspark.sql.functions import col

from ackcore.spark import combine, settle, settle_parquet
from ackcore.spark.base.sources import has_fixed_order, has_fixed_rows
from ackcore.spark.settle.dataframes import default_shards

cloudpickle.register_pickle_by_value(sys.modules[__name__])

NO_JOB = "root_id bigint, val bigint, task int, ts_ms bigint, reason string"


def must_not_run(batches):
    raise RuntimeError("it ran")
    yield


@pytest.fixture
def table(spark):
    """Events that cannot be computed: whatever is told of them is told before any job."""
    return spark.range(1).mapInArrow(must_not_run, NO_JOB)


@pytest.fixture
def open_rows(table):
    return settle(table)


def cast(name, kind):
    return lambda t: t.withColumn(name, col(name).cast(kind))


NO_VAL = "events has no column val, of type bigint; its columns are root_id, task"
OTHER_TASK = (
    r"events: column task must be of type int, got bigint; cast it first: \.withColumn\(\"task\", "
    r"col\("
)
MILLIS = r"ts_ms must be of type bigint, got timestamp; make it milliseconds first: .*unix_millis\("
MORE = r"no columns but root_id, .* got ts; drop them first: \.drop\('ts'\)"
UPPER = {"root_id": "ROOT_ID"}


@pytest.mark.parametrize("call", [settle, combine])
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda t: t.drop("val"), ValueError, NO_VAL),
        (lambda t: t.withColumnsRenamed(UPPER), ValueError, "no column root_id, of type bigint"),
        (cast("task", "bigint"), TypeError, OTHER_TASK),
        (cast("root_id", "string"), TypeError, "root_id must be of type bigint, got string"),
        (cast("val", "decimal(20,0)"), TypeError, r"got decimal\(20,0\)"),
        (lambda t: t.withColumn("ts_ms", sql.current_timestamp()), TypeError, MILLIS),
        (cast("reason", "int"), TypeError, "reason must be of type string, got int"),
        (lambda t: t.withColumn("ts", sql.lit(1)), ValueError, MORE),
        (lambda t: t.select("*", "val"), ValueError, "two columns val"),
        (lambda t: t.select(), ValueError, "its columns are none"),
        (
            lambda t: "events",
            TypeError,
            r"events must be a pyspark DataFrame, got str; spark.createDataFrame\(\) makes one",
        ),
        (lambda t: pd.DataFrame({"root_id": [1]}), TypeError, "got pandas.DataFrame; spark"),
        (lambda t: t.rdd, TypeError, "got .*RDD"),
        (lambda t: None, TypeError, "got NoneType"),
    ],
)
def test_tables_that_hold_no_events(table, call, change, error, match):
    with pytest.raises(error, match=match):
        call(change(table))


def test_a_stream_is_refused_and_the_way_is_named(spark):
    stream = (
        spark.readStream.format("rate")
        .load()
        .select(col("value").alias("root_id"), col("value").alias("val"), sql.lit(0).alias("task"))
    )
    for call in (settle, combine):
        said = r"events must not be a streaming .*\.writeStream\.foreachBatch\("
        with pytest.raises(ValueError, match=said):
            call(stream)


def test_each_micro_batch_can_be_settled(spark, tmp_path, frame, expected):
    """The way that is named works: what is open goes from one micro-batch to the next."""
    parts = [[(1, 5, 0), (2, 5, -1)], [(1, 5, -1), (2, 5, 3), (3, 1, 0)]]
    for n, part in enumerate(parts):
        frame(part).coalesce(1).write.parquet(f"{tmp_path}/{n}")
    seen, left = [], [None]

    def settle_batch(batch, _):
        outcomes = settle(batch, open_before=left[0]).localCheckpoint()
        seen.append({row.root_id: row.status for row in outcomes.collect()})
        left[0] = outcomes.where("status = 'OPEN'")

    for n in range(2):
        stream = spark.readStream.schema(frame([]).schema).parquet(f"{tmp_path}/{n}")
        query = (
            stream.writeStream.foreachBatch(settle_batch)
            .option("checkpointLocation", f"{tmp_path}/checkpoint{n}")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert seen == [{1: "OPEN", 2: "OPEN"}, {1: "ACKED", 2: "ACKED", 3: "OPEN"}]


class Connect:
    """A stand-in for a class of Spark Connect, whose packages need not be there."""

    is_stopped = False

    @property
    def sparkSession(self):
        return self


Connect.__module__ = "pyspark.sql.connect.dataframe"


def test_what_is_of_different_kinds_of_sessions_is_refused(table, monkeypatch):
    monkeypatch.setattr("ackcore.spark.base.session.SPARK", (4, 3))
    words = "open_before is of Spark Connect, and events is of a classic session"
    with pytest.raises(TypeError, match=words):
        settle(table, open_before=Connect())
    with pytest.raises(TypeError, match="events must be a pyspark DataFrame, got SparkSession; "):
        settle(table.sparkSession)
    with pytest.raises(TypeError, match="spark must be a SparkSession, got str"):
        settle_parquet("local[2]", "somewhere")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda t: t.drop("flags"), ValueError, "open_before has no column flags, of type tinyint"),
        (
            cast("inits", "int"),
            TypeError,
            "open_before: column inits must be of type tinyint, got int",
        ),
        (lambda t: t.withColumn("status", sql.lit(0)), TypeError, "status must be of type string"),
        (lambda t: t.withColumn("when", sql.lit(0)), ValueError, "got when; drop"),
        (lambda t: t.select("*", "root_id"), ValueError, "open_before has two columns root_id"),
        (lambda t: t.collect, TypeError, "open_before must be a pyspark DataFrame, got method"),
    ],
)
def test_tables_that_hold_no_open_rows(table, open_rows, change, error, match):
    with pytest.raises(error, match=match):
        settle(table, open_before=change(open_rows))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"shards": 0}, ValueError, "shards must be in 1..1048576, got 0"),
        ({"shards": -1}, ValueError, "shards"),
        ({"shards": 2**20 + 1}, ValueError, "shards"),
        ({"shards": 1.5}, TypeError, "shards must be an integer, got float"),
        ({"shards": "8"}, TypeError, "shards must be an integer, got str"),
        ({"timeout_s": -1}, ValueError, "timeout_s must be at least 0 and at most .*, got -1"),
        ({"timeout_s": "1"}, TypeError, "timeout_s must be a number of seconds, got str"),
        ({"now_ms": "now"}, TypeError, "now_ms must be an integer"),
        ({"now_ms": 2**63}, OverflowError, "now_ms must be milliseconds in -2"),
    ],
)
def test_arguments(table, arguments, error, match):
    with pytest.raises(error, match=match):
        settle(table, **arguments)


def test_a_time_out_needs_times(table, frame):
    with pytest.raises(ValueError, match=r"timeout_s was given, but events has no times; .* ts_ms"):
        settle(table.drop("ts_ms"), timeout_s=0.005)
    # Rows that were combined tell only when they are read.
    combined = combine(frame([(1, 5, 0)]))
    said = "ValueError: timeout_s was given, but the events have no times"
    with pytest.raises(Exception, match=said):
        settle(combined, timeout_s=0.005).collect()


def test_combined_rows_are_not_combined_again(table):
    with pytest.raises(ValueError, match="result of combine"):
        combine(combine(table))


def test_rows_that_are_no_messages(frame):
    """Told by the task that meets them, with their place; test_packing has all that is refused."""
    events = frame([(1, 5, 0, 1, None), (None, 5, 0, 1, None)], 5).coalesce(1)
    match = "ValueError: events: root_id must not hold nulls, got 1 of 2 rows, the first in row 1;"
    for call in (settle, combine):
        with pytest.raises(Exception, match=match) as refused:
            call(events).collect()
        assert "of partition 0" in str(refused.value)


def test_open_rows_that_no_ledger_left(frame):
    left = settle(frame([(1, 5, 0, 1, None)], 5))
    changed = left.withColumn("inits", sql.lit(3).cast("tinyint"))
    with pytest.raises(Exception, match="ValueError: open_before: inits must be 0, 1, or 2"):
        settle(frame([], 5), open_before=changed).collect()
    timeless = settle(frame([(1, 5, 0)]))
    said = r"ValueError: tables that are settled .* open_before has none"
    with pytest.raises(Exception, match=said):
        settle(frame([], 5), open_before=timeless).collect()
    said = r"ValueError: tables that are settled together .* events has none"
    with pytest.raises(Exception, match=said):
        settle(frame([]), open_before=left).collect()


def test_how_many_shards(spark):
    cores = spark.sparkContext.defaultParallelism
    mib = 1 << 20
    assert cores == 2
    assert default_shards(spark, None) == 4
    few = [default_shards(spark, size) for size in (0, 1, mib, 2 * mib, 63 * mib)]
    assert few == [1, 1, 1, 2, 2]
    assert [default_shards(spark, n * mib) for n in (64, 65, 400)] == [2, 4, 14]


def test_whose_rows_have_a_fixed_order(spark, tmp_path):
    """Said only of what is sure: a wrong yes can cost a job when a shuffle file is lost."""
    numbers = spark.range(10)
    numbers.write.parquet(f"{tmp_path}/numbers")
    files = spark.read.parquet(f"{tmp_path}/numbers")
    ordered = [
        numbers,
        files.select("id").where("id > 3"),
        files.union(numbers),
        files.withColumn("x", sql.explode(sql.array(sql.lit(1), sql.lit(2)))),
        files.mapInArrow(must_not_run, "id bigint"),
        spark.createDataFrame([(1,)], "id int"),
        spark.createDataFrame(pd.DataFrame({"id": [1]})),
        spark.createDataFrame(files.rdd.map(tuple), "id bigint"),
    ]
    assert [has_fixed_order(table) for table in ordered] == [True] * len(ordered)
    cached = files.cache()
    unordered = [
        files.repartition(2),
        files.coalesce(1),
        files.sort("id"),
        files.distinct(),
        files.groupBy("id").count(),
        files.join(numbers, "id"),
        files.limit(3),
        files.repartition(2).where("id > 3").union(files),
        spark.createDataFrame(files.rdd.map(tuple).repartition(2), "id bigint"),
        cached.select("*"),
        spark.createDataFrame([(1,)], "id int").cache(),
    ]
    assert [has_fixed_order(table) for table in unordered] == [False] * len(unordered)
    cached.unpersist()


def test_whose_rows_are_the_same_when_they_are_read_again(spark, tmp_path):
    """Said only of what is sure: a wrong yes can give a retry another record's payload."""
    numbers = spark.range(10)
    numbers.write.parquet(f"{tmp_path}/numbers")
    files = spark.read.parquet(f"{tmp_path}/numbers")
    files.createOrReplaceTempView("numbers")
    stream = spark.readStream.schema(files.schema).parquet(f"{tmp_path}/numbers")
    name = sql.udf(lambda number: f"{number}")
    fixed = [
        numbers,
        files,
        spark.table("numbers").where("id > 3").selectExpr("id + 1 AS id"),
        spark.sql("VALUES (1), (2)"),
        files.localCheckpoint(),
        stream.where("id > 3"),
        spark.readStream.format("rate").load(),
    ]
    assert [has_fixed_rows(table) for table in fixed] == [True] * len(fixed)
    # Without Arrow, as by default before Spark 4.2, it is the RDD of a list, too.
    by_arrow = spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    of_pandas = spark.createDataFrame(pd.DataFrame({"id": [1]}))
    assert has_fixed_rows(of_pandas) is by_arrow
    may_differ = [
        spark.createDataFrame([(1,)], "id int"),
        spark.createDataFrame(files.rdd.map(tuple), "id bigint").union(files),
        files.mapInArrow(must_not_run, "id bigint"),
        files.mapInPandas(must_not_run, "id bigint"),
        files.withColumn("name", name("id")),
        files.groupBy("id").applyInPandas(lambda group: group, "id bigint"),
        stream.withColumn("name", name("id")),
        files.withColumn("n", sql.rand()),
        files.withColumn("n", sql.expr("uuid()")),
        files.withColumn("n", sql.current_timestamp()),
        files.withColumn("n", sql.monotonically_increasing_id()),
        spark.sql("SELECT id, (SELECT max(id) FROM numbers) AS most FROM numbers"),
    ]
    assert [has_fixed_rows(table) for table in may_differ] == [False] * len(may_differ)


def test_rows_of_a_python_source_are_not_sure_to_be_the_same(spark):
    python_sources = pytest.importorskip("pyspark.sql.datasource", reason="Spark 4.0 brings it")

    class Numbers(python_sources.DataSource):
        @classmethod
        def name(cls):
            return "numbers"

        def schema(self):
            return "id bigint"

    spark.dataSource.register(Numbers)
    assert not has_fixed_rows(spark.read.format("numbers").load())
    assert not has_fixed_rows(spark.readStream.format("numbers").load())
