"""Errors about checkpoints, and errors of Spark's in a line."""

from __future__ import annotations

import os


class StateError(RuntimeError):
    """The checkpoint cannot be used or written; the message says which file, and the way out."""


class CheckpointInUse(StateError):
    """Another query holds the checkpoint, or has taken it over."""


class CheckpointCorrupt(StateError):
    """A file of the checkpoint is damaged or missing."""


class RowFileDamaged(CheckpointCorrupt):
    """A file that a run left is damaged or missing; before a decision that costs only a run."""


class CheckpointForeign(StateError):
    """The checkpoint belongs to another topology, or to another way of running it."""


class CheckpointNewer(StateError):
    """A newer ackcore wrote the checkpoint."""


class CheckpointReadOnly(StateError):
    """The checkpoint cannot be written."""


#: Ends most messages about damage: there is no repairing it, only the choice what to give up.
WAY_OUT = (
    "Restore the whole checkpoint directory, Spark's part and ackcore's together, from a backup; "
    "or start on a new checkpoint, which reads the source from where it is told to and knows "
    "nothing of the records that waited for a retry in this one"
)


def corrupt(path: str | os.PathLike[str], what: str, way_out: str = WAY_OUT) -> CheckpointCorrupt:
    """The error for a file that is not as it was written."""
    return CheckpointCorrupt(f"{os.fspath(path)} {what}. {way_out}.")


#: Longer lines hold data rather than what was wrong.
_LONGEST = 500


#: What Spark says of an error of another thread; the cause says what was wrong.
_HOLLOW = "Exception thrown in awaitResult"
_CAUSE = "Caused by: "
_TRACEBACK = "Traceback (most recent call last):"


def one_line(error: BaseException) -> str:
    """Return the line of an error that says what was wrong; Spark's go on for pages."""
    line = _telling_line(error)
    cause: BaseException | None = error
    while _HOLLOW in line:
        # Of an error of Java's, PySpark keeps the cause in an attribute of its own.
        cause = getattr(cause, "_cause", None)
        if cause is None:
            break
        line = _telling_line(cause)
    return line[:_LONGEST]


def _telling_line(error: BaseException) -> str:
    try:
        text = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the user's __str__ is code of the user's, too
        text = ""
    lines = text.strip().splitlines() or [type(error).__name__]
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        lines[0] = lines[1].removeprefix(": ")  # the first is Py4J's, and names its own object
    # What a worker raised stands behind the frames of its last traceback, in the midst of Java's.
    tracebacks = [at for at, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    for line in lines[tracebacks[-1] + 1 :] if tracebacks else ():
        if line[:1].strip():
            return line
    for line in reversed(lines):
        name, colon, _ = line.partition(": ")
        if colon and name.isidentifier() and name.endswith(("Error", "Exception")):
            return line
    if _HOLLOW in lines[0]:
        causes = [line for line in lines if line.startswith(_CAUSE) and _HOLLOW not in line]
        return causes[0].removeprefix(_CAUSE) if causes else lines[0]
    return lines[0]
