"""The shape of a table: refusals by name, compatibility with stored segments, users' folds."""

from __future__ import annotations

import json
import pickle

import pyarrow as pa
import pytest
import table_model as model

from ackcore.tables import BatchFold, Fold, collect, count, first, latest, mean_of, min_of, sum_of
from ackcore.tables.folding import finished, fold_rows, merge_states
from ackcore.tables.key_groups import group_rows, hashes_of
from ackcore.tables.table_segments import TableReader, TableSegment, write_segment
from ackcore.tables.table_shape import OF_SEGMENTS, TableShape

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("v", pa.int64()),
        ("u", pa.uint64()),
        ("m", pa.map_(pa.string(), pa.int8())),
        ("o", pa.sparse_union([pa.field("one", pa.int8())])),
        ("_hash", pa.int64()),
    ]
)
LIST_VIEW = pa.list_view(pa.int64())
ROWS = pa.table({"k": ["a", "b"], "v": [1, 2]})


class Unfit(Fold):
    """A fold whose value is not of its type."""

    columns = ("v",)
    type = pa.int8()

    def empty(self):
        return 0

    def fold(self, value, row):
        return "much"

    def merge(self, earlier, later):
        return earlier


class Short(BatchFold):
    """A fold that returns too few rows."""

    columns = ("v",)
    state = pa.schema([("v", pa.int64())])

    def fold(self, rows, starts):
        return rows.slice(1)

    def merge(self, earlier, later):
        return later.rename_columns(["w"])


def own(base=Short, **attributes):
    """A fold that differs from a class in these attributes."""
    return type("Own", (base,), attributes)()


def finish_plus_one(self, states):
    return pa.array([value + 1 for value in states[0].to_pylist()])


def finish_as_list_views(self, states):
    return pa.array([[value] for value in states[0].to_pylist()], LIST_VIEW)


class OneValue(Fold):
    """A fold that finishes too few values."""

    columns = ("v",)
    type = pa.int64()

    def empty(self):
        return 0

    def fold(self, value, row):
        return row["v"]

    def merge(self, earlier, later):
        return later

    def finish(self, states):
        return states[0].slice(0, 1)


class Greedy(Short):
    """A fold that changes the starts, which other aggregates read too."""

    def fold(self, rows, starts):
        starts[:] = 0
        return rows


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (["k", "k"], {"n": count()}, "key must be different columns"),
        ("x", {"n": count()}, r"key must name a column of the stream \(k, v, .*got 'x'"),
        ("m", {"n": count()}, "key must be columns that can be hashed, got 'm' of map"),
        ("k", {"k": count()}, "value must not name a column of key, got 'k' in both"),
        ("_hash", {"n": count()}, "the column name '_hash' is reserved; rename it"),
        ("k", {"n": sum_of("x")}, r"value\['n'\] must name a column of the stream"),
        ("k", {"n": sum_of("k")}, r"value\['n'\] must read a column of int64, .*'k' of string"),
        ("k", {"n": sum_of("u")}, "got 'u' of uint64"),
        ("k", {"n": mean_of("k")}, "must read a column of integers, floats or decimals"),
        ("k", {"n": min_of("m")}, "must read a column of numbers, times, booleans, text or"),
        ("k", {"n": first("m", "v")}, "bytes, got 'm' of map<string, int8>; name another c"),
        ("k", {"n": first("v", "o")}, "must have a type that can be stored, got 'o' of"),
        ("k", {"n": own(columns="v")}, "attribute columns is a list or tuple of names, got 'v'"),
        (
            "k",
            {"n": own(columns=iter(["v"]))},
            "attribute columns is a list or tuple of names, got <list_iter",
        ),
        (
            "k",
            {"n": own(state=pa.schema([("v", pa.int64())] * 2))},
            "a pyarrow.Schema .* of different names, got v: int64 v: int64",
        ),
        (
            "k",
            {"n": own(finish=finish_plus_one)},
            "method finish returns a pyarrow.Array .* for no states, got <pyarr",
        ),
        (
            "k",
            {"n.v": Short(), "n": own(state=pa.schema([("v.v", pa.int64())]))},
            "of the same name, got 'n.v.v' .* twice; rename",
        ),
    ],
)
def test_a_wrong_shape_is_refused_by_name(key, value, words):
    with pytest.raises((TypeError, ValueError), match=f"table 't': .*{words}"):
        TableShape.of("t", SCHEMA, key, value)


@pytest.mark.parametrize("name", [*OF_SEGMENTS, "_other"])
def test_a_key_has_no_name_of_a_segment_s_own_columns(name):
    """A text key of such a name would replace the column, and the file could not be read."""
    rows = pa.table({name: ["a", "b"]})
    if name in OF_SEGMENTS:
        with pytest.raises(ValueError, match=f"the column name {name!r} is reserved; rename it"):
            TableShape.of("t", rows.schema, name, {"n": count()})
        return
    shape = TableShape.of("t", rows.schema, name, {"n": count()})
    written = write_segment(shape, fold_rows(shape, [rows], 0))
    names = pa.ipc.open_file(pa.py_buffer(written)).schema.names
    assert {*names} <= {*OF_SEGMENTS, *shape.stored_schema.names}
    assert {*TableSegment.open(written, shape).table().column(name).to_pylist()} == {"a", "b"}


@pytest.mark.parametrize(
    "of",
    [lambda kind: own(OneValue, type=kind), lambda kind: own(state=pa.schema([("s", kind)]))],
    ids=["Fold", "BatchFold"],
)
@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.binary_view(),
        pa.run_end_encoded(pa.int32(), pa.string()),
        LIST_VIEW,
        pa.large_list_view(pa.int64()),
        pa.sparse_union([pa.field("one", pa.int8())]),
        pa.map_(pa.string(), pa.string_view()),
    ],
)
def test_a_state_that_arrow_cannot_merge_is_refused(of, kind):
    for each in (kind, pa.list_(kind), pa.struct([("s", kind)])):
        with pytest.raises(TypeError, match=r"table 't': value\['n'\] must be .* state can be sto"):
            TableShape.of("t", SCHEMA, "k", {"n": of(each)})
    for each in (pa.dictionary(pa.int32(), pa.string()), pa.large_list(pa.int8())):
        TableShape.of("t", SCHEMA, "k", {"n": of(each)})


def test_a_state_with_only_nulls_is_no_state():
    class Later(Short):
        state = pa.schema([("v", pa.int64()), ("rows", pa.int64())])

        def merge(self, earlier, later):
            return later

    keys = [pa.array([0, 0, 1, 1])]
    groups = group_rows(hashes_of(keys, 4), keys)
    values = pa.array([5, None, None, 7], pa.int64())
    merged = []
    for rows in (values, pa.array([1, 1, 1, 1])):
        states = Later().combine([values, rows], groups)
        merged.append(dict(zip(groups.firsts.tolist(), states[0].to_pylist(), strict=True)))
    assert merged == [{0: 5, 2: 7}, {0: None, 2: 7}]


@pytest.mark.parametrize(
    "kind", [pa.bool8(), pa.uuid(), pa.list_(pa.uuid()), pa.struct([("a", pa.bool8())])]
)
def test_extension_types_of_states_are_refused(kind):
    """Python has no values for some of them, and no DataFrame can read the table."""
    with pytest.raises(TypeError, match=r"whose state can be stored, got 'value' of .*extension<"):
        TableShape.of("t", SCHEMA, "k", {"n": own(OneValue, type=kind)})


def test_list_views_are_refused():
    schema = pa.schema([("k", LIST_VIEW), ("v", pa.int64())])
    with pytest.raises(TypeError, match=r"table 't': key must have a type that can be stored"):
        TableShape.of("t", schema, "k", {"n": count()})
    with pytest.raises(TypeError, match=r"finish returns values that can be stored, got list_view"):
        TableShape.of("t", SCHEMA, "k", {"n": own(finish=finish_as_list_views)})
    shape = TableShape.of("t", pa.schema([("k", pa.list_(pa.int64()))]), "k", {"n": count()})
    with pytest.raises(TypeError, match=r"column 'k' of keys must be list.*, got list_view"):
        shape.key_arrays(pa.table({"k": pa.array([[1]], LIST_VIEW)}))


def test_wrong_arguments_of_aggregates_are_refused():
    with pytest.raises(TypeError, match=r"column of sum_of\(\) must be the name of a c.*, got 7; "):
        sum_of(7)
    with pytest.raises(TypeError, match=r"by of latest\(\) must be .*; write by='euros', for"):
        latest(None, "v")
    with pytest.raises(ValueError, match=r"max_items of collect\(\) must be "):
        collect("v", 0)


def test_keys_of_a_lookup_have_the_columns_and_types_of_the_table():
    shape = TableShape.of("t", ROWS.schema, "k", {"n": count()})
    reader = TableReader(shape, [], 0)
    with pytest.raises(ValueError, match="keys must have the columns k of table 't', got v"):
        reader.lookup(ROWS.select(["v"]))
    with pytest.raises(
        TypeError, match="column 'k' of keys must be string, as in table 't', got list"
    ):
        reader.lookup(pa.table({"k": [[1]]}))
    assert reader.lookup(ROWS).column("k").to_pylist() == [None, None]


def test_a_shape_is_json_and_can_be_pickled():
    schema = model.batch_of([], model.VALUES).schema
    shape = TableShape.of("t", schema, ["s", "e"], model.AGGREGATES, 5)
    copy = pickle.loads(pickle.dumps(shape))
    assert json.loads(json.dumps(copy.structure())) == shape.structure()
    assert copy.stored_schema == shape.stored_schema
    assert copy.row_schema == shape.row_schema
    assert shape.row_schema.field("e").type == pa.string()


def test_added_aggregates_start_empty_and_removed_ones_are_ignored():
    before = TableShape.of("t", ROWS.schema, "k", {"v": sum_of("v"), "gone": count()})
    added = {"last": min_of("v"), "all": collect("v", 9), "n": count(), "own": Short()}
    after = TableShape.of("t", ROWS.schema, "k", {"v": sum_of("v"), **added})
    data = write_segment(before, fold_rows(before, [ROWS], 0))
    stored = TableReader(after, [TableSegment.open(data, after)], 0).lookup(ROWS)
    empty = {"k": "a", "v": 1, "last": None, "all": None, "n": None, "own": None}
    assert finished(after, stored).to_pylist()[0] == empty
    kept = {name: each for name, each in added.items() if name != "own"}
    shape = TableShape.of("t", ROWS.schema, "k", {"v": sum_of("v"), **kept})
    older = TableReader(shape, [TableSegment.open(data, shape)], 0).lookup(ROWS.slice(0, 1))
    rows = finished(shape, merge_states(shape, older, fold_rows(shape, [ROWS], 0))).to_pylist()
    assert {"k": "a", "v": 2, "last": 1, "all": [1], "n": 1} in rows


def test_results_of_users_folds_are_checked():
    for value, says in (
        ({"n": Unfit()}, r"Unfit\.fold must return values of int8: .*much"),
        ({"n": Short()}, r"Short.fold must return 2 rows, one per key, got 1"),
        ({"n": Greedy(), "v": sum_of("v")}, "read-only"),
    ):
        with pytest.raises(ValueError, match=says):
            fold_rows(TableShape.of("t", ROWS.schema, "k", value), [ROWS], 0)
    shape = TableShape.of("t", ROWS.schema, "k", {"n": OneValue()})
    with pytest.raises(ValueError, match=r"OneValue.finish must return 2 values of int64, .*got 1"):
        finished(shape, fold_rows(shape, [ROWS], 0))
    shape = TableShape.of("t", ROWS.schema, "k", {"n": Short()})
    states = TableShape.of("t", ROWS.schema, "k", {"n": sum_of("v")})
    stored = fold_rows(states, [ROWS], 0).rename_columns(shape.stored_schema.names)
    with pytest.raises(
        TypeError, match=r"Short\.merge must return the columns v int64, got w int64"
    ):
        merge_states(shape, stored, stored)
