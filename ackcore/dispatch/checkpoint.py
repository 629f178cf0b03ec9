"""How far a source is done, kept on disk so that a crash resumes there.

What is kept is one number, the position to read next: everything before it is done. With 1, 3 and 4
done it is 2, and the ack of 2 moves it to 5.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self
from zlib import crc32

from ackcore._files.durable import sync_directory, write_synced
from ackcore._files.process_lock import ProcessLock

_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint is another process's, or not what was written."""


class Prefix:
    """The first position that is not done, of positions that are done in any order.

    A position costs constant time, and memory only while one before it is open.

    Parameters
    ----------
    start : int
        Everything before it is done.
    """

    def __init__(self, start: int = 0) -> None:
        self._above: set[int] = set()
        self.committed = start

    def done(self, position: int) -> bool:
        """Take in that a position is done; whether it was open."""
        if position < self.committed or position in self._above:
            return False
        self._above.add(position)
        while self.committed in self._above:
            self._above.remove(self.committed)
            self.committed += 1
        return True

    def __contains__(self, position: int) -> bool:
        return position < self.committed or position in self._above

    @property
    def above(self) -> int:
        """Positions that are done beyond one that is open: done again after a crash."""
        return len(self._above)


class Checkpoint:
    """A committed position in a file, one process's at a time.

    It is replaced as a whole: written beside itself, synced, renamed, and its directory synced. So
    after a crash it is what it was before or after a `commit`, never something else.

    Parameters
    ----------
    path : path-like
        The file; ``<path>.lock`` is locked while this is open, not by forked processes.

    Raises
    ------
    CheckpointError
        If another process has it open, or the file is damaged.
    OSError
        If the directory cannot be written to.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._committing = threading.Lock()
        self._lock = ProcessLock(f"{self._path}.lock")
        try:
            self._lock.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise CheckpointError(
                f"another dispatcher has {self._path} open; stop it first, or give each its own"
            ) from None
        try:
            self.committed = self._read()
        except BaseException:
            self._lock.close()
            raise

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
                f"{self._path} has version {version}, and this reads {_VERSION}; go on with the "
                "ackcore that wrote it"
            )
        if not sound or committed < 0:
            raise CheckpointError(
                f"{self._path} is damaged: {text[:80]!r}; remove it to begin at position 0, or put "
                "in its place what Checkpoint(another_path).commit(position) writes"
            )
        return int(committed)

    def commit(self, committed: int) -> None:
        """Keep the position to read next, durably; one that is lower than before is refused.

        Raises
        ------
        ValueError
            If it is lower than what was committed.
        OSError
            If it cannot be written; what was committed before stays.
        """
        # One at a time: a thread's may go on when what waited for it was cancelled.
        with self._committing:
            self._commit(committed)

    def _commit(self, committed: int) -> None:
        if committed < self.committed:
            raise ValueError(
                f"committed must be at least {self.committed}, as was committed, got {committed}; "
                "to do records again, use another checkpoint, or remove this one"
            )
        if committed == self.committed and self._path.exists():
            return
        kept = {"version": _VERSION, "committed": committed, "crc32": _check(committed)}
        hidden = self._path.with_name(f".{self._path.name}.new")
        write_synced(hidden, lambda file: file.write(json.dumps(kept).encode()))
        hidden.replace(self._path)
        sync_directory(self._path.parent)
        self.committed = committed

    def close(self) -> None:
        """Let others open it."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _check(committed: object) -> int:
    return crc32(f"{_VERSION} {committed}".encode())
