"""The lock that lets only one driver at a time write a checkpoint."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from ackcore._files.process_lock import ProcessLock
from ackcore.spark.base.atomic import writing
from ackcore.spark.base.errors import CheckpointInUse, StateError


class Lock:
    """A file lock that the system releases when its process dies; the constructor takes it.

    The constructor raises CheckpointInUse if another `Lock`, even of this process, holds the file,
    and StateError if the file cannot be written.  A file system may give the lock to another host
    if it loses contact with the holder.  Therefore the file also has a random token of its holder,
    for `check`.
    """

    def __init__(self, path: Path):
        self.path = path
        with writing(path):
            self._file = ProcessLock(path)
        try:
            with writing(path):
                self._file.lock(fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._held = f"{process_name()}\n{secrets.token_hex(16)}\n".encode()
                self._file.write(self._held, alone=True)
        except BaseException as error:
            told = _holder(self._file.read(1000))
            self.close()
            if isinstance(error.__cause__, BlockingIOError):
                raise CheckpointInUse(
                    f"{path.parent.parent} is in use by another query ({told}), which "
                    f"holds {path}. Stop that query, or run this one on another checkpoint"
                ) from None
            raise

    def check(self) -> None:
        """Read the file to check that this driver still holds the lock.

        Raises CheckpointInUse if another driver took the lock over, or can do so because the file
        was removed or replaced. Raises StateError if the file cannot be read.
        """
        try:
            found = self.path.read_bytes()
            is_own = found.startswith(self._held)  # `is_at` may have written behind it
            is_copy = not self._file.is_at(self.path)
        except FileNotFoundError:
            raise CheckpointInUse(
                f"{self.path} was removed, so another driver can take {self.path.parent.parent} "
                "over. The records that this driver wrote are valid; it writes no more. Start this "
                "query again"
            ) from None
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if is_own and is_copy:
            raise CheckpointInUse(
                f"{self.path.parent.parent} was replaced while this driver ran, perhaps by a "
                f"backup: {self.path} is a copy of this driver's lock file. This driver writes no "
                "more. Start this query again to continue from the copy"
            )
        if not is_own:
            raise CheckpointInUse(
                f"{self.path.parent.parent} was taken over from this driver, perhaps while its "
                f"host was suspended or disconnected: another driver ({_holder(found)}) holds "
                f"{self.path}. The records that this driver wrote are valid; it writes no more. "
                "Let the other driver run, or stop it and start this query again"
            )

    def close(self) -> None:
        """Release the lock, from any thread; a second call does nothing."""
        self._file.close()


class Holder(NamedTuple):
    """The process that holds a lock, or held it last, and whether it holds it now, if known."""

    name: str  # the process and its host
    holds: bool | None  # whether it holds the lock now; None if this host cannot determine it


def holder_of(path: Path) -> Holder | None:
    """Return the current or last holder of a lock; None if the file does not exist.

    Raises StateError if the file cannot be read.
    """
    try:
        name, inode = _holder(path.read_bytes()), path.stat().st_ino
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    pid, _, host = name.removeprefix("pid ").partition(" on ")
    if host != os.uname().nodename:
        return Holder(name, None)
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return Holder(name, None)
    # "1: FLOCK ADVISORY WRITE <pid> <device>:<inode> 0 EOF".  The device is ignored, because stat
    # returns another one on some file systems.
    fields = (line.split() for line in locks.splitlines())
    held = {(each[4], each[5].rpartition(":")[2]) for each in fields if each[1] == "FLOCK"}
    return Holder(name, (pid, str(inode)) in held)


def _unreadable(path: Path, error: OSError) -> StateError:
    return StateError(
        f"{path} cannot be read: {error.strerror or error}; remove the cause, for instance missing "
        "rights of this user, and start again"
    )


def process_name() -> str:
    """Return the name of this process in lock files: ``pid <number> on <host>``."""
    return f"pid {os.getpid()} on {os.uname().nodename}"


def _holder(found: bytes) -> str:
    """Return the holder named in the content of a lock file, or "unknown"."""
    return found.decode("utf-8", "replace").partition("\n")[0].strip() or "unknown"
