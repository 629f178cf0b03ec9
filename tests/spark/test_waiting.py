"""Records that wait for a retry: who is due, what is written, and what their columns may become."""

from __future__ import annotations

import pyarrow as pa
import pytest
from checkpoints import OPEN, records, run_one

from ackcore.spark.schema_changes import ColumnsChanged
from ackcore.spark.state import TRACKING, CheckpointForeign

# -- columns ----------------------------------------------------------------------------------


def with_numbers(table, kind):
    """Records whose value is a number of their own."""
    numbers = pa.array(range(len(table)), kind)
    return table.set_column(len(TRACKING), pa.field("value", kind), numbers)


def schema(**columns):
    return {"lines": pa.schema(list(columns.items()))}


def test_who_waits_has_the_columns_that_the_source_has_now(checkpoint):
    with OPEN(checkpoint, sources=schema(value=pa.int64())) as state:
        run_one(state, 0, {"lines": with_numbers(records(0, 4), pa.int64())})
    now = schema(more=pa.string(), value=pa.int32())
    with OPEN(checkpoint, sources=now) as state:
        plan = state.make_plan(1, 1001)
        state.write_plan(plan)
        due = state.split_due(plan).due["lines"]
        assert due.schema.equals(pa.schema([*TRACKING, *now["lines"]]))
        assert due.select(["more", "value"]).to_pylist() == [
            {"more": None, "value": 0},
            {"more": None, "value": 1},
        ]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"value": pa.date32()}, r"'value' was int64 and is date32\[day\] now"),
        ({"value": pa.int8()}, r"'value' was int64 and is int8 now"),
        ({"other": pa.int64()}, r"'value', int64, is not there any more"),
    ],
)
def test_columns_that_would_change_a_value_are_refused_before_there_is_a_plan(
    checkpoint, now, words
):
    with OPEN(checkpoint, sources=schema(value=pa.int64())) as state:
        run_one(state, 0, {"lines": with_numbers(records(0, 200), pa.int64())})
    with pytest.raises(ColumnsChanged, match=rf"200 records of spout 'lines' .*{words}") as told:
        OPEN(checkpoint, sources=schema(**now))
    assert isinstance(told.value, CheckpointForeign)
    assert "Let the former source run until nothing waits" in str(told.value)
    assert not (checkpoint / "ackcore/batches/1.plan").exists()
    with OPEN(checkpoint, sources=schema(value=pa.int64())) as state:
        assert state.split_due(state.make_plan(1, 10**9)).due["lines"].num_rows == 200
