"""The errors for a micro-batch of which no run was accepted, with advice to the user."""

from __future__ import annotations

import re
import sys

from pyspark.errors import AnalysisException, PySparkException

from ackcore.spark.base.errors import StateError, one_line
from ackcore.spark.base.versions import Py4JError
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.engine.collect import ResultsTooLarge
from ackcore.spark.engine.decide import Disagreement
from ackcore.spark.engine.insist import Stopped

#: Errors of a run that another run may not have.
_MAY_PASS = (Disagreement, Py4JError, PySparkException, RuntimeError, OSError, EOFError)

#: The start of a worker's error if it could not load its task.
_NO_MODULE = "ModuleNotFoundError: "
_WRONG_VALUE = re.compile(r"\[([A-Z][A-Z0-9_.]*)\][^\n]*SQLSTATE: 22")


class RunFailed(RuntimeError):
    """Every run of a micro-batch failed; nothing was decided about its records."""


def worth_another_run(error: BaseException) -> bool:
    """Return whether another run may succeed after this error."""
    if not isinstance(error, _MAY_PASS) or isinstance(error, AnalysisException | StateError):
        return False
    # This worker could not load its task. (A bolt that lacks a module only fails its tuples.)
    return not one_line(error).startswith(_NO_MODULE)


def wrong_value(error: BaseException) -> str | None:
    """Return Spark's name of an error about a value, such as CAST_INVALID_INPUT, or None.

    Spark raises these outside the bolts, and for the same rows each time: a cast in ANSI mode, a
    division by zero, an overflow. Their SQLSTATE is of class 22, data exception (ISO 9075).
    """
    found = _WRONG_VALUE.search(str(error))
    return found and found.group(1)


def stopped(plan: Plan) -> Stopped:
    """Return the exception for a query that is stopped while a micro-batch runs."""
    return Stopped(f"stopped while micro-batch {plan.number} ran")


def given_up(plan: Plan, runs: int, error: BaseException) -> RunFailed:
    """Return the exception for a micro-batch that is not run again, with the way out."""
    said = one_line(error)
    way_out = "when the cause is gone, start again on the same checkpoint"
    if isinstance(error, ResultsTooLarge):
        way_out = (
            "too many of them failed for the driver; raise spark.driver.maxResultSize (and "
            "spark.driver.memory with it, both before the session is made), or mend what they fail "
            "of, and start again on the same checkpoint. A source that gives a micro-batch fewer "
            "records, as by maxFilesPerTrigger, keeps later ones smaller"
        )
    if wrong_value(error):
        way_out = (
            "the DataFrame of a spout has a value that its own expressions do not take; tolerate "
            "it there (as try_cast does) or filter it out, then start again on the same checkpoint"
        )
    if said.startswith(_NO_MODULE):
        way_out = (
            "the workers do not find what the driver does. A file of yours, which the driver has "
            "from its script's directory: send it along with spark.sparkContext.addPyFile() (on "
            "Spark Connect spark.addArtifact(path, pyfile=True)), or put its directory into the "
            "workers' PYTHONPATH before the session is made. A package that is installed: point "
            "PYSPARK_PYTHON (or spark.pyspark.python), before the session is made, to a Python "
            f"that has it, here {sys.executable}; then {way_out}"
        )
    return RunFailed(
        f"micro-batch {plan.number} was run {runs} time{'s' * (runs > 1)} and is not accepted, "
        f"the last time because of {type(error).__name__}: {said}. Nothing is decided about "
        f"its records: {way_out}"
    )
