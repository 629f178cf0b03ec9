"""The stages behind an exchange: run the bolts of a level on what the stages before have sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ackcore import ACK
from ackcore.arrow import one_batch
from ackcore.spark.settle.packing import Batches
from ackcore.spark.tasks.exchange import SEEN, SETTLE, Inbox, TupleBlob, joined_runs, origin_of
from ackcore.spark.tasks.spec import IDENTITY_FIELDS, TaskSpec
from ackcore.spark.tasks.task import Task, attempt_at
from ackcore.spark.tasks.tracking import AnchoredRows, Owners
from ackcore.topology.stage_layout import Edge
from ackcore.topology.tuples import Identity

#: Blobs of a chunk: some 64 Ki short rows, or a few long ones.
_CHUNK_BYTES = 1 << 20
#: What no blob makes a chunk larger than, unless it is by itself.
_MOST_CHUNK_BYTES = 1 << 28


@dataclass(frozen=True)
class NextStage:
    """Runs the bolts of one level on what was sent to it."""

    spec: TaskSpec
    level: int

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow: rows of the exchange before it."""
        with Task(self.spec, attempt_at(self.level)) as task:
            yield from self._run(task, batches)

    def _run(self, task: Task, batches: Batches) -> Batches:
        inbox = Inbox(self.level)
        for batch in batches:
            passed = inbox.read(batch)
            if passed is not None:
                yield passed
        inbox.check()
        edges = {edge.index: edge for edge in self.spec.layout.edges}
        for blobs in self._chunks(inbox.tuples):
            self._take_in(task, edges[blobs[0].edge], blobs)
            yield from task.outbox.taken()
        files = task.finish()
        partition = task.place.partition
        seen = inbox.sightings(origin_of(self.level, partition))
        task.outbox.send(partition % self.spec.dests, SETTLE, SEEN, seen)
        yield from task.end({"files": files})

    def _chunks(self, blobs: list[TupleBlob]) -> Iterator[list[TupleBlob]]:
        """Blobs of one edge at a time, in an order that does not depend on when they came."""
        number = {
            edge.index: place
            for place, name in enumerate(self.spec.layout.at(self.level))
            for edge in self.spec.layout.into(name)
        }
        blobs = sorted(blobs, key=lambda one: (number[one.edge], one.edge, one.origin, one.seq))
        waiting: list[TupleBlob] = []
        size = 0
        for one in blobs:
            more = len(one.blob) + len(one.side)
            full = size >= _CHUNK_BYTES or size + more > _MOST_CHUNK_BYTES
            if waiting and (one.edge != waiting[0].edge or full):
                yield waiting
                waiting, size = [], 0
            waiting.append(one)
            size += more
        if waiting:
            yield waiting

    def _take_in(self, task: Task, edge: Edge, blobs: list[TupleBlob]) -> None:
        schema = self.spec.edge_schema(edge)
        batch = one_batch([pa.ipc.read_record_batch(one.blob, schema) for one in blobs])
        runs = joined_runs([one.side for one in blobs])
        chunk = task.chunks.add(len(runs.rows), lambda: (runs.roots, runs.vals), ACK, runs.offsets)
        numbers = np.arange(chunk.first, chunk.first + chunk.groups)
        owners = np.repeat(numbers, runs.rows)
        identity = None
        if edge.target in self.spec.layout.needs_identity:
            message_ids, attempts, stable_ids = batch.columns[-len(IDENTITY_FIELDS) :]
            identity = Identity(message_ids, attempts.to_numpy(), stable_ids.to_numpy())
            batch = batch.select(batch.schema.names[: -len(IDENTITY_FIELDS)])
        task.bolts.process(edge, AnchoredRows(batch, Owners(owners), identity, chunk))
        task.close(chunk)
