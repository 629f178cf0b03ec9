"""The session that runs jobs, and the differences between a classic session and Spark Connect.

On Spark Connect the driver of Spark is a server, in another process or on another machine.  This
process then has no JVM, no SparkContext and no plan.  This module has a function for each such
difference; without a plan, `sources` treats a source as not deterministic.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import pyarrow as pa
from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import is_remote

from ackcore._error_hints import text_of_error
from ackcore.spark.base.versions import (
    SPARK,
    Py4JError,
    active_context,
    results,
    set_active,
    to_arrow,
)

if TYPE_CHECKING:
    from pyspark import SparkContext

#: Error conditions of Spark Connect for a session that no longer exists, or that was made on
#: another server.
_GONE = {
    "INVALID_HANDLE.SESSION_CHANGED",
    "INVALID_HANDLE.SESSION_CLOSED",
    "INVALID_HANDLE.SESSION_NOT_FOUND",
    "NO_ACTIVE_SESSION",
    "RESPONSE_ALREADY_RECEIVED",
    "SESSION_NOT_SAME",
}
#: Beginnings of gRPC's errors if no server answers, or the client was closed.
_NO_ANSWER = re.compile(
    r"<_\w+ of RPC that terminated with:\s+status = StatusCode\.UNAVAILABLE\b"
    r"|Cannot invoke RPC\b.*\bclosed channel"
)
#: Errors of calls to Spark, classic or Connect, if the session is gone: gRPC raises ValueError on
#: a closed channel, and a stopped SparkContext AttributeError, because it has no Java object.
LOST = (Py4JError, PySparkException, OSError, ValueError, AttributeError)
#: The number of rows of a range that is used to count partitions.
_RANGE_ROWS = 1 << 16
#: The interval in seconds of requests to a Spark Connect server, which ends a session after an hour
#: without one (spark.connect.session.manager.defaultSessionTimeout).
ALIVE_S = 300.0
#: The time in seconds within which a Spark Connect server must answer a request.
_ANSWER_S = 10.0
#: The number of concurrent tasks, by session of Spark Connect.
_SLOTS: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()


def is_connect(value: Any) -> bool:
    """Return whether a session or a DataFrame is of Spark Connect."""
    return type(value).__module__.startswith("pyspark.sql.connect")


# ---------------------------------------------------------------------------- checks of arguments


def refuse_frame(frame: Any, name: str) -> None:
    """Raise TypeError unless the argument is a DataFrame (of Spark Connect: from 4.0 on).

    Raise ValueError if its session was stopped. ``name``: the argument's name, for messages.
    """
    if not is_connect(frame) and not isinstance(frame, DataFrame):
        kind = type(frame)
        library = f"{kind.__module__.partition('.')[0]}." if kind.__name__ == "DataFrame" else ""
        raise TypeError(
            f"{name} must be a pyspark DataFrame, got {library}{kind.__name__}; "
            "spark.createDataFrame() makes one"
        )
    _refuse_old_connect(frame, f"{name} is a DataFrame")
    _refuse_stopped(frame.sparkSession, f"{name} is a DataFrame of a session")


def refuse_session(spark: Any) -> None:
    """Raise TypeError unless it is a SparkSession (Connect: from 4.0 on); ValueError if stopped."""
    if not is_connect(spark) and not isinstance(spark, SparkSession):
        raise TypeError(
            f"spark must be a SparkSession, got {type(spark).__name__}; "
            "SparkSession.builder.getOrCreate() gives one"
        )
    _refuse_old_connect(spark, "spark is a session")
    _refuse_stopped(spark, "spark is a session")


def refuse_connect(value: Any, what: str, way_out: str) -> None:
    """Raise TypeError if a session or a DataFrame is of Spark Connect.

    ``what`` names the feature that needs a classic session, and the reason; ``way_out`` the
    alternative.
    """
    if is_connect(value):
        raise TypeError(f"{what}, got a session of Spark Connect; {way_out}")


def refuse_mixed(frame: Any, name: str, spark: Any, other: str) -> None:
    """Raise TypeError if only one of a DataFrame and a session is of Spark Connect.

    ``name`` and ``other`` are their names in the message.
    """
    if is_connect(frame) != is_connect(spark):
        kinds = ("a classic session", "Spark Connect")
        raise TypeError(
            f"{name} is of {kinds[is_connect(frame)]}, and {other} is of "
            f"{kinds[is_connect(spark)]}; they cannot run together. Use the same session for both"
        )


def _refuse_old_connect(value: Any, what: str) -> None:
    if is_connect(value) and SPARK < (4, 0):
        raise TypeError(
            f"{what} of Spark Connect, which ackcore supports from Spark 4.0 on; use a classic "
            "session (SparkSession.builder.master(...)), or a newer Spark"
        )


def _refuse_stopped(spark: Any, what: str) -> None:
    """Raise ValueError if a session was stopped, or its JVM has ended."""
    if not is_stopped(spark):
        return
    raise ValueError(
        f"{what} that was stopped; SparkSession.builder.getOrCreate() makes another, with which "
        "all data must be read again"
    )


def is_stopped(spark: Any) -> bool:
    """Return whether a session was stopped or, if it is classic, its JVM has ended."""
    if is_connect(spark):
        return bool(spark.is_stopped)
    return _says_stopped(spark) is not False


def is_jvm_lost(spark: Any) -> bool:
    """Return whether a classic session was not stopped, but its JVM cannot be reached."""
    return not is_connect(spark) and _says_stopped(spark) is None


def _says_stopped(spark: Any) -> bool | None:
    """Return whether a classic session was stopped; None if its JVM cannot be reached."""
    java = spark.sparkContext._jsc
    try:
        return java is None or bool(java.sc().isStopped())
    except (Py4JError, OSError):
        return None


def refuse_unnameable(path: str, spark: Any) -> None:
    """Raise ValueError if the JVM of a classic session cannot write the letters of a path.

    Java writes "?" for each letter that its locale lacks, so two paths may become the same.
    """
    if path.isascii():
        return
    charset = spark._jvm.System.getProperty("sun.jnu.encoding")
    with contextlib.suppress(LookupError):  # a charset that Python lacks
        try:
            path.encode(charset)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"Spark's part of the checkpoint is in {path!r}, and the JVM of the driver cannot "
                f"write {path[error.start]!r} in paths: their encoding is {charset}, by the "
                "locale. Start the driver with LC_ALL=C.UTF-8, or choose another path"
            ) from None


def refuse_no_session() -> None:
    """Raise ValueError if this process has no running SparkContext, nor uses Spark Connect."""
    context = active_context()
    if not is_remote() and (context is None or context._jsc is None):
        raise ValueError(
            "a Column needs a running SparkSession, and there is none, or it was stopped; "
            "SparkSession.builder.getOrCreate() makes one"
        )


# -------------------------------------------------------------------------- properties of sessions


def task_slots(spark: Any) -> int:
    """Return the number of tasks that a session runs at once, at least 1: its default parallelism.

    On Spark Connect a small job finds it, once per session, as the number of partitions of a range.
    Later changes of the cluster are not seen there.
    """
    if not is_connect(spark):
        return max(1, int(spark.sparkContext.defaultParallelism))
    found = _SLOTS.get(spark)
    if found is None:
        numbers = spark.range(_RANGE_ROWS).selectExpr("spark_partition_id() AS n")
        found = _SLOTS[spark] = 1 + numbers.selectExpr("max(n)").collect()[0][0]
    return found


def keep_alive(spark: Any) -> None:
    """Send a request to a Spark Connect server, so that it keeps an idle session; ignore errors."""
    if is_connect(spark):
        with contextlib.suppress(*LOST):  # the next job reports the error
            spark.conf.get("spark.sql.caseSensitive")


def session_lost(error: BaseException) -> bool:
    """Return whether an error means that the Spark Connect session or its server is gone.

    PySpark has then already retried for about ten minutes, if a retry could help.
    """
    if isinstance(error, PySparkException):
        # Errors of tasks have other conditions, whatever their text is.  The condition of a classic
        # session's error needs a call to the JVM, which may be gone.
        asks_jvm = type(error).__module__.endswith(".captured")
        told = None if SPARK < (4, 0) or asks_jvm else error.getCondition()
        return told in _GONE or bool(_NO_ANSWER.match(text_of_error(error)))
    return isinstance(error, ValueError) and bool(_NO_ANSWER.match(text_of_error(error)))


def session_gone(spark: Any) -> bool:
    """Ask a Spark Connect server: return whether it has ended a session, or is silent for 10 s.

    A job that runs when its session ends may fail as if it had been cancelled. Returns
    False for a classic session.
    """
    if not is_connect(spark):
        return False
    answers: list[bool] = []

    def ask() -> None:
        try:
            spark.conf.get("spark.sql.caseSensitive")
        except LOST as error:
            answers.append(session_lost(error))
        else:
            answers.append(False)

    # In a thread, because PySpark retries for ten minutes if the server is gone.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_ANSWER_S)
    return not answers or answers[0]


# --------------------------------------------------------------------------- cancellation of jobs


class JobTag:
    """A unique name for the jobs of a session that one thread starts, used to cancel them."""

    def __init__(self, spark: Any, name: str) -> None:
        self._spark = spark
        self._name = name
        self._context: SparkContext | None = None if is_connect(spark) else spark.sparkContext
        self._asking: threading.Thread | None = None

    def add(self) -> None:
        """Tag the jobs that this thread starts from now on."""
        if self._context is None:
            self._spark.addTag(self._name)
        else:
            self._context.addJobTag(self._name)

    def remove(self) -> None:
        """Stop tagging jobs of this thread."""
        if self._context is None:
            self._spark.removeTag(self._name)
        else:
            self._context.removeJobTag(self._name)

    def cancel(self) -> None:
        """Cancel the running jobs with this tag, from any thread; on Spark Connect do not wait."""
        if self._context is not None:
            self._context.cancelJobsWithTag(self._name)
        elif self._asking is None or not self._asking.is_alive():
            # In a thread, because PySpark retries for ten minutes if the server is gone.
            self._asking = threading.Thread(target=self._interrupt, daemon=True)
            self._asking.start()

    def _interrupt(self) -> None:
        with contextlib.suppress(*LOST):
            self._spark.interruptTag(self._name)


def use_own_group(spark: Any, name: str, description: str) -> None:
    """Set a job group for the jobs of this thread; its cancellation interrupts running tasks.

    Spark Connect has no groups.
    """
    if not is_connect(spark):
        spark.sparkContext.setJobGroup(name, description, interruptOnCancel=True)


def activate(spark: Any) -> None:
    """Make a classic session active in this thread, so that its settings apply here."""
    if not is_connect(spark):  # Spark Connect's server does this itself
        set_active(spark)


def job_thread(spark: Any, run: Callable[[], object], name: str) -> threading.Thread:
    """Return an unstarted thread for ``run``, with this thread's local properties and job tags."""
    if not is_connect(spark):
        return InheritableThread(target=run, name=name, daemon=True)
    tags = spark.getTags()

    def run_tagged() -> None:
        for tag in tags:
            spark.addTag(tag)
        run()

    return threading.Thread(target=run_tagged, name=name, daemon=True)


# ------------------------------------------------------------------------------- the job of a run


_TOO_LARGE = re.compile(r"Total size of serialized results .*spark\.driver\.maxResultSize.*")

_UNION = "spark.sql.unionOutputPartitioning"
_ADAPTIVE = "spark.sql.adaptive.enabled"
#: By session and setting, the number of running jobs for which it is off, and its value before.
_OFF: dict[Hashable, tuple[int, str | None]] = {}
_LOCK = threading.Lock()


@contextlib.contextmanager
def _off(session: Any, setting: str) -> Iterator[None]:
    """Set a setting of the session to false; restore it when the last block of any thread ends."""
    session_id = session.session_id if is_connect(session) else session._jsparkSession.hashCode()
    key = session_id, setting
    with _LOCK:
        users, before = _OFF.get(key, (0, None))
        if not users:
            before = session.conf.get(setting, None)
            session.conf.set(setting, "false")
        _OFF[key] = users + 1, before
    try:
        yield
    finally:
        with _LOCK:
            users, before = _OFF.pop(key)
            if users > 1:
                _OFF[key] = users - 1, before
            else:
                with contextlib.suppress(*LOST):  # the job's own error gives the cause
                    if before is None:
                        session.conf.unset(setting)
                    else:
                        session.conf.set(setting, before)


class ResultsTooLarge(Exception):
    """Tasks returned more than ``spark.driver.maxResultSize``, because so many records failed."""


def collected(frame: DataFrame, *, adaptive: bool = True) -> pa.Table:
    """Run a job and return its rows; each partition of each side of a union has its own task.

    A setting of the session is off while the job runs: since Spark 4.1, sides with equal
    partitioning would otherwise share tasks. On a classic session the result has no columns if
    there are no rows. Raises ResultsTooLarge if the results are too large for the driver, and other
    errors of the job unchanged.

    ``adaptive``: whether Spark may plan the job again after each exchange, by its statistics. If
    True, each exchange is a job of its own.
    """
    session = frame.sparkSession
    with contextlib.ExitStack() as stack:
        for setting in (_UNION,) if adaptive else (_UNION, _ADAPTIVE):
            stack.enter_context(_off(session, setting))
        try:
            return to_arrow(frame) if is_connect(frame) else results(frame)
        except (Py4JError, PySparkException) as error:
            found = _TOO_LARGE.search(str(error))
            if found is None:
                raise
            raise ResultsTooLarge(found[0].strip()) from error


def is_case_sensitive(spark: SparkSession) -> bool:
    """Return whether a session distinguishes columns whose names differ only in case."""
    return str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true"
