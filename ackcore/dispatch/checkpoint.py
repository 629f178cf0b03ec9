"""The committed position of a source, on disk, so that a run resumes there after a crash.

The file holds one number, the position to read next: everything before it is done. If 0, 1, 3 and
4 are done, it is 2, and the ack of 2 moves it to 5.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Self
from zlib import crc32

from ackcore._columns import as_int
from ackcore._files import sync_directory, write_synced
from ackcore._files.process_lock import ProcessLock

_VERSION = 1


class CheckpointError(RuntimeError):
    """The checkpoint of a `Dispatcher` is closed, or open in another one, damaged, or of another
    version.
    """


class Checkpoint:
    """A committed position, ``committed``, in a file that one `Checkpoint` at a time has open.

    A commit replaces the whole file: it writes and syncs a new file, renames it, and syncs the
    directory. So after a crash the file is in the state before or after a `commit`.

    Parameters
    ----------
    path : path-like
        The file; without one, the position is 0. Its directory is created. ``<path>.lock`` is
        created and locked while this is open; forked processes do not hold the lock.

    Raises
    ------
    CheckpointError
        If another one has the file open, or the file is damaged or of another version.
    OSError
        If the directory cannot be written to, or its file system has no locks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._committing = threading.Lock()
        self._lock = ProcessLock(f"{self._path}.lock")
        try:
            self._lock.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.committed = self._read()
        except BaseException as error:
            self._lock.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise CheckpointError(
                f"the checkpoint {self._path} is open in another dispatcher; stop that one first, "
                "or give each its own file"
            ) from None

    def _read(self) -> int:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return 0
        try:
            kept = json.loads(text)
            version, committed = kept["version"], kept["committed"]
            sound = kept["crc32"] == _check(committed) and type(committed) is int
        except (ValueError, KeyError, TypeError):
            version, committed, sound = _VERSION, 0, False
        if version != _VERSION:
            raise CheckpointError(
                f"the checkpoint {self._path} has version {version}, and this ackcore reads "
                f"version {_VERSION}; use the ackcore that wrote it"
            )
        if not sound or committed < 0:
            raise CheckpointError(
                f"the checkpoint {self._path} is damaged: it contains {text[:80]!r}; delete it to "
                "start at position 0, or replace it by the file that "
                "Checkpoint(another_path).commit(position) writes"
            )
        return int(committed)

    def commit(self, committed: int) -> None:
        """Write the position to read next, durably. Do nothing if the file has this position.

        Raises TypeError if it is no integer, and ValueError if it is lower than the committed one.
        Raises CheckpointError after `close`, and in a forked process. Raises OSError if it cannot
        be written; then the former position stays committed. But if only the directory cannot be
        synced, the file has the new position, and the next `Checkpoint` reads it. Any thread may
        call it.
        """
        if isinstance(committed, bool):
            raise TypeError(f"committed must be an integer, got bool {committed}")
        committed = as_int(committed, "committed")
        self._refuse_closed()  # a forked process could wait for ever for `_committing`
        # One at a time: a commit in a thread continues after its waiting task was cancelled.
        with self._committing:
            self._refuse_closed()
            if committed < self.committed:
                raise ValueError(
                    f"committed must be at least {self.committed}, the committed position, got "
                    f"{committed}; to process records again, use another checkpoint, or delete "
                    "this one"
                )
            if committed == self.committed and self._path.exists():
                return
            kept = {"version": _VERSION, "committed": committed, "crc32": _check(committed)}
            hidden = self._path.with_name(f".{self._path.name}.new")
            write_synced(hidden, lambda file: file.write(json.dumps(kept).encode()))
            hidden.replace(self._path)
            sync_directory(self._path.parent)
            self.committed = committed

    def _refuse_closed(self) -> None:
        if not self._lock.is_open:
            raise CheckpointError(
                f"the checkpoint {self._path} is closed, or belongs to the process that forked "
                "this one; commit in that process, or open it again when that has closed it"
            )

    def close(self) -> None:
        """Release the lock after a running `commit`; then another `Checkpoint` can open the file.

        A second call does nothing.
        """
        if self._lock.is_open:
            with self._committing:
                self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check(committed: object) -> int:
    return crc32(f"{_VERSION} {committed}".encode())
