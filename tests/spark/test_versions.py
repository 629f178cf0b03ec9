"""Stand-ins for Spark's newer functions return the same."""

from __future__ import annotations

import datetime
import warnings

import numpy as np
import pyarrow as pa
import pytest
from py4j import java_gateway
from pyspark import SparkContext
from pyspark.sql import functions as sql

from ackcore import ids
from ackcore.spark import functions
from ackcore.spark.base import versions


def test_versions_that_were_tested_are_taken_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert versions.read_version("3.5.9") == (3, 5)
        assert versions.read_version("4.3.0.dev1+fork") == (4, 3)


@pytest.mark.parametrize("newer", ["4.4.0", "4.10.0.dev0", "5.0"])
def test_a_newer_version_is_taken_with_a_warning(newer):
    with pytest.warns(RuntimeWarning, match=rf"tested with PySpark 3\.5, .*4\.3, .*{newer}"):
        assert versions.read_version(newer) > (4, 3)


@pytest.mark.parametrize("older", ["3.4.4", "2.4", "unknown"])
def test_an_older_version_is_refused(older):
    with pytest.raises(ImportError, match=rf"needs PySpark 3\.5 or newer, got {older}"):
        versions.read_version(older)


def test_hashes_are_sparks():
    """Compute Spark's ``hash(int)``."""
    known = {
        0: 933211791,
        1: -559580957,
        42: 29417773,
        -1: -1604776387,
        2**31 - 1: 133916647,
        -(2**31): 723455942,
        123456789: -598405280,
    }
    found = versions.murmur3(np.array(list(known)))
    assert dict(zip(known, found.tolist(), strict=True)) == known


@pytest.mark.parametrize("sizes", [range(1, 513), [4096, 65536]], ids=["1 to 512", "large"])
def test_each_partition_has_a_key(sizes):
    for n in sizes:
        keys = versions.partition_keys(n)
        assert (versions.murmur3(keys) % n).tolist() == list(range(n))
        assert 0 <= keys.min() <= keys.max() < 2**31


@pytest.mark.parametrize("repartition", ["repartition_by_id", "repartition_by_key"])
@pytest.mark.parametrize("n", [1, 40])
def test_rows_are_in_the_partition_of_their_number(spark, repartition, n):
    rows = spark.range(0, 3 * n, 1, 3).select((sql.col("id") % n).cast("int").alias("dest"))
    placed = getattr(versions, repartition)(rows, n, "dest")
    found = placed.select("dest", sql.spark_partition_id()).collect()
    assert sorted(map(tuple, found)) == sorted((dest, dest) for dest in range(n) for _ in range(3))


def test_columns_are_arrows_and_back():
    schema = pa.schema(
        [
            pa.field("at", pa.timestamp("us", "UTC")),
            pa.field("local", pa.timestamp("us"), nullable=False),
            pa.field("some", pa.list_(pa.int64())),
        ]
    )
    spark_schema = versions.from_arrow_schema(schema)
    names = [field.dataType.simpleString() for field in spark_schema]
    assert names == ["timestamp", "timestamp_ntz", "array<bigint>"]
    back = versions.to_arrow_schema(spark_schema)
    assert back.field("at") == schema.field("at")
    assert back.field("local") == schema.field("local")


def test_rows_come_as_an_arrow_table(spark):
    when = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    frame = spark.createDataFrame(
        [(1, b"\x00a", when), (2, None, None)], "n int, b binary, t timestamp"
    )
    rows = {"n": [1, 2], "b": [b"\x00a", None], "t": [when, None]}
    assert versions.to_arrow(frame).to_pydict() == rows
    none = versions.to_arrow(frame.where("n > 2"))
    assert none.schema.names == ["n", "b", "t"]
    assert len(none) == 0


def test_functions_give_the_same_through_pandas(spark, monkeypatch):
    monkeypatch.setattr(functions, "arrow_udf", versions.pandas_udf)
    numbers = spark.range(0, 50, 1, 2)
    parts = functions.root_id(7, 3, "id", 1), functions.xor_edges(sql.array("id", sql.lit(2**62)))
    found = sorted(map(tuple, numbers.select("id", *parts).collect()))
    roots = ids.root_ids(7, 3, np.arange(50), 1).tolist()
    assert found == [(n, root, n ^ 2**62) for n, root in enumerate(roots)]
    nulls = sql.when(sql.col("id") > 2, sql.col("id"))
    # pandas has floats for integers with nulls; other floats stay floats, and are refused.
    assert versions._from_pandas(pa.array([1.0, 2.0]).to_pandas()).type == pa.float64()
    for made, words in (
        (functions.root_id(7, 0, nulls), "ValueError: offset must not hold nulls, got "),
        (functions.xor_edges(sql.array(nulls)), "ValueError: edges must not hold nulls"),
    ):
        with pytest.raises(Exception, match=words):
            numbers.coalesce(1).select(made).collect()


def test_threads_are_pinned_unless_spark_has_another_gateway(spark, monkeypatch):
    """With ``PYSPARK_PIN_THREAD=false`` it is py4j's `JavaGateway`."""
    assert versions.pins_threads()
    gateway = java_gateway.JavaGateway
    monkeypatch.setattr(SparkContext, "_gateway", gateway.__new__(gateway))
    assert not versions.pins_threads()
