"""Conversion of Arrow columns to rows of Python values, and back.

If a value cannot be converted, only its own row fails: the batch is bisected to the failing rows.
"""

from __future__ import annotations

import copy
import datetime
import decimal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ackcore._arrow.lossless import array_of, as_mapping, short_repr
from ackcore._arrow.record_batches import has_offsets, is_text
from ackcore._arrow.shown import shown_values
from ackcore._error_hints import counted, listed, near_miss
from ackcore.topology.tuples import Tuple

#: A row as a tuple of Python values.
Row = tuple[Any, ...]
_Part = TypeVar("_Part")

#: Immutable types, whose values need no copy when they are emitted.
_IMMUTABLE = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        decimal.Decimal,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
    }
)


#: The most values whose types an error names.
_SHOWN = 8


class Misfit(NamedTuple):
    """A row that cannot be converted: its number in the rows given, and the error."""

    row: int
    error: BaseException


def column_values(column: pa.Array) -> list[Any]:
    """Return a column as Python values: the same as ``to_pylist()``, several times as fast."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind):
        if not column.null_count:
            return list(column.to_numpy().tolist())
        values: list[Any] = column.fill_null(0).to_numpy().tolist()
        for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)):
            values[row] = None
        return values
    if has_offsets(kind) or pa.types.is_boolean(kind):
        return list(column.to_numpy(zero_copy_only=False).tolist())
    return list(column.to_pylist())


def rows_of(batch: pa.RecordBatch) -> tuple[list[Row], list[Misfit]]:
    """Return the rows of a batch, and a `Misfit` for each row that cannot be converted.

    A row that cannot be converted is () in the list, as is each row of a batch without columns.

    Arrow has values that Python does not: a time with nanoseconds, a time zone that this machine
    lacks, text that is not UTF-8.
    """
    rows: list[Row] = [()] * batch.num_rows

    def convert(start: int, stop: int) -> None:
        part = batch.slice(start, stop - start)
        columns = []
        for name, column in zip(part.schema.names, part.columns, strict=True):
            try:
                columns.append(column_values(column))
            except Exception as error:
                if stop - start > 1:
                    raise
                (value,) = shown_values(column)
                raise ValueError(
                    f"column {name!r} holds a {column.type} without a Python value: "
                    f"{short_repr(value)}; use a BatchBolt, which reads Arrow columns"
                ) from error
        rows[start:stop] = zip(*columns, strict=True)

    _, misfits = by_halves(convert, batch.num_rows if batch.num_columns else 0)
    return rows, misfits


def by_halves(
    convert: Callable[[int, int], _Part],
    rows: int,
    passed: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
) -> tuple[list[tuple[int, _Part]], list[Misfit]]:
    """Call ``convert(0, rows)``; if it raises, call it for each half, down to single rows.

    Returns the results, each with the number of its first row, and the rows that fail alone, both
    in the order of the rows. ``passed``: the exceptions that are raised at once. With 0 ``rows``
    there is no call.
    """
    parts: list[tuple[int, _Part]] = []
    misfits: list[Misfit] = []
    spans = [(0, rows)] if rows else []
    while spans:
        start, stop = spans.pop()
        try:
            parts.append((start, convert(start, stop)))
        except passed:
            raise
        except BaseException as error:  # a value's own methods are user code: SystemExit too
            if stop - start == 1:
                misfits.append(Misfit(start, error))
                continue
            middle = (start + stop) // 2
            spans += [(middle, stop), (start, middle)]
    return parts, misfits


def stream_title(component: str, stream: str) -> str:
    """Return the name of a stream in errors."""
    return f"{component}'s stream {stream!r}"


class RowSchema:
    """Checks the values that a bolt emits to a stream, and converts them to rows and batches.

    ``title``: the name of the stream in errors. ``schema``: its schema.
    """

    def __init__(self, title: str, schema: pa.Schema) -> None:
        self.title = title
        self.schema = schema
        self.names = tuple(schema.names)
        self.width = len(self.names)
        #: Whether a struct may have unknown names, which are dropped, and lack names (then null).
        self.projects = False
        #: Whether values may be mutable. If so, `row` copies them.
        self.may_change = not all(_is_plain(field.type) for field in schema)

    def row(self, values: Any) -> Row:
        """Return emitted values as a row; later changes of the values do not affect it.

        Raises TypeError or ValueError if they are neither a list or tuple with a value for each
        field, nor an object with exactly the fields' names, such as a dict or a dataclass. Types
        are checked only by `batch`.
        """
        kind = type(values)
        if kind is tuple or kind is list:  # nearly always
            row = tuple(values)
        elif (named := as_mapping(values)) is not None:
            row = tuple(by_name(named, self.names, "values", self.title, "; emit None for a null"))
        elif isinstance(values, list | tuple):
            row = tuple(values)
        else:
            raise no_values(values, self.title)
        if len(row) != self.width:
            raise self.misfit(row)
        return tuple(map(_frozen, row)) if self.may_change else row

    def misfit(self, row: Sequence[Any]) -> ValueError:
        """Return the error for a row with a wrong number of values."""
        types = ", ".join(type(value).__name__ for value in row[:_SHOWN])
        more = ", ..." if len(row) > _SHOWN else ""
        return ValueError(
            f"values must have {counted(self.width, 'value')} for {self.title}, got {len(row)} "
            f"({types}{more}); write ({', '.join(self.names)}{',' if self.width == 1 else ''}), "
            "or a dict by field"
        )

    def batch(self, rows: Sequence[Row]) -> pa.RecordBatch:
        """Convert rows to a batch of the schema.

        Raises an error of any type if a value does not fit, the conversion would change it, or it
        is None in a field that is not nullable. For a single row, the error names the field.
        """
        columns = []
        for at, field in enumerate(self.schema):
            # Not zip(*rows): with an iterator per row, the garbage collector would run often.
            values = [row[at] for row in rows]
            try:
                column = array_of(values, field.type, projects=self.projects)
            except Exception as error:
                if len(rows) > 1:
                    raise
                text = str(error).replace(" in row 0", "", 1)
                raise ValueError(
                    f"{field.name!r} of {self.title} must be {field.type}, got "
                    f"{type(values[0]).__name__}: {text}; convert it, or declare another type"
                ) from error
            if column.null_count and not field.nullable:
                raise ValueError(
                    f"{field.name!r} of {self.title} must not be null, got None; give it a value, "
                    "or declare it nullable"
                )
            if isinstance(column, pa.ChunkedArray):  # more text than one array can hold
                raise OverflowError(
                    f"{field.name!r} of {self.title} has more than 2 GiB of text in one tuple; "
                    "store it elsewhere, and emit its path"
                )
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def batches(self, rows: Sequence[Row]) -> tuple[list[tuple[int, pa.RecordBatch]], list[Misfit]]:
        """Convert rows to one batch, or to the halves, quarters and so on that fit the schema.

        Returns the batches, each with the number of its first row, and the rows that do not fit,
        both in order. Without rows there is no batch.
        """
        return by_halves(lambda start, stop: self.batch(rows[start:stop]), len(rows))


def by_name(
    given: Mapping[Any, Any], names: Sequence[str], what: str, title: str, way_out: str = ""
) -> list[Any]:
    """Return values or columns by name in the order of ``names``.

    Raises ValueError for an unknown or a missing name. ``what``, ``title``: the argument and the
    stream in its text. ``way_out``: the advice for a missing name.
    """
    for name in given:
        if name not in names:
            hint = near_miss(str(name), names, "fields")
            raise ValueError(f"{what} must be fields of {title}, got {name!r}; {hint}")
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(
            f"{what} must have every field of {title}, got none for {listed(missing)}{way_out}"
        )
    return [given[name] for name in names]


def no_values(values: object, title: str) -> TypeError:
    """Return the error for emitted ``values`` that are no list or tuple, and have no names.

    ``title``: the name of the stream in the text.
    """
    if isinstance(values, Tuple):
        way_out = "pass tuple.values to emit it unchanged"
    else:
        way_out = "put all values of a row in one tuple or list, or in a dict by field"
    return TypeError(
        f"values must be a tuple, a list or a dict of values for {title}, got "
        f"{type(values).__name__}; {way_out}"
    )


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether only immutable Python values fit this type: not for bytes or nested types."""
    return bool(
        pa.types.is_primitive(kind)
        or pa.types.is_decimal(kind)
        or is_text(kind)
        or pa.types.is_null(kind)
    )


def _frozen(value: Any) -> Any:
    """Return an immutable value itself, bytes for a bytearray or memoryview, else a deep copy."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return value
    if kind is list:
        return [_frozen(item) for item in value]
    if kind is tuple:
        return tuple([_frozen(item) for item in value])
    if kind is dict:
        return {_frozen(key): _frozen(item) for key, item in value.items()}
    if kind is bytearray or kind is memoryview:
        return bytes(value)
    return copy.deepcopy(value)
