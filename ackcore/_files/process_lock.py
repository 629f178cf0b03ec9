"""Locks that end with this process, whichever processes it has forked.

An ``flock`` belongs to the open file, which a forked process shares: a pool or a daemon that a bolt
starts would hold its worker's locks when that is dead, and one of the driver's its checkpoint.  So
a child closes its copies, first of all; one that executes another program closes them by that (PEP
446). POSIX locks are not inherited, but are gone as soon as anything in the process closes the
file.
"""

from __future__ import annotations

import fcntl
import os
import threading
from weakref import WeakSet


class ProcessLock:
    """A file that is open here, and its lock; in a process that is forked, nothing.

    Parameters
    ----------
    path : str or Path
        The file; it is made if it is not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._closing = threading.Lock()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _OPEN.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process has the file open: not one that was forked since."""
        return self._file is not None

    def lock(self, how: int) -> None:
        """``fcntl.flock``."""
        if self._file is not None:
            fcntl.flock(self._file, how)

    def read(self, size: int) -> bytes:
        """Return the beginning of the file."""
        return b"" if self._file is None else os.pread(self._file, size, 0)

    def write(self, data: bytes, *, alone: bool = False) -> None:
        """Write over the beginning of the file; ``alone``: what else was in it goes."""
        if self._file is not None:
            if alone:
                os.ftruncate(self._file, 0)
            os.pwrite(self._file, data, 0)

    def close(self) -> None:
        """Close the file, and with it the lock; twice is fine, and from any thread."""
        # A number that is closed twice may be another file's by then: a sink's that is being
        # written, a socket of Spark's, or the pipe whose end makes Spark's JVM exit.
        with self._closing:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def close_in_child(self) -> None:
        """Close the copy of a process that was forked, in which `_closing` may be held for ever."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


_OPEN: WeakSet[ProcessLock] = WeakSet()


def _close_copies() -> None:
    for lock in list(_OPEN):
        lock.close_in_child()


os.register_at_fork(after_in_child=_close_copies)
