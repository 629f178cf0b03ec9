"""A task of `attempt` on the batches that Spark passes to it, without a Spark."""

from __future__ import annotations

import asyncio
import datetime

import pyarrow as pa
import pytest

from ackcore.calls import Reject, Retry, call_workers, used
from ackcore.calls.call_settings import CallSettings
from ackcore.spark.tasks import attempts as task
from ackcore.spark.tasks.attempts import ERROR, Attempts
from ackcore.topology.bolt_functions import kind_of

SQUARE = pa.schema([pa.field("square", pa.int64(), nullable=False)])
NUMBERS = pa.schema([pa.field("n", pa.int64(), nullable=False), ("text", pa.string())])


def batches_of(*lengths):
    """Batches of so many rows, numbered through."""
    first = 0
    for length in lengths:
        numbers = range(first, first + length)
        yield pa.record_batch([list(numbers), [f"t{n}" for n in numbers]], schema=NUMBERS)
        first += length


def run(fn, batches, answers=SQUARE, schema=NUMBERS, **settings):
    """All that a task yields, as one table; its batches are well formed."""
    settings = CallSettings(**{"max_concurrency": 4, "breaker_failures": None, **settings})
    made = list(Attempts(fn, kind_of(fn), schema, answers, settings)(iter(batches)))
    for batch in made:
        batch.validate(full=True)
    return pa.Table.from_batches(made)


def square(row):
    if row["n"] % 5 == 3:
        raise ValueError(f"no {row['n']}")
    return row["n"] ** 2


async def square_async(row):
    # Those that come later are done earlier.
    await asyncio.sleep(0 if row["n"] % 2 else 0.001)
    return square(row)


def square_batch(batch: pa.RecordBatch):
    return pa.array([square({"n": n}) for n in batch["n"].to_pylist()])


@pytest.mark.parametrize("fn", [square, square_async, square_batch])
def test_rows_keep_their_order_and_get_an_answer_or_an_error(fn):
    """Whatever the batches: empty ones, and ones that are longer than the slices of a task."""
    table = run(fn, batches_of(0, 7, 0, 1100, 3))
    n = 1110
    assert table["n"].to_pylist() == list(range(n))
    assert table["text"].to_pylist() == [f"t{i}" for i in range(n)]
    bad = {i for i in range(n) if i % 5 == 3}
    assert table["square"].to_pylist() == [None if i in bad else i * i for i in range(n)]
    error = {"type": "ValueError", "attempts": 1}
    assert table["error"].to_pylist() == [
        {**error, "message": f"no {i}"} if i in bad else None for i in range(n)
    ]
    assert table.schema == pa.schema([*NUMBERS, ("square", pa.int64()), ("error", ERROR)])


@pytest.mark.parametrize("fn", [square, square_batch])
def test_without_rows_nothing_comes_of_it(fn):
    settings = CallSettings(max_concurrency=1)
    made = Attempts(fn, kind_of(fn), NUMBERS, SQUARE, settings)(iter(()))
    assert list(made) == []


def test_what_is_pulled_is_bounded(monkeypatch):
    """A task reads no further ahead of what it yields than its window, buffer and a slice."""
    read = 0

    def source():
        nonlocal read
        for batch in batches_of(*[100] * 200):
            read += len(batch)
            yield batch

    monkeypatch.setattr(call_workers, "MOST_KEPT", 50)
    settings = CallSettings(max_concurrency=4)
    made = Attempts(square, kind_of(square), NUMBERS, SQUARE, settings)(source())
    for done in range(1, 200):
        assert len(next(made)) == 100
        assert read - 100 * done <= 50 + 4 + 2 * 100
    made.close()


# --------------------------------------------------------------------------------- what goes wrong


def returns(answer):
    return lambda row: answer


@pytest.mark.parametrize(
    ("fn", "kind", "words"),
    [
        (returns(None), "ValueError", "'square' of outputs must not be null, got None"),
        (
            returns("x"),
            "ValueError",
            "'square' of outputs must be int64, got str: 'x' does not fit; convert it, or",
        ),
        (returns(2.5), "ValueError", "'square' of outputs must be int64, got float: "),
        (
            returns((1, 2)),
            "ValueError",
            "must have 1 value for outputs, got 2 (int, int); write (square,), or a dict by field",
        ),
        (returns({"sqare": 1}), "ValueError", "did you mean 'square'?"),
        (lambda row: row["nn"], "KeyError", "no field 'nn' in a tuple of frame's stream 'default'"),
        (lambda row: exit("enough"), "SystemExit", "enough"),
    ],
)
def test_an_answer_that_does_not_fit_is_its_rows_error(fn, kind, words):
    """And no other's: the row beside it has its answer."""
    table = run(lambda row: 7 if row["n"] else fn(row), batches_of(2))
    first, second = table.select(["square", "error"]).to_pylist()
    assert (first["square"], first["error"]["type"]) == (None, kind)
    assert words in first["error"]["message"]
    assert first["error"]["attempts"] == 1
    assert second == {"square": 7, "error": None}


def test_rows_that_python_cannot_show_fail_without_a_call():
    """To Spark a year has five digits, to Python four."""
    schema = pa.schema([("at", pa.timestamp("us"))])
    times = pa.array([1_000, 253_402_300_800_000_000, 2_000], pa.timestamp("us"))
    batch = pa.record_batch([times], schema=schema)
    table = run(lambda row: row["at"].microsecond, [batch], schema=schema)
    assert table["square"].to_pylist() == [1_000, None, 2_000]
    error = table["error"].to_pylist()[1]
    assert error["attempts"] == 0
    assert "'at' holds a timestamp[us] without a Python value" in error["message"]
    assert table["at"].combine_chunks().equals(times)


def test_what_may_pass_is_called_again_and_counted():
    seen = []

    def flaky(row):
        seen.append(row["n"])
        if row["n"] == 1 and seen.count(1) < 3:
            raise ConnectionError("reset")
        if row["n"] == 2:
            raise ConnectionError("down")
        if row["n"] == 3:
            raise Reject("not for us")
        return row["n"]

    settings = {"retry_on": (ConnectionError,), "max_attempts": 3}
    table = run(flaky, batches_of(4), max_concurrency=1, **settings)
    assert table["square"].to_pylist() == [0, 1, None, None]
    errors = table["error"].to_pylist()
    assert errors[2] == {"type": "ConnectionError", "message": "down", "attempts": 3}
    assert errors[3] == {"type": "Reject", "message": "not for us", "attempts": 1}
    assert [seen.count(n) for n in range(4)] == [1, 3, 3, 1]


@pytest.mark.parametrize("is_batch", [False, True])
def test_a_wrong_report_of_the_use_is_not_retried(is_batch):
    """Make one call, since another one might be paid again."""
    calls = []

    def priced(row):
        calls.append(row)
        try:
            used(costs=1)
        except TypeError as error:
            raise Retry("now handled") from error

    def priced_batch(batch: pa.RecordBatch):
        priced(batch)

    table = run(
        priced_batch if is_batch else priced,
        batches_of(4),
        retry_on=(Exception,),
        max_attempts=5,
        max_concurrency=1,
    )
    assert len(calls) == (1 if is_batch else 4)
    assert {error["attempts"] for error in table["error"].to_pylist()} == {1}


def test_what_would_have_to_wait_for_too_long_fails():
    def busy(row):
        raise Retry("busy", after_s=60)

    (error,) = run(busy, batches_of(1))["error"].to_pylist()
    assert error == {"type": "Retry", "message": "busy (again after 60 s)", "attempts": 1}


class Client:
    """A function that connects, or does not, and says of what it was let go."""

    def __init__(self, enters=None, leaves=None):
        self.errors = {"enters": enters, "leaves": leaves}
        self.seen = []

    def __enter__(self):
        self._at("enters")

    def __exit__(self, *error):
        self._at("leaves")

    def _at(self, step):
        self.seen.append(step)
        if self.errors[step] is not None:
            raise self.errors[step]

    def __call__(self, row):
        self.seen.append("called")
        return 1


class BatchClient(Client):
    def __call__(self, batch: pa.RecordBatch):
        self.seen.append("called")
        return pa.array([1] * batch.num_rows)


@pytest.mark.parametrize("client", [Client, BatchClient])
def test_a_function_that_cannot_connect_fails_its_rows_and_not_the_job(client, caplog):
    broken = client(enters=ConnectionError("refused"))
    table = run(broken, batches_of(2, 1), max_concurrency=1)
    error = {"type": "ConnectionError", "message": "refused", "attempts": 0}
    assert table["error"].to_pylist() == [error] * 3
    assert broken.seen == ["enters"]
    lost = client(leaves=ConnectionError("reset"))
    table = run(lost, batches_of(1, 1), max_concurrency=1)
    assert table["square"].to_pylist() == [1, 1]
    assert lost.seen == ["enters", "called", "called", "leaves"]
    assert "fn: cleanup raised ConnectionError: reset" in caplog.text


def test_an_error_of_what_comes_is_no_rows_error():
    """The job is to fail of it, and not to have rows that look as if they had been tried."""

    def source():
        yield from batches_of(3)
        raise OSError("the socket is closed")

    with pytest.raises(OSError, match="the socket is closed"):
        run(square, source())


# --------------------------------------------------------------------------------------- batches


def test_of_a_batch_the_failing_rows_are_found():
    calls = []

    def fn(batch: pa.RecordBatch):
        calls.append(batch.num_rows)
        return square_batch(batch)

    table = run(fn, batches_of(64), max_concurrency=1)
    assert table["error"].null_count == 64 - 13  # 3, 8, ... 63
    assert calls[0] == 64
    assert sum(calls) < 64 * 8


def test_an_error_of_a_call_fails_its_batch_without_a_search():
    calls = []

    def fn(batch: pa.RecordBatch):
        calls.append(batch["n"][0].as_py())
        if batch["n"][0].as_py() == 0:
            raise ConnectionError("reset")
        return batch["n"]

    settings = {"retry_on": (ConnectionError,), "max_attempts": 2}
    table = run(fn, batches_of(3, 2), max_concurrency=1, **settings)
    assert calls == [0, 0, 3]
    error = {"type": "ConnectionError", "message": "reset", "attempts": 2}
    assert table["error"].to_pylist() == [error] * 3 + [None] * 2
    assert table["square"].to_pylist() == [None] * 3 + [3, 4]


def test_a_batch_that_is_answered_with_too_few_rows_fails_without_another_call():
    calls = []

    def fn(batch: pa.RecordBatch):
        calls.append(len(batch))
        return batch.filter(pa.array([n != 1 for n in batch["n"].to_pylist()])).select(["n"])

    table = run(fn, batches_of(3), pa.schema([("n", pa.int64())]), max_concurrency=1)
    for error in table["error"].to_pylist():
        assert error["message"].startswith("fn must return 3 rows, one for each row of its batch,")
        assert error["attempts"] == 1
    assert calls == [table.num_rows] == [3]


# ----------------------------------------------------------------------------------------- types


def test_columns_stay_as_they_came_and_are_seen_in_utc():
    """A session has a time zone, and perhaps large types: in what comes, not in what is seen."""
    zone = datetime.timezone(datetime.timedelta(hours=-5))
    noon = datetime.datetime(2026, 3, 1, 12, tzinfo=zone)
    here = pa.timestamp("us", "America/New_York")
    came = pa.schema(
        [
            pa.field("at", here, nullable=False),
            ("names", pa.list_(pa.field("element", pa.large_string(), nullable=False))),
            ("inner", pa.struct([pa.field("at", here)])),
        ]
    )
    seen = pa.schema(
        [
            pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
            ("names", pa.list_(pa.field("element", pa.string(), nullable=False))),
            ("inner", pa.struct([pa.field("at", pa.timestamp("us", "UTC"))])),
        ]
    )
    batch = pa.record_batch([[noon], [["a"]], [{"at": noon}]], schema=came)
    answers = pa.schema([("said", pa.string())])

    def fn(row):
        assert row["at"] == row["inner"]["at"] == noon
        return f"{row['at']:%H:%M %Z} {row['names']}"

    def fn_of_batches(batch: pa.RecordBatch):
        assert batch.schema == seen
        return pa.array(["17:00 UTC ['a']"])

    for each in (fn, fn_of_batches):
        table = run(each, [batch], answers, seen, max_concurrency=1)
        assert table["error"].to_pylist() == [None]
        assert table["said"].to_pylist() == ["17:00 UTC ['a']"]
        assert table.select(came.names).combine_chunks().to_batches()[0].equals(batch)


def test_nested_answers_are_nullable_where_they_failed():
    answers = pa.schema(
        [
            pa.field("s", pa.struct([pa.field("x", pa.int64(), nullable=False)]), nullable=False),
            pa.field("l", pa.list_(pa.int64()), nullable=False),
        ]
    )

    def fn(row):
        return {"s": {"x": 1 // row["n"]}, "l": [row["n"]]}

    table = run(fn, batches_of(3), answers)
    assert table["s"].to_pylist() == [None, {"x": 1}, {"x": 0}]
    assert table["l"].to_pylist() == [None, [1], [2]]
    assert table["error"].to_pylist()[0]["type"] == "ZeroDivisionError"


def test_more_text_than_one_array_has_room_for_comes_in_several_batches(monkeypatch):
    monkeypatch.setattr(task, "JOIN_BYTES", 50)
    answers = pa.schema([("said", pa.string())])

    def fn(row):
        if row["n"] == 3:
            raise ValueError("no")
        return "x" * 40

    def with_misfits(row):
        return fn(row) if row["n"] != 1 else 5

    settings = CallSettings(max_concurrency=1)
    attempts = Attempts(with_misfits, kind_of(fn), NUMBERS, answers, settings)
    made = list(attempts(batches_of(6)))
    assert len(made) > 1
    rows = pa.Table.from_batches(made).to_pylist()
    assert [row["n"] for row in rows] == list(range(6))
    assert [row["said"] is None for row in rows] == [False, True, False, True, False, False]
    assert [row["error"] is None for row in rows] == [True, False, True, False, True, True]
