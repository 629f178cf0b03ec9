"""The ledger rows of one task: INITs, ACKs, failures with reasons, and claims of message ids.

They leave with the task's output, so that discarding an attempt discards its ledger rows too
(SEMANTICS 6).  Without a settle stage, failures go to the driver instead.  So do failures in the
spout stage if no row of their trees has left the task: their outcome is certain, so they need no
ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from ackcore import ACK, FAIL
from ackcore._records import Bools, Int64s
from ackcore.ids import edge_ids
from ackcore.spark.base.reasons import NO_TIME, reasons_of
from ackcore.spark.settle import wire
from ackcore.spark.tasks.exchange import Outbox
from ackcore.spark.tasks.exchange_format import xor_by
from ackcore.spark.tasks.spec import TaskSpec
from ackcore.spark.tasks.tracking import (
    AnchoredRows,
    Chunk,
    Chunks,
    Owners,
    running_counts,
    some_rows,
)
from ackcore.topology.tuples import Reason


class _Failed(NamedTuple):
    """Groups of a chunk that a component failed, by their numbers in the chunk, with reasons."""

    component: str
    groups: Int64s
    reasons: pa.Table

    def some(self, which: Bools) -> Self:
        """Return the part for some of the groups, each of which must have one root."""
        reasons = self.reasons.filter(pa.array(which))
        return self._replace(groups=self.groups[which], reasons=reasons)


@dataclass(eq=False, repr=False)
class LedgerRows:
    """A collector of one task's INITs, acks and failures, which it sends through ``outbox``.

    ``holds``: whether failures are held until `decide_held`. Then each group must have one root.
    """

    _spec: TaskSpec
    _chunks: Chunks
    _outbox: Outbox
    _holds: bool
    #: The number of failures of rows that are anchored to no group.
    untracked_failures: int = 0
    #: By spout number, failed roots that the settle stage does not settle, and their reasons.
    failed: dict[int, list[pa.Table]] = field(default_factory=dict)
    _held: list[_Failed] = field(default_factory=list)
    _events: list[tuple[Int64s, Int64s, int]] = field(default_factory=list)
    _of_cohorts: list[wire.CohortEvents] = field(default_factory=list)
    _reasons: list[pa.Table] = field(default_factory=list)
    #: The cohorts of the roots in ``_reasons``, unless each root is settled by itself.
    _reason_cohorts: list[Int64s] = field(default_factory=list)
    _new_failures: list[pa.Table] = field(default_factory=list)

    def fail(self, owners: Owners, reasons: list[Reason], component: str) -> None:
        """Fail the roots of rows, with one reason for each row or one for all.

        Each failure XORs a poison edge into the root's tree, so that it is not ACKED even if a
        ledger row is lost. Without a settle stage, failures are only added to ``failed``. Rows
        without a root count in ``untracked_failures``.
        """
        of_row, of_group = owners.pairs()
        tracked = np.zeros(len(owners), np.bool_)
        texts = [reason.encode() for reason in reasons]
        for chunk, places in self._chunks.split(of_group):
            groups = of_group[places] - chunk.first
            of, at = chunk.entries_of(groups)
            roots = chunk.roots[at]
            rows = of_row[places][of]
            tracked[rows] = True
            if len(texts) == 1:
                said = pa.repeat(texts[0], len(roots))
            else:
                said = pa.array([texts[row] for row in rows.tolist()], pa.string())
            found = reasons_of(roots, NO_TIME, said)
            if found is None:
                continue
            if not self._spec.layout.settles:
                self.failed.setdefault(chunk.task, []).append(found)
                if self._spec.rules is not None:
                    self._new_failures.append(found)
                continue
            failed = _Failed(component, groups, found)
            if self._holds and not chunk.closed:
                self._held.append(failed)
            else:
                self._poison(chunk, failed)
        self.untracked_failures += int(len(owners) - tracked.sum())

    def _poison(self, chunk: Chunk, failed: _Failed) -> None:
        of, at = chunk.entries_of(failed.groups)
        roots, vals = chunk.roots[at], chunk.vals[at]
        way = f"{failed.component}!"
        ordinals = running_counts(failed.groups, chunk.ordinals(way))[of]
        cohorts = chunk.cohorts
        if cohorts is not None:
            which = cohorts.indexes(vals)
            # Several groups may have one root and one cohort, and each fails with its own poison.
            ordinals = ordinals * chunk.groups + failed.groups[of]
            poison = edge_ids(self._spec.key, roots, way, cohorts.vals[which], ordinals)
            if chunk.closed:
                self.ack(vals, poison)
            else:
                cohorts.add(which, poison)
            fails = np.full(len(roots), FAIL, np.int32)
            self._of_cohorts.append(wire.CohortEvents(vals, poison, roots, fails))
            self._reasons.append(failed.reasons)
            self._reason_cohorts.append(vals)
            return
        poison = edge_ids(self._spec.key, roots, way, vals, ordinals)
        self._events.append((roots, poison, ACK))
        self._events.append((roots, np.zeros(len(roots), np.int64), FAIL))
        self._reasons.append(failed.reasons)

    def decide_held(
        self, chunk: Chunk, open_groups: Callable[[Chunk], Int64s]
    ) -> tuple[list[pa.Table], list[pa.Table]]:
        """Settle or send the held failures of a chunk; return their reasons in two lists.

        The first list is of trees of which no row was sent and no tuple is open.  No other task can
        ack or fail them, so this task settles them, and they have no ledger rows.  The second list
        is of all others.  Their ledger rows are sent, since other tasks may fail them too.

        ``chunk``: the chunk: all of its rows are processed, and it is not closed. ``open_groups``:
        returns the groups of a chunk that may have open tuples, by their numbers in the chunk.
        """
        held, self._held = self._held, []
        if not held:
            return [], []
        shared = chunk.has_sent()
        shared[open_groups(chunk)] = True
        settled_here = np.zeros(chunk.groups, np.bool_)
        settled: list[pa.Table] = []
        sent: list[pa.Table] = []
        for failed in held:
            of_others = shared[failed.groups]
            if of_others.any():
                part = failed if of_others.all() else failed.some(of_others)
                self._poison(chunk, part)
                sent.append(part.reasons)
            if not of_others.all():
                failed = failed if not of_others.any() else failed.some(~of_others)
                settled_here[failed.groups] = True
                settled.append(failed.reasons)
        if settled:
            chunk.settled_here = settled_here
            self.failed.setdefault(chunk.task, []).extend(settled)
        return settled, sent

    def new_failures(self) -> list[pa.Table]:
        """Return the reasons of failures since the last call, for tasks that judge them.

        Return [] if there is a settle stage, or the plan has no rules.
        """
        found, self._new_failures = self._new_failures, []
        return found

    def fail_some(
        self, rows: AnchoredRows, bad: Mapping[int, Reason], component: str
    ) -> AnchoredRows:
        """Fail the rows in ``bad``, which has reasons by row number; return the other rows."""
        if not bad:
            return rows
        places = np.array(sorted(bad), np.int64)
        reasons = [bad[place] for place in places.tolist()]
        self.fail(rows.owners.take(places, None), reasons, component)
        return some_rows(rows, np.delete(np.arange(len(rows)), places))

    def ack(self, ids: Int64s, vals: Int64s) -> None:
        """Ack edges that were drawn after their chunk was closed.

        ``ids``: their cohorts, or their roots if each is settled by itself. ``vals``: the edges.
        """
        if self._spec.by_root:
            self._events.append((ids, vals, ACK))
        else:
            self._add_cohorts(*xor_by(ids, vals), ACK)

    def _add_cohorts(self, cohorts: Int64s, vals: Int64s, task: int, roots: int = 0) -> None:
        n = len(cohorts)
        tasks = np.full(n, task, np.int32)
        events = wire.CohortEvents(cohorts, vals, np.full(n, roots, np.int64), tasks)
        self._of_cohorts.append(events)

    def claim(self, claims: Int64s, task: int) -> None:
        """Add an INIT under each message id's hash; the settle stage finds hashes with several.

        ``task``: `CLAIM` plus the number of the spout.
        """
        self._events.append((claims, np.zeros(len(claims), np.int64), task))

    def close(self, chunk: Chunk) -> None:
        """Send the ledger rows of a processed chunk, and mark it closed.

        They are INITs in the spout stage and ACKs behind an exchange: one for each root, or for
        each cohort. Without a settle stage there are none.
        """
        if self._spec.layout.settles:
            cohorts = chunk.cohorts
            if cohorts is None:
                roots, vals = chunk.acks()
                self._events.append((roots, vals, chunk.task))
            else:
                # An INIT has the number of roots, without those that this task settles.
                here = chunk.settled_here
                n = chunk.groups - (0 if here is None else int(here.sum()))
                if chunk.task == ACK:
                    self._add_cohorts(cohorts.ids, cohorts.totals, ACK)
                elif n:
                    self._add_cohorts(cohorts.ids, cohorts.totals, chunk.task, n)
            self.send()
        chunk.closed = True
        chunk.sent_groups.clear()

    def send(self) -> None:
        """Add the ledger rows and reasons since the last call to the outbox."""
        if self._events:
            roots, vals, kinds = zip(*self._events, strict=True)
            tasks = np.repeat(np.array(kinds, np.int32), [len(part) for part in roots])
            events = wire.Events(np.concatenate(roots), np.concatenate(vals), tasks)
            self._outbox.send_ledger_rows(wire.pack_events(events, self._spec.dests))
        if self._of_cohorts:
            columns = (np.concatenate(column) for column in zip(*self._of_cohorts, strict=True))
            of_cohorts = wire.CohortEvents(*columns)
            self._outbox.send_ledger_rows(wire.pack_cohorts(of_cohorts, self._spec.dests))
        if self._reasons:
            by = np.concatenate(self._reason_cohorts) if self._reason_cohorts else None
            reasons = pa.concat_tables(self._reasons)
            self._outbox.send_ledger_rows(wire.pack_reasons(reasons, self._spec.dests, by))
        self._events, self._of_cohorts, self._reasons, self._reason_cohorts = [], [], [], []
