"""A file that a run left is read as it was written, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from ackcore.spark.base.errors import CheckpointCorrupt, RowFileDamaged, StateError
from ackcore.spark.tasks.row_files import (
    ROOT,
    ROOTS,
    RowFile,
    RowFileWriter,
    damage_in,
    has_several_roots,
    read_rows,
    read_schema,
    read_whole,
)

WORDS = pa.schema([("word", pa.string())])
ONE = WORDS.append(pa.field(ROOT, pa.int64()))
MANY = WORDS.append(pa.field(ROOTS, pa.list_(pa.int64())))


def written(directory, schema, *batches):
    file = RowFileWriter(str(directory), schema, 3)
    for rows in batches:
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], []]
        file.write(pa.record_batch(columns, schema=schema))
    name, rows, _ = file.finish()
    return RowFile(str(directory / name), rows)


@pytest.fixture(params=["one", "many"])
def file(request, tmp_path):
    """Two messages of rows, with a root each or with several."""
    if request.param == "one":
        return written(tmp_path, ONE, [("a", 1), ("b", None)], [("c", -3)])
    return written(tmp_path, MANY, [("a", [1, 2]), ("b", [])], [("c", [3])])


def test_what_was_written_is_read(file):
    assert [row["word"] for batch in read_rows(file) for row in batch.to_pylist()] == list("abc")
    assert read_whole(file)["word"].to_pylist() == list("abc")
    assert read_schema(file) == read_rows(file)[0].schema
    assert has_several_roots(file.path) == (ROOTS in read_schema(file).names)
    assert len(read_rows(file)) == 2


def test_a_file_without_rows_is_one_too(tmp_path):
    assert read_whole(written(tmp_path, ONE)).num_rows == 0


def test_any_bit_that_is_changed_is_found(file):
    path = Path(file.path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        with pytest.raises(RowFileDamaged, match="is damaged"):
            read_rows(file)
    path.write_bytes(whole)
    assert len(read_rows(file)) == 2


def test_a_file_that_is_cut_or_longer_is_found(file):
    """Wherever it is cut: Arrow takes the end of a message for that of the stream."""
    path = Path(file.path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(RowFileDamaged, match=f"its {length} bytes do not match"):
            read_rows(file)
    for more in (b"\0", whole):
        path.write_bytes(whole + more)
        with pytest.raises(RowFileDamaged, match="is damaged"):
            read_rows(file)


def test_messages_that_changed_places_are_found(tmp_path):
    file = written(tmp_path, ONE, [("a", 1)], [("b", 2)])
    whole = Path(file.path).read_bytes()
    other = written(tmp_path, ONE, [("b", 2)], [("a", 1)])
    assert sorted(whole) == sorted(Path(other.path).read_bytes())
    os.replace(other.path, file.path)
    with pytest.raises(RowFileDamaged, match="is damaged"):
        read_rows(file)


def test_rows_are_held_to_the_record(file):
    with pytest.raises(RowFileDamaged, match="has 3 rows instead of 4"):
        read_rows(file._replace(rows=4))


def test_a_file_that_is_missing_or_of_another_name_is_refused(file):
    moved = file.path + ".old"
    os.rename(file.path, moved)
    with pytest.raises(CheckpointCorrupt, match=r"is missing, .* restore the file from a backup"):
        read_rows(file)
    with pytest.raises(RowFileDamaged, match="has no fingerprint in its name"):
        read_rows(RowFile(moved, 3))
    assert has_several_roots(moved)


def test_a_file_that_may_not_be_read_is_not_damaged(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(StateError, match="cannot be read") as error:
        read_rows(RowFile(str(tmp_path / "loop"), 3))
    assert damage_in(error.value) is None


@pytest.mark.parametrize("error", [pa.ArrowMemoryError, pa.ArrowCancelled])
def test_a_file_for_which_there_is_no_memory_is_not_damaged(file, monkeypatch, error):
    def read_message(source):
        raise error("no more")

    monkeypatch.setattr(pa.ipc, "read_message", read_message)
    with pytest.raises(error):
        read_rows(file)


def test_two_of_one_name_do_not_meet(tmp_path):
    """A task of another SparkContext may have the same number, and write at the same time."""
    first, second = (RowFileWriter(str(tmp_path), ONE, 3) for _ in range(2))
    first.write(pa.record_batch([["a"], [1]], schema=ONE))
    second.write(pa.record_batch([["b"], [2]], schema=ONE))
    for file, word in ((first, "a"), (second, "b")):
        name, rows, _ = file.finish()
        table = read_whole(RowFile(str(tmp_path / name), rows))
        assert table["word"].to_pylist() == [word]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_worker_raised_is_found_in_the_text_of_it():
    told = "Traceback\nackcore.spark.files.RowFileDamaged: /w/1.arrow is damaged\n  at java"
    error = RuntimeError("the sink failed")
    error.__cause__ = ValueError(told)
    assert str(damage_in(error)) == "/w/1.arrow is damaged"
    assert damage_in(RuntimeError("CheckpointCorrupt: no")) is None
    error.__cause__.__context__ = error  # it ends, though it goes round
    error.__cause__.args = ("nothing",)
    assert damage_in(error) is None
    assert damage_in(None) is None
