"""The calls of a task that wait to be made, by key, and the order in which keys are served.

Each key has its own endpoints, rate and breakers. Without keys there is a single queue.

The next call belongs to the key with the fewest calls in flight; among equals, to the one that was
served least recently. So the keys with waiting calls have equal parts of the window, however many
calls they have and however long these take. A key whose own limits allow no call now is put aside
until one of its calls ends, or a time is reached::

    calls ──► ready, by calls in flight ──► the next call
                ▲        │
                └─ aside ◄┘  its window is full: until a call ends
                             its rate or a pause: until a time
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from ackcore.calls.call_settings import CallSettings
from ackcore.calls.endpoints import Endpoints, made_limit
from ackcore.calls.rate_limits import TokenBucket
from ackcore.calls.usage import CallCounts
from ackcore.flow.consumers import FlowConsumer, Lease
from ackcore.flow.limits import DelayTarget, Limit

#: The number of keys without calls whose state is kept.
KEPT_KEYS = 1024
#: The shortest wait, so that a service that requests retries at once is not called for ever.
SHORTEST_WAIT_NS = 10_000_000
#: The seconds of tokens that calls may use at once. Less would be lost whenever a call used fewer
#: tokens than estimated.
_BURST_S = 1.0


class Call:
    """An item: its calls so far, and its outcome once it is done."""

    __slots__ = (
        "after_s",
        "avoid",
        "done",
        "error",
        "failures",
        "item",
        "made",
        "queue",
        "value",
        "waited",
    )

    queue: KeyQueue

    def __init__(self, item: Any) -> None:
        self.item = item
        self.value: Any = None
        self.error: BaseException | None = None
        self.after_s: float | None = None
        self.avoid: tuple[FlowConsumer, ...] = ()  # the endpoint at which it failed
        self.made = self.failures = 0  # calls made; those that raised one of ``retry_on``
        self.waited = 0  # nanoseconds between its calls, so far
        self.done = False


@dataclass(eq=False, repr=False)
class KeyQueue:
    """The waiting calls of one key, and its own limits.

    Attributes: ``tokens``: the limit of begun calls. ``spent``: the limit of tokens that calls
    report. ``is_rated``: whether it has one of these limits. ``estimate``: the mean number of
    tokens of its last calls; 0 before the first report. ``new``: calls that were not made yet.
    ``due``: calls to repeat whose wait is over, by the endpoint that they avoid, in the order in
    which they came due. Each entry has the due time, a number and the call. ``unfinished``: the
    number of calls without an outcome, not counted for the only queue. ``rank``: the number of
    calls in flight when the queue became ready. It is -1 if the queue is aside or has no waiting
    calls. For the only queue, it is 0 or -1. ``wakes_ns``: the time of the earliest scheduled
    `FairQueues.wake` for the queue, infinite without one.
    """

    key: Hashable
    _make: Callable[[], Endpoints]
    tokens: TokenBucket | None
    spent: TokenBucket | None
    estimate: float = 0.0
    new: deque[Call] = field(default_factory=deque)
    due: dict[tuple[FlowConsumer, ...], deque[tuple[int, int, Call]]] = field(default_factory=dict)
    unfinished: int = 0
    rank: int = -1
    wakes_ns: float = math.inf
    _endpoints: Endpoints | None = None

    def __post_init__(self) -> None:
        self.is_rated = self.tokens is not None or self.spent is not None

    @property
    def endpoints(self) -> Endpoints:
        """The key's endpoints, made at the first use: they take 10 times a waiting key's memory."""
        endpoints = self._endpoints
        if endpoints is None:
            endpoints = self._endpoints = self._make()
        return endpoints

    @property
    def in_flight(self) -> int:
        """The number of calls in flight."""
        return 0 if self._endpoints is None else self._endpoints.in_flight

    def reopen(self, now: int) -> float:
        """Open endpoints whose pause is over. Return the end of the next pause, or infinity."""
        return math.inf if self._endpoints is None else self._endpoints.reopen(now)

    def ready_ns(self) -> int:
        """Return the time at which the key's rate limits allow a call; it may be in the past."""
        tokens, spent = self.tokens, self.spent
        ready_ns = 0 if tokens is None else tokens.ready_ns()
        return ready_ns if spent is None else max(ready_ns, spent.ready_ns())

    def begin(self, now: int) -> float:
        """Take a call, and its estimated tokens, from the limits; return the estimated tokens."""
        if self.tokens is not None:
            self.tokens.take(now)
        if self.spent is not None:
            self.spent.take(now, self.estimate)
        return self.estimate

    def end(self, estimate: float, tokens: float | None, refused: bool) -> None:
        """Replace the estimated tokens of a call that ended by those that it reported.

        This also updates the mean `estimate`. Without a report, the limit gets the estimated tokens
        of a ``refused`` call (it raised a `Retry`) back; those of any other call stay taken.
        """
        if self.spent is None:
            return
        if tokens is not None:
            self.spent.correct(tokens - estimate)
            self.estimate += (tokens - self.estimate) / (8 if self.estimate else 1)
        elif refused:
            self.spent.correct(-estimate)

    def lease(self) -> tuple[Call, Lease | None]:
        """Return the next waiting call and its lease; None for the lease if no endpoint has room.

        A call must be waiting, and stays in the queue until `remove`. Calls to repeat come first,
        and then new ones. Only the first of the calls that avoid the same endpoint is tried: there
        is room for all of them or for none.
        """
        if not self.due:
            return self.new[0], self.endpoints.lease(None)
        firsts = sorted(line[0] for line in self.due.values())
        for _, _, call in firsts:
            lease = self.endpoints.lease(None, None, call.avoid)
            if lease is not None:
                return call, lease
        if self.new and self.endpoints.has_room:
            # The due calls avoid the endpoints with room.
            return self.new[0], self.endpoints.lease(None)
        return firsts[0][2], None

    def waiting(self) -> Call:
        """Return one of the waiting calls, whether or not an endpoint has room for it."""
        return self.new[0] if self.new else next(iter(self.due.values()))[0][2]

    def remove(self, call: Call) -> None:
        """Remove the call that `lease` or `waiting` returned."""
        if self.new and self.new[0] is call:
            self.new.popleft()
            return
        line = self.due[call.avoid]
        line.popleft()
        if not line:
            del self.due[call.avoid]


class FairQueues:
    """The queues of all keys.

    ``most``: the largest number of calls of a key in flight. ``clock``: returns the time in
    nanoseconds. ``counts``: the task's counts, which breakers update. ``wake_at``: called with the
    time, in nanoseconds, at which `wake` must be called. Raises TypeError if a setting makes an
    object that is no `Limit`, and ValueError if that allows no call.

    Attributes: ``window``: the `Limit` of all keys' calls in flight together; None without keys.
    ``only``: the single queue without keys; None with keys.
    """

    def __init__(
        self,
        settings: CallSettings,
        most: int,
        clock: Callable[[], int],
        counts: CallCounts,
        wake_at: Callable[[float], None],
    ) -> None:
        limit = settings.limit
        self._most = most
        self._clock = clock
        self._counts = counts
        self._wake_at = wake_at
        self._rate = None if limit is None else limit.calls_per_s
        self._spend = None if limit is None else limit.tokens_per_min
        self._wait_ns = settings.wait_in_task_s * 1e9
        self.window: Limit | None = None
        if limit is not None and limit.per is not None:
            self.window = made_limit(settings, clock)
            own = DelayTarget if limit.concurrency is None else limit.concurrency
            settings = replace(settings, max_concurrency=own)
        self._settings = settings
        self._ready: dict[int, OrderedDict[KeyQueue, None]] = {}  # by the calls in flight
        self._aside: list[tuple[float, int, KeyQueue]] = []  # to look at: a heap by time
        self._looks = 0
        self._by_key: dict[Hashable, KeyQueue] = {}
        self._idle: OrderedDict[KeyQueue, None] = OrderedDict()  # longest first
        self._debts: dict[Hashable, TokenBucket] = {}  # of forgotten keys: too many tokens used
        self._most_debts = KEPT_KEYS
        self.only: KeyQueue | None = None
        if self.window is None:
            self.only = self._made(None)
            self.only.rank = 0
            _ = self.only.endpoints  # raises for bad settings

    def _made(self, key: Hashable) -> KeyQueue:
        tokens = None if self._rate is None else TokenBucket(self._rate, self._clock())
        spent = None
        if self._spend is not None:
            spent = self._debts.pop(key, None)
            if spent is None:
                spent = TokenBucket(self._spend / 60, self._clock(), _BURST_S)
        return KeyQueue(key, self._made_endpoints, tokens, spent)

    def _made_endpoints(self) -> Endpoints:
        return Endpoints(self._settings, self._most, self._clock, self._counts)

    @property
    def has_ready(self) -> bool:
        """Whether a key has waiting calls and is not put aside; False without keys."""
        return bool(self._ready)

    # ------------------------------------------------------------------------------- the calls

    def add(self, key: Hashable, call: Call) -> None:
        """Add a call that was not made yet to the queue of its key, and set ``call.queue``."""
        queue = self.only
        if queue is not None:
            call.queue = queue
            queue.new.append(call)
            return
        queue = self._by_key.get(key)
        if queue is None:
            queue = self._by_key[key] = self._made(key)
        elif not queue.unfinished:
            del self._idle[queue]
        call.queue = queue
        queue.unfinished += 1
        queue.new.append(call)
        if queue.rank < 0:
            self._put(queue)

    def repeat(self, wait: tuple[int, int, Call]) -> None:
        """Add a call to repeat: its due time, which is over, a serial number, and the call."""
        call = wait[2]
        queue = call.queue
        queue.due.setdefault(call.avoid, deque()).append(wait)
        if queue.rank < 0:
            self.changed(queue)

    def finished(self, queue: KeyQueue) -> None:
        """Record that a call has an outcome. It must not be called without keys.

        If more than `KEPT_KEYS` keys have no calls, the one without calls for longest is forgotten.
        """
        queue.unfinished -= 1
        if queue.unfinished:
            return
        self._idle[queue] = None
        if len(self._idle) > KEPT_KEYS:
            gone, _ = self._idle.popitem(last=False)
            del self._by_key[gone.key]
            if gone.spent is not None:
                self._keep_debt(gone.key, gone.spent)

    def _keep_debt(self, key: Hashable, spent: TokenBucket) -> None:
        """Keep the bucket of a forgotten key if its calls used more tokens than its limit."""
        now = self._clock()
        if spent.ready_ns() <= now:
            return
        self._debts[key] = spent
        if len(self._debts) > self._most_debts:
            self._debts = {one: debt for one, debt in self._debts.items() if debt.ready_ns() > now}
            self._most_debts = 2 * len(self._debts) + KEPT_KEYS

    # ------------------------------------------------------------------------------- the order

    def next(self, now: int) -> tuple[KeyQueue, int | None] | None:
        """Return the queue of the next call, and put aside queues that can begin no call now.

        Returns None if all queues with calls are aside. The second value is None if an endpoint of
        the queue has room. Otherwise all endpoints stay closed for longer than a call may wait in
        the task, and the value is the nanoseconds until one opens. The `window` is not considered.
        """
        while (queue := self._first()) is not None:
            if queue.is_rated and (ready_ns := queue.ready_ns()) > now:
                self.look_at(queue, ready_ns)
            elif (endpoints := queue.endpoints).has_room:
                return queue, None
            else:
                # By the clock, a pause begins a little after the refusal.
                closed = endpoints.opens(now, self._wait_ns + SHORTEST_WAIT_NS)
                if closed is not None:
                    opens_ns, too_late = closed
                    if too_late:
                        return queue, opens_ns - now
                    self.look_at(queue, opens_ns)
            self.put_aside(queue)
        return None

    def changed(self, queue: KeyQueue) -> None:
        """Put a queue where it belongs after a call of it began, ended, was given back or came due.

        That is behind the queues with as many calls in flight; nowhere if no call waits in it.
        """
        if queue is self.only:
            queue.rank = 0
            return
        if queue.rank >= 0:
            self.put_aside(queue)
        if queue.new or queue.due:
            self._put(queue)

    def put_aside(self, queue: KeyQueue) -> None:
        """Make `next` skip a queue, until `changed` adds it to the ready queues again."""
        if queue is not self.only:
            equals = self._ready[queue.rank]
            del equals[queue]
            if not equals:
                del self._ready[queue.rank]
        queue.rank = -1

    def look_at(self, queue: KeyQueue, at_ns: float) -> None:
        """Schedule `wake` for a queue at a time, unless it is infinite, or one is earlier."""
        if at_ns < queue.wakes_ns:
            queue.wakes_ns = at_ns
            self._looks += 1
            heapq.heappush(self._aside, (at_ns, self._looks, queue))
            self._wake_at(at_ns)

    def wake(self, now: int) -> None:
        """Make queues ready whose scheduled time has come; open endpoints whose pause is over."""
        aside = self._aside
        while aside and aside[0][0] <= now:
            _, _, queue = heapq.heappop(aside)
            queue.wakes_ns = math.inf
            self.look_at(queue, queue.reopen(now))
            if queue.rank < 0:
                self.changed(queue)
        if aside:
            self._wake_at(aside[0][0])

    def _first(self) -> KeyQueue | None:
        only = self.only
        if only is not None:
            return only if only.rank >= 0 and (only.new or only.due) else None
        if not self._ready:
            return None
        return next(iter(self._ready[min(self._ready)]))

    def _put(self, queue: KeyQueue) -> None:
        """Add a queue to the ready queues, behind those with as many calls in flight."""
        queue.rank = rank = queue.in_flight
        self._ready.setdefault(rank, OrderedDict())[queue] = None
