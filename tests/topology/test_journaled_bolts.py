"""Each call of a bolt with a journal is made once, and everyone uses what it came to."""

from __future__ import annotations

import asyncio
import errno
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from acting import TWO, Basically, batch_of, emitted, failed, identity_of
from hypothesis import given
from hypothesis import strategies as st

from ackcore._files.journal import Journal
from ackcore.calls import RateLimit, Reject, Retry, Unavailable
from ackcore.calls.usage import Budget
from ackcore.topology import journaled_executor as answers_module
from ackcore.topology.components import AsyncBolt, BasicBolt, BatchBolt, Bolt
from ackcore.topology.executors import executor_for
from ackcore.topology.journaled_executor import Answers, context_of
from ackcore.topology.row_conversion import RowSchema


class Task:
    """One attempt at a task of a bolt with a journal."""

    def __init__(self, directory, bolt, key=7, component="b", budget=None):
        bolt.journal = True
        self.journal = Journal(directory, context_of(key, component, TWO))
        self.answers = Answers(component, TWO, self.journal, budget)
        self.bolt = bolt
        self.executor = executor_for(component, bolt, answers=self.answers)

    def process(self, *values, attempt=0, stable=None, source="src"):
        batch = batch_of(*values)
        identity = identity_of(len(batch), attempt, stable)
        return self.executor.process(source, "default", batch, identity)

    def end(self):
        result = self.executor.flush()
        assert (result.emissions, result.failures, result.open) == ([], [], 0)
        self.executor.cleanup()
        self.journal.close()


@pytest.fixture
def task(tmp_path):
    tasks = []

    def task(execute, **arguments):
        tasks.append(Task(tmp_path, Basically(execute), **arguments))
        return tasks[-1]

    yield task
    for one in tasks:
        one.end()


def counting(calls):
    """Emits the value and how many calls were made so far; what is negative fails."""

    def execute(t, collector):
        calls.append(t[0])
        if t[0] < 0:
            raise (Reject if t[0] == -1 else Unavailable)(f"call {len(calls)}")
        for _ in range(t[0]):
            collector.emit((len(calls),), "side" if t[0] == 3 else "default")
        if t[0] == 2:
            collector.emit({"x": 100 + len(calls)}, "side")

    return execute


def test_a_task_that_runs_again_calls_nobody(task):
    calls = []
    first = task(counting(calls)).process(1, 2, -1, 3, 0, -2)
    assert calls == [1, 2, -1, 3, 0, -2]
    assert emitted([first]) == [(1, [0]), (2, [1]), (2, [1])]
    assert emitted([first], "side") == [(102, [1]), (4, [3]), (4, [3]), (4, [3])]
    again = task(counting(calls)).process(1, 2, -1, 3, 0, -2)
    assert len(calls) == 6
    for stream in TWO:
        assert emitted([again], stream) == emitted([first], stream)
    assert failed([again]) == failed([first])
    reasons = failed([again])
    assert (reasons[2].message, reasons[2].final) == ("call 3", True)
    assert (reasons[5].message, reasons[5].counts) == ("call 6", False)
    pairs = zip(first.emissions, again.emissions, strict=True)
    # To the byte: else the two would be taken for tasks that do not agree.
    assert all(one.batch.serialize() == two.batch.serialize() for one, two in pairs)


@given(st.lists(st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1]), max_size=99))
def test_what_was_seen_is_known_again(values):
    seen, model = answers_module._Seen(), set()
    seen._FEW = 4
    for value in values:
        assert seen.add(value) == (value not in model)
        model.add(value)
    assert all(not seen.add(value) for value in values)


def test_what_was_seen_takes_little_memory():
    """A task may get millions of inputs in a micro-batch."""
    rows = np.random.default_rng(1).integers(0, 2**64, 20_000, np.uint64).tolist()
    tracemalloc.start()
    try:
        seen = answers_module._Seen()
        for row in rows:
            assert seen.add(row)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 20 * len(rows)


def test_it_does_not_matter_how_rows_are_batched_and_which_were_known(task):
    calls = []
    part = task(counting(calls))
    part.process(2, stable=[1])
    whole = task(counting(calls)).process(1, 2, 1)
    other = task(counting(calls))
    results = [other.process(n, stable=[at]) for at, n in enumerate((1, 2, 1))]
    assert calls == [2, 1, 1]
    rows = [row for row, _ in emitted([whole])]
    assert rows == [row for row, _ in emitted(results)] == [2, 1, 1, 3]


def test_two_tasks_that_call_at_once_use_one_answer(task):
    calls = []
    one, other = task(counting(calls)), task(counting(calls))
    for each in (one, other):
        each.journal._look = lambda: None  # neither sees the other's before it has called
    first, second = one.process(1, 1), other.process(1, 1)
    assert len(calls) == 4
    assert emitted([first]) == emitted([second]) == [(1, [0]), (2, [1])]


@pytest.mark.parametrize("other", [{"attempt": 1}, {"stable": [9]}, {"source": "another"}])
def test_what_is_another_input_is_another_call(task, other):
    calls = []
    task(counting(calls)).process(1)
    task(counting(calls)).process(1, **other)
    assert calls == [1, 1]


def test_an_input_in_the_place_of_another_never_gets_its_answer(task):
    calls = []
    task(counting(calls)).process(1, 2)
    again = task(counting(calls)).process(2, 1)  # the source gave them otherwise
    assert calls == [1, 2, 2, 1]
    assert emitted([again]) == [(3, [0]), (3, [0]), (4, [1])]


@pytest.mark.parametrize("arguments", [{"key": 8}, {"component": "c"}])
def test_what_another_has_called_is_no_answer(task, arguments, caplog):
    calls = []
    task(counting(calls)).process(1)
    task(counting(calls), **arguments).process(1)
    assert calls == [1, 1]
    assert "belongs to other calls" in caplog.text


def test_inputs_that_are_alike_are_a_call_each(task):
    calls = []
    first = task(counting(calls)).process(1, 1, 1, stable=[5, 5, 5])
    assert calls == [1, 1, 1]
    other = task(counting(calls))
    again = [other.process(1, stable=[5]) for _ in range(4)]
    assert calls == [1] * 4
    assert [row for row, _ in emitted(again)] == [*(row for row, _ in emitted([first])), 4]


def test_what_was_called_before_a_crash_is_not_called_again(task):
    """Its process dies in the midst of a batch, before anything was synced."""
    calls = []

    def dies(t, collector):
        if len(calls) == 2:
            raise KeyboardInterrupt
        counting(calls)(t, collector)

    with pytest.raises(KeyboardInterrupt):
        task(dies).process(1, 1, 1, 1)
    assert len(calls) == 2
    found = task(counting(calls)).process(1, 1, 1, 1)
    assert len(calls) == 4
    assert [row for row, _ in emitted([found])] == [1, 2, 3, 4]


def test_rows_that_do_not_fit_are_a_failure_that_is_kept(task):
    calls = []

    def execute(t, collector):
        calls.append(t[0])
        collector.emit((1,))
        collector.emit(("no number",), "side")

    first = task(execute).process(1)
    again = task(execute).process(1)
    assert calls == [1]
    assert emitted([first]) == []
    assert failed([first]) == failed([again])
    assert "must be int64, got str" in failed([again])[0].message
    assert failed([again])[0].final  # another attempt would pay for the call again


@pytest.mark.parametrize("how_often", [1, 2])
def test_rows_that_are_converted_in_parts_are_one_answer(task, monkeypatch, how_often):
    """All rows together may have more text than an array holds, or memory may be short."""
    convert, fails = RowSchema.batch, [MemoryError("for a moment")] * how_often

    def converting(schema, rows):
        if fails:
            raise fails.pop()
        return convert(schema, rows)

    monkeypatch.setattr(RowSchema, "batch", converting)
    one = task(lambda t, collector: [collector.emit((n,)) for n in range(5)] and None)
    assert emitted([one.process(7)]) == [(n, [0]) for n in range(5)]


def test_an_answer_that_no_journal_takes_is_a_failure(task, monkeypatch):
    monkeypatch.setattr("ackcore.topology.journaled_executor.MOST_BYTES", 100)
    found = task(counting([])).process(1)
    assert failed([found])[0].type == "AnswerTooLarge"
    assert failed([found])[0].final


def test_an_answer_that_is_damaged_ends_the_task(task, tmp_path):
    first = task(counting([]))
    sync = first.journal.sync

    def damaged():
        sync()
        for path in tmp_path.glob("*.answers"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    first.journal.sync = damaged
    with pytest.raises(RuntimeError, match="the journal of bolt 'b' no longer has a readable"):
        first.process(3)


def test_a_bolt_is_prepared_before_its_first_call_if_there_is_one(task):
    prepared = []

    def once(t, collector):
        collector.emit((t[0],))

    first = task(once)
    first.bolt.prepare = prepared.append
    first.process(1)
    assert [context.component for context in prepared] == ["b"]

    def down(context):
        raise ConnectionError("it is down")

    again = task(once)
    again.bolt.prepare = down
    found = again.process(1, 2)
    assert emitted([found]) == [(1, [0])]
    assert {handle: why.message for handle, why in failed([found]).items()} == {1: "it is down"}
    found = again.process(3, stable=[7])
    assert failed([found])[2].type == "ConnectionError"
    assert emitted([task(once).process(1, 2)]) == [(1, [0]), (2, [1])]  # that was no answer


def test_a_row_that_python_cannot_show_fails(task):
    one = task(counting([]))
    column = pa.array([1, 2], pa.timestamp("s", tz="No/Such"))
    batch = pa.record_batch({"n": column.cast(pa.int64()), "at": column})
    found = one.executor.process("src", "default", batch, identity_of(len(batch)))
    assert "without a Python value" in failed([found])[0].message


def test_what_a_thread_emits_too_late_fails_its_input(task):
    kept = []

    def execute(t, collector):
        kept.append(collector)
        if len(kept) == 2:
            with pytest.raises(ValueError, match="must not have been acked before"):
                kept[0].emit((5,))

    found = task(execute).process(1, 1)
    assert list(failed([found])) == [0]


class Flushing(BasicBolt):
    def flush(self):
        """Has a flush."""


@pytest.mark.parametrize(
    ("bolt", "message"),
    [
        (Bolt(), "Bolt.journal must be False, got True for a bolt that is neither an"),
        (BatchBolt(), "BatchBolt.journal must be False, got True for a bolt that is neither an"),
        (Flushing(), "Flushing.journal must be False, got True for a bolt with a flush"),
    ],
)
def test_a_bolt_that_can_have_no_journal_is_refused(tmp_path, bolt, message):
    bolt.journal = True
    answers = Answers("b", {}, Journal(tmp_path, context_of(1, "b", {})))
    with pytest.raises(TypeError, match=message):
        executor_for("b", bolt, answers=answers)
    answers._journal.close()


class Asking(AsyncBolt):
    """Emits the value once it has been asked for; some answers are slow, some never come."""

    outputs = TWO
    max_concurrency = 4

    def __init__(self, calls, dying=None):
        self.calls, self.dying, self.done = calls, dying, []

    async def execute(self, t, collector):
        self.calls.append(t[0])
        if t[0] == self.dying:
            raise KeyboardInterrupt
        if t[0] < 0:
            raise (Reject if t[0] == -1 else Unavailable)("no")
        await asyncio.sleep(0 if t[0] % 2 else 0.01)
        collector.emit((1000 * len(self.calls) + t[0],))
        collector.emit((t[0],), "side")
        self.done.append(t[0])


class Threaded(BasicBolt):
    outputs = TWO
    threads = 3

    def __init__(self, calls, dying=None):
        self.calls, self.dying = calls, dying

    def execute(self, t, collector):
        self.calls.append(t[0])
        if t[0] < 0:
            raise Reject("no")
        if t[0] == 99:
            raise StopIteration
        collector.emit((1000 * len(self.calls) + t[0],))


@pytest.fixture
def many(tmp_path):
    """``many(shape, calls)``: a task of a bolt that has several inputs out at once."""
    tasks = []

    def many(shape, calls, dying=None):
        bolt = shape(calls, dying)
        if shape is Asking:
            bolt.wait_in_task_s, bolt.breaker_failures = 0.0, None
        tasks.append(Task(tmp_path, bolt))
        return tasks[-1]

    yield many
    for one in tasks:
        one.end()


@pytest.mark.parametrize("shape", [Asking, Threaded])
def test_of_many_calls_at_once_none_is_made_again(many, shape):
    calls = []
    values = [2, 4, -1, 3, 1, 5, *([-2] if shape is Asking else [99])]
    first = many(shape, calls).process(*values)
    assert sorted(calls) == sorted(values)
    again = many(shape, calls).process(*values)
    assert len(calls) == len(values)
    assert emitted([again]) == emitted([first])
    assert [row % 1000 for row, _ in emitted([again])] == [2, 4, 3, 1, 5]
    assert failed([again]) == failed([first])
    assert sorted(failed([first])) == [2, 6]
    assert failed([first])[2].final
    if shape is Asking:
        assert not failed([again])[6].counts
    pairs = zip(first.emissions, again.emissions, strict=True)
    assert all(one.batch.serialize() == two.batch.serialize() for one, two in pairs)
    part = many(shape, calls).process(2, 4, 6, 3, stable=[0, 1, 9, 3])
    assert calls[len(values) :] == [6]
    assert [row % 1000 for row, _ in emitted([part])] == [2, 4, 6, 3]


def test_an_answer_is_kept_though_those_before_it_are_out(many):
    """The process dies with a call out; answers that came before are there, in any order."""
    first = many(Asking, [], dying=7)
    with pytest.raises(KeyboardInterrupt):
        first.process(2, 1, 3, 5, 9, 7)
    done = set(first.bolt.done)
    assert done >= {1, 3}
    assert 2 not in done  # it was slow, and out
    calls = []
    found = many(Asking, calls).process(2, 1, 3, 5, 9, 7)
    assert sorted(calls) == sorted({2, 1, 3, 5, 9, 7} - done)
    assert [row % 1000 for row, _ in emitted([found])] == [2, 1, 3, 5, 9, 7]


def test_what_took_too_long_and_came_after_all_has_one_answer(many):
    """A thread is not cancelled: its input failed, or it did not; both tasks say the same."""
    answers, reasons = (one := many(Threaded, [])).answers, one.executor.reasons
    key = b"k" * 16
    answers.failed(key, reasons.of(TimeoutError("too long")))
    answers.emitted(key, {"default": [(1,)]}, reasons)
    emissions, failures = answers.settled([(key, 0)])
    assert (emissions, failures[0].type) == ([], "TimeoutError")


class Answering(AsyncBolt):
    outputs = TWO
    retry_on = (ConnectionError,)  # an OSError of a call would be final

    async def execute(self, t, collector):
        collector.emit((t["n"],))


class Blocking(BasicBolt):
    outputs = TWO
    retry_on = (ConnectionError,)
    threads = 3

    def execute(self, t, collector):
        collector.emit((t["n"],))


@pytest.mark.parametrize("make", [Answering, Blocking])
def test_a_journal_that_cannot_be_written_is_no_failure_of_a_call(make, tmp_path, monkeypatch):
    one = Task(tmp_path, make())
    real, appends = Journal.append, []

    def append(self, key, data):
        appends.append(key)
        if len(appends) == 5:
            raise OSError(errno.ENOSPC, "no space left")
        real(self, key, data)

    monkeypatch.setattr(Journal, "append", append)
    with pytest.raises(OSError, match="no space left"):
        one.process(*range(20))
    one.executor.cleanup()
    one.journal.close()
    # The task runs again: nothing says that the fifth has failed.
    again = Task(tmp_path, make())
    result = again.process(*range(20))
    assert failed([result]) == {}
    assert emitted([result]) == [(n, [n]) for n in range(20)]
    again.end()


class Paying(AsyncBolt):
    """Each call costs 1. The first input kills the task when another was called and failed."""

    outputs = TWO
    limit = RateLimit(cost_per_run=100)
    breaker_failures = None
    wait_in_task_s = 1e6

    def __init__(self, error, max_batch):
        self.error, self.max_batch, self.called = error, max_batch, 0

    async def execute(self, t, collector):
        await self.execute_many([t], [collector])

    async def execute_many(self, tuples, collectors):
        if tuples[0][0] == 0:
            while not self.called:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise KeyboardInterrupt
        collectors[0].used(cost=1)
        self.called += 1
        raise self.error


@pytest.mark.parametrize("max_batch", [1, 2])
@pytest.mark.parametrize("error", [Reject("no"), Retry("later", after_s=1e5), ValueError("bad")])
def test_costs_of_failed_calls_are_counted_after_a_crash(error, max_batch, tmp_path):
    """Also of those that wait to be called again, or for the answers to earlier inputs."""
    values = [0, 1, 2, 3] if max_batch == 1 else [0, 0, 1, 1, 2, 2, 3, 3]
    first = Task(tmp_path, Paying(error, max_batch), budget=Budget("b", 100, 0, 1))
    with pytest.raises(KeyboardInterrupt):
        first.process(*values)
    first.executor.abandon()
    found = Budget("b", 100, 0, 1)
    again = Task(tmp_path, Asking([]), budget=found)
    assert found.spent == first.bolt.called >= 1
    assert found.by_key == {"": found.spent}
    again.process(2, 4)
    again.end()
    assert found.spent == first.bolt.called
    first.journal.close()
