"""Arrow columns as JSON texts, one per row.

Whole numbers, floats, texts, booleans, lists, structs and nulls have JSON's own forms; a map is an
object.  Decimals are numbers with all their digits.  Dates and times are ISO 8601 (with the offset
for instants), and bytes are base64.  NaN and the infinities are texts, as in Spark's ``to_json``.
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
    """Return a function that encodes values of a type, as ``to_pylist`` returns them, as JSON.

    Raises TypeError if the type, or one inside it, has no form in JSON; the message is that type.

    ``arrow_type``: the type of the values; None is encoded as ``null``.
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
