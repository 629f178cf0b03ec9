"""The coroutines that make the calls, one item after the other.

A worker awaits the function directly: a call that does not wait needs no task, future or timer. A
worker that takes a call starts another worker, if there may be more to do. That one runs when the
others wait for answers, so a single worker makes all calls that do not wait. A worker without work
is parked. The number of workers is the largest number of calls at once so far.

One timer serves all waits; it is set to the earliest time. Time-outs are found by a scan of the
calls in flight. Scans are rare, since calls that began later time out later.

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
from asyncio import AbstractEventLoop, CancelledError, Future, Task, TimerHandle, sleep
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ackcore.calls.call_limits import TokenBucket
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.endpoints import Endpoints
from ackcore.calls.outcomes import CallCounts, CallOutcome, Retry
from ackcore.flow.consumers import FlowConsumer, Lease
from ackcore.retry import capped_doubling

_S = 1_000_000_000
#: Nanoseconds of calls that do not wait, after which other tasks of the loop run.
_TURN_NS = 2_000_000
#: Seconds from the first finished outcome to the delivery of all finished ones.
_HAND_OVER_S = 0.005
#: The shortest wait, so that a service that requests retries at once is not called for ever.
_SHORTEST_WAIT_NS = 10_000_000
_END: Any = object()


class _Call:
    """An item, and the state of its calls."""

    __slots__ = ("after_s", "avoid", "done", "error", "failures", "item", "made", "value", "waited")

    def __init__(self, item: Any) -> None:
        self.item = item
        self.value: Any = None
        self.error: BaseException | None = None
        self.after_s: float | None = None
        self.avoid: tuple[FlowConsumer, ...] = ()  # the endpoint at which it failed
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
    """The workers of a task and their calls, in one run after another.

    Parameters
    ----------
    function : callable
        Returns an awaitable.
    settings : CallSettings
    most : int
        The largest number of calls in flight.
    clock : callable
        Returns the time in nanoseconds. `now_ns` stops this clock while calls are in flight and the
        loop does not run.
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

        self._loop: AbstractEventLoop
        self._workers: list[_Worker] = []
        self._parked: list[_Worker] = []
        self._rousing = False
        self._takes_turns = False  # whether a worker yields to other tasks, and continues then
        self._last: _Worker | None = None  # the worker whose call began last
        self._turned_ns = self.now_ns()
        self._timer: TimerHandle | None = None
        self._timer_ns: float = math.inf
        self._hand_over: TimerHandle | None = None
        self._crash: BaseException | None = None

        self._items: Iterator[Any] = iter(())
        self._exhausted = True
        self._broken: BaseException | None = None  # the error that the items raised
        self._next: _Call | None = None  # pulled, and not called yet for lack of room
        self._order: deque[_Call] = deque()  # pulled and not yielded
        self._unfinished = 0  # the number of these without an outcome
        self._waits: list[tuple[int, int, _Call]] = []  # a heap by due time
        self._waits_begun = 0
        # Calls whose wait is over, by the endpoint that they avoid.
        self._due: dict[tuple[FlowConsumer, ...], deque[tuple[int, int, _Call]]] = {}

    def now_ns(self) -> int:
        """Return the time of a clock that stops while calls are out and the loop does not run."""
        return self._clock() - self._stood_ns

    def outcomes(self, loop: AbstractEventLoop, items: Iterator[Any]) -> Iterator[CallOutcome[Any]]:
        """Make the calls of a run, and yield the outcome of each; see `Calls.run`."""
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
                    yield CallOutcome(call.value, call.error, call.made, call.after_s)
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
        """Schedule one more worker. It runs when the active workers wait for answers."""
        if not self._rousing:
            self._rousing = True
            self._loop.call_soon(self._rouse)

    def _rouse(self) -> None:
        if self._takes_turns or not self.running:
            # The calls of that worker do not wait, so it can make the next ones itself.
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
            # An error neither of the function nor of the items, for example of a limit.
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
                # SystemExit as well: a call that exits must not end the process.
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
                self._turned_ns = now  # other workers ran meanwhile
            elif now - self._turned_ns > _TURN_NS:
                self._takes_turns = True
                await sleep(0)
                self._takes_turns = False
                self._turned_ns = self.now_ns()

    # --------------------------------------------------------------------------------- scheduling

    def _take(self, worker: _Worker) -> _Call | None:
        """Return the next call for a worker, with a lease; None if there is no work or no room."""
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
                    # The due calls avoid the endpoints with room.
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
        # Read the clock again: pulling the item may have taken time.
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
        """Return whether another worker would find a call now."""
        again = self._due or (self._waits and self._waits[0][0] <= now)
        if self._next is None and not again and (self._exhausted or self._is_full):
            return False
        if self._tokens is not None and self._tokens.ready_ns() > now:
            self._wake_at(self._tokens.ready_ns())
            return False
        return self.endpoints.has_room

    def _end_waits(self, now: int) -> None:
        """Move calls whose wait is over to those that are due."""
        while self._waits and self._waits[0][0] <= now:
            _, _, call = wait = heapq.heappop(self._waits)
            self._due.setdefault(call.avoid, deque()).append(wait)
        if self._waits:
            self._wake_at(self._waits[0][0])

    def _lease_again(self) -> tuple[_Call, Lease | None]:
        """Return the due call to repeat first, and a lease for it, or None without room.

        Calls that avoid the same endpoint have room, or no room, together. So only the first of
        each group is tried.
        """
        firsts = sorted(line[0] for line in self._due.values())
        for _, _, call in firsts:
            lease = self.endpoints.lease(None, None, call.avoid)
            if lease is not None:
                return call, lease
        return firsts[0][2], None

    def _end_due(self, call: _Call) -> None:
        """Remove a call from the front of its group of due calls."""
        line = self._due[call.avoid]
        line.popleft()
        if not line:
            del self._due[call.avoid]

    @property
    def _is_full(self) -> bool:
        """Whether outcomes must be yielded before more items are pulled."""
        return len(self._order) - self.endpoints.in_flight >= self._settings.max_buffered

    def _has_next(self) -> bool:
        """Return whether there is a new item that may be called."""
        return self._next is not None or self._pull()

    def _pull(self) -> bool:
        """Pull the next item. Return False if there is none, or it may not be pulled yet."""
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
        """Return the time until an endpoint opens, if that is too long to wait; else None."""
        # By the clock, a pause begins a little after the refusal.
        closed = self.endpoints.opens(now, self._wait_ns + _SHORTEST_WAIT_NS)
        if closed is None:
            return None  # a call that ends makes room
        opens_ns, too_late = closed
        if too_late:
            return opens_ns - now
        self._wake_at(opens_ns)
        return None

    # ---------------------------------------------------------------------------------- outcomes

    def _failed(self, worker: _Worker, call: _Call, error: BaseException | None) -> None:
        """Handle a call that raised, or timed out."""
        timed_out = worker.expired
        if timed_out or isinstance(error, CancelledError):
            # The cancellation is over, even if the function suppressed it.
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
        call.error = error  # in case it is not called again
        call.waited += wait_ns
        call.avoid = (worker.lease.consumer,)
        self._waits_begun += 1
        heapq.heappush(self._waits, (now + wait_ns, self._waits_begun, call))
        self._wake_at(self._waits[0][0])

    def _wait_of(self, call: _Call, error: BaseException) -> int | None:
        """Return the wait before a call is repeated in the task; None if it is not repeated."""
        settings = self._settings
        after_s: float | None = None
        if isinstance(error, Retry):
            after_s = error.asked_s
        elif isinstance(error, settings.retry_on):
            call.failures += 1
            if call.failures >= settings.max_attempts:
                return None
        else:
            return None
        base_ns, cap_ns = int(settings.backoff_s * _S), int(settings.max_backoff_s * _S)
        # Full jitter, for the reason that `ackcore.retry` gives.
        backoff_ns = int(capped_doubling(base_ns, call.made, cap_ns) * random.random())
        # The requested wait is a lower bound: a Retry-After of 0 must not become a busy loop.
        wait_ns = max(backoff_ns, int((after_s or 0.0) * _S), _SHORTEST_WAIT_NS)
        return wait_ns if call.waited + wait_ns <= self._wait_ns else None

    def _give_back(self, call: _Call, after_ns: int) -> None:
        """End a call that is not made, because no endpoint answers.

        If it was made before, its last error remains, and it counts as an attempt. Otherwise an
        item whose own failures open the breaker would be called for ever.
        """
        self.counts.given_back += 1
        call.after_s = after_ns / _S
        if not call.made:
            call.error = self.endpoints.out(call.after_s)
        self._finish(call)

    def _finish(self, call: _Call) -> None:
        """Store an outcome, and schedule its delivery in order."""
        call.done = True
        call.item, call.avoid = None, ()
        self._unfinished -= 1
        if not self._order[0].done:
            return
        if self._is_full or (self._exhausted and not self._unfinished):
            self._loop.stop()
        elif self._hand_over is None:
            # Several at a time: each delivery has a cost for the reader.
            self._hand_over = self._loop.call_later(_HAND_OVER_S, self._loop.stop)

    # ------------------------------------------------------------------------------------ timing

    def _wake_at(self, at_ns: float) -> None:
        """Schedule `_tick` at a time, or keep an earlier one."""
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
