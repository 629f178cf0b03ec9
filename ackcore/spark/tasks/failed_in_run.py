"""Writing records that fail while the task has them: they need not be read again.

Where nothing is settled, a record that failed stays failed, and its task knows why.  So when a
chunk of records was handed on, those of it that failed are judged and written to files in the run's
directory, as `ackcore.spark.tasks.failed_stage` would; the decision adopts them from there.  What
fails later, when its chunk is gone, is read again, and so are the few of a task that hardly has
any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.reason_columns import ReasonTexts
from ackcore.spark.base.reasons import earliest
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_writer import FailedWriter
from ackcore.spark.tasks.row_files import among
from ackcore.spark.tasks.source_records import SourceRecords, records_at

#: A task that has fewer bytes of failed records, and fewer of them than it is told, writes no file.
_FEW_BYTES = 1 << 22


class FailedInRun:
    """Writes the failed records of one task.

    Parameters
    ----------
    directory, partition : str, int
        Of the run, and of the task.
    rules : Rules
        By what it is decided which of them wait.
    few : int
        So many may be read again instead.
    number : int
        The micro-batch.
    """

    def __init__(self, directory: str, partition: int, rules: Rules, few: int, number: int) -> None:
        self._directory = os.path.join(directory, "failed")
        self._few = few
        self._number = number
        self._writer = FailedWriter(rules, self._directory, number, f"-{partition}")
        self._roots: list[Int64s] = []
        self._others: list[Int64s] = []

    def write(self, some: SourceRecords, roots: Int64s, failures: list[pa.Table]) -> None:
        """Write those of some records that failed.

        Parameters
        ----------
        some : SourceRecords
            All of which were handed on.
        roots : numpy.ndarray of int64
            Theirs.
        failures : list of pyarrow.Table
            Reasons, of roots of any records, that came up since this was called before.
        """
        reasons = earliest(failures)
        failed: Int64s = reasons["root_id"].to_numpy()
        places = np.flatnonzero(among(roots, failed))
        at = np.searchsorted(failed, roots[places])
        if len(at) < len(failed):
            self._others.append(np.delete(failed, at))
        said = ReasonTexts.of_column(reasons["text"]).taken(at)
        # Such a wait begins when the run has ended, and nobody here knows when that is.
        told = said.after_ms() == 0
        if not told.all():
            said, places = said.taken(np.flatnonzero(told)), places[told]
        if not len(places):
            return
        self._roots.append(roots[places])
        self._writer.write(some, records_at(some, roots, places, self._number), said)

    def finish(self, failures: list[pa.Table]) -> dict[str, Any] | None:
        """Return what was written, None if nothing of it counts.

        Parameters
        ----------
        failures : list of pyarrow.Table
            Reasons that came up since `write` was called.
        """
        if not self._roots:
            return None
        if self._is_void(failures):
            self.discard()
            return None
        return self._writer.finish()

    def discard(self) -> None:
        """Give up what is not in a file yet; after `finish` there is nothing of it."""
        self._writer.discard()

    def _is_void(self, failures: list[pa.Table]) -> bool:
        others = [*self._others, *(one["root_id"].to_numpy() for one in failures)]
        if others and np.isin(np.concatenate(others), np.concatenate(self._roots)).any():
            return True  # it failed once more, perhaps for what goes before the reason written
        return self._writer.rows <= self._few and self._writer.nbytes < _FEW_BYTES

    def others(self, failures: list[pa.Table]) -> list[pa.Table]:
        """Return those of the reasons whose roots were not written."""
        there = np.sort(np.concatenate(self._roots))
        left = (one.filter(pa.array(~among(one["root_id"].to_numpy(), there))) for one in failures)
        return [one for one in left if len(one)]

    def found(self) -> Iterator[pa.Table]:
        """Yield the roots that were written, and their places among those due, by spout."""
        return self._writer.found()
