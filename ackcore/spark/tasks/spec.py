"""The work of every task of a run: the same for all of them, and pickled into each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from ackcore.spark.tasks.exchange_format import SETTLE
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.topology.components import Component
from ackcore.topology.executors import Executor, executor_for
from ackcore.topology.groupings import Global
from ackcore.topology.stage_layout import Layout, Subscription

#: Bytes that are taken in, or handed on, at a time, if that is fewer rows than otherwise.
CHUNK_BYTES = 1 << 25

#: What carries a tuple's identity beside its fields.
IDENTITY_FIELDS = (
    pa.field("_ackcore_message_id", pa.string()),
    pa.field("_ackcore_attempt", pa.int32()),
    pa.field("_ackcore_stable_id", pa.int64()),
)


@dataclass(frozen=True)
class TaskSpec:
    """The work of the tasks of a run.

    Attributes
    ----------
    layout : Layout
        The components by level, and the subscriptions between them.
    components : mapping from str to Component
        By bolt.
    schemas : mapping from (str, str) to pyarrow.Schema
        By component and stream.
    key, number : int
        Of the micro-batch.
    dests : int
        Tasks behind every exchange.
    chunk_rows : int
        What the spout stage takes in at a time.
    directory : str
        Of the run, shared with the driver.
    journal : str
        The directory of the micro-batch's journals, shared by all of its runs.
    reject : tuple of exception class
        What fails a tuple for good, whichever bolt raises it.
    careful : bool
        Whether in-flight markers name roots.
    suspects : mapping from int to int
        By root that is run alone, how often it was alone in flight when an attempt crashed.
    rejected : frozenset of int
        Roots that fail instead of being run.
    isolates : bool
        Whether the markers of earlier attempts at a task are about the same rows.
    timeout_s : int or None
        How long one call of a bolt may take.
    slots : int
        How many tasks Spark runs at once.
    rules : Rules or None
        By what a task judges records that fail while it has them; None if they are read again.
    trace_per_million : int
        Of how many roots in a million it is told where they were, and how long.
    make_executor : callable
        `executor_for`, or what wraps it.
    """

    layout: Layout
    components: Mapping[str, Component]
    schemas: Mapping[tuple[str, str], pa.Schema]
    key: int
    number: int
    dests: int
    chunk_rows: int
    directory: str
    journal: str
    reject: tuple[type[Exception], ...]
    careful: bool = False
    suspects: Mapping[int, int] = field(default_factory=dict)
    rejected: frozenset[int] = frozenset()
    isolates: bool = False
    timeout_s: int | None = None
    slots: int = 1
    rules: Rules | None = None
    trace_per_million: int = 0
    make_executor: Callable[..., Executor] = executor_for

    def tasks_at_once(self, bolt: str) -> int:
        """Return how many tasks of a bolt may have rows at once, at most."""
        tasks = self.slots
        if self.layout.levels[bolt] > 1:
            tasks = 0
            for sub in self.layout.subscriptions:
                if sub.target == bolt:
                    tasks = max(tasks, self._tasks_of(sub))
        return min(tasks, self.slots)

    def _tasks_of(self, sub: Subscription) -> int:
        if not sub.spreads:
            return self.dests
        if isinstance(sub.grouping, Global):
            return 1
        return self.dests if sub.parallelism is None else min(sub.parallelism, self.dests)

    def sends(self, level: int) -> tuple[int, ...]:
        """Return the levels at which something from this one may be opened."""
        if not self.layout.settles:
            return ()
        later = {
            sub.level_to
            for sub in self.layout.subscriptions
            if sub.level_from == level and sub.level_to > level
        }
        return (*sorted(later), SETTLE)

    def tuple_schema(self, sub: Subscription) -> pa.Schema:
        """Return the columns of what is sent for a subscription."""
        schema = self.schemas[sub.source, sub.stream]
        if sub.target in self.layout.needs_identity:
            for column in IDENTITY_FIELDS:
                schema = schema.append(column)
        return schema
