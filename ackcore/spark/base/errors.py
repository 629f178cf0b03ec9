"""Errors about checkpoints, and the shortening of Spark's errors to one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

from ackcore._error_hints import text_of_error


class StateError(RuntimeError):
    """The checkpoint cannot be used or written; the message names the file and what to do."""

    #: The part of a query with which the message was prefixed, such as "sink 'out'"; else None.
    part: str | None = None


class CheckpointInUse(StateError):
    """Another query holds the checkpoint or has taken it over."""


class CheckpointCorrupt(StateError):
    """A file of the checkpoint is damaged or missing."""


class RowFileDamaged(CheckpointCorrupt):
    """A file that a task wrote is damaged or missing. An undecided run is repeated."""


class CheckpointForeign(StateError):
    """The checkpoint or an output belongs to another topology, query or kind of run."""


class CheckpointFormat(StateError):
    """Another version of ackcore wrote the checkpoint, in a format that this one cannot read."""


class CheckpointReadOnly(StateError):
    """The driver has no permission to write the checkpoint, or its file system is read-only."""


#: The end of most messages about damage, which cannot be repaired.
WAY_OUT = (
    "Restore the whole checkpoint directory, Spark's part and ackcore's together, from a backup; "
    "or start on a new checkpoint, which reads the sources from their configured start and does "
    "not have the records that wait for a retry in this one"
)


def corrupt(path: str | os.PathLike[str], what: str, way_out: str = WAY_OUT) -> CheckpointCorrupt:
    """Return the error "<path> <what>. <way_out>." for a damaged or missing file."""
    return CheckpointCorrupt(f"{os.fspath(path)} {what}. {way_out}.")


#: The most damaged files that an error names.
_MOST_FILES = 10


def raise_all(checks: Iterable[Callable[[], object]]) -> None:
    """Call all ``checks``; then raise one CheckpointCorrupt for all that they raised, if any.

    A single one is raised unchanged. Of several, the message has the first 10, equal ones once. Any
    other exception of a check is raised at once.
    """
    found: dict[str, CheckpointCorrupt] = {}
    for check in checks:
        try:
            check()
        except CheckpointCorrupt as error:
            found.setdefault(str(error).removesuffix(f". {WAY_OUT}."), error)
    if len(found) == 1:
        raise next(iter(found.values()))
    if found:
        more = f"; and {len(found) - _MOST_FILES} more" if len(found) > _MOST_FILES else ""
        told = "; ".join([*found][:_MOST_FILES])
        raise corrupt(f"{len(found)} files of the checkpoint", f"are damaged: {told}{more}")


#: The maximum length of a line; longer ones contain data rather than a cause.
_LONGEST = 500


#: Spark's text for an error in another thread; only the cause is informative.
_HOLLOW = "Exception thrown in awaitResult"
_CAUSE = "Caused by: "
_TRACEBACK = "Traceback (most recent call last):"
#: gRPC's text for a failed request: its first line names neither the status nor the cause.
_RPC = re.compile(
    r"<\w+ of RPC that terminated with:\s+status = StatusCode\.(\w+)\s+details = \"(.*)"
)


def one_line(error: BaseException) -> str:
    """Return the line of an error that states its cause, cut to 500 characters.

    Return the name of its class if the error has no text.
    """
    line = _telling_line(error)
    cause: BaseException | None = error
    while _HOLLOW in line:
        # PySpark keeps the cause of a Java error in its own attribute.
        cause = getattr(cause, "_cause", None)
        if cause is None:
            break
        line = _telling_line(cause)
    return line[:_LONGEST]


def _telling_line(error: BaseException) -> str:
    text = text_of_error(error)
    rpc = _RPC.match(text)
    if rpc is not None:
        status, details = rpc.groups()
        return ": ".join(filter(None, (status, details.removesuffix('"'))))
    lines = text.strip().splitlines() or [type(error).__name__]
    if lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        lines[0] = lines[1].removeprefix(": ")  # the first line is Py4J's
    # A worker's error follows the frames of the last traceback, within Java's stack trace.
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
