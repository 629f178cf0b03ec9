"""An Iceberg table as a sink, by pyiceberg: rows of ACKED records, each micro-batch once."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import random
import sys
import traceback
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle

pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")  # of the catalog

from accepted_rows import WORDS, accepted, check_full_disk, row_file, written_without_refused
from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import ArrowScan
from pyiceberg.table import Table
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.types import IntegerType, StringType, TimestampType, TimestamptzType

from ackcore.spark import SinkUnavailable, to_iceberg
from ackcore.spark.base.versions import SPARK
from ackcore.spark.sinks import iceberg
from ackcore.spark.sinks.iceberg import _CODECS
from ackcore.spark.sinks.sink import check_sink

cloudpickle.register_pickle_by_value(sys.modules[__name__])


#: The first and the last time that Python has.
ENDS = [datetime.datetime.min, datetime.datetime.max]


def lake_in(directory, warehouse):
    """Make a catalog with a table ``shop.words``, and return its properties."""
    lake = {"name": "test", "type": "sql", "uri": f"sqlite:///{directory}/catalog.db"}
    lake["warehouse"] = f"file://{warehouse}"
    with contextlib.closing(load_catalog(**lake)) as catalog:
        catalog.create_namespace("shop")
    create(lake, "shop.words", WORDS)
    return lake


@pytest.fixture
def lake(tmp_path):
    return lake_in(tmp_path, tmp_path)


def create(lake, name, schema):
    with contextlib.closing(load_catalog(**lake)) as catalog:
        catalog.create_table(name, schema)


def table(lake, name="shop.words"):
    with contextlib.closing(load_catalog(**lake)) as catalog:
        return catalog.load_table(name)


def rows(lake):
    return sorted(tuple(row.values()) for row in table(lake).scan().to_arrow().to_pylist())


def numbers(lake, name):
    """The values of the column ``n``."""
    return sorted(table(lake, name).scan().to_arrow()["n"].to_pylist())


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"table": 3}, TypeError, "table must be a str, got int"),
        ({"table": "words"}, ValueError, "table must be a name with its namespace, such"),
        ({"table": "shop..t"}, ValueError, r"table must be a name .*, got 'shop\.\.t'"),
        ({"table": "shop.t."}, ValueError, r"table must be a name .*, got 'shop\.t\.'"),
        ({"catalog": 3}, TypeError, "catalog must be the name of a catalog, or a mapping of"),
        ({"keys": []}, ValueError, "keys must name at least one column; omit it"),
    ],
)
def test_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        to_iceberg(**{"table": "shop.words", "catalog": {}, **arguments})


def test_tables_are_refused_before_anything_runs(lake):
    more = pa.schema([*WORDS, ("at", pa.date32())])
    with pytest.raises(ValueError, match=r"table shop\.words has no column 'at', it has word, n"):
        check_sink("count", to_iceberg("shop.words", lake), more)
    less = pa.schema([("word", pa.string())])
    check_sink("count", to_iceberg("shop.words", lake), less)
    with pytest.raises(ValueError, match="the stream lacks its column 'n'"):
        check_sink("count", to_iceberg("shop.words", lake, keys="word"), less)
    with pytest.raises(SinkUnavailable, match=r"sink 'count', Iceberg table shop.none of catalog"):
        check_sink("count", to_iceberg("shop.none", lake), WORDS)
    unfit = "Column 'n' has an unsupported type:"
    for kind, says in (
        (pa.time64("ns"), rf"{unfit} time64|no type for time64\[ns\] of column 'n'"),
        (pa.list_(pa.time64("ns")), f"{unfit} list|no type for list<.* of column 'n'"),
        (pa.duration("us"), f"{unfit} duration"),
        (pa.struct([("y", pa.int64())]), r"words cannot store the .*: Could not find .*: n\.y"),
    ):
        with pytest.raises(TypeError, match=says):
            check_sink("count", to_iceberg("shop.words", lake), pa.schema([("n", kind)]))
    twins = pa.schema([("s", pa.struct([("a", pa.int64()), ("A", pa.int64())]))])
    with pytest.raises(
        TypeError, match=r"does not distinguish the fields 's\.a' and 's\.A'; rename"
    ):
        check_sink("count", to_iceberg("shop.words", lake), twins)


@pytest.mark.parametrize(
    "transform",
    [
        BucketTransform(4),
        TruncateTransform(2),
        YearTransform(),
        MonthTransform(),
        DayTransform(),
        HourTransform(),
        IdentityTransform(),
    ],
    ids=str,
)
def test_partitions_for_which_a_package_is_missing_are_refused(lake, monkeypatch, transform):
    """pyiceberg would not write any micro-batch."""
    monkeypatch.setitem(sys.modules, "pyiceberg_core", None)
    schema = pa.schema([("at", pa.timestamp("us"))])
    if not transform.can_transform(TimestampType()):  # truncate
        schema = pa.schema([("at", pa.string())])
    create(lake, "shop.parts", schema)
    table(lake, "shop.parts").update_spec().add_field("at", transform, "part").commit()
    sink = to_iceberg("shop.parts", lake)
    if isinstance(transform, IdentityTransform):
        check_sink("count", sink, schema)
        return
    with pytest.raises(ImportError, match=r"partition part = .* pip install 'pyiceberg\[pyiceb"):
        check_sink("count", sink, schema)


def test_a_format_that_pyiceberg_cannot_write_is_refused(lake):
    with table(lake).transaction() as change:
        change.set_properties({"write.format.default": "orc"})
    with pytest.raises(ValueError, match=r"words has orc files \(write\.format\.default\), and"):
        check_sink("count", to_iceberg("shop.words", lake), WORDS)
    with table(lake).transaction() as change:
        change.set_properties({"write.format.default": "PARQUET"})
    check_sink("count", to_iceberg("shop.words", lake), WORDS)
    location = Path(table(lake).metadata_location.removeprefix("file://"))
    metadata = {**json.loads(location.read_text()), "format-version": 3, "next-row-id": 0}
    location.write_text(json.dumps(metadata))
    with pytest.raises(
        ValueError, match="words has format version 3, and pyiceberg writes at most"
    ):
        check_sink("count", to_iceberg("shop.words", lake), WORDS)


@pytest.mark.parametrize(
    "codec", [*_CODECS, "GZIP", "none", "uncompressed", "UNCOMPRESSED", "lzo", "bz2"]
)
def test_a_codec_that_pyiceberg_cannot_write_is_refused(lake, files, codec):
    with table(lake).transaction() as change:
        change.set_properties({"write.parquet.compression-codec": codec})
    sink = to_iceberg("shop.words", lake)
    if codec in ("UNCOMPRESSED", "lzo", "bz2"):
        with pytest.raises(ValueError, match=f"the codec {codec} .* zstd, gzip, snappy, lz4, brot"):
            check_sink("count", sink, WORDS)
    else:
        check_sink("count", sink, WORDS)
        sink.write(accepted(files))
        assert len(rows(lake)) == 4


def test_a_codec_of_newer_versions_of_pyarrow_is_refused_or_written(lake, files):
    """pyarrow 19 does not have lz4_raw."""
    with table(lake).transaction() as change:
        change.set_properties({"write.parquet.compression-codec": "lz4_raw"})
    sink = to_iceberg("shop.words", lake)
    try:
        check_sink("count", sink, WORDS)
    except ValueError:
        return
    sink.write(accepted(files))
    assert len(rows(lake)) == 4


def test_a_partition_that_pyiceberg_cannot_write_is_refused(lake, monkeypatch):
    def unknown(self, source):
        raise NotImplementedError  # as UnknownTransform does

    monkeypatch.setattr(IdentityTransform, "pyarrow_transform", unknown)
    with table(lake).update_spec() as update:
        update.add_identity("word")
    with pytest.raises(ValueError, match=r"partition word = identity, which pyiceberg cannot wr"):
        check_sink("count", to_iceberg("shop.words", lake), WORDS)


@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ([("n", pa.int64())], "word"),
        ([("word", pa.string()), ("s", pa.struct([("a", pa.int64())]))], r"s\.b"),
    ],
)
def test_a_stream_without_a_required_field_is_refused(lake, columns, name):
    """pyiceberg would refuse each of its micro-batches."""
    inner = pa.struct([("a", pa.int64()), pa.field("b", pa.int64(), nullable=False)])
    word = pa.field("word", pa.string(), nullable=False)
    create(lake, "shop.required", pa.schema([word, ("n", pa.int64()), ("s", inner)]))
    with pytest.raises(ValueError, match=rf"column '{name}' of table shop\.required is required"):
        check_sink("count", to_iceberg("shop.required", lake), pa.schema(columns))
    whole = pa.schema([("word", pa.string())])
    check_sink("count", to_iceberg("shop.required", lake), whole)


@pytest.mark.parametrize("keys", [None, "word"])
def test_nulls_in_a_required_column_are_refused(lake, tmp_path, keys):
    """And the others written: once, though the micro-batch is repeated."""
    word = pa.field("word", pa.string(), nullable=False)
    create(lake, "shop.required", pa.schema([word, WORDS.field("n")]))
    sink = to_iceberg("shop.required", lake, keys=keys)
    some = [("a", 1, None), (None, 2, None), (None, 2, 11), ("c", None, None)]
    files = [row_file(tmp_path, some)]
    assert written_without_refused(sink, accepted(files)) == {
        (0, 1): "column 'word' must not be null"
    }
    found = table(lake, "shop.required").scan().to_arrow().to_pylist()
    assert sorted(tuple(row.values()) for row in found) == [("a", 1), ("c", None)]


def test_later_rows_replace_earlier_ones(lake, tmp_path):
    sink = to_iceberg("shop.words", lake, keys="word")
    for number in range(3):
        some = [(word, 10 * number + at, None) for at, word in enumerate("abca"[: 2 + number])]
        sink.write(accepted([row_file(tmp_path, some)], number))
    assert rows(lake) == [("a", 23), ("b", 21), ("c", 22)]
    # The sink switches off repeated commits in memory alone.
    ((mark, said),) = table(lake).properties.items()
    assert (mark, said.partition(" ")[0]) == ("ackcore.abc.count", "2")


def test_a_key_that_is_null_equals_none(lake, tmp_path):
    """Rows without a key are never taken for later versions of another."""
    sink = to_iceberg("shop.words", lake, keys="word")
    some = [(None, 1, None), ("a", 3, None), (None, 2, None), ("a", 4, None)]
    for number in (0, 0, 1):
        sink.write(accepted([row_file(tmp_path, some)], number))
    found = table(lake).scan().to_arrow().to_pylist()
    rows = sorted((row["word"] or "", row["n"]) for row in found)
    assert rows == [("", 1), ("", 1), ("", 2), ("", 2), ("a", 4)]


@pytest.mark.parametrize("is_partitioned", [False, True])
@pytest.mark.parametrize("keys", [["word"], ["f"], ["word", "f"]])
def test_merges_are_those_of_a_dict(lake, tmp_path, keys, is_partitioned):
    """Also by floats: as in a database, -0.0 is 0.0, and NaN is NaN."""
    schema = pa.schema([*WORDS, ("f", pa.float64())])
    create(lake, "shop.floats", schema)
    if is_partitioned:
        with table(lake, "shop.floats").update_spec() as update:
            update.add_identity("word")
    sink, draws = to_iceberg("shop.floats", lake, keys=keys), random.Random(7)
    expected, loose, floats = {}, [], [0.0, -0.0, math.nan, 1.5, None]
    for number in range(5):
        some = [
            (draws.choice(["a", "b", None]), 100 * number + at, draws.choice(floats), None)
            for at in range(draws.randrange(1, 8))
        ]
        sink.write(accepted([row_file(tmp_path, some, schema=schema)], number))
        for word, n, f, _ in some:
            of = {"word": word, "f": "NaN" if f is not None and math.isnan(f) else f}
            key = tuple(of[name] for name in keys)
            if None in key:
                loose.append(n)
            else:
                expected[key] = n
        assert numbers(lake, "shop.floats") == sorted([*expected.values(), *loose])


@pytest.mark.parametrize(
    ("transform", "keys"),
    [
        (YearTransform(), [datetime.date.min, datetime.date.max, datetime.date(2026, 1, 2)]),
        (MonthTransform(), ENDS),
        (DayTransform(), [end.replace(tzinfo=datetime.UTC) for end in ENDS]),
        (TruncateTransform(10), [-(2**31), -1, 5, 2**31 - 1]),
        (TruncateTransform(2**31 - 1), [-(2**31), -1, 5, 2**31 - 2]),
    ],
    ids=str,
)
def test_keys_at_the_ends_of_their_type_are_merged_in_partitions(
    lake, tmp_path, monkeypatch, transform, keys
):
    """A truncated number may leave its type, and then is one of the other end."""

    def transformed(self, source):  # without pyiceberg-core
        one = self.transform(source)
        kind = pa.int64() if isinstance(source, TimestampType | TimestamptzType) else pa.int32()

        def all_of(column):
            column = pa.chunked_array([column]) if isinstance(column, pa.Array) else column
            found = np.array([one(value) for value in column.cast(kind).to_pylist()], np.int64)
            return pa.array(found.astype(np.int32))

        return all_of

    monkeypatch.setattr(type(transform), "pyarrow_transform", transformed)
    kind = pa.int32() if isinstance(keys[0], int) else pa.array(keys).type
    schema = pa.schema([("k", kind), ("n", pa.int64())])
    create(lake, "shop.ends", schema)
    with table(lake, "shop.ends").update_spec() as update:
        update.add_field("k", transform, "part")
    sink = to_iceberg("shop.ends", lake, keys="k")
    for number in range(3):
        some = [(key, 10 * number + at, None) for at, key in enumerate(keys)]
        sink.write(accepted([row_file(tmp_path, some, schema=schema)], number))
        assert numbers(lake, "shop.ends") == [n for _, n, _ in some]


DECIMAL = pa.decimal128(38, 2)


@pytest.mark.parametrize("keys", [None, "k"])
@pytest.mark.parametrize(
    ("transform", "kind", "good", "bad"),
    [
        (TruncateTransform(10), DECIMAL, [-(10**38) + 10, 10**38 - 1], [-(10**38) + 1]),
        (TruncateTransform(2000), pa.decimal128(3, 2), [0, 999], [-1, -999]),
        (TruncateTransform(1), DECIMAL, [-(10**38) + 1], []),
        (IdentityTransform(), pa.string(), ["a" * 250, "/" * 83], ["a" * 251, "/" * 84]),
        (TruncateTransform(85), pa.string(), ["a" * 900], ["é" * 900]),
        (IdentityTransform(), pa.binary(), [b"\xff" * 9], [b"\xff" * 80, b"\xff" * 99]),
        (BucketTransform(4), pa.string(), ["a" * 900], []),
    ],
    ids=str,
)
def test_rows_that_a_partition_cannot_store_are_refused(
    lake, tmp_path, monkeypatch, keys, transform, kind, good, bad
):
    """A truncated number may have too many digits, and a text may be too long for a directory."""
    values = [*good, *bad]
    if pa.types.is_decimal(kind):
        values = [decimal.Decimal(one).scaleb(-2, decimal.Context(prec=99)) for one in values]

    def transformed(self, source):  # without pyiceberg-core
        def all_of(column):
            found = [self.transform(source)(one) for one in column.to_pylist()]
            return pa.array(found, pa.int32() if isinstance(self, BucketTransform) else kind)

        return all_of

    if not isinstance(transform, IdentityTransform):
        monkeypatch.setattr(type(transform), "pyarrow_transform", transformed)
    schema = pa.schema([("k", kind), ("n", pa.int64())])
    create(lake, "shop.parts", schema)
    with table(lake, "shop.parts").update_spec() as update:
        update.add_field("k", transform, "part")
    sink = to_iceberg("shop.parts", lake, keys=keys)
    some = [(value, n, None) for n, value in enumerate([*values, None])]
    batch = accepted([row_file(tmp_path, some, schema=schema, batch=9)])
    if bad:
        why = written_without_refused(sink, batch)
        assert set(why) == {(0, n) for n in range(len(good), len(values))}
        reason = "a directory's name would have more than 250 bytes"
        if pa.types.is_decimal(kind):
            reason = f"truncated, it does not fit into decimal({kind.precision}, 2)"
        said = f"partition 'part' cannot store the value of column 'k': {reason}"
        assert set(why.values()) == {said}
    else:
        sink.write(batch)
    assert numbers(lake, "shop.parts") == [*range(len(good)), len(values)]


@pytest.mark.parametrize("keys", [None, ["k"], ["n"]])
@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_floats_that_a_partition_does_not_tell_apart_are_refused(lake, tmp_path, keys, kind):
    """pyiceberg would write 0.0 and -0.0 twice each, and no file for NaN."""
    schema = pa.schema([("k", kind), ("n", pa.int64())])
    create(lake, "shop.parts", schema)
    with table(lake, "shop.parts").update_spec() as update:
        update.add_identity("k")
    sink = to_iceberg("shop.parts", lake, keys=keys)
    floats = [0.0, -0.0, math.nan, math.inf, -math.inf, None, -1.5]
    some = [(value, n, None) for n, value in enumerate(floats)]
    file = row_file(tmp_path, some, schema=schema, batch=9)
    said = "partition 'k' cannot store the value of column 'k': NaN or -0.0"
    why = written_without_refused(sink, accepted([file]))
    assert why == dict.fromkeys([(0, 1), (0, 2)], said)
    assert numbers(lake, "shop.parts") == [0, 3, 4, 5, 6]


@pytest.mark.parametrize("keys", [None, "n"])
def test_values_in_structs_that_a_partition_cannot_store_are_refused(lake, tmp_path, keys):
    inner = pa.struct([("t", pa.string()), ("x", pa.float64())])
    schema = pa.schema([("s", pa.struct([("in", inner)])), ("n", pa.int64())])
    create(lake, "shop.parts", schema)
    with table(lake, "shop.parts").update_spec() as update:
        update.add_field("s.in.t", IdentityTransform(), "t")
        update.add_field("s.in.x", IdentityTransform(), "x")
    sink = to_iceberg("shop.parts", lake, keys=keys)
    check_sink("count", sink, schema)
    values = [("a", 1.0), ("a" * 300, None), ("b", -0.0), (None, math.nan)]
    some = [({"in": dict(zip("tx", of, strict=True))}, n, None) for n, of in enumerate(values)]
    some += [({"in": None}, 4, None), (None, 5, None)]
    why = written_without_refused(sink, accepted([row_file(tmp_path, some, schema=schema)]))
    unfit = "partition 'x' cannot store the value of column 's.in.x': NaN or -0.0"
    assert why.pop((0, 1)).startswith("partition 't' cannot store the value of column 's.in.t': a")
    assert why == dict.fromkeys([(0, 2), (0, 3)], unfit)
    assert numbers(lake, "shop.parts") == [0, 4, 5]


@pytest.mark.parametrize("source", ["s.x", "k"])
def test_a_table_partitioned_by_a_column_that_the_stream_lacks_is_refused(lake, source):
    """pyiceberg would not write any micro-batch."""
    struct = pa.struct([("x", pa.string()), ("y", pa.string())])
    create(lake, "shop.parts", pa.schema([("k", pa.string()), ("s", struct), ("n", pa.int64())]))
    with table(lake, "shop.parts").update_spec() as update:
        update.add_field(source, IdentityTransform(), "part")
    less = pa.schema([("s", pa.struct([("y", pa.string())])), ("n", pa.int64())])
    with pytest.raises(ValueError, match=f"parts is partitioned by '{source}', which the stream"):
        check_sink("count", to_iceberg("shop.parts", lake), less)


def test_a_table_that_was_partitioned_by_a_dropped_column_is_refused(lake):
    """Format version 1 keeps the partition, and pyiceberg does not find its column."""
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    with contextlib.closing(load_catalog(**lake)) as catalog:
        catalog.create_table("shop.parts", schema, properties={"format-version": "1"})
    with table(lake, "shop.parts").update_spec() as update:
        update.add_identity("k")
    with table(lake, "shop.parts").update_spec() as update:
        update.remove_field("k")
    with table(lake, "shop.parts").update_schema() as update:
        update.delete_column("k")
    with pytest.raises(ValueError, match="parts has the partition 'k' of a dropped column"):
        check_sink("count", to_iceberg("shop.parts", lake), pa.schema([("n", pa.int64())]))


@pytest.mark.parametrize(
    ("there", "have"),
    [
        (pa.int64(), pa.string()),
        (pa.int32(), pa.int64()),
        (pa.list_(pa.date32()), pa.list_(pa.bool_())),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.string())),
        (pa.struct([("x", pa.int32())]), pa.struct([("x", pa.string())])),
    ],
    ids=str,
)
def test_a_column_of_a_type_that_cannot_be_cast_is_refused_at_the_start(lake, there, have):
    """No row is at fault, so the micro-batch could never be written."""
    create(lake, "shop.types", pa.schema([("v", there)]))
    with pytest.raises(
        ValueError, match=r"column 'v' of table shop\.types is .*, and no .* can be cast to that"
    ):
        check_sink("count", to_iceberg("shop.types", lake), pa.schema([("v", have)]))


@pytest.mark.parametrize("place", ["new rows", "rows of a file that is replaced"])
def test_rows_that_pyiceberg_writes_twice_are_not_committed(lake, tmp_path, monkeypatch, place):
    """The rows are 0.0 and -0.0, which the sink did not refuse."""
    schema = pa.schema([("k", pa.float64()), ("n", pa.int64())])
    create(lake, "shop.parts", schema)
    sink = to_iceberg("shop.parts", lake, keys="n")
    some = [(value, n, None) for n, value in enumerate([0.0, -0.0, 1.0])]
    batch = accepted([row_file(tmp_path, some, schema=schema)])
    if place != "new rows":
        sink.write(batch)
        batch = accepted([row_file(tmp_path, [(2.0, 2, None)], schema=schema)], 1)
    with table(lake, "shop.parts").update_spec() as update:
        update.add_identity("k")
    monkeypatch.setattr(iceberg, "refuse_values", lambda batch, checks: None)
    with pytest.raises(RuntimeError, match=r"has written [45] rows in place of [23], probably"):
        sink.write(batch)
    assert numbers(lake, "shop.parts") == ([] if place == "new rows" else [0, 1, 2])


@pytest.mark.parametrize("keys", [None, "k"])
def test_texts_behind_which_pyiceberg_finds_no_bound_are_refused(lake, tmp_path, keys):
    """pyiceberg adds 1 to the 16th letter of the last text, and computes no bound in a struct."""
    struct = pa.struct([("t", pa.string())])
    schema = pa.schema([("k", pa.string()), ("s", struct), ("n", pa.int64())])
    create(lake, "shop.bounds", schema)
    sink = to_iceberg("shop.bounds", lake, keys=keys)
    long, short = "a" * 15 + "\ud7ffb", "a" * 15 + "\ud7ff"
    filled = "a" * 13 + "\ud7ff\U0010ffff\U0010ffffb"
    some = [(short, {"t": short}, 0, None), (long, None, 1, None), ("c", {"t": long}, 2, None)]
    some += [("\U0010ffff" * 17, None, 3, None), (None, {"t": None}, 4, None)]
    some += [(filled, None, 5, None), ("\ud7ff" + "b" * 40, None, 6, None)]
    file = row_file(tmp_path, some, schema=schema, batch=9)
    said = "pyiceberg has no bound for the text of column 'k', which it would cut behind U+D7FF"
    refused = dict.fromkeys([(0, 1), (0, 5)], said)
    assert written_without_refused(sink, accepted([file])) == refused
    assert numbers(lake, "shop.bounds") == [0, 2, 3, 4, 6]


@pytest.mark.parametrize("modes", [{"default": "full"}, {"column.k": "counts"}], ids=str)
def test_texts_that_pyiceberg_does_not_cut_are_written(lake, tmp_path, modes):
    schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
    create(lake, "shop.bounds", schema)
    with table(lake, "shop.bounds").transaction() as change:
        change.set_properties({f"write.metadata.metrics.{of}": to for of, to in modes.items()})
    file = row_file(tmp_path, [("a" * 15 + "\ud7ffb", 1, None)], schema=schema)
    to_iceberg("shop.bounds", lake).write(accepted([file]))
    assert numbers(lake, "shop.bounds") == [1]


def test_many_rows_are_merged_by_two_columns(lake, tmp_path):
    """An expression with a term for each row would be too deep for the process."""
    sink = to_iceberg("shop.words", lake, keys=["n", "word"])
    sink.write(accepted([row_file(tmp_path, [("7", 7, None)])]))
    many = [(str(n), n, None) for n in range(20_000)]
    sink.write(accepted([row_file(tmp_path, many, batch=len(many))], 1))
    assert [n for _, n in sorted(rows(lake), key=lambda row: row[1])] == list(range(20_000))


def test_a_merge_reads_only_files_that_may_have_its_keys(lake, tmp_path, monkeypatch):
    """Also if it has more keys than pyiceberg compares with the bounds of a file."""
    sink, scan, read = to_iceberg("shop.words", lake, keys="n"), ArrowScan.to_table, []
    for number in range(3):
        some = [("a", 300 * number + n, None) for n in range(300)]
        sink.write(accepted([row_file(tmp_path, some, batch=300)], number))

    def to_table(self, tasks):
        read.extend(task.file.file_path for task in tasks)
        return scan(self, tasks)

    monkeypatch.setattr(ArrowScan, "to_table", to_table)
    sink.write(accepted([row_file(tmp_path, some, batch=300)], 3))
    assert len(set(read)) == 1


def test_a_key_of_another_type_is_an_error_without_its_value(lake, tmp_path):
    schema = pa.schema([("word", pa.string()), ("n", pa.string())])
    sink = to_iceberg("shop.words", lake, keys="n")
    to_iceberg("shop.words", lake).write(accepted([row_file(tmp_path, [("a", 1, None)])]))
    file = row_file(tmp_path, [("a", "hunter2", None)], schema=schema)
    with pytest.raises(ValueError, match="Mismatch in fields") as told:
        sink.write(accepted([file], 1))
    assert "hunter2" not in "".join(traceback.format_exception(told.value))


def test_a_column_that_the_table_gained_is_null(lake, files):
    sink = to_iceberg("shop.words", lake)
    sink.write(accepted(files[1:]))
    with table(lake).update_schema() as change:
        change.add_column("note", StringType())
    sink.write(accepted(files[1:], 1))
    assert rows(lake) == [("a", 5, None), ("a", 5, None), ("d", 4, None), ("d", 4, None)]


def test_a_column_that_the_table_gained_is_not_emptied_by_merges(lake, files):
    """A merge replaces whole rows, and would replace by null what others wrote into it."""
    sink = to_iceberg("shop.words", lake, keys="word")
    sink.write(accepted(files[1:]))
    with table(lake).update_schema() as update:
        update.add_column("at", IntegerType())
    with pytest.raises(ValueError, match=r"'count': keys replace whole .* lacks its column 'at'"):
        sink.write(accepted(files[1:], 1))
    assert table(lake).schema().column_names == ["word", "n", "at"]


def test_a_catalog_that_is_away_is_named_without_secrets(lake, files, tmp_path):
    away = {"type": "rest", "uri": "http://etl:hunter2@localhost:1/x?y=hunter2", "token": "hunter3"}
    for what, catalog in (
        (r"'default' at http://localhost:1/x: .*Connection", away),
        (r"'test' at sqlite:///.*unable to open", {**lake, "uri": f"sqlite:///{tmp_path}/no/c.db"}),
    ):
        sink = to_iceberg("shop.words", catalog)
        for call in (
            lambda sink=sink: check_sink("count", sink, WORDS),
            lambda sink=sink: sink.write(accepted(files)),
        ):
            with pytest.raises(SinkUnavailable, match=what) as told:
                call()
            assert "sink 'count', Iceberg table shop.words of catalog" in str(told.value)
            assert "Check that the catalog and the table's storage can be" in str(told.value)
            assert "hunter" not in "".join(traceback.format_exception(told.value))


@pytest.mark.parametrize("keys", [None, "word"])
def test_a_commit_that_is_there_though_it_was_refused_stays(lake, files, monkeypatch, keys):
    """A proxy may send a commit twice; the second one is refused (409)."""
    commit, lost = Table._do_commit, []

    def twice(table, updates, requirements):
        commit(table, updates, requirements)
        lost.append(updates)
        if len(lost) == 1:
            raise CommitFailedException("409")

    monkeypatch.setattr(Table, "_do_commit", twice)
    sink = to_iceberg("shop.words", lake, keys=keys)
    for _ in range(2):
        sink.write(accepted(files[1:]))
        assert rows(lake) == [("a", 5), ("d", 4)]
    sink.write(accepted(files[1:], 1))
    assert len(lost) == 2
    assert len(rows(lake)) == (2 if keys else 4)


def test_a_disk_that_is_full_leaves_the_table_as_it_was(tmp_path):
    def on_disk(directory):
        lake = lake_in(tmp_path, directory)
        return to_iceberg("shop.words", lake), lambda: rows(lake)

    check_full_disk(tmp_path, on_disk)


@pytest.mark.skipif(SPARK < (4,), reason="Spark 3.5 has no type for a list of a fixed length")
@pytest.mark.parametrize("keys", [None, "n"])
def test_dates_and_times_that_pyiceberg_has_no_values_for_are_refused(lake, tmp_path, keys):
    """Within a struct or a list of a fixed length, too."""
    struct = pa.struct([("at", pa.timestamp("us"))])
    schema = pa.schema([("n", pa.int64()), ("day", pa.date32()), ("s", struct)])
    create(lake, "shop.days", schema.append(pa.field("l", pa.list_(pa.date32()))))
    schema = schema.append(pa.field("l", pa.list_(pa.date32(), 2)))
    sink = to_iceberg("shop.days", lake, keys=keys)
    check_sink("count", sink, schema)
    some = [
        (1, 0, {"at": 0}, [0, None], 10),
        (2, 4 * 10**6, None, None, 10),
        (3, None, {"at": 10**18}, None, 10),
        (4, None, {"at": None}, None, 10),
        (5, None, None, [0, 4 * 10**6], 10),
    ]
    file = row_file(tmp_path, some, schema=schema, batch=4)
    said = "column {!r} cannot store a date or time outside of years 1 to 9999"
    assert written_without_refused(sink, accepted([file])) == {
        (0, 1): said.format("day"),
        (0, 2): said.format("s"),
        (0, 4): said.format("l"),
    }
    assert numbers(lake, "shop.days") == [1, 4]


def test_a_row_whose_time_has_nanoseconds_is_refused_by_itself(lake, tmp_path):
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("ns"))])
    schema = schema.append(pa.field("s", pa.list_(pa.struct([("x", pa.timestamp("ns"))]))))
    inner = pa.list_(pa.struct([("x", pa.timestamp("us"))]))
    columns = [("n", pa.int64()), ("at", pa.timestamp("us")), ("s", inner)]
    create(lake, "shop.times", pa.schema(columns))
    sink = to_iceberg("shop.times", lake)
    check_sink("count", sink, schema)
    some = [(1, 5000, None, 10), (2, 5001, None, 10), (3, None, [None, {"x": 7001}], 10)]
    file = row_file(tmp_path, [*some, (4, None, [{"x": 7000}], 10)], schema=schema)
    assert written_without_refused(sink, accepted([file])) == {
        (0, 1): "the value of column 'at' does not fit into timestamp[us]",
        (0, 2): "the value of column 's' does not fit into list<element: struct<x: timestamp[us]>>",
    }
    assert numbers(lake, "shop.times") == [1, 4]
