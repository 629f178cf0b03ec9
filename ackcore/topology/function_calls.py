"""Calls of a user's function: `RowCalls` for `attempt`, and bolts that call one for `guard`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.calls.call_settings import MAX_THREADS, CallSettings
from ackcore.calls.calls import Calls
from ackcore.calls.outcomes import CallOutcome, as_final, is_marked_final, marked_final
from ackcore.calls.rate_limits import unreported
from ackcore.calls.threads import CallThreads, is_async
from ackcore.topology.bolt_calls import log
from ackcore.topology.bolt_functions import AnswerRows, Function, answer_parts
from ackcore.topology.components import (
    DEFAULT_STREAM,
    AsyncBolt,
    AsyncCollector,
    BatchBolt,
    BatchOutput,
    Component,
    Context,
)
from ackcore.topology.row_conversion import Row, rows_of
from ackcore.topology.row_executor import SLICE_ROWS
from ackcore.topology.tuples import Origin, Tuple


class _Calling(Component):
    """The common part of `RowFunction` and `BatchFunction`.

    ``function``: a function that `ackcore.topology.bolt_functions.kind_of` accepts. ``answers``:
    the schema of its answers. ``kept``: the columns of the inputs that are emitted in front of the
    answers; all of them for a `RowFunction`. ``settings``: the settings of the calls. ``journal``,
    ``retry_on``, ``reject``: the attributes of a `Component`.
    """

    def __init__(
        self,
        function: Function,
        answers: pa.Schema,
        kept: pa.Schema,
        settings: CallSettings,
        *,
        journal: bool = False,
        retry_on: Collection[type[Exception] | str] | None = None,
        reject: Collection[type[Exception] | str] = (),
    ) -> None:
        self.outputs = pa.schema([*kept, *answers])
        self.journal = journal
        self.retry_on = retry_on
        self.reject = reject
        self._function: Any = function
        self._schema = answers
        self._kept = kept
        self._settings = settings


class RowFunction(_Calling, AsyncBolt):
    """A bolt that calls a function, plain or async, with each row; parameters as for `_Calling`.

    A rate limit is for all tasks together. A plain function runs in threads, one for each
    concurrent call.
    """

    def __init__(self, *args: Any, **told: Any) -> None:
        super().__init__(*args, **told)
        settings = self._settings
        self.max_concurrency = settings.max_concurrency
        self.timeout_s = settings.timeout_s
        self.limit = settings.limit
        self.wait_in_task_s = settings.wait_in_task_s

    async def prepare(self, context: Context) -> None:  # type: ignore[override]
        """Enter the function, if it is an (async) context manager; make threads for a plain one."""
        function = self._function
        self._answers = AnswerRows(self._schema)
        self._threads: CallThreads | None = None
        self._call = function
        if not is_async(function):
            # Threads are started on demand, so there is at most one per concurrent call.
            self._threads = CallThreads(function, MAX_THREADS, "ackcore-call")
            self._call = self._threads.call
        if hasattr(type(function), "__aenter__"):
            await function.__aenter__()
        elif hasattr(type(function), "__enter__"):
            # In a thread without an event loop: it may run one, as asyncio.run() does.
            await asyncio.to_thread(function.__enter__)

    async def execute(self, tuple: Tuple, collector: AsyncCollector) -> None:
        """Call the function with the tuple; emit the tuple's values, followed by the answer."""
        answer = await self._call(tuple)
        with marked_final():
            row = self._answers.row(answer)
        collector.emit((*tuple.values, *row))

    async def cleanup(self) -> None:  # type: ignore[override]
        """End the threads of a plain function; exit the function, if it is a context manager."""
        function = self._function
        if self._threads is not None:
            self._threads.close()
        if hasattr(type(function), "__aenter__"):
            await function.__aexit__(None, None, None)
        elif hasattr(type(function), "__enter__"):
            await asyncio.to_thread(function.__exit__, None, None, None)


class BatchFunction(_Calling, BatchBolt):
    """A bolt that calls a function with each batch; parameters as for `_Calling`.

    `Retry`, a time-out, a failed connection or an exception in ``settings.retry_on`` fails all rows
    of the batch. After any other exception the batch is bisected to the rows that raise when called
    alone. An answer whose values do not fit the schema fails its rows without another call.
    """

    #: If it is a dict, `process` stores in it, by the number of each failed row in the task, the
    #: number of calls that were made with the last batch of that row.
    attempts: dict[int, int] | None = None
    _calls: Calls[pa.RecordBatch, Any] | None = None

    def prepare(self, context: Context) -> None:
        """Enter the function, if it is a context manager."""
        self._calls = Calls(self._function, self._settings)
        list(self._calls.run(()))  # enters a function that is a context manager

    def process(self, batch: pa.RecordBatch, out: BatchOutput) -> None:
        """Call the function with the batch; emit its columns ``kept``, followed by the answers.

        Rows whose answers do not fit the schema fail for good.
        """
        assert self._calls is not None
        ((answer, error, attempts, _),) = self._calls.run([batch])
        failed: list[int] = list(range(batch.num_rows))
        reasons: Any = error
        if error is None:
            parts, misfits = answer_parts(answer, self._schema, batch.num_rows)
            for start, answers in parts:
                part = batch.slice(start, len(answers))
                kept = [part.column(field.name) for field in self._kept]
                rows = range(start, start + len(answers))
                out.emit([*kept, *answers.columns], parents=rows)
            failed = [row for row, _ in misfits]
            reasons = [as_final(misfit) for _, misfit in misfits]
        if self.attempts is not None:
            self.attempts.update((out.first_row + row, attempts) for row in failed)
        if error is not None and not (self._settings.is_of_call(error) or is_marked_final(error)):
            raise error
        if failed:
            out.fail(failed, reasons)

    def cleanup(self) -> None:
        """End the threads of the calls; exit the function, if it is a context manager."""
        if self._calls is not None:
            self._calls.close()


#: The numbers of rows, in order, and their answers.
Piece = tuple[Int64s, pa.RecordBatch]


class FailedRow(NamedTuple):
    """The error of a row without an answer, and the number of calls made with this row."""

    error: BaseException
    attempts: int


class RowOutcomes(NamedTuple):
    """Up to 512 rows with their answers or errors."""

    batch: pa.RecordBatch  # the rows as they were passed in
    pieces: list[Piece]  # the numbers of the answered rows, from 0 and in order, and their answers
    failed: dict[int, FailedRow]  # all other rows, by number


#: The parts of limits that had no effect and that this process has warned of.
_warned: set[str] = set()


class RowCalls:
    """The calls of a function with each row. Call `prepare` before and `cleanup` after.

    ``function``: a function of a row, plain or async. ``answers``: the schema of its answers.
    ``settings``: the settings of the calls. ``source``: the name of the rows' source in messages.
    ``as_seen``: converts a batch to the one whose rows the function receives; by default the same.
    """

    def __init__(
        self,
        function: Function,
        answers: pa.Schema,
        settings: CallSettings,
        source: str,
        as_seen: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda batch: batch,
    ) -> None:
        self._calls: Calls[Tuple, Any] = Calls(function, settings)
        self._limit = settings.limit
        self._answers = AnswerRows(answers)
        self._source = source
        self._as_seen = as_seen

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[RowOutcomes]:
        """Call the function with each row; yield outcomes of up to 512 rows, in the rows' order.

        An exception of the iterable ``batches`` is raised after the outcomes of all earlier rows.
        """
        pending: deque[_Slice] = deque()
        for outcome in self._calls.run(self._tuples(batches, pending)):
            next(each for each in pending if each.is_open).take(outcome, self._answers)
            while pending and not pending[0].is_open:
                yield pending.popleft().answered(self._answers)
        for each in pending:  # slices whose rows all failed before a call
            yield each.answered(self._answers)

    def prepare(self) -> None:
        """Enter the function, if it is a context manager."""
        for _ in self._calls.run(()):
            pass

    def cleanup(self) -> None:
        """End the threads of the calls; exit the function, if it is a context manager.

        Warns once of each part of the limit that had no effect, since no call reported usage.
        """
        self._calls.close()
        if self._limit is None:
            return
        name = f"limit of {self._source}"
        for part, has_no_effect in unreported(self._limit, self._calls.counts.used, name).items():
            if part not in _warned:
                _warned.add(part)
                log.warning("%s", has_no_effect)

    def _tuples(self, batches: Iterable[pa.RecordBatch], pending: deque[_Slice]) -> Iterator[Tuple]:
        for batch in batches:
            # Convert few rows to Python objects at a time.
            for start in range(0, len(batch), SLICE_ROWS):
                part = batch.slice(start, SLICE_ROWS)
                seen = self._as_seen(part)
                fields = tuple(seen.schema.names)
                origin = Origin(None, self._source, DEFAULT_STREAM, fields, 0, None)
                rows, misfits = rows_of(seen)
                failed = {row: FailedRow(error, 0) for row, error in misfits}
                called = [row for row in range(len(rows)) if row not in failed]
                pending.append(_Slice(part, called, failed))
                for row in called:
                    yield Tuple(rows[row], origin, row)


@dataclass(eq=False, repr=False)
class _Slice:
    """Some rows of a batch, and the outcomes of their calls so far.

    ``called``: the rows that the function is called with. ``failed``: the other rows.
    """

    _batch: pa.RecordBatch
    _called: list[int]
    _failed: dict[int, FailedRow]
    _taken: int = 0
    _values: list[Row] = field(default_factory=list)  # of the rows that were answered
    _rows: list[int] = field(default_factory=list)
    _attempts: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether a row has no outcome yet."""
        return self._taken < len(self._called)

    def take(self, outcome: CallOutcome[Any], answers: AnswerRows) -> None:
        """Store the outcome of the first row in ``called`` that has none yet.

        An answer that does not fit ``answers`` makes the row a failed one.
        """
        row, error = self._called[self._taken], outcome.error
        self._taken += 1
        if error is None:
            try:
                self._values.append(answers.row(outcome.value))
            except KeyboardInterrupt:
                raise
            except BaseException as misfit:  # a value's own methods are user code
                error = misfit
            else:
                self._rows.append(row)
                self._attempts.append(outcome.attempts)
                return
        self._failed[row] = FailedRow(error, outcome.attempts)

    def answered(self, answers: AnswerRows) -> RowOutcomes:
        """Return the outcomes of all rows; those whose answers Arrow cannot convert have failed."""
        batches, misfits = answers.batches(self._values)
        rows = np.array(self._rows, np.int64)
        for at, error in misfits:
            self._failed[self._rows[at]] = FailedRow(error, self._attempts[at])
        pieces = [(rows[start : start + len(batch)], batch) for start, batch in batches]
        return RowOutcomes(self._batch, pieces, self._failed)
