"""When millions of a micro-batch fail, the driver holds their roots and little besides."""

from __future__ import annotations

import contextlib
import tracemalloc
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import BAD, SLOW, died, tracked, write_table
from hypothesis import given
from hypothesis import strategies as st

from ackcore.spark.base import checksummed, root_ids
from ackcore.spark.base import letter_columns as letter_files
from ackcore.spark.base.reasons import FAILED
from ackcore.spark.base.root_ids import distinct, in_order, in_ranges
from ackcore.spark.checkpoint.dead_records import Dead, DeadFile
from ackcore.spark.checkpoint.decisions import ROOT_IDS, BatchDecision, nonacked_of
from ackcore.spark.checkpoint.table_cache import TableCache
from ackcore.spark.checkpoint.waiting import Waiting
from ackcore.spark.dead_letters.checkpoints import letters_at
from ackcore.spark.dead_letters.letter_files import read_letters
from ackcore.spark.dead_letters.letter_store import files_of
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine.causes import causes
from ackcore.spark.engine.check import Disagreement, check_found
from ackcore.spark.engine.decide import failed_roots
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.run_files import read_table_at
from ackcore.spark.tasks import row_files
from ackcore.spark.tasks.failed_rows import FailedRows
from ackcore.spark.tasks.row_files import COUNTS, PLACE, ROOT_ID, among
from ackcore.spark.tasks.task import (
    PICKED,
    RESULT_SCHEMA,
    from_stream,
    result_batch,
    results_in,
    to_stream,
)
from ackcore.topology.tuples import Reason

IDS = st.lists(st.integers(-3, 3), max_size=12).map(lambda ids: np.array(ids, np.int64))


def written(*of_tasks):
    """The reports of tasks about written records: their roots, and places among those due."""
    picked = []
    for roots, places in of_tasks:
        columns = [pa.array(roots, pa.int64()), places, pa.array(np.ones(len(roots), np.bool_))]
        table = pa.table(dict(zip((ROOT_ID, PLACE, COUNTS), columns, strict=True)))
        picked.append(table.replace_schema_metadata({"part": "found", "spout": "lines"}))
    return FailedRows.of("work", [], picked)


@given(st.lists(IDS, max_size=4))
def test_of_several_columns_each_id_is_there_once(columns):
    before = [column.copy() for column in columns]
    found = distinct(*columns)
    assert found.tolist() == sorted({int(one) for column in columns for one in column})
    assert all(np.array_equal(*pair) for pair in zip(columns, before, strict=True))


@given(IDS, IDS)
def test_roots_are_looked_for_some_at_a_time(roots, failed):
    failed = np.sort(failed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_files, "_LOOKED_UP", 3)
        assert among(roots, failed).tolist() == np.isin(roots, failed).tolist()


def test_what_tasks_wrote_is_there_once():
    once = written(([1, 2], pa.nulls(2)), ([4, 3], pa.nulls(2)))
    check_found([], once, is_all=True)
    twice = written(([1, 2], pa.nulls(2)), ([2, 3], pa.nulls(2)))
    with pytest.raises(Disagreement, match="found 3, in 4 rows"):
        check_found([], twice, is_all=True)


def test_what_is_judged_in_the_run_and_afterwards_adds_up():
    """Each part is of its own tasks; either may have no records of a spout."""
    line = pa.table({"line": ["a"]})
    in_run = replace(written(([1, 2], pa.nulls(2))), uncounted=1, waits={"lines": line})
    again = written(([4, 3], pa.array([0, None], pa.int64())))
    again = replace(again, uncounted=2, replayed={"lines": 1}, dies={"lines": line})
    whole = in_run.plus(again)
    assert in_order(*whole.roots()).tolist() == [1, 2, 3, 4]
    assert whole.places("lines").tolist() == [0]
    assert (whole.uncounted, whole.replayed) == (3, {"lines": 1})
    assert (len(whole.waits["lines"]), len(whole.dies["lines"])) == (1, 1)
    assert again.plus(again).dies["lines"].num_rows == 2
    assert FailedRows().plus(again) is again
    assert again.plus(FailedRows()) is again


def test_places_are_those_of_what_was_due():
    found = written(
        ([1, 2], pa.nulls(2)),
        ([3, 4, 5], pa.array([7, None, 0], pa.int64())),
        ([6], pa.array([9], pa.int64())),
    )
    assert found.places("lines").tolist() == [7, 0, 9]
    assert written(([1], pa.nulls(1))).places("lines").tolist() == []
    assert in_order(*found.roots()).tolist() == [1, 2, 3, 4, 5, 6]


@given(st.lists(IDS, max_size=4), st.lists(IDS, max_size=3), st.integers(1, 9))
def test_ids_come_in_ranges_of_values(first, second, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root_ids, "_AT_ONCE", at_once)
        patch.setattr(root_ids, "_PIECE", 2)
        parts = list(in_ranges(first, second))
    for group, found in zip((first, second), zip(*parts, strict=True), strict=True):
        assert np.concatenate(found).tolist() == in_order(*group).tolist()
    values = [{int(one) for column in part for one in column} for part in parts]
    assert sum(map(len, values)) == len(set().union(*values))


@pytest.mark.parametrize("places", ["none was due", "all were"])
def test_to_check_and_record_what_was_written_takes_no_column_more(places, tmp_path, monkeypatch):
    monkeypatch.setattr(root_ids, "_AT_ONCE", 1 << 12)
    monkeypatch.setattr(root_ids, "_PIECE", 1 << 12)
    monkeypatch.setattr(checksummed, "_TABLE_ROWS", 1 << 12)
    n = 1 << 18
    roots = [np.sort(part) for part in np.split(np.random.default_rng(0).permutation(n), 4)]
    due = pa.nulls(n // 4) if places == "none was due" else pa.array(range(n // 4), pa.int64())
    found = written(*((part, due) for part in roots))
    nothing = FAILED.empty_table()
    decision = BatchDecision(0, Waiting({}), {}, nonacked_of(failed_roots(nothing, found)))
    tracemalloc.start()
    try:
        check_found([], found, is_all=True)
        body = decision.write(TableCache(LocalStore(tmp_path), 1), 0)
        assert tracemalloc.get_traced_memory()[1] < 2 * n
    finally:
        tracemalloc.stop()
    table = pa.table([range(n)], ROOT_IDS)
    assert body["nonacked"] == write_table(tmp_path, "0.e1.nonacked", table)


def test_what_new_records_have_for_places_takes_no_room():
    n = 1 << 18
    found = written((np.arange(n), pa.nulls(n)))
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    before = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        assert not len(found.places("lines"))
    finally:
        pa.set_memory_pool(before)
    assert (pool.max_memory() or 0) < n


def test_what_came_from_a_task_is_let_go_when_it_was_taken_out():
    rows = 1 << 15
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, RESULT_SCHEMA) as writer:
        for task in range(4):
            table = pa.table({ROOT_ID: np.arange(task * rows, (task + 1) * rows)})
            writer.write_batch(result_batch([(PICKED, to_stream(table))]))
    whole = sink.getvalue().to_pybytes()

    def collected():
        with pa.CompressedInputStream(pa.BufferReader(gzipped), "gzip") as stream:
            return pa.ipc.open_stream(stream).read_all()

    gzipped = pa.compress(whole, "gzip", asbytes=True)
    before = pa.total_allocated_bytes()
    results = results_in(collected())
    held, taken = [], []
    for _, blob in results:
        taken.append(from_stream(blob))
        held.append(pa.total_allocated_bytes() - before)
    assert held[0] > held[1] > held[2] > held[3]
    assert [int(table[ROOT_ID][0].as_py()) for table in taken] == [0, rows, 2 * rows, 3 * rows]


def test_a_table_is_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checksummed, "_TABLE_ROWS", 3)
    reasons = pa.chunked_array([["a", "b"], ["b"] * 5, ["c"]]).dictionary_encode()
    table = pa.table({"root_id": range(8), "reason": reasons}).unify_dictionaries()
    found = read_table_at(tmp_path / write_table(tmp_path, "roots", table))
    assert found.equals(table)
    assert [len(batch) for batch in found.to_batches()] == [3, 3, 2]


@contextlib.contextmanager
def own_pool():
    """A pool of Arrow's that tells what is allocated within."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield pool
    finally:
        pa.set_memory_pool(before)


@pytest.mark.parametrize(("n", "letters"), [(1 << 17, 1), (1 << 15, 1000)], ids=["short", "long"])
def test_what_had_no_room_is_written_a_little_at_a_time(tmp_path, no_syncing, n, letters):
    said = Reason("bolt", "Failed", "the service is away")._asdict()
    source = pa.table({"line": pa.repeat("x" * letters, n)})
    table = tracked(source, message_id=range(n), attempt=1, reason=said)
    cache = TableCache(LocalStore(tmp_path), 1)
    parts = [DeadFile(cache, cache.write_table("0.e1", name, table), n, 0, 9) for name in "ab"]
    store = DeadLetters(letters_at(str(tmp_path / "letters")))
    store.place.own({}, lambda: None)
    with own_pool() as pool:
        store.write(0, Dead({"lines": parts}))
    ((_, file),) = files_of(store.place)
    assert read_letters(file.path)["error_type"].value_counts().to_pylist() == [
        {"values": "WaitingFull", "counts": 2 * n}
    ]
    assert (pool.max_memory() or 0) < 40e6


def test_why_many_died_is_counted_a_part_of_a_file_at_a_time(tmp_path, no_syncing, monkeypatch):
    monkeypatch.setattr(letter_files, "GROUP_ROWS", 1 << 12)
    n = 1 << 18
    store = DeadLetters(letters_at(str(tmp_path)))
    store.place.own({}, lambda: None)
    store.write(0, {"lines": died(0, n, (BAD, BAD, SLOW))})
    tracemalloc.start()
    try:
        with own_pool() as pool:
            found = causes(store.reasons())
        # Three columns of indices and the micro-batches alone would be 20 bytes a letter.
        assert (pool.max_memory() or 0) + tracemalloc.get_traced_memory()[1] < 10 * n
    finally:
        tracemalloc.stop()
    assert [(each.error_type, each.deaths) for each in found] == [
        ("ValueError", n - n // 3),
        ("TimeoutError", n // 3),
    ]
