"""Windows and watermarks against plain Python."""

from __future__ import annotations

import datetime
import json
import tracemalloc
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore.tables import collect, count, key_groups, session, sliding, tumbling, watermarks
from ackcore.tables.folding import finished, fold_rows
from ackcore.tables.table_segments import TableReader, TableSegment, write_segment
from ackcore.tables.table_shape import EXPIRES, HASH_END, TableShape
from ackcore.tables.watermarks import NEVER, UNSURE, WindowWatermarks
from ackcore.tables.window_rows import closing_rows, merged_sessions

#: Times in units from 1 s to 1 ns: before 1970 and after, and two that are not usable.
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
SECONDS = st.one_of(st.integers(-30, 30), st.none())


def shape_of(window, kind):
    schema = pa.schema([("shop", pa.string()), ("ts", kind), ("n", pa.int64())])
    return TableShape.of("t", schema, "shop", {"lines": collect("n", 99)}, window=window)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), SECONDS), max_size=20),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from(list(UNITS)),
    st.sampled_from([NEVER, -5_000, 0, 8_000]),
)
def test_each_row_is_in_the_windows_of_its_time_and_late_rows_in_none(
    rows, size, step, unit, horizon
):
    step = min(size, step)
    kind = pa.timestamp(unit, tz="Europe/Berlin")
    raw = pa.array([None if s is None else s * UNITS[unit] for _, s in rows], pa.int64())
    columns = [pa.array([shop for shop, _ in rows], pa.string()), raw.cast(kind)]
    shape = shape_of(sliding(size, step, "ts"), kind)
    batch = pa.record_batch([*columns, pa.array(range(len(rows)))], names=["shop", "ts", "n"])
    found = {
        (row["shop"], row["window_start"].timestamp()): (
            row["window_end"].timestamp(),
            row["lines"],
        )
        for row in finished(shape, fold_rows(shape, [batch], horizon)).to_pylist()
    }
    expected = {}
    for n, (shop, s) in enumerate(rows):
        starts = (
            [] if s is None else [t for t in range(-50, 50) if t % step == 0 and t <= s < t + size]
        )
        if starts and (starts[0] + size) * 1000 > horizon:
            for start in starts:
                expected.setdefault((shop, start), (start + size, []))[1].append(n)
    assert found == expected


def test_many_sessions_of_a_key_close_and_are_looked_up_in_memory_for_their_rows_alone():
    shape = shape_of(session(1, "ts"), pa.timestamp("s"))

    def segment(starts):
        batch = pa.record_batch(
            [["a"] * len(starts), starts.cast(pa.timestamp("s")), starts], names=["shop", "ts", "n"]
        )
        return fold_rows(shape, [batch], NEVER)

    def opened(rows, lo=0, hi=HASH_END):
        return TableSegment.open(write_segment(shape, rows), shape, lo, hi)

    older = segment(pa.array(range(0, 8_000, 4), pa.int64()))
    # The rows of a newer segment hide those of the same sessions; these close later.
    later = older.slice(0, 500)
    place = later.schema.get_field_index(EXPIRES)
    later = later.set_column(place, later.schema.field(place), pa.array([10**9] * 500))
    half = HASH_END // 2
    reader = TableReader(shape, [opened(later), opened(older, half), opened(older, 0, half)], NEVER)
    sought = older.select(["shop", "window_start"]).take([*range(2_000), 0, 1_999, 600])
    unknown = pa.array([1, None], pa.timestamp("us"))
    sought = pa.concat_tables([sought, pa.table([["a", "a"], unknown], sought.schema)])
    tracemalloc.start()
    rows = [row for part in closing_rows(reader, 10**8) for row in part["window_start"].to_pylist()]
    found = reader.lookup(sought).select(["window_start", EXPIRES]).to_pydict()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(rows) == sorted(older["window_start"].to_pylist()[500:])
    assert found["window_start"] == [*sought["window_start"].to_pylist()[:-2], None, None]
    newest = [10**9] * 500 + older[EXPIRES].to_pylist()[500:]
    assert found[EXPIRES] == [*newest, newest[0], newest[1_999], newest[600], None, None]
    # All pairs of sessions would take 8 bytes each, 32 MB.
    assert peak < 8e6


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), min_size=1, max_size=9),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0, 1, 2**64 - 1]),
    st.sampled_from([0, 40]),
)
def test_sessions_grow_join_and_stay_apart_in_any_number_of_micro_batches(batches, mask, others):
    shape = shape_of(session(3, "ts"), pa.timestamp("us"))
    expected, segments, count_of = {}, [], 0
    with pytest.MonkeyPatch.context() as patch:
        hashed = key_groups.hash_columns
        patch.setattr(
            key_groups, "hash_columns", lambda *of: hashed(*of) & np.uint64(mask).view("i8")
        )
        for number, rows in enumerate(batches):
            # With many keys and far times, the times of all keys do not fit one axis of 64 bits.
            rows = rows + [(f"far{n}", 240 * 10**9) for n in range(others)]
            us = [s * 10**6 for _, s in rows]
            for (shop, _), each in zip(rows, us, strict=True):
                expected.setdefault(shop, []).append((each, number))
            ts = pa.array(us, pa.int64()).cast(pa.timestamp("us"))
            shops = [shop for shop, _ in rows]
            batch = pa.record_batch([shops, ts, [number] * len(us)], names=["shop", "ts", "n"])
            reader = TableReader(shape, segments, NEVER)
            more, stored = merged_sessions(shape, reader, fold_rows(shape, [batch], NEVER))
            count_of += more
            segments.insert(0, TableSegment.open(write_segment(shape, stored), shape))
            # Sessions without a new row are not written again.
            lists = stored["_state.lines.items"].to_pylist()
            assert all(each is None or number in each for each in lists)
        found = [
            (row["shop"], row["window_start"], row["window_end"], sorted(row["lines"]))
            for part in TableReader(shape, segments, NEVER).scan()
            for row in finished(shape, part).to_pylist()
        ]
    wanted = []
    for shop, times in expected.items():
        times.sort()
        for i, (us, number) in enumerate(times):
            if i == 0 or us - times[i - 1][0] >= 3 * 10**6:
                wanted.append([shop, us, us, []])
            wanted[-1][2] = us + 3 * 10**6
            wanted[-1][3].append(number)
    epoch = datetime.datetime(1970, 1, 1)
    at = lambda us: epoch + datetime.timedelta(microseconds=us)  # noqa: E731
    assert sorted(found) == sorted((shop, at(a), at(b), sorted(n)) for shop, a, b, n in wanted)
    assert count_of == len(found)


def test_times_out_of_range_are_not_usable_in_any_unit():
    for unit, per_second in UNITS.items():
        window = tumbling(1, "ts")
        last = 253_402_300_798 * per_second
        seconds = [-(2**62), 2**62, 0] if unit == "ns" else [last + per_second, -last, last, 0]
        us, usable = window.times(pa.array(seconds, pa.int64()).cast(pa.timestamp(unit)))
        expected = [True] * 3 if unit == "ns" else [False, False, True, True]
        assert usable.tolist() == expected
        assert us[-1] == 0


@given(
    st.sampled_from([datetime.datetime.min, datetime.datetime.max]),
    st.integers(-(10**7), 10**7),
    st.integers(1, 9_000),
    st.integers(1, 9_000),
    st.booleans(),
)
def test_times_are_usable_if_their_windows_can_be_written(edge, us, size, step, is_session):
    """Go's zero time is in a window of the year 0, and "infinity" in one of the year 10000."""
    step, kind = max(min(size, step), size // 1_000 + 1), pa.timestamp("us")
    size = max(size, step)
    window = session(size / 1_000, "ts")
    if not is_session:
        window = sliding(size / 1_000, step / 1_000, "ts")
    time = pa.scalar(edge, kind).value + us
    usable = window.times(pa.array([time]).cast(kind))[1].tolist()
    step, size = 1_000 * step, 1_000 * size
    starts = range((time - size) // step * step + step, time + 1, step)
    starts = [time] if is_session else starts
    ends = [start + size for start in starts]
    first, last = (pa.scalar(one, kind).value for one in (edge.min, edge.max))
    assert usable == [all(first <= one <= last for one in (time, *starts, *ends))]


def test_a_session_is_split_by_a_gap_and_not_by_less():
    shape = shape_of(session(2.5, "ts"), pa.timestamp("ms"))
    ms = pa.array([0, 2_499, 7_498, 4_998, 12_499], pa.int64()).cast(pa.timestamp("ms"))
    batch = pa.record_batch([["a"] * 5, ms, range(5)], names=["shop", "ts", "n"])
    rows = finished(shape, fold_rows(shape, [batch], NEVER)).sort_by("window_start").to_pylist()
    assert [sorted(row["lines"]) for row in rows] == [[0, 1, 3], [2], [4]]


def test_the_sessions_of_a_key_are_not_compared_with_each_other(monkeypatch):
    calls, equal = [], key_groups.rows_equal
    monkeypatch.setattr(key_groups, "rows_equal", lambda *of: calls.append(of) or equal(*of))
    shape = shape_of(session(1, "ts"), pa.timestamp("s"))
    seconds = pa.array([*range(0, 500, 5)] * 2, pa.int64()).cast(pa.timestamp("s"))
    batch = pa.record_batch([["a"] * 200, seconds, range(200)], names=["shop", "ts", "n"])
    rows = finished(shape, fold_rows(shape, [batch], NEVER)).to_pylist()
    assert sorted(sorted(row["lines"]) for row in rows) == [[n, n + 100] for n in range(100)]
    assert len(calls) < 10


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(-3, 9), st.lists(st.booleans(), max_size=4)),
        max_size=40,
    ),
    st.sampled_from([1, 3, 64]),
)
def test_no_window_closes_over_a_waiting_record_however_few_marks_are_kept(steps, most):
    """Each micro-batch reads a record; flags end the oldest waiting ones."""
    window = tumbling(1, "ts", late_s=0)
    marks, found = watermarks.MAX_MARKS, WindowWatermarks()
    watermarks.MAX_MARKS = most
    try:
        waiting, now = [], 1_000
        for later, advance, ends in steps:
            now += later
            waiting.append((now, found.reached))
            waiting = [one for n, one in enumerate(waiting) if n >= len(ends) or not ends[n]]
            times = {"s": max(found.reached, 0) + advance}
            oldest = min((first for first, _ in waiting), default=None)
            found = found.after(window, ["s"], now, times, oldest, False)
            assert WindowWatermarks.of(found.body()) == found
            assert len(found.marks) <= most
            for first, bound in waiting:
                assert found.closed <= found.bound(first) <= bound
            if not waiting:
                assert found.closed == found.reached
    finally:
        watermarks.MAX_MARKS = marks


@pytest.mark.parametrize(
    ("made", "error", "text"),
    [
        (lambda: tumbling("1 hour", "ts"), TypeError, "size_s must be a number of seconds"),
        (lambda: tumbling(True, "ts"), TypeError, "size_s must be a number of seconds"),
        (lambda: tumbling(0, "ts"), ValueError, "size_s must be from 0.001"),
        (lambda: tumbling(float("nan"), "ts"), ValueError, "size_s must be from"),
        (lambda: tumbling(Decimal("sNaN"), "ts"), ValueError, "size_s must be from"),
        (lambda: tumbling(Fraction(10**400), "ts"), ValueError, "size_s must be from"),
        (lambda: tumbling(1.0005, "ts"), ValueError, "size_s must be a multiple of 0.001"),
        (lambda: tumbling(1, 5), TypeError, "time must be the name of a column, got 5"),
        (lambda: tumbling(1, "ts", late_s=-1), ValueError, "late_s must be from 0 to"),
        (lambda: tumbling(1, "ts", idle_s=0), ValueError, "idle_s must be from 0.001"),
        (lambda: sliding(1, 2, "ts"), ValueError, "step_s must be from size_s / 1,000 to size_s"),
        (lambda: sliding(5_000, 1, "ts"), ValueError, "step_s must be from size_s / 1,000"),
        (lambda: session(-1, "ts"), ValueError, "gap_s must be from"),
    ],
)
def test_wrong_windows_are_refused_by_name(made, error, text):
    with pytest.raises(error, match=text):
        made()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"window": tumbling(1, "at")}, ValueError, "time of window must name a column"),
        ({"window": tumbling(1, "n")}, TypeError, "time of window must be a column of timestamps"),
        ({"ttl_s": 5}, ValueError, "ttl_s must be None with window"),
        ({"value": {"window_end": count()}}, ValueError, "value must not name 'window_end'"),
        ({"key": "window_start"}, ValueError, "key must not name 'window_start'.*; remove it"),
        ({"window": tumbling(5, "window_end")}, ValueError, "time of window must not name"),
    ],
)
def test_windows_that_do_not_fit_a_table_are_refused_by_name(changes, error, text):
    schema = pa.schema([("shop", pa.string()), ("ts", pa.timestamp("s")), ("n", pa.int64())])
    of = {"key": "shop", "value": {"n": count()}, "window": tumbling(1, "ts"), **changes}
    with pytest.raises(error, match=text):
        TableShape.of("t", schema, **of)


def test_the_slowest_spout_counts_until_it_is_idle():
    window = tumbling(1, "ts", late_s=2, idle_s=30)
    found = WindowWatermarks().after(window, "ab", 100_000, {"a": 9_000}, None, False)
    assert found.closed == NEVER
    found = found.after(window, "ab", 110_000, {"b": 5_000}, None, False)
    assert found.closed == 3_000
    found = found.after(window, "ab", 139_999, {"a": 20_000}, None, False)
    assert found.closed == 3_000
    found = found.after(window, "ab", 140_000, {}, None, False)
    assert found.closed == 18_000
    # A spout that returns does not move the bound back.
    found = found.after(window, "ab", 141_000, {"b": 6_000}, None, False)
    assert (found.reached, found.closed) == (18_000, 18_000)
    assert found.after(window, "ab", 199_000, {}, None, False).closed == 18_000


def test_parts_that_are_behind_hold_a_spout_until_they_are_idle_or_through():
    window = tumbling(1, "ts", idle_s=30)

    def after(found, now_s, times, **behind):
        parts = {"a": behind} if behind else {}
        found = found.after(window, "ab", now_s * 1_000, times, None, False, parts)
        return WindowWatermarks.of(json.loads(json.dumps(found.body())))

    first = after(WindowWatermarks(), 100, {"a": 90_000, "b": 99_000}, x=NEVER, y=10_000)
    assert first.reached == NEVER
    # Each part counts with its newest row so far, and the bound of all waits for the last of them.
    found = after(first, 101, {"a": 20_000}, x=20_000, y=NEVER)
    assert found.reached == 10_000
    found = after(found, 102, {"a": 21_000}, x=21_000)
    assert found.reached == 21_000
    # A part without rows counts until it is idle.
    some = after(found, 105, {"a": 22_000}, x=22_000, z=NEVER)
    some = after(some, 131, {"a": 22_000, "b": 99_000}, x=22_000, z=UNSURE)
    assert some.reached == 21_000
    assert after(some, 160, {"a": 23_000, "b": 99_000}, x=23_000, z=NEVER).reached == 21_000
    assert after(some, 161, {"a": 23_000, "b": 99_000}, x=23_000, z=NEVER).reached == 23_000
    # Without parts that are behind, the largest time of all counts, also if it came long before.
    assert after(found, 103, {}).reached == 90_000
    assert after(found, 103, {"a": 5_000}).reached == 90_000


def test_a_time_in_the_future_counts_as_the_time_of_the_plan():
    window = tumbling(1, "ts", late_s=2)
    found = WindowWatermarks().after(window, "a", 10_000, {"a": 10**15}, None, False)
    assert (found.reached, found.closed) == (8_000, 8_000)
    assert found.after(window, "a", 20_000, {"a": 12_000}, None, False).closed == 10_000
