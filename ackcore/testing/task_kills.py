"""Executors of bolts for tests that die at chosen tuples, like a killed worker; simulated time."""

from __future__ import annotations

import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa

from ackcore._arrow.shown import shown_rows
from ackcore.calls.calls import Calls
from ackcore.testing.results import Kill, Row
from ackcore.topology.call_executor import CallExecutor
from ackcore.topology.executors import Executor, executor_for
from ackcore.topology.tuples import Identity, Results


class TaskKilled(BaseException):
    """The death of a task at a tuple. A `BaseException`, which no ``except Exception`` catches."""


class Kills:
    """The tuples at which tasks die, and the number of tuples that each bolt received.

    ``kills``: the argument of `ackcore.testing.run`. ``bolts``: the names of all bolts. Raises
    ValueError if ``kills`` names another bolt, or a position is no positive integer.
    """

    def __init__(self, kills: Mapping[str, Kill], bolts: Collection[str]) -> None:
        self._at: dict[str, set[int]] = {}
        self._when: dict[str, Callable[[Row], bool]] = {}
        for name, kill in kills.items():
            if name not in bolts:
                raise ValueError(
                    f"kills must name bolts ({', '.join(map(repr, bolts))}), got {name!r}"
                )
            if callable(kill):
                self._when[name] = kill
                continue
            positions = [kill] if isinstance(kill, int) else list(kill)
            if not all(isinstance(at, int) and at > 0 for at in positions):
                raise ValueError(
                    f"kills[{name!r}] must be a tuple's position from 1, several positions, "
                    f"or a function of a row, got {kill!r}"
                )
            self._at[name] = set(positions)
        #: The number of tuples that each bolt received.
        self.taken: Counter[str] = Counter()
        self.count = 0
        #: Called when a task dies.
        self.dying: Callable[[], object] = lambda: None
        self._executors: list[Executor] = []

    def make_executor(self, name: str, component: Any, **keywords: Any) -> Executor:
        """Return the executor of one task of a bolt, which dies at these tuples.

        ``keywords``: those of `executor_for`. Calls of several inputs use simulated time.
        """
        executor = executor_for(name, component, **keywords)
        if isinstance(executor, CallExecutor):
            waits = SimulatedWaits()
            executor.make_calls = partial(Calls, clock=waits.clock, selector=waits)
        self._executors.append(executor)
        return MortalExecutor(name, executor, self)

    def first_in(self, name: str, batch: pa.RecordBatch) -> int | None:
        """Return the first row of a batch, from 0, at which a bolt's task dies; None if none."""
        taken, positions = self.taken[name], self._at.get(name, ())
        found = [at - taken - 1 for at in positions if 0 < at - taken <= len(batch)]
        if name in self._when:
            when = self._when[name]
            rows = enumerate(shown_rows(batch))
            found += [next((at for at, row in rows if when(row)), len(batch))]
        first = min(found, default=len(batch))
        return first if first < len(batch) else None

    def die(self) -> NoReturn:
        """Count a death, call `dying`, stop the task's running calls, and raise `TaskKilled`."""
        self.count += 1
        self.dying()
        for executor in self._executors:
            if isinstance(executor, CallExecutor):
                executor.abandon()
        raise TaskKilled

    def ended(self) -> None:
        """Drop the executors of a task that has ended."""
        self._executors.clear()


class MortalExecutor:
    """An `Executor` that dies at the tuples of `Kills`."""

    def __init__(self, name: str, executor: Executor, kills: Kills) -> None:
        self._name = name
        self._executor = executor
        self._kills = kills

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Run the bolt on a batch.

        If its task dies at a row, run the bolt on the rows before, and raise `TaskKilled`.
        """
        first = self._kills.first_in(self._name, batch)
        if first is None:
            self._kills.taken[self._name] += len(batch)
            return self._executor.process(source, stream, batch, identity)
        self._kills.taken[self._name] += first + 1
        if first:
            self._executor.process(
                source, stream, batch.slice(0, first), identity and identity.part(0, first)
            )
        self._kills.die()

    def flush(self) -> Results:
        """Flush the bolt, and return its last results."""
        return self._executor.flush()

    def cleanup(self) -> None:
        """Call the bolt's cleanup."""
        self._executor.cleanup()


class SimulatedWaits(selectors.DefaultSelector):
    """A selector of an event loop that advances a simulated clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ns = 0
        self._threads = threading.active_count()

    def clock(self) -> int:
        """Return the monotonic clock's time plus the time of simulated waits, in nanoseconds."""
        return time.monotonic_ns() + self._ahead_ns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for a ready socket, and return those that are ready, perhaps none.

        With neither an open socket nor a thread, advance the clock by ``timeout`` instead of
        waiting. None waits without a limit.
        """
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        # One file belongs to the event loop.  A thread of the bolt may answer at any time.
        waits = len(self.get_map()) > 1 or threading.active_count() > self._threads
        if timeout is None or waits:
            return super().select(timeout)
        # Rounded up, so that a call that is due in float seconds is due in nanoseconds.
        self._ahead_ns += int(timeout * 1e9) + 1
        return found
