"""The records of a source: their positions, and the tuple trees of those in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ackcore._records import Int64s, Status
from ackcore.acker import Acker
from ackcore.flow import Batch
from ackcore.ids import IdSource

#: A sequence, or ``source(start)``, which returns the records from a position on.
Source = Sequence[Any] | Callable[[int], Iterable[Any] | AsyncIterable[Any]]

#: Seconds that records of an asynchronous source wait for the rest of their batch.
_LINGER_S = 0.02


class Record(NamedTuple):
    """A record and its position in the source, counted from 0."""

    position: int
    value: Any


class Reader:
    """The reader of a source, from a position on.

    An asynchronous source is awaited in its own task, at most one `read` ahead, so that it blocks
    nothing else.

    ``wake``: called in the loop when records have come after a `read` that found too few.

    Attributes
    ----------
    position : int
        The position of the next record.
    ended : bool
        Whether the source has no more records.
    """

    def __init__(
        self, source: Source, start: int, wake: Callable[[], object] = lambda: None
    ) -> None:
        self.position = start
        self.ended = False
        self._wake = wake
        self._later: AsyncIterator[Any] | None = None
        self._task: asyncio.Task[None] | None = None  # awaits the source
        self._came: deque[Any] = deque()
        self._first_s = 0.0  # the time at which the first of these came
        self._wanted = 0
        self._room = asyncio.Event()
        self._now: Iterator[Any] = iter(())
        if not callable(source):
            # A slice would copy the rest.
            self._now = (source[i] for i in range(start, len(source)))
            return
        given = source(start)
        if isinstance(given, AsyncIterable):
            self._later = aiter(given)
        elif isinstance(given, Iterable):
            self._now = iter(given)
        else:
            raise TypeError(
                f"source({start}) must return an iterable, or an asynchronous one, "
                f"got {type(given).__name__}"
            )

    def read(self, n: int) -> list[Record]:
        """Return the next n records, or fewer at the end.

        While an asynchronous source has fewer than n, return none, and after `_LINGER_S` those few.
        """
        values = self._read_now(n) if self._later is None else self._read_later(self._later, n)
        start = self.position
        self.position += len(values)
        return [Record(position, value) for position, value in enumerate(values, start)]

    def _read_now(self, n: int) -> list[Any]:
        values = list(islice(self._now, n))
        self.ended = len(values) < n
        return values

    def _read_later(self, source: AsyncIterator[Any], n: int) -> list[Any]:
        self._wanted = n
        self._room.set()
        if self._task is None:
            self._task = asyncio.ensure_future(self._await(source))
        came = self._came
        if not came and self._task.done():
            self.ended = True
            self._task.result()  # raises what the source raised
        waits = len(came) < n and not self._task.done()
        if waits and not (came and time.monotonic() - self._first_s >= _LINGER_S):
            return []
        return [came.popleft() for _ in range(min(n, len(came)))]

    async def _await(self, source: AsyncIterator[Any]) -> None:
        came = self._came
        try:
            async for value in source:
                if not came:
                    self._first_s = time.monotonic()
                came.append(value)
                while len(came) >= self._wanted:
                    self._wake()
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._wake()

    async def close(self) -> None:
        """Close the source."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._task
        close = getattr(self._now if self._later is None else self._later, "close", None)
        if close is not None:
            close()
        aclose = getattr(self._later, "aclose", None)
        if aclose is not None:
            await aclose()


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

        ``roots``, ``edges`` (array of int64, shape (n,)): the result of `begin` for this batch.
        ``failed`` (array of bool, shape (n,)): the records that failed.
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
