"""Rows as messages: key, value and headers as they are, or as JSON that reads back."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore._arrow.shown import json_encoder, text_of
from ackcore.kafka.messages import MessageColumns

ROWS = pa.RecordBatch.from_pylist(
    [
        {"k": "a", "v": b"1", "n": 1, "s": {"x": 1}, "h": [{"key": "p", "value": b"q"}], "m": []},
        {"k": None, "v": None, "n": 2, "s": None, "h": None, "m": [("r", "s"), ("t", None)]},
    ],
    pa.schema(
        [
            ("k", pa.string()),
            ("v", pa.binary()),
            ("n", pa.int64()),
            ("s", pa.struct([("x", pa.int32())])),
            ("h", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ("m", pa.map_(pa.string(), pa.string())),
        ]
    ),
)


def contents(**columns):
    return list(MessageColumns(**columns).contents(ROWS))


def test_text_and_bytes_go_as_they_are():
    assert contents(key="k", value="v", headers="h") == [
        ("a", b"1", [("p", b"q")]),
        (None, None, []),
    ]
    assert contents(value="k", headers="m") == [
        (None, "a", []),
        (None, None, [("r", b"s"), ("t", None)]),
    ]


def test_a_struct_and_a_whole_row_go_as_json():
    assert [value for _, value, _ in contents(value="s")] == ['{"x":1}', None]
    one, two = (json.loads(value) for _, value, _ in contents(key="k", headers="h"))
    assert one == {"k": "a", "v": "MQ==", "n": 1, "s": {"x": 1}, "m": {}}
    assert two == {"k": None, "v": None, "n": 2, "s": None, "m": {"r": "s", "t": None}}


def test_a_row_of_headers_alone_is_an_empty_object():
    rows = ROWS.select(["m"])
    found = list(MessageColumns(headers="m").contents(rows))
    assert found == [(None, "{}", []), (None, "{}", [("r", b"s"), ("t", None)])]


@pytest.mark.parametrize(
    ("columns", "error", "says"),
    [
        ({"key": "z"}, ValueError, "key must be one of the columns k, v, n, s, h, m, got 'z'"),
        ({"key": "n"}, TypeError, "'n', the key, must be of text or bytes, got int64; have the"),
        ({"value": "n"}, TypeError, "'n', the value, must be of text, bytes or a struct"),
        ({"value": "h"}, TypeError, "leave value out to send whole rows as JSON"),
        ({"headers": "s"}, TypeError, "'s', the headers, must be a list of struct<key: string"),
        ({"headers": "k"}, TypeError, "or a map of text"),
    ],
)
def test_other_columns_are_refused(columns, error, says):
    with pytest.raises(error) as raised:
        MessageColumns(**columns).check("sink 'out'", ROWS.schema)
    assert str(raised.value).startswith("sink 'out': ")
    assert says in str(raised.value)


def test_a_column_whose_name_two_columns_have_is_refused():
    schema = pa.schema([("k", pa.string()), ("v", pa.string()), ("k", pa.string())])
    with pytest.raises(ValueError, match=r"key must be one of .* k, got 'k', the name of two"):
        MessageColumns(key="k").check("sink 'out'", schema)


def test_what_json_has_nothing_for_is_refused_if_it_goes_there():
    schema = pa.schema([("k", pa.string()), ("took", pa.duration("us"))])
    MessageColumns(value="k").check("sink 'out'", schema)
    with pytest.raises(TypeError, match=r"column 'took' of duration\[us\] is sent as JSON"):
        MessageColumns().check("sink 'out'", schema)


SCALARS = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.string(), st.text(st.characters(exclude_categories=["Cs"]))),
    (pa.bool_(), st.booleans()),
    (pa.null(), st.none()),
]
TYPES = st.recursive(
    st.sampled_from(SCALARS),
    lambda inner: st.one_of(
        inner.map(lambda it: (pa.list_(it[0]), st.lists(st.none() | it[1], max_size=3))),
        st.tuples(inner, inner).map(
            lambda two: (
                pa.struct([('a"', two[0][0]), ("ü", two[1][0])]),
                st.fixed_dictionaries({'a"': st.none() | two[0][1], "ü": st.none() | two[1][1]}),
            )
        ),
    ),
    max_leaves=4,
)


@given(st.data())
def test_json_reads_back(data):
    kind, values = data.draw(TYPES)
    value = data.draw(st.none() | values)
    (through_arrow,) = pa.array([value], kind).to_pylist()
    assert json.loads(json_encoder(kind)(through_arrow)) == value


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.float32(), float("nan"), '"NaN"'),
        (pa.float64(), float("-inf"), '"-Infinity"'),
        (pa.decimal128(20, 2), decimal.Decimal("-12345678901234567.80"), "-12345678901234567.80"),
        (pa.decimal128(10, 0), decimal.Decimal("1E+3"), "1000"),
        (pa.date32(), datetime.date(2024, 2, 29), '"2024-02-29"'),
        (pa.timestamp("us"), datetime.datetime(2024, 2, 29, 1, 2, 3), '"2024-02-29T01:02:03"'),
        (
            pa.timestamp("ms", "UTC"),
            datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
            '"2024-02-29T00:00:00+00:00"',
        ),
        (pa.binary(), b"\xff", '"/w=="'),
        (pa.map_(pa.string(), pa.int8()), [("a", 1), ("b", None)], '{"a":1,"b":null}'),
    ],
)
def test_what_json_has_no_type_for(kind, value, text):
    (through_arrow,) = pa.array([value], kind).to_pylist()
    assert json_encoder(kind)(through_arrow) == text


def test_text_that_is_not_utf8_is_named_sent_as_it_is_and_escaped_in_json():
    text = text_of([b"plain", b"caf\xe9", None])
    far = pa.array([0, 10**18, None]).cast(pa.timestamp("us", "UTC"))
    batch = pa.record_batch([text, far], ["t", "at"])
    as_json = MessageColumns(key="t")
    assert as_json.unfit(batch) == {1: "the text of column 't' is not UTF-8"}
    assert list(as_json.contents(batch)) == [
        (b"plain", '{"t":"plain","at":"1970-01-01T00:00:00+00:00"}', []),
        (b"caf\xe9", '{"t":"caf\\\\xe9","at":"33658-09-27T01:46:40.000000+00:00"}', []),
        (None, '{"t":null,"at":null}', []),
    ]
    assert MessageColumns(value="t").unfit(batch) == {1: "the text of column 't' is not UTF-8"}
    assert [value for _, value, _ in MessageColumns(value="t").contents(batch)] == [
        b"plain",
        b"caf\xe9",
        None,
    ]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])),
        pa.map_(pa.string(), pa.string()),
    ],
)
def test_a_nul_in_a_header_cuts_nothing(kind):
    # confluent-kafka would send the header n\0m: x\0y as n: x.
    is_map = pa.types.is_map(kind)
    rows = [[("n", "x\0y")], None, [("n\0m", "x"), ("n", None)]]
    made = rows if is_map else [
        [{"key": name, "value": value} for name, value in row] if row is not None else None
        for row in rows
    ]  # fmt: skip
    batch = pa.record_batch([pa.array(["a", "b", "c"]), pa.array(made, kind)], ["v", "h"])
    columns = MessageColumns(value="v", headers="h")
    said = "a header's name in column 'h' has a NUL, which ends names"
    assert columns.unfit(batch) == {2: said}
    assert columns.unfit(batch.slice(1)) == {1: said}
    assert columns.unfit(batch.slice(0, 2)) == columns.unfit(batch.slice(0, 0)) == {}
    assert [headers for _, _, headers in columns.contents(batch)] == [
        [("n", b"x\0y")],
        [],
        [(r"n\x00m", b"x"), ("n", None)],
    ]
