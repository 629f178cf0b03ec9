"""Calls of a function with the rows of batches, one by one: many at once, answered in order."""

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

#: Rows, in their order, and what was answered to them.
Piece = tuple[Int64s, pa.RecordBatch]


class Failed(NamedTuple):
    """Why a row has no answer, and how many calls were made with it."""

    error: BaseException
    attempts: int


class Answered(NamedTuple):
    """The outcomes of some rows.

    Attributes
    ----------
    batch : pyarrow.RecordBatch
        The rows as they came.
    pieces : list of (numpy.ndarray of int64, pyarrow.RecordBatch)
        Numbers of rows, from 0 and in order, and what was answered to them.
    failed : dict of int to Failed
        By row: all others.
    """

    batch: pa.RecordBatch
    pieces: list[Piece]
    failed: dict[int, Failed]


class RowCalls:
    """Calls a function with each row; to be prepared before and cleaned up after.

    Parameters
    ----------
    function : callable
        Of a row, plain or async.
    answers : pyarrow.Schema
        What it answers.
    settings : CallSettings
        How it is called.
    source : str
        What the rows come from, for messages.
    as_seen : callable, optional
        Returns a batch as the function is to see its rows; by default as it is.
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
        """Call the function with what comes; yields all of it, in slices and in order.

        No more is read ahead than calls are made at once, or buffered, and a slice.

        Raises
        ------
        Exception
            What the batches raise, once all before was yielded.
        """
        pending: deque[_Slice] = deque()
        for outcome in self._calls.run(self._tuples(batches, pending)):
            next(each for each in pending if each.is_open).take(outcome, self._answers)
            while pending and not pending[0].is_open:
                yield pending.popleft().answered(self._answers)
        for each in pending:  # whose rows are none to call with
            yield each.answered(self._answers)

    def prepare(self) -> None:
        """Enter the function, if it is a context manager: raises what that raises."""
        for _ in self._calls.run(()):
            pass

    def cleanup(self) -> None:
        """Let go of what calling took, and leave the function."""
        self._calls.close()

    def _tuples(self, batches: Iterable[pa.RecordBatch], pending: deque[_Slice]) -> Iterator[Tuple]:
        for batch in batches:
            # Few rows at a time are Python objects, beside those that are called with.
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
    """Rows that the function is called with, and what has come of them so far."""

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
        """Take the outcome of the next call."""
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
        """Return what came of all rows."""
        batches, misfits = answers.batches(self._values)
        rows = np.array(self._rows, np.int64)
        for at, error in misfits:
            self._failed[self._rows[at]] = Failed(error, self._attempts[at])
        pieces = [(rows[start : start + len(batch)], batch) for start, batch in batches]
        return Answered(self._batch, pieces, self._failed)
