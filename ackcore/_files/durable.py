"""Files that a crash leaves whole: the old one or the new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def sync_directory(path: Path) -> None:
    """Make durable what was created, renamed or removed in a directory."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill a new file, and wait until the disk has what it holds, not its name."""
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def link_if_free(temporary: Path, path: Path) -> bool:
    """Give a file its name if no other has it, and return whether that was so.

    Of several processes that try at once one succeeds.  It may keep its temporary name beside it.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # Not every file system that can be mounted has links; a look has to do there.
        if path.exists():
            return False
        os.replace(temporary, path)
    return True
