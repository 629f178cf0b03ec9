"""SQL conditions over the columns of a batch, evaluated by Arrow with the results of Spark SQL.

sqlglot parses a condition in the driver. `compile_condition` checks its names and types, and
returns a tree of Arrow calls, which tasks evaluate without sqlglot. It accepts only conditions that
Arrow and Spark (in ANSI mode) evaluate alike. `tests/spark/test_expectations.py` compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa

from ackcore._error_hints import naming_extra, near_miss
from ackcore.topology.condition_nodes import (
    ArithmeticNode,
    CallNode,
    CastNode,
    ColumnNode,
    ComparisonNode,
    InNode,
    LazyNode,
    LiteralNode,
    Node,
)

_BOOL, _DOUBLE, _FLOAT = pa.bool_(), pa.float64(), pa.float32()
#: Spark's integers, by width, and the precision of the decimals that they become.
_INTEGERS = {pa.int8(): 3, pa.int16(): 5, pa.int32(): 10, pa.int64(): 20}
_SPARK_TYPES = {
    "boolean": _BOOL,
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": _FLOAT,
    "double": _DOUBLE,
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
#: A time; its time zone is in the second group.
_MOMENT = re.compile(
    rf"{_DATE.pattern}[ T]\d{{2}}:\d{{2}}:\d{{2}}(\.\d{{1,6}})?(Z|[+-]\d{{2}}:\d{{2}})?"
)
#: By type of a column of times: a literal to compare it with.
_TIMES = {
    "timestamp": "TIMESTAMP '2026-01-31 12:00:00Z'",
    "timestamp_ntz": "TIMESTAMP_NTZ '2026-01-31 12:00:00'",
}
#: A 32-bit float is exact for all integers up to this one; the most digits of a decimal.
_EXACT_FLOAT, _DIGITS = 1 << 24, 38
#: For up to this many numbers in an IN, comparisons one by one are faster than a hash table.
_FEW = 16


def supported_type(type_: pa.DataType) -> pa.DataType | None:
    """Return the type in which conditions use a column of a type; None if they cannot compare it.

    Large text is used as text, and times with a zone in UTC; others are used unchanged.
    """
    if pa.types.is_large_string(type_):
        return pa.string()
    if pa.types.is_timestamp(type_) and type_.unit == "us" and type_.tz is not None:
        return _SPARK_TYPES["timestamp"]
    if pa.types.is_decimal128(type_) and type_.scale < 0:
        return None
    known = type_ in _SPARK_TYPES.values() or pa.types.is_decimal128(type_)
    return type_ if known else None


class UnsupportedSql(ValueError):
    """The SQL text of a condition is wrong, or Arrow would not evaluate it as Spark does."""


def spark_types(schema: Any) -> dict[str, pa.DataType | None]:
    """Return the Arrow type in which conditions use each column of a Spark schema, by name.

    It is None for a column that conditions cannot compare.
    """
    found = {}
    for field in schema.fields:
        name = field.dataType.simpleString()
        decimal = _DECIMAL.fullmatch(name)
        found[field.name] = (
            _SPARK_TYPES.get(name)
            if decimal is None
            else pa.decimal128(*map(int, decimal.groups()))
        )
    return found


def _call(type_: pa.DataType, function: str, *arguments: Node, options: Any = None) -> Node:
    return CallNode(type_, function, arguments, options)


def _not(node: Node) -> Node:
    return _call(_BOOL, "invert", node)


def _lazy(function: str, ends: tuple[Any, ...], *arguments: Node) -> Node:
    return LazyNode(arguments[0].type, function, arguments, None, ends)


def _and(left: Node, right: Node) -> Node:
    return _lazy("and_kleene", (False,), left, right)


def _or(left: Node, right: Node) -> Node:
    return _lazy("or_kleene", (True,), left, right)


def _constant(value: Any, type_: pa.DataType) -> LiteralNode:
    return LiteralNode(type_, value, pa.scalar(value, type_))


# ---------------------------------------------------------------------------------------- compiler


def compile_condition(sql: str, types: Mapping[str, pa.DataType | None]) -> Node:
    """Return a condition as a tree of Arrow calls.

    Raises UnsupportedSql if it is no condition on these columns, uses none of them, or Arrow does
    not evaluate it as Spark does. The text does not repeat the condition, which `checks_of` writes
    before it. Raises ImportError without sqlglot.

    ``sql``: the condition, in Spark's SQL. ``types``: the types of the columns; None for types that
    conditions cannot compare.
    """
    way_out = ", or pass functions of a pyarrow.RecordBatch"
    with naming_extra("a condition in SQL", "sqlglot", "expect", way_out):
        import sqlglot  # noqa: PLC0415 - optional
    if "\\" in sql:  # Spark has escapes that sqlglot does not interpret
        raise UnsupportedSql(
            "a backslash is not supported; use a function of a pyarrow.RecordBatch"
        )
    try:
        if any(each.text == "!" for each in sqlglot.tokenize(sql, read="spark")):
            raise UnsupportedSql("the operator ! is not supported; write NOT")
        trees = sqlglot.parse(sql, read="spark")
    except sqlglot.errors.SqlglotError as error:
        # sqlglot's text may name its own classes. It has no position for an unfinished quote.
        found_at = getattr(error, "errors", None)
        near = f"; the error is at {found_at[0]['highlight']!r}" if found_at else ""
        raise UnsupportedSql(f"the condition is not an SQL expression{near}") from None
    if all(tree is None for tree in trees):
        raise UnsupportedSql("the condition is empty; write an expression, such as amount > 0")
    if len(trees) != 1 or trees[0] is None:
        raise UnsupportedSql("the condition must be one SQL expression, without ';'")
    found = _Compiler(types).node(trees[0])
    if found.type != _BOOL:
        raise UnsupportedSql(
            f"the condition must be BOOLEAN, got an expression of {_type_of(found)}; compare it, "
            "as in amount > 0"
        )
    if next(found.columns(), None) is None:
        raise UnsupportedSql(
            "the condition uses no column, so it is the same for all tuples; name a column, or "
            "remove it"
        )
    return found


#: Spark's comparisons by the names of sqlglot's nodes, and with their operands exchanged.
_COMPARED = {
    "EQ": "=",
    "NEQ": "<>",
    "LT": "<",
    "LTE": "<=",
    "GT": ">",
    "GTE": ">=",
    "NullSafeEQ": "<=>",
}
_SWAPPED = {"=": "=", "<>": "<>", "<": ">", "<=": ">=", ">": "<", ">=": "<=", "<=>": "<=>"}
#: Nodes that sqlglot and Spark bind differently beside a comparison, unless in parentheses.
_PREDICATES = {*_COMPARED, "Is", "In", "Like", "Between", "Not", "And", "Or"}
_ARITHMETIC = {"Add": "add_checked", "Sub": "subtract_checked", "Mul": "multiply_checked"}
#: Arguments of sqlglot's nodes that `_Compiler` reads, or that have no effect on a condition.
_HARMLESS = {"this", "expression", "expressions", "low", "high", "to", "_type", "typed", "safe"}
_HARMLESS |= {"quoted", "is_string", "negate"}


class _Compiler:
    """Converts sqlglot's trees to nodes; each method raises UnsupportedSql for what it cannot."""

    def __init__(self, types: Mapping[str, pa.DataType | None]) -> None:
        self._types = types

    def node(self, tree: Any) -> Node:
        name = type(tree).__name__
        for argument, value in tree.args.items():
            if value and argument not in _HARMLESS and name != "Column":
                raise self._refused(tree)
        if name in _COMPARED:
            return self._comparison(tree, name)
        if name in _ARITHMETIC or name == "Div":
            return self._arithmetic(tree, name)
        method = getattr(self, f"_from_{name.lower()}", None)
        if method is None:
            raise self._refused(tree)
        found: Node = method(tree)
        return found

    @staticmethod
    def _refused(tree: Any) -> UnsupportedSql:
        return UnsupportedSql(
            f"{tree.sql('spark')} is not supported; use a function of a pyarrow.RecordBatch"
        )

    @staticmethod
    def _mismatch(tree: Any, *nodes: Node) -> UnsupportedSql:
        types = " and ".join(map(_type_of, nodes))
        does, way_out = "combines", "use operands of one type"
        if len(nodes) == 1:
            does, way_out = "takes", "name a column of another type"
        for name, literal in _TIMES.items():
            of_type = [
                isinstance(one, ColumnNode) and one.type == _SPARK_TYPES[name] for one in nodes
            ]
            if any(of_type) and not all(of_type):
                column = nodes[of_type.index(True)]
                way_out = f"compare {next(column.columns())!r} with a literal such as {literal}"
        return UnsupportedSql(
            f"{tree.sql('spark')} {does} {types}, which ackcore does not convert as Spark does; "
            f"{way_out}, or use a function of a pyarrow.RecordBatch"
        )

    # -- leaves -----------------------------------------------------------------------------------

    def _from_paren(self, tree: Any) -> Node:
        return self.node(tree.this)

    def _from_column(self, tree: Any) -> Node:
        name = tree.name
        if tree.args.get("table") or type(tree.this).__name__ != "Identifier":
            raise UnsupportedSql(
                f"{tree.sql('spark')} is a field of a column or of a table, which is not "
                "supported; write the name of a column with a dot in backticks, or use a function "
                "of a pyarrow.RecordBatch"
            )
        # Spark ignores the case of names.
        found = [one for one in self._types if one.lower() == name.lower()]
        if len(found) > 1:
            raise UnsupportedSql(
                f"{name!r} is ambiguous, because Spark ignores case: it may be any of the columns "
                f"{', '.join(found)}; rename all but one"
            )
        if not found:
            raise UnsupportedSql(
                f"there is no column {name!r}; {near_miss(name, list(self._types), 'columns')}"
            )
        return ColumnNode(self._types[found[0]], found[0])

    def _from_null(self, tree: Any) -> Node:
        raise UnsupportedSql("NULL is not supported as a value; write IS NULL or IS NOT NULL")

    def _from_boolean(self, tree: Any) -> Node:
        return _constant(bool(tree.this), _BOOL)

    def _from_literal(self, tree: Any) -> Node:
        text = tree.this
        if tree.args.get("is_string"):
            return _constant(text, pa.string())
        return self._number(tree, text)

    def _number(self, tree: Any, text: str) -> Node:
        if re.fullmatch(r"-?\d+", text):
            value = int(text)
            for type_, bits in ((pa.int32(), 31), (pa.int64(), 63)):
                if -(1 << bits) <= value < 1 << bits:
                    return _constant(value, type_)
        elif re.fullmatch(r"-?(\d+\.\d*|\.\d+)", text):
            exact = Decimal(text)
            _, digits, exponent = exact.as_tuple()
            scale = max(0, -int(exponent))
            precision = max(len(digits), scale)
            if precision <= _DIGITS:
                return _constant(exact, pa.decimal128(precision, scale))
        elif re.fullmatch(r"-?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", text):
            return _constant(float(text), _DOUBLE)
        raise self._refused(tree)

    def _from_neg(self, tree: Any) -> Node:
        inner = tree.this
        if type(inner).__name__ == "Literal" and not inner.args.get("is_string"):
            return self._number(tree, f"-{inner.this}")
        node = self.node(inner)
        return _call(self._number_type(tree, node), "negate_checked", node)

    def _from_cast(self, tree: Any) -> Node:
        """Convert a literal such as ``DATE '2020-01-01'`` or ``1L``; refuse any other cast."""
        inner, to = tree.this, tree.args["to"].sql("spark").upper()
        if type(inner).__name__ == "Literal":
            text = inner.this
            if inner.args.get("is_string"):
                if to == "DATE":
                    return self._date(tree, text)
                if to in ("TIMESTAMP", "TIMESTAMP_NTZ"):
                    return self._moment(tree, text, to.lower())
            elif to == "BIGINT" and re.fullmatch(r"\d+", text) and int(text) < 1 << 63:
                return _constant(int(text), pa.int64())
            elif to == "DOUBLE":
                return _constant(float(text), _DOUBLE)
        raise self._refused(tree)

    _from_trycast = _from_cast

    def _date(self, tree: Any, text: str) -> Node:
        try:
            if _DATE.fullmatch(text):
                return _constant(date.fromisoformat(text), pa.date32())
        except ValueError:
            pass
        raise UnsupportedSql(f"{tree.sql('spark')} must be a date such as DATE '2026-01-31'")

    def _moment(self, tree: Any, text: str, name: str) -> Node:
        found = _MOMENT.fullmatch(text)
        zone = found and found[2]
        try:
            if found and bool(zone) == (name == "timestamp"):
                return _constant(datetime.fromisoformat(text), _SPARK_TYPES[name])
        except ValueError:
            found = None
        time = text.removesuffix(zone or "") if found else "2026-01-31 12:00:00"
        raise UnsupportedSql(
            f"{name.upper()} {text!r} must be a date and time, with a time zone for TIMESTAMP and "
            f"without one for TIMESTAMP_NTZ; write TIMESTAMP '{time}{zone or 'Z'}' for a column "
            f"with a time zone, or TIMESTAMP_NTZ '{time}' for one without"
        )

    # -- logic ------------------------------------------------------------------------------------

    def _condition(self, tree: Any) -> Node:
        found = self.node(tree)
        if found.type != _BOOL:
            raise UnsupportedSql(f"{tree.sql('spark')} must be BOOLEAN, got {_type_of(found)}")
        return found

    def _from_and(self, tree: Any) -> Node:
        return _and(self._condition(tree.this), self._condition(tree.expression))

    def _from_or(self, tree: Any) -> Node:
        return _or(self._condition(tree.this), self._condition(tree.expression))

    def _from_not(self, tree: Any) -> Node:
        return _not(self._condition(tree.this))

    def _operand(self, tree: Any) -> Node:
        """Convert an operand. Raises UnsupportedSql for a condition that is not in parentheses."""
        if type(tree).__name__ in _PREDICATES:
            raise UnsupportedSql(f"the operand {tree.sql('spark')} must be in parentheses")
        return self.node(tree)

    def _from_is(self, tree: Any) -> Node:
        node, kind = self._operand(tree.this), type(tree.expression).__name__
        if kind == "Null":
            return _call(_BOOL, "is_null", node)
        if kind != "Boolean" or node.type != _BOOL:
            raise self._refused(tree)
        value = node if tree.expression.this else _not(node)
        return _call(_BOOL, "coalesce", value, _constant(False, _BOOL))

    def _from_anonymous(self, tree: Any) -> Node:
        name, arguments = str(tree.this).lower(), tree.expressions
        if name not in ("isnull", "isnotnull") or len(arguments) != 1:
            raise self._refused(tree)
        node = self.node(arguments[0])
        return _call(_BOOL, "is_null" if name == "isnull" else "is_valid", node)

    # -- comparisons ------------------------------------------------------------------------------

    def _comparison(self, tree: Any, name: str) -> Node:
        sides = (tree.this, tree.expression)
        others = [one for one in sides if type(one).__name__ != "Null"]
        if len(others) == 1:
            test = "IS NOT NULL" if name == "NEQ" else "IS NULL"
            both = " or IS NOT NULL" if name in ("LT", "LTE", "GT", "GTE") else ""
            never = "" if name == "NullSafeEQ" else ", as its result is NULL, which passes"
            raise UnsupportedSql(
                f"{tree.sql('spark')} is not supported{never}; write {others[0].sql('spark')} "
                f"{test}{both}"
            )
        left, right = map(self._operand, sides)
        return self._compared(tree, _COMPARED[name], left, right)

    def _compared(self, tree: Any, operator: str, left: Node, right: Node) -> Node:
        if isinstance(left, LiteralNode):
            left, right, operator = right, left, _SWAPPED[operator]
        if isinstance(left, LiteralNode):
            raise UnsupportedSql(f"{tree.sql('spark')} compares two literals; name a column")
        return ComparisonNode(_BOOL, operator, *self._in_common_type(tree, left, right))

    def _from_between(self, tree: Any) -> Node:
        node = self._operand(tree.this)
        low, high = self._operand(tree.args["low"]), self._operand(tree.args["high"])
        return _and(self._compared(tree, ">=", node, low), self._compared(tree, "<=", node, high))

    def _from_in(self, tree: Any) -> Node:
        node = self._operand(tree.this)
        items = [self.node(each) for each in tree.expressions]
        literal = all(isinstance(each, LiteralNode) for each in items)
        if not items or not literal or next(node.columns(), None) is None:
            raise self._refused(tree)
        # Arrow's is_in distinguishes 0.0 and -0.0.
        few = len(items) <= (1 if node.type == pa.string() else _FEW)
        if few or pa.types.is_floating(node.type or pa.null()):
            return reduce(_or, [self._compared(tree, "=", node, each) for each in items])
        pairs = [self._in_common_type(tree, node, each) for each in items]
        if not all(left is node for left, _ in pairs):
            raise self._mismatch(tree, node, *items)
        literals = pa.array([one.value for _, one in pairs if isinstance(one, LiteralNode)])
        return InNode(_BOOL, node, literals.cast(node.type))

    def _from_like(self, tree: Any) -> Node:
        node, pattern = self._operand(tree.this), tree.expression
        if node.type != pa.string() or not pattern.args.get("is_string"):
            raise self._refused(tree)
        options = ("MatchSubstringOptions", pattern.this)
        found = _call(_BOOL, "match_like", node, options=options)
        return _not(found) if tree.args.get("negate") else found

    # -- numbers and functions --------------------------------------------------------------------

    def _number_type(self, tree: Any, node: Node) -> pa.DataType:
        """Return the type of a node; raise UnsupportedSql if it is no type of numbers."""
        kind = node.type
        if kind is None or not (
            kind in _INTEGERS or pa.types.is_floating(kind) or pa.types.is_decimal128(kind)
        ):
            raise UnsupportedSql(f"{tree.sql('spark')} needs numbers, got {_type_of(node)}")
        return kind

    def _arithmetic(self, tree: Any, name: str) -> Node:
        left, right = self._operand(tree.this), self._operand(tree.expression)
        kinds = {self._number_type(tree, left), self._number_type(tree, right)}
        if any(map(pa.types.is_decimal128, kinds)) and not any(map(pa.types.is_floating, kinds)):
            return self._decimal_arithmetic(tree, name, left, right)
        if name == "Div":
            sides = [self._as(tree, each, _DOUBLE) for each in (left, right)]
            return ArithmeticNode(_DOUBLE, "divide_checked", tuple(sides))
        # A 32-bit float and an integer become float or double, depending on Spark's mode.
        if _FLOAT in kinds and kinds & set(_INTEGERS):
            raise self._mismatch(tree, left, right)
        left, right = self._in_common_type(tree, left, right)
        assert left.type is not None
        return ArithmeticNode(left.type, _ARITHMETIC[name], (left, right))

    def _decimal_arithmetic(self, tree: Any, name: str, left: Node, right: Node) -> Node:
        (p1, s1), (p2, s2) = (_decimal_of(each) for each in (left, right))
        if name == "Div":
            raise self._refused(tree)
        scale = s1 + s2 if name == "Mul" else max(s1, s2)
        digits = p1 + p2 + 1 if name == "Mul" else max(p1 - s1, p2 - s2) + scale + 1
        if digits > _DIGITS:
            raise self._mismatch(tree, left, right)
        left = self._as(tree, left, pa.decimal128(p1, s1))
        right = self._as(tree, right, pa.decimal128(p2, s2))
        return ArithmeticNode(pa.decimal128(digits, scale), _ARITHMETIC[name], (left, right))

    def _from_abs(self, tree: Any) -> Node:
        node = self.node(tree.this)
        return _call(self._number_type(tree, node), "abs_checked", node)

    def _from_isnan(self, tree: Any) -> Node:
        node = self.node(tree.this)
        if node.type not in (_FLOAT, _DOUBLE):
            raise self._mismatch(tree, node)
        return _call(_BOOL, "coalesce", _call(_BOOL, "is_nan", node), _constant(False, _BOOL))

    def _from_length(self, tree: Any) -> Node:
        return _call(pa.int32(), "utf8_length", self._text_node(tree))

    def _from_trim(self, tree: Any) -> Node:
        if tree.args.get("expression"):
            raise self._refused(tree)
        return _call(pa.string(), "utf8_trim", self._text_node(tree), options=("TrimOptions", " "))

    def _text_node(self, tree: Any) -> Node:
        node = self.node(tree.this)
        if node.type != pa.string():
            raise self._mismatch(tree, node)
        return node

    def _from_coalesce(self, tree: Any) -> Node:
        nodes = [self.node(each) for each in (tree.this, *tree.expressions)]
        kinds = {each.type for each in nodes}
        if kinds <= set(_INTEGERS):
            widest = max(kinds, key=_INTEGERS.__getitem__)
            nodes = [self._as(tree, each, widest) for each in nodes]
        elif _DOUBLE in kinds and all(
            each.type == _DOUBLE
            or (isinstance(each, LiteralNode) and isinstance(each.value, int | Decimal))
            for each in nodes
        ):
            nodes = [self._as(tree, each, _DOUBLE) for each in nodes]
        elif len(kinds) > 1 or None in kinds:
            raise self._mismatch(tree, *nodes)
        return _lazy("coalesce", (), *nodes)

    # -- types ------------------------------------------------------------------------------------

    def _in_common_type(self, tree: Any, left: Node, right: Node) -> tuple[Node, Node]:
        """Return two operands in the type to which Spark converts both; refuse if Arrow differs."""
        kinds = (left.type, right.type)
        if None in kinds:
            raise self._mismatch(tree, left, right)
        if kinds[0] == kinds[1]:
            return left, right
        common = self._common_type(left, right)
        if common is None:
            raise self._mismatch(tree, left, right)
        return self._as(tree, left, common), self._as(tree, right, common)

    @staticmethod
    def _common_type(left: Node, right: Node) -> pa.DataType | None:
        one, other = left.type, right.type
        if one in _INTEGERS and other in _INTEGERS:
            return max(one, other, key=_INTEGERS.__getitem__)
        for node, literal in ((left, right), (right, left)):
            given = literal if isinstance(literal, LiteralNode) else None
            if node.type == pa.date32() and literal.type == pa.string() and given is not None:
                return pa.date32()
            if node.type == _DOUBLE and (literal.type in _INTEGERS or literal.type == _FLOAT):
                return _DOUBLE
            if pa.types.is_floating(node.type) and pa.types.is_decimal128(literal.type):
                return None if given is None else _DOUBLE
            if node.type == _FLOAT and literal.type in _INTEGERS:
                exact = literal.type in (pa.int8(), pa.int16())
                exact = exact or (given is not None and abs(given.value) <= _EXACT_FLOAT)
                return _FLOAT if exact else None
        numbers = [kind in _INTEGERS or pa.types.is_decimal128(kind) for kind in (one, other)]
        if not all(numbers):
            return None
        (p1, s1), (p2, s2) = (_decimal_of(each) for each in (left, right))
        scale = max(s1, s2)
        digits = max(p1 - s1, p2 - s2) + scale
        return pa.decimal128(digits, scale) if digits <= _DIGITS else None

    def _as(self, tree: Any, node: Node, type_: pa.DataType) -> Node:
        """Return a node with the values of ``node`` in ``type_``.

        Raises UnsupportedSql for a cast of decimals to floats, unless ``node`` is a literal.
        """
        if node.type == type_:
            return node
        if isinstance(node, LiteralNode):
            if type_ == pa.date32() and isinstance(node.value, str):
                return self._date(tree, node.value)
            floating = pa.types.is_floating(type_)
            decimal = pa.types.is_decimal(type_)
            value = node.value
            value = float(value) if floating else Decimal(value) if decimal else value
            return _constant(value, type_)
        if pa.types.is_floating(type_) and pa.types.is_decimal128(node.type):
            raise self._mismatch(tree, node)
        return CastNode(type_, node)


def _type_of(node: Node) -> str:
    return str(node.type or "a type that is not supported")


def _decimal_of(node: Node) -> tuple[int, int]:
    """Return the precision and scale of a decimal, or of an integer as a decimal."""
    kind: Any = node.type
    if kind in _INTEGERS:
        return _INTEGERS[kind], 0
    return kind.precision, kind.scale
