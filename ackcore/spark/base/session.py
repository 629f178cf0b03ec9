"""The session that jobs run in, and what differs between a classic one and Spark Connect's.

On Spark Connect the driver of Spark is a server's, in another process or on another machine: there
is no JVM here, no SparkContext, and no plan to be looked at.  All that goes another way there is
asked for here; what a plan would tell, `determinism` takes for unknown.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pyspark import InheritableThread
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.utils import is_remote

from ackcore.spark.base.versions import SPARK, Py4JError, active_context, set_active

if TYPE_CHECKING:
    from pyspark import SparkContext

#: The conditions of errors by which Spark Connect says that a session is not there any more, or
#: that this is not the server that it was made on.
_GONE = {
    "INVALID_HANDLE.SESSION_CHANGED",
    "INVALID_HANDLE.SESSION_CLOSED",
    "INVALID_HANDLE.SESSION_NOT_FOUND",
    "NO_ACTIVE_SESSION",
    "RESPONSE_ALREADY_RECEIVED",
    "SESSION_NOT_SAME",
}
#: How the text of gRPC's own errors begins: that no server answers, or that the client was closed.
_NO_ANSWER = re.compile(
    r"<_\w+ of RPC that terminated with:\s+status = StatusCode\.UNAVAILABLE\b"
    r"|Cannot invoke RPC\b.*\bclosed channel"
)
#: What a call to Spark may raise, whichever kind of session it goes to, if that is gone:
#: ValueError is gRPC's on a channel that was closed.
LOST = (Py4JError, PySparkException, OSError, ValueError)
#: Rows of a range that is cut into partitions, to see how many these are.
_RANGE_ROWS = 1 << 16
#: How often a server of Spark Connect should hear of a session, in seconds: after an hour without
#: it would end it (spark.connect.session.manager.defaultSessionTimeout).
ALIVE_S = 300.0
#: By session of Spark Connect, how many tasks it runs at once.
_SLOTS: WeakKeyDictionary[SparkSession, int] = WeakKeyDictionary()


def is_connect(value: Any) -> bool:
    """Whether a session or a DataFrame is Spark Connect's."""
    return type(value).__module__.startswith("pyspark.sql.connect")


# ------------------------------------------------------------------------------- what is refused


def refuse_frame(frame: Any, name: str) -> None:
    """Raise if an argument is no DataFrame, or one of a session that was stopped."""
    if not is_connect(frame) and not isinstance(frame, DataFrame):
        raise TypeError(
            f"{name} must be a pyspark DataFrame, got {type(frame).__name__}; "
            "spark.createDataFrame() makes one"
        )
    _refuse_old_connect(frame, f"{name} is a DataFrame")
    _refuse_stopped(frame.sparkSession, f"{name} is a DataFrame of a session")


def refuse_session(spark: Any) -> None:
    """Raise if an argument is no SparkSession, or one that was stopped."""
    if not is_connect(spark) and not isinstance(spark, SparkSession):
        raise TypeError(
            f"spark must be a SparkSession, got {type(spark).__name__}; "
            "SparkSession.builder.getOrCreate() gives one"
        )
    _refuse_old_connect(spark, "spark is a session")
    _refuse_stopped(spark, "spark is a session")


def refuse_connect(value: Any, what: str, way_out: str) -> None:
    """Raise TypeError if a session or a DataFrame is Spark Connect's.

    Parameters
    ----------
    value : SparkSession or DataFrame
        Which is asked about.
    what : str
        What needs a classic session, and why, for the message.
    way_out : str
        What to do instead.
    """
    if is_connect(value):
        raise TypeError(f"{what}, and this one is Spark Connect's; {way_out}")


def refuse_mixed(frame: Any, name: str, spark: Any, other: str) -> None:
    """Raise TypeError if one of a DataFrame and a session is Spark Connect's, and the other not.

    Parameters
    ----------
    frame, spark : DataFrame and SparkSession
        Which are to run together.
    name, other : str
        What they are, for the message.
    """
    if is_connect(frame) != is_connect(spark):
        kinds = ("a classic session", "Spark Connect")
        raise TypeError(
            f"{name} is of {kinds[is_connect(frame)]}, and {other} of {kinds[is_connect(spark)]}, "
            "and they cannot run together; read both with one session"
        )


def _refuse_old_connect(value: Any, what: str) -> None:
    if is_connect(value) and SPARK < (4, 0):
        raise TypeError(
            f"{what} of Spark Connect, which ackcore runs on from Spark 4.0 on; use a classic "
            "session (SparkSession.builder.master(...)), or a newer Spark"
        )


def _refuse_stopped(spark: Any, what: str) -> None:
    """Raise if a session was stopped, or its JVM has ended."""
    if not _is_stopped(spark):
        return
    raise ValueError(
        f"{what} that was stopped; SparkSession.builder.getOrCreate() makes another, and what is "
        "read with it has to be read anew"
    )


def _is_stopped(spark: Any) -> bool:
    if is_connect(spark):
        return bool(spark.is_stopped)
    java = spark.sparkContext._jsc
    try:
        return java is None or java.sc().isStopped()
    except (Py4JError, OSError):
        return True  # its JVM has ended


def refuse_no_session() -> None:
    """Raise if there is no session, without which there are no Columns."""
    context = active_context()
    if not is_remote() and (context is None or context._jsc is None):
        raise ValueError(
            "there must be a SparkSession where Columns are made, and there is none, or it was "
            "stopped; SparkSession.builder.getOrCreate() makes one"
        )


# ------------------------------------------------------------------------ what a session is asked


def session_key(spark: Any) -> Hashable:
    """Return what tells a session from all others of this process."""
    key: Hashable = spark.session_id if is_connect(spark) else spark._jsparkSession.hashCode()
    return key


def task_slots(spark: Any) -> int:
    """Return how many tasks a session runs at once, at least 1: its default parallelism.

    Of Spark Connect it is the number of partitions that a range is cut into, which takes a small
    job, once for each session; what joins or leaves the cluster later is not seen there.
    """
    if not is_connect(spark):
        return max(1, int(spark.sparkContext.defaultParallelism))
    found = _SLOTS.get(spark)
    if found is None:
        numbers = spark.range(_RANGE_ROWS).selectExpr("spark_partition_id() AS n")
        found = _SLOTS[spark] = 1 + numbers.selectExpr("max(n)").collect()[0][0]
    return found


def keep_alive(spark: Any) -> None:
    """Keep a server of Spark Connect from ending a session of which it hears nothing."""
    if is_connect(spark):
        with contextlib.suppress(*LOST):  # what runs next will tell
            spark.conf.get("spark.sql.caseSensitive")


def session_lost(error: BaseException) -> bool:
    """Whether Spark Connect's session or its server is gone, by an error.

    PySpark has then tried again for some ten minutes where there was any hope.
    """
    if isinstance(error, PySparkException):
        # What a task raises has no such condition, whatever its text may hold; and for an error of
        # a classic session a JVM would be asked, which may be gone.
        asks_jvm = type(error).__module__.endswith(".captured")
        told = None if SPARK < (4, 0) or asks_jvm else error.getCondition()
        return told in _GONE or bool(_NO_ANSWER.match(str(error)))
    return isinstance(error, ValueError) and bool(_NO_ANSWER.match(str(error)))


# ----------------------------------------------------------------- jobs that have to be cancelled


class JobTag:
    """A name for the jobs that one thread starts, by which they are cancelled.

    Parameters
    ----------
    spark : SparkSession
        Where they run.
    name : str
        No other's.
    """

    def __init__(self, spark: Any, name: str) -> None:
        self._spark = spark
        self._name = name
        self._context: SparkContext | None = None if is_connect(spark) else spark.sparkContext
        self._asking: threading.Thread | None = None

    def add(self) -> None:
        """Name the jobs that this thread starts from now on."""
        if self._context is None:
            self._spark.addTag(self._name)
        else:
            self._context.addJobTag(self._name)

    def remove(self) -> None:
        """Name no more of them."""
        if self._context is None:
            self._spark.removeTag(self._name)
        else:
            self._context.removeJobTag(self._name)

    def cancel(self) -> None:
        """Cancel those that run; from any thread."""
        if self._context is not None:
            self._context.cancelJobsWithTag(self._name)
        elif self._asking is None or not self._asking.is_alive():
            # A server that is gone would be asked for ten minutes.
            self._asking = threading.Thread(target=self._interrupt, daemon=True)
            self._asking.start()

    def _interrupt(self) -> None:
        with contextlib.suppress(*LOST):
            self._spark.interruptTag(self._name)


def activate(spark: Any) -> None:
    """Have the settings of a session count in this thread, as they do where it was made."""
    if not is_connect(spark):  # there it is the server's session by itself
        set_active(spark)


def job_thread(spark: Any, run: Callable[[], object], name: str) -> threading.Thread:
    """Return a thread whose jobs have the properties and tags of this one's."""
    if not is_connect(spark):
        return InheritableThread(target=run, name=name, daemon=True)
    tags = spark.getTags()

    def run_tagged() -> None:
        for tag in tags:
            spark.addTag(tag)
        run()

    return threading.Thread(target=run_tagged, name=name, daemon=True)
