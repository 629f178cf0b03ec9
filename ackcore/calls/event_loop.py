"""The event loop of a task's calls: it runs when it is told to, and its time is the calls' own."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")

#: Coroutines that are cancelled get so long to let go of what they hold.
_GRACE_S = 2.0


class CallLoop(asyncio.SelectorEventLoop):
    """An event loop that tells the time by a clock which may stand still.

    While whoever reads the outcomes has control, the loop does not run: answers arrive, and nobody
    looks.  By a clock that goes on meanwhile all that is timed, the user's own ``asyncio.timeout``
    included, would be up at once when it runs again, though its answer is there.

    Parameters
    ----------
    clock : callable
        Nanoseconds.
    selector : selectors.BaseSelector, optional
        What it waits with.
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
        """Take in what has arrived, without waiting for anything."""
        self.call_soon(self.stop)
        self.run_forever()

    def complete(self, coroutine: Coroutine[Any, Any, Value]) -> Value:
        """Run until a coroutine is done, and return what it returns."""
        return self.run_until_complete(coroutine)

    def cancel_all(self) -> None:
        """Cancel all that runs, and give it a little time to let go of what it holds."""
        if _runs_here():
            return  # collected as garbage within another loop: coroutines cannot run
        there = asyncio.all_tasks(self)
        for task in there:
            task.cancel()
        if there:
            self.run_until_complete(asyncio.wait(there, timeout=_GRACE_S))
        for task in there:
            if task.done() and not task.cancelled():
                task.exception()  # looked at, so that nobody logs it

    def end(self) -> None:
        """Cancel what is left, and close."""
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
