"""A table as a Python dict, and the types and rows that tests draw for it."""

from __future__ import annotations

import datetime
import decimal
import itertools
import math

import pyarrow as pa
from hypothesis import strategies as st

from ackcore.tables import (
    BatchFold,
    Fold,
    collect,
    count,
    first,
    latest,
    max_of,
    mean_of,
    min_of,
    sum_of,
)

D = decimal.Decimal
TIMES = [datetime.datetime(1969, 12, 31) + datetime.timedelta(hours=7 * n) for n in range(9)]
FLOATS = [0.0, -0.0, 1.25, -7.5, math.nan, math.inf, -math.inf, 2.0**70]
TEXTS = ["", "a", "b", "aa", "ß", "long" * 9, "z"]

#: Types of keys, with values that are few enough to meet again.
KEYS = [
    (pa.int8(), [0, 1, -128, 127]),
    (pa.int64(), [0, -1, 2**63 - 1, -(2**63), 7]),
    (pa.uint64(), [0, 2**64 - 1, 2**63, 7]),
    (pa.float64(), FLOATS),
    (pa.float16(), [0.0, -0.0, 1.5, math.nan]),
    (pa.bool_(), [True, False]),
    (pa.decimal128(38, 2), [D("0.00"), D("-1.10"), D(10) ** 35, D("7.25")]),
    (pa.decimal256(60, 1), [D("0.5"), D(10) ** 50]),
    (pa.timestamp("us", "UTC"), [t.replace(tzinfo=datetime.UTC) for t in TIMES[:3]]),
    (pa.date32(), [t.date() for t in TIMES[:3]]),
    (pa.duration("ms"), [datetime.timedelta(0), datetime.timedelta(days=-1)]),
    (pa.string(), TEXTS),
    (pa.large_string(), TEXTS),
    # Older versions do not tell how many bytes a piece of such a column has.
    *([(pa.string_view(), TEXTS)] if int(pa.__version__.split(".")[0]) >= 24 else []),
    (pa.binary(), [b"", b"\0", b"\0\0"]),
    (pa.binary(2), [b"ab", b"\0\0"]),
    (pa.dictionary(pa.int8(), pa.string()), TEXTS),
    (pa.list_(pa.float32()), [[], [0.0], [-0.0], [math.nan, 1.0], [None], [1.0, None]]),
    (pa.large_list(pa.string()), [[], [""], ["a", None]]),
    (pa.list_(pa.int8(), 2), [[1, 2], [None, 2]]),
    (
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
        [{"a": 1, "b": ["x"]}, {"a": None, "b": None}, {"a": 1, "b": []}],
    ),
    (pa.null(), [None]),
]

#: The other columns of the rows.
VALUES = {
    "n": (pa.int32(), [0, 1, -5, 2**31 - 1]),
    "x": (pa.float64(), [0.0, -0.0, 1.25, -7.5, math.nan, math.inf]),
    "d": (pa.decimal128(12, 2), [D("0.00"), D("1.10"), D("-9999999999.99")]),
    "q": (getattr(pa, "decimal64", pa.decimal128)(12, 2), [D("0.00"), D("1.10"), D("-9.99")]),
    "at": (pa.timestamp("ns"), TIMES[:4]),
    "s": (pa.string(), TEXTS),
    "e": (pa.dictionary(pa.int32(), pa.string()), ["red", "blue"]),
    "w": (pa.list_(pa.int64()), [[], [1, None], [2, 3]]),
    "u": (pa.uint64(), [0, 2**64 - 1, 2**63]),
}


class Squares(BatchFold):
    """The sum of squares, and the last value, in columns."""

    columns = ("n",)
    state = pa.schema([("squares", pa.float64()), ("last", pa.int32())])

    def fold(self, rows, starts):
        lists = rows.column("n").to_pylist()
        groups = [lists[i:j] for i, j in itertools.pairwise(starts)]
        squares = [float(sum(n * n for n in group if n is not None)) for group in groups]
        return pa.record_batch([squares, pa.array([g[-1] for g in groups], pa.int32())], self.state)

    def merge(self, earlier, later):
        pairs = zip(earlier[0].to_pylist(), later[0].to_pylist(), strict=True)
        return pa.record_batch([[a + b for a, b in pairs], later[1]], schema=self.state)


class Words(Fold):
    """All texts joined, in their order."""

    columns = ("s", "e")
    type = pa.string()

    def empty(self):
        return ">"

    def fold(self, value, row):
        return f"{value}{row['s']}{row['e']}."

    def merge(self, earlier, later):
        return earlier + later[1:]


AGGREGATES = {
    "rows": count(),
    "n_sum": sum_of("n"),
    "x_sum": sum_of("x"),
    "d_sum": sum_of("d"),
    "n_mean": mean_of("n"),
    "x_min": min_of("x"),
    "x_max": max_of("x"),
    "s_min": min_of("s"),
    "e_max": max_of("e"),
    "u_max": max_of("u"),
    "d_min": min_of("d"),
    "q_min": min_of("q"),
    "at_max": max_of("at"),
    "first_w": first("at", "w"),
    "last_s": latest("at", "s"),
    "last_n": latest("x", "n"),
    "some": collect("e", 3),
    "lists": collect("w", 2),
    "squares": Squares(),
    "words": Words(),
}


def present(rows, name):
    return [row[name] for row in rows if row[name] is not None]


def number_order(x):
    """Order of floats: NaN is the largest."""
    return (1, 0.0) if isinstance(x, float) and math.isnan(x) else (0, x)


def chosen(rows, by, column, pick):
    rows = [row for row in rows if row[by] is not None]
    return pick(rows)[column] if rows else None


def expected(rows):
    """Return the values of all aggregates for the rows of one key, in the order of the fold."""
    n, x = present(rows, "n"), present(rows, "x")
    s, e, d, q, at, u = (present(rows, name) for name in ("s", "e", "d", "q", "at", "u"))
    latest_by = {
        by: (lambda rows, by=by: max(reversed(rows), key=lambda row: number_order(row[by])))
        for by in ("at", "x")
    }
    return {
        "rows": len(rows),
        "n_sum": sum(n) if n else None,
        "x_sum": sum(x) if x else None,
        "d_sum": sum(d) if d else None,
        "n_mean": sum(n) / len(n) if n else None,
        "x_min": min(x, key=number_order) if x else None,
        "x_max": max(x, key=number_order) if x else None,
        "s_min": min(s, key=str.encode) if s else None,
        "e_max": max(e) if e else None,
        "u_max": max(u) if u else None,
        "d_min": min(d) if d else None,
        "q_min": min(q) if q else None,
        "at_max": max(at) if at else None,
        "first_w": chosen(rows, "at", "w", lambda rows: min(rows, key=lambda row: row["at"])),
        "last_s": chosen(rows, "at", "s", latest_by["at"]),
        "last_n": chosen(rows, "x", "n", latest_by["x"]),
        "some": e[:3],
        "lists": present(rows, "w")[:2],
        "squares": float(sum(one * one for one in n)),
        "words": ">" + "".join(f"{row['s']}{row['e']}." for row in rows),
    }


def canonical(value):
    """Return a value that equals others as a key of a table does: NaN is NaN, -0.0 is 0.0."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    if isinstance(value, list):
        return tuple(map(canonical, value))
    if isinstance(value, dict):
        return tuple((name, canonical(each)) for name, each in value.items())
    return value


def key_columns(data):
    """Draw the columns of a key: their types and values."""
    kinds = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2))
    return {f"k{n}": kind for n, kind in enumerate(kinds)}


def rows_of(columns):
    """Return a strategy for rows as dicts; each value may be None."""
    return st.fixed_dictionaries(
        {
            name: st.one_of(st.none(), st.sampled_from(values))
            if name[0] != "k"
            else st.sampled_from([*values, None])
            for name, (_, values) in columns.items()
        }
    )


def batch_of(rows, columns):
    """Return rows as a batch."""
    schema = pa.schema([(name, kind) for name, (kind, _) in columns.items()])
    arrays = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if pa.types.is_float16(field.type):
            array = pa.array(values, pa.float64()).cast(pa.float16())
        elif pa.types.is_dictionary(field.type):
            array = pa.array(values, pa.string()).dictionary_encode().cast(field.type)
        else:
            array = pa.array(values, field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
