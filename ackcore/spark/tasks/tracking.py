"""What hangs from what inside one task: groups of roots, rows that hang from them, their edges.

A task's input comes in *groups*: in the first stage a group is one record of a source, behind an
exchange it is one run of rows of a root that was sent here together.  A group names its roots
and, for each, the XOR of the edges on which it came.  Rows are moved between the bolts of one
stage without edges of their own, since an edge that is made and acked in one task cancels; they
only remember which groups they hang from.  An edge is drawn where a row leaves the task:

    edge = edge_id(key, first root of the group, emitter and destination, parent edge, ordinal)

The ordinal is the place among the rows that this group sent that way, so nothing depends on how
rows were batched.  When a chunk of groups is through, each acks what it came on and whatever it
sent: ``val ^ XOR(edges sent)``.  What is sent later on behalf of tuples still open is acked by
itself; nothing decides before everything is in, so the order does not matter (SEMANTICS 4).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int32s, Int64s
from ackcore._shuffle import pack_runs
from ackcore.arrow import offsets_of, take_rows
from ackcore.ids import component_key, edge_ids
from ackcore.topology.tuples import Identity

#: The owner of a row that hangs from nothing.
NONE = -1

_SIDE = struct.Struct("<BBxxIQ")  # version, has offsets, runs, entries
_VERSION = 1


class Runs(NamedTuple):
    """The tracking of one blob of rows: run i covers the next ``rows[i]`` rows.

    ``offsets`` is None where each run has exactly one root; else run i has the roots
    ``offsets[i]:offsets[i + 1]``, none for rows that nobody tracks.
    """

    rows: Int32s
    roots: Int64s
    vals: Int64s
    offsets: Int32s | None = None

    def pack(self) -> bytes:
        """Return the runs as bytes that depend on nothing else."""
        head = _SIDE.pack(_VERSION, self.offsets is not None, len(self.rows), len(self.roots))
        parts = [head, self.roots.tobytes(), self.vals.tobytes(), self.rows.tobytes()]
        if self.offsets is not None:
            parts.append(self.offsets.tobytes())
        return b"".join(parts)

    @classmethod
    def unpack(cls, side: bytes) -> Runs:
        """Return what `pack` made bytes of."""
        version, wide, runs, entries = _SIDE.unpack_from(side)
        if version != _VERSION:
            raise ValueError(
                f"tracking of version {version} was met, and this ackcore reads version "
                f"{_VERSION}; driver and workers must run the same one"
            )
        place = _SIDE.size
        roots = np.frombuffer(side, np.int64, entries, place)
        vals = np.frombuffer(side, np.int64, entries, place + 8 * entries)
        place += 16 * entries
        rows = np.frombuffer(side, np.int32, runs, place)
        offsets = np.frombuffer(side, np.int32, runs + 1, place + 4 * runs) if wide else None
        return cls(rows, roots, vals, offsets)


def untracked(rows: int) -> Runs:
    """Return the runs of rows that nobody tracks."""
    nothing = np.empty(0, np.int64)
    return Runs(np.array([rows], np.int32), nothing, nothing, np.zeros(2, np.int32))


def concat(parts: Sequence[Runs]) -> Runs:
    """Return the runs of blobs laid one after the other."""
    if len(parts) == 1:
        return parts[0]
    rows = np.concatenate([part.rows for part in parts])
    roots = np.concatenate([part.roots for part in parts])
    vals = np.concatenate([part.vals for part in parts])
    if all(part.offsets is None for part in parts):
        return Runs(rows, roots, vals)
    sizes = np.concatenate(
        [
            np.ones(len(part.rows), np.int32) if part.offsets is None else np.diff(part.offsets)
            for part in parts
        ]
    )
    return Runs(rows, roots, vals, offsets_of(sizes).astype(np.int32))


class Owners(NamedTuple):
    """The groups that rows hang from, by their numbers within the task.

    ``offsets`` is None where each row has one, or `NONE`; else row i has the groups
    ``ids[offsets[i]:offsets[i + 1]]``.
    """

    ids: Int64s
    offsets: Int64s | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    def pairs(self) -> tuple[Int64s, Int64s]:
        """Return (row, group) for each that a row has."""
        if self.offsets is None:
            rows = np.flatnonzero(self.ids != NONE)
            return rows, self.ids[rows]
        rows = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        have = self.ids != NONE
        return rows[have], self.ids[have]

    def take(self, rows: Int64s, offsets: Int64s | None) -> Owners:
        """Return the owners of rows that hang from rows: one each, or by offsets."""
        if offsets is None and self.offsets is None:
            return Owners(self.ids[rows])
        if self.offsets is None:
            return Owners(self.ids[rows], offsets)
        starts, sizes = self.offsets[rows], np.diff(self.offsets)[rows]
        ends = offsets_of(sizes)
        places = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], sizes)
        return Owners(self.ids[places], ends if offsets is None else ends[offsets])


class Rows:
    """Rows on their way from one component to the next, and what they hang from.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        The rows.
    owners : Owners, or callable that returns them
        What they hang from.  It is called when somebody asks, if ever: of rows that stay in a
        stage and do not fail nobody does.
    identity : Identity, optional
        Which records they are, where that is carried.
    home : Chunk, optional
        The chunk that all of them hang from, one group each, if that is so.
    """

    __slots__ = ("_owners", "batch", "home", "identity")

    def __init__(
        self,
        batch: pa.RecordBatch,
        owners: Owners | Callable[[], Owners],
        identity: Identity | None = None,
        home: Chunk | None = None,
    ) -> None:
        self.batch = batch
        self.identity = identity
        self.home = home
        self._owners = owners

    @property
    def owners(self) -> Owners:
        """What they hang from."""
        if not isinstance(self._owners, Owners):
            self._owners = self._owners()
        return self._owners

    def __len__(self) -> int:
        return len(self.batch)


def some_rows(rows: Rows, places: Int64s) -> Rows:
    """Return some of the rows."""
    at = pa.array(places)
    identity = rows.identity
    if identity is not None:
        identity = Identity(
            identity.message_ids.take(at), identity.attempts[places], identity.stable_ids[places]
        )
    return Rows(take_rows(rows.batch, places), rows.owners.take(places, None), identity, rows.home)


class Chunk:
    """Groups that came in together: number ``first`` and the ones after it.

    Parameters
    ----------
    first, groups : int
        The first one's number, and how many there are.
    load : callable
        Returns their roots and the edges that they came on.  It is called when they are asked
        for, if ever: a stage that sends nothing on needs those of failed groups alone.
    task : int
        What their ledger rows say: a spout's number, or ``ACK``.
    offsets : numpy.ndarray of int32, shape (groups + 1,), optional
        As in `Runs`: None where each group has exactly one root.
    """

    __slots__ = (
        "_found",
        "_load",
        "_totals",
        "closed",
        "first",
        "groups",
        "offsets",
        "sent",
        "task",
    )

    def __init__(
        self,
        first: int,
        groups: int,
        load: Callable[[], tuple[Int64s, Int64s]],
        task: int,
        offsets: Int32s | None = None,
    ) -> None:
        self.first = first
        self.task = task
        self.groups = groups
        self.offsets = offsets
        self.sent: dict[str, Int64s] = {}
        #: Whether its ledger rows have left: what is sent from then on is acked by itself.
        self.closed = False
        self._load = load
        self._found: tuple[Int64s, Int64s] | None = None
        self._totals: Int64s | None = None

    @property
    def roots(self) -> Int64s:
        """The roots of all groups."""
        if self._found is None:
            self._found = self._load()
        return self._found[0]

    @property
    def vals(self) -> Int64s:
        """What each of the roots came on: the XOR of the edges of its rows."""
        if self._found is None:
            self._found = self._load()
        return self._found[1]

    @property
    def totals(self) -> Int64s:
        """The XOR of the edges that each group has sent; to be changed in place."""
        if self._totals is None:
            self._totals = np.zeros(self.groups, np.int64)
        return self._totals

    def ordinals(self, way: str) -> Int64s:
        """Return how many rows each group has sent a way: a column to count on in."""
        found = self.sent.get(way)
        if found is None:
            found = self.sent[way] = np.zeros(self.groups, np.int64)
        return found

    def heads(self) -> tuple[Int64s, Int64s]:
        """Return the first root and val of each group; zeros for one without any."""
        if self.offsets is None:
            return self.roots, self.vals
        none = np.diff(self.offsets) == 0
        places = np.where(none, 0, self.offsets[:-1])
        if not len(self.roots):
            return np.zeros(self.groups, np.int64), np.zeros(self.groups, np.int64)
        return np.where(none, 0, self.roots[places]), np.where(none, 0, self.vals[places])

    def entries_of(self, groups: Int64s) -> tuple[Int64s, Int64s]:
        """Return (place among ``groups``, place among the roots) of all their entries."""
        if self.offsets is None:
            return np.arange(len(groups)), groups
        starts, sizes = self.offsets[:-1][groups].astype(np.int64), np.diff(self.offsets)[groups]
        of = np.repeat(np.arange(len(groups)), sizes)
        before = np.cumsum(sizes) - sizes
        return of, np.arange(len(of)) - np.repeat(before, sizes) + np.repeat(starts, sizes)

    def acks(self) -> tuple[Int64s, Int64s]:
        """Return roots and ack vals: what each group came on, and all that it sent."""
        if self.offsets is None:
            return self.roots, self.vals ^ self.totals
        of, places = self.entries_of(np.arange(self.groups))
        return self.roots[places], self.vals[places] ^ self.totals[of]


def draw_edges(
    key: int, way: str, rows: Rows, order: Int64s, counts: Int64s, chunks: Chunks
) -> tuple[list[Runs], tuple[Int64s, Int64s] | None]:
    """Draw an edge for each row and group that it hangs from, and fold them by destination.

    Parameters
    ----------
    key : int
        The micro-batch's.
    way : str
        Who sends what to whom: names the edges beside the parent's.
    rows : Rows
        What is sent.
    order, counts
        As `ackcore._shuffle.split_by_shard` returns them.
    chunks : Chunks
        The groups of the task.

    Returns
    -------
    runs : list of Runs
        For each destination.
    late : tuple of numpy.ndarray, or None
        Roots and ack vals of groups that had acked already.
    """
    chunk = rows.home
    if chunk is not None and chunk.offsets is None and not chunk.closed:
        totals, groups, vals, lengths, runs = pack_runs(
            key,
            component_key(way),
            rows.owners.ids - chunk.first,
            chunk.roots,
            chunk.vals,
            order,
            counts,
            chunk.ordinals(way),
        )
        np.bitwise_xor(chunk.totals, totals, out=chunk.totals)
        roots = chunk.roots[groups]
        ends = np.cumsum(runs).tolist()
        return [
            Runs(lengths[a:b], roots[a:b], vals[a:b])
            for a, b in zip([0, *ends[:-1]], ends, strict=True)
        ], None
    return _draw_any(key, way, rows, order, counts, chunks)


def _draw_any(
    key: int, way: str, rows: Rows, order: Int64s, counts: Int64s, chunks: Chunks
) -> tuple[list[Runs], tuple[Int64s, Int64s] | None]:
    """As `draw_edges`, for rows that hang from several groups, or from those of several chunks."""
    of_row, of_group = rows.owners.pairs()
    edges = np.zeros(len(of_group), np.int64)
    found: list[tuple[Int64s, Int64s, Int64s]] = []  # row, root, edge
    late: list[tuple[Int64s, Int64s]] = []
    for chunk, places in chunks.split(of_group):
        local = of_group[places] - chunk.first
        roots, vals = chunk.heads()
        ordinals = running_counts(local, chunk.ordinals(way))
        drawn = edge_ids(key, roots[local], way, vals[local], ordinals)
        edges[places] = drawn
        totals = np.zeros(chunk.groups, np.int64)
        np.bitwise_xor.at(totals, local, drawn)
        if chunk.closed:
            groups = np.unique(local)
            of, at = chunk.entries_of(groups)
            late.append((chunk.roots[at], totals[groups][of]))
        else:
            np.bitwise_xor(chunk.totals, totals, out=chunk.totals)
        of, at = chunk.entries_of(local)
        found.append((of_row[places][of], chunk.roots[at], drawn[of]))
    runs = _runs_by_row(found, order, counts)
    if not late:
        return runs, None
    return runs, (
        np.concatenate([roots for roots, _ in late]),
        np.concatenate([vals for _, vals in late]),
    )


def running_counts(groups: Int64s, counts: Int64s) -> Int64s:
    """Return how often each group came before, counting on in ``counts``."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(firsts, append=len(ordered))
    before = np.arange(len(ordered)) - np.repeat(firsts, sizes) + counts[ordered]
    counts[ordered[firsts]] += sizes
    result = np.empty(len(groups), np.int64)
    result[order] = before
    return result


def _runs_by_row(
    found: list[tuple[Int64s, Int64s, Int64s]], order: Int64s, counts: Int64s
) -> list[Runs]:
    """A run for each row; the edges of one row that lead to one root are one val."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    empty = np.empty(0, np.int64)
    rows = place[np.concatenate([row for row, _, _ in found])] if found else empty
    roots = np.concatenate([root for _, root, _ in found]) if found else empty
    edges = np.concatenate([edge for _, _, edge in found]) if found else empty
    by = np.lexsort((roots, rows))
    rows, roots, edges = rows[by], roots[by], edges[by]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (rows[1:] != rows[:-1]) | (roots[1:] != roots[:-1])
    firsts = np.flatnonzero(new)
    vals = np.bitwise_xor.reduceat(edges, firsts) if len(firsts) else empty
    roots = roots[firsts]
    offsets = offsets_of(np.bincount(rows[firsts], minlength=len(order))).astype(np.int32)
    runs, start = [], 0
    for count in counts.tolist():
        bounds = offsets[start : start + count + 1]
        a, b = int(bounds[0]), int(bounds[-1])
        runs.append(Runs(np.ones(count, np.int32), roots[a:b], vals[a:b], bounds - bounds[0]))
        start += count
    return runs


class Chunks:
    """The chunks of a task that something may still hang from."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._next = 0

    def add(
        self,
        groups: int,
        load: Callable[[], tuple[Int64s, Int64s]],
        task: int,
        offsets: Int32s | None = None,
    ) -> Chunk:
        """Number the groups that have come in; the arguments are those of `Chunk`."""
        chunk = Chunk(self._next, groups, load, task, offsets)
        self._next += groups
        self._chunks.append(chunk)
        return chunk

    def forget_closed(self) -> None:
        """Drop all chunks that have acked: nothing hangs from them any more."""
        self._chunks = [chunk for chunk in self._chunks if not chunk.closed]

    def split(self, groups: Int64s) -> list[tuple[Chunk, Int64s]]:
        """Return for each chunk the places of those of ``groups`` that are its own."""
        found = []
        for chunk in self._chunks:
            own = (groups >= chunk.first) & (groups < chunk.first + chunk.groups)
            places = np.flatnonzero(own)
            if len(places):
                found.append((chunk, places))
        return found
