"""Laws of other systems, for `bench_flow` to measure `ackcore.flow.DelayTarget` against."""

from __future__ import annotations

import math
import random

from ackcore._columns import as_count, nanoseconds, positive
from ackcore.flow.limits import MAX_LIMIT, limit_bounds


class Gradient2:
    """A window that shrinks as far as round trips have grown beyond their long-term mean.

    ``gradient = clamp(tolerance * long / rtt, 0.5, 1)``, ``new = limit * gradient + queue``,
    ``limit = limit + smoothing * (new - limit)``, unless less than half of the limit was in use.
    ``long`` is an exponentially weighted mean over ``long_window`` samples, the plain mean of the
    first ten, and is taken down by 5 % a sample while it is more than twice the round trip.
    Failures count by their round trip only.

    Parameters
    ----------
    initial, min_limit, max_limit : int, default 20, 1, 1000
        The limit before the first sample; the bounds.
    queue : int, default 4
        Tuples that may queue.
    tolerance : float, default 1.5
        By how much a round trip may exceed the long-term mean.
    smoothing : float, default 0.2
        Weight of a new limit.
    long_window : int, default 600
        Samples.

    Notes
    -----
    ``Gradient2Limit`` of Netflix/concurrency-limits, commit 78a74b98, which has ``min_limit=20``
    and ``max_limit=200``. Its mean drifts up when several producers queue at a consumer.
    """

    __slots__ = (
        "_estimate",
        "_long_ns",
        "_long_window",
        "_max_limit",
        "_min_limit",
        "_queue",
        "_samples",
        "_smoothing",
        "_tolerance",
        "limit",
    )

    _WARM_UP = 10

    def __init__(
        self,
        *,
        initial: int = 20,
        min_limit: int = 1,
        max_limit: int = 1000,
        queue: int = 4,
        tolerance: float = 1.5,
        smoothing: float = 0.2,
        long_window: int = 600,
    ) -> None:
        #: Tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._min_limit = as_count(min_limit, "min_limit", 1, self.limit)
        self._estimate = float(self.limit)
        self._queue = as_count(queue, "queue", 0, MAX_LIMIT)
        self._tolerance = positive(tolerance, "tolerance")
        if tolerance < 1:
            raise ValueError(f"tolerance must be at least 1, got {tolerance}; 1 allows of none")
        self._smoothing = positive(smoothing, "smoothing", 1.0)
        self._long_window = as_count(long_window, "long_window", 1)
        self._long_ns = 0.0
        self._samples = 0

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Take a sample in, as `Limit.on_sample`."""
        rtt = max(rtt_ns, 1)
        self._samples += 1
        if self._samples <= self._WARM_UP:
            self._long_ns += (rtt - self._long_ns) / self._samples
        else:
            self._long_ns += (rtt - self._long_ns) * 2 / (self._long_window + 1)
        long = self._long_ns
        if long > 2 * rtt:
            self._long_ns = long * 0.95
        if in_flight < self._estimate / 2:
            return
        gradient = max(0.5, min(1.0, self._tolerance * long / rtt))
        new = self._estimate * gradient + self._queue
        smoothed = self._estimate + self._smoothing * (new - self._estimate)
        self._estimate = min(max(smoothed, float(self._min_limit)), float(self._max_limit))
        self.limit = int(self._estimate)


class Vegas:
    """A window that keeps a few tuples queued, by the shortest round trip.

    ``queued = limit * (1 - shortest / rtt)``, and with ``log = max(1, log10(limit))``: up by ``6 *
    log`` while ``queued <= log``, by ``log`` while ``queued < 3 * log``, down by ``log`` when
    ``queued > 6 * log`` or the tuple failed. Unchanged if less than half of the limit was in use.
    The shortest round trip is forgotten, and the next taken for it, every 15 to 30 limits of
    samples.

    Parameters
    ----------
    initial, max_limit : int, default 20, 1000
        The limit before the first sample; the largest.
    probe : int, default 30
        Limits of samples after which the shortest round trip is forgotten at the latest.
    seed : int, optional
        Of the jitter of that; by default not to be foreseen.

    Notes
    -----
    Brakmo and Peterson, "TCP Vegas", IEEE JSAC 13(8), 1995; as ``VegasLimit`` of
    Netflix/concurrency-limits, commit 78a74b98. What it takes for the shortest drifts up when
    several producers queue at a consumer.
    """

    __slots__ = (
        "_estimate",
        "_max_limit",
        "_probe",
        "_probe_after",
        "_random",
        "_samples",
        "_shortest_ns",
        "limit",
    )

    def __init__(
        self, *, initial: int = 20, max_limit: int = 1000, probe: int = 30, seed: int | None = None
    ) -> None:
        #: Tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._estimate = float(self.limit)
        self._probe = as_count(probe, "probe", 1)
        self._random = random.Random(seed)
        self._shortest_ns = 0
        self._samples = 0
        self._probe_after = self._random.uniform(0.5, 1.0) * self._probe

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Take a sample in, as `Limit.on_sample`."""
        rtt = max(rtt_ns, 1)
        self._samples += 1
        if self._samples >= self._probe_after * self._estimate:
            self._probe_after = self._random.uniform(0.5, 1.0) * self._probe
            self._samples = 0
            self._shortest_ns = rtt
            return
        if not self._shortest_ns or rtt < self._shortest_ns:
            self._shortest_ns = rtt
            return
        log = max(1, int(math.log10(self._estimate)))
        queued = math.ceil(self._estimate * (1 - self._shortest_ns / rtt))
        if dropped:
            change = -log
        elif in_flight * 2 < self._estimate:
            return
        elif queued <= log:
            change = 6 * log
        elif queued < 3 * log:
            change = log
        elif queued > 6 * log:
            change = -log
        else:
            return
        self._estimate = min(max(self._estimate + change, 1.0), float(self._max_limit))
        self.limit = int(self._estimate)


class AIMD:
    """A window that grows until something is dropped: by 1 an ack, times ``backoff`` a drop.

    A drop is a failure, a time-out or a round trip beyond ``timeout_s``. It takes off 1 at least;
    an ack adds nothing while less than half of the limit was in use.

    Parameters
    ----------
    initial, min_limit, max_limit : int, default 10, 1, 1000
        The limit before the first sample; the bounds.
    backoff : float, default 0.9
        Below 1.
    timeout_s : float, default 5.0
        Round trip that counts as a drop, in seconds.

    Notes
    -----
    Chiu and Jain, Computer Networks 17, 1989; as ``AIMDLimit`` of Netflix/concurrency-limits,
    commit 78a74b98.
    """

    __slots__ = ("_backoff", "_max_limit", "_min_limit", "_timeout_ns", "limit")

    def __init__(
        self,
        *,
        initial: int = 10,
        min_limit: int = 1,
        max_limit: int = 1000,
        backoff: float = 0.9,
        timeout_s: float = 5.0,
    ) -> None:
        #: Tuples that may be outstanding.
        self.limit, self._max_limit = limit_bounds(initial, max_limit)
        self._min_limit = as_count(min_limit, "min_limit", 1, self.limit)
        self._backoff = positive(backoff, "backoff")
        if backoff >= 1:
            raise ValueError(f"backoff must be below 1, got {backoff}; 0.9 takes off a tenth")
        self._timeout_ns = nanoseconds(timeout_s, "timeout_s")

    def on_sample(self, rtt_ns: int, in_flight: int, dropped: bool) -> None:
        """Take a sample in, as `Limit.on_sample`."""
        if dropped or rtt_ns > self._timeout_ns:
            less = min(self.limit - 1, int(self.limit * self._backoff))
            self.limit = max(self._min_limit, less)
        elif in_flight * 2 >= self.limit:
            self.limit = min(self._max_limit, self.limit + 1)
