"""The stages of a run, as functions for ``mapInArrow``.

============  ====================================================================================
`FirstStage`  reads the rows of spouts, and runs what reads them without an exchange
`RetryStage`  the same for records that are due for a retry
`NextStage`   runs the bolts of a level on what the stages before it have sent
`LastStage`   settles what all of them have left, and says who saw which trailers
`PickStage`   reads the rows of spouts again, and returns those of some roots
============  ====================================================================================
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema

from ackcore import ACK
from ackcore._records import Int64s, Status
from ackcore._shuffle import fingerprint
from ackcore.arrow import hash_columns, one_batch
from ackcore.spark.base.schemas import ATTEMPT, MESSAGE_ID
from ackcore.spark.settle import wire
from ackcore.spark.settle.packing import fold, new_ledger
from ackcore.spark.settle.reasons import earliest, killed_worker, look_up, null_message_id
from ackcore.spark.tasks.exchange import SEEN, SETTLE, Inbox, Row, origin_of
from ackcore.spark.tasks.source import (
    CLAIM,
    RETRIES,
    Source,
    by_spout,
    chunked,
    stamps,
)
from ackcore.spark.tasks.task import IDENTITY_FIELDS, Task, Work
from ackcore.spark.tasks.tracking import NONE, Owners, Rows, Runs, concat, some_rows
from ackcore.spark.tasks.workfiles import PLACE, ROOT_ID, RowFile, WorkFile, read_whole
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.stage_layout import Edge
from ackcore.topology.tuples import Identity

Batches = Iterator[pa.RecordBatch]

#: What the last stage returns to the driver: a kind, and what it calls for.
RESULT_SCHEMA = pa.schema([("kind", pa.int8()), ("blob", pa.binary())])
RESULT_TYPE = from_arrow_schema(RESULT_SCHEMA)
#: JSON of one task; sightings of trailers; an Arrow stream of `SETTLED`; JSON of counts by task;
#: an Arrow stream of records that were read again.
ABOUT, SIGHTED, UNSETTLED, COUNTED, PICKED = 1, 2, 3, 4, 5

SETTLED = pa.schema(
    [
        ("root_id", pa.int64()),
        ("task", pa.int32()),
        ("status", pa.string()),
        ("reason", pa.dictionary(pa.int32(), pa.string())),
    ]
)


def result(rows: list[tuple[int, bytes]]) -> pa.RecordBatch:
    """Return rows for the driver."""
    kinds = pa.array([kind for kind, _ in rows], pa.int8())
    blobs = pa.array([blob for _, blob in rows], pa.binary())
    return pa.RecordBatch.from_arrays([kinds, blobs], schema=RESULT_SCHEMA)


def to_stream(table: pa.Table | pa.RecordBatch) -> bytes:
    """Return a table as bytes that hold its schema too."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write(table)
    return out.getvalue().to_pybytes()  # type: ignore[no-any-return]


def from_stream(blob: bytes) -> pa.Table:
    """Return the table that `to_stream` made bytes of."""
    return pa.ipc.open_stream(blob).read_all()


def _begin(work: Work, level: int) -> tuple[Task, int]:
    context = TaskContext.get()
    assert context is not None
    partition = context.partitionId()
    return Task(work, level, partition, context.taskAttemptId()), partition


class Records(NamedTuple):
    """Records of one spout, one after the other: from place ``first`` of a partition."""

    source: Source
    batch: pa.RecordBatch
    partition: int
    first: int
    attempts: Any = 0
    identity: Identity | None = None


@dataclass(frozen=True)
class FirstStage:
    """Reads rows of one spout, or of several in struct columns of their names (``spout=None``)."""

    work: Work
    sources: Mapping[str, Source]
    spout: str | None

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        task, partition = _begin(self.work, 1)
        with task:
            yield from self._run(task, partition, self._records(batches, partition))

    def _records(self, batches: Batches, partition: int) -> Iterator[Records]:
        """The records of a partition; where they are cut is a matter of position alone."""
        if partition >= RETRIES:
            raise ValueError(
                f"a source must have at most {RETRIES} partitions, got partition {partition}; "
                "coalesce it first"
            )
        # Small batches make small blobs.  Where nothing is sent they may be as they come.
        rows = self.work.chunk_rows if self.work.layout.settles else None
        places, spouts = Counter[str](), tuple(self.sources)
        for batch in chunked(batches, rows):
            parts = by_spout(batch, spouts) if self.spout is None else [(self.spout, batch)]
            for name, some in parts:
                source = self.sources[name]
                yield Records(source, source.rows(some), partition, places[name])
                places[name] += len(some)

    def _run(
        self, task: Task, partition: int, records: Iterator[Records], retried: bool = False
    ) -> Batches:
        work = self.work
        read = Counter[str]()
        content: dict[str, int] = {}
        spills: dict[str, RowFile] = {}
        for some in records:
            source = some.source
            read[source.name] += len(some.batch)
            if not retried:
                content[source.name] = sampled(some.batch, content.get(source.name, 0))
            if source.spilled and not retried:
                _spill(spills, work, source, some.batch, partition)
            self._take_in(task, some)
            yield from task.outbox.taken()
        files = task.finish()
        spilled = []
        for name, file in sorted(spills.items()):
            path, rows, seal = file.finish()
            task.outbox.seal(seal.to_bytes(8, "little", signed=True))
            spilled.append((name, f"source/{name}/{path}", rows))
        about = {
            "partition": partition,
            "level": 1,
            "retried" if retried else "read": read,
            "content": content,
            "files": files,
            "spilled": spilled,
        }
        yield from end(task, work, 1, about)

    def _take_in(self, task: Task, some: Records) -> None:
        work, source = self.work, some.source
        n = len(some.batch)
        identity = some.identity
        if identity is None and source.name in work.layout.needs_identity:
            identity = source.identity(some.batch, work.number, some.partition, some.first)
        if not source.tracked:
            nobody = Owners(np.full(n, NONE, np.int64))
            task.take_in(source.name, DEFAULT_STREAM, Rows(some.batch, nobody, identity))
            return

        def load() -> tuple[Int64s, Int64s]:
            roots = source.roots(some.partition, some.first, n, some.attempts)
            return roots, np.zeros(n, np.int64)

        chunk = task.chunks.add(n, load, source.number)
        # Two records of one id are the source's mistake; that a retry meets one is ours.
        if source.claims and some.partition != RETRIES:
            task.claim(source.claim_ids(some.batch), CLAIM + source.number)
        owners = Owners(np.arange(chunk.first, chunk.first + n, dtype=np.int64))
        rows = Rows(some.batch, owners, identity, chunk)
        good = np.ones(n, np.bool_)
        nameless = source.nameless(some.batch)
        if nameless is not None:
            reason = null_message_id(source.name, source.message_id)
            task.fail(Owners(owners.ids[nameless]), [reason], source.name)
            good &= ~nameless
        if work.rejected:
            bad = good & np.isin(chunk.roots, np.array(list(work.rejected), np.int64))
            if bad.any():
                task.fail(Owners(owners.ids[bad]), [killed_worker(final=True)], source.name)
                good &= ~bad
        if not good.all():
            rows = some_rows(rows, np.flatnonzero(good))
        if len(rows):
            task.take_in(source.name, DEFAULT_STREAM, rows)
        task.close(chunk)


def sampled(batch: pa.RecordBatch, before: int) -> int:
    """Return a fingerprint of a partition's rows so far: where its chunks end, and with which rows.

    At hardly any cost it tells a source that is cut into other partitions when it is read again.
    """
    ends = [
        _sample(column.slice(row, 1)) for row in (0, len(batch) - 1) for column in batch.columns
    ]
    return fingerprint(repr([len(batch), *ends]).encode("utf-8", "surrogatepass"), before)


def _sample(value: pa.Array) -> int | str:
    """Return what tells a column of one row from others, whatever it holds."""
    try:
        return int(hash_columns([value], 1)[0])
    except TypeError:
        # Maps, as Arrow shows them: the beginnings of long texts, and of long maps both ends.
        # Python knows no year beyond 9999, nor what some bytes of text mean.
        return str(value.to_string())


def _spill(
    spills: dict[str, RowFile], work: Work, source: Source, batch: pa.RecordBatch, partition: int
) -> None:
    file = spills.get(source.name)
    if file is None:
        context = TaskContext.get()
        assert context is not None
        directory = f"{work.directory}/source/{source.name}"
        file = RowFile(directory, source.schema, partition, context.taskAttemptId())
        spills[source.name] = file
    file.write(batch)


def end(task: Task, work: Work, level: int, about: dict[str, Any]) -> Batches:
    """End a task's output: with trailers, or with its results where nothing is settled."""
    about["untracked_failures"] = task.untracked_failures
    about["raised"] = {name: raised.to_json() for name, raised in task.raised.items()}
    said = json.dumps(about, sort_keys=True).encode()
    if work.layout.settles:
        task.outbox.send_trailers(work.sends(level), said)
        yield from task.outbox.taken()
        return
    rows = [(ABOUT, said)]
    for number, tables in sorted(task.failed.items()):
        reasons = earliest(tables)
        rows.append((UNSETTLED, to_stream(_unsettled(reasons, number))))
    yield result(rows)


def _unsettled(reasons: pa.Table, number: int) -> pa.Table:
    n = len(reasons)
    tasks = pa.array(np.full(n, number, np.int32))
    names = pa.array([Status.FAILED.name] * n, pa.string())
    texts = reasons["text"].combine_chunks().dictionary_encode()
    return pa.table([reasons["root_id"], tasks, names, texts], schema=SETTLED)


class Slice(NamedTuple):
    """Some of the rows of a spout that are due."""

    spout: str
    file: WorkFile
    first: int
    rows: int


@dataclass(frozen=True)
class RetryStage(FirstStage):
    """Reads records that are due; what it maps are the numbers of slices."""

    slices: tuple[Slice, ...] = ()

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        task, partition = _begin(self.work, 1)
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        records = (one for number in numbers for one in self._slice(self.slices[number]))
        with task:
            yield from self._run(task, partition, records, retried=True)

    def _slice(self, some: Slice) -> Iterator[Records]:
        source = self.sources[some.spout]
        table = read_due(some.file).slice(some.first, some.rows)
        for one in due_records(source, table, some.first):
            identity = None
            if some.spout in self.work.layout.needs_identity:
                assert one.identity is not None
                message_ids, attempts, _ = one.identity
                identity = Identity(message_ids, attempts, source.stable_ids(message_ids))
            yield one._replace(identity=identity)


def read_due(file: WorkFile) -> pa.Table:
    """Return the rows of a file of records that are due, in place; raises as `read_rows` does."""
    return read_whole(file)


def due_records(source: Source, due: pa.Table, first: int = 0) -> Iterator[Records]:
    """Return records that are due, from place ``first`` on, in as few pieces as there may be.

    Their identities have no stable ids.
    """
    for batch in chunked(due.to_batches(), len(due)):
        message_ids, attempts = batch.column(MESSAGE_ID), batch.column(ATTEMPT).to_numpy()
        identity = Identity(message_ids, attempts, np.empty(0, np.int64))
        yield Records(source, source.rows(batch), RETRIES, first, attempts, identity)
        first += len(batch)


@dataclass(frozen=True)
class NextStage:
    """Runs the bolts of one level on what was sent to it."""

    work: Work
    level: int

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow: rows of the exchange before it."""
        task, partition = _begin(self.work, self.level)
        with task:
            yield from self._run(task, partition, batches)

    def _run(self, task: Task, partition: int, batches: Batches) -> Batches:
        work = self.work
        inbox = Inbox(self.level)
        for batch in batches:
            passed = inbox.read(batch)
            if passed is not None:
                yield passed
        inbox.check()
        edges = {edge.index: edge for edge in work.layout.edges}
        for edge, rows in self._chunks(inbox.tuples):
            self._take_in(task, edges[edge], rows)
            yield from task.outbox.taken()
        files = task.finish()
        seen = inbox.sightings(origin_of(self.level, partition))
        task.outbox.send(partition % work.dests, SETTLE, SEEN, seen)
        about = {
            "partition": partition,
            "level": self.level,
            "files": files,
        }
        yield from end(task, work, self.level, about)

    def _chunks(self, rows: list[Row]) -> Iterator[tuple[int, list[Row]]]:
        """Rows of one edge at a time, in an order that does not depend on when they came."""
        number = {
            edge.index: place
            for place, name in enumerate(self.work.layout.at(self.level))
            for edge in self.work.layout.into(name)
        }
        rows = sorted(rows, key=lambda row: (number[row.edge], row.edge, row.origin, row.seq))
        waiting: list[Row] = []
        size = 0
        for row in rows:
            row_size = len(row.blob) + len(row.side)
            full = size >= _CHUNK_BYTES or size + row_size > _MOST_CHUNK_BYTES
            if waiting and (row.edge != waiting[0].edge or full):
                yield waiting[0].edge, waiting
                waiting, size = [], 0
            waiting.append(row)
            size += row_size
        if waiting:
            yield waiting[0].edge, waiting

    def _take_in(self, task: Task, edge: Edge, rows: list[Row]) -> None:
        schema = self.work.edge_schema(edge)
        batch = one_batch([pa.ipc.read_record_batch(row.blob, schema) for row in rows])
        runs = concat([Runs.unpack(row.side) for row in rows])
        chunk = task.chunks.add(len(runs.rows), lambda: (runs.roots, runs.vals), ACK, runs.offsets)
        numbers = np.arange(chunk.first, chunk.first + chunk.groups)
        owners = np.repeat(numbers, runs.rows)
        identity = None
        if edge.target in self.work.layout.needs_identity:
            message_ids, attempts, stable_ids = batch.columns[-len(IDENTITY_FIELDS) :]
            identity = Identity(message_ids, attempts.to_numpy(), stable_ids.to_numpy())
            batch = batch.select(batch.schema.names[: -len(IDENTITY_FIELDS)])
        task.take_in_for(edge, Rows(batch, Owners(owners), identity, chunk))
        task.close(chunk)


#: Blobs of a chunk: some 64 Ki short rows, or a few long ones.
_CHUNK_BYTES = 1 << 20
#: What no blob makes a chunk larger than, unless it is by itself.
_MOST_CHUNK_BYTES = 1 << 28


@dataclass(frozen=True)
class LastStage:
    """Settles the ledger rows of a shard, or of several whole ones."""

    work: Work

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow: rows of the exchange before it."""
        context = TaskContext.get()
        assert context is not None
        inbox = Inbox(SETTLE)
        for batch in batches:
            inbox.read(batch)
        inbox.check()
        rows = [(ABOUT, said) for every in inbox.about.values() for said in sorted(every)]
        rows += [(SIGHTED, blob) for blob in inbox.seen]
        seer = origin_of(SETTLE, context.partitionId())
        rows.append((SIGHTED, inbox.sightings(seer)))
        yield result(rows + self._settle(inbox.ledger))

    def _settle(self, blobs: list[pa.Buffer]) -> list[tuple[int, bytes]]:
        events, reasons = [], []
        for blob in blobs:
            part = wire.unpack_blob(np.frombuffer(blob, np.uint8))
            if isinstance(part, wire.Events):
                events.append(part)
            else:
                reasons.append(part)
        expected = sum(int((part.tasks >= 0).sum()) for part in events)
        # Blobs hold roots in no order of this table's, whose seed nothing else has.
        ledger = new_ledger(self.work.key ^ 1, False, expected)
        for part in events:
            fold(ledger, part)
        del events, blobs
        settled = ledger.settle()
        still_open = ledger.entries()
        acked = settled.statuses == Status.ACKED
        numbers, counts = np.unique(settled.tasks[acked], return_counts=True)
        counted = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        bad = np.flatnonzero(~acked)
        roots = np.concatenate([settled.root_ids[bad], still_open.root_ids])
        tasks = np.concatenate([settled.tasks[bad], still_open.tasks])
        names = [Status(status).name for status in settled.statuses[bad].tolist()]
        names += [Status.OPEN.name] * len(still_open)
        found = [(COUNTED, json.dumps(counted).encode())]
        if len(roots):
            # Many fail alike when a service is down: each text goes to the driver once.
            texts = look_up(earliest(reasons), roots)[0].dictionary_encode()
            columns = [pa.array(roots), pa.array(tasks), pa.array(names, pa.string()), texts]
            table = pa.RecordBatch.from_arrays(columns, schema=SETTLED)
            found.append((UNSETTLED, to_stream(table)))
        return found


@dataclass(frozen=True)
class PickStage:
    """Reads the rows of spouts again and returns those of some roots, or of repeated claims.

    Parameters
    ----------
    roots, claims : mapping from str to numpy.ndarray of int64
        By spout, sorted.
    """

    first: FirstStage
    roots: Mapping[str, Int64s]
    claims: Mapping[str, Int64s]

    def __call__(self, batches: Batches) -> Batches:
        """Serve mapInArrow."""
        context = TaskContext.get()
        assert context is not None
        content: dict[str, int] = {}
        for some in self.first._records(batches, context.partitionId()):
            name = some.source.name
            content[name] = sampled(some.batch, content.get(name, 0))
            rows = pick(some, self.roots, self.claims, self.first.work.number)
            if len(rows):
                yield result([(PICKED, to_stream(rows))])
        about = {"partition": context.partitionId(), "content": content}
        yield result([(ABOUT, json.dumps(about).encode())])


_PICKED_HEAD = pa.schema(
    [
        (ROOT_ID, pa.int64()),
        (PLACE, pa.int64()),
        (MESSAGE_ID, pa.string()),
        (ATTEMPT, pa.int32()),
    ]
)


def pick(
    some: Records, roots: Mapping[str, Int64s], claims: Mapping[str, Int64s], number: int
) -> pa.RecordBatch:
    """Return the records of these roots, or of these claims, with what is known of them.

    The spout's name goes along in the metadata of the schema.
    """
    source = some.source
    ids = source.roots(some.partition, some.first, len(some.batch), some.attempts)
    wanted = np.isin(ids, roots.get(source.name, np.empty(0, np.int64)))
    repeated = claims.get(source.name)
    if repeated is not None:
        wanted |= np.isin(source.claim_ids(some.batch), repeated)
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
        attempts = np.zeros(len(places), np.int32)
    columns = [
        pa.array(ids[places]),
        due_places,
        message_ids,
        pa.array(attempts),
        *rows.columns,
    ]
    schema = pa.schema([*_PICKED_HEAD, *source.schema])
    schema = schema.with_metadata({"spout": source.name})
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _some_message_ids(some: Records, places: Int64s, number: int) -> pa.Array:
    if some.source.message_id:
        rows = some.batch.take(pa.array(places))
        return some.source.message_ids(rows, number, some.partition, 0)
    return stamps(number, some.partition, places + some.first)
