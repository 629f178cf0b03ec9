"""The consumers of a dispatcher, behind one interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from ackcore._columns import as_count
from ackcore.calls.threads import CallThreads, is_async


class Target:
    """A consumer.  A subclass says how a record is sent to it, and how one knows that it is
    done."""

    async def start(self) -> None:
        """Make ready; called once, in the dispatcher's loop, before all else."""

    async def call(self, item: Any) -> Any:
        """Have an item processed, and return when it is done.

        Parameters
        ----------
        item : object
            A record; with ``batch=`` a list of them.

        Returns
        -------
        None, bytes or array of bool
            With ``batch=``, a bitmap of the records that failed (`ackcore.flow.Batch.failed`); None
            if none did.

        Raises
        ------
        Unavailable
            If the consumer takes nothing now: the attempt does not count, the record goes to
            another, and this one is sent nothing for ``after_s`` seconds, or for a back-off.
        Reject
            If no consumer would take the item.
        Exception
            Whatever it failed of.
        """
        raise NotImplementedError

    async def call_in_turn(self, item: Any, began: Callable[[], object]) -> Any:
        """Call as `call` does, and call ``began`` when the call begins, from any thread.

        Override it where calls wait for one another: the time-out runs from then on, and a call
        that did not begin within it is no attempt at the record.
        """
        began()
        return await self.call(item)

    def timed_out(self) -> None:
        """A call of this took too long, and is cancelled."""

    async def close(self) -> None:
        """Give back what it holds; called once, at the end."""


class Function(Target):
    """A function, in threads of its own: ``function(record)`` returns when it is done.

    Parameters
    ----------
    function : callable
    threads : int, default 1
        Calls at once. The others wait in order. A thread whose call times out cannot be ended;
        another takes its place.
    """

    def __init__(self, function: Callable[[Any], Any], *, threads: int = 1) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        count = as_count(threads, "threads", 1)
        self._threads = CallThreads(function, count, "ackcore-consumer")

    async def call(self, item: Any) -> Any:
        """See `Target.call`."""
        return await self._threads.call(item)

    async def call_in_turn(self, item: Any, began: Callable[[], object]) -> Any:
        """See `Target.call_in_turn`."""
        return await self._threads.call(item, began=began)

    async def close(self) -> None:
        """See `Target.close`; a call that hangs is not waited for, also not when Python ends."""
        self._threads.close()


class Coroutine(Target):
    """A coroutine function: ``await function(record)`` returns when it is done.

    As many calls run at once as the consumer's window has room for.
    """

    def __init__(self, function: Callable[[Any], Awaitable[Any]]) -> None:
        self._function = function

    async def call(self, item: Any) -> Any:
        """See `Target.call`."""
        return await self._function(item)


def as_target(given: Any, name: Any) -> Target:
    """Return what was given as a consumer: a `Target`, a coroutine function, or any callable.

    Raises
    ------
    TypeError
        If it is none of them.
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
