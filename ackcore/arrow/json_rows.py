"""Arrow columns as JSON texts, a row each.

Whole numbers, floats, texts, truth values, lists, structs and nulls are JSON's own, decimals
numbers with all their digits.  Dates and times are ISO 8601 (an instant with its offset),
bytes base64, and NaN and the infinities texts, as Spark's ``to_json`` has them; a map is an object.
"""

from __future__ import annotations

import base64
import decimal
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

_dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_SPECIAL = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}

#: Returns the JSON text of a value that is not null.
_Encode = Callable[[Any], str]


def json_encoder(arrow_type: pa.DataType) -> Callable[[Any], str]:
    """Return a function that makes JSON of a type's values, as ``to_pylist`` gives them.

    Parameters
    ----------
    arrow_type : pyarrow.DataType
        Of the values; those of None are ``null``.

    Raises
    ------
    TypeError
        If JSON has nothing for it: the message is the type that it is about.
    """
    encode = _encoder(arrow_type)
    return lambda value: "null" if value is None else encode(value)


def _encoder(arrow_type: pa.DataType) -> _Encode:
    kind = pa.types
    if kind.is_null(arrow_type) or kind.is_boolean(arrow_type) or kind.is_integer(arrow_type):
        return _dumps
    if kind.is_string(arrow_type) or kind.is_large_string(arrow_type):
        return _dumps
    if kind.is_floating(arrow_type):
        return _float
    if kind.is_decimal(arrow_type):
        return _decimal
    if kind.is_date(arrow_type) or kind.is_timestamp(arrow_type):
        return lambda value: f'"{value.isoformat()}"'
    if kind.is_binary(arrow_type) or kind.is_large_binary(arrow_type):
        return lambda value: f'"{base64.b64encode(value).decode()}"'
    if kind.is_struct(arrow_type):
        return _struct(arrow_type)
    if kind.is_map(arrow_type) and kind.is_string(arrow_type.key_type):
        item = json_encoder(arrow_type.item_type)
        return lambda pairs: f"{{{','.join(f'{_dumps(k)}:{item(v)}' for k, v in pairs)}}}"
    if kind.is_list(arrow_type) or kind.is_large_list(arrow_type):
        item = json_encoder(arrow_type.value_type)
        return lambda values: f"[{','.join(map(item, values))}]"
    raise TypeError(str(arrow_type))


def _struct(arrow_type: pa.StructType) -> _Encode:
    fields = [
        (field.name, f"{_dumps(field.name)}:", json_encoder(field.type)) for field in arrow_type
    ]

    def encode(value: Any) -> str:
        return f"{{{','.join(text + item(value[name]) for name, text, item in fields)}}}"

    return encode


def _float(value: float) -> str:
    text = repr(value)
    return f'"{_SPECIAL[text]}"' if text in _SPECIAL else text


def _decimal(value: decimal.Decimal) -> str:
    return format(value, "f")
