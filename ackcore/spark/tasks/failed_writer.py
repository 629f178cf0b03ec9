"""Files of failed records: what waits, sorted by when it is due, and what is dead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore.arrow import rebatched, take_rows
from ackcore.spark.base.checksummed import write_batches
from ackcore.spark.base.reason_columns import ReasonTexts
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, REPLAYED
from ackcore.spark.tasks.failed_rows import Rules, judge
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID
from ackcore.spark.tasks.source_records import SourceRecords

#: A task writes a file of what waits, or is dead, of one spout when it has so much of it: more than
#: makes a file too large to be merged, and no more than it takes, since the driver maps the dead.
_FILE_BYTES = 5 << 23
#: What is in one batch of it.
_ROWS, _BYTES = 1 << 16, 1 << 25
#: What is put in order at a time.
_SORTED_BYTES = 1 << 22


class FailedFile(NamedTuple):
    """A file of failed records of one spout, in `FailedStage.directory`.

    Those that wait are sorted by when they are due.
    """

    spout: str
    dead: bool
    name: str
    rows: int
    next_due_ms: int
    oldest_ms: int


@dataclass
class _Kept:
    """Rows of a spout that are to be written."""

    tables: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0


class FailedWriter:
    """Judges failed records, and writes them.

    Parameters
    ----------
    rules : Rules
        By what it is decided.
    directory : str
        Where.
    suffix : str, optional
        Ends the name of each file, before its checksum.

    Attributes
    ----------
    rows, nbytes : int
        What was given so far.
    """

    def __init__(self, rules: Rules, directory: str, suffix: str = "") -> None:
        self.rows = self.nbytes = 0
        self._rules = rules
        self._suffix = suffix
        self._directory = Path(directory)
        self._kept: dict[tuple[str, bool], _Kept] = {}
        self._files: list[FailedFile] = []
        self._found: dict[str, list[pa.Table]] = {}
        self._uncounted = 0
        self._replayed = Counter[str]()

    def write(self, some: SourceRecords, failed: pa.RecordBatch, reasons: ReasonTexts) -> None:
        """Judge records, and keep them until a file is full.

        Parameters
        ----------
        some : SourceRecords
            Records among which they are.
        failed : pyarrow.RecordBatch
            Those that failed, as `records_at` returns them.
        reasons : ReasonTexts
            Why each failed.
        """
        spout, lost = some.source.name, pa.Table.from_batches([failed])
        n = len(lost)
        self.rows += n
        self.nbytes += lost.nbytes
        first_ms, replayed = np.full(n, self._rules.now_ms), np.zeros(n, np.int32)
        if some.due is not None:
            places = lost[PLACE].to_numpy() - some.first
            first_ms = some.due.column(FIRST_MS).to_numpy()[places]
            replayed = some.due.column(REPLAYED).to_numpy()[places]
        waits, dies, uncounted = judge(self._rules, lost, reasons, first_ms, replayed)
        self._uncounted += uncounted
        self._replayed[spout] += int(np.count_nonzero(replayed))
        self._found.setdefault(spout, []).append(lost.select([ROOT_ID, PLACE]))
        for dead, rows in ((False, waits), (True, dies)):
            if not len(rows):
                continue
            kept = self._kept.setdefault((spout, dead), _Kept())
            kept.tables.append(rows)
            kept.nbytes += rows.nbytes
            if kept.nbytes >= _FILE_BYTES:
                self._write(spout, dead)

    def _write(self, spout: str, dead: bool) -> None:
        rows = pa.concat_tables(self._kept.pop((spout, dead)).tables)
        batches = rebatched(rows.to_batches(), _ROWS, _BYTES)
        if not dead:
            batches = _by_due(rows)
        kind = "dead" if dead else "waiting"
        name = f"{kind}-{spout}{self._suffix}"
        file = write_batches(self._directory, name, rows.schema, batches, large=True)
        first = 0 if dead else pc.min(rows[DUE_MS]).as_py()
        oldest = pc.min(rows[FIRST_MS]).as_py()
        self._files.append(FailedFile(spout, dead, file, len(rows), first, oldest))

    def finish(self) -> dict[str, Any]:
        """Write what is left; return what was written, and what the books need of it."""
        for spout, dead in list(self._kept):
            self._write(spout, dead)
        return {"files": self._files, "uncounted": self._uncounted, "replayed": self._replayed}

    def found(self) -> Iterator[pa.Table]:
        """Yield the roots that were found, and their places among those due, by spout."""
        for spout, tables in self._found.items():
            whole = pa.concat_tables(tables).combine_chunks()
            yield whole.replace_schema_metadata({"spout": spout})


def _by_due(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield rows sorted by when they are due, so few at a time that one memory serves them all.

    To sort them as a whole would take as much memory again, twice: memory that a worker has not
    used before costs it more than what is done with it.
    """
    order = np.argsort(rows[DUE_MS].to_numpy(), kind="stable")
    batches = rows.to_batches()
    starts = np.cumsum([0, *map(len, batches)])
    for part in np.array_split(order, min(len(order), -(-rows.nbytes // _SORTED_BYTES))):
        owners = np.searchsorted(starts, part, "right") - 1
        found = [
            take_rows(batch, part[owners == n] - starts[n])
            for n, batch in enumerate(batches)
            if (owners == n).any()
        ]
        place = np.empty(len(part), np.int64)
        place[np.argsort(owners, kind="stable")] = np.arange(len(part))
        yield take_rows(pa.concat_batches(found), place)
