"""A stream's columns in a Delta table that has others, or of other types."""

from __future__ import annotations

import datetime
import decimal
import math
import shutil

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("deltalake")

import deltalake
from accepted_rows import WORDS, accepted, row_file, written_without_refused
from test_delta_sink import deltalake_type, rows, started

from ackcore.spark.base.versions import SPARK
from ackcore.spark.sinks.columns import longest_name


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


MONEY = decimal.Decimal("1.5")
NOON = datetime.datetime(2024, 5, 1, 12)
MIDNIGHT = datetime.datetime(2024, 5, 1)
DAY = datetime.date(2024, 5, 1)


@pytest.mark.parametrize(
    ("have", "kind", "good", "becomes", "bad"),
    [
        (pa.float64(), pa.float32(), math.inf, math.inf, [1e300, -1e39]),
        (pa.float64(), pa.float32(), 0.1, float(np.float32(0.1)), []),
        (pa.float64(), pa.decimal128(9, 2), 1.5, MONEY, [1.525, math.nan, 1e9]),
        (pa.timestamp("us", "UTC"), pa.date32(), MIDNIGHT, DAY, [NOON]),
        (pa.timestamp("us"), pa.date32(), MIDNIGHT, DAY, [NOON]),
        (pa.int64(), pa.bool_(), 1, True, [2, -1]),
        (pa.decimal128(20, 1), pa.float32(), MONEY, 1.5, []),
        (pa.decimal128(20, 1), pa.int32(), decimal.Decimal(2), 2, [MONEY, decimal.Decimal(2**40)]),
        (pa.string(), pa.int32(), "007", 7, ["x"]),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_rows_whose_values_a_cast_would_change_are_refused(
    path, tmp_path, have, kind, good, becomes, bad, deep
):
    """Arrow makes a day of an instant, and infinity of a number, without a word."""

    def nested(one):
        return pa.list_(pa.struct([("m", pa.map_(pa.string(), one))])) if deep else one

    def within(value):
        return [None, {"m": [("k", None), ("l", value)]}] if deep else value

    schema = pa.schema([("v", nested(have))])
    deltalake.DeltaTable.create(str(path), schema=pa.schema([("v", nested(kind))]))
    sink = started(path, schema)
    some = [None, good, *(value for one in bad for value in (one, good))]
    file = row_file(tmp_path, [(within(value), None) for value in some], schema=schema, batch=9)
    if bad:
        said = f"the value of column 'v' does not fit into {deltalake_type(path, 'v')}"
        places = [(0, 2 + 2 * n) for n in range(len(bad))]
        assert written_without_refused(sink, accepted([file])) == dict.fromkeys(places, said)
    else:
        sink.write(accepted([file]))
    table = deltalake.DeltaTable(path).to_pyarrow_table()["v"].to_pylist()
    assert table == [within(None), *[within(becomes)] * (1 + len(bad))]


@pytest.mark.parametrize("keys", [None, "k"])
@pytest.mark.parametrize(
    ("precision", "scale", "good", "bad"),
    [
        (9, 2, "-3", "-0.05"),
        (4, 4, "0.05", "-0.05"),
        (4, 2, "-99", "-99.99"),
        (38, 1, "-" + "9" * 37, "-" + "9" * 37 + ".5"),
    ],
)
def test_a_negative_fraction_is_refused_in_a_partition_column(
    path, tmp_path, precision, scale, good, bad, keys
):
    """deltalake writes -0.05 as 0.-5, which nobody can read."""
    schema = pa.schema([("n", pa.int64()), ("k", pa.decimal128(precision, scale))])
    deltalake.DeltaTable.create(str(path), schema=schema, partition_by=["k"])
    sink = started(path, schema, keys=keys)
    good = [decimal.Decimal(good), None]
    some = [(n, k, None) for n, k in enumerate([decimal.Decimal(bad), *good])]
    file = row_file(tmp_path, some, schema=schema, batch=9)
    why = {(0, 0): "partition column 'k' cannot store a negative decimal with a fraction"}
    assert written_without_refused(sink, accepted([file])) == why
    table = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("n")
    assert table["k"].to_pylist() == good


@pytest.mark.parametrize("keys", ["n", "k"])
def test_an_empty_text_is_refused_in_a_partition_column_that_is_not_null(path, tmp_path, keys):
    """Readers make null of it. A row with a null key is never replaced."""
    text = pa.string()
    columns = [("n", pa.int64()), ("k", text), pa.field("m", text, nullable=False)]
    schema = pa.schema(columns)
    deltalake.DeltaTable.create(str(path), schema=schema, partition_by=["k", "m"])
    sink = started(path, schema, keys=keys)
    some = [(0, "a", "", None), (1, "", "a", None), (2, None, "a", None)]
    file = row_file(tmp_path, some, schema=schema, batch=9)
    why = {(0, 0): "partition column 'm' cannot store an empty text"}
    if keys == "k":
        why[0, 1] = "partition column 'k' cannot store an empty text"
    assert written_without_refused(sink, accepted([file])) == why
    table = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("n")
    assert table["n"].to_pylist() == ([2] if keys == "k" else [1, 2])
    assert table["k"].null_count == len(table)


@pytest.mark.parametrize("keys", [None, "k"])
@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("a" * 253, "a" * 254),
        ("\U0001f600" * 21 + "x", "\U0001f600" * 21 + "xy"),
        ("/" * 84, "/" * 85),
    ],
)
def test_a_text_that_is_too_long_for_a_directory_is_refused(path, tmp_path, keys, good, bad):
    schema = pa.schema([("n", pa.int64()), ("k", pa.string())])
    deltalake.DeltaTable.create(str(path), schema=schema, partition_by=["k"])
    sink = started(path, schema, keys=keys)
    some = [(0, bad, None), (1, good, None), (2, None, None), (3, bad, 10)]
    file = row_file(tmp_path, some, schema=schema, batch=9)
    why = "partition column 'k' cannot store a value that has more than 253 bytes in the name"
    found = written_without_refused(sink, accepted([file]))
    assert found == dict.fromkeys([(0, 0), (0, 3)], f"{why} of a directory")
    assert rows(path) == [(1, good), (2, None)]


@pytest.mark.parametrize("keys", [None, "n"])
def test_a_float_that_is_too_long_for_a_directory_is_refused(path, tmp_path, keys):
    """deltalake writes all digits of a float into the name of the directory."""
    schema = pa.schema([("n", pa.int64()), ("k", pa.float64())])
    deltalake.DeltaTable.create(str(path), schema=schema, partition_by=["k"])
    sink = started(path, schema, keys=keys)
    good = [1e252, -1e-250, 1.2345678901234567e-235, math.inf, -math.inf, 0.1, None]
    bad = [1e253, -1e-251, 5e-324, -1e308]
    some = [(n, k, None) for n, k in enumerate([*good, *bad])]
    file = row_file(tmp_path, some, schema=schema, batch=99)
    why = written_without_refused(sink, accepted([file]))
    assert set(why) == {(0, n) for n in range(len(good), len(some))}
    assert rows(path) == list(enumerate(good))


def test_a_store_has_longer_names_of_directories(tmp_path):
    assert longest_name("s3://b/a é") == 1024 - len("a%20%C3%A9") - 90
    assert longest_name(f"file://{tmp_path}") == 255


def spark_texts(**kinds):
    """The schema of a table whose texts have these types in Spark, by column."""
    return pa.schema(
        pa.field(name, pa.string(), metadata={"__CHAR_VARCHAR_TYPE_STRING": kind})
        for name, kind in kinds.items()
    )


@pytest.mark.parametrize("keys", [None, "c"])
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_are_as_long_as_spark_has_them(path, tmp_path, keys, kind):
    """Spark writes as many spaces behind a char(n); it refuses a longer text, but for spaces."""
    columns = spark_texts(c="char(3)", v="varchar(2)")
    deltalake.DeltaTable.create(str(path), schema=columns)
    schema = pa.schema([(name, kind) for name in "cv"])
    sink = started(path, schema, keys=keys)
    some = [("é", "ab", None), ("abcd", "a", None), ("abc", "a\u20acb", None)]
    some += [("\U0001f600bc  ", "a    ", 10), ("a    b", None, 10), (None, "", 10), ("é ", "x", 11)]
    file = row_file(tmp_path, some, schema=schema, batch=4)
    said = "the text of column {!r} does not fit into {}"
    assert written_without_refused(sink, accepted([file], nonacked=[])) == {
        (0, 1): said.format("c", "char(3)"),
        (0, 2): said.format("v", "varchar(2)"),
        (0, 4): said.format("c", "char(3)"),
    }
    found = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    expected = [(None, ""), ("é  ", "ab"), ("é  ", "x"), ("\U0001f600bc", "a ")]
    expected = [row for row in expected if not keys or row != ("é  ", "ab")]
    assert sorted(((row["c"], row["v"]) for row in found), key=str) == sorted(expected, key=str)


def test_nested_texts_of_a_limited_length_are_refused_at_the_start(path):
    listed = pa.list_(pa.string())
    column = spark_texts(l="array<varchar(2)>").field("l").with_type(listed)
    table = pa.schema([column, ("n", pa.int64())])
    deltalake.DeltaTable.create(str(path), schema=table)
    with pytest.raises(ValueError, match=r"column 'l' of table .* is array<varchar\(2\)>, and"):
        started(path, pa.schema([("l", listed)]))
    started(path, pa.schema([("n", pa.int64())]))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.string()])
def test_a_table_that_is_partitioned_by_a_binary_column_is_refused(path, kind):
    """deltalake writes ``\\u0041`` for ``A``, which all readers take for six letters."""
    columns = pa.schema([("n", pa.int64()), ("k", pa.binary())])
    deltalake.DeltaTable.create(str(path), schema=columns, partition_by=["k"])
    with pytest.raises(ValueError, match=r"is partitioned by the binary column 'k', in which"):
        started(path, pa.schema([("n", pa.int64()), ("k", kind)]))
    started(path, pa.schema([("n", pa.int64())]))  # a null stays null


def test_fields_that_the_table_does_not_have_are_not_dropped(path, tmp_path):
    inner = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("z", pa.int64())])))])
    schema = pa.schema([("m", pa.map_(pa.string(), inner))])
    said = "sink 'count': table .* has no field 'm.value.y.element.z'; add it"
    sink = started(path, schema)
    shutil.rmtree(path)
    less = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.struct([("other", pa.int64())])))])
    deltalake.DeltaTable.create(str(path), schema=pa.schema([("m", pa.map_(pa.string(), less))]))
    with pytest.raises(ValueError, match=said):
        started(path, schema)
    with pytest.raises(ValueError, match=said):  # as one that was changed while the query ran
        sink.write(accepted([row_file(tmp_path, [([], None)], schema=schema)]))


def test_a_column_that_the_stream_does_not_have_and_takes_no_null_is_named(path, tmp_path):
    sink = started(path)
    shutil.rmtree(path)
    required = pa.field("at", pa.int64(), nullable=False)
    deltalake.DeltaTable.create(str(path), schema=pa.schema([*WORDS, required]))
    said = "sink 'count': column 'at' of table .* is NOT NULL, and the stream does not have it;"
    with pytest.raises(ValueError, match=said):
        started(path)
    file = row_file(tmp_path, [("a", 2, None)])
    with pytest.raises(ValueError, match=said):  # as one that was changed while the query ran
        sink.write(accepted([file]))
    # Rows that are there keep theirs.
    deltalake.write_deltalake(path, pa.table({"word": ["a"], "n": [1], "at": [9]}), mode="append")
    started(path, keys="word").write(accepted([file]))
    assert rows(path) == [("a", 2, 9)]


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_field_that_the_stream_does_not_have_and_takes_no_null_is_named(path, keys):
    required = pa.field("y", pa.int64(), nullable=False)
    inner = pa.list_(pa.struct([("x", pa.int64()), required, ("z", pa.int64())]))
    word = WORDS.field("word")
    deltalake.DeltaTable.create(str(path), schema=pa.schema([word, ("s", inner)]))
    some = pa.struct([("x", pa.int64())])
    said = r"column 's\.element\.y' of table .* is NOT NULL, and .*COLUMN s\.element\.y DROP"
    with pytest.raises(ValueError, match=said):
        started(path, pa.schema([word, ("s", pa.list_(some))]), keys=keys)
    started(path, pa.schema([word, ("s", pa.list_(pa.struct([*some, required])))]), keys=keys)


@pytest.mark.parametrize("keys", [None, "word", "n"])
@pytest.mark.parametrize("partition_by", [[], ["tens"]])
def test_a_column_that_the_table_computes_is_computed(path, tmp_path, partition_by, keys):
    tens = {"delta.generationExpression": "n * 10"}
    number = deltalake.schema.PrimitiveType("long")
    fields = deltalake.Schema.from_arrow(WORDS).fields
    schema = deltalake.Schema([*fields, deltalake.Field("tens", number, metadata=tens)])
    deltalake.DeltaTable.create(str(path), schema=schema, partition_by=partition_by)
    sink = started(path, keys=keys)
    for _ in range(2):
        sink.write(accepted([row_file(tmp_path, [("a", 2, None)])]))
    assert rows(path) == [("a", 2, 20)]
    own = pa.schema([*WORDS, ("tens", pa.int64())])
    some = [("b", 3, 30, None)]
    started(path, own, keys=keys).write(
        accepted([row_file(tmp_path, some, schema=own)], batch_id=1)
    )
    assert rows(path) == [("a", 2, 20), ("b", 3, 30)]


def test_columns_are_named_as_they_are(path, tmp_path):
    schema = pa.schema([("a`b", pa.int64()), ("c.d", pa.int64()), ("E", pa.int64())])
    sink = started(path, schema, keys=["a`b", "c.d"])
    for number, value in enumerate((5, 6)):
        some = [(1, 2, value, None)]
        sink.write(accepted([row_file(tmp_path, some, schema=schema)], number))
    assert rows(path) == [(1, 2, 6)]


@pytest.mark.skipif(SPARK < (4,), reason="Spark 3.5 has no type for a list of a fixed length")
@pytest.mark.parametrize("keys", [None, "n"])
def test_lists_of_a_fixed_length_are_searched_like_others(path, tmp_path, keys):
    day, required = pa.date32(), pa.field("element", pa.int64(), nullable=False)
    struct = pa.struct([("x", pa.int64())])
    kinds = [pa.list_(pa.list_(day, 2)), pa.list_(pa.int64(), 2), pa.list_(struct, 1)]
    schema = pa.schema([("n", pa.int64()), *zip(("days", "l", "s"), kinds, strict=True)])
    of_table = [pa.list_(pa.list_(day)), pa.list_(required), pa.list_(struct)]
    fields = [("n", pa.int64()), *zip(("days", "l", "s"), of_table, strict=True)]
    deltalake.DeltaTable.create(str(path), schema=pa.schema(fields))
    sink = started(path, schema, keys=keys)
    some = [
        (1, [[0, 1]], [1, 2], [None], 10),
        (2, [None, [0, 10**8]], None, None, 10),
        (3, None, [1, None], [{"x": 1}], 10),
        (4, [[None, 3]], None, [{"x": 1}], 11),
    ]
    found = written_without_refused(
        sink, accepted([row_file(tmp_path, some, schema=schema, batch=4)])
    )
    assert found == {
        (0, 1): "column 'days' cannot store a date or time outside of years 1 to 9999",
        (0, 2): f"the value of column 'l' has a null where {deltalake_type(path, 'l')} takes none",
    }
    assert [row[0] for row in rows(path)] == [1]
    wider = pa.schema([("s", pa.list_(pa.struct([("x", pa.int64()), ("y", pa.int64())]), 1))])
    with pytest.raises(ValueError, match=r"has no field 's\.element\.y'; add it"):
        started(path, wider)


def test_a_column_whose_name_has_a_dot_is_no_field(path):
    of_table = pa.schema([("s", pa.struct([("x", pa.int64())])), ("s.b", pa.int64())])
    deltalake.DeltaTable.create(str(path), schema=of_table)
    wider = pa.schema([("s", pa.struct([("x", pa.int64()), ("b", pa.int64())]))])
    with pytest.raises(ValueError, match=r"has no field 's\.b'; add it"):
        started(path, wider)


@pytest.mark.parametrize("keys", [None, "k"])
def test_spark_reads_lists_whose_numbers_are_all_null(spark, path, tmp_path, keys):
    """deltalake would write an empty dictionary, which Spark reads by index."""
    kinds = {"n.k": pa.string(), "l": pa.list_(pa.float64()), "m": pa.map_(pa.string(), pa.int64())}
    schema = pa.schema([("k", pa.string()), *kinds.items()])
    sink = started(path, schema, keys=keys)
    row = ("a", "b", [None], [("c", None)])
    sink.write(accepted([row_file(tmp_path, [(*row, None)], schema=schema, batch=9)]))
    frame = spark.read.parquet(*deltalake.DeltaTable(path).file_uris())
    found = frame.selectExpr("transform(l, one -> one) l", "map_values(m) m", "`n.k`").collect()
    assert [tuple(one) for one in found] == [([None], [None], "b")]


def test_the_rows_are_read_for_the_schema_once(path, tmp_path, monkeypatch):
    schema = pa.schema([(f"v{n}", pa.int64()) for n in range(20)])
    sink = started(path, schema)
    batch = accepted([row_file(tmp_path, [(*range(20), None)], schema=schema, batch=9)])
    reads = []
    read = type(batch).schema
    monkeypatch.setattr(type(batch), "schema", lambda self: reads.append(1) or read(self))
    sink.write(batch)
    assert len(reads) <= 2


def test_a_dictionary_of_the_columns_type_is_written(path, tmp_path):
    deltalake.DeltaTable.create(str(path), schema=pa.schema([("v", pa.decimal128(5, 2))]))
    schema = pa.schema([("v", pa.dictionary(pa.int32(), pa.decimal128(5, 2)))])
    started(path, schema)


@pytest.mark.parametrize(
    ("there", "have"),
    [
        (pa.struct([("c", pa.null())]), pa.struct([("c", pa.int64())])),
        (pa.int64(), pa.list_(pa.int64())),
        (pa.list_(pa.date32()), pa.list_(pa.bool_())),
    ],
    ids=str,
)
def test_a_column_of_a_type_that_cannot_be_cast_is_refused_at_the_start(path, there, have):
    """No row is at fault, so the micro-batch could never be written."""
    deltalake.DeltaTable.create(str(path), schema=pa.schema([("v", there)]))
    with pytest.raises(ValueError, match=r"column 'v' of .* is .*, and no .* can be cast to that"):
        started(path, pa.schema([("v", have)]))
