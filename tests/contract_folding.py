"""SEMANTICS 4 as cases: folding never decides, and settling decides once."""

from __future__ import annotations

import itertools
from typing import Any

from ledger_scripts import (
    MAX,
    MIN,
    Clock,
    Factory,
    Row,
    entries_of,
    expect,
    int32s,
    int64s,
    snapshot,
)

from ackcore._records import (
    ACK,
    ACKED,
    ANOMALY,
    EXPIRED,
    FAIL,
    FAILED,
    FLAG_FAILED,
    FLAG_TASKS_DIFFER,
    ORPHAN,
    RESET,
    Decision,
    Entry,
    Status,
)

BOTH = FLAG_FAILED | FLAG_TASKS_DIFFER

#: Pairs of rows and what they merge to, without root: val, task, inits, flags, age, first, last.
_MERGES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "vals XOR": ((5, -1, 0, 0, 0, 1, 1), (3, -1, 0, 0, 0, 1, 1), (6, -1, 0, 0, 0, 1, 1)),
    "all 64 bits": ((MIN, -1, 0, 0, 0, 1, 1), (MAX, -1, 0, 0, 0, 1, 1), (-1, -1, 0, 0, 0, 1, 1)),
    "an init meets acks": ((5, 4, 1, 0, 0, 1, 1), (5, -1, 0, 0, 0, 1, 1), (0, 4, 1, 0, 0, 1, 1)),
    "task 0 is a task": ((5, 0, 1, 0, 0, 1, 1), (1, -1, 0, 0, 0, 1, 1), (4, 0, 1, 0, 0, 1, 1)),
    "two inits alike": ((5, 4, 1, 0, 0, 1, 1), (5, 4, 1, 0, 0, 1, 1), (0, 4, 2, 0, 0, 1, 1)),
    "tasks differ": ((5, 4, 1, 0, 0, 1, 1), (1, 6, 1, 0, 0, 1, 1), (4, 6, 2, 2, 0, 1, 1)),
    "inits saturate": ((5, 4, 2, 0, 0, 1, 1), (1, 4, 2, 0, 0, 1, 1), (4, 4, 2, 0, 0, 1, 1)),
    "saturated, and others": ((5, 4, 2, 0, 0, 1, 1), (1, 3, 1, 0, 0, 1, 1), (4, 4, 2, 2, 0, 1, 1)),
    "failed stays": ((5, -1, 0, 1, 0, 1, 1), (1, 4, 1, 0, 0, 1, 1), (4, 4, 1, 1, 0, 1, 1)),
    "flags OR": ((5, 4, 2, 2, 0, 1, 1), (1, -1, 0, 1, 0, 1, 1), (4, 4, 2, 3, 0, 1, 1)),
    "youngest age": ((5, -1, 0, 0, 2, 1, 1), (1, -1, 0, 0, 1, 1, 1), (4, -1, 0, 0, 1, 1, 1)),
    "first and last": ((5, -1, 0, 0, 0, 9, 20), (1, -1, 0, 0, 0, 5, 7), (4, -1, 0, 0, 0, 5, 20)),
    "any time": ((5, -1, 0, 0, 0, MIN, 9), (1, -1, 0, 0, 0, -3, MAX), (4, -1, 0, 0, 0, MIN, MAX)),
}  # fmt: skip


def check_merging_two_rows(factory: Factory) -> None:
    """Each rule of merging, either way round, in one call and in two, with times and without."""
    for (what, (one, other, merged)), timed in itertools.product(_MERGES.items(), (True, False)):
        clock = Clock() if timed else None
        rows = [_row_of(7, row, timed) for row in (one, other)]
        for order in (rows, rows[::-1]):
            for calls in ([order], [order[:1], order[1:]]):
                ledger = factory(clock=clock)
                for call in calls:
                    expect(ledger.merge(entries_of(call)), None, "merge returns nothing")
                expect(list(ledger.entries()), [_row_of(7, merged, timed)], what)


def _row_of(root: int, row: tuple[int, ...], timed: bool) -> Entry:
    val, task, inits, flags, age, first_ms, last_ms = row
    times = (first_ms, last_ms) if timed else (None, None)
    return Entry(root, val, task, inits, flags, age, *times)


#: Messages, each (val, task), and the row that they fold to: val, task, inits, flags.
_FOLDS: dict[str, tuple[list[tuple[int, int]], tuple[int, int, int, int]]] = {
    "an init": ([(5, 4)], (5, 4, 1, 0)),
    "an ack": ([(5, ACK)], (5, -1, 0, 0)),
    "a fail ignores its val": ([(5, FAIL)], (0, -1, 0, FLAG_FAILED)),
    "a reset ignores its val": ([(5, RESET)], (0, -1, 0, 0)),
    "a whole tree is not decided": ([(5, 4), (5, ACK)], (0, 4, 1, 0)),
    "an init of zero is not decided": ([(0, 4)], (0, 4, 1, 0)),
    "a failed tree is not decided": ([(5, 4), (0, FAIL)], (5, 4, 1, FLAG_FAILED)),
    "nor one that comes to zero": ([(5, 4), (0, FAIL), (5, ACK)], (0, 4, 1, FLAG_FAILED)),
    "a tree and a half": ([(5, 4), (5, ACK), (5, ACK)], (5, 4, 1, 0)),
    "two inits": ([(5, 4), (6, 4)], (3, 4, 2, 0)),
    "three inits": ([(5, 4), (6, 4), (8, 4)], (11, 4, 2, 0)),
    "two tasks": ([(5, 4), (6, 2)], (3, 4, 2, FLAG_TASKS_DIFFER)),
    "everything": ([(5, 4), (6, 2), (1, ACK), (9, FAIL), (9, RESET)], (2, 4, 2, BOTH)),
}


def check_folding_messages(factory: Factory) -> None:
    """Messages fold to one row in any order and any cut, and are never decided."""
    for what, (messages, wanted) in _FOLDS.items():
        for order in itertools.permutations(messages):
            for cut in range(len(order)):
                ledger = factory()
                for part in (order[:cut], order[cut:]):
                    _fold(ledger, [(7, *message) for message in part])
                expect(list(ledger.entries()), [Entry(7, *wanted, 0, None, None)], what)


def _fold(ledger: Any, rows: list[Row], times_ms: list[int] | None = None) -> None:
    roots, vals, tasks = zip(*rows, strict=True) if rows else ((), (), ())
    times = None if times_ms is None else int64s(times_ms)
    expect(ledger.fold(int64s(roots), int64s(vals), int32s(tasks), times), None, "fold returns")


def check_folding_keeps_times(factory: Factory) -> None:
    """Times are the given ones, or the clock's, which is then read once; ages become 0."""
    clock = Clock(50)
    ledger = factory(clock=clock)
    _fold(ledger, [(7, 5, 4), (7, 1, ACK), (8, 0, RESET)], [30, 10, 20])
    expect(clock.reads, 0, "reads of the clock when times are given")
    expect([row[-2:] for row in sorted(ledger.entries())], [(10, 30), (20, 20)], "given times")
    ledger.rotate()
    _fold(ledger, [(8, 0, ACK), (8, 0, ACK)])
    expect(clock.reads, 1, "reads of the clock")
    expect(tuple(ledger.get(8)[-3:]), (0, 20, 50), "age and times")
    expect(tuple(ledger.get(7)[-3:]), (1, 10, 30), "age and times of one that was left alone")


def check_apply_decides_what_was_folded(factory: Factory) -> None:
    """A message to a folded entry is a message like any other: SEMANTICS 2 decides."""
    ledger = factory()
    _fold(ledger, [(1, 5, 4), (1, 5, ACK), (2, 5, 4), (2, 0, FAIL)])
    expect(ledger.reset_timeout(1).kind, ACKED, "XOR 0")
    expect(ledger.ack(2, 1).kind, FAILED, "failed")
    expect(len(ledger), 0, "pending")


#: The table of settling, line by line: val, task, inits, flags, past the time-out, status.
_SETTLING: list[tuple[int, int, int, int, bool, Status | None]] = [
    # no init: open, whatever else; past the time-out an orphan
    (5, -1, 0, 0, False, None),
    (0, -1, 0, 0, False, None),
    (5, -1, 0, FLAG_FAILED, False, None),
    (0, -1, 0, FLAG_FAILED, False, None),
    (5, -1, 0, 0, True, ORPHAN),
    (0, -1, 0, FLAG_FAILED, True, ORPHAN),
    # more than one init: an anomaly, never acked
    (0, 4, 2, 0, False, ANOMALY),
    (5, 4, 2, 0, False, ANOMALY),
    (0, 4, 2, FLAG_TASKS_DIFFER, False, ANOMALY),
    (5, 4, 2, BOTH, False, ANOMALY),
    (0, 4, 2, FLAG_FAILED, True, ANOMALY),
    (5, 4, 2, 0, True, ANOMALY),
    # zero beats failed and the time-out
    (0, 4, 1, 0, False, ACKED),
    (0, 4, 1, FLAG_FAILED, False, ACKED),
    (0, 0, 1, 0, True, ACKED),
    (0, 4, 1, FLAG_FAILED, True, ACKED),
    # failed beats the time-out
    (5, 4, 1, FLAG_FAILED, False, FAILED),
    (5, 4, 1, FLAG_FAILED, True, FAILED),
    # past the time-out, or else open
    (5, 0, 1, 0, True, EXPIRED),
    (5, 4, 1, 0, False, None),
]


def check_settling_table(factory: Factory) -> None:
    """Every line of the table, all in one ledger and each in its own."""
    rows, decisions = [], []
    for root, (val, task, inits, flags, past, status) in enumerate(_SETTLING):
        last_ms = 899 if past else 900  # the time-out is 100 and the time 1000
        rows.append(Entry(root, val, task, inits, flags, 0, 3, last_ms))
        if status is not None:
            decisions.append(Decision(root, status, val, task, inits, flags, 3, last_ms))
    opened = sorted({row.root_id for row in rows} - {row.root_id for row in decisions})
    clock = Clock(1_000)
    for now_ms in (1_000, None):
        ledger = factory(clock=clock, capacity=1)
        ledger.merge(entries_of(rows))
        expect(sorted(ledger.settle(now_ms, 100)), decisions, "decisions")
        expect(sorted(ledger.entries().root_ids.tolist()), opened, "the open ones stay")
        expect(list(ledger.settle(now_ms, 100)), [], "nothing is decided twice")
        expect(sorted(ledger.entries().root_ids.tolist()), opened, "the open ones still stay")
    for row in rows:
        ledger = factory(clock=clock)
        ledger.merge(entries_of([row]))
        wanted = [decision for decision in decisions if decision.root_id == row.root_id]
        expect(list(ledger.settle(now_ms=1_000, timeout_ms=100)), wanted, f"{row} alone")


def check_settling_without_a_timeout(factory: Factory) -> None:
    """Without a time-out nothing is past it, with a clock or without."""
    for clock in (None, Clock(MAX)):
        ledger = factory(clock=clock)
        for root, (val, task, inits, flags, _, _) in enumerate(_SETTLING):
            time = 0 if clock else None
            ledger.merge(entries_of([(root, val, task, inits, flags, 0, time, time)]))
        statuses = {row.root_id: row.status for row in ledger.settle()}
        wanted = {
            root: status
            for root, (*_, status) in enumerate(_SETTLING)
            if status not in (None, ORPHAN, EXPIRED)
        }
        expect(statuses, wanted, "decisions")


def check_settling_far_in_time(factory: Factory) -> None:
    """The time-out is exact at the ends of 64 bits."""
    for now_ms, timeout_ms, last_ms, expired in [
        (MAX, 0, MAX, False),
        (MAX, 0, MAX - 1, True),
        (MAX, MAX, 0, False),
        (MAX, MAX, -1, True),
        (0, MAX, MIN, True),
        (-1, MAX, MIN, False),
        (MIN, 5, MIN, False),
        (MIN, 5, MAX, False),
        (MAX, 2**64 + 5, MIN, False),
    ]:
        ledger = factory(clock=Clock())
        ledger.merge(entries_of([(7, 5, 4, 1, 0, 0, last_ms, last_ms)]))
        settled = ledger.settle(now_ms, timeout_ms)
        what = f"now {now_ms}, time-out {timeout_ms}, last {last_ms}"
        expect([row.status for row in settled], [EXPIRED] if expired else [], what)


def check_settling_leaves_the_expired_alone(factory: Factory) -> None:
    """A turn takes its records out of the buckets: they are not decided again."""
    ledger = factory(buckets=2)
    ledger.merge(entries_of([(1, 0, 4, 1, 0, 1, None, None), (2, 0, 4, 1, 0, 0, None, None)]))
    ledger.rotate()
    expect([row.root_id for row in ledger.settle()], [2], "settled")
    expect([row.root_id for row in ledger.expired()], [1], "expired")


def check_late_rows_of_a_decided_root(factory: Factory) -> None:
    """A root that failed in an earlier cut is not decided again: its late rows are an orphan."""
    ledger = factory(clock=Clock())
    _fold(ledger, [(7, 5, 4), (7, 0, FAIL)], [1, 2])
    expect([row.status for row in ledger.settle(10, 5)], [FAILED], "the first cut")
    _fold(ledger, [(7, 5, ACK)], [3])
    expect([row.status for row in ledger.settle(8, 5)], [], "not past the time-out yet")
    expect([row.status for row in ledger.settle(9, 5)], [ORPHAN], "the late row")


def check_tables_delivered_twice(factory: Factory) -> None:
    """Events that come twice XOR to zero, and are anomalies all the same."""
    rows = [(7, 5, 4), (7, 1, ACK), (7, 4, ACK), (8, 6, 4), (8, 0, FAIL)]
    ledger = factory()
    _fold(ledger, rows + rows)
    expect({row.status for row in ledger.settle()}, {ANOMALY}, "statuses")
    expect(len(ledger), 0, "pending")


def check_merging_nothing(factory: Factory) -> None:
    """An empty table and an empty batch change nothing."""
    ledger = factory()
    ledger.init(7, 5, 4)
    before = snapshot(ledger)
    ledger.merge(factory().entries())
    _fold(ledger, [])
    expect(len(ledger.apply(int64s([]), int64s([]), int32s([]))), 0, "outcomes of no rows")
    expect(snapshot(ledger), before, "the ledger")
