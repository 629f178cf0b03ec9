"""Duplicates against an oracle: one record of a key has effects, and none is lost without one."""

from __future__ import annotations

import collections
import signal
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pytest
from dedup_job import CONF, does, drive, take_files, write_files
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from killed_sinks import in_processes
from streams import in_line
from worlds import STEPS, dying_at, waiting_rows

from ackcore.calls import Reject
from ackcore.spark import SinkRejects
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import ATTEMPT, DUE_MS, FIRST_MS
from ackcore.spark.base.sources import kept_schemas
from ackcore.spark.checkpoint.state import State
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.engine import act
from ackcore.spark.listeners import Listeners
from ackcore.spark.sinks.sink import Sink
from ackcore.spark.tables import seen_keys
from ackcore.spark.tasks.dedup_executor import DedupExecutor, SeenKeys, key_columns
from ackcore.tables import collect, tumbling
from ackcore.tables.time_windows import Window
from ackcore.tables.watermarks import NEVER
from ackcore.testing import Source, run
from ackcore.testing.local_runs import _MEMORY, LocalRuns
from ackcore.testing.task_kills import Kills
from ackcore.topology import BasicBolt, TopologyBuilder, TopologyError
from ackcore.topology.dedup import DedupBolt
from ackcore.topology.parts import Dedup

WITHIN_S = 20
RECORDS = pa.schema(
    [
        *(("n", pa.int64()), ("key", pa.string()), ("does", pa.string())),
        ("at", pa.timestamp("ms", "UTC")),
    ]
)
#: The executions so far: micro-batch and record.  Tasks run in this process.
RAN: list[tuple[int, int]] = []
#: Records whose dead letters were sent again; they succeed.
FIXED: set[int] = set()


class Record(collections.namedtuple("Record", "n key does at")):
    """A record; ``does`` is what happens to it: "fails" once, "dies", "refused" by the sink."""


class Rate(BasicBolt):
    outputs = RECORDS

    def prepare(self, context):
        self.number = context.batch_id

    def execute(self, tuple, collector):
        assert tuple.component == "orders"
        RAN.append((self.number, tuple["n"]))
        if tuple["n"] in FIXED:
            collector.emit((tuple["n"], tuple["key"], "ok", tuple["at"]))
            return
        if tuple["does"] == "dies":
            raise Reject("no")
        if (tuple["does"] == "fails" and tuple.attempt == 0) or tuple["does"] == "always":
            raise TimeoutError("later")
        collector.emit(tuple.values)


class Writer(Sink):
    """A sink that replaces the rows of a micro-batch, and refuses some."""

    def __init__(self):
        self.written: dict[int, list[int]] = {}

    def write(self, accepted):
        rows = [row for part in accepted.record_batches() for row in part.to_pylist()]
        bad = [row["n"] for row in rows if row["does"] == "refused"]
        self.written[accepted.batch_id] = [row["n"] for row in rows if row["n"] not in bad]
        act.failpoint("in-sink", accepted.batch_id)
        return SinkRejects(pa.table({"n": bad}), "refused") if bad else None


class StreamRuns(LocalRuns):
    """Micro-batches with rows of their own; ``fed`` has them by number."""

    def __init__(self, topology, fed):
        empty = {"orders": RECORDS.empty_table()}
        super().__init__(topology, empty, 2, Kills({}, topology.bolts), Listeners([]))
        self._topology, self.fed = topology, fed

    def _take_dead(self, number, dead):
        state = self.state
        letters = DeadLetters.checked(state.url, state.deployment_key, records=state.records)()
        letters.write(number, dead)
        super()._take_dead(number, dead)

    def _parts(self, number):
        rows = pa.Table.from_pylist([one._asdict() for one in self.fed.get(number, ())], RECORDS)
        middle = len(rows) // 2
        yield from (("orders", part.combine_chunks()) for part in (rows[:middle], rows[middle:]))


@dataclass
class DedupModel:
    """A stream with an oracle that knows the records, the executions and the rows of the sink."""

    path: Path
    bounds: dict
    window: Window | None = None
    at_ms: dict[int, int] = field(default_factory=dict)  # time of each plan

    def __post_init__(self):
        RAN.clear()
        FIXED.clear()
        self.sink, self.fed = Writer(), {}
        builder = TopologyBuilder()
        builder.spout("orders", Source(RECORDS), dedup="key", **self.bounds)
        builder.bolt("rate", Rate()).shuffle("orders")
        builder.sink("rate", self.sink)
        if self.window is not None:
            value = {"ns": collect("n", 9)}
            builder.table("tens", from_="rate", key="key", value=value, window=self.window)
        self.topology = builder.build(max_attempts=2, backoff_s=8.0)
        self.runs = StreamRuns(self.topology, self.fed)
        self.dead: dict[int, int] = {}  # record to micro-batch
        self.waiting: dict[int, dict] = {}
        self.ended: dict[int, int] = {}  # record to the micro-batch in which it was a duplicate
        self.told = 0

    def take(self, records, wait_s, kill=None):
        """Take a micro-batch, which a driver may be killed in, and judge it."""
        number = len(self.at_ms)
        self.runs._wait(wait_s)
        self.fed[number] = records
        if kill is not None:
            with dying_at(kill, number):
                self.process(number)
            self.runs._wait(1)  # the next driver comes later
        progress = self.process(number)
        self.judge(number, progress)

    def process(self, number):
        with self.runs.engine(self.path) as engine:
            self.runs.state = engine.state
            progress = engine.process(number, [])
            self.at_ms[number] = engine.state.plan(number).now_ms
            self.before = self.waiting
            self.now_waiting = {row["n"]: row for row in waiting_rows(engine.state, number)}
        return progress

    def replay(self):
        """Send all dead records again."""
        if self.dead:
            assert replay(self.path / "checkpoint").records == {"orders": len(self.dead)}
            FIXED.update(self.dead)
            self.dead.clear()
            self.runs._dead.clear()

    def judge(self, number, progress):
        """Check a micro-batch against the records that were ACKED before it."""
        now = self.at_ms[number]
        records = {one.n: one for some in self.fed.values() for one in some}
        before, self.waiting = self.before, self.now_waiting
        for letter in self.runs._dead:
            self.dead.setdefault(letter.payload["n"], letter.batch_id)
        acked = {n: at for at, some in self.sink.written.items() for n in some}
        ended = {*records} - {*self.waiting} - {*self.dead} - {*acked} - {*self.ended}
        self.ended |= dict.fromkeys(ended, number)
        self.told += progress.duplicates
        assert progress.duplicates == len(ended)

        ran = {n for at, n in RAN if at == number}
        keys = [records[n].key for n in ran if records[n].key is not None]
        assert len(keys) == len(set(keys)), "two copies ran in one micro-batch"
        assert {n for n, at in acked.items() if at == number} <= ran
        known = {n: at for n, at in acked.items() if at < number and records[n].key is not None}
        for n in ended:
            assert self.recognises(records, known, records[n], now), "a record was lost"
        for n in ran:
            assert not self.recognises(records, known, records[n], now, sure=True)
            mine = before.get(n, {FIRST_MS: now, ATTEMPT: 0})
            # Of copies that were first seen at one time, the one that ran comes first.
            first_ms = mine[FIRST_MS] + (mine[ATTEMPT] == 0)
            for other, row in before.items():
                if row["key"] == records[n].key is not None and other not in ran:
                    is_first = row[ATTEMPT] > 0 and row[FIRST_MS] < first_ms
                    # If an earlier copy is due, one of this micro-batch runs, maybe a new one.
                    is_first &= not any(
                        one["key"] == row["key"] and one[DUE_MS] <= now
                        for one in before.values()
                        if one[FIRST_MS] < row[FIRST_MS] + (one[ATTEMPT] > 0)
                    )
                    assert not is_first, "a copy overtook one that waits"

    def recognises(self, records, known, record, now, *, sure=False):
        """Return whether an ACKED copy makes a record a duplicate; ``sure`` if it must."""
        if record.key is None:
            return False
        times = {n: self.time(records[n], self.at_ms[at]) for n, at in known.items()}
        copies = [n for n in known if records[n].key == record.key]
        within_ms, keys = 1000 * WITHIN_S, self.bounds.get("within_keys")
        if "within_s" in self.bounds:
            horizon = now
            if "event_time" in self.bounds:
                horizon = 0
                for plan_ms in {self.at_ms[at] for at in known.values()}:
                    some = {times[n] for n, at in known.items() if self.at_ms[at] == plan_ms}
                    horizon = max(horizon, *(some - {plan_ms} or some))
            at = self.time(record, now)
            copies = [
                n for n in copies if times[n] > horizon - within_ms and at < times[n] + within_ms
            ]
        if keys is not None and sure:
            # The keys of later micro-batches are kept first.
            copies = [n for n in copies if sum(known[other] >= known[n] for other in known) <= keys]
        return bool(copies)

    def time(self, record, plan_ms):
        """Return the time of a record that the bound counts from."""
        at = record.at if "event_time" in self.bounds else None
        return plan_ms if at is None else min(int(at), plan_ms)


def topology_of(*, name="orders", sinks=(), **arguments):
    builder = TopologyBuilder()
    builder.spout(name, Source(RECORDS), **arguments)
    builder.bolt("rate", Rate()).shuffle(name)
    for writer in sinks:
        builder.sink("rate", writer)
    return builder.build(max_attempts=2)


#: The table of keys of a spout.
SHAPE = topology_of(dedup="key", within_s=1.0).tables["orders.dedup"].shape


BOUNDS = [
    {"within_s": WITHIN_S},
    {"within_s": WITHIN_S, "event_time": "at"},
    {"within_keys": 2},
    {"within_s": WITHIN_S, "within_keys": 2},
]
BEGIN_MS = 1_700_000_000_000
DOES = ["ok"] * 4 + ["fails", "always", "dies", "refused"]
rows = st.tuples(
    st.sampled_from(["a", "a", "b", "c", None]),
    st.sampled_from(DOES),
    st.sampled_from([None, 0, 10_000, 30_000, 10**9]),
)
turns = st.tuples(
    st.lists(rows, max_size=5),
    st.sampled_from([0, 3, 12, 25]),
    st.sampled_from([None, *STEPS]),
    st.booleans(),
)


@pytest.mark.parametrize("bounds", BOUNDS, ids=lambda of: "+".join(of))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(taken=st.lists(turns, min_size=2, max_size=5))
@example(
    # A copy waits behind a record in retry, which dies: then the copy runs.
    taken=[
        ([("a", "always", 0)], 0, None, False),
        ([("a", "ok", 0)], 0, "decided", False),
        ([], 12, None, False),
    ]
)
@example(
    # A copy of the same micro-batch is due before the record that ran.
    taken=[
        ([("a", "fails", 0), ("a", "ok", 0)], 0, None, False),
        ([], 0, None, False),
        ([], 0, None, False),
    ]
)
@example(
    # A refused record is not ACKED, and its copy in the same micro-batch is not lost.
    taken=[
        ([("a", "refused", 0), ("a", "ok", 0)], 0, "refused", False),
        ([("a", "ok", 0)], 3, "folded", False),
    ]
)
@example(
    # The event time of the first records is that of an unset clock.
    taken=[([("a", "ok", -BEGIN_MS)], 0, None, False), ([("a", "ok", -BEGIN_MS)], 3, None, False)]
)
@example(
    # A record without a time, among old ones, does not let their copies pass.
    taken=[
        ([("a", "ok", -(10**6)), ("b", "ok", None)], 0, None, False),
        ([("a", "ok", -(10**6))], 3, None, False),
    ]
)
@example(
    # Of two dead records that are sent again, one has an ACKED copy, the other a new one.
    taken=[
        ([("a", "dies", 0), ("b", "dies", 0)], 0, None, False),
        ([("a", "ok", 0)], 3, None, False),
        ([("b", "ok", 0)], 3, "tables-recorded", True),
    ]
)
def test_one_record_of_a_key_has_effects_and_none_is_lost(bounds, taken):
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as path:
        model, n = DedupModel(Path(path), bounds), 0
        for some, wait_s, kill, replays in taken:
            records = []
            if replays:
                model.replay()
            for key, does, at in some:
                n += 1
                records.append(Record(n, key, does, None if at is None else BEGIN_MS + at))
            model.take(records, wait_s, kill)
        while model.waiting:
            model.take([], 9)
        written = [n for some in model.sink.written.values() for n in some]
        assert sorted([*written, *model.dead, *model.ended]) == list(range(1, n + 1)), (
            "each record ends once"
        )


def test_a_copy_is_late_only_if_its_waiting_record_would_be(tmp_path):
    """Window 0 stays open for record 1, which waits. Its copy 3 runs in its place."""
    model = DedupModel(tmp_path, {"within_s": WITHIN_S}, tumbling(10, "at"))
    for wait_s, records in (
        (60, [(1, "a", "fails", 0), (2, "b", "ok", 50_000)]),
        (12, [(3, "a", "ok", 0), (4, "c", "ok", 0)]),
        (1, [(5, "a", "ok", 0)]),
    ):
        model.take([Record(n, key, does, BEGIN_MS + at) for n, key, does, at in records], wait_s)
    assert model.sink.written == {0: [2], 1: [3]}
    assert model.dead == {4: 1}
    assert model.ended == {1: 2, 5: 2}
    assert [letter.error_type for letter in model.runs._dead] == ["Late"]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.faults)])
def test_on_spark_a_driver_that_fails_leaves_each_key_once(
    killed, spark, conf, failing_at, tmp_path
):
    """It fails after it recorded the table of keys of its second micro-batch of files."""
    write_files(tmp_path)
    if killed:
        assert in_processes(drive, 240)(tmp_path, "tables-recorded:1") == -signal.SIGKILL
    for name, value in CONF.items():
        conf(name, value)
    if not killed:
        with failing_at("tables-recorded:1"):
            take_files(tmp_path, spark)
    of = take_files(tmp_path, spark)
    source = pads.dataset(tmp_path / "in").to_table().to_pylist()
    ids = {row["id"] for row in source}
    dies = {number for number in ids if does(number) == "dies"}
    written = pads.dataset(tmp_path / "out").to_table()["id"].to_pylist()
    assert sorted(written) == sorted(ids - dies)
    dead = sum(row["id"] in dies for row in source)  # each copy of a dead record had its chance
    counts = [of.records, of.acked, of.dead, of.waiting]
    assert counts == [len(source), len(source) - dead, dead, 0]
    ran = [tuple(map(int, line.split())) for line in (tmp_path / "ran").read_text().splitlines()]
    per_batch = collections.defaultdict(set)
    for number, key, n in ran:
        per_batch[number, key].add(n)
    assert all(len(copies) == 1 for copies in per_batch.values()), "two copies ran in a micro-batch"


@pytest.mark.parametrize("kills", [1, 2, [1, 2]])
def test_the_first_copy_runs_also_if_rows_run_alone_after_a_crash(kills):
    """The rows that a killed task had in flight are isolated, and the bolts flushed between."""
    rows = [Record(n, key, "ok", None) for n, key in enumerate("aabab")]
    topology = topology_of(dedup="key", within_s=60, sinks=[print])
    ran = run(topology, {"orders": rows}, tasks=1, kills={"rate": kills})
    assert [(row["n"], row["key"]) for row in ran.outputs["rate"]] == [(0, "a"), (2, "b")]
    assert sum(one.duplicates for one in ran.progress) == 3
    assert ran.kills


@given(st.lists(st.lists(st.sampled_from([None, 0, 1, 2, 7, 2**40]), max_size=6), max_size=9))
def test_a_task_lets_the_first_row_of_each_key_pass(batches):
    keys = SeenKeys(SHAPE, (), 0, np.empty(0, np.uint64), BEGIN_MS)
    executor = DedupExecutor(DedupBolt("orders", Dedup(("key",), 1.0, None, None)), keys)
    passed, behind, seen = [], [], set()
    for some in batches:
        rows = pa.record_batch({"key": pa.array(some, pa.int64())})
        found = executor.process("orders", "default", rows, None)
        passed += [x for one in found.emissions if one.stream == "default" for x in one.anchors[0]]
        behind += [x for one in found.failures for x in one.handles]
    wanted, flat = [], [key for some in batches for key in some]
    for first, key in enumerate(flat):
        if key is None or key not in seen:
            wanted.append(first)
        seen.add(key)
    assert passed == wanted
    assert sorted(passed + behind) == list(range(len(flat)))


@given(
    batches=st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=9),
    most=st.integers(1, 20),
    spans=st.sampled_from([2, 200]),
)
@example(batches=[[5] * 8, [5] * 12], most=10, spans=200)
def test_a_bound_by_number_keeps_so_many_keys(batches, most, spans):
    """Also if keys of several micro-batches have the same event time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen_keys, "_SPANS", spans)
        known, horizon_ms, times = (), NEVER, []
        for some in batches:
            times += some
            known = seen_keys._with_times(known, np.array(some, np.int64))
            horizon_ms = max(horizon_ms, seen_keys._horizon_of(known, most))
            known = tuple(span for span in known if span[0] > horizon_ms)
            assert sum(time > horizon_ms for time in times) >= min(most, len(times))
            assert len(known) <= spans


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dedup": "id", "within_s": 1}, "dedup of spout 'orders' names 'id'.*columns"),
        ({"dedup": "key", "within_s": 1, "event_time": "n"}, "event_time.*timestamps, got 'n' of"),
        ({"dedup": "key", "within_s": 1, "tracked": False}, "untracked record is never ACKED"),
        ({"dedup": "key", "within_s": 1, "ordered_by": "key"}, "dedup and ordered_by"),
        ({"dedup": ["key", "key"], "within_s": 1}, "must name a column once"),
        ({"dedup": "key"}, "dedup of spout 'orders' needs a bound"),
        ({"within_s": 1}, "within_s of spout 'orders' has no effect without dedup, got 1"),
        ({"dedup": "key", "within_s": 0}, "within_s of spout 'orders' must be from"),
        ({"dedup": "key", "within_keys": 0}, "within_keys of spout 'orders' must be at least 1"),
        ({"dedup": "key", "within_keys": 1, "event_time": "at"}, "no effect without within_s"),
        ({"dedup": "key", "within_s": "1 day"}, "within_s .* must be a number of seconds.*'1 day'"),
    ],
)
def test_refused_arguments(arguments, said):
    with pytest.raises((TopologyError, TypeError, ValueError), match=said):
        topology_of(**arguments)


@pytest.mark.parametrize("kind", [pa.float64(), pa.list_(pa.int64()), pa.duration("s")], ids=str)
def test_a_key_of_a_type_without_one_text_per_value_is_refused(kind):
    """The text of a duration has no unit: 5 s and 5 ms would be copies."""
    builder = TopologyBuilder()
    builder.spout("orders", Source(pa.schema([("id", kind)])), dedup="id", within_s=1)
    builder.bolt("rate", Rate()).shuffle("orders")
    with pytest.raises(TopologyError, match=r"must name columns of text, .*, got 'id' of"):
        builder.build()


def test_dedup_is_removed_while_a_micro_batch_is_decided(tmp_path):
    """No sink misses the ids of its records, but a sink of the spout would miss its rows."""
    model = DedupModel(tmp_path, {"within_s": WITHIN_S})
    model.fed[0] = [Record(1, "a", "ok", None)]
    with dying_at("decided", 0):
        model.process(0)
    of_spout = in_line({"orders": Source(RECORDS)}, model.sink)
    opened = {"sources": {"orders": RECORDS}, "kind": "batch", "accept_changes": True}
    with pytest.raises(CheckpointForeign, match=r"1 row of 'rate' yet, .*, then change it$"):
        State.open(tmp_path / "checkpoint", of_spout, **opened)

    without = topology_of(sinks=[model.sink])
    with State.open(tmp_path / "checkpoint", without, **opened) as state:
        state.record_topology()
    runs = StreamRuns(without, model.fed)
    with runs.engine(tmp_path) as engine:
        runs.state = engine.state
        assert engine.process(0, []).acked == 1
    assert model.sink.written == {0: [1]}


def test_rows_of_a_spout_are_decided_while_it_gets_or_loses_dedup(tmp_path):
    """Its sinks then read another stream, so that no sink would get the rows."""
    refused = [
        "dedup of spout 'orders' has changed, and micro-batch 0 .*, then change it$",
        "1 row of 'orders' yet, .*, then change it$",
    ]

    dedup = {"dedup": "key", "within_s": WITHIN_S}
    for number, spouts in enumerate([({}, dedup), (dedup, {})]):
        path = tmp_path / str(number)
        of, changed = (in_line({"orders": Source(RECORDS)}, Writer(), spout=how) for how in spouts)
        runs = StreamRuns(of, {0: [Record(1, "a", "ok", None)]})
        with dying_at("decided", 0), runs.engine(path) as engine:
            engine.process(0, [])
        opened = {"sources": kept_schemas({"orders": RECORDS}, changed), "kind": "batch"}
        with pytest.raises(CheckpointForeign, match=refused[number]):
            State.open(path / "checkpoint", changed, accept_changes=True, **opened)


DECIMALS = ("0", "100", "-1.5", "0.01", "12.30", "1e-7", "1.5e-10", "-3e-12")
AT = datetime(2024, 3, 31, 1, 30, 1, tzinfo=UTC)
TIMES = (AT, AT.replace(microsecond=500_000), AT.replace(year=1), AT.replace(year=1969))


@pytest.mark.parametrize(
    ("values", "types"),
    [
        (
            [*map(Decimal, DECIMALS)],
            [pa.decimal128(38, s) for s in (12, 18)] + [pa.decimal256(60, 38)],
        ),
        ([0, 100, -7], [pa.int8(), pa.int64(), pa.decimal128(5, 0), pa.decimal128(20, 9)]),
        (
            TIMES,
            [pa.timestamp("ms", "UTC"), *(pa.timestamp("us", z) for z in ("UTC", "Asia/Tokyo"))],
        ),
        ([each.replace(tzinfo=None) for each in TIMES], [pa.timestamp("ms"), pa.timestamp("us")]),
        (TIMES[:1], [pa.timestamp(unit, "UTC") for unit in ("s", "us", "ns")]),
        ([0, 10**15], [pa.timestamp("s", "UTC")]),
        ([AT.time()], [pa.time64("us"), pa.time64("ns")]),
    ],
    ids=["decimals", "integers", "instants", "local times", "seconds", "far", "times of day"],
)
def test_equal_keys_are_copies_whatever_their_types(values, types):
    """A source may change a column's type: its ids would be forgotten, without any error."""
    texts = [key_columns([pa.array(values, kind)])[0] for kind in types]
    assert len(set(texts[0].to_pylist())) == len(values)
    assert all(each.equals(texts[0]) for each in texts)


def test_bounds_may_change_and_the_key_may_not(tmp_path):
    """A change of the key would forget what is ACKED, or take other records for copies."""
    model = DedupModel(tmp_path, {"within_s": WITHIN_S})
    model.take([Record(1, "a", "ok", None)], 0)
    after = [
        ({"dedup": "key", "within_s": 1, "within_keys": 9}, None),
        (
            {"dedup": "does", "within_s": WITHIN_S},
            "spout 'orders' had dedup by key, and has it by does now.*a micro-batch without dedup",
        ),
    ]
    for arguments, refused in after:
        topology = topology_of(**arguments, sinks=[Writer()])
        empty = {"orders": kept_schemas({"orders": RECORDS}, topology)["orders"]}
        opened = {"sources": empty, "kind": "batch"}
        with pytest.raises(CheckpointForeign, match=refused or "orders' differs in its within_s"):
            State.open(tmp_path / "checkpoint", topology, **opened)
        if refused is None:
            with State.open(tmp_path / "checkpoint", topology, accept_changes=True, **opened):
                continue
        with pytest.raises(CheckpointForeign, match=refused):
            State.open(tmp_path / "checkpoint", topology, accept_changes=True, **opened)
