"""The judgement of failed records in a task, and the files of the run that hold them.

Up to `Rules.inline_bytes` of records (by default `INLINE_BYTES`) go to the driver with
the task's report.  Beyond that the task writes files, which the decision adopts: waiting records
sorted by due time, and dead letters.

`FailedInRun` judges the records that fail while their task still holds them, which are most of
them.  These need not be read again.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ackcore._arrow.record_batches import one_batch, rebatched, take_rows
from ackcore._records import Int64s
from ackcore.spark.base.checksummed import NamedByChecksum, batches_of, write_batches
from ackcore.spark.base.letter_columns import (
    GROUP_BYTES,
    GROUP_ROWS,
    as_letters,
    letters_writer,
    worth_compressing,
)
from ackcore.spark.base.reasons import Reasons, first_reasons
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, FailedFile
from ackcore.spark.stores.run_files import StagingDirectory
from ackcore.spark.tasks.failed_rows import Rules, judge
from ackcore.spark.tasks.record_ids import SourceRecords, positions_of, records_at
from ackcore.spark.tasks.row_files import COUNTS, PLACE, ROOT_ID, among

#: Bytes of one spout's waiting records for which a task writes a file: too large a file to be
#: merged later, and small enough for memory that the task has used before.
_FILE_BYTES = 1 << 24
#: Bytes that are sorted at a time.
_SORTED_BYTES = 1 << 22
#: Bytes of dead letters in one file, the size to which dead letters are merged.
_LETTERS_BYTES = 1 << 28


@dataclass
class _Kept:
    """Rows of a spout that are not written yet."""

    tables: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0

    def add(self, rows: pa.Table) -> None:
        self.tables.append(rows)
        self.nbytes += rows.nbytes


@dataclass(eq=False, repr=False)
class _Letters:
    """A file of dead letters, created with its first full row group, or in `finish`."""

    _spout: str
    _place: StagingDirectory
    _name: str
    _number: int
    kept: _Kept = field(default_factory=_Kept)  # the rows that are in no file yet
    _rows: int = 0
    _nbytes: int = 0
    _file: NamedByChecksum | None = None
    _writer: pq.ParquetWriter | None = None

    def write(self) -> bool:
        """Write kept rows if they fill a row group; return whether the file has its full size."""
        if self.kept.nbytes >= GROUP_BYTES:
            self._write()
        return self._nbytes >= _LETTERS_BYTES

    def _write(self) -> None:
        kept, self.kept = self.kept, _Kept()
        self._nbytes += kept.nbytes
        batches = (batch for table in kept.tables for batch in table.to_batches())
        for batch in rebatched(batches, GROUP_ROWS, GROUP_BYTES, copied=False):
            letters = as_letters(pa.Table.from_batches([batch]), self._number)
            self._rows += len(letters)
            if self._file is None or self._writer is None:
                self._file = NamedByChecksum(self._place.path, self._name, "parquet", large=True)
                compressed = worth_compressing(letters)
                self._writer = letters_writer(
                    self._file.sink, letters.schema, compressed=compressed
                )
            with self._file.writing():
                self._writer.write_table(letters)

    def finish(self) -> FailedFile:
        """Write the remaining rows, publish the file under its name, and return its description."""
        self._write()
        assert self._file is not None
        assert self._writer is not None
        with self._file.writing():
            self._writer.close()
        name = self._file.finish()
        nbytes = (self._place.path / name).stat().st_size
        self._place.publish(name)
        return FailedFile(self._spout, True, name, self._rows, nbytes)

    def discard(self) -> None:
        """Delete the unfinished file, if there is one."""
        if self._file is not None and self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()  # or its finalizer closes it
            self._file.discard()


class FailedWriter:
    """A writer that decides whether failed records wait or are dead, and keeps or writes them.

    ``directory``: the directory for files. ``number``: the number of the micro-batch, for dead
    letters. ``suffix``: the end of each file's name, before its checksum.
    """

    def __init__(self, rules: Rules, directory: str, number: int, suffix: str = "") -> None:
        self._rules = rules
        self._number = number
        self._suffix = suffix
        self._nbytes = 0
        self._place = StagingDirectory(directory)
        self._waiting: dict[str, _Kept] = {}
        self._dead: dict[str, _Letters] = {}
        self._files: list[FailedFile] = []
        self._found: dict[str, list[pa.Table]] = {}
        self._uncounted = 0
        self._replayed = Counter[str]()

    @property
    def _in_files(self) -> bool:
        return self._nbytes > self._rules.inline_bytes

    def write(self, some: SourceRecords, failed: pa.RecordBatch, reasons: Reasons) -> None:
        """Decide for each record whether it waits or is dead, and keep it; write files once full.

        ``some``: the records that include the failed ones. ``failed``: the failed records, as
        `records_at` returns them. ``reasons``: the reason of each.
        """
        spout, lost = some.source.name, pa.Table.from_batches([failed])
        self._nbytes += lost.nbytes
        waits, dies, uncounted, replayed = judge(self._rules, some, lost, reasons)
        self._uncounted += uncounted
        self._replayed[spout] += replayed
        found = lost.select([ROOT_ID, PLACE]).append_column(COUNTS, pa.array(reasons.counts()))
        self._found.setdefault(spout, []).append(found)
        if len(waits):
            kept = self._waiting.setdefault(spout, _Kept())
            kept.add(waits)
            if self._in_files and kept.nbytes >= _FILE_BYTES:
                self._write_waiting(spout)
        if len(dies):
            if spout not in self._dead:
                name = f"dead-{spout}{self._suffix}"
                self._dead[spout] = _Letters(spout, self._place, name, self._number)
            self._dead[spout].kept.add(dies)
            if self._in_files and self._dead[spout].write():
                self._files.append(self._dead.pop(spout).finish())

    def _write_waiting(self, spout: str) -> None:
        rows = pa.concat_tables(self._waiting.pop(spout).tables)
        name = f"waiting-{spout}{self._suffix}"
        place = self._place.path
        file = write_batches(place, name, rows.schema, _by_due(rows), large=True)
        nbytes = (place / file).stat().st_size
        self._place.publish(file)
        first, oldest = (pc.min(rows[column]).as_py() for column in (DUE_MS, FIRST_MS))
        self._files.append(FailedFile(spout, False, file, len(rows), nbytes, first, oldest))

    def finish(self) -> tuple[dict[str, Any], list[pa.Table]]:
        """Write the remaining records to files, if there are more than `Rules.inline_bytes` in all.

        Returns the report, JSON-serializable, and the tables that go to the driver with it.
        `FailedRows.of` takes both.
        """
        inline: list[tuple[str, str, pa.Table]] = []
        if self._in_files:
            for spout in list(self._waiting):
                self._write_waiting(spout)
            self._files += [letters.finish() for letters in self._dead.values()]
        else:
            for spout, kept in self._waiting.items():
                inline.append(("waits", spout, pa.concat_tables(kept.tables)))
            for spout, letters in self._dead.items():
                inline.append(("dies", spout, pa.concat_tables(letters.kept.tables)))
        self._dead.clear()
        files = []
        for spout, some in self._found.items():
            found = _together(some)
            if self._in_files and found.nbytes > self._rules.inline_bytes:
                # The driver merges sorted columns faster than it sorts others.
                files.append((spout, self._write_found(spout, _by_root(found))))
            else:
                inline.append(("found", spout, found))
        self._place.close()
        report = {
            "files": [astuple(file) for file in self._files],
            "found": files,
            "uncounted": self._uncounted,
            "replayed": self._replayed,
        }
        return report, [
            rows.replace_schema_metadata({"part": part, "spout": spout})
            for part, spout, rows in inline
        ]

    def _write_found(self, spout: str, rows: pa.Table) -> str:
        name, batches = f"found-{spout}{self._suffix}", batches_of(rows)
        place = self._place.path
        file = write_batches(place, name, rows.schema, batches, large=True, synced=False)
        self._place.publish(file)
        return file

    def discard(self) -> None:
        """Discard the records that are in no finished file, and delete unfinished files."""
        for letters in self._dead.values():
            letters.discard()
        self._dead.clear()
        self._place.close()


class FailedInRun:
    """A judge of records that fail while their task still has their rows.

    They need not be read again.  The task calls `write` once all rows of a chunk were processed;
    records that fail later are read again.  If another task may have failed them for another
    reason, the settle stage looks for that, and then the driver drops all these judgements.

    ``directory``, ``name``: the run's directory, and the end of the names of this judge's files.
    ``number``: the number of the micro-batch.
    """

    def __init__(self, directory: str, name: str, rules: Rules, number: int) -> None:
        self._number = number
        self._writer = FailedWriter(rules, os.path.join(directory, "failed"), number, f"-{name}")
        self._roots: list[Int64s] = []
        self._others: list[Int64s] = []
        #: Tables of reasons whose roots are all judged.
        self._judged: list[pa.Table] = []

    def write(self, some: SourceRecords, roots: Int64s, failures: list[pa.Table]) -> None:
        """Judge the failed records of a chunk, except those whose reason requests a wait.

        These are read again, and judged after the run.
        ``some``: the records, all of them processed. ``roots``: the roots of the records.
        ``failures``: the reasons that arose since the last call, for roots of any records.
        """
        places, reasons = self._reasons_of(some, roots, failures)
        # A wait that a reason requests begins at the run's end, which is unknown in the task.
        known = reasons.after_ms() == 0
        if known.all():
            if len(places) == sum(map(len, failures)):
                self._judged += failures
        else:
            reasons, places = reasons.taken(np.flatnonzero(known)), places[known]
        if not len(places):
            return
        self._roots.append(roots[places])
        self._writer.write(some, records_at(some, roots, places, self._number), reasons)

    def _reasons_of(
        self, some: SourceRecords, roots: Int64s, failures: list[pa.Table]
    ) -> tuple[Int64s, Reasons]:
        """Return the row numbers of the chunk's failed records, and the first reason of each.

        The roots in ``failures`` that are not of this chunk are kept in ``_others``.
        """
        if len(failures) == 1 and np.array_equal(failures[0]["root_id"].to_numpy(), roots):
            # All records failed once and in order, as in an outage: no look-up is needed.
            return np.arange(len(roots)), Reasons.of_texts(failures[0]["text"])
        reasons = first_reasons(failures)
        failed: Int64s = reasons["root_id"].to_numpy()
        # A root has its position: few of them are found without a search among all records.
        partitions, places = positions_of(some.source.key, failed)
        places -= some.first
        here = (partitions == some.partition) & (places >= 0) & (places < len(roots))
        here[here] = roots[places[here]] == failed[here]
        if not here.all():
            self._others.append(failed[~here])
        at = np.flatnonzero(here)
        at = at[np.argsort(places[at])]
        return places[at], Reasons.of_texts(reasons["text"]).taken(at)

    def finish(self, failures: list[pa.Table]) -> tuple[dict[str, Any], list[pa.Table]] | None:
        """Return the result of `FailedWriter.finish`; None if no record was judged.

        Also None if a judged record failed once more: all failed records are then read again.

        ``failures``: the reasons that arose since the last `write`.
        """
        if not self._roots:
            return None
        others = [*self._others, *(one["root_id"].to_numpy() for one in failures)]
        if others and np.isin(np.concatenate(others), np.concatenate(self._roots)).any():
            # A record failed once more, perhaps for a reason that precedes the one judged.
            self.discard()
            return None
        return self._writer.finish()

    def discard(self) -> None:
        """Discard the records that are in no finished file; do nothing after `finish`."""
        self._writer.discard()

    def unjudged(self, failures: list[pa.Table]) -> list[pa.Table]:
        """Return the failures of roots that were not judged."""
        judged = {id(one) for one in self._judged}
        failures = [one for one in failures if id(one) not in judged]
        if not failures:
            return []
        there = np.sort(np.concatenate(self._roots))
        left = (one.filter(pa.array(~among(one["root_id"].to_numpy(), there))) for one in failures)
        return [one for one in left if len(one)]


def _together(found: list[pa.Table]) -> pa.Table:
    whole = pa.concat_tables(found).combine_chunks()
    # If no record was due, row numbers of type null take no memory.
    if whole[PLACE].null_count == len(whole):
        whole = whole.set_column(1, PLACE, pa.nulls(len(whole)))
    return whole


def _by_root(found: pa.Table) -> pa.Table:
    """Return the rows sorted by root, the order in which the driver merges them."""
    roots, counts = found[ROOT_ID].to_numpy(), found[COUNTS]
    if pa.types.is_null(found[PLACE].type) and len(counts.unique()) < 2:
        # In an outage, rows differ in their roots alone.
        return found.set_column(0, ROOT_ID, pa.array(np.sort(roots)))
    return found.take(pa.array(np.argsort(roots)))


def _by_due(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield rows sorted by due time, in small batches that can reuse the same memory."""
    order = np.argsort(rows[DUE_MS].to_numpy(), kind="stable")
    # First one batch: to take rows from several and then sort costs twice as much.
    whole = one_batch(rows.to_batches())
    for part in np.array_split(order, min(len(order), -(-rows.nbytes // _SORTED_BYTES))):
        yield take_rows(whole, part)
