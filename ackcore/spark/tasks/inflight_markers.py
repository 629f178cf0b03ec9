"""In-flight markers: files that name the records that a task had in flight when it crashed.

Each attempt that may be suspected later keeps one marker, ``in-flight/<level>-<partition>-
<attempt>.marker`` in its run's directory.  The attempt removes the marker when it ends, normally or
by an exception, as long as its process lives.  The process holds an exclusive lock on the marker,
so a marker without a lock is from a process that crashed.  A locked marker belongs to an attempt
that still runs, a speculative copy or one that Spark has given up, and is skipped.

If the run's directory is in a bucket, markers are objects, see `marker_objects`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ackcore._files.process_lock import ProcessLock
from ackcore._records import Int64s
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.marker_objects import (
    HEAD,
    MarkerObject,
    marker_data,
    marker_names,
    time_out_file,
    unpacked,
)
from ackcore.spark.tasks.time_limit import read_time_out
from ackcore.topology.tuples import Reason

#: The kinds of rows in flight: none; a chunk, by its number in the task; the open rows of bolts
#: that are flushed; named roots; and one root with no other row in flight on its executor.
NOTHING, CHUNK, FLUSH, ROOTS, ALONE = range(5)

DIRECTORY = "in-flight"

_ENDING, TIMED_OUT = ".marker", ".timed-out"


class TaskAttempt(NamedTuple):
    """The id of an attempt at a task; sorts by task, then by attempt."""

    level: int
    partition: int
    id: int

    @property
    def task(self) -> tuple[int, int]:
        """The level and partition of the task, without the attempt."""
        return self.level, self.partition

    def path(self, work: Place) -> str:
        """Return the path of the attempt's marker, below a run's directory."""
        return os.path.join(work, DIRECTORY, "-".join(map(str, self)) + _ENDING)

    def time_out_path(self, work: Place) -> str:
        """Return the path of the traceback that a time-out of this attempt leaves."""
        name = "-".join(map(str, self)) + TIMED_OUT
        if is_bucket(work):
            return time_out_file(work, name)
        return os.path.join(work, DIRECTORY, name)


@dataclass(frozen=True)
class Marker:
    """The records that a crashed attempt had in flight.

    Attributes
    ----------
    attempt : TaskAttempt
        The attempt that crashed.
    kind : int
        `NOTHING`, `CHUNK`, `FLUSH`, `ROOTS` or `ALONE`.
    chunk, rows : int
        The number of the chunk in the task, and its number of rows.
    roots : frozenset of int
        The roots in flight, for `ROOTS` and `ALONE`.
    timed_out : Reason or None
        The reason if the time limit ended the attempt, else None.
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
    """The marker file of the attempt that runs here."""

    def __init__(self, work: str, attempt: TaskAttempt) -> None:
        self._path = attempt.path(work)
        self._timed_out = attempt.time_out_path(work)
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        # It has another name until it is locked: an unlocked marker means that its process crashed.
        hidden = os.path.join(work, DIRECTORY, f".{os.path.basename(self._path)}")
        with suppress(FileNotFoundError):
            os.remove(hidden)
        self._file = ProcessLock(hidden)
        self._file.lock(fcntl.LOCK_EX)
        self.set(NOTHING)
        os.replace(hidden, self._path)

    def set(self, kind: int, chunk: int = 0, rows: int = 0, roots: Int64s | None = None) -> None:
        """Write the rows that are in flight from now on."""
        named = b"" if roots is None else roots.tobytes()
        self._file.write(HEAD.pack(kind, chunk, rows, len(named) // 8) + named)

    def remove(self) -> None:
        """Remove the marker: this attempt has not crashed."""
        if not self._file.is_open:
            return  # a forked process has no marker
        for path in (self._timed_out, self._path):
            with suppress(FileNotFoundError):  # the run's directory may be gone
                os.remove(path)
        self._file.close()


def marker_of(work: str, attempt: TaskAttempt) -> MarkerFile | MarkerObject:
    """Return the marker of the attempt that runs here."""
    if is_bucket(work):
        return MarkerObject(attempt.path(work), attempt.time_out_path(work), NOTHING)
    return MarkerFile(work, attempt)


def crashed(
    work: Place, task: tuple[int, int] | None = None, named: Iterable[TaskAttempt] = ()
) -> list[Marker]:
    """Return the markers of a run's crashed attempts, sorted by task and attempt.

    Parameters
    ----------
    work : path
        The run's directory.
    task : (int, int), optional
        The level and partition of the only task to look at; by default all tasks.
    named : iterable of TaskAttempt, optional
        Attempts to look at even if the list of markers, which may lag in a bucket, lacks them.
    """
    tried = sorted({*attempts(work), *named})
    found = (_read(work, attempt) for attempt in tried if task in (None, attempt.task))
    return [marker for marker in found if marker is not None]


def attempts(work: Place) -> list[TaskAttempt]:
    """Return the attempts that have markers, including those that still run."""
    names: Iterable[str] = ()
    with suppress(FileNotFoundError):
        directory = os.path.join(work, DIRECTORY)
        names = marker_names(directory) if is_bucket(work) else os.listdir(directory)
    parts = (
        name.removesuffix(_ENDING).split("-")
        for name in names
        if name.endswith(_ENDING) and not name.startswith(".")
    )
    return sorted(TaskAttempt(*map(int, part)) for part in parts)


def _read(work: Place, attempt: TaskAttempt) -> Marker | None:
    """Return a marker, or None if its attempt still runs or has ended without a crash."""
    data = marker_data(attempt.path(work)) if is_bucket(work) else _of_the_dead(work, attempt)
    if data is None:
        return None
    kind, chunk, rows, roots = unpacked(data, NOTHING)
    timed_out = read_time_out(attempt.time_out_path(work))
    return Marker(attempt, kind, chunk, rows, roots, timed_out)


def _of_the_dead(work: Place, attempt: TaskAttempt) -> bytes | None:
    """Return the content of a marker file, or None if it is missing or locked."""
    try:
        file = os.open(attempt.path(work), os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(file).st_nlink:
            return None  # removed since it was opened
        return os.pread(file, os.fstat(file).st_size, 0)
    except OSError:
        return None  # locked
    finally:
        os.close(file)
