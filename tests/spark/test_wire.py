"""Blobs hold what was packed, whole, and the same bytes whenever the same is packed."""

from __future__ import annotations

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore import Entries
from ackcore._arrow.shown import text_of
from ackcore._backend import split_by_shard
from ackcore.spark.base.reasons import REASON_SCHEMA, earliest, first_reasons, look_up, reasons_of
from ackcore.spark.settle import wire
from ackcore.topology.tuples import Reason

RNG = np.random.default_rng(5)


def ids(n):
    return RNG.integers(-(2**63), 2**63 - 1, n)


def some_events(n, timed=False, most=7):
    return wire.Events(
        ids(n), ids(n), RNG.integers(-3, most, n).astype(np.int32), ids(n) if timed else None
    )


def some_entries(n, timed=False):
    inits = RNG.integers(0, 3, n).astype(np.uint8)
    tasks = np.where(inits > 0, RNG.integers(0, 2**31 - 1, n), -1).astype(np.int32)
    flags = np.where(inits == 2, RNG.integers(0, 4, n), RNG.integers(0, 2, n)).astype(np.uint8)
    times = (ids(n), ids(n)) if timed else (None, None)
    return Entries(ids(n), ids(n), tasks, inits, flags, np.zeros(n, np.uint8), *times)


def rows_of(table):
    columns = table if isinstance(table, wire.Events) else list(table.columns().values())
    return sorted(zip(*(c.tolist() for c in columns if c is not None), strict=True))


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 7, 300])
@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_what_is_packed_is_unpacked(timed, shards, n):
    for rows, pack in (
        (some_events(n, timed), wire.pack_events),
        (some_entries(n, timed), partial(wire.pack_entries, most_rows=1000)),
    ):
        packed = pack(rows, shards)
        batches = [packed] if isinstance(packed, pa.RecordBatch) else list(packed)
        (batch,) = batches or [pa.RecordBatch.from_pylist([], wire.BLOB_SCHEMA)]
        assert batch.schema == wire.BLOB_SCHEMA
        assert batch["dest"].to_pylist() == sorted(set(batch["dest"].to_pylist()))
        parts = list(wire.unpack(batch))
        assert sorted(row for part in parts for row in rows_of(part)) == rows_of(rows)
        for dest, part in zip(batch["dest"].to_pylist(), parts, strict=True):
            roots = part[0] if isinstance(part, wire.Events) else part.root_ids
            _, counts = split_by_shard(roots, shards)
            assert counts[dest] == len(roots) > 0


def test_rows_keep_their_order_within_a_shard():
    events = some_events(5000)
    for part in wire.unpack(wire.pack_events(events, 6)):
        places = [events.root_ids.tolist().index(root) for root in part.root_ids.tolist()]
        assert places == sorted(places)


@pytest.mark.parametrize(("most", "width"), [(127, 1), (2**15 - 1, 2), (2**31 - 1, 4)])
def test_tasks_are_as_narrow_as_they_may(most, width):
    tasks = np.array([-3, most, 0], np.int32)
    events = wire.Events(ids(3), ids(3), tasks)
    (blob,) = wire.pack_events(events, 1)["blob"].to_pylist()
    assert len(blob) == -(-(16 + 3 * (16 + width)) // 8) * 8
    (part,) = wire.unpack(wire.pack_events(events, 1))
    assert part.tasks.tolist() == tasks.tolist()
    assert part.tasks.dtype == np.int32


def test_the_same_rows_are_the_same_bytes(monkeypatch):
    """Spark gives a job up if a task that runs again writes other bytes: no byte is left over.

    Whatever memory held before is made to differ between the two packings.
    """
    events, entries = some_events(999, timed=True), some_entries(999)
    empty = np.empty
    packed = []
    for rest in (0x00, 0xA5):

        def dirty(shape, dtype=float, rest=rest):
            memory = empty(shape, dtype)
            memory.view(np.uint8).fill(rest)
            return memory

        monkeypatch.setattr(np, "empty", dirty)
        packed.append(
            [
                batch["blob"].to_pylist()
                for batch in (wire.pack_events(events, 13), *wire.pack_entries(entries, 13, 999))
            ]
        )
    assert packed[0] == packed[1]


def test_blobs_are_read_wherever_they_lie():
    """In slices, behind 64-bit offsets, and at odd addresses."""
    events = some_events(500)
    batch = wire.pack_events(events, 9)
    wide = batch.set_column(2, "blob", batch["blob"].cast(pa.large_binary()))
    odd = batch.set_column(2, "blob", pa.array([b"x", *batch["blob"].to_pylist()])[1:])
    for other in (wide, odd):
        assert [rows_of(part) for part in wire.unpack(other)] == [
            rows_of(part) for part in wire.unpack(batch)
        ]
    assert [rows_of(part) for part in wire.unpack(batch.slice(3, 2))] == [
        rows_of(part) for part in wire.unpack(batch)
    ][3:5]
    assert list(wire.unpack(batch.slice(0, 0))) == []
    assert (
        list(wire.unpack(wire.BLOB_SCHEMA.empty_table().to_batches()[0:1] or batch.slice(9))) == []
    )


def reasons(*rows):
    columns = list(zip(*rows, strict=True)) or [[], [], []]
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, REASON_SCHEMA, strict=True)],
        schema=REASON_SCHEMA,
    )


def test_reasons_are_packed():
    table = reasons((5, 1, "a"), (-5, 2, ""), (2**63 - 1, -3, "日本語\x00"), (0, 0, "x" * 1000))
    for shards in (1, 3, 50):
        parts = list(wire.unpack(wire.pack_reasons(table, shards)))
        assert earliest(parts).equals(earliest([table]))
    assert list(wire.unpack(wire.pack_reasons(REASON_SCHEMA.empty_table(), 3))) == []


def said(after_ms=0, counts=True, message="m", final=False):
    return Reason("b", "E", message, final, after_ms, counts).encode()


def test_the_longest_wait_that_is_asked_for_counts():
    tables = [
        reasons((1, 0, said(30_000, message="z")), (2, 0, said(5)), (3, 0, said(7, counts=False))),
        reasons((1, 0, said(500)), (2, 0, said(message="a")), (3, 0, said(2, message="b"))),
        reasons((4, 0, said(9)), (4, 0, said(message="gone", final=True))),
    ]
    kept = first_reasons(tables)
    assert kept["text"].to_pylist() == [
        said(30_000),
        said(5, message="a"),
        said(7, message="b"),  # one of the two was an attempt
        said(message="gone", final=True),
    ]


REASONS = st.tuples(
    st.integers(0, 3),
    st.integers(0, 1),
    st.builds(said, st.sampled_from([0, 1, 40, 500]), st.booleans(), st.sampled_from("ab")),
)


@given(st.lists(st.lists(REASONS, max_size=4), max_size=4))
def test_reasons_are_joined_in_any_grouping(parts):
    at_once = first_reasons([reasons(*rows) for rows in parts])
    in_turn = REASON_SCHEMA.empty_table()
    for rows in reversed(parts):
        in_turn = first_reasons([reasons(*reversed(rows)), in_turn])
    assert in_turn.to_pylist() == at_once.to_pylist()


def test_the_earliest_reason_by_time_and_text():
    tables = [
        reasons((1, 5, "z"), (2, 5, "b"), (2, 5, "B")),
        reasons((1, 4, "zz"), (2, 5, "ä"), (-9, 0, "")),
    ]
    kept = earliest(tables)
    assert kept.to_pylist() == reasons((-9, 0, ""), (1, 4, "zz"), (2, 5, "B")).to_pylist()
    assert earliest(tables[::-1]).equals(kept)
    texts, times = look_up(kept, np.array([2, 7, -9, 1, -10, 99]))
    assert texts.to_pylist() == ["B", None, "", "zz", None, None]
    assert times.to_pylist() == [5, None, 0, 4, None, None]
    assert earliest([]).equals(REASON_SCHEMA.empty_table())
    assert look_up(REASON_SCHEMA.empty_table(), np.array([1]))[0].to_pylist() == [None]


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string(), pa.string_view()])
def test_rows_with_a_reason_are_found(arrow_type):
    texts = pa.array(["skip", None, "a", "", None], arrow_type)[1:]
    found = reasons_of(np.array([1, 2, 3, 4]), np.array([9, 8, 7, 6]), texts)
    assert found.to_pylist() == reasons((2, 8, "a"), (3, 7, "")).to_pylist()
    assert reasons_of(np.array([1]), 0, texts[:1]) is None
    latin_1 = text_of([b"caf\xe9", b"ok"]).cast(arrow_type)
    escaped = reasons_of(np.array([1, 2]), 0, latin_1)
    assert escaped.to_pylist() == reasons((1, 0, "caf\\xe9"), (2, 0, "ok")).to_pylist()
