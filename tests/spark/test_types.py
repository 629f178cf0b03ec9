"""Spark's types on their way to sinks and dead letters: kept, or refused by name at the start."""

from __future__ import annotations

import sys

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import types
from pyspark.sql.types import ArrayType, MapType, StringType, StructField, StructType
from streams import in_line

from ackcore.spark import attempt, dead_letters, guard, replay, run_batch, to_parquet
from ackcore.spark.base.versions import SPARK, to_arrow
from ackcore.spark.checks import kept_schema
from ackcore.topology import BasicBolt, BatchBolt, Reject

cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: A value of each type, as SQL.
KEPT = {
    "tiny": "CAST(1 AS TINYINT)",
    "nan": "CAST('NaN' AS FLOAT)",
    "infinite": "CAST('-Infinity' AS DOUBLE)",
    "day": "DATE'0001-01-01'",
    "at": "TIMESTAMP'2020-01-02 03:04:05.123456'",
    "local": "TIMESTAMP_NTZ'2020-01-02 03:04:05.123456'",
    "wide": "CAST('12345678901234567890.123456789012345678' AS DECIMAL(38, 18))",
    "bytes": "X'00FF'",
    "took": "INTERVAL '-1000000 02:03:04.5' DAY TO SECOND",
    "by_struct": "map(named_struct('a', 1), 'x')",
    "by_decimal": "map(CAST(1.5 AS DECIMAL(38, 18)), DATE'2020-01-01')",
    "by_bytes": "map(X'00', INTERVAL '0 00:00:01.5' DAY TO SECOND)",
}
DEPTHS = {
    "": "{}",
    "_in_array": "array({}, NULL)",
    "_in_struct": "named_struct('f', {})",
    "_deep": "array(named_struct('m', map('k', array({}))))",
}


def test_types_and_values_are_kept_at_every_depth(spark, tmp_path, conf):
    """By a sink and by a dead letter that is sent again."""
    conf("spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY")  # for files of older writers
    conf("spark.sql.execution.arrow.pyspark.validateSchema.enabled", "true")
    columns = [
        f"{form.format(value)} AS {name}{depth}"
        for name, value in KEPT.items()
        for depth, form in DEPTHS.items()
    ]
    if SPARK >= (4, 1):  # which reads it of Parquet
        columns.append("NULL AS nothing")
    frame = spark.range(2).selectExpr("id", *columns)
    refused = [0]

    def check(row):
        if row["id"] in refused:
            raise Reject("not this one")
        return 1

    out, checkpoint = str(tmp_path / "out"), tmp_path / "cp"
    counts = guard(frame, check, "n int", to_parquet(out), checkpoint, max_dead_ratio=None)
    assert (counts.acked, counts.dead) == (1, 1)
    want = values_of(frame.orderBy("id"))
    letters = dead_letters(checkpoint, spark).select("payload.*")
    assert values_of(letters) == want[:1]
    assert types_of(letters) == types_of(frame)
    assert replay(checkpoint).records == {"frame": 1}
    refused.clear()
    guard(
        frame, check, "n int", to_parquet(out), checkpoint, max_dead_ratio=None, accept_changes=True
    )
    rows = spark.read.parquet(out).drop("n", "batch_id").orderBy("id")
    assert types_of(rows) == types_of(frame)
    assert values_of(rows) == want


def values_of(frame):
    """Through Arrow: PySpark's rows cannot have bytes as the keys of a map before 4.1."""
    return list(map(repr, to_arrow(frame).to_pylist()))


def types_of(frame):
    return {field.name: field.dataType.simpleString() for field in frame.schema}


#: Each with its arguments.
LOST = {"VariantType": (), "GeometryType": (4326,), "GeographyType": (4326,), "TimeType": (6,)}


@pytest.mark.parametrize("name", [*LOST, "collation", "array<void>"])
def test_what_arrow_loses_is_refused_by_name_at_every_depth(name):
    if name == "array<void>":
        kind = ArrayType(types.NullType())
    elif name == "collation":
        kind = StringType("UTF8_LCASE") if SPARK >= (4, 0) else None
    else:
        made = getattr(types, name, None)
        kind = made and made(*LOST[name])
    if kind is None:
        pytest.skip(f"PySpark has no {name} before a later version")
    nested = [
        kind,
        ArrayType(kind),
        StructType([StructField("f", kind)]),
        MapType(StringType(), ArrayType(kind)),
    ]
    for each in nested:
        schema = StructType([StructField("id", types.LongType()), StructField("v", each)])
        said = f"frame has a column 'v' of .*does not keep the type {kind.simpleString()}"
        with pytest.raises(TypeError, match=said.replace("(", r"\(").replace(")", r"\)")):
            kept_schema(schema, "frame")


def test_a_null_in_a_nested_field_that_is_declared_not_null_is_kept(spark, tmp_path):
    """By bolts, whose sink would end the query, and by `attempt`, of which Spark would read 0."""
    numbers = pa.list_(pa.field("item", pa.int64(), nullable=False))
    point = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    value = {"l": [None, 1], "p": {"x": None}, "m": {"k": None}}
    strict = pa.schema(
        [("l", numbers), ("p", point), ("m", pa.map_(pa.string(), pa.field("value", point, False)))]
    )

    class Rows(BasicBolt):
        outputs = strict

        def execute(self, tuple, collector):
            collector.emit(value)

    class Batches(BatchBolt):
        outputs = strict

        def process(self, batch, out):
            out.emit(batch, parents=range(len(batch)))

    out = str(tmp_path / "out")
    parts = {"in": spark.range(1), "rows": Rows(), "batches": Batches()}
    topology = in_line(parts, to_parquet(out), max_attempts=1)
    assert run_batch(topology, spark, tmp_path / "cp").acked == 1
    (row,) = spark.read.parquet(out).select("l", "p", "m").collect()
    assert row.asDict(recursive=True) == value

    tried = attempt(spark.range(1), lambda row: value, strict)
    (row,) = tried.selectExpr("l", "p.x", "m['k'].x AS y", "l[0] + p.x AS z", "error").collect()
    assert row.asDict() == {"l": [None, 1], "x": None, "y": None, "z": None, "error": None}
