"""Expectations: conditions that tuples of a stream must meet, and the consequence if one does not.

`expect` declares them, `checks_of` compiles them for a stream in ``build``, and tasks call
`StreamCheck.failed` for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.shown import shown_values
from ackcore._error_hints import naming_arguments
from ackcore._records import Int64s
from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.condition_nodes import Node
from ackcore.topology.row_conversion import by_halves
from ackcore.topology.sql_conditions import UnsupportedSql, compile_condition

OnFail = Literal["dead_letter", "drop", "fail"]
#: A function of a batch that returns a boolean column.
BatchCondition = Callable[[pa.RecordBatch], Any]

#: The most characters of a value in a reason, and the most columns in the reason of a function.
_CHARS, _COLUMNS = 100, 8


@dataclass(frozen=True)
class Expectations:
    """Conditions that have the same consequence; `expect` creates them."""

    conditions: tuple[str | BatchCondition, ...]
    on_fail: OnFail
    stream: str


@naming_arguments
def expect(
    *conditions: str | BatchCondition, on_fail: OnFail = "dead_letter", stream: str = DEFAULT_STREAM
) -> Expectations:
    """Declare conditions that the tuples of a spout or bolt must meet.

    Pass the result as the argument ``expect`` of ``builder.spout`` or ``builder.bolt``.

    A tuple meets a condition that is true or NULL, as with CHECK of SQL tables: add ``col IS NOT
    NULL`` where NULL is wrong. A condition that raises (overflow, division by zero) is not met; its
    tuple becomes a dead letter even with ``"drop"``.

    Parameters
    ----------
    *conditions : str or callable
        A text is a Spark SQL expression over the columns, such as ``"amount > 0"``; it needs
        ``ackcore[expect]``. A function takes a `pyarrow.RecordBatch` of n tuples, and returns a
        boolean column of n values, the same for the same tuples. If it returns anything else, the
        query ends with `ExpectationFailed`, whatever ``on_fail`` is.
    on_fail : {"dead_letter", "drop", "fail"}, default "dead_letter"
        The consequence for a tuple that does not meet a condition. ``"dead_letter"``: its records
        become dead letters, without a retry. ``"drop"``: the tuple is not emitted, and its records
        continue without it. ``"fail"``: the query ends with `ExpectationFailed`, and nothing of the
        micro-batch is written.
    stream : str, default "default"
        The stream of a bolt that the conditions concern.

    Returns
    -------
    Expectations
        The conditions. The argument ``expect`` also takes a list of several.

    Raises
    ------
    TypeError, ValueError
        If there is no condition, or an argument has another type or value. ``build`` checks the
        expressions.
    """
    if not conditions:
        raise ValueError('expect() needs at least one condition, such as "amount > 0"; got none')
    for one in conditions:
        if not isinstance(one, str) and not callable(one):
            raise TypeError(
                "conditions of expect() must be SQL texts or functions of a pyarrow.RecordBatch, "
                f"got {type(one).__name__} {one!r}; pass each condition as an argument of its own, "
                'such as expect("amount > 0", "id IS NOT NULL")'
            )
    if on_fail not in get_args(OnFail):
        raise ValueError(
            f"on_fail of expect() must be 'dead_letter', 'drop' or 'fail', got {on_fail!r}"
        )
    if not isinstance(stream, str):
        raise TypeError(
            f"stream of expect() must be the name of a stream, got {type(stream).__name__}"
        )
    return Expectations(conditions, on_fail, stream)


def expectations_of(given: Any, subject: str) -> tuple[Expectations, ...]:
    """Return the argument ``expect`` of a spout or bolt as a tuple.

    Raises TypeError unless it is an `Expectations` or a sequence of them, which may be empty.
    ``subject``: the name of the spout or bolt in the text.
    """
    some = (given,) if isinstance(given, Expectations) else given
    if not isinstance(some, Sequence) or not all(isinstance(one, Expectations) for one in some):
        raise TypeError(
            f"expect of {subject} must be expect(...) or a list of them, got "
            f"{type(given).__name__} {given!r}; write expect('amount > 0', 'id IS NOT NULL')"
        )
    return tuple(some)


class WrongResult(TypeError):
    """A function of `expect` did not return a boolean for each tuple of its batch."""


@dataclass(frozen=True)
class StreamCheck:
    """A condition of `expect`, compiled for the columns of a stream."""

    name: str  # the SQL text, or the name of the function
    on_fail: OnFail  # the consequence for a tuple that does not meet the condition
    condition: Node | BatchCondition  # the compiled expression, or the function
    columns: tuple[str, ...]  # the columns whose values a reason shows

    def failed(self, batch: pa.RecordBatch) -> tuple[Int64s, dict[int, str]]:
        """Return the row numbers of tuples that do not meet the condition, ascending.

        Also returns, by row number, the texts of errors that the condition raised; these tuples do
        not meet it. A batch that raises is bisected, so an error concerns only the tuples that
        cause it. Raises WrongResult if a function does not return a boolean for each tuple.
        """

        def check(start: int, stop: int) -> Int64s:
            return self._unmet(batch.slice(start, stop - start)) + start

        parts, misfits = by_halves(check, len(batch), passed=(KeyboardInterrupt, WrongResult))
        errors = {row: f"{type(error).__name__}: {error}" for row, error in misfits}
        unmet = [rows for _, rows in parts]
        return np.sort(np.concatenate([*unmet, np.array([*errors], np.int64)])), errors

    def _unmet(self, batch: pa.RecordBatch) -> Int64s:
        if isinstance(self.condition, Node):
            met = self.condition.evaluate(batch, len(batch) == 1)
            met = pa.array([met.as_py()], pa.bool_()) if isinstance(met, pa.Scalar) else met
        else:
            met = self._function_result(batch)
        return pc.indices_nonzero(pc.invert(met)).to_numpy().astype(np.int64)  # type: ignore[no-any-return]

    def _function_result(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        met = self.condition(batch)  # type: ignore[operator]
        try:
            if isinstance(met, pa.ChunkedArray):
                met = met.combine_chunks()
            met = met if isinstance(met, pa.Array) else pa.array(met)
        except (pa.ArrowException, TypeError, ValueError):
            pass
        if not isinstance(met, pa.BooleanArray) or len(met) != len(batch):
            kind = f"{len(met)} {met.type}" if isinstance(met, pa.Array) else type(met).__name__
            raise WrongResult(
                f"expectation {self.name} must return a boolean for each of the {len(batch)} "
                f"tuples of its batch, got {kind}"
            )
        return met

    def reasons(self, batch: pa.RecordBatch, rows: Int64s, errors: Mapping[int, str]) -> list[str]:
        """Return the reason for each tuple in ``rows``: the condition, the values, and the error.

        ``rows`` and ``errors`` are parts of the result of `failed`. Long values are cut.
        """
        at = pa.array(rows)
        columns = [shown_values(batch.column(name).take(at)) for name in self.columns]
        texts = []
        for row, shown in zip(rows.tolist(), zip(*columns, strict=True), strict=True):
            values = ", ".join(
                f"{name}={_short(value)}" for name, value in zip(self.columns, shown, strict=True)
            )
            error = f"; it raised {errors[row]}" if row in errors else ""
            texts.append(f"expectation {self.name} is not met: {values}{error}")
        return texts


def _short(value: Any) -> str:
    text = repr(value) if isinstance(value, str | bytes) else str(value)
    return text if len(text) <= _CHARS else f"{text[: _CHARS - 1]}…"


def checks_of(
    expected: Sequence[Expectations], types: Mapping[str, pa.DataType | None]
) -> Iterator[StreamCheck | str]:
    """Yield for each condition of a stream its check, or the text of its problem.

    The text lacks the subject, which the caller puts before it: ``"has 'a > ': ..."``.

    ``types``: the types of the stream's columns; None for a type that conditions cannot compare.
    """
    names = set()
    for one in expected:
        for given in one.conditions:
            if isinstance(given, str):
                name = " ".join(given.split())
            else:
                name = getattr(given, "__name__", type(given).__name__)
            if name in names:
                yield f"has {name} twice; remove one, or give the functions different names"
                continue
            names.add(name)
            if not isinstance(given, str):
                yield StreamCheck(name, one.on_fail, given, tuple(types)[:_COLUMNS])
                continue
            try:
                node = compile_condition(given, types)
            except (UnsupportedSql, ImportError) as error:
                yield f"has {given!r}: {error}"
            else:
                yield StreamCheck(name, one.on_fail, node, tuple(dict.fromkeys(node.columns())))
