"""The event loop of a task's calls. It runs only during waits, and uses the clock of the calls."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")

#: Seconds for cancelled coroutines to release their resources.
_GRACE_S = 2.0


class CallLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock may stand still.

    The loop does not run while the reader of the outcomes has control. Answers that arrive then are
    not handled. If the clock went on meanwhile, all time-outs, the user's own ``asyncio.timeout``
    included, would expire as soon as the loop runs again, although their answers are there.

    Parameters
    ----------
    clock : callable
        Returns the time in nanoseconds.
    selector : selectors.BaseSelector, optional
        The selector of the loop.
    """

    def __init__(
        self, clock: Callable[[], int], selector: selectors.BaseSelector | None = None
    ) -> None:
        self._clock_ns = clock
        super().__init__(selector)

    def time(self) -> float:
        """Return the time in seconds."""
        return self._clock_ns() / 1e9

    def look(self) -> None:
        """Handle the events that have arrived, without waiting."""
        self.call_soon(self.stop)
        self.run_forever()

    def complete(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run until a coroutine is done, and return its result."""
        return self.run_until_complete(coroutine)

    def cancel_all(self) -> None:
        """Cancel all running tasks, and give them two seconds to release their resources."""
        if _runs_here():
            return  # collected as garbage within another loop: coroutines cannot run
        there = asyncio.all_tasks(self)
        for task in there:
            task.cancel()
        if there:
            self.run_until_complete(asyncio.wait(there, timeout=_GRACE_S))
        for task in there:
            if task.done() and not task.cancelled():
                task.exception()  # retrieve it, so that asyncio does not log it

    def end(self) -> None:
        """Cancel the remaining tasks, and close the loop."""
        try:
            self.cancel_all()
            if not _runs_here():
                self.run_until_complete(self.shutdown_asyncgens())
        finally:
            self.close()


def _runs_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
