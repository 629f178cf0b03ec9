"""Reading the rows of spouts again, for the records that failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ackcore._records import Int64s
from ackcore.spark.base.batches import Batches
from ackcore.spark.tasks.pieces import DealtPieces, read_again
from ackcore.spark.tasks.results import PICKED, TASK_REPORT, result_batch, to_stream
from ackcore.spark.tasks.source_records import pick
from ackcore.spark.tasks.spout_stage import SpoutStage, sampled


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
