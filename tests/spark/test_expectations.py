"""Expectations: the same results as Spark SQL, and the consequences of tuples that fail them."""

from __future__ import annotations

import random
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from ackcore.topology.expectations import checks_of, expect
from ackcore.topology.sql_conditions import UnsupportedSql, condition, spark_types

ROWS = 400
DECIMAL, WIDE = pa.decimal128(10, 2), pa.decimal128(30, 6)
#: By column: its type, values at the edges, and literals that conditions compare it with.
COLUMNS = {
    "i8": (pa.int8(), [-128, -1, 0, 1, 127], ["0", "1", "-128", "300", "1.5"]),
    "i16": (pa.int16(), [-(2**15), 0, 7, 2**15 - 1], ["0", "7", "-32768", "1e2"]),
    "i32": (pa.int32(), [-(2**31), -1, 0, 3, 2**31 - 1], ["0", "3", "2147483648", "2.50"]),
    "i64": (
        pa.int64(),
        [-(2**63), -1, 0, 2**53 + 1, 2**63 - 1],
        ["0", "9223372036854775807", "9007199254740993L", "9007199254740992.0", "9e18"],
    ),
    "f32": (pa.float32(), [float("nan"), -0.0, 0.1, 0.5, float("inf")], ["0", "0.1", "1e-1"]),
    "f64": (
        pa.float64(),
        [float("nan"), -0.0, 0.0, 0.1, 2.0**53, float("inf"), -float("inf")],
        ["0", "0.1", "1e308", "-0.0", "0.30000000000000004"],
    ),
    "g64": (pa.float64(), [float("nan"), -0.0, 0.1, float("-inf")], ["1", ".5"]),
    "dec": (DECIMAL, [Decimal("0.00"), Decimal("-99999999.99"), Decimal("0.10")], ["0", "0.1"]),
    "wide": (WIDE, [Decimal("0.100000"), Decimal("-1.500000")], ["0.1", "1", "0.1000001"]),
    "s": (
        pa.string(),
        ["", " ", "a", "ab", "b\nc", "Ä", "\U0001f600x", "%", "a_b", " a "],
        ["'a'", "''", "'Ä'", '"ab"', "' a '"],
    ),
    "z": (pa.string(), ["", "a", "\U0001f600", "\uffff"], ["'a'", "'\U0001f600'"]),
    "day": (
        pa.date32(),
        [date(1, 1, 1), date(1582, 10, 15), date(2026, 2, 28), date(9999, 12, 31)],
        ["DATE '2026-02-28'", "'1582-10-15'"],
    ),
    "at": (
        pa.timestamp("us", "UTC"),
        [datetime(1900, 1, 1, tzinfo=UTC), datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=UTC)],
        ["TIMESTAMP '2026-03-29 01:30:00.000001Z'", "TIMESTAMP '2026-03-29 03:30:00+02:00'"],
    ),
    "yes": (pa.bool_(), [True, False], ["TRUE", "FALSE"]),
}
NUMBERS = ["i8", "i16", "i32", "i64", "f32", "f64", "g64", "dec", "wide"]
PATTERNS = ["'%a%'", "'a%'", "'%b'", "'_'", "'b_c'", "'a_b'", "'%'", "''", "'.'", "'a'"]
LISTS = {
    "i64": "0, -1, 9223372036854775807",
    "i32": ", ".join(map(str, range(-3, 40))),
    "s": "'a', 'Ä', ''",
    "f64": "0.1, 0",
    "dec": "0.1, -99999999.99",
    "day": "DATE '2026-02-28', DATE '0001-01-01'",
}


def table(rng):
    """Random rows, with a null in every fourth value."""
    columns = {}
    for name, (kind, edges, _) in COLUMNS.items():
        values = [rng.choice(edges) if rng.random() < 0.75 else None for _ in range(ROWS)]
        if kind == pa.float64():
            values = [
                rng.choice([one, rng.gauss(0, 2)]) if one is not None else None for one in values
            ]
        columns[name] = pa.array(values, kind)
    return pa.table(columns)


def number(rng, depth=2):
    """A random expression with a number as its value."""
    column = rng.choice(NUMBERS)
    if depth == 0 or rng.random() < 0.3:
        return column if rng.random() < 0.6 else rng.choice(COLUMNS[column][2])
    left, right = number(rng, depth - 1), number(rng, depth - 1)
    kind = rng.random()
    if kind < 0.7:
        return f"({left} {rng.choice('+-*/')} {right})"
    if kind < 0.8:
        return f"abs({left})"
    return f"length({rng.choice('sz')})" if kind < 0.9 else f"coalesce({left}, {right})"


def boolean(rng, depth=3):
    """A random condition."""
    kind = rng.random()
    if depth and kind < 0.4:
        left, right = boolean(rng, depth - 1), boolean(rng, depth - 1)
        word = rng.choice(["AND", "OR"])
        return f"({left}) {word} ({right})" if rng.random() < 0.5 else f"{left} {word} NOT {right}"
    how = rng.choice(["=", "==", "<>", "!=", "<", "<=", ">", ">=", "<=>"])
    if kind < 0.5:
        return f"{number(rng)} {how} {number(rng)}"
    name = rng.choice(list(COLUMNS))
    literal = rng.choice(COLUMNS[name][2])
    alike = [one for one in COLUMNS if COLUMNS[one][0] == COLUMNS[name][0]]
    return rng.choice(
        [
            f"{name} {how} {literal}",
            f"{literal} {how} {name}",
            f"{name} {how} {rng.choice(alike)}",
            f"{rng.choice(NUMBERS)} {how} {rng.choice(NUMBERS)}",
            f"{name} IS {rng.choice(['', 'NOT '])}NULL",
            f"{name} BETWEEN {literal} AND {rng.choice(COLUMNS[name][2])}",
            f"{name} NOT BETWEEN {literal} AND {name}",
            f"{rng.choice('sz')} {rng.choice(['', 'NOT '])}LIKE {rng.choice(PATTERNS)}",
            f"{(one := rng.choice(list(LISTS)))} {rng.choice(['', 'NOT '])}IN ({LISTS[one]})",
            f"isnan({rng.choice(['f32', 'f64'])})",
            f"trim(s) {how} {literal}",
            "yes",
            f"(yes IS {rng.choice(['', 'NOT '])}{rng.choice(['TRUE', 'FALSE'])})",
            f"isnull({name}) = isnotnull({rng.choice(alike)})",
        ]
    )


@pytest.mark.parametrize("seed", range(2))
def test_conditions_have_the_results_of_spark(spark, conf, tmp_path, seed):
    rng = random.Random(seed)
    rows = table(rng)
    pq.write_table(rows, str(tmp_path / "rows.parquet"))
    frame = spark.read.parquet(str(tmp_path / "rows.parquet")).coalesce(1)
    batch = rows.combine_chunks().to_batches()[0]
    types = spark_types(frame.schema)
    assert types == {field.name: field.type for field in rows.schema}
    compiled, refused = {}, 0
    while len(compiled) < 120:
        sql = boolean(rng)
        try:
            compiled[sql] = condition(sql, types)
        except UnsupportedSql:
            refused += 1
    assert refused < 240
    # Where Spark raises for a row, that row does not pass.  It raises for the whole query.
    checks = list(checks_of([expect(*compiled)], types))
    errors = [check.failed(batch)[1] for check in checks]
    assert 20 > sum(map(bool, errors)) > 3
    plain = [check for check, raised in zip(checks, errors, strict=True) if not raised]
    for ansi in ("true", "false"):
        conf("spark.sql.ansi.enabled", ansi)
        for start in range(0, len(plain), 40):
            some = plain[start : start + 40]
            found = frame.selectExpr(*(f"{one.name} AS c{n}" for n, one in enumerate(some)))
            for check, values in zip(some, _columns(found), strict=True):
                assert check.by.of(batch, False).to_pylist() == list(values), check.name
    conf("spark.sql.ansi.enabled", "true")
    for check, raised in zip(checks, errors, strict=True):
        if not raised:
            continue
        good = np.setdiff1d(np.arange(ROWS), list(raised))
        _write(tmp_path / "good", rows.take(good))
        _write(tmp_path / "bad", rows.take([next(iter(raised))]))
        (values,) = _columns(spark.read.parquet(str(tmp_path / "good")).selectExpr(check.name))
        unmet = np.setdiff1d(check.failed(batch)[0], list(raised))
        assert good[[one is False for one in values]].tolist() == unmet.tolist(), check.name
        with pytest.raises(PySparkException):
            spark.read.parquet(str(tmp_path / "bad")).selectExpr(check.name).collect()


def _write(directory, rows):
    directory.mkdir(exist_ok=True)
    pq.write_table(rows, str(directory / "rows.parquet"))


def _columns(frame):
    return list(zip(*map(tuple, frame.collect()), strict=True))
