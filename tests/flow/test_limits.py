"""Each law does what its docstring says, stays in its bounds, and keeps no history."""

import heapq
import itertools
import math
import random
import sys
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import MS, S, SimClock

from ackcore.flow import DelayTarget, Fixed, Limit, RttThreshold
from ackcore.flow.limits import Pressure

MAKERS = {
    "delay": lambda clock: DelayTarget(clock=clock),
    "seed": lambda clock: RttThreshold(),
    "fixed": lambda clock: Fixed(16),
}
SAMPLES = st.lists(
    st.tuples(st.integers(0, 10 * S), st.integers(1, 2000), st.booleans(), st.integers(0, S)),
    max_size=200,
)


@pytest.mark.parametrize("law", MAKERS)
@given(samples=SAMPLES)
def test_a_limit_is_an_int_from_1_to_its_bound(law, samples):
    clock = SimClock()
    limit = MAKERS[law](clock)
    assert isinstance(limit, Limit)
    for rtt, in_flight, dropped, passes in samples:
        clock.now_ns += passes
        limit.on_sample(rtt, in_flight, dropped)
        assert type(limit.limit) is int
        assert 1 <= limit.limit <= 1000


@pytest.mark.parametrize("law", MAKERS)
def test_a_limit_does_not_grow_with_its_samples(law):
    clock = SimClock()
    limit = MAKERS[law](clock)

    def size():
        names = getattr(type(limit), "__slots__", None) or vars(limit)
        return sum(sys.getsizeof(getattr(limit, name)) for name in names)

    sizes = []
    for i in range(10_000):
        clock.now_ns += MS
        limit.on_sample(5 * MS + i % 7, 4, i % 50 == 0)
        if i in (100, 9_999):
            sizes.append(size())
    assert sizes[1] <= sizes[0] + 64  # an int may get a digit more


def served(limit, clock, service_ns, hop_ns=0, n=400, at_once=1):
    """A consumer that always has as much as the limit allows, and serves so many at once."""
    sent = []
    ends = [0] * at_once
    for _ in range(n):
        while len(sent) < limit.limit:
            start = max(min(ends), clock.now_ns + hop_ns)
            ends[ends.index(min(ends))] = start + service_ns
            sent.append((start + service_ns + hop_ns, clock.now_ns))
        sent.sort()
        done, at = sent.pop(0)
        clock.now_ns = done
        limit.on_sample(done - at, len(sent) + 1, False)
    return done - at


@pytest.mark.parametrize("target_ms", [20, 50, 200])
@pytest.mark.parametrize("service_ms", [0.5, 5, 20])
def test_delay_target_queues_for_its_target(target_ms, service_ms):
    clock = SimClock()
    rtt = served(DelayTarget(target_ms / 1000, clock=clock), clock, int(service_ms * MS))
    assert rtt / MS == pytest.approx(target_ms + service_ms, rel=0.1, abs=service_ms)


def test_delay_target_fills_a_pipe_that_is_long_and_serves_many_at_once():
    """A service with 100 ms of latency and no queue: only the largest window is large enough."""
    clock = SimClock()
    limit = DelayTarget(max_limit=200, clock=clock)
    served(limit, clock, 100 * MS, at_once=1000, n=3000)
    assert limit.limit == 200


def test_delay_target_follows_a_latency_that_rises():
    clock = SimClock()
    limit = DelayTarget(max_limit=64, clock=clock)
    served(limit, clock, 20 * MS, at_once=100, n=1000)
    assert limit.limit == 64
    served(limit, clock, 400 * MS, at_once=100, n=6000)
    assert limit.limit == 64


def logn(mean_s, sigma):
    mu = math.log(mean_s) - sigma * sigma / 2
    return lambda draw: draw.lognormvariate(mu, sigma)


def either(quick_s, slow_s, share):
    return lambda draw: quick_s if draw.random() < share else slow_s


#: Services by the time of a call without a queue, in seconds.
TIMES = {
    "constant": lambda draw: 0.1,
    "one of nine is quick": either(0.001, 0.1, 1 / 9),
    "half are quick": either(0.01, 0.5, 0.5),
    "one of ten is slow": either(0.001, 0.5, 0.9),
    "lognormal": logn(0.1, 0.5),
    "lognormal, long tail": logn(0.1, 1.0),
    "language model": logn(2.0, 0.4),
}


def answered(make, took_s, slots, seconds, producers=1, seed=1):
    """Producers that always have more, at a service with so many slots and a queue before them.

    Returns the calls per second, and the mean round trip in seconds, after a third of the time.
    """
    draw, clock = random.Random(seed), SimClock()
    limits = [make(clock) for _ in range(producers)]
    out, queue, ends, count = [0] * producers, deque(), [], itertools.count()
    done = rtts = 0

    def begin(producer, sent):
        ends_ns = clock.now_ns + int(took_s(draw) * S) + 1
        heapq.heappush(ends, (ends_ns, next(count), producer, sent))

    def send(producer):
        while out[producer] < limits[producer].limit:
            out[producer] += 1
            if slots is None or len(ends) < slots:
                begin(producer, clock.now_ns)
            else:
                queue.append((producer, clock.now_ns))

    for producer in range(producers):
        send(producer)
    while True:
        clock.now_ns, _, producer, sent = heapq.heappop(ends)
        if clock.now_ns >= seconds * S:
            return 1.5 * done / seconds, rtts / S / done
        if queue:
            begin(*queue.popleft())
        limits[producer].on_sample(clock.now_ns - sent, out[producer], False)
        out[producer] -= 1
        if clock.now_ns >= seconds * S / 3:
            done += 1
            rtts += clock.now_ns - sent
        send(producer)


@pytest.mark.parametrize(("slots", "producers"), [(None, 1), (1, 1), (8, 1), (40, 1), (40, 4)])
@pytest.mark.parametrize("time", TIMES)
def test_delay_target_does_as_much_as_the_best_fixed_window(time, slots, producers):
    """Round trips that differ are not taken for a queue, and a queue does not grow for ever."""
    took_s, most = TIMES[time], 100
    seconds = 120 if time == "language model" else 60
    fixed = most if slots is None else max(1, 3 * slots // producers)
    best_per_s, _ = answered(lambda clock: Fixed(fixed), took_s, slots, seconds, producers)
    per_s, rtt_s = answered(
        lambda clock: DelayTarget(max_limit=most, clock=clock), took_s, slots, seconds, producers
    )
    alone_s = 0.05 + answered(lambda clock: Fixed(1), took_s, None, seconds)[1]
    assert rtt_s <= 8 * alone_s
    assert per_s >= 0.9 * best_per_s


def test_delay_target_takes_failures_back_one_by_one():
    clock = SimClock()
    limit = DelayTarget(clock=clock)
    served(limit, clock, 5 * MS)
    before, window = limit.service_ns, limit.limit
    for i in range(1, 4):
        limit.on_sample(5 * S, window, True)
        assert limit.service_ns == pytest.approx(before * 1.5**i)
        assert limit.limit == window - i
    for _ in range(100):
        limit.on_sample(5 * S, window, True)
    assert limit.service_ns == pytest.approx(before * 64)
    assert limit.limit == 1
    served(limit, clock, 5 * MS, n=40)
    assert limit.service_ns == pytest.approx(before)
    assert limit.limit == window


def test_after_a_rest_a_sample_weighs_more():
    clock = SimClock()
    limit = DelayTarget(clock=clock)
    served(limit, clock, 100 * MS)
    clock.now_ns += 5 * S
    limit.on_sample(10 * MS, 1, False)
    assert limit.service_ns / MS == pytest.approx(55, rel=0.01)
    clock.now_ns += 60 * S
    limit.on_sample(10 * MS, 1, False)
    assert limit.service_ns / MS == pytest.approx(10)
    clock.now_ns += 5 * S
    limit.on_sample(5 * S, 9, False)  # no rest: it stalled
    assert limit.service_ns / MS == pytest.approx(10 + 0.05 * 4990)


def test_delay_target_knows_nothing_better_than_the_time_out_of_a_consumer_that_never_answered():
    limit = DelayTarget(clock=SimClock())
    limit.on_sample(5 * S, 1, True)
    assert limit.service_ns == 7.5 * S
    assert limit.limit == 1


def test_rtt_threshold_steps_once_a_window():
    limit = RttThreshold(0.1, initial=10)
    for _ in range(11):
        limit.on_sample(100 * MS, 10, False)
    assert (limit.limit, limit.pressure) == (11, Pressure.NORMAL)
    for _ in range(12):
        limit.on_sample(100 * MS + 1, 10, False)
    assert (limit.limit, limit.pressure) == (9, Pressure.SLOW)  # 9.97
    limit.on_sample(5 * S, 10, True)
    assert (limit.limit, limit.pressure) == (8, Pressure.BUSY)
    limit.on_sample(1, 10, False)
    assert limit.pressure is Pressure.NORMAL


def test_rtt_threshold_drives_the_round_trip_to_its_threshold():
    clock = SimClock()
    rtt = served(RttThreshold(0.1), clock, 2 * MS, n=8000)
    assert rtt / MS == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: DelayTarget(0), ValueError, "target_s must be above 0 and at most 1e+09, got 0"),
        (lambda: DelayTarget("50"), TypeError, "target_s must be a number of seconds, got"),
        (lambda: DelayTarget(True), TypeError, "got bool"),
        (lambda: DelayTarget(float("nan")), ValueError, "got nan"),
        (lambda: DelayTarget(initial=5, max_limit=4), ValueError, "initial"),
        (lambda: Fixed(0), ValueError, "limit"),
        (lambda: Fixed(1.5), TypeError, "limit"),
    ],
)
def test_bad_settings_are_named(make, error, says):
    with pytest.raises(error) as caught:
        make()
    assert says in str(caught.value)
