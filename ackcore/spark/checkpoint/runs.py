"""The directories in which executors write: each run of a micro-batch has one of its own."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ackcore.spark.base.atomic import make_directory
from ackcore.spark.checkpoint.decisions import BatchDecision


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

    def remove_done(self, number: int) -> None:
        """Remove what the runs of micro-batches up to ``number`` left."""
        for run in self._root.iterdir() if self._root.is_dir() else ():
            of = run.name.partition(".")[0]
            # File systems put names of their own there: what is open still as it is removed, say.
            if of.isdecimal() and int(of) <= number:
                # Tasks of a job that was given up may be writing there still: then the next time.
                shutil.rmtree(run, ignore_errors=True)
