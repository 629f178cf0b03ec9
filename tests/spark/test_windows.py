"""Windows against an oracle: rows of closed windows, late records, and watermarks."""

from __future__ import annotations

import collections
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import STEPS, Replaying, Source, Upper, dying_at, rows_of, waiting_rows

from ackcore import testing
from ackcore.ids import spout_key
from ackcore.spark import Sink
from ackcore.spark.base.errors import CheckpointForeign
from ackcore.spark.base.schemas import ATTEMPT, SinkFile
from ackcore.spark.engine import table_changes
from ackcore.spark.tables.table_snapshots import snapshot_of
from ackcore.spark.tasks.record_ids import RETRIES, roots_of
from ackcore.spark.tasks.row_files import RowFileWriter, read_whole
from ackcore.tables import (
    collect,
    count,
    folding,
    session,
    sliding,
    sum_of,
    table_compaction,
    tumbling,
)
from ackcore.tables.table_shape import TableShape
from ackcore.topology import BasicBolt, TopologyBuilder, TopologyError

TS = pa.timestamp("ms", tz="UTC")
ROWS = pa.schema([("line", pa.string()), ("shop", pa.string()), ("ts", TS), ("size", pa.int32())])
VALUE = {"orders": count(), "size": sum_of("size"), "lines": collect("line", 10_000)}
NEVER, STEP_S, AHEAD = -(10**12), 15, -(10**6)


class Shops(Upper):
    outputs = ROWS


def shop_of(line):
    return line[0]


def time_of(line):
    """Return the time of a line in seconds, or None: lines are like ``a.17.3o``."""
    text = line.split(".")[1]
    return None if text in "nN" else int(text)


class Closed(Sink):
    """The rows of closed windows by micro-batch, which are equal in all calls."""

    def __init__(self):
        self.rows = {}

    def write(self, accepted):
        table = pa.Table.from_batches(accepted.record_batches(), accepted.schema())
        rows = [
            ((row["shop"], _s(row["window_start"]), _s(row["window_end"])), row)
            for row in table.to_pylist()
        ]
        for _, row in rows:
            assert row["orders"] == len(row["lines"])
            assert row["size"] == sum(map(len, row["lines"]))
        found = {key: sorted(row["lines"]) for key, row in rows}
        assert len(found) == len(rows)
        assert self.rows.setdefault(accepted.batch_id, found) == found
        table_changes.failpoint("in-sink", accepted.batch_id)


def _s(time):
    return int(time.timestamp())


class WindowWorld(Replaying):
    """A world with a table of windows, with the root ids of the real spout stage."""

    def __init__(self, path, window, spouts=("lines",), **changes):
        self.window, self.closed = window, Closed()
        #: By micro-batch: the spout, the line and the outcome of each record of the last run.
        self.ran = {}
        #: Lines of rows without a record.
        self.loose = []
        super().__init__(path, {"max_attempts": 3}, spouts, **changes)

    def __post_init__(self):
        super().__post_init__()
        builder = TopologyBuilder()
        bolt = builder.bolt("upper", Shops())
        for spout in self.spouts:
            builder.spout(spout, Source())
            bolt.shuffle(spout)
        builder.sink("upper", self)
        builder.table("hours", from_="upper", key="shop", value=VALUE, window=self.window)
        builder.sink("hours.closed", self.closed)
        self.topology = builder.build(backoff_s=10.0, **self.settings)

    def _records(self, inputs, plan):
        places = collections.Counter()
        for spout, line in inputs:
            key = spout_key(plan.key, spout, "", plan.number)
            (root,) = roots_of(key, 0, np.array([places[spout]]), 0).tolist()
            places[spout] += 1
            yield root, spout, None, line, 0
        for spout, file in plan.retries.items():
            key = spout_key(plan.key, spout, "", plan.number)
            table = read_whole(file)
            attempts = table[ATTEMPT].to_numpy()
            roots = roots_of(key, RETRIES, np.arange(len(table)), attempts).tolist()
            lines = table["line"].to_pylist()
            for place, found in enumerate(zip(roots, lines, attempts.tolist(), strict=True)):
                root, line, attempt = found
                yield root, spout, place, line, attempt

    def run(self, topology, layout, inputs, plan):
        result = super().run(topology, layout, inputs, plan)
        failed = set(result.failed["root_id"].to_pylist())
        self.ran[plan.number] = [
            (spout, line, root not in failed)
            for root, spout, _, line, _ in self._records(inputs, plan)
        ]
        return replace(result, read={0: dict(result.records)})

    def _file(self, work, rows, roots):
        if pa.types.is_int64(roots.type):
            rows = [*rows, *((line, None) for line in self.loose)]
        lines, owners = [line for line, _ in rows], [root for _, root in rows]
        times = [time_of(line) if line else None for line in lines]
        columns = [
            pa.array(lines, pa.string()),
            pa.array([shop_of(line) for line in lines], pa.string()),
            pa.array([None if one is None else one * 1000 for one in times], pa.int64()).cast(TS),
            pa.array(map(len, lines), pa.int32()),
            pa.array(owners, roots.type),
        ]
        schema = ROWS.append(roots)
        file = RowFileWriter(work, schema, 0)
        file.write(pa.record_batch(columns, schema=schema))
        return SinkFile("upper", "default", *file.finish()[:2], file.nbytes)

    def driver(self, **changes):
        return super().driver(kind="stream", **changes)

    def open_rows(self, state, number):
        table = snapshot_of(state, self.topology, number)["hours"]
        rows = rows_of(table)
        assert state.tables.of(number)["hours"].rows == len(rows)
        found = {
            (row["shop"], _s(row["window_start"]), _s(row["window_end"])): sorted(row["lines"])
            for row in rows
        }
        assert len(found) == len(rows)
        return found


class Oracle:
    """Windows computed from all ACKED lines, and watermarks by their definition.

    It gets the records that ran in each micro-batch, and decides what is late and what closes.
    """

    def __init__(self, windows, spouts, late_s, idle_s=None):
        self.windows, self.spouts, self.late_s, self.idle_s = windows, spouts, late_s, idle_s
        self.newest = dict.fromkeys(spouts, NEVER)
        self.seen, self.begun = {}, None
        self.reached = self.closed = NEVER
        #: The bound when each line was first read, and the lines that were ACKED or are dead.
        self.bounds, self.acked, self.dead = {}, [], set()

    def micro_batch(self, now_s, ran, refused):
        """Return the lines that are late, and the rows of the windows that close."""
        self.begun = now_s if self.begun is None else self.begun
        late, acked, times = set(), [], {}
        for _, line, _ in ran:
            self.bounds.setdefault(line, self.reached)
        for spout, line, ok in ran:
            # The bound that is closed is later only for a dead record that was sent again.
            bound = max(self.bounds[line], self.closed)
            if ok and (time_of(line) is None or self.first_end(line) <= bound):
                late.add(line)
            elif ok:
                times.setdefault(spout, []).append(time_of(line))
                acked.append(line)
        for spout, some in times.items():
            past = max((time for time in some if time < now_s), default=now_s)
            self.newest[spout] = max(self.newest[spout], past)
            self.seen[spout] = now_s
        self.acked += [line for line in acked if line not in refused]
        active = [
            self.newest[spout]
            for spout in self.spouts
            if self.idle_s is None or now_s - self.seen.get(spout, self.begun) < self.idle_s
        ]
        self.reached = max(self.reached, min(active, default=NEVER) - self.late_s)
        return late

    def close(self, waiting):
        """Return the rows of the windows that close now, and those that are open."""
        before = self.closed
        self.closed = max(before, min([self.reached, *(self.bounds[line] for line in waiting)]))
        rows = self.windows.rows(self.acked)
        closing = {
            key: lines for key, (until, lines) in rows.items() if before < until <= self.closed
        }
        return closing, {key: lines for key, (until, lines) in rows.items() if until > self.closed}

    def first_end(self, line):
        return self.windows.first_end(time_of(line))


class Sliding:
    def __init__(self, size, step):
        self.size, self.step = size, step

    def window(self, **of):
        if self.size == self.step:
            return tumbling(self.size, "ts", **of)
        return sliding(self.size, self.step, "ts", **of)

    def starts(self, time):
        first = time // self.step * self.step
        return [s for s in range(first, first - self.size, -self.step) if s <= time < s + self.size]

    def first_end(self, time):
        return min(self.starts(time)) + self.size

    def rows(self, lines):
        found = collections.defaultdict(list)
        for line in lines:
            for start in self.starts(time_of(line)):
                found[shop_of(line).upper(), start, start + self.size].append(line.upper())
        return {key: (key[2], sorted(some)) for key, some in found.items()}


class Sessions:
    def __init__(self, gap):
        self.gap = gap

    def window(self, **of):
        return session(self.gap, "ts", **of)

    def first_end(self, time):
        return time + self.gap

    def rows(self, lines):
        found = {}
        for shop in {shop_of(line) for line in lines}:
            some = sorted((time_of(line), line.upper()) for line in lines if line[0] == shop)
            together = [[some[0]]]
            for one in some[1:]:
                if one[0] - together[-1][-1][0] < self.gap:
                    together[-1].append(one)
                else:
                    together.append([one])
            for each in together:
                end = each[-1][0] + self.gap
                rows = sorted(line for _, line in each)
                found[shop.upper(), each[0][0], end] = (end + self.gap, rows)
        return found


KINDS = [Sliding(10, 10), Sliding(10, 4), Sessions(5)]
RECORD = st.tuples(
    st.sampled_from("abc"),
    st.sampled_from([*range(15), AHEAD]),
    st.sampled_from("oooo12fRx"),
    st.integers(0, 1),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(KINDS),
    st.lists(
        st.tuples(
            st.lists(RECORD, max_size=8),
            st.lists(st.sampled_from(STEPS), max_size=2),
            st.booleans(),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 7),
    st.sampled_from([("lines",), ("lines", "more")]),
    st.sampled_from([None, 40]),
    st.sampled_from([1, 3, 8]),
)
def test_windows_are_those_of_the_acked_lines_and_close_once(
    kind, batches, late_s, spouts, idle_s, deltas
):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_compaction, "MAX_DELTAS", deltas)
        patch.setattr(table_compaction, "DELTA_ROWS", 4)
        patch.setattr(folding, "RANGE_ROWS", 2)
        window = kind.window(late_s=late_s, idle_s=idle_s)
        # All times are in the past, except those that are days ahead (AHEAD).
        world = WindowWorld(Path(path), window, spouts, now_ms=0)
        oracle = Oracle(kind, spouts, late_s, idle_s)
        number = 0
        for number, (records, steps, replays) in enumerate(batches):
            if replays:
                world.replay()
            lines = []
            for i, (shop, ago, does, spout) in enumerate(records):
                time = "n" if does == "x" else str(5 * number + 14 - ago)
                lines.append((spouts[spout % len(spouts)], f"{shop}.{time}.{number}.{i}{does}"))
            _take(world, oracle, number, lines, steps)
        while _take(world, oracle, number + 1, [], []):
            number += 1
        rows = kind.rows(oracle.acked)
        emitted = [key for some in world.closed.rows.values() for key in some]
        assert len(emitted) == len(set(emitted))
        assert set(emitted) <= rows.keys()


def _take(world, oracle, number, lines, steps):
    """Run a micro-batch with deaths, and check it; return the number of waiting records."""
    world.now_ms += 1000 * STEP_S
    for step in steps:
        with dying_at(step, number):
            world.process(number, lines)
    world.process(number, lines)
    dead = set(world.dead.get(number, []))
    refused = {line for _, line, ok in world.ran[number] if ok and world.refuses(line.upper())}
    now_s = world.now_ms // 1000
    with world.driver()[0] as state:
        now_s = state.plan(number).now_ms // 1000
        late = oracle.micro_batch(now_s, world.ran[number], refused)
        assert late <= dead
        assert {line for _, line, ok in world.ran[number] if ok} & dead == late | refused
        waiting = [row["line"] for row in waiting_rows(state, number)]
        closing, opened = oracle.close(waiting)
        assert world.closed.rows.get(number, {}) == closing
        assert world.open_rows(state, number) == opened
    return len(waiting)


# The tests of tables have the other steps.
@pytest.mark.parametrize(
    "step",
    [
        *("folded", "changes-recorded", "acted"),
        pytest.param("tables-recorded", marks=pytest.mark.faults),
    ],
)
def test_a_driver_that_dies_in_a_bucket_as_on_a_disk(bucket, step):
    kind = Sliding(10, 10)
    world, oracle = WindowWorld(bucket, kind.window()), Oracle(kind, ("lines",), 0)
    _take(world, oracle, 0, [("lines", "a.3.0o"), ("lines", "b.12.1o")], [])
    _take(world, oracle, 1, [("lines", "a.25.2o"), ("lines", "a.5.3o")], [step])
    assert world.closed.rows[1].keys() == {("B", 10, 20)}
    assert world.dead[1] == ["a.5.3o"]


def test_rows_of_several_records_are_late_for_each_and_rows_of_none_are_logged(tmp_path, caplog):
    world = WindowWorld(tmp_path, tumbling(10, "ts"))
    world.process(0, ["a.3.o", "b.4.2"])
    world.now_ms += 15_000
    world.loose = ["C.2.O"]
    world.process(1, ["a.31.o"])  # the second line waits until then, so no window closes
    world.loose = []
    world.shared_rows = [("B.4.2", "A.33.O")]
    world.now_ms += 60_000
    world.process(2, ["a.33.o"])
    assert world.closed.rows[2] == {
        ("A", 0, 10): ["A.3.O"],
        ("B", 0, 10): ["B.4.2", "B.4.2&A.33.O"],
        ("C", 0, 10): ["C.2.O"],
    }
    assert not world.dead
    world.loose, world.shared_rows = ["C.5.O"], [("A.7.O", "A.34.O")]
    world.process(3, ["a.7.o", "a.34.o"])
    assert "table 'hours' leaves out 1 row without a record" in caplog.text
    assert sorted(world.dead[3]) == ["a.34.o", "a.7.o"]
    with world.driver()[0] as state:
        letters = state.decision(3).all_dead["lines"]["_ackcore_reason"].to_pylist()
        assert {(one["component"], one["type"]) for one in letters} == {("hours", "Late")}
        # Short, since `ackcore status` shows 120 characters of a message.
        assert letters[0]["message"] == (
            "its 'ts' is in a closed window of table 'hours' (those until 1970-01-01T00:00:33 UTC "
            "have closed); increase late_s, now 0"
        )
        assert world.open_rows(state, 3) == {("A", 30, 40): ["A.31.O", "A.33.O"]}


def test_a_replay_that_is_late_for_one_table_is_a_dead_letter_with_its_own_way_out(tmp_path):
    world = WindowWorld(tmp_path, tumbling(10, "ts"))
    days = TableShape.of("days", ROWS, "shop", VALUE, window=tumbling(100, "ts"))
    table = replace(world.topology.tables["hours"], name="days", shape=days)
    tables = {"days": table, **world.topology.tables}
    world.topology = replace(world.topology, tables=tables)
    world.process(0, ["a.3.xf"])
    world.process(1, ["a.33.o"])
    world.replay()
    world.process(2, ["a.7.o"])
    assert sorted(world.dead[2]) == ["a.3.xf", "a.7.o"]
    with world.driver()[0] as state:
        letters = state.decision(2).all_dead["lines"].to_pylist()
        reasons = {one["line"]: one["_ackcore_reason"] for one in letters}
        assert {(one["component"], one["type"]) for one in reasons.values()} == {("hours", "Late")}
        assert reasons["a.7.o"]["message"].endswith("; increase late_s, now 0")
        assert "; a replay does not open it: correct " in reasons["a.3.xf"]["message"]
        assert state.tables.of(2)["days"].rows == 1


def test_late_s_may_change_and_windows_may_not(tmp_path):
    world = WindowWorld(tmp_path, tumbling(10, "ts", late_s=3))
    world.process(0, ["a.3.o", "a.12.o"])
    world.window = tumbling(10, "ts")
    world.__post_init__()
    world.process(1, ["a.15.o"])
    assert world.closed.rows == {1: {("A", 0, 10): ["A.3.O"]}}
    world.window = tumbling(10, "ts", late_s=30)
    world.__post_init__()
    world.process(2, ["a.4.o", "b.17.o"])
    assert world.dead == {2: ["a.4.o"]}  # a closed window stays closed
    world.window = tumbling(20, "ts")
    world.__post_init__()
    said = r"had window=tumbling\(10, 'ts'\), and has tumbling\(20, 'ts'\)"
    with pytest.raises(CheckpointForeign, match=said):
        world.driver(accept_changes=True)


def test_the_sink_of_closed_rows_may_go_unless_a_micro_batch_is_decided(tmp_path):
    world = WindowWorld(tmp_path, tumbling(10, "ts"))
    whole = world.topology
    without = replace(whole, sinks={"upper": whole.sinks["upper"]})
    with dying_at("decided", 0):
        world.process(0, ["a.3.o", "a.15.o"])
    world.topology = without
    with pytest.raises(CheckpointForeign, match=r"a sink of 'hours\.closed',.* micro-batch 0"):
        world.driver(accept_changes=True)
    world.topology = whole
    world.process(0)
    assert world.closed.rows == {0: {("A", 0, 10): ["A.3.O"]}}
    world.topology = without
    world.driver(accept_changes=True)[0].close()


class Visit(BasicBolt):
    """Emits each visit with the count of its open hour so far; some fail at first."""

    outputs = pa.schema([("shop", pa.string()), ("ts", pa.timestamp("us")), ("so_far", pa.int64())])
    uses = ("hours",)

    def execute(self, tuple, collector):
        if tuple["fails"] > tuple.attempt:
            raise TimeoutError("no")
        start = tuple["ts"].replace(minute=0)
        row = self.tables["hours"].get((tuple["shop"], start))
        collector.emit((tuple["shop"], tuple["ts"], None if row is None else row["n"]))


def declared(window, reads=("hours.closed",), **spout):
    columns = pa.schema([*list(Visit.outputs)[:2], pa.field("fails", pa.int64())])
    builder = TopologyBuilder()
    builder.spout("visits", testing.Source(columns), **spout)
    builder.bolt("visit", Visit()).shuffle("visits")
    builder.table("hours", from_="visit", key="shop", value={"n": count()}, window=window)
    for read in reads:
        builder.sink(read, print)
    builder.sink("visit", print)
    return builder.build(max_attempts=3)


def test_open_windows_are_looked_up_and_change_and_close_at_the_end_of_a_run():
    topology = declared(tumbling(3600, "ts"), ["hours.closed", "hours.changes"])
    assert "of closed windows of hours" in topology.explain()
    hours = [datetime(2026, 1, 1, hour, 30) for hour in (9, 10)]
    rows = [("a", hours[0], 0), ("a", hours[0], 1), ("b", hours[1], 0), ("b", hours[1], 2)]
    ran = testing.run(topology, {"visits": rows}).check()
    assert [row["so_far"] for row in ran.outputs["visit"]] == [None, None, 1, 1]
    changes = [(row["shop"], row["n"], row["old_n"]) for row in ran.outputs["hours.changes"]]
    assert sorted(changes[:2]) == [("a", 1, None), ("b", 1, None)]
    assert changes[2:] == [("a", 2, 1), ("b", 2, 1)]
    closed = [tuple(row.values()) for row in ran.outputs["hours.closed"]]
    bounds = [(at.replace(minute=0), at.replace(hour=at.hour + 1, minute=0)) for at in hours]
    assert sorted(closed) == [("a", *bounds[0], 2), ("b", *bounds[1], 2)]
    assert ran.tables["hours"].num_rows == 0


@pytest.mark.parametrize(
    ("window", "of", "text"),
    [
        (None, {}, "closed windows of table 'hours', which has no"),
        (session(5, "ts"), {"reads": ["hours.changes"]}, "window may merge with others"),
        (tumbling(5, "at"), {"reads": []}, "time of window must name a column"),
        (tumbling(5, "shop"), {"reads": []}, "must be a column of timestamps, got 'shop'"),
        (
            tumbling(5, "ts"),
            {"tracked": False},
            "gets records of spout 'visits', which is not tracked",
        ),
    ],
)
def test_windows_that_do_not_fit_a_topology_are_refused_by_name(window, of, text):
    with pytest.raises(TopologyError, match=text):
        declared(window, **of)
