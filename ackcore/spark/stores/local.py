"""A store that is a directory of a local or a shared file system.

An object is a file.  The store writes it under a temporary name, syncs it, links or renames it to
its own name, and syncs the directory.  Within `ackcore.spark.base.atomic.fenced` it first checks
that this driver still owns the checkpoint.

Objects with numbered versions (see `ackcore.spark.stores.file_system_store`) get their names by
link(2).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from ackcore._files import sync_directory
from ackcore.spark.base.atomic import check_fence, link_file, make_directory, write_file, writing
from ackcore.spark.base.errors import StateError
from ackcore.spark.stores.file_system_store import FileSystemStore, version_file
from ackcore.spark.stores.interface import checked_key

#: Attempts of a put: a delete may remove its new directory before the file is in it.
_TRIES = 10
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalStore(FileSystemStore):
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

    def _read_file(self, file: str) -> bytes:
        path = self.root / file
        with _reading(path):
            return path.read_bytes()

    def read(self, key: str) -> pa.Buffer | None:
        """Return an object of `put` or `put_file`, mapped if possible; None if there is none."""
        path = self.path(key)
        try:
            # Not by its path: Arrow does not detect a directory or an empty file.
            with _reading(path), open(path, "rb", buffering=0) as file:
                if not os.fstat(file.fileno()).st_size:
                    return pa.py_buffer(b"")
                # Not `mmap.mmap`: it keeps a descriptor open as long as the buffer.
                with pa.memory_map(f"/proc/self/fd/{file.fileno()}") as source:
                    return source.read_buffer()
        except _ABSENT:
            return None

    def _write_file(self, file: str, data: bytes, once: bool) -> None:
        path = self.root / file
        _in_directory(path, lambda: write_file(path, lambda out: out.write(data), once=once))

    def _remove_file(self, file: str) -> None:
        path = self.root / file
        with writing(path), contextlib.suppress(*_ABSENT):
            path.unlink()

    def _names(self, directory: str) -> list[str]:
        path = self.root / directory
        try:
            with _reading(path):
                return os.listdir(path)
        except _ABSENT:
            return []

    def put_file(self, key: str, path: Path, *, if_absent: bool = False) -> None:
        """Move a local file to an object. With ``if_absent``, an object that exists is kept.

        If such an object differs, raises StoreConflict and keeps the file.
        """
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
        """Link a finished file as an object, in place of one there; return its size in bytes.

        The file is copied where links are impossible. With ``named=False`` the name of a link is
        durable only after the next `sync`.
        """
        target = self.path(key)
        _in_directory(target, lambda: link_file(source, target, named=named))
        return target.stat().st_size

    def sync(self, prefix: str) -> None:
        """Make the names directly below a prefix durable. Does nothing if there are none."""
        with writing(self.path(prefix)):
            if self.path(prefix).is_dir():
                sync_directory(self.path(prefix))

    def _files(
        self, prefix: str, is_wanted: Callable[[str], bool] = bool
    ) -> Iterator[tuple[str, int, int]]:
        below = self.path(prefix) if prefix else self.root
        for directory, _, names in os.walk(below, onerror=_raise_unless_absent):
            for name in sorted(filter(is_wanted, names)):
                path = Path(directory, name)
                with contextlib.suppress(*_ABSENT), _reading(path):
                    found = path.stat()
                    file = path.relative_to(self.root).as_posix()
                    yield file, found.st_size, found.st_mtime_ns // 1_000_000

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, and directories that become empty. Missing objects are ignored."""
        for key in [checked_key(key) for key in keys]:
            versions = [version_file(key, number) for number in self._versions(key)]
            for file in versions or [key]:
                self._remove_file(file)
            path = self.path(key)
            with writing(path):
                for above in (path, *path.parents):
                    if above == self.root:
                        break
                    try:
                        above.rmdir()
                    except (FileNotFoundError, NotADirectoryError):
                        continue
                    except OSError:
                        break  # the directory is not empty


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise OSErrors as StateError, except FileNotFoundError and IsADirectoryError.

    A path below a file raises FileNotFoundError.
    """
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(str(error)) from None
    except (FileNotFoundError, IsADirectoryError):
        raise
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror or error}; remove the cause, for instance "
            "missing rights of this process, and start again"
        ) from error


def _in_directory(path: Path, make: Callable[[], object]) -> None:
    """Make a file's directory and call ``make``; again if `delete` removed it, 10 times at most."""
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
            f"{error.filename} cannot be listed: {error.strerror}; remove the cause, for instance "
            "missing rights of this process, and start again"
        ) from error
