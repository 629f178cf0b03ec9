"""Steps that fail: repeated calls, waiting for a source, and the errors that end a query."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession

from ackcore._error_hints import counted, text_of_error
from ackcore.retry import capped_doubling, whole_ms
from ackcore.spark.base.atomic import check_fence
from ackcore.spark.base.errors import (
    CheckpointCorrupt,
    CheckpointForeign,
    CheckpointInUse,
    StateError,
    one_line,
)
from ackcore.spark.base.interrupts import cancelling, raise_if_interrupted
from ackcore.spark.base.session import ResultsTooLarge
from ackcore.spark.base.versions import WRONG_VALUE, Py4JError
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.engine.check import Disagreement
from ackcore.spark.engine.setup import Obstacle
from ackcore.spark.sinks.rejects import InvalidRejects, TooManyRefused
from ackcore.topology.settings import Settings

_log = logging.getLogger("ackcore")

#: The pause before the second call of a sink; it doubles with each further call.
_BACKOFF_MS = 1_000
#: Seconds between warnings of a call that has not returned.
_SLOW_S = 300.0

T = TypeVar("T")
#: Waits for a number of seconds; returns True if the query is to stop.
Pause = Callable[[float], bool]


class SinkError(RuntimeError):
    """A sink, a table or the dead-letter store failed in all attempts; the message names it."""


class Stopped(Exception):
    """The query was stopped during a micro-batch; the next start continues the micro-batch."""


class Failed(Exception):
    """The function that `SinkCalls.once` called has raised ``error``."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(one_line(error))
        self.error = error


@dataclass(eq=False, repr=False)
class SinkCalls:
    """The calls of sinks, table folds and the dead-letter store for one micro-batch.

    ``spark``: the session of their Spark jobs, or None. ``number``: the micro-batch's number.
    ``settings``: the number of attempts, and the longest pause.
    """

    spark: SparkSession | None
    _number: int
    _pause: Pause
    _settings: Settings
    _handled: BaseException | None = field(default_factory=sys.exception)  # before the calls

    def once(self, what: str, call: Callable[[], T], *, fenced: bool = False) -> T:
        """Call ``call`` once and return its result; an interrupt cancels its Spark jobs.

        ``what`` is the name of the called object, for messages. ``fenced`` means that the called
        function itself checks whether another driver has taken over; otherwise `once` does. Raises
        Failed with the exception of the called function. Errors that end the query are raised as
        such: CheckpointCorrupt, CheckpointForeign, CheckpointInUse, InvalidRejects,
        TooManyRefused, a signal handler's exception, Stopped, and RunCancelled for its Spark job.
        """
        if not fenced:
            check_fence()
        raised: list[BaseException] = []
        try:
            with cancelling(self.spark) as raised, self._told_if_slow(what):
                return call()
        except (CheckpointCorrupt, CheckpointForeign, CheckpointInUse, TooManyRefused):
            raise  # another call would fail, too
        except InvalidRejects as error:
            raise InvalidRejects(
                f"{what} refused rows of micro-batch {self._number} in an invalid way: {error}. "
                "That is a mistake in the sink, and ackcore does not try again. Fix the sink, and "
                "start again on the same checkpoint: the sink gets the same rows"
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
                self.spark,
                f"micro-batch {self._number}, in {what},",
                "The decision is recorded: start again on the same checkpoint to continue",
            )
            raise Failed(error) from error

    @contextlib.contextmanager
    def _told_if_slow(self, what: str) -> Iterator[None]:
        """Log a warning every five minutes within the block: a call has no time limit."""
        over = threading.Event()

        def watch() -> None:
            since_s = time.monotonic()
            while not over.wait(_SLOW_S):
                _log.warning(
                    "micro-batch %d waits for %s, which has not returned for %.0f s. If it hangs, "
                    "end this process and start again: it is called with the same rows",
                    *(self._number, what, time.monotonic() - since_s),
                )

        threading.Thread(target=watch, name="ackcore-slow-call", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def insist(
        self,
        what: str,
        call: Callable[[], T],
        mend: Callable[[BaseException], T | None] | None = None,
        hint: str = "",
        *,
        fenced: bool = False,
    ) -> T:
        """Call until the call returns, with growing pauses, as often as the settings allow.

        Returns the result. A failed call is logged, except the last one.

        Raises SinkError if all calls failed. Raises the errors of `once` that end the query.

        ``what``: the name of the called object, for messages. ``mend``: called with the exception
        of each failed attempt but the first, and of an only attempt. It may return a result in
        place of the call's. ``hint``: advice at the end of the error message. ``fenced``: whether
        ``call`` checks itself that no other driver has taken over. Otherwise each attempt begins
        with that check, which takes one request in a bucket.
        """
        attempt = 0
        while True:
            attempt += 1
            try:
                return self.once(what, call, fenced=fenced)
            except Failed as failed:
                error = failed.error
            last = attempt == self._settings.max_sink_attempts
            found = None if mend is None or not (last or attempt > 1) else mend(error)
            if found is not None:
                return found
            said = _said(error)
            if last:
                raise SinkError(
                    f"{what} failed {counted(attempt, 'time')} with micro-batch {self._number}, "
                    f"the last time with {said}. The decision is recorded: remove the cause, and "
                    f"start again on the same checkpoint to continue{hint}"
                ) from error
            waits = capped_doubling(_BACKOFF_MS, attempt, whole_ms(self._settings.max_backoff_s))
            _log.warning(
                "%s failed with micro-batch %d, attempt %d of %d, next in %.1f s: %s",
                what,
                self._number,
                attempt,
                self._settings.max_sink_attempts,
                waits / 1000,
                said,
            )
            if self._pause(waits / 1000):
                raise _stopped(what, error) from error


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"


def _stopped(what: str, error: BaseException) -> Stopped:
    return Stopped(f"the query was stopped while {what} failed: {_said(error)}")


#: The first pause between two checks, the longest, and the seconds between two warnings.
_PAUSE_MS, _LONGEST_PAUSE_MS, _SAY_S = 500, 5_000, 60.0


class RowsMissing(Exception):
    """Planned rows of a micro-batch were missing for longer than the source's time-out."""


@dataclass(eq=False, repr=False)
class Outage:
    """A time in which the planned rows of a micro-batch cannot be read.

    ``ask`` returns the obstacle to reading the rows of a plan, or None.  ``pause`` waits for
    seconds and returns whether to stop, and ``clock`` returns seconds.
    """

    _ask: Callable[[Plan], Obstacle | None]
    _pause: Pause
    _clock: Callable[[], float] = time.monotonic
    _runs: int = 0  # the number of failed runs
    _said_at: float | None = None  # the time of the last warning
    #: The time since when rows with a time-out are missing.
    _missing_since: float | None = None

    def wait(self, plan: Plan, said: str) -> bool:
        """Wait until a run may read the planned rows; return True if the query is to stop.

        Pauses at least once, as tasks may not reach rows that the driver can read. Logs a warning
        once a minute. ``said`` is the error of the failed run; it names the rows that could not be
        read. Raises RowsMissing if they are missing for longer than the obstacle's time-out.
        """
        self._runs += 1
        asked = 0
        while True:
            obstacle = self._ask(plan)
            self._look_at(plan.number, obstacle, said)
            asked += 1
            # Tasks may not reach rows that the driver can read: always pause.
            waits = capped_doubling(_PAUSE_MS, asked if obstacle else self._runs, _LONGEST_PAUSE_MS)
            if self._pause(waits / 1000):
                return True
            if obstacle is None:
                return False

    def _look_at(self, number: int, obstacle: Obstacle | None, said: str) -> None:
        now = self._clock()
        text, limit = obstacle or Obstacle(said)
        if limit is None:
            self._missing_since = None
        elif self._missing_since is None:
            self._missing_since = now
        elif now - self._missing_since > limit:
            raise RowsMissing(f"{text}; this has lasted for more than {limit:g} s")
        if self._said_at is None or now - self._said_at >= _SAY_S:
            self._said_at = now
            ends = "" if limit is None else f"; the query ends if this lasts {limit:g} s"
            _log.warning(
                "the rows of micro-batch %d cannot be read yet, so it waits: %s%s",
                number,
                text,
                ends,
            )


#: Errors of a run that another run may not have.
_MAY_PASS = (Disagreement, Py4JError, PySparkException, RuntimeError, OSError, EOFError)

#: The class of the error of a damaged file, in the text of a worker's error.
_UNREADABLE = "FileUnreadable: "
#: The start of a worker's error if it could not load its task.
_NO_MODULE = "ModuleNotFoundError: "
#: Names in a worker's error if a bucket did not answer, or refused the request.
_NO_STORE = ("StoreUnavailable: ", "CheckpointReadOnly: ")


class RunFailed(RuntimeError):
    """No run of a micro-batch was accepted, or the session ended; its records are not decided."""


class ExpectationFailed(RunFailed):
    """A tuple did not meet an expectation with ``on_fail="fail"``; nothing was decided."""


def worth_another_run(error: BaseException) -> bool:
    """Return whether an error may be temporary, so that another run may succeed."""
    if not isinstance(error, _MAY_PASS) or isinstance(error, AnalysisException | StateError):
        return False
    # This worker could not load its task. (A bolt that lacks a module only fails its tuples.)
    return not (one_line(error).startswith(_NO_MODULE) or is_unreadable(error))


def is_unreadable(error: BaseException) -> bool:
    """Return whether a run failed because a planned file of the source is damaged or missing."""
    return _UNREADABLE in one_line(error)


def wrong_value(error: BaseException) -> str | None:
    """Return Spark's name of an error about a value, such as CAST_INVALID_INPUT, or None.

    Spark raises these outside the bolts, and for the same rows each time: a cast in ANSI mode, a
    division by zero, an overflow.
    """
    found = WRONG_VALUE.search(text_of_error(error))
    return found and found.group(1)


def stopped(plan: Plan) -> Stopped:
    """Return the exception for a query that is stopped while a micro-batch runs."""
    return Stopped(f"the query was stopped while micro-batch {plan.number} ran")


def given_up(plan: Plan, runs: int, error: BaseException, skip: str = "") -> RunFailed:
    """Return the exception for a micro-batch that is not run again, with the way out.

    ``runs``: the number of its runs. ``error``: the exception of the last one. ``skip``: the way
    out if planned rows can never be read, see `PlannedRows.way_out`. It is left out if the cause
    has nothing to do with the rows.
    """
    said = one_line(error)
    way_out = "remove the cause, and start again on the same checkpoint"
    no_rows = isinstance(error, ResultsTooLarge) or said.startswith(_NO_MODULE)
    if no_rows or any(name in said for name in _NO_STORE):
        skip = ""  # the rows can be read, or may be readable later
    if isinstance(error, ResultsTooLarge):
        way_out = (
            "so many failed that Spark does not return them to the driver; raise "
            "spark.driver.maxResultSize and spark.driver.memory (before the session is made), or "
            "fix the cause of the failures, and start again on the same checkpoint. To get "
            "smaller micro-batches from now on, limit the source, for example by "
            "maxFilesPerTrigger"
        )
    if wrong_value(error):
        way_out = (
            "the DataFrame of a spout has a value that its own expressions reject; handle it "
            "there (for example by try_cast, or by the mode PERMISSIVE of a reader) or filter it "
            "out, then start again on the same checkpoint"
        )
    if is_unreadable(error):
        way_out = (
            "if the file can be read again, start again on the same checkpoint. A planned file "
            "may not change, so give a corrected file another name and a new time. A run ends at "
            "the first such file, so the next start may find another one"
        )
    if said.startswith(_NO_MODULE):
        way_out = (
            "a worker cannot import a module that the driver can import. For a file of yours "
            "beside the driver's script: send it along with spark.sparkContext.addPyFile() (on "
            "Spark Connect spark.addArtifact(path, pyfile=True)), or put its directory into the "
            "workers' PYTHONPATH before the session is made. For an installed package: set "
            "PYSPARK_PYTHON (or spark.pyspark.python), before the session is made, to a Python "
            f"that has it, here {sys.executable}; then start again on the same checkpoint"
        )
    return RunFailed(
        f"micro-batch {plan.number} was run {counted(runs, 'time')} and no run was accepted; the "
        f"last one ended with {type(error).__name__}: {said}. Its records are not decided: "
        f"{way_out}{skip and f'. {skip}'}"
    )
