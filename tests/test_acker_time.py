"""How long the acker remembers, to the millisecond, and the thread that ticks; nothing sleeps."""

import contextlib
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_scripts import Clock, int32s, int64s
from separately import run_threads

from ackcore import Acker, Entries

T = 30_000  # milliseconds: the default time-out, and so the default period


def test_late_tick_catches_up_but_not_for_ever(make_acker):
    clock = Clock()
    acker = make_acker(clock=clock, timeout_s=1)
    acker.init(1, 1, 0)
    clock.now_ms = 2_500
    assert acker.tick() == 2
    assert 1 in acker
    clock.now_ms = 10**15
    assert acker.tick() == 3
    assert len(acker) == 0
    # The turns stay on their beat.
    clock.now_ms += 999
    assert acker.tick() == 0
    clock.now_ms += 1
    assert acker.tick() == 1


@given(
    st.integers(3, 6),
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 130), st.booleans()), max_size=30),
    st.integers(0, 10**6),
)
def test_expiry_is_exact_however_late_the_ticks(Ledger, buckets, put_after, looks, origin):
    """Put in [kP, (k+1)P), gone at (k+N)P: a life in ((N-1)P, NP] to the millisecond."""
    period = 100
    clock, left = Clock(origin), []
    acker = Acker(
        Ledger,
        timeout_s=0.1,
        buckets=buckets,
        clock=clock,
        on_expired=lambda entries: left.extend(entries),
    )
    clock.now_ms = origin + put_after
    acker.init(1, 1, 0)
    ends = origin + (put_after // period + buckets) * period
    assert (buckets - 1) * period < ends - clock.now_ms <= buckets * period
    for later, tick in looks:
        clock.now_ms += later
        if tick:
            acker.tick()
            assert [entry.root_id for entry in left] == [1] * (clock.now_ms >= ends)
        assert (1 in acker) == (clock.now_ms < ends)
        assert len(acker) == (clock.now_ms < ends)
    clock.now_ms = ends
    acker.tick()
    assert [entry.root_id for entry in left] == [1]


def test_what_left_waits_for_the_tick(make_acker):
    """Turns that messages made lose nothing of what on_expired is to get."""
    clock, left = Clock(), []
    acker = make_acker(clock=clock, on_expired=lambda entries: left.append(entries))
    acker.init(1, 1, 0)
    clock.now_ms = T
    acker.ack(2, 1)
    for clock.now_ms in range(2 * T, 9 * T, T):
        assert len(acker) == (clock.now_ms < 3 * T) + (clock.now_ms < 4 * T)
    assert left == []
    assert acker.tick() == 0
    [entries] = left
    assert isinstance(entries, Entries)
    assert [(entry.root_id, entry.task) for entry in sorted(entries)] == [(1, 0), (2, -1)]
    assert acker.tick() == 0
    assert len(left) == 1
    assert acker.stats.expired_untaken == 0


def test_without_on_expired_it_is_counted(make_acker):
    clock = Clock()
    acker = make_acker(clock=clock)
    acker.init_many(int64s([1, 2]), int64s([1, 1]), int32s([0, 0]))
    acker.ack_many(int64s([3, 4]), int64s([1, 1]))
    clock.now_ms = 4 * T
    acker.tick()
    clock.now_ms = 5 * T
    acker.tick()
    assert acker.stats.expired_untaken == 4
    assert acker.stats.orphans == 2


@pytest.mark.parametrize("arguments", [{}, {"timeout_s": 1}, {"buckets": 5, "period_s": 15}])
def test_acker_that_waits_longer_than_the_spout_is_made(make_acker, arguments):
    acker = make_acker(**arguments)
    assert (acker.buckets - 1) * acker._period_ms >= 2000 * arguments.get("timeout_s", 30)


@pytest.mark.parametrize(
    ("arguments", "way_out"),
    [
        ({"buckets": 2}, r"use buckets=3 or period_s=60.0"),
        ({"period_s": 29.999}, r"use buckets=4 or period_s=30.0"),
        ({"period_s": 10}, r"use buckets=7 or period_s=30.0"),
        ({"timeout_s": 1, "buckets": 4, "period_s": 0.1}, r"use buckets=21 or period_s=0.667"),
        ({"period_s": 0.1}, r"use period_s=30.0"),  # 601 buckets are too many
    ],
)
def test_acker_that_forgets_before_the_spout_is_refused(make_acker, arguments, way_out):
    """Heron's is such a pair, and fails trees that completed."""
    with pytest.raises(ValueError, match=way_out):
        make_acker(**arguments)
    for choice in way_out.removeprefix("use ").split(" or "):
        name, value = choice.split("=")
        make_acker(**{**arguments, name: int(value) if name == "buckets" else float(value)})


def test_periods_are_whole_milliseconds(make_acker):
    assert make_acker(timeout_s=2.007)._period_ms == 2007
    assert make_acker(timeout_s=0.0001)._period_ms == 1
    assert make_acker(timeout_s=1, period_s=1.0001)._period_ms == 1001
    assert make_acker(timeout_s=1, buckets=4, period_s=2 / 3)._period_ms == 667


# Threads.


class Waits:
    """A wait that lets simulated time pass, as often as a test allows, and then blocks."""

    def __init__(self, clock, times):
        self.clock, self.times, self.asked = clock, times, []
        self.used_up = threading.Event()

    def __call__(self, stopping, seconds):
        self.asked.append(seconds)
        if len(self.asked) > self.times:
            self.used_up.set()
            stopping.wait()
        else:
            self.clock.now_ms += round(seconds * 1000)


def test_thread_ticks_when_turns_are_due(make_acker):
    clock, left = Clock(), []
    waits = Waits(clock, times=3)
    acker = make_acker(clock=clock, wait=waits, on_expired=lambda entries: left.extend(entries))
    acker.init(1, 1, 0)
    clock.now_ms = 1_000
    with acker as entered:
        assert entered is acker
        assert waits.used_up.wait(timeout=60)
        assert [entry.root_id for entry in left] == [1]
    assert waits.asked == [29.0, 30.0, 30.0, 30.0]
    assert clock.now_ms == 3 * T


def test_thread_can_be_started_again_but_not_twice(make_acker):
    clock = Clock()
    acker = make_acker(clock=clock, wait=Waits(clock, times=0))
    acker.stop()  # nothing runs: nothing to do
    acker.start()
    with pytest.raises(RuntimeError, match="is already running"):
        acker.start()
    acker.stop()
    with acker:
        pass
    assert not running()


def running():
    return [each for each in threading.enumerate() if each.name == "ackcore-acker"]


def test_of_two_threads_that_start_it_one_is_refused(make_acker):
    class Slow(threading.Event):
        """Whoever is about to start waits here for another, if there can be one."""

        both = threading.Barrier(2)

        def clear(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                self.both.wait(timeout=0.2)
            super().clear()

    clock, refused = Clock(), []
    acker = make_acker(clock=clock, wait=Waits(clock, times=0))
    acker._stopping = Slow()

    def starting():
        try:
            acker.start()
        except RuntimeError as error:
            refused.append(error)

    run_threads(starting, starting)
    assert (len(refused), len(running())) == (1, 1)
    acker.stop()
    assert not running()


def test_stop_that_is_late_leaves_the_next_thread_alone(make_acker):
    clock = Clock()
    acker = make_acker(clock=clock, wait=Waits(clock, times=0))
    acker.start()
    first = acker._thread
    join = first.join

    def meanwhile():
        first.join = join
        acker.stop()
        acker.start()

    first.join = meanwhile
    acker.stop()
    with pytest.raises(RuntimeError, match="is already running"):
        acker.start()
    acker.stop()
    assert not running()


def test_real_wait_is_ended_by_stop(make_acker):
    """The default wait is the event's own: a stop ends a wait of 30 s at once."""
    acker, began = make_acker(), time.monotonic()
    acker.start()
    acker.stop()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_thread_goes_on_after_a_callback_raises_and_stop_raises_it(make_acker, caplog, kind):
    clock, left = Clock(), []
    waits = Waits(clock, times=4)

    def on_expired(entries):
        left.extend(entries)
        raise kind(f"callback {len(left)}")

    acker = make_acker(clock=clock, wait=waits, on_expired=on_expired)
    acker.init(1, 1, 0)
    clock.now_ms = T
    acker.init(2, 1, 0)
    acker.start()
    assert waits.used_up.wait(timeout=60)
    with pytest.raises(kind, match="callback 1"):
        acker.stop()
    assert [entry.root_id for entry in left] == [1, 2]
    assert caplog.messages == ["a callback of the acker raised; the acker's thread continues"] * 2
    acker.start()
    acker.stop()  # raised once


@pytest.mark.parametrize("broken", ["the clock", "the clock of a tick", "the wait"])
def test_thread_goes_on_after_its_clock_or_wait_raises(make_acker, caplog, broken):
    clock, left, errors = Clock(), [], []
    waits = Waits(clock, times=4)

    class Stopping(threading.Event):
        """The waits after an error take no time."""

        def wait(self, timeout=None):
            errors.append(timeout)
            return super().wait(None if timeout is None else 0.0)

    def fail(called, begin):
        def call(*arguments):
            if threading.current_thread().name == "ackcore-acker":
                call.calls += 1
                if begin <= call.calls < begin + 2:
                    raise OSError(f"call {call.calls}")
            return called(*arguments)

        call.calls = 0
        return call

    acker = make_acker(clock=clock, wait=waits, on_expired=lambda entries: left.extend(entries))
    acker._stopping = Stopping()
    acker.init(1, 1, 0)
    if broken == "the wait":
        acker._wait = fail(waits, 1)
    else:
        acker._clock = fail(clock, 1 if broken == "the clock" else 2)
    acker.start()
    assert waits.used_up.wait(timeout=60)
    assert [entry.root_id for entry in left] == [1]
    with pytest.raises(OSError, match=r"call [12]"):
        acker.stop()
    assert errors[:2] == [30.0, 30.0]
    assert caplog.messages == ["the acker's buckets did not turn; its thread tries again"]
    with acker:
        pass  # the error was raised once


def test_thread_that_its_callback_stopped_can_be_started_again(make_acker):
    clock = Clock()
    acker = make_acker(
        clock=clock, wait=Waits(clock, times=100), on_expired=lambda entries: acker.stop()
    )
    acker.init(1, 1, 0)
    acker.start()
    acker._thread.join(timeout=60)
    acker.start()
    acker.stop()
    assert not running()


def test_stopped_thread_ticks_no_more(make_acker):
    clock, left = Clock(), []
    waits = Waits(clock, times=0)
    acker = make_acker(clock=clock, wait=waits, on_expired=left.append)
    acker.init(1, 1, 0)
    acker.start()
    assert waits.used_up.wait(timeout=60)
    clock.now_ms = 3 * T
    acker.stop()
    assert left == []


def test_callback_may_stop_the_thread_it_runs_in(make_acker):
    clock = Clock()
    waits = Waits(clock, times=100)
    acker = make_acker(clock=clock, wait=waits, on_expired=lambda entries: acker.stop())
    acker.init(1, 1, 0)
    acker.start()
    acker._thread.join(timeout=60)
    acker.stop()
    assert len(waits.asked) == 3
