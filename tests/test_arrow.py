"""Arrow batches in and out: nothing copied that need not be, nothing taken that no ledger holds."""

import datetime
import decimal
import os
import sys

import numpy as np
import pytest
from ledger_scripts import Clock, entries_of, int32s, int64s
from separately import run_python

from ackcore import ACK, FAIL, RESET, Status

pa = pytest.importorskip("pyarrow")
arrow = pytest.importorskip("ackcore._arrow.arrow_tables")
hashing = pytest.importorskip("ackcore._arrow.hashing")
record_batches = pytest.importorskip("ackcore._arrow.record_batches")
shown = pytest.importorskip("ackcore._arrow.shown")


def used(Ledger, clock):
    ledger = Ledger(clock=clock)
    roots = int64s([0, -1, 2**63 - 1, 4, 4])
    ledger.fold(roots, int64s([1, 2, 3, 4, 4]), int32s([2**31 - 1, ACK, FAIL, 0, 7]))
    return ledger


@pytest.mark.parametrize("clock", [None, Clock(-5)])
def test_entries_go_out_and_in(Ledger, clock):
    entries = used(Ledger, clock).entries()
    batch = arrow.entries_to_batch(entries)
    assert batch.schema == arrow.ENTRY_SCHEMA
    assert batch["first_ms"].null_count == (0 if clock else len(entries))
    back = arrow.entries_from_batch(batch.select(batch.schema.names[::-1]))
    assert sorted(back) == sorted(entries)
    assert sorted(Ledger.from_entries(back, clock=clock).entries()) == sorted(entries)


def test_entries_share_the_batch_s_memory(Ledger):
    batch = arrow.entries_to_batch(used(Ledger, None).entries())
    entries = arrow.entries_from_batch(batch)
    for name, column in (("root_id", entries.root_ids), ("flags", entries.flags)):
        assert column.__array_interface__["data"][0] == batch[name].buffers()[1].address


@pytest.mark.parametrize(
    ("column", "values", "error", "words"),
    [
        ("val", pa.array([1, None]), ValueError, "saved: val must not hold nulls, got 1 of 2 rows"),
        ("val", pa.array([1.0, 2.0]), TypeError, "saved: val must hold integers, got Arrow's doub"),
        ("task", pa.array([1, 2**31]), ValueError, "saved: task must fit int32: "),
        ("task", pa.array([1, -1]), ValueError, "saved: inits must be > 0 exactly where"),
        ("flags", pa.array([0, -1], pa.int8()), ValueError, r"saved: flags must be in 0\.\.3"),
        ("first_ms", pa.array([1, None]), ValueError, "saved: first_ms must not hold nulls"),
    ],
)
def test_rows_that_no_ledger_holds_are_refused(column, values, error, words):
    batch = arrow.entries_to_batch(entries_of([(n, 1, 4, 1, 0, 0, 5, 5) for n in range(2)]))
    changed = batch.set_column(batch.schema.names.index(column), column, values)
    with pytest.raises(error, match=words):
        arrow.entries_from_batch(changed, "saved")
    with pytest.raises(TypeError, match=f"entries has no column {column}, which it must"):
        arrow.entries_from_batch(batch.drop_columns([column]))


def test_decisions_go_out_with_the_names_of_their_statuses(Ledger):
    settled = used(Ledger, Clock(7)).settle(now_ms=100, timeout_ms=5)
    batch = arrow.settled_to_batch(settled)
    rows = [(row["root_id"], row["status"], row["last_ms"]) for row in batch.to_pylist()]
    assert sorted(rows) == [
        (-1, "ORPHAN", 7),
        (0, "EXPIRED", 7),
        (4, "ANOMALY", 7),
        (2**63 - 1, "ORPHAN", 7),
    ]
    assert batch.schema.names == ["root_id", "status", *arrow.ENTRY_SCHEMA.names[1:]]


def test_every_status_has_its_name():
    names = arrow.status_names(np.arange(len(Status), dtype=np.uint8))
    assert names.to_pylist() == [status.name for status in Status]
    assert arrow.status_names(np.empty(0, np.uint8)).type == pa.string()


def test_integers_are_uncopied_or_fit():
    column = pa.array([9, RESET, 5], pa.int32())[1:]
    taken = arrow.integers(column, "task", pa.int32())
    assert taken.tolist() == [RESET, 5]
    assert taken.__array_interface__["data"][0] == column.buffers()[1].address + 4
    assert arrow.integers(column, "task", pa.int64()).dtype == np.int64
    with pytest.raises(ValueError, match="val must fit int64: "):
        arrow.integers(pa.array([2**63], pa.uint64()), "val", pa.int64())
    with pytest.raises(TypeError, match="val must hold integers, got Arrow's bool; cast it first"):
        arrow.integers(pa.array([True]), "val", pa.int64())


@pytest.mark.parametrize(
    ("arrow_type", "is_text"),
    [
        (pa.string(), True),
        (pa.large_string(), True),
        (pa.string_view(), True),
        (pa.dictionary(pa.int32(), pa.string()), True),
        (pa.dictionary(pa.int32(), pa.int64()), False),
        (pa.binary(), False),
        (pa.int64(), False),
    ],
)
def test_what_is_text(arrow_type, is_text):
    assert record_batches.is_text(arrow_type) is is_text


# ---- rows through a shuffle


def hashes(column):
    return hashing.hash_columns([column], len(column)).tolist()


def decimals(*numbers):
    return [None if number is None else decimal.Decimal(number) for number in numbers]


FLOATS = [1.5, -0.0, 0.0, float("nan"), None, float("inf"), 1.5]
TEXTS = ["a", "bb", None, "", "x" * 33, "\u00e9", "a", "eight888"]
BYTES = [None if text is None else text.encode() for text in TEXTS]
LISTS = [[1, 2], [2, 1], None, [], [1], [None, 1], [1, None], [1, 2], [0, 1, 2]]
INTS = [1, 0, None, -5, 127, 1]
STRUCTS = [{"a": 1, "b": "x"}, None, {"a": None, "b": None}, {"a": 1, "b": None}]

#: Groups of columns that hold the same values and must hash alike.
ALIKE = {
    "integers": [pa.array(INTS, t) for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())],
    "times": [
        pa.array([1, None, 5, 1], pa.int64()).cast(t)
        for t in (pa.int64(), pa.timestamp("us", "UTC"), pa.duration("ms"), pa.time64("ns"))
    ]
    + [pa.array([1, None, 5, 1], pa.int32()).cast(t) for t in (pa.date32(), pa.time32("s"))],
    "unsigned": [
        pa.array([1, None, 200], t)
        for t in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(), pa.int64())
    ],
    "bools": [pa.array([True, False, None] * 7), pa.array([1, 0, None] * 7, pa.int8())],
    "floats": [pa.array(FLOATS, t) for t in (pa.float32(), pa.float64())]
    + [pa.array([None if one is None else np.float16(one) for one in FLOATS], pa.float16())],
    "texts": [pa.array(TEXTS, t) for t in (pa.string(), pa.large_string(), pa.string_view())]
    + [pa.array(BYTES, t) for t in (pa.binary(), pa.large_binary(), pa.binary_view())]
    + [
        pa.array(TEXTS).dictionary_encode(),
        pa.array(TEXTS).dictionary_encode("encode"),
        pa.DictionaryArray.from_arrays(
            pa.array([0, 1, None, 2, 3, 4, 0, 5], pa.uint8()),
            ["a", "bb", "", "x" * 33, "\u00e9", "eight888"],
        ),
    ],
    "fixed bytes": [pa.array([b"abc", None, b"xyz"], t) for t in (pa.binary(3), pa.binary())],
    "lists": [
        pa.array(LISTS, t)
        for t in (
            pa.list_(pa.int32()),
            pa.large_list(pa.int64()),
            pa.list_view(pa.int16()),
            pa.large_list_view(pa.int8()),
        )
    ],
    "pairs": [
        pa.array([[1, 2], None, [2, 1], [1, 2]], t)
        for t in (pa.list_(pa.int32(), 2), pa.list_(pa.int32()))
    ],
    "nulls": [pa.nulls(4), pa.nulls(4, pa.string()), pa.nulls(4).dictionary_encode()],
    "decimals": [pa.array(decimals("1.5", None, "-2.5", "1.5"), pa.decimal128(10, 2))],
    "wide decimals": [pa.array(decimals("1.5", None, "-2.5", "1.5"), pa.decimal256(50, 2))],
    "dates": [pa.array([86_400_000, None, 0], pa.date64())],
    "intervals": [pa.array([(1, 2, 3), None, (1, 2, 4)], pa.month_day_nano_interval())],
    "structs": [pa.array(STRUCTS), pa.array(STRUCTS, pa.struct({"a": pa.int8(), "b": "string"}))],
    "nested": [pa.array([[[1], [2, 3]], [[1, 2], [3]], None, [[], [1, 2, 3]], [None]])],
    "lists of structs": [pa.array([[{"a": "x"}], None, [], [{"a": None}], [None]])],
    "empty structs": [pa.array([{}, None, {}], pa.struct([]))],
    "runs": [
        pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", "b"])),
        pa.array(["a", "a", "b"]),
    ],
    "extension": [
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16, b"y" * 16], pa.binary(16))),
        pa.array([b"x" * 16, b"y" * 16]),
    ],
}


def value_of(item):
    """Values that must hash alike: NaN equals NaN, and 0.0 equals -0.0."""
    return repr(0.0 if item == 0 and not isinstance(item, bool) else item)


@pytest.mark.parametrize("name", ALIKE)
def test_equal_values_hash_alike_and_others_do_not(name):
    first, *others = ALIKE[name]
    found = hashes(first)
    distinct = {value_of(item) for item in first.to_pylist()}
    assert len(set(found)) == len(distinct)
    assert len(set(zip(found, map(value_of, first.to_pylist()), strict=True))) == len(distinct)
    for other in others:
        assert hashes(other) == found, other.type


@pytest.mark.parametrize("name", ALIKE)
def test_a_slice_hashes_as_the_whole(name):
    for column in ALIKE[name]:
        found = hashes(column)
        for start in range(len(column) + 1):
            for length in (0, 1, 3, len(column)):
                part = column.slice(start, length)
                assert hashes(part) == found[start : start + length], column.type


def test_a_validity_bitmap_does_not_matter():
    for values in ([1, 2, 3], ["a", "b", "c"], [[1], [], [2]], [{"a": 1}, {"a": 2}, {"a": 3}]):
        with_bitmap = pa.array([*values, None])[:3]
        assert with_bitmap.buffers()[0] is not None
        assert hashes(with_bitmap) == hashes(pa.array(values))


def test_what_is_behind_a_null_does_not_matter():
    def masked(values, arrow_type=None):
        array = pa.array(values, arrow_type)
        bits = pa.py_buffer(np.array([0b01], np.uint8))
        children = [array.field(0)] if pa.types.is_struct(array.type) else None
        buffers = [bits, *array.buffers()[1 : len(array.buffers()) if children is None else 1]]
        return pa.Array.from_buffers(array.type, 2, buffers, children=children)

    for one, other in (
        ([1, 2], [1, 3]),
        (["a", "b"], ["a", "ccc"]),
        ([{"a": 1}] * 2, [{"a": 1}, {"a": 2}]),
    ):
        assert hashes(masked(one)) == hashes(masked(other))


def test_every_nan_is_the_same():
    patterns = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001], np.uint64)
    assert len(set(hashes(pa.array(patterns.view(np.float64))))) == 1
    narrow = np.array([0x7FC00000, 0xFF800001], np.uint32).view(np.float32)
    assert set(hashes(pa.array(narrow))) == set(hashes(pa.array([float("nan")])))


def test_columns_are_mixed_in_their_order():
    numbers, texts = pa.array([1, 2, None]), pa.array(["a", None, "c"])
    n = len(numbers)
    both = hashing.hash_columns([numbers, texts], n)
    assert both.dtype == np.int64
    assert not set(both) & set(hashing.hash_columns([texts, numbers], n))
    assert not set(both) & {*hashes(numbers), *hashes(texts)}
    # A dictionary is taken for what it stands for after another column, too.
    encoded = texts.dictionary_encode()
    assert hashing.hash_columns([numbers, encoded], n).tolist() == both.tolist()
    assert hashing.hash_columns([], 2).tolist() == [0, 0]


def test_a_struct_s_own_nulls_and_fields_count():
    assert len(set(hashes(pa.array(STRUCTS)))) == 4
    cut = pa.array([{"a": 9, "b": "y"}, *STRUCTS])[1:]
    assert hashes(cut) == hashes(pa.array(STRUCTS))


def test_a_dictionary_longer_than_its_column_is_not_hashed_whole(monkeypatch):
    hashed, real = [], hashing.hash_binary
    monkeypatch.setattr(
        hashing, "hash_binary", lambda into, *of: hashed.append(len(into)) or real(into, *of)
    )
    column = pa.array([f"w{n}" for n in range(1_000)]).dictionary_encode()[:2]
    assert hashes(column) == hashes(pa.array(["w0", "w1"]))
    assert hashed == [2, 2]
    with_null = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1]), pa.array([None, "a"]))
    assert hashes(with_null) == hashes(pa.array([None, "a", "a"]))


def test_hashes_of_columns_never_change():
    """Rows sent by one version must be found by the next."""
    assert hashes(pa.array([1, None])) == [4817364491166516681, 7640891576956012809]
    assert hashes(pa.array(["a", "acknowledge"])) == [-7567924723950045346, 8719381002276078029]
    assert hashes(pa.array([1.5, 0.0])) == [9024720928896724483, -7696910208926366575]
    assert hashes(pa.array([[1, 2], []])) == [195147297973602, 5391690131764563180]
    assert hashes(pa.array([{"a": 1, "b": "x"}])) == [6400699488180146957]


@pytest.mark.parametrize(
    ("columns", "n", "error", "words"),
    [
        ([[1, 2]], 2, TypeError, "columns must be Arrow arrays, got list at position 0"),
        (
            [pa.chunked_array([[1], [2]])],
            2,
            TypeError,
            "got ChunkedArray at position 0; pass the ch",
        ),
        ([pa.array([1]), pa.array([1, 2])], 1, ValueError, "must have 1 row, got 2 at position 1"),
        (
            [pa.array([1]), pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))],
            1,
            TypeError,
            "columns must not contain map<string, int64>, which .* got map<.* at position 1;",
        ),
        (
            [pa.array([], pa.list_(pa.struct({"m": pa.map_(pa.string(), pa.int64())})))],
            0,
            TypeError,
            "columns must not contain map<string, int64>, which .* got list<.* at position 0",
        ),
        (
            [pa.array([[]], pa.list_(pa.map_(pa.string(), pa.int64())))],
            1,
            TypeError,
            "columns must not contain map",
        ),
        (
            [pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])],
            1,
            TypeError,
            "columns must not contain sparse_union",
        ),
    ],
)
def test_columns_that_have_no_hash_are_refused(columns, n, error, words):
    with pytest.raises(error, match=words):
        hashing.hash_columns(columns, n)


def batch_of_all_kinds(n):
    rng = np.random.default_rng(4)
    texts = ["x" * int(k) for k in rng.integers(0, 20, n)]

    def some(values):
        return [None if rng.random() < 0.2 else value for value in values]

    columns = {
        "string": pa.array(texts),
        "strings or null": pa.array(some(texts)),
        "large": pa.array(some(texts), pa.large_string()),
        "binary": pa.array(some([text.encode() for text in texts]), pa.binary()),
        "int64": pa.array(range(n)),
        "int64 or null": pa.array(some(range(n))),
        "bool": pa.array(some([True] * n)),
        "list": pa.array(some([[text, None] for text in texts])),
        "struct": pa.array(some([{"a": None, "b": text} for text in texts])),
        "decimal": pa.array(some([decimal.Decimal(len(text)) for text in texts])),
        "dictionary": pa.array(some(texts)).dictionary_encode(),
    }
    return pa.RecordBatch.from_pydict(columns)


@pytest.mark.parametrize("n", [0, 1, 9, 1_000])
@pytest.mark.parametrize("cut", [False, True])
def test_rows_are_taken_as_arrow_takes_them(n, cut):
    batch = batch_of_all_kinds(n + 6)
    batch = batch.slice(5, n) if cut else batch.slice(0, n)
    order = np.random.default_rng(1).permutation(n)
    for rows in (order, order[: n // 2], order[:0], np.repeat(order, 2)):
        taken = record_batches.take_rows(batch, rows)
        taken.validate(full=True)
        assert taken.schema == batch.schema
        assert taken.equals(batch.take(pa.array(rows)))
    with pytest.raises(ValueError, match="order must be row numbers"):
        record_batches.take_rows(batch, np.array([n]))


def test_rows_without_columns_are_counted():
    batch = pa.RecordBatch.from_arrays([pa.array([1, 2, 3])], ["a"]).select([])
    taken = record_batches.take_rows(batch, np.array([2, 0]))
    assert taken.equals(batch.take(pa.array([2, 0])))


SERIALIZED = """
import hashlib, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from test_arrow import batch_of_all_kinds, record_batches
for n in (7, 64, 1003):
    batch = batch_of_all_kinds(n)
    order = np.argsort(np.random.default_rng(2).integers(0, 3, n), kind="stable")
    for start in (0, 3, n // 2):
        part = record_batches.take_rows(batch, order).slice(start, n // 3)
        for name in batch.schema.names:
            print(n, start, name, hashlib.md5(part.select([name]).serialize()).hexdigest())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="MALLOC_PERTURB_ is glibc's")
def test_taken_rows_are_the_same_bytes_whatever_memory_held():
    """Spark compares what a task wrote with what it writes when it runs again."""
    found = []
    for fill in ("85", "170"):
        memory = {"MALLOC_PERTURB_": fill, "ARROW_DEFAULT_MEMORY_POOL": "system"}
        found.append(run_python(SERIALIZED, os.path.dirname(__file__), **memory).splitlines())
    assert len(found[0]) == 3 * 3 * 11
    assert found[0] == found[1]


LATIN = [b"plain", b"caf\xe9", None, b"more"]


def garbled():
    """Text of which one is not UTF-8, and all that Arrow nests it in."""
    text = shown.text_of(LATIN)
    return {
        "text": text,
        "large": text.cast(pa.large_string()),
        "dictionary": text.dictionary_encode(),
        "struct": pa.StructArray.from_arrays([text], ["t"]),
        "list": pa.ListArray.from_arrays([0, 1, 2, 3, 4], text),
        "map": pa.MapArray.from_arrays([0, 1, 2, 3, 4], pa.array(list("abcd")), text),
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("text", ["plain", "caf\\xe9", None, "more"]),
        ("large", ["plain", "caf\\xe9", None, "more"]),
        ("dictionary", ["plain", "caf\\xe9", None, "more"]),
        ("struct", [{"t": "plain"}, {"t": "caf\\xe9"}, {"t": None}, {"t": "more"}]),
        ("list", [["plain"], ["caf\\xe9"], [None], ["more"]]),
        ("map", [[("a", "plain")], [("b", "caf\\xe9")], [("c", None)], [("d", "more")]]),
    ],
)
def test_text_that_is_not_utf8_is_found_and_shown(name, values):
    column = garbled()[name]
    assert shown.shown_values(column) == values
    assert shown.shown_values(pa.chunked_array([column])) == values
    assert shown.invalid_text(column).tolist() == [1]
    assert shown.invalid_text(column.slice(2)).tolist() == []
    assert shown.shown_rows(pa.table({"x": column})) == [{"x": value} for value in values]


def test_text_is_kept_as_bytes_or_escaped():
    column = shown.text_of(LATIN)
    assert column.cast(pa.binary()).to_pylist() == LATIN
    assert shown.as_texts(column).to_pylist() == ["plain", "caf\\xe9", None, "more"]
    assert shown.shown_values(column, errors="surrogateescape")[1] == "caf\udce9"


def test_times_that_python_has_no_value_for_are_iso():
    numbers = pa.array([0, 10**18, None, -(10**17), -(2**63)], pa.int64())
    assert shown.shown_values(numbers.cast(pa.timestamp("us", "UTC")))[1:] == [
        "33658-09-27T01:46:40.000000+00:00",
        None,
        "-1199-02-15T14:13:20.000000+00:00",
        "-9223372036854775808 us",
    ]
    assert shown.shown_values(numbers.cast(pa.timestamp("us")))[1] == "33658-09-27T01:46:40.000000"
    days = pa.array([1, 10**9, -(10**7)], pa.int32()).cast(pa.date32())
    assert shown.shown_values(days) == [datetime.date(1970, 1, 2), "2739877-01-03", "-25410-12-06"]
    assert shown.as_texts(days).to_pylist() == ["1970-01-02", "2739877-01-03", "-25410-12-06"]
    assert shown.as_texts(numbers.cast(pa.timestamp("us"))).to_pylist()[:3] == [
        "1970-01-01 00:00:00.000000",
        "33658-09-27T01:46:40.000000",
        None,
    ]
    spans = pa.array([1, 2**62]).cast(pa.duration("s"))
    assert shown.shown_values(spans) == [
        datetime.timedelta(seconds=1),
        "4611686018427387904 duration[s]",
    ]
