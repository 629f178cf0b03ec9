"""Runs one task of a bolt, whichever shape it has: what an engine calls.

Whatever a bolt does, every row that was handed to its executor is, when ``flush()`` has returned,
either acked (it is in no failure) or failed (it is in exactly one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import pyarrow as pa

from ackcore.topology.answers import Answers
from ackcore.topology.batch_executor import BatchExecutor
from ackcore.topology.bolt_calls import journaled
from ackcore.topology.call_executor import CallExecutor
from ackcore.topology.call_settings import call_settings
from ackcore.topology.components import (
    AsyncBolt,
    BasicBolt,
    BatchBolt,
    Bolt,
    Component,
    Context,
    refuse_unrunnable,
)
from ackcore.topology.failure_reasons import Reasons
from ackcore.topology.journaled_executor import JournaledCallExecutor, JournaledExecutor
from ackcore.topology.row_executor import RowExecutor
from ackcore.topology.tuples import Identity, Results


class Executor(Protocol):
    """One task of a bolt.

    Rows get consecutive handles, from 0, in the order in which they are handed in.  What is
    returned is deterministic given the rows and what the bolt does with them, as long as the bolt
    starts no threads.

    Only `KeyboardInterrupt` comes out of these methods; whatever else a bolt raises fails rows.
    """

    @property
    def ignored(self) -> int:
        """Calls that came too late to change anything."""

    def process(
        self, source: str, stream: str, batch: pa.RecordBatch, identity: Identity | None
    ) -> Results:
        """Run the bolt on a batch.

        Parameters
        ----------
        source, stream : str
            The component and its stream that the batch comes from.
        batch : pyarrow.RecordBatch
        identity : Identity, optional
            Which records the rows are, if the bolt has ``needs_identity``.

        Raises
        ------
        RuntimeError
            If the executor was flushed.
        """

    def flush(self) -> Results:
        """Flush the bolt; what is neither acked nor failed then fails.

        Raises
        ------
        RuntimeError
            If the executor was flushed before.
        """

    def cleanup(self) -> None:
        """Let the bolt clean up, if it was prepared; what it raises is logged."""


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
) -> Executor:
    """Make the executor of one task of a bolt.

    The bolt is prepared with its first row, so that a task without rows costs nothing.

    Parameters
    ----------
    name : str
        The bolt's name in its topology.
    component : Bolt, BasicBolt, AsyncBolt or BatchBolt
        The bolt: an instance of this task's own.
    task : int, default 0
        Which of the bolt's tasks it is.
    batch_id : int, optional
        Number of the micro-batch.
    reject : iterable of exception class or str
        Exceptions, or their names, that go to the dead letters at once, beside `Reject` and those
        of the bolt.
    answers : Answers, optional
        Where a bolt that says ``journal = True`` writes down what its calls came to, and finds it;
        without, it calls anew.
    tasks : int, default 1
        How many of its tasks may have rows at once: they share an `AsyncBolt`'s rate.
    progressed : callable, optional
        Called whenever something is done within one call of the executor, if the bolt has several
        inputs out at once.

    Raises
    ------
    TypeError, ValueError
        If the component is no bolt, or its methods or outputs cannot be run.
    """
    refuse_unrunnable(component)
    assert isinstance(component, Bolt | BasicBolt | AsyncBolt | BatchBolt)
    context = Context(name, task, batch_id)
    reasons = Reasons(name, (*reject, *component.reject), component.retry_on)
    kept = answers if component.journal else None
    if kept is not None:
        component = journaled(component)
    if isinstance(component, BatchBolt):
        return BatchExecutor(component, context, reasons)
    settings = call_settings(component, tasks, reject)
    if kept is not None and not isinstance(component, Bolt):
        if settings is None:
            assert isinstance(component, BasicBolt)
            return JournaledExecutor(component, context, reasons, kept)
        return JournaledCallExecutor(component, context, reasons, settings, progressed, kept)
    if settings is not None:
        return CallExecutor(component, context, reasons, settings, progressed)
    return RowExecutor(component, context, reasons)
