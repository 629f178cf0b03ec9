"""A sink's report of rows that it refuses, and the naming of those rows."""

from __future__ import annotations

import contextlib
import pickle
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from accepted_rows import accepted as rows_accepted
from accepted_rows import columns_file
from test_sinks import WORDS, row_file

from ackcore._arrow.shown import text_of
from ackcore.spark import SinkRejects, TransactionalSink
from ackcore.spark.checkpoint.refusals import Refusal
from ackcore.spark.engine.act import refused_rows, without_refused
from ackcore.spark.sinks.sink_batch import BatchFile, read_sink_file, read_with_places
from ackcore.spark.tasks.row_files import ROOT


def test_rows_are_named_by_values_or_by_numbers():
    found = SinkRejects(pa.table({"id": [1, 2]}), "too long")
    assert (len(found), found.numbers, found.reasons) == (2, None, ["too long"])
    assert found.reason_of.tolist() == [0, 0]
    assert str(found) == "2 rows are refused: too long"
    error = ValueError("no")
    found = SinkRejects.of_numbers(np.array([7, 1]), ["no", error])
    assert (len(found), found.values, found.numbers.tolist()) == (2, None, [7, 1])
    assert found.reasons == ["no", error]
    assert found.reason_of.tolist() == [0, 1]
    assert isinstance(found, Exception)
    assert SinkRejects.of_numbers(np.array([], np.int64), "no")  # a refusal of nothing is one, too


@pytest.mark.parametrize(
    "reasons",
    [["x", "y", "x"], pa.array(["x", "y", "x"]), pa.chunked_array([["x"], ["y", "x"]])],
    ids=["list", "array", "chunks"],
)
def test_a_reason_is_kept_once(reasons):
    found = SinkRejects(pa.table({"id": [1, 2, 3]}), reasons)
    assert (found.reasons, found.reason_of.tolist()) == (["x", "y"], [0, 1, 0])


def test_reasons_that_cannot_be_told_are_reasons():
    class Mute(Exception):
        def __str__(self):
            raise SystemExit("no words")

    row = pa.table({"id": [1]})
    said = "1 row is refused: Mute: the exception has no text: __str__ raised SystemExit"
    assert str(SinkRejects(row, Mute())) == said
    assert SinkRejects(row, text_of([b"caf\xe9"])).reasons == [r"caf\xe9"]


def test_the_driver_keeps_columns_of_refused_rows(tmp_path):
    """Neither their places nor their reasons are Python objects, of which each row has some."""
    n = 200_000
    schema = pa.schema([("n", pa.int64()), pa.field(ROOT, pa.int64())])
    file = columns_file(tmp_path, schema, [range(n), [0] * n])
    accepted = rows_accepted([file], nonacked=())
    reasons = pa.array(["odd", "even"]).take(pa.array(np.arange(n) % 2))
    values = pa.table({"n": np.arange(n)})
    tracemalloc.start()
    try:
        found = refused_rows(SinkRejects(values, reasons), accepted)
        left = without_refused(accepted, [Refusal("count", False, found)])
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # What Python has of them, numpy's columns among it: 8 bytes each, and several.
    assert most < 90 * n
    assert len(pickle.dumps(left)) < 9 * n
    assert list(read_sink_file(left.files[0], left.nonacked)) == []
    assert pc.count_distinct(found["reason"]).as_py() == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SinkRejects([1], "no"), "rows of SinkRejects must be .* got list"),
        (lambda: SinkRejects(pa.table({"id": [1]}), 3), "each reason .* must be .* got int"),
        (lambda: SinkRejects(pa.table({"id": [1]}), [3]), "each reason .* must be a str .* int"),
        (
            lambda: SinkRejects(pa.table({"id": [1]}), pa.array([3])),
            "each reason .* must .* got a column of int64",
        ),
        (
            lambda: SinkRejects(pa.table({"id": [1]}), pa.array([None], "str")),
            "got a column of string with 1 nulls",
        ),
        (lambda: SinkRejects(pa.table({"id": [1]}), ["a", "b"]), "2 reasons for 1 row;"),
    ],
)
def test_what_names_no_rows_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_places_are_those_in_the_file(tmp_path):
    rows = [(word, n, n) for n, word in enumerate("abcdefg")]
    file = row_file(tmp_path, rows)
    nonacked = np.array([1, 5])
    assert len(BatchFile(file.path, file.rows).refused) == 0
    for refused, left in [((), "acdeg"), ((0,), "cdeg"), ((0, 1, 3, 6), "ce")]:
        some = BatchFile(file.path, file.rows, np.array(refused, np.int64))
        found = list(read_with_places(some, nonacked))
        places = np.concatenate([at for _, at in found])
        words = [word for batch, _ in found for word in batch["word"].to_pylist()]
        assert "".join(words) == left
        assert "".join(rows[at][0] for at in places) == left
        assert all(batch.schema == WORDS for batch in read_sink_file(some, nonacked))


class Returning(TransactionalSink[list]):
    """A sink that returns refused rows, and keeps its rows and its number in memory.

    The name `_committed` is for subclasses such as this one: the base class does not use it.
    """

    def __init__(self):
        self.rows, self._committed = [], None

    @contextlib.contextmanager
    def begin(self, batch):
        yield []

    def read_number(self, transaction, batch):
        return self._committed

    def write_rows(self, transaction, batch):
        refused = []
        for rows, numbers in batch.numbered():
            transaction += [row for row in rows["word"].to_pylist() if row != "b"]
            refused += numbers[pc.equal(rows["word"], "b").to_numpy(False)].tolist()
        return batch.refuse(refused, "no b")

    def record(self, transaction, batch, written):
        transaction.append(written)

    def commit(self, transaction):
        self._committed = transaction.pop()
        self.rows += transaction


def test_a_refusal_that_a_transactional_sink_returns_rolls_back(tmp_path):
    """Otherwise the refused row would be lost if the driver died before it recorded the refusal."""
    sink, file = Returning(), row_file(tmp_path, [("a", 1, 1), ("b", 2, 2), ("c", 3, 3)])
    with pytest.raises(SinkRejects, match="no b") as raised:
        sink.write(rows_accepted([file], nonacked=()))
    assert (sink.rows, sink._committed) == ([], None)
    known = file._replace(refused=raised.value.numbers)
    for _ in range(2):
        assert sink.write(rows_accepted([known], nonacked=())) is None
    assert sink.rows == ["a", "c"]
