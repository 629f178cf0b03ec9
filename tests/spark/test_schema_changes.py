"""Kept records in the columns that their source has now: every value the same, or refused."""

from __future__ import annotations

import datetime
import decimal
import math
import re

import pyarrow as pa
import pytest
from checkpoints import records
from hypothesis import given
from hypothesis import strategies as st

from ackcore._arrow.lossless import cast
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import TRACKING
from ackcore.spark.checkpoint.schema_changes import ColumnsChanged, fit_columns


def kept(**columns):
    n = len(next(iter(columns.values())))
    table = records(0, n).select(TRACKING.names)
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def fit(table, schema):
    return fit_columns(table, pa.schema(schema), "letters of 'lines'", "Do something else")


STRUCT = pa.struct([("x", pa.int32()), ("y", pa.list_(pa.float32()))])
WIDER = pa.struct([("x", pa.int64()), ("y", pa.list_(pa.float64()))])


def test_what_has_the_columns_already_is_handed_back_as_it_is():
    table = kept(value=pa.array(["a", None]))
    assert fit(table, [("value", pa.string())]) is table
    # Spark's word on nulls is no promise, and a file is not rewritten for it.
    assert fit(table, [pa.field("value", pa.string(), nullable=False)]) is table


def test_columns_are_put_in_the_order_of_the_source():
    table = fit(kept(a=pa.array([1]), b=pa.array(["x"])), [("b", pa.string()), ("a", pa.int64())])
    assert table.column_names == [*TRACKING.names, "b", "a"]
    assert table.select(["a", "b"]).to_pylist() == [{"a": 1, "b": "x"}]
    assert table.select(TRACKING.names).equals(records(0, 1).select(TRACKING.names))


def test_a_column_that_the_source_has_gained_is_null_where_it_may_be():
    table = kept(value=pa.array(["a", "b"]))
    told = fit(table, [("value", pa.string()), ("extra", STRUCT)])
    assert told["extra"].type == STRUCT
    assert told["extra"].to_pylist() == [None, None]
    with pytest.raises(ColumnsChanged, match="'extra' is new, int32, and not nullable"):
        fit(table, [("value", pa.string()), pa.field("extra", pa.int32(), nullable=False)])


def test_every_column_that_does_not_fit_is_told_with_the_way_out():
    table = kept(value=pa.array(["17", "x"]), gone=pa.array([1, 2]), fine=pa.array([1, 2]))
    with pytest.raises(ColumnsChanged) as caught:
        fit(table, [("value", pa.int32()), ("fine", pa.int32())])
    assert re.fullmatch(
        r"the columns that the source has now do not fit .*letters of 'lines': 'value' was string "
        r"and is int32 now \(.*'x'.*\); 'gone', int64, is not there any more\. "
        r"Do something else\.",
        str(caught.value),
    )
    assert isinstance(caught.value, CheckpointForeign)


NOON = datetime.datetime(2020, 1, 1, 12)
FITS = [
    (pa.array([1, None], pa.int64()), pa.int32()),
    (pa.array(["17", "-3"]), pa.int64()),
    (pa.array([1, 2], pa.int8()), pa.int16()),
    (pa.array([float("nan"), -0.0, None], pa.float32()), pa.float64()),
    (pa.array([decimal.Decimal("1.20")], pa.decimal128(10, 2)), pa.decimal128(20, 4)),
    (pa.array([NOON], pa.timestamp("ms")), pa.timestamp("us")),
    (pa.array([{"x": 1, "y": [1.5, None]}, None, {"x": None, "y": None}], STRUCT), WIDER),
    (pa.array([[1], [], None], pa.list_(pa.int32())), pa.large_list(pa.int64())),
    (pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int32())), pa.map_("string", "int64")),
    (pa.nulls(2), STRUCT),
    (pa.array([], pa.string()), pa.int8()),
]


@pytest.mark.parametrize(("column", "kind"), FITS, ids=str)
def test_a_cast_that_changes_no_value_is_made(column, kind):
    found = cast(pa.chunked_array([column, column]), kind)
    assert found.type == kind
    again = [*column.to_pylist(), *column.to_pylist()]
    expected = [int(x) if isinstance(x, str) else x for x in again]
    assert str(found.to_pylist()) == str(expected).replace("1.20", "1.2000")


REFUSED = [
    (pa.array(["x"]), pa.int32()),
    (pa.array(["01"]), pa.int32()),
    (pa.array([2**31]), pa.int32()),
    (pa.array([-0.0]), pa.int64()),
    (pa.array([0.1]), pa.float32()),
    (pa.array([2]), pa.bool_()),
    (pa.array([NOON], pa.timestamp("us")), pa.timestamp("us", "UTC")),
    (pa.array([NOON.replace(microsecond=1)], pa.timestamp("us")), pa.timestamp("ms")),
    (pa.array([1]), pa.timestamp("us")),
    (pa.array([datetime.date(2020, 1, 1)]), pa.string()),
    (pa.array([{"x": 1, "z": 2}]), pa.struct([("x", pa.int64())])),
    (pa.array([{"x": NOON}]), pa.struct([("x", pa.int64())])),
    (pa.array([{"x": [1, 2**40]}]), pa.struct([("x", pa.list_(pa.int32()))])),
    (pa.array([[1]]), pa.int64()),
    (pa.array([b"\xff"]), pa.string()),
]


@pytest.mark.parametrize(("column", "kind"), REFUSED, ids=str)
def test_a_cast_that_would_change_a_value_or_its_meaning_is_refused(column, kind):
    with pytest.raises(ValueError):  # noqa: PT011 - of many words
        cast(pa.chunked_array([column]), kind)
    with pytest.raises(ColumnsChanged, match=r"'value' was .* and is .* now"):
        fit(kept(value=column), [("value", kind)])


NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string()]
VALUES = st.lists(st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-200, 200), max_size=4)


@given(VALUES, st.sampled_from(NUMBERS), st.sampled_from(NUMBERS))
def test_whole_numbers_are_the_same_or_refused(values, was, now):
    try:
        column = pa.array(values).cast(was)
    except pa.ArrowInvalid:
        return
    try:
        found = cast(pa.chunked_array([column]), now)
    except ValueError:
        assert any(not _holds(now, value) for value in values if value is not None)
        return
    assert [None if x is None else int(decimal.Decimal(x)) for x in found.to_pylist()] == values


def _holds(kind, value):
    """Whether a type has this whole number, and reads it back from every text of it."""
    if pa.types.is_floating(kind):
        bits = 24 if kind == pa.float32() else 53
        return abs(value) <= 2**bits
    return kind == pa.int64() or (
        kind != pa.string() and -(2 ** (kind.bit_width - 1)) <= value < 2 ** (kind.bit_width - 1)
    )


@given(st.lists(st.none() | st.floats(width=64), max_size=4))
def test_fractions_are_the_same_or_refused(values):
    column = pa.chunked_array([pa.array(values, pa.float64())])
    try:
        found = cast(column, pa.float32())
    except ValueError:
        return
    for value, told in zip(values, found.to_pylist(), strict=True):
        assert told == value or (math.isnan(told) and math.isnan(value))
