"""Bolts that take a tuple at a time: whatever they do, each input is acked or failed, once."""

import gc
import logging
import pickle
import queue
import re
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import emitted, failed, whys

from ackcore import topology
from ackcore.topology import row_bolts
from ackcore.topology.components import BasicBolt, BatchBolt, Bolt, Component, Reject
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Identity, Reason

OUT = pa.schema([("x", pa.int64())])
TWO = {"default": OUT, "side": OUT}


def batch_of(*values):
    return pa.record_batch({"n": pa.array(values, pa.int64())})


def identity_of(rows):
    ids = pa.array([f"m{row}" for row in range(rows)], pa.string())
    return Identity(ids, np.zeros(rows, np.int32), np.arange(rows, dtype=np.int64))


def run(executor, *batches):
    """Process batches of values and flush; return what each call returned."""
    results = [executor.process("src", "default", batch_of(*values), None) for values in batches]
    return [*results, executor.flush()]


class Doing(Bolt):
    """A bolt that does what a test says, by the tuple's value."""

    outputs = TWO

    def __init__(self, execute, flush=None):
        self.do, self.at_end, self.seen = execute, flush, []

    def execute(self, tuple):
        self.seen.append(tuple)
        self.do(self, tuple)

    def flush(self):
        if self.at_end:
            self.at_end(self)


class Basically(BasicBolt):
    outputs = TWO

    def __init__(self, execute):
        self.do = execute

    def execute(self, tuple, collector):
        return self.do(tuple, collector)


def emit_and_ack(bolt, t):
    bolt.collector.emit((t[0] * 10,), t)
    bolt.collector.ack(t)


def test_a_bolt_emits_and_acks():
    executor = executor_for("b", Doing(emit_and_ack))
    results = run(executor, [1, 2], [], [3])
    assert emitted(results) == [(10, [0]), (20, [1]), (30, [2])]
    assert failed(results) == {}
    assert [result.open for result in results] == [0, 0, 0, 0]
    assert all(
        e.batch.schema.equals(OUT, check_metadata=True) for r in results for e in r.emissions
    )


def test_a_tuple_says_where_it_comes_from():
    seen = []
    executor = executor_for("b", Basically(lambda t, c: seen.append(t)))
    executor.process("lines", "side", batch_of(1, 2), identity_of(2))
    executor.process("other", "default", batch_of(3), identity_of(1))
    assert [
        (t.component, t.stream, t.message_id, t.attempt, t.stable_id, t["n"]) for t in seen
    ] == [
        ("lines", "side", "m0", 0, 0, 1),
        ("lines", "side", "m1", 0, 1, 2),
        ("other", "default", "m0", 0, 0, 3),
    ]


def test_every_way_of_anchoring():
    def execute(bolt, t):
        if t[0] == 3:
            a, b, c = bolt.seen
            bolt.collector.emit([1], None)
            bolt.collector.emit({"x": 2}, (), "side")
            bolt.collector.emit((3,), [a])
            bolt.collector.emit((4,), iter([b, a, b]))
            bolt.collector.emit((5,), c)
            bolt.collector.emit((6,), c, stream="side")
            for one in bolt.seen:
                bolt.collector.ack(one)

    results = run(executor_for("b", Doing(execute)), [1, 2], [3])
    assert emitted(results) == [(1, []), (3, [0]), (4, [1, 0, 1]), (5, [2])]
    assert emitted(results, "side") == [(2, []), (6, [2])]
    assert [result.open for result in results] == [2, 0, 0]
    assert failed(results) == {}


@pytest.mark.parametrize("slice_rows", [1, 2, 512])
def test_what_nobody_acked_fails_at_the_end(slice_rows, monkeypatch):
    monkeypatch.setattr(row_bolts, "SLICE_ROWS", slice_rows)
    bolt = Doing(lambda b, t: b.collector.ack(t) if t[0] % 2 else None)
    results = run(executor_for("b", bolt), [1, 2, 3], [4])
    assert [result.open for result in results] == [1, 2, 0]
    assert failed(results) == dict.fromkeys([1, 3], Reason("b", "NotAcked", "not acked by b"))


class NoText(Exception):
    def __str__(self):
        raise ValueError


ERRORS = [
    ValueError("no"),
    SystemExit(3),
    GeneratorExit(),
    StopIteration(),
    MemoryError(),
    NoText(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_raising_fails_the_input_and_nothing_else(error):
    def execute(bolt, t):
        bolt.collector.emit((t[0],), t)
        bolt.collector.ack(t)  # which does not help one that raises
        if t[0] == 2:
            raise error

    def basic(t, collector):
        collector.emit((t[0],))
        collector.emit((t[0],), "side")
        if t[0] == 2:
            raise error

    results = run(executor_for("b", Doing(execute)), [1, 2, 3])
    assert failed(results) == {1: Reason.of("b", error)}
    assert emitted(results) == [(1, [0]), (2, [1]), (3, [2])]
    results = run(executor_for("b", Basically(basic)), [1, 2, 3])
    assert failed(results) == {1: Reason.of("b", error)}
    assert emitted(results) == emitted(results, "side") == [(1, [0]), (3, [2])]


def raising(error):
    def method(self, *args):
        raise error

    return method


@pytest.mark.parametrize("shape", [Bolt, BasicBolt])
@pytest.mark.parametrize("method", ["prepare", "execute", "flush", "cleanup"])
def test_an_interrupt_passes(shape, method):
    members = {"execute": lambda self, *args: None, method: raising(KeyboardInterrupt())}
    executor = executor_for("b", type("B", (shape,), members)())

    def whole_task():
        run(executor, [1])
        executor.cleanup()

    with pytest.raises(KeyboardInterrupt):
        whole_task()


def test_reject_is_final():
    def execute(bolt, t):
        if t[0] == 1:
            raise Reject("broken for good")
        if t[0] == 2:
            bolt.collector.fail(t, Reject("said so"))
        if t[0] == 3:
            raise KeyError("k")
        if t[0] == 4:
            bolt.collector.fail(t, "some text")
        if t[0] == 5:
            bolt.collector.fail(t)
        if t[0] == 6:
            bolt.collector.fail(t, Reason("elsewhere", "T", "m", True))

    results = run(executor_for("b", Doing(execute), reject=(LookupError,)), [1, 2, 3, 4, 5, 6])
    assert list(failed(results).values()) == [
        Reason("b", "Reject", "broken for good", True),
        Reason("b", "Reject", "said so", True),
        Reason("b", "KeyError", "'k'", True),
        Reason("b", "Failed", "some text"),
        Reason("b", "Failed", "failed by b"),
        Reason("elsewhere", "T", "m", True),
    ]


@pytest.mark.parametrize("shape", [Bolt, BasicBolt])
def test_a_bolt_that_cannot_prepare_fails_every_row_and_is_asked_once(shape):
    calls = []

    class Unready(shape):
        def prepare(self, context):
            calls.append(context)
            raise SystemExit("no database")

        def flush(self):
            calls.append("flush")

        def cleanup(self):
            calls.append("cleanup")

    executor = executor_for("b", Unready(), task=3, batch_id=9)
    results = run(executor, [1, 2], [], [3])
    executor.cleanup()
    assert failed(results) == dict.fromkeys(range(3), Reason("b", "SystemExit", "no database"))
    assert [result.open for result in results] == [0, 0, 0, 0]
    (context,) = calls
    assert (context.component, context.task, context.batch_id) == ("b", 3, 9)


def test_a_bolt_that_did_not_get_ready_has_no_collector():
    kept = []

    class Leaky(Bolt):
        outputs = OUT

        def prepare(self, context):
            kept.append(context.collector)
            self.collector.emit((1,))
            raise ValueError("half way")

    results = run(executor_for("b", Leaky()), [1], [2])
    assert emitted(results) == []
    with pytest.raises(RuntimeError, match="the collector of b is closed"):
        kept[0].emit((1,))


def test_a_bolt_that_cannot_take_its_collector_fails_its_rows():
    class Stiff(Bolt):
        collector = property(lambda self: None)

    results = run(executor_for("b", Stiff()), [1])
    assert failed(results)[0].type == "AttributeError"


def test_a_task_without_rows_calls_nothing():
    bolt = type("B", (Bolt,), dict.fromkeys(["prepare", "flush", "cleanup"], raising(OSError())))()
    executor = executor_for("b", bolt)
    results = run(executor, [])
    executor.cleanup()
    assert failed(results) == {}
    assert emitted(results) == []


def test_a_collector_is_there_from_prepare_on():
    class Early(Bolt):
        outputs = OUT

        def prepare(self, context):
            assert context.collector is self.collector
            self.collector.emit((1,))

        def execute(self, tuple):
            self.collector.ack(tuple)

    assert emitted(run(executor_for("b", Early()), [1])) == [(1, [])]


@pytest.mark.parametrize("error", ERRORS[:3], ids=lambda error: type(error).__name__)
def test_a_flush_that_raises_fails_what_is_open(error):
    def execute(bolt, t):
        if t[0] == 2:
            bolt.collector.ack(t)

    def flush(bolt):
        bolt.collector.emit((7,), bolt.seen[0])
        bolt.collector.ack(bolt.seen[0])
        raise error

    results = run(executor_for("b", Doing(execute, flush)), [1, 2, 3])
    assert failed(results) == {2: Reason.of("b", error)}
    assert emitted(results) == [(7, [0])]


def test_a_basic_bolt_that_flushes_acks_then():
    class Buffering(BasicBolt):
        def __init__(self, error):
            self.error = error

        def execute(self, tuple, collector):
            if tuple[0] == 2:
                raise KeyError(2)

        def flush(self):
            if self.error:
                raise self.error

    results = run(executor_for("b", Buffering(None)), [1, 2], [3])
    assert [result.open for result in results] == [1, 2, 0]
    assert failed(results) == {1: Reason("b", "KeyError", "2")}
    results = run(executor_for("b", Buffering(OSError("disk full"))), [1, 2], [3])
    assert whys(results) == {0: "disk full", 1: "2", 2: "disk full"}


def test_cleanup_that_raises_is_logged(caplog):
    class Messy(Bolt):
        cleanup = raising(SystemExit("gone"))

        def execute(self, tuple):
            self.collector.ack(tuple)

    executor = executor_for("messy", Messy())
    assert failed(run(executor, [1])) == {}
    with caplog.at_level(logging.WARNING, logger="ackcore"):
        executor.cleanup()
        executor.cleanup()
    assert [record.getMessage() for record in caplog.records] == [
        "messy: cleanup raised SystemExit: gone"
    ]


def test_the_first_of_several_answers_counts(caplog):
    def execute(bolt, t):
        c = bolt.collector
        if t[0] == 1:
            c.ack(t)
            c.ack(t)
        if t[0] == 2:
            c.fail(t, "first")
            c.ack(t)
            c.fail(t, "second")
            raise ValueError("third")
        if t[0] == 3:
            c.ack(t)
            c.fail(t, "in time")
        if t[0] == 4:
            c.ack(bolt.seen[0])
            c.fail(bolt.seen[0], "too late: its ack was told")
            c.ack(t)

    executor = executor_for("b", Doing(execute))
    with caplog.at_level(logging.WARNING, logger="ackcore"):
        results = run(executor, [1, 2, 3], [4])
    assert whys(results) == {1: "first", 2: "in time"}
    assert executor.ignored == 5
    assert "5 calls for tuples that were acked or failed before" in caplog.text


def test_an_ack_that_was_told_stays(caplog):
    def execute(bolt, t):
        if t[0] == 2:  # held, and acked in the second batch; in the third it is too late
            bolt.collector.ack(bolt.seen[0])
        if t[0] == 3:
            bolt.collector.fail(bolt.seen[0], "too late")
        if t[0] > 1:
            bolt.collector.ack(t)

    executor = executor_for("b", Doing(execute))
    results = run(executor, [1], [2], [3])
    assert [result.open for result in results] == [1, 0, 0, 0]
    assert failed(results) == {}
    assert executor.ignored == 1


def test_what_failed_in_an_earlier_batch_is_not_spoken_of_any_more():
    def execute(bolt, t):
        c = bolt.collector
        if t[0] == 1:
            c.fail(t, "told")
        if t[0] == 2:
            c.emit((2,), bolt.seen[0])
            c.ack(t)
        if t[0] == 3:
            c.emit((3,), [t, bolt.seen[0]])
            c.ack(t)

    executor = executor_for("b", Doing(execute))
    results = run(executor, [1], [2], [3])
    assert emitted(results) == []
    assert whys(results)[0] == "told"
    assert whys(results)[2].startswith("emitted together with <Tuple of src/default: n=1>, which")
    assert sorted(failed(results)) == [0, 2]


def test_emitting_after_the_ack_fails_the_tuple():
    def execute(bolt, t):
        c = bolt.collector
        c.ack(t)
        if t[0] == 1:
            c.emit((1,), t)
        if t[0] == 2:
            with pytest.raises(ValueError, match="emit first and ack afterwards"):
                c.emit((2,), [t, t])  # caught, and yet its tree is not complete
        if t[0] == 4:  # of an earlier batch: told already, so that nothing can be taken back
            c.emit((4,), bolt.seen[2])

    results = run(executor_for("b", Doing(execute)), [1, 2, 3], [4])
    assert emitted(results) == []
    assert sorted(failed(results)) == [0, 1, 3]
    assert all("must not have been acked before" in why for why in whys(results).values())


def test_emitting_for_a_failed_tuple_is_emitting():
    def execute(bolt, t):
        bolt.collector.fail(t, "no")
        bolt.collector.emit((1,), t)

    results = run(executor_for("b", Doing(execute)), [1])
    assert (emitted(results), whys(results)) == ([(1, [0])], {0: "no"})


BAD_CALLS = [
    (lambda c, t: c.emit((1,), t, "sid"), ValueError, "got 'sid'; did you mean 'side'?"),
    (
        lambda c, t: c.emit((1, 2), t),
        ValueError,
        r"values must be 1 for b's stream 'default' \(x\)",
    ),
    (lambda c, t: c.emit("1", t), TypeError, "must be a tuple, a list or a dict"),
    (lambda c, t: c.emit(t, t), TypeError, "got Tuple; pass tuple.values"),
    (lambda c, t: c.emit(("a",)), ValueError, "'x' of b's stream 'default' must be int64, got str"),
    (lambda c, t: c.emit((1,), 5), TypeError, "anchors must be a Tuple that the bolt was given"),
    (lambda c, t: c.emit((1,), [t, 5]), TypeError, "got int"),
    (lambda c, t: c.ack(None), TypeError, "tuple must be a Tuple .* got NoneType"),
    (lambda c, t: c.fail("t"), TypeError, "got str"),
    (lambda c, t: c.fail(t, 5), TypeError, "reason must be an exception, a text or a Reason"),
    (lambda c, t: pickle.dumps(c), TypeError, "a collector lives in its task"),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD_CALLS)
def test_a_wrong_call_raises_where_it_is_made(call, error, match):
    def execute(bolt, t):
        with pytest.raises(error, match=match):
            call(bolt.collector, t)
        call(bolt.collector, t)

    results = run(executor_for("b", Doing(execute)), [1])
    assert failed(results)[0].type == error.__name__
    assert emitted(results) == []


@pytest.mark.parametrize("values", [1, "a", None])
def test_values_one_by_one_are_refused_before_the_stream_that_one_of_them_is_taken_for(values):
    wrong = [
        Basically(lambda t, c: c.emit(values, "y")),
        Doing(lambda b, t: b.collector.emit(values, t, "y")),
    ]
    for bolt in wrong:
        assert whys(run(executor_for("b", bolt), [1])) == {
            0: f"values must be a tuple, a list or a dict of values for b, got "
            f"{type(values).__name__}; put all values of a row in one tuple or list, or in a "
            "dict by field"
        }


def test_a_tuple_of_another_task_is_refused():
    other = Doing(emit_and_ack)
    run(executor_for("other", other), [1])
    (stranger,) = other.seen
    calls = [
        lambda c, t: c.emit((1,), stranger),
        lambda c, t: c.emit((1,), [t, stranger]),
        lambda c, t: c.ack(stranger),
        lambda c, t: c.fail(stranger),
    ]
    for call in calls:
        bolt = Doing(lambda b, t, call=call: call(b.collector, t))
        results = run(executor_for("b", bolt), [1])
        assert "which another task or component was given" in whys(results)[0]
        assert emitted(results) == []


def test_a_bolt_without_outputs_cannot_emit():
    bolt = Doing(emit_and_ack)
    bolt.outputs = None
    assert "declares no outputs" in whys(run(executor_for("b", bolt), [1]))[0]


@pytest.mark.parametrize("slice_rows", [1, 3])
def test_what_arrow_cannot_convert_fails_the_tuples_that_it_hangs_from(slice_rows, monkeypatch):
    monkeypatch.setattr(row_bolts, "SLICE_ROWS", slice_rows)

    def execute(bolt, t):
        c = bolt.collector
        c.emit((t[0],), t)
        if t[0] == 2:
            c.emit((2**63,), t)
        if t[0] == 4:
            c.emit(("x",), [bolt.seen[0], t], "side")
        if t[0] != 1:
            c.ack(t)

    results = run(executor_for("b", Doing(execute)), [1, 2, 3], [4, 5])
    assert emitted(results) == [(1, [0]), (2, [1]), (3, [2]), (4, [3]), (5, [4])]
    assert emitted(results, "side") == []
    assert sorted(failed(results)) == [0, 1, 3]
    assert whys(results)[0].startswith("'x' of b's stream 'side' must be int64, got str")
    assert [result.open for result in results] == [1, 0, 0]


def test_a_bad_value_beats_not_acked():
    bolt = Doing(lambda b, t: None, lambda b: b.collector.emit(("x",), b.seen[0]))
    assert "must be int64" in whys(run(executor_for("b", bolt), [1]))[0]


def test_an_input_that_python_cannot_show_fails_by_itself():
    text = pa.Array.from_buffers(
        pa.string(), 3, [*pa.array(["ab", "cd", "ef"]).buffers()[:2], pa.py_buffer(b"ab\xff\xfeef")]
    )
    seen = []
    executor = executor_for("b", Basically(lambda t, c: seen.append(t[0])))
    results = [executor.process("s", "default", pa.record_batch({"t": text}), None)]
    assert seen == ["ab", "ef"]
    assert "Python has no value for" in whys(results)[1]


def test_a_call_that_has_not_run_is_not_taken_for_done():
    def generator():
        yield

    results = run(executor_for("b", Basically(lambda t, c: generator())), [1])
    assert "got generator, which has not run" in whys(results)[0]
    bolt = Doing(lambda b, t: None, lambda b: None)
    bolt.execute = lambda t: generator()
    assert "got generator" in whys(run(executor_for("b", bolt), [1]))[0]


class Returning(Doing):
    """A bolt whose methods return what its functions do."""

    def execute(self, tuple):
        return self.do(self, tuple)

    def flush(self):
        return self.at_end(self)


@pytest.mark.parametrize("result", [7, False, [(1,)], "x"])
def test_what_is_returned_is_not_taken_for_emitted(result):
    """It would be lost, and its input acked."""

    def execute(t, c):
        c.emit((t[0],))
        return result if t[0] == 2 else None

    said = f"a bolt's methods must return None, got {type(result).__name__}; emit it by "
    results = run(executor_for("b", Basically(execute)), [1, 2, 3])
    assert emitted(results) == [(1, [0]), (3, [2])]
    assert failed(results) == {1: Reason("b", "TypeError", f"{said}collector.emit(...)")}

    def acks(bolt, t):
        bolt.collector.ack(t)
        return result

    results = run(executor_for("b", Returning(acks, lambda b: None)), [1])
    assert whys(results) == {0: f"{said}self.collector.emit(...)"}
    results = run(executor_for("b", Returning(lambda b, t: None, lambda b: result)), [1])
    assert whys(results) == {0: f"{said}self.collector.emit(...)"}


def test_what_a_collector_returns_may_be_returned():
    """As one writes a method of one line."""
    results = run(executor_for("b", Basically(lambda t, c: c.emit((t[0],)))), [1])
    assert (emitted(results), failed(results)) == ([(1, [0])], {})
    bolt = Returning(lambda b, t: b.collector.ack(t), lambda b: None)
    assert failed(run(executor_for("b", bolt), [1])) == {}
    bolt = Returning(lambda b, t: b.collector.fail(t, "no"), lambda b: None)
    assert whys(run(executor_for("b", bolt), [1])) == {0: "no"}


def test_methods_that_would_not_run_are_refused():
    class Lazy(BasicBolt):
        def execute(self, tuple, collector):
            yield

    class Later(Bolt):
        async def execute(self, tuple):
            pass

    for bolt in (Lazy(), Later()):
        with pytest.raises(TypeError, match="execute must be a plain method, got one with 'yield'"):
            executor_for("b", bolt)
    for other, name in ((Lazy, "the class Lazy"), (Component(), "Component"), (7, "int")):
        with pytest.raises(TypeError, match=f"must be an instance of .*, got {name}"):
            executor_for("b", other)


def test_what_bolts_are_handed_can_be_looked_up():
    """help() of a bolt names them, and each can be imported from where the bolt is."""
    handed = {
        Bolt: ["Collector", "Tuple"],
        BasicBolt: ["BasicCollector", "Tuple"],
        BatchBolt: ["BatchOutput", "Identity"],
    }
    for shape, names in handed.items():
        for name in [*names, "pyarrow.Schema"]:
            assert name in shape.__doc__
            assert name in (*topology.__all__, "pyarrow.Schema")
    assert topology.Identity is Identity
    for member in ("message_ids", "attempts", "stable_ids"):
        assert re.search(rf"{member} : .*(string|int32|int64), shape \(n,\)", Identity.__doc__)


@pytest.mark.parametrize("shape", [Bolt, BasicBolt])
def test_a_bolt_without_execute_says_so(shape):
    reason = failed(run(executor_for("b", shape()), [1]))[0]
    assert (reason.type, "must define execute(self, tuple" in reason.message) == (
        "NotImplementedError",
        True,
    )


@pytest.mark.parametrize(
    ("outputs", "error", "match"),
    [
        ([("x", int)], TypeError, "must be a pyarrow.Schema or a mapping .* got list"),
        ({"a": OUT, "b": 1}, TypeError, "must map streams to pyarrow.Schema, got 'b': int"),
        ({1: OUT}, TypeError, "got 1: Schema"),
        ({"a": pa.schema([])}, ValueError, r"outputs\['a'\] must have a field at least"),
    ],
)
def test_outputs_that_are_none_are_refused(outputs, error, match):
    bolt = Doing(emit_and_ack)
    bolt.outputs = outputs
    with pytest.raises(error, match=match):
        executor_for("b", bolt)


def test_nothing_is_possible_after_flush():
    bolt = Doing(lambda b, t: None)
    executor = executor_for("b", bolt)
    assert sorted(failed(run(executor, [1]))) == [0]
    (t,) = bolt.seen
    calls = [
        lambda: bolt.collector.ack(t),
        lambda: bolt.collector.fail(t),
        lambda: bolt.collector.emit((1,), t),
        lambda: bolt.collector.emit((1,), [t, t]),
        lambda: bolt.collector.emit((1,)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"flush\(\) has returned"):
            call()
    with pytest.raises(RuntimeError, match="there can be no more input"):
        executor.process("s", "default", batch_of(1), None)
    with pytest.raises(RuntimeError, match="was flushed before"):
        executor.flush()


def test_a_basic_collector_ends_with_its_input():
    kept = []

    def execute(t, collector):
        for old in kept:
            with pytest.raises(ValueError, match=r"acked when its execute returns|failed"):
                old.emit((0,))
        collector.emit((t[0],))
        kept.append(collector)
        if t[0] == 2:
            raise ValueError("two")

    results = run(executor_for("b", Basically(execute)), [1, 2], [3])
    # The first emitted once more in the batch it came in: its tree would never be complete.
    assert emitted(results) == [(1, [0]), (3, [2])]
    assert sorted(failed(results)) == [0, 1]


# -- a model -------------------------------------------------------------------------------------

VALUES = st.sampled_from([1, 2, 3, "bad"])
INPUTS = st.lists(st.integers(0, 11), max_size=3)
ACTIONS = st.one_of(
    st.tuples(st.just("emit"), INPUTS, VALUES, st.sampled_from(["default", "side", "none"])),
    st.tuples(st.just("ack"), st.integers(0, 11)),
    st.tuples(st.just("ack"), st.integers(0, 11)),
    st.tuples(st.just("fail"), st.integers(0, 11)),
    st.tuples(st.just("ack"), st.just("self")),
    st.tuples(st.just("raise")),
)
STEPS = st.lists(ACTIONS, max_size=5)
SCRIPTS = st.lists(st.lists(STEPS, max_size=5), max_size=4)


class Model:
    """What SEMANTICS say of a script, by the plainest means."""

    def __init__(self):
        self.state, self.told, self.failures = {}, set(), {}  # told: in an earlier window
        self.rows = {"default": [], "side": []}
        self.bad = {"default": [], "side": []}
        self.ignored = 0

    def fail(self, handle, why):
        if self.state[handle] == "failed" or (
            self.state[handle] == "acked" and handle in self.told
        ):
            return False
        self.state[handle] = "failed"
        self.failures[handle] = why
        return True

    def play(self, actions, current, known):
        """Run a step's actions; return whether it raised."""
        for kind, *args in actions:
            if kind == "raise":
                return "script"
            if kind == "emit":
                anchors = [known(one) for one in args[0]]
                value, stream = args[1:]
                if stream == "none":
                    return "stream"
                if not anchors and value == "bad":
                    return "value"
                acked = [handle for handle in anchors if self.state[handle] == "acked"]
                if acked:
                    self.fail(acked[0], "late")
                    return "late"
                if any(
                    self.state[handle] == "failed" and handle in self.told for handle in anchors
                ):
                    for one in anchors:
                        self.fail(one, "together")
                    self.ignored += 1
                    continue
                where = self.bad if value == "bad" else self.rows
                where[stream].append((value, anchors))
            else:
                handle = current if args[0] == "self" else known(args[0])
                if kind == "fail":
                    self.ignored += not self.fail(handle, "said")
                elif self.state[handle] == "open":
                    self.state[handle] = "acked"
                else:
                    self.ignored += 1
        return None

    def end_slice(self):
        for stream in self.bad:
            for _, anchors in self.bad[stream]:
                for handle in anchors:
                    self.fail(handle, "value")
            self.bad[stream] = []

    def end_window(self):
        self.told = {handle for handle, state in self.state.items() if state != "open"}
        return self.state.keys() - self.told


class Scripted(Bolt):
    outputs = TWO

    def __init__(self, steps, at_end):
        self.steps, self.at_end, self.seen = iter(steps), at_end, []

    def execute(self, tuple):
        self.seen.append(tuple)
        self.play(next(self.steps), tuple)

    def flush(self):
        self.play(self.at_end, self.seen[-1])

    def play(self, actions, current):
        for kind, *args in actions:
            if kind == "raise":
                raise LookupError("script")
            if kind == "emit":
                anchors = [self.seen[one % len(self.seen)] for one in args[0]]
                self.collector.emit((args[1],), anchors, args[2])
            else:
                one = current if args[0] == "self" else self.seen[args[0] % len(self.seen)]
                getattr(self.collector, kind)(one)


def short(reason):
    """The model's word for a reason."""
    if reason.type == "LookupError":
        return "script"
    marks = {
        "must be int64": "value",
        "must not have been acked": "late",
        "stream must be": "stream",
        "failed by": "said",
        "not acked by": "not acked",
        "emitted together": "together",
    }
    (word,) = [word for mark, word in marks.items() if mark in reason.message]
    return word


@given(SCRIPTS, STEPS, st.sampled_from([1, 2, 512]))
def test_a_bolt_does_what_the_model_says(script, at_end, slice_rows):
    model, handle = Model(), 0
    bolt = Scripted([step for batch in script for step in batch], at_end)
    executor = executor_for("b", bolt)
    results, known, size = [], set(), row_bolts.SLICE_ROWS
    row_bolts.SLICE_ROWS = slice_rows
    try:
        for batch in script:
            known = {*known, *range(handle, handle + len(batch))}
            results.append(executor.process("s", "default", batch_of(*batch_rows(batch)), None))
            assert named(results[-1]) <= known
            for row, step in enumerate(batch):
                if row and row % slice_rows == 0:
                    model.end_slice()
                model.state[handle] = "open"
                handle += 1
                raised = model.play(step, handle - 1, lambda one: one % handle)  # noqa: B023
                if raised:
                    model.fail(handle - 1, raised)
            model.end_slice()
            known = model.end_window()
            assert results[-1].open == len(known)
            assert {h: short(r) for h, r in failed(results).items()} == model.failures
        results.append(executor.flush())
        assert named(results[-1]) <= known
    finally:
        row_bolts.SLICE_ROWS = size
    raised = handle and model.play(at_end, handle - 1, lambda one: one % handle)
    model.end_slice()
    for one in list(model.state):
        if model.state[one] == "open":
            model.fail(one, raised or "not acked")
    assert results[-1].open == 0
    assert {h: short(r) for h, r in failed(results).items()} == model.failures
    for stream in TWO:
        assert emitted(results, stream) == model.rows[stream]
    assert executor.ignored == model.ignored


def named(result):
    """Every handle that a result names: an engine knows no others than those still open."""
    parts = [emission.anchors.handles for emission in result.emissions]
    parts += [failure.handles for failure in result.failures]
    return {handle for part in parts for handle in part.tolist()}


def batch_rows(batch):
    return range(len(batch))


BASIC_STEPS = st.lists(st.tuples(VALUES, st.sampled_from(["default", "side"])), max_size=4)


@given(st.lists(st.lists(st.tuples(BASIC_STEPS, st.booleans()), max_size=5), max_size=4))
def test_a_basic_bolt_emits_all_of_an_input_or_none(script):
    steps = iter([step for batch in script for step in batch])

    def execute(t, collector):
        emits, raises = next(steps)
        for value, stream in emits:
            collector.emit((value,), stream)
        if raises:
            raise LookupError("script")

    results = run(executor_for("b", Basically(execute)), *map(batch_rows, script))
    expected, why = {"default": [], "side": []}, {}
    for handle, (emits, raises) in enumerate(step for batch in script for step in batch):
        if raises:
            why[handle] = "script"
        for value, stream in [] if raises else emits:
            if value == "bad":
                why[handle] = "value"
            else:
                expected[stream].append((value, [handle]))
    assert {h: short(r) for h, r in failed(results).items()} == why
    for stream in TWO:
        assert emitted(results, stream) == expected[stream]
    assert all(result.open == 0 for result in results)


# -- threads, signals, the garbage collector -----------------------------------------------------


class Pooled(Bolt):
    """Answers from four threads, out of order, while execute goes on."""

    outputs = OUT

    def __init__(self):
        self.work = queue.SimpleQueue()

    def prepare(self, context):
        self.threads = [threading.Thread(target=self.answer) for _ in range(4)]
        for thread in self.threads:
            thread.start()

    def execute(self, tuple):
        self.work.put(tuple)
        if tuple[0] % 7 == 3:
            raise ValueError("execute")

    def answer(self):
        while (one := self.work.get()) is not None:
            n = one[0]
            if n % 5 == 1:
                self.collector.fail(one, "thread")
            elif n % 5 != 2:  # and of these nobody answers
                self.collector.emit((n if n % 11 else "bad",), [one, one] if n % 3 else one)
                self.collector.ack(one)
                self.collector.ack(one)

    def flush(self):
        for _ in self.threads:
            self.work.put(None)
        for thread in self.threads:
            thread.join()


def test_threads_lose_and_double_nothing():
    executor = executor_for("b", Pooled())
    parts = [range(start, start + 700) for start in range(0, 7000, 700)]
    results = run(executor, *parts)
    why = failed(results)
    rows = emitted(results)
    assert len(rows) == len({value for value, _ in rows})
    for value, anchors in rows:
        assert anchors == ([value, value] if value % 3 else [value])
    got = {value for value, _ in rows}
    for n in range(7000):
        answers = n % 5 not in (1, 2)
        bad = answers and n % 11 == 0
        # What execute raises fails its input, whether a thread was quicker or not.  What hangs from
        # a failed input is emitted if its thread was not late by a whole batch.
        if n % 7 != 3:
            assert (n in got) == (answers and not bad)
        assert (n in why) == (not answers or bad or n % 7 == 3), n
    assert results[-1].open == 0


def test_a_thread_answers_between_batches():
    bolt = Doing(lambda b, t: None)
    executor = executor_for("b", bolt)
    results = [executor.process("s", "default", batch_of(1, 2, 3), None)]

    def answer():
        a, b, c = bolt.seen
        bolt.collector.emit((1,), a)
        bolt.collector.ack(a)
        bolt.collector.emit(("bad",), b)
        bolt.collector.ack(b)  # which is taken back: nobody was told
        bolt.collector.ack(c)
        bolt.collector.fail(c, "in time")

    thread = threading.Thread(target=answer)
    thread.start()
    thread.join()
    results += run(executor, [])
    assert emitted(results) == [(1, [0])]
    assert sorted(failed(results)) == [1, 2]
    assert [result.open for result in results] == [3, 0, 0]


def test_a_thread_that_raises_leaves_its_tuple_open(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def execute(bolt, t):
        error = SystemExit() if t[0] == 1 else KeyError()
        thread = threading.Thread(target=raising(error), args=(bolt,))
        thread.start()
        thread.join()

    assert set(whys(run(executor_for("b", Doing(execute)), [1, 2])).values()) == {"not acked by b"}


def test_an_alarm_in_the_middle_of_an_emit_leaves_no_half_row():
    """A signal's handler raises at some instruction of ours; anchors must still fit their rows."""

    class TimesOut(Exception):
        pass

    def on_alarm(number, frame):
        raise TimesOut("too slow")

    def execute(bolt, t):
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + (t[0] % 50) * 1e-6)
            for _ in range(200):
                bolt.collector.emit((t[0],), t)
            bolt.collector.ack(t)
            time.sleep(1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, on_alarm)
    gc.disable()  # else the alarm may go off in a callback of the collector's, which swallows it
    try:
        results = run(executor_for("b", Doing(execute)), range(300))
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert {reason.type for reason in failed(results).values()} == {"TimesOut"}
    assert sorted(failed(results)) == list(range(300))
    assert all(anchors == [value] for value, anchors in emitted(results))


def test_a_finalizer_may_ack():
    """The garbage collector may call us while we hold the lock: that must not be a deadlock."""

    class Keeper:
        def __init__(self, collector, one):
            self.collector, self.one, self.me = collector, one, self

        def __del__(self):
            self.collector.ack(self.one)

    def execute(bolt, t):
        Keeper(bolt.collector, t)
        for _ in range(50):
            bolt.collector.emit([t[0]], t)

    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        bolt = Doing(execute, lambda b: gc.collect())
        results = run(executor_for("b", bolt), range(100))
    finally:
        gc.set_threshold(*before)
    # A keeper may go while its tuple still emits: that is an emit after the ack.
    late = failed(results)
    assert all("acked before" in reason.message for reason in late.values())
    done = [value for value, _ in emitted(results) if value not in late]
    assert len(done) == 50 * (100 - len(late))


def test_the_same_input_gives_the_same_results():
    def once():
        bolt = Scripted([[("emit", [3, 1], n % 5 or "bad", "default")] for n in range(300)], [])
        results = run(executor_for("b", bolt), *[range(100)] * 3)
        return emitted(results), failed(results)

    assert once() == once()
