"""Shapes of tables as a checkpoint records them, for readers without the topology."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ackcore.tables import aggregates
from ackcore.tables.aggregates import Aggregate
from ackcore.tables.own_folds import BatchFold, Fold
from ackcore.tables.table_shape import TableShape
from ackcore.tables.time_windows import Window


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


def read_shape(name: str, found: Mapping[str, Any]) -> TableShape:
    """Rebuild the shape of a table from the JSON values of `recorded`, to read its rows.

    Its aggregates cannot fold rows. The class of a user's own aggregate is not in the checkpoint,
    so its value is its state: a struct if the state has several columns.
    """
    stored, rows = _schema_of(found["stored"]), _schema_of(found["rows"])
    keys = tuple(rows.field(key) for key in found["key"])
    made: dict[str, Aggregate] = {}
    at = 1 + len(keys)  # behind the hash and the key
    for value, kind in found["aggregates"].items():
        prefix = f"_state.{value}."
        states = []
        while at < len(stored) and stored.field(at).name.startswith(prefix):
            field = stored.field(at)
            states.append(field.with_name(field.name.removeprefix(prefix)))
            at += 1
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
