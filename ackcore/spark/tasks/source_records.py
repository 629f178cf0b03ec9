"""The records that stages read from a source, and the selection of some that are read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._arrow import take_rows
from ackcore._records import Int64s
from ackcore.spark.tasks.failed_rows import READ_AGAIN
from ackcore.spark.tasks.record_ids import RETRIES, SpoutSpec, stamps
from ackcore.spark.tasks.row_files import among
from ackcore.topology.tuples import Identity


class SourceRecords(NamedTuple):
    """Consecutive records of one spout, from place ``first`` of a partition on."""

    source: SpoutSpec
    batch: pa.RecordBatch
    partition: int
    first: int
    attempts: Any = 0
    identity: Identity | None = None
    #: The message ids of due records, stored since their first attempt; None for new records.
    message_ids: pa.Array | None = None
    #: The stored rows of due records, in `TRACKING` and the source's columns.
    due: pa.RecordBatch | None = None


def pick(
    some: SourceRecords, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s], number: int
) -> pa.RecordBatch:
    """Return the records with the given roots, and the new ones with the given claim ids.

    A claim id is the hash of a message id; see `record_ids`. The result is that of `records_at`.
    """
    source = some.source
    ids = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    wanted = among(ids, roots.get(source.name, np.empty(0, np.int64)))
    repeated = claims.get(source.name)
    if repeated is not None and some.partition != RETRIES:
        wanted |= among(source.claim_ids(some.batch), repeated)
    return records_at(some, ids, np.flatnonzero(wanted), number)


def records_at(some: SourceRecords, ids: Int64s, places: Int64s, number: int) -> pa.RecordBatch:
    """Return some of the records in the columns of `READ_AGAIN` and of the source.

    ``ids``: the roots of all of the records. ``places``: the places in the batch of the records to
    return, sorted. ``number``: the number of the micro-batch.

    The metadata of the result's schema has the spout's name.
    """
    source = some.source
    whole = len(places) == len(some.batch)
    rows = some.batch if whole else take_rows(some.batch, places)
    if some.message_ids is not None:
        due_places = pa.array(places + some.first)
        names = some.message_ids
        message_ids = names if whole else names.take(pa.array(places))
        attempts = np.asarray(some.attempts, np.int32)[places]
    else:
        due_places = pa.nulls(len(places), pa.int64())
        if source.message_id:
            message_ids = source.message_ids(rows, number, some.partition, 0)
        else:
            message_ids = stamps(number, some.partition, places + some.first)
        attempts = np.zeros(len(rows), np.int32)
    columns = [pa.array(ids[places]), due_places, message_ids, pa.array(attempts), *rows.columns]
    schema = pa.schema([*READ_AGAIN, *source.schema])
    schema = schema.with_metadata({"spout": source.name})
    return pa.RecordBatch.from_arrays(columns, schema=schema)
