"""The bolts of one task. Rows pass from one bolt to the next, depth first.

A stage is all the components between two exchanges.  Input rows go to its first bolts, and emitted
rows to the next ones.  Rows for a later stage leave through `shuffle_writer`; rows for a sink are
written to `row_files`.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import bytes_before, end_within, offsets_of
from ackcore._files.journal import Journal, JournalAnswers
from ackcore._records import Int64s
from ackcore.calls.usage import UsageCounts, largest_sums
from ackcore.ids import edge_ids
from ackcore.spark.stores.object_journal import ObjectJournal
from ackcore.spark.stores.opening import is_bucket, open_store
from ackcore.spark.tasks.dedup_executor import DedupExecutor, SeenKeys
from ackcore.spark.tasks.expected_rows import ExpectedRows
from ackcore.spark.tasks.inflight_markers import TaskAttempt
from ackcore.spark.tasks.ledger_rows import LedgerRows
from ackcore.spark.tasks.row_files import SinkRowWriter
from ackcore.spark.tasks.shuffle_writer import ShuffleWriter
from ackcore.spark.tasks.spec import CHUNK_BYTES, TaskSpec
from ackcore.spark.tasks.time_limit import TimeLimit
from ackcore.spark.tasks.tracing import Tracer
from ackcore.spark.tasks.tracking import (
    NO_COLUMNS,
    AnchoredRows,
    Chunk,
    Chunks,
    Owners,
    running_counts,
)
from ackcore.topology.components import output_streams
from ackcore.topology.dedup import DUPLICATES, DedupBolt
from ackcore.topology.executors import Executor
from ackcore.topology.journaled_executor import Answers, context_of
from ackcore.topology.table_views import TableView
from ackcore.topology.tuples import Anchors, Emission, FailedInputs, Identity, Results


class OpenRows(NamedTuple):
    """Rows that a bolt got in one call, without their columns.

    ``first``: the handle of the first row, its number among all rows of the bolt; the others
    follow. ``groups``: the number of groups (see `Chunk`) in the task before the call was made.
    """

    first: int
    rows: AnchoredRows
    groups: int


@dataclass(slots=True)
class BoltInstance:
    """One bolt in this task, and its rows whose tuples may be neither acked nor failed yet."""

    name: str
    executor: Executor
    open_rows: list[OpenRows] = field(default_factory=list)
    next: int = 0  # the handle of the next row
    #: By stream: the number of children of each tuple, from the first of ``open_rows`` on.
    children: dict[str, Int64s] = field(default_factory=dict)

    def owners_of(self, handles: Int64s) -> Iterator[tuple[Owners, Int64s]]:
        """Yield the owners of some open tuples, and these tuples' indexes in ``handles``.

        ``handles``: the tuples' numbers among all of the bolt's; see `OpenRows`. Yields a pair for
        each call whose rows are among them.
        """
        for part in self.open_rows:
            own = (handles >= part.first) & (handles < part.first + len(part.rows))
            places = np.flatnonzero(own)
            if len(places):
                yield part.rows.owners.take(handles[places] - part.first, None), places

    def anchored(self, emission: Emission, with_identity: bool) -> AnchoredRows:
        """Return emitted rows with their owners: the groups of the tuples that are their anchors.

        ``with_identity``: whether a reader of the rows needs their identity.
        """
        anchors = emission.anchors
        last = self.open_rows[-1] if self.open_rows else None
        if last is not None and (not len(anchors.handles) or anchors.handles.min() >= last.first):
            rows, first = last.rows, last.first
        else:
            rows, first = _joined(self.open_rows)
        local = anchors.handles - first
        only_chunk = rows.only_chunk if anchors.offsets is None else None
        identity = None
        if with_identity:
            assert rows.identity is not None
            identity = self._identity(emission.stream, rows.identity, first, local, anchors)

        def owners() -> Owners:
            return rows.owners.take(local, anchors.offsets)

        return AnchoredRows(emission.batch, owners, identity, only_chunk)

    def _identity(
        self, stream: str, parents: Identity, first: int, local: Int64s, anchors: Anchors
    ) -> Identity:
        """Return the identity of emitted rows: that of their first anchors, with new stable ids.

        A stable id depends on the anchor's, and on the row's number among its children.

        ``parents``: the identity of open tuples from the handle ``first`` on. ``local``: the
        handles of the anchors, less ``first``.
        """
        if anchors.offsets is None:
            heads, have = local, None
        else:
            starts = anchors.offsets[:-1]
            have = np.diff(anchors.offsets) > 0
            padded = local if len(local) else np.zeros(1, np.int64)
            heads = np.where(have, padded[np.where(have, starts, 0)], 0)
        if not len(parents.stable_ids):  # only unanchored rows, and no input
            n = len(heads)
            return Identity(pa.nulls(n, pa.string()), np.zeros(n, np.int32), np.zeros(n, np.int64))
        counts = self._count(stream)[first - self.open_rows[0].first :]
        if have is None:
            ordinals = running_counts(heads, counts)
        else:  # unanchored rows are children of no row
            ordinals = np.zeros(len(heads), np.int64)
            ordinals[have] = running_counts(heads[have], counts)
        stable = edge_ids(0, parents.stable_ids[heads], f"{self.name}/{stream}", 0, ordinals)
        message_ids = parents.message_ids.take(pa.array(heads))
        attempts = parents.attempts[heads]
        if have is not None and not have.all():
            stable[~have] = 0
            attempts = np.where(have, attempts, 0).astype(np.int32)
            message_ids = parents.message_ids.take(pa.array(heads, mask=~have))
        return Identity(message_ids, attempts, stable)

    def _count(self, stream: str) -> Int64s:
        """Return each open tuple's number of children on a stream, which the caller increments."""
        known = self.children.get(stream, np.empty(0, np.int64))
        counts = np.zeros(self.next - self.open_rows[0].first, np.int64)
        counts[: len(known)] = known
        self.children[stream] = counts
        return counts


@dataclass(eq=False, repr=False)
class Bolts:
    """The bolts of a task, each created when its first rows arrive.

    ``time_limit``: the time limit of each call of a bolt. ``shuffle_writer``: the writer of rows
    that leave the stage. ``ledger_rows``: the collector of failures.
    """

    _spec: TaskSpec
    _attempt: TaskAttempt
    _time_limit: TimeLimit
    _chunks: Chunks
    _shuffle_writer: ShuffleWriter
    _ledger_rows: LedgerRows
    _instances: dict[str, BoltInstance] = field(default_factory=dict)
    _answers: dict[str, Answers] = field(default_factory=dict)
    _tables: dict[str, TableView] = field(default_factory=dict)
    _journals: list[JournalAnswers] = field(default_factory=list)
    #: The number of calls of each bolt's ``process`` that raised.
    raised: Counter[str] = field(default_factory=Counter)
    #: The number of times that a circuit breaker opened.
    breaker_trips: int = 0
    #: The usage that the calls of each bolt reported.
    usage: dict[str, UsageCounts] = field(default_factory=lambda: defaultdict(UsageCounts))
    #: The number of tuples that components emitted to streams with readers, including those of
    #: calls that were repeated for parts of a batch.
    emitted: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    #: The trace of a share of the roots; None if no roots are traced.
    tracer: Tracer | None = None

    def __post_init__(self) -> None:
        spec, partition = self._spec, self._attempt.partition
        self.files = SinkRowWriter(spec.work, spec.schemas, partition)
        self.expected = ExpectedRows(spec, self._time_limit, self._ledger_rows)
        if spec.trace_per_million:
            self.tracer = Tracer(spec.trace_per_million, partition, self._chunks)

    def deliver(self, source: str, stream: str, rows: AnchoredRows) -> None:
        """Pass rows that meet their expectations to bolts, later stages and files of sinks.

        Fail or drop the others. Pass nothing once the run will be refused (`ExpectedRows.fatal`).
        """
        # A spout has no rows if none of its source's rows could be decoded.
        if len(rows) and (source, stream) in self._spec.checks:
            rows = self.expected.passing(source, stream, rows)
        if not len(rows) or self.expected.fatal is not None:
            return
        self.emitted[source][stream] += len(rows)
        layout = self._spec.layout
        for sub in layout.out(source, stream):
            if sub.level_to > self._attempt.level:
                self._shuffle_writer.send(sub, rows)
            else:
                self.process(sub.target, source, stream, rows)
        if layout.sunk(source, stream):
            self.files.write(source, stream, rows, self._chunks)

    def process(self, target: str, source: str, stream: str, rows: AnchoredRows) -> None:
        """Call the bolt ``target`` with rows; fail inputs that it failed, deliver what it emits."""
        bolt = self._instances.get(target)
        if bolt is None:
            bolt = self._instances[target] = BoltInstance(target, self._executor(target))
        # A bolt may have all rows of a task open, so their columns are not kept here.
        bare = rows.without_columns()
        bolt.open_rows.append(OpenRows(bolt.next, bare, self._chunks.groups))
        bolt.next += len(rows)
        started_ns = time.time_ns() if self.tracer is not None else 0
        of = self._spec.components.get(source)
        shown = of.spout if isinstance(of, DedupBolt) else source
        with self._time_limit.on(target):
            results = bolt.executor.process(shown, stream, rows.batch, rows.identity)
        if self.tracer is not None:
            took_ns = time.time_ns() - started_ns
            self.tracer.step(target, rows, started_ns, took_ns, len(rows))
        self._take(bolt, results)
        if not results.open:
            bolt.open_rows.clear()
            bolt.children.clear()

    def _executor(self, name: str) -> Executor:
        component = self._spec.components[name]
        if isinstance(component, DedupBolt):
            keys = self._spec.tables[name].reader()
            assert isinstance(keys, SeenKeys)
            return DedupExecutor(component, keys)
        return self._spec.make_executor(
            name,
            component,
            task=self._attempt.partition,
            batch_id=self._spec.number,
            reject=self._spec.reject,
            answers=self._answers_of(name) if component.journal else None,
            tasks=self._spec.tasks_at_once(name),
            progressed=self._time_limit.progressed,
            tables={table: self._table(table) for table in component.uses},
        )

    def _table(self, name: str) -> TableView:
        """Return a table's view. It is opened here, not in a bolt: damage must fail no record."""
        if name not in self._tables:
            self._tables[name] = TableView(name, self._spec.tables[name].reader())
        return self._tables[name]

    def _answers_of(self, name: str) -> Answers:
        """Return the journal of a bolt's answers, the same for all its instances in the task.

        A later attempt or run with the same rows uses the same directory: its name contains the
        number of tasks, which determines the rows of each task.
        """
        if name not in self._answers:
            spec, attempt = self._spec, self._attempt
            schemas = output_streams(spec.components[name])
            task = f"{attempt.level}-{attempt.partition}-{spec.dests}"
            context = context_of(spec.key, name, schemas)
            journal = _journal(spec.journal, f"{name}/{task}", context)
            self._journals.append(journal)
            self._answers[name] = Answers(name, schemas, journal, spec.budget(name))
        return self._answers[name]

    def spent(self) -> dict[str, dict[str, float]]:
        """Return the cost of this task's calls in this micro-batch, by bolt with a budget and key.

        It includes earlier runs, whose calls are in the journal. All but the `MOST_KEYS` keys of
        the highest cost are under `OTHER_KEYS`.
        """
        found = {}
        for name in self._spec.layout.at(self._attempt.level):
            if self._spec.budget(name) is not None:
                budget = self._answers_of(name).budget
                assert budget is not None
                found[name] = largest_sums(budget.by_key)
        return found

    def close(self) -> None:
        """Close the journals and unfinished files."""
        self.files.close()
        for journal in self._journals:
            journal.close()

    def _take(self, bolt: BoltInstance, results: Results) -> None:
        for failure in results.failures:
            self._fail(bolt, failure)
        if results.raised:
            self.raised[bolt.name] += results.raised
        self.breaker_trips += results.breaker_trips
        if results.used is not None:
            self.usage[bolt.name].add(results.used)
        layout = self._spec.layout
        for emission in results.emissions:
            stream = emission.stream
            subscriptions = layout.out(bolt.name, stream)
            if subscriptions or layout.sunk(bolt.name, stream):
                with_identity = any(sub.target in layout.needs_identity for sub in subscriptions)
                for rows in _cut(bolt.anchored(emission, with_identity)):
                    self.deliver(bolt.name, stream, rows)
            elif stream == DUPLICATES and isinstance(self._spec.components[bolt.name], DedupBolt):
                self.emitted[bolt.name][stream] += len(emission.batch)

    def _fail(self, bolt: BoltInstance, failure: FailedInputs) -> None:
        reasons = failure.reasons
        for owners, places in bolt.owners_of(failure.handles):
            some = reasons if len(reasons) == 1 else [reasons[i] for i in places.tolist()]
            self._ledger_rows.fail(owners, some, bolt.name)

    @property
    def open_rows(self) -> list[AnchoredRows]:
        """The rows that bolts got and whose tuples may be neither acked nor failed yet."""
        return [part.rows for bolt in self._instances.values() for part in bolt.open_rows]

    def open_groups(self, chunk: Chunk) -> Int64s:
        """Return the groups of ``chunk``, the last one, with tuples that may still be open.

        An open tuple is neither acked nor failed yet. The groups are numbers in the chunk, from 0,
        in any order, and may be repeated.
        """
        found = [np.empty(0, np.int64)]
        for bolt in self._instances.values():
            for part in reversed(bolt.open_rows):
                if part.groups <= chunk.first:
                    break  # these rows are older than the chunk
                if part.rows.only_chunk in (None, chunk):
                    found.append(part.rows.owners.ids - chunk.first)
        places = np.concatenate(found)
        return places[(places >= 0) & (places < chunk.groups)]

    @property
    def used(self) -> bool:
        """Whether any bolt of the task exists; `flush` removes all but those of ``dedup``."""
        return bool(self._instances)

    def flush(self) -> None:
        """Flush and clean up users' bolts along the data flow; later rows get new instances."""
        for name in self._spec.layout.at(self._attempt.level):
            bolt = self._instances.get(name)
            # Later rows may be copies of those that passed dedup, which holds no tuple open.
            if bolt is not None and not isinstance(bolt.executor, DedupExecutor):
                started_ns = time.time_ns() if self.tracer is not None else 0
                with self._time_limit.on(name):
                    results = bolt.executor.flush()
                if self.tracer is not None:
                    took_ns = time.time_ns() - started_ns
                    for part in bolt.open_rows:
                        self.tracer.step(name, part.rows, started_ns, took_ns, 0)
                self._take(bolt, results)
                with self._time_limit.on(name):
                    bolt.executor.cleanup()
                del self._instances[name]


def _journal(place: str, below: str, context: bytes) -> JournalAnswers:
    """Open the journal of answers ``below`` a directory or a bucket's URL."""
    if is_bucket(place):
        return ObjectJournal(open_store(place, "journal"), below, context)
    return Journal(os.path.join(place, below), context)


def _cut(rows: AnchoredRows) -> Iterator[AnchoredRows]:
    """Yield rows in slices of at most `CHUNK_BYTES`, or of one row that is larger."""
    n = len(rows)
    if bytes_before(rows.batch, n) <= CHUNK_BYTES:
        yield rows
        return
    start = 0
    while start < n:
        stop = max(start + 1, end_within(rows.batch, start, CHUNK_BYTES))
        identity = rows.identity and rows.identity.part(start, stop)
        owners = rows.owners.take(np.arange(start, stop), None)
        yield AnchoredRows(rows.batch.slice(start, stop - start), owners, identity, rows.only_chunk)
        start = stop


def _joined(parts: list[OpenRows]) -> tuple[AnchoredRows, int]:
    """Return all open rows together, without columns, and the handle of the first row."""
    if not parts:
        none = Identity(pa.array([], pa.string()), np.empty(0, np.int32), np.empty(0, np.int64))
        return AnchoredRows(NO_COLUMNS, Owners(np.empty(0, np.int64)), none), 0
    owners = [part.rows.owners for part in parts]
    offsets = None
    if any(own.offsets is not None for own in owners):
        offsets = offsets_of(np.concatenate([own.sizes for own in owners]))
    together = Owners(np.concatenate([own.ids for own in owners]), offsets)
    identities = [part.rows.identity for part in parts]
    identity = None
    if all(one is not None for one in identities):
        found = [one for one in identities if one is not None]
        identity = Identity(
            pa.concat_arrays([one.message_ids for one in found]),
            np.concatenate([one.attempts for one in found]),
            np.concatenate([one.stable_ids for one in found]),
        )
    return AnchoredRows(NO_COLUMNS, together, identity), parts[0].first
