"""Where executors write in a bucket: below a prefix of each run's own.

There is nothing to make and nothing to rename.  A run's token is in all of its keys, so tasks that
live on write where nobody looks, and a decision needs no fence of its own: it is a put of the head.
Who runs a micro-batch again asks first whether it is his still: to him whose files were removed, as
another driver had done with them, they look damaged.

What runs left is not read any more once their micro-batch is done, whoever owns the checkpoint.  It
is deleted every few micro-batches, and when the checkpoint is closed: each time takes two trips.
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
#: In so many micro-batches what they left is deleted once.
_EVERY = 8


class BucketRuns:
    """The prefixes of runs, ``work/<number>.<token>``, as URLs.

    Parameters
    ----------
    store : Store
        The bucket, from ``<checkpoint>/ackcore`` on.
    check_owner : callable
        Raises if another driver has taken over.
    """

    def __init__(self, store: Store, check_owner: Callable[[], object]) -> None:
        self._store = store
        self._check_owner = check_owner
        self._waited = _EVERY - 1
        self._last: int | None = None

    def new(self, number: int) -> str:
        """Return the place of a new run of a micro-batch; its second run takes a trip.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over, at the second.
        """
        if number == self._last:
            self._check_owner()
        self._last = number
        return self._url(f"{number}.{secrets.token_hex(8)}")

    def of(self, decision: BatchDecision) -> str:
        """Return the place of the run that a decision accepted."""
        return self._url(decision.work)

    def snapshot(self, number: int) -> str:
        """Return where the snapshot of the new rows of a micro-batch is."""
        return self._url(f"{number}.pinned")

    def journal(self, number: int) -> str:
        """Return where all runs of a micro-batch keep answers."""
        return self._url(f"{number}.journal")

    def _url(self, name: str) -> str:
        return f"{self._store.url}/{_BELOW}/{name}"

    def remove_fenced(
        self, number: int, decision_of: Callable[[int], BatchDecision | None]
    ) -> None:
        """Do nothing: no run of a former driver is in this one's way."""

    def remove_done(self, number: int) -> None:
        """Delete what the runs of micro-batches up to ``number`` left, now or soon."""
        self._waited += 1
        if self._waited >= _EVERY:
            self._sweep(number)

    def close(self, number: int | None) -> None:
        """Delete what runs left of micro-batches up to ``number``; or else the next driver does."""
        try:
            if number is not None and self._waited:
                self._sweep(number)
        except StateError as error:
            _log.debug("%s could not be swept: %s", self._url(""), error)

    def _sweep(self, number: int) -> None:
        """Delete what is done.

        The list may lag, and tasks of a job that was given up may write yet: then the next time.
        """
        self._waited = 0
        keys = [entry.key for entry in self._store.list(_BELOW)]
        old = [key for key in keys if _number_in(key) <= number]
        if old:
            self._store.delete(old)


def _number_in(key: str) -> int:
    number = key.split("/")[1].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
