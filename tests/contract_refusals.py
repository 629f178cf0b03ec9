"""Refused input: the error's type, the argument that it names, and that nothing was applied.

Each case returns the words of the refusals, which must be the same in both backends.
"""

from __future__ import annotations

import array
import ctypes
import datetime
import functools
import operator
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np
from ledger_scripts import Clock, Factory, entries_of, expect, int32s, int64s, snapshot

from ackcore._records import ACK, RESET

#: What is no column of two 64-bit integers, and the error that says so.
BAD_ID_COLUMNS: dict[str, tuple[Any, type[Exception]]] = {
    "a list": ([1, 2], TypeError),
    "a tuple": ((1, 2), TypeError),
    "a range": (range(2), TypeError),
    "an int": (7, TypeError),
    "None": (None, TypeError),
    "a string": ("12", TypeError),
    "bytes": (b"12", TypeError),
    "a bytearray": (bytearray(16), TypeError),
    "strings": (np.array(["1", "2"]), TypeError),
    "bytes strings": (np.array([b"1", b"2"]), TypeError),
    "floats": (np.array([1.0, 2.0]), TypeError),
    "complex numbers": (np.array([1j, 2j]), TypeError),
    "bools": (np.array([True, False]), TypeError),
    "objects": (np.array([1, 2], dtype=object), TypeError),
    "times": (np.array([1, 2], "datetime64[ms]"), TypeError),
    "durations": (np.array([1, 2], "timedelta64[ms]"), TypeError),
    "datetimes": (np.array([datetime.datetime(2020, 1, 1)] * 2), TypeError),
    "records": (np.zeros(2, [("id", np.int64)]), TypeError),
    "32 bits": (np.array([1, 2], np.int32), TypeError),
    "16 bits": (np.array([1, 2], np.uint16), TypeError),
    "foreign byte order": (np.array([1, 2], np.dtype(np.int64).newbyteorder()), TypeError),
    "masked": (np.ma.masked_array(np.array([1, 2], np.int64), [False, True]), TypeError),
    "array of 32 bits": (array.array("i", [1, 2]), TypeError),
    "array of doubles": (array.array("d", [1, 2]), TypeError),
    "ctypes of 32 bits": ((ctypes.c_int32 * 2)(1, 2), TypeError),
    "memoryview of bytes": (memoryview(bytes(16)), TypeError),
    "memoryview of bools": (memoryview(bytes(2)).cast("?"), TypeError),
    "no dimensions": (np.array(1, np.int64), ValueError),
    "two dimensions": (np.zeros((2, 1), np.int64), ValueError),
    "two dimensions of a memoryview": (memoryview(bytes(16)).cast("q", (1, 2)), ValueError),
    "a stride": (np.arange(4, dtype=np.int64)[::2], ValueError),
    "backwards": (np.arange(2, dtype=np.int64)[::-1], ValueError),
    "a strided memoryview": (memoryview(bytes(32)).cast("q")[::2], ValueError),
    "broadcast": (np.broadcast_to(np.int64(1), 2), ValueError),
    "not aligned": (np.frombuffer(bytes(17), np.int64, 2, 1), ValueError),
}

#: The same for a column of two tasks.
BAD_TASK_COLUMNS: dict[str, tuple[Any, type[Exception]]] = {
    "a list": ([1, 2], TypeError),
    "64 bits": (np.array([1, 2], np.int64), TypeError),
    "unsigned": (np.array([1, 2], np.uint32), TypeError),
    "floats": (np.array([1, 2], np.float32), TypeError),
    "array of 16 bits": (array.array("h", [1, 2]), TypeError),
    "array of unsigned": (array.array("I", [1, 2]), TypeError),
    "foreign byte order": (np.array([1, 2], np.dtype(np.int32).newbyteorder()), TypeError),
    "a stride": (np.arange(4, dtype=np.int32)[::2], ValueError),
    "two dimensions": (np.zeros((1, 2), np.int32), ValueError),
}

#: What is no 64-bit integer, and the error that says so.
BAD_IDS: dict[str, tuple[Any, type[Exception]]] = {
    "a float": (1.0, TypeError),
    "a string": ("1", TypeError),
    "bytes": (b"1", TypeError),
    "None": (None, TypeError),
    "a column": (np.zeros(2, np.int64), TypeError),
    "a numpy float": (np.float64(1), TypeError),
    "65 bits": (2**64, OverflowError),
    "below 64 bits": (-(2**63) - 1, OverflowError),
    "far off": (10**30, OverflowError),
}

#: A call of a ledger; and with it the error that it must raise and a word of that.
Call = Callable[[Any], Any]
Refusal = tuple[type[Exception], str, Call]


def refusals() -> dict[str, Refusal]:
    """Every call that is refused, by name."""
    calls: dict[str, Refusal] = {}
    two, tasks = int64s([1, 2]), int32s([4, ACK])
    for what, (bad, error) in BAD_ID_COLUMNS.items():
        for name, call in _with_a_bad_id_column(bad, two, tasks).items():
            calls[f"{name}, {what}"] = (error, name.partition(" of ")[0], call)
    for what, (bad, error) in BAD_TASK_COLUMNS.items():
        for method in ("apply", "init_many", "fold"):
            call = methodcaller(method, two, two, bad)
            calls[f"tasks of {method}, {what}"] = (error, "tasks", call)
    for what, (bad, error) in BAD_IDS.items():
        for name, call in _with_a_bad_id(bad).items():
            calls[f"{name}, {what}"] = (error, name.partition(" of ")[0], call)
    calls.update(_bad_lengths(two, tasks))
    calls.update(_bad_numbers(two))
    calls.update(_deep_in_columns())
    calls.update(_bad_entries())
    return calls


def _with_a_bad_id_column(bad: Any, two: Any, tasks: Any) -> dict[str, Call]:
    inits = int32s([4, 5])
    calls: dict[str, Call] = {
        "root_ids of apply": methodcaller("apply", bad, two, tasks),
        "vals of apply": methodcaller("apply", two, bad, tasks),
        "root_ids of init_many": methodcaller("init_many", bad, two, inits),
        "init_vals of init_many": methodcaller("init_many", two, bad, inits),
        "root_ids of ack_many": methodcaller("ack_many", bad, two),
        "ack_vals of ack_many": methodcaller("ack_many", two, bad),
        "root_ids of fail_many": methodcaller("fail_many", bad),
        "root_ids of reset_timeout_many": methodcaller("reset_timeout_many", bad),
        "root_ids of fold": methodcaller("fold", bad, two, tasks),
        "vals of fold": methodcaller("fold", two, bad, tasks),
    }
    if bad is not None:  # None is no column: fold then reads the clock
        calls["times_ms of fold"] = methodcaller("fold", two, two, tasks, bad)
    return calls


def _with_a_bad_id(bad: Any) -> dict[str, Call]:
    return {
        "root_id of init": methodcaller("init", bad, 1, 1),
        "init_val of init": methodcaller("init", 1, bad, 1),
        "root_id of ack": methodcaller("ack", bad, 1),
        "ack_val of ack": methodcaller("ack", 1, bad),
        "root_id of fail": methodcaller("fail", bad),
        "root_id of reset_timeout": methodcaller("reset_timeout", bad),
        "root_id of get": methodcaller("get", bad),
        "root_id of in": methodcaller("__contains__", bad),
    }


def _bad_lengths(two: Any, tasks: Any) -> dict[str, Refusal]:
    three, no_tasks = int64s([1, 2, 3]), int32s([])
    return {
        "lengths of apply, vals": (
            ValueError, "vals", methodcaller("apply", two, three, tasks)),
        "lengths of apply, tasks": (
            ValueError, "tasks", methodcaller("apply", two, two, no_tasks)),
        "lengths of init_many, init_vals": (
            ValueError, "init_vals", methodcaller("init_many", two, three, tasks)),
        "lengths of init_many, tasks": (
            ValueError, "tasks", methodcaller("init_many", two, two, no_tasks)),
        "lengths of ack_many": (
            ValueError, "ack_vals", methodcaller("ack_many", two, three)),
        "lengths of fold, vals": (
            ValueError, "vals", methodcaller("fold", two, three, tasks)),
        "lengths of fold, tasks": (
            ValueError, "tasks", methodcaller("fold", two, two, no_tasks)),
        "lengths of fold, times_ms": (
            ValueError, "times_ms", methodcaller("fold", two, two, tasks, three)),
    }  # fmt: skip


def _bad_numbers(two: Any) -> dict[str, Refusal]:
    unknown, acks = int32s([4, RESET - 1]), int32s([4, ACK])
    lowest = int32s([-(2**31), 4])
    return {
        "unknown kind in apply": (ValueError, "row 1", methodcaller("apply", two, two, unknown)),
        "lowest kind in apply": (ValueError, "row 0", methodcaller("apply", two, two, lowest)),
        "unknown kind in fold": (ValueError, "row 1", methodcaller("fold", two, two, unknown)),
        "an ACK in init_many": (ValueError, "tasks", methodcaller("init_many", two, two, acks)),
        "negative task": (ValueError, "task", methodcaller("init", 1, 1, -1)),
        "task of 32 bits": (ValueError, "task", methodcaller("init", 1, 1, 2**31)),
        "task beyond 64 bits": (ValueError, "task", methodcaller("init", 1, 1, 2**70)),
        "task, a float": (TypeError, "task", methodcaller("init", 1, 1, 1.0)),
        "limit, negative": (ValueError, "limit", methodcaller("expired", -1)),
        "limit, a float": (TypeError, "limit", methodcaller("expired", 1.0)),
        "n, negative": (ValueError, "n ", methodcaller("oldest", -1)),
        "n, a string": (TypeError, "n ", methodcaller("oldest", "1")),
        "now_ms, a float": (TypeError, "now_ms", methodcaller("settle", 1.0, 5)),
        "now_ms, too far": (OverflowError, "now_ms", methodcaller("settle", 2**63, 5)),
        "timeout_ms, a float": (TypeError, "timeout_ms", methodcaller("settle", 1, 5.0)),
        "timeout_ms, negative": (ValueError, "timeout_ms", methodcaller("settle", 1, -1)),
    }  # fmt: skip


def _deep_in_columns() -> dict[str, Refusal]:
    """Kinds are looked at many at a time: wherever a bad one is, it is found."""

    def calls(n: int, row: int) -> dict[str, Refusal]:
        ids, kinds, tasks = np.arange(n), np.full(n, ACK, np.int32), np.zeros(n, np.int32)
        kinds[row], tasks[row] = RESET - 1, ACK
        where, word = f"in row {row} of {n}", f"row {row}"
        return {
            f"apply, {where}": (ValueError, word, methodcaller("apply", ids, ids, kinds)),
            f"fold, {where}": (ValueError, word, methodcaller("fold", ids, ids, kinds)),
            f"init_many, {where}": (ValueError, word, methodcaller("init_many", ids, ids, tasks)),
        }

    found = [calls(40, row) for row in range(40)]
    return functools.reduce(operator.or_, [*found, calls(100_000, 0), calls(100_000, 99_999)])


def _bad_entries() -> dict[str, Refusal]:
    def merging(row: tuple[Any, ...]) -> Call:
        return methodcaller("merge", entries_of([(9, 1, 4, 1, 0, 0, 5, 5), row]))

    def without(column: str, value: Any = None) -> Call:
        def call(ledger: Any) -> Any:
            entries = entries_of([(9, 1, 4, 1, 0, 0, 5, 5), (8, 1, 4, 1, 0, 0, 5, 5)])
            setattr(entries, column, value)
            return ledger.merge(entries)

        return call

    return {
        "merge, a tuple": (TypeError, "entries", methodcaller("merge", (1, 2))),
        "merge, a string": (TypeError, "entries", methodcaller("merge", "entries")),
        "merge, task -2": (ValueError, "tasks", merging((7, 1, -2, 0, 0, 0, 5, 5))),
        "merge, inits 3": (ValueError, "inits", merging((7, 1, 4, 3, 0, 0, 5, 5))),
        "merge, a task without init": (ValueError, "inits", merging((7, 1, 4, 0, 0, 0, 5, 5))),
        "merge, an init without task": (ValueError, "inits", merging((7, 1, -1, 1, 0, 0, 5, 5))),
        "merge, flags 4": (ValueError, "flags", merging((7, 1, 4, 1, 4, 0, 5, 5))),
        "merge, tasks differ after one": (ValueError, "flags", merging((7, 1, 4, 1, 2, 0, 5, 5))),
        "merge, tasks differ after none": (ValueError, "flags", merging((7, 1, -1, 0, 3, 0, 5, 5))),
        "merge, too old": (ValueError, "ages", merging((7, 1, 4, 1, 0, 3, 5, 5))),
        "merge, far too old": (ValueError, "ages", merging((7, 1, 4, 1, 0, 255, 5, 5))),
        "merge, one time only": (ValueError, "last_ms", without("last_ms")),
        "merge, no vals": (TypeError, "vals", without("vals")),
        "merge, wide flags": (TypeError, "flags", without("flags", int64s([0, 0]))),
        "merge, signed ages": (TypeError, "ages", without("ages", np.zeros(2, np.int8))),
        "merge, wide tasks": (TypeError, "tasks", without("tasks", int64s([4, 4]))),
        "merge, short vals": (ValueError, "vals", without("vals", int64s([1]))),
        "merge, no times": (
            ValueError,
            "clock",
            methodcaller("merge", entries_of([(7, 1, 4, 1, 0, 0, None, None)])),
        ),
    }  # fmt: skip


#: Constructor arguments that are refused.
BAD_OPTIONS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no capacity": (ValueError, "capacity", {"capacity": 0}),
    "negative capacity": (ValueError, "capacity", {"capacity": -1}),
    "a capacity that no machine has": (MemoryError, "capacity", {"capacity": 2**62}),
    "capacity of 65 bits": (MemoryError, "capacity", {"capacity": 2**64}),
    "capacity, a float": (TypeError, "capacity", {"capacity": 1.0}),
    "capacity, a bool": (TypeError, "capacity", {"capacity": True}),
    "max_entries, a bool": (TypeError, "max_entries", {"max_entries": True}),
    "one bucket": (ValueError, "buckets", {"buckets": 1}),
    "127 buckets": (ValueError, "buckets", {"buckets": 127}),
    "buckets, a string": (TypeError, "buckets", {"buckets": "3"}),
    "clock, an int": (TypeError, "clock", {"clock": 5}),
    "no entries": (ValueError, "max_entries", {"max_entries": 0}),
    "max_entries, a float": (TypeError, "max_entries", {"max_entries": 1.5}),
    "seed, a string": (TypeError, "seed", {"seed": "secret"}),
    "seed of 65 bits": (OverflowError, "seed", {"seed": 2**64}),
}

#: What a clock may not return.
BAD_TIMES: dict[str, tuple[type[Exception], Any]] = {
    "a float": (TypeError, 1.0),
    "None": (TypeError, None),
    "a string": (TypeError, "1"),
    "too far": (OverflowError, 2**63),
    "too far back": (OverflowError, -(2**63) - 1),
}


def refused(call: Callable[[], Any], error: type[Exception], word: str, what: str) -> str:
    """Return the words in which a call is refused; they must have ``word`` among them."""
    try:
        call()
    except error as refusal:
        # A subclass would be another type: LedgerFull is a RuntimeError, UnicodeError a ValueError.
        expect(type(refusal), error, what)
        expect(word in str(refusal), True, f"{what}: {str(refusal)!r} names {word!r}")
        return str(refusal)
    except Exception as refusal:
        raise AssertionError(f"{what}: got {refusal!r}, want {error.__name__}") from refusal
    raise AssertionError(f"{what} was not refused")


def check_refusals(factory: Factory) -> list[str]:
    """Each refused call leaves the ledger as it was, and the clock unread."""
    clock = Clock(5)
    ledger = factory(clock=clock)
    ledger.apply(int64s([1, 2, 1]), int64s([5, 6, 7]), int32s([3, ACK, ACK]))
    before, reads, words = snapshot(ledger), clock.reads, []
    for what, (error, word, call) in refusals().items():
        words.append(refused(functools.partial(call, ledger), error, word, what))
        expect(snapshot(ledger), before, f"the ledger after {what}")
    expect(clock.reads, reads, "reads of the clock by calls that are refused")
    return words


def check_refused_options(factory: Factory) -> list[str]:
    """Options are checked when a ledger is made."""
    return [
        refused(functools.partial(factory, **options), error, word, what)
        for what, (error, word, options) in BAD_OPTIONS.items()
    ]


def check_refused_times(factory: Factory) -> list[str]:
    """A clock that returns anything but milliseconds is refused, before the first row."""
    words = []
    for what, (error, time) in BAD_TIMES.items():
        ledger = factory(clock=Clock(time))
        for call in (
            methodcaller("ack", 7, 1),
            methodcaller("apply", int64s([7]), int64s([1]), int32s([4])),
            methodcaller("fold", int64s([7]), int64s([1]), int32s([4])),
            methodcaller("settle", None, 5),
        ):
            words.append(refused(functools.partial(call, ledger), error, "clock", what))
        expect(len(ledger), 0, f"{what}: pending")
    return words


def check_no_times_without_a_clock(factory: Factory) -> None:
    """A ledger without a clock keeps no times, and says so."""
    ledger = factory()
    timed = entries_of([(7, 1, 4, 1, 0, 0, 5, 5)])
    one = int64s([7])
    for what, call in {
        "settle": lambda: ledger.settle(10, 5),
        "merge": lambda: ledger.merge(timed),
        "fold": lambda: ledger.fold(one, one, int32s([4]), one),
        "from_entries": lambda: type(ledger).from_entries(timed),
    }.items():
        refused(call, ValueError, "clock", what)
    untimed = entries_of([(7, 1, 4, 1, 0, 0, None, None)])
    timed_from = functools.partial(type(ledger).from_entries, clock=Clock())
    refused(functools.partial(timed_from, untimed), ValueError, "clock", "the reverse")
    expect(len(ledger), 0, "pending")
    expect(ledger.settle(10).root_ids.tolist(), [], "a time without a time-out is fine")
