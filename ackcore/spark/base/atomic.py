"""Files that are there whole or not at all, and directories that last.

A file is written under a temporary name, synced, renamed, and its directory synced: whenever the
machine stops, the name leads to the whole old file or the whole new one.

A driver that was cut off long enough for another to take over its checkpoint may resume at any
line.  So what it writes within `fenced` is refused from then on, by a check right before a file
gets its name; and what is written ``once`` is never replaced, whatever was checked before.
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

from ackcore._files.durable import NO_LINKS, link_if_free, sync_directory, write_synced
from ackcore.spark.base.errors import CheckpointReadOnly, StateError

_TEMPORARY = re.compile(r"\..+\.tmp")
_DENIED = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an `OSError` as a `StateError` that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in _DENIED:
            raise CheckpointReadOnly(
                f"{path} cannot be written ({error.strerror}), and the driver must be able to. "
                "Nothing was lost; make it so and start again"
            ) from error
        raise StateError(
            f"{path} could not be written: {error.strerror or error}. What was recorded before "
            "stands; remove the cause and start again"
        ) from error


def make_directory(path: Path) -> Path:
    """Return a directory, made durably if it was not there, and those above it."""
    with writing(path):
        if not path.is_dir():
            make_directory(path.parent)
            try:
                path.mkdir(exist_ok=True)
            except FileExistsError:
                # Not where another process makes and removes it meanwhile.
                if path.is_file():
                    told = f"{path} must be a directory, or not be there yet; it is a file"
                    raise StateError(told) from None
            sync_directory(path.parent)
    return path


#: Raises once another driver has taken over; set by `fenced`.
_fence: ContextVar[Callable[[], object] | None] = ContextVar("fence", default=None)


@contextlib.contextmanager
def fenced(check: Callable[[], object]) -> Iterator[None]:
    """Have ``check``, which may raise, called before each file written within gets its name."""
    token = _fence.set(check)
    try:
        yield
    finally:
        _fence.reset(token)


def check_fence() -> None:
    """Raise `CheckpointInUse` if this is within `fenced`, and the checkpoint is another's now."""
    check = _fence.get()
    if check is not None:
        check()


def write_file(
    path: Path,
    write: Callable[[BinaryIO], object],
    *,
    once: bool = False,
    made_in: Path | None = None,
) -> None:
    """Have ``write`` fill a file, which replaces ``path`` as a whole and durably.

    Parameters
    ----------
    path : Path
        Its name.
    write : callable
        Fills it.
    once : bool, default False
        Whether it must not be there yet.
    made_in : Path, optional
        The directory, on the same file system, in which it is until it gets its name; that of
        ``path`` if not given.  Once this directory is renamed, the file never gets its name.

    Raises
    ------
    FileExistsError
        If it is to be written ``once``, and is there.
    CheckpointInUse
        If another driver has taken over.
    """
    # Random: a driver that resumes after another took over may have its file open still.
    temporary = (made_in or path.parent) / f".{path.name}.{secrets.token_hex(8)}.tmp"
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
    """Have ``path`` be a file that is whole and never written again, as a whole and durably.

    It is the same file, or a copy where there are no links or ``path`` is on another file system.
    A name that is not ``named`` lasts once its directory is synced.

    Raises
    ------
    CheckpointInUse
        If another driver has taken over.
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
                # Where path was the same file already, replacing it does nothing.
                temporary.unlink(missing_ok=True)
            if named:
                sync_directory(path.parent)
            return
    with open(source, "rb") as whole:
        write_file(path, lambda file: shutil.copyfileobj(whole, file, 1 << 20))


def remove(path: Path) -> None:
    """Remove a file or a directory with all below, if it is there."""
    with writing(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def is_temporary(name: str) -> bool:
    """Whether a file is one in the making, by its name."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_temporaries(directory: Path) -> None:
    """Remove what writers left that died; none may be writing there."""
    left = list(directory.iterdir()) if directory.is_dir() else []
    # Listed before the check: no file of a driver that has taken over is among them.
    check_fence()
    for path in left:
        if is_temporary(path.name):
            remove(path)
