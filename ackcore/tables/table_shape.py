"""The shape of a table: its key, its aggregates, and the columns that are stored."""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.lossless import short_repr
from ackcore._error_hints import nearest
from ackcore._records import UInt64s
from ackcore.tables import aggregates
from ackcore.tables.aggregates import Aggregate, max_of
from ackcore.tables.key_groups import hashes_of, plain, plain_type
from ackcore.tables.own_folds import BatchFold, Fold
from ackcore.tables.time_windows import END, START, Window

#: The column with the hash of the key.
HASH = "_hash"
#: The column with the time at which a row expires, in milliseconds since 1970.
EXPIRES = "_expires_ms"
_STATE = "_state."
#: The columns of a segment beside those of `TableShape.stored_schema`: its index, the columns of
#: fixed width, and in results the place of each row.
OF_SEGMENTS = DISTANCES, BITS, BLOCK, PLACE = "_distances", "_bits", "_block", "_place"
#: The range of a ttl: from 1 ms to about 300 years.
MIN_TTL_S, MAX_TTL_S = 0.001, 10**10
#: The end of the range of all hashes.
HASH_END = 2**64


@dataclass(frozen=True)
class TableShape:
    """The columns of a table: its key, its aggregates, and the columns that they read."""

    name: str  # the name of the table
    #: The columns of the key, in their plain types: without dictionaries and views.
    key: tuple[pa.Field, ...]
    aggregates: Mapping[str, Aggregate]  # the aggregates by the names of their columns
    ttl_s: float | None  # the seconds after the last change of a row at which it expires
    #: The plain types of the columns that the key and the aggregates read.
    inputs: Mapping[str, pa.DataType]
    #: The column with the time at which a row expires, in milliseconds since 1970; of the rows of a
    #: key, the latest counts. None: ``ttl_s`` after the time of the micro-batch.
    expires_by: str | None = None
    #: The windows of time.  Their start is the last column of the key, their end the first value.
    window: Window | None = None

    @classmethod
    def of(
        cls,
        name: str,
        input_schema: pa.Schema,
        key: str | Sequence[str],
        value: Mapping[Any, Any],
        ttl_s: float | None = None,
        expires_by: str | None = None,
        window: Window | None = None,
    ) -> TableShape:
        """Return the shape of a table that is folded from rows of a schema.

        Raises TypeError or ValueError if an argument does not fit the schema or another argument.
        `TopologyBuilder.table` checks their types and ranges.

        ``name``: the name of the table. ``input_schema``: the columns of the rows. ``key``: the
        columns of the key. ``value``: the aggregates by the names of their columns. ``ttl_s``: the
        seconds after the last change of a row at which it expires. ``expires_by``: the int64 column
        with the time at which a row expires, in milliseconds since 1970. ``window``: the windows of
        time.
        """
        where = f"table {name!r}:"
        keys = (key,) if isinstance(key, str) else tuple(key)
        if len(set(keys)) < len(keys):
            raise ValueError(
                f"{where} key must be different columns, got {short_repr(key)}; name each once"
            )
        for one, aggregate in value.items():
            columns: object = aggregate.columns
            if not isinstance(columns, list | tuple):
                raise TypeError(
                    f"{where} value[{one!r}] must be an aggregate whose attribute columns is a "
                    f"list or tuple of names, got {short_repr(columns)}"
                )
            if one in keys:
                raise ValueError(
                    f"{where} value must not name a column of key, got {one!r} in both; rename the "
                    "value"
                )
        for one in (*keys, *value):
            taken = (HASH, EXPIRES, *OF_SEGMENTS) if one in keys else (HASH, EXPIRES)
            if one in taken or one.startswith(_STATE):
                raise ValueError(f"{where} the column name {one!r} is reserved; rename it")
        if window is not None:
            if ttl_s is not None:
                raise ValueError(
                    f"{where} ttl_s must be None with window, since rows end when their windows "
                    f"close, got {short_repr(ttl_s)}"
                )
            keys, value, input_schema = _with_window(where, keys, value, input_schema, window)
        inputs: dict[str, pa.DataType] = {}
        reads = [] if window is None else [("time of window", window.time)]
        reads += [("key", one) for one in keys]
        reads += [(f"value[{one!r}]", c) for one, agg in value.items() for c in agg.columns]
        for argument, column in reads:
            found = input_schema.get_all_field_indices(column)
            if len(found) != 1:
                names = [
                    name
                    for name in input_schema.names
                    if window is None or name not in (START, END)
                ]
                has, near = ", ".join(names) or "none", nearest(column, names)
                raise ValueError(
                    f"{where} {argument} must name a column of the stream ({has}), "
                    f"got {column!r}" + ("" if near is None else f"; did you mean {near!r}?")
                )
            kind = input_schema.field(found[0]).type
            try:
                inputs[column] = plain_type(kind)
                plain(pa.nulls(0, kind))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise TypeError(
                    f"{where} {argument} must have a type that can be stored, got {column!r} of "
                    f"{kind} ({error}); cast it"
                ) from error
        for one in keys:
            try:
                hash_columns([pa.nulls(0, inputs[one])], 0)
            except TypeError as error:
                raise TypeError(
                    f"{where} key must be columns that can be hashed, got {one!r} of "
                    f"{input_schema.field(one).type} ({error}); cast it, or name another column"
                ) from None
        for one, aggregate in value.items():
            try:
                types = [inputs[column] for column in aggregate.columns]
                for part, kind in aggregate.state_types(types).items():
                    _check_state(part, kind)
                aggregate.value_type(types)
            except TypeError as error:
                advice = ""
                if str(error).startswith("must read"):  # only the first column must have some type
                    got = f"{aggregate.columns[0]!r} of {types[0]}"
                    advice = f", got {got}; name another column, or emit it in another type"
                raise TypeError(f"{where} value[{one!r}] {error}{advice}") from None
        fields = tuple(pa.field(one, inputs[one]) for one in keys)
        if expires_by is not None:
            inputs[expires_by] = pa.int64()
        shape = cls(name, fields, dict(value), ttl_s, inputs, expires_by, window)
        names = shape.stored_schema.names
        for one in [one for one in names if names.count(one) > 1]:
            raise ValueError(
                f"{where} two values must not store states in a column of the same name, got "
                f"{one.removeprefix(_STATE)!r} (name of the value, '.', name in its state) twice; "
                "rename a value"
            )
        return shape

    @property
    def input_columns(self) -> list[str]:
        """The names of the columns that the table reads."""
        made = () if self.window is None else (START, END)
        return [name for name in self.inputs if name not in made]

    @property
    def expires(self) -> bool:
        """Whether rows expire: after a time, or when their windows close."""
        return self.ttl_s is not None or self.window is not None

    @property
    def sessions(self) -> bool:
        """Whether the windows of the table are sessions."""
        return self.window is not None and self.window.step_ms is None

    def hashes(self, keys: Sequence[pa.Array]) -> UInt64s:
        """Return the hash of each key, given the key's columns; a session's start is not hashed."""
        return hashes_of(keys[:-1] if self.sessions else keys, len(keys[0]))

    @property
    def key_names(self) -> list[str]:
        """The names of the columns of the key."""
        return [field.name for field in self.key]

    def states(self, name: str) -> list[pa.Field]:
        """Return the stored columns for the state of the aggregate ``name``."""
        aggregate = self.aggregates[name]
        types = aggregate.state_types([self.inputs[column] for column in aggregate.columns])
        return [pa.field(f"{_STATE}{name}.{part}", kind) for part, kind in types.items()]

    @functools.cached_property
    def stored_schema(self) -> pa.Schema:
        """The schema of stored rows: hash, key, states and, if rows expire, their expiry time."""
        states = [field for name in self.aggregates for field in self.states(name)]
        expires = [pa.field(EXPIRES, pa.int64())] if self.expires else []
        return pa.schema([pa.field(HASH, pa.uint64()), *self.key, *states, *expires])

    @functools.cached_property
    def row_schema(self) -> pa.Schema:
        """The schema of the rows that users see: the key and the finished values."""
        values = [
            pa.field(name, aggregate.value_type([self.inputs[c] for c in aggregate.columns]))
            for name, aggregate in self.aggregates.items()
        ]
        return pa.schema([*self.key, *values])

    def structure(self) -> dict[str, Any]:
        """Return the shape as JSON values, to be compared with the recorded shape of the table.

        If the keys and the entries of ``aggregates`` are equal, so are the stored columns.
        """
        return {
            # A list: the hash depends on the order of the columns.
            "key": [[field.name, str(field.type)] for field in self.key],
            "aggregates": {
                name: {
                    **aggregate.structure(),
                    "states": {field.name: str(field.type) for field in self.states(name)},
                }
                for name, aggregate in self.aggregates.items()
            },
            "ttl_s": self.ttl_s,
            **({} if self.window is None else {"window": self.window.structure()}),
        }

    def key_arrays(self, rows: pa.RecordBatch | pa.Table) -> list[pa.Array]:
        """Return the columns of the key from the argument ``keys`` of a look-up.

        They are cast to the types of the table. Raises ValueError if a column is missing, and
        TypeError if it cannot be cast.
        """
        arrays = []
        for field in self.key:
            if field.name not in rows.schema.names:
                raise ValueError(
                    f"keys must have the columns {', '.join(self.key_names)} of table "
                    f"{self.name!r}, got {', '.join(rows.schema.names) or 'none'}"
                )
            column = one_chunk(rows.column(field.name))
            try:
                arrays.append(plain(column).cast(field.type))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise TypeError(
                    f"the column {field.name!r} of keys must be {field.type}, as in table "
                    f"{self.name!r}, got {column.type} ({error}); cast it"
                ) from error
        return arrays


def _check_state(name: str, kind: pa.DataType) -> None:
    """Raise TypeError for a type of a state that cannot be stored and merged."""
    try:
        plain_type(kind)
        pa.array([], kind)  # fails for nested extension types
        if isinstance(kind, pa.BaseExtensionType):
            raise pa.ArrowNotImplementedError("Spark has no extension types")
        pa.concat_arrays([pa.nulls(1, kind)] * 2).take(pa.array([1, 0]))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TypeError(
            f"must be an aggregate whose state can be stored, got {name!r} of {kind} ({error}); "
            "cast it to another type, such as string for string_view"
        ) from error


def _with_window(
    where: str, keys: tuple[str, ...], value: Mapping[Any, Any], schema: pa.Schema, window: Window
) -> tuple[tuple[str, ...], Mapping[Any, Any], pa.Schema]:
    """Add the start of windows to the end of the key, and their end to the front of the values.

    In the schema, they replace the stream's fields of these names. Raises ValueError if the key, a
    value or the windows' time names one of these fields, and TypeError if the windows' time is no
    timestamp. Both begin with ``where``.
    """
    for argument, names, way_out in (
        ("key", keys, "remove it, as window= adds it"),
        ("value", value, "give the value another name"),
        *(
            (f"value[{one!r}]", each.columns, "give the bolt's column another name")
            for one, each in value.items()
        ),
        ("time of window", (window.time,), "give the bolt's column another name"),
    ):
        for name in names:
            if name in (START, END):
                raise ValueError(
                    f"{where} {argument} must not name {name!r}, which is a column of the windows; "
                    f"{way_out}"
                )
    found = schema.get_all_field_indices(window.time)
    if len(found) == 1:
        kind = schema.field(found[0]).type
        if not pa.types.is_timestamp(kind):
            raise TypeError(
                f"{where} time of window must be a column of timestamps, got {window.time!r} of "
                f"{kind}; name another column, or emit a timestamp"
            )
        bound = pa.timestamp("us", kind.tz)
    else:
        bound = pa.timestamp("us")  # refused with the other columns
    others = [field for field in schema if field.name not in (START, END)]
    columns = pa.schema([*others, pa.field(START, bound), pa.field(END, bound)])
    return (*keys, START), {END: max_of(END), **value}, columns


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one array; text or bytes above 2 GiB become large_string, large_binary."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    try:
        return column.combine_chunks()
    except pa.ArrowInvalid:
        wide = pa.large_string() if pa.types.is_string(column.type) else pa.large_binary()
        return pa.concat_arrays(column.cast(wide).chunks)


# -- shapes in checkpoints, for readers without the topology --------------------------------------


def recorded(shape: TableShape) -> dict[str, Any]:
    """Return a shape as the JSON values from which `read_shape` rebuilds it."""
    kinds = {
        name: None if isinstance(each, Fold | BatchFold) else type(each).__name__
        for name, each in shape.aggregates.items()
    }
    return {
        "key": shape.key_names,
        "aggregates": kinds,
        "ttl_s": shape.ttl_s,
        **({} if shape.window is None else {"window": shape.window.structure()}),
        "stored": _text_of(shape.stored_schema),
        "rows": _text_of(shape.row_schema),
    }


def read_shape(name: str, found: Mapping[str, Any], structure: Mapping[str, Any]) -> TableShape:
    """Rebuild the shape of a table from JSON values, to read its rows.

    ``found``: the values of `recorded`. ``structure``: those of `TableShape.structure`.

    Its aggregates cannot fold rows. The class of a user's own aggregate is not in the checkpoint,
    so its value is its state: a struct if the state has several columns.
    """
    stored, rows = _schema_of(found["stored"]), _schema_of(found["rows"])
    keys = tuple(rows.field(key) for key in found["key"])
    made: dict[str, Aggregate] = {}
    for value, kind in found["aggregates"].items():
        # Not by the beginnings of their names: other values may be named "<value>.<more>".
        names, prefix = structure["aggregates"][value]["states"], f"{_STATE}{value}."
        fields = [field for field in stored if field.name in names]
        states = [field.with_name(field.name.removeprefix(prefix)) for field in fields]
        made[value] = _RecordedAggregate(kind, states, rows.field(value).type)
    window = Window.of(found["window"]) if "window" in found else None
    types = {field.name: field.type for field in keys}
    return TableShape(name, keys, made, found["ttl_s"], types, window=window)


class _RecordedAggregate(Aggregate):
    """An aggregate rebuilt from a checkpoint: it reads values, and cannot fold rows."""

    def __init__(self, kind: str | None, states: Sequence[pa.Field], value: pa.DataType) -> None:
        self._states = states
        self._finish: Any = None if kind is None else getattr(aggregates, kind).finish
        self._value = value
        if kind is None:
            self._value = states[0].type if len(states) == 1 else pa.struct(states)

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        return {field.name: field.type for field in self._states}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return self._value

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        if self._finish is not None:
            return self._finish(self, states)
        if len(states) == 1:
            return states[0]
        return pa.StructArray.from_arrays(list(states), fields=list(self._states))


def _text_of(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _schema_of(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
