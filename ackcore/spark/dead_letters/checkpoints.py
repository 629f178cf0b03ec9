"""A checkpoint as who looks after its dead letters sees it, on a file system or in a bucket.

Nothing is owned by looking: a query that runs on it is not disturbed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa

from ackcore.spark.base.atomic import make_directory, remove, remove_temporaries
from ackcore.spark.base.checksummed import read_record
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.lock import Holder, Lock, epoch_of, holder_of
from ackcore.spark.checkpoint import replays
from ackcore.spark.checkpoint.bucket_tables import BucketTables
from ackcore.spark.checkpoint.head import HeadRecords
from ackcore.spark.checkpoint.places import letters_url
from ackcore.spark.checkpoint.progress_log import read_progress
from ackcore.spark.checkpoint.records import META, RecordFiles, Records
from ackcore.spark.checkpoint.requests import POINTER
from ackcore.spark.checkpoint.tables import TableCache
from ackcore.spark.dead_letters.bucket import BucketLetters
from ackcore.spark.dead_letters.files import DirectoryLetters, Letters
from ackcore.spark.stores.opening import is_bucket, open_store

#: The end of the path of a store that is in its checkpoint.
WITHIN = "/ackcore/dead_letters"


class Checkpoint(Protocol):
    """A checkpoint.

    Attributes
    ----------
    url : str
        Where it is.
    """

    url: str

    def refreshed(self) -> Self:
        """Return it as it is now."""

    def meta(self) -> dict[str, Any] | None:
        """Return what it is, None if it is not there."""

    def records(self) -> Records:
        """Return its records, to be read only.

        Raises
        ------
        StateError
            If it is not there any more.
        """

    def tables(self, check: bool) -> TableCache:
        """Return its tables; without ``check`` their checksums need not be looked at."""

    def requested(self) -> list[str]:
        """Return the names of requests to replay that are there, taken or not."""

    def progress(self, most: int) -> list[dict[str, Any]]:
        """Return what the last micro-batches did, as `read_progress` does."""

    def holder(self) -> Holder | None:
        """Return the driver that holds it, or held it last."""

    def epoch(self) -> int:
        """Return how often drivers have opened it."""

    def letters(self) -> Letters:
        """Return its store of dead letters."""

    def asking(self) -> AbstractContextManager[None]:
        """Keep others from noting a request within, where there is a lock."""

    def finish(self) -> None:
        """Finish what a `replay` that died began; within `asking`."""

    def send(
        self,
        store: Letters,
        request: str,
        note: Mapping[str, Any],
        tables: Mapping[str, Iterable[pa.Table]],
    ) -> None:
        """Send letters, all of a note or none.

        Raises
        ------
        NotesChanged
            If another noted a request meanwhile.
        """

    def withdrawn(self, store: Letters) -> set[tuple[str, str]]:
        """Return the requests that were withdrawn, each with its spout."""


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
        self._requests = root / "replays"

    def meta(self) -> dict[str, Any] | None:
        """See `Checkpoint.meta`."""
        return read_record(self.root / META, META)

    def refreshed(self) -> LocalCheckpoint:
        """See `Checkpoint.refreshed`. The files are read anew at each call."""
        return self

    def records(self) -> Records:
        """See `Checkpoint.records`."""
        meta = self.meta()
        if meta is None:
            raise StateError(f"{self.root / META} is not there any more")
        return RecordFiles(self.root, meta["deployment_key"])

    def tables(self, check: bool) -> TableCache:
        """See `Checkpoint.tables`."""
        return TableCache(self.root / "state", check=check)

    def requested(self) -> list[str]:
        """See `Checkpoint.requested`."""
        return replays.published(self._requests)

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
        pointer = read_record(self.root / POINTER, POINTER)
        return letters_at(self.url + WITHIN if pointer is None else pointer["path"])

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """See `Checkpoint.asking`."""
        lock = Lock(make_directory(self._requests) / "lock", wait=True)
        try:
            yield
        finally:
            lock.close()

    def finish(self) -> None:
        """See `Checkpoint.finish`."""
        remove_temporaries(self._requests)
        for name in replays.staged(self._requests):
            if replays.counts(self._requests, name):
                replays.publish(self._requests, name)
            else:
                remove(self._requests / name)

    def send(
        self,
        store: Letters,
        request: str,
        note: Mapping[str, Any],
        tables: Mapping[str, Iterable[pa.Table]],
    ) -> None:
        """See `Checkpoint.send`: staged, noted in the store, published."""
        staged: list[str] = []
        place = store.note_place(request)
        try:
            for spout, some in tables.items():
                staged.append(replays.stage(self._requests, request, spout, some, place))
            store.add_note(request, note)
        except BaseException:
            # A note that may have been made by a put whose answer was lost counts: then `finish`.
            for name in staged:
                if not replays.counts(self._requests, name):
                    remove(self._requests / name)
            raise
        # From here on it counts: if this dies, the next `replay` or query publishes it.
        for name in staged:
            replays.publish(self._requests, name)

    def withdrawn(self, store: Letters) -> set[tuple[str, str]]:
        """See `Checkpoint.withdrawn`."""
        return replays.withdrawn_in(self._requests)


class BucketCheckpoint:
    """A checkpoint in a bucket, as its head was when this was first asked.

    Parameters
    ----------
    url : str
        Where it is.
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
        """See `Checkpoint.records`: as they were at one moment."""
        if self.meta() is None:
            raise StateError(f"{self._records.place(META)} is not there any more")
        return self._records

    def meta(self) -> dict[str, Any] | None:
        """See `Checkpoint.meta`."""
        return self._records.read_meta()

    def tables(self, check: bool) -> TableCache:
        """See `Checkpoint.tables`: they are always checked."""
        return BucketTables(self._store, self.epoch())

    def requested(self) -> list[str]:
        """See `Checkpoint.requested`."""
        store = self.letters()
        assert isinstance(store, BucketLetters), f"the letters of {self.url} are in {store.url}"
        return sorted(store.index.read().get("requests", {}))

    def progress(self, most: int) -> list[dict[str, Any]]:
        """See `Checkpoint.progress`. The last step's progress is written with the next step."""
        lines: list[dict[str, Any]] = self._records.found.get("progress", [])
        return lines[-most:] if most > 0 else []

    def holder(self) -> Holder | None:
        """See `Checkpoint.holder`. A driver that died while it held the checkpoint counts."""
        found = self._records.found
        return Holder(found["holder"], None if found["open"] else False) if found else None

    def epoch(self) -> int:
        """See `Checkpoint.epoch`."""
        return int(self._records.found.get("epoch", 0))

    def letters(self) -> Letters:
        """See `Checkpoint.letters`."""
        return letters_at(letters_url(self._records, self.url))

    def asking(self) -> AbstractContextManager[None]:
        """See `Checkpoint.asking`. There is no lock: the second of two writers reads again."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """See `Checkpoint.finish`: a request is there with its note, by one put."""

    def send(
        self,
        store: Letters,
        request: str,
        note: Mapping[str, Any],
        tables: Mapping[str, Iterable[pa.Table]],
    ) -> None:
        """See `Checkpoint.send`."""
        assert isinstance(store, BucketLetters), f"the letters of {self.url} are in {store.url}"
        requests = {}
        with tempfile.TemporaryDirectory(prefix="ackcore-") as place:
            for spout, some in tables.items():
                name = replays.write(Path(place), request, spout, some)
                requests[name] = store.put_request(name, Path(place, name))
        store.add_note(request, note, requests)

    def withdrawn(self, store: Letters) -> set[tuple[str, str]]:
        """See `Checkpoint.withdrawn`."""
        return store.withdrawn() if isinstance(store, BucketLetters) else set()


def letters_at(place: str) -> Letters:
    """Return the store of a path or a URL."""
    if is_bucket(place):
        return BucketLetters(open_store(place, "dead_letters"))
    return DirectoryLetters(Path(place))


def checkpoint_at(url: str) -> Checkpoint | None:
    """Return the checkpoint of a path or a URL, None if there is none."""
    if is_bucket(url):
        found = BucketCheckpoint(url)
        return None if found.meta() is None else found
    root = Path(os.path.join(url, "ackcore"))
    return LocalCheckpoint(root) if (root / META).is_file() else None
