"""The peers: other ways to do what `Ledger.apply` does, each with its own best batch.

They keep what is pending from call to call, as a ledger does, but for duckdb, which groups the
stream's beginning by root once and forgets it, which is less.  All complete the same trees, and
those that keep the order of rows complete them in the same order.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from bench.compiled import Unavailable, address, library
from bench.contest import TURN, Contestant, same_rows
from bench.storm_acker import StormAcker
from bench.streams import CALL, Columns, Int32s, Int64s, Stream


class InOrder(Contestant):
    """A contestant whose result is the roots and tasks that completed, in order.

    They lie in columns that are used again at the next turn, and so need no new memory.
    """

    @cached_property
    def out(self) -> tuple[Int64s, Int32s]:
        """Columns for what completes."""
        return np.zeros(TURN, np.int64), np.zeros(TURN, np.int32)

    def prepare(self, rows: slice) -> Columns:
        """Views of the columns."""
        return self.stream.columns(rows)

    def check(self, rows: slice, result: tuple[Int64s, Int32s]) -> None:
        """The same trees in the same order."""
        batch = self.stream.batch(rows)
        np.testing.assert_array_equal(result[0], batch.acked)
        np.testing.assert_array_equal(result[1], batch.spouts)


class Limit(Contestant):
    """The limit of memory bandwidth: limit.c, at its best prefetch distance for this size."""

    name = "LIMIT"
    DISTANCES = (0, 32, 64, 96, 128, 192)

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.c = library("limit.c")
        self.c.limit_open.restype = ctypes.c_void_p
        self.c.limit_sum.restype = ctypes.c_uint64
        self.lines = ctypes.c_uint64(max(1, round(stream.in_flight / 0.6 * 21.3 / 64)))
        self.table = ctypes.c_void_p(self.c.limit_open(self.lines))
        if not self.table:
            raise MemoryError("no memory for LIMIT's table")
        self.ahead = 0

    def age(self) -> None:
        """Find the best distance."""
        rows = slice(max(0, self.stream.aged - TURN), self.stream.aged)
        best = {}
        for ahead in self.DISTANCES:
            self.ahead = ahead
            taken = []
            for _ in range(5):
                start = time.thread_time()
                self.check(rows, self.run(self.prepare(rows)), folded=False)
                taken.append(time.thread_time() - start)
            best[ahead] = statistics.median(taken)
        self.ahead = min(best, key=best.__getitem__)
        self.before = self.sum()

    def prepare(self, rows: slice) -> tuple[Any, ...]:
        """Addresses of the columns: a turn is one call."""
        columns = self.stream.columns(rows)
        return (*map(address, columns), ctypes.c_size_t(len(columns[0])))

    def run(self, prepared: tuple[Any, ...]) -> None:
        """All batches of the turn."""
        size, ahead = ctypes.c_size_t(CALL), ctypes.c_size_t(self.ahead)
        self.c.limit_run(self.table, self.lines, *prepared, size, ahead)

    def sum(self) -> int:
        """The XOR of the table."""
        return int(self.c.limit_sum(self.table, self.lines))

    def check(self, rows: slice, result: None, folded: bool = True) -> None:
        """Nothing comes out of a turn: the table's sum is compared at the end."""
        if folded:
            vals, tasks = self.stream.vals[rows], self.stream.tasks[rows]
            self.before ^= int(np.bitwise_xor.reduce(vals ^ tasks)) & (2**64 - 1)

    def close(self) -> None:
        """Every record of every turn was folded in."""
        assert self.sum() == self.before
        self.c.limit_close(self.table)


class CxxMap(InOrder):
    """An acker over a C++ hash map: maps.cpp, all batches of a turn in one call.

    It is sized up front, for the most that is ever pending, or (``room``) for that many times as
    much.  The tables of boost and absl are powers of two, so that a size may leave them nearly
    full or nearly half empty; boost's, when full, is laid out anew every now and then.
    """

    LIBRARIES = {  # noqa: RUF012
        "boost": (),
        # absl's hash and tables are not header-only.
        "absl": ("absl_raw_hash_set", "absl_hash", "absl_city", "absl_low_level_hash"),
        "std": (),
    }
    NAMES = {  # noqa: RUF012
        "boost": "boost::unordered_flat_map",
        "absl": "absl::flat_hash_map",
        "std": "std::unordered_map",
    }

    ROOMS = {1: "", 2: ", twice the room"}  # noqa: RUF012

    def __init__(self, stream: Stream, kind: str, room: int = 1) -> None:
        self.stream, self.name = stream, self.NAMES[kind] + self.ROOMS[room]
        self.c = library("maps.cpp", (f"MAP_{kind.upper()}",), self.LIBRARIES[kind])
        self.c.map_open.restype = ctypes.c_void_p
        self.c.map_run.restype = ctypes.c_size_t
        self.acker = ctypes.c_void_p(self.c.map_open(ctypes.c_size_t(room * stream.most)))

    def run(self, prepared: Columns) -> tuple[Int64s, Int32s]:
        """The turn, in one call."""
        roots, tasks = self.out
        columns = (address(column) for column in prepared)
        m = self.c.map_run(
            self.acker, *columns, ctypes.c_size_t(len(prepared[0])), address(roots), address(tasks)
        )
        return roots[:m], tasks[:m]

    def close(self) -> None:
        """Free the map."""
        self.c.map_close(self.acker)


def numba_apply() -> Callable[..., tuple[int, int]]:
    """The acker over a numba typed Dict from root to a row of arrays, compiled."""
    try:
        import numba  # noqa: PLC0415 - a peer that need not be there
    except ImportError as error:
        raise Unavailable(f"numba: {error}") from error

    @numba.njit
    def apply(  # type: ignore[no-untyped-def]
        index, vals, spouts, free, used, in_ids, in_vals, in_tasks, out_ids, out_tasks
    ):
        m = 0
        for i in range(len(in_ids)):
            root = in_ids[i]
            if root in index:  # and then [], which is quicker than one get() here
                row = index[root]
            else:
                used += 1
                row = free[used]
                vals[row], spouts[row] = 0, -1
                index[root] = row
            vals[row] ^= in_vals[i]
            if in_tasks[i] >= 0:
                spouts[row] = in_tasks[i]
            if spouts[row] >= 0 and vals[row] == 0:
                out_ids[m], out_tasks[m] = root, spouts[row]
                m += 1
                del index[root]
                free[used] = row
                used -= 1
        return m, used

    return apply


class NumbaDict(InOrder):
    """numba: a typed Dict and three arrays, in calls of 8192."""

    name = "numba typed Dict"

    def __init__(self, stream: Stream) -> None:
        self.apply = numba_apply()
        from numba import types  # noqa: PLC0415
        from numba.typed import Dict  # noqa: PLC0415

        room = 2 * stream.in_flight
        self.stream = stream
        self.index = Dict.empty(types.int64, types.int64, n_keys=room)
        self.state = np.empty(room, np.int64), np.empty(room, np.int32), np.arange(room)
        self.used = -1

    def run(self, prepared: Columns) -> tuple[Int64s, Int32s]:
        """Call after call."""
        (roots, tasks), m = self.out, 0
        for at in range(0, len(prepared[0]), CALL):
            batch = (column[at : at + CALL] for column in prepared)
            made, self.used = self.apply(
                self.index, *self.state, self.used, *batch, roots[m:], tasks[m:]
            )
            m += made
        return roots[:m], tasks[:m]


# ---- grouping by root ------------------------------------------------------------------------


def duckdb_group() -> Callable[..., Columns]:
    """A duckdb GROUP BY on one thread."""
    try:
        import duckdb  # noqa: PLC0415 - a peer that need not be there
    except ImportError as error:
        raise Unavailable(f"duckdb: {error}") from error
    connection = duckdb.connect(config={"threads": 1})
    query = "SELECT root, bit_xor(val) AS val, max(task) AS task FROM records GROUP BY root"

    def group(roots: Int64s, vals: Int64s, tasks: Int32s) -> Columns:
        connection.register("records", {"root": roots, "val": vals, "task": tasks})
        grouped = connection.execute(query).fetchnumpy()
        return tuple(np.asarray(grouped[name]) for name in ("root", "val", "task"))

    return group


class DuckDb(Contestant):
    """One group-by of the stream's first rows; it keeps nothing for later ones."""

    name = "duckdb, one-shot"
    lead_in = 0  # all that it reads it streams through
    MOST_ROWS = {1_000: 2_000_000, 100_000: 3_000_000, 1_000_000: 10_000_000}  # noqa: RUF012

    def __init__(self, stream: Stream) -> None:
        self.stream, self.group = stream, duckdb_group()

    def rows(self, turn: int, calls: int) -> slice:
        """The same rows each time: the first ones, when nothing is pending yet."""
        return slice(
            0, min(len(self.stream), self.MOST_ROWS.get(self.stream.in_flight, 20_000_000))
        )

    def age(self) -> None:
        """Once on a few rows, so that what is compiled or imported on first use is there."""
        self.check(slice(0, CALL), self.run(self.prepare(slice(0, CALL))))

    def prepare(self, rows: slice) -> Columns:
        """Views of the columns."""
        return self.stream.columns(rows)

    def run(self, prepared: Columns) -> Int64s:
        """The roots that complete."""
        roots, vals, tasks = self.group(*prepared)
        return roots[(vals == 0) & (tasks >= 0)]

    def check(self, rows: slice, result: Int64s) -> None:
        """The same trees; groups have no order."""
        same_rows(result, self.stream.batch(rows).acked)


# ---- Storm -----------------------------------------------------------------------------------


class Storm(Contestant):
    """Storm's acker in its JVM, which times itself; `run` returns its seconds.

    ``fresh``: a tuple and its values are made for each message, as in a worker of Storm's;
    ``reused``: one tuple serves for all.
    """

    def __init__(self, stream: Stream, tuples: str) -> None:
        self.stream, self.name = stream, f"Storm's acker, {tuples} tuples"
        self.acker = StormAcker(stream, tuples)

    def age(self) -> None:
        """The driver has done so."""

    def run(self, prepared: slice) -> float:
        """One command to the JVM."""
        return self.acker.run(prepared)

    def check(self, rows: slice, result: float) -> None:
        """The same trees in the same order."""
        np.testing.assert_array_equal(self.acker.acked(), self.stream.batch(rows).acked)

    def close(self) -> None:
        """End the JVM."""
        self.acker.close()
