"""A store that is a directory of a local or a shared file system.

An object is a file.  The store writes it under a temporary name, syncs it, links or renames it to
its own name, and syncs the directory.  Within `ackcore.spark.base.atomic.fenced` it checks the
fence before it gives the file its name.

An object that is written by `LocalStore.replace` has numbered versions (see
`ackcore.spark.stores.numbered`), which get their names by link(2).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ackcore._files import sync_directory
from ackcore.spark.base.atomic import (
    check_fence,
    is_temporary,
    link_file,
    make_directory,
    write_file,
    writing,
)
from ackcore.spark.base.checksummed import digest_of
from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.interface import Stored, StoredObject, checked_key, version_if_equal
from ackcore.spark.stores.numbered import VERSION, NumberedVersions, version_name

#: Attempts of a put: a delete may remove its new directory before the file is in it.
_TRIES = 10
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
#: Age in seconds from which an unfinished file has no live writer.
_ABANDONED_S = 3600


class LocalStore(NumberedVersions):
    """The store of a directory, which the first put creates.

    ``root``: the directory, as an absolute path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self.root,)

    def path(self, key: str) -> Path:
        """Return the path of an object."""
        return self.root / checked_key(key)

    def place(self, key: str) -> str:
        """Return the path of an object as a string."""
        return str(self.path(key))

    def get(self, key: str) -> Stored | None:
        """Return an object, or None if it does not exist."""
        path = self.path(key)
        with _reading(path):
            while True:
                try:
                    data = path.read_bytes()
                except IsADirectoryError:
                    numbers = _versions(path)
                    if not numbers:
                        return None
                    # Another writer may prune this version once a newer one exists.
                    with contextlib.suppress(FileNotFoundError):
                        return Stored(
                            _version_file(path, numbers[-1]).read_bytes(), str(numbers[-1])
                        )
                except _ABSENT:
                    return None
                else:
                    return Stored(data, digest_of(data))

    def read(self, key: str) -> pa.Buffer | None:
        """Return an object of any size, memory-mapped where possible; None if it does not exist."""
        path = self.path(key)
        with _reading(path):
            try:
                # Not by its path: Arrow does not detect a directory or an empty file.
                with open(path, "rb", buffering=0) as file:
                    if not os.fstat(file.fileno()).st_size:
                        return pa.py_buffer(b"")
                    # Not `mmap.mmap`: it keeps a descriptor open as long as the buffer.
                    with pa.memory_map(f"/proc/self/fd/{file.fileno()}") as source:
                        return source.read_buffer()
            except _ABSENT:
                return None

    def read_range(self, key: str, start: int, length: int) -> pa.Buffer | None:
        """Return ``length`` bytes of an object from offset ``start``; None if it does not exist."""
        path = self.path(key)
        with _reading(path):
            try:
                with open(path, "rb", buffering=0) as file:
                    return pa.py_buffer(os.pread(file.fileno(), length, start))
            except _ABSENT:
                return None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write an object, return its version. ``if_absent``: raise StoreConflict if one exists."""
        path = self.path(key)
        try:
            _in_directory(
                path, lambda: write_file(path, lambda file: file.write(data), once=if_absent)
            )
        except FileExistsError:
            with _reading(path):
                there = path.read_bytes()
            return version_if_equal(path, Stored(there, digest_of(there)), data)
        return digest_of(data)

    def _numbers(self, key: str) -> list[int]:
        path = self.path(key)
        with _reading(path):
            return _versions(path)

    def _add(self, key: str, number: int, data: bytes) -> None:
        new = _version_file(self.path(key), number)
        _in_directory(new, lambda: write_file(new, lambda file: file.write(data), once=True))

    def _remove(self, key: str, number: int) -> None:
        path = self.path(key)
        with writing(path):
            _version_file(path, number).unlink(missing_ok=True)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """Move a local file to an object. ``if_absent``: raise StoreConflict if one exists."""
        if if_absent:
            self.put(key, path.read_bytes(), if_absent=True)
            path.unlink()
            return
        target = self.path(key)
        with writing(target):
            with open(path, "r+b") as file:
                os.fsync(file.fileno())
            check_fence()
            try:
                _in_directory(target, lambda: os.replace(path, target))
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with open(path, "rb") as source:
                    write_file(target, lambda file: shutil.copyfileobj(source, file))
                path.unlink()
            sync_directory(target.parent)

    def link(self, source: Path, key: str, *, named: bool = True) -> int:
        """Link a file that is never written again as an object, and return its size in bytes.

        With ``named=False`` the name is durable only after the next `sync`.
        """
        target = self.path(key)
        _in_directory(target, lambda: link_file(source, target, named=named))
        return target.stat().st_size

    def sync(self, prefix: str) -> None:
        """Make the names directly below a prefix durable."""
        with writing(self.path(prefix)):
            if self.path(prefix).is_dir():
                sync_directory(self.path(prefix))

    def remove_abandoned(self) -> None:
        """Remove temporary files that have not changed for an hour: their writers died."""
        before = time.time() - _ABANDONED_S
        for directory, _, names in os.walk(self.root, onerror=_raise_unless_absent):
            for name in names:
                path = Path(directory, name)
                with contextlib.suppress(*_ABSENT):
                    if is_temporary(name) and path.stat().st_mtime < before:
                        path.unlink()

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects with keys below ``prefix/``, sorted."""
        below = self.path(prefix) if prefix else self.root
        found: dict[str, int] = {}
        for directory, _, names in os.walk(below, onerror=_raise_unless_absent):
            for name in sorted(names):
                path = Path(directory, name)
                of = path.parent if VERSION.fullmatch(name) else path
                key = of.relative_to(self.root).as_posix()
                with contextlib.suppress(ValueError, *_ABSENT):
                    found[checked_key(key)] = path.stat().st_size
        return [StoredObject(key, found[key]) for key in sorted(found)]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and directories that become empty. Missing objects are ignored."""
        for path in [self.path(key) for key in keys]:
            with writing(path):
                for each in [_version_file(path, number) for number in _versions(path)] or [path]:
                    with contextlib.suppress(*_ABSENT):
                        each.unlink()
                for above in (path, *path.parents):
                    if above == self.root:
                        break
                    try:
                        above.rmdir()
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    except OSError:
                        break  # the directory is not empty


def _version_file(path: Path, number: int) -> Path:
    return path / version_name(number)


def _versions(path: Path) -> list[int]:
    """Return the numbers of the existing versions of an object, sorted."""
    try:
        names = os.listdir(path)
    except _ABSENT:
        return []
    return sorted(int(found[1]) for found in map(VERSION.fullmatch, names) if found)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror or error}; make it readable for this process, "
            "and start again"
        ) from error


def _in_directory(path: Path, make: Callable[[], object]) -> None:
    """Make a file and its directory. Retry if `delete` removes the directory in between."""
    for tried in range(_TRIES):
        try:
            make_directory(path.parent)
            make()
        except (FileNotFoundError, StateError) as error:
            cause = error.__cause__ if isinstance(error, StateError) else error
            if not isinstance(cause, FileNotFoundError) or tried == _TRIES - 1:
                raise
        else:
            return


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, _ABSENT):
        raise StateError(
            f"{error.filename} cannot be listed: {error.strerror}; make it "
            "readable for this process, and start again"
        ) from error
