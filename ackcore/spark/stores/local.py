"""A store that is a directory of a local or a shared file system.

An object is a file.  It is written under a temporary name, synced, and linked or renamed to its
own, with its directory synced; within `ackcore.spark.base.atomic.fenced` the fence is looked at in
between.  A put that depends on a version holds a lock file while it compares and renames.  A file
system may give that lock to another host while this one stands still: where that must not count,
use ``if_absent``, which is a link and needs none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ackcore._files.durable import sync_directory
from ackcore._files.process_lock import ProcessLock
from ackcore.spark.base.atomic import check_fence, make_directory, write_file, writing
from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.interface import (
    Entry,
    StoreConflict,
    Stored,
    checked_condition,
    checked_key,
)

#: A directory that a put has made may be removed by a delete before there is a file in it.
_TRIES = 10
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalStore:
    """The store of a directory, which is made at the first put.

    Parameters
    ----------
    root : Path
        The directory, as an absolute path.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def __repr__(self) -> str:
        return f"LocalStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalStore, (self.root,)

    def path(self, key: str) -> Path:
        """Return where an object is."""
        return self.root / checked_key(key)

    def get(self, key: str) -> Stored | None:
        """See `Store.get`."""
        path = self.path(key)
        with _reading(path):
            try:
                data = path.read_bytes()
            except _ABSENT:
                return None
        return Stored(data, _version(data))

    def read(self, key: str) -> pa.Buffer | None:
        """See `Store.read`."""
        path = self.path(key)
        with _reading(path):
            try:
                # Not by its path: Arrow tells neither a directory nor an empty file.
                with open(path, "rb", buffering=0) as file:
                    if not os.fstat(file.fileno()).st_size:
                        return pa.py_buffer(b"")
                    with pa.memory_map(f"/proc/self/fd/{file.fileno()}") as source:
                        return source.read_buffer()
            except _ABSENT:
                return None

    def read_range(self, key: str, start: int, length: int) -> pa.Buffer | None:
        """See `Store.read_range`."""
        path = self.path(key)
        with _reading(path):
            try:
                with open(path, "rb", buffering=0) as file:
                    return pa.py_buffer(os.pread(file.fileno(), length, start))
            except _ABSENT:
                return None

    def put(
        self, key: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> str:
        """See `Store.put`."""
        checked_condition(if_absent, if_version)
        path = self.path(key)
        if if_version is None:
            return self._put(path, data, if_absent)
        make_directory(path.parent)
        with _locked(path):
            found = self.get(key)
            if found is not None and found.version == if_version:
                return self._put(path, data, False)
        return _unless_ours(path, found, data)

    def _put(self, path: Path, data: bytes, if_absent: bool) -> str:
        def fill(file: BinaryIO) -> object:
            return file.write(data)

        try:
            _in_directory(path, lambda: write_file(path, fill, once=if_absent))
        except FileExistsError:
            with _reading(path):
                there = path.read_bytes()
            return _unless_ours(path, Stored(there, _version(there)), data)
        return _version(data)

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """See `Store.put_file`."""
        if if_absent:
            self.put(key, path.read_bytes(), if_absent=True)
            path.unlink()
            return
        target = self.path(key)
        with writing(target):
            with open(path, "rb") as file:
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

    def copy(self, source: str, key: str) -> int | None:
        """See `Store.copy`."""
        path, target = self.path(source), self.path(key)
        with writing(path):
            try:
                with open(path, "rb") as file:
                    _in_directory(
                        target,
                        lambda: write_file(target, partial(_copied, file)),
                    )
            except _ABSENT:
                return None
        return target.stat().st_size

    def list(self, prefix: str = "") -> list[Entry]:
        """See `Store.list`."""
        below = self.path(prefix) if prefix else self.root
        found = []
        for directory, _, names in os.walk(below, onerror=_raise_unless_absent):
            for name in names:
                path = Path(directory, name)
                key = path.relative_to(self.root).as_posix()
                with contextlib.suppress(ValueError, *_ABSENT):
                    found.append(Entry(checked_key(key), path.stat().st_size))
        return sorted(found)

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`; directories in which nothing is left go, too."""
        for path in [self.path(key) for key in keys]:
            with writing(path):
                with contextlib.suppress(*_ABSENT):
                    path.unlink()
                for above in path.parents:
                    if above == self.root:
                        break
                    try:
                        above.rmdir()
                    except FileNotFoundError:
                        continue
                    except OSError:
                        break  # there is something in it


def _copied(source: BinaryIO, to: BinaryIO) -> None:
    source.seek(0)  # it may be the second time
    shutil.copyfileobj(source, to)


def _version(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _unless_ours(path: Path, found: Stored | None, data: bytes) -> str:
    """Return the version of what was to be put if it is there, and raise if it is not."""
    if found is not None and found.data == data:
        return found.version
    what = "is there already" if found is not None else "is not there any more"
    raise StoreConflict(f"{path} {what}, in another version than was to be written over")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep others from replacing a file by its version."""
    with writing(path):
        lock = ProcessLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.lock(fcntl.LOCK_EX)
            yield
        finally:
            lock.close()


def _in_directory(path: Path, make: Callable[[], object]) -> None:
    """Make a file, and its directory before, which `delete` may remove in between."""
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
        raise StateError(f"{error.filename} cannot be listed: {error.strerror}") from error
