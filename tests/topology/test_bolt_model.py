"""Bolts against a model of what their calls mean; threads, signals, the garbage collector."""

import gc
import queue
import signal
import threading
import time

from acting import OUT, TWO, Basically, Doing, batch_of, emitted, failed, raising, run, whys
from hypothesis import given
from hypothesis import strategies as st

from ackcore.topology import row_executor
from ackcore.topology.components import Bolt
from ackcore.topology.executors import executor_for

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
    """Compute the outcome of a script after SEMANTICS, by the plainest means."""

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
    results, known, size = [], set(), row_executor.SLICE_ROWS
    row_executor.SLICE_ROWS = slice_rows
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
        row_executor.SLICE_ROWS = size
    raised = handle and model.play(at_end, handle - 1, lambda one: one % handle)
    model.end_slice()
    for one in list(model.state):
        if model.state[one] == "open":
            model.fail(one, raised or "not acked")
    assert results[-1].open == 0
    assert {h: short(r) for h, r in failed(results).items()} == model.failures
    for stream in TWO:
        assert emitted(results, stream) == model.rows[stream]
    assert executor.collector.ignored == model.ignored


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
            elif n % 5 != 2:  # and these stay open
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
        bolt.collector.ack(b)  # which is taken back: no result had it yet
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
        results = run(executor_for("b", Doing(execute)), range(100))
    finally:
        gc.enable()
        signal.signal(signal.SIGALRM, before)
    assert {reason.type for reason in failed(results).values()} == {"TimesOut"}
    assert sorted(failed(results)) == list(range(100))
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
