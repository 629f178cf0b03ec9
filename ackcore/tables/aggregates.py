"""Aggregates of a table: how rows of one key become one state, and states become a value.

Every aggregate is defined by three functions of columns: the states of groups of rows, the merge
of groups of states, and the value of each state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackcore._arrow.hashing import hash_columns
from ackcore._arrow.lossless import short_repr
from ackcore._arrow.record_batches import offsets_of
from ackcore._columns import as_count
from ackcore._error_hints import naming_arguments, naming_extra
from ackcore._records import Bools, Int64s
from ackcore.tables.group_values import extreme_rows, has_order, sums_of
from ackcore.tables.key_groups import KeyGroups, valid_of

#: The function that makes an aggregate, by the class.
MADE_BY = {
    "_Count": "count",
    "_Sum": "sum_of",
    "_Min": "min_of",
    "_Max": "max_of",
    "_Mean": "mean_of",
    "_First": "first",
    "_Latest": "latest",
    "_Collect": "collect",
    "_ApproxDistinct": "approx_distinct",
}


class Aggregate(ABC):
    """A computation of one value per key from all rows of the key.

    `count`, `sum_of` and their siblings return aggregates; `Fold` and `BatchFold` are the base
    classes of your own.

    Attributes
    ----------
    columns : tuple of str
        The columns of the rows that it reads.
    """

    columns: tuple[str, ...] = ()

    def __repr__(self) -> str:
        name = MADE_BY.get(type(self).__name__, type(self).__name__)
        return f"{name}({', '.join(self.columns)})"

    @abstractmethod
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        """Return the types of the columns that are stored for each key, by name.

        ``inputs``: the types of ``columns``. Raises TypeError if the aggregate cannot read them, or
        its own attributes are wrong; `TableShape.of` writes the argument before the message.
        """

    @abstractmethod
    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        """Return the type of the values that `finish` returns, given the types of ``columns``."""

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Return the states of the keys: the columns of `state_types`, with one row per key.

        ``columns``: of the rows to fold, the columns that it reads. ``groups``: the rows of each
        key.
        """
        raise NotImplementedError

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        """Merge the states of each key into one; return columns like ``states``, one row per key.

        ``states``: the columns of `state_types`, with several rows of a key: those that were folded
        earlier come first. ``groups``: the rows of each key.
        """
        raise NotImplementedError

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        """Return a column with the value of each state.

        ``states``: the columns of the states. By default the first of them is returned.
        """
        return states[0]

    def structure(self) -> dict[str, Any]:
        """Return the definition as JSON values; with equal definitions, states are stored alike."""
        name, own = type(self).__name__, not isinstance(self, _OfColumns)
        found = {"aggregate": name.removeprefix("_"), "columns": list(self.columns)}
        return {**found, "class": type(self).__qualname__} if own else found


@naming_arguments
def count() -> Aggregate:
    """Return the aggregate that counts the rows of each key: an int64."""
    return _Count()


@naming_arguments
def sum_of(column: str) -> Aggregate:
    """Return the aggregate that adds the values of a column.

    Nulls are left out; the sum is null if a key has only nulls.

    Parameters
    ----------
    column : str
        A column of signed or unsigned integers up to 32 bits, of int64, floats, decimals or
        durations.

    Returns
    -------
    Aggregate
        Its value is an int64, a float64, a decimal128 of 38 digits or a duration.  If a sum other
        than of floats overflows, the query ends with ``SinkError``, as does each later start.
    """
    return _Sum(column)


@naming_arguments
def min_of(column: str) -> Aggregate:
    """Return the aggregate that keeps the smallest value of a column.

    Nulls are left out; with only nulls the value is null. NaN is larger than numbers, as in Spark.

    Parameters
    ----------
    column : str
        A column of numbers, times, booleans, text or bytes; the value has its type.
    """
    return _Min(column)


@naming_arguments
def max_of(column: str) -> Aggregate:
    """Return the aggregate that keeps the largest value of a column.

    Nulls are left out; with only nulls the value is null. NaN is larger than numbers, as in Spark.

    Parameters
    ----------
    column : str
        A column of numbers, times, booleans, text or bytes; the value has its type.
    """
    return _Max(column)


@naming_arguments
def mean_of(column: str) -> Aggregate:
    """Return the aggregate that computes the mean of a column, a float64.

    Nulls are left out; the mean is null if a key has only nulls.

    Parameters
    ----------
    column : str
        A column of integers, floats or decimals, which are added as float64.
    """
    return _Mean(column)


@naming_arguments
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


@naming_arguments
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


@naming_arguments
def collect(column: str, max_items: int) -> Aggregate:
    """Return the aggregate that keeps the values of a column that were folded first, as a list.

    The order of folding need not be that of the source. Nulls are left out; the list is empty if a
    key has only nulls.

    Parameters
    ----------
    column : str
        A column of any type that a table can hold.
    max_items : int
        The maximum length of a list.  Values beyond it are dropped.
    """
    return _Collect(column, as_count(max_items, "max_items of collect()", 1, 2**31 - 1))


@naming_arguments
def approx_distinct(column: str) -> Aggregate:
    """Return the aggregate that estimates how many distinct values a column has: an int64.

    Nulls are left out; the estimate is 0 if a key has only nulls.  It uses a HyperLogLog sketch of
    the library ``datasketches`` with a standard error of 1.6 %; up to a few hundred values the
    count is nearly exact.  A state has about 4 bytes a value for few values, and 2 to 4 KiB for
    many.

    Parameters
    ----------
    column : str
        A column of any type that can be a key.

    Raises
    ------
    ImportError
        If ``datasketches`` is not installed.
    """
    with naming_extra("approx_distinct()", "datasketches", "tables"):
        import datasketches  # noqa: F401, PLC0415
    return _ApproxDistinct(column)


class _OfColumns(Aggregate):
    """The base of ackcore's aggregates.

    By default the state of one row is its input columns, and the value is the state's last column.
    """

    def __init__(self, *columns: str) -> None:
        arguments = ("by", "column")[2 - len(columns) :]
        for argument, column in zip(arguments, columns, strict=True):
            if not isinstance(column, str):
                raise TypeError(
                    f"{argument} of {MADE_BY[type(self).__name__]}() must be the name of a column, "
                    f"got {short_repr(column)}; write {argument}='euros', for example"
                )
        self.columns = columns

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return [*self.state_types(inputs).values()][-1]

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return self.combine(columns, groups)

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return states[-1]


class _Count(_OfColumns):
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        return {"count": pa.int64()}

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [pa.array(groups.sizes)]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [sums_of(states[0], groups, "count")]


class _Sum(_OfColumns):
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        (kind,) = inputs
        if pa.types.is_decimal(kind) and kind.bit_width <= 128:
            return {"sum": pa.decimal128(38, kind.scale)}
        if pa.types.is_integer(kind) and kind != pa.uint64():
            return {"sum": pa.int64()}
        if pa.types.is_floating(kind):
            return {"sum": pa.float64()}
        if pa.types.is_duration(kind):
            return {"sum": kind}
        raise TypeError(
            "must read a column of int64, smaller integers, floats, decimals or durations"
        )

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return self.combine([columns[0].cast(self.value_type([columns[0].type]))], groups)

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [sums_of(states[0], groups, self.columns[0])]


class _Mean(_OfColumns):
    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        (kind,) = inputs
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return {"sum": pa.float64(), "count": pa.int64()}
        raise TypeError("must read a column of integers, floats or decimals")

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return pa.float64()

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        counts = pc.is_valid(columns[0]).cast(pa.int64())
        return self.combine([columns[0].cast(pa.float64(), safe=False), counts], groups)

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [sums_of(state, groups, self.columns[0]) for state in states]

    def finish(self, states: Sequence[pa.Array]) -> pa.Array:
        return pc.divide(states[0], states[1].cast(pa.float64(), safe=False))


class _Extreme(_OfColumns):
    """The base of min, max, first and latest: they choose one row per key, by its first column."""

    largest: bool  # whether the row with the largest value is chosen, not with the smallest
    last: bool  # whether the last of rows with equal values counts, not the first

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        if not has_order(inputs[0]):
            raise TypeError("must read a column of numbers, times, booleans, text or bytes")
        return dict(zip(("by", "value"), inputs, strict=False))

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        rows = extreme_rows(states[0], groups, self.largest, self.last)
        return [state.take(rows) for state in states]


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

    def __repr__(self) -> str:
        return f"collect({self.columns[0]}, {self.max_items})"

    def state_types(self, inputs: Sequence[pa.DataType]) -> Mapping[str, pa.DataType]:
        return {"items": pa.list_(inputs[0])}

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        return [self._lists(columns[0], valid_of(columns[0])[groups.order], groups.order, groups)]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        lists = states[0].take(pa.array(groups.order))
        offsets = lists.offsets.to_numpy().astype(np.int64)
        sizes = np.diff(offsets)
        of_items = KeyGroups(np.arange(offsets[0], offsets[-1]), offsets_of(sizes)[groups.starts])
        items = of_items.order
        return [self._lists(lists.values, np.ones(len(items), np.bool_), items, of_items)]

    def _lists(self, values: pa.Array, wanted: Bools, order: Int64s, groups: KeyGroups) -> pa.Array:
        """Return one list per group: its first ``max_items`` wanted values.

        ``order``: indexes in ``values``, those of one group after those of the other. ``wanted``:
        for each index, whether its value is wanted.
        """
        before = offsets_of(wanted)
        number = before[:-1] - before[groups.starts[:-1]][groups.numbers]
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
            raise TypeError(
                "must read a column without maps and unions, as it hashes the values"
            ) from None
        return {"sketch": pa.binary()}

    def value_type(self, inputs: Sequence[pa.DataType]) -> pa.DataType:
        return pa.int64()

    def partial(self, columns: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        from datasketches import hll_sketch  # noqa: PLC0415

        wanted = valid_of(columns[0])[groups.order]
        hashes = hash_columns(columns, len(columns[0]))[groups.order]
        sketches = []
        for start, stop in pairwise(groups.starts):
            sketch = hll_sketch(self.REGISTERS)
            for value in hashes[start:stop][wanted[start:stop]].tolist():
                sketch.update(value)
            sketches.append(sketch.serialize_compact())
        return [pa.array(sketches, pa.binary())]

    def combine(self, states: Sequence[pa.Array], groups: KeyGroups) -> list[pa.Array]:
        from datasketches import hll_sketch, hll_union  # noqa: PLC0415

        ordered = states[0].take(pa.array(groups.order)).to_pylist()
        sketches = []
        for start, stop in pairwise(groups.starts):
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
