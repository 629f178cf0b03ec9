"""A source's columns known without Spark are those that Spark knows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ackcore.cli.declared_sources import NotKnownHere, Session

DDL = "shop string, `a b` decimal(10, 2) COMMENT 'no, comma', more struct<x: int, y: array<int>>"


@pytest.mark.parametrize(
    ("made", "columns"),
    [
        (lambda s: s.createDataFrame([(1, 2)], "a int, b: int"), ["a", "b"]),
        (lambda s: s.createDataFrame([(1, 2)], ["a", "b"]), ["a", "b"]),
        (lambda s: s.createDataFrame([{"a": 1, "b": 2}]), ["a", "b"]),
        (lambda s: s.createDataFrame(pa.table({"a": [1], "b": [2]})), ["a", "b"]),
        (lambda s: s.createDataFrame([], pa.schema([("a", pa.int64())])), ["a"]),
        (lambda s: s.range(3), ["id"]),
        (lambda s: s.readStream.csv("/in", "shop string, n int"), ["shop", "n"]),
        (lambda s: s.readStream.schema("a int").option("sep", ";").json("/in"), ["a"]),
        (lambda s: s.readStream.schema("a struct<b: int, c: map<int,int>>").parquet("/in"), ["a"]),
        (lambda s: s.read.schema("struct<a: int, b: int>").load("/in"), ["a", "b"]),
        (lambda s: s.read.text("/in"), ["value"]),
        (lambda s: s.readStream.format("rate").load(), ["timestamp", "value"]),
        (lambda s: s.readStream.format("rate").load().select("value"), ["value"]),
        (lambda s: s.range(1).selectExpr("*", "id + 1 AS `n e`", "id"), ["id", "n e", "id"]),
        (lambda s: s.range(1).select(["id"]).withColumn("a", None).drop("id"), ["a"]),
        (lambda s: s.range(1).where("id > 3").limit(2).toDF("n"), ["n"]),
        (lambda s: s.range(1).withColumnRenamed("id", "n").repartition(3), ["n"]),
    ],
)
def test_columns(made, columns):
    assert made(Session()).columns == columns


def test_a_stream_stays_one():
    stream = Session().readStream.format("kafka").option("includeHeaders", "true").load()
    assert stream.columns[-1] == "headers"
    assert stream.select("value").where("true").isStreaming
    assert not Session().read.text("/in").isStreaming


@pytest.mark.parametrize(
    "made",
    [
        lambda s: s.table("x"),
        lambda s: s.sql("select 1"),
        lambda s: s.read.parquet("/in"),
        lambda s: s.read.csv("/in"),
        lambda s: s.read.jdbc("url", "table"),
        lambda s: s.createDataFrame([(1, 2)]),
        lambda s: s.createDataFrame([(1,)], DDL + ", 7 int"),
        lambda s: s.range(1).selectExpr("id + 1"),
        lambda s: s.range(1).select("a.b"),
        lambda s: s.range(1).groupBy("id"),
        lambda s: s.range(1).drop(7),
    ],
)
def test_what_only_spark_can_tell_is_not_guessed(made):
    with pytest.raises(NotKnownHere):
        made(Session())


def test_commas_within_types_and_comments():
    with pytest.raises(NotKnownHere):  # a comma in a comment
        Session().createDataFrame([], DDL)
    whole = DDL.replace("no, comma", "none")
    assert Session().createDataFrame([], whole).columns == ["shop", "a b", "more"]
