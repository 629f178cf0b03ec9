"""A read-only view of a checkpoint and its dead letters, on a file system or in a bucket.

The view takes no lock and does not disturb a running query.
"""

from __future__ import annotations

from typing import Any

from ackcore.spark.base.errors import StateError
from ackcore.spark.base.lock import Holder, holder_of
from ackcore.spark.checkpoint.places import letters_url
from ackcore.spark.checkpoint.progress_log import read_progress
from ackcore.spark.checkpoint.records import META, Records
from ackcore.spark.checkpoint.tables import TableCache
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.opening import open_store


class Checkpoint:
    """A read-only view of a checkpoint, in the state that its head had at the first method call.

    Parameters
    ----------
    url : str
        The URL of the checkpoint.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = open_store(f"{url}/ackcore", "path")
        self._read: Records | None = None

    def refreshed(self) -> Checkpoint:
        """Return a view of the checkpoint's present state."""
        return Checkpoint(self.url)

    @property
    def _records(self) -> Records:
        if self._read is None:
            self._read = Records(self._store)
            self._read.read_meta()
        return self._read

    def records(self) -> Records:
        """Return the checkpoint's records, read-only, all from the same moment.

        Raises
        ------
        StateError
            If the checkpoint has been deleted.
        """
        if self.meta() is None:
            raise StateError(f"{self._records.place(META)} is not there any more")
        return self._records

    def meta(self) -> dict[str, Any] | None:
        """Return the checkpoint's meta record, or None if there is no checkpoint."""
        return self._records.read_meta()

    def tables(self, check: bool) -> TableCache:
        """Return the checkpoint's tables. ``check=False`` permits skipping checksums of files."""
        return TableCache(self._store, self.epoch(), check=check)

    def progress(self, most: int) -> list[dict[str, Any]]:
        """Return the progress of the last ``most`` micro-batches.

        In a bucket the driver writes the progress of a step with the next step.
        """
        if isinstance(self._store, LocalStore):
            return read_progress(self._store.root, most)
        lines: list[dict[str, Any]] = self._records.found.get("progress", [])
        return lines[-most:] if most > 0 else []

    def holder(self) -> Holder | None:
        """Return the driver that holds the checkpoint, or the last one that held it.

        In a bucket a driver that died while it held the checkpoint counts as holder.
        """
        if isinstance(self._store, LocalStore):
            return holder_of(self._store.root / "lock")
        found = self._records.found
        return Holder(found["holder"], None if found["open"] else False) if found else None

    def epoch(self) -> int:
        """Return the number of times that drivers have opened the checkpoint."""
        return int(self._records.found.get("epoch", 0))

    def letters(self) -> Letters:
        """Return the checkpoint's store of dead letters."""
        return letters_at(letters_url(self._records, self.url))


def letters_at(place: str) -> Letters:
    """Return the store of dead letters at a path or URL."""
    return Letters(open_store(place, "dead_letters"))


def checkpoint_at(url: str) -> Checkpoint | None:
    """Return the checkpoint at a path or URL, or None if there is none."""
    found = Checkpoint(url)
    return None if found.meta() is None else found
