"""Bolts with many inputs out at once: each is acked or failed once, and emitted in its turn."""

import asyncio
import importlib
import pickle
import socket
import threading

import acting
import pyarrow as pa
import pytest
from acting import OUT, TWO, Basically, batch_of, emitted, failed, whys
from hypothesis import given
from hypothesis import strategies as st

from ackcore._files.journal import Journal
from ackcore.calls import RateLimit, used
from ackcore.flow import RttThreshold
from ackcore.testing import Source
from ackcore.topology import (
    AsyncBolt,
    BasicBolt,
    Bolt,
    Reject,
    Retry,
    TopologyBuilder,
    TopologyError,
    Unavailable,
    row_collector,
    row_executor,
)
from ackcore.topology.bolt_calls import call_settings
from ackcore.topology.executors import executor_for
from ackcore.topology.journaled_executor import Answers


class Set(AsyncBolt):
    """A bolt with two streams, whose settings a test gives."""

    outputs = TWO

    def __init__(self, **settings):
        for name, value in settings.items():
            setattr(self, name, value)


class Asyncly(Set):
    """A bolt that awaits what a test says."""

    max_concurrency = 100

    def __init__(self, execute, **settings):
        super().__init__(**settings)
        self.do = execute

    async def execute(self, tuple, collector):
        return await self.do(tuple, collector)


async def nothing(*arguments):
    pass


async def emit_n(t, collector):
    collector.emit((t["n"],))


def run(executor, *batches):
    """Process batches of values, flush and clean up; return what each call returned."""
    results = acting.run(executor, *batches)
    executor.cleanup()
    return results


@given(order=st.permutations(range(8)), data=st.data())
def test_what_is_emitted_does_not_depend_on_which_answer_is_faster(order, data):
    """Answers come in any order, and some inputs fail: the bytes are those of one at a time."""
    fails = data.draw(st.sets(st.sampled_from(range(8))))
    turns = {}

    async def execute(t, collector):
        n = t["n"]
        collector.emit((n,))
        turns[n] = asyncio.get_running_loop().create_future()
        if len(turns) == 8:
            turns[order[0]].set_result(None)
        await turns[n]
        collector.emit({"x": n * 10}, "side")
        place = order.index(n) + 1
        if place < 8:
            turns[order[place]].set_result(None)
        if n in fails:
            raise ValueError(str(n))
        collector.emit((n + 100,))

    results = run(executor_for("b", Asyncly(execute)), range(8))
    good = [n for n in range(8) if n not in fails]
    assert emitted(results) == [(x, [n]) for n in good for x in (n, n + 100)]
    assert emitted(results, "side") == [(n * 10, [n]) for n in good]
    assert list(failed(results)) == sorted(fails)
    assert results[0].open == 0


def test_handles_go_on_from_batch_to_batch_in_one_loop():
    loops = set()

    class Client(Asyncly):
        async def prepare(self, context):
            assert (context.component, context.task) == ("b", 3)
            loops.add(asyncio.get_running_loop())

        async def cleanup(self):
            loops.add(asyncio.get_running_loop())
            cleaned.append(True)

    async def execute(t, collector):
        await asyncio.sleep(0)
        loops.add(asyncio.get_running_loop())
        collector.emit((t["n"],))

    cleaned = []
    results = run(executor_for("b", Client(execute), task=3), range(3), [], range(3, 5))
    assert emitted(results) == [(n, [n]) for n in range(5)]
    assert len(loops) == 1
    assert cleaned == [True]
    with pytest.raises(RuntimeError, match="closed"):
        loops.pop().run_forever()


def test_reasons_are_those_of_any_bolt():
    raises = {
        0: ValueError("wrong"),
        1: Reject("never"),
        2: Retry("429", after_s=30),
        3: Unavailable("503", after_s=60),
        4: KeyError("k"),
        5: SystemExit(3),
    }

    async def execute(t, collector):
        collector.emit((1,))
        raise raises[t["n"]]

    bolt = Asyncly(execute, reject=["KeyError"])
    results = run(executor_for("b", bolt), range(6))
    reasons = failed(results)
    assert emitted(results) == []
    assert [reasons[n].type for n in range(6)] == [
        "ValueError",
        "Reject",
        "Retry",
        "Unavailable",
        "KeyError",
        "SystemExit",
    ]
    assert [n for n in range(6) if reasons[n].final] == [1, 4]
    assert (reasons[2].after_ms, reasons[2].counts) == (30_000, True)
    assert (reasons[3].after_ms, reasons[3].counts) == (60_000, False)


def test_a_time_out_fails_its_input_alone():
    async def execute(t, collector):
        if t["n"] == 1:
            await asyncio.Event().wait()
        collector.emit((t["n"],))

    results = run(executor_for("b", Asyncly(execute, timeout_s=0.05)), range(3))
    assert emitted(results) == [(0, [0]), (2, [2])]
    assert [(reason.type, reason.message) for reason in failed(results).values()] == [
        ("TimeoutError", "no answer within 0.05 s")
    ]


def test_an_input_that_waits_in_its_task_is_executed_again_with_another_collector():
    kept = []

    async def execute(t, collector):
        kept.append(collector)
        collector.emit((len(kept),))
        if len(kept) == 1:
            raise Retry(after_s=0.001)

    results = run(executor_for("b", Asyncly(execute)), [7])
    assert emitted(results) == [(2, [0])]
    assert failed(results) == {}


def test_what_is_emitted_when_its_execute_has_ended_fails_the_input():
    """Its tree would never be complete; and the caller is told."""
    said = []

    async def late(collector):
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="its execute has returned; await or join") as error:
            collector.emit((1,))
        said.append(str(error.value))

    async def execute(t, collector):
        if t["n"] == 0:
            tasks.append(asyncio.create_task(late(collector)))
        else:
            await tasks[0]

    tasks = []
    results = run(executor_for("b", Asyncly(execute)), range(2))
    assert len(said) == 1
    assert list(failed(results)) == [0]


def test_calls_go_to_the_endpoints():
    async def execute(t, collector):
        await both.wait()
        collector.emit((collector.endpoint,))

    both = asyncio.Barrier(2)  # is broken unless each endpoint has a call
    bolt = Asyncly(execute, endpoints=[10, 20], max_concurrency=1)
    found = emitted(run(executor_for("b", bolt), range(4)))
    assert sorted(endpoint for endpoint, _ in found) == [10, 10, 20, 20]


def test_no_more_are_out_than_the_window():
    out = most = 0

    async def execute(t, collector):
        nonlocal out, most
        out += 1
        most = max(most, out)
        await asyncio.sleep(0)
        out -= 1

    executor = executor_for(
        "b", Asyncly(execute, max_concurrency=lambda: RttThreshold(initial=1, max_limit=7))
    )
    run(executor, range(2000))
    assert most == 7


def test_a_limit_that_raises_fails_rows_and_not_the_task():
    class Broken(RttThreshold):
        def on_sample(self, rtt_ns, in_flight, dropped):
            raise ZeroDivisionError("limit")

    results = run(executor_for("b", Asyncly(emit_n, max_concurrency=Broken)), range(900), [1])
    assert whys(results) == dict.fromkeys(range(901), "limit")
    assert emitted(results) == []


def test_progress_is_told_for_each_input():
    told = []
    executor = executor_for("b", Asyncly(nothing), progressed=lambda: told.append(1))
    run(executor, range(50))
    assert len(told) == 50


@pytest.mark.parametrize("journal", [False, True])
def test_breaker_trips_are_told_once(journal, tmp_path):
    async def execute(tuple, collector):
        if tuple[0] < 0:
            raise ConnectionError("down")

    bolt = Asyncly(execute, journal=journal, breaker_failures=1, breaker_reset_s=0.01)
    bolt.wait_in_task_s = 5
    with Journal(tmp_path, b"what is asked of") as kept:
        answers = Answers("b", TWO, kept)
        executor = executor_for("b", bolt, answers=answers)
        results = run(executor, [1, 2], [-1, 3], [4], [-2, -3])
    assert [one.breaker_trips for one in results] == [0, 1, 0, 2, 0]


def test_a_rate_is_shared_by_the_tasks():
    limit = RateLimit(calls_per_s=100)
    assert call_settings(Asyncly(nothing, limit=limit), tasks=8).limit.calls_per_s == 12.5
    assert call_settings(Asyncly(nothing)).limit is None


# -- threads ----------------------------------------------------------------------------------


def test_as_many_executes_run_as_there_are_threads_and_emit_in_the_order_of_the_inputs():
    together = threading.Barrier(4, timeout=30)

    def execute(t, collector):
        assert threading.current_thread() is not threading.main_thread()
        collector.emit((t["n"],))
        together.wait()
        collector.emit((-t["n"],))
        if t["n"] == 5:
            raise StopIteration("five")

    bolt = Basically(execute)
    bolt.threads = 4
    results = run(executor_for("b", bolt), range(1, 9), range(9, 13))
    rows = emitted(results)
    assert [x for x, _ in rows] == [x for n in range(1, 13) if n != 5 for x in (n, -n)]
    assert {handle: reason.type for handle, reason in failed(results).items()} == {
        4: "StopIteration"
    }


def test_a_basic_bolt_in_threads_may_flush():
    class Sums(BasicBolt):
        outputs = OUT
        threads = 3

        def prepare(self, context):
            self.lock, self.rows = threading.Lock(), []

        def execute(self, tuple, collector):
            with self.lock:
                self.rows.append(tuple["n"])

        def flush(self):
            raise OSError(str(sum(self.rows)))

    results = run(executor_for("b", Sums()), range(5), range(5))
    assert [result.open for result in results] == [5, 10, 0]
    assert whys(results) == dict.fromkeys(range(10), "20")


def test_rows_that_python_cannot_show_fail_in_their_place():
    broken = pa.array([b"ok", b"\xff", b"ok"], pa.binary()).view(pa.string())
    batch = pa.record_batch({"n": broken})

    async def execute(t, collector):
        if t["n"] == "ok":
            raise ValueError

    executor = executor_for("b", Asyncly(execute))
    results = [executor.process("src", "default", batch, None)]
    executor.cleanup()
    assert list(failed(results)) == [0, 1, 2]


# -- what is refused ----------------------------------------------------------------------------


def plain(self, *arguments):
    pass


@pytest.mark.parametrize(
    ("base", "settings", "says"),
    [
        (AsyncBolt, {"max_concurrency": 0}, "bolt 'b': max_concurrency must be in 1..1000000"),
        (AsyncBolt, {"max_concurrency": dict}, "bolt 'b': max_concurrency must make a Limit"),
        (AsyncBolt, {"timeout_s": -1}, "bolt 'b': timeout_s must be above 0"),
        (AsyncBolt, {"limit": 9}, "bolt 'b': limit must be a RateLimit, got int 9"),
        (AsyncBolt, {"endpoints": "http://a"}, "bolt 'b': endpoints must be a list"),
        (AsyncBolt, {"wait_in_task_s": -1}, "bolt 'b': wait_in_task_s must be at least 0"),
        (AsyncBolt, {"execute": None}, "bolt 'b': B.execute must be a method, got NoneType"),
        (BasicBolt, {"threads": 0}, "bolt 'b': threads must be in 1..4096, got 0"),
        (BasicBolt, {"threads": "4"}, "bolt 'b': threads must be an integer, got str"),
        (Bolt, {"threads": 4}, "bolt 'b': threads must belong to a BasicBolt, got a Bolt"),
    ],
)
def test_settings_that_are_none_are_refused_when_the_topology_is_built(base, settings, says, make):
    execute = nothing if base is AsyncBolt else plain
    bolt = type("B", (base,), {"execute": execute} | settings)()
    builder = TopologyBuilder()
    builder.spout("s", make.frame("n"))
    with pytest.raises((ValueError, TypeError), match=says):  # noqa: PT012 - at once, or built
        builder.bolt("b", bolt).shuffle("s")
        builder.build()


@pytest.mark.parametrize("failing", ["rows_of", "_anchors_of"])
def test_what_the_executor_cannot_do_ends_its_task_and_acks_nothing(failing, monkeypatch):
    """Rows that were not pulled, or whose emissions were not taken, would count as done."""
    module = row_executor if failing == "rows_of" else row_collector
    calls, real = [], getattr(module, failing)

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("the third")
        return real(*arguments)

    monkeypatch.setattr(module, failing, fails)
    executor = executor_for("b", Asyncly(emit_n))
    with pytest.raises(MemoryError, match="the third"):
        executor.process("src", "default", batch_of(*range(3000)), None)


def test_what_a_thread_emits_as_execute_returns_is_taken_or_refused():
    said = []
    appends, returned = threading.Event(), threading.Event()

    class Waits(dict):
        def setdefault(self, key, default):
            appends.set()
            returned.wait(0.2)  # it is not set, as long as this holds up what ends the call
            return super().setdefault(key, default)

    def execute(t, collector):
        def late():
            try:
                collector.emit((t["n"],))
                said.append("taken")
            except ValueError:
                said.append("refused")

        collector._emitted = Waits()
        thread = threading.Thread(target=late)
        thread.start()
        appends.wait()
        threads.append(thread)

    threads, bolt = [], Basically(execute)
    bolt.threads = 2
    executor = executor_for("b", bolt)
    results = executor.process("src", "default", batch_of(7), None)
    returned.set()
    threads[0].join()
    assert said == ["taken"]
    assert emitted([results]) == [(7, [0])]
    executor.cleanup()


# -- several inputs of one call ---------------------------------------------------------------


class Together(Set):
    """Takes several inputs at once, and refuses a call with a bad one."""

    max_concurrency = 4

    def __init__(self, bad=(), error=None, **settings):
        super().__init__(**settings)
        self.bad, self.error, self.groups = bad, error, []

    async def execute_many(self, tuples, collectors):
        values = [one[0] for one in tuples]
        self.groups.append(values)
        for value, collector in zip(values, collectors, strict=True):
            collector.emit((value * 10,))
        await asyncio.sleep(0)
        if set(values) & set(self.bad):
            raise self.error or ValueError("bad")


@pytest.mark.parametrize("journal", [False, True])
@given(
    values=st.lists(st.integers(0, 30), max_size=40),
    bad=st.sets(st.integers(0, 30), max_size=4),
    most=st.integers(2, 9),
    keyed=st.booleans(),
)
def test_bad_inputs_of_a_call_fail_alone(journal, values, bad, most, keyed, tmp_path_factory):
    """And each other input is emitted once, in order; a call has inputs of one key."""
    limit = RateLimit(per=lambda one: one[0] % 3) if keyed else None
    bolt = Together(bad, max_batch=most, limit=limit, journal=journal)
    with Journal(tmp_path_factory.mktemp("journal"), b"several at once ") as kept:
        answers = Answers("b", TWO, kept) if journal else None
        results = run(executor_for("b", bolt, answers=answers), values)
    good = [place for place, value in enumerate(values) if value not in bad]
    assert emitted(results) == [(values[place] * 10, [place]) for place in good]
    assert sorted(failed(results)) == [n for n, value in enumerate(values) if value in bad]
    assert all(len(group) <= most for group in bolt.groups)
    if keyed:
        assert all(len({value % 3 for value in group}) == 1 for group in bolt.groups)
    elif not bad & set(values):
        assert len(bolt.groups) == -(-len(values) // most)


class Exits(dict):
    """A value whose own method ends the process."""

    def __iter__(self):
        raise SystemExit("no")


def test_a_value_that_exits_fails_its_input_alone_without_another_call():
    class Emits(Together):
        async def execute_many(self, tuples, collectors):
            self.groups.append([one[0] for one in tuples])
            for one, collector in zip(tuples, collectors, strict=True):
                collector.emit(Exits() if one[0] == 2 else (one[0],))

    bolt = Emits(max_batch=4)
    found = failed(run(executor_for("b", bolt), range(4)))
    assert {handle: (reason.type, reason.final) for handle, reason in found.items()} == {
        2: ("SystemExit", True)
    }
    assert bolt.groups == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "error",
    [
        *(Retry(after_s=60), TimeoutError("slow"), ConnectionError("down"), KeyError("listed")),
        socket.gaierror("no such host"),
    ],
    ids=repr,
)
def test_an_error_of_the_call_fails_all_its_inputs(error):
    bolt = Together([3], error, max_batch=4, retry_on=[KeyError])
    results = run(executor_for("b", bolt), range(8))
    assert sorted(failed(results)) == [0, 1, 2, 3]
    assert bolt.groups == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_calls_behind_one_that_is_bisected_restart_the_time_limit():
    made = []  # the calls when the limit was restarted
    bolt = Together([0], max_batch=2)
    executor = executor_for("b", bolt, progressed=lambda: made.append(len(bolt.groups)))
    executor.process("src", "default", batch_of(*range(20)), None)
    assert len(made) == 10 + 2
    assert made[0] <= 10  # before the bisection
    executor.cleanup()


def test_a_call_that_is_refused_is_repeated_with_the_same_inputs():
    bolt = Together([1], Retry("wait", after_s=0.01), max_batch=3)
    waited = bolt.execute_many

    async def once(tuples, collectors):
        if len(bolt.groups) == 1:
            bolt.bad = ()
        await waited(tuples, collectors)

    bolt.execute_many = once
    results = run(executor_for("b", bolt), range(3))
    assert emitted(results) == [(0, [0]), (10, [1]), (20, [2])]
    assert bolt.groups == [[0, 1, 2]] * 2


def test_a_bolt_with_several_inputs_of_a_call_must_define_it(make):
    builder = TopologyBuilder()
    builder.spout("s", make.frame("n"))
    builder.bolt("b", type("B", (AsyncBolt,), {"execute": nothing, "max_batch": 8})()).shuffle("s")
    builder.bolt("c", type("C", (AsyncBolt,), {"execute_many": nothing})()).shuffle("s")
    with pytest.raises(TopologyError) as raised:
        builder.build()
    assert raised.value.problems == (
        "bolt 'b' must have a method execute_many(self, tuples, collectors), because it is an "
        "AsyncBolt with max_batch=8, and B has execute, which is for max_batch=1; rename it, or "
        "remove max_batch",
        "bolt 'c' must have a method execute(self, tuple, collector), because it is an AsyncBolt, "
        "and C has execute_many, which is called if max_batch is above 1; set max_batch = 64",
    )
    with pytest.raises(ValueError, match=r"max_batch must be in 1\.\.65536, got 0"):
        call_settings(Together(max_batch=0))


@pytest.mark.parametrize("most", [1, 4])
def test_a_collector_reports_tokens(most):
    async def execute(t, collector):
        collector.used(tokens=10)

    async def execute_many(tuples, collectors):
        collectors[0].used(tokens=10 * len(tuples))

    bolt = Asyncly(execute, limit=RateLimit(per="n", tokens_per_min=1e9), max_batch=most)
    bolt.execute_many = execute_many
    executor = executor_for("b", bolt)
    results = executor.process("src", "default", batch_of(*range(8)), None)
    assert results.used.tokens == {str(n): 10.0 for n in range(8)}
    executor.flush()
    executor.cleanup()


#: Mistakes in the code around a call that was made, and the beginning of the reason.
MISTAKES = {
    "another argument": (
        lambda c: c.used(costs=1),
        "AsyncCallCollector.used() has no argument 'costs'; did you mean 'cost'?",
    ),
    "no name": (
        lambda c: c.used(5),
        "AsyncCallCollector.used() takes no argument without a keyword, got 5 as",
    ),
    "text": (lambda c: c.used(cost="1"), "cost of used() must be a number, got str '1'; convert"),
    "negative": (lambda c: c.used(cost=-1), "cost of used() must be in 0..1000000000000000, got -"),
    "NaN": (lambda c: c.used(tokens=float("nan")), "tokens of used() must be in 0..1000000000, go"),
    "list": (lambda c: c.used(tokens=[3]), "tokens of used() must be a number, got list [3]; conv"),
    "nothing": (lambda c: c.used(), "used() needs tokens=... or cost=..., got neither; do not"),
    "by the function": (lambda c: used(tokens="3"), "tokens of used() must be a number, got str '"),
    "of a Bolt": (lambda c: c.ack(None), "this bolt's collector has no method ack, which only t"),
    "stream": (lambda c: c.emit((1,), "sid"), "stream must be one of b's outputs, got 'sid'; did"),
    "columns": (
        lambda c: c.emit((1, 2)),
        "values must have 1 value for b's stream 'default', got 2",
    ),
    "no row": (lambda c: c.emit(1), "values must be a tuple, a list or a dict of values for b's"),
    "value": (lambda c: c.emit(("a",)), "'x' of b's stream 'default' must be int64, got str"),
    "returned": (lambda c: c, "a bolt's methods must return None, got "),
}


class Mistaken(Set):
    """Pays for its first input, or for the call with it, and makes a mistake then."""

    wait_in_task_s = 60

    def __init__(self, mistake, handles, **settings):
        super().__init__(**settings)
        self.mistake, self.handles, self.paid = mistake, handles, []

    async def execute(self, t, collector):
        return await self.execute_many([t], [collector])

    async def execute_many(self, tuples, collectors):
        self.paid.append([one[0] for one in tuples])
        for one, collector in zip(tuples, collectors, strict=True):
            try:
                collector.emit((one[0],))
                result = None if one[0] else self.mistake(collector)
            except Exception as error:
                if self.handles:
                    raise Retry(str(error)) from (OSError() if self.handles == "from" else None)
                raise
            if result is not None:
                return result
        return None


@pytest.mark.parametrize("handles", [False, True, "from"])
@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("journal", [False, True])
@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_after_a_call_is_final_and_the_call_is_not_repeated(
    kind, journal, most, handles, tmp_path
):
    """No further call is made for the input; other inputs are unaffected."""
    mistake, says = MISTAKES[kind]
    limit = RateLimit(tokens_per_min=1e9)
    bolt = Mistaken(mistake, handles, max_batch=most, limit=limit, journal=journal)
    with Journal(tmp_path, b"a mistake       ") as kept:
        answers = Answers("b", TWO, kept) if journal else None
        results = run(executor_for("b", bolt, answers=answers), [0, 1, 2], [3])
    assert bolt.paid == ([[0], [1], [2], [3]] if most == 1 else [[0, 1, 2], [3]])
    reasons = failed(results)
    for reason in reasons.values():
        assert (reason.final, reason.message[: len(says)]) == (True, says)
    alone = most == 1 or kind in ("stream", "columns", "no row", "value")
    assert list(reasons) == ([0] if alone else [0, 1, 2])
    passed = [row for row in emitted(results) if row[1][0] not in reasons]
    assert passed == [(n, [n]) for n in range(4) if n not in reasons]


def test_a_limit_by_a_field_that_tuples_lack_is_refused_when_the_topology_is_built(make):
    builder = TopologyBuilder()
    builder.spout("s", make.frame("tenant"))
    builder.bolt("b", Asyncly(nothing, limit=RateLimit(per="tenants"))).shuffle("s")
    says = "limit of bolt 'b' has the key 'tenants', which .* does not have; did you mean 'tenant'"
    with pytest.raises(ValueError, match=says):
        builder.build()


def test_settings_that_the_driver_gave_a_class_of_a_module_are_those_of_its_tasks(
    tmp_path, monkeypatch
):
    """A task imports the class again, with the limit of the file."""
    (tmp_path / "paid_module.py").write_text(
        "import pyarrow as pa\n"
        "from ackcore.calls import RateLimit\n"
        "from ackcore.topology import AsyncBolt\n"
        "class Price(AsyncBolt):\n"
        "    outputs = pa.schema([('v', pa.int64())])\n"
        "    limit = RateLimit(calls_per_s=1000)\n"
        "    timeout_s = 30\n"
        "    async def execute(self, tuple, collector):\n"
        "        collector.emit(tuple.values)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    paid = importlib.import_module("paid_module")
    paid.Price.limit = RateLimit(calls_per_s=5)
    paid.Price.timeout_s = None
    builder = TopologyBuilder()
    builder.spout("src", Source(paid.Price.outputs))
    builder.bolt("price", paid.Price()).shuffle("src")
    builder.sink("price", print)
    cloudpickle = pytest.importorskip("pyspark.cloudpickle")
    data = cloudpickle.dumps(builder.build().bolts["price"].component)
    importlib.reload(paid)
    assert paid.Price.limit.calls_per_s == 1000
    settings = call_settings(pickle.loads(data))
    assert (settings.limit.calls_per_s, settings.timeout_s) == (5, None)
