"""Emitted values are those a column gives back, or the tuple fails: none becomes another."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import os
from typing import NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackcore._arrow.lossless import are_alike
from ackcore._arrow.record_batches import cast_column
from ackcore.topology import BasicBolt, BatchBolt
from ackcore.topology.executors import executor_for
from ackcore.topology.row_conversion import RowSchema

ARROW = int(pa.__version__.split(".")[0])
UTC = dt.UTC
EAST = dt.timezone(dt.timedelta(hours=5))
NOON = dt.datetime(2026, 1, 2, 12)
#: Times that the clocks of a zone show twice in a year, and never: `==` is False in other zones.
REPEATED = dt.datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
SKIPPED = dt.datetime(2024, 3, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
ONE_ROW = pa.record_batch({"n": [0]})


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


TYPES = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_()),
    *(pa.string(), pa.large_string(), pa.binary(), pa.binary(2)),
    *(pa.decimal128(5, 1), pa.decimal128(38, 10), pa.decimal256(50, 2)),
    *(pa.date32(), pa.date64(), pa.time32("s"), pa.time64("us"), pa.time64("ns")),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    *(pa.timestamp("us", zone) for zone in ("UTC", "Europe/Berlin")),
    *(pa.duration(unit) for unit in ("s", "us", "ns")),
    *(
        pa.list_(pa.int64()),
        pa.list_(pa.float32()),
        pa.list_(pa.string()),
        pa.large_list(pa.int8()),
    ),
    pa.struct([("a", pa.int8()), ("b", pa.string())]),
    pa.map_(pa.string(), pa.int8()),
    pa.list_(pa.struct([("a", pa.date32())])),
]

INTS = st.sampled_from([0, 1, -1, 127, 128, 2**24 + 1, 2**53, 2**53 + 1, 2**63, -(2**70), 10**30])
FLOATS = st.floats() | st.sampled_from([0.0, -0.0, 2.0, 2.7, 0.1, 1e300, math.nan, math.inf])
TEXTS = st.sampled_from(["", "a", "ab", "12", "2026-01-02", "ä"])
TIMES = st.datetimes() | st.datetimes(timezones=st.sampled_from([UTC, EAST])) | st.just(NOON)
NANOS = st.integers(-(2**60), 2**60)
LEAVES = (
    st.none()
    | st.booleans()
    | INTS
    | FLOATS
    | TEXTS
    | st.binary(max_size=2)
    | st.builds(bytearray, st.binary(max_size=2))
    | st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**6), max_value=10**6)
    | st.dates()
    | TIMES
    | st.times()
    | st.timedeltas()
    | st.sampled_from([Color.RED, Level.HIGH, pd.NaT, pd.NA, complex(1, 0), object])
    | st.builds(pd.Timestamp, NANOS)
    | st.builds(pd.Timedelta, NANOS)
    | st.builds(np.datetime64, NANOS, st.sampled_from(["s", "us", "ns"]))
    | st.builds(np.timedelta64, NANOS, st.sampled_from(["s", "us", "ns"]))
    | st.builds(np.int64, st.integers(-(2**63), 2**63 - 1))
    | st.builds(np.uint8, st.integers(0, 255))
    | st.builds(np.float64, FLOATS)
    | st.builds(np.float32, st.floats(width=32))
    | st.builds(np.bool_, st.booleans())
)
VALUES = (
    LEAVES
    | st.lists(LEAVES, max_size=2)
    | st.lists(INTS, max_size=2).map(tuple)
    | st.lists(FLOATS, max_size=2).map(np.array)
    | st.sets(st.integers(0, 5), max_size=2)
    | st.fixed_dictionaries({"a": LEAVES}, optional={"b": LEAVES, "c": LEAVES})
    | st.dictionaries(TEXTS, INTS, max_size=2)
    | st.lists(st.fixed_dictionaries({"a": LEAVES}), max_size=2)
)


def is_equal(value, got):
    """Whether what a column gives back equals what was put in."""
    if got is None or value is None or value is pd.NaT or value is pd.NA:
        return got is None and (value is None or value is pd.NaT or value is pd.NA)
    if isinstance(got, list | tuple):
        if isinstance(value, dict):
            value = list(value.items())
        return (
            isinstance(value, list | tuple | np.ndarray)
            and len(value) == len(got)
            and all(map(is_equal, value, got))
        )
    if isinstance(got, dict):
        if isinstance(value, list | tuple) and len(value) == len(got):
            value = dict(zip(got, value, strict=True))
        return (
            isinstance(value, dict)
            and {*value} == {*got}
            and all(is_equal(value[name], got[name]) for name in got)
        )
    if isinstance(value, float | np.floating) and math.isnan(value):
        return isinstance(got, float | np.floating) and math.isnan(got)
    if isinstance(value, pd.Timestamp | np.datetime64) or isinstance(got, pd.Timestamp):
        if not isinstance(got, dt.datetime):
            return False
        one, other = pd.Timestamp(value), pd.Timestamp(got)
        return (one.tz is None) == (other.tz is None) and one == other
    return bool(value == got) and isinstance(value, dt.datetime) == isinstance(got, dt.datetime)


class Row(BasicBolt):
    def __init__(self, values, arrow_type):
        self.values = values
        self.outputs = pa.schema([("v", arrow_type)])

    def execute(self, tuple, collector):
        for value in self.values:
            collector.emit((value,))


class Column(BatchBolt):
    def __init__(self, values, arrow_type):
        self.values = values
        self.outputs = pa.schema([("v", arrow_type)])

    def process(self, batch, out):
        out.emit([self.values], parents=[0] * len(self.values))


def emitted(bolt):
    """Return the values of a bolt's one column, or the reason of its tuple's failure."""
    results = executor_for("b", bolt).process("s", "default", ONE_ROW, None)
    if results.failures:
        (failure,) = results.failures
        return failure.reasons[0].message
    return [value for each in results.emissions for value in each.batch.column(0).to_pylist()]


def check(bolt, values):
    got = emitted(bolt)
    if not isinstance(got, str):
        assert len(got) == len(values)
        assert all(map(is_equal, values, got)), (values, got)


@given(value=VALUES, arrow_type=st.sampled_from(TYPES), beside=st.sampled_from([[], [None]]))
@example(2.7, pa.int64(), [])
@example(dt.datetime(2026, 1, 2, 3, 4, 5, 6), pa.timestamp("s"), [])
@example(NOON, pa.date32(), [])
@pytest.mark.parametrize("shape", [Row, Column])
def test_python_values_come_back_equal_or_are_refused(shape, value, arrow_type, beside):
    values = [*beside, value]
    check(shape(values, arrow_type), values)


ARRAYS = [
    np.array([1, 300, -1]),
    np.array([2**53 + 1, 5]),
    np.array([1.0, 2.0]),
    np.array([1.0, 2.7]),
    np.array([0.1, math.nan, -0.0]),
    np.array([0.5, math.nan], np.float32),
    np.array([True, False]),
    np.array(["1", "007", "b"]),
    np.array([b"a", b"bc"]),
    np.array([1, 2**64 - 1], np.uint64),
    np.array([1.5, None, "a"], object),
    np.array([1, 2], object),
    *(np.array([1_700_000_000_123_456_789], f"M8[{unit}]") for unit in ("ns", "us")),
    np.array([1_700_000_000], "M8[s]"),
    np.array([20_000], "M8[D]"),
    np.array([1, 1_000_000_000], "m8[ns]"),
]


@pytest.mark.parametrize("arrow_type", TYPES, ids=str)
def test_columns_that_have_a_type_lead_back_to_what_they_were_or_are_refused(arrow_type):
    """Columns of numpy, pandas and Arrow; objects are values as in a list."""
    for array in ARRAYS:
        if array.dtype == object:
            check(Column(array, arrow_type), list(array))
            check(Column(pd.Series(array), arrow_type), list(array))
            continue
        series = pd.Series(array)
        for column in (array, series, pa.array(array), pa.chunked_array([array, array])):
            if str(getattr(column, "dtype", "")) == "object":  # texts, to pandas
                check(Column(column, arrow_type), list(column))
                continue
            bolt = Column(column, arrow_type)
            results = executor_for("b", bolt).process("s", "default", ONE_ROW, None)
            assert len(results.failures) + len(results.emissions) == 1
            for each in results.emissions:
                was = pa.array(array if isinstance(column, pa.ChunkedArray) else column)
                back = each.batch.column(0).cast(was.type)[: len(was)]
                assert back.equals(was) or all(map(is_equal, was.to_pylist(), back.to_pylist()))


KEPT = [
    (5, pa.uint8()),
    (5.0, pa.int64()),
    (-0.0, pa.float64()),
    (True, pa.float64()),
    (2**53, pa.float64()),
    (0.5, pa.float32()),
    (np.float32(0.1), pa.float32()),
    (math.nan, pa.float32()),
    (Level.HIGH, pa.int64()),
    (np.int16(7), pa.int64()),
    (np.float64(7), pa.int64()),
    (decimal.Decimal("1.50"), pa.decimal128(5, 1)),
    (7, pa.decimal128(5, 1)),
    (bytearray(b"ab"), pa.binary()),
    (NOON, pa.timestamp("s")),
    (NOON, pa.timestamp("us")),
    (NOON.replace(tzinfo=EAST), pa.timestamp("us", "UTC")),
    (NOON.replace(tzinfo=UTC), pa.timestamp("s", "Europe/Berlin")),
    (REPEATED, pa.timestamp("s", "UTC")),
    (SKIPPED, pa.timestamp("s", "Europe/Berlin")),
    ([SKIPPED], pa.list_(pa.timestamp("us", "Europe/Berlin"))),
    (REPEATED.replace(fold=1), pa.timestamp("ms", "UTC")),
    ({"at": REPEATED}, pa.struct([("at", pa.timestamp("us", "UTC"))])),
    ([REPEATED.replace(fold=1)], pa.list_(pa.timestamp("us", "UTC"))),
    ([SKIPPED], pa.list_(pa.timestamp("us", "UTC"))),
    (pd.Timestamp(5), pa.timestamp("ns")),
    (pd.NaT, pa.timestamp("us")),
    (pd.NA, pa.string()),
    (dt.timedelta(seconds=5), pa.duration("s")),
    ((1, 2.0), pa.list_(pa.int64())),
    (np.array([1.0, 2.0]), pa.list_(pa.int64())),
    ({"a": 1, "b": None}, pa.struct([("a", pa.int8()), ("b", pa.string())])),
    ((1, "x"), pa.struct([("a", pa.int8()), ("b", pa.string())])),
    ([("a", 1), ("b", "x")], pa.struct([("a", pa.int8()), ("b", pa.string())])),
    ({"k": 1}, pa.map_(pa.string(), pa.int8())),
    ([("k", 1), ("k", 2)], pa.map_(pa.string(), pa.int8())),
]


@pytest.mark.parametrize(("value", "arrow_type"), KEPT, ids=repr)
@pytest.mark.parametrize("shape", [Row, Column])
def test_what_loses_nothing_is_kept(shape, value, arrow_type):
    assert len(emitted(shape([value, None], arrow_type))) == 2


class Point(NamedTuple):
    y: int
    x: int


@dataclasses.dataclass
class DataPoint:
    y: int
    x: int


def pydantic_point():
    pydantic = pytest.importorskip("pydantic")
    return pydantic.create_model("PydanticPoint", y=(int, ...), x=(int, ...))(y=2, x=1)


def spark_row(*values, **named):
    return pytest.importorskip("pyspark.sql").Row(*values, **named)


POINT = pa.struct([("x", pa.int64()), ("y", pa.int64())])
NAMED = {
    "namedtuple": lambda: Point(y=2, x=1),
    "dataclass": lambda: DataPoint(y=2, x=1),
    "pydantic": pydantic_point,
    "Row": lambda: spark_row(y=2, x=1),
}


@pytest.fixture(params=NAMED)
def point(request):
    return NAMED[request.param]()


@pytest.mark.parametrize("shape", [Row, Column])
def test_values_with_names_go_by_name_at_every_depth(point, shape):
    expected = {"x": 1, "y": 2}
    pairs = pa.map_(pa.string(), POINT)
    for value, arrow_type, kept in [
        (point, POINT, expected),
        ([point, None], pa.list_(POINT), [expected, None]),
        ({"k": point}, pairs, [("k", expected)]),
        ({"in": (point,)}, pa.struct([("in", pa.list_(POINT))]), {"in": [expected]}),
        ([[point]], pa.list_(pa.list_(POINT)), [[expected]]),
    ]:
        assert emitted(shape([value], arrow_type)) == [kept]


def test_a_row_with_names_goes_by_name(point):
    schema = RowSchema("b's stream 'default'", pa.schema(list(POINT)))
    assert schema.row(point) == (1, 2)
    assert schema.row((1, 2)) == schema.row(spark_row(1, 2)) == (1, 2)
    size = RowSchema(
        "b's stream 'default'", pa.schema([(name, pa.int64()) for name in ("lines", "columns")])
    )
    assert size.row(os.terminal_size((80, 25))) == (25, 80)  # a C type with names
    other = RowSchema("b's stream 'default'", pa.schema([("x", pa.int64()), ("z", pa.int64())]))
    with pytest.raises(ValueError, match="must be fields of b's stream 'default', got 'y'"):
        other.row(point)


@pytest.mark.parametrize("shape", [Row, Column])
def test_names_that_a_struct_lacks_are_refused(shape):
    one = pa.struct([("x", pa.int64())])
    assert "has no field 'y'" in emitted(shape([Point(y=2, x=1)], one))
    three = pa.struct([*POINT, pa.field("z", pa.int64())])
    assert "must have every field, got none for 'z'" in emitted(shape([Point(y=2, x=1)], three))
    assert "fields must have unique names" in emitted(shape([spark_row("x", "x")(1, 2)], POINT))
    short = emitted(shape([spark_row("x", "y")(1)], POINT))
    assert "Row must have one name per value, got 2 for 1: x, y; use a dict" in short
    file = emitted(shape([os.stat("/")], POINT))  # its last three values have no names
    assert "stat_result must have one name per value, got 7 for 10: st_mode, " in file


TWICE = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"])
LOST = [
    (2.7, pa.int64(), "must be int64, got float: 2.7 would become 2"),
    (decimal.Decimal("1.5"), pa.int64(), "Decimal('1.5') would become 1"),
    (0.1, pa.float32(), "0.1 would become 0.10000000149011612; numpy.float32(value)"),
    (1e300, pa.float32(), "1e+300 would become inf"),
    (NOON.replace(microsecond=5), pa.timestamp("s"), "12, 0, 0, 5) would become"),
    (NOON, pa.date32(), "would become datetime.date(2026, 1, 2)"),
    (NOON, pa.timestamp("us", "UTC"), "would become datetime.datetime(2026, 1, 2, 12, 0, tzinfo"),
    (NOON.replace(tzinfo=UTC), pa.timestamp("us"), "would become"),
    (pd.Timestamp(5), pa.timestamp("us"), "would become"),
    (dt.time(1, 2, 3, 4), pa.time32("s"), "would become datetime.time(1, 2, 3)"),
    (5, pa.timestamp("us"), "5 would become"),
    ("a", pa.binary(), "'a' would become b'a'"),
    (b"a", pa.string(), "b'a' would become 'a'"),
    (np.datetime64("2026-01-02"), pa.date32(), "datetime64('2026-01-02') does not fit"),
    ([np.datetime64("2026-01-02")], pa.list_(pa.time64("us")), "] does not fit"),
    ("ab", pa.list_(pa.string()), "'ab' would become ['a', 'b']"),
    ({3}, pa.list_(pa.int64()), "{3} would become [3]"),
    ([1, 2.5], pa.list_(pa.int64()), "[1, 2.5] would become [1, 2]"),
    ({"a": 1, "b": 2}, pa.struct([("a", pa.int8())]), "has no field 'b'"),
    ({}, pa.struct([("a", pa.int8())]), "got none for 'a'"),
    ([{"a": 1.5}], pa.list_(pa.struct([("a", pa.int8())])), "would become [{'a': 1}]"),
    ({"k": 1.5}, pa.map_(pa.string(), pa.int8()), "would become [('k', 1)]"),
    (2**63, pa.int64(), "int"),
    (Color.RED, pa.int64(), "Color"),
]


@pytest.mark.parametrize(("value", "arrow_type", "words"), LOST, ids=repr)
def test_what_would_become_another_value_is_refused_by_name(value, arrow_type, words):
    said = emitted(Row([value], arrow_type))
    assert said.startswith(f"'v' of b's stream 'default' must be {arrow_type}, got "), said
    assert words in said
    said = emitted(Column([None, value], arrow_type))
    assert said.startswith(f"'v' of b's stream 'default' must be {arrow_type}, got list: "), said


@pytest.mark.parametrize("shape", [Row, Column])
@pytest.mark.parametrize(
    ("value", "arrow_type", "words"),
    [
        (2**40, pa.int32(), "1099511627776"),
        (2**70, pa.int64(), str(2**70)),
        ("\ud83d", pa.string(), "'\\ud83d'"),
        (decimal.Decimal("1.005"), pa.decimal128(10, 2), "Decimal('1.005')"),
        ("x", pa.timestamp("us"), "'x'"),
        (
            {"a": "x" * 500, "b": {"c": 300}},
            pa.struct([("a", pa.string()), ("b", pa.struct([("c", pa.int8())]))]),
            "field 'b': field 'c': 300",
        ),
    ],
)
def test_a_value_that_arrow_does_not_take_is_named(shape, value, arrow_type, words):
    assert f"{words} does not fit" in emitted(shape([value], arrow_type))


@pytest.mark.parametrize(
    ("column", "arrow_type", "words"),
    [
        (
            pa.array([0.5, math.nan, 0.1]),
            pa.float32(),
            "0.1 would become 0.10000000149011612 in row 2",
        ),
        (pa.chunked_array([[0.5], [0.5, 0.1]]), pa.float32(), "in row 2"),
        (
            pa.array([NOON.replace(microsecond=5)]),
            pa.timestamp("s"),
            "datetime.datetime(2026, 1, 2, 12, 0, 0, 5) does not fit in row",
        ),
        (pa.array([NOON]), pa.date32(), "have another meaning"),
        (pa.array(["7", "007"]), pa.int64(), "'007' would become 7 in row 1"),
        (pa.array([1.5]), pa.decimal128(3, 0), "would become"),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int8())]), "would become"),
        (pa.array([[0.5], [0.1]]), pa.list_(pa.float32()), "in row 1"),
        (
            pa.array([[1.0, 2.0], [1.0, -0.0]], pa.list_(pa.float64(), 2)),
            pa.list_(pa.int64()),
            "[1.0, -0.0] would become [1, 0] in row 1",
        ),
        (np.array([0.5, 0.1]), pa.float32(), "in row 1"),
        (pd.Series([NOON]), pa.date32(), "another meaning as date32[day]"),
        (pa.array([1]), pa.timestamp("us"), "have another meaning"),
        (pd.Series([NOON]), pa.timestamp("us", "UTC"), "have another meaning"),
        (pa.array([{"a": 1}]), pa.struct([("a", pa.date32())]), "have another meaning"),
        (np.array([0.0, -0.0]), pa.int8(), "-0.0 would become 0 in row 1"),
        (pa.array([[1]]), pa.int64(), "Unsupported cast"),
        (TWICE, pa.struct([("a", pa.int8())]), "must have unique names"),
        (pa.array([[None]]), pa.struct([("a", pa.int8())]), "Unsupported cast"),
        (pa.array([1, 300, 400]), pa.int8(), "300 does not fit in row 1"),
        (pa.array([b"a", b"caf\xe9"]), pa.string(), r"caf\xe9' does not fit in row 1"),
        (
            pa.array([decimal.Decimal("1.50"), decimal.Decimal("1.25")]),
            pa.decimal128(3, 1),
            "Decimal('1.25') does not fit in row 1",
        ),
    ],
)
def test_a_column_that_no_cast_leads_back_to_is_refused(column, arrow_type, words):
    said = emitted(Column(column, arrow_type))
    assert said.startswith(f"'v' of b's stream 'default' must be {arrow_type}, got "), said
    assert words in said


@pytest.mark.parametrize(
    ("column", "arrow_type", "values"),
    [
        (pa.array([0.5, math.nan, None]), pa.float32(), 3),
        (pa.array([[0.5, math.nan], None]), pa.list_(pa.float32()), 2),
        (pa.array([[0.5, math.nan]], pa.list_(pa.float64(), 2)), pa.list_(pa.float32()), 1),
        (pa.array([{"a": math.nan}]), pa.struct([("a", pa.float32())]), 1),
        (
            pa.array([[("k", math.nan)]], pa.map_(pa.string(), pa.float64())),
            pa.map_(pa.string(), pa.float32()),
            1,
        ),
        (pa.array(["a", None, "a"]).dictionary_encode(), pa.string(), 3),
        (pa.nulls(2), pa.int8(), 2),
        (pa.array([[], [None], None]), pa.list_(pa.string()), 3),
        (pa.array([[], []]), pa.large_list(pa.struct([("a", pa.int8())])), 2),
        pytest.param(
            pa.array([{"a": None, "b": []}]),
            pa.struct([("b", pa.list_(pa.int8())), ("a", pa.int8())]),
            1,
            marks=pytest.mark.skipif(ARROW < 21, reason="fields of another order are refused"),
        ),
        (
            pa.array([[("k", None)]], pa.map_(pa.string(), pa.null())),
            pa.map_(pa.string(), pa.int8()),
            1,
        ),
        (pd.Series(["a", math.nan], dtype=object), pa.string(), 2),
        (pd.Series([1, None], dtype="Int64"), pa.int8(), 2),
        (pd.Series(["a", "b"], dtype="category"), pa.string(), 2),
        (range(3), pa.int8(), 3),
        (pa.array([1, None, -99_999_999]), pa.decimal128(10, 2), 3),
        (pa.array([2**64 - 1], pa.uint64()), pa.decimal256(76, 56), 1),
        (pa.array([1], pa.int32()), pa.decimal256(76, 70), 1),
        (pa.array([[{"a": 1}]]), pa.list_(pa.struct([("a", pa.decimal128(10, 2))])), 1),
    ],
)
def test_a_column_that_loses_nothing_is_cast(column, arrow_type, values):
    assert len(emitted(Column(column, arrow_type))) == values


def test_dictionaries_are_compared_by_their_values():
    kind = pa.dictionary(pa.int8(), pa.float64())
    one = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), [math.nan, -0.0])
    assert are_alike(pa.array([{"a": v} for v in one], pa.struct([("a", kind)])).field(0), one)
    assert not are_alike(one, pa.array([math.nan, 0.0], kind))


@pytest.mark.parametrize("depth", ["map", "list", "struct"])
@pytest.mark.parametrize("was", ["cut", "taken", "filtered", "whole"])
def test_a_cast_map_can_be_cut_joined_and_cast_again(depth, was):
    """Before pyarrow 26 it ended the process: a cast left null counts of keys unknown."""
    keys, nullable = (pa.struct([pa.field("a", pa.int32(), some)]) for some in (False, True))
    rows = [[({"a": 1}, "x")], None, [({"a": 2}, "y"), ({"a": 3}, "z")], []]

    def of(key):
        kind = pa.map_(key, pa.string())
        return {"list": pa.list_(kind), "struct": pa.struct([("m", kind)])}.get(depth, kind)

    make = {"list": lambda row: [row, row], "struct": lambda row: {"m": row}}.get(
        depth, lambda x: x
    )
    column = pa.array([make(row) for row in rows], of(keys))
    column = {
        "cut": lambda: column.slice(0, 3),
        "taken": lambda: column.take(pa.array([2, 0, 1])),
        "filtered": lambda: column.filter(pa.array([True, False, True, True])),
        "whole": lambda: column,
    }[was]()
    found = cast_column(column, of(nullable))
    cut = pa.concat_arrays([found.slice(1, 1), found.take(pa.array([0, 2]))])
    again = cast_column(cut, of(pa.struct([("a", pa.int64())])))
    assert pa.concat_arrays([again, again]).to_pylist() == 2 * [
        column[at].as_py() for at in (1, 0, 2)
    ]
