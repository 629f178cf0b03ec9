"""What a sink says of rows that it refuses, and how it names them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from test_sinks import WORDS, row_file

from ackcore.spark import SinkRejects
from ackcore.spark.sinks.interface import AcceptedFile, read_accepted, read_with_places


def test_rows_are_named_by_values_or_by_places():
    found = SinkRejects(pa.table({"id": [1, 2]}), "too long")
    assert (len(found), found.places, found.reasons) == (2, None, ["too long"] * 2)
    assert str(found) == "2 rows are refused: too long"
    error = ValueError("no")
    found = SinkRejects.at([0, 3], np.array([7, 1], np.int32), ["no", error])
    assert [column.tolist() for column in found.places] == [[0, 3], [7, 1]]
    assert found.reasons == ["no", error]
    assert isinstance(found, Exception)
    assert SinkRejects.at([], [], "no")  # a refusal of nothing is one, too


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SinkRejects([1], "no"), "rows must be a table, .* got list"),
        (lambda: SinkRejects(pa.table({"id": [1]}), 3), "a reason must be .* got int"),
        (lambda: SinkRejects(pa.table({"id": [1]}), [3]), "a reason must be a text .* got int"),
        (lambda: SinkRejects(pa.table({"id": [1]}), ["a", "b"]), "2 reasons .* for 1 rows"),
        (lambda: SinkRejects.at([0.5], [1], "no"), "files must be integers"),
        (lambda: SinkRejects.at([0], [1, 2], "no"), "must pair up one by one"),
    ],
)
def test_what_names_no_rows_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def test_places_are_those_in_the_file(tmp_path):
    rows = [(word, n, n) for n, word in enumerate("abcdefg")]
    file = row_file(tmp_path, rows)
    nonacked = np.array([1, 5])
    for refused, left in [((), "acdeg"), ((0,), "cdeg"), ((0, 1, 3, 6), "ce")]:
        some = AcceptedFile(file.path, file.rows, refused)
        found = list(read_with_places(some, nonacked))
        places = np.concatenate([at for _, at in found])
        words = [word for batch, _ in found for word in batch["word"].to_pylist()]
        assert "".join(words) == left
        assert "".join(rows[at][0] for at in places) == left
        assert all(batch.schema == WORDS for batch in read_accepted(some, nonacked))
