"""Bolts that take a batch at a time: what raises is bisected to the failing rows."""

import collections
import math
import pickle
import threading

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from acting import OUT, TWO, batch_of, emitted, failed, run, whys
from hypothesis import given
from hypothesis import strategies as st

from ackcore._arrow.shown import text_of
from ackcore.calls import Reject
from ackcore.topology.batch_collector import conform
from ackcore.topology.components import BatchBolt
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Identity, Reason


class Row(tuple):
    """A row with names in `__fields__`, as PySpark's Row has."""

    __fields__ = ("x",)


class Doing(BatchBolt):
    """A bolt that does what a test says."""

    outputs = TWO

    def __init__(self, process, outputs=TWO):
        self.do, self.calls, self.outputs = process, 0, outputs

    def process(self, batch, out):
        self.calls += 1
        return self.do(batch, out)


def everything(batch, out):
    """Emit each row ten-fold, anchored to it."""
    out.emit({"x": pc.multiply(batch["n"], 10)}, parents=range(batch.num_rows))


def test_a_batch_is_emitted_and_acked():
    results = run(executor_for("b", Doing(everything)), [1, 2], [], [3])
    assert emitted(results) == [(10, [0]), (20, [1]), (30, [2])]
    assert failed(results) == {}
    assert [result.open for result in results] == [0, 0, 0, 0]
    assert all(
        e.batch.schema.equals(OUT, check_metadata=True) for r in results for e in r.emissions
    )
    assert all(e.anchors.offsets is None for r in results for e in r.emissions)


@pytest.mark.parametrize("call", ["process", "flush"])
def test_an_emit_without_parents_is_refused_with_what_they_are(call):
    class Forgetful(Doing):
        def flush(self, out):
            return None if call == "process" else out.emit([[7]], stream="side")

    executor = executor_for(
        "sums", Forgetful(lambda batch, out: None if call == "flush" else out.emit([[7]]))
    )
    (why,) = set(failed(run(executor, [1, 2])).values())
    assert (why.component, why.type) == ("sums", "TypeError")
    stream = "default" if call == "process" else "side"
    assert why.message == (
        f"emit to sums's stream '{stream}' needs parents=, the input rows of each tuple, and "
        "got none; pass parents=range(len(batch)) if tuple i is made from row i, "
        "parents=pc.list_parent_indices(lists) for a flattened list column, a list of rows "
        "per tuple for a sum of several rows, None for untracked tuples"
    )


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda batch: batch["wrod"], "'Field \"wrod\" does not exist in schema'; {did}"),
        (lambda batch: batch.column("wrod"), "'Field \"wrod\" does not exist in schema'; {did}"),
        (lambda batch: batch.schema.field("wrod"), "'Column wrod does not exist in schema'; {did}"),
        (lambda batch: batch.drop_columns(["wrod"]), "\"Column 'wrod' not found\"; {did}"),
        (lambda batch: batch.to_pandas()["wrod"], "'wrod'; {did}"),
        (lambda batch: batch.to_pylist()[0]["wrod"], "'wrod'; {did}"),
        (lambda batch: batch["zzz"], "'Field \"zzz\" does not exist in schema'; {has}"),
        # What is missing elsewhere is none of the batch's.
        (lambda batch: {"EUR": 1}["USD"], "'USD'"),
        (lambda batch: {}["word"], "'word'"),
        (lambda batch: {}[7], "7"),
        (lambda batch: pa.table({"a": [1]})["word"], "'Field \"word\" does not exist in schema'"),
    ],
)
def test_a_misspelt_column_is_refused_with_the_columns_there_are(ask, why):
    executor = executor_for("count", Doing(lambda batch, out: ask(batch) and None))
    results = executor.process("split", "late", pa.record_batch({"word": ["a"], "n": [1]}), None)
    (found,) = failed([results]).values()
    has = "the batch of split's stream 'late' has the columns 'word', 'n'"
    message = why.format(has=has, did=f"{has}; did you mean 'word'?")
    assert found == Reason("count", "KeyError", message)


def test_what_a_bolts_own_error_says_stays():
    class Unknown(KeyError):
        def __str__(self):
            return f"no rate is known of {self.args[0]}"

    def process(batch, out):
        raise Unknown("wrod")

    executor = executor_for("count", Doing(process))
    results = executor.process("split", "late", pa.record_batch({"word": ["a"]}), None)
    (found,) = failed([results]).values()
    assert found.message.startswith("no rate is known of wrod; the batch of split's stream 'late' ")


def test_a_column_that_flush_asks_of_a_table_of_its_own_is_none_of_a_batchs():
    class Sums(Doing):
        def flush(self, out):
            return pa.table({"a": [1]})["wrod"]

    results = run(executor_for("sums", Sums(lambda batch, out: None)), [1, 2])
    assert {why.message for why in failed(results).values()} == {
        "'Field \"wrod\" does not exist in schema'"
    }


def test_rows_fail_by_number():
    def process(batch, out):
        out.emit([[7]], parents=[1])
        out.fail([1, 3], ["one", KeyError("three")])
        out.fail(np.array([3, 4]), "again")
        out.fail(pa.array([0]), pa.array(["zero"]))
        out.fail([5], None)
        out.fail([6, 7], Reject("for good"))
        out.fail([8], text_of([b"caf\xe9"]))  # not UTF-8
        out.fail([], "nobody")

    results = run(executor_for("b", Doing(process)), range(9), range(9))
    one = {0: "zero", 1: "one", 3: "'three'", 4: "again", 5: "failed by b"}
    one |= {6: "for good", 7: "for good", 8: r"caf\xe9"}
    assert whys(results) == one | {handle + 9: why for handle, why in one.items()}
    assert sorted(h for h, reason in failed(results).items() if reason.final) == [6, 7, 15, 16]
    assert emitted(results) == [(7, [1]), (7, [10])]


PARENTS = [
    ([2, 0], [[2], [0]]),
    ((0, 0), [[0], [0]]),
    (np.array([1, 2], np.uint8), [[1], [2]]),
    (pa.array([1, 2], pa.int32()), [[1], [2]]),
    (pa.chunked_array([[1], [2]]), [[1], [2]]),
    (pd.Series([1, 2]), [[1], [2]]),
    (range(2), [[0], [1]]),
    (range(2, -1, -2), [[2], [0]]),
    (None, [[], []]),
    ([[2, 0, 2], []], [[2, 0, 2], []]),
    ([np.array([1]), (0, 1)], [[1], [0, 1]]),
    (np.array([[1], [0, 1]], dtype=object), [[1], [0, 1]]),
    (pd.Series([[1], [0, 1]]), [[1], [0, 1]]),
    ([[], []], [[], []]),
    (pa.array([[9], [1, 2], []]).slice(1), [[1, 2], []]),
    (pa.array([[1, 2], []], pa.large_list(pa.int8())), [[1, 2], []]),
    (pa.array([[1, 2], [0, 1]], pa.list_(pa.int64(), 2)), [[1, 2], [0, 1]]),
    (pa.chunked_array([[[1]], [[0, 2]]]), [[1], [0, 2]]),
]


@pytest.mark.parametrize(("parents", "expected"), PARENTS, ids=lambda p: type(p).__name__)
def test_every_way_of_naming_parents(parents, expected):
    def process(batch, out):
        out.emit([[5, 6]], parents=parents)

    results = run(executor_for("b", Doing(process)), [1, 2, 3], [4, 5, 6])
    assert failed(results) == {}
    shifted = [[row + 3 for row in rows] for rows in expected]
    assert [anchors for _, anchors in emitted(results)] == [*expected, *shifted]


COLUMNS = [
    pa.record_batch({"y": ["a", "b"], "x": [1, 2]}),
    pa.table({"y": pa.chunked_array([["a"], ["b"]]), "x": [1, 2]}),
    {"y": ["a", "b"], "x": np.array([1, 2], np.int8)},
    [pa.array([1, 2]), pa.array(["a", "b"])],
    ((1, 2), ("a", "b")),
    [pd.Series([1.0, 2.0]), np.array(["a", "b"])],
    [pa.chunked_array([[1.0], [2.0]]), pa.array(["a", "b"]).dictionary_encode()],
    {"x": pd.Series([1, 2], dtype="Int64"), "y": pd.Series(["a", "b"])},
]


@pytest.mark.parametrize("columns", COLUMNS, ids=lambda columns: type(columns).__name__)
def test_every_way_of_giving_columns(columns):
    schema = pa.schema(
        [pa.field("x", pa.int64(), nullable=False), ("y", pa.string())], metadata={"k": "v"}
    )
    bolt = Doing(lambda batch, out: out.emit(columns, parents=[0, 0]), schema)
    (emission,) = run(executor_for("b", bolt), [1])[0].emissions
    assert emission.batch.schema.equals(schema, check_metadata=True)
    assert emission.batch.to_pydict() == {"x": [1, 2], "y": ["a", "b"]}


POINT = collections.namedtuple("Point", "x")
#: Columns of one row that are emitted, and the error.
BAD_COLUMNS = [
    ([1], TypeError, "'x' of b's stream 'default' must be a c"),
    (["ab"], TypeError, "must be a column, got str; repeat"),
    ([{1}], TypeError, "must be a column, got set; pass list"),
    ([map(int, "1")], TypeError, "got map; pass list"),
    # Rows with names, as many as there are columns, must not become columns by position.
    ([POINT(1)], TypeError, "got Point; a list holds columns"),
    ([Row((1,))], TypeError, "got Row; a list holds columns"),
    ([{"x": 1}], TypeError, "got dict; a list holds columns"),
    (7, TypeError, "must be a RecordBatch, a Table, .* got int"),
    ([[1], [2]], ValueError, "be a list of 1 .* got a list of 2"),
    ({"y": [1]}, ValueError, "got 'y'; "),
    ({}, ValueError, "got none for 'x'"),
    (pa.RecordBatch.from_arrays([[1], [2]], ["x", "x"]), ValueError, "got 'x' several times"),
    ([["a"]], ValueError, "must be int64, got list"),
    ([np.array([1.5])], ValueError, "must be int64, got float64"),
    ([pa.array([1.5])], ValueError, "must be int64, got double"),
    ([[2**63]], ValueError, "must be int64"),
]
#: The parents of one row that is emitted, and the error.
BAD_PARENTS = [
    ([0, 1], ValueError, "item for each emitted row, got 2"),
    ([], ValueError, "got 0 items for 1 row;"),
    ([[0], [1]], ValueError, "got 2 items for 1 row;"),
    ([3], ValueError, "of the 3 rows that the bolt received, from 0 to 2, got 3"),
    ([-1], ValueError, "got -1"),
    ([[0, 3]], ValueError, "got 3"),
    ([2**63], ValueError, "got 9223372036854775808"),
    ([0.0], TypeError, "which are integers, got 1 dimension"),
    ([True], TypeError, r"take np.flatnonzero\(\) of a mask"),
    (np.array([[0]]), TypeError, "got 2 dimensions"),
    (0, TypeError, "got 0 dimensions"),
    (pa.array([None], pa.int64()), ValueError, "got 1; drop them"),
    (pa.array([None, [1]]), ValueError, "an empty list leaves"),
    (["a"], TypeError, "dimensions of <U1"),
]
#: The arguments of `fail`, and the error.
BAD_FAILS = [
    (([3], "x"), ValueError, "rows must be numbers of the 3 rows that"),
    (([True, False, True], "x"), TypeError, "of a mask"),
    (([0, 1], ["x"]), ValueError, "got 1 reason for 2 rows"),
    (([0], [5]), TypeError, "must be an exception, a text or a Reason, got int"),
]
BAD_CALLS = [
    *((lambda out, c=c: out.emit(c, parents=[0]), *error) for c, *error in BAD_COLUMNS),
    *((lambda out, p=p: out.emit([[1]], parents=p), *error) for p, *error in BAD_PARENTS),
    *((lambda out, a=a: out.fail(*a), *error) for a, *error in BAD_FAILS),
    (lambda out: out.emit([[1]], parents=[0], stream="sid"), ValueError, "did you mean 'side'?"),
    (lambda out: out.emit([[1, 2]], parents=[[0], 1]), TypeError, "got 1 list among 2"),
    (lambda out: pickle.dumps(out), TypeError, ".out. of a BatchBolt cannot be pick"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD_CALLS)
def test_a_wrong_call_raises_where_it_is_made_and_changes_nothing(call, error, match):
    def process(batch, out):
        with pytest.raises(error, match=match):
            call(out)
        everything(batch, out)

    results = run(executor_for("b", Doing(process)), [1, 2, 3])
    assert failed(results) == {}
    assert len(emitted(results)) == 3


def test_columns_of_different_lengths_are_refused():
    bolt = Doing(
        lambda batch, out: out.emit({"x": [1, 2], "y": [3]}, parents=[0]),
        pa.schema([("x", pa.int64()), ("y", pa.int64())]),
    )
    assert "must have the same length, got x: 2, y: 1" in whys(run(executor_for("b", bolt), [1]))[0]


@pytest.mark.parametrize("column", [[1, None], pa.array([1, None]), np.array([1, None])])
def test_nulls_are_refused_where_the_schema_says_so(column):
    schema = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    bolt = Doing(lambda batch, out: out.emit([column], parents=[0, 0]), schema)
    assert "must not hold nulls, got 1" in whys(run(executor_for("b", bolt), [1]))[0]


def test_a_column_of_more_than_two_gibibytes_is_refused():
    offsets = pa.py_buffer(np.array([0, 1 << 30], np.int32))
    text = pa.py_buffer(np.zeros(1 << 30, np.uint8))  # memory that is never touched
    half = pa.Array.from_buffers(pa.string(), 1, [None, offsets, text])
    outputs = pa.schema([("x", pa.string())])
    with pytest.raises(ValueError, match="'x' of b must have at most 2 GiB in one batch; emit"):
        conform([pa.chunked_array([half, half])], outputs, "b")


def test_a_bolt_without_outputs_cannot_emit():
    assert "declares no outputs" in whys(run(executor_for("b", Doing(everything, None)), [1]))[0]


@pytest.mark.parametrize("make", [np.array, pd.Series])
def test_memory_that_a_bolt_fills_again_is_copied(make):
    memory = make([0, 0])

    def process(batch, out):
        for n in range(3):
            memory[:] = n
            parents = np.full(2, n)
            out.emit([memory], parents=parents)
            parents[:] = 0
        memory[:] = 9

    results = run(executor_for("b", Doing(process)), [1, 2, 3])
    assert emitted(results) == [(n, [n]) for n in (0, 0, 1, 1, 2, 2)]


def test_streams_keep_their_own_order():
    def process(batch, out):
        out.emit([[1]], parents=[0], stream="side")
        out.emit([[2]], parents=[1])
        out.emit([[]], parents=[])
        out.emit([[3, 4]], parents=[[0, 1], []], stream="side")
        out.emit([[5]], parents=None)

    results = run(executor_for("b", Doing(process)), [1, 2])
    assert [emission.stream for emission in results[0].emissions] == ["default", "side"]
    assert emitted(results) == [(2, [1]), (5, [])]
    assert emitted(results, "side") == [(1, [0]), (3, [0, 1]), (4, [])]


# -- bisection -----------------------------------------------------------------------------------


def bisected(n, failing, error=ValueError):
    """Run n rows of which some make a batch raise, after it emitted; return results and calls."""
    first = 3

    def process(batch, out):
        values = batch["n"].to_pylist()
        everything(batch, out)
        out.emit([values], parents=[[row, 0] for row in range(len(values))], stream="side")
        out.fail([row for row, value in enumerate(values) if value % 5 == 4], "five")
        for value in values:
            if value in failing:
                raise error(value)

    bolt = Doing(process)
    results = run(executor_for("b", bolt), [-1] * first, range(n))
    calls = bolt.calls - 1
    others = [value for value in range(n) if value not in failing]
    assert emitted(results[1:]) == [(value * 10, [value + first]) for value in others]
    side = emitted(results[1:], "side")
    assert [(value, anchors[0]) for value, anchors in side] == [(v, v + first) for v in others]
    why = {value + first: "five" for value in others if value % 5 == 4}
    why |= {value + first: str(value) for value in failing}
    assert whys(results[1:]) == why
    return calls


@given(st.integers(1, 70), st.sets(st.integers(0, 69), max_size=70))
def test_exactly_the_rows_that_raise_fail(n, failing):
    failing = {value for value in failing if value < n}
    calls = bisected(n, failing)
    k = len(failing)
    # Every raising call but those of single rows makes two more; at each depth at most k raise.
    assert calls <= (1 + 2 * k * math.ceil(math.log2(n / k) + 2) if k else 1)


def test_few_failing_rows_of_many_cost_few_calls():
    assert bisected(4096, {0, 1234, 4095}) <= 2 * 3 * 12 + 1


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, StopIteration, MemoryError])
def test_nothing_but_an_interrupt_passes(error):
    bisected(9, {4, 5}, error)


def test_identity_goes_with_its_rows():
    seen = []

    class Knowing(BatchBolt):
        needs_identity = True

        def process(self, batch, out):
            ids, attempts, stable = out.identity
            seen.append((out.first_row, ids.to_pylist(), attempts.tolist(), stable.tolist()))
            assert (out.component, out.stream) == ("lines", "side")
            if 2 in batch["n"].to_pylist():
                raise Reject("two")

    executor = executor_for("b", Knowing())
    identity = Identity(
        pa.array(["a", "b", "c"]), np.array([0, 1, 2], np.int32), np.array([7, 8, 9])
    )
    results = [executor.process("lines", "side", batch_of(1, 2, 3), identity)]
    assert seen == [
        (0, ["a", "b", "c"], [0, 1, 2], [7, 8, 9]),
        (0, ["a"], [0], [7]),
        (1, ["b", "c"], [1, 2], [8, 9]),
        (1, ["b"], [1], [8]),
        (2, ["c"], [2], [9]),
    ]
    assert failed(results) == {1: Reason("b", "Reject", "two", True)}


# --- The life of a batch bolt: prepared, flushed, cleaned up, called wrongly.


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


def test_calls_that_raise_are_counted():
    def process(batch, out):
        values = batch["n"].to_pylist()
        if 5 in values:
            raise KeyError("five")
        if max(values) > 5:
            raise ValueError("large")

    executor = executor_for("b", Doing(process))
    counted, nothing, flushed = run(executor, list(range(8)), [1, 2])
    assert nothing.raised == flushed.raised == 0
    assert counted.raised == 7  # 0-7, 4-7, 4-5, 5, 6-7, 6, 7
    assert failed([counted]).keys() == {5, 6, 7}


def test_a_flush_that_raises_fails_every_row_and_emits_nothing():
    results = run(executor_for("b", Summing(SystemExit("full"))), [1, 2, 3], [4])
    assert emitted(results) == []
    assert whys(results) == {0: "full", 1: "two", 2: "full", 3: "full"}
    assert results[-1].open == 0


def test_out_ends_with_its_call():
    kept = []

    def process(batch, out):
        for old in kept:
            with pytest.raises(RuntimeError, match="cannot emit or fail any more"):
                old.emit([[1]], parents=[0])
            with pytest.raises(RuntimeError, match="cannot emit or fail any more"):
                old.fail([0], "late")
        kept.append(out)
        everything(batch, out)
        if batch["n"][0].as_py() == 1:
            raise ValueError("one")

    executor = executor_for("b", Doing(process))
    results = run(executor, [1, 2], [3])
    assert emitted(results) == [(20, [1]), (30, [2])]
    assert whys(results) == {0: "one"}


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

    said = "a bolt's methods must return None, got RecordBatch; emit values by out.emit(...)"
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
    results = run(executor_for("b", BatchBolt()), [1])
    assert "must define process(self, batch, out)" in whys(results)[0]
