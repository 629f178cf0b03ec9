"""The endpoints of calls: their windows, breakers and pauses."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable

from ackcore.calls.call_settings import CallSettings
from ackcore.calls.outcomes import Retry, Unavailable
from ackcore.calls.rate_limits import made_by
from ackcore.calls.usage import CallCounts
from ackcore.flow.choosers import Idlest
from ackcore.flow.consumers import FlowConsumer, Lease
from ackcore.flow.limits import DelayTarget, Fixed, Limit
from ackcore.flow.windows import Windows
from ackcore.retry import capped_doubling

_S = 1_000_000_000
#: The pause of an endpoint during its trial call.  The end of that call ends the pause.
_ON_TRIAL_NS = 1 << 62
#: The shortest pause after a refusal.
_SHORTEST_PAUSE_NS = 1_000_000
#: The longest pause of an endpoint that refuses repeatedly and requests less: a Retry-After of 0
#: must not become a busy loop.
_LONGEST_UNASKED_NS = _S
#: The interval at which `Windows` ends pauses.
_LOOK_NS = 2_000_000
#: The number of calls without a refusal after which `Pace` is given up.
_PACED = 100
#: The growth of the pace with the square of the calls since a refusal: after an interval in which
#: calls were refused, and before.
_FASTER, _FASTER_AT_FIRST = 0.0002, 0.005
#: The factors of the interval after a refusal: near the rate, and if it came within `_NEAR` calls.
_SLOWER, _MUCH_SLOWER, _NEAR = 1.07, 1.4, 2
#: The first pause after a refusal, in intervals.
_PAUSE = 0.2
#: An event loop's timer may be early by the rounding error of its seconds.
_EARLY_NS = 1_000


class BreakerState(enum.Enum):
    """The state of a breaker.

    CLOSED: calls are made. OPEN: no calls are made until its time is over. HALF_OPEN: a single
    trial call is made.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """The breaker of one endpoint.

    ::

        CLOSED ──n failures in a row──► OPEN ──its time is over, a call is made──► HALF_OPEN
        HALF_OPEN ──that call succeeds──► CLOSED        ──it fails──► OPEN

    Until it is closed again, the results of calls that began before it opened do not count.

    ``failures``: the number of failures in a row that open it; None for never. ``reset_ns``: the
    time for which it stays open, in nanoseconds.

    Attributes: ``opened_ns``: the time at which it first opened since the last success.
    ``last_error``: the error that opened it last. Both are None while it is closed.

    M. Nygard, "Release It!", 2007; the states and their names are pybreaker's.
    """

    __slots__ = ("_failures", "_most", "_reset_ns", "last_error", "opened_ns", "state")

    def __init__(self, failures: int | None, reset_ns: int) -> None:
        self._most = failures
        self._reset_ns = reset_ns
        self._failures = 0
        self.state = BreakerState.CLOSED
        self.opened_ns: int | None = None
        self.last_error: BaseException | None = None

    def probe(self) -> None:
        """Record that a trial call begins, because the open time is over."""
        self.state = BreakerState.HALF_OPEN

    def succeeded(self, probe: bool) -> bool:
        """Record that a call was answered, which ends the row of failures, or an open breaker's
        trial. Return whether that closed the breaker.

        ``probe``: whether it is the trial call.
        """
        if self.state is BreakerState.CLOSED:
            self._failures = 0
            return False
        if not probe:
            return False
        self._failures = 0
        self.state = BreakerState.CLOSED
        self.opened_ns = self.last_error = None
        return True

    def failed(self, error: BaseException, now_ns: int, probe: bool) -> int | None:
        """Record that a call failed. Return how many nanoseconds the breaker stays open if that
        opens it, otherwise None.

        ``error``: the error of the call. ``probe``: whether it is the trial call.
        """
        if self.state is BreakerState.CLOSED:
            self._failures += 1
            if self._most is None or self._failures < self._most:
                return None
        elif not probe:
            return None
        self.state = BreakerState.OPEN
        self.last_error = error
        if self.opened_ns is None:
            self.opened_ns = now_ns
        return self._reset_ns


class Pace:
    """The interval of calls to an endpoint that refuses what exceeds its rate.

    After a refusal, calls begin a little slower than before, or at the mean rate since the refusal
    before if that is higher; then faster with each call until the next one.

    Attributes: ``until_ns``: the end of the pause after the last refusal. Refusals before that time
    do not count again.
    """

    __slots__ = ("_begun", "_due_ns", "_interval_ns", "_is_tried", "_since_ns", "until_ns")

    def __init__(self, now_ns: int) -> None:
        self._since_ns = now_ns  # the last refusal
        self._begun = 0  # calls since then that were not refused
        self._interval_ns = 0.0  # after the last refusal; 0 while unknown
        self._is_tried = False  # whether calls in that interval were refused
        self._due_ns = 0.0
        self.until_ns = now_ns

    def begin(self, now_ns: int) -> float | None:
        """Record that a call begins. Return the time of the next one; None if the endpoint accepted
        so many calls since its last refusal that calls need no pace.
        """
        self._begun += 1
        if self._begun > _PACED:
            return None
        self._due_ns = max(self._due_ns, now_ns - _LOOK_NS) + self._interval_ns / self._growth
        return self._due_ns

    @property
    def _growth(self) -> float:
        return 1 + (_FASTER if self._is_tried else _FASTER_AT_FIRST) * self._begun**2

    def refused(self, now_ns: int) -> int:
        """Record a refusal; one before ``until_ns`` changes no interval.

        Return the interval of calls in nanoseconds, 0 before it is measured or if all calls are
        refused. The caller then calls `pause`.
        """
        # Calls that began before the first refusal are not counted in `begin`.
        self._begun = max(0, self._begun - 1)
        if now_ns < self.until_ns:
            return int(self._interval_ns)
        if self._begun:
            interval_ns = (now_ns - self._since_ns) / self._begun
            if self._interval_ns:
                # If calls were slower than allowed at first, that interval is too long.
                slower = _SLOWER if self._begun > _NEAR else _MUCH_SLOWER
                growth = self._growth
                self._is_tried = self._begun > _NEAR
                interval_ns = min(interval_ns, slower * self._interval_ns / growth)
            self._interval_ns = interval_ns
            self._begun = 0
        elif self._interval_ns:
            self._interval_ns = max(self._interval_ns, float(self.until_ns - self._since_ns))
            if self._interval_ns > _LONGEST_UNASKED_NS:
                self._interval_ns, self._is_tried = 0.0, False  # it refuses all calls
        self._since_ns = now_ns
        return int(self._interval_ns)

    def pause(self, until_ns: int) -> None:
        """Record that no call begins before the end of a pause."""
        self.until_ns = until_ns
        self._due_ns = float(until_ns)


class Endpoints:
    """The endpoints of one task's calls: those of the settings, or a single one, named None.

    ``most``: the largest number of calls in flight, over all endpoints. ``clock``: returns the time
    in nanoseconds. ``call_counts``: its ``trips`` counts the times that a breaker opened. Raises
    the errors of `made_limit`.

    Attributes: ``lease``: the method `Windows.lease` of the endpoints' windows.
    """

    def __init__(
        self, settings: CallSettings, most: int, clock: Callable[[], int], call_counts: CallCounts
    ) -> None:
        # One endpoint leaves no choice, and a random seed for each key would take time.
        chooser = Idlest(0 if settings.endpoints is None else None)
        # Leases do not time out there: they end with their calls.
        self._windows = Windows(chooser, most, _ON_TRIAL_NS, clock)
        self._most = most
        self._settings = settings
        #: By refusing endpoint: the refusals in a row, the time of the first, and the last error.
        self._refusals: dict[Hashable, tuple[int, int, Retry]] = {}
        self._paces: dict[Hashable, Pace] = {}  # of those that refused lately
        self._breakers: dict[Hashable, Breaker] = {}
        self._call_counts = call_counts
        for name in (None,) if settings.endpoints is None else settings.endpoints:
            self._windows.join(name, made_limit(settings, clock))
            reset_ns = int(settings.breaker_reset_s * _S)
            self._breakers[name] = Breaker(settings.breaker_failures, reset_ns)
        self._consumers = list(self._windows.consumers.values())
        self.lease = self._windows.lease

    @property
    def in_flight(self) -> int:
        """The number of calls in flight."""
        return self._windows.in_flight

    @property
    def has_room(self) -> bool:
        """Whether an endpoint has room for another call."""
        if self._windows.in_flight >= self._most:
            return False
        for consumer in self._consumers:  # noqa: SIM110 - a generator would cost more than this
            if consumer.has_room:
                return True
        return False

    def begin(self, lease: Lease, now_ns: int) -> bool:
        """Record that a call begins; pause its endpoint until its `Pace` allows the next call.

        Returns whether the call is the trial of an open breaker: the endpoint then gets no other
        call before the end of this one.
        """
        lease.sent_ns = now_ns
        consumer = lease.consumer
        breaker = self._breakers[consumer.name]
        if breaker.state is not BreakerState.OPEN:
            if self._paces and (pace := self._paces.get(consumer.name)) is not None:
                due_ns = pace.begin(now_ns)
                if due_ns is None:
                    del self._paces[consumer.name]
                elif due_ns > now_ns:
                    self._windows.pause(consumer.name, int(due_ns) - now_ns)
            return False
        breaker.probe()
        self._windows.pause(consumer.name, _ON_TRIAL_NS)
        return True

    def done(self, lease: Lease, on_trial: bool) -> None:
        """Record that a call succeeded: a series of refusals ends, and the breaker may close."""
        self._windows.done(lease)
        self._answered(lease.consumer, on_trial)
        if self._refusals:
            self._refusals.pop(lease.consumer.name, None)

    def failed(
        self, lease: Lease, on_trial: bool, error: BaseException, timed_out: bool, now_ns: int
    ) -> None:
        """Record that a call raised, or timed out.

        A `Retry` that is not final pauses the endpoint. Another error of the whole call
        (`CallSettings.is_of_call`) is a failure for the endpoint's breaker. Each `Retry`, and each
        error that is not of the whole call, is an answer for the breaker.
        """
        counts = self._settings.is_of_call(error)
        self._windows.take_back(lease, dropped=counts, again=False, timed_out=timed_out)
        consumer = lease.consumer
        if not counts or isinstance(error, Retry):
            # The endpoint answered.
            self._answered(consumer, on_trial)
            if counts and isinstance(error, Retry):
                self._refused(consumer, error, now_ns)
            return
        open_ns = self._breakers[consumer.name].failed(error, now_ns, on_trial)
        if open_ns is not None:
            self._call_counts.trips += 1
            self._windows.resume(consumer)
            self._windows.pause(consumer.name, open_ns)

    def _refused(self, consumer: FlowConsumer, error: Retry, now_ns: int) -> None:
        """Pause an endpoint that refuses calls: briefly at first, then twice as long each time.

        The longest pause is the one that the error requests, or else ``breaker_reset_s``, but at
        least a second. An endpoint that is already paused is not paused again. With
        ``breaker_failures=None``, no endpoint is paused.
        """
        if self._settings.breaker_failures is None:
            return
        pace = self._paces.get(consumer.name)
        if pace is None:
            if not consumer.is_open:
                return  # its breaker is open
            pace = self._paces[consumer.name] = Pace(now_ns)
        interval_ns = pace.refused(now_ns)
        if now_ns < pace.until_ns or self._breakers[consumer.name].state is not BreakerState.CLOSED:
            return  # it was paused already when this call was answered
        times, since_ns, _ = self._refusals.get(consumer.name, (0, now_ns, error))
        self._refusals[consumer.name] = (times + 1, since_ns, error)
        asked_s = self._settings.breaker_reset_s if error.asked_s is None else error.asked_s
        most_ns = max(_LONGEST_UNASKED_NS, int(asked_s * _S))
        first_ns = max(
            _SHORTEST_PAUSE_NS, int(interval_ns * _PAUSE) or int(consumer.service.service_ns)
        )
        pause_ns = capped_doubling(first_ns, times + 1, most_ns)
        pace.pause(now_ns + pause_ns)
        self._windows.resume(consumer)
        self._windows.pause(consumer.name, pause_ns)

    def _answered(self, consumer: FlowConsumer, on_trial: bool) -> None:
        if self._breakers[consumer.name].succeeded(on_trial):
            self._windows.resume(consumer)

    def reopen(self, now_ns: int) -> float:
        """Open endpoints whose pause is over. Return the end of the next pause; infinity if none.

        The pause during a trial call does not count: the end of the call ends it. A lease also
        opens endpoints, but no lease is requested while the other endpoints are full.
        """
        next_ns: float = math.inf
        for consumer in self._consumers:
            if consumer.is_open:
                continue
            if consumer.opens_ns <= now_ns + _EARLY_NS:
                self._windows.resume(consumer)
            elif consumer.opens_ns < min(next_ns, _ON_TRIAL_NS):
                next_ns = consumer.opens_ns
        return next_ns

    def opens(self, now_ns: int, wait_ns: float) -> tuple[int, bool] | None:
        """Return the time, in nanoseconds, at which the first endpoint opens, and whether that is
        too late: all endpoints are then closed for longer than ``wait_ns``.

        Returns None if an endpoint is open, or if all are on trial: the end of a trial call opens
        its endpoint.

        The time is never too late if the first endpoint has refused only once since its last
        answer. For one that refuses repeatedly, ``wait_ns`` counts as at least a second.
        """
        for consumer in self._consumers:
            if consumer.is_open:
                return None
        first = min(self._consumers, key=lambda consumer: consumer.opens_ns)
        if first.opens_ns >= _ON_TRIAL_NS:
            return None
        opens_ns = max(first.opens_ns, now_ns + _LOOK_NS)
        if self._breakers[first.name].opened_ns is None:
            if self._refusals.get(first.name, (0,))[0] <= 1:
                return opens_ns, False
            wait_ns = max(wait_ns, _S)
        since_ns = max(self._closed_since(name, now_ns) for name in self._breakers)
        return opens_ns, opens_ns - since_ns > wait_ns

    def _closed_since(self, name: Hashable, otherwise: int = 0) -> int:
        opened_ns = self._breakers[name].opened_ns
        if opened_ns is not None:
            return opened_ns
        # The breaker is not open, because a call succeeded since: it accepts calls, if not now.
        return self._refusals[name][1] if name in self._refusals else otherwise

    def unavailable(self, after_s: float) -> Unavailable:
        """Return the error of an item that is not called, because all endpoints are paused.

        ``after_s``: the seconds until one opens. The text has the error of the one paused last.
        """
        name = max(self._breakers, key=self._closed_since)
        error = self._breakers[name].last_error
        if error is None and name in self._refusals:
            error = self._refusals[name][2]
        where = f" of {name}" if len(self._breakers) > 1 else ""
        return Unavailable(
            f"not called: all endpoints are paused; the last error{where} was "
            f"{type(error).__name__}: {error}",
            after_s=after_s,
        )


def made_limit(settings: CallSettings, clock: Callable[[], int]) -> Limit:
    """Return a new `Limit` of calls in flight, as ``settings.max_concurrency`` says.

    Raises TypeError if ``max_concurrency`` is a callable that returns something else, and
    ValueError if that limit allows no call.
    """
    make = settings.max_concurrency
    if isinstance(make, int):
        return Fixed(make)
    return DelayTarget(clock=clock) if make is DelayTarget else made_by(make, "max_concurrency")
