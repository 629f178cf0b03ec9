"""The Arrow UDFs give what `ackcore.ids` gives, whatever the widths and the cuts of columns."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as sql

from ackcore import ids
from ackcore.spark import functions, settle

KEY = -0x5EED
ROWS = 50
ROOTS = ids.root_ids(KEY, 3, np.arange(ROWS), 1)


@pytest.fixture
def numbers(spark):
    """Rows 0 to 49, in two partitions and several Arrow batches each."""
    return spark.range(0, ROWS, 1, 2)


def columns(frame, *made):
    """The values of columns over `numbers`, by row."""
    rows = frame.select("id", *(one.alias(f"made{n}") for n, one in enumerate(made))).collect()
    return [list(column) for column in zip(*sorted(rows), strict=True)][1:]


def as_root(name="id"):
    """The root ids of `ROOTS`, made from a column of positions."""
    return functions.root_id(KEY, 3, name, 1)


def test_root_ids_are_those_of_plain_python(conf, numbers):
    conf("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    attempts = functions.root_id(KEY, sql.col("id").cast("int"), "id", sql.col("id") % 64)
    first = functions.root_id(KEY, "id", "id")
    # Kafka has an int partition and a long offset; literals and other sources differ.
    widths = [sql.col("id").cast(width) for width in ("tinyint", "smallint", "int", "bigint")]
    assert columns(numbers, attempts, first, as_root(), *map(as_root, widths)) == [
        [ids.root_id(KEY, row, row, row % 64) for row in range(ROWS)],
        [ids.root_id(KEY, row, row, 0) for row in range(ROWS)],
        *[ROOTS.tolist()] * 5,
    ]


def test_edge_ids_are_those_of_plain_python(numbers):
    made, wanted = [], []
    parents = ids.edge_ids(KEY, ROOTS, "lines", 0, 0)
    lines = functions.edge_id(KEY, as_root(), "lines", 0, 0)
    for component in ("split", ids.component_key("split"), "Zähler"):
        made.append(functions.edge_id(KEY, as_root(), component, lines, "id"))
        wanted.append(ids.edge_ids(KEY, ROOTS, component, parents, np.arange(ROWS)).tolist())
    # An id is a pattern: an integer for all rows may be given unsigned.
    made.append(functions.edge_id(KEY, as_root(), "split", 2**64 - 6, 2))
    wanted.append(ids.edge_ids(KEY, ROOTS, "split", -6, 2).tolist())
    assert columns(numbers, *made) == wanted


def test_acker_tasks_are_storms(numbers):
    frame = numbers.select("id", as_root().alias("root"))
    counts = (1, 7, 2**31 - 1)
    found = columns(frame, *(functions.acker_task("root", n) for n in counts))
    assert found == [ids.acker_task(ROOTS, n).tolist() for n in counts]


def test_edges_are_xored_by_row(spark, conf):
    """Empty arrays, both ends of 64 bits, and arrays that lie in slices of others."""
    conf("spark.sql.execution.arrow.maxRecordsPerBatch", "2")
    arrays = [[], [5], [5, 5], [1, 2, 4], [2**63 - 1, -(2**63)], [-1, 0], [7] * 5]
    frame = spark.createDataFrame(list(enumerate(arrays)), "id bigint, edges array<bigint>")
    (made,) = columns(frame.coalesce(1), functions.xor_edges("edges"))
    assert made == [0, 5, 0, 7, -1, -1, 7]


def test_types_and_names_are_as_documented(numbers):
    frame = numbers.select(
        functions.root_id(KEY, 0, "id"),
        functions.edge_id(KEY, "id", "b", 0, 0),
        functions.acker_task("id", 3),
        functions.xor_edges(sql.array("id")),
    )
    assert [kind for _, kind in frame.dtypes] == ["bigint", "bigint", "int", "bigint"]
    names = ["root_id", "edge_id", "acker_task", "xor_edges"]
    assert [name.partition("(")[0] for name in frame.columns] == names


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: functions.root_id(2**64, 0, "id"), OverflowError, "key must fit in 64 bits"),
        (lambda: functions.root_id("k", 0, "id"), TypeError, "key must be an integer, got str"),
        (
            lambda: functions.root_id(1, 0.5, "id"),
            TypeError,
            "partition must be a Column, a column's name or an integer, got float",
        ),
        (lambda: functions.root_id(1, True, "id"), TypeError, "partition must be .* got bool"),
        (lambda: functions.root_id(1, 0, None), TypeError, "offset must be .* got NoneType"),
        (lambda: functions.edge_id(1, "id", b"b", 0, 0), TypeError, "component .* got bytes"),
        (
            lambda: functions.edge_id(1, "id", "b", 2**64, 0),
            OverflowError,
            "parent_edge must fit in 64 bits",
        ),
        (lambda: functions.acker_task("id", 0), ValueError, "n must be in 1.* got 0"),
        (lambda: functions.acker_task("id", "3"), TypeError, "n must be an integer, got str"),
        (lambda: functions.xor_edges([1]), TypeError, "edges must be .* got list"),
    ],
)
def test_arguments_are_refused_at_the_call(spark, call, error, words):
    """Before any plan is made, by name."""
    with pytest.raises(error, match=words):
        call()


NULLS = pa.array([1, None])
ZEROS = pa.array([0, 0])


@pytest.mark.parametrize(
    ("name", "arguments", "arrays", "words"),
    [
        ("root_id", (KEY, 0, "id"), (ZEROS, NULLS, ZEROS), "offset must not hold nulls, got "),
        (
            "root_id",
            (KEY, "id", 0),
            (pa.array([65535, 65536]), ZEROS, ZEROS),
            r"partitions must be in 0\.\.65535, got 65536 in row ",
        ),
        ("root_id", (KEY, "id", 0), (pa.array([2**40]), ZEROS, ZEROS), "partition must fit int32"),
        (
            "root_id",
            (KEY, 0, "id"),
            (ZEROS, pa.array(["1", "2"]), ZEROS),
            "offset must hold integers, got Arrow's ",
        ),
        ("edge_id", (KEY, "id", "b", 0, "id"), (ZEROS, ZEROS, pa.array([0, -1])), "ordinals must"),
        ("xor_edges", ("id",), (pa.array([[1, None]]),), "edges must not hold nulls"),
        ("xor_edges", ("id",), (pa.array([[1], None]),), "edges must not hold nulls"),
        ("xor_edges", ("id",), (ZEROS,), "edges must be a column of array<bigint>, got "),
    ],
)
def test_columns_are_refused_when_they_are_read(spark, monkeypatch, name, arguments, arrays, words):
    """The function that workers call raises. test_versions.py has such columns on Spark."""
    monkeypatch.setattr(functions, "arrow_udf", lambda compute, returns: lambda *columns: compute)
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(functions, name)(*arguments)(*arrays)


def test_events_made_on_spark_settle(spark, found):
    """From positions to outcomes in columns alone: a spout, a bolt that splits, its children."""
    lines = spark.range(0, 20, 1, 3).withColumn("root", as_root())
    lines = lines.withColumn("line", functions.edge_id(KEY, "root", "lines", 0, 0))
    words = [functions.edge_id(KEY, "root", "split", "line", sql.lit(n)) for n in range(3)]
    lines = lines.withColumn("words", sql.array(*words))
    init = lines.select("root", "line", sql.lit(4))
    split = lines.select(
        "root", sql.col("line").bitwiseXOR(functions.xor_edges("words")), sql.lit(-1)
    )
    # The last line's words are never counted.
    count = lines.where("id < 19").select("root", sql.explode("words"), sql.lit(-1))
    settled = found(settle(init.union(split).union(count).toDF("root_id", "val", "task")))
    statuses = {root: row.status for root, row in settled.items()}
    roots = ids.root_ids(KEY, 3, np.arange(20), 1).tolist()
    assert statuses == {root: "ACKED" if root != roots[19] else "OPEN" for root in roots}
