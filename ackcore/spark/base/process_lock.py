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
from typing import Protocol
from weakref import WeakSet


class _Held(Protocol):
    def close_in_child(self) -> None:
        """Close the copy that a forked process has; the lock stays its parent's."""


_HELD: WeakSet[_Held] = WeakSet()


def close_when_forked(held: _Held) -> None:
    """Have something's `close_in_child` called in each process that is forked from this one."""
    _HELD.add(held)


def _close_copies() -> None:
    for held in list(_HELD):
        held.close_in_child()


os.register_at_fork(after_in_child=_close_copies)


class ProcessLock:
    """A file that is open here, and its lock; in a process that is forked, nothing.

    Parameters
    ----------
    path : str
        The file; it is made if it is not there.
    """

    def __init__(self, path: str) -> None:
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        close_when_forked(self)

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

    close_in_child = close
