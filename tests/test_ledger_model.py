"""The twins step by step over few ids, so that roots collide, expire and come again."""

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_scripts import Clock, entries_of, int32s, int64s, send_batch, send_scalars, snapshot

from ackcore import _records as records

ROOTS = st.sampled_from([0, 1, 2, 3, 4, 5, -1, 2**63 - 1, -(2**63), 2**64 - 1, 2**63])
# More of them, now and then, so that buckets fill and chain.
MANY_ROOTS = ROOTS | st.integers(0, 60).map(lambda i: i << 40)
VALS = st.sampled_from([0, 0, 1, 1, 2, 3, -1, 2**63])
TASKS = st.sampled_from([records.ACK] * 4 + [records.FAIL, records.RESET, 0, 0, 1, 2**31 - 1])
ROWS = st.lists(st.tuples(MANY_ROOTS, VALS, TASKS), max_size=12)
TIMES = st.integers(-5, 60)
BUCKETS = st.sampled_from([2, 3, 3, 4, 125, 126])

INITS_AND_FLAGS = st.sampled_from(
    [(-1, 0, 0), (-1, 0, 1), (0, 1, 0), (1, 1, 0), (1, 1, 1), (1, 2, 0), (2, 2, 2), (2, 2, 3)]
)


@st.composite
def entry_rows(draw, roots=MANY_ROOTS, buckets=2):
    task, inits, flags = draw(INITS_AND_FLAGS)
    first, last = draw(TIMES), draw(TIMES)
    age = draw(st.integers(0, buckets - 1))
    return (draw(roots), draw(VALS), task, inits, flags, age, first, last)


STEPS = st.one_of(
    st.tuples(st.just("batch"), ROWS),
    st.tuples(st.just("batch"), ROWS),
    st.tuples(st.just("scalars"), ROWS),
    st.tuples(st.just("flood"), st.integers(10, 40)),
    st.tuples(st.just("flood"), st.integers(10, 40)),
    st.tuples(st.just("look"), st.none()),
    st.tuples(st.just("fold"), ROWS),
    st.tuples(st.just("merge"), st.lists(entry_rows(), max_size=6)),
    st.tuples(st.just("rotate"), st.integers(1, 3)),
    st.tuples(st.just("rotate"), st.sampled_from([1, 2, 124, 127, 300])),
    st.tuples(st.just("expired"), st.none() | st.integers(0, 3)),
    st.tuples(st.just("settle"), st.none() | st.integers(0, 40)),
    st.tuples(st.just("reload"), st.sampled_from(["pickle", "copy", "entries"])),
    st.tuples(st.just("clear"), st.none()),
)
OPTIONS = st.fixed_dictionaries(
    {
        "buckets": BUCKETS,
        "refresh_on_ack": st.booleans(),
        "max_entries": st.sampled_from([None, None, None, 5, 20]),
    }
)


def times_of(rows, timed):
    return [row if timed else (*row[:6], None, None) for row in rows]


def result(call):
    """Return a comparable result of a call, or the type and words of its error."""
    try:
        table = call()
    except (ValueError, RuntimeError) as error:
        return type(error), str(error)
    if isinstance(table, list) or table is None:
        return table
    rows = list(table)
    # Only outcomes have an order.
    return rows if isinstance(table, records.Outcomes) else sorted(rows)


class Machine:
    """One ledger that is driven step by step; a step returns what could be seen of it."""

    def __init__(self, Ledger, timed, options):
        self.Ledger = Ledger
        self.clock = Clock(10) if timed else None
        self.options = {**options, "clock": self.clock}
        self.ledger = Ledger(capacity=1, **self.options)
        self.flooded = 0

    def step(self, name, argument):
        if self.clock is not None:
            self.clock.now_ms += 7
        return getattr(self, name)(argument), self.seen()

    def seen(self):
        """Return all that can be seen without disturbing a table on the move."""
        ledger = self.ledger
        roots = (0, 3, 100 << 40, 2**63 - 1, -1)
        return len(ledger), [root in ledger for root in roots], [ledger.get(root) for root in roots]

    def look(self, _):
        """All that can be seen; listing the entries makes a native table finish its move."""
        return (*snapshot(self.ledger), list(self.ledger.oldest(4)))

    def flood(self, many):
        """New roots in small batches: the table grows, and may be on the move when it is over."""
        start, self.flooded = self.flooded, self.flooded + 5 * many
        rows = [(i << 40, i, records.ACK) for i in range(100 + start, 100 + self.flooded)]
        return [self.batch(rows[at : at + 5]) for at in range(0, len(rows), 5)]

    def batch(self, rows):
        return result(lambda: send_batch(self.ledger, rows))

    def scalars(self, rows):
        return [result(lambda: send_scalars(self.ledger, [row])) for row in rows]  # noqa: B023

    def fold(self, rows):
        roots, vals, tasks = zip(*rows, strict=True) if rows else ((), (), ())
        times = None
        if self.clock is not None and len(rows) % 2:
            times = int64s(at * 13 % 50 for at in range(len(rows)))
        return result(lambda: self.ledger.fold(int64s(roots), int64s(vals), int32s(tasks), times))

    def merge(self, rows):
        entries = entries_of(times_of(rows, self.clock is not None))
        if not rows and self.clock is not None:
            entries.first_ms = entries.last_ms = int64s([])
        return result(lambda: self.ledger.merge(entries))

    def rotate(self, turns):
        for _ in range(turns):
            self.ledger.rotate()

    def expired(self, limit):
        """Any of those that left may come first, so a slice is compared by its length."""
        taken = self.ledger.expired(limit)
        rest = [] if limit is None else self.ledger.expired()
        return len(taken), sorted([*taken, *rest])

    def settle(self, timeout_ms):
        return result(lambda: self.ledger.settle(timeout_ms=timeout_ms))

    def reload(self, how):
        old = self.ledger
        if how == "pickle":
            # The clock must stay the machine's own, or its copy would go on alone.
            self.ledger = pickle.loads(pickle.dumps(old))
            self.clock = self.ledger.clock
            self.options["clock"] = self.clock
        elif how == "copy":
            self.ledger = copy.copy(old)
            old.ack_many(int64s([]), int64s([]))
        else:
            self.ledger = self.Ledger.from_entries(old.entries(), capacity=1, **self.options)

    def clear(self, _):
        """Complete everything: the load falls, and a table that is too large may shrink."""
        roots = self.ledger.entries().root_ids
        vals = self.ledger.entries().vals
        done = result(lambda: self.ledger.ack_many(roots, vals))
        more = result(
            lambda: self.ledger.init_many(roots, int64s([0] * len(roots)), roots_as_tasks(roots))
        )
        return sorted(done), sorted(more)


def roots_as_tasks(roots):
    return (roots & 0xFFFF).astype(np.int32)


@given(st.booleans(), OPTIONS, st.lists(STEPS, min_size=8, max_size=30))
def test_backends_agree_step_by_step(native, reference, timed, options, steps):
    machines = [Machine(backend.Ledger, timed, options) for backend in (native, reference)]
    for number, (name, argument) in enumerate(steps):
        one, other = (machine.step(name, argument) for machine in machines)
        assert one == other, f"step {number}: {name}"
    one, other = (machine.look(None) for machine in machines)
    assert one == other, "in the end"


def test_the_steps_make_tables_grow_move_and_shrink(native):
    """The property test relies on this: its steps reach every state of a table."""
    machine = Machine(native.Ledger, False, {"buckets": 3, "max_entries": None})
    small = machine.ledger.capacity
    tables = []
    for _ in range(10):
        machine.step("flood", 4)
        tables.append(len(machine.ledger.tables))
    assert set(tables) == {1, 2}
    grown = machine.ledger.capacity
    assert grown > small
    machine.step("clear", None)
    for _ in range(3):
        machine.step("rotate", 3)
        machine.step("batch", [(1, 1, records.ACK)])
    assert machine.ledger.capacity < grown


@given(st.lists(entry_rows(), max_size=20), st.booleans(), st.data())
def test_merging_is_associative_and_commutative(Ledger, rows, timed, data):
    rows = times_of(rows, timed)

    def ledger_of(some):
        ledger = Ledger(capacity=1, buckets=2, clock=Clock() if timed else None)
        for row in some:
            ledger.merge(entries_of([row]))
        return ledger

    whole = sorted(ledger_of(rows).entries())
    order = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), min_size=3, max_size=3)))
    bounds = [0, *cuts, len(rows)]
    parts = [ledger_of(order[start:end]) for start, end in itertools.pairwise(bounds)]
    while len(parts) > 1:
        part = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts[data.draw(st.integers(0, len(parts) - 1))].merge(part.entries())
    assert sorted(parts[0].entries()) == whole
    timeout = 20 if timed else None
    assert sorted(parts[0].settle(50, timeout)) == sorted(ledger_of(rows).settle(50, timeout))


@given(ROWS, st.data())
def test_folding_is_merging_rows(Ledger, rows, data):
    """One fold, many folds in any order, or messages that each went through a ledger alone."""
    timed = data.draw(st.booleans())
    times = data.draw(st.lists(TIMES, min_size=len(rows), max_size=len(rows)))

    def fold(ledger, order):
        roots, vals, tasks = (
            zip(*[rows[at] for at in order], strict=True) if order else ((), (), ())
        )
        ledger.fold(
            int64s(roots),
            int64s(vals),
            int32s(tasks),
            int64s(times[at] for at in order) if timed else None,
        )

    def ledger():
        return Ledger(capacity=1, clock=Clock() if timed else None)

    whole, shuffled, merged = ledger(), ledger(), ledger()
    fold(whole, range(len(rows)))
    for at in data.draw(st.permutations(range(len(rows)))):
        fold(shuffled, [at])
        alone = ledger()
        fold(alone, [at])
        merged.merge(alone.entries())
    assert sorted(whole.entries()) == sorted(shuffled.entries()) == sorted(merged.entries())
    assert whole.stats[0] == shuffled.stats[0] == merged.stats[0]


@given(ROWS, st.lists(st.tuples(st.sampled_from(["T", "X"]), ROWS), max_size=12), BUCKETS)
def test_lazy_expiry_is_eager_expiry(native, start, turns, buckets):
    """One ledger sweeps only when it must, another at every turn."""
    lazy, eager = (native.Ledger(capacity=1, buckets=buckets) for _ in range(2))
    for ledger in (lazy, eager):
        send_batch(ledger, start)
    for kind, rows in turns:
        assert send_batch(lazy, rows) == send_batch(eager, rows)
        if kind == "T":
            lazy.rotate()
            eager.rotate()
            # A copy has only what is to be seen, so nothing is left in it to be swept.
            eager = pickle.loads(pickle.dumps(eager))
        else:
            assert sorted(lazy.expired()) == sorted(eager.expired())
        assert snapshot(lazy) == snapshot(eager)
        assert len(lazy) == len(eager)


@pytest.mark.parametrize("timed", [False, True])
def test_long_random_traffic(native, reference, timed):
    """Sixty thousand messages over a thousand roots with growth, decay, turns and copies."""
    chance = np.random.default_rng(11)
    clocks = [Clock() if timed else None for _ in range(2)]
    ledgers = [
        backend.Ledger(capacity=1, buckets=4, clock=clock)
        for backend, clock in zip((native, reference), clocks, strict=True)
    ]
    for burst in range(120):
        width = (3_000, 40, 700)[burst // 10 % 3]
        roots = chance.integers(0, width, 500) * -0x61C8864680B583EB
        vals = chance.integers(0, 4, 500)
        tasks = chance.choice([-1, -1, -1, -2, -3, 0, 5], 500).astype(np.int32)
        for clock in clocks:
            if clock is not None:
                clock.now_ms += int(burst)
        outcomes = [list(ledger.apply(roots, vals, tasks)) for ledger in ledgers]
        assert outcomes[0] == outcomes[1]
        if burst % 3 == 2:
            for ledger in ledgers:
                ledger.rotate()
        if burst % 7 == 3:
            left = [sorted(ledger.expired()) for ledger in ledgers]
            assert left[0] == left[1]
        if burst % 31 == 30:
            ledgers = [pickle.loads(pickle.dumps(ledger)) for ledger in ledgers]
            clocks = [ledger.clock for ledger in ledgers]
        assert len(ledgers[0]) == len(ledgers[1])
        if burst % 10 == 9:
            assert snapshot(ledgers[0]) == snapshot(ledgers[1])
            oldest = [list(ledger.oldest(20)) for ledger in ledgers]
            assert oldest[0] == oldest[1]


@pytest.mark.parametrize("options", [{}, {"refresh_on_ack": True}, {"clock": Clock(5)}])
def test_rows_close_together_in_crowded_buckets(native, reference, options):
    """A row finds what the rows just before it did to its bucket, and to those beside it."""

    def home(root):
        ledger = native.Ledger(capacity=1, seed=7)
        ledger.ack(root, 1)
        return int(np.argwhere(ledger.tables[0]["stamps"])[0][0])

    # Neighbours: a bucket holds three entries, and the next ones those that probe past it. After
    # the last one comes the first.
    last = len(native.Ledger(capacity=1, seed=7).tables[0]) - 1
    homes = {root: home(root) for root in range(600)}
    wanted = {4: 6, 5: 4, 6: 1, 7: 3, last - 1: 2, last: 5, 0: 2}
    roots = int64s(
        root
        for bucket, some in wanted.items()
        for root in [root for root, at in homes.items() if at == bucket][:some]
    )
    chance = np.random.default_rng(3)
    ledgers = [
        native.Ledger(capacity=1, seed=7, **options),
        reference.Ledger(capacity=1, **options),
    ]
    crowded = 0
    for turn in range(1_500):
        rows = int(chance.integers(1, 40))
        some = chance.choice(roots, rows)
        vals = chance.integers(0, 3, rows)
        tasks = chance.choice([-1, -1, -1, 0, 5] if turn % 4 else [-1, -2, -3, 5], rows)
        how = "fold" if turn % 9 == 5 else "apply"
        columns = some, vals, tasks.astype(np.int32)
        one, other = (getattr(ledger, how)(*columns) for ledger in ledgers)
        assert how == "fold" or list(one) == list(other)
        if turn % 9 == 8:
            for ledger in ledgers:
                ledger.rotate()
        assert snapshot(ledgers[0]) == snapshot(ledgers[1])
        (table,) = ledgers[0].tables
        crowded += bool(table["overflow_count"].any())
    assert crowded > 300
    while (ledgers[0].tables[0]["stamps"] != 0).any():
        ledgers[0].rotate()
    assert not ledgers[0].tables[0]["overflow_count"].any()


@pytest.mark.parametrize("options", [{}, {"refresh_on_ack": True, "clock": Clock(5)}])
def test_tables_beyond_the_caches(native, reference, options):
    """Batches that run through a table of tens of megabytes, and folds that do."""
    chance = np.random.default_rng(4)
    ledgers = [backend.Ledger(capacity=250_000, **options) for backend in (native, reference)]
    for turn in range(6):
        roots = chance.integers(0, 100_000, 40_000) << 9
        vals = chance.integers(0, 3, 40_000)
        tasks = chance.choice([-1, -1, -1, -2, -3, 0, 5], 40_000).astype(np.int32)
        if turn == 3:
            for ledger in ledgers:
                ledger.fold(roots, vals, tasks)
        else:
            one, other = (ledger.apply(roots, vals, tasks) for ledger in ledgers)
            for name, column in one.columns().items():
                np.testing.assert_array_equal(column, other.columns()[name])
        if turn in (2, 4):
            for ledger in ledgers:
                ledger.rotate()
        assert len(ledgers[0]) == len(ledgers[1])
    entries = [ledger.entries() for ledger in ledgers]
    orders = [np.argsort(table.root_ids) for table in entries]
    for name, column in entries[0].columns().items():
        wanted = entries[1].columns()[name]
        np.testing.assert_array_equal(column[orders[0]], wanted[orders[1]])
    assert ledgers[0].nbytes > 8 << 20
