"""Plain functions, called in threads and awaited in an event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any


def is_async(function: Any) -> bool:
    """Whether calling something makes a coroutine: of a function, or of an object's call."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - what it is made of, not whether it is
    )


class CallThreads:
    """A function, in threads of its own.

    A call that is cancelled before its turn is not made; one that runs is not waited for, and
    keeps its thread until it returns.

    Parameters
    ----------
    function : callable
    threads : int
        Calls at once; the others wait in order.
    name : str
        Of the threads, for people.
    """

    def __init__(self, function: Callable[..., Any], threads: int, name: str) -> None:
        self._function = function
        self._threads = threads
        self._name = name
        self._started = 0
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._waiting = 0

    def call(self, *arguments: Any) -> asyncio.Future[Any]:
        """Call the function, and return what will have its answer; in the event loop."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting += 1
        if self._started < min(self._threads, self._waiting):
            self._started += 1
            # Not an executor's: the interpreter waits for those when it ends, and one may hang.
            Thread(target=self._work, args=(loop,), name=self._name, daemon=True).start()
        self._calls.put((answer, arguments))
        return answer

    def close(self) -> None:
        """End the threads, each after what it is at; that is not waited for."""
        for _ in range(self._started):
            self._calls.put(None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (call := self._calls.get()) is not None:
            answer, arguments = call
            value: Any = None
            error: BaseException | None = None
            if not answer.cancelled():  # it is if it timed out before its turn
                try:
                    value = self._function(*arguments)
                except StopIteration as raised:  # which a future does not take
                    error = RuntimeError(f"StopIteration: {raised}")
                except BaseException as raised:
                    error = raised
            del call, arguments
            try:
                loop.call_soon_threadsafe(self._settle, answer, value, error)
            except RuntimeError:
                return  # the loop is closed

    def _settle(self, answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self._waiting -= 1
        if answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)
