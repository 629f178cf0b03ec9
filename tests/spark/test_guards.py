"""`guard` on a real Spark: the functions that `attempt` takes, with no row lost and none twice."""

from __future__ import annotations

import asyncio
import datetime
import os
import sys
import threading

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import functions as sql
from streams import in_line

from ackcore.calls import RateLimit
from ackcore.spark import attempt, dead_letters, guard, run_batch, to_parquet
from ackcore.spark.query import Query
from ackcore.topology import BasicBolt, Reject, Retry

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PRICE = "price double, seen timestamp"
NOON = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)


def price(row):
    """Every tenth row yields nothing, and every seventh one fails the first time."""
    number = row["id"]
    if number % 10 == 3:
        raise Reject(f"no price for {number}")
    if number % 7 == 5 and row.attempt == 0:
        raise ConnectionError("reset")
    assert row["at"] == NOON
    return number / 2, row["at"]


CALLED = set()  # by a task: each has its own


async def price_async(row):
    if row["id"] not in CALLED and row["id"] % 11 == 0:
        CALLED.add(row["id"])
        raise Retry("busy", after_s=0.001)  # waited for within the task
    await asyncio.sleep(0.001 * (row["id"] % 3))
    return price(row)


def price_batch(batch: pa.RecordBatch):
    """A function of batches does not know of attempts: what fails once is left out."""
    numbers = batch["id"].to_pylist()
    for number in numbers:
        if number % 10 == 3:
            raise Reject(f"no price for {number}")
    return {"price": [number / 2 for number in numbers], "seen": batch["at"]}


ROWS = 60
DEAD = {n for n in range(ROWS) if n % 10 == 3}


def frame_of(spark):
    columns = ["id", "timestamp'2026-03-01 12:00:00' AS at", "cast(null AS string) AS none"]
    return spark.range(0, ROWS, 1, 2).selectExpr(*columns)


@pytest.mark.parametrize(
    ("spark", "fn", "settings"),
    [
        ("connect", price, {"max_concurrency": 3}),
        ("classic", price_async, {"journal": True}),
        ("classic", price_batch, {}),
    ],
    indirect=["spark"],
)
def test_rows_are_written_once_with_their_columns_or_are_dead_letters(
    spark, tmp_path, conf, fn, settings
):
    conf("spark.sql.session.timeZone", "UTC")
    out, checkpoint = tmp_path / "out", tmp_path / "cp"
    counts = guard(
        frame_of(spark), fn, PRICE, to_parquet(out), checkpoint, backoff_s=0.001, **settings
    )
    assert (counts.records, counts.acked, counts.dead) == (ROWS, ROWS - len(DEAD), len(DEAD))
    assert counts.balanced
    rows = spark.read.parquet(str(out)).orderBy("id")
    assert rows.columns == ["id", "at", "none", "price", "seen", "batch_id"]
    found = rows.selectExpr("id", "price", "at = seen", "none").collect()
    assert found == [(n, n / 2, True, None) for n in range(ROWS) if n not in DEAD]
    letters = dead_letters(checkpoint, spark).select(
        "payload.id", "attempts", "error_type", "error_message", "component"
    )
    assert sorted(letters.collect()) == [
        (n, 1, "Reject", f"no price for {n}", "fn") for n in sorted(DEAD)
    ]


def test_a_function_is_moved_from_attempt_to_guard_to_a_topology(spark, tmp_path, conf):
    """It stays as it is, and so do its answers."""
    conf("spark.sql.session.timeZone", "UTC")
    frame = frame_of(spark).where("id % 7 != 5")
    tried = attempt(frame, price, PRICE).where("error IS NULL").drop("error")

    class Price(BasicBolt):
        outputs = pa.schema([("id", pa.int64()), ("price", pa.float64())])

        def execute(self, tuple, collector):
            collector.emit((tuple["id"], price(tuple)[0]))

    topology = in_line({"frame": frame, "fn": Price()}, to_parquet(tmp_path / "topology"))
    run_batch(topology, spark, tmp_path / "cp topology")
    guard(frame, price, PRICE, to_parquet(tmp_path / "guard"), tmp_path / "cp guard")
    wanted = sorted(tried.select("id", "price").collect())
    for name in ("guard", "topology"):
        rows = spark.read.parquet(str(tmp_path / name)).select("id", "price")
        assert sorted(rows.collect()) == wanted


def test_null_structs_of_fields_that_are_not_null_are_written_retried_and_dead_letters(
    spark, tmp_path
):
    def fails(row):
        if row["id"] == 1 and row.attempt == 0:
            raise Retry("busy")
        if row["id"] == 2:
            raise Reject("bad")
        return 1

    struct = "if(id < 0, named_struct('x', 1), null)"
    shapes = [
        f"{struct} AS a",
        f"named_struct('o', {struct}) AS b",
        "array(null, named_struct('x', 1)) AS c",
        f"map('k', {struct}) AS d",
    ]
    frame = spark.range(0, 3, 1, 1).selectExpr("id", *shapes)
    out, checkpoint = tmp_path / "out", tmp_path / "cp"
    counts = guard(
        frame, fails, "n int", to_parquet(out), checkpoint, backoff_s=0.001, max_dead_ratio=None
    )
    assert (counts.records, counts.acked, counts.dead) == (3, 2, 1)
    row = (None, (None,), [None, (1,)], {"k": None})
    written = spark.read.parquet(str(out)).orderBy("id").select("id", "a", "b", "c", "d").collect()
    assert written == [(0, *row), (1, *row)]
    assert dead_letters(checkpoint, spark).select("payload.*").collect() == [(2, *row)]


def test_a_stream_is_guarded(spark, folder, tmp_path, store):
    folder.add("1", "2", "x")

    def half(row):
        if row["line"] == "2" and row.attempt == 0:
            raise ConnectionError("reset")
        return int(row["line"]) / 2

    query = guard(
        folder.stream,
        half,
        "half double",
        store,
        tmp_path / "cp",
        retry_on=["ConnectionError"],
        trigger={"availableNow": True},
        backoff_s=0.001,
    )
    assert isinstance(query, Query)
    assert query.await_termination(120)
    assert query.exception is None
    assert store.words == ["1", "2"]
    counts = query.counts
    assert (counts.records, counts.acked, counts.dead) == (3, 2, 1)
    (letter,) = dead_letters(tmp_path / "cp", spark).collect()
    assert (letter.error_type, letter.attempts) == ("ValueError", 1)


def test_each_row_of_a_streaming_aggregation_is_a_record_once(spark, tmp_path):
    """Spark's state continues after retries, and in the next query."""
    (tmp_path / "in").mkdir()
    lines = spark.readStream.schema("at timestamp, shop string, n int")
    lines = lines.option("maxFilesPerTrigger", 1).json(str(tmp_path / "in"))
    hours = lines.withWatermark("at", "10 minutes").dropDuplicates(["at", "shop"])
    hours = hours.groupBy(sql.window("at", "1 hour"), "shop").agg(sql.sum("n").alias("n"))
    hours = hours.selectExpr("unix_timestamp(window.start) div 3600 % 24 as hour", "shop", "n")

    def add(number, *rows):
        path = tmp_path / "in" / f"{number}.json"
        texts = [f'{{"at": "2026-01-01T{at}:00Z", "shop": "{shop}", "n": 1}}' for at, shop in rows]
        path.write_text("\n".join(texts))
        os.utime(path, (number, number))

    def passed(row):
        if row["shop"] == "a" and row.attempt == 0:
            raise ConnectionError("reset")
        return row["n"]

    def run():
        query = guard(
            hours,
            passed,
            "m bigint",
            to_parquet(str(tmp_path / "out")),
            tmp_path / "cp",
            trigger={"availableNow": True},
            backoff_s=0.001,
        )
        assert query.await_termination(120)
        rows = spark.read.parquet(str(tmp_path / "out")).select("hour", "shop", "m").collect()
        return sorted(tuple(row) for row in rows), query.counts.retried

    add(1, ("09:01", "a"), ("09:01", "a"), ("09:02", "b"))
    add(2, ("09:59", "a"), ("11:05", "a"))
    add(3, ("11:06", "b"))
    add(4, ("09:58", "b"))  # Spark drops this row: it is behind the watermark
    found = [(9, "a", 2), (9, "b", 1)]
    assert run() == (found, 1)
    add(5, ("11:59", "a"), ("13:00", "c"))
    add(6, ("15:00", "c"))
    assert run() == ([*found, (11, "a", 2), (11, "b", 1), (13, "c", 1)], 2)


def refers_to_a_lock(row):
    with LOCK:
        return 1


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("fn", "outputs", "settings", "error", "words"),
    [
        (price, "id int", {}, ValueError, "got 'id' of frame and 'id' of outputs"),
        (refers_to_a_lock, PRICE, {}, TypeError, "the global 'LOCK' in refers_to_a_lock"),
        (price, PRICE, {"attempts": 3}, TypeError, "'attempts' is not a setting; did you mean"),
        (price, PRICE, {"limits": 3}, TypeError, "'limits' is not a setting; did you mean 'limit'"),
        (
            price,
            PRICE,
            {"limit": RateLimit(cost_per_run=3)},
            ValueError,
            "no cost_per_run, got 3: ",
        ),
        (price, PRICE, {"trigger": "1 second"}, ValueError, "trigger must be left out for a"),
        (price, PRICE, {"retry_on": ["NoError"]}, ValueError, "retry_on has 'NoError', which"),
        (price_batch, PRICE, {"journal": True}, ValueError, "journal must be left out for a fun"),
        (price, PRICE, {"journal": 1}, ValueError, "journal must be True or False, got int 1"),
        (price, PRICE, {"message_id": "ids"}, ValueError, "'ids'"),
    ],
)
def test_what_cannot_be_guarded_is_refused_by_name(
    spark, tmp_path, fn, outputs, settings, error, words
):
    with pytest.raises(error, match=words):
        guard(frame_of(spark), fn, outputs, print, tmp_path / "cp", **settings)
    assert not (tmp_path / "cp").exists()


def test_a_refused_column_name_is_to_be_changed_where_guard_has_it(spark, tmp_path):
    """There is no bolt of the user's."""
    frame = spark.createDataFrame([(1,)], "batch_id int")
    words = r"'batch_id'; rename .* in the bolt, or for guard\(\) in the frame or in outputs"
    with pytest.raises(TypeError, match=words):
        guard(frame, price, PRICE, to_parquet(tmp_path / "out"), tmp_path / "cp")
