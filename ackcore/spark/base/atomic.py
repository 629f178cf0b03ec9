"""Atomic and durable writes of files and directories.

A file is written under a temporary name, synced, renamed, and its directory is synced.  Whenever
the machine stops, the name refers to the whole old file or the whole new one.

A driver may be suspended so long that another one takes over its checkpoint, and may then resume at
any line.  Therefore `fenced` adds a check right before a file gets its name, which refuses the
write.  A file that is written ``once`` is never replaced, whatever was checked before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from ackcore._files import NO_LINKS, link_if_free, sync_directory, write_synced
from ackcore.spark.base.errors import CheckpointReadOnly, StateError

_TEMPORARY = re.compile(r"\..+\.tmp")
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to StateError or CheckpointReadOnly, which names ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in _DENIED:
            raise CheckpointReadOnly(
                f"{path} cannot be written ({error.strerror}). Nothing was lost: give the driver "
                "write access and start again"
            ) from error
        raise StateError(
            f"{path} could not be written: {error.strerror or error}. Nothing was lost: remove the "
            "cause and start again"
        ) from error


def make_directory(path: Path) -> Path:
    """Create a directory and its parents durably, if missing; return it. StateError if it fails."""
    with writing(path):
        if not path.is_dir():
            make_directory(path.parent)
            try:
                path.mkdir(exist_ok=True)
            except FileExistsError:
                # No error if another process creates and removes the directory at the same time.
                if path.is_file():
                    told = f"{path} must be a directory, or must not exist; it is a file"
                    raise StateError(told) from None
            sync_directory(path.parent)
    return path


#: Raises after another driver has taken over; set by `fenced`.
_fence: ContextVar[Callable[[], object] | None] = ContextVar("fence", default=None)


@contextlib.contextmanager
def fenced(check: Callable[[], object]) -> Iterator[None]:
    """Call ``check`` before each file that this module writes in the block gets its name.

    If ``check`` raises, the file does not get the name. A nested block calls its own check alone.
    """
    before = _fence.get()
    try:
        # Set in the block: an interrupt between set and try would leave the fence set for ever.
        _fence.set(check)
        yield
    finally:
        _fence.set(before)


def check_fence() -> None:
    """Call the check of the surrounding `fenced`, if any: CheckpointInUse after a takeover."""
    check = _fence.get()
    if check is not None:
        check()


def write_file(path: Path, write: Callable[[BinaryIO], object], *, once: bool = False) -> None:
    """Fill a file and give it the name ``path``, atomically and durably.

    An existing file is replaced; with ``once`` it remains, and FileExistsError is raised. Raises
    StateError if the file cannot be written. Within `fenced`, raises the exception of its check.

    ``write``: writes the content to the open file.
    """
    # Random, because a suspended driver that resumes after a takeover may still have its file open.
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    free = True
    with writing(path):
        try:
            write_synced(temporary, write)
            check_fence()
            if once:
                free = link_if_free(temporary, path)
                temporary.unlink(missing_ok=True)
            else:
                os.replace(temporary, path)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    if not free:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def link_file(source: Path, path: Path, *, named: bool = True) -> None:
    """Make ``path`` a hard link to a finished file, atomically and durably; replace a file there.

    If the file system has no links, or ``path`` is on another one, the file is copied. With
    ``named=False`` the name of a link becomes durable only when the caller syncs its directory.
    Raises StateError if ``path`` cannot be written, and within `fenced` the exception of its check.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}.tmp"
    with writing(path):
        try:
            os.link(source, temporary)
        except OSError as error:
            if error.errno not in NO_LINKS | {errno.EXDEV, errno.EMLINK}:
                raise
        else:
            try:
                check_fence()
                os.replace(temporary, path)
            finally:
                # If both names are links to the same file, os.replace keeps the temporary one.
                temporary.unlink(missing_ok=True)
            if named:
                sync_directory(path.parent)
            return
    with open(source, "rb") as whole:
        write_file(path, lambda file: shutil.copyfileobj(whole, file, 1 << 20))


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a directory tree, if any; or raise StateError."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """Return whether a file's name is that of a temporary file: ``.<any text>.tmp``."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_temporaries(directory: Path) -> None:
    """Delete the temporary files in a directory, if it exists; this driver must be writing none.

    Deletes nothing after a takeover: raises the exception of `check_fence`.
    """
    with writing(directory):
        left = list(directory.iterdir()) if directory.is_dir() else []
    # Listed before the check, so that no file of a driver that takes over is removed.
    check_fence()
    for path in left:
        if is_temporary(path.name):
            remove(path)
