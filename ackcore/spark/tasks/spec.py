"""The settings of the tasks of a run, the same for all tasks and pickled into each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from ackcore._records import Int64s
from ackcore.calls.usage import Budget
from ackcore.spark.tasks.exchange_format import SETTLE
from ackcore.spark.tasks.failed_rows import Rules
from ackcore.spark.tasks.row_files import RowFile
from ackcore.topology.components import AsyncBolt, Component
from ackcore.topology.executors import Executor, executor_for
from ackcore.topology.expectations import StreamCheck
from ackcore.topology.parts import Grouping
from ackcore.topology.stage_layout import Layout, Subscription
from ackcore.topology.table_views import TableSource

#: The most bytes of rows that are read or passed on at a time.
CHUNK_BYTES = 1 << 25

#: The columns with a tuple's identity, besides its fields.
IDENTITY_FIELDS = (
    pa.field("_ackcore_message_id", pa.string()),
    pa.field("_ackcore_attempt", pa.int32()),
    pa.field("_ackcore_stable_id", pa.int64()),
)


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """The part of a run's plan that tasks read: its key, paths, and roots that may crash it."""

    number: int  # the micro-batch's number
    now_ms: int  # the micro-batch's time, in milliseconds since 1970
    #: The 64-bit key of all ids of the run, a function of the deployment's key and the number.
    key: int
    #: A directory that driver and workers share, or a bucket's URL, with the due retries in it.
    work: str
    journal: str  # a directory that all runs of the micro-batch share, with the outcomes of calls
    #: Whether in-flight markers name roots, from which the driver finds crashing records.
    careful: bool = False
    #: The roots that run alone, since they may crash their worker: each once, and once more for
    #: each attempt that crashed with this root alone in flight.
    suspects: tuple[int, ...] = ()
    #: The roots that fail without being run.
    rejected: tuple[int, ...] = ()
    #: The rules by which tasks judge failed records that they hold in memory; None if all failed
    #: records are to be read again.
    rules: Rules | None = None
    by_root: bool = False  # whether each root is settled by itself, and not with its cohort
    #: The tables that bolts use, as they were after the last finished micro-batch.
    tables: Mapping[str, TableSource] = field(default_factory=dict)
    #: By bolt with ``cost_per_run``, the cost of its calls in earlier micro-batches.
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunPlan(TaskPlan):
    """The plan of one run, with its due retries."""

    #: By spout, the file of the due records, in the columns of `TRACKING`, of the source and, for
    #: some spouts, of `number_of`.
    retries: Mapping[str, RowFile] = field(default_factory=dict)
    #: By ordered spout, the hashes of the keys that have a waiting record.
    blocked: Mapping[str, Int64s] = field(default_factory=dict)
    #: Whether few records are expected, so that the driver settles them without a stage of Spark.
    is_small: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskSpec(TaskPlan):
    """The settings of the tasks of a run: its plan, the topology and limits."""

    layout: Layout  # the components by level, and the subscriptions between them
    components: Mapping[str, Component]  # the component of each bolt, by name
    #: The schemas of emitted rows, by component and stream.
    schemas: Mapping[tuple[str, str], pa.Schema]
    dests: int  # the number of tasks behind every exchange
    chunk_rows: int  # the number of rows that the spout stage processes at a time
    reject: tuple[type[Exception], ...]  # the exceptions that fail a tuple for good, in any bolt
    #: Whether a task also runs alone the rows that its crashed attempts had in flight. It is False
    #: if attempts may get different rows.
    isolates: bool = False
    in_order: bool = False  # whether isolated records run in order of arrival
    timeout_s: float | None = None  # the time limit of one call of a bolt in seconds
    slots: int = 1  # the number of tasks that Spark runs at once
    readers: int | None = None  # the number of tasks of the spout stage; None if it is unknown
    trace_per_million: int = 0  # the number of roots in a million that are traced
    #: The expectations of emitted rows, by component and stream.
    checks: Mapping[tuple[str, str], tuple[StreamCheck, ...]] = field(default_factory=dict)
    make_executor: Callable[..., Executor] = executor_for  # `executor_for`, or a wrapper of it

    def budget(self, bolt: str) -> Budget | None:
        """Return a new budget: one task's share of the rest of ``cost_per_run``; None without it.

        The bolt is behind an exchange, so that the number of its tasks is known.
        """
        component = self.components[bolt]
        limit = component.limit if isinstance(component, AsyncBolt) else None
        if limit is None or limit.cost_per_run is None:
            return None
        tasks = max(map(self._tasks_of, self.layout.into(bolt)))
        return Budget(bolt, limit.cost_per_run, self.spent.get(bolt, 0.0), tasks)

    def tasks_at_once(self, bolt: str) -> int:
        """Return the most tasks that run at once and share a limit of the bolt's calls.

        It is 1 if the limit is by key, and each key is in one task.
        """
        if self._has_whole_keys(bolt):
            return 1
        if self.layout.levels[bolt] > 1:
            tasks = max(map(self._tasks_of, self.layout.into(bolt)))
        else:
            tasks = self.slots if self.readers is None else self.readers
        return min(tasks, self.slots)

    def _has_whole_keys(self, bolt: str) -> bool:
        """Return whether all tuples of a key of the bolt's limit are in one task."""
        component = self.components[bolt]
        if not isinstance(component, AsyncBolt) or component.limit is None:
            return False
        inputs = self.layout.into(bolt)
        by_key = Grouping("fields", (str(component.limit.per),))
        return len(inputs) == 1 and inputs[0].grouping == by_key

    def _tasks_of(self, sub: Subscription) -> int:
        if not sub.spreads:
            return self.dests
        if sub.grouping.name == "global":
            return 1
        return self.tasks_behind(sub)

    def tasks_behind(self, sub: Subscription) -> int:
        """Return the number of tasks among which a subscription's grouping chooses."""
        return min(sub.parallelism or self.dests, self.dests)

    def sends(self, level: int) -> tuple[int, ...]:
        """Return the later levels that a level may send to, ascending; the last one is `SETTLE`.

        Empty if there is no settle stage, so that each task settles its own records.
        """
        if not self.layout.settles:
            return ()
        later = {
            sub.level_to
            for sub in self.layout.subscriptions
            if sub.level_from == level and sub.level_to > level
        }
        return (*sorted(later), SETTLE)

    def tuple_schema(self, sub: Subscription) -> pa.Schema:
        """Return the schema of a subscription's rows; `IDENTITY_FIELDS` are added if needed."""
        schema = self.schemas[sub.source, sub.stream]
        if sub.target in self.layout.needs_identity:
            for column in IDENTITY_FIELDS:
                schema = schema.append(column)
        return schema
