"""The directories in which executors write: each run of a micro-batch has one of its own.

A driver that is paused between its last check of the lock and the rename which records its decision
records it when it resumes, whatever came meanwhile.  That decision must not name a run whose files
are gone.  So a decision is made in the directory of its run, and the driver that takes over renames
the directories of former runs before it removes them: either the decision was recorded before the
rename, and is seen after it; or it never gets its name.
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
    """The directories of runs, ``<number>.<token>``, the token drawn for the run.

    Tasks of an earlier run, another driver's perhaps, may live on and go on writing by path: none
    of them finds the directory of a later run.

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
            # Only what this driver made: another one's run may be the one that counts.  What
            # cannot be removed, as tasks write there still, goes when the micro-batch is done.
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = make_directory(self._root / f"{number}.{secrets.token_hex(8)}")
        return self._last

    def of(self, decision: BatchDecision) -> Path:
        """Return the directory of the run that a decision accepted."""
        return self._root / decision.work

    def snapshot(self, number: int) -> Path:
        """Return where the snapshot of the new rows of a micro-batch is."""
        return self._root / f"{number}.pinned"

    def journal(self, number: int) -> Path:
        """Return where all runs of a micro-batch, those of former drivers too, keep answers."""
        return self._root / f"{number}.journal"

    def remove_fenced(
        self, number: int, decision_of: Callable[[int], BatchDecision | None]
    ) -> None:
        """Remove the runs of drivers from which this one has taken over.

        May be cut short anywhere, and repeated.

        Parameters
        ----------
        number : int
            The micro-batch that is not done.
        decision_of : callable
            Reads the decision on record.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over from this one.
        """
        names = {path.name for path in self._root.iterdir()} if self._root.is_dir() else set()
        runs = {name.removesuffix(_FENCED) for name in names}
        runs = {run for run in runs if (of := _RUN.fullmatch(run)) and int(of[1]) == number}
        # After the look: none of them is of a driver that takes over from this one.
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
                # Tasks may be writing there still: then the next time.
                shutil.rmtree(fenced, ignore_errors=True)
            elif fenced.exists():
                with writing(self._root / run):
                    # What a task of it has made anew since it was renamed.
                    shutil.rmtree(self._root / run, ignore_errors=True)
                    fenced.rename(self._root / run)
                    sync_directory(self._root)

    def close(self, number: int | None) -> None:
        """Do nothing: what is done was removed when it was."""

    def remove_done(self, number: int) -> None:
        """Remove what the runs of micro-batches up to ``number`` left."""
        for run in self._root.iterdir() if self._root.is_dir() else ():
            of = run.name.partition(".")[0]
            # File systems put names of their own there: what is open still as it is removed, say.
            if of.isdecimal() and int(of) <= number:
                # Tasks of a job that was given up may be writing there still: then the next time.
                shutil.rmtree(run, ignore_errors=True)
