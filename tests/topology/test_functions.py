"""Functions that stand for a bolt: told apart by what they say of themselves, answers checked."""

from __future__ import annotations

import asyncio
import functools
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from acting import failed as failed_of

from ackcore.calls import RateLimit, Reject, Retry, used
from ackcore.calls.call_settings import CallSettings
from ackcore.topology import Tuple
from ackcore.topology.bolt_functions import AnswerRows, Kind, columns_of, kind_of
from ackcore.topology.executors import executor_for
from ackcore.topology.function_calls import BatchFunction, RowCalls, RowFunction, _warned
from ackcore.topology.tuples import Identity

PRICE = pa.schema([pa.field("price", pa.float64(), nullable=False)])
BOTH = pa.schema([("price", pa.float64()), ("tags", pa.list_(pa.string()))])
VECTOR = pa.schema([("vec", pa.list_(pa.float64()))])
PLACE = pa.schema([("at", pa.struct([("x", pa.int64())]))])


def of_a_row(row):
    return row


async def of_a_row_async(row):
    return row


def of_a_tuple(row: Tuple):
    return row


def of_a_batch(batch: pa.RecordBatch):  # the annotation is text here: see the import above
    return batch


def of_a_batch_and_more(batch: pa.RecordBatch, rate=1.0, *, currency):
    return batch


def of_something_unknown(row: NotThere):  # noqa: F821
    return row


class OfARow:
    def __call__(self, row):
        return row


class OfARowAsync:
    async def __call__(self, row):
        return row


class OfABatch:
    def __call__(self, batch: pa.RecordBatch):
        return batch

    def method(self, batch: pa.RecordBatch):
        return batch


def plainly(batch):
    return batch


plainly.__annotations__ = {"batch": pa.RecordBatch}  # as without that import


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (of_a_row, Kind.ROW),
        (of_a_tuple, Kind.ROW),
        (of_something_unknown, Kind.ROW),
        (lambda row: row, Kind.ROW),
        (len, Kind.ROW),
        (OfARow(), Kind.ROW),
        (functools.partial(lambda key, row: row, 1), Kind.ROW),
        (of_a_row_async, Kind.ASYNC),
        (OfARowAsync(), Kind.ASYNC),
        (functools.partial(of_a_row_async), Kind.ASYNC),
        (functools.partial(OfARowAsync()), Kind.ASYNC),
        (of_a_batch, Kind.BATCH),
        (plainly, Kind.BATCH),
        (OfABatch(), Kind.BATCH),
        (OfABatch().method, Kind.BATCH),
        (functools.partial(of_a_batch_and_more, currency="EUR"), Kind.BATCH),
        (wrapped(of_a_batch), Kind.BATCH),
    ],
)
def test_a_function_says_what_it_takes(function, kind):
    assert kind_of(function) is kind


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates it at the definition")
def test_a_function_whose_annotation_is_imported_for_type_checkers_says_what_it_takes():
    names = {}
    exec(compile("def of_a_batch(b: pa.RecordBatch): pass", "", "exec", dont_inherit=True), names)
    assert kind_of(names["of_a_batch"]) is Kind.BATCH


def of_a_table(table: pa.Table):
    return table


def of_pandas(frame: pd.DataFrame):
    return frame


async def of_a_batch_async(batch: pa.RecordBatch):
    return batch


def several(row):
    yield row


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (5, "fn must be a function of a row or of a pyarrow.RecordBatch, got int 5"),
        (OfARow, "fn must be a function, got the class OfARow; pass an instance"),
        (lambda: 1, r"fn must take one argument, .* got a function of \(\); bind the other"),
        (lambda row, key: 1, r"fn must take one argument, .* got a function of \(row, key\)"),
        (of_a_table, "fn must take a row or a pyarrow.RecordBatch, got .* annotated as Table"),
        (of_pandas, "annotated as DataFrame; annotate it as pyarrow.RecordBatch"),
        (of_a_batch_async, "fn must be a plain function if it takes a pyarrow.RecordBatch"),
        (several, "fn must return one answer, got a function with 'yield'"),
    ],
)
def test_what_cannot_be_called_so_is_refused(function, words):
    with pytest.raises(TypeError, match=words):
        kind_of(function)


def test_an_answer_is_a_row_by_position_by_name_or_the_one_value():
    assert AnswerRows(BOTH).row((1.5, ["a"])) == (1.5, ["a"])
    assert AnswerRows(BOTH).row({"tags": None, "price": 1.5}) == (1.5, None)
    one = AnswerRows(PRICE)
    assert [one.row(answer) for answer in (1.5, (1.5,), [1.5], {"price": 1.5})] == [(1.5,)] * 4
    assert one.row(None) == (None,)
    assert one.row(np.float64(1.5)) == (1.5,)


class Place(NamedTuple):
    x: int


class Price(NamedTuple):
    price: float


@dataclass
class Vector:
    vec: list[float]


class Tagged(NamedTuple):
    tags: list[str] | None
    price: float


def test_an_answer_with_names_is_a_row_or_the_one_struct():
    assert AnswerRows(PRICE).row(Price(1.5)) == (1.5,)
    assert AnswerRows(BOTH).row(Tagged(tags=None, price=1.5)) == (1.5, None)
    for answer in (Place(1), (Place(1),), {"at": Place(1)}):
        answers = AnswerRows(PLACE)
        ((_, batch),), misfits = answers.batches([answers.row(answer)])
        assert (batch.column("at").to_pylist(), misfits) == ([{"x": 1}], [])
    assert AnswerRows(VECTOR).row(([0.5, 1.5],)) == ([0.5, 1.5],)
    assert AnswerRows(VECTOR).row([[0.5]]) == ([0.5],)
    assert AnswerRows(VECTOR).row(Vector([0.5])) == ([0.5],)
    assert AnswerRows(VECTOR).row((range(2),)) == (range(2),)
    assert AnswerRows(VECTOR).row(({0.5},)) == ({0.5},)


async def nothing():
    """Returns a coroutine, which is never run."""


@pytest.mark.parametrize(
    ("schema", "answer", "words"),
    [
        (BOTH, 1.5, "values must be a tuple, a list or a dict of values for outputs, got float"),
        (BOTH, None, "values must be a tuple, .* got NoneType"),
        (
            BOTH,
            (1.5,),
            r"must have 2 values for outputs, got 1 \(float\); write \(price, tags\), or a dict",
        ),
        (BOTH, {"price": 1, "tag": 2}, "values must be fields of outputs, got 'tag'; did you mean"),
        (VECTOR, [0.5, 1.5], r"the list<item: double> of 'vec' in a tuple, got \[0.5, 1.5\]; "),
        (VECTOR, [0.5], r"write return \(value,\)"),
        (PLACE, {"x": 1}, r"the struct<x: int64> of 'at' in a tuple, .* write return \(value,\)"),
    ],
)
def test_an_answer_that_is_no_row_is_refused(schema, answer, words):
    with pytest.raises((TypeError, ValueError), match=words):
        AnswerRows(schema).row(answer)


def test_an_answer_that_has_not_run_is_refused():
    for check in (AnswerRows(PRICE).row, lambda answer: columns_of(answer, PRICE, 1)):
        answer = nothing()
        with pytest.raises(TypeError, match="got coroutine, which has not run; declare it with"):
            check(answer)
        answer.close()
        with pytest.raises(TypeError, match=r"got generator, .* run; return the values of one row"):
            check(one for one in [1.0])


@pytest.mark.parametrize(
    "answer",
    [
        pa.array([1.5, 2.5]),
        pa.chunked_array([[1.5], [2.5]]),
        np.array([1.5, 2.5]),
        pd.Series([1.5, 2.5]),
        [[1.5, 2.5]],
        {"price": [1.5, 2.5]},
        pa.table({"price": [1.5, 2.5]}),
        pa.record_batch({"price": [1.5, 2.5]}),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_a_batchs_answer_is_columns_or_the_one_column(answer):
    assert columns_of(answer, PRICE, 2).equals(pa.record_batch([[1.5, 2.5]], schema=PRICE))


def test_a_batchs_answer_with_names_goes_by_name():
    both = columns_of(Tagged(tags=[["a"], None], price=[1.5, 2.5]), BOTH, 2)
    assert both.to_pylist() == [{"price": 1.5, "tags": ["a"]}, {"price": 2.5, "tags": None}]


@pytest.mark.parametrize(
    ("schema", "answer", "words"),
    [
        (PRICE, pa.array([1.5]), "fn must return 2 rows, one for each row of its batch, got 1"),
        (PRICE, pa.array([1.5, None]), "'price' of outputs must not hold nulls, got 1"),
        (
            PRICE,
            ["a", "b"],
            "columns must be a list of 1 for outputs (price), got a list of 2; its",
        ),
        (PRICE, None, "'price' of outputs must be a column, got NoneType; repeat a value once"),
        (PRICE, 1.5, "'price' of outputs must be a column, got float; repeat a value once"),
        (BOTH, pa.array([1.5, 2.5]), "columns must be a RecordBatch, a Table, a mapping or a list"),
        (BOTH, {"price": [1, 2], "tag": [[], []]}, "got 'tag'; did you mean 'tags'?"),
    ],
)
def test_a_batchs_answer_that_does_not_fit_is_refused(schema, answer, words):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        columns_of(answer, schema, 2)


# --- Bolts that call a function: each row's answer behind its own columns, or its error.


NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False), ("text", pa.string())])
SQUARE = pa.schema([pa.field("square", pa.int64(), nullable=False)])
ROWS = 1100  # some slices of a task


def square(row):
    if row["n"] % 10 == 3:
        raise Reject("no")
    if row["n"] % 250 == 7:  # few of them, as each delays the others
        raise Retry("busy", after_s=3600)
    return row["n"] ** 2


async def square_async(row):
    await asyncio.sleep(0.001 * (row["n"] % 2))
    return square(row)


def square_batch(batch: pa.RecordBatch):
    numbers = batch["n"].to_pylist()
    if any(n % 10 == 3 for n in numbers):
        raise Reject("no")
    return [[n**2 if n % 250 != 7 else None for n in numbers]]


def run(bolt, *batches):
    """Return the bolt's rows, and the reasons of the failed ones."""
    executor = executor_for("fn", bolt)
    rows, results, first = {}, [], 0
    for batch in batches:
        numbers = range(first, first := first + batch.num_rows)
        ids = pa.array([str(n) for n in numbers])
        identity = Identity(ids, np.full(len(numbers), 4, np.int32), np.array(numbers, np.int64))
        results.append(executor.process("frame", "default", batch, identity))
        for _, emitted, anchors in results[-1].emissions:
            rows.update(zip(anchors.handles.tolist(), emitted.to_pylist(), strict=True))
    executor.flush()
    executor.cleanup()
    return rows, failed_of(results)


def batch_of(start, stop):
    return pa.record_batch([range(start, stop), [f"t{n}" for n in range(start, stop)]], NUMBERS)


@pytest.mark.parametrize("function", [square, square_async, square_batch])
def test_each_row_is_emitted_with_its_answer_or_fails(function):
    make = BatchFunction if function is square_batch else RowFunction
    settings = CallSettings(max_concurrency=8, breaker_failures=None)
    bolt = make(function, SQUARE, NUMBERS, settings, reject=["ZeroDivisionError"])
    emitted, failed = run(bolt, batch_of(0, ROWS), batch_of(ROWS, ROWS + 5))
    bad = {n for n in range(ROWS + 5) if n % 10 == 3 or n % 250 == 7}
    assert emitted == {
        n: {"n": n, "text": f"t{n}", "square": n * n} for n in range(ROWS + 5) if n not in bad
    }
    assert failed.keys() == bad
    for n, reason in failed.items():
        if n % 10 == 3:
            assert (reason.type, reason.message, reason.final) == ("Reject", "no", True)
        elif function is square_batch:
            assert "'square' of outputs must not hold nulls" in reason.message
        else:
            assert (reason.type, reason.after_ms, reason.final) == ("Retry", 3_600_000, False)


def priced(row):
    used(cost=row["text"])
    return 1


def of_text(batch: pa.RecordBatch):
    used(tokens=batch["text"][0].as_py())
    return [[1] * batch.num_rows]


def too_few(batch: pa.RecordBatch):
    return [[1] * (batch.num_rows - 1)]


class Quits:
    def __len__(self):
        return 3

    def __getitem__(self, rows):
        raise SystemExit("no rows")


def quits(batch: pa.RecordBatch):
    return [Quits()]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (priced, "cost of used() must be a number, got str 't0'"),
        (
            lambda row: ("one", 2),
            "values must have 1 value for outputs, got 2 (str, int); write (square,), or a dict",
        ),
        (lambda row: ("one",), "'square' of fn's stream 'default' must be int64, got str"),
        (of_text, "tokens of used() must be a number, got str 't0'"),
        (too_few, "fn must return 3 rows, one for each row of its batch, got 2"),
        (quits, "no rows"),
    ],
)
def test_an_answer_that_does_not_fit_is_final_and_the_call_is_not_repeated(function, says):
    paid = []
    is_batch = function in (of_text, too_few, quits)

    def counted(one):
        paid.append(one)
        return function(one)

    counted.__annotations__ = function.__annotations__
    make = BatchFunction if is_batch else RowFunction
    emitted, failed = run(make(counted, SQUARE, NUMBERS, CallSettings()), batch_of(0, 3))
    assert not emitted
    assert failed.keys() == {0, 1, 2}
    assert all(reason.final for reason in failed.values())
    assert failed[0].message.startswith(says)
    assert len(paid) == (1 if is_batch else 3)


def test_values_that_do_not_fit_fail_their_rows_without_another_call():
    paid = []

    def answers(batch: pa.RecordBatch):
        paid.append(batch.num_rows)
        return pd.Series(["x" if n % 10 == 7 else n for n in batch["n"].to_pylist()])

    emitted, failed = run(BatchFunction(answers, SQUARE, NUMBERS, CallSettings()), batch_of(0, 99))
    assert paid == [99]
    assert failed.keys() == set(range(7, 99, 10))
    assert [row["square"] for row in emitted.values()] == [n for n in range(99) if n % 10 != 7]
    assert emitted.keys() == {row["n"] for row in emitted.values()}


def test_a_row_says_which_record_it_is():
    def said(row):
        return f"{row.message_id} {row.attempt} {row.stable_id} {row.component}"

    bolt = RowFunction(said, pa.schema([("said", pa.string())]), NUMBERS, CallSettings())
    emitted, failed = run(bolt, batch_of(0, 600), batch_of(600, 601))
    assert failed == {}
    assert [row["said"] for row in emitted.values()] == [f"{n} 4 {n} frame" for n in range(601)]


class Looped:
    """A function that runs an event loop as it is entered and exited, as many clients do."""

    def __init__(self):
        self.seen = []

    def __enter__(self):
        asyncio.run(self.see("entered"))

    def __exit__(self, *error):
        asyncio.run(self.see("exited"))

    async def see(self, what):
        self.seen.append(what)

    def __call__(self, row):
        return row["n"]


def test_a_function_may_run_an_event_loop_as_it_is_entered():
    function = Looped()
    emitted, failed = run(RowFunction(function, SQUARE, NUMBERS, CallSettings()), batch_of(0, 3))
    assert (len(emitted), failed) == (3, {})
    assert function.seen == ["entered", "exited"]


def test_what_is_tried_again_is_as_the_bolt_says():
    def fails(row):
        raise ConnectionError("reset") if row["n"] else ValueError("no")

    settings = CallSettings(max_concurrency=1)
    bolt = RowFunction(fails, SQUARE, NUMBERS, settings, retry_on=["ConnectionError"])
    _, failed = run(bolt, batch_of(0, 2))
    assert [failed[n].final for n in (0, 1)] == [True, False]


def test_a_function_that_reports_no_tokens_is_named_once_in_a_process(caplog):
    _warned.clear()
    settings = CallSettings(limit=RateLimit(tokens_per_min=600))
    for _ in range(2):
        calls = RowCalls(lambda row: (1.0,), PRICE, settings, "frame")
        (found,) = calls.run([pa.record_batch({"n": [1, 2]})])
        assert not found.failed
        calls.cleanup()
    assert caplog.messages == [
        "limit of frame has tokens_per_min=600, and none of 2 answered calls reported its tokens, "
        "so nothing is limited; let each call report it by used(tokens=...) before it returns or "
        "raises"
    ]
