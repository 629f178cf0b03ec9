"""Interrupts: how they end a run, and what tells a cancelled job from a failed one.

PySpark's handler of SIGINT cancels all jobs and raises `KeyboardInterrupt`, which its own cleaning
up then replaces by the error of the cancelled job.  Jupyter's only raises, and that cleaning up
waits for the job to end.  So in the main thread jobs of ours are run in another one, where no
interrupt comes, and cancelled from here; those of a user's sink, which stays where it is, are
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
from ackcore.spark.base.session import LOST, JobTag, activate, job_thread, session_lost
from ackcore.spark.base.versions import Py4JError

T = TypeVar("T")
#: Of a signal: called with its number and what was running.
Handler = Callable[[int, FrameType | None], object]

#: How long an interrupt waits for the jobs that it cancelled, and how often it cancels meanwhile:
#: a job may begin after the first time.
_PATIENCE_S, _AGAIN_S = 4.0, 0.2
#: How long the handler of a signal may take that is no interrupt.
_HANDLER_S = 0.5

_CANCELLED = re.compile(r"SPARK_JOB_CANCELLED|OPERATION_CANCELED|\bJob \d+ cancelled\b")
_FAILED = "Job aborted due to stage failure"
_SHUT_DOWN = "SparkContext was shut down"


class RunCancelled(RuntimeError):
    """A job was cancelled from outside; the next start on the same checkpoint goes on there.

    Attributes
    ----------
    shut_down : bool
        Whether the SparkContext ended meanwhile, for a reason that is not known.
    """

    def __init__(self, message: str, shut_down: bool = False) -> None:
        super().__init__(message)
        self.shut_down = shut_down


def interruptible(session: SparkSession | None, job: Callable[[], T]) -> T:
    """Call what runs Spark jobs; an interrupt of the main thread cancels them and is raised.

    Parameters
    ----------
    session : SparkSession or None
        Where the jobs run; None for what is none of Spark's.
    job : callable
        Runs them, in a thread that has the local properties of this one.

    Raises
    ------
    KeyboardInterrupt, SystemExit
        Whatever a handler of a signal raises.
    Exception
        What the callable raises.
    """
    if session is None or threading.current_thread() is not threading.main_thread():
        return job()
    tag = JobTag(session, f"ackcore-{uuid.uuid4()}")
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()
    inside = copy_context()  # of the fence around this driver's writes, for one

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
        _cancel(tag, ended)
        raise
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def cancelling(session: SparkSession | None) -> Iterator[list[BaseException]]:
    """Within, an interrupt of the main thread cancels the Spark jobs that were begun in it.

    For code of the user's, a sink's: it may have to stay in the thread that it was made in, so it
    cannot be called as `interruptible` calls; but what it runs on Spark would be waited for.

    Parameters
    ----------
    session : SparkSession or None
        Where the jobs run; None for what is none of Spark's.

    Yields
    ------
    list of BaseException
        Gets what handlers of signals raise within, which may come out as another error.
    """
    raised: list[BaseException] = []
    if threading.current_thread() is not threading.main_thread():
        yield raised
        return
    tag = None if session is None else JobTag(session, f"ackcore-{uuid.uuid4()}")
    over = threading.Event()

    def cancel(returned: threading.Event) -> None:
        if tag is not None and not returned.wait(_HANDLER_S) and not over.is_set():
            _cancel(tag, over)

    def watched(handler: Handler) -> Handler:
        def handle(number: int, frame: FrameType | None) -> None:
            returned = threading.Event()
            thread = threading.Thread(target=cancel, args=(returned,), daemon=True)
            if number == signal.SIGINT:
                # PySpark's handler calls Spark, and waits for the job itself before it raises.
                thread.start()
            try:
                handler(number, frame)
                returned.set()
            except Py4JError as error:  # its call was answered by the cancelled job
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
            with suppress(*LOST):  # of a Spark that is gone
                if raised:  # and perhaps without waiting for its job, which would run on
                    tag.cancel()
                tag.remove()


def raised_by(call: Callable[[], object]) -> BaseException | None:
    """Call code of the user's whose errors end nothing; return its error, None if there is none.

    Raises
    ------
    KeyboardInterrupt, SystemExit
        Whatever a handler of a signal raises meanwhile.
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


def _cancel(tag: JobTag, ended: threading.Event) -> None:
    for _ in range(int(_PATIENCE_S / _AGAIN_S)):
        try:
            tag.cancel()
        except LOST:
            return  # Spark is gone, and with it the job
        if ended.wait(_AGAIN_S):
            return


def raise_if_interrupted(
    error: BaseException, handled: BaseException | None, what: str, way_out: str
) -> None:
    """Raise the interrupt that an error hides, or `RunCancelled` if a job of it was cancelled.

    Parameters
    ----------
    error : BaseException
        What was raised instead of a result.
    handled : BaseException or None
        What was being handled before (`sys.exception`): that is nothing new.
    what, way_out : str
        What was cancelled and how to go on, for the message.
    """
    old = {id(one) for one in _chain(handled)}
    for one in _chain(error):
        if isinstance(one, KeyboardInterrupt) and id(one) not in old:
            raise KeyboardInterrupt(*one.args) from error
    if isinstance(error, RunCancelled):
        raise error
    if session_lost(error):
        message = f"{what} was given up, since {_LOST}: {one_line(error)}. {way_out}"
        raise RunCancelled(message, shut_down=True) from error
    if not isinstance(error, Py4JError | PySparkException):
        return
    said = str(error)
    if _CANCELLED.search(said) is None or _FAILED in said:
        return
    shut_down = _SHUT_DOWN in said
    cause = "the SparkContext was stopped" if shut_down else _FROM_OUTSIDE
    message = f"{what} was given up, since {cause}: {one_line(error)}. {way_out}"
    raise RunCancelled(message, shut_down) from error


_LOST = "the session of Spark Connect is not there any more, or no server answers"
_FROM_OUTSIDE = (
    "a job was cancelled from outside (cancelAllJobs, cancelJobGroup, or a kill link in Spark's UI)"
)


def _chain(error: BaseException | None) -> list[BaseException]:
    """An error, what caused it, and what was being handled as it was raised."""
    found: list[BaseException] = []
    left = [error]
    while left:
        one = left.pop()
        if one is not None and all(one is not other for other in found):
            found.append(one)
            left += [one.__cause__, one.__context__]
    return found


__all__ = ["RunCancelled", "cancelling", "interruptible", "raise_if_interrupted", "raised_by"]
