"""A Delta table as a sink, by deltalake: rows of ACKED records, each micro-batch once."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import shutil
import sys
import traceback

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle

pytest.importorskip("deltalake")

import deltalake
from accepted_rows import WORDS, accepted, check_full_disk, row_file, written_without_refused
from deltalake.exceptions import SchemaMismatchError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_sink import Split, word_count

from ackcore.spark import SinkError, run_batch, to_delta
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.sinks import delta
from ackcore.spark.sinks.sink import check_sink
from ackcore.spark.sinks.sink_batch import SinkBatch

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table"


def started(path, schema=WORDS, **arguments):
    """A sink as a query that starts leaves it."""
    sink = to_delta(path, **arguments)
    check_sink("count", sink, schema)
    sink.claim("count", "abc", "/cp")
    return sink


def rows(path, options=None):
    table = deltalake.DeltaTable(path, storage_options=options).to_pyarrow_table().to_pylist()
    return sorted(tuple(row.values()) for row in table)


# -- what is refused at the start ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"path": 3}, TypeError, "path must be a path or a URI, got int"),
        ({"path": ""}, ValueError, "path must not be empty"),
        ({"path": "s3a://b/a%20b"}, ValueError, "without percent escapes.* got '%20' in it"),
        ({"path": "s3://b/a#b"}, ValueError, "without percent escapes.* got '#' in it"),
        ({"keys": [3]}, TypeError, r"keys must be names of columns, got \[3\]"),
        ({"storage_options": 0}, TypeError, "storage_options must be a mapping of str to .* int"),
        ({"storage_options": "abc"}, TypeError, "storage_options must be a mapping .*, got str"),
        (
            {"storage_options": {"a": 1}},
            TypeError,
            r"storage_options must be a mapping of str to str, got int for 'a' \(str\)",
        ),
        ({"keys": []}, ValueError, "keys must name at least one column; omit it"),
    ],
)
def test_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        to_delta(**{"path": "t", **arguments})


def test_columns_are_refused_before_anything_runs(path):
    sink = to_delta(path, keys="word")
    for kind in (pa.time64("us"), pa.duration("us"), pa.uint64()):
        with pytest.raises(TypeError, match=r"no type for .* of column 'n'; have the"):
            check_sink("count", sink, pa.schema([("word", pa.string()), ("n", kind)]))
    with pytest.raises(ValueError, match="keys must be among the stream's columns n, got 'word'"):
        check_sink("count", sink, pa.schema([("n", pa.int64())]))
    nested = r"the key column 'word' must not be nested, and it is list<item: int64>; have"
    with pytest.raises(TypeError, match=nested):
        check_sink("count", sink, pa.schema([("word", pa.list_(pa.int64()))]))
    twins = [("a", pa.int64()), ("A", pa.int64())]
    for schema, names in (
        (twins, "columns 'a' and 'A'"),
        ([("s", pa.struct(twins))], "fields 's.a' and 's.A'"),
    ):
        with pytest.raises(TypeError, match=f"does not distinguish the {names}; rename one"):
            check_sink("count", to_delta(path), pa.schema(schema), True)
    assert not path.exists()
    other, wider = to_delta(path), pa.schema([*WORDS, ("at", pa.date32())])
    check_sink("other", other, wider)
    started(path)
    with pytest.raises(ValueError, match=r"table .* has no column 'at', it has word, n; add it"):
        started(path, wider)
    with pytest.raises(ValueError, match=r"sink 'other': table .* has no column 'at'"):
        other.claim("other", "abc", "/cp")


def logged(path, features=(), computed=None, columns=tuple(WORDS.names), **properties):
    """Write the log of an empty table, by default with the columns of WORDS, as others do."""
    fields = [{"name": name, "type": "string" if name == "word" else "long"} for name in columns]
    for field in fields:
        field |= {"nullable": True, "metadata": {}}
    if computed is not None:
        metadata = {"delta.generationExpression": computed}
        fields.append({"name": "m", "type": "long", "nullable": True, "metadata": metadata})
    protocol = {"minWriterVersion": 7, "writerFeatures": list(features), "minReaderVersion": 3}
    protocol |= {"readerFeatures": [name for name in features if name == "typeWidening-preview"]}
    metadata = {"id": "t", "format": {"provider": "parquet", "options": {}}, "createdTime": 0}
    metadata |= {"schemaString": json.dumps({"type": "struct", "fields": fields})}
    metadata |= {"partitionColumns": [], "configuration": properties}
    (path / "_delta_log").mkdir(parents=True)
    actions = {"protocol": protocol}, {"metaData": metadata}
    (path / f"_delta_log/{0:020}.json").write_text("\n".join(map(json.dumps, actions)))


@pytest.mark.parametrize("is_append_only", ["true", "false"])
def test_keys_of_an_append_only_table_are_refused_at_the_start(path, files, is_append_only):
    logged(path, ["appendOnly"], **{"delta.appendOnly": is_append_only})
    if is_append_only == "true":
        with pytest.raises(
            ValueError, match=r"is append-only \(delta\.appendOnly\); leave keys out"
        ):
            started(path, keys="word")
        started(path).write(accepted(files))
        assert len(rows(path)) == 4
    else:
        started(path, keys="word").write(accepted(files))
        assert len(rows(path)) == 3


def test_rows_whose_columns_are_all_keys_are_added_to_an_append_only_table(path, files):
    logged(path, ["appendOnly"], **{"delta.appendOnly": "true"})
    for number in range(2):
        started(path, keys=WORDS.names).write(accepted(files, number))
    assert len(rows(path)) == len(set(rows(path))) == 4


@pytest.mark.parametrize("keys", [None, "word"])
@pytest.mark.parametrize("append_only", [False, True])
@pytest.mark.parametrize(
    "features",
    [
        ["identityColumns"],
        ["typeWidening-preview"],
        ["ofTheFuture", "rowTracking"],
        ["clustering", "domainMetadata"],
    ],
)
def test_a_table_that_deltalake_cannot_write_is_refused_at_the_start(
    path, keys, features, append_only
):
    """Features have the names that DROP FEATURE accepts."""
    logged(path, features, **({"delta.appendOnly": "true"} if append_only else {}))
    keys = None if append_only else keys
    said = rf"the table features {', '.join(features)}; write the table with Spark"
    with pytest.raises(ValueError, match=said):
        started(path, keys=keys)
    assert deltalake.DeltaTable(path).version() == 0


@pytest.mark.parametrize("features", [["changeDataFeed"], ["checkConstraints"]])
def test_a_table_with_features_that_deltalake_has_is_only_read_at_the_start(path, features):
    logged(path, features, **{"delta.enableChangeDataFeed": "true"})
    started(path, keys="word")
    assert deltalake.DeltaTable(path).version() == 0


@pytest.mark.parametrize(
    ("columns", "formula", "first", "second"),
    [
        ("word n", "n * 10", 10, 50),
        ("word n", "`n` + length(word) + length('it''s n')", 8, 12),
        ("word n", "length(word)", 1, 1),
        ("word n other", "n + other", 8, 12),
        ("word n rest", "n + coalesce(rest, 0)", 1, 5),  # the stream has no column rest
        ("word abs", "abs(abs) + 1", 2, 6),
        ("word my`n my", "`my``n` * 10 + my", 17, 57),
        ("word n bigint", "CAST(n AS bigint)", 1, 5),
    ],
)
def test_a_computed_column_is_computed_again_by_an_update(
    path, tmp_path, columns, formula, first, second
):
    """deltalake itself computes it for new rows only, and then refuses the updated row."""
    logged(path, ["generatedColumns"], formula, columns.split())
    names = [name for name in columns.split() if name != "rest"]
    schema = pa.schema([(name, pa.string() if name == "word" else pa.int64()) for name in names])
    for number, (value, expected) in enumerate([(1, first), (5, second)]):
        some = [("a", value, *[7] * len(names[2:]), None)]
        sink = started(path, schema, keys="word")
        sink.write(accepted([row_file(tmp_path, some, schema=schema)], number))
        assert [row[-1] for row in rows(path)] == [expected]


@pytest.mark.parametrize(
    "use", ["column", "column, keys", "constraint", "constraint of an append-only table"]
)
@pytest.mark.parametrize(
    ("formula", "said"),
    [
        ("YEAR(to_timestamp(n))", "deltalake has no function year; write the table with Spark"),
        ("DATE_FORMAT(to_timestamp(n), 'yyyy')", "other patterns in deltalake than in Spark; "),
        ("date_format(to_timestamp(n), '%Y')", None),
        ("date_part('year', to_timestamp(n))", None),
        ("trunc(to_timestamp(n), 'MM')", None),  # deltalake has it for numbers only
        ("length('date_format')", None),
    ],
)
def test_functions_that_deltalake_does_not_have_as_spark_are_refused_at_the_start(
    path, use, formula, said
):
    if "column" in use:
        logged(path, ["generatedColumns"], formula)
        named = r"computes column 'm' by .* have the bolt emit the column"
        keys = "word" if "keys" in use else None
    else:
        properties = {"delta.constraints.late": f"{formula} IS NOT NULL"}
        properties["delta.appendOnly"] = str("append-only" in use).lower()
        logged(path, ["appendOnly", "checkConstraints"], **properties)
        named, keys = r"checks constraint 'late' by .* DROP CONSTRAINT late", None
    if said is None:
        started(path, keys=keys)
    else:
        with pytest.raises(ValueError, match=f"(?=.*{named}).*{said}"):
            started(path, keys=keys)
    assert deltalake.DeltaTable(path).version() == 0


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, "word"])
def test_columns_that_the_stream_does_not_have_stay_or_are_null(path, files, keys):
    """So does one that the table gained while the query ran."""
    sink = started(path, keys=keys)
    table = deltalake.DeltaTable(path)
    table.alter.add_columns(deltalake.Schema.from_arrow(pa.schema([("note", pa.string())])).fields)
    old = pa.table({"word": ["a"], "n": [0], "note": ["old"]})
    deltalake.write_deltalake(path, old, mode="append")
    sink.write(accepted(files))
    new = [("c", 3, None), ("d", 4, None)]
    if keys:
        assert rows(path) == [("a", 5, "old"), *new]
    else:
        found = {word: (n, note) for word, n, note in rows(path)[-2:]}
        assert (len(rows(path)), found) == (5, {word: (n, None) for word, n, _ in new})


def test_a_key_that_is_null_equals_none(path, tmp_path):
    """Rows without a key are never taken for later versions of another."""
    sink = started(path, keys="word")
    some = [(None, 1, None), ("a", 3, None), (None, 2, None), ("a", 4, None)]
    for _ in range(2):
        sink.write(accepted([row_file(tmp_path, some)]))
    found = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    assert sorted((row["word"] or "", row["n"]) for row in found) == [("", 1), ("", 2), ("a", 4)]


def test_floats_that_a_database_takes_for_equal_are_one_key(path, tmp_path):
    schema = pa.schema([("f", pa.float32()), ("n", pa.int64())])
    sink = started(path, schema, keys="f")
    for number in range(2):
        floats = [0.0, math.nan, -0.0, math.nan]
        some = [(f, 10 * number + at, None) for at, f in enumerate(floats)]
        sink.write(accepted([row_file(tmp_path, some, schema=schema)], number))
    found = deltalake.DeltaTable(path).to_pyarrow_table()["n"].to_pylist()
    assert sorted(found) == [12, 13]


VALUES = {
    "utc": (
        pa.timestamp("us", "Europe/Berlin"),
        datetime.datetime(2024, 5, 1, tzinfo=datetime.UTC),
    ),
    "plain": (pa.timestamp("ms"), datetime.datetime(2024, 5, 1, 12)),
    "day": (pa.date32(), datetime.date(2024, 5, 1)),
    "money": (pa.decimal128(10, 2), decimal.Decimal("1.50")),
    "bytes": (pa.binary(), b"\x00\xff"),
    "large": (pa.large_string(), "x"),
    "list": (pa.list_(pa.int32()), [1, None]),
    "struct": (pa.struct([("x", pa.int8()), ("y", pa.string())]), {"x": 1, "y": None}),
    "map": (pa.map_(pa.string(), pa.int64()), [("k", 1)]),
    "null": (pa.float64(), None),
}


@pytest.mark.parametrize("keys", [None, "day"])
def test_values_of_every_type_come_through(path, tmp_path, keys):
    schema = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])
    values = [value for _, value in VALUES.values()]
    sink = started(path, schema, keys=keys)
    sink.write(accepted([row_file(tmp_path, [(*values, None)], schema=schema)]))
    (file,) = deltalake.DeltaTable(path).file_uris()
    (found,) = pq.read_table(file).to_pylist()  # pyarrow 19 loses [1, None] in tables of deltalake
    assert list(found.values()) == values


rows_of_words = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 99), st.sampled_from([None, 10, 11])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(rows_of_words, min_size=1, max_size=3))
def test_merges_are_those_of_a_dict(path, tmp_path, batches):
    shutil.rmtree(path, ignore_errors=True)
    sink = started(path, keys="word")
    expected = {}
    for number, some in enumerate(batches):
        sink.write(accepted([row_file(tmp_path, some, batch=5)], number))
        expected |= {word: n for word, n, root in some if root != 11}
        assert rows(path) == sorted(expected.items())


# -- what goes wrong -------------------------------------------------------------------------------


def test_many_rows_of_one_file_are_updated(path, tmp_path):
    """deltalake 1.6.0 took a row for two behind the 8,192 rows of a batch (delta-rs 4475)."""
    sink = started(path, keys="n")
    for number, word in enumerate("ab"):
        some = [(word, n, None) for n in range(8_193)]
        sink.write(accepted([row_file(tmp_path, some, batch=len(some))], number))
    assert rows(path) == [("b", n) for n in range(8_193)]


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_that_the_columns_do_not_take_are_refused(path, tmp_path, keys):
    """And the others written: once, though the micro-batch is repeated."""
    narrow = pa.schema([pa.field("word", pa.string(), nullable=False), ("n", pa.int32())])
    deltalake.DeltaTable.create(str(path), schema=narrow)
    sink = started(path, keys=keys)
    some = [("a", 1, None), (None, 2, None), ("b", 1 << 40, None), ("c", None, None)]
    more = [("d", -(1 << 40), 11), ("e", 1 << 33, 10), (None, 1 << 33, 10)]
    files = [row_file(tmp_path, some), row_file(tmp_path, more, 1)]
    assert written_without_refused(sink, accepted(files)) == {
        (0, 1): "column 'word' must not be null",
        (0, 2): "the value of column 'n' does not fit into int32",
        (1, 1): "the value of column 'n' does not fit into int32",
        (1, 2): "column 'word' must not be null",
    }
    assert rows(path) == [("a", 1), ("c", None)]


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_with_nulls_in_lists_and_maps_that_take_none_are_refused(path, tmp_path, keys):
    required = pa.field("element", pa.int64(), nullable=False)
    listed, mapped = pa.list_(pa.int64()), pa.map_(pa.string(), pa.int64())
    inner = pa.struct([("y", listed)])
    schema = pa.schema([WORDS.field("word"), ("l", listed), ("m", mapped), ("s", pa.list_(inner))])
    of_table = [
        pa.list_(required),
        pa.map_(pa.string(), required.with_name("value")),
        pa.list_(pa.struct([("y", pa.list_(required))])),
    ]
    columns = [(name, kind) for name, kind in zip("lms", of_table, strict=True)]
    deltalake.DeltaTable.create(str(path), schema=pa.schema([schema.field("word"), *columns]))
    sink = started(path, schema, keys=keys)
    some = [
        ("a", [1], [("k", 1)], [{"y": [1]}, None], None),
        ("b", [1, None], [("k", 1)], None, None),
        ("c", None, [("k", 1), ("n", None)], None, None),
        ("d", [], [], [], None),
        ("e", [2], None, [{"y": [1]}, {"y": [2, None]}], 10),
        ("f", [None], None, None, 11),
        ("g", [3], None, [{"y": None}], None),
    ]
    file = row_file(tmp_path, some, schema=schema, batch=4)
    found = written_without_refused(sink, accepted([file]))
    said = "the value of column {!r} has a null where {} takes none"
    assert found == {
        (0, at): said.format(name, str(deltalake_type(path, name)))
        for at, name in ((1, "l"), (2, "m"), (4, "s"))
    }
    assert rows(path) == [tuple(row[:4]) for row in some if row[0] in "adg"]


def deltalake_type(path, name):
    return pa.schema(deltalake.DeltaTable(path).schema().to_arrow()).field(name).type


@pytest.mark.parametrize("keys", [None, "word"])
def test_rows_that_deltalake_refuses_are_no_outage_and_their_values_not_shown(path, files, keys):
    """There is no finding which they are: a constraint is Spark's SQL."""
    sink = started(path, keys=keys)
    deltalake.DeltaTable(path).alter.add_constraint({"small": "n < 5"})
    says = r"sink 'count': Delta table .* 1 rows failed validation check\. .* DROP CONSTRAINT"
    with pytest.raises(ValueError, match=says) as told:
        sink.write(accepted(files[1:]))
    shown = "".join(traceback.format_exception(told.value))
    assert "Preview" not in shown
    assert "| d" not in shown
    assert rows(path) == []
    deltalake.DeltaTable(path).alter.drop_constraint("small")
    sink.write(accepted(files[1:]))
    assert rows(path) == [("a", 5), ("d", 4)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Exception("Cast error: Cannot cast string 'abc' to value of Int64 type"), "Cast error"),
        (ValueError('Non-nullable field of ListArray "abc"'), "Non-nullable field"),
        (SchemaMismatchError("Cannot cast field n from List to Int64"), "Cannot cast field n from"),
    ],
)
def test_whatever_deltalake_says_of_rows_is_said_without_values(
    path, files, monkeypatch, error, said
):
    """Errors that `refuse_misfits` leaves to a table which is altered meanwhile."""
    sink = started(path)
    monkeypatch.setattr(deltalake, "write_deltalake", lambda *_, **__: raise_(error))
    with pytest.raises(ValueError, match=f"none of its rows are written: {said}") as told:
        sink.write(accepted(files))
    assert "abc" not in "".join(traceback.format_exception(told.value))


def raise_(error):
    raise error


def test_rows_are_read_once_where_none_can_be_refused(path, tmp_path, monkeypatch):
    """Text can be: it need not be UTF-8."""
    schema = pa.schema([("n", pa.int64())])
    sink = started(path, schema)
    monkeypatch.setattr(SinkBatch, "numbered", None)
    sink.write(accepted([row_file(tmp_path, [(1, 10), (2, None)], schema=schema)]))
    assert rows(path) == [(1,), (2,)]


def without_rows(path, *transactions):
    """Commit numbers and no rows."""
    table = deltalake.DeltaTable(path)
    properties = deltalake.CommitProperties(
        app_transactions=[deltalake.Transaction(*one) for one in transactions]
    )
    deltalake.write_deltalake(
        table, table.to_pyarrow_table().slice(0, 0), mode="append", commit_properties=properties
    )


def test_a_number_by_who_kept_no_fingerprint_is_refused(path, files):
    sink = started(path)
    without_rows(path, ("ackcore-abc-count", 0))
    with pytest.raises(CheckpointForeign, match=r"has micro-batch 0 .* with other rows"):
        sink.write(accepted(files))


def test_a_number_by_somebody_else_is_refused_though_the_rows_are_those_of_the_one_before(
    path, files
):
    """Delta's own writers set a number under any name, and leave the fingerprint as it was."""
    sink = started(path)
    sink.write(accepted(files))
    without_rows(path, ("ackcore-abc-count", 1))
    with pytest.raises(CheckpointForeign, match=r"has micro-batch 1 .* with other rows"):
        sink.write(accepted(files, 1))
    assert len(rows(path)) == 4


def test_what_is_in_the_table_is_known_when_its_log_was_cleaned_up(path, files):
    sink = started(path)
    sink.write(accepted(files))
    (last,) = deltalake.DeltaTable(path).history(1)
    content = accepted(files).content()
    assert last["userMetadata"] == f"ackcore ackcore-abc-count/0 {content}"
    without_rows(path)
    deltalake.DeltaTable(path).create_checkpoint()
    for number in (0, 1):
        (path / "_delta_log" / f"{number:020}.json").unlink()
    sink.write(accepted(files))
    assert len(rows(path)) == 4
    with pytest.raises(CheckpointForeign, match=r"has micro-batch 0 .* with other rows"):
        sink.write(accepted(files[1:]))


def test_a_number_has_a_time_by_which_it_is_kept(path, files, monkeypatch):
    """With delta.setTransactionRetentionDuration, Spark drops numbers without a time."""
    monkeypatch.setattr(delta, "wall_clock_ms", lambda: 1234)
    started(path).write(accepted(files))
    log = (path / "_delta_log" / f"{1:020}.json").read_text().splitlines()
    numbers = [action["txn"] for action in map(json.loads, log) if "txn" in action]
    assert [one["lastUpdated"] for one in numbers] == [1234, 1234]


def test_a_disk_that_is_full_leaves_the_table_as_it_was(tmp_path):
    def on_disk(directory):
        path = directory / "table"
        return started(path), lambda: rows(path)

    check_full_disk(tmp_path, on_disk)


# -- in a topology ---------------------------------------------------------------------------------


def test_a_query_whose_rows_deltalake_refuses_ends_in_a_sink_error_without_them(
    spark, path, checkpoint
):
    """At the next start again, and goes on once the table takes them."""
    started(path, Split.outputs)
    deltalake.DeltaTable(path).alter.add_constraint({"short": "word <> 'b'"})
    for _ in range(2):
        says = r"failed 2 times .* with ValueError: .* failed validation check\. .*DROP CONSTRAINT"
        with pytest.raises(SinkError, match=says) as told:
            run_batch(word_count(spark, to_delta(path)), spark, checkpoint, max_dead_ratio=None)
        assert "Preview" not in "".join(traceback.format_exception(told.value))
    deltalake.DeltaTable(path).alter.drop_constraint("short")
    run_batch(word_count(spark, to_delta(path)), spark, checkpoint, max_dead_ratio=None)
    assert rows(path) == [("a",), ("a",), ("b",)]


@pytest.mark.parametrize("keys", [None, "n"])
def test_dates_that_deltalake_could_not_read_again_are_refused(path, tmp_path, keys):
    """Times of such years it reads, and dates only if they have four digits."""
    schema = pa.schema([("n", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us"))])
    sink = started(path, schema, keys=keys)
    some = [(1, 0, 0, 10), (2, 4 * 10**6, 0, 10), (3, -(10**6), 0, 10), (4, None, 10**18, 10)]
    file = row_file(tmp_path, some, schema=schema, batch=4)
    said = "column 'day' cannot store a date or time outside of years 1 to 9999"
    assert written_without_refused(sink, accepted([file])) == dict.fromkeys([(0, 1), (0, 2)], said)
    table = deltalake.DeltaTable(path).to_pyarrow_table()
    assert sorted(table["n"].to_pylist()) == [1, 4]
    assert sorted(table["at"].cast(pa.int64()).to_pylist()) == [0, 10**18]
