"""`attempt` on a real Spark: the same frame with answers and errors, in batches and in streams."""

from __future__ import annotations

import asyncio
import sys
import threading

import pandas as pd
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as sql
from pyspark.sql import types as T
from sessions import on_both_sessions

from ackcore.calls import RateLimit
from ackcore.spark import attempt
from ackcore.spark.base.versions import SPARK, to_arrow
from ackcore.spark.guards import share_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LOCK = threading.Lock()


class Prices:
    """An asynchronous client, connected on the worker: `calls` cannot be pickled once it is."""

    def __init__(self, rate):
        self.rate = rate
        self.lock = None

    async def __aenter__(self):
        self.lock = threading.Lock()
        return self

    async def __aexit__(self, *error):
        self.lock = None

    async def __call__(self, row):
        assert self.lock is not None
        await asyncio.sleep(0.001 * (row["id"] % 3))
        if row["id"] % 4 == 1:
            raise LookupError(f"no price for {row['id']}")
        return row["id"] * self.rate, {"at": row["at"]}


EVERYTHING = """
    id, timestamp'2026-03-01 12:00:00' + make_interval(0, 0, 0, 0, 0, 0, id) AS at,
    timestamp_ntz'2026-03-01 12:00:00' AS local, date'2026-01-01' AS day,
    cast(id AS decimal(20, 3)) AS exact, interval 1 day AS long, map('a', id) AS m,
    array(named_struct('x', id, 'at', timestamp'2026-03-01 12:00:00')) AS deep,
    binary('x') AS raw, cast('NaN' AS float) AS f, -0.0D AS zero, cast(null AS string) AS none
"""


@pytest.mark.parametrize(
    ("spark", "ansi"), [("classic", "true"), ("connect", "false")], indirect=["spark"]
)
def test_a_frame_gets_answers_and_errors_and_stays_what_it_was(spark, conf, ansi):
    """Behind an exchange that AQE plans anew, in a session whose zone is not this machine's."""
    conf("spark.sql.session.timeZone", "America/New_York")
    conf("spark.sql.ansi.enabled", ansi)
    conf("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    frame = spark.range(0, 50, 1, 3).repartition("id").selectExpr(*_columns(EVERYTHING))
    answers = "price double not null, seen struct<at: timestamp not null>"
    tried = attempt(frame, Prices(0.5), answers)
    assert tried.schema.fields[: len(frame.columns)] == frame.schema.fields
    added = tried.schema.fields[len(frame.columns) :]
    assert [(each.name, each.nullable) for each in added] == [
        ("price", True),
        ("seen", True),
        ("error", True),
    ]
    assert added[1].dataType == T.StructType([T.StructField("at", T.TimestampType(), True)])
    assert added[2].dataType.simpleString() == "struct<type:string,message:string,attempts:int>"
    # As SQL sees them: what a row is in Python has lost its types.
    text = sql.to_json(sql.struct(*frame.columns)).alias("text")
    before = frame.select("id", text, sql.hash(*(set(frame.columns) - {"m"}))).collect()
    after = tried.select("id", text, sql.hash(*(set(frame.columns) - {"m"}))).collect()
    assert sorted(after) == sorted(before)
    rows = tried.selectExpr("id", "price", "seen.at = at AS same", "error").collect()
    assert len(rows) == 50
    for id_, price, same, error in rows:
        if id_ % 4 == 1:
            assert (price, same) == (None, None)
            assert error == ("LookupError", f"no price for {id_}", 1)
        else:
            assert (price, same, error) == (id_ * 0.5, True, None)
    errors = to_arrow(tried.orderBy("id").select("error"))["error"].to_pylist()
    assert errors == [error and error.asDict() for *_, error in sorted(rows)]


def _columns(text):
    """Columns of a SELECT, one by one: only commas outside of brackets part them."""
    depth, parts = 0, [""]
    for char in text:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def double(row):
    return row["id"] * 2


def double_batch(batch: pa.RecordBatch):
    return [pa.array([n * 2 for n in batch["id"].to_pylist()])]


@on_both_sessions
def test_a_stream_is_tried_as_it_comes(spark, tmp_path):
    for n in range(3):
        path = tmp_path / "in" / str(n)
        spark.range(n * 10, n * 10 + 10, 1, 2).write.parquet(str(path))
    source = spark.readStream.schema("id bigint").option("maxFilesPerTrigger", 2)
    tried = attempt(
        source.parquet(str(tmp_path / "in" / "*")), double, pa.schema([("d", pa.int64())])
    )
    assert tried.isStreaming
    query = (
        tried.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    assert query.awaitTermination(120)
    found = spark.read.parquet(str(tmp_path / "out")).orderBy("id").collect()
    assert found == [(n, 2 * n, None) for n in range(30)]


@on_both_sessions
def test_outputs_may_be_written_in_three_ways(spark):
    frame = spark.range(1)
    text = "a int, b array<timestamp>, c decimal(10, 2), d timestamp_ntz"
    written = attempt(frame, double, text).schema
    parsed = T.StructType(
        [
            T.StructField("a", T.IntegerType(), False, {"comment": "kept"}),
            T.StructField("b", T.ArrayType(T.TimestampType())),
            T.StructField("c", T.DecimalType(10, 2)),
            T.StructField("d", T.TimestampNTZType()),
        ]
    )
    arrow = pa.schema(
        [
            pa.field("a", pa.int32(), nullable=False),
            ("b", pa.list_(pa.timestamp("us", "Europe/Berlin"))),
            ("c", pa.decimal128(10, 2)),
            ("d", pa.timestamp("us")),
        ]
    )
    assert attempt(frame, double, arrow).schema == written
    of_struct = attempt(frame, double, parsed).schema
    assert of_struct["a"].metadata == {"comment": "kept"}
    assert [(f.name, f.dataType, f.nullable) for f in of_struct] == [
        (f.name, f.dataType, f.nullable) for f in written
    ]


def test_a_rate_is_divided_by_the_tasks_that_run_at_once(spark):
    frame = spark.range(1)
    cores = spark.sparkContext.defaultParallelism
    limit = RateLimit(calls_per_s=10)
    assert share_of(frame, limit, None).calls_per_s == 10.0 / cores
    assert share_of(frame, limit, 4).calls_per_s == 2.5
    assert share_of(frame, None, None) is None
    for tasks, error in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(error, match="tasks must be"):
            share_of(frame, limit, tasks)
    with pytest.raises(ValueError, match="tasks must be left out without limit"):
        share_of(frame, None, 4)


# ------------------------------------------------------------------------------ what is refused


def refers_to_a_lock(row):
    with LOCK:
        return 1


class HasALock:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, row):
        return 1


@pytest.mark.parametrize(
    ("fn", "outputs", "error", "words"),
    [
        (double, "id int", ValueError, "got 'id' of frame and 'id' of outputs; rename the column"),
        (double, "ID int", ValueError, "got 'id' of frame and 'ID' of outputs; in this session"),
        (double, "a int, A int", ValueError, "got 'a' of outputs and 'A' of outputs"),
        (double, "Error int", ValueError, "got 'Error' of outputs and 'error' of the result"),
        (double, "double", ValueError, "must name its columns, got 'double'; give 'answer double'"),
        (double, "d dubble", ValueError, "outputs must be a schema: 'label string, score double'"),
        pytest.param(
            double,
            "d varchar(2)",
            ValueError,
            r"got 'd varchar\(2\)': Spark passes no char.* to Python; write string",
            marks=pytest.mark.skipif(SPARK < (4, 3), reason="others pass it, or have other words"),
        ),
        (double, "", ValueError, "outputs must have at least one column, got none"),
        (double, {"d": "int"}, TypeError, r"outputs must be a schema: .* got dict \{'d': 'int'\}"),
        (
            double,
            pa.schema([("d", pa.month_day_nano_interval())]),
            TypeError,
            r"outputs has a column 'd' of month_day_nano_interval, for which Spark has no type",
        ),
        pytest.param(
            double,
            T.StructType([T.StructField("d", getattr(T, "CalendarIntervalType", T.NullType)())]),
            TypeError,
            "outputs has a column 'd' of interval, which Spark does not pass to Python",
            marks=pytest.mark.skipif(
                not hasattr(T, "CalendarIntervalType"), reason="a type of Spark 4.0"
            ),
        ),
        (
            "double",
            "d int",
            TypeError,
            "fn must be a function of a row or of a pyarrow.RecordBatch",
        ),
        (
            refers_to_a_lock,
            "d int",
            TypeError,
            r"fn is sent to the workers with all that it refers to, and the global 'LOCK' in "
            r"refers_to_a_lock\(\), a lock, cannot be pickled \(.*\); make it in fn, or in "
            r"__enter__\(\) or __aenter__\(\) of an object that is called, or in a module",
        ),
        (
            HasALock(),
            "d int",
            TypeError,
            r"fn is sent to the workers, and its attribute 'lock', a lock, cannot be pickled",
        ),
    ],
)
def test_what_cannot_be_tried_is_refused_by_name(spark, fn, outputs, error, words):
    with pytest.raises(error, match=words):
        attempt(spark.range(1), fn, outputs)


def test_a_frame_that_cannot_be_tried_is_refused_by_name(spark, conf):
    with pytest.raises(TypeError, match="frame must be a pyspark DataFrame, got list"):
        attempt([1], double, "d int")
    with pytest.raises(TypeError, match=r"got pandas.DataFrame; spark.createDataFrame\(\) makes"):
        attempt(pd.DataFrame(), double, "d int")
    tried = attempt(spark.range(1), double, "d int")
    with pytest.raises(ValueError, match="got 'error' of frame and 'error' of the result; rename"):
        attempt(tried, double, "e int")
    twice = spark.range(1).selectExpr("id", "id")
    with pytest.raises(ValueError, match="got 'id' of frame and 'id' of frame"):
        attempt(twice, double, "d int")
    months = spark.range(1).selectExpr("id", "interval 1 month AS m")
    with pytest.raises(TypeError, match="frame has a column 'm' of interval month, which Spark"):
        attempt(months, double, "d int")
    conf("spark.sql.caseSensitive", "true")
    assert attempt(spark.range(1), double, "ID int").columns == ["id", "ID", "error"]


def test_settings_that_do_not_fit_are_refused_by_name(spark):
    frame = spark.range(1)
    for settings, error, words in (
        ({"max_attempts": 0}, ValueError, "max_attempts must be"),
        ({"retry_on": "TimeoutError"}, TypeError, "retry_on must be a list of exception classes"),
        ({"timeout_s": 0}, ValueError, "timeout_s must be"),
        ({"limit": -1}, TypeError, "limit must be a RateLimit, got int -1"),
        ({"limit": RateLimit(per="tenant")}, ValueError, "limit must name a column of frame, got"),
        ({"max_concurrency": 0}, ValueError, "max_concurrency must be"),
    ):
        with pytest.raises(error, match=words):
            attempt(frame, double, "d int", **settings)
    with pytest.raises(ValueError, match="max_concurrency must be left out for a function of"):
        attempt(frame, double_batch, "d int", max_concurrency=2)


@pytest.mark.parametrize(
    ("spark", "by_batch"), [("classic", False), ("connect", True)], indirect=["spark"]
)
def test_columns_may_have_any_names(spark, by_batch):
    """To mapInArrow, a dot leads to a field, a backtick is a quote, and a star is all columns."""

    def of_row(row):
        return row["a.b"] + 1

    def of_batch(batch: pa.RecordBatch):
        return [pa.array([n + 1 for n in batch["a.b"].to_pylist()], pa.int32())]

    frame = spark.createDataFrame([(1, "x"), (2, "y")], "`a.b` int, `c``d` string")
    found = attempt(frame, of_batch if by_batch else of_row, "`n.m` int")
    assert found.columns == ["a.b", "c`d", "n.m", "error"]
    assert sorted(map(tuple, found.collect())) == [(1, "x", 2, None), (2, "y", 3, None)]
    starred = attempt(spark.range(2).toDF("*"), lambda row: -row["*"], "n bigint")
    assert sorted(map(tuple, starred.collect())) == [(0, 0, None), (1, -1, None)]
