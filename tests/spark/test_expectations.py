"""Expectations: the same results as Spark SQL, and the consequences of tuples that fail them."""

from __future__ import annotations

import random
import re
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException

from ackcore import testing
from ackcore.metrics.readings import READINGS, SnapshotListener
from ackcore.spark import RateSpout, RunFailed, dead_letters, run_batch, start
from ackcore.spark.base.versions import SPARK
from ackcore.spark.engine.insist import ExpectationFailed
from ackcore.spark.engine.progress import Progress
from ackcore.topology import BatchBolt, TopologyBuilder, TopologyError
from ackcore.topology.expectations import checks_of, expect
from ackcore.topology.sql_conditions import UnsupportedSql, compile_condition, spark_types

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
    "naive": (
        pa.timestamp("us"),
        [datetime(1900, 1, 1), datetime(2026, 3, 29, 2, 30, 0, 1)],
        ["TIMESTAMP_NTZ '2026-03-29 02:30:00.000001'", "TIMESTAMP_NTZ '1900-01-01T00:00:00'"],
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


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.faults), 7])
def test_conditions_have_the_results_of_spark(spark, conf, tmp_path, seed):
    rng = random.Random(seed)
    rows = table(rng)
    numbered = rows.append_column("row", pa.array(range(ROWS)))
    pq.write_table(numbered, str(tmp_path / "rows.parquet"))
    # Spark 3.5 reads days before 1582-10-15 only so.
    conf("spark.sql.parquet.datetimeRebaseModeInRead", "CORRECTED")
    frame = spark.read.parquet(str(tmp_path / "rows.parquet")).coalesce(1)
    batch = rows.combine_chunks().to_batches()[0]
    types = spark_types(frame.drop("row").schema)
    assert types == {field.name: field.type for field in rows.schema}
    compiled, refused = {}, 0
    while len(compiled) < 120:
        sql = boolean(rng)
        try:
            compiled[sql] = compile_condition(sql, types)
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
        for first in range(0, len(plain), 40):
            some = plain[first : first + 40]
            found = frame.selectExpr(*(f"{one.name} AS c{n}" for n, one in enumerate(some)))
            for check, values in zip(some, _columns(found), strict=True):
                assert _values(check, batch) == list(values), check.name
    if SPARK < (4, 0):
        return  # it evaluates the right side of a comparison even if the left one is NULL
    conf("spark.sql.ansi.enabled", "true")
    raising = [one for one in zip(checks, errors, strict=True) if one[1]]
    guarded = (
        f"CASE WHEN row NOT IN ({str([*raised])[1:-1]}) THEN {check.name} END"
        for check, raised in raising
    )
    found = _columns(frame.selectExpr(*(f"{one} AS c{n}" for n, one in enumerate(guarded))))
    for (check, raised), values in zip(raising, found, strict=True):
        unmet = np.setdiff1d(check.failed(batch)[0], list(raised))
        assert [n for n, one in enumerate(values) if one is False] == unmet.tolist(), check.name
        bad = frame.where(f"row = {next(iter(raised))}").selectExpr(check.name)
        with pytest.raises(PySparkException):
            bad.collect()


@pytest.mark.parametrize("seed", range(2))
def test_a_tuple_alone_has_the_result_that_it_has_among_others(seed):
    """Also if the value is a scalar: a coalesce that begins with a literal has one."""
    rng = random.Random(seed)
    batch = table(rng).combine_chunks().to_batches()[0].slice(0, 30)
    types = {field.name: field.type for field in batch.schema}
    literals = [
        f"coalesce(7, i32) IN ({LISTS['i32']})",
        "coalesce('x', s) NOT IN ('a', 'x')",
        "coalesce('x', s) LIKE 'x'",
        "coalesce(1e0, f64) <=> g64",
    ]
    tested = 0
    for sql in (*literals, *(boolean(rng) for _ in range(60))):
        try:
            compile_condition(sql, types)
        except UnsupportedSql:
            assert sql not in literals
            continue
        (check,) = checks_of([expect(sql)], types)
        together, errors = check.failed(batch)
        alone = [check.failed(batch.slice(place, 1)) for place in range(len(batch))]
        assert [n for n, (places, _) in enumerate(alone) if len(places)] == sorted(together), sql
        assert [found for _, found in alone if found] == [{0: errors[n]} for n in sorted(errors)]
        tested += 1
    assert tested > 30


def _values(check, batch):
    """The values of a condition; of each row alone if the batch raises, as it may for no row."""
    try:
        return check.condition.evaluate(batch, False).to_pylist()
    except pa.ArrowInvalid:
        rows = [check.condition.evaluate(batch.slice(n, 1), True) for n in range(len(batch))]
        return [one.as_py() if isinstance(one, pa.Scalar) else one[0].as_py() for one in rows]


def _columns(frame):
    return list(zip(*map(tuple, frame.collect()), strict=True))


# ------------------------------------------------------------------------------------ consequences

ORDERS = pa.schema([("id", pa.int64()), ("amount", pa.int64()), ("currency", pa.string())])


class Split(BatchBolt):
    """Emits each order to the default stream, and large ones also to another stream."""

    outputs: ClassVar = {"default": ORDERS, "large": ORDERS}

    def process(self, batch, out):
        out.emit(batch, parents=range(len(batch)))
        large = np.flatnonzero(np.nan_to_num(batch["amount"].to_numpy(zero_copy_only=False)) > 50)
        out.emit(batch.take(pa.array(large)), parents=large, stream="large")


def not_seventh(batch):
    return batch["id"].to_numpy() % 7 != 0


def orders(source, expected, *of_bolt, fields=("id",), **spout):
    builder = TopologyBuilder()
    builder.spout("orders", source, expect=expected, **spout)
    split = builder.bolt("split", Split(), expect=of_bolt)
    split.fields("orders", *fields) if fields else split.local_or_shuffle("orders")
    builder.sink("split", lambda frame, number: None)
    builder.sink("split", lambda frame, number: None, stream="large")
    return builder.build()


@pytest.mark.parametrize("kills", [{}, {"split": [3, 40, 41]}])
@pytest.mark.parametrize("fields", [("id",), ()], ids=["shuffled", "one stage"])
def test_each_tuple_has_the_consequence_of_its_expectation_and_is_counted_once(fields, kills):
    rng = random.Random(1)
    rows = [
        (n, rng.choice([None, *range(-9, 99)]), rng.choice(["EUR", "USD", "X", None]))
        for n in range(120)
    ]
    topology = orders(
        testing.Source(ORDERS),
        [
            expect("amount >= 0", on_fail="drop"),
            expect("currency IN ('EUR', 'USD')", "100 / (amount - 20) < 50"),
        ],
        expect(not_seventh),
        expect("amount <= 90", on_fail="drop", stream="large"),
        expect("id <> -1", on_fail="fail", stream="large"),
        fields=fields,
    )
    ran = testing.run(topology, {"orders": rows}, tasks=3, kills=kills)
    assert ran.kills == len(kills.get("split", ()))

    known = [currency in ("EUR", "USD", None) for _, _, currency in rows]
    # 100 / 0 raises; 100 / (22 - 20) is 50, and 100 / (21 - 20) is more.
    small = [amount not in (20, 21, 22) for _, amount, _ in rows]
    negative = [amount is not None and amount < 0 for _, amount, _ in rows]
    passed = [
        row
        for row, *fine, minus in zip(rows, known, small, negative, strict=True)
        if all(fine) and not minus
    ]
    large = [(n, amount) for n, amount, _ in passed if (amount or 0) > 50]
    good = [row for row in passed if row[0] % 7]
    written = [tuple(row.values()) for row in ran.outputs["split"]]
    assert sorted(written) == sorted(good)
    written = sorted(row["id"] for row in ran.outputs["split.large"])
    assert written == [n for n, amount in large if n % 7 and amount <= 90]
    bad = {n for (n, *_), *fine in zip(rows, known, small, strict=True) if not all(fine)}
    bad |= {row[0] for row in passed if row[0] % 7 == 0}
    assert {letter.payload["id"] for letter in ran.dead} == bad
    assert {letter.error_type for letter in ran.dead} == {"ExpectationFailed"}
    assert {letter.attempts for letter in ran.dead} == {1}
    ran.check(dead=len(bad))

    def counts(met):
        return {"passed": sum(met), "failed": len(met) - sum(met)}

    (progress,) = ran.progress
    assert progress.expectations == {
        "orders": {
            "amount >= 0": counts([not one for one in negative]),
            "currency IN ('EUR', 'USD')": counts(known),
            "100 / (amount - 20) < 50": counts(small),
        },
        "split": {"not_seventh": counts([row[0] % 7 != 0 for row in passed])},
        "split.large": {
            "amount <= 90": counts([amount <= 90 for _, amount in large]),
            "id <> -1": counts([True for _ in large]),
        },
    }
    component, name, most = max(progress.unmet(), key=lambda one: one[2])
    assert f", unmet: {name!r} of {component} {most}, " in str(progress)
    assert Progress.from_json(progress.to_json()) == progress


def test_a_reason_names_the_expectation_and_the_values():
    topology = orders(
        testing.Source(ORDERS), expect("amount > 0 AND 1 / amount < 1", "length(currency) = 3")
    )
    rows = [(1, -5, "EUR"), (2, 0, "EUR"), (3, 5, "x" * 5000), (4, 5, "EUR"), (5, 6, "EUR")]
    ran = testing.run(topology, {"orders": rows}, tasks=1)
    first, second, third = sorted(ran.dead, key=lambda one: one.payload["id"])
    condition = "expectation amount > 0 AND 1 / amount < 1 is not met: amount="
    assert first.error_message == f"{condition}-5"
    assert second.error_message == f"{condition}0"
    assert third.error_message == (
        f"expectation length(currency) = 3 is not met: currency='{'x' * 98}…"
    )


@pytest.mark.parametrize("on_fail", ["drop", "dead_letter", "fail"])
@pytest.mark.parametrize("wrong", [[True], 1, ["yes"] * 3, None], ids=str)
def test_a_function_with_a_wrong_result_ends_the_query(wrong, on_fail):
    def short(batch):
        return wrong

    topology = orders(testing.Source(ORDERS), expect(short, on_fail=on_fail))
    says = "expectation short must return a boolean for each of the 3 tuples of its batch, got "
    with pytest.raises(ExpectationFailed, match=says):
        testing.run(topology, {"orders": [(n, n, "EUR") for n in range(3)]}, tasks=1)


def test_a_tuple_whose_condition_raises_is_not_dropped():
    """Its records become dead letters with the error, however much `"drop"` drops."""

    def odd(batch):
        if pc.any(pc.equal(batch["id"], 4)).as_py():
            raise KeyError("no")
        return pc.equal(pc.bit_wise_and(batch["id"], 1), 1)

    some = expect(odd, "100 / amount > 15", on_fail="drop")
    ran = testing.run(
        orders(testing.Source(ORDERS), some), {"orders": [(n, n - 7, "EUR") for n in range(12)]}
    )
    assert {letter.payload["id"]: letter.error_message for letter in ran.dead} == {
        4: "expectation odd is not met: id=4, amount=-3, currency='EUR'; it raised KeyError: 'no'",
        7: "expectation 100 / amount > 15 is not met: amount=0; it raised ArrowInvalid: divide by "
        "zero",
    }
    assert [row["id"] for row in ran.outputs["split"]] == [9, 11]
    ran.check(dead=2)
    untracked = orders(testing.Source(ORDERS), some, tracked=False)
    ran = testing.run(untracked, {"orders": [(4, 1, "EUR"), (5, 1, "EUR"), (6, 1, "EUR")]})
    assert ran.untracked_failures == 1
    assert [row["id"] for row in ran.outputs["split"]] == [5]


@pytest.mark.parametrize("sql", ["", " ", "-- amount > 0", "/* all */", ";"])
def test_an_empty_condition_is_refused_as_empty(sql):
    with pytest.raises(UnsupportedSql, match="the condition is empty; write an expression"):
        compile_condition(sql, {"amount": pa.int64()})


def test_what_spark_would_not_evaluate_alike_is_refused_with_the_other_problems():
    with pytest.raises(TopologyError) as raised:
        orders(
            testing.Source(ORDERS),
            expect("amout > 0", "amount", "amount > '1'", "rand() > amount", "amount > 0; id > 1"),
            expect("amount >"),
            expect("id > 0", stream="late"),
            expect("id > 0", "id  >  0"),
        )
    problems = "\n".join(raised.value.problems)
    for text in (
        "expect of spout 'orders' has 'amout > 0': there is no column 'amout'; did you mean "
        "'amount'?",
        "has 'amount': the condition must be BOOLEAN, got an expression of int64",
        "has \"amount > '1'\": amount > '1' combines int64 and string, which ackcore does not",
        "has 'rand() > amount': RAND() is not supported; use a function",
        "has 'amount > 0; id > 1': the condition must be one SQL expression",
        "has 'amount >': the condition is not an SQL expression; the error is at '>'",
        "bolt 'split' expects conditions of stream 'late', which it does not have",
        "expect of bolt 'split' has id > 0 twice",
    ):
        assert text in problems, text
    assert len(raised.value.problems) == 8
    with pytest.raises(TopologyError, match="untracked records have none"):
        orders(testing.Source(ORDERS), expect("id > 0"), tracked=False)


@pytest.mark.parametrize(
    ("condition", "says", "instead"),
    [
        ("naive > TIMESTAMP '2026-03-01 12:00:00'", 2, "TIMESTAMP_NTZ '2026-03-01 12:00:00'"),
        ("at > TIMESTAMP '2026-03-01 12:00:00'", 1, "TIMESTAMP '2026-03-01 12:00:00Z'"),
        ("naive > TIMESTAMP_NTZ '2026-03-01 12:00:00+01:00'", 2, "2026-03-01 12:00:00'"),
        ("naive > TIMESTAMP '2026-03-01'", 2, "TIMESTAMP_NTZ '2026-01-31 12:00:00'"),
        ("naive > TIMESTAMP '2026-03-01 12:00:00Z'", 1, "TIMESTAMP_NTZ '2026-01-31 12:00:00'"),
        ("at > '2026-03-01'", 1, "TIMESTAMP '2026-01-31 12:00:00Z'"),
    ],
)
def test_the_literal_that_a_refusal_of_a_time_names_is_supported(condition, says, instead):
    """``says``: the place of that literal among those of the refusal."""
    types = {name: kind for name, (kind, _, _) in COLUMNS.items()}
    with pytest.raises(UnsupportedSql) as raised:
        compile_condition(condition, types)
    said = str(raised.value).partition("; ")[2]
    literal = re.findall(r"TIMESTAMP(?:_NTZ)? '.*?'", said)[says - 1]
    assert literal.endswith(instead)
    compile_condition(f"{condition.split()[0]} > {literal}", types)


@pytest.mark.parametrize(
    ("condition", "instead"),
    [
        ("i32 != NULL", "write i32 IS NOT NULL"),
        ("i32 = NULL", "write i32 IS NULL"),
        ("NULL <> i32 + 1", "write i32 + 1 IS NOT NULL"),
        ("i32 <=> NULL", "write i32 IS NULL"),
        ("i32 < NULL", "write i32 IS NULL or IS NOT NULL"),
        ("i32 IN (1, NULL)", "write IS NULL or IS NOT NULL"),
    ],
)
def test_a_comparison_with_null_is_refused(condition, instead):
    with pytest.raises(UnsupportedSql, match=re.escape(instead)):
        compile_condition(condition, {"i32": pa.int32()})


@pytest.mark.parametrize("condition", ["length(i32) > 3", "isnan(i32)", "trim(i32) = 'a'"])
def test_a_refused_type_of_a_single_operand_is_not_said_to_be_combined(condition):
    with pytest.raises(UnsupportedSql, match=r"takes int32, .*; name a column of another type"):
        compile_condition(condition, {"i32": pa.int32()})


@pytest.mark.parametrize("condition", ["tags", "NOT tags", "tags + 1 > 0", "tags = 1"])
def test_a_column_that_conditions_cannot_compare_is_refused(condition):
    with pytest.raises(UnsupportedSql, match=" a type that is not supported"):
        compile_condition(condition, {"tags": None})


def test_another_argument_of_expect_is_refused():
    with pytest.raises(TypeError, match=r"no argument 'onfail'; did you mean 'on_fail'\?"):
        expect("id > 0", onfail="drop")
    with pytest.raises(TypeError, match=r"got list \['id > 0'\]; pass each condition as an a"):
        expect(["id > 0"])


class Seen(SnapshotListener):
    """A listener that keeps the reports and the metrics."""

    def __init__(self):
        super().__init__("", {})
        self.reports = []

    def on_progress(self, progress, counts):
        self.reports.append(progress)
        super().on_progress(progress, counts)


def test_on_spark_a_failed_expectation_ends_the_query_before_anything_is_written(spark, tmp_path):
    columns = ["id", "id % 10 - 1 AS amount", "'EUR' AS currency"]
    frame = spark.range(0, 1000, 1, numPartitions=3).selectExpr(*columns)
    written = []

    def run(seen, *expected):
        builder = TopologyBuilder()
        builder.spout("orders", frame, expect=expected)
        builder.bolt("split", Split(), expect=expect(not_seventh)).fields("orders", "amount")
        builder.sink("split", lambda rows, number: written.append(rows.count()))
        return run_batch(builder.build(), spark, str(tmp_path / "checkpoint"), listeners=[seen])

    with pytest.raises(RunFailed, match=r"expectation amount >= 0 is not met: amount=-1 \(emitted"):
        run(Seen(), expect("amount >= 0", on_fail="fail"))
    assert written == []
    seen = Seen()
    counts = run(seen, expect("amount >= 0"), expect("amount < 8", on_fail="drop"))
    sevenths = [n for n in range(1000) if n % 7 == 0 and 0 <= n % 10 - 1 < 8]
    assert (counts.dead, counts.acked) == (100 + len(sevenths), 900 - len(sevenths))
    assert written == [800 - len(sevenths)]
    (report,) = seen.reports
    assert report.runs == 1
    assert report.expectations["orders"] == {
        "amount >= 0": {"passed": 900, "failed": 100},
        "amount < 8": {"passed": 900, "failed": 100},
    }
    (reading,) = [one for one in READINGS if one.name == "ackcore.expectation.checks"]
    values = {tuple(labels.values()): value for labels, value in reading.values(seen._at)}
    assert values["split", "not_seventh", "failed"] == len(sevenths)
    letters = dead_letters(str(tmp_path / "checkpoint"), spark).filter("component = 'orders'")
    (reason,) = letters.select("error_message").distinct().collect()
    assert reason[0] == "expectation amount >= 0 is not met: amount=-1"
    assert issubclass(ExpectationFailed, RunFailed)


def test_a_stream_ends_with_the_expectation_and_continues_after_its_correction(spark, tmp_path):
    written = []

    def run(on_fail):
        builder = TopologyBuilder()
        source = RateSpout(50, max_rows_per_batch=20)
        builder.spout("rate", source, expect=expect("value <> 30", on_fail=on_fail))
        builder.sink("rate", lambda rows, number: written.append(rows.count()))
        query = start(
            builder.build(), spark, tmp_path / "checkpoint", trigger={"availableNow": True}
        )
        query.await_termination(60)
        return query

    with pytest.raises(ExpectationFailed, match=r"micro-batch 1: .* not met: value=30 .* 'rate'"):
        run("fail")
    assert written == [20]
    assert run("drop").counts.acked == 50
    assert written == [20, 19, 10]
