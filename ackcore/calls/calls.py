"""Many calls at once within one task, in one event loop, and their outcomes in order."""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable
from inspect import iscoroutine
from typing import Any, Generic, Self, TypeVar

from ackcore.calls.call_settings import MAX_THREADS, CallSettings
from ackcore.calls.call_workers import Workers
from ackcore.calls.outcomes import CallOutcome, Retry, Value
from ackcore.calls.threads import CallThreads, is_async
from ackcore.calls.usage import CallCounts

Item = TypeVar("Item")

#: Seconds for cancelled coroutines to release their resources.
_GRACE_S = 2.0


class Calls(Generic[Item, Value]):
    """Calls of one function, many at once, with a window, limits, time-outs, retries and a breaker.

    Use it in one thread, and close it, for example by ``with``.

    ``function``: called with an item, and with an endpoint if the settings name endpoints. A
    coroutine function is awaited in the event loop of this object; any other function is called in
    threads. If the function is also an (asynchronous) context manager, it is entered in that loop
    before the first call, and left by `close`. ``clock``: returns the time in nanoseconds, as an
    int; by default `time.monotonic_ns`. ``selector``: the selector of the event loop. ``key_of``:
    returns the key of an item; by default `RateLimit.key_of` of the settings' limit. ``refusal``:
    called before each call. If it returns a `Retry`, the item is not called, and ends with it, or
    with the error of its last call if it was called before.

    Raises TypeError if a setting makes an object that is no limit, and ValueError if it allows no
    call.

    The event loop runs in the thread that reads the outcomes, and only while that thread waits for
    an outcome. No answer is handled while the reader has control, or while the items make it wait.
    While calls are in flight, that time counts neither for time-outs nor for round trips.

    A few coroutines make all calls, each one call after the other. So a context variable that the
    function sets, and does not reset, is visible to later calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        settings: CallSettings | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        selector: selectors.BaseSelector | None = None,
        key_of: Callable[[Item], Hashable] | None = None,
        refusal: Callable[[], Retry | None] | None = None,
    ) -> None:
        settings = CallSettings() if settings is None else settings
        self._function = function
        self._threads: CallThreads | None = None
        most = sys.maxsize
        if not is_async(function):
            # Calls without a free thread would be queued, and time out in the queue.
            most = settings.thread_count()
            # More threads than calls: a call that timed out keeps its thread.
            self._threads = CallThreads(function, MAX_THREADS, "ackcore-call")
        make = function if self._threads is None else self._in_thread
        if key_of is None:
            key_of = (lambda item: None) if settings.limit is None else settings.limit.key_of
        self._workers = Workers(make, settings, most, clock, key_of, refusal)
        self._loop = CallLoop(self._workers.now_ns, selector)
        self._running = False
        self._entered = False

    def run(self, items: Iterable[Item]) -> Generator[CallOutcome[Value], None, None]:
        """Call the function with each item.

        ``items``: at most 1024 items, and those in calls, are read ahead of the yielded outcomes;
        with keys, 65,536. Yields one outcome for each item, in their order. The first ``next``
        raises RuntimeError if this is closed, another run is not over, or an event loop runs in
        this thread. Raises an error of ``items`` after the outcomes of earlier items.

        `KeyboardInterrupt` ends all calls at once and passes through. A run that raises after its
        begin, or is abandoned, as by ``close()`` of the generator, cancels its calls and closes
        this object.
        """
        self._refuse()
        self._running = True
        ended = False
        try:
            self._enter()
            # Handle events of connections since the last run before the connections are used.
            self._loop.look()
            yield from self._workers.outcomes(self._loop, iter(items))
            ended = True
        finally:
            self._running = False
            if not ended:
                self.close()

    def complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run another coroutine in the event loop, between runs, and return its result.

        Raises the coroutine's exception. Raises RuntimeError if this is closed, or a run is not
        over; the coroutine is then closed.
        """
        try:
            self._refuse()
        except RuntimeError:
            coroutine.close()
            raise
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Cancel the calls in flight, leave the function's context, and close the event loop.

        Cancelled coroutines have two seconds to release their resources; threads are not awaited.
        A second call does nothing.
        """
        if self._loop.is_closed():
            return
        self._workers.running = False
        try:
            self._loop.cancel_all()
            self._leave()
        finally:
            if self._threads is not None:
                self._threads.close()
            self._loop.end()

    @property
    def counts(self) -> CallCounts:
        """The counts over all runs: of opened breakers, and of calls and their reports by `used`.

        Costs are not among them. The reader of the counts may set them to 0
        (`UsageCounts.taken`).
        """
        return self._workers.counts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse(self) -> None:
        if self._loop.is_closed():
            raise RuntimeError("this Calls is closed; create another one")
        if self._running:
            raise RuntimeError(
                "another run of this Calls is not over; read its outcomes to the end, or create "
                "another Calls"
            )

    async def _in_thread(self, *arguments: Any) -> Any:
        assert self._threads is not None
        value = await self._threads.call(*arguments)
        if iscoroutine(value):
            value.close()
            raise TypeError(
                "the function returned a coroutine, which nothing would run; define the function "
                "with 'async def'"
            )
        return value

    def _enter(self) -> None:
        if self._entered:
            return
        function: Any = self._function
        if hasattr(type(function), "__aenter__"):
            self._loop.run_until_complete(function.__aenter__())
        elif hasattr(type(function), "__enter__"):
            function.__enter__()
        self._entered = True

    def _leave(self) -> None:
        if not self._entered:
            return
        self._entered = False
        function: Any = self._function
        if hasattr(type(function), "__aenter__"):
            self._loop.run_until_complete(function.__aexit__(None, None, None))
        elif hasattr(type(function), "__enter__"):
            function.__exit__(None, None, None)


class CallLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own.

    For `Calls`, that is `Workers.now_ns`. So time-outs, the user's own ``asyncio.timeout``
    included, do not expire while the reader of the outcomes has control and answers that arrive are
    not handled.

    ``clock``: returns the time in nanoseconds. ``selector``: the selector of the loop.
    """

    def __init__(
        self, clock: Callable[[], int], selector: selectors.BaseSelector | None = None
    ) -> None:
        self._clock_ns = clock
        super().__init__(selector)

    def time(self) -> float:
        """Return the time in seconds, by ``clock``."""
        return self._clock_ns() / 1e9

    def look(self) -> None:
        """Handle the I/O events that have arrived, without waiting."""
        self.call_soon(self.stop)
        self.run_forever()

    def cancel_all(self) -> None:
        """Cancel all tasks of this loop, and give them two seconds to release their resources.

        Does nothing if another event loop runs in this thread.
        """
        if in_event_loop():
            return  # collected as garbage within another loop: coroutines cannot run
        there = asyncio.all_tasks(self)
        for task in there:
            task.cancel()
        if there:
            self.run_until_complete(asyncio.wait(there, timeout=_GRACE_S))
        for task in there:
            if task.done() and not task.cancelled():
                task.exception()  # retrieve it, so that asyncio does not log it

    def end(self) -> None:
        """Cancel the remaining tasks and asynchronous generators, and close the loop."""
        try:
            self.cancel_all()
            if not in_event_loop():
                self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()


def in_event_loop() -> bool:
    """Return whether an event loop runs in this thread; no other can then run in it."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
