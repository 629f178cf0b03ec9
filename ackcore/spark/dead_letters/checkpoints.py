"""Reading of checkpoints and stores of dead letters by processes other than the driver.

It takes no lock and does not disturb a running query.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ackcore.spark.base.errors import CheckpointForeign, StateError
from ackcore.spark.base.lock import Holder, holder_of
from ackcore.spark.checkpoint.places import WITHIN, letters_url
from ackcore.spark.checkpoint.progress_log import read_progress
from ackcore.spark.checkpoint.records import META, Records
from ackcore.spark.checkpoint.table_cache import TableCache
from ackcore.spark.checkpoint.table_records import SegmentFiles
from ackcore.spark.dead_letters.letter_store import Letters
from ackcore.spark.dead_letters.topic import DeadLetterTopic
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.opening import is_bucket, open_store, place_of


class CheckpointView:
    """A read-only view of a checkpoint, as its head was at the first call of a method.

    On a file system `progress` and `holder` read their own files again at each call.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = open_store(f"{url}/ackcore", "path")
        self._read: Records | None = None

    def refreshed(self) -> CheckpointView:
        """Return another view of the same checkpoint, which has read nothing yet."""
        return CheckpointView(self.url)

    @property
    def _records(self) -> Records:
        if self._read is None:
            self._read = Records(self._store)
            self._read.read_meta()
        return self._read

    def records(self) -> Records:
        """Return the records of the head that this view has read; callers only read them.

        Raises StateError if the checkpoint has been deleted.
        """
        if self.meta() is None:
            raise StateError(
                f"the checkpoint was deleted while it was read: {self._records.entry(META)} is "
                "missing. If it was moved, give its new path"
            )
        return self._records

    def meta(self) -> dict[str, Any] | None:
        """Return the checkpoint's meta record, or None if there is no checkpoint."""
        return self._records.read_meta()

    def tables(self, check: bool) -> TableCache:
        """Return the reader of the Arrow files with waiting and dead records.

        ``check``: whether to check the lengths and checksums of files on a file system.
        """
        return TableCache(self._store, self.epoch(), check=check)

    def segments(self) -> SegmentFiles:
        """Return the reader of the files with the rows of the topology's tables."""
        return SegmentFiles(self._store, self.epoch())

    def progress(self, most: int) -> list[dict[str, Any]]:
        """Return the progress of the last ``most`` micro-batches, the newest one last.

        In a bucket the last one may be missing: the driver writes it together with the next record.
        """
        if isinstance(self._store, LocalStore):
            return read_progress(self._store.root, most)
        lines: list[dict[str, Any]] = self._records.found.get("progress", [])
        return lines[-most:] if most > 0 else []

    def holder(self) -> Holder | None:
        """Return the driver that holds the checkpoint, or held it last; None if no driver has.

        In a bucket it is unknown whether a driver that did not release the checkpoint still runs.
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
    """Return the store of dead letters at a path or URL, whether or not one exists there."""
    return Letters(open_store(place, "dead_letters"))


def checkpoint_at(url: str) -> CheckpointView | None:
    """Return the checkpoint at a path or URL, or None if there is none."""
    found = CheckpointView(url)
    return None if found.meta() is None else found


def what_is_at(given: Path) -> str:
    """Return the end of an error: why a path is no checkpoint, and checkpoints around or in it."""
    if not given.exists():
        return f"{given} does not exist"
    lacks = f"{given} has no ackcore/head.json in it"
    if (given / "head.json").exists():
        return f"{lacks}: it is within a checkpoint, {given.parent}"
    below = sorted(each.parents[1] for each in given.glob("*/ackcore/head.json"))
    if below:
        names = ", ".join(str(each) for each in below[:3])
        return f"{lacks}, but it contains {names}{', …' if len(below) > 3 else ''}"
    return lacks


def opened_checkpoint(path: str | os.PathLike[str]) -> CheckpointView:
    """Return the checkpoint at a path or URL. Raises FileNotFoundError if there is none."""
    place = place_of(path, "checkpoint")
    found = checkpoint_at(place)
    if found is None:
        what = f"{place} has no ackcore/head.json" if is_bucket(place) else what_is_at(Path(place))
        raise FileNotFoundError(
            "checkpoint must be the directory or URL passed to start() or run_batch(), but " + what
        )
    return found


def store_of(path: str | os.PathLike[str]) -> Letters:
    """Return the store at a path or URL, or the store of the checkpoint there.

    Raises FileNotFoundError if there is neither a store nor a checkpoint. Raises TypeError if
    ``path`` is not a path, such as a `DeadLetterTopic`.
    """
    if isinstance(path, DeadLetterTopic):
        raise TypeError(
            f"path must be the query's checkpoint, got {path!r}: the checkpoint has all dead "
            "letters, also those sent to the topic"
        )
    given = place_of(path, "path")
    store = letters_at(given)
    if store.owner() is not None:
        return store
    checkpoint = checkpoint_at(given)
    if checkpoint is None:
        what = f"{given} has neither an ackcore/head.json nor an index.json of ackcore's"
        if not is_bucket(given):
            what = what_is_at(Path(given))
        raise FileNotFoundError(f"path must be a checkpoint or a store of dead letters, but {what}")
    return checkpoint.letters()


def checkpoint_of(store: Letters) -> CheckpointView:
    """Return the checkpoint whose dead letters a store has.

    Raises FileNotFoundError if it was deleted, CheckpointForeign if another is in its place.
    """
    owner = store.owner()
    # A store in its checkpoint moves with the checkpoint: its recorded path may be old.
    around = store.url.removesuffix(WITHIN) if store.url.endswith(WITHIN) else None
    if owner is None:  # nothing was started since, and the store is the checkpoint's own
        owner = {"checkpoint": str(around), "deployment_key": None}
    found = None if around is None else checkpoint_at(around)
    if found is None:
        found = checkpoint_at(owner["checkpoint"])
    meta = None if found is None else found.meta()
    if found is None or meta is None:
        raise FileNotFoundError(
            f"the dead letters in {store.url} belong to the checkpoint {owner['checkpoint']}, "
            "which was deleted; read the letters with dead_letters() and send the records to the "
            "source again"
        )
    if owner["deployment_key"] not in (None, meta["deployment_key"]):
        raise CheckpointForeign(
            f"the dead letters in {store.url} belong to deployment {owner['deployment_key']}, and "
            f"{found.url} now belongs to deployment {meta['deployment_key']}; read the letters "
            "with dead_letters() and send the records to the source again"
        )
    return found


def fields_of(checkpoint: CheckpointView) -> dict[str, list[str]]:
    """Return the column names of each tracked spout of a checkpoint."""
    meta = checkpoint.meta()
    assert meta is not None
    spouts = meta["structure"]["spouts"]
    return {
        name: list(spout["fields"]) for name, spout in spouts.items() if spout.get("tracked", True)
    }


def check_spout(store: Letters, spout: str | None) -> None:
    """Raise ValueError for a name that is neither a spout of the store nor a tracked spout.

    The spouts of a store have letters or recorded columns in it. Nothing is raised if the store has
    none and no spout is tracked. ``spout``: the name; None for any spout.
    """
    known = {*store.spouts()}
    if spout is None or spout in known:
        return
    # Letters are readable without their checkpoint.
    with contextlib.suppress(FileNotFoundError, StateError):
        known.update(fields_of(checkpoint_of(store)))
    if known and spout not in known:
        raise ValueError(f"spout must be one of {', '.join(sorted(known))}, got {spout!r}")
