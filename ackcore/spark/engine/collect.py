"""The job of a run: every partition of each side of a union in a task of its own."""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame

from ackcore.spark.base.session import session_key
from ackcore.spark.base.versions import Py4JError, to_arrow

_TOO_LARGE = re.compile(r"Total size of serialized results .*spark\.driver\.maxResultSize.*")

_UNION = "spark.sql.unionOutputPartitioning"
#: By session, the number of running jobs with plain unions, and the setting before the first.
_PLAIN: dict[Hashable, tuple[int, str | None]] = {}
_LOCK = threading.Lock()


class ResultsTooLarge(Exception):
    """Tasks returned more than ``spark.driver.maxResultSize``, because so many records failed."""


def collected(frame: DataFrame) -> pa.Table:
    """Run a job, with every partition of each side of a union in a task of its own.

    Since Spark 4.1, a union of sides with equal partitioning, such as single partitions, puts the
    first partitions of all sides into one task.  Two spout stages would then have one number, and
    their output would end twice.

    Raises
    ------
    ResultsTooLarge
        If the results are larger than ``spark.driver.maxResultSize``.
    Exception
        If the job fails for another reason.
    """
    session = frame.sparkSession
    key = session_key(session)
    with _LOCK:
        users, before = _PLAIN.get(key, (0, None))
        if not users:
            before = session.conf.get(_UNION, None)
            session.conf.set(_UNION, "false")
        _PLAIN[key] = users + 1, before
    try:
        return to_arrow(frame)
    except (Py4JError, PySparkException) as error:
        found = _TOO_LARGE.search(str(error))
        if found is None:
            raise
        raise ResultsTooLarge(found[0].strip()) from error
    finally:
        with _LOCK:
            users, before = _PLAIN.pop(key)
            if users > 1:
                _PLAIN[key] = users - 1, before
            elif before is None:
                session.conf.unset(_UNION)
            else:
                session.conf.set(_UNION, before)
