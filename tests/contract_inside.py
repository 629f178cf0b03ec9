"""The ledger as a container: looking inside, saving and loading, bounds, ids of any pattern."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from ledger_scripts import (
    MAX,
    MIN,
    WAYS,
    Clock,
    Factory,
    entries_of,
    expect,
    int32s,
    int64s,
    send_batch,
    snapshot,
)

from ackcore._records import ACK, ACKED, FAIL, FLAG_FAILED, Entries, Entry, LedgerFull
from ackcore.testing.backends import _many_roots as check_many_roots  # noqa: F401


def check_options(factory: Factory) -> None:
    """The options of a ledger can be read, and not written."""
    clock = Clock()
    ledger = factory()
    defaults = (ledger.buckets, ledger.refresh_on_ack, ledger.clock, ledger.max_entries)
    expect(defaults, (3, False, None, None), "defaults")
    ledger = factory(64, buckets=5, refresh_on_ack=True, clock=clock, max_entries=9, seed=2**64 - 1)
    given = (ledger.buckets, ledger.refresh_on_ack, ledger.clock, ledger.max_entries)
    expect(given, (5, True, clock, 9), "given")
    expect(clock.reads, 0, "reads of the clock by the constructor")
    expect(ledger.capacity >= 64, True, "capacity is at least what was asked for")
    for name in ("capacity", "buckets", "refresh_on_ack", "clock", "max_entries", "stats"):
        try:
            setattr(ledger, name, 1)
        except AttributeError:
            continue
        raise AssertionError(f"{name} can be written")


def check_empty(factory: Factory) -> None:
    """A new ledger holds nothing."""
    ledger = factory()
    tables = (ledger.entries(), ledger.expired(), ledger.oldest(5), ledger.settle())
    expect([len(table) for table in tables], [0, 0, 0, 0], "rows")
    expect((len(ledger), 0 in ledger, ledger.get(0)), (0, False, None), "nothing is pending")
    expect(ledger.stats, (0, 0, 0, 0), "stats")


def check_get(factory: Factory) -> None:
    """Entries are found by either sign of their root, and only those."""
    ledger = factory(clock=Clock(5))
    ledger.init(-1, 2**64 - 2, 4)
    ledger.fail(3)
    entry = Entry(-1, -2, 4, 1, 0, 0, 5, 5)
    expect((ledger.get(-1), ledger.get(2**64 - 1)), (entry, entry), "get")
    expect(ledger.get(3), Entry(3, 0, -1, 0, FLAG_FAILED, 0, 5, 5), "get of a failed one")
    expect([root in ledger for root in (-1, 2**64 - 1, 3, 0, 1)], [True] * 3 + [False] * 2, "in")
    ledger.rotate()
    expect(ledger.get(-1), entry._replace(age=1), "get after a turn")


def check_looking_changes_nothing(factory: Factory) -> None:
    """Reads leave the ledger unchanged and do not call the clock."""
    clock = Clock(5)
    ledger = factory(clock=clock)
    ledger.apply(int64s([1, 2]), int64s([3, 3]), int32s([ACK, 4]))
    before, reads = snapshot(ledger), clock.reads
    for look in (ledger.entries, ledger.__len__, ledger.__repr__, ledger.expired):
        look()
    expect((1 in ledger, len(ledger.oldest(5)), ledger.get(1).val), (True, 2, 3), "looks")
    expect(ledger.nbytes > 0, True, "nbytes")
    expect(ledger.capacity >= len(ledger), True, "capacity")
    expect(isinstance(ledger.tables, tuple), True, "tables is a tuple")
    expect(snapshot(ledger), before, "the ledger")
    expect(clock.reads, reads, "reads of the clock")


def check_tables_cannot_be_written(factory: Factory) -> None:
    """Memory that a ledger shares is read-only."""
    ledger = factory()
    ledger.ack(1, 2)
    writable = [table.flags.writeable for table in ledger.tables]
    expect(any(writable), False, "writable tables")


def check_oldest(factory: Factory) -> None:
    """The oldest entries come by age, then by first message, then by root id as a signed number."""
    clock = Clock(10)
    for timed in (True, False):
        ledger = factory(clock=clock if timed else None, buckets=4)
        for now_ms, roots in ((10, [5, 4]), (8, [3])):
            clock.now_ms = now_ms
            ledger.ack_many(int64s(roots), int64s([1] * len(roots)))
        ledger.rotate()
        ledger.ack_many(int64s([2, -1, 5]), int64s([1, 1, 1]))
        ledger.fail(4)
        wanted = [3, 5, -1, 2, 4]
        if timed:
            clock.now_ms = 1
            ledger.ack(9, 1)
            wanted.insert(2, 9)
        expect(ledger.oldest(100).root_ids.tolist(), wanted, "all")
        for n in range(7):
            expect(ledger.oldest(n).root_ids.tolist(), wanted[:n], f"the {n} oldest")
        expect(list(ledger.oldest(1)), [ledger.get(3)], "rows are entries")


def check_entries_go_in_and_out(factory: Factory) -> None:
    """A ledger loaded from its entries goes on as the one that was saved."""
    for clock in (None, Clock(10)):
        ledger = _used(factory, clock)
        loaded = type(ledger).from_entries(
            ledger.entries(), buckets=4, refresh_on_ack=True, clock=clock
        )
        expect(sorted(loaded.entries()), sorted(ledger.entries()), "entries")
        _goes_on_alike(loaded, ledger)


def check_pickles_and_copies(factory: Factory) -> None:
    """Copies have the options, entries, expired ones and counts, and share no memory."""
    for clock in (None, Clock(10)):
        for way in (copy.copy, copy.deepcopy, _pickled):
            ledger = _used(factory, clock)
            for _ in range(2):
                ledger.rotate()
            expect(len(ledger.expired(1)), 1, "taken before the copy")
            twin = way(ledger)
            expect(type(twin), type(ledger), "type")
            for name in ("buckets", "refresh_on_ack", "max_entries"):
                expect(getattr(twin, name), getattr(ledger, name), name)
            expect((twin.clock is None), (clock is None), "clock")
            expect(snapshot(twin), snapshot(ledger), "entries and stats")
            left = sorted(ledger.expired())
            expect(len(left), 2, "expired, not taken")
            expect(sorted(twin.expired()), left, "the same in the copy")
            _goes_on_alike(twin, ledger)
            twin.ack(77, 1)
            expect(77 in ledger, False, "the copied ledger")


def _pickled(ledger: Any) -> Any:
    return pickle.loads(pickle.dumps(ledger))


def _used(factory: Factory, clock: Clock | None) -> Any:
    """Make a ledger with a bit of everything: old and new, failed, doubled, with what expired."""
    ledger = factory(capacity=2, buckets=4, clock=clock, refresh_on_ack=True, max_entries=50)
    ledger.apply(int64s([21, 22, 23]), int64s([1, 1, 1]), int32s([4, ACK, FAIL]))
    ledger.rotate()
    ledger.rotate()
    ledger.apply(int64s([0, -1, 2]), int64s([MIN, MAX, 7]), int32s([0, 5, 2**31 - 1]))
    ledger.apply(int64s([2, 3, 3]), int64s([1, 0, 9]), int32s([6, FAIL, ACK]))
    return ledger


def _goes_on_alike(one: Any, other: Any) -> None:
    rows = [(0, MIN, 3), (-1, MAX, ACK), (2, 6, 2), (3, 1, 1), (21, 4, ACK), (22, 0, 9)]
    for _ in range(5):
        outcomes = [send_batch(ledger, rows) for ledger in (one, other)]
        expect(outcomes[0], outcomes[1], "outcomes")
        for ledger in (one, other):
            ledger.rotate()
    expect(one.get(99), other.get(99), "a root that neither has")


def check_saving_with_numpy(factory: Factory) -> None:
    """Columns of a saved table go back in, whether or not they may be written to."""
    ledger = _used(factory, None)
    columns = {name: column.copy() for name, column in ledger.entries().columns().items()}
    for column in columns.values():
        column.setflags(write=False)
    loaded = type(ledger).from_entries(Entries(**columns), buckets=4)
    expect(sorted(loaded.entries()), sorted(ledger.entries()), "entries")


def check_results_are_copies(factory: Factory) -> None:
    """Results do not change when the ledger does, nor the other way round."""
    ledger = factory()
    ledger.ack_many(int64s([1, 2]), int64s([5, 5]))
    entries = ledger.entries()
    entries.vals[:] = 0
    expect(ledger.get(1).val, 5, "a val in the ledger")
    entries = ledger.entries()
    ledger.ack(1, 5)
    expect(entries.vals.tolist(), [5, 5], "vals that were handed out")


def check_max_entries(factory: Factory) -> str:
    """Rows of roots that are not pending may not pass the bound; nothing of a call is applied.

    Returns the words of a refusal.
    """
    ledger = factory(max_entries=3, capacity=1)
    ledger.apply(int64s([1, 1, 2]), int64s([5, 1, 5]), int32s([4, ACK, ACK]))
    before = snapshot(ledger)
    for refused in (
        lambda: ledger.ack_many(int64s([3, 4]), int64s([1, 1])),
        lambda: ledger.ack_many(int64s([1, 3, 3]), int64s([1, 1, 1])),
        lambda: ledger.init_many(int64s([3, 4]), int64s([0, 0]), int32s([1, 1])),
        lambda: ledger.fail_many(int64s([1, 4, 5])),
        lambda: ledger.reset_timeout_many(int64s([5, 4])),
        lambda: ledger.fold(int64s([3, 4]), int64s([1, 1]), int32s([ACK, ACK])),
        lambda: ledger.merge(entries_of((root, 1, -1, 0, 0, 0, None, None) for root in (3, 4))),
    ):
        _refused_as_full(refused)
        expect(snapshot(ledger), before, "the ledger after a refusal")
    ledger.ack_many(int64s([1, 2, 1, 2]), int64s([0] * 4))
    expect(snapshot(ledger), before, "rows of pending roots fit")
    expect(ledger.init(3, 9, 1), None, "the third")
    for way in WAYS:
        _refused_as_full(lambda way=way: way(ledger, [(4, 0, 1)]))
    _refused_as_full(lambda: ledger.fail(4))
    expect(len(ledger), 3, "pending")
    expect(ledger.ack(3, 9).kind, ACKED, "one that leaves")
    expect(ledger.ack(4, 1), None, "makes room for another")
    for _ in range(3):
        ledger.rotate()
    expect(ledger.ack_many(int64s([5, 6, 7]), int64s([1, 1, 1])).root_ids.tolist(), [], "room")
    expect(len(ledger), 3, "pending; what expired does not count")
    three = ledger.entries()
    expect(len(type(ledger).from_entries(three, max_entries=3)), 3, "as many as may be")
    return _refused_as_full(lambda: type(ledger).from_entries(three, max_entries=2))


def _refused_as_full(call: Any) -> str:
    try:
        call()
    except LedgerFull as error:
        expect("max_entries" in str(error), True, f"{error} names max_entries")
        return str(error)
    raise AssertionError("a call that passes max_entries was not refused")


def check_a_failing_clock_applies_nothing(factory: Factory) -> None:
    """The clock is read before the first row; what it raises comes out."""

    def broken() -> int:
        raise ZeroDivisionError("no time")

    ledger = factory(clock=broken)
    for way in WAYS:
        try:
            way(ledger, [(7, 5, 4), (8, 5, ACK)])
        except ZeroDivisionError:
            expect(len(ledger), 0, f"{way.__name__}: pending")
            continue
        raise AssertionError(f"{way.__name__} did not raise what the clock raised")
