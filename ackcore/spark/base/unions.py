"""Jobs over unions, every partition of each side in a task of its own."""

from __future__ import annotations

import threading

import pyarrow as pa
from pyspark.sql import DataFrame

_UNION = "spark.sql.unionOutputPartitioning"
#: By session, how many jobs want its unions plain, and what the setting was before the first.
_PLAIN: dict[int, tuple[int, str | None]] = {}
_LOCK = threading.Lock()


def collected(frame: DataFrame) -> pa.Table:
    """Run a job, every partition of each side of a union in a task of its own.

    Since Spark 4.1 a union of sides that are partitioned alike, as single partitions are, has the
    first partitions of all sides in one task.  There would then be two first stages with one
    number, and two ends of what they send.
    """
    session = frame.sparkSession
    key = session._jsparkSession.hashCode()
    with _LOCK:
        users, before = _PLAIN.get(key, (0, None))
        if not users:
            before = session.conf.get(_UNION, None)
            session.conf.set(_UNION, "false")
        _PLAIN[key] = users + 1, before
    try:
        return frame.toArrow()
    finally:
        with _LOCK:
            users, before = _PLAIN.pop(key)
            if users > 1:
                _PLAIN[key] = users - 1, before
            elif before is None:
                session.conf.unset(_UNION)
            else:
                session.conf.set(_UNION, before)
