"""Reading records of a run again where they are, and writing those that failed to files.

Where many fail their payloads must not go through the driver.  A task picks the failed ones out of
what it reads, judges them, and writes those that wait and those that are dead to files of their
own, which the checkpoint adopts as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._records import Int64s
from ackcore.arrow import rebatched
from ackcore.spark.base.batches import Batches
from ackcore.spark.base.checksummed import read_table, write_batches
from ackcore.spark.base.reason_columns import ReasonTexts
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, REPLAYED
from ackcore.spark.tasks.failed_rows import Rules, judge
from ackcore.spark.tasks.pieces import DealtPieces, read_again
from ackcore.spark.tasks.reread_stage import pick
from ackcore.spark.tasks.results import PICKED, TASK_REPORT, result_batch, to_stream
from ackcore.spark.tasks.retry_stage import Slice, due_records
from ackcore.spark.tasks.row_files import PLACE, ROOT_ID, partition_in, read_rows, read_whole
from ackcore.spark.tasks.spout_stage import SourceRecords, SpoutStage, sampled

#: A task writes a file of what waits, or is dead, of one spout when it has so much of it.
_FILE_BYTES = 1 << 26
#: What is in one batch of it.
_ROWS, _BYTES = 1 << 16, 1 << 25


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


@dataclass(frozen=True)
class FailedStage:
    """Reads what a run has read, and writes what failed of it.

    What it maps are rows of a source, or, with ``slices`` or ``pieces``, their numbers.

    Parameters
    ----------
    stage : SpoutStage
        Reads the rows of sources.
    rules : Rules
        By what it is decided.
    failed : str
        The file of the roots that failed, sorted, and why.
    directory : str
        Where files are written.
    spilled : frozenset of str
        Spouts that are read from files, and not from their sources.
    slices : tuple of Slice
        Parts of files: records that were due, or were spilled.
    pieces : DealtPieces, optional
        What is read of a source; by default all rows of a partition.
    """

    stage: SpoutStage
    rules: Rules
    failed: str
    directory: str
    spilled: frozenset[str] = frozenset()
    slices: tuple[Slice, ...] = ()
    pieces: DealtPieces | None = None

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        writer = FailedWriter(self.rules, read_table(Path(self.failed)), self.directory)
        number = self.stage.spec.number
        report: dict[str, Any] = {}
        if self.slices:
            for one in (each for batch in batches for each in batch.column(0).to_pylist()):
                for some, due in self._records_of(self.slices[one]):
                    writer.take(some, number, due)
        else:
            contents: list[tuple[int, dict[str, int]]] = []
            for partition, whole, records in read_again(self.stage, batches, self.pieces):
                content: dict[str, int] = {}
                for some in records:
                    name = some.source.name
                    content[name] = sampled(some.batch, content.get(name, 0))
                    if name not in self.spilled:
                        writer.take(some, number)
                if whole:
                    contents.append((partition, content))
            report["contents"] = contents
        report |= writer.finish()
        picked = [(PICKED, to_stream(table)) for table in writer.found()]
        yield result_batch([*picked, (TASK_REPORT, json.dumps(report).encode())])

    def _records_of(self, part: Slice) -> Iterator[tuple[SourceRecords, pa.Table | None]]:
        source = self.stage.sources[part.spout]
        if part.spilled:
            partition, first = partition_in(part.file.path), 0
            for batch in read_rows(part.file):
                yield SourceRecords(source, batch, partition, first), None
                first += len(batch)
            return
        due = read_whole(part.file)
        for some in due_records(source, due.slice(part.first, part.rows), part.first):
            yield some, due


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
    failed : pyarrow.Table
        The roots that failed, sorted, and why.
    directory : str
        Where; it exists.
    """

    def __init__(self, rules: Rules, failed: pa.Table, directory: str) -> None:
        self._rules = rules
        self._roots: Int64s = failed["root_id"].to_numpy()
        self._reasons = failed["reason"]
        self._directory = Path(directory)
        self._kept: dict[tuple[str, bool], _Kept] = {}
        self._files: list[FailedFile] = []
        self._found: dict[str, list[pa.Table]] = {}
        self._uncounted = 0
        self._replayed = Counter[str]()

    def take(self, some: SourceRecords, number: int, due: pa.Table | None = None) -> None:
        """Pick the failed ones out of records; ``due`` is the whole table that they are from."""
        spout = some.source.name
        lost = pa.Table.from_batches([pick(some, {spout: self._roots}, {}, number)])
        if not len(lost):
            return
        n = len(lost)
        first_ms, replayed = np.full(n, self._rules.now_ms), np.zeros(n, np.int32)
        if due is not None:
            place = lost[PLACE].to_numpy()
            first_ms = due[FIRST_MS].to_numpy()[place]
            replayed = due[REPLAYED].to_numpy()[place]
        at = np.searchsorted(self._roots, lost[ROOT_ID].to_numpy())
        reasons = ReasonTexts.of_column(self._reasons.take(pa.array(at)))
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
        if not dead:
            order = np.argsort(rows[DUE_MS].to_numpy(), kind="stable")
            rows = rows.combine_chunks().take(pa.array(order))
        kind = "dead" if dead else "waiting"
        batches = rebatched(rows.to_batches(), _ROWS, _BYTES)
        name = f"{kind}-{spout}"
        file = write_batches(self._directory, name, rows.schema, batches, large=True)
        first = 0 if dead else rows[DUE_MS][0].as_py()
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
