"""One task of a stage: combines its parts and ends its output, with results for the driver."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Self

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from ackcore._records import Status
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.reasons import first_reasons
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.base.versions import from_arrow_schema
from ackcore.spark.tasks.bolts import Bolts
from ackcore.spark.tasks.exchange import Outbox
from ackcore.spark.tasks.exchange_format import RESULT, SETTLE, origin_of
from ackcore.spark.tasks.failed_writer import FailedInRun
from ackcore.spark.tasks.inflight_markers import TaskAttempt
from ackcore.spark.tasks.isolation import AttemptIsolation, IsolatedBolts
from ackcore.spark.tasks.ledger_rows import LedgerRows
from ackcore.spark.tasks.record_ids import SourceRecords
from ackcore.spark.tasks.row_files import RowFileWriter
from ackcore.spark.tasks.shuffle_writer import ShuffleWriter
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.tracking import Chunk, Chunks

# Results are rows of a kind and a blob.
RESULT_SCHEMA = pa.schema([("kind", pa.int8()), ("blob", pa.binary())])
RESULT_TYPE = from_arrow_schema(RESULT_SCHEMA)

# The kinds of results, and the content of the blob:
TASK_REPORT = 1  # the report of a task, in JSON
TRAILER_RECEIPTS = 2  # receipts of trailers, as `Inbox.receipts` returns them
NOT_ACKED = 3  # an Arrow stream of `NOT_ACKED_SCHEMA`
COUNTED = 4  # the number of ACKED roots by spout number, in JSON
PICKED = 5  # an Arrow stream of records that were read again or judged
NOT_ACKED_FILE = 6  # the name of a file of `NOT_ACKED_SCHEMA` among the run's files of failures
UNSETTLED = 7  # the number of cohorts that could not be settled
NAMED = 8  # like `PICKED`, but other tasks may have failed the judged records too
DISPUTED = 9  # the roots, as int64, that failed with several reasons

#: Names of `Status`; records that are not ACKED have one of three.
STATUS_NAMES = pa.dictionary(pa.int8(), pa.string())
#: Records that are not ACKED, including those whose trees are still OPEN.
NOT_ACKED_SCHEMA = pa.schema(
    [
        ("root_id", pa.int64()),
        ("task", pa.int32()),
        ("status", STATUS_NAMES),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
    ]
)

#: The partition and the attempt number if a stage is called without Spark.
_CALLED_AS: ContextVar[tuple[int, int] | None] = ContextVar("ackcore_task_attempt", default=None)


@contextmanager
def called_as(partition: int, attempt: int) -> Iterator[None]:
    """Set the partition and attempt id that `attempt_at` returns in this context, without Spark."""
    before = _CALLED_AS.set((partition, attempt))
    try:
        yield
    finally:
        _CALLED_AS.reset(before)


def attempt_at(level: int) -> TaskAttempt:
    """Return the attempt of stage ``level`` that runs here, by `called_as` or Spark's context.

    On Spark, the first call in a worker excludes the modules from garbage collection.
    """
    called_as = _CALLED_AS.get()
    if called_as is not None:
        return TaskAttempt(level, *called_as)
    context = TaskContext.get()
    assert context is not None
    _leave_modules_out()
    return TaskAttempt(level, context.partitionId(), context.taskAttemptId())


@cache
def _leave_modules_out() -> None:
    """Exclude all existing objects of this process from garbage collection, once in each worker.

    Spark's worker collects garbage after each task. With the imported modules that takes 50 ms of
    CPU, five times as much as a task with 1,000 rows. Existing cycles are never freed, such as the
    classes of the first task's bolts if they are sent by value.
    """
    gc.freeze()


class Task:
    """One attempt at a task of a stage, used as a context manager.

    The caller passes rows to ``bolts`` and closes their chunks, then calls `finish` and `end`.
    Leaving the context, also by an error, removes the attempt's in-flight marker and closes files.

    Attributes: ``bolts``: the bolts that process the rows. ``chunks``: the chunks of input that
    rows are anchored to. ``ledger_rows``: the collector of acks and failures. ``outbox``: the rows
    that the task sends. ``tracer``: the collector of traces, or None. ``spilled``: by spout, the
    file of rows that its source may not return again. ``kept``: the files with copies of the new
    rows, if they are few: spout, path, number of rows and of bytes.
    """

    def __init__(self, spec: TaskSpec, attempt: TaskAttempt) -> None:
        self.spec = spec
        self.attempt = attempt
        self.chunks = Chunks()
        self.spilled: dict[str, RowFileWriter] = {}
        self.kept: list[tuple[str, str, int, int]] = []
        self.outbox = Outbox(origin_of(attempt.level, attempt.partition), spec.dests)
        #: The judges of "failed" records, which no other task can fail, and of "named" ones, which
        #: other tasks may fail too; empty if failed records are read again.
        self._judges: dict[str, FailedInRun] = {}
        if spec.rules is not None and attempt.level == 1:
            for name, end in (("failed", ""), ("named", "-named")):
                file = f"{attempt.partition}{end}"
                self._judges[name] = FailedInRun(spec.work, file, spec.rules, spec.number)
        self.ledger_rows = LedgerRows(spec, self.chunks, self.outbox, bool(self._judges))
        alone = {root: n - 1 for root, n in Counter(spec.suspects).items()}
        self._isolation = AttemptIsolation(
            spec.work, attempt, spec.careful, alone, spec.isolates, spec.timeout_s
        )
        shuffle_writer = ShuffleWriter(
            spec, attempt.partition, self.chunks, self.outbox, self.ledger_rows
        )
        self._bolts = Bolts(
            spec, attempt, self._isolation.time_limit, self.chunks, shuffle_writer, self.ledger_rows
        )
        self.tracer = self._bolts.tracer
        self.bolts = IsolatedBolts(
            self._bolts, self._isolation, self.chunks, self.ledger_rows, spec.in_order
        )

    def close(self, chunk: Chunk) -> None:
        """Send a processed chunk's ledger rows, and mark it closed.

        If no tuple in the task is open, all closed chunks are forgotten.
        """
        self.ledger_rows.close(chunk)
        if not self._bolts.open_rows:
            self.chunks.forget_closed()

    def judge(self, some: SourceRecords, chunk: Chunk) -> None:
        """Decide if failed records of a processed chunk wait or are dead.

        Without rules do nothing: the failed records are read again.
        """
        if not self._judges:
            return
        named: list[pa.Table] = []
        if self.spec.layout.settles:
            failures, named = self.ledger_rows.decide_held(chunk, self._bolts.open_groups)
        else:
            failures = self.ledger_rows.new_failures()
        if failures:
            self._judges["failed"].write(some, chunk.roots, failures)
        if named:
            self._judges["named"].write(some, chunk.roots, named)

    def finish(self) -> list[SinkFile]:
        """Flush the bolts along the data flow, send ledger rows; finish and return sinks' files."""
        self.bolts.flush()
        self.ledger_rows.send()
        files = []
        for file, of_file in self._bolts.files.finish():
            self.add_to_fingerprint(of_file)
            files.append(file)
        return files

    def add_to_fingerprint(self, of_file: int) -> None:
        """Add the fingerprint of a file, a signed 64-bit number, to that of the task's output."""
        self.outbox.add_to_fingerprint(of_file.to_bytes(8, "little", signed=True))

    def end(self, report: dict[str, Any]) -> Batches:
        """Add to a stage's report, in place, and yield the rest of the output.

        If an exchange follows, that is rows that are still to be sent, and trailers, one of which
        has the report. Otherwise it is one batch of results for the driver.
        """
        report |= {
            "partition": self.attempt.partition,
            "level": self.attempt.level,
            "untracked_failures": self.ledger_rows.untracked_failures,
            "raised": self._bolts.raised,
        }
        results: list[tuple[int, bytes]] = []
        for name, judge in self._judges.items():
            judged = judge.finish(self.ledger_rows.new_failures())
            if judged is not None:
                report[name], tables = judged
                kind = PICKED if name == "failed" else NAMED
                results += [(kind, to_stream(table)) for table in tables]
        alike = json.dumps(report, sort_keys=True).encode()
        # Breaker trips depend on outages, though the answers come from a journal: not in `alike`.
        report["figures"] = {
            "breaker_trips": self._bolts.breaker_trips,
            "emitted": self._bolts.emitted,
            "expectations": self._bolts.expected.counts,
            "spent": self._bolts.spent(),
        }
        report["unexpected"] = self._bolts.expected.fatal
        report["used"] = {name: used.to_json() for name, used in self._bolts.usage.items()}
        report["kept"] = self.kept
        if self.tracer is not None:
            report["trace"] = self.tracer.to_json()
        task_report = json.dumps(report, sort_keys=True).encode()
        failed = self._settled(self._judges["failed"] if "failed" in report else None) + results
        if not self.spec.layout.settles:
            yield result_batch([(TASK_REPORT, task_report), *failed])
            return
        for kind, blob in failed:
            # A result goes to the driver through one task of the settle stage.
            to = self.attempt.partition % self.spec.dests
            self.outbox.send(to, SETTLE, RESULT, blob, subscription=kind)
        self.outbox.send_trailers(self.spec.sends(self.attempt.level), task_report, alike)
        yield from self.outbox.taken()

    def _settled(self, in_run: FailedInRun | None) -> list[tuple[int, bytes]]:
        """Return results with the failed roots that the settle stage does not settle.

        Roots that ``in_run`` has judged are left out if there are no traces: its results have them.
        """
        rows = []
        for number, tables in sorted(self.ledger_rows.failed.items()):
            # With traces the driver gets the reasons of all failed roots.
            if in_run is not None and self.tracer is None:
                tables = in_run.unjudged(tables)
            if tables:
                rows.append((NOT_ACKED, to_stream(_failed(first_reasons(tables), number))))
        return rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # Also after an error: its marker must not look like that of a crashed attempt.
        self._isolation.end()
        self._bolts.close()
        for judge in self._judges.values():
            judge.discard()
        for file in self.spilled.values():
            file.close()


def _failed(reasons: pa.Table, number: int) -> pa.Table:
    n = len(reasons)
    tasks = pa.array(np.full(n, number, np.int32))
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int8)), [Status.FAILED.name])
    texts = reasons["text"].combine_chunks().dictionary_encode()
    return pa.table([reasons["root_id"], tasks, names, texts], schema=NOT_ACKED_SCHEMA)


def result_batch(rows: list[tuple[int, bytes]]) -> pa.RecordBatch:
    """Return results for the driver, pairs of (kind, blob), as a batch."""
    kinds = pa.array([kind for kind, _ in rows], pa.int8())
    blobs = pa.array([blob for _, blob in rows], pa.binary())
    return pa.RecordBatch.from_arrays([kinds, blobs], schema=RESULT_SCHEMA)


def results_in(rows: pa.Table) -> Iterator[tuple[int, pa.Buffer]]:
    """Yield (kind, blob) from the results that the driver got.

    Reading a blob from its batch copies it.  So each batch is released after it was read, and the
    caller must not keep ``rows``.
    """
    batches = rows.to_batches()[::-1]
    del rows
    while batches:
        batch = batches.pop()
        for kind, blob in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            yield kind, blob.as_buffer()


def to_stream(table: pa.Table | pa.RecordBatch) -> bytes:
    """Return a table as an Arrow stream, with its schema."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write(table)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


def from_stream(blob: bytes | pa.Buffer) -> pa.Table:
    """Return the table in the bytes that `to_stream` returned."""
    return pa.ipc.open_stream(blob).read_all()
