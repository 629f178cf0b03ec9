"""Scripts of messages for the contract, and columns to send them in.

Messages are written as in Storm's recorded streams, a line each:

    I root init_val task -> ACKED root task     an INIT and the outcome that it must have
    A root ack_val                              an ACK with none
    F root, R root                              FAIL, RESET
    T                                           rotate()
    pending n, left root ...                    len() must be n; expired() must give these roots
    root is val=5 task=-1                       get(root) must have these fields
    root is gone                                get(root) must be None

`run_script` sends a script through the scalars, through columns of one kind and through apply.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ackcore._records import ACK, FAIL, RESET, Entries, Entry, Int32s, Int64s, Stats, Status

#: What makes a ledger: takes the arguments of `ackcore.Ledger`.
Factory = Callable[..., Any]
#: One case of the contract: raises AssertionError where a backend does not keep it.
Case = Callable[[Factory], object]
Row = tuple[int, int, int]

MIN, MAX = -(2**63), 2**63 - 1


def expect(got: Any, wanted: Any, what: str) -> None:
    """Raise AssertionError unless ``got == wanted``; unlike assert, under ``python -O`` too."""
    if got != wanted:
        raise AssertionError(f"{what}: got {got!r}, want {wanted!r}")


class Clock:
    """A clock that is set by hand; ``reads`` counts how often it was read."""

    def __init__(self, now_ms: int = 0) -> None:
        self.now_ms = now_ms
        self.reads = 0

    def __call__(self) -> int:
        """Return the time, and count the look."""
        self.reads += 1
        return self.now_ms


def int64s(values: Iterable[int]) -> Int64s:
    """Make a column of ids, each in either sign."""
    return np.array([value & (2**64 - 1) for value in values], np.uint64).view(np.int64)


def int32s(values: Iterable[int]) -> Int32s:
    """Make a column of tasks."""
    return np.array(list(values), np.int32)


def entries_of(rows: Iterable[Sequence[Any]]) -> Entries:
    """Make a table of entries from rows in the order of `Entry`; times may be None throughout."""
    table = [Entry(*row) for row in rows]
    timed = any(row.first_ms is not None for row in table)
    return Entries(
        int64s(row.root_id for row in table),
        int64s(row.val for row in table),
        int32s(row.task for row in table),
        np.array([row.inits for row in table], np.uint8),
        np.array([row.flags for row in table], np.uint8),
        np.array([row.age for row in table], np.uint8),
        int64s(row.first_ms or 0 for row in table) if timed else None,
        int64s(row.last_ms or 0 for row in table) if timed else None,
    )


def snapshot(ledger: Any) -> tuple[list[Entry], Stats]:
    """All that can be seen of a ledger without changing it; growth is each backend's own."""
    return sorted(ledger.entries()), ledger.stats._replace(growths=0)


# How a script's messages reach the ledger -----------------------------------------------------


def send_scalars(ledger: Any, rows: Sequence[Row]) -> list[Any]:
    """Send messages one by one."""
    outcomes = []
    for root, val, task in rows:
        if task == ACK:
            outcomes.append(ledger.ack(root, val))
        elif task == FAIL:
            outcomes.append(ledger.fail(root))
        elif task == RESET:
            outcomes.append(ledger.reset_timeout(root))
        else:
            outcomes.append(ledger.init(root, val, task))
    return [outcome for outcome in outcomes if outcome is not None]


def send_many(ledger: Any, rows: Sequence[Row]) -> list[Any]:
    """Send messages in columns, each of one kind and as long as the order allows."""
    outcomes: list[Any] = []
    for kind, run in itertools.groupby(rows, key=lambda row: min(row[2], 0)):
        roots, vals, tasks = zip(*run, strict=True)
        if kind == ACK:
            outcomes += ledger.ack_many(int64s(roots), int64s(vals))
        elif kind == FAIL:
            outcomes += ledger.fail_many(int64s(roots))
        elif kind == RESET:
            outcomes += ledger.reset_timeout_many(int64s(roots))
        else:
            outcomes += ledger.init_many(int64s(roots), int64s(vals), int32s(tasks))
    return outcomes


def send_batch(ledger: Any, rows: Sequence[Row]) -> list[Any]:
    """Send messages in one batch."""
    roots, vals, tasks = zip(*rows, strict=True) if rows else ((), (), ())
    return list(ledger.apply(int64s(roots), int64s(vals), int32s(tasks)))


def send_batches_of_two(ledger: Any, rows: Sequence[Row]) -> list[Any]:
    """Send messages two at a time."""
    pairs = (rows[at : at + 2] for at in range(0, len(rows), 2))
    return [outcome for pair in pairs for outcome in send_batch(ledger, pair)]


WAYS = (send_scalars, send_many, send_batch, send_batches_of_two)


def _row(words: list[str]) -> Row:
    kind, *numbers = words
    root, val, task = (int(number, 0) for number in [*numbers, "99", "99"][:3])
    return root, val, {"I": task, "A": ACK, "F": FAIL, "R": RESET}[kind]


def run_script(factory: Factory, script: str, **options: Any) -> None:
    """Run a script (see the module) in every way, each on a new ledger."""
    for way in WAYS:
        ledger = factory(capacity=1, **options)
        rows: list[Row] = []
        wanted: list[tuple[int, int, Status]] = []
        for line in (*script.strip().splitlines(), "pending any"):
            step, _, outcome = (part.strip() for part in line.partition("->"))
            what = f"{way.__name__} up to {step!r}"
            if step[0] in "IAFR":
                rows.append(_row(step.split()))
                if outcome:
                    kind, root, task = outcome.split()
                    wanted.append((int(root), int(task), Status[kind]))
                continue
            got = [(row.root_id, row.task, row.kind) for row in way(ledger, rows)]
            expect(got, wanted, what)
            rows, wanted = [], []
            _look(ledger, step.split(), what)


def _look(ledger: Any, words: list[str], what: str) -> None:
    match words:
        case ["T"]:
            ledger.rotate()
        case ["pending", "any"]:
            pass
        case ["pending", count]:
            expect(len(ledger), int(count), what)
            expect(len(ledger.entries()), int(count), what)
        case ["left", *roots]:
            left = ledger.expired()
            expect(sorted(left.root_ids.tolist()), [int(root) for root in roots], what)
            expect(set(left.ages.tolist()) <= {ledger.buckets}, True, f"{what}: ages are buckets")
        case [root, "is", "gone"]:
            expect(ledger.get(int(root)), None, what)
            expect(int(root) in ledger, False, what)
        case [root, "is", *fields]:
            expect(int(root) in ledger, True, what)
            entry = ledger.get(int(root))
            for name, _, value in (field.partition("=") for field in fields):
                expect(getattr(entry, name), int(value), f"{what}: {name}")
        case _:
            raise AssertionError(f"no such step: {' '.join(words)}")
