"""Conversion of rows to CSV for PostgreSQL's COPY.

Arrow's CSV writer writes most types as PostgreSQL reads them; the others become texts first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from ackcore._arrow.record_batches import is_list
from ackcore._arrow.shown import far_as_texts, json_encoder, shown_values, text_of

_ISO = re.compile(r"(-?)(\d+)(.*)")

_OPTIONS = pyarrow.csv.WriteOptions(include_header=False)


def refuse_unfit(what: str, schema: pa.Schema) -> None:
    """Raise TypeError if the type of a column cannot be written as text for PostgreSQL.

    ``what``: the beginning of the message, such as ``sink 'counts'``.
    """
    for field in schema:
        item = kind = field.type
        while is_list(item):
            item = item.value_type
        if (pa.types.is_timestamp(item) or pa.types.is_time64(item)) and item.unit == "ns":
            name = "timestamp" if pa.types.is_timestamp(item) else "time64"
            raise TypeError(
                f"{what}: column {field.name!r} is {kind}, and PostgreSQL cannot store "
                f"nanoseconds; have the bolt emit {name}('us')"
            )
        try:
            for as_array in (False, True):
                as_csv(pa.RecordBatch.from_arrays([pa.nulls(1, kind)], ["x"]), [as_array])
        except (TypeError, pa.ArrowException):
            raise TypeError(
                f"{what}: column {field.name!r} is {kind}, which cannot be written as text "
                "for PostgreSQL; have the bolt emit another type"
            ) from None


def as_csv(batch: pa.RecordBatch, arrays: list[bool], first: int | None = None) -> Any:
    """Return rows as the bytes of a CSV without a header.

    ``arrays``: for each column, True if its lists become PostgreSQL arrays, False if they become
    JSON. ``first``: the number of the first row. If it is given, the last column of the CSV has the
    numbers of the rows.
    """
    columns = [
        _plain(column, as_array) for column, as_array in zip(batch.columns, arrays, strict=True)
    ]
    if first is not None:
        columns.append(pa.array(np.arange(first, first + len(batch))))
    out = pa.BufferOutputStream()
    names = [str(n) for n in range(len(columns))]
    pyarrow.csv.write_csv(pa.RecordBatch.from_arrays(columns, names), out, _OPTIONS)
    return out.getvalue()


def _plain(column: pa.Array, as_array: bool) -> pa.Array:
    """Return a column in a type that Arrow's CSV writer writes in PostgreSQL's format.

    ``as_array``: whether lists become PostgreSQL arrays, and not JSON. Raises TypeError for
    durations and intervals.
    """
    kind, is_ = column.type, pa.types
    if is_.is_date64(kind):
        return far_as_texts(column.cast(pa.date32()), _far)
    if is_.is_timestamp(kind) and kind.tz is not None:
        # In UTC: PostgreSQL drops the offset in a column without time zone.
        return far_as_texts(column.cast(pa.timestamp(kind.unit, "UTC")), _far)
    if is_.is_timestamp(kind) or is_.is_date(kind):
        return far_as_texts(column, _far)
    if _is_bytes(kind):
        return _texts(column, _hex)
    if is_.is_nested(kind):
        return _texts(column, _array(kind) if as_array and is_list(kind) else json_encoder(kind))
    if is_.is_duration(kind) or is_.is_interval(kind):
        raise TypeError(f"{kind} has no text that PostgreSQL reads")
    return column


def _far(number: int, kind: pa.DataType) -> str:
    """Return the text of a date or time of any year in PostgreSQL's format, which has no year 0.

    ``number``: the days or time units since 1970, as Arrow stores them.
    """
    is_date = pa.types.is_date(kind)
    text = str(np.datetime64(number, "D" if is_date else kind.unit))
    found = _ISO.fullmatch(text)
    if found is None:  # numpy's NaT; PostgreSQL has no such year
        return text
    sign, year, rest = found.groups()
    zone = "" if is_date or kind.tz is None else "Z"
    if sign or not int(year):
        return f"{int(year) + 1:04}{rest}{zone} BC"
    return f"{year}{rest}{zone}"


def _texts(column: pa.Array, text: Callable[[Any], str]) -> pa.Array:
    """Return a column with ``text(value)`` for each value, and null for a null."""
    # Bytes that are not UTF-8 are sent unchanged; PostgreSQL refuses the row.
    values = shown_values(column, errors="surrogateescape", far=_far)
    return text_of(
        [None if one is None else text(one).encode(errors="surrogateescape") for one in values]
    )


def _array(kind: pa.DataType) -> Callable[[Any], str]:
    """Return a function that formats a list as a PostgreSQL array literal."""
    item = _array(kind.value_type) if is_list(kind.value_type) else _item(kind.value_type)
    return lambda values: (
        f"{{{','.join('NULL' if value is None else item(value) for value in values)}}}"
    )


def _item(kind: pa.DataType) -> Callable[[Any], str]:
    if _is_bytes(kind):
        return lambda value: _quoted(_hex(value))
    if pa.types.is_nested(kind):
        encode = json_encoder(kind)
        return lambda value: _quoted(encode(value))
    if pa.types.is_temporal(kind):
        return lambda value: _quoted(_moment(value))
    if pa.types.is_decimal(kind):
        return lambda value: format(value, "f")
    return lambda value: _quoted(str(value))


def _moment(value: Any) -> str:
    at = value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value
    return str(at.isoformat())


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _hex(value: bytes) -> str:
    return f"\\x{value.hex()}"


def _is_bytes(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind))
