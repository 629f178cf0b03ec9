"""Bolts that call a function, and emit its answers after the columns of their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from ackcore.calls import Calls, CallSettings, Retry
from ackcore.calls.settings import MAX_THREADS
from ackcore.calls.threads import CallThreads, is_async
from ackcore.topology.components import (
    AsyncBolt,
    AsyncCollector,
    BatchBolt,
    BatchOutput,
    Component,
    Context,
)
from ackcore.topology.functions import Answers, Function, columns_of
from ackcore.topology.tuples import Tuple


class _Calling(Component):
    """The common part of both bolts.

    Parameters
    ----------
    function : callable
        See `ackcore.topology.functions.kind_of`.
    answers : pyarrow.Schema
        The schema of the function's answers.
    kept : pyarrow.Schema
        The columns of the inputs that are emitted in front of the answers; may be empty.
    settings : CallSettings
        The settings of the calls.
    journal, retry_on, reject
        See `Component`.
    """

    def __init__(
        self,
        function: Function,
        answers: pa.Schema,
        kept: pa.Schema,
        settings: CallSettings,
        *,
        journal: bool = False,
        retry_on: Iterable[type[Exception] | str] | None = None,
        reject: Iterable[type[Exception] | str] = (),
    ) -> None:
        self.outputs = pa.schema([*kept, *answers])
        self.inputs = kept
        self.journal = journal
        self.retry_on = retry_on
        self.reject = reject
        self._function: Any = function
        self._schema = answers
        self._kept = kept
        self._settings = settings


class RowFunction(_Calling, AsyncBolt):
    """A bolt that calls a function, plain or async, with each row; parameters as of `_Calling`.

    The settings are limits for all tasks together. A plain function runs in threads, one for each
    concurrent call.
    """

    def __init__(
        self,
        function: Function,
        answers: pa.Schema,
        kept: pa.Schema,
        settings: CallSettings,
        **told: Any,
    ) -> None:
        super().__init__(function, answers, kept, settings, **told)
        self.max_concurrency = settings.max_concurrency
        self.timeout_s = settings.timeout_s
        self.rate_per_s = settings.rate_per_s
        self.wait_in_task_s = settings.wait_in_task_s

    async def prepare(self, context: Context) -> None:  # type: ignore[override]
        """Enter the function, if it is a context manager, and create its threads."""
        function = self._function
        self._answers = Answers(self._schema)
        self._threads: CallThreads | None = None
        self._call = function
        if not is_async(function):
            # Threads are started on demand, so there is at most one per concurrent call.
            self._threads = CallThreads(function, MAX_THREADS, "ackcore-call")
            self._call = self._threads.call
        if hasattr(type(function), "__aenter__"):
            await function.__aenter__()
        elif hasattr(type(function), "__enter__"):
            function.__enter__()

    async def execute(self, tuple: Tuple, collector: AsyncCollector) -> None:
        """Call the function."""
        answer = await self._call(tuple)
        collector.emit((*tuple.values, *self._answers.row(answer)))

    async def cleanup(self) -> None:  # type: ignore[override]
        """Exit the function, if it is a context manager."""
        function = self._function
        if self._threads is not None:
            self._threads.close()
        if hasattr(type(function), "__aenter__"):
            await function.__aexit__(None, None, None)
        elif hasattr(type(function), "__enter__"):
            function.__exit__(None, None, None)


class BatchFunction(_Calling, BatchBolt):
    """A bolt that calls a function with each batch; parameters as of `_Calling`, without a journal.

    `Retry`, a time-out or an exception in ``settings.retry_on`` is a failure of the call, and fails
    all rows of the batch. Any other exception is a failure of a row, and the batch is bisected to
    the rows that raise by themselves.

    Attributes
    ----------
    attempts : dict of int to int, optional
        If set, the number of calls made with each failed row, the last time that it was called, by
        the task's number of the row.
    """

    attempts: dict[int, int] | None = None
    _calls: Calls[pa.RecordBatch, Any] | None = None

    def prepare(self, context: Context) -> None:
        """Enter the function, if it is a context manager."""
        self._calls = Calls(self._function, self._settings)
        list(self._calls.run(()))  # enters a function that is a context manager

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Call the function."""
        assert self._calls is not None
        ((answer, error, attempts, _),) = self._calls.run([batch])
        rows = range(batch.num_rows)
        if error is None:
            try:
                answers = columns_of(answer, self._schema, batch.num_rows)
            except KeyboardInterrupt:
                raise
            except BaseException as misfit:  # a value's own methods are user code
                error = misfit
            else:
                kept = [batch.column(field.name) for field in self._kept]
                out.emit([*kept, *answers.columns], parents=rows)
                return
        if self.attempts is not None:
            self.attempts.update((out.first_row + row, attempts) for row in rows)
        if not self._is_of_the_call(error):
            raise error
        out.fail(rows, error)

    def cleanup(self) -> None:
        """Release the resources of the calls."""
        if self._calls is not None:
            self._calls.close()

    def _is_of_the_call(self, error: BaseException) -> bool:
        if self._settings.is_final(error):
            return False
        return isinstance(error, (Retry, TimeoutError, *self._settings.retry_on))
