"""A read-only view of a checkpoint and its dead letters, on a file system or in a bucket.

The view takes no lock and does not disturb a running query.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol, Self

from ackcore.spark.base.checksummed import read_record
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.lock import Holder, epoch_of, holder_of
from ackcore.spark.checkpoint.head import HeadRecords
from ackcore.spark.checkpoint.places import letters_url
from ackcore.spark.checkpoint.progress_log import read_progress
from ackcore.spark.checkpoint.records import META, RecordFiles, Records
from ackcore.spark.checkpoint.tables import TableCache
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.opening import is_bucket, open_store


class Checkpoint(Protocol):
    """A read-only view of a checkpoint.

    Attributes
    ----------
    url : str
        The path or URL of the checkpoint.
    """

    url: str

    def refreshed(self) -> Self:
        """Return a view of the checkpoint's present state."""

    def meta(self) -> dict[str, Any] | None:
        """Return the checkpoint's meta record, or None if there is no checkpoint."""

    def records(self) -> Records:
        """Return the checkpoint's records, read-only.

        Raises
        ------
        StateError
            If the checkpoint has been deleted.
        """

    def tables(self, check: bool) -> TableCache:
        """Return the checkpoint's tables. ``check=False`` permits skipping their checksums."""

    def progress(self, most: int) -> list[dict[str, Any]]:
        """Return the progress of the last ``most`` micro-batches, as `read_progress` does."""

    def holder(self) -> Holder | None:
        """Return the driver that holds the checkpoint, or the last one that held it."""

    def epoch(self) -> int:
        """Return the number of times that drivers have opened the checkpoint."""

    def letters(self) -> Letters:
        """Return the checkpoint's store of dead letters."""


class LocalCheckpoint:
    """A checkpoint on a file system.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root.parent)

    def meta(self) -> dict[str, Any] | None:
        """See `Checkpoint.meta`."""
        return read_record(self.root / META, META)

    def refreshed(self) -> LocalCheckpoint:
        """See `Checkpoint.refreshed`. Each method reads the files anew."""
        return self

    def records(self) -> Records:
        """See `Checkpoint.records`."""
        meta = self.meta()
        if meta is None:
            raise StateError(f"{self.root / META} is not there any more")
        return RecordFiles(self.root, meta["deployment_key"])

    def tables(self, check: bool) -> TableCache:
        """See `Checkpoint.tables`."""
        return TableCache(LocalStore(self.root), 0, check=check)

    def progress(self, most: int) -> list[dict[str, Any]]:
        """See `Checkpoint.progress`."""
        return read_progress(self.root, most)

    def holder(self) -> Holder | None:
        """See `Checkpoint.holder`."""
        return holder_of(self.root / "lock")

    def epoch(self) -> int:
        """See `Checkpoint.epoch`."""
        return epoch_of(self.root / "lock")

    def letters(self) -> Letters:
        """See `Checkpoint.letters`."""
        return letters_at(letters_url(self.records(), self.url))


class BucketCheckpoint:
    """A checkpoint in a bucket, in the state that its head had at the first method call.

    Parameters
    ----------
    url : str
        The URL of the checkpoint.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = open_store(f"{url}/ackcore", "path")
        self._read: HeadRecords | None = None

    def refreshed(self) -> BucketCheckpoint:
        """See `Checkpoint.refreshed`."""
        return BucketCheckpoint(self.url)

    @property
    def _records(self) -> HeadRecords:
        if self._read is None:
            self._read = HeadRecords(self._store)
            self._read.read_meta()
        return self._read

    def records(self) -> Records:
        """See `Checkpoint.records`. All records are from the same moment."""
        if self.meta() is None:
            raise StateError(f"{self._records.place(META)} is not there any more")
        return self._records

    def meta(self) -> dict[str, Any] | None:
        """See `Checkpoint.meta`."""
        return self._records.read_meta()

    def tables(self, check: bool) -> TableCache:
        """See `Checkpoint.tables`. Checksums are always verified."""
        return TableCache(self._store, self.epoch(), check=check)

    def progress(self, most: int) -> list[dict[str, Any]]:
        """See `Checkpoint.progress`. The driver writes a step's progress with the next step."""
        lines: list[dict[str, Any]] = self._records.found.get("progress", [])
        return lines[-most:] if most > 0 else []

    def holder(self) -> Holder | None:
        """See `Checkpoint.holder`. A driver that died while it held the checkpoint counts as
        holder.
        """
        found = self._records.found
        return Holder(found["holder"], None if found["open"] else False) if found else None

    def epoch(self) -> int:
        """See `Checkpoint.epoch`."""
        return int(self._records.found.get("epoch", 0))

    def letters(self) -> Letters:
        """See `Checkpoint.letters`."""
        return letters_at(letters_url(self._records, self.url))


def letters_at(place: str) -> Letters:
    """Return the store of dead letters at a path or URL."""
    return Letters(open_store(place, "dead_letters"))


def checkpoint_at(url: str) -> Checkpoint | None:
    """Return the checkpoint at a path or URL, or None if there is none."""
    if is_bucket(url):
        found = BucketCheckpoint(url)
        return None if found.meta() is None else found
    root = Path(os.path.join(url, "ackcore"))
    return LocalCheckpoint(root) if (root / META).is_file() else None
