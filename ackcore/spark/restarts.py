"""The restart of streams after an error, and the errors passed to Spark."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.streaming.query import StreamingQuery

from ackcore.spark.base.errors import one_line
from ackcore.spark.base.session import is_connect
from ackcore.spark.base.versions import INTERRUPTED, Py4JError, Py4JJavaError
from ackcore.spark.engine.insist import Stopped

#: Python errors that may be temporary: a source or a worker that could not be reached, a lost
#: connection.  ackcore's own errors come after their retries.
_FROM_OUTSIDE = (Py4JError, PySparkException, OSError, EOFError)
#: Ends of the names of Java classes for lasting errors: invalid queries and settings, offsets that
#: do not fit, and a stopped Spark.
_LASTING = (
    "AnalysisException",
    "AssertionError",
    "IllegalArgumentException",
    "IllegalStateException",
    "UnsupportedOperationException",
    "ConcurrentModificationException",
    "ConcurrentStreamLogUpdate",
    "LinkageError",
    "NoClassDefFoundError",
    "NoSuchMethodError",
    "MatchError",
)
_DEEPEST = 50
_WAY_OUT = "start again on the same checkpoint, with another session"


def may_pass(error: BaseException) -> bool:
    """Return whether the error may be temporary, so that a restart of the query could succeed."""
    if not isinstance(error, _FROM_OUTSIDE) or isinstance(error, AnalysisException):
        return False
    return not any(name.endswith(_LASTING) for name in _java_classes(error))


def _java_classes(error: BaseException) -> Iterator[str]:
    """Yield the names of the classes of a Java error and its causes."""
    java: Any = getattr(error, "_origin", None)
    if isinstance(error, Py4JJavaError):
        java = error.java_exception
    for _ in range(_DEEPEST):
        if java is None:
            return
        yield str(java.getClass().getName())
        java = java.getCause()


def end_of(spark: Any) -> str | None:
    """Return the reason why a session ended, or None if it runs or is not known to have ended."""
    if is_connect(spark):
        return f"the SparkSession was stopped; {_WAY_OUT}" if spark.is_stopped else None
    gateway = spark.sparkContext._gateway
    process = getattr(gateway, "proc", None)
    status = None if process is None else process.poll()
    if status is not None:
        return f"Spark's JVM ended with exit status {status}; {_WAY_OUT}"
    try:
        context = spark.sparkContext._jsc
        if context is None or context.sc().isStopped():
            return f"the SparkSession was stopped; {_WAY_OUT}"
    except (Py4JError, OSError):
        return f"Spark's JVM cannot be reached any more; {_WAY_OUT}"
    return None


def is_active(spark_query: StreamingQuery) -> bool | None:
    """Return whether Spark's query runs; None if the JVM cannot be reached."""
    try:
        return bool(spark_query.isActive)
    except (Py4JError, OSError):
        return None


class SaidElsewhere(RuntimeError):
    """The error raised to Spark and Py4J in place of an error that the query itself reports."""


def _is_news(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], SaidElsewhere))


# Py4J logs each exception of a callback with its traceback.
for _name in ("py4j.clientserver", "py4j.java_gateway"):
    logging.getLogger(_name).addFilter(_is_news)


def for_spark(error: Exception) -> Exception:
    """Return the error to raise to Spark for an error; `Query.exception` has the error itself.

    Its text is one short line.  Spark logs the text several times, and searches it for an
    interruption with a pattern that overflows the stack on a long text.  For a stopped query the
    text contains an interruption, so that Spark ends its query without an error.
    """
    if isinstance(error, Stopped):
        return SaidElsewhere(f"{INTERRUPTED} ({one_line(error)})")
    return SaidElsewhere(f"{type(error).__name__}: {one_line(error)}")
