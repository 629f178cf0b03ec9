"""Tables against an oracle: each ACKED line counts once, whatever fails, is refused or dies."""

from __future__ import annotations

import collections
import pickle
import re
import tempfile
from datetime import UTC, date, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner
from worlds import STEPS, Replaying, Source, Upper, dying_at, rows_of, waiting_rows

from ackcore.cli.reporting import app_of
from ackcore.spark.base.errors import (
    CheckpointCorrupt,
    CheckpointForeign,
    CheckpointInUse,
    StateError,
)
from ackcore.spark.base.schemas import SinkFile
from ackcore.spark.checkpoint import table_records
from ackcore.spark.checkpoint.table_records import SegmentFiles, TableState
from ackcore.spark.engine import act
from ackcore.spark.engine.insist import SinkError
from ackcore.spark.inspect import table_reading
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.opening import open_store
from ackcore.spark.tables import table_fold
from ackcore.spark.tables.table_fold import TableFold
from ackcore.spark.tables.table_snapshots import TableSnapshot, snapshot_of
from ackcore.spark.tasks.row_files import RowFileWriter
from ackcore.tables import collect, count, folding, latest, max_of, sum_of, table_compaction
from ackcore.tables.folding import fold_rows
from ackcore.tables.table_segments import TableReader, TableSegment, write_segment
from ackcore.tables.table_shape import HASH_END, TableShape
from ackcore.topology import TopologyBuilder, TopologyError

UTC_TIMES = pa.timestamp("us", "UTC")
ROWS = pa.schema([("line", pa.string()), ("shop", pa.string()), ("size", pa.int32())])
VALUE = {"orders": count(), "euros": sum_of("size"), "lines": collect("line", 1000)}


class Shops(Upper):
    outputs = ROWS


class TableWorld(Replaying):
    """A world with a table; a line's first letter is its shop, its last character what it does."""

    def __init__(self, path, value=VALUE, *, table="totals", key="shop", ttl_s=None, **changes):
        self.of = {"key": key, "value": value, "ttl_s": ttl_s}
        self.table, self.fed = table, []
        super().__init__(path, {"max_attempts": 3}, **changes)

    def __post_init__(self):
        super().__post_init__()
        builder = TopologyBuilder()
        builder.spout("lines", Source())
        builder.bolt("upper", Shops()).shuffle("lines")
        builder.sink("upper", self)
        if self.table:
            builder.table(self.table, from_="upper", **self.of)
        self.topology = builder.build(backoff_s=10.0, **self.settings)

    def _file(self, work, rows, roots):
        lines, owners = [line for line, _ in rows], [root for _, root in rows]
        sizes = pa.array(map(len, lines), pa.int32())
        columns = [pa.array(lines, pa.string()), pa.array([x[:1] for x in lines], pa.string())]
        columns += [sizes, pa.array(owners, roots.type)]
        schema = ROWS.append(roots)
        file = RowFileWriter(work, schema, 0)
        file.write(pa.record_batch(columns, schema=schema))
        return SinkFile("upper", "default", *file.finish()[:2], file.nbytes)

    def take(self, number, lines=()):
        """Run a micro-batch, and check the table against the lines that are ACKED now."""
        self.fed += [line for line in lines if line not in self.fed]
        self.process(number, lines)
        self.check()

    def check(self):
        with self.driver()[0] as state:
            last = state.last_done
            waiting = [row["line"] for row in waiting_rows(state, last)]
            assert len(waiting) == len(set(waiting))
            gone = {*waiting, *self.parked}
            assert self.found(state, last) == oracle(one for one in self.fed if one not in gone)

    def found(self, state, number):
        """Return the lines by shop; check that the other values agree with them."""
        snapshot = pickle.loads(pickle.dumps(snapshot_of(state, self.topology, number)))
        table = snapshot[self.table]
        rows = rows_of(table)
        recorded = state.tables.of(number)[self.table]
        assert recorded.rows == len(rows) == len({row["shop"] for row in rows})
        for row in rows:
            assert row["orders"] == len(row["lines"])
            assert row["euros"] == sum(map(len, row["lines"]))
        return {row["shop"]: sorted(row["lines"]) for row in rows}


def oracle(lines):
    """Return the lines of each shop, of an ACKED record each."""
    found = collections.defaultdict(list)
    for line in lines:
        found[line[0].upper()].append(line.upper())
    return {shop: sorted(some) for shop, some in found.items()}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("ooo12fR")), max_size=9),
            st.lists(st.sampled_from(STEPS), max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=7,
    ),
    st.sampled_from([1, 3, 8]),
)
def test_a_table_has_each_acked_line_once_whoever_dies_when(batches, deltas):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_compaction, "MAX_DELTAS", deltas)
        patch.setattr(table_compaction, "DELTA_ROWS", 4)
        patch.setattr(folding, "RANGE_ROWS", 2)
        world = TableWorld(Path(path))
        for number, (lines, steps, replays) in enumerate(batches):
            world.now_ms += 15_000
            if replays:
                world.replay()
            named = [f"{shop}{number}.{i}.{does}" for i, (shop, does) in enumerate(lines)]
            world.fed += named
            for step in steps:
                with dying_at(step, number):
                    world.process(number, named)
            world.take(number, named)
        counts = world.drain(len(batches))
        world.check()
        assert counts.balanced
        assert not counts.waiting
        files = list(Path(path).glob("ackcore/tables/totals/*"))
        named = _named(world)
        assert {file.name for file in files} >= {Path(one).name for one in named}
        assert len(files) <= len(named) + 2 * deltas + 12


def test_the_rows_of_a_micro_batch_are_merged_and_written_by_ranges_of_hashes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(folding, "RANGE_ROWS", 30)
    world = TableWorld(tmp_path, key="line")
    lines = [f"a{number}o" for number in range(200)]
    merge, merged = TableFold._merge, []
    monkeypatch.setattr(TableFold, "_merge", lambda *of: merged.append(len(of[2])) or merge(*of))
    for number, some in enumerate((lines[:150], lines)):
        merged.clear()
        world.process(number, some)
        with world.driver()[0] as state:
            segments = state.tables.of(number)["totals"].changed
            rows = rows_of(snapshot_of(state, world.topology, number)["totals"])
        assert max(merged) < 60
        assert max(segment.rows for segment in segments) < 60
        assert sum(segment.rows for segment in segments) == sum(merged) == len(some)
        assert sorted(row["line"] for row in rows) == sorted(line.upper() for line in some)


def test_long_rows_of_a_table_are_read_some_at_a_time(tmp_path, monkeypatch):
    """Short new rows may need more than 2 GiB of the table, which do not fit into an array."""
    monkeypatch.setattr(folding, "RANGE_BYTES", 1 << 16)
    rows = pa.table({"k": range(200), "at": [1] * 200, "v": [f"{n:4000}" for n in range(200)]})
    shape = TableShape.of("t", rows.schema, "k", {"v": latest("at", "v"), "n": count()})
    short = pa.table({"k": range(200), "at": [0] * 200, "v": [""] * 200})
    files, state = SegmentFiles(LocalStore(tmp_path), 1), TableState(shape.structure(), 0)
    (tmp_path / "tables" / "t").mkdir(parents=True)
    merge, merged = TableFold._merge, []
    monkeypatch.setattr(TableFold, "_merge", lambda *of: merged.append(len(of[2])) or merge(*of))
    for number, new in enumerate((rows, short)):
        monkeypatch.setattr(table_fold, "read_all", lambda *_, new=new: [new])
        state = TableFold(files, shape, number, 0).folded(state, (), np.empty(0, np.int64))
    assert max(merged) < 40
    found = rows_of(TableSnapshot(shape, state.segments, 0, files))
    assert sorted((row["k"], row["v"], row["n"]) for row in found) == [
        (n, f"{n:4000}", 2) for n in range(200)
    ]


def test_a_row_that_a_table_counts_is_not_refused_after_a_crash(tmp_path):
    """All sinks took the row before the crash. A later constraint must not make its record dead."""
    world = TableWorld(tmp_path)
    world.fixed = {"a.R"}
    world.fed = ["a.R", "bxf"]
    with dying_at("acted", 0):  # the tables are recorded with the store of dead letters
        world.process(0, world.fed)
    world.fixed = set()
    world.take(0)
    assert (world.rows, [*world.parked]) == (["A.R"], ["bxf"])


def test_half_a_segment_goes_with_the_driver_that_died_writing_it(tmp_path):
    world = TableWorld(tmp_path)
    world.take(0, ["a0o"])
    (segment,) = (tmp_path / "ackcore/tables/totals").iterdir()
    half = segment.with_name(f".{segment.name}.0123456789abcdef.tmp")
    half.write_bytes(segment.read_bytes()[:9])
    world.take(1, ["a1o"])
    assert not half.exists()


def _named(world):
    with world.driver()[0] as state:
        return state.tables.files(0)


# The tests of windows have the other steps.
@pytest.mark.parametrize(
    "step",
    [
        *("in-sink", "refusals-closed", "tables-recorded"),
        *(pytest.param(step, marks=pytest.mark.faults) for step in ("folded", "acted")),
    ],
)
def test_a_driver_that_dies_in_a_bucket_as_on_a_disk(bucket, step):
    it = TableWorld(bucket)
    lines = ["a1.o", "b1.1", "a2.R", "b2.f"]
    it.take(0, lines[:2])
    with dying_at(step, 1):
        it.process(1, lines[2:])
    it.now_ms += 15_000
    it.take(1, lines[2:])
    it.take(2, ["a9.o"])


def test_a_row_of_several_records_counts_if_all_are_acked(tmp_path):
    world = TableWorld(tmp_path, shared_rows=[("A.O", "B.O"), ("D.O", "C.R")])
    world.process(0, ["a.o", "b.o", "c.R", "d.o"])
    with world.driver()[0] as state:
        assert world.found(state, 0) == {"A": ["A.O", "A.O&B.O"], "B": ["B.O"]}


def test_a_driver_that_was_replaced_changes_nothing(bucket):
    world = TableWorld(bucket)
    world.take(0, ["a1.o", "b1.o"])
    state, engine = world.driver()
    took = []

    def failpoint(name, n=None):
        if name == "folded" and not took:
            took.append(n)
            world.take(1, ["a2.o"])
            world.take(2, ["b2.o"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(act, "failpoint", failpoint)
        with state, pytest.raises(CheckpointInUse):
            engine.process(1, [("lines", "a2.o")])
    assert took == [1]
    world.take(3, ["c3.o"])
    world.take(4)


def test_a_table_costs_no_put_of_the_records(tmp_path, monkeypatch):
    puts = collections.Counter()

    def counting(name):
        real = getattr(LocalStore, name)

        def counted(store, key, *rest):
            puts[name, key.partition("/")[0]] += 1
            return real(store, key, *rest)

        monkeypatch.setattr(LocalStore, name, counted)

    counting("replace")
    counting("put")
    found = {}
    for table in ("totals", None):
        world = TableWorld(tmp_path / str(table), table=table)
        for number, lines in enumerate([["a1.o"], [], ["b1.o", "c.1"]]):
            puts.clear()
            world.process(number, lines)
            found[table, number] = dict(puts)
    for number in range(3):
        of_table = found["totals", number].pop(("put", "tables"), 0)
        assert of_table == (number != 1)
        assert found["totals", number] == found[None, number]
        assert sum(found[None, number].values()) >= 3


@pytest.mark.parametrize("harm", ["remove", "flip", "cut"])
def test_a_harmed_segment_ends_the_query_by_name(place, harm, monkeypatch):
    """Other readers raise, too: tasks, with pickled snapshots, DataFrames, the command line."""
    world = TableWorld(place)
    world.take(0, ["a1.o", "b1.o"])
    store = open_store(f"{place}/ackcore", "place")
    (key,) = [each.key for each in store.list("tables/totals")]
    data = bytearray(store.read(key).to_pybytes())
    data[len(data) // 2] ^= 1
    store.delete([key])
    if harm != "remove":
        store.put(key, bytes(data if harm == "flip" else data[:-8]))
    # As in another process.
    monkeypatch.setattr(table_records, "_CHECKED", table_records._Checked())
    told = rf"{key}.*(missing|{len(data) - 8} bytes|damaged|checksum)"
    with pytest.raises(CheckpointCorrupt, match=told):
        world.process(1, ["a2.o"])
    with world.driver()[0] as state:
        assert state.last_done == 0
        snapshot = pickle.loads(pickle.dumps(snapshot_of(state, world.topology, 0)["totals"]))
        with pytest.raises(CheckpointCorrupt, match=told):
            snapshot.reader()
        with pytest.raises(StateError, match=told):
            table_reading.rows_between(snapshot, 0, HASH_END)
    words = ["table", "show", str(place), "totals"]
    shown = CliRunner().invoke(app_of(["checkpoint_commands"]), words)
    assert shown.exit_code != 0
    assert re.search(told, shown.output, re.DOTALL)


def test_a_table_is_read_where_lists_lag(bucket, s3):
    world = TableWorld(bucket)
    s3.lagging = True
    world.take(0, ["a1.o"])
    found = table_reading.read_table(bucket, "totals", lambda it: table_reading.first_rows(it, 9))
    assert [row["orders"] for row in found.to_pylist()] == [1]


def test_a_reader_gets_the_newer_table_if_the_query_deletes_the_older(tmp_path, monkeypatch):
    monkeypatch.setattr(table_compaction, "DELTA_ROWS", 0)
    world = TableWorld(tmp_path)
    world.take(0, ["a0.o", "b0.o"])
    calls = []

    def use(table):
        calls.append(table)
        for number in (1, 2, 3) if len(calls) == 1 else ():
            world.take(number, [f"a{number}.o"])
        return table_reading.rows_of_key(table, ["A"]).to_pylist()

    (row,) = table_reading.read_table(tmp_path, "totals", use)
    assert (row["orders"], len(calls)) == (4, 2)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.int64(), "-5", -5),
        (pa.bool_(), "True", True),
        (pa.date32(), "2026-01-02", date(2026, 1, 2)),
        (pa.timestamp("us"), "2026-01-02 09:00:00", datetime(2026, 1, 2, 9)),
        (UTC_TIMES, "2026-01-02T10:00:00+01:00", datetime(2026, 1, 2, 9, tzinfo=UTC)),
        (pa.string(), "NULL", "NULL"),
        (pa.string(), r"\N", None),
        (pa.timestamp("us"), r"\N", None),
        (UTC_TIMES, "2026-01-02", re.compile(r"like '1970-01-01 00:00:00.000000Z', or \\N for")),
        (pa.bool_(), "yes", re.compile("of type bool for 'key', got 'yes'; write it like 'false'")),
        (pa.time64("us"), "09:00:00", re.compile(r"filter the DataFrame of ackcore.spark.table")),
    ],
)
def test_keys_on_the_command_line_are_texts_of_their_types(kind, text, value):
    refused = value if isinstance(value, re.Pattern) else None
    schema = pa.schema([("shop", pa.string()), ("key", kind)])
    shape = TableShape.of("t", schema, ["shop", "key"], {"n": count()})
    key = pa.array([None if refused else value], kind)
    rows = fold_rows(shape, [pa.table([["north"], key], schema=schema)], 0)
    segment = TableSegment.open(write_segment(shape, rows), shape)
    table = SimpleNamespace(shape=shape, reader=lambda: TableReader(shape, [segment], 0))
    if refused:
        with pytest.raises(ValueError, match=refused):
            table_reading.rows_of_key(table, ["north", text])
    else:
        assert table_reading.rows_of_key(table, ["north", text])["key"].to_pylist() == [value]
        assert not len(table_reading.rows_of_key(table, ["south", text]))


def test_rows_end_after_their_ttl(tmp_path):
    world = TableWorld(tmp_path, ttl_s=100)
    world.take(0, ["a1.o", "b1.o"])
    world.now_ms += 60_000
    world.take(1, ["a2.o"])
    world.now_ms += 60_000
    world.process(2)
    with world.driver()[0] as state:
        reader = snapshot_of(state, world.topology, 2)["totals"].reader()
        assert [row["shop"] for table in reader.scan() for row in table.to_pylist()] == ["A"]


def test_values_are_added_and_removed_and_other_changes_refused(tmp_path, caplog):
    TableWorld(tmp_path).take(0, ["a1.o", "b1.o"])

    def opened(*of, accept=True, **changes):
        world = TableWorld(tmp_path, *of, **changes)
        state, engine = world.driver(accept_changes=accept)
        return world, state, engine

    more = {**VALUE, "most": max_of("size")}
    for value, changes, text in (
        (VALUE, {"key": ["shop", "line"]}, "had the key shop: string, and has shop: string, line"),
        (VALUE, {"ttl_s": 5}, "had ttl_s=None, and has 5"),
        (
            {"orders": sum_of("size")},
            {},
            r"value 'orders' was count\(\) of int64, and is sum_of\(size\) of int64 now: its "
            "states cannot be converted. Give the value another name",
        ),
    ):
        for accept in (False, True):  # no refusal advises what the next one refuses
            with pytest.raises(CheckpointForeign, match=text):
                opened(value, accept=accept, **changes)
    with pytest.raises(CheckpointForeign) as caught:
        opened({"orders": count(), "most": max_of("size")}, accept=False)
    assert "'most' is new" in str(caught.value)
    assert str(caught.value).endswith(
        "start with accept_changes=True: records that wait for a retry then run through the "
        "changed one. The next micro-batch then changes stored rows: 'euros', 'lines' of "
        "table 'totals' deleted "
        "(2 rows); 'most' of table 'totals' empty (2 rows)"
    )
    world, state, engine = opened(more)
    with state:
        engine.process(1, [("lines", "a2.oo")])
        rows = rows_of(snapshot_of(state, world.topology, 1)["totals"])
        assert {row["shop"]: (row["orders"], row["most"]) for row in rows} == {
            "A": (2, 5),
            "B": (1, None),
        }
    caplog.clear()
    world, state, engine = opened({"orders": count()})
    assert not caplog.records
    with state:
        engine.process(2, [])
    (logged,) = caplog.records
    assert logged.levelname == "WARNING"
    assert "'euros', 'lines', 'most' of table 'totals' deleted (2 rows)" in logged.getMessage()
    # The names are free again, also for another type: removed states are not read.
    again = {"orders": count(), "most": max_of("line"), "euros": sum_of("size")}
    world, state, engine = opened(again)
    with state:
        engine.process(3, [("lines", "a3.o")])
    with dying_at("decided", 4):
        _, state, engine = opened(again)
        with state:
            engine.process(4, [("lines", "c.o")])
    with pytest.raises(CheckpointForeign, match="has changed, and micro-batch 4 was decided"):
        opened({**again, "new": count()})
    after = "Run the former topology until it has finished micro-batch 4. Then give the table"
    with pytest.raises(CheckpointForeign, match=after):
        opened(again, key="line")
    world, state, engine = opened(again)
    with state:
        engine.process(4, [])
        rows = rows_of(snapshot_of(state, world.topology, 4)["totals"])
    assert {row["shop"]: (row["orders"], row["most"], row["euros"]) for row in rows} == {
        "A": (3, "A3.O", 4),
        "B": (1, None, None),
        "C": (1, "C.O", 3),
    }
    # Without the table: its files are deleted once no record names them.
    world, state, engine = opened(VALUE, table=None)
    with state:
        for number in (5, 6, 7):
            engine.process(number, [])
    assert "table 'totals' deleted (3 rows with 'orders', " in caplog.text
    with pytest.raises(ValueError, match="got 'totals'; there are no tables"):
        table_reading.read_table(tmp_path, "totals", rows_of)
    assert not list(tmp_path.glob("ackcore/tables/**/*.arrow"))
    opened(VALUE, key="line")[1].close()  # the name is free


def test_a_fold_that_fails_ends_the_query_and_is_repeated_by_the_next(tmp_path):
    world = TableWorld(tmp_path)
    world.take(0, ["a1.o"])
    with pytest.MonkeyPatch.context() as patch:

        def failing(*of):
            raise OverflowError("too large")

        patch.setattr("ackcore.spark.tables.table_fold.merge_states", failing)
        with pytest.raises(SinkError, match=r"table 'totals' failed .* too large"):
            world.process(1, ["a2.o"])
    world.take(1, ["a2.o"])


@pytest.mark.parametrize("value", [{"orders": count()}, None])
def test_a_value_or_table_that_cannot_be_folded_can_be_removed(tmp_path, value):
    """Its micro-batch is decided, and could never finish."""
    TableWorld(tmp_path).take(0, ["a1.o"])
    with dying_at("decided", 1):
        TableWorld(tmp_path).process(1, ["a2.o"])
    way_out = "because a table or value fails, run it without that table or value, with accept_cha"
    with pytest.raises(CheckpointForeign, match=way_out):
        TableWorld(tmp_path, {"orders": count(), "n": count()}).driver(accept_changes=True)
    world = TableWorld(tmp_path, value, table=value and "totals")
    world.process(1, accept_changes=True)
    with world.driver()[0] as state:
        found = snapshot_of(state, world.topology, 1)
        rows = {name: rows_of(table) for name, table in found.items()}
    assert rows == ({"totals": [{"shop": "A", "orders": 2}]} if value else {})


def with_shops():
    builder = TopologyBuilder()
    builder.spout("spout", Source())
    builder.bolt("upper", Shops()).shuffle("spout")
    return builder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"from_": "spout"}, "table 't' reads spout 'spout', whose columns"),
        ({"from_": "uper"}, "reads 'uper', which is not declared; did you mean"),
        ({"stream": "x"}, "table 't' reads stream 'x' of 'upper'"),
        ({"key": "shap"}, "table 't': key must name a column"),
        ({"value": {"n": sum_of("line")}}, "table 't': value\\['n'\\] must read a"),
        ({"name": "upper"}, "2 components and tables are named 'upper'"),
        ({"name": "a/b"}, "the name of table 'a/b' must be"),
    ],
)
def test_a_wrong_table_is_refused_by_name(changes, text):
    builder = with_shops()
    of = {"name": "t", "from_": "upper", "key": "shop", "value": {"n": count()}, **changes}

    def declared():
        builder.table(of.pop("name"), **of)
        return builder.build()

    with pytest.raises(TopologyError, match=text):
        declared()


def test_a_table_is_drawn():
    builder = with_shops()
    builder.table("t", from_="upper", key=["shop"], value={"last": latest("size", "line")})
    topology = builder.build()
    assert "\n  table t: key (shop), last=latest(size, line)\n" in topology.explain()
    assert topology.structure["tables"]["t"]["from"] == ["upper", "default"]
