"""The interface of executors, through which the engine runs a task of a bolt, and their choice.

When ``flush()`` has returned, every row that was passed to its executor is acked or failed,
whatever the bolt does. The results name each failed row once, and no acked row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Protocol

import pyarrow as pa

from ackcore.topology.batch_executor import BatchExecutor
from ackcore.topology.bolt_calls import call_settings, journaled
from ackcore.topology.call_executor import CallExecutor
from ackcore.topology.components import (
    AsyncBolt,
    BasicBolt,
    BatchBolt,
    Bolt,
    Component,
    Context,
    UsedTables,
)
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.journaled_executor import Answers, JournaledCallExecutor, JournaledExecutor
from ackcore.topology.row_executor import RowExecutor
from ackcore.topology.table_views import TableView
from ackcore.topology.tuples import Identity, Results


class Executor(Protocol):
    """One task of a bolt.

    Rows are numbered from 0, in the order in which they are passed in; these numbers are their
    handles. The same rows give the same results, unless the bolt itself does not.

    An exception of the bolt fails rows, and only its `KeyboardInterrupt` is raised. With a journal,
    `process` raises RuntimeError or OSError if the journal fails.
    """

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Run the bolt on a batch; return the emissions and failures since the last call.

        ``source``, ``stream``: the component and stream that emitted the batch. ``identity``: the
        records of the rows, if the bolt has ``needs_identity``.
        """

    def flush(self) -> Results:
        """Flush the bolt, then fail all inputs that are neither acked nor failed.

        Returns the last emissions and failures. No call of `process` or `flush` may follow.
        """

    def cleanup(self) -> None:
        """Call the bolt's ``cleanup``, if its ``prepare`` succeeded, and log an exception."""


def executor_for(
    name: str,
    component: Component,
    *,
    task: int = 0,
    batch_id: int | None = None,
    reject: Iterable[type[Exception] | str] = (),
    answers: Answers | None = None,
    tasks: int = 1,
    progressed: Callable[[], None] = lambda: None,
    tables: Mapping[str, TableView] = MappingProxyType({}),
) -> Executor:
    """Make the executor of one task of a bolt; it prepares the bolt before the first row.

    ``name``: the bolt's name in its topology. ``component``: the bolt, which the builder has
    checked; this task must have an instance of its own. ``task``: the number of the task.
    ``batch_id``: the number of the micro-batch. ``reject``: the exceptions, or their names, that
    make a record a dead letter at once, in addition to `Reject` and the bolt's own. ``answers``:
    the journaled answers to the calls of a bolt with ``journal = True``. Without it, the bolt makes
    every call. ``tasks``: the number of the bolt's tasks that may run at once and share an
    `AsyncBolt`'s rate. ``progressed``: called after each call of a bolt that makes several at once.
    ``tables``: the tables that the bolt ``uses``, by name; assigned to its ``tables``.
    """
    assert isinstance(component, Bolt | BasicBolt | AsyncBolt | BatchBolt)
    if component.uses:
        component.tables = UsedTables(tables)
    context = Context(name, task, batch_id)
    reasons = ReasonMaker(name, (*reject, *component.reject), component.retry_on)
    kept = answers if component.journal else None
    if kept is not None:
        component = journaled(component)
    if isinstance(component, BatchBolt):
        return BatchExecutor(component, context, reasons)
    settings = call_settings(component, tasks, reject)
    if settings is None:
        if kept is None:
            return RowExecutor(component, context, reasons)
        assert isinstance(component, BasicBolt)
        return JournaledExecutor(component, context, reasons, answers=kept)
    assert not isinstance(component, Bolt)
    if kept is None:
        return CallExecutor(component, context, reasons, settings, progressed)
    given = component, context, reasons, settings, progressed
    return JournaledCallExecutor(*given, answers=kept)
