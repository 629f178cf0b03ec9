"""SEMANTICS 2 and 3 as cases: what the messages mean, and how time passes."""

from __future__ import annotations

import functools
from typing import Any

from ledger_scripts import (
    MAX,
    MIN,
    Case,
    Clock,
    Factory,
    entries_of,
    expect,
    int32s,
    int64s,
    run_script,
)

from ackcore._records import (
    ACK,
    ACKED,
    FLAG_FAILED,
    Entries,
    Entry,
    Outcomes,
    Settled,
    Stats,
    Status,
)

#: The scripts as cases.
SCRIPTS: list[Case] = []


def _script(name: str, script: str, **options: Any) -> None:
    def check(factory: Factory) -> None:
        run_script(factory, script, **options)

    check.__name__ = name
    SCRIPTS.append(check)


# SEMANTICS 2: the four messages ---------------------------------------------------------------

_script("tree_completes", "I 7 1 3\n A 7 0b11\n pending 1\n A 7 0b10 -> ACKED 7 3\n 7 is gone")
_script(
    "ack_before_init",
    "A 7 5\n 7 is val=5 task=-1 inits=0 flags=0 age=0\n I 7 5 3 -> ACKED 7 3\n pending 0",
)
_script(
    "acks_cancel_before_init",
    """A 7 5
    A 7 5
    7 is val=0 task=-1
    I 7 0 3 -> ACKED 7 3
    pending 0""",
)
_script(
    "acks_cancel_before_an_init_of_more",
    "A 7 5\n A 7 5\n I 7 6 3\n 7 is val=6 task=3 inits=1\n A 7 6 -> ACKED 7 3",
)
_script("fail_before_init", "F 7\n 7 is val=0 task=-1 flags=1\n I 7 5 3 -> FAILED 7 3\n pending 0")
_script("fail_before_an_init_that_makes_zero", "F 7\n A 7 5\n I 7 5 3 -> ACKED 7 3\n pending 0")
_script("zero_beats_failed", "F 7\n I 7 0 3 -> ACKED 7 3\n pending 0")
_script("fail", "I 7 5 3\n F 7 -> FAILED 7 3\n pending 0")
_script("init_of_zero", "I 7 0 3 -> ACKED 7 3\n pending 0")
_script("second_init_of_the_same_value", "I 7 5 4\n I 7 5 3 -> ACKED 7 3\n pending 0")
_script(
    "second_init_of_another_value",
    """I 7 5 3
    I 7 6 4
    7 is val=3 task=4 inits=2 flags=2
    I 7 8 4
    7 is val=11 task=4 inits=2 flags=2
    A 7 11 -> ACKED 7 4""",
)
_script("second_init_by_the_same_task", "I 7 5 3\n I 7 6 3\n 7 is val=3 task=3 inits=2 flags=0")
_script(
    "unknown_roots_make_entries",
    """A 1 5
    F 2
    R 3
    pending 3
    1 is val=5 task=-1 inits=0 flags=0
    2 is val=0 task=-1 inits=0 flags=1
    3 is val=0 task=-1 inits=0 flags=0
    T
    T
    pending 3
    T
    pending 0
    left 1 2 3""",
)
_script(
    "after_failed_comes_an_orphan",
    "I 7 5 3\n F 7 -> FAILED 7 3\n A 7 5\n 7 is val=5 task=-1 flags=0\n F 7\n T\n T\n T\n left 7",
)
_script(
    "after_expiry_comes_an_orphan",
    "I 7 5 3\n T\n T\n T\n pending 0\n A 7 5\n 7 is val=5 task=-1 age=0\n left 7\n pending 1",
)
_script(
    "reset_before_init",
    "R 7\n 7 is val=0 task=-1\n I 7 5 3\n pending 1\n A 7 5 -> ACKED 7 3\n pending 0",
)
_script("reset", "I 7 5 3\n R 7 -> RESET_TIMEOUT 7 3\n pending 1\n A 7 5 -> ACKED 7 3")
_script("reset_is_not_stored", "R 7\n I 7 5 3\n A 7 1\n pending 1\n A 7 4 -> ACKED 7 3")
_script("fail_is_kept_through_a_reset", "F 7\n R 7\n I 7 5 3 -> FAILED 7 3\n pending 0")
_script(
    "edge_acked_twice_stays_open",
    "I 7 1 3\n A 7 0b11\n A 7 0b11\n 7 is val=1\n T\n T\n T\n left 7\n pending 0",
)
_script(
    "edge_acked_twice_leaves_an_orphan", "I 7 1 3\n A 7 1 -> ACKED 7 3\n A 7 1\n 7 is val=1 task=-1"
)
_script(
    "outcomes_in_order_of_rows",
    """I 1 1 4
    I 2 0 5 -> ACKED 2 5
    F 1 -> FAILED 1 4
    I 3 7 0
    R 3 -> RESET_TIMEOUT 3 0
    R 3 -> RESET_TIMEOUT 3 0
    I 1 0 9 -> ACKED 1 9
    A 3 7 -> ACKED 3 0
    pending 0""",
)
_script("highest_task", f"I 7 1 {2**31 - 1}\n 7 is task={2**31 - 1}\n F 7 -> FAILED 7 {2**31 - 1}")
_script(
    "any_id_in_either_sign",
    f"""I 0 1 0
    I {MIN} -1 1
    I {2**64 - 1} {MAX} 2
    I {MAX} {MIN} 3
    0 is val=1
    -1 is val={MAX} root_id=-1
    {2**63} is val=-1 root_id={MIN}
    A {2**63} {2**64 - 1} -> ACKED {MIN} 1
    A -1 {MAX} -> ACKED -1 2
    A 0 1 -> ACKED 0 0
    A {MAX} {2**63} -> ACKED {MAX} 3
    pending 0""",
)

# SEMANTICS 3: rotation ------------------------------------------------------------------------

_script("init_and_ack_keep_the_bucket", "A 7 1\n T\n A 7 2\n I 7 9 3\n 7 is age=1\n T\n T\n left 7")
_script(
    "fail_and_reset_move_to_the_newest_bucket",
    """A 1 1
    A 2 1
    A 3 1
    T
    T
    F 1
    R 2
    1 is age=0
    2 is age=0
    T
    left 3
    pending 2
    T
    left
    T
    left 1 2""",
)
_script(
    "every_message_refreshes_in_early_storm",
    "I 7 1 3\n T\n T\n A 7 2\n 7 is age=0\n T\n I 7 9 3\n 7 is age=0\n T\n T\n T\n left 7",
    refresh_on_ack=True,
)
_script("what_was_not_taken_is_dropped", "A 1 1\n T\n A 2 1\n T\n T\n T\n left 2\n left\n T\n left")
_script(
    "expired_roots_come_to_life_again",
    "A 7 1\n T\n T\n T\n A 7 2\n 7 is val=2\n left 7\n 7 is val=2",
)


def check_lives_of_buckets(factory: Factory) -> None:
    """N buckets: gone at the Nth turn, there at the one before."""
    for buckets in (2, 3, 4, 63, 125, 126):
        turns = "T\n" * (buckets - 1)
        life = f"I 7 1 3\n{turns}7 is age={buckets - 1}\nT\npending 0\nleft 7\n"
        run_script(factory, life + "T\nT\nT\nleft\npending 0", buckets=buckets)


def check_expired_in_slices(factory: Factory) -> None:
    """Slices together are what left; what stays is dropped at the next turn and counted."""
    ledger = factory(buckets=2)
    ledger.apply(int64s(range(10)), int64s([5] * 10), int32s([4] * 5 + [ACK] * 5))
    ledger.fail_many(int64s([9]))
    for _ in range(2):
        expect(len(ledger.expired()), 0, "nothing left yet")
        ledger.rotate()
    expect(len(ledger.expired(0)), 0, "a limit of 0")
    taken = [entry for limit in (3, 4) for entry in ledger.expired(limit)]
    expect(len(taken), 7, "two slices of 3 and 4")
    taken += ledger.expired(100)
    wanted = [Entry(root, 5, 4, 1, 0, 2, None, None) for root in range(5)]
    wanted += [Entry(root, 5, -1, 0, 0, 2, None, None) for root in range(5, 9)]
    wanted.append(Entry(9, 5, -1, 0, FLAG_FAILED, 2, None, None))
    expect(sorted(taken), wanted, "all slices")
    expect(len(ledger.expired()), 0, "all is taken")
    expect(ledger.stats, Stats(0, 5, 0, ledger.stats.growths), "five had no init")


def check_stats(factory: Factory) -> None:
    """The counters count, at once."""
    ledger = factory(buckets=2)
    counts = functools.partial(_count, ledger)
    counts(0, 0, 0)
    ledger.init(1, 5, 0)
    ledger.init(1, 5, 0)
    counts(1, 0, 0)
    ledger.merge(entries_of([(1, 5, 0, 1, 0, 0, None, None), (2, 5, 0, 2, 0, 0, None, None)]))
    counts(2, 0, 0)
    ledger.fold(int64s([1, 1, 3]), int64s([0, 0, 0]), int32s([0, ACK, 7]))
    counts(3, 0, 0)
    ledger.ack(8, 1)
    ledger.rotate()
    ledger.ack(9, 1)
    ledger.rotate()
    counts(3, 1, 0)
    expect(len(ledger.expired(1)), 1, "one taken of four")
    counts(3, 1, 0)
    ledger.rotate()
    counts(3, 2, 3)
    ledger.rotate()
    counts(3, 2, 4)


def _count(ledger: Any, second_inits: int, orphans: int, untaken: int) -> None:
    expect(ledger.stats[:3], (second_inits, orphans, untaken), "stats")
    expect(isinstance(ledger.stats, Stats), True, "stats is a Stats")


def check_clock(factory: Factory) -> None:
    """Times of first and last message; the clock is read once a call."""
    clock = Clock(1_000)
    ledger = factory(clock=clock, buckets=2)
    expect(ledger.ack(7, 5), None, "an ack")
    clock.now_ms = 1_500
    expect(ledger.reset_timeout(7), None, "a reset before the init")
    clock.now_ms = 1_400
    ledger.apply(int64s([7, 8, 8]), int64s([1, 2, 2]), int32s([ACK, ACK, ACK]))
    expect(clock.reads, 3, "reads of the clock in three calls")
    expect(tuple(ledger.get(7)[-2:]), (1_000, 1_400), "first and last")
    expect(tuple(ledger.get(8)[-2:]), (1_400, 1_400), "first and last")
    clock.now_ms = 1_700
    (outcome,) = ledger.init_many(int64s([7]), int64s([4]), int32s([3]))
    expect(tuple(outcome), (7, 3, ACKED, 700), "an outcome with a time")
    outcome = ledger.init(9, 0, 1)
    expect(tuple(outcome), (9, 1, ACKED, 0), "an outcome at once")
    expect(ledger.apply(int64s([]), int64s([]), int32s([])).elapsed_ms.tolist(), [], "no rows")
    ledger.rotate()
    ledger.rotate()
    expect([tuple(row[-2:]) for row in ledger.expired()], [(1_400, 1_400)], "times of expired")


def check_records(factory: Factory) -> None:
    """Results are the records of ackcore, columns of the stated types."""
    for clock in (None, Clock()):
        ledger = factory(clock=clock)
        outcomes = ledger.apply(int64s([7, 2, 3]), int64s([0, 5, 5]), int32s([3, 3, ACK]))
        entries, settled = ledger.entries(), ledger.settle()
        times = ["int64"] * 2 if clock else []
        expect(isinstance(outcomes, Outcomes), True, "apply gives Outcomes")
        expect(_dtypes(outcomes), ["int64", "int32", "uint8", *times[1:]], "of Outcomes")
        expect(outcomes.kinds.tolist(), [ACKED], "kinds")
        for table in (entries, ledger.oldest(1), ledger.expired()):
            expect(isinstance(table, Entries), True, "a table of entries")
            wanted = ["int64", "int64", "int32", "uint8", "uint8", "uint8", *times]
            expect(_dtypes(table), wanted, "of Entries")
        expect(isinstance(settled, Settled), True, "settle gives Settled")
        wanted = ["int64", "uint8", "int64", "int32", "uint8", "uint8", *times]
        expect(_dtypes(settled), wanted, "of Settled")
        outcome = ledger.init(1, 0, 2)
        expect(type(outcome).__name__, "Outcome", "a scalar gives an Outcome")
        expect(isinstance(outcome.kind, Status), True, "its kind is a Status")
        expect(type(ledger.get(3)).__name__, "Entry", "get gives an Entry")
        expect([type(value) for value in ledger.get(3)[:6]], [int] * 6, "of plain ints")


def _dtypes(table: Any) -> list[str]:
    return [str(column.dtype) for column in table.columns().values()]
