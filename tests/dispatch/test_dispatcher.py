"""Each record comes to its end, whatever fails; the committed position moves over nothing else."""

import asyncio
import math
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
from in_processes import Panic
from round_robin import RoundRobin
from scripted import Clock, coroutine, dispatched, failing, one

from ackcore.calls import Reject, Unavailable
from ackcore.dispatch import Dispatcher, Function, Process, RecordDead, Target, dispatcher
from ackcore.flow import ByKey, Fixed


def test_functions_coroutines_and_targets_share_the_records():
    done = []

    class Mine(Target):
        started = closed = 0

        async def start(self):
            self.started += 1

        async def call(self, item):
            done.append(item)

        async def close(self):
            self.closed += 1

    async def coroutine(record):
        await asyncio.sleep(0)
        done.append(record)

    mine = Mine()
    counts = Dispatcher(range(300), {"f": done.append, "c": coroutine, "m": mine}).run()
    assert sorted(done) == list(range(300))
    assert (counts.read, counts.acked, counts.committed, counts.attempts) == (300, 300, 300, 300)
    assert all(state.acked for state in counts.consumers)
    assert (mine.started, mine.closed) == (1, 1)


@pytest.mark.parametrize("batch", [1, 7])
def test_what_fails_is_sent_again(batch):
    done = []
    one = failing(dict.fromkeys(range(0, 100, 9), 3), done)

    async def many(records):
        failed = np.zeros(len(records), bool)
        for i, record in enumerate(records):
            try:
                await one(record)
            except ValueError:
                failed[i] = True
        return failed if failed.any() else None

    call = one if batch == 1 else many
    counts = Dispatcher(range(100), {"a": call, "b": call}, batch=batch).run()
    assert sorted(done) == list(range(100))  # none twice: only those are sent again
    assert (counts.acked, counts.failed, counts.attempts) == (100, 36, 136)
    assert counts.committed == 100


def test_a_bitmap_that_names_none_is_an_ack():
    async def call(records):
        return np.zeros(len(records), bool)

    counts = Dispatcher(range(20), {"a": call}, batch=5).run()
    assert (counts.acked, counts.failed, counts.attempts) == (20, 0, 20)


def test_a_record_that_fails_for_the_last_time_is_dead():
    done = []
    counts, dead = dispatched(range(10), {"a": failing({5: 9, 7: 2}, done)}, max_attempts=3)
    assert {record: str(error) for record, error in dead.items()} == {5: "record 5"}
    assert sorted(done) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert (counts.read, counts.acked, counts.committed) == (10, 9, 10)


async def rejects(record):
    raise Reject("never")


@pytest.mark.parametrize("max_ahead", [1, 100])
def test_a_run_ends_when_the_dead_were_kept(max_ahead, monkeypatch):
    monkeypatch.setattr(dispatcher, "_MAX_AHEAD", max_ahead)
    dead = []

    async def keep(position, record, error):
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.1  # several looks at what there is to do
        while loop.time() < until:
            await asyncio.sleep(0)
        dead.append(record)

    signal.alarm(30)  # without a turn of the loop nothing else would end it
    try:
        counts = Dispatcher(range(5), {"a": rejects}, dead_letters=keep).run()
    finally:
        signal.alarm(0)
    assert sorted(dead) == list(range(5))
    assert (counts.read, counts.dead, counts.committed) == (5, 5, 5)


@pytest.mark.parametrize("batch", [1, 2])
def test_a_coroutine_that_nobody_awaits_does_no_record(batch):
    called = []

    async def send(record):
        called.append(record)

    def forgets(record):
        coroutine = send(record)
        coroutine.close()  # without a warning of Python's
        return coroutine

    counts, dead = dispatched(range(2), {"a": forgets}, max_attempts=1, batch=batch)
    assert (counts.acked, counts.dead, called) == (0, 2, [])
    assert "returned a coroutine, which has not run; declare its function with" in str(dead[0])
    _, dead = dispatched([0], {"a": lambda record: (yield)}, max_attempts=1, batch=batch)
    assert "returned a generator, which has not run; write its function without" in str(dead[0])
    for kind in (Function, Process):
        with pytest.raises(TypeError, match="must not be a coroutine function"):
            kind(coroutine)


@pytest.mark.parametrize("method", ["start", "call", "call_in_turn", "close"])
def test_a_target_whose_method_is_not_awaitable_ends_the_run(method):
    """It would fail each record after it ran. The end of `close` is ignored, as are its errors."""
    called, closed, dead = [], [], []

    class Plain(Target):
        def call(self, item):  # plain, but what it returns is awaitable
            return asyncio.sleep(0)

    class Other(Plain):
        def call(self, item):
            raise Unavailable

        async def close(self):
            closed.append(self)

    setattr(Plain, method, lambda self, *arguments: called.append(arguments))
    Other.start, Other.call_in_turn = Target.start, Target.call_in_turn
    dispatcher = Dispatcher(
        [1, 2],
        {"plain": Plain(), "other": Other()},
        dead_letters=lambda *letter: dead.append(letter),
        max_pending=1,
    )
    if method == "close":
        assert dispatcher.run().acked == 2
    else:
        with pytest.raises(TypeError, match=rf"Plain\.{method} must be awaitable, and it returned"):
            dispatcher.run()
        assert (dispatcher.counts().acked, dispatcher.counts().committed) == (0, 0)
    assert (len(called), dead, len(closed)) == (1, [], 1)


@pytest.mark.parametrize("fails", [True, False])
def test_a_limit_that_allows_no_record_ends_the_run(fails):
    class Shut(Fixed):
        def on_sample(self, rtt_ns, in_flight, dropped):
            self.limit = 0

    consumers = {"a": rejects if fails else lambda record: None}
    dispatcher = Dispatcher(
        range(9), consumers, limit=lambda: Shut(1), dead_letters=lambda *letter: None
    )
    with pytest.raises(ValueError, match=r"Shut\.limit must be a number of at least 1, got 0"):
        dispatcher.run()
    assert dispatcher.counts().attempts == 1


async def never_awaited(*arguments):
    raise AssertionError("nobody awaits this")


def never_iterated(*arguments):
    yield


@pytest.mark.parametrize("lazy", [never_awaited, partial(never_iterated, 1)])
@pytest.mark.parametrize("name", ["key", "acked"])
def test_a_function_whose_call_runs_nothing_is_refused(name, lazy):
    with pytest.raises(TypeError, match=f"{name} must be a plain function, got .*'async' or"):
        Dispatcher([1], {"a": print}, **{name: lazy})


@pytest.mark.parametrize(
    "arguments",
    [
        {"acked": lambda *given: never_awaited(*given)},
        {"consumers": {"a": rejects}, "dead_letters": never_iterated},
    ],
)
def test_a_report_that_has_not_run_ends_the_run(arguments):
    dispatcher = Dispatcher([1], **{"consumers": {"a": lambda record: None}, **arguments})
    with pytest.raises(TypeError, match=r"returned a (coroutine|generator), which has not run"):
        dispatcher.run()
    assert dispatcher.counts().dead == 0


def test_what_keeps_the_dead_ends_the_run_if_it_fails():
    async def keep(position, record, error):
        await asyncio.sleep(0)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        Dispatcher(range(3), {"a": rejects}, dead_letters=keep).run()


def test_a_consumer_that_takes_nothing_is_left_alone_and_burns_no_attempt():
    done, tried = [], []

    async def closed(record):
        tried.append(record)
        raise Unavailable("down")

    async def asks(record):
        tried.append(record)
        raise Unavailable("busy", after_s=3600)

    counts = Dispatcher(
        range(500), {"a": closed, "b": asks, "c": done.append}, max_attempts=1, limit=one
    ).run()
    assert sorted(done) == list(range(500))
    assert counts.unavailable == len(tried) < 20
    assert (counts.failed, counts.dead) == (0, 0)
    assert not next(each for each in counts.consumers if each.name == "b").is_open


def test_a_batch_that_fails_as_a_whole_is_taken_apart_before_its_last_attempt():
    done, sizes = [], Counter()

    async def call(records):
        sizes[len(records)] += 1
        if 13 in records:
            raise ValueError("13")
        done.extend(records)

    counts, dead = dispatched(range(40), {"a": call, "b": call}, batch=10, max_attempts=3)
    assert [*dead] == [13]
    assert sorted(done) == [n for n in range(40) if n != 13]
    assert sizes == {10: 5, 1: 10}
    assert counts.committed == 40


def test_a_batch_that_is_rejected_is_taken_apart_at_once():
    done = []

    async def call(records):
        if 3 in records:
            raise Reject("not for us")
        done.extend(records)

    _, dead = dispatched(range(6), {"a": call}, batch=6)
    assert ([*dead], sorted(done)) == ([3], [0, 1, 2, 4, 5])


def test_a_functions_errors_fail_its_record():
    def ends(record):
        raise StopIteration("no more")

    _, dead = dispatched([1], {"a": ends}, max_attempts=1)
    assert str(dead[1]) == "StopIteration: no more"


def test_in_a_running_loop_it_is_awaited():
    async def in_a_notebook():
        with pytest.raises(RuntimeError, match=r"running event loop.*await dispatcher\.run_async"):
            dispatcher.run()
        return await dispatcher.run_async()

    dispatcher = Dispatcher([1], {"a": print})
    assert asyncio.run(in_a_notebook()).acked == 1


def test_a_function_with_threads_is_used_by_one_dispatcher():
    """Its threads end with a run: records of another one would wait for a thread for ever."""
    both = threading.Barrier(2, timeout=60)
    shared = Function(lambda item: both.wait())

    async def at_once():
        running = asyncio.ensure_future(Dispatcher([1], {"a": shared}).run_async())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="this Function is in use already"):
            await Dispatcher([2], {"a": shared}).run_async()
        await asyncio.to_thread(both.wait)
        return await running

    assert asyncio.run(at_once()).acked == 1
    with pytest.raises(RuntimeError, match="this Function was closed at the end of a run"):
        Dispatcher([3], {"a": shared}).run()


def test_consumers_of_one_dispatcher_share_the_threads_of_a_function():
    both = threading.Barrier(2, timeout=60)
    shared = Function(lambda item: both.wait() and None, threads=2)
    assert Dispatcher(range(10), {"a": shared, "b": shared}).run().acked == 10


def test_it_runs_once():
    dispatcher = Dispatcher([], {"a": print})
    dispatcher.run()
    with pytest.raises(RuntimeError, match="has run before; create another"):
        dispatcher.run()


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"source": iter([1])}, TypeError, "source must be a sequence, or a callable"),
        ({"source": lambda start: 5}, TypeError, "source(0) must return an iterable, or an"),
        ({"consumers": print}, TypeError, "consumers must be a mapping from name to consumer"),
        ({"consumers": {}}, ValueError, "consumers must have at least one consumer"),
        ({"consumers": {"a": "http://x"}}, TypeError, "consumer 'a' must be callable or a Target"),
        ({"batch": 0}, ValueError, "batch"),
        ({"key": id, "batch": 2}, ValueError, "key cannot be combined with batch > 1"),
        (
            {"chooser": ByKey()},
            ValueError,
            "the chooser selects the consumer by the record's key: pass key=",
        ),
        ({"max_attempts": 0}, ValueError, "max_attempts"),
        ({"timeout_s": -1}, ValueError, "timeout_s must be above 0"),
        ({"unavailable_timeout_s": 1e10}, ValueError, "unavailable_timeout_s must be above 0"),
    ],
)
def test_bad_settings_are_named(arguments, error, says):
    with pytest.raises(error) as caught:
        Dispatcher(**{"source": [1], "consumers": {"a": print}, **arguments}).run()
    assert says in str(caught.value)


def test_retries_are_not_starved_by_new_records():
    """With always more to send, what failed goes first, once its back-off is over."""
    order, clock = [], Clock()

    async def call(record):
        order.append(record)
        clock.ns += 10**6
        if record == 0 and order.count(0) == 1:
            raise ValueError("once")

    Dispatcher(
        range(1000),
        {"a": call, "b": call},
        chooser=RoundRobin(),
        limit=lambda: Fixed(2),
        backoff_s=0.001,
        clock=clock,
    ).run()
    assert order.count(0) == 2
    assert len(order) - order[::-1].index(0) < 20


def test_a_source_that_keeps_count_itself_is_told_of_each_record_that_is_done_once():
    failed, acked = set(), []

    def sometimes(record):
        if record == 107:
            raise Reject("no")
        if record % 10 == 3 and record not in failed:
            failed.add(record)
            raise OSError("once")

    counts, dead = dispatched(
        range(100, 200),
        {"a": sometimes, "b": sometimes},
        acked=lambda position, record: acked.append((position, record)),
    )
    assert (counts.acked, [*dead]) == (99, [107])
    assert sorted(acked) == [(n, n + 100) for n in range(100) if n != 7]


@pytest.mark.parametrize("after_s", [0, -5, 0.001, math.nan, None])
def test_a_consumer_that_asks_for_no_time_is_left_alone_for_the_backoff(after_s):
    called = []

    async def worker(record):
        called.append(time.monotonic())
        if len(called) < 3:
            raise Unavailable("busy", after_s=after_s)

    counts = Dispatcher(["one"], {"a": worker}).run()
    assert (counts.acked, counts.unavailable, len(called)) == (1, 2, 3)
    assert called[2] - called[0] >= 0.29  # 100 and 200 ms


def test_a_record_that_no_consumer_takes_for_too_long_dies(caplog, monkeypatch):
    """Refusals are attempts once the time-out is over, by the clock that is given.

    From the second one on, they are logged once a minute.
    """
    monkeypatch.setattr(dispatcher, "_MANY_REFUSALS", 2)
    now_ns = 0

    async def worker(record):
        nonlocal now_ns
        now_ns += 40_000_000_000
        raise Unavailable("busy", after_s=0)

    counts, dead = dispatched(
        ["one"],
        {"a": worker},
        timeout_s=3600,
        clock=lambda: now_ns + time.monotonic_ns(),
        max_attempts=2,
        unavailable_timeout_s=60,
    )
    assert (counts.unavailable, counts.failed) == (2, 2)
    assert str(dead["one"]) == "busy (again after 0 s)"
    told = "consumer 'a' of a Dispatcher has refused {} calls in a row, the last one with busy"
    assert [told.format(n) in caplog.text for n in range(1, 5)] == [False, True, False, True]


@pytest.mark.parametrize("error", [SystemExit(3), Panic("!"), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_no_exception_fails_its_record_alone(error, is_async):
    def call(record):
        if record == 3:
            raise error

    async def call_async(record):
        call(record)

    counts, dead = dispatched(range(6), {"a": call_async if is_async else call}, max_attempts=2)
    assert {record: type(why) for record, why in dead.items()} == {3: type(error)}
    assert (counts.acked, counts.failed, counts.timed_out, counts.committed) == (5, 2, 0, 6)


@pytest.mark.parametrize(
    ("key", "kind"),
    [({}.__getitem__, KeyError), (lambda record: [record], TypeError), (sys.exit, SystemExit)],
)
def test_a_record_without_a_key_is_dead_alone(key, kind):
    called = []
    arguments = {
        "consumers": {"a": called.append},
        "key": lambda record: key(record) if record in (0, 3) else record % 2,
    }
    counts, dead = dispatched(range(6), chooser=ByKey(), **arguments)
    assert {record: type(why) for record, why in dead.items()} == {0: kind, 3: kind}
    assert sorted(called) == [1, 2, 4, 5]
    assert (counts.acked, counts.attempts, counts.committed) == (4, 4, 6)
    with pytest.raises(
        RecordDead, match=f"record 0 failed 1 time, the last time with {kind.__name__}"
    ):
        Dispatcher(range(6), chooser=ByKey(), **arguments).run()


@pytest.mark.parametrize("error", [Panic("!"), asyncio.CancelledError("!")])
@pytest.mark.parametrize("name", ["acked", "dead_letters"])
def test_what_is_no_exception_ends_a_run_where_an_error_does(error, name):
    async def call(record):
        if name == "dead_letters":
            raise Reject("never")

    def told(position, record, *why):
        raise error

    dispatcher = Dispatcher(range(6), {"a": call}, **{name: told})
    with pytest.raises(type(error), match="!"):
        dispatcher.run()
