"""Locks that end with this process, whichever processes it has forked.

An ``flock`` belongs to the open file, which a forked process shares: a pool or a daemon that a bolt
starts would hold its worker's locks when that is dead.  So a child closes its copies, first of all;
one that executes another program closes them by that (PEP 446).  POSIX locks are not inherited,
but are gone as soon as anything in the process closes the file.
"""

from __future__ import annotations

import fcntl
import os
from weakref import WeakSet


class ProcessLock:
    """A file that is open here, and its lock; in a process that is forked, nothing.

    Parameters
    ----------
    path : str
        The file; it is made if it is not there.
    """

    def __init__(self, path: str) -> None:
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _HELD.add(self)

    @property
    def is_open(self) -> bool:
        """Whether this process has the file open: not one that was forked since."""
        return self._file is not None

    def lock(self, how: int) -> None:
        """``fcntl.flock``."""
        if self._file is not None:
            fcntl.flock(self._file, how)

    def write(self, data: bytes) -> None:
        """Write over the beginning of the file."""
        if self._file is not None:
            os.pwrite(self._file, data, 0)

    def close(self) -> None:
        """Close the file, and with it the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


_HELD: WeakSet[ProcessLock] = WeakSet()


def _let_go() -> None:
    for held in list(_HELD):
        held.close()  # the worker's own descriptor keeps the lock


os.register_at_fork(after_in_child=_let_go)
