"""A simulation of unequal consumers whose speeds change: seeded, event by event, in no time.

A dozen consumers, each of which serves what it is sent in order, one by one. Half a millisecond
each way. Work is exponential with mean 1; a consumer of speed 100 does 100 of that a second. Their
speeds are 1 to 8 apart, and each has, at random, phases in which it runs at a tenth, not at all, or
up to half faster or slower. What is done in a run is compared with `World.capacity`: the speeds,
integrated over the time of the run, which is what a system does that never lets a consumer idle.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections import deque
from typing import NamedTuple

from ackcore.flow import FlowController

S, MS = 1_000_000_000, 1_000_000
HOP_NS = MS // 2  # each way
TIMEOUT_S = 5.0


class SimClock:
    """Stands until it is set."""

    def __init__(self):
        self.now_ns = 0

    def __call__(self):
        return self.now_ns


class Speed:
    """A consumer's speed over time, piecewise constant, in units of work a nanosecond.

    ``starts[i]`` is where piece i begins, ``done[i]`` the work that it could have done until then.
    """

    def __init__(self, pieces, end_ns):
        self.starts, self.rates, self.done = [], [], []
        work = 0.0
        for (start, rate), (stop, _) in itertools.pairwise([*pieces, (end_ns, 0)]):
            self.starts.append(start)
            self.rates.append(rate)
            self.done.append(work)
            work += rate * (stop - start)

    def work_until(self, at_ns):
        """Units of work that it could do until then."""
        piece = bisect.bisect_right(self.starts, at_ns) - 1
        return self.done[piece] + (at_ns - self.starts[piece]) * self.rates[piece]

    def stalled_until(self, at_ns):
        """The end of the stall that it is in then; the time itself if it is in none."""
        piece = bisect.bisect_right(self.starts, at_ns) - 1
        return at_ns if self.rates[piece] else self.starts[piece + 1]

    def finish_ns(self, start_ns, work):
        """When work is done that is begun then."""
        target = self.work_until(start_ns) + work
        piece = bisect.bisect_left(self.done, target) - 1
        while not self.rates[piece]:
            piece -= 1  # done by the end of the piece before
        return self.starts[piece] + (target - self.done[piece]) / self.rates[piece]


def changing(rng, per_s, end_ns, dead=None):
    """Pieces of a consumer's speed: phases of trouble, every ten seconds or so."""
    normal = per_s / S
    pieces, at = [], 0.0
    while at < end_ns:
        pieces.append((at, normal))
        at += rng.expovariate(1 / 10) * S
        kind = rng.choice(["slow", "stall", "drift"])
        factor = {"slow": 0.1, "stall": 0.0, "drift": rng.uniform(0.5, 1.5)}[kind]
        pieces.append((at, normal * factor))
        at += {"slow": rng.uniform(1, 3), "stall": rng.uniform(0.5, 2), "drift": 5}[kind] * S
    if dead:
        at_death = next(rate for start, rate in reversed(pieces) if start <= dead[1])
        pieces = [piece for piece in pieces if not dead[0] <= piece[0] <= dead[1]]
        pieces = sorted([*pieces, (dead[0], 0.0), (dead[1], at_death)])
    pieces = [piece for piece in pieces if piece[0] < end_ns]
    # Everything is done in the end, also what a simulation leaves behind.
    return Speed([*pieces, (end_ns, normal)], end_ns * 1000)


class World:
    """Consumers, the same whatever policy is let loose on them.

    Parameters
    ----------
    seed : int
    seconds : float
        Of the run; the first 15 % are not counted.
    slowest_per_s : float
        Of the fastest it is 8 times as much.
    fastest_dead : bool
        Whether the fastest consumer is dead in the second quarter of what is counted. What it had
        then is lost.
    """

    N = 12

    def __init__(self, seed, seconds=20.0, fastest_dead=False, slowest_per_s=60.0):
        rng = random.Random(seed)
        self.end_ns = seconds * S
        self.begin_ns = 0.15 * self.end_ns
        span = self.end_ns - self.begin_ns
        self.dead = None
        if fastest_dead:
            self.dead = (self.begin_ns + span / 4, self.begin_ns + span / 2)
        per_s = [slowest_per_s * 8 ** (i / (self.N - 1)) for i in range(self.N)]
        self.speeds = [
            changing(rng, rate, self.end_ns, self.dead if i == self.N - 1 else None)
            for i, rate in enumerate(per_s)
        ]
        self.reset()

    def reset(self):
        self.free_ns = [0.0] * self.N

    @property
    def capacity(self):
        """Units of work that can be done in the time that is counted."""
        return sum(s.work_until(self.end_ns) - s.work_until(self.begin_ns) for s in self.speeds)

    def capacity_per_s(self, from_s, seconds=0.5):
        """Units of work a second that can be done in some seconds from then on."""
        begin, end = from_s * S, (from_s + seconds) * S
        return sum(s.work_until(end) - s.work_until(begin) for s in self.speeds) / seconds

    def works(self, seed=1):
        """The work of record after record, for ever."""
        rng = random.Random(seed)
        while True:
            yield rng.expovariate(1)

    def serve(self, consumer, arrival_ns, work):
        """When a tuple's work is done, or None if it is lost; calls in the order of arrival."""
        dead = self.dead if consumer == self.N - 1 else None
        if dead and dead[0] <= arrival_ns < dead[1]:
            return None
        start = max(arrival_ns, self.free_ns[consumer])
        done = self.speeds[consumer].finish_ns(start, work)
        if dead and arrival_ns < dead[0] <= done:
            self.free_ns[consumer] = dead[1]
            return None
        self.free_ns[consumer] = done
        return done


class Result(NamedTuple):
    """The result of a run; latencies from arrival at the producer to the last ack, in ms."""

    efficiency: float  # work done in the time that is counted, of the capacity
    latencies_ms: list[float]
    duplicates: int  # records done again
    missing: int  # records that are neither done, nor out or re-queued; fewer if some are out twice


def controllers(producers, limit=None, chooser=None, max_pending=None):
    """Make flow controllers on a clock, as `run` asks for."""

    def make(clock, n):
        return [
            FlowController(
                range(n),
                timeout_s=TIMEOUT_S,
                clock=clock,
                limit=limit and limit(clock),
                chooser=chooser and chooser(),
                max_pending=max_pending,
            )
            for _ in range(producers)
        ]

    return make


def run(world, make, load=None):
    """Let controllers loose on a world.

    Parameters
    ----------
    world : World
    make : callable
        ``make(clock, n)`` returns the controllers, one a producer.
    load : float or None
        Tuples arrive at random, as so much of the capacity; by default there are always more.
    """
    world.reset()
    clock = SimClock()
    flows = make(clock, world.N)
    rng = random.Random(1)
    works, came = [], []  # by record
    is_done = bytearray()
    backlog = [deque() for _ in flows]
    served = 0.0
    latencies = []
    events, order = [], itertools.count()
    acquired = duplicates = 0
    rate = load * world.capacity / (world.end_ns - world.begin_ns) if load else None

    def push(at_ns, kind, *what):
        heapq.heappush(events, (at_ns, next(order), kind, what))

    def new_record(at_ns):
        works.append(rng.expovariate(1))
        came.append(at_ns)
        is_done.append(0)
        return len(works) - 1

    def send(producer):
        nonlocal acquired
        flow = flows[producer]
        while True:
            lease = flow.try_again() if flow.requeued else None
            if lease is None:
                if rate is None:
                    # Made up only if there is room for it.
                    lease = flow.try_acquire(len(works))
                    if lease is not None:
                        new_record(clock.now_ns)
                elif backlog[producer]:
                    lease = flow.try_acquire(backlog[producer][0])
                    if lease is not None:
                        backlog[producer].popleft()
                if lease is None:
                    return
                acquired += 1
            done = world.serve(lease.name, clock.now_ns + HOP_NS, works[lease.item])
            if done is not None:
                push(int(done) + HOP_NS, "ack", producer, lease)

    for producer in range(len(flows)):
        push(producer, "tick", producer)
    if rate is not None:
        push(rng.expovariate(rate), "arrive")
    while events:
        at_ns, _, kind, what = heapq.heappop(events)
        if at_ns >= world.end_ns:
            break
        clock.now_ns = int(at_ns)
        if kind == "arrive":
            producer = len(works) % len(flows)
            backlog[producer].append(new_record(at_ns))
            send(producer)
            push(at_ns + rng.expovariate(rate), "arrive")
        elif kind == "tick":
            flows[what[0]].expire()
            send(what[0])
            push(at_ns + 10 * MS, "tick", *what)
        else:
            producer, lease = what
            flows[producer].ack(lease)
            record = lease.item
            if is_done[record]:
                duplicates += 1
            else:
                is_done[record] = 1
                if at_ns >= world.begin_ns:
                    served += works[record]
                    latencies.append((at_ns - came[record]) / MS)
            send(producer)
    pending = sum(flow.in_flight + flow.requeued for flow in flows)
    missing = acquired - sum(is_done) - pending
    return Result(served / world.capacity, latencies, duplicates, missing)


def ideal(world, load):
    """A central queue: a free consumer takes the next tuple, the quickest of them first."""
    world.reset()
    rng = random.Random(1)
    rate = load * world.capacity / (world.end_ns - world.begin_ns)
    latencies = []
    at = rng.expovariate(rate)
    free = list(range(world.N))
    busy = []  # (free at, consumer)
    while at < world.end_ns:
        work = rng.expovariate(1)
        now = at
        while busy and busy[0][0] <= now:
            free.append(heapq.heappop(busy)[1])
        if not free:
            now, consumer = heapq.heappop(busy)
        else:
            consumer = max(free, key=lambda c: speed_at(world.speeds[c], now))
            free.remove(consumer)
        done = world.speeds[consumer].finish_ns(now, work)
        heapq.heappush(busy, (done, consumer))
        if world.begin_ns <= done < world.end_ns:
            latencies.append((done - at + 2 * HOP_NS) / MS)
        at += rng.expovariate(rate)
    return Result(math.nan, latencies, 0, 0)


def speed_at(speed, at_ns):
    return speed.rates[bisect.bisect_right(speed.starts, at_ns) - 1]
