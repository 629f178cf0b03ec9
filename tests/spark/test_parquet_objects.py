"""Parquet files in a bucket: the rows of a micro-batch once, whatever S3 answers."""

from __future__ import annotations

import itertools
import json
import sys
from contextvars import Context
from io import BytesIO

import accepted_rows
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from accepted_rows import row_file
from pyspark import cloudpickle
from s3_server import ERROR_AFTER, LOST, SLOW_DOWN
from streams import in_line

from ackcore.spark.base.atomic import fenced
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse, StateError
from ackcore.spark.query import run_batch
from ackcore.spark.sinks import parquet_directory, parquet_objects
from ackcore.spark.sinks.parquet import to_parquet
from ackcore.spark.stores.opening import open_store
from ackcore.spark.tasks.row_files import ROOT
from ackcore.topology import BasicBolt

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS = pa.schema([("word", pa.string())])


@pytest.fixture
def files(tmp_path):
    """Four files with rows of roots 1 to 8, and words a to h."""
    pairs = (("a", 1), ("b", 2)), (("c", 3), ("d", 4)), (("e", 5), ("f", 6)), (("g", 7), ("h", 8))
    return [row_file(tmp_path, rows, n, WORDS) for n, rows in enumerate(pairs)]


def accepted(files, nonacked=(), batch_id=0, **changes):
    return accepted_rows.accepted(files, batch_id, nonacked, sink="out", **changes)


@pytest.fixture
def found(bucket):
    """Return the words of a micro-batch, and how many files have any."""

    def look(batch_id=0, place=bucket):
        store = open_store(place, "path")
        keys = [entry.key for entry in store.list(f"batch_id={batch_id}")]
        tables = [pq.read_table(BytesIO(store.get(key).data)) for key in keys]
        assert {table.schema.remove_metadata() for table in tables} <= {WORDS}
        with_rows = [table["word"].to_pylist() for table in tables if len(table)]
        return "".join(sorted(word for words in with_rows for word in words)), len(with_rows)

    return look


def test_rows_of_a_micro_batch_below_a_prefix_of_its_own(bucket, s3, files, found):
    sink = to_parquet(bucket, compression="zstd")
    sink.claim("out", "abc", "/cp")
    s3.requests.clear()
    sink.write(accepted(files, [2]))
    assert [request.method for request in s3.requests] == ["PUT", "PUT"]
    sink.write(accepted(files[:1], batch_id=1))
    assert found(0) == ("acdefgh", 1)
    assert found(1) == ("ab", 1)
    assert repr(sink) == f"to_parquet({bucket!r})"
    sink.write(accepted(files, range(1, 9), batch_id=2))
    assert found(2) == ("", 0)


def test_a_row_whose_time_is_too_far_for_microseconds_is_refused(bucket, tmp_path):
    schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("s"))])
    file = row_file(tmp_path, [(1, 0, None), (2, 2**45, None)], schema=schema)
    why = accepted_rows.written_without_refused(to_parquet(bucket), accepted([file]))
    assert why == {(0, 1): "the value of column 'at' does not fit into timestamp[us]"}


def test_a_row_whose_date64_is_too_far_for_days_of_32_bits_is_refused(bucket, tmp_path):
    """Arrow would write 1970-01-01."""
    schema = pa.schema([("at", pa.date64()), (ROOT, pa.int64())])
    days = pa.array([1, 2**33, -(2**33)], pa.int64())
    at = pc.multiply(days, 86_400_000).cast(pa.date64())
    file = accepted_rows.columns_file(tmp_path, schema, [at, [None] * 3])
    why = accepted_rows.written_without_refused(to_parquet(bucket), accepted([file]))
    assert why == {
        (0, at): "the value of column 'at' does not fit into date32[day]" for at in (1, 2)
    }


@pytest.mark.parametrize(
    ("kind", "nested"),
    [
        (pa.list_(pa.timestamp("s"), 1), lambda at: [at]),
        (pa.large_list(pa.timestamp("s")), lambda at: [at]),
        (pa.struct([("at", pa.timestamp("s", "UTC"))]), lambda at: {"at": at}),
        (
            pa.map_(pa.string(), pa.struct([("at", pa.timestamp("ms"))])),
            lambda at: {"k": {"at": at}},
        ),
        (pa.map_(pa.timestamp("s"), pa.int8()), lambda at: {at: 1}),
        (pa.list_(pa.date64()), lambda at: [at]),
        (pa.struct([("f", pa.map_(pa.string(), pa.date64()))]), lambda at: {"f": {"k": at}}),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_a_row_with_a_far_time_in_a_nested_type_is_refused(bucket, tmp_path, kind, nested):
    """Before 25, pyarrow writes another time."""
    days = [0, 2**33 * 86_400_000]
    at = pa.array([None, None], pa.int64())
    file = accepted_rows.columns_file(
        tmp_path,
        pa.schema([("at", kind), (ROOT, pa.int64())]),
        [pa.array(map(nested, days), kind), at],
    )
    why = accepted_rows.written_without_refused(to_parquet(bucket), accepted([file]))
    assert list(why) == [(0, 1)]
    assert why[0, 1].startswith("the value of column 'at' does not fit into ")


@pytest.fixture
def by_tasks(spark, tasks_reach, monkeypatch):
    monkeypatch.setattr(parquet_directory, "DRIVER_ROWS", -1)
    monkeypatch.setattr(parquet_objects, "_PART_BYTES", 1)
    return spark


def test_tasks_write_the_same_objects_however_often(bucket, files, found, by_tasks):
    """Two attempts of one part, or of another driver, have one name."""
    sink = to_parquet(bucket)
    for _ in range(2):
        sink.write(accepted(files, [1, 2], spark=by_tasks))
        assert found() == ("cdefgh", 3)  # the first file has no row that counts


@pytest.mark.parametrize("lagging", [False, True])
def test_other_rows_take_the_place_of_those_before(bucket, s3, files, found, by_tasks, lagging):
    """After a restored checkpoint no list is needed to find the objects."""
    sink = to_parquet(bucket)
    sink.write(accepted(files, spark=by_tasks))
    s3.lagging = lagging
    sink.write(accepted(files[1:], [3], spark=by_tasks))
    sink.write(accepted(files[2:], [6], spark=by_tasks))
    s3.lagging = False
    assert found() == ("egh", 2)
    sink.write(accepted(files, spark=by_tasks))
    assert found() == ("abcdefgh", 4)


def test_what_died_amid_a_replacement_is_finished(bucket, files, found, monkeypatch):
    sink = to_parquet(bucket)
    sink.write(accepted(files))
    with monkeypatch.context() as patch:
        put = sink._store.put
        patch.setattr(sink._store, "put", lambda *to, **on: put(*to, **on) if on else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sink.write(accepted(files, [8]))
    assert found() == ("abcdefgh", 1)
    to_parquet(bucket).write(accepted(files, [8]))
    assert found() == ("abcdefg", 1)


def test_what_died_in_the_sink_is_written_once(bucket, files, found, failing_at):
    with failing_at("in-sink"):
        to_parquet(bucket).write(accepted(files))
    to_parquet(bucket).write(accepted(files))
    assert found() == ("abcdefgh", 1)


@pytest.mark.parametrize("how", [LOST, ERROR_AFTER, SLOW_DOWN])
@pytest.mark.parametrize("nth", [0, 1])
def test_a_put_that_fails_costs_nothing(bucket, s3, files, found, how, nth):
    """The note's or the file's, whether or not it went through."""
    puts = iter(range(100))
    s3.fail(how, lambda request: request.method == "PUT" and next(puts) == nth)
    to_parquet(bucket).write(accepted(files, [1]))
    to_parquet(bucket).write(accepted(files, [1]))
    assert found() == ("bcdefgh", 1)
    assert next(puts) == nth + 1  # the fault came to pass


def test_a_driver_that_lost_its_checkpoint_writes_nothing(bucket, s3, files, found):
    def lost():
        raise CheckpointInUse("taken over")

    with fenced(lost), pytest.raises(CheckpointInUse):
        to_parquet(bucket).write(accepted(files))
    assert not s3.requests


@pytest.mark.parametrize("then", ["takes over", "takes over, and dies"])
@pytest.mark.parametrize("earlier", [None, [4], [2, 3]])
def test_a_driver_that_sleeps_before_any_request_puts_no_rows_beside_the_next_ones(
    bucket, s3, files, found, earlier, then
):
    """It has refused one row of the micro-batch, and who takes over two others."""
    for n in itertools.count(1):
        place, left, over = f"{bucket}/{n}", itertools.count(1), []
        if earlier is not None:
            to_parquet(place).write(accepted(files, earlier))

        def take_over(request, n=n, place=place, left=left, over=over):
            if next(left) == n:
                s3.before = None
                over.append(request)
                if then == "takes over, and dies":
                    Context().run(dies_before_it_puts_rows, place)
                Context().run(to_parquet(place).write, accepted(files, [2, 3]))

        def dies_before_it_puts_rows(place):
            sink = to_parquet(place)
            sink._store.put_file = lambda *to, **on: 1 / 0
            with pytest.raises(ZeroDivisionError):
                sink.write(accepted(files, [2, 3]))

        def fence(over=over):
            if over:
                raise CheckpointInUse("was taken over")

        s3.before = take_over
        try:
            with fenced(fence):
                to_parquet(place).write(accepted(files, [1]))
        except StateError:
            assert over
        s3.before = None
        if not over:
            break
        assert found(place=place) == ("adefgh", 1), f"stopped at {n}"
        note = json.loads(open_store(place, "path").get("_ackcore/batch_id=0.json").data)
        fingerprint = accepted(files, [2, 3]).fingerprint()
        assert note["content"].partition("-")[0] == fingerprint, f"stopped at {n}"
    assert n > 2


def test_rows_that_come_and_go_and_come_again(bucket, files, found):
    sink = to_parquet(bucket)
    for nonacked, words in [([1], "bcdefgh"), ([2], "acdefgh"), ([1], "bcdefgh"), ([1], "bcdefgh")]:
        sink.write(accepted(files, nonacked))
        assert found() == (words, 1)
    # By another driver, too.
    to_parquet(bucket).write(accepted(files, [2]))
    assert found() == ("acdefgh", 1)


def test_a_task_that_was_given_up_and_wakes_puts_no_rows(bucket, files, found):
    """An attempt at rows of which some were refused afterwards, by the same driver."""
    sink, late = to_parquet(bucket), []
    writer = sink._writer

    def held_up(parts, of):
        late.append(writer(parts, of))
        return lambda number, rows: None

    sink._writer = held_up
    sink.write(accepted(files))
    sink._writer = writer
    sink.write(accepted(files, [8]))
    with pytest.raises(CheckpointInUse, match=r"micro-batch 0 in .* was written with other rows"):
        late[0](0)
    assert found() == ("abcdefg", 1)


def test_a_damaged_note_names_no_files(tmp_path):
    store = open_store(tmp_path, "path")
    store.put("_ackcore/batch_id=0.json", b"{")
    with pytest.raises(CheckpointInUse, match="was written with other rows"):
        parquet_objects._check_announced(store, 0, parquet_objects.ParquetParts("a", 1))


def test_the_same_rows_in_other_bytes_are_fine(bucket, files, found):
    """Write the files as another version of the library does."""
    to_parquet(bucket, compression="zstd").write(accepted(files))
    to_parquet(bucket, compression="none").write(accepted(files))
    assert found() == ("abcdefgh", 1)


def test_rows_that_nobody_claimed_are_somebody_elses(bucket):
    open_store(bucket, "path").put("batch_id=0/part.parquet", b"rows")
    with pytest.raises(CheckpointForeign, match="its own directory"):
        to_parquet(bucket).claim("out", "abc", "/cp")


def test_two_that_claim_at_once_do_not_both_get_it(bucket, s3):
    rival = {"deployment": "def", "sink": "out", "checkpoint": "/other"}

    def first(request):
        if request.method == "PUT":
            s3.before = None
            open_store(bucket, "path").put("_ackcore.json", json.dumps(rival).encode())

    s3.before = first
    with pytest.raises(CheckpointForeign, match="sink 'out' of the checkpoint /other"):
        to_parquet(bucket).claim("out", "abc", "/cp")


class Keep(BasicBolt):
    outputs = pa.schema([("word", pa.string())])

    def execute(self, input, out):
        if input["word"] == "bad":
            raise ValueError("bad")
        out.emit((input["word"],))


def test_a_run_writes_what_was_acked(spark, tasks_reach, bucket, found, tmp_path):
    lines = spark.createDataFrame([("x",), ("bad",), ("y",)], "word string")
    topology = in_line({"lines": lines, "keep": Keep()}, to_parquet(bucket), max_attempts=1)
    counts = run_batch(topology, spark, tmp_path / "cp")
    assert (counts.acked, counts.dead) == (2, 1)
    assert found() == ("xy", 1)
