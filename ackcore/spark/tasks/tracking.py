"""The anchors inside one task: groups of roots, and the rows that are anchored to them.

A task's input comes in *groups*.  In the spout stage a group is one record of a source.  Behind an
exchange it is one run of rows of a root that was sent here together.  A group holds its roots and,
for each, the XOR of the edges on which it came.  Rows between the bolts of one stage have no edges
of their own, since an edge that is made and acked in one task cancels; rows only keep the groups
that they are anchored to.  An edge is drawn when a row leaves the task:

    edge = edge_id(key, first root of the group, emitter and destination, parent edge, ordinal)

The ordinal numbers the rows that this group sent to that destination, so edges do not depend on
batching.  When a chunk of groups is processed, each group acks the edges on which it
came and the edges that it sent: ``val ^ XOR(edges sent)``.  Edges sent later, for tuples that
are still open, are acked separately.  Nothing is settled before all ledger rows arrived, so their
order has no effect (SEMANTICS 4).

That is how each root is settled by itself.  By default roots are settled by `Cohorts`: then an edge
is drawn for each blob of rows and each cohort in it, and a chunk acks once for each cohort.  So the
number of ledger rows is that of chunks and destinations, plus one for each failed root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import in_ranges_of, offsets_of, take_rows
from ackcore._records import Bools, Int32s, Int64s
from ackcore.ids import edge_ids
from ackcore.spark.tasks.exchange_format import Places
from ackcore.topology.tuples import Identity

#: The owner of a row that is anchored to no group.
NONE = -1


class Owners(NamedTuple):
    """The groups (see `Chunk`) that rows are anchored to, by their numbers within the task.

    ``offsets`` is None if each row has one group, or `NONE`. Otherwise row i has the groups
    ``ids[offsets[i]:offsets[i + 1]]``.
    """

    ids: Int64s
    offsets: Int64s | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.offsets is None else len(self.offsets) - 1

    @property
    def sizes(self) -> Int64s:
        """The number of groups of each row; 1 for `NONE`."""
        return np.ones(len(self), np.int64) if self.offsets is None else np.diff(self.offsets)

    def pairs(self) -> tuple[Int64s, Int64s]:
        """Return the row numbers and groups of all pairs of a row and a group."""
        if self.offsets is None:
            rows = np.flatnonzero(self.ids != NONE)
            return rows, self.ids[rows]
        rows = np.repeat(np.arange(len(self)), self.sizes)
        have = self.ids != NONE
        return rows[have], self.ids[have]

    def take(self, rows: Int64s, offsets: Int64s | None) -> Owners:
        """Return the owners of new rows.

        New row i has the owners of row ``rows[i]``; with ``offsets``, those of all of
        ``rows[offsets[i]:offsets[i + 1]]``.
        """
        if self.offsets is None:
            return Owners(self.ids[rows], offsets)
        sizes = self.sizes[rows]
        _, places = in_ranges_of(self.offsets[rows], sizes)
        ends = offsets_of(sizes)
        return Owners(self.ids[places], ends if offsets is None else ends[offsets])


@dataclass(slots=True, eq=False)
class AnchoredRows:
    """Rows between two components, with the groups that they are anchored to.

    ``batch``: the rows. ``owners``: the groups of the rows, or a callable that returns them.  It is
    called on first use: rows that stay in a stage and do not fail need none. ``identity``: the
    message ids and attempts of the rows' records, if a bolt needs them. ``only_chunk``: the chunk
    that all rows are anchored to, with one group each; None otherwise.
    """

    batch: pa.RecordBatch
    _owners: Owners | Callable[[], Owners]
    identity: Identity | None = None
    only_chunk: Chunk | None = None
    _rows: int = field(init=False)

    def __post_init__(self) -> None:
        self._rows = len(self.batch)

    @property
    def owners(self) -> Owners:
        """The groups that the rows are anchored to."""
        if not isinstance(self._owners, Owners):
            self._owners = self._owners()
        return self._owners

    def __len__(self) -> int:
        return self._rows

    def without_columns(self) -> AnchoredRows:
        """Return the same rows without columns, so that the data can be released early."""
        found = AnchoredRows(NO_COLUMNS, self._owners, self.identity, self.only_chunk)
        found._rows = self._rows
        return found


#: The batch of rows whose columns were dropped.
NO_COLUMNS = pa.RecordBatch.from_arrays([], schema=pa.schema([]))


def some_rows(rows: AnchoredRows, places: Int64s) -> AnchoredRows:
    """Return the rows with the given numbers, in the order of the numbers."""
    at = pa.array(places)
    identity = rows.identity
    if identity is not None:
        identity = Identity(
            identity.message_ids.take(at), identity.attempts[places], identity.stable_ids[places]
        )
    return AnchoredRows(
        take_rows(rows.batch, places), rows.owners.take(places, None), identity, rows.only_chunk
    )


class Cohorts:
    """The cohorts of the roots in one chunk, and their edges.

    A cohort is the roots of one chunk of the spout stage, which are settled together; its id is its
    first root.  A task that processed a chunk acks, for each cohort in it, the edges on which the
    chunk's blobs came and the edges that it sent.  A failed root is *named*: its row carries a
    poison edge, which the task also XORs into its ack of the cohort.  So the XOR becomes zero only
    if each task that got rows of the cohort has acked them, and if each root that it failed is
    named.  Then all roots of the cohort that are not named are ACKED (SEMANTICS 6).

    ``ids``, ``vals`` (numpy.ndarray of int64, shape (k,)): the ids, ascending, and for each the XOR
    of the edges on which its rows came. ``places``: for a chunk of the spout stage, the numbers
    from which destinations compute the roots; None if the roots are sent.
    """

    __slots__ = ("_sends", "ids", "places", "totals", "vals")

    def __init__(self, ids: Int64s, vals: Int64s, places: Places | None = None) -> None:
        self.ids = ids
        self.vals = vals
        self.places = places
        #: The XOR of all edges that came, that were sent, and of the poison of named roots.
        self.totals = vals.copy()
        self._sends = Counter[str]()

    def indexes(self, ids: Int64s) -> Int64s:
        """Return the index of each id among the cohorts."""
        return np.searchsorted(self.ids, ids)

    def draw(self, key: int, way: str, which: Int64s, dests: Int64s, all_dests: int) -> Int64s:
        """Draw the edges of blobs: one for each pair of a cohort (``which``) and a destination.

        Each call counts as the next blob on its ``way``. `add` puts the edges into the acks.
        ``key``: the key of the micro-batch. ``way``: the emitter, stream and receiver.
        ``all_dests``: the number of destinations.
        """
        ordinals = self._sends[way] * all_dests + dests
        self._sends[way] += 1
        return edge_ids(key, self.ids[which], way, self.vals[which], ordinals)

    def add(self, which: Int64s, edges: Int64s) -> None:
        """XOR edges into the acks of the cohorts with the indexes ``which``."""
        np.bitwise_xor.at(self.totals, which, edges)


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of a task's input: groups, each a record, or received rows with the same roots.

    ``first``, ``groups``: the number of the first group, and the number of groups. ``load``:
    returns the roots, and the XOR of their edges or, with ``cohorts``, their cohorts. It is called
    on first use: a stage that sends no rows needs only those of failed groups. ``task``: the task
    column of the ledger rows: a spout's number, or ``ACK``. ``offsets``: the offsets of each
    group's roots; None if each group has exactly one root, see `RootRuns`. ``cohorts``: the cohorts
    of the roots; None if each root is settled by itself.
    """

    first: int
    groups: int
    load: Callable[[], tuple[Int64s, Int64s]]
    task: int
    offsets: Int32s | None
    cohorts: Cohorts | None
    #: By emitter and destination, each group's number of rows sent.
    sent: dict[str, Int64s] = field(default_factory=dict)
    #: With cohorts: the groups of rows sent before the chunk is closed, as numbers in it.
    sent_groups: list[Int64s] = field(default_factory=list)
    #: Whether each group has failed and is settled by this task; None if no group is.
    settled_here: Bools | None = None
    #: Whether its ledger rows were sent: edges sent later are acked separately.
    closed: bool = False
    _found: tuple[Int64s, Int64s] | None = None
    _totals: Int64s | None = None

    @property
    def roots(self) -> Int64s:
        """The roots of all groups."""
        if self._found is None:
            self._found = self.load()
        return self._found[0]

    @property
    def vals(self) -> Int64s:
        """The value of each root: the XOR of the edges of its rows or, with cohorts, its cohort."""
        if self._found is None:
            self._found = self.load()
        return self._found[1]

    @property
    def totals(self) -> Int64s:
        """The XOR of the edges that each group has sent, changed in place by callers."""
        if self._totals is None:
            self._totals = np.zeros(self.groups, np.int64)
        return self._totals

    def ordinals(self, way: str) -> Int64s:
        """Return each group's number of rows sent one way, from an emitter to a receiver.

        Callers increment the array.
        """
        found = self.sent.get(way)
        if found is None:
            found = self.sent[way] = np.zeros(self.groups, np.int64)
        return found

    def has_sent(self) -> Bools:
        """Return, for each group, whether rows of it were sent before the chunk was closed."""
        found = np.zeros(self.groups, np.bool_)
        for counts in self.sent.values():
            found |= counts > 0
        for groups in self.sent_groups:
            found[groups] = True
        return found

    def heads(self) -> tuple[Int64s, Int64s]:
        """Return the first root and val of each group; zeros for a group without roots."""
        if self.offsets is None:
            return self.roots, self.vals
        none = np.diff(self.offsets) == 0
        places = np.where(none, 0, self.offsets[:-1])
        if not len(self.roots):
            return np.zeros(self.groups, np.int64), np.zeros(self.groups, np.int64)
        return np.where(none, 0, self.roots[places]), np.where(none, 0, self.vals[places])

    def entries_of(self, groups: Int64s) -> tuple[Int64s, Int64s]:
        """Return, for each root of ``groups``, the index of its group and its index in `roots`."""
        if self.offsets is None:
            return np.arange(len(groups)), groups
        starts = self.offsets[:-1][groups].astype(np.int64)
        return in_ranges_of(starts, np.diff(self.offsets)[groups])

    def acks(self) -> tuple[Int64s, Int64s]:
        """Return roots and ack vals: the XOR of the edges on which a group came and those it sent.

        Groups that this task settles are left out.
        """
        here = self.settled_here
        if here is None and self.offsets is None:  # the usual case
            return self.roots, self.vals ^ self.totals
        groups = np.arange(self.groups) if here is None else np.flatnonzero(~here)
        of, places = self.entries_of(groups)
        return self.roots[places], self.vals[places] ^ self.totals[groups[of]]


class Chunks:
    """The chunks of a task that rows may still be anchored to."""

    def __init__(self) -> None:
        self._chunks: list[Chunk] = []
        self._next = 0

    @property
    def groups(self) -> int:
        """The number of groups in all chunks added so far."""
        return self._next

    def add(
        self,
        groups: int,
        load: Callable[[], tuple[Int64s, Int64s]],
        task: int,
        offsets: Int32s | None = None,
        cohorts: Cohorts | None = None,
    ) -> Chunk:
        """Add a chunk of new groups, and return it; the arguments are those of `Chunk`."""
        chunk = Chunk(self._next, groups, load, task, offsets, cohorts)
        self._next += groups
        self._chunks.append(chunk)
        return chunk

    def forget_closed(self) -> None:
        """Drop all closed chunks.  The caller ensures that no tuple anchored to them is open."""
        self._chunks = [chunk for chunk in self._chunks if not chunk.closed]

    def roots_of(self, owners: Owners) -> tuple[Int64s, Int64s]:
        """Return two columns, rows and roots: a pair for each root that a row is anchored to."""
        of_row, of_group = owners.pairs()
        rows, roots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for chunk, places in self.split(of_group):
            of, at = chunk.entries_of(of_group[places] - chunk.first)
            rows.append(of_row[places][of])
            roots.append(chunk.roots[at])
        return np.concatenate(rows), np.concatenate(roots)

    def split(self, groups: Int64s) -> list[tuple[Chunk, Int64s]]:
        """Return each kept chunk that has some of ``groups``, and the indexes in ``groups``."""
        found = []
        for chunk in self._chunks:
            own = (groups >= chunk.first) & (groups < chunk.first + chunk.groups)
            places = np.flatnonzero(own)
            if len(places):
                found.append((chunk, places))
        return found


def running_counts(groups: Int64s, counts: Int64s) -> Int64s:
    """Return each item's number among the items of its group, from ``counts[group]`` on.

    Adds the items to ``counts``, in place.
    """
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    firsts = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(firsts, append=len(ordered))
    before = np.arange(len(ordered)) - np.repeat(firsts, sizes) + counts[ordered]
    counts[ordered[firsts]] += sizes
    result = np.empty(len(groups), np.int64)
    result[order] = before
    return result


def folded(
    first: Int64s, second: Int64s, vals: Int64s, fold: np.ufunc
) -> tuple[Int64s, Int64s, Int64s]:
    """Return each pair of two numbers once, sorted, with all of its vals folded into one."""
    by = np.lexsort((second, first))
    first, second, vals = first[by], second[by], vals[by]
    new = np.ones(len(by), np.bool_)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    firsts = np.flatnonzero(new)
    if len(firsts):
        vals = fold.reduceat(vals, firsts)
    return first[firsts], second[firsts], vals
