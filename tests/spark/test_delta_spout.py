"""`DeltaSpout`: the rows that versions of a Delta table append, and refused versions."""

from __future__ import annotations

import datetime
import decimal
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from streams import Store, available_now

pytest.importorskip("deltalake", reason="deltalake is not installed")

import deltalake

from ackcore.spark import DeltaSpout, RunFailed, SourceError, skip_planned
from ackcore.spark.planned.file_reading import FileReader
from ackcore.topology import TopologyBuilder

DAY = datetime.date(2026, 1, 2)


@pytest.fixture
def table(tmp_path):
    return str(tmp_path / "table")


def append(table, *ids, **more):
    """Append a version with these ids, each tenth on a day of its own."""
    days = pa.array([None if n % 10 == 9 else DAY for n in ids], pa.date32())
    rows = pa.table({"id": pa.array(ids, pa.int64()), "day": days})
    deltalake.write_deltalake(table, rows, **{"mode": "append", "partition_by": ["day"], **more})


def read(spout, plan):
    columns = {path: values for path, _, values in plan["files"]}
    files = tuple(columns)
    found = FileReader(spout._root, (files,), "parquet", spout.schema, columns)
    rows = pa.Table.from_batches(found([pa.record_batch([pa.array([0])], ["id"])]), spout.schema)
    return sorted((row["id"], row["day"]) for row in rows.to_pylist())


def versions(spout, previous=None):
    """The ids of each plan up to the first None."""
    found = []
    while (plan := spout.plan(previous)) is not None:
        previous = json.loads(json.dumps(plan))
        found.append([n for n, _ in read(spout, previous)])
    return found


def test_versions_are_read_in_their_order_each_once(table):
    for n in range(3):
        append(table, n, 10 * n + 9)
    spout = DeltaSpout(table, max_files_per_batch=1)
    assert versions(spout) == [[0, 9], [1, 19], [2, 29]]
    plan = json.loads(json.dumps(DeltaSpout(table).plan(None)))
    assert read(spout, plan) == [(0, DAY), (1, DAY), (2, DAY), (9, None), (19, None), (29, None)]
    append(table, 3)
    assert versions(spout, plan) == [[3]]
    assert versions(DeltaSpout(table, starting_version=2, max_files_per_batch=1)) == [[2, 29], [3]]


def test_a_plan_has_a_bounded_number_of_versions(table, monkeypatch):
    monkeypatch.setattr("ackcore.spark.planned.delta_spout._VERSIONS", 2)
    for n in range(5):
        append(table, n)
    assert versions(DeltaSpout(table)) == [[0, 1], [2, 3], [4]]


def test_a_bounded_source_leaves_later_versions_out(table):
    append(table, 0)
    append(table, 1)
    bounded = DeltaSpout(table, max_files_per_batch=1).bounded()
    plan = bounded.plan(None)
    append(table, 2)
    assert versions(bounded, plan) == [[1]]
    assert versions(DeltaSpout(table), plan) == [[1, 2]]


@pytest.mark.parametrize("operation", ["OPTIMIZE", "WRITE"])
def test_a_compaction_changes_no_row(table, operation):
    """Also by Delta's recipe for Spark: an overwrite with the option dataChange false."""
    append(table, 0)
    append(table, 1)
    deltalake.DeltaTable(table).optimize.compact()
    log = Path(table, "_delta_log", f"{2:020}.json")
    log.write_text(log.read_text().replace('"OPTIMIZE"', f'"{operation}"'))
    append(table, 2)
    assert versions(DeltaSpout(table, max_files_per_batch=1)) == [[0], [1], [2]]


def test_what_a_version_did_is_read_without_the_history_before_it(table, monkeypatch):
    for n in range(5):
        append(table, n)
    deltalake.DeltaTable(table).optimize.compact()
    append(table, 5)
    monkeypatch.delattr(deltalake.DeltaTable, "history")
    commit, read = DeltaSpout._commit, []
    monkeypatch.setattr(
        DeltaSpout, "_commit", lambda self, version: read.append(version) or commit(self, version)
    )
    assert versions(DeltaSpout(table), {"to": 4, "commit": None}) == [[5]]
    assert set(read) == {4, 5, 6}


def test_a_version_that_is_written_during_a_plan_does_not_shift_the_others(table, monkeypatch):
    append(table, 0)
    append(table, 1)
    spout = DeltaSpout(table)
    previous = spout.plan(None)
    deltalake.DeltaTable(table).optimize.compact()
    files = DeltaSpout._files

    def written_meanwhile(self, version):
        monkeypatch.setattr(DeltaSpout, "_files", files)
        append(table, 2)
        return files(self, version)

    monkeypatch.setattr(DeltaSpout, "_files", written_meanwhile)
    assert versions(spout, previous) == [[], [2]]


@pytest.mark.parametrize(
    ("change", "operation"),
    [
        (lambda table: deltalake.DeltaTable(table).delete("id = 0"), "DELETE"),
        (lambda table: deltalake.DeltaTable(table).update({"id": "7"}), "UPDATE"),
        (lambda table: append(table, 7, mode="overwrite"), "WRITE"),
    ],
)  # fmt: skip
def test_a_version_that_changes_rows_is_refused_by_name_or_skipped(table, change, operation):
    append(table, 0, 1)
    change(table)
    append(table, 2)
    with pytest.raises(SourceError, match=rf"version 1 \({operation}\) deletes, updates or"):
        DeltaSpout(table).plan(None)
    assert versions(DeltaSpout(table, skip_changes=True)) == [[0, 1, 2]]
    assert versions(DeltaSpout(table, starting_version=2)) == [[2]]
    before = {"to": 0, "commit": None}
    assert versions(DeltaSpout(table, starting_version=2), before) == [[2]]
    assert versions(DeltaSpout(table), {"to": 1, "commit": None}) == [[2]]


def test_rows_that_come_back_are_not_read_twice(table):
    """The DELETE removes a whole file; RESTORE removes none, and adds that file again."""
    append(table, 0, 9)
    deltalake.DeltaTable(table).delete("day IS NULL")
    deltalake.DeltaTable(table).restore(0)
    append(table, 2)
    assert versions(DeltaSpout(table, skip_changes=True)) == [[0, 2, 9]]
    with pytest.raises(SourceError, match=r"version 2 \(RESTORE\) deletes, updates or restores"):
        DeltaSpout(table, starting_version=2).plan(None)


def test_a_restore_whose_log_was_cleaned_up_is_not_taken_for_an_append(table):
    """A table with a checkpoint at each version can be opened at each without its log."""
    append(table, 0, 9)
    deltalake.DeltaTable(table).delete("day IS NULL")
    deltalake.DeltaTable(table).restore(0)
    for version in range(3):
        deltalake.DeltaTable(table, version=version).create_checkpoint()
    append(table, 2)
    for version in range(3):
        Path(table, f"_delta_log/{version:020}.json").unlink()
    for skips in (False, True):
        with pytest.raises(SourceError, match=r"log of version 2 .* Set starting_version=3, which"):
            versions(DeltaSpout(table, skip_changes=skips), {"to": 1, "commit": None})
    before = {"to": 1, "commit": None}
    assert versions(DeltaSpout(table, starting_version=3), before) == [[2]]


def test_a_compaction_whose_log_was_cleaned_up_is_not_called_a_deletion(table):
    for n in range(2):
        append(table, n)
    deltalake.DeltaTable(table).optimize.compact()
    deltalake.DeltaTable(table).create_checkpoint()
    Path(table, f"_delta_log/{2:020}.json").unlink()
    before = {"to": 1, "commit": None}
    with pytest.raises(SourceError, match=r"version 2 removes files, perhaps .* was cleaned up"):
        DeltaSpout(table).plan(before)
    assert versions(DeltaSpout(table, skip_changes=True), before) == [[]]


def commit(table, version, *actions):
    """Write a version's file of the log, as another writer of Delta does."""
    head = {"commitInfo": {"timestamp": 1, "operation": "DELETE", "operationParameters": {}}}
    lines = "\n".join(json.dumps(one) for one in (head, *actions))
    (Path(table) / f"_delta_log/{version:020}.json").write_text(lines)


def test_a_deletion_vector_is_a_deletion(table):
    """The file stays in the table, with a bitmap of the rows that are deleted."""
    append(table, 0, 1, configuration={"delta.enableDeletionVectors": "true"})
    append(table, 2)
    spout = DeltaSpout(table)
    plan = json.loads(json.dumps(spout.plan(None)))
    path, size, values = plan["files"][0]
    file = {"path": path, "size": size, "partitionValues": values, "dataChange": True}
    bitmap = {
        "storageType": "i",
        "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
        "sizeInBytes": 40,
        "cardinality": 1,
    }
    added = {**file, "modificationTime": 1, "deletionVector": bitmap}
    commit(table, 2, {"remove": {**file, "deletionTimestamp": 1}}, {"add": added})
    append(table, 3)
    with pytest.raises(SourceError, match=r"version 2 \(DELETE\) deletes, updates or"):
        spout.plan(plan)
    assert versions(DeltaSpout(table, skip_changes=True)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("more", [0, 3])
def test_another_table_at_the_same_place_is_refused(table, more):
    for n in range(3):
        append(table, n)
    spout = DeltaSpout(table)
    plan = json.loads(json.dumps(spout.plan(None)))
    assert spout.plan(plan) is None
    shutil.rmtree(table)
    for n in range(1 + more):
        append(table, n)
    for one in (spout, DeltaSpout(table)):
        with pytest.raises(SourceError, match="is another table than the one that was read up to"):
            one.plan(plan)


def test_column_mapping_is_refused(table):
    mapping = {"delta.columnMapping.id": 1, "delta.columnMapping.physicalName": "col-1"}
    field = {"name": "id", "type": "long", "nullable": True, "metadata": mapping}
    schema = {"type": "struct", "fields": [field]}
    about = {
        "id": "t",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps(schema),
        "partitionColumns": [],
        "configuration": {
            "delta.columnMapping.mode": "name",
            "delta.columnMapping.maxColumnId": "1",
        },
    }
    protocol = {"minReaderVersion": 2, "minWriterVersion": 5}
    (Path(table) / "_delta_log").mkdir(parents=True)
    commit(table, 0, {"protocol": protocol}, {"metaData": about})
    with pytest.raises(SourceError, match="has column mapping"):
        DeltaSpout(table)


def test_partitions_of_each_type(tmp_path):
    time = datetime.datetime(2026, 1, 2, 3, 4, 5, 678901)
    values = {
        pa.string(): "a b%c/d:é=",
        pa.date32(): DAY,
        pa.timestamp("us", "UTC"): time.replace(tzinfo=datetime.UTC),
        pa.timestamp("us"): time,
        pa.float64(): 0.1,
        pa.decimal128(10, 2): decimal.Decimal("1.50"),
        pa.bool_(): True,
        pa.int32(): -7,
    }
    for n, (kind, value) in enumerate(values.items()):
        place = str(tmp_path / str(n))
        rows = pa.table({"id": [1, 2], "day": pa.array([value, None], kind)})
        deltalake.write_deltalake(place, rows, partition_by=["day"])
        spout = DeltaSpout(place)
        plan = json.loads(json.dumps(spout.plan(None)))
        assert read(spout, plan) == [(1, value), (2, None)]
    place = str(tmp_path / "binary")
    rows = pa.table({"id": [1], "day": pa.array([b"\xff"])})
    deltalake.write_deltalake(place, rows, partition_by=["day"])
    with pytest.raises(SourceError, match="its partition column day is binary"):
        DeltaSpout(place)


def test_a_table_that_is_not_there_is_named(table):
    with pytest.raises(ValueError, match=r"without percent escapes, .* got '%20' in it"):
        DeltaSpout("s3://bucket/a%20b")
    with pytest.raises(SourceError, match=r"DeltaSpout\('.*table'\) cannot be opened"):
        DeltaSpout(table)


def test_a_stream_reads_what_is_appended(spark, table, tmp_path, running):
    append(table, 1, 9)
    store = Store()
    builder = TopologyBuilder()
    builder.spout("orders", DeltaSpout(table), message_id="id")
    builder.sink("orders", store)
    on = available_now(builder.build(), spark, tmp_path / "cp")
    append(table, 2, 3)
    on = running(builder.build(), spark, tmp_path / "cp")
    on.process_all_available()
    assert (store.words, on.counts.acked) == ([1, 2, 3, 9], 4)
    on.stop()
    nulls = "day=__HIVE_DEFAULT_PARTITION__/*"
    before = {*Path(table).glob(nulls)}
    append(table, 4, 19)
    (lost,) = {*Path(table).glob(nulls)} - before
    lost.unlink()
    on = running(builder.build(), spark, tmp_path / "cp")
    with pytest.raises(RunFailed, match=r"run 1 time and .* --file day=.*parquet$") as ended:
        on.await_termination(300)
    path = re.search("--file (.*)$", str(ended.value)).group(1)
    assert skip_planned(tmp_path / "cp", "orders", path).files == (path,)
    on = running(builder.build(), spark, tmp_path / "cp")
    on.process_all_available()
    assert (store.words, on.counts.acked) == ([1, 2, 3, 4, 9], 5)
