"""`FileSpout`: which files a plan names, what it does with files that change, and what is read."""

from __future__ import annotations

import bz2
import datetime
import decimal
import gzip
import http.client
import json
import lzma
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from s3_server import SLOW_DOWN

from ackcore.spark.checkpoint.skips import skip_command
from ackcore.spark.planned.delta_spout import DeltaSpout
from ackcore.spark.planned.file_reading import FileReader, FileUnreadable, dealt
from ackcore.spark.planned.file_spout import FileSpout
from ackcore.spark.planned.planned_source import RateSpout, SourceError
from ackcore.spark.stores.objects import ObjectStore

NESTED = pa.list_(pa.map_(pa.string(), pa.struct([("x", pa.date32())])))
ROWS = pa.schema([("id", pa.int64()), ("name", pa.string())])
CORRUPT = pa.field("_corrupt_record", pa.string())
REASONS = pa.schema([("_corrupt_record", pa.string()), ("_corrupt_reason", pa.string())])
SECOND = 1_000_000_000


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "in"
    path.mkdir()
    return path


def put(folder, name, time_s, content=b"a\n"):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, ns=(time_s * SECOND, time_s * SECOND))
    return path


def names(plan):
    return None if plan is None else [name for _, name, *_ in plan["files"]]


def again(plan):
    """The plan as it comes back from a checkpoint."""
    return json.loads(json.dumps(plan))


def read(spout, plan, tasks=1):
    found = FileReader(
        spout._root,
        tuple(dealt([(name, size) for _, name, size, _ in plan["files"]], tasks)),
        spout._format,
        spout.emits,
    )
    numbers = pa.record_batch([pa.array(range(len(found.tasks)))], ["id"])
    table = pa.Table.from_batches(found([numbers]), spout.schema)
    corrupt = [name for name in table.column_names if name.startswith("_corrupt")]
    if all(table[name].null_count == len(table) for name in corrupt):
        table = table.drop_columns(corrupt)
    return table.to_pylist()


def parquet_of(**columns):
    """The bytes of a Parquet file."""
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


def rows_in(folder, format, schema=None, content=None, name="a"):
    """Write a file if its content is given, and return the rows of all files."""
    if content is not None:
        put(folder, name, 1, content)
    spout = FileSpout(folder, format, schema)
    return read(spout, spout.plan(None))


@pytest.mark.parametrize(
    ("format", "content", "complete"),
    [
        ("json", b'{"id": 1}\n', b'{"id": 1, "name": "a"}\n'),
        ("csv", b"id\n1\n", b"id,name\n1,a\n"),
        ("parquet", parquet_of(id=[1]), parquet_of(id=[1], name=["a"])),
    ],
)
def test_a_column_whose_values_are_in_paths_is_refused_unless_files_have_it(
    folder, format, content, complete
):
    """Its values would be lost."""
    with pytest.raises(FileUnreadable, match=r"has no column name, and values in paths \(name=b\)"):
        rows_in(folder, format, ROWS, content, "day=1/name=b/a")
    rows = [{"id": 1, "name": "a"}]
    assert rows_in(folder, format, ROWS, complete, "day=1/name=b/a") == rows


@pytest.mark.parametrize(
    ("columns", "name"),
    [({"ID": [1], "name": ["a"]}, "ID"), ({"id": [1], "s": [[{"X": 1, "y": 2}]]}, r"s\.X")],
)
def test_a_parquet_column_whose_name_differs_in_case_is_refused(folder, columns, name):
    """Otherwise its values would be null. Spark finds them."""
    inner = pa.list_(pa.struct([("x", pa.int64()), ("y", pa.int64())]))
    schema = pa.schema([*ROWS, ("s", inner)])
    with pytest.raises(FileUnreadable, match=f"the file has the column {name}, whose name in the"):
        rows_in(folder, "parquet", schema, parquet_of(**columns))


@pytest.mark.parametrize("kind", [NESTED, NESTED.value_type, pa.struct([("x", pa.int64())])])
def test_a_nested_column_that_a_parquet_file_lacks_is_null(folder, kind):
    schema = pa.schema([("id", pa.int64()), ("more", kind)])
    assert rows_in(folder, "parquet", schema, parquet_of(id=[1])) == [{"id": 1, "more": None}]


def test_files_are_taken_in_the_order_of_time_and_name_each_once(folder):
    spout = FileSpout(folder, "text", max_files_per_batch=2)
    for name, time_s in (("c", 10), ("b", 20), ("a", 20), ("d", 5)):
        put(folder, name, time_s)
    first = again(spout.plan(None))
    second = again(spout.plan(first))
    assert (names(first), names(second)) == (["d", "c"], ["a", "b"])
    assert spout.plan(second) is None
    put(folder, "late", 15)
    assert names(spout.plan(second)) == ["late"]


def test_a_file_that_is_older_than_its_lateness_counts_as_read(folder):
    spout = FileSpout(folder, "text", lateness_s=60)
    put(folder, "a", 1000)
    plan = again(spout.plan(None))
    put(folder, "too late", 939)
    put(folder, "in time", 940)
    assert names(spout.plan(plan)) == ["in time"]


@given(
    data=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=40),
    most=st.one_of(st.none(), st.integers(1, 5)),
    cuts=st.integers(1, 5),
)
def test_each_file_is_planned_once_and_the_list_stays_bounded(tmp_path_factory, data, most, cuts):
    """Files come in the order of the list, at most 90 s late; of those in a minute is known."""
    folder = tmp_path_factory.mktemp("in")
    spout = FileSpout(folder, "text", max_files_per_batch=most, lateness_s=90)
    plan, found, now = None, [], 1000
    for n, (step, late) in enumerate(data):
        now += step
        put(folder, f"{n:02}", now - late)
        if n % cuts == 0 or n == len(data) - 1:
            while (more := spout.plan(plan)) is not None:
                plan = again(more)
                found += names(plan)
                assert all(
                    time >= plan["newest"] - 90 * SECOND for _, time in plan["seen"].values()
                )
    assert sorted(found) == [f"{n:02}" for n in range(len(data))]


def test_a_longer_lateness_reads_no_file_again(folder):
    for n in range(3):
        put(folder, str(n), 1000 * n)
    plan = again(FileSpout(folder, "text", lateness_s=60).plan(None))
    assert FileSpout(folder, "text", lateness_s=3000).plan(plan) is None


def test_older_files_of_another_directory_are_named(folder, tmp_path):
    put(folder, "a", 100)
    put(folder, "b", 1000)
    plan = again(FileSpout(folder, "text", lateness_s=60).plan(None))
    moved, other = tmp_path / "moved", tmp_path / "other"
    folder.rename(moved)
    for place in (moved, other):
        place.mkdir(exist_ok=True)
        put(place, "c", 1001)
    found = [FileSpout(place, "text", lateness_s=60).plan(plan) for place in (moved, other)]
    assert [names(one) for one in found] == [["c"], ["c"]]
    put(other, "d", 900)
    with pytest.raises(SourceError, match=rf"of {folder} were read before. The file d is older"):
        FileSpout(other, "text", lateness_s=60).plan(plan)
    assert FileSpout(other, "text", lateness_s=60).plan(again(found[1])) is None


def test_only_files_are_read(folder):
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to(folder / "nowhere")
    assert FileSpout(folder, "text").plan(None) is None


def test_a_bounded_source_leaves_later_rows_out(folder):
    put(folder, "a", 10)
    put(folder, "b", 11)
    spout = FileSpout(folder, "text", max_files_per_batch=1)
    bounded = spout.bounded()
    plan = again(bounded.plan(None))
    put(folder, "c", 12)
    plan = again(bounded.plan(plan))
    assert (names(plan), bounded.plan(plan)) == (["b"], None)
    assert names(spout.plan(plan)) == names(bounded.bounded().plan(plan)) == ["c"]
    now = [100.0]
    rate = RateSpout(per_s=10, clock=lambda: now[0])
    assert rate.plan(None) is None
    now[0] += 1
    bounded = rate.bounded()
    now[0] += 1
    assert (bounded.plan(None)["to"], rate.plan(None)["to"]) == (10, 20)


@pytest.mark.parametrize(
    ("glob", "place", "reads"),
    [
        ("*", "in/cp", True),
        ("*", "in", True),
        ("*", "in/_cp", False),
        ("*", "in2", False),
        ("*.txt", "in/cp", False),
        ("*.parquet", "in/out", True),
        ("day=*/*", "in/cp", False),
        ("day=*/*", "in/day=1", True),
    ],
)
def test_a_spout_finds_places_of_which_it_would_read_files(glob, place, reads):
    spout = FileSpout("/data/in/", "text", glob=glob)
    assert spout.reads_in(f"/data/{place}", ["lock", "0.parquet"]) is reads


def test_hidden_and_other_files_are_left_alone(folder):
    for name in (".a.json", "_tmp/b.json", "c.txt", "d.json", "day=1/e.json", ".x/f.json"):
        put(folder, name, 10, b"{}\n")
    assert names(FileSpout(folder, "json", ROWS, glob="*.json").plan(None)) == [
        "d.json",
        "day=1/e.json",
    ]
    assert names(FileSpout(folder, "json", ROWS, glob="day=*/*").plan(None)) == ["day=1/e.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "the file a disappeared after it was planned"),
        (lambda path: path.write_bytes(b"a\nb\n"), "the file a grew from 2 to 4 bytes"),
        (lambda path: path.write_bytes(b"z\n"), "the file a was replaced after it was planned"),
    ],
)
def test_a_planned_file_that_changes_is_named(folder, change, words):
    spout = FileSpout(folder, "text")
    path = put(folder, "a", 10)
    put(folder, "b", 10)
    plan = again(spout.plan(None))
    spout.check(plan)
    change(path)
    with pytest.raises(SourceError, match=words):
        spout.check(plan)


def test_all_planned_files_that_change_are_named(folder, monkeypatch):
    """The command that leaves them out has them too, but no file whose name is the end of one."""
    spout = FileSpout(folder, "text")
    paths = [put(folder, name, 10) for name in ("a", "b", "d=1/a", "d=1/c", "e")]
    plan = again(spout.plan(None))
    for path in paths[2:]:
        path.unlink()
    paths[1].write_bytes(b"a\nb\n")
    with pytest.raises(SourceError) as changed:
        spout.check(plan)
    assert (
        "the file b grew from 2 to 4 bytes, the file d=1/a disappeared, the file d=1/c "
        "disappeared, the file e disappeared, each after it was planned"
    ) in str(changed.value)
    command = skip_command("/c", "s", "files", str(folder), [plan], str(changed.value)).split()
    assert sorted(command[5::2]) == ["b", "d=1/a", "d=1/c", "e"]
    monkeypatch.setattr("ackcore.spark.planned.file_spout._NAMED", 2)
    with pytest.raises(SourceError, match="d=1/a disappeared, and 2 more files changed, each aft"):
        spout.check(plan)


def test_a_file_that_changes_after_it_was_read_is_named(folder):
    spout = FileSpout(folder, "text")
    put(folder, "a", 10)
    plan = again(spout.plan(None))
    put(folder, "b", 11)
    put(folder, "a", 12, b"a\nb\n")
    with pytest.raises(SourceError, match=r"the file a was changed after it was read, .* 4 bytes"):
        spout.plan(plan)


def test_a_file_of_the_future_hides_no_other(folder):
    spout = FileSpout(folder, "text", lateness_s=60)
    put(folder, "a", 4_000_000_000)
    plan = again(spout.plan(None))
    (folder / "b").write_bytes(b"b\n")
    assert (names(plan), names(spout.plan(plan))) == (["a"], ["b"])


def test_links_to_directories_above_are_left_alone(folder):
    put(folder, "x/a", 10)
    for name in ("x/up", "x/again"):
        (folder / name).symlink_to(folder, target_is_directory=True)
    (folder / "y").symlink_to(folder / "x", target_is_directory=True)
    assert names(FileSpout(folder, "text").plan(None)) == ["x/a", "y/a"]


def test_any_name_is_read(folder):
    odd = [os.fsdecode(name) for name in (b"caf\xe9", b"a\nb", b"a%20b", b"day=1")]
    for name in odd:
        put(folder, name, 10)
    spout = FileSpout(folder, "text")
    plan = again(spout.plan(None))
    spout.check(plan)
    assert len(read(spout, plan)) == len(odd)
    (folder / odd[0]).unlink()
    with pytest.raises(SourceError, match=r"the file caf\\udce9 disappeared"):
        spout.check(plan)


def test_a_directory_that_is_not_there_may_come(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        FileSpout(tmp_path / "nowhere", "text").plan(None)
    said = r"no directory .*nowhere. Create it, or correct the path"
    with pytest.raises(SourceError, match=said):
        FileSpout(tmp_path / "nowhere", "text").bounded().plan(None)


def gz(content):
    # The content is part of names of tests, which must be equal in both workers.
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b"one\ntwo\r\n\nlast"),
        ("a.txt.gz", gz(b"one\ntwo\r\n\nlast")),
        ("a.txt.bz2", bz2.compress(b"one\ntwo\r\n\nlast")),
        ("a.TXT.GZ", gz(b"one\ntwo\r\n\nlast")),
        ("bom.txt", b"\xef\xbb\xbfone\ntwo\r\n\nlast"),
        ("a.txt.zst", pa.Codec("zstd").compress(b"one\ntwo\r\n\nlast", asbytes=True)),
        ("gz", gz(b"one\ntwo\r\n\nlast")),
        ("a.log.1", bz2.compress(b"one\ntwo\r\n\nlast")),
        ("a", pa.Codec("zstd").compress(b"one\ntwo\r\n\nlast", asbytes=True)),
        ("a.txt", pa.Codec("lz4").compress(b"one\ntwo\r\n\nlast", asbytes=True)),
    ],
)
def test_lines_of_text_are_read_plain_and_compressed(folder, name, content):
    found = rows_in(folder, "text", None, content, name)
    assert [row["value"] for row in found] == ["one", "two", "", "last"]


@pytest.mark.parametrize("content", [b"", b"B", b"BZh91AY", b"\x1f\x8b\n", b"(\xb5/"])
def test_lines_that_begin_nearly_like_compressed_ones_are_text(folder, content):
    put(folder, "a", 10, content)
    found = FileReader(str(folder), (("a",),), "text", pa.schema([("value", pa.string())]))
    values = [
        one
        for batch in found([pa.record_batch([pa.array([0])], ["id"])])
        for one in batch.column(0)
    ]
    assert [one.as_buffer().to_pybytes() for one in values] == content.splitlines()


def test_lines_that_cross_the_pieces_of_a_read_are_whole(folder, monkeypatch):
    monkeypatch.setattr("ackcore.spark.planned.file_reading.BLOCK_BYTES", 3)
    monkeypatch.setattr("ackcore.spark.planned.file_reading.ROWS", 2)
    lines = ["", "a", "bcdefgh", "ij"] * 3
    found = rows_in(folder, "text", None, "\n".join(lines).encode())
    assert [row["value"] for row in found] == lines


def test_a_line_that_is_not_utf8_keeps_its_bytes(folder):
    put(folder, "a", 10, b"caf\xe9\n")
    spout = FileSpout(folder, "text")
    assert names(spout.plan(None)) == ["a"]
    found = FileReader(spout._root, (("a",),), "text", spout.schema)
    (batch,) = found([pa.record_batch([pa.array([0])], ["id"])])
    assert batch.column(0).view(pa.binary()).to_pylist() == [b"caf\xe9"]


def test_a_line_of_text_is_bounded(folder, monkeypatch):
    monkeypatch.setattr("ackcore.spark.planned.file_reading.BLOCK_BYTES", 3)
    monkeypatch.setattr("ackcore.spark.planned.file_reading._LINE_BYTES", 9)
    assert len(rows_in(folder, "text", None, b"x" * 9 + b"\n")) == 1
    with pytest.raises(FileUnreadable, match=r"in/a cannot be read as text: .* more than 9 bytes"):
        rows_in(folder, "text", None, b"x" * 20 + b"\n")


def test_texts_of_csv_are_kept(folder):
    """Texts that Arrow takes for nulls by default, and lines within quotes of several blocks."""
    texts = ["NA", "null", "nan", "N/A", *("q\n7,q" * (n % 7) for n in range(60_000))]
    rows = [{"id": n, "name": text} for n, text in enumerate(texts)]
    lines = "".join(f'{row["id"]},"{row["name"]}"\n' for row in rows[4:])
    start = "id,name\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts[:4]))
    assert rows_in(folder, "csv", ROWS, (start + lines).encode()) == rows


@pytest.mark.parametrize(
    ("format", "content"),
    [
        ("json", b'{"d": "2026-03-29", "s": {"l": ["0001-01-01", null]}}\n{"d": null}\n'),
        ("csv", b"d\n2026-03-29\n\n"),
    ],
)
def test_dates_are_read(folder, format, content):
    nested = [("s", pa.struct([("l", pa.list_(pa.date32()))]))] * (format == "json")
    found = rows_in(folder, format, pa.schema([("d", pa.date32()), *nested]), content)
    assert found[0]["d"] == datetime.date(2026, 3, 29)
    if nested:
        assert found[0]["s"] == {"l": [datetime.date(1, 1, 1), None]}
        assert found[1] == {"d": None, "s": None}


TABLE = [{"id": 1, "name": "a"}, {"id": None, "name": ""}, {"id": 3, "name": None}]


def test_rows_of_each_format_are_the_same(folder):
    lines = "".join(json.dumps({**row, "more": [1]}) + "\n" for row in TABLE).encode()
    put(folder, "a.json", 1, lines)
    put(folder, "b.json.gz", 2, gz(b'{"name": "only"}\n'))
    put(folder, "c.json", 3, b"")
    spout = FileSpout(folder, "json", ROWS)
    assert read(spout, spout.plan(None), 2) == [*TABLE, {"id": None, "name": "only"}]

    assert rows_in(folder / "t", "csv", ROWS, b'more,name,id\n9,a,1\n9,"",\n9,,3\n') == TABLE

    (folder / "p").mkdir()
    table = pa.Table.from_pylist(TABLE, pa.schema([("name", pa.string()), ("id", pa.int32())]))
    pq.write_table(table.append_column("more", [[1, 2, 3]]), folder / "p/a.parquet")
    pq.write_table(pa.table({"name": ["only"]}), folder / "p/b.parquet")
    assert rows_in(folder / "p", "parquet", ROWS) == [*TABLE, {"id": None, "name": "only"}]
    named_as_by_spark = FileSpout(folder / "p", "parquet", ROWS.append(CORRUPT))
    assert len(named_as_by_spark.plan(None)["files"]) == 2


@pytest.mark.parametrize(
    ("name", "content", "format"),
    [
        ("a", b"PAR2", "parquet"),
        ("a", b"\n" * 400_000, "csv"),
        ("a.gz", b"no gzip", "json"),
        ("a.gz", gz(b'{"id": 1}\n' * 9999)[:-20], "json"),
        ("a", gz(b'{"id": 1}\n' * 9999)[:-20], "json"),
        ("a.xz", lzma.compress(b"a\n", preset=0), "text"),
        ("a.csv", "id\n1\n".encode("utf-16"), "csv"),
        ("a", b"PK\x03\x04", "json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder, name, content, format):
    with pytest.raises(FileUnreadable, match=f"in/{name} cannot be read as {format}: "):
        rows_in(folder, format, None if format == "text" else ROWS, content, name)


def test_a_file_that_cannot_be_reached_is_not_damaged(folder):
    """Another run may reach it."""
    (folder / "a").symlink_to("a")
    with pytest.raises(OSError, match="in/a cannot be reached: ") as failed:
        read(FileSpout(folder, "text"), {"files": [[10, "a", 1, ""]]})
    assert not isinstance(failed.value, FileUnreadable)


@pytest.mark.parametrize("error", [pa.ArrowMemoryError, pa.ArrowCancelled])
def test_a_file_for_which_there_is_no_memory_is_not_unreadable(folder, monkeypatch, error):
    def read_file(reader, name):
        raise error("no more")

    monkeypatch.setattr(FileReader, "_read", read_file)
    with pytest.raises(error, match="no more"):
        rows_in(folder, "json", ROWS, b"{}")


DAMAGED = {
    "json": [
        b"null",
        b"{no json",
        b'{"id": "x"}',
        b'{"id": 7, "name": "cut',
        b'{"id": 7, "name": "caf\xe9"}',
        b'{"id": 99999999999999999999}',
        b"{\x00}",
        b"[7]",
        b'{"name": "no id"}',
    ],
    "csv": [b"x,y", b"7", b"7,a,b", b"7,caf\xe9", b",no id", b'7,"a\nb",c'],
}


@pytest.mark.parametrize("format", DAMAGED)
@given(data=st.data())
def test_lines_that_cannot_be_read_are_rows_apart(tmp_path_factory, format, data):
    """Among good and blank lines, in their order, with their text and the number of the line."""
    folder = tmp_path_factory.mktemp("in")
    good = {"json": b'{"id": %d, "name": "a,b"}', "csv": b'%d,"a,b"'}[format]
    kinds = st.sampled_from([good, b"", *DAMAGED[format]])
    lines = [b"id,name"] * (format == "csv")
    wanted, at = [], 1 + len(lines)
    for n, line in enumerate(data.draw(st.lists(kinds, min_size=1, max_size=40))):
        lines.append(line % n if line is good else line)
        if line is good:
            wanted.append((n, "a,b", None, None))
        elif line:
            text = line.decode("utf-8", "backslashreplace")
            wanted.append((None, None, text, f"line {at} of a cannot be read: "))
        at += 1 + line.count(b"\n")
    if format == "csv" and data.draw(st.booleans()):
        lines.append(b'7,"open\n8,b')
        wanted.append((None, None, '7,"open\n8,b', f"line {at} of a cannot be read: a quote"))
    put(folder, "a", 1, b"\n".join(lines) + b"\n" * data.draw(st.integers(0, 1)))
    needed = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])
    spout = FileSpout(folder, format, needed)
    found = FileReader(spout._root, (("a",),), format, spout.emits)
    numbers = pa.record_batch([pa.array([0])], ["id"])
    rows = [tuple(row.values()) for batch in found([numbers]) for row in batch.to_pylist()]
    assert [row[:3] for row in rows] == [row[:3] for row in wanted]
    for (*_, said), (*_, start) in zip(rows, wanted, strict=True):
        assert said == start or said.startswith(start)


@pytest.mark.parametrize(
    ("format", "line", "reason"),
    [
        ("json", b'{"id": 1, "n": "x"}', 'column n must be int32, got "x"'),
        ("json", b'{"id": 1, "n": 1.5}', "column n must be int32, got 1.5"),
        ("json", b'{"id": 1, "t": "no"}', 'column t must be timestamp[us], got "no"'),
        ("json", b'{"id": 1, "d": "2026-02-30"}', 'column d must be date32[day], got "2026-02-30"'),
        ("json", b'{"id": 1, "d": 5}', "column d must be date32[day], got 5"),
        ("json", b'{"id": 1, "d": "caf\xe9"}', "Failed to parse string: 'caf"),
        ("json", b'{"id": 1, "n": "x"} 2', "JSON parse error: Column(/n) changed from number to "),
        ("json", b'{"id": 1, "n": {"a": "\\ud800"}}', r'column n must be int32, got {"a": "\ud800'),
        ("json", b'{"id": 1, "n": %b' % (b"[" * 99_999), "JSON parse error: Column(/n) changed"),
        ("json", b'{"n": 1}', "column id is missing or null, and its schema allows no nulls"),
        ("json", b'{"id": 1, "n": 7, "t": "caf\xe9"}', "Failed to convert JSON to timestamp[us]"),
        ("json", b'{"id": 1, "s": "caf\xe9"}', "column s: Invalid UTF8 sequence"),
        ("json", b"[1]", "the line must be a JSON object, got array"),
        ("csv", b"s,x,,1,,", "column n: CSV conversion error to int32: invalid value 'x'"),
        ("csv", b"s,1,no,1,,", "column t: CSV conversion error to timestamp[us]: invalid value 'n"),
        ("csv", b"%b,,,1,,,," % (b"x" * 9999), "CSV parse error: Expected 6 columns, got 8"),
        ("csv", b",%b,,1,," % (b"x" * 9999), "column n: CSV conversion error to int32: invalid v"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_the_reason_of_a_damaged_line_names_the_column(folder, format, line, reason):
    """It has the type and the value too, and is not longer than other dead letters' messages."""
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), nullable=False),
            ("n", pa.int32()),
            ("t", pa.timestamp("us")),
            ("s", pa.string()),
            ("d", pa.date32()),
        ]
    )
    content = b"s,n,t,id,d,more\n" * (format == "csv") + line
    (row,) = rows_in(folder, format, schema, content)
    said = row["_corrupt_reason"]
    assert said.startswith(f"line {1 + (format == 'csv')} of a cannot be read: {reason}")
    assert len(said) <= 4096


def test_a_long_line_and_a_header_alone_can_be_read(folder, monkeypatch):
    monkeypatch.setattr("ackcore.spark.planned.line_files.BLOCK_BYTES", 1000)
    put(folder, "a.csv", 1, b"id,name\n1,%b\n" % (b"x" * 5000))
    put(folder, "b.csv", 2, b"\n" * 400_000 + b"id,name")
    put(folder, "a.json", 1, b'{"id": 1, "name": "%b"}\n' % (b"x" * 5000))
    for format in ("csv", "json"):
        spout = FileSpout(folder, format, ROWS, glob=f"*.{format}")
        assert read(spout, spout.plan(None)) == [{"id": 1, "name": "x" * 5000}]


def test_nulls_in_a_column_without_nulls_are_refused(folder):
    needed = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"id": pa.array([1, None], pa.int64())}), folder / "a")
    with pytest.raises(
        FileUnreadable, match=r"in/a cannot be read as parquet: .* id is missing or null"
    ):
        rows_in(folder, "parquet", needed)


def test_columns_that_occur_twice_or_not_at_all_are_refused(folder):
    """A CSV file without a header has other names of columns, too."""
    pq.write_table(pa.table([[1], [2]], names=["id", "id"]), folder / "twice.parquet")
    pq.write_table(pa.table([[1]], names=["ID"]), folder / "none.parquet")
    put(folder, "twice.csv", 10, b"id,name,id\n1,a,2\n")
    put(folder, "none.csv", 10, b"1,a\n2,b\n")
    for format in ("parquet", "csv"):
        for kind, words in (("twice", "the column id 2 times; rename"), ("none", "none of the")):
            spout = FileSpout(folder, format, ROWS, glob=f"{kind}.{format}")
            with pytest.raises(FileUnreadable, match=f"{kind}.{format} cannot be .* {words}"):
                read(spout, spout.plan(None))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"id,NAME,x", r"the header has no column 'name', but 'NAME', 'x'; .* add the others to"),
        (b"name", "the header has no column 'id', but 'name'; .* declare it nullable"),
        (b"Id,name", "the header has no column 'id', but 'Id'; .* declare it nullable and add the"),
        (b"id", None),
    ],
)
def test_a_csv_file_that_may_have_misnamed_columns_is_refused(folder, header, words):
    """The values of such columns would be lost. A file that only has fewer columns is read."""
    content = header + b"\n7" + b",b" * header.count(b",") + b"\n"
    schema = ROWS.set(0, ROWS.field(0).with_nullable(False))
    if words is None:
        assert rows_in(folder, "csv", schema, content) == [{"id": 7, "name": None}]
        return
    with pytest.raises(FileUnreadable, match=f"in/a cannot be read as csv: ValueError: {words}"):
        rows_in(folder, "csv", schema, content)


_DAY = datetime.datetime(2026, 1, 1)
STRUCT = pa.struct([("b", pa.float32()), ("c", pa.int64())])
X, X_REQUIRED = pa.struct([("x", pa.int64())]), pa.struct([pa.field("x", pa.int32(), False)])


def map_of(kind):
    return pa.map_(pa.string(), kind)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1.5, 1.239]), pa.decimal128(5, 2)),
        (pa.array([0.5, 0.1]), pa.float32()),
        (pa.array([0.5, 1e39]), pa.float32()),
        (pa.array(["0.5", "1e39"]), pa.float32()),
        (pa.array([-0.0]), pa.int64()),
        (pa.array([1.5]), pa.int64()),
        (pa.array([2**31]), pa.int32()),
        (pa.array([1, 2]), pa.bool_()),
        (pa.array([1]), pa.timestamp("us")),
        (pa.array([1]), pa.date32()),
        (pa.array([_DAY]), pa.int64()),
        (pa.array([_DAY, _DAY.replace(hour=5)]), pa.date32()),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([b"a"]), pa.int64()),
        (pa.array([None, [0.5, None, 0.1]]), pa.list_(pa.float32())),
        (pa.array([None, {"a": 1, "b": 0.1}]), STRUCT),
        (pa.array([[("k", 0.1)]], map_of(pa.float64())), map_of(pa.float32())),
    ],
    ids=str,
)
def test_a_parquet_file_whose_values_do_not_fit_the_schema_is_refused(folder, column, kind):
    """Arrow rounds such numbers, takes them for times, or cuts the time of day."""
    pq.write_table(pa.table({"x": column}), folder / "a")
    there, schema = pq.read_schema(folder / "a")[0].type, pa.schema([("x", kind)])
    declared = FileSpout(folder, "parquet", schema).schema[0].type
    with pytest.raises(FileUnreadable, match=r"/a cannot be read as parquet: ValueError") as caught:
        rows_in(folder, "parquet", schema)
    assert f"column x is {there} in the file" in str(caught.value)
    assert f"do not fit the schema's {declared}: " in str(caught.value)
    fits = "string" if there == pa.timestamp("ns") else there  # Spark has no nanoseconds
    assert f". Declare it as {fits}, and convert" in str(caught.value)
    if fits != there:
        rows = rows_in(folder, "parquet", pa.schema([("x", pa.string())]))
        assert [row["x"] for row in rows] == ["1970-01-01 00:00:00.000000001"]


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1, None, -(2**31)], pa.int32()), pa.int64()),
        (pa.array([1, 2], pa.uint8()), pa.int16()),
        (pa.array([1, 2]), pa.float64()),
        (pa.array([0, 1]), pa.bool_()),
        (pa.array([0.1, float("inf"), float("nan"), -0.0, None], pa.float32()), pa.float64()),
        (pa.array([1.5, float("inf")]), pa.float32()),
        (pa.array([1.25, -0.5]), pa.decimal128(5, 2)),
        (pa.array([decimal.Decimal("1.2")]), pa.decimal128(9, 3)),
        (pa.array([_DAY.date()], pa.date64()), pa.date32()),
        (pa.array([_DAY]), pa.date32()),
        (pa.array([_DAY.date()]), pa.timestamp("us")),
        (pa.array([_DAY], pa.timestamp("ns", "Asia/Tokyo")), pa.timestamp("us", "UTC")),
        (pa.array([_DAY], pa.timestamp("ms")), pa.timestamp("us", "UTC")),
        (pa.array([_DAY], pa.timestamp("us", "UTC")), pa.timestamp("us")),
        (pa.array([_DAY]), pa.string()),
        (pa.array(["2026-01-01"]), pa.date32()),
        (pa.array(["0.1", "inf"]), pa.float32()),
        (pa.array(["a", None, "a"]).dictionary_encode(), pa.string()),
        (pa.array([b"a", b"b"]).dictionary_encode(), pa.binary()),
        (pa.array(["a"], pa.large_string()), pa.string()),
        (pa.array([b"ab"], pa.binary(2)), pa.binary()),
        (pa.array([b"a"]), pa.string()),
        (pa.nulls(2), pa.date32()),
        (pa.nulls(2), pa.struct([("a", pa.int64())])),
        (pa.nulls(2), pa.map_(pa.string(), pa.int64())),
        (pa.array([[], None], pa.list_(pa.null())), pa.list_(pa.struct([("a", pa.int64())]))),
        (pa.array([datetime.time(1)]), pa.string()),
        (pa.array([np.float16(1.5)]), pa.float32()),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)), pa.list_(pa.int64())),
        (pa.array([None, {"a": 1, "b": 0.5}]), STRUCT),
        (pa.array([[("k", {"x": 1})], None], map_of(X_REQUIRED)), map_of(X)),
    ],
    ids=str,
)
def test_a_parquet_file_of_other_types_is_read_if_its_values_fit(folder, column, kind):
    pq.write_table(pa.table({"x": column}), folder / "a")
    found = [row["x"] for row in rows_in(folder, "parquet", pa.schema([("x", kind)]))]
    assert repr(found) == repr(column.cast(kind).to_pylist())


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
@pytest.mark.parametrize("format", ["json", "csv"])
def test_a_number_that_is_too_large_is_a_corrupt_line(folder, format, kind):
    """Arrow would take infinity for it, which another line may have."""
    texts = ["0.1", "1e39" if kind == pa.float32() else "1e400", "Infinity", "-1.5"]
    lines = [f'{{"x": {text}}}' for text in texts] if format == "json" else ["x", *texts]
    schema, content = pa.schema([("x", kind)]), "\n".join(lines).encode()
    good, bad, *others = rows_in(folder, format, schema, content)
    assert good["x"] == pa.scalar(0.1, kind).as_py()
    assert [row["x"] for row in others] == [float("inf"), -1.5]
    assert (bad["x"], bad["_corrupt_record"]) == (None, lines[1 + (format == "csv")])
    assert "too large" in bad["_corrupt_reason"] or "too big" in bad["_corrupt_reason"]


def test_a_number_in_a_list_that_is_too_large_is_a_corrupt_line(folder):
    schema = pa.schema([("x", pa.list_(pa.float32()))])
    good, bad = rows_in(folder, "json", schema, b'{"x": [1.5, null]}\n{"x": [0.5, -1e39]}\n')
    assert (good["x"], bad["x"]) == ([1.5, None], None)
    said = "line 2 of a cannot be read: column x has a number too large for list<"
    assert bad["_corrupt_reason"].startswith(said)


def test_times_of_every_year_are_read(folder):
    """Spark writes times as INT96 by default."""
    times = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (1, 2026, 9999)]
    table = pa.table({"time": pa.array(times, pa.timestamp("us", "UTC"))})
    pq.write_table(table, folder / "a", use_deprecated_int96_timestamps=True)
    assert [row["time"] for row in rows_in(folder, "parquet", table.schema)] == times


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.string(), pa.int64()])
@pytest.mark.parametrize("at", ["x", "l"])
@pytest.mark.parametrize("time", [1, -1, 2**62 + 1])
def test_times_of_int96_whose_nanoseconds_would_be_cut_are_refused(folder, kind, at, time):
    """Other writers than Spark store such times. The file is read if another column has them."""
    listed, ns = pa.list_(pa.timestamp("ns")), pa.timestamp("ns")
    good = {"x": pa.array([None, 10**18], ns), "l": pa.array([[], [5000, None]], listed)}
    bad = {"x": pa.array([10**18, time], ns), "l": pa.array([None, [5000, time]], listed)}
    table = pa.table({**good, at: bad[at], "n.m": [1, 2]})
    pq.write_table(table, folder / "a", use_deprecated_int96_timestamps=True)
    wanted = {"x": kind, "l": pa.list_(kind), "n.m": pa.int64()}
    with pytest.raises(FileUnreadable, match=f"column {at} has times with nanoseconds"):
        rows_in(folder, "parquet", pa.schema(wanted.items()))
    del wanted[at]
    if kind != pa.int64():
        assert len(rows_in(folder, "parquet", pa.schema(wanted.items()))) == 2


@pytest.mark.parametrize(
    "about", [{"org.apache.spark.legacyDateTime": ""}, {"org.apache.spark.version": "2.4.8"}]
)
def test_old_dates_of_another_calendar_are_refused(folder, about):
    """Day -171655 is 1500-01-01 in the calendar of such files, and 1500-01-10 in Arrow's."""
    columns = [pa.array([day], pa.date32()) for day in (-141_428, -141_427)]
    times = (-2_208_988_800_001, -2_208_988_800_000)
    columns += [pa.array([time], pa.timestamp("ms")) for time in times]
    columns += [pa.array([[[("k", {"x": datetime.date(1500, 1, 1)})]]], NESTED)]
    for n, column in enumerate([*columns, pa.array([None], NESTED)]):
        schema = pa.schema([("at", column.type)])
        pq.write_table(pa.table([column], schema.with_metadata(about)), folder / "a")
        if n % 2 == 0:
            with pytest.raises(FileUnreadable, match=r"column at has a date .* set to CORRECTED"):
                rows_in(folder, "parquet", schema)
        else:
            assert len(rows_in(folder, "parquet", schema)) == 1


def test_a_plan_has_the_same_partitions_for_each_driver(spark, folder):
    """The places of records are those in partitions, also for a driver with other cores."""
    for n in range(7):
        put(folder, str(n), 10, b"%d\n" % n)
    for source in (FileSpout(folder, "text"), RateSpout(7)):
        plan = again(source.divided(source.plan(None), 3))
        frame = source.read(spark, plan)
        parts = frame.selectExpr("spark_partition_id() AS part").distinct().count()
        assert (parts, frame.count()) == (3, 7)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=30), st.integers(1, 9))
def test_files_are_dealt_out_whole_in_order_and_about_evenly(sizes, tasks):
    files = [(str(n), size) for n, size in enumerate(sizes)]
    found = list(dealt(files, tasks))
    assert [name for some in found for name in some] == [name for name, _ in files]
    assert all(found)
    assert len(found) <= tasks


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("/in", "xml"), ValueError, "format must be one of text, json, csv, parquet, got 'xml'"),
        (("/in", "json"), ValueError, "schema must be given for json"),
        (("/in", "text", ROWS), ValueError, "schema must not be given for text"),
        (
            ("/in", "csv", ROWS.append(CORRUPT)),
            ValueError,
            "not have the column _corrupt_record: a",
        ),
        (("/in", "parquet", REASONS), ValueError, "must not have the column _corrupt_reason: ack"),
        (("/in", "json", pa.schema({"d": pa.duration("s")})), ValueError, "conversion to duration"),
        (
            ("/in", "json", pa.schema({"t": pa.time64("us")})),
            ValueError,
            "types that Spark and json",
        ),
        (
            ("/in", "json", pa.schema({"m": pa.map_(pa.string(), pa.date32())})),
            ValueError,
            r"column 'm' has map<string, date32\[day\]>, which cannot be read from JSON",
        ),
        (("/in", "csv", pa.schema({"l": pa.list_(pa.int8())})), ValueError, "conversion to list"),
        (("/in", "csv", pa.schema({"f": pa.float16()})), ValueError, "types that Spark and csv"),
        (("/in", "json", "id bigint"), TypeError, "must be a .*Schema, got str 'id bigint'; "),
        (("ftp://in", "text"), ValueError, "path must be a path"),
        (("hdfs://namenode:8020", "text"), ValueError, "path must name a path in the NameNode"),
    ],
)
def test_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        FileSpout(*arguments)


@pytest.mark.parametrize(
    ("name", "value"), [("glob", ""), ("max_files_per_batch", 0), ("lateness_s", -1)]
)
def test_settings_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must be "):
        FileSpout("/in", "text", **{name: value})


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (FileSpout, "globs", "glob"),
        (DeltaSpout, "skip_change", "skip_changes"),
        (RateSpout, "per_second", "per_s"),
    ],
)
def test_a_misspelt_argument_of_a_spout_is_named(kind, name, hint):
    words = rf"{kind.__name__}\(\) has no argument '{name}'; did you mean '{hint}'\?"
    with pytest.raises(TypeError, match=words):
        kind(**{name: 1})


def test_files_are_found_quickly_among_many(folder):
    """Not a figure, which bench_topology.py has: ten thousand files, and a hundred are new."""
    for n in range(10_000):
        put(folder, f"{n:05}", 1000 + n // 100)
    spout = FileSpout(folder, "text")
    plan = again(spout.plan(None))
    for n in random.sample(range(100_000), 100):
        put(folder, f"new-{n}", 2000)
    assert len(spout.plan(plan)["files"]) == 100


def test_numbers_come_at_their_rate_and_end():
    now = [100.0]
    spout = RateSpout(25, per_s=10, max_rows_per_batch=20, clock=lambda: now[0])
    assert spout.plan(None) is None
    now[0] += 0.5
    plan = again(spout.plan(None))
    assert (plan["from"], plan["to"]) == (0, 5)
    now[0] += 10
    later = RateSpout(25, per_s=10, max_rows_per_batch=20, clock=lambda: now[0])
    plan = again(later.plan(plan))
    assert (plan["from"], plan["to"]) == (5, 25)
    assert later.plan(plan) is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, r"must have rows or per_s, got neither; RateSpout\(100\)"),
        ({"rows": -1}, "rows must be"),
        ({"per_s": 0}, "per_s must be"),
        ({"rows": 1, "max_rows_per_batch": 0}, "max_rows_per_batch must be"),
    ],
)
def test_what_is_no_rate_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        RateSpout(**settings)


def test_a_bucket_that_is_missing_or_away_is_an_error(bucket, s3, monkeypatch):
    """An error that may pass, as a stream waits for a source that is away."""
    monkeypatch.setattr("ackcore.spark.stores.objects._RETRY", {"max_retries": 0})
    with pytest.raises(ConnectionError, match="NoSuchBucket"):
        FileSpout(bucket.replace("s3://", "s3://not-"), "text").plan(None)
    assert FileSpout(bucket, "text").plan(None) is None
    s3.fail(SLOW_DOWN, "GET")
    with pytest.raises(ConnectionError, match="could not be read"):
        FileSpout(bucket, "text").plan(None)


def test_objects_that_stand_for_directories_are_no_files(bucket, s3, s3_server):
    host = http.client.HTTPConnection("127.0.0.1", s3_server.port)
    host.request("PUT", f"/{bucket.removeprefix('s3://')}/day=1/", b"")
    assert host.getresponse().status == 200
    files = ObjectStore(bucket)
    files.put("day=1/a b%20c=é.txt", b"a\n")
    spout = FileSpout(bucket, "text")
    plan = again(spout.plan(None))
    spout.check(plan)
    assert names(plan) == ["day=1/a b%20c=é.txt"]
    assert read(spout, plan) == [{"value": "a"}]


@pytest.mark.parametrize("name", ["a//b", "/a", "a/./b", "../b"])
def test_an_object_with_an_empty_part_in_its_name_is_named(bucket, s3, s3_server, name):
    """obstore fails to list the whole bucket, until the object is renamed."""
    host = http.client.HTTPConnection("127.0.0.1", s3_server.port)
    host.request("PUT", f"/{bucket.removeprefix('s3://')}/{name}", b"a\n")
    assert host.getresponse().status == 200
    said = f'if a name has an empty part, .* as "some/place/{name}" has. Rename or delete'
    with pytest.raises(ConnectionError, match=said):
        FileSpout(bucket, "text").plan(None)


def test_files_of_hdfs_are_planned_read_and_compared(spark, hdfs, hdfs_place):
    root = hdfs_place.removeprefix(f"hdfs://{hdfs.host}")
    hdfs_native = pytest.importorskip("hdfs_native")
    client = hdfs_native.Client(f"hdfs://{hdfs.host}")

    def put_there(name, time_s, content):
        options = hdfs_native.WriteOptions(overwrite=True, create_parent=True)
        with client.create(f"{root}/{name}", options) as file:
            file.write(content)
        client.set_times(f"{root}/{name}", time_s * 1000, time_s * 1000)

    spout = FileSpout(hdfs_place, "text", max_files_per_batch=2)
    assert spout.plan(None) is None
    put_there("b.gz", 10, gz(b"one\ntwo\n"))
    put_there("day=1/a b%20c=\u00e9", 20, b"three\n")
    put_there("c", 30, b"four\n")
    put_there("empty", 5, b"")
    for hidden in (".d", "_temporary/e", "f._COPYING_"):
        put_there(hidden, 5, b"hidden\n")
    plan = again(spout.divided(spout.plan(None), 2))
    assert names(plan) == ["b.gz", "day=1/a b%20c=\u00e9"]
    spout.check(plan)
    found = spout.read(spark, plan).collect()
    assert sorted(row.value for row in found) == ["one", "three", "two"]
    later = again(spout.plan(plan))
    assert (names(later), spout.plan(later)) == (["c"], None)
    put_there("c", 30, b"four\nfive\n")
    with pytest.raises(SourceError, match="the file c grew from 5 to 10 bytes"):
        spout.check(later)
    put_there("c", 31, b"4444\n")
    with pytest.raises(SourceError, match="the file c was replaced"):
        spout.check(later)
    with pytest.raises(SourceError, match="the file c was changed after it was read"):
        spout.plan(later)
    client.delete(f"{root}/c")
    with pytest.raises(SourceError, match="the file c disappeared"):
        spout.check(later)
