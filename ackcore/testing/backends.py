"""Tests of the contract of a ledger, for backends of other packages.

Each run creates a ledger of the backend and one of `ackcore._reference`, the plain-Python ledger
that defines correct behaviour, and makes the same random calls on both. Each call must return the
same records or raise the same class of error, and must leave both ledgers in the same state.
"""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ackcore._records import ACK, FAIL, RESET, Entries, Int32s, Int64s
from ackcore._reference import Ledger

#: Returns a ledger for the arguments of `ackcore.Ledger`.
Factory = Callable[..., Any]

_RUNS, _CALLS = 120, 60
_ROOTS: tuple[int, ...] = (
    *range(-2, 6),
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    *(i << 40 for i in range(1, 20)),
)
_VALS = (0, 0, 1, 1, 2, 3, -1, 2**63)
_KINDS = (ACK, ACK, ACK, FAIL, RESET, 0, 0, 1, 2**31 - 1)
#: Rows for `merge`: task, inits, flags.
_FOLDED = ((-1, 0, 0), (-1, 0, 1), (0, 1, 0), (1, 1, 1), (1, 2, 0), (2, 2, 2), (2, 2, 3))
#: Invalid arguments for a column, and for an id.
_NO_COLUMNS = (
    [1, 2], None, "12", np.zeros(2), np.zeros(2, bool), np.zeros(2, np.int16), np.array(1),
    np.zeros((2, 1), np.int64), np.arange(4)[::2], np.frombuffer(bytes(17), np.int64, 2, 1),
    np.arange(3), np.ma.masked_array(np.arange(2), [False, True]),
)  # fmt: skip
_NO_IDS = (1.0, "1", None, np.zeros(1, np.int64), 2**64, -(2**63) - 1)
_NO_OPTIONS: tuple[dict[str, Any], ...] = (
    {"capacity": 0}, {"capacity": 1.0}, {"capacity": 2**62}, {"buckets": 1}, {"buckets": 127},
    {"clock": 5}, {"max_entries": 0}, {"max_entries": 1.5}, {"seed": "s"}, {"seed": 2**64},
)  # fmt: skip


class _Clock:
    """A clock that is set by hand. It counts how often it is read."""

    def __init__(self) -> None:
        self.now_ms: Any = 0
        self.reads = 0

    def __call__(self) -> Any:
        self.reads += 1
        return self.now_ms


class _Op(NamedTuple):
    """A call of a ledger's method; ``str`` returns it as Python code."""

    method: str
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.method}({', '.join(map(_shown, self.arguments))})"


def _shown(value: Any) -> str:
    """Return an argument as text, with the type and the layout of a column."""
    if not isinstance(value, np.ndarray):
        return repr(value)
    odd = {"unaligned": not value.flags.aligned, "strided": not value.flags.c_contiguous}
    kind = "masked" if isinstance(value, np.ma.MaskedArray) else "array"
    words = [*(word for word, is_so in odd.items() if is_so), str(value.dtype), kind]
    return f"<{' '.join(words)} {value.tolist()}>"


def _int64s(values: Any) -> Int64s:
    return np.array([value & (2**64 - 1) for value in values], np.uint64).view(np.int64)


def _int32s(values: Any) -> Int32s:
    return np.array(list(values), np.int32)


def check_backend(factory: Factory) -> None:
    """Check a ledger of your own against the contract of `ackcore.Ledger`.

    Parameters
    ----------
    factory : callable
        The class of the ledger, or a function that returns one; takes the arguments of
        `ackcore.Ledger`.

    Raises
    ------
    AssertionError
        For the first call whose result differs from the reference's. The message has the arguments
        of the ledger and all calls up to this one.
    """
    for bad in _NO_OPTIONS:
        _same(f"Ledger(**{bad})", functools.partial(_made, bad), factory, Ledger)
    for seed in range(_RUNS):
        _run(factory, random.Random(seed))
    _many_roots(factory)
    _threads(factory)


def _made(options: dict[str, Any], factory: Factory) -> Any:
    return factory(**options)


def _run(factory: Factory, chance: random.Random) -> None:
    options: dict[str, Any] = {
        "capacity": chance.choice([1, 64]),
        "refresh_on_ack": chance.random() < 0.3,
        "max_entries": chance.choice([None, None, 6]),
    }
    buckets = chance.choice([2, 3, 4, 126])
    if buckets != 3:  # the default
        options["buckets"] = buckets
    timed = chance.random() < 0.6
    clocks: list[Any] = [_Clock(), _Clock()] if timed else [None, None]
    pair = [factory(**options, clock=clocks[0]), Ledger(**options, clock=clocks[1])]
    history = f"Ledger(**{options}, clock={'...' if timed else None})"
    for name in ("buckets", "refresh_on_ack", "max_entries"):
        _same(f"{history}.{name}", operator.attrgetter(name), *pair)
    for _ in range(_CALLS):
        now = chance.choice([*range(-5, 60), 2**63 - 1, 2**63, 1.5])
        for clock in filter(None, clocks):
            clock.now_ms = now
        if chance.random() < 0.05:
            way = chance.choice([copy.copy, copy.deepcopy, _pickled, _reloaded])
            try:
                pair = [way(one) for one in pair]
            except Exception as error:
                raise AssertionError(
                    f"{history}\n  a copy of the ledger must be possible, but "
                    f"{way.__name__.strip('_')} raised {error!r}"
                ) from error
            clocks = [one.clock for one in pair]
            history += "\n  a copy"
        else:
            call = _drawn(chance, buckets, timed)
            history += f"\n  {call}" + f" at {now}" * timed
            _same(history, operator.methodcaller(call.method, *call.arguments), *pair)
        _same(f"{history}\n  then its state", _state, *pair)


def _pickled(ledger: Any) -> Any:
    return pickle.loads(pickle.dumps(ledger))


def _reloaded(ledger: Any) -> Any:
    names = ("buckets", "refresh_on_ack", "clock", "max_entries")
    options = {name: getattr(ledger, name) for name in names}
    return type(ledger).from_entries(ledger.entries(), **options)


def _drawn(chance: random.Random, buckets: int, timed: bool) -> _Op:
    """Return a random call; some have invalid arguments."""

    def root() -> int:
        return chance.choice(_ROOTS)

    def val() -> int:
        return chance.choice(_VALS)

    if chance.random() < 0.15:
        return _refused(chance)
    rows = range(chance.choice([0, 1, 2, 5, 30]))
    roots, vals = _int64s(root() for _ in rows), _int64s(val() for _ in rows)
    kinds = _int32s(chance.choice(_KINDS) for _ in rows)
    draws: dict[str, Callable[[], tuple[Any, ...]]] = {
        "init": lambda: (root(), val(), chance.randrange(3)),
        "ack": lambda: (root(), val()),
        "fail": lambda: (root(),),
        "reset_timeout": lambda: (root(),),
        "apply": lambda: (roots, vals, kinds),
        "init_many": lambda: (roots, vals, abs(kinds)),
        "ack_many": lambda: (roots, vals),
        "fail_many": lambda: (roots[:2],),
        "reset_timeout_many": lambda: (roots[:2],),
        "fold": lambda: (roots, vals, kinds, chance.choice([None, _int64s(range(len(rows)))])),
        "merge": lambda: (_entries(chance, [root() for _ in rows[:6]], buckets, timed),),
        "settle": lambda: chance.choice(
            [(), (50, chance.randrange(40)), (None, 20), (-(2**63), 5)]
        ),
        "rotate": lambda: (),
        "expired": lambda: chance.choice([(), (), (0,)]),
        "oldest": lambda: (chance.choice([0, 1, 3, 100]),),
        "get": lambda: (root(),),
        "__contains__": lambda: (root(),),
    }
    method = chance.choice([*draws, "apply", "apply", "rotate"])
    return _Op(method, draws[method]())


def _refused(chance: random.Random) -> _Op:
    bad, no_id = chance.choice(_NO_COLUMNS), chance.choice(_NO_IDS)
    two, tasks, unknown = _int64s([1, 2]), _int32s([4, ACK]), _int32s([4, RESET - 1])
    return chance.choice(
        [
            _Op("apply", (bad, two, tasks)), _Op("apply", (two, bad, tasks)),
            _Op("apply", (two, two, bad)), _Op("apply", (two, two, unknown)),
            _Op("init_many", (two, two, tasks)), _Op("init_many", (two, bad, tasks)),
            _Op("ack_many", (bad, two)), _Op("ack_many", (two, bad)),
            _Op("fail_many", (None,)),
            _Op("reset_timeout_many", (None,)), _Op("fold", (two, two, unknown)),
            _Op("fold", (two, bad, tasks)),
            _Op("fold", (two, two, tasks[:1])),
            _Op("init_many", (two, two, abs(tasks[:1]))), _Op("init", (1, no_id, 1)),
            _Op("init", (1, 1, -1)), _Op("init", (1, 1, 2**31)), _Op("ack", (no_id, 1)),
            _Op("ack", (1, no_id)), _Op("fail", (no_id,)), _Op("get", (no_id,)),
            _Op("reset_timeout", (no_id,)), _Op("__contains__", (no_id,)),
            _Op("expired", (-1,)), _Op("oldest", (1.5,)), _Op("merge", ([],)),
            _Op("settle", (1.5, 1)), _Op("settle", (1, -1)),
        ]
    )  # fmt: skip


def _entries(chance: random.Random, roots: list[int], buckets: int, timed: bool) -> Entries:
    """Return random entries for `merge`, with times if ``timed``; in 5 % of calls the opposite."""
    folded = [chance.choice(_FOLDED) for _ in roots]
    tasks, inits, flags = ([row[column] for row in folded] for column in range(3))
    timed = timed == (chance.random() < 0.95)
    first, last = (_int64s(chance.randrange(60) for _ in roots) for _ in range(2))
    return Entries(
        _int64s(roots),
        _int64s(chance.choice(_VALS) for _ in roots),
        _int32s(tasks),
        np.array(inits, np.uint8),
        np.array(flags, np.uint8),
        np.array([chance.randrange(buckets) for _ in roots], np.uint8),
        first if timed else None,
        last if timed else None,
    )


def _state(ledger: Any) -> dict[str, Any]:
    """Return the state of a ledger by name, without growths and sizes, which may differ."""
    clock = ledger.clock
    pending, stats = ledger.entries(), ledger.stats._replace(growths=0)
    writable = [table for table in ledger.tables if table.flags.writeable]
    room = ledger.capacity >= len(ledger) and ledger.nbytes > 0
    return {
        "entries()": sorted(pending),
        "len": len(ledger),
        "stats": stats,
        "writable tables": writable,
        "capacity >= len and nbytes > 0": room,
        "reads of the clock": clock and clock.reads,
    }


def _outcome(call: Callable[[Any], Any], ledger: Any, in_order: bool) -> Any:
    """Return the result or the error of a call in a form that can be compared."""
    try:
        found = call(ledger)
    except Exception as error:
        return f"raised {type(error).__name__}"
    if not hasattr(found, "columns"):
        return found
    types = {name: str(column.dtype) for name, column in found.columns().items()}
    return type(found).__name__, types, list(found) if in_order else sorted(found)


def _same(history: str, call: Callable[[Any], Any], *ledgers: Any) -> None:
    """Raise AssertionError, with all calls so far, if a call has different results."""
    # settle() and expired() return rows in any order; outcomes are in the order of messages.
    in_order = not history.rpartition("\n  ")[2].startswith(("settle", "expired"))
    got, wanted = (_outcome(call, ledger, in_order) for ledger in ledgers)
    if isinstance(got, dict) and isinstance(wanted, dict):
        differ = [name for name in wanted if got[name] != wanted[name]]
        got, wanted = ({name: each[name] for name in differ} for each in (got, wanted))
    if got != wanted:
        raise AssertionError(f"{history}\n  the last call must give {wanted!r}, gave {got!r}")


def _many_roots(factory: Factory) -> None:
    """Init and ack thousands of root ids with patterns; raise AssertionError if one is lost."""
    patterns = [
        range(3_000), range(-3_000, 0), [i << 20 for i in range(3_000)],
        [i * 1_000 for i in range(3_000)], [i << 52 for i in range(3_000)],
        [p << 48 | o << 6 for p in range(30) for o in range(100)],
        [1 << i | 1 << j for i in range(64) for j in range(i + 1)],
        [random.Random(i).getrandbits(64) for i in range(3_000)],
    ]  # fmt: skip
    for pattern in patterns:
        roots = _int64s(pattern)
        vals, tasks = roots * 3 | 1, _int32s(range(len(roots))) % 7
        ledger = factory(capacity=1)
        outcomes = [len(ledger.init_many(roots, vals, tasks)), len(ledger)]
        acked = ledger.ack_many(roots[::-1].copy(), vals[::-1].copy())
        found = (outcomes, acked.root_ids.tolist(), acked.tasks.tolist(), len(ledger))
        wanted = ([0, len(roots)], roots[::-1].tolist(), tasks[::-1].tolist(), 0)
        if found != wanted:
            first = roots[:3].tolist()
            raise AssertionError(
                f"{len(roots)} roots, beginning with {first}: the ledger lost one, or kept one "
                "after its ack"
            )


def _threads(factory: Factory) -> None:
    """Let threads share a ledger; raise AssertionError if a message is lost."""
    ledger = factory(capacity=1)
    roots = np.arange(200)
    edges = [(roots + 1) << (8 * thread) for thread in range(4)]
    outcomes: list[Any] = []

    def work(mine: Int64s) -> None:
        for at in range(0, 200, 10):
            outcomes.extend(ledger.ack_many(roots[at : at + 10], mine[at : at + 10]))

    workers = [threading.Thread(target=work, args=(mine,)) for mine in edges]
    for worker in workers:
        worker.start()
    outcomes.extend(ledger.init_many(roots, np.bitwise_xor.reduce(edges), _int32s([3] * 200)))
    for worker in workers:
        worker.join()
    if sorted(row.root_id for row in outcomes) != roots.tolist() or len(ledger):
        raise AssertionError(
            "four threads shared a ledger, and a message was lost; a ledger must be thread-safe, "
            "for example by a lock in each method"
        )
