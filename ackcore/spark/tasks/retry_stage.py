"""The spout stage for records that are due for a retry: reads them from files of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore.spark.base.batches import Batches
from ackcore.spark.base.schemas import ATTEMPT, MESSAGE_ID
from ackcore.spark.tasks.record_ids import RETRIES, SpoutSpec
from ackcore.spark.tasks.row_files import RowFile, partition_in, read_rows, read_whole
from ackcore.spark.tasks.source_records import SourceRecords
from ackcore.spark.tasks.spout_stage import SpoutStage, chunked
from ackcore.spark.tasks.task import Task, attempt_at
from ackcore.topology.tuples import Identity


class Slice(NamedTuple):
    """A part of a spout's due records, or a file of its spilled input."""

    spout: str
    file: RowFile
    first: int
    rows: int
    spilled: bool = False


@dataclass(frozen=True)
class RetryStage(SpoutStage):
    """The mapInArrow function that reads due records; its input is the numbers of slices."""

    slices: tuple[Slice, ...] = ()

    def __call__(self, batches: Batches) -> Batches:
        """Process one partition of slice numbers, for mapInArrow."""
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        records = (one for number in numbers for one in self._slice(self.slices[number]))
        with Task(self.spec, attempt_at(1)) as task:
            yield from self._run(task, records, retried=True)

    def _slice(self, some: Slice) -> Iterator[SourceRecords]:
        source = self.sources[some.spout]
        for one in records_in(source, some):
            identity = None
            if some.spout in self.spec.layout.needs_identity:
                assert one.identity is not None
                message_ids, attempts, _ = one.identity
                identity = Identity(message_ids, attempts, source.stable_ids(message_ids))
            yield one._replace(identity=identity)


def records_in(source: SpoutSpec, part: Slice) -> Iterator[SourceRecords]:
    """Yield the records of a slice in the form that the run got them."""
    if not part.spilled:
        due = read_whole(part.file).slice(part.first, part.rows)
        yield from due_records(source, due, part.first)
        return
    partition, first = partition_in(part.file.path), 0
    for batch in read_rows(part.file):
        yield SourceRecords(source, batch, partition, first)
        first += len(batch)


def due_records(source: SpoutSpec, due: pa.Table, first: int = 0) -> Iterator[SourceRecords]:
    """Yield due records from place ``first`` on, in as few batches as possible.

    Their identities have no stable ids.
    """
    for batch in chunked(due.to_batches(), len(due)):
        message_ids, attempts = batch.column(MESSAGE_ID), batch.column(ATTEMPT).to_numpy()
        identity = Identity(message_ids, attempts, np.empty(0, np.int64))
        rows = source.rows(batch)
        yield SourceRecords(source, rows, RETRIES, first, attempts, identity, message_ids, batch)
        first += len(batch)
