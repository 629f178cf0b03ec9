"""Look-ups of tables in bolts of all shapes, without Spark."""

import itertools
import json

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from acting import run
from hypothesis import given, settings
from hypothesis import strategies as st

from ackcore.tables import BatchFold, collect, count, latest, mean_of, min_of, sum_of
from ackcore.tables.folding import finished, fold_rows
from ackcore.tables.table_segments import TableReader, TableSegment, write_segment
from ackcore.tables.table_shape import TableShape, read_shape, recorded
from ackcore.topology.components import AsyncBolt, BasicBolt, BatchBolt, Bolt
from ackcore.topology.executors import executor_for
from ackcore.topology.table_views import TableView, change_streams

ROWS = pa.schema([("shop", pa.string()), ("day", pa.int32()), ("euros", pa.int64())])
FOUND = pa.schema([("n", pa.int64()), ("euros", pa.int64())])


def view_of(rows, key="shop", ttl_s=None, horizon_ms=0):
    """Return a view of a table that is folded from rows, newest segment first."""
    value = {"euros": sum_of("euros"), "orders": count(), "last": latest("day", "euros")}
    shape = TableShape.of("totals", ROWS, key, value, ttl_s)
    segments = []
    for part in rows:
        states = fold_rows(shape, [pa.Table.from_pylist(part, ROWS)], 1000)
        segments.insert(0, TableSegment.open(write_segment(shape, states), shape))
    return TableView("totals", TableReader(shape, segments, horizon_ms))


NORTH = {"shop": "north", "day": 2, "euros": 5}
SOME = [[NORTH, {"shop": "south", "day": 1, "euros": 7}, {"shop": None, "day": 3, "euros": 1}]]


def test_a_look_up_returns_one_row_per_key_and_nulls_for_a_missing_row():
    found = view_of(SOME).lookup({"shop": ["south", "none", None, "north", "south"]})
    south = {"shop": "south", "euros": 7, "orders": 1, "last": 7}
    assert found.to_pylist() == [
        south,
        dict.fromkeys(("shop", "euros", "orders", "last")),
        {"shop": None, "euros": 1, "orders": 1, "last": 1},
        {"shop": "north", "euros": 5, "orders": 1, "last": 5},
        south,
    ]
    assert found.schema == view_of([]).schema
    assert view_of([]).lookup({"shop": []}).num_rows == 0
    assert view_of([]).lookup({"shop": ["north"]}).to_pylist() == [
        dict.fromkeys(("shop", "euros", "orders", "last"))
    ]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=5), max_size=4)
)
def test_the_newest_segment_wins_and_every_form_of_keys_finds_the_same_rows(parts):
    rows = [[{"shop": s, "day": d, "euros": n} for n, (s, d) in enumerate(p)] for p in parts if p]
    view = view_of(rows, key=["shop", "day"])
    asked = [(s, d) for s in "abcd" for d in range(4)]
    shops, days = map(list, zip(*asked, strict=True))
    batch = pa.record_batch({"day": pa.array(days, pa.int64()), "x": shops, "shop": shops})
    found = view.lookup(batch)
    assert found == view.lookup(pa.table(batch)) == view.lookup({"shop": shops, "day": days})
    assert [view.get(one) for one in asked] == [
        None if row["orders"] is None else row for row in found.to_pylist()
    ]
    newest = {}
    for part in rows:
        states = {}
        for row in part:
            states.setdefault((row["shop"], row["day"]), []).append(row["euros"])
        newest |= {key: (sum(euros), len(euros)) for key, euros in states.items()}
    assert [newest.get(one, (None, None)) for one in asked] == [
        (row["euros"], row["orders"]) for row in found.to_pylist()
    ]


def test_an_expired_row_does_not_exist():
    assert view_of(SOME, ttl_s=1, horizon_ms=1999).get("north") is not None
    assert view_of(SOME, ttl_s=1, horizon_ms=2000).get("north") is None
    assert (
        view_of(SOME, ttl_s=1, horizon_ms=2000).lookup({"shop": ["north"]})["euros"][0].as_py()
        is None
    )


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda view: view.lookup(["north"]), TypeError, "keys must be a RecordBatch.*got list"),
        (lambda view: view.lookup({"shop": ["a"]}), ValueError, "day is missing among shop"),
        (
            lambda view: view.lookup({"shop": ["a"], "day": ["one"]}),
            (ValueError, TypeError),
            "'day' of table 'totals'",
        ),
        (lambda view: view.get("a"), ValueError, "one value for each of shop, day.*got 'a'"),
        (lambda view: view.get(("a",)), ValueError, "one value for each of shop, day"),
        (lambda view: view.get({"shop": "a"}), ValueError, "^key must .* day is missing"),
        (
            lambda view: view.get(("a", 1.5)),
            ValueError,
            "^key must be of type int32 for 'day' .*, got float: 1.5 would become 1; convert",
        ),
        (
            lambda _: view_of([]).get(("a",)),
            ValueError,
            "type string .* got tuple: \\('a',\\) does not fit; pass the value itself",
        ),
    ],
)
def test_wrong_keys_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call(view_of([], key=["shop", "day"]))


class Looked:
    """The common part of bolts that look up a table: prepare() must find it."""

    outputs = FOUND
    uses = ("totals",)

    def prepare(self, context):
        assert self.tables["totals"].get("north")["euros"] == 5

    def found(self, n):
        row = self.tables["totals"].get("north" if n else "nowhere")
        return (n, None if row is None else row["euros"])


class LookingBolt(Looked, Bolt):
    def execute(self, tuple):
        self.collector.emit(self.found(tuple[0]), tuple)
        self.collector.ack(tuple)


class LookingBasicBolt(Looked, BasicBolt):
    def execute(self, tuple, collector):
        collector.emit(self.found(tuple[0]))


class LookingThreads(LookingBasicBolt):
    threads = 4


class LookingAsyncBolt(Looked, AsyncBolt):
    async def prepare(self, context):
        super().prepare(context)

    async def execute(self, tuple, collector):
        collector.emit(self.found(tuple[0]))

    async def cleanup(self):
        pass


class LookingBatchBolt(Looked, BatchBolt):
    def process(self, batch, out):
        shops = ["north" if n else "nowhere" for n in batch["n"].to_pylist()]
        found = self.tables["totals"].lookup({"shop": shops})
        columns = {"n": batch["n"], "euros": found["euros"]}
        out.emit(columns, parents=range(len(batch)))


@pytest.mark.parametrize(
    "bolt", [LookingBolt, LookingBasicBolt, LookingThreads, LookingAsyncBolt, LookingBatchBolt]
)
def test_bolts_of_all_shapes_look_up_from_prepare_on(bolt):
    executor = executor_for("b", bolt(), tables={"totals": view_of(SOME)})
    results = run(executor, [0, 1, 2], [0])
    executor.cleanup()
    assert not [failure for one in results for failure in one.failures]
    rows = [row for one in results for e in one.emissions for row in e.batch.to_pylist()]
    assert [(row["n"], row["euros"]) for row in rows] == [(0, None), (1, 5), (2, 5), (0, None)]


def test_a_table_that_a_bolt_does_not_use_is_refused_with_the_way_out():
    bolt = LookingBolt()
    with pytest.raises(
        KeyError,
        match=r"^table 'totals' is not in uses .* write uses = \['totals'\] in.* __init__ has",
    ):
        bolt.tables["totals"]
    executor_for("b", bolt, tables={"totals": view_of(SOME)})
    with pytest.raises(
        KeyError, match=r"'total' is not in uses of the bolt; did you mean 'totals'"
    ):
        bolt.tables["total"]


def test_changed_rows_have_the_columns_of_the_table_and_the_former_values():
    streams = change_streams(view_of([])._reader.shape)
    assert streams["upserts"].names == ["shop", "euros", "orders", "last"]
    assert streams["default"].names == [
        *streams["upserts"].names,
        "old_euros",
        "old_orders",
        "old_last",
    ]


class Spread(BatchFold):
    """The difference of the largest and the smallest value: a state of two columns."""

    columns = ("euros",)
    state = pa.schema([("low", pa.int64()), ("high", pa.int64())])

    def fold(self, rows, starts):
        parts = [rows["euros"][a:b].to_pylist() for a, b in itertools.pairwise(starts.tolist())]
        return pa.record_batch([[min(p) for p in parts], [max(p) for p in parts]], self.state)

    def merge(self, earlier, later):
        low = pc.min_element_wise(earlier["low"], later["low"])
        return pa.record_batch(
            [low, pc.max_element_wise(earlier["high"], later["high"])], self.state
        )

    def finish(self, states):
        return pc.subtract(states[1], states[0])


def test_a_recorded_shape_reads_the_same_rows_and_the_state_of_own_folds():
    kinds = {
        "count": count(),
        "sum": sum_of("euros"),
        "mean": mean_of("day"),
        "least": min_of("shop"),
        "last": latest("day", "euros"),
        "items": collect("day", 2),
    }
    rows = pa.Table.from_pylist(SOME[0], ROWS)
    shape = TableShape.of("totals", ROWS, ["shop", "day"], {**kinds, "own": Spread()}, 5.0)
    states = fold_rows(shape, [rows], 1000)
    read = read_shape("totals", *json.loads(json.dumps([recorded(shape), shape.structure()])))
    assert read.stored_schema == shape.stored_schema
    segment = TableSegment.open(write_segment(shape, states), read)
    stored = TableReader(read, [segment], 0).lookup(rows)
    told = finished(read, stored)
    assert told.drop("own") == finished(shape, states.take(_places(states, rows))).drop("own")
    assert told["own"].to_pylist() == [{"low": n, "high": n} for n in rows["euros"].to_pylist()]
    with pytest.raises(NotImplementedError):  # only the topology folds
        fold_rows(read, [rows], 0)


def test_a_value_is_read_whose_name_begins_with_that_of_another():
    rows = pa.Table.from_pylist(SOME[0], ROWS)
    value = {"n": count(), "n.euros": sum_of("euros"), "n.euros.mean": mean_of("euros")}
    shape = TableShape.of("totals", ROWS, "shop", value)
    states = fold_rows(shape, [rows], 1000)
    read = read_shape("totals", *json.loads(json.dumps([recorded(shape), shape.structure()])))
    assert finished(read, states) == finished(shape, states)


def _places(states, rows):
    found = [
        (s, d) for s, d in zip(states["shop"].to_pylist(), states["day"].to_pylist(), strict=True)
    ]
    return [found.index((row["shop"], row["day"])) for row in rows.to_pylist()]
