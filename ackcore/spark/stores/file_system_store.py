"""The common part of stores that have directories, but no conditional writes.

An object is a file.  An object that is written by ``replace`` is a directory with a file for each
version, ``index.json/000000000012.version``.  A version gets its name by an operation that fails if
the name exists, so only one writer can do it, and the highest number counts.  No lock is taken: a
lock may pass to another host while this host is paused.  A writer that slept may name the number of
a version that has been removed.  It then finds a higher number and is refused; its file is removed
with other old versions.
"""

from __future__ import annotations

import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from posixpath import basename, dirname

from ackcore.spark.base.atomic import is_temporary
from ackcore.spark.base.checksummed import digest_of
from ackcore.spark.stores.interface import Stored, StoredObject, checked_key, version_if_equal

_VERSION = re.compile(r"(\d{12})\.version")
#: Versions that are kept, the newest included: the last one proves that the new one follows it.
_KEPT = 2
#: Age in seconds from which an unfinished file has no live writer.
_ABANDONED_S = 3600


class FileSystemStore(ABC):
    """A base class of stores on file systems. A subclass reads, writes, removes and lists files.

    A file is named by its path relative to the store.
    """

    @abstractmethod
    def place(self, key: str) -> str:
        """Return the path or URL of an object, for messages."""

    @abstractmethod
    def _read_file(self, file: str) -> bytes:
        """Return the content of a file.

        Raises IsADirectoryError if it is a directory, FileNotFoundError if it does not exist.
        """

    @abstractmethod
    def _write_file(self, file: str, data: bytes, once: bool) -> None:
        """Write a file, whole and durably. With ``once``, raise FileExistsError if it exists."""

    @abstractmethod
    def _remove_file(self, file: str) -> None:
        """Delete a file, if it exists."""

    @abstractmethod
    def _names(self, directory: str) -> list[str]:
        """Return the names in a directory; [] if it does not exist or is a file."""

    @abstractmethod
    def _files(
        self, prefix: str, is_wanted: Callable[[str], bool] = bool
    ) -> Iterable[tuple[str, int, int]]:
        """Return the files below a prefix: path, size in bytes, last change in ms since 1970.

        The versions of an object are in ascending order. ``is_wanted``: a test of the last part of
        a file's name; all by default.
        """

    def _versions(self, key: str) -> list[int]:
        """Return the numbers of the existing versions of an object, sorted."""
        found = map(_VERSION.fullmatch, self._names(key))
        return sorted(int(version[1]) for version in found if version)

    def get(self, key: str) -> Stored | None:
        """Return an object, or None if it does not exist."""
        checked_key(key)
        while True:
            try:
                data = self._read_file(key)
            except FileNotFoundError:
                return None
            except IsADirectoryError:
                numbers = self._versions(key)
            else:
                return Stored(data, digest_of(data))
            if not numbers:
                return None
            # Another writer may remove this version once a newer one exists.
            with contextlib.suppress(FileNotFoundError):
                return Stored(self._read_file(version_file(key, numbers[-1])), str(numbers[-1]))

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write an object, and return its version.

        With ``if_absent`` an object that exists is kept; raises StoreConflict if its bytes differ.
        """
        try:
            self._write_file(checked_key(key), data, if_absent)
        except FileExistsError:
            return version_if_equal(self.place(key), self.get(key), data)
        return digest_of(data)

    def replace(self, key: str, data: bytes, version: str | None) -> str:
        """Replace ``version`` of an object, and return the new version.

        Another version with the bytes ``data`` is kept, and returned. Raises StoreConflict if its
        bytes differ, or the object was deleted. ``version``: None if there is no object yet.
        """
        place, newest = self.place(key), self._versions(checked_key(key))[-1:]
        if [str(number) for number in newest] != ([] if version is None else [version]):
            return version_if_equal(place, self.get(key), data)
        number = 1 if version is None else int(version) + 1
        try:
            self._write_file(version_file(key, number), data, True)
        except FileExistsError:
            return version_if_equal(place, self.get(key), data)
        there = self._versions(key)
        if there[-1:] != [number]:
            return version_if_equal(place, self.get(key), data)
        if version is not None and number - 1 not in there:  # the object was deleted
            self._remove_file(version_file(key, number))
            return version_if_equal(place, None, data)
        for old in there[:-_KEPT]:
            self._remove_file(version_file(key, old))
        return str(number)

    def list(self, prefix: str = "") -> list[StoredObject]:
        """Return the objects with keys below ``prefix/``, sorted."""
        found: dict[str, int] = {}
        for file, size, _ in self._files(prefix):
            key = dirname(file) if _VERSION.fullmatch(basename(file)) else file
            with contextlib.suppress(ValueError):
                found[checked_key(key)] = size
        return [StoredObject(key, found[key]) for key in sorted(found)]

    def remove_abandoned(self) -> None:
        """Delete temporary files that have not changed for an hour: their writers died."""
        before_ms = (time.time() - _ABANDONED_S) * 1000
        for file, _, changed_ms in self._files("", is_temporary):
            if changed_ms < before_ms:
                self._remove_file(file)


def version_file(key: str, number: int) -> str:
    """Return the path, relative to the store, of the file of an object's version."""
    return f"{key}/{number:012}.version"
