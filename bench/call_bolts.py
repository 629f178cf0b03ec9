"""Calls of `call_server.py`, in a bolt and in a bare event loop; workers import this module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ackcore.calls import RateLimit
from ackcore.dispatch import Http
from ackcore.topology import AsyncBolt

NUMBERS = pa.schema([("n", pa.int64())])


class Call(AsyncBolt):
    """Calls a server for each input, so many at once; None for as many as the default finds."""

    outputs = NUMBERS

    def __init__(self, url: str, run: str, concurrency: int | None) -> None:
        self.url, self.run = url, run
        if concurrency is not None:
            self.max_concurrency = concurrency

    async def prepare(self, context: Any) -> None:
        """Connect."""
        self.client = Http(self.url)

    async def execute(self, tuple: Any, collector: Any) -> None:
        """Call."""
        await self.client.call({"run": self.run, "n": tuple["n"]})
        collector.emit(tuple.values)

    async def cleanup(self) -> None:
        """Disconnect."""
        await self.client.close()


class Paid(Call):
    """A call that costs 1, within a budget."""

    journal = True

    def __init__(self, url: str, run: str, concurrency: int, budget: float) -> None:
        super().__init__(url, run, concurrency)
        self.limit = RateLimit(cost_per_run=budget)

    async def execute(self, tuple: Any, collector: Any) -> None:
        """Call and pay."""
        await super().execute(tuple, collector)
        collector.used(cost=1)


class BareLoop:
    """The same without anything of ours around it but the client: for ``mapInArrow``."""

    def __init__(self, url: str, run: str, concurrency: int) -> None:
        self.url, self.run, self.concurrency = url, run, concurrency

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Serve mapInArrow."""
        for batch in batches:
            asyncio.run(self._call(batch["n"].to_pylist()))
            yield batch

    async def _call(self, numbers: list[int]) -> None:
        client, left = Http(self.url), iter(numbers)

        async def work() -> None:
            for n in left:
                await client.call({"run": self.run, "n": n})

        await asyncio.gather(*(work() for _ in range(self.concurrency)))
        await client.close()


class NoWait(AsyncBolt):
    """Passes on, from a coroutine that never waits."""

    outputs = NUMBERS

    async def execute(self, tuple: Any, collector: Any) -> None:
        """Emit what came."""
        collector.emit(tuple.values)

    async def execute_many(self, tuples: Any, collectors: Any) -> None:
        """Emit what came in one call."""
        for one, collector in zip(tuples, collectors, strict=True):
            collector.emit(one.values)


async def no_wait(row: Any) -> int:
    """The same as a function."""
    return int(row["n"])
