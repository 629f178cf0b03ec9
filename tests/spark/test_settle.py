"""Settling on Spark gives what plain Python gives, whatever the plan, the settings and the cuts."""

from __future__ import annotations

import time
from decimal import Decimal

import numpy as np
import pytest
from sessions import on_both_sessions

from ackcore.spark import combine, settle, settle_partitions
from ackcore.spark.settle.worker_functions import COMBINED_DDL, SETTLED_DDL

NOW = 1000
DECIDED = {"ACKED", "FAILED", "ANOMALY"}


@pytest.mark.parametrize(
    ("spark", "partitions", "columns", "timeout_ms", "statuses"),
    [
        ("classic", 1, 3, None, {"OPEN"}),
        ("classic", 5, 4, None, {"OPEN"}),
        ("classic", 5, 5, 300, {"OPEN", "EXPIRED", "ORPHAN"}),
        ("connect", 5, 5, 0, {"EXPIRED", "ORPHAN"}),
    ],
    indirect=["spark"],
)
def test_random_trees(
    frame, random_events, expected, found, columns, timeout_ms, statuses, partitions
):
    events = random_events(columns, 1500)
    table = frame(events, columns).repartition(partitions)
    settled = found(settle(table, now_ms=NOW, timeout_s=timeout_ms and timeout_ms / 1000))
    assert settled == expected([event[:columns] for event in events], NOW, timeout_ms)
    assert {row.status for row in settled.values()} == DECIDED | statuses


@pytest.mark.parametrize(("shards", "adaptive"), [(1, "false"), (40, "true")])
def test_any_number_of_shards(conf, frame, random_events, expected, found, shards, adaptive):
    """Adaptive execution joins small partitions: whole shards, so nothing changes."""
    conf("spark.sql.adaptive.enabled", adaptive)
    conf("spark.sql.adaptive.coalescePartitions.parallelismFirst", "false")
    events = random_events(3, 500)
    assert found(settle(frame(events, 5), shards=shards)) == expected(events)


@on_both_sessions
def test_any_settings(conf, frame, random_events, expected, found):
    conf("spark.sql.ansi.enabled", "true")
    conf("spark.sql.session.timeZone", "Asia/Kathmandu")
    for key, value in (
        ("useLargeVarTypes", "true"),
        ("maxRecordsPerBatch", "1"),
        ("pyspark.validateSchema.enabled", "true"),
    ):
        conf(f"spark.sql.execution.arrow.{key}", value)
    events = random_events(4, 50)
    # Without INITs all stays open, and is decided with them.
    inits = [event for event in events if event[2] >= 0]
    left = settle(frame([event for event in events if event[2] < 0], 5), shards=2)
    assert {row.status for row in found(left).values()} == {"OPEN"}
    assert found(settle(frame(inits, 5), open_before=left, shards=2)) == expected(events)
    assert found(settle(combine(frame(events, 5)), shards=2)) == expected(events)


def test_any_cuts_are_those_of_the_twin(frame, random_events, found, reference):
    """Rows of a tree anywhere in the parts, and time-outs: the twin carries its entries over."""
    events = random_events(12, 600)
    left, twin = None, reference.Ledger(clock=lambda: 0)
    for n in range(3):
        part, now = events[n::3], 400 * (n + 1)
        settled = settle(
            frame(part, 4), open_before=left, now_ms=now, timeout_s=0.5, shards=3
        ).localCheckpoint()
        columns = [np.array(column) for column in zip(*part, strict=True)][:4]
        twin.fold(columns[0], columns[1], columns[2].astype(np.int32), columns[3])
        rows = [(d.root_id, d.status.name, *d[2:]) for d in twin.settle(now, 500)]
        rows += [(e[0], "OPEN", *e[1:5], *e[6:]) for e in twin.entries()]
        got = found(settled).items()
        assert {(root, r.status, r.val, r.task, *r[3:7]) for root, r in got} == set(rows)
        left = settled.where("status = 'OPEN'")


def test_decided_rows_are_not_decided_again(frame, found):
    first = settle(frame([(1, 5, 0), (1, 5, -1), (2, 5, 0)]))
    second = settle(frame([(3, 1, 0)]), open_before=first)
    assert {root: row.status for root, row in found(second).items()} == {2: "OPEN", 3: "OPEN"}


def test_the_earliest_reason_is_kept(frame, found):
    events = [
        (1, 5, 0, 9, None),
        (1, 0, -2, 5, "late"),
        (1, 0, -2, 4, "b"),
        (1, 0, -2, 4, "a"),
        (2, 5, 0, 1, None),
        (2, 0, -2, 1, None),
        (3, 0, -2, 1, ""),
    ]
    settled = found(settle(frame(events, 5).repartition(4)))
    assert [settled[root].reason for root in (1, 2, 3)] == ["a", None, ""]
    untimed = frame(events, 5).drop("ts_ms")
    assert found(settle(untimed))[1].reason == "a"
    # What an open row has shown stays, and what is combined keeps its time.
    later = frame([(3, 0, -2, 0, "earlier"), (1, 0, -2, 3, "first")], 5)
    assert found(settle(later, open_before=settle(frame(events, 5))))[3].reason == ""
    combined = combine(frame(events, 5)).unionByName(combine(later))
    assert [found(settle(combined))[root].reason for root in (1, 3)] == ["first", "earlier"]


def test_combine_gives_one_row_per_root_and_partition(frame, random_events, expected, found):
    events = random_events(6, 300)
    table = frame(events, 5)
    combined = combine(table.coalesce(1))
    assert (
        combined.schema.simpleString()
        .removeprefix("struct<")
        .removesuffix(">")
        .replace(":", " ")
        .replace(",", ", ")
        == COMBINED_DDL
    )
    rows = {row.root_id: row for row in combined.collect()}
    assert len(rows) == combined.count() == len(expected(events))
    for root, row in expected(events).items():
        got = rows[root]
        assert (got.val, got.task, got.inits, got.flags) == (
            row.val,
            row.task,
            row.inits,
            row.flags,
        )
        assert (got.first_ms, got.last_ms, got.reason) == (row.first_ms, row.last_ms, row.reason)
        assert (got.reason_ms is None) == (got.reason is None)
    assert found(settle(combine(table.repartition(3)), now_ms=NOW, timeout_s=0.2)) == expected(
        events, NOW, 200
    )


@on_both_sessions
def test_empty_tables_and_partitions(frame, found):
    nothing = frame([], 5)
    assert found(settle(nothing)) == {}
    assert found(settle(nothing.coalesce(1), shards=5, timeout_s=0.001)) == {}
    assert combine(nothing).collect() == []
    one = frame([(1, 5, 0, 1, None)], 5).repartition(8)
    assert found(settle(one, open_before=settle(nothing)))[1].status == "OPEN"
    assert found(settle(nothing, open_before=settle(one)))[1].first_ms == 1


def test_columns_in_any_order(frame, random_events, expected, found):
    events = random_events(8, 100)
    table = frame(events, 5).select("reason", "task", "ts_ms", "val", "root_id")
    assert found(settle(table)) == expected(events)
    again = settle(table).select(
        "reason", "last_ms", "val", "status", "flags", "first_ms", "inits", "task", "root_id"
    )
    still_open = {root: row for root, row in expected(events).items() if row.status == "OPEN"}
    assert found(settle(frame([], 5), open_before=again)) == still_open


@on_both_sessions
def test_the_schema_is_as_documented(frame):
    settled = settle(frame([], 3))
    assert ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in settled.schema) == SETTLED_DDL


@on_both_sessions
def test_nothing_runs_before_an_action(spark, frame):
    """A job that would fail is not noticed until then."""

    def must_not_run(batches):  # in here, as workers cannot import this module
        raise RuntimeError("it ran")
        yield

    table = frame([(1, 5, 0)]).mapInArrow(must_not_run, "root_id bigint, val bigint, task int")
    settled = settle(table, open_before=settle(table))
    with pytest.raises(Exception, match="it ran"):
        settled.collect()


def test_now_is_the_time_of_the_call(frame, found):
    long_ago = settle(frame([(1, 5, 0, 0)], 4), timeout_s=10**9)
    assert found(long_ago)[1].status == "EXPIRED"
    assert found(settle(frame([(1, 5, 0, 0)], 4), timeout_s=2**62 / 1000))[1].status == "OPEN"


def test_partitions_of_an_rdd(spark, random_events, expected):
    events = random_events(10, 300)
    rdd = spark.sparkContext.parallelize(events, 3).keyBy(lambda event: event[0])
    rdd = rdd.partitionBy(3).values()
    rows = rdd.mapPartitions(settle_partitions).collect()
    assert {row[0]: row[1:] for row in rows} == expected(events)
    assert len(rows) == len(expected(events))
    untimed = [event[:3] for event in events]
    rows = list(settle_partitions(iter(untimed)))
    assert {row[0]: row[1:] for row in rows} == expected(untimed)
    nones = [(*event[:3], None, event[4]) for event in events]
    rows = list(settle_partitions(iter(nones)))
    assert {row[0]: row[1:] for row in rows} == expected(nones)
    rows = list(settle_partitions(iter(events), now_ms=NOW, timeout_s=0.2))
    assert {row[0]: row[1:] for row in rows} == expected(events, NOW, 200)
    rows = list(settle_partitions(iter(events), timeout_s=1))
    assert {row[0]: row[1:] for row in rows} == expected(events, time.time_ns() // 1_000_000, 1000)
    assert list(settle_partitions(iter([]))) == []


def test_rows_that_are_no_events_are_refused():
    with pytest.raises(ValueError, match=r"rows must be tuples .* got lengths \[2\]"):
        list(settle_partitions([(1, 2)]))
    with pytest.raises(ValueError, match=r"got lengths \[3, 4\]"):
        list(settle_partitions([(1, 2, 3), (1, 2, 3, 4)]))
    with pytest.raises(TypeError, match=r"rows must be an iterable of tuples, got int; call it as"):
        list(settle_partitions(5))
    with pytest.raises(TypeError, match=r"rows must be tuples .*: object of type 'int' has no le"):
        list(settle_partitions([1, 2, 3]))
    with pytest.raises(TypeError, match="rows: val must be int64"):
        list(settle_partitions([(1, "2", 3)]))
    # 5.9 would be 5, and the root ACKED.
    for row in ((1, 5.9, -1), (1.5, 5, -1), (1, 5, -1.9), (2.0**53 + 2**11, 0.5, 0)):
        with pytest.raises(TypeError, match=r"rows: \w+ must be int\d+: .* would become"):
            list(settle_partitions([(1, 5, 0), row]))
    rows = [(np.int64(1), 5.0, np.int32(0)), (1, Decimal(5), -1)]
    assert [row[1] for row in settle_partitions(rows)] == ["ACKED"]
    with pytest.raises(ValueError, match="rows: root_id must not hold nulls, got 1 of 1 rows"):
        list(settle_partitions([(None, 2, 3)]))
    with pytest.raises(ValueError, match=r"tasks must be .* got -4 in row 1"):
        list(settle_partitions([(1, 2, 3), (1, 2, -4)]))
    with pytest.raises(ValueError, match="timeout_s was given, but the events have no times"):
        list(settle_partitions([(1, 2, 3)], timeout_s=0.001))
    with pytest.raises(ValueError, match="ts_ms must not hold nulls"):
        list(settle_partitions([(1, 2, 3, 4), (1, 2, 3, None)]))
