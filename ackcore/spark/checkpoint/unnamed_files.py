"""The files of a folder that no record names any more, found with one list of the folder."""

from __future__ import annotations

from collections.abc import Collection

from ackcore.spark.stores.interface import Store


class UnnamedFiles:
    """The known files below a prefix, whose names begin with the number of their micro-batch.

    ``below``: the prefix, without the slash.
    """

    def __init__(self, store: Store, below: str) -> None:
        self._store = store
        self._below = below
        #: The known keys of existing files; None before the first list.
        self._there: set[str] | None = None

    def add(self, file: str) -> None:
        """Add a file that this driver has written."""
        if self._there is not None:
            self._there.add(f"{self._below}/{file}")

    def take(self, number: int, named: Collection[str]) -> set[str]:
        """Return the keys of files before micro-batch ``number - 1`` that no record names, once.

        ``number``: the last micro-batch that is done. ``named``: the files that the kept records
        name.
        """
        kept = {f"{self._below}/{file}" for file in named}
        if self._there is None:
            # The list may lag: a later driver deletes the files that it lacks.
            self._there = {entry.key for entry in self._store.list(self._below)}
        self._there |= kept
        old = {key for key in self._there - kept if _number_in(key) < number - 1}
        self._there -= old
        return old


def _number_in(key: str) -> int:
    """Return the micro-batch number in a file's key, or a huge number if there is none."""
    number = key.rpartition("/")[2].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
