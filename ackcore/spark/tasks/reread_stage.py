"""Reading the rows of spouts again, for the records that failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.batches import Batches
from ackcore.spark.tasks.failed_rows import READ_AGAIN
from ackcore.spark.tasks.pieces import DealtPieces, read_again
from ackcore.spark.tasks.record_ids import stamps
from ackcore.spark.tasks.results import PICKED, TASK_REPORT, result_batch, to_stream
from ackcore.spark.tasks.row_files import among
from ackcore.spark.tasks.spout_stage import SourceRecords, SpoutStage, sampled


@dataclass(frozen=True)
class RereadStage:
    """Reads the rows of spouts again and returns those of some roots, or of repeated claims.

    Parameters
    ----------
    roots, claims : mapping from str to numpy.ndarray of int64
        By spout, sorted.
    pieces : DealtPieces, optional
        What is read; by default all rows of a partition.
    """

    stage: SpoutStage
    roots: Mapping[str, Int64s]
    claims: Mapping[str, Int64s]
    pieces: DealtPieces | None = None

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        for partition, whole, records in read_again(self.stage, batches, self.pieces):
            content: dict[str, int] = {}
            for some in records:
                name = some.source.name
                content[name] = sampled(some.batch, content.get(name, 0))
                rows = pick(some, self.roots, self.claims, self.stage.spec.number)
                if len(rows):
                    yield result_batch([(PICKED, to_stream(rows))])
            if whole:
                report = {"partition": partition, "content": content}
                yield result_batch([(TASK_REPORT, json.dumps(report).encode())])


def pick(
    some: SourceRecords, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s], number: int
) -> pa.RecordBatch:
    """Return the records of these roots, or of these claims, with what is known of them.

    The spout's name goes along in the metadata of the schema.
    """
    source = some.source
    ids = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    wanted = among(ids, roots.get(source.name, np.empty(0, np.int64)))
    repeated = claims.get(source.name)
    if repeated is not None:
        wanted |= among(source.claim_ids(some.batch), repeated)
    places = np.flatnonzero(wanted)
    at = pa.array(places)
    rows = some.batch.take(at)
    if some.identity is not None:
        due_places = pa.array(places + some.first)
        message_ids = some.identity.message_ids.take(at)
        attempts = np.asarray(some.attempts, np.int32)[places]
    else:
        due_places = pa.nulls(len(places), pa.int64())
        message_ids = _some_message_ids(some, places, number)
        attempts = source.first_attempts(rows)
    columns = [
        pa.array(ids[places]),
        due_places,
        message_ids,
        pa.array(attempts),
        *rows.columns,
    ]
    schema = pa.schema([*READ_AGAIN, *source.schema])
    schema = schema.with_metadata({"spout": source.name})
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _some_message_ids(some: SourceRecords, places: Int64s, number: int) -> pa.Array:
    if some.source.message_id:
        rows = some.batch.take(pa.array(places))
        return some.source.message_ids(rows, number, some.partition, 0)
    return stamps(number, some.partition, places + some.first)
