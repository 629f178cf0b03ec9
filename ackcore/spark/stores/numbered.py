"""Objects with numbered versions, for stores that have directories but no conditional writes.

An object that is written by ``replace`` is a directory with a file for each version,
``index.json/000000000012.version``.  A version gets its name by an operation that fails if the name
exists, so only one writer can do it, and the highest number counts.  No lock is taken: a lock may
pass to another host while this host is paused.  A writer that slept may name the number of a
version that has been removed.  It then finds a higher number and is refused; its file is removed
with other old versions.
"""

from __future__ import annotations

import re

from ackcore.spark.stores.interface import Stored, version_if_equal

VERSION = re.compile(r"(\d{12})\.version")
#: Versions that are kept, the newest included: the last one proves that the new one follows it.
_KEPT = 2


def version_name(number: int) -> str:
    """Return the name of the file of a version."""
    return f"{number:012}.version"


class NumberedVersions:
    """A base class of stores on file systems: it implements `replace` with numbered versions."""

    def get(self, key: str) -> Stored | None:
        """Return an object, or None if it does not exist."""
        raise NotImplementedError

    def place(self, key: str) -> str:
        """Return the path or URL of an object, for messages."""
        raise NotImplementedError

    def _numbers(self, key: str) -> list[int]:
        """Return the numbers of the existing versions of an object, sorted."""
        raise NotImplementedError

    def _add(self, key: str, number: int, data: bytes) -> None:
        """Write a version.  Raises FileExistsError if there is one with this number."""
        raise NotImplementedError

    def _remove(self, key: str, number: int) -> None:
        """Delete a version, if it exists."""
        raise NotImplementedError

    def replace(self, key: str, data: bytes, version: str | None) -> str:
        """Replace ``version`` of an object, and return the new version.

        Raises StoreConflict if the store has another version. None: there is no object yet.
        """
        place, newest = self.place(key), self._numbers(key)[-1:]
        if [str(number) for number in newest] != ([] if version is None else [version]):
            return version_if_equal(place, self.get(key), data)
        number = 1 if version is None else int(version) + 1
        try:
            self._add(key, number, data)
        except FileExistsError:
            return version_if_equal(place, self.get(key), data)
        there = self._numbers(key)
        if there[-1:] != [number]:
            return version_if_equal(place, self.get(key), data)
        if version is not None and number - 1 not in there:  # the object was deleted
            self._remove(key, number)
            return version_if_equal(place, None, data)
        for old in there[:-_KEPT]:
            self._remove(key, old)
        return str(number)
