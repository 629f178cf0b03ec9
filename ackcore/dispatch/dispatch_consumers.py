"""The consumers of a dispatcher, behind one interface."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from ackcore._columns import as_count
from ackcore._error_hints import naming_arguments
from ackcore.calls.threads import CallThreads, is_async


class Target:
    """The base class of consumers. A subclass defines `call`; the other methods are optional."""

    async def start(self) -> None:
        """Prepare the consumer in the dispatcher's loop. Called once; an exception ends the run."""

    async def call(self, item: Any) -> Any:
        """Process an item, and return when it is done.

        Parameters
        ----------
        item : object
            A record; with ``batch=`` a list of records.

        Returns
        -------
        None, bytes or array of bool
            With ``batch=``, a bitmap of the records that failed (`ackcore.flow.Batch.failed`); None
            if none did. Without ``batch=``, the result is ignored.

        Raises
        ------
        Unavailable
            If the consumer accepts nothing now. The attempt does not count, and the record goes to
            another consumer. This one gets nothing for ``after_s`` seconds, or for a back-off.
        Reject
            If no consumer can process the item.
        Exception
            Any other failure.
        """
        raise NotImplementedError

    async def call_in_turn(self, item: Any, began: Callable[[], object]) -> Any:
        """Make a `call`, and call ``began`` from any thread when it begins.

        Override it if your consumer queues calls: the time-out runs from the call of ``began``. A
        call that does not begin within the time-out goes to another consumer, and is no attempt.
        """
        began()
        return await awaitable(self.call(item), f"{type(self).__name__}.call")

    def timed_out(self) -> None:
        """Handle a call that timed out after it began, and is cancelled. By default do nothing."""

    async def close(self) -> None:
        """Release all resources. Called once, when the run ends; exceptions are ignored."""


class NotAwaitable(TypeError):
    """A method of a `Target` is no coroutine function. The run ends: each record would fail."""


def awaitable(answer: Any, method: str) -> Awaitable[Any]:
    """Return what a method returned. Raises NotAwaitable if it cannot be awaited."""
    if not inspect.isawaitable(answer):
        raise NotAwaitable(
            f"{method} must be awaitable, and it returned {type(answer).__name__}: declare it with "
            "'async def', or pass a plain function in place of the Target, to be run in a thread"
        )
    return answer


def refuse_async(function: object) -> None:
    """Raise TypeError for a coroutine function, which a thread or a process does not await."""
    if is_async(function):
        raise TypeError(
            f"function must not be a coroutine function, got {function!r}, which a thread or a "
            "process does not await; pass it to the Dispatcher itself"
        )


class InUse(RuntimeError):
    """A consumer was started twice. Do not close it after this error: its first run uses it."""


class SingleUse:
    """The only use of a consumer: one dispatcher may start it, and only once.

    The end of that dispatcher's run closes it, and its owner then sets ``ended``. ``kind``: the
    consumer's class, for the error.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._begun = False
        self.ended = False  #: Whether the consumer was closed.

    def begin(self) -> None:
        """Begin the use. Raises `InUse` if it has begun before: that use continues."""
        if self._begun:
            how = "was closed at the end of a run" if self.ended else "is in use already"
            raise InUse(f"this {self._kind} {how}; create one for each Dispatcher")
        self._begun = True


class Function(Target):
    """A function, called in its own threads; ``function(record)`` returns when the record is done.

    Only one `Dispatcher` can use it, for one run. Several consumer names of that `Dispatcher` may
    share it.

    Parameters
    ----------
    function : callable
        Its argument, result and exceptions are those of `Target.call`. Pass a coroutine function to
        the `Dispatcher` itself.
    threads : int, default 1
        The number of calls at once. Further calls are queued in order. A thread whose call times
        out cannot be ended; another takes its place.
    """

    @naming_arguments
    def __init__(self, function: Callable[[Any], Any], *, threads: int = 1) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        refuse_async(function)
        count = as_count(threads, "threads", 1)
        self._threads = CallThreads(function, count, "ackcore-consumer")
        self._use = SingleUse("Function")

    async def start(self) -> None:
        """Do nothing but raise RuntimeError if it was started before."""
        self._use.begin()

    async def call(self, item: Any) -> Any:
        """Call the function with an item in one of the threads, and return its result."""
        return await self._threads.call(item)

    async def call_in_turn(self, item: Any, began: Callable[[], object]) -> Any:
        """Make a `call`; a free thread calls ``began`` first."""
        return await self._threads.call(item, began=began)

    async def close(self) -> None:
        """End the threads. Neither this method nor Python's exit waits for a call that hangs."""
        self._use.ended = True
        self._threads.close()


class Coroutine(Target):
    """A coroutine function: ``await function(record)`` returns when the record is done.

    The consumer's `Limit` bounds the number of calls at once; no thread is used.
    """

    def __init__(self, function: Callable[[Any], Awaitable[Any]]) -> None:
        self._function = function

    async def call(self, item: Any) -> Any:
        """Await the function with an item, and return its result."""
        return await self._function(item)


def as_target(given: Any, name: Any) -> Target:
    """Return the `Target` for a consumer that is a Target, a coroutine function or a callable.

    ``name``: the consumer's name, for the TypeError if it is none of them.
    """
    if isinstance(given, Target):
        return given
    if is_async(given):
        return Coroutine(given)
    if callable(given):
        return Function(given)
    raise TypeError(
        f"consumer {name!r} must be callable or a Target, got {type(given).__name__}; "
        "Http(url) and Process(function) make one of an endpoint and of a process"
    )
