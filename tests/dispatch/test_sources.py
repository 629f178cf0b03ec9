"""Sources of each kind: they end, idle, fail and are stopped, and all else goes on."""

import asyncio
import itertools

import pytest
from scripted import GoingClock, one, turns

from ackcore.calls import Reject
from ackcore.dispatch import Dispatcher
from ackcore.dispatch import dispatcher as dispatching
from ackcore.dispatch.checkpoint import Checkpoint
from ackcore.flow import Fixed


def idle_after(n):
    """A source that gives n records, and no more for ever."""

    async def source(start):
        for record in range(start, n):
            yield record
        await asyncio.Event().wait()

    return source


def test_sources_of_each_kind():
    async def later(start):
        for n in range(start, 10):
            await asyncio.sleep(0)
            yield n

    for source in (list(range(10)), lambda start: iter(range(start, 10)), later):
        done = []
        assert Dispatcher(source, {"a": done.append}).run().committed == 10
        assert sorted(done) == list(range(10))
    assert Dispatcher([], {"a": print}).run().read == 0


def test_while_an_asynchronous_source_is_idle_all_else_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(dispatching, "_COMMIT_S", 0.01)
    clock, done = GoingClock(), []

    async def call(record):
        if record == 0 and not clock.ns:
            clock.ns = 10**9
            await asyncio.Event().wait()
        done.append(record)

    async def main():
        dispatcher = Dispatcher(
            idle_after(2),
            {"a": call, "b": call},
            clock=clock,
            backoff_s=0.001,
            timeout_s=0.5,
            checkpoint=tmp_path / "rt",
        )
        run = asyncio.ensure_future(dispatcher.run_async())
        while not ((tmp_path / "rt").exists() and b'"committed": 2' in kept()):
            await asyncio.sleep(0)
        dispatcher.stop()
        return await run

    def kept():
        return (tmp_path / "rt").read_bytes()

    counts = asyncio.run(asyncio.wait_for(main(), 30))
    assert (sorted(done), counts.timed_out, counts.acked) == ([0, 1], 1, 2)


def test_a_batch_does_not_wait_for_an_idle_source():
    async def call(records):
        sizes.append(len(records))
        if sum(sizes) == 13:
            dispatcher.stop()

    sizes = []
    dispatcher = Dispatcher(idle_after(13), {"a": call}, batch=10)
    assert asyncio.run(asyncio.wait_for(dispatcher.run_async(), 30)).acked == 13
    assert sizes == [10, 3]


def test_an_error_of_the_source_or_of_the_dead_ends_the_run(tmp_path):
    def source(start):
        yield from range(start, 5)
        raise OSError("the log is gone")

    async def asynchronous(start):
        for record in source(start):
            yield record

    for each in (source, asynchronous):
        with pytest.raises(OSError, match="the log is gone") as gone:
            Dispatcher(each, {"a": print}, limit=one, checkpoint=tmp_path / "rt").run()
        # No "During handling of ... no running event loop".
        assert not isinstance(gone.value.__context__, RuntimeError)

    async def bad(record):
        raise Reject("x")

    def full(position, record, error):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        Dispatcher(range(3), {"a": bad}, dead_letters=full, checkpoint=tmp_path / "other").run()
    with Checkpoint(tmp_path / "other") as checkpoint:
        assert checkpoint.committed == 0


def test_stopped_in_between_it_ends_with_what_was_read():
    done = []

    async def call(record):
        done.append(record)
        if record == 20:
            dispatcher.stop()

    dispatcher = Dispatcher(itertools.count, {"a": call}, limit=one)
    counts = dispatcher.run()
    assert counts.read == counts.acked == counts.committed == len(done)
    assert counts.read in (21, 22)


def test_a_bound_limits_what_is_read_beyond_a_record_that_is_not_done(monkeypatch):
    monkeypatch.setattr(dispatching, "_MAX_AHEAD", 10)
    reads = []

    async def main():
        release = asyncio.Event()

        def source(start):
            for n in itertools.count(start):
                if n == 30:
                    return
                reads.append(n)
                yield n

        async def call(record):
            if record == 0:
                await release.wait()

        dispatcher = Dispatcher(source, {"a": call}, limit=lambda: Fixed(100))
        run = asyncio.ensure_future(dispatcher.run_async())
        await turns(100)
        assert reads == list(range(10))
        release.set()
        return await run

    assert asyncio.run(main()).committed == 30
