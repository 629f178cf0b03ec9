"""Where executors write in a bucket: below a prefix of each run's own.

There is nothing to make and nothing to rename.  A run's token is in all of its keys, so tasks that
live on write where nobody looks, and a decision needs no fence of its own: it is a put of the head.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ackcore.spark.checkpoint.decisions import BatchDecision
from ackcore.spark.stores.interface import Store

_BELOW = "work"


class BucketRuns:
    """The prefixes of runs, ``work/<number>.<token>``, as URLs.

    Parameters
    ----------
    store : Store
        The bucket, from ``<checkpoint>/ackcore`` on.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def new(self, number: int) -> str:
        """Return the place of a new run of a micro-batch."""
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
        """Delete what the runs of micro-batches up to ``number`` left.

        The list may lag, and tasks of a job that was given up may write yet: then the next time.
        """
        keys = [entry.key for entry in self._store.list(_BELOW)]
        old = [key for key in keys if _number_in(key) <= number]
        if old:
            self._store.delete(old)


def _number_in(key: str) -> int:
    number = key.split("/")[1].partition(".")[0]
    return int(number) if number.isdecimal() else 1 << 63
