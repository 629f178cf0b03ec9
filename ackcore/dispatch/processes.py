"""A consumer in a separate process, which may crash."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from ackcore._error_hints import naming_arguments
from ackcore.calls import Reject, Unavailable
from ackcore.dispatch.dispatch_consumers import SingleUse, Target, refuse_async

_LIVES_S = 2.0  # seconds for a process to end before it is killed
# The request to end. The pipe of a forked process does not close: others hold copies of it.
_END = "end"
# One start at a time: a process forked meanwhile would hold a copy of the other's pipe, so that the
# other's end would not be detected.
_STARTS = threading.Lock()
_LOOK_S = 0.2  # seconds between checks of a process whose pipe stays open
_READY_S = 120.0  # seconds for a process to import its function, also on a busy machine


class ProcessDied(Exception):
    """A consumer's process ended during a call."""


class Process(Target):
    """A function in a separate process, with one call at a time.

    If the process dies, its record has failed, since it may have caused the crash. The next call
    starts a new process. If that ends before it gets the record, the call is `Unavailable`. If a
    call times out, the process is killed.

    A `Dispatcher` starts it, and closes it at the end of its run: no other one can use it. Several
    consumer names of that `Dispatcher` may share it; their calls are made in turn. If you start it
    yourself, await `close`: otherwise a call that hangs keeps your process alive at its end.

    Parameters
    ----------
    function : callable
        A function of a module, so that it can be pickled. Its results and exceptions must be
        picklable, too.
    *args
        Arguments before each record: ``function(*args, record)``.
    context : str, default "spawn"
        The start method of processes: "spawn", "forkserver" or "fork". Forked processes hold copies
        of each other's pipes: if this process is killed, they survive.
    """

    @naming_arguments
    def __init__(self, function: Callable[..., Any], *args: Any, context: str = "spawn") -> None:
        try:
            pickle.dumps((function, args))
        except Exception as error:
            raise TypeError(
                f"function and its arguments must be pickled to be sent to a process: {error}; "
                "define the function at the top of a module"
            ) from error
        refuse_async(function)
        self._function, self._args = function, args
        self._context: BaseContext = multiprocessing.get_context(context)
        self._pool = ThreadPoolExecutor(1, "ackcore-process")
        self._starting = threading.Lock()  # for threads that start or kill the process
        self._process: Any = None
        self._pipe: Connection | None = None
        self._use = SingleUse("Process")
        self.starts = 0  #: The number of processes started.

    @property
    def pid(self) -> int | None:
        """The id of the last process, even if it has ended.

        None before the first one, and after one that died in a call.
        """
        process = self._process
        return None if process is None else process.pid

    async def start(self) -> None:
        """Start the process, in a thread, and return when it is ready for a record.

        Raises RuntimeError if it was started before, and if the process ends before it is ready, or
        is not ready in two minutes.
        """
        self._use.begin()
        await asyncio.get_running_loop().run_in_executor(self._pool, self._begin)

    async def call(self, item: Any) -> Any:
        """Call the function with an item in the process, and return its result.

        Raises the function's exception, or one with its text if it cannot be pickled; RuntimeError
        if the result cannot be pickled, and after `close`; ProcessDied if the process ends
        meanwhile; Unavailable if no process can be started.
        """
        return await self.call_in_turn(item, lambda: None)

    async def call_in_turn(self, item: Any, began: Callable[[], object]) -> Any:
        """Make a `call`, after those before it; ``began`` is called in a thread when it begins."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._call, item, began)

    def timed_out(self) -> None:
        """Kill the process, whose call timed out; the next call starts another."""
        with self._starting:
            if self._process is not None:
                self._process.kill()

    async def close(self) -> None:
        """End the process for good: it is killed if it does not end in two seconds."""
        self._use.ended = True
        await asyncio.get_running_loop().run_in_executor(None, self._end)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        with _STARTS:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs, self._function, self._args), daemon=True
            )
            process.start()
            theirs.close()
        self.starts += 1
        with self._starting:
            self._process, self._pipe = process, ours
            if self._use.ended:  # `close` came while the process was started
                process.kill()
        try:
            self._receive(time.monotonic() + _READY_S)
        except TimeoutError as late:
            process.kill()
            process.join(_LIVES_S)
            raise RuntimeError(
                f"process {process.pid} was not ready for a record in {_READY_S:g} s, and was "
                "killed; probably the import of the function's module hangs, or the unpickling of "
                "its arguments"
            ) from late
        except (EOFError, OSError) as lost:
            process.join(_LIVES_S)
            raise RuntimeError(
                f"process {process.pid} ended with exit code {process.exitcode} before it was "
                "ready for a record: see its traceback in the output of errors. Start it under "
                "if __name__ == '__main__', and define the function in a module that a new process "
                "can import"
            ) from lost

    def _receive(self, until: float = math.inf) -> Any:
        """Wait for the next message of the process, and return it.

        Raises EOFError or OSError if it has ended; TimeoutError after ``until``, a monotonic time.
        """
        assert self._pipe is not None
        # Another forked process may hold a copy of the pipe, which then stays open.
        while not self._pipe.poll(_LOOK_S):
            if not self._process.is_alive() and not self._pipe.poll():
                raise EOFError
            if time.monotonic() >= until:
                raise TimeoutError
        return self._pipe.recv()

    def _call(self, item: Any, began: Callable[[], object]) -> Any:
        began()
        if self._use.ended:
            raise Unavailable(
                "this Process is closed, because its run has ended; create another one"
            )
        if self._process is None or not self._process.is_alive():
            try:
                self._begin()
            except (OSError, RuntimeError) as failed:  # no process has got the record
                raise Unavailable(f"no process could be started: {failed}") from failed
        assert self._pipe is not None
        try:
            self._pipe.send((item,))
            error, answer = self._receive()
        except (EOFError, OSError) as lost:
            process = self._process
            with self._starting:
                self._process = None
            process.join(_LIVES_S)
            raise ProcessDied(
                f"process {process.pid} ended with exit code {process.exitcode} during a call; the "
                "record may be the cause, so this is a failed attempt"
            ) from lost
        if error is not None:
            raise _rebuilt(*error)
        return answer

    def _end(self) -> None:
        with self._starting:
            process, pipe = self._process, self._pipe
        if pipe is not None and process is not None:
            with suppress(OSError):
                pipe.send(_END)
            process.join(_LIVES_S)
            process.kill()
            process.join()
            pipe.close()


def _serve(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Serve calls in the process, one at a time, until the pipe closes or sends `_END`.

    First sends a message that the process is ready. A ``SystemExit`` of the function ends the
    process.
    """
    pipe.send(None)
    while True:
        try:
            sent = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        if sent == _END:
            return
        error, answer = None, None
        try:
            answer = function(*args, sent[0])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # a panic of an extension, too
            error = _described(raised)
        try:
            pipe.send((error, answer))
        except (BrokenPipeError, KeyboardInterrupt):
            return
        except Exception as unsent:  # the answer cannot be pickled
            failure = RuntimeError(f"{type(answer).__name__}: {answer} (not sent: {unsent})")
            pipe.send((_described(failure), None))


def _described(error: BaseException) -> tuple[bytes | None, Exception]:
    """Return an error's pickle, and an Unavailable, Reject or RuntimeError with its text.

    The pickle is None if unpickling would not return an error of the same class and text.
    """
    pickled: bytes | None = None
    with suppress(Exception):
        pickled = pickle.dumps(error)
        again = pickle.loads(pickled)
        # Unpickling calls the constructor with the text, which may change it.
        if (type(again), str(again)) != (type(error), str(error)):
            pickled = None
    try:
        # Without the seconds that str() appends: the new Unavailable appends them again.
        said = Exception.__str__(error) if isinstance(error, Unavailable) else str(error)
        text = f"{type(error).__name__}: {said}"
    except Exception:
        text = type(error).__name__
    if isinstance(error, Unavailable):
        return pickled, Unavailable(text, after_s=error.asked_s)
    return pickled, Reject(text) if isinstance(error, Reject) else RuntimeError(text)


def _rebuilt(pickled: bytes | None, otherwise: Exception) -> Exception:
    """Return the pickled exception; ``otherwise`` if there is none, or it cannot be unpickled."""
    if pickled is not None:
        with suppress(Exception):
            error = pickle.loads(pickled)
            if isinstance(error, Exception):
                return error
    return otherwise
