"""The records of a source, and their positions."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

#: A sequence, or ``source(start)``, which returns the records from a position on.
Source = Sequence[Any] | Callable[[int], Iterable[Any] | AsyncIterable[Any]]

#: Seconds that records of an asynchronous source wait for the rest of their batch.
_LINGER_S = 0.02


class Record(NamedTuple):
    """A record and its position in the source, counted from 0."""

    position: int
    value: Any


class Reader:
    """The reader of a source, from the position ``start`` on.

    An asynchronous source is awaited in its own task, at most one `read` ahead, so that it blocks
    nothing else. The constructor calls a source that is a callable. Raises TypeError if its result
    cannot be iterated.

    ``wake``: called in the loop when records, or the end, have come after a `read` found too few.
    """

    def __init__(
        self, source: Source, start: int, wake: Callable[[], object] = lambda: None
    ) -> None:
        self.position = start  # of the next record
        self.ended = False  # whether the source has no more records
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
        """Return the next n records, or fewer at the end of the source, which sets ``ended``.

        Waits for a source that is not asynchronous. Of an asynchronous one that has delivered fewer
        than n so far, returns none; 20 ms after the first of them came, or at the end, returns
        these few. Raises the source's exceptions.
        """
        if self._later is None:
            values = list(islice(self._now, n))
            self.ended = len(values) < n
        else:
            values = self._read_later(self._later, n)
        start = self.position
        self.position += len(values)
        return [Record(position, value) for position, value in enumerate(values, start)]

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
        """End the task, and close the source's iterator, if it has ``close`` or ``aclose``."""
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
