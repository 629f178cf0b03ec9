"""In-flight markers where runs are in a bucket: there are no locks, and each note is a trip.

So only careful runs have them, in which a marker names roots: ``in-flight/<level>-<partition>-
<attempt>.marker``, an object with what a marker file holds.  It is put before roots are handed to
bolts, once more when they are through, and deleted when the attempt ends.  One that is there is
that of an attempt which crashed, or lives: Spark tries a task again after the former attempt ended,
and the driver looks when a run has failed.  A task that lives on then may be taken for one that
crashed with what it has; to be rejected a record must be alone in two such attempts.

Of the attempt at which Spark gave up a job the driver reads the marker by its key, which Spark's
error tells.  Those of others are found by a list; where that lags, isolation takes more attempts
and runs, and comes to the same.

What ends a call that takes too long leaves its traceback on the machine that it ran on.  Where a
later attempt, or the driver, is another machine, the record died as one that kills its worker.
"""

from __future__ import annotations

import os
import struct
import tempfile
from contextlib import suppress

import numpy as np

from ackcore._records import Int64s
from ackcore.spark.base.paths import Place
from ackcore.spark.stores.files import object_at

HEAD = struct.Struct("<qqqq")  # kind, chunk, rows, roots that follow


class MarkerObject:
    """The marker of the attempt that runs here.

    Parameters
    ----------
    url : str
        Where it is.
    timed_out : str
        The file that a time-out leaves.
    nothing : int
        The kind that says that nothing is in flight.
    """

    def __init__(self, url: str, timed_out: str, nothing: int) -> None:
        self._store, self._key = object_at(url)
        self._timed_out = timed_out
        self._nothing = nothing
        self._process: int | None = os.getpid()
        self._is_there = False

    def set(self, kind: int, chunk: int = 0, rows: int = 0, roots: Int64s | None = None) -> None:
        """Say what is in flight from now on, if roots are or were named."""
        if roots is None and not (self._is_there and kind == self._nothing):
            return
        named = b"" if roots is None else roots.tobytes()
        self._is_there = True
        self._store.put(self._key, HEAD.pack(kind, chunk, rows, len(named) // 8) + named)

    def remove(self) -> None:
        """End it: this attempt has not crashed."""
        if self._process != os.getpid():
            return  # a process that was forked has no part in it
        self._process = None
        with suppress(FileNotFoundError):
            os.remove(self._timed_out)
        if self._is_there:
            self._store.delete([self._key])


def time_out_file(work: Place, name: str) -> str:
    """Return where a time-out leaves its traceback: on this machine."""
    return os.path.join(tempfile.gettempdir(), f"ackcore-{os.path.basename(work)}-{name}")


def marker_names(directory: str) -> list[str]:
    """Return the names of the markers below a prefix."""
    store, key = object_at(directory)
    return [entry.key.removeprefix(f"{key}/") for entry in store.list(key)]


def marker_data(url: str) -> bytes | None:
    """Return what a marker holds, None if it is not there."""
    store, key = object_at(url)
    found = store.get(key)
    return None if found is None else found.data


def unpacked(data: bytes, nothing: int) -> tuple[int, int, int, frozenset[int]]:
    """Return kind, chunk, rows and roots of a marker."""
    kind, chunk, rows, n = HEAD.unpack_from(data.ljust(HEAD.size, b"\0"))
    if len(data) < HEAD.size + 8 * n:
        # The name outlasted its host, and what was in flight did not: it is not synced.
        kind, chunk, rows, n = nothing, 0, 0, 0
    roots = np.frombuffer(data, np.int64, n, HEAD.size) if n else np.empty(0, np.int64)
    return kind, chunk, rows, frozenset(roots.tolist())
