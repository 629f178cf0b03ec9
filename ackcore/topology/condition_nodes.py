"""Conditions as trees of Arrow calls, which tasks evaluate with the results of Spark SQL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: A column or a single value.
Values = Any

#: Arrow's functions, by operator of Spark.
_FUNCTIONS = {
    "=": "equal",
    "<>": "not_equal",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
}


@dataclass(frozen=True)
class Node:
    """A part of a condition, which Arrow evaluates for a batch: the base class of all parts."""

    type: pa.DataType | None  # the type of its values; None if conditions cannot compare it

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return a column of values, one per row of ``batch``, or a scalar for all rows.

        With ``alone`` the batch has one row. Parts that Spark does not evaluate for this row are
        skipped, such as the second operand of an AND whose first operand is false. Raises the error
        of Arrow, for an overflow or a division by zero.
        """
        raise NotImplementedError

    def columns(self) -> Iterator[str]:
        """Yield the names of the columns that this part uses, perhaps several times."""
        for value in vars(self).values():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, Node):
                    yield from each.columns()


@dataclass(frozen=True)
class ColumnNode(Node):
    """A column of the batch, by its name."""

    name: str

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return the column of the batch, cast to ``type`` unless that is None."""
        values = batch.column(self.name)
        return values if self.type in (None, values.type) else values.cast(self.type)

    def columns(self) -> Iterator[str]:
        """Yield the name of this column."""
        yield self.name


@dataclass(frozen=True)
class LiteralNode(Node):
    """A literal: ``value`` in Python, ``scalar`` in Arrow."""

    value: Any
    scalar: pa.Scalar

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return the scalar."""
        return self.scalar


@dataclass(frozen=True)
class CallNode(Node):
    """A call of an Arrow function.

    ``options``: the name of a class in `pyarrow.compute`, and the argument that makes its object.
    """

    function: str
    arguments: tuple[Node, ...]
    options: tuple[str, str] | None = None

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return the result of the Arrow function."""
        values = [each.evaluate(batch, alone) for each in self.arguments]
        # Arrow's options cannot be pickled.
        options = None if self.options is None else getattr(pc, self.options[0])(self.options[1])
        return pc.call_function(self.function, values, options)


@dataclass(frozen=True)
class CastNode(Node):
    """A conversion of numbers to a wider type; as in Spark, doubles round large integers."""

    node: Node

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return the converted values."""
        return pc.cast(self.node.evaluate(batch, alone), self.type, safe=False)


@dataclass(frozen=True)
class ArithmeticNode(CallNode):
    """An arithmetic operation on two numbers.

    As in Spark, a division evaluates the divisor first, and the second operand is not evaluated if
    the first is NULL.
    """

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return the results of the operation."""
        swapped = self.function == "divide_checked"
        first, second = self.arguments[::-1] if swapped else self.arguments
        one = first.evaluate(batch, alone)
        if alone and _is_null(one):
            return pa.nulls(1, self.type)
        values = [one, second.evaluate(batch, alone)]
        return pc.call_function(self.function, values[::-1] if swapped else values)


@dataclass(frozen=True)
class ComparisonNode(Node):
    """A comparison of two operands of the same type by an operator of Spark."""

    operator: str
    left: Node
    right: Node

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return booleans: NULL if an operand is, except for ``<=>``, by which NULLs are equal.

        ``alone``: if the left operand is NULL, the right one is evaluated only for ``<=>``.
        """
        left = self.left.evaluate(batch, alone)
        if alone and self.operator != "<=>" and _is_null(left):
            return pa.nulls(1, pa.bool_())
        right = self.right.evaluate(batch, alone)
        if self.operator != "<=>":
            return self._compared(self.operator, left, right)
        equal = pc.coalesce(self._compared("=", left, right), pa.scalar(False))
        return pc.or_(equal, pc.and_(pc.is_null(left), pc.is_null(right)))

    def _compared(self, operator: str, left: Values, right: Values) -> Values:
        # Spark: NaN equals NaN, and is larger than any other value.
        if not pa.types.is_floating(self.left.type or pa.null()):
            return pc.call_function(_FUNCTIONS[operator], [left, right])
        if operator in ("=", "<>"):
            both = pc.and_kleene(pc.is_nan(left), pc.is_nan(right))
            found = pc.or_kleene(pc.equal(left, right), both)
            return found if operator == "=" else pc.invert(found)
        if operator in (">", "<="):
            left, right = right, left
        smaller = pc.and_kleene(pc.is_nan(right), pc.invert(pc.is_nan(left)))
        found = pc.or_kleene(pc.less(left, right), smaller)
        return found if operator in ("<", ">") else pc.invert(found)


@dataclass(frozen=True)
class InNode(Node):
    """The condition that values are among literals, none of which is NULL."""

    node: Node
    literals: pa.Array

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return booleans: NULL for NULL, unlike Arrow's function."""
        values = self.node.evaluate(batch, alone)
        return pc.if_else(pc.is_valid(values), pc.is_in(values, value_set=self.literals), None)


@dataclass(frozen=True)
class LazyNode(CallNode):
    """An AND, an OR or a coalesce.

    In a batch of one row, the arguments after the one that decides the result are not evaluated.
    """

    #: The values that decide the result, such as (False,) for AND; () for any value but NULL.
    ends: tuple[Any, ...] = ()

    def evaluate(self, batch: pa.RecordBatch, alone: bool) -> Values:
        """Return booleans, or the first value of a coalesce that is not NULL."""
        values = self.arguments[0].evaluate(batch, alone)
        for each in self.arguments[1:]:
            if alone and self._ends(_first(values)):
                return values
            values = pc.call_function(self.function, [values, each.evaluate(batch, alone)])
        return values

    def _ends(self, value: pa.Scalar) -> bool:
        return value.as_py() in self.ends if self.ends else value.is_valid


def _first(values: Values) -> pa.Scalar:
    return values if isinstance(values, pa.Scalar) else values[0]


def _is_null(values: Values) -> bool:
    return not _first(values).is_valid
