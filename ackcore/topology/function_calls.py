"""Calls of a function with each row of batches: many at once, with results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from ackcore._records import Int64s
from ackcore.calls import Calls, CallSettings, Outcome
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.functions import Answers, Function
from ackcore.topology.row_conversion import Row, rows_of
from ackcore.topology.row_executor import SLICE_ROWS
from ackcore.topology.tuples import Origin, Tuple

#: The numbers of rows, in order, and their answers.
Piece = tuple[Int64s, pa.RecordBatch]


class Failed(NamedTuple):
    """The error of a row without an answer, and the number of calls made with it."""

    error: BaseException
    attempts: int


class Answered(NamedTuple):
    """The outcomes of some rows.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
        The rows as they were passed in.
    pieces : list of (numpy.ndarray of int64, pyarrow.RecordBatch)
        The numbers of the answered rows, from 0 and in order, and their answers.
    failed : dict of int to Failed
        All other rows, by number.
    """

    batch: pa.RecordBatch
    pieces: list[Piece]
    failed: dict[int, Failed]


class RowCalls:
    """The calls of a function with each row. Call `prepare` before and `cleanup` after.

    Parameters
    ----------
    function : callable
        A function of a row, plain or async.
    answers : pyarrow.Schema
        The schema of its answers.
    settings : CallSettings
        The settings of the calls.
    source : str
        The name of the rows' source in messages.
    as_seen : callable, optional
        Converts a batch to the one whose rows the function receives; by default they are the same.
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
        self._answers = Answers(answers)
        self._source = source
        self._as_seen = as_seen

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Answered]:
        """Call the function with each row of the batches; yield all outcomes in slices, in order.

        It reads ahead no more rows than one slice and those that are in a call or buffered.

        Raises
        ------
        Exception
            The exception of the batches, after the outcomes of all earlier rows.
        """
        pending: deque[_Slice] = deque()
        for outcome in self._calls.run(self._tuples(batches, pending)):
            next(each for each in pending if each.is_open).take(outcome, self._answers)
            while pending and not pending[0].is_open:
                yield pending.popleft().answered(self._answers)
        for each in pending:  # slices whose rows all failed before a call
            yield each.answered(self._answers)

    def prepare(self) -> None:
        """Enter the function, if it is a context manager, and raise its exceptions."""
        for _ in self._calls.run(()):
            pass

    def cleanup(self) -> None:
        """Release the resources of the calls, and exit the function."""
        self._calls.close()

    def _tuples(self, batches: Iterable[pa.RecordBatch], pending: deque[_Slice]) -> Iterator[Tuple]:
        for batch in batches:
            # Convert few rows to Python objects at a time.
            for start in range(0, len(batch), SLICE_ROWS):
                part = batch.slice(start, SLICE_ROWS)
                seen = self._as_seen(part)
                fields = tuple(seen.schema.names)
                origin = Origin(None, self._source, DEFAULT_STREAM, fields, 0, None)
                rows, misfits = rows_of(seen)
                failed = {row: Failed(error, 0) for row, error in misfits}
                called = [row for row in range(len(rows)) if row not in failed]
                pending.append(_Slice(part, called, failed))
                for row in called:
                    yield Tuple(rows[row], origin, row)


class _Slice:
    """Rows that the function is called with, and their outcomes so far."""

    def __init__(self, batch: pa.RecordBatch, called: list[int], failed: dict[int, Failed]) -> None:
        self._batch = batch
        self._called = called
        self._taken = 0
        self._failed = failed
        self._values: list[Row] = []  # of the rows that were answered
        self._rows: list[int] = []
        self._attempts: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether a call has no outcome yet."""
        return self._taken < len(self._called)

    def take(self, outcome: Outcome[Any], answers: Answers) -> None:
        """Store the outcome of the next call."""
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
        self._failed[row] = Failed(error, outcome.attempts)

    def answered(self, answers: Answers) -> Answered:
        """Return the outcomes of all rows."""
        batches, misfits = answers.batches(self._values)
        rows = np.array(self._rows, np.int64)
        for at, error in misfits:
            self._failed[self._rows[at]] = Failed(error, self._attempts[at])
        pieces = [(rows[start : start + len(batch)], batch) for start, batch in batches]
        return Answered(self._batch, pieces, self._failed)
