"""Where rows are cut: by position and by content alone, and never too large."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import tracked, write_table
from hypothesis import given
from hypothesis import strategies as st

from ackcore._arrow import record_batches
from ackcore._arrow.record_batches import bytes_before, end_within, rebatched
from ackcore.kafka.ranges import OffsetRange
from ackcore.spark.stores.run_files import read_table_at
from ackcore.spark.tasks import spout_stage
from ackcore.spark.tasks.record_ids import SpoutSpec
from ackcore.spark.tasks.reread_stage import DealtPieces, Piece, RereadStage
from ackcore.spark.tasks.spout_stage import chunked, due_records, joined


def batches(*sizes):
    return iter([pa.record_batch({"n": np.arange(size)}) for size in sizes])


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [((), []), ((0, 0), []), ((3,), [3]), ((4, 4, 4), [6, 6]), ((9, 1, 0, 2), [6, 6])],
)
def test_rows_are_cut_by_their_number(sizes, cut):
    assert [len(batch) for batch in chunked(batches(*sizes), 6)] == cut


@pytest.mark.parametrize(("rows", "cut"), [(1000, [12, 12, 6]), (9, [9, 9, 9, 3])])
def test_long_rows_are_cut_by_their_bytes(monkeypatch, rows, cut):
    monkeypatch.setattr(spout_stage, "CHUNK_BYTES", 100)
    assert [len(batch) for batch in chunked(batches(6, 6, 6, 6, 6), rows)] == cut


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        ((), []),
        ((0, 0), []),
        ((2, 3, 1, 2, 0, 3), [6, 5]),  # 6 rows at most
        ((4, 4), [4, 4]),  # never cut to fill a chunk
        ((9, 1, 1), [9, 2]),  # a batch with more rows
        ((14, 1), [12, 2, 1]),  # a batch with more bytes than a chunk
    ],
)
def test_small_batches_are_joined(monkeypatch, sizes, found):
    monkeypatch.setattr(spout_stage, "CHUNK_BYTES", 100)
    assert [len(batch) for batch in joined(batches(*sizes), 6)] == found
    monkeypatch.setattr(spout_stage, "JOINED_BYTES", 40)
    small = [len(batch) for batch in joined(batches(2, 3, 1), 6)]
    assert small == [5, 1]


KINDS = {
    "number": (pa.int32(), [1, None, 3, 4], [4, 4, 4, 4]),
    "bool": (pa.bool_(), [True, None, False], [1, 1, 1]),
    "text": (pa.string(), ["", "abc", None, "ä"], [4, 7, 4, 6]),
    "wide text": (pa.large_binary(), [b"", b"abc"], [4, 7]),
    "fixed": (pa.binary(3), [b"abc", None], [3, 3]),
    "struct": (
        pa.struct([("a", pa.int8()), ("b", pa.string())]),
        [{"a": 1, "b": "xy"}, None, {"a": None, "b": ""}],
        [7, 5, 5],
    ),
    "list": (pa.list_(pa.string()), [["a", "bc"], [], None, ["d"]], [15, 4, 4, 9]),
    "large list": (pa.large_list(pa.int64()), [[1, 2], [], [3]], [20, 4, 12]),
    "fixed list": (pa.list_(pa.int16(), 2), [[1, 2], [3, 4]], [4, 4]),
    "map": (pa.map_(pa.string(), pa.int8()), [[("k", 1), ("", 2)], [], None], [15, 4, 4]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["long" * 9, "a", None], [1, 1, 1]),
    "view": (pa.string_view(), ["long" * 9, "a"], [16, 16]),
    "null": (pa.null(), [None, None], [16, 16]),
    "extension": (pa.uuid(), [bytes(16)], [16]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_a_row_are_those_of_its_values(kind):
    """Wherever a slice begins."""
    arrow_type, values, sizes = KINDS[kind]
    column = pa.array([*values, *values], arrow_type)
    whole, sizes = pa.record_batch([column], ["a"]), [*sizes, *sizes]
    for start in range(len(sizes) + 1):
        batch = whole.slice(start)
        found = [bytes_before(batch, row) for row in range(len(batch) + 1)]
        assert found == [0, *itertools.accumulate(sizes[start:])]
        for most in (0, 5, 9, 40, 1000):
            ends = [row for row, size in enumerate(found) if size <= most]
            assert end_within(batch, 0, most) == ends[-1]


@given(
    texts=st.lists(st.text("ab", max_size=9), max_size=30),
    rows=st.integers(1, 9),
    most=st.integers(1, 60),
    cuts=st.lists(st.integers(0, 30), max_size=5),
)
def test_cuts_depend_on_the_rows_alone(texts, rows, most, cuts):
    batch = pa.record_batch([pa.array(texts, pa.string())], ["a"])
    bounds = [0, *sorted(min(cut, len(texts)) for cut in cuts), len(texts)]
    # Copies, as Spark's batches are: a slice that comes in goes out as it is.
    parts = [pa.concat_batches([batch.slice(a, b - a)]) for a, b in itertools.pairwise(bounds)]
    found = list(rebatched(parts, rows, most))
    alone = list(rebatched([batch], rows, most))
    assert [one.serialize() for one in found] == [one.serialize() for one in alone]
    assert [text for one in found for text in one.column(0).to_pylist()] == texts
    assert list(rebatched(parts, rows, most, copied=False)) == found
    for one, after in itertools.zip_longest(found, found[1:]):
        size = bytes_before(one, len(one))
        assert len(one) <= rows
        assert size <= most or len(one) == 1
        if after is not None:  # it has as many as go in
            assert len(one) == rows or size + bytes_before(after, 1) > most


@pytest.fixture(scope="module")
def huge():
    """A row of 2 GiB that take no memory: with ten bytes more they go into no array of text."""
    size = 2**31 - 2
    data = pa.py_buffer(np.zeros(size, np.uint8))
    offsets = pa.py_buffer(np.array([0, size], np.int32))
    return pa.Array.from_buffers(pa.string(), 1, [None, offsets, data])


def test_rows_that_cannot_be_combined_all_come_in(huge):
    """Arrow's combine_chunks() leaves them in chunks, of which only the first was taken."""
    large, small = (pa.record_batch([column], ["line"]) for column in (huge, ["x" * 10] * 5))
    with pytest.raises(pa.ArrowInvalid, match="overflow"):
        record_batches.one_batch([small, large])
    for cut in (chunked, joined):
        some = cut(iter([small, large, large, small]), 1000)
        assert [len(batch) for batch in some] == [5, 1, 1, 5]
    assert [len(batch) for batch in rebatched([small, large, small], 9)] == [5, 1, 5]


def test_retries_that_cannot_be_combined_all_run(huge):
    schema = pa.schema([("line", pa.string())])
    one = SpoutSpec("lines", 0, schema, (), True, False, False, 7)
    due = tracked(pa.table([huge], schema=schema))
    found = list(due_records(one, pa.concat_tables([due] * 3), 40))
    assert [(some.first, len(some.batch)) for some in found] == [(40, 1), (41, 1), (42, 1)]
    assert {some.batch.schema for some in found} == {schema}


def test_a_piece_with_fewer_rows_than_in_the_run_is_refused_by_its_offsets():
    schema = pa.schema([("line", pa.string())])
    source = SpoutSpec("lines", 0, schema, (), True, False, False, 7)
    piece = Piece(0, 5, (OffsetRange("t", 3, 10, 12),), 2)
    rows = pa.record_batch([["x"]], schema=schema)
    reader = SimpleNamespace(read_pieces=lambda pieces: [(one, iter([rows])) for one in pieces])
    stage = SimpleNamespace(spout="lines", sources={"lines": source})
    numbers = iter([pa.record_batch({"id": [0]})])
    again = RereadStage(stage, None, pieces=DealtPieces(reader, [[piece]]))
    ((_, _, records),) = again.partitions(numbers)
    with pytest.raises(RuntimeError, match=r"^spout .lines.: t-3 \[10, 12\) has 1 row, and had 2"):
        list(records)


def test_a_table_of_the_checkpoint_is_written_in_few_batches(tmp_path):
    parts = [pa.record_batch({"a": ["x" * n]}) for n in range(9)]
    table = pa.Table.from_batches(parts)
    again = read_table_at(tmp_path / write_table(tmp_path, "waiting", table))
    assert again == table
    assert again["a"].num_chunks == 1
