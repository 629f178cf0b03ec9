"""Interrupts of a run, and the distinction between cancelled and failed jobs.

PySpark's handler of SIGINT cancels all jobs and raises `KeyboardInterrupt`; PySpark's cleanup then
replaces that by the error of the cancelled job.  Jupyter's handler only raises, and the cleanup
waits for the end of the job.  Therefore the main thread runs ackcore's jobs in another thread,
which gets no interrupt, and cancels them itself.  A user's sink stays in its thread; its jobs are
cancelled by a thread that the signal starts.
"""

from __future__ import annotations

import re
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from types import FrameType
from typing import TypeVar

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from ackcore.spark.base.errors import one_line
from ackcore.spark.base.session import (
    LOST,
    JobTag,
    activate,
    job_thread,
    session_gone,
    session_lost,
)
from ackcore.spark.base.versions import Py4JError

T = TypeVar("T")
#: A signal handler: called with the signal's number and the interrupted frame.
Handler = Callable[[int, FrameType | None], object]

#: The time in seconds that an interrupt waits for cancelled jobs, and the interval in which it
#: cancels again, because a job may begin after the first time.
_PATIENCE_S, _AGAIN_S = 4.0, 0.2
#: The time in seconds after which a signal handler that has not returned counts as an interrupt.
_HANDLER_S = 0.5

_CANCELLED = re.compile(r"SPARK_JOB_CANCELLED|OPERATION_CANCELED|\bJob \d+ cancelled\b")
_FAILED = "Job aborted due to stage failure"
_SHUT_DOWN = "SparkContext was shut down"


class RunCancelled(RuntimeError):
    """A Spark job was cancelled from outside, or its session ended; the next start continues.

    Attributes
    ----------
    shut_down : bool
        Whether the SparkContext or the session of Spark Connect ended during the job.
    """

    def __init__(self, message: str, shut_down: bool = False) -> None:
        super().__init__(message)
        self.shut_down = shut_down


def interruptible(session: SparkSession | None, job: Callable[[], T]) -> T:
    """Call a function that runs Spark jobs and return its result; an interrupt cancels the jobs.

    The main thread calls it in another thread, with the local properties of the main thread.  Other
    threads call it directly, and so does the main thread if ``session`` is None (no Spark jobs).
    Raises the exception of the function or of a signal handler.
    """
    if session is None or threading.current_thread() is not threading.main_thread():
        return job()
    tag = JobTag(session, f"ackcore-{uuid.uuid4()}")
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    inside = copy_context()  # it has `fenced`'s check, for instance

    def run() -> None:
        try:
            tag.add()
            activate(session)
            results.append(inside.run(job))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    thread = job_thread(session, run, "ackcore-run")
    try:
        thread.start()
        ended.wait()
    except BaseException:
        cancel_until(tag, ended)
        raise
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def cancelling(session: SparkSession | None) -> Iterator[list[BaseException]]:
    """Cancel the Spark jobs of the enclosed code if a signal handler raises in the main thread.

    This is for a user's sink.  It may depend on its thread, so it cannot be called by
    `interruptible`.  The main thread's signal handlers are wrapped for the time of the block; in
    other threads nothing is done.  ``session``: the session of the jobs; None if there are none.

    Yields a list of the exceptions of signal handlers, which the code may replace by other errors.
    """
    raised: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread():
        yield raised
        return
    tag = None if session is None else JobTag(session, f"ackcore-{uuid.uuid4()}")
    over = threading.Event()

    def cancel(returned: threading.Event) -> None:
        if tag is not None and not returned.wait(_HANDLER_S) and not over.is_set():
            cancel_until(tag, over)

    def watched(handler: Handler) -> Handler:
        def handle(number: int, frame: FrameType | None) -> None:
            returned = threading.Event()
            thread = threading.Thread(target=cancel, args=(returned,), daemon=True)
            if number == signal.SIGINT:
                # PySpark's handler calls Spark and waits for the job before it raises.
                thread.start()
            try:
                handler(number, frame)
                returned.set()
            except Py4JError as error:  # the handler's call failed with the cancelled job
                raised.append(KeyboardInterrupt())
                raise raised[-1] from error
            except BaseException as error:
                raised.append(error)
                raise
            finally:
                if raised and number != signal.SIGINT:
                    thread.start()

        return handle

    handlers: dict[int, tuple[Handler, Handler]] = {}
    for each in signal.valid_signals():
        handler = signal.getsignal(each)
        if callable(handler):
            handlers[each] = handler, watched(handler)
            signal.signal(each, handlers[each][1])
    try:
        if tag is not None:
            tag.add()
        yield raised
    finally:
        over.set()
        for number, (handler, ours) in handlers.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, handler)
        if tag is not None:
            with suppress(*LOST):  # Spark is gone
                if raised:  # the code may have left a job running
                    tag.cancel()
                tag.remove()


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """Call user code; return the error that it raised, of any class, or None.

    Raises KeyboardInterrupt, and any exception that a signal handler raised during the call.
    """
    signals: list[BaseException] = []
    try:
        with cancelling(None) as signals:
            call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if signals:
            raise signals[-1] from (None if error is signals[-1] else error)
        return error
    return None


def cancel_until(tag: JobTag, ended: threading.Event) -> None:
    """Cancel the jobs with a tag every 0.2 s until ``ended`` is set, Spark is gone, or 4 s pass."""
    for _ in range(int(_PATIENCE_S / _AGAIN_S)):
        try:
            tag.cancel()
        except LOST:
            return  # Spark is gone, and with it the job
        if ended.wait(_AGAIN_S):
            return


def raise_if_interrupted(
    error: BaseException,
    handled: BaseException | None,
    session: SparkSession | None,
    what: str,
    way_out: str,
) -> None:
    """Raise the KeyboardInterrupt that caused an error, or RunCancelled if its job was cancelled.

    RunCancelled is raised also if the session ended. After any other error nothing is raised.
    Interrupts that caused ``handled``, the exception handled before the call (`sys.exception`), do
    not count.  ``session`` is None if no job ran.  ``what``, ``way_out``: the cancelled object and
    the advice, as text.
    """
    old = {id(one) for one in _chain(handled)}
    for one in _chain(error):
        if isinstance(one, KeyboardInterrupt) and id(one) not in old:
            raise KeyboardInterrupt(*one.args) from error
    if isinstance(error, RunCancelled):
        raise error
    said = str(error) if isinstance(error, Py4JError | PySparkException) else ""
    cancelled = _CANCELLED.search(said) is not None and _FAILED not in said
    shut_down = True
    if session_lost(error) or (cancelled and session_gone(session)):
        cause = _LOST
    elif cancelled:
        shut_down = _SHUT_DOWN in said
        cause = "the SparkContext was stopped" if shut_down else _FROM_OUTSIDE
    else:
        return
    message = f"{what} was given up, because {cause}: {one_line(error)}. {way_out}"
    raise RunCancelled(message, shut_down) from error


_LOST = "the session of Spark Connect has ended, or its server does not answer"
_FROM_OUTSIDE = (
    "a job was cancelled from outside (cancelAllJobs, cancelJobGroup, or a kill link in Spark's UI)"
)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Return an error, its causes, and the exceptions that were handled when it was raised."""
    found: list[BaseException] = []
    left = [error]
    while left:
        one = left.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            left += [one.__cause__, one.__context__]
    return found
