"""The places in a bucket where executors write: each run has its own prefix.

Nothing needs to be made or renamed.  All keys of a run contain its token, so nobody reads the files
of tasks that outlive their run.  A decision needs no separate fence, since it is a put of the head.
A driver that runs a micro-batch again first checks that it still owns the checkpoint: if another
driver finished the micro-batch and removed the files, they would look damaged.

Files of a run are not read any more once its micro-batch is done, whichever driver owns the
checkpoint.  They are deleted every few micro-batches, and when the checkpoint is closed; each time
takes two requests.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from ackcore.spark.base.errors import StateError
from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.stores.interface import Store

_log = logging.getLogger("ackcore")

_BELOW = "work"
#: Micro-batches between two deletions of finished files.
_EVERY = 8


class BucketRuns:
    """The prefixes of runs, ``work/<number>.<token>``, as URLs.

    Parameters
    ----------
    store : Store
        The bucket, rooted at ``<checkpoint>/ackcore``.
    check_owner : callable
        Raises if another driver has taken over.
    """

    def __init__(self, store: Store, check_owner: Callable[[], object]) -> None:
        self._store = store
        self._check_owner = check_owner
        self._waited = _EVERY - 1
        self._last: int | None = None

    def new(self, number: int) -> str:
        """Return the URL of a new run of a micro-batch.

        From the second run of a micro-batch on, this checks the ownership with a request.

        Raises
        ------
        CheckpointInUse
            If that check finds that another driver has taken over.
        """
        if number == self._last:
            self._check_owner()
        self._last = number
        return self._url(f"{number}.{secrets.token_hex(8)}")

    def of(self, decision: BatchDecision) -> str:
        """Return the URL of the run that a decision accepted."""
        return self._url(decision.work)

    def snapshot(self, number: int) -> str:
        """Return the URL of the snapshot of a micro-batch's new rows."""
        return self._url(f"{number}.pinned")

    def journal(self, number: int) -> str:
        """Return the URL of the journal that all runs of a micro-batch share."""
        return self._url(f"{number}.journal")

    def _url(self, name: str) -> str:
        return f"{self._store.url}/{_BELOW}/{name}"

    def remove_fenced(
        self, number: int, decision_of: Callable[[int], BatchDecision | None]
    ) -> None:
        """Do nothing: runs of former drivers do not disturb this driver."""

    def remove_done(self, number: int) -> None:
        """Delete the files of runs of micro-batches up to ``number``, now or in a later call."""
        self._waited += 1
        if self._waited >= _EVERY:
            self._sweep(number)

    def close(self, number: int | None) -> None:
        """Delete the files of runs up to micro-batch ``number``. If this fails, the next driver
        does it.
        """
        try:
            if number is not None and self._waited:
                self._sweep(number)
        except StateError as error:
            _log.debug("%s could not be swept: %s", self._url(""), error)

    def _sweep(self, number: int) -> None:
        """Delete the files of finished micro-batches.

        The list may lag, and tasks of a cancelled job may still write. The next sweep deletes such
        files.
        """
        self._waited = 0
        keys = [entry.key for entry in self._store.list(_BELOW)]
        old = [key for key in keys if _number_in(key) <= number]
        if old:
            self._store.delete(old)


def _number_in(key: str) -> int:
    number = key.split("/")[1].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
