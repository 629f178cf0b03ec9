"""One task of one stage: bolts that hand rows to each other, and what leaves them.

A stage is all the components between two exchanges.  Rows that come in are handed to the first of
them, what they emit to the next, depth first; what is bound for a later stage is dealt out by its
grouping, packed and sent; what a sink is to get is written to a file.  When a chunk of rows is
through, its groups leave their ledger rows (`tracking`).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from ackcore import ACK, FAIL
from ackcore._records import Int64s
from ackcore._shuffle import split_by_shard
from ackcore.arrow import bytes_before, end_within, hash_columns, offsets_of, take_rows
from ackcore.ids import edge_ids
from ackcore.spark.settle import wire
from ackcore.spark.settle.reasons import NO_TIME, killed_worker, reasons_of
from ackcore.spark.tasks.exchange import SETTLE, Outbox, origin_of
from ackcore.spark.tasks.inflight import InFlight
from ackcore.spark.tasks.markers import Place
from ackcore.spark.tasks.source import CHUNK_BYTES
from ackcore.spark.tasks.tracking import (
    NONE,
    Chunk,
    Chunks,
    Owners,
    Rows,
    draw_edges,
    running_counts,
    some_rows,
    untracked,
)
from ackcore.spark.tasks.workfiles import RowFiles
from ackcore.topology.components import Component
from ackcore.topology.executors import Executor, executor_for
from ackcore.topology.groupings import All, Global, PartialKey
from ackcore.topology.stage_layout import Edge, Layout
from ackcore.topology.tuples import Anchors, Emission, Failure, Identity, Raised, Reason, Results

#: What carries a tuple's identity beside its fields.
IDENTITY_FIELDS = (
    pa.field("_ackcore_message_id", pa.string()),
    pa.field("_ackcore_attempt", pa.int32()),
    pa.field("_ackcore_stable_id", pa.int64()),
)

#: What one tuple may have if it is sent to another task.  A row of a shuffle is one array of the
#: JVM's, which has at most 2 GiB, and is made in another of twice its size.
MOST_ROW_BYTES = 1 << 30


@dataclass(frozen=True)
class Work:
    """What every task of a run is told.

    ``key`` is the micro-batch's; ``dests`` the number of tasks behind every exchange.  ``suspects``
    says how often each was alone in flight as an attempt died; ``rejected`` are not run at all;
    ``isolates`` is whether an attempt may go by what those before it had in flight.
    """

    layout: Layout
    components: Mapping[str, Component]
    schemas: Mapping[tuple[str, str], pa.Schema]
    key: int
    number: int
    dests: int
    chunk_rows: int
    directory: str
    reject: tuple[str | type[BaseException], ...]
    careful: bool = False
    suspects: Mapping[int, int] = field(default_factory=dict)
    rejected: frozenset[int] = frozenset()
    isolates: bool = False
    timeout_s: int | None = None

    def sends(self, level: int) -> tuple[int, ...]:
        """Return the levels at which something from this one may be opened."""
        if not self.layout.settles:
            return ()
        later = {edge.level_to for edge in self.layout.edges if self._leaves(edge, level)}
        return (*sorted(later), SETTLE)

    def _leaves(self, edge: Edge, level: int) -> bool:
        return edge.level_from == level and edge.level_to > level

    def edge_schema(self, edge: Edge) -> pa.Schema:
        """Return the columns of what is sent along an edge."""
        schema = self.schemas[edge.source, edge.stream]
        if edge.target in self.layout.needs_identity:
            for column in IDENTITY_FIELDS:
                schema = schema.append(column)
        return schema


class _Segment(NamedTuple):
    """Rows that were handed to a component at a time: tuples ``first`` and the ones after it."""

    first: int
    rows: Rows


@dataclass(slots=True)
class _Box:
    """A component of the stage, and the rows of which tuples may still be open."""

    name: str
    executor: Executor
    segments: list[_Segment] = field(default_factory=list)
    next: int = 0
    #: By stream: how many children each tuple has, from the first of ``segments`` on.
    children: dict[str, Int64s] = field(default_factory=dict)

    def count(self, stream: str) -> Int64s:
        """Return how many children of a stream each tuple has, to count on in."""
        known = self.children.get(stream, np.empty(0, np.int64))
        counts = np.zeros(self.next - self.segments[0].first, np.int64)
        counts[: len(known)] = known
        self.children[stream] = counts
        return counts


class Task:
    """One task of a stage.

    Parameters
    ----------
    work : Work
        What the run is.
    level, partition, attempt : int
        Which task this is, and the number that Spark gave this try at it.
    """

    def __init__(self, work: Work, level: int, partition: int, attempt: int) -> None:
        self._work = work
        self._level = level
        self._partition = partition
        self._attempt = attempt
        self._settles = work.layout.settles
        self._boxes: dict[str, _Box] = {}
        self._files: dict[tuple[str, str], RowFiles] = {}
        self.chunks = Chunks()
        self.outbox = Outbox(origin_of(level, partition), work.dests)
        #: Failures of tuples that nobody tracks.
        self.untracked_failures = 0
        #: By bolt, what it raised.
        self.raised: dict[str, Raised] = defaultdict(Raised)
        #: By spout, roots that failed and why: where nothing is settled.
        self.failed: dict[int, list[pa.Table]] = {}
        self._events: list[tuple[Int64s, Int64s, int]] = []
        self._reasons: list[pa.Table] = []
        self._turn = Counter[int]()
        place = Place(level, partition, attempt)
        self._in_flight = InFlight(
            work.directory, place, work.careful, work.suspects, work.isolates, work.timeout_s
        )

    # ---------------------------------------------------------------- rows from one to the next

    def take_in(self, source: str, stream: str, rows: Rows) -> None:
        """Hand rows of a spout to all who read it in this stage, and send on the rest."""
        for part in self._parts(source, rows):
            self._deliver(source, stream, part)

    def take_in_for(self, edge: Edge, rows: Rows) -> None:
        """Hand rows that came along an edge to its target."""
        for part in self._parts(edge.source, rows):
            self._process(edge.target, edge.source, edge.stream, part)

    def _deliver(self, source: str, stream: str, rows: Rows) -> None:
        if not len(rows):
            return
        layout = self._work.layout
        for edge in layout.out(source, stream):
            if edge.level_to > self._level:
                self._send(edge, rows)
            else:
                self._process(edge.target, source, stream, rows)
        if layout.sunk(source, stream):
            self._write(source, stream, rows)

    def _process(self, target: str, source: str, stream: str, rows: Rows) -> None:
        box = self._boxes.get(target)
        if box is None:
            box = self._boxes[target] = _Box(target, self._executor(target))
        box.segments.append(_Segment(box.next, rows))
        box.next += len(rows)
        with self._in_flight.timed(target):
            results = box.executor.process(source, stream, rows.batch, rows.identity)
        self._take(box, results)
        if not results.open:
            box.segments.clear()
            box.children.clear()

    def _executor(self, name: str) -> Executor:
        return executor_for(
            name,
            self._work.components[name],
            task=self._partition,
            batch_id=self._work.number,
            reject=self._work.reject,
        )

    def _take(self, box: _Box, results: Results) -> None:
        for failure in results.failures:
            self._fail_tuples(box, failure)
        if results.raised is not None:
            self.raised[box.name] += results.raised
        layout = self._work.layout
        for emission in results.emissions:
            stream = emission.stream
            if layout.out(box.name, stream) or layout.sunk(box.name, stream):
                for rows in _cut(self._anchored(box, emission)):
                    self._deliver(box.name, stream, rows)

    def _fail_tuples(self, box: _Box, failure: Failure) -> None:
        reasons = failure.reasons
        for segment, places in _by_segment(box.segments, failure.handles):
            rows = failure.handles[places] - segment.first
            owners = segment.rows.owners.take(rows, None)
            texts = reasons if len(reasons) == 1 else [reasons[i] for i in places.tolist()]
            self.fail(owners, texts, box.name)

    def _anchored(self, box: _Box, emission: Emission) -> Rows:
        """What a component emitted, hung from the groups that its anchors hang from."""
        anchors = emission.anchors
        wants_identity = any(
            edge.target in self._work.layout.needs_identity
            for edge in self._work.layout.out(box.name, emission.stream)
        )
        last = box.segments[-1] if box.segments else None
        if last is not None and (not len(anchors.handles) or anchors.handles.min() >= last.first):
            rows, local = last.rows, anchors.handles - last.first
            first = last.first
        else:
            rows, first = _joined(box.segments)
            local = anchors.handles - first
        home = rows.home if anchors.offsets is None else None
        identity = None
        if wants_identity:
            assert rows.identity is not None
            identity = self._identity(box, emission.stream, rows.identity, first, local, anchors)

        def owners() -> Owners:
            return rows.owners.take(local, anchors.offsets)

        return Rows(emission.batch, owners, identity, home)

    def _identity(
        self,
        box: _Box,
        stream: str,
        parents: Identity,
        first: int,
        local: Int64s,
        anchors: Anchors,
    ) -> Identity:
        """The identity of emitted rows: their first anchor's, and the place among its children."""
        if anchors.offsets is None:
            heads, have = local, None
        else:
            starts = anchors.offsets[:-1]
            have = np.diff(anchors.offsets) > 0
            padded = local if len(local) else np.zeros(1, np.int64)
            heads = np.where(have, padded[np.where(have, starts, 0)], 0)
        if not len(parents.stable_ids):  # nothing but unanchored rows, and no input
            n = len(heads)
            return Identity(pa.nulls(n, pa.string()), np.zeros(n, np.int32), np.zeros(n, np.int64))
        counts = box.count(stream)[first - box.segments[0].first :]
        if have is None:
            ordinals = running_counts(heads, counts)
        else:  # rows that hang from nothing are nobody's children
            ordinals = np.zeros(len(heads), np.int64)
            ordinals[have] = running_counts(heads[have], counts)
        stable = edge_ids(0, parents.stable_ids[heads], f"{box.name}/{stream}", 0, ordinals)
        message_ids = parents.message_ids.take(pa.array(heads))
        attempts = parents.attempts[heads]
        if have is not None and not have.all():
            stable[~have] = 0
            attempts = np.where(have, attempts, 0).astype(np.int32)
            message_ids = parents.message_ids.take(pa.array(heads, mask=~have))
        return Identity(message_ids, attempts, stable)

    # ---------------------------------------------------------------- out of the stage

    def _send(self, edge: Edge, rows: Rows) -> None:
        batch = rows.batch
        size = bytes_before(batch, len(batch))
        if size > MOST_ROW_BYTES:  # a single row: others are cut before
            text = (
                f"a tuple for {edge.target} has {size} bytes, and no more than {MOST_ROW_BYTES} "
                "cross a shuffle; emit a path or a key of what is so large"
            )
            self.fail(rows.owners, [Reason(edge.source, "TupleTooLarge", text)], edge.source)
            return
        if edge.target in self._work.layout.needs_identity:
            assert rows.identity is not None
            columns = [*batch.columns, rows.identity.message_ids]
            columns += [pa.array(rows.identity.attempts), pa.array(rows.identity.stable_ids)]
            batch = pa.RecordBatch.from_arrays(columns, schema=self._work.edge_schema(edge))
        way = f"{edge.source}/{edge.stream}>{edge.target}"
        tasks = self._tasks(edge)
        if isinstance(edge.grouping, All):
            order = np.arange(len(rows))
            for dest in range(tasks):
                counts = np.zeros(self._work.dests, np.int64)
                counts[dest] = len(rows)
                self._send_dealt(edge, f"{way}#{dest}", rows, batch, order, counts)
            return
        order, counts = self._deal(edge, rows.batch, tasks)
        if tasks < self._work.dests:
            counts = np.concatenate([counts, np.zeros(self._work.dests - tasks, np.int64)])
        if counts.max() < len(rows):
            batch = take_rows(batch, order)
        self._send_dealt(edge, way, rows, batch, order, counts)

    def _send_dealt(
        self, edge: Edge, way: str, rows: Rows, batch: pa.RecordBatch, order: Int64s, counts: Int64s
    ) -> None:
        if rows.home is None and not (rows.owners.ids != NONE).any():
            runs = [untracked(n) for n in counts.tolist()]
            late = None
        else:
            runs, late = draw_edges(self._work.key, way, rows, order, counts, self.chunks)
        if late is not None:
            self._events.append((*late, ACK))
        self.outbox.send_tuples(edge.index, edge.level_to, batch, counts, runs)

    def _tasks(self, edge: Edge) -> int:
        wanted = edge.parallelism
        return self._work.dests if wanted is None else min(wanted, self._work.dests)

    def _deal(self, edge: Edge, batch: pa.RecordBatch, tasks: int) -> tuple[Int64s, Int64s]:
        """Sort row numbers by destination, and count the rows of each."""
        n = len(batch)
        grouping = edge.grouping
        if grouping.keys:
            hashes = hash_columns([batch.column(name) for name in grouping.keys], n)
            if not isinstance(grouping, PartialKey):
                return split_by_shard(hashes, tasks)
            # Rows of a key take turns between two destinations; who is first, the key decides.
            other = edge_ids(0, hashes, "partial_key", 0, 0)
            _, numbers = np.unique(hashes, return_inverse=True)
            counts = np.zeros(int(numbers.max()) + 1, np.int64)
            odd = running_counts(numbers.astype(np.int64), counts) & 1
            return split_by_shard(np.where(odd == 1, other, hashes), tasks)
        if isinstance(grouping, Global):
            dest = 0
        elif edge.spreads:
            # Shuffle: rows in turn, and tasks begin with different destinations.
            start = self._turn[edge.index]
            self._turn[edge.index] += n
            dests = (np.arange(n) + start + self._partition) % tasks
            return np.argsort(dests, kind="stable"), np.bincount(dests, minlength=tasks)
        else:
            dest = self._partition % tasks
        counts = np.zeros(tasks, np.int64)
        counts[dest] = n
        return np.arange(n), counts

    def _write(self, source: str, stream: str, rows: Rows) -> None:
        files = self._files.get((source, stream))
        if files is None:
            schema = self._work.schemas[source, stream]
            files = self._files[source, stream] = RowFiles(
                os.path.join(self._work.directory, "rows", source, stream),
                schema,
                self._partition,
                self._attempt,
            )
        files.write(rows, self.chunks)

    # ---------------------------------------------------------------- failing and acking

    def fail(self, owners: Owners, reasons: list[Reason], component: str) -> None:
        """Fail rows: a reason for each of them, or one for all.

        A fail leaves an edge open that nobody acks, so that no XOR can become zero by it.
        """
        of_row, of_group = owners.pairs()
        tracked = np.zeros(len(owners), np.bool_)
        texts = [reason.encode() for reason in reasons]
        for chunk, places in self.chunks.split(of_group):
            of, at = chunk.entries_of(of_group[places] - chunk.first)
            roots, vals = chunk.roots[at], chunk.vals[at]
            rows = of_row[places][of]
            tracked[rows] = True
            if len(texts) == 1:
                said = pa.array([texts[0]] * len(roots), pa.string())
            else:
                said = pa.array([texts[row] for row in rows.tolist()], pa.string())
            found = reasons_of(roots, NO_TIME, said)
            if found is None:
                continue
            if not self._settles:
                self.failed.setdefault(chunk.task, []).append(found)
                continue
            way = f"{component}!"
            ordinals = running_counts(of_group[places] - chunk.first, chunk.ordinals(way))[of]
            poison = edge_ids(self._work.key, roots, way, vals, ordinals)
            self._events.append((roots, poison, ACK))
            self._events.append((roots, np.zeros(len(roots), np.int64), FAIL))
            self._reasons.append(found)
        self.untracked_failures += int(len(owners) - tracked.sum())

    def close(self, chunk: Chunk) -> None:
        """Let a chunk's groups leave their ledger rows: INITs by a spout's number, or ACKs."""
        if self._settles:
            roots, vals = chunk.acks()
            self._events.append((roots, vals, chunk.task))
            self._send_events()
        chunk.closed = True
        if not any(box.segments for box in self._boxes.values()):
            self.chunks.forget_closed()

    def claim(self, claims: Int64s, task: int) -> None:
        """Claim message ids: a second claim of one shows when it is settled."""
        self._events.append((claims, np.zeros(len(claims), np.int64), task))

    def _send_events(self) -> None:
        if self._events:
            roots, vals, kinds = zip(*self._events, strict=True)
            tasks = np.repeat(np.array(kinds, np.int32), [len(part) for part in roots])
            events = wire.Events(np.concatenate(roots), np.concatenate(vals), tasks)
            self.outbox.send_events(events)
        if self._reasons:
            self.outbox.send_reasons(pa.concat_tables(self._reasons))
        self._events, self._reasons = [], []

    def finish(self) -> list[tuple[str, str, str, int]]:
        """Flush all components, in the order of data; return the files that were written.

        Returns
        -------
        list of tuple
            Component, stream, path within the run's directory, rows.
        """
        self._flush()
        self._send_events()
        files = []
        for (component, stream), written in self._files.items():
            for path, rows, seal in written.finish():
                self.outbox.seal(seal.to_bytes(8, "little", signed=True))
                place = os.path.join("rows", component, stream, path)
                files.append((component, stream, place, rows))
        return files

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # However it went: whoever reads its marker is not to take it for dead.
        self._in_flight.end()

    def _flush(self) -> None:
        """End what components have open, in the order of data; whatever follows finds new ones."""
        if not self._boxes:
            return
        roots = self._open_roots() if self._in_flight.names else None
        with self._in_flight.of_flush(roots):
            self._flush_boxes()

    def _flush_boxes(self) -> None:
        for name in self._work.layout.at(self._level):
            box = self._boxes.get(name)
            if box is not None:
                with self._in_flight.timed(name):
                    results = box.executor.flush()
                self._take(box, results)
                with self._in_flight.timed(name):
                    box.executor.cleanup()
                del self._boxes[name]

    # ---------------------------------------------------------------- after attempts have died

    def _parts(self, source: str, rows: Rows) -> Iterator[Rows]:
        """Rows as they are handed over: all at once, and those of suspects by themselves.

        What suspects leave open is flushed before others come in.
        """
        in_flight = self._in_flight
        chunk = in_flight.begin()
        if not (in_flight.names or in_flight.evidence):
            with in_flight.of_chunk(chunk, len(rows), None):
                yield rows
            return
        of_row, of_root = self._roots_by_row(rows.owners)
        left = np.ones(len(rows), np.bool_)

        def taken(roots: Int64s) -> Int64s:  # rows that are still left, and then are not
            places = np.unique(of_row[np.isin(of_root, roots)])
            places = places[left[places]]
            left[places] = False
            return places

        rejected, groups = in_flight.evidence.groups(chunk, len(rows), np.unique(of_root))
        for root in rejected.tolist():
            reason = in_flight.evidence.reasons.get(root, killed_worker(final=True))
            self._reject(root, reason, rows, taken(np.array([root])))
        for group in groups:
            places = taken(group)
            if len(places):
                self._flush()
                with in_flight.of_roots(np.unique(of_root[np.isin(of_row, places)])):
                    yield some_rows(rows, places)
                    self._flush()
        rest = np.flatnonzero(left)
        if len(rest):
            roots = np.unique(of_root[np.isin(of_row, rest)]) if in_flight.names else None
            with in_flight.of_chunk(chunk, len(rest), roots):
                yield rows if len(rest) == len(rows) else some_rows(rows, rest)

    def _reject(self, root: int, reason: Reason, rows: Rows, places: Int64s) -> None:
        """Fail rows of a root that is not run: for good, but others that a row hangs from too."""
        groups = np.unique(rows.owners.take(places, None).pairs()[1])
        own = [self._roots_by_row(Owners(groups[i : i + 1]))[1] == root for i in range(len(groups))]
        alone = np.array([found.all() for found in own], np.bool_)
        for some, why in ((groups[alone], reason), (groups[~alone], reason._replace(final=False))):
            if len(some):
                self.fail(Owners(some), [why], why.component)

    def _open_roots(self) -> Int64s:
        """Roots of the tuples that components may still have open."""
        open_rows = [part.rows for box in self._boxes.values() for part in box.segments]
        found = [self._roots_by_row(rows.owners)[1] for rows in open_rows]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def _roots_by_row(self, owners: Owners) -> tuple[Int64s, Int64s]:
        of_row, of_group = owners.pairs()
        rows, roots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for chunk, places in self.chunks.split(of_group):
            of, at = chunk.entries_of(of_group[places] - chunk.first)
            rows.append(of_row[places][of])
            roots.append(chunk.roots[at])
        return np.concatenate(rows), np.concatenate(roots)


def _cut(rows: Rows) -> Iterator[Rows]:
    """Cut rows by what they hold: a blob takes no more than 2 GiB, and memory is for a few."""
    n = len(rows)
    if bytes_before(rows.batch, n) <= CHUNK_BYTES:
        yield rows
        return
    start = 0
    while start < n:
        stop = max(start + 1, end_within(rows.batch, start, CHUNK_BYTES))
        identity = rows.identity and rows.identity.part(start, stop)
        owners = rows.owners.take(np.arange(start, stop), None)
        yield Rows(rows.batch.slice(start, stop - start), owners, identity, rows.home)
        start = stop


def _by_segment(segments: list[_Segment], handles: Int64s) -> Iterator[tuple[_Segment, Int64s]]:
    """Each segment that has some of the tuples, and the places of those."""
    for segment in segments:
        own = (handles >= segment.first) & (handles < segment.first + len(segment.rows))
        places = np.flatnonzero(own)
        if len(places):
            yield segment, places


def _joined(segments: list[_Segment]) -> tuple[Rows, int]:
    """All open segments as one, without their columns."""
    if not segments:
        empty = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
        nobody = Identity(pa.array([], pa.string()), np.empty(0, np.int32), np.empty(0, np.int64))
        return Rows(empty, Owners(np.empty(0, np.int64)), nobody), 0
    owners = [segment.rows.owners for segment in segments]
    if all(own.offsets is None for own in owners):
        together = Owners(np.concatenate([own.ids for own in owners]))
    else:
        sizes = np.concatenate(
            [
                np.ones(len(own), np.int64) if own.offsets is None else np.diff(own.offsets)
                for own in owners
            ]
        )
        together = Owners(np.concatenate([own.ids for own in owners]), offsets_of(sizes))
    identities = [segment.rows.identity for segment in segments]
    identity = None
    if all(one is not None for one in identities):
        found = [one for one in identities if one is not None]
        identity = Identity(
            pa.concat_arrays([one.message_ids for one in found]),
            np.concatenate([one.attempts for one in found]),
            np.concatenate([one.stable_ids for one in found]),
        )
    empty = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
    return Rows(empty, together, identity), segments[0].first
