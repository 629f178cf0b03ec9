"""Arrow columns as Python values, with texts for values that Python cannot represent, and as JSON.

Arrow may hold text that is not UTF-8, and dates and times before year 1 and after year 9999.
``to_pylist()`` raises for a whole column if it has one such value.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import has_type, is_list, is_text
from ackcore._records import Int64s

#: The first year that both Arrow and Python can format, and the year after the last.
_YEARS = ("0001", "10000")

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_SPECIAL = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}

#: Returns the JSON text of a value that is not null.
_Encode = Callable[[Any], str]


class ShownTime(str):
    """The text of a date or time that Python cannot represent."""

    __slots__ = ()

    def isoformat(self) -> str:
        """Return the text, like the method of dates and times."""
        return str(self)


def shown_values(
    column: pa.Array | pa.ChunkedArray,
    *,
    errors: str = "backslashreplace",
    far: Callable[[int, pa.DataType], str] | None = None,
) -> list[Any]:
    """Return a column's values as ``to_pylist()`` does, but never raise for a value.

    ``errors``: the handling of bytes that are not UTF-8, as for `bytes.decode`. ``far``: returns
    the text of a date or time that Python cannot represent, from Arrow's number for it and its
    type. ISO 8601 by default.
    """
    try:
        return list(column.to_pylist())
    except Exception:
        if len(column) > 1:
            half = len(column) // 2
            parts = (column.slice(0, half), column.slice(half))
            return [each for part in parts for each in shown_values(part, errors=errors, far=far)]
    return [_shown(column[0], errors, far or _iso)]


def shown_rows(table: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as dicts of the values that `shown_values` returns."""
    columns = [shown_values(column) for column in table.columns]
    return [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _shown(one: pa.Scalar, errors: str, far: Callable[[int, pa.DataType], str]) -> Any:
    kind, is_ = one.type, pa.types
    if not one.is_valid:
        return None
    if is_.is_dictionary(kind):
        return _shown(one.value, errors, far)
    if is_.is_struct(kind):
        return {name: _shown(part, errors, far) for name, part in one.items()}
    if is_.is_map(kind):
        return [
            (_shown(pair["key"], errors, far), _shown(pair["value"], errors, far))
            for pair in one.values
        ]
    if is_list(kind):
        return [_shown(item, errors, far) for item in one.values]
    try:
        return one.as_py()
    except Exception:
        if is_text(kind):
            return one.as_buffer().to_pybytes().decode(errors=errors)
        if is_.is_date64(kind):
            one = one.cast(pa.date32())
        if is_.is_date(kind) or is_.is_timestamp(kind):
            return ShownTime(far(one.value, one.type))
        return f"{getattr(one, 'value', '?')} {kind}"


def _iso(number: int, kind: pa.DataType) -> str:
    is_date = pa.types.is_date(kind)
    text = str(np.datetime64(number, "D" if is_date else kind.unit))
    if text == "NaT":  # numpy's meaning of the lowest number
        return f"{number} {'days' if is_date else kind.unit}"
    return text if is_date or kind.tz is None else f"{text}+00:00"


def far_as_texts(
    column: pa.Array, far: Callable[[int, pa.DataType], str] | None = None
) -> pa.Array:
    """Return a column unchanged, or all its values as texts if one is outside of years 1 to 9999.

    Arrow formats such a value wrongly. ``column``: dates of 32 bits, or timestamps. ``far``:
    returns the text of such a value, as for `shown_values`.
    """
    places, numbers = far_places(column)
    if not len(places):
        return column
    is_far = np.zeros(len(column), np.bool_)
    is_far[places] = True
    near = pc.if_else(pa.array(is_far), pa.scalar(None, column.type), column)
    texts = near.cast(pa.string()).to_numpy(zero_copy_only=False)
    texts[places] = [(far or _iso)(number, column.type) for number in numbers]
    return pa.array(texts, pa.string())


def far_places(column: pa.Array) -> tuple[Int64s, list[int]]:
    """Return the numbers of the rows outside of years 1 to 9999, and the values of these rows.

    A value is Arrow's number: days, or units of the type, since 1970. ``column``: dates of 32 bits,
    or timestamps; nulls are left out.
    """
    unit = "D" if pa.types.is_date(column.type) else column.type.unit
    if unit == "ns":  # these are from the years 1677 to 2262
        return np.empty(0, np.int64), []
    first, behind = np.array(_YEARS, "M8[Y]").astype(f"M8[{unit}]").astype(np.int64).tolist()
    whole = column.view(pa.int32() if unit == "D" else pa.int64())
    numbers = whole.fill_null(0).to_numpy(zero_copy_only=False)
    places = np.flatnonzero((numbers < first) | (numbers >= behind))
    return places, numbers[places].tolist()


def invalid_text(column: pa.Array) -> Int64s:
    """Return the ascending numbers of the rows with text that is not UTF-8, also if nested."""
    if not has_type(column.type, is_text):
        return np.empty(0, np.int64)
    return np.fromiter(unfit_rows(column, _is_utf8), np.int64)


def unfit_rows(column: pa.Array, fits: Callable[[pa.Array], bool]) -> Iterator[int]:
    """Yield the ascending numbers of the rows that do not fit, which are found by bisection.

    ``fits``: returns whether all values of a part of the column fit.
    """
    if fits(column):  # it may test nested values outside of a slice, too: no row is missed
        return
    parts = [(0, len(column))]
    while parts:
        start, stop = parts.pop()
        part = column.slice(start, stop - start)
        if column.type.num_fields:  # a slice keeps the nested values of all rows
            part = column.take(pa.array(np.arange(start, stop)))
        if start == stop or fits(part):
            continue
        if stop - start == 1:
            yield start
        else:
            middle = (start + stop) // 2
            parts += [(middle, stop), (start, middle)]


def _is_utf8(column: pa.Array) -> bool:
    kind, is_ = column.type, pa.types
    if is_.is_dictionary(kind):
        return not has_type(kind, is_text) or _is_utf8(column.dictionary_decode())
    if is_text(kind):
        try:
            column.cast(_BYTES[kind]).cast(kind)
        except pa.ArrowInvalid:
            return False
        return True
    if is_.is_struct(kind):
        return all(map(_is_utf8, column.flatten()))
    if is_.is_map(kind):
        return _is_utf8(column.keys) and _is_utf8(column.items)
    return not kind.num_fields or _is_utf8(column.flatten())


_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}


def as_texts(column: pa.Array) -> pa.Array:
    """Return a column as text. The text of a value does not depend on the other values.

    In text, bytes that are not UTF-8 are escaped. Dates outside of years 1 to 9999 are ISO 8601.
    """
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_timestamp(kind):
        column = far_as_texts(column)
    elif is_text(kind) and len(invalid_text(column)):
        column = pa.array(shown_values(column), pa.string())
    return column.cast(pa.string())


def text_of(values: list[bytes | None]) -> pa.Array:
    """Return a column of text with exactly these bytes, even if not UTF-8, and null for None."""
    options = pc.CastOptions(pa.string(), allow_invalid_utf8=True)
    return pa.array(values, pa.binary()).cast(options=options)


def base64_of(value: bytes) -> str:
    """Return bytes in base64."""
    return base64.b64encode(value).decode()


def readable(value: bytes) -> str:
    """Return bytes for a reader: their text if it is printable UTF-8, else ``base64:...``."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    printable = all(each.isprintable() or each in "\t\r\n" for each in text)
    return text if printable else f"base64:{base64_of(value)}"


def json_encoder(
    arrow_type: pa.DataType, binary: Callable[[bytes], str] = base64_of
) -> Callable[[Any], str]:
    """Return a function that encodes a value of a type, as ``to_pylist`` returns it, as JSON.

    Numbers, texts, booleans, lists, structs and nulls have JSON's own forms; a map, whose keys must
    be text, is an object. Decimals are numbers with all their digits. Dates and timestamps are ISO
    8601 (with the offset for instants). NaN and the infinities are texts, as in Spark's
    ``to_json``. ``binary``: returns the text of bytes; base64 by default.

    Raises TypeError if the type, or one inside it, has no form in JSON; the message is that type.
    """
    encode = _encoder(arrow_type, binary)
    return lambda value: "null" if value is None else encode(value)


def _encoder(arrow_type: pa.DataType, binary: Callable[[bytes], str]) -> _Encode:
    kind = pa.types
    if kind.is_null(arrow_type) or kind.is_boolean(arrow_type) or kind.is_integer(arrow_type):
        return _dumps
    if kind.is_string(arrow_type) or kind.is_large_string(arrow_type):
        return _dumps
    if kind.is_floating(arrow_type):
        return _float
    if kind.is_decimal(arrow_type):
        return lambda value: f"{value:f}"
    if kind.is_date(arrow_type) or kind.is_timestamp(arrow_type):
        return lambda value: f'"{value.isoformat()}"'
    if kind.is_binary(arrow_type) or kind.is_large_binary(arrow_type):
        return lambda value: _dumps(binary(value))
    if kind.is_struct(arrow_type):
        return _struct(arrow_type, binary)
    if kind.is_map(arrow_type) and kind.is_string(arrow_type.key_type):
        item = json_encoder(arrow_type.item_type, binary)
        return lambda pairs: f"{{{','.join(f'{_dumps(k)}:{item(v)}' for k, v in pairs)}}}"
    if kind.is_list(arrow_type) or kind.is_large_list(arrow_type):
        item = json_encoder(arrow_type.value_type, binary)
        return lambda values: f"[{','.join(map(item, values))}]"
    raise TypeError(str(arrow_type))


def _struct(arrow_type: pa.StructType, binary: Callable[[bytes], str]) -> _Encode:
    fields = [
        (field.name, f"{_dumps(field.name)}:", json_encoder(field.type, binary))
        for field in arrow_type
    ]

    def encode(value: Any) -> str:
        return f"{{{','.join(text + item(value[name]) for name, text, item in fields)}}}"

    return encode


def _float(value: float) -> str:
    text = repr(value)
    return f'"{_SPECIAL[text]}"' if text in _SPECIAL else text
