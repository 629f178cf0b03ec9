"""The ids of records."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore._arrow.shown import text_of
from ackcore.spark.tasks.record_ids import SpoutSpec

VALUES = {
    "int": ([1, None, -5], pa.int64(), ["1", "null", "-5"]),
    "text": (["a", None, ""], pa.string(), ["a", "null", ""]),
    "bytes": ([b"a", b"\xff", None], pa.binary(), ['["61"]', '["ff"]', "[null]"]),
    "date": ([datetime.date(2026, 1, 2)], pa.date32(), ["2026-01-02"]),
    "decimal": ([decimal.Decimal("1.50")], pa.decimal128(9, 2), ["1.50"]),
    "bool": ([True, False], pa.bool_(), ["true", "false"]),
    "list": ([[1, 2], None], pa.list_(pa.int64()), ["[[1, 2]]", "[null]"]),
}


def source(schema, *message_id):
    return SpoutSpec("s", 0, schema, message_id, True, False, False, 7)


@pytest.mark.parametrize("kind", VALUES)
def test_a_message_id_reads_the_same_in_any_company(kind):
    """Its stable id hangs on it, and a retry comes in other company."""
    values, arrow_type, texts = VALUES[kind]
    batch = pa.record_batch([pa.array(values, arrow_type)], ["id"])
    one = source(batch.schema, "id")
    together = one.message_ids(batch, 0, 0, 0).to_pylist()
    alone = [one.message_ids(batch.slice(i, 1), 0, 0, 0)[0].as_py() for i in range(len(batch))]
    assert together == alone == texts


def test_several_columns_are_a_list():
    batch = pa.record_batch([["t", "t"], [0, 1]], ["topic", "partition"])
    ids = source(batch.schema, "topic", "partition").message_ids(batch, 0, 0, 0)
    assert ids.to_pylist() == ['["t", 0]', '["t", 1]']


@given(st.lists(st.text(), min_size=1, max_size=3), st.integers(-(2**63), 2**63 - 1))
def test_many_rows_of_few_texts_are_called_as_each_alone(texts, first):
    """Their JSON is put together in columns then, to the letter."""
    n = 16 * len(texts)
    numbers = [max(first - row, -(2**63)) for row in range(n)]
    batch = pa.record_batch([texts * 16, pa.array(numbers, pa.int64())], ["topic", "offset"])
    one = source(batch.schema, "topic", "offset")
    expected = [json.dumps(row) for row in zip(texts * 16, numbers, strict=True)]
    assert one.message_ids(batch, 0, 0, 0).to_pylist() == expected
    assert one.message_ids(batch.slice(3, 1), 0, 0, 0).to_pylist() == expected[3:4]


def test_positions_are_stamped():
    batch = pa.record_batch([[7, 8]], ["n"])
    assert source(batch.schema).message_ids(batch, 4, 2, 10).to_pylist() == ["4-2-10", "4-2-11"]


def test_claims_are_alike_for_ids_that_are_alike():
    batch = pa.record_batch([["a", "b", "a", None, None]], ["id"])
    one = source(batch.schema, "id")
    a, b, again, null, nulls = one.claim_ids(batch).tolist()
    assert (a, null) == (again, nulls)
    assert len({a, b, null}) == 3


@pytest.mark.parametrize("columns", [("id",), ("at",), ("id", "at"), ("at", "id")])
def test_what_python_cannot_show_is_a_message_id_in_any_company(columns):
    """Text that is not UTF-8 is escaped; a time beyond year 9999 is ISO 8601."""
    ids = text_of([b"plain", b"caf\xe9", b"more"] * 16)
    times = pa.array([0, 10**18, 0] * 16).cast(pa.timestamp("us"))
    batch = pa.record_batch([ids, times], ["id", "at"])
    one = source(batch.schema, *columns)
    together = one.message_ids(batch, 0, 0, 0).to_pylist()
    alone = [one.message_ids(batch.slice(i, 1), 0, 0, 0)[0].as_py() for i in range(len(batch))]
    assert together == alone
    values = {"id": "caf\\xe9", "at": "33658-09-27T01:46:40.000000"}
    expected = [values[name] for name in columns]
    assert together[1] == (expected[0] if len(columns) == 1 else json.dumps(expected))
