"""One task of a stage: its parts, put together, and how its output ends."""

from __future__ import annotations

import json
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from ackcore._records import Status
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.settle.packing import Batches
from ackcore.spark.settle.reasons import earliest
from ackcore.spark.tasks.bolts import Bolts
from ackcore.spark.tasks.edges import Dealer
from ackcore.spark.tasks.exchange import Outbox, origin_of
from ackcore.spark.tasks.inflight import InFlight, IsolatedBolts
from ackcore.spark.tasks.ledger_rows import LedgerRows
from ackcore.spark.tasks.markers import Place
from ackcore.spark.tasks.results import (
    NOT_ACKED,
    NOT_ACKED_SCHEMA,
    TASK_REPORT,
    result_batch,
    to_stream,
)
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.tracking import Chunk, Chunks


def attempt_at(level: int) -> Place:
    """Return which attempt at which task of a level runs here."""
    context = TaskContext.get()
    assert context is not None
    return Place(level, context.partitionId(), context.taskAttemptId())


class Task:
    """One task of a stage; to be used in a ``with``.

    Parameters
    ----------
    spec : TaskSpec
    place : Place
        Which attempt at which task this is.

    Attributes
    ----------
    bolts : IsolatedBolts
        Take the rows.
    chunks : Chunks
        The groups that rows hang from.
    ledger_rows : LedgerRows
        What becomes of the groups.
    outbox : Outbox
        What the task sends.
    """

    def __init__(self, spec: TaskSpec, place: Place) -> None:
        self.spec = spec
        self.place = place
        self.chunks = Chunks()
        self.outbox = Outbox(origin_of(place.level, place.partition), spec.dests)
        self.ledger_rows = LedgerRows(spec, self.chunks, self.outbox)
        self._in_flight = InFlight(
            spec.directory, place, spec.careful, spec.suspects, spec.isolates, spec.timeout_s
        )
        dealer = Dealer(spec, place.partition, self.chunks, self.outbox, self.ledger_rows)
        self._bolts = Bolts(
            spec, place, self._in_flight.time_limit, self.chunks, dealer, self.ledger_rows
        )
        self.bolts = IsolatedBolts(self._bolts, self._in_flight, self.chunks, self.ledger_rows)

    def close(self, chunk: Chunk) -> None:
        """Let a chunk's groups leave their ledger rows; all of its rows were handed on."""
        self.ledger_rows.close(chunk)
        if not self._bolts.open_rows:
            self.chunks.forget_closed()

    def finish(self) -> list[SinkFile]:
        """Flush the bolts, in the order of data; return the files that were written.

        Returns
        -------
        list of SinkFile
        """
        self.bolts.flush()
        self.ledger_rows.send()
        files = []
        for file, seal in self._bolts.files.finish():
            self.seal(seal)
            files.append(file)
        return files

    def seal(self, of_file: int) -> None:
        """Take a file's fingerprint into that of the output."""
        self.outbox.seal(of_file.to_bytes(8, "little", signed=True))

    def end(self, report: dict[str, Any]) -> Batches:
        """End the output: with trailers, or with the results where nothing is settled."""
        report |= {
            "partition": self.place.partition,
            "level": self.place.level,
            "untracked_failures": self.ledger_rows.untracked_failures,
            "raised": {name: raised.to_json() for name, raised in self._bolts.raised.items()},
        }
        task_report = json.dumps(report, sort_keys=True).encode()
        if self.spec.layout.settles:
            self.outbox.send_trailers(self.spec.sends(self.place.level), task_report)
            yield from self.outbox.taken()
            return
        rows = [(TASK_REPORT, task_report)]
        for number, tables in sorted(self.ledger_rows.failed.items()):
            rows.append((NOT_ACKED, to_stream(_failed(earliest(tables), number))))
        yield result_batch(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # However it went: its marker must not pass for that of an attempt that died.
        self._in_flight.end()


def _failed(reasons: pa.Table, number: int) -> pa.Table:
    n = len(reasons)
    tasks = pa.array(np.full(n, number, np.int32))
    names = pa.array([Status.FAILED.name] * n, pa.string())
    texts = reasons["text"].combine_chunks().dictionary_encode()
    return pa.table([reasons["root_id"], tasks, names, texts], schema=NOT_ACKED_SCHEMA)
