"""Rows of Python values out of Arrow columns, and back into them."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest

from ackcore.topology import row_conversion
from ackcore.topology.row_conversion import RowSchema, column_values, rows_of
from ackcore.topology.tuples import Origin, Tuple

COLUMNS = [
    pa.array([1, None, -3], pa.int8()),
    pa.array([1, 2, 2**64 - 1], pa.uint64()),
    pa.array([2**53 + 1, None], pa.int64()),
    pa.array([1.5, None, 0.25], pa.float32()),
    pa.array([1.5, float("inf")], pa.float64()),
    pa.array([True, None, False]),
    pa.array([True, False]),
    pa.array(["a", None, "é\x00"]),
    pa.array(["a", None], pa.large_string()),
    pa.array(["a", None], pa.string_view()),
    pa.array([b"\x00\xff", None], pa.binary()),
    pa.array([b"ab", b"cd"], pa.binary(2)),
    pa.array([None, None], pa.null()),
    pa.array([datetime.datetime(2020, 1, 1), None], pa.timestamp("us")),
    pa.array([datetime.date(2020, 1, 1), None]),
    pa.array([decimal.Decimal("1.50"), None], pa.decimal128(10, 2)),
    pa.array([[1, None], None, []], pa.list_(pa.int32())),
    pa.array([{"a": 1}, None], pa.struct([("a", pa.int64())])),
    pa.array(["x", None, "x"]).dictionary_encode(),
    pa.array([], pa.int64()),
    pa.array([], pa.string()),
]


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: str(column.type))
def test_values_are_those_that_arrow_gives(column):
    for part in (column, column.slice(1), column.slice(0, 1)):
        values = column_values(part)
        assert values == part.to_pylist()
        assert list(map(type, values)) == list(map(type, part.to_pylist()))


def test_a_value_that_python_cannot_show_fails_its_row_only():
    bad = pa.Array.from_buffers(
        pa.string(), 3, [*pa.array(["ab", "cd", "ef"]).buffers()[:2], pa.py_buffer(b"ab\xff\xfeef")]
    )
    rows, misfits = rows_of(pa.record_batch({"n": [1, 2, 3], "text": bad}))
    assert rows == [(1, "ab"), (), (3, "ef")]
    assert [row for row, _ in misfits] == [1]
    assert str(misfits[0].error).startswith("column 'text' holds a string without a Python value: ")


def test_rows_without_columns_are_counted():
    batch = pa.record_batch({"n": [1, 2]}).select([])
    assert rows_of(batch) == ([()] * batch.num_rows, [])
    assert rows_of(pa.record_batch({"n": pa.array([], pa.int64())})) == ([], [])


SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("tags", pa.list_(pa.string()))])


def test_rows_that_do_not_convert_are_named_and_the_others_converted():
    schema = RowSchema("b's stream 'default'", SCHEMA)
    rows = [(1, ["a"]), ("x", None), (3, None), (None, []), (2**63, []), (6, 5), (7, [8])]
    batches, misfits = schema.batches(rows)
    found = {start: batch.to_pylist() for start, batch in batches}
    assert found[0] == [{"n": 1, "tags": ["a"]}]
    assert found[2] == [{"n": 3, "tags": None}]
    assert [row for row, _ in misfits] == [1, 3, 4, 5, 6]
    messages = [str(error) for _, error in misfits]
    said = "'n' of b's stream 'default' must be int64, got str: 'x' does not fit"
    assert messages[0].startswith(said)
    said = "'n' of b's stream 'default' must not be null, got None; give it a value, or declare it"
    assert messages[1] == f"{said} nullable"
    assert messages[4].startswith("'tags' of b's stream 'default' must be list<")


def test_more_text_than_an_array_has_room_for_is_cut(monkeypatch):
    array = pa.array

    def small(values, kind):
        """An Arrow whose arrays have room for two values."""
        if len(values) <= 2:
            return array(values, kind)
        return pa.chunked_array([array([value], kind) for value in values])

    monkeypatch.setattr(row_conversion.pa, "array", small)
    schema = RowSchema("b's stream 'default'", pa.schema([("text", pa.string())]))
    batches, misfits = schema.batches([(text,) for text in "abcde"])
    assert misfits == []
    assert [start for start, _ in batches] == [0, 2, 3]
    assert "".join("".join(batch["text"].to_pylist()) for _, batch in batches) == "abcde"


class Odd:
    def __init__(self, error):
        self.error = error

    def __iter__(self):
        raise self.error

    __len__ = __index__ = __float__ = __array__ = __iter__


def test_a_values_own_methods_may_raise_what_they_like():
    schema = RowSchema("b's stream 'default'", pa.schema([("n", pa.list_(pa.int64()))]))
    for error in (SystemExit(), GeneratorExit(), ValueError("no")):
        batches, misfits = schema.batches([([1],), (Odd(error),), ([2],)])
        assert [row for row, _ in misfits] == [1]
        assert sum(batch.num_rows for _, batch in batches) == 2
    with pytest.raises(KeyboardInterrupt):
        row_conversion.by_halves(lambda *_: Odd(KeyboardInterrupt()).__iter__(), 4)


def test_what_was_emitted_stays_as_it_was():
    schema = RowSchema(
        "b's stream 'default'", pa.schema([("any", pa.list_(pa.int64())), ("x", pa.binary())])
    )
    inner, raw, column = [1], bytearray(b"a"), np.array([5])
    row = schema.row(({"k": [inner]}, raw))
    other = schema.row([(inner, column), memoryview(b"b")])
    inner.append(2)
    raw[0] = 0
    column[0] = 6
    assert row == ({"k": [[1]]}, b"a")
    assert other == (([1], np.array([5])), b"b")


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        (
            "ab",
            TypeError,
            "must be a tuple, a list or a dict of values for b's stream 's', got str",
        ),
        (7, TypeError, "got int"),
        (
            Tuple((1, 2), Origin(None, "a", "s", ("x", "y"), 0, None), 0),
            TypeError,
            "got Tuple; pass tuple.values to emit it unchanged",
        ),
        ((1,), ValueError, r"must have 2 values for b's stream 's', got 1 \(int\); write \(n, t"),
        ([1, 2, 3], ValueError, "got 3"),
        ({"n": 1, "tag": 2}, ValueError, "got 'tag'; did you mean 'tags'?"),
        ({"n": 1}, ValueError, "got none for 'tags'; emit None for a null"),
        ({}, ValueError, "got none for 'n', 'tags'"),
    ],
)
def test_values_that_fit_no_stream_are_refused(values, error, match):
    with pytest.raises(error, match=match):
        RowSchema("b's stream 's'", SCHEMA).row(values)


def test_values_by_name_are_put_in_order():
    assert RowSchema("b's stream 's'", SCHEMA).row({"tags": None, "n": 1}) == (1, None)
