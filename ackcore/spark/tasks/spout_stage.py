"""The spout stage: reads the rows of spouts, and runs the bolts that follow without an exchange.

The rows are new ones of a source, or records of the checkpoint that are due for a retry.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.record_batches import bytes_before, one_batch, rebatched
from ackcore._backend import fingerprint
from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import Batches
from ackcore.spark.base.reasons import BEHIND, KILLED_WORKER, null_message_id
from ackcore.spark.base.schemas import ATTEMPT
from ackcore.spark.stores.opening import is_bucket
from ackcore.spark.tasks.exchange_format import Places
from ackcore.spark.tasks.record_ids import CLAIM, RETRIES, SourceRecords, SpoutSpec
from ackcore.spark.tasks.row_files import (
    RowFile,
    RowFileWriter,
    partition_in,
    read_rows,
    read_whole,
)
from ackcore.spark.tasks.spec import CHUNK_BYTES, TaskSpec
from ackcore.spark.tasks.task import Task, attempt_at
from ackcore.spark.tasks.tracing import Tracer
from ackcore.spark.tasks.tracking import NONE, AnchoredRows, Cohorts, Owners
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.tuples import Reason

#: The most bytes of new rows that a task keeps in files for the driver. It reads failed records
#: there, which takes milliseconds; a job that reads the source again takes a third of a second.
KEPT_BYTES = 1 << 22
#: The most bytes of batches that are joined: a chunk costs a task as much as a copy of 2 MB.
JOINED_BYTES = 1 << 22


@dataclass(frozen=True)
class SpoutStage:
    """The mapInArrow function that reads the rows of spouts and runs the first bolts.

    The input is the rows of one spout. With ``spout=None`` it has a struct column for each spout.
    The output is rows for later stages or, without any, results for the driver.
    """

    spec: TaskSpec
    sources: Mapping[str, SpoutSpec]
    spout: str | None

    def __call__(self, batches: Batches) -> Batches:
        """Process one partition of the source, for mapInArrow."""
        attempt = attempt_at(1)
        with Task(self.spec, attempt) as task:
            yield from self._run(task, self.records(batches, attempt.partition))

    def records(self, batches: Batches, partition: int) -> Iterator[SourceRecords]:
        """Yield a partition's records in chunks.

        If rows are sent to other tasks, the sizes of the batches have no influence on the chunks.

        Raises ValueError if ``partition`` is a number that root ids cannot have.
        """
        if partition >= RETRIES:
            names = self.spout or ", ".join(self.sources)
            raise ValueError(
                f"the input of {names} has more than {RETRIES} partitions, the most for one "
                "micro-batch; call coalesce on the DataFrame of the spout"
            )
        rows = self.spec.chunk_rows
        # Rows that are sent are copied anyway; other batches are joined while a copy costs less.
        chunks = chunked(batches, rows) if self.spec.layout.settles else joined(batches, rows)
        places = Counter[str]()
        spouts = tuple(name for name, source in self.sources.items() if not source.by_tasks)
        for batch in chunks:
            parts = _by_spout(batch, spouts) if self.spout is None else [(self.spout, batch)]
            for name, some in parts:
                source = self.sources[name]
                yield SourceRecords(source, source.rows(some), partition, places[name])
                places[name] += len(some)

    def _run(self, task: Task, records: Iterator[SourceRecords], retried: bool = False) -> Batches:
        read = Counter[str]()
        content = RowSample()
        small = _SmallInput()
        for some in records:
            source = some.source
            read[source.name] += len(some.batch)
            if not retried:
                content.add(source.name, some.batch)
            if source.spills and not retried:
                if source.name not in task.spilled:
                    task.spilled[source.name] = _file_of(task, source)
                task.spilled[source.name].write(some.batch)
            elif source.tracked and not retried:
                small.add(source, some.batch)
            self._take_in(task, some)
            yield from task.outbox.taken()
        files = task.finish()
        spilled = []
        for name, file in sorted(task.spilled.items()):
            path, rows, of_file = file.finish()
            task.add_to_fingerprint(of_file)
            spilled.append((name, f"source/{name}/{path}", rows, file.nbytes))
        # Without a settle stage the task has all failures, and has judged most of them.
        if self.spec.layout.settles or task.ledger_rows.failed:
            small.write(task)
        report = {
            "retried" if retried else "read": read,
            "content": content.fingerprints(),
            "files": files,
            "spilled": spilled,
        }
        yield from task.end(report)

    def _take_in(self, task: Task, some: SourceRecords) -> None:
        spec, source = self.spec, some.source
        n = len(some.batch)
        identity = None
        if source.name in spec.layout.needs_identity:
            identity = some.identity(spec.number)
        bad = {} if some.partition == RETRIES else source.refusals(some.batch)
        if not source.tracked:
            loose = Owners(np.full(n, NONE, np.int64))
            rows = AnchoredRows(some.batch, loose, identity)
            _deliver(task, source, rows, bad)
            return

        of = some.partition, some.first, n, some.attempts  # so that load keeps no rows
        cohorts = self._cohorts(some)

        def load() -> tuple[Int64s, Int64s]:
            of_each = 0 if cohorts is None else cohorts.ids[0]
            return source.roots(*of), np.full(n, of_each, np.int64)

        chunk = task.chunks.add(n, load, source.number, None, cohorts)
        if task.tracer is not None:
            self._trace(task.tracer, some, chunk.roots)
        # Retries make no claims: a new record with the id of a retry is no fault of the source.
        if source.claims and some.partition != RETRIES:
            task.ledger_rows.claim(source.claim_ids(some.batch), CLAIM + source.number)
        first = chunk.first

        def owners() -> Owners:
            return Owners(np.arange(first, first + n, dtype=np.int64))

        rows = AnchoredRows(some.batch, owners, identity, chunk)
        lacks_id = source.lacks_message_id(some.batch)
        if lacks_id is not None:
            reason = null_message_id(source.name, source.message_id)
            bad |= dict.fromkeys(np.flatnonzero(lacks_id).tolist(), reason)
        # Other reasons replace BEHIND: final ones stay final, and others make the record wait too.
        bad = (
            dict.fromkeys(source.held(some.batch) if some.partition != RETRIES else (), BEHIND)
            | bad
        )
        if spec.rejected:
            crash = np.isin(chunk.roots, np.array(spec.rejected, np.int64))
            bad = dict.fromkeys(np.flatnonzero(crash).tolist(), KILLED_WORKER) | bad
        _deliver(task, source, rows, bad)
        task.judge(some, chunk)
        task.close(chunk)

    def _cohorts(self, some: SourceRecords) -> Cohorts | None:
        """Return the one cohort of a chunk's records, whose id is the root of the first one.

        None if there are no records or no settle stage, or if each root is settled by itself.
        """
        if self.spec.by_root or not self.spec.layout.settles or not len(some.batch):
            return None
        places = None
        attempts = some.attempts
        if isinstance(attempts, int):
            key = some.source.key & (1 << 64) - 1
            places = Places(key, some.partition, some.first, attempts)
        else:
            attempts = attempts[:1]
        first = some.source.roots(some.partition, some.first, 1, attempts)
        return Cohorts(first, np.zeros(1, np.int64), places)

    def _trace(self, tracer: Tracer, some: SourceRecords, roots: Int64s) -> None:
        """Add the sampled ones among the records, whose roots are given, to the trace."""
        places = np.flatnonzero(tracer.sampled(roots))
        if not len(places):
            return
        attempts = some.attempts if isinstance(some.attempts, int) else some.attempts[places]
        names = some.message_ids(self.spec.number).take(pa.array(places))
        tracer.record(roots[places], some.source.name, names, attempts)


def _deliver(task: Task, source: SpoutSpec, rows: AnchoredRows, bad: Mapping[int, Reason]) -> None:
    """Fail the rows in ``bad``, which has reasons by row number; pass the others to the bolts."""
    rows = task.ledger_rows.fail_some(rows, bad, source.name)
    if len(rows):
        task.bolts.deliver(source.name, DEFAULT_STREAM, rows, source.decode)


class Slice(NamedTuple):
    """A part of a file with a spout's due records, or a whole file of its spilled input.

    ``first``, ``rows``: the part's first row in the file, and its number of rows.
    """

    spout: str
    file: RowFile
    first: int
    rows: int
    spilled: bool = False


@dataclass(frozen=True)
class RetryStage(SpoutStage):
    """The mapInArrow function that runs the first bolts on due records; input: slice numbers."""

    slices: tuple[Slice, ...] = ()

    def __call__(self, batches: Batches) -> Batches:
        """Process one partition of slice numbers, for mapInArrow."""
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        parts = (self.slices[number] for number in numbers)
        records = (one for part in parts for one in records_in(self.sources[part.spout], part))
        with Task(self.spec, attempt_at(1)) as task:
            yield from self._run(task, records, retried=True)


def records_in(source: SpoutSpec, part: Slice) -> Iterator[SourceRecords]:
    """Read the due records or the spilled input of a slice, and yield them in batches."""
    if not part.spilled:
        due = read_whole(part.file).slice(part.first, part.rows)
        yield from due_records(source, due, part.first)
        return
    partition, first = partition_in(part.file.path), 0
    for batch in read_rows(part.file):
        yield SourceRecords(source, batch, partition, first)
        first += len(batch)


def due_records(source: SpoutSpec, due: pa.Table, first: int = 0) -> Iterator[SourceRecords]:
    """Yield due records, numbered from ``first`` on, in as few batches as `CHUNK_BYTES` allows."""
    for batch in chunked(due.to_batches(), len(due)):
        attempts = batch.column(ATTEMPT).to_numpy()
        yield SourceRecords(source, source.rows(batch), RETRIES, first, attempts, batch)
        first += len(batch)


def chunked(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Cut rows into chunks of ``rows`` rows, or of `CHUNK_BYTES` if rows are long."""
    return rebatched(batches, rows, CHUNK_BYTES)


def joined(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Join small batches, up to ``rows`` rows and `JOINED_BYTES`; cut only at `CHUNK_BYTES`."""
    waiting: list[pa.RecordBatch] = []
    n = size = 0
    for batch in batches:
        whole = bytes_before(batch, len(batch))
        if waiting and (n + len(batch) > rows or size + whole > JOINED_BYTES):
            yield from chunked([one_batch(waiting)], n)
            waiting, n, size = [], 0, 0
        waiting.append(batch)
        n, size = n + len(batch), size + whole
    if n:
        yield from chunked([one_batch(waiting)], n)


def _by_spout(batch: pa.RecordBatch, spouts: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield (spout, rows) for each run of one spout's rows; a row has only its spout's column set.

    A union places partitions side by side or one after the other, so the rows of a spout are
    adjacent.
    """
    if not len(batch):
        return
    spout_of = np.full(len(batch), -1)
    for i in range(batch.num_columns):
        spout_of[batch.column(i).is_valid().to_numpy(zero_copy_only=False)] = i
    assert spout_of.min() >= 0
    starts = np.flatnonzero(np.diff(spout_of, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], len(batch)], strict=True):
        column = batch.column(int(spout_of[start])).slice(start, end - start)
        fields = [column.type.field(j) for j in range(column.type.num_fields)]
        rows = pa.RecordBatch.from_arrays(column.flatten(), schema=pa.schema(fields))
        yield spouts[spout_of[start]], rows


class RowSample:
    """Fingerprints of a partition's rows, by spout: of their number, the last one and a few others.

    They take little time. They differ, with few exceptions, if a source has other partitions when
    it is read again. They do not depend on the batches in which the rows come.
    """

    def __init__(self) -> None:
        self._rows = Counter[str]()
        self._found: dict[str, int] = {}
        self._last: dict[str, bytes] = {}

    def add(self, spout: str, batch: pa.RecordBatch) -> None:
        """Add the next rows of a spout, at least one row."""
        n, first = len(batch), self._rows[spout]
        self._rows[spout] += n
        places = {place - first for place in _FIRST if first <= place < first + n}
        places |= {*range(-first % _SAMPLED, n, _SAMPLED)}
        *chosen, last = _samples(batch, [*sorted(places), n - 1])
        for one in chosen:
            self._found[spout] = fingerprint(one, self._found.get(spout, 0))
        self._last[spout] = last

    def fingerprints(self) -> dict[str, int]:
        """Return the fingerprint of each spout's rows."""
        return {
            spout: fingerprint(f"{self._rows[spout]} ".encode() + last, self._found[spout])
            for spout, last in self._last.items()
        }


#: A `RowSample` depends on the rows with these numbers, and with multiples of `_SAMPLED`.
_SAMPLED, _FIRST = 1 << 14, [1 << n for n in range(14)]


def _samples(batch: pa.RecordBatch, places: Sequence[int]) -> list[bytes]:
    """Return bytes for each of some rows: the hashes of its values, or texts if a type has none."""
    columns: list[list[Any]] = []
    for column in batch.columns:
        values = [column.slice(place, 1) for place in places]
        try:
            columns.append(hash_columns([pa.concat_arrays(values)], len(values)).tolist())
        except TypeError:  # the type cannot be hashed
            # The text of maps is Arrow's: the start of long texts, and both ends of long maps.
            # Python has no year beyond 9999, and cannot decode some bytes of text.
            columns.append([str(value.to_string()) for value in values])
    rows = zip(*columns, strict=True)
    return [repr(row).encode("utf-8", "surrogatepass") for row in rows]


def _file_of(task: Task, source: SpoutSpec, *, synced: bool = True) -> RowFileWriter:
    directory = f"{task.spec.work}/source/{source.name}"
    return RowFileWriter(directory, source.schema, task.attempt.partition, synced=synced)


class _SmallInput:
    """Copies of the new rows of a task, until they exceed `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._rows: dict[str, tuple[SpoutSpec, list[pa.Buffer]]] = {}

    def add(self, source: SpoutSpec, batch: pa.RecordBatch) -> None:
        """Copy rows, or drop all copies if the rows have become too many."""
        self._nbytes += batch.nbytes
        if self._nbytes > KEPT_BYTES:
            self._rows.clear()
        else:
            self._rows.setdefault(source.name, (source, []))[1].append(batch.serialize())

    def write(self, task: Task) -> None:
        """Write the rows to a file for each spout, named in ``task.kept``, if not in a bucket.

        The files save a job, and no record depends on them: a disk error is ignored.
        """
        for name, (source, copies) in self._rows.items():
            if is_bucket(task.spec.work):
                return
            with contextlib.suppress(OSError):
                file = _file_of(task, source, synced=False)
                with contextlib.closing(file):
                    for data in copies:
                        file.write(pa.ipc.read_record_batch(data, source.schema))
                    path, rows, _ = file.finish()
                task.kept.append((name, f"source/{name}/{path}", rows, file.nbytes))
