"""Reading the rows of spouts again, for the records that have some keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.spark.base.batches import Batches
from ackcore.spark.tasks.results import PICKED, TASK_REPORT, result_batch, to_stream
from ackcore.spark.tasks.source_records import SourceRecords
from ackcore.spark.tasks.spout_stage import SpoutStage, sampled
from ackcore.spark.tasks.task import attempt_at

#: A record, and the hash of its key.
KEYED = pa.schema([("root_id", pa.int64()), ("key", pa.int64())])


@dataclass(frozen=True)
class KeyStage:
    """Reads the rows of spouts again and returns which have keys of some hashes.

    Parameters
    ----------
    keys : mapping from str to numpy.ndarray of int64
        By spout, sorted.
    """

    stage: SpoutStage
    keys: Mapping[str, Int64s]

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        partition = attempt_at(1).partition
        content: dict[str, int] = {}
        for some in self.stage.records(batches, partition):
            name = some.source.name
            content[name] = sampled(some.batch, content.get(name, 0))
            rows = keyed(some, self.keys)
            if len(rows):
                yield result_batch([(PICKED, to_stream(rows))])
        report = {"partition": partition, "content": content}
        yield result_batch([(TASK_REPORT, json.dumps(report).encode())])


def keyed(some: SourceRecords, keys: Mapping[str, Int64s]) -> pa.RecordBatch:
    """Return the records that have these keys; the spout's name is in the schema's metadata."""
    source = some.source
    hashes, ordered = source.key_hashes(some.batch)
    wanted = ordered & np.isin(hashes, keys.get(source.name, np.empty(0, np.int64)))
    roots = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    columns = [pa.array(roots[wanted]), pa.array(hashes[wanted])]
    schema = KEYED.with_metadata({"spout": source.name})
    return pa.RecordBatch.from_arrays(columns, schema=schema)
