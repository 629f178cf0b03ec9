"""The base classes of users' own aggregates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from ackcore._arrow.lossless import array_of, short_repr
from ackcore._error_hints import counted
from ackcore._records import Int64s
from ackcore.tables.aggregates import Aggregate
from ackcore.tables.group_values import with_nulls
from ackcore.tables.key_groups import KeyGroups, plain_type, valid_of


class BatchFold(Aggregate):
    """Base class of your own aggregates that are computed in columns.

    Set ``columns`` and ``state``, and implement `fold` and `merge`.  Implement `finish` too, unless
    the state has one column and this is the value.  All of them must be deterministic and must not
    change their arguments.  A state whose columns are all null counts as no state: `merge` does not
    get it, and the other state stays.  If null is a value, add a column that is never null, such as
    the number of rows, and implement `finish`.  If a method raises, the micro-batch is folded
    again, up to ``max_sink_attempts`` times in all; then the query ends with ``SinkError``.

    Attributes
    ----------
    columns : tuple of str
        The columns of the rows that `fold` gets.
    state : pyarrow.Schema
        The columns of a state.
    """

    state: pa.Schema

    @abstractmethod
    def fold(self, rows: pa.RecordBatch, starts: Int64s) -> pa.RecordBatch:
        """Return the state of each key after these rows; `merge` joins it with other states.

        Parameters
        ----------
        rows : pyarrow.RecordBatch
            A part of a micro-batch's rows, with ``columns``: all of the first key, then all of the
            next. Rows of a key are in the order of the micro-batch's files. There may be no rows.
        starts : numpy.ndarray of int64, shape (keys + 1,)
            The first row of each key, and at the end the number of rows.  Each key has a row.

        Returns
        -------
        pyarrow.RecordBatch
            One row per key with the schema ``state``.
        """

    @abstractmethod
    def merge(self, earlier: pa.RecordBatch, later: pa.RecordBatch) -> pa.RecordBatch:
        """Merge two states of each key: of rows that were folded earlier, and of later ones.

        A state with only nulls is never passed.

        Parameters
        ----------
        earlier, later : pyarrow.RecordBatch
            States with the schema ``state``; row *i* of both is of the same key.

        Returns
        -------
        pyarrow.RecordBatch
            The merged states in the same order.
        """

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        """Return the types of the columns of ``state``, by name.

        Raises TypeError unless it is a schema of at least one column, all with different names.
        """
        state = getattr(self, "state", None)
        if not isinstance(state, pa.Schema) or not 0 < len(state) == len(set(state.names)):
            raise TypeError(
                "must be an aggregate whose attribute state is a pyarrow.Schema with at least one "
                f"column, and columns of different names, got {short_repr(state) or 'no column'}"
            )
        return {field.name: field.type for field in self.state}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        """Return the type that `finish` returns for no states; raise TypeError if it has none."""
        value = self.finish([pa.array([], field.type) for field in self.state])
        if not isinstance(value, pa.Array) or pa.types.is_null(value.type):
            raise TypeError(
                "must be an aggregate whose method finish returns a pyarrow.Array with the type of "
                f"the values even for no states, got {short_repr(value)}"
            )
        try:
            return plain_type(value.type)
        except pa.ArrowNotImplementedError as error:
            raise TypeError(
                f"must be an aggregate whose method finish returns values that can be stored, got "
                f"{value.type} ({error}); cast them"
            ) from error

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Sort the rows by key, call `fold` once, and return its checked states."""
        order = pa.array(groups.order)
        ordered = [column.take(order) for column in columns]
        rows = pa.RecordBatch.from_arrays(ordered, names=list(self.columns))
        if not columns:
            rows = pa.RecordBatch.from_struct_array(pa.array([{}] * len(order), pa.struct([])))
        starts = groups.starts.view()
        # A fold that changed them would change other aggregates.
        starts.flags.writeable = False
        return self._checked(self.fold(rows, starts), "fold", len(groups))

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Call `merge` until each key has one state; null if the key has only null states."""
        present = np.logical_or.reduce([valid_of(state) for state in states])
        rows, starts, kept = groups.only(present)
        groups_of = KeyGroups(rows, np.append(starts, len(rows)))
        merged = _pairwise(states, groups_of, self._merged)
        return [with_nulls(state, kept) for state in merged]

    def _merged(self, earlier: list[pa.Array], later: list[pa.Array]) -> list[pa.Array]:
        pair = (
            pa.RecordBatch.from_arrays(each, names=self.state.names) for each in (earlier, later)
        )
        return self._checked(self.merge(*pair), "merge", len(earlier[0]))

    def _checked(self, states: pa.RecordBatch, method: str, n: int) -> list[pa.Array]:
        called = f"{type(self).__name__}.{method}"
        if not isinstance(states, pa.RecordBatch):
            raise TypeError(f"{called} must return a RecordBatch, got {type(states).__name__}")
        if states.num_rows != n:
            raise ValueError(
                f"{called} must return {counted(n, 'row')}, one per key, got {states.num_rows}"
            )
        if states.schema.names != self.state.names or states.schema.types != self.state.types:
            raise TypeError(
                f"{called} must return the columns {_described(self.state)}, got "
                f"{_described(states.schema)}"
            )
        return list(states.columns)


class Fold(Aggregate):
    """Base class of your own aggregates that are computed row by row, as Python values.

    Set ``columns`` and ``type``, and implement `empty`, `fold` and `merge`.  They must be
    deterministic and must not change their arguments; but `fold` may change its value if `empty`
    returns a new object each time.  A value None is stored as null, and `merge` gets `empty()` in
    its place.  If a method raises, the micro-batch is folded again, up to ``max_sink_attempts``
    times in all; then the query ends with ``SinkError``.

    Attributes
    ----------
    columns : tuple of str
        The columns of the rows that `fold` gets.
    type : pyarrow.DataType
        The Arrow type of the value.
    """

    type: pa.DataType

    @abstractmethod
    def empty(self) -> Any:
        """Return the value of a key before its first row."""

    @abstractmethod
    def fold(self, value: Any, row: dict[str, Any]) -> Any:
        """Return the value after one more row of the key, a dict of ``columns``."""

    @abstractmethod
    def merge(self, earlier: Any, later: Any) -> Any:
        """Return the merged value of two of a key: of rows folded earlier, and of later rows."""

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        """Return ``type`` for the only stored column, ``value``.

        Raises TypeError unless ``type`` is a pyarrow.DataType.
        """
        declared = getattr(self, "type", None)
        if not isinstance(declared, pa.DataType):
            raise TypeError(
                "must be an aggregate whose attribute type is a pyarrow.DataType, "
                f"got {short_repr(declared)}"
            )
        return {"value": self.type}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        """Return ``type``."""
        return self.type

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the value of each key: `empty()`, passed through `fold` with each of its rows."""
        lists = [column.take(pa.array(groups.order)).to_pylist() for column in columns]
        values = []
        for start, stop in pairwise(groups.starts.tolist()):
            value = self.empty()
            for row in range(start, stop):
                items = {name: items[row] for name, items in zip(self.columns, lists, strict=True)}
                value = self.fold(value, items)
            values.append(value)
        return [self._column(values, "fold")]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Call `merge` until each key has one state; a null is passed as `empty()`."""
        return _pairwise(states, groups, self._merged)

    def _merged(self, earlier: list[pa.Array], later: list[pa.Array]) -> list[pa.Array]:
        values = (
            [self.empty() if one is None else one for one in each[0].to_pylist()]
            for each in (earlier, later)
        )
        return [self._column([self.merge(*pair) for pair in zip(*values, strict=True)], "merge")]

    def _column(self, values: list[Any], method: str) -> pa.Array:
        try:
            column = array_of(values, self.type)
        except ValueError as error:
            raise ValueError(
                f"{type(self).__name__}.{method} must return values of {self.type}: {error}"
            ) from error
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _pairwise(states: Sequence[pa.Array], groups: KeyGroups, merge: Any) -> list[pa.Array]:
    """Merge the states of each group by calls of ``merge``, each for many groups.

    The first call gets the first two states of the groups, the next one the results and the third
    states, and so on.
    """
    merged = [state.take(pa.array(groups.firsts)) for state in states]
    sizes = groups.sizes
    for number in range(1, int(sizes.max(initial=1))):
        rows = np.flatnonzero(sizes > number)
        later = pa.array(groups.order[groups.starts[rows] + number])
        newer = merge(
            [state.take(pa.array(rows)) for state in merged], [s.take(later) for s in states]
        )
        # Row i of the group states is replaced by the row of its merged state.
        places = np.arange(len(groups))
        places[rows] = len(groups) + np.arange(len(rows))
        merged = [
            pa.concat_arrays([old, new]).take(pa.array(places))
            for old, new in zip(merged, newer, strict=True)
        ]
    return merged


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
