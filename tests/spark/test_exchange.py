"""A task's batches arrive whole and in their place, or are refused."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from branching import with_head

from ackcore.spark.settle import wire
from ackcore.spark.tasks import exchange
from ackcore.spark.tasks.exchange import Inbox, Outbox, read_receipts
from ackcore.spark.tasks.exchange_format import (
    LEDGER,
    SETTLE,
    TRAILER,
    TUPLES,
    RootRuns,
    TrailerReceipt,
    origin_of,
)

LEVEL, DESTS = 2, 3
ROWS = pa.record_batch({"n": pa.array(range(6), pa.int64())})
COUNTS = np.array([2, 0, 4])
ORIGIN = origin_of(1, 7)


def runs_of(rows):
    roots = np.arange(rows, dtype=np.int64)
    return RootRuns(np.ones(rows, np.int32), roots, roots + 100)


def sent(origin=ORIGIN, report=b"report", change=lambda outbox: None, alike=None):
    """A task sends six rows, a ledger row and its trailers: its outbox."""
    outbox = Outbox(origin, DESTS)
    outbox.send_tuples(5, LEVEL, ROWS, COUNTS, [runs_of(count) for count in COUNTS.tolist()])
    ids = np.array([17], np.int64)
    events = wire.Events(ids, ids, np.array([-1], np.int32), None)
    outbox.send_ledger_rows(wire.pack_events(events, DESTS))
    change(outbox)
    outbox.send_trailers([LEVEL, SETTLE], report, report if alike is None else alike)
    return outbox


def rows_of(outbox):
    return [with_head(row) for batch in outbox.taken() for row in batch.to_pylist()]


def read(rows, dest, level, wide=False):
    """Send one task its rows; return its inbox and the rows it passes on."""
    mine = [row for row in rows if row["dest"] == dest]
    batch = pa.RecordBatch.from_pylist(mine, exchange.ROW_SCHEMA)
    if wide:
        large = [
            pa.field(f.name, pa.large_binary()) if f.type == pa.binary() else f
            for f in batch.schema
        ]
        batch = batch.cast(pa.schema(large))
    inbox = Inbox(level)
    passed = inbox.read(batch)
    return inbox, [] if passed is None else [*map(with_head, passed.to_pylist())]


def opened(inbox):
    return [
        (
            got.origin,
            got.subscription,
            pa.ipc.read_record_batch(got.blob, ROWS.schema)["n"].to_pylist(),
            RootRuns.unpack(got.side).roots.tolist(),
        )
        for got in sorted(inbox.tuples, key=lambda got: (got.origin, got.seq))
    ]


@pytest.mark.parametrize("wide", [False, True], ids=["as sent", "with wide offsets"])
def test_rows_arrive_where_they_were_sent(wide):
    rows = rows_of(sent())
    for dest, numbers in enumerate([[0, 1], [], [2, 3, 4, 5]]):
        inbox, passed = read(rows, dest, LEVEL, wide)
        inbox.check()
        expected = [(ORIGIN, 5, numbers, list(range(len(numbers))))] if numbers else []
        assert opened(inbox) == expected
        # What a later level opens goes on as it is.
        later = [row for row in rows if row["dest"] == dest and row["level"] == SETTLE]
        assert passed == later
        last, beyond = read(later, dest, SETTLE)
        last.check()
        assert beyond == []
        assert len(last.ledger) == sum(row["kind"] == LEDGER for row in later)
        assert last.task_reports == ({ORIGIN: {b"report"}} if dest == 0 else {})


def test_the_order_of_arrival_does_not_show():
    rows = rows_of(sent()) + rows_of(sent(origin_of(1, 8))) + rows_of(sent(origin_of(0, 0)))
    inbox, _ = read(rows, 2, LEVEL)
    shuffled = random.Random(3).sample(rows, len(rows))
    assert shuffled != rows
    other, _ = read(shuffled, 2, LEVEL)
    other.check()
    assert opened(other) == opened(inbox)
    assert other.receipts(4) == inbox.receipts(4)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (TUPLES, "got 0 rows from partition 7 of stage 1, which sent 1: rows were lost in"),
        (TRAILER, "partition 7 of stage 1, which sent an unknown number: rows were lost in"),
    ],
)
def test_what_did_not_come_whole_is_refused(lost, message):
    rows = [row for row in rows_of(sent()) if row["level"] == LEVEL and row["kind"] != lost]
    inbox, _ = read(rows, 2, LEVEL)
    with pytest.raises(RuntimeError, match=message):
        inbox.check()


def test_a_row_that_comes_twice_is_refused():
    rows = rows_of(sent())
    inbox, _ = read([*rows, *(row for row in rows if row["kind"] == TUPLES)], 2, LEVEL)
    said = r"got 2 rows .*, which sent 1: rows arrived twice .*, or for a bolt that forks"
    with pytest.raises(RuntimeError, match=said):
        inbox.check()


def test_trailers_of_two_runs_of_a_task_are_both_kept():
    """Its consumer cannot tell which one counts: the driver compares what all of them saw."""
    one, two = sent(), sent(report=b"another")
    trailers = [row for row in rows_of(two) if row["kind"] == TRAILER]
    inbox, _ = read([*rows_of(one), *trailers], 2, LEVEL)
    inbox.check()
    assert sorted(read_receipts(inbox.receipts(9))) == sorted(
        [TrailerReceipt(9, ORIGIN, one.fingerprint), TrailerReceipt(9, ORIGIN, two.fingerprint)]
    )
    assert one.fingerprint != two.fingerprint


def test_what_attempts_may_have_otherwise_makes_no_two_of_them_differ():
    """The number of times a breaker opened depends on the time."""
    one, other = (sent(report=report, alike=b"alike") for report in (b"alike 1", b"alike 2"))
    assert one.fingerprint == other.fingerprint != sent(report=b"other").fingerprint
    assert read(rows_of(other), 0, SETTLE)[0].task_reports == {ORIGIN: {b"alike 2"}}


CHANGES = {
    "one row more": lambda outbox: outbox.send(0, LEVEL, TUPLES, b"x"),
    "for another task": lambda outbox: outbox.send(1, LEVEL, TUPLES, b"x"),
    "for another level": lambda outbox: outbox.send(0, LEVEL + 1, TUPLES, b"x"),
    "of another kind": lambda outbox: outbox.send(0, LEVEL, LEDGER, b"x"),
    "for another subscription": lambda outbox: outbox.send(0, LEVEL, TUPLES, b"x", subscription=1),
    "with another tracking": lambda outbox: outbox.send(0, LEVEL, TUPLES, b"x", b"y"),
    "a file": lambda outbox: outbox.add_to_fingerprint(b"x"),
    "nothing": lambda outbox: None,
}


def test_everything_that_a_task_emits_is_in_its_fingerprint():
    """Two runs that differ anywhere are told apart by each of their consumers."""
    found = {name: sent(change=change).fingerprint for name, change in CHANGES.items()}
    assert len(set(found.values())) == len(CHANGES)
    assert {name: sent(change=change).fingerprint for name, change in CHANGES.items()} == found
    # Every trailer has that of the whole output, wherever it goes.
    outbox = sent()
    heads = {
        exchange.TRAILER_BLOB.unpack(row["blob"])[0]
        for row in rows_of(outbox)
        if row["kind"] == TRAILER
    }
    assert heads == {outbox.fingerprint}


def test_batches_are_cut_by_size_and_nothing_else(monkeypatch):
    whole = rows_of(sent())
    monkeypatch.setattr(exchange, "_BATCH_BYTES", 100)
    outbox = sent()
    batches = list(outbox.taken())
    assert len(batches) > 2
    assert [with_head(row) for batch in batches for row in batch.to_pylist()] == whole
    assert list(outbox.taken()) == []
