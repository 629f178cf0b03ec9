"""Executors of bolts that die at a tuple, like a killed worker, and simulated time."""

from __future__ import annotations

import selectors
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from ackcore._arrow.shown import shown_rows
from ackcore.calls.calls import Calls
from ackcore.testing.results import Kill, Row
from ackcore.topology.call_executor import CallExecutor
from ackcore.topology.executors import Executor, executor_for
from ackcore.topology.tuples import Identity, Results


class TaskKilled(BaseException):
    """The task is killed here; no code of a bolt or its executor may catch this."""


class Kills:
    """The tuples at which tasks die, and the number of tuples that each bolt took.

    ``kills``: the tuples, as for `ackcore.testing.run`. Raises TypeError or ValueError if a bolt or
    a place is invalid.
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
            places = [kill] if isinstance(kill, int) else list(kill)
            if not all(isinstance(at, int) and at > 0 for at in places):
                raise ValueError(
                    f"kills[{name!r}] must be a tuple's position from 1, several positions, "
                    f"or a function of a row, got {kill!r}"
                )
            self._at[name] = set(places)
        #: The number of tuples that each bolt took.
        self.taken: Counter[str] = Counter()
        self.count = 0
        #: Called when a task dies.
        self.dying: Callable[[], object] = lambda: None
        self._executors: list[Executor] = []

    def make_executor(self, name: str, component: Any, **keywords: Any) -> Executor:
        """Return the executor of one task of a bolt, like `executor_for`."""
        executor = executor_for(name, component, **keywords)
        if isinstance(executor, CallExecutor):
            waits = SimulatedWaits()
            executor.make_calls = partial(Calls, clock=waits.clock, selector=waits)
        self._executors.append(executor)
        return MortalExecutor(name, executor, self)

    def place_in(self, name: str, batch: pa.RecordBatch) -> int | None:
        """Return the position of the first tuple in a batch at which the task dies, or None."""
        taken, places = self.taken[name], self._at.get(name, ())
        found = [at - taken - 1 for at in places if 0 < at - taken <= len(batch)]
        if name in self._when:
            when = self._when[name]
            rows = enumerate(shown_rows(batch))
            found += [next((place for place, row in rows if when(row)), len(batch))]
        first = min(found, default=len(batch))
        return first if first < len(batch) else None

    def die(self) -> None:
        """Raise `TaskKilled`, after the running calls of the task are abandoned."""
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
    """An executor of one task of a bolt that dies at the tuples of `Kills`; see `Executor`."""

    def __init__(self, name: str, executor: Executor, kills: Kills) -> None:
        self._name = name
        self._executor = executor
        self._kills = kills

    @property
    def ignored(self) -> int:
        """The number of calls of a collector that had no effect, because they were too late."""
        return self._executor.ignored

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Run the bolt on a batch; if the task dies in it, only on the rows before."""
        place = self._kills.place_in(self._name, batch)
        if place is None:
            self._kills.taken[self._name] += len(batch)
            return self._executor.process(source, stream, batch, identity)
        self._kills.taken[self._name] += place + 1
        if place:
            self._executor.process(
                source, stream, batch.slice(0, place), identity and identity.part(0, place)
            )
        self._kills.die()
        raise AssertionError("unreachable")

    def flush(self) -> Results:
        """Flush the bolt."""
        return self._executor.flush()

    def cleanup(self) -> None:
        """Call the bolt's cleanup."""
        self._executor.cleanup()


class SimulatedWaits(selectors.DefaultSelector):
    """A selector that advances simulated time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ns = 0
        self._threads = threading.active_count()

    def clock(self) -> int:
        """Return the simulated time in nanoseconds."""
        return time.monotonic_ns() + self._ahead_ns

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for a socket if there is one; otherwise advance the clock."""
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
