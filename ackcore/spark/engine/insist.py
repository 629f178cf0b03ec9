"""Repeated calls of a sink or a store that may fail, until the call returns or is given up."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TypeVar

from pyspark.sql import SparkSession

from ackcore.retry import capped_doubling, whole_ms
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import (
    CheckpointCorrupt,
    CheckpointForeign,
    CheckpointInUse,
    one_line,
)
from ackcore.spark.base.interrupts import cancelling, raise_if_interrupted
from ackcore.spark.sinks.rejects import InvalidRejects, TooManyRefused
from ackcore.topology.settings import Settings

_log = logging.getLogger("ackcore")

T = TypeVar("T")
#: Waits for a number of seconds; returns True if the query is to stop.
Pause = Callable[[float], bool]


class SinkError(RuntimeError):
    """A sink or the dead-letter store failed in all attempts; the message names it."""


class Stopped(Exception):
    """The query is stopped during a micro-batch; the restart continues the micro-batch."""


class Failed(Exception):
    """The called function itself raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(one_line(error))
        self.error = error


class Calls:
    """Calls for one micro-batch.

    Parameters
    ----------
    spark : SparkSession or None
        The session in which the calls run jobs.
    number : int
        The micro-batch's number.
    pause : callable
        Waits for a number of seconds; returns whether to stop.
    """

    def __init__(self, spark: SparkSession | None, number: int, pause: Pause) -> None:
        self._spark = spark
        self._number = number
        self._pause = pause
        self._handled = sys.exception()

    def once(self, what: str, call: Callable[[], T], *, fenced: bool = False) -> T:
        """Call once and return the result.

        ``fenced`` means that the called function checks the fence itself.

        Raises
        ------
        Failed
            With the exception that the called function raised.
        Exception
            One that ends the query: from a signal handler, a stop, or a take-over by another
            driver.
        """
        if not fenced:
            check_fence()
        raised: list[BaseException] = []
        try:
            with cancelling(self._spark) as raised:
                return call()
        except (CheckpointCorrupt, CheckpointForeign, CheckpointInUse, TooManyRefused):
            raise  # another call would fail, too
        except InvalidRejects as error:
            raise InvalidRejects(
                f"{what}, given micro-batch {self._number}, answers with SinkRejects that are "
                f"wrong: {error}. That is a mistake in the sink, and not tried again: mend it, and "
                "start again on the same checkpoint, which calls it again with the same rows"
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit, and a panic of an extension, too
            if raised:  # by a signal handler: the called function did not fail
                raise raised[-1] from (None if error is raised[-1] else error)
            if self._pause(0):
                raise _stopped(what, error) from error
            raise_if_interrupted(
                error,
                self._handled,
                f"micro-batch {self._number}, in {what},",
                "What is decided is recorded: start again on the same checkpoint to go on",
            )
            raise Failed(error) from error

    def insist(
        self,
        what: str,
        call: Callable[[], T],
        settings: Settings,
        mend: Callable[[BaseException], T | None] | None = None,
        hint: str = "",
        *,
        fenced: bool = False,
    ) -> T:
        """Call until the call returns, with growing pauses, as often as the settings allow.

        Parameters
        ----------
        what : str
            The name of the called object, for errors.
        call : callable
            Makes the call.
        settings : Settings
            The number of attempts, and the pauses.
        mend : callable, optional
            Is given the exception of the second or last attempt, and of each later one; may return
            a result in place of the call's.
        hint : str, optional
            Further advice at the end of the error message.
        fenced : bool, default False
            Whether the called function checks the fence itself, right before its first effect.  In
            a bucket each check is a request.

        Raises
        ------
        SinkError
            If it failed as often as the settings allow.
        Exception
            The errors of `once` that end the query.
        """
        for attempt in range(1, settings.max_sink_attempts + 1):
            try:
                return self.once(what, call, fenced=fenced)
            except Failed as failed:
                error = failed.error
            last = attempt == settings.max_sink_attempts
            found = None if mend is None or not (last or attempt > 1) else mend(error)
            if found is not None:
                return found
            said = _said(error)
            if last:
                raise SinkError(
                    f"{what} failed {attempt} times with micro-batch {self._number}, the last time "
                    f"with {said}. What is decided is recorded: when the cause is gone, start "
                    f"again on the same checkpoint, and it goes on there{hint}"
                ) from error
            sink_ms, most_ms = whole_ms(settings.sink_backoff_s), whole_ms(settings.max_backoff_s)
            waits = capped_doubling(sink_ms, attempt, most_ms)
            _log.warning(
                "%s failed with micro-batch %d, attempt %d of %d, again in %.1f s: %s",
                what,
                self._number,
                attempt,
                settings.max_sink_attempts,
                waits / 1000,
                said,
            )
            if self._pause(waits / 1000):
                raise _stopped(what, error) from error
        raise AssertionError("unreachable")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _stopped(what: str, error: BaseException) -> Stopped:
    return Stopped(f"stopped while {what} was failing: {_said(error)}")
