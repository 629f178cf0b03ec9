"""Opening of a checkpoint, and the directories in which executors write during a run.

The directory of a run is a prefix of keys in a bucket.  Its name contains the run's token, so no
driver reads the files of tasks that outlive their run.  A driver that runs a micro-batch again
first checks that it still owns the checkpoint: if another driver finished the micro-batch and
deleted the files, they would look damaged.

The files of a run are deleted once its micro-batch is done.  In a bucket a deletion takes two
requests, so it is done every few micro-batches, and when the checkpoint is closed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from ackcore.spark.base.atomic import fenced, make_directory, remove_temporaries
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.lock import Lock
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.checkpoint.records import HEAD, HeadMoved, Records
from ackcore.spark.checkpoint.requests import POINTER, Requests
from ackcore.spark.checkpoint.table_cache import TableCache, number_in
from ackcore.spark.checkpoint.table_records import BELOW as TABLES
from ackcore.spark.checkpoint.table_records import SegmentFiles
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.opening import open_store
from ackcore.spark.stores.run_files import remove_abandoned

_log = logging.getLogger("ackcore")

_BELOW = "work"
_TOKEN = re.compile(r"\.[0-9a-f]{16}$")
#: Micro-batches between two deletions of finished files in a bucket.
_EVERY = 8


class RunPlaces:
    """The directories of runs, ``work/<number>.<token>``, as paths or as URLs of a bucket.

    ``store``: the file system or the bucket, rooted at ``<checkpoint>/ackcore``. ``check_owner``:
    raises CheckpointInUse if another driver has taken over.
    """

    def __init__(self, store: Store, check_owner: Callable[[], object]) -> None:
        self._store = store
        self._check_owner = check_owner
        self._root = store.root / _BELOW if isinstance(store, LocalStore) else None
        self._waited = _EVERY - 1
        self._last: int | None = None
        self._made: Path | None = None

    def new(self, number: int) -> Place:
        """Return the path or URL for a new run of a micro-batch; a directory is created.

        On a file system this driver's last run is deleted. In a bucket only the second and later
        runs of a micro-batch check the ownership, since this takes a request. Raises
        CheckpointInUse if that check finds that another driver has taken over.
        """
        if number == self._last or self._root is not None:
            self._check_owner()
        if self._made is not None:
            # Only a run of this driver.  Files that tasks still write are removed when the
            # micro-batch is done.
            shutil.rmtree(self._made, ignore_errors=True)
        self._last = number
        place = self._place(f"{number}.{secrets.token_hex(8)}")
        if self._root is not None:
            self._made = make_directory(Path(place))
        return place

    def of(self, decision: BatchDecision) -> Place:
        """Return the path or URL of the run whose results a decision has."""
        return self._place(decision.work)

    def snapshot(self, number: int) -> Place:
        """Return the path or URL of the snapshot of a micro-batch's new rows."""
        return self._place(f"{number}.snapshot")

    def journal(self, number: int) -> Place:
        """Return the path or URL of the journal of calls that all runs of a micro-batch share."""
        return self._place(f"{number}.journal")

    def _place(self, name: str) -> Place:
        if self._root is not None:
            return self._root / name
        return f"{self._store.url}/{_BELOW}/{name}"

    def remove_former(self, number: int, kept: str) -> None:
        """Delete the runs of a micro-batch on a file system, except the run ``kept``.

        Earlier drivers left them. Otherwise drivers that repeatedly die in one micro-batch would
        fill the disk. Raises CheckpointInUse if another driver has taken over.
        """
        runs = self._directories()
        if runs:
            # Listed before the check, so that no run of a driver that takes over is removed.
            self._check_owner()
        for run in runs:
            if number_in(run.name) == number and _TOKEN.search(run.name) and run.name != kept:
                # Tasks may still write there: then a later call removes it.
                shutil.rmtree(run, ignore_errors=True)

    def _directories(self) -> list[Path]:
        return [] if self._root is None or not self._root.is_dir() else [*self._root.iterdir()]

    def remove_done(self, number: int) -> None:
        """Delete the files of runs of micro-batches up to ``number``, now or in a later call."""
        self._waited += 1
        if self._waited >= _EVERY or self._root is not None:
            self._sweep(number)

    def close(self, number: int | None) -> None:
        """Delete files that `remove_done` has left, up to micro-batch ``number``, if any is done.

        A StateError is only logged: the next driver deletes the files.
        """
        try:
            if number is not None and self._waited:
                self._sweep(number)
        except StateError as error:
            _log.debug("files of finished runs in %s were not deleted: %s", self._place(""), error)

    def _sweep(self, number: int) -> None:
        """Delete the files of finished micro-batches.

        The list may lag, and tasks of a cancelled job may still write. The next sweep deletes such
        files.
        """
        self._waited = 0
        if self._root is not None:
            for run in self._directories():
                if number_in(run.name) <= number:
                    shutil.rmtree(run, ignore_errors=True)
            return
        keys = [entry.key for entry in self._store.list(_BELOW)]
        old = [key for key in keys if number_in(key.split("/")[1]) <= number]
        if old:
            self._store.delete(old)


#: Attempts to take over a checkpoint while another driver writes to it.
_TAKE_OVERS = 10

#: The end of the path of a dead-letter store inside a checkpoint.
WITHIN = "/ackcore/dead_letters"

Opened = TypeVar("Opened")


class CheckpointParts(NamedTuple):
    """The URL of a checkpoint, and the objects that read and write its parts.

    ``requests`` has the requests to replay dead letters.
    """

    url: str
    requests: Requests
    records: Records
    tables: TableCache
    runs: RunPlaces
    segments: SegmentFiles


def opened(
    url: str,
    use: Callable[[CheckpointParts], Opened],
    rehearse: Callable[[Opened], object] = lambda found: None,
) -> Opened:
    """Open a checkpoint to write it: call ``use``, which checks it, then become its owner.

    On a file system the checkpoint is locked first; if a driver holds the lock, CheckpointInUse is
    raised. If another driver writes to a bucket meanwhile, ``use`` is called again, up to 10 times
    in all. Returns the result of ``use``. The caller then closes the records, which releases the
    checkpoint; after an error they are closed.

    ``rehearse``: in a bucket, called once with a result of ``use`` before a checkpoint is taken
    over that another driver has open or has died with. It may take long: the checkpoint is read
    again.
    """
    store = open_store(f"{url}/ackcore", "checkpoint")
    lock = Lock(make_directory(store.root) / "lock") if isinstance(store, LocalStore) else None
    tried, rehearsed = 0, lock is not None
    while True:
        tried += 1
        records: Records | None = None
        try:
            with fenced(lock.check) if lock is not None else contextlib.nullcontext():
                records = Records(store, lock)
                if isinstance(store, LocalStore):
                    places = [store.root / name for name in (HEAD, "records", "state")]
                    for place in (*places, *(store.root / TABLES).glob("*")):
                        remove_temporaries(place)
                else:
                    remove_abandoned(store)
                tables = TableCache(store, records.epoch)
                requests = Requests(partial(letters_url, records, url), records)
                runs = RunPlaces(store, records.check_owner)
                segments = SegmentFiles(store, records.epoch)
                found = use(CheckpointParts(url, requests, records, tables, runs, segments))
                if records.found.get("open") and not rehearsed:
                    rehearse(found)
                    rehearsed = True
                    continue
                records.take_over()
        except BaseException as error:
            # Records that are read while the other driver writes may be inconsistent.
            moved = isinstance(error, StateError) and (
                isinstance(error, HeadMoved) or (records is not None and records.has_moved())
            )
            if not moved or tried == _TAKE_OVERS:
                if records is not None:
                    records.close()
                elif lock is not None:
                    lock.close()
                raise
        else:
            return found


def letters_url(records: Records, url: str) -> str:
    """Return the recorded path or URL of the dead letters, or else the default within ``url``."""
    return remembered_letters(records) or url + WITHIN


def remembered_letters(records: Records) -> str | None:
    """Return the recorded path or URL of the dead letters; None if they are in the checkpoint."""
    pointer = records.read(POINTER)
    return None if pointer is None else pointer["path"]
