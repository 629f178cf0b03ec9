"""In-flight markers for runs in a bucket, where there are no locks and each write is a request.

So only careful runs have them, in which a marker names roots.  A marker is an object ``in-flight/
<level>-<partition>-<attempt>.marker`` with the content of a marker file.  The worker puts it before
roots go to bolts, puts it again after they are processed, and deletes it when the attempt ends.  A
marker that is there belongs to an attempt that crashed or still runs.  Few still run: Spark retries
a task after its former attempt has ended, and the driver looks once a run has failed.  An attempt
that still runs may be mistaken for a crashed one, but a record is rejected only if it was alone in
two such attempts.

The driver reads the marker of the attempt at which Spark gave up a job by its key, which is in
Spark's error.  It finds other markers by a list.  If the list lags, isolation takes more attempts
and runs, with the same result.

A call that exceeds the time limit leaves its traceback on the worker's machine.  If the later
attempt, or the driver, runs on another machine, the record counts as one that kills its worker.
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
    """The marker object of the attempt that runs here.

    Parameters
    ----------
    url : str
        The URL of the object.
    timed_out : str
        The file that a time-out leaves.
    nothing : int
        The kind of a marker with nothing in flight.
    """

    def __init__(self, url: str, timed_out: str, nothing: int) -> None:
        self._store, self._key = object_at(url)
        self._timed_out = timed_out
        self._nothing = nothing
        self._process: int | None = os.getpid()
        self._is_there = False

    def set(self, kind: int, chunk: int = 0, rows: int = 0, roots: Int64s | None = None) -> None:
        """Put the roots that are in flight from now on, if roots are or were named."""
        if roots is None and not (self._is_there and kind == self._nothing):
            return
        named = b"" if roots is None else roots.tobytes()
        self._is_there = True
        self._store.put(self._key, HEAD.pack(kind, chunk, rows, len(named) // 8) + named)

    def remove(self) -> None:
        """Delete the marker: this attempt has not crashed."""
        if self._process != os.getpid():
            return  # a forked process has no marker
        self._process = None
        with suppress(FileNotFoundError):
            os.remove(self._timed_out)
        if self._is_there:
            self._store.delete([self._key])


def time_out_file(work: Place, name: str) -> str:
    """Return the path on this machine of the traceback that a time-out leaves."""
    return os.path.join(tempfile.gettempdir(), f"ackcore-{os.path.basename(work)}-{name}")


def marker_names(directory: str) -> list[str]:
    """Return the names of the markers below a prefix."""
    store, key = object_at(directory)
    return [entry.key.removeprefix(f"{key}/") for entry in store.list(key)]


def marker_data(url: str) -> bytes | None:
    """Return the content of a marker, or None if it does not exist."""
    store, key = object_at(url)
    found = store.get(key)
    return None if found is None else found.data


def unpacked(data: bytes, nothing: int) -> tuple[int, int, int, frozenset[int]]:
    """Return the kind, chunk, rows and roots of a marker."""
    kind, chunk, rows, n = HEAD.unpack_from(data.ljust(HEAD.size, b"\0"))
    if len(data) < HEAD.size + 8 * n:
        # The file's name survived a crash of its host, but its content, not synced, did not.
        kind, chunk, rows, n = nothing, 0, 0, 0
    roots = np.frombuffer(data, np.int64, n, HEAD.size) if n else np.empty(0, np.int64)
    return kind, chunk, rows, frozenset(roots.tolist())
