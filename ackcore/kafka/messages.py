"""Conversion of Arrow rows to the keys, values and headers of messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.record_batches import is_text
from ackcore._arrow.shown import invalid_text, json_encoder, shown_values

#: Key, value and headers of a message.
Content = tuple[bytes | str | None, bytes | str | None, list[tuple[str, bytes | None]]]


class MessageColumns(NamedTuple):
    """The names of the columns that become the key, the value and the headers of messages.

    Without ``key`` or ``headers``, messages have none. Without ``value``, the value is the whole
    row, except the headers, as JSON.
    """

    key: str | None = None  # a column of text or bytes
    value: str | None = None  # text or bytes, sent unchanged, or a struct, sent as JSON
    headers: str | None = None  # a list of structs of key and value, or a map; text or bytes

    def check(self, what: str, schema: pa.Schema) -> None:
        """Raise ValueError if a column is missing or two have its name.

        Raises TypeError if the type of a column cannot be sent.

        ``what``: the beginning of the error message. ``schema``: the schema of the rows.
        """
        for argument, name in zip(self._fields, self, strict=True):
            if name is not None and len(schema.get_all_field_indices(name)) != 1:
                twice = ", the name of two columns; rename one of them"
                raise ValueError(
                    f"{what}: {argument} must be one of the columns {', '.join(schema.names)}, "
                    f"got {name!r}{twice if name in schema.names else ''}"
                )
        if self.key is not None and not is_text_or_bytes(schema.field(self.key).type):
            raise TypeError(
                f"{what}: the column {self.key!r}, the key, must be of text or bytes, got "
                f"{schema.field(self.key).type}; have the bolt emit it as a string"
            )
        if self.headers is not None and not _has_headers(schema.field(self.headers).type):
            raise TypeError(
                f"{what}: the column {self.headers!r}, the headers, must be a list of "
                "struct<key: string, value: binary> or a map of text to text or bytes, got "
                f"{schema.field(self.headers).type}"
            )
        if self.value is not None:
            kind = schema.field(self.value).type
            if not is_text_or_bytes(kind) and not pa.types.is_struct(kind):
                raise TypeError(
                    f"{what}: the column {self.value!r}, the value, must be of text, bytes or a "
                    f"struct, which becomes JSON, got {kind}; have the bolt emit it as a string, "
                    "or leave value out to send whole rows as JSON"
                )
        for field in self._in_json(schema):
            try:
                json_encoder(field.type)
            except TypeError as error:
                raise TypeError(
                    f"{what}: the column {field.name!r} of {field.type} is sent as JSON, which "
                    f"has no form for {error}; have the bolt emit another type"
                ) from None

    def _in_json(self, schema: pa.Schema) -> list[pa.Field]:
        if self.value is None:
            return [field for field in schema if field.name != self.headers]
        kind = schema.field(self.value).type
        return [schema.field(self.value)] if pa.types.is_struct(kind) else []

    def unfit(self, batch: pa.RecordBatch, *more: str | None) -> dict[int, str]:
        """Return the rows that cannot be sent unchanged: one reason by row number, from 0 on.

        They have text that is not UTF-8, or a NUL in the name of a header. ``*more``: columns that
        are sent besides key, value and headers; None is ignored.
        """
        names = batch.schema.names if self.value is None else (self.value,)
        found: dict[int, str] = {}
        for name in dict.fromkeys((*names, self.key, self.headers, *more)):
            if name is not None:
                for place in invalid_text(batch.column(name)).tolist():
                    found.setdefault(place, f"the text of column {name!r} is not UTF-8")
        if self.headers is not None and _has_nul(batch.column(self.headers)):
            for place, headers in enumerate(shown_values(batch.column(self.headers))):
                if any("\0" in name for name, _ in _pairs(headers)):
                    why = f"a header's name in column {self.headers!r} has a NUL, which ends names"
                    found.setdefault(place, why)
        return found

    def contents(self, batch: pa.RecordBatch) -> Iterator[Content]:
        """Return an iterator of key, value and headers of each row's message.

        A null key or value is None; null headers are []. Text that is not UTF-8 stays unchanged in
        a key or a value, and is escaped in JSON and in headers. So is a NUL in a header's name.
        """
        n, schema = len(batch), batch.schema
        keys = [None] * n if self.key is None else _unchanged(batch.column(self.key))
        fields = self._in_json(schema)
        if self.value is None and not fields:
            values: Any = ["{}"] * n  # a struct array without fields has no length
        elif self.value is None:
            rows = pa.StructArray.from_arrays(
                [batch.column(field.name) for field in fields], fields=fields
            )
            values = _texts(rows)
        else:
            values = batch.column(self.value)
            values = _texts(values) if fields else _unchanged(values)
        if self.headers is None:
            return ((key, value, []) for key, value in zip(keys, values, strict=True))
        headers = map(_headers, shown_values(batch.column(self.headers)))
        return zip(keys, values, headers, strict=True)


def _texts(column: pa.Array) -> list[str | None]:
    encode = json_encoder(column.type)
    return [None if value is None else encode(value) for value in shown_values(column)]


def _unchanged(column: pa.Array) -> list[bytes | str | None]:
    if is_text(column.type) and len(invalid_text(column)):
        whole = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        column = whole.cast(pa.large_binary())
    return list(column.to_pylist())


def is_text_or_bytes(kind: pa.DataType) -> bool:
    """Return whether a type is text or bytes, sent unchanged. False for views and dictionaries."""
    is_ = pa.types
    tests = (is_.is_string, is_.is_large_string, is_.is_binary, is_.is_large_binary)
    return any(test(kind) for test in tests) or is_.is_fixed_size_binary(kind)


def _has_headers(kind: pa.DataType) -> bool:
    """Return whether a type is a map of headers, or a list of structs of a key and a value."""
    is_ = pa.types
    if is_.is_map(kind):
        return is_.is_string(kind.key_type) and is_text_or_bytes(kind.item_type)
    if not (is_.is_list(kind) or is_.is_large_list(kind)) or not is_.is_struct(kind.value_type):
        return False
    fields = list(kind.value_type)
    if [field.name for field in fields] != ["key", "value"]:
        return False
    return is_.is_string(fields[0].type) and is_text_or_bytes(fields[1].type)


def _headers(given: Sequence[Any] | None) -> list[tuple[str, bytes | None]]:
    """Return the headers in a map's pairs, or in a list of structs without its nulls; [] for None.

    confluent-kafka sends a name, and a value that is text, only up to its first NUL. So a NUL in a
    name is escaped, and text becomes bytes.
    """
    return [
        (name.replace("\0", r"\x00"), value.encode() if isinstance(value, str) else value)
        for name, value in _pairs(given)
    ]


def _pairs(given: Sequence[Any] | None) -> Iterator[tuple[str, bytes | str | None]]:
    for one in given or ():
        if one is not None:
            yield (one["key"] or "", one["value"]) if isinstance(one, dict) else one


def _has_nul(headers: pa.Array) -> bool:
    """Return whether a header's name has a NUL; also True for one outside of the array's slice."""
    is_map = pa.types.is_map(headers.type)
    names = headers.keys if is_map else headers.values.field("key")
    return bool(pc.any(pc.match_substring(names, "\0")).as_py())
