"""Consumers in processes: they die, hang and are killed, and no record is lost of it."""

import asyncio
import os
import re
import signal
from types import SimpleNamespace

import pytest
from in_processes import (
    NeverLoaded,
    NotLoaded,
    die_or_return,
    effects,
    raise_or_return,
    raise_own,
    write,
    write_or_die,
    write_or_hang,
)
from scripted import dispatched

from ackcore.calls import Reject, Unavailable
from ackcore.dispatch import Dispatcher, Process, processes
from ackcore.dispatch.processes import ProcessDied


def fork(function, *args):
    return Process(function, *args, context="fork")


def outcomes(process, *items):
    """Call a process with each item. Return what it returns, or raises."""

    async def main():
        await process.start()
        try:
            for item in items:
                async with asyncio.timeout(60):
                    found.extend(await asyncio.gather(process.call(item), return_exceptions=True))
        finally:
            await process.close()

    found = []
    asyncio.run(main())
    return found


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_processes_do_the_work(tmp_path, context):
    consumers = {n: Process(write, str(tmp_path), context=context) for n in range(2)}
    # An interpreter that is begun anew may take long on a busy or emulated machine.
    counts = Dispatcher(range(100), consumers, timeout_s=600).run()
    assert sorted(effects(tmp_path)) == list(range(100))
    assert counts.acked == counts.attempts == 100
    assert len(list(tmp_path.glob("*.effects"))) == 2
    assert all(each.pid is None or not each._process.is_alive() for each in consumers.values())
    with pytest.raises(RuntimeError, match="was closed at the end of a run; create one for each"):
        Dispatcher(range(100), consumers).run()


def test_a_process_is_used_by_one_dispatcher(tmp_path):
    """The first end would close it, and all records of the other one would be dead."""
    shared = fork(write, str(tmp_path))

    async def both():
        twice = Dispatcher(range(100, 110), {"a": shared, "b": shared})
        runs = Dispatcher(range(50), {"a": shared}), Dispatcher(range(50, 60), {"a": shared}), twice
        return await asyncio.gather(*(one.run_async() for one in runs), return_exceptions=True)

    counts, *refused = asyncio.run(both())
    assert (counts.acked, counts.attempts) == (50, 50)
    assert sorted(effects(tmp_path)) == list(range(50))
    for error in refused:
        assert "this Process is in use already; create one for each" in str(error)


def test_consumers_of_one_dispatcher_share_a_process(tmp_path):
    shared = fork(write, str(tmp_path))
    counts = Dispatcher(range(20), {"a": shared, "b": shared}).run()
    assert (counts.acked, counts.attempts, shared.starts) == (20, 20, 1)
    assert sorted(effects(tmp_path)) == list(range(20))
    assert not shared._process.is_alive()


def test_a_process_that_is_closed_while_it_starts_is_killed(tmp_path):
    process = fork(write, str(tmp_path))

    async def main():
        with processes._STARTS:
            starting = asyncio.create_task(process.start())
            while not process._pool._threads or process._pool._work_queue.qsize():
                await asyncio.sleep(0)  # until its thread waits for the lock
            await process.close()
        await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 60))
    process._process.join(60)
    assert process._process.exitcode == -signal.SIGKILL


def test_a_record_that_kills_its_process_dies_alone(tmp_path):
    consumers = {n: fork(write_or_die, str(tmp_path), {13, 57}) for n in range(2)}
    counts, dead = dispatched(range(80), consumers, max_attempts=2)
    assert {record: type(why) for record, why in dead.items()} == {13: ProcessDied, 57: ProcessDied}
    assert sorted(effects(tmp_path)) == [n for n in range(80) if n not in (13, 57)]
    # Begun again with the next call, if there is one.
    assert 4 <= sum(each.starts for each in consumers.values()) <= 6
    assert (counts.acked, counts.failed) == (78, 4)


def test_one_that_dies_is_seen_though_its_pipe_stays_open(tmp_path):
    """Another process was forked at the same time, and holds a copy of the pipe."""
    process = fork(write_or_die, str(tmp_path), {1})
    pipe, copies = process._context.Pipe, []

    def copied():
        ours, theirs = pipe()
        copies.append(os.dup(theirs.fileno()))
        return ours, theirs

    process._context = SimpleNamespace(Pipe=copied, Process=process._context.Process)
    died, _ = outcomes(process, 1, 2)
    for copy in copies:
        os.close(copy)
    assert (type(died), effects(tmp_path)) == (ProcessDied, [2])
    assert "ended with exit code -9" in str(died)
    assert process.starts == 2


def test_a_process_that_hangs_is_killed_and_the_record_done_elsewhere(tmp_path):
    consumers = {n: fork(write_or_hang, str(tmp_path), {5, 6}) for n in range(2)}
    counts = Dispatcher(range(40), consumers, timeout_s=0.5).run()
    assert set(effects(tmp_path)) == set(range(40))
    assert counts.timed_out >= 1
    assert counts.committed == 40


def test_a_process_that_ends_before_it_is_ready_costs_no_record(tmp_path):
    """For instance, a main module without a guard: its import starts the process again."""
    mark, dead = tmp_path / "mark", []
    mark.touch()
    process = Process(die_or_return, NotLoaded(str(mark)))
    dispatcher = Dispatcher([1], {"a": process}, dead_letters=lambda *record: dead.append(record))
    with pytest.raises(RuntimeError, match="ended with exit code 3 before it was ready"):
        dispatcher.run()
    assert (dead, dispatcher.counts().attempts) == ([], 0)


def test_a_process_whose_start_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr(processes, "_READY_S", 0.1)
    process = Process(die_or_return, NeverLoaded())
    dispatcher = Dispatcher([1], {"a": process, "b": print})
    with pytest.raises(RuntimeError, match=r"was not ready for a record in 0.1 s, and was killed"):
        dispatcher.run()
    assert process._process.exitcode == -signal.SIGKILL
    assert dispatcher.counts().attempts == 0


def test_a_process_that_cannot_be_started_again_is_unavailable(tmp_path):
    mark = tmp_path / "mark"

    async def main():
        process = Process(die_or_return, NotLoaded(str(mark)))
        await process.start()
        with pytest.raises(ProcessDied):
            await process.call("die")
        mark.touch()
        with pytest.raises(Unavailable, match=r"no process could be started: process \d+ ended"):
            await process.call("one")
        mark.unlink()
        assert await process.call("one") == "one"
        await process.close()

    asyncio.run(main())


def test_what_a_process_raises_comes_back():
    process = fork(raise_or_return)
    bad, unsendable, good = outcomes(process, "bad", "unsendable", "good")
    assert (type(bad), str(bad)) == (ValueError, "bad record")
    assert isinstance(unsendable, RuntimeError)
    assert re.search(r"lock.*not sent: cannot pickle", str(unsendable))
    assert (good, process.starts) == (None, 1)


def test_a_function_that_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match=r"must be pickled to be sent.*top of a module"):
        Process(lambda record: None)


@pytest.mark.parametrize(
    ("kind", "expected", "text", "asked_s"),
    [
        ("reject", Reject, "BadOrder: order 7: 8", None),
        ("one", Reject, "OneOrder: order 7", None),
        ("unavailable", Unavailable, "Away: 7:8 (again after 3 s)", 3),
        ("other", RuntimeError, "Plain: order 7: 8", None),
        ("panic", RuntimeError, "Panic: out of bounds", None),
    ],
)
def test_an_error_that_cannot_be_rebuilt_keeps_its_kind_and_text(kind, expected, text, asked_s):
    (raised,) = outcomes(fork(raise_own), kind)
    assert isinstance(raised, expected)
    assert (str(raised), getattr(raised, "asked_s", None)) == (text, asked_s)
