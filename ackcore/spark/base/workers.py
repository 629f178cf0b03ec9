"""The Python of Spark's workers: the driver's by default, and checked before use.

Objects sent to the workers refer to ackcore's modules.  If those are missing or of another version,
a job fails in its first task with a PySpark traceback.  On Spark Connect the server's settings are
not visible here, so the workers are always checked by a job.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname
from weakref import WeakKeyDictionary

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

import ackcore
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.interrupts import interruptible
from ackcore.spark.base.session import is_connect, session_lost, task_slots
from ackcore.spark.base.versions import Py4JError

_log = logging.getLogger("ackcore")

#: PySpark's default interpreter.
_UNSET = "python3"
#: Spark's errors for a Python that does not start or has another version.
_NO_START = re.compile(
    r'Cannot run program ".*|Python in worker has different version.*'
    r"|(?<=Error from python worker:)\s*(?:[^\n]*\n)*?[^\n]*(?:No module named|Error: )[^\n]*"
)
#: The checked Python, by SparkContext or session of Spark Connect.
_FIT: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
#: The value in `_FIT` for a server's Python.
_SERVERS = "the server's"


class WorkerPythonError(RuntimeError):
    """The workers' Python cannot run ackcore; the message says why, and what to do."""


class WorkerReport(NamedTuple):
    """A worker's report on its Python: ackcore's version, or the error of its import in `lacks`."""

    executable: str
    python: str
    version: str | None
    lacks: str | None


def use_drivers_python(context: Any) -> None:
    """Set the workers of a local master to the driver's interpreter, unless another one is set."""
    if (
        context.pythonExec == _UNSET
        and "PYSPARK_PYTHON" not in os.environ
        and _is_local(context)
        and context.getConf().get("spark.pyspark.python") is None
    ):
        context.pythonExec = sys.executable or _UNSET


def check_workers(spark: SparkSession) -> None:
    """Refuse a session whose workers cannot run ackcore.

    The check takes a small job, once per SparkContext or session of Spark Connect.  It takes none
    on a local master whose workers run the driver's interpreter and import ackcore from the same
    place. If the job fails for another reason it is run once more; then a warning is logged and the
    check is skipped.

    Raises
    ------
    WorkerPythonError
        If their Python cannot be started, lacks something, or has another version of ackcore.
    """
    connect = is_connect(spark)
    context: Any = spark if connect else spark.sparkContext
    if not connect:
        use_drivers_python(context)
    python = _SERVERS if connect else context.pythonExec
    if _FIT.get(context) == python:
        return
    if connect or not _is_drivers_own(context):
        answers = _answers(spark, python)
        if answers is None:
            return  # the next job reports the error
        judge(answers, connect)
    _FIT[context] = python


def _answers(spark: SparkSession, python: str) -> set[WorkerReport] | None:
    """Run the check on the workers, twice if needed; return None if it fails for another reason."""
    for may_pass in (True, False):
        try:
            return interruptible(spark, lambda: ask(spark))
        except (Py4JError, PySparkException) as error:
            found = _NO_START.search(str(error))
            if found is not None:
                said = found[0].strip().splitlines()[-1].strip()
                what = f"Spark's workers are to run {python}: {said}"
                raise _unfit(what, is_connect(spark)) from error
            # On a local master one lost worker fails the job.  A lost session stays lost.
            if not may_pass or session_lost(error):
                _log.warning(
                    "the Python of Spark's workers is not checked, since the job that asks them "
                    "failed: %s",
                    one_line(error),
                )
                return None
    raise AssertionError("unreachable")


def _is_local(context: Any) -> bool:
    return (context.master or "").startswith("local")


def _is_drivers_own(context: Any) -> bool:
    """Return whether workers import ackcore from the driver's place, as far as visible here."""
    if not (_is_local(context) and context.pythonExec == sys.executable):
        return False
    here = Path(ackcore.__file__).parents[1]
    sites = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found_in = [*sites, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return here in map(Path, found_in) or here in _installed_from(sites)


def _installed_from(sites: list[str]) -> Iterator[Path]:
    """Yield the directories of editable installs of ackcore (PEP 610)."""
    for one in distributions(name="ackcore", path=sites):
        origin = json.loads(one.read_text("direct_url.json") or "{}")
        if origin.get("dir_info", {}).get("editable"):
            yield Path(url2pathname(urlsplit(origin["url"]).path))


def ask(spark: SparkSession) -> set[WorkerReport]:
    """Run a job that returns the workers' reports: one task per core, or one on a local master."""

    # A nested function is pickled by value, so that workers can run it without ackcore.
    def look(_: int) -> str:
        version = lacks = None
        try:
            importlib.import_module("ackcore.spark")
            version = importlib.import_module("ackcore").__version__
        except Exception as error:
            lacks = f"{type(error).__name__}: {error}"
        return json.dumps([sys.executable, platform.python_version(), version, lacks])

    one = not is_connect(spark) and _is_local(spark.sparkContext)
    tasks = 1 if one else task_slots(spark)
    # Without Arrow, which the workers may lack.
    asked = sql.udf(look, "string", useArrow=False)
    rows = spark.range(0, tasks, 1, tasks).select(asked("id")).collect()
    return {WorkerReport(*json.loads(row[0])) for row in rows}


def judge(answers: Iterable[WorkerReport], connect: bool = False) -> None:
    """Raise `WorkerPythonError` if a report is of a Python that cannot run ackcore."""
    for one in sorted(answers, key=str):
        who = f"Spark's workers run {one.executable} (Python {one.python})"
        if one.lacks is not None:
            raise _unfit(f"{who}, which cannot import ackcore.spark: {one.lacks}", connect)
        if one.version != ackcore.__version__:
            raise _unfit(
                f"{who} with ackcore {one.version}, and the driver has ackcore "
                f"{ackcore.__version__}: they must be the same",
                connect,
            )


def _unfit(what: str, connect: bool) -> WorkerPythonError:
    if connect:
        return WorkerPythonError(
            f"{what}. Start the server of Spark Connect with PYSPARK_PYTHON, or "
            "spark.pyspark.python, set to a Python "
            f"{'.'.join(map(str, sys.version_info[:2]))}, as here, that has ackcore[spark] "
            f"{ackcore.__version__} (in local mode: set it in this process, before the session is "
            "made); on a cluster, install it on every worker"
        )
    return WorkerPythonError(
        f"{what}. Set PYSPARK_PYTHON, or spark.pyspark.python, to a Python that has "
        f"ackcore[spark] {ackcore.__version__}, as {sys.executable} has here, before the session "
        "is made; on a cluster, install it on every worker"
    )
