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
        #: Reasons of roots that are all written.
        self._written: list[pa.Table] = []

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
        places, said = self._said(roots, failures)
        # Such a wait begins when the run has ended, and nobody here knows when that is.
        told = said.after_ms() == 0
        if told.all():
            if len(places) == sum(map(len, failures)):
                self._written += failures
        else:
            said, places = said.taken(np.flatnonzero(told)), places[told]
        if not len(places):
            return
        self._roots.append(roots[places])
        self._writer.write(some, records_at(some, roots, places, self._number), said)

    def _said(self, roots: Int64s, failures: list[pa.Table]) -> tuple[Int64s, ReasonTexts]:
        """Return the places of the roots that failed, and why; keep which others there are."""
        if len(failures) == 1 and np.array_equal(failures[0]["root_id"].to_numpy(), roots):
            # All of an outage, each once, and as they came: nothing is to be looked for.
            return np.arange(len(roots)), ReasonTexts.of_column(failures[0]["text"])
        reasons = earliest(failures)
        failed: Int64s = reasons["root_id"].to_numpy()
        places = np.flatnonzero(among(roots, failed))
        at = np.searchsorted(failed, roots[places])
        if len(at) < len(failed):
            self._others.append(np.delete(failed, at))
        return places, ReasonTexts.of_column(reasons["text"]).taken(at)

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
        written = {id(one) for one in self._written}
        failures = [one for one in failures if id(one) not in written]
        if not failures:
            return []
        there = np.sort(np.concatenate(self._roots))
        left = (one.filter(pa.array(~among(one["root_id"].to_numpy(), there))) for one in failures)
        return [one for one in left if len(one)]

    def found(self) -> Iterator[pa.Table]:
        """Yield what is told of the roots that were written, as `FailedWriter.found`."""
        return self._writer.found()
