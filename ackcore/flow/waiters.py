"""Threads and coroutines that wait for room."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable
from typing import Any

from ackcore.flow.consumers import Lease


class Waiter:
    """A wait for room. The controller sets ``lease`` under its lock, and then wakes the waiter."""

    __slots__ = ("item", "key", "lease")

    def __init__(self, item: Any, key: Hashable) -> None:
        self.item = item
        self.key = key
        self.lease: Lease | None = None

    def wake(self) -> None:
        """End the wait. Any thread may call it."""
        raise NotImplementedError

    def granted(self) -> Lease:
        """Return the granted lease."""
        assert self.lease is not None
        return self.lease


class ThreadWaiter(Waiter):
    """A waiting thread."""

    __slots__ = ("_lock",)

    def __init__(self, item: Any, key: Hashable) -> None:
        super().__init__(item, key)
        self._lock = threading.Lock()
        self._lock.acquire()

    def wake(self) -> None:
        """See `Waiter.wake`."""
        self._lock.release()

    def wait(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` seconds. Return whether the waiter was woken."""
        return self._lock.acquire(timeout=wait_s)


class FutureWaiter(Waiter):
    """A waiting coroutine."""

    __slots__ = ("_event", "_loop")

    def __init__(self, item: Any, key: Hashable, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(item, key)
        self._loop = loop
        self._event = asyncio.Event()

    def wake(self) -> None:
        """See `Waiter.wake`."""
        if self._loop.is_closed():
            return  # the coroutine has ended with its loop
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` seconds. Return whether the waiter was woken."""
        try:
            async with asyncio.timeout(wait_s):
                await self._event.wait()
        except TimeoutError:
            return self._event.is_set()
        return True
