"""Limits on the number of tuples that a consumer may have outstanding; most adapt to its acks.

A limit belongs to one consumer. It receives a sample for each answered tuple, and provides the
number that may be outstanding: the window. All times are nanoseconds; each sample takes constant
time and no memory. The default is `DelayTarget`.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from ackcore._columns import as_count, nanoseconds
from ackcore._error_hints import naming_arguments

#: Without this bound, a consumer that answers at once would get a whole stream.
MAX_LIMIT = 1_000_000


def limit_bounds(initial: Any, max_limit: Any) -> tuple[int, int]:
    """Check the initial and the largest value of a `Limit`, and return both as integers.

    Raises TypeError or ValueError unless ``1 <= initial <= max_limit <= 1_000_000``.
    """
    most = as_count(max_limit, "max_limit", 1, MAX_LIMIT)
    return as_count(initial, "initial", 1, most), most


class Pressure(enum.Enum):
    """The load of a consumer, as its last answer shows it to `RttThreshold`."""

    NORMAL = "normal"  # an ack within the threshold
    SLOW = "slow"  # a later ack
    BUSY = "busy"  # a failure or a time-out


@runtime_checkable
class Limit(Protocol):
    """The number of tuples that one consumer may have outstanding. Not thread-safe."""

    @property
    def limit(self) -> int:
        """The largest number of outstanding tuples, at least 1."""

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Adapt to an answered tuple.

        Parameters
        ----------
        rtt_ns : int
            Nanoseconds since it was sent.
        in_flight : int
            The number of tuples outstanding at this consumer just before, including this one.
        dropped : bool
            Whether it timed out, or failed in a way that may come from the consumer's load.
        """


def check_room(limit: Limit) -> None:
    """Raise ValueError if a `Limit` allows no tuple, and so would never have another sample."""
    allowed: Any = limit.limit
    if not isinstance(allowed, Real) or not float(allowed) >= 1:  # also for NaN
        raise ValueError(
            f"{type(limit).__name__}.limit must be a number of at least 1, got {allowed!r}; with "
            "less nothing would be sent"
        )


class RttThreshold:
    """A window that grows while round trips are within a threshold, and shrinks beyond it.

    An ack within the threshold is NORMAL and adds ``1 / window``. A later one is SLOW and subtracts
    as much. So the window changes linearly, by one tuple for each window of acks. A failure or
    time-out is BUSY and subtracts 1 at once (and the tuple goes to another consumer). There is no
    slow start: it would end in SLOW, and a larger window does not make a consumer faster.

    The window grows until round trips reach the threshold, which is the latency under load.

    Parameters
    ----------
    threshold_s : float, default 0.05
        The longest round trip of a NORMAL consumer, in seconds.
    initial : int, default 4
        The window before the first sample.
    max_limit : int, default 1000
        The largest window.

    Attributes
    ----------
    pressure : Pressure
        NORMAL, SLOW or BUSY, after the last sample.

    Notes
    -----
    TCP's congestion avoidance without slow start, as in "An adaptive dynamic flow control for
    Storm" (Storm的自适应动态流控制算法), after RFC 2001.
    """

    __slots__ = ("_max_limit", "_window", "limit", "pressure", "threshold_ns")

    @naming_arguments
    def __init__(
        self, threshold_s: float = 0.05, *, initial: int = 4, max_limit: int = 1000
    ) -> None:
        self.threshold_ns = nanoseconds(threshold_s, "threshold_s")
        #: The number of tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._window = float(self.limit)
        self.pressure = Pressure.NORMAL

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Adapt to an answered tuple; see `Limit.on_sample` for the parameters."""
        if dropped:
            self.pressure = Pressure.BUSY
            window = self._window - 1
        elif rtt_ns <= self.threshold_ns:
            self.pressure = Pressure.NORMAL
            window = self._window + 1 / self._window
        else:
            self.pressure = Pressure.SLOW
            window = self._window - 1 / self._window
        self._window = min(max(window, 1.0), float(self._max_limit))
        self.limit = int(self._window)


class Fixed:
    """A constant window.

    Parameters
    ----------
    limit : int
        The number of tuples that may be outstanding, from 1 to a million.
    """

    __slots__ = ("limit",)

    @naming_arguments
    def __init__(self, limit: int) -> None:
        #: The number of tuples that may be outstanding.
        self.limit = as_count(limit, "limit", 1, MAX_LIMIT)

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Ignore the sample: the limit is constant."""


class DelayTarget:
    """The default: a window that keeps a consumer's queue at a delay.

    ``limit = (target + base_rtt) / service``, rounded and within ``2 .. max_limit``: the number of
    tuples that a consumer serves within the target plus the round trip of an empty queue. So the
    target is the time that a tuple waits at a fully loaded consumer. With fewer than 2, a consumer
    slower than the target would idle between an ack and the next tuple.

    ``service`` is the mean time from one ack to the next, or from send to ack if that is shorter.
    For a consumer that serves one tuple at a time, it is the time of a tuple without its wait in
    the queue; for one that serves n at once, an n-th of that. A new sample weighs 0.05, more among
    the first 20 and after idle time. It does not drift up when several producers queue there.

    ``base_rtt`` is the shortest round trip. 10 s and 50 round trips after it was last measured, the
    limit becomes 1, until the ack of a tuple that was outstanding alone has measured it again.

    If the window has shrunk to 2 and a tuple overtakes another, the consumer has no single queue.
    From then on, ``base_rtt`` is the mean round trip with at most 2 tuples outstanding, and the
    target at least a quarter of it and 3/4 of the standard deviation. The window doubles until the
    mean round trip is longer by half.

    A failure or time-out takes 1 off the limit at once, down to 1, and multiplies ``service`` by
    1.5, up to a factor of 64 in total; each ack removes one such factor.

    Parameters
    ----------
    target_s : float, default 0.05
        The target queueing delay, in seconds; 0.02 for lower latency. A consumer that pauses for
        no longer than that never runs out of tuples.
    initial : int, default 2
        The limit before the first sample.
    max_limit : int, default 1000
        The largest limit.
    clock : callable, optional
        The controller's clock: nanoseconds as an int; by default `time.monotonic_ns`.

    Attributes
    ----------
    service_ns : float
        The service time of a tuple in nanoseconds, including the penalty; 0.0 before the first
        sample.
    base_rtt_ns : float
        The round trip of a tuple that meets no queue; 0.0 before the first sample: the shortest
        one, or a mean (see above). It also follows (with weight 0.05) those of tuples that were
        outstanding alone, so that it can rise again.
    penalty : float
        The factor for failures, from 1 to 64.

    Notes
    -----
    Bandwidth times delay, as in BBR (Cardwell et al., ACM Queue 14(5), 2016), with a target for the
    queue as in CoDel (RFC 8289). ``bench/README.md`` compares it with the other limits.
    """

    _FAILURE, _MOST = 1.5, 64.0
    _STALE_NS, _PROBE_RTTS = 10_000_000_000, 50
    #: There is a queue if the shortest round trip of a block has this part of the mean's excess.
    _SHARE = 0.25
    #: The standard deviations by which a mean may be longer by chance: 3 standard errors of a mean
    #: of 16 round trips.
    _NOISE = 0.75
    #: The weight of a new sample.
    _ALPHA = 0.05
    #: The round trips after which a mean is no longer new.
    _ENOUGH = 16

    @naming_arguments
    def __init__(
        self,
        target_s: float = 0.05,
        *,
        initial: int = 2,
        max_limit: int = 1000,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        #: The target queueing delay, in nanoseconds.
        self.threshold_ns = nanoseconds(target_s, "target_s")
        #: The number of tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._clock = clock
        self._last_ns = clock()
        self._mean_ns = 0.0
        self._weight = 1.0  # of the next sample: 1, 1/2, 1/3, ... down to 0.05
        self.penalty = 1.0
        self._probe_ns: float = self._last_ns + self._STALE_NS
        self.service_ns = 0.0
        self.base_rtt_ns = 0.0
        # base_rtt = shortest + risen + spread
        self._shortest_ns = math.inf
        # risen: the shortest has become longer. spread: the mean minus the shortest.
        self._risen_ns = self._spread_ns = 0.0
        self._noise_ns = 0.0  # what chance may add to the mean of a block
        self._known = 0  # the round trips in the mean; 0 if the mean is not used
        self._stale_ns = 0.0  # until this time, a larger mean is ignored
        self._ramp = 0  # a window that doubles until there is a queue; 0 if none
        self._sent_ns = 0  # the latest time of sending among the answered tuples
        self._overtaken = 0
        self._begin(self._last_ns)

    def _begin(self, now: int) -> None:
        self._began_ns = now
        self._acks = self._most_out = 0
        self._sum_ns = self._square_ns = 0.0
        self._least_ns = math.inf

    def _add(self, rtt_ns: int, in_flight: int, now: int) -> None:
        """Add a round trip to the present block of them, and end the block if it has enough."""
        self._acks = acks = self._acks + 1
        self._sum_ns += rtt_ns
        self._square_ns += rtt_ns * rtt_ns
        if rtt_ns < self._least_ns:
            self._least_ns = rtt_ns
        if in_flight > self._most_out:
            self._most_out = in_flight
        sent = now - rtt_ns
        if sent < self._sent_ns:
            self._overtaken += 1
        else:
            self._sent_ns = sent
        ramp = self._ramp
        enough = max(8, ramp) if ramp else 8 if self.limit <= 2 else max(32, self.limit)
        if acks >= enough:
            self._end(now)

    def _end(self, now: int) -> None:
        """Adapt to the block of round trips that `_add` has collected, and begin another.

        That changes the base round trip, and the window if it doubles.
        """
        acks = self._acks
        mean = self._sum_ns / acks
        deviation = max(0.0, self._square_ns / acks - mean * mean) ** 0.5
        target, base, noise = self.threshold_ns, self.base_rtt_ns, self._noise_ns
        floor = self._shortest_ns + self._risen_ns
        # In a standing queue all tuples wait, so even the shortest round trip is long.
        is_queued = self._least_ns - floor > max(target / 2, self._SHARE * (mean - floor))
        if self._known and not is_queued:
            self._probe_ns = max(self._probe_ns, now + self._STALE_NS)
        if self._ramp:
            self._mean_ns = (now - self._began_ns) / acks
            allowed = max(target, noise * max(1.0, 4 / acks**0.5), base / 2)
            if mean <= base + allowed and self._ramp < self._max_limit:
                self._ramp *= 2
            else:
                self._ramp = 0
        elif self._known and mean < base - self._NOISE * noise:
            self._spread_ns, self._noise_ns = max(0.0, mean - floor), self._NOISE * deviation
            self._known = acks
        elif self._most_out <= 2 and mean > base + target and self._overtaken:
            is_same = abs(mean - base) <= max(target, 2 * noise)
            is_new = self._known < self._ENOUGH
            if is_new or (not is_queued and (is_same or now >= self._stale_ns)):
                spread = mean - (self._least_ns if is_queued else floor)
                weight = acks / (self._known + acks) if is_same or is_new else 1.0
                self._known = min(self._known + acks, 4 * self._ENOUGH)
                self._spread_ns += (spread - self._spread_ns) * weight
                self._noise_ns += (self._NOISE * deviation - noise) * weight
                self._stale_ns = now + self._STALE_NS + self._PROBE_RTTS * mean
                self._overtaken = 0
                self._ramp = 2
        self.base_rtt_ns = floor + self._spread_ns
        self._begin(now)

    def on_sample(
        self, rtt_ns: int, in_flight: int, dropped: bool, now_ns: int | None = None
    ) -> None:
        """Adapt to an answered tuple; see `Limit.on_sample` for the first parameters.

        ``now_ns``: the time of the answer; by default the clock's time.
        """
        if dropped:
            if not self._mean_ns:
                self._mean_ns = float(rtt_ns)  # the only estimate so far
            self.penalty = min(self.penalty * self._FAILURE, self._MOST)
            self.service_ns = self._mean_ns * self.penalty
            self.limit = max(1, self.limit - 1)
            self._ramp = 0
            return
        now = self._clock() if now_ns is None else now_ns
        interval = now - self._last_ns
        self._last_ns = now
        target: float = self.threshold_ns
        mean = self._mean_ns
        base = self.base_rtt_ns
        weight = self._weight
        if weight > self._ALPHA:
            self._weight = max(self._ALPHA, weight / (1 + weight))
            if weight == 1.0:
                self.base_rtt_ns = base = float(rtt_ns)
        if rtt_ns < self._shortest_ns + self._risen_ns:
            if rtt_ns < self._shortest_ns:
                if self._known:  # the mean remains
                    self._spread_ns += self._shortest_ns + self._risen_ns - rtt_ns
                self._shortest_ns = rtt_ns
            self._risen_ns = max(0.0, rtt_ns - self._shortest_ns - self._spread_ns)
            self.base_rtt_ns = base = rtt_ns + self._spread_ns
            self._probe_ns = now + self._STALE_NS + self._PROBE_RTTS * base
        if rtt_ns <= interval:
            idle = interval - rtt_ns
            interval = rtt_ns
            if idle > self._STALE_NS * weight:
                weight = min(1.0, idle / self._STALE_NS)
            if in_flight == 1:
                # The tuple met no queue of this producer.
                if now >= self._probe_ns and rtt_ns > target:
                    self._risen_ns = max(0.0, rtt_ns - self._shortest_ns - self._spread_ns)
                elif self._known:
                    self._spread_ns = max(0.0, self._spread_ns + (rtt_ns - base) * self._ALPHA)
                else:
                    self._risen_ns += (rtt_ns - base) * self._ALPHA
                self.base_rtt_ns = base = self._shortest_ns + self._risen_ns + self._spread_ns
                self._probe_ns = now + self._STALE_NS + self._PROBE_RTTS * base
        if self._known or in_flight <= 2 >= self.limit:
            self._add(rtt_ns, in_flight, now)
            base = self.base_rtt_ns
            mean = self._mean_ns
        elif self._acks:
            self._begin(now)
        if self._known:
            target = max(target, self._noise_ns, base / 4)
        mean += (interval - mean) * weight
        if mean < 1.0:
            mean = 1.0
        self._mean_ns = mean
        least = 2
        if self.penalty > 1.0:
            self.penalty = max(1.0, self.penalty / self._FAILURE)
            mean *= self.penalty
            least = 1
        self.service_ns = mean
        # With a long round trip and few tuples, the target may add less than half a tuple.  Round
        # up then, so that the window can grow.
        window = int((target + base) / mean + (1.0 if base > 2 * target else 0.5))
        if window < least:
            window = least
        if window < self._ramp:
            window = self._ramp
        if now >= self._probe_ns:
            window = 1
        self.limit = window if window < self._max_limit else self._max_limit
