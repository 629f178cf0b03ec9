"""Every message on every state of an entry, in each form that a ledger has for it.

The native kernel has two: `apply_message` for any case, and the fast path of `run_block`.
Both, and the twin, are held to SEMANTICS 2 and 4, which stand below as code.
"""

import itertools

import numpy as np
import pytest
from ledger_scripts import WAYS, Clock, entries_of, int32s, int64s

from ackcore._records import ACK, FAIL, FLAG_FAILED, FLAG_TASKS_DIFFER, RESET, Entry, Status

TURNS = 3
VALS = (0, 1, 2)  # so that an XOR becomes zero, stays zero, and is neither
FIRST_MS, NOW_MS, LAST_MS = 40, 50, 60
NEW = Entry(0, val=0, task=-1, inits=0, flags=0, age=0, first_ms=NOW_MS, last_ms=NOW_MS)
#: None, and all that messages can make of an entry.
STATES = [None] + [
    Entry(0, val, task, inits, flags, age, FIRST_MS, LAST_MS)
    for val, (task, inits), flags, age in itertools.product(
        VALS, [(-1, 0), (4, 1), (4, 2), (5, 2)], range(4), range(TURNS)
    )
    if inits == 2 or not flags & FLAG_TASKS_DIFFER
]
MESSAGES = list(itertools.product(VALS, (ACK, FAIL, RESET, 4, 5)))
#: Each pair has a root of its own.
PAIRS = {
    0x5DEECE66D * (at + 1): pair for at, pair in enumerate(itertools.product(STATES, MESSAGES))
}


def folded(state, val, task):
    """SEMANTICS 4: the entry after a message was folded in."""
    entry = (state or NEW)._replace(age=0)
    if task >= ACK:
        entry = entry._replace(val=entry.val ^ val)
    if task >= 0:
        differ = FLAG_TASKS_DIFFER if entry.inits and entry.task != task else 0
        inits, task_kept = min(entry.inits + 1, 2), max(entry.task, task)
        entry = entry._replace(task=task_kept, inits=inits, flags=entry.flags | differ)
    if task == FAIL:
        entry = entry._replace(flags=entry.flags | FLAG_FAILED)
    return entry


def applied(state, val, task, refresh):
    """SEMANTICS 2: the entry after a message, None if it left, and the outcome's kind or None."""
    entry = folded(state, val, task)._replace(last_ms=NOW_MS)
    if task >= 0:
        entry = entry._replace(task=task)  # not the greatest: the last
    if state and task >= ACK and not refresh:
        entry = entry._replace(age=state.age)
    if entry.task < 0:
        return entry, None
    if entry.val == 0:
        return None, Status.ACKED
    if entry.flags & FLAG_FAILED:
        return None, Status.FAILED
    return entry, Status.RESET_TIMEOUT if task == RESET else None


#: Ledgers for which the kernel has a loop of its own, and tables for which it goes other ways:
#: arguments, entries of other roots, and roots at a time. Of few buckets, many rows share one.
KINDS = {
    "plain": ({"capacity": 1}, 0, 60),
    "aged": ({"capacity": 1}, 0, 40),
    "refreshing": ({"capacity": 1, "refresh_on_ack": True}, 0, 60),
    "timed": ({"capacity": 1, "clock": Clock(NOW_MS)}, 0, 60),
    "migrating": ({"capacity": 3_000}, 5_000, 500),
    "large": ({"capacity": 250_000}, 0, len(PAIRS)),
}


def ledger_with(Ledger, kind, roots):
    """A ledger of that kind with the state of each root."""
    options, others, _ = KINDS[kind]
    ledger = Ledger(**options, buckets=TURNS, seed=3)
    if others:
        others = ledger.capacity - 8 if ledger.tables else others
        ledger.ack_many(np.arange(others) * -3 - 1, np.ones(others, np.int64))
    if kind == "aged":
        dead = int64s(roots[::3])  # under roots that have another entry, or are new
        ledger.init_many(dead, dead, int32s([9] * len(dead)))
        for _ in range(TURNS):
            ledger.rotate()
    present = [
        PAIRS[root][0]._replace(root_id=root) for root in roots if PAIRS[root][0] is not None
    ]
    if kind != "timed":
        present = [entry._replace(first_ms=None, last_ms=None) for entry in present]
    ledger.merge(entries_of(present))
    assert len(ledger.tables) in ((0, 2) if kind == "migrating" else (0, 1))
    return ledger


def seen(entry, root, timed):
    """An entry as `get` shows it."""
    if entry is None:
        return None
    times = {} if timed else {"first_ms": None, "last_ms": None}
    return entry._replace(root_id=root, **times)


def chunks_of(kind):
    size = KINDS[kind][2]
    return [list(PAIRS)[start : start + size] for start in range(0, len(PAIRS), size)]


def second_inits(roots):
    """The sums of the merged states, and of the messages."""
    return sum(
        (state.inits > 1) + (state.inits > 0 and task >= 0)
        for state, (_, task) in (PAIRS[root] for root in roots)
        if state is not None
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_applying(Ledger, way, kind):
    timed = kind == "timed"
    for roots in chunks_of(kind):
        ledger = ledger_with(Ledger, kind, roots)
        entries, outcomes = {}, []
        for root in roots:
            state, (val, task) = PAIRS[root]
            entries[root], came = applied(state, val, task, kind == "refreshing")
            if came is not None:
                by = task if task >= 0 else state.task
                elapsed = NOW_MS - (state or NEW).first_ms if timed else None
                outcomes.append((root, by, came, elapsed))
        assert way(ledger, [(root, *PAIRS[root][1]) for root in roots]) == outcomes
        for root, entry in entries.items():
            assert ledger.get(root) == seen(entry, root, timed), PAIRS[root]
        assert ledger.stats.second_inits == second_inits(roots)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at_once", [1, 7, len(PAIRS)])
def test_folding(Ledger, at_once, kind):
    timed = kind == "timed"
    for roots in chunks_of(kind):
        ledger = ledger_with(Ledger, kind, roots)
        for start in range(0, len(roots), at_once):
            rows = [PAIRS[root][1] for root in roots[start : start + at_once]]
            vals, tasks = zip(*rows, strict=True)
            ledger.fold(int64s(roots[start : start + at_once]), int64s(vals), int32s(tasks))
        for root in roots:
            state, (val, task) = PAIRS[root]
            assert ledger.get(root) == seen(folded(state, val, task), root, timed), PAIRS[root]
        assert ledger.stats.second_inits == second_inits(roots)
