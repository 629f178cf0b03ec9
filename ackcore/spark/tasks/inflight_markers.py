"""In-flight markers: files that name the records that a task had in flight when it crashed.

Each attempt at a task that may be suspected later keeps one, ``in-flight/<level>-<partition>-
<attempt>.marker`` in its run's directory, and removes it when it ends, however it does as long as
its process lives.  It holds an exclusive lock on it: a marker that is there and not locked is that
of a process that crashed.  One that is locked belongs to an attempt that runs elsewhere, a copy for
speculation or one that Spark has given up, and is passed over.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ackcore._files.process_lock import ProcessLock
from ackcore._records import Int64s
from ackcore.spark.tasks.time_limit import read_time_out
from ackcore.topology.tuples import Reason

#: What is in flight: nothing; a chunk of rows, by its place among those of the task; what bolts
#: hold open when they are flushed; roots by name; and one root with nothing beside it on the
#: whole executor.
NOTHING, CHUNK, FLUSH, ROOTS, ALONE = range(5)

DIRECTORY = "in-flight"

_HEAD = struct.Struct("<qqqq")  # kind, chunk, rows, roots that follow
_ENDING, TIMED_OUT = ".marker", ".timed-out"


class TaskAttempt(NamedTuple):
    """Which attempt at which task; sorts by task, and then in the order of attempts."""

    level: int
    partition: int
    id: int

    @property
    def task(self) -> tuple[int, int]:
        """The task without the attempt."""
        return self.level, self.partition

    def path(self, work: str | os.PathLike[str], ending: str = _ENDING) -> str:
        """Return where its marker is, below a run's directory."""
        return os.path.join(work, DIRECTORY, "-".join(map(str, self)) + ending)


@dataclass(frozen=True)
class Marker:
    """What an attempt that crashed had in flight.

    Attributes
    ----------
    attempt : TaskAttempt
        Which attempt.
    kind : int
        `NOTHING`, `CHUNK`, `FLUSH`, `ROOTS` or `ALONE`.
    chunk, rows : int
        The place of the chunk in the task's work, and its number of rows.
    roots : frozenset of int
        Of `ROOTS` and `ALONE`.
    timed_out : Reason or None
        Why it ended, if it was ended for taking too long.
    """

    attempt: TaskAttempt
    kind: int
    chunk: int = 0
    rows: int = 0
    roots: frozenset[int] = frozenset()
    timed_out: Reason | None = None

    def __str__(self) -> str:
        level, partition, attempt = self.attempt
        what = {
            NOTHING: "nothing in flight",
            CHUNK: f"a chunk of {self.rows} rows in flight",
            FLUSH: "bolts being flushed",
            ROOTS: f"{len(self.roots)} records in flight",
            ALONE: "one record in flight",
        }[self.kind]
        how = "crashed" if self.timed_out is None else self.timed_out.message
        return f"attempt {attempt} at partition {partition} of level {level}: {how}, with {what}"


class MarkerFile:
    """The marker of the attempt that runs here."""

    def __init__(self, work: str, attempt: TaskAttempt) -> None:
        self._path = attempt.path(work)
        self._timed_out = attempt.path(work, TIMED_OUT)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # Under another name until it is locked: one that is not says that its process crashed.
        hidden = os.path.join(work, DIRECTORY, f".{os.path.basename(self._path)}")
        with suppress(FileNotFoundError):
            os.remove(hidden)
        self._file = ProcessLock(hidden)
        self._file.lock(fcntl.LOCK_EX)
        self.set(NOTHING)
        os.replace(hidden, self._path)

    def set(self, kind: int, chunk: int = 0, rows: int = 0, roots: Int64s | None = None) -> None:
        """Say what is in flight from now on."""
        named = b"" if roots is None else roots.tobytes()
        self._file.write(_HEAD.pack(kind, chunk, rows, len(named) // 8) + named)

    def remove(self) -> None:
        """End it: this attempt has not crashed."""
        if not self._file.is_open:
            return  # a process that was forked has no part in it
        for path in (self._timed_out, self._path):
            with suppress(FileNotFoundError):  # the run's directory may be gone
                os.remove(path)
        self._file.close()


def crashed(work: str | os.PathLike[str], task: tuple[int, int] | None = None) -> list[Marker]:
    """Return the markers of a run's attempts that crashed, in the order of tasks and attempts.

    Parameters
    ----------
    work : path
        The run's directory.
    task : (int, int), optional
        Level and partition: of this task only.
    """
    found = (_read(work, attempt) for attempt in attempts(work) if task in (None, attempt.task))
    return [marker for marker in found if marker is not None]


def attempts(work: str | os.PathLike[str]) -> list[TaskAttempt]:
    """Return which attempts have markers, those that live among them."""
    names: Iterable[str] = ()
    with suppress(FileNotFoundError):
        names = os.listdir(os.path.join(work, DIRECTORY))
    parts = (
        name.removesuffix(_ENDING).split("-")
        for name in names
        if name.endswith(_ENDING) and not name.startswith(".")
    )
    return sorted(TaskAttempt(*map(int, part)) for part in parts)


def _read(work: str | os.PathLike[str], attempt: TaskAttempt) -> Marker | None:
    """Return a marker, None if its attempt lives or has ended well."""
    try:
        file = os.open(attempt.path(work), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(file).st_nlink:
            return None  # removed since it was opened
        data = os.pread(file, os.fstat(file).st_size, 0)
    except OSError:
        return None  # locked
    finally:
        os.close(file)
    kind, chunk, rows, n = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
    if len(data) < _HEAD.size + 8 * n:
        # The name outlasted its host, and what was in flight did not: it is not synced.
        kind, chunk, rows, n = NOTHING, 0, 0, 0
    roots = np.frombuffer(data, np.int64, n, _HEAD.size) if n else np.empty(0, np.int64)
    return Marker(
        attempt,
        kind,
        chunk,
        rows,
        frozenset(roots.tolist()),
        read_time_out(attempt.path(work, TIMED_OUT)),
    )
