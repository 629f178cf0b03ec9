"""Locks that end with this process, even if it has forked others.

An ``flock`` belongs to the open file, which a forked process shares.  A pool or a daemon that a
bolt starts would keep the locks of its dead worker, and one that the driver starts would keep its
checkpoint locked.  So a child closes its copies before anything else; a child that executes another
program closes them automatically (PEP 446).  POSIX locks are not inherited, but are lost as soon as
any code in the process closes the file.
"""

from __future__ import annotations

import fcntl
import os
import threading
from weakref import WeakSet

#: The offset at which `ProcessLock.is_at` writes; the contents of lock files end before it.
_PROBE = 4096


class ProcessLock:
    """A file that this process holds open and can lock; closed in forked processes.

    ``path``: the file; created if it does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._closing = threading.Lock()
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _OPEN.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process has the file open; False in a forked process."""
        return self._file is not None

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the file at a path is this open one, not a copy of it; True after `close`.

        Some network file systems give the path of an open file another inode number. Then this
        method writes random bytes behind the file's content, and reads them at the path. Raises
        FileNotFoundError if this file is open and the path has none.
        """
        with self._closing:
            if self._file is None or os.stat(path).st_ino == os.fstat(self._file).st_ino:
                return True
            probe = os.urandom(16)
            os.pwrite(self._file, probe, _PROBE)
            os.fsync(self._file)  # the other inode may have a cache of its own
            with open(path, "rb") as found:
                found.seek(_PROBE)
                return found.read(len(probe)) == probe

    def lock(self, how: int) -> None:
        """Call ``fcntl.flock(file, how)``, with its waits and errors; nothing if it is closed."""
        if self._file is not None:
            fcntl.flock(self._file, how)

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes from the beginning of the file; none if it is closed."""
        return b"" if self._file is None else os.pread(self._file, size, 0)

    def write(self, data: bytes, *, alone: bool = False) -> None:
        """Write ``data`` at the beginning of the file; do nothing if it is closed.

        ``alone``: whether all former content is deleted first, and not only overwritten.
        """
        if self._file is not None:
            if alone:
                os.ftruncate(self._file, 0)
            os.pwrite(self._file, data, 0)

    def close(self) -> None:
        """Close the file and release the lock, from any thread; a second call does nothing."""
        # A second close of the descriptor could hit another file: a sink's output, a socket of
        # Spark, or the pipe whose end makes Spark's JVM exit.
        with self._closing:
            file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def close_in_child(self) -> None:
        """Close the copy in a forked process, where nobody releases a held `_closing`."""
        self._closing = threading.Lock()
        self.close()


_OPEN: WeakSet[ProcessLock] = WeakSet()


def _close_copies() -> None:
    for lock in list(_OPEN):
        lock.close_in_child()


os.register_at_fork(after_in_child=_close_copies)
