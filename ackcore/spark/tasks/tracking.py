"""The anchors inside one task: groups of roots, the rows anchored to them, and their edges.

A task's input comes in *groups*: in the spout stage a group is one record of a source, behind an
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

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ackcore._records import Int32s, Int64s
from ackcore.arrow import offsets_of, take_rows
from ackcore.topology.tuples import Identity

Bools = npt.NDArray[np.bool_]

#: The owner of a row that hangs from nothing.
NONE = -1


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


class AnchoredRows:
    """Rows on their way from one component to the next, and what they hang from.

    Parameters
    ----------
    batch : pyarrow.RecordBatch
        The rows.
    owners : Owners, or callable that returns them
        What they hang from.  It is called when they are asked for, if ever: not for rows that
        stay in a stage and do not fail.
    identity : Identity, optional
        Which records they are, where that is carried.
    only_chunk : Chunk, optional
        The chunk that all of them hang from, one group each, if that is so.
    """

    __slots__ = ("_owners", "_rows", "batch", "identity", "only_chunk")

    def __init__(
        self,
        batch: pa.RecordBatch,
        owners: Owners | Callable[[], Owners],
        identity: Identity | None = None,
        only_chunk: Chunk | None = None,
    ) -> None:
        self.batch = batch
        self._rows = len(batch)
        self.identity = identity
        self.only_chunk = only_chunk
        self._owners = owners

    @property
    def owners(self) -> Owners:
        """The groups that the rows are anchored to."""
        if not isinstance(self._owners, Owners):
            self._owners = self._owners()
        return self._owners

    def __len__(self) -> int:
        return self._rows

    def without_columns(self) -> AnchoredRows:
        """Return as many rows that hang from the same, for whoever outlasts what they hold."""
        found = AnchoredRows(NO_COLUMNS, self._owners, self.identity, self.only_chunk)
        found._rows = self._rows
        return found


#: The columns of rows of which only is kept what they hang from.
NO_COLUMNS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


def some_rows(rows: AnchoredRows, places: Int64s) -> AnchoredRows:
    """Return some of the rows."""
    at = pa.array(places)
    identity = rows.identity
    if identity is not None:
        identity = Identity(
            identity.message_ids.take(at), identity.attempts[places], identity.stable_ids[places]
        )
    return AnchoredRows(
        take_rows(rows.batch, places), rows.owners.take(places, None), identity, rows.only_chunk
    )


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
        As in `RootRuns`: None where each group has exactly one root.
    """

    __slots__ = (
        "_found",
        "_load",
        "_totals",
        "closed",
        "first",
        "groups",
        "offsets",
        "over",
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
        #: By way, how many rows each group has sent.
        self.sent: dict[str, Int64s] = {}
        #: Which groups have failed, and are settled by this task; None if none of them are.
        self.over: Bools | None = None
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
        """The value of each root: the XOR of the edges of its rows."""
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
        """Return roots and ack vals: what each group came on, and all that it sent.

        Only groups of one root each may be over.
        """
        if self.over is not None:
            left = ~self.over
            return self.roots[left], self.vals[left] ^ self.totals[left]
        if self.offsets is None:
            return self.roots, self.vals ^ self.totals
        of, places = self.entries_of(np.arange(self.groups))
        return self.roots[places], self.vals[places] ^ self.totals[of]


class Chunks:
    """The chunks of a task that something may still hang from."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._next = 0

    @property
    def groups(self) -> int:
        """How many groups have come in so far."""
        return self._next

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

    def roots_of(self, owners: Owners) -> tuple[Int64s, Int64s]:
        """Return (row, root) for each root that a row hangs from, a root once for each group."""
        of_row, of_group = owners.pairs()
        rows, roots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for chunk, places in self.split(of_group):
            of, at = chunk.entries_of(of_group[places] - chunk.first)
            rows.append(of_row[places][of])
            roots.append(chunk.roots[at])
        return np.concatenate(rows), np.concatenate(roots)

    def split(self, groups: Int64s) -> list[tuple[Chunk, Int64s]]:
        """Return for each chunk the places of those of ``groups`` that are its own."""
        found = []
        for chunk in self._chunks:
            own = (groups >= chunk.first) & (groups < chunk.first + chunk.groups)
            places = np.flatnonzero(own)
            if len(places):
                found.append((chunk, places))
        return found


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
