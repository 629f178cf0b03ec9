"""The life of a batch bolt: prepared, flushed, cleaned up, called wrongly."""

import json
import threading
from collections import Counter

import pytest
from results import emitted, failed, whys
from test_batch_bolts import OUT, Doing, batch_of, everything, raising, run

from ackcore.topology.components import BatchBolt
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Raised, Reason


def test_a_bolt_that_cannot_prepare_fails_every_row_and_is_asked_once():
    calls = []

    class Unready(BatchBolt):
        def prepare(self, context):
            calls.append((context.component, context.task, context.batch_id, context.collector))
            raise SystemExit("no database")

        process = flush = cleanup = raising(AssertionError())

    executor = executor_for("b", Unready(), task=3, batch_id=9)
    results = run(executor, [1, 2], [], [3])
    executor.cleanup()
    assert failed(results) == dict.fromkeys(range(3), Reason("b", "SystemExit", "no database"))
    assert [result.open for result in results] == [0, 0, 0, 0]
    assert calls == [("b", 3, 9, None)]


def test_a_task_without_rows_calls_nothing():
    methods = dict.fromkeys(["prepare", "process", "flush", "cleanup"], raising(OSError()))
    executor = executor_for("b", type("B", (BatchBolt,), methods)())
    results = run(executor, [])
    executor.cleanup()
    assert (failed(results), emitted(results)) == ({}, [])


class Summing(BatchBolt):
    """Keeps every row until the end."""

    outputs = OUT

    def __init__(self, error=None):
        self.sums, self.error, self.cleaned = [], error, 0

    def process(self, batch, out):
        values = batch["n"].to_pylist()
        if 2 in values:
            raise ValueError("two")
        self.sums += [(value, out.first_row + row) for row, value in enumerate(values)]

    def flush(self, out):
        assert (out.component, out.first_row, out.identity) == ("", 0, None)
        rows = [row for _, row in self.sums]
        out.emit([[sum(value for value, _ in self.sums)]], parents=[rows])
        out.fail([1, rows[0]], "at the end")
        if self.error:
            raise self.error

    def cleanup(self):
        self.cleaned += 1


def test_a_bolt_that_flushes_acks_then():
    bolt = Summing()
    executor = executor_for("b", bolt)
    results = run(executor, [1, 2, 3], [4])
    executor.cleanup()
    executor.cleanup()
    assert bolt.cleaned == 1
    assert emitted(results) == [(8, [0, 2, 3])]
    assert whys(results) == {0: "at the end", 1: "two"}
    assert [result.open for result in results] == [2, 3, 0]


def test_a_flush_does_not_speak_of_rows_that_failed_before():
    class Late(BatchBolt):
        outputs = OUT

        def process(self, batch, out):
            if out.first_row == 0:
                out.fail([0, 1], "told")

        def flush(self, out):
            out.emit([[1, 2]], parents=[0, 2])
            out.emit([[3]], parents=[1])
            out.emit([[4, 5, 6, 7]], parents=[[0, 3], [], [4, 2], [2]])

    results = run(executor_for("b", Late()), [1, 2], [3, 4, 5])
    assert [result.open for result in results] == [0, 3, 0]
    assert emitted(results) == [(2, [2]), (5, []), (6, [4, 2]), (7, [2])]
    together = "emitted together with row 0, which failed before"
    assert whys(results) == {0: "told", 1: "told", 3: together}


def test_calls_that_raise_are_counted_and_rows_by_what_they_raised():
    def process(batch, out):
        values = batch["n"].to_pylist()
        if 5 in values:
            raise KeyError("five")
        if max(values) > 5:
            raise ValueError("large")

    executor = executor_for("b", Doing(process))
    counted, nothing, flushed = run(executor, list(range(8)), [1, 2])
    assert nothing.raised is flushed.raised is None
    # 0-7, 4-7, 4-5, 5, 6-7, 6, 7
    assert counted.raised == Raised(7, 3, Counter({"ValueError": 2, "KeyError": 1}))
    assert failed([counted]).keys() == {5, 6, 7}


def test_what_raised_is_summed_and_of_many_types_the_commonest_are_kept():
    few = Raised(2, 1, Counter({"KeyError": 1}))
    many = Raised(400, 210, Counter({f"E{i}": i + 1 for i in range(20)}))
    assert Raised() + few + few == Raised(4, 2, Counter({"KeyError": 2}))
    kept = Raised.from_json(json.loads(json.dumps((few + many).to_json())))
    assert (kept.calls, kept.rows) == (402, 211)
    assert kept.types == {f"E{i}": i + 1 for i in range(12, 20)}
    assert (few + many).to_json() == (many + few).to_json()


def test_a_flush_that_raises_fails_every_row_and_emits_nothing():
    results = run(executor_for("b", Summing(SystemExit("full"))), [1, 2, 3], [4])
    assert emitted(results) == []
    assert whys(results) == {0: "full", 1: "two", 2: "full", 3: "full"}
    assert results[-1].open == 0


def test_out_ends_with_its_call():
    kept = []

    def process(batch, out):
        for old in kept:
            with pytest.raises(RuntimeError, match="out of b is closed"):
                old.emit([[1]], parents=[0])
            with pytest.raises(RuntimeError, match="out of b is closed"):
                old.fail([0], "late")
        kept.append(out)
        everything(batch, out)
        if batch["n"][0].as_py() == 1:
            raise ValueError("one")

    executor = executor_for("b", Doing(process))
    results = run(executor, [1, 2], [3])
    assert emitted(results) == [(20, [1]), (30, [2])]
    assert whys(results) == {0: "one"}
    with pytest.raises(RuntimeError, match="there can be no more input"):
        executor.process("s", "default", batch_of([1]), None)
    with pytest.raises(RuntimeError, match="was flushed before"):
        executor.flush()
    assert executor.ignored == 0


def test_threads_may_emit_within_a_call():
    def process(batch, out):
        def work(part):
            for row in range(part, batch.num_rows, 4):
                if row % 10 == 7:
                    out.fail([row], "seven")
                out.emit([[row]], parents=[row])

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    results = run(executor_for("b", Doing(process)), range(400))
    assert sorted(emitted(results)) == [(row, [row]) for row in range(400)]
    assert sorted(failed(results)) == list(range(7, 400, 10))


def test_what_is_returned_is_not_taken_for_emitted():
    """It would be lost, and its rows acked."""

    def process(batch, out):
        return batch if 2 in batch["n"].to_pylist() else out.emit(batch.columns, parents=[0])

    said = "a bolt's methods must return None, got RecordBatch; emit it by out.emit(...)"
    results = run(executor_for("b", Doing(process)), [1, 2])
    assert emitted(results) == [(1, [0])]
    assert failed(results) == {1: Reason("b", "TypeError", said)}

    class Flushing(Doing):
        def flush(self, out):
            return self.do(None, out)

    bolt = Flushing(lambda batch, out: None if batch else "rows")
    first, last = run(executor_for("b", bolt), [1, 2])
    assert (first.open, failed([first])) == (2, {})
    assert whys([last]) == dict.fromkeys(range(2), said.replace("RecordBatch", "str"))


def test_a_call_that_has_not_run_is_not_taken_for_done():
    def generator():
        yield

    results = run(executor_for("b", Doing(lambda batch, out: generator())), [1, 2])
    assert set(whys(results)) == {0, 1}
    assert "got generator, which has not run" in whys(results)[0]

    class Lazy(BatchBolt):
        def process(self, batch, out):
            yield

    with pytest.raises(TypeError, match="process must be a plain method"):
        executor_for("b", Lazy())
    results = run(executor_for("b", BatchBolt()), [1])
    assert "must define process(self, batch, out)" in whys(results)[0]
