"""The stages behind an exchange, which is a shuffle of Spark: each runs its bolts on tuples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ackcore import ACK
from ackcore._arrow.record_batches import one_batch
from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.tasks.exchange import Inbox
from ackcore.spark.tasks.exchange_format import RECEIPTS, SETTLE, ReceivedRuns, TupleBlob, origin_of
from ackcore.spark.tasks.spec import IDENTITY_FIELDS, TaskSpec
from ackcore.spark.tasks.task import Task, attempt_at
from ackcore.spark.tasks.tracking import AnchoredRows, Cohorts, Owners
from ackcore.topology.stage_layout import Subscription
from ackcore.topology.tuples import Identity


@dataclass(frozen=True)
class BoltStage:
    """The mapInArrow function that runs the bolts of stage ``level`` on the tuples sent to it."""

    spec: TaskSpec
    level: int

    def __call__(self, batches: Batches) -> Batches:
        """Run the bolts on one partition, for mapInArrow; pass on rows for later stages.

        Raises RuntimeError before any bolt runs if rows were lost or came twice.
        """
        with Task(self.spec, attempt_at(self.level)) as task:
            yield from self._run(task, batches)

    def _run(self, task: Task, batches: Batches) -> Batches:
        inbox = Inbox(self.level)
        for batch in batches:
            passed = inbox.read(batch)
            if passed is not None:
                yield passed
        inbox.check()
        layout = self.spec.layout
        subscriptions = {
            sub.index: sub for name in layout.at(self.level) for sub in layout.into(name)
        }
        for blobs in inbox.chunks(list(subscriptions)):
            self._take_in(task, subscriptions[blobs[0].subscription], blobs)
            yield from task.outbox.taken()
        files = task.finish()
        partition = task.attempt.partition
        receipts = inbox.receipts(origin_of(self.level, partition))
        task.outbox.send(partition % self.spec.dests, SETTLE, RECEIPTS, receipts)
        yield from task.end({"files": files})

    def _take_in(self, task: Task, sub: Subscription, blobs: list[TupleBlob]) -> None:
        schema = self.spec.tuple_schema(sub)
        batch = one_batch([pa.ipc.read_record_batch(one.blob, schema) for one in blobs])
        received = ReceivedRuns([one.side for one in blobs])
        cohorts = None if self.spec.by_root else Cohorts(received.cohorts, received.edges)

        def load() -> tuple[Int64s, Int64s]:
            return received.runs.roots, received.runs.vals

        chunk = task.chunks.add(received.groups, load, ACK, received.offsets, cohorts)
        first = chunk.first

        def owners() -> Owners:
            numbers = np.arange(first, first + received.groups, dtype=np.int64)
            return Owners(np.repeat(numbers, received.runs.rows))

        identity = None
        if sub.target in self.spec.layout.needs_identity:
            message_ids, attempts, stable_ids = batch.columns[-len(IDENTITY_FIELDS) :]
            identity = Identity(message_ids, attempts.to_numpy(), stable_ids.to_numpy())
            batch = batch.select(batch.schema.names[: -len(IDENTITY_FIELDS)])
        task.bolts.process(sub, AnchoredRows(batch, owners, identity, chunk))
        task.close(chunk)
