"""Reading records of a run again where they are, and writing those that failed to files.

Where many fail their payloads must not go through the driver.  A task picks the failed ones out of
what it reads, judges them, and writes those that wait and those that are dead to files of their
own, which the checkpoint adopts as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore.spark.base.batches import Batches
from ackcore.spark.base.reason_columns import ReasonTexts
from ackcore.spark.stores.files import read_table_at
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.failed_writer import FailedWriter
from ackcore.spark.tasks.pieces import DealtPieces, read_again
from ackcore.spark.tasks.results import PICKED, TASK_REPORT, result_batch, to_stream
from ackcore.spark.tasks.retry_stage import Slice, due_records
from ackcore.spark.tasks.row_files import ROOT_ID, partition_in, read_rows, read_whole
from ackcore.spark.tasks.source_records import SourceRecords, pick
from ackcore.spark.tasks.spout_stage import SpoutStage, sampled


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
        writer = FailedWriter(self.rules, self.directory, self.stage.spec.number)
        try:
            yield self._result(writer, batches)
        finally:
            writer.discard()

    def _result(self, writer: FailedWriter, batches: Batches) -> pa.RecordBatch:
        failed = read_table_at(self.failed)
        roots, reasons = failed["root_id"].to_numpy(), failed["reason"]

        def take(some: SourceRecords) -> None:
            lost = pick(some, {some.source.name: roots}, {}, self.stage.spec.number)
            if len(lost):
                at = np.searchsorted(roots, lost.column(ROOT_ID).to_numpy())
                writer.write(some, lost, ReasonTexts.of_column(reasons.take(pa.array(at))))

        report: dict[str, Any] = {}
        if self.slices:
            for one in (each for batch in batches for each in batch.column(0).to_pylist()):
                for some in self._records_of(self.slices[one]):
                    take(some)
        else:
            contents: list[tuple[int, dict[str, int]]] = []
            for partition, whole, records in read_again(self.stage, batches, self.pieces):
                content: dict[str, int] = {}
                for some in records:
                    name = some.source.name
                    content[name] = sampled(some.batch, content.get(name, 0))
                    if name not in self.spilled:
                        take(some)
                if whole:
                    contents.append((partition, content))
            report["contents"] = contents
        report |= writer.finish()
        picked = [(PICKED, to_stream(table)) for table in writer.found()]
        return result_batch([*picked, (TASK_REPORT, json.dumps(report).encode())])

    def _records_of(self, part: Slice) -> Iterator[SourceRecords]:
        source = self.stage.sources[part.spout]
        if part.spilled:
            partition, first = partition_in(part.file.path), 0
            for batch in read_rows(part.file):
                yield SourceRecords(source, batch, partition, first)
                first += len(batch)
            return
        due = read_whole(part.file)
        yield from due_records(source, due.slice(part.first, part.rows), part.first)
