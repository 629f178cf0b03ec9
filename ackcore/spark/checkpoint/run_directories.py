"""The directories in which executors write: each run of a micro-batch has its own.

A driver may be paused between its last check of the lock and the rename that records its decision.
When it resumes, it does the rename even if another driver has taken over.  That decision must not
name a run whose files are gone.  So a decision is made in the directory of its run, and the driver
that takes over renames the directories of former runs before it removes them.  Either the decision
was recorded before this rename, and the new driver sees it; or it is never recorded.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ackcore._files.durable import sync_directory
from ackcore.spark.base.atomic import make_directory, writing
from ackcore.spark.checkpoint.decisions import BatchDecision

_RUN = re.compile(r"(\d+)\.[0-9a-f]{16}")
#: Ends the name of a run that may be removed, unless the decision on record names it.
_FENCED = ".fenced"


class RunDirectories:
    """The directories of runs, ``<number>.<token>``, with a random token for each run.

    Tasks of an earlier run, perhaps of another driver, may still be alive and write to its path.
    They cannot find the directory of a later run.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore/work``.
    check_owner : callable
        Raises if another driver has taken over.
    """

    def __init__(self, root: Path, check_owner: Callable[[], object]):
        self._root = root
        self._check_owner = check_owner
        self._last: Path | None = None

    def new(self, number: int) -> Path:
        """Return a new directory for a run of a micro-batch.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over.
        """
        self._check_owner()
        if self._last is not None:
            # Only a run of this driver: another driver's run may be the one that counts.  Files
            # that tasks still write are removed when the micro-batch is done.
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = make_directory(self._root / f"{number}.{secrets.token_hex(8)}")
        return self._last

    def of(self, decision: BatchDecision) -> Path:
        """Return the directory of the run that a decision accepted."""
        return self._root / decision.work

    def snapshot(self, number: int) -> Path:
        """Return the path of the snapshot of a micro-batch's new rows."""
        return self._root / f"{number}.pinned"

    def journal(self, number: int) -> Path:
        """Return the path of the journal that all runs of a micro-batch share, across drivers."""
        return self._root / f"{number}.journal"

    def remove_fenced(
        self, number: int, decision_of: Callable[[int], BatchDecision | None]
    ) -> None:
        """Remove the runs of former drivers, except the run that the recorded decision names.

        A crash at any point does no harm: the next call completes the removal.

        Parameters
        ----------
        number : int
            The micro-batch that is not done.
        decision_of : callable
            Returns the decision on record.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over from this one.
        """
        names = {path.name for path in self._root.iterdir()} if self._root.is_dir() else set()
        runs = {name.removesuffix(_FENCED) for name in names}
        runs = {run for run in runs if (of := _RUN.fullmatch(run)) and int(of[1]) == number}
        # After the listing: so none of the runs is of a driver that takes over from this one.
        self._check_owner()
        decision = decision_of(number)
        for run in runs & names:
            if decision is None or run != decision.work:
                with contextlib.suppress(FileNotFoundError):
                    (self._root / run).rename(self._root / f"{run}{_FENCED}")
        decision = decision_of(number)
        for run in runs:
            fenced = self._root / f"{run}{_FENCED}"
            if decision is None or run != decision.work:
                # Tasks may still write there: then a later call removes it.
                shutil.rmtree(fenced, ignore_errors=True)
            elif fenced.exists():
                with writing(self._root / run):
                    # Remove files that a task of the run made after the rename.
                    shutil.rmtree(self._root / run, ignore_errors=True)
                    fenced.rename(self._root / run)
                    sync_directory(self._root)

    def close(self, number: int | None) -> None:
        """Do nothing: `remove_done` has removed finished runs already."""

    def remove_done(self, number: int) -> None:
        """Remove the files of the runs of micro-batches up to ``number``."""
        for run in self._root.iterdir() if self._root.is_dir() else ():
            of = run.name.partition(".")[0]
            # File systems add names of their own, for files that are removed while open.
            if of.isdecimal() and int(of) <= number:
                # Tasks of a cancelled job may still write there: then a later call removes it.
                shutil.rmtree(run, ignore_errors=True)
