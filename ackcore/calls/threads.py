"""Plain functions, called in threads and awaited in an event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from contextvars import Context, copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

#: Types of objects that a call of a generator function or a coroutine function returns.
NOT_RUN = (GeneratorType, CoroutineType, AsyncGeneratorType)


def is_async(function: Any) -> bool:
    """Return whether a function, a partial of one or an object's ``__call__`` is ``async def``."""
    return any(map(inspect.iscoroutinefunction, _forms(function)))


def _forms(function: Any) -> tuple[Any, Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function, getattr(function, "__call__", None)  # noqa: B004 - the method itself is inspected


def refuse_lazy(function: Any, name: str) -> None:
    """Raise TypeError for a function with ``async`` or ``yield``: a call of it runs nothing.

    Any other object is accepted. ``name``: the name of the function in the error.
    """
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(kind(form) for form in _forms(function) for kind in kinds):
        raise TypeError(
            f"{name} must be a plain function, got {function!r} with 'async' or 'yield': a call of "
            "it returns a coroutine or a generator, and runs nothing"
        )


def refuse_unrun(answer: object, name: str) -> None:
    """Raise TypeError if a function returned a coroutine or a generator, and so has run nothing.

    ``name``: the name of the function in the error.
    """
    if isinstance(answer, NOT_RUN):
        if isinstance(answer, CoroutineType):
            answer.close()  # or Python would warn that nobody awaited it
        raise TypeError(
            f"{name} returned a {type(answer).__name__}, which has not run; it must do its work "
            "before it returns, so write it without 'async' and 'yield'"
        )


@dataclass(slots=True, eq=False)
class _ThreadCall:
    answer: asyncio.Future[Any]
    arguments: tuple[Any, ...]
    began: Callable[[], object] | None
    context: Context
    is_out: bool = False  # whether it runs in a thread
    lost: bool = False  # whether it was cancelled


class CallThreads:
    """A function, called in its own threads.

    A call that is cancelled while it is queued is not made. A running call that is cancelled
    continues, and its thread ends after it; another thread may replace it at once. The function
    sees the context variables of the coroutine that calls it.

    ``threads``: the number of calls at once. Further calls are queued in order. ``name``: the name
    of the threads, for display.
    """

    def __init__(self, function: Callable[..., Any], threads: int, name: str) -> None:
        self._function = function
        self._threads = threads
        self._name = name
        self._started = 0  # threads, without those whose call was cancelled
        self._calls: SimpleQueue[_ThreadCall | None] = SimpleQueue()
        self._waiting = 0  # calls without an answer yet
        self._lock = Lock()  # guards each call's is_out and lost together

    def call(
        self, *arguments: Any, began: Callable[[], object] | None = None
    ) -> asyncio.Future[Any]:
        """Queue a call of the function, and return a future of its result or exception.

        Use it in the event loop. A ``StopIteration`` becomes a RuntimeError. ``began``: called
        without arguments, in the thread, before the function; if it raises, the call fails.
        """
        loop = asyncio.get_running_loop()
        call = _ThreadCall(loop.create_future(), arguments, began, copy_context())
        call.answer.add_done_callback(functools.partial(self._ended, call, loop))
        self._waiting += 1
        self._calls.put(call)
        self._start(loop)
        return call.answer

    def close(self) -> None:
        """End the threads after the present and the queued calls. Does not wait for that."""
        for _ in range(self._started):
            self._calls.put(None)
        self._threads = 0

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a thread, if calls are queued and the limit allows it."""
        if self._started < min(self._threads, self._waiting):
            self._started += 1
            # Not an executor's: the interpreter's end would wait for its threads, which may hang.
            Thread(target=self._work, args=(loop,), name=self._name, daemon=True).start()

    def _ended(
        self, call: _ThreadCall, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any]
    ) -> None:
        self._waiting -= 1
        with self._lock:
            call.lost = answer.cancelled()
            hangs = call.lost and call.is_out
        if hangs:
            self._started -= 1
            self._start(loop)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        lost = False
        while not lost and (call := self._calls.get()) is not None:
            with self._lock:
                if call.lost or call.answer.cancelled():  # while it was queued
                    continue
                call.is_out = True
            value: Any = None
            error: BaseException | None = None
            try:
                if call.began is not None:
                    call.began()
                value = call.context.run(self._function, *call.arguments)
            except StopIteration as raised:  # a future refuses it
                error = RuntimeError(f"StopIteration: {raised}")
            except BaseException as raised:
                error = raised
            with self._lock:
                call.is_out, lost = False, call.lost
            answer = call.answer
            del call
            try:
                loop.call_soon_threadsafe(_settle, answer, value, error)
            except RuntimeError:
                return  # the loop is closed


def _settle(answer: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
