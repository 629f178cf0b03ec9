"""Files of runs in a bucket: whole or not there, named by their content, removed with their run."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import write_table

from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointCorrupt, CheckpointInUse, StateError
from ackcore.spark.base.schemas import FailedFile
from ackcore.spark.checkpoint import table_cache
from ackcore.spark.checkpoint.table_cache import TableCache
from ackcore.spark.engine.suspects import crashes_logged
from ackcore.spark.stores import run_files as files
from ackcore.spark.stores.objects import ObjectStore
from ackcore.spark.stores.opening import open_store
from ackcore.spark.stores.run_files import (
    adopt_object,
    making_in,
    object_at,
    read_file,
    read_table_at,
    remove_all,
)
from ackcore.spark.tasks import inflight_markers
from ackcore.spark.tasks.inflight_markers import (
    ALONE,
    CHUNK,
    NOTHING,
    ROOTS,
    Marker,
    TaskAttempt,
    marker_of,
)
from ackcore.spark.tasks.isolation import AttemptIsolation
from ackcore.spark.tasks.row_files import (
    ROOT,
    RowFile,
    RowFileWriter,
    damage_in,
    finished,
    read_rows,
)

WORDS = pa.schema([("word", pa.string()), (ROOT, pa.int64())])
ATTEMPT = TaskAttempt(1, 0, 7)


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Where tasks make their files on this machine."""
    place = tmp_path / "local"
    place.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{place},/another")
    return place


@pytest.fixture
def work(bucket, local):
    return f"{bucket}/work/0.0123456789abcdef"


def below(place):
    store, key = object_at(place)
    return [entry.key.removeprefix(f"{key}/") for entry in store.list(key)]


def written(directory, words=("a", "b")):
    file = RowFileWriter(directory, WORDS, 3)
    file.write(pa.record_batch([list(words), list(range(len(words)))], schema=WORDS))
    return file


def test_a_row_file_is_there_whole_under_the_name_of_its_content(work, local):
    names = set()
    for _ in range(2):
        file = written(work)
        assert below(work) == sorted(names)
        name, rows, _ = file.finish()
        file.close()
        names.add(name)
    assert below(work) == [name]
    assert os.listdir(local) == []
    read = RowFile(f"{work}/{name}", rows, file.nbytes)
    assert pa.Table.from_batches(read_rows(read))["word"].to_pylist() == ["a", "b"]
    with pytest.raises(Exception, match="has 2 rows instead of 3") as raised:
        read_rows(read._replace(rows=3))
    assert damage_in(raised.value) is not None
    with pytest.raises(Exception, match=r"it has \d+ bytes instead of 9"):
        read_rows(read._replace(nbytes=9))


def test_what_is_not_finished_leaves_nothing(work, local):
    file = written(work)
    assert len(os.listdir(local)) == 1
    file.close()
    assert os.listdir(local) == []
    assert below(work) == []


def test_a_large_file_goes_in_parts(work, s3):
    columns = [[os.urandom(1 << 20).hex()] * 12, list(range(12))]
    file = RowFileWriter(work, WORDS, 0)
    file.write(pa.record_batch(columns, schema=WORDS))
    name, rows, _ = file.finish()
    assert sum("partNumber" in each.path for each in s3.requests) >= 3
    (batch,) = read_rows(RowFile(f"{work}/{name}", rows))
    assert batch.column("word").to_pylist() == columns[0]


def failed_file(path):
    return FailedFile("lines", False, path, 1, None)


def test_tables_that_tasks_wrote_are_copied_within_the_bucket(work, bucket, s3):
    table = pa.table({"n": list(range(1000))})
    with making_in(f"{work}/failed") as place:
        name = write_table(place, "dead-lines", table)
    assert read_table_at(f"{work}/failed/{name}") == table
    tables = TableCache(open_store(bucket, "path"), 4)
    s3.requests.clear()
    file = tables.adopt(failed_file(f"{work}/failed/{name}"), tables.prefix_of(7))
    assert file == f"7.e4.{name}"
    assert [each.method for each in s3.requests] == ["HEAD", "PUT"]
    assert tables.size(file) == len(read_file(f"{bucket}/state/{file}"))
    remove_all(work)
    assert TableCache(open_store(bucket, "path"), 5).read(file) == table
    with pytest.raises(StateError, match="does not exist, though a task has just written it"):
        adopt_object(f"{work}/failed/{name}", open_store(bucket, "path"), "x")
    with pytest.raises(CheckpointCorrupt, match="is missing, though the checkpoint refers to it"):
        read_table_at(f"{work}/failed/{name}")


def test_who_wrote_a_table_checks_it_when_it_is_fetched(work, bucket, monkeypatch):
    """The bytes that a bucket hands out are others than those that were put."""
    monkeypatch.setattr(table_cache, "_SMALL", 0)
    store, table = open_store(bucket, "path"), pa.table({"n": [7] * 1000})
    tables = TableCache(store, 4)
    directory = tables.prefix_of(7)
    with making_in(f"{work}/failed") as place:
        name = write_table(place, "dead-lines", table)
    files = {
        "adopted": tables.adopt(failed_file(f"{work}/failed/{name}"), directory),
        "written": tables.write_table(directory, "waiting-lines", table),
        "read": tables.write_table(directory, "nonacked", table),
    }
    assert tables.read(files["read"], keep=False) == table
    for file in files.values():
        nbytes = tables.size(file)
        data = bytearray(store.get(f"state/{file}").data)
        data[data.index((7).to_bytes(8, "little"))] ^= 64
        store.put(f"state/{file}", bytes(data))
        with pytest.raises(CheckpointCorrupt, match="do not match the checksum in its name"):
            tables.read(file)
        with pytest.raises(CheckpointCorrupt, match="do not match the checksum in its name"):
            tables.opened(file, nbytes)


def meeting(s3, method, parties):
    """Have requests of a method wait until so many are there at once."""
    ready = threading.Barrier(parties)
    s3.before = lambda request: request.method == method and ready.wait(30)


def test_what_a_task_puts_goes_beside_each_other(work, s3, tmp_path):
    local = [written(str(tmp_path), words).finish() for words in (("a", "b"), ("c", "d"))]
    meeting(s3, "PUT", 2)
    files = [written(work, words) for words in (("a", "b"), ("c", "d"))]
    assert finished(files, work) == local
    assert below(work) == sorted(name for name, _, _ in local)


def test_what_is_adopted_is_copied_beside_each_other(work, bucket, s3):
    with making_in(f"{work}/failed") as place:
        names = [write_table(place, f"dead-{n}", pa.table({"n": [n]})) for n in range(2)]
    tables = TableCache(open_store(bucket, "path"), 4)
    files = [failed_file(f"{work}/failed/{name}") for name in names]
    meeting(s3, "HEAD", 2)
    tables.adopt_all(files, tables.prefix_of(7))
    s3.before = None
    s3.requests.clear()
    found = [tables.adopt(file, tables.prefix_of(7)) for file in files]
    assert found == [f"7.e4.{name}" for name in names]
    assert s3.requests == []
    assert [tables.read(file)["n"].to_pylist() for file in found] == [[0], [1]]


def test_an_error_among_files_that_are_made_puts_none(work):
    def fails():
        with making_in(work) as place:
            (place / "a").write_text("a")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert below(work) == []


def test_nothing_is_removed_once_another_driver_has_taken_over(bucket, tmp_path):
    open_store(bucket, "path").put("a", b"")

    def fence():
        raise CheckpointInUse("another's")

    with fenced(fence):
        for place in (bucket, tmp_path):
            with pytest.raises(CheckpointInUse):
                remove_all(place)
    assert below(bucket) == ["a"]
    assert tmp_path.is_dir()
    remove_all(bucket)
    remove_all(bucket)
    assert below(bucket) == []


def test_a_process_has_one_client_for_a_bucket(bucket):
    stores = {id(object_at(f"{bucket}/{name}")[0]) for name in ("a", "b/c", "work/d")}
    assert len(stores) == 1
    store, key = object_at("abfss://box@account.dfs.core.windows.net/a/b")
    assert (store.url, key) == ("abfss://box@account.dfs.core.windows.net", "a/b")
    assert isinstance(store, ObjectStore)
    assert files.local_directory()


# -- markers --------------------------------------------------------------------------------------


def roots(*numbers):
    return np.array(numbers, np.int64)


def test_only_markers_that_name_roots_are_put(work, s3):
    marker = marker_of(work, ATTEMPT)
    marker.set(NOTHING)
    marker.set(CHUNK, 3, 10)
    assert s3.requests == []
    assert inflight_markers.crashed(work) == []
    marker.set(ROOTS, 3, 10, roots(1, -2))
    assert inflight_markers.crashed(work) == [Marker(ATTEMPT, ROOTS, 3, 10, frozenset({1, -2}))]
    marker.set(NOTHING)
    assert inflight_markers.crashed(work) == [Marker(ATTEMPT, NOTHING)]
    marker.set(ALONE, roots=roots(5))
    assert inflight_markers.crashed(work, (1, 1)) == []
    marker.remove()
    marker.remove()
    assert inflight_markers.attempts(work) == []


def flying(work, attempt=ATTEMPT, names=True):
    found = AttemptIsolation(work, attempt, names, {}, True, None)
    found.begin()
    return found


def test_an_attempt_goes_by_those_before_it(work):
    """Their roots, one of them, the same again: it is rejected."""
    first = flying(work)
    first._file.set(ROOTS, 0, 3, roots(1, 2, 3))
    second = flying(work, TaskAttempt(1, 0, 8))
    rejected, groups = second.evidence.groups(0, 3, roots(1, 2, 3))
    assert (list(rejected), [list(each) for each in groups]) == ([], [[1], [2], [3]])
    second._file.set(ALONE, roots=roots(2))
    third = flying(work, TaskAttempt(1, 0, 9))
    third._file.set(ALONE, roots=roots(2))
    fourth = flying(work, TaskAttempt(1, 0, 10))
    rejected, groups = fourth.evidence.groups(0, 3, roots(1, 2, 3))
    assert (list(rejected), [list(each) for each in groups]) == ([2], [[1], [3]])
    with fourth.of_roots(roots(3)):
        assert len(inflight_markers.attempts(work)) == 4
    fourth.end()
    assert len(inflight_markers.attempts(work)) == 3


def test_a_first_run_asks_the_bucket_nothing_about_crashes(work, s3):
    one = flying(work, names=False)
    with one.of_chunk(0, 5, None):
        pass
    one.end()
    assert s3.requests == []


def test_what_crashed_is_logged_when_the_run_has_failed(work, caplog):
    flying(work)._file.set(ALONE, roots=roots(4))
    with (
        caplog.at_level(logging.WARNING, "ackcore"),
        pytest.raises(RuntimeError, match="a task died"),
        crashes_logged(work, 3),
    ):
        raise RuntimeError("a task died")
    assert "micro-batch 3: attempt 7 at partition 0 of stage 1: crashed, with one record" in (
        caplog.text
    )


def test_a_time_out_is_told_where_its_traceback_is(work, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    marker = marker_of(work, ATTEMPT)
    marker.set(ALONE, roots=roots(4))
    path = Path(ATTEMPT.time_out_path(work))
    assert path.parent == tmp_path
    path.write_text("slow\nTimeout (0:00:01)!\n")
    (found,) = inflight_markers.crashed(work)
    assert found.timed_out.message == "timed out in slow"
    marker.remove()
    assert not path.exists()
