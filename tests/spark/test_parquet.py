"""Tables in Parquet files give what the same rows give from a DataFrame."""

from __future__ import annotations

import datetime as dt
import os
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from sessions import on_both_sessions

from ackcore._arrow.arrow_tables import STATUS_NAMES
from ackcore.spark import settle, settle_parquet
from ackcore.spark.settle import parquet_events as parquet
from ackcore.spark.settle.parquet_events import EventFile, ListedFile, read_footers
from ackcore.spark.settle.worker_functions import ResultForm

TYPES = {
    "root_id": pa.int64(),
    "val": pa.int64(),
    "task": pa.int32(),
    "ts_ms": pa.int64(),
    "reason": pa.string(),
}


def arrow_table(events, columns=5, **changed):
    """Events as an Arrow table; ``name=type`` gives a column another type."""
    data = {}
    by_column = list(zip(*events, strict=True)) or [[]] * 5
    for (name, arrow_type), column in list(zip(TYPES.items(), by_column, strict=True))[:columns]:
        data[name] = pa.array(column, arrow_type).cast(changed.get(name, arrow_type))
    return pa.table(data)


@pytest.fixture
def write(tmp_path):
    """``write(name, events, ...)`` writes a file below the test's directory, which it returns."""

    def write(name, events, columns=5, row_group_size=100, table=None, **options):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        table = arrow_table(events, columns) if table is None else table
        pq.write_table(table, path, row_group_size=row_group_size, **options)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("spark", "columns"), [("classic", 3), ("classic", 4), ("connect", 5)], indirect=["spark"]
)
def test_the_same_as_from_a_data_frame(spark, write, random_events, expected, found, columns):
    events = random_events(41, 800)
    for n in range(5):
        directory = write(f"part-{n}.parquet", events[n::5], columns)
    (directory / "_SUCCESS").touch()
    (directory / ".hidden").write_bytes(b"no table")
    timeout_ms = 300 if columns > 3 else None
    outcomes = expected([event[:columns] for event in events], 1000, timeout_ms)
    options = {"now_ms": 1000, "timeout_s": timeout_ms and timeout_ms / 1000}
    assert found(settle_parquet(spark, directory, **options)) == outcomes
    assert found(settle_parquet(spark, str(directory), shards=5, **options)) == outcomes


@pytest.mark.parametrize(("plan", "columns"), [("shares", 3), ("blobs", 5)])
def test_both_plans(spark, write, random_events, expected, found, monkeypatch, plan, columns):
    """Few cores read all files and shuffle nothing; many, or far files, do not."""
    events = random_events(46, 800)
    for n in range(3):
        directory = write(f"part-{n}.parquet", events[n::3], columns)
    monkeypatch.setattr(parquet, "MOST_READERS", 1 << 10 if plan == "shares" else 0)
    # All of this is less than a MiB, and would be one share.
    module = sys.modules["ackcore.spark.settle.dataframes"]
    monkeypatch.setattr(module, "default_shards", lambda spark, size: 3)
    settled = settle_parquet(spark, directory, now_ms=1000)
    assert found(settled) == expected([event[:columns] for event in events], 1000)
    shuffles = "Exchange" in settled._jdf.queryExecution().executedPlan().toString()
    assert shuffles == (plan == "blobs")


def test_which_files_are_read_by_all(write):
    write("a.parquet", EVENT)
    directory = write("b.parquet", EVENT)
    below = pa.fs.SubTreeFileSystem(str(directory), pa.fs.LocalFileSystem())
    near = read_footers(directory, None)
    far = read_footers("a.parquet", below)
    read_by_all = parquet._is_read_by_all
    assert read_by_all(near, 2, 1)
    assert read_by_all(near, 2, parquet.MOST_READERS)
    assert not read_by_all(near, 2, parquet.MOST_READERS + 1)
    assert not read_by_all([*near, *far], 3, 1)
    assert not read_by_all(near, 0, 1)
    assert read_by_all(near, 2 * parquet.SHARE_ROWS, 2)
    assert not read_by_all(near, 2 * parquet.SHARE_ROWS + 1, 2)


def widened(batch):
    """Return a batch of `ResultForm` with the documented columns, as its method does in SQL."""
    marks = batch["marks"].to_numpy()
    none = pa.nulls(len(batch), pa.int64())
    timed = "first_ms" in batch.schema.names
    return pa.RecordBatch.from_pydict(
        {
            "root_id": batch["root_id"],
            "status": pa.array([STATUS_NAMES[mark & 15] for mark in marks], pa.string()),
            "task": pa.array((marks >> 12).astype(np.int32)),
            "val": batch["val"],
            "inits": pa.array((marks >> 4 & 15).astype(np.int8)),
            "flags": pa.array((marks >> 8 & 15).astype(np.int8)),
            "first_ms": batch["first_ms"] if timed else none,
            "last_ms": batch["last_ms"] if timed else none,
            "reason": batch["reason"],
        }
    )


@pytest.mark.parametrize(("shares", "held_roots"), [(5, 1), (2, 40), (1, 10_000)])
def test_shares_of_many_roots_take_several_passes(
    write, random_events, expected, shares, held_roots, monkeypatch
):
    """Each root is settled once and with all of its rows, whatever the passes."""
    events = random_events(47, 500)
    write("a.parquet", events[::2])
    directory = write("b.parquet", events[1::2])
    files = read_footers(directory, None)
    monkeypatch.setattr(parquet, "HELD_ROOTS", held_roots)
    settle_share = parquet.settle_shares(
        files, list(TYPES), shares, seed=1, now_ms=1000, timeout_ms=300, form=ResultForm(True, True)
    )
    rows = []
    for share in range(shares):
        numbers = pa.RecordBatch.from_pydict({"id": [share]})
        batches = list(settle_share(iter([numbers])))
        again = list(settle_share(iter([numbers])))
        assert [batch.to_pydict() for batch in batches] == [batch.to_pydict() for batch in again]
        rows += [row for batch in batches for row in widened(batch).to_pylist()]
    outcomes = expected(events, 1000, 300)
    names = next(iter(outcomes.values()))._fields
    by_root = {row["root_id"]: tuple(row[name] for name in names) for row in rows}
    assert len(by_root) == len(rows)
    assert by_root == outcomes


@pytest.mark.parametrize(
    ("spark", "columns"), [("classic", 3), ("classic", 4), ("connect", 5)], indirect=["spark"]
)
def test_the_schema_is_the_same_whatever_crosses(spark, write, frame, columns):
    """All columns may be null, formally, as they were when each of them crossed."""
    directory = write("a.parquet", EVENT, columns)
    settled = settle_parquet(spark, directory)
    assert all(field.nullable for field in settled.schema)
    assert settled.schema == settle(frame(EVENT, 5)).schema == settle(frame(EVENT, 3)).schema
    crossed = ResultForm(columns > 3, columns > 4).ddl
    assert ("last_ms" in crossed, "reason" in crossed) == (columns > 3, columns > 4)


def test_files_that_spark_wrote(spark, frame, tmp_path, random_events, expected, found):
    events = random_events(42, 300)
    frame(events, 5).repartition(3).write.parquet(f"{tmp_path}/table")
    assert found(settle_parquet(spark, f"{tmp_path}/table")) == expected(events)
    assert found(settle_parquet(spark, f"file://{tmp_path}/table")) == expected(events)


def test_files_of_any_make(spark, write, random_events, expected, found):
    events = random_events(43, 200)
    makes = [
        {"row_group_size": 1},
        {"compression": "zstd", "data_page_version": "2.0"},
        {"compression": "none", "use_dictionary": False},
        {"use_byte_stream_split": ["root_id", "val"], "use_dictionary": False},
        {"write_statistics": False},
    ]
    for n, options in enumerate(makes):
        directory = write(f"{n}.parquet", events[n :: len(makes)], **options)
    assert found(settle_parquet(spark, directory)) == expected(events)


def test_columns_in_any_order_and_others_beside(spark, write, random_events, expected, found):
    events = random_events(44, 50)
    table = arrow_table(events).select(["reason", "task", "ts_ms", "val", "root_id"])
    nested = pa.array([{"root_id": "no", "x": [1]}] * len(events))
    table = table.add_column(1, "nested", nested).append_column(
        "when", [[dt.datetime.now()] * len(events)]
    )
    large = table.set_column(0, "reason", table["reason"].cast(pa.large_string()))
    coded = table.set_column(0, "reason", table["reason"].dictionary_encode())
    for n, one in enumerate((table, large, coded)):
        directory = write(f"{n}.parquet", None, table=one.take(list(range(n, len(events), 3))))
    assert found(settle_parquet(spark, directory)) == expected(events)


def test_paths(spark, write, tmp_path, monkeypatch):
    names = ["day=1/a.parquet", "day=1/deep/b.parquet", "day=2/a[1].parquet"]
    for name in names:
        write(name, EVENT)

    def listed(*paths, filesystem=None):
        files = read_footers(paths[0] if len(paths) == 1 else paths, filesystem)
        return sorted(file.source.path.removeprefix(f"{tmp_path}/") for file in files)

    assert listed(tmp_path) == names
    assert listed(str(tmp_path) + "/") == names
    assert listed(f"{tmp_path}/day=1", tmp_path / "day=2") == names
    assert listed(f"{tmp_path}/day=2/a[1].parquet") == names[2:]
    assert listed(f"file://{tmp_path}/day=1/deep") == names[1:2]
    monkeypatch.chdir(tmp_path)
    assert listed("day=1", "day=2") == names
    # The other arguments, on Spark.
    below = pa.fs.SubTreeFileSystem(str(tmp_path), pa.fs.LocalFileSystem())
    (row,) = settle_parquet(spark, ["day=1", "day=2/"], filesystem=below).collect()
    assert (row.status, row.inits) == ("ANOMALY", 2)


def test_a_file_by_two_spellings_of_its_path_is_refused(write, tmp_path, monkeypatch):
    write("a.parquet", EVENT)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "link").symlink_to(tmp_path / "a.parquet")
    monkeypatch.chdir(tmp_path)
    local = pa.fs.LocalFileSystem()
    below = pa.fs.SubTreeFileSystem(str(tmp_path), local)
    for filesystem, other in (
        (None, "sub/link"),
        (None, f"file://{tmp_path}//a.parquet"),
        (local, "./a.parquet"),
        (local, f"{tmp_path}//a.parquet"),
        (below, "sub/../a.parquet"),
    ):
        with pytest.raises(ValueError, match=r"once, got .* twice, first as .*: its events would"):
            read_footers(["a.parquet", other], filesystem)
        assert len(read_footers([other], filesystem)) == 1


@pytest.mark.parametrize(
    ("paths", "error", "match"),
    [
        ("{}/missing.parquet", FileNotFoundError, r"paths: .*/missing\.parquet does not exist"),
        (["{}/a.parquet", "{}/missing"], FileNotFoundError, "missing does not exist"),
        ("{}/*.orc", FileNotFoundError, r"\*\.orc does not exist; for a pattern, pass the list"),
        ("{}/empty", FileNotFoundError, "/empty has no files"),
        (
            ["{}/a.parquet", "{}"],
            ValueError,
            r"got .*/a\.parquet twice, first as .*: its events would",
        ),
        ([], ValueError, "paths must name at least one file, got none"),
        (7, TypeError, "paths must be a path or a sequence of paths, got int"),
        ([7], TypeError, "paths must contain only paths, got int"),
        (b"here", TypeError, "got bytes"),
        ("{}/text", ValueError, "text is not a Parquet file: "),
    ],
)
def test_paths_that_are_refused(spark, write, tmp_path, paths, error, match):
    write("a.parquet", [(1, 5, 0, 1, None)])
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("root_id,val,task\n1,2,3\n")
    if paths == ["{}/a.parquet", "{}"]:
        (tmp_path / "text").unlink()
    if isinstance(paths, str):
        paths = paths.format(tmp_path)
    elif isinstance(paths, list):
        paths = [path.format(tmp_path) if isinstance(path, str) else path for path in paths]
    with pytest.raises(error, match=match):
        settle_parquet(spark, paths)


TIMESTAMP = pa.timestamp("ms")
EVENT = [(1, 5, 0, 1, None)]


ONE = arrow_table(EVENT)
NO_VAL = "has no column val, of type int64; its columns are root_id, task"


@pytest.mark.parametrize(
    ("table", "error", "match"),
    [
        (
            {"ts_ms": TIMESTAMP},
            TypeError,
            r"ts_ms must be int64, got timestamp\[ms\]; write it as mill.*unix_millis",
        ),
        ({"task": pa.int64()}, TypeError, "task must be int32, got int64"),
        ({"root_id": pa.uint64()}, TypeError, "root_id must be int64, got uint64"),
        ({"val": pa.string()}, TypeError, "val must be int64, got string"),
        (ONE.set_column(4, "reason", [[b"x"]]), TypeError, "reason must be string, got binary"),
        (ONE.drop_columns("val"), ValueError, NO_VAL),
        (ONE.append_column("val", [[1]]), ValueError, "has 2 columns val"),
    ],
)
def test_files_that_are_refused(spark, write, table, error, match):
    """Named with the column, before any job; a dict has other types of columns."""
    table = arrow_table(EVENT, **table) if isinstance(table, dict) else table
    directory = write("events.parquet", None, table=table)
    with pytest.raises(error, match=rf"events\.parquet.*{match}"):
        settle_parquet(spark, directory)


def test_times_of_an_old_kind_are_refused(spark, write):
    old = {"table": arrow_table(EVENT, ts_ms=TIMESTAMP), "use_deprecated_int96_timestamps": True}
    with pytest.raises(
        TypeError, match=r"events\.parquet.*ts_ms must be int64, got timestamp\[ns\]"
    ):
        settle_parquet(spark, write("events.parquet", None, **old))


def test_files_that_differ_are_refused(spark, write):
    write("a.parquet", EVENT, 3)
    directory = write("b.parquet", EVENT, 4)
    said = r"b\.parquet has a column ts_ms and .*a\.parquet has none"
    with pytest.raises(ValueError, match=said):
        settle_parquet(spark, directory)
    with pytest.raises(ValueError, match="timeout_s was given, but events has no times"):
        settle_parquet(spark, directory / "a.parquet", timeout_s=0.005)


def test_what_only_the_workers_see(spark, write):
    """Nulls, and messages that are none."""
    directory = write("nulls.parquet", [*EVENT * 150, (None, 5, 0, 1, None)])
    said = r"ValueError: .*nulls\.parquet: root_id must not .*of row groups \d to 1\)"
    with pytest.raises(Exception, match=said):
        settle_parquet(spark, directory).collect()
    write("nulls.parquet", [*EVENT, (1, 5, -9, 1, None)])
    with pytest.raises(Exception, match=r"ValueError: .*nulls\.parquet.*tasks must be .* got -9"):
        settle_parquet(spark, directory).collect()


@on_both_sessions
def test_files_that_change_before_the_action_are_noticed(spark, write):
    directory = write("a.parquet", EVENT)
    settled, other = settle_parquet(spark, directory), settle_parquet(spark, directory)
    write("a.parquet", EVENT * 2)
    said = r"ValueError: .*a\.parquet has changed since settle_parquet listed"
    with pytest.raises(Exception, match=said):
        settled.collect()
    os.remove(directory / "a.parquet")
    said = r"FileNotFoundError: .*a\.parquet is not a file on this worker"
    with pytest.raises(Exception, match=said):
        other.collect()


def test_empty_files(spark, write, frame, found):
    directory = write("empty.parquet", [])
    assert found(settle_parquet(spark, directory)) == {}
    left = settle(frame([(1, 5, 0, 1, "so")], 5))
    assert found(settle_parquet(spark, directory, open_before=left)) == found(left)
    write("none.parquet", None, table=arrow_table(EVENT))
    assert len(found(settle_parquet(spark, directory))) == 1


def test_row_groups_are_dealt_out_evenly():
    """Each one once, neighbours together, and about as much to every task."""
    rng = np.random.default_rng(1)

    def file(name, sizes):
        source = ListedFile(name, 0, 0, None)
        return EventFile(source, [], [1] * len(sizes), [int(size) for size in sizes])

    for cores in (1, 2, 7):
        for _ in range(20):
            files = [file(str(n), rng.integers(1, 100, rng.integers(0, 9))) for n in range(5)]
            tasks = parquet._deal_out(files, cores)
            dealt = [
                (p.source.path, g) for task in tasks for p in task for g in range(p.first, p.end)
            ]
            assert dealt == [(f.source.path, g) for f in files for g in range(len(f.group_bytes))]
            assert len(tasks) <= cores
            sizes = {f.source.path: f.group_bytes for f in files}
            total = sum(map(sum, sizes.values()))
            for task in tasks:
                share = sum(sum(sizes[p.source.path][p.first : p.end]) for p in task)
                assert share <= total / cores + 100
    large = file("large", [parquet._TASK_BYTES // 4] * 40)
    assert len(parquet._deal_out([large], 4)) == 12
    assert parquet._deal_out([file("none", [])], 4) == []


def test_a_source_travels(tmp_path):
    """Descriptors go to the workers with the function."""
    pickle = pytest.importorskip("pickle")
    pq.write_table(arrow_table(EVENT), tmp_path / "a.parquet")
    (source,) = read_footers(Path(tmp_path), None)
    assert pickle.loads(pickle.dumps(source)) == source
