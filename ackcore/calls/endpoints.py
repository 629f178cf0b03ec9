"""Where calls go: the windows of the endpoints, and their breakers."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Hashable

from ackcore.calls.breaker import Breaker, BreakerState
from ackcore.calls.errors import Retry, Unavailable
from ackcore.calls.settings import CallSettings
from ackcore.flow.choosers import Chooser
from ackcore.flow.consumers import Consumer, ConsumerState, Lease, state_of
from ackcore.flow.delay_target import DelayTarget
from ackcore.flow.limits import Fixed, Limit
from ackcore.flow.windows import Windows
from ackcore.retry import capped_doubling

_S = 1_000_000_000
#: An endpoint on trial is closed for so long, and opened by the end of that call.
_ON_TRIAL_NS = 1 << 62
#: No endpoint that refuses is paused for less.
_SHORTEST_PAUSE_NS = 1_000_000
#: One that goes on refusing is paused for so long at last, if it asks for less: a Retry-After of 0
#: must not become a busy loop.
_LONGEST_UNASKED_NS = _S
#: Windows look that often whether a pause is over.
_LOOK_NS = 2_000_000
#: An event loop's timer may be early by what its float of seconds leaves out.
_EARLY_NS = 1_000
#: Errors that say something of an endpoint whatever was asked of it.
_NO_CONNECTION = (ConnectionError, TimeoutError, socket.gaierror)


class Endpoints:
    """The endpoints of one task's calls; a single one, whose name is None, if none are named.

    Parameters
    ----------
    settings : CallSettings
    most : int
        Calls that may be out in all.
    clock : callable
        Nanoseconds.

    Attributes
    ----------
    named : bool
        Whether calls are told which one they go to.
    trips : int
        How often a breaker opened.
    lease : callable
        Returns room as `Windows.lease`, or None.
    """

    def __init__(self, settings: CallSettings, most: int, clock: Callable[[], int]) -> None:
        # Leases are never left to time out there: they end with their calls.
        self._windows = Windows(_made_chooser(settings), most, _ON_TRIAL_NS, clock)
        self._most = most
        self._settings = settings
        self._counts: tuple[type[BaseException], ...] = (*_NO_CONNECTION, *settings.retry_on)
        #: By endpoint that refuses: how often in a row, since when, and what it said last.
        self._refusals: dict[Hashable, tuple[int, int, Retry]] = {}
        self._breakers: dict[Hashable, Breaker] = {}
        self.named = settings.endpoints is not None
        self.trips = 0
        for name in (None,) if settings.endpoints is None else settings.endpoints:
            self._windows.join(name, _made_limit(settings, clock))
            reset_ns = int(settings.breaker_reset_s * _S)
            self._breakers[name] = Breaker(settings.breaker_failures, reset_ns)
        self._consumers = list(self._windows.consumers.values())
        self.lease = self._windows.lease

    @property
    def in_flight(self) -> int:
        """Calls that are out."""
        return self._windows.in_flight

    @property
    def has_room(self) -> bool:
        """Whether there is room for another call."""
        if self._windows.in_flight >= self._most:
            return False
        for consumer in self._consumers:  # noqa: SIM110 - a generator would cost more than this
            if consumer.has_room:
                return True
        return False

    def begin(self, lease: Lease, now_ns: int) -> bool:
        """A call goes out; return whether it is on trial."""
        lease.sent_ns = now_ns
        consumer = lease.consumer
        breaker = self._breakers[consumer.name]
        if breaker.state is not BreakerState.OPEN:
            return False
        breaker.probe()
        self._windows.pause(consumer.name, _ON_TRIAL_NS)
        return True

    def done(self, lease: Lease, on_trial: bool) -> None:
        """A call went well."""
        self._windows.done(lease)
        self._answered(lease.consumer, on_trial)
        if self._refusals:
            self._refusals.pop(lease.consumer.name, None)

    def failed(
        self, lease: Lease, on_trial: bool, error: BaseException, timed_out: bool, now_ns: int
    ) -> None:
        """A call raised, or took too long."""
        final = self._settings.is_final(error)
        refused = isinstance(error, Retry) and not final
        counts = isinstance(error, self._counts) and not refused and not final
        dropped = counts or refused
        self._windows.take_back(lease, dropped=dropped, again=False, timed_out=timed_out)
        consumer = lease.consumer
        if isinstance(error, Retry) and refused:
            self._answered(consumer, on_trial)
            self._refused(consumer, error, now_ns)
            return
        if not counts:
            # The endpoint answered; that it was asked in vain is none of its faults.
            self._answered(consumer, on_trial)
            return
        open_ns = self._breakers[consumer.name].failed(error, now_ns, on_trial)
        if open_ns is not None:
            self.trips += 1
            self._windows.resume(consumer)
            self._windows.pause(consumer.name, open_ns)

    def _refused(self, consumer: Consumer, error: Retry, now_ns: int) -> None:
        """Pause an endpoint that takes too much for too much: a little, and longer each time.

        At first for the time in which it serves one, which is when a service that lets so many pass
        in a second takes the next: by a Retry-After in whole seconds it would idle.  At last for as
        long as it asks, since one that goes on refusing means it, and for a second at least.
        """
        if self._settings.breaker_failures is None:
            return  # calls are all the same to what does not look after an endpoint
        if not consumer.is_open:
            return  # it was out already when the one came back that this pause is for
        times, since_ns, _ = self._refusals.get(consumer.name, (0, now_ns, error))
        self._refusals[consumer.name] = (times + 1, since_ns, error)
        asked_s = self._settings.breaker_reset_s if error.asked_s is None else error.asked_s
        most_ns = max(_LONGEST_UNASKED_NS, int(asked_s * _S))
        first_ns = max(_SHORTEST_PAUSE_NS, int(consumer.service.service_ns))
        self._windows.pause(consumer.name, capped_doubling(first_ns, times + 1, most_ns))

    def _answered(self, consumer: Consumer, on_trial: bool) -> None:
        if self._breakers[consumer.name].succeeded(on_trial):
            self._windows.resume(consumer)

    def reopen(self, now_ns: int) -> float:
        """Open those whose pause is over; return when the next one's is, infinity for never.

        A lease does that as well; but while the others are full, none is asked for.
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
        """Tell when the first opens, and whether that is too late; None if one is open.

        Parameters
        ----------
        now_ns : int
            The time now.
        wait_ns : float
            For how long a service that is out is waited for.

        Returns
        -------
        tuple of int, bool, or None
            Nanoseconds on the clock.  None as well while one is on trial: the end of that call is
            what opens it.

        Notes
        -----
        An endpoint that refused once, and serves else, is full, not out: its pause is waited for as
        room is, whatever ``wait_ns``.  So is one that goes on refusing, for a second: a record that
        is given back costs more.
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
        # A call that was out went well since: it takes calls, if not at this moment.
        return self._refusals[name][1] if name in self._refusals else otherwise

    def out(self, after_s: float) -> Unavailable:
        """Return the error of an item that is not called, since no endpoint answers."""
        name = max(self._breakers, key=self._closed_since)
        error = self._breakers[name].last_error
        if error is None and name in self._refusals:
            error = self._refusals[name][2]
        where = f", {name} last of all," if len(self._breakers) > 1 else ""
        return Unavailable(
            f"not called: no endpoint takes calls now{where} for {type(error).__name__}: {error}",
            after_s=after_s,
        )

    def state(self) -> list[tuple[ConsumerState, BreakerState]]:
        """Return how each does, and where its breaker stands."""
        return [(state_of(each), self._breakers[each.name].state) for each in self._consumers]


def _made_chooser(settings: CallSettings) -> Chooser:
    chooser = settings.chooser()
    if not hasattr(chooser, "choose"):
        raise TypeError(f"chooser must make a Chooser, got {type(chooser).__name__}")
    if chooser.keyed:
        raise TypeError(
            f"chooser must not go by keys, as {type(chooser).__name__} does: items have none; "
            "let the function choose the endpoint, or group by the key's field"
        )
    return chooser


def _made_limit(settings: CallSettings, clock: Callable[[], int]) -> Limit:
    make = settings.max_concurrency
    if isinstance(make, int):
        return Fixed(make)
    limit = DelayTarget(clock=clock) if make is DelayTarget else make()
    if not isinstance(limit, Limit):
        raise TypeError(
            "max_concurrency must make objects with limit and on_sample, got "
            f"{type(limit).__name__}"
        )
    return limit
