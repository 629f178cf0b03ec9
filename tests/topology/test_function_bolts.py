"""Bolts that call a function: each row's answer behind its own columns, or its error."""

from __future__ import annotations

import asyncio
from itertools import count

import numpy as np
import pyarrow as pa
import pytest

from ackcore.calls import CallSettings, Reject, Retry
from ackcore.topology.executors import executor_for
from ackcore.topology.function_calls import BatchFunction, RowFunction
from ackcore.topology.tuples import Identity

NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False), ("text", pa.string())])
SQUARE = pa.schema([pa.field("square", pa.int64(), nullable=False)])
ROWS = 1100  # some slices of a task


def square(row):
    if row["n"] % 10 == 3:
        raise Reject("no")
    if row["n"] % 10 == 7:
        raise Retry("busy", after_s=3600)
    return row["n"] ** 2


async def square_async(row):
    await asyncio.sleep(0.001 * (row["n"] % 2))
    return square(row)


def square_batch(batch: pa.RecordBatch):
    numbers = batch["n"].to_pylist()
    if any(n % 10 == 3 for n in numbers):
        raise Reject("no")
    if batch.num_rows == 1 and numbers[0] % 10 == 7:
        return [[None]]
    return [[n**2 if n % 10 != 7 else None for n in numbers]]


def run(bolt, *batches):
    """Return the bolt's rows, and the reasons of the failed ones."""
    executor = executor_for("fn", bolt)
    emitted, failed, first = {}, {}, count()
    for batch in batches:
        numbers = [next(first) for _ in range(batch.num_rows)]
        ids = pa.array([str(n) for n in numbers])
        attempts = np.full(len(numbers), 4, np.int32)
        identity = Identity(ids, attempts, np.array(numbers, np.int64))
        results = executor.process("frame", "default", batch, identity)
        for _, rows, anchors in results.emissions:
            emitted.update(zip(anchors.handles.tolist(), rows.to_pylist(), strict=True))
        for handles, reasons in results.failures:
            failed.update(zip(handles.tolist(), reasons, strict=True))
    executor.flush()
    executor.cleanup()
    return emitted, failed


def batch_of(start, stop):
    return pa.record_batch([range(start, stop), [f"t{n}" for n in range(start, stop)]], NUMBERS)


@pytest.mark.parametrize("function", [square, square_async, square_batch])
def test_each_row_is_emitted_with_its_answer_or_fails(function):
    make = BatchFunction if function is square_batch else RowFunction
    settings = CallSettings(max_concurrency=8, breaker_failures=None)
    bolt = make(function, SQUARE, NUMBERS, settings, reject=["ZeroDivisionError"])
    emitted, failed = run(bolt, batch_of(0, ROWS), batch_of(ROWS, ROWS + 5))
    bad = {n: n % 10 for n in range(ROWS + 5) if n % 10 in (3, 7)}
    assert emitted == {
        n: {"n": n, "text": f"t{n}", "square": n * n} for n in range(ROWS + 5) if n not in bad
    }
    assert failed.keys() == bad.keys()
    for n, digit in bad.items():
        reason = failed[n]
        if digit == 3:
            assert (reason.type, reason.message, reason.final) == ("Reject", "no", True)
        elif function is square_batch:
            assert "'square' of outputs must not hold nulls" in reason.message
        else:
            assert (reason.type, reason.after_ms, reason.final) == ("Retry", 3_600_000, False)


def test_a_row_says_which_record_it_is():
    def said(row):
        return f"{row.message_id} {row.attempt} {row.stable_id} {row.component}"

    bolt = RowFunction(said, pa.schema([("said", pa.string())]), NUMBERS, CallSettings())
    emitted, failed = run(bolt, batch_of(0, 600), batch_of(600, 601))
    assert failed == {}
    assert [row["said"] for row in emitted.values()] == [f"{n} 4 {n} frame" for n in range(601)]


def test_what_is_tried_again_is_as_the_bolt_says():
    def fails(row):
        raise ConnectionError("reset") if row["n"] else ValueError("no")

    settings = CallSettings(max_concurrency=1)
    bolt = RowFunction(fails, SQUARE, NUMBERS, settings, retry_on=["ConnectionError"])
    _, failed = run(bolt, batch_of(0, 2))
    assert [failed[n].final for n in (0, 1)] == [True, False]


def test_a_function_that_cannot_connect_fails_all_rows_with_its_reason():
    class Broken:
        def __enter__(self):
            raise ConnectionError("refused")

        def __exit__(self, *error):
            """Never called."""

        def __call__(self, row):
            return 1

    _, failed = run(RowFunction(Broken(), SQUARE, NUMBERS, CallSettings()), batch_of(0, 1))
    assert (failed[0].type, failed[0].message) == ("ConnectionError", "refused")
