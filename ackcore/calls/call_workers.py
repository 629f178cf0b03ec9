"""The coroutines that make the calls, one item after the other.

A worker awaits the function directly: a call that does not wait needs no task, future or timer. A
worker that takes a call starts another worker, if there may be more to do. That one runs when the
others wait for answers, so a single worker makes all calls that do not wait. A worker without work
is parked. The number of workers is the largest number of calls at once so far.

One timer serves all waits; it is set to the earliest time. Time-outs are found by a scan of the
calls in flight. Scans are rare, since calls that began later time out later.
"""

from __future__ import annotations

import heapq
import math
import random
from asyncio import AbstractEventLoop, CancelledError, Future, Task, TimerHandle, sleep
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from ackcore.calls.call_queues import SHORTEST_WAIT_NS, Call, FairQueues
from ackcore.calls.call_settings import CallSettings
from ackcore.calls.outcomes import CallOutcome, Retry
from ackcore.calls.usage import USAGE, CallCounts, Usage, text_of
from ackcore.flow.consumers import Lease
from ackcore.flow.limits import check_room
from ackcore.retry import capped_doubling

_S = 1_000_000_000
#: The longest wait after an item's first failure, and after any. It doubles in between.
_BACKOFF_NS, _MAX_BACKOFF_NS = _S // 10, 5 * _S
#: Nanoseconds of calls that do not wait, after which other tasks of the loop run.
_TURN_NS = 2_000_000
#: Seconds from the first finished outcome to the delivery of all finished ones.
_HAND_OVER_S = 0.005
#: The largest number of outcomes that are kept until an earlier one is complete.
MOST_KEPT = 1024
#: With keys, the largest number of items without an outcome, or kept ones.
_READ_AHEAD = 1 << 16
_END: Any = object()


class _Worker:
    """The state of a coroutine that makes one call after the other."""

    __slots__ = ("deadline_ns", "estimate", "expired", "lease", "on_trial", "parked", "task")

    task: Task[None]
    lease: Lease
    parked: Future[None]

    def __init__(self) -> None:
        self.deadline_ns: float = math.inf
        self.estimate = 0.0  # of the tokens of its call
        self.expired = False
        self.on_trial = False


class Workers:
    """The workers of a task, which make its calls in one run after another.

    ``function``: returns an awaitable. ``most``: the largest number of calls in flight. ``clock``:
    returns the time in nanoseconds; `now_ns` stops while calls are in flight and the loop does not
    run. ``key_of``: returns the key of an item; used if `CallSettings.limit` has keys.
    ``refusal``: called before each call. If it returns a `Retry`, the call is not made.

    Attributes: ``in_flight``: the number of calls in flight.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        settings: CallSettings,
        most: int,
        clock: Callable[[], int],
        key_of: Callable[[Any], Hashable],
        refusal: Callable[[], Retry | None] | None = None,
    ) -> None:
        self._function = function
        self._settings = settings
        self._clock = clock
        self._stood_ns = 0
        self._timeout_ns = None if settings.timeout_s is None else int(settings.timeout_s * _S)
        self._wait_ns = settings.wait_in_task_s * _S
        self._most = most
        self._named = settings.endpoints is not None
        self.counts = CallCounts()
        self.queues = FairQueues(settings, self._most, self.now_ns, self.counts, self._wake_at)
        self._window = self.queues.window
        self._key_of = key_of
        self._refusal = refusal
        limit = settings.limit
        self._needs_usage = limit is not None and (
            limit.tokens_per_min is not None or limit.cost_per_run is not None
        )
        self._most_kept = MOST_KEPT if self._window is None else _READ_AHEAD
        self.in_flight = 0
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
        self._order: deque[Call] = deque()  # pulled and not yielded
        self._unfinished = 0  # the number of these without an outcome
        self._waits: list[tuple[int, int, Call]] = []  # a heap by due time
        self._waits_begun = 0

    def now_ns(self) -> int:
        """Return the time of a clock that stops while calls are in flight and no loop runs."""
        return self._clock() - self._stood_ns

    def outcomes(self, loop: AbstractEventLoop, items: Iterator[Any]) -> Iterator[CallOutcome[Any]]:
        """Yield the outcome of each item's call, in order; then raise an error of ``items``.

        Any error outside of the function and the items, as of a limit, is raised at once.
        """
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
                if self.in_flight:
                    self._stood_ns += self._clock() - since
        finally:
            self.running = False
            self._items = iter(())
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken

    # ------------------------------------------------------------------------------ the workers

    def _rouse_soon(self) -> None:
        """Schedule one more worker, unless one is scheduled. It runs when the active ones wait."""
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
        function, named = self._function, self._named
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
            value, error, usage = None, None, None
            if self._needs_usage:
                key = "" if self._window is None else text_of(call.queue.key)
                USAGE.set(usage := Usage(key, self.counts.used))
            try:
                if named:
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
            now = self.now_ns()
            if self._window is not None and not isinstance(error, Retry):
                # A refusal concerns its key alone.
                self._window.on_sample(
                    now - worker.lease.sent_ns, self.in_flight, dropped=worker.expired
                )
            self.in_flight -= 1
            # While calls are in flight, their answers may raise the limit.
            if self._window is not None and not self.in_flight:
                check_room(self._window)
            if usage is not None:
                settings = self._settings
                failed = error is not None and not settings.is_of_call(error)
                usage.end(error is None, failed)
                call.queue.end(worker.estimate, usage.tokens, isinstance(error, Retry))
            if error is None and not worker.expired:
                call.queue.endpoints.done(worker.lease, worker.on_trial)
                call.value, call.error = value, None
                self._finish(call)
            else:
                self._failed(worker, call, error)
            if self._window is None:
                call.queue.rank = 0  # what `FairQueues.changed` does
            else:
                self.queues.changed(call.queue)
            if self._last is not worker:
                self._turned_ns = now  # other workers ran meanwhile
            elif now - self._turned_ns > _TURN_NS:
                self._takes_turns = True
                await sleep(0)
                self._takes_turns = False
                self._turned_ns = self.now_ns()

    # --------------------------------------------------------------------------------- scheduling

    def _take(self, worker: _Worker) -> Call | None:
        """Return the next call for a worker; None if none can begin now.

        The call counts as begun and in flight, at the endpoint of ``worker.lease``. Items that no
        endpoint takes, or that the budget refuses, are finished on the way, without a call.
        """
        queues = self.queues
        while True:
            now = self.now_ns()
            if self._waits and self._waits[0][0] <= now:
                while self._waits and self._waits[0][0] <= now:
                    queues.repeat(heapq.heappop(self._waits))
                if self._waits:
                    self._wake_at(self._waits[0][0])
            only = queues.only
            if only is None:  # pull items, but not for long: answers are not handled meanwhile
                since = self._clock()
                while self._pull() and self._clock() - since < _TURN_NS:
                    pass
            elif not only.new:
                self._pull()
            if self._window is not None and self._is_window_full:
                return None
            found = queues.next(now)
            if found is None:
                return None
            queue, after_ns = found
            refusal = None if self._refusal is None else self._refusal()
            if refusal is not None:
                call = queue.waiting()
                queue.remove(call)
                self._give_back(call, refusal.asked_s, refusal)
                queues.changed(queue)
                continue
            call, lease = queue.lease()
            if lease is None and after_ns is None:
                queues.put_aside(queue)  # its calls avoid the endpoints with room
                continue
            queue.remove(call)
            if lease is not None:
                break
            assert after_ns is not None
            after_s = after_ns / _S
            self._give_back(call, after_s, queue.endpoints.unavailable(after_s))
            queues.changed(queue)
        # Read the clock again: pulling the item may have taken time.
        now = self.now_ns()
        if queue.is_rated:
            worker.estimate = queue.begin(now)
        worker.lease = lease
        worker.on_trial = queue.endpoints.begin(lease, now)
        self.in_flight += 1
        if self._window is not None:
            queues.changed(queue)
        call.made += 1
        if self._timeout_ns is not None:
            worker.deadline_ns = now + self._timeout_ns
            self._wake_at(worker.deadline_ns)
        if not self._rousing and self._has_more(now):
            self._rouse_soon()
        return call

    @property
    def _is_window_full(self) -> bool:
        """Whether all keys together have no room for another call."""
        assert self._window is not None
        return self.in_flight >= min(self._most, self._window.limit)

    def _has_more(self, now: int) -> bool:
        """Return whether another worker may begin a call now, possibly that of an unread item."""
        if self._window is not None and self._is_window_full:
            return False
        if self.queues.next(now) is not None or (self._waits and self._waits[0][0] <= now):
            return True
        if self._exhausted or self._is_full:
            return False
        only = self.queues.only
        if only is None:
            return True
        if only.is_rated and (ready_ns := only.ready_ns()) > now:
            self._wake_at(ready_ns)
            return False
        return only.endpoints.has_room

    @property
    def _is_full(self) -> bool:
        """Whether outcomes must be yielded before more items are pulled."""
        return len(self._order) - self.in_flight >= self._most_kept

    def _pull(self) -> bool:
        """Pull the next item into a queue. Return False if there is none, or `_is_full`.

        If the items raise, there are no more, and `outcomes` raises the error. If the key of an
        item raises, that error is its outcome.
        """
        if self._exhausted or self._is_full:
            return False
        since = self._clock()
        try:
            item = next(self._items, _END)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            item, self._broken = _END, error
        if self.in_flight:
            self._stood_ns += self._clock() - since
        if item is _END:
            self._exhausted = True
            if not self._unfinished:
                self._loop.stop()
            return False
        call = Call(item)
        self._order.append(call)
        self._unfinished += 1
        key = None
        if self._window is not None:
            try:
                key = self._key_of(item)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # user code
                call.error = error
                self._deliver(call)
                return True
        self.queues.add(key, call)
        return True

    # ---------------------------------------------------------------------------------- outcomes

    def _failed(self, worker: _Worker, call: Call, error: BaseException | None) -> None:
        """Schedule the repetition of a call that failed or timed out, or end its item.

        This also counts the failure for its endpoint, which may be paused. ``error``: the exception
        that the function raised; None if it returned after the time-out.
        """
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
        queue = call.queue
        queue.endpoints.failed(worker.lease, worker.on_trial, error, timed_out, now)
        final = self._settings.is_final(error)
        self.queues.look_at(queue, queue.endpoints.reopen(now))  # if it is paused for that
        wait_ns = None if final else self._wait_of(call, error)
        if wait_ns is None:
            call.error = error
            if isinstance(error, Retry) and not final:
                call.after_s = error.asked_s
            self._finish(call)
            return
        call.error = error  # in case it is not called again
        call.waited += wait_ns
        call.avoid = (worker.lease.consumer,)
        self._waits_begun += 1
        heapq.heappush(self._waits, (now + wait_ns, self._waits_begun, call))
        self._wake_at(self._waits[0][0])

    def _wait_of(self, call: Call, error: BaseException) -> int | None:
        """Return the nanoseconds until a call is repeated in the task; None if it is not.

        This counts a failure if the error is one of ``retry_on``.
        """
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
        # Full jitter, for the reason that `ackcore.retry` gives.
        longest_ns = capped_doubling(_BACKOFF_NS, call.made, _MAX_BACKOFF_NS)
        backoff_ns = int(longest_ns * random.random())
        # The requested wait is a lower bound: a Retry-After of 0 must not become a busy loop.
        wait_ns = max(backoff_ns, int((after_s or 0.0) * _S), SHORTEST_WAIT_NS)
        return wait_ns if call.waited + wait_ns <= self._wait_ns else None

    def _give_back(self, call: Call, after_s: float | None, error: Retry) -> None:
        """Finish an item that is not called now, because no endpoint answers or no money is left.

        ``error`` is its outcome if it was never called. Otherwise its last error is the outcome,
        which counts as an attempt: an item that opens the breaker by itself is not called for ever.
        """
        call.after_s = after_s
        if not call.made:
            call.error = error
        self._finish(call)

    def _finish(self, call: Call) -> None:
        """End an item whose outcome is set, so that it is yielded when all earlier ones are."""
        if self._window is not None:
            self.queues.finished(call.queue)
        self._deliver(call)

    def _deliver(self, call: Call) -> None:
        call.done = True
        call.item, call.avoid = None, ()
        self._unfinished -= 1
        if not self._order[0].done:
            return
        stuck = self._is_full and (self._window is None or not self.queues.has_ready)
        if stuck or (self._exhausted and not self._unfinished):
            self._loop.stop()
        elif self._hand_over is None:
            # Several at a time: each delivery has a cost for the reader.
            self._hand_over = self._loop.call_later(_HAND_OVER_S, self._loop.stop)

    # ------------------------------------------------------------------------------------ timing

    def _wake_at(self, at_ns: float) -> None:
        """Set the timer for `_tick` to a time in nanoseconds, unless it is earlier already."""
        if at_ns >= self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = at_ns
        # The loop runs timers that are due within its resolution, a nanosecond.
        self._timer = self._loop.call_at((at_ns + 1) / 1e9, self._tick)

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
        if earliest < math.inf:
            self._wake_at(earliest)
        self.queues.wake(now)
        self._rouse_soon()
