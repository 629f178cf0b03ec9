"""Cohorts: the roots of one chunk of the spout stage, which are settled together.

A cohort's id is its first root.  Its XOR covers one edge for each blob of rows that a task sends to
a destination, and for each cohort with rows in that blob.  A task that processed a chunk acks, for
each cohort in it, the edges on which the blobs came and the edges that it sent.  A failed root is
*named*: its row carries a poison edge, which the task also XORs into its ack of the cohort.  So the
XOR becomes zero only if each task that got rows of the cohort has acked them, and if each root that
it failed is named.  Then all roots of the cohort that are not named are ACKED (SEMANTICS 6).

The number of ledger rows is that of chunks and destinations, plus one for each failed root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ackcore import FAIL
from ackcore._records import Int32s, Int64s
from ackcore.ids import edge_ids
from ackcore.spark.settle.wire import CohortEvents
from ackcore.spark.tasks.exchange_format import Places


class Cohorts:
    """The cohorts of the roots in one chunk, and their edges.

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

        ``key``: the key of the micro-batch. ``way``: the emitter, stream and receiver.
        ``all_dests``: the number of destinations.
        """
        ordinals = self._sends[way] * all_dests + dests
        self._sends[way] += 1
        return edge_ids(key, self.ids[which], way, self.vals[which], ordinals)

    def add(self, which: Int64s, edges: Int64s) -> None:
        """XOR edges into the acks of the cohorts with the indexes ``which``."""
        np.bitwise_xor.at(self.totals, which, edges)


class SettledCohorts(NamedTuple):
    """The outcome of the cohorts of one shard.

    ``acked`` is the number of ACKED roots by spout number.  ``roots`` are the failed ones,
    ascending, and ``tasks`` the numbers of their spouts.  ``unsettled`` is the number of cohorts
    whose XOR is not zero, or that were not sent exactly once: none of their roots is decided.
    """

    acked: dict[int, int]
    roots: Int64s
    tasks: Int32s
    unsettled: int


def settle_cohorts(parts: Sequence[CohortEvents]) -> SettledCohorts:
    """Settle cohorts from all of their ledger rows."""
    if not parts:
        return SettledCohorts({}, np.empty(0, np.int64), np.empty(0, np.int32), 0)
    cohorts, vals, roots, tasks = (np.concatenate(column) for column in zip(*parts, strict=True))
    ids, of = np.unique(cohorts, return_inverse=True)
    totals = np.zeros(len(ids), np.int64)
    np.bitwise_xor.at(totals, of, vals)
    inits = np.flatnonzero(tasks >= 0)
    times = np.bincount(of[inits], minlength=len(ids))
    spouts, sizes = np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.int64)
    spouts[of[inits]], sizes[of[inits]] = tasks[inits], roots[inits]
    whole = (totals == 0) & (times == 1)
    named = np.flatnonzero((tasks == FAIL) & whole[of])
    failed, firsts = np.unique(roots[named], return_index=True)
    owners = of[named[firsts]]
    left = sizes - np.bincount(owners, minlength=len(ids))
    acked = Counter[int]()
    for spout, n in zip(spouts[whole].tolist(), left[whole].tolist(), strict=True):
        acked[spout] += n
    return SettledCohorts(dict(acked), failed, spouts[owners], int((~whole).sum()))
