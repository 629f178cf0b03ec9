"""The places where executors write: each run has its own directory, or prefix in a bucket.

All paths of a run contain its token, so nobody reads the files of tasks that outlive their run.  A
decision needs no separate fence, since it is a put of the head.  A driver that runs a micro-batch
again first checks that it still owns the checkpoint: if another driver finished the micro-batch and
removed the files, they would look damaged.

Files of a run are not read any more once its micro-batch is done, whichever driver owns the
checkpoint.  On a file system they are deleted then.  In a bucket a deletion takes two requests, so
it is done every few micro-batches, and when the checkpoint is closed.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ackcore.spark.base.atomic import make_directory
from ackcore.spark.base.errors import StateError
from ackcore.spark.base.paths import Place
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.local import LocalStore

_log = logging.getLogger("ackcore")

_BELOW = "work"
_TOKEN = re.compile(r"\.[0-9a-f]{16}$")
#: Micro-batches between two deletions of finished files in a bucket.
_EVERY = 8


class RunPlaces:
    """The places of runs, ``work/<number>.<token>``: paths of directories, or URLs.

    Parameters
    ----------
    store : Store
        The file system or the bucket, rooted at ``<checkpoint>/ackcore``.
    check_owner : callable
        Raises if another driver has taken over.
    """

    def __init__(self, store: Store, check_owner: Callable[[], object]) -> None:
        self._store = store
        self._check_owner = check_owner
        self._root = store.root / _BELOW if isinstance(store, LocalStore) else None
        self._waited = _EVERY - 1
        self._last: int | None = None
        self._made: Path | None = None

    def new(self, number: int) -> Place:
        """Return the place of a new run of a micro-batch.

        In a bucket only the second and later runs of a micro-batch check the ownership, since this
        takes a request.

        Raises
        ------
        CheckpointInUse
            If that check finds that another driver has taken over.
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
        """Return the place of the run that a decision accepted."""
        return self._place(decision.work)

    def snapshot(self, number: int) -> Place:
        """Return the place of the snapshot of a micro-batch's new rows."""
        return self._place(f"{number}.pinned")

    def journal(self, number: int) -> Place:
        """Return the place of the journal that all runs of a micro-batch share, across drivers."""
        return self._place(f"{number}.journal")

    def _place(self, name: str) -> Place:
        if self._root is not None:
            return self._root / name
        return f"{self._store.url}/{_BELOW}/{name}"

    def remove_former(self, number: int, kept: str) -> None:
        """Remove the runs of a micro-batch that former drivers left on a file system, except one.

        Otherwise drivers that die again and again in one micro-batch fill the disk.
        """
        for run in self._directories():
            if _number_of(run.name) == number and _TOKEN.search(run.name) and run.name != kept:
                # Tasks may still write there: then a later call removes it.
                shutil.rmtree(run, ignore_errors=True)

    def _directories(self) -> list[Path]:
        is_there = self._root is not None and self._root.is_dir()
        return list(self._root.iterdir()) if self._root is not None and is_there else []

    def remove_done(self, number: int) -> None:
        """Delete the files of runs of micro-batches up to ``number``, now or in a later call."""
        self._waited += 1
        if self._waited >= _EVERY or self._root is not None:
            self._sweep(number)

    def close(self, number: int | None) -> None:
        """Delete the files of runs up to micro-batch ``number``. If this fails, the next driver
        does it.
        """
        try:
            if number is not None and self._waited:
                self._sweep(number)
        except StateError as error:
            _log.debug("%s could not be swept: %s", self._place(""), error)

    def _sweep(self, number: int) -> None:
        """Delete the files of finished micro-batches.

        The list may lag, and tasks of a cancelled job may still write. The next sweep deletes such
        files.
        """
        self._waited = 0
        if self._root is not None:
            for run in self._directories():
                if _number_of(run.name) <= number:
                    shutil.rmtree(run, ignore_errors=True)
            return
        keys = [entry.key for entry in self._store.list(_BELOW)]
        old = [key for key in keys if _number_of(key.split("/")[1]) <= number]
        if old:
            self._store.delete(old)


def _number_of(run: str) -> int:
    # File systems add names of their own, for files that are removed while open.
    number = run.partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
