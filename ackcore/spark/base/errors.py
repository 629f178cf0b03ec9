"""Errors about checkpoints, and errors of Spark's in a line."""

from __future__ import annotations

import os


class StateError(RuntimeError):
    """The checkpoint cannot be used or written; the message says which file, and the way out."""


class CheckpointInUse(StateError):
    """Another query holds the checkpoint, or has taken it over."""


class CheckpointCorrupt(StateError):
    """A file of the checkpoint is damaged or missing."""


class WorkFileDamaged(CheckpointCorrupt):
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


def one_line(error: BaseException) -> str:
    """Return the line of an error that says what was wrong; Spark's go on for pages."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        lines[0] = lines[1].removeprefix(": ")  # the first is Py4J's, and names its own object
    # What a worker raised is the last line of its traceback, in the midst of Java's.
    for line in reversed(lines):
        name, colon, _ = line.partition(": ")
        if colon and name.isidentifier() and name.endswith(("Error", "Exception")):
            return line[:_LONGEST]
    return lines[0][:_LONGEST]
