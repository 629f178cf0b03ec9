"""The tuple trees of the records in flight, which decide when a record is acked."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from ackcore._records import Int64s, Status
from ackcore.acker import Acker
from ackcore.dispatch.sources import Record
from ackcore.flow import Batch
from ackcore.ids import IdSource


class Trees:
    """One tuple tree for each attempt at a record: a root, and the edge to its consumer.

    As in Storm, each attempt has a new root, and the tree of the attempt before fails. So a late
    answer to the former attempt completes nothing. Until the record is sent again or dropped, a
    late answer still completes its tree.

    The acker's clock does not move. A tree ends with its lease, which the controller times out. If
    the acker expired a tree before, an answer in time would not count.
    """

    def __init__(self) -> None:
        self._acker = Acker(clock=lambda: 0)
        self._ids = IdSource(time.time_ns() & (2**63 - 1))
        self._roots: dict[int, int] = {}  # by position, of the present attempt

    def __len__(self) -> int:
        return len(self._acker)

    def begin(self, batch: Batch) -> tuple[Int64s, Int64s]:
        """Begin a tree for each record of a batch, and return their roots and edges.

        The trees of earlier attempts at these records fail.
        """
        n = len(batch)
        self.fail(batch)
        roots, edges = self._ids.next_many(n), self._ids.next_many(n)
        self._acker.init_many(roots, edges, np.zeros(n, np.int32))
        self._roots.update(
            (record.position, root) for record, root in zip(batch, roots.tolist(), strict=True)
        )
        return roots, edges

    def ack(
        self, batch: Batch, roots: Int64s, edges: Int64s, failed: npt.NDArray[np.bool_]
    ) -> list[Record]:
        """Ack the edges of the records that did not fail. Return the records whose trees are
        complete.

        Parameters
        ----------
        batch : Batch
        roots, edges : array of int64, shape (n,)
            The result of `begin` for this batch.
        failed : array of bool, shape (n,)
            The records that failed.
        """
        current = [self._roots.get(record.position) for record in batch]
        acked = [
            root == now and not not_done
            for root, now, not_done in zip(roots.tolist(), current, failed.tolist(), strict=True)
        ]
        mask = np.array(acked, np.bool_)
        outcomes = self._acker.ack_many(roots[mask], edges[mask])
        completed = outcomes.root_ids[outcomes.kinds == Status.ACKED]
        done = [batch[i] for i in np.flatnonzero(np.isin(roots, completed)).tolist()]
        for record in done:
            del self._roots[record.position]
        return done

    def fail(self, batch: Batch) -> None:
        """Fail the trees of records. Records without a tree are ignored."""
        roots = [self._roots.pop(record.position, None) for record in batch]
        known = [root for root in roots if root is not None]
        if known:
            self._acker.fail_many(np.array(known, np.int64))
