"""Checks of functions that `attempt` and `guard` call, and the conversion of their answers.

A function of a row receives a `Tuple`, as a bolt's ``execute`` does. A function of batches receives
a `pyarrow.RecordBatch`, as ``process`` does. Both return their *answer*: the values that a bolt
would emit.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._arrow.lossless import as_mapping, short_repr
from ackcore._arrow.record_batches import is_list
from ackcore._error_hints import counted, refused_call, signature_of
from ackcore.calls.threads import NOT_RUN, is_async
from ackcore.topology.batch_collector import columns_in, conform
from ackcore.topology.row_conversion import Misfit, Row, RowSchema, by_halves

#: Names of types that hold many rows, but are not the type that functions of batches receive.
_OTHER_BATCHES = frozenset({"Table", "DataFrame", "Series", "Array", "ChunkedArray", "ndarray"})
_BATCH = "RecordBatch"
#: The name of a function's answers in errors, which is the argument that declares their schema.
TITLE = "outputs"


class Kind(enum.Enum):
    """The kind of a function: of a row, plain or async, or of batches."""

    ROW = "a function of a row"
    ASYNC = "an async function of a row"
    BATCH = "a function of batches"


def kind_of(function: Any) -> Kind:
    """Return the kind of a function, or raise TypeError if ackcore cannot call it.

    It is a function of batches if its first parameter is annotated as a `pyarrow.RecordBatch`, and
    otherwise a function of a row. Refused are classes, generators, functions that do not take one
    argument, async functions of batches, and those annotated with a table, column or DataFrame.

    ``function``: a function, a `functools.partial` or an object with a ``__call__``.
    """
    if isinstance(function, type):
        raise TypeError(
            f"fn must be a function, got the class {function.__name__}; pass an instance that "
            "can be called, or a function that uses one"
        )
    if not callable(function):
        raise TypeError(
            f"fn must be a function of a row or of a pyarrow.RecordBatch, got "
            f"{type(function).__name__} {function!r}"
        )
    called = _called(function)
    if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
        raise TypeError(
            "fn must return one answer, got a function with 'yield'; return the values, or "
            "write a bolt, which may emit any number of tuples"
        )
    takes = refused_call(function, ("row",))
    if takes is not None:
        raise TypeError(
            f"fn must take one argument, a row or a pyarrow.RecordBatch, got a function of "
            f"{takes}; bind the other arguments with functools.partial(...) or a lambda"
        )
    annotated = _annotation(function)
    if annotated in _OTHER_BATCHES:
        raise TypeError(
            f"fn must take a row or a pyarrow.RecordBatch, got a function whose argument is "
            f"annotated as {annotated}; annotate it as pyarrow.RecordBatch, and convert it in the "
            "function"
        )
    if annotated != _BATCH:
        return Kind.ASYNC if is_async(function) else Kind.ROW
    if is_async(function):
        raise TypeError(
            "fn must be a plain function if it takes a pyarrow.RecordBatch, got an async one; "
            "let it take one row: ackcore calls it for many rows at once"
        )
    return Kind.BATCH


def _called(function: Any) -> Any:
    """Return a function itself, or the function that a partial or a callable object calls."""
    while isinstance(function, functools.partial):
        function = function.func
    if inspect.isroutine(function):
        return function
    return type(function).__call__


def _annotation(function: Any) -> str | None:
    """Return the name, without module, of the type of a function's first parameter, or None."""
    try:
        # Follow a decorator to the wrapped function: it usually passes its arguments on.
        first = next(iter(signature_of(function).parameters.values()), None)
    except (TypeError, ValueError):  # many builtins have no signature
        return None
    if first is None or first.annotation is first.empty:
        return None
    annotated = getattr(first.annotation, "__forward_arg__", first.annotation)
    if not isinstance(annotated, str):
        return getattr(annotated, "__name__", None)
    # `from __future__ import annotations` leaves a text, and its name need not be importable.
    return annotated.strip("'\" ").rpartition(".")[2]


class AnswerRows(RowSchema):
    """Converts the values that a function of a row returns, its answers, to rows of ``schema``."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(TITLE, schema)

    def row(self, answer: Any) -> Row:
        """Return the values of an answer in the schema's order; later changes do not affect them.

        Raises TypeError or ValueError if the answer does not fit the schema.

        ``answer``: the values in the order of the schema, or by name in a dict, a Row, a
        namedtuple, a dataclass or a pydantic object. If the schema has one field, also the bare
        value of that field, unless it is a tuple, a list or a dict. An object with names is the
        bare value unless its only name is the field's.
        """
        if isinstance(answer, NOT_RUN):
            raise _not_run(answer)
        if self.width == 1:
            if self._is_value(answer):
                answer = (answer,)
            elif self._lacks_tuple(answer):
                (field,) = self.schema
                raise ValueError(
                    f"fn must return the {field.type} of {field.name!r} in a tuple, got "
                    f"{short_repr(answer)}; write return (value,)"
                )
        return super().row(answer)

    def _lacks_tuple(self, answer: Any) -> bool:
        """Return whether an answer seems to be the bare value of the only field: a list or dict.

        A list or tuple of exactly one list or None has the answer's values, as does a dict with
        only the field's name.
        """
        (field,) = self.schema
        if isinstance(answer, Mapping):
            nested = pa.types.is_struct(field.type) or pa.types.is_map(field.type)
            return nested and set(answer) != {field.name}
        if not is_list(field.type) or type(answer) not in (list, tuple):
            return False
        items = (type(None), list, tuple, set, frozenset, range, np.ndarray, pa.Array)
        return not (len(answer) == 1 and isinstance(answer[0], items))

    def _is_value(self, answer: Any) -> bool:
        """Return whether an answer is the bare value of the only field, as `row` says."""
        if type(answer) in (list, tuple) or isinstance(answer, Mapping):
            return False
        named = as_mapping(answer)
        return named is None or set(named) != set(self.names)


def columns_of(answer: Any, schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Convert the answer of a function of batches to a batch of a schema.

    Raises TypeError or ValueError if the answer does not fit, or has another number of rows.

    ``answer``: the value that the function returned: a RecordBatch, a Table, a mapping or list of
    columns, or, if the schema has one field, a bare Arrow, numpy or pandas column. ``schema``: the
    schema of the answers. ``rows``: the number of rows that the function received.
    """
    if isinstance(answer, NOT_RUN):
        raise _not_run(answer)
    batch = conform(_as_columns(answer, schema), schema, TITLE)
    if batch.num_rows != rows:
        raise ValueError(
            f"fn must return {counted(rows, 'row')}, one for each row of its batch, got "
            f"{batch.num_rows}; write a BatchBolt to emit another number of them"
        )
    return batch


def answer_parts(
    answer: Any, schema: pa.Schema, rows: int
) -> tuple[list[tuple[int, pa.RecordBatch]], list[Misfit]]:
    """Convert what a function of batches returned, without the rows that do not fit the schema.

    Returns batches, each with the number of its first row, and a `Misfit` for each other row: for
    all ``rows`` if the answer has other columns or another number of rows than the function got.
    """
    try:
        return [(0, columns_of(answer, schema, rows))], []
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a value's own methods are user code: SystemExit too
        try:
            columns = columns_in(_as_columns(answer, schema), schema, TITLE)
            is_one_each = all(len(column) == rows for column in columns)
        except KeyboardInterrupt:
            raise
        except BaseException:
            is_one_each = False
        if not is_one_each:
            return [], [Misfit(row, error) for row in range(rows)]

    def convert(start: int, stop: int) -> pa.RecordBatch:
        return columns_of([column[start:stop] for column in columns], schema, stop - start)

    return by_halves(convert, rows)


def _as_columns(answer: Any, schema: pa.Schema) -> Any:
    """Return an answer as columns; if the schema has one field, a bare column in a list."""
    is_table = isinstance(answer, pa.RecordBatch | pa.Table | Mapping | list | tuple)
    return answer if is_table or len(schema) > 1 else [answer]


def _not_run(answer: object) -> TypeError:
    way_out = "return the values of one row, or a list of them for a column: list(...)"
    if inspect.iscoroutine(answer):
        way_out = "declare it with 'async def', so that it is awaited"
    return TypeError(
        f"fn must return values, got {type(answer).__name__}, which has not run; {way_out}"
    )


#: A function of one argument; all three kinds are.
Function = Callable[[Any], Any]
