"""The coroutines that make the calls, one item after the other.

Workers call the function in place: a call that does not wait costs no task, no future and no timer.
One that takes a call rouses another, if there may be more to do; that happens when those at work
wait for answers, so that calls which wait for nothing are all made by one.  A worker that finds
nothing to do parks.  There are as many as calls were ever out at once.

All that is timed has a single timer, set to the earliest of what is due.  Time-outs are found by a
look at the calls that are out, which is seldom: one that began later times out later.

::

    items ──► pulled ──► out ──► done ──► yielded, in order
                ▲         │
                └─ waits ◄┘  Retry, or an error of retry_on: its place in the window is free
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from asyncio import CancelledError, Future, Task, TimerHandle, sleep
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ackcore.calls.endpoints import Endpoints
from ackcore.calls.errors import Retry
from ackcore.calls.event_loop import CallLoop
from ackcore.calls.outcomes import CallCounts, Outcome
from ackcore.calls.settings import CallSettings
from ackcore.calls.token_bucket import TokenBucket
from ackcore.flow.consumers import Consumer, Lease
from ackcore.retry import capped_doubling

_S = 1_000_000_000
#: Calls that do not wait give others a turn after so long.
_TURN_NS = 2_000_000
#: So long after the first outcome is there, those that are there are handed over.
_HAND_OVER_S = 0.005
#: No wait is shorter, so that a service that says "at once" for ever is not called for ever.
_SHORTEST_WAIT_NS = 10_000_000
_END: Any = object()


class _Call:
    """An item, and what has come of it so far."""

    __slots__ = ("after_s", "avoid", "done", "error", "failures", "item", "made", "value", "waited")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.value: Any = None
        self.error: BaseException | None = None
        self.after_s: float | None = None
        self.avoid: tuple[Consumer, ...] = ()  # where it failed
        self.made = self.failures = 0
        self.waited = 0  # nanoseconds
        self.done = False


class _Worker:
    """A coroutine that makes one call after the other."""

    __slots__ = ("deadline_ns", "expired", "lease", "on_trial", "parked", "task")

    task: Task[None]
    lease: Lease
    parked: Future[None]

    def __init__(self) -> None:
        self.deadline_ns: float = math.inf
        self.expired = False
        self.on_trial = False


class Workers:
    """Makes the calls of a task, run by run.

    Parameters
    ----------
    function : callable
        Returns what is awaited.
    settings : CallSettings
    most : int
        Calls that may be out in all.
    clock : callable
        Nanoseconds.  It stands still, as `now_ns` tells it, while calls are out that are not looked
        after.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        settings: CallSettings,
        most: int,
        clock: Callable[[], int],
    ) -> None:
        self._function = function
        self._settings = settings
        self._clock = clock
        self._stood_ns = 0
        self._timeout_ns = None if settings.timeout_s is None else int(settings.timeout_s * _S)
        self._wait_ns = settings.wait_in_task_s * _S
        self._tokens: TokenBucket | None = None
        if settings.rate_per_s is not None:
            self._tokens = TokenBucket(settings.rate_per_s, self.now_ns())
        self.counts = CallCounts()
        self.endpoints = Endpoints(settings, min(most, sys.maxsize), self.now_ns)
        self.running = False

        self._loop: CallLoop
        self._workers: list[_Worker] = []
        self._parked: list[_Worker] = []
        self._rousing = False
        self._takes_turns = False  # a worker lets others have theirs, and goes on then
        self._last: _Worker | None = None  # whose call began last
        self._turned_ns = self.now_ns()
        self._timer: TimerHandle | None = None
        self._timer_ns: float = math.inf
        self._hand_over: TimerHandle | None = None
        self._crash: BaseException | None = None

        self._items: Iterator[Any] = iter(())
        self._exhausted = True
        self._broken: BaseException | None = None  # what the items raised
        self._next: _Call | None = None  # pulled, and not called yet for want of room
        self._order: deque[_Call] = deque()  # pulled and not yielded
        self._unfinished = 0  # of these
        self._waits: list[tuple[int, int, _Call]] = []  # a heap by due time
        self._waits_begun = 0
        # Those whose wait is over, by the endpoint that they avoid.
        self._due: dict[tuple[Consumer, ...], deque[tuple[int, int, _Call]]] = {}

    def now_ns(self) -> int:
        """Return the time, which stands still while calls are out and the loop does not run."""
        return self._clock() - self._stood_ns

    def outcomes(self, loop: CallLoop, items: Iterator[Any]) -> Iterator[Outcome[Any]]:
        """Make the calls of a run, and yield what came of each; see `Calls.run`."""
        self._loop, self._items, self._exhausted, self.running = loop, items, False, True
        order = self._order
        try:
            while not (self._exhausted and not order):
                self._rouse_soon()
                loop.run_forever()
                if self._crash is not None:
                    raise self._crash
                if self._hand_over is not None:
                    self._hand_over.cancel()
                    self._hand_over = None
                since = self._clock()
                while order and order[0].done:
                    call = order.popleft()
                    yield Outcome(call.value, call.error, call.made, call.after_s)
                if self.endpoints.in_flight:
                    self._stood_ns += self._clock() - since
        finally:
            self.running = False
            self._items = iter(())
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken

    # ------------------------------------------------------------------------------ the workers

    def _rouse_soon(self) -> None:
        """Have one more worker look for something to do, when those at work wait for answers."""
        if not self._rousing:
            self._rousing = True
            self._loop.call_soon(self._rouse)

    def _rouse(self) -> None:
        if self._takes_turns or not self.running:
            # Its calls do not wait: it has more of them to make, and needs no other.
            self._rousing = False
        elif self._parked:
            self._parked.pop().parked.set_result(None)
        else:
            worker = _Worker()
            self._workers.append(worker)
            worker.task = self._loop.create_task(self._work(worker))
            worker.task.add_done_callback(self._worker_ended)

    def _worker_ended(self, task: Task[None]) -> None:
        error = CancelledError() if task.cancelled() else task.exception()
        if self.running:
            # Neither the function's nor the items': a limit's, say, or our own.
            self._crash = error
            self._loop.stop()

    async def _work(self, worker: _Worker) -> None:
        function, endpoints = self._function, self.endpoints
        self._rousing = False
        while True:
            call = self._take(worker)
            if call is None:
                worker.parked = self._loop.create_future()
                self._parked.append(worker)
                await worker.parked
                self._rousing = False
                continue
            self._last = worker
            value, error = None, None
            try:
                if endpoints.named:
                    value = await function(call.item, worker.lease.consumer.name)
                else:
                    value = await function(call.item)
            except KeyboardInterrupt:
                raise
            except BaseException as raised:
                # SystemExit as well: a call that exits must not take its process along.
                if not self.running:
                    raise
                error = raised
            worker.deadline_ns = math.inf
            if error is None and not worker.expired:
                endpoints.done(worker.lease, worker.on_trial)
                call.value, call.error = value, None
                self._finish(call)
            else:
                self._failed(worker, call, error)
            now = self.now_ns()
            if self._last is not worker:
                self._turned_ns = now  # others had their turn meanwhile
            elif now - self._turned_ns > _TURN_NS:
                self._takes_turns = True
                await sleep(0)
                self._takes_turns = False
                self._turned_ns = self.now_ns()

    # ------------------------------------------------------------------------------ what to do

    def _take(self, worker: _Worker) -> _Call | None:
        """Find something to do for a worker: a call, and room for it."""
        endpoints, tokens = self.endpoints, self._tokens
        while True:
            now = self.now_ns()
            if self._waits and self._waits[0][0] <= now:
                self._end_waits(now)
            if not self._due and self._next is None and not self._pull():
                return None
            if tokens is not None and tokens.ready_ns() > now:
                self._wake_at(tokens.ready_ns())
                return None
            if not self._due:
                call, lease = self._next, endpoints.lease(None)
            else:
                call, lease = self._lease_again()
                if lease is None and endpoints.has_room and self._has_next():
                    # Those that are due avoid what has room.
                    call, lease = self._next, endpoints.lease(None)
            assert call is not None
            after_ns = None if lease is not None else self._out_for_ns(now)
            if lease is None and after_ns is None:
                return None
            if call is self._next:
                self._next = None
            else:
                self._end_due(call)
            if lease is not None:
                break
            assert after_ns is not None
            self._give_back(call, after_ns)
        # By now, and not by when there was room: the item may have been waited for.
        now = self.now_ns()
        if tokens is not None:
            tokens.take(now)
        worker.lease = lease
        worker.on_trial = endpoints.begin(lease, now)
        call.made += 1
        self.counts.made += 1
        if self._timeout_ns is not None:
            worker.deadline_ns = now + self._timeout_ns
            self._wake_at(worker.deadline_ns)
        if not self._rousing and self._has_more(now):
            self._rouse_soon()
        return call

    def _has_more(self, now: int) -> bool:
        """Whether another worker would find something to do now."""
        again = self._due or (self._waits and self._waits[0][0] <= now)
        if self._next is None and not again and (self._exhausted or self._is_full):
            return False
        if self._tokens is not None and self._tokens.ready_ns() > now:
            self._wake_at(self._tokens.ready_ns())
            return False
        return self.endpoints.has_room

    def _end_waits(self, now: int) -> None:
        """Take in whose wait is over."""
        while self._waits and self._waits[0][0] <= now:
            _, _, call = wait = heapq.heappop(self._waits)
            self._due.setdefault(call.avoid, deque()).append(wait)
        if self._waits:
            self._wake_at(self._waits[0][0])

    def _lease_again(self) -> tuple[_Call, Lease | None]:
        """Return who is called again first, of those that are due, and room for it, if any.

        What avoids the same endpoint finds room, or finds none, together; so only the first of each
        is looked at.
        """
        firsts = sorted(line[0] for line in self._due.values())
        for _, _, call in firsts:
            lease = self.endpoints.lease(None, None, call.avoid)
            if lease is not None:
                return call, lease
        return firsts[0][2], None

    def _end_due(self, call: _Call) -> None:
        """The first of a line is called again, or given back."""
        line = self._due[call.avoid]
        line.popleft()
        if not line:
            del self._due[call.avoid]

    @property
    def _is_full(self) -> bool:
        """Whether outcomes must be yielded before more is pulled."""
        return len(self._order) - self.endpoints.in_flight >= self._settings.max_buffered

    def _has_next(self) -> bool:
        """Whether there is an item that was not called yet, and it may be pulled."""
        return self._next is not None or self._pull()

    def _pull(self) -> bool:
        """Have the next item called next; whether there is one, and it may be pulled."""
        if self._exhausted or self._is_full:
            return False
        since = self._clock()
        try:
            item = next(self._items, _END)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            item, self._broken = _END, error
        if self.endpoints.in_flight:
            self._stood_ns += self._clock() - since
        if item is _END:
            self._exhausted = True
            if not self._unfinished:
                self._loop.stop()
            return False
        self._next = _Call(item)
        self._order.append(self._next)
        self._unfinished += 1
        return True

    def _out_for_ns(self, now: int) -> int | None:
        """For how long no endpoint can be called, if that is too long to wait for."""
        # A pause begins a little after what it is for, by the clock.
        closed = self.endpoints.opens(now, self._wait_ns + _SHORTEST_WAIT_NS)
        if closed is None:
            return None  # a call that ends makes room
        opens_ns, too_late = closed
        if too_late:
            return opens_ns - now
        self._wake_at(opens_ns)
        return None

    # --------------------------------------------------------------------------- what came of it

    def _failed(self, worker: _Worker, call: _Call, error: BaseException | None) -> None:
        """A call raised, or took too long."""
        timed_out = worker.expired
        if timed_out or isinstance(error, CancelledError):
            # The cancellation is over, whatever the function made of it.
            worker.expired = False
            while worker.task.cancelling():
                worker.task.uncancel()
        if timed_out and (error is None or isinstance(error, CancelledError)):
            error = TimeoutError(f"no answer within {self._settings.timeout_s:g} s")
        assert error is not None
        now = self.now_ns()
        self.counts.failed += 1
        self.counts.timed_out += timed_out
        self.endpoints.failed(worker.lease, worker.on_trial, error, timed_out, now)
        final = self._settings.is_final(error)
        self._wake_at(self.endpoints.reopen(now))  # if it is paused for that
        wait_ns = None if final else self._wait_of(call, error)
        if wait_ns is None:
            call.error = error
            if isinstance(error, Retry) and not final:
                self.counts.given_back += 1
                call.after_s = error.asked_s
            self._finish(call)
            return
        self.counts.waited += 1
        call.error = error  # should it be the last
        call.waited += wait_ns
        call.avoid = (worker.lease.consumer,)
        self._waits_begun += 1
        heapq.heappush(self._waits, (now + wait_ns, self._waits_begun, call))
        self._wake_at(self._waits[0][0])

    def _wait_of(self, call: _Call, error: BaseException) -> int | None:
        """How long a call waits in the task until it is made again; None if it is not."""
        settings = self._settings
        after_s: float | None = None
        if isinstance(error, Retry):
            after_s = error.asked_s
        elif isinstance(error, settings.retry_on):
            call.failures += 1
            if call.failures >= settings.attempts:
                return None
        else:
            return None
        base_ns, cap_ns = int(settings.backoff_s * _S), int(settings.max_backoff_s * _S)
        # Full jitter, for the reason that `ackcore.retry` gives.
        backoff_ns = int(capped_doubling(base_ns, call.made, cap_ns) * random.random())
        # What a service asks for is a lower bound: a Retry-After of 0 must not become a busy loop.
        wait_ns = max(backoff_ns, int((after_s or 0.0) * _S), _SHORTEST_WAIT_NS)
        return wait_ns if call.waited + wait_ns <= self._wait_ns else None

    def _give_back(self, call: _Call, after_ns: int) -> None:
        """End a call that is not made, since no endpoint answers.

        One that was made before failed of that.  It counts as an attempt, or an item whose own
        failures open the breaker would be called for ever.
        """
        self.counts.given_back += 1
        call.after_s = after_ns / _S
        if not call.made:
            call.error = self.endpoints.out(call.after_s)
        self._finish(call)

    def _finish(self, call: _Call) -> None:
        """Have an outcome handed over when its turn comes."""
        call.done = True
        call.item, call.avoid = None, ()
        self._unfinished -= 1
        if not self._order[0].done:
            return
        if self._is_full or (self._exhausted and not self._unfinished):
            self._loop.stop()
        elif self._hand_over is None:
            # Not one by one: whoever reads them has a cost for each time.
            self._hand_over = self._loop.call_later(_HAND_OVER_S, self._loop.stop)

    # ------------------------------------------------------------------------------------ timing

    def _wake_at(self, at_ns: float) -> None:
        """Have `_tick` called at a time, or earlier."""
        if at_ns >= self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = at_ns
        self._timer = self._loop.call_at(at_ns / 1e9, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_ns = None, math.inf
        now = self.now_ns()
        earliest: float = math.inf
        for worker in self._workers:
            deadline_ns = worker.deadline_ns
            if deadline_ns <= now:
                worker.deadline_ns = math.inf
                worker.expired = True
                worker.task.cancel()
            elif deadline_ns < earliest:
                earliest = deadline_ns
        if self._waits and self._waits[0][0] > now:
            earliest = min(earliest, self._waits[0][0])
        earliest = min(earliest, self.endpoints.reopen(now))
        if earliest < math.inf:
            self._wake_at(earliest)
        self._rouse_soon()
