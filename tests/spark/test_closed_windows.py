"""Closed windows that bolts and tables read, against an oracle, and tables fed by a spout."""

from __future__ import annotations

import collections
import json
import sys
import tempfile
from contextlib import suppress
from contextvars import Context
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark import cloudpickle
from worlds import STEPS, Killed, killed

from ackcore import testing
from ackcore.calls import Reject
from ackcore.kafka import KafkaSpout
from ackcore.spark import (
    PlannedSource,
    Sink,
    SinkRejects,
    dead_letters,
    replay,
    run_batch,
    start,
    table,
)
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse
from ackcore.spark.base.sources import kept_schemas
from ackcore.spark.checkpoint.state import State
from ackcore.spark.checkpoint.table_records import SegmentFiles
from ackcore.spark.engine import act, batch, runs, table_changes
from ackcore.spark.engine.closed_rows import read_closed
from ackcore.spark.listeners import Listeners
from ackcore.spark.tables.table_snapshots import TableSnapshot, snapshot_of
from ackcore.tables import collect, count, folding, session, sum_of, tumbling
from ackcore.testing.local_runs import LocalRuns, _rows_of
from ackcore.testing.task_kills import Kills
from ackcore.topology import BasicBolt, TopologyBuilder, TopologyError
from ackcore.topology.explain import draw

TS = pa.timestamp("us", tz="UTC")
ORDERS = pa.schema([("n", pa.int64()), ("shop", pa.string()), ("at", TS), ("does", pa.string())])
HOUR, DAY = 10, 40
SINKS, OF_BOLT = ("take", "hours.closed"), ("enrich", "days.closed")
#: The executions of `Enrich`: micro-batch, shop, start and attempt.  Tasks run in this process.
RAN: list[tuple[int, str, int, int]] = []


def seconds(time):
    return int(time.timestamp())


class Take(BasicBolt):
    outputs = ORDERS

    def execute(self, tuple, collector):
        if tuple["does"] == "fails" and tuple.attempt == 0:
            raise TimeoutError("later")
        collector.emit(tuple.values)


class TakeJson(Take):
    def execute(self, tuple, collector):
        n, shop, second, does = json.loads(tuple["value"])
        if does == "fails" and tuple.attempt == 0:
            raise TimeoutError("later")
        collector.emit((n, shop, datetime.fromtimestamp(second, UTC), does))


class Enrich(BasicBolt):
    """Adds a column to a closed hour. It fails or dies by the numbers of its orders: `fate`."""

    outputs = pa.schema(
        [("shop", pa.string()), ("begin", TS), ("ns", pa.list_(pa.int64())), ("does", pa.string())]
    )

    def __init__(self, mended=False):
        self.mended = mended

    def prepare(self, context):
        self.number = context.batch_id

    def execute(self, tuple, collector):
        assert tuple.component == "hours.closed"
        key = tuple["shop"], seconds(tuple["window_start"])
        RAN.append((self.number, *key, tuple.attempt))
        assert tuple.message_id.startswith(f'["{tuple["shop"]}", "')
        does = fate(tuple["ns"])
        if does == "dies" and not self.mended:
            raise Reject("no")
        if does == "fails" and tuple.attempt == 0:
            raise TimeoutError("later")
        collector.emit((tuple["shop"], tuple["window_start"], tuple["ns"], does))


def fate(ns):
    """Return what happens to a closed hour with these orders; one in four fails at first."""
    return ("fails", "ok", "ok", "dies" if sum(ns) % 3 else "refused")[sum(ns) % 4]


class Rows(Sink):
    """A sink that replaces the rows of a micro-batch, and refuses some."""

    def __init__(self):
        self.written: dict[int, list[dict]] = {}

    def write(self, accepted):
        rows = [row for part in accepted.record_batches() for row in part.to_pylist()]
        bad = [row for row in rows if row.get("does") == "refused"]
        kept = [row for row in rows if row not in bad]
        known = self.written.setdefault(accepted.batch_id, kept)
        assert known == kept, "a sink gets the same rows in all calls"
        act.failpoint("in-sink", accepted.batch_id)
        if not bad:
            return None
        names = pa.schema([Enrich.outputs.field(name) for name in ("shop", "begin")])
        return SinkRejects(pa.Table.from_pylist(bad, names), "refused")

    @property
    def rows(self):
        return [row for some in self.written.values() for row in some]


def fed(ran, rows):
    """Return a run with rows of its own in each micro-batch, by number."""

    def parts(number):
        table = pa.Table.from_pylist(rows.get(number, []), ORDERS)
        middle = len(table) // 2
        return [("orders", one.combine_chunks()) for one in (table[:middle], table[middle:])]

    ran._parts, ran._kind = parts, "stream"
    return ran


def topology_of(sinks, source=None, *, bolt=True, late_s=0, take=None, **chosen):
    builder = TopologyBuilder()
    builder.spout("orders", testing.Source(ORDERS) if source is None else source)
    builder.bolt("take", take or Take()).shuffle("orders")
    hours = tumbling(HOUR, "at", late_s=late_s)
    value = {"ns": collect("n", 99)}
    builder.table("hours", from_="take", key="shop", value=value, window=hours)
    if bolt:
        builder.bolt("enrich", Enrich()).fields("hours.closed", "shop")
        days = tumbling(DAY, "begin")
        value = {"ns": collect("begin", 99)}
        builder.table("days", from_="enrich", key="shop", value=value, window=days)
        value = {"days": count()}
        builder.table("ever", from_="days.closed", key="shop", value=value)
    for name, writer in sinks.items():
        builder.sink(name, writer)
    return builder.build(**{"max_attempts": 3, "backoff_s": 8.0} | chosen)


class Model:
    """A stream whose drivers are killed, and an oracle with its records, rows and dead letters."""

    def __init__(self, path, **of):
        RAN.clear()
        self.path, self.number = path, 0
        self.sinks = {name: Rows() for name in (*SINKS, *OF_BOLT)}
        self.given, self.left = {}, 0
        self.declare(**of)

    def declare(self, *, bolt=True, **of):
        sinks = {name: self.sinks[name] for name in (*SINKS, *(OF_BOLT if bolt else ()))}
        self.topology = topology_of(sinks, bolt=bolt, **of)
        empty = {"orders": ORDERS.empty_table()}
        ran = LocalRuns(self.topology, empty, 2, Kills({}, {}), Listeners([]))
        ran._topology = self.topology
        self.runs = fed(ran, self.given)

    def change(self, **of):
        """Start another topology on the checkpoint."""
        self.declare(**of)
        sources = kept_schemas(self.runs._schemas, self.topology)
        of = {"sources": sources, "kind": "stream", "accept_changes": True}
        with State.open(self.path / "checkpoint", self.topology, **of) as state:
            state.record_topology()

    def take(self, rows, stops=()):
        """Take a micro-batch, in which drivers are killed, or paused while another takes over."""
        self.given[self.number] = rows
        for stop in stops:
            with pytest.MonkeyPatch.context() as patch, suppress(Killed, CheckpointInUse):
                for module in (act, batch, runs, table_changes):
                    patch.setattr(module, "failpoint", self.stopping_at(stop, self.number))
                self.process()
        self.process()
        self.number += 1
        self.runs._wait(3)

    def stopping_at(self, stop, number):
        is_paused, left = stop.startswith("paused at "), [stop.removeprefix("paused at ")]

        def failpoint(name, n=None):
            if n != number or name not in left:
                return
            if not is_paused:
                raise killed(name)
            left.clear()
            (self.path / "checkpoint/ackcore/lock").unlink()
            Context().run(self.process)

        return failpoint

    def process(self):
        with self.runs.engine(self.path) as engine:
            engine.process(self.number, [])
            counts = engine.counts
            assert counts.balanced
            self.left = counts.waiting + engine.has_closed_rows
            self.kept = self.tables(engine.state)

    def tables(self, state):
        found = snapshot_of(state, self.topology, state.last_done)
        return {name: _rows_of(table).to_pylist() for name, table in found.items()}

    def judge(self):
        """Compare with a fold over the rows that were ACKED."""
        dead = collections.defaultdict(list)
        for one in self.runs._dead:
            if one not in dead[one.spout]:
                dead[one.spout].append(one)
        lost = {one.payload["n"] for one in dead["orders"]}
        taken = [row for row in self.sinks["take"].rows if row["n"] not in lost]
        assert sorted([*lost, *(row["n"] for row in taken)]) == sorted(
            row["n"] for some in self.given.values() for row in some
        )
        hours = collections.defaultdict(list)
        for row in taken:
            hours[row["shop"], seconds(row["at"]) // HOUR * HOUR].append(row["n"])
        closed = {_key(row): sorted(row["ns"]) for row in self.sinks["hours.closed"].rows}
        still = {_key(row): sorted(row["ns"]) for row in self.kept["hours"]}
        assert {key: sorted(ns) for key, ns in hours.items()} == closed | still
        assert len(closed) + len(still) == len(self.sinks["hours.closed"].rows) + len(still)
        assert not closed.keys() & still.keys()

        letters = {_key(one.payload): one for one in dead["hours.closed"]}
        enriched = {(row["shop"], seconds(row["begin"])): row for row in self.sinks["enrich"].rows}
        assert len(enriched) == len(self.sinks["enrich"].rows)
        assert not letters.keys() & enriched.keys()
        assert letters.keys() | enriched.keys() == closed.keys()
        for key, ns in closed.items():
            does = fate(ns)
            letter = letters.get(key)
            if letter is not None:
                kind = {"dies": "Reject", "refused": "Refused"}.get(does, "Late")
                assert letter.error_type in (kind, "Late")
                assert sorted(letter.payload["ns"]) == ns
            else:
                assert does in ("ok", "fails")
                assert sorted(enriched[key]["ns"]) == ns
            assert (key, 1) in {(one[1:3], one[3]) for one in RAN} or does != "fails"
        first = {}
        for number, shop, begin, _ in RAN:
            first.setdefault((shop, begin), number)
        for number, rows in self.sinks["hours.closed"].written.items():
            for row in rows:
                assert first[_key(row)] == number + 1, "the next micro-batch reads closed rows"

        days = collections.defaultdict(list)
        for shop, begin in enriched:
            days[shop, begin // DAY * DAY].append(begin)
        found = [*self.sinks["days.closed"].rows, *self.kept["days"]]
        told = {_key(row): sorted(map(seconds, row["ns"])) for row in found}
        assert len(told) == len(found)
        assert told == {key: sorted(starts) for key, starts in days.items()}
        ever = collections.Counter(row["shop"] for row in self.sinks["days.closed"].rows)
        assert {row["shop"]: row["days"] for row in self.kept["ever"]} == ever


def _key(row):
    return row["shop"], seconds(row["window_start"])


RECORD = st.tuples(
    st.sampled_from("ab"), st.integers(0, 25), st.sampled_from(["ok", "ok", "fails"])
)
STOP = st.sampled_from([*STEPS, *(f"paused at {step}" for step in STEPS)])
TURN = st.tuples(st.lists(RECORD, max_size=6), st.lists(STOP, max_size=2))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(TURN, min_size=3, max_size=7), st.sampled_from([0, 12]), STOP)
def test_a_closed_window_is_a_record_that_is_acked_once_or_dead(turns, late_s, last):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        model, n = Model(Path(path), late_s=late_s), 0
        for at, (some, stops) in enumerate([*turns, ([("a", 0, "ok")], [last])]):
            rows = []
            for shop, ago, does in some:
                n += 1
                time = datetime.fromtimestamp(1000 + 17 * at - ago, UTC)
                rows.append({"n": n, "shop": shop, "at": time, "does": does})
            model.take(rows, stops)
        while model.left:
            model.take([], [last])
        model.judge()


def order(n, shop, second, does="ok"):
    return {"n": n, "shop": shop, "at": datetime.fromtimestamp(second, UTC), "does": does}


def orders(numbers):
    """Orders of two shops, of which one in five fails at first."""
    return [order(n, "ab"[n % 2], 7 * n, "fails" if n % 5 == 0 else "ok") for n in numbers]


def check_days(kept, days, ever):
    """Compare days with the hours that a bolt has passed on; return the days."""
    found = {_key(row): sorted(map(seconds, row["ns"])) for row in days}
    assert len(found) == len(days) > 1
    assert found == {
        day: sorted(start for one, start in kept if (one, start // DAY * DAY) == day)
        for day in found
    }
    assert ever == collections.Counter(shop for shop, _ in found)
    return found


@pytest.mark.parametrize("careful_after", [2, 0])  # with 0, new rows are read from a snapshot
def test_a_bolt_may_be_added_and_is_removed_when_no_closed_rows_wait(tmp_path, careful_after):
    of = {"careful_after": careful_after}
    model = Model(tmp_path, **of)
    model.take([order(1, "a", 3), order(2, "b", 21)])
    assert model.left
    with pytest.raises(CheckpointForeign, match="to read 1 row of closed windows of"):
        model.change(bolt=False, **of)
    model.declare(**of)
    model.take([])
    assert [row["ns"] for row in model.sinks["enrich"].rows] == [[1]]
    model.change(bolt=False, **of)
    model.take([order(5, "a", 35)])
    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        patch.setattr(batch, "failpoint", model.stopping_at("planned", model.number))
        model.process()
    # The last micro-batch has closed the hour of order 2, and the next one is planned.
    model.change(**of)
    model.take([])
    assert [row["ns"] for row in model.sinks["enrich"].rows] == [[1], [2]]
    model.take([order(4, "a", 53)])
    model.take([])
    assert [row["ns"] for row in model.sinks["enrich"].rows] == [[1], [2], [5]]


def test_a_task_opens_only_the_segments_of_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(folding, "RANGE_ROWS", 10)
    model = Model(tmp_path)
    model.take([order(n, f"shop {n}", 3) for n in range(60)])
    model.take([order(60, "a", 21)])
    with model.runs.engine(tmp_path) as engine:
        closed = engine.state.tables.of(1)["hours"].closed
        files = engine.state.segments
    assert len(closed) > 3
    shape = model.topology.tables["hours"].shape
    snapshot = TableSnapshot(shape, closed, 0, files)
    opened, shops = [], []
    reading = SegmentFiles.read
    monkeypatch.setattr(
        SegmentFiles, "read", lambda self, of: (opened.append(of), reading(self, of))[1]
    )
    for task in range(3):
        batches = [*read_closed(snapshot, 3, iter([pa.record_batch({"id": [task]})]))]
        shops += [shop for batch in batches for shop in batch["shop"].to_pylist()]
        assert sum(map(len, batches)) == 20
    assert sorted(shops) == sorted(f"shop {n}" for n in range(60))
    assert len(opened) <= len(closed) + 2, "two segments may be shared by two tasks"


def test_at_the_end_of_a_run_closed_windows_pass_through_bolts_and_tables():
    RAN.clear()
    topology = topology_of(dict.fromkeys((*SINKS, *OF_BOLT), print))
    assert "──▶ spout hours.closed, in the next micro-batch" in topology.explain()
    assert "<title>table hours to hours.closed: </title>" in draw(topology.structure)
    given = orders(range(1, 20))
    ran = testing.run(topology, {"orders": given}, kills={"enrich": [2, 5]}).check(dead=3)
    hours = {_key(row): row["ns"] for row in ran.outputs["hours.closed"]}
    assert sorted(n for ns in hours.values() for n in ns) == [*range(1, 20)]
    assert len(hours) == len(ran.outputs["hours.closed"])
    dies = {key for key, ns in hours.items() if fate(ns) == "dies"}
    assert dies == {_key(one.payload) for one in ran.dead}
    assert {(one.spout, one.component, one.error_type) for one in ran.dead} == {
        ("hours.closed", "enrich", "Reject")
    }
    kept = [(row["shop"], seconds(row["begin"])) for row in ran.outputs["enrich"]]
    assert sorted(kept) == sorted(hours.keys() - dies)
    assert {(shop, start) for _, shop, start, attempt in RAN if attempt} == {
        key for key, ns in hours.items() if fate(ns) == "fails"
    }
    ever = {row["shop"]: row["days"] for row in ran.tables["ever"].to_pylist()}
    days = check_days(kept, ran.outputs["days.closed"], ever)
    assert days.keys() == {(shop, start // DAY * DAY) for shop, start in kept}
    assert not ran.tables["hours"].num_rows
    assert not ran.tables["days"].num_rows


class Times(BasicBolt):
    """Emits the time of an order or of a closed window; none if ``silent``."""

    outputs = pa.schema([("shop", pa.string()), ("at", TS)])

    def __init__(self, silent=False):
        self.silent = silent

    def execute(self, tuple, collector):
        if not self.silent:
            at = tuple["at"] if tuple.component == "orders" else tuple["window_start"]
            collector.emit((tuple["shop"], at))


@pytest.mark.parametrize("silent", [False, True])
def test_windows_close_at_the_end_whether_or_not_windows_before_them_have_rows(silent):
    builder = TopologyBuilder()
    builder.spout("orders", testing.Source(ORDERS))
    builder.bolt("first", Times(silent)).shuffle("orders")
    builder.bolt("second", Times()).shuffle("orders").shuffle("hours.closed")
    of = {"key": "shop", "value": {"n": count()}}
    # Declared in the other order: a table is folded after those before it.
    builder.table("both", from_="second", window=tumbling(DAY, "at"), **of)
    builder.table("hours", from_="first", window=session(HOUR, "at"), **of)
    builder.sink("both.closed", print)
    ran = testing.run(builder.build(), {"orders": [order(n, "a", 12 * n) for n in range(6)]})
    ran.check()
    counted = [(seconds(row["window_start"]), row["n"]) for row in ran.outputs["both.closed"]]
    assert sorted(counted) == ([(0, 4), (DAY, 2)] if silent else [(0, 8), (DAY, 4)])
    assert not ran.dead


@pytest.fixture
def _sent_by_value():
    """Bolts are sent to Spark's workers with their classes: workers cannot import this module."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.spark
@pytest.mark.usefixtures("_sent_by_value")
@pytest.mark.parametrize("spark", ["connect"], indirect=True)
def test_run_batch_ends_when_closed_windows_are_acked_or_dead_and_replays_them(spark, tmp_path):
    twice = 2 * [tuple(one.values()) for one in orders(range(1, 20))]
    frame = spark.createDataFrame(twice, "n long, shop string, at timestamp, does string")
    closed, enriched = Rows(), Rows()

    def topology(bolt):
        builder = TopologyBuilder()
        builder.spout("orders", frame, dedup="n", within_s=86_400)
        builder.bolt("take", Take()).shuffle("orders")
        value = {"ns": collect("n", 99)}
        of = {"value": value, "window": tumbling(HOUR, "at")}
        builder.table("hours", from_="take", key="shop", **of)
        builder.sink("hours.closed", closed)
        builder.bolt("enrich", bolt, parallelism=2).shuffle("hours.closed")
        builder.sink("enrich", enriched)
        builder.table("ever", from_="hours.closed", key="shop", value={"n": count()})
        return builder.build(backoff_s=0.1)

    checkpoint = tmp_path / "checkpoint"

    def ended(bolt):
        counts = run_batch(topology(bolt), spark, checkpoint)
        kept = [(row["shop"], seconds(row["begin"])) for row in enriched.rows]
        ever = table(checkpoint, "ever", spark).collect()
        assert {row.shop: row.n for row in ever} == collections.Counter(shop for shop, _ in kept)
        return counts, sorted(kept)

    counts, kept = ended(Enrich())
    hours = {_key(row): row["ns"] for row in closed.rows}
    assert sorted(n for ns in hours.values() for n in ns) == [*range(1, 20)]
    fates = {key: fate(ns) for key, ns in hours.items()}
    assert kept == sorted(key for key, does in fates.items() if does in ("ok", "fails"))
    account = counts.spouts["hours.closed"]
    assert (account.records, account.dead) == (len(hours), len(hours) - len(kept))
    assert account.retried == list(fates.values()).count("fails")
    letters = dead_letters(checkpoint, spark).collect()
    kinds = [{"dies": "Reject", "refused": "Refused"}.get(does) for does in fates.values()]
    died = [("hours.closed", kind) for kind in kinds if kind]
    assert sorted((one.spout, one.error_type) for one in letters) == sorted(died)
    assert all(sorted(one.payload.ns) in hours.values() for one in letters)
    replay(checkpoint, spark, spout="hours.closed", where="error_type = 'Reject'")
    counts, kept = ended(Enrich(mended=True))
    assert kept == sorted(key for key, does in fates.items() if does != "refused")
    assert counts.spouts["hours.closed"].resolved == list(fates.values()).count("dies") > 0


@pytest.mark.spark
@pytest.mark.usefixtures("_sent_by_value")
@pytest.mark.parametrize("kind", ["frame", "kafka"])
def test_a_stream_reads_closed_windows_although_no_source_has_new_rows(
    spark, tmp_path, kind, request
):
    """From files, and from Kafka with a checkpoint in a bucket."""
    given = orders(range(1, 20))
    checkpoint, source, take = tmp_path / "checkpoint", None, None
    if kind == "frame":
        (tmp_path / "orders").mkdir()
        pq.write_table(pa.Table.from_pylist(given, ORDERS), tmp_path / "orders/0.parquet")
        schema = "n long, shop string, at timestamp, does string"
        source = spark.readStream.schema(schema).parquet(str(tmp_path / "orders"))
    else:
        kafka = request.getfixturevalue("mock_kafka")
        checkpoint = f"{request.getfixturevalue('bucket')}/checkpoint"
        request.getfixturevalue("tasks_reach")
        kafka.create_topic("orders")
        values = [[one["n"], one["shop"], seconds(one["at"]), one["does"]] for one in given]
        kafka.produce("orders", [json.dumps(value).encode() for value in values])
        of = {"bootstrap_servers": kafka.bootstrap_servers, "group_id": "g", "start": "earliest"}
        source, take = KafkaSpout("orders", **of), TakeJson()
    sinks = {name: Rows() for name in (*SINKS, *OF_BOLT)}
    topology = topology_of(sinks, source, backoff_s=0.1, take=take)
    query = start(topology, spark, checkpoint)
    query.process_all_available()
    query.stop()
    hours = {_key(row): row["ns"] for row in sinks["hours.closed"].rows}
    assert len(hours) == len(sinks["hours.closed"].rows) == 18
    kept = [(row["shop"], seconds(row["begin"])) for row in sinks["enrich"].rows]
    assert sorted(kept) == sorted(key for key, ns in hours.items() if fate(ns) in ("ok", "fails"))
    ever = {row.shop: row.days for row in table(checkpoint, "ever", spark).collect()}
    days = check_days(kept, sinks["days.closed"].rows, ever)
    assert query.counts.spouts["days.closed"].acked == len(days)


class Planned(PlannedSource):
    schema = ORDERS

    def plan(self, previous):
        return None

    def read(self, spark, plan):
        raise NotImplementedError


def test_a_table_is_fed_by_a_planned_spout_with_the_acked_records():
    builder = TopologyBuilder()
    builder.spout("orders", Planned())
    builder.bolt("take", Take()).shuffle("orders")
    value = {"ns": collect("n", 99)}
    builder.table("direct", from_="orders", key="shop", value=value)
    builder.table("hours", from_="orders", key="shop", value=value, window=tumbling(HOUR, "at"))
    builder.sink("hours.closed", print)
    topology = builder.build(max_attempts=2)
    given = [order(n, "a", 5 * n, ("ok", "fails")[n % 2]) for n in range(5)]
    ran = testing.run(topology, {"orders": [*given, {**given[0], "n": 9, "at": None}]})
    ran.check(dead=1)
    assert [sorted(row["ns"]) for row in ran.tables["direct"].to_pylist()] == [[0, 1, 2, 3, 4]]
    hours = {seconds(row["window_start"]): sorted(row["ns"]) for row in ran.outputs["hours.closed"]}
    assert hours == {0: [0, 1], 10: [2, 3], 20: [4]}
    assert [(one.payload["n"], one.error_type) for one in ran.dead] == [(9, "NoTime")]


@pytest.mark.parametrize(
    ("window", "reads", "text"),
    [
        (None, "hours.closed", "bolt 'second' reads the closed windows of table 'hours', which ha"),
        (
            HOUR,
            "days.closed",
            "reads 'days.closed', which is not declared; did you mean 'hours.closed'?",
        ),
        (HOUR, "first", "second -> hours.closed -> second; its windows would never all close"),
    ],
)
def test_readers_of_closed_windows_that_do_not_fit_are_refused_by_name(window, reads, text):
    builder = TopologyBuilder()
    builder.spout("orders", testing.Source(ORDERS))
    builder.bolt("first", Times()).shuffle("orders")
    second = builder.bolt("second", Times()).shuffle(reads)
    from_ = "first"
    if reads == "first":
        second.shuffle("hours.closed")
        from_ = "second"
    window = None if window is None else tumbling(window, "at")
    builder.table("hours", from_=from_, key="shop", value={"n": count()}, window=window)
    builder.sink("second", print)
    with pytest.raises(TopologyError) as raised:
        builder.build()
    assert text in str(raised.value)
    assert len(raised.value.problems) == 1


def test_fields_of_closed_windows_are_checked():
    builder = TopologyBuilder()
    builder.spout("orders", testing.Source(ORDERS))
    builder.bolt("first", Times()).shuffle("orders")
    of = {"value": {"n": count()}, "window": tumbling(HOUR, "at")}
    builder.table("hours", from_="first", key="shop", **of)
    builder.bolt("second", Times()).fields("hours.closed", "nope")
    builder.table("more", from_="hours.closed", key="shop", value={"n": sum_of("shop")})
    builder.table("direct", from_="orders", key="shop", value={"n": count()})
    builder.sink("second", print)
    with pytest.raises(TopologyError) as raised:
        builder.build()
    texts = "; ".join(raised.value.problems)
    assert "names field 'nope', which 'hours.closed' does not have" in texts
    assert "table 'more': value['n'] must read a column" in texts
    assert "table 'direct' reads spout 'orders', whose columns have no declared types" in texts
    assert len(raised.value.problems) == 3
