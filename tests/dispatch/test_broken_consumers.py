"""Records that failed wait, and consumers that fail again and again are left alone."""

import asyncio
import logging
from collections import Counter

import pytest
from round_robin import RoundRobin
from scripted import Clock, TickingClock, dispatched, one

from ackcore.calls import Retry, Unavailable
from ackcore.dispatch import Dispatcher, RecordDead
from ackcore.flow import ByKey, Fixed, FlowController
from ackcore.flow.choosers import Idlest


@pytest.mark.parametrize(("chooser", "max_attempts"), [(Idlest, 3), (RoundRobin, 5)])
def test_consumers_that_fail_at_once_kill_nothing_that_a_slow_one_takes(chooser, max_attempts):
    clock, calls = TickingClock(1), Counter()

    async def good(record):
        until = clock.ns + 50 * 10**6
        while clock() < until:
            await asyncio.sleep(0)

    async def bad(record):
        calls["bad"] += 1
        raise OSError("reset by peer")

    counts, dead = dispatched(
        range(300),
        {"a": bad, "b": bad, "c": good},
        chooser=chooser(),
        max_attempts=max_attempts,
        backoff_s=1.0,
        breaker_reset_s=1,
        clock=clock,
    )
    assert (dead, counts.acked, counts.committed) == ({}, 300, 300)
    # Ten each to begin with, and one a second.
    assert calls["bad"] < 30 + 2 * clock.ns / 10**9


def test_only_the_failures_that_open_a_breaker_count_while_another_consumer_works():
    """Neither those of calls that were out then, nor those of trials."""
    calls = Counter()

    async def good(record):
        for _ in range(20):
            await asyncio.sleep(0)

    async def bad(record):
        calls["bad"] += 1
        await asyncio.sleep(0)
        raise OSError("away")

    counts, dead = dispatched(
        range(1000),
        {"a": bad, "b": good},
        limit=lambda: Fixed(20),
        max_attempts=1,
        breaker_failures=3,
    )
    assert (len(dead), counts.acked) == (3, 997)
    assert calls["bad"] > 20


def test_an_outage_of_all_consumers_for_a_second_kills_nothing():
    clock, calls = TickingClock(5), Counter()

    async def call(record):
        calls[record] += 1
        if clock() < 10**9:
            raise OSError("away")

    counts, dead = dispatched(
        range(2000), dict.fromkeys("abc", call), backoff_s=1.0, breaker_reset_s=1, clock=clock
    )
    assert (dead, counts.acked) == ({}, 2000)
    assert counts.failed < 100


def test_with_all_consumers_broken_new_records_are_tried_first_and_all_die_in_the_end(caplog):
    order = []

    async def call(record):
        order.append(record)
        raise ValueError("broken")

    with caplog.at_level(logging.WARNING, "ackcore"):
        counts, dead = dispatched(
            range(12), {"a": call, "b": call}, breaker_failures=2, max_attempts=3
        )
    assert (sorted(dead), counts.acked, counts.committed) == (list(range(12)), 0, 12)
    assert order.index(11) < 20  # no record had a third attempt before all had their first
    assert min(Counter(order).values()) == 3
    assert "consumer 'a' of a Dispatcher failed repeatedly, the last time with Value" in caplog.text
    with pytest.raises(RecordDead, match="failed 3 times, the last time with ValueError: broken"):
        Dispatcher([1], {"a": call}, max_attempts=3, backoff_s=0.001).run()


def test_bad_records_in_a_row_hold_up_the_others_for_one_trial_only():
    order = []

    async def call(record):
        order.append(record)
        if record < 10:
            raise ValueError("bad record")

    counts, dead = dispatched(
        range(100), {"a": call}, limit=one, max_attempts=2, backoff_s=0.1, breaker_reset_s=0.1
    )
    assert (sorted(dead), counts.acked) == (list(range(10)), 90)
    assert order.index(10) < 18  # not after two attempts at each that is bad


@pytest.mark.parametrize("chooser", [Idlest, RoundRobin])
def test_a_record_that_fails_everywhere_goes_round(chooser):
    went = []

    def consumer(name):
        async def call(record):
            if record == 0:
                went.append(name)
                raise ValueError("bad record")

        return call

    _, dead = dispatched(
        range(20), {name: consumer(name) for name in "abc"}, chooser=chooser(), max_attempts=6
    )
    assert [*dead] == [0]
    assert sorted(went[:3]) == list("abc")
    assert went[3:] == went[:3]


def test_a_consumer_may_ask_for_a_longer_wait_of_a_record():
    clock, calls = Clock(), []

    async def call(record):
        calls.append((record, clock.ns))
        clock.ns += 10**8
        if record == 0 and len(calls) == 1:
            raise Retry("later", after_s=5)

    counts, dead = dispatched(range(100), {"a": call}, clock=clock)
    assert (dead, counts.acked, counts.failed) == ({}, 100, 1)
    assert next(at for record, at in calls[1:] if record == 0) >= 5 * 10**9


def test_the_order_of_a_key_is_kept_through_waits_and_broken_consumers():
    order = {key: [] for key in range(7)}
    failures = Counter()

    async def works(record):
        await asyncio.sleep(0)
        if record % 11 == 0 and failures[record] < 2:
            failures[record] += 1
            raise ValueError("twice")
        order[record % 7].append(record)

    async def broken(record):
        raise OSError("away")

    counts, dead = dispatched(
        range(300),
        {"a": works, "b": broken, "c": works},
        key=lambda record: record % 7,
        chooser=ByKey(),
    )
    assert (dead, counts.acked) == ({}, 300)
    for key, records in order.items():
        assert records == list(range(key, 300, 7))


def test_the_keys_of_a_broken_consumer_go_to_others():
    """Else they would have one record in each trial's time."""
    clock, calls = TickingClock(1), Counter()

    async def works(record):
        pass

    async def broken(record):
        calls["broken"] += 1
        raise OSError("away")

    counts, dead = dispatched(
        range(500),
        {"a": works, "b": broken},
        key=lambda record: record % 50,
        chooser=ByKey(),
        backoff_s=0.01,
        breaker_reset_s=10,
        clock=clock,
    )
    assert (dead, counts.acked) == ({}, 500)
    assert calls["broken"] < 15


@pytest.mark.parametrize("ends_by", ["stop", "cancel"])
def test_a_run_that_ends_while_a_record_waits(tmp_path, ends_by):
    """Stopped, it waits for it; cancelled, it leaves it to the next run."""
    clock, done = Clock(), []

    async def main():
        async def call(record):
            if record == 3 and not clock.ns:
                raise ValueError("once")
            done.append(record)
            if len(done) == 9:
                if ends_by == "cancel":
                    run.cancel()
                dispatcher.stop()
                clock.ns += 10**12

        dispatcher = Dispatcher(range(10), {"a": call}, checkpoint=tmp_path / "c", clock=clock)
        run = asyncio.ensure_future(dispatcher.run_async())
        return await run

    if ends_by == "stop":
        assert asyncio.run(main()).committed == 10
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(main())
        assert b'"committed": 3' in (tmp_path / "c").read_bytes()
    assert sorted(done) == sorted(set(range(10)) - ({3} if ends_by == "cancel" else set()))


def test_a_batch_that_all_consumers_name_is_a_failure_of_theirs():
    """A consumer that names each record of each batch at once must not get them all."""
    calls = Counter()

    async def names_all(records):
        calls["bad"] += 1
        return [True] * len(records)

    async def works(records):
        for _ in range(20):
            await asyncio.sleep(0)

    counts, dead = dispatched(
        range(600), {"a": names_all, "b": works}, batch=3, max_attempts=2, breaker_reset_s=60
    )
    assert (dead, counts.acked, calls["bad"]) == ({}, 600, 10)


@pytest.mark.parametrize("works", [True, False])
def test_a_pause_that_a_consumer_asks_for_outlasts_a_trial_that_is_under_way(works):
    clock = TickingClock(200)
    tried, refused = asyncio.Event(), asyncio.Event()
    calls = []

    async def call(record):
        calls.append((record, clock.ns / 1e9))
        if len(calls) == 1:
            await tried.wait()
            refused.set()
            raise Unavailable("not now", after_s=60)
        if len(calls) == 2:
            raise OSError("the breaker opens")
        if len(calls) == 3:
            tried.set()
            await refused.wait()
            if not works:
                raise OSError("the trial fails")

    settings = {"breaker_failures": 1, "breaker_reset_s": 1, "clock": clock}
    counts, _ = dispatched(range(4), {"a": call}, limit=lambda: Fixed(2), timeout_s=500, **settings)
    assert counts.acked == 4
    (_, trial_s), (_, next_s) = calls[2:4]
    assert next_s - trial_s >= 60


def test_keys_of_a_broken_consumer_go_to_others_though_it_asks_for_a_pause():
    clock, refused = TickingClock(50), asyncio.Event()
    broken, done = asyncio.Event(), []
    flow = FlowController(["a", "b"], chooser=ByKey(), limit=one)
    of_a = []  # keys
    for key in range(99):
        lease = flow.try_acquire(key=key)
        flow.ack(lease)
        if lease.name == "a":
            of_a.append(key)

    async def source(start):
        yield of_a[0]
        yield of_a[1]
        await refused.wait()
        yield of_a[2]

    async def a(record):
        if record == of_a[0]:
            await broken.wait()
            refused.set()
            raise Unavailable("not now", after_s=60)
        raise OSError("the breaker opens")

    async def b(record):
        broken.set()
        done.append((record, clock.ns / 1e9))

    settings = {"chooser": ByKey(), "key": int, "breaker_failures": 1, "breaker_reset_s": 60}
    counts, _ = dispatched(
        source, {"a": a, "b": b}, limit=lambda: Fixed(2), timeout_s=500, clock=clock, **settings
    )
    assert counts.acked == 3
    assert dict(done)[of_a[2]] < 60
