"""Many calls at once within one task, in one event loop, and their outcomes in order."""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from inspect import iscoroutine
from typing import Any, Generic, Self, TypeVar

from ackcore.calls.breaker import BreakerState
from ackcore.calls.event_loop import CallLoop
from ackcore.calls.outcomes import CallCounts, Outcome, Value
from ackcore.calls.settings import MAX_THREADS, CallSettings
from ackcore.calls.threads import CallThreads, is_async
from ackcore.calls.workers import Workers
from ackcore.flow import ConsumerState

Item = TypeVar("Item")


class Calls(Generic[Item, Value]):
    """Calls of one function, many at once, with a window, a rate, time-outs, retries and a breaker.

    To be used by one thread, and in a ``with`` or to be closed.

    Parameters
    ----------
    function : callable
        Called with an item; if there are endpoints, with an item and one of them.  A coroutine
        function is awaited in the event loop of this object, any other called in threads.  What is
        an (asynchronous) context manager as well is entered before the first call, in that loop,
        and left by `close`.
    settings : CallSettings, optional
    clock : callable, optional
        Nanoseconds as an int; by default `time.monotonic_ns`.
    selector : selectors.BaseSelector, optional
        What the event loop waits with.

    Raises
    ------
    TypeError
        If the function cannot be called, or a setting makes what is no limit or chooser.

    Notes
    -----
    The event loop runs in the thread that reads the outcomes, and only while it waits for one: no
    answer is looked at while the reader has control, or the items are waited for.  That time counts
    neither for time-outs nor for round trips, as far as calls are out.

    Calls are made by a few coroutines, one after the other: a context variable that the function
    sets, and does not reset, is seen by later calls.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        settings: CallSettings | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        settings = CallSettings() if settings is None else settings
        self._function = function
        self._threads: CallThreads | None = None
        most = sys.maxsize
        if not is_async(function):
            # With more calls out than threads the rest would wait in line, and time out there.
            most = settings.thread_count()
            # One that timed out keeps its thread, and what is called in its place has another.
            self._threads = CallThreads(function, MAX_THREADS, "ackcore-call")
        make = function if self._threads is None else self._in_thread
        self._workers = Workers(make, settings, most, clock)
        self._loop = CallLoop(self._workers.now_ns, selector)
        self._running = False
        self._entered = False

    def run(self, items: Iterable[Item]) -> Generator[Outcome[Value], None, None]:
        """Call the function with each item.

        Parameters
        ----------
        items : iterable
            Pulled as there is room, and no further ahead of what was yielded than the window and
            `CallSettings.max_buffered`.

        Yields
        ------
        Outcome
            One for each item, in their order.

        Raises
        ------
        RuntimeError
            If this was closed, or another run is not over, or an event loop runs in this thread.
        Exception
            What ``items`` raises, once the outcomes of those before are yielded.

        Notes
        -----
        `KeyboardInterrupt` ends all calls at once and passes through.  A run that is given up, as
        by ``close()`` of the generator, cancels what is out and closes this object.
        """
        self._refuse()
        self._running = True
        ended = False
        try:
            self._enter()
            # What has happened to connections since the last run is to be seen before their use.
            self._loop.look()
            yield from self._workers.outcomes(self._loop, iter(items))
            ended = True
        finally:
            self._running = False
            if not ended:
                self.close()

    def complete(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run another coroutine in the event loop, between runs, and return what it returns.

        Raises
        ------
        RuntimeError
            If this was closed, or a run is not over.
        """
        try:
            self._refuse()
        except RuntimeError:
            coroutine.close()
            raise
        return self._loop.complete(coroutine)

    def close(self) -> None:
        """Cancel what is out, leave the function's context, and close the event loop.

        Coroutines that are cancelled have two seconds to let go of what they hold.
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
        """The counts since these calls began."""
        counts = self._workers.counts
        counts.trips = self._workers.endpoints.trips
        return counts

    @property
    def in_flight(self) -> int:
        """Calls that are out."""
        return self._workers.endpoints.in_flight

    def state(self) -> list[tuple[ConsumerState, BreakerState]]:
        """Return how each endpoint does, and where its breaker stands."""
        return self._workers.endpoints.state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _refuse(self) -> None:
        if self._loop.is_closed():
            raise RuntimeError("these calls are closed; make another Calls")
        if self._running:
            raise RuntimeError("a run of these calls is not over; read it to its end, or close it")

    async def _in_thread(self, *arguments: Any) -> Any:
        assert self._threads is not None
        value = await self._threads.call(*arguments)
        if iscoroutine(value):
            value.close()
            raise TypeError(
                "the function must be a coroutine function, or return no coroutine, which would "
                "never run; write it with 'async def'"
            )
        return value

    def _enter(self) -> None:
        if self._entered:
            return
        function: Any = self._function
        if hasattr(type(function), "__aenter__"):
            self._loop.complete(_awaited(function.__aenter__()))
        elif hasattr(type(function), "__enter__"):
            function.__enter__()
        self._entered = True

    def _leave(self) -> None:
        if not self._entered:
            return
        self._entered = False
        function: Any = self._function
        if hasattr(type(function), "__aenter__"):
            self._loop.complete(_awaited(function.__aexit__(None, None, None)))
        elif hasattr(type(function), "__enter__"):
            function.__exit__(None, None, None)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
