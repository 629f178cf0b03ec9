"""Requirements of Spark's workers: their Python, and objects that can be pickled for them.

By default the workers run the driver's Python.  It is checked before use, because objects sent to
the workers refer to ackcore's modules.  If those are missing or of another version, a job fails in
its first task with a PySpark traceback.  On Spark Connect the server's settings are not visible
here, so the workers are always checked by a job.
"""

from __future__ import annotations

import dis
import functools
import importlib
import json
import logging
import os
import pickle
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import url2pathname
from weakref import WeakKeyDictionary

from pyspark import cloudpickle
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
    """The workers' Python cannot run ackcore; the message has the cause and the remedy."""


class WorkerReport(NamedTuple):
    """A worker's Python, with the version of its ackcore, or the error of its import in `lacks`."""

    executable: str
    python: str
    version: str | None
    lacks: str | None


def use_drivers_python(context: Any) -> None:
    """Set the workers of a local master to the driver's interpreter, unless a setting names one."""
    if (
        context.pythonExec == _UNSET
        and "PYSPARK_PYTHON" not in os.environ
        and _is_local(context)
        and context.getConf().get("spark.pyspark.python") is None
    ):
        context.pythonExec = sys.executable or _UNSET


def check_workers(spark: SparkSession) -> None:
    """Call `use_drivers_python`; then refuse a session whose workers cannot run ackcore.

    The check takes a small job, once per SparkContext or session of Spark Connect. It takes none on
    a local master whose workers run the driver's interpreter and import ackcore from the same
    place. If the job fails for another reason it is run once more; then a warning is logged and the
    check is skipped. Raises WorkerPythonError if their Python cannot be started, lacks something,
    or has another version of ackcore.
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
    """Run the job of `ask`, at most twice; log a warning and return None if it does not succeed.

    Raises WorkerPythonError at once if Spark cannot start the workers' Python.
    """
    for may_pass in (True, False):
        try:
            return interruptible(spark, lambda: ask(spark))
        except (Py4JError, PySparkException) as error:
            found = _NO_START.search(str(error))
            if found is not None:
                said = found[0].strip().splitlines()[-1].strip()
                what = f"Spark cannot run the Python of its workers, {python}: {said}"
                raise _unfit(what, is_connect(spark)) from error
            # On a local master one lost worker fails the job.  A lost session stays lost.
            if not may_pass or session_lost(error):
                _log.warning(
                    "the Python of Spark's workers was not checked, because the job that checks it "
                    "failed: %s",
                    one_line(error),
                )
                return None
    raise AssertionError("unreachable")


def _is_local(context: Any) -> bool:
    return (context.master or "").startswith("local")


def _is_drivers_own(context: Any) -> bool:
    """Return whether the driver's settings show that workers import ackcore from its directory."""
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
    """Raise `WorkerPythonError` if a worker cannot import ackcore, or has another version of it."""
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


def _refusal(value: object) -> Exception | None:
    """Return the error of pickling a value, or None if it can be pickled."""
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    return None


def refuse_unpicklable(subject: str, value: object, where: str) -> None:
    """Refuse an object that cannot be sent to the workers; the message names the part at fault.

    Raises TypeError if pickling it raises.

    ``subject``: the object's name in messages. ``value``: a function, or an object whose methods
    are called. ``where``: the place at which to create the unpicklable part instead.
    """
    error = _refusal(value)
    if error is None:
        return
    found = f"{type(error).__name__}: {one_line(error)}"
    while isinstance(value, functools.partial):
        for part in (*value.args, *value.keywords.values()):
            if _refusal(part) is not None:
                raise TypeError(
                    f"{subject} is sent to the workers, and an argument that it sets, a "
                    f"{type(part).__name__}, cannot be pickled ({found}); make it in {where}"
                ) from error
        value = value.func
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, FunctionType):
        refers, parts = "it refers to", _of_function(f"{value.__name__}()", value, set())
    else:
        for attribute, held in _state_of(value).items():
            if _refusal(held) is not None:
                raise TypeError(
                    f"{subject} is sent to the workers, and its attribute {attribute!r}, a "
                    f"{type(held).__name__}, cannot be pickled ({found}); {_way_out(held, where)}"
                ) from error
        refers, parts = "its methods refer to", _of_class(type(value), set())
    for what, part in parts:
        raise TypeError(
            f"{subject} is sent to the workers with all that {refers}, and {what}, "
            f"a {type(part).__name__}, cannot be pickled ({found}); "
            + _way_out(part, f"{where}, or in a module that the workers import")
        ) from error
    raise TypeError(
        f"{subject} is sent to the workers and cannot be pickled ({found}); make the part "
        f"that cannot be pickled in {where}"
    ) from error


def _state_of(value: object) -> dict[str, object]:
    """Return the attributes that are pickled with an object; {} if its own methods pickle it."""
    try:
        reduced: Any = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        _, _, state, *_ = reduced
    except Exception:  # the user's own method raised, or returned something else
        return {}
    parts = state if isinstance(state, tuple) else (state,)  # with slots, two dicts
    return {name: of for part in parts if isinstance(part, dict) for name, of in part.items()}


def _way_out(part: object, where: str) -> str:
    if type(part).__module__.startswith("pyspark.sql."):  # a session, a DataFrame, a Column
        return (
            "only the driver can use it: make a DataFrame another spout, or collect() its rows "
            "before the start and use the list"
        )
    return f"make it in {where}"


def _of_class(kind: type, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield attributes of a class, and values that its methods use, that cannot be pickled."""
    for base in kind.__mro__:
        # A class of a module that workers import is pickled by name.
        if _refusal(base) is None:
            continue
        for attribute, value in vars(base).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield from _of_function(f"{base.__name__}.{attribute}()", function, seen)
            elif (
                not attribute.startswith(("__", "_abc_"))  # of every abstract class
                and not isinstance(value, MemberDescriptorType)  # a slot
                and _refusal(value) is not None
            ):
                yield f"the attribute {attribute!r} of class {base.__name__}", value


def _of_function(
    whose: str, function: FunctionType, seen: set[int]
) -> Iterator[tuple[str, object]]:
    if id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    names = _globals_in(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    # A signature would evaluate annotations, whose names may be imported for type checkers only.
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    last = reversed(function.__defaults__ or ())
    defaults = dict(zip(reversed(positional), last, strict=False))
    defaults |= function.__kwdefaults__ or {}
    parts = ("the global", found), ("the variable", around), ("the default of", defaults)
    for kind, values in parts:
        for name, value in values.items():
            if _refusal(value) is None:
                continue
            inner: list[tuple[str, object]] = []
            if isinstance(value, FunctionType):
                inner = list(_of_function(f"{name}()", value, seen))
            elif isinstance(value, type) and id(value) not in seen:
                seen.add(id(value))
                inner = list(_of_class(value, seen))
            yield from inner or [(f"{kind} {name!r} in {whose}", value)]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _globals_in(code: CodeType) -> list[str]:
    """Return the names of globals that code uses, including those of nested functions."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    own = [one.argval for one in dis.get_instructions(code) if one.opname.endswith("_GLOBAL")]
    return [*own, *(name for one in inner for name in _globals_in(one))]
