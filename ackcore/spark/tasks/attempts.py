"""The mapInArrow function of `attempt`: calls a user's function on rows, one by one or by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore.calls.call_settings import CallSettings
from ackcore.spark.base.arrow_batches import Batches, as_spark_types
from ackcore.topology.bolt_calls import JOIN_BYTES, cleaned_up
from ackcore.topology.bolt_functions import Function, Kind
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.executors import executor_for
from ackcore.topology.failure_reasons import ReasonMaker
from ackcore.topology.function_calls import BatchFunction, Piece, RowCalls
from ackcore.topology.tuples import Reason

#: The column with the error of a failed row.
ERROR_COLUMN = "error"
#: Arrow cannot cast a null struct whose fields are not nullable, as `DataFrame.toArrow` does.
ERROR = pa.struct({"type": pa.string(), "message": pa.string(), "attempts": pa.int32()})
#: The names of the function and of its input in messages.
FUNCTION, SOURCE = "fn", "frame"

_REASONS = ReasonMaker(FUNCTION)
_Errors = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Attempts:
    """The mapInArrow function that calls a user's function, and yields all rows with its answers.

    The column `ERROR_COLUMN` is null if the row's call succeeded. Otherwise the answers are null.
    An error of the function's ``prepare`` fails rows with 0 attempts.
    """

    function: Function
    kind: Kind  # the kind of the function: by row or by batch
    schema: pa.Schema  # the schema of the rows that the function gets
    answers: pa.Schema  # the schema of the function's answers
    settings: CallSettings  # the settings of the calls in one task

    def __call__(self, batches: Batches) -> Batches:
        """Yield the rows of one task's batches with their answers and errors, for mapInArrow."""
        return self._by_batch(batches) if self.kind is Kind.BATCH else self._by_row(batches)

    def _by_batch(self, batches: Batches) -> Batches:
        bolt = BatchFunction(self.function, self.answers, pa.schema([]), self.settings)
        executor = executor_for(FUNCTION, bolt)
        first = 0
        try:
            for batch in batches:
                attempts: dict[int, int] = {}
                bolt.attempts = attempts
                results = executor.process(SOURCE, DEFAULT_STREAM, self._as_seen(batch), None)
                pieces = [(each.anchors.handles - first, each.batch) for each in results.emissions]
                errors: _Errors = {}
                for handles, reasons in results.failures:
                    of_each = reasons * len(handles) if len(reasons) == 1 else reasons
                    for handle, reason in zip(handles.tolist(), of_each, strict=True):
                        errors[handle - first] = _error(reason, attempts.get(handle, 0))
                first += len(batch)
                yield from self._with_answers(batch, pieces, errors)
        finally:
            executor.cleanup()

    def _by_row(self, batches: Batches) -> Batches:
        first = next(batches, None)
        if first is None:
            return  # without calling prepare, which may open connections
        batches = chain([first], batches)
        calls = RowCalls(self.function, self.answers, self.settings, SOURCE, self._as_seen)
        try:
            calls.prepare()
        except KeyboardInterrupt:
            raise
        except BaseException as broken:  # any error of user code fails rows
            error = _error(_REASONS.of(broken), 0)
            for batch in batches:
                yield from self._with_answers(batch, [], dict.fromkeys(range(len(batch)), error))
            return
        try:
            for batch, pieces, failed in calls.run(batches):
                errors = {
                    row: _error(_REASONS.of(error), attempts)
                    for row, (error, attempts) in failed.items()
                }
                yield from self._with_answers(batch, pieces, errors)
        finally:
            cleaned_up(calls.cleanup, FUNCTION)

    def _as_seen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return as_spark_types(batch, self.schema)

    def _with_answers(
        self, batch: pa.RecordBatch, pieces: Sequence[Piece], errors: _Errors
    ) -> Batches:
        """Yield a batch with the columns of answers and errors, in slices of its rows.

        ``pieces``: answers, each with the numbers of its rows. ``errors``: errors by row number.
        Rows that are in neither have nulls.
        """
        # The columns keep their input types and get their own names back: see `plainly_named`.
        own = [
            came.with_name(field.name)
            for came, field in zip(batch.schema, self.schema, strict=True)
        ]
        fields = [*own, *(field.with_nullable(True) for field in self.answers)]
        schema = pa.schema([*fields, pa.field(ERROR_COLUMN, ERROR)])
        for start, stop, group in _groups(pieces, len(batch)):
            failed = [errors.get(row) for row in range(start, stop)] if errors else None
            columns = [
                *batch.slice(start, stop - start).columns,
                *_spread(group, start, stop, self.answers),
                pa.nulls(stop - start, ERROR) if failed is None else pa.array(failed, ERROR),
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _error(reason: Reason, attempts: int) -> dict[str, Any]:
    return {"type": reason.type, "message": reason.message, "attempts": attempts}


def _groups(pieces: Sequence[Piece], rows: int) -> Iterator[tuple[int, int, list[Piece]]]:
    """Cut all rows into slices with up to `JOIN_BYTES` of answers, or with one piece.

    Yields the start and the end of each slice, and its pieces. ``rows``: the number of rows.
    """
    start, size, group = 0, 0, list[Piece]()
    for piece in pieces:
        if group and size + piece[1].nbytes > JOIN_BYTES:
            stop = int(piece[0][0])
            yield start, stop, group
            start, size, group = stop, 0, []
        group.append(piece)
        size += piece[1].nbytes
    yield start, rows, group


def _spread(pieces: Sequence[Piece], start: int, stop: int, answers: pa.Schema) -> list[pa.Array]:
    """Return the answers as columns of the rows start to stop, null for rows without an answer."""
    if not pieces:
        return [pa.nulls(stop - start, field.type) for field in answers]
    batch = pa.concat_batches([each for _, each in pieces])
    if len(batch) == stop - start:
        return list(batch.columns)
    at = np.full(stop - start, -1, np.int64)
    at[np.concatenate([rows for rows, _ in pieces]) - start] = np.arange(len(batch))
    return list(batch.take(pa.array(at, mask=at < 0)).columns)
