"""Bolts that take a tuple at a time: whatever they do, each input is acked or failed, once."""

import importlib
import logging
import re

import pytest
from acting import (
    OUT,
    Basically,
    Doing,
    batch_of,
    emit_and_ack,
    emitted,
    failed,
    identity_of,
    run,
    whys,
)

from ackcore.topology import Reject
from ackcore.topology.components import BasicBolt, Bolt
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Reason


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


class OnClass(BasicBolt):
    reject = ("ZeroDivisionError",)
    retry_on = (ArithmeticError, "TimeoutError")

    def execute(self, t, collector):
        raise (KeyError, TimeoutError, ZeroDivisionError, OverflowError)[t[0]]


def test_a_bolt_says_what_is_retried_of_what_it_raises():
    finals = [r.final for r in failed(run(executor_for("b", OnClass()), [0, 1, 2, 3])).values()]
    assert finals == [True, False, True, False]
    bolt = OnClass()
    bolt.reject, bolt.retry_on = [TimeoutError], None
    executor = executor_for("b", bolt, reject=[OverflowError])
    finals = [r.final for r in failed(run(executor, [0, 1, 2, 3])).values()]
    assert finals == [False, True, False, True]


def test_a_bolt_that_did_not_get_ready_has_no_collector():
    kept = []

    class Leaky(Bolt):
        outputs = OUT

        def prepare(self, context):
            kept.append(self.collector)
            self.collector.emit((1,))
            raise ValueError("half way")

    results = run(executor_for("b", Leaky()), [1], [2])
    assert emitted(results) == []
    with pytest.raises(RuntimeError, match="the collector of bolt 'b' is closed"):
        kept[0].emit((1,))


def test_a_bolt_that_cannot_take_its_collector_fails_its_rows():
    class Stiff(Bolt):
        collector = property(lambda self: None)

    results = run(executor_for("b", Stiff()), [1])
    assert failed(results)[0].type == "AttributeError"


@pytest.mark.parametrize(
    ("does", "way_out"),
    [
        (
            lambda bolt, t: bytes(t[0])["id"],
            "; the value is bytes: decode it first; the value of a Kaf",
        ),
        (lambda bolt, t: t.n, "has no attribute 'n'; read a value of a tuple by .* tuple\\['n'\\]"),
        (lambda bolt, t: t.line, r"by its field, as in tuple\['n'\]"),
        (lambda bolt, t: bolt.collector.emit((1,)), "; only a Bolt has self.collector: emit thro"),
        (lambda bolt, t: importlib.import_module("no_such"), "; this worker's Python lacks the mo"),
        (lambda bolt, t: Reject("bad"), "must return None, got Reject; raise it instead of ret"),
        (lambda bolt, t: bolt.no, "object has no attribute 'no'$"),
    ],
)
def test_the_error_of_a_newcomers_mistake_has_the_way_out(does, way_out):
    bolt = Basically(None)
    bolt.do = lambda t, c: does(bolt, t)
    assert re.search(way_out, failed(run(executor_for("b", bolt), [1]))[0].message)


def test_a_collector_is_there_from_prepare_on():
    class Early(Bolt):
        outputs = OUT

        def prepare(self, context):
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
    assert executor.collector.ignored == 5
    assert "5 calls of ack, fail or emit for tuples that were acked or failed" in caplog.text
