"""Files on disk that survive a crash: after it, a file has its old content or its new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def sync_directory(path: Path) -> None:
    """Make the creations, renames and deletions in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Create a file, or overwrite it in place, by ``write(file)``; sync its content, not its name.

    A crash may leave a part, so ``path`` should be a temporary name.
    """
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def link_if_free(temporary: Path, path: Path) -> bool:
    """Give a file the name ``path`` unless it is taken; return whether the file got the name.

    If several processes try at once, one succeeds; without hard links, maybe several. The file may
    keep its temporary name as well.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        # Some file systems have no links; there a check that the name is free must do.
        if path.exists():
            return False
        os.replace(temporary, path)
    return True
