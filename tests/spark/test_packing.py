"""A partition is folded where that pays, and leaves the same bytes however its rows arrive."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from ackcore.spark.settle import packing, wire
from ackcore.spark.settle.worker_functions import (
    EVENT_TYPES,
    entries_packer,
    events_packer,
    read_events,
    settle_blobs,
)

SCHEMA = pa.schema(list(EVENT_TYPES.items()))


@pytest.fixture
def small(monkeypatch):
    """The same thresholds, for tables of a few thousand rows."""
    monkeypatch.setattr(packing, "CHUNK_ROWS", 1000)
    monkeypatch.setattr(packing, "PROBE_ROWS", 400)
    monkeypatch.setattr(packing, "LIKELY_ROWS", 20_000)
    monkeypatch.setattr(packing, "TABLES", ((2000, 10), (10**6, 60)))
    monkeypatch.setattr(packing, "UNFOLDED_CHUNKS", 15)


def batch_of(events):
    columns = list(zip(*events, strict=True)) or [[]] * 5
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def cut(batch, *sizes):
    """Slices of a batch, their sizes in turn."""
    start = n = 0
    while start < len(batch):
        yield batch.slice(start, sizes[n % len(sizes)])
        start += sizes[n % len(sizes)]
        n += 1


def packed(batches, *, fixed_order, shards=3):
    pack = events_packer(shards, seed=9, timed=True, reasons=True, fixed_order=fixed_order)
    return list(pack(iter(batches)))


def as_rows(blobs):
    return [row for batch in blobs for row in zip(*batch.to_pydict().values(), strict=True)]


def settled(blobs):
    rows = [row for batch in settle_blobs(seed=9)(iter(blobs)) for row in batch.to_pylist()]
    by_root = {row.pop("root_id"): tuple(row.values()) for row in rows}
    assert len(by_root) == len(rows)
    return by_root


def in_order(expected):
    return {
        root: (r.status, r.task, r.val, r.inits, r.flags, r.first_ms, r.last_ms, r.reason)
        for root, r in expected.items()
    }


@pytest.mark.parametrize("fixed_order", [True, False])
def test_batches_do_not_show(small, random_events, expected, fixed_order):
    """The same rows in other batches: the same blobs, byte by byte."""
    events = random_events(21, 2500)
    batch = batch_of(events)
    whole = packed([batch], fixed_order=fixed_order)
    for sizes in [(1000,), (17, 0, 300), (999, 1), (1,)]:
        assert as_rows(packed(cut(batch, *sizes), fixed_order=fixed_order)) == as_rows(whole)
    assert settled(whole) == in_order(expected(events))


def test_the_order_of_rows_does_not_show_where_it_is_not_fixed(small, random_events, expected):
    """Rows from a shuffle come as they come; a task that runs again must leave the same bytes."""
    events = random_events(22, 1500)
    other = [events[n] for n in np.random.default_rng(1).permutation(len(events))]
    one, two = batch_of(events), batch_of(other)
    assert as_rows(packed([one], fixed_order=False)) == as_rows(packed([two], fixed_order=False))
    assert settled(packed([two], fixed_order=True)) == in_order(expected(events))


def test_entries_leave_the_same_bytes_too(small, random_events):
    """Open rows come out of a shuffle, in whatever order."""
    events = random_events(23, 500)
    batches = list(settle_blobs(seed=9)(iter(packed([batch_of(events)], fixed_order=True))))
    rows = pa.Table.from_batches(batches)
    shuffled = rows.take(pa.array(np.random.default_rng(2).permutation(len(rows))))
    pack = entries_packer(3, seed=9, timed=True)
    one = as_rows(pack(iter(rows.to_batches())))
    two = as_rows(pack(iter(shuffled.to_batches(max_chunksize=7))))
    assert one == two
    # Only open rows go on.
    assert {row[1] for row in one} == {wire.ENTRIES, wire.REASONS}
    (counts,) = {sum(len(part.root_ids) for part in parts(one))}
    assert counts == rows["status"].to_pylist().count("OPEN")


def parts(rows):
    columns = list(zip(*rows, strict=True))
    arrays = [pa.array(c, f.type) for c, f in zip(columns, wire.BLOB_SCHEMA, strict=True)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=wire.BLOB_SCHEMA)
    return [part for part in wire.unpack(batch) if not isinstance(part, pa.Table)]


def table(roots):
    n = len(roots)
    return wire.Events(np.asarray(roots, np.int64), np.arange(n), np.full(n, -1, np.int32), None)


def kinds(events, fixed_order=True):
    packer = packing.Packer(1, seed=1, timed=False, fixed_order=fixed_order)
    batches = [*packer.add(events), *packer.finish()]
    found = [part for batch in batches for part in wire.unpack(batch)]
    return ["events" if isinstance(part, wire.Events) else "entries" for part in found]


def test_trees_that_lie_together_are_folded(small):
    assert kinds(table(np.arange(20_000) // 5)) == ["entries"] * 4
    # Rows of a tree apart, but within the partition, and few enough trees: estimated from the first
    # 400 rows, of which some 20 meet a root again.
    rng = np.random.default_rng(3)
    assert kinds(table(rng.permutation(np.arange(20_000) % 1500))) == ["entries"] * 2


def test_trees_that_lie_elsewhere_are_shipped_unfolded(small):
    chunks = kinds(table(np.arange(20_000)))
    assert chunks == ["events"] * 20


def test_folding_is_given_up_and_tried_again(small, monkeypatch):
    """Local, then scattered, then local again: 15 chunks as they are, then another probe."""
    local = np.arange(10_000) // 5
    scattered = np.arange(10_000, 40_000)
    again = np.arange(10_000) // 5 + 50_000
    chunks = kinds(table(np.concatenate([local, scattered, again])))
    assert chunks[0] == "entries"
    assert chunks[-1] == "entries"
    assert chunks.count("events") >= 15


def test_without_a_fixed_order_all_is_folded(small):
    assert set(kinds(table(np.arange(20_000)), fixed_order=False)) == {"entries"}


def test_a_partition_too_large_to_sort_is_cut(small, monkeypatch, random_events, expected):
    monkeypatch.setattr(packing, "HELD_ROOTS", 500)
    events = random_events(24, 2500)
    blobs = packed([batch_of(events)], fixed_order=False)
    assert len(blobs) > 3
    assert settled(blobs) == in_order(expected(events))


def test_many_reasons_are_cut_too(small, monkeypatch, expected):
    monkeypatch.setattr(packing, "CHUNK_ROWS", 100)
    events = [(n // 2, 0, -2, n, f"reason {n}") for n in range(2000)]
    blobs = packed(cut(batch_of(events), 30), fixed_order=True)
    assert settled(blobs) == in_order(expected(events))


def test_what_is_refused_is_placed(random_events):
    events = random_events(25, 100)

    def refused(match, *broken, timed=True):
        batches = cut(batch_of([*events[:50], *broken]), 20)
        with pytest.raises((TypeError, ValueError), match=match):
            list(read_events(batches, timed, True))

    place = r"\(row 0 is row 40 of partition 0\)"
    refused(
        rf"events: root_id must not hold nulls, got 2 of 13 rows, the first in row 10.*{place}",
        (None, 1, 0, 1, None),
        (1, 1, 0, 1, None),
        (None, 1, 0, 1, None),
    )
    refused("val must not hold nulls", (1, None, 0, 1, None))
    refused("task must not hold nulls", (1, 1, None, 1, None))
    refused("ts_ms must not hold nulls", (1, 1, 0, None, None))
    refused(rf"tasks must be .*, got -4 in row 10 {place}", (1, 1, -4, 1, None))
    list(read_events(iter([batch_of([(1, 1, 0, None, None)])]), False, True))


@pytest.mark.parametrize(
    ("column", "value", "match"),
    [
        ("inits", pa.array([3], pa.int8()), "inits must be 0, 1, or 2"),
        ("flags", pa.array([-1], pa.int8()), "flags"),
        ("val", pa.array([None], pa.int64()), "val must not hold nulls"),
        ("first_ms", pa.array([None], pa.int64()), "first_ms must not hold nulls"),
    ],
)
def test_open_rows_that_no_ledger_left_are_refused(column, value, match):
    blobs = packed([batch_of([(1, 5, 0, 1, None)])], fixed_order=True)
    (left,) = settle_blobs(seed=9)(iter(blobs))
    place = left.schema.get_field_index(column)
    assert left.schema.types[place] == value.type
    changed = left.set_column(place, column, value)
    pack = entries_packer(3, seed=9, timed=True, name="open_before")
    assert list(pack(iter([left])))
    with pytest.raises(ValueError, match=f"open_before: {match}"):
        list(pack(iter([changed])))


def test_blobs_with_and_without_times_do_not_mix(random_events):
    events = batch_of(random_events(26, 100))
    timed = list(events_packer(1, seed=1, timed=True)(iter([events])))
    untimed = list(events_packer(1, seed=1)(iter([events])))
    for blobs in (timed + untimed, untimed + timed):
        with pytest.raises(ValueError, match="must all have times, or none"):
            list(settle_blobs(seed=1)(iter(blobs)))
    with pytest.raises(ValueError, match="timeout_s was given, but the events have no times"):
        list(settle_blobs(seed=1, now_ms=1, timeout_ms=1)(iter(untimed)))
    rows = list(settle_blobs(seed=1)(iter(untimed)))
    with pytest.raises(ValueError, match="open_before has none"):
        list(entries_packer(1, seed=1, timed=True, name="open_before")(iter(rows)))
    rows = list(settle_blobs(seed=1)(iter(timed)))
    with pytest.raises(ValueError, match="events has none"):
        list(entries_packer(1, seed=1, timed=False)(iter(rows)))


PACK = """
import hashlib
import numpy as np
from ackcore.spark.settle import packing, wire
from ackcore.spark.settle.worker_functions import combine_events, events_packer, settle_blobs
import pyarrow as pa

packing.CHUNK_ROWS, packing.PROBE_ROWS, packing.TABLES = 3000, 2000, ((2000, 10), (8000, 50))
rng = np.random.default_rng(5)
roots = np.repeat(rng.integers(-(2**63), 2**63 - 1, 6000), 5)
columns = [roots, rng.integers(-(2**63), 2**63 - 1, len(roots)), np.full(len(roots), -1, np.int32)]
batch = pa.record_batch(columns, ["root_id", "val", "task"])
digest = hashlib.blake2b()
kinds = set()
for fixed_order in (True, False):
    blobs = list(events_packer(7, seed=9, fixed_order=fixed_order)(iter([batch])))
    for found in blobs:
        digest.update(found.serialize())
        kinds.update(found["kind"].to_pylist())
    # Rows of results have no order: Spark's checksum of them does not depend on any.
    settled = [row for found in settle_blobs(seed=9)(iter(blobs)) for row in found.to_pylist()]
    digest.update(repr(sorted(map(repr, settled))).encode())
assert wire.ENTRIES in kinds
for found in combine_events(seed=9)(iter([batch])):
    digest.update(found.serialize())
print(digest.hexdigest())
"""


def test_what_is_packed_and_settled_is_the_same_on_every_processor():
    """Spark gives a job up if a task that runs again, on another host, writes other bytes."""
    packed = {}
    for level in ["baseline", "avx2", "avx512", "python"]:
        done = subprocess.run(
            [sys.executable, "-c", PACK],
            env={
                **{name: value for name, value in os.environ.items() if name != "ACKCORE_CPU"},
                "ACKCORE_BACKEND": "python" if level == "python" else "native",
                **({} if level == "python" else {"ACKCORE_CPU": level}),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if "this machine does not run it" not in done.stderr:
            assert done.returncode == 0, done.stderr
            packed[level] = done.stdout
    assert {"baseline", "python"} <= packed.keys()
    assert len(set(packed.values())) == 1, packed
