"""Conversion of values to columns of a declared type without loss, or with an error.

Arrow converts 2.7 to the int64 ``2``, and a time to a date.  These functions raise an error that
shows the value and its changed form, unless the column's values equal the given ones.

Nearly always the types of the values rule out any loss, and only types are checked.  Otherwise the
column is read back, or cast back, and compared.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._arrow.record_batches import cast_column, has_type, is_list
from ackcore._arrow.shown import shown_values

#: Types of values that fit a column type without loss, or that Arrow itself refuses.
_FIT: tuple[tuple[tuple[str, ...], frozenset[type]], ...] = (
    (("is_integer",), frozenset({int, *(np.dtype(c).type for c in np.typecodes["AllInteger"])})),
    (("is_float64",), frozenset({int, float})),
    (("is_boolean",), frozenset({bool})),
    (("is_string", "is_large_string"), frozenset({str})),
    (("is_binary", "is_large_binary", "is_fixed_size_binary"), frozenset({bytes})),
    (("is_decimal",), frozenset({int, decimal.Decimal})),
    (("is_date",), frozenset({datetime.date})),
)
_NONE = type(None)
#: The usual type of values in columns of these types: mostly one check per value is enough.
_USUAL: dict[pa.DataType, type] = {
    pa.string(): str,
    pa.int64(): int,
    pa.int32(): int,
    pa.float64(): float,
    pa.bool_(): bool,
    pa.binary(): bytes,
}
#: Units that represent every Python time exactly, or refuse it.
_FINE = ("us", "ns")
_SHOWN_CHARS = 200


def array_of(
    values: Sequence[Any], arrow_type: pa.DataType, *, projects: bool = False
) -> pa.Array | pa.ChunkedArray:
    """Return Python values as a column whose values equal them.

    ``values``: numbers may be of another kind if they are equal; lists may be tuples or numpy
    arrays, and maps dicts; NaN equals NaN; missing values of pandas are null. A struct may be a
    dict or any object that `as_mapping` takes, whose values are matched by name; a plain tuple or
    list is matched by position. ``arrow_type``: the type of the column. ``projects``: whether
    values of unknown names are dropped, and fields without a value are null. By default both are
    errors.

    The column is chunked if the text does not fit into one array. Raises ValueError for the first
    value that does not fit or would be changed.
    """
    types = list(map(type, values))
    usual = types.count(_USUAL.get(arrow_type, type))  # faster than to make a set of the types
    is_usual = usual == len(types) or usual + types.count(_NONE) == len(types)
    if not is_usual and has_type(arrow_type, pa.types.is_struct):
        values = [_by_name(value, arrow_type, projects) for value in values]
        types = list(map(type, values))
    try:
        column = pa.array(values, arrow_type)
    except Exception as error:
        if any(_is_missing(value) for value in values):
            values = [None if _is_missing(value) else value for value in values]
            return array_of(values, arrow_type, projects=projects)
        # The errors of Arrow and Python often do not show the value.
        if isinstance(error, pa.ArrowException | TypeError | OverflowError | UnicodeError):
            raise ValueError(_unfit(values, arrow_type)) from error
        raise
    if is_usual:
        return column
    kinds = set(types)
    kinds.discard(_NONE)
    if not _fits(kinds, values, arrow_type):
        back = column.to_pylist()
        if kinds == {datetime.datetime} and back == list(values):  # at the speed of lists
            return column
        for row, (value, got) in enumerate(zip(values, back, strict=True)):
            if not _is_same(value, got, arrow_type):
                raise ValueError(_became(value, got, arrow_type, row))
    return column


def as_mapping(value: Any) -> Mapping[Any, Any] | None:
    """Return the fields of an object as a mapping, or None if its fields have no names.

    ``value``: a mapping, a `pyspark.sql.Row` with names, a namedtuple, a dataclass, or a pydantic
    or attrs object. A plain tuple and a ``Row(1, 2)`` have no names.

    Raises ValueError if two values have the same name, or the numbers of names and values differ.
    """
    if isinstance(value, Mapping):
        return value
    kind = type(value)
    names: Collection[str] | None = None
    if isinstance(value, tuple):
        # A Row has its names in the object, a namedtuple (or time.struct_time) in its class.
        names = getattr(value, "__fields__", None) or getattr(kind, "__match_args__", None)
        if names is None:
            return None
        if len(names) != len(value):  # a Row("a", "b")(1), or os.stat_result
            raise ValueError(
                f"{kind.__name__} must have one name per value, got {len(names)} for {len(value)}: "
                f"{', '.join(names)}; use a dict"
            )
        found = dict(zip(names, value, strict=True))
        if len(found) < len(value):
            raise ValueError(f"fields must have unique names, got {', '.join(names)}")
        return found
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif isinstance(fields := getattr(kind, "model_fields", None), Mapping):  # pydantic
        names = fields
    elif isinstance(attributes := getattr(kind, "__attrs_attrs__", None), tuple):
        names = [attribute.name for attribute in attributes]
    return None if names is None else {name: getattr(value, name) for name in names}


def _by_name(value: Any, arrow_type: pa.DataType, projects: bool) -> Any:
    """Return a value in which structs whose values have names are dicts.

    Arrow would match a `pyspark.sql.Row` and a namedtuple by position, as plain tuples. Raises
    ValueError for an unknown or a missing name, unless ``projects`` is set.
    """
    kind = pa.types
    if value is None or not has_type(arrow_type, kind.is_struct):
        return value
    if kind.is_struct(arrow_type):
        named = as_mapping(value)
        if named is not None:
            types = {field.name: field.type for field in arrow_type}
            unknown = [] if projects else [name for name in named if name not in types]
            if unknown:
                raise ValueError(
                    f"{arrow_type} has no field {unknown[0]!r}; values with names are matched by "
                    "name"
                )
            missing = [] if projects else [name for name in types if name not in named]
            if missing:
                raise ValueError(
                    f"{arrow_type} must have every field, got none for {missing[0]!r}; give None "
                    "for a null"
                )
            return {name: _by_name(named.get(name), types[name], projects) for name in types}
        items = _items(value)
        if items is None or len(items) != arrow_type.num_fields:
            return value
        are_pairs = all(isinstance(item, tuple) and len(item) == 2 for item in items)
        if are_pairs and [item[0] for item in items] == [field.name for field in arrow_type]:
            return _by_name(dict(items), arrow_type, projects)
        pairs = zip(items, arrow_type, strict=True)
        return tuple(_by_name(item, field.type, projects) for item, field in pairs)
    if kind.is_map(arrow_type):
        entries = list(value.items()) if isinstance(value, Mapping) else _items(value)
        if entries is None or not all(isinstance(one, tuple) and len(one) == 2 for one in entries):
            return value
        key_type, item_type = arrow_type.key_type, arrow_type.item_type
        return [
            (_by_name(key, key_type, projects), _by_name(item, item_type, projects))
            for key, item in entries
        ]
    items = _items(value)
    if items is None or arrow_type.num_fields != 1:
        return value
    return [_by_name(item, arrow_type.value_type, projects) for item in items]


def cast(column: pa.Array | pa.ChunkedArray, arrow_type: pa.DataType, first_row: int = 0) -> Any:
    """Return an Arrow column in another type, if a cast back restores its values.

    ``first_row`` is the number of its first row, for messages.

    Raises ValueError for the first value that would be changed, also -0.0 to 0.0; if equal numbers
    mean something else in the other type (1 is not a time); or if there is no such cast.
    """
    if isinstance(column, pa.ChunkedArray):
        chunks = []
        for chunk in column.chunks:
            chunks.append(cast(chunk, arrow_type, first_row))
            first_row += len(chunk)
        return pa.chunked_array(chunks, arrow_type)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    typed = _castable(column.type, arrow_type)
    if typed != column.type:
        column = cast_column(column, typed)
    if not _means_the_same(column.type, arrow_type):
        raise ValueError(f"values of {column.type} have another meaning as {arrow_type}")
    try:
        found = cast_column(column, arrow_type)
        if are_alike(column, cast_column(found, column.type)):
            return found
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowKeyError) as error:
        raise ValueError(str(error)) from error
    except pa.ArrowInvalid:
        pass  # Arrow's error often does not show the value
    row, size = 0, len(column)
    while size > 1:  # bisect to the first changed value
        half = size // 2
        if _survives_cast(column.slice(row, half), arrow_type):
            row, half = row + half, size - half
        size = half
    one = column.slice(row, 1)
    try:
        outcome = f"would become {_shown(cast_column(one, arrow_type))}"
    except pa.ArrowInvalid:
        outcome = "does not fit"
    raise ValueError(f"{_shown(one)} {outcome} in row {first_row + row}")


def _shown(one: pa.Array) -> str:
    """Return the only value of an array as text."""
    return short_repr(shown_values(one)[0])


def _survives_cast(column: pa.Array, arrow_type: pa.DataType) -> bool:
    """Return whether a cast to a type and the cast back give the same column."""
    try:
        found = cast_column(column, arrow_type)
        return are_alike(column, cast_column(found, column.type))
    except pa.ArrowInvalid:
        return False


def _castable(was: pa.DataType, now: pa.DataType) -> pa.DataType:
    """Return the type to cast a column of ``was`` to before the cast to ``now``; mostly ``was``.

    Null types become what ``now`` has in their place: Arrow infers ``list<null>`` from empty lists,
    and cannot cast back to it. Integers for a decimal become a wide decimal: Arrow refuses a
    decimal with fewer digits than the largest integer of the type.
    """
    kind = pa.types
    if kind.is_null(was):
        return now
    if kind.is_integer(was) and kind.is_decimal(now):
        return pa.decimal256(76, min(max(now.scale, 0), 56))  # 56 leaves room for 20 digits
    if kind.is_struct(was) and kind.is_struct(now):
        places = [now.get_field_index(field.name) for field in was]
        return pa.struct(
            [
                field if at < 0 else field.with_type(_castable(field.type, now[at].type))
                for field, at in zip(was, places, strict=True)
            ]
        )
    if kind.is_map(was) and kind.is_map(now):
        return pa.map_(was.key_type, _castable(was.item_type, now.item_type))
    if isinstance(was, pa.ListType) and is_list(now):
        return pa.list_(_castable(was.value_type, now.value_type))
    return was


def _means_the_same(was: pa.DataType, now: pa.DataType) -> bool:
    """Return whether equal numbers mean the same in two types; 1 as int64 is not a time.

    Raises ValueError if two fields of the struct ``was`` have one name.
    """
    kind = pa.types
    if kind.is_temporal(was) or kind.is_temporal(now):
        return _time(was) == _time(now)
    if kind.is_struct(was) and kind.is_struct(now):
        names = {field.name for field in was} & {field.name for field in now}
        if any(len(was.get_all_field_indices(name)) > 1 for name in names):
            raise ValueError(f"fields must have unique names, got {was}")
        return all(_means_the_same(was.field(name).type, now.field(name).type) for name in names)
    # If only one of them is nested, Arrow raises, because it has no such cast.
    fields = range(min(was.num_fields, now.num_fields))
    return all(_means_the_same(was.field(at).type, now.field(at).type) for at in fields)


def _time(arrow_type: pa.DataType) -> tuple[bool, ...]:
    kind = pa.types
    tests = (kind.is_date, kind.is_time, kind.is_duration, kind.is_interval, kind.is_timestamp)
    zoned = kind.is_timestamp(arrow_type) and arrow_type.tz is not None
    return (zoned, *(test(arrow_type) for test in tests))


def _fits(kinds: set[type], values: Sequence[Any], arrow_type: pa.DataType) -> bool:
    """Return whether Arrow stores each value of these Python types unchanged, or raises."""
    for tests, fit in _FIT:
        if kinds <= fit and any(getattr(pa.types, test)(arrow_type) for test in tests):
            return True
    if kinds == {datetime.timedelta}:
        return pa.types.is_duration(arrow_type) and arrow_type.unit in _FINE
    if kinds == {datetime.datetime} and pa.types.is_timestamp(arrow_type):
        if arrow_type.unit not in _FINE:
            return False
        zones = {value.tzinfo for value in values if value is not None}
        return zones == {None} if arrow_type.tz is None else None not in zones
    return False


def _is_missing(value: Any) -> bool:
    """Return whether a value is one of pandas' nulls other than None and NaN."""
    return type(value).__name__ in ("NAType", "NaTType")


def _is_same(value: Any, got: Any, arrow_type: pa.DataType) -> bool:
    """Return whether a value read back from a column equals the given one.

    NaN equals NaN, and a datetime does not equal a date.
    """
    kind = pa.types
    if got is None:
        return value is None or _is_missing(value)
    if value is None:
        return False
    if kind.is_struct(arrow_type):
        return _is_same_struct(value, got, arrow_type)
    if kind.is_map(arrow_type):
        pairs = list(value.items()) if isinstance(value, Mapping) else _items(value)
        return (
            pairs is not None
            and len(pairs) == len(got)
            and all(
                _is_same(key, key_got, arrow_type.key_type)
                and _is_same(item, item_got, arrow_type.item_type)
                for (key, item), (key_got, item_got) in zip(pairs, got, strict=True)
            )
        )
    if isinstance(got, list):
        items = _items(value)
        return (
            items is not None
            and len(items) == len(got)
            and all(map(_is_same, items, got, [arrow_type.value_type] * len(got)))
        )
    if isinstance(got, bytes):
        return isinstance(value, bytes | bytearray | memoryview) and bytes(value) == got
    if isinstance(got, datetime.date) and not isinstance(got, datetime.datetime):
        # A datetime at midnight must not pass for a date.
        return not isinstance(value, datetime.datetime) and bool(value == got)
    if _is_instant(value) and _is_instant(got):
        # Python compares times of one zone by what its clocks show. Across zones, == is False for
        # a time in an hour that one of them repeats or skips.
        shown = value.replace(tzinfo=None) - got.replace(tzinfo=None)
        return bool(shown == value.utcoffset() - got.utcoffset())
    same = value == got
    return bool(same) or bool(value != value and got != got)


def _is_instant(value: Any) -> bool:
    """Return whether a value is a time with an offset from UTC."""
    return isinstance(value, datetime.datetime) and value.utcoffset() is not None


def _is_same_struct(value: Any, got: dict[str, Any], arrow_type: pa.DataType) -> bool:
    if not isinstance(value, Mapping):
        items = _items(value)
        if items is None or len(items) != len(got):
            return False
        value = dict(zip(got, items, strict=True))
    return set(value) == set(got) and all(
        _is_same(value[name], got[name], arrow_type.field(name).type) for name in got
    )


def _items(value: Any) -> list[Any] | None:
    """Return the items of a list, tuple or numpy array; None for any other value."""
    if isinstance(value, np.ndarray):
        return list(value)
    return list(value) if isinstance(value, list | tuple) else None


def are_alike(one: pa.Array, other: pa.Array) -> bool:
    """Return whether two arrays of a type have the same values; NaN is NaN, and -0.0 is not 0.0."""
    if not one.is_valid().equals(other.is_valid()):
        return False
    arrow_type, kind = one.type, pa.types
    if kind.is_struct(arrow_type):
        return all(map(are_alike, one.flatten(), other.flatten()))
    if kind.is_map(arrow_type):
        pairs = pa.list_(pa.struct([arrow_type.key_field, arrow_type.item_field]))
        return are_alike(one.cast(pairs), other.cast(pairs))
    if is_list(arrow_type):
        lengths = [column.value_lengths().fill_null(0) for column in (one, other)]
        return bool(lengths[0].equals(lengths[1])) and are_alike(one.flatten(), other.flatten())
    if kind.is_dictionary(arrow_type):
        return are_alike(one.dictionary_decode(), other.dictionary_decode())
    if kind.is_floating(arrow_type):
        was, now = (column.fill_null(0).to_numpy(zero_copy_only=False) for column in (one, other))
        same = (was == now) & (np.signbit(was) == np.signbit(now))
        return bool((same | (np.isnan(was) & np.isnan(now))).all())
    return bool(one.equals(other))


def _unfit(values: Sequence[Any], arrow_type: pa.DataType) -> str:
    """Return the text of an error about the first value that Arrow cannot convert to a type."""
    for row, value in enumerate(values):
        try:
            pa.array([value], arrow_type)
        except Exception:
            path, value = _innermost_unfit(value, arrow_type)
            return f"{path}{short_repr(value)} does not fit in row {row}"
    return "its values do not fit into one column"


def _innermost_unfit(value: Any, arrow_type: pa.DataType) -> tuple[str, Any]:
    """Return the path and the value of the innermost field that Arrow cannot convert.

    For any value but a dict of a struct's fields, that is an empty path and the value itself.
    """
    if pa.types.is_struct(arrow_type) and isinstance(value, Mapping):
        for field in arrow_type:
            try:
                pa.array([value.get(field.name)], field.type)
            except Exception:
                path, inner = _innermost_unfit(value.get(field.name), field.type)
                return f"field {field.name!r}: {path}", inner
    return "", value


def _became(value: Any, got: Any, arrow_type: pa.DataType, row: int) -> str:
    """Return the text of an error about a value that a column has as ``got``."""
    if pa.types.is_struct(arrow_type) and isinstance(value, Mapping):
        for field in arrow_type:
            was, now = value.get(field.name), got.get(field.name)
            if not _is_same(was, now, field.type):
                return f"field {field.name!r}: {_became(was, now, field.type, row)}"
    text = f"{short_repr(value)} would become {short_repr(got)} in row {row}"
    if pa.types.is_floating(arrow_type) and isinstance(value, float):
        return f"{text}; numpy.{np.dtype(arrow_type.to_pandas_dtype()).name}(value) rounds it"
    return text


def short_repr(value: Any) -> str:
    """Return the repr of a value for messages: in one line, and cut after 200 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."
