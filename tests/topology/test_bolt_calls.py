"""The calls a bolt may make, their arguments and returns, and the errors of others."""

import pickle
import re

import pyarrow as pa
import pytest
from acting import OUT, Basically, Doing, emit_and_ack, emitted, failed, run, whys

from ackcore import topology
from ackcore.topology.components import BasicBolt, BatchBolt, Bolt
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Identity, Reason

BAD_CALLS = [
    (lambda c, t: c.emit((1,), t, "sid"), ValueError, "got 'sid'; did you mean 'side'?"),
    (
        lambda c, t: c.emit((1, 2), t),
        ValueError,
        r"must have 1 value for b's stream 'default', got 2 \(int, int\); write \(x,\), or a dict",
    ),
    (lambda c, t: c.emit("1", t), TypeError, "must be a tuple, a list or a dict"),
    (lambda c, t: c.emit(t, t), TypeError, "got Tuple; pass tuple.values"),
    (lambda c, t: c.emit(("a",)), ValueError, "'x' of b's stream 'default' must be int64, got str"),
    (lambda c, t: c.emit((1,), 5), TypeError, "anchors must be a Tuple that the bolt received"),
    (lambda c, t: c.emit((1,), [t, 5]), TypeError, "got int"),
    (lambda c, t: c.ack(None), TypeError, "tuple must be a Tuple .* got NoneType"),
    (lambda c, t: c.fail("t"), TypeError, "got str"),
    (lambda c, t: c.fail(t, 5), TypeError, "reason must be an exception, a text or a Reason"),
    (lambda c, t: pickle.dumps(c), TypeError, "one task and cannot be pickled"),
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
        assert "an input of another task or component" in whys(results)[0]
        assert emitted(results) == []


def test_a_bolt_without_outputs_cannot_emit():
    bolt = Doing(emit_and_ack)
    bolt.outputs = None
    assert "declares no outputs" in whys(run(executor_for("b", bolt), [1]))[0]


def test_an_input_that_python_cannot_show_fails_by_itself():
    text = pa.Array.from_buffers(
        pa.string(), 3, [*pa.array(["ab", "cd", "ef"]).buffers()[:2], pa.py_buffer(b"ab\xff\xfeef")]
    )
    seen = []
    executor = executor_for("b", Basically(lambda t, c: seen.append(t[0])))
    results = [executor.process("s", "default", pa.record_batch({"t": text}), None)]
    assert seen == ["ab", "ef"]
    assert "without a Python value" in whys(results)[1]


def test_a_call_that_has_not_run_is_not_taken_for_done():
    def generator():
        yield

    results = run(executor_for("b", Basically(lambda t, c: generator())), [1])
    assert "got generator, which has not run; emit values by" in whys(results)[0]

    async def coroutine(t):
        await t

    def forgets(t, c):
        forgotten = coroutine(t)
        forgotten.close()  # without a warning of Python's
        return forgotten

    results = run(executor_for("b", Basically(forgets)), [1])
    assert "got coroutine, which has not run; await it in the execute of an A" in whys(results)[0]
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

    said = f"a bolt's methods must return None, got {type(result).__name__}; emit values by "
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
    """A method of one line."""
    results = run(executor_for("b", Basically(lambda t, c: c.emit((t[0],)))), [1])
    assert (emitted(results), failed(results)) == ([(1, [0])], {})
    bolt = Returning(lambda b, t: b.collector.ack(t), lambda b: None)
    assert failed(run(executor_for("b", bolt), [1])) == {}
    bolt = Returning(lambda b, t: b.collector.fail(t, "no"), lambda b: None)
    assert whys(run(executor_for("b", bolt), [1])) == {0: "no"}


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
        ({"a": OUT, "b": 1}, TypeError, "must map the name of each .* got 'b': int"),
        ({1: OUT}, TypeError, "got 1: Schema"),
        ({"a": pa.schema([])}, ValueError, r"outputs\['a'\] must have at least one field"),
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
