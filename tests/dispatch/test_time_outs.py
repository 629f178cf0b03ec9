"""Calls that hang or answer late: each record is decided once, and by what is true of it."""

import asyncio
import threading
from collections import Counter
from contextlib import suppress

import pytest
from round_robin import RoundRobin
from scripted import Clock, GoingClock, dispatched, one, turns
from separately import run_python

from ackcore.dispatch import Dispatcher, Function
from ackcore.flow import Fixed


def test_a_call_that_hangs_times_out_and_another_does_it():
    done, cancelled = [], []

    async def hangs(record):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(record)
            raise

    async def works(record):
        done.append(record)

    counts = Dispatcher(range(20), {"a": hangs, "b": works}, timeout_s=0.05, limit=one).run()
    assert sorted(done) == list(range(20))
    assert counts.timed_out == len(cancelled) > 0
    assert counts.committed == 20


def test_an_answer_that_comes_after_its_tree_timed_out_counts():
    """The loop was held up for longer than that; nothing would send the record again."""
    clock = Clock()

    async def call(record):
        clock.ns += 10**10

    counts = Dispatcher(range(5), {"a": call}, clock=clock, timeout_s=1, limit=one).run()
    assert (counts.read, counts.acked + counts.dead, counts.committed) == (5, 5, 5)


def test_what_timed_out_with_another_is_not_acked_and_dead():
    """Both time out at once; the first is being kept when the second's consumer answers."""
    clock, done, dead = Clock(), [], []
    answer = asyncio.Event()

    async def call(record):
        clock.ns += 10**9
        await answer.wait()
        done.append(record)

    async def keep(position, record, error):
        answer.set()
        await turns(50)
        dead.append(record)

    settings = {"clock": clock, "timeout_s": 0.5, "max_attempts": 1}
    counts = Dispatcher(range(2), {"a": call}, dead_letters=keep, **settings).run()
    assert (counts.dead, counts.acked, sorted(dead), done) == (2, 0, [0, 1], [])


def test_what_was_given_up_is_not_acked_by_its_late_answer():
    """It answers although it was cancelled, while the record is being kept."""
    clock, dead = Clock(), []

    async def stubborn(record):
        clock.ns += 10**9
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def keep(position, record, error):
        await turns(50)
        dead.append(record)

    settings = {"clock": clock, "timeout_s": 0.5, "max_attempts": 1}
    counts = Dispatcher([7], {"a": stubborn}, dead_letters=keep, **settings).run()
    assert (counts.dead, counts.acked, counts.committed, dead) == (1, 0, 1, [7])


@pytest.mark.parametrize("sent_again", [False, True])
def test_a_late_answer_counts_until_its_record_is_sent_again(sent_again):
    """It comes while the record waits; or while another consumer has it, and fails it for good."""
    clock, sent, acked = GoingClock(), asyncio.Event(), []

    async def stubborn(record):
        clock.ns += 10**9
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        if sent_again:
            await sent.wait()

    async def fails(record):
        sent.set()
        await turns(50)
        raise ValueError("no")

    counts = Dispatcher(
        [7],
        {"a": stubborn, "b": fails},
        clock=clock,
        chooser=RoundRobin(),
        backoff_s=0.001 if sent_again else 200.0,
        timeout_s=0.5,
        max_attempts=2,
        acked=lambda position, record: acked.append(record),
        dead_letters=lambda position, record, error: None,
    ).run()
    assert (counts.dead, acked, counts.timed_out) == ((1, [], 1) if sent_again else (0, [7], 1))


def test_a_call_that_goes_on_when_it_timed_out_decides_nothing():
    """Its record was split off, re-sent or kept since; it counts once."""
    clock = GoingClock()

    async def stubborn(record):
        clock.ns += 10**9
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("late") from None

    async def works(record):
        pass

    settings = {"clock": clock, "timeout_s": 0.5, "max_attempts": 2, "backoff_s": 0.001}
    counts = Dispatcher(range(4), {"a": stubborn, "b": works}, limit=one, **settings).run()
    assert (counts.acked, counts.failed, counts.committed) == (4, 0, 4)


def test_a_thread_that_hangs_is_replaced_and_what_waits_behind_it_is_no_attempt():
    forever, called = threading.Event(), []

    def call(record):
        called.append(record)
        if record == 0:
            forever.wait()

    counts, dead = dispatched(
        range(30), {"a": Function(call)}, limit=lambda: Fixed(10), timeout_s=0.1, max_attempts=2
    )
    forever.set()
    assert {record: type(why) for record, why in dead.items()} == {0: TimeoutError}
    assert str(dead[0]).startswith("consumer 'a' did not answer in timeout_s=0.1; raise timeout_s")
    assert (counts.acked, counts.timed_out) == (29, 2)
    assert counts.unavailable > 0
    assert Counter(called) == {0: 2, **dict.fromkeys(range(1, 30), 1)}


def test_the_time_of_a_call_runs_from_when_it_begins():
    """One that had to wait for a thread has all of its time."""
    clock, gate = Clock(), threading.Semaphore(0)

    def call(record):
        gate.acquire()
        clock.ns += 9 * 10**8

    async def main():
        dispatcher = Dispatcher(
            range(3), {"a": Function(call)}, limit=lambda: Fixed(3), clock=clock, timeout_s=1
        )
        run = asyncio.ensure_future(dispatcher.run_async())
        for n in range(3):
            gate.release()
            while dispatcher.counts().acked <= n:
                await asyncio.sleep(0)
        return await run

    counts = asyncio.run(asyncio.wait_for(main(), 60))
    assert (counts.acked, counts.attempts, counts.timed_out) == (3, 3, 0)


HANGS = """
import threading
from ackcore.dispatch import Dispatcher
def hangs(record):
    threading.Event().wait()
counts = Dispatcher(
    [1], {"a": hangs}, timeout_s=0.05, max_attempts=1, dead_letters=lambda *what: None
).run()
print(counts.dead)
"""


def test_a_function_that_hangs_does_not_keep_the_interpreter():
    assert run_python(HANGS, timeout_s=60) == "1\n"
