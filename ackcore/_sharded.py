"""A ledger in shards: the shard of each root, and the distribution of columns of messages.

The shard of a root is Storm's acker task (`ackcore.ids.acker_task`, SEMANTICS 1), so all messages
of a root reach the same ledger, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ackcore import _backend
from ackcore._backend import AckerBackend, BackendFactory, load_backend
from ackcore._columns import (
    as_count,
    as_id,
    check_init_tasks,
    check_kinds,
    id_column,
    same_length,
    task_column,
)
from ackcore._records import Entries, Outcomes, Stats
from ackcore.ids import acker_task

MAX_SHARDS = 2**16

Table = TypeVar("Table", Entries, Outcomes)
Columns = Mapping[str, npt.NDArray[Any]]


class ShardedLedger:
    """A list of ledgers, each with the roots of one shard.

    Raises TypeError if the backend cannot be called like `ackcore.Ledger`, or its ledgers lack
    methods.

    ``backend``: the factory of the ledgers: see `ackcore.Acker`. ``shards``: the number of ledgers,
    in 1..`MAX_SHARDS`. ``capacity``: the number of entries to reserve room for, in all ledgers
    together. ``buckets``, ``refresh_on_ack``, ``clock``: the arguments of each ledger, as in
    `ackcore.Ledger`.
    """

    def __init__(
        self,
        backend: str | BackendFactory | None,
        shards: int,
        capacity: int,
        buckets: int,
        refresh_on_ack: bool,
        clock: Any,
    ) -> None:
        factory = _factory(backend)
        each = -(-as_count(capacity, "capacity", 1) // shards)
        self.shards: list[AckerBackend] = [
            _ledger(factory, each, buckets, refresh_on_ack, clock) for _ in range(shards)
        ]

    def of(self, root_id: Any) -> AckerBackend:
        """Return the ledger for a root."""
        if len(self.shards) == 1:
            return self.shards[0]
        return self.shards[acker_task(as_id(root_id, "root_id"), len(self.shards))]

    def apply_many(self, method: str, columns: Columns) -> Outcomes:
        """Call a ledger method with `checked_columns`, on each shard that has rows."""
        if len(self.shards) == 1 or not len(columns["root_ids"]):
            outcomes: Outcomes = getattr(self.shards[0], method)(*columns.values())
            return outcomes
        parts: list[Outcomes] = []
        for shard, rows in self._split(columns["root_ids"]):
            message = getattr(self.shards[shard], method)
            parts.append(message(*(column[rows] for column in columns.values())))
        return joined(parts)

    def merge(self, entries: Entries) -> None:
        """Fold checked entries in, without decisions."""
        for shard, rows in self._split(entries.root_ids):
            self.shards[shard].merge(entries.take(rows))

    def rotate(self) -> None:
        """Turn each ledger's buckets once."""
        for ledger in self.shards:
            ledger.rotate()

    def expired(self) -> Entries:
        """Remove and return the entries that expired at the last turn."""
        return joined([ledger.expired() for ledger in self.shards])

    def entries(self) -> Entries:
        """Return the live entries."""
        return joined([ledger.entries() for ledger in self.shards])

    def oldest(self, n: int) -> Entries:
        """Return the n entries that expire first; if equal in age, those seen first."""
        found = joined([ledger.oldest(n) for ledger in self.shards])
        keys = (found.root_ids, found.first_ms, -found.ages.astype(np.int16))
        order = np.lexsort([key for key in keys if key is not None])
        return found.take(order[:n])

    @property
    def stats(self) -> Stats:
        """The sums over all shards."""
        return Stats(*map(sum, zip(*(ledger.stats for ledger in self.shards), strict=True)))

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def _split(self, roots: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
        # numpy sorts 16-bit integers by radix sort.
        return groups_of(acker_task(roots, len(self.shards)).astype(np.uint16))


def checked_columns(method: str, given: Mapping[str, Any]) -> Columns:
    """Return a message's columns as arrays; raise for any bad row before a shard receives rows."""
    columns: dict[str, npt.NDArray[Any]] = {
        name: task_column(column, name) if name == "tasks" else id_column(column, name)
        for name, column in given.items()
    }
    same_length(**columns)
    if method == "apply":
        check_kinds(columns["tasks"])
    elif method == "init_many":
        check_init_tasks(columns["tasks"])
    return columns


def groups_of(labels: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each label and its rows, in order; labels ascending."""
    if len(labels) == 0:
        return
    order = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[order])) + 1
    for rows in np.split(order, starts):
        yield int(labels[rows[0]]), rows


def joined(tables: Sequence[Table]) -> Table:
    """Join several tables of one kind."""
    if len(tables) == 1:
        return tables[0]
    names: Iterable[str] = tables[0].columns()
    return type(tables[0])(
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    )


def _factory(backend: str | BackendFactory | None) -> BackendFactory:
    if backend is None:
        return _backend.Ledger
    if isinstance(backend, str):
        return load_backend(backend)
    if not callable(backend):
        raise TypeError(
            "backend must be the name of a backend, or a callable that makes ledgers, got "
            f"{type(backend).__name__}; leave it out for ackcore.Ledger"
        )
    return backend


def _ledger(
    factory: BackendFactory, capacity: int, buckets: int, refresh_on_ack: bool, clock: Any
) -> AckerBackend:
    try:
        ledger = factory(capacity, buckets=buckets, refresh_on_ack=refresh_on_ack, clock=clock)
    except TypeError as error:
        trace = error.__traceback__
        # If the traceback has no line of the factory, the factory refused the arguments.
        if factory is _backend.Ledger or (trace is not None and trace.tb_next is not None):
            raise
        raise TypeError(
            "backend must take the arguments of ackcore.Ledger (capacity, buckets=, "
            f"refresh_on_ack=, clock=) and make a ledger, and {factory!r} does not: {error}; leave "
            "it out for ackcore.Ledger"
        ) from error
    missing = _backend.missing_from(ledger)
    if missing:
        raise TypeError(
            f"backend must make ledgers with the methods of AckerBackend, but those of "
            f"{factory!r} lack {', '.join(missing)}"
        )
    return ledger
