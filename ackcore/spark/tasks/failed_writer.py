"""Files of failed records: what waits, sorted by when it is due, and dead letters."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ackcore.arrow import one_batch, rebatched, take_rows
from ackcore.spark.base.checksummed import NamedByChecksum, batches_of, write_batches
from ackcore.spark.base.letters import (
    GROUP_BYTES,
    GROUP_ROWS,
    as_letters,
    letters_writer,
    worth_compressing,
)
from ackcore.spark.base.reason_columns import ReasonTexts
from ackcore.spark.base.schemas import DUE_MS, FIRST_MS, REPLAYED
from ackcore.spark.stores.files import Workshop
from ackcore.spark.tasks.failed_rows import Rules, judge
from ackcore.spark.tasks.row_files import COUNTS, PLACE, ROOT_ID
from ackcore.spark.tasks.source_records import SourceRecords

#: A task writes a file of what waits of one spout when it has so much of it: more than makes a
#: file too large to be merged, and little enough to be in memory that was in use before.
_FILE_BYTES = 1 << 24
#: It becomes one batch of rows before, and of those there may be 2 GiB in a column.
_TOGETHER_BYTES = 1 << 30
#: What is put in order at a time.
_SORTED_BYTES = 1 << 22
#: So much of the dead goes into one file, which is as much as dead letters are merged to.
_LETTERS_BYTES = 1 << 28
#: Of so many records of a spout the driver reads the roots from a file, and does not get them.
_MANY_FOUND = 1 << 14


class FailedFile(NamedTuple):
    """A file of failed records of one spout, in `FailedStage.directory`.

    Those that wait are a table, sorted by when they are due.  The dead are Parquet, as the
    dead-letter store is to have them.
    """

    spout: str
    dead: bool
    name: str
    rows: int
    nbytes: int
    next_due_ms: int
    oldest_ms: int


@dataclass
class _Kept:
    """Rows of a spout that are to be written."""

    tables: list[pa.Table] = field(default_factory=list)
    nbytes: int = 0

    def add(self, rows: pa.Table) -> None:
        """Keep some."""
        self.tables.append(rows)
        self.nbytes += rows.nbytes


class _Letters:
    """A file of dead letters, which is made when there is a row group of them."""

    def __init__(self, spout: str, place: Workshop, name: str, number: int) -> None:
        self._spout = spout
        self._place = place
        self._name = name
        self._number = number
        self._kept = _Kept()
        self._rows = self._nbytes = 0
        self._file: NamedByChecksum | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, rows: pa.Table) -> bool:
        """Take more; return whether that is enough for a file."""
        self._kept.add(rows)
        if self._kept.nbytes >= GROUP_BYTES:
            self._write()
        return self._nbytes >= _LETTERS_BYTES

    def _write(self) -> None:
        kept, self._kept = self._kept, _Kept()
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
        """Write what is left, and give the file its name."""
        self._write()
        assert self._file is not None
        assert self._writer is not None
        with self._file.writing():
            self._writer.close()
        name = self._file.finish()
        nbytes = (self._place.path / name).stat().st_size
        self._place.publish(name)
        return FailedFile(self._spout, True, name, self._rows, nbytes, 0, 0)

    def discard(self) -> None:
        """Leave no file."""
        if self._file is not None and self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()  # or it will do so by itself
            self._file.discard()


class FailedWriter:
    """Judges failed records, and writes them.

    Parameters
    ----------
    rules : Rules
        By what it is decided.
    directory : str
        Where.
    number : int
        The micro-batch.
    suffix : str, optional
        Ends the name of each file, before its checksum.

    Attributes
    ----------
    rows, nbytes : int
        What was given so far.
    """

    def __init__(self, rules: Rules, directory: str, number: int, suffix: str = "") -> None:
        self.rows = self.nbytes = 0
        self._rules = rules
        self._number = number
        self._suffix = suffix
        self._place = Workshop(directory)
        self._waiting: dict[str, _Kept] = {}
        self._dead: dict[str, _Letters] = {}
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
        found = lost.select([ROOT_ID, PLACE]).append_column(COUNTS, pa.array(reasons.counts()))
        self._found.setdefault(spout, []).append(found)
        if len(waits):
            kept = self._waiting.get(spout)
            if kept is not None and kept.nbytes + waits.nbytes > _TOGETHER_BYTES:
                self._write_waiting(spout)
            kept = self._waiting.setdefault(spout, _Kept())
            kept.add(waits)
            if kept.nbytes >= _FILE_BYTES:
                self._write_waiting(spout)
        if len(dies):
            if spout not in self._dead:
                name = f"dead-{spout}{self._suffix}"
                self._dead[spout] = _Letters(spout, self._place, name, self._number)
            if self._dead[spout].add(dies):
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

    def finish(self) -> dict[str, Any]:
        """Write what is left; return what was written, and what the books need of it."""
        for spout in list(self._waiting):
            self._write_waiting(spout)
        self._files += [letters.finish() for letters in self._dead.values()]
        self._dead.clear()
        found = self._write_found()
        self._place.close()
        return {
            "files": self._files,
            "found": found,
            "uncounted": self._uncounted,
            "replayed": self._replayed,
        }

    def _write_found(self) -> list[tuple[str, str]]:
        """Write what is told of the roots of spouts that have many; return the files by spout."""
        many = [name for name, some in self._found.items() if sum(map(len, some)) >= _MANY_FOUND]
        files = []
        for spout in many:
            rows = _by_root(_together(self._found.pop(spout)))
            name = f"found-{spout}{self._suffix}"
            file = write_batches(
                self._place.path, name, rows.schema, batches_of(rows), large=True, synced=False
            )
            self._place.publish(file)
            files.append((spout, file))
        return files

    def discard(self) -> None:
        """Give up what is not in a file yet."""
        for letters in self._dead.values():
            letters.discard()
        self._dead.clear()
        self._place.close()

    def found(self) -> Iterator[pa.Table]:
        """Yield the roots that were found, their places among those due, and which count, by spout.

        Where none of them was due, the places are of type null, which takes no room.  After
        `finish` there are only those of spouts that have few: it says where the others are.
        """
        for spout, tables in self._found.items():
            yield _together(tables).replace_schema_metadata({"spout": spout})


def _together(found: list[pa.Table]) -> pa.Table:
    whole = pa.concat_tables(found).combine_chunks()
    if whole[PLACE].null_count == len(whole):
        whole = whole.set_column(1, PLACE, pa.nulls(len(whole)))
    return whole


def _by_root(found: pa.Table) -> pa.Table:
    """Return what is told of roots in the order of these, by which the driver puts it together."""
    roots, counts = found[ROOT_ID].to_numpy(), found[COUNTS]
    if pa.types.is_null(found[PLACE].type) and len(counts.unique()) < 2:
        # All of an outage is alike but for its roots.
        return found.set_column(0, ROOT_ID, pa.array(np.sort(roots)))
    return found.take(pa.array(np.argsort(roots)))


def _by_due(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Yield rows sorted by when they are due, so few at a time that one memory serves them all.

    They are one batch before: to pick each piece out of several, and then to put it in order, costs
    twice as much.
    """
    order = np.argsort(rows[DUE_MS].to_numpy(), kind="stable")
    whole = one_batch(rows.to_batches())
    for part in np.array_split(order, min(len(order), -(-rows.nbytes // _SORTED_BYTES))):
        yield take_rows(whole, part)
