"""In-flight markers: files that name the records that a task had in flight when it crashed.

Each attempt that may be suspected later keeps one marker, ``in-flight/<level>-<partition>-
<attempt>.marker`` in its run's directory.  The attempt removes the marker when it ends, normally or
by an exception, unless its process dies.  The process holds an exclusive lock on the marker,
so a marker without a lock is from a process that crashed.  A locked marker belongs to an attempt
that still runs (a speculative copy, or one that Spark has given up), and is skipped.

In a bucket there are no locks, and each write is a request.  So only careful runs have markers, in
which a marker names roots.  A marker is an object with the content of a marker file.  The worker
puts it before roots go to bolts, puts it again after they are processed, and deletes it when the
attempt ends.  An existing marker belongs to an attempt that crashed or still runs.  Few still run:
Spark retries a task after its earlier attempt has ended, and the driver looks once a run has
failed.  An attempt that still runs may be mistaken for a crashed one, but a record is rejected only
if it was alone in two such attempts.

The driver reads the marker of the attempt at which Spark gave up a job by its key, which is in
Spark's error.  It finds other markers by a list.  If the list lags, isolation takes more attempts
and runs, with the same result.

A call that exceeds the time limit leaves its traceback on the worker's machine.  If the later
attempt, or the driver, runs on another machine, the record counts as one that kills its worker.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ackcore._error_hints import counted
from ackcore._files.process_lock import ProcessLock
from ackcore._records import Int64s
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.stores.run_files import object_at
from ackcore.spark.tasks.time_limit import read_time_out
from ackcore.topology.tuples import Reason

#: The kinds of rows in flight: none; a chunk, by its number in the task; the open rows of bolts
#: that are flushed; named roots; and one root with no other row in flight on its executor.
NOTHING, CHUNK, FLUSH, ROOTS, ALONE = range(5)

DIRECTORY = "in-flight"

_ENDING, _TIMED_OUT = ".marker", ".timed-out"

#: The head of a marker: kind, chunk, rows, and the number of roots that follow.
_HEAD = struct.Struct("<qqqq")


class TaskAttempt(NamedTuple):
    """An attempt at a task, sorted by its stage's level, its partition and Spark's attempt id."""

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
        """Return the path of a time-out's traceback: a temporary file here if ``work`` is a URL."""
        name = "-".join(map(str, self)) + _TIMED_OUT
        if is_bucket(work):
            # A file of this machine, with the name of the run.
            return os.path.join(tempfile.gettempdir(), f"ackcore-{os.path.basename(work)}-{name}")
        return os.path.join(work, DIRECTORY, name)


@dataclass(frozen=True)
class Marker:
    """The records that a crashed attempt had in flight."""

    attempt: TaskAttempt  # the attempt that crashed
    kind: int  # `NOTHING`, `CHUNK`, `FLUSH`, `ROOTS` or `ALONE`
    #: The number of the chunk in the task, and its number of rows.
    chunk: int = 0
    rows: int = 0
    roots: frozenset[int] = frozenset()  # the roots in flight, for `ROOTS` and `ALONE`
    timed_out: Reason | None = None  # the reason if the time limit ended the attempt, else None

    def __str__(self) -> str:
        level, partition, attempt = self.attempt
        what = {
            NOTHING: "nothing in flight",
            CHUNK: f"a chunk of {counted(self.rows, 'row')} in flight",
            FLUSH: "bolts being flushed",
            ROOTS: f"{counted(len(self.roots), 'record')} in flight",
            ALONE: "one record in flight",
        }[self.kind]
        how = "crashed" if self.timed_out is None else self.timed_out.message
        return f"attempt {attempt} at partition {partition} of stage {level}: {how}, with {what}"


class MarkerFile:
    """The marker file of the attempt that runs here: created and locked until `remove`."""

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
        """Write which rows are in flight from now on; the arguments are fields of `Marker`."""
        self._file.write(_packed(kind, chunk, rows, roots))

    def remove(self) -> None:
        """Remove the marker and the time limit's file, except in a forked process."""
        if not self._file.is_open:
            return  # a forked process has no marker
        for path in (self._timed_out, self._path):
            with suppress(FileNotFoundError):  # the run's directory may be gone
                os.remove(path)
        self._file.close()


class MarkerObject:
    """The marker of the attempt that runs here, an object in a bucket that names roots in flight.

    ``url``: the URL of the object. ``timed_out``: the file that a time-out leaves.
    """

    def __init__(self, url: str, timed_out: str) -> None:
        self._store, self._key = object_at(url)
        self._timed_out = timed_out
        self._process: int | None = os.getpid()
        self._is_there = False

    def set(self, kind: int, chunk: int = 0, rows: int = 0, roots: Int64s | None = None) -> None:
        """Put the roots that are in flight from now on; the arguments are fields of `Marker`.

        Without ``roots`` put nothing, except `NOTHING` in place of earlier roots.
        """
        if roots is None and not (self._is_there and kind == NOTHING):
            return
        self._is_there = True
        self._store.put(self._key, _packed(kind, chunk, rows, roots))

    def remove(self) -> None:
        """Delete the marker and the time limit's file, except in a forked process."""
        if self._process != os.getpid():
            return  # a forked process has no marker
        self._process = None
        with suppress(FileNotFoundError):
            os.remove(self._timed_out)
        if self._is_there:
            self._store.delete([self._key])


def marker_of(work: str, attempt: TaskAttempt) -> MarkerFile | MarkerObject:
    """Make the marker of an attempt that runs here, and return it; the caller removes it.

    It is a file, created and locked at once, or an object if the run is in a bucket, which the
    first `set` with roots puts.
    """
    if is_bucket(work):
        return MarkerObject(attempt.path(work), attempt.time_out_path(work))
    return MarkerFile(work, attempt)


def crashed(
    work: Place, task: tuple[int, int] | None = None, named: Iterable[TaskAttempt] = ()
) -> list[Marker]:
    """Return the markers of a run's crashed attempts, sorted by task and attempt.

    In a bucket, attempts that still run are among them. ``task``: the level and partition of the
    only task to look at; by default all tasks. ``named``: attempts to look at even if the list of
    markers, which may lag in a bucket, lacks them.
    """
    tried = sorted({*attempts(work), *named})
    found = (_read(work, attempt) for attempt in tried if task in (None, attempt.task))
    return [marker for marker in found if marker is not None]


def attempts(work: Place) -> list[TaskAttempt]:
    """Return the attempts that have markers in a run's directory, sorted; some may still run."""
    names: Iterable[str] = ()
    with suppress(FileNotFoundError):
        directory = os.path.join(work, DIRECTORY)
        if is_bucket(work):
            store, key = object_at(directory)
            names = [entry.key.removeprefix(f"{key}/") for entry in store.list(key)]
        else:
            names = os.listdir(directory)
    parts = (
        name.removesuffix(_ENDING).split("-")
        for name in names
        if name.endswith(_ENDING) and not name.startswith(".")
    )
    return sorted(TaskAttempt(*map(int, part)) for part in parts)


def _read(work: Place, attempt: TaskAttempt) -> Marker | None:
    """Return a marker; None if its attempt did not crash or, outside of buckets, still runs."""
    data = (_stored if is_bucket(work) else _unlocked)(attempt.path(work))
    if data is None:
        return None
    kind, chunk, rows, roots = _unpacked(data)
    timed_out = read_time_out(attempt.time_out_path(work))
    return Marker(attempt, kind, chunk, rows, roots, timed_out)


def _stored(url: str) -> bytes | None:
    store, key = object_at(url)
    found = store.get(key)
    return None if found is None else found.data


def _unlocked(path: str) -> bytes | None:
    """Return the content of a marker file, or None if it is missing or locked."""
    try:
        file = os.open(path, os.O_RDONLY)
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


def _packed(kind: int, chunk: int, rows: int, roots: Int64s | None) -> bytes:
    """Return the content of a marker."""
    named = b"" if roots is None else roots.tobytes()
    return _HEAD.pack(kind, chunk, rows, len(named) // 8) + named


def _unpacked(data: bytes) -> tuple[int, int, int, frozenset[int]]:
    """Return the kind, chunk, rows and roots of a marker; `NOTHING` if it is incomplete."""
    kind, chunk, rows, n = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
    if len(data) < _HEAD.size + 8 * n:
        # The file's name survived a crash of its host, but its content, not synced, did not.
        kind, chunk, rows, n = NOTHING, 0, 0, 0
    roots = np.frombuffer(data, np.int64, n, _HEAD.size) if n else np.empty(0, np.int64)
    return kind, chunk, rows, frozenset(roots.tolist())
