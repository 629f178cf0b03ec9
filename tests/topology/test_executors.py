"""The life of a bolt in its task, for each kind of bolt: prepared, called, flushed, cleaned up."""

import logging

import pytest
from acting import emitted, failed, raising, run

from ackcore.topology import AsyncBolt, BasicBolt, BatchBolt, Bolt
from ackcore.topology.executors import executor_for
from ackcore.topology.tuples import Reason

#: The base class, the number of threads, and the method that receives inputs.
KINDS = {
    "Bolt": (Bolt, None, "execute"),
    "BasicBolt": (BasicBolt, None, "execute"),
    "BasicBolt in threads": (BasicBolt, 3, "execute"),
    "AsyncBolt": (AsyncBolt, None, "execute"),
    "BatchBolt": (BatchBolt, None, "process"),
}


@pytest.fixture(params=KINDS)
def make(request):
    """``make(prepare=..., work=..., flush=..., cleanup=...)`` makes a bolt of one kind."""
    base, threads, work = KINDS[request.param]

    def awaited(method):
        async def call(self, *arguments):
            return method(self, *arguments)

        return call

    def make(**methods):
        methods.setdefault("work", lambda self, *arguments: None)
        methods[work] = methods.pop("work")
        if base is AsyncBolt:
            methods.pop("flush", None)
            methods = {name: awaited(method) for name, method in methods.items()}
        return type("B", (base,), methods if threads is None else {**methods, "threads": threads})()

    return make


def test_a_bolt_that_cannot_prepare_fails_every_row_and_is_asked_once(make):
    contexts = []

    def prepare(self, context):
        contexts.append(context)
        raise SystemExit("no database")

    bolt = make(prepare=prepare, **dict.fromkeys(["work", "flush", "cleanup"], raising(OSError())))
    executor = executor_for("b", bolt, task=3, batch_id=9)
    results = run(executor, [1, 2], [], [3])
    executor.cleanup()
    assert failed(results) == dict.fromkeys(range(3), Reason("b", "SystemExit", "no database"))
    assert [result.open for result in results] == [0, 0, 0, 0]
    (context,) = contexts
    assert (context.component, context.task, context.batch_id) == ("b", 3, 9)


def test_a_task_without_rows_calls_nothing(make):
    methods = ["prepare", "work", "flush", "cleanup"]
    executor = executor_for("b", make(**dict.fromkeys(methods, raising(OSError()))))
    results = run(executor, [])
    executor.cleanup()
    assert (failed(results), emitted(results)) == ({}, [])


@pytest.mark.parametrize("method", ["prepare", "work", "flush", "cleanup"])
def test_an_interrupt_passes(make, method):
    bolt = make(**{method: raising(KeyboardInterrupt())})
    if isinstance(bolt, AsyncBolt) and method == "flush":
        pytest.skip("an AsyncBolt has no flush")
    executor = executor_for("b", bolt)

    def whole_task():
        run(executor, [1])
        executor.cleanup()

    with pytest.raises(KeyboardInterrupt):
        whole_task()


def test_cleanup_that_raises_is_logged(make, caplog):
    executor = executor_for("messy", make(cleanup=raising(SystemExit("gone"))))
    run(executor, [1])
    with caplog.at_level(logging.WARNING, logger="ackcore"):
        executor.cleanup()
        executor.cleanup()
    assert [record.getMessage() for record in caplog.records] == [
        "messy: cleanup raised SystemExit: gone; no record is affected"
    ]
