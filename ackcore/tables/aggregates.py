"""Aggregates of a table: how rows of one key become one state, and states become a value.

Every aggregate is defined by three functions of columns: the states of groups of rows, the merge
of groups of states, and the value of each state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow import array_of, hash_columns, offsets_of, short_repr
from ackcore._arrow.record_batches import valid_rows
from ackcore._columns import as_count
from ackcore._records import Int64s
from ackcore.tables.key_groups import Bools, KeyGroups, plain_type


class Aggregate(ABC):
    """A value of each key that is computed from all rows of the key.

    `count`, `sum_of` and their siblings return aggregates; `Fold` and `BatchFold` are the base
    classes of your own.

    Attributes
    ----------
    columns : tuple of str
        The columns of the rows that it reads.
    """

    columns: tuple[str, ...] = ()

    @abstractmethod
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        """Return the types of the state's columns by name.

        Parameters
        ----------
        inputs : sequence of pyarrow.DataType
            The types of ``columns``.

        Raises
        ------
        TypeError
            If the aggregate cannot read these types.  The text is the part after "must be".
        """

    @abstractmethod
    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        """Return the type of the finished value."""

    @abstractmethod
    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the state of each group of rows."""

    @abstractmethod
    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the merged state of each group of states; earlier states come first."""

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        """Return the value of each state."""
        return states[0]

    def structure(self) -> dict[str, Any]:
        """Return the definition as JSON values; tables of equal definitions have equal states."""
        return {"aggregate": type(self).__name__.removeprefix("_"), "columns": list(self.columns)}


def count() -> Aggregate:
    """Return the aggregate that counts the rows of each key: an int64."""
    return _Count()


def sum_of(column: str) -> Aggregate:
    """Return the aggregate that adds the values of a column.

    Nulls are left out; the sum of nothing is null.

    Parameters
    ----------
    column : str
        A column of signed or unsigned integers up to 32 bits, of int64, floats, decimals or
        durations.

    Returns
    -------
    Aggregate
        Its value is an int64, a float64, a decimal128 of 38 digits or a duration.  A micro-batch
        in which a sum overflows ends the query with an OverflowError.
    """
    return _Sum(column)


def min_of(column: str) -> Aggregate:
    """Return the aggregate that keeps the smallest value of a column.

    Nulls are left out; NaN is larger than all numbers, as in Spark.

    Parameters
    ----------
    column : str
        A column of numbers, times, booleans, text or bytes; the value has its type.
    """
    return _Min(column)


def max_of(column: str) -> Aggregate:
    """Return the aggregate that keeps the largest value of a column.

    Nulls are left out; NaN is larger than all numbers, as in Spark.

    Parameters
    ----------
    column : str
        A column of numbers, times, booleans, text or bytes; the value has its type.
    """
    return _Max(column)


def mean_of(column: str) -> Aggregate:
    """Return the aggregate that computes the mean of a column, a float64.

    Nulls are left out; the mean of nothing is null.

    Parameters
    ----------
    column : str
        A column of integers, floats or decimals, which are added as float64.
    """
    return _Mean(column)


def first(by: str, column: str) -> Aggregate:
    """Return the aggregate that keeps a column's value in the row with the smallest ``by``.

    Of rows with equal ``by``, the one that was folded first counts.  Rows with a null ``by`` are
    left out; a null ``column`` is a value.

    Parameters
    ----------
    by : str
        A column of numbers, times, booleans, text or bytes.
    column : str
        A column of any type that a table can hold.
    """
    return _First(by, column)


def latest(by: str, column: str) -> Aggregate:
    """Return the aggregate that keeps a column's value in the row with the largest ``by``.

    Of rows with equal ``by``, the one that was folded last counts.  Rows with a null ``by`` are
    left out; a null ``column`` is a value.

    Parameters
    ----------
    by : str
        A column of numbers, times, booleans, text or bytes.
    column : str
        A column of any type that a table can hold.
    """
    return _Latest(by, column)


def collect(column: str, max_items: int) -> Aggregate:
    """Return the aggregate that keeps the first values of a column as a list.

    Nulls are left out; without values the list is empty.

    Parameters
    ----------
    column : str
        A column of any type that a table can hold.
    max_items : int
        The maximum length of a list.  Values beyond it are dropped.
    """
    return _Collect(column, as_count(max_items, "max_items", 1, 2**31 - 1))


def approx_distinct(column: str) -> Aggregate:
    """Return the aggregate that estimates how many distinct values a column has: an int64.

    Nulls are left out.  It uses a HyperLogLog sketch of the library ``datasketches`` with a
    standard error of 1.6 %; up to a few hundred values the count is nearly exact.  A state has
    8 bytes a value for few values and about 2 KiB for many.

    Parameters
    ----------
    column : str
        A column of any type that can be a key.

    Raises
    ------
    ImportError
        If ``datasketches`` is not installed.
    """
    try:
        import datasketches  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError(
            "approx_distinct needs the library datasketches, which is not installed; "
            "pip install 'ackcore[tables]'"
        ) from error
    return _ApproxDistinct(column)


class _OfColumns(Aggregate):
    """An aggregate of named columns whose rows are states of one row."""

    def __init__(self, *columns: str) -> None:
        for column in columns:
            if not isinstance(column, str):
                raise TypeError(f"column must be a column's name, got {short_repr(column)}")
        self.columns = columns

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return self.combine(columns, groups)


class _Count(_OfColumns):
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        return {"count": pa.int64()}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return pa.int64()

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [pa.array(groups.sizes)]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [_sums(states[0], groups, "count")]


class _Sum(_OfColumns):
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        return {"sum": self.value_type(inputs)}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        (kind,) = inputs
        if pa.types.is_decimal(kind) and kind.bit_width <= 128:
            return pa.decimal128(38, kind.scale)
        if pa.types.is_integer(kind) and kind != pa.uint64():
            return pa.int64()
        if pa.types.is_floating(kind):
            return pa.float64()
        if pa.types.is_duration(kind):
            return kind
        raise TypeError("a column of int64, smaller integers, floats, decimals or durations")

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return self.combine([columns[0].cast(self.value_type([columns[0].type]))], groups)

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [_sums(states[0], groups, self.columns[0])]


class _Mean(_OfColumns):
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        (kind,) = inputs
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return {"sum": pa.float64(), "count": pa.int64()}
        raise TypeError("a column of integers, floats or decimals")

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return pa.float64()

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        counts = pc.is_valid(columns[0]).cast(pa.int64())
        return self.combine([columns[0].cast(pa.float64(), safe=False), counts], groups)

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [_sums(state, groups, self.columns[0]) for state in states]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return pc.divide(states[0], states[1].cast(pa.float64(), safe=False))


class _Extreme(_OfColumns):
    """The value of a column in the row of each key that is first in the order of a column."""

    largest: bool
    last: bool

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        if not _has_order(inputs[0]):
            raise TypeError("a column of numbers, times, booleans, text or bytes")
        return dict(zip(("by", "value"), inputs, strict=False))

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return inputs[-1]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        rows = _extreme_rows(states[0], groups, self.largest, self.last)
        return [state.take(rows) for state in states]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[-1]


class _Min(_Extreme):
    largest, last = False, False


class _Max(_Extreme):
    largest, last = True, False


class _First(_Extreme):
    largest, last = False, False


class _Latest(_Extreme):
    largest, last = True, True


class _Collect(_OfColumns):
    def __init__(self, column: str, max_items: int) -> None:
        super().__init__(column)
        self.max_items = max_items

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        return {"items": pa.list_(inputs[0])}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return pa.list_(inputs[0])

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [self._lists(columns[0], _valid(columns[0])[groups.order], groups.order, groups)]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        lists = states[0].take(pa.array(groups.order))
        offsets = lists.offsets.to_numpy().astype(np.int64)
        sizes = np.diff(offsets)
        of_items = KeyGroups(np.arange(offsets[0], offsets[-1]), offsets_of(sizes)[groups.starts])
        items = of_items.order
        return [self._lists(lists.values, np.ones(len(items), np.bool_), items, of_items)]

    def _lists(self, values: pa.Array, wanted: Bools, order: Int64s, groups: KeyGroups) -> pa.Array:
        """Return the first wanted values of each group as a list."""
        before = offsets_of(wanted)
        of_row = np.repeat(np.arange(len(groups)), groups.sizes)
        number = before[:-1] - before[groups.starts[:-1]][of_row]
        kept = wanted & (number < self.max_items)
        offsets = offsets_of(kept)[groups.starts]
        return pa.ListArray.from_arrays(
            pa.array(offsets, pa.int32()), values.take(pa.array(order[kept]))
        )

    def structure(self) -> dict[str, Any]:
        return {**super().structure(), "max_items": self.max_items}


class _ApproxDistinct(_OfColumns):
    #: The base-2 logarithm of the number of registers.
    REGISTERS = 12

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        try:
            hash_columns([pa.array([], inputs[0])], 0)
        except TypeError:
            raise TypeError("a column that can be hashed, without maps and unions") from None
        return {"sketch": pa.binary()}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return pa.int64()

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        from datasketches import hll_sketch  # noqa: PLC0415

        wanted = _valid(columns[0])[groups.order]
        hashes = hash_columns(columns, len(columns[0]))[groups.order]
        sketches = []
        for start, stop in zip(groups.starts[:-1], groups.starts[1:], strict=True):
            sketch = hll_sketch(self.REGISTERS)
            for value in hashes[start:stop][wanted[start:stop]].tolist():
                sketch.update(value)
            sketches.append(sketch.serialize_compact())
        return [pa.array(sketches, pa.binary())]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        from datasketches import hll_sketch, hll_union  # noqa: PLC0415

        ordered = states[0].take(pa.array(groups.order)).to_pylist()
        sketches = []
        for start, stop in zip(groups.starts[:-1], groups.starts[1:], strict=True):
            present = [state for state in ordered[start:stop] if state is not None]
            if len(present) > 1:
                union = hll_union(self.REGISTERS)
                for state in present:
                    union.update(hll_sketch.deserialize(state))
                present = [union.get_result().serialize_compact()]
            sketches.append(present[0] if present else None)
        return [pa.array(sketches, pa.binary())]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        from datasketches import hll_sketch  # noqa: PLC0415

        return pa.array(
            [
                None if state is None else round(hll_sketch.deserialize(state).get_estimate())
                for state in states[0].to_pylist()
            ],
            pa.int64(),
        )


class BatchFold(Aggregate):
    """Base class of your own aggregates that are computed in columns.

    Set ``columns``, ``state`` and implement `fold` and `merge`; `finish` if the value is not the
    only column of the state.  Both must be deterministic and must not change their arguments.

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
        """Return the state of each key.

        Parameters
        ----------
        rows : pyarrow.RecordBatch
            The rows with ``columns``, ordered by key; rows of a key are in the order of the files.
        starts : numpy.ndarray of int64, shape (keys + 1,)
            The first row of each key, and the number of rows.  Each key has at least one row.

        Returns
        -------
        pyarrow.RecordBatch
            One row per key with the schema ``state``.
        """

    @abstractmethod
    def merge(self, earlier: pa.RecordBatch, later: pa.RecordBatch) -> pa.RecordBatch:
        """Return the states of rows of which some were folded earlier and some later.

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
        """Return the types of the state."""
        state = getattr(self, "state", None)
        if not isinstance(state, pa.Schema) or not 0 < len(state) == len(set(state.names)):
            raise TypeError(
                "an aggregate whose attribute state is a pyarrow.Schema with columns of different "
                "names"
            )
        return {field.name: field.type for field in self.state}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        """Return the type of the value."""
        value = self.finish([pa.array([], field.type) for field in self.state])
        if not isinstance(value, pa.Array) or pa.types.is_null(value.type):
            raise TypeError(
                "an aggregate whose method finish returns a pyarrow.Array with the type of the "
                f"values, also for no states (for these it returned {short_repr(value)})"
            )
        return plain_type(value.type)

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the state of each group of rows."""
        rows = pa.RecordBatch.from_arrays(list(columns), names=list(self.columns))
        if not self.columns:
            rows = pa.RecordBatch.from_struct_array(
                pa.array([{}] * len(groups.order), pa.struct([]))
            )
        ordered = rows.take(pa.array(groups.order)) if self.columns else rows
        starts = groups.starts.view()
        # A fold that changed them would change other aggregates.
        starts.flags.writeable = False
        return self._checked(self.fold(ordered, starts), "fold", len(groups))

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the merged state of each group of states."""
        present = np.logical_or.reduce([_valid(state) for state in states])
        rows, starts, remains = groups.among(present)
        groups_of = KeyGroups(rows, np.append(starts, len(rows)))
        merged = _pairwise(states, groups_of, self._merged)
        return merged if remains is None else [_spread(state, remains) for state in merged]

    def _merged(self, earlier: list[pa.Array], later: list[pa.Array]) -> list[pa.Array]:
        pair = (
            pa.RecordBatch.from_arrays(each, names=self.state.names) for each in (earlier, later)
        )
        return self._checked(self.merge(*pair), "merge", len(earlier[0]))

    def _checked(self, states: pa.RecordBatch, method: str, n: int) -> list[pa.Array]:
        where = f"{type(self).__name__}.{method} must return"
        if not isinstance(states, pa.RecordBatch):
            raise TypeError(f"{where} a pyarrow.RecordBatch, got {type(states).__name__}")
        if states.num_rows != n:
            raise ValueError(f"{where} {n} rows, one per key, got {states.num_rows}")
        if states.schema.names != self.state.names or states.schema.types != self.state.types:
            raise TypeError(
                f"{where} the columns {_described(self.state)}, got {_described(states.schema)}"
            )
        return list(states.columns)

    def structure(self) -> dict[str, Any]:
        """Return the definition with the name of the class."""
        return {**super().structure(), "class": type(self).__qualname__}


class Fold(Aggregate):
    """Base class of your own aggregates that are computed row by row, as Python values.

    Set ``columns`` and ``type``, and implement `empty`, `fold` and `merge`.  They must be
    deterministic and must not change a value that they did not make.  None, the null of the
    column, stands for the empty value: `merge` gets `empty()` in its place.

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
        """Return the value before the first row."""

    @abstractmethod
    def fold(self, value: Any, row: dict[str, Any]) -> Any:
        """Return the value after one more row."""

    @abstractmethod
    def merge(self, earlier: Any, later: Any) -> Any:
        """Return the value of rows of which some were folded earlier and some later."""

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        """Return the types of the state."""
        if not isinstance(getattr(self, "type", None), pa.DataType):
            raise TypeError("an aggregate whose attribute type is a pyarrow.DataType")
        return {"value": self.type}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        """Return the type of the value."""
        return self.type

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the state of each group of rows."""
        lists = [column.take(pa.array(groups.order)).to_pylist() for column in columns]
        values = []
        for start, stop in zip(
            groups.starts[:-1].tolist(), groups.starts[1:].tolist(), strict=True
        ):
            value = self.empty()
            for row in range(start, stop):
                items = {name: items[row] for name, items in zip(self.columns, lists, strict=True)}
                value = self.fold(value, items)
            values.append(value)
        return [self._column(values, "fold")]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the merged state of each group of states."""
        return _pairwise(states, groups, self._merged)

    def _merged(self, earlier: list[pa.Array], later: list[pa.Array]) -> list[pa.Array]:
        values = ([self._value(one) for one in each[0].to_pylist()] for each in (earlier, later))
        return [self._column([self.merge(*pair) for pair in zip(*values, strict=True)], "merge")]

    def _value(self, stored: Any) -> Any:
        return self.empty() if stored is None else stored

    def _column(self, values: list[Any], method: str) -> pa.Array:
        try:
            column = array_of(values, self.type)
        except ValueError as error:
            raise ValueError(
                f"{type(self).__name__}.{method} must return values of {self.type}: {error}"
            ) from error
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

    def structure(self) -> dict[str, Any]:
        """Return the definition with the name of the class."""
        return {**super().structure(), "class": type(self).__qualname__}


def _pairwise(states: Sequence[pa.Array], groups: KeyGroups, merge: Any) -> list[pa.Array]:
    """Merge groups of states, one more state of each group at a time."""
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


def _valid(column: pa.Array) -> Bools:
    valid = valid_rows(column)
    if pa.types.is_null(column.type):
        return np.zeros(len(column), np.bool_)
    return np.ones(len(column), np.bool_) if valid is None else valid != 0


def _nullable(values: Any, remains: Bools | None, kind: pa.DataType) -> pa.Array:
    """Return one value per group; null for a group without any."""
    column = pa.array(values, kind)
    return column if remains is None else _spread(column, remains)


def _spread(column: pa.Array, remains: Bools) -> pa.Array:
    """Return the values for the groups that remain, and null for the others."""
    return column.take(pa.array(np.cumsum(remains) - 1, mask=~remains))


def _sums(column: pa.Array, groups: KeyGroups, name: str) -> pa.Array:
    """Add the values of each group, without nulls."""
    kind = column.type
    if not len(groups):
        return pa.array([], kind)
    rows, starts, remains = groups.among(None if not column.null_count else _valid(column))
    if not len(starts):
        return pa.nulls(len(groups), kind)
    if pa.types.is_floating(kind):
        values = column.to_numpy(zero_copy_only=False)[rows]
        with np.errstate(invalid="ignore", over="ignore"):
            return _nullable(np.add.reduceat(values, starts), remains, kind)
    words = kind.bit_width // 64
    numbers = np.frombuffer(
        column.buffers()[1], np.int64, len(column) * words, column.offset * 8 * words
    ).reshape(-1, words)
    if words == 1:
        values = numbers[rows, 0]
        largest = max(-int(values.min()), int(values.max()))
        longest = int(np.diff(np.append(starts, len(rows))).max())
        if largest * longest < 2**63:
            sums = pa.array(np.add.reduceat(values, starts)).cast(kind)
            return _nullable(sums, remains, kind)
    exact = _exact_sums(numbers[rows], starts)
    limit = 2**63 if words == 1 else 10**kind.precision
    lowest = -limit if words == 1 else 1 - limit
    wrong = [total for total in exact if not lowest <= total < limit]
    if wrong:
        raise OverflowError(
            f"the sum of column {name!r} must fit {kind}, got {wrong[0]}; use a column of "
            "decimals or floats"
        )
    if words == 1:
        return _nullable(pa.array(exact, pa.int64()).cast(kind), remains, kind)
    raw = b"".join(total.to_bytes(16, "little", signed=True) for total in exact)
    column = pa.Array.from_buffers(kind, len(exact), [None, pa.py_buffer(raw)])
    return _nullable(column, remains, kind)


def _exact_sums(numbers: Any, starts: Int64s) -> list[int]:
    """Add integers of one or two 64-bit words exactly."""
    totals = [0] * len(starts)
    words = numbers.shape[1]
    for word in range(words):
        for half in range(2):
            part = numbers[:, word] >> 32 if half else numbers[:, word] & 0xFFFFFFFF
            if half and word < words - 1:
                part = part & 0xFFFFFFFF
            shift = 64 * word + 32 * half
            for group, total in enumerate(np.add.reduceat(part, starts).tolist()):
                totals[group] += total << shift
    return totals


def _has_order(kind: pa.DataType) -> bool:
    """Return whether values of a type have an order."""
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
        or (types.is_temporal(kind) and not types.is_interval(kind))
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    )


def _ordinals(column: pa.Array) -> Int64s:
    """Return integers in the order of a column's values; arbitrary where it is null."""
    kind, n = column.type, len(column)
    types = pa.types
    if types.is_floating(kind):
        width = kind.bit_width // 8
        floats = np.frombuffer(column.buffers()[1], f"f{width}", n, column.offset * width)
        floats = floats.astype(np.float64) + 0.0
        floats[np.isnan(floats)] = np.nan
        order: Int64s = floats.view(np.int64)
        order ^= (order >> 63) & 0x7FFFFFFFFFFFFFFF
        return order
    narrow_decimal = types.is_decimal(kind) and kind.bit_width <= 64
    if narrow_decimal or (
        (types.is_integer(kind) or types.is_temporal(kind)) and kind != pa.uint64()
    ):
        width = kind.bit_width // 8
        sign = "u" if types.is_unsigned_integer(kind) else "i"
        numbers = np.frombuffer(column.buffers()[1], f"{sign}{width}", n, column.offset * width)
        return numbers.astype(np.int64)
    ranks = pc.rank(column, sort_keys="ascending", tiebreaker="dense")
    ordinals: Int64s = ranks.to_numpy(zero_copy_only=False).astype(np.int64)
    return ordinals


def _extreme_rows(by: pa.Array, groups: KeyGroups, largest: bool, last: bool) -> pa.Array:
    """Return the row of each group with the smallest or largest value; null without any value."""
    if not len(groups):
        return pa.array([], pa.int64())
    rows, starts, remains = groups.among(_valid(by) if by.null_count else None)
    if not len(starts):
        return pa.nulls(len(groups), pa.int64())
    ordinals = _ordinals(by)[rows]
    if largest:
        np.invert(ordinals, out=ordinals)
    best = np.minimum.reduceat(ordinals, starts)
    sizes = np.diff(np.append(starts, len(rows)))
    places = np.flatnonzero(ordinals == np.repeat(best, sizes))
    # The first or the last of the best places of each group.
    if last:
        found = places[np.searchsorted(places, starts + sizes) - 1]
    else:
        found = places[np.searchsorted(places, starts)]
    return _nullable(rows[found], remains, pa.int64())
