"""Sinks: the rows of ACKED roots only, once, however often they are written."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import os
import re
import shutil
import sys

import accepted_rows
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accepted_rows import WORDS, row_file
from pyspark import cloudpickle
from pyspark.errors import PySparkException
from streams import in_line

from ackcore.spark import (
    FileSpout,
    attempt,
    dead_letters,
    guard,
    to_delta,
    to_iceberg,
    to_jdbc,
    to_kafka,
    to_parquet,
    to_postgres,
)
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointForeign, RowFileDamaged
from ackcore.spark.base.versions import SPARK, to_arrow
from ackcore.spark.checks import _names_in, check_places
from ackcore.spark.query import run_batch
from ackcore.spark.sinks import parquet_directory
from ackcore.spark.sinks.sink import Sink, as_sink, check_sink
from ackcore.spark.sinks.sink_batch import read_sink_file
from ackcore.spark.tasks.row_files import damage_in
from ackcore.topology import BasicBolt, BatchBolt, Reject, TopologyBuilder, TopologyError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def accepted(spark, files, nonacked=(), batch_id=0, **changes):
    return accepted_rows.accepted(files, batch_id, nonacked, spark=spark, **changes)


@pytest.fixture
def files(tmp_path):
    return [
        row_file(tmp_path, [("a", 1, 10), ("b", 2, 11), ("c", 3, None)]),
        row_file(tmp_path, [("d", 4, [10, 12]), ("e", 5, []), ("f", 6, [12])]),
    ]


def words(path):
    table = pq.read_table(path, partitioning=None)
    return sorted(table["word"].to_pylist())


@pytest.mark.parametrize(
    ("nonacked", "left"),
    [([], "abcdef"), ([10], "bcef"), ([0], "abcdef"), ([-5, 10, 11, 12, 99], "ce")],
)
def test_rows_of_other_roots_only(files, nonacked, left):
    roots = np.array(nonacked, np.int64)
    batches = [batch for file in files for batch in read_sink_file(file, roots)]
    assert all(batch.schema == WORDS for batch in batches)
    assert "".join(w for batch in batches for w in batch["word"].to_pylist()) == left


def test_a_function_is_given_a_dataframe_and_the_batch_id(spark, files):
    seen = []
    sink = as_sink(lambda frame, n: seen.append((frame.collect(), n)))
    sink.write(accepted(spark, files, [10], 7))
    ((rows, number),) = seen
    assert number == 7
    assert [tuple(row) for row in rows] == [("b", 2), ("c", 3), ("e", 5), ("f", 6)]
    for lazy in (lambda frame, n: asyncio.sleep(0), lambda frame, n: (yield)):
        with pytest.raises(TypeError, match=r"sink '\w+' returned a \w+, which has not run"):
            as_sink(lazy).write(accepted(spark, files))
    for lazy in (
        lambda frame, n: frame.write.mode("append"),
        lambda frame, n: frame.writeTo("t"),
        lambda frame, n: frame.withColumn("n", frame.n + 1),
        lambda frame, n: frame,
    ):
        with pytest.raises(TypeError, match=r"a DataFrame\w*, which may have written nothing"):
            as_sink(lazy).write(accepted(spark, files))


def test_a_function_may_return_the_result_of_a_command_or_a_frame_of_pandas(spark, files, tmp_path):
    """Spark has run the command when `sql` returns."""
    insert = f"INSERT OVERWRITE DIRECTORY '{tmp_path / 'out'}' USING parquet SELECT * FROM v"

    def write(frame, number):
        frame.createOrReplaceTempView("v")
        return frame.sparkSession.sql(insert)

    as_sink(write).write(accepted(spark, files))
    assert spark.read.parquet(str(tmp_path / "out")).count() == 6
    as_sink(lambda frame, n: frame.toPandas()).write(accepted(spark, files))


def test_a_function_that_returns_a_sink_has_written_nothing(spark, files, tmp_path):
    with pytest.raises(
        TypeError, match=r"sink '\w+' returned to_parquet\(.*, which has written not"
    ):
        as_sink(lambda frame, n: to_parquet(tmp_path / "out")).write(accepted(spark, files))


@pytest.mark.parametrize(
    "factory", [to_delta, to_iceberg, to_jdbc, to_kafka, to_parquet, to_postgres]
)
def test_a_sink_that_was_not_made_is_refused_where_it_is_declared(factory):
    said = r"sink 'words' is the function to_(\w+) itself; pass to_\1\(\.\.\.\)"
    with pytest.raises(TypeError, match=said):
        TopologyBuilder().sink("words", factory)


VALUES = {
    "large": (pa.large_string(), "x"),
    "utc": (pa.timestamp("us", "UTC"), datetime.datetime(2024, 5, 1, 12)),
    "plain": (pa.timestamp("us"), datetime.datetime(2024, 5, 1, 12)),
    "day": (pa.date32(), datetime.date(2024, 5, 1)),
    "money": (pa.decimal128(10, 2), decimal.Decimal("1.50")),
    "bytes": (pa.binary(), b"\x00\xff"),
    "list": (pa.list_(pa.int32()), [1, None]),
    "struct": (pa.struct([("x", pa.int8()), ("y", pa.string())]), {"x": 1, "y": None}),
    "map": (pa.map_(pa.string(), pa.int64()), [("k", 1)]),
    "null": (pa.float64(), None),
}


def test_columns_of_every_type_come_through(spark, tmp_path):
    schema = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])
    file = row_file(tmp_path, [(*(value for _, value in VALUES.values()), 1)], schema=schema)
    check_sink("count", lambda frame, n: None, schema)
    check_sink("count", to_parquet(tmp_path / "out"), schema)
    (row,) = to_arrow(accepted(spark, [file]).frame()).to_pylist()
    assert row == {
        **{name: value for name, (_, value) in VALUES.items()},
        "utc": VALUES["utc"][1].replace(tzinfo=datetime.UTC),
    }
    to_parquet(tmp_path / "out").write(accepted(spark, [file]))
    (row,) = to_arrow(spark.read.parquet(str(tmp_path / "out")).drop("batch_id")).to_pylist()
    assert row["plain"] == VALUES["plain"][1]
    assert row["map"] == [("k", 1)]
    # Spark reads no nanoseconds, and once all is decided it would be too late to say so.
    late = pa.schema([("t", pa.timestamp("ns"))])
    with pytest.raises(TypeError, match=r"cannot read nanoseconds, .* have the bolt emit .*'us'"):
        check_sink("count", to_parquet(tmp_path / "out"), late)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (pa.timestamp("ns"), "cannot read nanoseconds"),
        (pa.duration("ns"), "cannot read nanoseconds"),
        (pa.time64("us"), "cannot read times of day"),
        (pa.float16(), "cannot read floats of 16 bits"),
        (pa.decimal256(40, 2), "cannot read decimals of more than 38 digits"),
        (pa.decimal128(5, -2), r"cannot hold column 'v' .*\(Scale must be"),
        pytest.param(
            pa.null(),
            "cannot read nulls only",
            marks=pytest.mark.skipif(SPARK >= (4, 1), reason="Spark 4.1 reads it"),
        ),
    ],
)
def test_types_that_spark_does_not_read_from_parquet_are_refused_at_every_depth(
    tmp_path, kind, says
):
    for each in (kind, pa.list_(kind), pa.struct([("f", pa.map_(pa.string(), kind))])):
        with pytest.raises(TypeError, match=says):
            check_sink("count", to_parquet(tmp_path / "out"), pa.schema([("v", each)]))


@pytest.fixture(params=["driver", "executors"])
def by(request, monkeypatch):
    """The driver writes the files of a small micro-batch, the executors those of any other."""
    if request.param == "executors":
        monkeypatch.setattr(parquet_directory, "DRIVER_ROWS", -1)
    return request.param


def test_a_directory_for_each_micro_batch(spark, files, tmp_path, by):
    sink = to_parquet(tmp_path / "out")
    sink.write(accepted(spark, files, [10]))
    sink.write(accepted(spark, files[:1], batch_id=1))
    frame = spark.read.parquet(str(tmp_path / "out"))
    rows = sorted(tuple(row) for row in frame.collect())
    assert rows == sorted(
        [("b", 2, 0), ("c", 3, 0), ("e", 5, 0), ("f", 6, 0), ("a", 1, 1), ("b", 2, 1), ("c", 3, 1)]
    )
    assert sorted(os.listdir(tmp_path / "out")) == ["_ackcore.json", "batch_id=0", "batch_id=1"]


def test_a_repetition_replaces(spark, files, tmp_path, by):
    sink = to_parquet(tmp_path / "out")
    sink.write(accepted(spark, files))
    sink.write(accepted(spark, files, [10]))
    assert words(tmp_path / "out" / "batch_id=0") == ["b", "c", "e", "f"]
    sink.write(accepted(spark, files[:1], [10, 11]))
    assert words(tmp_path / "out" / "batch_id=0") == ["c"]
    sink.write(accepted(spark, [row_file(tmp_path, [("x", 1, 1)])], [1]))
    assert os.listdir(tmp_path / "out") == ["_ackcore.json"]  # no row is left


def test_a_repetition_of_the_same_rows_leaves_them_in_place(spark, files, tmp_path, by):
    """Readers may be at them, and a driver that dies amid a repetition takes nothing away."""
    sink = to_parquet(tmp_path / "out")
    sink.write(accepted(spark, files, [10]))
    place = tmp_path / "out" / "batch_id=0"
    before = {path.name: path.stat().st_ino for path in place.iterdir()}
    sink.write(accepted(spark, files, [10]))
    assert {path.name: path.stat().st_ino for path in place.iterdir()} == before
    assert sorted(os.listdir(tmp_path / "out")) == ["_ackcore.json", "batch_id=0"]
    # Unless one of them was taken away, or never came: a mounted store may rename file by file.
    (place / min(before)).unlink()
    sink.write(accepted(spark, files, [10]))
    assert words(place) == ["b", "c", "e", "f"]


def test_nothing_is_seen_until_it_is_whole(spark, files, tmp_path, by, failing_at):
    """Spark reads a directory like "_batch_id=0.tmp" as a partition, and then reads no other."""
    sink = to_parquet(tmp_path / "out")
    sink.write(accepted(spark, files[:1], batch_id=1))
    with failing_at("in-sink"):
        sink.write(accepted(spark, files))
    assert not (tmp_path / "out" / "batch_id=0").exists()
    assert len(os.listdir(tmp_path / "out")) == 3
    assert {row.batch_id for row in spark.read.parquet(str(tmp_path / "out")).collect()} == {1}
    sink.write(accepted(spark, files))
    assert sorted(os.listdir(tmp_path / "out")) == ["_ackcore.json", "batch_id=0", "batch_id=1"]
    assert words(tmp_path / "out" / "batch_id=0") == list("abcdef")


@pytest.mark.parametrize(
    ("found", "checkpoint", "whose"),
    [
        (
            {"deployment": "abc", "sink": "n", "checkpoint": "{here}/cp"},
            "{here}/2",
            "sink 'n' of the checkpoint {here}/cp (deployment abc), ",
        ),
        (
            {"deployment": "abc", "sink": "n", "checkpoint": "{here}/gone"},
            "{here}/2",
            "sink 'n' of the checkpoint {here}/gone, which does not exist any more (deploym",
        ),
        (
            {"deployment": "abc", "sink": "n", "checkpoint": "{here}/2"},
            "{here}/2",
            "sink 'n' of an earlier checkpoint in {here}/2, which this one has replaced (deploy",
        ),
        ([], "{here}/2", "another checkpoint or another sink, "),
    ],
)
def test_a_claim_says_whose_it_is_and_how_it_is_released(tmp_path, found, checkpoint, whose):
    out, here = tmp_path / "out", str(tmp_path)
    out.mkdir()
    (tmp_path / "cp").mkdir()
    note = out / "_ackcore.json"
    note.write_text(json.dumps(found).replace("{here}", here))
    sink = to_parquet(out)
    claim = "n", "def", checkpoint.replace("{here}", here)
    told = "^sink 'n': " + re.escape(f"{out} is the directory of {whose.replace('{here}', here)}")
    with pytest.raises(CheckpointForeign, match=told) as refused:
        sink.claim(*claim)
    released = f"if no query uses that checkpoint any more, delete {note}"
    assert str(refused.value).endswith(released)
    (out / "batch_id=0").mkdir()
    (out / "batch_id=0/part.parquet").touch()
    with pytest.raises(CheckpointForeign, match=told + ".* delete it first, with all rows in it$"):
        sink.claim(*claim)
    # The way out of one without rows.
    shutil.rmtree(out / "batch_id=0")
    note.unlink()
    sink.claim(*claim)
    of_same = r"sink 'n' of the same checkpoint, .* undo that, or .* you can delete its _ackcore"
    with pytest.raises(CheckpointForeign, match=of_same):
        sink.claim("m", *claim[1:])
    sink.claim(*claim[:2], "/moved")  # a checkpoint that was moved is the same one


def test_row_groups_are_put_together_from_small_batches(spark, files, tmp_path, monkeypatch):
    to_parquet(tmp_path / "out").write(accepted(spark, files))
    (part,) = (tmp_path / "out" / "batch_id=0").iterdir()
    assert pq.ParquetFile(part).num_row_groups == 1
    monkeypatch.setattr(parquet_directory, "_GROUP_ROWS", 2)
    to_parquet(tmp_path / "out").write(accepted(spark, files, batch_id=1))
    (part,) = (tmp_path / "out" / "batch_id=1").iterdir()
    assert pq.ParquetFile(part).num_row_groups == 4  # of two, one, two and one rows, as they came


@pytest.mark.parametrize(
    "other", [{"deployment": "def"}, {"sink": "other"}], ids=["checkpoint", "sink"]
)
def test_a_directory_belongs_to_one_sink_of_one_checkpoint(spark, files, tmp_path, other):
    sink = to_parquet(tmp_path / "out")
    sink.write(accepted(spark, files))
    with pytest.raises(CheckpointForeign, match="whose micro-batches have the same numbers"):
        sink.write(accepted(spark, files, **other))


@pytest.mark.parametrize("paths", [("out", "file://{}/out/"), ("s3://b/out", "s3://b/out/")])
def test_two_sinks_with_one_directory_are_refused_in_build(tmp_path, monkeypatch, paths):
    monkeypatch.chdir(tmp_path)
    builder = TopologyBuilder()
    builder.spout("lines", FileSpout(tmp_path, "text"))
    for name, path in zip("ab", paths, strict=True):
        builder.sink("lines", to_parquet(path.format(tmp_path)), name=name)
    with pytest.raises(TopologyError, match="sinks 'a' and 'b' must have different directories"):
        builder.build()


@pytest.mark.parametrize(
    ("sink", "other", "refused"),
    [
        ("/d/out", {"checkpoint": "/d/out/cp"}, "checkpoint must not lie in to_parquet"),
        ("/d/out/", {"dead_letters": "/d/out"}, "dead_letters must not lie in to_parquet"),
        ("s3a://b/o", {"checkpoint": "s3://b/o/c"}, "checkpoint must not lie in to_parquet"),
        ("/d/out", {"spark_checkpoint": "/d/out/x"}, "spark_checkpoint must not lie in to_parq"),
        ("/d/out", {"second": "/d/out/x"}, "path of sink 'second' must not lie in to_parquet"),
        ("/d/in/out", {}, r"path of sink 'lines' must not lie in FileSpout\('/d/in', "),
        ("/d/in/_out", {"checkpoint": "/d/in/cp"}, r"checkpoint must not lie in FileSpout\("),
        ("/d/cp/ackcore/work", {"checkpoint": "/d/cp"}, "'lines' must not lie among the files of"),
        ("/d/out", {"checkpoint": "/d/out2", "dead_letters": "/d/ou"}, None),
        ("/d/out", {"checkpoint": "/d", "dead_letters": "/d/out/_dead/x"}, None),
        ("/d/in/.out", {"checkpoint": "/d/in/_cp", "dead_letters": None}, None),
        ("s3://b/o", {"checkpoint": "s3://b/out"}, None),
    ],
)
def test_places_whose_files_would_be_read_as_rows_are_refused(sink, other, refused):
    builder = TopologyBuilder()
    builder.spout("lines", FileSpout("/d/in", "text"))
    builder.sink("lines", to_parquet(sink))
    if "second" in other:
        builder.sink("lines", to_parquet(other.pop("second")), name="second")
    topology = builder.build()
    if refused is None:
        check_places(topology, other)
    else:
        with pytest.raises(ValueError, match=refused):
            check_places(topology, other)


@pytest.mark.parametrize(
    ("glob", "argument", "place", "reads"),
    [
        ("*.json", "checkpoint", "s3://b/in/cp", True),
        ("*.json", "checkpoint", "/d/in/cp", False),
        ("*.json", "checkpoint", "hdfs://h:1/in/cp", False),
        ("*.parquet", "spark_checkpoint", "/d/in/cp", False),
        ("*.jsonl", "checkpoint", "/d/in/cp", True),
        ("*.jsonl", "dead_letters", "/d/in/dead", False),
        ("*.parquet", "dead_letters", "/d/in/dead", True),
        ("*.arrow", "path of sink 'x'", "/d/in/out", False),
        ("*.parquet", "path of sink 'x'", "/d/in/out", True),
    ],
)
def test_a_place_is_refused_only_if_the_glob_takes_files_of_its_kind(glob, argument, place, reads):
    root = place[: place.index("/in/") + 3]
    spout = FileSpout(root, "text", glob=glob)
    assert spout.reads_in(place, _names_in(argument, place)) is reads


def test_a_checkpoint_in_a_delta_table_is_refused():
    """VACUUM would delete its files."""
    topology = TopologyBuilder()
    topology.spout("lines", FileSpout("/d/in", "text"))
    topology.sink("lines", to_delta("/d/table"))
    with pytest.raises(ValueError, match=r"checkpoint must not lie in to_delta\('/d/table'\)"):
        check_places(topology.build(), {"checkpoint": "/d/table/cp"})
    topology.sink("lines", to_delta("/d/table"), name="again")
    check_places(topology.build(), {"checkpoint": "/d/cp"})


@pytest.mark.parametrize(
    ("table", "checkpoint"), [("s3a://b/t", "s3://b/t/cp"), ("file:///d/t", "/d/t/cp")]
)
def test_a_place_in_a_delta_table_is_found_in_each_form_of_its_url(table, checkpoint):
    topology = TopologyBuilder()
    topology.spout("lines", FileSpout("/d/in", "text"))
    topology.sink("lines", to_delta(table))
    with pytest.raises(ValueError, match=": VACUUM would delete its files; choose"):
        check_places(topology.build(), {"checkpoint": checkpoint})


def test_a_directory_with_files_that_are_not_the_sinks_is_refused(spark, tmp_path):
    """Spark would show only the rows in batch_id=..., or fail if there are other partitions."""
    frame = spark.range(2)
    frame.write.parquet(f"{tmp_path}/out")
    topology = in_line({"numbers": frame}, to_parquet(f"{tmp_path}/out"))
    with pytest.raises(
        CheckpointForeign, match=r"out has files that are not the sink's, such as p"
    ):
        run_batch(topology, spark, tmp_path / "cp")
    assert spark.read.parquet(f"{tmp_path}/out").count() == 2


def test_a_checkpoint_in_the_directory_of_a_sink_is_refused_at_the_start(spark, tmp_path):
    topology = in_line({"numbers": spark.range(1)}, to_parquet(tmp_path))
    for place in ({}, {"dead_letters": tmp_path / "dead"}):
        checkpoint = tmp_path.parent / "cp" if place else tmp_path / "cp"
        with pytest.raises(ValueError, match=r": readers would take its files for rows; ch"):
            run_batch(topology, spark, checkpoint, **place)
        assert not checkpoint.exists()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("note", [None, "{"], ids=["absent", "torn"])
def test_a_directory_of_somebody_else_is_not_written_to(spark, files, tmp_path, note):
    (tmp_path / "out" / "batch_id=0").mkdir(parents=True)
    (tmp_path / "out" / "batch_id=0" / "part.parquet").touch()
    if note is not None:
        (tmp_path / "out" / "_ackcore.json").write_text(note)
    with pytest.raises(CheckpointForeign, match="its own directory"):
        to_parquet(tmp_path / "out").write(accepted(spark, files))


def test_what_is_no_directory_is_refused():
    with pytest.raises(ValueError, match="mounted directory; a sink that is a function"):
        to_parquet("viewfs://host/counts")
    with pytest.raises(ValueError, match="path must name a path in the bucket"):
        to_parquet("s3://bucket")
    with pytest.raises(TypeError, match="path must be a str"):
        to_parquet(b"counts")
    with pytest.raises(ValueError, match="compression must be one of snappy"):
        to_parquet("counts", compression="zap")


def test_a_sink_that_cannot_write_the_stream_is_refused():
    with pytest.raises(TypeError, match=r"Spark has no type for uint64 of column 'u'"):
        check_sink("count", lambda frame, n: None, pa.schema([("u", pa.uint64())]))
    kind = pa.month_day_nano_interval()
    with pytest.raises(TypeError, match=r"cannot hold column 'i' of month_day_nano_interval"):
        check_sink("count", to_parquet("x"), pa.schema([("i", kind)]))
    with pytest.raises(TypeError, match="must be a function of"):
        check_sink("count", 5, None)
    for writer in (lambda frame: 0, lambda frame, n, more: 0, to_parquet):
        said = r"a function of \(DataFrame, batch_id\).*, got a function of \("
        with pytest.raises(TypeError, match=said):
            check_sink("count", writer, None)
    with pytest.raises(TypeError, match="sink 'count' must be a plain function, got"):
        check_sink("count", asyncio.sleep, None)

    class Lazy(Sink):
        async def write(self, batch):
            raise AssertionError("nobody awaits this")

    with pytest.raises(TypeError, match="write of sink 'count' must be a plain function"):
        check_sink("count", Lazy(), None)
    named = pa.schema([("batch_ID", pa.string())])
    with pytest.raises(TypeError, match="would read in place of the column 'batch_ID'"):
        check_sink("count", to_parquet("x"), named)
    twins = pa.schema([("a", pa.string()), ("A", pa.string())])
    with pytest.raises(TypeError, match="not distinguish the columns 'a' and 'A';"):
        check_sink("count", to_parquet("x"), twins)
    inner = pa.struct([("b", pa.string()), ("B", pa.string())])
    for kind in (inner, pa.list_(inner), pa.map_(pa.string(), inner), pa.struct([("a", inner)])):
        schema = pa.schema([("c", kind)])
        with pytest.raises(TypeError, match=r"not distinguish the fields 'c\.\S*b' and 'c\.\S*B';"):
            check_sink("count", to_parquet("x"), schema)
        check_sink("count", to_parquet("x"), schema, True)
    check_sink("count", lambda frame, n, *more: None, named)
    check_sink("count", to_parquet("x"), None)
    check_sink("count", print, None)


class Late(BatchBolt):
    """A bolt that emits, for id 1, a time that fits seconds in Arrow but no microseconds."""

    outputs = pa.schema([("id", pa.int64()), ("at", pa.list_(pa.timestamp("s")))])

    def process(self, batch, out):
        ids = batch.column("id")
        at = [[2**45 if one == 1 else one] for one in ids.to_pylist()]
        columns = {"id": ids, "at": pa.array(at, self.outputs.field("at").type)}
        out.emit(columns, parents=range(len(batch)))


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("kind", ["parquet", "function"])
def test_a_row_whose_time_is_too_far_for_microseconds_is_dead(
    spark, tmp_path, monkeypatch, kind, small
):
    monkeypatch.setattr(parquet_directory, "DRIVER_ROWS", 1 << 17 if small else 0)
    path = str(tmp_path / "out")
    as_files = lambda frame, n: frame.write.mode("overwrite").parquet(f"{path}/batch_id={n}")  # noqa: E731
    sink = to_parquet(path) if kind == "parquet" else as_files
    once = {"max_attempts": 1, "max_sink_attempts": 2, "backoff_s": 0.001}
    topology = in_line({"ids": spark.range(4), "late": Late()}, sink, **once)
    run_batch(topology, spark, tmp_path / "cp", max_dead_ratio=None)
    assert sorted(row.id for row in spark.read.parquet(path).collect()) == [0, 2, 3]
    (dead,) = dead_letters(tmp_path / "cp").collect()
    assert "value of column 'at' does not fit into list<" in dead.error_message


def damage(file):
    with open(file.path, "r+b") as out:
        out.seek(-20, os.SEEK_END)
        out.write(b"!")


@pytest.mark.parametrize("which", [0, 1])
def test_rows_that_are_damaged_are_not_written(spark, files, tmp_path, by, which):
    damage(files[which])
    with pytest.raises((RowFileDamaged, PySparkException)) as caught:
        to_parquet(tmp_path / "out").write(accepted(spark, files))
    assert files[which].path in str(damage_in(caught.value))
    assert not (tmp_path / "out" / "batch_id=0").exists()
    with pytest.raises(RowFileDamaged):
        accepted(spark, files).verify()


def test_a_dataframe_has_no_row_of_a_damaged_file(spark, files):
    frame = accepted(spark, files).frame()
    damage(files[1])
    with pytest.raises(PySparkException) as caught:
        frame.collect()
    assert f"{files[1].path} is damaged" in str(damage_in(caught.value))
    damage(files[0])
    with pytest.raises(RowFileDamaged, match="is damaged"):
        accepted(spark, files).frame()


class PassOn(BasicBolt):
    outputs = pa.schema([("line", pa.string())])

    def execute(self, tuple, collector):
        collector.emit((tuple["line"],))


class Damaging:
    """A sink that has a bit flipped in the rows that it is given, before it reads them."""

    def __init__(self, work):
        self.work, self.rows = work, []

    def flip(self):
        for file in self.work.glob("*/rows/**/*.arrow"):
            data = file.read_bytes()
            file.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])

    def __call__(self, frame, number):
        if not self.rows:
            self.rows.append(0)
            self.flip()
        self.rows += frame.collect()


def test_rows_that_were_damaged_end_a_topology_by_their_name(spark, checkpoint):
    """Though a worker found it, and a sink of the user's own met it; put back, it goes on."""
    sink = Damaging(checkpoint / "ackcore/work")
    builder = TopologyBuilder()
    lines = [(line,) for line in "abcde"]
    builder.spout("lines", spark.createDataFrame(lines, "line string").coalesce(1))
    builder.bolt("pass", PassOn()).shuffle("lines")
    builder.sink("pass", sink)
    with pytest.raises(CheckpointCorrupt, match=r"\.arrow is damaged.* restore the file"):
        run_batch(builder.build(), spark, checkpoint)
    assert sink.rows == [0]
    sink.flip()
    assert run_batch(builder.build(), spark, checkpoint).acked == 5
    assert sorted(row.line for row in sink.rows[1:]) == list("abcde")


def test_intervals_are_intervals_in_parquet_files_and_in_dead_letters(spark, tmp_path):
    """Also nested."""
    frame = spark.sql(
        "SELECT id, interval '1 02:03:04.5' day to second AS took, array(interval '5' hour) AS each"
        " FROM range(3)"
    )

    def check(row):
        if row["id"] == 0:
            raise Reject("not this one")
        return row["took"] * 2

    out, checkpoint = str(tmp_path / "out"), tmp_path / "cp"
    counts = guard(frame, check, "twice interval day to second", to_parquet(out), checkpoint)
    assert (counts.acked, counts.dead) == (2, 1)
    took = datetime.timedelta(days=1, hours=2, minutes=3, seconds=4.5)
    first = (0, took, [datetime.timedelta(hours=5)])
    rows = spark.read.parquet(out).select("id", "took", "each", "twice").orderBy("id").collect()
    assert list(map(tuple, rows)) == [(n, *first[1:], 2 * took) for n in (1, 2)]
    (letter,) = dead_letters(checkpoint, spark).collect()
    assert tuple(letter.payload) == first


def test_spark_reads_lists_whose_numbers_are_all_null(spark, tmp_path):
    """Spark reads a null of an array through the column's dictionary, which must not be empty."""
    kinds = {"x": pa.float64(), "n": pa.int32(), "day": pa.date32(), "text": pa.string()}
    columns = {name: pa.array([[None], None, []], pa.list_(kind)) for name, kind in kinds.items()}
    path = tmp_path / "nulls.parquet"
    with path.open("wb") as file:
        assert parquet_directory.write_parquet(file, "snappy", [pa.record_batch(columns)])
    rows = spark.read.parquet(str(path)).groupBy(*kinds).count().drop("count")
    found = rows.selectExpr(*(f"transform({name}, one -> one)" for name in kinds)).collect()
    assert sorted(map(str, map(list, found))) == sorted(
        str([value] * 4) for value in ([None], None, [])
    )


def test_a_parquet_file_of_intervals_has_them_in_microseconds(spark, tmp_path):
    took = pa.array([datetime.timedelta(seconds=90), None], pa.duration("s"))
    with open(tmp_path / "one.parquet", "wb") as file:
        assert parquet_directory.write_parquet(file, "none", [pa.record_batch({"took": took})])
    rows = spark.read.parquet(str(tmp_path / "one.parquet")).collect()
    assert [row.took for row in rows] == [datetime.timedelta(seconds=90), None]
    columns = pa.schema([("took", pa.duration("s")), ("u", pa.uint64())])
    with pytest.raises(TypeError, match="Spark has no type for uint64 of column 'u'; have"):
        check_sink("count", to_parquet("x"), columns)


@pytest.mark.skipif(SPARK < (4, 0), reason="types of Spark 4.0")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("parse_json('1')", "of variant, and ackcore does not keep the type variant"),
        ("array(parse_json('1'))", "of array<variant>, and ackcore does not keep the type variant"),
        ("'a' COLLATE utf8_lcase", "does not keep the type string collate UTF8_LCASE"),
        ("map('a', 'b' COLLATE unicode_ci)", "does not keep the type string collate UNICODE_CI"),
    ],
)
def test_types_that_would_be_lost_are_refused_by_name_at_the_start(spark, tmp_path, value, said):
    frame = spark.sql(f"SELECT 1 AS id, {value} AS v")
    with pytest.raises(TypeError, match=f"source of spout 'lines' has a column 'v' .*{said}"):
        run_batch(in_line({"lines": frame}, to_parquet(tmp_path / "out")), spark, tmp_path / "cp")
    to = to_parquet(tmp_path / "out")
    with pytest.raises(TypeError, match=f"frame has a column 'v' .*{said}"):
        guard(frame, len, "n int", to, tmp_path / "cp")
    outputs = frame.select("v").schema
    with pytest.raises(TypeError, match=f"outputs has a column 'v' .*{said}"):
        guard(frame.select("id"), len, outputs, to, tmp_path / "cp")
    assert os.listdir(tmp_path) == []
    assert attempt(frame, len, "n int").schema["v"] == frame.schema["v"]
