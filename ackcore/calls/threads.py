"""Plain functions, called in threads and awaited in an event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any


def is_async(function: Any) -> bool:
    """Whether calling something makes a coroutine: of a function, or of an object's call."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - what it is made of, not whether it is
    )


@dataclass(slots=True, eq=False)
class _Call:
    """A call, which a thread makes."""

    answer: asyncio.Future[Any]
    arguments: tuple[Any, ...]
    began: Callable[[], object] | None
    is_out: bool = False  # in a thread
    lost: bool = False  # cancelled


class CallThreads:
    """A function, in threads of its own.

    A call that is cancelled before its turn is not made. One that runs goes on, and its thread ends
    with it; another thread takes its place at once.

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
        self._started = 0  # threads, without those that are lost
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._waiting = 0  # calls without an answer yet
        self._lock = Lock()  # guards each call's is_out and lost together

    def call(
        self, *arguments: Any, began: Callable[[], object] | None = None
    ) -> asyncio.Future[Any]:
        """Call the function, and return what will have its answer; in the event loop.

        Parameters
        ----------
        *arguments
            Of the function.
        began : callable, optional
            Called without arguments, in the thread, when the call's turn has come.
        """
        loop = asyncio.get_running_loop()
        call = _Call(loop.create_future(), arguments, began)
        call.answer.add_done_callback(functools.partial(self._ended, call, loop))
        self._waiting += 1
        self._calls.put(call)
        self._start(loop)
        return call.answer

    def close(self) -> None:
        """End the threads, each after what it is at; that is not waited for."""
        for _ in range(self._started):
            self._calls.put(None)
        self._threads = 0

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a thread if that is of use."""
        if self._started < min(self._threads, self._waiting):
            self._started += 1
            # Not an executor's: the interpreter waits for those when it ends, and one may hang.
            Thread(target=self._work, args=(loop,), name=self._name, daemon=True).start()

    def _ended(
        self, call: _Call, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any]
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
                if call.lost or call.answer.cancelled():  # before its turn
                    continue
                call.is_out = True
            value: Any = None
            error: BaseException | None = None
            try:
                if call.began is not None:
                    call.began()
                value = self._function(*call.arguments)
            except StopIteration as raised:  # which a future does not take
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
